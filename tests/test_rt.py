"""model_rt and rt_wavefront: the schedules are one function; its neighbours; precision, memory and CUDA graphs."""
import itertools
import math

import pytest
import torch

from lab import bench
import model_rt
import rt_wavefront
import runs
from conftest import tiny
from kernel_cases import INTERPRETED, Memory, assert_close, few
from common.config import TrainConfig
from test_models import assert_cache_is_forward, assert_same, outputs_and_gradients, rms, tokens


def rt(schedule, **sizes):
    """The tiny float64 RT of conftest with this schedule; equal sizes give equal weights."""
    return tiny("rt", schedule=schedule, **sizes)


# ---- one function ----

SWITCHES = [dict(pos="rope", n_mlp=7), dict(pos="none", tie_embeddings=True), dict(qk_norm="full"), dict(n_kv_head=1),
            dict(n_kv_head=2, qk_norm="full", pos="rope")]
BLOCKS = [dict(kv_norm=False, qk_norm="full"), dict(block=5, pos="rope", n_kv_head=2)]  # tiled
CASES = [*((T, dict(n_layer=L), [1, 8, 64]) for T, L in ((1, 3), (2, 3), (63, 3), (100, 1))),
         *((T, switch, [10] * (switch in SWITCHES)) for T in (4, 37) for switch in SWITCHES + BLOCKS)]


@pytest.mark.parametrize("T, sizes, chunks", CASES, ids=str)
def test_naive_is_tiled_is_wavefront(T, sizes, chunks):
    sizes, x = {"n_layer": 3, **sizes}, tokens(2, T + 1)
    want = outputs_and_gradients(rt("naive", **sizes), x)
    for schedule, chunk in [("tiled", 1), *(("wavefront", chunk) for chunk in chunks)]:
        assert_same(outputs_and_gradients(rt(schedule, chunk=chunk, **sizes), x), want)


def test_gradcheck():
    """The wavefront's hand-written backward against finite differences, in x and every stacked weight."""
    model = rt("wavefront", n_layer=2, n_embd=4, n_head=2, n_kv_head=1, n_mlp=5, qk_norm="full", chunk=2)
    x = torch.randn(2, 5, 4, dtype=torch.float64, requires_grad=True)
    weights = [w.detach().requires_grad_() for w in rt_wavefront.stack_weights(model.cfg, model.blocks)]
    layers = lambda x, *w: rt_wavefront.Layers.apply(model.cfg, x, *w)
    assert torch.autograd.gradcheck(layers, (x, *weights), fast_mode=True)


@pytest.mark.parametrize("sizes, forward, prompt", [
    (dict(fast=True), "wavefront", "wavefront"), (dict(fast=True, block=2), "tiled", "token"),
    (dict(fast=False), "naive", "token"), (dict(fast=False, schedule="wavefront"), "wavefront", "wavefront")])
def test_the_schedule_that_was_asked_for_runs(monkeypatch, sizes, forward, prompt):
    """fast picks, schedule overrides; a prompt goes through the wavefront too, or token by token."""
    ran, model = [], tiny("rt", **sizes)
    for owner, name, schedule in ((rt_wavefront, "run_layers", "wavefront"), (rt_wavefront, "prefill", "wavefront"),
                                  (model_rt, "layer_tiled", "tiled"), (model_rt.Layer, "forward", "naive"),
                                  (model_rt.Model, "step", "token")):
        spy = lambda *a, schedule=schedule, f=getattr(owner, name): (ran.append(schedule), f(*a))[1]
        monkeypatch.setattr(owner, name, spy)
    for cache, schedule in ((None, forward), (model.init_cache(2, 20), prompt)):
        ran.clear()
        model(tokens(2, 20), cache=cache)
        assert set(ran) == {schedule}


def test_every_query_meets_every_earlier_key_once(monkeypatch):
    """Algorithm 1, counted in the code that runs."""
    met, merge_tile = [], model_rt.merge_tile
    monkeypatch.setattr(model_rt, "merge_tile", lambda *a: (met.append(a[5:7]), merge_tile(*a))[1])
    model = rt("tiled", n_layer=1, n_embd=2, n_head=1)
    for T in [*range(1, 20), 64, 65, 100]:
        met.clear()
        with torch.no_grad():
            model(tokens(1, T))
        table = torch.zeros(T, T)
        for queries, keys in met:
            table[queries.long()[:, None], keys.long()] += 1
        assert torch.equal(table, torch.ones(T, T).tril(-1))


def test_the_naive_loop_copies_keys_only_for_autograd(monkeypatch):
    """Without gradients keys are written into a buffer; with them each position appends to four lists of them."""
    sizes, cat, model = [], torch.cat, rt("naive", n_layer=1)
    monkeypatch.setattr(torch, "cat", lambda tensors, *a: (sizes.append(len(tensors)), cat(tensors, *a))[1])
    with torch.no_grad():
        model(tokens(1, 30))
    assert sizes == [30]
    model(tokens(1, 30))
    assert sorted(sizes[1:]) == 4 * 30 * [2] + [30]


@pytest.mark.parametrize("schedule", ["naive", "tiled"])
@pytest.mark.parametrize("pos", ["alibi", "rope", "none"])
def test_one_block_of_all_positions_is_the_plain_transformer(schedule, pos):
    """b = T (section 9): logits, loss, every gradient, and decoding are model_gpt's."""
    gpt, x = tiny("gpt", mlp="gelu", pos=pos, n_kv_head=2, tie_embeddings=False), tokens(2, 51)
    model = rt(schedule, block=100, pos=pos, n_kv_head=2)
    renamed = lambda named: {name.replace(".attn.", ".").replace(".mlp.", "."): w for name, w in named.items()}
    model.load_state_dict(renamed(gpt.state_dict()))
    logits, loss, grads = outputs_and_gradients(gpt, x)
    assert_same(outputs_and_gradients(model, x), (logits, loss, renamed(grads)))
    assert_cache_is_forward(model, [37, 20], [16, 1, 1, 19], 1e-10)


@pytest.mark.parametrize("schedule", ["naive", "tiled"])
def test_theorem_4_1(schedule):
    """Uniform attention, no norms, no MLP: dy_t/dx_s = (A/t) prod_{j=s}^{t-1} (I + A/j) for s < t; a plain Transformer
    has A/t alone."""
    T, d = 7, 5
    torch.manual_seed(0)
    cfg = model_rt.Config(n_embd=d, n_head=1, n_layer=1, pos="none", schedule=schedule, vocab_size=5)
    model = model_rt.Model(cfg).double()
    block, I = model.blocks[0], torch.eye(d).double()
    block.norm1 = block.norm2 = torch.nn.Identity()
    with torch.no_grad():
        block.wq.weight.zero_(), block.w_down.weight.zero_()
    A, x = (block.wo.weight @ block.wv.weight).detach(), torch.randn(T, d, dtype=torch.float64)
    J = torch.autograd.functional.jacobian(lambda x: model.layers(x[None])[0], x).transpose(1, 2)   # (t, s, d, d)
    for t in range(1, T + 1):
        for s in range(1, t + 1):
            want = A / t + (I if s == t else 0)
            for j in range(s, t):
                want = want @ (I + A / j)
            assert torch.allclose(J[t - 1, s - 1], want, rtol=0, atol=1e-12)


# ---- precision and memory ----

@pytest.mark.parametrize("pos, qk_norm", [("alibi", "none"), ("none", "full")])
def test_bfloat16_attention_is_rounded_nowhere_inside(monkeypatch, pos, qk_norm):
    """A chunk's attention from bfloat16 q, k, v, in training forward and backward, a prefill and one that goes on,
    against the definition's softmax in float64. Six heads: their slopes are no powers of two, and would be rounded."""
    chunks = []

    class Spied(rt_wavefront.ChunkAttention):
        def __init__(self, run, *given):
            super().__init__(run, *given)
            self.given, self.found = [u.clone() for u in given], []
            chunks.append(self)

        def read(self, i):
            self.found.append(super().read(i))
            return self.found[-1]

        def recompute(self, *pairs):
            self.found = super().recompute(*pairs)
            return self.found
    monkeypatch.setattr(rt_wavefront, "ChunkAttention", Spied)
    sizes = dict(n_head=6, n_embd=48, n_layer=2, chunk=64, block_size=200)
    model, x = tiny("rt", pos=pos, qk_norm=qk_norm, **sizes).float(), tokens(2, 200)
    with torch.autocast("cpu", torch.bfloat16):
        model(x, x)[1].backward()
        with torch.no_grad():
            cache = model.init_cache(2, 200)
            for part in x.split(100, 1):
                model(part, cache=cache)
    assert cache.k[0].dtype == torch.bfloat16 and any(isinstance(c.found, tuple) for c in chunks)
    slopes = [2 ** (-8 * h / 6) for h in range(1, 7)] if pos == "alibi" else [0.0] * 6
    for c in chunks:
        assert c.given[0].dtype == torch.bfloat16
        q, out, lse = (u.double() for u in c.given)
        forward, (C, D) = isinstance(c.found, list), q.shape[3:]
        k, v = (u.double().reshape(q.shape) for u in (c.k, c.v.mT if forward else c.v))
        distance = torch.arange(C)[:, None] - torch.arange(C)
        s = q @ k.mT / math.sqrt(D) - torch.tensor(slopes, dtype=torch.float64)[:, None, None] * distance
        p = torch.cat([lse[..., None], s.masked_fill(distance <= 0, -math.inf)], -1).softmax(-1)
        want = p[..., :1] * out + p[..., 1:] @ v
        a = torch.stack([u.view(*q.shape[:3], D) for u in c.found], 3) if forward else c.found[0]
        assert a.dtype == torch.float32 and rms(a - want) < 2e-6 * rms(want)


def test_saved_for_the_backward_are_x_and_y_of_each_layer():
    model, x = rt("wavefront", n_layer=3), torch.randn(2, 70, 32, dtype=torch.float64, requires_grad=True)
    weights = [w.detach() for w in rt_wavefront.stack_weights(model.cfg, model.blocks)]
    with Memory() as memory:
        memory.known |= {w.untyped_storage()._cdata for w in (x, *weights)}
        y = rt_wavefront.Layers.apply(model.cfg, x, *weights)
    tables = 20_000                                         # positions, the biases inside a chunk
    assert memory.now < 8 * y.numel() * (3 + 2) * 1.05 + tables, "more is alive than x, every y, and the result's copy"


@pytest.mark.parametrize("schedule, T, block", [("wavefront", 512, 1), ("tiled", 512, 1024)])
def test_memory_grows_linearly_with_the_length(schedule, T, block):
    """Forward and backward, the sum of all tensors and the largest one: a T x T tensor would grow four times."""
    def peak(T):
        torch.manual_seed(0)
        model = model_rt.Model(model_rt.Config(n_layer=2, n_embd=16, n_head=2, schedule=schedule, block=block))
        x = torch.randn(1, T, 16, requires_grad=True)
        with Memory() as memory:
            model.layers(x).sum().backward()
        return memory
    short, long = peak(T // 2), peak(T)
    assert long.largest < 2.3 * short.largest and long.peak < 2.3 * short.peak


def test_a_run_may_change_its_schedule(data_dir, tmp_path):
    runs.run("rt", tmp_path, data_dir, "max_steps=2")
    resumed = runs.run("rt", tmp_path, data_dir, "resume=true", "max_steps=3", "schedule=tiled")
    assert resumed.step == 3 and resumed.model.cfg.schedule_used == "tiled"


def test_initial_weights():
    """Spread as the paper's: 1/sqrt(d), cut off at 3 sigma; into the residual stream less, and less the deeper."""
    torch.manual_seed(0)
    for name, p in model_rt.Model(model_rt.Config(n_layer=3, n_embd=256, n_head=4)).named_parameters():
        if p.dim() == 2:
            sigma = 1 / 16
            if name.endswith(("wo.weight", "w_down.weight")):
                sigma = 1 / math.sqrt(2 * p.size(1) * (int(name.split(".")[1]) + 1))
            assert 0.97 < p.std().item() / sigma < 1.0 and p.abs().max() <= 3 * sigma, name     # the cut takes 1.3 %


def test_the_bench_runs(capsys):
    """Both tables of bench.py rt, at tiny sizes on a CPU, and the physical floor of the paper's layer."""
    cpu, train = torch.device("cpu"), TrainConfig(model="rt", batch_size=2)
    model = model_rt.Model(model_rt.Config(n_layer=2, n_embd=16, n_head=2, block_size=12))
    bench.bench_rt(model, train, cpu, rounds=1, lengths=(8, 16))
    bench.bench_rt_layers(model.cfg, train, cpu, (2,), 1)
    out = capsys.readouterr().out
    assert "T    16" in out and "grows as T^e" in out and "does not fit" not in out
    counts = [out.count(words) for words in (" naive ", " tiled ", "x wavefront", "decoding", "tokens/s")]
    assert counts == [4, 4, 8, 2, 10]
    assert 2.2 < bench.rt_floor(model_rt.Config(n_embd=1024, n_head=16, block_size=512), 8) < 2.8


def test_graphs_are_recorded_and_reused(monkeypatch):
    """The second call of a shape records, later ones replay with new inputs; here the function itself stands for its
    graph. Only the last few graphs are kept."""
    monkeypatch.setattr(rt_wavefront, "recordable", lambda x, dtype: True)
    monkeypatch.setattr(rt_wavefront, "Graph", lambda run, function, inputs: function)
    monkeypatch.setattr(rt_wavefront, "GRAPHS", {})
    plain, graphed = (rt("wavefront", cuda_graphs=on).train() for on in (False, True))
    for seed, T in ((1, 20), (2, 20), (3, 33), (4, 20), (5, 33)):
        x = tokens(2, T + 1, seed=seed)
        assert_same(outputs_and_gradients(graphed, x), outputs_and_gradients(plain, x))
    graphs = rt_wavefront.GRAPHS
    assert len(graphs) == 4 and all(graphs.values())
    for T in range(1, 12):
        graphed(tokens(2, T))
    assert len(graphs) == 8 and not any(graphs.values()), "the first call of a shape is not recorded"


# ---- on a GPU, and in interpreted_kernels.py ----

@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_graphs_replay_the_same(dtype):
    """Recorded and replayed as CUDA graphs, and run kernel by kernel: the same bits, in every micro-batch, also where
    another shape came between and all free memory was overwritten."""
    def results(graphs):
        model = tiny("rt", cuda_graphs=graphs).float().cuda().train()
        found = []
        for seed, T in ((1, 50), (2, 50), (3, 33), (4, 50)):
            with torch.autocast("cuda", torch.bfloat16, enabled=dtype == torch.bfloat16):
                found.append(outputs_and_gradients(model, tokens(2, T + 1, seed=seed).cuda()))
            torch.cuda.empty_cache()
            torch.full((1 << 28,), math.nan, device="cuda")
        return found
    rt_wavefront.GRAPHS.clear()
    plain, replayed = results(False), results(True)
    assert sum(g is not False for g in rt_wavefront.GRAPHS.values()) == 2
    for a, b in zip(plain, replayed):
        assert torch.equal(a[0], b[0]) and all(rms(a[2][n] - b[2][n]) <= 1e-6 * rms(a[2][n]) for n in a[2])


@pytest.mark.parametrize("device, dtype, tolerance", [("cpu", torch.float32, 1e-5)] if INTERPRETED else [
    pytest.param("cuda", torch.float64, 1e-9, marks=pytest.mark.gpu),
    pytest.param("cuda", torch.float32, 1e-3, marks=pytest.mark.gpu)])
@pytest.mark.parametrize("case", few([("tiled", dict(block=3)), *itertools.product(
    ("wavefront", "tiled"), (dict(pos="rope", n_kv_head=1, qk_norm="full"), {}))], 2), ids=str)
def test_schedules_agree_on_the_kernels(case, device, dtype, tolerance):
    """CUDA in float64: the reference implementations; float32 without tf32, and interpreted_kernels.py: Triton."""
    schedule, sizes = case
    small, T = (dict(n_embd=16, n_head=2, chunk=4), 10) if INTERPRETED else ({}, 71)
    x = tokens(2, T).to(device)
    (want, _, grads), (found, _, more) = (
        outputs_and_gradients(rt(name, **small, **sizes).to(device, kind), x)
        for name, kind in (("naive", torch.float64 if INTERPRETED else dtype), (schedule, dtype)))
    floor = 1e-3 * max(rms(g) for g in grads.values())
    assert_close([found, *more.values()], [want, *grads.values()], tolerance, " ".join(["logits", *grads]), floor)

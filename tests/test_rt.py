"""model_rt and rt_wavefront: the schedules are one function; the paper's claims that need no training; memory."""
import math
import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import bench
import model_rt
import rt_wavefront
import config
import plot
from run import TrainConfig
import runs
from conftest import relative, tiny
from test_models import assert_cache_is_forward, assert_same, outputs_and_gradients, rms, tokens


def rt(schedule, **sizes):
    """The tiny float64 RT of conftest with this schedule; equal sizes give equal weights."""
    return tiny("rt", schedule=schedule, **sizes)


# ---- one function ----

SWITCHES = [dict(pos="rope", n_mlp=7), dict(pos="none", tie_embeddings=True), dict(qk_norm="full"), dict(n_kv_head=1),
            dict(n_kv_head=2, qk_norm="full", pos="rope")]
BLOCKS = [dict(kv_norm=False, qk_norm="full"), dict(block=5, pos="rope", n_kv_head=2), dict(block=37)]  # tiled
CASES = [*((T, dict(n_layer=L), [1, 8, 64]) for T, L in ((1, 3), (2, 3), (3, 3), (63, 3), (100, 1), (100, 3))),
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


@pytest.mark.parametrize("sizes, want", [(dict(fast=True), "wavefront"), (dict(fast=False), "naive"),
                                         (dict(fast=True, block=2), "tiled"), (dict(schedule="tiled"), "tiled"),
                                         (dict(fast=False, schedule="wavefront"), "wavefront")])
def test_the_schedule_that_was_asked_for_runs(monkeypatch, sizes, want):
    """fast picks, schedule overrides; a prompt goes through the wavefront too, or token by token."""
    ran, model = [], tiny("rt", **sizes)

    def spy(owner, name, schedule):
        original = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *a: (ran.append(schedule), original(*a))[1])
    spy(rt_wavefront.ChunkAttention, "read", "wavefront")
    spy(model_rt, "layer_tiled", "tiled")
    spy(model_rt.Layer, "forward", "naive")
    spy(model_rt.Model, "step", "token")
    for cache, schedule in ((None, want), (model.init_cache(2, 20), "wavefront" if want == "wavefront" else "token")):
        ran.clear()
        model(tokens(2, 20), cache=cache)
        assert set(ran) == {schedule}


def test_every_query_meets_every_earlier_key_once(monkeypatch):
    """Algorithm 1, counted in the code that runs, for T up to 130."""
    met, merge_tile = [], model_rt.merge_tile
    monkeypatch.setattr(model_rt, "merge_tile", lambda *a: (met.append(a[5:7]), merge_tile(*a))[1])
    model = rt("tiled", n_layer=1, n_embd=2, n_head=1)
    for T in [*range(1, 20), 31, 32, 33, 64, 65, 100, 128, 130]:
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


def test_a_prefill_after_many_tokens():
    """1,100 tokens in the cache: attend searches the keys that its queries attend to."""
    model = rt("wavefront", n_layer=1, n_embd=8, n_head=2, chunk=32)
    assert_cache_is_forward(model, [1133], [1100, 33], 1e-10)


# ---- its neighbours: the plain Transformer, and the RNN ----

def as_rt_weights(gpt):
    """model_gpt's weights under model_rt's names."""
    return {name.replace(".attn.", ".").replace(".mlp.", "."): w for name, w in gpt.state_dict().items()}


@pytest.mark.parametrize("schedule", ["naive", "tiled"])
@pytest.mark.parametrize("pos", ["alibi", "rope", "none"])
def test_one_block_of_all_positions_is_the_plain_transformer(schedule, pos):
    """b = T (section 9): logits, loss, every gradient, and decoding are model_gpt's."""
    gpt = tiny("gpt", mlp="gelu", pos=pos, n_kv_head=2, tie_embeddings=False)
    model = rt(schedule, block=100, pos=pos, n_kv_head=2)
    model.load_state_dict(as_rt_weights(gpt))
    x = tokens(2, 51)
    logits, loss, grads = outputs_and_gradients(gpt, x)
    grads = {n.replace(".attn.", ".").replace(".mlp.", "."): g for n, g in grads.items()}
    assert_same(outputs_and_gradients(model, x), (logits, loss, grads))
    assert_cache_is_forward(model, [37, 20], [16, 1, 1, 19], 1e-10)


def norm_free(schedule, n_embd, n_head=1, **sizes):
    """A float64 RT without norms and positions, and the function of its layers alone, x (T, C) -> y (T, C)."""
    torch.manual_seed(0)
    cfg = model_rt.Config(n_embd=n_embd, n_head=n_head, pos="none", schedule=schedule, vocab_size=5, **sizes)
    model = model_rt.Model(cfg).double()
    for block in model.blocks:
        block.norm1 = block.norm2 = torch.nn.Identity()
    return model, lambda x: model.layers(x[None])[0]


def set_weights(block, **weights):
    with torch.no_grad():
        for name, w in weights.items():
            getattr(block, name).weight.copy_(w)


@pytest.mark.parametrize("schedule", ["naive", "tiled"])
def test_theorem_4_1(schedule):
    """Uniform attention, no norms, no MLP: dy_t/dx_s = (A/t) prod_{j=s}^{t-1} (I + A/j) for s < t; a plain Transformer
    has A/t alone."""
    T, d = 7, 5
    model, layer = norm_free(schedule, d, n_layer=1)
    block = model.blocks[0]
    set_weights(block, wq=torch.zeros(d, d), w_down=torch.zeros(d, block.cfg.n_mlp))
    A, I = (block.wo.weight @ block.wv.weight).detach(), torch.eye(d).double()
    x = torch.randn(T, d, dtype=torch.float64)
    J = torch.autograd.functional.jacobian(layer, x).transpose(1, 2)        # (t, s, d, d)
    for t in range(1, T + 1):
        for s in range(1, T + 1):
            want = torch.zeros_like(A) if s > t else I + A / t
            if s < t:
                want = A / t
                for j in range(s, t):
                    want = want @ (I + A / j)
            assert torch.allclose(J[t - 1, s - 1], want, rtol=0, atol=1e-12)
    plain, plain_layer = norm_free(schedule, d, n_layer=1, block=T)
    plain.load_state_dict(model.state_dict())
    P = torch.autograd.functional.jacobian(plain_layer, x).transpose(1, 2)
    assert torch.allclose(P[T - 1, 0], A / T) and not torch.allclose(J[T - 1, 0], A / T)


def transformer_layer(x, wq, wk, wv, wo, w1, w2, n_head):
    """A plain norm-free Transformer layer on x (T, d), written out."""
    T, d = x.shape
    q, k, v = (( x @ w.T).view(T, n_head, -1).transpose(0, 1) for w in (wq, wk, wv))
    s = (q @ k.mT / math.sqrt(d / n_head)).masked_fill(torch.ones(T, T).triu(1).bool(), -math.inf)
    z = x + (s.softmax(-1) @ v).transpose(0, 1).reshape(T, d) @ wo.T
    return z + torch.nn.functional.gelu(z @ w1.T) @ w2.T


def simulate(block, weights, d, n_head, swapped):
    """Theorem A.1: set an RT layer of width 3 d (carry, live, scratch) to compute a Transformer layer of width d: keys
    and values read carry, attention is written to scratch, and the MLP writes y of u = carry + scratch to live and
    clears scratch. Copies go through the MLP as u = gelu(u) - gelu(-u). swapped: carry and live have changed places."""
    wq, wk, wv, wo, w1, w2 = weights
    carry, live, scratch = [slice(i * d, (i + 1) * d) for i in ((1, 0, 2) if swapped else (0, 1, 2))]
    D = d // n_head
    rows = torch.cat([torch.arange(D) + h * 3 * D for h in range(n_head)])      # of each head of 3 D the first D
    new = {name: torch.zeros_like(getattr(block, name).weight) for name in ("wq", "wk", "wv", "wo", "w_up", "w_down")}
    for name, w in (("wq", wq * math.sqrt(3)), ("wk", wk), ("wv", wv)):         # sqrt(3): the heads are 3 D wide
        new[name][rows, carry] = w
    new["wo"][scratch, rows] = wo
    I, m = torch.eye(d).double(), len(w1)
    new["w_up"][:m, carry], new["w_up"][:m, scratch], new["w_down"][live, :m] = w1, w1, w2
    copies = ((carry, scratch), live, 1), ((live,), live, -1), ((scratch,), scratch, -1)
    for n, (reads, into, sign) in enumerate(copies):
        plus, minus = (slice(m + (2 * n + i) * d, m + (2 * n + i + 1) * d) for i in (0, 1))
        for part in reads:
            new["w_up"][plus, part], new["w_up"][minus, part] = I, -I
        new["w_down"][into, plus], new["w_down"][into, minus] = sign * I, -sign * I
    set_weights(block, **new)


@pytest.mark.parametrize("schedule", ["naive", "tiled"])
def test_theorem_a_1(schedule):
    """A norm-free Transformer of width d and any depth inside a norm-free RT of width 3 d, layer by layer."""
    T, d, n_head, layers = 9, 8, 2, 3
    want = torch.randn(T, d, dtype=torch.float64)
    state = torch.cat([want, torch.zeros(T, 2 * d)], 1)
    for l in range(layers):
        one, layer = norm_free(schedule, 3 * d, n_head, n_layer=1)
        shapes = [(d, d)] * 4 + [(4 * d, d), (d, 4 * d)]
        weights = [(l + 1) / 4 * torch.randn(*shape, dtype=torch.float64) for shape in shapes]
        simulate(one.blocks[0], weights, d, n_head, swapped=l % 2 == 1)
        want, state = transformer_layer(want, *weights, n_head), layer(state)
        live = state[:, d:2 * d] if l % 2 == 0 else state[:, :d]
        assert relative(live, want) < 1e-10
        assert state[:, 2 * d:].abs().max() < 1e-10 * want.abs().max()


# ---- precision and memory ----

def chunks_seen(monkeypatch):
    """A list that gets one dict for each chunk of a wavefront: q, out, lse that come in, a of each position (forward)
    or of all (backward), and the ChunkAttention itself."""
    chunks, cls = [], rt_wavefront.ChunkAttention
    init, read, recompute = cls.__init__, cls.read, cls.recompute

    def spy_init(self, run, q, out, lse):
        chunks.append(dict(self=self, q=q.clone(), out=out.clone(), lse=lse.clone(), a=[]))
        init(self, run, q, out, lse)

    def spy_recompute(self, *pairs):
        a, lse = recompute(self, *pairs)
        chunks[-1]["recomputed"] = a.clone()
        return a, lse
    monkeypatch.setattr(cls, "__init__", spy_init)
    monkeypatch.setattr(cls, "read", lambda self, i: (a := read(self, i), chunks[-1]["a"].append(a.clone()))[0])
    monkeypatch.setattr(cls, "recompute", spy_recompute)
    return chunks


def heads_first(a, q):
    """a's of the positions, (A, B, H D) each -> (A, B, H, C, D), q's shape."""
    return torch.stack([u.view(*q.shape[:3], -1) for u in a], 3)


@pytest.mark.parametrize("qk_norm", ["none", "full"])
def test_bfloat16_backward_recomputes_what_forward_computed(monkeypatch, qk_norm):
    """Scores, ALiBi and softmax are float32 under bfloat16 autocast, in both directions."""
    chunks = chunks_seen(monkeypatch)
    model = tiny("rt", schedule="wavefront", n_layer=2, block_size=256, qk_norm=qk_norm).float().train()
    x = tokens(2, 257)
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(x[:, :-1], x[:, 1:])[1]
    loss.backward()
    assert len(chunks) > 2 and all(c["q"].dtype == torch.bfloat16 for c in chunks)
    half = len(chunks) // 2
    for there, back in zip(chunks[:half], reversed(chunks[half:])):
        a = heads_first(there["a"], there["q"])
        assert a.dtype == torch.float32 and rms(a - back["recomputed"]) < 1e-5 * rms(a)


@pytest.mark.parametrize("pos", ["alibi", "none"])
def test_bfloat16_attention_is_rounded_nowhere_inside(monkeypatch, pos):
    """A chunk's attention from bfloat16 q, k, v, in a forward, a prefill and one that goes on, against the definition's
    softmax in float64. Six heads: their slopes are no powers of two, and would be rounded too."""
    chunks = chunks_seen(monkeypatch)
    model = tiny("rt", n_head=6, n_embd=48, pos=pos, n_layer=2, chunk=64, block_size=200).float()
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        cache = model.init_cache(2, 200)
        for x, cached in ((tokens(2, 200), None), (tokens(2, 100), cache), (tokens(2, 100, seed=2), cache)):
            model(x, cache=cached)
    assert cache.k[0].dtype == torch.bfloat16
    slopes = [2 ** (-8 * h / 6) for h in range(1, 7)] if pos == "alibi" else [0.0] * 6
    for c in chunks:
        q, out, lse = (c[name].double() for name in ("q", "out", "lse"))
        (C, D), k, v = q.shape[3:], *(u.double().view(q.shape) for u in (c["self"].k, c["self"].v.mT.contiguous()))
        distance = torch.arange(C)[:, None] - torch.arange(C)
        s = q @ k.mT / math.sqrt(D) - torch.tensor(slopes, dtype=torch.float64)[:, None, None] * distance
        p = torch.cat([lse[..., None], s.masked_fill(distance <= 0, -math.inf)], -1).softmax(-1)
        want = p[..., :1] * out + p[..., 1:] @ v
        assert c["q"].dtype == torch.bfloat16 and q.abs().max() > 1
        assert rms(heads_first(c["a"], q) - want) < 2e-6 * rms(want)


def test_saved_for_the_backward_are_x_and_y_of_each_layer():
    B, T, L, C = 2, 70, 3, 32
    model, saved = rt("wavefront", n_layer=L), []
    x = torch.randn(B, T, C, dtype=torch.float64, requires_grad=True)
    weights = [w.detach() for w in rt_wavefront.stack_weights(model.cfg, model.blocks)]
    own = {w.data_ptr() for w in weights}
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (saved.append(t), t)[1], lambda t: t), Memory() as memory:
        memory.known |= {w.untyped_storage()._cdata for w in (x, *weights)}
        y = rt_wavefront.Layers.apply(model.cfg, x, *weights)
    tables = 20_000                                         # positions, the biases inside a chunk
    assert memory.now < 8 * y.numel() * (L + 2) * 1.05 + tables, "more is alive than x, every y, and the result's copy"
    count = sum(t.numel() for t in saved if t.data_ptr() not in own)
    padded = rt_wavefront.Wavefront(model.cfg, x).length
    assert count == (L + 1) * B * padded * C and padded < T + 5


class Memory(TorchDispatchMode):
    """Counts the bytes of all tensors alive that were made under it."""

    def __init__(self):
        super().__init__()
        self.now = self.peak = self.largest = 0
        self.known = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(t, torch.Tensor) and t.untyped_storage()._cdata not in self.known:
                storage = t.untyped_storage()
                self.known.add(storage._cdata)
                self.now += storage.nbytes()
                self.largest = max(self.largest, storage.nbytes())
                weakref.finalize(storage, self.freed, storage._cdata, storage.nbytes())
        self.peak = max(self.peak, self.now)
        return out

    def freed(self, key, size):
        self.known.discard(key)
        self.now -= size


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


# ---- training and configs ----

def test_a_run_may_change_its_schedule_but_not_its_function(data_dir, tmp_path):
    """The same losses step by step, also where a resumed run has another schedule."""
    losses = lambda folder: [row["ce"] for row in plot.read_log(tmp_path / folder / "r" / "log.jsonl") if "ce" in row]
    keys = data_dir, "learning_rate=2e-2", "warmup_steps=40"
    run = lambda folder, *more: runs.run("rt", tmp_path / folder, *keys, *more)
    run("a"), run("b", "fast=false", "max_steps=3"), run("b", "resume=true", "schedule=tiled", "max_steps=6")
    assert len(losses("a")) == len(losses("b")) == 6
    assert max(abs(x - y) for x, y in zip(losses("a"), losses("b"))) < 1e-4
    with pytest.raises(config.UserError, match="kv_norm"):
        run("b", "resume=true", "kv_norm=false", "max_steps=7")


def test_initial_weights():
    """Spread as the paper's: 1/sqrt(d), cut off at 3 sigma; into the residual stream less, and less the deeper."""
    torch.manual_seed(0)
    model = model_rt.Model(model_rt.Config(n_layer=3, n_embd=256, n_head=4))
    expected = {"wte.weight": 1 / 16, "head.weight": 1 / 16}
    for l in range(3):
        expected |= {f"blocks.{l}.{n}.weight": 1 / 16 for n in ("wq", "wk", "wv", "w_up")}
        expected |= {f"blocks.{l}.wo.weight": 1 / math.sqrt(2 * 256 * (l + 1)),
                     f"blocks.{l}.w_down.weight": 1 / math.sqrt(2 * 1024 * (l + 1))}
    for name, p in model.named_parameters():
        if p.dim() == 2:
            sigma = expected.pop(name)
            assert 0.97 < p.std().item() / sigma < 1.0 and p.abs().max() <= 3 * sigma      # the cut takes 1.3 %
    assert not expected


@pytest.mark.parametrize("bad, named", [
    (dict(qk_norm="head"), "qk_norm=head"), (dict(block=0), "block=0"), (dict(pos="rope", n_embd=12), "pos=rope"),
    (dict(schedule="wavefront", block=2), "schedule=wavefront"), (dict(n_embd=2048), "head is at most 256")])
def test_impossible_sizes_are_named(bad, named):
    with pytest.raises(ValueError, match=named):
        model_rt.Config(**bad)


def test_the_bench_runs(capsys):
    """Both tables of bench.py rt, at tiny sizes on a CPU, and the physical floor of the paper's layer."""
    cpu, sizes = torch.device("cpu"), dict(n_layer=2, n_embd=16, n_head=2, block_size=12)
    model = model_rt.Model(model_rt.Config(**sizes))
    bench.bench_rt(model, TrainConfig(model="rt", batch_size=2), cpu, rounds=1, lengths=(8, 16))
    out = capsys.readouterr().out
    assert [out.count(words) for words in (" naive ", " tiled ", "x wavefront", "decoding")] == [2, 2, 8, 2]
    assert "T    16" in out and "grows as T^e" in out
    bench.bench_rt_layers(model.cfg, TrainConfig(model="rt"), cpu, (2,), 1)
    out = capsys.readouterr().out
    assert out.count("tokens/s") == 10 and "does not fit" not in out and " naive " in out
    paper = model_rt.Config(n_embd=1024, n_head=16, block_size=512)
    assert 2.2 < bench.rt_floor(paper, 8) < 2.8 and 7 < bench.rt_floor(paper, 512) < 10.2


def test_graphs_are_recorded_and_reused(monkeypatch):
    """The bookkeeping of replay, with graphs that run on a CPU: the second call records, later ones replay with new
    inputs, what the graph reads stays alive, and only the last few are kept."""
    class Recorded:
        def __init__(self, run, function, inputs):
            self.run, self.function, self.calls = run, function, 0

        def __call__(self, *inputs):
            self.calls += 1
            return self.function(*inputs)
    monkeypatch.setattr(rt_wavefront, "recordable", lambda x, dtype: True)
    monkeypatch.setattr(rt_wavefront, "Graph", Recorded)
    monkeypatch.setattr(rt_wavefront, "GRAPHS", {})
    plain, graphed = (rt("wavefront", cuda_graphs=on).train() for on in (False, True))
    for seed, T in ((1, 20), (2, 20), (3, 33), (4, 20), (5, 33), (6, 33)):
        x = tokens(2, T + 1, seed=seed)
        assert_same(outputs_and_gradients(graphed, x), outputs_and_gradients(plain, x))
    graphs = rt_wavefront.GRAPHS
    assert len(graphs) == 4 and {g.calls for g in graphs.values()} == {2}
    assert all(isinstance(g.run, rt_wavefront.Wavefront) for g in graphs.values())
    with torch.no_grad():
        for T in range(1, 12):
            graphed(tokens(2, T))
    assert len(graphs) == 8 and not any(graphs.values()), "the first call of a shape is not recorded"


# ---- on a GPU ----

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


@pytest.mark.gpu
@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-9), (torch.float32, 1e-3)])
@pytest.mark.parametrize("sizes", [{}, dict(block=3), dict(pos="rope", n_kv_head=2, qk_norm="full")])
def test_schedules_agree_on_cuda(sizes, dtype, tolerance):
    """float64: the reference implementations; float32 without tf32: the Triton kernels."""
    for schedule in ("tiled",) if "block" in sizes else ("tiled", "wavefront"):
        want, got = (outputs_and_gradients(rt(name, **sizes).to(dtype).cuda(), tokens(2, 71).cuda())
                     for name in ("naive", schedule))
        floor = 1e-3 * max(rms(g) for g in want[2].values())
        assert rms(got[0] - want[0]) < tolerance * rms(want[0])
        for n in want[2]:
            assert rms(got[2][n] - want[2][n]) < tolerance * max(rms(want[2][n]), floor), n

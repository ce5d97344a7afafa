"""model_lrt: its equations once more with loops, the limits of the training paths, what they
compute, caches and prefill, the paper's sizes, optimizer and ablations, training and evaluation."""
import dataclasses
import itertools
import math

import pytest
import torch
import torch.nn.functional as F

import bench
import kernels
import model_lrt
import checkpoint
import config
import optim
import plot
from run import TrainConfig, read_config
import runs
import sample
import tasks
from conftest import relative, tiny
from test_models import assert_same, outputs_and_gradients, tokens

# mixed: odd sizes, 10 dimensions a head, windows of 5 + 1 keys
SETTINGS = {"default": {},
            "mixed": dict(n_kv_head=2, pattern="SL", swa=5, n_layer=3, n_embd=40, source="1,3",
                          projections="layerwise"),
            "k": dict(inject="k", n_kv_head=2, pattern="L"),
            "v": dict(inject="v", projections="layerwise", swa=3),
            "kv": dict(inject="kv", source="1", n_head=1),
            "residual": dict(inject="residual", source="1,2")}
every = pytest.mark.parametrize("kind", SETTINGS)
some = pytest.mark.parametrize("kind", [
    pytest.param(kind, marks=[pytest.mark.full] * (kind not in ("default", "mixed"))) for kind in SETTINGS])
both = pytest.mark.parametrize("fast", [True, False])


def path(**sizes):
    name = "interleaved" if "subsets" in sizes else "chunked" if "chunk" in sizes else "exact"
    return dict(train_path=name, **sizes)


PATHS = {"exact": path(), "C=3": path(chunk=3),
         **{f"S={S}": path(subsets=S) for S in (1, 2, 3, 8)}}


def lrt(kind="default", **sizes):
    """The tiny float64 model of conftest of this kind, in training mode."""
    return tiny("lrt", **{**SETTINGS[kind], **sizes}).train()


def copied(model, **sizes):
    """A model that differs in `sizes`, with those of model's weights that it has."""
    other = tiny("lrt", **{**dataclasses.asdict(model.cfg), **sizes})
    weights = model.state_dict()
    other.load_state_dict({name: weights[name] for name in other.state_dict()})
    return other.train(model.training)


def passes(model, x, name="interleaved"):
    """Logits of a training path, and of its first pass (None: it has none)."""
    return [None if h is None else model.logits(h) for h in model.hidden(x, path=name)]


def nats(logits, targets):
    return -logits.log_softmax(-1).gather(-1, targets[..., None])[..., 0]


# -------------------------------------------------------------------------------------------------
# the equations, once more, with loops over positions and heads

def unit(x):
    return x / (x.square().mean() + 1e-5).sqrt()


def rotated(x, position):
    """x (D,): pairs (i, i + D/2) rotated by position * 10000^(-2i / D)."""
    half = len(x) // 2
    angle = position * 10000.0 ** (-2 * torch.arange(half, dtype=x.dtype) / len(x))
    a, b = x[:half], x[half:]
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()])


class ByHand:
    """One sequence. buffer: each layer's newest keys and values, {position: [head]}; m: the newest
    memories; out and first: the last layer's outputs, with and without memory."""

    def __init__(self, model, idx):
        self.cfg, self.w, self.idx = model.cfg, dict(model.named_parameters()), idx.tolist()
        self.x0 = [unit(self.w["wte.weight"][i]) for i in self.idx]
        self.zero = torch.zeros_like(self.x0[0])
        self.buffer = [({}, {}) for _ in range(self.cfg.n_layer)]
        self.m, self.out, self.first = {}, {}, {}

    def of(self, layer, name):
        return self.w[f"blocks.{layer}.{name}.weight"]

    def keys_values(self, layer, t, u, m):
        """Of each key head: the local ones and the memory's, each times its gate."""
        cfg, D, G, ks, vs = self.cfg, self.cfg.head_dim, self.cfg.n_kv_head, [], []
        rec = f"blocks.{layer}.attn.rec." if cfg.projections == "layerwise" else "rec."
        wk_rec, wv_rec = self.w.get(rec + "wk.weight"), self.w.get(rec + "wv.weight")
        if cfg.inject != "residual":
            gates = 2 * torch.sigmoid(self.of(layer, "attn.w_gate") @ u)
        for g in range(G):
            mine = slice(g * D, g * D + D)
            k, v = self.of(layer, "attn.wk")[mine] @ u, self.of(layer, "attn.wv")[mine] @ u
            e = self.w[f"values.{layer}.weight"][self.idx[t], mine]
            v = v + 2 * torch.sigmoid(self.of(layer, "attn.w_value")[g] @ u[:32]) * e
            if wk_rec is not None:
                k = gates[g] * k + gates[G + g] * (wk_rec[mine] @ m)
            if wv_rec is not None:
                v = gates[g] * v + gates[G + g] * (wv_rec[mine] @ m)
            ks.append(rotated(unit(k), t)), vs.append(v)
        return ks, vs

    def block(self, layer, t, x, u, keys, values):
        cfg, D, y = self.cfg, self.cfg.head_dim, []
        short = cfg.pattern[layer % len(cfg.pattern)] == "S" and layer != cfg.n_layer - 1
        visible = [j for j in range(t + 1) if not short or t - j <= cfg.swa]
        for h in range(cfg.n_head):
            g = h // (cfg.n_head // cfg.n_kv_head)
            q = rotated(unit(self.of(layer, "attn.wq")[h * D:h * D + D] @ u), t)
            p = (torch.stack([keys[j][g] for j in visible]) @ q / math.sqrt(D)).softmax(0)
            y.append(p @ torch.stack([values[j][g] for j in visible]))
        x = x + self.of(layer, "attn.wo") @ torch.cat(y)
        hidden = (self.of(layer, "mlp.w_up") @ unit(x)).relu() ** 2
        return x + self.of(layer, "mlp.w_down") @ hidden

    def run(self, positions, memory):
        """One pass over some positions, memory {t: m_{t-1}}: in each layer they write keys and
        values, then attend to all that are there. -> {t: last output}, {t: m_t}"""
        x, outputs = {t: self.x0[t] for t in positions}, []
        for layer, (keys, values) in enumerate(self.buffer):
            u = {}
            for t in positions:
                x[t] = self.w["alpha"][layer] * x[t] + self.w["beta"][layer] * self.x0[t]
                if "residual" in self.cfg.inject:
                    x[t] = x[t] + self.w["gamma"][layer] * memory[t]
                u[t] = unit(x[t])
                keys[t], values[t] = self.keys_values(layer, t, u[t], memory[t])
            for t in positions:
                x[t] = self.block(layer, t, x[t], u[t], keys, values)
            outputs.append(dict(x))
        return x, {t: self.memory([output[t] for output in outputs]) for t in positions}

    def memory(self, outputs):
        if not self.cfg.source:
            return outputs[round(0.6 * len(outputs)) - 1]
        chosen = [outputs[int(layer) - 1] for layer in self.cfg.source.split(",")]
        if len(chosen) == 1:
            return chosen[0]
        return sum(w * x for w, x in zip(self.w["source_weights"].softmax(0), chosen))

    def chunked(self, C, start=0):
        """C = 1: the exact chain. start: positions before it are there."""
        for low in range(start, len(self.idx), C):
            at, m = range(low, min(low + C, len(self.idx))), self.m.get(low - 1, self.zero)
            out, new = self.run(at, dict.fromkeys(at, m))
            self.out.update(out), self.m.update(new)
        return self

    def interleaved(self, S, T=None):
        """Of the first T positions."""
        everything = range(T or len(self.idx))
        self.first, self.m = self.run(everything, dict.fromkeys(everything, self.zero))
        for s in range(S):
            at = everything[s::S]
            out, m = self.run(at, {t: self.m.get(t - 1, self.zero) for t in at})
            self.out.update(out), self.m.update(m)
        return self

    def logits(self, out):
        head = self.w["head.weight"][:self.cfg.vocab_size]
        return 15 * torch.tanh(torch.stack([head @ unit(out[t]) for t in sorted(out)]) / 15)


def with_gradients(model, logits, loss):
    """What outputs_and_gradients returns."""
    loss.backward()
    grads = {n: torch.zeros_like(p) if p.grad is None else p.grad.clone()
             for n, p in model.named_parameters()}
    return logits.detach(), loss.detach(), grads


def by_hand(model, x):
    """outputs_and_gradients of the model's training path."""
    model.zero_grad()
    cfg, y, T = model.cfg, x[:, 1:], x.size(1) - 1
    C, S = {"exact": 1, "chunked": cfg.chunk}.get(cfg.train_path, 0), min(cfg.subsets, T)
    rows = [ByHand(model, row) for row in x[:, :-1]]
    rows = [row.chunked(C) if C else row.interleaved(S) for row in rows]
    logits = torch.stack([row.logits(row.out) for row in rows])
    loss = nats(logits, y).mean()
    if not C:
        losses = [nats(torch.stack([row.logits(row.first) for row in rows]), y).mean()]
        for s in range(S):      # each a mean, weighted by its number of targets
            part = slice(s, None, S)
            losses.append(nats(logits[:, part], y[:, part]).mean() * len(range(s, T, S)) * S / T)
        loss = sum(losses) / (S + 1)
    return with_gradients(model, logits, loss)


@pytest.mark.parametrize("kind, way, B", [
    *((kind, way, 2) for kind in ("default", "mixed") for way in PATHS),
    *((kind, way, 1) for kind in list(SETTINGS)[2:] for way in ("S=3", "C=3"))])
def test_each_path_is_its_equations(kind, way, B):
    """Logits, loss and all gradients: were anything in the buffer detached, they would differ."""
    model, x = lrt(kind, **PATHS[way]), tokens(B, 12 if B == 2 else 9)
    assert_same(outputs_and_gradients(model, x), by_hand(model, x), all_reached=True)


def test_the_loss_is_the_mean_of_all_passes():
    """Algorithm 1's, where S divides T; its parts in aux; the same where logits are many."""
    model, x = lrt(subsets=3), tokens(2, 13)
    y, found = x[:, 1:], {}
    refined, first = (nats(logits, y) for logits in passes(model, x[:, :-1]))
    want = (first.mean() + sum(refined[:, s::3].mean() for s in range(3))) / 4
    for model.max_logits in (2 ** 28, 300):
        model.zero_grad()
        logits, loss, aux = model(x[:, :-1], y)
        loss.backward()
        found[logits is None] = [p.grad for p in model.parameters()]
        assert abs(loss - want) < 1e-12 and abs(aux["ce"] - refined.mean()) < 1e-12
        assert abs(aux["ce_first"] - first.mean()) < 1e-12 and relative(refined, first) > 1e-3
    assert all(relative(a, b) < 1e-10 for a, b in zip(found[False], found[True], strict=True))


# -------------------------------------------------------------------------------------------------
# limits

def refined(model, x):
    """outputs_and_gradients of the subsets' passes: the first pass has a loss of its own."""
    model.zero_grad()
    logits = passes(model, x[:, :-1])[0]
    return with_gradients(model, logits, nats(logits, x[:, 1:]).mean())


@some
@both
def test_as_many_subsets_as_tokens_and_chunks_of_one_are_the_exact_chain(kind, fast):
    model, x = lrt(kind, **path(), fast=fast), tokens(2, 12)
    want = outputs_and_gradients(model, x)
    assert_same(refined(copied(model, **path(subsets=11)), x), want, all_reached=True)
    assert_same(refined(copied(model, **path(subsets=50)), x), want)
    assert_same(outputs_and_gradients(copied(model, **path(chunk=1)), x), want)
    two = refined(copied(model, **path(subsets=2)), x)[0]
    assert relative(two, want[0]) > 1e-4, "these sizes tell paths apart"


@both
def test_one_chunk_of_all_is_the_backbone(fast):
    """Where gates are 1, as at the start: with gradients of what both have."""
    model, x = lrt(**path(chunk=11), fast=fast), tokens(2, 12)
    with torch.no_grad():
        for block in model.blocks:
            block.attn.w_gate.weight.zero_()
    backbone = copied(model, memory=False)
    logits, loss, grads = outputs_and_gradients(model, x)
    grads = {name: grads[name] for name, _ in backbone.named_parameters()}
    assert_same((logits, loss, grads), outputs_and_gradients(backbone, x))


# -------------------------------------------------------------------------------------------------
# naive and fast, and what is computed

@every
def test_training_naive_is_fast(kind):
    """Also in eval mode without gradients, where the fast path decodes from a cache."""
    chunks = [(1, path(chunk=5)), (2, path(chunk=1)), (13, path(chunk=20)), (37, path(chunk=8))]
    subsets = [(T, path(subsets=S)) for T, S in ((1, 1), (2, 8), (13, 3), (37, 2), (37, 8))]
    for T, sizes in [*chunks, *subsets, (1, path()), (2, path()), (19, path())]:
        model, x = lrt(kind, **sizes), tokens(2, T + 1)
        naive = copied(model, fast=False)
        assert_same(outputs_and_gradients(model, x), outputs_and_gradients(naive, x))
    with torch.no_grad():
        assert relative(model.eval()(x)[0], naive.eval()(x)[0]) < 1e-10


@pytest.fixture
def counted(monkeypatch):
    """Rows (of one sequence) in each product with a weight, and queries of each attention."""
    rows, queries = [], []

    def counting(counts, original, dim):
        def spy(x, *arguments, **options):
            counts.append(x.size(dim))
            return original(x, *arguments, **options)
        return spy
    monkeypatch.setattr(F, "linear", counting(rows, F.linear, 1))
    for module, name in ((kernels, "attend"), (model_lrt, "attention_fast"),
                         (model_lrt, "attention_naive")):
        monkeypatch.setattr(module, name, counting(queries, getattr(module, name), 2))
    return rows, queries


def lengths(values):
    """[(value, how often in a row)]"""
    return [(value, len(list(group))) for value, group in itertools.groupby(values)]


@both
@pytest.mark.parametrize("kind", ["default", "mixed"])
def test_no_row_outside_a_subset_is_computed(kind, fast, counted):
    """Of 13 positions: 13 in the first pass, then 7 and 6, then the head's two. The first pass has
    no products with the memory."""
    rows, queries = counted
    model, x = lrt(kind, fast=fast, **path(subsets=2)), tokens(2, 14)
    model(x[:, :-1], x[:, 1:])
    (_, a), (_, b), (_, c), head = found = lengths(rows)
    of_memory = sum("rec." in name for name, _ in model.named_parameters())
    assert [n for n, _ in found] == [13, 7, 6, 13] and head == (13, 2)
    assert a == b - of_memory and b == c and of_memory >= 2
    assert lengths(queries) == [(n, model.cfg.n_layer) for n in (13, 7, 6)]


@pytest.mark.parametrize("kind, way", [("default", way) for way in PATHS] + [("mixed", "S=2"), ("mixed", "C=3")])
def test_the_fast_path_builds_no_mask(kind, way, monkeypatch):
    """Neither in training nor in evaluation, on any path."""
    model, x = lrt(kind, **PATHS[way]), tokens(2, 12)
    monkeypatch.delattr(model_lrt, "attention_bias")
    monkeypatch.delattr(model_lrt, "attention_naive")
    model(x[:, :-1], x[:, 1:])[1].backward()
    model.eval()(x)
    with pytest.raises(NameError, match="attention_"):
        copied(model, fast=False)(x)


@some
def test_a_training_step_reaches_every_parameter(kind):
    """With a gradient, be it zero, also where one pass holds all positions: DDP waits for it."""
    for sizes in (path(), path(chunk=3), path(chunk=50), path(subsets=1), path(subsets=2)):
        model, x = lrt(kind, **sizes), tokens(1, 9)
        model(x[:, :-1], x[:, 1:])[1].backward()
        assert not [name for name, p in model.named_parameters() if p.grad is None]


# -------------------------------------------------------------------------------------------------
# the start

def fresh(**sizes):
    torch.manual_seed(0)
    return model_lrt.Model(model_lrt.Config(**sizes))


@pytest.mark.parametrize("projections", ["shared", "layerwise"])
def test_initial_weights(projections):
    C, limit, uniform = 256, math.sqrt(3 / 256), 0
    model = fresh(n_layer=2, n_embd=C, n_head=4, projections=projections)
    assert abs(model.wte.weight.std() - 1) < 0.02
    assert abs(model.head.weight.std() / 0.001 - 1) < 0.02
    for name, p in model.named_parameters():
        name = name.removesuffix(".weight")
        if name.endswith(("attn.wo", "mlp.w_down", "w_gate", "w_value")):
            assert not p.any(), name        # of a gate: it is 1, whatever its input
        elif name not in ("wte", "head", "alpha", "beta", "gamma"):
            uniform += 1
            assert abs(p.std() * math.sqrt(C) - 1) < 0.02, name
            assert 0.99 * limit < p.abs().max() <= limit, name
    assert (model.alpha == 1).all() and (model.beta == 0.1).all() and (model.gamma == 0.1).all()
    assert uniform == 2 * 4 + 2 + (2 if projections == "shared" else 4)


def test_logits_are_bounded_and_without_padding():
    model, x = tiny("lrt"), tokens(2, 11)
    with torch.no_grad():
        model.head.weight.mul_(1e4)
        logits = model(x)[0]
    assert model.wte.weight.shape[0] == model.head.weight.shape[0] == 64
    assert logits.shape == (2, 11, 61) and 14.9 < logits.abs().max() <= 15
    assert fresh(vocab_size=64).wte.weight.shape[0] == 64


def test_windows_are_the_papers():
    """SSSL, half the context and the query itself, the last layer all of it."""
    def windows(**sizes):
        cfg = model_lrt.Config(**sizes)
        return [cfg.window(layer) for layer in range(cfg.n_layer)]
    assert windows(n_layer=10, block_size=64) == [33, 33, 33, 0, 33, 33, 33, 0, 33, 0]
    assert windows(n_layer=3, pattern="SL", swa=5) == [6, 0, 0]
    assert windows(n_layer=2, swa=300) == [0, 0], "a window wider than the context is none"


# -------------------------------------------------------------------------------------------------
# caches and prefill

def test_the_cache_is_a_transformers_and_one_vector_a_row():
    sizes = dict(n_layer=3, n_head=4, n_kv_head=2, n_embd=32)
    cache, gpts = (tiny(name, **sizes).init_cache(5, 40) for name in ("lrt", "gpt"))
    assert [x.shape for x in cache.k + cache.v] == [x.shape for x in gpts.k + gpts.v]
    assert cache.nbytes() == gpts.nbytes() + 5 * 32 * 8
    assert tiny("lrt", **sizes, memory=False).init_cache(5, 40).nbytes() == gpts.nbytes()


@some
@both
def test_interleaved_prefill_goes_on_exactly(kind, fast):
    """Two subsets over the prompt, then the chain from what they left: the equations' logits."""
    model = tiny("lrt", **SETTINGS[kind], prefill="interleaved", fast=fast)
    x, cache = tokens(2, 16), model.init_cache(2, 16)
    with torch.no_grad():
        parts = [model(part, cache=cache)[0] for part in x.split([11, 1, 4], 1)]
        got = torch.cat(parts, 1)
        for row, logits in zip(x, got):
            hand = ByHand(model, row).interleaved(2, 11).chunked(1, 11)
            assert relative(logits, hand.logits(hand.out)) < 1e-10
        assert relative(got[:, :11], model(x[:, :11])[0]) > 1e-4
    assert cache.lengths.tolist() == [16, 16] and not got.requires_grad


@some
@pytest.mark.parametrize("S", [2, 3])
def test_rows_of_a_prefill_are_as_if_alone(kind, S):
    """Prompts of 11, 1 and 6 tokens, and an empty one: logits, memories, and the next logits, of
    which the empty row's are exact."""
    model = tiny("lrt", **SETTINGS[kind], prefill="interleaved", subsets=S)
    x, n, cache = tokens(4, 14), [11, 1, 6, 0], model.init_cache(4, 20)
    with torch.no_grad():
        prompts = model(x[:, :11], cache=cache, n_valid=torch.tensor(n))[0]
        m, filled = cache.memory.clone(), cache.lengths.tolist()
        after = model(torch.stack([row[k:k + 3] for row, k in zip(x, n)]), cache=cache)[0]
        assert filled == n and not m[3].any()
        assert relative(after[3], model(x[3:, :3])[0][0]) < 1e-10
        for b, k in enumerate(n[:3]):
            alone, row = model.init_cache(1, 20), x[b:b + 1]
            assert relative(prompts[b, :k], model(row[:, :k], cache=alone)[0][0]) < 1e-10
            assert relative(m[b], alone.memory[0]) < 1e-10
            assert relative(after[b], model(row[:, k:k + 3], cache=alone)[0][0]) < 1e-10


# -------------------------------------------------------------------------------------------------
# the paper's sizes and optimizer

@pytest.mark.parametrize("name, millions, more, layerwise, source",
                         [("lrt_20l", 1316, 0.29, 4.78, 12), ("lrt_24l", 1988, 0.28, 5.43, 14)])
def test_sizes_of_the_paper(name, millions, more, layerwise, source):
    _, fields, _, _ = read_config([f"config=configs/{name}.yaml"])

    def count(**sizes):
        cfg = model_lrt.Config(**{**fields, "vocab_size": 32768, **sizes})
        assert cfg.head_dim == 128 and cfg.sources == [source]
        assert cfg.sources == dataclasses.replace(cfg, source="").sources, "0.6 of the depth"
        with torch.device("meta"):
            return cfg, sum(p.numel() for p in model_lrt.Model(cfg).parameters())
    (cfg, backbone), (_, shared), (_, own) = (
        count(memory=False), count(), count(projections="layerwise"))
    L, d, heads = cfg.n_layer, cfg.n_embd, cfg.n_head
    assert round(backbone / 1e6) == millions
    assert shared - backbone == 2 * d * heads * 128 + L * 2 * heads * d + L
    assert own - backbone == L * (2 * d * heads * 128 + 2 * heads * d + 1)
    assert round(100 * (shared - backbone) / backbone, 2) == more
    assert round(100 * (own - backbone) / own, 2) == layerwise


def muon(**keys):
    return TrainConfig(**{**dict(model="lrt", optimizer="muon", learning_rate=0.004,
                                       muon_learning_rate=0.02, weight_decay=0.2), **keys})


@pytest.mark.parametrize("kind", ["default", "mixed"])
def test_the_papers_optimizer(kind):
    """2 rows of 100 tokens, 4 times: each group's rate, betas and decay, by parameters' names."""
    model = lrt(kind)
    groups = optim.parameter_groups(model, muon(batch_size=2, gradient_accumulation_steps=4))
    batch, width = math.sqrt(800 / 2 ** 19), (model.cfg.n_embd / 768) ** -0.5
    group_of = {id(p): group for group in groups for p in group["params"]}
    rates = dict(wte=0.3 * width, values=0.3 * width, head=0.004 * width, alpha=0.005)
    for name, p in model.named_parameters():
        group, own = group_of[id(p)], name.split(".")[0]
        gate = name.endswith(("w_gate.weight", "w_value.weight"))
        if p.dim() == 2 and own in ("blocks", "rec") and not gate:
            optimizer, rate, decay = "muon", 0.02, 0.2 * (12 / model.cfg.n_layer) ** 2
        else:
            optimizer, rate, decay = "adamw", rates.get(own, 0.004 if gate else 0.5), 0
            betas = (0.96 if own == "beta" else 0.8), 0.95
            assert group["betas"] == betas and group["eps"] == 1e-10, name
        assert group["kind"] == optimizer, name
        assert abs(group["lr"] / (rate * batch) - 1) < 1e-12, name
        assert abs(group["weight_decay"] - decay) < 1e-12, name
    optimizers = optim.make_optimizers(model, muon())
    assert [type(optimizer).__name__ for optimizer in optimizers] == ["AdamW", "Muon"]
    decoder = tasks.fit_head(model, tasks.COMPRESSION).head
    assert {model_lrt.kind_of(f"head.{n}", p) for n, p in decoder.named_parameters()} == {"head"}
    assert model.param_groups(muon(optimizer="adamw")) is None


def test_schedules_of_the_paper():
    """Momentum 0.85 to 0.95 in 300 steps; decay to zero; no warm-up; rates fall in the end."""
    cfg = muon(muon_momentum=0.95, muon_momentum_steps=300, decay_schedule="linear",
               lr_schedule="linear", cooldown_frac=0.5, min_lr_frac=0.0, max_steps=1000)
    optimizers = optim.make_optimizers(fresh(n_layer=6), cfg)
    *others, muons = [group for optimizer in optimizers for group in optimizer.param_groups]
    rate = 0.02 * math.sqrt(cfg.batch_size * 256 / 2 ** 19)
    for step in (0, 150, 300, 500, 750, 999):
        for group in (*others, muons):
            optim.set_schedules(group, step, cfg)
            assert abs(group["lr"] / group["peak_lr"] - min(1, (1000 - step) / 500)) < 1e-12
        assert abs(muons["momentum"] - (0.85 + 0.1 * min(1, step / 300))) < 1e-12
        assert abs(muons["weight_decay"] - 0.2 * 4 * (1 - step / 1000)) < 1e-12
        assert abs(muons["peak_lr"] / rate - 1) < 1e-12
        assert all(group["weight_decay"] == 0 and "momentum" not in group for group in others)
    momentum, decay = muons["momentum"], muons["weight_decay"]
    optim.set_schedules(muons, 0, muon())
    assert (muons["momentum"], muons["weight_decay"]) == (momentum, decay), "no keys, no change"


# -------------------------------------------------------------------------------------------------
# training and evaluation

TINY = ["block_size=16", "n_embd=16", "n_layer=4", "n_head=2", "batch_size=2", "max_steps=3",
        "eval_batches=1"]
ABLATIONS = ["source=4", "source=1,2,3,4",                                  # Table 1
             "inject=residual", "inject=kv", "memory=false",                # Table 3
             "inject=k", "inject=v", "projections=layerwise",               # Tables 4 to 6
             "train_path=chunked chunk=8", "train_path=exact",              # Table 7
             "subsets=8"]                                                   # Table 9


@pytest.mark.parametrize("overrides", ABLATIONS)
def test_every_ablation_is_an_override(overrides, data_dir, tmp_path):
    trainer = runs.run("lrt", tmp_path, data_dir, *TINY, *overrides.split())
    last = plot.read_log(trainer.folder / "log.jsonl")[-1]
    estimated = "memory=false" not in overrides and "exact" not in overrides
    assert math.isfinite(last["val_ce"]) and ("val_gap" in last) == estimated
    loaded, x = checkpoint.load_run(trainer.folder / "ckpt.pt")[0], tokens(2, 9)
    assert torch.equal(loaded.eval()(x)[0], trainer.model.eval()(x)[0])
    for key, value in (pair.split("=") for pair in overrides.split()):
        assert str(getattr(loaded.cfg, key)).lower() == value


@pytest.mark.parametrize("way", PATHS)
def test_the_loss_in_eval_mode_is_the_exact_chains(way):
    model, x = lrt(**PATHS[way]), tokens(2, 12)
    want = nats(copied(model, **path())(x[:, :-1])[0], x[:, 1:]).mean()
    training = model(x[:, :-1], x[:, 1:])[1]
    loss, aux = model.eval()(x[:, :-1], x[:, 1:])[1:]
    with torch.no_grad():
        cached = model(x[:, :-1], x[:, 1:])[1]
    assert abs(loss - want) < 1e-12 and abs(cached - want) < 1e-12
    assert set(aux) == {"ce"} and aux["ce"] == loss
    assert way == "exact" or abs(training - want) > 1e-4


@pytest.mark.parametrize("way", ["subsets=2", "train_path=chunked chunk=4"])
def test_an_evaluation_is_exact_on_some_batches_and_estimates_on_all(way, data_dir, tmp_path,
                                                                      monkeypatch):
    trainer = runs.run("lrt", tmp_path, data_dir, *TINY, *way.split())
    model, called = trainer.model.eval(), []
    with torch.no_grad():       # a gap that float32 cannot hide
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))
        starts = trainer.batches.val_batches(5)
        batches = [trainer.batches.cut(trainer.batches.val, start) for start in starts]
        exact = [float(model(x, y)[1]) for x, y in batches]
        estimate = [float(model.estimate(x, y)) for x, y in batches]
    assert min(abs(a - b) for a, b in zip(exact, estimate)) > 1e-4
    hidden = model.hidden
    monkeypatch.setattr(model, "hidden", lambda *a, path="exact":
                        (called.append(path), hidden(*a, path=path))[1])
    mean = lambda values: sum(values) / len(values)
    for wanted, which in ((1, [0]), (2, [0, 4]), (3, [0, 2, 4]), (0, range(5)), (9, range(5))):
        trainer.cfg.eval_batches, trainer.cfg.exact_batches = 5, wanted
        called.clear()
        result = trainer.evaluate()
        assert called.count("exact") == len(which)
        assert called.count(model.cfg.train_path) == 5 == len(called) - len(which)
        assert abs(result["val_ce"] - mean([exact[i] for i in which])) < 1e-5
        assert abs(result["val_ce_estimate"] - mean(estimate)) < 1e-5
        assert abs(result["val_gap"] - mean([exact[i] - estimate[i] for i in which])) < 1e-5


def test_an_estimate_is_without_dropout_and_none_where_it_is_exact():
    x = tokens(2, 12)
    for kind, sizes in (("default", path(subsets=2)), ("mixed", path(chunk=4))):
        model = lrt(kind, **sizes)
        want = nats(passes(model, x[:, :-1], model.cfg.train_path)[0], x[:, 1:]).mean()
        dropping = copied(model, dropout=0.5).eval()
        assert abs(dropping.estimate(x[:, :-1], x[:, 1:]) - want) < 1e-12
    assert lrt(**path()).estimate(x, x) is None and lrt(memory=False).estimate(x, x) is None


@pytest.mark.parametrize("bad, named", [
    (dict(source="0"), "source=0"), (dict(source="1,1"), "source=1,1"), (dict(chunk=0), "chunk=0"),
    (dict(swa=-1), "swa=-1"), (dict(pattern=""), "pattern="), (dict(inject="x"), "inject=x"),
    (dict(n_embd=2056), "n_embd / n_head = 514")])
def test_impossible_settings_are_named(bad, named):
    assert not model_lrt.Config.RETIRED.keys() & model_lrt.Config.__dataclass_fields__.keys()
    with pytest.raises(ValueError, match=named):
        model_lrt.Config(**bad)


def test_the_bench_runs(capsys):
    """Every line of bench.py lrt, at tiny sizes on a CPU."""
    model = fresh(block_size=8, vocab_size=5, n_layer=1, n_head=1, n_embd=8)
    bench.bench_lrt(model, TrainConfig(model="lrt", batch_size=2), torch.device("cpu"),
                    rounds=1)
    lines = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert [lines.count(word) for word in ("training", "decoding", "prefill")] == [7, 4, 3]


def test_sample_prefills_either_way(data_dir, tmp_path, capsys):
    """prefill=compare tells how far the interleaved prefill is off, and samples from the exact."""
    run, gpt = (runs.run(name, tmp_path / name, data_dir).folder for name in ("lrt", "gpt"))
    found, _ = {}, capsys.readouterr()
    for how in ("exact", "interleaved", "compare"):
        sample.main([str(run), "prompt=abc def", f"prefill={how}", "temperature=0",
                     "max_new_tokens=12", "stop=false"])
        found[how], err = capsys.readouterr()
        assert ("next token: KL" in err) == (how == "compare")
    assert found["compare"] == found["exact"]
    assert all(text.startswith("abc def") for text in found.values())
    with pytest.raises(config.UserError, match="prefill=exact is for a model"):
        sample.main([str(gpt), "prefill=exact"])

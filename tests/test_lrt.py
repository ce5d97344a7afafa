"""model_lrt: its equations once more, the limits of the training paths, what they
compute, caches and prefill, the paper's sizes, optimizer and ablations, training and evaluation."""
import dataclasses
import itertools
import math

import pytest
import torch
import torch.nn.functional as F

import bench
import model_lrt
import config
import optim
from run import TrainConfig, read_config
import runs
import sample
import tasks
from conftest import relative, tiny
from test_gpt import rotate
from test_models import assert_same, outputs_and_gradients, tokens

# mixed: odd sizes, 10 dimensions a head, windows of 5 + 1 keys
SETTINGS = {"default": {},
            "mixed": dict(n_kv_head=2, pattern="SL", swa=5, n_layer=3, n_embd=40, source="1,3",
                          projections="layerwise"),
            "k": dict(inject="k", n_kv_head=2, pattern="L"), "v": dict(inject="v", projections="layerwise", swa=3),
            "kv": dict(inject="kv", source="1", n_head=1), "residual": dict(inject="residual", source="1,2")}
every = pytest.mark.parametrize("kind", SETTINGS)
some = pytest.mark.parametrize("kind", [
    pytest.param(kind, marks=[pytest.mark.full] * (kind not in ("default", "mixed"))) for kind in SETTINGS])
both = pytest.mark.parametrize("fast", [True, False])


def path(**sizes):
    name = "interleaved" if "subsets" in sizes else "chunked" if "chunk" in sizes else "exact"
    return dict(train_path=name, **sizes)


PATHS = {"exact": path(), "C=3": path(chunk=3), **{f"S={S}": path(subsets=S) for S in (1, 2, 3, 8)}}


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
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction="none").view(targets.shape)


# ---- the equations, once more ----

def unit(x):
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt()


class ByHand:
    """One sequence idx (T,). buffer: each layer's newest keys and values (T, G, D); m (T + 1, C): the newest memories,
    m[t] being m_{t-1}; out and first (T, C): the last layer's outputs, with and without memory."""

    def __init__(self, model, idx):
        self.cfg, self.w, self.idx = model.cfg, dict(model.named_parameters()), idx
        self.x0 = unit(self.w["wte.weight"][idx])
        empty = self.x0.new_zeros(len(idx), self.cfg.n_kv_head, self.cfg.head_dim)
        self.buffer = [(empty, empty)] * self.cfg.n_layer
        self.m, self.out = self.x0.new_zeros(len(idx) + 1, self.cfg.n_embd), torch.zeros_like(self.x0)

    def times(self, x, layer, name):
        return x @ self.w[f"blocks.{layer}.{name}.weight"].T

    def heads(self, x):
        return x.unflatten(-1, (-1, self.cfg.head_dim))

    def keys_values(self, layer, at, u, m):
        """The local ones and the memory's, each times its gate, one of each key head."""
        rec = f"blocks.{layer}.attn.rec." if self.cfg.projections == "layerwise" else "rec."
        k, v = (self.heads(self.times(u, layer, f"attn.{name}")) for name in ("wk", "wv"))
        e = self.heads(self.w[f"values.{layer}.weight"][self.idx[at]])
        v = v + 2 * torch.sigmoid(self.times(u[:, :32], layer, "attn.w_value"))[..., None] * e
        if self.cfg.inject != "residual":
            local, of_memory = (2 * torch.sigmoid(self.times(u, layer, "attn.w_gate"))[..., None]).chunk(2, 1)
        if rec + "wk.weight" in self.w:
            k = local * k + of_memory * self.heads(m @ self.w[rec + "wk.weight"].T)
        if rec + "wv.weight" in self.w:
            v = local * v + of_memory * self.heads(m @ self.w[rec + "wv.weight"].T)
        return rotate(unit(k), at, 10000.0), v

    def block(self, layer, at, x, u, k, v):
        cfg, distance = self.cfg, at[:, None] - torch.arange(len(self.idx))
        short = cfg.pattern[layer % len(cfg.pattern)] == "S" and layer != cfg.n_layer - 1
        hidden = (distance < 0) | (distance > cfg.swa if short else False)
        q = rotate(unit(self.heads(self.times(u, layer, "attn.wq"))), at, 10000.0)
        k, v = (y.repeat_interleave(cfg.n_head // cfg.n_kv_head, 1) for y in (k, v))
        scores = torch.einsum("nhd,shd->hns", q, k) / math.sqrt(cfg.head_dim)
        y = torch.einsum("hns,shd->nhd", scores.masked_fill(hidden, -math.inf).softmax(-1), v)
        x = x + self.times(y.flatten(1), layer, "attn.wo")
        return x + self.times(self.times(unit(x), layer, "mlp.w_up").relu() ** 2, layer, "mlp.w_down")

    def run(self, at, memory):
        """One pass over positions at (n,) that read memory (n, C): in each layer they write keys and values, then
        attend to all of the buffer; in the end they write outputs and memories."""
        x, outputs = self.x0[at], []
        for layer in range(self.cfg.n_layer):
            x = self.w["alpha"][layer] * x + self.w["beta"][layer] * self.x0[at]
            if "residual" in self.cfg.inject:
                x = x + self.w["gamma"][layer] * memory
            u = unit(x)
            kv = zip(self.buffer[layer], self.keys_values(layer, at, u, memory))
            self.buffer[layer] = [old.index_copy(0, at, new) for old, new in kv]
            x = self.block(layer, at, x, u, *self.buffer[layer])
            outputs.append(x)
        self.out = self.out.index_copy(0, at, x)
        self.m = self.m.index_copy(0, at + 1, self.memory(outputs))

    def memory(self, outputs):
        if not self.cfg.source:
            return outputs[round(0.6 * len(outputs)) - 1]
        chosen = torch.stack([outputs[int(layer) - 1] for layer in self.cfg.source.split(",")], -1)
        return chosen @ self.w["source_weights"].softmax(0) if chosen.size(-1) > 1 else chosen[..., 0]

    def chunked(self, C, start=0):
        """C = 1: the exact chain. start: positions before it are there."""
        for at in torch.arange(start, len(self.idx)).split(C):
            self.run(at, self.m[at[0]].expand(len(at), -1))
        return self

    def interleaved(self, S, T=None):
        """Of the first T positions."""
        everything = torch.arange(T or len(self.idx))
        self.run(everything, torch.zeros_like(self.x0[everything]))
        self.first = self.out
        for s in range(S):
            self.run(everything[s::S], self.m[everything[s::S]])
        return self

    def logits(self, out):
        return 15 * torch.tanh(unit(out) @ self.w["head.weight"][:self.cfg.vocab_size].T / 15)


def with_gradients(model, logits, loss):
    """What outputs_and_gradients returns."""
    model.zero_grad()
    loss.backward()
    grads = {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}
    return logits.detach(), loss.detach(), grads


def by_hand(model, x):
    """outputs_and_gradients of the model's training path."""
    cfg, y, T = model.cfg, x[:, 1:], x.size(1) - 1
    C, S = {"exact": 1, "chunked": cfg.chunk}.get(cfg.train_path, 0), min(cfg.subsets, T)
    rows = [ByHand(model, row) for row in x[:, :-1]]
    rows = [row.chunked(C) if C else row.interleaved(S) for row in rows]
    logits = torch.stack([row.logits(row.out) for row in rows])
    loss = nats(logits, y).mean()
    if not C:
        losses = [nats(torch.stack([row.logits(row.first) for row in rows]), y).mean()]
        for s in range(S):      # each a mean, weighted by its number of targets
            losses.append(nats(logits[:, s::S], y[:, s::S]).mean() * len(range(s, T, S)) * S / T)
        loss = sum(losses) / (S + 1)
    return with_gradients(model, logits, loss)


@pytest.mark.parametrize("kind, way", [*((kind, way) for kind in ("default", "mixed") for way in PATHS),
                                       *((kind, way) for kind in list(SETTINGS)[2:] for way in ("S=3", "C=3"))])
def test_each_path_is_its_equations(kind, way):
    """Logits, loss and all gradients: were anything in the buffer detached, they would differ."""
    model, x = lrt(kind, **PATHS[way]), tokens(2, 12)
    assert_same(outputs_and_gradients(model, x), by_hand(model, x), all_reached=True)


def test_the_log_has_the_loss_of_the_first_pass_too():
    model, x = lrt(subsets=3), tokens(2, 13)
    aux, both = model(x[:, :-1], x[:, 1:])[2], [nats(logits, x[:, 1:]).mean() for logits in passes(model, x[:, :-1])]
    assert abs(aux["ce"] - both[0]) < 1e-12 and abs(aux["ce_first"] - both[1]) < 1e-12 and both[0] != both[1]


# ---- limits ----

def refined(model, x):
    """outputs_and_gradients of the subsets' passes: the first pass has a loss of its own."""
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


# ---- naive and fast, and what is computed ----

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


@both
@pytest.mark.parametrize("kind", ["default", "mixed"])
def test_no_row_outside_a_subset_is_computed(kind, fast, monkeypatch):
    """Rows of one sequence in each product with a weight. Of 13 positions: 13 in the first pass, then 7 and 6, then in
    the head's two. The first pass has no products with the memory."""
    rows, linear = [], F.linear
    monkeypatch.setattr(F, "linear", lambda x, *more: (rows.append(x.size(1)), linear(x, *more))[1])
    model, x = lrt(kind, fast=fast, **path(subsets=2)), tokens(2, 14)
    model(x[:, :-1], x[:, 1:])
    (_, a), (_, b), (_, c), head = found = [(n, len(list(group))) for n, group in itertools.groupby(rows)]
    of_memory = sum("rec." in name for name, _ in model.named_parameters())
    assert [n for n, _ in found] == [13, 7, 6, 13] and head == (13, 2)
    assert a == b - of_memory and b == c and of_memory >= 2


@pytest.mark.parametrize("way", PATHS)
def test_the_fast_path_builds_no_mask(way, monkeypatch):
    """Neither in training nor in evaluation."""
    model, x = lrt("mixed", **PATHS[way]), tokens(2, 12)
    monkeypatch.delattr(model_lrt, "attention_bias")
    monkeypatch.delattr(model_lrt, "attention_naive")
    model(x[:, :-1], x[:, 1:])[1].backward()
    model.eval()(x)


@some
def test_a_training_step_reaches_every_parameter(kind):
    """With a gradient, be it zero, also where one pass holds all positions: DDP waits for it."""
    for sizes in (path(), path(chunk=3), path(chunk=50), path(subsets=1), path(subsets=2)):
        model, x = lrt(kind, **sizes), tokens(1, 9)
        model(x[:, :-1], x[:, 1:])[1].backward()
        assert not [name for name, p in model.named_parameters() if p.grad is None]


# ---- the start ----

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


# ---- caches and prefill ----

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
    """Prompts of 11, 1 and 6 tokens: logits, memories, and the next logits. Those of an empty prompt are exact."""
    model = tiny("lrt", **SETTINGS[kind], prefill="interleaved", subsets=S)
    x, n, cache = tokens(4, 14), [11, 1, 6, 0], model.init_cache(4, 20)
    with torch.no_grad():
        prompts, m = model(x[:, :11], cache=cache, n_valid=torch.tensor(n))[0], cache.memory.clone()
        after = model(torch.stack([row[k:k + 3] for row, k in zip(x, n)]), cache=cache)[0]
        assert not m[3].any() and relative(after[3], model(x[3:, :3])[0][0]) < 1e-10
        for b, k in enumerate(n[:3]):
            alone, row = model.init_cache(1, 20), x[b:b + 1]
            assert relative(prompts[b, :k], model(row[:, :k], cache=alone)[0][0]) < 1e-10
            assert relative(m[b], alone.memory[0]) < 1e-10
            assert relative(after[b], model(row[:, k:k + 3], cache=alone)[0][0]) < 1e-10


# ---- the paper's sizes and optimizer ----

@pytest.mark.parametrize("name, millions, more, layerwise, source",
                         [("lrt_20l", 1316, 0.29, 4.78, 12), ("lrt_24l", 1988, 0.28, 5.43, 14)])
def test_sizes_of_the_paper(name, millions, more, layerwise, source):
    fields = read_config([f"config=configs/{name}.yaml"])[1]

    def count(**sizes):
        with torch.device("meta"):
            model = model_lrt.Model(model_lrt.Config(**{**fields, "vocab_size": 32768, **sizes}))
        return model.cfg, sum(p.numel() for p in model.parameters())
    (cfg, backbone), (_, shared), (_, own) = count(memory=False), count(), count(projections="layerwise")
    L, d, heads = cfg.n_layer, cfg.n_embd, cfg.n_head
    assert cfg.head_dim == 128 and cfg.sources == [source] == dataclasses.replace(cfg, source="").sources
    assert round(backbone / 1e6) == millions
    assert shared - backbone == 2 * d * heads * 128 + L * 2 * heads * d + L
    assert own - backbone == L * (2 * d * heads * 128 + 2 * heads * d + 1)
    assert round(100 * (shared - backbone) / backbone, 2) == more
    assert round(100 * (own - backbone) / own, 2) == layerwise


def muon(**keys):
    return TrainConfig(**{**dict(model="lrt", optimizer="muon", learning_rate=0.004, muon_learning_rate=0.02,
                                 weight_decay=0.2), **keys})


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


# ---- training and evaluation ----

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
def test_an_evaluation_is_exact_on_some_batches_and_estimates_on_all(way, data_dir, tmp_path, monkeypatch):
    trainer = runs.run("lrt", tmp_path, data_dir, "max_steps=1", "eval_batches=1", *way.split())
    model, called = trainer.model.eval(), []
    with torch.no_grad():       # a gap that float32 cannot hide
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))
        batches = [trainer.batches.cut(trainer.batches.val, start) for start in trainer.batches.val_batches(5)]
        exact = [float(model(x, y)[1]) for x, y in batches]
        estimate = [float(model.estimate(x, y)) for x, y in batches]
    hidden, mean = model.hidden, lambda values: sum(values) / len(values)
    monkeypatch.setattr(model, "hidden", lambda *a, path="exact": (called.append(path), hidden(*a, path=path))[1])
    for wanted, which in ((1, [0]), (2, [0, 4]), (3, [0, 2, 4]), (0, range(5)), (9, range(5))):
        trainer.cfg.eval_batches, trainer.cfg.exact_batches = 5, wanted
        called.clear()
        result, gap = trainer.evaluate(), mean([exact[i] - estimate[i] for i in which])
        assert called.count("exact") == len(which) and called.count(model.cfg.train_path) == 5
        assert abs(result["val_ce"] - mean([exact[i] for i in which])) < 1e-5
        assert abs(result["val_ce_estimate"] - mean(estimate)) < 1e-5
        assert abs(result["val_gap"] - gap) < 1e-5 and abs(gap) > 1e-4


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
    (dict(pattern=""), "pattern="), (dict(inject="x"), "inject=x"), (dict(n_embd=2056), "n_embd / n_head = 514")])
def test_impossible_settings_are_named(bad, named):
    with pytest.raises(ValueError, match=named):
        model_lrt.Config(**bad)


def test_the_bench_runs(capsys):
    """Every line of bench.py lrt, at tiny sizes on a CPU."""
    model = fresh(block_size=8, vocab_size=5, n_layer=1, n_head=1, n_embd=8)
    bench.bench_lrt(model, TrainConfig(model="lrt", batch_size=2), torch.device("cpu"), rounds=1)
    lines = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert [lines.count(word) for word in ("training", "decoding", "prefill")] == [7, 4, 3]


def test_sample_prefills_either_way(data_dir, tmp_path, capsys):
    """prefill=compare tells how far the interleaved prefill is off, and samples from the exact."""
    run, gpt = (runs.run(name, tmp_path / name, data_dir).folder for name in ("lrt", "gpt"))
    found, _ = {}, capsys.readouterr()
    for how in ("exact", "interleaved", "compare"):
        sample.main([str(run), "prompt=abc def", f"prefill={how}", "temperature=0", "max_new_tokens=12", "stop=false"])
        found[how], err = capsys.readouterr()
        assert ("next token: KL" in err) == (how == "compare")
    assert found["compare"] == found["exact"]
    assert all(text.startswith("abc def") for text in found.values())
    with pytest.raises(config.UserError, match="prefill=exact is for a model"):
        sample.main([str(gpt), "prefill=exact"])

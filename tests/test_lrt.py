"""model_lrt: against its equations written once more with loops, the limits of its training paths, which rows they
compute, caches, prefill, the paper's sizes, optimizer and ablations, and how training and evaluation use it."""
import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import bench
import kernels
import model_lrt
import prepare
import sample
import runs
import train
from conftest import relative, tiny
from test_models import assert_cache_is_forward, assert_same, outputs_and_gradients, rms, tokens
from test_rat import turned

# Odd sizes: 10 dimensions a head, a window of 5 + 1 keys, a layer that is short twice in its pattern.
MIXED = dict(n_kv_head=2, pattern="SL", swa=5, n_layer=3, n_embd=40, projections="layerwise", source="1,3",
             state="average")
SETTINGS = {"default": {}, "mixed": MIXED, "lag": dict(lag=3, swa=2), "current": dict(state="current"),
            "both": dict(state="both", projections="layerwise", swa=3, n_kv_head=1),
            "k": dict(inject="k", n_kv_head=2), "v": dict(inject="v", projections="layerwise"),
            "kv": dict(inject="kv", source="1"), "residual": dict(inject="residual", source="1,2"),
            "average": dict(state="average", pattern="L", n_head=1),
            "replace": dict(replace=True, n_layer=6, n_embd=16, n_head=2, n_kv_head=1, pattern="SSL", swa=4),
            "replace kv": dict(replace=True, inject="kv", projections="layerwise", value_residual=True),
            "plain": dict(value_embeddings=False, x0_mixing=False, n_head=2),
            "layer scale": dict(layer_scale=True, n_head=2), "gated": dict(gated_attention=True, n_kv_head=2),
            "value residual": dict(value_residual=True, n_layer=3, n_head=2),
            "dense": dict(dense_residual=True, n_layer=4, n_embd=16, n_head=2)}
every = pytest.mark.parametrize("kind", SETTINGS)
# What zero memory makes the backbone: nothing is replaced by it, and no position has a memory of its own first pass.
additive = pytest.mark.parametrize("kind", sorted(SETTINGS.keys() - {"replace", "replace kv", "current", "both"}))


def lrt(kind="default", **sizes):
    """The tiny float64 model of conftest of this kind, in training mode."""
    return tiny("lrt", **{**SETTINGS[kind], **sizes}).train()


def path(**sizes):
    return dict(train_path="interleaved" if "subsets" in sizes else "chunked" if "chunk" in sizes else "exact", **sizes)


def copied(model, **sizes):
    """A model that differs in `sizes`, with those of model's weights that it has; and in training mode."""
    other = tiny("lrt", **{**{k: getattr(model.cfg, k) for k in model_lrt.Config.__dataclass_fields__}, **sizes})
    weights = model.state_dict()
    assert set(other.state_dict()) <= set(weights)
    other.load_state_dict({name: weights[name] for name in other.state_dict()})
    return other.train(model.training)


# ---------------------------------------------------------------------------------------------------------------------
# the equations, once more, with loops over positions and heads

def unit(x):
    return x / (x.square().mean() + 1e-5).sqrt()


class ByHand:
    """One text. kept: each layer's newest keys and values, {position: [head]}, and m the newest states; before: keys
    and values of the first passes, without memory; out and first: the last layer's outputs, with and without memory."""

    def __init__(self, model, idx):
        self.cfg, self.w, self.idx = model.cfg, dict(model.named_parameters()), idx.tolist()
        self.x0 = [unit(self.w["wte.weight"][i]) for i in self.idx]
        self.zero = torch.zeros_like(self.x0[0])
        self.kept, self.before = ([({}, {}) for _ in range(self.cfg.n_layer)] for _ in range(2))
        self.m, self.out, self.first = {}, {}, {}

    def of(self, layer, name):
        return self.w.get(f"blocks.{layer}.{name}")

    def short(self, layer):
        return self.cfg.pattern[layer % len(self.cfg.pattern)] == "S" and layer != self.cfg.n_layer - 1

    def entering(self, layer, t, x, m, earlier):
        if self.cfg.x0_mixing:
            x = self.w["alpha"][layer] * x + self.w["beta"][layer] * self.x0[t]
        if self.cfg.memory and self.cfg.inject in ("residual", "kv+residual"):
            x = x + self.w["gamma"][layer] * m
        for j, output in enumerate(earlier if self.cfg.dense_residual else []):
            x = x + self.w["delta"][layer, j] * output
        return x

    def keys_values(self, layer, t, u, m):
        """Of each key head, before the norm: the local ones and the memory's, each times its gate."""
        cfg, D, G, ks, vs = self.cfg, self.cfg.head_dim, self.cfg.n_kv_head, [], []
        replaced = cfg.replace and layer < max(1, cfg.n_layer // 3)
        rec = f"blocks.{layer}.attn.rec." if cfg.projections == "layerwise" else "rec."
        wk_rec, wv_rec = self.w.get(rec + "wk.weight"), self.w.get(rec + "wv.weight")
        if wk_rec is not None or wv_rec is not None:
            gate = 2 * torch.sigmoid(self.of(layer, "attn.w_gate.weight") @ u)
        for g in range(G):
            mine = slice(g * D, g * D + D)
            if replaced:
                k, v = gate[g] * (wk_rec[mine] @ m), gate[g] * (wv_rec[mine] @ m)
            else:
                k, v = self.of(layer, "attn.wk.weight")[mine] @ u, self.of(layer, "attn.wv.weight")[mine] @ u
                if cfg.value_embeddings:
                    opening = 2 * torch.sigmoid(self.of(layer, "attn.w_value.weight")[g] @ u[:32])
                    v = v + opening * self.w[f"values.{layer}.weight"][self.idx[t], mine]
                k = k if wk_rec is None else gate[g] * k + gate[G + g] * (wk_rec[mine] @ m)
                v = v if wv_rec is None else gate[g] * v + gate[G + g] * (wv_rec[mine] @ m)
            ks.append(k), vs.append(v)
        return ks, vs

    def block(self, layer, t, x, u, keys, values):
        cfg, D, y = self.cfg, self.cfg.head_dim, []
        seen = [j for j in range(t + 1) if not self.short(layer) or t - j <= cfg.swa]
        for h in range(cfg.n_head):
            g = h // (cfg.n_head // cfg.n_kv_head)
            q = turned(unit(self.of(layer, "attn.wq.weight")[h * D:h * D + D] @ u), t)
            p = (torch.stack([keys[j][g] for j in seen]) @ q / math.sqrt(D)).softmax(0)
            y.append(p @ torch.stack([values[j][g] for j in seen]))
            if cfg.gated_attention:
                y[h] = y[h] * 2 * torch.sigmoid(self.of(layer, "attn.w_out_gate.weight")[h] @ u)
        scales = self.of(layer, "scales") if cfg.layer_scale else (1, 1)
        x = x + scales[0] * (self.of(layer, "attn.wo.weight") @ torch.cat(y))
        hidden = (self.of(layer, "mlp.w_up.weight") @ unit(x)).relu() ** 2
        return x + scales[1] * (self.of(layer, "mlp.w_down.weight") @ hidden)

    def forward(self, positions, memory, store):
        """One pass over some positions, memory {t: m}: at each layer they write their keys and values into store, then
        attend to all in it. -> {t: last output}, {t: state}"""
        cfg, x, outputs, values_0 = self.cfg, {t: self.x0[t] for t in positions}, [], {}
        for layer, (keys, values) in enumerate(store):
            u = {}
            for t in positions:
                x[t] = self.entering(layer, t, x[t], memory[t], [output[t] for output in outputs])
                u[t] = unit(x[t])
                k, v = self.keys_values(layer, t, u[t], memory[t])
                if cfg.value_residual and layer:
                    v = [a + self.of(layer, "attn.v0_scale") * b for a, b in zip(v, values_0[t])]
                values_0.setdefault(t, v)
                keys[t], values[t] = [turned(unit(a), t) for a in k], v
            for t in positions:
                x[t] = self.block(layer, t, x[t], u[t], keys, values)
            outputs.append(dict(x))
        return x, {t: self.state([output[t] for output in outputs]) for t in positions}

    def state(self, outputs):
        layers = [int(name) for name in self.cfg.source.split(",")] if self.cfg.source else [round(.6 * len(outputs))]
        if len(layers) == 1:
            return outputs[layers[0] - 1]
        return sum(w * outputs[layer - 1] for w, layer in zip(self.w["source_weights"].softmax(0), layers))

    def memory(self, t, own):
        """What a position reads that has the states before t behind it, and its own of the first pass, if any."""
        past = lambda i: self.m.get(t - i, self.zero)
        if self.cfg.state == "lag":
            return past(self.cfg.lag)
        if self.cfg.state == "average":
            return sum(w * past(i + 1) for i, w in enumerate(self.w["state_weights"].softmax(0)))
        return own if self.cfg.state == "current" else own + past(1)

    def nothing(self, positions):
        return dict.fromkeys(positions, self.zero)

    def chunked(self, C, start=0):
        """C = 1: the exact chain. start: positions before it are there."""
        for low in range(start, len(self.idx), C):
            at = range(low, min(low + C, len(self.idx)))
            own = self.forward(at, self.nothing(at), self.before)[1] if self.cfg.state in ("current", "both") else {}
            out, m = self.forward(at, {t: self.memory(low, own.get(t)) for t in at}, self.kept)
            self.out.update(out), self.m.update(m)
        return self

    def interleaved(self, S, T=None):
        """Of the first T positions."""
        everything = range(T or len(self.idx))
        self.first, own = self.forward(everything, self.nothing(everything), self.kept)
        self.m, self.before = dict(own), [(dict(keys), dict(values)) for keys, values in self.kept]
        for s in range(S):
            at = everything[s::S]
            out, m = self.forward(at, {t: self.memory(t, own[t]) for t in at}, self.kept)
            self.out.update(out), self.m.update(m)
        return self

    def logits(self, hidden):
        z = torch.stack([self.w["head.weight"][:self.cfg.vocab_size] @ unit(hidden[t]) for t in sorted(hidden)])
        return 15 * torch.tanh(z / 15)


def nats(logits, targets):
    return -logits.log_softmax(-1).gather(-1, targets[..., None])[..., 0]


def by_hand(model, x):
    """outputs_and_gradients of the model's training path."""
    model.zero_grad()
    cfg, y, T = model.cfg, x[:, 1:], x.size(1) - 1
    C, S = {"exact": 1, "chunked": cfg.chunk}.get(cfg.train_path, 0), min(cfg.subsets, T)
    texts = [ByHand(model, row).chunked(C) if C else ByHand(model, row).interleaved(S) for row in x[:, :-1]]
    logits = torch.stack([text.logits(text.out) for text in texts])
    loss = nats(logits, y).mean()
    if not C:
        losses = [nats(torch.stack([text.logits(text.first) for text in texts]), y).mean()]
        for s in range(S):      # each a mean; where S does not divide T, weighed by how many they are of
            at = slice(s, None, S)
            losses.append(nats(logits[:, at], y[:, at]).mean() * len(range(s, T, S)) * S / T)
        loss = sum(losses) / (S + 1)
    loss.backward()
    grads = {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}
    return logits.detach(), loss.detach(), grads


PATHS = {"exact": path(), "C=3": path(chunk=3), **{f"S={S}": path(subsets=S) for S in (1, 2, 3, 8)}}


@pytest.mark.parametrize("kind, way, B", [(kind, way, 2) for kind in ("default", "mixed") for way in PATHS] +
                         [(kind, way, 1) for kind in list(SETTINGS)[2:] for way in ("exact", "S=3", "C=3")])
def test_each_path_is_its_equations(kind, way, B):
    """Logits, loss and all gradients: were anything in the buffer cut from the graph, they would differ."""
    model, x = lrt(kind, **PATHS[way]), tokens(B, 12 if B == 2 else 9)
    assert_same(outputs_and_gradients(model, x), by_hand(model, x), all_reached=True)


def test_the_loss_is_the_mean_of_all_passes():
    """Algorithm 1's, where S divides T: (L_first + sum of L_s) / (S + 1); and what is said of its parts."""
    model, x = lrt(subsets=3), tokens(2, 13)
    y = x[:, 1:]
    loss, aux = model(x[:, :-1], y)[1:]
    refined, first = (nats(model.logits(h), y) for h in model.hidden(x[:, :-1], None, None, "interleaved"))
    want = (first.mean() + sum(refined[:, s::3].mean() for s in range(3))) / 4
    assert abs(loss - want) < 1e-12 and abs(aux["ce"] - refined.mean()) < 1e-12
    assert abs(aux["ce_first"] - first.mean()) < 1e-12 and relative(refined, first) > 1e-3


def test_the_loss_in_pieces_counts_both_passes():
    """Where logits are many: the same loss, parts and gradients, without them."""
    model, x, found = lrt(subsets=3), tokens(2, 13), {}
    for model.max_logits in (2 ** 28, 300):
        model.zero_grad()
        logits, loss, aux = model(x[:, :-1], x[:, 1:])
        loss.backward()
        found[logits is None] = [loss.detach(), *aux.values(), *(p.grad for p in model.parameters())]
    assert all(relative(a, b) < 1e-10 for a, b in zip(found[False], found[True], strict=True))


# ---------------------------------------------------------------------------------------------------------------------
# limits

def refined(model, x):
    """outputs_and_gradients of the positions computed again alone: the first pass has a loss of its own."""
    model.zero_grad()
    logits = model.logits(model.hidden(x[:, :-1], None, None, "interleaved")[0])
    loss = nats(logits, x[:, 1:]).mean()
    loss.backward()
    grads = {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}
    return logits.detach(), loss.detach(), grads


@pytest.mark.parametrize("kind, fast", [(kind, True) for kind in SETTINGS] + [("default", False), ("both", False)])
def test_as_many_subsets_as_tokens_and_chunks_of_one_are_the_exact_chain(kind, fast):
    model, x = lrt(kind, **path(), fast=fast), tokens(2, 12)
    want = outputs_and_gradients(model, x)
    assert_same(refined(copied(model, **path(subsets=11)), x), want, all_reached=True)
    assert_same(refined(copied(model, **path(subsets=50)), x), want)
    assert_same(outputs_and_gradients(copied(model, **path(chunk=1)), x), want)
    assert relative(refined(copied(model, **path(subsets=2)), x)[0], want[0]) > 1e-4, "these sizes tell paths apart"


def without_gates(model):
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith("w_gate.weight"):
                p.zero_()
    return model


def shared(result, names):
    logits, loss, grads = result
    return logits, loss, {name: grads[name] for name in names}


def assert_backbone(model, x, got):
    """got, of the model, is what the model without memory gives; gradients of the parameters that both have."""
    backbone = copied(model, memory=False)
    names = [name for name, _ in backbone.named_parameters()]
    assert len(names) < len(list(model.parameters()))
    assert_same(shared(got, names), outputs_and_gradients(backbone, x))


@additive
@pytest.mark.parametrize("fast", [True, False])
def test_one_chunk_of_all_is_the_backbone(kind, fast):
    for C in (11, 50):
        model, x = without_gates(lrt(kind, **path(chunk=C), fast=fast)), tokens(2, 12)
        assert_backbone(model, x, outputs_and_gradients(model, x))


@additive
@pytest.mark.parametrize("S", [2, 3])
def test_memory_that_enters_with_zero_weight_leaves_the_backbone(kind, S):
    """All passes are the backbone's then, so its loss and gradients come out, where S does not divide T too."""
    model, x = without_gates(lrt(kind, **path(subsets=S))), tokens(2, 12)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name == "gamma" or ".rec." in "." + name:
                p.zero_()
        again, first = (model.logits(h) for h in model.hidden(x[:, :-1], None, None, "interleaved"))
    got = outputs_and_gradients(model, x)
    assert relative(again, first) < 1e-10 and relative(again, got[0]) < 1e-10
    assert_backbone(model, x, got)


@pytest.mark.parametrize("kind", ["default", "mixed"])
def test_the_first_pass_is_the_backbone(kind):
    model, x = without_gates(lrt(kind)), tokens(2, 11)
    first = model.logits(model.hidden(x, None, None, "interleaved")[1])
    assert relative(first, copied(model, memory=False)(x)[0]) < 1e-10


# ---------------------------------------------------------------------------------------------------------------------
# naive and fast

def assert_naive_is_fast(kind, T, **sizes):
    model, x = lrt(kind, **sizes), tokens(2, T + 1)
    naive = copied(model, fast=False)
    assert model.cfg.fast and not naive.cfg.fast
    assert_same(outputs_and_gradients(model, x), outputs_and_gradients(naive, x))
    return model, naive, x


@pytest.mark.parametrize("kind", ["default", "mixed", "both"])
@pytest.mark.parametrize("S", [1, 2, 3, 8])
@pytest.mark.parametrize("T", [1, 2, 13, 37])
def test_interleaved_naive_is_fast(kind, S, T):
    assert_naive_is_fast(kind, T, **path(subsets=S))


@every
def test_training_naive_is_fast(kind):
    for T, S in ((2, 8), (13, 3), (37, 2)):
        assert_naive_is_fast(kind, T, **path(subsets=S))
    for T, C in ((1, 5), (2, 1), (13, 20), (37, 8)):
        assert_naive_is_fast(kind, T, **path(chunk=C))


@every
def test_exact_naive_is_fast(kind):
    """37 passes: more than History keeps apart. In eval mode and without gradients it is the cache's code."""
    for T in (1, 2, 37 if kind in ("default", "mixed", "both") else 5):
        model, naive, x = assert_naive_is_fast(kind, T, **path())
        with torch.no_grad():
            assert relative(model.eval()(x)[0], naive.eval()(x)[0]) < 1e-10


# ---------------------------------------------------------------------------------------------------------------------
# what is computed

@pytest.fixture
def counted(monkeypatch):
    """Rows (of one text) that go through each matrix product with a weight, and queries of each attention."""
    rows, queries, linear, attend = [], [], F.linear, kernels.attend
    fast, naive = model_lrt.attention_fast, model_lrt.attention_naive

    def counting(of, original, at):
        def spy(x, *arguments, **options):
            of.append(x.size(at))
            return original(x, *arguments, **options)
        return spy
    monkeypatch.setattr(F, "linear", counting(rows, linear, 1))
    monkeypatch.setattr(kernels, "attend", counting(queries, attend, 2))
    monkeypatch.setattr(model_lrt, "attention_fast", counting(queries, fast, 2))
    monkeypatch.setattr(model_lrt, "attention_naive", counting(queries, naive, 2))
    return rows, queries


def lengths(values):
    """[(value, how often in a row)]"""
    return [(value, len(list(group))) for value, group in itertools.groupby(values)]


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("kind", ["default", "mixed", "replace", "current"])
def test_no_row_outside_a_subset_is_computed(kind, fast, counted):
    """Of 13 positions: 13 in the first pass, then 7 and 6, then the head's two. As many products in each pass, but for
    the memory's projections."""
    rows, queries = counted
    model, x = lrt(kind, fast=fast, **path(subsets=2)), tokens(2, 14)
    model(x[:, :-1], x[:, 1:])
    (_, a), (_, b), (_, c), head = found = lengths(rows)
    assert [n for n, _ in found] == [13, 7, 6, 13] and head == (13, 2) and b == c
    of_memory = sum(".rec." in "." + name for name, _ in model.named_parameters())
    assert a == (b - of_memory if fast else b) and b >= 4 * model.cfg.n_layer
    assert lengths(queries) == [(n, model.cfg.n_layer) for n in (13, 7, 6)]


def test_subsets_of_any_number_cost_one_pass_together(counted):
    """The MLP's rows: T, and once more T, whatever S."""
    for S in (1, 3, 5, 13, 40):
        model, x, seen = lrt(**path(subsets=S)), tokens(2, 13), []
        model.blocks[1].mlp.w_up.register_forward_hook(lambda module, inputs, out: seen.append(inputs[0].size(1)))
        model(x, x)
        assert seen == [13] + [len(range(s, 13, S)) for s in range(min(S, 13))]


def test_chunks_and_the_chain_compute_each_row_once(counted):
    """The head sees all 13, the memory's projections one row a chunk."""
    rows, queries = counted
    for sizes, parts in ((path(chunk=5), [5, 5, 3]), (path(), [1] * 13)):
        rows.clear(), queries.clear()
        lrt(**sizes)(tokens(2, 13))
        assert set(rows) == {1, *parts, 13} and rows.count(13) == 1 and queries == [n for n in parts for _ in range(2)]


class Widest(TorchDispatchMode):
    """For the two longest dimensions of each tensor that an operator made: the largest of the shorter ones."""

    def __init__(self):
        super().__init__()
        self.size = 0

    def __torch_dispatch__(self, op, types, arguments=(), options=None):
        out = op(*arguments, **(options or {}))
        for x in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(x, torch.Tensor) and x.dim() > 1:
                self.size = max(self.size, sorted(x.shape)[-2])
        return out


@pytest.mark.parametrize("kind", ["default", "mixed"])
@pytest.mark.parametrize("S", [2, 3])
def test_no_tensor_holds_a_pair_of_positions_each(kind, S, monkeypatch):
    """Forward and backward of a step: neither T x T nor a subset's T / S x T; the naive code has them."""
    monkeypatch.setattr(kernels, "attend", kernels.attend_ref)      # inside an operator a dispatch mode is blind
    T, sizes = 600, dict(block_size=600, n_head=2, n_kv_head=1, swa=100)
    x = tokens(1, T + 1)
    for fast in (True, False):
        model = lrt(kind, **sizes, fast=fast, **path(subsets=S))
        with Widest() as widest:
            model(x[:, :-1], x[:, 1:])[1].backward()
        assert widest.size < T // S if fast else widest.size == T


# ---------------------------------------------------------------------------------------------------------------------
# the beginning

def fresh(**sizes):
    torch.manual_seed(0)
    return model_lrt.Model(model_lrt.Config(**sizes))


def test_gates_are_neutral_at_the_start(monkeypatch):
    """All gates are 1, whatever the input; scales are 1, mixing 0.1; the extras do nothing."""
    model = fresh(n_layer=3, gated_attention=True, layer_scale=True, value_residual=True, dense_residual=True)
    x, opened, sigmoid = tokens(2, 20, 257), [], torch.sigmoid
    monkeypatch.setattr(torch, "sigmoid", lambda x: (opened.append(sigmoid(x)), opened[-1])[1])
    loss = model(x, x)[1]
    gates = 4 + 2 * 4 + 4                                       # of a value embedding, local and the memory's, of heads
    assert sum(g.numel() for g in opened) == 2 * 2 * 20 * 3 * gates and all((2 * g == 1).all() for g in opened)
    assert (model.alpha == 1).all() and torch.equal(model.beta, torch.full((3,), 0.1))
    assert torch.equal(model.gamma, torch.full((3,), 0.1)) and not model.delta.any()
    assert all((block.scales == 1).all() for block in model.blocks)
    assert all(block.attn.v0_scale == 0 for block in model.blocks[1:]) and abs(loss - math.log(257)) < 0.1
    averaged = fresh(source="1,2,4", state="average")
    assert torch.equal(averaged.source_weights.softmax(0), torch.full((3,), 1 / 3))
    assert torch.equal(averaged.state_weights.softmax(0), torch.full((4,), 1 / 4))


@pytest.mark.parametrize("projections", ["shared", "layerwise"])
def test_initial_weights(projections):
    C, limit = 256, math.sqrt(3 / 256)
    model = fresh(n_layer=2, n_embd=C, n_head=4, projections=projections)
    assert abs(model.wte.weight.std() - 1) < 0.02 and abs(model.head.weight.std() / 0.001 - 1) < 0.02
    uniform = ("attn.wq", "attn.wk", "attn.wv", "mlp.w_up", "rec.wk", "rec.wv")
    zero = ("attn.wo", "mlp.w_down", "w_gate", "w_value")
    seen = set()
    for name, p in model.named_parameters():
        name = name.removesuffix(".weight")
        if name.endswith(uniform) or name.startswith("values."):
            seen.add(name)
            assert abs(p.std() * math.sqrt(C) - 1) < 0.02 and 0.99 * limit < p.abs().max() <= limit, name
        elif name.endswith(zero):
            assert not p.any(), name
        else:
            assert name in ("wte", "head", "alpha", "beta", "gamma")
    assert len(seen) == 2 * 4 + 2 + (2 if projections == "shared" else 4)


def test_logits_are_bounded_and_without_padding():
    model, x = tiny("lrt"), tokens(2, 11)
    with torch.no_grad():
        model.head.weight.mul_(1e4)
        logits = model(x)[0]
    assert model.wte.weight.shape[0] == model.head.weight.shape[0] == 64 and logits.shape == (2, 11, 61)
    assert 14.9 < logits.abs().max() <= 15
    assert model_lrt.Model(model_lrt.Config(vocab_size=64)).wte.weight.shape[0] == 64


def test_windows_are_the_papers():
    """SSSL, half the context and the query itself, the last layer all of it; too short a context has none."""
    windows = lambda **sizes: [cfg.window(layer) for cfg in [model_lrt.Config(**sizes)] for layer in range(cfg.n_layer)]
    assert windows(n_layer=10, block_size=64) == [33, 33, 33, 0, 33, 33, 33, 0, 33, 0]
    assert windows(n_layer=3, pattern="SL", swa=5) == [6, 0, 0] and windows(n_layer=2, swa=300) == [0, 0]
    model, x = tiny("lrt", n_layer=2, swa=3, memory=False), tokens(1, 12)
    with torch.no_grad():
        model.blocks[1].attn.wo.weight.zero_()                      # the first layer alone looks back
        moved = []
        for t in range(12):
            y = x.clone()
            y[0, t] = (y[0, t] + 1) % 61
            moved.append(not torch.equal(model(x)[0][0, 9], model(y)[0][0, 9]))
    assert [t for t in range(12) if moved[t]] == [6, 7, 8, 9]


# ---------------------------------------------------------------------------------------------------------------------
# caches and prefill

@every
@pytest.mark.parametrize("fast", [True, False])
def test_decoding_is_the_exact_forward(kind, fast):
    assert_cache_is_forward(tiny("lrt", **SETTINGS[kind], fast=fast), [23, 9], [5, 1, 1, 16], 1e-10)


def test_the_cache_is_a_transformers_and_one_vector_a_row():
    sizes = dict(n_layer=3, n_head=4, n_kv_head=2, n_embd=32)
    cache, gpts = (tiny(name, **sizes).init_cache(5, 40) for name in ("lrt", "gpt"))
    assert [buffer.shape for buffer in cache.k + cache.v] == [buffer.shape for buffer in gpts.k + gpts.v]
    assert cache.nbytes() == gpts.nbytes() + 5 * 32 * 8
    nbytes = lambda **more: tiny("lrt", **sizes, **more).init_cache(5, 40).nbytes() - gpts.nbytes()
    assert nbytes(lag=3) == 3 * 5 * 32 * 8 and nbytes(state="average") == 4 * 5 * 32 * 8
    assert nbytes(memory=False) == 0 and nbytes(state="current") == gpts.nbytes()
    assert nbytes(state="both") == gpts.nbytes() + 5 * 32 * 8


PREFILL = pytest.mark.parametrize("kind", ["default", "mixed", "lag", "current", "both", "replace", "value residual"])


@PREFILL
def test_prefill_in_as_many_subsets_as_tokens_is_exact(kind):
    model, x = tiny("lrt", **SETTINGS[kind], prefill="interleaved", subsets=14), tokens(2, 20)
    with torch.no_grad():
        want, cache = model(x)[0], model.init_cache(2, 20)
        got = torch.cat([model(part, cache=cache)[0] for part in x.split([14, 1, 4, 1], 1)], 1)
    assert relative(got, want) < 1e-10


@PREFILL
@pytest.mark.parametrize("fast", [True, False])
def test_interleaved_prefill_goes_on_exactly(kind, fast):
    """Two subsets over the prompt, then the chain from what they left: the equations' logits at all positions."""
    model, x = tiny("lrt", **SETTINGS[kind], prefill="interleaved", fast=fast), tokens(2, 16)
    with torch.no_grad():
        cache = model.init_cache(2, 16)
        got = torch.cat([model(part, cache=cache)[0] for part in x.split([11, 1, 4], 1)], 1)
        for row, logits in zip(x, got):
            text = ByHand(model, row).interleaved(2, 11).chunked(1, 11)
            assert relative(logits, text.logits(text.out)) < 1e-10
        estimate = model.logits(model.hidden(x[:, :11], None, None, "interleaved")[0])
        assert relative(got[:, :11], estimate) < 1e-10 and relative(estimate, model(x[:, :11])[0]) > 1e-4
    assert cache.lengths.tolist() == [16, 16] and got.isfinite().all()


@PREFILL
@pytest.mark.parametrize("S", [2, 3])
def test_rows_of_a_prefill_are_as_if_alone(kind, S):
    """Prompts of 11, 1 and 6 tokens, and an empty one: logits, states, and the logits of the next tokens, of which the
    empty row's are exact."""
    model, x, n = tiny("lrt", **SETTINGS[kind], prefill="interleaved", subsets=S), tokens(4, 14), [11, 1, 6, 0]
    with torch.no_grad():
        cache = model.init_cache(4, 20)
        prompts = model(x[:, :11], cache=cache, n_valid=torch.tensor(n))[0]
        states, held = cache.states.clone(), cache.lengths.tolist()
        after = model(torch.stack([row[k:k + 3] for row, k in zip(x, n)]), cache=cache)[0]
        assert held == n and not states[3].any() and relative(after[3], model(x[3:, :3])[0][0]) < 1e-10
        for b, length in enumerate(n[:3]):
            alone = model.init_cache(1, 20)
            assert relative(prompts[b, :length], model(x[b:b + 1, :length], cache=alone)[0][0]) < 1e-10
            assert not states.numel() or relative(states[b], alone.states[0]) < 1e-10
            assert relative(after[b], model(x[b:b + 1, length:length + 3], cache=alone)[0][0]) < 1e-10


# ---------------------------------------------------------------------------------------------------------------------
# the paper's sizes and optimizer

@pytest.mark.parametrize("n_layer, millions, more, layerwise, source", [(20, 1316, 0.29, 4.78, 12),
                                                                        (24, 1988, 0.28, 5.43, 14)])
def test_sizes_of_the_paper(n_layer, millions, more, layerwise, source):
    d, heads = 64 * n_layer, n_layer // 2

    def count(**sizes):
        with torch.device("meta"):
            cfg = model_lrt.Config(block_size=2048, vocab_size=32768, n_layer=n_layer, n_head=heads, n_embd=d, **sizes)
            assert cfg.head_dim == 128 and cfg.sources == [source]
            return sum(p.numel() for p in model_lrt.Model(cfg).parameters())
    backbone, shared, own = count(memory=False), count(), count(projections="layerwise")
    assert round(backbone / 1e6) == millions
    assert shared - backbone == 2 * d * heads * 128 + n_layer * 2 * heads * d + n_layer
    assert own - backbone == n_layer * (2 * d * heads * 128 + 2 * heads * d + 1)
    assert round(100 * (shared - backbone) / backbone, 2) == more
    assert round(100 * (own - backbone) / own, 2) == layerwise


def muon(**keys):
    return train.TrainConfig(**{**dict(model="lrt", optimizer="muon", learning_rate=0.004, muon_learning_rate=0.02,
                                       weight_decay=0.2), **keys})


@pytest.mark.parametrize("kind", ["default", "mixed", "replace kv", "gated"])
def test_the_papers_optimizer(kind):
    """2 rows of 100 tokens, 4 times: each group's rate, betas and decay, by the names of its parameters."""
    model = lrt(kind, layer_scale=True, dense_residual=True)
    groups = train.parameter_groups(model, muon(batch_size=2, gradient_accumulation_steps=4))
    batch, width = math.sqrt(800 / 2 ** 19), (model.cfg.n_embd / 768) ** -0.5
    of = {id(p): group for group in groups for p in group["params"]}
    for name, p in model.named_parameters():
        group, own = of[id(p)], name.split(".")[0]
        gate = name.endswith(("w_gate.weight", "w_value.weight", "w_out_gate.weight"))
        if p.dim() == 2 and own in ("blocks", "rec") and not gate:
            kind, rate, decay = "muon", 0.02, 0.2 * (12 / model.cfg.n_layer) ** 2
        else:
            kind, rate, decay = "adamw", {"wte": 0.3 * width, "values": 0.3 * width, "head": 0.004 * width,
                                          "alpha": 0.005}.get(own, 0.004 if gate else 0.5), 0
            assert group["betas"] == ((0.96, 0.95) if own == "beta" else (0.8, 0.95)) and group["eps"] == 1e-10, name
        assert group["kind"] == kind and abs(group["lr"] / (rate * batch) - 1) < 1e-12, name
        assert abs(group["weight_decay"] - decay) < 1e-12, name
    optimizers = train.make_optimizers(model, muon())
    assert [type(optimizer).__name__ for optimizer in optimizers] == ["AdamW", "Muon"]
    assert model.param_groups(muon(optimizer="adamw")) is None


def test_rates_at_the_papers_batch_are_the_papers():
    model = fresh(block_size=2048, n_embd=768, n_head=6, n_layer=12)
    groups = model.param_groups(muon(batch_size=32, gradient_accumulation_steps=8))
    assert sorted(round(group["lr"], 12) for group in groups) == [0.004, 0.004, 0.005, 0.02, 0.3, 0.5, 0.5]
    assert [group["weight_decay"] for group in groups if group["weight_decay"]] == [0.2]


def test_schedules_of_the_paper():
    """Momentum 0.85 to 0.95 over 300 steps; decay down to zero; no warm-up, the rate down over the last half."""
    cfg = muon(muon_momentum=0.95, muon_momentum_steps=300, decay_schedule="linear", lr_schedule="linear",
               cooldown_frac=0.5, min_lr_frac=0.0, max_steps=1000)
    optimizers = train.make_optimizers(fresh(n_layer=6), cfg)
    *others, muons = [group for optimizer in optimizers for group in optimizer.param_groups]
    rate = 0.02 * math.sqrt(cfg.batch_size * 256 / 2 ** 19)
    for step in (0, 150, 300, 500, 750, 999):
        for group in (*others, muons):
            train.set_schedules(group, step, cfg)
            assert abs(group["lr"] / group["peak_lr"] - min(1, (1000 - step) / 500)) < 1e-12
        assert abs(muons["momentum"] - (0.85 + 0.1 * min(1, step / 300))) < 1e-12
        assert abs(muons["weight_decay"] - 0.2 * 4 * (1 - step / 1000)) < 1e-12
        assert abs(muons["peak_lr"] / rate - 1) < 1e-12
        assert all(group["weight_decay"] == 0 and "momentum" not in group for group in others)
    momentum, decay = muons["momentum"], muons["weight_decay"]
    train.set_schedules(muons, 0, muon())
    assert (muons["momentum"], muons["weight_decay"]) == (momentum, decay), "without the keys both are left alone"


# ---------------------------------------------------------------------------------------------------------------------
# training and evaluation

TINY = ["block_size=16", "n_embd=16", "n_layer=4", "n_head=2", "batch_size=2", "max_steps=3", "eval_batches=1"]
ABLATIONS = [
    "source=1", "source=4", "source=1,2,3,4",                           # Table 1
    "lag=2", "lag=3", "lag=4", "state=average", "state=current", "state=both",         # Table 2
    "inject=residual", "inject=kv", "memory=false",                       # Table 3
    "inject=k", "inject=v", "inject=kv replace=true", "projections=layerwise",                  # Table 6
    "train_path=chunked chunk=8", "train_path=chunked chunk=16", "train_path=exact",            # Table 7
    "subsets=4", "subsets=8",                                                      # Table 9
    "memory=false value_embeddings=false x0_mixing=false", "memory=false layer_scale=true",     # Table 8
    "memory=false gated_attention=true", "memory=false value_embeddings=false", "memory=false x0_mixing=false",
    "memory=false dense_residual=true", "memory=false value_residual=true", "gated_attention=true"]


@pytest.mark.parametrize("overrides", ABLATIONS)
def test_every_ablation_of_the_paper_is_an_override(overrides, data_dir, tmp_path, monkeypatch):
    monkeypatch.setattr(train, "draw_curves", lambda *a: None)
    trainer = runs.run("lrt", tmp_path, data_dir, *TINY, *overrides.split())
    rows = train.read_log(trainer.folder / "log.jsonl")
    losses, last = [row["ce"] for row in rows if "ce" in row], rows[-1]
    assert len(losses) == 3 and all(map(math.isfinite, [*losses, last["val_ce"]]))
    estimated = "memory=false" not in overrides and "exact" not in overrides
    assert ("val_ce_estimate" in last) == ("val_gap" in last) == estimated
    if estimated:
        assert abs(last["val_ce"] - last["val_ce_estimate"] - last["val_gap"]) < 1e-6
    loaded, x = train.load_run(trainer.folder / "ckpt.pt")[0], tokens(2, 9)
    assert torch.equal(loaded.eval()(x)[0], trainer.model.eval()(x)[0])
    for key, value in (pair.split("=") for pair in overrides.split()):
        assert str(getattr(loaded.cfg, key)).lower() == value


@pytest.mark.parametrize("way", PATHS)
def test_the_loss_in_eval_mode_is_the_exact_chains(way):
    model, x = lrt(**PATHS[way]), tokens(2, 12)
    want = nats(copied(model, **path())(x[:, :-1])[0], x[:, 1:]).mean()
    training, (_, loss, aux) = model(x[:, :-1], x[:, 1:])[1], model.eval()(x[:, :-1], x[:, 1:])
    with torch.no_grad():
        cached = model(x[:, :-1], x[:, 1:])[1]
    assert abs(loss - want) < 1e-12 and abs(cached - want) < 1e-12 and set(aux) == {"ce"} and aux["ce"] == loss
    assert way == "exact" or abs(training - want) > 1e-4


@pytest.mark.parametrize("way", ["subsets=2", "train_path=chunked chunk=4"])
def test_an_evaluation_is_exact_on_some_batches_and_estimates_on_all(way, data_dir, tmp_path, monkeypatch):
    monkeypatch.setattr(train, "draw_curves", lambda *a: None)
    trainer = runs.run("lrt", tmp_path, data_dir, *TINY, *way.split())
    model, seen = trainer.model.eval(), []
    with torch.no_grad():       # a gap that float32 cannot hide
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))
    starts = trainer.batches.val_batches(5)
    batches = [trainer.batches.cut(trainer.batches.val, start) for start in starts]
    with torch.no_grad():
        exact = [float(model(x, y)[1]) for x, y in batches]
        estimate = [float(nats(model.logits(model.hidden(x, None, None, model.cfg.train_path)[0]), y).mean())
                    for x, y in batches]
    assert len(batches) == 5 and len({y.shape for _, y in batches}) == 1
    assert min(abs(a - b) for a, b in zip(exact, estimate)) > 1e-4
    original = model.hidden
    monkeypatch.setattr(model, "hidden", lambda *a: (seen.append((*a, "exact")[3]), original(*a))[1])
    for wanted, which in ((1, [0]), (2, [0, 4]), (3, [0, 2, 4]), (0, range(5)), (9, range(5))):
        trainer.cfg.eval_batches, trainer.cfg.exact_batches = 5, wanted
        seen.clear()
        result = trainer.evaluate()
        mean = lambda values: sum(values) / len(values)
        assert seen.count("exact") == len(which) and seen.count(model.cfg.train_path) == 5 == len(seen) - len(which)
        assert abs(result["val_ce"] - mean([exact[i] for i in which])) < 1e-5
        assert abs(result["val_ce_estimate"] - mean(estimate)) < 1e-5
        assert abs(result["val_gap"] - mean([exact[i] - estimate[i] for i in which])) < 1e-5


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_evaluations_on_the_way_are_of_the_weights_of_their_step(optimizer, data_dir, tmp_path, monkeypatch):
    """What an evaluation keeps for the next must follow the optimizer's steps."""
    monkeypatch.setattr(train, "draw_curves", lambda *a: None)
    options = [*TINY, f"optimizer={optimizer}", "learning_rate=0.05"]
    often, once = (runs.run("lrt", tmp_path / every, data_dir, *options, f"eval_interval={every}") for every in "19")
    ends = [train.read_log(trainer.folder / "log.jsonl")[-1] for trainer in (often, once)]
    for key in ("val_ce", "val_ce_estimate", "val_gap"):
        assert abs(ends[0][key] - ends[1][key]) < 1e-6, key


def test_an_estimate_is_without_dropout_and_none_where_it_is_exact():
    x = tokens(2, 12)
    for kind, sizes in (("default", path(subsets=2)), ("mixed", path(chunk=4))):
        model = lrt(kind, **sizes)
        want = nats(model.logits(model.hidden(x[:, :-1], None, None, model.cfg.train_path)[0]), x[:, 1:]).mean()
        dropping = copied(model, dropout=0.5).eval()
        assert abs(dropping.estimate(x[:, :-1], x[:, 1:]) - want) < 1e-12
    assert lrt(**path()).estimate(x, x) is None and lrt(memory=False).estimate(x, x) is None


@pytest.mark.parametrize("bad, named", [
    (dict(source="0"), "source=0"), (dict(source="9"), "source=9"), (dict(source="a"), "source=a"),
    (dict(source="1,1"), "source=1,1"), (dict(source="1,"), "source=1,"), (dict(lag=0), "lag=0"),
    (dict(subsets=0), "subsets=0"), (dict(chunk=0), "chunk=0"), (dict(pattern="X"), "pattern=X"),
    (dict(pattern=""), "pattern="), (dict(state="x"), "state=x"), (dict(inject="x"), "inject=x"),
    (dict(train_path="x"), "train_path=x"), (dict(prefill="x"), "prefill=x"), (dict(projections="x"), "projections=x"),
    (dict(n_embd=12), "n_embd / n_head = 3"), (dict(n_embd=2056), "n_embd / n_head = 514"), (dict(swa=-1), "swa=-1"),
    (dict(replace=True, inject="residual"), "replace=true"), (dict(replace=True, inject="k"), "replace=true"),
    (dict(n_kv_head=3), "n_kv_head=3"), (dict(n_embd=30), "n_embd=30"), (dict(dropout=1.0), "dropout"),
    (dict(norm_eps=0.0), "norm_eps"), (dict(softcap=0.0), "softcap"), (dict(block_size=0), "block_size=0")])
def test_impossible_settings_are_named(bad, named):
    with pytest.raises(ValueError, match=named):
        model_lrt.Config(**bad)


@every
def test_a_training_step_reaches_every_parameter(kind):
    """With a gradient, be it zero, also where one pass holds all positions: DDP waits for it."""
    for sizes in (path(), path(chunk=3), path(chunk=50), path(subsets=1), path(subsets=2)):
        model, x = lrt(kind, **sizes), tokens(1, 9)
        model(x[:, :-1], x[:, 1:])[1].backward()
        assert not [name for name, p in model.named_parameters() if p.grad is None]


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("kind", ["default", "mixed", "both"])
@pytest.mark.parametrize("prefill", ["exact", "interleaved"])
def test_calls_with_a_cache_build_no_graph(prefill, kind, fast):
    """And a cache made and filled in inference mode goes on outside of it."""
    model, x = lrt(kind, prefill=prefill, fast=fast), tokens(2, 12)
    for n_valid in (None, torch.tensor([3, 1])):
        with torch.inference_mode():
            cache = model.init_cache(2, 12)
            model(x[:, :4], cache=cache)
        for part in x[:, 4:11].split([3, 1, 3], 1):
            logits, loss, _ = model(part, part, cache=cache, n_valid=n_valid)
            assert not logits.requires_grad and not loss.requires_grad
        held = [cache, cache.before] if cache.before else [cache]
        assert not any(x.requires_grad for c in held for x in (*c.k, *c.v, c.states))
    x = tokens(0, 3)
    with pytest.raises(ValueError, match="holds no token"):
        model(x, cache=model.init_cache(0, 12))
    with pytest.raises(ValueError, match="holds no token"):
        model.generate(x, 2)


def test_training_steps_are_one_graph():
    """No break, and none compiled again from step to step, in the default path."""
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    model, x = fresh(n_layer=2, n_embd=16, n_head=2, block_size=16), tokens(2, 17)
    compiled = torch.compile(model, backend="eager")
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for step in range(3):
        model.set_step(step)
        compiled(x[:, :-1], x[:, 1:])[1].backward()
        optimizer.step()
        optimizer.zero_grad()
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]


def test_torch_compile_takes_all_of_a_training_step():
    """One graph, the operators in it: the trainer compiles where there is a GPU."""
    model, x = lrt(n_layer=1, **path(subsets=2)), tokens(1, 12)
    want = outputs_and_gradients(model, x)
    model.zero_grad()
    torch._dynamo.reset()
    logits, loss, _ = torch.compile(model, backend="aot_eager", fullgraph=True)(x[:, :-1], x[:, 1:])
    loss.backward()
    grads = {n: p.grad for n, p in model.named_parameters()}
    assert_same((logits.detach(), loss.detach(), grads), want, all_reached=True)


@every
@pytest.mark.parametrize("way", ["S=2", "S=3", "C=3"])
def test_training_sees_no_future(kind, way):
    """Another token at t changes no logits before t: of either pass."""
    model, x = lrt(kind, **PATHS[way]), tokens(2, 13)
    run = lambda x: [model.logits(h) for h in model.hidden(x, None, None, model.cfg.train_path) if h is not None]
    with torch.no_grad():
        before = run(x)
        for t in (1, 6, 12):
            y = x.clone()
            y[:, t] = (y[:, t] + 1) % 61
            for a, b in zip(before, run(y)):
                assert relative(a[:, :t], b[:, :t]) < 1e-12 and rms(a[:, t] - b[:, t]) > 1e-6


def test_weights_kept_for_decoding_follow_the_weights():
    """After a step of the optimizer (torch's fused one does not count versions), a loaded state, other precisions, and
    writes in place: without a cache, with a new one, and with one that served the weights before and was emptied."""
    model, other, x = tiny("lrt"), tiny("lrt", fast=False), tokens(2, 9)
    used = model.init_cache(2, 9)

    def decoded(cache):
        return torch.cat([model(part, cache=cache)[0] for part in x.split([5, 1, 1, 2], 1)], 1)

    def check(tolerance):
        other.load_state_dict(model.state_dict())
        with torch.no_grad():
            used.reset()
            want = other.to(model.wte.weight.dtype)(x)[0]
            got = [model(x)[0], model(x)[0], decoded(model.init_cache(2, 9))]
            got += [decoded(used)] if want.dtype == torch.float64 else []
            with torch.inference_mode():
                got.append(model(x)[0])
            assert max(relative(logits, want) for logits in got) < tolerance
    check(1e-10)
    for kind in ("adamw", "muon"):
        for optimizer in train.make_optimizers(model, muon(optimizer=kind, learning_rate=0.1)):
            model(x, x)[1].backward()
            optimizer.step()
            check(1e-10)
    for mode in (torch.enable_grad, torch.inference_mode):
        with mode():
            model.load_state_dict({name: w - 0.1 for name, w in model.state_dict().items()})
        check(1e-10)
    model.load_state_dict({name: w + 0.1 for name, w in model.state_dict().items()}, assign=True)
    check(1e-10)
    for _ in range(3):
        model.float(), check(1e-4), model.double(), check(1e-10)
        model.float().double(), check(1e-10)
    for name in ("wq", "wk", "wv", "w_value", "w_gate"):
        weight = getattr(model.blocks[1].attn, name).weight
        for writable in (weight.detach(), weight.data):
            writable.mul_(1.5)
            check(1e-10)


@pytest.mark.parametrize("change", ["adamw", "muon", "load_state_dict", "data"])
def test_a_cache_goes_on_with_new_weights(change):
    """Weights that change while it holds tokens, also where torch counts no version: fast as naive."""
    model, naive, x = tiny("lrt"), tiny("lrt", fast=False), tokens(2, 9)
    caches = [m.init_cache(2, 9) for m in (model, naive)]

    @torch.no_grad()
    def decode(part):
        return [torch.cat([m(t, cache=c)[0] for t in part.split(1, 1)], 1)
                for m, c in zip((model, naive), caches)]
    old = decode(x[:, :5])
    if change in ("adamw", "muon"):
        for optimizer in train.make_optimizers(model, muon(optimizer=change, learning_rate=0.1)):
            model(x, x)[1].backward()
            optimizer.step()
    elif change == "load_state_dict":
        model.load_state_dict({name: 1.5 * w for name, w in model.state_dict().items()})
    else:
        for p in model.parameters():
            p.data.mul_(1.5)
    naive.load_state_dict(model.state_dict())
    new = decode(x[:, 5:])
    assert relative(*old) < 1e-10 and relative(*new) < 1e-10


def test_the_bench_runs(capsys):
    """Every line of bench.py lrt, at tiny sizes on a CPU."""
    cfg = train.TrainConfig(model="lrt", batch_size=2)
    bench.bench_lrt(model_lrt.Model(model_lrt.Config(block_size=8, vocab_size=5, n_layer=1, n_head=1, n_embd=8)), cfg,
                    torch.device("cpu"), rounds=1)
    lines = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert [lines.count(word) for word in ("training", "decoding", "prefill")] == [7, 4, 3]


def test_sample_takes_in_a_prompt_either_way(data_dir, tmp_path, capsys):
    """prefill=compare tells how far the interleaved prefill is off and goes on from the exact one; others refuse it."""
    run, gpt = (runs.run(name, tmp_path / name, data_dir).folder for name in ("lrt", "gpt"))
    texts, _ = {}, capsys.readouterr()
    for how in ("exact", "interleaved", "compare"):
        sample.main([str(run), "prompt=abc def", f"prefill={how}", "temperature=0", "max_new_tokens=12", "stop=false"])
        texts[how], err = capsys.readouterr()
        assert ("next token: KL" in err) == (how == "compare")
    assert texts["compare"] == texts["exact"] and all(text.startswith("abc def") for text in texts.values())
    with pytest.raises(prepare.UserError, match="prefill=exact is for a model"):
        sample.main([str(gpt), "prefill=exact"])


@pytest.mark.parametrize("name, millions", [("lrt_20l", 1320), ("lrt_24l", 1994)])
def test_configs_of_the_paper(name, millions):
    _, fields, _, _ = train.read_config([f"config=configs/{name}.yaml"])
    with torch.device("meta"):
        model = model_lrt.Model(model_lrt.Config(**{**fields, "vocab_size": 32768}))
    assert round(sum(p.numel() for p in model.parameters()) / 1e6) == millions
    assert model.cfg.sources == [{20: 12, 24: 14}[model.cfg.n_layer]]

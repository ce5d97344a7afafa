"""model_lrt computes its equations, which are written once more here. The tests also look at what its paths compute, at
prefill, at the paper's optimizer, and at evaluation."""
import itertools
import math
import statistics
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

import model_lrt
from common import optim
from common.options import TrainConfig
import runs
import train
from conftest import move, relative, tiny
from test_gpt import dense_heads, rotate
from test_models import assert_same, outputs_and_gradients, tokens

# mixed has odd sizes, 10 dimensions a head
SETTINGS = {"default": {},
            "mixed": dict(n_kv_head=2, pattern="SL", swa=6, n_layer=3, n_embd=40, source=1, source_norm=True,
                          projections="layerwise"),
            "kv": dict(inject="kv", source=1, n_head=1), "residual": dict(inject="residual", source=2, pattern="L"),
            "embedding": dict(source=0, n_kv_head=2)}
both = pytest.mark.parametrize("fast", [True, False])
PATHS = {"exact": dict(train_path="exact"), "K=3": dict(train_path="chunked", chunk=3),
         **{f"N={N}": dict(train_path="interleaved", subsets=N) for N in (1, 3, 8)}}


def lrt(kind="default", **sizes):
    """Return conftest's tiny float64 model of this kind in training mode. All paths have the same weights."""
    return tiny("lrt", **{**SETTINGS[kind], **sizes}).train()


nats = lambda logits, targets: F.cross_entropy(logits.flatten(0, 1), targets.flatten())
unit = lambda x: F.rms_norm(x, x.shape[-1:], eps=1e-5)


class ByHand:
    """Computes the equations of one sequence idx (T,) once more. buffer has the newest keys and values of each layer,
    (T, G, D). m (T + 1, C) has the newest memories, and m[t] is m_{t-1}. out and first (T, C) are the outputs of the
    last layer, with and without memory."""

    def __init__(self, model, idx):
        self.cfg, self.w, self.idx = model.cfg, dict(model.named_parameters()), idx
        self.x0 = unit(self.w["wte.weight"][idx])
        empty = self.x0.new_zeros(len(idx), self.cfg.kv_heads, self.cfg.head_size)
        self.buffer = [(empty, empty)] * self.cfg.n_layer
        self.m, self.out = self.x0.new_zeros(len(idx) + 1, self.cfg.n_embd), torch.zeros_like(self.x0)

    def times(self, x, layer, name, heads=False):
        y = x @ self.w[f"blocks.{layer}.{name}.weight"].T
        return y.unflatten(-1, (-1, self.cfg.head_size)) if heads else y

    def keys_values(self, layer, at, u, m):
        """Return the sum of the local keys and values and the memory's, each times its gate. Each key head has its own
        gates."""
        rec = f"blocks.{layer}.attn.rec." if self.cfg.projections == "layerwise" else "rec."
        gates = lambda x, name: 2 * torch.sigmoid(self.times(x, layer, f"attn.{name}"))[..., None]
        k, v = (self.times(u, layer, f"attn.{name}", heads=True) for name in ("wk", "wv"))
        if self.cfg.inject != "residual":
            local, of_memory = gates(u, "w_gate").chunk(2, 1)
            k, v = (local * x + of_memory * (m @ self.w[f"{rec}{name}.weight"].T).view_as(x)
                    for x, name in ((k, "wk"), (v, "wv")))
        e = self.w[f"values.{layer}.weight"][self.idx[at]].view_as(v)
        return rotate(unit(k), at, 10000.0), v + gates(u[:, :32], "w_value") * e

    def run(self, at, memory):
        """Make one pass over positions at (n,), which read memory (n, C). In each layer they write keys and values and
        then attend to all of the buffer. In the end they write outputs and memories."""
        x, outputs = self.x0[at], [self.x0[at]]
        for layer, kind in zip(range(self.cfg.n_layer), itertools.cycle(self.cfg.pattern)):
            x = self.w["alpha"][layer] * x + self.w["beta"][layer] * self.x0[at]
            if "residual" in self.cfg.inject:
                x = x + self.w["gamma"][layer] * memory
            u = unit(x)
            kv = zip(self.buffer[layer], self.keys_values(layer, at, u, memory))
            self.buffer[layer] = [old.index_copy(0, at, new) for old, new in kv]
            q = rotate(unit(self.times(u, layer, "attn.wq", heads=True)), at, 10000.0)
            window = self.cfg.swa if kind == "S" and layer < self.cfg.n_layer - 1 else None
            x = x + self.times(dense_heads(q, *self.buffer[layer], at, window=window).flatten(1), layer, "attn.wo")
            x = x + self.times(self.times(unit(x), layer, "mlp.w_up").relu() ** 2, layer, "mlp.w_down")
            outputs.append(x)
        self.out = self.out.index_copy(0, at, x)
        m = outputs[self.cfg.source]
        self.m = self.m.index_copy(0, at + 1, unit(m) if self.cfg.source_norm else m)

    def chunked(self, K, start=0):
        """Run chunks of K positions, where K = 1 is the exact chain. Positions before start have run already."""
        for at in torch.arange(start, len(self.idx)).split(K):
            self.run(at, self.m[at[0]].expand(len(at), -1))
        return self

    def interleaved(self, N, T=None):
        """Run Algorithm 1 on the first T positions."""
        everything = torch.arange(T or len(self.idx))
        self.run(everything, torch.zeros_like(self.x0[everything]))
        self.first = self.out
        for at in (everything[s::N] for s in range(min(N, len(everything)))):
            self.run(at, self.m[at])
        return self

    def logits(self, out):
        return 15 * torch.tanh(unit(out) @ self.w["head.weight"][:self.cfg.vocab_size].T / 15)


def by_hand(model, x):
    """Return what outputs_and_gradients returns, for the model's training path."""
    cfg, y, N = model.cfg, x[:, 1:], model.cfg.subsets
    K = {"exact": 1, "chunked": cfg.chunk, "interleaved": 0}[cfg.train_path]
    rows = [ByHand(model, row).chunked(K) if K else ByHand(model, row).interleaved(N) for row in x[:, :-1]]
    logits = torch.stack([row.logits(row.out) for row in rows])
    loss = nats(logits, y)
    if not K:       # the loss is a mean of the passes, in which a subset weighs as many targets as it has
        loss = (nats(torch.stack([row.logits(row.first) for row in rows]), y) + N * loss) / (N + 1)
    named = dict(model.named_parameters())
    return logits.detach(), loss.detach(), dict(zip(named, torch.autograd.grad(loss, [*named.values()])))


@pytest.mark.parametrize("kind, way", [*itertools.product(("default", "mixed"), PATHS), ("embedding", "exact"),
                                       *itertools.product(("kv", "residual"), ("N=3", "K=3"))])
@both
def test_each_path_is_its_equations(kind, way, fast, monkeypatch):
    """Logits, loss and all gradients are the same. They would differ if anything in the buffer were detached. The fast
    path builds no mask. Every parameter has a gradient, be it zero, because DDP waits for it, also if one pass has all
    positions."""
    if fast:
        monkeypatch.delattr(model_lrt, "attention_bias")
    for T in (1, 2, 11):
        model, x = lrt(kind, fast=fast, **PATHS[way]), tokens(2, T + 1)
        assert_same(outputs_and_gradients(model, x), by_hand(model, x), all_reached=T > 2)
        assert not [name for name, p in model.named_parameters() if p.grad is None]


def test_windows_source_and_path():
    """The pattern is SSSL. S is half of the context and the query itself, and the last layer sees all. The source is at
    0.6 of the depth. Approximations of a chain that is not there are refused, and are not the default."""
    cfg = model_lrt.Config(n_layer=10, block_size=64)
    assert [cfg.window_of(layer) for layer in range(10)] == [33, 33, 33, 0, 33, 33, 33, 0, 33, 0]
    assert [model_lrt.Config(n_layer=L).source for L in (20, 24, 1)] == [12, 14, 1]
    assert [model_lrt.Config(n_layer=L).source_norm for L in (10, 11, 20)] == [False, True, True]
    chainless = [dict(memory=False), dict(source=0)]        # one pass is exact for these
    assert {replace(model_lrt.Config(), **keys).train_path_used for keys in chainless} == {"exact"}
    approximations = [dict(train_path="interleaved"), dict(train_path="chunked"), dict(prefill="interleaved")]
    for keys in [dict(pattern="SX"), *(a | b for a in chainless for b in approximations)]:
        with pytest.raises(ValueError, match="pattern=SX must|needs memory=true and a source that is not 0"):
            model_lrt.Config(**keys)


@pytest.mark.parametrize("kind", ["default", "mixed", pytest.param("residual", marks=pytest.mark.full)])
@both
@pytest.mark.parametrize("N, lengths", [(2, [11, 11]), (3, [11, 1, 6, 0])])
def test_interleaved_prefill_goes_on_exactly(kind, fast, N, lengths):
    """N subsets run over each prompt, and the chain goes on from what they left. The logits are those of the equations.
    An empty prompt is exact."""
    model = tiny("lrt", **SETTINGS[kind], subsets=N, fast=fast)
    model.cfg.prefill = "interleaved"
    x, cache, ragged = tokens(len(lengths), 16), model.init_cache(len(lengths), 20), min(lengths) < 11
    with torch.no_grad():
        prompts = model(x[:, :11], cache=cache, n_valid=torch.tensor(lengths) if ragged else None)[0]
        further = torch.stack([row[n:n + 5] for row, n in zip(x, lengths)])
        after = torch.cat([model(part, cache=cache)[0] for part in further.split([1, 4], 1)], 1)
        for row, n, *got in zip(x, lengths, prompts, after):
            hand = ByHand(model, row[:n + 5])
            hand = hand.interleaved(N, n).chunked(1, n) if n > 1 else hand.chunked(1)
            assert relative(torch.cat([got[0][:n], got[1]]), hand.logits(hand.out)) < 1e-10
        assert relative(prompts[:1], model(x[:1, :11])[0]) > 1e-4


def muon(**keys):
    return TrainConfig(**{**dict(model="lrt", optimizer="muon", learning_rate=0.004, muon_learning_rate=0.02,
                                 weight_decay=0.2), **keys})


@pytest.mark.parametrize("kind", ["default", "mixed"])
def test_the_papers_optimizer(kind):
    """The rate, betas and decay of each group follow from its parameters' names, for 2 rows of 100 tokens, 4 times."""
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
        assert group["optimizer"] == optimizer, name
        assert abs(group["lr"] / (rate * batch) - 1) < 1e-12 and abs(group["weight_decay"] - decay) < 1e-12, name


def test_schedules_of_the_paper():
    """Momentum grows from 0.85 to 0.95 in 300 steps, and decay falls to zero. (test_train.py has those of rates.)"""
    cfg = muon(muon_momentum_steps=300, decay_schedule="linear", max_steps=1000)
    group = dict(optimizer="muon", peak_lr=1, peak_decay=0.8, momentum=0)
    for step, momentum, decay in (0, 0.85, 0.8), (150, 0.9, 0.68), (300, 0.95, 0.56), (750, 0.95, 0.2):
        optim.set_schedules(group, step, cfg)
        assert (group["momentum"], group["weight_decay"]) == pytest.approx((momentum, decay), rel=1e-12)


@pytest.mark.parametrize("way", ["subsets=2", "train_path=chunked chunk=4"])
def test_an_evaluation_is_exact_on_some_batches_and_estimates_on_all(way, data_dir, tmp_path):
    trainer = runs.run("lrt", tmp_path, data_dir, "max_steps=1", "eval_batches=1", *way.split())
    model = move(trainer.model.eval(), 0.1)         # without this, float32 could hide the gap
    with torch.no_grad():
        batches = [trainer.batches.cut(trainer.batches.val, start) for start in trainer.batches.val_batches(5)]
        exact, estimate = ([nats(model.head(model.hidden(x, path=path)), y).item() for x, y in batches]
                           for path in ("exact", model.cfg.train_path_used))
    for wanted, which in ((1, [0]), (3, [0, 2, 4]), (0, range(5)), (9, range(5))):
        trainer.cfg.eval_batches, trainer.cfg.exact_batches = 5, wanted
        result, ce = train.evaluate(trainer), statistics.mean(exact[i] for i in which)
        gap = ce - statistics.mean(estimate[i] for i in which)
        want = dict(val_ce=ce, val_ce_estimate=statistics.mean(estimate), val_gap=gap)
        assert {name: result[name] for name in want} == pytest.approx(want, abs=1e-5) and abs(gap) > 1e-4
    assert lrt(train_path="exact").estimate(*batches[0]) is None and lrt(memory=False).estimate(*batches[0]) is None


def test_half_of_a_full_context_stays():
    """The prefill of a chain is slow. Without a chain all tokens stay."""
    assert [tiny("lrt", block_size=13, **sizes).context_kept for sizes in ({}, dict(memory=False))] == [7, 13]

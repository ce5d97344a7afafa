"""model_mor: its routing once more token by token, what is tied, what runs and is kept, decoding, and conversion."""
import math
from dataclasses import asdict

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.flop_counter import FlopCounterMode

import model_gpt
import model_mor
from run import TrainConfig, read_config, set_budget, tokens_per_step
from conftest import ROOT, relative, tiny
from test_models import assert_cache_is_forward, rms, tokens
from test_relaxed import ByHand, Oneself

KV = "recursion", "share", "share_update"
every_fast = pytest.mark.parametrize("fast", [True, False])
every_kv = pytest.mark.parametrize("kv", KV)
every_routing = pytest.mark.parametrize("router", ["expert", "token"])


def mor(**sizes):
    """The tiny float64 model of conftest: 5 layers (6 where no layer stands outside the recursions), 3 recursions."""
    return tiny("mor", **{"n_layer": 5 if sizes.get("share", "middle").startswith("middle") else 6, **sizes})


# ---- the equations, once more, of one sequence and the tokens that take part ----

class Routed(ByHand):
    """States x (n, C) are those of the tokens at positions at (n,), in order; other tokens do not exist."""

    def __init__(self, model, training, loops=0):
        super().__init__(model)
        self.training, self.loops, self.bias = training, loops or model.cfg.n_loop, getattr(model, "balance_bias", None)
        self.log, self.first = {name: [] for name in ("bce", "z", "p", "active", "right")}, []

    def layers(self, x, which, at, r=0):
        """x after unrolled layers `which`, those of recursion r. self.first: the keys and values of all tokens in each
        layer of recursion 1."""
        for i, layer in enumerate(which):
            kv, seen = self.keys_values(x, layer, at), at
            if r == 1:
                self.first.append(kv)
            elif r > 1 and self.cfg.kv != "recursion":
                own = at if self.cfg.kv == "share_update" else at[:0]
                kv = [old.index_copy(0, own, new[:len(own)]) for old, new in zip(self.first[i], kv)]
                seen = None
            x = self.layer(x, layer, at, *kv, seen)
        return x

    def recursion(self, x, r, at):
        """F_r, r from 1."""
        edge = int(self.cfg.share.startswith("middle"))
        K = (self.cfg.n_layer - 2 * edge) // self.cfg.n_loop
        return self.layers(x, range(edge + (r - 1) * K, edge + r * K), at, r)

    def scores(self, h, name):
        if self.cfg.router_arch == "linear":
            return h @ self.w[f"{name}.layers.weight"].T
        return F.gelu(h @ self.w[f"{name}.layers.0.weight"].T) @ self.w[f"{name}.layers.2.weight"].T

    def forward(self, idx):
        """Logits (T, V) of the sequence idx (T,). self.log then has what the router did."""
        middle, at, x = self.cfg.share.startswith("middle"), torch.arange(len(idx)), self.w["wte.weight"][idx]
        x = self.layers(x, [0] * middle, at)
        x = {"expert": self.expert, "token": self.by_token, "none": self.all_take_all}[self.cfg.router](x, at)
        return self.logits(self.layers(x, [self.cfg.n_layer - 1] * middle, at))

    def expert(self, x, active):
        cfg, T, R, log = self.cfg, len(x), self.cfg.n_loop, self.log
        for r in range(1, self.loops + 1):
            s = by = self.scores(x[active], f"routers.{r - 1}")[:, 0]
            if cfg.causal == "aux_router":
                by = self.scores(x[active].detach(), f"aux_routers.{r - 1}")[:, 0]
            taken = by >= 0 if r > 1 else torch.ones_like(by, dtype=torch.bool)
            if self.training:
                taken = torch.zeros_like(taken).scatter(0, s.argsort()[-max(1, T * (R - r + 1) // R):], True)
            log["bce"].append(torch.where(taken, F.softplus(-by), F.softplus(by)).mean())
            log["z"].append((s ** 2).mean())
            log["right"].append((by >= 0) == taken)
            active, gate = active[taken], torch.tanh if cfg.router_func == "tanh" else torch.sigmoid
            x = x.index_add(0, active, cfg.alpha * gate(s[taken])[:, None] * self.recursion(x[active], r, active))
            log["active"].append(active.tolist())
        return x

    def by_token(self, h, at):
        cfg, R = self.cfg, self.cfg.n_loop
        scores = self.scores(h, "router")
        p = scores.softmax(1) if cfg.router_func == "softmax" else cfg.alpha * scores.sigmoid()
        depth, x = ((p + self.bias).argmax(1) + 1).clamp(max=self.loops), h
        for r in range(1, R + 1):
            active = at[depth >= r]
            x = x.index_copy(0, active, self.recursion(x[active], r, active))
            self.log["active"].append(active.tolist())
        self.log |= {"p": p, "z": [scores.logsumexp(1).square().mean()]}
        return h + p.gather(1, depth[:, None] - 1) * x

    def all_take_all(self, x, at):
        for r in range(1, self.loops + 1):
            x = self.recursion(x, r, at)
        return x


def by_hand(model, x, training, loops=0):
    """(logits, loss, what to log) of inputs and targets x (B, T + 1)."""
    cfg, rows, R, (B, T) = model.cfg, [Routed(model, training, loops) for _ in x], model.cfg.n_loop, x[:, 1:].shape
    logits = torch.stack([row.forward(idx[:-1]) for row, idx in zip(rows, x)])
    loss, logs = F.cross_entropy(logits.flatten(0, 1), x[:, 1:].flatten()), [row.log for row in rows]
    log = {"ce": loss.detach()}
    if cfg.router == "none":
        return logits, loss, log
    reached = [sum(map(len, chosen)) for chosen in zip(*(row["active"] for row in logs))] + [0] * R
    log |= {f"depth{d}": (reached[d - 1] - reached[d]) / B / T for d in range(1, R + 1)}
    z = sum(sum(row["z"]) for row in logs) / B
    if cfg.router == "expert" and training:
        bce, right = sum(sum(row["bce"]) for row in logs) / B, [x for row in logs for x in row["right"][1:]]
        log |= {"aux": bce.detach(), "router_accuracy": torch.cat(right).double().mean() if right else 0}
        loss = loss + cfg.aux_weight * bce + cfg.z_loss * z
    if cfg.router == "token":
        p, f = torch.stack([row["p"] for row in logs]).flatten(0, 1), [R * log[f"depth{d}"] for d in range(1, R + 1)]
        balance, mean = sum(share * P for share, P in zip(f, p.mean(0))), (p / p.sum(1, keepdim=True)).mean(0).detach()
        log |= {"balance": balance.detach(), "maxvio": max(f) - 1, "entropy": -(mean * mean.log()).sum()}
        if training:
            loss = loss + cfg.z_loss * z + cfg.balance_weight * balance * (cfg.balance == "loss")
    return logits, loss, log


def gradients(loss, model):
    parameters = list(model.parameters())
    found = torch.autograd.grad(loss, parameters, allow_unused=True)
    return [torch.zeros_like(p) if g is None else g for g, p in zip(found, parameters)]


def twin(model, **other):
    """A model of the same weights with other settings, in the same mode."""
    same = type(model)(type(model.cfg)(**{**asdict(model.cfg), **other})).double().train(model.training)
    same.load_state_dict(model.state_dict())
    return same


def assert_is_by_hand(model, x):
    """Logits, loss, what is logged, and in training all gradients, fast and naive; of several tokens, all parameters
    have some."""
    with torch.set_grad_enabled(model.training):
        want = by_hand(model, x, model.training)
    want_gradients, names = gradients(want[1], model) if model.training else [], dict(model.named_parameters())
    # a softmax over one key passes q and k rounding alone
    floor = (1e-5 if x.size(1) > 2 else 1e-3) * max([rms(g) for g in want_gradients], default=0)
    for same in (model, twin(model, fast=not model.cfg.fast)):
        logits, loss, log = same(x[:, :-1], x[:, 1:])
        assert relative(logits, want[0]) < 1e-10 and relative(loss, want[1]) < 1e-10
        assert want[2].keys() <= log.keys()
        for name in want[2]:
            exact = name in ("ce", "aux", "balance")        # the others are shares, in float32
            assert abs(log[name].item() - float(want[2][name])) < (1e-10 if exact else 1e-6), name
        if model.training:
            for name, a, b in zip(names, gradients(loss, same), want_gradients, strict=True):
                assert relative(a, b, floor) < 1e-10, name
                assert x.size(1) <= 12 or rms(b) > floor, f"{name}: nothing is compared"


EXPERT = [dict(), dict(kv="share", router_func="tanh", alpha=1.0), dict(kv="share_update", n_kv_head=2, qk_norm=True),
          dict(causal="aux_router", router_arch="mlp", kv="share"), dict(router_arch="wide_mlp", mlp="gelu", n_loop=2,
                                                                         n_layer=6, z_loss=0.02),
          dict(share="cycle", kv="share_update", causal="aux_router", router_func="tanh", tie_embeddings=False),
          dict(share="cycle", n_loop=2, kv="share", pos="none", z_loss=0.05), dict(share="sequence", router_arch="mlp"),
          dict(share="middle_sequence", n_layer=8, causal="aux_router", n_kv_head=1), dict(n_loop=1, n_layer=3),
          dict(n_layer=8, kv="share_update", router_arch="mlp", z_loss=0.01)]
TOKEN = [dict(), dict(kv="share", z_loss=0.02, router_func="sigmoid"), dict(kv="share_update", router_arch="mlp"),
         dict(share="cycle", n_loop=2, balance="none", n_kv_head=2), dict(share="sequence", balance="loss_free"),
         dict(share="middle_sequence", n_layer=8, router_arch="wide_mlp", router_func="sigmoid", alpha=1.0),
         dict(kv="share_update", router_func="sigmoid", share="cycle", tie_embeddings=False, qk_norm=True)]
NONE = [dict(), dict(kv="share", n_layer=8), dict(share="sequence"), dict(kv="share_update", share="cycle", n_loop=2)]
ROUTED = [dict(router=name, **sizes) for name, all in (("expert", EXPERT), ("token", TOKEN), ("none", NONE))
          for sizes in all]


@pytest.mark.parametrize("training, T", [(True, 1), (True, 13), (False, 1), (False, 13)])
@pytest.mark.parametrize("sizes", EXPERT, ids=str)
def test_expert_choice_is_its_equations(sizes, training, T):
    """In training the best k tokens take a recursion, and the loss teaches the scores which. In eval mode scores decide
    token by token."""
    assert_is_by_hand(mor(router="expert", aux_weight=0.3, **sizes).train(training), tokens(2, T + 1))


@pytest.mark.parametrize("training, T", [(True, 1), (True, 13), (False, 1), (False, 13)])
@pytest.mark.parametrize("sizes", TOKEN, ids=str)
def test_token_choice_is_its_equations(sizes, training, T):
    model = mor(router="token", balance_weight=0.3, **sizes).train(training)
    model.balance_bias += 0.02 * torch.randn(model.cfg.n_loop)
    assert_is_by_hand(model, tokens(2, T + 1))


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("sizes", NONE, ids=str)
def test_without_a_router_all_tokens_take_all(sizes, training):
    assert_is_by_hand(mor(router="none", **sizes).train(training), tokens(2, 14))


# ---- what is tied, sizes and operations ----

@pytest.mark.parametrize("share, n_layer, n_loop, order", [
    ("cycle", 6, 2, "012012"), ("cycle", 6, 3, "010101"), ("sequence", 6, 2, "001122"),
    ("middle_cycle", 8, 2, "f012012l"), ("middle_sequence", 8, 3, "f000111l"), ("middle_cycle", 5, 1, "f012l")])
def test_which_stored_block_a_layer_is(share, n_layer, n_loop, order):
    """The order in which a forward calls them; attention is tied too."""
    model, called = mor(share=share, n_layer=n_layer, n_loop=n_loop, fast=False).train(), []
    for kind, blocks in (("f", model.first), ("l", model.last), ("", model.blocks)):
        for k, block in enumerate(blocks):
            block.attn.register_forward_hook(lambda *_, name=kind or str(k): called.append(name))
    model(tokens(1, 12))
    assert "".join(called) == order and len(model.blocks) == len(set(order) - {"f", "l"})
    block = 4 * 32 * 32 + 3 * 32 * 96 + 2 * 32
    assert sum(p.numel() for p in model.parameters()) == len(set(order)) * block + (61 + 1 + n_loop) * 32


@pytest.mark.parametrize("name, millions", [("135m_r2", 57), ("135m_r3", 42), ("360m_r2", 167), ("360m_r3", 118),
                                            ("360m_r4", 98), ("730m_r3", 252), ("1700m_r3", 670)])
def test_sizes_of_the_paper(name, millions):
    """Outside embedding, head and routers, of Tables 3, 7 and 8."""
    model = of_the_paper(name)
    rest = sum(p.numel() for part, p in model.named_parameters() if "wte" not in part and "router" not in part)
    assert abs(rest / 1e6 - millions) < (5 if millions == 670 else 0.6)


def of_the_paper(name, **sizes):
    cfg = read_config([f"config={ROOT / 'configs' / f'mor_{name}.yaml'}"])[1]
    with torch.device("meta"):
        return model_mor.Model(model_mor.Config(**{**cfg, **sizes}))


PLAIN = dict(router="none", n_loop=1, share="cycle")


@pytest.mark.parametrize("name, sizes, billions", [
    ("135m_r3", {}, 76.2), ("360m_r3", {}, 29.7), ("730m_r3", {}, 14.9), ("1700m_r3", {}, 6.5),
    ("135m_r3", dict(PLAIN, n_layer=30), 53.3), ("360m_r3", PLAIN, 19.8), ("730m_r3", PLAIN, 10.1),
    ("1700m_r3", dict(PLAIN, n_layer=24), 4.8), ("360m_r2", {}, 27), ("360m_r4", {}, 30),
    ("360m_r2", dict(router="none"), 20), ("360m_r4", dict(router="none"), 19),
    ("360m_r3", dict(router="token"), 30), ("360m_r3", dict(kv="share"), 31)], ids=str)
def test_tokens_that_the_papers_budget_pays_for(name, sizes, billions):
    """16.5e18 operations: Table 7 to 0.05 billion, Table 3 in whole billions."""
    cfg, fields, _, _ = read_config([f"config={ROOT / 'configs' / f'mor_{name}.yaml'}", "max_flops=16.5e18"])
    model = of_the_paper(name, router_func="", **sizes)
    assert model.cfg.paper_flops
    set_budget(cfg, model)
    found = cfg.max_steps * tokens_per_step(cfg, model) / 1e9
    assert abs(found - billions) < (0.051 if billions % 1 else 0.55)


@pytest.mark.parametrize("sizes", [dict(), dict(paper_flops=True, capacity_warmup=40)], ids=str)
def test_a_budget_pays_for_the_warm_up_too(sizes):
    """The steps are those that it reaches, whether it ends within the warm-up or after it."""
    model, paper = mor(**sizes), "paper_flops" in sizes
    cfg = TrainConfig(batch_size=2, gradient_accumulation_steps=3)
    cost = [600 * model.flops_per_token(paper, step) for step in range(100)]
    assert cost[0] > cost[20] > cost[39] > cost[40] if paper else cost[0] == cost[99]
    assert cost[40:] == [600 * model.flops_per_token(paper)] * 60
    for steps in (2, 39, 40, 41, 100):
        for factor, reached in ((1 + 1e-9, steps), (1 - 1e-9, steps - 1)):
            cfg.max_flops = sum(cost[:steps]) * factor
            set_budget(cfg, model)
            assert cfg.max_steps == reached


@pytest.mark.parametrize("sizes", [
    dict(), dict(kv="share", causal="aux_router", capacity_warmup=8), dict(kv="share_update", router_arch="mlp"),
    dict(share="sequence", n_kv_head=2, tie_embeddings=False), dict(router="none", kv="share")], ids=str)
def test_only_chosen_tokens_run_and_flops_are_theirs(sizes, monkeypatch):
    """Forward and backward of the fast path, in training, half-way in a capacity warm-up. Attention, written out here
    to be counted, takes all keys that a query is given; the model counts the visible ones, the chosen tokens being
    spread evenly."""
    given, T, C = [], 24, 32

    def attention(q, k, v, bias, dropout):
        given.append(q.size(2) * k.size(2))
        if bias is None:
            bias = torch.full((q.size(2), k.size(2)), -math.inf).triu(1).double()
        return model_gpt.attention_naive(q, k, v, bias)

    monkeypatch.setattr(model_gpt, "attention_fast", attention)
    model, x = mor(block_size=T, pos="none", **sizes).train(), tokens(1, T)
    model.set_step(4)
    with FlopCounterMode(display=False) as counter:
        model(x, x)[1].backward()
    cfg, R, edge = model.cfg, model.cfg.n_loop, 2 * int(model.cfg.share.startswith("middle"))
    less = 0 if cfg.router == "none" else 0.5 if cfg.capacity_warmup else 1
    taken = [int(T * (R - less * r) / R) for r in range(R)]
    counts = taken * ((cfg.n_layer - edge) // R) + [T] * edge
    narrow = cfg.kv == "recursion"
    assert sorted(given) == sorted(n * (n if narrow else T) for n in counts)
    visible = sum(n * ((n if narrow else T) + 1) / 2 for n in counts)
    found = counter.get_total_flops() - 12 * C * (sum(given) - visible)
    if cfg.causal == "aux_router":                  # their input is detached: no gradient for it
        found += 2 * C * T * R
    assert found == pytest.approx(T * model.flops_per_token(step=4), rel=1e-12)


@every_routing
@every_kv
def test_decoding_runs_the_tokens_that_go_on_and_no_other(router, kv):
    """Nor has it fresh keys of others."""
    model, x, ran, keys = mor(kv=kv, router=router), tokens(1, 33), [], []
    reach = [(model.recursions(x) >= r).sum().item() for r in (1, 2, 3)]
    assert 33 == reach[0] > reach[1] > reach[2] > 0
    count = lambda to: lambda module, args: to.append(args[0].flatten(0, -2).size(0))
    for block in [*model.first, *model.blocks, *model.last]:
        block.register_forward_pre_hook(count(ran))
        block.attn.wk.register_forward_pre_hook(count(keys))
    cache = model.init_cache(1, 33)
    for token in x.split(1, 1):
        model(token, cache=cache)
    assert sum(ran) == 33 + sum(reach) + 33
    assert sum(keys) == (3 * 33 if kv == "share" else sum(ran))


# ---- decoding and evaluation ----

@pytest.mark.parametrize("sizes", [*ROUTED, *(dict(fast=False, kv=kv) for kv in KV),
                                   *(dict(router_arch="random", router=name) for name in ("expert", "token"))], ids=str)
def test_decoding_is_the_forward(sizes):
    model = mor(**sizes)
    for splits in ([1] * 19, [7, 1, 1, 10]):
        assert_cache_is_forward(model, [19, 1, 12], splits, 1e-10)


@pytest.mark.parametrize("sizes", [dict(), dict(causal="aux_router", kv="share_update", capacity_warmup=9)], ids=str)
def test_ce_is_that_of_decoding_and_ce_topk_that_of_training(sizes):
    model, x = mor(aux_weight=0.5, **sizes), tokens(2, 34)
    model.set_step(0)                               # decoding does not depend on the warm-up
    decoded = F.cross_entropy(model(x[:, :-1])[0].flatten(0, 1), x[:, 1:].flatten())
    _, loss, aux = model(x[:, :-1], x[:, 1:])
    training = model.train()(x[:, :-1], x[:, 1:])
    assert relative(aux["ce"], decoded) < 1e-10 and torch.equal(loss.detach(), aux["ce"])
    assert relative(aux["ce_topk"], training[2]["ce"]) < 1e-12
    assert abs(aux["ce_topk"] - aux["ce"]) > 1e-6 and training[1] > training[2]["ce"] + 0.1


@every_routing
@pytest.mark.parametrize("cap", [1, 2])
def test_exit_loop_caps_the_recursions(router, cap):
    """In eval mode only; decoding too, whose cache has no room for the others."""
    x = tokens(2, 25)
    model, free = mor(router=router, exit_loop=cap), mor(router=router)
    logits, loss, log = by_hand(free, x, False, loops=cap)
    got = model(x[:, :-1], x[:, 1:])
    assert relative(got[0], logits) < 1e-10 and relative(got[1], loss) < 1e-10
    assert all(x.isfinite() for x in got[2].values())
    for d in (1, 2, 3):
        assert abs(got[2][f"depth{d}"] - log[f"depth{d}"]) < 1e-6 and (got[2][f"depth{d}"] > 0) == (d <= cap)
    assert_cache_is_forward(model, [24, 9], [10, 1, 13], 1e-10)
    assert len(model.init_cache(2, 25).later) == cap - 1 and model.recursions(x).max() == cap
    assert torch.equal(model.train()(x)[0], free.train()(x)[0])


# ---- learning to route ----

@pytest.mark.parametrize("T, R", [(31, 3), (10, 4)])
def test_capacity_falls_along_half_a_cosine(T, R):
    """From all tokens to floor((R - r) T / R) of recursion r, from 0. A model that is told no step is after it."""
    model, x = mor(n_layer=2 + R, n_loop=R, capacity_warmup=40).train(), tokens(2, T)
    for step in (math.inf, 0, 1, 20, 39, 40, 45):
        model.set_step(step)
        aux = model(x, x)[2]
        got = [round(T * sum(aux[f"depth{d}"].item() for d in range(r, R + 1))) for r in range(1, R + 1)]
        fraction = [1 - r / R * (0.5 - 0.5 * math.cos(math.pi * min(step, 40) / 40)) for r in range(R)]
        assert got == [max(1, math.floor(T * c + 1e-9)) for c in fraction]


@every_fast
@pytest.mark.parametrize("sizes", [dict(kv=kv, share=share, router=router) for kv, share, router in (
    ("recursion", "middle_sequence", "expert"), ("share", "cycle", "token"), ("share_update", "cycle", "expert"),
    ("share_update", "middle_cycle", "token"), ("recursion", "sequence", "token"))], ids=str)
def test_every_parameter_has_a_gradient(sizes, fast):
    """Processes that train together wait for each one's. Of token choice: all tokens choose one recursion."""
    model, x = mor(**{"fast": fast, "causal": "aux_router", "n_layer": 8 if "middle" in sizes["share"] else 6,
                      **sizes}).train(), tokens(2, 13)
    if model.cfg.router == "token":
        model.balance_bias[0] = 10.0
    _, loss, aux = model(x, x)
    loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    assert aux["depth1"] == 1 or model.cfg.router == "expert"


def test_entropy_where_a_probability_is_zero():
    """It adds 0, not NaN."""
    scores = torch.tensor([0.0, -1e4, 0.0]).double().expand(5, 3)
    metrics = mor(router="token").token_loss(scores, scores.softmax(-1), torch.zeros(5))[1]
    assert abs(metrics["entropy"] - math.log(2)) < 1e-12


def test_loss_free_balance_moves_biases():
    """Against the fractions of tokens, which the trainer sums over micro-batches and processes; equal ones move
    nothing, however they were rounded."""
    model = mor(router="token", balance="loss_free", balance_rate=0.01)
    model.end_step({"depth1": 0.5, "depth2": 0.2, "depth3": 1 / 3 + 1e-7})
    assert torch.equal(model.balance_bias, torch.tensor([-0.01, 0.01, 0.0], dtype=torch.float64))
    assert torch.equal(twin(model).balance_bias, model.balance_bias)
    for balance in ("loss", "none"):
        model = mor(router="token", balance=balance)
        model.end_step({"depth1": 0.5, "depth2": 0.2, "depth3": 0.3})
        assert not model.balance_bias.any()


@pytest.mark.parametrize("sizes", [dict(kv="share", causal="aux_router"), dict(kv="share_update", fast=False)], ids=str)
def test_a_compiled_training_step_is_one_graph(sizes):
    """torch.compile makes it once, without a break, whatever the capacities of a warm-up, its end included, and the
    data are; loss and gradients are those without it."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("eager")
    model = mor(block_size=33, share="cycle", n_layer=3, capacity_warmup=9, **sizes).train()
    step = torch.compile(model, backend=counter, fullgraph=True)
    for n in (0, 1, 3, 4, 7, 11):
        x = tokens(2, 34, seed=n)
        model.set_step(n)
        _, loss, aux = step(x[:, :-1], x[:, 1:])
        _, want, log = model(x[:, :-1], x[:, 1:])
        assert relative(loss, want) < 1e-10
        assert all(relative(x, log[name]) < 1e-6 for name, x in aux.items())
        for a, b in zip(gradients(loss, model), gradients(want, model), strict=True):
            assert relative(a, b, 1e-8) < 1e-10
    assert counter.frame_count == 1


# ---- the random router, a baseline ----

def test_the_random_router_takes_its_fraction():
    """Recursion r takes (R - r) / R of all tokens, by position in eval mode, else by chance."""
    model = mor(router_arch="random", pos="none", n_embd=8, n_head=1, n_mlp=8, aux_weight=1.0).float()
    x = tokens(1, 3000)
    with torch.no_grad():
        aux = model(x, x)[2]
        assert all(abs(sum(aux[f"depth{d}"] for d in range(r + 1, 4)) - (3 - r) / 3) < 0.03 for r in range(3))
        x = x[:, :60]
        assert torch.equal(model(x)[0], model(x)[0])
        model.train()
        torch.manual_seed(0)
        (a, _, aux), b = model(x, x), model(x)[0]
        torch.manual_seed(0)
        assert torch.equal(model(x)[0], a) and not torch.equal(a, b)
        assert [round(60 * aux[f"depth{d}"].item()) for d in (1, 2, 3)] == [20, 20, 20]


# ---- the cache ----

@every_routing
def test_the_cache_has_keys_of_those_that_took_a_recursion(router):
    """As the equations choose them, each set part of the one before; reset empties these rows alone."""
    model, x = mor(router=router), tokens(2, 33)
    cache = model.init_cache(2, 33)
    for t in x.split([10, 1, 22], 1):
        model(t, cache=cache)
    for row in range(2):
        by = Routed(model, False)
        by.forward(x[row])
        chosen = by.log["active"]
        assert set(chosen[2]) < set(chosen[1]) < set(chosen[0]) and chosen[0] == list(range(33))
        assert [(model.recursions(x)[row] >= r).nonzero()[:, 0].tolist() for r in (1, 2, 3)] == chosen
        for c, n in zip(cache.later, map(len, chosen[1:])):
            assert c.lengths[row] == n
            assert (c.k[0][row, :, :n] != 0).all() and (c.k[0][row, :, n:-1] == 0).all()
    cache.reset([1])
    for c in cache.later:
        assert c.lengths[0] > 0 and c.lengths[1] == 0
        assert not c.k[0][1].any() and not c.v[0][1].any()


@pytest.mark.parametrize("share, N, R", [("cycle", 6, 2), ("middle_cycle", 32, 3), ("middle_cycle", 34, 4)])
def test_bytes_of_a_cache(share, N, R):
    """Of the plain Transformer's of the same depth, at configured capacities: (R + 1) / (2 R) and 1 / R of the
    recursive layers. share_update keeps all tokens' keys of each recursion."""
    sizes, edge = dict(n_layer=N, n_embd=8, n_head=2, n_kv_head=1), 2 * share.startswith("middle")
    plain = tiny("gpt", **sizes).init_cache(3, 12 * R).nbytes()
    for kv, part in (("recursion", (R + 1) / (2 * R)), ("share_update", 1), ("share", 1 / R)):
        got = mor(share=share, kv=kv, n_loop=R, **sizes).init_cache(3, 12 * R).nbytes() / plain
        assert abs(got - (edge + (N - edge) * part) / N) < 1e-12


@every_fast
@every_routing
def test_a_list_grows_where_tokens_choose_more_than_planned(router, fast):
    """Routers that send every token through all recursions: the states' first number is large."""
    model, x = mor(router=router, fast=fast), tokens(3, 30)
    with torch.no_grad():
        model.wte.weight[:, 0] += 20
        for name, p in model.named_parameters():
            if "router" in name:
                p.zero_()
                p[-1, 0] = 1.0      # the score of expert choice, that of all recursions of token choice
        assert model(x, x)[2]["depth3"] == 1
        cache = model.init_cache(3, 30)
        before = cache.nbytes()
        model(x, cache=cache)
    assert abs(cache.nbytes() / before - 5 / (2 + 3 * 4 / 6)) < 1e-12
    assert_cache_is_forward(model, [30, 7, 19], [1] * 12 + [10, 1, 7], 1e-10)


# ---- packed tokens, each at its own recursion ----

@torch.no_grad()
@every_routing
@pytest.mark.parametrize("sizes", [dict(), dict(router_arch="random"), dict(share="sequence")], ids=str)
def test_packed_tokens_at_mixed_recursions_are_as_if_alone(router, sizes):
    """Of sequences of one token, so that each attends to its own key; of longer ones in test_serve.py. share=sequence:
    one recursion a call."""
    model, depth = mor(router=router, **sizes), torch.tensor([2, 0, 1, 1, 0])
    h, noise = torch.randn(5, 32, dtype=torch.float64), model.noise(torch.arange(5))
    state, size = torch.cat([h, h, noise], 1), 1 if "share" in sizes else 5
    calls = zip(state.split(size), depth.split(size))
    got, takes = torch.cat([model.loop(*call, Oneself()) for call in calls])[:, :32], model.takes(state, depth)
    for n, r in enumerate(depth.tolist()):
        hand, name = Routed(model, False), "router" if router == "token" else f"routers.{r}"
        s = noise[n] if router == "token" else noise[n, r:r + 1]
        if "router_arch" not in sizes:
            s = hand.scores(h[n], name)
        want = hand.recursion(h[n:n + 1], r + 1, torch.tensor([0]))
        if router == "expert":
            want = h[n:n + 1] + 0.1 * s.sigmoid() * want
        assert relative(got[n:n + 1], want) < 1e-10
        assert takes[n] == (s.argmax() >= r if router == "token" else s >= 0)


# ---- conversion and settings ----

def converted(gpt, **sizes):
    same = {k: v for k, v in asdict(gpt.cfg).items() if k in model_mor.Config.__dataclass_fields__}
    torch.manual_seed(7)
    model = model_mor.Model(model_mor.Config(**{**same, **sizes})).double().eval()
    fresh = {name: w.clone() for name, w in model.state_dict().items()}
    model_mor.convert(model, gpt.state_dict())
    return model, fresh


# (share, layers, recursions, init): the source's layers that each stored block is the mean of
ORIGINS = {("middle_cycle", 8, 3, "average"): [[1, 3, 5], [2, 4, 6]], ("middle_cycle", 8, 3, "lower"): [[1], [2]],
           ("middle_cycle", 8, 3, "upper"): [[5], [6]], ("middle_sequence", 8, 3, "average"): [[1, 2, 3], [4, 5, 6]],
           ("middle_cycle", 8, 2, "stepwise"): [[1], [4], [6]],
           ("middle_sequence", 12, 2, "stepwise"): [[1], [3], [6], [8], [10]],
           ("middle_cycle", 14, 4, "stepwise"): [[1], [6], [12]], ("cycle", 8, 2, "stepwise"): [[0], [2], [5], [7]],
           ("cycle", 6, 3, "average"): [[0, 2, 4], [1, 3, 5]], ("sequence", 6, 2, "average"): [[0, 1], [2, 3], [4, 5]],
           ("cycle", 3, 3, "stepwise"): [[0]], ("cycle", 6, 3, "random"): [[], []]}


@pytest.mark.parametrize("share, n_layer, n_loop, init", ORIGINS)
def test_where_stored_blocks_come_from(share, n_layer, n_loop, init):
    gpt = tiny("gpt", n_layer=n_layer, n_kv_head=2, qk_norm=True, tie_embeddings=False)
    w = gpt.state_dict()
    model, fresh = converted(gpt, share=share, n_loop=n_loop, init=init)
    for k, (block, layers) in enumerate(zip(model.blocks, ORIGINS[share, n_layer, n_loop, init], strict=True)):
        for name, p in block.named_parameters():
            tied = torch.stack([w[f"blocks.{n}.{name}"] for n in layers]).mean(0) if layers else None
            assert relative(p, fresh[f"blocks.{k}.{name}"] if tied is None else tied) < 1e-14, name
    for edge, layer in ((model.first, 0), (model.last, n_layer - 1)):
        assert len(edge) == share.startswith("middle")
        own = w[f"blocks.{layer}.mlp.w_down.weight"]
        assert all(torch.equal(block.mlp.w_down.weight, own) for block in edge)


def test_in_one_loop_the_source_comes_back():
    gpt, x = tiny("gpt", n_layer=8), tokens(2, 30)
    for share in ("cycle", "middle_cycle"):
        model, _ = converted(gpt, share=share, n_loop=1, router="none")
        assert relative(model(x)[0], gpt(x)[0]) < 1e-12


@every_fast
@every_kv
def test_attention_weights_are_dropped_too(kv, fast):
    """Where nothing else is, in later recursions."""
    model, x = mor(kv=kv, dropout=0.5, fast=fast).train(), tokens(2, 20)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    assert relative(model(x)[0], model(x)[0]) > 1e-3


@pytest.mark.parametrize("sizes", [dict(kv="share_update"), dict(causal="aux_router", router_arch="mlp"),
                                   dict(router="token", fast=False), dict(router_arch="random", kv="share")], ids=str)
def test_routers_keep_full_precision(sizes):
    """Under bfloat16 autocast, and with bfloat16 weights: scores are float32."""
    model, x, found = mor(**sizes).float(), tokens(2, 30), []
    routers = [m for m in model.modules() if isinstance(m, model_mor.Router)]
    for m in routers:
        m.register_forward_hook(lambda module, args, out: found.append((module, args[0], out)))
    with torch.autocast("cpu", torch.bfloat16):
        for training in (True, False):
            model.train(training)(x[:, :-1], x[:, 1:])
        with torch.no_grad():
            model(x, cache=model.init_cache(2, 30))
    assert {module for module, *_ in found} == set(routers)
    for module, h, out in found:
        assert out.dtype == torch.float32
        if module.layers is not None:
            assert relative(out, module.layers(h.float())) < 1e-6
    model.bfloat16()(x)
    assert found[-1][2].dtype == torch.float32


@pytest.mark.parametrize("bad, named", [
    (dict(n_layer=2), "5 or 8 would"), (dict(n_layer=10, n_loop=4, share="cycle"), "8 or 12 would"),
    (dict(n_loop=0), "n_loop=0"), (dict(share="cycle_rev"), "share=cycle_rev"), (dict(exit_loop=-1), "exit_loop=-1"),
    (dict(router_func="softmax"), "router_func=softmax must be one of: sigmoid, tanh"), (dict(z_loss=-1e-5), "z_loss"),
    (dict(share="sequence", n_layer=6, kv="share"), "kv=share needs recursions over the same layers")], ids=str)
def test_impossible_settings_are_named(bad, named):
    with pytest.raises(ValueError, match=named):
        model_mor.Config(**{"n_layer": 5, "n_embd": 32, **bad})

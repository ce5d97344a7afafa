"""model_mor: its routing once more token by token, what is tied, what runs and is kept, decoding, and conversion."""
import math
from dataclasses import asdict

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.flop_counter import FlopCounterMode

import model_gpt
import model_mor
from run import read_config, set_budget, tokens_per_step
import test_relaxed
from conftest import ROOT, relative, tiny
from test_gpt import rotate
from test_models import assert_cache_is_forward, rms, tokens
from test_relaxed import storages

SHARES, KV = ("cycle", "sequence", "middle_cycle", "middle_sequence"), ("recursion", "share", "share_update")
every_fast = pytest.mark.parametrize("fast", [True, False])
every_kv = pytest.mark.parametrize("kv", KV)
every_routing = pytest.mark.parametrize("router", ["expert", "token"])


def mor(**sizes):
    """The tiny float64 model of conftest: 5 layers (6 where no layer stands outside the recursions), 3 recursions."""
    return tiny("mor", **{"n_layer": 5 if sizes.get("share", "middle").startswith("middle") else 6, **sizes})


# ---------------------------------------------------------------------------------------------------------------------
# the equations, once more, token by token

def stored(cfg, layer):
    """Where unrolled layer `layer`, from 0, has its weights: the four formulas of Table 5."""
    N, R = cfg.n_layer, cfg.n_loop
    if cfg.share == "cycle":
        return f"blocks.{layer % (N // R)}"
    if cfg.share == "sequence":
        return f"blocks.{layer // R}"
    if layer == 0 or layer == N - 1:
        return "first.0" if layer == 0 else "last.0"
    return f"blocks.{(layer - 1) % ((N - 2) // R) if cfg.share == 'middle_cycle' else (layer - 1) // R}"


class ByHand:
    """A model on one sequence. States are {position: (C,)}; a token that is not in there does not exist."""

    def __init__(self, model, training, loops=0):
        self.cfg, self.w, self.training = model.cfg, dict(model.named_parameters()), training
        self.loops, self.bias = loops or model.cfg.n_loop, getattr(model, "balance_bias", None)

    def normed(self, x, name):
        return x / (x.square().mean(-1, keepdim=True) + self.cfg.norm_eps).sqrt() * self.w[f"{name}.weight"]

    def heads(self, x, block, kind, t):
        """Query or key (heads, D) of a normed state x (C,) at position t."""
        y = (self.w[f"{block}.attn.w{kind}.weight"] @ x).unflatten(0, (-1, self.cfg.head_dim))
        if self.cfg.qk_norm:
            y = self.normed(y, f"{block}.attn.{kind}_norm")
        return rotate(y[None], torch.tensor([t]), self.cfg.rope_theta)[0] if self.cfg.pos == "rope" else y

    def pair(self, h, block, t):
        """The key and the value (heads, D) of state h (C,)."""
        x = self.normed(h, f"{block}.norm1")
        value = self.w[f"{block}.attn.wv.weight"] @ x
        return self.heads(x, block, "k", t), value.unflatten(0, (-1, self.cfg.head_dim))

    def token(self, h, block, t, pairs):
        """State h (C,) at position t after a layer in which it sees these (key, value) pairs."""
        cfg, w = self.cfg, self.w
        q = self.heads(self.normed(h, f"{block}.norm1"), block, "q", t)
        k, v = (torch.stack(y).repeat_interleave(cfg.n_head // cfg.n_kv_head, 1) for y in zip(*pairs))    # (S, H, D)
        e = ((q * k).sum(-1) / math.sqrt(cfg.head_dim)).exp()                                                   # (S, H)
        y = (e[..., None] * v).sum(0) / e.sum(0)[:, None]
        h = h + w[f"{block}.attn.wo.weight"] @ y.flatten()
        x = self.normed(h, f"{block}.norm2")
        up = w[f"{block}.mlp.w_up.weight"] @ x
        if cfg.mlp == "swiglu":
            gate = w[f"{block}.mlp.w_gate.weight"] @ x
            return h + w[f"{block}.mlp.w_down.weight"] @ (gate * torch.sigmoid(gate) * up)
        return h + w[f"{block}.mlp.w_down.weight"] @ gelu(up)

    def layers(self, x, which, r=0, first=None):
        """States x after unrolled layers `which`, those of recursion r. first: [{position: pair}], a dict a layer, of
        recursion 1, which fills it."""
        for i, layer in enumerate(which):
            block = stored(self.cfg, layer)
            seen = {t: self.pair(h, block, t) for t, h in x.items()}
            if r == 1:
                first.append(seen)
            elif r > 1 and self.cfg.kv == "share":
                seen = first[i]
            elif r > 1 and self.cfg.kv == "share_update":
                seen = {**first[i], **seen}
            x = {t: self.token(h, block, t, [seen[j] for j in sorted(seen) if j <= t]) for t, h in x.items()}
        return x

    def recursion(self, x, r, first):
        """F_r, r from 1."""
        edge = int(self.cfg.share.startswith("middle"))
        K = (self.cfg.n_layer - 2 * edge) // self.cfg.n_loop
        return self.layers(x, range(edge + (r - 1) * K, edge + r * K), r, first)

    def scores(self, h, name):
        """What a router makes of a state h (C,)."""
        if self.cfg.router_arch == "linear":
            return self.w[f"{name}.layers.weight"] @ h
        return self.w[f"{name}.layers.2.weight"] @ gelu(self.w[f"{name}.layers.0.weight"] @ h)

    def forward(self, idx):
        """Logits (T, V) of the sequence idx (T,). self.log then has what the router did."""
        middle, x = self.cfg.share.startswith("middle"), {t: self.w["wte.weight"][i] for t, i in enumerate(idx)}
        x = self.layers(x, [0] * middle)
        x = {"expert": self.expert, "token": self.by_token, "none": self.all_take_all}[self.cfg.router](x)
        x = self.layers(x, [self.cfg.n_layer - 1] * middle)
        x = self.normed(torch.stack([x[t] for t in range(len(idx))]), "norm")
        return x @ self.w.get("head.weight", self.w["wte.weight"]).T

    def expert(self, x):
        cfg, T, R, first = self.cfg, len(x), self.cfg.n_loop, []
        active, self.log = list(range(T)), {"bce": [], "z": [], "active": [], "right": [], "yes": []}
        for r in range(1, self.loops + 1):
            s = {t: self.scores(x[t], f"routers.{r - 1}")[0] for t in active}
            by = s
            if cfg.causal == "aux_router":
                by = {t: self.scores(x[t].detach(), f"aux_routers.{r - 1}")[0] for t in active}
            if self.training:
                k = max(1, T * (R - r + 1) // R)
                chosen = sorted(sorted(active, key=lambda t: s[t].item())[-k:])
            else:
                chosen = [t for t in active if r == 1 or by[t] >= 0]
            if self.training:
                self.log["bce"].append(torch.stack([softplus(-by[t] if t in chosen else by[t]) for t in active]).mean())
                self.log["z"].append(torch.stack([s[t] ** 2 for t in active]).mean())
            self.log["right"].append([bool(by[t] >= 0) == (t in chosen) for t in active])
            self.log["yes"].append([t in chosen for t in active])
            y = self.recursion({t: x[t] for t in chosen}, r, first)
            gate = torch.tanh if cfg.router_func == "tanh" else torch.sigmoid
            x = {t: h + cfg.alpha * gate(s[t]) * y[t] if t in chosen else h for t, h in x.items()}
            active = chosen
            self.log["active"].append(active)
        return x

    def by_token(self, h):
        cfg, R, first = self.cfg, self.cfg.n_loop, []
        scores = {t: self.scores(h[t], "router") for t in h}
        p = {t: s.exp() / s.exp().sum() if cfg.router_func == "softmax" else cfg.alpha / (1 + (-s).exp())
             for t, s in scores.items()}
        depth = {t: min(int((p[t].detach() + self.bias).argmax()) + 1, self.loops) for t in h}
        x = dict(h)
        for r in range(1, R + 1):
            x.update(self.recursion({t: x[t] for t in x if depth[t] >= r}, r, first))
        self.log = {"p": [p[t] for t in h], "z": [s.exp().sum().log() ** 2 for s in scores.values()],
                    "active": [[t for t in h if depth[t] >= r] for r in range(1, R + 1)]}
        return {t: h[t] + p[t][depth[t] - 1] * x[t] for t in h}

    def all_take_all(self, x):
        first, self.log = [], {}
        for r in range(1, self.loops + 1):
            x = self.recursion(x, r, first)
        return x


def gelu(x):
    return x * (1 + torch.erf(x / math.sqrt(2))) / 2


def softplus(x):
    return (1 + x.exp()).log()


def by_hand(model, x, training, loops=0):
    """(logits, loss, what to log) of inputs and targets x (B, T + 1)."""
    cfg, rows = model.cfg, [ByHand(model, training, loops) for _ in x]
    logits = torch.stack([row.forward(idx[:-1].tolist()) for row, idx in zip(rows, x)])
    p = logits.exp() / logits.exp().sum(-1, keepdim=True)
    ce = -torch.stack([p[b, t, x[b, t + 1]].log() for b in range(p.size(0)) for t in range(p.size(1))]).mean()
    log, loss, R, T = {"ce": ce.detach()}, ce, cfg.n_loop, x.size(1) - 1
    if cfg.router == "none":
        return logits, loss, log
    reached = [sum(len(row.log["active"][r]) for row in rows) if r < len(rows[0].log["active"]) else 0
               for r in range(R)] + [0]
    log |= {f"depth{d}": (reached[d - 1] - reached[d]) / len(x) / T for d in range(1, R + 1)}
    if cfg.router == "expert":
        log["dead"] = 1 - len({t for row in rows for t in row.log["active"][-1]}) / T
    if cfg.router == "expert" and training:
        bce, z = (sum(torch.stack(row.log[name]).sum() for row in rows) / len(rows) for name in ("bce", "z"))
        log["aux"], loss = bce.detach(), ce + cfg.aux_weight * bce + cfg.z_loss * z
    if cfg.router == "token":
        p, share = torch.stack(sum((row.log["p"] for row in rows), [])), [R * log[f"depth{d}"] for d in range(1, R + 1)]
        balance = sum(f * P for f, P in zip(share, p.mean(0)))
        log |= {"balance": balance.detach(), "maxvio": max(share) - 1}
        if training:
            loss = ce + cfg.z_loss * torch.stack(sum((row.log["z"] for row in rows), [])).mean()
            loss = loss + cfg.balance_weight * balance * (cfg.balance == "loss")
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
lengths = pytest.mark.parametrize("T", [1, 2, 13, 33])


@lengths
@pytest.mark.parametrize("sizes", EXPERT, ids=str)
def test_expert_choice_is_its_equations(sizes, T):
    """In training: the best k tokens take a recursion; the loss teaches the scores who they are."""
    assert_is_by_hand(mor(router="expert", aux_weight=0.3, **sizes).train(), tokens(2, T + 1))


@lengths
@pytest.mark.parametrize("sizes", EXPERT, ids=str)
def test_in_eval_mode_scores_decide_token_by_token(sizes, T):
    assert_is_by_hand(mor(router="expert", aux_weight=0.3, **sizes), tokens(2, T + 1))


@lengths
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("sizes", TOKEN, ids=str)
def test_token_choice_is_its_equations(sizes, training, T):
    model = mor(router="token", balance_weight=0.3, **sizes).train(training)
    model.balance_bias += 0.02 * torch.randn(model.cfg.n_loop)
    assert_is_by_hand(model, tokens(2, T + 1))


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("sizes", NONE, ids=str)
def test_without_a_router_all_tokens_take_all(sizes, training):
    assert_is_by_hand(mor(router="none", **sizes).train(training), tokens(2, 18))


def test_the_paths_part():
    """What the tests above compare has tokens at every depth, in both routers and modes."""
    for router in ("expert", "token"):
        for training in (True, False):
            aux = mor(router=router).train(training)(tokens(2, 33), tokens(2, 33, seed=2))[2]
            assert all(aux[f"depth{d}"] > 0.05 for d in (1, 2, 3))
            assert abs(sum(aux[f"depth{d}"] for d in (1, 2, 3)) - 1) < 1e-6


# ---------------------------------------------------------------------------------------------------------------------
# what is tied

LAYERS = {("cycle", 6, 2): "012012", ("cycle", 6, 3): "010101", ("sequence", 6, 2): "001122",
          ("sequence", 6, 3): "000111", ("middle_cycle", 8, 2): "f012012l", ("middle_cycle", 8, 3): "f010101l",
          ("middle_sequence", 8, 2): "f001122l", ("middle_sequence", 8, 3): "f000111l", ("cycle", 6, 6): "000000",
          ("middle_cycle", 5, 1): "f012l", ("sequence", 4, 1): "0123", ("middle_sequence", 5, 3): "f000l"}


@pytest.mark.parametrize("router", ["expert", "token", "none"])
@pytest.mark.parametrize("share, n_layer, n_loop", LAYERS)
def test_which_stored_block_a_layer_is(share, n_layer, n_loop, router):
    """The order in which a forward calls them; and the same objects are what level r has."""
    model, called = mor(share=share, n_layer=n_layer, n_loop=n_loop, router=router, fast=False), []
    names = {block: name for name, block in [*((str(k), b) for k, b in enumerate(model.blocks)),
                                             *(("f", b) for b in model.first), *(("l", b) for b in model.last)]}
    assert "".join(names[block] for level in model.levels for block in level) == LAYERS[share, n_layer, n_loop]
    for block in names:
        block.register_forward_hook(lambda module, *_: called.append(names[module]))
    model.train()(tokens(1, 12))
    assert "".join(called) == LAYERS[share, n_layer, n_loop]
    assert len(model.blocks) == len(set(LAYERS[share, n_layer, n_loop]) - {"f", "l"})


def size_by_hand(sizes, blocks, C=32, H=4, M=96, V=61, R=3):
    """Parameters of so many blocks, norm, embedding, and an expert-choice model's linear routers."""
    kv = C * C * sizes.get("n_kv_head", H) // H
    return blocks * (2 * C * C + 2 * kv + 3 * C * M + 2 * C) + C + V * C + R * C


@pytest.mark.parametrize("share, n_layer, blocks", [("cycle", 6, 2), ("sequence", 6, 2), ("middle_cycle", 8, 4),
                                                    ("middle_sequence", 8, 4), ("middle_cycle", 5, 3)])
def test_tied_parameters_are_one_tensor(share, n_layer, blocks, tmp_path):
    """Attention's too; also once they went through a file."""
    for sizes in (dict(), dict(n_kv_head=2)):
        model = mor(share=share, n_layer=n_layer, **sizes)
        torch.save(model.state_dict(), tmp_path / "weights.pt")
        loaded = twin(model)
        loaded.load_state_dict(torch.load(tmp_path / "weights.pt", weights_only=True))
        for m in (model, loaded):
            assert sum(p.numel() for p in m.parameters()) == size_by_hand(sizes, blocks)
            assert sum(storages(m.state_dict()).values()) == 8 * size_by_hand(sizes, blocks)
            unrolled = [block for level in m.levels for block in level]
            assert len(unrolled) == n_layer
            for part in ("attn.wq", "attn.wk", "attn.wv", "attn.wo", "mlp.w_gate", "mlp.w_up", "mlp.w_down", "norm1"):
                places = {block.get_parameter(f"{part}.weight").data_ptr() for block in unrolled}
                assert len(places) == blocks
        x = tokens(2, 20)
        assert torch.equal(model(x)[0], loaded(x)[0])


BASES = {"135M": dict(n_embd=576, n_head=9, n_kv_head=3, n_mlp=1536),
         "360M": dict(n_embd=960, n_head=15, n_kv_head=5, n_mlp=2560),
         "730M": dict(n_embd=1536, n_head=24, n_kv_head=8, n_mlp=4096),
         "1.7B": dict(n_embd=2048, n_head=32, n_kv_head=32, n_mlp=8192)}


def of_the_paper(base, n_layer, n_loop, share="middle_cycle", **sizes):
    """A model of the paper's shape, without memory for its weights; n_loop 0: the vanilla Transformer."""
    plain = dict(n_loop=1, share="cycle", router="none") if n_loop == 0 else dict(n_loop=n_loop, share=share)
    with torch.device("meta"):
        return model_mor.Model(model_mor.Config(block_size=2048, vocab_size=49152, n_layer=n_layer, **BASES[base],
                                                **{**plain, **sizes}))


# (base, unrolled layers, recursions, sharing): millions of parameters outside embedding and head, of Tables 3, 7 and 8
SIZES = {("135M", 30, 0, ""): 106, ("135M", 30, 2, "cycle"): 53, ("135M", 30, 2, "sequence"): 53,
         ("135M", 30, 2, "middle_cycle"): 57, ("135M", 30, 2, "middle_sequence"): 57, ("135M", 30, 3, "cycle"): 35,
         ("135M", 30, 3, "sequence"): 35, ("135M", 29, 3, "middle_cycle"): 39, ("135M", 29, 3, "middle_sequence"): 39,
         ("135M", 32, 3, "middle_cycle"): 42, ("360M", 32, 0, ""): 315, ("360M", 32, 2, "cycle"): 157,
         ("360M", 32, 2, "middle_cycle"): 167, ("360M", 32, 2, "middle_sequence"): 167, ("360M", 30, 3, "cycle"): 98,
         ("360M", 32, 3, "middle_cycle"): 118, ("360M", 32, 3, "middle_sequence"): 118,
         ("360M", 34, 4, "middle_cycle"): 98, ("730M", 26, 0, ""): 654, ("730M", 26, 3, "middle_cycle"): 252,
         ("1.7B", 24, 0, ""): 1610, ("1.7B", 26, 3, "middle_cycle"): 670}
EMBEDDINGS = {"135M": 28, "360M": 47, "730M": 75, "1.7B": 101}


@pytest.mark.parametrize("base, n_layer, n_loop, share", SIZES)
def test_sizes_of_the_paper(base, n_layer, n_loop, share):
    model = of_the_paper(base, n_layer, n_loop, share)
    rest = sum(p.numel() for p in model.parameters()) - model.wte.weight.numel()
    want = SIZES[base, n_layer, n_loop, share]
    assert round(rest / 1e6, -1 if base == "1.7B" else 0) == want       # of the largest, 10 M are the last digit
    assert int(model.wte.weight.numel() / 1e6 + 0.5) == EMBEDDINGS[base] or base == "730M"


# ---------------------------------------------------------------------------------------------------------------------
# operations

# billions of tokens that a budget pays for: (base, layers, recursions): (budget 2e18, 5e18, 16.5e18), Table 7
TOKENS = {("135M", 30, 0): (6.5, 16.1, 53.3), ("360M", 32, 0): (2.4, 6.0, 19.8), ("730M", 26, 0): (1.2, 3.1, 10.1),
          ("1.7B", 24, 0): (0.6, 1.5, 4.8), ("135M", 32, 3): (9.2, 23.1, 76.2), ("360M", 32, 3): (3.6, 9.0, 29.7),
          ("730M", 26, 3): (1.8, 4.5, 14.9), ("1.7B", 26, 3): (0.8, 2.0, 6.5)}


@pytest.mark.parametrize("base, n_layer, n_loop", TOKENS)
def test_tokens_that_a_budget_pays_for(base, n_layer, n_loop):
    """To all digits that the paper prints: 0.05 billion, and what rounding to whole batches may move."""
    flops = of_the_paper(base, n_layer, n_loop).flops_per_token(paper=True)
    for budget, billions in zip((2e18, 5e18, 16.5e18), TOKENS[base, n_layer, n_loop]):
        assert abs(budget / flops / 1e9 - billions) < 0.051


@pytest.mark.parametrize("sizes, billions", [
    (dict(n_layer=32, n_loop=2, router="none"), 20), (dict(n_layer=34, n_loop=4, router="none"), 19),
    (dict(n_layer=32, n_loop=2), 27), (dict(n_layer=32, n_loop=3), 30), (dict(n_layer=34, n_loop=4), 30),
    (dict(n_layer=32, n_loop=3, router="token"), 30), (dict(n_layer=32, n_loop=3, kv="share"), 31)], ids=str)
def test_tokens_of_table_3(sizes, billions):
    """In whole billions, of the 360M base; with two recursions it is 26.46, which the paper rounds up."""
    got = 16.5e18 / of_the_paper("360M", **sizes).flops_per_token(paper=True) / 1e9
    assert abs(got - billions) < 0.025 * billions
    assert round(got) == billions or sizes == dict(n_layer=32, n_loop=2)


SEEN = [dict(), dict(kv="share"), dict(kv="share_update", router_arch="mlp"), dict(n_loop=2, n_layer=6, n_kv_head=2),
        dict(share="sequence"), dict(share="cycle", kv="share", tie_embeddings=False), dict(router="none"),
        dict(router="none", kv="share"), dict(causal="aux_router"), dict(causal="aux_router", router_arch="wide_mlp"),
        dict(causal="aux_router", router_arch="random"), dict(capacity_warmup=8),
        dict(capacity_warmup=8, kv="share", causal="aux_router")]


@pytest.mark.parametrize("sizes", SEEN, ids=str)
def test_flops_are_those_that_run(sizes, monkeypatch):
    """Forward and backward of the fast path, in training. Attention, which is written out here to
    be counted, takes all keys that a query is given; the model counts the visible ones, the chosen
    tokens being spread evenly. Half-way in a capacity warm-up."""
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
    want = T * model.flops_per_token(step=4)
    assert found == want or cfg.capacity_warmup and abs(found / want - 1) < 1e-12
    assert cfg.capacity_warmup == 0 or want > T * model.flops_per_token()


@pytest.mark.parametrize("name, billions", [("135m_r3", 76.2), ("360m_r3", 29.7),
                                            ("730m_r3", 14.9), ("1700m_r3", 6.5),
                                            ("360m_r2", 27), ("360m_r4", 30)])
def test_the_papers_budget_ends_its_runs_where_it_does(name, billions):
    """max_flops=16.5e18: the tokens of Table 7, and of Table 3 in whole billions."""
    file = ROOT / "configs" / f"mor_{name}.yaml"
    cfg, sizes, _, _ = read_config([f"config={file}", "max_flops=16.5e18"])
    with torch.device("meta"):
        model = model_mor.Model(model_mor.Config(**sizes))
    set_budget(cfg, model)
    found = cfg.max_steps * tokens_per_step(cfg, model) / 1e9
    assert abs(found - billions) < (0.051 if name.endswith("r3") else 0.55)


@pytest.mark.parametrize("sizes", [dict(), dict(paper_flops=True, kv="share"),
                                   dict(capacity_warmup=40),
                                   dict(capacity_warmup=40, paper_flops=True)], ids=str)
def test_a_budget_pays_for_the_warm_up_too(sizes):
    """The steps are those that it reaches, whether it ends within the warm-up or after it."""
    model = mor(**sizes)
    cost = [64 * model.flops_per_token(model.cfg.paper_flops, step) for step in range(100)]
    later = 64 * model.flops_per_token(model.cfg.paper_flops)
    warm = model.cfg.capacity_warmup
    assert cost[0] > cost[20] > cost[39] > cost[40] if warm else cost[0] == later
    assert cost[warm:] == [later] * (100 - warm)
    for steps in (1, 5, 39, 40, 41, 100):
        assert model.steps_within(sum(cost[:steps]) * (1 + 1e-9), 64) == steps
        assert model.steps_within(sum(cost[:steps]) * (1 - 1e-9), 64) == steps - 1


def rows_entering(model, call):
    """[how many tokens] of each block that call() runs, and of each wk."""
    blocks = [*model.first, *model.blocks, *model.last]
    count = lambda to: lambda module, args: to.append(args[0].flatten(0, -2).size(0))
    layers, keys = [], []
    hooks = [h for b in blocks for h in (b.register_forward_pre_hook(count(layers)),
                                         b.attn.wk.register_forward_pre_hook(count(keys)))]
    with torch.no_grad():
        call()
    for hook in hooks:
        hook.remove()
    return layers, keys


@every_kv
def test_only_chosen_tokens_run_where_that_is_fast(kv):
    """And keys of later recursions only where they are fresh."""
    x = tokens(2, 33)
    short, whole = [66, 66, 44, 22, 66], [66] * 5
    for fast, rows in ((True, short), (False, whole)):
        model = mor(kv=kv, fast=fast).train()
        assert rows_entering(model, lambda: model(x)) == (rows, [66] * 3 if kv == "share" else rows)


@every_routing
@every_kv
def test_decoding_runs_the_tokens_that_go_on_and_no_other(router, kv):
    model, x = mor(kv=kv, router=router), tokens(2, 33)
    depth = model(x, x)[2]
    reach = [round(66 * sum(depth[f"depth{d}"].item() for d in range(r, 4))) for r in (1, 2, 3)]
    assert 66 == reach[0] > reach[1] > reach[2] > 0
    steps, keys, cache = [], [], model.init_cache(2, 33)
    for token in x.split(1, 1):
        for to, found in zip((steps, keys), rows_entering(model, lambda: model(token, cache=cache))):
            to += found
    assert sum(steps) == 66 + sum(reach) + 66
    assert sum(keys) == (3 * 66 if kv == "share" else sum(steps))


# ---------------------------------------------------------------------------------------------------------------------
# decoding

@every_fast
@pytest.mark.parametrize("sizes", ROUTED, ids=str)
def test_decoding_is_the_forward(sizes, fast):
    model = mor(fast=fast, **sizes)
    for splits in ([1] * 19, [7, 1, 1, 10]):
        assert_cache_is_forward(model, [19, 1, 12], splits, 1e-10)


def test_choosing_the_best_tokens_of_a_sequence_looks_ahead():
    """Why the training path is not what decoding computes, and ce_topk no honest number."""
    model, x = mor().train(), tokens(1, 33)
    with torch.no_grad():
        before, changed = model(x)[0], 0
        for value in range(61):
            y = x.clone()
            y[:, 32] = value
            changed = max(changed, relative(before[:, :32], model(y)[0][:, :32]))
    assert changed > 1e-4


@pytest.mark.parametrize("sizes", [dict(), dict(kv="share"), dict(causal="aux_router", kv="share_update"),
                                   dict(share="sequence", z_loss=0.1)], ids=str)
def test_ce_is_that_of_decoding_and_ce_topk_that_of_training(sizes):
    model, x = mor(aux_weight=0.5, **sizes), tokens(2, 34)
    _, loss, aux = model(x[:, :-1], x[:, 1:])
    cache = model.init_cache(2, 33)
    with torch.no_grad():
        logits = torch.cat([model(t, cache=cache)[0] for t in x[:, :-1].split([20, 1, 12], 1)], 1)
        training = model.train()(x[:, :-1], x[:, 1:])
    decoded = -logits.log_softmax(-1).gather(-1, x[:, 1:, None]).mean()
    assert relative(aux["ce"], decoded) < 1e-10 and torch.equal(loss.detach(), aux["ce"])
    assert relative(aux["ce_topk"], training[2]["ce"]) < 1e-12
    assert abs(aux["ce_topk"] - aux["ce"]) > 1e-6 and training[1] > training[2]["ce"] + 0.1
    assert "ce_topk" not in training[2]


@every_routing
@pytest.mark.parametrize("cap", [1, 2, 3])
def test_exit_loop_caps_the_recursions(router, cap):
    """In eval mode only; decoding too."""
    x = tokens(2, 25)
    model, free = mor(router=router, exit_loop=cap), mor(router=router)
    logits, loss, log = by_hand(free, x, False, loops=cap)
    got = model(x[:, :-1], x[:, 1:])
    assert relative(got[0], logits) < 1e-10 and relative(got[1], loss) < 1e-10
    for d in (1, 2, 3):
        assert abs(got[2][f"depth{d}"] - log[f"depth{d}"]) < 1e-6 and (got[2][f"depth{d}"] > 0) == (d <= cap)
    assert_cache_is_forward(model, [24, 9], [10, 1, 13], 1e-10)
    cache = model.init_cache(2, 25)
    with torch.no_grad():
        model(x, cache=cache)
    assert [len(c.lengths) for c in cache.later if c.lengths.any()] == [2] * (cap - 1)
    assert model.recursions(x).max() == cap
    assert torch.equal(model.train()(x)[0], free.train()(x)[0])


# ---------------------------------------------------------------------------------------------------------------------
# degenerate settings

def unrolled(model):
    """A model_gpt with the weights of each unrolled layer."""
    cfg = model.cfg
    same = {k: v for k, v in asdict(cfg).items() if k in model_gpt.Config.__dataclass_fields__}
    gpt = model_gpt.Model(model_gpt.Config(**same)).double().eval()
    top = ("wte.weight", "norm.weight", "head.weight")
    weights = {name: w for name, w in model.state_dict().items() if name in top}
    for layer in range(cfg.n_layer):
        start = stored(cfg, layer) + "."
        weights |= {f"blocks.{layer}.{name.removeprefix(start)}": w for name, w in model.state_dict().items()
                    if name.startswith(start)}
    gpt.load_state_dict(weights)
    return gpt


GPTS = [dict(), dict(mlp="gelu", tie_embeddings=False), dict(pos="none", n_kv_head=2),
        dict(qk_norm=True, n_kv_head=1, rope_theta=500.0)]


@every_fast
@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("sizes", GPTS, ids=str)
def test_without_a_router_it_is_the_plain_transformer(sizes, share, fast):
    """Of its unrolled layers; in one loop of share=cycle these are all different, and the names are the same."""
    x = tokens(2, 41)
    for n_loop in (1, 3):
        n_layer = 8 if share.startswith("middle") else 6
        model = mor(share=share, router="none", n_layer=n_layer, n_loop=n_loop, fast=fast, **sizes)
        for got, want in zip(model(x[:, :-1], x[:, 1:])[:2], unrolled(model)(x[:, :-1], x[:, 1:])[:2]):
            assert relative(got, want) < 1e-12
    plain = mor(share="cycle", router="none", n_loop=1, **sizes)
    assert plain.state_dict().keys() == unrolled(plain).state_dict().keys()


@every_fast
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("sizes", [dict(), dict(share="cycle", kv="share_update"), dict(share="sequence", n_loop=2),
                                   dict(n_loop=1), dict(share="middle_sequence", n_layer=8)], ids=str)
def test_expert_choice_with_room_for_all_is_a_gated_recursion(sizes, training, fast):
    """As at the start of a capacity warm-up: h + 0.1 sigmoid(router h) F(h)."""
    model, x = mor(capacity_warmup=100, fast=fast, **sizes).train(training), tokens(2, 30)
    cfg, gpt, edge, K = model.cfg, unrolled(model), model.cfg.edge, model.cfg.n_stored
    h = gpt.wte(x)
    context = model_gpt.Context(gpt.cfg, h)
    for layer, block in enumerate(gpt.blocks):
        r, i = divmod(layer - edge, K)
        if not 0 <= r < cfg.n_loop:
            h = block(h, layer, context)
            continue
        y = h if i == 0 else y
        y = block(y, layer, context)
        if i == K - 1:
            h = h + 0.1 * torch.sigmoid(h @ model.routers[r].layers.weight.T) * y
    assert relative(model(x)[0], gpt.head(gpt.norm(h))) < 1e-12
    aux = model(x, x)[2]
    assert aux[f"depth{cfg.n_loop}"] == 1 and aux["dead"] == 0
    if not training:
        assert_cache_is_forward(model, [30, 8], [10, 1, 19], 1e-10)


# ---------------------------------------------------------------------------------------------------------------------
# learning to route

@pytest.mark.parametrize("T, R, half", [(30, 3, [30, 25, 20]), (31, 3, [31, 25, 20]), (17, 2, [17, 12]),
                                        (10, 4, [10, 8, 7, 6])])
def test_capacity_falls_along_half_a_cosine(T, R, half):
    """From all tokens to floor((R - r) T / R) of recursion r, from 0."""
    model, x, before = mor(n_layer=2 + R, n_loop=R, capacity_warmup=40).train(), tokens(2, T), [T] * R

    def reached():
        aux = model(x, x)[2]
        return [round(T * sum(aux[f"depth{d}"].item() for d in range(r, R + 1))) for r in range(1, R + 1)]

    for step in range(46):
        model.set_step(step)
        got = reached()
        if step in (0, 20, 40):
            assert relative(model.eval()(x, x)[2]["ce_topk"], model.train()(x, x)[2]["ce"]) < 1e-12
        share = [1 - r / R * (0.5 - 0.5 * math.cos(math.pi * min(step, 40) / 40)) for r in range(R)]
        assert got == [max(1, math.floor(T * c + 1e-9)) for c in share]
        assert all(a <= b for a, b in zip(got, before))
        before = got
        if step in (0, 20, 40, 45):
            assert got == {0: [T] * R, 20: half}.get(step, [T * (R - r) // R for r in range(R)])
    assert mor().train()(tokens(1, 30), tokens(1, 30))[2]["depth3"] * 30 == pytest.approx(10)    # none: at once


def test_weights_know_where_the_warm_up_stands():
    """Loaded ones decode with the scores' decisions, as they did where they were saved; a new model
    stands at step 0, where recursions have room for all. Weights without the step are from after
    the warm-up."""
    model, x = mor(capacity_warmup=10), tokens(2, 33)
    assert model(x, x)[2]["depth3"] == 1
    model.set_step(4)
    depth, weights = model(x, x)[2]["depth3"], model.state_dict()
    assert 0 < depth < 0.9 and weights["warmup_step"] == 4
    loaded = twin(model)
    older = {name: w for name, w in weights.items() if name != "warmup_step"}
    for given in (weights, older):
        loaded.load_state_dict(given)
        assert loaded(x, x)[2]["depth3"] == depth and torch.equal(loaded(x)[0], model(x)[0])
        cache = loaded.init_cache(2, 33)
        assert relative(loaded(x, cache=cache)[0], model(x)[0]) < 1e-10
        assert loaded.step == (4 if given is weights else 10)
    without = mor()
    without.load_state_dict(weights)                # a model that has no warm-up needs no step
    assert torch.equal(without(x)[0], model(x)[0])
    assert "warmup_step" not in older.keys() | without.state_dict().keys()
    trained = loaded.train()
    trained.set_step(6)
    trained(x, x)
    trained.end_step(lambda *numbers: list(numbers))
    assert trained.state_dict()["warmup_step"] == 7


@every_fast
@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("sizes", [dict(kv=kv, **routing) for kv in KV for routing in (
    dict(), dict(causal="aux_router"), dict(router="token"), dict(router="none"))], ids=str)
def test_every_parameter_has_a_gradient(sizes, share, fast):
    """Processes that train together wait for each one's. Of token choice: all tokens choose one
    recursion."""
    if share.endswith("sequence") and sizes["kv"] != "recursion":
        return
    n_layer, x = 8 if share.startswith("middle") else 6, tokens(2, 13)
    model = mor(share=share, fast=fast, n_layer=n_layer, **sizes).train()
    if model.cfg.router == "token":
        model.balance_bias[0] = 10.0
    _, loss, aux = model(x, x)
    loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    assert aux.get("depth1", 1) == 1 or model.cfg.router == "expert"


def test_without_later_recursions_nothing_is_told_of_decisions():
    """And where they have room for all tokens, what would decide is held against that."""
    model, x = mor(n_loop=1, n_layer=3), tokens(2, 33)
    for training in (True, False):
        assert not any("router" in name for name in model.train(training)(x, x)[2])
    assert not any("router" in name for name in model.eval_metrics)
    capped = mor(exit_loop=1)
    assert "router_accuracy" not in capped.eval_metrics and "router_accuracy" not in capped(x, x)[2]
    early = mor(capacity_warmup=10).train()
    aux = early(x, x)[2]
    assert aux["depth3"] == aux["router_majority"] == 1 and 0.05 < aux["router_accuracy"] < 0.95
    assert capped.train().eval_metrics == early.eval_metrics


def test_router_accuracy_and_dead_tokens():
    """Counted over recursions with less room than tokens; the majority is what always saying no (or yes) would get."""
    for sizes in (dict(), dict(causal="aux_router")):
        model, x = mor(**sizes).train(), tokens(2, 33)
        aux, rows = model(x, x)[2], [ByHand(model, True) for _ in x]
        for row, idx in zip(rows, x):
            row.forward(idx.tolist())
        right, yes = ([sum((row.log[name][r] for row in rows), []) for r in (1, 2)] for name in ("right", "yes"))
        assert abs(aux["router_accuracy"] - (sum(right[0]) + sum(right[1])) / 110) < 1e-6
        assert [sum(y) for y in yes] == [44, 22] and [len(y) for y in yes] == [66, 44]
        assert abs(aux["router_majority"] - (44 + 22) / 110) < 1e-6
        assert 0.2 < aux["router_accuracy"] < 0.9
        ever = {t for row in rows for t in row.log["active"][2]}
        assert abs(aux["dead"] - (1 - len(ever) / 33)) < 1e-6 and 0 < aux["dead"] < 1


def test_batches_accumulate():
    """The gradient of four sequences is the mean of each one's, what routers learn from included."""
    model, x = mor(aux_weight=0.5, z_loss=0.1).train(), tokens(4, 34)
    together = gradients(model(x[:, :-1], x[:, 1:])[1], model)
    alone = [gradients(model(row[None, :-1], row[None, 1:])[1], model) for row in x]
    for name, whole, parts in zip(dict(model.named_parameters()), together, zip(*alone)):
        assert rms(whole) > 0 and relative(whole, sum(parts) / 4) < 1e-10, name


@pytest.mark.parametrize("training", [True, False])
def test_entropy_is_that_of_the_average_probabilities(training):
    """How diverse the depths are (Appendix F.2): high where each token is sure but they differ."""
    model, x = mor(router="token").train(training), tokens(2, 33)
    with torch.no_grad():
        model.router.layers.weight.mul_(100)
        rows = [ByHand(model, training) for _ in x]
        for row, idx in zip(rows, x):
            row.forward(idx.tolist())
        p = torch.stack(sum((row.log["p"] for row in rows), []))
    assert p.amax(1).mean() > 0.9
    assert abs(model(x, x)[2]["entropy"] + (p.mean(0) * p.mean(0).log()).sum()) < 1e-6


@pytest.mark.parametrize("router_func", ["softmax", "sigmoid"])
def test_loss_free_balance_moves_biases_by_all_loads(router_func):
    """Of all micro-batches and processes since the last step; evaluations do not count."""
    model = mor(router="token", balance="loss_free", balance_rate=0.01, router_func=router_func).train()
    x, loads = tokens(3, 30), torch.zeros(3)
    for part in (x[:2], x[2:]):
        aux = model(part, part)[2]
        loads += torch.stack([aux[f"depth{d}"] for d in (1, 2, 3)]) * part.numel()
    model.balance_bias[loads.argmin()] = 10.0                   # all of an evaluation's tokens, were they counted
    model.eval()(tokens(5, 30, seed=9))
    model.balance_bias.zero_()
    assert (loads != 30).all() and abs(loads.sum() - 90) < 1e-3
    model.train().end_step(lambda *numbers: list(numbers))
    want = 0.01 * (30 - loads.round()).sign().double()
    assert torch.equal(model.balance_bias, want) and len(want.unique()) == 2
    assert torch.equal(twin(model).balance_bias, model.balance_bias) and "balance_bias" in model.state_dict()
    aux, other = model(x[:1], x[:1])[2], torch.tensor([0.0, 0.0, 90.0])         # other: of another process
    model.end_step(lambda *numbers: [a + b for a, b in zip(numbers, other.tolist())])
    loads = (other + 30 * torch.stack([aux[f"depth{d}"] for d in (1, 2, 3)])).round()       # they began again at 0
    assert relative(model.balance_bias, want + 0.01 * (40 - loads).sign()) < 1e-6


@pytest.mark.parametrize("sizes", [dict(balance="loss"), dict(balance="none"), dict(router="expert"),
                                   dict(router="none")], ids=str)
def test_without_loss_free_no_bias_moves(sizes):
    model, x = mor(**{"router": "token", **sizes}).train(), tokens(2, 33)
    before = {name: w.clone() for name, w in model.state_dict().items()}
    model(x, x)
    model.end_step(lambda *numbers: list(numbers))
    assert all(torch.equal(w, before[name]) for name, w in model.state_dict().items())


# what has a graph of its own; of one a router the backward pass is compiled too, which is slow
COMPILED = [dict(backend="aot_eager"), dict(kv="share", causal="aux_router"),
            dict(kv="share_update", fast=False), dict(router="token", kv="share_update"),
            dict(router="token", balance="loss_free", backend="aot_eager"),
            dict(router="token", kv="share", fast=False)]


@pytest.mark.parametrize("sizes", COMPILED, ids=str)
def test_a_compiled_training_step_is_one_graph(sizes):
    """torch.compile makes it once, without a break, whatever the capacities of a warm-up, its end
    included, and the data are; loss and gradients are those without it."""
    torch._dynamo.reset()
    sizes = dict(sizes)
    counter = CompileCounterWithBackend(sizes.pop("backend", "eager"))
    model = mor(block_size=33, share="cycle", n_layer=3, capacity_warmup=9, **sizes).train()
    step, reached = torch.compile(model, backend=counter, fullgraph=True), set()
    for n in range(12):
        x = tokens(2, 34, seed=n)
        model.set_step(n)
        _, loss, aux = step(x[:, :-1], x[:, 1:])
        if n in (0, 4, 11):
            _, want, log = model(x[:, :-1], x[:, 1:])
            assert relative(loss, want) < 1e-10
            assert all(relative(x, log[name]) < 1e-6 for name, x in aux.items())
            for a, b in zip(gradients(loss, model), gradients(want, model), strict=True):
                assert relative(a, b, 1e-8) < 1e-10
        reached.add(float(aux.get("depth3", 0)))
        model.end_step(lambda *numbers: list(numbers))
    assert counter.frame_count == 1
    assert len(reached) > 4


# ---------------------------------------------------------------------------------------------------------------------
# the random router, a baseline


def test_the_random_router_takes_its_fraction():
    """Recursion r takes (R - r) / R of all tokens, by position in eval mode, else by chance; it learns nothing."""
    model = mor(router_arch="random", pos="none", n_embd=8, n_head=1, n_mlp=8, aux_weight=1.0).float()
    x = tokens(1, 3000)
    assert not any(name.startswith("routers") for name, _ in model.named_parameters())
    with torch.no_grad():
        aux = model(x, x)[2]
        assert all(abs(sum(aux[f"depth{d}"] for d in range(r + 1, 4)) - (3 - r) / 3) < 0.03 for r in range(3))
        x = x[:, :60]
        assert torch.equal(model(x)[0], model(x)[0])
        model.train()
        torch.manual_seed(0)
        (a, loss, aux), b = model(x, x), model(x)[0]
        torch.manual_seed(0)
        assert torch.equal(model(x)[0], a) and not torch.equal(a, b)
        assert [round(60 * aux[f"depth{d}"].item()) for d in (1, 2, 3)] == [20, 20, 20]
        assert loss == aux["ce"] and aux["aux"] > 0


@every_kv
@every_routing
def test_the_random_router_decodes_as_it_computes(router, kv):
    model = mor(router_arch="random", router=router, kv=kv)
    assert_cache_is_forward(model, [30, 11], [12, 1, 17], 1e-10)
    x = tokens(2, 30)
    aux = model(x, x)[2]
    assert sum(aux[f"depth{d}"] > 0 for d in (1, 2, 3)) >= 2


# ---------------------------------------------------------------------------------------------------------------------
# the cache

@pytest.mark.parametrize("sizes", [dict(kv=kv, router=router) for kv in KV for router in ("expert", "token")], ids=str)
def test_the_cache_has_keys_of_those_that_took_a_recursion(sizes):
    """As the equations choose them, each set part of the one before; reset empties these rows alone."""
    model, x = mor(**sizes), tokens(2, 33)
    cache = model.init_cache(2, 33)
    for t in x.split([10, 1, 22], 1):
        model(t, cache=cache)
    for row in range(2):
        by = ByHand(model, False)
        by.forward(x[row].tolist())
        chosen = by.log["active"]
        assert set(chosen[2]) < set(chosen[1]) < set(chosen[0]) and chosen[0] == list(range(33))
        assert [(model.recursions(x)[row] >= r).nonzero()[:, 0].tolist() for r in (1, 2, 3)] == chosen
        assert [c.lengths[row] for c in cache.later] == [len(c) for c in chosen[1:]] * (sizes["kv"] != "share")
        for c, at in zip(cache.later, chosen[1:]):
            assert c.took[row].nonzero()[:, 0].tolist() == at
            assert (c.k[0][row, :, :len(at)] != 0).all() and (c.k[0][row, :, len(at):-1] == 0).all()
    cache.reset([1])
    for c in cache.later:
        assert c.lengths[0] > 0 and c.lengths[1] == 0 and c.took[0].any() and not c.took[1].any()
        assert not c.k[0][1].any() and not c.v[0][1].any()


@pytest.mark.parametrize("R, n_layer", [(2, 8), (3, 8), (3, 32), (4, 34)])
@every_routing
def test_bytes_of_a_cache(R, n_layer, router):
    """Of the plain Transformer of the same depth, at configured capacities: (R + 1) / (2 R) and 1 / R of the recursive
    layers; what the model reports is what its buffers hold."""
    for share in ("cycle", "middle_cycle"):
        N = n_layer if share == "middle_cycle" else n_layer - 2
        sizes = dict(n_layer=N, n_embd=8, n_head=2, n_kv_head=1)
        plain = tiny("gpt", **sizes).init_cache(3, 12 * R).nbytes()
        assert plain == 8 * 2 * N * 3 * 12 * R * 4
        for kv, part in (("recursion", (R + 1) / (2 * R)), ("share_update", (R + 1) / (2 * R)), ("share", 1 / R)):
            got = mor(share=share, kv=kv, n_loop=R, router=router, **sizes).init_cache(3, 12 * R).nbytes() / plain
            assert abs(got - (part if share == "cycle" else (2 + (N - 2) * part) / N)) < 1e-12
            if (N, R) == (32, 3):
                assert round(got, 3) == (0.375 if kv == "share" else 0.688)
        every = mor(share=share, n_loop=R, router="none", **sizes)
        assert every.init_cache(3, 12 * R).nbytes() == plain


def eager(**sizes):
    """A model whose routers send every token through all recursions: the states' first number is large."""
    model = mor(**sizes)
    with torch.no_grad():
        model.wte.weight[:, 0] += 20
        for name, p in model.named_parameters():
            if "router" in name:
                p.zero_()
                p[-1, 0] = 1.0                  # of expert choice the score, of token choice that of all recursions
    return model


@every_fast
@every_routing
@every_kv
def test_a_list_grows_where_tokens_choose_more_than_planned(kv, router, fast):
    model, x = eager(kv=kv, router=router, fast=fast), tokens(3, 30)
    with torch.no_grad():
        assert model(x, x)[2]["depth3"] == 1
        cache = model.init_cache(3, 30)
        before = cache.nbytes()
        model(x, cache=cache)
    grown = 1.0 if kv == "share" else 5 / (2 + 3 * 4 / 6)
    assert abs(cache.nbytes() / before - grown) < 1e-12
    assert_cache_is_forward(model, [30, 7, 19], [1] * 12 + [10, 1, 7], 1e-10)


# ---------------------------------------------------------------------------------------------------------------------
# packed tokens, each at its own recursion

class Sequences:
    """The context that serve.py gives, in lists: tokens of rows row at positions at, each at its level. kv holds
    {(row, level, layer): {position: (k, v)}}."""

    def __init__(self, cfg, kv, row, level, at):
        self.cfg, self.kv, self.row, self.level, self.at = cfg, kv, row, level, torch.tensor(at)

    def attend(self, layer, q, k, v):
        turned = lambda x: x[0] if self.cfg.pos == "none" else rotate(
            x[0].transpose(0, 1), self.at, self.cfg.rope_theta).transpose(0, 1)
        q, out = turned(q), torch.zeros_like(q[0])                                      # (H, N, D)
        own = lambda n, level: self.kv.setdefault((self.row[n], level, layer), {})
        for n, (level, at) in enumerate(zip(self.level, self.at.tolist())):
            if level in (0, 1, self.cfg.n_loop + 1) or self.cfg.kv != "share":
                own(n, level)[at] = turned(k)[:, n], v[0, :, n]
        for n, (level, at) in enumerate(zip(self.level, self.at.tolist())):
            seen, inner = own(n, level), 1 < level <= self.cfg.n_loop
            if inner and self.cfg.kv != "recursion":
                seen = {**own(n, 1), **(seen if self.cfg.kv == "share_update" else {})}
            keys, values = (torch.stack(x).repeat_interleave(len(q) // self.cfg.n_kv_head, 1)
                            for x in zip(*(seen[t] for t in sorted(seen) if t <= at)))     # (S, H, D)
            e = ((keys * q[:, n]).sum(-1) / math.sqrt(q.size(-1))).exp()                # (S, H)
            out[:, n] = (e[..., None] * values).sum(0) / e.sum(0)[:, None]
        return out[None]


HOOKED = [*(dict(kv=kv, router=router) for kv in KV for router in ("expert", "token", "none")),
          dict(share="cycle", kv="share_update", n_kv_head=2), dict(causal="aux_router", exit_loop=2),
          dict(router_arch="random", kv="share", qk_norm=True), dict(router_arch="random", router="token", pos="none"),
          dict(share="sequence"), dict(router="token", share="middle_sequence", n_layer=8)]


@torch.no_grad()
@pytest.mark.parametrize("sizes", HOOKED, ids=str)
def test_packed_tokens_at_different_recursions_are_as_in_the_forward(sizes):
    """Logits and depths. Rows have one or several new tokens and enter one step after another, so that every call of
    loop has tokens at different recursions (share=*sequence: each row alone); a token that leaves is finished at once,
    while the other tokens of its row go on."""
    model, x, kv = mor(**sizes), tokens(5, 12), {}
    want, depths = model(x)[0], model.recursions(x)
    R, alone = model.n_loop, model.cfg.share.endswith("sequence")
    waiting = [(row, [t]) for t in (9, 10, 11) for row in range(5)]
    waiting = [(row, list(range(9))) for row in range(5)] + waiting
    work, left, mixed = {}, {}, False                  # work {row: [positions, depth, states]}
    while waiting or work:
        ready = [n for n, (row, _) in enumerate(waiting) if row not in work]
        if ready and not (alone and work):
            row, at = waiting.pop(ready[0])
            context = Sequences(model.cfg, kv, [row] * len(at), [0] * len(at), at)
            work[row] = [at, 0, model.embed(x[row, at], context)]
        row, at, depth = zip(*((row, t, d) for row, (at, d, _) in work.items() for t in at))
        mixed |= len(set(depth)) > 1
        context = Sequences(model.cfg, kv, row, [d + 1 for d in depth], at)
        state = model.loop(torch.cat([h for *_, h in work.values()]), torch.tensor(depth), context)
        on = torch.tensor([d + 1 < R for d in depth])
        on[on.clone()] &= model.takes(state[on], torch.tensor(depth)[on] + 1)
        for n in (~on).nonzero()[:, 0].tolist():
            end = Sequences(model.cfg, kv, [row[n]], [model.cfg.n_loop + 1], [at[n]])
            left.setdefault((row[n], at[n]), (depth[n] + 1, state[n:n + 1], end))
        done = [r for r in work if not any(on[n] for n in range(len(row)) if row[n] == r)]
        for r in work:
            mine = [n for n in range(len(row)) if row[n] == r and on[n]]
            work[r] = [[at[n] for n in mine], work[r][1] + 1, state[mine]]
        for r in done:                                  # the last layer, in the order of positions
            del work[r]
            for t in sorted(t for row, t in left if row == r and (row, t) not in kv.get("out", {})):
                exit, h, end = left[r, t]
                kv.setdefault("out", {})[r, t] = model.logits(model.finish(h, end))[0]
                assert exit == depths[r, t]
    assert len(kv["out"]) == 60 and (mixed or alone)
    assert all(relative(logits, want[place]) < 1e-10 for place, logits in kv["out"].items())


# ---------------------------------------------------------------------------------------------------------------------
# conversion

def source(**sizes):
    """A plain model all of whose layers differ, norms too."""
    return test_relaxed.source(**{"n_layer": 8, **sizes})


def converted(gpt, **sizes):
    same = {k: v for k, v in asdict(gpt.cfg).items() if k in model_mor.Config.__dataclass_fields__}
    torch.manual_seed(7)
    model = model_mor.Model(model_mor.Config(**{**same, **sizes})).double().eval()
    fresh = {name: w.clone() for name, w in model.state_dict().items()}
    model_mor.convert(model, gpt.state_dict())
    return model, fresh


# (share, layers, recursions, init): the source's layers that each stored block is the mean of
ORIGINS = {("middle_cycle", 8, 3, "average"): [[1, 3, 5], [2, 4, 6]], ("middle_cycle", 8, 3, "stepwise"): [[1], [6]],
           ("middle_cycle", 8, 3, "lower"): [[1], [2]], ("middle_cycle", 8, 3, "upper"): [[5], [6]],
           ("middle_sequence", 8, 3, "average"): [[1, 2, 3], [4, 5, 6]],
           ("middle_sequence", 8, 3, "stepwise"): [[1], [6]],
           ("middle_cycle", 8, 2, "stepwise"): [[1], [4], [6]],
           ("middle_cycle", 8, 2, "average"): [[1, 4], [2, 5], [3, 6]],
           ("middle_sequence", 12, 2, "stepwise"): [[1], [3], [6], [8], [10]],
           ("middle_cycle", 14, 4, "stepwise"): [[1], [6], [12]],
           ("cycle", 8, 2, "stepwise"): [[0], [2], [5], [7]],
           ("cycle", 6, 2, "stepwise"): [[0], [2], [5]],
           ("cycle", 6, 3, "average"): [[0, 2, 4], [1, 3, 5]],
           ("cycle", 6, 3, "stepwise"): [[0], [5]], ("cycle", 6, 3, "lower"): [[0], [1]],
           ("cycle", 6, 3, "upper"): [[4], [5]], ("sequence", 6, 2, "average"): [[0, 1], [2, 3], [4, 5]],
           ("cycle", 3, 3, "stepwise"): [[0]], ("cycle", 3, 3, "upper"): [[2]], ("cycle", 3, 3, "average"): [[0, 1, 2]],
           ("middle_cycle", 5, 3, "random"): [[]], ("cycle", 6, 3, "random"): [[], []]}


@pytest.mark.parametrize("share, n_layer, n_loop, init", ORIGINS)
def test_where_stored_blocks_come_from(share, n_layer, n_loop, init):
    gpt = source(n_layer=n_layer, n_kv_head=2, qk_norm=True, tie_embeddings=False)
    w = gpt.state_dict()
    model, fresh = converted(gpt, share=share, n_loop=n_loop, init=init)
    for k, (block, layers) in enumerate(zip(model.blocks, ORIGINS[share, n_layer, n_loop, init], strict=True)):
        for name, p in block.named_parameters():
            tied = torch.stack([w[f"blocks.{n}.{name}"] for n in layers]).mean(0) if layers else None
            assert relative(p, fresh[f"blocks.{k}.{name}"] if tied is None else tied) < 1e-14, name
    for edge, layer in ((model.first, 0), (model.last, n_layer - 1)):
        assert len(edge) == share.startswith("middle")
        for block in edge:
            assert all(torch.equal(p, w[f"blocks.{layer}.{name}"]) for name, p in block.named_parameters())
    assert all(torch.equal(model.get_parameter(name), w[name]) for name in ("wte.weight", "norm.weight", "head.weight"))
    assert all(torch.equal(p, fresh[name]) for name, p in model.named_parameters() if "router" in name)
    assert not storages(model.state_dict()).keys() & storages(w).keys()


def test_in_one_loop_the_source_comes_back():
    for share in ("cycle", "middle_cycle"):
        gpt, x = source(), tokens(2, 30)
        model, _ = converted(gpt, share=share, n_loop=1, router="none")
        assert relative(model(x)[0], gpt(x)[0]) < 1e-12


# ---------------------------------------------------------------------------------------------------------------------
# settings


@every_fast
@pytest.mark.parametrize("T", [1, 20])
@pytest.mark.parametrize("n_kv_head", [2, 4])
def test_attention_weights_are_dropped_too(n_kv_head, T, fast):
    """Where nothing else is: of one token as of many."""
    model, x = mor(n_kv_head=n_kv_head, dropout=0.5, fast=fast).train(), tokens(2, T)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    assert relative(model(x)[0], model(x)[0]) > 1e-3 and torch.equal(model.eval()(x)[0], model(x)[0])


@every_fast
@every_kv
@pytest.mark.parametrize("sizes", [dict(), dict(causal="aux_router", router_arch="mlp"), dict(router="token"),
                                   dict(router="token", router_func="sigmoid", router_arch="wide_mlp"),
                                   dict(router_arch="random")], ids=str)
def test_routers_keep_full_precision(sizes, kv, fast):
    """Under bfloat16 autocast, and with bfloat16 weights: scores are float32, gradients finite."""
    model, x, found = mor(kv=kv, fast=fast, **sizes).float(), tokens(2, 30), []
    routers = [m for m in model.modules() if isinstance(m, model_mor.Router)]
    for m in routers:
        m.register_forward_hook(lambda module, args, out: found.append((module, args[0], out)))
    with torch.autocast("cpu", torch.bfloat16):
        for training in (True, False):
            logits, loss, _ = model.train(training)(x[:, :-1], x[:, 1:])
            assert logits.dtype == torch.float32
            assert all(torch.isfinite(g).all() for g in gradients(loss, model))
        with torch.no_grad():
            model(x, cache=model.init_cache(2, 30))
    assert {module for module, *_ in found} == set(routers)
    for module, h, out in found:
        assert out.dtype == torch.float32
        if module.layers is not None:
            assert relative(out, module.layers(h.float())) < 1e-6
    with torch.no_grad():
        assert model.bfloat16()(x)[0].dtype == torch.float32 and found[-1][2].dtype == torch.float32


@pytest.mark.parametrize("sizes, fit", [
    (dict(n_layer=7), "n_layer=7 does not fit share=middle_cycle with n_loop=3: 5 or 8 would"),
    (dict(n_layer=2), "n_layer=2 does not fit share=middle_cycle with n_loop=3: 5 or 8 would"),
    (dict(n_layer=30), "29 or 32 would"), (dict(n_layer=10, n_loop=4, share="cycle"), "8 or 12 would"),
    (dict(n_layer=1, n_loop=2, share="sequence"), "2 or 4 would"),
    (dict(n_layer=9, n_loop=2, share="middle_sequence"), "n_layer=9 does not fit share=middle_sequence with n_loop=2: "
                                                          "8 or 10 would")], ids=str)
def test_layers_that_do_not_fit_are_told_which_would(sizes, fit):
    with pytest.raises(ValueError, match=fit):
        model_mor.Config(**sizes)
    for n_layer in map(int, fit.split(": ")[-1].removesuffix(" would").split(" or ")):
        assert model_mor.Config(**{**sizes, "n_layer": n_layer}).n_layer == n_layer


@pytest.mark.parametrize("bad, named", [
    (dict(n_loop=0), "n_loop=0"), (dict(share="cycle_rev"), "share=cycle_rev"), (dict(router="both"), "router=both"),
    (dict(kv="all"), "kv=all"), (dict(router_arch="deep"), "router_arch=deep"),
    (dict(router_func="relu"), "router_func=relu"),
    (dict(router_func="softmax"), "router_func=softmax must be one of: sigmoid, tanh"),
    (dict(router="token", router_func="tanh"), "router_func=tanh must be one of: softmax, sigmoid"),
    (dict(causal="none"), "causal=none"), (dict(balance="both"), "balance=both"), (dict(init="first"), "init=first"),
    (dict(aux_weight=-0.1), "aux_weight=-0.1"), (dict(capacity_warmup=-1), "capacity_warmup=-1"),
    (dict(balance_weight=-1.0), "balance_weight"), (dict(balance_rate=-1.0), "balance_rate"),
    (dict(z_loss=-1e-5), "z_loss"), (dict(exit_loop=4), "exit_loop=4"), (dict(exit_loop=-1), "exit_loop=-1"),
    (dict(share="sequence", n_layer=6, kv="share"), "kv=share needs recursions over the same layers"),
    (dict(share="middle_sequence", kv="share_update"), "kv=share_update needs recursions over the same layers"),
    (dict(pos="alibi"), "pos=alibi"), (dict(mlp="relu"), "mlp=relu"), (dict(n_kv_head=3), "n_kv_head=3"),
    (dict(n_embd=12), "even head size"), (dict(norm_eps=0.0), "norm_eps"), (dict(rope_theta=-1.0), "rope_theta"),
    (dict(dropout=1.0), "dropout"), (dict(n_mlp=-1), "n_mlp=-1"), (dict(n_layer=0), "n_layer=0")], ids=str)
def test_impossible_settings_are_named(bad, named):
    with pytest.raises(ValueError, match=named):
        model_mor.Config(**{"n_layer": 5, "n_embd": 32, **bad})



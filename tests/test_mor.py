"""model_mor routes as its equations, which are written here once more, token by token. The tests also look at what runs
and is kept, at decoding, at conversion, and at training runs."""
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

import model_gpt
import model_mor
from conftest import relative, tiny
from test_models import rms, tokens


def mor(**sizes):
    """Return the tiny float64 model of conftest with 3 recursions. It has 5 layers, or 6 where no layer stands outside
    the recursions."""
    return tiny("mor", **{"n_layer": 5 if sizes.get("share", "middle").startswith("middle") else 6, **sizes})


class Chosen(model_gpt.Context):
    """The context of tokens at positions at (n,), which attend to each other, or to all tokens by their kept keys and
    values."""

    def __init__(self, cfg, x, at, kept=None):
        super().__init__(cfg, x, at[None], torch.arange(kept[0].size(2)) if kept else at, in_order=False)
        self.kept = kept

    def extend(self, layer, k, v):
        self.kept = self.kept or (k, v)
        return self.kept


class Routed:
    """Computes the equations of one sequence once more, with the model's own blocks. States x (n, C) are
    those of the tokens at positions at (n,), in order. Other tokens do not exist. If top_k is true, expert choice takes
    the best k tokens, as in training."""

    def __init__(self, model, top_k=False):
        self.model, self.cfg, self.top_k, self.edge = model, model.cfg, top_k, len(model.first)
        self.K = (self.cfg.n_layer - 2 * self.edge) // self.cfg.n_loop
        self.loops = not model.training and self.cfg.exit_loop or self.cfg.n_loop
        self.log, self.first = {name: [] for name in ("bce", "z", "p", "active", "right")}, []

    def block(self, layer):
        """Return the block that stands for unrolled layer `layer`, which counts from 0, by Table 5."""
        if self.edge and layer in (0, self.cfg.n_layer - 1):
            return (self.model.last if layer else self.model.first)[0]
        at, sequence = layer - self.edge, self.cfg.share.endswith("sequence")
        return self.model.blocks[at // self.cfg.n_loop if sequence else at % self.K]

    def layers(self, x, which, at, r=0):
        """Return x after the unrolled layers `which`, those of recursion r. self.first gets the keys and values of all
        tokens in each layer of recursion 1."""
        for i, layer in enumerate(which if len(at) else ()):
            kept = self.first[i] if r > 1 and self.cfg.kv != "recursion" else None
            context = Chosen(self.cfg, x, at, kept)
            x = self.block(layer)(x[None], layer, context)[0]
            self.first += [context.kept] * (r == 1)
        return x

    def recursion(self, x, r, at):
        """Return F_r of x, where r counts from 1."""
        return self.layers(x, range(self.edge + (r - 1) * self.K, self.edge + r * self.K), at, r)

    def scores(self, h, router):
        w = [p.T for p in router.parameters()]
        return h @ w[0] if self.cfg.router_arch == "linear" else F.gelu(h @ w[0]) @ w[1]

    def forward(self, idx):
        """Return the logits (T, V) of the sequence idx (T,). self.log then has what the router did."""
        at = torch.arange(len(idx))
        x = self.layers(self.model.wte(idx), [0] * self.edge, at)
        x = {"expert": self.expert, "token": self.by_token, "none": self.all_take_all}[self.cfg.router](x, at)
        return self.model.head(self.model.norm(self.layers(x, [self.cfg.n_layer - 1] * self.edge, at)))

    def expert(self, x, active):
        cfg, T, R, log = self.cfg, len(x), self.cfg.n_loop, self.log
        for r in range(1, self.loops + 1):
            s = by = self.scores(x[active], self.model.routers[r - 1])[:, 0]
            if cfg.causal == "aux_router":
                by = self.scores(x[active].detach(), self.model.aux_routers[r - 1])[:, 0]
            taken = by >= 0 if r > 1 else torch.ones_like(by, dtype=torch.bool)
            if self.top_k:
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
        scores = self.scores(h, self.model.router)
        p = scores.softmax(1) if cfg.router_func == "softmax" else cfg.alpha * scores.sigmoid()
        depth, x = ((p + self.model.balance_bias).argmax(1) + 1).clamp(max=self.loops), h
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


def by_hand(model, x, top_k):
    """Return (logits, loss, what to log) of inputs and targets x (B, T + 1)."""
    cfg, rows, R, (B, T) = model.cfg, [Routed(model, top_k) for _ in x], model.cfg.n_loop, x[:, 1:].shape
    logits = torch.stack([row.forward(idx[:-1]) for row, idx in zip(rows, x)])
    loss, logs = F.cross_entropy(logits.flatten(0, 1), x[:, 1:].flatten()), [row.log for row in rows]
    log = {"ce": loss.detach()}
    if cfg.router == "none":
        return logits, loss, log
    reached = [sum(map(len, chosen)) for chosen in zip(*(row["active"] for row in logs))] + [0] * R
    log |= {f"depth{d}": (reached[d - 1] - reached[d]) / B / T for d in range(1, R + 1)}
    z = sum(sum(row["z"]) for row in logs) / B
    if cfg.router == "expert" and not top_k:
        log["ce_topk"] = by_hand(model, x, True)[2]["ce"]
    elif cfg.router == "expert":
        bce, right = sum(sum(row["bce"]) for row in logs) / B, [x for row in logs for x in row["right"][1:]]
        log |= {"aux": bce.detach(), "router_accuracy": torch.cat(right).double().mean() if right else 1}
        loss = loss + cfg.aux_weight * bce + cfg.z_loss * z
    if cfg.router == "token":
        p, f = torch.stack([row["p"] for row in logs]).flatten(0, 1), [R * log[f"depth{d}"] for d in range(1, R + 1)]
        balance, mean = sum(share * P for share, P in zip(f, p.mean(0))), (p / p.sum(1, keepdim=True)).mean(0).detach()
        log |= {"balance": balance.detach(), "maxvio": max(f) - 1, "entropy": -(mean * mean.log()).sum()}
        if model.training:
            loss = loss + cfg.z_loss * z + cfg.balance_weight * balance * (cfg.balance == "loss")
    return logits, loss, log


EXPERT = [dict(), dict(kv="share", router_func="tanh", alpha=0.3, n_kv_head=2, qk_norm=True), dict(exit_loop=2),
          dict(share="sequence", router_arch="mlp", causal="aux_router"), dict(n_loop=1, n_layer=3),
          dict(router_arch="wide_mlp", mlp="gelu", n_loop=2, n_layer=6, z_loss=0.02, kv="share", pos="none"),
          dict(share="cycle", kv="share", causal="aux_router", tie_embeddings=False)]
TOKEN = [dict(), dict(kv="share", z_loss=0.02, router_func="sigmoid"), dict(share="sequence", balance="loss_free"),
         dict(share="middle_sequence", n_layer=8, router_arch="wide_mlp", router_func="sigmoid", alpha=1.0),
         dict(kv="share", share="cycle", n_loop=2, balance="none", n_kv_head=2, qk_norm=True), dict(exit_loop=2)]
NONE = [dict(kv="share", n_layer=8), dict(share="sequence"), dict(exit_loop=2)]
ROUTED = [dict(router=name, **sizes) for name, all in (("expert", EXPERT), ("token", TOKEN), ("none", NONE))
          for sizes in all]


@pytest.mark.parametrize("training, T", [(True, 1), (True, 13), (False, 13)])
@pytest.mark.parametrize("sizes", ROUTED, ids=str)
def test_routing_is_its_equations(sizes, training, T):
    """In training the best k tokens take a recursion. In eval mode scores decide token by token. Fast and naive code
    have these logits, loss and logged numbers, and in training all gradients. Each parameter has a gradient, because
    DDP waits for it."""
    model, x = mor(aux_weight=0.3, balance_weight=0.3, **sizes).train(training), tokens(2, T + 1)
    if sizes["router"] == "token":
        model.balance_bias += 0.02 * torch.randn(model.cfg.n_loop)
    gradients = lambda loss, model, **more: torch.autograd.grad(loss, list(model.parameters()), **more)
    with torch.set_grad_enabled(training):
        logits, loss, log = by_hand(model, x, top_k=training)
    want = gradients(loss, model, materialize_grads=True) if training else []
    # a softmax over one key passes only rounding to q and k
    floor = (1e-5 if T > 1 else 1e-3) * max(map(rms, want), default=0)
    for fast in (True, False):
        same = model_mor.Model(replace(model.cfg, fast=fast)).double().train(training)
        same.load_state_dict(model.state_dict())
        our_logits, our_loss, ours = same(x[:, :-1], x[:, 1:])
        assert relative(our_logits, logits) < 1e-10 and relative(our_loss, loss) < 1e-10
        for name in log:
            exact = name in ("ce", "ce_topk", "aux", "balance")     # the others are fractions, in float32
            assert abs(ours[name].item() - float(log[name])) < (1e-10 if exact else 1e-6), name
        if training:
            for (name, _), a, b in zip(same.named_parameters(), gradients(our_loss, same), want, strict=True):
                assert relative(a, b, floor) < 1e-10, name
                assert T == 1 or rms(b) > floor, f"{name}: nothing is compared"


@pytest.mark.parametrize("loops", [3, 2])
@pytest.mark.parametrize("sizes", [
    dict(n_kv_head=2, tie_embeddings=False, router_arch="mlp"), dict(kv="share", causal="aux_router"),
    dict(router="none", kv="share")], ids=str)
def test_only_chosen_tokens_run_and_flops_are_theirs(sizes, loops, monkeypatch):
    """Attention is written out here so that it is counted. It takes all keys that a query is given. The model counts
    the visible keys, for chosen tokens that are spread evenly."""
    given, T, C, attend = [], 24, 32, model_gpt.attend

    def counted(q, k, v, bias, fast, dropout):
        given.append(q.size(2) * k.size(2))
        return attend(q, k, v, bias, False)
    monkeypatch.setattr(model_gpt, "attend", counted)
    model, x = mor(block_size=T, pos="none", **sizes).train(), tokens(1, T)
    model.training_loops = loops
    with FlopCounterMode(display=False) as counter:
        model(x, x)[1].backward()
    cfg, R = model.cfg, model.cfg.n_loop
    taken = [T if cfg.router == "none" else T * (R - r) // R for r in range(loops)]
    counts = taken * cfg.n_stored + [T] * cfg.n_outside
    narrow = cfg.kv == "recursion"
    assert sorted(given) == sorted(n * (n if narrow else T) for n in counts)
    visible = sum(n * ((n if narrow else T) + 1) / 2 for n in counts)
    found = counter.get_total_flops() - 12 * C * (sum(given) - visible)
    if cfg.causal == "aux_router":                  # their input is detached, so that there is no gradient for it
        found += 2 * C * T * loops
    assert found == pytest.approx(T * model.flops_per_token(), rel=1e-12)


def test_loss_free_balance_moves_biases():
    """Biases move against the fractions of tokens. Equal fractions move nothing, however they were rounded."""
    model = mor(router="token", balance="loss_free", balance_rate=0.01)
    model.end_step({"depth1": 0.5, "depth2": 0.2, "depth3": 1 / 3 + 1e-7})
    assert torch.equal(model.balance_bias, torch.tensor([-0.01, 0.01, 0.0], dtype=torch.float64))


@pytest.mark.parametrize("router", ["expert", "token"])
def test_a_cache_has_room_for_as_many_tokens_as_are_expected(router):
    """The cache grows to hold all tokens where more of them take a recursion."""
    model = mor(router=router)
    cache = model.init_cache(3, 30)
    assert [later.max_len for later in cache.later] == [20, 10]
    assert cache.nbytes() == 2 * 3 * 32 * 8 * (3 * 30 + 20 + 10)    # keys and values, rows, width, bytes, and tokens
    assert len(mor(router=router, exit_loop=2).init_cache(2, 33).later) == 1
    with torch.no_grad():       # all tokens take all recursions
        model.wte.weight[:, 0] += 20
        for p in [p for name, p in model.named_parameters() if "router" in name]:
            p.zero_()[-1, 0] = 1.0
    model(tokens(3, 30), cache=cache)
    assert [later.max_len for later in cache.later] == [30, 30]


@pytest.mark.parametrize("sizes", [dict(), dict(kv="share"), dict(router="token")], ids=str)
def test_a_decoding_step_runs_the_rows_that_go_on(sizes):
    """All rows run where more than two thirds go on, because copying their keys would not pay. All rows also run in
    static calls."""
    model, x, B, ran = mor(**sizes), tokens(6, 30), 6, []
    depth = model.states(x, top_k=False)[1]
    model.blocks[0].register_forward_pre_hook(lambda block, args: ran.append(args[0].shape[:2]))
    for static in False, True:
        cache, found = model.init_cache(B, 30), set()
        model(x[:, :5], cache=cache)
        if static:
            cache.begin_static()
        for t in range(5, 30):
            ran.clear()
            model(x[:, t:t + 1], cache=cache)
            go_on = [int((depth[:, t] >= r).sum()) for r in (2, 3)]
            want = [B] + [n if n <= 4 else B for n in go_on if n]
            assert ran == [(n, 1) for n in ([B] * 3 if static else want)]
            found |= {*want}
        assert len(found) > 3, "rows are all that go on, or none"


# {(share, layers, recursions, init, the source's layers): the layers of which each stored block is the mean}
ORIGINS = {("middle_cycle", 8, 3, "average", 8): [[1, 3, 5], [2, 4, 6]], ("middle_cycle", 8, 3, "upper", 8): [[5], [6]],
           ("middle_cycle", 8, 3, "lower", 15): [[2], [4]], ("middle_sequence", 8, 3, "average", 8): [[1, 2, 3], [4, 5, 6]],
           ("middle_sequence", 12, 2, "stepwise", 12): [[1], [3], [6], [8], [10]],
           ("middle_cycle", 14, 4, "stepwise", 14): [[1], [6], [12]], ("cycle", 8, 2, "stepwise", 8): [[0], [2], [5], [7]],
           ("cycle", 3, 3, "stepwise", 3): [[0]]}


@pytest.mark.parametrize("share, n_layer, n_loop, init, depth", ORIGINS)
def test_where_stored_blocks_come_from(share, n_layer, n_loop, init, depth):
    """If the source has another depth, the blocks come from layers that are evenly spaced. If the model has 8 and the
    source has 15, they are 0, 2, .. 14."""
    same = dict(n_kv_head=2, qk_norm=True, tie_embeddings=False)
    model = mor(share=share, n_layer=n_layer, n_loop=n_loop, init=init, **same)
    model_mor.convert(model, w := tiny("gpt", n_layer=depth, **same).state_dict())
    assert all(torch.equal(model.state_dict()[name], p) for name, p in w.items() if not name.startswith("blocks."))
    ends = [*[[0]] * len(model.first), *[[depth - 1]] * len(model.last)]
    for block, layers in zip([*model.blocks, *model.first, *model.last],
                             [*ORIGINS[share, n_layer, n_loop, init, depth], *ends], strict=True):
        for name, p in block.named_parameters():
            assert relative(p, torch.stack([w[f"blocks.{n}.{name}"] for n in layers]).mean(0)) < 1e-14, name


@pytest.mark.parametrize("arch", ["linear", "mlp"])
def test_routers_keep_full_precision(arch):
    """Scores are float32 under bfloat16 autocast and with bfloat16 weights."""
    router, h = model_mor.Router(model_mor.Config(router_arch=arch), 3), torch.randn(5, 128)
    want = router(h)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(router(h), want)
    assert router.bfloat16()(h.bfloat16()).dtype == torch.float32

"""
Mixture-of-Recursions (MoR): a router decides how often each token goes through tied layers.

There are R = n_loop recursions F_1 .. F_R, of K layers each, which share K stored blocks. Routers,
by default linear functions of a token's state h, send easy tokens through few recursions and hard
ones through many. A first and a last layer stand outside, and all tokens take them (share=cycle and
share=sequence have none). In this picture R is 3, and token a takes three recursions, b two and c
one:

    first -> F_1 (all) -> F_2 (2/3) -> F_3 (1/3) -> last
      a         a            a            a           a
      b         b            b            .           b
      c         c            .            .           c

router=expert (expert choice, Section 2.2.1): a recursion chooses its tokens. A sequence has T
tokens. A_r are those of its tokens that take recursion r, and A_0 are all T. Each recursion has a
router, by default a vector w_r. It gives a score s to each token of A_{r-1}, and A_r are the k_r
tokens with the highest scores. Because k_1 = T, A_1 are all tokens, too. So the scores of recursion
1 choose nothing. They are only factors in (2.1) below.

    s = w_r . h
    k_r = max(1, floor(T (R - r + 1) / R))
    h[A_r] <- h[A_r] + alpha sigmoid(s) F_r(h[A_r])            (2.1)

F_r has residual connections of its own, so that F_r(h) = h + .. contains h. In (2.1) h therefore
has the factor 1 + alpha sigmoid(s). router_func=tanh puts tanh in the place of the sigmoid.

Training looks ahead, because a token's place among the top k depends on the scores of later tokens.
Decoding may not look ahead. There all tokens take recursion 1, and a token of A_{r-1} takes
recursion r >= 2 iff s >= 0. (causal=aux_router has another score there, see below.) In eval mode
"ce" is the loss with the choices of decoding, and "ce_topk" is the loss with those of training.

An auxiliary loss teaches s to be positive where top k chooses. It is the binary cross-entropy of s
against whether the token was chosen, as a mean over A_{r-1}, summed over r:

    loss = ce + aux_weight sum_r mean(BCE(s, chosen))

As in the authors' code, the sum includes r = 1, where all tokens are chosen. If causal=aux_router,
each recursion has a second router, and this loss trains the second router alone. It reads detached
states, and its scores decide in decoding. The first router then learns only because s is a factor
in (2.1), and by a z-loss, if there is one (z_loss).

router=token (token choice, Section 2.2.1): a token has the state h_1 before F_1. From h_1 it
chooses once how many recursions it takes. This number is its depth i. W is the router's matrix,
with a row for each depth (router_arch has others):

    p = softmax(W h_1),   i = argmax p
    h <- h_1 + p_i F_i(.. F_1(h_1))                            (2.2)

With router_func=sigmoid, p = alpha sigmoid(W h_1).

A loss keeps the depths in balance, where f_i is the fraction of tokens with depth i:

    loss = ce + balance_weight R sum_i f_i mean(p_i)

If balance=loss_free, a bias b does this instead: i = argmax(p + b), and each step of training moves
b_i by balance_rate, down where f_i > 1 / R and up where f_i < 1 / R.

With either router a z-loss may be added, which keeps the scores small. In expert choice it is
summed over r, where logsumexp of a token's single score is this score:

    z_loss mean(logsumexp(scores)^2)

Keys and values (Section 2.2.2). If kv=recursion, a token attends to the tokens that take the same
recursion. If kv=share, a token attends to all tokens, by their keys and values in F_1. In both
cases these are earlier tokens and the token itself.

This file differs from the paper or from the authors' code:
- Gate. In token choice p enters once, as in their code. In the paper it enters at every step.
- z-loss. In token choice its weight is 1e-5, as in their code. The paper has 1e-3.
- Attention is tied, as in the paper. In their code it was not before commit 82c97f2.
- Weights start as model_gpt's. Dropout is on embeddings, attention weights and residual branches.
- kv=share. Here F_2 .. F_R make keys and values that nobody reads, which takes little
  time and changes no result.
- Left out are random routers and the capacity warm-up, which is off in their code. Left out is also
  their third kind of keys and values: in a later recursion, the tokens that take it have new ones,
  and all others have those of F_1.
- loop_warmup is not theirs. While training runs r < R recursions, those have the k_1 .. k_r that
  they have later, and evaluation runs all R. Token choice has no warm-up, because its depths could
  not be in balance.

Letters beside those of model_gpt.py: K is the number of stored blocks, n the number of tokens that
run in each row, and m the number of rows that run. n is usually the number of chosen tokens of the
fullest row. Recursions count from 1, layers and stored blocks from 0. h_1 is the state before F_1.
(In model_relaxed.py h_1 is the state after the first layer.)

Paper: Bae et al. 2025 (2507.10524). Their code: github.com/raymin0223/mixture_of_recursions.
"""
import math
from dataclasses import dataclass, replace

import torch
import torch.nn as nn
import torch.nn.functional as F

from decoding import Cached, KVCache
from model_gpt import (Block, BlockConfig, Context, LanguageModel, attention_bias, check_call,
                       choice, cross_entropy, init_weights, upcast, visible_keys)


@dataclass
class Config(BlockConfig):
    n_layer: int = 8             # unrolled layers, first and last too
    n_loop: int = 3              # R: recursions
    # For K = 2 and R = 3, cycle is the blocks 0 1 0 1 0 1, and sequence is 0 0 0 1 1 1. middle_ has
    # a first and a last layer around them, which are not shared.
    share: str = choice("middle_cycle", "cycle", "sequence", "middle_sequence")  # blocks (Table 5)
    router: str = choice("expert", "token", "none")  # none: all take all, the baseline
    kv: str = choice("recursion", "share")  # keys: each recursion's own, or F_1's for all
    router_arch: str = choice("linear", "mlp", "wide_mlp")
    router_func: str = ""        # expert: sigmoid or tanh; token: softmax or sigmoid ("": first)
    alpha: float = 0.1           # factor of sigmoid and tanh; softmax has none
    causal: str = choice("aux_loss", "aux_router")  # expert: what decides in decoding
    aux_weight: float = 0.001    # expert: weight of the auxiliary loss
    balance: str = choice("loss", "loss_free", "none")  # token: what balances depths
    balance_weight: float = 0.1  # token: weight of the balance loss
    balance_rate: float = 0.001  # token: how far loss_free moves a bias in a step
    z_loss: float = -1.0         # weight of the z-loss (-1: token 1e-5, expert 0)
    exit_loop: int = 0           # most recursions in evaluation and decoding (0: n_loop)
    loop_warmup: float = 0.0     # fraction of training's steps over which recursions rise from 1
    # which trained layers convert starts from (Table 9). random draws trained layers at random. (In
    # model_relaxed.py random stands for random weights.)
    init: str = choice("average", "stepwise", "lower", "upper", "random")
    pos: str = choice("rope", "none")

    # CONVERTS_FROM names the models whose weights convert reads. NOT_IN_WEIGHTS are options that
    # may change when a run is resumed, or when init_from= names another run of this model.
    CONVERTS_FROM = ("gpt",)
    NOT_IN_WEIGHTS = ("exit_loop", "loop_warmup", "aux_weight", "balance_weight", "balance_rate",
                      "z_loss")

    def __post_init__(self):
        super().__post_init__()
        # These two defaults are written into their fields. So dataclasses.replace keeps them, and a
        # replace of router must set them, too.
        token = self.router == "token"
        self.router_func = self.router_func or ("softmax" if token else "sigmoid")
        if self.z_loss == -1:
            self.z_loss = 1e-5 if token else 0.0
        self.n_outside = 2 if self.share.startswith("middle") else 0  # the first and the last layer
        check(self)
        K = self.n_stored = (self.n_layer - self.n_outside) // self.n_loop
        # order[layer] is the stored block of an inner layer (a layer of F_1 .. F_R), see Model
        cycle = self.share.endswith("cycle")
        self.order = [i % K if cycle else i // self.n_loop for i in range(self.n_loop * K)]


# ---- the method: which tokens take which recursion ----

class Model(LanguageModel):
    """The language model. A block is called as block(h, layer, context), where layer is the number
    of the unrolled layer. For K = 2 and R = 3 these are the layers, the blocks that they use (0 and
    1 of model.blocks), and the places of their keys in a cache, if kv=recursion:

                                 first |   F_1  |   F_2  |   F_3  | last
        layer                     -2   |  0  1  |  2  3  |  4  5  |  -1
        block, middle_cycle     first[0]  0  1     0  1     0  1    last[0]
        block, middle_sequence  first[0]  0  0     0  1     1  1    last[0]
        cache.k                   -2      0  1                      -1
        cache.later[0].k                           0  1
        cache.later[1].k                                    0  1

    The first layer has the number -2 and the last layer -1, because their keys are the last two
    entries of cache.k. layer % K is the number of a layer in its recursion. There is no first and
    no last layer with share=cycle and share=sequence. With router=none and kv=recursion, cache.k
    has the layers 0 .. 5, and cache.later is empty, because all tokens take all recursions. With
    kv=share only F_1 has keys in the cache, because later recursions read these.

    The contexts stand below the model. context.subset(r, chosen) is the context of recursion r, and
    its `kept` marks the tokens that take r. A block reads rope, bias and extend of a context, and
    `recursion` reads kept (and calls gather and scatter of a GatheredSubset). So MaskedSubset and
    GatheredSubset need not be subclasses of Context."""
    runs_blocks_once = False

    def __init__(self, cfg):
        R, n_each_end = cfg.n_loop, cfg.n_outside // 2
        blocks = lambda n: nn.ModuleList(self.make_block(cfg, i) for i in range(n))
        super().__init__(cfg, blocks(cfg.n_stored))     # the shared blocks
        self.first, self.last = blocks(n_each_end), blocks(n_each_end)
        self.training_loops = R     # train.py sets it in each step, by loop_warmup
        depths = [f"depth{d}" for d in range(1, R + 1)]
        if cfg.router == "expert":
            self.routers = nn.ModuleList(Router(cfg, 1) for _ in range(R))
            if cfg.causal == "aux_router":
                self.aux_routers = nn.ModuleList(Router(cfg, 1) for _ in range(R))
            self.eval_metrics = ["ce_topk", "router_accuracy", *depths]    # beside "ce"
        elif cfg.router == "token":
            self.router = Router(cfg, R)
            self.register_buffer("balance_bias", torch.zeros(R))
            self.eval_metrics = [*depths, "maxvio"]
        self.cached_context_type = CachedTokens     # here, because it stands below this class
        init_weights(self, cfg.n_layer)

    def make_block(self, cfg, number):
        """Return a shared, first or last block, for a fork to override. `number` counts each of the
        three kinds from 0."""
        return Block(cfg)

    def states(self, idx, top_k, context=None):
        """Return the states of idx (B, T) after the final norm, (B, T, C), the number of recursions
        that each token took, (B, T), and the arguments of expert_loss or token_loss (None with
        router=none). top_k says that expert choice decides as in training, and not as in decoding.
        A plain pass (None) makes its own context, as in LanguageModel.hidden."""
        cfg, h = self.cfg, self.drop(self.wte(idx))
        n_run = self.training_loops if self.training and context is None else self.loops_to_run
        context = context or AllTokens(cfg, h)
        for block in self.first:
            h = block(h, -2, context)
        if cfg.router == "expert":
            h, depth, decisions = self.expert_choice(h, context, n_run, top_k)
        elif cfg.router == "token":
            h, depth, decisions = self.token_choice(h, context, n_run)
        else:
            depth, decisions = context.kept * n_run, None
            for r in range(1, n_run + 1):
                h = self.recursion(r, h, context.subset(r, context.kept))
        for block in self.last:
            h = block(h, -1, context)
        return self.norm(h), depth, decisions

    def expert_choice(self, h, context, n_run, top_k):
        """Return h (B, T, C) after n_run recursions, depths (B, T), and what expert_loss takes.
        context is that of all tokens, and context.subset returns the context of a recursion. s are
        the scores. `decides` are the scores whose sign decides in decoding. With causal=aux_router
        they are those of the second router, and otherwise they are s. active are A_{r-1}, the
        tokens that compete, and chosen are A_r."""
        T, R = h.size(1), self.cfg.n_loop
        active, decisions = context.kept, []                        # A_0: (B, T)
        for r in range(1, n_run + 1):
            s = decides = self.routers[r - 1](h)[..., 0]            # w_r . h: (B, T)
            if self.cfg.causal == "aux_router":
                decides = self.aux_routers[r - 1](h.detach())[..., 0]
            k_r = max(1, T * (R - r + 1) // R) if top_k else None
            if r == 1:
                chosen = active                                     # A_1
            elif top_k:
                top = s.masked_fill(~active, -math.inf).topk(k_r, 1).indices
                chosen = torch.zeros_like(active).scatter(1, top, True)       # A_r
            else:
                chosen = active & (decides >= 0)                    # A_r in decoding
            h = self.recursion(r, h, context.subset(r, chosen, k_r), s)
            decisions.append((s, decides, active, chosen))
            active = chosen
        s, decides, active, chosen = map(torch.stack, zip(*decisions))      # (n_run, B, T) each
        return h, chosen.sum(0), (s, decides, active, chosen)

    def token_choice(self, h1, context, n_run):
        """Return h after n_run recursions at most, from h_1 (B, T, C), depths (B, T), and what
        token_loss takes."""
        scores, p, depth = self.choose_depth(h1, n_run)
        h = h1
        for r in range(1, n_run + 1):
            h = self.recursion(r, h, context.subset(r, context.kept & (depth >= r)))
        return self.add_gated(h1, h, p, depth), depth, (scores, p, depth)

    def choose_depth(self, h1, n_run):
        """Return the scores and p of h_1 (..., C), (..., R) each, and depths (...) from 1 to n_run.
        A token that chose a greater depth stops at n_run, and (2.2) takes the p of depth n_run for
        it."""
        scores = self.router(h1)
        p = self.gate(scores)
        depth = 1 + (p + self.balance_bias).argmax(-1)                     # i: (...)
        return scores, p, depth.clamp(max=n_run)

    def add_gated(self, h1, h, p, depth):
        """Return the states after token choice, h_1 + p_i h, where i is the depth."""
        return h1 + (p.gather(-1, depth[..., None] - 1) * h).to(h1.dtype)    # (2.2)

    def recursion(self, r, h, context, s=None):
        """Return h (B, T, C) after recursion r. The tokens that context.kept marks take it. Their
        new states are F_r(h) or, given scores s (B, T), h + alpha sigmoid(s) F_r(h). The states of
        all others stay as they are. In a GatheredSubset only the gathered tokens run, which are
        the kept ones and those that fill rows up. In any other context all tokens run, and the
        results of those that are not kept are dropped. The context is None where no token goes
        on."""
        if context is None:
            return h
        K, gathered = self.cfg.n_stored, isinstance(context, GatheredSubset)
        x = context.gather(h) if gathered else h
        s = context.gather(s) if gathered and s is not None else s
        new = x
        for layer in range((r - 1) * K, r * K):
            new = self.blocks[self.cfg.order[layer]](new, layer, context)       # F_r(x)
        if s is not None:
            new = x + (self.gate(s)[..., None] * new).to(x.dtype)               # (2.1)
        new = torch.where(context.kept[..., None], new, x)
        return context.scatter(h, new) if gathered else new

    def gate(self, s):
        """Return softmax(s), alpha sigmoid(s) or alpha tanh(s), as router_func says."""
        if self.cfg.router_func == "softmax":
            return s.softmax(-1)
        return self.cfg.alpha * getattr(torch, self.cfg.router_func)(s)

    # ---- the loss ----

    def forward(self, idx, targets=None, cache=None, n_valid=None):
        """Return what every model returns. If there are targets, a router and no cache, the dict
        also has depth1 .. depthR, of which depth2 is the fraction of tokens that took two
        recursions, and it has what the router's loss logs. In eval mode with router=expert it also
        has "ce_topk". In training the router's loss is added to ce."""
        cfg = self.cfg
        if targets is None or cfg.router == "none" or cache is not None:
            return super().forward(idx, targets, cache, n_valid)
        check_call(idx, cache, n_valid)
        h, depth, decisions = self.states(idx, top_k=self.training)
        logits = upcast(self.head(h))
        ce = cross_entropy(logits, targets)
        f = torch.stack([(depth == d).float().mean() for d in range(1, cfg.n_loop + 1)])
        aux = {"ce": ce, **{f"depth{d}": fraction for d, fraction in enumerate(f, 1)}}
        if cfg.router == "expert" and not self.training:
            # expert_loss compares scores with the choices of top k. So these decisions replace
            # those of the first pass, and depth stays as it was in the first pass.
            h_top, _, decisions = self.states(idx, top_k=True)
            aux["ce_topk"] = cross_entropy(upcast(self.head(h_top)), targets)
        router_loss = self.expert_loss if cfg.router == "expert" else self.token_loss
        added, more = router_loss(*decisions)
        loss = ce + added if self.training else ce
        return logits, loss, {name: x.detach() for name, x in {**aux, **more}.items()}

    def expert_loss(self, s, decides, active, chosen):
        """Return what is added to the loss, and what is logged. The arguments are
        (n_run, B, T), for the recursions that ran: the scores, the scores that decide in decoding,
        which tokens competed (A_{r-1}), and which of them were chosen (A_r). The binary
        cross-entropy, which is logged as "aux", and the z-loss are means over the tokens that
        competed, summed over recursions. router_accuracy says how often decoding would decide as
        top k did, without r = 1, which all tokens take. It is 1 if no other recursion ran."""
        mean = lambda x: (x * active).sum((1, 2)) / active.sum((1, 2))     # (n_run,)
        bce = F.binary_cross_entropy_with_logits(decides, chosen.to(s), reduction="none")
        bce, z = mean(bce).sum(), mean(s ** 2).sum()     # logsumexp over one score is the score
        decides, active, chosen = decides[1:], active[1:], chosen[1:]      # r = 2 .. n_run
        wrong = active & ((decides >= 0) != chosen)
        accuracy = 1 - wrong.sum() / active.sum().clamp(min=1)
        added = self.cfg.aux_weight * bce + self.cfg.z_loss * z
        return added, {"aux": bce, "router_accuracy": accuracy}

    def token_loss(self, scores, p, depth):
        """Return what is added to the loss, and what is logged: the balance loss, maxvio, which is
        (most - mean) / mean of the numbers of tokens at the depths, and the entropy of mean(p)."""
        cfg, R = self.cfg, self.cfg.n_loop
        f = F.one_hot(depth - 1, R).to(p).mean((0, 1))          # (R,)
        balance = R * (f * p.mean((0, 1))).sum()
        weight = cfg.balance_weight if cfg.balance == "loss" else 0.0
        z = scores.logsumexp(-1).square().mean()
        p = F.normalize(p, 1, -1).mean((0, 1))      # so that sigmoids sum to 1, too
        return weight * balance + cfg.z_loss * z, {
            "balance": balance, "maxvio": R * f.max() - 1,
            "entropy": torch.special.entr(p).sum()}

    # ---- what train.py and decoding use ----

    def hidden(self, idx, context=None):
        return self.states(idx, top_k=self.training and context is None, context=context)[0]

    @property
    def loops_to_run(self):
        """Return how many recursions a token takes at most in evaluation and decoding."""
        return self.cfg.exit_loop or self.cfg.n_loop

    def init_cache(self, batch_size, max_len):
        return Cache(self.cfg, self.loops_to_run, *self.cache_sizes(batch_size, max_len))

    @torch.no_grad()
    def end_step(self, logged):
        """If balance=loss_free, move the bias of a depth down where more than 1 / R of the tokens
        have this depth, and up where fewer have it. train.py calls this after each step.
        logged has f as depth1 .. depthR, over the tokens of all processes."""
        cfg = self.cfg
        if cfg.router == "token" and cfg.balance == "loss_free":
            f = torch.tensor([logged[f"depth{d}"] for d in range(1, cfg.n_loop + 1)])
            excess = (f - 1 / cfg.n_loop).round(decimals=6)  # 0 where only rounding differs
            self.balance_bias -= cfg.balance_rate * excess.sign().to(self.balance_bias)

    def flops_per_token(self):
        """Return FLOPs as model_gpt does, but a layer counts for the fraction of tokens that take
        it, and only the recursions that a training pass runs now are counted. The count of token
        choice takes the depths to be in balance. A compiled pass of token choice runs all tokens in
        all recursions (see GatheredSubset), which is not counted."""
        cfg, attn, n_run = self.cfg, self.blocks[0].attn, self.training_loops
        routers = sum(p.numel() for name, p in self.named_parameters() if "router" in name)
        flops = 6.0 * (self.head.weight.numel() + routers * n_run / cfg.n_loop)
        weights, unread = self.block_weights() / cfg.n_stored, 0
        if cfg.kv == "share":  # wk and wv of F_2 .. F_R have no backward pass, 4 of 6 FLOPs
            unread = 2 / 3 * (attn.wk.weight.numel() + attn.wv.weight.numel())
        for r in range(1, n_run + 1):
            # the first and the last layer count with F_1, because all tokens take them
            n_layer = cfg.n_stored + (cfg.n_outside if r == 1 else 0)
            read = weights - (unread if r > 1 else 0)
            fraction = 1.0 if cfg.router == "none" else (cfg.n_loop - r + 1) / cfg.n_loop
            keys = cfg.block_size * (fraction if cfg.kv == "recursion" else 1)
            mixer = 12.0 * cfg.n_head * cfg.head_size * visible_keys(keys)
            flops += n_layer * fraction * (6.0 * read + mixer)
        return flops


# ---- routers, and which tokens a recursion runs on ----

class Router(nn.Module):
    """A linear function, or an MLP, that makes scores (..., n_out) of states h (..., C)."""

    def __init__(self, cfg, n_out):
        super().__init__()
        C, linear = cfg.n_embd, lambda n, m: nn.Linear(n, m, bias=False)
        if cfg.router_arch == "linear":
            self.layers = linear(C, n_out)
        else:
            hidden = 2 * C if cfg.router_arch == "mlp" else 4 * C
            self.layers = nn.Sequential(linear(C, hidden), nn.GELU(), linear(hidden, n_out))

    def forward(self, h):
        # autocast is off, because rounding to 16 bits could change decisions
        with torch.autocast(h.device.type, enabled=False):
            return upcast(self.layers(h))


class AllTokens(Context):
    """The context of F_1 and of the layers outside, which all tokens take, and of all recursions
    with router=none and kv=recursion. kept (B, T) marks the tokens whose states a recursion
    changes, which are all tokens here and the chosen ones in the contexts of later recursions.
    shared_kv[layer] are the keys and values of a layer that has run. They are read only if
    kv=share, where later recursions read those of F_1."""

    def __init__(self, cfg, x, *positions):
        super().__init__(cfg, x, *positions)
        self.cfg, self.shared_kv = cfg, {}
        self.kept = torch.ones(x.shape[:2], device=x.device, dtype=torch.bool)

    def extend(self, layer, k, v):
        kv = self.shared_kv[layer] = super().extend(layer, k, v)
        return kv

    def subset(self, r, chosen, n=None):
        """Return the context of recursion r for the chosen tokens (B, T). n is how many of them the
        fullest row has, if that is known. The context is one of these:

                                     plain pass                        call with a cache
                                     fast=false       fast=true        (whatever fast is)
            r = 1                    self             self             self
            router=none
                kv=recursion         self             self             self
                kv=share             MaskedSubset     MaskedSubset     MaskedSubset
            router=expert, token
                kv=recursion         MaskedSubset     GatheredSubset   CachedSubset, None
                kv=share             MaskedSubset     GatheredSubset   GatheredSubset, None

            self             all tokens run, and all of them have keys in each layer
            MaskedSubset     all tokens run, and the results of the chosen ones are kept
            GatheredSubset   the chosen tokens run alone
            CachedSubset     the chosen tokens run alone, and the recursion has a cache of its own
            None             no token was chosen (a static call does not know that)"""
        if r == 1 or self.cfg.router == "none" and self.cfg.kv == "recursion":
            return self
        if self.cfg.router == "none" or not self.cfg.fast:
            return MaskedSubset(self, chosen)
        return GatheredSubset(self, chosen, n)


class MaskedSubset:
    """The context of a later recursion in which all tokens run and the results of the chosen ones
    (B, T) are kept. If kv=recursion, only the chosen ones are visible to others."""

    def __init__(self, all_tokens, chosen):
        self.cfg, self.all_tokens, self.kept = all_tokens.cfg, all_tokens, chosen   # A_r
        self.rope, self.bias = all_tokens.rope, all_tokens.bias
        if self.cfg.kv == "recursion":
            distance = all_tokens.pos[:, :, None] - all_tokens.pos[:, None]     # (1, T, T)
            # A token that was not chosen attends to itself, so that each softmax has a key.
            visible = (distance > 0) & chosen[:, None] | (distance == 0)
            self.bias = torch.where(visible, 0.0, -math.inf)[:, None]       # (B, 1, T, T)

    def extend(self, layer, k, v):
        """Return the keys and values that the chosen attend to (Section 2.2.2), (B, G, S, D) each.
        k, v (B, G, T, D) are their own."""
        if self.cfg.kv == "recursion":
            return k, v
        return self.all_tokens.shared_kv[layer % self.cfg.n_stored]     # those of F_1


# ---- the fast path ----

class GatheredSubset:
    """The context of a later recursion in which the chosen tokens run alone, packed to the left.
    Packed tokens keep their order and their positions, so that the results for the chosen ones are
    those of a MaskedSubset. A row with fewer than n chosen tokens is filled up with others, whose
    results are dropped. In this example there are two rows, x marks the chosen tokens, and n = 3:

        tokens  0 1 2 3    chosen  . x . x    index  1 3 0
                4 5 6 7            x x x .           4 5 6

    index (B, n) counts through the B T = 8 tokens of all rows.

    A call with a cache may also leave rows out. rows (m,) are then those in which a token was
    chosen, and index is (m, n), so that a decoding step (T = 1) runs m rows of one token (m, 1, C).
    If rows is None, all B rows run. That is so in a plain pass, in a static call, whose shapes may
    not depend on data, and where most rows go on (see CachedTokens.subset)."""

    def __init__(self, all_tokens, chosen, n=None, rows=None):
        self.cfg, self.all_tokens, self.rows = all_tokens.cfg, all_tokens, rows
        (B, T), device = chosen.shape, chosen.device
        if n is None:
            # If T = 1, n can only be 1. In a compiled call no size may depend on data, so that all
            # tokens run.
            all_run = T == 1 or torch.compiler.is_compiling()
            n = T if all_run else max(1, int(chosen.sum(1).max()))
        column = torch.arange(T, device=device)
        row = torch.arange(B, device=device) if rows is None else rows              # (m,)
        # A column c gets the number c if its token is chosen, and otherwise T + c. The n columns
        # with the smallest numbers are the chosen ones, in order. If a row has fewer than n of
        # these, the leftmost other columns follow.
        columns = torch.where(chosen[row], column, T + column).topk(n, 1, largest=False).indices
        self.index = T * row[:, None] + columns                                     # (m, n)
        self.kept = self.gather(chosen)
        self.rope = all_tokens.rope and [self.gather(x[:, 0].expand(B, T, -1))[:, None]
                                         for x in all_tokens.rope]          # (m, 1, n, D / 2)
        self.bias = None  # The causal mask also hides the tokens that fill a row up, on its right.
        if self.cfg.kv == "share":
            self.bias = attention_bias(self.gather(all_tokens.pos.expand(B, T)), all_tokens.k_pos)

    def extend(self, layer, k, v):
        """Return the keys and values that the chosen attend to, (m, G, S, D) each. k, v
        (m, G, n, D) are their own."""
        if self.cfg.kv == "recursion":
            return k, v
        return [self.select(x) for x in self.all_tokens.shared_kv[layer % self.cfg.n_stored]]

    def select(self, x):
        """Return the rows of x (B, ...) that run, (m, ...)."""
        return x if self.rows is None else x.index_select(0, self.rows)

    def gather(self, x):
        """Return the tokens of x (B, T, ...) that run, (m, n, ...)."""
        flat = x.flatten(0, 1).index_select(0, self.index.flatten())
        return flat.unflatten(0, self.index.shape)

    def scatter(self, x, new):
        """Return x (B, T, ...) with new (m, n, ...) in the places where gather reads."""
        flat = x.flatten(0, 1).index_copy(0, self.index.flatten(), new.flatten(0, 1))
        return flat.view(x.shape)


# ---- decoding ----

class CachedTokens(Cached, AllTokens):
    """AllTokens of a call with a cache. Padding is not kept."""

    def __init__(self, cfg, cache, T, n_valid=None):
        super().__init__(cfg, cache, T, n_valid)
        self.kept = torch.arange(T, device=self.pos.device) < self.slots.n_new[:, None]

    def extend(self, layer, k, v):
        kv = self.shared_kv[layer] = self.cache.write(layer, k, v, self.slots)
        return kv

    def subset(self, r, chosen, n=None):
        """See AllTokens. Rows in which no token was chosen are left out if they are a third of all
        rows or more. To leave rows out, the keys of the others must be copied, which takes about as
        long as attending to them. So leaving out fewer rows gains little or nothing."""
        if r == 1 or self.cfg.router == "none":
            return super().subset(r, chosen)
        if not self.cache.static and not chosen.any():
            return None
        rows, some = None, chosen.any(1)
        if not self.cache.static and 3 * some.sum() <= 2 * len(some):
            rows = some.nonzero()[:, 0]     # (m,)
        if self.cfg.kv == "share":
            return GatheredSubset(self, chosen, rows=rows)
        return CachedSubset(self, chosen, rows, self.cache.later[r - 2])


class CachedSubset(GatheredSubset):
    """GatheredSubset of a call with a cache, if kv=recursion. The recursion has a cache of its own,
    in which the chosen tokens of a row follow, without gaps, the ones that were chosen before."""

    def __init__(self, all_tokens, chosen, rows, cache):
        super().__init__(all_tokens, chosen, rows=rows)
        self.cache, slots = cache, cache.place(self.index.size(1), chosen.sum(1))
        # `slots` is for all rows. In self.slots, pos, at and rows are for the rows that run. n_new
        # is still for all rows, because advance needs it.
        pos, at, its_rows = map(self.select, (slots.pos, slots.at, slots.rows))
        self.slots = replace(slots, pos=pos, at=at, rows=its_rows)
        # pos holds numbers of slots here. Slots are in the order of positions, so that the causal
        # mask may compare them.
        self.bias = attention_bias(pos, torch.arange(slots.end, device=pos.device))

    def extend(self, layer, k, v):
        kv = self.cache.write(layer % self.cfg.n_stored, k, v, self.slots)
        return [self.select(x) for x in kv]

    def scatter(self, x, new):
        """See GatheredSubset. All layers of the recursion have written when this is called, so
        that its cache counts the new tokens here."""
        self.cache.advance(self.slots)
        return super().scatter(x, new)


class GrowingCache(KVCache):
    """A KVCache that starts with room for max_len tokens a row and gets room for `most` when that
    is not enough, or when static calls begin, because their buffers keep their size."""

    def __init__(self, most, *sizes):
        super().__init__(*sizes)
        self.most = most

    def check_room(self, T, n_new):
        """Make room where KVCache would raise. (The cache of all tokens has raised before if `most`
        is not enough.)"""
        if int((self.lengths + n_new).max()) > self.max_len:
            self.grow()

    def begin_static(self):
        super().begin_static()
        self.grow()

    def grow(self):
        if self.max_len < self.most:
            more = 0, 0, 0, self.most + 1 - self.max_len
            with torch.inference_mode(False):   # see KVCache
                # The last slot is that of padding. The old last slot is dropped with its contents.
                for buffers in (self.k, self.v):
                    buffers[:] = [F.pad(x[:, :, :-1], more) for x in buffers]
            self.max_len = self.most


class Cache(KVCache):
    """The keys and values of all tokens in the layers that all tokens take. With a router and
    kv=recursion, `later` has a cache for each later recursion. This is what they hold for tokens a,
    b and c of the picture at the top:

                              slots 0 1 2
        k, v (first, F_1, last)     a b c
        later[0] (F_2)              a b        starts with room for k_2 = 2, as many as expected
        later[1] (F_3)              a          starts with room for k_3 = 1

    A token has keys only where it recurses, which is the paper's gain in memory: a cache of
    configs/mor_tiny.yaml begins with 6,136 bytes a token (in float32, with max_len=256) where keys
    in all recursions would take 8,192. The gain of a recursion is lost when one row needs more than
    k_r slots, and in decoding by static calls, because GrowingCache then has room for all tokens.

    (The engine of serve.py has gaps in its caches. Its make_cache says why.)"""

    def __init__(self, cfg, n_run, batch_size, max_len, *device_and_dtype):
        R, K, in_k, later = cfg.n_loop, cfg.n_stored, 1, ()     # kv=share: keys of F_1 alone
        if cfg.kv == "recursion" and cfg.router == "none":
            in_k = n_run                    # all recursions have their keys in cache.k
        elif cfg.kv == "recursion":
            later = range(2, n_run + 1)     # the recursions with a cache of their own
        super().__init__(cfg, batch_size, max_len, *device_and_dtype, K * in_k + cfg.n_outside)
        sizes = [max(1, max_len * (R - r + 1) // R) for r in later]            # k_r
        self.later = [GrowingCache(max_len, cfg, batch_size, size, *device_and_dtype, K)
                      for size in sizes]

    def buffers(self):
        return super().buffers() + [x for cache in self.later for x in cache.buffers()]

    def reset(self, rows=None):
        super().reset(rows)
        for cache in self.later:
            cache.reset(rows)

    def begin_static(self):
        super().begin_static()
        for cache in self.later:
            cache.begin_static()

    def end_static(self, T, ragged):
        super().end_static(T, ragged)
        for cache in self.later:
            cache.end_static(T, True)


# ---- conversion ----

@torch.no_grad()
def convert(model, weights):
    """Start model from `weights`, the state dict of a model_gpt of the same sizes. The trained
    model may have another number of layers. Then its layers are read at even spaces, and some of
    them are read several times if it has fewer."""
    cfg = model.cfg
    layers = layers_for_stored(cfg) + [[0], [cfg.n_layer - 1]]
    rest = {name: w for name, w in weights.items() if not name.startswith("blocks.")}
    model.load_state_dict(rest, strict=False)
    n_source = len({name.split(".")[1] for name in weights.keys() - rest.keys()})
    source = lambda layer: round(layer * (n_source - 1) / max(1, cfg.n_layer - 1))
    # zip drops the layers of the first and the last block where the model has none
    for block, own in zip([*model.blocks, *model.first, *model.last], layers):
        for name, p in block.named_parameters():
            p.copy_(sum(weights[f"blocks.{source(layer)}.{name}"] for layer in own) / len(own))


def layers_for_stored(cfg):
    """Return, for each stored block, the unrolled layers whose mean it starts from (Table 9).
    Layers count from 0 to n_layer - 1 here, the first and the last one included."""
    K, n_each_end = cfg.n_stored, cfg.n_outside // 2
    inner = range(n_each_end, cfg.n_layer - n_each_end)
    if cfg.init == "average":  # all layers that the block stands for
        return [[layer for layer, k in zip(inner, cfg.order) if k == stored]
                for stored in range(K)]
    gap = (len(inner) - 1) / max(1, K - 1)
    one = {"stepwise": [round(inner[0] + k * gap) for k in range(K)],
           "lower": inner[:K], "upper": inner[-K:],
           "random": [inner[i] for i in torch.randperm(len(inner))[:K]]}
    return [[layer] for layer in one[cfg.init]]


# ---- what a Config must be ----

def check(cfg):
    """Raise ValueError, naming the field, where a value is impossible."""
    R = cfg.n_loop
    functions = ("softmax", "sigmoid") if cfg.router == "token" else ("sigmoid", "tanh")
    if cfg.router_func not in functions:
        raise ValueError(f"router_func={cfg.router_func} must be one of: {', '.join(functions)}")
    cfg.at_least(0, "aux_weight", "balance_weight", "balance_rate", "z_loss", "exit_loop")
    cfg.at_least(1, "n_loop")
    if not 0 <= cfg.loop_warmup <= (0 if cfg.router == "token" else 1):
        raise ValueError(f"loop_warmup={cfg.loop_warmup} must be from 0 to 1, and 0 with "
                         "router=token")
    if cfg.exit_loop > R:
        raise ValueError(f"exit_loop={cfg.exit_loop} is more than n_loop={R}")
    n_stored, left = divmod(cfg.n_layer - cfg.n_outside, R)
    if n_stored < 1 or left:
        fits = max(1, n_stored) * R + cfg.n_outside
        raise ValueError(f"n_layer={cfg.n_layer} does not fit share={cfg.share} "
                         f"with n_loop={R}: {fits} or {fits + R} would")
    if cfg.kv == "share" and not cfg.share.endswith("cycle"):
        raise ValueError("kv=share needs the same layers in all recursions: share=cycle "
                         f"or middle_cycle, not {cfg.share}")

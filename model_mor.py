"""
Mixture-of-Recursions (MoR): tied layers run in loops, and each token takes as many as it needs.

N = n_layer unrolled layers share the weights of K blocks over R = n_loop recursions; F_r is the
r-th pass through them, residuals included. A router (a linear map of the state) sends easy tokens
through few recursions and hard ones through many. With share=middle_* the first and the last layer
have weights of their own, and all tokens take them.

    level 0     level 1      level 2      level 3      level R + 1
    first   ->  F_1 (all) -> F_2 (2/3) -> F_3 (1/3) -> last
      a           a            a            a            a        R = 3: token c took one recursion,
      b           b            b            .            b        b two, a three; each level has
      c           c            .            .            c        keys of its own

router=expert (Section 2.2.1): each recursion chooses its tokens. A_0 = all tokens; for r = 1 .. R

    s = w_r . h[A_{r-1}]                             a score for each token that is still there
    A_r = the k_r tokens of A_{r-1} with highest s,          k_r = floor(T (R - r + 1) / R)
    h[A_r] <- h[A_r] + alpha sigmoid(s) F_r(h[A_r])                                (Eq. 2.1)

The top k depend on later tokens, so decoding decides by s >= 0 among those that took r - 1.
Training teaches this to s: the loss has aux_weight BCE(s, was it chosen). With causal=aux_router a
second router on detached states learns it. In eval mode "ce" is that of decoding, "ce_topk" that
of top k.

router=token: each token chooses its depth, which is causal. p = softmax(W h_1), i = argmax p, and
it leaves as h_1 + p_i F_i(.. F_1(h_1)) (Eq. 2.2). The depths are kept in balance by a loss,
balance_weight R sum_i (fraction of tokens with depth i) mean(p_i), or by balance=loss_free: a bias
b in argmax(p + b) that moves against the load. router=none: all tokens take all recursions.

Keys and values (Section 2.2.2). kv=recursion: tokens attend to those that take the same recursion.
share: to all, by their keys in the first. share_update: the same, but tokens that take this
recursion have new keys in it.

`fast=false` runs all tokens and masks out those not chosen. `fast=true` gathers the chosen ones,
runs them alone, and scatters them back; so does decoding, on either path.

Departures from the paper and its code: token choice gates once (Eq. 2.2: at every step; the code:
as here); its z-loss has the weight of the code's configuration, 1e-5 (Table 11: 1e-3); attention
is tied as all else is (the code unties it with expert choice); the auxiliary loss is a plain mean;
dead positions are those of all rows of an evaluation (Table 10: of 500).

Paper: Bae et al. 2025, "Mixture-of-Recursions: Learning Dynamic Recursive Depths for Adaptive
Token-Level Computation" (2507.10524); code at github.com/raymin0223/mixture_of_recursions.

Shapes: B batch, T new tokens, S keys, C width, G key/value heads, D head size; A rows with a chosen
token, n most chosen tokens of a row; N packed tokens. In the code recursions count from 0.
"""
import math
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F

import model_gpt
from model_gpt import (MLP, BaseConfig, Context, KVCache, LanguageModel, RMSNorm, apply_rope,
                       attention_bias, choice, compute_dtype, init_weights, mlp_width)


@dataclass
class Config(BaseConfig):
    n_layer: int = 8             # N: unrolled layers, the first and last of share=middle_* included
    n_loop: int = 3              # R: recursions
    share: str = choice("middle_cycle", "cycle", "sequence", "middle_sequence")     # see stored
    router: str = choice("expert", "token", "none")     # recursions choose tokens | tokens a depth
    kv: str = choice("recursion", "share", "share_update")      # keys that a recursion attends to
    router_arch: str = choice("linear", "mlp", "wide_mlp", "random")    # random: a baseline
    router_func: str = ""        # expert: sigmoid | tanh; token: softmax | sigmoid ("": the first)
    alpha: float = 0.1           # factor of the gate, but for softmax
    causal: str = choice("aux_loss", "aux_router")      # expert: what decides in decoding
    aux_weight: float = 0.001    # expert: weight of learning that
    capacity_warmup: int = 0     # expert: steps in which capacities fall from 1 (0: none)
    balance: str = choice("loss", "loss_free", "none")  # token: what keeps depths in balance
    balance_weight: float = 0.1  # token: weight of the balancing loss
    balance_rate: float = 0.001  # token: how far loss_free moves a bias each step
    z_loss: float = -1.0         # weight of mean(logsumexp(s)^2) (-1: token 1e-5, expert 0)
    exit_loop: int = 0           # in eval mode no token takes more recursions (0: n_loop)
    init: str = choice("average", "stepwise", "lower", "upper", "random")   # blocks from a source
    n_mlp: int = 0               # hidden width of the MLP (0: 8/3 n_embd for swiglu, 4 for gelu)
    mlp: str = choice("swiglu", "gelu")
    pos: str = choice("rope", "none")
    rope_theta: float = 10000.0  # RoPE's base
    qk_norm: bool = False        # RMSNorm with a weight on each head's query and key, before RoPE
    tie_embeddings: bool = True  # the head is the embedding matrix
    paper_flops: bool = False    # max_flops counts as the paper: the forward, no head, no routers
    norm_eps: float = 1e-5       # RMSNorm's epsilon

    CONVERTS_FROM = ("gpt",)     # models whose weights init_from converts
    RESUME_OVERRIDES = ("paper_flops",)     # keys that resuming may change, beside fast
    FINETUNE_OVERRIDES = ("exit_loop", "aux_weight", "capacity_warmup", "balance_weight",
                          "balance_rate", "z_loss")     # keys that finetuning may change

    def __post_init__(self):
        super().__post_init__()
        token = self.router == "token"
        functions = ("softmax", "sigmoid") if token else ("sigmoid", "tanh")
        func = self.router_func = self.router_func or functions[0]
        if func not in functions:
            raise ValueError(f"router_func={func} must be one of: {', '.join(functions)}")
        if self.z_loss == -1:
            self.z_loss = 1e-5 if token else 0.0
        self.at_least(0, "n_mlp", "aux_weight", "capacity_warmup", "balance_weight",
                      "balance_rate", "z_loss")
        self.at_least(1, "n_loop")
        if not 0 <= self.exit_loop <= self.n_loop:
            raise ValueError(f"exit_loop={self.exit_loop} must be 0 (all) or one of the "
                             f"{self.n_loop} recursions")
        inner, R = self.n_layer - 2 * self.edge, self.n_loop
        if inner < 1 or inner % R:
            below = max(1, inner // R) * R + 2 * self.edge
            raise ValueError(f"n_layer={self.n_layer} does not fit share={self.share} with "
                             f"n_loop={R}: {below} or {below + R} would")
        if self.kv != "recursion" and self.share.endswith("sequence"):
            raise ValueError(f"kv={self.kv} needs recursions over the same layers: share=cycle or "
                             f"middle_cycle, not {self.share}")
        self.n_mlp = self.n_mlp or mlp_width(self)

    @property
    def edge(self):
        """Layers with weights of their own at each end: 1 or 0."""
        return int(self.share.startswith("middle"))

    @property
    def n_stored(self):
        """K: layers of a recursion, and blocks that the recursions share."""
        return (self.n_layer - 2 * self.edge) // self.n_loop

    def stored(self, layer):
        """The block that layer `layer` of the recursions uses (Table 5): l mod K, or l // R."""
        by_sequence = self.share.endswith("sequence")
        return layer // self.n_loop if by_sequence else layer % self.n_stored

    def capacity(self, r, step=None):
        """c of recursion r, from 0: the fraction of all tokens that it takes. It falls from 1 along
        half a cosine until step capacity_warmup; step None: after that."""
        if self.router == "none":
            return 1.0
        warm = self.router == "expert" and step is not None and step < self.capacity_warmup
        above = 0.5 * (1 + math.cos(math.pi * step / self.capacity_warmup)) if warm else 0.0
        return (self.n_loop - r + r * above) / self.n_loop


# -------------------------------------------------------------------------------------------------
# the method: who takes which recursion

class Router(nn.Module):
    """Scores of states h (..., C): (..., n_out), in float32 or better also under autocast, so that
    decisions do not depend on rounding. router_arch=random, the baseline: its scores are noise."""

    def __init__(self, cfg, n_out):
        super().__init__()
        C, linear = cfg.n_embd, lambda n, m: nn.Linear(n, m, bias=False)
        wide = {"mlp": 2 * C, "wide_mlp": 4 * C}.get(cfg.router_arch)
        self.layers = None
        if wide:
            self.layers = nn.Sequential(linear(C, wide), nn.GELU(), linear(wide, n_out))
        elif cfg.router_arch == "linear":
            self.layers = linear(C, n_out)

    def forward(self, h, noise):
        if self.layers is None:
            return noise
        dtype = next(self.layers.parameters()).dtype
        with torch.autocast(h.device.type, enabled=False):
            return self.layers(h.to(dtype)).to(torch.promote_types(h.dtype, torch.float32))


def top_k(s, active, k):
    """Of each row the k active tokens with the highest scores s (B, T): a mask (B, T), and their
    positions in order, (B, k)."""
    at = s.detach().masked_fill(~active, -math.inf).topk(k, 1).indices.sort(1).values
    return torch.zeros_like(active).scatter(1, at, True), at


class Routed(LanguageModel):
    """The method. h (B, T, C) are the states before the recursions; everyone is the attention
    context of all tokens (AllTokens: pos (B, T) their positions, real (B, T) those that are no
    padding). Each kind of routing returns h after the recursions, how many each token took (B, T),
    and what its loss needs. causal: tokens are chosen as in decoding."""

    def expert_choice(self, h, everyone, causal):
        """Recursions choose tokens: the top k, or in decoding those whose own score is >= 0."""
        cfg, T, noise, record = self.cfg, h.size(1), self.noise(everyone.pos), []
        active, taken = everyone.real, 0                                # (B, T): A_{r-1}
        for r in range(self.n_loop):
            u = noise[..., r:r + 1]
            s = decides = self.routers[r](h, u)[..., 0]                 # (B, T)
            if cfg.causal == "aux_router":
                decides = self.aux_routers[r](h.detach(), u)[..., 0]
            chosen, at = active, None                                   # the first takes all
            if causal and cfg.capacity(r, self.step) < 1:
                chosen = active & (decides >= 0)
            elif r and not causal:
                # while training a tensor's size: one compiled step for every k of a warm-up
                k = len(self.rooms[r]) if T == cfg.block_size else self.room(r, T)
                chosen, at = top_k(s, active, k)
            record.append((s, decides, active, chosen))
            h = self.recursion(r, h, everyone, chosen, at, self.gate(s))
            active, taken = chosen, taken + chosen.long()
        return h, taken, map(torch.stack, zip(*record))     # when asked for: (R, B, T) each

    def expert_loss(self, s, decides, active, chosen):
        """What is added to the loss, and what to tell, of (R, B, T) each. aux: the BCE of the
        scores that decide in decoding against who was chosen. Of the recursions after the first
        router_accuracy: how often they are right, router_majority: how often always saying the
        commoner thing would be. Means over the tokens that compete, summed over recursions."""
        n, yes = active.sum((1, 2)), chosen.sum((1, 2))                 # (R,)
        mean = lambda x: ((x * active).sum((1, 2)) / n).sum()
        wanted = chosen.to(s.dtype)
        bce = mean(F.binary_cross_entropy_with_logits(decides, wanted, reduction="none"))
        told = {"aux": bce}
        if len(s) > 1:
            right = (((decides >= 0) == chosen) & active).sum((1, 2))
            told["router_accuracy"] = right[1:].sum() / n[1:].sum()
            told["router_majority"] = torch.maximum(yes, n - yes)[1:].sum() / n[1:].sum()
        weight = self.cfg.aux_weight * (self.cfg.router_arch != "random")   # noise learns nothing
        return weight * bce + self.cfg.z_loss * mean(s ** 2), told

    def token_choice(self, h, everyone, causal):
        """Tokens choose a depth, from 0, in decoding as in training."""
        scores, p, depth = self.choose_depth(h, self.noise(everyone.pos))
        x = h
        for r in range(self.n_loop):
            x = self.recursion(r, x, everyone, (depth >= r) & everyone.real)
        return self.leave(h, x, p, depth), depth + 1, (scores, p, depth)

    def choose_depth(self, h, noise):
        """router=token, of h_1 (..., C): scores and p (..., R), and depths (...), from 0."""
        scores = self.router(h, noise)
        soft = self.cfg.router_func == "softmax"
        p = scores.softmax(-1) if soft else self.cfg.alpha * scores.sigmoid()
        depth = (p.detach() + self.balance_bias).argmax(-1)
        return scores, p, depth.clamp(max=self.n_loop - 1)

    def leave(self, first, x, p, depth):
        """h_1 + p_i F_i(.. F_1(h_1)), of first = h_1 and x = F_i(..), (..., C) each."""
        return first + (p.gather(-1, depth[..., None]) * x).to(first.dtype)

    def token_loss(self, scores, p, depth):
        """The same: balance, 1 where the depths are in balance; maxvio, how far the fullest depth
        is above the mean, in means; entropy of the mean p, in nats."""
        cfg, R = self.cfg, self.cfg.n_loop
        loads = torch.stack([(depth == d).sum() for d in range(R)])
        if self.training:
            self.loads = self.loads.to(loads.device) + loads
        part = R * loads.to(p) / loads.sum()
        balance = (part * p.flatten(0, -2).mean(0)).sum()
        q = (p / p.sum(-1, keepdim=True)).flatten(0, -2).mean(0)
        told = {"balance": balance, "maxvio": part.max() - 1, "entropy": -(q * q.log()).sum()}
        weight = cfg.balance_weight * (cfg.balance == "loss")
        return weight * balance + cfg.z_loss * scores.logsumexp(-1).square().mean(), told

    def fixed_depth(self, h, everyone, causal):
        """router=none: all tokens take all recursions."""
        for r in range(self.n_loop):
            h = self.recursion(r, h, everyone)
        return h, torch.full_like(everyone.pos, self.n_loop), None

    def recursion(self, r, h, everyone, chosen=None, at=None, gate=None):
        """h (B, T, C) after recursion r. The tokens of chosen (B, T), in recursion 0 all, become
        x + gate F(x), or F(x) without gate (B, T). at (B, n): their positions, as in Chosen."""
        cfg, cache = self.cfg, everyone.cache
        fresh = r == 0 or cfg.kv != "share"             # whether it makes keys of its own
        add = lambda x, y, g: y if g is None else x + (g[..., None] * y).to(x.dtype)
        if r == 0 or chosen is None:                    # all tokens
            start = cfg.edge + r * cfg.n_stored * fresh
            return add(h, self.run(h, r + 1, everyone, start, fresh), gate)
        if not cfg.fast and cache is None:              # naive: all run, the chosen ones change
            y = self.run(h, r + 1, Masked(cfg, everyone, chosen), fresh=fresh)
            return torch.where(chosen[..., None], add(h, y, gate), h)
        if not torch.is_grad_enabled() and not chosen.any():
            return h            # with gradients it runs all the same: each parameter has one
        own = cache.later[r - 1] if cache is not None and fresh else None
        tokens = Chosen(cfg, everyone, chosen, at, own)
        x, gate = tokens.take(h), None if gate is None else tokens.take(gate)
        y = add(x, self.run(x, r + 1, tokens, fresh=fresh), gate)
        if own is not None:
            own.advance()
        return tokens.put(h, y)

    def gate(self, s):
        squash = torch.tanh if self.cfg.router_func == "tanh" else torch.sigmoid
        return self.cfg.alpha * squash(s)

    def room(self, r, T):
        """k: how many of T tokens recursion r chooses, at this step."""
        return max(1, int(T * self.cfg.capacity(r, self.step) + 1e-9))

    def noise(self, pos):
        """router_arch=random: scores (..., R) of tokens at positions pos (...), in eval mode fixed
        by position. Of expert choice as many are >= 0 as recursion r takes."""
        cfg, R = self.cfg, self.cfg.n_loop
        wide = torch.promote_types(self.wte.weight.dtype, torch.float32)
        if cfg.router_arch != "random":
            return pos.new_empty(*pos.shape, 0, dtype=wide)
        if self.training:
            u = torch.rand(*pos.shape, R, device=pos.device, dtype=wide)
        else:
            fixed = torch.Generator().manual_seed(0)
            u = torch.rand(4096, R, generator=fixed, dtype=wide).to(pos.device)[pos % 4096]
        left = torch.arange(R + 1, 1, -1, device=pos.device)            # R + 1 - r
        return u - (1 / left if cfg.router == "expert" else 0.5)


# -------------------------------------------------------------------------------------------------
# what the tokens of a recursion attend to

class Attention(model_gpt.Attention):
    """model_gpt's, but without keys and values where the context has them (kv=share)."""

    def forward(self, x, layer, context):
        q, k, v = self.q_norm(self.heads(self.wq(x))), None, None       # (B, H, T, D)
        if context.fresh:
            k = self.k_norm(self.heads(self.wk(x)))                     # (B, G, T, D)
            v = self.heads(self.wv(x))                                  # (B, G, T, D)
        y = context.attend(layer, q, k, v)                              # (B, H, T, D)
        return self.wo(y.transpose(1, 2).flatten(2))                    # (B, T, C)


class Block(model_gpt.Block):
    """model_gpt's, with this Attention."""

    def __init__(self, cfg):
        nn.Module.__init__(self)
        self.norm1 = RMSNorm(cfg.n_embd, cfg.norm_eps)
        self.norm2 = RMSNorm(cfg.n_embd, cfg.norm_eps)
        self.attn, self.mlp = Attention(cfg), MLP(cfg)
        self.drop = nn.Dropout(cfg.dropout)


class AllTokens(Context):
    """The context of the first layer, the last, and the first recursion: all tokens, causally.
    kv[layer] keeps keys and values, (B, G, S, D) each, for later recursions."""

    def __init__(self, cfg, x, cache=None, n_valid=None, training=False):
        super().__init__(cfg, x, cache, n_valid, training)
        B, T = x.shape[:2]
        step = torch.arange(T, device=x.device)
        start = 0 if cache is None else cache.lengths[:, None]
        self.pos, self.kv = (start + step).expand(B, T), {}             # (B, T)
        self.real = torch.ones_like(self.pos, dtype=torch.bool)         # false: padding
        if n_valid is not None:
            self.real = step < n_valid[:, None].to(x.device)

    def attend(self, layer, q, k, v):
        if self.rope:
            q, k = (x if x is None else apply_rope(x, *self.rope) for x in (q, k))
        if k is not None and self.cache is not None:
            k, v = (x.to(q.dtype) for x in self.cache.append(layer, k, v))
        k, v = self.visible(layer, k, v)                                # (B, G, S, D)
        return self.attention(q, k, v, self.bias, self.dropout)

    def visible(self, layer, k, v):
        if k is not None:
            self.kv[layer] = k, v
        return self.kv[layer]

    def causal_bias(self, pos, n_keys):
        """Keys 0 .. pos are visible, pos (A, n) being the query's: (A, 1, n, n_keys)."""
        wide = torch.promote_types(self.dtype, torch.float32)
        keys = torch.arange(n_keys, device=pos.device)
        bias = attention_bias(pos, keys, dtype=wide)
        return bias.to(self.dtype) if self.cfg.fast else bias


class Masked(AllTokens):
    """The naive context of a later recursion: all tokens run, and only those of mask (B, T) have
    keys in it. Another one attends to itself too, lest its softmax is empty; its result is
    dropped."""

    def __init__(self, cfg, everyone, mask):
        self.cfg, self.everyone, self.mask, self.cache = cfg, everyone, mask, None
        self.attention, self.dropout = everyone.attention, everyone.dropout
        self.rope, self.bias = everyone.rope, everyone.bias
        if cfg.kv == "recursion":
            itself = torch.eye(mask.size(1), dtype=torch.bool, device=mask.device)
            visible = mask[:, None, None] | itself                      # (B, 1, T, T)
            self.bias = self.bias.masked_fill(~visible, -math.inf)

    def visible(self, layer, k, v):
        if self.cfg.kv == "recursion":
            return k, v
        return map(self.update, self.everyone.kv[self.cfg.edge + layer], (k, v))

    def update(self, old, new):
        """The first recursion's keys old (B, G, T, D), with new ones of this one's tokens."""
        return old if new is None else torch.where(self.mask[:, None, :, None], new, old)


# -------------------------------------------------------------------------------------------------
# the fast path: only the chosen tokens run. They keep their order, so that a causal mask among them
# is that of their positions.

class Chosen(Masked):
    """The context of the tokens that take a later recursion: mask (B, T), and their positions
    at (B, n) where all rows have as many. rows (A,): the rows with any. places (A n,): where they
    stand among all B T tokens. Where rows differ there is padding: it reads any token, and is
    written to a spare place behind all. cache: the recursion's, in decoding."""

    def __init__(self, cfg, everyone, mask, at=None, cache=None):
        B, T = mask.shape
        self.cfg, self.everyone, self.mask, self.cache = cfg, everyone, mask, cache
        self.attention, self.dropout = everyone.attention, everyone.dropout
        self.rows = torch.arange(B, device=mask.device)
        if at is None:
            step = torch.arange(T, device=mask.device)
            at = torch.where(mask, step, T).sort(1).values              # (B, T): T is padding
            if not torch.compiler.is_compiling():       # there no shape may depend on the data
                self.rows = mask.any(1).nonzero()[:, 0]
                at = at[self.rows, :int(mask.sum(1).max()) or 1]
        self.shape = at.shape                                           # A, n
        places = self.rows[:, None] * T + at
        self.places = torch.where(at < T, places, B * T).flatten()
        self.rope = everyone.rope and [self.take(x[:, 0].expand(B, T, -1))[:, None]
                                       for x in everyone.rope]          # (A, 1, n, D)
        took = self.of_rows(mask if cache is None else cache.place(self))       # (A, S)
        self.took = took[:, None, :, None]
        self.nth = (took.cumsum(1) - 1).clamp(min=0)[:, None]           # (A, 1, S)
        self.bias = None                                                # plainly causal
        if cfg.kv != "recursion":
            n_keys = T if everyone.cache is None else everyone.cache.end
            self.bias = everyone.causal_bias(self.take(everyone.pos), n_keys)
        elif cache is not None and (cache.longest or not cfg.fast):
            self.bias = everyone.causal_bias(cache.entry, cache.end)

    def take(self, x):
        """x (B, T, ...) of all tokens -> (A, n, ...) of the chosen."""
        x = x.flatten(0, 1)
        chosen = x.index_select(0, self.places.clamp(max=len(x) - 1))
        return chosen.view(*self.shape, *x.shape[1:])

    def put(self, x, new):
        """x (B, T, C) with the chosen tokens' states replaced by new (A, n, C)."""
        B, T, C = x.shape
        x = F.pad(x.flatten(0, 1), (0, 0, 0, 1))                        # the spare place
        return x.index_copy(0, self.places, new.flatten(0, 1))[:B * T].view(B, T, C)

    def of_rows(self, x):
        """x (B, ...) -> (A, ...)."""
        return x if len(self.rows) == len(x) else x.index_select(0, self.rows)

    def update(self, old, new):
        """new (A, G, .., D) is in order: that of the i-th token that took it is new[:, :, i]."""
        old = self.of_rows(old)                                         # (A, G, S, D)
        if new is None:
            return old
        A, G, n, _ = new.shape
        row = n * torch.arange(A * G, device=old.device).view(A, G, 1)
        by_position = new.flatten(0, 2).index_select(0, (row + self.nth).flatten()).view_as(old)
        return torch.where(self.took, by_position, old)


# -------------------------------------------------------------------------------------------------
# decoding: what all tokens take has model_gpt's cache, a later recursion a shorter one

class RecursionCache(KVCache):
    """Keys and values of the tokens that took one recursion, in order; lengths (B,) counts them.
    It has the room that the recursion's capacity needs, and doubles it where more are chosen.
    took (B, most + 1): whether the token at a position < `most` took the recursion."""

    def place(self, tokens):
        """Reserve slots for the Chosen tokens. Returns `took` of all tokens so far, (B, S)."""
        everyone, most = tokens.everyone, self.took.size(1) - 1
        every_row = torch.arange(len(self.took), device=self.took.device)[:, None]
        self.took[every_row, everyone.pos.clamp(max=most)] = tokens.mask
        self.tokens, self.new, self.ragged = tokens, tokens.mask.sum(1), True
        start = tokens.of_rows(self.lengths)[:, None]                   # (A, 1)
        end = start + tokens.of_rows(self.new)[:, None]
        self.entry = start + torch.arange(tokens.shape[1], device=start.device)     # (A, n)
        self.end = int(end.max())
        if self.end > self.max_len:
            self.grow(min(most, max(self.end, 2 * self.max_len)))
        self.slots = torch.where(self.entry < end, self.entry, self.max_len)
        return self.took[:, :everyone.cache.end]

    @torch.inference_mode(False)
    def grow(self, room):
        pad = lambda buffers: [F.pad(x, (0, 0, 0, room - self.max_len)) for x in buffers]
        self.k, self.v, self.max_len = pad(self.k), pad(self.v), room

    def append(self, layer, k, v):
        """Write k, v (A, G, n, D) of the placed tokens; return all so far, (A, G, S, D)."""
        rows = self.tokens.rows[:, None]
        for buffer, new in ((self.k[layer], k), (self.v[layer], v)):
            buffer[rows, :, self.slots] = new.transpose(1, 2).to(buffer.dtype)
        return [self.tokens.of_rows(x[layer][:, :, :self.end]) for x in (self.k, self.v)]


class Cache(KVCache):
    """model_gpt's cache of the layers that all tokens take, and `later`: a RecursionCache of each
    other recursion that has keys of its own."""

    @torch.inference_mode(False)            # so that calls outside may write too
    def __init__(self, cfg, batch_size, max_len, device, dtype):
        K, R = cfg.n_stored, cfg.n_loop if cfg.kv != "share" else 1     # R: that have keys
        routed = cfg.router != "none"
        n_layer = 2 * cfg.edge + K * (1 if routed else R)
        super().__init__(cfg, batch_size, max_len, device, dtype, n_layer)
        rooms = [max(1, int(max_len * cfg.capacity(r) + 1e-6)) for r in range(1, R) if routed]
        self.later = [RecursionCache(cfg, batch_size, n, device, dtype, K) for n in rooms]
        for cache in self.later:
            cache.took = self.k[0].new_zeros(batch_size, max_len + 1, dtype=torch.bool)

    def nbytes(self):
        return super().nbytes() + sum(cache.nbytes() for cache in self.later)

    def reset(self, rows=None):
        super().reset(rows)
        for cache in self.later:
            cache.reset(rows)
            cache.took[slice(None) if rows is None else rows] = False


# -------------------------------------------------------------------------------------------------
# the model

class Model(Routed):
    def __init__(self, cfg):
        nn.Module.__init__(self)     # parts of its own, in another order
        self.cfg = cfg
        blocks = lambda n: nn.ModuleList(Block(cfg) for _ in range(n))
        self.wte = nn.Embedding(cfg.vocab_size, cfg.n_embd)
        self.drop = nn.Dropout(cfg.dropout)
        self.first, self.last = blocks(cfg.edge), blocks(cfg.edge)
        self.blocks = blocks(cfg.n_stored)                  # those that the recursions share
        self.norm = RMSNorm(cfg.n_embd, cfg.norm_eps)
        self.head = nn.Linear(cfg.n_embd, cfg.vocab_size, bias=False)
        K, R = cfg.n_stored, cfg.n_loop
        inner = [self.blocks[cfg.stored(layer)] for layer in range(K * R)]
        self.levels = [[*self.first], *(inner[r * K:r * K + K] for r in range(R)), [*self.last]]
        if cfg.router == "expert":
            self.routers = nn.ModuleList(Router(cfg, 1) for _ in range(R))
            if cfg.causal == "aux_router":
                self.aux_routers = nn.ModuleList(Router(cfg, 1) for _ in range(R))
        elif cfg.router == "token":
            self.router = Router(cfg, R)
            self.register_buffer("balance_bias", torch.zeros(R))
        self.loads = torch.zeros(R)         # token: tokens of each depth since the last step
        # expert: of each position, how many tokens of an evaluation took the last recursion
        reached = torch.zeros(cfg.block_size, dtype=torch.long)
        self.register_buffer("reached", reached, persistent=False)
        if cfg.capacity_warmup:
            self.register_buffer("warmup_step", torch.zeros((), dtype=torch.long))
        init_weights(self, cfg.n_layer)
        self.set_step(0)

    @property
    def n_loop(self):
        """The most recursions of a token: in eval mode exit_loop, where that is set."""
        return self.cfg.exit_loop if self.cfg.exit_loop and not self.training else self.cfg.n_loop

    def forward(self, idx, targets=None, cache=None, n_valid=None):
        """As in every model. With targets, aux also has depth1, ..: the fraction of tokens that
        take so many recursions, and what expert_loss or token_loss tells."""
        if targets is None or cache is not None or idx.numel() == 0:
            return super().forward(idx, targets, cache, n_valid)
        expert, R = self.cfg.router == "expert", self.cfg.n_loop
        h, taken, record = self.states(idx, causal=not self.training)
        logits, ce, aux = self.predict(h, targets)
        if self.cfg.router == "none":
            return logits, ce, aux
        if expert and not self.training:
            last = (taken == self.n_loop).sum(0)[:self.cfg.block_size]
            self.reached[:len(last)] += last
            h, _, record = self.states(idx, causal=False)
            aux["ce_topk"] = self.predict(h, targets)[1].detach()
        more, told = self.expert_loss(*record) if expert else self.token_loss(*record)
        if expert:
            told["dead"] = 1 - (taken == self.n_loop).any(0).float().mean()
        told |= {f"depth{d}": (taken == d).float().mean() for d in range(1, R + 1)}
        aux |= {name: x.detach() for name, x in told.items()}
        return logits, ce + more if self.training else ce, aux

    def hidden(self, idx, cache=None, n_valid=None):
        causal = not self.training or cache is not None
        return self.states(idx, causal, cache, n_valid)[0]

    def states(self, idx, causal, cache=None, n_valid=None):
        """Of idx (B, T): states after the final norm (B, T, C), the recursions each token takes
        (B, T), and what the router's losses need. causal: tokens are chosen as in decoding."""
        h = self.drop(self.wte(idx))
        everyone = AllTokens(self.cfg, h, cache, n_valid, self.training)
        h = self.run(h, 0, everyone)
        route = {"expert": self.expert_choice, "token": self.token_choice,
                 "none": self.fixed_depth}[self.cfg.router]
        h, taken, record = route(h, everyone, causal)
        h = self.run(h, self.cfg.n_loop + 1, everyone, start=-1)
        if cache is not None:
            cache.advance()
        return self.norm(h), taken, record

    @torch.no_grad()
    def recursions(self, idx):
        """How many recursions each token of idx (B, T) takes when it is decoded, (B, T)."""
        return self.states(idx, causal=True)[1]

    def run(self, h, level, context, start=0, fresh=True):
        """The layers of a level: 0 the first layer, 1 .. R the recursions, R + 1 the last layer.
        start: which of the cache's layers is its first (-1: the last one). fresh: whether it makes
        keys and values."""
        context.fresh = fresh
        for i, block in enumerate(self.levels[level]):
            h = block(h, start + i, context)
        return h

    # what depends on the step --------------------------------------------------------------------

    @property
    def eval_metrics(self):
        """What an evaluation reports beside ce, of what forward tells."""
        depths = [f"depth{d}" for d in range(1, self.cfg.n_loop + 1)]
        router = ["router_accuracy", "router_majority"] if self.n_loop > 1 else []
        return {"expert": ["ce_topk", *router, *depths, "dead"],
                "token": [*depths, "maxvio"], "none": []}[self.cfg.router]

    def set_step(self, step):
        """The capacity warm-up stands at this training step; and an evaluation may begin.
        rooms[r] has as many rows as recursion r chooses of block_size tokens."""
        cfg, self.step, self.loads = self.cfg, step, self.loads.to(self.wte.weight.device)
        self.reached.zero_()
        self.rooms = [torch.empty(self.room(r, cfg.block_size), 0, device="cpu")
                      for r in range(cfg.n_loop)]
        if cfg.capacity_warmup:
            self.warmup_step.fill_(step)
            for room in self.rooms:
                torch._dynamo.maybe_mark_dynamic(room, 0)   # compiled: one graph for all sizes

    def end_evaluation(self, summed):
        """Of all batches since set_step: dead, the fraction of positions of which no token took
        the last recursion. summed: as in end_step."""
        dead = summed(*self.reached.tolist()).count(0) / self.cfg.block_size
        return {"dead": dead} if self.cfg.router == "expert" else {}

    @torch.no_grad()
    def end_step(self, summed):
        """After each optimizer step: loss_free moves its biases by the loads of all micro-batches
        and processes. summed(*numbers) adds up numbers over processes, a list."""
        cfg = self.cfg
        if cfg.router == "token" and cfg.balance == "loss_free":
            loads = torch.tensor(summed(*self.loads.tolist()))
            sign = (loads.mean() - loads).sign().to(self.balance_bias)
            self.balance_bias += cfg.balance_rate * sign
        self.loads = torch.zeros_like(self.loads)
        if cfg.capacity_warmup:
            self.warmup_step.fill_(self.step + 1)           # where weights saved now stand

    def _load_from_state_dict(self, weights, prefix, *rest):
        """Weights without the step of a capacity warm-up were saved after it."""
        name, warmup = prefix + "warmup_step", self.cfg.capacity_warmup
        weights.setdefault(name, torch.tensor(warmup))
        if not warmup:
            del weights[name]
        super()._load_from_state_dict(weights, prefix, *rest)
        if warmup:
            self.set_step(int(self.warmup_step))

    # decoding ------------------------------------------------------------------------------------

    def init_cache(self, batch_size, max_len):
        """An empty cache for batch_size rows of up to max_len tokens."""
        self.check_context(max_len)
        w = self.wte.weight
        return Cache(self.cfg, batch_size, max_len, w.device, compute_dtype(w))

    # For serve.py: N packed tokens of several sequences, each at its own recursion, depth (N,). The
    # context knows their sequences: attend(layer, q, k, v) of (1, heads, N, D), positions at (N,).

    def embed(self, idx, context):
        """idx (N,) -> states before recursion 0: h, h_1, and noise (router_arch=random)."""
        h = self.run(self.drop(self.wte(idx))[None], 0, context)[0]     # (N, C)
        noise = self.noise(torch.as_tensor(context.at, device=h.device))
        return torch.cat([h, h, noise.to(h.dtype)], -1)

    def unpack(self, state):
        C = self.cfg.n_embd
        return state.split([C, C, state.size(-1) - 2 * C], -1)

    def scores(self, routers, h, depth, noise):
        """Each token's score (N,) by the router of its recursion."""
        s = torch.cat([router(h, noise[:, r:r + 1]) for r, router in enumerate(routers)], 1)
        return s.gather(1, depth[:, None].to(h.device))[:, 0]           # s (N, R)

    def takes(self, state, depth):
        """Whether the router sends each token through recursion `depth`, (N,) bool."""
        (h, first, noise), cfg, depth = self.unpack(state), self.cfg, depth.to(state.device)
        if cfg.router == "token":
            return self.choose_depth(first, noise)[2] >= depth
        if cfg.router == "none" or cfg.capacity(cfg.n_loop - 1, self.step) == 1:
            return torch.ones_like(depth, dtype=torch.bool)
        routers = self.aux_routers if cfg.causal == "aux_router" else self.routers
        return (self.scores(routers, h, depth, noise) >= 0) | (depth == 0)

    def loop(self, state, depth, context):
        """States after recursion `depth` of each token (share=*sequence: all at the same)."""
        h, first, noise = self.unpack(state)
        fresh = self.cfg.kv != "share" or bool((depth == 0).any())
        y = self.run(h[None], int(depth[0]) + 1, context, fresh=fresh)[0]
        if self.cfg.router == "expert":
            gate = self.gate(self.scores(self.routers, h, depth, noise))
            y = h + (gate[:, None] * y).to(h.dtype)
        return torch.cat([y, first, noise], -1)

    def finish(self, state, context):
        """What logits() takes, (N, C), of tokens that have left."""
        h, first, noise = self.unpack(state)
        if self.cfg.router == "token":
            h = self.leave(first, h, *self.choose_depth(first, noise)[1:])
        return self.norm(self.run(h[None], self.cfg.n_loop + 1, context)[0])

    # costs ---------------------------------------------------------------------------------------

    def flops_per_token(self, paper=False, step=None):
        """Floating-point operations of one token's forward and backward pass in a sequence of
        block_size: 6 a weight of each matrix product and 12 C a visible key, averaged over
        positions, times the fraction of tokens that need it at a training step (None: after a
        capacity warm-up). paper: as Appendix C counts: the forward only, causal attention as half
        the square, n_kv_head as n_head, neither head nor routers."""
        cfg, T, C, block = self.cfg, self.cfg.block_size, self.cfg.n_embd, self.blocks[0]
        size = lambda *modules: sum(p.numel() for module in modules
                                    for p in module.parameters() if p.dim() == 2)
        kv = 2 * C * C if paper else size(block.attn.wk, block.attn.wv)
        rest = size(block.attn.wq, block.attn.wo, block.mlp)
        layers = [(1.0, 1.0, 1.0)] * 2 * cfg.edge   # fractions: of tokens, fresh keys, visible keys
        for r in range(cfg.n_loop):
            c = cfg.capacity(r, step)
            fresh = 0.0 if r and cfg.kv == "share" else c
            layers += [(c, fresh, c if cfg.kv == "recursion" else 1.0)] * cfg.n_stored
        weights = sum(c * rest + fresh * kv for c, fresh, _ in layers)
        if paper:
            return 2 * weights + 2 * T * C * sum(c * visible for c, _, visible in layers)
        keys = sum(c * (visible * T + 1) / 2 for c, _, visible in layers)
        weights += cfg.vocab_size * C + size(*getattr(self, "routers", []))
        weights += size(self.router) if cfg.router == "token" else 0
        aux = getattr(self, "aux_routers", [])      # their first product has no gradient for h
        first = sum(p.numel() for router in aux for p in [*router.parameters()][:1])
        return 6.0 * (weights + size(*aux)) - 2.0 * first + 12.0 * C * keys

    def steps_within(self, max_flops, tokens):
        """How many training steps of so many tokens max_flops pays for. Those of a capacity
        warm-up cost more."""
        cost = lambda step: tokens * self.flops_per_token(self.cfg.paper_flops, step)
        for step in range(self.cfg.capacity_warmup):
            if cost(step) > max_flops:
                return step
            max_flops -= cost(step)
        return self.cfg.capacity_warmup + int(max_flops / cost(None))


# -------------------------------------------------------------------------------------------------
# conversion of a trained Transformer

@torch.no_grad()
def convert(model, weights):
    """Start from `weights`, the state dict of a model_gpt of the same sizes: the first and the last
    layer as they are, the shared blocks from the layers between as cfg.init says (Table 9)."""
    cfg, own = model.cfg, model.state_dict()
    for name in [name for name in weights if not name.startswith("blocks.")]:
        own[name].copy_(weights[name])

    layer = lambda n: {name.split(".", 2)[2]: w for name, w in weights.items()
                       if name.startswith(f"blocks.{n}.")}
    for edge, n in ((model.first, 0), (model.last, cfg.n_layer - 1)):
        for block in edge:
            block.load_state_dict(layer(n))
    inner, K = range(cfg.edge, cfg.n_layer - cfg.edge), cfg.n_stored
    for k, block in enumerate(model.blocks):
        tied = [n for n in inner if cfg.stored(n - cfg.edge) == k]
        spaced = round(cfg.edge + k * ((len(inner) - 1) / max(1, K - 1)))       # halves to even
        sources = {"average": tied, "stepwise": [spaced], "lower": [inner[k]],
                   "upper": [inner[k - K]], "random": []}[cfg.init]
        found = [layer(n) for n in sources]
        if found:
            mean = {name: sum(x[name] for x in found) / len(found) for name in found[0]}
            block.load_state_dict(mean)

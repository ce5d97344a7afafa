"""
Mixture-of-Recursions: tied layers run in loops, and a router decides how many loops each token takes.

Bae et al. 2025, "Mixture-of-Recursions: Learning Dynamic Recursive Depths for Adaptive Token-Level Computation". The
block is that of model_gpt.py (Llama's). N = n_layer unrolled layers share their weights over R = n_loop recursions
(Table 5); F_r is recursion r: K layers in a row, residuals included. With share = middle_*, the first and the last
layer have weights of their own and stand before and after the recursions, on all tokens.

router = expert (Section 2.2.1): each recursion r = 1 .. R has a router, and chooses its tokens. A_0 = all tokens,

    s = router_r(h[A_r-1])                        one score a token that is still there
    A_r = the k_r tokens of A_r-1 with the highest scores,  k_r = max(1, floor(T (R - r + 1) / R))
    h[A_r] <- h[A_r] + alpha sigmoid(s) F_r(h[A_r])                                                  (Eq. 2.1)

which looks ahead: whether a token is among the first k_r depends on later ones. Decoding cannot, so a token takes
recursion r iff it took r - 1 and s >= 0, and training teaches the scores to tell: the loss has aux_weight times
BCE(s, was it chosen), or with causal = aux_router a second router on detached input learns that, and decides instead.
In eval mode, and with a cache, forward computes this decoding function: its "ce" is what the model would really
predict; "ce_topk" beside it is what choosing among all tokens would.

router = token: one router gives p = softmax(W h_1) over the R depths; the token takes i = argmax p recursions, and
leaves as h_1 + p_i F_i(.. F_1(h_1)) (Eq. 2.2, gated once). That never looks ahead, but the depths must be kept in
balance: by a loss, balance_weight R sum_i (share of tokens with depth i) mean(p_i), or loss_free: a bias b in
argmax(p + b), moved by balance_rate sign(mean load - load_i) after each step. router = none: every token takes all.

Keys and values (Section 2.2.2): kv = recursion: a recursion's tokens see each other. share: they see the keys and
values that all tokens had in the first recursion. share_update: the same, but those of its own tokens are fresh.

`fast=False` runs every token through every recursion and masks out what was not chosen. `fast=True`
runs the chosen tokens alone, side by side, and puts them back; compiled, with router = token, it
runs and masks all: how many choose a recursion would be a shape that depends on the data. With a
cache (LoopCache) a row keeps one list for all recursions, of the tokens that took them so far; for
an engine that batches over depth (sample.py) there are enter, loop and finish, in which each row
may stand at another recursion, because all use the same weights (share = cycle or middle_cycle).

Departures from the paper and the authors' code: token choice gates once (Eq. 2.2 does at every
step; their code as here). The z-loss of token choice has the factor of their configuration, 1e-5
(Table 11's caption says 1e-3). Attention is shared between recursions as all else is (their code
unties it with expert choice). The auxiliary loss is a plain mean, whatever the gradient
accumulation. "ce" is measured as the model decodes, and "ce_topk" as they do. Dead positions are
those of all rows of an evaluation (Table 10: of 500). router_accuracy counts the recursions after
the first.

Names: B batch, T new tokens, S keys, n chosen tokens, N tokens of several rows side by side, H query heads, G key/value
heads, D head size, C width. A level is what has keys of its own: 0 the first layer, 1 .. R the recursions, R + 1 the
last layer.
"""
import contextlib
import math
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

from model_gpt import (MLP, LanguageModel, RMSNorm, apply_rotary, attention_bias, attention_fast,
                       attention_naive, check_choice, check_sizes, compute_dtype, rotary_tables)


@dataclass
class Config:
    block_size: int = 256        # tokens in a training sequence; also the longest context under rope
    vocab_size: int = 257        # number of token ids
    n_layer: int = 8             # unrolled blocks: those of all recursions, and the first and last of share=middle_*
    n_head: int = 4              # query heads
    n_kv_head: int = 0           # key/value heads, each shared by n_head / n_kv_head query heads (0: n_head)
    n_embd: int = 128            # width of the residual stream
    dropout: float = 0.0         # on embeddings, attention weights and both residual branches
    fast: bool = True            # only the chosen tokens are run; false: all are, and masked
    n_loop: int = 3              # R: recursions
    share: str = "middle_cycle"  # which block a layer is: cycle | sequence | middle_cycle | middle_sequence, see stored
    router: str = "expert"       # expert: recursions choose tokens | token: tokens choose a depth | none: all take all
    kv: str = "recursion"        # what a recursion's tokens see: recursion | share | share_update
    router_arch: str = "linear"  # of scores: linear | mlp (2 n_embd wide) | wide_mlp (4 n_embd) | random (the control)
    router_func: str = ""        # gate: sigmoid | tanh; of router=token: softmax | sigmoid (empty: the first of them)
    alpha: float = 0.1           # factor of the gate, but for softmax
    causal: str = "aux_loss"     # expert: what decides without looking ahead: aux_loss (the scores) | aux_router
    aux_weight: float = 0.001    # expert: how much learning that counts in the loss
    capacity_warmup: int = 0     # expert: steps until recursions choose as few tokens as they shall, from all (0: none)
    balance: str = "loss"        # token: what keeps depths in balance: loss | loss_free | none
    balance_weight: float = 0.1  # token: factor of the balancing loss
    balance_rate: float = 0.001  # token: how far loss_free moves a bias each step
    z_loss: float = -1.0         # factor of the mean squared logsumexp of scores in the loss (-1: token 1e-5, expert 0)
    exit_loop: int = 0           # in eval mode no token takes more recursions than this (0: n_loop)
    init: str = "average"        # stored blocks from a source: average | stepwise | lower | upper | random
    n_mlp: int = 0               # hidden width of the MLP (0: 8/3 n_embd for swiglu, 4 n_embd for gelu)
    mlp: str = "swiglu"          # swiglu | gelu
    pos: str = "rope"            # rope | none
    rope_theta: float = 10000.0  # rotary base
    qk_norm: bool = False        # RMSNorm with a weight on each head's query and key, before rotary
    tie_embeddings: bool = True  # the head is the embedding matrix
    paper_flops: bool = False    # max_flops counts as the paper: the forward, no head, no routers
    norm_eps: float = 1e-5       # RMSNorm's epsilon

    SOURCES = ("gpt",)           # models whose weights init_from converts
    SAME_FUNCTION = ("paper_flops",)    # resuming may change it, as it may fast
    # what a later stage, which starts from this model's weights, may set anew
    STAGES = ("exit_loop", "aux_weight", "capacity_warmup", "balance_weight", "balance_rate", "z_loss")

    def __post_init__(self):
        self.n_kv_head = self.n_kv_head or self.n_head
        check_sizes(self)
        for name, allowed in CHOICES.items():
            check_choice(self, name, allowed)
        self.router_func = self.router_func or ("softmax" if self.router == "token" else "sigmoid")
        check_choice(self, "router_func", ("softmax", "sigmoid") if self.router == "token" else ("sigmoid", "tanh"))
        if self.z_loss == -1:
            self.z_loss = 1e-5 if self.router == "token" else 0.0
        if self.pos == "rope" and self.head_dim % 2:
            raise ValueError(f"pos=rope needs an even head size: n_embd / n_head = {self.head_dim}")
        for name in ("n_mlp", "aux_weight", "capacity_warmup", "balance_weight", "balance_rate", "z_loss"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)} must not be negative")
        if self.rope_theta <= 0 or self.norm_eps <= 0:
            raise ValueError("rope_theta and norm_eps must be positive")
        if self.n_loop < 1:
            raise ValueError(f"n_loop={self.n_loop} must be at least 1")
        if not 0 <= self.exit_loop <= self.n_loop:
            raise ValueError(f"exit_loop={self.exit_loop} must be 0 (all) or one of the {self.n_loop} recursions")
        if self.n_layer <= 2 * self.edge or (self.n_layer - 2 * self.edge) % self.n_loop:
            below = max(1, (self.n_layer - 2 * self.edge) // self.n_loop) * self.n_loop + 2 * self.edge
            fit = " or ".join(str(n) for n in (below, below + self.n_loop))
            raise ValueError(f"n_layer={self.n_layer} does not fit share={self.share} with n_loop={self.n_loop}: {fit} "
                             f"would")
        if self.kv != "recursion" and self.share.endswith("sequence"):
            raise ValueError(f"kv={self.kv} needs recursions over the same layers: share=cycle or middle_cycle, not "
                             f"{self.share}")
        if self.n_mlp == 0:  # a multiple of 32 keeps the products aligned
            self.n_mlp = 4 * self.n_embd if self.mlp == "gelu" else 32 * math.ceil(self.n_embd / 12)

    @property
    def head_dim(self):
        return self.n_embd // self.n_head

    @property
    def edge(self):
        """Layers with weights of their own at each end: 1 or 0."""
        return int(self.share.startswith("middle"))

    @property
    def n_stored(self):
        """K: layers of one recursion, and blocks that the recursions share."""
        return (self.n_layer - 2 * self.edge) // self.n_loop

    def stored(self, layer):
        """Which shared block layer `layer` of the recursions is (Table 5): of cycle l mod K, of sequence l // R. With
        middle_*, where the first and the last layer share nothing, l counts from the second on."""
        return layer // self.n_loop if self.share.endswith("sequence") else layer % self.n_stored

    def share_of_tokens(self, r, step=None):
        """c of recursion r, from 0: how many of all tokens it takes (token: in balance). It falls
        from 1 along half a cosine until training step capacity_warmup; step None: after that."""
        if self.router == "none":
            return 1.0
        warm = self.router == "expert" and step is not None and step < self.capacity_warmup
        above = 0.5 * (1 + math.cos(math.pi * step / self.capacity_warmup)) if warm else 0.0
        return (self.n_loop - r + r * above) / self.n_loop


CHOICES = {"mlp": ("swiglu", "gelu"), "pos": ("rope", "none"), "router": ("expert", "token", "none"),
           "share": ("cycle", "sequence", "middle_cycle", "middle_sequence"), "causal": ("aux_loss", "aux_router"),
           "kv": ("recursion", "share", "share_update"), "router_arch": ("linear", "mlp", "wide_mlp", "random"),
           "balance": ("loss", "loss_free", "none"), "init": ("average", "stepwise", "lower", "upper", "random")}


# ---------------------------------------------------------------------------------------------------------
# which tokens a level runs, and what they see

class Everyone:
    """All T tokens of every row, in a forward without a cache.

    What all places offer: at, the tokens' positions; fresh: whether they have keys and values of their own; and attend.
    first[i] holds the keys and values of the first recursion's i-th layer, where kv says that later ones see them:
    whoever is fresh and has it fills it, who is not reads it.
    """

    def __init__(self, T, device, first=None, fresh=True):
        self.at, self.first, self.fresh = torch.arange(T, device=device)[None], first, fresh        # at (1, T)

    def bias(self, x):
        """Of naive attention; the fast one knows that all is causal."""
        return attention_bias(self.at, self.at[0], 0, None, torch.promote_types(x.dtype, torch.float32))

    def attend(self, attention, i, q, k, v):
        """q (B, T, H, D), k, v (B, T, G, D) or None, of the i-th layer -> (B, T, H D)."""
        if not self.fresh:
            k, v = self.first[i]
        elif self.first is not None:
            self.first[i] = k, v
        return attention.among(q, k, v, None if attention.cfg.fast else self.bias(q))


class Masked(Everyone):
    """All T tokens, of which those of mask (B, T) are chosen: the others' outputs mean nothing."""

    def __init__(self, mask, kv, first):
        super().__init__(mask.size(1), mask.device, first)
        self.mask, self.kv, self.fresh = mask, kv, kv != "share"

    def attend(self, attention, i, q, k, v):
        fast = attention.cfg.fast
        bias = None if fast and self.kv != "recursion" else self.bias(q)
        if self.kv == "recursion":                      # a token that is not chosen sees itself, so that all see one
            seen = self.mask[:, None] | torch.eye(self.mask.size(1), dtype=torch.bool, device=self.mask.device)
            bias = bias.masked_fill(~seen[:, None], -math.inf)
        else:
            old = self.first[i]
            new = old if k is None else (k, v)
            k, v = (torch.where(self.mask[..., None, None], a, b) for a, b in zip(new, old))
        return attention.among(q, k, v, bias.to(q.dtype) if fast and bias is not None else bias)


class FromContext:
    """Packed tokens whose keys serve.py keeps."""
    fresh = True

    def __init__(self, context):
        self.context = context

    def attend(self, attention, i, q, k, v):
        return self.context.attend(i, *(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2).flatten(2)


class Chosen:
    """Tokens that take a recursion: mask (B, T); idx (B, n): their positions in order, where all rows have as many."""

    def __init__(self, mask, idx=None):
        self.mask, self.idx = mask, idx

    def indices(self):
        """Of the N tokens, row after row, each row's in order: their places (N,) in (B T); their places in (B n), n
        the most of a row (None: all of them); (B, n); and their positions (N,)."""
        B, T = self.mask.shape
        if self.idx is not None:
            rows = torch.arange(B, device=self.idx.device)[:, None]
            return (rows * T + self.idx).flatten(), None, self.idx.shape, self.idx.flatten()
        row, at = self.mask.nonzero(as_tuple=True)
        count = self.mask.sum(1)
        n = max(1, int(count.max()))    # none chosen: layers run on nothing, for gradients of zero
        step = torch.arange(len(row), device=row.device) - (count.cumsum(0) - count)[row]
        return row * T + at, row * n + step, (B, n), at


class Gathered:
    """The chosen tokens of all rows side by side, (1, N, C), so that no padding is run; attention alone sees them as
    (B, n), with padding at the end of rows that have fewer."""

    def __init__(self, chosen, kv, first):
        self.places, self.padding, self.shape, at = chosen.indices()
        self.at, self.T, self.kv, self.first, self.fresh = at[None], chosen.mask.size(1), kv, first, kv != "share"
        self.bias = None                                # the same for all layers

    def attend(self, attention, i, q, k, v):
        q, k, v = (x if x is None else x[0] for x in (q, k, v))
        if self.kv == "recursion":
            k, v = self.padded(k), self.padded(v)       # they see each other, causally; nobody real sees the padding
        elif k is None:
            k, v = self.first[i]
        else:                                           # the first recursion's, with theirs in place of their old ones
            k, v = (old.flatten(0, 1).index_copy(0, self.places, new.to(old.dtype)).view_as(old)
                    for new, old in zip((k, v), self.first[i]))
        if self.kv != "recursion" and self.bias is None:
            self.bias = attention_bias(self.padded(self.at[0]), torch.arange(self.T, device=q.device), 0, None, q.dtype)
        y = attention.among(self.padded(q), k, v, self.bias).flatten(0, 1)
        return (y if self.padding is None else y.index_select(0, self.padding))[None]

    def padded(self, x):
        """x (N, ..) as (B, n, ..)."""
        if self.padding is not None:
            x = x.new_zeros(self.shape[0] * self.shape[1], *x.shape[1:]).index_copy(0, self.padding, x)
        return x.unflatten(0, self.shape)


# ---------------------------------------------------------------------------------------------------------
# the cache

class KeyList:
    """Keys and values of each row of a cache, kv[i] (2, B, G, left + max_len, D) in the i-th of
    some layers, contiguous for each head, as attention reads them. Those of the first level, which
    all tokens have, stand by position to the right of `origin`; those of deeper levels to the left
    of it, the first that came next to it. So what is filled, or either side of it, is always in one
    piece. deeper (B,) counts the left side. Where a row needs more room there than `left`, up to
    `most`, all rows grow. Lists with a left side also know of each entry its level (0: free), and
    where in the text its token stands, at, both (B, left + max_len). These three are on the
    host."""

    def __init__(self, layers, batch_size, max_len, left, most, cfg, device, dtype):
        shape = 2, batch_size, cfg.n_kv_head, left + max_len, cfg.head_dim
        self.origin, self.most, self.device = left, most, device
        self.kv = [torch.zeros(shape, device=device, dtype=dtype) for _ in range(layers)]
        self.deeper = np.zeros(batch_size, np.int64)
        if most:
            self.level, self.at = np.zeros((2, batch_size, left + max_len), np.int64)

    def reset(self, rows):
        for x in self.kv:
            x[:, rows] = 0
        self.deeper[rows] = 0
        if self.most:
            self.level[rows], self.at[rows] = 0, 0

    def add(self, rows, n, level, shallow, at):
        """Entries for n[r] tokens of row rows[r], of level[r], shallow[r]: the first, at positions at (N,), all on the
        host. Returns their rows and places in the lists, (2, N) on the cache's device."""
        row, step = spread(n)
        slot = at
        if not shallow.all():
            count = self.deeper[rows]
            self.deeper[rows] = need = count + np.where(shallow, 0, n)
            self.make_room(need.max())
            slot = np.where(shallow[row], at, -1 - count[row] - step)
        of, slot = rows[row], self.origin + slot
        if self.most:
            self.level[of, slot], self.at[of, slot] = level[row], at
        return on(self.device, np.stack([of, slot]))

    def make_room(self, need):
        if need <= self.origin:
            return
        more = min(self.most, max(int(need), self.origin + self.origin // 4)) - self.origin
        with torch.inference_mode(False):
            self.kv = [F.pad(x, (0, 0, more, 0)) for x in self.kv]
        self.level, self.at = (np.pad(x, ((0, 0), (more, 0))) for x in (self.level, self.at))
        self.origin += more


class LoopCache:
    """What decoding keeps: three KeyLists, of the first layer, the recursions, and the last
    layer. All recursions of a row share one list, with room for what configured capacities leave, so that rows at
    different recursions may be attended to in one call, and memory follows the recursions that tokens really take. With
    kv = share only the first recursion makes entries.

    length (B,): tokens of each row, start (B,): how many they were before the newest ones came. Of each position, taken
    (B, max_len) counts its recursions so far, going says whether it takes another, and score (B max_len,) is that
    one's score. All but score and the lists are on the host, in numpy: bookkeeping for a few rows is several times as
    quick as in tensors.
    """

    @torch.inference_mode(False)                # so that any later call may write
    def __init__(self, cfg, batch_size, max_len, device, dtype):
        self.max_len, self.device = max_len, device
        sizes, deeper = (cfg, device, dtype), range(1, cfg.n_loop if cfg.kv != "share" else 1)
        left = sum(max(1, int(cfg.share_of_tokens(r) * max_len + 1e-6)) for r in deeper)
        self.first, self.last = (KeyList(cfg.edge, batch_size, max_len, 0, 0, *sizes) for _ in range(2))
        self.recursions = KeyList(cfg.n_stored, batch_size, max_len, left, len(deeper) * max_len, *sizes)
        self.length, self.start = np.zeros((2, batch_size), np.int64)
        self.going, self.taken = np.zeros((batch_size, max_len), bool), np.zeros((batch_size, max_len), np.int64)
        self.score = torch.zeros(batch_size * max_len, device=device, dtype=torch.promote_types(dtype, torch.float32))
        self.rotary = None                  # the tables of all positions, when first needed

    @property
    def lengths(self):
        """(B,): tokens of each row."""
        return torch.tensor(self.length)

    @property
    def longest(self):
        return int(self.length.max())

    @property
    def lists(self):
        return self.first, self.recursions, self.last

    def nbytes(self):
        """Bytes held for keys and values."""
        return sum(x.nbytes for keys in self.lists for x in keys.kv)

    def reset(self, rows=None):
        """Empty the given rows (a list or tensor of indices; None: all), so that new sequences may start. What
        they held is zeroed: a NaN behind a mask would still poison the sum over values."""
        rows = slice(None) if rows is None else torch.as_tensor(rows, device="cpu").numpy()
        for keys in self.lists:
            keys.reset(rows)
        self.length[rows], self.start[rows], self.going[rows], self.taken[rows] = 0, 0, False, 0

    def begin(self, rows, n):
        """Take in n[r] tokens of row rows[r]. Returns (row, position) of each, (N,) both."""
        if (self.length[rows] + n).max() > self.max_len:
            raise ValueError(f"the cache is full: {self.length[rows].max()} tokens held, {n.max()} more, "
                             f"max_len {self.max_len}")
        self.start[rows] = self.length[rows]
        self.length[rows] += n
        return self.newest(rows, n)

    def goes_on(self, rows, n):
        """Whether any of the newest n[r] tokens of row rows[r] takes another recursion, (R,); host tensors."""
        rows, n = rows.numpy(), n.numpy()
        return torch.from_numpy(count_of_rows(self.going[self.newest(rows, n)], n) > 0)

    def exits(self, rows):
        """The recursions that the newest token of each of rows took, (R,); host tensors."""
        rows = rows.numpy()
        return torch.from_numpy(self.taken[rows, self.length[rows] - 1])

    def newest(self, rows, n):
        """The newest n[r] tokens of row rows[r]: (row, position), (N,) each."""
        row, step = spread(n)
        return rows[row], self.start[rows][row] + step


def on(device, x):
    """A numpy array as a tensor on the device."""
    return torch.from_numpy(x).to(device)


def spread(n):
    """Of tokens side by side, n (R,) of each row: each one's row, and which of the row's it is, (N,) both. Where every
    row has one token, quicker: slice(None), by which (R,) is (N,), and 0."""
    if n.tolist().count(1) == len(n):
        return slice(None), 0
    row = np.arange(len(n)).repeat(n)
    return row, np.arange(len(row)) - (n.cumsum() - n)[row]


def count_of_rows(mask, n):
    """How many of each row's tokens mask (N,) marks, (R,), where they stand side by side, n (R,) of each."""
    row = spread(n)[0]
    return mask.astype(np.int64) if isinstance(row, slice) else np.bincount(row[mask], minlength=len(n))


# What attention takes, measured on a CPU, where reading one key of a row takes 1: gathering and reading it, and a call
GATHER, CALL = 1.6, 400


def reads_all(n, B):
    """Whether attention for n of a cache's B rows reads the keys of all, where they lie, quicker than it gathers."""
    return GATHER * n > B


def indices(mask):
    """The indices that mask (N,) marks: a slice where they stand side by side, else (n,)."""
    which = np.flatnonzero(mask)
    return slice(which[0], which[-1] + 1) if len(which) and which[-1] - which[0] + 1 == len(which) else which


class Packed:
    """n[r] new tokens of row rows[r] at level[r], at positions `at` (N,), side by side: (1, N, C). Attention sees them
    in parts: rows that have one token, or of these those at the first level and those deeper, which see other sides of
    their lists; and rows that have several, so that little is padding. rows, level, n, at on the host."""

    def __init__(self, cfg, cache, level, rows, n, at):
        where, row = level[0], spread(n)[0]
        inner = 0 < where <= cfg.n_loop
        self.cache, self.at, self.kv = cache, on(cache.device, at)[None], cfg.kv if inner else "recursion"
        self.keys = cache.recursions if inner else cache.last if where else cache.first
        shallow = level <= 1 if inner else np.ones(len(level), bool)
        # the rows that make entries, and their tokens: all, but with kv = share
        makes = shallow if self.kv == "share" else None
        self.fresh, self.own = makes is None or makes.any(), slice(None)
        if makes is None:
            self.places = self.keys.add(rows, n, level, shallow, at)
        elif self.fresh:
            self.own = on(cache.device, np.flatnonzero(makes[row]))
            self.places = self.keys.add(rows[makes], n[makes], level[makes], shallow[makes], at[makes[row]])
        self.parts, kinds = [], [(n == 1) & shallow, (n == 1) & ~shallow]
        if not self.sides_apart(rows, *kinds):
            kinds = [n == 1]
        for some in (*kinds, n > 1):
            if some.any():
                some, tokens = indices(some), indices(some[row])
                self.parts.append(Part(cfg, self, level[some], shallow[some], rows[some], n[some], at[tokens], tokens))

    def sides_apart(self, rows, shallow, deeper):
        """Whether attention is quicker in two calls for the two kinds of rows that have one token, (R,) masks. On a
        GPU, where small batches wait for calls, it is not."""
        if self.cache.device.type != "cpu" or self.kv != "recursion" or not shallow.any() or not deeper.any():
            return False
        B, one, two = len(self.keys.deeper), shallow.sum(), deeper.sum()
        right, left = self.cache.length[rows[shallow]].max(), self.keys.deeper[rows[deeper]].max()
        read = lambda n, keys: keys * (B if reads_all(n, B) else GATHER * n)
        return read(one, right) + read(two, left) + CALL < read(one + two, left + right)

    def attend(self, attention, i, q, k, v):
        q, k, v = (x if x is None else x[0] for x in (q, k, v))
        if self.fresh:
            kv, (of, slot) = self.keys.kv[i], self.places
            kv[:, of, :, slot] = torch.stack([k, v], 1)[self.own].to(kv.dtype)    # (N, 2, G, D)
        if len(self.parts) == 1:
            return self.parts[0].attend(attention, i, q, k, v)[None]
        out = q.new_empty(len(q), q.size(1) * q.size(2))
        for part in self.parts:
            out[part.tokens] = part.attend(attention, i, *(x if x is None else x[part.tokens] for x in (q, k, v)))
        return out[None]


class Part:
    """Rows of a Packed place that attention sees together: n (R,) tokens of each, at positions at (N,), which are the
    place's `tokens`, a slice or indices. shallow (R,): whether a row is at the first level of its list."""

    def __init__(self, cfg, place, level, shallow, rows, n, at, tokens):
        self.keys, self.kv, self.max_len, device = place.keys, place.kv, place.cache.max_len, place.cache.device
        self.tokens = tokens if isinstance(tokens, slice) else on(device, tokens)
        self.shape, all_shallow = (len(rows), int(n.max())), shallow.all()
        dense = (n == self.shape[1]).all()                                  # else rows differ, and spread gives arrays
        self.pad = None if dense else tuple(on(device, x) for x in spread(n))
        # texts that begin here see themselves: no list is read, and no bias
        self.begins = (cfg.fast and self.shape[1] > 1 and (all_shallow or self.kv == "recursion") and
                       not place.cache.start[rows].any())
        self.all_rows = self.shape[1] == 1 and reads_all(len(rows), len(self.keys.deeper))
        self.level, self.rows, self.index = level[:, None], rows, on(device, rows)
        # the side, or sides, of the lists that are seen: the first level's, where slots are positions, and the deeper
        self.by_position = all_shallow or self.kv == "share"
        left = 0 if self.by_position else int(self.keys.deeper[rows[~shallow]].max())
        right = place.cache.length[rows[shallow] if self.kv == "recursion" else rows].max(initial=0)
        self.side = slice(self.keys.origin - left, self.keys.origin + right)
        self.at = at.reshape(self.shape) if dense else np.full(self.shape, self.max_len)
        if not dense:                                                       # padding may see all that its row sees
            self.at[spread(n)] = at
        self.bias = None                                                    # the same for all layers, made by the first

    def attend(self, attention, i, q, k, v):
        """q (N, H, D), k, v (N, G, D) of the part's tokens -> (N, H D)."""
        if self.begins:
            return self.unpadded(attention.among(*(self.padded(x) for x in (q, k, v)), None))
        kv = self.keys.kv[i][:, :, :, self.side]
        kv = (kv if self.all_rows else kv.index_select(1, self.index)).to(q.dtype)
        k, v = kv.transpose(2, 3)                                           # (B or R, S, G, D) each
        if self.bias is None:
            self.bias = self.make_bias(q.dtype if attention.cfg.fast else torch.promote_types(q.dtype, torch.float32))
        if self.all_rows:
            q = q.new_zeros(len(k), 1, *q.shape[1:]).index_copy_(0, self.index, q[:, None])
            return attention.among(q, k, v, self.bias)[self.index, 0]
        return self.unpadded(attention.among(self.padded(q), k, v, self.bias))

    def padded(self, x):
        """x (N, ..) as (R, T, ..)."""
        if self.pad is None:
            return x.unflatten(0, self.shape)
        return x.new_zeros(*self.shape, *x.shape[1:]).index_put(self.pad, x)

    def unpadded(self, x):
        """x (R, T, ..) as (N, ..)."""
        return x.flatten(0, 1) if self.pad is None else x[self.pad]

    def make_bias(self, dtype):
        """What is added to scores, (R, 1, T, S), or (B, 1, T, S) with all rows: 0 where a query sees an entry, else
        -inf. It sees those of its own recursion; of the first, with kv = share; with share_update of its own, and of
        the first for the tokens that its own lacks."""
        keys, device = self.keys, self.keys.device
        if self.by_position:
            seen, positions = np.ones((1, 1), bool), np.arange(self.side.stop - self.side.start)[None]
        else:
            level, positions = keys.level[self.rows, self.side], keys.at[self.rows, self.side]          # (R, S)
            seen = level == self.level
            if self.kv == "share_update":
                known = np.zeros((len(level), self.max_len), bool)                                      # by position
                row, entry = seen.nonzero()
                known[row, positions[row, entry]] = True
                seen = seen | (level == 1) & ~np.take_along_axis(known, positions, 1)
        if self.shape[1] > 1:
            seen, positions, at = (on(device, x) for x in (seen, positions, self.at))
            seen = seen[:, None] & (positions[:, None] <= at[..., None])                               # (R, T, S)
            return torch.zeros(seen.shape, device=device, dtype=dtype).masked_fill(~seen, -math.inf)[:, None]
        bias = np.where(seen & (positions <= self.at), np.float32(0), np.float32(-np.inf))
        if self.all_rows:                               # the others' results are dropped
            some, bias = bias, np.zeros((len(keys.deeper), bias.shape[1]), np.float32)
            bias[self.rows] = some
        return on(device, bias).to(dtype)[:, None, None]


# ---------------------------------------------------------------------------------------------------------
# the model

class Attention(nn.Module):
    """Causal self-attention with grouped key/value heads, among the tokens that a place lets see each other."""

    def __init__(self, cfg):
        super().__init__()
        self.cfg = cfg
        C, D = cfg.n_embd, cfg.head_dim
        self.wq = nn.Linear(C, cfg.n_head * D, bias=False)
        self.wk = nn.Linear(C, cfg.n_kv_head * D, bias=False)
        self.wv = nn.Linear(C, cfg.n_kv_head * D, bias=False)
        self.wo = nn.Linear(cfg.n_head * D, C, bias=False)
        if cfg.qk_norm:
            self.q_norm, self.k_norm = RMSNorm(D, cfg.norm_eps), RMSNorm(D, cfg.norm_eps)

    def forward(self, x, i, place, rotary):
        """x (B, T, C), the tokens of a place, in the i-th layer of its level; rotary their (cos, sin), or None."""
        q, k, v = self.wq(x).unflatten(-1, (-1, self.cfg.head_dim)), None, None         # (B, T, H, D)
        if self.cfg.qk_norm:
            q = self.q_norm(q)
        if place.fresh:
            k, v = (w(x).unflatten(-1, (-1, self.cfg.head_dim)) for w in (self.wk, self.wv))    # (B, T, G, D)
            k = self.k_norm(k) if self.cfg.qk_norm else k
        if rotary is not None:
            q, k = apply_rotary(q, *rotary), None if k is None else apply_rotary(k, *rotary)
        return self.wo(place.attend(self, i, q, k, v))

    def among(self, q, k, v, bias):
        """q (B, T, H, D); k, v (B, S, G, D); bias as attention_fast takes it -> (B, T, H D)."""
        (B, T, H, D), G, dropout = q.shape, k.size(2), self.cfg.dropout if self.training else 0.0
        if self.cfg.fast and T == 1 and H > G:      # the H / G query heads of a key head stand as its queries: quicker
            q, k, v = q.reshape(B, G, H // G, D), k.transpose(1, 2), v.transpose(1, 2)
            return F.scaled_dot_product_attention(q, k, v, bias, dropout).reshape(B, 1, H * D)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))                                # heads before positions
        attend = attention_fast if self.cfg.fast else attention_naive
        return attend(q, k, v, bias, dropout).transpose(1, 2).flatten(2)


class Block(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.norm1, self.norm2 = RMSNorm(cfg.n_embd, cfg.norm_eps), RMSNorm(cfg.n_embd, cfg.norm_eps)
        self.attn, self.mlp = Attention(cfg), MLP(cfg)
        self.drop = nn.Dropout(cfg.dropout)

    def forward(self, x, i, place, rotary):
        x = x + self.drop(self.attn(self.norm1(x), i, place, rotary))
        return x + self.drop(self.mlp(self.norm2(x)))


class Router(nn.Module):
    """Scores of states (..., C): (..., n_out), in float32 or better also under autocast, so that a token's decision
    does not hang on rounding. random, the control, has no weights: noise, in eval mode fixed for each position, with
    which a recursion takes its share of tokens."""

    def __init__(self, cfg, n_out, expected=0.5):
        super().__init__()
        self.n_out, self.expected, C = n_out, expected, cfg.n_embd          # expected: share of scores that are >= 0
        wide = {"mlp": 2 * C, "wide_mlp": 4 * C}.get(cfg.router_arch)
        self.layers = None
        if wide:
            self.layers = nn.Sequential(nn.Linear(C, wide, bias=False), nn.GELU(), nn.Linear(wide, n_out, bias=False))
        elif cfg.router_arch == "linear":
            self.layers = nn.Linear(C, n_out, bias=False)

    def forward(self, h, at, r=0):
        """h (..., C) of tokens at positions at, which broadcast to (...), before recursion r, from 0."""
        wide = torch.promote_types(h.dtype, torch.float32)
        if self.layers is None:
            shape = *h.shape[:-1], self.n_out
            noise = torch.rand(shape, device=h.device, dtype=wide) if self.training else torch.stack(
                [hashed(at, 64 * r + j) for j in range(self.n_out)], -1).to(wide).expand(shape)
            return noise - (1 - self.expected)
        device, weight = h.device.type, next(self.layers.parameters())
        mixed = device != "meta" and torch.is_autocast_enabled(device)
        with torch.autocast(device, enabled=False) if mixed else contextlib.nullcontext():
            return self.layers(h.to(weight.dtype)).to(wide)


def hashed(at, salt):
    """Numbers in (0, 1) that look random and depend on positions `at` and `salt` alone."""
    x = (at * 0x9E3779B1 + (salt + 1) * 0x85EBCA6B) % 2 ** 32
    for _ in range(2):
        x = ((x ^ (x >> 16)) * 0x45D9F3B) % 2 ** 32
    return ((x ^ (x >> 16)).double() + 0.5) / 2 ** 32


class Model(LanguageModel):
    """The Mixture-of-Recursions. See Config for its sizes and forward for its use."""

    def __init__(self, cfg):
        super().__init__()
        self.cfg = cfg
        self.wte = nn.Embedding(cfg.vocab_size, cfg.n_embd)
        self.drop = nn.Dropout(cfg.dropout)
        self.first, self.last = (nn.ModuleList(Block(cfg) for _ in range(cfg.edge)) for _ in range(2))
        self.blocks = nn.ModuleList(Block(cfg) for _ in range(cfg.n_stored))            # those that recursions share
        self.norm = RMSNorm(cfg.n_embd, cfg.norm_eps)
        self.head = nn.Linear(cfg.n_embd, cfg.vocab_size, bias=False)
        K, R = cfg.n_stored, cfg.n_loop
        inner = [self.blocks[cfg.stored(layer)] for layer in range(K * R)]
        self.levels = [list(self.first), *(inner[r * K:r * K + K] for r in range(R)), list(self.last)]
        self.loads = torch.zeros(R)         # in training, since the last step: tokens of each depth
        # in evaluation, of each position: tokens that took the last recursion
        reached = torch.zeros(cfg.block_size, dtype=torch.long)
        self.register_buffer("reached", reached, persistent=False)
        if cfg.capacity_warmup:
            self.register_buffer("warmup_step", torch.zeros((), dtype=torch.long))
        if cfg.router == "expert":
            parts = [cfg.share_of_tokens(r) / cfg.share_of_tokens(max(r - 1, 0)) for r in range(R)]
            self.routers = nn.ModuleList(Router(cfg, 1, part) for part in parts)
            if cfg.causal == "aux_router":
                self.aux_routers = nn.ModuleList(Router(cfg, 1, part) for part in parts)
        elif cfg.router == "token":
            self.router = Router(cfg, R)
            self.register_buffer("balance_bias", torch.zeros(R))
        self.init_weights()
        self.set_step(0)

    @torch.no_grad()
    def init_weights(self):
        """N(0, 0.02) everywhere, the two projections into the residual stream smaller by 1 / sqrt(2 n_layer)
        so that its variance does not grow with depth (GPT-2); norms start at 1."""
        for name, p in self.named_parameters():
            if p.dim() == 2:
                into_residual = name.endswith(("wo.weight", "w_down.weight"))
                p.normal_(0, 0.02 / math.sqrt(2 * self.cfg.n_layer) if into_residual else 0.02)
        if self.cfg.tie_embeddings:
            self.head.weight = self.wte.weight

    @property
    def context_limit(self):
        """The most tokens one cache or one forward may hold; None where the positions have no end."""
        return self.cfg.block_size if self.cfg.pos == "rope" else None

    @property
    def n_loop(self):
        """How many recursions a token may take: in eval mode exit_loop, where that is set."""
        return self.cfg.exit_loop if self.cfg.exit_loop and not self.training else self.cfg.n_loop

    @property
    def eval_metrics(self):
        """What an evaluation reports beside ce, of what forward logs in eval mode."""
        depths = tuple(f"depth{d}" for d in range(1, self.cfg.n_loop + 1))
        router = ("router_accuracy", "router_majority") if self.n_loop > 1 else ()
        return {"expert": ("ce_topk", *router, *depths, "dead"),
                "token": (*depths, "maxvio"), "none": ()}[self.cfg.router]

    def forward(self, idx, targets=None, cache=None, n_valid=None):
        """As in every model; aux also has depth1, ..: the share of tokens that take so many
        recursions, and what the router does (see its functions). In eval mode, and with a cache,
        tokens are chosen as in decoding, and with router=expert "ce_topk" is what choosing among
        all would give; in training mode that is "ce"."""
        if targets is None or cache is not None or idx.size(1) == 0:
            return super().forward(idx, targets, cache, n_valid)
        h, taken, losses, aux = self.whole(idx, causal=not self.training)
        logits, ce, told = self.predict(h, targets)
        aux = told | {k: v.detach() for k, v in aux.items()}
        if self.cfg.router == "expert" and not self.training:
            ahead, _, _, peeking = self.whole(idx, causal=False)
            aux["ce_topk"] = self.predict(ahead, targets)[1].detach()
            self.reached[:idx.size(1)] += (taken == self.n_loop).sum(0)[:self.cfg.block_size]
            aux |= {name: v.detach() for name, v in peeking.items() if name.startswith("router_")}
        return logits, ce + sum(losses) if self.training else ce, aux

    def hidden(self, idx, cache, n_valid):
        if cache is not None:
            return self.cached(idx, cache, n_valid)
        return self.whole(idx, causal=not self.training)[0]

    def whole(self, idx, causal):
        """Of idx (B, T) without a cache: states after the last norm, the recursions that each token
        takes (B, T), what training adds to the loss (a list), and what to log. causal: tokens are
        chosen as in decoding."""
        self.check_context(idx.size(1), "{} tokens are")
        h, every = self.drop(self.wte(idx)), Everyone(idx.size(1), idx.device)
        h = self.through(h, 0, every)
        route = {"expert": self.expert_choice, "token": self.token_choice, "none": self.fixed_depth}[self.cfg.router]
        h, taken, losses, aux = route(h, causal)
        if self.cfg.router != "none":
            aux |= {f"depth{d}": (taken == d).float().mean() for d in range(1, self.cfg.n_loop + 1)}
        return self.norm(self.through(h, self.cfg.n_loop + 1, every)), taken, losses, aux

    @torch.no_grad()
    def recursions(self, idx):
        """How many recursions each token of idx (B, T) takes when it is decoded, (B, T)."""
        return self.whole(idx, causal=True)[1]

    def through(self, h, level, place):
        """The layers of a level (of recursions any, where tokens stand at several) on the tokens of a place."""
        rotary = self.rotary(place, h.dtype) if self.cfg.pos == "rope" else None
        for i, block in enumerate(self.levels[level]):
            h = block(h, i, place, rotary)
        return h

    def rotary(self, place, dtype):
        """The rotary tables of a place's tokens. A cache keeps those of all its positions."""
        make = lambda at: rotary_tables(at, self.cfg.head_dim, self.cfg.rope_theta, dtype)
        if not isinstance(place, Packed):
            return make(place.at)
        cache = place.cache
        if cache.rotary is None:
            with torch.inference_mode(False):
                every = torch.arange(cache.max_len, device=cache.device)
                cache.rotary = torch.stack(make(every), 1)
        return cache.rotary[place.at].unbind(-2)

    # routing -------------------------------------------------------------------------------------------------

    def recursion(self, r, h, chosen, gate, first):
        """h (B, T, C) after recursion r, from 0, of the chosen tokens (None: all): x + gate F(x), gate (B, T); F(x)
        where gate is None. Fast: only they are run, side by side."""
        T, kv = h.size(1), self.cfg.kv
        add = lambda x, y, g: y if g is None else x + (g[..., None] * y).to(x.dtype)
        if chosen is None:
            shares = kv == "share" or kv == "share_update" and r == 0
            place = Everyone(T, h.device, first if shares else None, fresh=r == 0 or kv != "share")
            return add(h, self.through(h, r + 1, place), gate)
        # compiled, no shape may depend on the data: tokens that choose their depth are all run
        if not self.cfg.fast or chosen.idx is None and torch.compiler.is_compiling():
            y = self.through(h, r + 1, Masked(chosen.mask, kv, first))
            return torch.where(chosen.mask[..., None], add(h, y, gate), h)
        place, states = Gathered(chosen, kv, first), h.flatten(0, 1)
        x = states.index_select(0, place.places)
        gate = None if gate is None else gate.flatten().index_select(0, place.places)
        new = add(x, self.through(x[None], r + 1, place)[0], gate).to(h.dtype)
        return states.index_copy(0, place.places, new).view_as(h)

    def fixed_depth(self, h, causal):
        """router=none: all recursions for all tokens."""
        first = {}
        for r in range(self.n_loop):
            h = self.recursion(r, h, None, None, first)
        return h, torch.full(h.shape[:2], self.n_loop, device=h.device), [], {}

    def capacity(self, r, T):
        """k of recursion r, from 0: how many of T tokens it chooses."""
        return max(1, int(T * self.cfg.share_of_tokens(r, self.step_number) + 1e-9))

    def takes_all(self, r):
        """Whether recursion r has room for all tokens, so that nothing is to be decided: the first
        one, and at step 0 of a capacity warm-up, where a new model stands until set_step, every
        one."""
        return self.cfg.share_of_tokens(r, self.step_number) == 1

    def gate(self, s):
        """What a recursion's output counts, by the scores of its tokens."""
        return self.cfg.alpha * (torch.tanh(s) if self.cfg.router_func == "tanh" else torch.sigmoid(s))

    def expert_choice(self, h, causal):
        """Recursions choose tokens. Logged: aux, the mean BCE of what decides in decoding, summed
        over recursions; where there are later recursions than the first, router_accuracy, how often
        that is right about the tokens that compete for them, and router_majority, how often always
        saying the commoner thing would be; dead, the share of positions that the last recursion
        chose in no row."""
        B, T = h.shape[:2]
        at, first, active, losses = torch.arange(T, device=h.device), {}, None, []
        taken = torch.zeros(B, T, device=h.device, dtype=torch.long)
        for r in range(self.n_loop):
            s = self.routers[r](h, at, r)[..., 0]                                           # (B, T)
            decides = self.aux_routers[r](h.detach(), at, r)[..., 0] if self.cfg.causal == "aux_router" else s
            if causal:
                chosen = active if self.takes_all(r) else Chosen(decides >= 0 if active is None else
                                                                 active.mask & (decides >= 0))
            else:
                # in training a tensor's size, so that one compiled step takes every k of a warm-up
                k = self.rooms[r].size(0) if T == self.cfg.block_size else self.capacity(r, T)
                chosen = self.choose(s, active, k) if r else None
                losses.append(self.decision_loss(s, decides, active, chosen))
            h = self.recursion(r, h, chosen, self.gate(s), first)
            taken += 1 if chosen is None else chosen.mask
            active = chosen
        aux = {"dead": h.new_zeros(()) if active is None else 1 - active.mask.any(0).float().mean()}
        if losses:
            bce, z, *found = (torch.stack(x) for x in zip(*losses))         # (R,) each
            aux["aux"] = bce.sum()
            weight = self.cfg.aux_weight * (self.cfg.router_arch != "random")
            losses = [weight * aux["aux"], self.cfg.z_loss * z.sum()]
            if self.n_loop > 1:
                right, commoner, count = (x[1:].sum().float() for x in found)
                aux |= {"router_accuracy": right / count, "router_majority": commoner / count}
        return h, taken, losses, aux

    def choose(self, s, active, k):
        """The k tokens of each row with the highest scores s (B, T) among the active ones (None: all)."""
        s = s.detach() if active is None else s.detach().masked_fill(~active.mask, -math.inf)
        idx = s.topk(k, 1).indices.sort(1).values
        return Chosen(torch.zeros_like(s, dtype=torch.bool).scatter(1, idx, True), idx)

    def decision_loss(self, s, decides, active, chosen):
        """(BCE of what decides in decoding, against who was chosen; squared scores), means over the tokens that
        compete; and how many of them (decide right, do the commoner thing, are there)."""
        there = torch.ones_like(s, dtype=torch.bool) if active is None else active.mask
        was = there if chosen is None else chosen.mask
        mean = lambda x: (x * there).sum() / there.sum()
        count, yes, right = there.sum(), was.sum(), (((decides >= 0) == was) & there).sum()
        bce = F.binary_cross_entropy_with_logits(decides, was.to(s.dtype), reduction="none")
        return mean(bce), mean(s ** 2), right, torch.maximum(yes, count - yes), count

    def token_depth(self, h, at):
        """Of states h (..., C) before the recursions: scores (..., R), p (..., R), and the depth that each token
        chooses, from 0 (...)."""
        scores = self.router(h, at)
        p = scores.softmax(-1) if self.cfg.router_func == "softmax" else self.cfg.alpha * scores.sigmoid()
        return scores, p, (p.detach() + self.balance_bias).argmax(-1).clamp(max=self.n_loop - 1)

    def token_choice(self, h, causal):
        """Tokens choose a depth; causal as it is. Logged: balance, the balancing loss without its factor, which is 1 in
        perfect balance; maxvio, how far the fullest depth is above the mean, in means; entropy of the mean p, nats."""
        R, at, first, x = self.cfg.n_loop, torch.arange(h.size(1), device=h.device), {}, h
        scores, p, depth = self.token_depth(h, at)                                      # depth (B, T), from 0
        for r in range(self.n_loop):
            x = self.recursion(r, x, None if r == 0 else Chosen(depth >= r), None, first)
        x = h + (p.gather(-1, depth[..., None]) * x).to(h.dtype)
        loads = torch.stack([(depth == d).sum() for d in range(R)])
        if self.training:
            self.loads = self.loads.to(loads.device) + loads
        share, q = R * loads.to(p) / loads.sum(), (p / p.sum(-1, keepdim=True)).flatten(0, -2).mean(0)
        balance = (share * p.flatten(0, -2).mean(0)).sum()
        aux = {"balance": balance, "maxvio": share.max() - 1, "entropy": -(q * q.log()).sum()}
        losses = [self.cfg.balance_weight * balance] if self.cfg.balance == "loss" else []
        return x, depth + 1, losses + [self.cfg.z_loss * scores.logsumexp(-1).square().mean()], aux

    def set_step(self, step):
        """The capacity warm-up stands at this training step; an evaluation may begin, see
        end_evaluation. rooms[r] has as many rows as recursion r chooses of block_size tokens."""
        cfg, self.step_number, self.loads = self.cfg, step, self.loads.to(self.wte.weight.device)
        self.reached.zero_()
        sizes = [self.capacity(r, cfg.block_size) for r in range(cfg.n_loop)]
        self.rooms = [torch.empty(k, 0, device="cpu") for k in sizes]
        if cfg.capacity_warmup:
            self.warmup_step.fill_(step)
            for room in self.rooms:
                torch._dynamo.maybe_mark_dynamic(room, 0)       # compiled: one graph for all sizes

    def _load_from_state_dict(self, weights, prefix, *rest):
        """Weights that come without the step of a capacity warm-up are from before it was saved: it
        is over."""
        if not self.cfg.capacity_warmup:
            weights.pop(prefix + "warmup_step", None)
            return super()._load_from_state_dict(weights, prefix, *rest)
        weights.setdefault(prefix + "warmup_step", torch.tensor(self.cfg.capacity_warmup))
        super()._load_from_state_dict(weights, prefix, *rest)
        self.set_step(int(self.warmup_step))

    def end_evaluation(self, summed):
        """What is told of all batches since set_step together: dead, the share of positions of
        which no token took the last recursion. summed as in end_step."""
        if self.cfg.router != "expert":
            return {}
        return {"dead": summed(*self.reached.tolist()).count(0) / self.cfg.block_size}

    @torch.no_grad()
    def end_step(self, summed):
        """After each optimizer step: loss_free moves its biases by the loads of all micro-batches and processes.
        summed(*numbers) adds up numbers over processes, a list of floats."""
        if self.cfg.router == "token" and self.cfg.balance == "loss_free":
            loads = torch.tensor(summed(*self.loads.tolist()))
            self.balance_bias += self.cfg.balance_rate * (loads.mean() - loads).sign().to(self.balance_bias)
        self.loads = torch.zeros_like(self.loads)
        if self.cfg.capacity_warmup:
            self.warmup_step.fill_(self.step_number + 1)        # where weights saved now stand

    # decoding ------------------------------------------------------------------------------------------------

    def cached(self, idx, cache, n_valid):
        """States after the last norm of idx (B, T) behind the tokens of a cache."""
        B, T = idx.shape
        rows, n = torch.arange(B), torch.full((B,), T) if n_valid is None else n_valid.cpu().clamp(0, T)
        where = (torch.arange(T) < n[:, None]).to(idx.device)
        h = self.enter(idx[where], cache, rows, n)
        for r in range(self.n_loop):
            h = self.loop(h, torch.full((B,), r), cache, rows, n)
        h = self.finish(h, cache, rows, n)
        return h.new_zeros(B, T, h.size(-1)).masked_scatter(where[..., None], h)

    @torch.no_grad()
    def enter(self, idx, cache, rows, n):
        """Take in idx (N,), n[r] new tokens of row rows[r] side by side; rows, n (R,) on the host. Returns states
        before the first recursion, (N, C); with router=token (N, 2 C), the second half kept for finish."""
        rows, n = rows.numpy(), n.numpy()
        of, at = cache.begin(rows, n)
        h = self.packed(self.drop(self.wte(idx)), np.zeros_like(n), cache, rows, n, at)
        cache.going[of, at] = self.decide(h, h, np.zeros_like(at), cache, of, at)
        return torch.cat([h, h], -1) if self.cfg.router == "token" else h

    def packed(self, h, level, cache, rows, n, at):
        """The layers of level[r] on n[r] tokens of row rows[r]: h (N, C) in and out."""
        if not len(h) or not self.levels[level[0]]:
            return h
        if self.cfg.share.endswith("sequence") and (level != level[0]).any():
            raise ValueError(f"share={self.cfg.share}: rows at different depths need share=cycle or middle_cycle")
        return self.through(h[None], level[0], Packed(self.cfg, cache, level, rows, n, at))[0]

    # hooks of serve.py, by its contract

    def embed(self, idx, context):
        h = self.wte(idx)
        for i, block in enumerate(self.levels[0]):
            h = block(h[None], i, FromContext(context), None)[0]
        return torch.cat([h, h], -1) if self.cfg.router == "token" else h

    def takes(self, h, depth):
        C, at, n = self.cfg.n_embd, torch.zeros(len(h), dtype=torch.long, device=h.device), depth.numpy()
        if self.cfg.router == "token":
            return self.token_depth(h[:, C:], at)[2] >= depth.to(h.device)
        if self.cfg.router == "none" or self.takes_all(self.cfg.n_loop - 1):
            return torch.ones(len(h), dtype=torch.bool, device=h.device)
        routers = self.routers if self.cfg.causal == "aux_loss" else self.aux_routers
        return (self.scores(routers, h, n, at) >= 0) | (depth == 0).to(h.device)

    def loop_with(self, h, depth, context):
        C, y = self.cfg.n_embd, h[None, :, :self.cfg.n_embd]
        for i, block in enumerate(self.levels[1 + int(depth[0])]):
            y = block(y, i, FromContext(context), None)
        y = y[0]
        if self.cfg.router == "expert":
            at = torch.zeros(len(h), dtype=torch.long, device=h.device)
            y = h + self.gate(self.scores(self.routers, h, depth.numpy(), at))[:, None].to(h.dtype) * y
        return torch.cat([y, h[:, C:]], -1)

    def finish_with(self, h, context):
        if self.cfg.router == "token":
            x, h = h.split(self.cfg.n_embd, -1)
            _, p, depth = self.token_depth(h, torch.zeros(len(h), dtype=torch.long, device=h.device))
            h = h + (p.gather(-1, depth[:, None]) * x).to(h.dtype)
        for i, block in enumerate(self.levels[-1]):
            h = block(h[None], i, FromContext(context), None)[0]
        return h

    def loop(self, h, depth, cache, rows=None, n=None):
        if rows is None:
            return self.loop_with(h, depth, cache)
        return self.cached_loop(h, depth, cache, rows, n)

    def cached_loop(self, h, depth, cache, rows, n):
        """One recursion, depth (R,) from 0, further for those of the newest n[r] tokens of row rows[r] that take it;
        states h as enter gives them, side by side. Then cache.going tells who takes another one."""
        depth, rows, n = depth.numpy(), rows.numpy(), n.numpy()
        of, at = cache.newest(rows, n)
        active = cache.going[of, at]
        if active.all():
            return self.step_all(h, depth, cache, rows, n, of, at)
        if not active.any():
            return h
        which, taking = on(h.device, np.flatnonzero(active)), count_of_rows(active, n)
        some = taking > 0
        new = self.step_all(h[which], depth[some], cache, rows[some], taking[some], of[active], at[active])
        return h.index_copy(0, which, new)

    def step_all(self, h, depth, cache, rows, n, of, at):
        """loop, where all tokens take the recursion; of, at (N,): their rows and positions."""
        C, r = self.cfg.n_embd, depth[spread(n)[0]]
        x, kept = h[:, :C], h[:, C:]
        y = self.packed(x, depth + 1, cache, rows, n, at)
        if self.cfg.router == "expert":
            s = cache.score[on(h.device, of * cache.max_len + at)]
            y = x + (self.gate(s)[:, None] * y).to(x.dtype)
        cache.taken[of, at] += 1
        cache.going[of, at] = self.decide(y, kept, r + 1, cache, of, at)
        return (torch.cat([y, kept], -1) if kept.size(1) else y).to(h.dtype)

    def decide(self, x, kept, r, cache, of, at):
        """Which of the tokens, with states x (N, C) and what enter kept, take recursion r (N,), from 0, (N,) bool on
        the host. Their scores go to the cache. of, at (N,): their rows and positions."""
        goes = r < self.n_loop
        if self.cfg.router == "token" and (r > 0).any():
            return goes & (self.token_depth(kept, on(x.device, at))[2].cpu().numpy() >= r)
        if self.cfg.router != "expert" or not goes.any():
            return goes
        r, here = np.minimum(r, self.n_loop - 1), on(x.device, at)  # who has taken all gets a score too: unread
        s = self.scores(self.routers, x, r, here)
        cache.score[on(x.device, of * cache.max_len + at)] = s
        if self.takes_all(self.cfg.n_loop - 1) or not r.any():
            return goes
        decides = s if self.cfg.causal == "aux_loss" else self.scores(self.aux_routers, x, r, here)
        return goes & ((decides >= 0).cpu().numpy() | (r == 0))

    def scores(self, routers, x, r, at):
        """Each token's score (N,) by the router of its recursion r (N,), from 0, on the host."""
        least, most = int(r.min()), int(r.max())
        s = routers[least](x, at, least)[:, 0]
        for value in range(least + 1, most + 1):
            s = torch.where(on(x.device, r == value), routers[value](x, at, value)[:, 0], s)
        return s

    def finish(self, h, cache, rows=None, n=None):
        return self.finish_with(h, cache) if rows is None else self.cached_finish(h, cache, rows, n)

    def cached_finish(self, h, cache, rows, n):
        """The states (N, C) that logits takes, of tokens that have left: n[r] newest ones of row rows[r]."""
        rows, n = rows.numpy(), n.numpy()
        at = cache.newest(rows, n)[1]
        if self.cfg.router == "token":
            x, h = h.split(self.cfg.n_embd, -1)
            _, p, depth = self.token_depth(h, on(h.device, at))
            h = h + (p.gather(-1, depth[:, None]) * x).to(h.dtype)
        return self.norm(self.packed(h, np.full_like(n, self.cfg.n_loop + 1), cache, rows, n, at))

    def init_cache(self, batch_size, max_len):
        """An empty cache for batch_size rows of up to max_len tokens (under rope at most
        block_size). A model with a capacity warm-up decodes as of its step: see takes_all."""
        self.check_context(max_len, "max_len={} is")
        w = self.wte.weight
        return LoopCache(self.cfg, batch_size, max_len, w.device, compute_dtype(w))

    def flops_per_token(self, paper=False, step=None):
        """Floating-point operations of one token's forward and backward in a sequence of
        block_size, averaged over positions, tokens chosen as at a training step (None: after a
        capacity warm-up): 6 for each weight of a matrix product, and 12 C for each key that a query
        sees (q k and p v forward, twice that backward), each times the share of tokens that need
        it. Routers score all tokens.

        paper: by the accounting of Appendix C, which counts the forward only, a causal sequence as half its square,
        keys and values as if n_kv_head were n_head, and neither head nor router."""
        cfg, T, C = self.cfg, self.cfg.block_size, self.cfg.n_embd
        block = self.blocks[0]
        weights, kv = (sum(p.numel() for p in part.parameters() if p.dim() == 2)
                       for part in (block, nn.ModuleList([block.attn.wk, block.attn.wv])))
        if paper:
            weights, kv = weights - kv + 2 * C * C, 2 * C * C
        layers = [(1.0, 1.0, 1.0)] * 2 * cfg.edge                       # share of tokens, of fresh keys, of seen keys
        for r in range(cfg.n_loop):
            c = cfg.share_of_tokens(r, step)
            layers += [(c, 0.0 if r and cfg.kv == "share" else c, c if cfg.kv == "recursion" else 1.0)] * cfg.n_stored
        products = sum(c * (weights - kv) + fresh * kv for c, fresh, _ in layers)
        if paper:
            return 2.0 * products + 2.0 * T * C * sum(c * seen for c, _, seen in layers)
        sizes = lambda router: [p.numel() for p in router.parameters()]
        routers = sum(sizes(self.router)) if cfg.router == "token" else 0
        for router in getattr(self, "routers", []):
            routers += sum(sizes(router))
        for router in getattr(self, "aux_routers", []):     # their first product has no gradient in
            routers += sum(sizes(router)) - sum(sizes(router)[:1]) / 3
        keys = sum(c * (seen * T + 1) / 2 for c, _, seen in layers)
        return 6.0 * (products + routers + cfg.vocab_size * C) + 12.0 * C * keys

    def steps_within(self, max_flops, tokens):
        """How many training steps of so many tokens max_flops pay for. Those of a capacity
        warm-up cost more."""
        cost = lambda step: tokens * self.flops_per_token(self.cfg.paper_flops, step)
        for step in range(self.cfg.capacity_warmup):
            if cost(step) > max_flops:
                return step
            max_flops -= cost(step)
        return self.cfg.capacity_warmup + int(max_flops / cost(None))


# ---------------------------------------------------------------------------------------------------------
# conversion of a trained model

@torch.no_grad()
def convert(model, weights):
    """Start model from `weights`, the state dict of a model_gpt of the same sizes: the first and the last layer as they
    are, the shared blocks from the layers between as relaxed models do it (init; Section 4.1, Table 9)."""
    cfg, own = model.cfg, model.state_dict()
    layer = lambda n: {name.split(".", 2)[2]: w for name, w in weights.items() if name.startswith(f"blocks.{n}.")}
    for name in [name for name in weights if not name.startswith("blocks.")]:
        own[name].copy_(weights[name])
    for edge, n in ((model.first, 0), (model.last, cfg.n_layer - 1)):
        for block in edge:
            block.load_state_dict(layer(n))
    inner, K = range(cfg.edge, cfg.n_layer - cfg.edge), cfg.n_stored
    for k, block in enumerate(model.blocks):
        tied = [n for n in inner if cfg.stored(n - cfg.edge) == k]
        spaced = round(cfg.edge + k * ((len(inner) - 1) / max(1, K - 1)))   # halves to even
        sources = {"average": tied, "stepwise": [spaced], "lower": [inner[k]], "upper": [inner[k - K]], "random": []}
        found = [layer(n) for n in sources[cfg.init]]
        if found:
            block.load_state_dict({name: sum(x[name] for x in found) / len(found) for name in found[0]})

"""
Recursive and Relaxed Recursive Transformers: a stack of tied layers run in loops, relaxed by low-rank deltas.

Bae et al. 2024, "Relaxed Recursive Transformers: Effective Parameter Sharing with Layer-wise LoRA". The block is
that of model_gpt.py (Llama's). L = n_layer unrolled layers share K = L / n_loop stored ones:

    h_l+1 = Block(h_l; stored layer l mod K, deltas of layer l)       l = 0 .. L - 1                     (Eq. 2, 3)
    each matrix product of it: y = W' x + B_l A_l x                    A_l (r, in), B_l (out, r)

rank = 0 is the Recursive Transformer, whose loops are all alike; with full rank the deltas can undo the tying. One
loop is K layers in a row; loop b is b of them deep. Every unrolled layer has keys and values of its own.

Conversion (Section 2.2 and 2.3; `convert`). The stored layers start from those of a trained, untied model, the deltas
from the truncated SVD of what is left, U S V^T = W_l - W': B = U_r S_r, A = V_r^T, applied as they are (a factor
alpha / r would undo the reconstruction). The stored norms' weights g' differ from the source's g_l: a matrix that
reads a norm is W_l diag(g_l / g') to the converted model, and it is that which the SVD approximates.
A departure: with stepwise the paper's Appendix C starts all deltas of the first loop at zero. Here
every layer follows Eq. 4, and zero is only what equals its stored layer: else full rank would not
give the source back.

Early exit (Section 3.7). A token may leave after any loop: the shared norm and head turn its state into logits.
Training for it adds the losses of the earlier loops (early_exit). A token that has left has no keys at deeper loops.
They are made before a later token needs them: fill = exact runs the waiting tokens through the deeper loops, several
in one step, as soon as a later one goes there; fill = propagate projects them from the state the token left with.

For an engine that batches over depth (sample.py): enter(idx, ..), loop(h, depth, cache, rows, n), leave(h, depth,
cache, rows) and logits(h), in which each row may stand at another loop, as all use the same layers (Section 2.4).

`fast=False` is the equations as they stand: two more products a matrix, row by row where depths are mixed. `fast=True`:
W' + B A is formed once where tokens are many. Where they are few and of mixed depths, all A, then all B, go to all
tokens in one product each, and each token keeps its own depth's: at small ranks cheaper than gathering A, B by row.

Names: B batch, T new tokens, S cached and new ones, R rows of a cache, N tokens of all rows side by side, H query
heads, G key/value heads, D head size, C width, K stored layers, r rank; depth: which loop, from 0.
"""
import functools
import math
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F

from model_gpt import (LanguageModel, RMSNorm, alibi_slopes, apply_rotary, attention_bias,
                       attention_fast, attention_naive, check_choice, check_sizes, compute_dtype,
                       cross_entropy, rotary_tables)


@dataclass
class Config:
    block_size: int = 256        # tokens in a training sequence; also the longest context under rope
    vocab_size: int = 257        # number of token ids
    n_layer: int = 4             # unrolled blocks: all loops together
    n_head: int = 4              # query heads
    n_kv_head: int = 0           # key/value heads, each shared by n_head / n_kv_head query heads (0: n_head)
    n_embd: int = 128            # width of the residual stream
    dropout: float = 0.0         # on embeddings, attention weights and both residual branches
    fast: bool = True            # deltas merged, or of all depths at once, fused attention; false: the equations
    n_loop: int = 2              # loops over the n_layer / n_loop stored blocks
    rank: int = 8                # of the deltas of every matrix at every depth (0: none, the Recursive Transformer)
    share: str = "cycle"         # which stored block layer l is: cycle: l mod K | sequence: l // n_loop | cycle_rev
    init: str = "average"        # stored blocks from a source: average | stepwise | lower | upper | random
    norm_init: str = "avg"       # with init=average, norms: avg | choice (of one layer) | zero (with rank=0 only)
    lora_init: str = "svd"       # deltas from a source: svd of what the tying lost | zero (B = 0)
    early_exit: str = "none"     # train the earlier loops' outputs too: none | weighted | aggressive
    exit_weight: float = 0.1     # aggressive: the earlier loops' losses count so much each, the last one's 1
    exit_loss: str = "ce"        # the earlier loops' losses: ce | kl (from the last loop's distribution) | both
    exit_loop: int = 0           # in eval mode every token leaves after this loop, from 1 (0: the last)
    fill: str = "exact"          # deeper keys of tokens that left early: exact | propagate (from their last state)
    n_mlp: int = 0               # hidden width of the MLP (0: 8/3 n_embd for swiglu, 4 n_embd for gelu)
    mlp: str = "swiglu"          # swiglu | gelu
    pos: str = "rope"            # rope | alibi | none
    rope_theta: float = 10000.0  # rotary base
    qk_norm: bool = False        # RMSNorm with a weight on each head's query and key, before rotary
    window: int = 0              # sliding window: a query sees its last `window` keys, itself included (0: all)
    tie_embeddings: bool = True  # the head is the embedding matrix
    norm_eps: float = 1e-5       # RMSNorm's epsilon

    SOURCES = ("gpt",)           # models whose weights init_from converts
    # what a later stage, which starts from this model's weights, may set anew
    STAGES = ("early_exit", "exit_weight", "exit_loss", "exit_loop", "fill")

    def __post_init__(self):
        self.n_kv_head = self.n_kv_head or self.n_head
        check_sizes(self)
        for name, allowed in CHOICES.items():
            check_choice(self, name, allowed)
        if self.pos == "rope" and self.head_dim % 2:
            raise ValueError(f"pos=rope needs an even head size: n_embd / n_head = {self.head_dim}")
        if self.n_mlp < 0 or self.window < 0:
            raise ValueError("n_mlp and window are positive, or 0 for their default")
        if self.rope_theta <= 0 or self.norm_eps <= 0:
            raise ValueError("rope_theta and norm_eps must be positive")
        if self.n_loop < 1 or self.n_layer % self.n_loop:
            fit = [b for b in range(1, min(self.n_layer, 1000) + 1) if self.n_layer % b == 0]
            raise ValueError(f"n_loop={self.n_loop} must divide n_layer={self.n_layer}: {', '.join(map(str, fit))}")
        if self.rank < 0 or self.exit_weight < 0:
            raise ValueError("rank and exit_weight must not be negative")
        if not 0 <= self.exit_loop <= self.n_loop:
            raise ValueError(f"exit_loop={self.exit_loop} must be 0 (the last) or one of the {self.n_loop} loops")
        if self.n_mlp == 0:  # a multiple of 32 keeps the products aligned
            self.n_mlp = 4 * self.n_embd if self.mlp == "gelu" else 32 * math.ceil(self.n_embd / 12)

    @property
    def head_dim(self):
        return self.n_embd // self.n_head

    @property
    def n_stored(self):
        """K: blocks whose weights exist."""
        return self.n_layer // self.n_loop

    def stored(self, layer):
        """Which stored block unrolled layer `layer` is (Section 2.1; cycle_rev: Takase and Kiyono 2021, the last
        loop backwards)."""
        if self.share == "sequence":
            return layer // self.n_loop
        back = self.share == "cycle_rev" and layer >= self.n_layer - self.n_stored and self.n_loop > 1
        return self.n_layer - 1 - layer if back else layer % self.n_stored

    def tied(self, k):
        """The unrolled layers of stored block k, one for each use of it, in order: use u has the deltas number u."""
        return [layer for layer in range(self.n_layer) if self.stored(layer) == k]


CHOICES = {"mlp": ("swiglu", "gelu"), "pos": ("rope", "alibi", "none"), "share": ("cycle", "sequence", "cycle_rev"),
           "init": ("average", "stepwise", "lower", "upper", "random"), "norm_init": ("avg", "choice", "zero"),
           "lora_init": ("svd", "zero"), "early_exit": ("none", "weighted", "aggressive"),
           "exit_loss": ("ce", "kl", "both"), "fill": ("exact", "propagate")}


# ---------------------------------------------------------------------------------------------------------
# what is tied, and what is not

class RelaxedLinear(nn.Module):
    """y = W' x + B_u A_u x, without bias (Eq. 3): weight W' (out, in) is tied; a (n_loop, r, in) and b (n_loop, r, out)
    hold A_u and B_u^T of each use u of the block, so that each is one matrix for all uses. r = min(rank, in, out)."""

    def __init__(self, n_in, n_out, cfg):
        super().__init__()
        self.weight, r = nn.Parameter(torch.empty(n_out, n_in)), min(cfg.rank, n_in, n_out)
        self.rank, self.fast = r, cfg.fast
        if r:
            self.a = nn.Parameter(torch.empty(cfg.n_loop, r, n_in))
            self.b = nn.Parameter(torch.empty(cfg.n_loop, r, n_out))

    def forward(self, x, uses):
        """x (..., in). uses: one number for all of x; or, for x (1, N, in) whose tokens differ, (N, n_loop, 1) with 1
        at each token's use, else 0: all A are applied to all tokens and each keeps its own, three products in all."""
        if not self.rank:
            return F.linear(x, self.weight)
        if isinstance(uses, int):
            return self.of_one_use(x, uses)
        y, x = F.linear(x[0], self.weight), x[0]
        if self.fast:
            own = F.linear(x, self.a.flatten(0, 1)).view(len(x), -1, self.rank) * uses  # (N, n_loop, r)
            return torch.addmm(y, own.flatten(1), self.b.flatten(0, 1))[None]
        deltas = [self.b[u].t() @ (self.a[u] @ x[n]) for n, u in enumerate(uses[..., 0].argmax(1).tolist())]
        return (y + torch.stack(deltas))[None]

    def of_one_use(self, x, u):
        """All of x with the deltas of use u. Forming W' + B A costs out * r * in, applying A and then B to N tokens
        N * r * (in + out): the cheaper of the two."""
        n_out, n_in = self.weight.shape
        if not self.fast:
            return F.linear(x, self.weight) + F.linear(F.linear(x, self.a[u]), self.b[u].t())
        if x.numel() // n_in * (n_in + n_out) > n_in * n_out:
            return F.linear(x, torch.addmm(self.weight, self.b[u].t(), self.a[u]))
        y = torch.addmm(F.linear(x, self.weight).flatten(0, -2), F.linear(x, self.a[u]).flatten(0, -2), self.b[u])
        return y.view(*x.shape[:-1], n_out)


class HeadNorm(nn.Module):
    """RMSNorm on heads (B, T, heads, D) with a weight (D,) for each use: no matrix follows it that could take in the
    difference between depths, so it is not tied."""

    def __init__(self, cfg):
        super().__init__()
        self.eps = cfg.norm_eps
        self.weights = nn.ParameterList(torch.ones(cfg.head_dim) for _ in range(cfg.n_loop))

    def forward(self, x, uses):
        x = F.rms_norm(x, x.shape[-1:], eps=self.eps)
        if isinstance(uses, int):
            return x * self.weights[uses].to(x.dtype)
        w = torch.stack(list(self.weights))[uses[..., 0].argmax(1)]                     # (N, D)
        return x * w[:, None].to(x.dtype)


# ---------------------------------------------------------------------------------------------------------
# where tokens are

class DepthCache:
    """Keys and values in static buffers, k[i] and v[i] (n_loop, B, G, max_len, D) of layer i of
    every loop: contiguous for each head, as attention reads them.

    filled (n_loop, B), on the host, counts the tokens whose keys a row has at each depth: one that left early is
    missing at the deeper ones until it is filled in. waiting[b] (B, max_len, C) keeps the states after loop b of tokens
    that wait for that; it is made when the first one leaves. waits[b] (B, max_len), on the host:
    which ones have a state there.
    """

    def __init__(self, cfg, batch_size, max_len, device, dtype):
        self.max_len, self.device = max_len, device
        shape = (cfg.n_loop, batch_size, cfg.n_kv_head, max_len, cfg.head_dim)
        with torch.inference_mode(False):                       # so that any later call may write
            self.k = [torch.zeros(shape, device=device, dtype=dtype) for _ in range(cfg.n_stored)]
            self.v = [torch.zeros(shape, device=device, dtype=dtype) for _ in range(cfg.n_stored)]
            self.filled = torch.zeros(cfg.n_loop, batch_size, dtype=torch.long)
            self.waits = torch.zeros(cfg.n_loop, batch_size, max_len, dtype=torch.bool)
        self.waiting, self.rotary, self.readers = [None] * cfg.n_loop, None, {}

    @property
    def lengths(self):
        """(B,): tokens of each row, all of which have been through the first loop."""
        return self.filled[0].clone()

    @property
    def longest(self):
        return max(self.filled[0].tolist(), default=0)

    def alike(self, n_loop):
        """Whether all rows hold equally many tokens at each of the first n_loop depths."""
        return bool((self.filled[:n_loop] == self.filled[0, 0]).all())

    def nbytes(self):
        """Bytes held for keys and values, and for waiting states, for all rows at max_len."""
        return sum(x.nbytes for x in self.k + self.v + self.waiting if x is not None)

    def reset(self, rows=None):
        """Empty the given rows (a list or tensor of indices; None: all), so that new sequences may start. What
        they held is zeroed: a NaN behind a mask would still poison the sum over values."""
        rows = slice(None) if rows is None else torch.as_tensor(rows, device="cpu")
        for buffer in self.k + self.v:
            buffer[:, rows] = 0
        self.filled[:, rows], self.waits[:, rows] = 0, False
        if not self.filled.any():
            self.readers = {}               # the weights may change before it is used again

    def keep(self, depth, rows, positions, h):
        """Let the tokens at positions (N,) of rows (N,) wait after loop `depth` with their states h (N, C)."""
        if self.waiting[depth] is None:
            with torch.inference_mode(False):
                self.waiting[depth] = h.new_zeros(*self.waits[depth].shape, h.size(-1))
        self.waiting[depth][rows, positions] = h
        self.waits[depth][rows, positions] = True


class Whole:
    """T new tokens in every row at one depth, behind equally many others in each; without a cache behind none.

    What both places offer: at (T,) or (N,), the tokens' positions; uses, as RelaxedLinear takes them under cycle;
    store; advance; together; and groups of rows for attention, each with pos (1, T) or (R, T), end (how many keys are
    seen at most), keys, queries and tokens. Here the only group is the place itself.
    """
    plain = True

    def __init__(self, T, depth, cache, device):
        self.cache, self.uses = cache, depth
        self.start = 0 if cache is None else int(cache.filled[depth, 0])
        self.end = self.start + T
        self.at = torch.arange(self.start, self.end, device=device)             # (T,)
        self.pos = self.at[None]
        if cache is not None and self.end > cache.max_len:
            raise ValueError(f"the cache is full: {self.start} tokens held, {T} more, max_len {cache.max_len}")

    @property
    def groups(self):
        return [self]

    def store(self, i, k, v):
        """Take in k, v (B, T, G, D) of the i-th layer of the loop."""
        k, v = k.transpose(1, 2), v.transpose(1, 2)
        if self.cache is None:
            self.kept = k, v
            return
        self.kept = self.cache.k[i][self.uses], self.cache.v[i][self.uses]
        for buffer, new in zip(self.kept, (k, v)):
            buffer[:, :, self.start:self.end] = new

    def keys(self, i):
        """All keys and values of the i-th layer, (B, G, S, D)."""
        return [x[:, :, :self.end] for x in self.kept]

    def queries(self, q):
        return q

    def tokens(self, y):
        return y

    def together(self, parts):
        return parts[0]

    def advance(self):
        if self.cache is not None:
            self.cache.filled[self.uses] = self.end


def side_by_side(n):
    """Of tokens side by side, n (R,) of each row: each one's row, and which of the row's it is, (N,) both."""
    if bool((n == 1).all()):
        return torch.arange(len(n)), torch.zeros_like(n)
    row = torch.arange(len(n)).repeat_interleave(n)
    return row, torch.arange(len(row)) - (n.cumsum(0) - n)[row]


class Ragged:
    """n[r] new tokens of row rows[r] at depth[r], behind those that it holds there, all side by side, (1, N, C).
    Attention sees the rows that have one apart from those that have several, so that little is padding. rows, depth,
    n (R,) on the host."""

    def __init__(self, depth, cache, rows, n, dtype):
        self.cache, self.rows, self.depth, self.n = cache, rows, depth, n
        start, B, device = cache.filled[depth, rows], cache.filled.size(1), cache.device
        if int((start + n).max()) > cache.max_len:
            raise ValueError(f"the cache is full: {int(start.max())} tokens held, {int(n.max())} more, max_len "
                             f"{cache.max_len}")
        flat, single = depth * B + rows, n == 1                         # flat: row of the flat buffers
        if bool(single.all()):
            row, at, parts = slice(None), start, [(slice(None), slice(None))]           # rows, and their tokens
        else:
            row, step = side_by_side(n)
            at = start[row] + step
            parts = [(some, some[row].to(device)) for some in (single, n > 1) if some.any()]
        self.at, self.stored_at, of_token = at.to(device), flat[row].to(device), depth[row]
        self.uses = int(depth[0])
        if not bool((of_token == self.uses).all()):                     # (N, n_loop, 1), as RelaxedLinear takes them
            self.uses = (of_token[:, None] == torch.arange(len(cache.filled)))[..., None].to(device, dtype)
        self.parts = [(start[some], n[some], flat[some], tokens) for some, tokens in parts]

    @functools.cached_property
    def groups(self):
        return [Group(self.cache, *part) for part in self.parts]

    def together(self, parts):
        """What attention gave for each of the groups, (N of the group, C) -> (1, N, C)."""
        if len(parts) == 1:
            return parts[0][None]
        out = parts[0].new_empty(len(self.at), parts[0].size(-1))
        for group, part in zip(self.groups, parts):
            out[group.span] = part
        return out[None]

    def store(self, i, k, v):
        """Take in k, v (1, N, G, D) of the i-th layer of the loop."""
        for buffer, new in ((self.cache.k[i], k), (self.cache.v[i], v)):
            buffer.flatten(0, 1)[self.stored_at, :, self.at] = new[0].to(buffer.dtype)

    def advance(self):
        self.cache.filled[self.depth, self.rows] += self.n


class Group:
    """Rows of a Ragged place that attention sees together: how many tokens each holds, start, and takes in, n; which
    rows of the flat buffers they are, flat, (R,) each; which of the place's tokens are theirs."""
    plain = False

    def __init__(self, cache, start, n, flat, tokens):
        T = int(n.max())
        self.cache, self.span, self.end = cache, tokens, int((start + n).max())
        self.pos = (start[:, None] + torch.arange(T)).clamp(max=cache.max_len - 1).to(cache.device)     # (R, T)
        in_order = torch.equal(flat, torch.arange(len(flat)) + flat[0])                 # their keys need no gathering
        self.flat = slice(int(flat[0]), int(flat[0]) + len(flat)) if in_order else flat.to(cache.device)
        self.dense, self.mask = bool((n == T).all()), (torch.arange(T) < n[:, None]).to(cache.device)

    def keys(self, i):
        """All keys and values of the i-th layer of the rows' loops, (R, G, S, D)."""
        seen = [buffer[i].flatten(0, 1)[:, :, :self.end] for buffer in (self.cache.k, self.cache.v)]
        return [x[self.flat] if isinstance(self.flat, slice) else x.index_select(0, self.flat) for x in seen]

    def queries(self, q):
        """(1, N, ...) of the place -> (R, T, ...), 0 where there is no token."""
        q = q[0, self.span]
        if self.dense:
            return q.view(*self.pos.shape, *q.shape[1:])
        out = q.new_zeros(*self.pos.shape, *q.shape[1:])
        out[self.mask] = q
        return out

    def tokens(self, y):
        """(R, T, ...) -> (N of the group, ...)."""
        return y.flatten(0, 1) if self.dense else y[self.mask]


# ---------------------------------------------------------------------------------------------------------
# the model

class Attention(nn.Module):
    """Causal self-attention with grouped key/value heads."""

    def __init__(self, cfg):
        super().__init__()
        self.cfg = cfg
        C, D = cfg.n_embd, cfg.head_dim
        self.wq = RelaxedLinear(C, cfg.n_head * D, cfg)
        self.wk = RelaxedLinear(C, cfg.n_kv_head * D, cfg)
        self.wv = RelaxedLinear(C, cfg.n_kv_head * D, cfg)
        self.wo = RelaxedLinear(cfg.n_head * D, C, cfg)
        if cfg.qk_norm:
            self.q_norm, self.k_norm = HeadNorm(cfg), HeadNorm(cfg)

    def keys_values(self, x, uses, rotary):
        """k, v (B, T, G, D) of x (B, T, C)."""
        k, v = (w(x, uses).unflatten(-1, (-1, self.cfg.head_dim)) for w in (self.wk, self.wv))
        k = self.k_norm(k, uses) if self.cfg.qk_norm else k
        return k if rotary is None else apply_rotary(k, *rotary), v

    def forward(self, x, i, uses, place):
        """x (B, T, C), or (1, N, C) where the place packs them: the i-th layer of their loop."""
        q = self.wq(x, uses).unflatten(-1, (-1, self.cfg.head_dim))             # (B, T, H, D)
        q = self.q_norm(q, uses) if self.cfg.qk_norm else q
        q = q if place.rotary is None else apply_rotary(q, *place.rotary)
        place.store(i, *self.keys_values(x, uses, place.rotary))
        y = [group.tokens(self.attend(group.queries(q), *group.keys(i), group.bias)) for group in place.groups]
        return self.wo(place.together(y), uses)

    def attend(self, q, k, v, bias):
        """q (R, T, H, D); k, v (R, G, S, D) -> (R, T, H D)."""
        (R, T, H, D), G, dropout = q.shape, k.size(1), self.cfg.dropout if self.training else 0.0
        q, k, v = q.transpose(1, 2), k.to(q.dtype), v.to(q.dtype)               # (R, H, T, D)
        if self.cfg.fast and T == 1 and H > G:      # the H / G query heads of a key head stand as its queries: quicker
            if bias is not None and bias.size(1) > 1:
                bias = bias.reshape(-1, G, H // G, bias.size(-1))               # ALiBi's, of each head
            y = F.scaled_dot_product_attention(q.reshape(R, G, H // G, D), k, v, bias, dropout)
            return y.reshape(R, 1, H * D)
        attend = attention_fast if self.cfg.fast else attention_naive
        return attend(q, k, v, bias, dropout).transpose(1, 2).flatten(2)


class RelaxedMLP(nn.Module):
    """swiglu: W_down (silu(W_gate x) * W_up x) (Shazeer 2020); gelu: W_down gelu(W_up x), exact GELU."""

    def __init__(self, cfg):
        super().__init__()
        if cfg.mlp == "swiglu":
            self.w_gate = RelaxedLinear(cfg.n_embd, cfg.n_mlp, cfg)
        self.w_up = RelaxedLinear(cfg.n_embd, cfg.n_mlp, cfg)
        self.w_down = RelaxedLinear(cfg.n_mlp, cfg.n_embd, cfg)
        self.gated = cfg.mlp == "swiglu"

    def forward(self, x, uses):
        up = self.w_up(x, uses)
        return self.w_down(F.silu(self.w_gate(x, uses)) * up if self.gated else F.gelu(up), uses)


class Block(nn.Module):
    """A stored block: norms and W' are tied, deltas and the norms of heads are not."""

    def __init__(self, cfg):
        super().__init__()
        self.norm1, self.norm2 = RMSNorm(cfg.n_embd, cfg.norm_eps), RMSNorm(cfg.n_embd, cfg.norm_eps)
        self.attn, self.mlp = Attention(cfg), RelaxedMLP(cfg)
        self.drop = nn.Dropout(cfg.dropout)

    def readers(self, use):
        """What makes keys and values of a state that is only normalised: (W' + B A) diag(g) of wk, and of wv."""
        return [(w.weight + w.b[use].t() @ w.a[use] if w.rank else w.weight) * self.norm1.weight
                for w in (self.attn.wk, self.attn.wv)]

    def forward(self, x, i, uses, place):
        x = x + self.drop(self.attn(self.norm1(x), i, uses, place))
        return x + self.drop(self.mlp(self.norm2(x), uses))


def kl_from_last(logits, last, targets):
    """Mean KL(p_last || p) in nats over the targets that are not -1, p of logits (B, T, V); p_last has no gradient."""
    p, q = last.detach().log_softmax(-1), logits.log_softmax(-1)
    counted = targets != -1
    return ((p.exp() * (p - q)).sum(-1) * counted).sum() / counted.sum().clamp(min=1)


class Model(LanguageModel):
    """The Relaxed Recursive Transformer. See Config for its sizes and forward for its use."""

    def __init__(self, cfg):
        super().__init__()
        self.cfg = cfg
        self.wte = nn.Embedding(cfg.vocab_size, cfg.n_embd)
        self.drop = nn.Dropout(cfg.dropout)
        self.blocks = nn.ModuleList(Block(cfg) for _ in range(cfg.n_stored))
        self.norm = RMSNorm(cfg.n_embd, cfg.norm_eps)
        self.head = nn.Linear(cfg.n_embd, cfg.vocab_size, bias=False)
        uses = [(k, cfg.tied(k)) for k in range(cfg.n_stored)]
        self.unrolled = [next((k, tied.index(layer)) for k, tied in uses if layer in tied)
                         for layer in range(cfg.n_layer)]                       # (stored block, use of it)
        self.init_weights()

    @torch.no_grad()
    def init_weights(self):
        """N(0, 0.02) everywhere, the two projections into the residual stream smaller by 1 / sqrt(2 n_layer)
        so that its variance does not grow with depth (GPT-2); norms start at 1; of the deltas A as the others and B at
        0 (Hu et al. 2022), so that they start at nothing."""
        for name, p in self.named_parameters():
            if p.dim() == 2:
                into_residual = name.endswith(("wo.weight", "w_down.weight"))
                p.normal_(0, 0.02 / math.sqrt(2 * self.cfg.n_layer) if into_residual else 0.02)
            elif p.dim() == 3:
                p.normal_(0, 0.02) if name.endswith(".a") else p.zero_()
        if self.cfg.tie_embeddings:
            self.head.weight = self.wte.weight

    @property
    def context_limit(self):
        """The most tokens one cache or one forward may hold; None where the positions have no end."""
        return self.cfg.block_size if self.cfg.pos == "rope" else None

    @property
    def n_loop(self):
        """How many loops a token may take: in eval mode exit_loop, where that is set."""
        return self.cfg.exit_loop if self.cfg.exit_loop and not self.training else self.cfg.n_loop

    def hidden(self, idx, cache, n_valid):
        """A list of the states (B, T, C) after each loop, in eval mode after the last alone."""
        T, n, where = idx.size(1), None, None
        if cache is None:
            self.check_context(T, "{} tokens are")
        h, states = self.embed(idx), []
        if cache is not None and (n_valid is not None or not cache.alike(self.n_loop)):
            # ragged rows: packed tokens
            n = torch.full((len(h),), T) if n_valid is None else n_valid.cpu().clamp(0, T)
            where = (torch.arange(T) < n[:, None]).to(h.device)
            h = h[where]
        for depth in range(self.n_loop):
            h = self.loop(h, depth, cache, n=n)
            states = [*states, h] if self.training else [h]
        if where is None:
            return states
        padded = h.new_zeros(*idx.shape, h.size(-1))
        return [padded.masked_scatter(where[..., None], h) for h in states]

    def predict(self, states, targets):
        """As in all models, from the last of the states. With early_exit the loss of training
        counts every loop's, and aux has "ce_loop1", ... too."""
        if not self.training or targets is None or self.cfg.early_exit == "none":
            return super().predict(states[-1], targets)
        logits = [self.logits(h) for h in states]
        ces = [cross_entropy(x, targets) for x in logits]
        aux = {f"ce_loop{b}": ce.detach() for b, ce in enumerate(ces[:-1], 1)}
        aux["ce"] = ces[-1].detach()
        return logits[-1], self.early_exit_loss(logits, ces, targets), aux

    def early_exit_loss(self, logits, ces, targets):
        """sum_b c_b loss_b over the loops b = 1 .. n_loop (Section 3.7). weighted: c_b = b / (1 + ... + n_loop);
        aggressive: 1 for the last loop, exit_weight for the others. exit_loss names the earlier loops' losses."""
        cfg, n = self.cfg, len(ces)
        weights = [b / (n * (n + 1) / 2) if cfg.early_exit == "weighted" else cfg.exit_weight for b in range(1, n + 1)]
        weights[-1] = weights[-1] if cfg.early_exit == "weighted" else 1.0
        total = weights[-1] * ces[-1]
        for weight, x, ce in zip(weights[:-1], logits, ces):
            if cfg.exit_loss != "kl":
                total = total + weight * ce
            if cfg.exit_loss != "ce":
                total = total + weight * kl_from_last(x, logits[-1], targets)
        return total

    # what an engine that batches over depth needs ------------------------------------------------------------

    def embed(self, idx):
        """idx (...) -> states before the first loop (..., C)."""
        return self.drop(self.wte(idx))

    def enter(self, idx, cache, rows, n):
        """idx (N,), n[r] new tokens of each row, in an engine -> states before the first loop (N, C)."""
        return self.embed(idx)

    def logits(self, h):
        """States after a loop (..., C) -> logits (..., V), in float32 or better."""
        return super().logits(self.norm(h))                             # shared by all loops

    def loop(self, h, depth, cache=None, rows=None, n=None):
        """One loop further: states in, states out. h (B, T, C): T tokens of every row, of which a cache holds equally
        many; depth, from 0, an int. Or h (N, C): n[r] tokens of row rows[r] (None: of every row) side by side; depth
        may be (R,), rows at different loops (share=cycle only). rows, depth, n on the host.

        cache takes the tokens in behind those that each row has at this depth. Tokens that left early and wait for this
        loop go with the later ones.
        """
        if n is None:
            return self.through(h, Whole(h.size(1), depth, cache, h.device))
        rows = torch.arange(len(n)) if rows is None else rows
        depth = torch.full((len(n),), depth) if isinstance(depth, int) else depth
        if not len(h):
            return h
        before = cache.filled[(depth - 1).clamp(min=0), rows]               # of the loop before, the new ones included
        waiting = (before - n - cache.filled[depth, rows]) * (depth > 0)
        if waiting.any():
            return self.loop_with_waiting(h, depth, cache, rows, n, waiting)
        return self.through(h[None], Ragged(depth, cache, rows, n, h.dtype))[0]

    def loop_with_waiting(self, h, depth, cache, rows, n, waiting):
        """loop, in which row r's waiting[r] tokens go before its n[r] new ones."""
        row, step = side_by_side(waiting + n)
        old, at = step < waiting[row], cache.filled[depth, rows][row] + step            # at: their positions
        row, at, is_old = row[old], at[old], old.to(h.device)
        states = h.new_empty(len(row), h.size(-1))
        for d in depth[waiting > 0].unique().tolist():
            which = depth[row] == d
            theirs = rows[row[which]], at[which]
            if not cache.waits[d - 1][theirs].all():
                raise ValueError(f"tokens of this cache lack loop {d + 1}: they left before it with exit_loop")
            states[which] = cache.waiting[d - 1][theirs].to(h.dtype)
        both = h.new_empty(len(old), h.size(-1))
        both[is_old], both[~is_old] = states, h
        both = self.through(both[None], Ragged(depth, cache, rows, waiting + n, h.dtype))[0]
        self.keep(both[is_old], depth[row], cache, rows[row], at)                       # they wait for the next loop
        return both[~is_old]

    def keep(self, h, depth, cache, rows, positions):
        """Let tokens wait in the cache with their states h (N, C) after loop depth (N,), if there is a deeper one."""
        for d in depth.unique().tolist():
            which = depth == d
            if d < self.cfg.n_loop - 1:
                cache.keep(d, rows[which], positions[which], h[which])

    @torch.no_grad()
    def leave(self, h, depth, cache, rows):
        """The newest tokens of rows (R,) of the cache go no further than loop depth (R,): with the states h (R, C)
        they wait there (fill=exact), or give all deeper layers their keys and values (fill=propagate)."""
        if self.cfg.fill == "exact":
            return self.keep(h, depth, cache, rows, cache.filled[depth, rows] - 1)
        for deeper in range(1, self.cfg.n_loop):
            which = depth < deeper
            if which.any():
                self.propagate(h[which], deeper, cache, rows[which])

    def propagate(self, h, depth, cache, rows):
        """Fill loop `depth` of rows (R,) with keys and values projected from h (R, C). Fast: all layers read the same
        state, so one product serves them, whose matrix the cache keeps from when it is first needed."""
        cfg, layers = self.cfg, self.layers_of(depth)
        place = Ragged(torch.full_like(rows, depth), cache, rows, torch.ones_like(rows), h.dtype)
        rotary = self.rotary(place, h.dtype)
        if not cfg.fast:
            for i, (block, use) in enumerate(layers):
                place.store(i, *block.attn.keys_values(block.norm1(h[None]), use, rotary))
            return place.advance()
        if depth not in cache.readers:
            cache.readers[depth] = torch.cat([w for block, use in layers for w in block.readers(use)])
        both = F.linear(F.rms_norm(h, h.shape[-1:], eps=cfg.norm_eps), cache.readers[depth])
        k, v = both.view(len(h), cfg.n_stored, 2, cfg.n_kv_head, cfg.head_dim).permute(2, 1, 0, 3, 4)   # (K, R, G, D)
        if cfg.qk_norm:
            k = torch.stack([block.attn.k_norm(k[i], use) for i, (block, use) in enumerate(layers)])
        k = k if rotary is None else apply_rotary(k, *rotary)
        for i in range(cfg.n_stored):
            place.store(i, k[i:i + 1], v[i:i + 1])
        place.advance()

    def layers_of(self, depth):
        """[(stored block, its use)] of a loop's layers."""
        K = self.cfg.n_stored
        return [(self.blocks[k], use) for k, use in self.unrolled[depth * K:depth * K + K]]

    def through(self, h, place):
        """The layers of one loop on the tokens of a place: h (B, T, C), or (1, N, C) as it packs them."""
        place.rotary, one = self.rotary(place, h.dtype), isinstance(place.uses, int)
        for group in place.groups:
            group.bias = self.bias(group, compute_dtype(h))
        if not one and self.cfg.share != "cycle":
            raise ValueError(f"share={self.cfg.share}: rows at different depths need share=cycle")
        with torch.set_grad_enabled(place.cache is None and torch.is_grad_enabled()):
            for i, (block, use) in enumerate(self.layers_of(place.uses if one else 0)):
                h = block(h, i, use if one else place.uses, place)
        place.advance()
        return h

    def rotary(self, place, dtype):
        """The rotary tables of a place's tokens, or None. A cache keeps those of all its positions."""
        cfg, cache = self.cfg, place.cache
        if cfg.pos != "rope":
            return None
        if cache is None:
            return rotary_tables(place.at, cfg.head_dim, cfg.rope_theta, dtype)
        if cache.rotary is None:
            positions = torch.arange(cache.max_len, device=place.at.device)
            cache.rotary = rotary_tables(positions, cfg.head_dim, cfg.rope_theta, dtype)
        return [table[place.at] for table in cache.rotary]

    def bias(self, group, dtype):
        """The attention bias of all layers, or None where attention_fast needs none: plainly causal from
        the first token on, or one new token in rows of equal length. The fused kernels take it in the queries'
        dtype, so in bfloat16 they round ALiBi's distances; the naive path does not."""
        T, wide = group.pos.size(1), torch.promote_types(dtype, torch.float32)
        plain = not self.cfg.window and self.cfg.pos != "alibi" and group.plain
        if self.cfg.fast and plain and T in (1, group.end):
            return None
        slopes = alibi_slopes(self.cfg.n_head, group.pos.device, wide) if self.cfg.pos == "alibi" else None
        k_pos = torch.arange(group.end, device=group.pos.device)
        bias = attention_bias(group.pos, k_pos, self.cfg.window, slopes, wide)
        return bias.to(dtype) if self.cfg.fast else bias

    def init_cache(self, batch_size, max_len):
        """An empty cache for batch_size rows of up to max_len tokens (under rope at most block_size)."""
        self.check_context(max_len, "max_len={} is")
        w = self.wte.weight
        return DepthCache(self.cfg, batch_size, max_len, w.device, compute_dtype(w))

    def flops_per_token(self):
        """Floating-point operations of one token's forward and backward in a sequence of block_size: 6 for
        each weight of a matrix product in each loop (the deltas as two products, the head where it is read), and 12 C
        for each visible key and layer (q k and p v forward, twice that backward), averaged over the positions."""
        cfg = self.cfg
        products = [m for m in self.blocks.modules() if isinstance(m, RelaxedLinear)]
        deltas = sum(p.numel() for m in products if m.rank for p in (m.a, m.b))             # of all loops
        heads = cfg.n_loop if cfg.early_exit != "none" else 1
        weights = cfg.n_loop * sum(m.weight.numel() for m in products) + deltas + heads * cfg.vocab_size * cfg.n_embd
        T, w = cfg.block_size, min(cfg.window or cfg.block_size, cfg.block_size)
        keys = (w * (w + 1) / 2 + (T - w) * w) / T
        return 6.0 * weights + 12.0 * cfg.n_layer * cfg.n_embd * keys


# ---------------------------------------------------------------------------------------------------------
# conversion of a trained model

NORM_READ = {"attn.wq": "norm1", "attn.wk": "norm1", "attn.wv": "norm1", "mlp.w_gate": "norm2", "mlp.w_up": "norm2"}


@torch.no_grad()
def convert(model, weights):
    """Start model from `weights`, the state dict of a model_gpt of the same sizes (Sections 2.2 and 2.3). Raises
    ValueError where a tied norm's weight is too near zero for the deltas to make up for it."""
    own = model.state_dict()
    for name in [name for name in weights if not name.startswith("blocks.")]:
        own[name].copy_(weights[name])
    for k, block in enumerate(model.blocks):
        tied = [Layer(weights, layer) for layer in model.cfg.tied(k)]
        tie(model.cfg, block, [Layer(weights, layer) for layer in origins(model.cfg, k)])
        if model.cfg.rank and model.cfg.lora_init == "svd":
            for norm in ("norm1", "norm2"):
                if getattr(block, norm).weight.abs().min() < 1e-4:
                    raise ValueError(f"{norm} of stored block {k} is near zero, its deltas would be huge: another init "
                                     f"or norm_init may avoid it, rank=0 and lora_init=zero do")
            for use, layer in enumerate(tied):
                relax(block, use, layer)
        for name, norm in block.named_modules():
            if isinstance(norm, HeadNorm):
                for weight, layer in zip(norm.weights, tied):
                    weight.copy_(layer(name))


class Layer:
    """The weights of one layer of the source, by name: layer("attn.wq")."""

    def __init__(self, weights, layer):
        self.weights, self.layer = weights, layer

    def __call__(self, name):
        return self.weights[f"blocks.{self.layer}.{name}.weight"]


def origins(cfg, k):
    """The source's layers whose mean stored block k starts from; none: it stays as initialised. stepwise: K of them
    evenly spaced, first and last included, halves to even."""
    L, K = cfg.n_layer, cfg.n_stored
    return {"average": cfg.tied(k), "stepwise": [round(k * (L - 1) / max(1, K - 1))], "lower": [k],
            "upper": [L - K + k], "random": []}[cfg.init]


def tie(cfg, block, layers):
    """Set the tied weights of a block to the mean of layers'."""
    for name, part in block.named_modules():
        if layers and isinstance(part, RelaxedLinear):
            part.weight.copy_(sum(layer(name) for layer in layers) / len(layers))
        elif layers and isinstance(part, RMSNorm):
            chosen = layers[:1] if cfg.norm_init == "choice" else layers
            part.weight.copy_(sum(layer(name) for layer in chosen) / len(chosen))
            if cfg.init == "average" and cfg.norm_init == "zero":
                part.weight.zero_()


def relax(block, use, layer):
    """Set the deltas of a block's use to the best of their rank for W_l diag(g_l / g') - W' (Eq. 4). Where that is
    nothing but rounding, A stays as initialised and B zero, so that they can still learn."""
    for name, part in block.named_modules():
        if not isinstance(part, RelaxedLinear):
            continue
        exact = torch.promote_types(part.weight.dtype, torch.float32)
        w = layer(name).to(exact)
        if name in NORM_READ:
            w = w * (layer(NORM_READ[name]).to(exact) / getattr(block, NORM_READ[name]).weight.to(exact))
        residual = w - part.weight.to(exact)
        # W' and g' are means of n_loop terms, each rounded by at most n_loop / 2 eps of its size
        eps = max(torch.finfo(x.dtype).eps for x in (layer(name), part.weight))
        if residual.norm() > 2 * len(part.a) * eps * w.norm():
            u, s, vh = torch.linalg.svd(residual, full_matrices=False)
            part.b[use] = (u[:, :part.rank] * s[:part.rank]).t()
            part.a[use] = vh[:part.rank]

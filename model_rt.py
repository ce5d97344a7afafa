"""
The Recurrent Transformer (RT): keys and values come from a layer's own outputs.

A Transformer's layer shows position i what the layer below knew of the positions before it. An RT layer shows it what
this very layer has made of them, so one layer computes as deep in time as the text is long. It costs no parameter and
no byte of cache; it costs parallelism, and most of this file is about winning that back.

The layer, for positions i = 1..T with inputs x_i:

    q_i  = Wq n1(x_i)        k^_i = Wk n1(x_i)        v^_i = Wv n1(x_i)        the temporary pair: seen by i alone
    a_i  = Attention(q_i; (k_j, v_j) for j < i, and (k^_i, v^_i))
    z_i  = x_i + Wo a_i
    y_i  = z_i + W_down gelu(W_up n2(z_i))                                     the next layer's x_i
    k_i  = Wk n1(y_i)        v_i  = Wv n1(y_i)                                 the persistent pair: seen by all j > i

n1, n2 are RMSNorms. Scores are q . k / sqrt(head_dim) - m_h (i - j), ALiBi, 0 for the temporary pair. y_i needs
k_j, v_j of every j < i, and those need y_j: a layer is a loop over positions. Three schedules run it to one result:

naive       the lines above, position after position, layer after layer, under autograd: the oracle (class Block)

tiled       The queries of a layer depend on x alone, so they are all there at the start. Every query keeps the state
            of an online softmax; when position i is done and t is the largest power of two that divides i, the keys
            i-t+1..i are added to the states of the queries i+1..i+t (the paper's Algorithm 1). T = 8:

                        keys 1 2 3 4 5 6 7 8
                   query 1   .                   . the temporary pair, before all else
                         2   1 .                 n the tile that is added once position n is done:
                         3   2 2 .                 every query meets every earlier key exactly once,
                         4   2 2 3 .               and a key is read log T times, not T times
                         5   4 4 4 4 .
                         6   4 4 4 4 5 .
                         7   4 4 4 4 6 6 .
                         8   4 4 4 4 6 6 7 .

wavefront   Ours, over the whole stack. Positions are cut into chunks of C. Layer l may do chunk c as soon as layer l-1
            has done it, so in step s the pairs (l, c = s - l) of all layers run side by side, each position's
            products as one bmm over the stacked weights. 3 layers, 4 chunks, the numbers are steps:

                        chunk 0 1 2 3        T + (n_layer - 1) C positions one after the other, not n_layer T,
                  layer 2     2 3 4 5        and each product n_layer times as large. When a chunk starts, its queries
                  layer 1     1 2 3 4        meet the keys of all earlier chunks in one dense attend; inside the chunk
                  layer 0     0 1 2 3        the attention goes row by row.

tiled is the same loop with one chunk of T and dyadic tiles in place of rows.

The backward of both is written by hand (Stack). It saves x and y of each layer and nothing else; from y it rebuilds
all keys and values at once, from those all attention, then all of the MLP. One after the other, from the last
position to the first, goes only what must. With g_i = dL/dy_i and p_ij the attention's weights, for each i:

    g_i   = (from the layer above) + J1_i (Wk^T dk_i + Wv^T dv_i)       dk_i, dv_i from all queries after i
    dz_i  = g_i + J2_i W_up^T (gelu'(u_i) * W_down^T g_i)               J1, J2: the norms' Jacobians; u = W_up n2(z)
    da_i  = Wo^T dz_i
    dv_j += p_ij da_i      ds_ij = p_ij (da_i . v_j - da_i . a_i)      dk_j += ds_ij q_i / sqrt(head_dim)      (j < i)

mirrored in rows and chunks, or in tiles. dq, the temporary pairs, dx and every weight's gradient come in large
products once a chunk is done. p is computed again from (q, k, log of the softmax's sum); nothing of size T x T
exists.

`block: b` (the paper's section 9) lets the temporary pairs of a block of b positions be seen inside the block, so
that b positions go at once: b = 1 is the RT, b = T the plain Transformer.

Source: "The Recurrent Transformer: Greater Effective Depth and Efficient Decoding". Differences to its code: the
ALiBi bias and every softmax stay in float32 under bfloat16, in the backward too; norms are RMSNorm as in the text
(its configs use LayerNorm: norm=layer); decoding, prefill, rotary positions, grouped heads, blocks and the
wavefront are added.

Names: B batch, T positions, L layers, A of them active, C positions of a chunk, b of a block, d width, H query heads,
G key/value heads, R = H / G, D head size.
"""
import math
from dataclasses import dataclass, replace
from typing import NamedTuple, Optional

import torch
import torch.nn as nn
import torch.nn.functional as F

import kernels
from model_gpt import (KVCache, LanguageModel, alibi_slopes, apply_rotary, attention_naive, check_choice,
                       check_sizes, compute_dtype, rotary_tables)


@dataclass
class Config:
    block_size: int = 256        # tokens in a training sequence; also the longest context under rope
    vocab_size: int = 257        # number of token ids
    n_layer: int = 4             # blocks
    n_head: int = 4              # query heads
    n_kv_head: int = 0           # key/value heads, each shared by n_head / n_kv_head query heads (0: n_head)
    n_embd: int = 128            # width of the residual stream
    dropout: float = 0.0         # on embeddings; none inside the recurrence
    fast: bool = True            # with schedule=auto: true wavefront, false naive
    n_mlp: int = 0               # hidden width of the MLP (0: 4 n_embd)
    pos: str = "alibi"           # alibi | rope | none
    rope_theta: float = 10000.0  # rotary base
    norm: str = "rms"            # rms | layer (no bias) | none
    norm_eps: float = 1e-5       # the norms' epsilon
    qk_norm: str = "none"        # norm of queries and keys with a weight: full (over all heads) | head | none
    kv_norm: bool = True         # false: persistent pairs are Wk y, Wv y, without the norm (Appendix E.2)
    block: int = 1               # positions that run at once, seeing each other's temporary pairs (section 9)
    schedule: str = "auto"       # auto (fast picks) | naive | tiled | wavefront
    chunk: int = 32              # the wavefront's C
    cuda_graphs: bool = True     # on CUDA, replay a schedule's kernels as one graph when training
    tie_embeddings: bool = False  # the head is the embedding matrix

    SAME_FUNCTION = ("schedule", "chunk", "cuda_graphs")    # they choose code, as fast does: resuming may change them

    def __post_init__(self):
        self.n_kv_head = self.n_kv_head or self.n_head
        check_sizes(self)
        check_choice(self, "pos", ("alibi", "rope", "none"))
        check_choice(self, "norm", ("rms", "layer", "none"))
        check_choice(self, "qk_norm", ("full", "head", "none"))
        check_choice(self, "schedule", ("auto", "naive", "tiled", "wavefront"))
        if self.pos == "rope" and self.head_dim % 2:
            raise ValueError(f"pos=rope needs an even head size: n_embd / n_head = {self.head_dim}")
        if self.qk_norm != "none" and self.norm == "none":
            raise ValueError(f"qk_norm={self.qk_norm} is of the kind that norm names: norm=none leaves none")
        for name in ("block", "chunk"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if self.n_mlp < 0:
            raise ValueError("n_mlp must be positive, or 0 for 4 n_embd")
        if not self.rope_theta > 0 or not self.norm_eps >= 1e-12:
            raise ValueError("rope_theta must be positive, norm_eps at least 1e-12")
        if self.head_dim > kernels.HEAD_SIZES[-1]:
            raise ValueError(f"n_embd / n_head = {self.head_dim} is more than a head of {kernels.HEAD_SIZES[-1]}")
        self.n_mlp = self.n_mlp or 4 * self.n_embd

    @property
    def head_dim(self):
        return self.n_embd // self.n_head

    @property
    def way(self):
        """The schedule that runs."""
        return self.schedule if self.schedule != "auto" else "wavefront" if self.fast else "naive"


# ---------------------------------------------------------------------------------------------------------------------
# naive: the equations
# ---------------------------------------------------------------------------------------------------------------------

class Norm(nn.Module):
    """RMSNorm, or LayerNorm without bias, over the last dimension, with a weight; kind none: x itself."""

    def __init__(self, kind, dim, eps):
        super().__init__()
        self.kind, self.eps = kind, eps
        if kind != "none":
            self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x):
        if self.kind == "none":
            return x
        weight = self.weight.to(x.dtype)                        # autocast: x may be bfloat16
        if self.kind == "layer":
            return F.layer_norm(x, weight.shape, weight, None, self.eps)
        return F.rms_norm(x, weight.shape, weight, self.eps)


def scores_bias(cfg, distance, seen, dtype):
    """What is added to scores: ALiBi, -m_h distance, and -inf where a key is not seen. distance and seen (..., 1, M, N)
    -> (..., H or 1, M, N)."""
    bias = torch.zeros((), device=distance.device, dtype=dtype)
    if cfg.pos == "alibi":
        bias = -alibi_slopes(cfg.n_head, distance.device, dtype)[:, None, None] * distance
    return bias.masked_fill(~seen, -math.inf)


def cached_kv(cfg, cache, layer, x, pos):
    """What a cache holds of a layer before this call's tokens: k, v (B, G, S, D) and their positions (B or 1, S),
    FAR where a row has none. S is 0 without a cache or such a layer."""
    S = cache.longest if cache is not None and layer < len(cache.k) else 0
    if S == 0:
        none = x.new_empty(x.size(0), cfg.n_kv_head, 0, cfg.head_dim, dtype=compute_dtype(x))
        return none, none, pos[:, :0]
    at = torch.arange(S, device=x.device)[None]
    if cache.ragged:
        at = torch.where(at < cache.lengths[:, None], at, kernels.FAR)
    return *(u[:, :, :S].to(compute_dtype(x)) for u in (cache.k[layer], cache.v[layer])), at


class Block(nn.Module):
    """One layer: its weights, and in forward its equations, one position after the other."""

    def __init__(self, cfg, layer):
        super().__init__()
        self.cfg, self.layer = cfg, layer
        C, D, H, G = cfg.n_embd, cfg.head_dim, cfg.n_head, cfg.n_kv_head
        self.norm1, self.norm2 = Norm(cfg.norm, C, cfg.norm_eps), Norm(cfg.norm, C, cfg.norm_eps)
        self.wq = nn.Linear(C, H * D, bias=False)
        self.wk = nn.Linear(C, G * D, bias=False)
        self.wv = nn.Linear(C, G * D, bias=False)
        self.wo = nn.Linear(H * D, C, bias=False)
        self.w_up = nn.Linear(C, cfg.n_mlp, bias=False)
        self.w_down = nn.Linear(cfg.n_mlp, C, bias=False)
        kind, full = cfg.norm if cfg.qk_norm != "none" else "none", cfg.qk_norm == "full"
        self.q_norm = Norm(kind, H * D if full else D, cfg.norm_eps)
        self.k_norm = Norm(kind, G * D if full else D, cfg.norm_eps)

    def heads(self, u, norm, rotary):
        """A projection u (B, n, heads D) -> queries or keys (B, heads, n, D), QK-norm and rotation done."""
        shape = (*u.shape[:2], -1, self.cfg.head_dim)
        u = norm(u).view(shape) if self.cfg.qk_norm == "full" else norm(u.view(shape))
        return (u if rotary is None else apply_rotary(u, *rotary)).transpose(1, 2)

    def pair(self, n, rotary):
        """The key and value (B, G, n, D) of n: the temporary pair of norm1(x), the persistent one of norm1(y)."""
        v = self.wv(n).view(*n.shape[:2], -1, self.cfg.head_dim).transpose(1, 2)
        return self.heads(self.wk(n), self.k_norm, rotary), v

    def forward(self, x, pos, rotary, cache=None):
        """x (B, T, C) at positions pos (B or 1, T), after what the cache holds -> y (B, T, C), the persistent pairs
        k, v and the temporary pairs kt, vt, each (B, G, T, D)."""
        cfg, T = self.cfg, x.size(1)
        old_k, old_v, old_pos = cached_kv(cfg, cache, self.layer, x, pos)
        old_kt, old_vt, old_post = cached_kv(cfg, cache, self.layer + cfg.n_layer, x, pos)  # of block > 1 only
        n = self.norm1(x)
        q, (kt, vt) = self.heads(self.wq(n), self.q_norm, rotary), self.pair(n, rotary)
        ks, vs, ys = [], [], []
        for t in range(T):
            here, own = slice(t, t + 1), slice(max(0, t + 1 - cfg.block), t + 1)    # its block starts in `own`
            k = torch.cat([old_k, *ks, old_kt, kt[:, :, own]], 2)
            v = torch.cat([old_v, *vs, old_vt, vt[:, :, own]], 2)
            bias = self.bias(pos[:, here], torch.cat([old_pos, pos[:, :t]], 1),
                             torch.cat([old_post, pos[:, own]], 1), x.dtype)
            a = attention_naive(q[:, :, here], k, v, bias)                                  # a_t (B, H, 1, D)
            z = x[:, here] + self.wo(a.transpose(1, 2).flatten(2))                          # z_t
            y = z + self.w_down(F.gelu(self.w_up(self.norm2(z))))                           # y_t
            k, v = self.pair(self.norm1(y) if cfg.kv_norm else y, rotary and [table[:, here] for table in rotary])
            ks, vs, ys = ks + [k], vs + [v], ys + [y]
        return torch.cat(ys, 1), torch.cat(ks, 2), torch.cat(vs, 2), kt, vt

    def decode(self, x, pos, rotary, bias, cache):
        """The same for one token a row, x (B, 1, C), of block 1: y (B, 1, C). What a plain Transformer does, and one
        more projection: in its slot of the cache the temporary pair stands until the persistent one replaces it. bias
        (B or 1, H or 1, 1, S), as forward has it, is the same for all layers."""
        n = self.norm1(x)
        q, (kt, vt) = self.heads(self.wq(n), self.q_norm, rotary), self.pair(n, rotary)
        k, v = (u.to(q.dtype) for u in cache.append(self.layer, kt, vt))                    # (B, G, S, D)
        if q.dtype == bias.dtype:
            a = F.scaled_dot_product_attention(q, k, v, bias, enable_gqa=q.size(1) != k.size(1))
        else:       # torch's would take the bias in bfloat16 only
            slopes = alibi_slopes(self.cfg.n_head, x.device) if self.cfg.pos == "alibi" else None
            at = torch.arange(k.size(2), device=x.device, dtype=torch.int32)
            a, _ = kernels.attend(q, k, v, pos.int().squeeze(0), at, slopes)
        z = x + self.wo(a.transpose(1, 2).flatten(2))
        y = z + self.w_down(F.gelu(self.w_up(self.norm2(z))))
        cache.append(self.layer, *self.pair(self.norm1(y) if self.cfg.kv_norm else y, rotary))
        return y

    def bias(self, here, persistent, temporary, dtype):
        """What is added to the scores of the position `here` (B or 1, 1), given those of its keys (B or 1, n): ALiBi,
        and -inf on what it does not see. A block sees its own temporary pairs and earlier blocks' persistent ones.
        -> (B or 1, H or 1, 1, n)"""
        first = here - here % self.cfg.block
        seen = torch.cat([persistent < first, (temporary >= first) & (temporary <= here)], 1)
        distance = (here - torch.cat([persistent, temporary], 1))[:, None, None]
        return scores_bias(self.cfg, distance, seen[:, None, None], torch.promote_types(dtype, torch.float32))


# ---------------------------------------------------------------------------------------------------------------------
# tiled and wavefront: the weights of all layers side by side
# ---------------------------------------------------------------------------------------------------------------------

class Weights(NamedTuple):
    """The layers' matrices, stacked (L, out, in), the weight of a norm folded into the matrix that reads it."""
    qkv: torch.Tensor                       # (L, (H + 2G) D, d): queries and temporary pairs
    kv: torch.Tensor                        # (L, 2G D, d): persistent pairs, the same matrices
    out: torch.Tensor                       # (L, d, H D)
    up: torch.Tensor                        # (L, m, d)
    down: torch.Tensor                      # (L, d, m)
    q_norm: Optional[torch.Tensor]          # (L, 1, 1, H, D): the QK-norm's weights
    k_norm: Optional[torch.Tensor]          # (L, 1, 1, G, D)

    def map(self, function):
        return Weights(*(None if w is None else function(w) for w in self))

    def matrices(self, function):
        """map, but the QK-norm's weights, which multiply in float32, stay as they are."""
        return self.map(lambda w: function(w) if w.dim() == 3 else w)


def folded(linear, norm):
    """W diag(w), so that W norm(x) = folded n with n free of weights. LayerNorm's n has mean 0: then the rows of W may
    have mean 0 too, which makes the gradient of n have mean 0 (see normalize_backward)."""
    if norm.kind == "none":
        return linear.weight
    w = linear.weight * norm.weight
    return w - w.mean(1, keepdim=True) if norm.kind == "layer" else w


def stack_weights(blocks):
    """Differentiable: gradients flow back to each layer's own parameters."""
    cfg = blocks[0].cfg

    def per_head(norms, heads):
        if cfg.qk_norm == "none":
            return None
        return torch.stack([n.weight.view(1, 1, -1, cfg.head_dim).expand(1, 1, heads, -1) for n in norms])
    qkv = torch.stack([torch.cat([folded(w, b.norm1) for w in (b.wq, b.wk, b.wv)]) for b in blocks])
    kv = qkv[:, cfg.n_head * cfg.head_dim:]
    if not cfg.kv_norm:
        kv = torch.stack([torch.cat([b.wk.weight, b.wv.weight]) for b in blocks])
    out, up, down = ([b.wo.weight for b in blocks], [folded(b.w_up, b.norm2) for b in blocks],
                     [b.w_down.weight for b in blocks])
    return Weights(qkv, kv, *(torch.stack(w) for w in (out, up, down)),
                   per_head([b.q_norm for b in blocks], cfg.n_head),
                   per_head([b.k_norm for b in blocks], cfg.n_kv_head))


def product(x, w):
    """x (A, n, in) w (A, in, out), in w's dtype: that of the operands, bfloat16 under autocast."""
    return torch.bmm(x.to(w.dtype), w)


def add_product(x, a, w):
    """x + a w; x keeps its dtype."""
    return torch.baddbmm(x, a, w) if x.dtype == a.dtype == w.dtype else x + product(a, w)


def normalized(x, kind, eps):
    """A norm without a weight, in x's dtype at least float32."""
    if kind == "none":
        return x
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    return F.layer_norm(x, x.shape[-1:], eps=eps) if kind == "layer" else F.rms_norm(x, x.shape[-1:], eps=eps)


def normalize(x, kind, eps):
    """The same with what the way back needs: n = x r (rms) or (x - mean) r (layer), and r = 1 / sqrt(mean square + eps)
    (..., 1); for none x and None."""
    if kind == "none":
        return x, None
    if kind == "layer":
        x = x - x.mean(-1, keepdim=True)
    r = (x.square().mean(-1, keepdim=True) + eps).rsqrt()
    return x * r, r


def normalize_backward(g, dn, n, r):
    """g + dx: dx = r (dn - n mean(dn n)). For LayerNorm that holds where dn has mean 0, as n has."""
    if r is None:
        return g + dn
    dn = dn.to(g.dtype)
    return g.addcmul(r, dn).addcmul(n * r, (dn * n).mean(-1, keepdim=True), value=-1)


def shape_heads(u, weight, rotary, cfg):
    """A projection u (A, B, n, heads, D) -> queries or keys: QK-norm, then rotation. Also what the way back needs."""
    saved = None
    if weight is not None:
        flat = u.flatten(-2) if cfg.qk_norm == "full" else u
        n, r = normalize(flat.to(torch.promote_types(u.dtype, torch.float32)), cfg.norm, cfg.norm_eps)
        u, saved = (n.reshape(u.shape) * weight).to(u.dtype), (n, r)
    return (u if rotary is None else apply_rotary(u, *rotary)), saved


def shape_heads_backward(g, saved, weight, rotary, cfg):
    """g (A, B, n, heads, D), the gradient of shape_heads' result -> that of u, and that of weight (None without)."""
    if rotary is not None:
        g = apply_rotary(g, rotary[0], -rotary[1])              # rotated back
    if weight is None:
        return g, None
    n, r = saved
    dn = (g * weight).reshape(n.shape)
    if cfg.norm == "layer":
        dn = dn - dn.mean(-1, keepdim=True)
    du = normalize_backward(torch.zeros_like(dn), dn, n, r).reshape(g.shape)
    return du, (g * n.reshape(g.shape)).sum((1, 2), keepdim=True)


# ---------------------------------------------------------------------------------------------------------------------
# the attention inside a chunk: as dyadic tiles (tiled) or as rows (wavefront)
# ---------------------------------------------------------------------------------------------------------------------

def tile(i):
    """The largest power of two that divides i: the side of the tile at block i, counted from 1 (Algorithm 1)."""
    return i & -i


class Tiles:
    """Attention of a chunk's C queries to the chunk's own persistent keys by the paper's Algorithm 1, for a chunk of
    any length. All else that the queries see is known when the chunk starts: its out and lse are given, and are the
    states that dyadic tiles are merged into. (Under bfloat16 a tile leaves attend rounded; the states are float32.)

    q (A, B, H, C, D), out like it, lse (A, B, H, C); k, v (A, B, G, C, D). Rows has the same methods.
    """

    def __init__(self, run, q, out, lse):
        (A, B, H, C, D), self.run = q.shape, run
        self.shape, self.q = q.shape, q.view(A * B, H, C, D)
        self.base = out.view(self.q.shape), lse.view(A * B, H, C)
        self.out, self.lse = (u.clone() for u in self.base)
        self.k, self.v = q.new_empty(2, A * B, run.G, C, D)

    def read(self, i):
        """The finished attention of block i: (A, B, H, b, D)."""
        b = self.run.b
        return self.out[:, :, i * b:i * b + b].view(*self.shape[:3], b, -1)

    def write(self, i, k, v):
        """The persistent pairs of block i, k and v (A, B, b, G, D), are there: with t the largest power of two that
        divides i + 1, the keys of the t blocks up to i are merged into the queries of the t blocks that follow."""
        b, t = self.run.b, tile(i + 1)
        for buffer, new in ((self.k, k), (self.v, v)):
            buffer[:, :, i * b:i * b + b] = new.transpose(2, 3).flatten(0, 1)
        keys, queries = slice((i + 1 - t) * b, (i + 1) * b), slice((i + 1) * b, min((i + 1 + t) * b, self.shape[3]))
        if queries.start < queries.stop:
            at = self.run.at
            out, lse = kernels.attend(self.q[:, :, queries], self.k[:, :, keys], self.v[:, :, keys], at[queries],
                                      at[keys], self.run.slopes)
            out, lse = kernels.merge(self.out[:, :, queries], self.lse[:, :, queries], out.to(self.out.dtype), lse)
            self.out[:, :, queries], self.lse[:, :, queries] = out, lse

    def pairs(self):
        """k, v of the chunk."""
        return self.k, self.v

    def rebuild(self, k, v, dk, dv):
        """For the way back: given k, v of the whole chunk and what later chunks add to their gradients, all attention
        at once, out (A, B, H, C, D) and lse.

        It is one attend over the blocks before the query's own, merged with the rest. For that each query stands at the
        last position before its block: ALiBi is too small by slope times the move."""
        at, slopes = self.run.at, self.run.slopes
        self.k, self.v, self.dk, self.dv = (u.flatten(0, 1) for u in (k, v, dk.clone(), dv.clone()))
        moved = at - at % self.run.b - 1
        out, lse = kernels.attend(self.q, self.k, self.v, moved, at, slopes)
        if slopes is not None:
            lse = lse - slopes[:, None] * (at - moved)
        self.out, self.lse = kernels.merge(*self.base, out.to(self.out.dtype), lse)
        self.rounded, self.do, self.dq = self.out.to(self.q.dtype), torch.zeros_like(self.q), torch.zeros_like(self.out)
        return self.out.view(self.shape), self.lse.view(self.shape[:4])

    def pull(self, i):
        """The final dk, dv (A, B, G, b, D) of block i; all blocks after it have been pushed."""
        (A, B, _, _, D), b = self.shape, self.run.b
        return tuple(u[:, :, i * b:i * b + b].view(A, B, -1, b, D) for u in (self.dk, self.dv))

    def push(self, i, do):
        """The gradient (A, B, H, b, D) of block i's attention is there. The mirrored tile: with t the largest power of
        two that divides i, the queries of blocks i to i + t - 1 into the keys of the t blocks before them."""
        b, t, at = self.run.b, tile(i), self.run.at
        self.do[:, :, i * b:i * b + b] = do.flatten(0, 1)
        if i > 0:
            keys, queries = slice((i - t) * b, i * b), slice(i * b, min((i + t) * b, self.shape[3]))
            q, out, lse, do = (u[:, :, queries] for u in (self.q, self.rounded, self.lse, self.do))
            dq, dk, dv = kernels.attend_backward(q, self.k[:, :, keys], self.v[:, :, keys], out, lse, do, at[queries],
                                                 at[keys], self.run.slopes)
            self.dq[:, :, queries] += dq
            self.dk[:, :, keys] += dk
            self.dv[:, :, keys] += dv

    def finish(self):
        """What this chunk's keys add to dq, and the gradient of all attention, both (A, B, H, C, D)."""
        return self.dq.view(self.shape), self.do.view(self.shape)


class Rows:
    """The same, row after row, for a short chunk: the scores of its C queries over its first C - b keys may be held
    (nobody in the chunk sees the last block's). Everything in float32 or more. Inside: N = A B G, and the R query heads
    of a key head stand together.
    """

    def __init__(self, run, q, out, lse):
        (A, B, _, C, D), self.run = q.shape, run
        self.shape, self.N, self.n_keys = q.shape, A * B * run.G, C - run.b
        self.q = (q.to(out.dtype) * run.scale).view(self.N, -1, C, D)          # (N, R, C, D)
        self.out, self.lse = out.view(self.q.shape), lse.view(*self.q.shape[:3], 1)
        self.q_rows, self.out_rows, self.lse_rows = (self.blocks(u) for u in (self.q, self.out, self.lse))
        self.k, self.v = out.new_zeros(self.N, C, D), out.new_zeros(self.N, D, C)

    def blocks(self, u):
        """(N, R, C, n) -> a list of (N, R b, n), one a block"""
        return u.unflatten(2, (-1, self.run.b)).transpose(1, 2).flatten(2, 3).unbind(1)

    def read(self, i):
        (A, B, H, _, D), b = self.shape, self.run.b
        out, p = self.out_rows[i], i * b
        if p > 0:
            n = min(max(p, 15), self.n_keys)    # 16 numbers a row: torch's softmax is far slower for fewer
            s = torch.bmm(self.q_rows[i], self.k[:, :n].mT)                     # (N, R b, n)
            s.view(A * B, H, b, n).add_(self.run.in_chunk[:, p:p + b, :n])      # -inf from p on
            s = torch.cat([self.lse_rows[i], s], -1).softmax(-1)
            out = torch.baddbmm(s[..., :1] * out, s[..., 1:], self.v[..., :n].mT)
        return out.reshape(A, B, H, b, D)

    def write(self, i, k, v):
        A, B, _, C, D = self.shape
        rows = slice(i * self.run.b, (i + 1) * self.run.b)
        self.k.view(A, B, -1, C, D)[..., rows, :] = k.transpose(2, 3)
        self.v.view(A, B, -1, D, C)[..., rows] = v.permute(0, 1, 3, 4, 2)

    def pairs(self):
        return self.k, self.v.mT

    def rebuild(self, k, v, dk, dv):
        (A, B, H, C, D), n = self.shape, self.n_keys
        self.k, self.v, self.dk, self.dv = (u.to(self.q.dtype).reshape(self.N, C, D) for u in (k, v, dk, dv))
        self.q, base = self.q.flatten(1, 2), self.lse.flatten(1)                # (N, R C, D), (N, R C)
        s = torch.bmm(self.q, self.k[:, :n].mT)                                 # (N, R C, n)
        s.view(A * B, H, C, n).add_(self.run.in_chunk)
        lse = torch.logaddexp(base, s.logsumexp(-1))
        self.p = torch.exp(s - lse[..., None])                                  # 0 where not seen
        self.out = torch.baddbmm(torch.exp(base - lse)[..., None] * self.out.flatten(1, 2), self.p, self.v[:, :n])
        self.p_of_key = self.p.mT.contiguous()                                  # (N, n, R C)
        self.out_rows = self.blocks(self.out.view(self.N, -1, C, D))
        self.do, self.delta = torch.zeros_like(self.out), self.out.new_zeros(self.N, 1, self.out.size(1))
        return self.out.view(self.shape), lse.view(self.shape[:4])

    def pull(self, i):
        (A, B, _, _, D), b = self.shape, self.run.b
        rows = slice(i * b, i * b + b)
        dk, dv = self.dk[:, rows], self.dv[:, rows]
        if i * b < self.n_keys:         # of queries not pushed yet p is 0: they do not see this block
            p = self.p_of_key[:, rows]                                              # (N, b, R C)
            ds = p * (torch.bmm(self.v[:, rows], self.do.mT) - self.delta)
            dk, dv = torch.baddbmm(dk, ds, self.q), torch.baddbmm(dv, p, self.do)   # q holds 1 / sqrt(D)
        return dk.view(A, B, -1, b, D), dv.view(A, B, -1, b, D)

    def push(self, i, do):
        C, D, b = *self.shape[3:], self.run.b
        rows, do = slice(i * b, i * b + b), do.reshape(self.N, -1, b, D)
        self.do.view(self.N, -1, C, D)[:, :, rows] = do
        self.delta.view(self.N, -1, C)[:, :, rows] = (do * self.out_rows[i].view(do.shape)).sum(-1)     # da_i . a_i

    def finish(self):
        n = self.n_keys
        ds = self.p * (torch.bmm(self.do, self.v[:, :n].mT) - self.delta.mT)
        return (torch.bmm(ds, self.k[:, :n]) * self.run.scale).view(self.shape), self.do.view(self.shape)


# ---------------------------------------------------------------------------------------------------------------------
# tiled and wavefront: the loop, forward and backward
# ---------------------------------------------------------------------------------------------------------------------

class Known(NamedTuple):
    """What a chunk's inputs tell before the chunk starts."""
    n: torch.Tensor                         # n1(x) without its weight (A, rows, d)
    r: Optional[torch.Tensor]               # and the root mean square's inverse
    q: torch.Tensor                         # (A, B, H, C, D)
    kt: torch.Tensor                        # (A, B, G, C, D), the temporary pairs
    vt: torch.Tensor
    saved_q: Optional[tuple]                # QK-norm's, for the way back
    saved_kt: Optional[tuple]


class Run:
    """One pass of the stack over x (B, T, d) at positions pos (B or 1, T): sizes, positions, and the loop.

    Tensors over the whole stack have the layer first: states (L + 1, B, T, d), where states[l] is layer l's input and
    states[l + 1] its output. T is padded on the right to whole chunks: no real position sees the padding. Products take
    rows in the order (A, C / b, B b, n): what goes at once stands together.
    """

    def __init__(self, cfg, x, pos):
        self.cfg, (self.B, self.T, self.d) = cfg, x.shape
        self.L, self.H, self.G, self.D = cfg.n_layer, cfg.n_head, cfg.n_kv_head, cfg.head_dim
        self.b = b = min(cfg.block, self.T)
        size = self.T if cfg.way == "tiled" else max(cfg.chunk // b, 1) * b
        self.C = -(-self.T // (-(-self.T // size) * b)) * b         # even chunks, with little padding
        self.chunks = -(-self.T // self.C)
        self.length = self.chunks * self.C
        self.inner = Tiles if cfg.way == "tiled" else Rows
        self.dtype, self.wide = compute_dtype(x), torch.promote_types(x.dtype, torch.float32)
        self.scale = 1 / math.sqrt(self.D)
        self.at = torch.arange(self.length, device=x.device, dtype=torch.int32)
        self.slopes = alibi_slopes(self.H, x.device, self.wide) if cfg.pos == "alibi" else None
        self.in_chunk = self.in_chunk_bias() if self.inner is Rows else None
        self.pos = torch.cat([pos, pos[:, -1:].expand(-1, self.length - self.T)], 1)    # attend wants them ascending
        self.tables = None
        if cfg.pos == "rope":
            self.tables = rotary_tables(self.pos, self.D, cfg.rope_theta, self.wide)    # (B or 1, length, D)

    def in_chunk_bias(self):
        """What Rows adds to the scores in a chunk: ALiBi, and -inf on the own block and after. (H or 1, C, C - b)"""
        q_at, k_at = self.at[:self.C, None], self.at[:self.C - self.b]
        return scores_bias(self.cfg, (q_at - k_at)[None], (k_at < q_at - q_at % self.b)[None], self.wide)

    def steps(self):
        """(s, lo, hi): in step s each layer l in lo..hi-1 does its chunk s - l."""
        return [(s, max(0, s - self.chunks + 1), min(self.L, s + 1)) for s in range(self.chunks + self.L - 1)]

    def diagonal(self, buffer, s, lo, hi):
        """The view (A, ..., C, n) of the chunks s - l of the layers l in lo..hi-1 in buffer (L, ..., T, n). From chunk
        (l, c) to (l + 1, c - 1) is always the same way in memory, a layer on and a chunk back: a stride of the view."""
        stride = list(buffer.stride())
        start = buffer.storage_offset() + lo * stride[0] + (s - lo) * self.C * stride[-2]
        stride[0] -= self.C * stride[-2]
        return buffer.as_strided((hi - lo, *buffer.shape[1:-2], self.C, buffer.size(-1)), stride, start)

    def to_rows(self, u):
        """(A, B, C, n) -> (A, C / b, B b, n)"""
        return u.unflatten(2, (-1, self.b)).transpose(1, 2).flatten(2, 3)

    def from_rows(self, u):
        """(A, C / b, B b, n) -> (A, B, C, n)"""
        return u.unflatten(2, (self.B, self.b)).transpose(1, 2).flatten(2, 3)

    def heads(self, u):
        """A projection's rows (A, rows, heads D) -> (A, B, positions, heads, D)"""
        return u.view(u.size(0), -1, self.B, self.b, u.size(-1) // self.D, self.D).transpose(1, 2).flatten(2, 3)

    def unheads(self, u):
        """(A, B, positions, heads, D) -> rows (A, rows, heads D)"""
        return u.unflatten(2, (-1, self.b)).transpose(1, 2).flatten(4).flatten(1, 3)

    def rotation(self, s, lo, hi):
        """The rotary tables (A, B or 1, C, D) of the active chunks."""
        chunks = slice(s - hi + 1, s - lo + 1)
        return self.tables and [u.unflatten(1, (-1, self.C)).transpose(0, 1)[chunks].flip(0) for u in self.tables]

    def queries(self, x, w, rotary):
        """What depends on the rows x (A, rows, d) alone: Known."""
        n, r = normalize(x.to(self.wide), self.cfg.norm, self.cfg.norm_eps)
        q, kt, vt = self.heads(product(n, w.qkv)).split([self.H, self.G, self.G], 3)
        q, saved_q = shape_heads(q, w.q_norm, rotary, self.cfg)
        kt, saved_kt = shape_heads(kt, w.k_norm, rotary, self.cfg)
        return Known(n, r, *(u.transpose(2, 3).contiguous() for u in (q, kt, vt)), saved_q, saved_kt)

    def pairs(self, n, w, rotary):
        """The persistent pairs of n1(y) (A, rows, d): k, v (A, B, positions, G, D), and what QK-norm saved of k."""
        k, v = self.heads(product(n, w.kv)).split(self.G, 3)
        k, saved = shape_heads(k, w.k_norm, rotary, self.cfg)
        return k, v, saved

    # what a chunk's queries see before it starts

    def before(self, known, s, lo, hi, past):
        """Attention to the temporary pairs, to the keys of earlier chunks, and to past, which holds (k, v, positions)
        of a cache's layers: out (A, B, H, C, D), lse (A, B, H, C), float32 or more."""
        q, layers = known.q, range(lo, hi)
        state = self.own(known)
        if s > lo:
            state = self.merged(state, [self.earlier(q[l - lo], l, s - l) for l in layers])
        if past is not None:
            state = self.merged(state, [self.cached(q[l - lo], past[l], s - l) for l in layers])
        return state

    def own(self, known):
        """Each position's own temporary pair; with blocks, causally those of its block."""
        q, kt, vt = known.q, known.kt, known.vt
        if self.b == 1:
            kt, vt = (u.to(self.wide).repeat_interleave(self.H // self.G, 2) for u in (kt, vt))
            return vt, (q.to(self.wide) * kt).sum(-1) * self.scale
        at = self.at[:self.b]
        out, lse = kernels.attend(*(self.by_block(u) for u in (q, kt, vt)), at, at, self.slopes)
        return self.by_chunk(out.to(self.wide), q), self.by_chunk(lse[..., None], q).squeeze(-1)

    def by_block(self, u):
        """(A, B, heads, C, n) -> (A B C / b, heads, b, n)"""
        return u.unflatten(3, (-1, self.b)).transpose(2, 3).flatten(0, 2)

    def by_chunk(self, u, like):
        """(A B C / b, heads, b, n) -> (A, B, heads, C, n), contiguous"""
        return u.view(*like.shape[:2], -1, *u.shape[1:]).transpose(2, 3).flatten(3, 4).contiguous()

    def earlier(self, q, l, c):
        """Layer l's queries of chunk c over its keys of all earlier chunks."""
        if c == 0:
            return torch.zeros_like(q), q.new_full(q.shape[:3], -math.inf, dtype=self.wide)
        start = c * self.C
        k, v = self.k[l, :, :, :start], self.v[l, :, :, :start]
        return kernels.attend(q, k, v, self.at[start:start + self.C], self.at[:start], self.slopes)

    def cached(self, q, past, c):
        """A layer's queries of chunk c over the pairs that a cache holds."""
        k, v, at = past
        here = self.pos[:, c * self.C:(c + 1) * self.C]
        here, at = (u.int().squeeze(0) for u in (here, at))
        return kernels.attend(q, k, v, here, at, self.slopes)

    def merged(self, a, parts):
        """State a merged with one (out, lse) for each layer."""
        shape, b = a[0].shape, [torch.stack(u) for u in zip(*parts)]
        out, lse = kernels.merge(*(u.flatten(0, 1) for u in (*a, b[0].to(self.wide), b[1])))
        return out.view(shape).contiguous(), lse.view(shape[:4]).contiguous()

    # forward

    def forward(self, x, w, past=None, keep=False):
        """All layers: states (L + 1, B, T, d), T padded. Leaves the persistent pairs in self.k, self.v (L, B, G, T, D),
        and with keep the temporary ones in self.kt, self.vt."""
        w = w.matrices(lambda u: u.mT.contiguous().to(self.dtype))          # (in, out): faster on CPUs
        states = x.new_empty(self.L + 1, self.B, self.length, self.d)
        states[0] = torch.cat([x, x[:, -1:].expand(-1, self.length - self.T, -1)], 1)   # padding of a usual size
        shape = (self.L, self.B, self.G, self.length, self.D)
        self.k, self.v = states.new_empty(2, *shape, dtype=self.dtype)
        if keep:
            self.kt, self.vt = states.new_empty(2, *shape, dtype=self.dtype)
        for s, lo, hi in self.steps():
            self.forward_step(states, w.map(lambda u: u[lo:hi]), s, lo, hi, past, keep)
        return states

    def forward_step(self, states, w, s, lo, hi, past, keep):
        """Each active layer's chunk."""
        rows, rotary = self.to_rows(self.diagonal(states[:-1], s, lo, hi)), self.rotation(s, lo, hi)
        known = self.queries(rows.flatten(1, 2), w, rotary)
        attention = self.inner(self, known.q, *self.before(known, s, lo, hi, past))
        ys, kv_norm = [], self.cfg.norm if self.cfg.kv_norm else "none"
        for i, x in enumerate(rows.unbind(1)):                              # one block of each layer, (A, B b, d)
            a = attention.read(i).transpose(2, 3).flatten(3).flatten(1, 2)
            z = add_product(x, a, w.out)
            y = add_product(z, F.gelu(product(normalized(z, self.cfg.norm, self.cfg.norm_eps), w.up)), w.down)
            here = rotary and [u[:, :, i * self.b:(i + 1) * self.b] for u in rotary]
            k, v, _ = self.pairs(normalized(y, kv_norm, self.cfg.norm_eps), w, here)
            attention.write(i, k, v)
            ys.append(y)
        self.diagonal(states[1:], s, lo, hi).copy_(self.from_rows(torch.stack(ys, 1)))
        temporary = [(self.kt, known.kt), (self.vt, known.vt)] if keep else []
        for buffer, new in [*zip((self.k, self.v), attention.pairs()), *temporary]:
            view = self.diagonal(buffer, s, lo, hi)
            view.copy_(new.reshape(view.shape))

    # backward

    def backward(self, states, w, dy):
        """The gradients of x (B, T, d) and of w, given the states that forward made and dy (B, T, d)."""
        w = w.matrices(lambda u: u.to(self.dtype))                              # (out, in): to go back through it
        wt = w.matrices(lambda u: u.mT.contiguous())                            # (in, out): to rebuild forward's work
        shape = (2, self.L, self.B, self.G, self.length, self.D)
        self.k, self.v = states.new_empty(shape, dtype=self.dtype)
        self.dk, self.dv = states.new_zeros(shape, dtype=self.wide)
        for l in range(self.L):
            rotary = self.tables and [u[None] for u in self.tables]
            n, _ = self.kv_input(self.to_rows(states[l + 1, None]).flatten(1, 2))
            k, v, _ = self.pairs(n, wt.map(lambda u: u[l:l + 1]), rotary)
            self.k[l], self.v[l] = k[0].transpose(1, 2), v[0].transpose(1, 2)
        grads = w.map(lambda u: torch.zeros_like(u, dtype=self.wide))
        d_states = states.new_zeros(self.L + 1, self.B, self.C, self.d, dtype=self.wide)    # each layer's chunk at hand
        dx, dy = states.new_empty(states.shape[1:]), F.pad(dy, (0, 0, 0, self.length - self.T))
        for s, lo, hi in reversed(self.steps()):
            if hi == self.L:                                                    # the top layer's dy comes from outside
                c = s - self.L + 1
                d_states[hi] = dy[:, c * self.C:(c + 1) * self.C]
            part = (u.map(lambda u: u[lo:hi]) for u in (w, wt, grads))
            d_states[lo:hi] = self.backward_step(states, d_states[lo + 1:hi + 1], *part, s, lo, hi)
            if lo == 0:
                dx[:, s * self.C:(s + 1) * self.C] = d_states[0]
        return dx[:, :self.T], grads

    def backward_step(self, states, dy, w, wt, grads, s, lo, hi):
        """Each active layer's chunk: adds to grads and to the keys' gradients of earlier chunks; returns dx."""
        x, y = self.diagonal(states[:-1], s, lo, hi), self.diagonal(states[1:], s, lo, hi)
        x, y, dy = (self.to_rows(u).flatten(1, 2) for u in (x, y, dy))                      # (A, rows, d)
        rotary = self.rotation(s, lo, hi)
        # what forward computed, again, all positions at once
        known = self.queries(x, wt, rotary)
        attention = self.inner(self, known.q, *self.before(known, s, lo, hi, None))
        a, lse = attention.rebuild(*(self.diagonal(u, s, lo, hi) for u in (self.k, self.v, self.dk, self.dv)))
        a_rows = self.unheads(a.transpose(2, 3))
        n2, r2 = normalize(add_product(x, a_rows, wt.out).to(self.wide), self.cfg.norm, self.cfg.norm_eps)
        u = product(n2, wt.up)
        m, rm = self.kv_input(y)
        saved_k = self.pairs(m, wt, rotary)[2] if w.k_norm is not None else None
        # position after position
        rebuilt = [self.blocks(part) for part in (dy, m, rm, gelu_slope(u), n2, r2)]
        (g, du, dz, dkv), dk_norm = self.reverse(attention, w, rebuilt, saved_k, rotary)
        # the rest, all positions at once
        dq, do = attention.finish()
        dkt, dvt = self.before_backward(known, a, lse, do, dq, s, lo, hi)
        dq, dq_norm = shape_heads_backward(dq.transpose(2, 3), known.saved_q, w.q_norm, rotary, self.cfg)
        dkt, dkt_norm = shape_heads_backward(dkt.transpose(2, 3), known.saved_kt, w.k_norm, rotary, self.cfg)
        dqkv = self.unheads(torch.cat([dq, dkt, dvt.transpose(2, 3)], 3)).to(self.dtype)
        for grad, out, into in ((grads.qkv, dqkv, known.n), (grads.kv, dkv, m), (grads.out, dz, a_rows),
                                (grads.up, du, n2), (grads.down, g, F.gelu(u))):
            grad += product(out.mT.to(self.dtype), into.to(self.dtype))
        if w.q_norm is not None:
            grads.q_norm.add_(dq_norm)
            grads.k_norm.add_(dk_norm + dkt_norm)
        dx = normalize_backward(dz, product(dqkv, w.qkv), known.n, known.r)
        return self.from_rows(dx.unflatten(1, (-1, self.B * self.b)))

    def kv_input(self, y):
        """What the persistent pairs are projected from: n1(y), and its r."""
        return normalize(y.to(self.wide), self.cfg.norm if self.cfg.kv_norm else "none", self.cfg.norm_eps)

    def blocks(self, u):
        """Rows (A, rows, n) -> a list of (A, B b, n), one a block; of None, Nones."""
        n = self.C // self.b
        return [None] * n if u is None else u.unflatten(1, (n, -1)).unbind(1)

    def reverse(self, attention, w, rebuilt, saved_k, rotary):
        """What must go one block after the other, from the last to the first (the equations at the top of this file).
        Returns dL/dy, the gradients of the MLP's pre-activations, of z and of Wkv n1(y), each (A, rows, .), from which
        the weights' come; and the gradient of QK-norm's weight through the persistent keys."""
        done, dk_norm, b = [], 0, self.b
        for i, (dy, m, rm, slope, n2, r2) in reversed(list(enumerate(zip(*rebuilt)))):
            dk, dv = (u.transpose(2, 3) for u in attention.pull(i))         # dk_i, dv_i (A, B, b, G, D)
            here = slice(i * b, (i + 1) * b)
            dk, more = shape_heads_backward(dk, saved_k and [u[:, :, here] for u in saved_k], w.k_norm,
                                            rotary and [u[:, :, here] for u in rotary], self.cfg)
            dkv = self.unheads(torch.cat([dk, dv], 3)).to(self.dtype)
            g = normalize_backward(dy, product(dkv, w.kv), m, rm)           # g_i = dy_i + J1_i (Wk^T dk_i + Wv^T dv_i)
            du = product(g, w.down) * slope                                 # gelu'(u_i) * W_down^T g_i
            dz = normalize_backward(g, product(du, w.up), n2, r2)           # dz_i = g_i + J2_i W_up^T du_i
            da = self.heads(product(dz, w.out))                             # da_i = Wo^T dz_i
            attention.push(i, da.transpose(2, 3))                           # into dk_j, dv_j of all j < i
            done.append((g, du, dz, dkv))
            dk_norm = dk_norm if more is None else dk_norm + more
        return [torch.stack(u[::-1], 1).flatten(1, 2) for u in zip(*done)], dk_norm

    def before_backward(self, known, a, lse, do, dq, s, lo, hi):
        """The way back of `before`, from the finished attention a, its lse and its gradient do: adds to dq and to the
        gradients of earlier chunks' keys; returns dkt, dvt (A, B, G, C, D)."""
        q, kt, vt, narrow = known.q, known.kt, known.vt, [u.to(self.dtype) for u in (a, do)]
        for l in range(lo, hi):
            start = (s - l) * self.C
            if start > 0:
                k, v, dk, dv = (u[l, :, :, :start] for u in (self.k, self.v, self.dk, self.dv))
                grads = kernels.attend_backward(q[l - lo], k, v, narrow[0][l - lo], lse[l - lo], narrow[1][l - lo],
                                                self.at[start:start + self.C], self.at[:start], self.slopes)
                for total, more in zip((dq[l - lo], dk, dv), grads):
                    total += more
        if self.b > 1:
            at = self.at[:self.b]
            a, lse, do = (self.by_block(u) for u in (narrow[0], lse[..., None], narrow[1]))
            grads = kernels.attend_backward(*(self.by_block(u) for u in (q, kt, vt)), a, lse.squeeze(-1), do, at, at,
                                            self.slopes)
            more, dkt, dvt = (self.by_chunk(u, q) for u in grads)
            dq += more
            return dkt, dvt
        q, kt, vt = (u.to(self.wide) for u in (q, kt, vt))
        kt, vt = (u.repeat_interleave(self.H // self.G, 2) for u in (kt, vt))
        p = torch.exp((q * kt).sum(-1, keepdim=True) * self.scale - lse[..., None])
        ds = p * (do * (vt - a)).sum(-1, keepdim=True) * self.scale
        dq += ds * kt
        return [u.unflatten(2, (self.G, -1)).sum(3) for u in (ds * q, p * do)]


def gelu_slope(u):
    """d gelu(u) / du"""
    return torch.ops.aten.gelu_backward(torch.ones_like(u), u, approximate="none")


class Stack(torch.autograd.Function):
    """The layers as one differentiable function of x (B, T, d) and the weights. Saved for the backward: the states,
    which are x and y of each layer, and the weights."""

    @staticmethod
    def forward(ctx, cfg, x, pos, *weights):
        ctx.run = run = Run(cfg, x, pos)

        def whole_stack(x, *w):
            states = run.forward(x, Weights(*w))
            run.k = run.v = None                            # the backward makes them again from y
            return [states]
        with torch.autocast(x.device.type, enabled=False):
            states, = replay(run, whole_stack, x, *weights)
        ctx.save_for_backward(states, *weights)
        return states[-1, :, :run.T].clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy):
        run, (states, *weights) = ctx.run, ctx.saved_tensors

        def whole_backward(states, dy, *w):
            dx, grads = run.backward(states, Weights(*w), dy)
            run.k = run.v = run.dk = run.dv = None
            return [dx, *grads]
        with torch.autocast(states.device.type, enabled=False):
            dx, *grads = replay(run, whole_backward, states, dy, *weights)
        grads = [None if w is None else g.to(w.dtype) for w, g in zip(weights, grads)]
        return None, dx.to(states.dtype), None, *grads


GRAPHS = {}             # {what runs, on which shapes: a Graph, or None where it was seen once}, the last few used


class Graph(NamedTuple):
    graph: object
    inputs: list        # where it reads, and
    outputs: list       # where it writes
    run: Run            # whose tables (positions, biases) it reads: they must live as long


def replay(run, function, *inputs):
    """function(*inputs), tensors and Nones in and out. On CUDA what comes a second time with the same shapes is
    recorded as a graph and replayed from then on: a position is some twenty small kernels, and launching them takes
    longer than running them. (float64 runs plain: its attention, plain PyTorch, looks at positions on the host.)"""
    x = inputs[0]
    if not (run.cfg.cuda_graphs and recordable(x, run.dtype)):
        return function(*inputs)
    key = (function.__name__, x.device, run.dtype, str(run.cfg),
           *((u.shape, u.dtype) for u in inputs if u is not None))
    seen, found = key in GRAPHS, GRAPHS.pop(key, None)
    if seen and found is None:
        found = record(run, function, inputs)
    GRAPHS[key] = found                                     # now the last one used
    while len(GRAPHS) > 8:
        GRAPHS.pop(next(iter(GRAPHS)))
    if found is None:
        return function(*inputs)
    for mine, given in zip(found.inputs, inputs):
        if given is not None:
            mine.copy_(given)
    found.graph.replay()
    return [None if u is None else u.clone() for u in found.outputs]    # the next replay overwrites them


def recordable(x, dtype):
    return x.is_cuda and kernels.runs_triton(x.device, dtype) and not torch.cuda.is_current_stream_capturing()


@torch.inference_mode(False)
@torch.no_grad()
def record(run, function, inputs):
    """A Graph of function(*inputs). It runs once before, on a side stream, in which kernels are compiled."""
    device = inputs[0].device
    inputs = [None if u is None else u.clone() for u in inputs]
    with torch.cuda.device(device):
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            function(*inputs)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # the backward has a thread of its own: other threads may go on calling CUDA
        with torch.cuda.graph(graph, stream=torch.cuda.Stream(), capture_error_mode="thread_local"):
            outputs = function(*inputs)
    return Graph(graph, inputs, outputs, run)


# ---------------------------------------------------------------------------------------------------------------------
# the model
# ---------------------------------------------------------------------------------------------------------------------

class Model(LanguageModel):
    """The Recurrent Transformer language model. See Config for its sizes and forward for its use."""

    def __init__(self, cfg):
        super().__init__()
        self.cfg = cfg
        self.wte = nn.Embedding(cfg.vocab_size, cfg.n_embd)
        self.drop = nn.Dropout(cfg.dropout)
        self.blocks = nn.ModuleList(Block(cfg, layer) for layer in range(cfg.n_layer))
        self.norm = Norm(cfg.norm, cfg.n_embd, cfg.norm_eps)
        self.head = nn.Linear(cfg.n_embd, cfg.vocab_size, bias=False)
        self.init_weights()

    @torch.no_grad()
    def init_weights(self):
        """Normal, cut off at 3 sigma. sigma = 1 / sqrt(d) for all that reads the residual stream, for the embedding
        and the head; the two projections into the stream shrink with depth: 1 / sqrt(2 fan_in (l + 1)), l from 0."""
        for name, p in self.named_parameters():
            if p.dim() == 2:
                std = 1 / math.sqrt(self.cfg.n_embd)
                if name.endswith(("wo.weight", "w_down.weight")):
                    std = 1 / math.sqrt(2 * p.size(1) * (int(name.split(".")[1]) + 1))
                nn.init.trunc_normal_(p, std=std, a=-3 * std, b=3 * std)
        if self.cfg.tie_embeddings:
            self.head.weight = self.wte.weight

    @property
    def context_limit(self):
        """The most tokens one cache or one forward may hold; None where the positions have no end."""
        return self.cfg.block_size if self.cfg.pos == "rope" else None

    def hidden(self, idx, cache, n_valid):
        T = idx.size(1)
        pos = torch.arange(T, device=idx.device)[None] if cache is None else cache.place(T, n_valid)
        self.check_context(T if cache is None else cache.end, "{} tokens are")
        x = self.layers(self.drop(self.wte(idx)), pos, cache)               # (B, T, C)
        if cache is not None:
            cache.advance()
        return self.norm(x)

    @torch.compiler.disable     # a compiler would unroll the loop over positions
    def layers(self, x, pos, cache=None):
        """All layers on x (B, T, C) at positions pos (B or 1, T), after what the cache holds: (B, T, C)."""
        # rows that go on inside a block, each somewhere else, go token by token
        inside = cache is not None and (cache.ragged and cache.longest > 0 or cache.longest % self.cfg.block > 0)
        if self.cfg.way == "naive" or (self.cfg.block > 1 and inside):
            return self.layers_naive(x, pos, cache)
        if cache is None:
            return Stack.apply(self.cfg, x, pos, *stack_weights(self.blocks))
        if x.size(1) == 1 and self.cfg.block == 1:
            return self.layers_decode(x, pos, cache)
        return self.layers_prefill(x, pos, cache)

    def rotary(self, pos, dtype):
        return rotary_tables(pos, self.cfg.head_dim, self.cfg.rope_theta, dtype) if self.cfg.pos == "rope" else None

    def layers_naive(self, x, pos, cache):
        rotary = self.rotary(pos, x.dtype)
        for l, block in enumerate(self.blocks):
            x, *pairs = block(x, pos, rotary, cache)
            self.keep(cache, l, *pairs)
        return x

    def layers_decode(self, x, pos, cache):
        """One token a row, in block 1."""
        rotary, wide = self.rotary(pos, x.dtype), torch.promote_types(x.dtype, torch.float32)
        distance = (pos - torch.arange(cache.end, device=x.device))[:, None, None]      # (B or 1, 1, 1, S)
        bias = scores_bias(self.cfg, distance, distance >= 0, wide)
        for block in self.blocks:
            x = block.decode(x, pos, rotary, bias, cache)
        return x

    def layers_prefill(self, x, pos, cache):
        """The wavefront (or the tiles) over the new tokens, after those of the cache."""
        run = Run(self.cfg, x, pos)                             # under the caller's autocast, which tells the dtype
        past = [cached_kv(self.cfg, cache, l, x, pos) for l in range(run.L)] if cache.longest else None
        with torch.autocast(x.device.type, enabled=False):
            states = run.forward(x, stack_weights(self.blocks), past, keep=self.cfg.block > 1)
        for l in range(run.L):
            pairs = (run.k, run.v, run.kt, run.vt) if self.cfg.block > 1 else (run.k, run.v)
            self.keep(cache, l, *(u[l, :, :, :run.T] for u in pairs))
        return states[-1, :, :run.T]

    def keep(self, cache, l, k, v, kt=None, vt=None):
        """Layer l's new pairs into the cache, temporary ones where it has room for them: where blocks need them."""
        if cache is not None:
            cache.append(l, k, v)
            if len(cache.k) > self.cfg.n_layer:
                cache.append(l + self.cfg.n_layer, kt, vt)

    def init_cache(self, batch_size, max_len):
        """An empty cache for batch_size rows of up to max_len tokens (under rope at most block_size). With block > 1 it
        holds the temporary pairs too, as layers n_layer and up: the last block, unfinished, needs them."""
        self.check_context(max_len, "max_len={} is")
        cfg, w = self.cfg, self.wte.weight
        cfg = replace(cfg, n_layer=cfg.n_layer * (2 if cfg.block > 1 else 1))
        return KVCache(cfg, batch_size, max_len, w.device, compute_dtype(w))

    def flops_per_token(self):
        """Floating-point operations of one token's forward and backward in a sequence of block_size: 6 for
        each weight of a matrix product (Wk and Wv are used twice, for either pair), and 12 C for each visible key,
        averaged over the positions. What the backward computes again is not counted."""
        cfg = self.cfg
        weights = sum(p.numel() for p in self.blocks.parameters() if p.dim() == 2) + cfg.vocab_size * cfg.n_embd
        weights += 2 * cfg.n_layer * cfg.n_embd * cfg.n_kv_head * cfg.head_dim
        return 6.0 * weights + 12.0 * cfg.n_layer * cfg.n_embd * (cfg.block_size + 1) / 2

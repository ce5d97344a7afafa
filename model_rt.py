"""
The Recurrent Transformer (RT): later positions read keys and values of a layer's own outputs.

In a Transformer, position i of layer l attends to keys and values made from the output of
layer l - 1. In an RT those of earlier positions are made from the output of layer l itself,
so a single layer is as deep in time as the sequence is long. This costs no parameters and
no cache, but a layer is now a loop over positions.

One layer, for positions i = 1 .. T with inputs x_i. n1 and n2 are RMSNorms, and so is the
QK-norm nq, nk, over all heads together (qk_norm=none: without it).

    q_i  = nq(Wq n1(x_i))                                           (1)
    k^_i = nk(Wk n1(x_i))   v^_i = Wv n1(x_i)    temporary pair, for position i alone
    a_i  = Attention(q_i; (k_j, v_j) for j < i, and (k^_i, v^_i))   (2)
    z_i  = x_i + Wo a_i                                             (3)
    y_i  = z_i + W_down gelu(W_up n2(z_i))                          (4)  the next layer's x_i
    k_i  = nk(Wk n1(y_i))   v_i = Wv n1(y_i)                        (5)
                                                 persistent pair, for all positions after i

Scores are q_i . k_j / sqrt(D) - m_h (i - j). The second term is ALiBi, with m_h = 2^(-8 h / H)
in head h; for the temporary pair it is 0.

          y_1          y_2          y_3          y_4
           ^ \          ^ \          ^ \          ^
           |  k_1, v_1  |  k_2, v_2  |  k_3, v_3  |
           |   `--------+---`--------+---`--------+--   to all later positions
           | k^_1       | k^_2       | k^_3       | k^_4
          x_1          x_2          x_3          x_4

recurrent=false is the baseline: later positions attend to the temporary pairs, (5) is left
out, and the layer is a plain Transformer's with everything else as it is.

Not in the paper, but in its code (commit a21b42d): the exact gelu, and the initialisation.
Departures: the norms are RMSNorm, as in the text (the code's configs use LayerNorm); ALiBi and
every softmax are in float32 under bfloat16 too; RoPE and grouped heads are additions. Dropout
is on embeddings only.

Paper: "The Recurrent Transformer: Greater Effective Depth and Efficient Decoding", 2026
(arXiv:2604.21215); the authors' code: github.com/geniucos/recurrent-transformer.

Shapes: B batch, T positions, S keys, C width, H query heads, G key/value heads, D head size.
"""
import math
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F

import kernels
import rt_wavefront
from model_gpt import (BaseConfig, LanguageModel, RMSNorm, alibi_slopes, apply_rope, attend,
                       attention_bias, choice, compute_dtype, rope_tables)


@dataclass
class Config(BaseConfig):
    n_mlp: int = 0               # hidden width of the MLP (0: 4 n_embd)
    pos: str = choice("alibi", "rope", "none")
    qk_norm: str = choice("none", "full")   # full: nq and nk, each with a weight
    recurrent: bool = True       # false: a plain Transformer, the baseline
    kv_norm: bool = True         # false: (5) without n1, worse (Appendix E.2)
    schedule: str = choice("auto", "naive", "tiled", "wavefront")   # auto: by fast
    chunk: int = 32              # positions of a wavefront's chunk
    cuda_graphs: bool = True     # on a GPU the wavefront is replayed as a CUDA graph
    tie_embeddings: bool = False    # the head is the embedding matrix

    RESUME_OVERRIDES = ("schedule", "chunk", "cuda_graphs")

    def __post_init__(self):
        super().__post_init__()
        self.at_least(1, "chunk")
        self.at_least(0, "n_mlp")
        self.n_mlp = self.n_mlp or 4 * self.n_embd
        if self.head_dim > kernels.HEAD_SIZES[-1]:
            raise ValueError(f"n_embd / n_head = {self.head_dim}: a head is at most "
                             f"{kernels.HEAD_SIZES[-1]} wide")
        if self.schedule == "wavefront" and not self.kv_norm:
            raise ValueError("schedule=wavefront needs kv_norm=true; schedule=tiled does not")
        fast = "wavefront" if self.kv_norm else "tiled"
        auto = fast if self.fast else "naive"
        self.schedule_used = auto if self.schedule == "auto" else self.schedule


# ---- the equations, position after position ----

class Layer(nn.Module):
    """One layer, a Block in other files."""

    def __init__(self, cfg):
        super().__init__()
        self.head_dim = cfg.head_dim
        C, Q, K = cfg.n_embd, cfg.n_head * cfg.head_dim, cfg.n_kv_head * cfg.head_dim
        self.norm1, self.norm2 = RMSNorm(C, cfg.norm_eps), RMSNorm(C, cfg.norm_eps)
        self.wq = nn.Linear(C, Q, bias=False)
        self.wk = nn.Linear(C, K, bias=False)
        self.wv = nn.Linear(C, K, bias=False)
        self.wo = nn.Linear(Q, C, bias=False)
        self.w_up = nn.Linear(C, cfg.n_mlp, bias=False)
        self.w_down = nn.Linear(cfg.n_mlp, C, bias=False)
        norm = RMSNorm if cfg.qk_norm == "full" else nn.Identity
        self.q_norm, self.k_norm = norm(Q, cfg.norm_eps), norm(K, cfg.norm_eps)

    def forward(self, x, rope, bias):
        """x (B, T, C) -> y (B, T, C). rope: None, or RoPE's tables (cos, sin) of all positions.
        bias (1, H or 1, T, T): ALiBi."""
        q, k_temp, v_temp = self.temporary(x, rope)             # (1), of all positions
        k, v = k_temp[:, :, :0], v_temp[:, :, :0]               # persistent pairs: none yet
        ys = []
        positions = zip(x.split(1, 1), *(u.split(1, 2) for u in (q, k_temp, v_temp)))
        for i, (x_i, q_i, kt_i, vt_i) in enumerate(positions):  # x_i (B, 1, C)
            at = slice(i, i + 1)
            keys, values = torch.cat([k, kt_i], 2), torch.cat([v, vt_i], 2)     # (B, G, i + 1, D)
            a_i = attend(q_i, keys, values, bias[:, :, at, :i + 1], fast=False)     # (2)
            y_i = self.output(x_i, a_i)                                         # (3), (4)
            rope_i = rope and [table[:, :, at] for table in rope]
            k_i, v_i = self.persistent(y_i, rope_i)                             # (5)
            k, v = torch.cat([k, k_i], 2), torch.cat([v, v_i], 2)
            ys.append(y_i)
        return torch.cat(ys, 1)

    def temporary(self, x, rope):
        """Equation (1): q (B, H, n, D); k^, v^ (B, G, n, D)."""
        n = self.norm1(x)
        q = self.heads(self.q_norm(self.wq(n)), rope)
        return q, *self.pair(n, rope)

    def output(self, x, a):
        """Equations (3) and (4): x (B, n, C), a (B, H, n, D) -> y (B, n, C)."""
        z = x + self.wo(a.transpose(1, 2).flatten(2).to(x.dtype))
        return z + self.w_down(F.gelu(self.w_up(self.norm2(z))))

    def persistent(self, y, rope):
        """Equation (5): k, v (B, G, n, D), by the same matrices as the temporary pair."""
        return self.pair(self.norm1(y), rope)

    def pair(self, n, rope):
        return self.heads(self.k_norm(self.wk(n)), rope), self.heads(self.wv(n))

    def heads(self, u, rope=None):
        """(B, n, heads D) -> (B, heads, n, D), rotated if rope is given."""
        u = u.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        return u if rope is None else apply_rope(u, *rope)


class LayerWithoutKVNorm(Layer):
    """The ablation of Appendix E.2: persistent pairs are nk(Wk y_i), Wv y_i."""

    def persistent(self, y, rope):
        return self.pair(y, rope)


# ---- tiled: the paper's Algorithm 1 ----

# All queries of a layer are known from the start. After position i, with t the largest power of
# two that divides i, queries i+1 .. i+t attend to keys i-t+1 .. i. Every query meets every earlier
# key once, so the result is the same, and a key is read log2 T times at most, not T times. For
# T = 8 (the number tells after which position an entry is computed):
#                keys 1 2 3 4 5 6 7 8
#           query 1   .                  . temporary pair
#                 2   1 .
#                 3   2 2 .
#                 4   2 2 3 .
#                 5   4 4 4 4 .
#                 6   4 4 4 4 5 .
#                 7   4 4 4 4 6 6 .
#                 8   4 4 4 4 6 6 7 .
# This is the paper's forward pass under plain autograd. The backward pass of its section 6.4, whose
# loop from the last position to the first has only what dk and dv need, is in rt_wavefront.py.

def layer_tiled(layer, x, rope, slopes):
    """The same as layer(x, ...). The state of a query is attention to the keys that it has met:
    out (B, H, 1, D), and lse (B, H, 1), the logarithm of their sum of e^score."""
    q, k_temp, v_temp = layer.temporary(x, rope)            # (1)
    states = temporary_states(q, k_temp, v_temp)            # [(out, lse), ...], one a position
    pos = torch.arange(x.size(1), device=x.device, dtype=torch.int32)
    qs, ks, vs, ys = q.split(1, 2), [], [], []
    for i, x_i in enumerate(x.split(1, 1), start=1):
        y_i = layer.output(x_i, states[i - 1][0])                           # (3), (4)
        rope_i = rope and [table[:, :, i - 1:i] for table in rope]
        k_i, v_i = layer.persistent(y_i, rope_i)                            # (5)
        ys.append(y_i)
        ks.append(k_i)
        vs.append(v_i)
        t = i & -i                          # the largest power of two that divides i
        keys, queries = slice(i - t, i), slice(i, i + t)
        if i < x.size(1):
            q, k, v = (torch.cat(u, 2) for u in (qs[queries], ks[keys], vs[keys]))
            out, lse = (torch.cat(u, 2) for u in zip(*states[queries]))     # (B, H, t, .)
            out, lse = merge_tile(out, lse, q, k, v, pos[queries], pos[keys], slopes)
            states[queries] = zip(out.split(1, 2), lse.split(1, 2))
    return torch.cat(ys, 1)


def temporary_states(q, k, v):
    """Of one pair, out is its value and lse its score."""
    q, k, v = (u.to(kernels.lse_dtype(u)) for u in (q, k, v))   # float32 or better, as a sum
    k, v = (u.repeat_interleave(q.size(1) // u.size(1), 1) for u in (k, v))
    lse = (q * k).sum(-1) / math.sqrt(q.size(-1))
    return list(zip(v.split(1, 2), lse.split(1, 2)))


def merge_tile(out, lse, q, k, v, q_pos, k_pos, slopes):
    """The states of queries that attend to a tile of keys, all of them earlier, too."""
    if k.size(2) > 32 or q.dtype != lse.dtype:      # attend does not round 16-bit scores
        more, more_lse = kernels.attend(q, k, v, q_pos, k_pos, slopes)
        return kernels.merge(out, lse, more.to(lse.dtype), more_lse)
    # small tiles written out: an operator's overhead is larger than the work
    k, v = (u.repeat_interleave(q.size(1) // u.size(1), 1) for u in (k, v))
    s = q @ k.mT / math.sqrt(q.size(-1))            # (B, H, n, keys)
    if slopes is not None:
        s = s - slopes[:, None, None] * (q_pos[:, None] - k_pos)
    # online softmax: what a query has met is one more pair, of score lse and value out
    s = torch.cat([lse[..., None], s], -1)
    p = s.softmax(-1)
    return p[..., :1] * out + p[..., 1:] @ v, s.logsumexp(-1)


# ---- the model ----

class Model(LanguageModel):
    """The Recurrent Transformer language model."""
    runs_blocks_once = False

    def __init__(self, cfg):
        layer = Layer if cfg.kv_norm else LayerWithoutKVNorm
        super().__init__(cfg, [layer(cfg) for _ in range(cfg.n_layer)])
        self.init_weights()

    @torch.no_grad()
    def init_weights(self):
        """Normal, truncated at 3 sigma. sigma = 1 / sqrt(C) for what reads the residual stream,
        the embedding and the head; the projections into the stream shrink with depth:
        1 / sqrt(2 fan_in (l + 1)) for layer l = 0, 1, ..."""
        for name, p in self.named_parameters():
            if p.dim() == 2:
                std = 1 / math.sqrt(self.cfg.n_embd)
                if name.endswith(("wo.weight", "w_down.weight")):
                    layer = int(name.split(".")[1])
                    std = 1 / math.sqrt(2 * p.size(1) * (layer + 1))
                nn.init.trunc_normal_(p, std=std, a=-3 * std, b=3 * std)
        if self.cfg.tie_embeddings:
            self.head.weight = self.wte.weight

    def hidden(self, idx, cache=None, n_valid=None):
        """idx (B, T) -> the states after the final norm, (B, T, C)."""
        x, T = self.drop(self.wte(idx)), idx.size(1)
        if cache is not None:
            return self.norm(self.decode(x, cache, n_valid))
        if self.cfg.pos == "rope" and T > self.cfg.block_size:
            raise ValueError(f"{T} tokens are more than block_size={self.cfg.block_size}")
        if self.cfg.recurrent:
            return self.norm(self.layers(x))
        return self.norm(self.layers_at_once(x, torch.arange(T, device=x.device)[None]))

    @torch.compiler.disable  # a compiler would unroll the loop over positions
    def layers(self, x):
        """All layers on x (B, T, C) -> (B, T, C), by the schedule."""
        schedule, pos = self.cfg.schedule_used, torch.arange(x.size(1), device=x.device)[None]
        if schedule == "wavefront":
            return rt_wavefront.run_layers(self.cfg, self.blocks, x)
        rope, slopes = self.positions(pos, x)
        if schedule == "naive":
            bias = attention_bias(pos, pos[0], slopes=slopes, dtype=kernels.lse_dtype(x))
        for layer in self.blocks:
            x = layer(x, rope, bias) if schedule == "naive" else layer_tiled(layer, x, rope, slopes)
        return x

    def positions(self, pos, x):
        """RoPE's tables at pos (B or 1, n), and ALiBi's slopes: None where it is not used."""
        cfg, rope, slopes = self.cfg, None, None
        if cfg.pos == "rope":
            tables = rope_tables(pos, cfg.head_dim, cfg.rope_theta, x.dtype)
            rope = [table[:, None] for table in tables]     # (B or 1, 1, n, D / 2)
        if cfg.pos == "alibi":
            slopes = alibi_slopes(cfg.n_head, x.device, kernels.lse_dtype(x))
        return rope, slopes

    # a plain Transformer's pass, and decoding

    def layers_at_once(self, x, pos, cache=None, slots=None):
        """n tokens x (B, n, C) at pos (B or 1, n) through the layers as in a plain Transformer:
        those of recurrent=false, or one token of each row in decoding. The temporary pair stands
        in the cache until the persistent one replaces it."""
        rope, slopes = self.positions(pos, x)
        attention = self.attention(x, pos, slots, slopes)
        for l, layer in enumerate(self.blocks):
            q, k, v = layer.temporary(x, rope)
            if cache is not None:
                k, v = cache.write(l, k, v, slots)                      # (B, G, S, D)
            x = layer.output(x, attention(q, k, v))
            if cache is not None and self.cfg.recurrent:
                cache.write(l, *layer.persistent(x, rope), slots)
        return x

    def attention(self, x, pos, slots, slopes):
        """How tokens x at pos attend to all up to themselves, as a function of q, k, v."""
        dtype = kernels.lse_dtype(x)
        naive = self.cfg.schedule_used == "naive"
        if slots is None and not naive:         # no bias of T x T
            return lambda q, k, v: kernels.attend(q, k, v, slopes=slopes)[0]
        k_pos = torch.arange(x.size(1) if slots is None else slots.end, device=x.device)
        if not naive and compute_dtype(x) != dtype:     # torch's would round ALiBi
            where = pos.int().squeeze(0), k_pos.int()
            return lambda q, k, v: kernels.attend(q, k, v, *where, slopes)[0]
        bias = attention_bias(pos, k_pos, slopes=slopes, dtype=dtype)
        return lambda q, k, v: attend(q, k, v, bias, fast=not naive)

    def decode(self, x, cache, n_valid):
        """T new tokens x (B, T, C) of each row after those of the cache: as a wavefront where
        all rows hold equally many, else one after the other."""
        T, rows_alike = x.size(1), not cache.ragged or cache.longest == 0
        slots = cache.place(T, n_valid)         # raises if they do not all fit
        if T == 1 or not self.cfg.recurrent:
            y = self.layers_at_once(x, slots.pos, cache, slots)
            cache.advance(slots)
            return y
        if rows_alike and self.cfg.schedule_used == "wavefront":
            return self.prefill(x, cache, slots)
        ys = []
        for t in range(T):                      # a token needs slots of its own
            slots = cache.place(1, None if n_valid is None else n_valid - t)
            ys.append(self.layers_at_once(x[:, t:t + 1], slots.pos, cache, slots))
            cache.advance(slots)
        return torch.cat(ys, 1)

    def prefill(self, x, cache, slots):
        """The wavefront over T new tokens x (B, T, C), after those of the cache."""
        S, dtype = cache.longest, compute_dtype(x)
        past = [(k[:, :, :S].to(dtype), v[:, :, :S].to(dtype)) for k, v in zip(cache.k, cache.v)]
        y, k, v = rt_wavefront.prefill(self.cfg, self.blocks, x, past)
        for l in range(self.cfg.n_layer):
            cache.write(l, k[l], v[l], slots)
        cache.advance(slots)
        return y

    def flops_per_token(self):
        """Floating-point operations of one token's forward and backward pass in a sequence of
        block_size: 6 a weight of each matrix product (Wk and Wv are used twice, once a pair), and
        12 C a visible key, averaged over positions. What backward recomputes is not counted."""
        cfg = self.cfg
        weights = sum(p.numel() for p in self.blocks.parameters() if p.dim() == 2)
        weights += cfg.vocab_size * cfg.n_embd  # the head
        if cfg.recurrent:
            weights += 2 * cfg.n_layer * cfg.n_embd * cfg.n_kv_head * cfg.head_dim  # Wk, Wv again
        return 6.0 * weights + 12.0 * cfg.n_layer * cfg.n_embd * (cfg.block_size + 1) / 2

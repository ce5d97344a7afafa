"""
The Recurrent Transformer (RT): later positions read keys and values of a layer's own outputs.

In a Transformer, position i of layer l attends to keys and values made from the output of
layer l - 1. In an RT those of earlier positions are made from the output of layer l itself,
so a single layer is as deep in time as the sequence is long. This costs no parameters and
no cache, but a layer is now a loop over positions.

One layer, for positions i = 1 .. T with inputs x_i. n1 and n2 are RMSNorms. nq and nk, left out
by default, are RMSNorms of all heads' channels together (qk_norm=full, as in the paper).

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
           |   `--------+---`--------+---`--------+--   each goes to all later positions
           | k^_1       | k^_2       | k^_3       | k^_4
          x_1          x_2          x_3          x_4

recurrent=false is the baseline: later positions attend to the temporary pairs, (5) is left
out, and the layer is a plain Transformer's with everything else as it is.

Not in the paper, but in its code (commit a21b42d): the exact gelu, and the initialisation.
Departures: the norms are RMSNorm, as in the text (the code's configs use LayerNorm); ALiBi and
every softmax are in float32 under bfloat16 too; grouped heads and RoPE are additions (RoPE turns
q_i and both keys of i by i, behind the QK-norm). Dropout is on embeddings only.

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
import model_gpt
import rt_wavefront
from model_gpt import (BaseConfig, LanguageModel, RMSNorm, alibi_slopes, apply_rope, attend,
                       attention_bias, choice, compute_dtype, upcast)


@dataclass
class Config(BaseConfig):
    n_mlp: int = 0               # hidden width of the MLP (0: 4 n_embd)
    pos: str = choice("alibi", "rope", "none")
    qk_norm: str = choice("none", "full")   # full: nq and nk, each with a weight
    recurrent: bool = True       # false: a plain Transformer, the baseline
    kv_norm: bool = True         # false: (5) without n1, worse (Appendix E.2)
    schedule: str = choice("auto", "naive", "tiled", "wavefront")   # see "schedules"; auto: by fast
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
            raise ValueError(f"head_dim={self.head_dim}: a head is at most "
                             f"{kernels.HEAD_SIZES[-1]} wide")
        # a wavefront folds n1's weight into Wk and Wv: both pairs must be of normed rows
        if self.schedule == "wavefront" and not self.kv_norm:
            raise ValueError("schedule=wavefront needs kv_norm=true; schedule=tiled does not")
        self.schedule_used = self.schedule
        if self.schedule == "auto":
            fastest = "wavefront" if self.kv_norm else "tiled"
            self.schedule_used = fastest if self.fast else "naive"


# ---- the equations, position after position ----

class Block(nn.Module):
    """One layer."""

    def __init__(self, cfg):
        super().__init__()
        self.cfg, C = cfg, cfg.n_embd
        Q, K = cfg.n_head * cfg.head_dim, cfg.n_kv_head * cfg.head_dim
        self.norm1, self.norm2 = RMSNorm(C, cfg.norm_eps), RMSNorm(C, cfg.norm_eps)
        self.wq = nn.Linear(C, Q, bias=False)
        self.wk = nn.Linear(C, K, bias=False)
        self.wv = nn.Linear(C, K, bias=False)
        self.wo = nn.Linear(Q, C, bias=False)
        self.w_up = nn.Linear(C, cfg.n_mlp, bias=False)
        self.w_down = nn.Linear(cfg.n_mlp, C, bias=False)
        norm = RMSNorm if cfg.qk_norm == "full" else nn.Identity
        self.q_norm, self.k_norm = norm(Q, cfg.norm_eps), norm(K, cfg.norm_eps)

    def naive(self, x, context):
        """x (B, T, C) -> y (B, T, C)."""
        q, k_temp, v_temp = self.temporary(x, context.rope)     # (1), of all positions
        k, v = k_temp[:, :, :0], v_temp[:, :, :0]               # persistent pairs: none yet
        ys = []
        positions = zip(x.split(1, 1), *(u.split(1, 2) for u in (q, k_temp, v_temp)))
        for i, (x_i, q_i, kt_i, vt_i) in enumerate(positions):  # x_i (B, 1, C)
            keys, values = torch.cat([k, kt_i], 2), torch.cat([v, vt_i], 2)     # (B, G, i + 1, D)
            alibi = context.bias[:, :, i:i + 1, :i + 1]         # 0 for the temporary pair
            a_i = attend(q_i, keys, values, alibi, fast=False)                  # (2)
            y_i = self.output(x_i, a_i)                                         # (3), (4)
            rope_i = context.rope and [table[:, :, i:i + 1] for table in context.rope]
            k_i, v_i = self.persistent(y_i, rope_i)                             # (5)
            k, v = torch.cat([k, k_i], 2), torch.cat([v, v_i], 2)
            ys.append(y_i)
        return torch.cat(ys, 1)

    def temporary(self, x, rope):
        """Equation (1): q (B, H, T, D); k^, v^ (B, G, T, D)."""
        u = self.norm1(x)
        q = self.heads(self.q_norm(self.wq(u)), rope)
        return q, *self.pair(u, rope)

    def output(self, x, a):
        """Equations (3) and (4): x (B, T, C), a (B, H, T, D) -> y (B, T, C)."""
        z = x + self.wo(a.transpose(1, 2).flatten(2).to(x.dtype))   # tiled's a is float32
        return z + self.w_down(F.gelu(self.w_up(self.norm2(z))))

    def persistent(self, y, rope):
        """Equation (5): k, v (B, G, T, D), by the same matrices as the temporary pair."""
        return self.pair(self.norm1(y), rope)

    def pair(self, u, rope):
        return self.heads(self.k_norm(self.wk(u)), rope), self.heads(self.wv(u))

    def heads(self, u, rope=None):
        """(B, T, heads D) -> (B, heads, T, D), rotated if rope is given."""
        u = u.unflatten(-1, (-1, self.cfg.head_dim)).transpose(1, 2)
        return u if rope is None else apply_rope(u, *rope)

    def forward(self, x, layer, context):
        """x (B, T, C) -> y (B, T, C). What runs when: see Model.hidden."""
        if context.cache is not None or not self.cfg.recurrent:
            return self.at_once(x, layer, context)
        if self.cfg.schedule_used == "naive":
            return self.naive(x, context)
        return tiled(self, x, context)

    def at_once(self, x, layer, context):
        """Where no position waits for another: without recurrence, or one token after a cache."""
        q, k, v = self.temporary(x, context.rope)                       # (1)
        k, v = context.extend(layer, k, v)                              # (B, G, S, D)
        y = self.output(x, context.attention(q, k, v))                  # (2) to (4)
        if context.cache is not None and self.cfg.recurrent:
            # the persistent pair overwrites the temporary one: the same slots until advance
            context.cache.write(layer, *self.persistent(y, context.rope), context.slots)    # (5)
        return y


class BlockWithoutKVNorm(Block):
    """The ablation of Appendix E.2: persistent pairs are nk(Wk y_i), Wv y_i."""

    def persistent(self, y, rope):
        return self.pair(y, rope)


# ---- schedules: naive, tiled, wavefront; the same results in other orders ----

# naive is the loop above, auto's choice with fast=false. wavefront is auto's with fast=true: while
# a layer computes a chunk of positions, the next one computes the chunk before. It is our own
# schedule, in rt_wavefront.py, which has these equations once more, with a backward pass by hand:
# change both files, or train with schedule=tiled.
#
# tiled is the paper's Algorithm 1. All queries of a layer are known from the start. After
# position i, with t the largest power of two that divides i, queries i+1 .. i+t attend to keys
# i-t+1 .. i. Every query meets every earlier key once, and a key is read log2 T times at most,
# not T times. For T = 8 (the number tells after which position an entry is computed):
#                keys 1 2 3 4 5 6 7 8
#           query 1   .                  . temporary pair
#                 2   1 .
#                 3   2 2 .
#                 4   2 2 3 .
#                 5   4 4 4 4 .
#                 6   4 4 4 4 5 .
#                 7   4 4 4 4 6 6 .
#                 8   4 4 4 4 6 6 7 .
# Its gradients are autograd's; the backward pass of the paper's section 6.4 is in rt_wavefront.py.

def tiled(block, x, context):
    """The same as block.naive(x, context). A query's out (B, H, 1, D) is attention to the keys
    it has met so far, lse (B, H, 1) the logarithm of their sum of e^score."""
    q, k, v = block.temporary(x, context.rope)              # (1)
    outs, lses = (list(u.split(1, 2)) for u in first_states(q, k, v))
    qs, ks, vs, ys = q.split(1, 2), [], [], []
    pos = context.k_pos                                     # of keys, and of queries
    for i, x_i in enumerate(x.split(1, 1), start=1):        # as in the picture, from 1
        y_i = block.output(x_i, outs[i - 1])                            # (3), (4)
        rope_i = context.rope and [table[:, :, i - 1:i] for table in context.rope]
        k_i, v_i = block.persistent(y_i, rope_i)                        # (5)
        ys.append(y_i)
        ks.append(k_i)
        vs.append(v_i)
        t = i & -i                          # the largest power of two that divides i
        old, new = slice(i - t, i), slice(i, i + t)     # keys i-t+1 .. i, queries i+1 .. i+t
        if i < x.size(1):                   # (2); torch cuts `new` at T
            out, lse, q = (torch.cat(u[new], 2) for u in (outs, lses, qs))
            k, v = (torch.cat(u[old], 2) for u in (ks, vs))
            out, lse = merge_tile(out, lse, q, k, v, pos[new], pos[old], context.slopes)
            outs[new], lses[new] = out.split(1, 2), lse.split(1, 2)
    return torch.cat(ys, 1)


def first_states(q, k, v):
    """out and lse where each query has met its temporary pair alone: the value, and the score."""
    q, k, v = (upcast(u).repeat_interleave(q.size(1) // u.size(1), 1) for u in (q, k, v))
    return v, (q * k).sum(-1) / math.sqrt(q.size(-1))


def merge_tile(out, lse, q, k, v, q_pos, k_pos, slopes):
    """out (B, H, n, D) and lse (B, H, n) after n queries also attend to a tile of earlier keys."""
    rounded = q.dtype != lse.dtype          # a product would round 16-bit scores
    if rounded or k.size(2) > 32:           # up to 32 keys the kernel costs more than the work
        more, more_lse = kernels.attend(q, k, v, q_pos, k_pos, slopes)
        return kernels.merge(out, lse, more, more_lse)
    k, v = (u.repeat_interleave(q.size(1) // u.size(1), 1) for u in (k, v))
    s = q @ k.mT / math.sqrt(q.size(-1))            # (B, H, n, keys)
    if slopes is not None:
        s = s - slopes[:, None, None] * (q_pos[:, None] - k_pos)
    # online softmax: what a query has met is one more pair, of score lse and value out
    s = torch.cat([lse[..., None], s], -1)
    p = s.softmax(-1)
    return p[..., :1] * out + p[..., 1:] @ v, s.logsumexp(-1)


# ---- the model ----

class Context(model_gpt.Context):
    """model_gpt's, but the bias is only for naive and for decoding in float32: it is T x T, and
    torch would round it to 16 bits. Where it is None, kernels.attend masks by positions."""

    def __init__(self, cfg, x, cache=None, n_valid=None):
        super().__init__(cfg, x, cache, n_valid, has_bias=False)
        self.fast, self.slopes = cfg.schedule_used != "naive", None
        S, wide = x.size(1), torch.promote_types(x.dtype, torch.float32)
        if cache is not None:
            S = self.slots.end
        self.k_pos = torch.arange(S, device=x.device, dtype=torch.int32)    # the kernels' type
        if cfg.pos == "alibi":
            self.slopes = alibi_slopes(cfg.n_head, x.device, wide)
        if not self.fast or (cache is not None and compute_dtype(x) == wide):
            self.bias = attention_bias(self.pos, self.k_pos, 0, self.slopes, wide)

    def attention(self, q, k, v):
        """Of the new tokens to all up to themselves."""
        if self.bias is not None:
            return attend(q, k, v, self.bias, self.fast)
        pos = self.pos.int().squeeze(0)     # (T,) for all rows, or (B, T)
        return kernels.attend(q, k, v, pos, self.k_pos, self.slopes)[0]     # without lse


class Model(LanguageModel):
    """The Recurrent Transformer language model."""
    context_type = Context
    runs_blocks_once = False    # for FSDP: a wavefront reads all blocks at the same time

    def __init__(self, cfg):
        block = Block if cfg.kv_norm else BlockWithoutKVNorm
        super().__init__(cfg, [block(cfg) for _ in range(cfg.n_layer)])
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
        """idx (B, T) -> the states after the final norm, (B, T, C). What runs:
        recurrent=false, or one token after a cache: Block.at_once;
        no cache: by cfg.schedule_used rt_wavefront.run_layers, tiled or Block.naive;
        several tokens after a cache: rt_wavefront.prefill, or Block.at_once token by token."""
        x = self.drop(self.wte(idx))
        if not self.cfg.recurrent or (cache is not None and idx.size(1) == 1):
            x = self.run_blocks(x, cache, n_valid)
        elif cache is None:
            x = self.run_recurrent(x)
        else:
            x = self.prefill(x, cache, n_valid)
        return self.norm(x)

    def run_blocks(self, x, cache=None, n_valid=None):
        """Block after block on x (B, T, C) -> (B, T, C)."""
        context = Context(self.cfg, x, cache, n_valid)
        for layer, block in enumerate(self.blocks):
            x = block(x, layer, context)
        if cache is not None:
            cache.advance(context.slots)
        return x

    @torch.compiler.disable  # a compiler would unroll the loop over positions
    def run_recurrent(self, x):
        """All layers on x (B, T, C) -> (B, T, C), by the schedule."""
        if self.cfg.schedule_used != "wavefront":
            return self.run_blocks(x)
        Context(self.cfg, x)                # raises where x is longer than RoPE has learned
        return rt_wavefront.run_layers(self.cfg, self.blocks, x)

    def prefill(self, x, cache, n_valid):
        """T tokens x (B, T, C) after a cache -> (B, T, C). A wavefront needs rows of equal length
        in the cache; new rows may differ, as no token attends to the padding behind it."""
        equal = not cache.ragged                    # place may change it
        slots = cache.place(x.size(1), n_valid)     # raises if they do not all fit
        if equal and self.cfg.schedule_used == "wavefront":
            return self.prefill_wavefront(x, cache, slots)
        ys = []
        for t, x_t in enumerate(x.split(1, 1)):     # n_valid - t <= 0: padding
            ys.append(self.run_blocks(x_t, cache, None if n_valid is None else n_valid - t))
        return torch.cat(ys, 1)

    def prefill_wavefront(self, x, cache, slots):
        S, dtype = cache.longest, compute_dtype(x)
        past = [(k[:, :, :S].to(dtype), v[:, :, :S].to(dtype)) for k, v in zip(cache.k, cache.v)]
        y, ks, vs = rt_wavefront.prefill(self.cfg, self.blocks, x, past)
        for layer, (k, v) in enumerate(zip(ks, vs)):
            cache.write(layer, k, v, slots)
        cache.advance(slots)
        return y

    def mixer_flops(self):
        """In each layer 12 H D for each visible key, averaged over positions, and Wk and Wv a
        second time for the persistent pair. (What backward recomputes is not counted.)"""
        cfg = self.cfg
        flops = 12.0 * cfg.n_head * cfg.head_dim * (cfg.block_size + 1) / 2
        if cfg.recurrent:
            flops += 6.0 * 2 * cfg.n_embd * cfg.n_kv_head * cfg.head_dim
        return cfg.n_layer * flops

r"""
The Recurrent Transformer (RT): later positions read keys and values of a layer's own outputs.

In a Transformer, position i of layer l attends to keys and values made from the output of
layer l - 1. In an RT those of earlier positions are made from the output of layer l itself,
so a single layer is as deep in time as the sequence is long. This costs no parameters and
no cache, but a layer is now a loop over positions.

One layer, for positions i = 1 .. T with inputs x_i. n1 and n2 are RMSNorms; so are nq and nk,
over all heads' channels together (qk_norm=full, as in the paper; left out by default).

    q_i  = nq(Wq n1(x_i))
    k^_i = nk(Wk n1(x_i))   v^_i = Wv n1(x_i)                       (1)  temporary pair, for i only
    a_i  = Attention(q_i; (k_j, v_j) for j < i, and (k^_i, v^_i))   (2)
    z_i  = x_i + Wo a_i                                             (3)
    y_i  = z_i + W_down gelu(W_up n2(z_i))                          (4)  the next layer's x_i
    k_i  = nk(Wk n1(y_i))   v_i = Wv n1(y_i)                        (5)
                                                 persistent pair, for all positions after i

Scores are q_i . k_j / sqrt(D) - m_h (i - j). The second term is ALiBi, m_h = 2^(-8 h / H) in
head h; for the temporary pair it is 0.

          y_1          y_2          y_3          y_4
           ^ \          ^ \          ^ \          ^
           |  k_1, v_1  |  k_2, v_2  |  k_3, v_3  |
           |   `--------+---`--------+---`--------+--   each goes to all later positions
           | k^_1       | k^_2       | k^_3       | k^_4
          x_1          x_2          x_3          x_4

recurrent=false is the baseline: later positions attend to the temporary pairs, without (5).
All else is the same, and the layer a plain Transformer's.

Where the paper's text is silent, its code (commit a21b42d) is followed: the exact gelu, the
initialisation. RMSNorm is the text's (the code's configs have LayerNorm). Departures: no
QK-norm by default; ALiBi and softmax in float32 under bfloat16, too; dropout on embeddings
only. Added: grouped heads; RoPE, which turns q_i and both keys of i by i, after the QK-norm.

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
from decoding import Cached
from model_gpt import (BaseConfig, LanguageModel, RMSNorm, apply_rope, attend, choice,
                       upcast)


@dataclass
class Config(BaseConfig):
    n_mlp: int = 0               # hidden width of the MLP (0: 4 n_embd)
    pos: str = choice("alibi", "rope", "none")
    qk_norm: str = choice("none", "full")   # full: nq and nk, each with a weight
    recurrent: bool = True       # false: a plain Transformer, the baseline
    kv_norm: bool = True         # n1 in (5); false: worse (Appendix E.2). nk is qk_norm's
    schedule: str = choice("auto", "naive", "tiled", "wavefront")   # auto: as fast says
    chunk: int = 32              # positions of a wavefront's chunk, at most
    cuda_graphs: bool = True     # on a GPU the wavefront is replayed as a CUDA graph
    tie_embeddings: bool = False    # the head is the embedding matrix

    # a run may go on with other values of these
    NOT_IN_WEIGHTS = ("schedule", "chunk", "cuda_graphs")

    def __post_init__(self):
        super().__post_init__()
        self.at_least(1, "chunk")
        self.at_least(0, "n_mlp")
        self.n_mlp = self.n_mlp or 4 * self.n_embd
        check_values(self)
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
        self.norm1, self.norm2 = RMSNorm(C, cfg.norm_eps), RMSNorm(C, cfg.norm_eps)  # n1, n2
        self.wq = nn.Linear(C, Q, bias=False)
        self.wk = nn.Linear(C, K, bias=False)
        self.wv = nn.Linear(C, K, bias=False)
        self.wo = nn.Linear(Q, C, bias=False)
        self.w_up = nn.Linear(C, cfg.n_mlp, bias=False)
        self.w_down = nn.Linear(cfg.n_mlp, C, bias=False)
        norm = RMSNorm if cfg.qk_norm == "full" else nn.Identity
        self.q_norm, self.k_norm = norm(Q, cfg.norm_eps), norm(K, cfg.norm_eps)  # nq, nk

    @torch.compiler.disable  # it would unroll the loop
    def naive(self, x, context):
        """x (B, T, C) -> y (B, T, C), position after position."""
        q, k_temp, v_temp = self.temporary(x, context.rope)  # (1), of all positions
        k, v = k_temp[:, :, :0], v_temp[:, :, :0]  # persistent pairs: none yet
        ys = []
        for i, x_i in enumerate(x.split(1, 1)):  # (B, 1, C)
            now = slice(i, i + 1)
            keys = torch.cat([k, k_temp[:, :, now]], 2)  # (B, G, i + 1, D)
            values = torch.cat([v, v_temp[:, :, now]], 2)
            bias = context.bias[:, :, now, :i + 1]  # ALiBi or 0: no key is later
            a_i = attend(q[:, :, now], keys, values, bias, fast=False)    # (2)
            y_i = self.output(x_i, a_i)                                   # (3), (4)
            rope_i = [table[:, :, now] for table in context.rope]
            k_i, v_i = self.persistent(y_i, rope_i)                       # (5)
            k, v = torch.cat([k, k_i], 2), torch.cat([v, v_i], 2)
            ys.append(y_i)
        return torch.cat(ys, 1)

    def temporary(self, x, rope):
        """Equation (1): q (B, H, T, D); k^, v^ (B, G, T, D)."""
        x_n = self.norm1(x)
        q = self.heads(self.q_norm(self.wq(x_n)), rope)
        return q, self.heads(self.k_norm(self.wk(x_n)), rope), self.heads(self.wv(x_n))

    def output(self, x, a):
        """Equations (3) and (4): x (B, T, C), a (B, H, T, D) -> y (B, T, C)."""
        z = x + self.wo(a.transpose(1, 2).flatten(2))
        return z + self.w_down(F.gelu(self.w_up(self.norm2(z))))

    def persistent(self, y, rope):
        """Equation (5): k, v (B, G, T, D)."""
        y_n = self.norm1(y)
        return self.heads(self.k_norm(self.wk(y_n)), rope), self.heads(self.wv(y_n))

    def heads(self, x, rope=()):
        """(B, T, heads D) -> (B, heads, T, D), rotated by rope, cos and sin or nothing."""
        x = x.unflatten(-1, (-1, self.cfg.head_dim)).transpose(1, 2)
        return apply_rope(x, *rope) if rope else x

    def forward(self, x, layer, context):
        """x (B, T, C) -> y (B, T, C). Model.hidden decides when layers run one by one."""
        if not self.cfg.recurrent:
            return self.at_once(x, layer, context)
        if isinstance(context, Cached):
            return self.one_token(x, layer, context)
        if context.naive:
            return self.naive(x, context)
        return tiled(self, x, context)  # schedule=wavefront calls no single layer

    def at_once(self, x, layer, context):
        """Where no position waits for another: (1) to (4) with the temporary pairs for all keys."""
        q, k, v = self.temporary(x, context.rope)  # (1)
        k, v = context.extend(layer, k, v)  # (B, G, S, D)
        return self.output(x, context.attention(q, k, v))  # (2) to (4)

    def one_token(self, x, layer, context):
        """One token a row, x (B, 1, C), after those of a cache."""
        if x.size(1) > 1:
            raise ValueError(f"RT's block takes one token a row with a cache, not {x.size(1)}, as "
                             "each needs the output of the one before: Model.decode goes through "
                             "them")
        y = self.at_once(x, layer, context)
        # (5) overwrites the temporary pair: the slots are the same until advance
        context.extend(layer, *self.persistent(y, context.rope))
        return y


# ---- schedules: naive, wavefront, tiled; the same results in other orders ----

# naive is the loop above, auto's choice with fast=false.
#
# wavefront is auto's choice with fast=true, and our own: while a layer computes a chunk of
# positions, the next layer computes the chunk before. All of a chunk's queries attend to the
# chunks before it in one call; only then its positions go one by one, among themselves.
#               time 1  2  3  4
#            layer 2    c1 c2 c3
#            layer 1 c1 c2 c3
# rt_wavefront.py has the equations again, with a backward pass by hand: change both files, or
# train with schedule=tiled. Both its passes have n1 in (5): without kv_norm, auto is tiled.
#
# tiled is the paper's Algorithm 1. All queries of a layer are known from the start. After n
# positions, with t the largest power of two that divides n, queries n+1 .. n+t attend to keys
# n-t+1 .. n. Every query meets every earlier key once, and a key is read log2 T times at most,
# not T times. For T = 8, the n after which a query meets a key:
#                keys 1 2 3 4 5 6 7 8
#           query 1   .                  . temporary pair
#                 2   1 .
#                 3   2 2 .
#                 4   2 2 3 .
#                 5   4 4 4 4 .
#                 6   4 4 4 4 5 .
#                 7   4 4 4 4 6 6 .
#                 8   4 4 4 4 6 6 7 .
# Its gradients are autograd's; the paper's backward pass (section 6.4) is in rt_wavefront.py.

@torch.compiler.disable  # it would unroll the loop
def tiled(block, x, context):
    """The same as block.naive. out (B, H, 1, D) of a query is attention to the keys that it
    has met so far, lse (B, H, 1) the logarithm of their sum of e^score."""
    q, k_temp, v_temp = block.temporary(x, context.rope)  # (1)
    out, lse = met_temporary(q, k_temp, v_temp)
    qs, outs, lses = q.split(1, 2), list(out.split(1, 2)), list(lse.split(1, 2))
    ks, vs, ys = [], [], []
    pos = context.k_pos  # positions, of keys and queries
    for i, x_i in enumerate(x.split(1, 1)):
        y_i = block.output(x_i, outs[i].to(x.dtype))  # (3), (4)
        rope_i = [table[:, :, i:i + 1] for table in context.rope]
        k_i, v_i = block.persistent(y_i, rope_i)  # (5)
        ys.append(y_i)
        ks.append(k_i)
        vs.append(v_i)
        n = i + 1  # positions are done
        t = n & -n  # the largest power of two that divides n
        keys = slice(n - t, n)
        queries = slice(n, n + t)  # the lists end at T, and so do their slices
        if n < x.size(1):  # (2)
            q, out, lse = (torch.cat(each[queries], 2) for each in (qs, outs, lses))
            k, v = torch.cat(ks[keys], 2), torch.cat(vs[keys], 2)
            out, lse = merge_tile(out, lse, q, k, v, pos[queries], pos[keys], context.slopes)
            outs[queries], lses[queries] = out.split(1, 2), lse.split(1, 2)
    return torch.cat(ys, 1)


def met_temporary(q, k, v):
    """out and lse of queries that have met their temporary pair alone: its value and score."""
    q, k, v = (upcast(x).repeat_interleave(q.size(1) // x.size(1), 1) for x in (q, k, v))
    return v, (q * k).sum(-1) / math.sqrt(q.size(-1))


def merge_tile(out, lse, q, k, v, q_pos, k_pos, slopes):
    """out (B, H, t, D) and lse (B, H, t) after t queries also meet a tile of earlier keys."""
    # bfloat16 always takes the kernel, as q @ k would round the scores; float32 only for tiles
    # over 32 keys, as the call costs more than the work in a smaller one (32 is no cfg.chunk)
    if q.dtype != lse.dtype or k.size(2) > 32:
        more, more_lse = kernels.attend_by_position(q, k, v, q_pos, k_pos, slopes)  # over the tile alone
        return kernels.merge(out, lse, more, more_lse)
    k, v = (x.repeat_interleave(q.size(1) // x.size(1), 1) for x in (k, v))
    scores = q @ k.mT / math.sqrt(q.size(-1))  # (B, H, t, keys)
    if slopes is not None:
        scores = scores - slopes[:, None, None] * (q_pos[:, None] - k_pos)
    # online softmax: what a query has met is one more pair, of score lse and value out
    scores = torch.cat([lse[..., None], scores], -1)
    p = scores.softmax(-1)
    return p[..., :1] * out + p[..., 1:] @ v, scores.logsumexp(-1)


# ---- the model ----

class Context(model_gpt.Context):
    """model_gpt's, but it has a bias in two cases only, see attention."""

    def __init__(self, cfg, x, pos=None, k_pos=None, causal=True, has_bias=False):
        self.naive = cfg.schedule_used == "naive"
        super().__init__(cfg, x, pos, k_pos, causal, has_bias or self.naive)
        self.rope = self.rope or ()  # an empty tuple unpacks to nothing
        self.k_pos = self.k_pos.int()  # the kernels' type

    def attention(self, q, k, v):
        """Of the new tokens to all up to themselves.
        naive:                       written out, with a bias;
        with a cache, in float32:    torch's attention, with a bias: the fastest for one query;
        all else:                    kernels.attend_by_position, which masks by positions. In
                                     training a bias would be T x T; in bfloat16 torch would
                                     round it."""
        if self.bias is not None:
            return attend(q, k, v, self.bias, fast=not self.naive)
        pos = self.pos.int().squeeze(0)  # (T,) for all rows, or (B, T)
        out, _ = kernels.attend_by_position(q, k, v, pos, self.k_pos, self.slopes)
        return out


class CachedContext(Cached, Context):
    """The context of a call with a cache."""

    def __init__(self, cfg, cache, T, n_valid=None):
        exact = cache.dtype == torch.promote_types(cache.dtype, torch.float32)  # not 16 bits
        super().__init__(cfg, cache, T, n_valid, has_bias=exact)


class Model(LanguageModel):
    """The Recurrent Transformer language model."""
    context_type, cached_context_type = Context, CachedContext
    runs_blocks_once = False  # for FSDP: a wavefront reads all blocks at once

    def __init__(self, cfg):
        block = Block if cfg.kv_norm else BlockWithoutKVNorm
        super().__init__(cfg, [block(cfg) for _ in range(cfg.n_layer)])
        self.init_weights()

    @torch.no_grad()
    def init_weights(self):
        """Normal, truncated at 3 sigma. sigma = 1 / sqrt(C), but for the projections into the
        residual stream 1 / sqrt(2 fan_in (l + 1)) in layer l = 0, 1, ..."""
        for name, p in self.named_parameters():
            if p.dim() == 2:
                std = 1 / math.sqrt(self.cfg.n_embd)
                if name.endswith(("wo.weight", "w_down.weight")):
                    layer = int(name.split(".")[1])
                    std = 1 / math.sqrt(2 * p.size(1) * (layer + 1))
                nn.init.trunc_normal_(p, std=std, a=-3 * std, b=3 * std)
        if self.cfg.tie_embeddings:
            self.head.weight = self.wte.weight

    def hidden(self, idx, context=None):
        """idx (B, T) -> the states after the final norm, (B, T, C). What runs:
        recurrent=false:                  Block.at_once;
        one token with a cache (context): Block.one_token;
        else, by schedule:                Block.naive, tiled, or all layers by rt_wavefront."""
        cfg = self.cfg
        if cfg.recurrent and context is None and cfg.schedule_used == "wavefront":
            x = self.drop(self.wte(idx))
            return self.norm(rt_wavefront.run_layers(cfg, self.blocks, x))
        return super().hidden(idx, context)  # block after block

    def decode(self, idx, cache, n_valid=None):
        """As in all models. Several tokens go through prefill: with schedule=wavefront and a cache
        of equal rows by a wavefront (new rows may differ, as no token attends to the padding
        behind it), else token by token, which is slow."""
        if not self.cfg.recurrent or idx.size(1) == 1:
            return super().decode(idx, cache, n_valid)
        slots = cache.place(idx.size(1), n_valid)  # raises if they do not all fit
        if cache.ragged or self.cfg.schedule_used != "wavefront":
            left = lambda i: None if n_valid is None else n_valid - i  # 0 or less: padding
            return torch.cat([super(Model, self).decode(idx_i, cache, left(i))
                              for i, idx_i in enumerate(idx.split(1, 1))], 1)
        x = self.drop(self.wte(idx))
        past = [buffer[:, :, :cache.longest] for buffer in cache.buffers()]
        y, ks, vs = rt_wavefront.prefill(self.cfg, self.blocks, x, past)
        for layer, (k, v) in enumerate(zip(ks, vs)):
            cache.write(layer, k, v, slots)
        cache.advance(slots)
        return self.norm(y)

    def mixer_flops(self):
        """As in model_gpt, and Wk and Wv once more for the persistent pair. What backward
        recomputes is not counted."""
        cfg = self.cfg
        again = 12.0 * cfg.n_layer * cfg.n_embd * cfg.n_kv_head * cfg.head_dim
        return super().mixer_flops() + (again if cfg.recurrent else 0)


class BlockWithoutKVNorm(Block):
    """The ablation of Appendix E.2: persistent pairs are nk(Wk y_i), Wv y_i."""

    def persistent(self, y, rope):
        return self.heads(self.k_norm(self.wk(y)), rope), self.heads(self.wv(y))


# ---- config checks ----

def check_values(cfg):
    if cfg.head_dim > kernels.HEAD_SIZES[-1]:
        raise ValueError(f"head_dim={cfg.head_dim} must be at most {kernels.HEAD_SIZES[-1]}")
    if cfg.schedule == "wavefront" and not cfg.kv_norm:
        raise ValueError("schedule=wavefront needs kv_norm=true; schedule=tiled does not")

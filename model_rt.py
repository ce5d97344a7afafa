r"""
The Recurrent Transformer (RT): a position attends to keys and values that earlier positions made
from this layer's outputs.

In a Transformer, the keys and values of layer l are made from the output of layer l - 1. In an RT
those of earlier positions are made from the output of layer l itself. In a single layer, a path
from the first position to the last one can therefore pass T blocks, and in all L layers it can pass
T + L - 1. In a Transformer it passes 1 block in a layer and L in all layers. The recurrence adds no
parameters, and the cache is as large as a Transformer's. The price is that a layer becomes a loop
over positions. Training runs the loop forward and then back, because gradients flow through all
keys and values.

One layer, for positions i = 1 .. T with inputs x_i (the code counts them from 0):

    q_i  = nq(Wq n1(x_i))
    k^_i = nk(Wk n1(x_i))   v^_i = Wv n1(x_i)                       (1)  temporary pair, for i only
    a_i  = Attention(q_i; (k_j, v_j) for j < i, and (k^_i, v^_i))   (2)
    z_i  = x_i + Wo a_i                                             (3)
    y_i  = z_i + W_down gelu(W_up n2(z_i))                          (4)  the next layer's x_i
    k_i  = nk(Wk n1(y_i))   v_i = Wv n1(y_i)                        (5)
                                                 persistent pair, for all positions after i

A position also attends to itself, but its persistent pair needs y_i, which does not exist yet. So
it reads a temporary pair, which is made from x_i.

n1 and n2 are RMSNorms. nq and nk are RMSNorms, too, each over the channels of all heads as one
vector. They are there with qk_norm=full, the paper's choice, and not by default. Scores are
q_i . k_j / sqrt(D) - m_h (i - j). The second term is ALiBi, with m_h = 2^(-8 h / H) in head
h = 1 .. H. For the temporary pair it is 0, and with pos=rope or none there is no such term.

What position 4 reads, and what it gives to later positions:

             y_1          y_2          y_3          y_4 -(5)-> k_4, v_4, for positions 5, 6, ...
              |            |            |            ^
              v  (5)       v            v            |   (3), (4), with x_4
           k_1, v_1     k_2, v_2     k_3, v_3       a_4
              |            |            |            ^
              `------------+------------+------------+   (2)
                                                     |
                                              q_4, k^_4, v^_4
                                                     ^   (1)
             x_1          x_2          x_3          x_4

recurrent=false is the baseline. It has no (5), and later positions attend to the temporary pairs.
All else is the same, so that a layer is a plain Transformer's.

A schedule is an order in which the same function is computed. The schedule and the call decide
what runs:

    recurrent  cache  schedule   T     what runs
    true       no     naive      any   Block.naive: the equations, position after position
    true       no     tiled      any   tiled: the same, with fewer reads of keys
    true       no     wavefront  any   rt_wavefront.run_layers: several layers at a time
    true       yes    any        1     Block.one_token
    true       yes    wavefront  > 1   rt_wavefront.prefill, if all rows of the cache hold equally
                                       many tokens (KVCache.ragged says that they may differ)
    true       yes    otherwise  > 1   Block.one_token, token after token, which is slow
    false      any    any        any   Block.at_once

schedule=auto means naive if fast=false. If fast=true, it means wavefront, or tiled where
kv_norm=false. A schedule that is named runs, whatever fast is. Then fast only decides whether
decoding is recorded as a CUDA graph.

The paper and the authors' code (commit a21b42d) differ in places. This list has the choices of
this file, then what it does differently from both, what it adds, and what it leaves out:
- n1, n2. They are RMSNorms as in the paper's text. The authors' configs have LayerNorm.
- gelu, initial weights. The paper's text does not say which they are. Both are those of the
  authors' code: gelu is exact, and the weights are as in Model.init_weights.
- nq, nk. They are left out by default.
- Scores. ALiBi and the softmax are in float32 even where products are in bfloat16. The
  authors' code adds ALiBi in bfloat16 and keeps a bfloat16 softmax for the backward pass.
- Dropout. It acts on embeddings only.
- Added are grouped heads (n_kv_head) and RoPE (pos=rope), which rotates q_i and both keys of
  position i by i, after the QK-norm.
- Left out are LayerNorms, a QK-norm of each head, and blocks of positions that run at once and read
  each other's temporary pairs (section 9 of the paper).

Paper: "The Recurrent Transformer: Greater Effective Depth and Efficient Decoding" (2604.21215), of
2026. The authors' code is github.com/geniucos/recurrent-transformer.

Letters: those of model_gpt.py. K is the number of positions of a chunk. In tiled, n is the number
of positions that are done, and t is the number of keys of a tile. It is also the number of the
tile's queries, except near the end of the sequence.
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
from model_gpt import BaseConfig, LanguageModel, RMSNorm, apply_rope, attend, choice, upcast


@dataclass
class Config(BaseConfig):
    n_mlp: int = 0               # hidden width of the MLP (0: 4 n_embd)
    pos: str = choice("alibi", "rope", "none")
    qk_norm: str = choice("none", "full")   # full: nq and nk, each with a weight
    recurrent: bool = True       # false: a plain Transformer, the baseline
    kv_norm: bool = True         # whether (5) applies n1 to y; false is worse (Appendix E.2)
    schedule: str = choice("auto", "naive", "tiled", "wavefront")   # auto: by fast= and kv_norm=
    chunk: int = 32              # the most positions of a chunk of the wavefront
    cuda_graphs: bool = True     # on a GPU the wavefront is replayed as a CUDA graph
    tie_embeddings: bool = False    # the head is the embedding matrix

    # A run may be resumed with other values of these options, because none changes the function.
    NOT_IN_WEIGHTS = ("schedule", "chunk", "cuda_graphs")

    def __post_init__(self):
        super().__post_init__()
        self.at_least(1, "chunk")
        check(self)
        self.schedule_used = self.schedule
        if self.schedule == "auto":
            fastest = "wavefront" if self.kv_norm else "tiled"
            self.schedule_used = fastest if self.fast else "naive"


# ---- the equations, position after position ----

class Block(nn.Module):
    """One layer. naive is the loop over positions. The methods below it are the equations.

    The default schedule, wavefront, runs none of these methods in a call without a cache, nor in a
    prefill (several tokens a row, into a cache). (Decoding one token runs them.) rt_wavefront.py
    has the equations a second time, with a backward pass by hand, and rt_triton.py has parts of
    both a third time, for GPUs. A fork that changes an equation has to change it in all of these,
    or to set schedule=naive or tiled. Then a change of (1), (3), (4) or (5) is a change of a method
    below. A change of (2) has two places, naive and Context.attention, which decoding calls. With
    schedule=tiled it has two more, met_temporary and merge_tile, and merge_tile calls
    kernels.py."""

    def __init__(self, cfg):
        super().__init__()
        self.cfg, C, D, H, G = cfg, cfg.n_embd, cfg.head_size, cfg.n_head, cfg.kv_heads
        self.norm1, self.norm2 = RMSNorm(C, cfg.norm_eps), RMSNorm(C, cfg.norm_eps)  # n1, n2
        self.wq = nn.Linear(C, H * D, bias=False)
        self.wk = nn.Linear(C, G * D, bias=False)
        self.wv = nn.Linear(C, G * D, bias=False)
        self.wo = nn.Linear(H * D, C, bias=False)
        self.w_up = nn.Linear(C, cfg.mlp_width, bias=False)
        self.w_down = nn.Linear(cfg.mlp_width, C, bias=False)
        norm = RMSNorm if cfg.qk_norm == "full" else nn.Identity
        self.q_norm, self.k_norm = norm(H * D, cfg.norm_eps), norm(G * D, cfg.norm_eps)  # nq, nk

    @torch.compiler.disable  # torch.compile would unroll the loop
    def naive(self, x, context):
        """Return y (B, T, C) of x (B, T, C), computed position after position."""
        q, k_temp, v_temp = self.temporary(x, context.rope)  # (1), for all positions
        k, v = k_temp[:, :, :0], v_temp[:, :, :0]  # persistent pairs: none yet
        ys = []
        for i, x_i in enumerate(x.split(1, dim=1)):  # (B, 1, C)
            now = slice(i, i + 1)
            keys = torch.cat([k, k_temp[:, :, now]], 2)  # (B, G, i + 1, D)
            values = torch.cat([v, v_temp[:, :, now]], 2)
            bias = context.bias[:, :, now, :i + 1]  # ALiBi's or 0, as no key is later
            a_i = attend(q[:, :, now], keys, values, bias, fast=False)    # (2)
            y_i = self.output(x_i, a_i)                                   # (3), (4)
            rope_i = [table[:, :, now] for table in context.rope]  # empty without RoPE
            k_i, v_i = self.persistent(y_i, rope_i)                       # (5)
            k, v = torch.cat([k, k_i], 2), torch.cat([v, v_i], 2)
            ys.append(y_i)
        return torch.cat(ys, 1)

    def temporary(self, x, rope):
        """Return q (B, H, T, D) and k^, v^ (B, G, T, D) of x (B, T, C), as in (1)."""
        x_n = self.norm1(x)
        q = self.heads(self.q_norm(self.wq(x_n)), rope)
        return q, self.heads(self.k_norm(self.wk(x_n)), rope), self.heads(self.wv(x_n))

    def output(self, x, a):
        """Return y (B, T, C) of x (B, T, C) and a (B, H, T, D), as in (3) and (4)."""
        z = x + self.wo(a.transpose(1, 2).flatten(2))
        return z + self.w_down(F.gelu(self.w_up(self.norm2(z))))

    def persistent(self, y, rope):
        """Return k, v (B, G, T, D) of y (B, T, C), as in (5)."""
        y_n = self.norm1(y) if self.cfg.kv_norm else y  # without n1: the ablation of Appendix E.2
        return self.heads(self.k_norm(self.wk(y_n)), rope), self.heads(self.wv(y_n))

    def heads(self, x, rope=()):
        """Return x (B, T, heads D) as (B, heads, T, D), rotated if rope has cos and sin."""
        x = x.unflatten(-1, (-1, self.cfg.head_size)).transpose(1, 2)
        return apply_rope(x, *rope) if rope else x

    # -- what a layer runs, see the table in the docstring of this file --

    def forward(self, x, layer, context):
        """Return y (B, T, C) of x (B, T, C). The wavefront does not call this. A layer that is
        called alone with schedule=wavefront and without a cache runs tiled."""
        if not self.cfg.recurrent:
            return self.at_once(x, layer, context)
        if isinstance(context, Cached):
            return self.one_token(x, layer, context)
        if context.naive:
            return self.naive(x, context)
        return tiled(self, x, context)

    def at_once(self, x, layer, context):
        """Return y (B, T, C) by (1) to (4) for all T tokens at once. They attend to each other's
        temporary pairs, and to the cached pairs if there is a cache."""
        q, k, v = self.temporary(x, context.rope)  # (1)
        k, v = context.extend(layer, k, v)  # (B, G, S, D)
        return self.output(x, context.attention(q, k, v))  # (2) to (4)

    def one_token(self, x, layer, context):
        """Return y (B, 1, C) by (1) to (5) for one token a row, x (B, 1, C), after the tokens of a
        cache."""
        if x.size(1) > 1:
            raise ValueError(f"RT's block takes one token a row with a cache, not {x.size(1)}, as "
                             "each needs the output of the one before: Model.decode goes through "
                             "them")
        y = self.at_once(x, layer, context)
        # The pair of (5) overwrites the temporary pair, because the token keeps its slot until
        # advance.
        context.extend(layer, *self.persistent(y, context.rope))
        return y


# ---- the other schedules ----

# wavefront is our own. While a layer computes a chunk c of K positions, the next layer computes the
# chunk before it:
#               time 0  1  2  3
#            layer 1    c0 c1 c2
#            layer 0 c0 c1 c2
# All queries of a chunk attend to their temporary pairs and to the earlier chunks in one call.
# Only then do the positions of the chunk follow one after the other, and each attends to the
# positions before it in its own chunk. rt_wavefront.py computes it. It needs kv_norm=true, because
# it folds the weight of n1 into Wk and Wv, which is right only if (5) has n1.
#
# tiled is the paper's Algorithm 1. It relies on (1), which gives all queries of a layer before the
# loop. After n positions, let t be the largest power of two that divides n. Then the queries
# n+1 .. n+t attend to a tile, the keys n-t+1 .. n. In this way each query attends to each earlier
# key once. A key belongs to at most ceil(log2 T) tiles, and each tile reads it once. The naive loop
# reads it once for each later query. In this picture of T = 8, a number is the n after which a
# query meets a key, and a point is the query's temporary pair:
#                keys 1 2 3 4 5 6 7 8
#           query 1   .
#                 2   1 .
#                 3   2 2 .
#                 4   2 2 3 .
#                 5   4 4 4 4 .
#                 6   4 4 4 4 5 .
#                 7   4 4 4 4 6 6 .
#                 8   4 4 4 4 6 6 7 .
# Autograd computes its backward pass. The paper writes one by hand (section 6.4), and the backward
# pass of rt_wavefront.py uses the paper's idea.

@torch.compiler.disable  # torch.compile would unroll the loop
def tiled(block, x, context):
    """Return the same as block.naive. Each query has two running results: out (B, H, 1, D) is its
    attention to the keys that it has met so far, and lse (B, H, 1) is log(sum of e^score) over
    them."""
    q, k_temp, v_temp = block.temporary(x, context.rope)  # (1)
    out, lse = met_temporary(q, k_temp, v_temp)
    qs, outs, lses = q.split(1, 2), list(out.split(1, 2)), list(lse.split(1, 2))
    ks, vs, ys = [], [], []
    pos = context.k_pos  # of the keys and of the queries
    for i, x_i in enumerate(x.split(1, 1)):
        y_i = block.output(x_i, outs[i].to(x.dtype))  # (3), (4)
        rope_i = [table[:, :, i:i + 1] for table in context.rope]
        k_i, v_i = block.persistent(y_i, rope_i)  # (5)
        ys.append(y_i)
        ks.append(k_i)
        vs.append(v_i)
        n = i + 1  # the number of positions that are done
        t = n & -n  # the largest power of two that divides n
        keys = slice(n - t, n)
        queries = slice(n, n + t)  # the lists end at T, and so do their slices
        if n < x.size(1):  # (2)
            q_t, out_t, lse_t = (torch.cat(each[queries], 2) for each in (qs, outs, lses))
            k_t, v_t = torch.cat(ks[keys], 2), torch.cat(vs[keys], 2)
            out_t, lse_t = merge_tile(out_t, lse_t, q_t, k_t, v_t, pos[queries], pos[keys],
                                      context.slopes)
            outs[queries], lses[queries] = out_t.split(1, 2), lse_t.split(1, 2)
    return torch.cat(ys, 1)


def met_temporary(q, k, v):
    """Return out and lse of queries that have read nothing but their temporary pair. A softmax
    over one key has weight 1, so that out is the pair's value and lse is its score."""
    k, v = (upcast(x).repeat_interleave(q.size(1) // x.size(1), 1) for x in (k, v))
    return v, (upcast(q) * k).sum(-1) / math.sqrt(q.size(-1))


def merge_tile(out, lse, q, k, v, q_pos, k_pos, slopes):
    """Return out (B, H, t, D) and lse (B, H, t) of a tile's t queries, in which the keys of the
    tile are now counted, too. Before that, out and lse count fewer keys.

    A softmax can go on from a softmax over fewer keys. The keys that a query has met have together
    the weight e^lse, and out is the weighted mean of their values. So they count as one more key in
    the softmax over the tile, with the score lse and the value out."""
    # In 16 bits attend_by_position is called for every tile, because q @ k would round the scores.
    # Otherwise it is called for more than 32 keys only, because for fewer the call takes longer
    # than the work. (This 32 has nothing to do with cfg.chunk.) own is one more key of each query.
    if q.dtype != lse.dtype or k.size(2) > 32:
        return kernels.attend_by_position(q, k, v, q_pos, k_pos, slopes, own=(lse, out))
    k, v = (x.repeat_interleave(q.size(1) // x.size(1), 1) for x in (k, v))
    scores = q @ k.mT / math.sqrt(q.size(-1))  # (B, H, t, keys)
    if slopes is not None:
        scores = scores - slopes[:, None, None] * (q_pos[:, None] - k_pos)
    scores = torch.cat([lse[..., None], scores], -1)  # (B, H, t, 1 + keys)
    p = scores.softmax(-1)
    return p[..., :1] * out + p[..., 1:] @ v, scores.logsumexp(-1)


# ---- what the layers of a call share ----

class Context(model_gpt.Context):
    """The same as in model_gpt, but a bias is made only where it is read: with schedule=naive, and
    in a call with a cache whose dtype is float32 or better."""

    def __init__(self, cfg, x, pos=None, k_pos=None, in_order=True, has_bias=False):
        self.naive = cfg.schedule_used == "naive"
        super().__init__(cfg, x, pos, k_pos, in_order, has_bias or self.naive)
        self.rope = self.rope or ()  # an empty tuple unpacks to nothing
        self.k_pos = self.k_pos.int()  # kernels.py wants int32

    def attention(self, q, k, v):
        """Return the attention of the tokens to all keys up to their own, (B, H, T, D). There are
        three cases. self.bias is set in the first two, and it is then the mask.
        - With schedule=naive the softmax is written out.
        - With a cache in float32 or better, torch's attention runs. It is the fastest for one
          query.
        - In all other cases kernels.attend_by_position runs, which masks by positions. It needs no
          bias. In training a bias would be T x T. In 16 bits torch would round it."""
        if self.bias is not None:
            return attend(q, k, v, self.bias, fast=not self.naive)
        pos = self.pos.int().squeeze(0)  # (T,) for all rows, or (B, T)
        out, _ = kernels.attend_by_position(q, k, v, pos, self.k_pos, self.slopes)
        return out


class CachedContext(Cached, Context):
    """The context of a call with a cache."""

    def __init__(self, cfg, cache, T, n_valid=None):
        precise = cache.dtype == torch.promote_types(cache.dtype, torch.float32)
        super().__init__(cfg, cache, T, n_valid, has_bias=precise)


# ---- the model ----

class Model(LanguageModel):
    """The Recurrent Transformer language model."""
    context_type, cached_context_type = Context, CachedContext
    runs_blocks_once = False  # for FSDP, because a wavefront reads all blocks at once

    def __init__(self, cfg):
        super().__init__(cfg, [Block(cfg) for _ in range(cfg.n_layer)])
        self.init_weights()

    @torch.no_grad()
    def init_weights(self):
        """Make every matrix normal, truncated at 3 sigma, with sigma = 1 / sqrt(C). The projections
        into the residual stream are smaller: in layer l = 0 .. L - 1, sigma is
        1 / sqrt(2 fan_in (l + 1))."""
        for name, p in self.named_parameters():
            if p.dim() == 2:
                std = 1 / math.sqrt(self.cfg.n_embd)
                if name.endswith(("wo.weight", "w_down.weight")):
                    layer = int(name.split(".")[1])  # l
                    std = 1 / math.sqrt(2 * p.size(1) * (layer + 1))
                nn.init.trunc_normal_(p, std=std, a=-3 * std, b=3 * std)
        if self.cfg.tie_embeddings:
            self.head.weight = self.wte.weight

    def hidden(self, idx, context=None):
        """Return the same as in model_gpt. The wavefront runs all layers together. Otherwise one
        layer runs after the other."""
        cfg = self.cfg
        if cfg.recurrent and context is None and cfg.schedule_used == "wavefront":
            x = self.drop(self.wte(idx))
            return self.norm(rt_wavefront.run_layers(cfg, self.blocks, x))
        return super().hidden(idx, context)

    def decode(self, idx, cache, n_valid=None):
        """Return the same as in model_gpt. Several tokens of a row go through the wavefront, or
        one after the other."""
        if not self.cfg.recurrent or idx.size(1) == 1:
            return super().decode(idx, cache, n_valid)
        # place raises if the tokens do not all fit, before the first one is written.
        slots = cache.place(idx.size(1), n_valid)
        if self.cfg.schedule_used == "wavefront" and not cache.ragged:
            return self.prefill(idx, cache, slots)
        states = []
        for i, idx_i in enumerate(idx.split(1, 1)):
            left = None if n_valid is None else n_valid - i  # 0 or less means padding
            states.append(super().decode(idx_i, cache, left))
        return torch.cat(states, 1)

    def prefill(self, idx, cache, slots):
        """Return decode's result by a wavefront, for rows that hold equally many tokens. A row may
        have fewer than T new tokens. The rest of it is padding, and no token attends to padding
        behind it."""
        x = self.drop(self.wte(idx))
        past = [buffer[:, :, :cache.longest] for buffer in cache.buffers()]
        y, ks, vs = rt_wavefront.prefill(self.cfg, self.blocks, x, past)
        for layer, (k, v) in enumerate(zip(ks, vs)):
            cache.write(layer, k, v, slots)
        cache.advance(slots)
        return self.norm(y)

    def mixer_flops(self):
        """Return the same as in model_gpt, with Wk and Wv counted once more for the persistent
        pair. The products that the backward pass recomputes are not counted."""
        cfg = self.cfg
        again = 12.0 * cfg.n_layer * cfg.n_embd * cfg.kv_heads * cfg.head_size
        return LanguageModel.mixer_flops(self) + (again if cfg.recurrent else 0)


# ---- checks of a Config ----

def check(cfg):
    """Raise ValueError, naming the field, where a value is impossible."""
    if cfg.head_size > kernels.HEAD_SIZES[-1]:
        raise ValueError(f"head_dim={cfg.head_size} must be at most {kernels.HEAD_SIZES[-1]}")
    if cfg.schedule == "wavefront" and not cfg.kv_norm:
        raise ValueError("schedule=wavefront needs kv_norm=true; schedule=tiled does not")

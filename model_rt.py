"""
The Recurrent Transformer (RT): later positions read keys and values of a layer's own outputs.

In a Transformer, position i of layer l attends to keys and values made from the output of layer
l - 1. In an RT those of earlier positions are made from the output of layer l itself, so a single
layer is as deep in time as the sequence is long. This costs no parameters and no cache, but a layer
is now a loop over positions.

One layer, for positions i = 1 .. T with inputs x_i (n1, n2 are RMSNorms):

    q_i = Wq n1(x_i)   k^_i = Wk n1(x_i)   v^_i = Wv n1(x_i)        (1)  temporary pair: for i alone
    a_i = Attention(q_i; (k_j, v_j) for j < i, and (k^_i, v^_i))    (2)
    z_i = x_i + Wo a_i                                              (3)
    y_i = z_i + W_down gelu(W_up n2(z_i))                           (4)  the next layer's x_i
    k_i = Wk n1(y_i)   v_i = Wv n1(y_i)                             (5)  persistent pair: for j > i

Scores are q . k / sqrt(D) - m_h (i - j): ALiBi, 0 for the temporary pair. Three schedules compute
the same numbers:

naive      (1) to (5), position after position, layer after layer.
tiled      The paper's Algorithm 1. Each query keeps the state (out, lse) of an online softmax, at
           first over its temporary pair. Once position i is done, with t the largest power of two
           that divides i, one attention call of queries i+1 .. i+t over keys i-t+1 .. i is merged
           into their states. Every query meets every earlier key once, and a key is read at most
           log2 T times. For T = 8 (the number tells after which position an entry is computed):

                    keys 1 2 3 4 5 6 7 8
               query 1   .                  . temporary pair
                     2   1 .
                     3   2 2 .
                     4   2 2 3 .
                     5   4 4 4 4 .
                     6   4 4 4 4 5 .
                     7   4 4 4 4 6 6 .
                     8   4 4 4 4 6 6 7 .

wavefront  Ours, in rt_wavefront.py: layers work at the same time, each some positions behind the
           one below it, and the backward pass is written by hand.

fast=false runs naive, fast=true the wavefront, or tiled with the two ablations that the wavefront
has not: kv_norm=false drops n1 from (5) (Appendix E.2); with block=b (section 9) the positions of a
block of b attend to each other's temporary pairs and to the persistent pairs of earlier blocks, so
that b positions are computed at once. b = 1 is the RT, b = T the plain Transformer of model_gpt;
with b > 1 the cache holds temporary pairs too. The wavefront prefills all tokens of a prompt at
once, the other schedules one after the other. Dropout is on embeddings only.

Departures: the norms are RMSNorm, as in the text (the code's configs use LayerNorm); ALiBi and
every softmax are in float32 under bfloat16 too; RoPE, grouped heads, decoding, prefill, blocks and
the wavefront are additions.

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
from model_gpt import (BaseConfig, KVCache, LanguageModel, RMSNorm, alibi_slopes, apply_rope,
                       attention_bias, attention_fast, attention_naive, choice, compute_dtype,
                       rope_tables)


@dataclass
class Config(BaseConfig):
    n_mlp: int = 0               # hidden width of the MLP (0: 4 n_embd)
    pos: str = choice("alibi", "rope", "none")
    qk_norm: str = choice("none", "full")   # full: RMSNorm of queries and keys over all heads
    kv_norm: bool = True         # false: persistent pairs are Wk y, Wv y (Appendix E.2)
    block: int = 1               # positions computed at once (section 9); 1: the RT
    schedule: str = choice("auto", "naive", "tiled", "wavefront")   # auto: by fast; else it wins
    chunk: int = 32              # positions of a wavefront's chunk
    cuda_graphs: bool = True     # on a GPU the wavefront is replayed as a CUDA graph
    tie_embeddings: bool = False    # the head is the embedding matrix

    RESUME_OVERRIDES = ("schedule", "chunk", "cuda_graphs")
    RETIRED = {"norm": "rms"}       # keys of older checkpoints: what they must have been

    def __post_init__(self):
        super().__post_init__()
        self.at_least(1, "block", "chunk")
        self.at_least(0, "n_mlp")
        self.n_mlp = self.n_mlp or 4 * self.n_embd
        if self.head_dim > kernels.HEAD_SIZES[-1]:
            raise ValueError(f"n_embd / n_head = {self.head_dim}: a head is at most "
                             f"{kernels.HEAD_SIZES[-1]} wide")
        if self.schedule == "wavefront" and (self.block > 1 or not self.kv_norm):
            raise ValueError("schedule=wavefront needs block=1 and kv_norm=true; tiled does not")

    @property
    def schedule_used(self):
        """What schedule=auto is."""
        if self.schedule != "auto":
            return self.schedule
        if not self.fast:
            return "naive"
        return "wavefront" if self.block == 1 and self.kv_norm else "tiled"


# ---- naive: the equations ----

class Layer(nn.Module):
    """One layer: a Block in other files, but here a block is cfg.block positions. rope is None, or
    RoPE's tables (cos, sin), each (B or 1, 1, n, D)."""

    def __init__(self, cfg):
        super().__init__()
        self.cfg = cfg
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

    def heads(self, u, rope=None):
        """(B, n, heads D) -> (B, heads, n, D), rotated."""
        u = u.unflatten(-1, (-1, self.cfg.head_dim)).transpose(1, 2)
        return u if rope is None else apply_rope(u, *rope)

    def temporary(self, x, rope):
        """Equation (1): q (B, H, n, D); k, v (B, G, n, D)."""
        n = self.norm1(x)
        q = self.heads(self.q_norm(self.wq(n)), rope)
        return q, self.heads(self.k_norm(self.wk(n)), rope), self.heads(self.wv(n))

    def output(self, x, a):
        """Equations (3) and (4): x (B, n, C), a (B, H, n, D) -> y (B, n, C)."""
        z = x + self.wo(a.transpose(1, 2).flatten(2).to(x.dtype))
        return z + self.w_down(F.gelu(self.w_up(self.norm2(z))))

    def persistent(self, y, rope):
        """Equation (5): k, v (B, G, n, D)."""
        n = self.norm1(y) if self.cfg.kv_norm else y
        return self.heads(self.k_norm(self.wk(n)), rope), self.heads(self.wv(n))

    def forward(self, x, rope, bias):
        """The naive schedule: x (B, T, C) -> y (B, T, C). bias (1, H or 1, T, T) is ALiBi, and -inf
        on later positions. With block=b every i below is a block of b positions."""
        b, ys = self.cfg.block, []
        q, k_temp, v_temp = self.temporary(x, rope)
        k_all, v_all = torch.empty_like(k_temp), torch.empty_like(v_temp)
        k, v = k_all[:, :, :0], v_all[:, :, :0]     # persistent pairs of the positions before i
        parts = zip(x.split(b, 1), q.split(b, 2), k_temp.split(b, 2), v_temp.split(b, 2))
        for i, (x_i, q_i, kt_i, vt_i) in enumerate(parts):
            here = slice(i * b, i * b + x_i.size(1))
            keys, values = extended(k, kt_i, k_all), extended(v, vt_i, v_all)
            a_i = attention_naive(q_i, keys, values, bias[:, :, here, :here.stop])      # (2)
            y_i = self.output(x_i, a_i)                                                 # (3), (4)
            k_i, v_i = self.persistent(y_i, tables_at(rope, here))                      # (5)
            k, v = extended(k, k_i, k_all), extended(v, v_i, v_all)
            ys.append(y_i)
        return torch.cat(ys, 1)


def extended(past, new, buffer):
    """past (B, G, n, D), then new. Autograd needs each result as it was, so it is a copy; without
    autograd, past is the first n slots of buffer, and new is written to the next ones."""
    if torch.is_grad_enabled():
        return torch.cat([past, new], 2)
    n, end = past.size(2), past.size(2) + new.size(2)
    buffer[:, :, n:end] = new
    return buffer[:, :, :end]


def tables_at(rope, here):
    """RoPE's tables of the positions `here`, a slice."""
    return rope and [table[:, :, here] for table in rope]


# ---- tiled: the paper's Algorithm 1 ----

def layer_tiled(layer, x, rope, slopes, b):
    """The same function as layer(x, ...): each query attends to the same pairs, only in parts that
    an online softmax merges. Lists have one element for each position (or block of b)."""
    ys, ks, vs = [], [], []
    pos = torch.arange(x.size(1), device=x.device, dtype=torch.int32)
    q, k_temp, v_temp = layer.temporary(x, rope)
    states = attend_temporary(q, k_temp, v_temp, pos, slopes, b)  # [(out, lse), ...]
    q, pos = q.split(b, 2), pos.split(b)
    for i, x_i in enumerate(x.split(b, 1), start=1):
        y_i = layer.output(x_i, states[i - 1][0])  # (3), (4)
        k_i, v_i = layer.persistent(y_i, tables_at(rope, slice((i - 1) * b, i * b)))  # (5)
        ys.append(y_i)
        ks.append(k_i)
        vs.append(v_i)
        t = i & -i  # the largest power of two that divides i
        keys, queries = slice(i - t, i), slice(i, i + t)
        if i < len(q):
            q_t, k_t, v_t = (torch.cat(u, 2) for u in (q[queries], ks[keys], vs[keys]))
            tile = q_t, k_t, v_t, torch.cat(pos[queries]), torch.cat(pos[keys]), slopes
            state = (torch.cat(u, 2) for u in zip(*states[queries]))  # out and lse
            out, lse = merge_tile(*state, *tile)
            states[queries] = zip(out.split(b, 2), lse.split(b, 2))
    return torch.cat(ys, 1)


def merge_tile(out, lse, q, k, v, q_pos, k_pos, slopes):
    """The states (out, lse) of queries that attend to a tile, too, in which every key is earlier
    than every query. Small tiles are written out: the operators' overhead would exceed the work."""
    if k.size(2) > 32 or q.dtype != lse.dtype:  # in 16 bits, too: attend does not round scores
        return kernels.merge(out, lse, *attend(q, k, v, q_pos, k_pos, slopes))
    k, v = (u.repeat_interleave(q.size(1) // u.size(1), 1) for u in (k, v))
    s = q @ k.mT / math.sqrt(q.size(-1))  # (B, H, n, keys)
    if slopes is not None:
        s = s - slopes[:, None, None] * (q_pos[:, None] - k_pos)
    s = torch.cat([lse[..., None], s], -1)
    p = s.softmax(-1)
    return p[..., :1] * out + p[..., 1:] @ v, s.logsumexp(-1)


def attend_temporary(q, k, v, pos, slopes, b):
    """Attention of each block of b positions to its temporary pairs: a list of (out, lse)."""
    B = q.size(0)
    q, k, v = (u.unflatten(2, (-1, b)).transpose(1, 2).flatten(0, 1) for u in (q, k, v))
    out, lse = attend(q, k, v, pos[:b], pos[:b], slopes)  # (B T / b, H, b, .)
    out, lse = (u.unflatten(0, (B, -1)).unbind(1) for u in (out, lse))
    return list(zip(out, lse))


def attend(q, k, v, q_pos, k_pos, slopes):
    """out (B, H, n, D) and lse (B, H, n), both in float32 or better, as a state must be."""
    out, lse = kernels.attend(q, k, v, q_pos, k_pos, slopes)
    return out.to(lse.dtype), lse


# ---- the model ----

class Model(LanguageModel):
    """The Recurrent Transformer language model."""
    runs_blocks_once = False

    def __init__(self, cfg):
        super().__init__(cfg, [Layer(cfg) for _ in range(cfg.n_layer)])
        self.init_weights()

    @torch.no_grad()
    def init_weights(self):
        """Normal, truncated at 3 sigma. sigma = 1 / sqrt(C) for what reads the residual stream, the
        embedding and the head; the projections into the stream shrink with depth:
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
        if cache is None:
            self.check_context(T, "{} tokens are")
            x = self.layers(x)
        else:
            equal_rows = not cache.ragged or cache.longest == 0  # each holds as many tokens
            pos = cache.place(T, n_valid)  # raises if they do not all fit
            if T > 1 and equal_rows and self.cfg.schedule_used == "wavefront":
                x = self.prefill(x, cache)
            else:
                x = self.decode(x, pos, cache, n_valid)
        return self.norm(x)

    @torch.compiler.disable  # a compiler would unroll the loop over positions
    def layers(self, x):
        """All layers on x (B, T, C) -> (B, T, C)."""
        cfg, T, b = self.cfg, x.size(1), min(self.cfg.block, x.size(1))
        if cfg.schedule_used == "wavefront":
            return rt_wavefront.run_layers(cfg, self.blocks, x)
        tiled = cfg.schedule_used == "tiled"
        if tiled:
            x = F.pad(x, (0, 0, 0, -T % b))  # to whole blocks
        pos = torch.arange(x.size(1), device=x.device)[None]
        rope, slopes = self.rope(pos, x.dtype), self.slopes(x)
        if tiled:
            for layer in self.blocks:
                x = layer_tiled(layer, x, rope, slopes, b)
            return x[:, :T]
        bias = attention_bias(pos, pos[0], slopes=slopes, dtype=kernels.lse_dtype(x))
        for layer in self.blocks:
            x = layer(x, rope, bias)  # bias (1, H or 1, T, T)
        return x

    def rope(self, pos, dtype):
        if self.cfg.pos != "rope":
            return None
        tables = rope_tables(pos, self.cfg.head_dim, self.cfg.rope_theta, dtype)
        return [table[:, None] for table in tables]  # (B or 1, 1, n, D)

    def slopes(self, x):
        alibi = self.cfg.pos == "alibi"
        return alibi_slopes(self.cfg.n_head, x.device, kernels.lse_dtype(x)) if alibi else None

    # decoding

    def cache_type(self, cfg, *sizes):
        """With block > 1 it holds the temporary pairs too, as layers n_layer and up: the last
        block, unfinished, needs them."""
        return KVCache(cfg, *sizes, cfg.n_layer * (1 if cfg.block == 1 else 2))

    def prefill(self, x, cache):
        """The wavefront over T new tokens x (B, T, C), after those of the cache."""
        S, dtype = cache.longest, compute_dtype(x)
        past = [(k[:, :, :S].to(dtype), v[:, :, :S].to(dtype)) for k, v in zip(cache.k, cache.v)]
        y, k, v = rt_wavefront.prefill(self.cfg, self.blocks, x, past)
        for l in range(self.cfg.n_layer):
            cache.write(l, k[l], v[l])
        cache.advance()
        return y

    def decode(self, x, pos, cache, n_valid):
        """T new tokens x (B, T, C) at pos (B or 1, T), one after the other."""
        ys, T = [], x.size(1)
        for t in range(T):
            if T > 1:  # hidden() reserved slots for all; a step needs its own
                pos = cache.place(1, None if n_valid is None else n_valid - t)
            ys.append(self.step(x[:, t:t + 1], pos, cache))
            cache.advance()
        return torch.cat(ys, 1)

    def step(self, x, pos, cache):
        """One token of each row, x (B, 1, C): a plain Transformer's step, and a projection more.
        In the cache, the temporary pair stands in its slot until the persistent one replaces it."""
        cfg, slots = self.cfg, torch.arange(cache.end, device=x.device)  # (S,)
        rope, slopes = self.rope(pos, x.dtype), self.slopes(x)
        bias = attention_bias(pos, slots, slopes=slopes, dtype=kernels.lse_dtype(x))
        if cfg.block > 1:  # which slots are of finished blocks
            finished = (slots < pos - pos % cfg.block)[:, None, :, None]  # (B or 1, 1, S, 1)
        for l, layer in enumerate(self.blocks):
            q, k_temp, v_temp = layer.temporary(x, rope)
            pairs = cache.write(l, k_temp, v_temp)  # (B, G, S, D)
            if cfg.block > 1:  # of the unfinished block, the temporary pairs
                own = cache.write(cfg.n_layer + l, k_temp, v_temp)
                pairs = [torch.where(finished, *u) for u in zip(pairs, own)]
            k, v = (u.to(q.dtype) for u in pairs)
            if cfg.schedule_used == "naive":
                a = attention_naive(q, k, v, bias)
            elif bias.dtype == q.dtype:
                a = attention_fast(q, k, v, bias)
            else:  # torch's function would round ALiBi to bfloat16
                a, _ = kernels.attend(q, k, v, pos.int().squeeze(0), slots.int(), slopes)
            x = layer.output(x, a)
            cache.write(l, *layer.persistent(x, rope))
        return x

    def flops_per_token(self):
        """Floating-point operations of one token's forward and backward pass in a sequence of
        block_size: 6 a weight of each matrix product (Wk and Wv are used twice, once a pair), and
        12 C a visible key, averaged over positions. What backward recomputes is not counted."""
        cfg = self.cfg
        weights = sum(p.numel() for p in self.blocks.parameters() if p.dim() == 2)
        weights += 2 * cfg.n_layer * cfg.n_embd * cfg.n_kv_head * cfg.head_dim  # Wk, Wv again
        weights += cfg.vocab_size * cfg.n_embd  # the head
        return 6.0 * weights + 12.0 * cfg.n_layer * cfg.n_embd * (cfg.block_size + 1) / 2

"""
LRT, the Latent Recurrent Transformer: the previous token's upper hidden state is memory for the next.

When token t is decoded, token t-1 has been through all layers. A Transformer's layer attends to what
the same layer knew of earlier tokens, so early layers never use what upper layers found. LRT keeps
the residual stream of the last token after one upper layer (the source, at 0.6 of the depth) as the
memory m_{t-1}, and every layer of token t reads it, in two ways:

    residual     x <- alpha x + beta x0 + gamma m_{t-1}
    keys         k = RoPE(RMSNorm(g_loc Wk u + g_rec Wk_rec m_{t-1}))         u = RMSNorm(x)
    values       v = g_loc (Wv u + e) + g_rec Wv_rec m_{t-1}
    gates        g_loc, g_rec = 2 sigmoid(Wg u), one of each a key head; Wg = 0 at the start: all are 1
    memory       m_t = x after the source layer,  m_{-1} = 0

           token t-1               token t
        layer 4   o                   o
        layer 3   o -- m_{t-1} --+    o         into the residual stream, the keys and the values
        layer 2   o              +--> o         of every layer: a path from the top of one token
        layer 1   o              +--> o         to the bottom of the next

Wk_rec and Wv_rec are shared by all layers, which makes 0.3 % more parameters at the paper's size. A
token is decoded in one ordinary forward; the cache is a Transformer's and one vector a sequence.

The backbone (memory=false) is nanochat's: RMSNorm without weights, also after the embedding and
before the untied head; queries and keys normed, then rotated; MLP W_down relu(W_up u)^2; layers by
the pattern SSSL, S attending to half the context, the last layer to all of it; x0 = RMSNorm(E[idx])
added to the input of each layer (beta); a value embedding e = 2 sigmoid(Wve u[:32]) E_l[idx] in each
layer; logits 15 tanh(z / 15).

Training. m_0 -> m_1 -> ... is a chain, position by position. train_path says how training goes:

    exact        the chain itself, T passes of one position. Evaluation and decoding always do this.
    interleaved  (the default, Algorithm 1) a first pass over all positions without memory fills a
                 buffer with each layer's keys and values and with the memories. Then each of S
                 strided subsets is computed again: its positions read their memory from the buffer,
                 write their keys and values into it, attend to all of it, and write their memory.
                 Twice the work of a plain step, whatever S. For S = 2:

                     first pass   0  1  2  3  4  5  6  7     without memory
                     subset 0     0     2     4     6        position 2 reads m_1 of the first pass
                     subset 1        1     3     5     7     position 3 reads m_2 of subset 0

                 loss = (L_first + L_0 + ... + L_{S-1}) / (S + 1), with gradients through all passes
                 and the buffer. S = T computes the exact chain.
    chunked      (Appendix D) chunks of C positions, one after the other. All positions of a chunk
                 read the last memory of the chunk before. C = 1 is exact, C = T the backbone.

`fast=false` attends with a T x T mask; `fast=true` with fused kernels that read positions (a strided
subset attends to the whole buffer without a mask), and evaluates with a decoding cache.

Read into the paper where it is silent: gates read u; e is part of the local value; with inject=k
values have no gates; subset losses are weighted by their numbers of targets. Eq. 5 has no beta x0,
but the backbone's stays. Departures: gates learn at the head's rate (see RATES), Muon is torch's,
dropout can be set. Of the ablations, m_t in its own pass, older or averaged memories (Table 2),
replaced keys (Table 6) and other backbones (Table 8) are left out.

Paper: Huang et al. 2026, Latent Recurrent Transformer: Architecture Exploration, Training Strategies,
and Scaling Behavior (2605.26797). Its code is not public; the backbone's is karpathy/nanochat.

Shapes: B batch, T tokens, n positions of a pass, S keys (or subsets, where it says so), C width,
H query heads, G key/value heads, D head size.
"""
import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F

import kernels
from model_gpt import (BaseConfig, KVCache, LanguageModel, apply_rope, attention_bias,
                       attention_fast, attention_naive, choice, compute_dtype, cross_entropy,
                       rope_tables)

VALUE_CHANNELS = 32     # how many channels of u the gate of a value embedding reads
SOFTCAP = 15.0          # logits are between -15 and 15


@dataclass
class Config(BaseConfig):
    memory: bool = True     # the recurrence; false: the backbone
    train_path: str = choice("interleaved", "chunked", "exact")
    subsets: int = 2        # S of train_path=interleaved
    chunk: int = 64         # C of train_path=chunked
    prefill: str = choice("exact", "interleaved")       # how a prompt fills an empty cache
    source: str = ""        # the source layer, from 1 ("": 0.6 of the depth); several: "2,4", averaged
    inject: str = choice("kv+residual", "none", "k", "v", "kv", "residual")     # what reads m
    projections: str = choice("shared", "layerwise")    # Wk_rec, Wv_rec: of all layers, or each its own
    pattern: str = "SSSL"   # layers' windows, tiled: S short, L all; the last layer is L
    swa: int = 0            # an S layer's query attends to swa keys before its own (0: block_size / 2)
    rope_theta: float = 10000.0     # RoPE's base
    norm_eps: float = 1e-5  # RMSNorm's epsilon

    # keys that change how a model is trained and prefilled, not what its weights mean
    SAME_FUNCTION = ("train_path", "subsets", "chunk", "prefill")
    # former keys, with the value that they always have now
    RETIRED = dict(state="lag", lag=1, replace=False, value_embeddings=True, x0_mixing=True,
                   layer_scale=False, gated_attention=False, value_residual=False,
                   dense_residual=False, softcap=SOFTCAP)

    def __post_init__(self):
        super().__post_init__()
        self.at_least(1, "subsets", "chunk")
        self.at_least(0, "swa")
        if not self.pattern or set(self.pattern) - {"S", "L"}:
            raise ValueError(f"pattern={self.pattern} must be made of S and L")
        if self.head_dim % 2 or self.head_dim > kernels.HEAD_SIZES[-1]:
            raise ValueError(f"n_embd / n_head = {self.head_dim} must be even, at most "
                             f"{kernels.HEAD_SIZES[-1]}")
        self.memory = self.memory and self.inject != "none"
        self.swa = self.swa or max(1, self.block_size // 2)
        self.sources                # raises where they are impossible

    @property
    def sources(self):
        """The source layers, from 1 to n_layer."""
        names = self.source.split(",") if self.source else [str(max(1, round(0.6 * self.n_layer)))]
        layers = [int(name) if name.strip().isdecimal() else 0 for name in names]
        if not 1 <= min(layers) <= max(layers) <= self.n_layer or len(set(layers)) < len(layers):
            raise ValueError(f"source={self.source} must name layers from 1 to "
                             f"n_layer={self.n_layer}, as in 2 or 2,4")
        return layers

    def injects(self, name):
        """Whether the memory enters keys ("k"), values ("v") or the residual stream ("residual")."""
        return self.memory and name in self.inject.replace("kv", "k+v").split("+")

    def window(self, layer):
        """How many keys a query of this layer attends to, its own included; 0: all."""
        short = self.pattern[layer % len(self.pattern)] == "S" and layer < self.n_layer - 1
        return self.swa + 1 if short and self.swa + 1 < self.block_size else 0


# -------------------------------------------------------------------------------------------------
# the method: a layer that reads the memory

def normed(x, eps):
    """RMSNorm without a weight over the last dimension, in x's dtype."""
    return F.rms_norm(x, x.shape[-1:], eps=eps).to(x.dtype)


class Tokens(NamedTuple):
    """Some positions of every row, and what the layers need to know of them."""
    x0: torch.Tensor        # (B, n, C) normed embeddings
    values: list            # of each layer, (B, G, n, D) value embeddings
    cos: torch.Tensor       # (B or 1, 1, n, D) RoPE's tables
    sin: torch.Tensor
    pos: torch.Tensor       # (B or 1, n) positions; None: the newest n, in all rows

    def at(self, part):
        """Those of them that a slice names."""
        values = [e[:, :, part] for e in self.values]
        pos = None if self.pos is None else self.pos[:, part]
        return Tokens(self.x0[:, part], values, self.cos[:, :, part], self.sin[:, :, part], pos)


class MemoryProjection(nn.Module):
    """Wk_rec and Wv_rec: the memory as key and value."""

    def __init__(self, cfg):
        super().__init__()
        self.head_dim, width = cfg.head_dim, cfg.n_kv_head * cfg.head_dim
        self.wk = nn.Linear(cfg.n_embd, width, bias=False) if cfg.injects("k") else None
        self.wv = nn.Linear(cfg.n_embd, width, bias=False) if cfg.injects("v") else None

    def forward(self, m):
        """m (B, n or 1, C) -> k_rec, v_rec (B, G, n or 1, D), None where it does not enter."""
        return [w and heads(w(m), self.head_dim) for w in (self.wk, self.wv)]


def heads(x, D):
    """(B, n, heads D) -> (B, heads, n, D)."""
    return x.unflatten(-1, (-1, D)).transpose(1, 2)


class Attention(nn.Module):
    """Causal self-attention whose keys and values also hold the memory."""

    def __init__(self, cfg, layer):
        super().__init__()
        C, D, H, G = cfg.n_embd, cfg.head_dim, cfg.n_head, cfg.n_kv_head
        self.cfg, self.layer = cfg, layer
        self.attend = attend_fast if cfg.fast else attend_naive
        self.reads_memory = cfg.injects("k") or cfg.injects("v")
        own = self.reads_memory and cfg.projections == "layerwise"
        self.rec = MemoryProjection(cfg) if own else None
        self.wq = nn.Linear(C, H * D, bias=False)
        self.wk = nn.Linear(C, G * D, bias=False)
        self.wv = nn.Linear(C, G * D, bias=False)
        self.wo = nn.Linear(H * D, C, bias=False)
        self.w_value = nn.Linear(min(VALUE_CHANNELS, C), G, bias=False)     # gate of e
        if self.reads_memory:
            self.w_gate = nn.Linear(C, 2 * G, bias=False)                   # g_loc and g_rec

    def forward(self, u, tokens, rec, cache):
        """u (B, n, C), normed; rec: k_rec and v_rec, None while the memory is zero; cache: None
        where the positions are all there is. -> (B, n, C)"""
        D, eps = self.cfg.head_dim, self.cfg.norm_eps
        q, k, v = (heads(w(u), D) for w in (self.wq, self.wk, self.wv))     # (B, H or G, n, D)
        e = tokens.values[self.layer].to(v.dtype)                           # (B, G, n, D)
        v = v + gate(self.w_value(u[..., :VALUE_CHANNELS])) * e
        if self.reads_memory:
            k, v = self.add_memory(u, k, v, rec)
        q, k = (apply_rope(normed(x, eps), tokens.cos, tokens.sin) for x in (q, k))
        if cache is not None:
            k, v = cache.write(self.layer, k, v)                            # (B, G, S, D)
        y = self.attend(q, k, v, tokens.pos, self.cfg.window(self.layer))   # (B, H, n, D)
        return self.wo(y.transpose(1, 2).flatten(2))

    def add_memory(self, u, k, v, rec):
        """g_loc local + g_rec recurrent, of the keys, the values or both."""
        g_loc, g_rec = gate(self.w_gate(u)).chunk(2, 1)                     # (B, G, n, 1)
        k_rec, v_rec = rec or (None, None)
        if self.cfg.injects("k"):
            k = g_loc * k if k_rec is None else g_loc * k + g_rec * k_rec
        if self.cfg.injects("v"):
            v = g_loc * v if v_rec is None else g_loc * v + g_rec * v_rec
        return k, v


def gate(z):
    """2 sigmoid(z), one a head: (B, n, heads) -> (B, heads, n, 1)."""
    return (2 * torch.sigmoid(z)).transpose(1, 2)[..., None]


def attend_naive(q, k, v, pos, window):
    """q (B, H, n, D) at pos; k, v (B, G, S, D) at positions 0 to S - 1. -> (B, H, n, D)"""
    wide = torch.promote_types(q.dtype, torch.float32)
    k_pos = torch.arange(k.size(2), device=q.device)
    pos = k_pos[None, -q.size(2):] if pos is None else pos
    return attention_naive(q, k, v, attention_bias(pos, k_pos, window, None, wide))


def attend_fast(q, k, v, pos, window):
    """The same without a mask: torch's kernels where the queries are one new token or all
    positions, else ours, which read the positions and skip the tiles that no query attends to."""
    n, S = q.size(2), k.size(2)
    if pos is None and n == 1:                  # the newest `window` keys; all where window is 0
        return attention_fast(q, k[:, :, -window:], v[:, :, -window:], None)
    if n == S and not window:
        return attention_fast(q, k, v, None)
    if n == S:
        return kernels.attend(q, k, v, window=window)[0]
    k_pos = torch.arange(S, device=q.device, dtype=torch.int32)
    pos = k_pos[-n:] if pos is None else pos.squeeze(0).int()
    return kernels.attend(q, k, v, pos, k_pos, window=window or None)[0]


class SquaredMLP(nn.Module):
    """W_down relu(W_up x)^2 (So et al. 2021)."""

    def __init__(self, cfg):
        super().__init__()
        self.w_up = nn.Linear(cfg.n_embd, 4 * cfg.n_embd, bias=False)
        self.w_down = nn.Linear(4 * cfg.n_embd, cfg.n_embd, bias=False)

    def forward(self, x):
        return self.w_down(F.relu(self.w_up(x)).square())


class Block(nn.Module):
    def __init__(self, cfg, layer):
        super().__init__()
        self.eps = cfg.norm_eps
        self.attn, self.mlp = Attention(cfg, layer), SquaredMLP(cfg)
        self.drop = nn.Dropout(cfg.dropout)

    def forward(self, x, tokens, rec, cache):
        x = x + self.drop(self.attn(normed(x, self.eps), tokens, rec, cache))
        return x + self.drop(self.mlp(normed(x, self.eps)))


# -------------------------------------------------------------------------------------------------
# keys and values of earlier passes. A pass computes some positions; in each layer it calls
#     k, v = cache.write(layer, k, v)
# which stores the new keys and values of its positions, (B, G, n, D), and returns those of all
# positions 0 to S - 1 so far, (B, G, S, D). There are two caches with this one call: Buffer, in
# training, through which gradients flow, and MemoryCache, in decoding, which also holds each row's
# memory m_{t-1}.

class Buffer:
    """The first pass writes all positions; the next ones write positions s, s + S, ... again where
    `subset` is (s, S), else the positions after those that are there."""

    def __init__(self, cfg):
        self.k, self.v = [None] * cfg.n_layer, [None] * cfg.n_layer
        self.subset = None

    def write(self, layer, k, v):
        self.k[layer] = self.written(self.k[layer], k)
        self.v[layer] = self.written(self.v[layer], v)
        return self.k[layer], self.v[layer]

    def written(self, old, new):
        if old is None:
            return new
        if self.subset is None:
            return torch.cat([old, new], 2)
        s, S = self.subset
        return torch.slice_scatter(old, new, 2, s, None, S)


class MemoryCache(KVCache):
    """A KVCache with the memory of each row's last token, (B, 1, C); None for the backbone."""

    def __init__(self, cfg, batch_size, max_len, device, dtype, memory_dtype):
        super().__init__(cfg, batch_size, max_len, device, dtype)
        shape = batch_size, 1, cfg.n_embd
        with torch.inference_mode(False):
            self.memory = torch.zeros(shape, device=device, dtype=memory_dtype) if cfg.memory else None

    def nbytes(self):
        return super().nbytes() + (0 if self.memory is None else self.memory.nbytes)

    def reset(self, rows=None):
        super().reset(rows)
        if self.memory is not None:
            self.memory[slice(None) if rows is None else rows] = 0

    def write(self, layer, k, v):
        return [x.to(k.dtype) for x in self.append(layer, k, v)]

    def advance(self, m):
        """Count the placed tokens; m (B, 1, C): the memory after each row's last one."""
        if self.memory is not None:
            if self.ragged:                     # a row without new tokens keeps its memory
                m = torch.where(self.new[:, None, None] > 0, m, self.memory)
            self.memory.copy_(m)
        super().advance()


# -------------------------------------------------------------------------------------------------
# the model

class Model(LanguageModel):
    """The Latent Recurrent Transformer, and its backbone where memory is false."""

    def __init__(self, cfg):
        super().__init__()
        self.cfg, self.sources = cfg, cfg.sources
        L, C = cfg.n_layer, cfg.n_embd
        V = 64 * math.ceil(cfg.vocab_size / 64)             # padded, for fast products
        self.wte = nn.Embedding(V, C)
        self.drop = nn.Dropout(cfg.dropout)
        self.values = nn.ModuleDict({str(layer): nn.Embedding(V, cfg.n_kv_head * cfg.head_dim)
                                     for layer in range(L)})
        self.blocks = nn.ModuleList(Block(cfg, layer) for layer in range(L))
        self.alpha = nn.Parameter(torch.ones(L))
        self.beta = nn.Parameter(torch.full((L,), 0.1))
        self.gamma = nn.Parameter(torch.full((L,), 0.1)) if cfg.injects("residual") else None
        shared = (cfg.injects("k") or cfg.injects("v")) and cfg.projections == "shared"
        self.rec = MemoryProjection(cfg) if shared else None
        if cfg.memory and len(self.sources) > 1:            # logits of the sources' weights
            self.source_weights = nn.Parameter(torch.zeros(len(self.sources)))
        self.head = nn.Linear(C, V, bias=False)
        self.init_weights()

    @torch.no_grad()
    def init_weights(self):
        """nanochat's: embedding N(0, 1), head N(0, 0.001), what reads the residual stream uniform
        with deviation 1 / sqrt(C), what writes to it zero, gates zero; vectors as they were made."""
        limit = math.sqrt(3 / self.cfg.n_embd)
        zero = "wo.weight", "w_down.weight", "w_gate.weight", "w_value.weight"
        for name, p in self.named_parameters():
            if name == "wte.weight":
                p.normal_(0, 1)
            elif name == "head.weight":
                p.normal_(0, 0.001)
            elif name.endswith(zero):
                p.zero_()
            elif p.dim() == 2:
                p.uniform_(-limit, limit)

    def tokens(self, idx, pos):
        """Tokens of idx (B, n) at positions pos (B or 1, n)."""
        cfg, x0 = self.cfg, self.drop(normed(self.wte(idx), self.cfg.norm_eps))     # (B, n, C)
        values = [heads(table(idx), cfg.head_dim) for table in self.values.values()]
        cos, sin = rope_tables(pos, cfg.head_dim, cfg.rope_theta, x0.dtype)         # (B or 1, n, D)
        return Tokens(x0, values, cos[:, None], sin[:, None], pos)

    def run(self, tokens, memory, cache):
        """One pass: these positions through all layers. memory (B, n or 1, C): m_{t-1} of each, or
        one for all; None: zero. -> x after the last layer and m_t, both (B, n, C)."""
        shared = self.rec(memory) if self.rec is not None and memory is not None else None
        reads = memory is not None
        x, outputs = tokens.x0, []
        alpha, beta = self.alpha.unbind(), self.beta.unbind()
        for layer, block in enumerate(self.blocks):
            x = alpha[layer] * x + beta[layer] * tokens.x0
            if self.gamma is not None and reads:
                x = x + self.gamma[layer] * memory
            own = block.attn.rec
            x = block(x, tokens, own(memory) if own is not None and reads else shared, cache)
            outputs.append(x)
        return x, self.memory_of(outputs)

    def memory_of(self, outputs):
        """m_t: the source layer's output, or a learned average of several layers'."""
        chosen = [outputs[layer - 1] for layer in self.sources]
        if len(chosen) == 1 or not self.cfg.memory:
            return chosen[0]
        return sum(w * x for w, x in zip(self.source_weights.softmax(-1), chosen))

    def chain(self, tokens, C):
        """Chunks of C positions, one after the other; C = 1 is the exact chain. -> x (B, T, C)"""
        B, T, width = tokens.x0.shape
        buffer, m, parts = Buffer(self.cfg), tokens.x0.new_zeros(B, 1, width), []
        tokens = tokens._replace(pos=None)      # a chunk is the newest positions
        for start in range(0, T, C):
            x, states = self.run(tokens.at(slice(start, start + C)), m, buffer)
            m = states[:, -1:]
            parts.append(x)
        return torch.cat(parts, 1) + 0 * m      # no pass reads the last m; DDP wants its gradient

    def interleaved(self, tokens):
        """Algorithm 1. -> x of the subsets' passes, x of the first, m, all (B, T, C); the buffer."""
        T, buffer = tokens.x0.size(1), Buffer(self.cfg)
        S = min(self.cfg.subsets, T)
        first, m = self.run(tokens, None, buffer)
        x = first
        for s in range(S):
            subset, buffer.subset = slice(s, None, S), (s, S)
            previous = F.pad(m, (0, 0, 1, -1))[:, subset]           # m_{t-1} of its positions
            new_x, new_m = self.run(tokens.at(subset), previous, buffer)
            x = torch.slice_scatter(x, new_x, 1, s, None, S)
            m = torch.slice_scatter(m, new_m, 1, s, None, S)
        return x, first, m, buffer

    def decode(self, idx, cache, n_valid=None):
        """New tokens idx (B, T) after those of the cache. -> x (B, T, C)"""
        T, cfg = idx.size(1), self.cfg
        pos = cache.place(T, n_valid)           # raises where they do not fit, before any is written
        tokens = self.tokens(idx, pos)
        if cfg.memory and T > 1 and cfg.prefill == "interleaved" and cache.longest == 0:
            return self.fill(tokens, cache)
        if not cache.ragged:
            tokens = tokens._replace(pos=None)
        parts, step = [], 1 if cfg.memory else T
        for t in range(0, T, step):
            if step < T:
                cache.place(1, None if n_valid is None else n_valid - t)
            x, m = self.run(tokens.at(slice(t, t + step)), cache.memory, cache)
            cache.advance(m)
            parts.append(x)
        return torch.cat(parts, 1)

    def fill(self, tokens, cache):
        """The interleaved path's keys, values and last memory into an empty cache. -> x (B, T, C)"""
        x, _, m, buffer = self.interleaved(tokens)
        for layer, (k, v) in enumerate(zip(buffer.k, buffer.v)):
            cache.append(layer, k, v)
        last = (cache.new - 1).clamp(min=0)
        cache.advance(m[torch.arange(len(m), device=m.device), last][:, None])
        return x

    def hidden(self, idx, cache=None, n_valid=None, path=None):
        """-> the last layer's output (B, T, C), and that of the interleaved path's first pass (else
        None). path None: train_path in training mode, else exact."""
        cfg, (B, T) = self.cfg, idx.shape
        path = path or (cfg.train_path if self.training else "exact")
        if cache is not None:
            return self.decode(idx, cache, n_valid), None
        self.check_context(T, "{} tokens are")
        if cfg.memory and path == "exact" and cfg.fast and not torch.is_grad_enabled():
            return self.decode(idx, self.init_cache(B, T)), None
        tokens = self.tokens(idx, torch.arange(T, device=idx.device)[None])
        if not cfg.memory:
            return self.run(tokens, None, None)[0], None
        if path == "interleaved":
            return self.interleaved(tokens)[:2]
        return self.chain(tokens, cfg.chunk if path == "chunked" else 1), None

    def predict(self, h, targets):
        """As in all models. In interleaved training the loss also counts the first pass: aux has
        "ce" of the positions computed again, and "ce_first"."""
        h, first = h
        logits, ce, aux = super().predict(h, targets)
        if targets is None or first is None:
            return logits, ce, aux
        S, ce_first = min(self.cfg.subsets, targets.size(1)), super().predict(first, targets)[1]
        return logits, (ce_first + S * ce) / (S + 1), {**aux, "ce_first": ce_first.detach()}

    def logits(self, h):
        """(..., C) -> SOFTCAP tanh(z / SOFTCAP), (..., vocab_size), without the padding."""
        z = super().logits(normed(h, self.cfg.norm_eps))[..., :self.cfg.vocab_size]
        return SOFTCAP * torch.tanh(z / SOFTCAP)

    @torch.no_grad()
    def estimate(self, idx, targets):
        """The cross-entropy as the training path computes it, without dropout: much faster than the
        exact chain's, with the same weights. None where they are the same."""
        if not self.cfg.memory or self.cfg.train_path == "exact":
            return None
        h, _ = self.hidden(idx, path=self.cfg.train_path)
        return cross_entropy(self.logits(h), targets)

    @property
    def context_limit(self):
        return self.cfg.block_size

    @property
    def context_kept(self):
        """How many tokens sample.py keeps of a full context: half, as an exact prefill is slow."""
        return (self.cfg.block_size + 1) // 2 if self.cfg.memory else self.cfg.block_size

    def init_cache(self, batch_size, max_len):
        """An empty cache for batch_size rows of up to max_len tokens, at most block_size."""
        self.check_context(max_len)
        w = self.wte.weight
        return MemoryCache(self.cfg, batch_size, max_len, w.device, compute_dtype(w), w.dtype)

    def flops_per_token(self):
        """Floating-point operations of one token's forward and backward pass in a sequence of
        block_size: 6 a weight of each matrix product, 12 C a visible key. Interleaved training does
        everything twice but the memory's projections, which the first pass does not need."""
        cfg, T = self.cfg, self.cfg.block_size
        passes = 1 + (cfg.memory and cfg.train_path == "interleaved")
        matrices = {name: p.numel() for name, p in self.named_parameters()
                    if p.dim() == 2 and name.startswith(("blocks.", "rec.", "head."))}
        of_memory = sum(n for name, n in matrices.items() if "rec." in name)
        windows = [min(cfg.window(layer) or T, T) for layer in range(cfg.n_layer)]
        keys = sum((w * (w + 1) / 2 + (T - w) * w) / T for w in windows)
        local = sum(matrices.values()) - of_memory
        return passes * (6.0 * local + 12.0 * cfg.n_embd * keys) + 6.0 * of_memory

    def param_groups(self, cfg):
        """The paper's optimizer (Appendix A) for optimizer=muon: Muon for the matrices, AdamW for
        the rest. The paper's rates are for 2^19 tokens a step and scaled to cfg's. None for another
        optimizer: the trainer's own rule."""
        if cfg.optimizer != "muon":
            return None
        tokens = cfg.batch_size * cfg.gradient_accumulation_steps * self.cfg.block_size
        batch, width = math.sqrt(tokens / 2 ** 19), (self.cfg.n_embd / 768) ** -0.5
        groups = {kind: [] for kind in ("matrix", *RATES)}
        for name, p in self.named_parameters():
            groups[kind_of(name, p)].append(p)
        adamw = [dict(kind="adamw", params=groups[kind], betas=betas, eps=1e-10, weight_decay=0.0,
                      lr=cfg.learning_rate * ratio * batch
                      * (width if kind in ("embedding", "head") else 1))
                 for kind, (ratio, betas) in RATES.items()]
        return [*adamw, dict(kind="muon", params=groups["matrix"],
                             lr=cfg.muon_learning_rate * batch, momentum=cfg.muon_momentum,
                             weight_decay=cfg.weight_decay * (12 / self.cfg.n_layer) ** 2)]


# AdamW's rate of each kind of parameter, in units of the head's (0.004 in the paper; embeddings
# 0.3, scalars 0.5, residual scales 0.005), and its betas. Gates take the head's: the paper counts
# them as scalars, but at 0.5 what opens a gate, a sum over all channels, would move by many units.
RATES = {"embedding": (75, (0.8, 0.95)), "head": (1, (0.8, 0.95)), "gate": (1, (0.8, 0.95)),
         "alpha": (1.25, (0.8, 0.95)), "beta": (125, (0.96, 0.95)), "scalar": (125, (0.8, 0.95))}


def kind_of(name, p):
    """The kind in RATES of a parameter, or "matrix"."""
    if name.startswith(("wte.", "values.")):
        return "embedding"
    if name in ("head.weight", "alpha", "beta"):
        return name.removesuffix(".weight")
    if p.dim() == 2:
        return "gate" if name.endswith(("w_gate.weight", "w_value.weight")) else "matrix"
    return "scalar"

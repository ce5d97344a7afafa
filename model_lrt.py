"""
LRT, the Latent Recurrent Transformer: the previous token's upper hidden state is a memory.

A Transformer's layer attends only to what the same layer computed for earlier tokens, though the
previous token has passed all layers. LRT keeps its residual stream after an upper layer, the
source, as the memory m_{t-1}, which all layers of token t read:

                 token t-1       token t
    layer 5          o           +-> o
    layer 4          o           +-> o
    layer 3          o -- m -----+-> o        source: 0.6 of the depth
    layer 2          o           +-> o
    layer 1          o           +-> o

    x <- alpha x + beta x0 + gamma m_{t-1},  u = RMSNorm(x)        (5)  m_{-1} = 0
    k_rec = Wk_rec m_{t-1},  v_rec = Wv_rec m_{t-1}                (2)
    g_loc, g_rec = 2 sigmoid(Wg u)                                 (3)  1 each at the start
    k = g_loc k_loc + g_rec k_rec,  v = g_loc v_loc + g_rec v_rec  (4)
    m_t = x after the source layer

(Numbers are the paper's.) alpha, beta, gamma are scalars of a layer, g_loc, g_rec of a layer and
KV head. All layers share Wk_rec, Wv_rec. The backbone (memory=false: no m, no gates) is nanochat's:

    x0 = RMSNorm(E[idx])                                no RMSNorm has a weight
    k_loc = Wk u,  v_loc = Wv u + 2 sigmoid(Wve u[:32]) E_l[idx]
    x <- x + Wo Attention(RoPE(RMSNorm(Wq u)), RoPE(RMSNorm(k)), v)
    x <- x + W_down relu(W_up RMSNorm(x))^2
    logits = 15 tanh(W_head RMSNorm(x) / 15)

m_0 -> m_1 -> ... is a chain over positions, T passes of one each (train_path=exact). Algorithm 1
(interleaved) trains with the work of two passes: the first one, over all positions with memory 0,
fills a buffer; N strided subsets are computed again, one after the other, and written back to it:

    N = 2:   first pass   0  1  2  3  4  5    without memory
             subset 0     0     2     4       2 reads m_1 of the first pass
             subset 1        1     3     5    3 reads m_2 of subset 0
    loss = (L_first + L_0 + ... + L_{N-1}) / (N + 1)               (6)  gradients flow through all

Departures: gates read u, not x; positions of a subset attend to each other's new keys (Algorithm 1
writes back later); a subset's loss weighs as many targets as it has; dropout. beta x0 is Appendix
A's. Our choices: g_loc scales E_l[idx] too; Wk_rec, Wv_rec start as Wk, Wv; windows are half a
sequence. Left out: other sources, memories, injections, backbones (Tables 1, 2, 6, 8).

Paper: Huang et al. 2026 (2605.26797), no code; backbone: github.com/karpathy/nanochat (98eed6d).
Shapes: B batch, T tokens, n of a pass, S keys, C width, H query heads, G KV heads, D head size.
"""
import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F

import kernels
from model_gpt import (BaseConfig, KVCache, LanguageModel, apply_rope, attend, attention_bias,
                       choice, cross_entropy, rope_tables, upcast)


@dataclass
class Config(BaseConfig):
    memory: bool = True     # the recurrence; false: the backbone, all else equal: the baseline
    train_path: str = choice("interleaved", "chunked", "exact")
    subsets: int = 2        # N of train_path=interleaved
    chunk: int = 64         # K of train_path=chunked: a chunk reads the last m of the one before
    prefill: str = choice("exact", "interleaved")  # how a prompt fills an empty cache
    source: int = 0         # source layer, from 1 (0: 0.6 of the depth)
    inject: str = choice("kv+residual", "kv", "residual")  # where m enters: (4), (5)
    projections: str = choice("shared", "layerwise")  # Wk_rec, Wv_rec: one pair, or one a layer
    pattern: str = "SSSL"   # layers' windows, tiled: S short, L all; the last layer is L
    swa: int = 0            # window of S layers, its own key counts too (0: block_size / 2 + 1)

    # options that change how a model is trained and prefilled, not what its weights mean
    RESUME_OVERRIDES = ("train_path", "subsets", "chunk", "prefill")

    def __post_init__(self):
        super().__post_init__()
        self.at_least(1, "subsets", "chunk")
        self.at_least(0, "swa")
        if not self.pattern or set(self.pattern) - {"S", "L"}:
            raise ValueError(f"pattern={self.pattern} must be made of S and L")
        largest = kernels.HEAD_SIZES[-1]
        if self.head_dim % 2 or self.head_dim > largest:
            raise ValueError(f"n_embd / n_head = {self.head_dim} must be even, at most {largest}")
        self.source = self.source or max(1, round(0.6 * self.n_layer))
        if not 1 <= self.source <= self.n_layer:
            raise ValueError(f"source={self.source} must be from 1 to n_layer={self.n_layer}")
        self.swa = self.swa or self.block_size // 2 + 1     # nanochat's w counts earlier keys
        if not self.memory:
            self.train_path = "exact"   # all paths are the same

    def injects(self, where):
        """Whether the memory enters "kv" or "residual"."""
        return self.memory and where in self.inject

    def window(self, layer):
        """How many keys a query of this layer attends to, its own included; 0: all."""
        short = self.pattern[layer % len(self.pattern)] == "S" and layer < self.n_layer - 1
        return self.swa if short and self.swa < self.block_size else 0


# ---- the method: layers that read the memory, the chain, Algorithm 1 ----

def norm(x, eps):
    """RMSNorm without a weight over the last dimension, in x's dtype."""
    return F.rms_norm(x, x.shape[-1:], eps=eps).to(x.dtype)


class MemoryProjection(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.n_kv_head, width = cfg.n_kv_head, cfg.n_kv_head * cfg.head_dim
        self.wk = nn.Linear(cfg.n_embd, width, bias=False)      # Wk_rec
        self.wv = nn.Linear(cfg.n_embd, width, bias=False)      # Wv_rec

    def forward(self, m):
        """m (B, n or 1, C) -> k_rec, v_rec (B, n or 1, G, D)."""
        return [w(m).unflatten(-1, (self.n_kv_head, -1)) for w in (self.wk, self.wv)]  # (2)


class Attention(nn.Module):
    """Causal self-attention whose keys and values also hold the memory."""

    def __init__(self, cfg, window):
        super().__init__()
        self.cfg, self.window = cfg, window
        C, D, H, G = cfg.n_embd, cfg.head_dim, cfg.n_head, cfg.n_kv_head
        layerwise = cfg.injects("kv") and cfg.projections == "layerwise"
        self.rec = MemoryProjection(cfg) if layerwise else None
        self.wq = nn.Linear(C, H * D, bias=False)
        self.wk = nn.Linear(C, G * D, bias=False)
        self.wv = nn.Linear(C, G * D, bias=False)
        self.wo = nn.Linear(H * D, C, bias=False)
        self.w_value = nn.Linear(min(32, C), G, bias=False)  # Wve
        if cfg.injects("kv"):
            self.w_gate = nn.Linear(C, 2 * G, bias=False)  # Wg

    def forward(self, u, layer, context):
        H, G, eps = self.cfg.n_head, self.cfg.n_kv_head, self.cfg.norm_eps
        q = self.wq(u).unflatten(-1, (H, -1))                   # (B, n, H, D)
        k = self.wk(u).unflatten(-1, (G, -1))                   # (B, n, G, D)
        v = self.wv(u).unflatten(-1, (G, -1))                   # (B, n, G, D)
        e = context.values[layer].to(v.dtype)                   # (B, n, G, D): E_l[idx]
        v = v + 2 * torch.sigmoid(self.w_value(u[..., :32]))[..., None] * e
        k, v = self.read(u, k, v, context.kv_rec[layer])
        q, k = apply_rope(norm(q, eps), *context.rope), apply_rope(norm(k, eps), *context.rope)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))        # (B, H or G, n, D)
        k, v = context.extend(layer, k, v)                      # (B, G, S, D)
        attention = attend_fast if self.cfg.fast else attend_naive
        y = attention(q, k, v, context.pos, self.window, context.last)  # (B, H, n, D)
        return self.wo(y.transpose(1, 2).flatten(2))            # (B, n, C)

    def read(self, u, k, v, kv_rec):
        """k and v (B, n, G, D) with k_rec and v_rec, by gates of u (B, n, C)."""
        g_loc, g_rec = (2 * torch.sigmoid(self.w_gate(u)))[..., None].chunk(2, 2)  # (3)
        k_rec, v_rec = kv_rec
        return g_loc * k + g_rec * k_rec, g_loc * v + g_rec * v_rec  # (4)


def attend_naive(q, k, v, pos, window, last):
    """q (B, H, n, D) at positions pos (B or 1, n) attend to k, v (B, G, S, D) at 0 .. S - 1.
    last, for attend_fast: q are the last n of the S positions, in all rows alike."""
    k_pos = torch.arange(k.size(2), device=q.device)
    return attend(q, k, v, attention_bias(pos, k_pos, window), fast=False)


class SquaredMLP(nn.Module):
    """W_down relu(W_up x)^2 (So et al. 2021)."""

    def __init__(self, cfg):
        super().__init__()
        self.w_up = nn.Linear(cfg.n_embd, 4 * cfg.n_embd, bias=False)
        self.w_down = nn.Linear(4 * cfg.n_embd, cfg.n_embd, bias=False)

    def forward(self, x):
        return self.w_down(F.relu(self.w_up(x)).square())


class Block(nn.Module):
    def __init__(self, cfg, window, attention=Attention):
        super().__init__()
        self.eps = cfg.norm_eps
        self.attn, self.mlp = attention(cfg, window), SquaredMLP(cfg)
        self.drop = nn.Dropout(cfg.dropout)

    def forward(self, x, layer, context):
        x = self.inject(x, layer, context)
        x = x + self.drop(self.attn(norm(x, self.eps), layer, context))  # (B, n, C)
        return x + self.drop(self.mlp(norm(x, self.eps)))

    def inject(self, x, layer, context):
        alpha, beta, gamma = context.scales[layer]
        return alpha * x + beta * context.x0 + gamma * context.m    # (5)


class Tokens(NamedTuple):
    """What a call knows of its tokens before the first layer."""
    x0: torch.Tensor        # (B, T, C)
    values: list            # of each layer, (B, T, G, D): E_l[idx]
    rope: list              # RoPE's cos and sin, (B or 1, T, 1, D / 2)
    pos: torch.Tensor       # (B or 1, T) positions


class Context:
    """A pass over the positions `at`, a slice of the tokens, which read the memory m
    (B, n or 1, C). buffer {layer: (k, v)}: keys and values of all positions so far.
    last: these are the last positions so far, in all rows alike."""

    def __init__(self, model, tokens, at, m, buffer, last=True):
        self.at, self.m, self.buffer, self.last = at, m, buffer, last
        self.x0, self.pos = tokens.x0[:, at], tokens.pos[:, at]
        self.values, self.rope = ([x[:, at] for x in xs] for xs in (tokens.values, tokens.rope))
        scales = model.alpha, model.beta, model.gamma
        self.scales = list(zip(*(x.unbind() for x in scales if x is not None)))  # of each layer
        shared = model.rec and model.rec(m)     # k_rec, v_rec: one pair, or (layerwise) one a layer
        self.kv_rec = [b.attn.rec(m) if b.attn.rec else shared for b in model.blocks]

    def extend(self, layer, k, v):
        """k, v (B, G, n, D) of this pass -> those of all positions so far, (B, G, S, D)."""
        old = self.buffer.get(layer)
        if old and self.at.step:                # a strided subset is written back
            k, v = (torch.slice_scatter(x, new, 2, self.at.start, None, self.at.step)
                    for x, new in zip(old, (k, v)))
        elif old:                               # a chunk comes after those before it
            k, v = (torch.cat([x, new], 2) for x, new in zip(old, (k, v)))
        self.buffer[layer] = k, v
        return k, v


def run(model, context):
    """One pass through all layers -> x after the last one and the positions' own m, (B, n, C)."""
    x = context.x0
    for layer, block in enumerate(model.blocks):
        x = block(x, layer, context)
        if layer + 1 == model.cfg.source:
            m = x
    return x, m


def chain(model, tokens, K):
    """Chunks of K positions, one after the other; K = 1: the exact chain. -> x (B, T, C)"""
    buffer, xs, m = {}, [], torch.zeros_like(tokens.x0[:, :1])     # m_{-1}
    for start in range(0, tokens.x0.size(1), K):
        at = slice(start, start + K)
        x, m = run(model, Context(model, tokens, at, m[:, -1:], buffer))
        xs.append(x)
    return torch.cat(xs, 1)


def interleaved(model, tokens):
    """Algorithm 1. -> x of the subsets, x of the first pass, m, (B, T, C) each; the buffer."""
    buffer, zero = {}, torch.zeros_like(tokens.x0[:, :1])           # m_{-1}
    N = min(model.cfg.subsets, tokens.x0.size(1))
    first, m = run(model, Context(model, tokens, slice(None), zero, buffer))
    x = first
    for s in range(N):
        at = slice(s, None, N)
        previous = torch.cat([zero, m[:, :-1]], 1)[:, at]           # m_{t-1} at each t
        context = Context(model, tokens, at, previous, buffer, last=False)
        new_x, new_m = run(model, context)                          # (B, ceil(T / N), C)
        x = torch.slice_scatter(x, new_x, 1, s, None, N)
        m = torch.slice_scatter(m, new_m, 1, s, None, N)
    return x, first, m, buffer


# ---- without a part of the memory (inject=...), and without all of it (memory=false) ----

class LocalAttention(Attention):
    """Keys and values are the local ones, without (2) to (4)."""

    def read(self, u, k, v, kv_rec):
        return k, v


class LocalBlock(Block):
    """The residual stream is the backbone's, without m in (5)."""

    def inject(self, x, layer, context):
        alpha, beta = context.scales[layer]
        return alpha * x + beta * context.x0


# ---- the fast path ----

def attend_fast(q, k, v, pos, window, last):
    """attend_naive without a mask: one new token attends to the last keys, and all positions at
    once (n = S) are causal; else the kernel compares positions, as the mask does."""
    n, S = q.size(2), k.size(2)
    if last and n == 1:         # `-window:` takes all where window is 0
        return attend(q, k[:, :, -window:], v[:, :, -window:], None, fast=True)
    if last and n == S and not window:
        return attend(q, k, v, None, fast=True)
    k_pos = torch.arange(S, device=q.device, dtype=torch.int32)
    return kernels.attend(q, k, v, pos.squeeze(0).int(), k_pos, window=window or None)[0]


# ---- decoding ----

class MemoryCache(KVCache):
    """A KVCache with the memory (B, 1, C) of each row's last token."""

    def __init__(self, cfg, batch_size, max_len, device, dtype, memory_dtype):
        super().__init__(cfg, batch_size, max_len, device, dtype)
        shape = batch_size, int(cfg.memory), cfg.n_embd     # the backbone's is empty: (B, 0, C)
        with torch.inference_mode(False):
            self.memory = torch.zeros(shape, device=device, dtype=memory_dtype)

    def nbytes(self):
        return super().nbytes() + self.memory.nbytes

    def reset(self, rows=None):
        super().reset(rows)
        self.memory[slice(None) if rows is None else rows] = 0

    def advance(self, slots, m):
        """Count the new tokens; m (B, 1, C) is the memory after each row's last one."""
        if self.memory.size(1):
            new = slots.n_new[:, None, None] > 0    # a row without new tokens keeps its own
            self.memory.copy_(m if slots.at is None else torch.where(new, m, self.memory))
        super().advance(slots)


class CachedContext(Context):
    """A pass whose keys and values go to slots of a cache."""

    def __init__(self, model, tokens, at, cache, slots):
        super().__init__(model, tokens, at, cache.memory, cache, last=slots.at is None)
        self.slots = slots

    def extend(self, layer, k, v):
        return self.buffer.write(layer, k, v, self.slots)


def decode(model, idx, cache, n_valid, path="exact"):
    """Tokens idx (B, T) after those of the cache, as a chain; path="interleaved": Algorithm 1 for
    those of an empty cache. -> x (B, T, C)"""
    T, memory, xs = idx.size(1), model.cfg.memory, []
    slots = cache.place(T, n_valid)             # of all, for RoPE; raises if they do not fit
    tokens = model.tokens(idx, slots.pos)
    if memory and path == "interleaved" and cache.longest == 0 and T > 1:
        return prefill(model, tokens, cache, slots)
    n = 1 if memory else T                      # tokens of a pass
    for t in range(0, T, n):
        slots = cache.place(n, None if n_valid is None else n_valid - t)
        x, m = run(model, CachedContext(model, tokens, slice(t, t + n), cache, slots))
        cache.advance(slots, m[:, -1:])
        xs.append(x)
    return torch.cat(xs, 1)


def prefill(model, tokens, cache, slots):
    """An empty cache gets keys, values and memory of Algorithm 1. -> x (B, T, C)"""
    x, _, m, buffer = interleaved(model, tokens)
    for layer, (k, v) in buffer.items():
        cache.write(layer, k, v, slots)
    last = (slots.n_new - 1).clamp(min=0)                   # of each row
    cache.advance(slots, m[torch.arange(len(m), device=m.device), last][:, None])
    return x


# ---- the model ----

class Head(nn.Linear):
    """15 tanh(W x / 15), without the padding of W: (..., C) -> (..., vocab_size)."""

    def __init__(self, cfg, V):
        super().__init__(cfg.n_embd, V, bias=False)
        self.vocab_size = cfg.vocab_size

    def forward(self, x):
        z = upcast(super().forward(x))[..., :self.vocab_size]
        return 15 * torch.tanh(z / 15)


class Model(LanguageModel):
    """LRT, or its backbone where memory is false."""
    runs_blocks_once = False
    # optimizer=muon: what is more than a matrix, embedding or scalar (common/optim.py)
    parameter_kinds = dict(rec="matrix", head="head", w_gate="gate", w_value="gate",
                           alpha="alpha", beta="beta")

    def __init__(self, cfg):
        nn.Module.__init__(self)    # nanochat's parts, not LanguageModel's
        self.cfg = cfg
        L, C, width = cfg.n_layer, cfg.n_embd, cfg.n_kv_head * cfg.head_dim
        V = 64 * math.ceil(cfg.vocab_size / 64)     # padded, for fast products
        self.wte = nn.Embedding(V, C)
        self.drop = nn.Dropout(cfg.dropout)
        self.values = nn.ModuleList(nn.Embedding(V, width) for _ in range(L))   # E_l
        block = Block if cfg.injects("residual") else LocalBlock
        attention = Attention if cfg.injects("kv") else LocalAttention
        self.blocks = nn.ModuleList(block(cfg, cfg.window(l), attention) for l in range(L))
        self.alpha = nn.Parameter(torch.ones(L))
        self.beta = nn.Parameter(torch.full((L,), 0.1))
        self.gamma = nn.Parameter(torch.full((L,), 0.1)) if cfg.injects("residual") else None
        shared = cfg.injects("kv") and cfg.projections == "shared"
        self.rec = MemoryProjection(cfg) if shared else None
        self.head = Head(cfg, V)
        self.init_weights()

    @torch.no_grad()
    def init_weights(self):
        """nanochat's: embedding N(0, 1), head N(0, 0.001); uniform with std 1 / sqrt(C) what reads
        the residual stream, and value embeddings; 0 what writes to it, and gates."""
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

    def tokens(self, idx, pos=None):
        """The Tokens idx (B, T) at positions pos (B or 1, T; None: 0 .. T - 1)."""
        cfg, T = self.cfg, idx.size(1)
        if T > cfg.block_size:
            raise ValueError(f"{T} tokens are more than block_size={cfg.block_size}")
        pos = torch.arange(T, device=idx.device)[None] if pos is None else pos
        x0 = self.drop(norm(self.wte(idx), cfg.norm_eps))           # (B, T, C)
        values = [table(idx).unflatten(-1, (cfg.n_kv_head, -1)) for table in self.values]
        rope = rope_tables(pos, cfg.n_embd // cfg.n_head, cfg.rope_theta, x0.dtype)
        return Tokens(x0, values, [table[:, :, None] for table in rope], pos)

    def forward(self, idx, targets=None, cache=None, n_valid=None):
        """As in all models. The loss of interleaved training (6) also counts the first pass: aux
        has "ce" of the recomputed positions, and "ce_first"."""
        cfg, N = self.cfg, min(self.cfg.subsets, idx.size(1))
        if cfg.train_path != "interleaved" or not self.training or cache is not None:
            return super().forward(idx, targets, cache, n_valid)
        x, first, *_ = interleaved(self, self.tokens(idx))
        logits = self.head(norm(x, cfg.norm_eps))   # (B, T, V)
        if targets is None:
            return logits, None, {}
        ce = cross_entropy(logits, targets)     # N ce = L_0 + ... + L_{N-1}
        ce_first = cross_entropy(self.head(norm(first, cfg.norm_eps)), targets)
        aux = {"ce": ce.detach(), "ce_first": ce_first.detach()}
        return logits, (ce_first + N * ce) / (N + 1), aux  # (6)

    def hidden(self, idx, cache=None, n_valid=None, path=None):
        """idx (B, T) -> RMSNorm(x) after the last layer, (B, T, C). path None: train_path in
        training mode, else exact."""
        cfg, T = self.cfg, idx.size(1)
        path = path or (cfg.train_path if self.training else "exact")
        if cache is not None:
            x = decode(self, idx, cache, n_valid, cfg.prefill)
        elif cfg.memory and cfg.fast and path == "exact" and not torch.is_grad_enabled():
            # the same chain, but keys and values are written in place, not concatenated
            x = decode(self, idx, self.init_cache(len(idx), T), None)
        elif path == "interleaved":
            x = interleaved(self, self.tokens(idx))[0]
        else:
            K = cfg.chunk if path == "chunked" else 1 if cfg.memory else T
            x = chain(self, self.tokens(idx), K)
        return norm(x, cfg.norm_eps)

    @torch.no_grad()
    def estimate(self, idx, targets):
        """The training path's cross-entropy, much faster than the exact one; None: it is exact."""
        if self.cfg.train_path == "exact":
            return None
        return cross_entropy(self.head(self.hidden(idx, path=self.cfg.train_path)), targets)

    @property
    def context_kept(self):
        """How many tokens sample.py keeps of a full context: half, as an exact prefill is slow."""
        return (self.cfg.block_size + 1) // 2 if self.cfg.memory else self.cfg.block_size

    def init_cache(self, batch_size, max_len):
        return MemoryCache(self.cfg, *self.cache_sizes(batch_size, max_len), self.wte.weight.dtype)

    def flops_per_token(self):
        """As in model_gpt; interleaved training does all but the memory's projections twice."""
        cfg, T = self.cfg, self.cfg.block_size
        passes = 2 if cfg.train_path == "interleaved" else 1
        matrices = {name: p.numel() for name, p in self.named_parameters()
                    if p.dim() == 2 and name.startswith(("blocks.", "rec.", "head."))}
        of_memory = sum(n for name, n in matrices.items() if "rec." in name)
        local = sum(matrices.values()) - of_memory
        windows = [min(cfg.window(l) or T, T) for l in range(cfg.n_layer)]
        keys = sum((w * (w + 1) / 2 + (T - w) * w) / T for w in windows)
        if cfg.train_path == "chunked":    # one memory for each chunk
            of_memory *= math.ceil(T / cfg.chunk) / T
        return passes * (6.0 * local + 12.0 * cfg.n_embd * keys) + 6.0 * of_memory

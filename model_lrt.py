"""
LRT, the Latent Recurrent Transformer: the previous token's upper hidden state is a memory.

A Transformer's layer attends only to what the same layer computed for earlier tokens, though
the previous token has passed all layers. LRT keeps its residual stream after an upper layer,
the source, as the memory m_{t-1}, which all layers of token t read:

                 token t-1       token t
    layer 5          o           +-> o
    layer 4          o           +-> o
    layer 3          o -- m -----+-> o        source: 0.6 of the depth
    layer 2          o           +-> o
    layer 1          o           +-> o
A layer; * marks the memory's lines. The rest is nanochat's backbone (memory=false, 98eed6d):
a layer has value embeddings VE_l and a window (pattern). "code:" means the authors' code.
    x <- alpha x + beta x0                           x0 = RMSNorm(E[idx]) enters layer 1
  * x <- x + gamma m_{t-1}                           (5)
    u = RMSNorm(x),  k = Wk u,  v = Wv u
  * k_rec = Wk_rec m_{t-1},  v_rec = Wv_rec m_{t-1}  (2)  one Wk_rec, Wv_rec for all layers
  * g_loc, g_rec = 2 sigmoid(Wg u)                   (3)  two gates a KV head, 1 at the start
  * k <- g_loc k + g_rec k_rec,  v likewise          (4)
    v <- v + 2 sigmoid(Wve u[:32]) VE_l[idx]
    x <- x + Wo Attention(RoPE(RMSNorm(Wq u)), RoPE(RMSNorm(k)), v)
    x <- x + W_down relu(W_up RMSNorm(x))^2

m_t is x after the source layer, or its RMSNorm (source_norm: in deep models; code: RMSNorm after
the last layer); m_{-1} = 0. logits = 15 tanh(W_head RMSNorm(x) / 15). No RMSNorm has a weight.
alpha, beta, gamma are scalars of a layer and start at 1, 0.1, 0.1. Numbers are the paper's.

m_0 -> m_1 -> ... is a chain over positions: T passes of one each. Evaluation and decoding run it
(code: samples without m); training can (train_path=exact), slowly. Algorithm 1 (interleaved) does
two passes' work. The first, over all positions with memory 0, fills a buffer of keys, values, m.
Then N strided subsets run again, one by one: in each layer a subset replaces its keys and values,
then attends; after the last layer it replaces its m. N = 2:

    first pass  0 1 2 3 4 5
    subset 0    0   2   4     4 reads m_3 and attends to 1 3 of the first pass, 0 2 4 of subset 0
    subset 1      1   3   5   3 reads m_2 and attends to 0 2 of subset 0, 1 3 of subset 1
    loss = (L_first + L_0 + ... + L_{N-1}) / (N + 1)      (6)  gradients flow through all

A token of subset s has s + 1 links of the chain behind it: N = T is the chain. chunked
(Appendix D) is a chain of chunks: its K positions read the last m before the chunk.
Left out (Tables 1, 2, 6, 8): means of several m, memory for k or v alone, other backbones.
Departures: at their lines; norm_eps (code: 1.2e-7); dropout, on x0 and branches. Paper: Huang et
al. 2026 (2605.26797), code: github.com/OoDBag/Latent_recurrent_transformer (e0d0f6e).
Shapes: B batch, T tokens, n of a pass, S keys, C width, H query heads, G KV heads, D head size.
"""
import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F

import graphs
import kernels
from decoding import KVCache
from model_gpt import (BaseConfig, LanguageModel, apply_rope, attend, attention_bias,
                       choice, cross_entropy, rope_tables, upcast, visible_keys)


@dataclass
class Config(BaseConfig):
    memory: bool = True     # false: the backbone, all else equal: the baseline
    train_path: str = choice("auto", "interleaved", "chunked", "exact")  # auto: by memory, source
    subsets: int = 2        # N of train_path=interleaved
    chunk: int = 64         # K of train_path=chunked
    prefill: str = choice("exact", "interleaved")  # how a prompt fills an empty cache
    source: int = -1        # m is x after this layer, from 1 (-1: 0.6 of the depth; 0: m is x0)
    source_norm: bool = None  # m is RMSNorm(x) (left out: if n_layer > 10)
    inject: str = choice("kv+residual", "kv", "residual")  # where m enters: (4), (5)
    projections: str = choice("shared", "layerwise")  # Wk_rec, Wv_rec: one pair, or one a layer
    pattern: str = "SSSL"   # layers' windows, tiled: S short, L all; the last layer is L
    swa: int = 0            # keys of S layers, own one included (0: block_size / 2 + 1)

    # keys that change how a model is trained and prefilled, not what its weights mean
    NOT_IN_WEIGHTS = ("train_path", "subsets", "chunk", "prefill")

    def __post_init__(self):
        super().__post_init__()
        if self.source == -1:
            self.source = max(1, round(0.6 * self.n_layer))
        # At the start blocks add nothing: m_t = (1 + 0.1 source) x0_t + 0.1 source m_{t-1}, which
        # overflows in some hundred tokens if 0.1 source > 1. The default takes the largest source.
        if self.source_norm is None:
            self.source_norm = 0.1 * self.n_layer > 1
        # (nanochat's half of the context does not count the token itself)
        self.swa = self.swa or self.block_size // 2 + 1
        self.into_kv = self.memory and "kv" in self.inject  # (4)
        self.into_residual = self.memory and "residual" in self.inject  # (5)
        self.recurrent = self.memory and self.source > 0    # m_t depends on m_{t-1}
        auto = "interleaved" if self.recurrent else "exact"  # without a chain one pass is exact
        self.train_path_used = auto if self.train_path == "auto" else self.train_path
        check(self)

    def window_of(self, layer):
        """How many keys a query of this layer attends to, its own included; 0: all."""
        short = self.pattern[layer % len(self.pattern)] == "S" and layer < self.n_layer - 1
        return self.swa if short and self.swa < self.block_size else 0


# ---- the method: m enters keys and values; a pass; the chain; Algorithm 1 ----
# A pass's Context (below) holds what layers read. Their keys and values go to its `buffer`.

def chain(model, tokens, K):
    """Chunks of K positions, one after the other; K = 1: the exact chain (without gradients and
    with fast=true, decode computes that). -> x (B, T, C)"""
    buffer, xs, previous = {}, [], torch.zeros_like(tokens.x0[:, :1])   # m_{-1}
    for start in range(0, tokens.x0.size(1), K):
        chunk = tokens.at(slice(start, start + K))
        x, m = run(model, Context(model, chunk, previous, buffer))
        xs.append(x)
        previous = m[:, -1:]  # which all positions of the next chunk read
    return torch.cat(xs, 1)


def interleaved(model, tokens):
    """Algorithm 1. -> x of the subsets, x of the first pass, m, (B, T, C) each; the buffer."""
    N, T, buffer = model.cfg.subsets, tokens.x0.size(1), {}
    zero = torch.zeros_like(tokens.x0[:, :1])  # m_{-1}
    first, m = run(model, Context(model, tokens, zero, buffer))
    x = first   # all T are replaced
    for s in range(min(N, T)):
        subset = slice(s, T, N)
        previous = shifted(m, zero)[:, subset]
        new_x, new_m = run(model, Context(model, tokens.at(subset), previous, buffer, subset))
        x = torch.slice_scatter(x, new_x, 1, s, T, N)
        m = torch.slice_scatter(m, new_m, 1, s, T, N)
    return x, first, m, buffer


def shifted(m, before):
    """m_t of consecutive tokens (B, n, C) -> m_{t-1}; before (B, 1, C): of the token before."""
    return torch.cat([before, m[:, :-1]], 1)


def one_pass(model, tokens):
    """All positions at once, which is exact without a chain (source=0, memory=false). -> x"""
    m = shifted(tokens.x0, torch.zeros_like(tokens.x0[:, :1]))
    return run(model, Context(model, tokens, m, {}))[0]


def run(model, context):
    """One pass -> x after the last layer, and the positions' own m_t (B, n, C)."""
    cfg, x, m = model.cfg, context.x0, context.x0   # m stays that if source=0
    for layer, block in enumerate(model.blocks):
        x = block(x, layer, context)  # reads m_{t-1}
        if layer + 1 == cfg.source:
            m = norm(x, cfg.norm_eps) if cfg.source_norm else x
    return x, m


# ---- the layers: nanochat's, with the memory where `inject` has it ----

class Block(nn.Module):
    def __init__(self, cfg, layer):
        super().__init__()
        self.cfg = cfg
        self.attn, self.mlp = Attention(cfg, layer), SquaredMLP(cfg)
        self.drop = nn.Dropout(cfg.dropout)

    def forward(self, x, layer, context):
        eps = self.cfg.norm_eps
        x = context.alpha[layer] * x + context.beta[layer] * context.x0
        if context.gamma:
            x = x + context.gamma[layer] * context.previous  # (5)
        x = x + self.drop(self.attn(norm(x, eps), layer, context))  # (B, n, C)
        return x + self.drop(self.mlp(norm(x, eps)))


class Attention(nn.Module):
    """Causal self-attention with value embeddings."""

    def __init__(self, cfg, layer):
        super().__init__()
        self.cfg, self.window = cfg, cfg.window_of(layer)
        C, D, H, G = cfg.n_embd, cfg.head_dim, cfg.n_head, cfg.n_kv_head
        self.wq = nn.Linear(C, H * D, bias=False)
        self.wk = nn.Linear(C, G * D, bias=False)
        self.wv = nn.Linear(C, G * D, bias=False)
        self.wo = nn.Linear(H * D, C, bias=False)
        self.w_value = nn.Linear(min(32, C), G, bias=False)     # Wve, a gate
        self.w_gate = nn.Linear(C, 2 * G, bias=False) if cfg.into_kv else None  # Wg
        layerwise = cfg.into_kv and cfg.projections == "layerwise"
        self.rec = MemoryProjection(cfg) if layerwise else None     # None: model.rec

    def forward(self, u, layer, context):
        """u (B, n, C), normed, of the positions of a pass. context: see Context."""
        D, eps = self.cfg.head_dim, self.cfg.norm_eps
        q, k, v = (w(u).unflatten(-1, (-1, D)) for w in (self.wq, self.wk, self.wv))
        if self.w_gate:  # (gates read u; paper: x; code: u[:32])
            k_rec, v_rec = self.rec(context.previous) if self.rec else context.kv_rec
            k, v = mix_memory(k, v, self.w_gate(u), k_rec, v_rec)  # (B, n, G, D)
        g_ve = 2 * torch.sigmoid(self.w_value(u[..., :32]))     # (B, n, G)
        v = v + g_ve[..., None] * context.ve[layer].to(v.dtype)  # after (4): code's
        q, k = (apply_rope(norm(x, eps), *context.rope) for x in (q, k))
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))        # (B, H or G, n, D)
        k, v = context.extend(layer, k, v)                      # (B, G, S, D)
        if self.cfg.fast:
            y = attend_fast(q, k, v, context, self.window)
        else:
            k_pos = torch.arange(k.size(2), device=k.device)
            y = attend(q, k, v, attention_bias(context.pos, k_pos, self.window), fast=False)
        return self.wo(y.transpose(1, 2).flatten(2))            # (B, n, C)


def mix_memory(k, v, wg_u, k_rec, v_rec):
    """A layer's keys and values (B, n, G, D) with the memory's. wg_u: Wg u (B, n, 2 G)."""
    g_loc, g_rec = (2 * torch.sigmoid(wg_u)[..., None]).chunk(2, dim=2)  # (3), (B, n, G, 1)
    return g_loc * k + g_rec * k_rec, g_loc * v + g_rec * v_rec  # (4)


class MemoryProjection(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.D, width = cfg.head_dim, cfg.n_kv_head * cfg.head_dim
        self.wk = nn.Linear(cfg.n_embd, width, bias=False)  # Wk_rec
        self.wv = nn.Linear(cfg.n_embd, width, bias=False)  # Wv_rec

    def forward(self, previous):
        """m_{t-1} (B, n or 1, C) -> k_rec, v_rec (B, n or 1, G, D)."""
        return [w(previous).unflatten(-1, (-1, self.D)) for w in (self.wk, self.wv)]   # (2)


class SquaredMLP(nn.Module):
    """W_down relu(W_up x)^2 (So et al. 2021)."""

    def __init__(self, cfg):
        super().__init__()
        self.w_up = nn.Linear(cfg.n_embd, 4 * cfg.n_embd, bias=False)
        self.w_down = nn.Linear(4 * cfg.n_embd, cfg.n_embd, bias=False)

    def forward(self, x):
        return self.w_down(F.relu(self.w_up(x)).square())


def norm(x, eps):
    """RMSNorm without a weight, in x's dtype (autocast would widen it)."""
    return F.rms_norm(x, x.shape[-1:], eps=eps).to(x.dtype)


# ---- what a pass knows ----

class Tokens(NamedTuple):
    """What is known of tokens before the first layer."""
    x0: torch.Tensor        # (B, T, C)
    ve: list                # of each layer: value embeddings VE_l[idx], (B, T, G, D)
    rope: list              # RoPE's cos and sin, (B or 1, T, 1, D / 2)
    pos: torch.Tensor       # (B or 1, T) positions

    def at(self, part):
        """Those of a slice of the T."""
        ve, rope = ([x[:, part] for x in xs] for xs in (self.ve, self.rope))
        return Tokens(self.x0[:, part], ve, rope, self.pos[:, part])


class Context:
    """What the layers of a pass over n positions read:
    x0, ve, rope, pos      the positions' Tokens
    previous               their m_{t-1}, (B, n, C); (B, 1, C): the same for all
    kv_rec                 of projections=shared: k_rec, v_rec, (B, n or 1, G, D)
    alpha, beta, gamma     of each layer
    buffer {layer: (k, v)} keys and values of all positions so far
    subset                 of Algorithm 1: the slice of all positions that these are
    at_end                 whether these are the last n positions so far, in all rows"""

    def __init__(self, model, tokens, previous, buffer, subset=None):
        self.x0, self.ve, self.rope, self.pos = tokens
        self.previous, self.buffer, self.subset = previous, buffer, subset
        self.at_end = subset is None
        # unbind: one backward pass for all layers
        self.alpha, self.beta = model.alpha.unbind(), model.beta.unbind()
        self.gamma = model.gamma.unbind() if model.cfg.into_residual else None
        self.kv_rec = model.rec(previous) if model.rec else None

    def extend(self, layer, k, v):
        """k, v (B, G, n, D) of this pass -> those of all positions so far, (B, G, S, D)."""
        old = self.buffer.get(layer)  # nothing: the first pass or chunk
        if self.subset is not None:  # replaces its positions'
            span = self.subset.start, self.subset.stop, self.subset.step
            k, v = (torch.slice_scatter(x, new, 2, *span) for x, new in zip(old, (k, v)))
        elif old:  # a chunk comes after those before it
            k, v = (torch.cat([x, new], 2) for x, new in zip(old, (k, v)))
        self.buffer[layer] = k, v
        return k, v


# ---- the fast path ----

def attend_fast(q, k, v, context, window):
    """What Attention's naive branch computes, without a mask of n x S."""
    n, S = q.size(2), k.size(2)
    if context.at_end and n == 1:  # the last keys; `-window:` takes all where window is 0
        return attend(q, k[:, :, -window:], v[:, :, -window:], None, fast=True)
    if context.at_end and n == S and not window:  # causal
        return attend(q, k, v, None, fast=True)
    # subsets, chunks, windows, ragged rows: the kernel compares positions, as the mask does
    q_pos = context.pos.squeeze(0).int()  # (B, n), or (n,) of all rows
    k_pos = torch.arange(S, device=q.device, dtype=torch.int32)
    return kernels.attend_by_position(q, k, v, q_pos, k_pos, window=window or None)[0]  # (y, lse)


# ---- decoding ----

def decode(model, idx, cache, n_valid):
    """Tokens idx (B, T) after those of the cache, exactly: one after the other, or in one pass
    if m_t does not depend on m_{t-1}. -> x (B, T, C)"""
    T = idx.size(1)
    if T == 1 or not model.cfg.recurrent:
        return decode_pass(model, idx, cache, n_valid)
    cache.place(T, n_valid)     # raises if they are too many, before any is written
    step = graphs.stepper(lambda idx, n_valid: [decode_pass(model, idx, cache, n_valid)], cache)
    xs = [step(idx[:, t:t + 1], None if n_valid is None else n_valid - t)[0] for t in range(T)]
    return torch.cat(xs, 1)


def decode_pass(model, idx, cache, n_valid):
    slots = cache.place(idx.size(1), n_valid)
    tokens = model.embed(idx, slots.pos)
    # the first reads cache.m; there are more only where m_t is x0_t (source=0), or no m
    previous = shifted(tokens.x0, cache.m) if model.cfg.memory else None
    x, m = run(model, CachedContext(model, tokens, previous, cache, slots))
    if model.cfg.memory:
        cache.keep(m, slots)
    cache.advance(slots)
    return x


def prefill_interleaved(model, idx, cache, n_valid):
    """Tokens idx (B, T) by Algorithm 1 into an empty cache. -> x (B, T, C)"""
    slots = cache.place(idx.size(1), n_valid)
    x, _, m, buffer = interleaved(model, model.embed(idx, slots.pos))
    for layer, (k, v) in buffer.items():
        cache.write(layer, k, v, slots)
    cache.keep(m, slots)
    cache.advance(slots)
    return x


class CachedContext(Context):
    """A pass whose keys and values go to slots of a cache."""

    def __init__(self, model, tokens, previous, cache, slots):
        super().__init__(model, tokens, previous, buffer=None)
        self.cache, self.slots = cache, slots
        self.at_end = slots.at is None  # else rows are ragged

    def extend(self, layer, k, v):
        return self.cache.write(layer, k, v, self.slots)


class MemoryCache(KVCache):
    """A KVCache with m (B, 1, C), of each row's last token, in the residual stream's dtype."""

    def __init__(self, cfg, batch_size, max_len, device, dtype, m_dtype):
        super().__init__(cfg, batch_size, max_len, device, dtype)
        with torch.inference_mode(False):   # as KVCache
            self.m = torch.zeros(batch_size, 1, cfg.n_embd, device=device, dtype=m_dtype)

    def buffers(self):  # what KVCache resets and measures
        return super().buffers() + [self.m]

    def keep(self, m, slots):
        """Of the new tokens' memories m (B, n, C) each row's last one."""
        n_new = slots.n_new[:, None, None]
        last = m.take_along_dim((n_new - 1).clamp(min=0), 1)        # (B, 1, C)
        self.m.copy_(torch.where(n_new > 0, last, self.m))  # a row without any keeps its own


# ---- the model ----

class Model(LanguageModel):
    """LRT, or its backbone where memory is false."""
    runs_blocks_once = False    # so FSDP gathers all of them at once
    # what optimizer=muon cannot tell by a parameter's place and shape: rec is outside of the
    # blocks, the head no embedding; AdamW trains gates (code: Muon); alpha and beta have rates
    # of their own
    parameter_kinds = dict(rec="matrix", head="head", w_gate="gate", w_value="gate",
                           alpha="alpha", beta="beta")

    def __init__(self, cfg):
        nn.Module.__init__(self)    # nanochat's parts, not LanguageModel's
        self.cfg = cfg
        L, C, G, D = cfg.n_layer, cfg.n_embd, cfg.n_kv_head, cfg.head_dim
        V = 64 * math.ceil(cfg.vocab_size / 64)     # padded, for the head's product
        self.wte = nn.Embedding(V, C)
        self.drop = nn.Dropout(cfg.dropout)
        self.values = nn.ModuleList(nn.Embedding(V, G * D) for _ in range(L))   # VE_l
        self.blocks = nn.ModuleList(Block(cfg, layer) for layer in range(L))
        self.alpha = nn.Parameter(torch.ones(L))
        self.beta = nn.Parameter(torch.full((L,), 0.1))
        self.gamma = nn.Parameter(torch.full((L,), 0.1)) if cfg.into_residual else None
        shared = cfg.into_kv and cfg.projections == "shared"
        self.rec = MemoryProjection(cfg) if shared else None
        self.head = Head(cfg, V)
        self.init_weights()

    @torch.no_grad()
    def init_weights(self):
        """nanochat's: gates and what writes to the residual stream start at 0, uniform weights
        have std 1 / sqrt(C), those of Wk_rec and Wv_rec too, by our choice."""
        limit = math.sqrt(3 / self.cfg.n_embd)
        for name, p in self.named_parameters():
            if name == "wte.weight":
                p.normal_(0, 1)
            elif name == "head.weight":
                p.normal_(0, 0.001)
            elif name.endswith(("wo.weight", "w_down.weight", "w_gate.weight", "w_value.weight")):
                p.zero_()
            elif p.dim() == 2:
                p.uniform_(-limit, limit)

    def embed(self, idx, pos=None):
        """The Tokens idx (B, T) at positions pos (B or 1, T; None: 0 .. T - 1)."""
        cfg, T = self.cfg, idx.size(1)
        if pos is None and T > cfg.block_size:  # (a cache counts its tokens itself)
            raise ValueError(f"{T} tokens are more than block_size={cfg.block_size}")
        pos = torch.arange(T, device=idx.device)[None] if pos is None else pos
        x0 = self.drop(norm(self.wte(idx), cfg.norm_eps))           # (B, T, C)
        ve = [table(idx).unflatten(-1, (cfg.n_kv_head, -1)) for table in self.values]
        rope = rope_tables(pos, cfg.head_dim, cfg.rope_theta, x0.dtype)
        return Tokens(x0, ve, [table[:, :, None] for table in rope], pos)

    def forward(self, idx, targets=None, cache=None, n_valid=None):
        """As in all models. The loss of interleaved training (6) also counts the first pass: aux
        has "ce" of the recomputed positions, and "ce_first"."""
        cfg, N = self.cfg, self.cfg.subsets
        algorithm1 = self.training and cfg.train_path_used == "interleaved" and cache is None
        if not algorithm1 or targets is None or idx.numel() == 0:  # super refuses an empty idx
            return super().forward(idx, targets, cache, n_valid)
        x, first, *_ = interleaved(self, self.embed(idx))
        logits = self.head(norm(x, cfg.norm_eps))   # (B, T, V)
        # N ce = L_0 + ... + L_{N-1} if subsets have equally many targets (code: sum of means);
        # if N > T some are empty, the weight is still N
        ce = cross_entropy(logits, targets)
        ce_first = cross_entropy(self.head(norm(first, cfg.norm_eps)), targets)
        aux = {"ce": ce.detach(), "ce_first": ce_first.detach()}
        return logits, (ce_first + N * ce) / (N + 1), aux  # (6)

    def hidden(self, idx, path=None):
        """idx (B, T) -> RMSNorm(x) after the last layer, (B, T, C): exact in evaluation, by
        train_path in training (interleaved in forward, for its two losses), or by `path`."""
        cfg = self.cfg
        path = path or (cfg.train_path_used if self.training else "exact")
        if path == "interleaved":
            x, *_ = interleaved(self, self.embed(idx))
        elif not cfg.recurrent:
            x = one_pass(self, self.embed(idx))
        elif path == "exact" and cfg.fast and not torch.is_grad_enabled():
            # the chain, but keys and values are written in place, not concatenated
            x = decode(self, idx, self.init_cache(*idx.shape), None)
        else:
            x = chain(self, self.embed(idx), cfg.chunk if path == "chunked" else 1)
        return norm(x, cfg.norm_eps)

    def decode(self, idx, cache, n_valid=None):
        """As in all models: exact, but into an empty cache by cfg.prefill."""
        into_empty = cache.longest == 0 and self.cfg.prefill == "interleaved"
        function = prefill_interleaved if into_empty else decode
        return norm(function(self, idx, cache, n_valid), self.cfg.norm_eps)

    @torch.no_grad()
    def estimate(self, idx, targets):
        """The training path's cross-entropy, faster than the exact; None: it is exact."""
        if self.cfg.train_path_used == "exact":
            return None
        return cross_entropy(self.head(self.hidden(idx, self.cfg.train_path_used)), targets)

    @property
    def context_kept(self):
        """Tokens that sample.py keeps of a full context: half, as a prefill is slow."""
        return (self.cfg.block_size + 1) // 2 if self.cfg.recurrent else self.cfg.block_size

    def init_cache(self, batch_size, max_len):
        if not self.cfg.memory:
            return super().init_cache(batch_size, max_len)
        return MemoryCache(self.cfg, *self.cache_sizes(batch_size, max_len), self.wte.weight.dtype)

    def flops_per_token(self):
        """As in model_gpt; interleaved training does all twice but the memory's projections (the
        first pass projects one zero), chunked training does those once a chunk."""
        cfg, T = self.cfg, self.cfg.block_size
        memory = sum(p.numel() for name, p in self.named_parameters() if "rec." in name)
        if cfg.train_path_used == "chunked":
            memory *= math.ceil(T / cfg.chunk) / T
        backbone = self.head.weight.numel() + sum(
            p.numel() for name, p in self.blocks.named_parameters()
            if p.dim() == 2 and "rec." not in name)
        keys = sum(visible_keys(T, cfg.window_of(layer)) for layer in range(cfg.n_layer))
        attention = 12.0 * cfg.n_head * cfg.head_dim * keys
        passes = 2 if cfg.train_path_used == "interleaved" else 1
        return 6.0 * memory + passes * (6.0 * backbone + attention)


class Head(nn.Linear):
    """15 tanh(W x / 15), without the padding of W: (..., C) -> (..., vocab_size)."""

    def __init__(self, cfg, V):
        super().__init__(cfg.n_embd, V, bias=False)
        self.vocab_size = cfg.vocab_size

    def forward(self, x):
        return 15 * torch.tanh(upcast(super().forward(x))[..., :self.vocab_size] / 15)


# ---- checks ----

def check(cfg):
    """Raise ValueError, naming the field, where a value is impossible."""
    cfg.at_least(1, "subsets", "chunk")
    cfg.at_least(0, "swa")
    if not cfg.pattern or set(cfg.pattern) - {"S", "L"}:
        raise ValueError(f"pattern={cfg.pattern} must be made of S and L")
    if cfg.head_dim > kernels.HEAD_SIZES[-1]:  # fast=true may come later
        raise ValueError(f"head_dim={cfg.head_dim} must be at most {kernels.HEAD_SIZES[-1]}")
    if not 0 <= cfg.source <= cfg.n_layer:
        raise ValueError(f"source={cfg.source} must be from 0 to n_layer={cfg.n_layer}")
    for name, value in (("train_path", cfg.train_path_used), ("prefill", cfg.prefill)):
        if value != "exact" and not cfg.recurrent:
            raise ValueError(f"{name}={value} needs memory=true and a source that is not 0")

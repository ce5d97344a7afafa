"""
LRT, the Latent Recurrent Transformer: the previous token's upper hidden state is memory.

When token t is decoded, token t-1 has passed all layers, but a Transformer's layer attends only
to what the same layer computed for earlier tokens. LRT keeps the residual stream of token t-1
after one upper layer, the source, as a memory m_{t-1} that every layer of token t reads:

    x <- alpha x + beta x0 + gamma m_{t-1},  u = RMSNorm(x)  residual injection (Eq. 5)
    k = RoPE(RMSNorm(g_loc Wk u + g_rec Wk_rec m_{t-1}))     KV projection (Eq. 2 to 4)
    v = g_loc (Wv u + e) + g_rec Wv_rec m_{t-1}
    g_loc, g_rec = 2 sigmoid(Wg u)                           one each per KV head, 1 at the start
    m_t = x after the source layer,  m_{-1} = 0              alpha, beta, gamma: scalars of a layer

                 token t-1       token t
    layer 5          o           +-> o
    layer 4          o           +-> o
    layer 3          o -- m -----+-> o        source: 0.6 of the depth
    layer 2          o           +-> o
    layer 1          o           +-> o

Wk_rec and Wv_rec are shared by all layers. The backbone (memory=false) is nanochat's:

    x0 = RMSNorm(E[idx])                      no RMSNorm has weights
    q = RoPE(RMSNorm(Wq u))
    e = 2 sigmoid(Wve u[:32]) E_l[idx]        value embedding of layer l
    x <- x + Wo Attention(q, k, v)            k and v as above, with g_loc = 1, g_rec = 0
    x <- x + W_down relu(W_up RMSNorm(x))^2
    logits = 15 tanh(W_head RMSNorm(x) / 15)

m_0 -> m_1 -> ... is a chain over positions. Training has three paths:

exact: the chain, T passes of one position, as in evaluation and decoding.

interleaved (the default, Algorithm 1): a first pass over all positions, with memory 0, fills
a buffer: keys and values of all layers, and memories. Then each of N strided subsets is
computed again: its positions read m_{t-1} in the buffer, write their keys and values there,
attend to all of it, and write their m_t.

    N = 2:   first pass   0  1  2  3  4  5    without memory
             subset 0     0     2     4       2 reads m_1 of the first pass
             subset 1        1     3     5    3 reads m_2 of subset 0

loss = (L_first + L_0 + ... + L_{N-1}) / (N + 1); gradients flow through all passes and the
buffer. Twice a plain step's work; N = T is the exact chain.

chunked (Appendix D): chunks of K positions, one after the other. A whole chunk reads the last
m of the chunk before. K = 1 is the exact chain; K = T reads no m.

Our choices where the paper is silent: gates read u (Eq. 3: the layer's input x); e is scaled by
g_loc, too; a subset's positions attend to each other's new keys; Wk_rec, Wv_rec start as Wk, Wv;
windows of block_size / 2; inject=k leaves values ungated; a subset's loss is weighted by its
number of targets. Departures: gates learn at the head's rate (see RATES); Muon is torch's;
dropout, on embeddings and residual branches. Left out: averaged sources (Table 1), memories
other than m_{t-1} (Table 2), replaced keys (Table 6), other backbones (Table 8).

Paper: Huang et al. 2026 (2605.26797), without code; the backbone: github.com/karpathy/nanochat.

Shapes: B batch, T tokens, n positions of a pass, S keys, C width, H query heads, G key/value
heads, D head size. In code Wve is attn.w_value (a gate), and Wg attn.w_gate.
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

VALUE_CHANNELS = 32         # how many channels of u a value embedding's gate reads
SOFTCAP = 15.0              # logits are between -15 and 15


@dataclass
class Config(BaseConfig):
    memory: bool = True     # the recurrence; false: the backbone, all else equal: the baseline
    train_path: str = choice("interleaved", "chunked", "exact")
    subsets: int = 2        # N of train_path=interleaved
    chunk: int = 64         # K of train_path=chunked
    prefill: str = choice("exact", "interleaved")  # how a prompt fills an empty cache
    source: int = 0         # source layer, from 1 (0: 0.6 of the depth)
    inject: str = choice("kv+residual", "none", "k", "v", "kv", "residual")  # what m enters
    projections: str = choice("shared", "layerwise")  # Wk_rec, Wv_rec: one pair, or one a layer
    pattern: str = "SSSL"   # layers' windows, tiled: S short, L all; the last layer is L
    swa: int = 0            # how many earlier keys an S layer attends to (0: block_size / 2)

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
        self.memory = self.memory and self.inject != "none"
        self.swa = self.swa or max(1, self.block_size // 2)

    def injects(self, name):
        """Whether the memory enters name: "k", "v" or "residual"."""
        return self.memory and name in self.inject

    def window(self, layer):
        """How many keys a query of this layer attends to, its own included; 0: all."""
        short = self.pattern[layer % len(self.pattern)] == "S" and layer < self.n_layer - 1
        return self.swa + 1 if short and self.swa + 1 < self.block_size else 0


# ---- the method: layers that read the memory ----

class Tokens(NamedTuple):
    """Some positions of every row, and what all layers need to know of them."""
    x0: torch.Tensor        # (B, n, C) normed embeddings
    values: list            # of each layer, (B, G, n, D): E_l[idx]
    rope: list              # RoPE's cos and sin, (B or 1, 1, n, D)
    pos: torch.Tensor       # (B or 1, n) positions
    newest: bool            # whether they are the last positions so far in every row
    part: slice = slice(None)   # which of a call's tokens they are

    def at(self, part):
        """The tokens of a slice. A strided one is followed by others, so not the newest."""
        values, rope = ([x[:, :, part] for x in xs] for xs in (self.values, self.rope))
        newest = self.newest and part.step is None
        return Tokens(self.x0[:, part], values, rope, self.pos[:, part], newest, part)


def normed(x, eps):
    """RMSNorm without a weight over the last dimension, in x's dtype."""
    return F.rms_norm(x, x.shape[-1:], eps=eps).to(x.dtype)


def heads(x, D):
    """(B, n, heads D) -> (B, heads, n, D)"""
    return x.unflatten(-1, (-1, D)).transpose(1, 2)


def gate(z):
    """2 sigmoid(z): (B, n, heads) -> (B, heads, n, 1), to multiply what heads() gives."""
    return (2 * torch.sigmoid(z)).transpose(1, 2)[..., None]


def attend_naive(q, k, v, pos, window, newest):
    """q (B, H, n, D) at positions pos (B or 1, n); k, v (B, G, S, D) at 0 .. S - 1."""
    k_pos = torch.arange(k.size(2), device=q.device)
    wide = torch.promote_types(q.dtype, torch.float32)
    return attention_naive(q, k, v, attention_bias(pos, k_pos, window, dtype=wide))


class MemoryProjection(nn.Module):
    """Wk_rec and Wv_rec."""

    def __init__(self, cfg):
        super().__init__()
        self.head_dim, width = cfg.head_dim, cfg.n_kv_head * cfg.head_dim
        self.wk = nn.Linear(cfg.n_embd, width, bias=False) if cfg.injects("k") else None
        self.wv = nn.Linear(cfg.n_embd, width, bias=False) if cfg.injects("v") else None

    def forward(self, m):
        """m (B, n or 1, C) -> k_rec, v_rec (B, G, n or 1, D); None: it does not enter."""
        return [w and heads(w(m), self.head_dim) for w in (self.wk, self.wv)]


class Attention(nn.Module):
    """Causal self-attention whose keys and values also hold the memory."""

    def __init__(self, cfg, layer):
        super().__init__()
        C, D, H, G = cfg.n_embd, cfg.head_dim, cfg.n_head, cfg.n_kv_head
        self.cfg, self.layer, self.window = cfg, layer, cfg.window(layer)
        self.attend = attend_fast if cfg.fast else attend_naive
        self.into_k, self.into_v = cfg.injects("k"), cfg.injects("v")
        layerwise = cfg.memory and cfg.projections == "layerwise"
        self.rec = MemoryProjection(cfg) if layerwise else None
        self.wq = nn.Linear(C, H * D, bias=False)
        self.wk = nn.Linear(C, G * D, bias=False)
        self.wv = nn.Linear(C, G * D, bias=False)
        self.wo = nn.Linear(H * D, C, bias=False)
        self.w_value = nn.Linear(min(VALUE_CHANNELS, C), G, bias=False)  # Wve: the gate of e
        if self.into_k or self.into_v:
            self.w_gate = nn.Linear(C, 2 * G, bias=False)  # Wg

    def forward(self, u, tokens, rec, cache):
        """u (B, n, C), normed. rec: k_rec and v_rec. cache: keys and values of other positions;
        None: there are no others. -> (B, n, C)"""
        D, eps = self.cfg.head_dim, self.cfg.norm_eps
        q, k, v = (heads(w(u), D) for w in (self.wq, self.wk, self.wv))  # (B, H or G, n, D)
        e = tokens.values[self.layer].to(v.dtype)  # (B, G, n, D)
        v = v + gate(self.w_value(u[..., :VALUE_CHANNELS])) * e
        if self.into_k or self.into_v:
            g_loc, g_rec = gate(self.w_gate(u)).chunk(2, 1)  # (B, G, n, 1)
            k_rec, v_rec = rec
            k = g_loc * k + g_rec * k_rec if self.into_k else k
            v = g_loc * v + g_rec * v_rec if self.into_v else v
        q, k = (apply_rope(normed(x, eps), *tokens.rope) for x in (q, k))
        if cache is not None:
            k, v = cache.write(self.layer, k, v, tokens.part)  # (B, G, S, D)
        y = self.attend(q, k, v, tokens.pos, self.window, tokens.newest)  # (B, H, n, D)
        return self.wo(y.transpose(1, 2).flatten(2))


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


# ---- the fast path ----

def attend_fast(q, k, v, pos, window, newest):
    """attend_naive without a mask: one new token attends to the last keys, and all positions at
    once (n = S) are causal; else the kernel compares positions, as the mask does."""
    n, S = q.size(2), k.size(2)
    if newest and n == 1:  # `-window:` takes all where window is 0
        return attention_fast(q, k[:, :, -window:], v[:, :, -window:], None)
    if newest and n == S and not window:
        return attention_fast(q, k, v, None)
    k_pos = torch.arange(S, device=q.device, dtype=torch.int32)
    return kernels.attend(q, k, v, pos.squeeze(0).int(), k_pos, window=window or None)[0]


# ---- caches: write(layer, k, v, part) returns the keys and values of all positions so far ----

class Buffer:
    """Of training: gradients flow through it. Chunks are appended, strided subsets replace."""

    def __init__(self, n_layer):
        self.kv = [None] * n_layer

    def write(self, layer, k, v, part):
        """k, v (B, G, n, D) of a slice -> those of positions 0 .. S - 1, (B, G, S, D)."""
        old = self.kv[layer]
        if old is not None and part.step is None:
            k, v = (torch.cat([x, new], 2) for x, new in zip(old, (k, v)))
        elif old is not None:
            k, v = (torch.slice_scatter(x, new, 2, part.start, None, part.step)
                    for x, new in zip(old, (k, v)))
        self.kv[layer] = k, v
        return k, v


class MemoryCache(KVCache):
    """A KVCache for decoding, with the memory (B, 1, C) of each row's last token."""

    def __init__(self, cfg, batch_size, max_len, device, dtype, memory_dtype):
        super().__init__(cfg, batch_size, max_len, device, dtype)
        shape = batch_size, int(cfg.memory), cfg.n_embd  # the backbone's is empty: (B, 0, C)
        with torch.inference_mode(False):
            self.memory = torch.zeros(shape, device=device, dtype=memory_dtype)

    def nbytes(self):
        return super().nbytes() + self.memory.nbytes

    def reset(self, rows=None):
        super().reset(rows)
        self.memory[slice(None) if rows is None else rows] = 0

    def write(self, layer, k, v, part=None):
        return [x.to(k.dtype) for x in super().write(layer, k, v)]

    def advance(self, m):
        """Count the placed tokens; m (B, 1, C) is the memory after each row's last one."""
        if self.memory.size(1):  # else the backbone; a row without new tokens keeps its own
            new = self.new[:, None, None] > 0
            self.memory.copy_(torch.where(new, m, self.memory) if self.ragged else m)
        super().advance()


# ---- the model ----

class Model(LanguageModel):
    """LRT, or its backbone where memory is false."""
    runs_blocks_once = False

    def __init__(self, cfg):
        nn.Module.__init__(self)     # parts of its own, in another order
        self.cfg = cfg
        L, C, width = cfg.n_layer, cfg.n_embd, cfg.n_kv_head * cfg.head_dim
        V = 64 * math.ceil(cfg.vocab_size / 64)  # padded, for fast products
        self.wte = nn.Embedding(V, C)
        self.drop = nn.Dropout(cfg.dropout)
        self.values = nn.ModuleList(nn.Embedding(V, width) for _ in range(L))  # E_l
        self.blocks = nn.ModuleList(Block(cfg, l) for l in range(L))
        self.alpha = nn.Parameter(torch.ones(L))
        self.beta = nn.Parameter(torch.full((L,), 0.1))
        self.gamma = nn.Parameter(torch.full((L,), 0.1)) if cfg.injects("residual") else None
        shared = cfg.memory and cfg.projections == "shared"
        self.rec = MemoryProjection(cfg) if shared else None
        self.head = nn.Linear(C, V, bias=False)
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

    def tokens(self, idx, pos, newest=True):
        """The Tokens idx (B, n) at positions pos (B or 1, n)."""
        D = self.cfg.head_dim
        x0 = self.drop(normed(self.wte(idx), self.cfg.norm_eps))  # (B, n, C)
        values = [heads(table(idx), D) for table in self.values]  # (B, G, n, D)
        tables = rope_tables(pos, D, self.cfg.rope_theta, x0.dtype)  # (B or 1, n, D)
        return Tokens(x0, values, [x[:, None] for x in tables], pos, newest)

    def run(self, tokens, m, cache):
        """One pass: these tokens through all layers. m (B, n or 1, C): the memory that each reads,
        or one for all. -> x after the last layer and the tokens' own m, (B, n, C) both"""
        alpha, beta, x = self.alpha.unbind(), self.beta.unbind(), tokens.x0
        rec = self.rec and self.rec(m)
        for l, block in enumerate(self.blocks):
            x = alpha[l] * x + beta[l] * tokens.x0
            if self.gamma is not None:
                x = x + self.gamma[l] * m
            x = block(x, tokens, block.attn.rec(m) if block.attn.rec else rec, cache)
            if l + 1 == self.cfg.source:
                new_m = x
        return x, new_m

    def chain(self, tokens, K):
        """Chunks of K positions, one after the other; K = 1 is the exact chain. -> x (B, T, C)"""
        buffer, parts = Buffer(self.cfg.n_layer), []
        m = torch.zeros_like(tokens.x0[:, :1])  # m_{-1}
        for start in range(0, tokens.x0.size(1), K):
            x, m = self.run(tokens.at(slice(start, start + K)), m[:, -1:], buffer)
            parts.append(x)
        return torch.cat(parts, 1)

    def interleaved(self, tokens):
        """Algorithm 1. -> x recomputed, x of the first pass, m, each (B, T, C); the buffer."""
        buffer = Buffer(self.cfg.n_layer)
        N = min(self.cfg.subsets, tokens.x0.size(1))
        zero = torch.zeros_like(tokens.x0[:, :1])
        first, m = self.run(tokens._replace(newest=True), zero, buffer)
        x = first
        for s in range(N):
            subset = slice(s, None, N)
            previous = torch.cat([zero, m[:, :-1]], 1)[:, subset]  # m_{t-1} at each t
            new_x, new_m = self.run(tokens.at(subset), previous, buffer)  # (B, ceil(T / N), C)
            x = torch.slice_scatter(x, new_x, 1, s, None, N)
            m = torch.slice_scatter(m, new_m, 1, s, None, N)
        return x, first, m, buffer

    def decode(self, idx, cache, n_valid, prefill):
        """New tokens idx (B, T) after those of the cache: the exact chain, but for an empty cache
        with prefill="interleaved". -> x (B, T, C)"""
        cfg, T = self.cfg, idx.size(1)
        pos = cache.place(T, n_valid)  # of all, for RoPE, and raises if they do not fit
        tokens = self.tokens(idx, pos, newest=not cache.ragged)
        if cfg.memory and prefill == "interleaved" and cache.longest == 0 and T > 1:
            return self.prefill(tokens, cache)
        n = 1 if cfg.memory else T  # tokens of a pass
        parts = []
        for t in range(0, T, n):
            if n < T:  # the chain reserves a slot for each token again
                cache.place(n, None if n_valid is None else n_valid - t)
            x, m = self.run(tokens.at(slice(t, t + n)), cache.memory, cache)
            cache.advance(m[:, -1:])
            parts.append(x)
        return torch.cat(parts, 1)

    def prefill(self, tokens, cache):
        """An empty cache gets keys, values and memory of the interleaved path. -> x (B, T, C)"""
        x, _, m, buffer = self.interleaved(tokens)
        for layer, (k, v) in enumerate(buffer.kv):
            cache.write(layer, k, v)
        last = (cache.new - 1).clamp(min=0)  # of each row
        cache.advance(m[torch.arange(len(m), device=m.device), last][:, None])
        return x

    def hidden(self, idx, cache=None, n_valid=None, path=None):
        """-> x after the last layer (B, T, C), and that of the interleaved path's first pass, on
        other paths None. path None: train_path in training mode, else exact."""
        cfg, T = self.cfg, idx.size(1)
        path = path or (cfg.train_path if self.training else "exact")
        if cache is not None:
            return self.decode(idx, cache, n_valid, cfg.prefill), None
        self.check_context(T, "{} tokens are")
        if cfg.memory and cfg.fast and path == "exact" and not torch.is_grad_enabled():
            # the same chain, but keys and values are written in place, not concatenated
            return self.decode(idx, self.init_cache(len(idx), T), None, "exact"), None
        tokens = self.tokens(idx, torch.arange(T, device=idx.device)[None])
        if not cfg.memory:
            return self.run(tokens, None, None)[0], None
        if path == "interleaved":
            return self.interleaved(tokens)[:2]
        return self.chain(tokens, cfg.chunk if path == "chunked" else 1), None

    def predict(self, states, targets):
        """As in all models, from hidden()'s pair. In interleaved training the loss also counts the
        first pass: aux has "ce" of the recomputed positions, and "ce_first"."""
        h, first = states
        logits, ce, aux = super().predict(h, targets)
        if targets is None or first is None:
            return logits, ce, aux
        ce_first = super().predict(first, targets)[1]
        N = min(self.cfg.subsets, targets.size(1))  # N ce = L_0 + ... + L_{N-1}
        return logits, (ce_first + N * ce) / (N + 1), {**aux, "ce_first": ce_first.detach()}

    def logits(self, h):
        """(..., C) -> (..., vocab_size): without the padding."""
        z = super().logits(normed(h, self.cfg.norm_eps))[..., :self.cfg.vocab_size]
        return SOFTCAP * torch.tanh(z / SOFTCAP)

    @torch.no_grad()
    def estimate(self, idx, targets):
        """The training path's cross-entropy, much faster than the exact one; None: it is exact."""
        if not self.cfg.memory or self.cfg.train_path == "exact":
            return None
        h, _ = self.hidden(idx, path=self.cfg.train_path)
        return cross_entropy(self.logits(h), targets)

    @property
    def context_kept(self):
        """How many tokens sample.py keeps of a full context: half, as an exact prefill is slow."""
        return (self.cfg.block_size + 1) // 2 if self.cfg.memory else self.cfg.block_size

    def init_cache(self, batch_size, max_len):
        self.check_context(max_len)
        w = self.wte.weight
        return MemoryCache(self.cfg, batch_size, max_len, w.device, compute_dtype(w), w.dtype)

    def flops_per_token(self):
        """As in model_gpt; interleaved training does all but the memory's projections twice."""
        cfg, T = self.cfg, self.cfg.block_size
        passes = 1 + (cfg.memory and cfg.train_path == "interleaved")
        matrices = {name: p.numel() for name, p in self.named_parameters()
                    if p.dim() == 2 and name.startswith(("blocks.", "rec.", "head."))}
        of_memory = sum(n for name, n in matrices.items() if "rec." in name)
        local = sum(matrices.values()) - of_memory
        windows = [min(cfg.window(l) or T, T) for l in range(cfg.n_layer)]
        keys = sum((w * (w + 1) / 2 + (T - w) * w) / T for w in windows)
        if cfg.train_path == "chunked":    # one memory for each chunk
            of_memory *= math.ceil(T / cfg.chunk) / T
        return passes * (6.0 * local + 12.0 * cfg.n_embd * keys) + 6.0 * of_memory

    def param_groups(self, cfg):
        """The paper's groups (Appendix A) where the trainer's cfg says optimizer=muon, else None.
        Learning rates are for 2^19 tokens per step and scale with the root of their number."""
        if cfg.optimizer != "muon":
            return None
        step = cfg.batch_size * cfg.gradient_accumulation_steps * self.cfg.block_size  # tokens
        batch, width = math.sqrt(step / 2 ** 19), (self.cfg.n_embd / 768) ** -0.5
        params = {kind: [] for kind in ("matrix", *RATES)}
        for name, p in self.named_parameters():
            params[kind_of(name, p)].append(p)
        rate, scale = cfg.learning_rate * batch, dict(embedding=width, head=width)
        adamw = [dict(kind="adamw", params=params[kind], betas=(beta1, 0.95), eps=1e-10,
                      weight_decay=0.0, lr=rate * ratio * scale.get(kind, 1))
                 for kind, (ratio, beta1) in RATES.items()]
        return [*adamw, dict(kind="muon", params=params["matrix"],
                             lr=cfg.muon_learning_rate * batch, momentum=cfg.muon_momentum,
                             weight_decay=cfg.weight_decay * (12 / self.cfg.n_layer) ** 2)]


# AdamW's rate of each kind of parameter, in units of the head's 0.004, and its beta1. The paper
# counts gates as scalars; at a scalar's rate of 0.5, what opens a gate, a sum over all channels,
# would move by many units a step, so here they have the head's.
RATES = dict(embedding=(75, 0.8), head=(1, 0.8), gate=(1, 0.8), alpha=(1.25, 0.8),
             beta=(125, 0.96), scalar=(125, 0.8))


def kind_of(name, p):
    """The kind of a parameter in RATES, or "matrix"."""
    owner = name.split(".")[0]
    if owner in ("head", "alpha", "beta"):
        return owner
    if owner in ("wte", "values"):
        return "embedding"
    if name.endswith(("w_gate.weight", "w_value.weight")):
        return "gate"
    return "matrix" if p.dim() == 2 else "scalar"

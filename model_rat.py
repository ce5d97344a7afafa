"""
RAT: recurrence inside chunks, attention across them.

Attention pays for every past token. A gated linear recurrence reads one state and
forgets. RAT cuts the sequence into chunks of L tokens: a recurrence sums up keys
and values inside a chunk, attention reads the chunks' final states. For token
t = (c, l), number l of chunk c = t // L, and u = RMSNorm(x):

    z, g, v, q, k = W_in u              z, g, v of width W
    a = sigmoid(g + b_g)                a forget gate a channel     (1)
    k~_{c,l} = a k~_{c,l-1} + (1 - a) k_{c,l}
    v~_{c,l} = a v~_{c,l-1} + (1 - a) v_{c,l}   0 before a chunk    (2)
    y_{c,l}  = attention of q to k~_{0,L-1}, ..., k~_{c-1,L-1},
               the final states of earlier chunks, and to its own
               k~_{c,l}, with their v~, in one softmax              (3)
    out      = x + W_o (sigmoid(z) * y)                             (4)

q and k have only G groups, so that W_in is small: head h reads group h % G. Heads of
a group share query and k; their states k~ differ, as each channel has its gate. RoPE
rotates q and k~, after the recurrence, by the chunk's number c. What queries attend
to for L = 4 (e: final state of an earlier chunk, s: own state):

    token       0   1   2   3 | 4   5   6   7 | 8   9  10  11
    query 2             s     |               |
    query 5                 e |     s         |
    query 10                e |             e |         s

L = 1 is attention with keys and values scaled by 1 - a, L = T a gated RNN. Baselines:
mixer=rnn, v~ over the whole sequence, out = x + W_o (sigmoid(z) * v~);
mixer=attention, a Transformer. swa=w: in odd layers a token attends to w keys, its
own included (RAT-SWA; the paper's 1,024 does not count it: swa=1025).
Dropout is on embeddings and residual branches.

Paper: Wei, Yadav, Pascanu, Gulcehre 2025 (2507.04416). Only in its code
(CLAIRE-Labo/RAT, d4a8f54): b_g, G = 2, h % G. Departures from it: decoding works from
the first token on; states are float32, not bfloat16; norm_eps is 1e-5, not 1e-6;
norms and b_g do not decay (there b_g does, so that gates forget faster).

Shapes: B batch, T new tokens, S keys, n chunks, C width, H heads, D head size,
W = H D, G groups (attention: key/value heads), R slots of a layer's cache.
"""
import math
from dataclasses import dataclass

import torch
import torch.nn as nn

import kernels
from model_gpt import (MLP, Attention, BaseConfig, KVCache, LanguageModel, RMSNorm, apply_rope,
                       attend, attention_bias, choice, init_weights, mlp_width, rope_tables,
                       upcast, visible_keys)


@dataclass
class Config(BaseConfig):
    chunk: int = 16     # L, tokens of a chunk
    mixer: str = choice("rat", "rnn", "attention")  # what mixes tokens
    swa: int = 0        # keys that odd layers attend to, own one included (0: as even ones)
    qk_groups: int = 0  # G (0: 2, or 1 where n_head is odd)
    gate_rank: int = 0  # rank of the projections of z and g (0: full)
    pos: str = choice("chunk", "rope", "nope")  # what RoPE counts (see Context)
    n_mlp: int = 0      # hidden width of the MLP (0: 4 n_embd, 8/3 for swiglu)
    mlp: str = choice("gelu", "swiglu")
    tie_embeddings: bool = True  # the head is the embedding matrix
    qk_norm = False     # not keys: model_gpt's Attention asks for it,
    has_rope = True     # and BaseConfig, for even head sizes

    def __post_init__(self):
        super().__post_init__()
        self.at_least(1, "chunk")
        self.at_least(0, "swa", "qk_groups", "gate_rank", "n_mlp")
        self.n_mlp = self.n_mlp or mlp_width(self)
        self.qk_groups = self.qk_groups or 2 - self.n_head % 2
        if self.n_head % self.qk_groups:
            raise ValueError(f"qk_groups={self.qk_groups} must divide n_head={self.n_head}")
        # of each layer: rat | rnn | attention | swa
        self.kinds = ["swa" if self.swa and i % 2 else self.mixer for i in range(self.n_layer)]
        if self.head_dim > kernels.HEAD_SIZES[-1]:
            raise ValueError(f"head_dim={self.head_dim} must be at most {kernels.HEAD_SIZES[-1]}")


# ---- the method ----

class RAT(nn.Module):
    """Section 2.3: (1) to (4) without the residual connection."""

    def __init__(self, cfg):
        super().__init__()
        self.cfg, C, W = cfg, cfg.n_embd, cfg.n_head * cfg.head_dim
        rank, GD = cfg.gate_rank or W, cfg.qk_groups * cfg.head_dim
        self.widths = [rank, rank, W, GD, GD]   # of z, g, v, q, k
        self.w_in = nn.Linear(C, sum(self.widths), bias=False)
        # the second factor of a low-rank projection
        second = lambda: nn.Linear(rank, W, bias=False) if cfg.gate_rank else nn.Identity()
        self.w_z, self.w_g = second(), second()
        self.gate_bias = nn.Parameter(initial_gate_bias(W, cfg.chunk))  # b_g
        self.wo = nn.Linear(W, C, bias=False)

    def forward(self, u, layer, context):
        """u (B, T, C), normed; context: see Context -> (B, T, C)."""
        z, g, v, q, k = self.w_in(u).split(self.widths, -1)
        z, g = self.w_z(z), self.w_g(g)
        copies = self.cfg.n_head // self.cfg.qk_groups
        # head h has group h % G
        q, k = (torch.cat([x] * copies, -1) for x in (q, k))
        k, v = upcast(k), upcast(v)     # the states' type
        a = torch.sigmoid(upcast(g) + self.gate_bias)       # (1)
        mix = rat_fast if self.cfg.fast else rat_naive
        if context.cache:
            mix = rat_decode
        y = mix(q, k, v, a, layer, context)                 # (2), (3)
        y = y.transpose(1, 2).flatten(2).to(z.dtype)
        return self.wo(torch.sigmoid(z) * y)                # (4)


def rat_naive(q, k, v, a, layer, context):
    """(2) and (3) as written. q, k, v, a (B, T, W) -> y (B, H, T, D)."""
    cfg, L, T = context.cfg, context.cfg.chunk, q.size(1)
    states = (recurrence(a, x, L) for x in (k, v))          # (2)
    q, k_, v_ = (in_heads(x, cfg) for x in (upcast(q), *states))    # k_: k~
    q, rotated = (apply_rope(x, *context.rope["rat"]) for x in (q, k_))
    key = torch.arange(T, device=q.device)
    query = key[:, None]
    final = (key % L == L - 1) & (key // L < query // L)    # e
    own = key == query                                      # s
    bias = torch.zeros(T, T, device=q.device)
    bias = bias.masked_fill(~(final | own), -math.inf)
    return attend(q, rotated, v_, bias, fast=False)         # (3)


def recurrence(a, x, L):
    """(2) of a, x (B, T, W): the states after each token, (B, T, W)."""
    states = []
    for t, (a_t, x_t) in enumerate(zip(a.unbind(1), x.unbind(1))):
        h = 0 if t % L == 0 else h
        h = a_t * h + (1 - a_t) * x_t
        states.append(h)
    return torch.stack(states, 1)


# ---- what it is made of ----

def in_heads(x, cfg):
    """(B, T, heads * D) -> (B, heads, T, D)."""
    return x.unflatten(-1, (-1, cfg.head_dim)).transpose(1, 2)


def initial_gate_bias(W, steps):
    """log s, s uniform in (1, steps - 1). With g = 0, a = s / (1 + s): a state averages
    over some 1 / (1 - a) = 1 + s tokens, from 2 to `steps`."""
    return torch.empty(W).uniform_(1, max(1, steps - 1)).log()


class Context:
    """Where the T new tokens of a call stand:
    pos, chunk_of (B or 1, T): a token's position, its chunk's number
    starts (B or 1, T): whether it is its chunk's first
    padding (B, T): whether it is padding; None where all rows are alike
    rope {kind of layer: (cos, sin)}, (B or 1, 1, T, D / 2) each"""

    def __init__(self, cfg, x, cache=None, n_valid=None):
        """x (B, T, C): embeddings; the rest as in LanguageModel.forward."""
        self.cfg, self.cache, self.padding = cfg, cache, None
        index = torch.arange(x.size(1), device=x.device)
        self.pos = index[None]
        if cache:       # of slots only pos and n_new, a row's tokens without padding, are read
            self.slots = cache.place(x.size(1), n_valid)
            self.pos = self.slots.pos
            if self.slots.at is not None:   # rows differ
                self.padding = index >= self.slots.n_new[:, None]
        self.chunk_of, self.starts = self.pos // cfg.chunk, self.pos % cfg.chunk == 0
        # what RoPE counts in a layer; in attention never chunks, in swa always tokens
        tokens = 0 * self.pos if cfg.pos == "nope" else self.pos
        chunks = self.chunk_of if cfg.pos == "chunk" else tokens
        count = dict(rat=chunks, attention=tokens, swa=self.pos)
        self.rope = {}
        for kind in count.keys() & cfg.kinds:
            tables = rope_tables(count[kind], cfg.head_dim, cfg.rope_theta, x.dtype)
            self.rope[kind] = [table[:, None] for table in tables]


# ---- the fast path ----

def rat_fast(q, k, v, a, layer, context):
    """rat_naive, with scan as the recurrence and (3) in two parts."""
    cfg, L = context.cfg, context.cfg.chunk
    states = (kernels.scan(a, x, L) for x in (k, v))        # (2)
    q, k_, v_ = (in_heads(x, cfg) for x in (q, *states))
    # of the last tokens of the n = T // L complete chunks
    end_k, end_v, cos, sin = (x[:, :, L - 1::L] for x in (k_, v_, *context.rope["rat"]))
    end_k = apply_rope(end_k, cos, sin)     # (B, H, n, D)
    return read_states(q, k_, v_, end_k, end_v, context)    # (3)


def read_states(q, own_k, own_v, end_k, end_v, context):
    """(3) of q and its own state (B, H, T, D), before RoPE, and final states of chunks
    0 .. n - 1 (B, H, n, D), after it. The softmax over these and the one over the own
    state, whose log-sum-exp is its score, merge into the softmax over both."""
    # a query and its own state have the same angle: no RoPE is needed
    own_score = (upcast(q) * own_k).sum(-1) / math.sqrt(q.size(-1))
    q = apply_rope(q, *context.rope["rat"])
    end_k, end_v, own_v = (x.to(q.dtype) for x in (end_k, end_v, own_v))
    # a key's position is its chunk's number; those before a query's chunk are visible
    before = (context.chunk_of - 1).int().squeeze(0)    # (T,) or (B, T)
    y, lse = kernels.attend(q, end_k, end_v, q_pos=before)
    return kernels.merge(y, lse, own_v, own_score)[0]


# ---- decoding: one path, whatever `fast` is ----

class Cache(KVCache):
    """k[layer], v[layer] (B, heads, R[layer] + 1, D): a slot for each chunk (rat) or token
    (attention), or a ring for the last tokens (swa). Slot R is a bin, never read.
    state[layer]: k~ and v~ before RoPE (B, 2, W), or the RNN's (B, 1, W), upcast."""

    def __init__(self, cfg, batch_size, max_len, device, dtype, n_layer=None):
        super().__init__(cfg, batch_size, max_len, device, dtype, n_layer=0)
        H, G, chunks = cfg.n_head, cfg.n_kv_head, math.ceil(max_len / cfg.chunk)
        # of each kind: heads, slots, states
        sizes = dict(rat=(H, chunks, 2), rnn=(0, 0, 1), attention=(G, max_len, 0),
                     swa=(G, min(cfg.swa, max_len), 0))
        heads, self.R, states = zip(*(sizes[kind] for kind in cfg.kinds[:n_layer]))
        zeros = lambda *shape: torch.zeros(batch_size, *shape, device=device, dtype=dtype)
        slots = lambda: [zeros(h, R + 1, cfg.head_dim) for h, R in zip(heads, self.R)]
        with torch.inference_mode(False):   # so that calls without it may write, too
            self.k, self.v = slots(), slots()
            self.state = [upcast(zeros(n, cfg.n_head * cfg.head_dim)) for n in states]
        self.rows = torch.arange(batch_size, device=device)[:, None]

    def buffers(self):  # what KVCache resets and measures: no bins
        return [x[:, :, :-1] for x in self.k + self.v] + self.state

    def fill(self, layer, k, v, at, padding):
        """Write k, v (B, heads, T, D) to slots at (B or 1, T), those of padding to the bin."""
        if padding is not None:
            at = at.masked_fill(padding, self.R[layer])
        for buffer, new in ((self.k[layer], k), (self.v[layer], v)):
            # (B, T, heads, D), as torch indexes it
            buffer[self.rows, :, at] = new.transpose(1, 2).to(buffer.dtype)


def rat_decode(q, k, v, a, layer, context):
    """(2) and (3) of T tokens after the cached ones."""
    cfg, cache, L, T = context.cfg, context.cache, context.cfg.chunk, q.size(1)
    states = continued_states(a, [k, v], layer, context, L, context.starts)     # (2)
    q, k_, v_ = (in_heads(x, cfg) for x in (q, *states))
    rotated, R = apply_rope(k_, *context.rope["rat"]), cache.R[layer]
    if T == 1:
        # the own state takes its chunk's slot: (3) is over all slots so far
        q = apply_rope(q, *context.rope["rat"])
        return decode_one(q, rotated, v_, layer, context, L)
    # of several tokens of a chunk, the last one's state goes to the slot
    at = torch.where(context.pos % L == L - 1, context.chunk_of, R)
    cache.fill(layer, rotated, v_, at, context.padding)
    # chunks before the last token's (min: padding may go on past the last slot)
    n = min((cache.longest + T - 1) // L, R)
    end_k, end_v = cache.k[layer][:, :, :n], cache.v[layer][:, :, :n]
    return read_states(q, k_, v_, end_k, end_v, context)    # (3)


def continued_states(a, xs, layer, context, L, starts):
    """(2) of each of xs (B, T, W) from the cached states on, which become the last ones.
    starts (B or 1, T): where the state starts from zero; in an empty cache at 0, L, 2 L, .."""
    cache, cached, T = context.cache, context.cache.state[layer], a.size(1)
    if context.padding is not None:
        a = a.masked_fill(context.padding[..., None], 1)    # keeps the state
    starts = starts[..., None]
    if T == 1:
        old = cached.masked_fill(starts, 0)
        cached.copy_(a * old + (1 - a) * torch.cat(xs, 1))
        return cached.split(1, 1)
    if cache.longest:
        # Chunks start anywhere: scan gets all tokens as one chunk.
        # Where one starts, (2) is (1 - a) x, scan's g h + (1 - g) y for g = 0, y = (1 - a) x.
        xs = [torch.where(starts, (1 - a) * x, x) for x in xs]
        a, L = a.masked_fill(starts, 0), T
    states = [kernels.scan(a, x, L, h) for x, h in zip(xs, cached.unbind(1))]
    # (token 0 of a row without new tokens is padding, which kept the state)
    last = (context.slots.n_new[:, None] - 1).clamp(min=0)  # (B, 1)
    cached.copy_(torch.cat([h[cache.rows, last] for h in states], 1))
    return states


def decode_one(q, k, v, layer, context, tokens_per_slot):
    """One new token a row. k, v (B, heads, 1, D) go to its slot; q attends to its row's
    slots so far. (Only swa may have fewer slots than tokens: a ring.)"""
    cache, R = context.cache, context.cache.R[layer]
    index = context.pos // tokens_per_slot
    n = min(cache.longest // tokens_per_slot + 1, R)
    bias = None
    if context.padding is not None:     # rows differ: a row has slots 0 .. index, or all R
        bias = attention_bias(index, torch.arange(n, device=q.device))
    cache.fill(layer, k, v, index % R, context.padding)
    k, v = (x[layer][:, :, :n].to(q.dtype) for x in (cache.k, cache.v))
    return attend(q, k, v, bias, fast=True)


# ---- what it is compared with ----

class RNN(nn.Module):
    """The gated linear recurrence alone (section 2.2)."""

    def __init__(self, cfg):
        super().__init__()
        self.fast, C, W = cfg.fast, cfg.n_embd, cfg.n_head * cfg.head_dim
        self.w_in = nn.Linear(C, 3 * W, bias=False)     # z, g, v
        self.gate_bias = nn.Parameter(initial_gate_bias(W, cfg.block_size))
        self.wo = nn.Linear(W, C, bias=False)

    def forward(self, u, layer, context):
        z, g, v = self.w_in(u).chunk(3, -1)
        a, v, T = torch.sigmoid(upcast(g) + self.gate_bias), upcast(v), u.size(1)
        if context.cache:
            h, = continued_states(a, [v], layer, context, T, starts=context.pos == 0)
        else:
            h = (kernels.scan if self.fast else recurrence)(a, v, T)
        return self.wo(torch.sigmoid(z) * h.to(z.dtype))


class TokenAttention(Attention):
    """model_gpt's Attention, to all tokens or in a window (swa)."""

    def forward(self, u, layer, context):
        q, k, v = (in_heads(w(u), self.cfg) for w in (self.wq, self.wk, self.wv))
        q, k = (apply_rope(x, *context.rope[self.cfg.kinds[layer]]) for x in (q, k))
        y = attend_tokens(q, k, v, layer, context)
        return self.wo(y.transpose(1, 2).flatten(2))    # (B, T, C)


def attend_tokens(q, k, v, layer, context):
    """q (B, H, T, D), k, v (B, G, T, D) -> y (B, H, T, D)."""
    cfg, cache, T = context.cfg, context.cache, q.size(2)
    if cache and T == 1:
        return decode_one(q, k, v, layer, context, tokens_per_slot=1)
    pos, k_pos, window = context.pos, context.pos, cfg.swa
    if cache:       # attention's window is R = max_len, no limit
        k, v, pos, k_pos = with_cached(k, v, layer, context)
        window = cache.R[layer]
    # causal, where no tokens are before these
    if cfg.kinds[layer] == "attention" and k.size(2) == T:
        return attend(q, k, v, None, fast=cfg.fast)
    if not cfg.fast and not cache:
        return attend(q, k, v, attention_bias(pos, k_pos[0], window), fast=False)
    # the kernel leaves out the blocks of keys before a window
    pos, k_pos = (p.int().squeeze(0) for p in (pos, k_pos))
    return kernels.attend(q, k, v, pos, k_pos, window=window)[0]


def with_cached(k, v, layer, context):
    """Cache the new k, v (B, G, T, D). -> k, v (B, G, S, D) of the cached tokens and
    these, positions of the T queries (B or 1, T) and of the S keys (B or 1, S)."""
    cache, R, pos = context.cache, context.cache.R[layer], context.pos
    # token t stands in slot t % R (t < 0: no such token)
    t = pos[:, :1] + torch.arange(-min(cache.longest, R), 0, device=k.device)
    cached = [x[layer][cache.rows, :, t % R].transpose(1, 2) for x in (cache.k, cache.v)]
    # all but a row's last R tokens go to the bin: no slot is written twice
    end = (cache.lengths + context.slots.n_new)[:, None]
    at = torch.where(pos >= end - R, pos % R, R)
    cache.fill(layer, k, v, at, context.padding)
    if context.padding is not None:
        # after all tokens: visible to padding alone, which so has a key (no NaN)
        pos = pos.masked_fill(context.padding, cache.max_len)
    k, v = (torch.cat([old.to(k.dtype), new], 2) for old, new in zip(cached, (k, v)))
    t = t.masked_fill(t < 0, -R)    # before every window
    return k, v, pos, torch.cat([t, pos], 1)


# ---- the model ----

class Block(nn.Module):
    def __init__(self, cfg, layer):
        super().__init__()
        self.norm1 = RMSNorm(cfg.n_embd, cfg.norm_eps)
        self.norm2 = RMSNorm(cfg.n_embd, cfg.norm_eps)
        mixer = dict(rat=RAT, rnn=RNN).get(cfg.kinds[layer], TokenAttention)
        self.mix = mixer(cfg)
        self.mlp, self.drop = MLP(cfg), nn.Dropout(cfg.dropout)

    def forward(self, x, layer, context):
        x = x + self.drop(self.mix(self.norm1(x), layer, context))
        return x + self.drop(self.mlp(self.norm2(x)))


class Model(LanguageModel):
    context_type = Context
    context_limit = None    # past block_size too: rat's chunks and swa's windows go on

    def __init__(self, cfg):
        super().__init__(cfg, [Block(cfg, layer) for layer in range(cfg.n_layer)])
        init_weights(self)

    def init_cache(self, batch_size, max_len):
        return Cache(self.cfg, *self.cache_sizes(batch_size, max_len))

    def mixer_flops(self):
        """12 W for each key of token t, averaged over t; none for recurrences."""
        cfg, T = self.cfg, self.cfg.block_size
        keys = dict(rnn=0, attention=visible_keys(T), swa=visible_keys(T, cfg.swa))
        keys["rat"] = sum(t // cfg.chunk + 1 for t in range(T)) / T
        width = cfg.n_head * cfg.head_dim
        return 12.0 * width * sum(keys[kind] for kind in cfg.kinds)

"""
RAT: recurrence inside chunks, attention across them.

Softmax attention reads every past token and pays for each; a gated linear recurrence reads one
state and forgets. RAT cuts the sequence into chunks of L tokens. Inside a chunk a recurrence sums
keys and values up in a running state; across chunks attention reads the states in which the earlier
chunks ended. Token t = (c, l) is number l of chunk c = t // L; u = RMSNorm(x):

    z, g, v, q, k = W_in u         z, g, v of width C; q, k of G heads, head h uses number h % G
    g = sigmoid(g + b_g)           forget gate of each channel, the same for keys and values
    k~_{c,l} = g k~_{c,l-1} + (1 - g) k_{c,l}
    v~_{c,l} = g v~_{c,l-1} + (1 - g) v_{c,l}              zero before a chunk's first token
    y_{c,l}  = softmax attention of q over the final states k~_{0,L-1}, ..., k~_{c-1,L-1} of earlier
               chunks and the own state k~_{c,l}, with their v~; scores q . k~ / sqrt(D)
    out      = x + W_o (sigmoid(z) * y)

RoPE rotates q and k~, after the recurrence, by the chunk's number c. For L = 4 three queries attend
to (e: final state of a chunk, s: own running state):

    token           0   1   2   3 | 4   5   6   7 | 8   9  10  11
    query 2                 s     |               |
    query 5                     e |     s         |
    query 10                    e |             e |         s

L = 1 is attention over keys and values scaled by 1 - g; L = T is a gated linear RNN. A cache holds
one key and value for L tokens, and the running state.

fast=false: a loop over tokens, and one softmax over final states and own state. fast=true: `scan`
runs the recurrence of all chunks in parallel, `attend` does the attention to final states, `merge`
adds the own state to its softmax (kernels.py). Sequences computed from their first token on
(training, evaluation, prefill) need only `kernels.rat`, the same in one operator.

Other mixers, to compare with:

    mixer=rnn          v~ over the whole sequence, out = x + W_o (sigmoid(z) * v~)
    mixer=attention    softmax attention with RoPE
    swa=1024           odd layers are attention to the token and the 1,024 before it (RAT-SWA)
    reversed=true      attention inside chunks, recurrence across (Appendix C.1, worse); y is the
                       attention inside the chunk, with one query head for all key heads:
                       h_{c,l} = g h_{c-1,L-1} + (1 - g) y_{c,l},  out = x + W_o (sigmoid(z) * h)

Paper: Wei, Yadav, Pascanu, Gulcehre 2025, "RAT: Bridging RNN Efficiency and Attention Accuracy in
Language Modeling" (2507.04416), code: github.com/CLAIRE-Labo/RAT. Departures from that code: the
fused operator; decoding works from the first token on; states stay in float32 (there bfloat16);
norm_eps is 1e-5 by default (there 1e-6, as in configs/ for the paper's sizes). Dropout acts on
embeddings and residual branches only.

Shapes: B batch, T new tokens, L tokens of a chunk, n final states, C width, H heads, G heads of q
and k in RAT, D head size, S keys, R slots of a cache.
"""
import math
from dataclasses import dataclass

import torch
import torch.nn as nn

import kernels
from model_gpt import (MLP, Attention, BaseConfig, KVCache, LanguageModel, RMSNorm, apply_rope,
                       attention_bias, attention_fast, attention_naive, choice, compute_dtype,
                       mlp_width, rope_tables)


@dataclass
class Config(BaseConfig):
    chunk: int = 16              # L, tokens of a chunk
    mixer: str = choice("rat", "rnn", "attention")      # what mixes tokens
    reversed: bool = False       # attention inside chunks, recurrence across
    swa: int = 0                 # > 0: in odd layers, how many tokens before its own a query reads
    qk_groups: int = 0           # G (0: 2, or 1 where n_head is odd; n_head: each head its own)
    gate_rank: int = 0           # rank of g and z, if reversed of z (0: full; if reversed head_dim)
    pos: str = choice("chunk", "rope", "nope")  # RoPE by chunk, by token, none (swa: always token)
    rope_theta: float = 10000.0  # RoPE's base
    n_mlp: int = 0               # hidden width of the MLP (0: 4 n_embd for gelu, 8/3 for swiglu)
    mlp: str = choice("gelu", "swiglu")         # the MLP's nonlinearity
    tie_embeddings: bool = True  # the head is the embedding matrix
    norm_eps: float = 1e-5       # RMSNorm's epsilon
    qk_norm = False              # no key: model_gpt's Attention asks for it

    def __post_init__(self):
        super().__post_init__()
        self.at_least(1, "chunk")
        self.at_least(0, "swa", "gate_rank", "n_mlp")
        self.n_mlp = self.n_mlp or mlp_width(self)
        self.qk_groups = self.qk_groups or 2 - self.n_head % 2
        if self.qk_groups < 1 or self.n_head % self.qk_groups:
            raise ValueError(f"qk_groups={self.qk_groups} must divide n_head={self.n_head}")
        if self.reversed and self.mixer != "rat":
            raise ValueError(f"reversed=true is of mixer=rat, not of mixer={self.mixer}")
        size, largest = self.head_dim, kernels.HEAD_SIZES[-1]
        if size % 2 and any(self.rope_by(kind) for kind in self.kinds):
            raise ValueError(f"RoPE needs an even head size: n_embd / n_head = {size}")
        if size > largest and self.kinds != {"rnn"}:
            raise ValueError(f"n_embd / n_head = {size} is more than a head of {largest}")

    def kind(self, layer):
        """What mixes tokens in this layer: rat | rnn | attention | swa | reversed."""
        if self.swa and layer % 2:
            return "swa"
        return "reversed" if self.reversed else self.mixer

    @property
    def kinds(self):
        return {self.kind(layer) for layer in range(self.n_layer)}

    def rope_by(self, kind):
        """What RoPE counts in layers of this kind: chunk | token, or None without RoPE."""
        if kind == "rnn" or self.pos == "nope" and kind != "swa":
            return None
        return "chunk" if kind == "rat" and self.pos == "chunk" else "token"


# -------------------------------------------------------------------------------------------------
# recurrence and attention

def wide(x):
    """x in float32, or float64 where it is that."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def recurrence_naive(gate, x, state):
    """h_t = gate_t h_{t-1} + x_t: gate, x (B, T, C), state h_{-1} (B, C) -> (B, T, C)."""
    states = []
    for gate_t, x_t in zip(gate.unbind(1), x.unbind(1)):    # one backward for all slices
        state = gate_t * state + x_t
        states.append(state)
    return torch.stack(states, 1)


def read_naive(q, k_own, v_own, k_ends, v_ends, chunk_of):
    """One softmax over the final states of the chunks before a query's, and its own state.

    q, k_own, v_own (B, H, T, D): queries and running states. k_ends, v_ends (B, H, n, D): final
    states. chunk_of (B or 1, T): each query's chunk. -> (B, H, T, D)
    """
    s_ends = wide(q) @ wide(k_ends).transpose(-2, -1)                   # (B, H, T, n)
    is_before = torch.arange(k_ends.size(2), device=q.device) < chunk_of[..., None]
    s_ends = s_ends.masked_fill(~is_before[:, None], -math.inf)
    s_own = (wide(q) * k_own).sum(-1, keepdim=True)                     # (B, H, T, 1)
    p = (torch.cat([s_ends, s_own], -1) / math.sqrt(q.size(-1))).softmax(-1)
    y = p[..., :-1] @ wide(v_ends) + p[..., -1:] * v_own
    return y.to(q.dtype)


def read_fast(q, k_own, v_own, k_ends, v_ends, chunk_of):
    """The same: attention to the final states alone, merged with attention to the own state alone,
    whose softmax is 1 and whose log-sum-exp is its score. Chunks are the kernel's positions."""
    q_pos = (chunk_of - 1).int().squeeze(0)                             # (T,) or (B, T)
    k_pos = torch.arange(k_ends.size(2), dtype=torch.int32, device=q.device)
    y, lse = kernels.attend(q, k_ends.to(q.dtype), v_ends.to(q.dtype), q_pos, k_pos)
    own = (wide(q) * k_own).sum(-1) / math.sqrt(q.size(-1))             # (B, H, T)
    return kernels.merge(y, lse, v_own.to(q.dtype), own)[0]


def initial_gate_bias(C, steps):
    """log u with u uniform in (1, steps - 1): the gates remember some 2 to `steps` tokens."""
    if steps <= 2:
        return torch.zeros(C)
    return torch.empty(C).uniform_(1, steps - 1).log()


def forget_gate(g, bias, context):
    """sigmoid(g + bias), g (B, T, C), in float32; 1 at padding, which leaves the state as it is."""
    gate = torch.sigmoid(wide(g) + wide(bias))
    return gate.masked_fill(~context.real[..., None], 1) if context.ragged else gate


def running_state(gate, x, context, cache, fast, restart=None):
    """x~_t = gate_t x~_{t-1} + (1 - gate_t) x_t, (B, T, C), from the state in the cache, and from
    zero where `restart` (B or 1, T) is true. The cache gets the last one."""
    state = torch.zeros_like(x[:, 0]) if cache is None else cache["state"]
    new = (1 - gate) * x
    if restart is not None:
        gate = gate.masked_fill(restart[..., None], 0)
    if fast and x.size(1) > 1:
        states = kernels.scan(gate, new, x.size(1), state)
    else:
        states = recurrence_naive(gate, new, state)
    if cache is not None:
        cache["state"].copy_(states[:, -1])
    return states


class RAT(nn.Module):
    """Recurrence inside chunks, attention across them (section 2.3)."""

    def __init__(self, cfg):
        super().__init__()
        self.cfg = cfg
        C, GD, rank = cfg.n_embd, cfg.qk_groups * cfg.head_dim, cfg.gate_rank
        self.widths = [rank or C, rank or C, C, GD, GD]                 # of z, g, v, q, k
        self.w_in = nn.Linear(C, sum(self.widths), bias=False)
        if rank:
            self.w_z = nn.Linear(rank, C, bias=False)
            self.w_g = nn.Linear(rank, C, bias=False)
        self.gate_bias = nn.Parameter(initial_gate_bias(C, cfg.chunk))
        self.wo = nn.Linear(C, C, bias=False)

    def forward(self, u, context, cache=None):
        """u (B, T, C), normed -> (B, T, C)."""
        z, g, v, q, k = self.w_in(u).split(self.widths, -1)
        if self.cfg.gate_rank:
            z, g = self.w_z(z), self.w_g(g)
        rope = context.rope[self.cfg.rope_by("rat")]
        if self.cfg.fast and context.start == 0 and not context.ragged:
            return self.wo(self.fused(z, g, v, q, k, rope, context, cache))
        k, v = self.states(g, k, v, context, cache)                     # (B, H, T, D)
        q = self.heads(self.repeat(q))
        y = self.read(rotate(q, rope), rotate(k, rope), v, context, cache)
        return self.wo(torch.sigmoid(z) * y.transpose(1, 2).flatten(2))

    def heads(self, x):
        """(B, T, H D) -> (B, H, T, D)."""
        return x.unflatten(-1, (-1, self.cfg.head_dim)).transpose(1, 2)

    def repeat(self, x):
        """(B, T, G D) -> (B, T, C): head h is number h % G."""
        return x.repeat(1, 1, self.cfg.n_head // self.cfg.qk_groups)

    def states(self, g, k, v, context, cache):
        """The running states k~ and v~, (B, H, T, D) in float32. k is gated for each head, so heads
        that share it have keys of their own."""
        gate = forget_gate(g, self.gate_bias, context)                  # (B, T, C)
        kv = torch.cat([self.repeat(wide(k)), wide(v)], -1)             # (B, T, 2 C)
        states = running_state(gate.repeat(1, 1, 2), kv, context, cache, self.cfg.fast,
                               restart=context.first)
        return [self.heads(x) for x in states.chunk(2, -1)]

    def read(self, q, k, v, context, cache):
        """q, k~, v~ (B, H, T, D), rotated -> y (B, H, T, D). The cache has a slot for each chunk's
        final state; decoding one token, the own state stands in the slot of its chunk."""
        L, T = self.cfg.chunk, q.size(2)
        if cache is None:
            k_ends, v_ends = k[:, :, L - 1::L], v[:, :, L - 1::L]
        elif T == 1:
            write(cache, k, v, context.chunk_of, context.real)
            last = context.chunk_of if context.ragged else None
            return attend_to_slots(q, cache, context.start // L + 1, last, self.cfg.fast)
        else:
            write(cache, k, v, context.chunk_of, context.last)
            n = min((context.start + T) // L, spare_slot(cache))
            k_ends, v_ends = cache["k"][:, :, :n], cache["v"][:, :, :n]
        read = read_fast if self.cfg.fast else read_naive
        return read(q, k, v, k_ends, v_ends, context.chunk_of)

    def fused(self, z, g, v, q, k, rope, context, cache):
        """sigmoid(z) * y, (B, T, C), from the first token on. The operator also returns the states
        at chunk ends (B, n, H, D), the last maybe of an unfinished chunk, not rotated."""
        L, T = self.cfg.chunk, z.size(1)
        cos, sin = (x[0, 0] for x in rope) if rope else (None, None)    # (T, D)
        heads = [x.unflatten(-1, (-1, self.cfg.head_dim)) for x in (q, k, v, g, z)]
        y, k_ends, v_ends = kernels.rat(*heads, wide(self.gate_bias), L, cos, sin)
        if cache is not None:
            cache["state"].copy_(torch.cat([k_ends[:, -1], v_ends[:, -1]], 1).flatten(1))
            k, v = (x[:, :T // L].transpose(1, 2) for x in (k_ends, v_ends))
            ends = slice(L - 1, None, L)
            write(cache, rotate(k, rope, ends), v, context.chunk_of[:, ends])
        return y.flatten(2)

    def cache_shapes(self, max_len):
        cfg = self.cfg
        kv = cfg.n_head, math.ceil(max_len / cfg.chunk) + 1, cfg.head_dim
        return dict(k=kv, v=kv, state=(2 * cfg.n_embd,))


# -------------------------------------------------------------------------------------------------
# the mixers it is compared with

class RNN(nn.Module):
    """The gated linear recurrence alone (section 2.2): value, forget gate and output gate."""

    def __init__(self, cfg):
        super().__init__()
        self.cfg = cfg
        self.w_in = nn.Linear(cfg.n_embd, 3 * cfg.n_embd, bias=False)   # z, g, v
        self.gate_bias = nn.Parameter(initial_gate_bias(cfg.n_embd, cfg.block_size))
        self.wo = nn.Linear(cfg.n_embd, cfg.n_embd, bias=False)

    def forward(self, u, context, cache=None):
        """u (B, T, C), normed -> (B, T, C)."""
        z, g, v = self.w_in(u).chunk(3, -1)
        gate = forget_gate(g, self.gate_bias, context)
        states = running_state(gate, wide(v), context, cache, self.cfg.fast)
        return self.wo(torch.sigmoid(z) * states.to(z.dtype))

    def cache_shapes(self, max_len):
        return dict(state=(self.cfg.n_embd,))


# the position of a key that is not there, and a window that hides only such keys
EMPTY_SLOT, NO_WINDOW = -2 ** 28, 2 ** 27


def attend_in_window(q, k, v, context, cache, window, fast, in_chunks=False):
    """Attention of the new tokens to each other and to those before, at distances below `window`;
    in_chunks: to those of their own chunk, which has `window` tokens. -> (B, H, T, D)

    The cache is a ring of R slots, enough for a window: token t is in slot t % R.
    """
    pos, start, R = context.pos, context.start, cache and spare_slot(cache)
    if cache and q.size(2) == 1:                        # all slots in use are visible
        write(cache, k, v, pos % R, context.real)
        last = pos % window if in_chunks else pos if context.ragged else None
        return attend_to_slots(q, cache, min(start + 1, R), last, fast)
    keys, values, k_pos = k, v, pos
    if start > 0:
        k_old, v_old, old = read_ring(cache, pos, min(start, R))
        keys, values = torch.cat([k_old.to(k.dtype), k], 2), torch.cat([v_old.to(v.dtype), v], 2)
        k_pos = torch.cat([old, pos], 1)                                # (B or 1, S)
    if cache:                                           # of more than R new tokens the last
        write(cache, k, v, pos % R, context.real & (pos >= context.end - R))
    if fast and start == 0 and window == NO_WINDOW:
        return attention_fast(q, k, v, None)            # plainly causal: padding is on the right
    k_pos = torch.where(k_pos < 0, EMPTY_SLOT, k_pos)
    if in_chunks:       # positions with gaps between chunks: a window ends where the chunk does
        pos, k_pos = (p + p // window * window for p in (pos, k_pos))
    if fast:
        pos, k_pos = (p.int().squeeze(0) for p in (pos, k_pos))         # (T,), (S,) or (B, ...)
        return kernels.attend(q, keys, values, pos, k_pos, window=window)[0]
    bias = attention_bias(pos, k_pos[:, None, None], window, dtype=wide(q).dtype)
    return attention_naive(q, keys, values, bias)


class WindowAttention(Attention):
    """Softmax attention with a sliding window, or to all tokens."""

    def __init__(self, cfg, kind):
        super().__init__(cfg)
        self.cfg, self.rope_by = cfg, cfg.rope_by(kind)
        self.window = cfg.swa + 1 if kind == "swa" else NO_WINDOW

    def forward(self, u, context, cache=None):
        """u (B, T, C), normed -> (B, T, C)."""
        rope = context.rope[self.rope_by]
        q, k, v = (self.heads(w(u)) for w in (self.wq, self.wk, self.wv))       # (B, heads, T, D)
        y = attend_in_window(rotate(q, rope), rotate(k, rope), v, context, cache,
                             self.window, self.cfg.fast)
        return self.wo(y.transpose(1, 2).flatten(2))

    def cache_shapes(self, max_len):
        kv = self.cfg.n_kv_head, min(self.window, max_len) + 1, self.cfg.head_dim
        return dict(k=kv, v=kv)


class Reversed(nn.Module):
    """Attention inside chunks, recurrence across them (Appendix C.1)."""

    def __init__(self, cfg):
        super().__init__()
        self.cfg = cfg
        C, D, rank = cfg.n_embd, cfg.head_dim, cfg.gate_rank or cfg.head_dim
        self.widths = [rank, C, C, C, D]                                # of z, g, v, k, q
        self.w_in = nn.Linear(C, sum(self.widths), bias=False)
        self.w_z = nn.Linear(rank, C, bias=False)
        self.gate_bias = nn.Parameter(initial_gate_bias(C, cfg.block_size // cfg.chunk))
        self.wo = nn.Linear(C, C, bias=False)

    def forward(self, u, context, cache=None):
        """u (B, T, C), normed -> (B, T, C)."""
        z, g, v, k, q = self.w_in(u).split(self.widths, -1)
        y = self.attend(q, k, v, context, cache)                        # (B, T, C)
        gate = forget_gate(g, self.gate_bias, context)
        before = torch.zeros_like(y[:, 0]) if cache is None else cache["state"].clone()
        # the state changes at the last token of a chunk; elsewhere its gate is 1
        moves = torch.where(context.last[..., None], gate, 1)
        states = running_state(moves, y, context, cache, self.cfg.fast)
        entered = torch.cat([before[:, None], states[:, :-1]], 1)       # h_{c-1,L-1}: (B, T, C)
        h = gate * entered + (1 - gate) * y
        return self.wo(torch.sigmoid(self.w_z(z)) * h.to(z.dtype))

    def attend(self, q, k, v, context, cache):
        """Attention inside chunks: (B, T, C) in float32."""
        q, k, v = (x.unflatten(-1, (-1, self.cfg.head_dim)).transpose(1, 2) for x in (q, k, v))
        rope = context.rope[self.cfg.rope_by("reversed")]
        q, k = rotate(q, rope).expand(v.shape), rotate(k, rope)         # (B, H, T, D)
        y = attend_in_window(q, k, v, context, cache, self.cfg.chunk, self.cfg.fast, True)
        return wide(y.transpose(1, 2).flatten(2))

    def cache_shapes(self, max_len):
        """The keys and values of one chunk, and the state in which the one before ended."""
        kv = self.cfg.n_head, min(self.cfg.chunk, max_len) + 1, self.cfg.head_dim
        return dict(k=kv, v=kv, state=(self.cfg.n_embd,))


# -------------------------------------------------------------------------------------------------
# decoding, and what all layers know of the new tokens

class Cache(KVCache):
    """layers[l] is a dict of layer l's buffers: keys and values k, v (B, heads, R + 1, D) in R slots,
    contiguous a head, and the float32 state of its recurrence. Padding is written to the spare slot
    at the end, which is never read. Lengths and the placing of new tokens are KVCache's."""

    def __init__(self, shapes, batch_size, max_len, device, dtype):
        """shapes: for each layer {name: shape of a row}."""
        dtypes = dict(k=dtype, v=dtype, state=torch.promote_types(dtype, torch.float32))
        with torch.inference_mode(False):               # so that calls outside may write too
            self.layers = [{name: torch.zeros(batch_size, *shape, device=device, dtype=dtypes[name])
                            for name, shape in layer.items()} for layer in shapes]
            self.lengths = torch.zeros(batch_size, dtype=torch.long, device=device)
        self.max_len, self.longest, self.ragged = max_len, 0, False
        self.k = self.v = []                            # KVCache's own buffers: none

    def nbytes(self):
        """Bytes of the keys, values and states of all rows at max_len."""
        return sum((x if name == "state" else x[:, :, :-1]).nbytes
                   for layer in self.layers for name, x in layer.items())

    def reset(self, rows=None):
        """Empty the given rows (indices; None: all). They are zeroed: a NaN under a mask would still
        poison the sum over values."""
        super().reset(rows)
        for layer in self.layers:
            for buffer in layer.values():
                buffer[slice(None) if rows is None else rows] = 0


def spare_slot(cache):
    return cache["k"].size(2) - 1


def write(cache, k, v, slots, mask=None):
    """Write k, v (B, heads, T, D) to slots (B or 1, T), or to the spare slot where mask is false."""
    if mask is not None:
        slots = torch.where(mask, slots, spare_slot(cache))
    for buffer, new in ((cache["k"], k), (cache["v"], v)):
        if len(slots) == 1:
            buffer.index_copy_(2, slots[0], new.to(buffer.dtype))
        else:
            rows = torch.arange(len(new), device=new.device)[:, None]
            buffer[rows, :, slots] = new.transpose(1, 2).to(buffer.dtype)


def read_ring(cache, pos, n):
    """Keys, values (B, heads, n, D) and positions (B or 1, n) of the n tokens before pos (B or 1, T);
    negative positions where a row has fewer."""
    old = pos[:, :1] + torch.arange(-n, 0, device=pos.device)
    rows, slots = torch.arange(len(cache["k"]), device=pos.device)[:, None], old % spare_slot(cache)
    k, v = (cache[name][rows, :, slots].transpose(1, 2) for name in "kv")
    return k, v, old


def attend_to_slots(q, cache, n, last, fast):
    """Attention of one token a row, q (B, H, 1, D), to the first n slots; of these, only up to slot
    `last` (B or 1, 1) unless it is None."""
    k, v = (cache[name][:, :, :n].to(q.dtype) for name in "kv")         # (B, heads, n, D)
    bias = None if fast else 0.0
    if last is not None:
        bias = attention_bias(last, torch.arange(n, device=q.device), dtype=q.dtype)
    return (attention_fast if fast else attention_naive)(q, k, v, bias)


class Context:
    """Where the T new tokens of every row stand; the same for all layers."""

    def __init__(self, cfg, x, cache=None, n_valid=None):
        """x (B, T, C): the new tokens' embeddings, of which device and dtype count."""
        T, L = x.size(1), cfg.chunk
        step = torch.arange(T, device=x.device)
        self.start = 0 if cache is None else cache.longest      # tokens before, at most
        self.pos = step[None] if cache is None else cache.place(T, n_valid)     # (B or 1, T)
        self.ragged = cache is not None and cache.ragged        # rows differ, or have padding
        self.real = step[None] >= 0                             # no padding
        self.end = self.pos[:, :1] + T                          # (B or 1, 1)
        if self.ragged:
            self.pos = cache.lengths[:, None] + step            # padding stands after the last token
            self.real = step < cache.new[:, None]
            self.end = (cache.lengths + cache.new)[:, None]
        self.chunk_of = self.pos // L
        self.first = self.real & (self.pos % L == 0)            # of their chunk
        self.last = self.real & (self.pos % L == L - 1)
        tables = lambda pos: [x[:, None] for x in rope_tables(pos, cfg.head_dim, cfg.rope_theta, x.dtype)]
        by = {cfg.rope_by(kind) for kind in cfg.kinds}
        positions = dict(chunk=self.chunk_of, token=self.pos)
        self.rope = {None: None, **{name: tables(positions[name]) for name in by - {None}}}


def rotate(x, rope, at=slice(None)):
    """x (B, heads, T, D) by the tables (B or 1, 1, T, D), or their rows `at`; without tables as is."""
    return x if rope is None else apply_rope(x, *(table[:, :, at] for table in rope))


# -------------------------------------------------------------------------------------------------
# the model

class Block(nn.Module):
    def __init__(self, cfg, layer):
        super().__init__()
        kind = cfg.kind(layer)
        self.norm1 = RMSNorm(cfg.n_embd, cfg.norm_eps)
        self.norm2 = RMSNorm(cfg.n_embd, cfg.norm_eps)
        if kind in ("attention", "swa"):
            self.mix = WindowAttention(cfg, kind)
        else:
            self.mix = dict(rat=RAT, rnn=RNN, reversed=Reversed)[kind](cfg)
        self.mlp, self.drop = MLP(cfg), nn.Dropout(cfg.dropout)

    def forward(self, x, context, cache=None):
        x = x + self.drop(self.mix(self.norm1(x), context, cache))
        return x + self.drop(self.mlp(self.norm2(x)))


class Model(LanguageModel):
    """The language model of RAT and its neighbours."""

    context_limit = None        # with RoPE by token, too

    def __init__(self, cfg):
        super().__init__(cfg, (Block(cfg, layer) for layer in range(cfg.n_layer)))
        with torch.no_grad():
            for p in self.parameters():
                if p.dim() == 2:
                    p.normal_(0, 0.02)
        if cfg.tie_embeddings:
            self.head.weight = self.wte.weight

    def hidden(self, idx, cache=None, n_valid=None):
        """idx (B, T) -> the states after the final norm, (B, T, C)."""
        x = self.drop(self.wte(idx))
        context = Context(self.cfg, x, cache, n_valid)
        for layer, block in enumerate(self.blocks):
            x = block(x, context, None if cache is None else cache.layers[layer])
        if cache is not None:
            cache.advance()
        return self.norm(x)

    def init_cache(self, batch_size, max_len):
        """An empty cache for batch_size rows of up to max_len tokens."""
        w, shapes = self.wte.weight, [block.mix.cache_shapes(max_len) for block in self.blocks]
        return Cache(shapes, batch_size, max_len, w.device, compute_dtype(w))

    def flops_per_token(self):
        """Floating-point operations of one token's forward and backward pass in a sequence of
        block_size: 6 a weight of each matrix product, and 12 C a visible key, averaged over
        positions. The recurrences, some operations a channel, are not counted."""
        cfg, T, L = self.cfg, self.cfg.block_size, self.cfg.chunk
        weights = sum(p.numel() for p in self.blocks.parameters() if p.dim() == 2)
        weights += cfg.vocab_size * cfg.n_embd
        w = min(cfg.swa + 1, T)
        keys = dict(rat=sum(t // L + 1 for t in range(T)) / T,
                    reversed=sum(t % L + 1 for t in range(T)) / T,
                    swa=(w * (w + 1) / 2 + (T - w) * w) / T, attention=(T + 1) / 2, rnn=0)
        visible = sum(keys[cfg.kind(layer)] for layer in range(cfg.n_layer))
        return 6.0 * weights + 12.0 * cfg.n_embd * visible

"""
RAT: recurrence inside chunks, attention across them.

Attention reads every past token and pays for each. A gated linear recurrence reads one
state and forgets. RAT cuts the sequence into chunks of L tokens: inside a chunk a
recurrence accumulates keys and values; attention reads the chunks' final states.
For token t = (c, l), number l of chunk c = t // L, and u = RMSNorm(x):

    z, g, v, q, k = W_in u                    z, g, v of width C
    a = sigmoid(g + b_g)                      a forget gate a channel      (1)
    k~_{c,l} = a k~_{c,l-1} + (1 - a) k_{c,l}
    v~_{c,l} = a v~_{c,l-1} + (1 - a) v_{c,l}     zero before a chunk      (2)
    y_{c,l}  = attention of q to k~_{0,L-1}, ..., k~_{c-1,L-1}, the final
               states of earlier chunks, and its own k~_{c,l}, with their
               v~, in one softmax                                          (3)
    out      = x + W_o (sigmoid(z) * y)                                    (4)

q and k have G groups: head h reads group h % G, so that W_in is about as large as
attention's. The heads' keys differ all the same: the gate has a value for each channel.
RoPE rotates q and k~ (after the recurrence) by the chunk's number c. What queries attend
to for L = 4 (e: final state of a chunk, s: own state):

    token       0   1   2   3 | 4   5   6   7 | 8   9  10  11
    query 2             s     |               |
    query 5                 e |     s         |
    query 10                e |             e |         s

Baselines: mixer=rnn, v~ over the whole sequence, out = x + W_o (sigmoid(z) * v~);
mixer=attention, a Transformer; swa=1024, odd layers attend to the token and 1,024 before
it (RAT-SWA). L = 1 is attention with keys and values scaled by 1 - a, L = T a gated RNN.
Dropout is on embeddings and residual branches. rat and rnn ignore n_kv_head.

Paper: Wei, Yadav, Pascanu, Gulcehre 2025 (2507.04416). Its code, CLAIRE-Labo/RAT at
d4a8f54, has G = 2 and b_g, of which the paper does not speak. Departures from that code:
decoding works from the first token on; states stay in float32 (there bfloat16); norm_eps
is 1e-5 by default (there 1e-6).

Shapes: B batch, T new tokens, n chunks, C width, H heads, G groups of q and k
(in attention key/value heads), D head size, R slots of a layer's cache.
"""
import math
from dataclasses import dataclass

import torch
import torch.nn as nn

import kernels
from model_gpt import (MLP, Attention, BaseConfig, KVCache, LanguageModel, RMSNorm, apply_rope,
                       attention_bias, attention_fast, attention_naive, choice, init_weights,
                       mlp_width, rope_tables, upcast)


@dataclass
class Config(BaseConfig):
    chunk: int = 16     # L, tokens of a chunk
    mixer: str = choice("rat", "rnn", "attention")  # what mixes tokens
    swa: int = 0        # > 0: odd layers attend to the token and so many before it
    qk_groups: int = 0  # G (0: 2, or 1 where n_head is odd)
    gate_rank: int = 0  # rank of the projections of z and g (0: full)
    pos: str = choice("chunk", "rope", "nope")  # of rat: by chunk | token | none; swa: token
    n_mlp: int = 0      # hidden width of the MLP (0: 4 n_embd, 8/3 for swiglu)
    mlp: str = choice("gelu", "swiglu")
    tie_embeddings: bool = True  # the head is the embedding matrix
    qk_norm = False     # no key: for model_gpt's Attention

    def __post_init__(self):
        super().__post_init__()
        self.at_least(1, "chunk")
        self.at_least(0, "swa", "qk_groups", "gate_rank", "n_mlp")
        self.n_mlp = self.n_mlp or mlp_width(self)
        self.qk_groups = self.qk_groups or 2 - self.n_head % 2
        if self.n_head % self.qk_groups:
            raise ValueError(f"qk_groups={self.qk_groups} must divide n_head={self.n_head}")
        D, largest = self.head_dim, kernels.HEAD_SIZES[-1]
        if D % 2 and (self.swa or self.mixer != "rnn" and self.pos != "nope"):
            raise ValueError(f"RoPE needs an even head size: n_embd / n_head = {D}")
        if D > largest and (self.swa or self.mixer != "rnn"):
            raise ValueError(f"n_embd / n_head = {D} is more than {largest}")

    def kind(self, layer):
        """rat | rnn | attention | swa."""
        return "swa" if self.swa and layer % 2 else self.mixer


# ---- the method ----

class RAT(nn.Module):
    """Section 2.3."""

    def __init__(self, cfg):
        super().__init__()
        self.cfg = cfg
        C, GD, rank = cfg.n_embd, cfg.qk_groups * cfg.head_dim, cfg.gate_rank
        self.widths = [rank or C, rank or C, C, GD, GD]  # of z, g, v, q, k
        self.w_in = nn.Linear(C, sum(self.widths), bias=False)
        if rank:
            self.w_z, self.w_g = (nn.Linear(rank, C, bias=False) for _ in "zg")
        self.gate_bias = nn.Parameter(initial_gate_bias(C, cfg.chunk))  # b_g
        self.wo = nn.Linear(C, C, bias=False)

    def forward(self, u, layer, context):
        """u (B, T, C), normed -> (B, T, C)."""
        z, g, v, q, k = self.w_in(u).split(self.widths, -1)
        if self.cfg.gate_rank:
            z, g = self.w_z(z), self.w_g(g)  # (B, T, C)
        gate = torch.sigmoid(upcast(g) + self.gate_bias)  # (1)
        mix = rat_fast if self.cfg.fast else rat_naive
        if context.cache is not None:
            mix = rat_step if u.size(1) == 1 else rat_prefill
        y = mix(q, k, v, gate, layer, context)  # (B, T, C)
        return self.wo(torch.sigmoid(z) * y)  # (4)


def rat_naive(q, k, v, gate, layer, context):
    """(2) and (3) as written. q, k (B, T, G D), v, gate (B, T, C) -> y (B, T, C)."""
    L, D, chunk_of = context.cfg.chunk, context.cfg.head_dim, context.chunk_of[0]
    q, k = (for_heads(x, v) for x in (q, k))  # (B, T, C)
    states, zero = [], 0 * gate[:, 0]
    for x in (k, v):
        chunks = zip(gate.split(L, 1), upcast(x).split(L, 1))
        chunks = [recurrence(a, x, zero) for a, x in chunks]
        states.append(torch.cat(chunks, 1))
    q, own_k, own_v = (split_heads(x, D) for x in (q, *states))  # (B, H, T, D)
    q, own_k = context.rotate(q, "rat"), context.rotate(own_k, "rat")
    end_k, end_v = own_k[:, :, L - 1::L], own_v[:, :, L - 1::L]  # (B, H, n, D)
    ends = torch.arange(end_k.size(2), device=q.device)
    later = ends >= chunk_of[:, None]  # (T, n)
    s_ends = (upcast(q) @ upcast(end_k).mT).masked_fill(later, -math.inf)  # (B, H, T, n)
    s_own = (upcast(q) * own_k).sum(-1, keepdim=True)  # (B, H, T, 1)
    scores = torch.cat([s_ends, s_own], -1) / math.sqrt(D)
    p_ends, p_own = scores.softmax(-1).tensor_split([-1], -1)
    y = p_ends @ end_v + p_own * own_v  # (3)
    return y.transpose(1, 2).flatten(2).to(q.dtype)


def recurrence(gate, x, h):
    """(2) from state h (B, C): gate, x (B, T, C) -> all states (B, T, C)."""
    states = []
    for gate_t, x_t in zip(gate.unbind(1), x.unbind(1)):
        h = gate_t * h + (1 - gate_t) * x_t
        states.append(h)
    return torch.stack(states, 1)


def for_heads(x, like):
    """x (B, T, G D) of the groups, copied for all heads: head h uses group h % G."""
    return torch.cat([x] * (like.size(-1) // x.size(-1)), -1)


def split_heads(x, D):
    """(B, T, heads D) -> (B, heads, T, D)."""
    return x.unflatten(-1, (-1, D)).transpose(1, 2)


def initial_gate_bias(C, steps):
    """log u, u uniform in (1, steps - 1): memories of some 2 to `steps` tokens."""
    return torch.empty(C).uniform_(1, max(1, steps - 1)).log()


# ---- the fast path ----

def rat_fast(q, k, v, gate, layer, context):
    """The same: one softmax over the final states and one over the own state, whose
    log-sum-exp is its score, merge into the softmax over both."""
    cfg, L = context.cfg, context.cfg.chunk
    own_k, own_v = (kernels.scan(gate, upcast(x), L) for x in (for_heads(k, v), v))
    end_k, end_v = (split_heads(x[:, L - 1::L], cfg.head_dim) for x in (own_k, own_v))
    return read_states(q, own_k, own_v, context.rotate(end_k, "ends"), end_v, context)


def read_states(q, own_k, own_v, end_k, end_v, context):
    """(3) of q (B, T, G D), own states (B, T, C), final states (B, H, n, D), k~ rotated
    -> (B, T, C). A query and its own state have one angle: their product needs none."""
    cfg, D = context.cfg, context.cfg.head_dim
    groups = [x.unflatten(-1, (-1, cfg.qk_groups, D)) for x in (q, own_k)]
    s_own = (upcast(groups[0]) * groups[1]).sum(-1).flatten(2) / math.sqrt(D)  # (B, T, H)
    rotated = context.rotate(split_heads(q, D), "rat")  # (B, G, T, D)
    rotated = rotated.repeat(1, cfg.n_head // cfg.qk_groups, 1, 1)  # (B, H, T, D)
    q_pos = (context.chunk_of - 1).int().squeeze(0)  # (T,) or (B, T)
    y, lse = kernels.attend(rotated, end_k.to(q.dtype), end_v.to(q.dtype), q_pos)
    own_v = split_heads(own_v, D).to(q.dtype)
    y, _ = kernels.merge(y, lse, own_v, s_own.transpose(1, 2))
    return y.transpose(1, 2).flatten(2)


# ---- what it is compared with ----

class RNN(nn.Module):
    """The gated linear recurrence alone (section 2.2)."""

    def __init__(self, cfg):
        super().__init__()
        self.fast = cfg.fast
        self.w_in = nn.Linear(cfg.n_embd, 3 * cfg.n_embd, bias=False)  # z, g, v
        self.gate_bias = nn.Parameter(initial_gate_bias(cfg.n_embd, cfg.block_size))
        self.wo = nn.Linear(cfg.n_embd, cfg.n_embd, bias=False)

    def forward(self, u, layer, context):
        z, g, v = self.w_in(u).chunk(3, -1)
        gate, v = torch.sigmoid(upcast(g) + self.gate_bias), upcast(v)
        if context.padding is not None:
            gate = gate.masked_fill(context.padding[..., None], 1)  # keeps the state
        cache, T = context.caches[layer], u.size(1)
        state = torch.zeros_like(v[:, 0]) if cache is None else cache.state[:, 0]
        fast = self.fast and T > 1
        h = kernels.scan(gate, v, T, state) if fast else recurrence(gate, v, state)
        if cache is not None:
            cache.state[:, 0] = h[:, -1]
        return self.wo(torch.sigmoid(z) * h.to(z.dtype))


# ---- decoding: one path, whatever `fast` is ----

def rat_step(q, k, v, gate, layer, context):
    """The same for one new token a row. Its state takes its chunk's slot, over that of the
    token before, so that it attends to all slots so far."""
    cache, padding = context.caches[layer], context.padding
    kv = upcast(torch.cat([for_heads(k, v), v], 1))  # (B, 2, C)
    old = cache.state.masked_fill(context.starts_chunk[..., None], 0)
    new = gate * old + (1 - gate) * kv  # (2)
    cache.state.copy_(new if padding is None else cache.state.where(padding[..., None], new))
    heads = for_heads(q, v), new[:, :1], new[:, 1:]
    q, k, v = (split_heads(x, context.cfg.head_dim) for x in heads)  # (B, H, 1, D)
    cache.write(context.rotate(k, "rat"), v, context.chunk_of, padding)
    n = context.start // context.cfg.chunk + 1
    y = cache.attend_one(context.rotate(q, "rat"), n, context.chunk_of, padding)
    return y.transpose(1, 2).flatten(2)


def rat_prefill(q, k, v, gate, layer, context):
    """The same after cached tokens, on a grid of whole chunks. In an unfinished chunk gates
    of 1 stand before the new tokens: they keep the cached state."""
    cfg, L, cache = context.cfg, context.cfg.chunk, context.caches[layer]
    h0 = cache.state.masked_fill(context.starts_chunk[:, :1, None], 0)  # (B, 2, C)
    own, ends, gate = [], [], context.to_grid(gate, 1)
    for i, x in enumerate((for_heads(k, v), v)):
        h = kernels.scan(gate, context.to_grid(upcast(x), 0), L, h0[:, i])
        own_i, cache.state[:, i] = context.from_grid(h)
        own.append(own_i)  # (B, T, C)
        ends.append(split_heads(h[:, L - 1::L], cfg.head_dim))  # (B, H, n, D)
    cache.write(context.rotate(ends[0], "ends"), ends[1], context.ends, ~context.finished)
    n = min((context.start + q.size(1) - 1) // L, cache.R)
    return read_states(q, *own, cache.k[:, :, :n], cache.v[:, :, :n], context)


class LayerCache:
    """A layer's keys and values (B, heads, R + 1, D), and its states (B, 1 or 2, C) in
    float32. Slot R is spare: it takes padding and is never read."""

    def __init__(self, zeros, heads, R, states, cfg):
        self.R, self.state = R, upcast(zeros(states, cfg.n_embd))
        self.k, self.v = (zeros(heads, R + 1, cfg.head_dim) for _ in "kv")

    def write(self, k, v, slots, spare=None):
        """k, v (B, heads, T, D) to slots (B or 1, T); where `spare` to slot R."""
        if spare is not None:
            slots = slots.masked_fill(spare, self.R)
        rows = torch.arange(len(k), device=k.device)[:, None]
        for buffer, new in ((self.k, k), (self.v, v)):
            buffer[rows, :, slots] = new.transpose(1, 2).to(buffer.dtype)

    def attend_one(self, q, n, last_slot, padding):
        """Attention of q (B, H, 1, D) to the first n slots; in ragged rows (padding is given)
        to each row's up to last_slot (B, 1)."""
        k, v = (x[:, :, :min(n, self.R)].to(q.dtype) for x in (self.k, self.v))
        slots, bias = torch.arange(k.size(2), device=q.device), None
        if padding is not None:
            bias = attention_bias(last_slot, slots, dtype=q.dtype)
        return attention_fast(q, k, v, bias)

    def extend_ring(self, k, v, pos, end, n):
        """Write k, v to a ring, token t to slot t % R. Returns keys, values
        (B, heads, n + T, D) and positions of the n tokens before and of these."""
        R, old = self.R, pos[:, :1] + torch.arange(-n, 0, device=pos.device)
        rows = torch.arange(len(k), device=k.device)[:, None]
        before = [x[rows, :, old % R].transpose(1, 2) for x in (self.k, self.v)]
        # only the last R tokens, and no padding
        self.write(k, v, pos % R, (pos < end - R) | (pos >= end))
        k, v = (torch.cat([a.to(b.dtype), b], 2) for a, b in zip(before, (k, v)))
        old = old.masked_fill(old < 0, -R)  # no such token: outside every window of R
        return k, v, torch.cat([old, pos], 1)


class Cache(KVCache):
    """A LayerCache for each layer. Lengths are KVCache's."""

    def __init__(self, cfg, batch_size, max_len, device, dtype):
        H, G = cfg.n_head, cfg.n_kv_head
        sizes = dict(  # heads, R, states
            rat=(H, math.ceil(max_len / cfg.chunk), 2), rnn=(0, 0, 1),
            attention=(G, max_len, 0), swa=(G, min(cfg.swa + 1, max_len), 0))
        zeros = lambda *shape: torch.zeros(batch_size, *shape, device=device, dtype=dtype)
        with torch.inference_mode(False):  # so that calls outside may write too
            self.layers = [LayerCache(zeros, *sizes[cfg.kind(layer)], cfg)
                           for layer in range(cfg.n_layer)]
            self.lengths = torch.zeros(batch_size, dtype=torch.long, device=device)
        self.max_len, self.longest, self.ragged = max_len, 0, False

    def buffers(self):  # what KVCache resets and measures: all but the spare slots
        keys_values = [x[:, :, :-1] for layer in self.layers for x in (layer.k, layer.v)]
        return keys_values + [layer.state[:, None, None] for layer in self.layers]


class Context:
    """Where the T new tokens stand, and what they attend to."""

    def __init__(self, cfg, x, cache=None, n_valid=None, training=False):
        """x (B, T, C): the new tokens' embeddings."""
        T, L, offset = x.size(1), cfg.chunk, torch.arange(x.size(1), device=x.device)
        self.cfg, self.cache = cfg, cache
        self.caches = cache.layers if cache else [None] * cfg.n_layer
        self.rows = torch.arange(len(x), device=x.device)[:, None]
        self.start = before = 0  # tokens before; start: in the row that has most
        new, self.padding = T, None  # padding (B, T), or None where all rows are alike
        if cache is not None:
            self.start = cache.longest
            cache.place(T, n_valid)
            rows = slice(None if cache.ragged else 1)
            before, new = cache.lengths[rows, None], cache.new[rows, None]
            self.padding = offset >= new if cache.ragged else None
        self.pos, self.end = before + offset[None], before + new  # (B or 1, T or 1)
        self.chunk_of, self.starts_chunk = self.pos // L, self.pos % L == 0
        # the grid: a place for each token of the first chunk before, then the new ones
        self.at = self.pos - self.chunk_of[:, :1] * L  # (B or 1, T)
        self.last = (self.end - 1 - self.chunk_of[:, :1] * L).clamp(min=0)[:, 0]  # (B or 1,)
        missing = min(self.start, L - 1) if self.padding is not None else self.start % L
        self.grid_size = missing + T
        n = torch.arange(self.grid_size // L, device=x.device)
        self.ends = self.chunk_of[:, :1] + n  # chunks, (B or 1, n)
        self.finished = (self.ends + 1) * L <= self.end
        kinds = {cfg.kind(0), cfg.kind(1), "ends"}
        self.rope = {kind: self.rope_tables(kind, x) for kind in kinds}

    def rope_tables(self, kind, x):
        """cos and sin (B or 1, 1, T or n, D), or None without RoPE."""
        cfg, L = self.cfg, self.cfg.chunk
        if kind != "swa" and (cfg.mixer == "rnn" or cfg.pos == "nope"):
            return None
        pos = (self.ends + 1) * L - 1 if kind == "ends" else self.pos
        if kind in ("rat", "ends") and cfg.pos == "chunk":
            pos = pos // L
        tables = rope_tables(pos, cfg.head_dim, cfg.rope_theta, x.dtype)
        return [table[:, None] for table in tables]

    def rotate(self, x, kind):
        """x (B, heads, T, D) of the new tokens, or of the final states ("ends")."""
        return apply_rope(x, *self.rope[kind]) if self.rope[kind] else x

    def to_grid(self, x, fill):
        """x (B, T, C) in its places on the grid (B, grid_size, C), `fill` elsewhere."""
        if self.start == 0:
            return x
        grid = x.new_full((len(x), self.grid_size, x.size(2)), fill)
        grid[self.rows, self.at] = x
        return grid

    def from_grid(self, h):
        """The states h after the new tokens (B, T, C), and after the last one (B, C)."""
        last = h[self.rows[:, 0], self.last]
        return h if self.start == 0 else h[self.rows, self.at], last

    def attend(self, layer, q, k, v):
        """Attention to all tokens, or to a window (swa).
        q (B, H, T, D), k, v (B, G, T, D) -> (B, H, T, D)"""
        cfg, cache, kind, T = self.cfg, self.caches[layer], self.cfg.kind(layer), q.size(2)
        pos, k_pos, window = self.pos, self.pos, cfg.swa + 1 if kind == "swa" else T
        q, k = self.rotate(q, kind), self.rotate(k, kind)
        if cache and cfg.fast and T == 1:  # all of the ring is visible
            cache.write(k, v, pos % cache.R, self.padding)
            return cache.attend_one(q, self.start + 1, pos, self.padding)
        if cache:
            window = cache.R
            k, v, k_pos = cache.extend_ring(k, v, pos, self.end, min(self.start, cache.R))
        if cfg.fast and kind == "attention" and self.start == 0:
            return attention_fast(q, k, v, None)  # causal: padding is on the right
        if cfg.fast:
            pos, k_pos = (p.int().squeeze(0) for p in (pos, k_pos))
            return kernels.attend(q, k, v, pos, k_pos, window=window)[0]
        bias = attention_bias(pos, k_pos[:, None, None], window, dtype=upcast(q).dtype)
        return attention_naive(q, k, v, bias)


# ---- the model ----

class Block(nn.Module):
    def __init__(self, cfg, layer):
        super().__init__()
        self.norm1 = RMSNorm(cfg.n_embd, cfg.norm_eps)
        self.norm2 = RMSNorm(cfg.n_embd, cfg.norm_eps)
        mixers = dict(rat=RAT, rnn=RNN)  # else model_gpt's Attention
        self.mix = mixers.get(cfg.kind(layer), Attention)(cfg)
        self.mlp, self.drop = MLP(cfg), nn.Dropout(cfg.dropout)

    def forward(self, x, layer, context):
        x = x + self.drop(self.mix(self.norm1(x), layer, context))
        return x + self.drop(self.mlp(self.norm2(x)))


class Model(LanguageModel):
    """The language model, with any of the mixers."""
    context_type, cache_type = Context, Cache
    context_limit = None  # also with pos=rope

    def __init__(self, cfg):
        super().__init__(cfg, (Block(cfg, layer) for layer in range(cfg.n_layer)))
        init_weights(self)

    def flops_per_token(self):
        """As in model_gpt; none for recurrences."""
        cfg, T, L = self.cfg, self.cfg.block_size, self.cfg.chunk
        matrices = [p for p in self.blocks.parameters() if p.dim() == 2]
        weights = sum(p.numel() for p in matrices) + cfg.vocab_size * cfg.n_embd
        visible = dict(  # keys of token t
            rat=lambda t: t // L + 1, rnn=lambda t: 0, attention=lambda t: t + 1,
            swa=lambda t: min(t, cfg.swa) + 1)
        kinds = [cfg.kind(layer) for layer in range(cfg.n_layer)]
        keys = sum(visible[kind](t) for kind in kinds for t in range(T)) / T
        return 6.0 * weights + 12.0 * cfg.n_embd * keys

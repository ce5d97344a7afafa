"""
RAT: recurrence inside chunks, attention across them.

Attention reads every past token and pays for each; a gated linear recurrence reads one state and forgets. RAT cuts the
text into chunks of L positions. Inside a chunk a recurrence folds keys and values into a running state; across chunks
softmax attention reads the states that the earlier chunks ended in. Position t = (c, l), c = t // L, u = RMSNorm(x):

    z, v, g, q, k = W_in u         z, v, g of width n_embd; q, k of few heads: head h uses number h % qk_groups
    g = sigmoid(g + b_g)           the forget gate, one number for each channel, the same for keys and values
    k~_{c,l} = g k~_{c,l-1} + (1 - g) k_{c,l}
    v~_{c,l} = g v~_{c,l-1} + (1 - g) v_{c,l}                  the states, zero where a chunk starts; kept in float32
    y_{c,l}  = softmax attention of q, in one softmax, over the keys k~_{0,L-1}, ..., k~_{c-1,L-1} in which the earlier
               chunks ended and its own k~_{c,l}, of the values v~ there; scores q . k~ / sqrt(head_dim)
    out      = x + W_out (sigmoid(z) * y)

A key is k gated for its own head, so heads that share a group still have keys of their own. Rotary positions turn q and
k~ after the recurrence, by the number of the chunk: a query and its own state have the same angle. For L = 4, what
three of the queries read (e: the state in which a chunk ended, s: the own running state):

    position        0   1   2   3 | 4   5   6   7 | 8   9  10  11
    query 2                 s     |               |
    query 5                     e |     s         |
    query 10                    e |             e |         s

L = 1 is attention over keys and values scaled by (1 - g); L = T is a gated linear RNN. A cache holds one pair for every
L tokens and the running state.

Naive and fast. The naive path is a loop over positions and one masked softmax, as above. The fast path is three
operators of kernels.py: `scan` runs the recurrence of all chunks side by side, `attend` lets all queries read the ends
of earlier chunks, `merge` adds the own state to the softmax. `kernels.rat` is the same in one operator, forward and
backward, with the states rebuilt in registers; it runs wherever all rows start from their first token (training,
evaluation, prefill). Going on from a cache, and rows that are padded, compose the three; a single token is one step of
the recurrence.

The other layers, in the same model by settings:

    mixer=rnn          v~ over the whole text, out = x + W_out (sigmoid(z) * v~): no keys, no attention
    mixer=attention    softmax attention with rotary positions
    swa=1024           every odd layer is sliding-window attention, over itself and 1,024 tokens before (RAT-SWA)
    reversed=true      attention inside a chunk, a recurrence across (Appendix C.1, worse): with y the chunk's attention
                       h_{c,l} = g h_{c-1,L-1} + (1 - g) y_{c,l},  out = x + W_out (sigmoid(z) * h); one query head for
                       all, full keys, z of low rank

Source: Wei, Yadav, Pascanu, Gulcehre 2025, "RAT: Bridging RNN Efficiency and Attention Accuracy in Language Modeling".
Differences to its code: fused kernels; decoding works from the first token on, and any length with
any chunk; states stay in float32, where its are rounded to bfloat16; norm_eps is 1e-5 by default,
its is 1e-6, as in the configs of the paper's sizes.

Names: B batch, T new tokens, L positions of a chunk, n chunks, C width, H heads, G groups of queries and keys, D head
size, S slots of a cache.
"""
import math
from dataclasses import dataclass
from typing import NamedTuple, Optional

import torch
import torch.nn as nn

import kernels
from model_gpt import (MLP, KVCache, LanguageModel, RMSNorm, apply_rotary, attention_fast,
                       attention_naive, check_choice, check_sizes, compute_dtype, rotary_tables)


@dataclass
class Config:
    block_size: int = 256        # tokens in a training sequence; longer ones work too
    vocab_size: int = 257        # number of token ids
    n_layer: int = 4             # blocks
    n_head: int = 4              # query heads
    n_kv_head: int = 0           # key/value heads of attention and sliding-window layers (0: n_head)
    n_embd: int = 128            # width of the residual stream
    dropout: float = 0.0         # on embeddings and both residual branches
    fast: bool = True            # kernels.py; false: loops and softmaxes written out
    chunk: int = 16              # L, positions of a chunk
    mixer: str = "rat"           # rat | rnn | attention: what mixes positions
    reversed: bool = False       # rat the other way round: attention inside chunks, recurrence across
    swa: int = 0                 # w > 0: odd layers are sliding-window attention, over keys at distances 0 to w
    qk_groups: int = 0           # heads of q and k in rat (0: 2, or 1 where n_head is odd; n_head: one a head)
    gate_rank: int = 0           # rank of the projections of g and z in rat, of z if reversed (0: full, or head_dim)
    pos: str = "chunk"           # rotary positions: chunk, in attention token | rope: token | nope: none but in swa
    rope_theta: float = 10000.0  # rotary base
    n_mlp: int = 0               # hidden width of the MLP (0: 4 n_embd for gelu, 8/3 n_embd for swiglu)
    mlp: str = "gelu"            # gelu | swiglu
    tie_embeddings: bool = True  # the head is the embedding matrix
    norm_eps: float = 1e-5       # RMSNorm's epsilon

    def __post_init__(self):
        self.n_kv_head = self.n_kv_head or self.n_head
        check_sizes(self)
        check_choice(self, "mixer", ("rat", "rnn", "attention"))
        check_choice(self, "pos", ("chunk", "rope", "nope"))
        check_choice(self, "mlp", ("swiglu", "gelu"))
        self.qk_groups = self.qk_groups or 2 - self.n_head % 2
        if self.chunk < 1:
            raise ValueError(f"chunk={self.chunk} must be at least 1")
        if self.qk_groups < 1 or self.n_head % self.qk_groups:
            raise ValueError(f"qk_groups={self.qk_groups} must divide n_head={self.n_head}")
        if self.reversed and self.mixer != "rat":
            raise ValueError(f"reversed=true is of mixer=rat, not of mixer={self.mixer}")
        if min(self.swa, self.gate_rank, self.n_mlp) < 0:
            raise ValueError("swa, gate_rank and n_mlp are positive, or 0 for their default")
        if self.head_dim % 2 and self.has_rotary:
            raise ValueError(f"rotary positions need an even head size: n_embd / n_head = {self.head_dim}")
        if self.head_dim > kernels.HEAD_SIZES[-1] and (self.mixer != "rnn" or self.swa):
            raise ValueError(f"n_embd / n_head = {self.head_dim} is more than a head of {kernels.HEAD_SIZES[-1]}")
        if not self.rope_theta > 0 or not self.norm_eps > 0:
            raise ValueError("rope_theta and norm_eps must be positive")
        if self.n_mlp == 0:  # a multiple of 32 keeps the products aligned
            self.n_mlp = 4 * self.n_embd if self.mlp == "gelu" else 32 * math.ceil(self.n_embd / 12)

    @property
    def head_dim(self):
        return self.n_embd // self.n_head

    @property
    def has_rotary(self):
        return self.swa > 0 and self.n_layer > 1 or self.mixer != "rnn" and self.pos != "nope"

    def kind(self, layer):
        """What mixes positions in this layer: rat | rnn | attention | swa | reversed."""
        if self.swa and layer % 2:
            return "swa"
        return "reversed" if self.reversed else self.mixer


class Place(NamedTuple):
    """Where the new tokens of a call stand, which all layers need to know."""
    pos: torch.Tensor                           # (1 or B, T) their positions
    start: int = 0                              # tokens before them, in the row that has most
    valid: Optional[torch.Tensor] = None        # (B, T) which are real; None: all are, and rows are equally long
    by_chunk: Optional[tuple] = None            # rotary tables of RAT's layers
    by_token: Optional[tuple] = None            # rotary tables of attention's

    @property
    def from_the_start(self):
        """Nothing is before them, and nothing is padding."""
        return self.start == 0 and self.valid is None

    def real(self, mask):
        """mask (1 or B, T) where the tokens are real, false at padding."""
        return mask if self.valid is None else mask & self.valid


def with_rotary(cfg, place, dtype):
    """The place with the rotary tables that the layers need: by chunk or by token."""
    tables = lambda pos: rotary_tables(pos, cfg.head_dim, cfg.rope_theta, dtype)
    kinds, pos = {cfg.kind(layer) for layer in range(cfg.n_layer)}, place.pos.squeeze(0)
    if "rat" in kinds and cfg.pos != "nope":
        place = place._replace(by_chunk=tables(pos // cfg.chunk if cfg.pos == "chunk" else pos))
    if "swa" in kinds or kinds & {"attention", "reversed"} and cfg.pos != "nope":
        place = place._replace(by_token=tables(pos))
    return place


class Cache(KVCache):
    """What each layer keeps of the tokens so far: layers[l] is a dict of static buffers, whose rows
    are the batch's. Keys and values are (B, G, slots + 1, D), contiguous for each head, as
    attention reads them; the last slot takes what padding writes and is never read.

    Lengths and the placing of new tokens are KVCache's. A forward that raised may have moved the
    states of some layers: reset() before going on.
    """

    def __init__(self, layers, batch_size, max_len, device):
        self.layers = layers
        self.lengths = torch.zeros(batch_size, dtype=torch.long, device=device)
        self.max_len, self.longest, self.ragged = max_len, 0, False

    def nbytes(self):
        """Bytes held for keys, values and states, for all rows at max_len."""
        return sum((x if name == "state" else x[:, :, :-1]).nbytes
                   for store in self.layers for name, x in store.items())

    def reset(self, rows=None):
        """Empty the given rows (a list or tensor of indices; None: all), so that new sequences may start. What
        they held is zeroed: a NaN behind a mask would still poison the sum over values."""
        rows = slice(None) if rows is None else rows
        for store in self.layers:
            for buffer in store.values():
                buffer[rows] = 0
        self.lengths[rows] = 0
        self.longest = int(self.lengths.max()) if len(self.lengths) else 0
        self.ragged = self.longest > 0

    def place(self, T, n_valid=None):
        """The Place of T new tokens a row, n_valid (B,) of them real (0 to T; None: all). Raises ValueError where a
        row would outgrow max_len."""
        pos = super().place(T, n_valid)
        if not self.ragged:
            return Place(pos, self.longest)
        pos = self.lengths[:, None] + torch.arange(T, device=pos.device)    # padding after the last
        return Place(pos, self.longest, self.slots < self.max_len)


def wide(x):
    """x in float32, or float64 where it is that."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def turned(x, tables, at=slice(None)):
    """x (B, T, H, D) rotated by the rows `at` of the rotary tables; without tables as it is."""
    return x if tables is None else apply_rotary(x, *(table[..., at, :] for table in tables))


def running_states(gate, x, restart, state, fast):
    """x~_t = gate_t x~_{t-1} + (1 - gate_t) x_t, from `state` (B, ...; None: zero), and from zero at positions where
    restart (1 or B, T; None: nowhere) is true. gate, x (B, T, ...), float32 or better; gate broadcasts to x."""
    keep, new = gate, (1 - gate) * x
    if restart is not None:                                 # a gate of 0 forgets the state
        keep = gate.masked_fill(restart.view(*restart.shape, *[1] * (x.dim() - 2)), 0)
    if fast:
        state = None if state is None else state.flatten(1)
        keep, new = keep.expand_as(x).flatten(2), new.flatten(2)
        return kernels.scan(keep, new, x.size(1), state).view(x.shape)
    states, state = [], torch.zeros_like(x[:, 0]) if state is None else state
    for keep_t, new_t in zip(keep.unbind(1), new.unbind(1)):    # one backward for all slices
        state = keep_t * state + new_t
        states.append(state)
    return torch.stack(states, 1)


def n_slots(store):
    """How many slots of keys a store has, which is the index of the spare one after them."""
    return store["k"].size(2) - 1


def write(store, k, v, slots):
    """Write keys and values k, v (B, G, T, D) to slots: a slice, or (1 or B, T)."""
    for buffer, x in ((store["k"], k), (store["v"], v)):
        if isinstance(slots, slice):
            buffer[:, :, slots] = x
        else:
            rows = torch.arange(len(x), device=x.device)[:, None]
            buffer[rows, :, slots] = x.transpose(1, 2).to(buffer.dtype)


def attend_slots(q, store, top, last, place, fast):
    """One query a row, (B, H, 1, D), over the slots 0 .. last (B, 1) of a store, or all that it
    has; top bounds last."""
    end = min(top + 1, n_slots(store))
    k, v = store["k"][:, :, :end], store["v"][:, :, :end]                   # (B, G, S, D)
    bias = None
    if place.valid is not None:
        seen = torch.arange(end, device=q.device) <= last                               # (B, S)
        bias = torch.zeros(seen.shape, device=q.device, dtype=q.dtype).masked_fill(~seen, -math.inf)[:, None, None]
    elif not fast:
        bias = 0.0
    attention = attention_fast if fast else attention_naive
    return attention(q, k.to(q.dtype), v.to(q.dtype), bias)


def empty_store(B, device, dtype, **shapes):
    """{name: zeros (B, *shape)}, in dtype; a state is float32 at least, for it sums up."""
    kinds = {name: torch.promote_types(dtype, torch.float32) if name == "state" else dtype for name in shapes}
    return {name: torch.zeros(B, *shape, device=device, dtype=kinds[name]) for name, shape in shapes.items()}


def forget_gate(g, bias, place):
    """sigmoid(g + bias) of logits g (B, T, C) or (B, T, H, D), bias (C,), in float32 at least.
    Padding has 1, which leaves the state as it is."""
    gate = torch.sigmoid(wide(g) + wide(bias).view(g.shape[2:]))
    if place.valid is None:
        return gate
    return gate.masked_fill(~place.valid.view(*place.valid.shape, *[1] * (g.dim() - 2)), 1)


class Rat(nn.Module):
    """Recurrence inside chunks, attention across them (section 2.3)."""

    def __init__(self, cfg):
        super().__init__()
        self.cfg = cfg
        C, GD, rank = cfg.n_embd, cfg.qk_groups * cfg.head_dim, cfg.gate_rank
        self.widths = [rank or C, rank or C, C, GD, GD]                                 # of z, g, v, q, k
        self.w_in = nn.Linear(C, sum(self.widths), bias=False)
        if rank:
            self.w_z, self.w_g = nn.Linear(rank, C, bias=False), nn.Linear(rank, C, bias=False)
        self.gate_bias = nn.Parameter(initial_gate_bias(C, cfg.chunk))
        self.wo = nn.Linear(C, C, bias=False)

    def init_store(self, B, max_len, device, dtype):
        """A slot for each chunk, and the running state of k~ and v~ before rotary."""
        H, D, slots = self.cfg.n_head, self.cfg.head_dim, -(-max_len // self.cfg.chunk)
        shape = H, slots + 1, D
        return empty_store(B, device, dtype, k=shape, v=shape, state=(2, H, D))

    def forward(self, u, place, store=None):
        """u (B, T, C), normed -> (B, T, C)."""
        z, g, v, q, k = self.project(u)
        if self.cfg.fast and place.from_the_start:
            tables = place.by_chunk or (None, None)
            y, k_ends, v_ends = kernels.rat(q, k, v, g, z, wide(self.gate_bias), self.cfg.chunk, *tables)
            if store is not None:
                done = u.size(1) // self.cfg.chunk
                ends = slice(self.cfg.chunk - 1, None, self.cfg.chunk)
                k_done, v_done = turned(k_ends[:, :done], place.by_chunk, ends), v_ends[:, :done]
                write(store, k_done.transpose(1, 2), v_done.transpose(1, 2), slice(0, done))
                store["state"].copy_(torch.stack([k_ends[:, -1], v_ends[:, -1]], 1))
            return self.wo(y.flatten(2))
        one = u.size(1) == 1 and store is not None
        gate = forget_gate(g, self.gate_bias, place)
        y = (self.step if one else self.attend)(q, k, v, gate, place, store)
        return self.wo((torch.sigmoid(z) * y).flatten(2))

    def project(self, u):
        """z, g (logits) and v as (B, T, H, D), q and k as (B, T, G, D)."""
        z, g, v, q, k = self.w_in(u).split(self.widths, -1)
        if self.cfg.gate_rank:
            z, g = self.w_z(z), self.w_g(g)
        return [x.unflatten(-1, (-1, self.cfg.head_dim)) for x in (z, g, v, q, k)]

    def attend(self, q, k, v, gate, place, store):
        """y (B, T, H, D) of T new tokens, which go on from the store where there is one."""
        L, H, T = self.cfg.chunk, v.size(2), v.size(1)
        q, k = (x.repeat(1, 1, H // x.size(2), 1) for x in (q, k))                      # head h has group h % G
        before = None if store is None else store["state"]
        states = running_states(gate[:, :, None], torch.stack([wide(k), wide(v)], 2),
                                place.real(place.pos % L == 0), before, self.cfg.fast)
        k_own, v_own = states.unbind(2)                                     # (B, T, H, D)
        own = (wide(q) * k_own).sum(-1)                                                 # q's angle is its own key's
        if store is None:
            ends = slice(L - 1, None, L)
            k_ends, v_ends = turned(k_own[:, ends], place.by_chunk, ends), v_own[:, ends]
            k_ends, v_ends = k_ends.transpose(1, 2), v_ends.transpose(1, 2) # (B, H, n, D)
        else:
            store["state"].copy_(states[:, -1])
            ends = torch.where(place.real(place.pos % L == L - 1), place.pos // L, n_slots(store))
            write(store, turned(k_own, place.by_chunk).transpose(1, 2), v_own.transpose(1, 2), ends)
            used = min(-(-(place.start + T) // L), n_slots(store))
            k_ends, v_ends = store["k"][:, :, :used], store["v"][:, :, :used]
        read = read_fast if self.cfg.fast else read_naive
        return read(turned(q, place.by_chunk), k_ends.to(v.dtype), v_ends.to(v.dtype), own, v_own.to(v.dtype),
                    place.pos // L)

    def step(self, q, k, v, gate, place, store):
        """One token a row: the state takes it in, stands in its chunk's slot, and q reads the slots so far."""
        L, H, state = self.cfg.chunk, v.size(2), store["state"]                         # (B, 2, H, D)
        q, k = (x.repeat(1, 1, H // x.size(2), 1) for x in (q, k))
        first = place.real(place.pos % L == 0)[..., None, None]
        new = gate * torch.where(first, 0, state)                           # gate (B, 1, H, D)
        new = new + (1 - gate) * torch.cat([wide(k), wide(v)], 1)
        state.copy_(new)
        k, v = (x.transpose(1, 2) for x in (turned(new[:, :1], place.by_chunk), new[:, 1:]))
        top, slots = place.start // L, place.pos // L
        if place.valid is None:
            write(store, k, v, slice(top, top + 1))
        else:
            write(store, k, v, torch.where(place.valid, slots, n_slots(store)))
        q = turned(q, place.by_chunk).transpose(1, 2)
        return attend_slots(q, store, top, slots, place, self.cfg.fast).transpose(1, 2)


def initial_gate_bias(C, steps):
    """log u, u uniform in (1, steps - 1): gates that remember some 1 + u = 2 to `steps` tokens. Zero for steps <= 2."""
    if steps <= 2:
        return torch.zeros(C)
    return torch.empty(C).uniform_(1, steps - 1).log()


def read_naive(q, k_ends, v_ends, own, v_own, chunk_of):
    """One softmax over the ends of the chunks before a query's and its own state. q (B, T, H, D),
    rotated as the ends (B, H, n, D) are; own (B, T, H) q . k~; v_own (B, T, H, D); chunk_of
    (1 or B, T) -> (B, T, H, D)."""
    s = torch.einsum("bthd,bhnd->bthn", wide(q), wide(k_ends))
    seen = torch.arange(k_ends.size(2), device=q.device) < chunk_of[..., None]  # (1 or B, T, n)
    s = s.masked_fill(~seen[:, :, None], -math.inf)
    p = torch.cat([s, own[..., None]], -1).div(math.sqrt(q.size(-1))).softmax(-1).to(v_own.dtype)
    return torch.einsum("bthn,bhnd->bthd", p[..., :-1], v_ends) + p[..., -1:] * v_own


def read_fast(q, k_ends, v_ends, own, v_own, chunk_of):
    """The same: attend over the ends, merged with a softmax over the one own key, whose lse is its score."""
    q, v_own, own = (x.transpose(1, 2) for x in (q, v_own, own))
    q_pos = (chunk_of - 1).int()
    k_pos = torch.arange(k_ends.size(2), dtype=torch.int32, device=q.device)
    across = kernels.attend(q, k_ends, v_ends, q_pos if len(q_pos) > 1 else q_pos[0], k_pos)
    y, _ = kernels.merge(*across, v_own, own / math.sqrt(q.size(-1)))
    return y.transpose(1, 2)


class Rnn(nn.Module):
    """The gated linear recurrence alone (section 2.2): value, forget gate and output gate."""

    def __init__(self, cfg):
        super().__init__()
        self.cfg = cfg
        self.w_in = nn.Linear(cfg.n_embd, 3 * cfg.n_embd, bias=False)                   # z, g, v
        self.gate_bias = nn.Parameter(initial_gate_bias(cfg.n_embd, cfg.block_size))
        self.wo = nn.Linear(cfg.n_embd, cfg.n_embd, bias=False)

    def init_store(self, B, max_len, device, dtype):
        return empty_store(B, device, dtype, state=(self.cfg.n_embd,))

    def forward(self, u, place, store=None):
        """u (B, T, C), normed -> (B, T, C)."""
        z, g, v = self.w_in(u).chunk(3, -1)
        gate = forget_gate(g, self.gate_bias, place)
        states = running_states(gate, wide(v), None, None if store is None else store["state"], self.cfg.fast)
        if store is not None:
            store["state"].copy_(states[:, -1])
        return self.wo(torch.sigmoid(z) * states.to(z.dtype))


NEVER, EVER = -2 ** 28, 2 ** 27     # the position of a slot that holds nothing, and a window that hides only those


def read_ring(store, place):
    """Keys and values of a ring buffer, whose slot of position p is p % R, in order, for queries after them: k, v
    (B, G, S, D) and their positions (1 or B, S), negative where there is nothing."""
    R = n_slots(store)
    pos = place.pos[:, :1] + torch.arange(-min(R, place.start), 0, device=place.pos.device)   # that were there
    rows = torch.arange(len(store["k"]), device=pos.device)[:, None]
    return *(store[name][rows, :, pos % R].transpose(1, 2) for name in "kv"), pos


def ring_slots(store, place):
    """Where write puts new tokens: in a ring of R slots; padding and all before the last R tokens
    in the spare slot."""
    R, T, pos = n_slots(store), place.pos.size(1), place.pos
    if T == 1 and place.valid is None:
        return slice(place.start % R, place.start % R + 1)
    end = pos[:, :1] + (T if place.valid is None else place.valid.sum(1, keepdim=True))
    return torch.where(place.real(pos >= end - R), pos % R, R)


def attend_positions(q, k, v, q_pos, k_pos, window, fast):
    """Attention of q (B, H, T, D) over k, v (B, G, S, D) at ascending positions (1 or B, T or S):
    key j is visible iff 0 <= q_pos_i - k_pos_j < window. -> (B, H, T, D)"""
    if fast:
        q_pos, k_pos = (p.int() if len(p) > 1 else p[0].int() for p in (q_pos, k_pos))
        return kernels.attend(q, k, v, q_pos, k_pos, window=window)[0]
    distance = q_pos[:, None, :, None] - k_pos[:, None, None, :]            # (1 or B, 1, T, S)
    bias = torch.zeros(distance.shape, device=q.device, dtype=wide(q).dtype)
    bias = bias.masked_fill((distance < 0) | (distance >= window), -math.inf)
    return attention_naive(q, k, v, bias)


def attend_ring(q, k, v, place, store, window, fast, at=lambda pos: pos):
    """Attention of the new tokens (B, H or G, T, D) over each other and over the ring, where they
    are stored; `at` maps positions to those that the window measures. -> (B, H, T, D)"""
    q_pos = k_pos = at(place.pos)
    keys, values = k, v
    if store is not None and place.start > 0:
        k_old, v_old, old = read_ring(store, place)
        k_pos = torch.cat([torch.where(old < 0, NEVER, at(old)), k_pos], 1)
        keys, values = torch.cat([k_old.to(k.dtype), k], 2), torch.cat([v_old.to(v.dtype), v], 2)
    if store is not None:
        write(store, k, v, ring_slots(store, place))
    return attend_positions(q, keys, values, q_pos, k_pos, window, fast)


class Attention(nn.Module):
    """Softmax attention, plain or (swa) over a sliding window. A cache is a ring buffer of what can still be seen."""

    def __init__(self, cfg, sliding):
        super().__init__()
        self.cfg, self.sliding = cfg, sliding
        C, D = cfg.n_embd, cfg.head_dim
        self.wq = nn.Linear(C, cfg.n_head * D, bias=False)
        self.wk = nn.Linear(C, cfg.n_kv_head * D, bias=False)
        self.wv = nn.Linear(C, cfg.n_kv_head * D, bias=False)
        self.wo = nn.Linear(cfg.n_head * D, C, bias=False)

    def init_store(self, B, max_len, device, dtype):
        slots = min(self.cfg.swa + 1, max_len) if self.sliding else max_len
        shape = self.cfg.n_kv_head, slots + 1, self.cfg.head_dim
        return empty_store(B, device, dtype, k=shape, v=shape)

    def forward(self, u, place, store=None):
        """u (B, T, C), normed -> (B, T, C)."""
        q, k, v = (w(u).unflatten(-1, (-1, self.cfg.head_dim)) for w in (self.wq, self.wk, self.wv))
        tables = place.by_token if self.sliding or self.cfg.pos != "nope" else None
        q, k, v = (x.transpose(1, 2) for x in (turned(q, tables), turned(k, tables), v))
        return self.wo(self.attend(q, k, v, place, store).transpose(1, 2).flatten(2))

    def attend(self, q, k, v, place, store):
        """y (B, H, T, D) of the new tokens, which are stored."""
        fast = self.cfg.fast
        if store is not None and q.size(2) == 1:            # all that is in the ring is visible
            write(store, k, v, ring_slots(store, place))
            return attend_slots(q, store, place.start, place.pos, place, fast)
        if self.sliding or not fast or place.start > 0:
            return attend_ring(q, k, v, place, store, self.cfg.swa + 1 if self.sliding else EVER, fast)
        if store is not None:                                           # plainly causal: padding is on the right
            write(store, k, v, ring_slots(store, place))
        return attention_fast(q, k, v, None)


class Reversed(nn.Module):
    """Attention inside a chunk, recurrence across chunks: the negative ablation (Appendix C.1)."""

    def __init__(self, cfg):
        super().__init__()
        self.cfg = cfg
        C, D, rank = cfg.n_embd, cfg.head_dim, cfg.gate_rank or cfg.head_dim
        self.widths = [rank, C, C, C, D]                                # of z, g, v, k, q: q is one head for all
        self.w_in = nn.Linear(C, sum(self.widths), bias=False)
        self.w_z = nn.Linear(rank, C, bias=False)
        self.gate_bias = nn.Parameter(initial_gate_bias(C, cfg.block_size // cfg.chunk))
        self.wo = nn.Linear(C, C, bias=False)

    def init_store(self, B, max_len, device, dtype):
        """The keys and values of one chunk, and the state in which the last one ended."""
        H, D, slots = self.cfg.n_head, self.cfg.head_dim, min(self.cfg.chunk, max_len)
        shape = H, slots + 1, D
        return empty_store(B, device, dtype, k=shape, v=shape, state=(H * D,))

    def forward(self, u, place, store=None):
        """u (B, T, C), normed -> (B, T, C)."""
        L = self.cfg.chunk
        z, g, v, k, q = self.w_in(u).split(self.widths, -1)
        v, k, q = (x.unflatten(-1, (-1, self.cfg.head_dim)) for x in (v, k, q))
        tables = None if self.cfg.pos == "nope" else place.by_token     # which may be there for windows
        q, k = turned(q, tables).expand(v.shape), turned(k, tables)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        y = wide(self.attend(q, k, v, place, store).transpose(1, 2).flatten(2))         # (B, T, C)
        gate = forget_gate(g, self.gate_bias, place)
        # a state that changes at chunk ends only: elsewhere its gate is 1
        ends = (place.pos % L == L - 1)[..., None]
        before = torch.zeros_like(y[:, 0]) if store is None else store["state"]
        states = running_states(torch.where(ends, gate, 1), y, None, before, self.cfg.fast)
        entered = torch.cat([before[:, None], states[:, :-1]], 1)       # each position's state before it: its chunk's
        h = gate * entered + (1 - gate) * y
        if store is not None:
            store["state"].copy_(states[:, -1])
        return self.wo(torch.sigmoid(self.w_z(z)) * h.to(z.dtype))

    def attend(self, q, k, v, place, store):
        """y (B, H, T, D) of the new tokens over those of their chunk, which are stored."""
        L, pos, fast = self.cfg.chunk, place.pos, self.cfg.fast
        if store is not None and q.size(2) == 1:
            write(store, k, v, ring_slots(store, place))
            top = place.start if place.valid is not None else place.start % L
            return attend_slots(q, store, top, pos % L, place, fast)
        apart = lambda pos: pos + pos // L * L      # chunks stand L apart: a window of L ends where the chunk does
        return attend_ring(q, k, v, place, store, L, fast, apart)


class Block(nn.Module):
    def __init__(self, cfg, layer):
        super().__init__()
        kind = cfg.kind(layer)
        self.norm1, self.norm2 = RMSNorm(cfg.n_embd, cfg.norm_eps), RMSNorm(cfg.n_embd, cfg.norm_eps)
        self.mix = (Attention(cfg, kind == "swa") if kind in ("attention", "swa") else
                    {"rat": Rat, "rnn": Rnn, "reversed": Reversed}[kind](cfg))
        self.mlp, self.drop = MLP(cfg), nn.Dropout(cfg.dropout)

    def forward(self, x, place, store=None):
        x = x + self.drop(self.mix(self.norm1(x), place, store))
        return x + self.drop(self.mlp(self.norm2(x)))


class Model(LanguageModel):
    """The language model of RAT and its neighbours. See Config for its sizes and forward for its use."""

    def __init__(self, cfg):
        super().__init__()
        self.cfg = cfg
        self.wte = nn.Embedding(cfg.vocab_size, cfg.n_embd)
        self.drop = nn.Dropout(cfg.dropout)
        self.blocks = nn.ModuleList(Block(cfg, layer) for layer in range(cfg.n_layer))
        self.norm = RMSNorm(cfg.n_embd, cfg.norm_eps)
        self.head = nn.Linear(cfg.n_embd, cfg.vocab_size, bias=False)
        self.init_weights()

    @torch.no_grad()
    def init_weights(self):
        """N(0, 0.02) for every matrix, as in the paper; norms start at 1; gate biases: see initial_gate_bias."""
        for p in self.parameters():
            if p.dim() == 2:
                p.normal_(0, 0.02)
        if self.cfg.tie_embeddings:
            self.head.weight = self.wte.weight

    def hidden(self, idx, cache, n_valid):
        T = idx.size(1)
        place = Place(torch.arange(T, device=idx.device)[None]) if cache is None else cache.place(T, n_valid)
        x = self.drop(self.wte(idx))                                    # (B, T, C)
        place = with_rotary(self.cfg, place, x.dtype)
        for layer, block in enumerate(self.blocks):
            x = block(x, place, None if cache is None else cache.layers[layer])
        if cache is not None:
            cache.advance()
        return self.norm(x)

    def init_cache(self, batch_size, max_len):
        """An empty cache for batch_size rows of up to max_len tokens: max_len / chunk pairs for a RAT layer."""
        w = self.wte.weight
        with torch.inference_mode(False):                   # so that any later call may write
            layers = [block.mix.init_store(batch_size, max_len, w.device, compute_dtype(w))
                      for block in self.blocks]
            return Cache(layers, batch_size, max_len, w.device)

    def flops_per_token(self):
        """Floating-point operations of one token's forward and backward in a sequence of block_size: 6 for each weight
        of a matrix product, and 12 C for each key that attention reads, averaged over the positions. The recurrences,
        some operations a channel, are not counted."""
        cfg, T, L = self.cfg, self.cfg.block_size, self.cfg.chunk
        weights = sum(p.numel() for p in self.blocks.parameters() if p.dim() == 2) + cfg.vocab_size * cfg.n_embd
        w = min(cfg.swa + 1, T)
        keys = dict(rat=sum(t // L + 1 for t in range(T)) / T, rnn=0, attention=(T + 1) / 2,
                    swa=(w * (w + 1) / 2 + (T - w) * w) / T, reversed=sum(t % L + 1 for t in range(T)) / T)
        return 6.0 * weights + 12.0 * cfg.n_embd * sum(keys[cfg.kind(layer)] for layer in range(cfg.n_layer))

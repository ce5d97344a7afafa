"""
RAT: recurrence inside chunks, attention across them.

Attention reads every past token and pays for each. A gated linear recurrence reads one
state and forgets. RAT cuts the sequence into chunks of L tokens: inside a chunk a
recurrence accumulates keys and values; attention reads the chunks' final states.
For token t = (c, l), number l of chunk c = t // L, and u = RMSNorm(x):

    z, g, v, q, k = W_in u     z, g, v of width C; q, k of G groups: head h uses h % G
    a = sigmoid(g + b_g)       forget gate of each channel, for keys and values
    k~_{c,l} = a k~_{c,l-1} + (1 - a) k_{c,l}
    v~_{c,l} = a v~_{c,l-1} + (1 - a) v_{c,l}      zero before a chunk's first token
    y_{c,l}  = attention of q to the final states k~_{0,L-1}, ..., k~_{c-1,L-1} of
               earlier chunks and its own k~_{c,l}, with their v~, in one softmax
    out      = x + W_o (sigmoid(z) * y)

RoPE rotates q and k~ (after the recurrence) by the chunk's number c. What queries attend
to for L = 4 (e: final state of a chunk, s: own state):

    token       0   1   2   3 | 4   5   6   7 | 8   9  10  11
    query 2             s     |               |
    query 5                 e |     s         |
    query 10                e |             e |         s

fast=false is a loop over tokens and one softmax, as above. fast=true: `kernels.rat` does
all of it in training and in a first prefill of equally long rows. In other prefills
`scan` is the recurrence, `attend` reads the final states, `merge` adds the own state.
A decode step calls torch's fused attention once.

L = 1 is attention with keys and values scaled by 1 - a; L = T is a gated linear RNN.
Baselines, in the same model:

    mixer=rnn         v~ over the whole sequence, out = x + W_o (sigmoid(z) * v~)
    mixer=attention   softmax attention with RoPE
    swa=1024          odd layers attend to the token and 1,024 before it (RAT-SWA)
    reversed=true     attention y inside chunks; across them, in place of y,
                      h_{c,l} = a h_{c-1,L-1} + (1 - a) y_{c,l}   (Appendix C.1)

Dropout is on embeddings and residual branches. rat, rnn and reversed ignore n_kv_head.

Paper: Wei, Yadav, Pascanu, Gulcehre 2025 (2507.04416), github.com/CLAIRE-Labo/RAT.
Departures from its code: the fused operator; decoding works from the first token on;
states stay in float32 (there bfloat16); norm_eps is 1e-5 by default (there 1e-6).

Shapes: B batch, T new tokens, n chunks, C width, H heads, G groups of q and k
(in attention key/value heads), D head size, S keys, R slots of a layer's cache.
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
    chunk: int = 16              # L, tokens of a chunk
    mixer: str = choice("rat", "rnn", "attention")  # what mixes tokens
    reversed: bool = False       # attention inside chunks, recurrence across
    swa: int = 0                 # > 0: odd layers attend to so many earlier tokens, and itself
    qk_groups: int = 0           # G (0: 2, or 1 where n_head is odd)
    gate_rank: int = 0           # rank of z, g (0: full; reversed: of z, 0: head_dim)
    pos: str = choice("chunk", "rope", "nope")  # of rat: by chunk | token | none; swa: token
    n_mlp: int = 0               # hidden width of the MLP (0: 4 n_embd, 8/3 for swiglu)
    mlp: str = choice("gelu", "swiglu")
    tie_embeddings: bool = True  # the head is the embedding matrix
    qk_norm = False              # no key: for model_gpt's Attention

    def __post_init__(self):
        super().__post_init__()
        self.at_least(1, "chunk")
        self.at_least(0, "swa", "qk_groups", "gate_rank", "n_mlp")
        self.n_mlp = self.n_mlp or mlp_width(self)
        self.qk_groups = self.qk_groups or 2 - self.n_head % 2
        if self.n_head % self.qk_groups:
            raise ValueError(f"qk_groups={self.qk_groups} must divide n_head={self.n_head}")
        if self.reversed and self.mixer != "rat":
            raise ValueError(f"reversed=true is of mixer=rat, not {self.mixer}")
        D, largest = self.head_dim, kernels.HEAD_SIZES[-1]
        if D % 2 and (self.swa or self.mixer != "rnn" and self.pos != "nope"):
            raise ValueError(f"RoPE needs an even head size: n_embd / n_head = {D}")
        if D > largest and (self.swa or self.mixer != "rnn"):
            raise ValueError(f"n_embd / n_head = {D} is more than {largest}")

    def kind(self, layer):
        """rat | rnn | attention | swa | reversed."""
        if self.swa and layer % 2:
            return "swa"
        return "reversed" if self.reversed else self.mixer


# ---- recurrence inside chunks, attention across them ----

def recurrence_naive(gate, x, state):
    """h_t = gate_t h_{t-1} + x_t. gate, x, h (B, T, C or 2 C), state h_{-1} (B, the same)."""
    states = []
    for gate_t, x_t in zip(gate.unbind(1), x.unbind(1)):
        state = gate_t * state + x_t
        states.append(state)
    return torch.stack(states, 1)


def read_naive(q, k_own, v_own, k_ends, v_ends, chunk_of):
    """One softmax over the final states of chunks before the query's and its own state.
    q, k_own, v_own (B, H, T, D), k_ends, v_ends (B, H, n, D), chunk_of (B or 1, T)
    -> (B, H, T, D)."""
    later = torch.arange(k_ends.size(2), device=q.device) >= chunk_of[..., None]
    s_ends = upcast(q) @ upcast(k_ends).mT    # (B, H, T, n)
    s_ends = s_ends.masked_fill(later[:, None], -math.inf)
    s_own = (upcast(q) * k_own).sum(-1, keepdim=True)    # (B, H, T, 1)
    scores = torch.cat([s_ends, s_own], -1) / math.sqrt(q.size(-1))
    p_ends, p_own = scores.softmax(-1).tensor_split([-1], -1)
    return (p_ends @ upcast(v_ends) + p_own * v_own).to(q.dtype)


def read_fast(q, k_own, v_own, k_ends, v_ends, chunk_of):
    """The same: attention to final states, merged with the own state's value, whose
    log-sum-exp is its score."""
    q_pos = (chunk_of - 1).int().squeeze(0)    # (T,) or (B, T)
    k_pos = torch.arange(k_ends.size(2), dtype=torch.int32, device=q.device)
    y, lse = kernels.attend(q, k_ends.to(q.dtype), v_ends.to(q.dtype), q_pos, k_pos)
    s_own = (upcast(q) * k_own).sum(-1) / math.sqrt(q.size(-1))    # (B, H, T)
    return kernels.merge(y, lse, v_own.to(q.dtype), s_own)[0]


def initial_gate_bias(C, steps):
    """log u, u uniform in (1, steps - 1): memories of some 2 to `steps` tokens."""
    if steps <= 2:
        return torch.zeros(C)
    return torch.empty(C).uniform_(1, steps - 1).log()


def running_state(gate, x, layer, context, restart=None):
    """x~_t = gate_t x~_{t-1} + (1 - gate_t) x_t, on from the cache; from 0 where restart
    (B or 1, T). gate, x, x~ (B, T, C or 2 C). Padding has gate 1, so input 0."""
    cache = context.caches[layer]
    state = torch.zeros_like(x[:, 0]) if cache is None else cache.state
    if context.padding is not None:
        gate = gate.masked_fill(context.padding[..., None], 1)
    new = (1 - gate) * x
    if restart is not None:
        gate = gate.masked_fill(restart[..., None], 0)
    if context.cfg.fast and x.size(1) > 1:
        states = kernels.scan(gate, new, x.size(1), state)
    else:
        states = recurrence_naive(gate, new, state)
    if cache is not None:
        cache.state.copy_(states[:, -1])
    return states


class RAT(nn.Module):
    """Section 2.3. The context knows positions and caches."""

    def __init__(self, cfg):
        super().__init__()
        self.cfg = cfg
        C, GD, rank = cfg.n_embd, cfg.qk_groups * cfg.head_dim, cfg.gate_rank
        self.widths = [rank or C, rank or C, C, GD, GD]    # of z, g, v, q, k
        self.w_in = nn.Linear(C, sum(self.widths), bias=False)
        if rank:
            self.w_z, self.w_g = (nn.Linear(rank, C, bias=False) for _ in "zg")
        self.gate_bias = nn.Parameter(initial_gate_bias(C, cfg.chunk))
        self.wo = nn.Linear(C, C, bias=False)

    def forward(self, u, layer, context):
        """u (B, T, C), normed -> (B, T, C)."""
        cfg, cache, rope = self.cfg, context.caches[layer], context.rope["rat"]
        z, g, v, q, k = self.w_in(u).split(self.widths, -1)
        if cfg.gate_rank:
            z, g = self.w_z(z), self.w_g(g)
        if cfg.fast and context.start == 0 and context.padding is None:
            return self.wo(self.fused(q, k, v, g, z, rope, cache))
        copies = cfg.n_head // cfg.qk_groups    # head h uses group h % G, as in the authors' code
        kv = upcast(torch.cat([k] * copies + [v], -1))    # (B, T, 2 C)
        gate = torch.sigmoid(upcast(g) + self.gate_bias)
        gate = torch.cat([gate, gate], -1)    # the same for k and v
        kv = running_state(gate, kv, layer, context, restart=context.starts_chunk)
        heads = torch.cat([q] * copies, -1), *kv.chunk(2, -1)    # q, k~, v~
        q, k, v = (x.unflatten(-1, (-1, cfg.head_dim)).transpose(1, 2) for x in heads)
        if rope:
            q, k = apply_rope(q, *rope), apply_rope(k, *rope)
        y = self.read(q, k, v, context, cache)
        return self.wo(torch.sigmoid(z) * y.transpose(1, 2).flatten(2))

    def read(self, q, k, v, context, cache):
        """y of q, k~, v~, all (B, H, T, D). The cache has a slot a chunk. A decode step
        writes its own state there and attends to the slots so far."""
        L, c, T = self.cfg.chunk, context.chunk_of, q.size(2)
        if cache is None:
            k_ends, v_ends = k[:, :, L - 1::L], v[:, :, L - 1::L]
        elif self.cfg.fast and T == 1:
            cache.write(k, v, c, context.padding)
            n = min(context.start // L + 1, cache.R)   # not the spare one
            return cache.attend_one(q, n, None if context.padding is None else c)
        else:
            cache.write(k, v, c, ~context.ends_chunk)
            n = min((context.start + T) // L + 1, cache.R)
            k_ends, v_ends = cache.k[:, :, :n], cache.v[:, :, :n]
        read = read_fast if self.cfg.fast else read_naive
        return read(q, k, v, k_ends, v_ends, c)

    def fused(self, q, k, v, g, z, rope, cache):
        """sigmoid(z) * y (B, T, C) by one operator, which also returns k~ and v~ at chunk
        ends (B, n, H, D), before RoPE; the last chunk may be unfinished."""
        L, T, D = self.cfg.chunk, z.size(1), self.cfg.head_dim
        cos, sin = (table[0, 0] for table in rope) if rope else (None, None)
        heads = (x.unflatten(-1, (-1, D)) for x in (q, k, v, g, z))
        y, *ends = kernels.rat(*heads, upcast(self.gate_bias), L, cos, sin)
        if cache is not None:
            cache.state.copy_(torch.cat([x[:, -1] for x in ends], 1).flatten(1))
            k, v = (x[:, :T // L].transpose(1, 2) for x in ends)
            if rope:
                k = apply_rope(k, *(table[:, :, L - 1::L] for table in rope))
            cache.write(k, v, torch.arange(T // L, device=k.device)[None])
        return y.flatten(2)


# ---- what it is compared with ----

class RNN(nn.Module):
    """The gated linear recurrence alone (section 2.2)."""

    def __init__(self, cfg):
        super().__init__()
        self.w_in = nn.Linear(cfg.n_embd, 3 * cfg.n_embd, bias=False)    # z, g, v
        self.gate_bias = nn.Parameter(initial_gate_bias(cfg.n_embd, cfg.block_size))
        self.wo = nn.Linear(cfg.n_embd, cfg.n_embd, bias=False)

    def forward(self, u, layer, context):
        z, g, v = self.w_in(u).chunk(3, -1)
        gate = torch.sigmoid(upcast(g) + self.gate_bias)
        v = running_state(gate, upcast(v), layer, context)
        return self.wo(torch.sigmoid(z) * v.to(z.dtype))


class Reversed(nn.Module):
    """Attention inside chunks, recurrence across. All heads share one query."""

    def __init__(self, cfg):
        super().__init__()
        self.cfg = cfg
        C, D, rank = cfg.n_embd, cfg.head_dim, cfg.gate_rank or cfg.head_dim
        self.widths = [rank, C, C, C, D]    # of z, g, v, k, q
        self.w_in = nn.Linear(C, sum(self.widths), bias=False)
        self.w_z = nn.Linear(rank, C, bias=False)
        self.gate_bias = nn.Parameter(initial_gate_bias(C, cfg.block_size // cfg.chunk))
        self.wo = nn.Linear(C, C, bias=False)

    def forward(self, u, layer, context):
        cfg = self.cfg
        z, g, v, k, q = self.w_in(u).split(self.widths, -1)
        q, k, v = (x.unflatten(-1, (-1, cfg.head_dim)).transpose(1, 2) for x in (q, k, v))
        y = context.attend(layer, q.expand(v.shape), k, v)    # (B, H, T, D)
        y = upcast(y.transpose(1, 2).flatten(2))    # (B, T, C)
        gate = torch.sigmoid(upcast(g) + self.gate_bias)
        ends = context.ends_chunk[..., None]
        # h of the last chunk's end: gate 1 keeps it until the next
        states = running_state(torch.where(ends, gate, 1), y, layer, context)
        h = torch.where(ends, states, gate * states + (1 - gate) * y)
        return self.wo(torch.sigmoid(self.w_z(z)) * h.to(z.dtype))


# ---- decoding, and the context of new tokens ----

EMPTY_SLOT = -2 ** 27    # position of a slot without a token
MAX_WINDOW = 2 ** 26     # hides such slots only


class LayerCache:
    """A layer's keys and values (B, heads, R + 1, D), and its state (B, width) in float32.
    The spare slot R takes padding and is never read."""

    def __init__(self, zeros, heads, R, width, D):
        self.R, self.state = R, upcast(zeros(width))
        self.k, self.v = zeros(heads, R + 1, D), zeros(heads, R + 1, D)

    def write(self, k, v, slots, spare=None):
        """k, v (B, heads, T, D) to slots (B or 1, T); where `spare` to slot R."""
        if spare is not None:
            slots = slots.masked_fill(spare, self.R)
        rows = torch.arange(len(k), device=k.device)[:, None]
        for buffer, new in ((self.k, k), (self.v, v)):
            buffer[rows, :, slots] = new.transpose(1, 2).to(buffer.dtype)

    def attend_one(self, q, n, last_slot=None):
        """Attention of q (B, H, 1, D) to the first n slots, or up to last_slot (B, 1)."""
        k, v, bias = self.k[:, :, :n].to(q.dtype), self.v[:, :, :n].to(q.dtype), None
        if last_slot is not None:
            slots = torch.arange(n, device=q.device)
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
        return k, v, torch.cat([torch.where(old < 0, EMPTY_SLOT, old), pos], 1)


class Cache(KVCache):
    """A LayerCache for each layer. Lengths are KVCache's."""

    def __init__(self, cfg, batch_size, max_len, device, dtype):
        C, H, G, L = cfg.n_embd, cfg.n_head, cfg.n_kv_head, cfg.chunk
        sizes = dict(    # heads, R, width of the state
            rat=(H, math.ceil(max_len / L), 2 * C), rnn=(0, 0, C),
            attention=(G, max_len, 0), swa=(G, min(cfg.swa + 1, max_len), 0),
            reversed=(H, min(L, max_len), C))
        zeros = lambda *shape: torch.zeros(batch_size, *shape, device=device, dtype=dtype)
        with torch.inference_mode(False):    # so that calls outside may write too
            self.layers = [LayerCache(zeros, *sizes[cfg.kind(layer)], cfg.head_dim)
                           for layer in range(cfg.n_layer)]
            self.lengths = torch.zeros(batch_size, dtype=torch.long, device=device)
        self.max_len, self.longest, self.ragged = max_len, 0, False

    def buffers(self):    # what KVCache resets and measures: all but the spare slots
        keys_values = [x[:, :, :-1] for layer in self.layers for x in (layer.k, layer.v)]
        return keys_values + [layer.state[:, None, None] for layer in self.layers]


class Context:
    """Where the T new tokens stand, and what they attend to."""

    def __init__(self, cfg, x, cache=None, n_valid=None, training=False):
        """x (B, T, C): the new tokens' embeddings."""
        offset = torch.arange(x.size(1), device=x.device)
        self.cfg, self.caches = cfg, cache.layers if cache else [None] * cfg.n_layer
        self.start = 0          # tokens before, in the row that has most
        self.padding = None     # (B, T), or None where all rows are alike
        self.pos, self.end = offset[None], x.size(1)    # (B or 1, T)
        if cache is not None:
            self.start = cache.longest
            cache.place(x.size(1), n_valid)
            rows = slice(None if cache.ragged else 1)
            before, new = cache.lengths[rows, None], cache.new[rows, None]
            self.pos, self.end = before + offset, before + new
            self.padding = offset >= new if cache.ragged else None
        self.chunk_of, l = self.pos // cfg.chunk, self.pos % cfg.chunk
        self.starts_chunk = (l == 0) & (self.pos < self.end)    # not at padding
        self.ends_chunk = (l == cfg.chunk - 1) & (self.pos < self.end)
        kinds = {cfg.kind(0), cfg.kind(1)}
        self.rope = {kind: self.rope_tables(kind, x) for kind in kinds}

    def rope_tables(self, kind, x):
        """cos and sin (B or 1, 1, T, D), or None without RoPE."""
        cfg = self.cfg
        if kind == "rnn" or cfg.pos == "nope" and kind != "swa":
            return None
        by_chunk = kind == "rat" and cfg.pos == "chunk"
        counted = self.chunk_of if by_chunk else self.pos
        tables = rope_tables(counted, cfg.head_dim, cfg.rope_theta, x.dtype)
        return [table[:, None] for table in tables]

    def attend(self, layer, q, k, v):
        """Attention to all tokens, a window (swa), or the own chunk (reversed).
        q (B, H, T, D), k, v (B, G, T, D) -> (B, H, T, D)"""
        cfg, cache, kind = self.cfg, self.caches[layer], self.cfg.kind(layer)
        window = dict(attention=MAX_WINDOW, swa=cfg.swa + 1, reversed=cfg.chunk)[kind]
        pos, k_pos, rope = self.pos, self.pos, self.rope[kind]
        if rope:
            q, k = apply_rope(q, *rope), apply_rope(k, *rope)
        if cache and cfg.fast and q.size(2) == 1:    # all of a window's ring is visible
            cache.write(k, v, pos % cache.R, self.padding)
            last_slot = None if self.padding is None else pos
            if kind == "reversed":    # slots after it may be of the chunk before
                last_slot = pos % window
            return cache.attend_one(q, min(self.start + 1, cache.R), last_slot)
        if cache:
            k, v, k_pos = cache.extend_ring(k, v, pos, self.end, min(self.start, cache.R))
        if cfg.fast and kind == "attention" and self.start == 0:
            return attention_fast(q, k, v, None)    # causal: padding is on the right
        if kind == "reversed":    # moved apart, so that no window meets two
            pos, k_pos = (p + p // window * window for p in (pos, k_pos))
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
        mixers = dict(rat=RAT, rnn=RNN, reversed=Reversed)  # else model_gpt's Attention
        self.mix = mixers.get(cfg.kind(layer), Attention)(cfg)
        self.mlp, self.drop = MLP(cfg), nn.Dropout(cfg.dropout)

    def forward(self, x, layer, context):
        x = x + self.drop(self.mix(self.norm1(x), layer, context))
        return x + self.drop(self.mlp(self.norm2(x)))


class Model(LanguageModel):
    """The language model, with any of the mixers."""
    context_type, cache_type = Context, Cache
    context_limit = None    # also with pos=rope

    def __init__(self, cfg):
        super().__init__(cfg, (Block(cfg, layer) for layer in range(cfg.n_layer)))
        init_weights(self)

    def flops_per_token(self):
        """As in model_gpt; none for recurrences."""
        cfg, T, L = self.cfg, self.cfg.block_size, self.cfg.chunk
        matrices = [p for p in self.blocks.parameters() if p.dim() == 2]
        weights = sum(p.numel() for p in matrices) + cfg.vocab_size * cfg.n_embd
        visible = dict(    # keys of token t
            rat=lambda t: t // L + 1, rnn=lambda t: 0, attention=lambda t: t + 1,
            swa=lambda t: min(t, cfg.swa) + 1, reversed=lambda t: t % L + 1)
        kinds = [cfg.kind(layer) for layer in range(cfg.n_layer)]
        keys = sum(visible[kind](t) for kind in kinds for t in range(T)) / T
        return 6.0 * weights + 12.0 * cfg.n_embd * keys

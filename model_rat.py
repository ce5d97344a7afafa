"""
RAT: recurrence inside chunks, attention across them.

Attention reads every past token and pays for each. A gated linear recurrence reads
one state and forgets. RAT cuts the sequence into chunks of L tokens: inside a chunk
a recurrence accumulates keys and values; attention reads the chunks' final states.
For token t = (c, l), number l of chunk c = t // L, and u = RMSNorm(x):

    z, g, v, q, k = W_in u                    z, g, v of width C
    a = sigmoid(g + b_g)                      a forget gate a channel      (1)
    k~_{c,l} = a k~_{c,l-1} + (1 - a) k_{c,l}
    v~_{c,l} = a v~_{c,l-1} + (1 - a) v_{c,l}     zero before a chunk      (2)
    y_{c,l}  = attention of q to k~_{0,L-1}, ..., k~_{c-1,L-1}, the final
               states of earlier chunks, and its own k~_{c,l}, with their
               v~, in one softmax                                          (3)
    out      = x + W_o (sigmoid(z) * y)                                    (4)

To keep W_in as large as attention's, q and k have only G groups: head h reads group
h % G. The heads' keys differ all the same, as the gate has a value a channel. RoPE
rotates q and k~ (after the recurrence) by the chunk's number c. What queries attend
to for L = 4 (e: final state of an earlier chunk, s: own state):

    token       0   1   2   3 | 4   5   6   7 | 8   9  10  11
    query 2             s     |               |
    query 5                 e |     s         |
    query 10                e |             e |         s

L = 1 is attention with keys and values scaled by 1 - a, L = T a gated RNN. Baselines:
mixer=rnn, v~ over the whole sequence, out = x + W_o (sigmoid(z) * v~);
mixer=attention, a Transformer; swa=w, in odd layers a token attends to itself and to
w - 1 tokens before it (RAT-SWA; the paper's window of 1,024 does not count the token
itself, so it is swa=1025). Dropout is on embeddings and residual branches. rat and
rnn ignore n_kv_head.

Paper: Wei, Yadav, Pascanu, Gulcehre 2025 (2507.04416). Its code, CLAIRE-Labo/RAT at
d4a8f54, has G = 2 and b_g, of which the paper does not speak. Departures from that
code: decoding works from the first token on; states stay in float32 (there
bfloat16); norm_eps is 1e-5 by default (there 1e-6).

Shapes: B batch, T new tokens, S keys, n chunks, C width, H heads, G groups of q and
k (in attention key/value heads), D head size, R slots of a layer's cache.
"""
import math
from dataclasses import dataclass

import torch
import torch.nn as nn

import kernels
from model_gpt import (MLP, Attention, BaseConfig, KVCache, LanguageModel, RMSNorm, apply_rope,
                       attend, attention_bias, choice, init_weights, mlp_width, rope_tables,
                       upcast)


@dataclass
class Config(BaseConfig):
    chunk: int = 16     # L, tokens of a chunk
    mixer: str = choice("rat", "rnn", "attention")  # what mixes tokens
    swa: int = 0        # > 0: sliding window of odd layers, how many keys a token attends to
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
        # what mixes tokens in each layer: rat | rnn | attention | swa
        self.kinds = ["swa" if self.swa and i % 2 else self.mixer for i in range(self.n_layer)]
        D, largest = self.head_dim, kernels.HEAD_SIZES[-1]
        if {*self.kinds} != {"rnn"} and (D % 2 or D > largest):
            raise ValueError(f"n_embd / n_head = {D}: RoPE needs an even head size, the "
                             f"kernels at most {largest}")


# ---- the method ----

class RAT(nn.Module):
    """Section 2.3: (1) to (4) without the residual connection."""

    def __init__(self, cfg):
        super().__init__()
        self.cfg, C, GD = cfg, cfg.n_embd, cfg.qk_groups * cfg.head_dim
        rank = cfg.gate_rank or C
        self.widths = [rank, rank, C, GD, GD]   # of z, g, v, q, k
        self.w_in = nn.Linear(C, sum(self.widths), bias=False)
        low_rank = lambda: nn.Linear(rank, C, bias=False) if cfg.gate_rank else nn.Identity()
        self.w_z, self.w_g = low_rank(), low_rank()
        self.gate_bias = nn.Parameter(initial_gate_bias(C, cfg.chunk))  # b_g
        self.wo = nn.Linear(C, C, bias=False)

    def forward(self, u, layer, context):
        """u (B, T, C), normed -> (B, T, C)."""
        z, g, v, q, k = self.w_in(u).split(self.widths, -1)
        z, g = self.w_z(z), self.w_g(g)         # (B, T, C)
        copies = self.cfg.n_head // self.cfg.qk_groups
        # head h has group h % G
        q, k = q.repeat(1, 1, copies), k.repeat(1, 1, copies)   # (B, T, C)
        a = torch.sigmoid(upcast(g) + self.gate_bias)   # (1)
        mix = rat_fast if self.cfg.fast else rat_naive
        mix = rat_decode if context.cache else mix
        y = mix(q, k, v, a, layer, context)             # (2), (3)
        y = y.transpose(1, 2).flatten(2).to(z.dtype)    # (B, T, C)
        return self.wo(torch.sigmoid(z) * y)            # (4)


def rat_naive(q, k, v, a, layer, context):
    """(2) and (3) as written. q, k, v, a (B, T, C) -> y (B, H, T, D)."""
    D, L, T = context.cfg.head_dim, context.cfg.chunk, q.size(1)
    state_k = recurrence(a, upcast(k), L)               # (2): k~
    state_v = recurrence(a, upcast(v), L)               # v~
    q, state_k, state_v = (x.unflatten(-1, (-1, D)).transpose(1, 2)
                           for x in (upcast(q), state_k, state_v))
    cos, sin = context.rope["rat"]                      # of the chunk's number
    q, state_k = apply_rope(q, cos, sin), apply_rope(state_k, cos, sin)

    key = torch.arange(T, device=q.device)
    query = key[:, None]
    final = (key % L == L - 1) & (key // L < query // L)    # e: ends an earlier chunk
    own = key == query                                  # s
    bias = torch.zeros(T, T, device=q.device)
    bias = bias.masked_fill(~(final | own), -math.inf)
    return attend(q, state_k, state_v, bias, fast=False)    # (3)


def recurrence(a, x, chunk, h0=None):
    """(2) of a, x (B, T, C), from h0 (None: zero) and from zero at each further chunk: the
    states after each token, (B, T, C)."""
    states = []
    for t, (a_t, x_t) in enumerate(zip(a.unbind(1), x.unbind(1))):
        if t % chunk == 0:
            h = h0 if t == 0 and h0 is not None else 0
        h = a_t * h + (1 - a_t) * x_t
        states.append(h)
    return torch.stack(states, 1)


def initial_gate_bias(C, steps):
    """log u, u uniform in (1, steps - 1): memories of some 2 to `steps` tokens."""
    return torch.empty(C).uniform_(1, max(1, steps - 1)).log()


# ---- the fast path ----

def rat_fast(q, k, v, a, layer, context):
    """The same: scan is the recurrence, and read_states has (3) in two parts."""
    D, L = context.cfg.head_dim, context.cfg.chunk
    state_k, state_v = (kernels.scan(a, upcast(x), L) for x in (k, v))
    q, state_k, state_v = (x.unflatten(-1, (-1, D)).transpose(1, 2)
                           for x in (q, state_k, state_v))
    end_k, end_v = state_k[:, :, L - 1::L], state_v[:, :, L - 1::L]     # (B, H, n, D)
    end_k = apply_rope(end_k, *(table[:, :, L - 1::L] for table in context.rope["rat"]))
    return read_states(q, state_k, state_v, end_k, end_v, context)


def read_states(q, own_k, own_v, end_k, end_v, context):
    """(3) of q and its own state (B, H, T, D), before RoPE, and final states (B, H, n, D),
    after it. The softmax over final states and the one over the own state, whose
    log-sum-exp is its score, merge into the softmax over both."""
    # a query and its own state have the same angle: their product needs no RoPE
    own_score = (upcast(q) * own_k).sum(-1) / math.sqrt(q.size(-1))     # (B, H, T)
    q = apply_rope(q, *context.rope["rat"])
    last = (context.chunk_of - 1).int().squeeze(0)      # complete chunk, (T,) or (B, T)
    y, lse = kernels.attend(q, end_k.to(q.dtype), end_v.to(q.dtype), last)
    return kernels.merge(y, lse, own_v.to(q.dtype), own_score)[0]


# ---- what it is compared with ----

class RNN(nn.Module):
    """The gated linear recurrence alone (section 2.2)."""

    def __init__(self, cfg):
        super().__init__()
        self.fast = cfg.fast
        self.w_in = nn.Linear(cfg.n_embd, 3 * cfg.n_embd, bias=False)   # z, g, v
        self.gate_bias = nn.Parameter(initial_gate_bias(cfg.n_embd, cfg.block_size))
        self.wo = nn.Linear(cfg.n_embd, cfg.n_embd, bias=False)

    def forward(self, u, layer, context):
        z, g, v = self.w_in(u).chunk(3, -1)
        a, v, T = torch.sigmoid(upcast(g) + self.gate_bias), upcast(v), u.size(1)
        if context.padding is not None:
            a = a.masked_fill(context.padding[..., None], 1)    # keeps the state
        scan = kernels.scan if self.fast and T > 1 else recurrence
        h = scan(a, v, T, context.cache.state[layer] if context.cache else None)
        if context.cache:
            context.cache.state[layer].copy_(h[:, -1])
        return self.wo(torch.sigmoid(z) * h.to(z.dtype))


class TokenAttention(Attention):
    """model_gpt's Attention, of all tokens or of a window, which is faster here: it leaves out
    the blocks of keys before the window."""

    def forward(self, u, layer, context):
        cfg, cache, T, kind = self.cfg, context.cache, u.size(1), self.cfg.kinds[layer]
        q, k, v = (w(u).unflatten(-1, (-1, cfg.head_dim)).transpose(1, 2)
                   for w in (self.wq, self.wk, self.wv))
        q, k = (apply_rope(x, *context.rope[kind]) for x in (q, k))
        if cache and T == 1:
            y = decode_one(q, k, v, layer, context, context.pos, cache.longest + 1)
        else:
            window = cache.R[layer] if cache else cfg.swa
            k, v, k_pos = cache.extend(layer, k, v, context) if cache else (k, v, context.pos)
            if cfg.fast and kind == "swa":
                q_pos, k_pos = (p.int().squeeze(0) for p in (context.pos, k_pos))
                y, _ = kernels.attend(q, k, v, q_pos, k_pos, window=window)
            else:
                bias = None     # causal
                if kind == "swa" or k.size(2) > T:
                    bias = attention_bias(context.pos, k_pos[:, None, None], window)
                y = attend(q, k, v, bias, fast=cfg.fast)
        return self.wo(y.transpose(1, 2).flatten(2))    # (B, T, C)


class Context:
    """Where the T new tokens stand: positions pos and chunks chunk_of (B or 1, T), the rows
    that are padding or start a chunk, and RoPE's tables for each kind of layer."""

    def __init__(self, cfg, x, cache=None, n_valid=None):
        """x (B, T, C): the new tokens' embeddings."""
        self.cfg, self.cache, self.padding = cfg, cache, None
        self.slots = cache.place(x.size(1), n_valid) if cache else None
        self.pos = self.slots.pos if cache else torch.arange(x.size(1), device=x.device)[None]
        self.chunk_of = self.pos // cfg.chunk
        self.starts = (self.pos % cfg.chunk == 0)[..., None]    # chunks, (B or 1, T, 1)
        if cache and self.slots.at is not None:     # rows may differ
            self.padding = self.slots.at == cache.max_len       # (B, T)
            self.starts = self.starts & ~self.padding[..., None]
        numbers = dict(chunk=self.chunk_of, rope=self.pos, nope=0 * self.pos)
        numbers = dict(rat=numbers[cfg.pos], swa=self.pos,
                       attention=numbers["nope" if cfg.pos == "nope" else "rope"])
        self.rope = {}              # {kind: cos and sin (B or 1, 1, T, D / 2)}
        for kind in numbers.keys() & cfg.kinds:
            tables = rope_tables(numbers[kind], cfg.head_dim, cfg.rope_theta, x.dtype)
            self.rope[kind] = [table[:, None] for table in tables]


# ---- decoding: one path, whatever `fast` is ----

def rat_decode(q, k, v, a, layer, context):
    """(2) and (3) of tokens after cached ones, with k and v in one recurrence."""
    a, kv = a.repeat(1, 1, 2), upcast(torch.cat([k, v], -1))    # (B, T, 2 C)
    if context.padding is not None:
        a = a.masked_fill(context.padding[..., None], 1)    # keeps the state
    decode = rat_step if q.size(1) == 1 else rat_prefill
    return decode(q, kv, a, layer, context)


def rat_step(q, kv, a, layer, context):
    """One new token a row. Its state takes its chunk's slot, over that of the token before,
    so that all slots so far are visible."""
    cfg, cached = context.cfg, context.cache.state[layer]
    state = cached[:, None].masked_fill(context.starts, 0)
    state = a * state + (1 - a) * kv                # (2)
    cached.copy_(state[:, 0])
    q, k, v = (x.unflatten(-1, (-1, cfg.head_dim)).transpose(1, 2)
               for x in (q, *state.chunk(2, -1)))   # (B, H, 1, D)
    q, k = (apply_rope(x, *context.rope["rat"]) for x in (q, k))
    n = context.cache.longest // cfg.chunk + 1
    return decode_one(q, k, v, layer, context, context.chunk_of, n)


def decode_one(q, k, v, layer, context, number, n):
    """Write k, v (B, heads, 1, D) of one new token a row to slot `number` (B or 1, 1) of a
    ring. q attends to the first n slots, in ragged rows to each row's own."""
    cache, R, padding, bias = context.cache, context.cache.R[layer], context.padding, None
    at = number % R
    cache.write(layer, k, v, at if padding is None else at.masked_fill(padding, R))
    k, v = (x[layer][:, :, :min(n, R)].to(q.dtype) for x in (cache.k, cache.v))
    if padding is not None:
        bias = attention_bias(number, torch.arange(k.size(2), device=k.device), dtype=q.dtype)
    return attend(q, k, v, bias, fast=True)


def rat_prefill(q, kv, a, layer, context):
    """T new tokens a row. Final states go into the cache, and all are read from there."""
    cache, D, L, T = context.cache, context.cfg.head_dim, context.cfg.chunk, q.size(1)
    R, rows, pos = cache.R[layer], cache.rows, context.pos.expand(len(q), T)
    n_new, chunk = context.slots.n_new[:, None], L      # (B, 1)
    if cache.longest:
        # Each row's chunks start elsewhere. There, in one scan of T tokens, a gate of 0
        # forgets, and its input is (1 - a) kv already.
        kv = torch.where(context.starts, (1 - a) * kv, kv)
        a, chunk = a.masked_fill(context.starts, 0), T
    state = kernels.scan(a, kv, chunk, cache.state[layer])      # (2)
    cache.state[layer].copy_(state[rows, n_new.clamp(min=1) - 1][:, 0])
    q, k, v = (x.unflatten(-1, (-1, D)).transpose(1, 2)
               for x in (q, *state.chunk(2, -1)))       # (B, H, T, D)
    # chunks end at every L-th token, from the first end on
    ends = L - 1 - pos[:, :1] % L + torch.arange(0, T, L, device=q.device)
    real, ends = ends < n_new, ends.clamp(max=T - 1)    # (B, n)
    rope = [x.expand(len(q), 1, T, -1)[rows, :, ends] for x in context.rope["rat"]]
    end_k, end_v = apply_rope(k[rows, :, ends], *rope), v[rows, :, ends]    # (B, n, H, D)
    at = torch.where(real, pos[rows, ends] // L, R)
    cache.write(layer, end_k.transpose(1, 2), end_v.transpose(1, 2), at)
    # chunks before the last token's
    n = min((cache.longest + T - 1) // L, R)
    end_k, end_v = cache.k[layer][:, :, :n], cache.v[layer][:, :, :n]
    return read_states(q, k, v, end_k, end_v, context)


class Cache(KVCache):
    """k[layer], v[layer] (B, heads, R[layer] + 1, D): a slot for each chunk (rat) or token,
    of a window a ring. Slot R is spare: it takes padding and is never read. state[layer]
    (B, 2 C): k~ and v~ before RoPE, in float32 or better; the RNN's is (B, C)."""

    def __init__(self, cfg, batch_size, max_len, device, dtype):
        H, G, chunks = cfg.n_head, cfg.n_kv_head, math.ceil(max_len / cfg.chunk)
        sizes = dict(rat=(H, chunks, 2), rnn=(0, 0, 1), attention=(G, max_len, 0),
                     swa=(G, min(cfg.swa, max_len), 0))
        heads, self.R, states = zip(*(sizes[kind] for kind in cfg.kinds))
        zeros = lambda *shape: torch.zeros(batch_size, *shape, device=device, dtype=dtype)
        with torch.inference_mode(False):           # so that calls outside may write too
            self.k, self.v = ([zeros(h, R + 1, cfg.head_dim) for h, R in zip(heads, self.R)]
                              for _ in "kv")
            self.state = [upcast(zeros(n * cfg.n_embd)) for n in states]
            self.lengths = torch.zeros(batch_size, dtype=torch.long, device=device)
        self.rows = torch.arange(batch_size, device=device)[:, None]
        self.max_len, self.longest, self.ragged = max_len, 0, False

    def buffers(self):  # what KVCache resets and measures: all but the spare slots
        return [x[:, :, :-1] for x in self.k + self.v] + [x[:, None, None] for x in self.state]

    def write(self, layer, k, v, at):
        """k, v (B, heads, n, D) to slots at (B or 1, n)."""
        for buffer, new in ((self.k[layer], k), (self.v[layer], v)):
            buffer[self.rows, :, at] = new.transpose(1, 2).to(buffer.dtype)

    def extend(self, layer, k, v, context):
        """Write k, v (B, G, T, D) to the ring, token t to slot t % R. Returns keys, values
        (B, G, S, D) and positions (B or 1, S) of the R tokens before and of these."""
        R, pos, padding = self.R[layer], context.pos, context.padding
        old = pos[:, :1] + torch.arange(-min(self.longest, R), 0, device=k.device)
        before = [x[layer][self.rows, :, old % R].transpose(1, 2) for x in (self.k, self.v)]
        spare = pos < (self.lengths + context.slots.n_new)[:, None] - R     # not the last R
        if padding is not None:
            spare, pos = spare | padding, pos.masked_fill(padding, self.max_len)
        self.write(layer, k, v, torch.where(spare, R, pos % R))
        k, v = (torch.cat([a.to(b.dtype), b], 2) for a, b in zip(before, (k, v)))
        old = old.masked_fill(old < 0, -R)          # no such token: outside the window
        return k, v, torch.cat([old, pos], 1)


# ---- the model ----

class Block(nn.Module):
    def __init__(self, cfg, layer):
        super().__init__()
        self.norm1 = RMSNorm(cfg.n_embd, cfg.norm_eps)
        self.norm2 = RMSNorm(cfg.n_embd, cfg.norm_eps)
        mixers = dict(rat=RAT, rnn=RNN, attention=TokenAttention, swa=TokenAttention)
        self.mix = mixers[cfg.kinds[layer]](cfg)
        self.mlp, self.drop = MLP(cfg), nn.Dropout(cfg.dropout)

    def forward(self, x, layer, context):
        x = x + self.drop(self.mix(self.norm1(x), layer, context))
        return x + self.drop(self.mlp(self.norm2(x)))


class Model(LanguageModel):
    """The language model, with any of the mixers."""
    context_type = Context
    context_limit = None    # also with pos=rope

    def __init__(self, cfg):
        super().__init__(cfg, [Block(cfg, layer) for layer in range(cfg.n_layer)])
        init_weights(self)

    def init_cache(self, batch_size, max_len):
        return Cache(self.cfg, *self.cache_sizes(batch_size, max_len))

    def flops_per_token(self):
        """As in model_gpt; none for recurrences."""
        cfg, T, L = self.cfg, self.cfg.block_size, self.cfg.chunk
        weights = sum(p.numel() for p in self.blocks.parameters() if p.dim() == 2)
        weights += cfg.vocab_size * cfg.n_embd
        visible = dict(     # keys of token t
            rat=lambda t: t // L + 1, rnn=lambda t: 0, attention=lambda t: t + 1,
            swa=lambda t: min(t + 1, cfg.swa))
        keys = sum(visible[kind](t) for kind in cfg.kinds for t in range(T)) / T
        return 6.0 * weights + 12.0 * cfg.n_embd * keys

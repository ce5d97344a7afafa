"""
RAT: recurrence inside chunks, attention across them.

Attention pays for every past token. A gated linear recurrence reads one state and
forgets. RAT cuts the sequence into chunks of K tokens: a recurrence sums up keys
and values inside a chunk, attention reads the chunks' final states. For token
t = (c, l), number l of chunk c = t // K, and u = RMSNorm(x):

    z, g, v, q, k = W_in u              z, g, v of width W
    a = sigmoid(g + b_g)                one forget gate per channel (1)
    k~_{c,l} = a k~_{c,l-1} + (1 - a) k_{c,l}
    v~_{c,l} = a v~_{c,l-1} + (1 - a) v_{c,l}   0 before a chunk    (2)
    y_{c,l}  = attention of q to k~_{0,K-1}, ..., k~_{c-1,K-1},
               the final states of earlier chunks, and to its own
               k~_{c,l}, with their v~, in one softmax              (3)
    out      = x + W_o (sigmoid(z) * y)                             (4)

q and k have only G groups, so that W_in is small: head h reads group h % G. Heads of
a group share query and k; their states k~ differ, as each channel has its gate. RoPE
rotates q and k~, after the recurrence, by the chunk's number c. What queries attend
to for K = 4 (f: final state of an earlier chunk, o: own state):

    token       0   1   2   3 | 4   5   6   7 | 8   9  10  11
    query 2             o     |               |
    query 5                 f |     o         |
    query 10                f |             f |         o

K = 1 is attention with keys and values scaled by 1 - a, K = T a gated RNN. Baselines:
mixer=rnn, v~ over the whole sequence, out = x + W_o (sigmoid(z) * v~);
mixer=attention, a Transformer. swa=w (RAT-SWA): in odd layers a token attends to w
keys, its own included (the paper's 1,024 is w = 1,025). Dropout: embeddings, both branches.

Paper: Wei, Yadav, Pascanu, Gulcehre 2025 (2507.04416). Only in its code
(CLAIRE-Labo/RAT, d4a8f54): b_g, G = 2, h % G. Departures from it: decoding needs no
full first chunk; states are float32, not bfloat16; norm_eps is 1e-5, not 1e-6;
norms and b_g do not decay (there b_g does, so that gates forget faster).

Shapes: B batch, T new tokens, S keys, n chunks, C width, H heads, D head size,
W = H D, G groups (in attention and swa: key/value heads).
"""
import math
from dataclasses import dataclass

import torch
import torch.nn as nn

import kernels
from decoding import KVCache
from model_gpt import (MLP, Attention, BaseConfig, LanguageModel, RMSNorm, apply_rope,
                       attend, attention_bias, choice, init_weights, mlp_width, rope_tables,
                       upcast, visible_keys)


@dataclass
class Config(BaseConfig):
    chunk: int = 16  # K, tokens of a chunk
    mixer: str = choice("rat", "rnn", "attention")  # what mixes tokens
    swa: int = 0  # window of odd layers, own key included (0: as even ones)
    qk_groups: int = 0  # G (0: 2, or 1 where n_head is odd)
    pos: str = choice("chunk", "rope", "none")  # RoPE counts chunks | tokens | nothing
    n_mlp: int = 0  # hidden width of the MLP (0: 4 n_embd, 8/3 for swiglu)
    mlp: str = choice("gelu", "swiglu")
    tie_embeddings: bool = True  # the head is the embedding matrix
    qk_norm = False  # model_gpt's Attention asks for it

    def __post_init__(self):
        super().__post_init__()
        self.n_mlp = self.n_mlp or mlp_width(self)
        self.qk_groups = self.qk_groups or 2 - self.n_head % 2
        # of each layer: rat | rnn | attention | swa
        self.kinds = ["swa" if self.swa and i % 2 else self.mixer for i in range(self.n_layer)]
        check(self)


# ---- the method ----

class RAT(nn.Module):
    """Section 2.3: (1) to (4) without the residual connection."""

    def __init__(self, cfg):
        super().__init__()
        self.cfg, C, W = cfg, cfg.n_embd, cfg.n_head * cfg.head_dim
        shared = cfg.qk_groups * cfg.head_dim
        self.widths = [W, W, W, shared, shared]  # of z, g, v, q, k
        self.w_in = nn.Linear(C, sum(self.widths), bias=False)
        self.gate_bias = nn.Parameter(initial_gate_bias(W, cfg.chunk))  # b_g
        self.wo = nn.Linear(W, C, bias=False)

    def forward(self, u, layer, context):
        """u (B, T, C), normed; context: see Context -> (B, T, C)."""
        z, g, v, q, k = self.w_in(u).split(self.widths, -1)
        copies = self.cfg.n_head // self.cfg.qk_groups
        q, k = q.repeat(1, 1, copies), k.repeat(1, 1, copies)  # head h has group h % G
        k, v = upcast(k), upcast(v)  # the states' type
        a = torch.sigmoid(upcast(g) + self.gate_bias)  # (1)
        if isinstance(context, CachedContext):        # (2), (3)
            y = rat_decode(q, k, v, a, layer, context)
        elif self.cfg.fast:
            y = rat_fast(q, k, v, a, context)
        else:
            y = rat_naive(q, k, v, a, context)
        y = y.transpose(1, 2).flatten(2).to(z.dtype)  # (B, T, W)
        return self.wo(torch.sigmoid(z) * y)          # (4)


def rat_naive(q, k, v, a, context):
    """(2) and (3) as written. q, k, v, a (B, T, W) -> y (B, H, T, D)."""
    cfg, K, T = context.cfg, context.cfg.chunk, q.size(1)
    k_state, v_state = recurrence(a, k, K), recurrence(a, v, K)  # (2)
    q, k_state, v_state = (in_heads(x, cfg) for x in (upcast(q), k_state, v_state))
    q, rotated = (apply_rope(x, *context.rope["rat"]) for x in (q, k_state))
    key = torch.arange(T, device=q.device)
    query = key[:, None]
    final = (key % K == K - 1) & (key // K < query // K)    # f
    own = key == query                                      # o
    bias = torch.where(final | own, 0.0, -math.inf)         # (T, T)
    return attend(q, rotated, v_state, bias, fast=False)    # (3)


def recurrence(a, x, K):
    """(2) of a, x (B, T, W): the states after each token, (B, T, W)."""
    states = []
    for t, (a_t, x_t) in enumerate(zip(a.unbind(1), x.unbind(1))):
        h = 0 if t % K == 0 else h
        h = a_t * h + (1 - a_t) * x_t
        states.append(h)
    return torch.stack(states, 1)


# ---- what it is made of ----

def in_heads(x, cfg):
    """(B, T, heads * D) -> (B, heads, T, D)."""
    return x.unflatten(-1, (-1, cfg.head_dim)).transpose(1, 2)


def initial_gate_bias(W, steps):
    """log s, s uniform in (1, steps - 1). With g = 0, a = s / (1 + s): a state is over some
    1 / (1 - a) = 1 + s tokens, from 2 to `steps`."""
    return torch.empty(W).uniform_(1, max(1, steps - 1)).log()


class Context:
    """Where the T tokens of a call stand:
    pos, chunk_of (B or 1, T): a token's position and its chunk's number
    rope {kind of layer: (cos, sin)}, (B or 1, 1, T, D / 2) each"""

    def __init__(self, cfg, x, pos=None):
        """x (B, T, C): embeddings. pos None: 0 .. T - 1, a plain pass."""
        self.cfg = cfg
        self.pos = torch.arange(x.size(1), device=x.device)[None] if pos is None else pos
        self.chunk_of = self.pos // cfg.chunk
        token, none = self.pos, 0 * self.pos  # none: angle 0, no rotation
        count = dict(  # what RoPE counts: in swa always tokens
            rat=dict(chunk=self.chunk_of, rope=token, none=none)[cfg.pos],
            attention=none if cfg.pos == "none" else token, swa=token)
        self.rope = {kind: rope_tables(pos[:, None], cfg.head_dim, cfg.rope_theta, x.dtype)
                     for kind, pos in count.items() if kind in cfg.kinds}


# ---- the fast path ----

def rat_fast(q, k, v, a, context):
    """rat_naive, with scan as the recurrence and (3) in two parts."""
    cfg, K = context.cfg, context.cfg.chunk
    k_state, v_state = kernels.scan(a, k, K), kernels.scan(a, v, K)  # (2)
    q, k_state, v_state = (in_heads(x, cfg) for x in (q, k_state, v_state))
    final_k, final_v, cos, sin = (  # of the n = T // K complete chunks
        x[:, :, K - 1::K] for x in (k_state, v_state, *context.rope["rat"]))
    final_k = apply_rope(final_k, cos, sin)  # (B, H, n, D)
    return read_states(q, k_state, v_state, final_k, final_v, context)  # (3)


def read_states(q, k_state, v_state, final_k, final_v, context):
    """(3) of q, own states (B, H, T, D), both before RoPE, and the final states of chunks
    0 .. n - 1 (B, H, n, D), after it. The softmax over these and that over the own state,
    whose log-sum-exp is its score, merge into one."""
    # a query and its own state have the same angle: no RoPE is needed
    own_score = (upcast(q) * k_state).sum(-1) / math.sqrt(q.size(-1))
    q = apply_rope(q, *context.rope["rat"])
    final_k, final_v, v_state = (x.to(q.dtype) for x in (final_k, final_v, v_state))
    # keys have positions 0 .. n - 1, as chunks; those before a query's chunk are visible:
    # in chunk 0 none, which gives y = 0 and lse = -inf, no weight
    before = (context.chunk_of - 1).int().squeeze(0)  # (T,) or (B, T)
    y, lse = kernels.attend_by_position(q, final_k, final_v, q_pos=before)
    return kernels.merge(y, lse, v_state, own_score)[0]


# ---- what it is compared with ----

class RNN(nn.Module):
    """The gated linear recurrence alone (section 2.2)."""

    def __init__(self, cfg):
        super().__init__()
        self.fast, C, W = cfg.fast, cfg.n_embd, cfg.n_head * cfg.head_dim
        self.w_in = nn.Linear(C, 3 * W, bias=False)  # z, g, v
        self.gate_bias = nn.Parameter(initial_gate_bias(W, cfg.block_size))
        self.wo = nn.Linear(W, C, bias=False)

    def forward(self, u, layer, context):
        z, g, v = self.w_in(u).chunk(3, -1)
        a, v = torch.sigmoid(upcast(g) + self.gate_bias), upcast(v)
        if isinstance(context, CachedContext):  # one chunk, as long as the cache
            [h] = continued_states(a, [v], layer, context, context.cache.max_len)
        else:
            h = (kernels.scan if self.fast else recurrence)(a, v, v.size(1))
        return self.wo(torch.sigmoid(z) * h.to(z.dtype))


class TokenAttention(Attention):
    """model_gpt's Attention, to all tokens or in a window (swa)."""

    def forward(self, u, layer, context):
        q, k, v = (in_heads(w(u), self.cfg) for w in (self.wq, self.wk, self.wv))
        q, k = (apply_rope(x, *context.rope[self.cfg.kinds[layer]]) for x in (q, k))
        decodes = isinstance(context, CachedContext)
        y = (token_decode if decodes else attend_tokens)(q, k, v, layer, context)
        return self.wo(y.transpose(1, 2).flatten(2))  # (B, T, C)


def attend_tokens(q, k, v, layer, context):
    """q (B, H, T, D), k, v (B, G, T, D), no tokens before them -> y (B, H, T, D)."""
    cfg, bias = context.cfg, None  # None: causal
    if cfg.kinds[layer] == "swa":
        if cfg.fast:
            return kernels.attend_by_position(q, k, v, window=cfg.swa)[0]
        pos = torch.arange(q.size(2), device=q.device)
        bias = attention_bias(pos[None], pos, cfg.swa)
    return attend(q, k, v, bias, fast=cfg.fast)


# ---- decoding ----

class Cache(KVCache):
    """k[layer], v[layer] (B, heads, n_slots[kind of layer] + 1, D): a slot for each chunk (rat, H
    heads) or token (attention, G), or a ring, with token t in slot t % n_slots (swa). The last one
    is a bin, never read. state[layer]: k~, v~ before RoPE (B, 2, W), the RNN's (B, 1, W). n_layer
    None: all."""

    def __init__(self, cfg, batch_size, max_len, device, dtype, n_layer=None):
        super().__init__(cfg, batch_size, max_len, device, dtype, n_layer=0)  # lengths alone
        H, G, D = cfg.n_head, cfg.n_kv_head, cfg.head_dim
        self.n_slots = dict(rat=math.ceil(max_len / cfg.chunk), attention=max_len,
                            swa=min(cfg.swa, max_len), rnn=0)
        n_states = dict(rat=2, attention=0, swa=0, rnn=1)
        zeros = lambda *shape: torch.zeros(batch_size, *shape, device=device, dtype=dtype)
        kinds = cfg.kinds[:n_layer]
        with torch.inference_mode(False):  # so that calls without it may write, too
            self.k = [zeros(H if kind == "rat" else G, self.n_slots[kind] + 1, D) for kind in kinds]
            self.v = [torch.zeros_like(k) for k in self.k]
            self.state = [upcast(zeros(n_states[kind], H * D)) for kind in kinds]
        self.rows = torch.arange(batch_size, device=device)[:, None]

    def buffers(self):  # what KVCache resets and measures: no bins
        return [x[:, :, :-1] for x in self.k + self.v] + self.state

    def fill(self, layer, k, v, at, padding):
        """k, v (B, heads, T, D) go to slots at (B or 1, T), padding's to the bin."""
        if padding is not None:
            at = at.masked_fill(padding, -1)
        for buffer, new in ((self.k[layer], k), (self.v[layer], v)):
            new = new.transpose(1, 2)  # (B, T, heads, D), as torch indexes it
            buffer[self.rows, :, at] = new.to(buffer.dtype)


class CachedContext(Context):
    """The context of a call with a cache.
    padding (B, T): whether a token is padding; None where all rows are alike
    newest {kind of layer: see newest_slot}, for one token a row"""

    def __init__(self, cfg, cache, T, n_valid=None):
        self.cache, self.slots, self.padding = cache, cache.place(T, n_valid), None
        like = cache.lengths.new_empty(0, dtype=cache.dtype)
        super().__init__(cfg, like, self.slots.pos)  # padding's: the cache's last at most
        if self.slots.at is not None:  # rows differ
            self.padding = self.slots.at == cache.max_len  # where place puts it
        self.newest = {kind: newest_slot(kind, self) for kind in self.rope if T == 1}


def newest_slot(kind, context):
    """For one new token a row: its slot (B or 1, 1), and what it attends to, the first S slots with
    a mask: its row's slots so far, or the whole ring (swa)."""
    cfg, cache, n_slots = context.cfg, context.cache, context.cache.n_slots[kind]
    K, number = (cfg.chunk, context.chunk_of) if kind == "rat" else (1, context.pos)
    S = n_slots if cache.static else min(cache.longest // K + 1, n_slots)  # slots in use
    bias = None
    if context.padding is not None:  # a row has slots 0 .. number, a full ring all
        bias = attention_bias(number, torch.arange(S, device=number.device))
    return number % n_slots, S, bias


def rat_decode(q, k, v, a, layer, context):
    """(2) and (3) of T tokens after the cached ones."""
    cfg, cache, K = context.cfg, context.cache, context.cfg.chunk
    k_state, v_state = continued_states(a, [k, v], layer, context, K)  # (2)
    q, k_state, v_state = (in_heads(x, cfg) for x in (q, k_state, v_state))
    rotated = apply_rope(k_state, *context.rope["rat"])
    if q.size(2) == 1:  # the own state takes its chunk's slot: (3) is over all slots so far
        return decode_one(apply_rope(q, *context.rope["rat"]), rotated, v_state, layer, context)
    # final states alone: nobody reads another token's partial state
    at = torch.where(context.pos % K == K - 1, context.chunk_of, -1)
    cache.fill(layer, rotated, v_state, at, context.padding)
    final_k, final_v = cache.k[layer][:, :, :-1], cache.v[layer][:, :, :-1]
    return read_states(q, k_state, v_state, final_k, final_v, context)  # (3)


def continued_states(a, xs, layer, context, K):
    """(2) of xs, (B, T, W) each, after the cached states; the last ones are cached."""
    cache, cached, T = context.cache, context.cache.state[layer], a.size(1)
    starts = context.pos[..., None] % K == 0  # where a state starts from zero
    gate = a.masked_fill(starts, 0)           # (2) is gate h + (1 - a) x
    if context.padding is not None:           # keeps the state
        a, gate = (x.masked_fill(context.padding[..., None], 1) for x in (a, gate))
    if T == 1:
        cached.copy_(gate * cached + (1 - a) * torch.cat(xs, 1))
        return cached.split(1, 1)
    if cache.longest:
        # Chunks start anywhere: scan takes all T tokens as one, with gate 0 at starts.
        # There it gives 0 h + (1 - 0) x, so (2) needs (1 - a) x for x.
        xs = [torch.where(starts, (1 - a) * x, x) for x in xs]
        states = [kernels.scan(gate, x, T, h) for x, h in zip(xs, cached.unbind(1))]
    else:
        states = [kernels.scan(a, x, K) for x in xs]
    last = context.slots.n_new[:, None] - 1  # -1: padding, it kept the state
    cached.copy_(torch.cat([h[cache.rows, last] for h in states], 1))
    return states


def decode_one(q, k, v, layer, context):
    """One new token a row. k, v (B, heads, 1, D) go to its slot; q attends to its row's slots."""
    cache, (slot, S, bias) = context.cache, context.newest[context.cfg.kinds[layer]]
    cache.fill(layer, k, v, slot, context.padding)
    k, v = (x[layer][:, :, :S].to(q.dtype) for x in (cache.k, cache.v))
    return attend(q, k, v, bias, fast=True)


def token_decode(q, k, v, layer, context):
    """The same after cached tokens; k, v are cached: token t in slot t % n_slots."""
    if q.size(2) == 1:
        return decode_one(q, k, v, layer, context)
    cache, pos, n_slots = context.cache, context.pos, context.cache.k[layer].size(2) - 1
    y = (attend_cached if cache.longest else attend_tokens)(q, k, v, layer, context)
    # a row's last n_slots tokens alone: no slot is written twice
    end = (cache.lengths + context.slots.n_new)[:, None]
    cache.fill(layer, k, v, torch.where(pos >= end - n_slots, pos % n_slots, -1), context.padding)
    return y


def attend_cached(q, k, v, layer, context):
    """Each token attends to n_slots: in swa its window, in attention all (max_len)."""
    cache, pos, n_slots = context.cache, context.pos, context.cache.k[layer].size(2) - 1
    n_old = min(cache.longest, n_slots)  # cached tokens to read
    k_pos = pos[:, :1] + torch.arange(-n_old, k.size(2), device=k.device)
    slots = k_pos[:, :n_old] % n_slots
    old = [x[layer][cache.rows, :, slots].transpose(1, 2) for x in (cache.k, cache.v)]
    k, v = (torch.cat([x.to(k.dtype), new], 2) for x, new in zip(old, (k, v)))
    k_pos = k_pos.masked_fill(k_pos < 0, -n_slots)  # no tokens: before every window
    q_pos, k_pos = (p.int().squeeze(0) for p in (pos, k_pos))
    return kernels.attend_by_position(q, k, v, q_pos, k_pos, window=n_slots)[0]


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
    context_type, cached_context_type = Context, CachedContext
    context_limit = None  # chunks and windows go on past block_size

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
        return 12.0 * cfg.n_head * cfg.head_dim * sum(keys[kind] for kind in cfg.kinds)


# ---- checks ----

def check(cfg):
    """Raise ValueError, naming the field, where a value is impossible."""
    cfg.at_least(1, "chunk")
    cfg.at_least(0, "swa", "qk_groups", "n_mlp")
    cfg.divides("qk_groups", "n_head")
    D, limit = cfg.head_dim, kernels.HEAD_SIZES[-1]
    if D % 2 or D > limit:
        raise ValueError(f"head_dim={D} must be even and at most {limit}")

"""
RAT: recurrence inside chunks, attention across them.

Attention reads the keys and values of all past tokens, and its cost grows with their number. A
gated linear recurrence reads one state of fixed size, in which older tokens fade. RAT cuts the
sequence into chunks of K tokens. Inside a chunk, a recurrence sums up keys and values. Across
chunks, attention reads the final state of each earlier chunk. The two together take the place of
attention in a Transformer's block, and the MLP stays. With u = RMSNorm(x), token t of chunk
c = t // K computes the following, in which q and k are repeated to width W before (2):

    z_t, r_t, v_t, q_t, k_t = W_in u_t      z, r, v of width W = H D,  q, k of width G D
    g_t   = sigmoid(r_t + b_g)                    a forget gate for each channel of each token   (1)
    k~_t  = g_t k~_{t-1} + (1 - g_t) k_t
    v~_t  = g_t v~_{t-1} + (1 - g_t) v_t                                                         (2)
    y_t   = attention of q_t to k~_{K-1}, k~_{2K-1}, ..., k~_{cK-1}, the final states of earlier
            chunks, and to its own state k~_t, with their v~, in one softmax                     (3)
    out_t = x_t + W_o (sigmoid(z_t) * y_t)                                                       (4)

The recurrence starts anew in each chunk: at the first token of a chunk, (2) has 0 in the place of
k~_{t-1} and v~_{t-1}. This does not change the last state of the chunk before, which (3) reads as
a final state. So token t has c + 1 keys and not t + 1. In this picture K is 4. A query attends to
each f, the final state of an earlier chunk, and to o, its own state:

    token       0   1   2   3 | 4   5   6   7 | 8   9  10  11
    query 2             o     |               |
    query 5                 f |     o         |
    query 10                f |             f |         o

q and k have only G groups of D channels, so that W_in is small. Each is repeated H / G times: head
h = 0 .. H - 1 reads group h % G. The heads of a group share query and key, but their states k~
differ, because each of the W channels has a gate of its own. After the recurrence, RoPE rotates
q_t and each k~ by the number of its own chunk (with the default, pos=chunk).

With K = 1 this is attention with an output gate, and 1 - g scales its keys and values. With K = T a
token attends to its own state alone. A softmax over one key gives 1, so that y_t is v~_t, and the
layer is a gated RNN. Config has the baselines, and the paper's hybrid RAT-SWA, too (SWA:
sliding-window attention):

    mixer=rnn          out_t = x_t + W_o (sigmoid(z_t) * v~_t), the whole sequence is one chunk
    mixer=attention    a Transformer
    swa=w              in odd layers a token attends to w keys, its own included, with any mixer

In attention and swa layers q has H heads. Only k and v have groups there, which are the G
key/value heads, and head h reads group h // (H / G). Layers count from 0. The paper's window does
not count the token itself, so its window of 1,024 is swa=1025 here. Dropout is on the embeddings
and on both branches of a block. This table says which function runs in a layer:

    kind of layer     fast=false        fast=true         with a cache
    rat               rat_naive         rat_fast          rat_decode
    rnn               recurrence        kernels.scan      continued_states
    attention, swa    attend_tokens     attend_tokens     attention_decode

With a cache, rat and rnn layers run the same code for both values of fast. attention_decode obeys
fast only where it calls attend_tokens: in a call into an empty cache, with several tokens a row.

A change of (2) has three places: recurrence, kernels.scan (with its backward pass and its Triton
code) and continued_states. A change of (3) has three, too: rat_naive, read_states and decode_one. A
change of the states that are read also changes rat_fast, rat_decode, newest_slot, the number of
slots in Cache, and mixer_flops.

Paper: Wei, Yadav, Pascanu, Gulcehre 2025 (2507.04416). The paper writes L for K. Three things are
in the authors' code (CLAIRE-Labo/RAT, d4a8f54) and not in the paper: the bias b_g, G = 2, and that
head h reads group h % G. This file differs from their code in these points:
- k~ and v~ are float32 or better here, and bfloat16 there. rat_naive reads them as they are,
  except under autocast, which rounds them. rat_fast rounds the final states and the own value to
  q's dtype, but not the own score. A call with a cache reads final states from the cache, in the
  cache's dtype. If it has one token a row, it reads the token's own state from there, too.
- b_g has no weight decay here, as norms have none. There it decays, which makes gates forget
  faster.
- norm_eps is 1e-5 here, and 1e-6 there.
- Decoding works from the first token on. Theirs needs a full first chunk.
- Left out are the paper's gates of low rank and its reversed design, with attention inside chunks
  and recurrence across them. Both are worse in the paper.

Letters beside those of model_gpt.py: n is the number of complete chunks (or of the cache's slots,
in a call with a cache), and W is H D (W_in and W_o are matrices). G counts the groups of q and k in
rat layers, and the key/value heads in attention and swa layers. The letter c is the number of a
chunk, and s in initial_gate_bias is the odds of a gate. The letters r, y, z and u have other
meanings in other files.
"""
import math
from dataclasses import dataclass

import torch
import torch.nn as nn

import kernels
from decoding import KVCache
from model_gpt import (Attention, BaseConfig, Block, LanguageModel, apply_rope, attend,
                       attention_bias, choice, init_weights, rope_tables, upcast, visible_keys)


@dataclass
class Config(BaseConfig):
    """The kind of a layer is the value of mixer, and in odd layers it is swa if swa > 0. The table
    has the options that only some kinds read, and what RoPE counts for each value of pos. Other
    kinds ignore such an option, but its value is checked all the same.

        kind         options             pos=chunk    pos=rope    pos=none
        rat          chunk, qk_groups    chunks       tokens      nothing
        rnn          none of these       no RoPE      no RoPE     no RoPE
        attention    n_kv_head           tokens       tokens      nothing
        swa          n_kv_head, swa      tokens       tokens      tokens
    """
    chunk: int = 16  # K, tokens of a chunk (in rat layers)
    mixer: str = choice("rat", "rnn", "attention")  # what mixes tokens
    swa: int = 0  # window of odd layers, own key included (0: they are like the even ones)
    qk_groups: int = 0  # G of rat layers (0: 2 if n_head is even, else 1)
    pos: str = choice("chunk", "rope", "none")  # rat: RoPE counts chunks | tokens | nothing
    n_mlp: int = 0  # hidden width of the MLP (0: 4 n_embd, 8/3 for swiglu)
    mlp: str = choice("gelu", "swiglu")
    tie_embeddings: bool = True  # the head is the embedding matrix

    def __post_init__(self):
        super().__post_init__()
        # This fills in the field, so that dataclasses.replace keeps the value.
        self.qk_groups = self.qk_groups or (1 if self.n_head % 2 else 2)
        # kinds has the kind of each layer.
        self.kinds = ["swa" if self.swa and i % 2 else self.mixer for i in range(self.n_layer)]
        check(self)


# ---- the method ----

class RAT(nn.Module):
    """The mixer of a rat layer. It computes (1) to (4) without the residual connection (section 2.3
    of the paper)."""

    def __init__(self, cfg):
        super().__init__()
        self.cfg, C, W = cfg, cfg.n_embd, cfg.n_head * cfg.head_size
        shared = cfg.qk_groups * cfg.head_size
        self.widths = [W, W, W, shared, shared]  # of z, r, v, q, k
        self.w_in = nn.Linear(C, sum(self.widths), bias=False)
        self.gate_bias = nn.Parameter(initial_gate_bias(W, cfg.chunk))  # b_g
        self.wo = nn.Linear(W, C, bias=False)

    def forward(self, u, layer, context):
        """Return W_o (sigmoid(z) * y), (B, T, C), from u (B, T, C). See Context for context."""
        z, r, v, q, k = self.w_in(u).split(self.widths, -1)
        copies = self.cfg.n_head // self.cfg.qk_groups
        q, k = (torch.cat([x] * copies, -1) for x in (q, k))  # head h has group h % G
        k, v = upcast(k), upcast(v)  # so that the states are float32 or better
        g = torch.sigmoid(upcast(r) + self.gate_bias)  # (1)
        if isinstance(context, CachedContext):
            y = rat_decode(q, k, v, g, layer, context)
        elif self.cfg.fast:
            y = rat_fast(q, k, v, g, context)
        else:
            y = rat_naive(q, k, v, g, context)        # (2), (3)
        y = y.transpose(1, 2).flatten(2).to(z.dtype)  # (B, T, W)
        return self.wo(torch.sigmoid(z) * y)          # (4)


def rat_naive(q, k, v, g, context):
    """Return y (B, H, T, D) of q, k, v, g (B, T, W), by (2) and (3) as they stand above."""
    cfg, K, T = context.cfg, context.cfg.chunk, q.size(1)
    k_state, v_state = recurrence(g, k, K), recurrence(g, v, K)  # (2)
    q, k_state, v_state = (in_heads(x, cfg) for x in (upcast(q), k_state, v_state))
    q, rotated = (apply_rope(x, *context.rope["rat"]) for x in (q, k_state))
    j = torch.arange(T, device=q.device)                    # (T,) the numbers of the keys
    i = j[:, None]                                          # (T, 1) the numbers of the queries
    final = (j % K == K - 1) & (j // K < i // K)            # f of the picture
    own = j == i                                            # o of the picture
    bias = torch.where(final | own, 0.0, -math.inf)         # (T, T)
    return attend(q, rotated, v_state, bias, fast=False)    # (3)


@torch.compiler.disable  # torch.compile would unroll the loop
def recurrence(g, x, K):
    """Return the states (2) of g and x (B, T, W), h_t = g_t h_{t-1} + (1 - g_t) x_t, as (B, T, W).
    Every K tokens they start again from 0."""
    states, h = [], 0
    for t, (g_t, x_t) in enumerate(zip(g.unbind(1), x.unbind(1))):
        h = 0 if t % K == 0 else h
        h = g_t * h + (1 - g_t) * x_t
        states.append(h)
    return torch.stack(states, 1)


# ---- what it is made of ----

def in_heads(x, cfg):
    """Return x (B, T, heads * D) as (B, heads, T, D)."""
    return x.unflatten(-1, (-1, cfg.head_size)).transpose(1, 2)


def initial_gate_bias(W, steps):
    """Return log s for each of W channels, with s uniform in (1, steps - 1). At r = 0, as it is on
    average before training, g is s / (1 + s), and a state averages over about 1 / (1 - g) = 1 + s
    tokens: from 2 to `steps`. If steps is 1 or 2, s is 1."""
    return torch.empty(W).uniform_(1, max(1, steps - 1)).log()


class Context:
    """The layers of a call share these. rope has an entry for each kind of layer that the model
    has, except rnn, which has no RoPE.

        cfg                     the model's Config
        pos (B or 1, T)         the positions of the tokens
        chunk_of (B or 1, T)    the numbers of their chunks
        rope                    {kind of layer: (cos, sin)}, (B or 1, 1, T, D / 2) each"""

    def __init__(self, cfg, x, pos=None):
        """x (B, T, C) are the embeddings. pos is None in a plain pass, whose tokens stand at
        positions 0 .. T - 1. Where pos is given, only the dtype of x is read."""
        self.cfg = cfg
        self.pos = torch.arange(x.size(1), device=x.device)[None] if pos is None else pos
        self.chunk_of = self.pos // cfg.chunk
        token, zeros = self.pos, 0 * self.pos  # where all positions are 0, nothing is rotated
        rotated_by = dict(  # the numbers that RoPE takes as positions: the table of Config
            rat=dict(chunk=self.chunk_of, rope=token, none=zeros)[cfg.pos],
            attention=zeros if cfg.pos == "none" else token, swa=token)
        self.rope = {kind: rope_tables(number[:, None], cfg.head_size, cfg.rope_theta, x.dtype)
                     for kind, number in rotated_by.items() if kind in cfg.kinds}


# ---- the fast path ----

def rat_fast(q, k, v, g, context):
    """Return the same as rat_naive. kernels.scan computes the recurrence. (3) has two parts. The
    final states are the same keys for all queries, so that their scores are one matrix product, in
    which a mask by positions hides those that a query must not read. The own state of a token is
    read by the token's query alone."""
    cfg, K = context.cfg, context.cfg.chunk
    k_state, v_state = kernels.scan(g, k, K), kernels.scan(g, v, K)  # (2)
    q, k_state, v_state = (in_heads(x, cfg) for x in (q, k_state, v_state))
    final_k, final_v, cos, sin = (  # at the ends of the n = T // K complete chunks
        x[:, :, K - 1::K] for x in (k_state, v_state, *context.rope["rat"]))
    final_k = apply_rope(final_k, cos, sin)  # (B, H, n, D)
    return read_states(q, k_state, v_state, final_k, final_v, context)  # (3)


def read_states(q, k_state, v_state, final_k, final_v, context):
    """Return (3), (B, H, T, D). q and k_state are not rotated here, but final_k is. The own states
    k_state and v_state are (B, H, T, D), like q. final_k and final_v (B, H, n, D) are the final
    states of chunks 0 .. n - 1. kernels.attend_by_position takes the own state as one more key of
    its query. It wants the finished score of this key, which is computed here."""
    # A query and its own state have the same angle, so their score needs no RoPE.
    own_score = (upcast(q) * k_state).sum(-1) / math.sqrt(q.size(-1))
    q = apply_rope(q, *context.rope["rat"])
    final_k, final_v, v_state = (x.to(q.dtype) for x in (final_k, final_v, v_state))
    # The keys have the numbers of their chunks, 0 .. n - 1, as positions. A query has the number
    # of the chunk before its own, so that it attends to all earlier chunks. A call with a cache
    # passes all slots of the cache. A slot that is empty, or whose state is not final, belongs to
    # the query's own chunk or to a later one, so that the positions hide it.
    before = (context.chunk_of - 1).int().squeeze(0)  # (T,) or (B, T)
    own = own_score, v_state
    return kernels.attend_by_position(q, final_k, final_v, q_pos=before, own=own)[0]


# ---- the baselines ----

class RNN(nn.Module):
    """The gated linear recurrence alone (section 2.2 of the paper)."""

    def __init__(self, cfg):
        super().__init__()
        self.fast, C, W = cfg.fast, cfg.n_embd, cfg.n_head * cfg.head_size
        self.w_in = nn.Linear(C, 3 * W, bias=False)  # z, r, v
        self.gate_bias = nn.Parameter(initial_gate_bias(W, cfg.block_size))
        self.wo = nn.Linear(W, C, bias=False)

    def forward(self, u, layer, context):
        """Return W_o (sigmoid(z) * v~), (B, T, C), from u (B, T, C)."""
        z, r, v = self.w_in(u).chunk(3, -1)
        g, v = torch.sigmoid(upcast(r) + self.gate_bias), upcast(v)
        if isinstance(context, CachedContext):  # one chunk is as long as the cache
            [h] = continued_states(g, [v], layer, context, context.cache.max_len)
        else:
            h = (kernels.scan if self.fast else recurrence)(g, v, v.size(1))
        return self.wo(torch.sigmoid(z) * h.to(z.dtype))


class TokenAttention(Attention):
    """This is model_gpt's Attention with this file's context. A token attends to all earlier
    tokens, or to those in a window (swa)."""

    def forward(self, u, layer, context):
        """Return W_o Attention(...), (B, T, C), from u (B, T, C)."""
        q, k, v = (in_heads(w(u), self.cfg) for w in (self.wq, self.wk, self.wv))
        q, k = (apply_rope(x, *context.rope[self.cfg.kinds[layer]]) for x in (q, k))
        decodes = isinstance(context, CachedContext)
        a = (attention_decode if decodes else attend_tokens)(q, k, v, layer, context)
        return self.wo(a.transpose(1, 2).flatten(2))  # (B, T, C)


def attend_tokens(q, k, v, layer, context):
    """Return the attention of T tokens to themselves, without tokens before them, (B, H, T, D), of
    q (B, H, T, D) and k, v (B, G, T, D)."""
    cfg, bias = context.cfg, None  # attend is causal without a bias
    if cfg.kinds[layer] == "swa":
        if cfg.fast:
            return kernels.attend_by_position(q, k, v, window=cfg.swa)[0]
        pos = torch.arange(q.size(2), device=q.device)
        bias = attention_bias(pos[None], pos, cfg.swa)
    return attend(q, k, v, bias, fast=cfg.fast)


# ---- decoding ----
# A call brings one new token a row, or several, which are a prompt or a piece of one. This table
# says which functions a layer calls for them:
#
#     new tokens a row          rat                              rnn                 attention, swa
#     one                       continued_states, decode_one     continued_states    decode_one
#     several, empty cache      continued_states, read_states    continued_states    attend_tokens
#     several, after others     continued_states, read_states    continued_states    attend_cached
#
# Only the last row, a prompt that comes in several pieces, needs attend_cached and a scan that
# starts from a cached state. A reader who wants to know how a token is decoded may skip these two.

class Cache(KVCache):
    """Each kind of layer has slots of its own. A row has these after 10 tokens that came one by
    one, with K = 4, max_len = 12 and a window of 6 keys:

        slot              0    1    2    3    4    5    6    7    8    9   10   11
        rat, 3 slots     f0   f1   o9  |  bin
        swa, 6 slots      6    7    8    9    4    5  |  bin
        attention         0    1    2    3    4    5    6    7    8    9    .    .  |  bin

    A rat layer has a slot for each chunk. f0 and f1 are the final states of chunks 0 and 1. o9 is
    the state of token 9, which is not final. If tokens 8 and 9 had come in one call, slot 2 would
    be empty, because such a call stores final states only. An attention layer has a slot for each
    token. The slots of a swa layer are a ring, in which token t has slot t % n_slots. The last
    slot, the bin, takes all that a call does not keep: padding, states that are not final, and
    tokens that have left the window. It is never read.

        k[layer], v[layer]    (B, H or G, n_slots[kind] + 1, D), keys after RoPE; H in rat layers
        state[layer]          k~ (not rotated), v~ of the last token, (B, 2, W); rnn: v~, (B, 1, W)

    The recurrence goes on from state. As in KVCache, the cache is for the first n_layer layers
    (None: for all)."""

    def __init__(self, cfg, batch_size, max_len, device, dtype, n_layer=None):
        super().__init__(cfg, batch_size, max_len, device, dtype, n_layer=0)  # no k and v
        H, G, D = cfg.n_head, cfg.kv_heads, cfg.head_size
        self.n_slots = dict(rat=math.ceil(max_len / cfg.chunk), attention=max_len,
                            swa=min(cfg.swa, max_len), rnn=0)
        n_states = dict(rat=2, attention=0, swa=0, rnn=1)
        zeros = lambda *shape: torch.zeros(batch_size, *shape, device=device, dtype=dtype)
        kinds = cfg.kinds[:n_layer]
        with torch.inference_mode(False):  # otherwise only inference mode could write
            self.k = [zeros(H if kind == "rat" else G, self.n_slots[kind] + 1, D) for kind in kinds]
            self.v = [torch.zeros_like(k) for k in self.k]
            self.state = [upcast(zeros(n_states[kind], H * D)) for kind in kinds]

    def buffers(self):  # KVCache resets and measures these; the bins are not among them
        return [x[:, :, :-1] for x in self.k + self.v] + self.state

    def fill(self, layer, k, v, at, padding):
        """Write k, v (B, heads, T, D) to slots at (B or 1, T), where -1 is the bin. padding (B, T)
        says which tokens are padding, which goes to the bin (None: there is none). Layers call this
        and not KVCache.write, because a slot is not a position here."""
        if padding is not None:
            at = at.masked_fill(padding, -1)
        for buffer, new in ((self.k[layer], k), (self.v[layer], v)):
            new = new.transpose(1, 2)  # (B, T, heads, D), because torch indexes to this shape
            buffer[self.rows, :, at] = new.to(buffer.dtype)


class CachedContext(Context):
    """The Context of a call with a cache. (It does not use decoding.Cached, because a slot is not a
    position here.) It adds to Context:

        cache, slots      the Cache, and what its place returns for the T new tokens a row
        padding (B, T)    whether a token is padding; None where all rows are alike
        newest            {kind of layer: what newest_slot returns}; empty unless T = 1"""

    def __init__(self, cfg, cache, T, n_valid=None):
        self.cache, self.slots, self.padding = cache, cache.place(T, n_valid), None
        like = cache.lengths.new_empty(0, dtype=cache.dtype)
        # Padding has a position, too. continued_states and fill leave padding out, and elsewhere
        # its position affects only its own output, which means nothing.
        super().__init__(cfg, like, self.slots.pos)
        if self.slots.at is not None:  # rows may differ
            self.padding = self.slots.at == cache.max_len  # place gives this slot to padding
        # The kinds of layers that have slots are those that have RoPE.
        self.newest = {kind: newest_slot(kind, self) for kind in self.rope if T == 1}


def newest_slot(kind, context):
    """Return three things for one new token a row: its slot (B or 1, 1), the number S of slots
    that it attends to, which are the first S, and a bias or None. S is the number of filled slots
    of the longest row, with the new token's. In a static call (decoding.py) S is the number of all
    slots, because the host must not read lengths. If rows may differ, a bias hides the slots that a
    row has not filled."""
    cfg, cache, n_slots = context.cfg, context.cache, context.cache.n_slots[kind]
    # number counts slots as if there were no ring. In a ring of n_slots, number n_slots is slot 0
    # again.
    per_slot, number = (cfg.chunk, context.chunk_of) if kind == "rat" else (1, context.pos)
    S = n_slots if cache.static else min(cache.longest // per_slot + 1, n_slots)
    bias = None
    if context.padding is not None:
        # A row has filled slots 0 .. number, or all slots of a full ring.
        bias = attention_bias(number, torch.arange(S, device=number.device))
    return number % n_slots, S, bias


def rat_decode(q, k, v, g, layer, context):
    """Return (3), (B, H, T, D), for T tokens that follow the cached ones, of q, k, v, g
    (B, T, W)."""
    cfg, cache, K = context.cfg, context.cache, context.cfg.chunk
    k_state, v_state = continued_states(g, [k, v], layer, context, K)  # (2)
    q, k_state, v_state = (in_heads(x, cfg) for x in (q, k_state, v_state))
    rotated = apply_rope(k_state, *context.rope["rat"])
    if q.size(2) == 1:
        # The own state goes to the slot of its chunk, so that (3) is attention to all filled slots.
        return decode_one(apply_rope(q, *context.rope["rat"]), rotated, v_state, layer, context)
    # Only final states are stored. A state that is not final is read by its own token alone,
    # because queries attend here to the slots of chunks before their own, which hold final states.
    at = torch.where(context.pos % K == K - 1, context.chunk_of, -1)
    cache.fill(layer, rotated, v_state, at, context.padding)
    final_k, final_v = cache.k[layer][:, :, :-1], cache.v[layer][:, :, :-1]
    return read_states(q, k_state, v_state, final_k, final_v, context)  # (3)


def continued_states(g, xs, layer, context, K):
    """Return the states (2) of each of xs, (B, T, W), after the cached states, and cache the last
    ones. (2) is h_t = keep h_{t-1} + (1 - g) x_t, where keep is g, but 0 where a chunk starts."""
    cache, cached, T = context.cache, context.cache.state[layer], g.size(1)
    starts = context.pos[..., None] % K == 0
    keep = g.masked_fill(starts, 0)
    if context.padding is not None:  # with g = keep = 1 padding keeps a cached state
        g, keep = (x.masked_fill(context.padding[..., None], 1) for x in (g, keep))
    if T == 1:
        # There is one token, so dimension 1 is free. It counts the members of xs (k and v, or v
        # alone), as it does in cached.
        cached.copy_(keep * cached + (1 - g) * torch.cat(xs, 1))
        return cached.split(1, 1)
    if cache.longest:
        # A chunk may start at any token, and in each row at another one. So scan takes the T tokens
        # as one chunk that goes on from the cached state. It gets keep instead of g. Where a chunk
        # starts, scan then computes 0 h + (1 - 0) x, so that x is multiplied by the 1 - g of (2)
        # beforehand.
        xs = [torch.where(starts, (1 - g) * x, x) for x in xs]
        states = [kernels.scan(keep, x, T, h) for x, h in zip(xs, cached.unbind(1))]
    else:       # the same, but all chunks at once, which is faster
        states = [kernels.scan(g, x, K) for x in xs]
    # A row without new tokens reads the state at index -1, which belongs to padding. Padding has
    # kept the cached state, or 0 if the cache is empty.
    last = context.slots.n_new[:, None] - 1
    cached.copy_(torch.cat([h[cache.rows, last] for h in states], 1))
    return states


def decode_one(q, k, v, layer, context):
    """Write k, v (B, heads, 1, D) of one new token a row to its slot, and return the attention of q
    (B, H, 1, D) to the slots of its row."""
    cache, (slot, S, bias) = context.cache, context.newest[context.cfg.kinds[layer]]
    cache.fill(layer, k, v, slot, context.padding)
    k, v = (x[layer][:, :, :S].to(q.dtype) for x in (cache.k, cache.v))
    return attend(q, k, v, bias, fast=True)


def attention_decode(q, k, v, layer, context):
    """Return what attend_tokens returns, for T tokens that follow the cached ones. Cache their k
    and v."""
    if q.size(2) == 1:
        return decode_one(q, k, v, layer, context)
    cache, pos = context.cache, context.pos
    n_slots = cache.n_slots[context.cfg.kinds[layer]]
    # Attention comes first, because fill overwrites slots of the ring that these queries read.
    y = (attend_cached if cache.longest else attend_tokens)(q, k, v, layer, context)
    # Only the last n_slots tokens of a row are written, so that no slot is written twice.
    end = (cache.lengths + context.slots.n_new)[:, None]
    cache.fill(layer, k, v, torch.where(pos >= end - n_slots, pos % n_slots, -1), context.padding)
    return y


def attend_cached(q, k, v, layer, context):
    """Return the attention of T tokens to cached tokens and to themselves. n_slots serves as their
    window: in swa it is the window, and in attention max_len, so that all tokens are visible."""
    cache, pos = context.cache, context.pos
    n_slots = cache.n_slots[context.cfg.kinds[layer]]
    n_old = min(cache.longest, n_slots)  # how many cached tokens are read
    k_pos = pos[:, :1] + torch.arange(-n_old, k.size(2), device=k.device)
    slots = k_pos[:, :n_old] % n_slots
    old = [x[layer][cache.rows, :, slots].transpose(1, 2) for x in (cache.k, cache.v)]
    k, v = (torch.cat([x.to(k.dtype), new], 2) for x, new in zip(old, (k, v)))
    # In a row with fewer than n_old tokens the first k_pos are negative and stand for no token.
    # They become -n_slots, which is in no query's window.
    k_pos = k_pos.masked_fill(k_pos < 0, -n_slots)
    q_pos, k_pos = (p.int().squeeze(0) for p in (pos, k_pos))
    return kernels.attend_by_position(q, k, v, q_pos, k_pos, window=n_slots)[0]


# ---- the model ----

MIXERS = dict(rat=RAT, rnn=RNN, attention=TokenAttention, swa=TokenAttention)  # by kind of layer


class Model(LanguageModel):
    """RAT, RAT-SWA or a baseline, as mixer= and swa= say."""
    context_type, cached_context_type = Context, CachedContext
    # A call may have more than block_size tokens. In our runs (lab/RESULTS.md) the loss then stays
    # low in models with windows and in the RNN. It rises in others, with RoPE more than without.
    context_limit = None

    def __init__(self, cfg):
        super().__init__(cfg, [Block(cfg, MIXERS[kind]) for kind in cfg.kinds])
        init_weights(self)  # The authors make no projection smaller, so that n_layer is not given.

    def init_cache(self, batch_size, max_len):
        return Cache(self.cfg, *self.cache_sizes(batch_size, max_len))

    def mixer_flops(self):
        """Return a token's FLOPs in attention. A key costs 12 W in a layer. The numbers of keys are
        averaged over the tokens of a sequence. Recurrences do not count."""
        cfg, T = self.cfg, self.cfg.block_size
        keys = dict(rnn=0, attention=visible_keys(T), swa=visible_keys(T, cfg.swa))
        keys["rat"] = sum(t // cfg.chunk + 1 for t in range(T)) / T
        return 12.0 * cfg.n_head * cfg.head_size * sum(keys[kind] for kind in cfg.kinds)


# ---- checks ----

def check(cfg):
    """Raise ValueError, naming the field, where a value is impossible."""
    cfg.at_least(1, "chunk")
    cfg.at_least(0, "swa", "qk_groups")
    cfg.divides("qk_groups", "n_head")
    D, limit = cfg.head_size, kernels.HEAD_SIZES[-1]
    if D % 2 or D > limit:
        raise ValueError(f"head_dim={D} must be even and at most {limit}")

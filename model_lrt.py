"""
LRT, the Latent Recurrent Transformer: the previous token's upper hidden state is memory for the next.

When position t is computed, position t-1 has been through all layers. A Transformer lets each layer see what the same
layer knew of earlier positions, and forgets the rest. Here the residual stream after an upper layer, the source (0.6 of
the depth), is kept as the memory m_{t-1} of the next position and enters each of its layers twice:

    residual    x <- alpha x + beta x0 + gamma m_{t-1}                          gamma 0.1 at the start
    k, v        k~ = g_loc Wk u + g_rec Wk_rec m_{t-1}                          u = RMSNorm(x)
                v  = g_loc (Wv u + e) + g_rec Wv_rec m_{t-1}                    e: the token's value embedding, below
                [g_loc, g_rec] = 2 sigmoid(Wg u), one of each for every key head, Wg zero at the start: all gates 1
                k  = rotary(RMSNorm(k~)): the memory's key stands at position t
    m_t = x after the source layer,  m_{-1} = 0

Wk_rec and Wv_rec are shared by all layers (projections=layerwise: each has its own). The cache is a Transformer's and
one vector a text; a token is decoded in one ordinary forward.

The backbone (memory=false) is nanochat's as the paper has it: RMSNorm without weights, also after the embedding and
before the untied head; queries and keys normed, then rotated; MLP W_down relu(W_up u)^2; layers by the pattern SSSL,
S seeing half the context, the last layer all of it; x0 = RMSNorm(E[idx]) mixed into each layer (alpha 1, beta 0.1 at
the start); value embeddings, e = 2 sigmoid(Wve u[:32]) E_l[idx], Wve zero at the start; logits 15 tanh(z / 15).

Training. The chain m_0 -> m_1 -> ... goes position by position; train_path says what is done about it:

    exact         the chain as it is, one position after the other: what decoding does, and evaluation always
    interleaved   (the default) a first pass over all positions with zero memory fills a buffer with each layer's keys
                  and values and the memories. Then, for each of S strided subsets, only its positions are computed
                  again: they read their memories from the buffer, write their keys and values into it, attend to all of
                  it, and write their memories back. About twice the products of a plain step, whatever S, and S copies
                  of the buffer. For S = 2, 8 positions:

                      first pass     0  1  2  3  4  5  6  7      m = 0
                      subset 0       0     2     4     6         position 2 reads m_1 of the first pass
                      subset 1          1     3     5     7      position 3 reads m_2 of subset 0, and its keys

                  loss = (L_first + sum_s L_s) / (S + 1); gradients flow through all S + 1 passes and the buffer. With
                  S = T it is the exact chain.
    chunked       chunks of C positions, one after the other; all positions of a chunk read the last memory of the chunk
                  before. C = 1 is the exact chain, C = T the backbone.

Naive and fast. The naive code of each path keeps a buffer of all T keys and attends with a mask. The fast code attends
by positions (kernels.attend: a strided subset against the whole buffer, no mask, tiles out of sight not read), skips
what a zero memory would give, projects the memory once a pass where the projections are shared, keeps the chain's keys
in growing blocks, and evaluates from a cache.

Source: Huang et al. 2026, "Latent Recurrent Transformer: Architecture Exploration, Training
Strategies, and Scaling Behavior" (arXiv:2605.26797). Read into the paper where it is silent: the
gates see the normed input, the value embedding is part of the local value, only what the memory
enters is gated (inject=k leaves values as they are), and each loss is a mean over tokens: subsets
count by their numbers of targets, which differ where S does not divide T or targets are left out.

Departures: gated_attention multiplies each head's output by 2 sigmoid(W u) (Qiu et al. 2026, cited
for it); Appendix E writes x + alpha Attn(x), which here is the first of layer_scale's two scales.
Eq. 5 has alpha x + gamma m; the backbone's beta x0 stays. Value and dense residual have no formula
in the paper: here learned weights that start at zero; there is no projected value residual. Gates
learn at the head's rate (see RATES). Muon is torch's, without nanochat's additions. Dropout, 0 in
the paper, can be set.

Names: B batch, T tokens, n positions of a pass, C width, H heads, G key/value heads, D head size, S subsets.
"""
import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F

import kernels
from model_gpt import (KVCache, LanguageModel, apply_rotary, attention_bias, attention_fast,
                       attention_naive, check_choice, check_sizes, compute_dtype, cross_entropy,
                       rotary_tables)

VALUE_CHANNELS = 32         # of its input, which the gate of a value embedding sees


@dataclass
class Config:
    block_size: int = 256        # tokens in a training sequence; also the longest context
    vocab_size: int = 257        # number of token ids; the tables are padded to a multiple of 64
    n_layer: int = 4             # blocks
    n_head: int = 4              # query heads
    n_kv_head: int = 0           # key/value heads, each shared by n_head / n_kv_head query heads (0: n_head)
    n_embd: int = 128            # width of the residual stream
    dropout: float = 0.0         # on embeddings and both residual branches
    fast: bool = True            # the efficient code of each path; false: buffers and masks written out
    memory: bool = True          # the recurrence; false: the backbone
    train_path: str = "interleaved"   # interleaved | chunked | exact: how training goes about the chain
    subsets: int = 2             # S of train_path=interleaved
    chunk: int = 64              # C of train_path=chunked
    prefill: str = "exact"       # exact | interleaved: how an empty cache takes in a prompt
    source: str = ""             # layers (1 to n_layer) whose output is the memory, if several ("2,4") averaged
    state: str = "lag"           # memory at t: lag: m_{t-lag} | average: of the last 4, learned | current: m_t | both
    lag: int = 1                 # of state=lag
    inject: str = "kv+residual"  # none | k | v | kv | residual | kv+residual: where the memory enters
    projections: str = "shared"  # shared | layerwise: Wk_rec and Wv_rec
    replace: bool = False        # the memory's keys and values replace the local ones in the first third of the layers
    pattern: str = "SSSL"        # windows of the layers, tiled: S short, L the whole context; the last layer is L
    swa: int = 0                 # an S layer sees keys at distances 0 to swa (0: half of block_size)
    value_embeddings: bool = True    # an embedding of the token is added to each layer's values
    x0_mixing: bool = True       # alpha and beta: each layer starts from alpha x + beta x0
    layer_scale: bool = False    # learned scales on the outputs of attention and MLP
    gated_attention: bool = False    # a gate on each head's output, 2 sigmoid(W u)
    value_residual: bool = False     # the first layer's values are added to all others', with a learned weight
    dense_residual: bool = False     # each layer starts from a learned sum of all earlier ones
    softcap: float = 15.0        # logits are softcap tanh(z / softcap)
    rope_theta: float = 10000.0  # rotary base
    norm_eps: float = 1e-5       # RMSNorm's epsilon

    # keys that change how training and prefill go, not what the weights mean
    SAME_FUNCTION = ("train_path", "subsets", "chunk", "prefill")

    def __post_init__(self):
        self.n_kv_head = self.n_kv_head or self.n_head
        check_sizes(self)
        check_choice(self, "train_path", ("interleaved", "chunked", "exact"))
        check_choice(self, "prefill", ("exact", "interleaved"))
        check_choice(self, "state", ("lag", "average", "current", "both"))
        check_choice(self, "inject", ("none", "k", "v", "kv", "residual", "kv+residual"))
        check_choice(self, "projections", ("shared", "layerwise"))
        if not self.pattern or set(self.pattern) - {"S", "L"}:
            raise ValueError(f"pattern={self.pattern} must be made of S and L")
        for name in ("subsets", "chunk", "lag"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if self.lag > self.block_size:
            raise ValueError(f"lag={self.lag} is more than block_size={self.block_size}: there is no such memory")
        if self.swa < 0:
            raise ValueError(f"swa={self.swa} must not be negative (0: half of block_size)")
        if self.head_dim % 2 or self.head_dim > kernels.HEAD_SIZES[-1]:
            raise ValueError(f"n_embd / n_head = {self.head_dim} must be even, at most {kernels.HEAD_SIZES[-1]}")
        if not all(0 < x < math.inf for x in (self.softcap, self.rope_theta, self.norm_eps)):
            raise ValueError("softcap, rope_theta and norm_eps must be positive")
        if self.replace and self.inject not in ("kv", "kv+residual"):
            raise ValueError(f"replace=true needs memory in keys and values: inject={self.inject} is not kv")
        self.memory = self.memory and self.inject != "none"
        self.swa = self.swa or max(1, self.block_size // 2)
        self.sources                # raises where they are impossible

    @property
    def head_dim(self):
        return self.n_embd // self.n_head

    @property
    def way(self):
        """What runs, in words."""
        path = {"interleaved": f"interleaved, S = {self.subsets}", "chunked": f"chunked, C = {self.chunk}",
                "exact": "exact"}[self.train_path] if self.memory else "without memory"
        return f"{path}, {'fast' if self.fast else 'naive'}"

    @property
    def sources(self):
        """The source layers, 1 to n_layer: 0.6 of the depth if none is named. ValueError where there are none such."""
        names = self.source.split(",") if self.source else [str(max(1, round(0.6 * self.n_layer)))]
        layers = [int(name) if name.strip().isdecimal() else 0 for name in names]
        if not 1 <= min(layers) <= max(layers) <= self.n_layer or len(set(layers)) < len(layers):
            raise ValueError(f"source={self.source} must name layers from 1 to n_layer={self.n_layer}, as in 2 or 2,4")
        return layers

    @property
    def in_keys(self):
        return self.memory and self.inject in ("k", "kv", "kv+residual")

    @property
    def in_values(self):
        return self.memory and self.inject in ("v", "kv", "kv+residual")

    @property
    def in_residual(self):
        return self.memory and self.inject in ("residual", "kv+residual")

    @property
    def n_states(self):
        """How many earlier positions' states a position needs."""
        return {"lag": self.lag, "average": 4, "current": 0, "both": 1}[self.state] if self.memory else 0

    @property
    def twice(self):
        """Whether a position goes through the layers twice, first without memory, so that it can read its own state."""
        return self.memory and self.state in ("current", "both")

    def window(self, layer):
        """How many keys a query of this layer sees, itself included; 0: all."""
        short = self.pattern[layer % len(self.pattern)] == "S" and layer < self.n_layer - 1
        return self.swa + 1 if short and self.swa + 1 < self.block_size else 0

    def replaces(self, layer):
        return self.replace and self.memory and layer < max(1, self.n_layer // 3)

    def has_value_embedding(self, layer):
        return self.value_embeddings and not self.replaces(layer)

def normed(x, eps):
    """RMSNorm without a weight over the last dimension, in x's dtype."""
    return F.rms_norm(x, x.shape[-1:], eps=eps).to(x.dtype)


def attend(q, k, v, q_pos, k_pos, window, fast):
    """Attention of q (B, n, H, D) over k, v (B, S, G, D) at ascending positions q_pos (1 or B, n) and k_pos (S,): key j
    is seen iff j <= i and, given a window, i - j < window. -> (B, n, H, D)"""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    if fast:
        q_pos = (q_pos if len(q_pos) > 1 else q_pos[0]).int()
        y = kernels.attend(q, k, v, q_pos, k_pos.int(), window=window or None)[0]
    else:
        wide = torch.promote_types(q.dtype, torch.float32)
        y = attention_naive(q, k, v, attention_bias(q_pos, k_pos, window, None, wide))
    return y.transpose(1, 2)


def apart(x, S):
    """x (B, T, ...) as its S strided subsets, each (B, ceil(T / S), ...); where S does not divide T, zeros fill up."""
    T = x.size(1)
    if T % S:
        x = torch.cat([x, x.new_zeros(len(x), S - T % S, *x.shape[2:])], 1)
    return list(x.unflatten(1, (-1, S)).unbind(2))


def together(pieces, T):
    """The T positions of which these are the strided subsets, (B, T, ...)."""
    length = pieces[0].size(1)
    pieces = [x if x.size(1) == length else torch.cat([x, torch.zeros_like(x[:, :1])], 1) for x in pieces]
    return torch.stack(pieces, 2).flatten(1, 2)[:, :T]


class Buffer:
    """Keys and values of all T positions, of which a pass computes all, or one of S strided subsets anew: it writes its
    keys and values here, then attends to all that is here. S = 0: there is one pass only, nothing is kept.

    Naive: one tensor of all positions. Fast: the subsets side by side as a list, put together for each pass; the
    gradient of that is one copy, where those of slices would be filled up with zeros and added."""

    def __init__(self, cfg, T, S, device):
        self.cfg, self.T, self.S, self.pos = cfg, T, S, torch.arange(T, device=device, dtype=torch.int32)
        self.k, self.v = [None] * cfg.n_layer, [None] * cfg.n_layer
        self.first = self.states = None     # keys and values of the first pass, where they are needed; the last states

    def enter(self, s):
        """The next pass is that of subset s, or of all positions where s is None."""
        self.s = s

    def write(self, kept, new):
        """new (B, n, ...) of the pass's positions into what is kept."""
        if self.s is None:
            return apart(new, self.S) if self.cfg.fast else new
        if self.cfg.fast:
            return [new if s == self.s else x for s, x in enumerate(kept)]
        return torch.slice_scatter(kept, new, 1, self.s, self.T, self.S)

    def past(self, kept, i):
        """Of kept states, those i positions before the pass's positions, zero where there are none: (B, n, C)."""
        if not self.cfg.fast:
            return F.pad(kept, (0, 0, i, 0))[:, :self.T][:, self.s::self.S]
        back, subset = divmod(self.s - i, self.S)                   # that many places back in that subset
        x = F.pad(kept[subset], (0, 0, -back, 0)) if back else kept[subset]
        return x[:, :len(range(self.s, self.T, self.S))]

    def whole(self, kept):
        """What is kept, (B, T, ...)."""
        return together(kept, self.T) if isinstance(kept, list) else kept

    def attend(self, layer, q, k, v):
        """y (B, n, H, D) of the pass's positions."""
        window, fast = self.cfg.window(layer), self.cfg.fast
        if self.S:
            self.k[layer], self.v[layer] = self.write(self.k[layer], k), self.write(self.v[layer], v)
        if self.s is not None:
            k, v = self.whole(self.k[layer]), self.whole(self.v[layer])
            return attend(q, k, v, self.pos[None, self.s::self.S], self.pos, window, fast)
        if not fast:
            return attend(q, k, v, self.pos[None], self.pos, window, fast)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        y = kernels.attend(q, k, v, window=window)[0] if window else attention_fast(q, k, v, None)
        return y.transpose(1, 2)


class History:
    """Keys, values and states of a chain of passes, each of the positions after the last one's. Gradients flow.

    The fast path keeps the newest of them, up to FOLD passes, as a list and the older ones in one tensor, and merges
    the attention over both: to copy all of them in every pass would take some FOLD times the memory."""

    FOLD = 32

    def __init__(self, cfg, x, n_states):
        self.cfg, self.done, self.folded = cfg, 0, 0
        self.old, self.new = [None] * cfg.n_layer, [[] for _ in range(cfg.n_layer)]
        self.pos = torch.arange(x.size(1), device=x.device, dtype=torch.int32)
        self.states = x.new_zeros(len(x), n_states, x.size(-1))         # newest first
        self.before = None

    def enter(self, at):
        self.at = at
        if self.cfg.fast and len(self.new[0]) == self.FOLD:
            self.old = [self.joined(layer, [] if old is None else [old]) for layer, old in enumerate(self.old)]
            self.new, self.folded = [[] for _ in self.new], self.done

    def joined(self, layer, before=()):
        return tuple(torch.cat(x, 1) for x in zip(*before, *self.new[layer]))

    def attend(self, layer, q, k, v):
        """y (B, n, H, D) of the pass's positions over themselves and all before them."""
        self.new[layer].append((k, v))
        window, q_pos, end = self.cfg.window(layer), self.pos[self.at], self.done + k.size(1)
        k, v = self.joined(layer)
        if not self.folded:
            return attend(q, k, v, q_pos[None], self.pos[:end], window, self.cfg.fast)
        parts = [kernels.attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), q_pos, k_pos,
                                window=window or None)
                 for (k, v), k_pos in (((k, v), self.pos[self.folded:end]), (self.old[layer], self.pos[:self.folded]))]
        return kernels.merge(*parts[0], *parts[1])[0].transpose(1, 2)

    def leave(self, m):
        """Take in the states m (B, n, C) of the pass's positions."""
        self.done += m.size(1)
        self.states = torch.cat([m.flip(1), self.states], 1)[:, :self.states.size(1)]


class MemoryCache(KVCache):
    """A KVCache that knows windows, and the last states of each row: (B, n_states, n_embd), newest first. Where
    positions go through the layers twice, `before` holds keys and values of the first time."""

    def __init__(self, cfg, batch_size, max_len, device, dtype, state_dtype, n_states):
        super().__init__(cfg, batch_size, max_len, device, dtype)
        self.cfg = cfg
        with torch.inference_mode(False):
            shape = batch_size, n_states, cfg.n_embd
            self.states = torch.zeros(shape, device=device, dtype=state_dtype)
        self.before = None

    def nbytes(self):
        """Bytes held for keys, values and states, for all rows at max_len."""
        return super().nbytes() + self.states.nbytes + (self.before.nbytes() if self.before else 0)

    def reset(self, rows=None):
        """Empty the given rows (a list or tensor of indices; None: all), so that new sequences may start."""
        super().reset(rows)
        self.states[slice(None) if rows is None else rows] = 0
        if self.before:
            self.before.reset(rows)

    def open(self, T, n_valid):
        """Announce T new tokens a row, n_valid (B,) of them real; returns their positions (1 or B, T). ValueError where
        a row would outgrow max_len: before anything has changed."""
        self.T, self.n_valid, self.pos = T, n_valid, self.place(T, n_valid)
        if self.before:
            self.before.open(T, n_valid)
        return self.pos

    def enter(self, at):
        """Make place for the new tokens `at`, a slice; all of them together have it already."""
        n = at.stop - at.start
        if n < self.T:
            self.pos = self.place(n, None if self.n_valid is None else self.n_valid - at.start)

    def attend(self, layer, q, k, v):
        """Write k, v of the new tokens; y (B, n, H, D) of them over all keys of their rows."""
        k, v = self.append(layer, k.transpose(1, 2), v.transpose(1, 2))
        k, v = k.to(q.dtype), v.to(q.dtype)                             # (B, G, S, D)
        window = self.cfg.window(layer)
        plain = not self.ragged and (q.size(1) == 1 or self.longest == 0 and not window)
        if not (self.cfg.fast and plain):
            k, v, at = k.transpose(1, 2), v.transpose(1, 2), torch.arange(self.end, device=q.device)
            return attend(q, k, v, self.pos, at, window, self.cfg.fast)
        if window:
            k, v = k[:, :, -window:], v[:, :, -window:]
        return attention_fast(q.transpose(1, 2), k, v, None).transpose(1, 2)

    def leave(self, m):
        """Count the new tokens; with memory there is one of them a row, whose state is m (B, 1, C)."""
        if self.states.size(1):
            recent = torch.cat([m, self.states[:, :-1]], 1)
            if self.ragged:
                recent = torch.where(self.new[:, None, None] > 0, recent, self.states)
            self.states.copy_(recent)
        self.advance()

    def take(self, buffer):
        """Fill the empty cache with all tokens of a Buffer, padding left out, and count them."""
        for layer, kv in enumerate(zip(buffer.k, buffer.v)):
            self.append(layer, *(buffer.whole(x).transpose(1, 2) for x in kv))
        if self.before:
            for layer, kv in enumerate(zip(*buffer.first)):
                self.before.append(layer, *(buffer.whole(x).transpose(1, 2) for x in kv))
            self.before.advance()
        states = buffer.whole(buffer.states)
        for i in range(self.states.size(1)):            # i tokens before a row's last
            at = self.new - 1 - i
            state = states[torch.arange(len(at), device=at.device), at.clamp(min=0)]
            self.states[:, i] = torch.where(at[:, None] < 0, 0, state)
        self.advance()


class Text(NamedTuple):
    """What the layers need to know of some tokens."""
    x0: torch.Tensor                # (B, n, C) normed embeddings
    values: tuple                   # of each layer, (B, n, G, D) value embeddings, or None
    cos: torch.Tensor               # (1 or B, n, D) rotary tables
    sin: torch.Tensor
    w_in: tuple                     # of each layer, what Attention.joined gives: the same for all tokens

    def at(self, where):
        """The part of it at some positions, a slice."""
        values = tuple(None if e is None else e[:, where] for e in self.values)
        return Text(self.x0[:, where], values, self.cos[:, where], self.sin[:, where], self.w_in)

    def subsets(self, S):
        """The S strided subsets of it."""
        T = self.x0.size(1)
        n = [len(range(s, T, S)) for s in range(S)]
        cut = lambda x: [None] * S if x is None else [y[:, :m] if m < y.size(1) else y for y, m in zip(apart(x, S), n)]
        parts = zip(cut(self.x0), zip(*map(cut, self.values)), cut(self.cos), cut(self.sin))
        return [Text(*part, self.w_in) for part in parts]


class Projection(nn.Module):
    """Wk_rec and Wv_rec: what the memory is as keys and values."""

    def __init__(self, cfg):
        super().__init__()
        self.head_dim, width = cfg.head_dim, cfg.n_kv_head * cfg.head_dim
        self.wk = nn.Linear(cfg.n_embd, width, bias=False) if cfg.in_keys else None
        self.wv = nn.Linear(cfg.n_embd, width, bias=False) if cfg.in_values else None

    def forward(self, m):
        """m (B, n or 1, C) -> two of (B, n or 1, G, D), None where the memory does not enter."""
        return tuple(None if w is None else w(m).unflatten(-1, (-1, self.head_dim)) for w in (self.wk, self.wv))


# what in Attention reads its input: matrices, and those of gates with the gates that come out of them
PLAIN = ("wq", "wk", "wv")
GATES = {"w_value": ("g_value",), "w_gate": ("g_loc", "g_rec"), "w_out_gate": ("g_out",)}


class Attention(nn.Module):
    """Causal self-attention whose keys and values also hold the memory."""

    def __init__(self, cfg, layer):
        super().__init__()
        self.cfg, self.layer, self.local = cfg, layer, not cfg.replaces(layer)
        own = (cfg.in_keys or cfg.in_values) and cfg.projections == "layerwise"
        self.rec = Projection(cfg) if own else None
        C, D, H, G = cfg.n_embd, cfg.head_dim, cfg.n_head, cfg.n_kv_head
        self.wq = nn.Linear(C, H * D, bias=False)
        if self.local:
            self.wk = nn.Linear(C, G * D, bias=False)
            self.wv = nn.Linear(C, G * D, bias=False)
        self.wo = nn.Linear(H * D, C, bias=False)
        if cfg.has_value_embedding(layer):
            self.w_value = nn.Linear(min(VALUE_CHANNELS, C), G, bias=False)         # the value embedding's gate
        if cfg.in_keys or cfg.in_values:
            self.w_gate = nn.Linear(C, (1 + self.local) * G, bias=False)            # g_loc, g_rec
        if cfg.gated_attention:
            self.w_out_gate = nn.Linear(C, H, bias=False)
        if cfg.value_residual and layer:
            self.v0_scale = nn.Parameter(torch.zeros(()))
        self.plain = [name for name in PLAIN if hasattr(self, name)]
        self.gates = [gate for name in GATES if hasattr(self, name) for gate in GATES[name]
                      if self.local or gate != "g_loc"]
        self.widths = ([getattr(self, name).out_features for name in self.plain],
                       [H if gate == "g_out" else G for gate in self.gates])

    def matrices(self):
        """The weights of PLAIN and GATES that this layer has."""
        return [getattr(self, name).weight for name in (*PLAIN, *GATES) if hasattr(self, name)]

    def joined(self, dtype):
        """All matrices that read u as one, for one product in place of up to six."""
        width = self.cfg.n_embd
        return torch.cat([F.pad(w, (0, width - w.size(1))) for w in self.matrices()]).to(dtype)

    def read(self, u, w_in):
        """What the matrices make of u, by name: wq, wk, wv (B, n, heads, D), and gates, 2 sigmoid of it, (B, n, heads,
        1). w_in as joined gives it, or None: one product after the other."""
        if w_in is None:
            of_u = torch.cat([F.linear(u[..., :w.size(1)], w) for w in self.matrices()], -1)
        else:
            of_u = F.linear(u, w_in)
        plain, gates = self.widths
        *plain, opening = of_u.split([*plain, sum(gates)], -1)
        plain = (x.unflatten(-1, (-1, self.cfg.head_dim)) for x in plain)
        opened = (2 * torch.sigmoid(opening)[..., None]).split(gates, -2) if gates else ()
        return dict(zip(self.plain, plain)) | dict(zip(self.gates, opened))

    def forward(self, u, text, memory, rec, v0, store):
        """u (B, n, C), normed; memory (B, n or 1, C) or None, rec what the shared projections make of it; v0 the
        values (B, n, G, D) of layer 0, None there. -> (B, n, C), and the values."""
        of_u = self.read(u, text.w_in[self.layer])
        if self.rec is not None and memory is not None:
            rec = self.rec(memory)
        k, v = self.keys_values(of_u, text.values[self.layer], rec)
        if self.cfg.value_residual and v0 is not None:
            v = v + self.v0_scale * v0
        q, k = (apply_rotary(normed(x, self.cfg.norm_eps), text.cos, text.sin).to(v.dtype) for x in (of_u["wq"], k))
        y = store.attend(self.layer, q, k, v)
        if self.cfg.gated_attention:
            y = y * of_u["g_out"]
        return self.wo(y.flatten(2)), v

    def keys_values(self, of_u, e, rec):
        """k (before norm and rotary) and v, (B, n, G, D), of what the matrices made of u, the value embeddings e and
        what the memory gives, rec, which is None where it is zero."""
        cfg, local = self.cfg, (None, None)
        if self.local:
            local = of_u["wk"], of_u["wv"] if e is None else torch.addcmul(of_u["wv"], of_u["g_value"], e)
        if not (cfg.in_keys or cfg.in_values):
            return local
        g_loc, g_rec = of_u.get("g_loc"), of_u["g_rec"]
        if rec is None and not self.local:
            zero = torch.zeros_like(g_rec).expand(*g_rec.shape[:3], cfg.head_dim)
            return zero, zero
        return tuple(blend(g_loc, x, g_rec, y) if inside else x
                     for x, y, inside in zip(local, rec or (None, None), (cfg.in_keys, cfg.in_values)))


def blend(g_loc, local, g_rec, recurrent):
    """g_loc local + g_rec recurrent; one term alone where the other is None."""
    if local is None:
        return g_rec * recurrent
    return g_loc * local if recurrent is None else torch.addcmul(g_loc * local, g_rec, recurrent)


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
        self.cfg = cfg
        self.attn, self.mlp = Attention(cfg, layer), SquaredMLP(cfg)
        self.drop = nn.Dropout(cfg.dropout)
        if cfg.layer_scale:
            self.scales = nn.Parameter(torch.ones(2))

    def forward(self, x, text, memory, rec, v0, store):
        y, v = self.attn(normed(x, self.cfg.norm_eps), text, memory, rec, v0, store)
        x = x + self.drop(y * self.scales[0] if self.cfg.layer_scale else y)
        y = self.mlp(normed(x, self.cfg.norm_eps))
        return x + self.drop(y * self.scales[1] if self.cfg.layer_scale else y), v


class Model(LanguageModel):
    """The Latent Recurrent Transformer and its backbone. See Config for its sizes and forward for its use."""

    def __init__(self, cfg):
        super().__init__()
        self.cfg, self.sources = cfg, cfg.sources
        L, padded = cfg.n_layer, 64 * math.ceil(cfg.vocab_size / 64)
        self.wte = nn.Embedding(padded, cfg.n_embd)
        self.drop = nn.Dropout(cfg.dropout)
        self.values = nn.ModuleDict({str(layer): nn.Embedding(padded, cfg.n_kv_head * cfg.head_dim)
                                     for layer in range(L) if cfg.has_value_embedding(layer)})
        self.blocks = nn.ModuleList(Block(cfg, layer) for layer in range(L))
        self.alpha = nn.Parameter(torch.ones(L)) if cfg.x0_mixing else None
        self.beta = nn.Parameter(torch.full((L,), 0.1)) if cfg.x0_mixing else None
        self.gamma = nn.Parameter(torch.full((L,), 0.1)) if cfg.in_residual else None
        if cfg.dense_residual and L > 1:
            self.delta = nn.Parameter(torch.zeros(L, L))                # of layer j's output in layer i > j's input
        if (cfg.in_keys or cfg.in_values) and cfg.projections == "shared":
            self.rec = Projection(cfg)
        if cfg.memory and len(self.sources) > 1:
            self.source_weights = nn.Parameter(torch.zeros(len(self.sources)))     # of a softmax
        if cfg.memory and cfg.state == "average":
            self.state_weights = nn.Parameter(torch.zeros(cfg.n_states))
        self.head = nn.Linear(cfg.n_embd, padded, bias=False)
        self.init_weights()

    @torch.no_grad()
    def init_weights(self):
        """nanochat's: embedding N(0, 1), head N(0, 0.001), what reads the residual stream uniform with deviation
        1 / sqrt(n_embd), what writes to it zero, gates zero; scales as they were made."""
        limit = math.sqrt(3 / self.cfg.n_embd)
        for name, p in self.named_parameters():
            if name == "wte.weight":
                p.normal_(0, 1)
            elif name == "head.weight":
                p.normal_(0, 0.001)
            elif name.endswith(("wo.weight", "w_down.weight", "w_gate.weight", "w_value.weight", "w_out_gate.weight")):
                p.zero_()
            elif p.dim() == 2 and name != "delta":
                p.uniform_(-limit, limit)

    @property
    def context_limit(self):
        """The most tokens one cache or one forward may hold."""
        return self.cfg.block_size

    @property
    def context_kept(self):
        """How many tokens sample.py keeps of a full context: half, because taking them in again is slow."""
        return (self.cfg.block_size + 1) // 2 if self.cfg.memory else self.cfg.block_size

    def predict(self, h, targets):
        """As in all models. In interleaved training the loss also counts the first pass: aux has
        "ce" of the positions computed again, and "ce_first"."""
        h, first = h
        logits, ce, aux = super().predict(h, targets)
        if targets is None or first is None:
            return logits, ce, aux
        S, ce_first = min(self.cfg.subsets, targets.size(1)), super().predict(first, targets)[1]
        return logits, (ce_first + S * ce) / (S + 1), {**aux, "ce_first": ce_first.detach()}

    @torch.no_grad()
    def estimate(self, idx, targets):
        """The cross-entropy that the training path computes, without dropout, in place of the exact chain's: the same
        weights, much faster. None where they are the same."""
        if not self.cfg.memory or self.cfg.train_path == "exact":
            return None
        h, _ = self.hidden(idx, None, None, self.cfg.train_path)
        return cross_entropy(self.logits(h), targets)

    def hidden(self, idx, cache, n_valid, path=None):
        """The residual stream (B, T, C) after the last layer, and what it was in the first pass of
        the interleaved path (else None). path: None is train_path in training mode, else exact."""
        T, path = idx.size(1), path or (self.cfg.train_path if self.training else "exact")
        pos = torch.arange(T, device=idx.device)[None] if cache is None else cache.open(T, n_valid)
        end = T if cache is None else cache.end
        self.check_context(end, "{} tokens are")
        text = self.text(idx, pos)
        if cache is not None:
            return self.cached(text, cache), None
        if not self.cfg.memory or path == "interleaved":
            return self.interleaved(text)[:2]
        if path == "exact" and self.cfg.fast and not torch.is_grad_enabled():
            cache = self.init_cache(len(idx), T)
            cache.open(T, None)
            return self.chain(text, cache, 1), None
        history = History(self.cfg, text.x0, self.cfg.n_states)
        history.before = History(self.cfg, text.x0, 0) if self.cfg.twice else None
        return self.chain(text, history, self.cfg.chunk if path == "chunked" else 1), None

    def text(self, idx, pos):
        """The Text of idx (B, T) at positions pos (1 or B, T)."""
        cfg, x0 = self.cfg, self.drop(normed(self.wte(idx), self.cfg.norm_eps))
        values = tuple(self.values[str(layer)](idx).unflatten(-1, (-1, cfg.head_dim)).to(compute_dtype(x0))
                       if str(layer) in self.values else None for layer in range(cfg.n_layer))
        w_in = (None,) * cfg.n_layer
        if cfg.fast and idx.size(1) > 1:    # for one token copying the weights would cost more
            w_in = tuple(block.attn.joined(compute_dtype(x0)) for block in self.blocks)
        return Text(x0, values, *rotary_tables(pos, cfg.head_dim, cfg.rope_theta, x0.dtype), w_in)

    def run(self, text, memory, store):
        """One pass: the positions of text through all layers, with memory (B, n or 1, C), or None for zero, and the
        keys and values in store. -> the residual stream after the last layer, and the states, (B, n, C)."""
        if memory is None and self.cfg.memory and not self.cfg.fast:
            memory = torch.zeros_like(text.x0)
        rec = self.rec(memory) if memory is not None and hasattr(self, "rec") else None
        x, outputs, v0 = text.x0, [], None
        scales = [p.unbind() if p is not None else () for p in (self.alpha, self.beta, self.gamma)]
        for layer, block in enumerate(self.blocks):
            start = self.entering(layer, x, text.x0, memory, outputs, *scales)
            x, v = block(start, text, memory, rec, v0, store)
            outputs.append(x)
            v0 = v if v0 is None else v0
        return x, self.state(outputs)

    def entering(self, layer, x, x0, memory, outputs, alpha, beta, gamma):
        """What a layer starts from: alpha x + beta x0 + gamma m, (B, n, C)."""
        if alpha:
            x = torch.addcmul(alpha[layer] * x, beta[layer], x0)
        if gamma and memory is not None:
            x = torch.addcmul(x, gamma[layer], memory)
        if self.cfg.dense_residual and outputs:
            x = x + sum(self.delta[layer, j] * earlier for j, earlier in enumerate(outputs))
        return x

    def state(self, outputs):
        """The states: the source layer's output, or a learned average of several layers'. None without memory."""
        if not self.cfg.memory:
            return None
        chosen = [outputs[layer - 1] for layer in self.sources]
        if len(chosen) == 1:
            return chosen[0]
        return sum(w * x for w, x in zip(self.source_weights.softmax(-1), chosen))

    def memory(self, past, own):
        """The memory of some positions. past(i): the states i positions before; own: their own of the first time."""
        if self.cfg.state == "lag":
            return past(self.cfg.lag)
        if self.cfg.state == "average":
            return sum(w * past(i) for i, w in enumerate(self.state_weights.softmax(-1), 1))
        return own if self.cfg.state == "current" else own + past(1)

    def chain(self, text, store, size):
        """Passes of `size` positions, one after the other; all positions of one read the last states of those before.
        -> the residual stream (B, T, C)."""
        T, parts = text.x0.size(1), []
        for start in range(0, T, size):
            at, own = slice(start, min(start + size, T)), None
            part = text.at(at) if T > size else text
            if self.cfg.twice:
                store.before.enter(at)
                own = self.run(part, None, store.before)[1]
                store.before.leave(own)
            store.enter(at)
            x, m = self.run(part, self.memory(lambda i: store.states[:, i - 1:i], own), store)
            store.leave(m)
            parts.append(x)
        if len(parts) > 1:
            return torch.cat(parts, 1)
        # no later pass reads the states, but DDP waits for a gradient of every parameter: a zero
        return parts[0] + 0 * self.source_weights.sum() if len(self.sources) > 1 else parts[0]

    def cached(self, text, cache):
        """The new tokens after those that the cache holds. -> the residual stream (B, T, C)."""
        T = text.x0.size(1)
        if not self.cfg.memory:
            cache.enter(slice(0, T))
            x, _ = self.run(text, None, cache)
            cache.leave(None)
            return x
        if self.cfg.prefill == "exact" or T == 1 or cache.longest:
            return self.chain(text, cache, 1)
        x, _, buffer = self.interleaved(text)
        cache.take(buffer)
        return x

    def interleaved(self, text):
        """Algorithm 1: a first pass with zero memory, then one over each strided subset, which reads and writes the
        buffer. -> the residual stream of the subsets' passes and of the first, (B, T, C), and the buffer. Without
        memory there is one pass only: its residual stream, None and the buffer."""
        T = text.x0.size(1)
        S = min(self.cfg.subsets, T) if self.cfg.memory else 0
        buffer = Buffer(self.cfg, T, S, text.x0.device)
        buffer.enter(None)
        first, own = self.run(text, None, buffer)
        if not S:
            return first, None, buffer
        buffer.first = (list(buffer.k), list(buffer.v)) if self.cfg.twice else None
        states, parts = buffer.write(None, own), []
        for s, part in enumerate(text.subsets(S)):
            buffer.enter(s)
            x, m = self.run(part, self.memory(lambda i: buffer.past(states, i), own[:, s::S]), buffer)
            states = buffer.write(states, m)
            parts.append(x)
        buffer.states = states
        return together(parts, T), first, buffer

    def logits(self, h):
        """The residual stream (..., C) -> softcap tanh(z / softcap), (..., vocab_size)."""
        z = super().logits(normed(h, self.cfg.norm_eps))[..., :self.cfg.vocab_size]
        return self.cfg.softcap * torch.tanh(z / self.cfg.softcap)

    def init_cache(self, batch_size, max_len):
        """An empty cache for batch_size rows of up to max_len tokens, at most block_size."""
        self.check_context(max_len, "max_len={} is")
        w = self.wte.weight
        sizes = self.cfg, batch_size, max_len, w.device, compute_dtype(w), w.dtype
        cache = MemoryCache(*sizes, self.cfg.n_states)
        cache.before = MemoryCache(*sizes, 0) if self.cfg.twice else None
        return cache

    def flops_per_token(self):
        """Floating-point operations of one token's forward and backward in a sequence of block_size: 6 for each weight
        of a matrix product, and 12 C for each visible key, averaged over the positions; twice where the training path
        goes through the layers twice, of which the memory's projections take part in one, and the head in those that
        have a loss."""
        cfg, T = self.cfg, self.cfg.block_size
        of_memory = sum(p.numel() for name, p in self.named_parameters() if ".rec." in "." + name)
        weights = sum(p.numel() for p in self.blocks.parameters() if p.dim() == 2)
        if cfg.projections == "layerwise":
            weights -= of_memory
        windows = [min(cfg.window(layer) or T, T) for layer in range(cfg.n_layer)]
        keys = sum((w * (w + 1) / 2 + (T - w) * w) / T for w in windows)
        losses = 1 + (cfg.memory and cfg.train_path == "interleaved")
        passes = max(losses, 1 + cfg.twice)
        return passes * (6.0 * weights + 12.0 * cfg.n_embd * keys) + 6.0 * (
            of_memory + losses * self.wte.weight.numel())

    def param_groups(self, cfg):
        """The paper's optimizer (Appendix A) for optimizer=muon: Muon for the matrices, AdamW for the rest, each kind
        of parameter at its own rate. Rates are for 2^19 tokens a step and scaled to cfg's. muon_learning_rate (0.02 in
        the paper) and learning_rate (0.004: the head's, with which the others of AdamW move) come from cfg. None for
        another optimizer: the trainer's own rule."""
        if cfg.optimizer != "muon":
            return None
        tokens = cfg.batch_size * cfg.gradient_accumulation_steps * self.cfg.block_size
        batch, width = math.sqrt(tokens / 2 ** 19), (self.cfg.n_embd / 768) ** -0.5
        kinds = {kind: [p for name, p in self.named_parameters() if kind_of(name, p) == kind]
                 for kind in ("matrix", *RATES)}
        groups = [dict(kind="adamw", params=kinds[kind], betas=betas, eps=1e-10, weight_decay=0.0,
                       lr=cfg.learning_rate * ratio * batch * (width if kind in ("embedding", "head") else 1))
                  for kind, (ratio, betas) in RATES.items()]
        return groups + [dict(kind="muon", params=kinds["matrix"], lr=cfg.muon_learning_rate * batch,
                              momentum=cfg.muon_momentum, weight_decay=cfg.weight_decay * (12 / self.cfg.n_layer) ** 2)]


# Kinds of parameters: AdamW's rate in units of the head's 0.004 (embeddings 0.3, scalars 0.5, residual scales 0.005)
# and its betas. Gates take the head's rate: the paper counts them among the scalars, whose 0.5 would move what a gate
# opens by, a sum over all channels, by many units a step. The backbone's gates are with them, for AdamW too.
RATES = {"embedding": (75, (0.8, 0.95)), "head": (1, (0.8, 0.95)), "gate": (1, (0.8, 0.95)),
         "scale": (1.25, (0.8, 0.95)), "x0": (125, (0.96, 0.95)), "scalar": (125, (0.8, 0.95))}


def kind_of(name, p):
    """The kind in RATES of a parameter."""
    if name.startswith(("wte.", "values.")):
        return "embedding"
    if name.startswith("head."):
        return "head"
    if p.dim() == 2 and name != "delta":
        return "gate" if name.endswith(("w_gate.weight", "w_value.weight", "w_out_gate.weight")) else "matrix"
    return {"alpha": "scale", "beta": "x0"}.get(name, "scalar")

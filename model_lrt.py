"""
LRT, the Latent Recurrent Transformer: a token reads what an upper layer made of the token before.

In a Transformer, layer l reads earlier tokens only as they were before layer l. Yet in decoding the
previous token has already passed through all layers. LRT keeps the residual stream of each token
after one upper layer, the source. This is the token's memory m_t. All layers of the next token read
it, the lowest ones too:

                 token t-1       token t
    layer 5          o           +-> o
    layer 4          o           +-> o
    layer 3          o -- m -----+-> o        source: 0.6 of the depth
    layer 2          o           +-> o
    layer 1          o           +-> o

Each layer computes the following. The lines with * are LRT's, and memory=false leaves them out. The
other lines are the backbone, nanochat's GPT (github.com/karpathy/nanochat, 98eed6d). Each of its
layers has value embeddings VE_l, a table with a row for each token id, and may have a sliding
window (pattern).

    x <- alpha x + beta x0                           x0 = RMSNorm(E[idx]) is x before layer 1
  * x <- x + gamma m_{t-1}                           (5)
    u = RMSNorm(x),  k = Wk u,  v = Wv u
  * k_rec = Wk_rec m_{t-1},  v_rec = Wv_rec m_{t-1}  (2)  one Wk_rec, Wv_rec for all layers
  * g_loc, g_rec = 2 sigmoid(Wg u)                   (3)  two a KV head, 1 before training
  * k <- g_loc k + g_rec k_rec,  v likewise          (4)
    v <- v + 2 sigmoid(Wve u[:32]) VE_l[idx]              one such gate a KV head
    x <- x + Wo Attention(RoPE(RMSNorm(Wq u)), RoPE(RMSNorm(k)), v)
    x <- x + W_down relu(W_up RMSNorm(x))^2

    m_t = x after the source layer, m_{-1} = 0
    logits = 15 tanh(z / 15),  z = W_head RMSNorm(x) after the last layer

Numbers of equations are the paper's. loc stands for local and rec for recurrent. Layers count from
1 in this text and in source=, and from 0 in the code. No RMSNorm has a weight. alpha, beta and
gamma are scalars of a layer and start at 1, 0.1 and 0.1. With source_norm, which is the default for
more than 10 layers, m_t is RMSNorm(x).

The memories form a chain: token t needs m_{t-1}, so it cannot run before token t - 1 has passed the
source. The exact chain is T passes over one position each. Evaluation runs it, and so does decoding
(but not a prompt with prefill=interleaved). With train_path=exact training runs it, too, which is
slow.

Algorithm 1 (train_path=interleaved) approximates the chain. Its work is that of two passes over all
positions, because each position is computed twice. The first pass runs all positions at once with
memory 0. It leaves two things: a tensor m (B, T, C) with the memories of all positions, and a
buffer with the keys and values of each layer. Then N strided subsets of the positions run again,
one subset after the other. Subset s has the positions s, s + N, s + 2 N, ... Its tokens read
m_{t-1} in m, as the earlier passes have left it. In each layer the subset first replaces its keys
and values in the buffer and then attends to the buffer. After the last layer it replaces its
memories in m. The arrows are the memories for N = 2:

    position        0     1     2     3     4     5
    first pass      o     o     o     o     o     o         memory 0 for all
                           \           \
    subset 0        o       `-> o       `-> o               position 0 reads m_{-1} = 0
                     \           \           \
    subset 1          `-> o       `-> o       `-> o

In subset 0, position 4 attends to 1 and 3 of the first pass and to 0, 2 and 4 of subset 0. In
subset 1, position 3 attends to 0 and 2 of subset 0 and to 1 and 3 of subset 1. The loss is the mean
of all passes' cross-entropies, and gradients flow through all passes, m and the buffer:

    loss = (L_first + L_0 + ... + L_{N-1}) / (N + 1)      (6)

The code computes L_0 + ... + L_{N-1} as N times the mean over all recomputed positions, which is
the same if all subsets have equally many targets. A token of subset 0 reads a memory of the first
pass, which was made without any memory. A token of a later subset s reads the memory of the token
before it, which subset s - 1 has made. This memory depends on the memory one token further back,
and so on, down to a memory of the first pass. So the token depends on s + 1 memories, which belong
to the s + 1 tokens right before it. They are the token's part of the chain. Near the start it is
shorter. With N = 2, this part has two memories for a token of subset 1. (The keys and values that
the token attends to have read other memories, whose parts of the chain are at most as long.) N = T
is the chain itself. The paper writes S for N, and finds the same loss with 2, 4 and 8 subsets
(section 4.3).

Chunked training (Appendix D, train_path=chunked) is a chain of chunks. The K positions of a chunk
run at once and all read the last memory before the chunk.

There is no chain with memory=false, nor with source=0, where m_t is x0_t and does not depend on
m_{t-1}. One pass is exact then, and Config allows no other train_path or prefill than exact.

A path is a way to compute the memories: exact, chunked or interleaved. Training takes the path that
train_path names, and evaluation takes exact. (If the two paths differ, an evaluation has a second
loss, which `estimate` computes by the training path.) This table says which function of this file
runs:

    path                                  with a chain                  without one
    exact, fast=true, no gradients        decode_exact, a new cache     all_at_once
    exact otherwise                       chain, K = 1                  all_at_once
    chunked                               chain, K = chunk              error
    interleaved                           interleaved                   error
    a call with a cache                   decode_exact, token by token  decode_exact, one pass
    prefill=interleaved (*)               prefill_interleaved           error

(*) is a call with an empty cache and several tokens a row.

Left out are the paper's variants with older memories or means of several, with memory for keys or
values alone, and with other backbones (Tables 1, 2, 6 and 8).

Paper: Huang et al. 2026 (2605.26797). Where this file and the authors' code differ, or the paper
is silent (their code: github.com/OoDBag/Latent_recurrent_transformer, e0d0f6e):
- m_t. In their code it is RMSNorm(x) after the last layer (here source=n_layer source_norm=true).
- (2) The paper does not say how Wk_rec and Wv_rec start. They start like Wk and Wv, as in their
  code, which has a pair for each layer (here projections=layerwise).
- (3) The gates read u here, x in the paper, and u[:32] in their code.
- v. The paper does not say where value embeddings enter. They enter after (4), as in their code.
- (6) Their code takes the mean of each subset, as (6) does. This file takes one mean, see above.
- Sampling. Their code samples without m. Here decoding is the exact chain.
- Wg and Wve. Muon trains them in their code. AdamW trains them here, with optimizer=muon too.
- RoPE rotates the other way in their code. The same numbers come from negating the second half of
  each head's rows of Wq, Wk and Wk_rec.
- norm_eps is 1.2e-7 in their code, and 1e-5 here.
- Dropout, on x0 and on both branches of a block, is ours.

Letters beside those of model_gpt.py: n is the number of positions of a pass, K that of a chunk, and
N the number of subsets. In (6) L_first and L_s are losses. In pattern=, S and L are kinds of
layers.
"""
import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F

import graphs
import kernels
import model_gpt
from decoding import KVCache
from model_gpt import (BaseConfig, LanguageModel, apply_rope, attend, attention_bias,
                       check_call, choice, cross_entropy, rope_tables, upcast, visible_keys)


@dataclass
class Config(BaseConfig):
    memory: bool = True     # false: the backbone alone, all else equal (the baseline)
    # auto is interleaved where there is a chain, and exact where there is none
    train_path: str = choice("auto", "interleaved", "chunked", "exact")
    subsets: int = 2        # N of train_path=interleaved and of prefill=interleaved
    chunk: int = 64         # K of train_path=chunked
    prefill: str = choice("exact", "interleaved")  # the path of a prompt into an empty cache
    source: int = -1        # m is x after this layer, from 1 (-1: 0.6 of the depth; 0: m is x0)
    source_norm: bool = None  # m is RMSNorm(x) (not given: if n_layer > 10)
    inject: str = choice("kv+residual", "kv", "residual")  # where m enters: (4), (5)
    projections: str = choice("shared", "layerwise")  # Wk_rec, Wv_rec: one pair, or one a layer
    pattern: str = "SSSL"   # kinds of layers, repeated: S swa keys, L all; the last layer is L
    swa: int = 0            # keys that S layers attend to, own included (0: block_size / 2 + 1)

    # These options change how a model is trained and prefilled, but not what its weights mean.
    NOT_IN_WEIGHTS = ("train_path", "subsets", "chunk", "prefill")

    def __post_init__(self):
        super().__post_init__()
        # The defaults of source, source_norm and swa are written into their fields, so that
        # dataclasses.replace keeps them. A trained model must keep its swa when block_size changes.
        # Whoever replaces n_layer must set source and source_norm, too.
        if self.source == -1:
            self.source = max(1, round(0.6 * self.n_layer))
        # source_norm prevents an overflow. At the start of training attention and MLP add nothing.
        # If m enters the residual stream and is not normed, then m_t = (1 + 0.1 source) x0_t + 0.1
        # source m_{t-1}. If source > 10, the factor of m_{t-1} is more than 1, so that the memory
        # overflows within a thousand tokens. The default depends on n_layer and not on source, so
        # that runs which differ in source= alone agree in source_norm.
        if self.source_norm is None:
            self.source_norm = self.n_layer > 10
        # nanochat's window is half of the context, without the token itself, which swa counts.
        self.swa = self.swa or self.block_size // 2 + 1
        self.into_kv = self.memory and "kv" in self.inject              # (4)
        self.into_residual = self.memory and "residual" in self.inject  # (5)
        self.has_chain = self.memory and self.source > 0
        auto = "interleaved" if self.has_chain else "exact"     # without a chain, one pass is exact
        self.train_path_used = auto if self.train_path == "auto" else self.train_path
        check(self)

    def window_of(self, layer):
        """Return how many keys a query of this layer attends to, its own included (0: all)."""
        short = self.pattern[layer % len(self.pattern)] == "S" and layer < self.n_layer - 1
        return self.swa if short and self.swa < self.block_size else 0


# ---- the method: the chain, Algorithm 1, a pass ----
# In training with targets, Model.forward itself calls `interleaved`, if train_path names it. All
# other calls without a cache go through Model.hidden. It calls one of four functions: `interleaved`
# (for `estimate`, or in training without targets), `chain`, `all_at_once`, or decode_exact, which
# computes the chain faster. Each of the four makes passes over some or all of the T positions. A
# pass is a call of run_layers with a Context. The Context holds what the layers read: the Tokens of
# its positions, their m_{t-1}, and the buffer with the keys and values of all positions so far.
# Each layer puts those of the pass into the buffer (Context.extend). In decode_exact a cache takes
# the place of the buffer. The classes Tokens and Context stand below, under "what a pass knows",
# and Model.embed makes the Tokens.

@torch.compiler.disable  # torch.compile would unroll the loop
def chain(model, tokens, K):
    """Run chunks of K positions, one after the other, and return x (B, T, C). K = 1 is the exact
    chain."""
    buffer, xs, previous = {}, [], torch.zeros_like(tokens.x0[:, :1])   # m_{-1}
    for start in range(0, tokens.x0.size(1), K):
        chunk = tokens.part(slice(start, start + K))
        x, m = run_layers(model, Context(model, chunk, previous, buffer))
        xs.append(x)
        previous = m[:, -1:]  # all positions of the next chunk read it
    return torch.cat(xs, 1)


def interleaved(model, tokens):
    """Run Algorithm 1. Return x as recomputed, x of the first pass and m, (B, T, C) each, and the
    buffer."""
    N, T, buffer = model.cfg.subsets, tokens.x0.size(1), {}
    zero = torch.zeros_like(tokens.x0[:, :1])  # m_{-1}
    first, m = run_layers(model, Context(model, tokens, zero, buffer))     # this fills the buffer
    x = first   # the subsets replace all T positions of it
    for s in range(min(N, T)):
        subset = slice(s, T, N)
        previous = shifted(m, zero)[:, subset]
        context = Context(model, tokens.part(subset), previous, buffer, subset)
        new_x, new_m = run_layers(model, context)
        # Nothing is written in place, because gradients also flow through the older x and m.
        x = torch.slice_scatter(x, new_x, 1, s, T, N)
        m = torch.slice_scatter(m, new_m, 1, s, T, N)
    return x, first, m, buffer


def shifted(m, before):
    """Return m_{t-1} (B, n, C) of n consecutive tokens. m (B, n, C) has their own memories m_t, and
    `before` (B, 1, C) is the memory of the token that precedes the first of them."""
    return torch.cat([before, m[:, :-1]], 1)


def all_at_once(model, tokens):
    """Run all positions at once, which is exact where there is no chain. Return x (B, T, C)."""
    # With source=0, m_t is x0_t. With memory=false no layer reads `previous`.
    previous = shifted(tokens.x0, torch.zeros_like(tokens.x0[:, :1]))
    return run_layers(model, Context(model, tokens, previous, {}))[0]


def run_layers(model, context):
    """Make one pass. Return x after the last layer and the positions' own m_t, (B, n, C) each."""
    cfg, x, m = model.cfg, context.x0, context.x0   # m stays x0 if source=0
    for layer, block in enumerate(model.blocks):
        x = block(x, layer, context)  # the block reads m_{t-1}, context.previous
        if layer + 1 == cfg.source:
            m = norm(x, cfg.norm_eps) if cfg.source_norm else x
    return x, m


# ---- a layer: nanochat's, with the memory where inject= has it ----

class Block(nn.Module):
    """One layer. Its equations stand at the top of this file, and the Context of the pass has all
    that they read beside x."""

    def __init__(self, cfg):
        super().__init__()
        self.cfg = cfg
        self.attn, self.mlp = Attention(cfg), SquaredMLP(cfg)
        self.drop = nn.Dropout(cfg.dropout)

    def forward(self, x, layer, context):
        eps = self.cfg.norm_eps
        x = context.alpha[layer] * x + context.beta[layer] * context.x0
        if self.cfg.into_residual:
            x = x + context.gamma[layer] * context.previous  # (5)
        x = x + self.drop(self.attn(norm(x, eps), layer, context))  # (B, n, C)
        return x + self.drop(self.mlp(norm(x, eps)))


class Attention(model_gpt.Attention):
    """This class has the matrices of model_gpt's Attention, and Wve for the gate of VE_l. (The
    tables VE_l are Model.values.) Where inject= has "kv", it also has Wg. With
    projections=layerwise it then has Wk_rec and Wv_rec, too."""

    def __init__(self, cfg):
        super().__init__(cfg)
        C, G = cfg.n_embd, cfg.kv_heads
        self.w_value = nn.Linear(min(32, C), G, bias=False)     # Wve, the gate of VE_l; not Wv
        self.w_gate = nn.Linear(C, 2 * G, bias=False) if cfg.into_kv else None  # Wg
        layerwise = cfg.into_kv and cfg.projections == "layerwise"
        # Without its own projections a layer uses context.kv_rec, which all layers share.
        self.rec = MemoryProjection(cfg) if layerwise else None

    def forward(self, u, layer, context):
        """Return Wo Attention(...), (B, n, C), from u = RMSNorm(x) (B, n, C)."""
        D, eps = self.cfg.head_size, self.cfg.norm_eps
        q, k, v = (w(u).unflatten(-1, (-1, D)) for w in (self.wq, self.wk, self.wv))
        if self.cfg.into_kv:
            k_rec, v_rec = self.rec(context.previous) if self.rec else context.kv_rec
            k, v = mix_memory(k, v, self.w_gate(u), k_rec, v_rec)  # (B, n, G, D)
        g_ve = 2 * torch.sigmoid(self.w_value(u[..., :32]))     # (B, n, G)
        v = v + g_ve[..., None] * context.ve[layer].to(v.dtype)
        q, k = (apply_rope(norm(x, eps), *context.rope) for x in (q, k))
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))        # (B, H or G, n, D)
        k, v = context.extend(layer, k, v)                      # (B, G, S, D)
        window = self.cfg.window_of(layer)
        if self.cfg.fast:
            a = attend_fast(q, k, v, context, window)
        else:
            k_pos = torch.arange(k.size(2), device=k.device)
            a = attend(q, k, v, attention_bias(context.pos, k_pos, window), fast=False)
        return self.wo(a.transpose(1, 2).flatten(2))            # (B, n, C)


def mix_memory(k, v, wg_u, k_rec, v_rec):
    """Return a layer's keys and values k, v with those of the memory, k_rec, v_rec, mixed in. All
    are (B, n, G, D), and k_rec and v_rec may have n = 1. wg_u (B, n, 2 G) is Wg u."""
    g_loc, g_rec = (2 * torch.sigmoid(wg_u)[..., None]).chunk(2, dim=2)  # (3), (B, n, G, 1)
    return g_loc * k + g_rec * k_rec, g_loc * v + g_rec * v_rec  # (4)


class MemoryProjection(nn.Module):
    """Wk_rec and Wv_rec, (2)."""

    def __init__(self, cfg):
        super().__init__()
        self.D, width = cfg.head_size, cfg.kv_heads * cfg.head_size
        self.wk = nn.Linear(cfg.n_embd, width, bias=False)  # Wk_rec
        self.wv = nn.Linear(cfg.n_embd, width, bias=False)  # Wv_rec

    def forward(self, previous):
        """Return k_rec, v_rec (B, n or 1, G, D) of m_{t-1} (B, n or 1, C)."""
        return [w(previous).unflatten(-1, (-1, self.D)) for w in (self.wk, self.wv)]   # (2)


class SquaredMLP(nn.Module):
    """W_down relu(W_up x)^2 (So et al. 2021)."""

    def __init__(self, cfg):
        super().__init__()
        self.w_up = nn.Linear(cfg.n_embd, 4 * cfg.n_embd, bias=False)
        self.w_down = nn.Linear(4 * cfg.n_embd, cfg.n_embd, bias=False)

    def forward(self, x):
        return self.w_down(F.relu(self.w_up(x)).square())


def norm(x, eps):
    """RMSNorm without a weight. The result has x's dtype, because autocast would widen it."""
    return F.rms_norm(x, x.shape[-1:], eps=eps).to(x.dtype)


# ---- what a pass knows ----

class Tokens(NamedTuple):
    """All that is known about tokens before the first layer."""
    x0: torch.Tensor        # (B, T, C)
    ve: list                # each layer's VE_l[idx], (B, T, G, D)
    rope: list              # RoPE's cos and sin, (B or 1, T, 1, D / 2)
    pos: torch.Tensor       # (B or 1, T) positions

    def part(self, span):
        """Return the Tokens of those positions that the slice `span` takes."""
        ve, rope = ([x[:, span] for x in xs] for xs in (self.ve, self.rope))
        return Tokens(self.x0[:, span], ve, rope, self.pos[:, span])


class Context:
    """The layers of a pass over n positions read this. A call makes one for each of its passes,
    but it makes RoPE's tables only once, in Tokens. (So this is no subclass of model_gpt.Context,
    which makes them itself.)

    x0, ve, rope, pos       the Tokens of the positions
    previous                their m_{t-1}, (B, n, C), or (B, 1, C) where all read the same one; with
                            memory=false it may be None, because it is not read
    kv_rec                  k_rec, v_rec (B, n or 1, G, D), if all layers share the projections
    alpha, beta, gamma      the scalars of each layer
    buffer {layer: (k, v)}  the keys and values of all positions so far, (B, G, S, D) each
    subset                  in Algorithm 1 the slice of all T positions that this pass replaces
    in_order                whether the positions are the last n of the S, in all rows"""

    def __init__(self, model, tokens, previous, buffer, subset=None):
        self.x0, self.ve, self.rope, self.pos = tokens
        self.previous, self.buffer, self.subset = previous, buffer, subset
        self.in_order = subset is None
        # unbind has one backward step, and indexing would have one for each layer.
        self.alpha, self.beta = model.alpha.unbind(), model.beta.unbind()
        self.gamma = model.gamma.unbind() if model.cfg.into_residual else None
        self.kv_rec = model.rec(previous) if model.rec else None  # once for all layers

    def extend(self, layer, k, v):
        """Put a layer's k, v (B, G, n, D) of this pass into the buffer. Return those of all
        positions so far, (B, G, S, D)."""
        old = self.buffer.get(layer)  # old is None in the first pass or chunk
        if self.subset is not None:  # a subset replaces those of its positions, not in place
            span = self.subset.start, self.subset.stop, self.subset.step
            k, v = (torch.slice_scatter(x, new, 2, *span) for x, new in zip(old, (k, v)))
        elif old:  # a chunk appends its own
            k, v = (torch.cat([x, new], 2) for x, new in zip(old, (k, v)))
        self.buffer[layer] = k, v
        return k, v


# ---- the fast path ----

def attend_fast(q, k, v, context, window):
    """Return what `attend` returns with the mask of attention_bias, (B, H, n, D), without making
    this mask of n x S."""
    n, S = q.size(2), k.size(2)
    if context.in_order and n == 1:
        # The only query attends to the last `window` keys. Without a window this is [-0:], all.
        return attend(q, k[:, :, -window:], v[:, :, -window:], None, fast=True)
    if context.in_order and n == S and not window:  # the pass is causal
        return attend(q, k, v, None, fast=True)
    # In all other cases (subsets, later chunks, windows, several new tokens after cached ones, rows
    # that hold different numbers of tokens) the kernel compares positions, as the mask does.
    q_pos = context.pos.squeeze(0).int()  # (B, n), or (n,) for all rows
    k_pos = torch.arange(S, device=q.device, dtype=torch.int32)
    return kernels.attend_by_position(q, k, v, q_pos, k_pos, window=window or None)[0]


# ---- decoding ----

def decode_exact(model, idx, cache, n_valid):
    """Run the tokens idx (B, T) that follow those of the cache, exactly: one token after the other,
    or all in one pass where there is no chain. Return x (B, T, C)."""
    T = idx.size(1)
    if T == 1 or not model.cfg.has_chain:
        return decode_pass(model, idx, cache, n_valid)
    # The result is not used. The call raises here, before a token is written, if they do not all
    # fit.
    cache.place(T, n_valid)
    # Each token is a step that a GPU can replay as a graph. At token t, n_valid - t real tokens of
    # a row are left. If none is left, the token is padding.
    step = graphs.stepper(lambda new, left: [decode_pass(model, new, cache, left)], cache,
                          fast=model.cfg.fast)
    xs = [step(idx[:, t:t + 1], None if n_valid is None else n_valid - t)[0] for t in range(T)]
    return torch.cat(xs, 1)


def decode_pass(model, idx, cache, n_valid):
    """Run the tokens idx (B, T) that follow those of the cache in one pass. T is 1 if there is a
    chain. Return x (B, T, C)."""
    slots = cache.place(idx.size(1), n_valid)
    tokens = model.embed(idx, slots.pos)
    # The first token reads cache.m. There are further tokens only without a chain. Then source=0,
    # where m_t is x0_t, or there is no memory.
    previous = shifted(tokens.x0, cache.m) if model.cfg.memory else None
    x, m = run_layers(model, CachedContext(model, tokens, previous, cache, slots))
    if model.cfg.memory:
        cache.keep(m, slots)
    cache.advance(slots)
    return x


def prefill_interleaved(model, idx, cache, n_valid):
    """Run the tokens idx (B, T) by Algorithm 1. Put the keys and values that it leaves, and the
    memory of each row's last token, into an empty cache. Return x (B, T, C)."""
    slots = cache.place(idx.size(1), n_valid)
    x, _, m, buffer = interleaved(model, model.embed(idx, slots.pos))
    for layer, (k, v) in buffer.items():
        cache.write(layer, k, v, slots)
    cache.keep(m, slots)
    cache.advance(slots)
    return x


class CachedContext(Context):
    """The Context of a pass whose keys and values go into slots of a cache."""

    def __init__(self, model, tokens, previous, cache, slots):
        super().__init__(model, tokens, previous, buffer=None)
        self.cache, self.slots = cache, slots
        self.in_order = slots.at is None  # otherwise rows hold different numbers of tokens

    def extend(self, layer, k, v):
        return self.cache.write(layer, k, v, self.slots)


class MemoryCache(KVCache):
    """A KVCache that also holds m (B, 1, C), the memory of each row's last token. m has the dtype
    of the residual stream."""

    def __init__(self, cfg, batch_size, max_len, device, dtype, m_dtype):
        super().__init__(cfg, batch_size, max_len, device, dtype)
        with torch.inference_mode(False):   # otherwise only inference mode could write to m
            self.m = torch.zeros(batch_size, 1, cfg.n_embd, device=device, dtype=m_dtype)

    def buffers(self):  # KVCache resets and measures these
        return super().buffers() + [self.m]

    def keep(self, m, slots):
        """Keep the last one of each row's new memories m (B, n, C)."""
        n_new = slots.n_new[:, None, None]
        last = m.take_along_dim((n_new - 1).clamp(min=0), 1)        # (B, 1, C)
        self.m.copy_(torch.where(n_new > 0, last, self.m))  # a row without new ones keeps its m


# ---- the model ----

class Model(LanguageModel):
    """LRT, or its backbone if memory is false."""
    runs_blocks_once = False    # several passes run the blocks, so FSDP gathers all of them at once
    # The kind of a parameter decides which optimizer trains it, and at which rate
    # (common/optim.py). Most kinds follow from place and shape: a matrix in a block is of the kind
    # matrix, any other matrix is an embedding, and all else is a scalar. These are the exceptions,
    # by a part of the name. rec is a matrix, although it may stand outside of the blocks. The head,
    # alpha and beta have learning rates of their own. w_gate and w_value are gates, which AdamW
    # trains.
    parameter_kinds = dict(rec="matrix", head="head", w_gate="gate", w_value="gate",
                           alpha="alpha", beta="beta")
    nanochat_rates = True       # each kind has nanochat's learning rate (common/optim.py)

    def __init__(self, cfg):
        nn.Module.__init__(self)    # the parts are nanochat's, not those of LanguageModel
        self.cfg = cfg
        L, C, G, D = cfg.n_layer, cfg.n_embd, cfg.kv_heads, cfg.head_size
        # V is padded so that the head is fast. The rows of padding are never trained, so that an id
        # between vocab_size and padded gives states that mean nothing.
        padded = 64 * math.ceil(cfg.vocab_size / 64)
        self.wte = nn.Embedding(padded, C)
        self.drop = nn.Dropout(cfg.dropout)
        self.values = nn.ModuleList(nn.Embedding(padded, G * D) for _ in range(L))  # VE_l
        self.blocks = nn.ModuleList(Block(cfg) for _ in range(L))
        self.alpha = nn.Parameter(torch.ones(L))
        self.beta = nn.Parameter(torch.full((L,), 0.1))
        self.gamma = nn.Parameter(torch.full((L,), 0.1)) if cfg.into_residual else None
        shared = cfg.into_kv and cfg.projections == "shared"
        self.rec = MemoryProjection(cfg) if shared else None
        self.head = Head(cfg, padded)
        self.init_weights()

    @torch.no_grad()
    def init_weights(self):
        """Initialize as nanochat does. The matrices of the gates, and those that write to the
        residual stream, are 0. wte and head are normal with std 1 and 0.001. All other matrices,
        Wk_rec and Wv_rec too, are uniform with std 1 / sqrt(C)."""
        limit = math.sqrt(3 / self.cfg.n_embd)
        for name, p in self.named_parameters():
            if name == "wte.weight":
                p.normal_(0, 1)
            elif name == "head.weight":
                p.normal_(0, 0.001)
            elif name.endswith(("wo.weight", "w_down.weight", "w_gate.weight", "w_value.weight")):
                p.zero_()
            elif p.dim() == 2:
                p.uniform_(-limit, limit)

    def embed(self, idx, pos=None):
        """Return the Tokens of idx (B, T) at positions pos (B or 1, T), or 0 .. T - 1 for None."""
        cfg, T = self.cfg, idx.size(1)
        pos = torch.arange(T, device=idx.device)[None] if pos is None else pos
        x0 = self.drop(norm(self.wte(idx), cfg.norm_eps))           # (B, T, C)
        ve = [table(idx).unflatten(-1, (cfg.kv_heads, -1)) for table in self.values]
        rope = rope_tables(pos, cfg.head_size, cfg.rope_theta, x0.dtype)
        return Tokens(x0, ve, [table[:, :, None] for table in rope], pos)

    def forward(self, idx, targets=None, cache=None, n_valid=None):
        """The contract is that of all models. In interleaved training the loss is (6), "ce" in aux
        is the cross-entropy of the recomputed positions, and "ce_first" that of the first pass."""
        check_call(idx, cache, n_valid)
        cfg, N, T = self.cfg, self.cfg.subsets, idx.size(1)
        if cache is None and T > cfg.block_size:  # a cache counts its tokens itself
            raise ValueError(f"{T} tokens are more than block_size={cfg.block_size}")
        algorithm1 = self.training and cfg.train_path_used == "interleaved" and cache is None
        if not algorithm1 or targets is None:
            return super().forward(idx, targets, cache, n_valid)
        x, first, *_ = interleaved(self, self.embed(idx))
        logits = self.head(norm(x, cfg.norm_eps))   # (B, T, V)
        # If N > T, some subsets are empty, and the weight of ce is still N.
        ce = cross_entropy(logits, targets)
        ce_first = cross_entropy(self.head(norm(first, cfg.norm_eps)), targets)
        aux = {"ce": ce.detach(), "ce_first": ce_first.detach()}
        return logits, (ce_first + N * ce) / (N + 1), aux  # (6)

    def hidden(self, idx, path=None):
        """Return RMSNorm(x) after the last layer, (B, T, C), for idx (B, T). path is exact, chunked
        or interleaved. The default (None) is train_path in training and exact in evaluation.
        (forward runs interleaved training itself, because that has two losses. There is no argument
        context as in model_gpt, because each function above makes a Context for each pass.)"""
        cfg = self.cfg
        path = path or (cfg.train_path_used if self.training else "exact")
        if path == "interleaved":
            x, *_ = interleaved(self, self.embed(idx))
        elif not cfg.has_chain:
            x = all_at_once(self, self.embed(idx))
        elif path == "exact" and cfg.fast and not torch.is_grad_enabled():
            # It is faster than chain, because it writes keys and values in place.
            x = decode_exact(self, idx, self.init_cache(*idx.shape), None)
        else:
            x = chain(self, self.embed(idx), cfg.chunk if path == "chunked" else 1)
        return norm(x, cfg.norm_eps)

    def decode(self, idx, cache, n_valid=None):
        """The contract is that of all models. Several tokens a row fill an empty cache as
        cfg.prefill says, and all other calls are exact."""
        prefills = cache.longest == 0 and idx.size(1) > 1 and self.cfg.prefill == "interleaved"
        function = prefill_interleaved if prefills else decode_exact
        return norm(function(self, idx, cache, n_valid), self.cfg.norm_eps)

    @torch.no_grad()
    def estimate(self, idx, targets):
        """Return the cross-entropy by the training path, which takes less time than the exact one.
        Return None if the training path is exact."""
        if self.cfg.train_path_used == "exact":
            return None
        return cross_entropy(self.head(self.hidden(idx, self.cfg.train_path_used)), targets)

    @property
    def context_kept(self):
        """Return how many of the last tokens stay where a context is full. It is half of them where
        there is a chain. The exact prefill of a chain is slow and should not run at every token.
        With prefill=interleaved as many tokens are kept. Then Algorithm 1 runs the kept tokens
        again, and the tokens after them run exactly."""
        return (self.cfg.block_size + 1) // 2 if self.cfg.has_chain else self.cfg.block_size

    def init_cache(self, batch_size, max_len):
        if not self.cfg.memory:
            return super().init_cache(batch_size, max_len)
        return MemoryCache(self.cfg, *self.cache_sizes(batch_size, max_len), self.wte.weight.dtype)

    def flops_per_token(self):
        """Return FLOPs as model_gpt does. Interleaved training does everything twice except the
        projections of the memory, because its first pass projects a single zero. Chunked training
        does these projections once a chunk."""
        cfg, T = self.cfg, self.cfg.block_size
        memory = sum(p.numel() for name, p in self.named_parameters() if "rec." in name)
        if cfg.train_path_used == "chunked":
            memory *= math.ceil(T / cfg.chunk) / T
        backbone = self.head.weight.numel() + sum(
            p.numel() for name, p in self.blocks.named_parameters()
            if p.dim() == 2 and "rec." not in name)
        keys = sum(visible_keys(T, cfg.window_of(layer)) for layer in range(cfg.n_layer))
        attention = 12.0 * cfg.n_head * cfg.head_size * keys
        passes = 2 if cfg.train_path_used == "interleaved" else 1
        return 6.0 * memory + passes * (6.0 * backbone + attention)


class Head(nn.Linear):
    """15 tanh(W x / 15), without the rows of W that are padding: (..., C) -> (..., vocab_size)."""

    def __init__(self, cfg, padded):
        super().__init__(cfg.n_embd, padded, bias=False)
        self.vocab_size = cfg.vocab_size

    def forward(self, x):
        return 15 * torch.tanh(upcast(super().forward(x))[..., :self.vocab_size] / 15)


# ---- checks ----

def check(cfg):
    """Raise ValueError, naming the field, where a value is impossible."""
    cfg.at_least(1, "subsets", "chunk")
    cfg.at_least(0, "swa")
    if not cfg.pattern or set(cfg.pattern) - {"S", "L"}:
        raise ValueError(f"pattern={cfg.pattern} must be made of S and L")
    if cfg.head_size > kernels.HEAD_SIZES[-1]:  # with fast=false too, as a run may change it
        raise ValueError(f"head_dim={cfg.head_size} must be at most {kernels.HEAD_SIZES[-1]}")
    if not 0 <= cfg.source <= cfg.n_layer:
        raise ValueError(f"source={cfg.source} must be from 0 to n_layer={cfg.n_layer}")
    for name, value in (("train_path", cfg.train_path_used), ("prefill", cfg.prefill)):
        if value != "exact" and not cfg.has_chain:
            raise ValueError(f"{name}={value} needs memory=true and a source that is not 0")

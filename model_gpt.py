"""
The plain Transformer decoder: the baseline that every recurrent model here is compared with.

The block is Llama's: RMSNorm before attention and before the MLP, rotary positions, grouped key/value
heads, SwiGLU, no biases. Switches make it the fair neighbour of each method: ALiBi or no positions, a GELU
MLP, QK-norm, a sliding window, a tied or untied head.

    h_0   = E[idx]
    z_l   = h_l + Wo Attention(q, k, v)      q, k, v = Wq n, Wk n, Wv n   with n = RMSNorm(h_l)
    h_l+1 = z_l + W_down (silu(W_gate n) * (W_up n))                      with n = RMSNorm(z_l)
    logits = W_head RMSNorm(h_L)

Attention of query i over keys j: softmax_j(q_i . k_j / sqrt(head_dim) + bias_ij) v_j, where key j is visible
iff j <= i and, with a window w, i - j < w. ALiBi's bias is -m_h (i - j), m_h = 2^(-8 h / n_head), h from 1.

`fast=False` is that sentence written out (a T x T softmax); `fast=True` is the same through
torch's scaled_dot_product_attention. Both read the same cache.

from_pretrained and to_pretrained read and write Hugging Face Llama-family folders (SmolLM, TinyLlama,
Llama 2 and 3).

Papers: Vaswani et al. 2017; Su et al. 2021 (rotary); Shazeer 2020 (SwiGLU); Zhang and Sennrich 2019 (RMSNorm);
Ainslie et al. 2023 (grouped heads); Press et al. 2022 (ALiBi); Touvron et al. 2023 (Llama).

Names: B batch, T new tokens, S cached and new tokens, H query heads, G key/value heads, D head size.
"""
import contextlib
import json
import math
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint


@dataclass
class Config:
    block_size: int = 256        # tokens in a training sequence; also the longest context under rope
    vocab_size: int = 257        # number of token ids
    n_layer: int = 4             # blocks
    n_head: int = 4              # query heads
    n_kv_head: int = 0           # key/value heads, each shared by n_head / n_kv_head query heads (0: n_head)
    n_embd: int = 128            # width of the residual stream
    dropout: float = 0.0         # on embeddings, attention weights and both residual branches
    fast: bool = True            # scaled_dot_product_attention; false: attention written out
    n_mlp: int = 0               # hidden width of the MLP (0: 8/3 n_embd for swiglu, 4 n_embd for gelu)
    mlp: str = "swiglu"          # swiglu | gelu
    pos: str = "rope"            # rope | alibi | none
    rope_theta: float = 10000.0  # rotary base
    qk_norm: bool = False        # RMSNorm with a weight on each head's query and key, before rotary
    window: int = 0              # sliding window: a query sees its last `window` keys, itself included (0: all)
    tie_embeddings: bool = True  # the head is the embedding matrix
    norm_eps: float = 1e-5       # RMSNorm's epsilon

    def __post_init__(self):
        self.n_kv_head = self.n_kv_head or self.n_head
        check_sizes(self)
        check_choice(self, "mlp", ("swiglu", "gelu"))
        check_choice(self, "pos", ("rope", "alibi", "none"))
        if self.pos == "rope" and self.head_dim % 2:
            raise ValueError(f"pos=rope needs an even head size: n_embd / n_head = {self.head_dim}")
        if self.n_mlp < 0 or self.window < 0:
            raise ValueError("n_mlp and window are positive, or 0 for their default")
        if self.rope_theta <= 0 or self.norm_eps <= 0:
            raise ValueError("rope_theta and norm_eps must be positive")
        if self.n_mlp == 0:  # a multiple of 32 keeps the products aligned
            self.n_mlp = 4 * self.n_embd if self.mlp == "gelu" else 32 * math.ceil(self.n_embd / 12)

    @property
    def head_dim(self):
        return self.n_embd // self.n_head


def check_sizes(cfg):
    """Raise ValueError, naming the field, where one of the sizes that all models share is impossible."""
    for name in ("block_size", "vocab_size", "n_layer", "n_head", "n_kv_head", "n_embd"):
        if getattr(cfg, name) < 1:
            raise ValueError(f"{name}={getattr(cfg, name)} must be at least 1")
    if cfg.n_embd % cfg.n_head:
        raise ValueError(f"n_embd={cfg.n_embd} is not divisible by n_head={cfg.n_head}")
    if cfg.n_head % cfg.n_kv_head:
        raise ValueError(f"n_head={cfg.n_head} is not divisible by n_kv_head={cfg.n_kv_head}")
    if not 0 <= cfg.dropout < 1:
        raise ValueError(f"dropout={cfg.dropout} must be at least 0 and less than 1")


def check_choice(cfg, name, allowed):
    """Raise ValueError unless field `name` of cfg is one of the strings in `allowed`."""
    if getattr(cfg, name) not in allowed:
        raise ValueError(f"{name}={getattr(cfg, name)} must be one of: {', '.join(allowed)}")


class NormOnCPU(torch.autograd.Function):
    """RMSNorm for CPUs, where torch has no fused kernel: a third of the passes over x, above all backward."""

    @staticmethod
    def forward(ctx, x, weight, eps):
        r = (torch.linalg.vecdot(x, x) / x.size(-1) + eps).rsqrt_()[..., None]      # (..., 1)
        n = x * r
        ctx.save_for_backward(n, r, weight)
        return n * weight

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, g):
        n, r, weight = ctx.saved_tensors
        dweight, dn = (g * n).flatten(0, -2).sum(0), g * weight
        along = torch.linalg.vecdot(dn, n)[..., None] / n.size(-1)      # scaling x changes nothing: project it out
        return dn.addcmul_(n, along, value=-1).mul_(r), dweight, None


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension (Zhang and Sennrich 2019)."""

    def __init__(self, dim, eps):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x):
        if x.device.type == "cpu" and x.dtype == self.weight.dtype:
            return NormOnCPU.apply(x, self.weight, self.eps)
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)     # autocast: x may be bfloat16


def rotary_tables(pos, head_dim, theta, dtype):
    """cos and sin (..., head_dim) of the angles pos_t theta^(-2i / head_dim), each angle twice: the second
    half of a head is the first half's partner, and sin is negative on the first half (see apply_rotary).
    Computed, not stored, so that any position and any device works; in float32 at least."""
    dtype = torch.promote_types(dtype, torch.float32)
    freq = theta ** (-torch.arange(0, head_dim, 2, device=pos.device, dtype=dtype) / head_dim)
    angle = pos.to(dtype)[..., None] * freq                     # (..., head_dim / 2)
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)


class Rotation(torch.autograd.Function):
    """x (..., D) with each pair (x_i, x_{i + D/2}) rotated by its angle. The backward pass rotates by minus the
    angle, so nothing of x is saved."""

    @staticmethod
    def forward(ctx, x, cos, sin):
        ctx.save_for_backward(cos, sin)
        half = x.size(-1) // 2
        y = x * cos                                             # float32 at least, as the tables are
        y[..., :half].addcmul_(x[..., half:], sin[..., :half])
        y[..., half:].addcmul_(x[..., :half], sin[..., half:])
        return y.to(x.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, g):
        cos, sin = ctx.saved_tensors
        return Rotation.apply(g, cos, -sin), None, None


def apply_rotary(x, cos, sin):
    """Rotate each pair (x_i, x_{i + D/2}) of x (B, T, H, D) by its angle (Su et al. 2021; Llama's pairing).
    cos, sin (T, D) or (B, T, D)."""
    return Rotation.apply(x, cos.unsqueeze(-2), sin.unsqueeze(-2))      # one angle for all heads


def compute_dtype(x):
    """The dtype that matrix products of x come out in: autocast's where it is on, else x's own."""
    device = x.device.type
    mixed = device != "meta" and torch.is_autocast_enabled(device)
    return torch.get_autocast_dtype(device) if mixed else x.dtype


def alibi_slopes(n_head, device=None, dtype=torch.float32):
    """m_h = 2^(-8 h / n_head) for h = 1..n_head (Press et al. 2022): (n_head,)."""
    return 2.0 ** (-8.0 * torch.arange(1, n_head + 1, device=device, dtype=dtype) / n_head)


def attention_bias(q_pos, k_pos, window, slopes, dtype):
    """What is added to the scores: 0 (or ALiBi's slope times the distance) where key j is visible, else -inf.
    q_pos (B or 1, T), k_pos (S,) -> (B or 1, 1 or H, T, S)."""
    distance = q_pos[:, None, :, None] - k_pos                  # (B or 1, 1, T, S)
    visible = distance >= 0
    if window:
        visible = visible & (distance < window)
    bias = torch.zeros((), device=k_pos.device, dtype=dtype)
    if slopes is not None:
        bias = -slopes.to(dtype)[:, None, None] * distance
    return bias.masked_fill(~visible, -math.inf)


def attention_naive(q, k, v, bias, dropout=0.0):
    """Softmax attention written out. q (B, H, T, D); k, v (B, G, S, D); bias broadcasts to (B, H, T, S)."""
    k, v = (x.repeat_interleave(q.size(1) // x.size(1), 1) for x in (k, v))     # one key head per query head
    scores = (q @ k.transpose(-2, -1)) / math.sqrt(q.size(-1))                  # (B, H, T, S)
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32)) + bias
    return F.dropout(scores.softmax(-1), dropout).to(v.dtype) @ v               # (B, H, T, D)


def attention_fast(q, k, v, bias, dropout=0.0):
    """The same through torch's fused kernels. bias None means: the T queries are plainly causal over as many
    keys, or a single query sees every key; no mask is built or read then."""
    causal = True if bias is None and q.size(2) > 1 else False      # a plain bool, also where T is symbolic (compile)
    return F.scaled_dot_product_attention(q, k, v, bias, dropout, is_causal=causal,
                                          enable_gqa=q.size(1) != k.size(1))


class KVCache:
    """Keys and values in static buffers, k[layer] and v[layer] (B, n_kv_head, max_len + 1, head_dim): contiguous for
    each head, as attention reads them. The last slot takes what padding writes and is never read.

    lengths (B,) counts the tokens each row holds; rows may differ. While every row holds the same number
    (`ragged` False) new tokens are one slice and no mask is needed. `longest` is an upper bound of lengths
    that the host knows without asking the device. Calls with a cache run under no_grad.
    """

    def __init__(self, cfg, batch_size, max_len, device, dtype):
        shape = (batch_size, cfg.n_kv_head, max_len + 1, cfg.head_dim)
        with torch.inference_mode(False):                       # so that any later call may write
            self.k = [torch.zeros(shape, device=device, dtype=dtype) for _ in range(cfg.n_layer)]
            self.v = [torch.zeros(shape, device=device, dtype=dtype) for _ in range(cfg.n_layer)]
            self.lengths = torch.zeros(batch_size, dtype=torch.long, device=device)
        self.max_len, self.longest, self.ragged = max_len, 0, False

    def nbytes(self):
        """Bytes held for keys and values, for all rows at max_len."""
        return sum(buffer[:, :, :self.max_len].nbytes for buffer in self.k + self.v)

    def reset(self, rows=None):
        """Empty the given rows (a list or tensor of indices; None: all), so that new sequences may start. What
        they held is zeroed: a NaN behind a mask would still poison the sum over values."""
        rows = slice(None) if rows is None else rows
        for buffer in self.k + self.v:
            buffer[rows] = 0
        self.lengths[rows] = 0
        self.longest = int(self.lengths.max()) if len(self.lengths) else 0
        self.ragged = self.longest > 0

    def place(self, T, n_valid=None):
        """Reserve the slots of T new tokens a row, n_valid (B,) of them real (0 to T; None: all). Returns their
        positions (1, T) or (B, T). Raises ValueError where a row would outgrow max_len."""
        new = torch.full_like(self.lengths, T) if n_valid is None else n_valid.to(self.lengths).clamp(0, T)
        ragged = self.ragged or n_valid is not None
        if self.longest + T > self.max_len and (not ragged or int((self.lengths + new).max()) > self.max_len):
            raise ValueError(f"the cache is full: {self.longest} tokens held, {T} more, max_len {self.max_len}")
        self.new, self.ragged, self.end = new, ragged, min(self.longest + T, self.max_len)
        step = torch.arange(T, device=self.lengths.device)
        if not ragged:
            return (self.longest + step)[None]                          # (1, T)
        pos = self.lengths[:, None] + step                              # (B, T)
        self.slots = torch.where(step < new[:, None], pos, self.max_len)
        return pos.clamp(max=self.max_len - 1)

    def append(self, layer, k, v):
        """Write k, v (B, G, T, D) of the placed tokens; returns all keys and values so far, (B, G, S, D)."""
        for buffer, new in ((self.k[layer], k), (self.v[layer], v)):
            if self.ragged:
                rows = torch.arange(len(new), device=new.device)[:, None]
                buffer[rows, :, self.slots] = new.transpose(1, 2).to(buffer.dtype)
            else:
                buffer[:, :, self.longest:self.end] = new
        return self.k[layer][:, :, :self.end], self.v[layer][:, :, :self.end]

    def advance(self):
        """Count the placed tokens, once every layer has written them."""
        self.lengths += self.new
        self.longest = int(self.lengths.max()) if self.ragged else self.end


class Attention(nn.Module):
    """Causal self-attention with grouped key/value heads."""

    def __init__(self, cfg, layer):
        super().__init__()
        self.cfg, self.layer = cfg, layer
        C, D = cfg.n_embd, cfg.head_dim
        self.wq = nn.Linear(C, cfg.n_head * D, bias=False)
        self.wk = nn.Linear(C, cfg.n_kv_head * D, bias=False)
        self.wv = nn.Linear(C, cfg.n_kv_head * D, bias=False)
        self.wo = nn.Linear(cfg.n_head * D, C, bias=False)
        if cfg.qk_norm:
            self.q_norm, self.k_norm = RMSNorm(D, cfg.norm_eps), RMSNorm(D, cfg.norm_eps)

    def forward(self, x, rotary, bias, cache=None):
        """x (B, T, C); rotary the (cos, sin) tables or None; bias as attention_fast takes it."""
        B, T, C = x.size()
        D = self.cfg.head_dim
        q = self.wq(x).view(B, T, -1, D)                                # (B, T, H, D)
        k = self.wk(x).view(B, T, -1, D)                                # (B, T, G, D)
        v = self.wv(x).view(B, T, -1, D)
        if self.cfg.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        if rotary is not None:
            q, k = apply_rotary(q, *rotary), apply_rotary(k, *rotary)
        q, k, v = (y.transpose(1, 2) for y in (q, k, v))                # heads before positions
        if cache is not None:
            k, v = cache.append(self.layer, k, v)                       # (B, G, S, D)
        attend = attention_fast if self.cfg.fast else attention_naive
        y = attend(q, k.to(q.dtype), v.to(q.dtype), bias, self.cfg.dropout if self.training else 0.0)
        return self.wo(y.transpose(1, 2).reshape(B, T, C))


class MLP(nn.Module):
    """swiglu: W_down (silu(W_gate x) * W_up x) (Shazeer 2020); gelu: W_down gelu(W_up x), exact GELU."""

    def __init__(self, cfg):
        super().__init__()
        if cfg.mlp == "swiglu":
            self.w_gate = nn.Linear(cfg.n_embd, cfg.n_mlp, bias=False)
        self.w_up = nn.Linear(cfg.n_embd, cfg.n_mlp, bias=False)
        self.w_down = nn.Linear(cfg.n_mlp, cfg.n_embd, bias=False)
        self.gated = cfg.mlp == "swiglu"

    def forward(self, x):
        return self.w_down(F.silu(self.w_gate(x)) * self.w_up(x) if self.gated else F.gelu(self.w_up(x)))


class Block(nn.Module):
    def __init__(self, cfg, layer):
        super().__init__()
        self.norm1, self.norm2 = RMSNorm(cfg.n_embd, cfg.norm_eps), RMSNorm(cfg.n_embd, cfg.norm_eps)
        self.attn, self.mlp = Attention(cfg, layer), MLP(cfg)
        self.drop = nn.Dropout(cfg.dropout)

    def forward(self, x, rotary, bias, cache=None):
        x = x + self.drop(self.attn(self.norm1(x), rotary, bias, cache))
        return x + self.drop(self.mlp(self.norm2(x)))


def cross_entropy(logits, targets):
    """Mean negative log-likelihood in nats over the targets that are not -1 (0 where all are -1)."""
    total = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1, reduction="sum")
    return total / (targets != -1).sum().clamp(min=1)


class LanguageModel(nn.Module):
    """What all models share: the call, the loss, and plain sampling. A model defines hidden(idx, cache, n_valid), the
    states after its last layer and norm, and init_cache(batch_size, max_len); and it has wte, head and cfg."""

    context_limit = None        # the most tokens one cache or one forward may hold; None: positions have no end
    max_logits = 2 ** 28        # of a training call; for more the loss is computed in pieces, without keeping logits

    def forward(self, idx, targets=None, cache=None, n_valid=None):
        """Predict the token after each position.

        idx (B, T) int64 token ids. targets (B, T), -1 = not counted. cache, from init_cache, holds the tokens
        before idx and idx is added to it, under no_grad; n_valid (B,) then tells how many of each row's T tokens are
        real, the rest being padding on the right.
        Returns logits (B, T, vocab_size) in float32 or better, loss (None without targets) and aux, whose
        "ce" is the cross-entropy in nats per token. In training with targets logits are None where they would be more
        than max_logits. Raises ValueError where idx is empty, where the context would outgrow context_limit, and
        where the cache is full.
        """
        if idx.numel() == 0:
            raise ValueError(f"idx {tuple(idx.shape)} holds no token")
        with contextlib.nullcontext() if cache is None else torch.no_grad():
            return self.predict(self.hidden(idx, cache, n_valid), targets)

    def predict(self, h, targets):
        """(logits, loss, aux) of states h (B, T, C) after the last norm."""
        if targets is not None and self.training and targets.numel() * self.cfg.vocab_size > self.max_logits:
            loss = self.cross_entropy_in_pieces(h, targets)
            return None, loss, {"ce": loss.detach()}
        logits = self.logits(h)
        if targets is None:
            return logits, None, {}
        loss = cross_entropy(logits, targets)
        return logits, loss, {"ce": loss.detach()}

    def logits(self, h):
        """(..., C) -> (..., V) in float32 or better."""
        logits = self.head(h)
        return logits.to(torch.promote_types(logits.dtype, torch.float32))

    def cross_entropy_in_pieces(self, h, targets):
        """The same loss, but the logits of a piece of the tokens at a time: backward computes them again."""
        def total(h, y):
            return F.cross_entropy(self.logits(h), y, ignore_index=-1, reduction="sum")
        n = max(1, self.max_logits // (4 * self.cfg.vocab_size))         # tokens of a piece
        pieces = zip(h.flatten(0, 1).split(n), targets.flatten().split(n))
        loss = sum(checkpoint(total, x, y, use_reentrant=False) for x, y in pieces)
        return loss / (targets != -1).sum().clamp(min=1)

    def check_context(self, tokens, name):
        """ValueError where `tokens`, which `name` calls, are more than the rotary positions reach."""
        if self.context_limit is not None and tokens > self.context_limit:
            raise ValueError(f"{name.format(tokens)} more than block_size={self.context_limit}")

    @torch.no_grad()
    def generate(self, idx, max_new_tokens, temperature=1.0, top_k=None):
        """Continue idx (B, T) by max_new_tokens sampled tokens: (B, T + max_new_tokens). temperature 0 takes
        the likeliest. A full rotary context is cropped to its last block_size tokens and prefilled again. Call eval()
        first. (sample.py has the complete sampler.)"""
        limit = self.context_limit or idx.size(1) + max_new_tokens
        cache, new = self.init_cache(idx.size(0), min(limit, idx.size(1) + max_new_tokens)), idx
        for _ in range(max_new_tokens):
            if cache.longest + new.size(1) > cache.max_len:
                cache.reset()
                new = idx[:, -cache.max_len:]
            logits = self(new, cache=cache)[0][:, -1] / max(temperature, 1e-9)  # (B, V)
            if top_k:
                kth = logits.topk(min(top_k, logits.size(-1))).values[:, -1:]
                logits = logits.masked_fill(logits < kth, -math.inf)
            new = logits.softmax(-1).multinomial(1) if temperature > 0 else logits.argmax(-1, keepdim=True)
            idx = torch.cat([idx, new], 1)
        return idx

    def set_step(self, step):
        """Tell the training step to a model in which something depends on it."""


class Model(LanguageModel):
    """The baseline language model. See Config for its sizes and forward for its use."""

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
        """N(0, 0.02) everywhere, the two projections into the residual stream smaller by 1 / sqrt(2 n_layer)
        so that its variance does not grow with depth (GPT-2); norms start at 1."""
        for name, p in self.named_parameters():
            if p.dim() == 2:
                into_residual = name.endswith(("wo.weight", "w_down.weight"))
                p.normal_(0, 0.02 / math.sqrt(2 * self.cfg.n_layer) if into_residual else 0.02)
        if self.cfg.tie_embeddings:
            self.head.weight = self.wte.weight

    @property
    def context_limit(self):
        """The most tokens one cache or one forward may hold; None where the positions have no end."""
        return self.cfg.block_size if self.cfg.pos == "rope" else None

    def hidden(self, idx, cache, n_valid):
        T = idx.size(1)
        pos = torch.arange(T, device=idx.device)[None] if cache is None else cache.place(T, n_valid)
        end = T if cache is None else cache.end
        self.check_context(end, "{} tokens are")
        x = self.drop(self.wte(idx))                                    # (B, T, C)
        rotary = None
        if self.cfg.pos == "rope":
            rotary = rotary_tables(pos.squeeze(0), self.cfg.head_dim, self.cfg.rope_theta, x.dtype)
        bias = self.bias(pos, end, cache, compute_dtype(x))
        for block in self.blocks:
            x = block(x, rotary, bias, cache)
        if cache is not None:
            cache.advance()
        return self.norm(x)

    def bias(self, pos, end, cache, dtype):
        """The attention bias of all layers, or None where attention_fast needs none: plainly causal from
        the first token on, or one new token in rows of equal length. The fused kernels take it in the queries'
        dtype, so in bfloat16 they round ALiBi's distances; the naive path does not."""
        T, wide = pos.size(1), torch.promote_types(dtype, torch.float32)
        plain = not self.cfg.window and self.cfg.pos != "alibi" and (cache is None or not cache.ragged)
        if self.cfg.fast and plain and T in (1, end):
            return None
        slopes = alibi_slopes(self.cfg.n_head, pos.device, wide) if self.cfg.pos == "alibi" else None
        bias = attention_bias(pos, torch.arange(end, device=pos.device), self.cfg.window, slopes, wide)
        return bias.to(dtype) if self.cfg.fast else bias

    def init_cache(self, batch_size, max_len):
        """An empty cache for batch_size rows of up to max_len tokens (under rope at most block_size)."""
        self.check_context(max_len, "max_len={} is")
        w = self.wte.weight
        return KVCache(self.cfg, batch_size, max_len, w.device, compute_dtype(w))

    def flops_per_token(self):
        """Floating-point operations of one token's forward and backward in a sequence of block_size: 6 for
        each weight of a matrix product (the embedding is looked up, the head multiplied), and 12 C for each
        visible key (q k and p v forward, twice that backward), averaged over the positions."""
        cfg = self.cfg
        weights = sum(p.numel() for p in self.blocks.parameters() if p.dim() == 2) + cfg.vocab_size * cfg.n_embd
        T, w = cfg.block_size, min(cfg.window or cfg.block_size, cfg.block_size)
        keys = (w * (w + 1) / 2 + (T - w) * w) / T
        return 6.0 * weights + 12.0 * cfg.n_layer * cfg.n_embd * keys

    @classmethod
    def from_pretrained(cls, path, **overrides):
        """A model from a Hugging Face Llama-family folder (config.json and safetensors, one file or sharded),
        or from a hub name, downloaded. overrides replace Config fields (block_size, dropout, fast).
        Raises ValueError, naming the feature, where the weights need what this model has not."""
        folder = pretrained_folder(path)
        model = cls(Config(**{**llama_config(folder), **overrides}))
        model.load_state_dict(llama_weights(folder, model))
        return model

    def to_pretrained(self, path):
        """Write config.json and model.safetensors as transformers' LlamaForCausalLM reads them. Raises
        ValueError where the model has what Llama has not."""
        from safetensors.torch import save_file
        c = self.cfg
        if c.pos != "rope" or c.mlp != "swiglu" or c.qk_norm or c.window:
            raise ValueError("only pos=rope, mlp=swiglu, qk_norm=false, window=0 can be written as a Llama")
        config = dict(
            architectures=["LlamaForCausalLM"], model_type="llama", vocab_size=c.vocab_size,
            hidden_size=c.n_embd, intermediate_size=c.n_mlp, num_hidden_layers=c.n_layer,
            num_attention_heads=c.n_head, num_key_value_heads=c.n_kv_head, head_dim=c.head_dim,
            max_position_embeddings=c.block_size, rms_norm_eps=c.norm_eps, rope_theta=c.rope_theta,
            rope_parameters={"rope_type": "default", "rope_theta": c.rope_theta}, hidden_act="silu",
            attention_bias=False, mlp_bias=False, bos_token_id=None, eos_token_id=None,
            tie_word_embeddings=c.tie_embeddings,
            torch_dtype=str(self.wte.weight.dtype).removeprefix("torch."))
        weights = {llama_name(n): p.detach().contiguous() for n, p in self.named_parameters()}  # tied: once
        Path(path).mkdir(parents=True, exist_ok=True)
        (Path(path) / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        save_file(weights, Path(path) / "model.safetensors", metadata={"format": "pt"})


# Hugging Face Llama names: both sides store (out, in) matrices and pair rotary halves alike, so a weight
# only changes its name.
LLAMA_NAMES = {"norm1": "input_layernorm", "norm2": "post_attention_layernorm",
               "attn.wq": "self_attn.q_proj", "attn.wk": "self_attn.k_proj", "attn.wv": "self_attn.v_proj",
               "attn.wo": "self_attn.o_proj", "mlp.w_gate": "mlp.gate_proj", "mlp.w_up": "mlp.up_proj",
               "mlp.w_down": "mlp.down_proj"}


def llama_name(name):
    """blocks.3.attn.wq.weight -> model.layers.3.self_attn.q_proj.weight"""
    top = {"wte.weight": "model.embed_tokens.weight", "norm.weight": "model.norm.weight",
           "head.weight": "lm_head.weight"}
    if name in top:
        return top[name]
    _, layer, rest = name.split(".", 2)
    return f"model.layers.{layer}.{LLAMA_NAMES[rest.removesuffix('.weight')]}.weight"


def pretrained_folder(path):
    """The folder itself, or the local copy of a hub name (`owner/name`), downloaded where it is missing."""
    if Path(path).is_dir():
        return Path(path)
    if Path(path).exists() or str(path).count("/") != 1 or str(path).startswith((".", "/")):
        raise ValueError(f"{path} is neither a folder nor a hub name (owner/name)")
    from huggingface_hub import snapshot_download
    try:
        return Path(snapshot_download(str(path), allow_patterns=["config.json", "model*.safetensors", "*.index.json"]))
    except Exception as e:  # the hub client raises a dozen kinds: no network, no such name, no permission
        raise ValueError(f"{path} is not a folder here and could not be downloaded ({type(e).__name__})") from e


def read_json(file):
    """The object in a JSON file, ValueError naming the file where there is none."""
    try:
        value = json.loads(file.read_text())
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as e:
        raise ValueError(f"{file} is missing or is not JSON") from e
    if not isinstance(value, dict):
        raise ValueError(f"{file} is not a JSON object")
    return value


def llama_config(folder):
    """The Config fields that config.json of a Llama-family folder asks for. What this model cannot compute
    (biases, scaled rotary angles, another activation, a head size of its own) is refused by name."""
    hf = read_json(folder / "config.json")
    if hf.get("model_type") not in ("llama", "mistral"):
        raise ValueError(f"model_type {hf.get('model_type')} is not supported: llama or mistral is")
    try:
        rope = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind != "default":
            raise ValueError(f"rope scaling '{kind}' is not supported: only unscaled rotary positions are")
        window = hf.get("sliding_window", 4096) if hf["model_type"] == "mistral" else 0     # Llama ignores the field
        fields = dict(
            block_size=int(hf["max_position_embeddings"]), vocab_size=int(hf["vocab_size"]),
            n_layer=int(hf["num_hidden_layers"]), n_head=int(hf["num_attention_heads"]),
            n_kv_head=int(hf.get("num_key_value_heads") or hf["num_attention_heads"]), n_embd=int(hf["hidden_size"]),
            n_mlp=int(hf["intermediate_size"]), norm_eps=float(hf["rms_norm_eps"]), window=int(window or 0),
            rope_theta=float(rope.get("rope_theta") or hf.get("rope_theta") or 10000.0),
            tie_embeddings=bool(hf.get("tie_word_embeddings", False)))
    except (KeyError, TypeError, AttributeError) as e:
        raise ValueError(f"{folder / 'config.json'} lacks a field or has a wrong one: {e}") from e
    for name, value, wanted in (("attention_bias", hf.get("attention_bias", False), False),
                                ("mlp_bias", hf.get("mlp_bias", False), False),
                                ("hidden_act", hf.get("hidden_act", "silu"), "silu"),
                                ("head_dim", hf.get("head_dim") or fields["n_embd"] // fields["n_head"],
                                 fields["n_embd"] // fields["n_head"])):
        if value != wanted:
            raise ValueError(f"{name}={value} is not supported: only {wanted} is")
    return fields


def llama_weights(folder, model):
    """The model's state dict, filled from the folder's safetensors files (one, or those that the index names).
    Raises ValueError naming the first weight that is missing, left over or of another shape."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file
    index = folder / "model.safetensors.index.json"
    names = read_json(index).get("weight_map") if index.exists() else {"": "model.safetensors"}
    found = {}
    for file in set(names.values()) if isinstance(names, dict) else [None]:
        if not isinstance(file, str) or not file or Path(file).name != file:
            raise ValueError(f"{index} must name files of its folder, not {file!r}")
        try:
            found.update(load_file(folder / file))
        except (OSError, SafetensorError) as e:
            raise ValueError(f"{folder / file} is missing or damaged") from e
    weights = {}
    for name, p in model.state_dict().items():
        source = llama_name(name)
        if name == "head.weight" and model.cfg.tie_embeddings:  # some files store the tied head again, some not
            found.pop(source, None)
            source = llama_name("wte.weight")
        if source not in found or found[source].shape != p.shape:
            shape = tuple(found[source].shape) if source in found else "missing"
            raise ValueError(f"{folder}: {source} is {shape}, not {tuple(p.shape)}")
        weights[name] = found[source]
    extra = {n for n in found if not n.endswith("rotary_emb.inv_freq")} - {llama_name(n) for n in weights}
    if extra:
        raise ValueError(f"{folder}: {min(extra)} has no place in this model")
    return weights

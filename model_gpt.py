"""
The plain Transformer (decoder-only, Llama's block), the baseline of the recurrent models.

    x_0     = E[idx]
    z_l     = x_l + W_o Attention(W_q n, W_k n, W_v n)        n  = RMSNorm(x_l)
    x_{l+1} = z_l + W_down (silu(W_gate n') * (W_up n'))      n' = RMSNorm(z_l)
    logits  = W_head RMSNorm(x_L)

Attention of query i:  y_i = sum_j a_ij v_j,  a_i = softmax_j(q_i . k_j / sqrt(D) + bias_ij)
Key j is visible iff j <= i and, with a sliding window of w keys, i - j < w. q and k are those
after QK-norm and rotary positions (RoPE). ALiBi: bias_ij = -m_h (i - j), m_h = 2^(-8 h / H) in
head h = 1 .. H.

fast=false writes the softmax out, fast=true calls torch's fused attention. The other model
files import from this one. The KV cache, for decoding, stands at the end.

Shapes: B batch, T new tokens, S keys (cached and new), C width, H query heads, G key/value
heads, D head size (C / H if not given), V vocabulary.

Papers: Vaswani et al. 2017 (1706.03762); Su et al. 2021 (RoPE, 2104.09864); Shazeer 2020
(SwiGLU, 2002.05202); Zhang, Sennrich 2019 (RMSNorm, 1910.07467); Ainslie et al. 2023 (GQA,
2305.13245); Press et al. 2022 (ALiBi, 2108.12409); Touvron et al. 2023 (Llama, 2302.13971).
"""
import math
from dataclasses import dataclass, field, fields
from functools import partial

import torch
import torch.nn as nn
import torch.nn.functional as F

from decoding import Cached, KVCache, next_tokens


def choice(*allowed):
    """A Config field that is one of `allowed`; the first is the default."""
    return field(default=allowed[0], metadata={"allowed": allowed})


@dataclass
class BaseConfig:
    """The fields, keys of a config file, that all models have."""
    block_size: int = 256        # tokens of a training sequence; with RoPE the most of a call
    vocab_size: int = 257        # number of token ids (257: bytes and end-of-text)
    n_layer: int = 4             # blocks
    n_head: int = 4              # query heads
    n_kv_head: int = 0           # key/value heads, each shared by n_head / n_kv_head (0: n_head)
    n_embd: int = 128            # width of the residual stream
    head_dim: int = 0            # width of a head (0: n_embd / n_head)
    dropout: float = 0.0         # on embeddings, attention, residual branches (see each file)
    fast: bool = True            # fused or parallel code; false: the equations written out
    rope_theta: float = 10000.0  # RoPE's base
    norm_eps: float = 1e-5       # RMSNorm's epsilon

    # of models without these keys: constants, not fields of the dataclass (no annotation)
    pos, window, scale_embeddings = "rope", 0, False

    def __post_init__(self):
        """Raise ValueError, naming the field, where a value is impossible."""
        self.n_kv_head = self.n_kv_head or self.n_head
        check_sizes(self)
        self.head_dim = self.head_dim or self.n_embd // self.n_head
        check_values(self)

    def at_least(self, least, *names):
        for name in names:
            if not getattr(self, name) >= least:    # NaN is not
                raise ValueError(f"{name}={getattr(self, name)} must be at least {least}")

    def divides(self, a, b):
        if getattr(self, b) % getattr(self, a):
            raise ValueError(f"{b}={getattr(self, b)} is not divisible by {a}={getattr(self, a)}")


@dataclass
class Config(BaseConfig):
    n_mlp: int = 0               # hidden width of the MLP (0: 8/3 n_embd, gelu: 4)
    mlp: str = choice("swiglu", "gelu", "geglu")
    pos: str = choice("rope", "alibi", "none")  # kind of positions (elsewhere pos: numbers)
    qk_norm: bool = False        # RMSNorm with a weight on each head's query and key, before RoPE
    window: int = 0              # sliding window: how many keys a query attends to (0: all)
    tie_embeddings: bool = True  # the head is the embedding matrix
    scale_embeddings: bool = False  # embeddings times sqrt(n_embd), as in Gemma

    def __post_init__(self):
        super().__post_init__()
        self.at_least(0, "n_mlp", "window")
        self.n_mlp = self.n_mlp or mlp_width(self)


# ---- types, norm ----

def upcast(x):
    """x in float32 or better, for softmax, sums and losses."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight, over the last dimension."""

    def __init__(self, dim, eps):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x):
        wide = x.to(self.weight.dtype)  # torch sums in float32 or better, whatever this is
        return F.rms_norm(wide, wide.shape[-1:], self.weight, self.eps).to(x.dtype)


# ---- positions, and what the layers of a call share ----

def rope_tables(pos, head_dim, theta, dtype):
    """cos and sin of RoPE's angles pos theta^(-2i / D): pos (...) -> (..., D / 2) each."""
    dtype = torch.promote_types(dtype, torch.float32)
    freq = theta ** (-torch.arange(0, head_dim, 2, device=pos.device, dtype=dtype) / head_dim)
    angle = pos.to(dtype)[..., None] * freq                 # (..., D / 2)
    return angle.cos(), angle.sin()


def apply_rope(x, cos, sin):
    """Rotate each pair (x_i, x_{i + D/2}) of x (..., D) by its angle; cos and sin broadcast."""
    a, b = x.chunk(2, -1)                                   # (..., D / 2)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)


def alibi_slopes(n_head, device=None, dtype=torch.float32):
    """m_h = 2^(-8 h / H) for h = 1 .. H: (H,)."""
    return 2.0 ** (-8.0 * torch.arange(1, n_head + 1, device=device, dtype=dtype) / n_head)


def attention_bias(q_pos, k_pos, window=0, slopes=None, dtype=torch.float32):
    """Added to the scores: -inf where the key is not visible, else 0 or ALiBi's bias.
    q_pos (B or 1, T), k_pos (S,) -> (B or 1, H or 1, T, S)."""
    distance = q_pos[:, None, :, None] - k_pos              # (B or 1, 1, T, S)
    visible = distance >= 0
    if window:
        visible = visible & (distance < window)
    bias = torch.zeros_like(distance, dtype=dtype)
    if slopes is not None:
        bias = -slopes.to(dtype)[:, None, None] * distance
    return bias.masked_fill(~visible, -math.inf)


class Context:
    """What all layers share in a call: the positions pos (B or 1, T) of its tokens, RoPE's cos and
    sin or None, and the attention bias or None, where the causal mask by order is enough. k_pos
    (S,) and ALiBi's slopes make the bias; RT can mask by them without one (has_bias)."""

    def __init__(self, cfg, x, pos=None, k_pos=None, causal=True, has_bias=None):
        """x (B, T, C): embeddings. pos and k_pos: those of the tokens and of all keys (None:
        0 .. T - 1, a plain pass). causal: whether the keys are those of the tokens and of all
        before them, in order. has_bias None: only where the causal mask is not enough."""
        dtype = torch.promote_types(x.dtype, torch.float32)
        if pos is None:
            k_pos = torch.arange(x.size(1), device=x.device)
            pos = k_pos[None]
        self.pos, self.k_pos, S = pos, k_pos, len(k_pos)
        self.rope = self.slopes = self.bias = None
        if cfg.pos == "rope":
            if S > cfg.block_size:
                raise ValueError(f"{S} tokens are more than block_size={cfg.block_size}")
            cos, sin = rope_tables(pos, cfg.head_dim, cfg.rope_theta, dtype)
            self.rope = cos[:, None], sin[:, None]          # (B or 1, 1, T, D / 2)
        if cfg.pos == "alibi":
            self.slopes = alibi_slopes(cfg.n_head, x.device, dtype)
        if has_bias is None:
            has_bias = 0 < cfg.window < S or cfg.pos == "alibi" or not causal
        if has_bias:
            self.bias = attention_bias(pos, k_pos, cfg.window, self.slopes, dtype)

    def extend(self, layer, k, v):
        """k, v (B, G, T, D) of the tokens -> those that they attend to, (B, G, S, D): the same,
        unless a cache has more (CachedContext)."""
        return k, v


class CachedContext(Cached, Context):
    """The context of a call with a cache (decoding.py)."""


# ---- a block ----

class Attention(nn.Module):
    """Causal self-attention. layer: its number in the cache; context: see Context."""

    def __init__(self, cfg):
        super().__init__()
        self.cfg, C, D = cfg, cfg.n_embd, cfg.head_dim
        self.wq = nn.Linear(C, cfg.n_head * D, bias=False)
        self.wk = nn.Linear(C, cfg.n_kv_head * D, bias=False)
        self.wv = nn.Linear(C, cfg.n_kv_head * D, bias=False)
        self.wo = nn.Linear(cfg.n_head * D, C, bias=False)
        norm_type = RMSNorm if cfg.qk_norm else nn.Identity     # Identity ignores its arguments
        self.q_norm, self.k_norm = norm_type(D, cfg.norm_eps), norm_type(D, cfg.norm_eps)

    def forward(self, x, layer, context):
        D = self.cfg.head_dim
        q = self.wq(x).unflatten(-1, (-1, D)).transpose(1, 2)       # (B, H, T, D)
        k = self.wk(x).unflatten(-1, (-1, D)).transpose(1, 2)       # (B, G, T, D)
        v = self.wv(x).unflatten(-1, (-1, D)).transpose(1, 2)       # (B, G, T, D)
        q, k = self.q_norm(q), self.k_norm(k)
        if context.rope:
            q, k = apply_rope(q, *context.rope), apply_rope(k, *context.rope)
        k, v = context.extend(layer, k, v)                          # (B, G, S, D)
        dropout = self.cfg.dropout if self.training else 0.0
        y = attend(q, k, v, context.bias, self.cfg.fast, dropout)   # (B, H, T, D)
        return self.wo(y.transpose(1, 2).flatten(2))                # (B, T, C)


def attend(q, k, v, bias, fast, dropout=0.0):
    """softmax(q k^T / sqrt(D) + bias) v. q (B, H, T, D), k and v (B, G, S, D), bias broadcasts
    to (B, H, T, S) -> (B, H, T, D). bias None: causal; the queries are the last T of S tokens."""
    H, G, T, S = q.size(1), k.size(1), q.size(2), k.size(2)
    fused = partial(F.scaled_dot_product_attention, q, k, v, dropout_p=dropout, enable_gqa=H != G)
    if fast and bias is None and T == 1:
        return fused(None)  # the last token attends to all keys
    if fast and bias is None and T == S:
        return fused(None, is_causal=True)  # torch's mask is right only for T = S
    if bias is None:
        bias = q.new_full((T, S), -math.inf).triu(S - T + 1)
    if fast:
        return fused(bias.to(q.dtype))  # torch's demand; in 16 bits ALiBi is rounded
    k, v = (x.repeat_interleave(H // G, 1) for x in (k, v))         # (B, H, S, D)
    scores = (q @ k.transpose(-2, -1)) / math.sqrt(q.size(-1))      # (B, H, T, S)
    probs = (upcast(scores) + bias).softmax(-1)
    return F.dropout(probs, dropout).to(v.dtype) @ v                # (B, H, T, D)


class MLP(nn.Module):
    """swiglu: W_down (silu(W_gate x) * W_up x). geglu: with gelu for silu, in its tanh form.
    gelu: W_down gelu(W_up x), exact."""

    def __init__(self, cfg):
        super().__init__()
        acts = {"swiglu": nn.SiLU(), "geglu": nn.GELU("tanh"), "gelu": nn.GELU()}
        self.act, self.gated = acts[cfg.mlp], cfg.mlp != "gelu"
        if self.gated:
            self.w_gate = nn.Linear(cfg.n_embd, cfg.n_mlp, bias=False)
        self.w_up = nn.Linear(cfg.n_embd, cfg.n_mlp, bias=False)
        self.w_down = nn.Linear(cfg.n_mlp, cfg.n_embd, bias=False)

    def forward(self, x):
        up = self.w_up(x)
        return self.w_down(self.act(self.w_gate(x)) * up if self.gated else self.act(up))


def mlp_width(cfg):
    """gelu: 4 C. With a third matrix: 8/3 C, rounded up to a multiple of 32."""
    return 4 * cfg.n_embd if cfg.mlp == "gelu" else 32 * math.ceil(8 * cfg.n_embd / 3 / 32)


class Block(nn.Module):
    def __init__(self, cfg, attention=Attention, mlp=MLP):
        super().__init__()
        self.norm1 = RMSNorm(cfg.n_embd, cfg.norm_eps)
        self.norm2 = RMSNorm(cfg.n_embd, cfg.norm_eps)
        self.attn, self.mlp = attention(cfg), mlp(cfg)
        self.drop = nn.Dropout(cfg.dropout)

    def forward(self, x, layer, context):
        x = x + self.drop(self.attn(self.norm1(x), layer, context))  # (B, T, C)
        return x + self.drop(self.mlp(self.norm2(x)))


# ---- the language model ----

class LanguageModel(nn.Module):
    """What all models share: embedding, norm, head, the call, the loss, generate. A model adds
    blocks, calls init_weights and may replace the rest: mixer_flops if its attention is not this
    file's. train.py uses eval_metrics, end_step and estimate where a model has them."""
    context_type, cached_context_type = Context, CachedContext  # most have their own
    runs_blocks_once = True     # so FSDP may gather one at a time

    def __init__(self, cfg, blocks):
        super().__init__()
        self.cfg = cfg
        embedding = ScaledEmbedding if cfg.scale_embeddings else nn.Embedding
        self.wte = embedding(cfg.vocab_size, cfg.n_embd)
        self.drop = nn.Dropout(cfg.dropout)
        self.blocks = nn.ModuleList(blocks)
        self.norm = RMSNorm(cfg.n_embd, cfg.norm_eps)
        self.head = nn.Linear(cfg.n_embd, cfg.vocab_size, bias=False)   # init_weights may tie it

    def forward(self, idx, targets=None, cache=None, n_valid=None):
        """Predict the token after each position.
        idx (B, T) int64; targets (B, T), -1: not counted. cache, from init_cache, holds the
        tokens before idx and then idx, too; with it, all runs under no_grad. n_valid (B,), with
        a cache: how many of each row's T tokens are real. The rest is padding on the right, whose
        logits mean nothing. Returns logits (B, T, V) in float32 or better, loss (None without
        targets) and aux: with targets "ce", the cross-entropy (a model's loss may add to it)."""
        if idx.numel() == 0:
            raise ValueError(f"idx {tuple(idx.shape)} holds no token")
        with torch.set_grad_enabled(cache is None and torch.is_grad_enabled()):
            h = self.hidden(idx) if cache is None else self.decode(idx, cache, n_valid)
            logits = upcast(self.head(h))  # (B, T, V)
            if targets is None:
                return logits, None, {}
            loss = cross_entropy(logits, targets)
            return logits, loss, {"ce": loss.detach()}

    def hidden(self, idx, context=None):
        """idx (B, T) -> the states after the final norm, (B, T, C). context: that of a call with a
        cache, from decode; None: a plain pass, which makes its own."""
        x = self.drop(self.wte(idx))
        context = context or self.context_type(self.cfg, x)
        for layer, block in enumerate(self.blocks):
            x = block(x, layer, context)
        return self.norm(x)

    def flops_per_token(self):
        """FLOPs of a token, forward and backward, at block_size: attention's, and 6 for each
        weight of a matrix product (the head is one, the embedding not)."""
        return 6.0 * (self.block_weights() + self.head.weight.numel()) + self.mixer_flops()

    def block_weights(self):
        """Weights of the blocks' matrix products."""
        return sum(p.numel() for p in self.blocks.parameters() if p.dim() == 2)

    def mixer_flops(self):
        """A visible key takes 12 H D a layer: 2 in q k, 2 in a v, twice as many backward."""
        cfg, width = self.cfg, self.cfg.n_head * self.cfg.head_dim
        return 12.0 * cfg.n_layer * width * visible_keys(cfg.block_size, cfg.window)

    # ---- decoding, see decoding.py ----

    def decode(self, idx, cache, n_valid=None):
        """hidden of the tokens idx (B, T) that follow those of the cache, which keeps them."""
        context = self.cached_context_type(self.cfg, cache, idx.size(1), n_valid)
        h = self.hidden(idx, context)
        cache.advance(context.slots)  # all layers have written
        return h

    @property
    def context_limit(self):
        """The most tokens of a call or a cache: with RoPE as in training. None: no limit."""
        return self.cfg.block_size if self.cfg.pos == "rope" else None

    @property
    def context_kept(self):
        """How many of the last tokens stay where a context is full: all that fit, so that each
        token is predicted from exactly the last context_limit tokens."""
        return self.context_limit

    def init_cache(self, batch_size, max_len):
        """An empty cache for batch_size rows of up to max_len tokens."""
        return KVCache(self.cfg, *self.cache_sizes(batch_size, max_len))

    def cache_sizes(self, batch_size, max_len):
        """What every model's cache takes after cfg: sizes (checked), device, dtype."""
        if self.context_limit and max_len > self.context_limit:
            raise ValueError(f"max_len={max_len} is more than block_size={self.cfg.block_size}")
        return batch_size, max_len, self.wte.weight.device, compute_dtype(self.wte.weight)

    @torch.no_grad()
    def generate(self, idx, max_new_tokens, temperature=1.0, top_k=0, top_p=1.0):
        """Continue idx (B, T): (B, T + max_new_tokens). temperature, top_k and top_p as in
        decoding.next_tokens. Once the cache is full, the last context_kept tokens run again, as
        positions change. Call eval() first."""
        new, total = idx, idx.size(1) + max_new_tokens
        cache = self.init_cache(idx.size(0), min(total, self.context_limit or total))
        for _ in range(max_new_tokens):
            if cache.longest + new.size(1) > cache.max_len:
                cache.reset()
                new = idx[:, -self.context_kept:]
            logits = self(new, cache=cache)[0][:, -1]   # (B, V)
            new = next_tokens(logits, temperature, top_k, top_p)[:, None]
            idx = torch.cat([idx, new], 1)
        return idx


class Model(LanguageModel):
    """The baseline language model."""

    def __init__(self, cfg):
        super().__init__(cfg, [Block(cfg) for _ in range(cfg.n_layer)])
        init_weights(self, cfg.n_layer)


@torch.no_grad()
def init_weights(model, n_layer=None):
    """GPT-2's: N(0, 0.02); with n_layer, projections into the residual stream smaller by
    1 / sqrt(2 n_layer), so that its variance does not grow with depth. Norms stay 1. With
    tie_embeddings the head is the embedding. Call it first: it sets every matrix."""
    for name, p in model.named_parameters():
        if p.dim() == 2:
            into_residual = n_layer and name.endswith(("wo.weight", "w_down.weight"))
            p.normal_(0, 0.02 / math.sqrt(2 * n_layer) if into_residual else 0.02)
    if model.cfg.tie_embeddings:
        model.head.weight = model.wte.weight


def cross_entropy(logits, targets):
    """Mean negative log-likelihood in nats over targets that are not -1 (0 if none is)."""
    total = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1,
                            reduction="sum")
    return total / (targets != -1).sum().clamp(min=1)


class ScaledEmbedding(nn.Embedding):
    """Rows times sqrt(C), as in Gemma. A tied head reads the rows as they are."""

    def forward(self, idx):
        return super().forward(idx) * math.sqrt(self.embedding_dim)


def visible_keys(T, window=0):
    """How many keys a query attends to in a sequence of T tokens, averaged over positions."""
    w = min(window or T, T)
    return (w * (w + 1) / 2 + (T - w) * w) / T


def compute_dtype(x):
    """The dtype of matrix products of x: autocast's where it is on, else x's own."""
    device = x.device.type
    mixed = device != "meta" and torch.is_autocast_enabled(device)  # meta has no autocast
    return torch.get_autocast_dtype(device) if mixed else x.dtype


# ---- config checks ----

def check_sizes(cfg):
    cfg.at_least(1, "block_size", "vocab_size", "n_layer", "n_head", "n_kv_head", "n_embd")
    cfg.at_least(0, "head_dim")
    cfg.divides("n_kv_head", "n_head")
    if not cfg.head_dim:
        cfg.divides("n_head", "n_embd")


def check_values(cfg):
    if not 0 <= cfg.dropout < 1:
        raise ValueError(f"dropout={cfg.dropout} must be at least 0 and less than 1")
    for name in ("rope_theta", "norm_eps"):
        if not 0 < getattr(cfg, name) < math.inf:
            raise ValueError(f"{name}={getattr(cfg, name)} must be positive")
    for key in fields(cfg):
        value, allowed = getattr(cfg, key.name), key.metadata.get("allowed")
        if allowed and value not in allowed:
            raise ValueError(f"{key.name}={value} must be one of: {', '.join(allowed)}")
    if cfg.pos == "rope" and cfg.head_dim % 2:
        raise ValueError(f"RoPE needs an even head size: head_dim={cfg.head_dim}")

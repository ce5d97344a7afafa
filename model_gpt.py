"""
The plain Transformer: decoder-only, with Llama's block. The recurrent models are compared with it,
and their files import its parts. x_l (T, C) are the states of T tokens after l of the L layers:

    x_0     = E[idx]
    z_l     = x_l + W_o Attention(W_q n, W_k n, W_v n)        n  = RMSNorm(x_l)
    x_{l+1} = z_l + W_down (silu(W_gate n') * (W_up n'))      n' = RMSNorm(z_l)
    logits  = W_head RMSNorm(x_L)

In each head, query i reads the values of the keys j that are visible to it, and W_o reads the
results of all heads side by side:

    a_i = sum_j p_ij v_j        p_i = softmax_j(q_i . k_j / sqrt(D) + bias_ij)

Key j is visible iff j <= i and, with a sliding window of w keys, i - j < w. q_i and k_j are taken
after the QK-norm and after rotary positions (RoPE), as far as the model has them. bias_ij is 0, but
with ALiBi it is -m_h (i - j), where m_h = 2^(-8 h / H) in head h = 1 .. H. In the code the bias is
also -inf where a key is not visible.

Letters, which mean the same in every file that does not say otherwise:

    B  rows of a batch                    H  query heads
    T  tokens of a call, in each row      G  key/value heads, each read by H / G query heads
    S  keys that a call reads: cached     D  size of a head (C / H if not given)
       ones, then those of its tokens     L  layers
       (slots of a cache may be empty)
    C  width of the residual stream       V  vocabulary

Other files add letters of their own, and say so. Three of them are in several files. K is the
number of positions of a chunk (in Relaxed and MoR: the number of stored blocks), N the number of
subsets, and R the number of recursions or loops. The letter n has another meaning in each file.

The file can be read from top to bottom: the parts of a block come first, then the block, then the
model. Small helpers stand at the end. A call takes the opposite way: LanguageModel.forward, hidden,
Block, Attention, attend. Context has what all layers of a call share. fast=false writes the softmax
out, and fast=true calls torch's fused attention. The KV cache has a file of its own, decoding.py.
Training can be understood without it. A plain pass is a call without a cache, as in training, and
it uses neither CachedContext nor the last part of LanguageModel.

"float32 or better" means float64 for a float64 tensor and float32 for all others. On a GPU,
training multiplies matrices in bfloat16, which is too coarse for a softmax, a sum, a loss or RoPE's
angles. The tests run in float64, which must not become float32 on the way.

Papers: Vaswani et al. 2017 (1706.03762); Su et al. 2021 (RoPE, 2104.09864); Shazeer 2020
(SwiGLU, 2002.05202); Zhang, Sennrich 2019 (RMSNorm, 1910.07467); Ainslie et al. 2023 (GQA,
2305.13245); Press et al. 2022 (ALiBi, 2108.12409); Touvron et al. 2023 (Llama, 2302.13971).
"""
import math
from dataclasses import dataclass, field, fields

import torch
import torch.nn as nn
import torch.nn.functional as F

from decoding import Cached, KVCache, next_tokens


def choice(*allowed):
    """Return a Config field that takes one of `allowed`. The first is the default."""
    return field(default=allowed[0], metadata={"allowed": allowed})


@dataclass
class BaseConfig:
    """The fields that all models have. Each is an option of a config file."""
    block_size: int = 256        # tokens of a training sequence; RoPE's longest context (RAT: any)
    vocab_size: int = 257        # number of token ids (257: bytes and end-of-text)
    n_layer: int = 4             # layers, each counted as often as it runs (unrolled)
    n_head: int = 4              # query heads
    n_kv_head: int = 0           # key/value heads (0: n_head); n_head / n_kv_head heads share each
    n_embd: int = 128            # width of the residual stream
    head_dim: int = 0            # width of a head (0: n_embd / n_head)
    dropout: float = 0.0         # on embeddings, attention, residual branches (see each file)
    fast: bool = True            # fused or parallel code; false: the equations written out
    rope_theta: float = 10000.0  # RoPE's base
    norm_eps: float = 1e-5       # RMSNorm's epsilon

    # The code that all models share reads these names from every Config. A subclass has these
    # values unless it makes fields of these names, as BlockConfig and Config do below. Here they
    # are constants of the class and no fields, because they have no annotation. RT has no option
    # mlp. It takes mlp = "gelu" from here, so that its MLP is 4 n_embd wide by default. In LRT most
    # of these values say nothing, because it has QK-norm, windows, an MLP and a head of its own.
    pos, window, scale_embeddings, n_mlp, mlp = "rope", 0, False, 0, "gelu"
    qk_norm, tie_embeddings = False, True

    def __post_init__(self):
        """Derive the sizes that a 0 leaves open. They are attributes and no fields, so that
        dataclasses.replace(cfg, n_head=8) derives them again. (Where another file fills in a field,
        replace keeps the value, and a comment there says so.) For an impossible value this raises
        ValueError, which names the field. The checks stand at the end of this file."""
        check_sizes(self)
        self.kv_heads = self.n_kv_head or self.n_head                   # G
        self.head_size = self.head_dim or self.n_embd // self.n_head    # D
        self.mlp_width = self.n_mlp or default_mlp_width(self)
        check_values(self)

    def at_least(self, least, *names):
        for name in names:
            if not getattr(self, name) >= least:    # NaN is refused, too
                raise ValueError(f"{name}={getattr(self, name)} must be at least {least}")

    def divides(self, a, b):
        if getattr(self, b) % getattr(self, a):
            raise ValueError(f"{b}={getattr(self, b)} is not divisible by {a}={getattr(self, a)}")


@dataclass
class BlockConfig(BaseConfig):
    """The fields of the models that have this file's block: gpt, relaxed and mor."""
    n_mlp: int = 0               # hidden width of the MLP (0: 4 n_embd for gelu, else 8/3 n_embd)
    mlp: str = choice("swiglu", "gelu", "geglu")
    qk_norm: bool = False        # RMSNorm of queries and keys before RoPE; heads share its weight
    tie_embeddings: bool = True  # the head is the embedding matrix
    scale_embeddings: bool = False  # embeddings times sqrt(n_embd), as in Gemma


@dataclass
class Config(BlockConfig):
    pos: str = choice("rope", "alibi", "none")  # how positions enter the model
    window: int = 0              # sliding window: keys of a query, its own included (0: all)


# ---- types, norm ----

def upcast(x):
    """Return x in float32 or better."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


class RMSNorm(nn.Module):
    """x / rms * weight, where rms^2 = mean(x^2) + eps over the last dimension."""

    def __init__(self, dim, eps):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x):
        # rms_norm wants x in the weight's dtype. It sums in float32 or better in any case.
        like_weight = x.to(self.weight.dtype)
        return F.rms_norm(like_weight, x.shape[-1:], self.weight, self.eps).to(x.dtype)


# ---- positions, and what the layers of a call share ----

def rope_tables(pos, head_dim, theta, dtype):
    """Return cos and sin of RoPE's angles pos theta^(-2c / D), c = 0 .. D / 2 - 1: pos (...) ->
    (..., D / 2) each. They are in dtype, or in float32 if dtype has 16 bits."""
    dtype = torch.promote_types(dtype, torch.float32)
    freq = theta ** (-torch.arange(0, head_dim, 2, device=pos.device, dtype=dtype) / head_dim)
    angle = pos.to(dtype)[..., None] * freq                 # (..., D / 2)
    return angle.cos(), angle.sin()


def apply_rope(x, cos, sin):
    """Rotate each pair of channels (x_c, x_{c + D/2}) of x (..., D) by its angle. cos and sin
    broadcast."""
    a, b = x.chunk(2, -1)                                   # (..., D / 2)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)


def alibi_slopes(n_head, device, dtype):
    """Return m_h = 2^(-8 h / H) for h = 1 .. H: (H,)."""
    return 2.0 ** (-8.0 * torch.arange(1, n_head + 1, device=device, dtype=dtype) / n_head)


def attention_bias(q_pos, k_pos, window=0, slopes=None, dtype=torch.float32):
    """Return what attention adds to the scores: -inf where the key is not visible, else ALiBi's
    bias, or 0 without slopes. q_pos (B or 1, T), k_pos (S,) -> (B or 1, H or 1, T, S)."""
    distance = q_pos[:, None, :, None] - k_pos              # (B or 1, 1, T, S)
    visible = distance >= 0
    if window:
        visible = visible & (distance < window)
    bias = (torch.zeros_like(distance, dtype=dtype) if slopes is None
            else -slopes.to(dtype)[:, None, None] * distance)
    return bias.masked_fill(~visible, -math.inf)


class Context:
    """All that the layers of a call share:
    pos (B or 1, T)    the positions of the tokens; 1 if they are the same in all rows. (cfg.pos
                       is no number: it says how positions enter the model.)
    k_pos (S,)         the positions of the keys
    rope               cos and sin at pos, (B or 1, 1, T, D / 2) each; None without RoPE
    slopes (H,)        ALiBi's m_h; None without ALiBi
    bias               attention_bias; None where the causal mask is enough, or where a subclass
                       masks in another way"""

    def __init__(self, cfg, x, pos=None, k_pos=None, in_order=True, has_bias=None):
        """Only the shape (B, T), the dtype and the device of x are read, and no value. (Only MoR's
        subclass reads B.) In a plain pass x are the embeddings (B, T, C). In a call with a cache it
        is an uninitialized tensor (B, T). pos and k_pos are None in a plain pass, in which tokens
        and keys have the positions 0 .. T - 1. in_order says that in each row the keys are those
        of all earlier tokens, followed by those of the call's tokens, with no empty slot between.
        The order of the keys alone gives the mask then. It is false where rows may hold different
        numbers of tokens. has_bias says whether there is a bias. Attention is faster without one.
        Therefore None, the default, makes a bias only where the causal mask is not enough."""
        dtype = torch.promote_types(x.dtype, torch.float32)
        if pos is None:
            k_pos = torch.arange(x.size(1), device=x.device)
            pos = k_pos[None]
        self.pos, self.k_pos, S = pos, k_pos, len(k_pos)
        self.rope = self.slopes = self.bias = None
        if cfg.pos == "rope":
            if S > cfg.block_size:
                raise ValueError(f"{S} tokens are more than block_size={cfg.block_size}")
            # The tables are made once a call, and all layers share them.
            cos, sin = rope_tables(pos, cfg.head_size, cfg.rope_theta, dtype)
            self.rope = cos[:, None], sin[:, None]          # (B or 1, 1, T, D / 2)
        if cfg.pos == "alibi":
            self.slopes = alibi_slopes(cfg.n_head, x.device, dtype)
        if has_bias is None:
            has_bias = 0 < cfg.window < S or cfg.pos == "alibi" or not in_order
        if has_bias:
            self.bias = attention_bias(pos, k_pos, cfg.window, self.slopes, dtype)

    def extend(self, layer, k, v):
        """Return the keys and values that the tokens attend to, (B, G, S, D) each. They are the
        tokens' own k and v, (B, G, T, D), unless there is a cache (CachedContext)."""
        return k, v


class CachedContext(Cached, Context):
    """The context of a call with a cache (decoding.py)."""


# ---- a block ----

class Attention(nn.Module):
    """Causal self-attention. With a cache, the number `layer` says which keys and values are this
    layer's. The number is an argument of forward and no attribute, because a model with loops
    calls one block as several layers."""

    def __init__(self, cfg):
        super().__init__()
        self.cfg, C, D = cfg, cfg.n_embd, cfg.head_size
        self.wq = nn.Linear(C, cfg.n_head * D, bias=False)
        self.wk = nn.Linear(C, cfg.kv_heads * D, bias=False)
        self.wv = nn.Linear(C, cfg.kv_heads * D, bias=False)
        self.wo = nn.Linear(cfg.n_head * D, C, bias=False)
        norm_type = RMSNorm if cfg.qk_norm else nn.Identity     # Identity ignores its arguments
        self.q_norm, self.k_norm = norm_type(D, cfg.norm_eps), norm_type(D, cfg.norm_eps)

    def forward(self, x, layer, context):
        D = self.cfg.head_size
        q, k, v = (w(x).unflatten(-1, (-1, D)).transpose(1, 2)      # (B, H or G, T, D)
                   for w in (self.wq, self.wk, self.wv))
        q, k = self.q_norm(q), self.k_norm(k)
        if context.rope:
            q, k = apply_rope(q, *context.rope), apply_rope(k, *context.rope)
        k, v = context.extend(layer, k, v)                          # (B, G, S, D)
        dropout = self.cfg.dropout if self.training else 0.0
        a = attend(q, k, v, context.bias, self.cfg.fast, dropout)   # (B, H, T, D)
        return self.wo(a.transpose(1, 2).flatten(2))                # (B, T, C)


def attend(q, k, v, bias, fast, dropout=0.0):
    """Return softmax(q k^T / sqrt(D) + bias) v, (B, H, T, D). q is (B, H, T, D), k and v are
    (B, G, S, D), and bias broadcasts to (B, H, T, S). Without a bias (None) attention is causal,
    and the queries are the last T of the S tokens. Each query must have a visible key."""
    H, G, T, S = q.size(1), k.size(1), q.size(2), k.size(2)
    if bias is None and not (fast and T in (1, S)):
        # The causal mask is made here, except in two cases of fast=true. For T = S torch makes the
        # same mask. For T = 1 no mask is needed. (Both are handled at the end of this function.)
        # Query t = 0 .. T - 1 is token S - T + t, and the mask hides the keys after it.
        bias = q.new_full((T, S), -math.inf).triu(S - T + 1)
    if not fast:
        # The equation is written out. H / G query heads share each key and value head.
        k, v = (x.repeat_interleave(H // G, 1) for x in (k, v))     # (B, H, S, D)
        scores = (q @ k.transpose(-2, -1)) / math.sqrt(q.size(-1))  # (B, H, T, S)
        probs = (upcast(scores) + bias).softmax(-1)
        return F.dropout(probs, dropout).to(v.dtype) @ v            # (B, H, T, D)
    # torch's own causal mask begins at the first key, which is right for T = S. A single query is
    # the last token. It attends to all keys, so that it needs no mask.
    causal = bias is None and T > 1
    # torch wants the bias in q's dtype. In 16 bits this rounds ALiBi's bias.
    if bias is not None:
        bias = bias.to(q.dtype)
    return F.scaled_dot_product_attention(q, k, v, bias, dropout, causal, enable_gqa=H != G)


class MLP(nn.Module):
    """swiglu   W_down (silu(W_gate x) * W_up x)
    geglu    the same with gelu for silu, in its tanh form
    gelu     W_down gelu(W_up x), in its exact form"""

    def __init__(self, cfg):
        super().__init__()
        acts = {"swiglu": nn.SiLU(), "geglu": nn.GELU("tanh"), "gelu": nn.GELU()}
        self.act, self.gated = acts[cfg.mlp], cfg.mlp != "gelu"
        if self.gated:
            self.w_gate = nn.Linear(cfg.n_embd, cfg.mlp_width, bias=False)
        self.w_up = nn.Linear(cfg.n_embd, cfg.mlp_width, bias=False)
        self.w_down = nn.Linear(cfg.mlp_width, cfg.n_embd, bias=False)

    def forward(self, x):
        up = self.w_up(x)
        return self.w_down(self.act(self.w_gate(x)) * up if self.gated else self.act(up))


def default_mlp_width(cfg):
    """Return the MLP's width where n_mlp is 0. It is 4 C for gelu. The others have three matrices
    and not two, so 8/3 C gives as many weights. The 8/3 C is rounded up to a multiple of 32."""
    return 4 * cfg.n_embd if cfg.mlp == "gelu" else 32 * math.ceil(8 * cfg.n_embd / 3 / 32)


class Block(nn.Module):
    """One layer: attention, then the MLP. Each reads the stream through a norm and adds its result
    to the stream itself."""

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
    """The base of all models: embedding, blocks, norm, head, loss, decoding. A model is a
    subclass. It gives the blocks to __init__ and then calls init_weights. It may replace any
    method, and needs a mixer_flops of its own if its attention is not this file's. train.py also
    uses eval_metrics, end_step and estimate where a model has them (see CONTRIBUTING.md)."""
    context_type, cached_context_type = Context, CachedContext  # many models have their own
    runs_blocks_once = True     # so that FSDP may gather one block at a time

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

        idx (B, T)       int64
        targets (B, T)   the tokens to predict; -1 is not counted
        cache            made by init_cache; it holds the tokens before idx, and after the call
                         those of idx, too
        n_valid (B,)     int64, with a cache: how many of each row's T tokens are real; the others
                         are padding on the right, and their logits mean nothing

        Returns logits (B, T, V) in float32 or better, the loss (None without targets) and a dict,
        which has the cross-entropy, "ce", if there are targets. (A model's loss may have further
        terms.) With a cache everything runs under no_grad."""
        check_call(idx, cache, n_valid)
        with torch.set_grad_enabled(cache is None and torch.is_grad_enabled()):
            h = self.hidden(idx) if cache is None else self.decode(idx, cache, n_valid)
            logits = upcast(self.head(h))  # (B, T, V)
            if targets is None:
                return logits, None, {}
            loss = cross_entropy(logits, targets)
            return logits, loss, {"ce": loss.detach()}

    def hidden(self, idx, context=None):
        """Return the states after the final norm, (B, T, C), for idx (B, T). A plain pass (None)
        makes its own context. A call with a cache brings one, see decode."""
        x = self.drop(self.wte(idx))
        context = context or self.context_type(self.cfg, x)
        for layer, block in enumerate(self.blocks):
            x = block(x, layer, context)
        return self.norm(x)

    def flops_per_token(self):
        """Return the FLOPs of a token, forward and backward, in a sequence of block_size tokens.
        Each weight of a matrix product takes 2 forward and 4 backward, and mixer_flops adds those
        of attention. The head is a product, the embedding is not."""
        return 6.0 * (self.block_weights() + self.head.weight.numel()) + self.mixer_flops()

    def block_weights(self):
        """Return how many weights are in the blocks' matrix products."""
        return sum(p.numel() for p in self.blocks.parameters() if p.dim() == 2)

    def mixer_flops(self):
        """Return attention's FLOPs of a token. In each layer a visible key takes 12 H D: 2 H D in
        q . k, 2 H D in p v, and twice as many in the backward pass."""
        cfg, width = self.cfg, self.cfg.n_head * self.cfg.head_size
        return 12.0 * cfg.n_layer * width * visible_keys(cfg.block_size, cfg.window)

    # ---- decoding with a cache (read decoding.py first) ----

    def decode(self, idx, cache, n_valid=None):
        """Run the tokens idx (B, T), which follow those of the cache, and add them to the cache.
        Return their states after the final norm, (B, T, C)."""
        context = self.cached_context_type(self.cfg, cache, idx.size(1), n_valid)
        h = self.hidden(idx, context)
        cache.advance(context.slots)  # all layers have written
        return h

    @property
    def context_limit(self):
        """Return the most tokens that a call or a cache may have. RoPE allows block_size tokens.
        None means that there is no limit."""
        return self.cfg.block_size if self.cfg.pos == "rope" else None

    @property
    def context_kept(self):
        """Return how many of the last tokens stay when the context is full. Here as many stay as
        fit. Each further token is then predicted from exactly the last context_limit tokens. None
        means that the context is never full."""
        return self.context_limit

    def init_cache(self, batch_size, max_len):
        """Return an empty cache for batch_size rows of up to max_len tokens."""
        return KVCache(self.cfg, *self.cache_sizes(batch_size, max_len))

    def cache_sizes(self, batch_size, max_len):
        """Return the arguments that every model's cache takes after cfg: batch_size, max_len, the
        device and the dtype. Raise ValueError if max_len is more than the context limit."""
        if self.context_limit and max_len > self.context_limit:
            raise ValueError(f"max_len={max_len} is more than block_size={self.cfg.block_size}")
        return batch_size, max_len, self.wte.weight.device, compute_dtype(self.wte.weight)

    @torch.no_grad()
    def generate(self, idx, max_new_tokens, temperature=1.0, top_k=0, top_p=1.0):
        """Continue idx (B, T) to (B, T + max_new_tokens). decoding.next_tokens says what
        temperature, top_k and top_p do. Once the cache is full, the last context_kept tokens run
        again, because their positions change. If these fill the cache, as they do here, each
        further token costs such a pass. Call eval() first."""
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
    """Initialize as GPT-2 does. Every matrix is normal with a standard deviation of 0.02. With
    n_layer (RAT gives none), the projections into the residual stream, which are called wo and
    w_down, are smaller by 1 / sqrt(2 n_layer), so that the stream's variance does not grow with
    depth. The weights of norms stay 1. With tie_embeddings, the head is the embedding. This
    function sets every matrix. A model that initializes some matrices in a way of its own therefore
    calls this function first and then sets these matrices."""
    for name, p in model.named_parameters():
        if p.dim() == 2:
            into_residual = n_layer and name.endswith(("wo.weight", "w_down.weight"))
            p.normal_(0, 0.02 / math.sqrt(2 * n_layer) if into_residual else 0.02)
    if model.cfg.tie_embeddings:
        model.head.weight = model.wte.weight


def cross_entropy(logits, targets):
    """Return the mean negative log-likelihood in nats over the targets that are not -1. It is 0 if
    all targets are -1."""
    total = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1,
                            reduction="sum")
    return total / (targets != -1).sum().clamp(min=1)


class ScaledEmbedding(nn.Embedding):
    """An embedding times sqrt(C), as in Gemma. A head that is tied to it reads the matrix as it
    is."""

    def forward(self, idx):
        return super().forward(idx) * math.sqrt(self.embedding_dim)


def visible_keys(T, window=0):
    """Return how many keys a query attends to, averaged over the positions of T tokens."""
    w = min(window or T, T)
    return (w * (w + 1) / 2 + (T - w) * w) / T


def compute_dtype(x):
    """Return the dtype of matrix products of x: autocast's where it is on, else x's own."""
    device = x.device.type
    mixed = device != "meta" and torch.is_autocast_enabled(device)  # meta has no autocast
    return torch.get_autocast_dtype(device) if mixed else x.dtype


def check_call(idx, cache, n_valid):
    """Raise ValueError if idx (B, T) is empty, if n_valid (B,) comes without a cache or in another
    dtype than int64, or if one of them has another number of rows than the cache."""
    if idx.numel() == 0:
        raise ValueError(f"idx {tuple(idx.shape)} holds no token")
    if n_valid is not None and cache is None:
        raise ValueError("n_valid is for a call with a cache")
    if n_valid is not None and n_valid.dtype != torch.int64:
        # RT and LRT subtract positions from n_valid. In uint8, 1 - 2 would be 255.
        raise ValueError(f"n_valid must be int64, and not {n_valid.dtype}")
    for name, x in (("idx", idx), ("n_valid", n_valid)):
        if cache is not None and x is not None and len(x) != len(cache.lengths):
            raise ValueError(f"{name} has {len(x)} rows, and the cache has {len(cache.lengths)}")


# ---- checks of a Config ----

def check_sizes(cfg):
    """Check the fields from which other sizes are derived."""
    cfg.at_least(1, "block_size", "vocab_size", "n_layer", "n_head", "n_embd")
    cfg.at_least(0, "n_kv_head", "head_dim", "n_mlp", "window")
    if cfg.n_kv_head:
        cfg.divides("n_kv_head", "n_head")
    if not cfg.head_dim:
        cfg.divides("n_head", "n_embd")


def check_values(cfg):
    """Check the other fields that all models have, and in any Config the fields made by choice."""
    if not 0 <= cfg.dropout < 1:
        raise ValueError(f"dropout={cfg.dropout} must be at least 0 and less than 1")
    for name in ("rope_theta", "norm_eps"):
        if not 0 < getattr(cfg, name) < math.inf:
            raise ValueError(f"{name}={getattr(cfg, name)} must be positive and finite")
    for f in fields(cfg):
        value, allowed = getattr(cfg, f.name), f.metadata.get("allowed")
        if allowed and value not in allowed:
            raise ValueError(f"{f.name}={value} must be one of: {', '.join(allowed)}")
    if cfg.pos == "rope" and cfg.head_size % 2:
        raise ValueError(f"RoPE needs an even head size, and not {cfg.head_size} (head_dim, or "
                         "n_embd / n_head)")

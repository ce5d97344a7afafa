"""
Recursive and Relaxed Recursive Transformers: tied layers in loops, relaxed by low-rank deltas.

Only K of a Transformer's L layers are stored, and these K, one after the other, run
n_loop = L / K times (the Recursive Transformer). Each use of a stored matrix may add a
low-rank delta (LoRA) of its own (Relaxed). Both start from a trained Transformer and are
then trained further, to become smaller at little loss (what it cost here: lab/RESULTS.md).

    h_{l+1} = Block(h_l; stored block k = l mod K, use u = l // K)    l = 0 .. L - 1    (2)
    in it, every matrix:  y = W' x + B_u A_u x    W' is tied; A_u, B_u are of use u     (3)
    they start from a trained W_l:  B_u A_u = truncated SVD of W_l diag(g_l / g') - W'  (4)
    g_l, g': weights of the norms before W_l and W' (W_o, W_down: none). Numbers: the paper's

L = 4 layers are n_loop = 2 loops over K = 2 stored blocks:

    loop 1   h_0 -> [block 0, use 0] -> [block 1, use 0] -> h_2 --norm, head--> exit?
                      same W', norms      same W', norms
    loop 2   h_2 -> [block 0, use 1] -> [block 1, use 1] -> h_4 --norm, head--> logits

Tied weights are those of a stored block, the same in all its uses. rank = 0 has no deltas;
at full rank they undo the tying. Each unrolled layer has its own keys and values in the cache.
Dropout is on embeddings, attention weights and residual branches.

Early exit (Section 3.7). The head can predict after each loop. In training, early_exit= adds
the losses of earlier loops. In evaluation and decoding, exit_loop= is the last loop of all
tokens. In serve.py each token exits where its own prediction is sure. Then it has no keys in
deeper loops, which later tokens need; serve.py says how it supplies them.

Departures. As norms are tied, (4) has a ratio that the paper's has not. QK-norm, which the
paper's models have not, has a weight for each use if rank > 0. With init=stepwise block k
does not start from layer k, but the paper (Appendix C) starts the first loop's deltas at 0.
Here they follow (4), or full rank would not give the trained model back. The public code
scales deltas by alpha / rank, which would break (4): they have no factor here.

Paper: Bae et al. 2024, "Relaxed Recursive Transformers: Effective Parameter Sharing with
Layer-wise LoRA" (2410.20672). Part of it is in github.com/raymin0223/mixture_of_recursions.

Shapes: B batch, T new tokens, S keys, C width, H query heads, G key/value heads, D head size,
V vocabulary, r rank. Loops count from 1; l, k, u from 0 (in Attention k are keys).
"""
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F

import model_gpt
from decoding import KVCache
from model_gpt import (BaseConfig, LanguageModel, apply_rope, attend, choice,
                       cross_entropy, init_weights, mlp_width, upcast)


@dataclass
class Config(BaseConfig):
    n_loop: int = 2              # loops, and uses of each stored block
    rank: int = 8                # rank of every matrix's deltas (0: none)
    n_mlp: int = 0               # hidden width of the MLP (0: 8/3 n_embd, gelu: 4)
    mlp: str = choice("swiglu", "gelu", "geglu")
    pos: str = choice("rope", "none")   # no ALiBi or window: as in the paper
    qk_norm: bool = False        # RMSNorm with a weight on each head's query and key
    tie_embeddings: bool = True  # the head is the embedding matrix
    scale_embeddings: bool = False  # embeddings times sqrt(n_embd), as in Gemma
    # conversion of a trained model_gpt
    init: str = choice("average", "stepwise", "lower", "upper", "random")   # stored blocks
    lora_init: str = choice("svd", "zero")      # deltas start as (4), or at 0
    # early exit: in training; in evaluation and decoding
    early_exit: str = choice("none", "weighted", "aggressive")  # losses of earlier loops
    exit_weight: float = 0.1     # aggressive: their weight
    exit_loss: str = choice("ce", "kl", "both")     # which losses; kl: to the last loop
    exit_loop: int = 0           # stop after this loop (0: the last)

    # models that convert takes; keys that may change when a run goes on, or starts from weights
    CONVERTS_FROM = ("gpt",)
    NOT_IN_WEIGHTS = ("early_exit", "exit_weight", "exit_loss", "exit_loop")

    def __post_init__(self):
        super().__post_init__()
        if self.n_loop < 1 or self.n_layer % self.n_loop:
            raise ValueError(f"n_loop={self.n_loop} must divide n_layer={self.n_layer}")
        self.at_least(0, "rank", "exit_weight", "n_mlp")
        if not 0 <= self.exit_loop <= self.n_loop:
            raise ValueError(f"exit_loop={self.exit_loop} must be 0 (the last) or one of the "
                             f"{self.n_loop} loops")
        self.n_mlp = self.n_mlp or mlp_width(self)
        self.n_stored = self.n_layer // self.n_loop     # K


# ---- the method ----

def run_loops(blocks, h, context, last_loop):
    """h_0 (B, T, C) -> the states after loops 1 .. last_loop, a list of (B, T, C)."""
    states = []
    for u in range(last_loop):
        for k, block in enumerate(blocks):
            h = block(h, u * len(blocks) + k, context)      # h_{l + 1}, l = u K + k    (2)
        states.append(h)
    return states


class Block(model_gpt.Block):
    """A stored block. Like every model's it is called with an unrolled layer, so that run_loops
    can run other models' blocks."""

    def __init__(self, cfg):
        super().__init__(cfg, Attention, MLP)
        self.cfg = cfg

    def forward(self, x, layer, context, u=None):
        u = layer // self.cfg.n_stored if u is None else u      # l = u K + k
        x = x + self.drop(self.attn(self.norm1(x), layer, u, context))  # (B, T, C)
        return x + self.drop(self.mlp(self.norm2(x), u))


class Attention(model_gpt.Attention):
    """model_gpt's forward again, as here every part is called with u."""

    def __init__(self, cfg):
        super().__init__(cfg)
        C, D, linear = cfg.n_embd, cfg.head_dim, MergedLinear if cfg.fast else RelaxedLinear
        self.wq = linear(C, cfg.n_head * D, cfg)
        self.wk = linear(C, cfg.n_kv_head * D, cfg)
        self.wv = linear(C, cfg.n_kv_head * D, cfg)
        self.wo = linear(cfg.n_head * D, C, cfg)
        if cfg.qk_norm:
            self.q_norm, self.k_norm = HeadNorm(cfg), HeadNorm(cfg)

    def forward(self, x, layer, u, context):
        D = self.cfg.head_dim
        q = self.wq(x, u).unflatten(-1, (-1, D)).transpose(1, 2)    # (B, H, T, D)
        k = self.wk(x, u).unflatten(-1, (-1, D)).transpose(1, 2)    # (B, G, T, D)
        v = self.wv(x, u).unflatten(-1, (-1, D)).transpose(1, 2)    # (B, G, T, D)
        if self.cfg.qk_norm:  # else nn.Identity, which takes no u
            q, k = self.q_norm(q, u), self.k_norm(k, u)
        if context.rope:
            q, k = apply_rope(q, *context.rope), apply_rope(k, *context.rope)
        k, v = context.extend(layer, k, v)                          # (B, G, S, D)
        dropout = self.cfg.dropout if self.training else 0.0
        y = attend(q, k, v, context.bias, self.cfg.fast, dropout)   # (B, H, T, D)
        return self.wo(y.transpose(1, 2).flatten(2), u)             # (B, T, C)


class MLP(model_gpt.MLP):
    """model_gpt's, again with u."""

    def __init__(self, cfg):
        super().__init__(cfg)
        linear = MergedLinear if cfg.fast else RelaxedLinear
        if self.gated:
            self.w_gate = linear(cfg.n_embd, cfg.n_mlp, cfg)
        self.w_up = linear(cfg.n_embd, cfg.n_mlp, cfg)
        self.w_down = linear(cfg.n_mlp, cfg.n_embd, cfg)

    def forward(self, x, u):
        up = self.w_up(x, u)
        hidden = self.act(self.w_gate(x, u)) * up if self.gated else self.act(up)
        return self.w_down(hidden, u)


class RelaxedLinear(nn.Module):
    """weight (out, in) is W', a[u] (r, in) is A_u, b[u] (r, out) is B_u transposed, so that
    serve.py can stack the rows of all uses. r = min(rank, in, out)."""

    def __init__(self, n_in, n_out, cfg):
        super().__init__()
        self.rank = min(cfg.rank, n_in, n_out)
        self.weight = nn.Parameter(torch.empty(n_out, n_in))  # filled by init_weights
        if self.rank:  # 3 dimensions: init_weights leaves them. B = 0: no delta yet
            self.a = nn.Parameter(0.02 * torch.randn(cfg.n_loop, self.rank, n_in))
            self.b = nn.Parameter(torch.zeros(cfg.n_loop, self.rank, n_out))

    def forward(self, x, u):
        """x (B, T, in) -> (B, T, out)."""
        y = F.linear(x, self.weight)                    # W' x
        if self.rank and isinstance(u, int):
            y = y + F.linear(x, self.a[u]) @ self.b[u]      # + B_u A_u x    (3)
        elif self.rank:     # rows of several uses: all A x, each row keeps its own, all B
            low = F.linear(x, self.a.flatten(0, 1)).unflatten(-1, (-1, self.rank))
            y = y + (low * u[:, None, :, None]).flatten(2) @ self.b.flatten(0, 1)
        return y


# ---- QK-norm, and the fast path ----

class HeadNorm(nn.Module):
    """QK-norm: RMSNorm of heads (B, heads, T, D). weights[u], of use u, multiplies W x after it
    is normalized, which no delta of W could do. At rank 0 they are tied like all else."""

    def __init__(self, cfg):
        super().__init__()
        self.eps = cfg.norm_eps
        ones = [nn.Parameter(torch.ones(cfg.head_dim)) for _ in range(cfg.n_loop)]
        self.weights = nn.ParameterList(ones if cfg.rank else ones[:1] * cfg.n_loop)

    def forward(self, x, u):  # faster than model_gpt's; in 16 bits it rounds once more
        if isinstance(u, int):
            weight = self.weights[u]
        else:
            weight = (u @ torch.stack([*self.weights]))[:, None, None]      # (B, 1, 1, D)
        return F.rms_norm(x, x.shape[-1:], eps=self.eps) * weight.to(x.dtype)


class MergedLinear(RelaxedLinear):
    """The fast path: W' x + B A x = (W' + B A) x. To form B A costs r * in * out products,
    to apply A and B r * (in + out) a token: with many tokens it is formed."""

    def forward(self, x, u):
        n_out, n_in = self.weight.shape
        many = x.numel() // n_in * (n_in + n_out) > n_in * n_out    # r cancels
        if many and self.rank and isinstance(u, int):
            return F.linear(x, torch.addmm(self.weight, self.b[u].t(), self.a[u]))
        return super().forward(x, u)


# ---- conversion of a trained Transformer (Sections 2.2 and 2.3) ----

@torch.no_grad()
def convert(model, weights):
    """Start model from `weights`, the state dict of a model_gpt of any depth."""
    cfg, sources = model.cfg, source_layers(weights, model.cfg.n_layer)
    for name, w in weights.items():
        if not name.startswith("blocks."):
            model.get_parameter(name).copy_(w)
    svd = cfg.rank > 0 and cfg.lora_init == "svd"
    for k, block in enumerate(model.blocks):
        start = [sources[layer] for layer in layers_for_tied(cfg, k)]  # init=random: none
        tied = {name: sum(s[name] for s in start) / len(start) for name in sources[0] if start}
        block.load_state_dict(tied, strict=False)  # W' and norms, no QK-norms
        for u, source in enumerate(sources[k::cfg.n_stored]):
            set_head_norms(block, u, source if cfg.rank else tied)
            if svd:
                set_deltas(block, k, u, source)


def source_layers(weights, n_layer):
    """The source of each unrolled layer: a trained layer's {name: weight}. They are evenly
    spaced, or repeated if there are too few."""
    trained = {}
    for name, w in weights.items():
        if name.startswith("blocks."):
            _, number, part = name.split(".", 2)
            trained.setdefault(int(number), {})[part] = w
    step = (len(trained) - 1) / max(1, n_layer - 1)
    return [trained[round(step * layer)] for layer in range(n_layer)]


def layers_for_tied(cfg, k):
    """The layers whose sources are averaged to W' and norms of stored block k."""
    L, K = cfg.n_layer, cfg.n_stored
    return {"average": range(k, L, K),          # all uses of the block
            "stepwise": [round(k * (L - 1) / max(1, K - 1))],   # K layers, first to last
            "lower": [k],                       # the first K
            "upper": [L - K + k],               # the last K
            "random": []}[cfg.init]             # none: W' stays random, as a baseline of (4)


def set_head_norms(block, u, source):
    for name, part in block.named_modules():
        if isinstance(part, HeadNorm) and f"{name}.weight" in source:  # tied may be empty
            part.weights[u].copy_(source[f"{name}.weight"])


def set_deltas(block, k, u, source):
    """Set the deltas of stored block k's use u by (4), so that it comes near its source. Where W'
    is the source but for rounding, the SVD would be of noise: A stays random and B zero, so that
    both learn."""
    for name, part in block.named_modules():
        if isinstance(part, RelaxedLinear):
            w_l = source[f"{name}.weight"]
            n_use, r, _ = part.a.shape
            wanted = folded(block, k, source, name)
            missing = wanted - upcast(part.weight)      # B_u A_u at full rank
            # W' and g' are each a mean of up to n_use weights, and rounded as often
            eps = 2 * n_use * max(torch.finfo(w.dtype).eps for w in (w_l, part.weight))
            if missing.norm() > eps * wanted.norm():
                U, S, Vh = torch.linalg.svd(missing, full_matrices=False)
                part.a[u], part.b[u] = Vh[:r], (U[:, :r] * S[:r]).t()


def folded(block, k, source, name):
    """W_l diag(g_l / g') (out, in), which does here what W_l did in its layer: of a normalized
    n,  W_l (g_l * n) = [W_l diag(g_l / g')] (g' * n). ValueError where g' is near zero."""
    w = upcast(source[f"{name}.weight"])
    if name not in ("attn.wo", "mlp.w_down"):  # which have no norm before them
        norm = "norm1" if name.startswith("attn") else "norm2"
        ratio = upcast(source[f"{norm}.weight"]) / upcast(getattr(block, norm).weight)
        if not (ratio.abs() < 1e4).all():       # NaN, too
            raise ValueError(f"{norm} of stored block {k} is near zero, its deltas would be "
                             f"huge: another init may avoid it, rank=0 and lora_init=zero do")
        w = w * ratio
    return w


# ---- the model ----

class Model(LanguageModel):
    """K stored blocks that run n_loop times."""
    runs_blocks_once = False  # for FSDP

    def __init__(self, cfg):
        super().__init__(cfg, [self.make_block(cfg, k) for k in range(cfg.n_stored)])
        init_weights(self, cfg.n_layer)

    def make_block(self, cfg, k):
        """Stored block k; in a subclass any model's (convert knows this one alone)."""
        return Block(cfg)

    @property
    def loops_to_run(self):
        """How many loops run in evaluation and decoding."""
        return self.cfg.exit_loop or self.cfg.n_loop

    def loop_states(self, idx, context=None):
        """idx (B, T) -> the states after each loop, a list of (B, T, C). context: that of a call
        with a cache; None: a plain pass."""
        h = self.drop(self.wte(idx))
        last_loop = self.cfg.n_loop if self.training and context is None else self.loops_to_run
        return run_loops(self.blocks, h, context or self.context_type(self.cfg, h), last_loop)

    def hidden(self, idx, context=None):
        return self.norm(self.loop_states(idx, context)[-1])

    def forward(self, idx, targets=None, cache=None, n_valid=None):
        """As in every model. In training with early_exit the loss is sum_i c_i loss_i over
        loops i = 1 .. n (Section 3.7): loss_i = CE_i, KL(p_n || p_i) or both, loss_n = CE_n.
        aux has "ce_loop1", ... too."""
        exits = self.training and self.cfg.early_exit != "none" and cache is None
        if not exits or targets is None or idx.numel() == 0:  # super refuses an empty idx
            return super().forward(idx, targets, cache, n_valid)
        *earlier, last = [upcast(self.head(self.norm(h))) for h in self.loop_states(idx)]
        *c_earlier, c_last = self.loop_weights()
        ce = cross_entropy(last, targets)
        loss, aux = c_last * ce, {"ce": ce.detach()}
        for i, (c, logits) in enumerate(zip(c_earlier, earlier), 1):
            ce_i = cross_entropy(logits, targets)
            aux[f"ce_loop{i}"] = ce_i.detach()
            if self.cfg.exit_loss != "kl":
                loss = loss + c * ce_i
            if self.cfg.exit_loss != "ce":
                loss = loss + c * kl_from_last(logits, last, targets)
        return last, loss, aux

    def loop_weights(self):
        """c_1 .. c_n. weighted: c_i = i / (1 + .. + n); aggressive: exit_weight, the last 1."""
        n = self.cfg.n_loop
        if self.cfg.early_exit == "weighted":
            return [i / (n * (n + 1) / 2) for i in range(1, n + 1)]
        return [self.cfg.exit_weight] * (n - 1) + [1.0]

    def init_cache(self, batch_size, max_len):
        """An empty cache for the unrolled layers up to exit_loop."""
        n_layer = self.loops_to_run * self.cfg.n_stored
        return KVCache(self.cfg, *self.cache_sizes(batch_size, max_len), n_layer)

    def flops_per_token(self):
        """As in model_gpt; with early_exit the head is applied after every loop."""
        more_heads = self.cfg.n_loop - 1 if self.cfg.early_exit != "none" else 0
        return super().flops_per_token() + 6.0 * more_heads * self.head.weight.numel()

    def block_weights(self):
        """W' (2 dimensions) counts once for each use; a and b (3) hold each use's own."""
        return sum(self.cfg.n_loop * p.numel() if p.dim() == 2 else p.numel()
                   for p in self.blocks.parameters() if p.dim() > 1)


def kl_from_last(logits, last, targets):
    """Mean KL(p_last || p) in nats over the targets that are not -1. p_last, of the last
    loop's logits (B, T, V), is a constant."""
    log_p_last, log_p = last.detach().log_softmax(-1), logits.log_softmax(-1)
    counted = targets != -1
    kl = (log_p_last.exp() * (log_p_last - log_p)).sum(-1)      # (B, T)
    return (kl * counted).sum() / counted.sum().clamp(min=1)

"""
Recursive and Relaxed Recursive Transformers: tied layers in loops, relaxed by low-rank deltas.

Only K of a Transformer's L layers are stored, and they run n_loop = L / K times in a row (the
Recursive Transformer). Each use of a stored matrix may add a low-rank delta (LoRA) of its own
(Relaxed). The stored layers and the deltas start from a trained Transformer of L layers, which
so becomes smaller at little loss. Each loop ends where the head can read it, so a token may
exit early (Section 3.7; serve.py decides).

    h_{l+1} = Block(h_l; stored block k = l mod K, use u = l // K)      l = 0 .. L - 1      (2)
    in it, every matrix:  y = W' x + B_u A_u x      W' is tied; A_u, B_u are of this use    (3)
    they start from a trained W_l:  B_u A_u = truncated SVD of W_l - W'                     (4)

    L = 4 layers are n_loop = 2 loops over K = 2 stored blocks:

    idx --E--> [block 0 + deltas 0] -> [block 1 + deltas 0] -> h of loop 1 --norm, head--> exit?
                 same weights            same weights              |
               [block 0 + deltas 1] <- - - - - - - - - - - - - - - +
                        |
                        +----> [block 1 + deltas 1] -> h of loop 2 --norm, head--> logits

rank = 0 has no deltas; at full rank they undo the tying. Each of the L layers has keys and
values of its own, so decoding needs no more than model_gpt's cache.

share=sequence: a block's uses follow each other (0 0 1 1 where cycle runs 0 1 0 1); then
k = l // n_loop, u = l mod n_loop. A loop is K layers in both.

Departures. (4) has norms folded in: a source's matrix stood after a norm with other weights
than the tied one, and the delta makes up for both (see relax). QK-norm has a weight for each
use, at rank 0 too, as no delta follows it. With init=stepwise the paper's Appendix C starts
the first loop's deltas at 0; here every layer follows (4), or full rank would not give the
source back. The public code scales deltas by alpha / rank, which would undo (4); they have no
factor here. Dropout is on embeddings, attention weights and residual branches.

Paper: Bae et al. 2024, "Relaxed Recursive Transformers: Effective Parameter Sharing with
Layer-wise LoRA" (2410.20672). Part of it is in github.com/raymin0223/mixture_of_recursions.

Shapes: B batch, T new tokens, C width, H query heads, G key/value heads, D head size, L
unrolled layers, K stored blocks, r rank, V vocabulary. Loops count from 1; l, k, u from 0.
"""
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F

import model_gpt
from model_gpt import (BaseConfig, Context, KVCache, LanguageModel, apply_rope, attend, choice,
                       cross_entropy, init_weights, mlp_width, upcast)


@dataclass
class Config(BaseConfig):
    n_loop: int = 2              # loops over the K = n_layer / n_loop stored blocks
    rank: int = 8                # rank of every matrix's deltas (0: none)
    share: str = choice("cycle", "sequence")    # the order of the blocks, see above
    init: str = choice("average", "stepwise", "lower", "upper", "random")  # init_from: blocks
    lora_init: str = choice("svd", "zero")      # init_from: deltas follow (4) | are 0
    early_exit: str = choice("none", "weighted", "aggressive")  # losses of earlier loops
    exit_weight: float = 0.1     # aggressive: weight of the earlier loops' losses
    exit_loss: str = choice("ce", "kl", "both")     # of earlier loops; kl: to the last loop
    exit_loop: int = 0           # evaluation and decoding stop after this loop (0: the last)
    fill: str = choice("exact", "propagate")    # serve.py: deeper keys after an early exit
    n_mlp: int = 0               # hidden width of the MLP (0: 8/3 n_embd, gelu: 4)
    mlp: str = choice("swiglu", "gelu")
    pos: str = choice("rope", "none")
    qk_norm: bool = False        # RMSNorm on each head's query and key; weights are not tied
    tie_embeddings: bool = True  # the head is the embedding matrix

    CONVERTS_FROM = ("gpt",)     # models whose weights init_from converts
    FINETUNE_OVERRIDES = ("early_exit", "exit_weight", "exit_loss", "exit_loop", "fill")

    def __post_init__(self):
        super().__post_init__()
        if self.n_loop < 1 or self.n_layer % self.n_loop:
            fit = [b for b in range(1, min(self.n_layer, 1000) + 1) if self.n_layer % b == 0]
            raise ValueError(f"n_loop={self.n_loop} must divide n_layer={self.n_layer}: "
                             f"{', '.join(map(str, fit))}")
        self.at_least(0, "rank", "exit_weight", "n_mlp")
        if not 0 <= self.exit_loop <= self.n_loop:
            raise ValueError(f"exit_loop={self.exit_loop} must be 0 (the last) or one of the "
                             f"{self.n_loop} loops")
        self.n_mlp = self.n_mlp or mlp_width(self)
        self.n_stored = self.n_layer // self.n_loop     # K

    def block_and_use(self, layer):
        """(k, u): unrolled layer `layer` is use u of stored block k."""
        if self.share == "sequence":
            return divmod(layer, self.n_loop)
        return layer % self.n_stored, layer // self.n_stored

    def tied(self, k):
        """The unrolled layers of stored block k, by use."""
        return [layer for layer in range(self.n_layer) if self.block_and_use(layer)[0] == k]


# ---- the method ----

class RelaxedLinear(nn.Module):
    """weight (out, in) is W'. a (n_loop, r, in) stacks every A_u, b (n_loop, r, out) every
    B_u^T, r = min(rank, in, out)."""

    def __init__(self, n_in, n_out, cfg):
        super().__init__()
        self.rank = min(cfg.rank, n_in, n_out)
        self.weight = nn.Parameter(torch.empty(n_out, n_in))
        if self.rank:           # B = 0: deltas start at nothing (Hu et al. 2022)
            self.a = nn.Parameter(0.02 * torch.randn(cfg.n_loop, self.rank, n_in))
            self.b = nn.Parameter(torch.zeros(cfg.n_loop, self.rank, n_out))

    def forward(self, x, u):
        """x (..., in) -> (..., out), as use u."""
        y = F.linear(x, self.weight)                    # W' x
        if self.rank:
            y = y + F.linear(x, self.a[u]) @ self.b[u]  # + B_u A_u x                       (3)
        return y


class HeadNorm(nn.Module):
    """QK-norm: RMSNorm of heads (B, heads, T, D) with a weight for each use."""

    def __init__(self, cfg):
        super().__init__()
        self.eps, weight = cfg.norm_eps, lambda: nn.Parameter(torch.ones(cfg.head_dim))
        self.weights = nn.ParameterList(weight() for _ in range(cfg.n_loop))

    def forward(self, x, u):
        return F.rms_norm(x, x.shape[-1:], eps=self.eps) * self.weights[u].to(x.dtype)


def relax_linears(module, cfg):
    """Every nn.Linear of a module becomes a RelaxedLinear."""
    relaxed = MergedLinear if cfg.fast else RelaxedLinear
    for name, part in list(module.named_children()):
        if isinstance(part, nn.Linear):
            setattr(module, name, relaxed(part.in_features, part.out_features, cfg))


class Attention(model_gpt.Attention):
    """model_gpt's, as use u."""

    def __init__(self, cfg):
        super().__init__(cfg)
        relax_linears(self, cfg)
        if cfg.qk_norm:
            self.q_norm, self.k_norm = HeadNorm(cfg), HeadNorm(cfg)

    def forward(self, x, layer, u, context):
        D = self.cfg.head_dim
        q = self.wq(x, u).unflatten(-1, (-1, D)).transpose(1, 2)    # (B, H, T, D)
        k = self.wk(x, u).unflatten(-1, (-1, D)).transpose(1, 2)    # (B, G, T, D)
        v = self.wv(x, u).unflatten(-1, (-1, D)).transpose(1, 2)    # (B, G, T, D)
        if self.cfg.qk_norm:
            q, k = self.q_norm(q, u), self.k_norm(k, u)
        if context.rope:
            q, k = apply_rope(q, *context.rope), apply_rope(k, *context.rope)
        k, v = context.extend(layer, k, v)                          # (B, G, S, D)
        dropout = self.cfg.dropout if self.training else 0.0
        y = attend(q, k, v, context.bias, self.cfg.fast, dropout)   # (B, H, T, D)
        return self.wo(y.transpose(1, 2).flatten(2), u)             # (B, T, C)


class MLP(model_gpt.MLP):
    """model_gpt's, as use u."""

    def __init__(self, cfg):
        super().__init__(cfg)
        relax_linears(self, cfg)

    def forward(self, x, u):
        up = self.w_up(x, u)
        return self.w_down(F.silu(self.w_gate(x, u)) * up if self.gated else F.gelu(up), u)


class Block(model_gpt.Block):
    """A stored block. Its norms and W' are tied, its deltas and QK-norms are not."""

    def __init__(self, cfg):
        super().__init__(cfg, Attention, MLP)
        self.cfg = cfg

    def forward(self, x, layer, context):
        _, u = self.cfg.block_and_use(layer)
        x = x + self.drop(self.attn(self.norm1(x), layer, u, context))  # (B, T, C)
        return x + self.drop(self.mlp(self.norm2(x), u))


def run_loops(cfg, blocks, x, context, n_loop):
    """x (B, T, C) -> the states after loops 1 .. n_loop, a list of (B, T, C)."""
    states = []
    for layer in range(n_loop * cfg.n_stored):
        k, _ = cfg.block_and_use(layer)
        x = blocks[k](x, layer, context)                # h_{layer + 1}                     (2)
        if (layer + 1) % cfg.n_stored == 0:
            states.append(x)
    return states


# ---- the fast path ----

class MergedLinear(RelaxedLinear):
    """The same sum as (W' + B A) x where that is cheaper: forming W' + B A takes r in out
    operations, A and B beside W' take r (in + out) for each token."""

    def forward(self, x, u):
        n_out, n_in = self.weight.shape
        if not self.rank or x.numel() // n_in * (n_in + n_out) <= n_in * n_out:
            return super().forward(x, u)
        return F.linear(x, torch.addmm(self.weight, self.b[u].t(), self.a[u]))


# ---- conversion of a trained Transformer (Sections 2.2 and 2.3) ----

@torch.no_grad()
def convert(model, weights):
    """Start model from `weights`, the state dict of a model_gpt of the same sizes: first
    the tied weights, then what each use has of its own. Raises ValueError where a tied
    norm's weight is too near zero for deltas to make up for it."""
    cfg, own = model.cfg, model.state_dict()
    sources = [{} for _ in range(cfg.n_layer)]          # each layer's weights
    for name, w in weights.items():
        if name.startswith("blocks."):
            _, layer, name = name.split(".", 2)
            sources[int(layer)][name] = w
        else:
            own[name].copy_(w)
    for k, block in enumerate(model.blocks):
        tie(block, [sources[layer] for layer in source_layers(cfg, k)])
        for norm in ("norm1", "norm2") if cfg.rank and cfg.lora_init == "svd" else ():
            if getattr(block, norm).weight.abs().min() < 1e-4:
                raise ValueError(f"{norm} of stored block {k} is near zero, its deltas would be "
                                 f"huge: another init may avoid it, rank=0 and lora_init=zero do")
        for u, layer in enumerate(cfg.tied(k)):
            relax(cfg, block, u, sources[layer])


def source_layers(cfg, k):
    """The source's layers whose mean stored block k starts from (none: it stays random).
    stepwise: K of them evenly spaced, first and last included, halves to even."""
    L, K = cfg.n_layer, cfg.n_stored
    return {"average": cfg.tied(k), "stepwise": [round(k * (L - 1) / max(1, K - 1))],
            "lower": [k], "upper": [L - K + k], "random": []}[cfg.init]


def tie(block, sources):
    """Set the tied weights of a block, norms included, to the mean of the sources'."""
    for name, p in block.named_parameters():
        if sources and name in sources[0]:              # deltas are not
            p.copy_(sum(source[name] for source in sources) / len(sources))


NORM_BEFORE = {"attn.wq": "norm1", "attn.wk": "norm1", "attn.wv": "norm1",
               "mlp.w_gate": "norm2", "mlp.w_up": "norm2"}


def relax(cfg, block, u, source):
    """Set what use u of a block has of its own, QK-norms and deltas, so that it comes near
    the layer with the weights `source`. A source's matrix stood after a norm of weight g_l,
    and stands after the tied norm g' now: W_l diag(g_l / g') does the same there."""
    for name, part in block.named_modules():
        if isinstance(part, HeadNorm):
            part.weights[u].copy_(source[f"{name}.weight"])
        if isinstance(part, RelaxedLinear) and part.rank and cfg.lora_init == "svd":
            wanted = upcast(source[f"{name}.weight"])   # (out, in)
            if name in NORM_BEFORE:
                norm = f"{NORM_BEFORE[name]}.weight"
                wanted = wanted * (upcast(source[norm]) / upcast(block.get_parameter(norm)))
            missing = wanted - upcast(part.weight)      # W_l diag(g_l / g') - W'           (4)
            # else A stays random and B zero, so that they can still learn
            if missing.norm() > rounding(cfg, source[f"{name}.weight"], part) * wanted.norm():
                part.a[u], part.b[u] = low_rank(missing, part.rank)


def low_rank(delta, r):
    """A (r, in) and B^T (r, out), of which B A is the best approximation of rank r to delta
    (out, in)."""
    U, S, Vh = torch.linalg.svd(delta, full_matrices=False)
    B = U[:, :r] * S[:r]
    return Vh[:r], B.t()


def rounding(cfg, w, part):
    """How large, relative to W_l, rounding alone may be: W' and g' are means of n_loop terms,
    each rounded by n_loop / 2 eps at most."""
    return 2 * cfg.n_loop * max(torch.finfo(x.dtype).eps for x in (w, part.weight))


# ---- the model ----

class Model(LanguageModel):
    """K stored blocks that run n_loop times."""
    runs_blocks_once = False

    def __init__(self, cfg):
        super().__init__(cfg, [Block(cfg) for _ in range(cfg.n_stored)])
        init_weights(self, cfg.n_layer)

    @property
    def n_loop(self):
        """Loops that a token takes in evaluation and decoding."""
        return self.cfg.exit_loop or self.cfg.n_loop

    def hidden(self, idx, cache=None, n_valid=None):
        """idx (B, T) -> the states after the final norm, (B, T, C)."""
        cfg, x = self.cfg, self.drop(self.wte(idx))
        context = Context(cfg, x, cache, n_valid)
        n_loop = cfg.n_loop if self.training and cache is None else self.n_loop
        x = run_loops(cfg, self.blocks, x, context, n_loop)[-1]
        if cache is not None:
            cache.advance(context.slots)
        return self.norm(x)

    def forward(self, idx, targets=None, cache=None, n_valid=None):
        """As in every model. In training with early_exit the loss is sum_b c_b loss_b over
        the loops (Section 3.7), and aux has "ce_loop1", ... too."""
        cfg = self.cfg
        if not self.training or cfg.early_exit == "none" or targets is None or cache is not None:
            return super().forward(idx, targets, cache, n_valid)
        x = self.drop(self.wte(idx))
        states = run_loops(cfg, self.blocks, x, Context(cfg, x), cfg.n_loop)
        *earlier, last = [upcast(self.head(self.norm(x))) for x in states]
        *c_earlier, c_last = self.loop_weights()
        ce = cross_entropy(last, targets)
        loss, aux = c_last * ce, {"ce": ce.detach()}
        for b, (c, logits) in enumerate(zip(c_earlier, earlier), 1):
            ce_b = cross_entropy(logits, targets)
            aux[f"ce_loop{b}"] = ce_b.detach()
            if cfg.exit_loss != "kl":
                loss = loss + c * ce_b
            if cfg.exit_loss != "ce":
                loss = loss + c * kl_from_last(logits, last, targets)
        return last, loss, aux

    def loop_weights(self):
        """c_b of the loops b = 1 .. n. weighted: b / (1 + .. + n); aggressive: exit_weight,
        the last 1."""
        n = self.cfg.n_loop
        if self.cfg.early_exit == "weighted":
            return [b / (n * (n + 1) / 2) for b in range(1, n + 1)]
        return [self.cfg.exit_weight] * (n - 1) + [1.0]

    def init_cache(self, batch_size, max_len):
        """An empty cache for the unrolled layers."""
        n_layer = self.n_loop * self.cfg.n_stored
        return KVCache(self.cfg, *self.cache_sizes(batch_size, max_len), n_layer)

    def flops_per_token(self):
        """Floating-point operations of one token's forward and backward pass in a sequence of
        block_size, counted as model_gpt does: W' in every loop, deltas as two products, the
        head where it is read."""
        cfg = self.cfg
        linears = [m for m in self.blocks.modules() if isinstance(m, RelaxedLinear)]
        weights = sum(cfg.n_loop * m.weight.numel() for m in linears)
        weights += sum(m.a.numel() + m.b.numel() for m in linears if m.rank)    # of all loops
        heads = cfg.n_loop if cfg.early_exit != "none" else 1
        weights += heads * cfg.vocab_size * cfg.n_embd
        return 6.0 * weights + 12.0 * cfg.n_layer * cfg.n_embd * (cfg.block_size + 1) / 2


def kl_from_last(logits, last, targets):
    """Mean KL(p_last || p) in nats over the targets that are not -1: p_last, of the last
    loop's logits (B, T, V), is a constant."""
    p, q = last.detach().log_softmax(-1), logits.log_softmax(-1)
    counted = targets != -1
    return ((p.exp() * (p - q)).sum(-1) * counted).sum() / counted.sum().clamp(min=1)

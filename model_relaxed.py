"""
Recursive and Relaxed Recursive Transformers: tied layers run in loops, relaxed by
low-rank deltas.

Only K of a Transformer's L layers are stored, and they run L / K times in a row (the
Recursive Transformer). Each use of a stored matrix may add a low-rank delta (LoRA) of
its own (Relaxed). The stored layers and the deltas start from a trained Transformer of
L layers, which so becomes smaller at little loss; and as each loop ends where the head
can read it, a token may exit early (serve.py decides, by the confidence after a loop).

    h_{l+1} = Block(h_l; stored block k = l mod K, use u = l // K)     l = 0 .. L - 1   (Eq. 2)
    in it, every matrix:   y = W' x + B_u A_u x     W' tied; A_u, B_u of this use       (Eq. 3)

    L = 4 layers in n_loop = 2 loops over K = 2 stored blocks:

    idx --E--> [block 0 + deltas 0] -> [block 1 + deltas 0] -> h of loop 1 --norm, head--> exit?
                 same weights            same weights              |
               [block 0 + deltas 1] <- - - - - - - - - - - - - - - +
                        |
                        +----> [block 1 + deltas 1] -> h of loop 2 --norm, head--> logits

rank = 0 has no deltas. At full rank they undo the tying. Each of the L layers has keys
and values of its own, so decoding needs no more than model_gpt's cache.

`fast=false` computes Eq. 3 as it stands. `fast=true` adds B_u A_u to W' before the
product where that is cheaper, which is where the tokens are many. For packed tokens of
several depths (serve.py) one product applies the A of all depths to all tokens, and a
mask keeps each token's own. Dropout is on embeddings, attention weights and residual
branches.

Departures. With stepwise initialisation the paper's Appendix C starts all deltas of the
first loop at zero; here every layer follows Eq. 4, or full rank would not give the
source back. The public code scales deltas by alpha / rank, which would undo the
reconstruction; here they are used as they are.

Paper: Bae et al. 2024, "Relaxed Recursive Transformers: Effective Parameter Sharing
with Layer-wise LoRA" (2410.20672); a re-implementation by the same group is
github.com/raymin0223/mixture_of_recursions.

Shapes: B batch, T tokens, N packed tokens, C width, H query heads, G key/value heads, D
head size, L unrolled layers, K stored blocks, r rank. depth: which loop a token takes,
from 0.
"""
import math
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F

import model_gpt
from model_gpt import (BaseConfig, Context, KVCache, LanguageModel, choice, init_weights,
                       mlp_width, upcast)


@dataclass
class Config(BaseConfig):
    n_loop: int = 2              # loops over the K = n_layer / n_loop stored blocks
    rank: int = 8                # rank of every matrix's deltas (0: none)
    share: str = choice("cycle", "sequence")    # layer l uses block l mod K | l // n_loop
    init: str = choice("average", "stepwise", "lower", "upper", "random")   # init_from: blocks
    lora_init: str = choice("svd", "zero")      # init_from: deltas make up for tying | are 0
    early_exit: str = choice("none", "weighted", "aggressive")  # earlier loops have losses too
    exit_weight: float = 0.1     # aggressive: weight of the earlier loops' losses
    exit_loss: str = choice("ce", "kl", "both")     # of earlier loops; kl: to the last loop
    exit_loop: int = 0           # evaluation and decoding stop after this loop (0: the last)
    fill: str = choice("exact", "propagate")    # serve.py: how an early exit gets deeper keys
    n_mlp: int = 0               # hidden width of the MLP (0: 8/3 n_embd for swiglu, 4 for gelu)
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

    @property
    def n_stored(self):
        """K: blocks whose weights exist."""
        return self.n_layer // self.n_loop

    def block_and_use(self, layer):
        """(k, u): unrolled layer `layer` is use u, from 0, of stored block k."""
        if self.share == "sequence":
            return divmod(layer, self.n_loop)
        return layer % self.n_stored, layer // self.n_stored

    def tied(self, k):
        """The unrolled layers of stored block k, by use."""
        return [layer for layer in range(self.n_layer) if self.block_and_use(layer)[0] == k]


# ---- the method: a block that knows which use of it this is ----

class RelaxedLinear(nn.Module):
    """y = W' x + B_u A_u x (Eq. 3). weight (out, in) is W'; a (n_loop, r, in) stacks
    A_u, and b (n_loop, r, out) stacks B_u^T, r = min(rank, in, out)."""

    def __init__(self, n_in, n_out, cfg):
        super().__init__()
        self.fast, self.rank = cfg.fast, min(cfg.rank, n_in, n_out)
        self.weight = nn.Parameter(torch.empty(n_out, n_in))
        if self.rank:           # B = 0: deltas start at nothing (Hu et al. 2022)
            self.a = nn.Parameter(0.02 * torch.randn(cfg.n_loop, self.rank, n_in))
            self.b = nn.Parameter(torch.zeros(cfg.n_loop, self.rank, n_out))

    def forward(self, x, use):
        """x (..., in) -> (..., out). use: u; or, for packed tokens (1, N, in) of
        several depths, (N, n_loop, 1) with a 1 at each token's u."""
        if not self.rank:
            return F.linear(x, self.weight)
        if not self.fast:
            return self.naive(x, use)
        return self.one_use(x, use) if isinstance(use, int) else self.mixed_uses(x, use)

    def naive(self, x, use):
        if isinstance(use, int):
            return F.linear(x, self.weight) + F.linear(x, self.a[use]) @ self.b[use]
        return torch.stack([self.naive(x[:, n], u)                      # token by token
                            for n, u in enumerate(use[..., 0].argmax(1).tolist())], 1)

    # The fast path: the same sum. Forming W' + B A costs r in out, applying A and B to N tokens
    # costs N r (in + out); the cheaper of the two is taken.

    def one_use(self, x, u):
        (n_out, n_in), a, b = self.weight.shape, self.a[u], self.b[u]
        if x.numel() // n_in * (n_in + n_out) > n_in * n_out:
            return F.linear(x, self.merged(u))
        y, low = F.linear(x, self.weight), F.linear(x, a)               # (..., out), (..., r)
        return torch.addmm(y.flatten(0, -2), low.flatten(0, -2), b).view(y.shape)

    def merged(self, u):
        """W' + B_u A_u, (out, in)."""
        return torch.addmm(self.weight, self.b[u].t(), self.a[u]) if self.rank else self.weight

    def mixed_uses(self, x, use):
        x = x[0]                                                        # (N, in)
        low = F.linear(x, self.a.flatten(0, 1))                         # (N, n_loop r): every A
        own = low.view(len(x), -1, self.rank) * use                     # (N, n_loop, r): its own
        return torch.addmm(F.linear(x, self.weight), own.flatten(1), self.b.flatten(0, 1))[None]


class HeadNorm(nn.Module):
    """RMSNorm of heads (B, heads, T, D) with a weight of its own for each use: no delta
    follows that could make up for a tied one. Without qk_norm it does nothing. use: as in
    RelaxedLinear.forward."""

    def __init__(self, cfg):
        super().__init__()
        self.eps, n = cfg.norm_eps, cfg.n_loop if cfg.qk_norm else 0
        self.weights = nn.ParameterList(torch.ones(cfg.head_dim) for _ in range(n))

    def forward(self, x, use):
        if not len(self.weights):
            return x
        if isinstance(use, int):
            return self.normed(x, self.weights[use])                    # (D,)
        return self.normed(x, use[..., 0] @ torch.stack([*self.weights]))       # (N, D)

    def normed(self, x, weight):
        return F.rms_norm(x, x.shape[-1:], eps=self.eps) * weight.to(x.dtype)


def relax_linears(module, cfg):
    """Replace a module's linear layers by RelaxedLinears."""
    for name, part in list(module.named_children()):
        if isinstance(part, nn.Linear):
            setattr(module, name, RelaxedLinear(part.in_features, part.out_features, cfg))


class Attention(model_gpt.Attention):
    """model_gpt's Attention, but for `use`."""

    def __init__(self, cfg):
        super().__init__(cfg)
        relax_linears(self, cfg)
        self.q_norm, self.k_norm = HeadNorm(cfg), HeadNorm(cfg)

    def forward(self, x, layer, use, context):
        q = self.q_norm(self.heads(self.wq(x, use)), use)               # (B, H, T, D)
        k = self.k_norm(self.heads(self.wk(x, use)), use)               # (B, G, T, D)
        v = self.heads(self.wv(x, use))                                 # (B, G, T, D)
        y = context.attend(layer, q, k, v)                              # (B, H, T, D)
        return self.wo(y.transpose(1, 2).flatten(2), use)               # (B, T, C)


class MLP(model_gpt.MLP):
    """model_gpt's MLP, but for `use`."""

    def __init__(self, cfg):
        super().__init__(cfg)
        relax_linears(self, cfg)

    def forward(self, x, use):
        up = self.w_up(x, use)
        return self.w_down(F.silu(self.w_gate(x, use)) * up if self.gated else F.gelu(up), use)


class Block(model_gpt.Block):
    """A stored block. Its norms and W' are tied, its deltas and head norms are not."""

    def __init__(self, cfg):
        super().__init__(cfg, Attention, MLP)

    def forward(self, x, layer, use, context):
        x = x + self.drop(self.attn(self.norm1(x), layer, use, context))
        return x + self.drop(self.mlp(self.norm2(x), use))


# ---- conversion of a trained Transformer (Sections 2.2 and 2.3) ----

NORM_BEFORE = {"attn.wq": "norm1", "attn.wk": "norm1", "attn.wv": "norm1",
               "mlp.w_gate": "norm2", "mlp.w_up": "norm2"}


@torch.no_grad()
def convert(model, weights):
    """Start model from `weights`, the state dict of a model_gpt of the same sizes: first
    the tied weights, then the deltas of each use. Raises ValueError where a tied norm's
    weight is too near zero for deltas to make up for it."""
    cfg, own = model.cfg, model.state_dict()
    sources = [{} for _ in range(cfg.n_layer)]                  # each layer's weights
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
        for use, layer in enumerate(cfg.tied(k)):
            relax(cfg, block, use, sources[layer])


def source_layers(cfg, k):
    """The source's layers whose mean stored block k starts from (none: it stays
    random). stepwise: K of them evenly spaced, first and last included, halves to
    even."""
    L, K = cfg.n_layer, cfg.n_stored
    return {"average": cfg.tied(k), "stepwise": [round(k * (L - 1) / max(1, K - 1))],
            "lower": [k], "upper": [L - K + k], "random": []}[cfg.init]


def tie(block, sources):
    """Set the tied weights of a block, norms included, to the mean of the sources'."""
    for name, p in block.named_parameters():
        if sources and name in sources[0]:                      # there are no deltas
            p.copy_(sum(source[name] for source in sources) / len(sources))


def relax(cfg, block, use, source):
    """Set what is a use's own: head norms, and deltas that make up for tying the layer
    with the weights `source`.

    A source's matrix after a norm of weight g_l stands after the tied norm g' now, so
    what it should be is W_l diag(g_l / g'). The best delta of rank r is the truncated
    SVD of what is missing, U S V^T = W_l diag(g_l / g') - W':  B = U_r S_r, A = V_r^T
    (Eq. 4)."""
    for name, part in block.named_modules():
        if isinstance(part, HeadNorm) and cfg.qk_norm:
            part.weights[use].copy_(source[f"{name}.weight"])
        if not isinstance(part, RelaxedLinear) or not part.rank or cfg.lora_init == "zero":
            continue
        w = source[f"{name}.weight"]
        target = upcast(w)                                              # (out, in)
        if name in NORM_BEFORE:
            norm = NORM_BEFORE[name]
            tied = upcast(getattr(block, norm).weight)                  # g'
            target = target * (upcast(source[f"{norm}.weight"]) / tied)
        missing = target - upcast(part.weight)
        # W' and g' are means of n_loop terms, each rounded by n_loop / 2 eps at most. What is not
        # more than that is rounding: then A stays random and B zero, so that they can still learn
        eps = max(torch.finfo(x.dtype).eps for x in (w, part.weight))
        if missing.norm() > 2 * cfg.n_loop * eps * target.norm():
            u, s, vh = torch.linalg.svd(missing, full_matrices=False)
            part.b[use] = (u[:, :part.rank] * s[:part.rank]).t()
            part.a[use] = vh[:part.rank]


# ---- the model ----

def kl_from_last(logits, last, targets):
    """Mean KL(p_last || p) in nats over the targets that are not -1: p_last, of the
    last loop's logits (B, T, V), is a constant."""
    p, q = last.detach().log_softmax(-1), logits.log_softmax(-1)
    counted = targets != -1
    return ((p.exp() * (p - q)).sum(-1) * counted).sum() / counted.sum().clamp(min=1)


class Model(LanguageModel):
    """K stored blocks run n_loop times; see the hooks at its end for early exit in serve.py."""
    runs_blocks_once = False

    def __init__(self, cfg):
        super().__init__(cfg, [Block(cfg) for _ in range(cfg.n_stored)])
        init_weights(self, cfg.n_layer)
        if cfg.early_exit != "none" and cfg.exit_loss != "ce":
            self.max_logits = math.inf          # KL reads all of them

    @property
    def n_loop(self):
        """Loops that a token takes in evaluation and decoding."""
        return self.cfg.exit_loop or self.cfg.n_loop

    def hidden(self, idx, cache=None, n_valid=None):
        """idx (B, T) -> the states (B, T, C) after the final norm, a list: of the last
        loop, and in training with early_exit of every loop."""
        cfg = self.cfg
        training = self.training and cache is None
        x, states = self.drop(self.wte(idx)), []
        context = Context(cfg, x, cache, n_valid, self.training)
        for layer in range((cfg.n_loop if training else self.n_loop) * cfg.n_stored):
            k, use = cfg.block_and_use(layer)
            x = self.blocks[k](x, layer, use, context)
            if (layer + 1) % cfg.n_stored == 0:                         # the end of a loop
                states.append(x)
        if cache is not None:
            cache.advance()
        if not training or cfg.early_exit == "none":
            states = states[-1:]
        return [self.norm(x) for x in states]

    def predict(self, states, targets):
        """As in all models, from the last state. With early_exit the loss of training
        is sum_b c_b loss_b over the loops (Section 3.7), and aux has "ce_loop1", ...
        too."""
        *earlier, last = states
        logits, loss, aux = super().predict(last, targets)
        if targets is None or not earlier:
            return logits, loss, aux
        *c_earlier, c_last = self.loop_weights()
        loss = c_last * loss
        for b, (c, h) in enumerate(zip(c_earlier, earlier), 1):
            logits_b, ce, _ = super().predict(h, targets)
            aux[f"ce_loop{b}"] = ce.detach()
            if self.cfg.exit_loss != "kl":
                loss = loss + c * ce
            if self.cfg.exit_loss != "ce":
                loss = loss + c * kl_from_last(logits_b, logits, targets)
        return logits, loss, aux

    def loop_weights(self):
        """c_b of the loops b = 1 .. n. weighted: b / (1 + .. + n); aggressive:
        exit_weight, the last 1."""
        n = self.cfg.n_loop
        if self.cfg.early_exit == "weighted":
            return [b / (n * (n + 1) / 2) for b in range(1, n + 1)]
        return [self.cfg.exit_weight] * (n - 1) + [1.0]

    def cache_type(self, *sizes):
        """A cache for the unrolled layers."""
        return KVCache(*sizes, self.n_loop * self.cfg.n_stored)

    def flops_per_token(self):
        """Floating-point operations of one token's forward and backward pass in a
        sequence of block_size, counted as model_gpt does: W' in every loop, deltas as
        two products, the head where it is read."""
        cfg = self.cfg
        linears = [m for m in self.blocks.modules() if isinstance(m, RelaxedLinear)]
        weights = sum(cfg.n_loop * m.weight.numel() for m in linears)
        weights += sum(m.a.numel() + m.b.numel() for m in linears if m.rank)    # of all loops
        heads = cfg.n_loop if cfg.early_exit != "none" else 1
        weights += heads * cfg.vocab_size * cfg.n_embd
        return 6.0 * weights + 12.0 * cfg.n_layer * cfg.n_embd * (cfg.block_size + 1) / 2

    # What serve.py calls for packed tokens (N,), each at its own depth (N,), on the CPU. Since all
    # loops use the same blocks, they go through one call. The context knows each token's keys;
    # `layer` counts inside a loop.

    def embed(self, idx, context):
        """idx (N,) -> states before the first loop (N, C)."""
        return self.wte(idx)

    def loop(self, h, depth, context):
        """States h (N, C) -> states one loop further."""
        cfg, first = self.cfg, int(depth[0])
        alike = bool((depth == first).all())
        if not alike and cfg.share == "sequence":
            raise ValueError("share=sequence: tokens of several depths need share=cycle")
        h = h[None]                                                     # (1, N, C)
        if not alike:
            use = F.one_hot(depth, cfg.n_loop).to(h)[..., None]         # (N, n_loop, 1)
        for layer, (k, u) in enumerate(self.loop_layers(first)):
            h = self.blocks[k](h, layer, u if alike else use, context)
        return h[0]

    def loop_layers(self, depth):
        """(k, u) of the layers of a loop."""
        K = self.cfg.n_stored
        return [self.cfg.block_and_use(layer) for layer in range(depth * K, depth * K + K)]

    def projection(self, depth):
        """What gives a loop's keys and values of a state: the (W' + B A) diag(g) of wk and wv of
        each layer, (2 K G D, C), and the weights of its keys' norm (K, 1, 1, D). One product and
        one norm, as all layers read the same state."""
        parts = [(self.blocks[k], u) for k, u in self.loop_layers(depth)]
        weights = torch.cat([w.merged(u) * block.norm1.weight for block, u in parts
                             for w in (block.attn.wk, block.attn.wv)])
        norms = [block.attn.k_norm.weights[u] for block, u in parts] if self.cfg.qk_norm else []
        return weights, torch.stack(norms)[:, None, None] if norms else None

    def propagate(self, h, projection, context):
        """Give a loop keys and values of tokens that exited before it, projected from
        the states h (N, C) they exited with (fill=propagate)."""
        cfg, (weights, norms) = self.cfg, projection
        kv = F.linear(F.rms_norm(h, h.shape[-1:], eps=cfg.norm_eps), weights)
        kv = kv.view(-1, cfg.n_stored, 2, cfg.n_kv_head, cfg.head_dim)
        k, v = kv.permute(2, 1, 3, 0, 4)                                # (K, G, N, D) both
        if norms is not None:
            k = self.blocks[0].attn.k_norm.normed(k, norms)
        context.write(k, v)

    def finish(self, h, context):
        """States after any loop -> what logits() reads."""
        return self.norm(h)

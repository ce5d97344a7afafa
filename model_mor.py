"""
Mixture-of-Recursions (MoR): tied layers in loops; each token takes as many as it needs.

R = n_loop recursions F_1 .. F_R share K blocks; each is K layers, residual streams included:
F_r(h) = h + .... A router, linear in a token's state h, sends easy tokens through few and hard
ones through many. share=middle_*: a first and a last layer stand outside, for all tokens.

router=expert (Section 2.2.1): recursion r chooses its tokens A_r among A_{r-1} by a
score s = w_r . h, in each sequence. A_0 = A_1 = all tokens.
    A_r = the k_r of A_{r-1} with the highest s,   k_r = max(1, floor(T (R-r+1) / R))
    h[A_r] <- h[A_r] + alpha sigmoid(s) F_r(h[A_r])     (2.1)

router=token: each token chooses its depth i once, from its state h_1 before F_1.
    p = softmax(W h_1),   i = argmax p
    h <- h_1 + p_i F_i(.. F_1(h_1))                     (2.2)
The loss balance_weight R sum_i f_i mean(p_i) keeps depths in balance; f_i: the fraction
of tokens with depth i. loss_free: a bias b in argmax(p + b) moves against f. With
router_func=sigmoid p is alpha sigmoid(W h_1), here and in the loss.

    first -> F_1 (all) -> F_2 (2/3) -> F_3 (1/3) -> last
      a         a            a            a           a
      b         b            b            .           b
      c         c            .            .           c
R = 3: token c takes one recursion, b two and a three.

Decoding. Top k depends on later tokens, so expert choice decodes by s >= 0. The loss
aux_weight BCE(s, was it chosen) teaches that to s or, with causal=aux_router, to a
second router on detached states. In eval mode "ce" is of decoding, "ce_topk" of top k.

Keys and values (Section 2.2.2). Chosen tokens keep their positions. kv=recursion: they
attend to those that take the same recursion. share: to all, by their keys in F_1.

Departures. Token choice gates once, and its z-loss weighs 1e-5, as in the authors' code
(paper: at every step, 1e-3). Before commit 82c97f2 that code did not tie attention in
expert choice; all is tied here. Weights start as model_gpt's. Left out: random routers (Table 10), and shared
keys in which the chosen's are replaced by new ones (Table 12).

Shapes: B batch, T new tokens, S keys, C width, G key/value heads, D head size, n chosen
tokens of the fullest row. Recursions count from 1, layers and stored blocks from 0.

Paper: Bae et al. 2025 (2507.10524); github.com/raymin0223/mixture_of_recursions.
"""
import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F

from model_gpt import (Attention, BaseConfig, Block, Context, KVCache, LanguageModel,
                       apply_rope, attend, attention_bias, choice, cross_entropy, init_weights,
                       mlp_width, upcast)


@dataclass
class Config(BaseConfig):
    n_layer: int = 8             # unrolled layers, first and last too
    n_loop: int = 3              # R: recursions
    share: str = choice("middle_cycle", "cycle", "sequence", "middle_sequence")
    router: str = choice("expert", "token", "none")  # none: all take all, the baseline
    kv: str = choice("recursion", "share")  # keys of a recursion
    router_arch: str = choice("linear", "mlp", "wide_mlp")
    router_func: str = ""        # expert: sigmoid, tanh; token: softmax, sigmoid ("": first)
    alpha: float = 0.1           # factor of the gate, not of softmax
    causal: str = choice("aux_loss", "aux_router")  # expert: what decides in decoding
    aux_weight: float = 0.001    # expert: weight of learning that
    capacity_warmup: int = 0     # expert: steps in which capacities fall (0: none)
    balance: str = choice("loss", "loss_free", "none")  # token: what balances depths
    balance_weight: float = 0.1  # token: weight of that loss
    balance_rate: float = 0.001  # token: a step of loss_free's biases
    z_loss: float = -1.0         # weight of logsumexp(s)^2 (-1: token 1e-5, expert 0)
    exit_loop: int = 0           # in eval mode the most recursions (0: n_loop)
    init: str = choice("average", "stepwise", "lower", "upper", "random")  # see convert
    n_mlp: int = 0               # hidden width of the MLP (0: 8/3 n_embd, gelu: 4)
    mlp: str = choice("swiglu", "gelu", "geglu")
    pos: str = choice("rope", "none")
    qk_norm: bool = False        # RMSNorm on each head's query and key, before RoPE
    tie_embeddings: bool = True  # the head is the embedding matrix
    scale_embeddings: bool = False  # embeddings times sqrt(n_embd), as in Gemma

    CONVERTS_FROM = ("gpt",)
    FINETUNE_OVERRIDES = ("exit_loop", "aux_weight", "capacity_warmup",
                          "balance_weight", "balance_rate", "z_loss")

    def __post_init__(self):
        super().__post_init__()
        token, R = self.router == "token", self.n_loop
        functions = ("softmax", "sigmoid") if token else ("sigmoid", "tanh")
        func = self.router_func = self.router_func or functions[0]
        if func not in functions:
            raise ValueError(f"router_func={func} must be one of: {', '.join(functions)}")
        if self.z_loss == -1:
            self.z_loss = 1e-5 if token else 0.0
        self.at_least(0, "n_mlp", "aux_weight", "capacity_warmup", "balance_weight",
                      "balance_rate", "z_loss", "exit_loop")
        self.at_least(1, "n_loop")
        if self.exit_loop > R:
            raise ValueError(f"exit_loop={self.exit_loop} is more than n_loop={R}")
        self.n_outside = 2 if self.share.startswith("middle") else 0  # first and last layer
        self.n_stored, left = divmod(self.n_layer - self.n_outside, R)  # K
        if self.n_stored < 1 or left:
            fits = max(1, self.n_stored) * R + self.n_outside
            raise ValueError(f"n_layer={self.n_layer} does not fit share={self.share} "
                             f"with n_loop={R}: {fits} or {fits + R} would")
        if self.kv != "recursion" and self.share.endswith("sequence"):
            raise ValueError(f"kv={self.kv} needs recursions over the same layers: "
                             f"share=cycle or middle_cycle, not {self.share}")
        self.n_mlp = self.n_mlp or mlp_width(self)

    def capacity(self, r, step=math.inf):
        """The fraction of all tokens that take recursion r at a training step (token
        choice: if depths are in balance)."""
        R, kept = self.n_loop, float(self.router == "none")  # kept of those that would drop
        if self.router == "expert" and step < self.capacity_warmup:
            kept = 0.5 * (1 + math.cos(math.pi * step / self.capacity_warmup))
        return (R - r + 1 + (r - 1) * kept) / R

    def sizes(self, T, step=math.inf):
        """k_1 .. k_R: how many of T tokens that is; 1e-9 is for rounding."""
        return [max(1, int(T * self.capacity(r, step) + 1e-9))
                for r in range(1, self.n_loop + 1)]


# ---- routers, and what they decided ----

class Router(nn.Module):
    """Scores (..., n_out) of states h (..., C)."""

    def __init__(self, cfg, n_out):
        super().__init__()
        C, linear = cfg.n_embd, lambda n, m: nn.Linear(n, m, bias=False)
        if cfg.router_arch == "linear":
            self.layers = linear(C, n_out)
        else:
            hidden = 2 * C if cfg.router_arch == "mlp" else 4 * C
            self.layers = nn.Sequential(linear(C, hidden), nn.GELU(), linear(hidden, n_out))

    def forward(self, h):
        # not in 16 bits: rounding could change decisions
        with torch.autocast(h.device.type, enabled=False):
            return upcast(self.layers(h))


class Choice(NamedTuple):
    """What one recursion of expert choice did, (B, T) each."""
    s: torch.Tensor
    decides: torch.Tensor  # the scores that decide in decoding
    active: torch.Tensor  # who competed, A_{r-1}
    chosen: torch.Tensor  # A_r


# ---- what a recursion works on: all tokens, or the chosen ones ----

# A block is called with the number of an unrolled layer. Recursion r has the layers
# (r-1) K .. r K - 1, with K = 2: F_1 0 1, F_2 2 3, F_3 4 5; so layer % K is the same layer
# of F_1. The first and the last layer outside are -2 and -1: the last two of a cache.

class Subset:
    """The context of a recursion r > 1, for the chosen (B, T) of all tokens. This slow path
    runs all tokens and keeps the results of the chosen. n is for Gathered: how many tokens
    the fullest row has (None: not known)."""

    def __init__(self, tokens, r, chosen, n=None):
        self.cfg, self.tokens, self.chosen = tokens.cfg, tokens, chosen
        self.rope, self.bias = tokens.rope, tokens.bias
        if self.cfg.kv == "recursion":
            every = chosen.new_ones(chosen.size(1), chosen.size(1))
            itself = every.tril().triu()  # lest a softmax is empty
            visible = every.tril() & chosen[:, None, None] | itself
            self.bias = torch.where(visible, 0.0, -math.inf)  # (B, 1, T, T)

    def gather(self, x):
        """x (B, T, ...) of all tokens -> (B, n, ...) of the chosen ones."""
        return x

    def scatter(self, x, new):
        """x (B, T, ...) with new (B, n, ...) for the chosen tokens."""
        chosen = self.chosen.view(*self.chosen.shape, *[1] * (x.dim() - 2))
        return torch.where(chosen, new, x)

    def extend(self, layer, k, v):
        """The keys and values (B, G, S, D) that the chosen attend to (Section 2.2.2)."""
        if self.cfg.kv == "recursion":
            return k, v
        return self.tokens.kv[layer % self.cfg.n_stored]  # share: F_1's


class AllTokens(Context):
    """The context of all tokens: that of the first and last layers and of recursion 1.
    chosen (B, T): which are no padding. kv[layer]: the keys and values attended to."""
    gather, scatter = Subset.gather, Subset.scatter

    def __init__(self, cfg, x, cache=None, n_valid=None):
        super().__init__(cfg, x, cache, n_valid)
        (B, T), self.cfg, self.kv = x.shape[:2], cfg, {}
        n_real = self.slots.n_new[:, None] if cache else T
        self.chosen = torch.arange(T, device=x.device).expand(B, T) < n_real
        # the context of later recursions (None: this one)
        if cfg.router == "none":  # all tokens again, with the keys of F_1 or new ones
            self.subset_type = Subset if cfg.kv == "share" else None
        elif cache:  # decoding gathers, fast or not
            self.subset_type = OwnCache if cfg.kv == "recursion" else Gathered
        else:
            self.subset_type = Gathered if cfg.fast else Subset

    def extend(self, layer, k, v):
        if self.cache:
            k, v = self.cache.write(layer, k, v, self.slots)
        self.kv[layer] = k, v
        return k, v


# ---- the method: which tokens take which recursion ----

class Recursions(LanguageModel):
    """The method. Model, below, adds the parts: routers (and aux_routers), or router and
    balance_bias; gate; layers_of."""

    def expert_choice(self, h, tokens, R, k=None):
        """h (B, T, C) -> h after R recursions, and a Choice of each. Recursion r takes the
        k_r = k[r - 1] best tokens of a sequence or, without k, those that decide >= 0."""
        cfg, active, routing = self.cfg, tokens.chosen, []  # A_0
        for r in range(1, R + 1):
            s = decides = self.routers[r - 1](h)[..., 0]  # w_r . h, (B, T)
            if cfg.causal == "aux_router":
                decides = self.aux_routers[r - 1](h.detach())[..., 0]
            if r == 1:
                chosen = active  # A_1
            elif k:
                top = s.masked_fill(~active, -math.inf).topk(k[r - 1], 1).indices
                chosen = torch.zeros_like(active).scatter(1, top, True)  # A_r
            else:
                chosen = active & (decides >= 0)
            if tokens.cache and not chosen.any():
                break  # no token goes on
            gate = self.gate(s)[..., None]  # alpha sigmoid(s)
            h = self.recursion(r, h, tokens, chosen, gate, k[r - 1] if k else None)  # (2.1)
            routing.append(Choice(s, decides, active, chosen))
            active = chosen
        return h, routing

    def expert_loss(self, routing):
        """What is added to the loss, and the BCE in it: sums over the recursions (the first,
        which takes all, too) of means over the tokens that competed."""
        bce = z = 0.0
        for s, decides, active, chosen in routing:
            each = F.binary_cross_entropy_with_logits(decides, chosen.to(s), reduction="none")
            bce = bce + (active * each).sum() / active.sum()
            z = z + (active * s ** 2).sum() / active.sum()  # of one score, logsumexp(s) = s
        return self.cfg.aux_weight * bce + self.cfg.z_loss * z, bce

    def token_choice(self, h1, tokens, R):
        """h_1 (B, T, C) -> h after each token's recursions, and (scores, p, depths)."""
        h, (scores, p, depth) = h1, self.choose_depth(h1)
        for r in range(1, R + 1):
            chosen = tokens.chosen & (depth >= r)
            if tokens.cache and not chosen.any():
                break  # no token goes on
            h = self.recursion(r, h, tokens, chosen)
        return self.exit(h1, h, p, depth), (scores, p, depth)

    def choose_depth(self, h1):
        """h_1 (..., C) -> scores and p (..., R), depths 1 .. R (...)."""
        scores = self.router(h1)
        p = self.gate(scores)
        depth = 1 + (p + self.balance_bias).argmax(-1)  # i
        return scores, p, depth if self.training else depth.clamp(max=self.loops_to_run)

    def exit(self, h1, h, p, depth):
        return h1 + (p.gather(-1, depth[..., None] - 1) * h).to(h1.dtype)  # (2.2)

    def token_loss(self, scores, p, depth):
        """What is added to the loss, and the balance loss in it."""
        cfg, R = self.cfg, self.cfg.n_loop
        f = [(depth == i).to(p.dtype).mean() for i in range(1, R + 1)]
        balance = R * sum(f_i * p_i.mean() for f_i, p_i in zip(f, p.unbind(-1)))
        weight = cfg.balance_weight if cfg.balance == "loss" else 0.0
        z = scores.logsumexp(-1).square().mean()
        return weight * balance + cfg.z_loss * z, balance

    def recursion(self, r, h, tokens, chosen, gate=None, n=None):
        """h (B, T, C) with F_r(h) or, with a gate (B, T, 1), h + gate F_r(h), of the chosen."""
        subset = tokens
        if r > 1 and tokens.subset_type:
            subset = tokens.subset_type(tokens, r, chosen, n)
        x = y = subset.gather(h)  # h[A_r]
        for layer, block in enumerate(self.layers_of[r - 1], (r - 1) * self.cfg.n_stored):
            y = block(y, layer, subset)  # F_r(h[A_r])
        if gate is not None:
            y = x + (subset.gather(gate) * y).to(h.dtype)
        return subset.scatter(h, y)


# ---- the fast path ----

class Gathered(Subset):
    """The chosen run alone, packed to the left; the rest of a row is padding. Equal, as
    Subset drops what is not computed here. Two rows, x the chosen, n = 3 of the fullest:

        tokens  0 1 2 3    chosen  . x . x    index  1 3 8
                4 5 6 7            x x x .           4 5 6

    index (B, n) counts all B T = 8 tokens, and 8 is padding: gather reads some token for it,
    scatter writes it to a spare row that is cut off. Under torch.compile n = T where it is
    not known, so that token choice saves nothing."""

    def __init__(self, tokens, r, chosen, n=None):
        self.cfg, self.tokens = tokens.cfg, tokens
        (B, T), device = chosen.shape, chosen.device
        if n is None:  # under torch.compile no shape may depend on data
            n = T if torch.compiler.is_compiling() else max(1, int(chosen.sum(1).max()))
        column = torch.where(chosen, torch.arange(T, device=device), T)
        column = column.topk(n, 1, largest=False).values  # (B, n), ascending; T is padding
        row = torch.arange(B, device=device)[:, None]
        self.index = torch.where(column < T, T * row + column, B * T)
        self.rope = tokens.rope and [self.gather(x[:, 0].expand(B, T, -1))[:, None]
                                     for x in tokens.rope]  # (B, 1, n, D / 2)
        self.bias = None  # kv=recursion: causal, which hides the padding behind, too
        if self.cfg.kv != "recursion":
            self.pos = self.gather(tokens.pos.expand(B, T))
            n_keys = tokens.slots.end if tokens.cache else T
            self.bias = attention_bias(self.pos, torch.arange(n_keys, device=device))

    def gather(self, x):
        x = x.flatten(0, 1)
        chosen = x.index_select(0, self.index.flatten().clamp(max=len(x) - 1))
        return chosen.view(*self.index.shape, *x.shape[1:])

    def scatter(self, x, new):
        flat = torch.cat([x.flatten(0, 1), torch.zeros_like(x[:1, 0])])  # the spare row
        flat = flat.index_copy(0, self.index.flatten(), new.flatten(0, 1))
        return flat[:-1].view(x.shape)


class QueryAttention(Attention):
    """kv=share: after recursion 1 no keys and values are made, as extend drops them."""

    def forward(self, x, layer, context):
        if not isinstance(context, Subset):
            return super().forward(x, layer, context)
        q = self.wq(x).unflatten(-1, (-1, self.cfg.head_dim)).transpose(1, 2)
        q = self.q_norm(q)  # (B, H, n, D)
        if context.rope:
            q = apply_rope(q, *context.rope)
        k, v = context.extend(layer, None, None)  # F_1's
        dropout = self.cfg.dropout if self.training else 0.0
        y = attend(q, k, v, context.bias, self.cfg.fast, dropout)
        return self.wo(y.transpose(1, 2).flatten(2))  # (B, n, C)


# ---- decoding (with kv=share the chosen have no keys to be cached: Gathered does) ----

class OwnCache(Gathered):
    """kv=recursion: the keys and values of the chosen go to a cache of the recursion, slot
    after slot without gaps."""

    def __init__(self, tokens, r, chosen, n=None):
        super().__init__(tokens, r, chosen, n)
        self.cache = tokens.cache.later[r - 2]
        self.slots = self.cache.place(self.index.size(1), chosen.sum(1), tokens.cache.max_len)
        # slots are in order of positions, so the causal mask compares slots
        slots = torch.arange(self.slots.end, device=chosen.device)
        self.bias = attention_bias(self.slots.pos, slots)

    def extend(self, layer, k, v):
        return self.cache.write(layer % self.cfg.n_stored, k, v, self.slots)


class RecursionCache(KVCache):
    """Of the tokens that took one recursion, in order. At first it has room for as many as
    are expected to; it grows where they are more."""

    def place(self, n, n_new, most):
        """As KVCache's, with room for `most` tokens if need be. Advances here, before write,
        as nothing else does: write uses only slots.at and slots.end of ragged rows."""
        if int((self.lengths + n_new).max()) > self.max_len:
            more = 0, 0, 0, most + 1 - self.max_len  # the last slot is padding's
            with torch.inference_mode(False):  # as in KVCache
                for buffers in (self.k, self.v):
                    buffers[:] = [F.pad(x[:, :, :-1], more) for x in buffers]
            self.max_len = most
        slots = super().place(n, n_new)
        self.advance(slots)
        return slots


class Cache(KVCache):
    """k[layer], v[layer] of the layers outside and of these recursions:

        kv=recursion       F_1, of all tokens; later[r - 2]: a RecursionCache for each F_r, r > 1
        kv=share           F_1, which all recursions read
        router=none        F_1 .. F_R, of all tokens, if kv=recursion
    """

    def __init__(self, cfg, n_loop, batch_size, max_len, device, dtype):
        own = cfg.router != "none" and cfg.kv == "recursion"
        recursions = 1 if own or cfg.kv == "share" else n_loop
        n_layer = cfg.n_stored * recursions + cfg.n_outside
        super().__init__(cfg, batch_size, max_len, device, dtype, n_layer)
        sizes = cfg.sizes(max_len)[1:n_loop] if own else []
        self.later = [RecursionCache(cfg, batch_size, size, device, dtype, cfg.n_stored)
                      for size in sizes]

    def nbytes(self):
        return super().nbytes() + sum(cache.nbytes() for cache in self.later)

    def reset(self, rows=None):
        super().reset(rows)
        for cache in self.later:
            cache.reset(rows)


# ---- the model ----

class Model(Recursions):
    context_type = AllTokens
    runs_blocks_once = False

    def __init__(self, cfg):
        K, R = cfg.n_stored, cfg.n_loop
        blocks = lambda n: nn.ModuleList(self.make_block(cfg, i) for i in range(n))
        routers = lambda: nn.ModuleList(Router(cfg, 1) for _ in range(R))
        super().__init__(cfg, blocks(K))  # the shared ones
        self.first, self.last = blocks(cfg.n_outside // 2), blocks(cfg.n_outside // 2)
        depths = [f"depth{d}" for d in range(1, R + 1)]
        if cfg.router == "expert":
            self.routers = routers()
            if cfg.causal == "aux_router":
                self.aux_routers = routers()
            # what an evaluation reports beside ce
            self.eval_metrics = ["ce_topk", "router_accuracy", *depths]
        elif cfg.router == "token":
            self.router = Router(cfg, R)
            self.register_buffer("balance_bias", torch.zeros(R))
            self.eval_metrics = [*depths, "maxvio"]
        # Table 5. cycle: 0 1 | 0 1 | 0 1, sequence: 0 0 | 0 1 | 1 1
        cycle = cfg.share.endswith("cycle")
        block = lambda r, i: self.blocks[i if cycle else ((r - 1) * K + i) // R]
        self.layers_of = [[block(r, i) for i in range(K)] for r in range(1, R + 1)]
        self.gate = {"softmax": lambda s: s.softmax(-1),
                     "sigmoid": lambda s: cfg.alpha * s.sigmoid(),
                     "tanh": lambda s: cfg.alpha * s.tanh()}[cfg.router_func]
        init_weights(self, cfg.n_layer)
        self.set_step(math.inf)

    def make_block(self, cfg, number):
        """The shared block (or first, or last one) of this number, from 0; of a fork, any
        module that is called as block(h, layer, context)."""
        return Block(cfg, QueryAttention if cfg.fast and cfg.kv == "share" else Attention)

    @property
    def loops_to_run(self):
        """The most recursions of a token in evaluation and decoding."""
        return self.cfg.exit_loop or self.cfg.n_loop

    def forward(self, idx, targets=None, cache=None, n_valid=None):
        """As in every model. aux also has tokens by depth, and the router's metrics."""
        cfg = self.cfg
        if targets is None or cache is not None or idx.numel() == 0 or cfg.router == "none":
            return super().forward(idx, targets, cache, n_valid)
        h, depth, routing = self.states(idx, top_k=self.training)
        logits = upcast(self.head(h))
        ce = cross_entropy(logits, targets)
        aux = {"ce": ce}
        aux |= {f"depth{d}": (depth == d).float().mean() for d in range(1, cfg.n_loop + 1)}
        if cfg.router == "expert" and not self.training:
            # top k's choices are the labels of the BCE
            h_top, _, routing = self.states(idx, top_k=True)
            aux["ce_topk"] = cross_entropy(upcast(self.head(h_top)), targets)
        if cfg.router == "expert":
            added, aux["aux"] = self.expert_loss(routing)
            aux |= self.expert_metrics(routing)
        else:
            added, aux["balance"] = self.token_loss(*routing)
            aux |= self.token_metrics(*routing)
        loss = ce + added if self.training else ce
        return logits, loss, {name: x.detach() for name, x in aux.items()}

    def expert_metrics(self, routing):
        """How often the decoding rule decides as top k did, in recursions that choose."""
        right = decided = torch.zeros_like(routing[0].s[0, 0])
        for _, decides, active, chosen in routing[1:]:
            right = right + (active & ((decides >= 0) == chosen)).sum()
            decided = decided + active.sum()
        return {"router_accuracy": right / decided.clamp(min=1)}

    def token_metrics(self, scores, p, depth):
        """maxvio: (the fullest depth's tokens - the mean) / the mean (Table 11)."""
        R, p = self.cfg.n_loop, p.flatten(0, -2)  # (B T, R)
        f = [(depth == d).float().mean() for d in range(1, R + 1)]
        entropy = torch.special.entr((p / p.sum(-1, keepdim=True)).mean(0)).sum()
        return {"entropy": entropy, "maxvio": R * torch.stack(f).max() - 1}

    def hidden(self, idx, cache=None, n_valid=None):
        top_k = self.training and cache is None
        return self.states(idx, top_k, cache, n_valid)[0]

    def states(self, idx, top_k, cache=None, n_valid=None):
        """idx (B, T) -> final states (B, T, C), recursions taken (B, T), and what the router
        did, for its loss. top_k: expert choice as in training, else as in decoding."""
        cfg, h, T = self.cfg, self.drop(self.wte(idx)), idx.size(1)
        R = cfg.n_loop if self.training else self.loops_to_run
        tokens = self.context_type(cfg, h, cache, n_valid)
        for block in self.first:
            h = block(h, -2, tokens)
        if cfg.router == "expert":
            # self.k is cfg.sizes(T, self.step), as set_step has told torch.compile of it
            k = self.k if T == cfg.block_size else cfg.sizes(T, self.step)
            h, routing = self.expert_choice(h, tokens, R, k if top_k else None)
            depth = sum(each.chosen.long() for each in routing)
        elif cfg.router == "token":
            h, routing = self.token_choice(h, tokens, R)
            _, _, depth = routing
        else:
            depth, routing = tokens.chosen * R, None
            for r in range(1, R + 1):
                h = self.recursion(r, h, tokens, tokens.chosen)
        for block in self.last:
            h = block(h, -1, tokens)
        if cache is not None:
            cache.advance(tokens.slots)
        return self.norm(h), depth, routing

    @torch.no_grad()
    def recursions(self, idx):
        """Recursions that each token of idx takes in decoding, (B, T)."""
        return self.states(idx, top_k=False)[1]

    def init_cache(self, batch_size, max_len):
        return Cache(self.cfg, self.loops_to_run, *self.cache_sizes(batch_size, max_len))

    def set_step(self, step):
        """For the capacity warm-up: k_1 .. k_R of a whole sequence at this step."""
        self.step, self.k = step, self.cfg.sizes(self.cfg.block_size, step)
        if self.cfg.capacity_warmup:
            # for torch.compile self.k's ints are symbols: one graph, not one for each value
            torch.compiler.config.allow_unspec_int_on_nn_module = True

    @torch.no_grad()
    def end_step(self, logged):
        """loss_free moves biases against f, which is logged over all processes."""
        cfg, R = self.cfg, self.cfg.n_loop
        if cfg.router == "token" and cfg.balance == "loss_free":
            f = torch.tensor([logged[f"depth{d}"] for d in range(1, R + 1)])
            excess = (f - 1 / R).round(decimals=6)  # 0 if only rounding differs
            self.balance_bias -= cfg.balance_rate * excess.sign().to(self.balance_bias)

    def flops_per_token(self, step=math.inf):
        """As in model_gpt; a layer's count for the fraction of tokens that take it."""
        weights = self.head.weight.numel()
        weights += sum(p.numel() for name, p in self.named_parameters() if "router" in name)
        flops = 6.0 * weights + self.cfg.n_outside * self.layer_flops(1, 1.0)
        for r in range(1, self.cfg.n_loop + 1):
            flops += self.cfg.n_stored * self.layer_flops(r, self.cfg.capacity(r, step))
        return flops

    def layer_flops(self, r, fraction):
        """Of a layer of recursion r that this fraction of tokens takes."""
        block, cfg = self.blocks[0], self.cfg
        weights = sum(p.numel() for p in block.parameters() if p.dim() == 2)
        if r > 1 and cfg.kv == "share":
            weights -= block.attn.wk.weight.numel() + block.attn.wv.weight.numel()
        keys = cfg.block_size * (fraction if cfg.kv == "recursion" else 1)
        visible, width = (keys + 1) / 2, cfg.n_head * cfg.head_dim
        return fraction * (6.0 * weights + 12.0 * width * visible)


@torch.no_grad()
def convert(model, weights):
    """Start from the weights of a model_gpt of the same sizes: its first and last layer, and
    for each stored block one of the layers between or, with init=average, the mean of those
    that it stands for (Table 9). If the source has another depth, n_layer of its layers are
    taken, evenly spaced."""
    cfg, target, K = model.cfg, model.state_dict(), model.cfg.n_stored
    for name in [name for name in weights if not name.startswith("blocks.")]:
        target[name].copy_(weights[name])
    inner = range(cfg.n_layer)[cfg.n_outside // 2:cfg.n_layer - cfg.n_outside // 2]
    block_of = list(zip(inner, sum(model.layers_of, [])))  # of each inner layer
    uses = [[layer for layer, other in block_of if other is block] for block in model.blocks]
    spaced = [round(inner[0] + k * (len(inner) - 1) / max(1, K - 1)) for k in range(K)]
    random = [inner[i] for i in torch.randperm(len(inner))[:K]]
    one = {"stepwise": spaced, "lower": inner[:K], "upper": inner[-K:], "random": random}
    layers = uses if cfg.init == "average" else [[layer] for layer in one[cfg.init]]
    if cfg.n_outside:
        layers += [[0], [cfg.n_layer - 1]]
    depth = len({name.split(".")[1] for name in weights if name.startswith("blocks.")})
    source = lambda layer: round(layer * (depth - 1) / max(1, cfg.n_layer - 1))
    for block, its in zip([*model.blocks, *model.first, *model.last], layers):
        for name, p in block.named_parameters():
            p.copy_(sum(weights[f"blocks.{source(layer)}.{name}"] for layer in its) / len(its))

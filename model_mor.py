"""
Mixture-of-Recursions (MoR): tied layers in loops; each token takes as many as it needs.

R = n_loop recursions F_1 .. F_R, of K layers each with their residual streams, share K
blocks. A router, linear in a token's state h, sends easy tokens through few recursions and
hard ones through many. share=middle_*: a first and a last layer stand outside, for all.

router=expert (Section 2.2.1): recursion r chooses its tokens A_r among A_{r-1} by a
score s = w_r . h, in each sequence. A_0 = A_1 = all tokens.
    A_r = the k_r of A_{r-1} with the highest s,   k_r = max(1, floor(T (R-r+1) / R))
    h[A_r] <- h[A_r] + alpha sigmoid(s) F_r(h[A_r])     (2.1)

router=token: each token chooses its depth i once, from its state h_1 before F_1.
    p = softmax(W h_1),   i = argmax p
    h <- h_1 + p_i F_i(.. F_1(h_1))                     (2.2)
The loss balance_weight R sum_i f_i mean(p_i) keeps depths in balance; f_i: the fraction
of tokens with depth i. loss_free: a bias b in argmax(p + b) moves against f.

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
share_update, of the authors' code alone: as share, but the chosen have new keys.

Departures. Token choice gates once, and its z-loss weighs 1e-5, as in the authors' code
(paper: at every step, 1e-3). Before commit 82c97f2 that code did not tie attention in
expert choice; all is tied here. Weights start as model_gpt's. No random router (Table 10).

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

from model_gpt import (BaseConfig, Block, Context, KVCache, LanguageModel, Slots,
                       attention_bias, choice, cross_entropy, init_weights, mlp_width, upcast)


@dataclass
class Config(BaseConfig):
    n_layer: int = 8             # unrolled layers, first and last too
    n_loop: int = 3              # R: recursions
    share: str = choice("middle_cycle", "cycle", "sequence", "middle_sequence")
    router: str = choice("expert", "token", "none")  # none: all take all, the baseline
    kv: str = choice("recursion", "share", "share_update")  # keys of a recursion
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
        self.n_edge = int(self.share.startswith("middle"))  # first layers, and last ones
        self.n_stored, left = divmod(self.n_layer - 2 * self.n_edge, R)  # K
        if self.n_stored < 1 or left:
            fits = max(1, self.n_stored) * R + 2 * self.n_edge
            raise ValueError(f"n_layer={self.n_layer} does not fit share={self.share} "
                             f"with n_loop={R}: {fits} or {fits + R} would")
        if self.kv != "recursion" and self.share.endswith("sequence"):
            raise ValueError(f"kv={self.kv} needs recursions over the same layers: "
                             f"share=cycle or middle_cycle, not {self.share}")
        self.n_mlp = self.n_mlp or mlp_width(self)

    def capacity(self, r, step=math.inf):
        """The fraction of all tokens that take recursion r at a training step (token
        choice: if depths are in balance)."""
        R, extra = self.n_loop, float(self.router == "none")  # 1: all of them
        if self.router == "expert" and step < self.capacity_warmup:
            extra = 0.5 * (1 + math.cos(math.pi * step / self.capacity_warmup))
        return (R - r + 1 + (r - 1) * extra) / R

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

class Subset:
    """The context of recursion r > 1: of the chosen (B, T) among all tokens (AllTokens),
    n of the fullest row (None: not known). Written out: all run, the chosen count."""

    def __init__(self, cfg, tokens, r, chosen, n=None):
        self.cfg, self.tokens, self.r, self.chosen = cfg, tokens, r, chosen
        self.rope, self.bias = tokens.rope, tokens.bias
        if cfg.kv == "recursion":
            causal = chosen.new_ones(chosen.size(1), chosen.size(1)).tril()
            itself = causal.triu()  # lest a softmax is empty
            visible = causal & chosen[:, None, None] | itself
            self.bias = torch.where(visible, 0.0, -math.inf)  # (B, 1, T, T)

    def gather(self, x):
        """x (B, T, ...) of all tokens -> (B, n, ...) of the chosen ones."""
        return x

    def scatter(self, x, new):
        """x (B, T, ...) with new (B, n, ...) in the chosen tokens' places."""
        chosen = self.chosen.view(*self.chosen.shape, *[1] * (x.dim() - 2))
        return torch.where(chosen, new, x)

    def extend(self, layer, k, v):
        """The keys and values (B, G, S, D) that the chosen attend to (Section 2.2.2)."""
        if self.cfg.kv == "recursion":
            return k, v
        first = self.tokens.kv[layer - (self.r - 1) * self.cfg.n_stored]  # F_1's
        if self.cfg.kv == "share":  # torch.compile drops what made k and v
            return first
        return [self.scatter(x.transpose(1, 2), new.transpose(1, 2)).transpose(1, 2)
                for x, new in zip(first, (k, v))]  # share_update


class AllTokens(Context):
    """The context of all tokens: that of the first and last layers and of recursion 1.
    chosen (B, T): which are no padding. kv[layer]: the keys and values attended to."""
    gather, scatter = Subset.gather, Subset.scatter

    def __init__(self, cfg, x, cache=None, n_valid=None):
        super().__init__(cfg, x, cache, n_valid)
        (B, T), self.kv, self.decoding = x.shape[:2], {}, cache is not None
        self.subset_type = Cached if self.decoding else Gathered if cfg.fast else Subset
        if cfg.router == "none":  # all again, with new keys or those of F_1
            self.subset_type = Subset if cfg.kv == "share" else None
        n_real = self.slots.n_new[:, None] if self.decoding else T
        self.chosen = torch.arange(T, device=x.device).expand(B, T) < n_real

    def extend(self, layer, k, v):
        if self.decoding:
            k, v = self.cache.write(layer, k, v, self.slots)
        self.kv[layer] = k, v
        return k, v


# ---- the method: which tokens take which recursion ----

class Recursions(LanguageModel):
    """The method. Model, below, adds the parts: routers (and aux_routers), or router and
    balance_bias; gate; layers_of."""

    def expert_choice(self, h, tokens, R, k=None):
        """h (B, T, C) -> h after R recursions, a Choice of each. Recursion r takes the best
        k[r - 1] tokens of a sequence; k None, decoding: those of s >= 0."""
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
            if tokens.decoding and not chosen.any():
                break  # no token goes on
            gate = self.gate(s)[..., None]  # alpha sigmoid(s)
            h = self.recursion(r, h, tokens, chosen, gate, k and k[r - 1])  # (2.1)
            routing.append(Choice(s, decides, active, chosen))
            active = chosen
        return h, routing

    def expert_loss(self, routing):
        """What is added to the loss, and the BCE in it: means over those that competed."""
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
            if tokens.decoding and not chosen.any():
                break  # no token goes on
            h = self.recursion(r, h, tokens, chosen)
        return self.exit(h1, h, p, depth), (scores, p, depth)

    def choose_depth(self, h1):
        """h_1 (..., C) -> scores and p (..., R), depths 1 .. R (...)."""
        scores = self.router(h1)
        p = self.gate(scores)
        depth = 1 + (p + self.balance_bias).argmax(-1)  # i
        return scores, p, depth if self.training else depth.clamp(max=self.n_loop)

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
        """h (B, T, C) with F_r(h) or, with a gate (B, T, 1), h + gate F_r(h), of the chosen.
        Layers have the numbers of unrolled ones, the last layer has -1."""
        subset = tokens
        if r > 1 and tokens.subset_type:
            subset = tokens.subset_type(self.cfg, tokens, r, chosen, n)
        x = y = subset.gather(h)  # h[A_r]
        start = self.cfg.n_edge + (r - 1) * self.cfg.n_stored
        for layer, block in enumerate(self.layers_of[r - 1], start):
            y = block(y, layer, subset)  # F_r(h[A_r])
        if gate is not None:
            y = x + (subset.gather(gate) * y).to(h.dtype)
        return subset.scatter(h, y)


# ---- the fast path ----

class Gathered(Subset):
    """Equal, as what a Subset drops is just not computed: the chosen run alone, in order,
    n in each row, shorter rows padded behind. places (B, n): where each stands among all
    B T; B T is padding's, a spare place behind, and it reads the last of all.
    Under torch.compile n = T where it is not known, so that token choice saves nothing."""

    def __init__(self, cfg, tokens, r, chosen, n=None):
        self.cfg, self.tokens, self.r, self.chosen = cfg, tokens, r, chosen
        (B, T), device = chosen.shape, chosen.device
        if n is None:  # under torch.compile no shape may depend on data
            n = T if torch.compiler.is_compiling() else max(1, int(chosen.sum(1).max()))
        rows = torch.arange(B, device=device)[:, None]
        at = torch.where(chosen, torch.arange(T, device=device), T)
        at = at.topk(n, 1, largest=False).values  # (B, n), ascending; T is padding
        self.places = torch.where(at < T, T * rows + at, B * T)
        self.rope = tokens.rope and [self.gather(x[:, 0].expand(B, T, -1))[:, None]
                                     for x in tokens.rope]  # (B, 1, n, D / 2)
        self.bias = None  # kv=recursion: causal, which hides the padding behind, too
        if self.cfg.kv != "recursion":
            self.pos = self.gather(tokens.pos.expand(B, T))
            n_keys = tokens.slots.end if tokens.decoding else T
            self.bias = attention_bias(self.pos, torch.arange(n_keys, device=device))

    def gather(self, x):
        x = x.flatten(0, 1)
        chosen = x.index_select(0, self.places.flatten().clamp(max=len(x) - 1))
        return chosen.view(*self.places.shape, *x.shape[1:])

    def scatter(self, x, new):
        flat = torch.cat([x.flatten(0, 1), torch.zeros_like(x[:1, 0])])  # the spare place
        flat = flat.index_copy(0, self.places.flatten(), new.flatten(0, 1))
        return flat[:-1].view(x.shape)


# ---- decoding ----

class Cached(Gathered):
    """Gathered tokens whose keys and values go to a cache, if they have any of their own:
    with kv=recursion to the recursion's own cache, in which they follow each other without
    gaps; with share_update to their positions in the cache of all tokens."""

    def __init__(self, cfg, tokens, r, chosen, n=None):
        super().__init__(cfg, tokens, r, chosen, n)
        n_new, self.cache, self.offset = chosen.sum(1), tokens.cache, 0
        if self.cfg.kv == "recursion":
            self.cache = tokens.cache.later[r - 2]
            self.offset = self.cfg.n_edge + (r - 1) * self.cfg.n_stored  # its layer 0
            self.slots = self.cache.place(self.places.size(1), n_new, tokens.cache.max_len)
            # in order of positions, so places do for a causal mask
            k_pos = torch.arange(self.slots.end, device=chosen.device)
            self.bias = attention_bias(self.slots.pos, k_pos)
        else:
            padding = self.places == chosen.numel()
            at = self.pos.masked_fill(padding, self.cache.max_len)
            self.slots = Slots(self.pos, tokens.slots.end, n_new, at)

    def extend(self, layer, k, v):
        if self.cfg.kv == "share":
            return super().extend(layer, k, v)
        return self.cache.write(layer - self.offset, k, v, self.slots)


class RecursionCache(KVCache):
    """Of the tokens that took one recursion, in order. Grows where they are many."""

    def place(self, n, n_new, most):
        """As KVCache's, with room for `most` tokens if need be. Counts the new tokens at
        once: write goes by slots.at, which rows of unlike lengths always have."""
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
    """Of the layers in which all tokens have keys, the last layer's behind; of recursions
    1 .. n_loop. later: a RecursionCache for each later recursion (kv=recursion)."""

    def __init__(self, cfg, n_loop, batch_size, max_len, device, dtype):
        self.cfg, routed = cfg, cfg.router != "none"
        own = routed and cfg.kv == "recursion"
        recursions = 1 if own or cfg.kv == "share" else n_loop
        n_layer = 2 * cfg.n_edge + cfg.n_stored * recursions
        super().__init__(cfg, batch_size, max_len, device, dtype, n_layer)
        sizes = cfg.sizes(max_len)[1:n_loop] if own else []
        self.later = [RecursionCache(cfg, batch_size, size, device, dtype, cfg.n_stored)
                      for size in sizes]
        self.updates = routed and cfg.kv == "share_update"

    def write(self, layer, k, v, slots):
        """share_update: later recursions have F_1's keys until they write their own."""
        K, edge = self.cfg.n_stored, self.cfg.n_edge
        if self.updates and edge <= layer < edge + K:
            for later in range(layer + K, len(self.k) - edge, K):
                super().write(later, k, v, slots)
        return super().write(layer, k, v, slots)

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
        blocks = lambda n: nn.ModuleList(self.make_block(cfg, i) for i in range(n))
        routers = lambda: nn.ModuleList(Router(cfg, 1) for _ in range(R))
        K, R = cfg.n_stored, cfg.n_loop
        super().__init__(cfg, blocks(K))  # the shared ones
        self.first, self.last = blocks(cfg.n_edge), blocks(cfg.n_edge)
        depths = [f"depth{d}" for d in range(1, R + 1)]
        if cfg.router == "expert":  # eval_metrics: of an evaluation, beside ce
            self.routers = routers()
            if cfg.causal == "aux_router":
                self.aux_routers = routers()
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
        return Block(cfg)

    @property
    def n_loop(self):
        """The most recursions of a token in evaluation and decoding."""
        return self.cfg.exit_loop or self.cfg.n_loop

    def forward(self, idx, targets=None, cache=None, n_valid=None):
        """As in every model. aux also has tokens by depth, and the router's metrics."""
        cfg = self.cfg
        if targets is None or cache is not None or not idx.numel() or cfg.router == "none":
            return super().forward(idx, targets, cache, n_valid)
        h, taken, routing = self.states(idx, top_k=self.training)
        logits = upcast(self.head(h))
        ce = cross_entropy(logits, targets)
        aux = {"ce": ce}
        aux |= {f"depth{d}": (taken == d).float().mean() for d in range(1, cfg.n_loop + 1)}
        if cfg.router == "expert" and not self.training:
            h, _, routing = self.states(idx, top_k=True)  # the labels of the BCE
            aux["ce_topk"] = cross_entropy(upcast(self.head(h)), targets)
        if cfg.router == "expert":
            more, aux["aux"] = self.expert_loss(routing)
            aux |= self.expert_metrics(routing)
        else:
            more, aux["balance"] = self.token_loss(*routing)
            aux |= self.token_metrics(*routing)
        loss = ce + more if self.training else ce
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
        """idx (B, T) -> final states (B, T, C), recursions taken (B, T), what the router
        did. top_k: expert choice as in training, else as in decoding."""
        cfg, h, T = self.cfg, self.drop(self.wte(idx)), idx.size(1)
        R = cfg.n_loop if self.training else self.n_loop  # as many recursions run
        tokens = self.context_type(cfg, h, cache, n_valid)
        for block in self.first:
            h = block(h, 0, tokens)
        if cfg.router == "expert":
            k = self.k if T == cfg.block_size else cfg.sizes(T, self.step)
            h, routing = self.expert_choice(h, tokens, R, k if top_k else None)
            taken = sum(each.chosen.long() for each in routing)
        elif cfg.router == "token":
            h, routing = self.token_choice(h, tokens, R)
            taken = routing[-1]  # depths
        else:
            taken, routing = tokens.chosen * R, None
            for r in range(1, R + 1):
                h = self.recursion(r, h, tokens, tokens.chosen)
        for block in self.last:
            h = block(h, -1, tokens)
        if cache is not None:
            cache.advance(tokens.slots)
        return self.norm(h), taken, routing

    @torch.no_grad()
    def recursions(self, idx):
        """Recursions that each token of idx takes in decoding, (B, T)."""
        return self.states(idx, top_k=False)[1]

    def init_cache(self, batch_size, max_len):
        return Cache(self.cfg, self.n_loop, *self.cache_sizes(batch_size, max_len))

    def set_step(self, step):
        """For the capacity warm-up: k_1 .. k_R of a whole sequence at this step."""
        self.step, self.k = step, self.cfg.sizes(self.cfg.block_size, step)
        if self.cfg.capacity_warmup:
            # torch.compile: ints of a module are symbols, not a graph each
            torch.compiler.config.allow_unspec_int_on_nn_module = True

    @torch.no_grad()
    def end_step(self, logged):
        """loss_free moves biases against f, which is logged over all processes."""
        cfg, R = self.cfg, self.cfg.n_loop
        if cfg.router == "token" and cfg.balance == "loss_free":
            f = torch.tensor([logged[f"depth{d}"] for d in range(1, R + 1)])
            excess = (f - 1 / R).round(decimals=6)  # less is rounding
            self.balance_bias -= cfg.balance_rate * excess.sign().to(self.balance_bias)

    def flops_per_token(self, step=math.inf):
        """As in model_gpt; a layer's count for the fraction of tokens that take it."""
        weights = self.head.weight.numel()
        weights += sum(p.numel() for name, p in self.named_parameters() if "router" in name)
        flops = 6.0 * weights + 2 * self.cfg.n_edge * self.layer_flops(1, 1.0)
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
    """Start from the weights of a model_gpt of the same sizes: its first and last layer,
    and each stored block as the mean of some layers in between (init, Table 9). Of other
    than n_layer layers so many are taken, evenly spaced."""
    cfg, target, K = model.cfg, model.state_dict(), model.cfg.n_stored
    for name in [name for name in weights if not name.startswith("blocks.")]:
        target[name].copy_(weights[name])
    n_source = len({name.split(".")[1] for name in weights if name.startswith("blocks.")})
    inner = range(cfg.n_edge, cfg.n_layer - cfg.n_edge)
    tied = list(zip(inner, sum(model.layers_of, [])))  # (layer, its block)
    spaced = [round(inner[0] + k * (len(inner) - 1) / max(1, K - 1)) for k in range(K)]
    average = [[n for n, other in tied if other is block] for block in model.blocks]
    random = [inner[n] for n in torch.randperm(len(inner))[:K]]
    one = {"stepwise": spaced, "lower": inner[:K], "upper": inner[-K:], "random": random}
    origins = average if cfg.init == "average" else [[n] for n in one[cfg.init]]
    edges = [[0], [cfg.n_layer - 1]][:2 * cfg.n_edge]
    for block, layers in zip([*model.blocks, *model.first, *model.last], origins + edges):
        layers = [round(n * (n_source - 1) / max(1, cfg.n_layer - 1)) for n in layers]
        for name, p in block.named_parameters():
            p.copy_(sum(weights[f"blocks.{n}.{name}"] for n in layers) / len(layers))

"""
Mixture-of-Recursions (MoR): tied layers in loops; each token takes as many as it needs.

R = n_loop recursions F_1 .. F_R, of K layers each, share K blocks. A router, linear in a
token's state h, sends easy tokens through few recursions and hard ones through many
(router=none: all through all). share=middle_*: a first and a last layer stand outside.

router=expert (Section 2.2.1): recursion r chooses its tokens A_r among A_{r-1} by a
score s = w_r . h, in each sequence. A_0 = A_1 = all tokens, gated and in the loss too.
    A_r = the k_r of A_{r-1} with the highest s,   k_r = max(1, floor(T (R-r+1) / R))
    h[A_r] <- h[A_r] + alpha sigmoid(s) F_r(h[A_r])     (2.1)

router=token: each token chooses its depth i once, from its state h_1 before F_1.
    p = softmax(W h_1),   i = argmax p
    h <- h_1 + p_i F_i(.. F_1(h_1))                     (2.2)
The loss balance_weight R sum_i f_i mean(p_i) keeps depths in balance; f_i: the fraction
of tokens with depth i. loss_free: a bias b in argmax(p + b) moves against f.

    first -> F_1 (all) -> F_2 (2/3) -> F_3 (1/3) -> last
      a         a            a            a           a    R = 3: token c takes one
      b         b            b            .           b    recursion, b two and
      c         c            .            .           c    a three

Decoding. Top k depends on later tokens, so expert choice decodes by s >= 0. The loss
aux_weight BCE(s, was it chosen) teaches that to s or, with causal=aux_router, to a
second router on detached states. In eval mode "ce" is of decoding, "ce_topk" of top k.

Keys and values (Section 2.2.2). Chosen tokens keep their positions. kv=recursion: they
attend to those that take the same recursion. share: to all, by their keys in F_1.
share_update, of the authors' code alone: as share, but the chosen have new keys.

Departures. Token choice gates once, and its z-loss weighs 1e-5, as in the authors' code
(paper: at every step, 1e-3). That code ties attention in expert choice from commit
82c97f2 on; all is tied here. Weights start as model_gpt's. No random router (Table 10).

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

import model_gpt
from model_gpt import (BaseConfig, Block, Context, KVCache, LanguageModel, RMSNorm, Slots,
                       apply_rope, attend, attention_bias, choice, cross_entropy,
                       init_weights, mlp_width, upcast)


@dataclass
class Config(BaseConfig):
    n_layer: int = 8             # unrolled layers, first and last too
    n_loop: int = 3              # R: recursions
    fit_layers: bool = False     # round n_layer up to what n_loop needs
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
    mlp: str = choice("swiglu", "gelu")
    pos: str = choice("rope", "none")
    qk_norm: bool = False        # RMSNorm on each head's query and key, before RoPE
    tie_embeddings: bool = True  # the head is the embedding matrix
    paper_flops: bool = False    # max_flops counts as the paper does

    CONVERTS_FROM = ("gpt",)
    RESUME_OVERRIDES = ("paper_flops",)
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
        self.n_outside = 2 * self.share.startswith("middle")  # the first and the last layer
        self.n_stored, left = divmod(self.n_layer - self.n_outside, R)  # K
        if left and self.fit_layers:
            self.n_stored, left = self.n_stored + 1, 0
            self.n_layer = self.n_stored * R + self.n_outside
        if self.n_stored < 1 or left:
            fits = max(1, self.n_stored) * R + self.n_outside
            raise ValueError(f"n_layer={self.n_layer} does not fit share={self.share} "
                             f"with n_loop={R}: {fits} or {fits + R} would")
        if self.kv != "recursion" and self.share.endswith("sequence"):
            raise ValueError(f"kv={self.kv} needs recursions over the same layers: "
                             f"share=cycle or middle_cycle, not {self.share}")
        self.n_mlp = self.n_mlp or mlp_width(self)

    def capacity(self, r, step=math.inf):
        """The fraction of all tokens that take recursion r at a training step."""
        extra = float(self.router == "none")  # 0: (R - r + 1) / R of them, 1: all
        if self.router == "expert" and step < self.capacity_warmup:
            extra = 0.5 * (1 + math.cos(math.pi * step / self.capacity_warmup))
        return (self.n_loop - (r - 1) + (r - 1) * extra) / self.n_loop

    def sizes(self, T, step=math.inf):
        """k_1 .. k_R: how many of T tokens that is."""
        recursions = range(1, self.n_loop + 1)
        return [max(1, int(T * self.capacity(r, step) + 1e-9)) for r in recursions]


# ---- a router, and what its recursion did ----

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


# ---- the method: which tokens take which recursion ----

class Recursions(LanguageModel):
    """The method. Model, below, has the parts: routers, blocks, first and last layers."""

    def expert_choice(self, h, tokens, R, k=None):
        """Recursion r chooses k[r - 1] tokens of a sequence; k None, decoding: those of
        s >= 0. h (B, T, C) -> h after R recursions, how many each token took (B, T), a
        Choice of each recursion. tokens: the context of all tokens."""
        active, routing = tokens.chosen, []  # A_0
        for r in range(1, R + 1):
            s = decides = self.routers[r - 1](h)[..., 0]  # w_r . h, (B, T)
            if self.cfg.causal == "aux_router":
                decides = self.aux_routers[r - 1](h.detach())[..., 0]
            chosen, n = active, None  # A_1 = A_0
            if r > 1 and k:
                n = k[r - 1]
                top = s.masked_fill(~active, -math.inf).topk(n, 1).indices
                chosen = torch.zeros_like(active).scatter(1, top, True)  # A_r
            elif r > 1:
                chosen = active & (decides >= 0)
            if not (torch.is_grad_enabled() or chosen.any()):
                break  # no token goes on
            subset = tokens if r == 1 else tokens.subset(tokens, r, chosen, n)
            x = subset.gather(h)  # h[A_r]
            gate = subset.gather(self.cfg.alpha * self.squash(s)[..., None])
            y = gate * self.recursion(r, x, subset)  # alpha sigmoid(s) F_r(h[A_r])
            h = subset.scatter(h, x + y.to(h.dtype))  # (2.1)
            routing.append(Choice(s, decides, active, chosen))
            active = chosen
        return h, sum(c.chosen.long() for c in routing), routing

    def expert_loss(self, routing):
        """What is added to the loss, and the BCE in it: means over those that competed."""
        bce = z = 0.0
        for s, decides, active, chosen in routing:
            each = F.binary_cross_entropy_with_logits(decides, chosen.to(s), reduction="none")
            bce = bce + (active * each).sum() / active.sum()
            z = z + (active * s ** 2).sum() / active.sum()
        return self.cfg.aux_weight * bce + self.cfg.z_loss * z, bce

    def token_choice(self, h1, tokens, R):
        """As expert_choice, but tokens choose depths, by what is returned last."""
        h, (scores, p, depth) = h1, self.choose_depth(h1)
        for r in range(1, R + 1):
            chosen = tokens.chosen & (depth >= r)
            if not (torch.is_grad_enabled() or chosen.any()):
                break
            subset = tokens if r == 1 else tokens.subset(tokens, r, chosen)
            h = subset.scatter(h, self.recursion(r, subset.gather(h), subset))
        return self.exit(h1, h, p, depth), depth, (scores, p, depth)

    def choose_depth(self, h1):
        """h_1 (..., C) -> scores and p (..., R), depths 1 .. R (...)."""
        scores = self.router(h1)
        soft = self.cfg.router_func == "softmax"
        p = scores.softmax(-1) if soft else self.cfg.alpha * scores.sigmoid()
        depth = 1 + (p + self.balance_bias).argmax(-1)  # i
        return scores, p, depth if self.training else depth.clamp(max=self.n_loop)

    def exit(self, h1, h, p, depth):
        return h1 + (p.gather(-1, depth[..., None] - 1) * h).to(h1.dtype)  # (2.2)

    def token_loss(self, routing):
        """What is added to the loss, and the balance loss in it."""
        cfg, R, (scores, p, depth) = self.cfg, self.cfg.n_loop, routing
        f = [(depth == i).to(p.dtype).mean() for i in range(1, R + 1)]
        balance = R * sum(f_i * p_i.mean() for f_i, p_i in zip(f, p.unbind(-1)))
        weight = cfg.balance_weight if cfg.balance == "loss" else 0.0
        return weight * balance + cfg.z_loss * scores.logsumexp(-1).square().mean(), balance

    def recursion(self, r, h, context):
        """F_r: K layers in a row."""
        start = self.cfg.n_outside + (r - 1) * self.cfg.n_stored
        for layer, block in enumerate(self.layers_of[r - 1], start):
            h = block(h, layer, context)
        return h


class Subset:
    """The context of recursion r > 1, of the chosen (B, T) among all tokens, n of the
    fullest row (None: not known). Written out: all run, only what the chosen give counts."""

    def __init__(self, tokens, r, chosen, n=None):
        self.cfg, self.tokens, self.r, self.chosen = tokens.cfg, tokens, r, chosen
        self.rope, self.bias = tokens.rope, tokens.bias
        if self.cfg.kv == "recursion":
            T = chosen.size(1)
            one = torch.ones(T, T, dtype=torch.bool, device=chosen.device)
            # earlier chosen tokens, and itself, lest a softmax is empty
            visible = (chosen[:, None, None] | one.triu()) & one.tril()
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
        first = self.tokens.kv[layer - (self.r - 1) * self.cfg.n_stored]  # of all, in F_1
        if self.cfg.kv == "share":
            return first
        return [self.scatter(x.transpose(1, 2), new.transpose(1, 2)).transpose(1, 2)
                for x, new in zip(first, (k, v))]  # share_update


class AllTokens(Context, Subset):
    """The context of all tokens: that of the first and last layers and of recursion 1.
    chosen (B, T): which are no padding. kv[layer]: keys and values that were attended to.
    subset: what makes the contexts of later recursions."""
    r = 1

    def __init__(self, cfg, x, cache=None, n_valid=None):
        super().__init__(cfg, x, cache, n_valid)
        (B, T), self.cfg, self.kv = x.shape[:2], cfg, {}
        n_real = self.slots.n_new[:, None] if cache else T
        self.chosen = torch.arange(T, device=x.device).expand(B, T) < n_real
        self.subset = Cached if cache else Gathered if cfg.fast else Subset

    def extend(self, layer, k, v):
        self.kv[layer] = self.cache.write(layer, k, v, self.slots) if self.cache else (k, v)
        return self.kv[layer]


# ---- the fast path ----

class Gathered(Subset):
    """Equal, as what a Subset drops is just not computed: the chosen run alone, in order,
    padded to n in each row. places (B, n): where they stand among all B T. Padding reads
    the last of all, and is written to a spare place behind."""

    def __init__(self, tokens, r, chosen, n=None):
        self.cfg, self.tokens, self.r, self.chosen = tokens.cfg, tokens, r, chosen
        (B, T), device = chosen.shape, chosen.device
        if n is None:  # the most chosen tokens of a row
            compiling = torch.compiler.is_compiling()  # no shape may depend on data
            n = T if compiling else max(1, int(chosen.sum(1).max()))
        rows = torch.arange(B, device=device)[:, None]
        at = torch.where(chosen, torch.arange(T, device=device), T)
        at = at.topk(n, 1, largest=False).values  # (B, n): T is padding
        self.places = torch.where(at < T, T * rows + at, B * T)
        self.rope = tokens.rope and [self.gather(x[:, 0].expand(B, T, -1))[:, None]
                                     for x in tokens.rope]  # (B, 1, n, D / 2)
        self.bias = None  # recursion: causal, being in order
        if self.cfg.kv != "recursion":
            self.pos = self.gather(tokens.pos.expand(B, T))
            n_keys = tokens.slots.end if tokens.cache else T
            self.bias = attention_bias(self.pos, torch.arange(n_keys, device=device))

    def gather(self, x):
        x = x.flatten(0, 1)
        chosen = x.index_select(0, self.places.flatten().clamp(max=len(x) - 1))
        return chosen.view(*self.places.shape, *x.shape[1:])

    def scatter(self, x, new):
        flat = torch.cat([x.flatten(0, 1), torch.zeros_like(x[:1, 0])])  # the spare
        flat = flat.index_copy(0, self.places.flatten(), new.flatten(0, 1))
        return flat[:-1].view(x.shape)


class QueryAttention(model_gpt.Attention):
    """kv=share: later recursions make no keys and values, as extend would drop them."""

    def forward(self, x, layer, context):
        if context.r == 1:
            return super().forward(x, layer, context)
        q = self.wq(x).unflatten(-1, (-1, self.cfg.head_dim)).transpose(1, 2)
        q = self.q_norm(q)  # (B, H, n, D)
        if context.rope:
            q = apply_rope(q, *context.rope)
        k, v = context.extend(layer, None, None)
        dropout = self.cfg.dropout if self.training else 0.0
        y = attend(q, k, v, context.bias, self.cfg.fast, dropout)
        return self.wo(y.transpose(1, 2).flatten(2))


# ---- decoding ----

class Cached(Gathered):
    """Gathered tokens whose keys and values go to a cache, if they have any of their own."""

    def __init__(self, tokens, r, chosen, n=None):
        super().__init__(tokens, r, chosen, n)
        cfg, n_new = self.cfg, chosen.sum(1)
        if cfg.kv == "recursion":
            self.cache = tokens.cache.later[r - 2]
            self.offset = cfg.n_outside + (r - 1) * cfg.n_stored  # its layers count from 0
            self.slots = self.cache.place(self.places.size(1), n_new, tokens.cache.max_len)
            k_pos = torch.arange(self.slots.end, device=chosen.device)
            self.bias = attention_bias(self.slots.pos, k_pos)
        else:
            self.cache, self.offset = tokens.cache, 0
            at = self.pos.masked_fill(self.places == chosen.numel(), self.cache.max_len)
            self.slots = Slots(self.pos, tokens.slots.end, n_new, at)

    def extend(self, layer, k, v):
        if self.cfg.kv == "share":
            return super().extend(layer, k, v)
        return self.cache.write(layer - self.offset, k, v, self.slots)


class RecursionCache(KVCache):
    """Of the tokens that took one recursion, in order. Grows where they are many."""

    def place(self, n, n_new, most):
        """As KVCache's, with room for `most` tokens if need be. New tokens count at once, as
        each call has slots of its own."""
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
    """Of layers in which all tokens have keys. later: RecursionCaches (kv=recursion)."""

    def __init__(self, cfg, batch_size, max_len, device, dtype):
        K, R, routed = cfg.n_stored, cfg.exit_loop or cfg.n_loop, cfg.router != "none"
        own, self.copies, self.later = cfg.kv == "recursion" and routed, {}, []
        layers = cfg.n_outside + K * (1 if own or cfg.kv == "share" else R)
        super().__init__(cfg, batch_size, max_len, device, dtype, layers)
        if own:
            self.later = [RecursionCache(cfg, batch_size, size, device, dtype, K)
                          for size in cfg.sizes(max_len)[1:R]]
        if cfg.kv == "share_update" and routed:  # of a layer of recursion 1: the later ones
            self.copies = {layer: range(layer + K, layers, K)
                           for layer in range(cfg.n_outside, cfg.n_outside + K)}

    def write(self, layer, k, v, slots):
        """share_update: later recursions have the first's keys until they write theirs."""
        for later in self.copies.get(layer, ()):
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
    runs_blocks_once = False

    def __init__(self, cfg):
        nn.Module.__init__(self)  # LanguageModel's parts are here in another order
        self.cfg, K, R = cfg, cfg.n_stored, cfg.n_loop
        attention = QueryAttention if cfg.kv == "share" else model_gpt.Attention
        blocks = lambda n: nn.ModuleList(Block(cfg, attention) for _ in range(n))
        routers = lambda: nn.ModuleList(Router(cfg, 1) for _ in range(R))
        self.wte = nn.Embedding(cfg.vocab_size, cfg.n_embd)
        self.drop = nn.Dropout(cfg.dropout)
        self.first, self.last = blocks(cfg.n_outside // 2), blocks(cfg.n_outside // 2)
        self.blocks = blocks(K)  # shared
        self.norm = RMSNorm(cfg.n_embd, cfg.norm_eps)
        self.head = nn.Linear(cfg.n_embd, cfg.vocab_size, bias=False)
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
        cycle = cfg.share.endswith("cycle")  # Table 5, of recursion r's layer i
        block = lambda r, i: self.blocks[i if cycle else (r * K + i) // R]
        self.layers_of = [[block(r, i) for i in range(K)] for r in range(R)]
        init_weights(self, cfg.n_layer)
        self.squash = torch.tanh if cfg.router_func == "tanh" else torch.sigmoid
        self.set_step(math.inf)

    @property
    def n_loop(self):
        """In eval mode the most recursions of a token."""
        return self.cfg.exit_loop or self.cfg.n_loop

    def forward(self, idx, targets=None, cache=None, n_valid=None):
        """As in every model. aux also has the router's metrics, and tokens by depth."""
        cfg, R, expert = self.cfg, self.cfg.n_loop, self.cfg.router == "expert"
        if targets is None or cache is not None or not idx.numel() or cfg.router == "none":
            return super().forward(idx, targets, cache, n_valid)
        h, taken, routing = self.states(idx, top_k=self.training)
        logits = upcast(self.head(h))
        loss = cross_entropy(logits, targets)
        depths = {f"depth{d}": (taken == d).float().mean() for d in range(1, R + 1)}
        aux = {"ce": loss, **depths}
        if expert and not self.training:
            self.reached.append((taken == self.n_loop).any(0))
            h, _, routing = self.states(idx, top_k=True)
            aux["ce_topk"] = cross_entropy(upcast(self.head(h)), targets)
        if expert:
            more, aux["aux"] = self.expert_loss(routing)
            right = decided = torch.zeros_like(loss)
            for _, decides, active, chosen in routing[1:]:  # recursion 1 takes all
                right = right + (((decides >= 0) == chosen) & active).sum()
                decided = decided + active.sum()
            aux["router_accuracy"] = right / decided.clamp(min=1)
        else:
            more, aux["balance"] = self.token_loss(routing)
            p = routing[1].flatten(0, -2)  # (B T, R)
            aux["entropy"] = torch.special.entr((p / p.sum(-1, keepdim=True)).mean(0)).sum()
            # (the fullest depth's tokens - the mean) / the mean
            aux["maxvio"] = R * torch.stack([aux[name] for name in depths]).max() - 1
        loss = loss + more if self.training else loss
        return logits, loss, {name: x.detach() for name, x in aux.items()}

    def hidden(self, idx, cache=None, n_valid=None):
        top_k = self.training and cache is None
        return self.states(idx, top_k, cache, n_valid)[0]

    def states(self, idx, top_k, cache=None, n_valid=None):
        """idx (B, T) -> final states (B, T, C), recursions taken (B, T), what the loss
        needs of the routing. top_k: as in training, else as in decoding."""
        cfg, h, k = self.cfg, self.drop(self.wte(idx)), None
        R = cfg.n_loop if self.training else self.n_loop
        tokens = AllTokens(cfg, h, cache, n_valid)
        for block in self.first:
            h = block(h, 0, tokens)
        if cfg.router == "expert":
            if top_k:
                T = idx.size(1)
                k = self.sizes if T == cfg.block_size else cfg.sizes(T, self.step)
            h, taken, routing = self.expert_choice(h, tokens, R, k)
        elif cfg.router == "token":
            h, taken, routing = self.token_choice(h, tokens, R)
        else:
            taken, routing = tokens.chosen * R, None
            for r in range(1, R + 1):
                shares = r > 1 and cfg.kv == "share"
                subset = Subset(tokens, r, tokens.chosen) if shares else tokens
                h = self.recursion(r, h, subset)
        for block in self.last:
            h = block(h, 1, tokens)
        if cache is not None:
            cache.advance(tokens.slots)
        return self.norm(h), taken, routing

    @torch.no_grad()
    def recursions(self, idx):
        """Recursions that each token of idx takes in decoding, (B, T)."""
        return self.states(idx, top_k=False)[1]

    def init_cache(self, batch_size, max_len):
        return Cache(self.cfg, *self.cache_sizes(batch_size, max_len))

    def set_step(self, step):
        """For the capacity warm-up: sizes are k_1 .. k_R of a whole sequence."""
        cfg, self.step, self.reached = self.cfg, step, []
        self.sizes = cfg.sizes(cfg.block_size, step)
        if cfg.capacity_warmup:  # a compiled step is for any size from the second on
            torch.compiler.config.allow_unspec_int_on_nn_module = True

    def end_evaluation(self, total):
        """dead: positions never in the last recursion (Table 10: in 500 sequences)."""
        if self.cfg.router != "expert":
            return {}
        none = torch.zeros(self.cfg.block_size)  # of a process without batches
        reached = total(*sum((x.cpu() for x in self.reached), none).tolist())
        return {"dead": reached.count(0) / len(reached)}

    @torch.no_grad()
    def end_step(self, logged):
        """loss_free moves biases against f, which is logged over all processes."""
        cfg, R = self.cfg, self.cfg.n_loop
        if cfg.router == "token" and cfg.balance == "loss_free":
            f = torch.tensor([logged[f"depth{d}"] for d in range(1, R + 1)])
            excess = (f - 1 / R).round(decimals=6)  # less is rounding
            self.balance_bias -= cfg.balance_rate * excess.sign().to(self.balance_bias)

    def flops_per_token(self, paper=False, step=math.inf):
        """As in model_gpt, times the fraction of tokens that need it at this step.
        paper, as Appendix C: forward, half of T x T, G = H, no head, no routers."""
        cfg, T, C = self.cfg, self.cfg.block_size, self.cfg.n_embd
        kv = 2 * C * (C if paper else cfg.n_kv_head * cfg.head_dim)  # weights of a layer
        rest = 2 * C * C + sum(p.numel() for p in self.blocks[0].mlp.parameters())
        # summed over layers: fractions of tokens, of new keys, of pairs with keys
        tokens = fresh = pairs = float(cfg.n_outside)
        for r in range(1, cfg.n_loop + 1):
            c = cfg.capacity(r, step)
            n = c * cfg.n_stored
            tokens += n
            fresh += 0 if r > 1 and cfg.kv == "share" else n
            pairs += n * (c if cfg.kv == "recursion" else 1)
        weights = tokens * rest + fresh * kv
        if paper:
            return 2 * weights + 2 * C * T * pairs
        weights += cfg.vocab_size * C
        weights += sum(p.numel() for name, p in self.named_parameters() if "router" in name)
        return 6.0 * weights + 6.0 * C * (T * pairs + tokens)

    def budget_flops(self, step):  # of a token, as max_flops counts
        return self.flops_per_token(self.cfg.paper_flops, step)


@torch.no_grad()
def convert(model, weights):
    """Start from the weights of a model_gpt of the same sizes (init: Table 9)."""
    cfg, own, K = model.cfg, model.state_dict(), model.cfg.n_stored
    for name in [name for name in weights if not name.startswith("blocks.")]:
        own[name].copy_(weights[name])
    unrolled = [*model.first, *sum(model.layers_of, []), *model.last]  # each layer's block
    edge = cfg.n_outside // 2
    inner = range(edge, cfg.n_layer - edge)
    for k, block in enumerate([*model.blocks, *model.first, *model.last]):
        layers = [n for n, other in enumerate(unrolled) if other is block]
        if k < K and cfg.init != "average":
            spaced = round(edge + k * ((len(inner) - 1) / max(1, K - 1)))
            origin = {"stepwise": [spaced], "lower": [inner[k]], "upper": [inner[k - K]]}
            layers = origin.get(cfg.init, [])
        for name, p in block.named_parameters() if layers else ():
            p.copy_(sum(weights[f"blocks.{n}.{name}"] for n in layers) / len(layers))

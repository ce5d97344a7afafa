"""
Mixture-of-Recursions (MoR): tied layers in loops; each token takes as many as it needs.

R = n_loop recursions F_1 .. F_R, of K layers each, share K blocks. A router, linear in a
token's state h, sends easy tokens through few recursions and hard ones through many
(router=none: all through all). share=middle_*: a first and a last layer stand outside.

router=expert (Section 2.2.1): recursion r chooses its tokens A_r among A_{r-1} by a
score s = w_r . h, in each sequence. A_0 = A_1 = all tokens (gated and in the loss too).
    A_r = the k_r of A_{r-1} with the highest s,   k_r = max(1, floor(T (R-r+1) / R))
    h[A_r] <- h[A_r] + alpha sigmoid(s) F_r(h[A_r])     (Eq. 2.1)

router=token: each token chooses its depth i once, from its state h_1 before F_1.
    p = softmax(W h_1),   i = argmax p
    h <- h_1 + p_i F_i(.. F_1(h_1))                     (Eq. 2.2)
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
attend to those that take the same recursion. share: to all, by their keys in the first.
share_update (the authors' code): as share, but the chosen have new keys in it.

fast=false runs all tokens and masks out those not chosen. fast=true, and all decoding,
gathers the chosen ones and scatters them back. tests/test_mor.py: Routed does it by hand.

Departures. Token choice gates once, and its z-loss weighs 1e-5, as in the authors' code
(paper: at every step, 1e-3). Left out: the random router (Table 10).

Shapes: B batch, T new tokens, S keys, C width, G key/value heads, D head size, N packed
tokens, n chosen tokens of the fullest row. The code counts recursions from 0.

Paper: Bae et al. 2025 (2507.10524); github.com/raymin0223/mixture_of_recursions.
"""
import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F

import model_gpt
from model_gpt import (BaseConfig, Block, Context, KVCache, LanguageModel, RMSNorm,
                       apply_rope, choice, init_weights, make_bias, mlp_width, upcast)


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
        extra = float(self.router == "none")  # 0: (R - r) / R of them, 1: all
        if self.router == "expert" and step < self.capacity_warmup:
            extra = 0.5 * (1 + math.cos(math.pi * step / self.capacity_warmup))
        return (self.n_loop - r + r * extra) / self.n_loop

    def size(self, r, T, step=math.inf):
        """k_r: how many of T tokens that is."""
        return max(1, int(T * self.capacity(r, step) + 1e-9))


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


# ---- the model: routing, and the recursions ----

class Choice(NamedTuple):
    """What one recursion of expert choice did, (B, T) each."""
    s: torch.Tensor
    decides: torch.Tensor  # the scores that decide in decoding
    active: torch.Tensor  # who competed, A_{r-1}
    chosen: torch.Tensor  # A_r


class Model(LanguageModel):
    runs_blocks_once = False

    def __init__(self, cfg):
        nn.Module.__init__(self)  # its parts, in another order
        self.cfg, K, R = cfg, cfg.n_stored, cfg.n_loop
        blocks = lambda n: nn.ModuleList(Block(cfg, Attention) for _ in range(n))
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
        """The most recursions of a token: in eval mode exit_loop, if set."""
        return self.cfg.n_loop if self.training else self.cfg.exit_loop or self.cfg.n_loop

    def expert_choice(self, h, all_tokens, causal):
        """Recursions choose: the top k or, if causal, tokens with s >= 0. h (B, T, C)
        -> h after them, how many each token took (B, T), a Choice of each recursion."""
        cfg, T, choices = self.cfg, h.size(1), []
        active, taken = all_tokens.real, 0  # (B, T): A_{r-1}
        for r in range(self.n_loop):
            s = decides = self.routers[r](h)[..., 0]  # (B, T)
            if cfg.causal == "aux_router":
                decides = self.aux_routers[r](h.detach())[..., 0]
            chosen, k = active, None  # the first takes all
            if r and causal:
                chosen = active & (decides >= 0)
            elif r:
                k = self.sizes[r] if T == cfg.block_size else cfg.size(r, T, self.step)
                top = s.masked_fill(~active, -math.inf).topk(k, 1).indices
                chosen = torch.zeros_like(active).scatter(1, top, True)
            y = self.recursion(r, h, all_tokens, chosen, k)  # 0 where not chosen
            h = h + (cfg.alpha * self.squash(s)[..., None] * y).to(h.dtype)
            choices.append(Choice(s, decides, active, chosen))
            active, taken = chosen, taken + chosen.long()
        return h, taken, choices

    def expert_loss(self, choices):
        """What is added to the loss, and metrics."""
        bce = z = right = decided = 0
        for r, (s, decides, active, chosen) in enumerate(choices):
            mean = lambda x: (x * active).sum() / active.sum()
            bce = bce + mean(F.binary_cross_entropy_with_logits(decides, chosen.to(s),
                                                                reduction="none"))
            z = z + mean(s ** 2)
            if r:  # as in decoding, where the first takes all
                right = right + (((decides >= 0) == chosen) & active).sum()
                decided = decided + active.sum()
        accuracy = right / decided.clamp(min=1) if len(choices) > 1 else torch.zeros(())
        metrics = {"aux": bce, "router_accuracy": accuracy}
        return self.cfg.aux_weight * bce + self.cfg.z_loss * z, metrics

    def token_choice(self, h1, all_tokens):
        """As expert_choice, but tokens choose a depth (router=none: all take all)."""
        if self.cfg.router == "none":
            for r in range(self.n_loop):
                h1 = self.recursion(r, h1, all_tokens)
            return h1, torch.full_like(all_tokens.pos, self.n_loop), None
        x, (scores, p, depth) = h1, self.choose_depth(h1)
        for r in range(self.n_loop):
            takes = (depth >= r) & all_tokens.real  # (B, T)
            y = self.recursion(r, x, all_tokens, takes)
            x = torch.where(takes[..., None], y, x)
        return self.exit(h1, x, p, depth), depth + 1, (scores, p, depth)

    def choose_depth(self, h1):
        """h_1 (..., C) -> scores and p (..., R), depths (...)."""
        scores = self.router(h1)
        soft = self.cfg.router_func == "softmax"
        p = scores.softmax(-1) if soft else self.cfg.alpha * scores.sigmoid()
        depth = (p + self.balance_bias).argmax(-1)
        return scores, p, depth.clamp(max=self.n_loop - 1)

    def exit(self, h1, x, p, depth):  # h_1 + p_i x, Eq. 2.2
        return h1 + (p.gather(-1, depth[..., None]) * x).to(h1.dtype)

    def token_loss(self, routing):
        """As expert_loss. maxvio: (the fullest depth's tokens - the mean) / the mean."""
        cfg, R, (scores, p, depth) = self.cfg, self.cfg.n_loop, routing
        f = torch.stack([(depth == d).to(p.dtype).mean() for d in range(R)])
        mean = lambda p: p.flatten(0, -2).mean(0)  # (R,)
        balance = R * (f * mean(p)).sum()
        entropy = torch.special.entr(mean(p / p.sum(-1, keepdim=True))).sum()
        metrics = {"balance": balance, "maxvio": R * f.max() - 1, "entropy": entropy}
        z = scores.logsumexp(-1).square().mean()
        weight = cfg.balance_weight if cfg.balance == "loss" else 0.0
        return weight * balance + cfg.z_loss * z, metrics

    def recursion(self, r, h, all_tokens, chosen=None, n=None):
        """F_r(h) (B, T, C), 0 where not chosen (B, T). Recursion 0 takes all, as any
        with chosen=None. n: the most chosen tokens of a row, if known."""
        cfg, cache, K = self.cfg, all_tokens.cache, self.cfg.n_stored
        start = cfg.n_outside + (0 if cfg.kv == "share" else r * K)
        if r == 0 or chosen is None:
            return self.run(h, self.layers_of[r], all_tokens, start)
        if not torch.is_grad_enabled() and not chosen.any():
            # with gradients it runs: each parameter needs one
            for i in range(K if cfg.kv == "share_update" and cache is not None else 0):
                cache.write(start + i, *all_tokens.new[cfg.n_outside + i])
            return torch.zeros_like(h)
        if cfg.fast or cache is not None:
            tokens = Gathered(all_tokens, chosen, r, n)
        else:
            tokens = Masked(all_tokens, chosen)
        y = self.run(tokens.gather(h), self.layers_of[r], tokens, start)  # (B, n, C)
        if cache is not None and cfg.kv == "recursion":
            tokens.cache.advance()
        return tokens.scatter(torch.zeros_like(h), y)

    def run(self, h, blocks, context, start=0):
        """h after these layers; start: the first one's number in the cache, where the
        first layer is 0, the last 1, and recursions follow."""
        for layer, block in enumerate(blocks, start):
            h = block(h, layer, context)
        return h

    def forward(self, idx, targets=None, cache=None, n_valid=None):
        """As in every model. aux also has the router's metrics, and tokens by depth."""
        cfg, expert = self.cfg, self.cfg.router == "expert"
        if targets is None or cache is not None or not idx.numel() or cfg.router == "none":
            return super().forward(idx, targets, cache, n_valid)
        h, taken, routing = self.states(idx, causal=not self.training)
        logits, loss, aux = self.predict(h, targets)
        if expert and not self.training:
            self.reached.append((taken == self.n_loop).any(0))
            h, _, routing = self.states(idx, causal=False)
            aux["ce_topk"] = self.predict(h, targets)[2]["ce"]
        more, metrics = (self.expert_loss if expert else self.token_loss)(routing)
        for d in range(1, cfg.n_loop + 1):
            metrics[f"depth{d}"] = (taken == d).float().mean()
        aux |= {name: x.detach() for name, x in metrics.items()}
        return logits, loss + more if self.training else loss, aux

    def hidden(self, idx, cache=None, n_valid=None):
        causal = not self.training or cache is not None
        return self.states(idx, causal, cache, n_valid)[0]

    def states(self, idx, causal, cache=None, n_valid=None):
        """idx (B, T) -> final states (B, T, C), recursions taken (B, T), what the loss
        needs of the routing."""
        h = self.drop(self.wte(idx))
        all_tokens = AllTokens(self.cfg, h, cache, n_valid, self.training)
        h = self.run(h, self.first, all_tokens)
        if self.cfg.router == "expert":
            h, taken, routing = self.expert_choice(h, all_tokens, causal)
        else:
            h, taken, routing = self.token_choice(h, all_tokens)
        h = self.run(h, self.last, all_tokens, start=1)
        if cache is not None:
            cache.advance()
        return self.norm(h), taken, routing

    @torch.no_grad()
    def recursions(self, idx):
        """Recursions that each token of idx takes in decoding, (B, T)."""
        return self.states(idx, causal=True)[1]

    def set_step(self, step):
        """For the capacity warm-up: sizes[r] is k_r of a whole sequence."""
        cfg, self.step, self.reached = self.cfg, step, []
        self.sizes = [cfg.size(r, cfg.block_size, step) for r in range(cfg.n_loop)]
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
        for r in range(cfg.n_loop):
            c = cfg.capacity(r, step)
            n = c * cfg.n_stored
            tokens += n
            fresh += 0 if r and cfg.kv == "share" else n
            pairs += n * (c if cfg.kv == "recursion" else 1)
        weights = tokens * rest + fresh * kv
        if paper:
            return 2 * weights + 2 * C * T * pairs
        weights += cfg.vocab_size * C
        weights += sum(p.numel() for name, p in self.named_parameters() if "router" in name)
        return 6.0 * weights + 6.0 * C * (T * pairs + tokens)

    def budget_flops(self, step):  # of a token, as max_flops counts
        return self.flops_per_token(self.cfg.paper_flops, step)

    # For serve.py: N packed tokens, each at its own recursion, depth (N,). state: their
    # h and h_1, (N, 2 C). context: their keys.

    def embed(self, idx, context):
        h = self.run(self.drop(self.wte(idx))[None], self.first, context)[0]  # (N, C)
        return torch.cat([h, h], -1)

    def scores(self, routers, h, depth):
        """Each token's score (N,) by the router of its recursion."""
        s = torch.cat([router(h) for router in routers], 1)
        return s.gather(1, depth[:, None].to(h.device))[:, 0]

    def takes(self, state, depth):
        """Whether each token goes on to recursion depth > 0, (N,) bool."""
        h, h1 = state.chunk(2, -1)
        if self.cfg.router == "none":
            return torch.ones_like(depth, dtype=torch.bool)
        if self.cfg.router == "token":
            return self.choose_depth(h1)[2] >= depth.to(h.device)
        routers = self.aux_routers if self.cfg.causal == "aux_router" else self.routers
        return self.scores(routers, h, depth) >= 0

    def loop(self, state, depth, context):
        """State after recursion depth (share=*sequence: the same for all)."""
        h, h1 = state.chunk(2, -1)
        y = self.run(h[None], self.layers_of[int(depth[0])], context)[0]
        if self.cfg.router == "expert":
            s = self.scores(self.routers, h, depth)
            y = h + (self.cfg.alpha * self.squash(s)[:, None] * y).to(h.dtype)
        return torch.cat([y, h1], -1)

    def finish(self, state, context):
        """The final states (N, C) of tokens that take no further recursion."""
        h, h1 = state.chunk(2, -1)
        if self.cfg.router == "token":
            h = self.exit(h1, h, *self.choose_depth(h1)[1:])
        return self.norm(self.run(h[None], self.last, context)[0])


# ---- what the tokens of a recursion attend to ----

class Attention(model_gpt.Attention):
    """Makes no keys where they are there already (kv=share)."""

    def forward(self, x, layer, context):
        if context.makes_keys(layer):
            return super().forward(x, layer, context)
        q = self.q_norm(self.heads(self.wq(x)))  # (B, H, T, D)
        y = context.attend(layer, q, None, None)
        return self.wo(y.transpose(1, 2).flatten(2))


class AllTokens(Context):
    """The context of layers that all tokens take. real (B, T): what is no padding. By
    layer, for later recursions: keys and values of new tokens (new), of all (kv)."""

    def __init__(self, cfg, x, cache=None, n_valid=None, training=False):
        super().__init__(cfg, x, cache, n_valid, training)
        B, T = x.shape[:2]
        self.pos, self.new, self.kv = self.pos.expand(B, T), {}, {}
        n_real = T if cache is None else cache.new[:, None]
        self.real = torch.arange(T, device=x.device).expand(B, T) < n_real

    def makes_keys(self, layer):
        return layer not in self.kv

    def attend(self, layer, q, k, v):
        """As model_gpt's. k, v None: the layer's keys and values are there."""
        if self.rope:
            q = apply_rope(q, *self.rope)
            k = k if k is None else apply_rope(k, *self.rope)
        k, v = self.kv[layer] if k is None else self.extend(layer, k, v)
        return self.attention(q, k, v, self.bias, self.dropout)

    def extend(self, layer, k, v):
        """What queries attend to, (B, G, S, D), with k, v (B, G, T, D) of the new tokens."""
        self.new[layer] = self.kv[layer] = k, v
        if self.cache is not None:
            self.kv[layer] = [x.to(k.dtype) for x in self.cache.write(layer, k, v)]
        return self.kv[layer]


class Subset(AllTokens):
    """The context of recursion r > 0, of the chosen (B, T) among all tokens."""

    def __init__(self, all_tokens, chosen):
        self.cfg, self.all_tokens, self.chosen = all_tokens.cfg, all_tokens, chosen
        self.attention, self.dropout = all_tokens.attention, all_tokens.dropout
        self.cache, self.rope, self.bias = all_tokens.cache, all_tokens.rope, all_tokens.bias
        self.new, self.kv = {}, all_tokens.kv if self.cfg.kv == "share" else {}

    def extend(self, layer, k, v):
        i = (layer - self.cfg.n_outside) % self.cfg.n_stored  # its number in the recursion
        if self.cfg.kv == "recursion":
            return super().extend(i, k, v)  # of the recursion's own cache
        old = self.all_tokens.new[self.cfg.n_outside + i]  # share_update
        scattered = [self.scatter(x.transpose(1, 2), new.transpose(1, 2)).transpose(1, 2)
                     for x, new in zip(old, (k, v))]
        return super().extend(layer, *scattered)


class Masked(Subset):
    """The naive path: all tokens run, and only those of the chosen count."""

    def __init__(self, all_tokens, chosen):
        super().__init__(all_tokens, chosen)
        if self.cfg.kv == "recursion":  # to oneself too, lest a softmax is empty
            itself = torch.eye(chosen.size(1), dtype=torch.bool, device=chosen.device)
            visible = chosen[:, None, None] | itself  # (B, 1, T, T)
            self.bias = self.bias.masked_fill(~visible, -math.inf)

    def gather(self, x):
        return x

    def scatter(self, x, new):
        """x (B, T, ...) with those of new (B, T, ...) that are chosen."""
        chosen = self.chosen.view(*self.chosen.shape, *[1] * (x.dim() - 2))
        return torch.where(chosen, new, x)


class Gathered(Subset):
    """The fast path: the chosen tokens run alone, in order, padded to n in each row.
    places (B, n): where they stand among all B T; padding reads the last one,
    and is written to a spare place behind."""

    def __init__(self, all_tokens, chosen, r, n=None):
        super().__init__(all_tokens, chosen)
        (B, T), device = chosen.shape, chosen.device
        if n is None:
            compiling = torch.compiler.is_compiling()  # no shape may depend on data
            n = T if compiling else max(1, int(chosen.sum(1).max()))
        rows = torch.arange(B, device=device)[:, None]
        at = torch.where(chosen, torch.arange(T, device=device), T)
        at = at.topk(n, 1, largest=False).values  # (B, n): T is padding
        self.places = torch.where(at < T, T * rows + at, B * T)
        self.rope = all_tokens.rope and [self.gather(x[:, 0].expand(B, T, -1))[:, None]
                                         for x in all_tokens.rope]  # (B, 1, n, D)
        pos, self.bias = self.gather(all_tokens.pos), None
        own_cache = self.cfg.kv == "recursion" and self.cache is not None
        if own_cache:
            self.cache = self.cache.later[r - 1]
            pos = self.cache.place(n, chosen.sum(1))
        if own_cache or self.cfg.kv != "recursion":  # else causal, being in order
            n_keys = T if self.cache is None else self.cache.end
            self.bias = make_bias(self.cfg, pos, n_keys, all_tokens.dtype)

    def gather(self, x):
        """x (B, T, ...) of all tokens -> (B, n, ...) of the chosen ones."""
        x = x.flatten(0, 1)
        chosen = x.index_select(0, self.places.flatten().clamp(max=len(x) - 1))
        return chosen.view(*self.places.shape, *x.shape[1:])

    def scatter(self, x, new):
        """x (B, T, ...) with new (B, n, ...) in the chosen tokens' places."""
        flat = torch.cat([x.flatten(0, 1), torch.zeros_like(x[:1, 0])])  # the spare
        flat = flat.index_copy(0, self.places.flatten(), new.flatten(0, 1))
        return flat[:-1].view(x.shape)


class RecursionCache(KVCache):
    """Of tokens that took one recursion, in order. Grows where they are many."""

    def place(self, n, n_new):
        if int((self.lengths + n_new).max()) > self.max_len:
            more = 0, 0, 0, self.most + 1 - self.max_len  # the last slot is padding's
            with torch.inference_mode(False):  # as in KVCache
                self.k = [F.pad(x[:, :, :-1], more) for x in self.k]
                self.v = [F.pad(x[:, :, :-1], more) for x in self.v]
            self.max_len = self.most
        return super().place(n, n_new)


class Cache(KVCache):
    """Of layers in which all tokens have keys. later: RecursionCaches (kv=recursion)."""

    def __init__(self, cfg, batch_size, max_len, device, dtype):
        K, R = cfg.n_stored, cfg.exit_loop or cfg.n_loop
        own = cfg.kv == "recursion" and cfg.router != "none"
        layers = cfg.n_outside + K * (1 if own or cfg.kv == "share" else R)
        super().__init__(cfg, batch_size, max_len, device, dtype, layers)
        self.later = []
        for r in range(1, R if own else 1):
            size = cfg.size(r, max_len)
            self.later.append(RecursionCache(cfg, batch_size, size, device, dtype, K))
            self.later[-1].most = max_len

    def nbytes(self):
        return super().nbytes() + sum(cache.nbytes() for cache in self.later)

    def reset(self, rows=None):
        super().reset(rows)
        for cache in self.later:
            cache.reset(rows)


Model.cache_type = Cache


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

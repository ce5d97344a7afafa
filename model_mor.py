"""
Mixture-of-Recursions (MoR): tied layers in loops; each token takes as many as it needs.

R = n_loop recursions F_1 .. F_R of K layers each share K blocks. A router, linear in a
token's state h, sends easy tokens through few recursions and hard ones through many. A
first and a last layer stand outside, for all tokens.

router=expert (Section 2.2.1): recursion r chooses its tokens A_r among A_{r-1} by a
score s = w_r . h, in each sequence. A_0 is all tokens and, as k_1 = T, A_1 too.
    A_r = the k_r of A_{r-1} with the highest s,   k_r = max(1, floor(T (R-r+1) / R))
    h[A_r] <- h[A_r] + alpha sigmoid(s) F_r(h[A_r])     (2.1)
F_r has residuals, F_r(h) = h + .., so that h counts twice.

router=token: each token chooses its depth i once, from its state h_1 before F_1.
    p = softmax(W h_1),   i = argmax p
    h <- h_1 + p_i F_i(.. F_1(h_1))                     (2.2)
The loss balance_weight R sum_i f_i mean(p_i), f_i the fraction of tokens with depth i,
keeps depths in balance. loss_free: a bias b in argmax(p + b) moves against f.

    first -> F_1 (all) -> F_2 (2/3) -> F_3 (1/3) -> last
      a         a            a            a           a
      b         b            b            .           b
      c         c            .            .           c
R = 3: token c takes one recursion, b two and a three.

Decoding. Top k depends on later tokens, so expert choice decodes by s >= 0, from r = 2 on.
The loss aux_weight BCE(s, was it chosen), for r = 1 too as in the authors' code, teaches
that to s or, with causal=aux_router, to a second router on detached states. In eval mode
"ce" is of decoding, "ce_topk" of top k.

Keys and values (Section 2.2.2). kv=recursion: chosen tokens attend to those that take
the same recursion. kv=share: to all tokens, by their keys in F_1.

Departures. Token choice gates once, and its z-loss weighs 1e-5, as in the authors' code
(paper: at every step, 1e-3). Attention is tied, as in the paper (and in that code since
commit 82c97f2). Weights start as model_gpt's. With kv=share, F_2 .. F_R make keys that
nobody reads, 1 % of a step. Left out: random routers, shared keys with updates, the
capacity warm-up (off in that code).

Shapes: B batch, T new tokens, S keys, C width, G key/value heads, D head size, n chosen
tokens of the fullest row. Recursions count from 1, layers and stored blocks from 0.
Paper: Bae et al. 2025 (2507.10524); github.com/raymin0223/mixture_of_recursions.
"""
import math
from dataclasses import dataclass, replace

import torch
import torch.nn as nn
import torch.nn.functional as F

from decoding import Cached, KVCache
from model_gpt import (BaseConfig, Block, Context, LanguageModel, attention_bias,
                       choice, cross_entropy, init_weights, mlp_width, upcast, visible_keys)


@dataclass
class Config(BaseConfig):
    n_layer: int = 8             # unrolled layers, first and last too
    n_loop: int = 3              # R: recursions
    share: str = choice("middle_cycle", "cycle", "sequence", "middle_sequence")  # weights, Table 5
    router: str = choice("expert", "token", "none")  # none: all take all, the baseline
    kv: str = choice("recursion", "share")  # keys: each recursion's own, or F_1's for all
    router_arch: str = choice("linear", "mlp", "wide_mlp")
    router_func: str = ""        # expert: sigmoid, tanh; token: softmax, sigmoid ("": first)
    alpha: float = 0.1           # factor of sigmoid and tanh
    causal: str = choice("aux_loss", "aux_router")  # expert: what decides in decoding
    aux_weight: float = 0.001    # expert: weight of learning that
    balance: str = choice("loss", "loss_free", "none")  # token: what balances depths
    balance_weight: float = 0.1  # token: weight of that loss
    balance_rate: float = 0.001  # token: a step of loss_free's biases
    z_loss: float = -1.0         # weight of logsumexp(s)^2 (-1: token 1e-5, expert 0)
    exit_loop: int = 0           # in eval mode the most recursions (0: n_loop)
    init: str = choice("average", "stepwise", "lower", "upper", "random")  # of convert, Table 9
    n_mlp: int = 0               # hidden width of the MLP (0: 8/3 n_embd, gelu: 4)
    mlp: str = choice("swiglu", "gelu", "geglu")
    pos: str = choice("rope", "none")
    qk_norm: bool = False        # RMSNorm on each head's query and key, before RoPE
    tie_embeddings: bool = True  # the head is the embedding matrix
    scale_embeddings: bool = False  # embeddings times sqrt(n_embd), as in Gemma

    # init_from may be a run of these models (convert), or one with other values of these keys
    CONVERTS_FROM = ("gpt",)
    NOT_IN_WEIGHTS = ("exit_loop", "aux_weight", "balance_weight", "balance_rate", "z_loss")

    def __post_init__(self):
        super().__post_init__()
        token = self.router == "token"
        self.router_func = self.router_func or ("softmax" if token else "sigmoid")
        if self.z_loss == -1:
            self.z_loss = 1e-5 if token else 0.0
        check(self)
        self.n_outside = 2 if self.share.startswith("middle") else 0  # first, last
        K = self.n_stored = (self.n_layer - self.n_outside) // self.n_loop
        # the inner layers' stored blocks: 0 1 | 0 1 | 0 1, sequence: 0 0 | 0 1 | 1 1
        cycle = self.share.endswith("cycle")
        self.order = [i % K if cycle else i // self.n_loop for i in range(self.n_loop * K)]
        self.n_mlp = self.n_mlp or mlp_width(self)


# ---- the method: which tokens take which recursion ----

class Model(LanguageModel):
    """tokens: the context of a call, tokens.subset gives that of a recursion; context.kept marks
    those that change, tokens.kept is A_0."""
    runs_blocks_once = False

    def __init__(self, cfg):
        R, n_outside = cfg.n_loop, cfg.n_outside // 2
        blocks = lambda n: nn.ModuleList(self.make_block(cfg, i) for i in range(n))
        super().__init__(cfg, blocks(cfg.n_stored))  # the shared ones
        self.first, self.last = blocks(n_outside), blocks(n_outside)
        depths = [f"depth{d}" for d in range(1, R + 1)]
        if cfg.router == "expert":
            self.routers = nn.ModuleList(Router(cfg, 1) for _ in range(R))
            if cfg.causal == "aux_router":
                self.aux_routers = nn.ModuleList(Router(cfg, 1) for _ in range(R))
            self.eval_metrics = ["ce_topk", "router_accuracy", *depths]  # beside ce
        elif cfg.router == "token":
            self.router = Router(cfg, R)
            self.register_buffer("balance_bias", torch.zeros(R))
            self.eval_metrics = [*depths, "maxvio"]
        self.cached_context_type = CachedTokens
        init_weights(self, cfg.n_layer)

    def make_block(self, cfg, number):
        """A shared, first or last block, called as block(h, layer, context)."""
        return Block(cfg)

    def states(self, idx, top_k, context=None):
        """idx (B, T) -> final states (B, T, C), recursions taken (B, T), and what the loss of
        the router takes. top_k: expert choice as in training, else as in decoding."""
        cfg, h = self.cfg, self.drop(self.wte(idx))
        R = cfg.n_loop if self.training and context is None else self.loops_to_run
        tokens = context or AllTokens(cfg, h)
        for block in self.first:
            h = block(h, -2, tokens)
        if cfg.router == "expert":
            h, depth, decisions = self.expert_choice(h, tokens, R, top_k)
        elif cfg.router == "token":
            h, depth, decisions = self.token_choice(h, tokens, R)
        else:
            depth, decisions = tokens.kept * R, None
            for r in range(1, R + 1):
                h = self.recursion(r, h, tokens.subset(r, tokens.kept))
        for block in self.last:
            h = block(h, -1, tokens)
        return self.norm(h), depth, decisions

    def expert_choice(self, h, tokens, R, top_k):
        """h (B, T, C) -> h after R recursions, and what expert_loss takes. top_k=False:
        choose as in decoding."""
        T, n_loop = h.size(1), self.cfg.n_loop
        active, decisions = tokens.kept, []  # A_0
        for r in range(1, R + 1):
            s = decides = self.routers[r - 1](h)[..., 0]  # w_r . h, (B, T)
            if self.cfg.causal == "aux_router":
                decides = self.aux_routers[r - 1](h.detach())[..., 0]
            k_r = max(1, T * (n_loop - r + 1) // n_loop) if top_k else None
            if r == 1:
                chosen = active  # A_1
            elif top_k:
                top = s.masked_fill(~active, -math.inf).topk(k_r, 1).indices
                chosen = torch.zeros_like(active).scatter(1, top, True)  # A_r
            else:
                chosen = active & (decides >= 0)  # decoding
            h = self.recursion(r, h, tokens.subset(r, chosen, k_r), s)
            decisions.append((s, decides, active, chosen))
            active = chosen
        s, decides, active, chosen = map(torch.stack, zip(*decisions))  # (R, B, T) each
        return h, chosen.sum(0), (s, decides, active, chosen)

    def token_choice(self, h1, tokens, R):
        """h_1 (B, T, C) -> h after at most R recursions, and what token_loss takes."""
        h, (scores, p, depth) = h1, self.choose_depth(h1, R)
        for r in range(1, R + 1):
            h = self.recursion(r, h, tokens.subset(r, tokens.kept & (depth >= r)))
        return self.exit(h1, h, p, depth), depth, (scores, p, depth)

    def choose_depth(self, h1, most):
        """h_1 (..., C) -> scores and p (..., R), depths (...) from 1 to `most`."""
        scores = self.router(h1)
        p = self.gate(scores)
        depth = 1 + (p + self.balance_bias).argmax(-1)  # i
        return scores, p, depth.clamp(max=most)  # (2.2) has the p of where it exits

    def exit(self, h1, h, p, depth):
        return h1 + (p.gather(-1, depth[..., None] - 1) * h).to(h1.dtype)  # (2.2)

    def recursion(self, r, h, context, s=None):
        """h (B, T, C) -> h in which context.kept have become F_r(h) or, given scores
        s (B, T), h + alpha gate(s) F_r(h). The fast path: GatheredSubset tokens run alone. No
        context: nobody goes on."""
        if context is None:
            return h
        gathered, K, old = isinstance(context, GatheredSubset), self.cfg.n_stored, h
        if gathered:
            old, s = context.gather(h), s if s is None else context.gather(s)
        new = old
        for layer in range((r - 1) * K, r * K):
            new = self.blocks[self.cfg.order[layer]](new, layer, context)  # F_r(h)
        if s is not None:
            new = old + (self.gate(s)[..., None] * new).to(old.dtype)  # (2.1)
        new = torch.where(context.kept[..., None], new, old)
        return context.scatter(h, new) if gathered else new

    def gate(self, s):
        """softmax(s), alpha sigmoid(s) or alpha tanh(s)."""
        if self.cfg.router_func == "softmax":
            return s.softmax(-1)
        return self.cfg.alpha * getattr(torch, self.cfg.router_func)(s)

    def forward(self, idx, targets=None, cache=None, n_valid=None):
        """As in every model. aux also has tokens by depth, and the router's metrics."""
        cfg = self.cfg
        if targets is None or cache is not None or idx.numel() == 0 or cfg.router == "none":
            return super().forward(idx, targets, cache, n_valid)
        h, depth, decisions = self.states(idx, top_k=self.training)
        logits = upcast(self.head(h))
        ce = cross_entropy(logits, targets)
        f = torch.stack([(depth == d).float().mean() for d in range(1, cfg.n_loop + 1)])
        aux = {"ce": ce, **{f"depth{d}": fraction for d, fraction in enumerate(f, 1)}}
        if cfg.router == "expert" and not self.training:  # top k's choices are the labels
            h_top, _, decisions = self.states(idx, top_k=True)
            aux["ce_topk"] = cross_entropy(upcast(self.head(h_top)), targets)
        router_loss = self.expert_loss if cfg.router == "expert" else self.token_loss
        added, more = router_loss(*decisions)
        loss = ce + added if self.training else ce
        return logits, loss, {name: x.detach() for name, x in {**aux, **more}.items()}

    def expert_loss(self, s, decides, active, chosen):
        """What is added to the loss, and aux: means over the tokens that competed
        (active), summed over recursions. decides: the scores that decide in decoding."""
        mean = lambda x: (x * active).sum((1, 2)) / active.sum((1, 2))  # (R,)
        bce = F.binary_cross_entropy_with_logits(decides, chosen.to(s), reduction="none")
        bce, z = mean(bce).sum(), mean(s ** 2).sum()  # of one score, logsumexp(s) = s
        decides, active, chosen = decides[1:], active[1:], chosen[1:]  # F_1 takes all
        right = active & ((decides >= 0) == chosen)  # decoding would decide as top k did
        accuracy = right.sum() / active.sum().clamp(min=1)
        added = self.cfg.aux_weight * bce + self.cfg.z_loss * z
        return added, {"aux": bce, "router_accuracy": accuracy}

    def token_loss(self, scores, p, depth):
        """What is added to the loss, and aux."""
        cfg, R = self.cfg, self.cfg.n_loop
        f = F.one_hot(depth - 1, R).to(p).mean((0, 1))  # (R,)
        balance = R * (f * p.mean((0, 1))).sum()
        weight = cfg.balance_weight if cfg.balance == "loss" else 0.0
        z = scores.logsumexp(-1).square().mean()
        p = F.normalize(p, 1, -1).mean((0, 1))  # now sigmoids, too, sum to 1
        return weight * balance + cfg.z_loss * z, {
            "balance": balance, "maxvio": R * f.max() - 1,  # (most - mean) / mean
            "entropy": torch.special.entr(p).sum()}

    def hidden(self, idx, context=None):
        return self.states(idx, self.training and context is None, context)[0]

    @property
    def loops_to_run(self):
        """The most recursions of a token in evaluation and decoding."""
        return self.cfg.exit_loop or self.cfg.n_loop

    def init_cache(self, batch_size, max_len):
        return Cache(self.cfg, self.loops_to_run, *self.cache_sizes(batch_size, max_len))

    @torch.no_grad()
    def end_step(self, logged):
        """loss_free moves biases against f, which is logged over all processes."""
        cfg = self.cfg
        if cfg.router == "token" and cfg.balance == "loss_free":
            f = torch.tensor([logged[f"depth{d}"] for d in range(1, cfg.n_loop + 1)])
            excess = (f - 1 / cfg.n_loop).round(decimals=6)  # 0 if only rounding differs
            self.balance_bias -= cfg.balance_rate * excess.sign().to(self.balance_bias)

    def flops_per_token(self):
        """As in model_gpt; a layer's count for the fraction of tokens that take it."""
        cfg, attn, unread = self.cfg, self.blocks[0].attn, 0
        routers = [p for name, p in self.named_parameters() if "router" in name]
        flops = 6.0 * sum(p.numel() for p in [self.head.weight, *routers])
        weights = self.block_weights() / cfg.n_stored
        if cfg.kv == "share":  # keys that nobody reads after F_1: no backward pass
            unread = 2 / 3 * (attn.wk.weight.numel() + attn.wv.weight.numel())
        for r in range(1, cfg.n_loop + 1):
            # first and last count with F_1: all tokens take them
            n_layer = cfg.n_stored + (cfg.n_outside if r == 1 else 0)
            read = weights - (unread if r > 1 else 0)
            # of all tokens; by token choice: in balance
            fraction = 1.0 if cfg.router == "none" else (cfg.n_loop - r + 1) / cfg.n_loop
            keys = cfg.block_size * (fraction if cfg.kv == "recursion" else 1)
            mixer = 12.0 * cfg.n_head * cfg.head_dim * visible_keys(keys)
            flops += n_layer * fraction * (6.0 * read + mixer)
        return flops


# ---- the parts: routers, and the tokens of a recursion ----

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


class AllTokens(Context):
    """The context of F_1 and the layers outside. kept (B, T): all tokens.
    shared_kv[layer]: the keys and values that kv=share reads.

    A block is called with an unrolled layer's number, for K = 2: F_1 0 1, F_2 2 3, F_3 4 5;
    layer % K is the same one in F_1. Outside are -2 and -1: a cache's last two."""

    def __init__(self, cfg, x, *positions):
        super().__init__(cfg, x, *positions)
        self.cfg, self.shared_kv = cfg, {}
        self.kept = torch.ones(x.shape[:2], device=x.device, dtype=torch.bool)

    def extend(self, layer, k, v):
        kv = self.shared_kv[layer] = super().extend(layer, k, v)
        return kv

    def subset(self, r, chosen, n=None):
        """The context of recursion r for the chosen tokens (B, T), n in the fullest row if
        that is known."""
        if r == 1 or self.cfg.router == "none" and self.cfg.kv == "recursion":
            return self  # all tokens, with keys of their own
        if self.cfg.router == "none" or not self.cfg.fast:
            return MaskedSubset(self, chosen)
        return GatheredSubset(self, chosen, n)


class MaskedSubset:
    """The context of F_2 ..: all tokens run, results of the chosen (B, T) are kept."""

    def __init__(self, tokens, chosen):
        self.cfg, self.tokens, self.kept = tokens.cfg, tokens, chosen  # A_r
        self.rope, self.bias = tokens.rope, tokens.bias
        if self.cfg.kv == "recursion":
            distance = tokens.pos[:, :, None] - tokens.pos[:, None]  # (1, T, T)
            # itself, too, so that no softmax is over nothing
            visible = (distance > 0) & chosen[:, None] | (distance == 0)
            self.bias = torch.where(visible, 0.0, -math.inf)[:, None]  # (B, 1, T, T)

    def extend(self, layer, k, v):
        """The keys and values (B, G, S, D) that the chosen attend to (Section 2.2.2)."""
        if self.cfg.kv == "recursion":
            return k, v
        return self.tokens.shared_kv[layer % self.cfg.n_stored]  # F_1's


# ---- the fast path ----

class GatheredSubset:
    """The chosen run alone, packed to the left. In a row of fewer than n others fill up, and
    are not kept. (MaskedSubset runs all and keeps the chosen.) Two rows, x the chosen, n = 3:

        tokens  0 1 2 3    chosen  . x . x    index  1 3 0
                4 5 6 7            x x x .           4 5 6

    index (B, n) counts all B T = 8 tokens."""

    def __init__(self, tokens, chosen, n=None, rows=None):
        self.cfg, self.tokens, self.rows = tokens.cfg, tokens, rows
        (B, T), device = chosen.shape, chosen.device
        if n is None:  # compiled, no size may depend on data: all are computed
            static = T == 1 or torch.compiler.is_compiling()
            n = T if static else max(1, int(chosen.sum(1).max()))
        column = torch.arange(T, device=device)
        row = torch.arange(B, device=device) if rows is None else rows  # (N,)
        first = torch.where(chosen[row], column, T + column).topk(n, 1, largest=False).indices
        self.index = T * row[:, None] + first  # (N, n)
        self.kept = self.gather(chosen)
        self.rope = tokens.rope and [self.gather(x[:, 0].expand(B, T, -1))[:, None]
                                     for x in tokens.rope]  # (B, 1, n, D / 2)
        self.bias = None  # causal: the others, to the right of all chosen, are hidden too
        if self.cfg.kv == "share":
            self.bias = attention_bias(self.gather(tokens.pos.expand(B, T)), tokens.k_pos)

    def extend(self, layer, k, v):
        if self.cfg.kv == "recursion":
            return k, v
        return [self.select(x) for x in self.tokens.shared_kv[layer % self.cfg.n_stored]]  # F_1's

    def select(self, x):
        """x (B, ...) -> (N, ...)."""
        return x if self.rows is None else x.index_select(0, self.rows)

    def gather(self, x):
        """x (B, T, ...) -> (B, n, ...)."""
        flat = x.flatten(0, 1).index_select(0, self.index.flatten())
        return flat.unflatten(0, self.index.shape)

    def scatter(self, x, new):
        """x (B, T, ...) with new (B, n, ...) where gather reads."""
        flat = x.flatten(0, 1).index_copy(0, self.index.flatten(), new.flatten(0, 1))
        return flat.view(x.shape)


# ---- decoding ----

class CachedTokens(Cached, AllTokens):
    """AllTokens of a call with a cache. kept (B, T): all tokens but padding."""

    def __init__(self, cfg, cache, T, n_valid=None):
        super().__init__(cfg, cache, T, n_valid)
        self.kept = torch.arange(T, device=self.pos.device) < self.slots.n_new[:, None]

    def extend(self, layer, k, v):
        kv = self.shared_kv[layer] = self.cache.write(layer, k, v, self.slots)
        return kv

    def subset(self, r, chosen, n=None):
        """As in AllTokens. None: nobody goes on. A router's decoding gathers, fast or not."""
        if r == 1 or self.cfg.router == "none":
            return super().subset(r, chosen)
        if not self.cache.static and not chosen.any():
            return None
        rows, some = None, chosen.any(1)
        # most rows run as they are, because copying a row's keys takes as long as attending to them
        if not self.cache.static and 3 * some.sum() <= 2 * len(some):
            rows = some.nonzero()[:, 0]  # (N,)
        if self.cfg.kv == "share":
            return GatheredSubset(self, chosen, rows=rows)
        return CachedSubset(self, chosen, rows, self.cache.later[r - 2])


class CachedSubset(GatheredSubset):
    """kv=recursion: keys and values of the chosen go to the recursion's own cache, slot after
    slot without gaps."""

    def __init__(self, tokens, chosen, rows, cache):
        super().__init__(tokens, chosen, rows=rows)
        self.cache, slots = cache, cache.place(self.index.size(1), chosen.sum(1))
        pos, at, its_rows = map(self.select, (slots.pos, slots.at, slots.rows))
        self.slots = replace(slots, pos=pos, at=at, rows=its_rows)
        # slots are in order of positions, so the causal mask compares slots
        self.bias = attention_bias(pos, torch.arange(slots.end, device=pos.device))

    def extend(self, layer, k, v):
        kv = self.cache.write(layer % self.cfg.n_stored, k, v, self.slots)
        return [self.select(x) for x in kv]

    def scatter(self, x, new):
        """As above. All layers have written, so that the new tokens count."""
        self.cache.advance(self.slots)
        return super().scatter(x, new)


class GrowingCache(KVCache):
    """A KVCache that grows to `most` tokens a row where it would be full."""

    def __init__(self, most, *sizes):
        super().__init__(*sizes)
        self.most = most

    def check_room(self, T, n_new):
        if int((self.lengths + n_new).max()) > self.max_len:
            self.grow()

    def begin_static(self):
        super().begin_static()
        self.grow()  # no size may depend on data

    def grow(self):
        if self.max_len < self.most:
            more = 0, 0, 0, self.most + 1 - self.max_len  # the last slot is padding's
            with torch.inference_mode(False):  # as in KVCache
                for buffers in (self.k, self.v):
                    buffers[:] = [F.pad(x[:, :, :-1], more) for x in buffers]
            self.max_len = self.most


class Cache(KVCache):
    """Of all tokens: outside, in F_1 and, with router=none and kv=recursion, in the later ones.
    later[r - 2]: of the tokens in F_r, with room for as many as expected."""

    def __init__(self, cfg, n_run, batch_size, max_len, *device_and_dtype):
        R, K, own = cfg.n_loop, cfg.n_stored, cfg.kv == "recursion"
        n_whole = n_run if own and cfg.router == "none" else 1
        super().__init__(cfg, batch_size, max_len, *device_and_dtype, K * n_whole + cfg.n_outside)
        later = range(2, n_run + 1) if own and cfg.router != "none" else ()
        sizes = [max(1, max_len * (R - r + 1) // R) for r in later]  # k_r
        self.later = [GrowingCache(max_len, cfg, batch_size, size, *device_and_dtype, K)
                      for size in sizes]

    def nbytes(self):
        return super().nbytes() + sum(cache.nbytes() for cache in self.later)

    def reset(self, rows=None):
        super().reset(rows)
        for cache in self.later:
            cache.reset(rows)

    def begin_static(self):
        super().begin_static()
        for cache in self.later:
            cache.begin_static()

    def end_static(self, T, ragged):
        super().end_static(T, ragged)
        for cache in self.later:
            cache.end_static(T, True)


# ---- conversion ----

@torch.no_grad()
def convert(model, weights):
    """Start from a model_gpt of the same sizes. If it has another depth, its layers are read
    evenly spaced, some of a shallower one twice."""
    cfg = model.cfg
    layers = layers_for_shared(cfg) + [[0], [cfg.n_layer - 1]]
    rest = {name: w for name, w in weights.items() if not name.startswith("blocks.")}
    model.load_state_dict(rest, strict=False)
    n_source = len({name.split(".")[1] for name in weights.keys() - rest.keys()})
    source = lambda layer: round(layer * (n_source - 1) / max(1, cfg.n_layer - 1))
    # without a first and a last block, zip drops their layers
    for block, its in zip([*model.blocks, *model.first, *model.last], layers):
        for name, p in block.named_parameters():
            p.copy_(sum(weights[f"blocks.{source(layer)}.{name}"] for layer in its) / len(its))


def layers_for_shared(cfg):
    """The unrolled layers whose mean each shared block starts from (Table 9)."""
    K, outside = cfg.n_stored, cfg.n_outside // 2
    inner = range(outside, cfg.n_layer - outside)
    if cfg.init == "average":  # those that it stands for
        return [[layer for layer, k in zip(inner, cfg.order) if k == shared]
                for shared in range(K)]
    gap = (len(inner) - 1) / max(1, K - 1)
    one = {"stepwise": [round(inner[0] + k * gap) for k in range(K)],
           "lower": inner[:K], "upper": inner[-K:],
           "random": [inner[i] for i in torch.randperm(len(inner))[:K]]}
    return [[layer] for layer in one[cfg.init]]


# ---- what a Config must be ----

def check(cfg):
    """Raise ValueError, naming the field, where a value is impossible."""
    R, n_outside = cfg.n_loop, 2 if cfg.share.startswith("middle") else 0
    functions = ("softmax", "sigmoid") if cfg.router == "token" else ("sigmoid", "tanh")
    if cfg.router_func not in functions:
        raise ValueError(f"router_func={cfg.router_func} must be one of: {', '.join(functions)}")
    cfg.at_least(0, "n_mlp", "aux_weight", "balance_weight", "balance_rate", "z_loss", "exit_loop")
    cfg.at_least(1, "n_loop")
    if cfg.exit_loop > R:
        raise ValueError(f"exit_loop={cfg.exit_loop} is more than n_loop={R}")
    n_stored, left = divmod(cfg.n_layer - n_outside, R)
    if n_stored < 1 or left:
        fits = max(1, n_stored) * R + n_outside
        raise ValueError(f"n_layer={cfg.n_layer} does not fit share={cfg.share} "
                         f"with n_loop={R}: {fits} or {fits + R} would")
    if cfg.kv == "share" and not cfg.share.endswith("cycle"):
        raise ValueError("kv=share needs the same layers in all recursions: share=cycle "
                         f"or middle_cycle, not {cfg.share}")

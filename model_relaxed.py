"""
Recursive and Relaxed Recursive Transformers: layers tied over depth, relaxed by low-rank deltas.

A trained Transformer is cut down to K stored blocks, which run one after the other in R = n_loop
loops. So the smaller model has L = K R unrolled layers: this is the Recursive Transformer. Each
loop uses each block once, and u = 0 .. R - 1 is the number of a use. In the Relaxed Recursive
Transformer each use of a stored matrix adds a low-rank delta of its own (LoRA), so that the layers
differ again. The smaller model starts from the trained one and is trained further, so that it loses
little (lab/RESULTS.md has what it cost here); from random weights it is only a looped Transformer.

    h_{l+1} = Block_k(h_l; u)               k = l mod K,  u = l // K,  l = 0 .. L - 1       (1)

    y = W' x + B_u A_u x                    each matrix of each block has its own W',       (2)
                                            and A_u and B_u for each use u
        x (in,)   y (out,)   W' (out, in)   A_u (r, in)   B_u (out, r)   r = min(rank, in, out)

    U S V^T = W_l diag(g_l / g') - W'       singular value decomposition of what W' lacks   (3)
    B_u = U_r S_r,   A_u = V_r^T            at the start; the r largest singular values

(1) is the paper's Eq. 3, (2) is part of its Eq. 5, and (3) is its Eq. 4 with a ratio for norms. h_l
are the states, which are x_l in model_gpt.py, and h_0 are the embeddings. In (2) x is the input of
any matrix. A block has seven matrices: W_q, W_k, W_v and W_o of attention, and W_gate, W_up and
W_down of the MLP. (With mlp=gelu there is no W_gate.) All uses of a block share W' and the weights
of norm1 and norm2, which is what tied means. The trained model is the source. In (3) each unrolled
layer l has a source layer, which is one layer of the source, and W_l is the source layer's matrix.
g_l and g' are the weights of the norms before W_l and W'. No norm stands before W_o and W_down, so
that they have no ratio. There are no deltas with rank=0, which is the Recursive Transformer. If
the source has L layers, its layer l is the source layer of layer l. Then deltas of full rank by (3)
undo the tying, and the converted model computes what the source does. If the source has more
layers, L of them, evenly spaced, are the source layers. If it has fewer, some of them are the
source layers of several layers l.

In this picture L = 4 layers are R = 2 loops over K = 2 stored blocks:

    loop 1   h_0 -> [block 0, use 0] -> [block 1, use 0] -> h_2 --norm, head--> exit?
                      same W', norms      same W', norms
    loop 2   h_2 -> [block 0, use 1] -> [block 1, use 1] -> h_4 --norm, head--> logits

In configs/relaxed_tiny.yaml the trained model has 4 layers with matrices of 200,704 weights. The
smaller model has 2 stored blocks of the same size, and each of the 4 uses adds 19,712 weights of
deltas at rank 8. So 0.60 of the weights in blocks remain, and 0.76 of all weights, because
embedding and head stay. The two commands are:

    python train.py                                             the source, out/gpt_tiny
    python train.py model=relaxed init_from=out/gpt_tiny        converted, and trained further

The head can predict after every loop, so that a model can exit early (Section 3.7):

    pass                          loops                  loss
    training                      R                      CE after the last loop
    training with early_exit=     R, a head after each   sum_i c_i loss_i, i = 1 .. R
    evaluation, decoding          exit_loop (0: R)       CE after that loop

loop_weights defines c_i, and Model.forward defines loss_i. With loop_warmup, training runs fewer
loops in its first steps.

In this file and in sample.py all tokens stop after the same loop. In serve.py each token can exit
after the first loop whose prediction is sure. Every unrolled layer has keys and values of its own.
A token that exits has none in deeper loops, although later tokens need them there. serve.py says
how it supplies them.

Dropout is on embeddings, attention weights and residual branches.

Paper: Bae et al. 2024, "Relaxed Recursive Transformers: Effective Parameter Sharing with
Layer-wise LoRA" (2410.20672). github.com/raymin0223/mixture_of_recursions has a part of its code.
This file differs from the paper and from that code as follows.
- (3) The paper has no ratio g_l / g'. Here it is needed, because norms are tied too.
- (3) With init=stepwise W' of block k is one trained layer, and the K layers are evenly spaced. So
  for k > 0 it may be another layer than k. Then W' is not W_k, and (3) gives deltas in the first
  loop, too. In the example of Appendix C the deltas of the first loop are 0. Here they follow (3),
  because otherwise a conversion at full rank would not give the source back.
- (2) The public code scales deltas by alpha / rank. Here deltas have no factor, because a factor
  would break (3).
- Sharing is the paper's Cycle (k = l mod K) alone. Its Sequence is left out.
- QK-norm. The paper's models have none. Here each use has weights of its own if rank > 0.
- Positions are RoPE, as in the paper, or none. ALiBi and windows are left out, as the paper has
  neither.
- loop_warmup is not theirs. Training begins with one loop, and the others follow over a fraction
  of the steps. Evaluation runs as many loops in these steps as later.
- l, k and u count from 0, and loops from 1, so that loop i is use u = i - 1 of each block. In the
  paper layers count from 1. It writes B for R, and L / B for K.

Letters beside those of model_gpt.py: K stored blocks, R loops, B_u a factor of a delta, r rank, l
an unrolled layer, k a stored block (in Attention k are keys), u a use, i a loop. In the code R is
n_loop, K is n_stored. In (3) and set_deltas U, S and V are the factors of the singular value
decomposition.
"""
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F

import model_gpt
from decoding import KVCache
from model_gpt import (BlockConfig, LanguageModel, apply_rope, attend, check_call, choice,
                       cross_entropy, init_weights, upcast)


@dataclass
class Config(BlockConfig):
    n_loop: int = 2              # loops, and uses of each stored block
    rank: int = 8                # rank of every matrix's deltas (0: none)
    pos: str = choice("rope", "none")   # no ALiBi or window: as in the paper
    # These two options say how a trained model_gpt is converted. layers_for_stored explains the
    # values of init. With random, W' keeps its random weights.
    init: str = choice("average", "stepwise", "lower", "upper", "random")
    lora_init: str = choice("svd", "zero")      # deltas start as (3), or at 0
    # Three options are for training with early exit (Model.forward has its loss). exit_loop is for
    # evaluation and decoding, and loop_warmup is for any training.
    early_exit: str = choice("none", "weighted", "aggressive")  # c_i of the losses (loop_weights)
    exit_weight: float = 0.1     # aggressive: c_i of the earlier loops
    exit_loss: str = choice("ce", "kl", "both")     # losses of the earlier loops; kl: from the last
    exit_loop: int = 0           # stop after this loop (0: the last)
    loop_warmup: float = 0.0     # fraction of training's steps over which loops rise from 1 to R

    # CONVERTS_FROM names the models whose weights convert reads. NOT_IN_WEIGHTS are options that
    # may change when a run is resumed, or when init_from= names another run of this model.
    CONVERTS_FROM = ("gpt",)
    NOT_IN_WEIGHTS = ("early_exit", "exit_weight", "exit_loss", "exit_loop", "loop_warmup")

    def __post_init__(self):
        super().__post_init__()
        if self.n_loop < 1 or self.n_layer % self.n_loop:
            raise ValueError(f"n_loop={self.n_loop} must divide n_layer={self.n_layer}")
        self.at_least(0, "rank", "exit_weight")
        if not 0 <= self.loop_warmup <= 1:
            raise ValueError(f"loop_warmup={self.loop_warmup} must be from 0 to 1")
        if not 0 <= self.exit_loop <= self.n_loop:
            raise ValueError(f"exit_loop={self.exit_loop} must be 0 (the last) or one of the "
                             f"{self.n_loop} loops")
        self.n_stored = self.n_layer // self.n_loop     # K


# ---- the method ----
# The code goes from the loops down to a matrix: run_loops, Block, Attention and MLP, and
# RelaxedLinear, which is (2). HeadNorm and MergedLinear follow, which is the fast path of
# RelaxedLinear.

def run_loops(blocks, h, context, n_run):
    """Return the states after loops 1 .. n_run, a list of (B, T, C), from h_0 (B, T, C).

    A block is called with its unrolled layer l, as in all models, so that blocks of another model
    can run in these loops."""
    states = []
    for u in range(n_run):
        for k, block in enumerate(blocks):
            h = block(h, u * len(blocks) + k, context)      # h_{l + 1}, l = u K + k    (1)
        states.append(h)
    return states


class Block(model_gpt.Block):
    """A stored block. In this file u is None, and the use follows from the unrolled layer. Only
    serve.py gives u, because there the rows of a call may be in different loops. If they are, u is
    a mask (rows, R), in which each row has a 1 at its use and 0 elsewhere. serve.py gives k as
    `layer`, and not l, because its SlotContext has keys for the K blocks of a loop and knows the
    loop of each row."""

    def __init__(self, cfg):
        super().__init__(cfg, Attention, MLP)
        self.cfg = cfg

    def forward(self, x, layer, context, u=None):
        u = layer // self.cfg.n_stored if u is None else u      # l = u K + k
        x = x + self.drop(self.attn(self.norm1(x), layer, u, context))  # (B, T, C)
        return x + self.drop(self.mlp(self.norm2(x), u))


class Attention(model_gpt.Attention):
    """model_gpt's attention with four relaxed matrices. Its forward stands here again, because
    each matrix and norm is called with the use u."""

    def __init__(self, cfg):
        super().__init__(cfg)
        C, D = cfg.n_embd, cfg.head_size
        linear = MergedLinear if cfg.fast else RelaxedLinear
        self.wq = linear(C, cfg.n_head * D, cfg)
        self.wk = linear(C, cfg.kv_heads * D, cfg)
        self.wv = linear(C, cfg.kv_heads * D, cfg)
        self.wo = linear(cfg.n_head * D, C, cfg)
        if cfg.qk_norm:
            self.q_norm, self.k_norm = HeadNorm(cfg), HeadNorm(cfg)

    def forward(self, x, layer, u, context):
        D = self.cfg.head_size
        q, k, v = (w(x, u).unflatten(-1, (-1, D)).transpose(1, 2)   # (B, H or G, T, D)
                   for w in (self.wq, self.wk, self.wv))
        if self.cfg.qk_norm:    # else the norms are nn.Identity, which takes no u
            q, k = self.q_norm(q, u), self.k_norm(k, u)
        if context.rope:
            q, k = apply_rope(q, *context.rope), apply_rope(k, *context.rope)
        k, v = context.extend(layer, k, v)                          # (B, G, S, D)
        dropout = self.cfg.dropout if self.training else 0.0
        a = attend(q, k, v, context.bias, self.cfg.fast, dropout)   # (B, H, T, D)
        return self.wo(a.transpose(1, 2).flatten(2), u)             # (B, T, C)


class MLP(model_gpt.MLP):
    """model_gpt's MLP with three relaxed matrices, or with two where it has no gate."""

    def __init__(self, cfg):
        super().__init__(cfg)
        linear = MergedLinear if cfg.fast else RelaxedLinear
        if self.gated:
            self.w_gate = linear(cfg.n_embd, cfg.mlp_width, cfg)
        self.w_up = linear(cfg.n_embd, cfg.mlp_width, cfg)
        self.w_down = linear(cfg.mlp_width, cfg.n_embd, cfg)

    def forward(self, x, u):
        up = self.w_up(x, u)
        hidden = self.act(self.w_gate(x, u)) * up if self.gated else self.act(up)
        return self.w_down(hidden, u)


class RelaxedLinear(nn.Module):
    """A matrix W' with a delta B_u A_u for each use u (2).

    weight (out, in) is W', a[u] (r, in) is A_u, and b[u] (r, out) is B_u transposed. So a is
    (R, r, in) and b is (R, r, out). Flattened over the uses, they are one matrix (R r, in) and one
    (R r, out). a and b have 3 dimensions, so that model_gpt.init_weights does not change them, and
    Model.block_weights counts them once. A fork that changes the delta must change MergedLinear and
    set_deltas, too."""

    def __init__(self, n_in, n_out, cfg):
        super().__init__()
        self.rank = min(cfg.rank, n_in, n_out)
        self.weight = nn.Parameter(torch.empty(n_out, n_in))    # init_weights fills it
        if self.rank:
            self.a = nn.Parameter(0.02 * torch.randn(cfg.n_loop, self.rank, n_in))
            self.b = nn.Parameter(torch.zeros(cfg.n_loop, self.rank, n_out))    # no delta yet

    def forward(self, x, u):
        """Return (2), (B, T, out), of x (B, T, in). u is the use of all rows, or a mask as in
        Block."""
        y = F.linear(x, self.weight)                        # W' x
        if self.rank and isinstance(u, int):
            y = y + F.linear(x, self.a[u]) @ self.b[u]      # + B_u A_u x    (2)
        elif self.rank:
            # Each row meets the A_u of all uses. Then the mask u zeroes all results but those of
            # the row's own use, so that one product with all B_u adds the row's own B_u A_u x.
            low = F.linear(x, self.a.flatten(0, 1)).unflatten(-1, (-1, self.rank))  # (B, T, R, r)
            y = y + (low * u[:, None, :, None]).flatten(2) @ self.b.flatten(0, 1)
        return y


# ---- QK-norm, and the fast path ----

class HeadNorm(nn.Module):
    """QK-norm: RMSNorm of heads (B, heads, T, D) with a weight for each use.

    The weight acts after the normalization, so a delta of W_q or W_k could not replace it. At rank
    0 all uses share one weight, as they share everything else."""

    def __init__(self, cfg):
        super().__init__()
        self.eps = cfg.norm_eps
        ones = [nn.Parameter(torch.ones(cfg.head_size)) for _ in range(cfg.n_loop)]
        # At rank 0 the list has the same Parameter R times, so that weights[u] works there, too.
        self.weights = nn.ParameterList(ones if cfg.rank else ones[:1] * cfg.n_loop)

    def forward(self, x, u):
        """Return x, normalized, times the weight of use u, an int or a mask as in Block."""
        if isinstance(u, int):
            weight = self.weights[u]
        else:
            weight = (u @ torch.stack([*self.weights]))[:, None, None]      # (B, 1, 1, D)
        # x may be in 16 bits, and the weight or autocast's rms_norm in 32.
        return (F.rms_norm(x, x.shape[-1:], eps=self.eps) * weight).to(x.dtype)


class MergedLinear(RelaxedLinear):
    """The fast path: W' x + B_u A_u x = (W' + B_u A_u) x, so the delta can be merged into W'.

    For a matrix (out, in), forming B_u A_u takes r * in * out multiplications, and applying A_u and
    then B_u to n tokens takes n * r * (in + out). So B_u A_u is formed where the second number is
    larger, and in this comparison r cancels. Rows of several uses would need several merged
    matrices, so nothing is merged for them."""

    def forward(self, x, u):
        n_out, n_in = self.weight.shape
        merging_is_cheaper = x.numel() // n_in * (n_in + n_out) > n_in * n_out
        if merging_is_cheaper and self.rank and isinstance(u, int):
            return F.linear(x, torch.addmm(self.weight, self.b[u].t(), self.a[u]))
        return super().forward(x, u)


# ---- conversion of a trained Transformer (Sections 2.2 and 2.3 of the paper) ----

@torch.no_grad()
def convert(model, weights):
    """Start model from `weights`, the state dict of a model_gpt of any depth.

    Each stored block gets tied weights, W' and norms, which are the mean of some trained layers.
    Then each of its uses gets what is its own, from its source layer. If rank > 0, these are the
    weights of QK-norm and, with lora_init=svd, the deltas by (3)."""
    cfg, sources = model.cfg, source_layers(weights, model.cfg.n_layer)
    for name, w in weights.items():
        if not name.startswith("blocks."):
            model.get_parameter(name).copy_(w)
    svd = cfg.rank > 0 and cfg.lora_init == "svd"
    for k, block in enumerate(model.blocks):
        start, tied = [sources[layer] for layer in layers_for_stored(cfg, k)], {}
        if start:       # with init=random W' and the norms stay as they are
            tied = {name: sum(s[name] for s in start) / len(start) for name in sources[0]}
        # tied has no a and b, and HeadNorm has other names for QK-norms. strict=False allows this.
        block.load_state_dict(tied, strict=False)
        for u, source in enumerate(sources[k::cfg.n_stored]):
            set_head_norms(block, u, source if cfg.rank else tied)  # rank 0 ties QK-norms, too
            if svd:
                set_deltas(block, k, u, source)


def source_layers(weights, n_layer):
    """Return the source layer of each unrolled layer, which is a trained layer as {name: weight}.
    Source layers are evenly spaced among the trained layers, and some are repeated if these are too
    few."""
    trained = {}
    for name, w in weights.items():
        if name.startswith("blocks."):
            _, number, part = name.split(".", 2)
            trained.setdefault(int(number), {})[part] = w
    step = (len(trained) - 1) / max(1, n_layer - 1)
    return [trained[round(step * layer)] for layer in range(n_layer)]


def layers_for_stored(cfg, k):
    """Return the unrolled layers whose source layers are averaged into W' and norms of stored
    block k. There are none with init=random, where W' stays random, as a baseline of the other
    ways. With lora_init=svd the deltas follow (3) there, too."""
    L, K = cfg.n_layer, cfg.n_stored
    return {"average": range(k, L, K),          # all uses of the block
            "stepwise": [round(k * (L - 1) / max(1, K - 1))],   # evenly from first to last
            "lower": [k],                       # the first K
            "upper": [L - K + k],               # the last K
            "random": []}[cfg.init]


def set_head_norms(block, u, source):
    """Set the QK-norm weights of use u. source is empty at rank 0 with init=random."""
    for name, part in block.named_modules():
        if isinstance(part, HeadNorm) and f"{name}.weight" in source:
            part.weights[u].copy_(source[f"{name}.weight"])


def set_deltas(block, k, u, source):
    """Set the deltas of use u of stored block k by (3), so that W' + B_u A_u comes near
    W_l diag(g_l / g'), where W_l and g_l are the weights of source.

    If W' already is that matrix up to rounding, as in the first loop with init=lower, an SVD would
    only find noise, or an arbitrary basis. Then A stays random and B zero, as in plain LoRA."""
    for name, part in block.named_modules():
        if isinstance(part, RelaxedLinear):
            w_l = source[f"{name}.weight"]
            n_use, r, _ = part.a.shape
            wanted = folded(block, k, source, name)
            missing = wanted - upcast(part.weight)      # U S V^T, and B_u A_u at full rank
            # A difference below eps counts as rounding. W' and g' are each a mean of up to n_use
            # weights, which rounds up to n_use times.
            eps = 2 * n_use * max(torch.finfo(w.dtype).eps for w in (w_l, part.weight))
            if missing.norm() > eps * wanted.norm():
                U, S, Vh = torch.linalg.svd(missing, full_matrices=False)
                part.a[u], part.b[u] = Vh[:r], (U[:, :r] * S[:r]).t()


def folded(block, k, source, name):
    """Return W_l diag(g_l / g') (out, in), which does behind the tied norm what W_l did behind its
    own: for a normalized n,  W_l (g_l * n) = [W_l diag(g_l / g')] (g' * n). A ValueError names the
    norm if a ratio is 10^4 or more, or NaN, because the deltas would be huge."""
    w = upcast(source[f"{name}.weight"])
    if name not in ("attn.wo", "mlp.w_down"):   # no norm stands before these two
        norm = "norm1" if name.startswith("attn") else "norm2"
        ratio = upcast(source[f"{norm}.weight"]) / upcast(getattr(block, norm).weight)
        if not (ratio.abs() < 1e4).all():       # NaN is refused, too
            raise ValueError(f"{norm} of stored block {k} is near zero, so that its deltas would "
                             "be huge: another init may help, and rank=0 or lora_init=zero does")
        w = w * ratio
    return w


# ---- the model ----

class Model(LanguageModel):
    """The language model. Its K stored blocks run one after the other, in each of R loops."""
    runs_blocks_once = False    # loops run the blocks again, so FSDP gathers all of them at once

    def __init__(self, cfg):
        super().__init__(cfg, [self.make_block(cfg, k) for k in range(cfg.n_stored)])
        self.training_loops = cfg.n_loop    # train.py sets it in each step, by loop_warmup
        init_weights(self, cfg.n_layer)

    def make_block(self, cfg, k):
        """Return stored block k. A subclass may return a block of another model; convert works
        for this one only."""
        return Block(cfg)

    @property
    def loops_to_run(self):
        """Return how many loops run in evaluation and decoding."""
        return self.cfg.exit_loop or self.cfg.n_loop

    def loop_states(self, idx, context=None):
        """Return the states of idx (B, T) after each loop, a list of (B, T, C). A plain pass (None)
        makes its own context, as in LanguageModel.hidden."""
        h = self.drop(self.wte(idx))
        plain_training = self.training and context is None
        n_run = self.training_loops if plain_training else self.loops_to_run
        return run_loops(self.blocks, h, context or self.context_type(self.cfg, h), n_run)

    def hidden(self, idx, context=None):
        return self.norm(self.loop_states(idx, context)[-1])

    def forward(self, idx, targets=None, cache=None, n_valid=None):
        """Return what every model returns. In training with early_exit the loss is sum_i c_i loss_i
        over loops i = 1 .. R (Section 3.7). loss_R is CE_R. The other loss_i are CE_i, KL(p_R ||
        p_i) or the sum of both, as exit_loss says, and the returned dict has their CE_i as
        "ce_loop1", "ce_loop2", ... While loop_warmup runs fewer loops, the last of them has the
        loss and the weight of loop R."""
        exits = self.training and self.cfg.early_exit != "none" and cache is None
        if not exits or targets is None:
            return super().forward(idx, targets, cache, n_valid)
        check_call(idx, cache, n_valid)
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
        """Return c_1 .. c_R. If early_exit=weighted, c_i is i / (1 + .. + R). If it is aggressive,
        c_R is 1, and the others are exit_weight."""
        R = self.cfg.n_loop
        if self.cfg.early_exit == "weighted":
            return [i / (R * (R + 1) / 2) for i in range(1, R + 1)]
        return [self.cfg.exit_weight] * (R - 1) + [1.0]

    def init_cache(self, batch_size, max_len):
        """Return an empty cache for the unrolled layers of the loops up to exit_loop."""
        n_layer = self.loops_to_run * self.cfg.n_stored
        return KVCache(self.cfg, *self.cache_sizes(batch_size, max_len), n_layer)

    def flops_per_token(self):
        """Return FLOPs as model_gpt does, for the loops that training runs in this step. With
        early_exit the head runs after each of them."""
        heads = self.training_loops if self.cfg.early_exit != "none" else 1
        in_loops = 6.0 * self.block_weights() + self.mixer_flops()
        return (in_loops * self.training_loops / self.cfg.n_loop
                + 6.0 * heads * self.head.weight.numel())

    def block_weights(self):
        """Return how many weights of matrix products a token meets. W' counts once for each use. a
        and b, which have 3 dimensions, hold the deltas of all uses, so they count once."""
        return sum(self.cfg.n_loop * p.numel() if p.dim() == 2 else p.numel()
                   for p in self.blocks.parameters() if p.dim() > 1)


def kl_from_last(logits, last, targets):
    """Return the mean KL(p_last || p) in nats over the targets that are not -1. p_last is the
    distribution of the last loop's logits (B, T, V). It is a constant, so that the last loop does
    not learn from the earlier ones."""
    log_p_last, log_p = last.detach().log_softmax(-1), logits.log_softmax(-1)
    counted = targets != -1
    kl = (log_p_last.exp() * (log_p_last - log_p)).sum(-1)      # (B, T)
    return (kl * counted).sum() / counted.sum().clamp(min=1)

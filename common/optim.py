"""
Optimizers and their schedules. optimizer=adamw is AdamW for all parameters. optimizer=muon is Muon
for the matrices of the blocks and AdamW for the rest.

parameter_groups puts each parameter into one group, and make_optimizers makes the optimizers of the
groups. set_schedules sets learning rate, weight decay and momentum of a group before each update.
set_budget turns max_flops= into max_steps.
"""
import bisect
import math
from functools import partial

import torch

from common.options import UserError
from common.sharded import is_sharded, sharded_like

# nanochat's groups, as the LRT paper has them (Appendix A). They are used if optimizer=muon and the
# model has nanochat_rates, as LRT does. The two numbers of a kind are AdamW's learning rate, as a
# multiple of learning_rate, and its beta1. alpha and beta are LRT's factors of x and x0. by_kind
# says what matrix, embedding and scalar are, and parameter_kinds of model_lrt.py has the others.
# The paper counts gates as scalars. At the paper's learning_rate, 0.004, scalars learn at
# 125 * 0.004 = 0.5. At this rate the input of a gate's sigmoid would move by many units a step,
# because it is a sum over all channels. So here gates learn at the rate that the head has at width
# 768. Muon is torch's, without nanochat's additions.
NANOCHAT = dict(embedding=(75, 0.8), head=(1, 0.8), gate=(1, 0.8), alpha=(1.25, 0.8),
                beta=(125, 0.96), scalar=(125, 0.8))
MOMENTUM = 0.95     # Muon's momentum (see muon_momentum_steps)
STACK = 2 ** 26     # the most numbers in one stack of Muon, because a step holds about five stacks


def make_optimizers(model, cfg):
    """Return the optimizers of all groups: AdamW, Muon or both. An optimizer of your own has its
    name in TrainConfig.optimizer and its class here. It keeps its numbers in state[p], as torch's
    do, and not in its groups, because a resumed run sets the groups anew."""
    classes = {"adamw": partial(torch.optim.AdamW, fused=True), "muon": Muon}
    groups = parameter_groups(model, cfg)
    return [classes[name]([group for group in groups if group["optimizer"] == name])
            for name in sorted({group["optimizer"] for group in groups})]


def load_optimizers(optimizers, states, step, cfg):
    """Restore the optimizers' moments after `step` steps. Their settings are not restored, because
    options may change on resume. The schedules are set as they were for the last step that was
    taken, so that a checkpoint that is saved before the next step equals the loaded one, bit for
    bit."""
    settings = [optimizer.state_dict()["param_groups"] for optimizer in optimizers]
    # "optimizer" was called "kind" in older checkpoints.
    kinds = lambda groups: [(group.get("optimizer", group.get("kind")), len(group["params"]))
                            for group in groups]
    if [*map(kinds, settings)] != [kinds(state["param_groups"]) for state in states]:
        raise UserError("resume: the checkpoint was made with another optimizer, has other groups "
                        "of parameters, or was exported without its optimizers: init_from= takes "
                        "its weights")
    for optimizer, state, now in zip(optimizers, states, settings):
        state = {**state, "param_groups": now}
        if is_sharded(optimizer.param_groups[0]["params"][0]):
            state = sharded_like(optimizer, state)
        optimizer.load_state_dict(state)
        for group in optimizer.param_groups:
            set_schedules(group, step - 1, cfg)


# ---- groups of parameters ----

def parameter_groups(model, cfg):
    """Return the groups of parameters, each a dict of its settings. "optimizer" is the name of the
    class that trains the group (make_optimizers). "peak_lr" and "peak_decay" are the learning rate
    and the weight decay that the schedules scale."""
    nanochat = cfg.optimizer == "muon" and getattr(model, "nanochat_rates", False)
    groups = nanochat_groups(model, cfg) if nanochat else common_groups(model, cfg)
    groups = [dict(g, peak_lr=g["lr"], peak_decay=g["weight_decay"])
              for g in groups if g["params"]]
    counted = sorted(id(p) for g in groups for p in g["params"])
    assert counted == sorted(id(p) for p in model.parameters()), \
        "a parameter is in no group, or in two"
    return groups


def common_groups(model, cfg):
    """Return the groups of a model for which nanochat's are not used. Weight decay applies to
    parameters of two or more dimensions: matrices, embeddings, and Relaxed's stacked deltas. It
    does not apply to vectors and numbers."""
    kinds, with_muon = by_kind(model), cfg.optimizer == "muon"
    muon = kinds.pop("matrix", []) if with_muon else []
    rest = [p for params in kinds.values() for p in params]
    other = dict(optimizer="adamw" if with_muon else cfg.optimizer, lr=cfg.learning_rate,
                 betas=(cfg.beta1, cfg.beta2))
    return [dict(optimizer="muon", params=muon, lr=cfg.muon_learning_rate,
                 momentum=MOMENTUM, weight_decay=cfg.weight_decay),
            dict(other, params=[p for p in rest if p.dim() > 1], weight_decay=cfg.weight_decay),
            dict(other, params=[p for p in rest if p.dim() < 2], weight_decay=0.0)]


def nanochat_groups(model, cfg):
    """Return nanochat's groups. The learning rates of cfg are for 2^19 tokens a step. For n tokens
    they are multiplied by sqrt(n / 2^19). Those of embeddings and head are for n_embd = 768, and
    are multiplied by sqrt(768 / n_embd). Weight decay applies only to the matrices of the blocks.
    It is for 12 layers, and is multiplied by (12 / n_layer)^2. beta1 and beta2 of cfg have no
    effect."""
    kinds = by_kind(model)
    if unknown := kinds.keys() - {"matrix", *NANOCHAT}:
        raise UserError(f"parameter_kinds has {min(unknown)!r}: with nanochat_rates a kind is one "
                        f"of matrix, {', '.join(NANOCHAT)}")
    batch = math.sqrt(tokens_per_step(cfg, model) / 2 ** 19)
    groups = [dict(optimizer="muon", params=kinds["matrix"], momentum=MOMENTUM,
                   lr=cfg.muon_learning_rate * batch,
                   weight_decay=cfg.weight_decay * (12 / model.cfg.n_layer) ** 2)]
    for kind, (ratio, beta1) in NANOCHAT.items():
        if kind in ("embedding", "head"):
            ratio *= (model.cfg.n_embd / 768) ** -0.5
        groups.append(dict(optimizer="adamw", params=kinds.get(kind, []),
                           lr=cfg.learning_rate * batch * ratio,
                           betas=(beta1, 0.95), eps=1e-10, weight_decay=0.0))
    return groups


def by_kind(model):
    """Return {kind: parameters}. "matrix" is a matrix in a block. "embedding" is an embedding in a
    block or any matrix outside of the blocks. "scalar" is the kind of all others, which are
    numbers, vectors and tensors of three dimensions. The model's parameter_kinds, {part of a
    parameter's name: kind}, overrides these rules."""
    kinds, named = {}, getattr(model, "parameter_kinds", {})
    inside = {id(p) for block in blocks_of(model) for p in block.parameters()}
    inside -= {id(m.weight) for m in model.modules() if isinstance(m, torch.nn.Embedding)}
    for name, p in model.named_parameters():
        kind = "matrix" if id(p) in inside else "embedding"
        kind = kind if p.dim() == 2 else "scalar"
        kind = next((named[part] for part in name.split(".") if part in named), kind)
        kinds.setdefault(kind, []).append(p)
    return kinds


def blocks_of(model):
    """Return all blocks that a model stores, in the order of the layers."""
    lists = [getattr(model, name, ()) for name in ("first", "blocks", "last")]  # mor has all three
    return [block for blocks in lists for block in blocks]


# ---- Muon ----

class Muon(torch.optim.Muon):
    """This is torch's Muon on stacks of matrices. torch launches 23 kernels for each matrix. Here
    about 23 serve all matrices of a shape, because these are stacked, so that each product of the
    Newton-Schulz iteration is one batched product. A matrix with more rows than columns is
    transposed and stacked with the matrices of its new shape. On a GPU the iteration runs in
    bfloat16. On a CPU it runs in the weights' dtype, because many CPUs have no instructions for
    bfloat16 and take twenty times as long. Nesterov's momentum and torch's default adjust_lr_fn are
    the only ones here."""

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            params, grads, momenta = [], [], []
            self._init_group(group, params, grads, momenta)
            if not params:      # all matrices of the group are frozen
                continue
            torch._foreach_lerp_(momenta, grads, 1 - group["momentum"])
            # This is Nesterov's grads.lerp(momenta, momentum). torch 2.11 has no lerp of sharded
            # tensors that returns new ones.
            updates = torch._foreach_mul(momenta, group["momentum"])
            torch._foreach_add_(updates, grads, alpha=1 - group["momentum"])
            torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
            shapes = {}
            for p, update in zip(params, updates):
                shapes.setdefault(tuple(sorted(p.shape)), []).append((p, update))
            for (rows, columns), pairs in shapes.items():
                pairs.sort(key=lambda pair: pair[0].size(0) > rows)     # transposed ones last
                most = max(1, STACK // (rows * columns))
                for start in range(0, len(pairs), most):
                    add_orthogonalized(pairs[start:start + most], rows, columns, group)


def add_orthogonalized(pairs, rows, columns, group):
    """Move each parameter against its orthogonalized update. `pairs` are (parameter, update). First
    come the n pairs of shape (rows, columns), with rows <= columns, and then those of shape
    (columns, rows)."""
    params, updates = zip(*pairs)
    n, lr = sum(p.size(0) == rows for p in params), group["lr"]
    # Each product of the iteration would communicate if a matrix stayed sharded.
    updates = [x.full_tensor() if is_sharded(x) else x for x in updates]
    x = torch.stack(updates[:n] + [update.mT for update in updates[n:]])
    x = newton_schulz(x, group).to(x.dtype)     # (N, rows, columns)
    if n:
        torch._foreach_add_(params[:n], shards(x[:n], params[:n]), alpha=-lr)
    if n < len(params):
        x = x[n:].mT.contiguous()
        # torch also scales matrices with more rows than columns by this square root.
        alpha = -lr * math.sqrt(columns / rows)
        torch._foreach_add_(params[n:], shards(x, params[n:]), alpha=alpha)


def newton_schulz(x, group):
    """Return matrices with the same singular vectors as the matrices x (N, rows, columns), where
    rows <= columns, but with singular values near 1 (Jordan et al. 2024,
    https://kellerjordan.github.io/posts/muon)."""
    a, b, c = group["ns_coefficients"]
    x = x if x.device.type == "cpu" else x.bfloat16()
    x = x / torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True).clamp(min=group["eps"])
    for _ in range(group["ns_steps"]):          # x <- a x + (b A + c A A) x with A = x x.T
        gram = torch.bmm(x, x.mT)
        gram = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, gram, x, beta=a)
    return x


def shards(x, params):
    """Return the matrices of x (N, rows, columns), sharded if the parameters are."""
    if not is_sharded(params[0]):
        return x.unbind()
    from torch.distributed.tensor import DTensor, Replicate
    mesh = params[0].device_mesh
    whole = [DTensor.from_local(matrix, mesh, [Replicate()] * mesh.ndim) for matrix in x]
    return [matrix.redistribute(placements=p.placements) for matrix, p in zip(whole, params)]


# ---- schedules ----

def set_schedules(group, step, cfg):
    """Set a group's values for the update after `step` completed steps."""
    group["lr"] = group["peak_lr"] * lr_factor(step, cfg)
    if cfg.decay_schedule == "linear":
        group["weight_decay"] = group["peak_decay"] * (1 - step / cfg.max_steps)
    if group["optimizer"] == "muon" and cfg.muon_momentum_steps:
        rise = min(1.0, step / cfg.muon_momentum_steps)
        group["momentum"] = 0.85 + rise * (MOMENTUM - 0.85)


def lr_factor(step, cfg):
    """Return the fraction of the peak learning rate for the update after `step` completed steps."""
    warmup = 0 if cfg.lr_schedule == "linear" else cfg.warmup_steps
    if cfg.lr_schedule == "cosine":
        progress = max(0, step - warmup) / max(1, cfg.max_steps - warmup)
        factor = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    else:
        cooldown = cfg.cooldown_frac * cfg.max_steps
        factor = min(1.0, (cfg.max_steps - step) / cooldown) if cooldown else 1.0
    return min((step + 1) / (warmup + 1), cfg.min_lr_frac + (1 - cfg.min_lr_frac) * factor)


def loop_starts(model_cfg, max_steps):
    """Return a list that has, for each loop of a model's blocks, the number of steps after which it
    begins to run. The steps are spread evenly over the first loop_warmup * max_steps steps, and no
    loop begins after the last step. A model without loops counts as one loop."""
    R = getattr(model_cfg, "n_loop", 1)
    warmup = getattr(model_cfg, "loop_warmup", 0.0) * max_steps
    return [min(max_steps - 1, math.ceil(warmup * r / max(1, R - 1))) for r in range(R)]


def set_budget(cfg, model):
    """Set max_steps if max_flops is given. Raise UserError if max_flops is less than one step. (If
    a run is resumed with steps of another size, its earlier steps count as if they had this
    size.)"""
    # costs[r] is the FLOPs of a step in which r loops run. With loop_warmup the first steps run one
    # loop, and loop_starts says when further ones begin. A model without loops counts as one loop.
    costs = [0.0]
    for loops in range(getattr(model.cfg, "n_loop", 1)):
        model.training_loops = loops + 1
        costs.append(tokens_per_step(cfg, model) * model.flops_per_token())

    def of_run(max_steps):
        """Return the FLOPs of a run of max_steps. The cost of a loop is added from the step at
        which it begins."""
        return sum((costs[r] - costs[r - 1]) * max(0, max_steps - start)
                   for r, start in enumerate(loop_starts(model.cfg, max_steps), 1))
    if 0 < cfg.max_flops < of_run(1):
        raise UserError(f"max_flops={cfg.max_flops:.3g} is less than one step of {of_run(1):.3g} "
                        f"floating-point operations")
    if cfg.max_flops:                           # 2**62, because a checkpoint holds no larger int
        cfg.max_steps = bisect.bisect_right(range(2**62), cfg.max_flops, key=of_run) - 1


def tokens_per_step(cfg, model):
    """Return the number of tokens of one optimizer step, over all processes."""
    return cfg.batch_size * cfg.gradient_accumulation_steps * model.cfg.block_size

"""
With fsdp=true, parameters, gradients and optimizer state are sharded over the processes (FSDP2).

Each block is one FSDP unit. All other parameters (embedding, norms, head) are one more unit,
because a tied head must be in the unit of the embedding. A unit's weights are gathered from all
processes when it runs, and again in the backward pass. Blocks that run several times (loops,
recursions, LRT's passes), or all at the same time (RT's wavefront), would be gathered, and their
gradients summed, once for each run. So a model of such blocks (runs_blocks_once is False) is a
single unit, which is gathered once a micro-batch. Gradients are summed and sharded after each
micro-batch, because each process would keep them whole otherwise. A checkpoint holds whole tensors,
the same as without sharding. In bfloat16 without torch.compile, autograd keeps 16-bit copies of the
gathered weights until the backward pass.

torch's modules for this take half a second to import, so that functions import them.
"""
import contextlib

import torch.distributed as dist

from common.options import UserError


def is_sharded(x):
    """Return whether x is a sharded tensor, a DTensor."""
    return hasattr(x, "full_tensor")


def shard(model, blocks, device, world):
    """Shard the model, whose blocks these are, in place over `world` processes. All processes must
    hold the same weights."""
    if scalars := [name for name, p in model.named_parameters() if p.dim() == 0]:
        raise UserError(f"fsdp=true cannot shard {scalars[0]}, which has no dimension")
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    mesh = init_device_mesh(device.type, (world,))
    for block in blocks if model.runs_blocks_once else ():
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


@contextlib.contextmanager
def gathered(model):
    """Inside, every process has all weights, and runs the model without the other processes. All of
    them must enter together. A model that is not sharded stays as it is."""
    units = [module for module in model.modules() if hasattr(module, "unshard")]
    for unit in units:
        unit.set_reshard_after_forward(False, recurse=False)
        unit.unshard()
    yield
    for unit in units:
        unit.reshard()
        unit.set_reshard_after_forward(unit is not model, recurse=False)    # FSDP2's default


def whole(tree):
    """Return a tree of lists and dicts in which each sharded tensor is gathered to the CPU of
    rank 0. The other processes have None in its place. All processes must call this."""
    if isinstance(tree, dict):
        return {key: whole(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [whole(value) for value in tree]
    if not is_sharded(tree):
        return tree
    tensor = tree.full_tensor()
    return tensor.cpu() if dist.get_rank() == 0 else None


def sharded_like(optimizer, state):
    """Return `state`, a state_dict with whole moments, with the moments sharded like the parameters
    of `optimizer`."""
    from torch.distributed.tensor import distribute_tensor
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    moments = {}
    for i, values in state["state"].items():
        p = parameters[i]
        # A moment has the parameter's shape. AdamW's `step` has not, and a plain number has none.
        moments[i] = {name: distribute_tensor(x.to(p.device), p.device_mesh, p.placements)
                      if getattr(x, "shape", None) == p.shape else x for name, x in values.items()}
    return {**state, "state": moments}

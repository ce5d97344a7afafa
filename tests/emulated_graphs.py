"""CUDA graphs without a GPU. A dispatch mode records which operators a function calls, and a replay calls them again on
the same tensors, while Python does not run. As on a GPU, recording computes nothing, and the host reads nothing. A
graph does not keep the memory from before that it reads, so that a replay fails if this memory was freed."""
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_leaves, tree_map_only

import graphs
import kernels

INDEXING = {getattr(torch.ops.aten, name) for name in ("index", "index_put", "index_put_", "_index_put_impl_")}
READS = {torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__, torch.Tensor.cpu}
COPIES = {torch.tensor, torch.as_tensor, torch.asarray, torch.Tensor.new_tensor}


def emulate(monkeypatch):
    """Let graphs.py record by this file. An operator of kernels.py is one call, as its Triton kernel is."""
    for name, new in (("record", record), ("recordable", lambda x: not is_recording()), ("SEEN", set()), ("GRAPHS", {})):
        monkeypatch.setattr(graphs, name, new)
    for name in "attend", "attend_gradients", "scan", "scan_gradients":
        monkeypatch.setattr(kernels, f"run_{name}", getattr(kernels, f"{name}_op"))


def is_recording():
    return any(isinstance(mode, Recording) for mode in _get_current_dispatch_mode_stack())


def record(function, generators=()):
    """Stand for graphs.record. Memory from before has its values back, and memory of the recording holds NaN until it
    is run."""
    states = [(generator, generator.get_state()) for generator in (torch.default_generator, *generators)]
    with NoTransfers(), Recording(generators) as recording:
        outputs = function()
    for memory, held in recording.overwritten.values():
        memory.copy_(held)
    recording.overwritten.clear()   # it would keep memory
    for memory in recording.allocated.values():
        memory.fill_(255)
    for generator, state in states:
        generator.set_state(state)
    return outputs, recording.run


class Recording(TorchDispatchMode):
    """Records the calls inside it in calls. overwritten is {address: (memory from before, its content)}."""

    def __init__(self, generators):
        super().__init__()
        self.generators, self.calls, self.overwritten, self.allocated = generators, [], {}, {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        why = refusal(func, args, kwargs, self.generators)
        if why:
            raise RuntimeError(f"{func} {why}")
        for place, argument in enumerate(func._schema.arguments):
            if argument.alias_info and argument.alias_info.is_write:
                given = args[place] if place < len(args) else kwargs.get(argument.name)
                for address, memory in memories(given).items() - self.allocated.items():
                    self.overwritten.setdefault(address, (memory, memory.clone()))
        outputs = func(*args, **kwargs)
        inputs = memories((args, kwargs))
        self.allocated.update({a: memory for a, memory in memories(outputs).items() if a not in inputs})
        keep = lambda x: x.detach() if x.untyped_storage()._cdata in self.allocated else Borrowed(x)
        self.calls.append((func, *tree_map_only(torch.Tensor, keep, (args, kwargs, tensors(outputs)))))
        return outputs

    @torch.inference_mode()
    def run(self):
        for call in self.calls:
            func, args, kwargs, outputs = tree_map_only(Borrowed, Borrowed.tensor, call)
            for old, new in zip(outputs, tensors(func(*args, **kwargs)), strict=True):
                if old.data_ptr() != new.data_ptr():    # if they are equal, it is a view, which has its values already
                    old.copy_(new)


class Borrowed:
    """A tensor whose memory is from before, which this object does not keep."""

    def __init__(self, x):
        self.memory = StorageWeakRef(x.untyped_storage())
        self.dtype, self.place = x.dtype, (x.storage_offset(), x.size(), x.stride())

    def tensor(self):
        memory = torch.UntypedStorage._new_with_weak_ptr(self.memory.cdata)
        if memory is None:
            raise RuntimeError("a replay reads memory that was freed")
        return torch.empty(0, dtype=self.dtype).set_(memory, *self.place)


class NoTransfers(TorchFunctionMode):
    """Refuses functions that read on the host or copy from the host on a GPU, but call no operator on a CPU."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in READS or func in COPIES:
            raise RuntimeError(f"{func} {'reads on' if func in READS else 'copies from'} the host")
        return func(*args, **(kwargs or {}))


def refusal(func, args, kwargs, generators):
    """Return why a CUDA graph cannot hold this call, or None."""
    if torch.Tag.data_dependent_output in func.tags:
        return "reads on the host"
    if func.overloadpacket in INDEXING:
        return "has a boolean mask" if any(x.dtype == torch.bool for x in tensors(args[1])) else None
    if torch.Tag.dynamic_output_shape in func.tags:
        return "has a shape that depends on data"
    drawn_from = {leaf._cdata for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Generator)}
    known = {generator._cdata for generator in generators}
    return "draws from a generator that is not registered" if drawn_from - known else None


def tensors(tree):
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def memories(tree):
    """Return {address: storage} of the tensors of a tree."""
    return {x.untyped_storage()._cdata: x.untyped_storage() for x in tensors(tree)}

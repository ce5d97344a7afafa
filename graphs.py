"""
A function recorded once and replayed as a CUDA graph.

On a GPU, Python needs some 10 to 30 microseconds to launch a kernel, and a small kernel takes 2.
A CUDA graph is the list of all kernels that a function has launched. Replaying it is one launch.

    record(function)                what the function computes, and a run() that repeats it
    Graph(function, inputs)         the same with new inputs at each call
    replay(key, function, *inputs)  ordinary at its first call, recorded at the second
    recordable(x)                   whether a call on x can be recorded

A function that is recorded must not read a tensor on the host (int(x), x.tolist(), if x: ...),
because nothing runs on the host when it is replayed. For the same reason no shape may depend
on data. What the function writes to tensors of others (a cache, a gradient) it writes again at
each replay.
"""
import importlib.util

import torch

SEEN, GRAPHS = set(), {}  # keys of replay that ran once; key -> Graph, the last used one last
MOST = 8                  # graphs that replay keeps, because each of them holds memory


def recordable(x):
    """Return whether a call on x can be recorded. x is a tensor in the call's dtype. Float64 and a
    machine without triton are left out, because kernels.py's plain code reads on the host."""
    return (x.is_cuda and x.dtype != torch.float64 and bool(importlib.util.find_spec("triton"))
            and not torch.cuda.is_current_stream_capturing())


def record(function, generators=()):
    """Record function() -> list of tensors without running it. Return its outputs, which hold no
    values yet, and a function that runs the recording once more and fills them.
    generators: the random number generators, beside torch's own, that the function draws from."""
    graph = torch.cuda.CUDAGraph()
    for generator in generators:
        graph.register_generator_state(generator)
    # thread_local: other threads may go on calling CUDA meanwhile
    with torch.cuda.graph(graph, stream=torch.cuda.Stream(), capture_error_mode="thread_local"):
        outputs = function()
    return outputs, graph.replay


class Graph:
    """function(*inputs) -> list of tensors, as a CUDA graph. The function has run before with
    inputs of these shapes, so that its kernels are compiled."""

    def __init__(self, function, inputs, generators=()):
        with torch.inference_mode(False), torch.cuda.device_of(inputs[0]):
            self.inputs = [x.clone() for x in inputs]
            self.outputs, self.run = record(lambda: function(*self.inputs), generators)

    def __call__(self, *inputs):
        for mine, given in zip(self.inputs, inputs):
            mine.copy_(given)
        self.run()
        return [x.clone() for x in self.outputs]  # the next run overwrites them


def replay(key, function, *inputs):
    """Return function(*inputs), a list of tensors. The second call with the same key is recorded,
    later ones are replayed. The key says all that decides which kernels run: the function, shapes,
    dtypes, settings."""
    if key not in SEEN:
        SEEN.add(key)
        return function(*inputs)
    if key not in GRAPHS:
        if len(GRAPHS) == MOST:
            del GRAPHS[next(iter(GRAPHS))]  # the one that was not used for longest
        GRAPHS[key] = Graph(function, inputs)
    GRAPHS[key] = GRAPHS.pop(key)
    return GRAPHS[key](*inputs)

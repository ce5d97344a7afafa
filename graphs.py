"""
A function recorded once and replayed as a CUDA graph.

On a GPU, Python needs some 10 to 30 microseconds to launch a kernel, and a small kernel takes 2.
A CUDA graph is the list of all kernels that a function has launched. Replaying it is one launch.

    record(function)                what the function computes, and a run() that repeats it
    Graph(function, inputs)         the same with new inputs at each call
    replay(key, function, *inputs)  ordinary at its first call, recorded at the second
    recordable(x)                   whether a call on x can be recorded
    decoder(model, cache)           a step of decoding: ordinary, then recorded, then replayed
    stepper(function, cache)        the same for any function that decodes one token a row

A function that is recorded must not read a tensor on the host, as int(x), x.tolist() and `if x`
do, because nothing runs on the host when it is replayed. For the same reason no shape may depend on
data. Each replay writes again what the function writes to tensors of others, as a cache or a
gradient.

Such functions are the decode step of every model and the two passes of RT's wavefront.
"""
import importlib.util

import torch

SEEN, GRAPHS = set(), {}  # keys of replay that ran once; key -> Graph, in the order of last use
MOST = 8                  # replay keeps this many graphs, because each of them holds memory


def recordable(x):
    """Return whether a call on x can be recorded. x is a tensor in the call's dtype. Float64 and a
    machine without triton are left out, because kernels.py's plain code reads on the host."""
    return (x.is_cuda and x.dtype != torch.float64 and bool(importlib.util.find_spec("triton"))
            and not torch.cuda.is_current_stream_capturing())


def record(function, generators=()):
    """Record function() -> list of tensors without running it. Return its outputs, which hold no
    values yet, and a function that runs the recording once more and fills them.
    generators are the random number generators, beside torch's own, that the function draws
    from."""
    graph = torch.cuda.CUDAGraph()
    for generator in generators:
        graph.register_generator_state(generator)
    # thread_local lets other threads go on calling CUDA meanwhile.
    with torch.cuda.graph(graph, stream=torch.cuda.Stream(), capture_error_mode="thread_local"):
        outputs = function()
    return outputs, graph.replay


class Graph:
    """function(*inputs) -> list of tensors, as a CUDA graph. The function has run before with
    inputs of these shapes, so that its kernels are compiled."""

    def __init__(self, function, inputs, generators=()):
        grad = torch.is_grad_enabled()  # inference_mode(False) alone would turn it on
        with (torch.inference_mode(False), torch.set_grad_enabled(grad),
              torch.cuda.device_of(inputs[0])):
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
            del GRAPHS[next(iter(GRAPHS))]  # the one that has not been used for the longest time
        GRAPHS[key] = Graph(function, inputs)
    GRAPHS[key] = GRAPHS.pop(key)
    return GRAPHS[key](*inputs)


# ---- one token after the other ----

def decoder(model, cache, then=lambda logits: logits, generators=()):
    """Return step(idx, n_valid=None) -> then(logits). It runs the model on one more token a row,
    idx (B, 1), and the logits are (B, 1, V). A step is one graph if it is recordable, else an
    ordinary call."""
    def function(idx, n_valid):
        return [then(model(idx, cache=cache, n_valid=n_valid)[0])]
    step = stepper(function, cache, generators)
    return lambda idx, n_valid=None: step(idx, n_valid)[0]


def stepper(function, cache, generators=()):
    """Return such a step for any function(idx, n_valid) -> list of tensors that decodes idx (B, 1)
    with this cache. n_valid (B,) has 1 or 0 tokens a row (None: 1 in each). The first step is a
    static call (decoding.py) without a graph, which compiles the kernels. The second one is
    recorded, and replayed from then on."""
    graph, n_steps = None, 0

    def step(idx, n_valid=None):
        nonlocal graph, n_steps
        if not recordable(cache.lengths.new_empty(0, dtype=cache.dtype)):
            return function(idx, n_valid)
        ragged = cache.ragged or n_valid is not None
        n_new = torch.ones_like(cache.lengths) if n_valid is None else n_valid.clamp(0, 1)
        cache.check_room(1, n_new)
        cache.begin_static()
        try:
            if n_steps == 1:
                graph = Graph(function, [idx, n_new], generators)
            outputs = (graph or function)(idx, n_new)
        finally:
            cache.end_static(1, ragged)
        n_steps += 1
        return outputs
    return step

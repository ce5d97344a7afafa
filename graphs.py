"""
A function recorded once and replayed as a CUDA graph.

On a GPU, Python needs some 10 to 30 microseconds to launch a kernel, and a small kernel runs for 2
microseconds. A CUDA graph is the list of all kernels that a function has launched. Replaying it is
one launch.

    record(function)                its outputs, and a run() that computes them
    Graph(function, inputs)         the same with new inputs at each call
    replay(key, function, *inputs)  calls the function. The second call with a key records it, and
                                    later calls replay it
    recordable(x)                   whether a call on x can be recorded
    decoder(model, cache)           decodes one token a row. The second call is recorded
    stepper(function, cache)        the same for any function that decodes one token a row
    plain_steps(model)              a context in which neither of the two records

A function that is recorded must not read a tensor on the host, as int(x), x.tolist() and `if x` do.
CUDA refuses this during a recording, because nothing has been computed then. No shape may depend on
data, because none of the function's Python code runs when it is replayed. If the function writes to
a tensor that it did not make, such as a cache or a gradient, each replay writes to this tensor
again.

With fast=true the project records the decode step of every model (which is also a step of LRT's
exact evaluation and prefill), and the two passes of RT's wavefront. With compile=graph it records
train.py's forward and backward pass.
"""
import collections
import contextlib
import functools
import gc
import importlib.util
import weakref

import torch

FREE = collections.defaultdict(list)  # for each device, the streams whose graphs are gone
SEEN, GRAPHS = set(), {}  # keys that replay has met; key -> Graph, the last used at the end
MOST = 8                  # the most graphs that replay keeps, because each of them holds memory
PLAIN = []                # not empty inside of plain_steps


def recordable(x):
    """Return whether a call on x can be recorded. x is a tensor in the call's dtype. Float64 and a
    machine without triton are left out, because kernels.py's plain code reads on the host. So is a
    call inside of a recording, because CUDA cannot record there."""
    return (x.is_cuda and x.dtype != torch.float64 and has_triton()
            and not torch.cuda.is_current_stream_capturing())


@functools.cache  # each decoded token asks, and looking for a package takes some 50 microseconds
def has_triton():
    return importlib.util.find_spec("triton") is not None


def record(function, generators=()):
    """Record function() -> list of tensors. This runs its Python code, but none of its kernels.
    Return its outputs, which hold no values yet, and a run(), each call of which runs the kernels
    and so fills the outputs. generators are the random number generators, beside torch's own, that
    the function draws from."""
    # cuBLAS has one workspace for each stream. torch 2.13 (but not 2.11) frees it when any graph of
    # this stream is gone, although other graphs of the stream still use it. Therefore graphs that
    # exist at the same time are recorded on different streams. torch has 32 streams and hands them
    # out in turn. After the last it hands out the first one again, which may still be in use. FREE
    # prevents this as long as no more than 32 graphs exist at the same time. It has the streams
    # whose graphs are gone, and they are taken first.
    graph, streams = torch.cuda.CUDAGraph(), FREE[torch.cuda.current_device()]
    stream = streams.pop() if streams else torch.cuda.Stream()
    weakref.finalize(graph, streams.append, stream)
    for generator in generators:
        graph.register_generator_state(generator)
    # Garbage may hold the autograd graph of an earlier call. Its nodes that add up gradients belong
    # to the stream of that call, so that a backward pass could not be recorded while they exist.
    # Without gradients no backward pass is recorded, so that nothing needs to be collected.
    if torch.is_grad_enabled():
        gc.collect()
    # During the recording Python collects no garbage, because that could destroy another graph, and
    # CUDA does not allow this then. thread_local allows other threads to call CUDA.
    collects, before = gc.isenabled(), torch.cuda.current_stream()
    gc.disable()
    try:
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            outputs = function()
    finally:
        # If the recording fails, torch leaves the recording's stream current.
        torch.cuda.set_stream(before)
        if collects:
            gc.enable()
    return outputs, graph.replay


class Graph:
    """function(*inputs) -> list of tensors, as a CUDA graph. The function must have run before with
    inputs of these shapes, so that its kernels are compiled."""

    def __init__(self, function, inputs, generators=()):
        self.function = function  # It may hold the only reference to tensors that a replay reads.
        # In inference mode the copies of the inputs would be inference tensors, and a later call
        # outside of it could not write to them. inference_mode(False) also turns gradients on, so
        # that the setting from before is put back.
        grad = torch.is_grad_enabled()
        # Autocast stays as it is, but without its cache. The cache holds 16-bit copies of weights.
        # They are freed when autocast ends, and a replay would still read them. Without the cache,
        # the graph makes these copies itself.
        kind = inputs[0].device.type
        autocast = torch.autocast(kind, torch.get_autocast_dtype(kind),
                                  torch.is_autocast_enabled(kind), cache_enabled=False)
        with (torch.inference_mode(False), torch.set_grad_enabled(grad), autocast,
              torch.cuda.device_of(inputs[0])):
            self.inputs = [x.clone() for x in inputs]
            self.outputs, self.run = record(lambda: function(*self.inputs), generators)

    def __call__(self, *inputs):
        for mine, given in zip(self.inputs, inputs):
            if mine.shape != given.shape:  # copy_ would repeat a smaller one
                raise ValueError(f"an input of the graph is {tuple(mine.shape)}, and not "
                                 f"{tuple(given.shape)}")
            mine.copy_(given)
        self.run()
        return [x.clone() for x in self.outputs]  # the next run overwrites them


def replay(key, function, *inputs):
    """Return function(*inputs), a list of tensors. The second call with a key records the function
    and replays it. A later call replays the graph, or records the function again if its graph was
    dropped to make room (MOST). The key says all that decides which kernels run: the function,
    shapes, dtypes, settings. A replay reads the same tensors as the recorded call did. A tensor
    must therefore be an input if a later call may have another one in its place."""
    if key not in SEEN:
        outputs = function(*inputs)
        SEEN.add(key)   # only now, because a call that failed may not have compiled all kernels
        return outputs
    if key not in GRAPHS:
        if len(GRAPHS) == MOST:
            del GRAPHS[next(iter(GRAPHS))]  # the one that has not been used for the longest time
        GRAPHS[key] = Graph(function, inputs)
    GRAPHS[key] = GRAPHS.pop(key)  # now it is the last
    return GRAPHS[key](*inputs)


# ---- one token after the other ----

def decoder(model, cache, then=lambda logits: logits, generators=()):
    """Return step(idx, n_valid=None) -> then(logits). A step runs the model on one more token a
    row, idx (B, 1), and the logits are (B, 1, V). `then` is part of the graph. A model with
    fast=false runs without a graph. The graph reads the weights from the memory in which they lay
    when it was recorded. They may change in place. If another tensor takes the place of a weight,
    the graph does not see this. See stepper."""
    def function(idx, n_valid):
        return [then(model(idx, cache=cache, n_valid=n_valid)[0])]
    step = stepper(function, cache, generators, model.cfg.fast)
    return lambda idx, n_valid=None: step(idx, n_valid)[0]


def stepper(function, cache, generators=(), fast=True):
    """Return step(idx, n_valid=None) -> function(idx, n_valid), a list of tensors. The function
    decodes idx (B, 1) with this cache. The caller of a step gives n_valid. n_valid (B,) says how
    many real tokens each row has left: at 1 or more the row decodes one, and at 0 or less it gets
    padding (None: each row decodes one). On a GPU the first step is a static call (decoding.py)
    without a graph, which compiles the kernels. A static call gets n_new (B,) in place of n_valid.
    It is 1 in a row that decodes a token, and 0 in a row that gets padding. It is never None,
    because an input of a graph must be a tensor. The second step records the static call. The
    second step and all later ones replay it. Where no step can be recorded, inside of plain_steps,
    and with fast=False, each is an ordinary call."""
    graph, n_steps = None, 0

    def step(idx, n_valid=None):
        nonlocal graph, n_steps
        x = cache.lengths.new_empty(0, dtype=cache.dtype)
        if PLAIN or not fast or not recordable(x):
            return function(idx, n_valid)
        ragged = cache.ragged or n_valid is not None
        n_new = cache.count_new(1, n_valid)
        cache.check_room(1, n_new)
        done = False
        try:
            cache.begin_static()
            if n_steps == 1:
                graph = Graph(function, [idx, n_new], generators)
            outputs = (graph or function)(idx, n_new)
            done = True
        finally:
            # After an error only cache.lengths, on the device, tells whether the token was counted.
            # So the rows count as ragged then.
            cache.end_static(1, ragged or not done)
        n_steps += 1
        return outputs
    return step


@contextlib.contextmanager
def plain_steps(model):
    """Inside, no decode step is recorded if FSDP shards the model. Its hooks use further streams,
    and its blocks, which train.py has compiled, would compile once more in the recording. CUDA
    allows neither."""
    if hasattr(model, "unshard"):   # FSDP adds this method
        PLAIN.append(model)
    try:
        yield
    finally:
        PLAIN.clear()

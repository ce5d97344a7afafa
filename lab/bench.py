"""
This program measures speed and memory. Each case is measured beside a baseline in the same run. The
ratios of README.md and lab/RESULTS.md come from here.

    python -m lab.bench gpt             one of gpt, rt, lrt, relaxed, mor: training and decoding
    python -m lab.bench rat             a layer of RAT beside attention and an RNN, by length
    python -m lab.bench throughput      RAT beside attention: tokens/s by the number of sequences
    python -m lab.bench kernels         attend_by_position beside torch's attention
    python -m lab.bench runs out/gpt_tiny out/mor_tiny  trained runs: training and decoding
    python -m lab.bench mor init_from=out/mor_tiny      requests to a trained mor, or relaxed

A model's options are those of train.py, and its sizes start from configs/<model>_tiny.yaml as in
train.py. As there, compile= decides whether training is compiled or replayed as a CUDA graph. It
chooses the first of the modes compiled, graph and eager, and the later modes are measured, too.
Decoding goes through graphs.decoder, as in sample.py. device=, optimizer= and tokenizer= (the size
of its vocabulary) hold, too. dtype= holds for training alone. A model decodes in bfloat16 and
float32 on a GPU, and in float32 on a CPU. batch_size= is that of training. In rat it is that of
decoding, and in throughput the most sequences. The other options of training have no effect.
Training takes one micro-batch a step, and clips its gradients at 1. The options of our tables are
in lab/experiments/speed.yaml, and those of the papers' sizes are in gpu_speed.yaml.

Each line names the measurement, its mode, and a case. A step is one forward and backward pass, one
training step (the same with an update), one decoded token of each row, one prefill or, with
requests, one token of an answer. Then come these numbers:
    ms          the time of a step, the median over rounds
    MiB         the most memory that the case holds during a call (see peak_memory)
    x           the time of a step as a multiple of the baseline's, which is the first case and
                stands behind the x; less than 1 is faster
    tokens/s    the tokens of all rows in a second
    MFU, MBU    on a known GPU: the fraction of its bfloat16 peak that the model's FLOPs reach, and
                the fraction of its memory's bandwidth that a step takes to read weights and cache
                (a weight that is shared by loops counts in each of them)
    launches    how many kernels an eager step launches, approximately (see Counting)

Options of lab.bench itself:
"""
import copy
import ctypes
import gc
import itertools
import json
import os
import random
import re
import time
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import mean, median
from types import SimpleNamespace
from unittest import mock

import numpy as np
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import graphs
import kernels
from common.checkpoint import build_model, check_tokenizer, load_run, load_start
from common.data import open_data
from common.device import (autocast, compiles, device_name, gpu_peaks, pick_device,
                           precision)
from common.options import (Options, UserError, merge, model_module, names, run_cli, split_args,
                            typed_config)
from common.optim import make_optimizers
from model_gpt import visible_keys
from serve import Engine, Request, loop_fractions


@dataclass
class BenchConfig(Options):
    device: str = "auto"            # of kernels and runs: auto | cpu | cuda | cuda:N
    skip: str = ""                  # parts of the names of rows to leave out, as naive,tiled
    longest: int = 0                # of rat: the longest sequence (0: 64 times block_size)

    def __post_init__(self):
        self.between(longest=(0, None))


# ---- measuring ----

WARM_UP = 2                 # rounds that do not count
nothing = lambda: None      # most calls prepare nothing


@dataclass
class Call:
    """A Call is a function that is timed. It takes `steps` steps, of training or of decoding."""
    run: object
    prepare: object = nothing   # runs before each call and is not timed
    steps: int = 1
    tokens: int = 0             # tokens that a step processes (0: the line does not say)
    flops: float = 0.0          # FLOPs of a step (0: the line does not say)
    count: object = None        # () -> launches of a step, bytes that it reads (None: not said)


def compare(cases, setup, device, rounds=None):
    """Time the cases {name: case}, and print a line for each. The first case is the baseline.
    setup(case) returns {title: Call}. Return {title: {name: milliseconds of a step}}. `rounds` is
    the number of rounds after the warm-up. Its default is 9 on a CPU and 3 on a GPU.

    On a CPU the cases are one group and take turns, so that a noisy neighbour slows all alike. On a
    GPU each case is a group of its own, so that it has the memory for itself. The groups come one
    after the other, so that nothing else may run there meanwhile. A group that does not fit is left
    out, and a line names its first case. Then the next case that fits is the baseline."""
    gpu, bases, found = device.type == "cuda", {}, {}
    rounds = WARM_UP + (rounds or (3 if gpu else 9))

    def measure(group):
        before = peak(device, forget=True) if gpu else 0
        with device:            # making models on the device is faster
            calls = {name: setup(cases[name]) for name in group}
        for title in calls[group[0]]:
            turn = {name: calls[name][title] for name in group if title in calls[name]}
            times, peaks = take_turns(turn, device, rounds)
            for name, call in turn.items():
                most = peaks[name] - before if gpu else peak_memory(
                    lambda: setup(cases[name])[title], device)
                base = bases.setdefault(title, (name, times[name][WARM_UP:]))
                found.setdefault(title, {})[name] = tell(
                    title, name, call, times[name][WARM_UP:], most, base, device)
    for group in [[name] for name in cases] if gpu else [list(cases)]:
        free_memory(device)
        try:
            measure(group)
        except RuntimeError as e:       # cuBLAS and graphs raise a RuntimeError too
            if not re.search("out of memory|ALLOC_FAILED", str(e)):
                raise
            print(f"{group[0]} does not fit")
    return found


def take_turns(calls, device, rounds):
    """Time the calls {name: Call} in turns. Return {name: list of seconds}, and {name: most bytes
    in use during a call}, which is empty on a CPU. The bytes of rounds that warm up do not count,
    because these may compile or record a graph."""
    wait = nothing if device.type == "cpu" else partial(torch.accelerator.synchronize, device)
    times, peaks = {name: [] for name in calls}, {}
    for n in range(rounds):
        for name, call in calls.items():
            call.prepare()
            wait()
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(device)
            start = time.perf_counter()
            call.run()
            wait()
            times[name].append(time.perf_counter() - start)
            if device.type == "cuda" and n >= WARM_UP:
                peaks[name] = max(peaks.get(name, 0), peak(device))
    return times, peaks


def tell(title, name, call, seconds, most, base, device):
    """Print a case's line, and return its milliseconds. Its ratio to the base (name, seconds) is
    the median of the rounds' ratios. On a CPU, where the cases take turns, noise moves it less than
    the ratio of two medians."""
    of_a_step = median(seconds) / call.steps
    ratio = median(a / b for a, b in zip(seconds, base[1]))
    memory = "" if most is None else f"{most / 2 ** 20:10,.0f} MiB"
    words = [f"{title:45} {name:26} {1000 * of_a_step:11.3f} ms{memory}{ratio:8.3f} x {base[0]}"]
    words += [f"{call.tokens / of_a_step:,.0f} tokens/s"] * (call.tokens > 0)
    launches, nbytes = call.count() if call.count else (0, 0)
    if peaks := gpu_peaks(device):
        words += [f"MFU {call.flops / of_a_step / peaks[0]:.1%}"] * (call.flops > 0)
        words += [f"MBU {nbytes / of_a_step / peaks[1]:.1%}"] * (nbytes > 0)
    words += [f"{launches:,} launches"] * (launches > 0)
    print(", ".join(words), flush=True)
    return 1000 * of_a_step


def free_memory(device):
    """Free the graphs and the compiled code, because they hold memory."""
    graphs.GRAPHS.clear()
    graphs.SEEN.clear()
    torch.compiler.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def peak_memory(setup, device):
    """Return the most bytes that a case holds on a CPU during a call. These are the weights, an
    optimizer's state or a cache, and the memory that the call needs besides. They are measured as
    the growth of the resident memory since before the case. Return None where the system is not
    Linux. On a GPU take_turns measures the memory instead."""
    if not RESET_PEAK.exists():
        return None
    before = peak(device, forget=True)
    call = setup()
    for _ in range(2):                  # the first step makes the optimizer's state
        call.prepare()
        peak(device, forget=True)
        call.run()
    return peak(device) - before


RESET_PEAK = Path("/proc/self/clear_refs")      # Linux has this file


def peak(device, forget=False):
    """Return the most bytes in use so far. forget=True starts the maximum again, from the bytes in
    use now. Free memory does not count among them."""
    if device.type == "cuda":
        if forget:
            torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.max_memory_allocated(device) + idle_in_graphs(device)
    if forget:
        ctypes.CDLL(None).malloc_trim(0)    # the allocator gives free memory back
        RESET_PEAK.write_text("5")           # VmHWM becomes the memory in use now
    status = Path("/proc/self/status").read_text()
    return 1024 * int(re.search(r"VmHWM:\s*(\d+) kB", status)[1])


def idle_in_graphs(device):
    """Return the bytes that CUDA graphs keep for what they compute in between. torch does not count
    these bytes as allocated, and a replay allocates nothing."""
    return sum(segment["total_size"] - segment["allocated_size"]
               for segment in torch.cuda.memory_snapshot()
               if segment["device"] == device.index and segment["segment_pool_id"] != (0, 0))


class Counting(TorchDispatchMode):
    """A Counting counts the operators that are called inside it. launches is the number of
    operators that compute something, because each of them is about one kernel on a GPU. Views and
    allocations do not count, and an operator of kernels.py counts once. The kernels of rt_triton.py
    do not count, because they are called without an operator. An RMSNorm is one launch on
    CUDA and six on a CPU, where torch writes it out. nbytes is how many bytes of `tensors`
    (weights, a cache) the operators read. An embedding reads only a few rows of its table, which do
    not count. An index_select reads as much as it returns."""
    NO_KERNEL = re.compile("empty|unsafe_view|promote_types|lift_fresh|scalar_dense")

    def __init__(self, tensors=()):
        super().__init__()
        self.memory = {x.untyped_storage().data_ptr() for x in tensors}
        self.launches = self.nbytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name, out = func.__name__, func(*args, **(kwargs or {}))
        if not (func.is_view or self.NO_KERNEL.search(name)):
            self.launches += 1
            read = args[func._schema.is_mutable:]   # an in-place operator writes the first
            read = [x for x in tree_leaves(read) if isinstance(x, torch.Tensor)
                    and x.untyped_storage().data_ptr() in self.memory]
            read = [out] if name.startswith("index_select") and read else read
            self.nbytes += sum(x.nbytes for x in read) * (not name.startswith("embedding"))
        return out


def counted(call, tensors=()):
    """Return the launches of a step of a Call, and the bytes of tensors that it reads."""
    call.prepare()
    operators = dict(run_attend=kernels.attend_op, run_scan=kernels.scan_op,
                     run_attend_gradients=kernels.attend_gradients_op)  # each counts once
    with (mock.patch.multiple(kernels, **operators),
          mock.patch.object(graphs, "recordable", lambda x: False),     # a replay calls no operator
          Counting(tensors) as counting):
        call.run()
    return counting.launches // call.steps, counting.nbytes // call.steps


# ---- what a model does ----

def build(cfg, name, options=""):
    """Return an untrained model: model_<name>, or the one that model= in `options` names. `options`
    come first, and then those fields of the Config `cfg` that the model has, too."""
    given = {"model": name, **split_args(options.split())[1]}
    module = model_module(given.pop("model"))
    sizes = dict(n_kv_head=cfg.kv_heads, head_dim=cfg.head_size, n_mlp=cfg.mlp_width)
    same = {key: value for key, value in {**asdict(cfg), **sizes}.items()
            if key in names(module.Config)}
    return module.Model(typed_config(module.Config, {**same, **given}))


def recordable(device):
    return graphs.recordable(torch.empty(0, device=device))


def training_modes(cfg, device):
    """Return the modes in which training is measured, from compiled, graph and eager. train.py
    takes the first of them. A ratio compares cases in the same mode. compile=graph leaves out
    compiled, and compile=false leaves out both compiled and graph."""
    modes = ["compiled"] if compiles(cfg, device) else []
    modes += ["graph"] if cfg.compile != "false" and recordable(device) else []
    return modes + ["eager"]


PARTS = "forward + backward", "training step"


def training(model, device, cfg, mode, parts=PARTS, note=""):
    """Return {title: Call} of the parts. A part is a forward and backward pass on a fixed random
    batch, or the same with clipping and the optimizer's step. `note` stands in the titles. The
    result is empty if mode is graph and the model is mor with router=token, because that model
    reads a tensor on the host."""
    if mode == "graph" and getattr(model.cfg, "router", "") == "token":
        return {}
    if device.type == "cuda":   # train.py sets this too
        torch.set_float32_matmul_precision("high")
    model = model.to(device).train()
    forward = torch.compile(model) if mode == "compiled" else model
    size = cfg.batch_size, model.cfg.block_size + 1
    idx = torch.randint(0, model.cfg.vocab_size, size, device=device)

    def backward(x, y):
        with autocast(cfg, device):
            loss = forward(x, y)[1]
        loss.backward()
        return [loss.detach()]
    # The first call makes the gradients. The graph of the second call adds to them in place.
    add_gradients = partial(graphs.replay, object(), backward) if mode == "graph" else backward

    def step(optimizers):
        add_gradients(idx[:, :-1], idx[:, 1:])
        if optimizers:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
        if mode == "graph":
            torch._foreach_zero_([p.grad for p in model.parameters() if p.grad is not None])
        else:
            model.zero_grad(set_to_none=True)

    calls, tokens = {}, cfg.batch_size * model.cfg.block_size
    for part in parts:
        run = partial(step, make_optimizers(model, cfg) if part == "training step" else [])
        calls[f"{part}{note}, {mode}"] = call = Call(
            run, tokens=tokens, flops=tokens * model.flops_per_token())
        call.count = partial(counted, call) if mode == "eager" else None
    return calls


NEW = 8         # tokens that one call decodes


def decoding(model, device, T, rows, idx=None, new=NEW, mode="graph"):
    """Return the Call that decodes the last `new` of T tokens of each row, one after the other. The
    tokens are those of idx, or random ones. Its `prepare` fills the cache with the tokens before
    these. It is not timed. If more than one token is decoded, LRT fills the cache by
    prefill=interleaved, because its exact chain is slow. With new=1 LRT keeps the prefill of its
    config: bench_decoding measures the prefill in this way, and times `prepare` itself."""
    if device.type == "cuda":   # sample.py has this setting
        torch.set_float32_matmul_precision("highest")
    model, start = model.to(device).eval(), max(1, T - new)
    if idx is None:
        idx = torch.randint(0, model.cfg.vocab_size, (rows, T), device=device)
    idx = idx[:rows]
    if new > 1 and getattr(model.cfg, "prefill", "") == "exact" and model.cfg.has_chain:
        model.cfg = replace(model.cfg, prefill="interleaved")
    cache = model.init_cache(rows, T)

    @torch.inference_mode()
    def prefill():
        cache.reset()
        # A call takes at most 65,536 tokens, so that it fits in memory.
        for ids in idx[:, :start].split(max(1, 2 ** 16 // rows), 1):
            h = model.decode(ids, cache)
        model.head(h[:, -1])    # as in sample.prefill, the last tokens alone have logits

    def eager(ids):
        model(ids, cache=cache)

    def decode(step):
        for at in range(start, T):
            step(idx[:, at:at + 1])
    # Inference mode would hide the operators that an operator calls, so that count() runs under
    # no_grad.
    plain = Call(partial(torch.no_grad()(decode), eager), prefill, steps=T - start)

    def count():
        launches, nbytes = counted(plain, [*model.parameters(), *cache.buffers()])
        return launches if mode == "eager" else 0, nbytes
    step = graphs.decoder(model, cache) if mode == "graph" else eager
    return replace(plain, run=partial(torch.inference_mode()(decode), step), tokens=rows,
                   count=count)


# ---- models ----

# {model: {row: options}}. The first row is the baseline. In lrt, the prefill is measured by
# interleaving in the rows "interleaved", and by the exact chain in the rows after these.
ROWS = {
    "gpt": {"fast": "fast=true", "naive": "fast=false"},
    "rt": {
        "plain Transformer": "model=gpt mlp=gelu qk_norm=false",
        "without recurrence": "recurrent=false",
        "wavefront": "recurrent=true schedule=wavefront",       # a CUDA graph on a GPU
        "tiled": "recurrent=true schedule=tiled",
        "naive": "recurrent=true schedule=naive"},
    "lrt": {
        "backbone": "memory=false",
        "interleaved, N = 2": "train_path=interleaved subsets=2 prefill=interleaved",
        "interleaved, N = 4": "train_path=interleaved subsets=4 prefill=interleaved",
        "interleaved, N = 8": "train_path=interleaved subsets=8 prefill=interleaved",
        "layerwise projections": "train_path=interleaved projections=layerwise prefill=exact",
        "chunked 64, prefill exact": "train_path=chunked chunk=64 prefill=exact",
        "chunked 256, prefill exact": "train_path=chunked chunk=256 prefill=exact"},
    "relaxed": {"untied model": "model=gpt", "rank 0": "rank=0", "rank 8": "rank=8"},
    "mor": {
        "plain model": "model=gpt",
        "no router": "router=none router_func=",
        "2 recursions": "n_loop=2 router=expert router_func=",
        "3 recursions": "n_loop=3 router=expert router_func=",
        "kv=share": "kv=share router=expert router_func=",
        "router=token": "router=token router_func= z_loss=-1"}}


def kept(rows, skip):
    """Return the rows whose names contain none of the parts that skip= lists."""
    parts = list(filter(None, skip.split(",")))
    left = {name: row for name, row in rows.items() if not any(part in name for part in parts)}
    if not left or not all(any(part in name for name in rows) for part in parts):
        raise UserError(f"skip={skip} must be parts of some names with commas between them, and "
                        f"not of all; the names are {' | '.join(rows)}")
    return left


def bench_model(name, model_cfg, cfg, device, own=BenchConfig()):
    """Measure training and decoding of the ROWS of a model, and print their FLOPs."""
    rows, make = kept(ROWS[name], own.skip), partial(build, model_cfg, name)
    for mode in training_modes(cfg, device):
        compare(rows, lambda options: training(make(options), device, cfg, mode), device)
    bench_decoding(make, rows, model_cfg.block_size, device)
    with torch.device("meta"):
        flops = {row: make(options).flops_per_token() for row, options in rows.items()}
    for row, number in flops.items():
        print(f"training FLOPs a token: {number / next(iter(flops.values())):.2f} x ({row})")


def decoding_modes(device):
    """Return the modes in which decoding is measured, each (dtype of weights and cache, graph or
    eager). The first is sample.py's default."""
    dtypes = [torch.bfloat16, torch.float32] if device.type == "cuda" else [torch.float32]
    graph = [(dtype, "graph") for dtype in dtypes] if recordable(device) else []
    return graph + [(dtypes[0], "eager")]


def bench_decoding(make, cases, T, device, batches=(1, 16), prompts=1, rounds=None, idx=None):
    """Measure decoding and prefill of the models make(case), and print the size of an empty cache.
    Decoding takes the last NEW of T tokens, and prefill takes T - 1 tokens of `prompts` rows. The
    tokens are those of idx, or random ones. rounds is two numbers, of decoding and of prefill. The
    first mode decodes all batches, and the other modes decode the first batch. Return {name: {case:
    number}} of the first mode."""
    found, rounds = {}, rounds or ((5, 3) if device.type == "cuda" else (36, 9))
    modes = decoding_modes(device)
    default_dtype = modes[0][0]
    for (dtype, mode), rows in [*itertools.product(modes[:1], batches),
                                *itertools.product(modes[1:], batches[:1])]:
        title = f"decoding batch {rows}, T {T:,}, {str(dtype).removeprefix('torch.')}, {mode}"
        times = compare(cases, lambda case: {
            title: decoding(make(case).to(dtype), device, T, rows, idx, mode=mode)}, device,
            rounds[0])
        found.setdefault(f"decode_{rows}_ms", times.get(title, {}))     # {} if no case fits
    title = f"prefill {T - 1:,} tokens, {str(default_dtype).removeprefix('torch.')}"
    compare(cases, lambda case: {title: Call(
        decoding(make(case).to(default_dtype), device, T, prompts, idx, new=1).prepare,
        tokens=prompts * (T - 1))}, device, rounds[1])
    with device:
        found["cache_bytes"] = {row: make(case).to(default_dtype).init_cache(1, T).nbytes() / T
                                for row, case in cases.items()}
    for row, number in found["cache_bytes"].items():
        print(f"cache, T {T:,}: {number:,.1f} bytes a token ({row})")
    return found


def bench_rat(model_cfg, cfg, device, own=BenchConfig()):
    """Measure a layer of RAT beside attention and the RNN, as the paper's Tables 6, 7 and 8 do. The
    same number of tokens, 64 block_size, is cut into sequences of block_size tokens, of twice as
    many, and so on. Decoding takes a token of each of batch_size sequences."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    kinds = kept({"attention": "mixer=attention", f"RAT({model_cfg.chunk})": "mixer=rat",
                  "RNN": "mixer=rnn"}, own.skip)

    def make(T, options):
        """Return a model of one layer that keeps only the mixer with its projections."""
        model = build(model_cfg, "rat", f"block_size={T} n_layer=1 vocab_size=64 swa=0 {options}")
        block = model.blocks[0]
        model.norm = block.norm1 = block.norm2 = block.mlp = torch.nn.Identity()
        return model
    for n in range(7):
        T, of_T = model_cfg.block_size << n, replace(cfg, batch_size=64 >> n)
        if own.longest and T > max(own.longest, model_cfg.block_size):
            break
        for mode in training_modes(cfg, device):
            compare(kinds, lambda options: training(make(T, options).to(dtype), device, of_T, mode,
                                                    PARTS[:1], f", T {T:,}"), device, rounds=3)
        bench_decoding(partial(make, T), kinds, T, device, [cfg.batch_size], of_T.batch_size,
                       (3, 3))


def bench_throughput(model_cfg, cfg, device, own=BenchConfig(), new=64):
    """Measure the tokens/s of whole models, each of which decodes the last `new` of block_size
    tokens. The number of sequences is doubled up to batch_size, or until the caches would take half
    of all memory."""
    T, K, speeds = model_cfg.block_size, model_cfg.chunk, {}
    memory = (torch.cuda.mem_get_info(device)[1] if device.type == "cuda" else
              os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    kinds = {"attention": "mixer=attention swa=0", f"RAT({K})": "mixer=rat swa=0"}
    kinds |= {f"RAT({K})-SWA": "mixer=rat"} if model_cfg.swa else {}
    for name, options in kept(kinds, own.skip).items():
        with device:
            model, rows = build(model_cfg, "rat", options).to(decoding_modes(device)[0][0]), 1
        nbytes = model.init_cache(1, T).nbytes()
        most = max(1, min(cfg.batch_size, memory // 2 // nbytes))
        while rows <= most:
            times, _ = take_turns({name: decoding(model, device, T, rows, new=new)}, device, 2)
            speed = rows * min(new, T - 1) / times[name][-1]
            speeds[name] = max(speed, speeds.get(name, 0))
            print(f"{name:13} {rows:6,} sequences of {T:,} {speed:11,.0f} tokens/s "
                  f"{rows * nbytes:16,} bytes of cache", flush=True)
            rows = 2 * rows
    for name, speed in speeds.items():
        first = next(iter(speeds))
        print(f"highest: {speed:,.0f} tokens/s, {speed / speeds[first]:.2f} x ({name})")


# ---- kernels ----

def bench_kernels(device, own=BenchConfig(), sizes=None):
    """Time attend_by_position of kernels.py, in rows called attend, beside torch's attention
    (SDPA), forward and backward. sizes is a list of (B, H, T, D)."""
    gpu = device.type == "cuda"
    functions = {"SDPA": partial(F.scaled_dot_product_attention, is_causal=True),
                 "attend": lambda q, k, v: kernels.attend_by_position(q, k, v)[0]}
    functions = kept(functions, own.skip)
    for B, H, T, D in sizes or ([(4, 16, 4096, 128), (1, 16, 65536, 128)] if gpu else
                                [(1, 8, 1024, 64), (1, 4, 8192, 64)]):
        dtype = torch.bfloat16 if gpu else torch.float32
        x = torch.randn(4, B, T, H, D, device=device, dtype=dtype).transpose(2, 3)
        *qkv, do = x.requires_grad_().unbind()
        compare(functions, lambda attention: {f"attention, T {T:,}": Call(
            lambda: torch.autograd.grad(attention(*qkv), qkv, do), tokens=B * T,
            flops=12.0 * B * H * D * T * visible_keys(T))}, device)


# ---- trained runs ----

def bench_runs(folders, device, own=BenchConfig()):
    """Compare runs of the same data by a training step, a decoded token, and the cache. The context
    before the token is the data's own text, because the text decides how deep MoR's tokens go. The
    first run is the baseline. reproduce.py reads the last line of the output."""
    ckpts, load = {f: load_run(f)[2] for f in folders}, lambda f: load_run(f, device)[0]
    cfgs = {folder: SimpleNamespace(**ckpt["config"]) for folder, ckpt in ckpts.items()}
    data = open_data(cfgs[folders[0]])["val"]
    for folder, ckpt in ckpts.items():
        check_tokenizer(ckpt, data, folder)
    T = min(ckpt["model_config"]["block_size"] for ckpt in ckpts.values())
    if T < 2:
        raise UserError("block_size=1 is too short: decoding needs at least 2 tokens")
    idx = data.windows(np.linspace(0, data.tokens - T, 16).astype(int), T)
    cases, found = kept(dict(zip(folders, folders)), own.skip), {}
    for mode in training_modes(cfgs[folders[0]], device):
        step = lambda f: training(load(f), device, cfgs[f], mode, PARTS[1:])
        for times in compare(cases, step, device).values():
            found.setdefault("train_ms", times)
    found |= bench_decoding(load, cases, T, device, idx=torch.from_numpy(idx).to(device))
    print(json.dumps({f: {name: found[name].get(f) for name in found} for f in folders}))


# ---- requests to trained models that loop over depth, by serve.py's Engine ----

PROMPT, ANSWER = (4, 16), (32, 96)      # least and most tokens of a request
LONGEST, REQUESTS = PROMPT[1] + ANSWER[1], 240
SLOTS = {"relaxed": 32, "mor": 16}
# With these options, a model has as many layers but no loops.
UNTIED = {"relaxed": "n_loop=1 rank=0 early_exit=none exit_loop=0",
          "mor": "n_loop=1 router=none router_func= share=cycle kv=recursion exit_loop=0"}


def bench_requests(name, model, text, device, own=BenchConfig()):
    """Time requests that all come to an Engine at once. A line about batching over depth also says
    how near the speed comes to a bound. A token takes only a fraction of the layers, and at the
    bound it takes only this fraction of the time that a token of the baseline takes."""
    if min(model.context_limit or LONGEST, len(text) - 1) < LONGEST:
        raise UserError(f"requests of {LONGEST} tokens need block_size={LONGEST} or more, and a "
                        f"longer text")
    all_cases = serving_cases(name, model, text, device)
    cases, answered = kept(all_cases, own.skip), {}

    def answer(case):
        answered[case] = workload(text)
        list(cases[case]().run(answered[case]))
    tokens = sum(request.max_new_tokens for request in workload(text))
    calls = {case: Call(partial(answer, case), steps=tokens, tokens=1) for case in cases}
    times, _ = take_turns(calls, device, 3)     # the first is slow, and is not the median
    first, baseline = next(iter(cases)), next(iter(all_cases))
    for case, call in calls.items():
        tell(f"{REQUESTS} requests, {SLOTS[name]} slots", case, call, times[case], None,
             (first, times[first]), device)
    batched = [case for case in cases if case.endswith("depth")]
    for case in batched if first == baseline else ():       # skip= may leave out the baseline
        loops = [loop for request in answered[case] for loop in request.exits]
        # A prompt's tokens take all loops of relaxed. The prompt's last token is the first entry of
        # exits. In mor the router decides for them, too, and exits does not say how, so that only
        # the last one counts.
        if name == "relaxed":
            loops += [model.loops_to_run for r in answered[case] for _ in r.prompt[1:]]
        # The baseline of relaxed takes all loops up to exit_loop, and that of mor all layers.
        n_loop = model.loops_to_run if name == "relaxed" else model.cfg.n_loop
        outside = getattr(model.cfg, "n_outside", 0) / model.cfg.n_layer
        layers = outside + (1 - outside) * mean(loops) / n_loop
        speed = median(a / b for a, b in zip(times[first], times[case]))
        print(f"  {case}: tokens by loops {loop_fractions(loops, model.cfg.n_loop)}: {layers:.3f} "
              f"of the layers; {layers * speed:.0%} of the bound's speed")


def workload(text):
    """Return the requests, which are the same each time."""
    rng, requests = random.Random(0), []
    for _ in range(REQUESTS):
        size, new = rng.randint(*PROMPT), rng.randint(*ANSWER)
        at = rng.randrange(len(text) - LONGEST)
        requests.append(Request(text[at:at + size].tolist(), new))
    return requests


def serving_cases(name, model, text, device):
    """Return {name: a function that makes an Engine}. Batching is over sequences and over depth,
    and relaxed runs without early exit and with it. A model that is as deep and has no loops is
    added. For mor this model is the baseline."""
    engine, kinds = partial(Engine, slots=SLOTS[name], max_len=LONGEST), {"MoR": {}}
    if name == "relaxed":
        exit = early_exit(model, text, device)
        kinds = {"all loops": {}, "propagate": dict(exit=exit, fill="propagate"),
                 "exact": dict(exit=exit, fill="exact")}
    cases = {f"{kind}, {batching}": partial(engine, model, batching=batching, **how)
             for kind, how in kinds.items() for batching in ("sequence", "depth")}
    untied = build(model.cfg, name, UNTIED[name]).to(device).eval()
    untied = {"untied, sequence": partial(engine, untied, batching="sequence")}
    return untied | cases if name == "mor" else cases | untied


@torch.no_grad()
def early_exit(model, text, device, fraction=0.65):
    """Return the rule by which this fraction of a text's tokens exits after the first loop. They
    are the tokens whose prediction is surest there. Print the loss with these exits and without
    them. All tokens have the keys of all loops (fill=exact). With more than two loops the rule lets
    further tokens exit after a later loop, and this loss does not show it."""
    first = copy.copy(model)
    first.cfg = replace(model.cfg, exit_loop=1)
    n = min(len(text) - 1, 32 * LONGEST) // LONGEST * LONGEST
    idx, targets = (torch.from_numpy(text[at:][:n]).to(device) for at in (0, 1))
    early, late = (m(idx.view(-1, LONGEST))[0].flatten(0, 1) for m in (first, model))     # (n, V)
    sure = early.softmax(-1).amax(-1)
    least = sure.quantile(1 - fraction)
    served = torch.where(sure[:, None] >= least, early, late)
    without, with_exits = (float(F.cross_entropy(logits, targets)) for logits in (late, served))
    print(f"exit=confidence:{least:.8g}: {with_exits:.4f} nats a token, without exits "
          f"{without:.4f}")
    return f"confidence:{least:.8g}"


# ---- the command ----

OWN = {"skip", "longest"}       # options that train.py does not have
BENCHES = {"rat": bench_rat, "throughput": bench_throughput,
           **{name: partial(bench_model, name) for name in ROWS}}


def main(argv):
    words, given = split_args(argv, most=None)
    name, *folders = words or [""]
    if name not in (*BENCHES, "kernels", "runs") or bool(folders) != (name == "runs"):
        raise UserError("lab.bench NAME [option=value ...] needs a NAME, which is one of: "
                        + ", ".join(BENCHES) + ", kernels, runs out/A ...")
    torch.manual_seed(1337)
    if name in ("kernels", "runs"):
        own = typed_config(BenchConfig, given)
        device = pick_device(own.device)
        print(device_name(device), torch.__version__, sep=", torch ")
        return bench_runs(folders, device, own) if folders else bench_kernels(device, own)
    own = typed_config(BenchConfig, {name: given.pop(name) for name in OWN & given.keys()})
    model = "rat" if name == "throughput" else name
    if given.setdefault("model", model) != model:
        raise UserError(f"model={given['model']} is not measured by lab.bench {name}, which takes "
                        f"model={model}")
    cfg, model_fields, ckpt = merge(given, load_start)
    if "vocab_size" not in model_fields:
        model_fields["vocab_size"] = vocabulary(cfg.tokenizer)
    model_cfg, device = model_module(model).Config(**model_fields), pick_device(cfg.device)
    if model_cfg.block_size < 2:
        raise UserError("block_size=1 is too short: decoding needs at least 2 tokens")
    print(f"{device_name(device)}, torch {torch.__version__}, {model_cfg.n_layer} layers of width "
          f"{model_cfg.n_embd}, batch {cfg.batch_size} x {model_cfg.block_size} tokens, "
          f"vocabulary {model_cfg.vocab_size:,}"
          + ", training in bfloat16 (autocast)" * (precision(cfg.dtype, device) == "bfloat16"))
    if ckpt is not None and name in ("relaxed", "mor"):
        trained = SimpleNamespace(**ckpt.get("config", asdict(cfg)))
        check_tokenizer(ckpt, data := open_data(trained)["val"], cfg.init_from)
        text = data.windows([0], min(data.tokens, 100_000))[0]
        built = build_model(ckpt, **model_fields)
        return bench_requests(name, built.to(device).eval(), text, device, own)
    BENCHES[name](model_cfg, cfg, device, own)


def vocabulary(tokenizer):
    """Return the size of the vocabulary of tokenizer=. A run has it from its data, but lab.bench
    reads no text."""
    kind, _, size = tokenizer.partition(":")
    known = {"byte": "257", "gpt2": "50257", "bpe": size}.get(kind, "")
    if not known.isdecimal():
        raise UserError(f"vocab_size= is needed with tokenizer={tokenizer}")
    return int(known)


if __name__ == "__main__":
    run_cli(main, BenchConfig)

"""
Speed and memory, measured beside a baseline in the same run: where the README's ratios come from.

    python -m lab.bench gpt             one of gpt, rt, lrt, relaxed, mor: training and decoding
    python -m lab.bench rat             a layer of RAT beside attention and an RNN, by length
    python -m lab.bench throughput      RAT beside attention: tokens/s by the number of sequences
    python -m lab.bench kernels         attend and scan
    python -m lab.bench runs out/gpt_tiny out/mor_tiny  trained runs, training and decoding
    python -m lab.bench mor init_from=out/mor_tiny      requests to a trained mor, or relaxed

A model's keys are train.py's; sizes start from configs/<model>_tiny.yaml as there. Those of our
tables are in lab/experiments/speed.yaml, those of the papers in gpu_speed.yaml. Every line names a
case, its milliseconds (the median over rounds), the most memory that it holds during a call (see
peak_memory), and how many times as long as the baseline it takes: less than 1 is faster.

kernels and runs have keys of their own:
"""
import copy
import ctypes
import gc
import json
import os
import random
import re
import statistics
import time
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
import torch.nn.functional as F

import kernels
import rt_wavefront
from common.checkpoint import load_run
from common.data import TokenData, open_data
from common.keys import (UserError, asks_help, help_text, is_key, model_module, run_cli,
                         split_args, split_paths, typed_config, writing)
from common.optim import make_optimizers
from common.process import check_tokenizer, device_name, pick_device, read_config
from common.sampling import loop_fractions
from serve import Engine, Request


# ---- measuring ----

def compare(title, cases, setup, device, rounds=9, per=1, warmup=2, memory=True):
    """Time the cases {name: case} and print a line for each: the median, its most memory, and the
    median of the rounds' ratios to the first case, which noise moves less. setup(case) returns
    two functions: prepare runs before each call, outside the clock.

    On a CPU the cases take turns, so that a noisy neighbour slows all alike. On a GPU they come
    one after the other: each has the memory for itself. per: what a call is divided by. Returns
    {name: seconds of each round}, none where memory is short."""
    times, peaks, base = {}, {}, next(iter(cases))
    for names in [[name] for name in cases] if device.type == "cuda" else [list(cases)]:
        calls = None
        try:
            free_memory(device)
            calls = {name: setup(cases[name]) for name in names}
            times |= take_turns(calls, device, rounds, warmup)
            calls = None
            if memory and (device.type == "cuda" or RESET_PEAK.exists()):
                free_memory(device)
                peaks |= {name: peak_memory(setup, cases[name], device) for name in names}
        except torch.cuda.OutOfMemoryError:
            times |= {name: [] for name in names}
    for name, t in times.items():
        line = f"{title:28} {name:29} "
        line += f"{1000 * statistics.median(t) / per:11.3f} ms" if t else "  does not fit"
        line += f"{peaks[name] / 2 ** 20:10,.0f} MiB" if t and name in peaks else ""
        line += f"{ratio(t, times[base]):8.3f} x {base}" if t and times[base] else ""
        print(line, flush=True)
    return times


def take_turns(calls, device, rounds, warmup=0):
    """Seconds of {name: (prepare, call)}, a list each."""
    wait = partial(torch.cuda.synchronize, device) if device.type == "cuda" else nothing
    times = {name: [] for name in calls}
    for _ in range(warmup + rounds):
        for name, (prepare, call) in calls.items():
            prepare()
            wait()
            start = time.perf_counter()
            call()
            wait()
            times[name].append(time.perf_counter() - start)
    return {name: seconds[warmup:] for name, seconds in times.items()}


def ratio(times, baseline):
    return statistics.median(a / b for a, b in zip(times, baseline))


nothing = lambda: None      # what most cases prepare


def free_memory(device):
    rt_wavefront.GRAPHS.clear()         # they hold memory, and so does what is compiled
    rt_wavefront.SEEN.clear()
    torch.compiler.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


RESET_PEAK = Path("/proc/self/clear_refs")      # of Linux


def peak_memory(setup, case, device):
    """The most bytes that a case holds during a call: weights, an optimizer's state or a cache,
    and what the call needs besides. On a CPU: resident memory, beyond what there was before the
    case (nothing is told where the system is not Linux)."""
    before = peak_from_here(device)
    prepare, call = setup(case)
    for _ in range(2):                  # the first step makes the optimizer's state
        prepare()
        peak_from_here(device)
        call()
    return peak_now(device) - before


def peak_from_here(device):
    """Forget the peak so far, and return the bytes in use. What is free does not count."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        ctypes.CDLL(None).malloc_trim(0)
        RESET_PEAK.write_text("5")
    return peak_now(device)


def peak_now(device):
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    status = Path("/proc/self/status").read_text()
    return 1024 * int(re.search(r"VmHWM:\s*(\d+) kB", status)[1])


# ---- what a model does ----

def build(cfg, name, keys=""):
    """An untrained model_<name>, or that of model= in keys, with these keys and those of cfg that
    it has. compile=true: by torch.compile."""
    given = {"model": name, "compile": "false", **split_args(keys.split())}
    module, compiled = model_module(given.pop("model")), given.pop("compile") == "true"
    names = {f.name for f in fields(module.Config)}
    same = {key: value for key, value in asdict(cfg).items() if key in names}
    model = module.Model(typed_config(module.Config, given, same))
    return torch.compile(model) if compiled else model


def training(model, device, cfg, part="training step"):
    """On a fixed random batch: "forward", "forward + backward", or the optimizer's step too."""
    model, mixed = model.to(device).train(), device.type == "cuda"
    size = cfg.batch_size, model.cfg.block_size + 1
    idx = torch.randint(0, model.cfg.vocab_size, size, device=device)
    optimizers = make_optimizers(model, cfg) if part == "training step" else []

    def forward(*targets):
        with torch.autocast(device.type, torch.bfloat16, enabled=mixed):
            return model(idx[:, :-1], *targets)[1]

    def step():
        forward(idx[:, 1:]).backward()
        if optimizers:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
        model.zero_grad(set_to_none=True)
    return nothing, torch.no_grad()(forward) if part == "forward" else step


NEW = 8         # tokens that one call decodes


def decoding(model, device, T, rows, idx=None, new=NEW):
    """The last `new` of T tokens of each row (idx, or random ones), one after the other. The cache
    is filled outside the clock."""
    model, start = model.to(device).eval(), max(1, T - new)
    if idx is None:
        idx = torch.randint(0, model.cfg.vocab_size, (rows, T), device=device)
    cache = model.init_cache(rows, T)

    @torch.inference_mode()
    def prefill():
        cache.reset()
        for ids in idx[:, :start].split(max(1, 2 ** 16 // rows), 1):    # as memory allows
            model(ids, cache=cache)

    @torch.inference_mode()
    def decode():
        for at in range(start, T):
            model(idx[:, at:at + 1], cache=cache)
    return prefill, decode


def prefilling(model, device, T, rows):
    prefill, _ = decoding(model, device, T + 1, rows, new=1)
    return nothing, prefill


# ---- models ----

# {model: {row: keys}}, the baseline first
TRAINED = {
    "gpt": {"fast": "fast=true", "naive": "fast=false"},
    "rt": {
        "plain Transformer": "model=gpt mlp=gelu qk_norm=false",
        "plain, compiled": "model=gpt mlp=gelu qk_norm=false compile=true",     # on a GPU
        "wavefront": "schedule=wavefront",      # on a GPU a CUDA graph
        "tiled": "schedule=tiled",
        "naive": "schedule=naive"},
    "lrt": {
        "backbone": "memory=false",
        "interleaved, S = 2": "train_path=interleaved subsets=2",
        "interleaved, S = 4": "train_path=interleaved subsets=4",
        "interleaved, S = 8": "train_path=interleaved subsets=8",
        "interleaved, layerwise": "train_path=interleaved projections=layerwise",
        "chunked, C = 64": "train_path=chunked chunk=64",
        "chunked, C = 256": "train_path=chunked chunk=256"},
    "relaxed": {
        "untied model": "model=gpt",
        "rank 0": "rank=0",
        "rank 8": "rank=8",
        "rank 64": "rank=64"},
    "mor": {
        "plain model": "model=gpt",
        "no router": "router=none router_func=",
        "2 recursions": "n_loop=2 capacity_warmup=0 router=expert router_func=",
        "3 recursions": "n_loop=3 capacity_warmup=0 router=expert router_func=",
        "kv=share": "kv=share capacity_warmup=0 router=expert router_func=",
        "router=token": "router=token router_func= z_loss=-1"}}
DECODED = {
    "rt": {"plain Transformer": "model=gpt mlp=gelu qk_norm=false", "RT": ""},
    "lrt": {"backbone": "memory=false", "exact": "prefill=exact",
            "interleaved": "prefill=interleaved"},
    "mor": {"plain model": "model=gpt", "MoR": ""}}


def bench_model(name, model_cfg, cfg, device):
    """Training, decoding and prefill."""
    T, make = model_cfg.block_size, partial(build, model_cfg, name)
    trained = {row: keys for row, keys in TRAINED[name].items()
               if "compile" not in keys or device.type == "cuda"}
    decoded = DECODED.get(name, trained)
    for part in "forward", "forward + backward", "training step":
        compare(part, trained, lambda keys: training(make(keys), device, cfg, part), device)
    for rows in 1, 16:
        compare(f"decoding batch {rows}", decoded,
                lambda keys: decoding(make(keys), device, T, rows), device, rounds=27,
                per=min(NEW, T - 1))
    compare(f"prefill {T - 1} tokens", decoded,
            lambda keys: prefilling(make(keys), device, T - 1, 1), device)
    with torch.device("meta"):
        flops = {row: make(keys).flops_per_token() for row, keys in trained.items()}
    for row, number in flops.items():
        print(f"training FLOPs a token: {number / next(iter(flops.values())):.2f} x ({row})")
    for row, keys in decoded.items():
        print(f"cache of a row: {make(keys).init_cache(1, T).nbytes():,} bytes ({row})")


def rat_layer(cfg, dtype, keys):
    """A model of one layer, of which only the mixer with its projections is left."""
    model = build(cfg, "rat", f"n_layer=1 vocab_size=64 swa=0 {keys}")
    block = model.blocks[0]
    model.norm = block.norm1 = block.norm2 = block.mlp = torch.nn.Identity()
    return model.to(dtype)


def bench_rat(model_cfg, cfg, device, lengths=None):
    """As the paper's Tables 6, 7 and 8: a layer of RAT beside attention and the RNN. As many
    tokens, cut into longer and longer sequences; decoding: a token of 8 (GPU: 64) sequences."""
    gpu = device.type == "cuda"
    lengths = lengths or [2 ** n for n in (range(12, 19) if gpu else range(8, 15))]
    rows, dtype = (64, torch.bfloat16) if gpu else (8, torch.float32)
    kinds = {"attention": "mixer=attention", f"RAT({model_cfg.chunk})": "", "RNN": "mixer=rnn"}
    for T in lengths:
        layer = lambda keys: rat_layer(model_cfg, dtype, f"block_size={T} {keys}")
        batch = replace(cfg, batch_size=max(1, lengths[-1] // T))
        compare(f"forward + backward, T {T:,}", kinds, lambda keys: training(
            layer(keys), device, batch, "forward + backward"), device, rounds=3)
        compare(f"prefill, T {T:,}", kinds, lambda keys: prefilling(
            layer(keys), device, T, batch.batch_size), device, rounds=3)
        compare(f"decoding, T {T:,}", kinds, lambda keys: decoding(
            layer(keys), device, T, rows), device, rounds=3, per=NEW)
        for name, keys in kinds.items():
            cache = layer(keys).init_cache(1, T)
            print(f"cache, T {T:,}: {cache.nbytes() / T:.1f} bytes a token ({name})")


def bench_throughput(model_cfg, cfg, device, new=64):
    """Tokens/s of whole models, decoding the last tokens of block_size. The sequences are doubled
    up to batch_size, or until their caches would take half of the memory that there is."""
    T, L, highest = model_cfg.block_size, model_cfg.chunk, {}
    memory = (torch.cuda.mem_get_info(device)[1] if device.type == "cuda" else
              os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    kinds = {"attention": "mixer=attention swa=0", f"RAT({L})": "swa=0"}
    kinds |= {f"RAT({L})-SWA": ""} if model_cfg.swa else {}
    for name, keys in kinds.items():
        model, rows, highest[name] = build(model_cfg, "rat", keys).to(device), 1, 0
        nbytes = model.init_cache(1, T).nbytes()
        while rows <= cfg.batch_size and rows * nbytes <= memory / 2:
            case = decoding(model, device, T, rows, new=new)
            seconds, = take_turns({name: case}, device, 1)[name]
            case = None                 # its cache goes before the next one comes
            speed = rows * min(new, T - 1) / seconds
            highest[name] = max(highest[name], speed)
            print(f"{name:13} {rows:6,} sequences of {T:,} {speed:11,.0f} tokens/s "
                  f"{rows * nbytes:16,} bytes of cache", flush=True)
            rows = 2 * rows
    for name, speed in highest.items():
        print(f"highest: {speed:,.0f} tokens/s, {speed / highest['attention']:.2f} x ({name})")


# ---- kernels ----

def kernel(function, tensors, do=None):
    """A function of tensors; with do, its output's gradient, all of theirs too."""
    tensors = [x.detach().requires_grad_(do is not None) for x in tensors]

    def call():
        out = function(*tensors)
        if do is not None:
            torch.autograd.grad(out, tensors, do)
    return nothing, call


def bench_kernels(device, sizes=None):
    """attend beside torch's attention (SDPA), scan beside a copy of x. sizes: B, H, T, D."""
    gpu = device.type == "cuda"
    dtype = torch.bfloat16 if gpu else torch.float32
    functions = {"SDPA": partial(F.scaled_dot_product_attention, is_causal=True),
                 "attend": lambda q, k, v: kernels.attend(q, k, v)[0]}
    for B, H, T, D in sizes or ([(4, 16, 4096, 128), (1, 16, 65536, 128)] if gpu else
                                [(1, 8, 1024, 64), (1, 4, 8192, 64)]):
        q, k, v, do = torch.randn(4, B, T, H, D, device=device, dtype=dtype).transpose(2, 3)
        for part, grad in ("forward", None), ("forward + backward", do):
            compare(f"{part}, T {T:,}", functions,
                    lambda function: kernel(function, (q, k, v), grad), device)
    B, T, C = (2, 4096, 2048) if gpu else (1, 2048, 512)
    g, x = torch.rand(2, B, T, C, device=device, dtype=dtype)
    functions = {"copy of x": lambda g, x: x.clone()}
    functions |= {f"scan, chunk {L}": partial(kernels.scan, chunk=L) for L in (16, 64, T)}
    compare("scan", functions, lambda function: kernel(function, (g, x)), device)


# ---- trained runs ----

def validation_text(ckpt, folder):
    data = TokenData(open_data(SimpleNamespace(**ckpt["config"])), "val")
    check_tokenizer(ckpt, data, folder)
    return data


def bench_runs(device, folders, json_file=""):
    """Runs of the same data: a training step, a token after a context of the run's own text (it
    decides how deep MoR's tokens go), the cache. The first run is the baseline."""
    models, configs, data = {}, {}, None
    for folder in folders:
        models[folder], _, ckpt = load_run(folder)
        configs[folder] = SimpleNamespace(**ckpt["config"])
        data = data or validation_text(ckpt, folder)
        check_tokenizer(ckpt, data, folder)
    T = min(model.cfg.block_size for model in models.values())
    if data.tokens < 16 * T:
        raise UserError(f"the validation text has {data.tokens} tokens: {16 * T} are needed")
    idx, new = torch.from_numpy(data.windows(np.arange(16) * T, T)).to(device), min(NEW, T - 1)
    step = lambda folder: training(copy.deepcopy(models[folder]), device, configs[folder])
    found = {"train_ms": compare("training step", {f: f for f in folders}, step, device)}
    for n in 1, 16:
        found[f"decode_{n}_ms"] = compare(f"decoding batch {n}", models, lambda model: decoding(
            copy.deepcopy(model), device, T, n, idx[:n]), device, rounds=36, per=new)
    result = {}
    for folder, model in models.items():
        result[folder] = {name: 1000 * statistics.median(times[folder])
                          / (1 if name == "train_ms" else new) for name, times in found.items()}
        result[folder]["cache_bytes"] = model.init_cache(1, T).nbytes() / T
        print(f"{folder}: cache {result[folder]['cache_bytes']:,.1f} bytes a token")
    if json_file:
        with writing(json_file):
            Path(json_file).write_text(json.dumps(result))


# ---- requests to trained models that loop over depth, by serve.py's Engine ----

PROMPT, ANSWER = (4, 16), (32, 96)      # tokens of a request, at least and at most
LONGEST, REQUESTS, SLOTS = PROMPT[1] + ANSWER[1], 240, 16


def workload(text):
    """The same requests each time. id: where in the text it starts."""
    rng, requests = random.Random(0), []
    for _ in range(REQUESTS):
        size, new = rng.randint(*PROMPT), rng.randint(*ANSWER)
        at = rng.randrange(len(text) - LONGEST)
        requests.append(Request(text[at:at + size].tolist(), new, id=at))
    return requests


def answer(text, model, slots, **options):
    """The workload, answered by an Engine to which all of it comes at once."""
    requests = workload(text)
    list(Engine(model.eval(), slots, LONGEST, **options).run(requests))
    return requests


def compare_requests(cases, text, device):
    """compare of {name: a call of answer}, milliseconds a token."""
    tokens = sum(r.max_new_tokens for r in workload(text))
    return compare(f"{REQUESTS} requests", cases, lambda call: (nothing, call), device, rounds=3,
                   per=tokens, warmup=0, memory=False)


def print_bound(name, seconds, bound, cfg, loops):
    """How much is reached of the speed that a model could have whose tokens took so many loops,
    by its layers. bound: the seconds of all layers."""
    outside = getattr(cfg, "n_outside", 0)
    looped = (cfg.n_layer - outside) * statistics.mean(loops) / cfg.n_loop
    layers = (outside + looped) / cfg.n_layer
    print(f"  {name}: tokens by loops {loop_fractions(loops, cfg.n_loop)}: {layers:.3f} of the "
          f"layers; {layers * ratio(bound, seconds):.0%} of that speed")


def mor_requests(model, text, device):
    """MoR beside the plain model with as many slots, and with as many as fit into its cache."""
    # the engine asks for loops, so the plain model is one recursion
    plain = build(model.cfg, "mor", "router=none router_func= n_loop=1 share=cycle kv=recursion "
                  "exit_loop=0").to(device)
    mor_bytes, plain_bytes = (m.init_cache(1, LONGEST).nbytes() for m in (model, plain))
    cases = {}
    for slots in SLOTS, max(SLOTS + 1, SLOTS * plain_bytes // mor_bytes):
        for name, served, batching in [("plain", plain, "sequence"), ("MoR", model, "sequence"),
                                       ("MoR", model, "depth")]:
            cases[f"{name}, {slots} slots, {batching}"] = partial(
                answer, text, served, slots, batching=batching)
    base, _, mor, base_more, _, mor_more = compare_requests(cases, text, device).values()
    loops = [loop for r in answer(text, model, SLOTS, batching="depth") for loop in r.exits]
    print_bound(f"{SLOTS} slots", mor, base, model.cfg, loops)
    print_bound(f"{slots} slots", mor_more, base_more, model.cfg, loops)


def relaxed_requests(model, text, device, slots=32):
    """Without early exit and with it, by sequences and by depth, beside the untied model."""
    untied = build(model.cfg, "relaxed", "n_loop=1 rank=0 early_exit=none exit_loop=0")
    exit = early_exit(model, text, device)
    kinds = {"all loops": {}, "propagate": dict(exit=exit, fill="propagate"),
             "exact": dict(exit=exit, fill="exact")}
    cases = {f"{kind}, {batching}": partial(answer, text, model, slots, batching=batching, **how)
             for kind, how in kinds.items() for batching in ("sequence", "depth")}
    cases["untied, sequence"] = partial(answer, text, untied.to(device), slots,
                                        batching="sequence")
    times = compare_requests(cases, text, device)
    for kind in "propagate", "exact":
        # prompts take all loops, and their last tokens give the first ones of the answers
        loops = [loop for r in cases[f"{kind}, depth"]()
                 for loop in [*[model.loops_to_run] * len(r.prompt), *r.exits[1:]]]
        print_bound(kind, times[f"{kind}, depth"], times["all loops, sequence"], model.cfg, loops)


@torch.no_grad()
def early_exit(model, text, device, fraction=0.65):
    """The rule by which this fraction of a text's tokens, where the first loop is surest, exits
    after it. Prints what that costs, with the keys of all loops (fill=exact)."""
    first = copy.copy(model)
    first.cfg = replace(model.cfg, exit_loop=1)
    n = min(len(text) - 1, 32 * LONGEST) // LONGEST * LONGEST
    idx, targets = (torch.from_numpy(text[at:][:n]).to(device) for at in (0, 1))
    early, late = (m(idx.view(-1, LONGEST))[0].flatten(0, 1) for m in (first, model))  # (n, V)
    sure = early.softmax(-1).amax(-1)
    least = sure.quantile(1 - fraction)
    served = torch.where(sure[:, None] >= least, early, late)
    without, with_exits = (float(F.cross_entropy(logits, targets)) for logits in (late, served))
    print(f"exit=confidence:{least:.8g}: {with_exits:.4f} nats a token, without exits "
          f"{without:.4f}")
    return f"confidence:{least:.8g}"


def bench_requests(folder, device):
    model, _, ckpt = load_run(folder, device)
    data = validation_text(ckpt, folder)
    if not LONGEST < min(data.tokens, model.cfg.block_size + 1):
        raise UserError(f"{folder}: requests of {LONGEST} tokens need a larger block_size "
                        f"({model.cfg.block_size}) or validation text ({data.tokens} tokens)")
    text = data.windows(np.array([0]), min(data.tokens, 100_000))[0]
    {"relaxed": relaxed_requests, "mor": mor_requests}[ckpt["model"]](model.eval(), text, device)


# ---- the command ----

@dataclass
class BenchConfig:
    device: str = "auto"            # auto | cpu | cuda | cuda:N
    json: str = ""                  # runs: write the numbers into this file


NAMES = "gpt", "rt", "lrt", "rat", "relaxed", "mor", "throughput", "kernels", "runs"


def main(argv):
    if asks_help(argv):
        return print(help_text(BenchConfig))
    (name, *folders), keys = split_paths(argv)[0] or [""], [a for a in argv if is_key(a)]
    if name not in NAMES or bool(folders) != (name == "runs"):
        raise UserError("python -m lab.bench NAME [key=value ...], NAME one of: "
                        + ", ".join(NAMES) + " out/A ...")
    torch.manual_seed(1337)
    if name in ("kernels", "runs"):
        cfg = typed_config(BenchConfig, split_args(keys))
    else:
        model = "rat" if name == "throughput" else name
        cfg, model_fields, ckpt, _ = read_config([f"model={model}", *keys])
        model_cfg = model_module(model).Config(**model_fields)
        if model_cfg.block_size < 2:
            raise UserError("block_size=1: decoding needs at least 2 tokens")
    device = pick_device(cfg.device)
    print(f"{device_name(device)}, torch {torch.__version__}"
          + "; training in bfloat16 (autocast)" * (device.type == "cuda"))
    if name == "kernels":
        return bench_kernels(device)
    if name == "runs":
        return bench_runs(device, folders, cfg.json)
    if ckpt is not None and name in ("relaxed", "mor"):
        return bench_requests(cfg.init_from, device)
    print(f"{model_cfg.n_layer} layers of width {model_cfg.n_embd}, batch {cfg.batch_size} x "
          f"{model_cfg.block_size} tokens")
    bench = {"rat": bench_rat, "throughput": bench_throughput}.get(name, partial(bench_model, name))
    bench(model_cfg, cfg, device)


if __name__ == "__main__":
    run_cli(main)

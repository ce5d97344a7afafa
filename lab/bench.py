"""
Speed and memory, measured beside a baseline in the same run: where the README's ratios come from.

    python -m lab.bench gpt             one of gpt, rt, lrt, relaxed, mor: training and decoding
    python -m lab.bench rat             a layer of RAT beside attention and an RNN, by length
    python -m lab.bench throughput      RAT beside attention: tokens/s by the number of sequences
    python -m lab.bench kernels         attend beside torch's attention
    python -m lab.bench runs out/gpt_tiny out/mor_tiny  trained runs, training and decoding
    python -m lab.bench mor init_from=out/mor_tiny      requests to a trained mor, or relaxed

A model's keys are train.py's; sizes start from configs/<model>_tiny.yaml as there. (Nothing is
compiled, dtype is auto, a step is one micro-batch: such keys have no effect.) Those of our
tables are in lab/experiments/speed.yaml, those of the papers in gpu_speed.yaml. Every line names a
case, its milliseconds (the median over rounds), the most memory that it holds during a call (see
peak_memory), and how many times as long as the baseline it takes: less than 1 is faster.

kernels and runs have one key:
"""
import copy
import ctypes
import gc
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

import numpy as np
import torch
import torch.nn.functional as F

import graphs
import kernels
from common.checkpoint import load_run
from common.data import TokenData, open_data
from common.keys import UserError, model_module, names, run_cli, split_args, typed_config
from common.optim import make_optimizers
from common.process import check_tokenizer, device_name, make_model, pick_device, read_config
from serve import Engine, Request, loop_fractions


# ---- measuring ----

WARM_UP = 2     # rounds that do not count


def compare(title, cases, setup, device, rounds=None, per=1):
    """Time the cases {name: case}. setup(case) returns two functions: prepare runs before each
    call, outside the clock. Returns {name: milliseconds}, divided by per. rounds: 9, on a GPU 3.

    On a CPU the cases take turns, so that a noisy neighbour slows all alike. On a GPU they come
    one after the other: each has the memory for itself, and a line says where it is short."""
    times, peaks = {}, {}
    rounds = rounds or (3 if device.type == "cuda" else 9)
    for group in [[name] for name in cases] if device.type == "cuda" else [list(cases)]:
        try:
            free_memory(device)
            turns = take_turns({name: setup(cases[name]) for name in group}, device,
                               WARM_UP + rounds)
            times |= {name: seconds[WARM_UP:] for name, seconds in turns.items()}
            if device.type == "cuda" or RESET_PEAK.exists():
                free_memory(device)
                peaks |= {name: peak_memory(setup, cases[name], device) for name in group}
        except RuntimeError as e:       # of cuBLAS and of graphs too
            if not re.search("out of memory|ALLOC_FAILED", str(e)):
                raise
            print(f"{title:28} {group[0]:29}   does not fit")
    return tell(title, times, peaks, per)


def take_turns(calls, device, rounds):
    """Seconds of {name: (prepare, call)}, a list each."""
    wait = nothing if device.type == "cpu" else partial(torch.accelerator.synchronize, device)
    times = {name: [] for name in calls}
    for _ in range(rounds):
        for name, (prepare, call) in calls.items():
            prepare()
            wait()
            start = time.perf_counter()
            call()
            wait()
            times[name].append(time.perf_counter() - start)
    return times


def tell(title, times, peaks, per=1):
    """A line for each case: its milliseconds, its most memory, and its ratio to the first case,
    the median of the rounds' ratios, which noise moves less than that of two medians."""
    base = next(iter(times), "")
    found = {name: 1000 * median(t) / per for name, t in times.items()}
    for name, t in times.items():
        memory = f"{peaks[name] / 2 ** 20:10,.0f} MiB" if name in peaks else ""
        ratio = median(a / b for a, b in zip(t, times[base]))
        print(f"{title:28} {name:29} {found[name]:11.3f} ms{memory}{ratio:8.3f} x {base}",
              flush=True)
    return found


nothing = lambda: None      # what most cases prepare


def free_memory(device):
    graphs.GRAPHS.clear()         # they hold memory, and so does what is compiled
    graphs.SEEN.clear()
    torch.compiler.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def peak_memory(setup, case, device):
    """The most bytes that a case holds during a call: weights, an optimizer's state or a cache,
    and what the call needs besides. On a CPU: resident memory, beyond what there was before the
    case (nothing is told where the system is not Linux)."""
    before = peak(device, forget=True)
    prepare, call = setup(case)
    for _ in range(2):                  # the first step makes the optimizer's state
        prepare()
        peak(device, forget=True)
        call()
    return peak(device) - before


RESET_PEAK = Path("/proc/self/clear_refs")      # of Linux


def peak(device, forget=False):
    """The most bytes in use so far. forget: only those in use now; what is free does not count."""
    if device.type == "cuda":
        if forget:
            torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.max_memory_allocated(device)
    if forget:
        ctypes.CDLL(None).malloc_trim(0)
        RESET_PEAK.write_text("5")
    status = Path("/proc/self/status").read_text()
    return 1024 * int(re.search(r"VmHWM:\s*(\d+) kB", status)[1])


# ---- what a model does ----

def build(cfg, name, keys=""):
    """An untrained model_<name>, or that of model= in keys, with these keys and those of cfg that
    it has."""
    given = {"model": name, **split_args(keys.split())[1]}
    module = model_module(given.pop("model"))
    same = {key: value for key, value in asdict(cfg).items() if key in names(module.Config)}
    return module.Model(typed_config(module.Config, {**same, **given}))


def training(model, device, cfg, optimize=True):
    """Forward and backward on a fixed random batch; with optimize the optimizer's step too."""
    model = model.to(device).train()
    size = cfg.batch_size, model.cfg.block_size + 1
    idx = torch.randint(0, model.cfg.vocab_size, size, device=device)
    optimizers = make_optimizers(model, cfg) if optimize else []

    def step():
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = model(idx[:, :-1], idx[:, 1:])[1]
        loss.backward()
        if optimize:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
        model.zero_grad(set_to_none=True)
    return nothing, step


NEW = 8         # tokens that one call decodes


def decoding(model, device, T, rows, idx=None, new=NEW):
    """The last `new` of T tokens of each row (of idx, or random ones), one after the other. The
    cache is filled outside the clock."""
    model, start = model.to(device).eval(), max(1, T - new)
    if idx is None:
        idx = torch.randint(0, model.cfg.vocab_size, (rows, T), device=device)
    idx = idx[:rows]
    if new > 1 and getattr(model.cfg, "prefill", "") == "exact" and model.cfg.recurrent:
        model.cfg = replace(model.cfg, prefill="interleaved")   # filled at once; not timed
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


# ---- models ----

# {model: {row: keys}}, the baseline first
ROWS = {
    "gpt": {"fast": "fast=true", "naive": "fast=false"},
    "rt": {
        "plain Transformer": "model=gpt mlp=gelu qk_norm=false",
        "without recurrence": "recurrent=false",
        "wavefront": "schedule=wavefront",      # on a GPU a CUDA graph
        "tiled": "schedule=tiled",
        "naive": "schedule=naive"},
    "lrt": {
        "backbone": "memory=false",
        "interleaved, S = 2": "train_path=interleaved subsets=2 prefill=interleaved",
        "interleaved, S = 4": "train_path=interleaved subsets=4 prefill=interleaved",
        "interleaved, S = 8": "train_path=interleaved subsets=8 prefill=interleaved",
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


def bench_model(name, model_cfg, cfg, device):
    rows, make = ROWS[name], partial(build, model_cfg, name)
    for part in "forward + backward", "training step":
        compare(part, rows, lambda keys: training(
            make(keys), device, cfg, part == "training step"), device)
    bench_decoding(make, rows, model_cfg.block_size, device)
    with torch.device("meta"):
        flops = {row: make(keys).flops_per_token() for row, keys in rows.items()}
    for row, number in flops.items():
        print(f"training FLOPs a token: {number / next(iter(flops.values())):.2f} x ({row})")


def bench_decoding(make, cases, T, device, batches=(1, 16), prompts=1, rounds=None, idx=None):
    """Of the models make(case): the last of T tokens (of idx, or random ones), a prefill of
    `prompts` rows of all others, and the cache of a row. rounds: of decoding, of prefill.
    Returns {name: {case: number}}."""
    found, rounds = {}, rounds or ((9, 3) if device.type == "cuda" else (36, 9))
    for rows in batches:
        setup = lambda case: decoding(make(case), device, T, rows, idx)
        found[f"decode_{rows}_ms"] = compare(f"decoding batch {rows}, T {T:,}", cases, setup,
                                             device, rounds[0], min(NEW, T - 1))
    prefill = lambda case: (nothing, decoding(make(case), device, T, prompts, idx, new=1)[0])
    compare(f"prefill {T - 1:,} tokens", cases, prefill, device, rounds[1])
    found["cache_bytes"] = {row: make(case).init_cache(1, T).nbytes() / T
                            for row, case in cases.items()}
    for row, number in found["cache_bytes"].items():
        print(f"cache, T {T:,}: {number:,.1f} bytes a token ({row})")
    return found


def bench_rat(model_cfg, cfg, device, doublings=6):
    """As the paper's Tables 6, 7 and 8: a layer of RAT beside attention and the RNN. As many
    tokens, cut into longer and longer sequences, from block_size on; decoding: a token of
    batch_size sequences."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    kinds = {"attention": "mixer=attention", f"RAT({model_cfg.chunk})": "", "RNN": "mixer=rnn"}

    def make(keys):     # a model of which only the mixer with its projections is left
        model = build(model_cfg, "rat", f"block_size={T} n_layer=1 vocab_size=64 swa=0 {keys}")
        block = model.blocks[0]
        model.norm = block.norm1 = block.norm2 = block.mlp = torch.nn.Identity()
        return model.to(dtype)
    for n in range(doublings + 1):
        T, batch = model_cfg.block_size << n, replace(cfg, batch_size=2 ** (doublings - n))
        compare(f"forward + backward, T {T:,}", kinds, lambda keys: training(
            make(keys), device, batch, optimize=False), device, rounds=3)
        bench_decoding(make, kinds, T, device, [cfg.batch_size], batch.batch_size, (3, 3))


def bench_throughput(model_cfg, cfg, device, new=64):
    """Tokens/s of whole models, decoding the last tokens of block_size. The sequences are doubled
    up to batch_size, or until their caches would take half of the memory that there is."""
    T, L, speeds = model_cfg.block_size, model_cfg.chunk, {}
    memory = (torch.cuda.mem_get_info(device)[1] if device.type == "cuda" else
              os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    kinds = {"attention": "mixer=attention swa=0", f"RAT({L})": "swa=0"}
    kinds |= {f"RAT({L})-SWA": ""} if model_cfg.swa else {}
    for name, keys in kinds.items():
        model, rows = build(model_cfg, "rat", keys).to(device), 1
        nbytes = model.init_cache(1, T).nbytes()
        most = max(1, min(cfg.batch_size, memory // 2 // nbytes))
        while rows <= most:
            times = take_turns({name: decoding(model, device, T, rows, new=new)}, device, 2)
            speed = rows * min(new, T - 1) / times[name][-1]
            speeds[name] = max(speed, speeds.get(name, 0))
            print(f"{name:13} {rows:6,} sequences of {T:,} {speed:11,.0f} tokens/s "
                  f"{rows * nbytes:16,} bytes of cache", flush=True)
            rows = 2 * rows
    for name, speed in speeds.items():
        print(f"highest: {speed:,.0f} tokens/s, {speed / speeds['attention']:.2f} x ({name})")


# ---- kernels ----

def bench_kernels(device, sizes=None):
    """attend beside torch's attention (SDPA), forward and backward. sizes: B, H, T, D."""
    gpu = device.type == "cuda"
    functions = {"SDPA": partial(F.scaled_dot_product_attention, is_causal=True),
                 "attend": lambda q, k, v: kernels.attend_by_position(q, k, v)[0]}
    for B, H, T, D in sizes or ([(4, 16, 4096, 128), (1, 16, 65536, 128)] if gpu else
                                [(1, 8, 1024, 64), (1, 4, 8192, 64)]):
        dtype = torch.bfloat16 if gpu else torch.float32
        x = torch.randn(4, B, T, H, D, device=device, dtype=dtype).transpose(2, 3)
        *qkv, do = x.requires_grad_().unbind()
        compare(f"attention, T {T:,}", functions, lambda attention: (
            nothing, lambda: torch.autograd.grad(attention(*qkv), qkv, do)), device)


# ---- trained runs ----

def bench_runs(folders, device):
    """Runs of the same data: a training step, a token after a context of the data's own text (it
    decides how deep MoR's tokens go), the cache. The first run is the baseline. The last line of
    the output is for reproduce.py."""
    ckpts, load = {f: load_run(f)[2] for f in folders}, lambda f: load_run(f, device)[0]
    keys = {folder: SimpleNamespace(**ckpt["config"]) for folder, ckpt in ckpts.items()}
    data = TokenData(open_data(keys[folders[0]]), "val")
    for folder, ckpt in ckpts.items():
        check_tokenizer(ckpt, data, folder)
    T = min(ckpt["model_config"]["block_size"] for ckpt in ckpts.values())
    idx = data.windows(np.linspace(0, data.tokens - T, 16).astype(int), T)
    cases, step = dict(zip(folders, folders)), lambda f: training(load(f), device, keys[f])
    found = {"train_ms": compare("training step", cases, step, device)}
    found |= bench_decoding(load, cases, T, device, idx=torch.from_numpy(idx).to(device))
    print(json.dumps({f: {name: found[name].get(f) for name in found} for f in folders}))


# ---- requests to trained models that loop over depth, by serve.py's Engine ----

PROMPT, ANSWER = (4, 16), (32, 96)      # tokens of a request, at least and at most
LONGEST, REQUESTS = PROMPT[1] + ANSWER[1], 240
SLOTS = {"relaxed": 32, "mor": 16}
UNTIED = {"relaxed": "n_loop=1 rank=0 early_exit=none exit_loop=0",
          "mor": "n_loop=1 router=none router_func= share=cycle kv=recursion exit_loop=0"}


def bench_requests(name, model, text, device):
    """All requests come to an Engine at once. Batched over depth, also how much is reached of the
    speed that a model could have whose tokens took so many loops."""
    if min(model.context_limit or LONGEST, len(text) - 1) < LONGEST:
        raise UserError(f"requests of {LONGEST} tokens need block_size={LONGEST} or more, and as "
                        f"long a text")
    cases, answered = serving_cases(name, model, text, device), {}

    def answer(case):
        answered[case] = workload(text)
        list(cases[case]().run(answered[case]))
    times = take_turns({case: (nothing, partial(answer, case)) for case in cases}, device, 3)
    tokens = sum(request.max_new_tokens for request in workload(text))
    tell(f"{REQUESTS} requests, {SLOTS[name]} slots", times, {}, tokens)
    for case in [case for case in cases if case.endswith("depth")]:
        loops = [loop for request in answered[case] for loop in request.exits]
        if name == "relaxed":       # prompts take all loops; their last tokens give first exits
            loops += [model.loops_to_run for r in answered[case] for _ in r.prompt[1:]]
        outside = getattr(model.cfg, "n_outside", 0) / model.cfg.n_layer
        layers = outside + (1 - outside) * mean(loops) / model.cfg.n_loop
        speed = median(a / b for a, b in zip(times[next(iter(cases))], times[case]))
        print(f"  {case}: tokens by loops {loop_fractions(loops, model.cfg.n_loop)}: {layers:.3f} "
              f"of the layers; {layers * speed:.0%} of that speed")


def workload(text):
    """The same requests each time. id: where in the text it starts."""
    rng, requests = random.Random(0), []
    for _ in range(REQUESTS):
        size, new = rng.randint(*PROMPT), rng.randint(*ANSWER)
        at = rng.randrange(len(text) - LONGEST)
        requests.append(Request(text[at:at + size].tolist(), new, id=at))
    return requests


def serving_cases(name, model, text, device):
    """{name: makes an Engine}: by sequences and by depth, relaxed without early exit and with it;
    and a model as deep that has no loops, the baseline of mor."""
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
    """The rule by which this fraction of a text's tokens, where the first loop is surest, exits
    after it. Prints what that costs, with the keys of all loops (fill=exact)."""
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

@dataclass
class BenchConfig:
    device: str = "auto"            # auto | cpu | cuda | cuda:N


BENCHES = {"rat": bench_rat, "throughput": bench_throughput,
           **{name: partial(bench_model, name) for name in ROWS}}


def main(argv):
    words, keys = split_args(argv, most=None)
    name, *folders = words or [""]
    if name not in (*BENCHES, "kernels", "runs") or bool(folders) != (name == "runs"):
        raise UserError("python -m lab.bench NAME [key=value ...], NAME one of: "
                        + ", ".join(BENCHES) + ", kernels, runs out/A ...")
    torch.manual_seed(1337)
    if name in ("kernels", "runs"):
        device = pick_device(typed_config(BenchConfig, keys).device)
        print(device_name(device), torch.__version__, sep=", torch ")
        return bench_runs(folders, device) if folders else bench_kernels(device)
    model = "rat" if name == "throughput" else name
    if keys.setdefault("model", model) != model:
        raise UserError(f"model={keys['model']}: lab.bench {name} is of model={model}")
    cfg, model_fields, ckpt = read_config(keys)
    model_cfg, device = model_module(model).Config(**model_fields), pick_device(cfg.device)
    if model_cfg.block_size < 2:
        raise UserError("block_size=1: decoding needs at least 2 tokens")
    print(f"{device_name(device)}, torch {torch.__version__}, {model_cfg.n_layer} layers of width "
          f"{model_cfg.n_embd}, batch {cfg.batch_size} x {model_cfg.block_size} tokens"
          + ", training in bfloat16 (autocast)" * (device.type == "cuda"))
    if ckpt is not None and name in ("relaxed", "mor"):
        trained = SimpleNamespace(**ckpt.get("config", asdict(cfg)))
        check_tokenizer(ckpt, data := TokenData(open_data(trained), "val"), cfg.init_from)
        text = data.windows([0], min(data.tokens, 100_000))[0]
        model = make_model(cfg, model_fields, ckpt, ckpt["model_config"]["vocab_size"])
        return bench_requests(name, model.to(device).eval(), text, device)
    BENCHES[name](model_cfg, cfg, device)


if __name__ == "__main__":
    run_cli(main, BenchConfig)

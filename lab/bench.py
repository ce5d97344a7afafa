"""
Speed, measured beside a baseline in the same run: where the README's ratios come from.

    python -m lab.bench gpt             one of gpt, rt, lrt, relaxed, mor: training and decoding
    python -m lab.bench rat             a layer of RAT beside attention and an RNN, by length
    python -m lab.bench kernels         attend and scan
    python -m lab.bench runs out/gpt_tiny out/mor_tiny  trained runs, training and decoding
    python -m lab.bench mor init_from=out/mor_tiny      requests to a trained mor, or relaxed

A model's keys are train.py's; sizes start from configs/<model>_tiny.yaml as there. Those of the
papers are in lab/experiments/gpu_speed.yaml. Every line names a case, its milliseconds (the
median over rounds), on a GPU the most memory that it took (on a CPU none is told), and how many
times as long as the baseline it takes: less than 1 is faster.

kernels and runs have keys of their own:
"""
import copy
import json
import math
import random
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

def compare(title, cases, device, rounds, per=1, tokens=0, notes={}.get, warmup=2):
    """Time the cases {name: setup} and print a line for each: the median, and the median of the
    rounds' ratios to the first case, which noise moves less. setup() returns two functions:
    prepare runs before each call, outside the clock.

    On a CPU the cases take turns, so that a noisy neighbour slows all alike. On a GPU they come
    one after the other: each has the memory for itself. per: what a call is divided by; tokens:
    of a call, for tokens/s; notes(name): what else to say. Returns {name: seconds of each round},
    none where memory is short."""
    gpu, times, peaks, base = device.type == "cuda", {}, {}, next(iter(cases))
    for names in [[name] for name in cases] if gpu else [list(cases)]:
        free_memory(device)
        try:
            times |= take_turns({name: cases[name]() for name in names}, device, warmup + rounds)
        except torch.cuda.OutOfMemoryError:
            times |= {name: [] for name in names}
        if gpu:
            peaks[names[0]] = torch.cuda.max_memory_allocated(device)
    times = {name: seconds[warmup:] for name, seconds in times.items()}
    for name, t in times.items():
        ms, r = 1000 * statistics.median(t or [math.nan]), ratio(t, times[base])
        line = f"{title:28} {name:29} " + (f"{ms / per:11.3f} ms" if t else "  does not fit")
        line += f"{1000 * tokens / ms:11,.0f} tokens/s" if t and tokens else ""
        line += f"{peaks[name] / 2 ** 20:10,.0f} MiB" if gpu and t else ""
        line += f"{r:8.3f} x {base}" if r else ""
        print(f"{line} {notes(name) or ''}".rstrip(), flush=True)
    return times


def take_turns(cases, device, rounds):
    wait = partial(torch.cuda.synchronize, device) if device.type == "cuda" else nothing
    times = {name: [] for name in cases}
    for _ in range(rounds):
        for name, (prepare, call) in cases.items():
            prepare()
            wait()
            start = time.perf_counter()
            call()
            wait()
            times[name].append(time.perf_counter() - start)
    return times


def free_memory(device):
    rt_wavefront.GRAPHS.clear()         # they hold memory, and so does what is compiled
    torch.compiler.reset()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def ratio(times, baseline):
    return statistics.median(a / b for a, b in zip(times, baseline)) if times and baseline else None


nothing = lambda: None      # what most cases prepare


def each(models, setup, *args):
    """{name: make} -> {name: setup}, where setup is one of those below."""
    return {name: partial(setup, make, *args) for name, make in models.items()}


# ---- what a model does: make() gives the model ----

def build(name, cfg, **changes):
    """An untrained model_<name>, with the keys of cfg that it has and these changes."""
    module = model_module(name)
    names = {f.name for f in fields(module.Config)}
    same = {key: value for key, value in asdict(cfg).items() if key in names}
    return module.Model(typed_config(module.Config, {}, {**same, **changes}))


def training(make, device, cfg, part="training step"):
    """On a fixed random batch: "forward", "forward + backward", or the optimizer's step too."""
    model, mixed = make().to(device).train(), device.type == "cuda"
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


def decoding(make, device, T, rows, idx=None, new=NEW):
    """The last `new` of T tokens of each row (idx, or random ones), one after the other. The cache
    is filled outside the clock."""
    model, start = make().to(device).eval(), max(1, T - new)
    if idx is None:
        idx = torch.randint(0, model.cfg.vocab_size, (rows, T), device=device)
    cache = model.init_cache(rows, T)

    @torch.inference_mode()
    def prefill():
        cache.reset()
        for ids in idx[:, :start].split(max(1, 2 ** 18 // rows), 1):    # as memory allows
            model(ids, cache=cache)

    @torch.inference_mode()
    def decode():
        for at in range(start, T):
            model(idx[:, at:at + 1], cache=cache)
    return prefill, decode


def prefilling(make, device, T, rows):
    prefill, _ = decoding(make, device, T + 1, rows, new=1)
    return nothing, prefill


def by_length(part, models, lengths, device, rounds, cfg, rows=0):
    """As many tokens, cut into longer and longer sequences; decoding: a token of `rows` sequences.
    models(T): {name: make}. e: a sequence's time grows as T^e."""
    found = {}
    for T in lengths:
        B = rows or max(1, lengths[-1] // T)
        setup, *args = {"decoding": (decoding, T, B), "prefill": (prefilling, T, B)}.get(
            part, (training, replace(cfg, batch_size=B), part))
        found[T] = compare(f"{part}, T {T:,}", each(models(T), setup, device, *args), device,
                           rounds, per=NEW if rows else 1)
    first, last = found[lengths[0]], found[lengths[-1]]
    for name in first if len(lengths) > 1 and not rows else ():
        if r := ratio(last[name], first[name]):
            e = 1 + math.log(r) / math.log(lengths[-1] / lengths[0])
            print(f"  {name}: a sequence's time grows as T^{e:.2f}")


# ---- models ----

def candidates(name, cfg, device):
    """{row: function that makes a model} in training, and in decoding. The baseline comes first."""
    make = partial(partial, build, name, cfg)
    if name == "gpt":
        models = {"fast": make(), "naive": make(fast=False)}
        return models, models
    if name == "rt":
        plain = partial(build, "gpt", cfg, mlp="gelu", qk_norm=cfg.qk_norm == "full")
        models = {"plain Transformer": plain}
        if device.type == "cuda":       # where the wavefront is a CUDA graph
            models = {"plain, compiled": lambda: torch.compile(plain()), **models}
        models |= {kind: make(schedule=kind) for kind in ("wavefront", "tiled", "naive")}
        return models, {"plain Transformer": plain, "RT": make()}
    if name == "lrt":
        make = partial(make, memory=True, train_path="interleaved")
        models = {"backbone": make(memory=False)}
        models |= {f"interleaved, S = {S}": make(subsets=S) for S in (2, 4, 8)}
        models["interleaved, layerwise"] = make(projections="layerwise")
        models |= {f"chunked, C = {C}": make(train_path="chunked", chunk=C) for C in (64, 256)}
        return models, {"backbone": make(memory=False), "exact": make(prefill="exact"),
                        "interleaved": make(prefill="interleaved")}
    plain = partial(build, "gpt", cfg)
    if name == "relaxed":
        models = {"untied model": plain}
        models |= {f"rank {rank}": make(rank=rank, early_exit="none")
                   for rank in sorted({0, 8, 64, cfg.rank})}
        return models, models
    make, R = partial(make, capacity_warmup=0, router_func="", exit_loop=0), cfg.n_loop
    mor, inner = partial(make, router="expert", kv="recursion"), R * cfg.n_stored
    models = {"plain model": plain, f"{R} recursions, no router": make(router="none")}
    models |= {f"MoR, {r} recursions": mor(n_loop=r) for r in (2, 3, 4) if inner % r == 0}
    if cfg.share.endswith("cycle"):
        models[f"MoR, {R}, kv=share"] = mor(kv="share")
    models[f"MoR, {R}, router=token"] = mor(router="token")
    return models, {"plain model": plain, "MoR": make()}


def bench_model(name, model_cfg, cfg, device, rounds=9, lengths=(128, 256, 512, 1024, 2048)):
    """Training, decoding and prefill; of RT by length, too."""
    T = model_cfg.block_size
    models, decoders = candidates(name, model_cfg, device)
    with torch.device("meta"):
        flops = {row: make().flops_per_token() for row, make in models.items()}
    cost = lambda row: f"{flops[row] / next(iter(flops.values())):.2f} x its FLOPs"
    for part in "forward", "forward + backward", "training step":
        compare(part, each(models, training, device, cfg, part), device, rounds,
                tokens=cfg.batch_size * T, notes=cost)
    for rows in 1, 16:
        compare(f"decoding batch {rows}", each(decoders, decoding, device, T, rows), device,
                3 * rounds, per=min(NEW, T - 1))
    compare(f"prefill {T - 1} tokens", each(decoders, prefilling, device, T - 1, 1), device, rounds)
    for row, make in decoders.items():
        print(f"cache of a row: {make().init_cache(1, T).nbytes():,} bytes ({row})")
    if name == "rt":
        longer = lambda T: candidates("rt", replace(model_cfg, block_size=T), device)[1]
        by_length("forward + backward", longer, lengths, device, rounds, cfg)


def rat_layer(cfg, dtype):
    """A model of one layer, of which only the mixer with its projections is left."""
    model = build("rat", cfg, n_layer=1, vocab_size=64, swa=0)
    block = model.blocks[0]
    model.norm = block.norm1 = block.norm2 = block.mlp = torch.nn.Identity()
    return model.to(dtype)


def bench_rat(model_cfg, cfg, device, lengths=None, rows=None, rounds=3):
    """As the paper's Tables 6, 7 and 8: a layer of RAT beside attention and the RNN."""
    gpu, L = device.type == "cuda", model_cfg.chunk
    lengths = lengths or [2 ** n for n in (range(12, 19) if gpu else range(8, 15))]
    rows, dtype = rows or (64 if gpu else 8), torch.bfloat16 if gpu else torch.float32

    def models(T):
        kinds = {f"RAT({L})": {}, "RAT(T/64)": dict(chunk=max(1, T // 64)),
                 "RNN": dict(mixer="rnn"), "attention": dict(mixer="attention")}
        return {name: partial(rat_layer, replace(model_cfg, block_size=T, **kind), dtype)
                for name, kind in kinds.items()}
    for part in "forward + backward", "prefill":
        by_length(part, models, lengths, device, rounds, cfg)
    by_length("decoding", models, lengths, device, rounds, cfg, rows)
    for name, make in models(lengths[-1]).items():
        cache = make().init_cache(1, lengths[-1])
        print(f"cache: {cache.nbytes() / lengths[-1]:.1f} bytes a token ({name})")


# ---- kernels ----

def kernel(function, tensors, do=None):
    """A function of tensors; with do, all gradients too."""
    tensors = [x.detach().requires_grad_(do is not None) for x in tensors]

    def call():
        out = function(*tensors)
        if do is not None:
            torch.autograd.grad(out, tensors, do)
    return nothing, call


def loop_scan(g, x, chunk):
    """h_t = g_t h_{t-1} + (1 - g_t) x_t, as a Python loop over positions."""
    h, state = torch.empty_like(x), torch.zeros_like(x[:, 0])
    for t in range(x.size(1)):
        h[:, t] = state = torch.lerp(x[:, t], state if t % chunk else 0 * state, g[:, t])
    return h


def bench_kernels(cfg, _, sizes=None):
    """attend beside torch's attention (SDPA), also over the keys at the ends of chunks of 16 only.
    scan beside a loop, on a GPU beside a copy of x. sizes: B, H, T, D."""
    device, attend = pick_device(cfg.device), kernels.attend
    gpu = device.type == "cuda"
    dtype = torch.bfloat16 if gpu else torch.float32
    print(f"{device_name(device)}, torch {torch.__version__}")
    for B, H, T, D in sizes or ([(4, 16, 4096, 128), (1, 16, 65536, 128)] if gpu else
                                [(1, 8, 1024, 64), (1, 4, 8192, 64)]):
        q, k, v, do = torch.randn(4, B, T, H, D, device=device, dtype=dtype).transpose(2, 3)
        at, end = torch.arange(T, device=device, dtype=torch.int32), slice(15, None, 16)
        ends = at[end].clone()
        functions = {"SDPA": partial(F.scaled_dot_product_attention, is_causal=True),
                     "attend": lambda q, k, v: attend(q, k, v)[0], "attend, chunk ends":
                     lambda q, k, v: attend(q, k[:, :, end], v[:, :, end], at, ends)[0]}
        for part, grad in ("forward", None), ("forward + backward", do):
            compare(f"{part}, T {T:,}", each(functions, kernel, (q, k, v), grad), device,
                    cfg.rounds)
    shape = (2, 4096, 2048) if gpu else (1, 2048, 512)
    g, x = torch.rand(2, *shape, device=device, dtype=dtype)
    functions = {"copy of x": lambda g, x: x.clone()} if gpu else {
        "loop": partial(loop_scan, chunk=64)}
    functions |= {f"scan, chunk {L}": partial(kernels.scan, chunk=L) for L in (16, 64, shape[1])}
    compare("scan", each(functions, kernel, (g, x)), device, cfg.rounds)


# ---- trained runs ----

def validation_text(ckpt, folder):
    data = TokenData(open_data(SimpleNamespace(**ckpt["config"])), "val")
    check_tokenizer(ckpt, data, folder)
    return data


def bench_runs(cfg, folders):
    """Runs of the same data: a training step, a token after a context of the run's own text (it
    decides how deep MoR's tokens go), the cache. The first run is the baseline."""
    device, models, configs, data = pick_device(cfg.device), {}, {}, None
    for folder in folders:
        model, _, ckpt = load_run(folder)
        models[folder] = partial(copy.deepcopy, model)
        configs[folder] = SimpleNamespace(**ckpt["config"])
        data = data or validation_text(ckpt, folder)
        check_tokenizer(ckpt, data, folder)
    T = min(make().cfg.block_size for make in models.values())
    if data.tokens < 16 * T:
        raise UserError(f"the validation text has {data.tokens} tokens: {16 * T} are needed")
    idx, new = torch.from_numpy(data.windows(np.arange(16) * T, T)).to(device), min(NEW, T - 1)
    steps = {f: partial(training, make, device, configs[f]) for f, make in models.items()}
    found = {"train_ms": compare("training step", steps, device, cfg.rounds)}
    for n in 1, 16:
        found[f"decode_{n}_ms"] = compare(f"decoding batch {n}", each(
            models, decoding, device, T, n, idx[:n]), device, 4 * cfg.rounds, per=new)
    result = {}
    for folder, make in models.items():
        result[folder] = {name: 1000 * statistics.median(times[folder])
                          / (1 if name == "train_ms" else new) for name, times in found.items()}
        result[folder]["cache_bytes"] = make().init_cache(1, T).nbytes() / T
        print(f"{folder}: cache {result[folder]['cache_bytes']:,.1f} bytes a token")
    if cfg.json:
        with writing(cfg.json):
            Path(cfg.json).write_text(json.dumps(result))


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


def compare_requests(cases, text, device, rounds):
    """Print a line for each of the cases {name: (model, slots, options of the Engine)}: all of the
    requests arrive at once. Returns seconds as compare does, and {name: the answered requests}."""
    answers, tokens = {}, sum(r.max_new_tokens for r in workload(text))

    def serving(name):
        model, slots, options = cases[name]

        def call():
            answers[name] = workload(text)
            list(Engine(model.eval(), slots, LONGEST, **options).run(answers[name]))
        return nothing, call
    setups = {name: partial(serving, name) for name in cases}
    return compare(f"{REQUESTS} requests", setups, device, rounds, per=tokens, tokens=tokens,
                   warmup=0), answers


def print_bound(name, seconds, bound, cfg, loops):
    """How much is reached of the speed that a model could have whose tokens took so many loops,
    by its layers. bound: the seconds of all layers."""
    outside = getattr(cfg, "n_outside", 0)
    looped = (cfg.n_layer - outside) * statistics.mean(loops) / cfg.n_loop
    layers = (outside + looped) / cfg.n_layer
    print(f"  {name}: tokens by loops {loop_fractions(loops, cfg.n_loop)}: {layers:.3f} of the "
          f"layers; {layers * ratio(bound, seconds):.0%} of that speed")


def mor_requests(model, text, device, rounds=3):
    """MoR beside the plain model with as many slots, and with as many as fit into its cache."""
    # the engine asks for loops, so the plain model is one recursion
    plain = build("mor", model.cfg, router="none", router_func="", n_loop=1, share="cycle",
                  kv="recursion", exit_loop=0).to(device)
    mor_bytes, plain_bytes = (m.init_cache(1, LONGEST).nbytes() for m in (model, plain))
    more = max(SLOTS + 1, SLOTS * plain_bytes // mor_bytes)
    few, many = f"{SLOTS} slots", f"{more} slots"
    sequence, depth = dict(batching="sequence"), dict(batching="depth")
    times, answers = compare_requests({
        f"plain, {few}, sequence": (plain, SLOTS, sequence),
        f"MoR, {few}, sequence": (model, SLOTS, sequence),
        f"MoR, {few}, depth": (model, SLOTS, depth),
        f"plain, {many}, sequence": (plain, more, sequence),
        f"MoR, {many}, depth": (model, more, depth)}, text, device, rounds)
    base, _, mor, base_more, mor_more = times.values()
    loops = [loop for r in answers[f"MoR, {few}, depth"] for loop in r.exits]
    print_bound(few, mor, base, model.cfg, loops)
    print_bound(f"{many}, plain ones too", mor_more, base_more, model.cfg, loops)
    no_slower = [t * SLOTS / more for t in base]
    print_bound(f"{many}, if a step took no longer", mor_more, no_slower, model.cfg, loops)


@torch.no_grad()
def relaxed_requests(model, text, device, slots=32, fraction=0.65, rounds=3):
    """Without early exit and with it, by sequences and by depth, beside the untied model."""
    untied = build("relaxed", model.cfg, n_loop=1, rank=0, early_exit="none", exit_loop=0)
    first = copy.copy(model)            # exits where it is surest of what all loops answer
    first.cfg = replace(model.cfg, exit_loop=1)
    answered = Engine(model, slots, LONGEST, "sequence").run(workload(text)[:slots])
    logits = torch.cat([first(torch.tensor([r.prompt + r.tokens], device=device))
                        [0][0, len(r.prompt) - 1:-1] for r in answered])        # (tokens, V)
    sure = logits.softmax(-1).amax(-1).quantile(1 - fraction)
    exit = f"confidence:{float(sure):.8g}"
    kinds = {"all loops": {}, "propagate": dict(exit=exit, fill="propagate"),
             "exact": dict(exit=exit, fill="exact")}
    cases = {f"{kind}, {batching}": (model, slots, dict(options, batching=batching))
             for kind, options in kinds.items() for batching in ("sequence", "depth")}
    cases["untied, sequence"] = untied.to(device), slots, dict(batching="sequence")
    times, answers = compare_requests(cases, text, device, rounds)
    for kind in "propagate", "exact":
        # prompts take all loops, and their last tokens give the first ones of the answers
        loops = [loop for r in answers[f"{kind}, depth"]
                 for loop in [*[model.loops_to_run] * len(r.prompt), *r.exits[1:]]]
        print_bound(f"{kind}, {exit}", times[f"{kind}, depth"], times["all loops, sequence"],
                    model.cfg, loops)
    for kind, options in kinds.items():
        print(f"  {kind}: {quality(model, options, text):.4f} nats a token as served")


def quality(model, options, text):
    """Cross-entropy in nats as served, where the text really goes on: each next token is its."""
    nats = []

    class Forced(Engine):
        def pick(self, slots, logits):
            asked = [slot.request for slot in slots]
            true = [int(text[r.id + len(r.prompt) + len(r.tokens)]) for r in asked]
            target = torch.tensor(true, device=logits.device)
            nats.extend(F.cross_entropy(logits, target, reduction="none").tolist())
            return true
    list(Forced(model.eval(), SLOTS, LONGEST, **options).run(workload(text)[:48]))
    return statistics.mean(nats)


def bench_requests(folder, device):
    model, _, ckpt = load_run(folder, device)
    data = validation_text(ckpt, folder)
    if not LONGEST < min(data.n_windows(1), model.cfg.block_size + 1):
        raise UserError(f"{folder}: requests of {LONGEST} tokens need a larger block_size "
                        f"({model.cfg.block_size}) or validation text ({data.tokens} tokens)")
    text = data.windows(np.array([0]), min(data.n_windows(1), 100_000))[0]
    print(f"{folder}; {device_name(device)}, torch {torch.__version__}")
    {"relaxed": relaxed_requests, "mor": mor_requests}[ckpt["model"]](model.eval(), text, device)


# ---- the command ----

@dataclass
class BenchConfig:
    device: str = "auto"            # auto | cpu | cuda | cuda:N
    rounds: int = 9                 # how often each case is timed
    json: str = ""                  # runs: write the numbers into this file

    def __post_init__(self):
        if self.rounds < 1:
            raise ValueError(f"rounds={self.rounds} must be at least 1")


# Sizes if neither a config file nor a width is given: products, not calls, shall take the time.
BENCH_SIZES = {"rat": ["n_embd=256"], "relaxed": ["n_embd=512", "n_head=8", "n_kv_head=2"],
               "lrt": ["n_layer=6", "n_embd=256", "block_size=512", "batch_size=8"],
               "mor": ["n_embd=256", "n_head=4", "batch_size=16"]}
MODELS = "gpt", "rt", "lrt", "rat", "relaxed", "mor"
OWN_KEYS = {"kernels": bench_kernels, "runs": bench_runs}


def main(argv):
    if asks_help(argv):
        return print(help_text(BenchConfig))
    names, keys = split_paths(argv)[0] or [""], [a for a in argv if is_key(a)]
    name, *folders = names
    if name not in (*MODELS, *OWN_KEYS) or bool(folders) != (name == "runs"):
        raise UserError("python -m lab.bench NAME [key=value ...], NAME one of: "
                        + ", ".join([*MODELS, "kernels", "runs out/A ..."]))
    torch.manual_seed(1337)
    if name in OWN_KEYS:
        return OWN_KEYS[name](typed_config(BenchConfig, split_args(keys)), folders)
    if not {"config", "n_embd", "init_from"} & split_args(keys).keys():
        keys = BENCH_SIZES.get(name, []) + keys
    cfg, model_fields, ckpt, _ = read_config([f"model={name}", *keys])
    device, model_cfg = pick_device(cfg.device), model_module(name).Config(**model_fields)
    if model_cfg.block_size < 2:
        raise UserError("block_size=1: decoding needs at least 2 tokens")
    if ckpt is not None and name in ("relaxed", "mor"):
        return bench_requests(cfg.init_from, device)
    mixed = "bfloat16 (autocast)" if device.type == "cuda" else "float32"
    print(f"{name}: {model_cfg.n_layer} layers of width {model_cfg.n_embd}, batch {cfg.batch_size} "
          f"x {model_cfg.block_size} tokens; {device_name(device)}, torch {torch.__version__}; "
          f"training in {mixed}")
    if name == "rat":
        return bench_rat(model_cfg, cfg, device)
    bench_model(name, model_cfg, cfg, device)


if __name__ == "__main__":
    run_cli(main)

"""
Speed, side by side in one run: what the README's ratios come from.

    python bench.py gpt                                   the baseline: training, and decoding with and without cache
    python bench.py gpt n_layer=8 n_embd=512 device=cuda  at another size
    python bench.py rt                                    the Recurrent Transformer's schedules, beside a Transformer
    python bench.py rt config=configs/rt_150m_12l.yaml    on a GPU: the paper's Table 2
    python bench.py rat                                   one layer of RAT beside attention and an RNN, by length
    python bench.py rat config=configs/rat_1300m.yaml     on a GPU: the paper's Tables 6, 7 and 8
    python bench.py lrt                                   the Latent Recurrent Transformer's paths beside its backbone
    python bench.py lrt config=configs/lrt_20l.yaml batch_size=4    on a GPU: the paper's size
    python bench.py relaxed                               deltas of several ranks; decoding beside an untied Transformer
    python bench.py relaxed init_from=out/relaxed_exit    also 240 requests in three batchings, with its trained exits
    python bench.py mor                                   training steps of Mixture-of-Recursions beside a Transformer
    python bench.py mor init_from=out/mor_tiny            also 240 requests, with trained routers, beside a Transformer
    python bench.py serve out/a out/b file=pareto.png     trained runs of relaxed and mor, with requests: loss against
                                                          speed (keys: file, slots, requests, rounds, device, data_dir)
    python bench.py kernels                               attend and scan (keys: device, rounds)

The other keys are train.py's (python train.py help), and sizes start from configs/<model>_tiny.yaml as there. The
contestants take turns, round after round, so that a noisy neighbour disturbs all alike; each figure is the median
over the rounds.
"""
import contextlib
import dataclasses
import functools
import math
import random
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

import kernels
import rt_wavefront
from checkpoint import load_run
from config import UserError, asks_help, model_module, run_cli, split_args, typed_config
from data import TokenData
from limits import check_run_fits
from optim import make_optimizers
from plot import points, save_picture
from run import (TrainConfig, check_tokenizer, device_name, make_model, open_data, pick_device,
                 read_config)
from sampling import loop_fractions
from serve import Engine, Request


def timings(contestants, rounds, device):
    """contestants: {name: (prepare, call)}. Seconds of each call in each of `rounds` rounds, in which each runs once,
    after two rounds that do not count; prepare, where there is one, runs outside the clock."""
    times = {name: [] for name in contestants}
    for n in range(rounds + 2):
        for name, (prepare, call) in contestants.items():
            if prepare:
                prepare()
            wait(device)
            start = time.perf_counter()
            call()
            wait(device)
            if n >= 2:
                times[name].append(time.perf_counter() - start)
    return times


def medians(contestants, rounds, device):
    """Seconds of each call, the median over the rounds of `timings`."""
    return {name: statistics.median(t) for name, t in timings(contestants, rounds, device).items()}


def times_as_long(a, b):
    """How many times as long as b the calls of a took, both from timings: the median of the rounds' ratios, which what
    else goes on beside a round moves less than times themselves."""
    return statistics.median(x / y for x, y in zip(a, b))


def wait(device):
    if device.type != "cpu":
        getattr(torch, device.type).synchronize()


def training_step(model, cfg):
    """A function that does one optimizer step on a fixed random batch."""
    device = model.wte.weight.device
    idx = torch.randint(0, model.cfg.vocab_size, (cfg.batch_size, model.cfg.block_size + 1), device=device)
    optimizers = make_optimizers(model, cfg)

    def step():
        model.train()
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = model(idx[:, :-1], idx[:, 1:])[1]
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    return step


def decoding(model, position, steps, rows=1):
    """Two contestants that decode the last `steps` tokens of each row up to number `position`: from the cache of the
    tokens before them, and by running the whole prefix again for each."""
    model.eval()
    idx = torch.randint(0, model.cfg.vocab_size, (rows, position), device=model.wte.weight.device)
    cache = model.init_cache(rows, position)

    @torch.inference_mode()
    def prefill():
        cache.reset()
        model(idx[:, :position - steps], cache=cache)

    @torch.inference_mode()
    def with_cache():
        for t in range(position - steps, position):
            model(idx[:, t:t + 1], cache=cache)

    @torch.inference_mode()
    def without():
        for t in range(position - steps, position):
            model(idx[:, :t + 1])

    return {"with the cache": (prefill, with_cache), "prefix recomputed": (None, without)}


def passes(model, batch_size, device):
    """{"forward", "forward + backward"} of a model on a fixed random batch, as functions."""
    T, mixed = model.cfg.block_size, device.type == "cuda"
    idx = torch.randint(0, model.cfg.vocab_size, (batch_size, T + 1), device=device)

    def forward():
        with torch.no_grad(), torch.autocast(device.type, torch.bfloat16, enabled=mixed):
            model(idx[:, :-1])

    def both():
        with torch.autocast(device.type, torch.bfloat16, enabled=mixed):
            loss = model(idx[:, :-1], idx[:, 1:])[1]
        loss.backward()
        model.zero_grad(set_to_none=True)
    return {"forward": forward, "forward + backward": both}


def plain_transformer(cfg):
    """The baseline of an RT's size: the same matrices and positions, RMSNorms."""
    gpt = model_module("gpt")
    same = {f.name: getattr(cfg, f.name) for f in dataclasses.fields(gpt.Config) if hasattr(cfg, f.name)}
    return gpt.Model(gpt.Config(**{**same, "mlp": "gelu", "qk_norm": cfg.qk_norm != "none"}))


def bench_rt(model, cfg, device, ckpt=None, rounds=5):
    """The schedules beside each other and beside the plain Transformer of the same size; then decoding."""
    if model.cfg.block > 1 or not model.cfg.kv_norm:
        raise UserError("the wavefront, which is measured here, needs block=1 and kv_norm=true")
    if model.cfg.block_size < 2:
        raise UserError(f"block_size={model.cfg.block_size}: decoding needs at least 2 tokens")
    if device.type == "cuda":
        return bench_rt_layers(model.cfg, device)
    schedules = ("naive", "tiled", "wavefront")
    models = {s: type(model)(dataclasses.replace(model.cfg, schedule=s)).to(device) for s in schedules}
    models["plain Transformer"] = plain_transformer(model.cfg).to(device)
    for way in ("forward", "forward + backward"):
        calls = {name: (None, passes(m, cfg.batch_size, device)[way]) for name, m in models.items()}
        times = medians(calls, rounds, device)
        for name, seconds in times.items():
            print(f"{way:20}{name:20}{1000 * seconds:10.1f} ms")
        wavefront = times["wavefront"]
        loop = "keys in one buffer" if way == "forward" else "keys concatenated"
        print(f"  the wavefront is {times['naive'] / wavefront:.1f}x as fast as the naive loop ({loop}), "
              f"{times['tiled'] / wavefront:.1f}x as fast as the tiled one, and takes "
              f"{wavefront / times['plain Transformer']:.1f} times as long as the plain Transformer (model_gpt)")
    T = model.cfg.block_size
    n = min(16, T - 1)
    calls = {name: decoding(models[name].eval(), T, n)["with the cache"] for name in ("wavefront", "plain Transformer")}
    times = medians(calls, rounds, device)
    for name, seconds in times.items():
        print(f"{'decoding':20}{name:20}{1000 * seconds / n:10.2f} ms a token")
    print(f"  a token takes {times['wavefront'] / times['plain Transformer']:.2f} times as long as the plain "
          "Transformer's; the cache is of the same size")


# The paper's Table 2: milliseconds of one layer's forward at T 512, d 1024, 16 heads on an H100, by batch size.
PAPER_RT = {32: 38.9, 64: 42.3, 128: 49.0, 256: 61.4, 512: 81.7}
# An H200's data sheet: bytes and bfloat16 operations a second.
H200_BYTES, H200_FLOPS = 4.8e12, 989e12


def rt_floor(cfg, batch_size):
    """Milliseconds that one layer's forward takes at least on an H200: each position reads Wo, the MLP and Wk, Wv, and
    each token needs its operations."""
    d, T = cfg.n_embd, cfg.block_size
    weights = d * d + 2 * d * cfg.n_mlp + 2 * d * cfg.n_kv_head * cfg.head_dim
    operations = 2 * (weights + d * d + 2 * d * cfg.n_kv_head * cfg.head_dim) + 2 * d * T
    return 1000 * max(2 * weights * T / H200_BYTES, batch_size * T * operations / H200_FLOPS)


def bench_rt_layers(cfg, device, batch_sizes=(8, 32, 128, 512), rounds=3):
    """A GPU's table: milliseconds a layer by batch size, each schedule, and tokens a second beside the plain
    Transformer's, which is compiled, as the wavefront is replayed as a CUDA graph. With
    config=configs/rt_150m_12l.yaml the sizes are those of the paper's Table 2."""
    tables = cfg.n_embd == 1024 and cfg.block_size == 512
    for batch_size in batch_sizes:
        models = {"plain, compiled": plain_transformer(cfg), "plain, eager": plain_transformer(cfg)}
        if device.type == "cuda":
            models["plain, compiled"].compile()
        for schedule in ("wavefront", "tiled", "naive") if batch_size == min(batch_sizes) else ("wavefront", "tiled"):
            models[schedule] = model_module("rt").Model(dataclasses.replace(cfg, schedule=schedule))
        paper = PAPER_RT.get(batch_size) if tables else None
        print(f"batch {batch_size}: floor of a layer's forward on an H200 {rt_floor(cfg, batch_size):.2f} ms"
              + (f", the paper's on an H100 {paper} ms" if paper else ""))
        seconds = {(name, way): once_on(device, m, way, batch_size, rounds) for name, m in models.items()
                   for way in ("forward", "forward + backward")}
        for (name, way), t in seconds.items():
            figures = "does not fit" if t is None else (f"{1000 * t / cfg.n_layer:10.2f} ms a layer"
                                                        f"{batch_size * cfg.block_size / t:14,.0f} tokens/s")
            print(f"  {way:20}{name:20}{figures}")
        plain, wavefront = (seconds[name, "forward + backward"] for name in ("plain, compiled", "wavefront"))
        if plain and wavefront:
            print(f"  training: {plain / wavefront:.2f} of the compiled Transformer's tokens/s (goal 0.5 at batch 512)",
                  flush=True)


def once_on(device, model, way, batch_size, rounds):
    """Seconds of one pass of a model that is on the device for just that long; None where it does not fit."""
    def leave():
        model.to("cpu")
        rt_wavefront.GRAPHS.clear()
    return alone(lambda: (None, passes(model.to(device), batch_size, device)[way]), rounds, device, leave)


def alone(make, rounds, device, leave=None):
    """Seconds of a contestant that is on the device for just that long; None where it does not fit. leave: a function
    that frees what does not go by itself."""
    try:
        return medians({"": make()}, rounds, device)[""]
    except torch.cuda.OutOfMemoryError:
        return None
    finally:
        if leave:
            leave()
        if device.type == "cuda":
            torch.cuda.empty_cache()


# The paper's Tables 6, 7 and 8 (one layer, D 2048, a GH200): attention's time over RAT(16)'s at T = 4K, 8K, ..., 262K,
# training and prefill of 200K tokens, and a token of 64 rows (OOM at 262K).
LENGTHS = [2 ** n for n in range(12, 19)]
PAPER_RAT = {"training": dict(zip(LENGTHS, (0.81, 1.15, 1.75, 2.73, 4.34, 6.86, 9.04))),
             "prefill": dict(zip(LENGTHS, (0.84, 1.17, 1.76, 2.66, 4.28, 6.95, 10.02))),
             "decoding": dict(zip(LENGTHS, (1.85, 2.66, 5.20, 9.79, 12.4, 14.7)))}
CHUNKS = 64                 # of the contestant whose number of chunks does not grow with the text


def rat_layers(cfg, T, device):
    """One layer of each kind with its projections, to be made: {name: function that makes it}.
    A function returns the layer's Config and the layer."""
    rat = model_module("rat")
    sizes = {"attention": dict(mixer="attention"), f"RAT({cfg.chunk})": {},
             f"RAT(T/{CHUNKS})": dict(chunk=max(1, T // CHUNKS)), "RNN": dict(mixer="rnn")}
    if device.type == "cuda":                       # rotary is not fused here: what it costs attention
        sizes["attention, nope"] = dict(mixer="attention", pos="nope")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32

    def make(change):
        one = dataclasses.replace(cfg, **{"block_size": T, "n_layer": 1, "vocab_size": 1, "swa": 0, **change})
        return one, rat.Model(one).blocks[0].mix.to(device, dtype)
    return {name: lambda change=change: make(change) for name, change in sizes.items()}


def rat_passes(cfg, layer, T, rows, device):
    """{"training", "prefill"} of a layer on `rows` sequences of T tokens, as functions."""
    rat, w = model_module("rat"), layer.wo.weight
    u, du = torch.randn(2, rows, T, w.size(0), device=device, dtype=w.dtype)
    u.requires_grad_()
    context = rat.Context(cfg, u)

    def training():
        torch.autograd.grad(layer(u, 0, context), [u, *layer.parameters()], du, materialize_grads=True)

    def prefill():
        with torch.no_grad():
            layer(u, 0, context)
    return {"training": training, "prefill": prefill}


TOKENS = 8                  # that one call decodes, all at the same position


def rat_decoding(cfg, layer, T, rows, device):
    """A layer's step of one token at position T - 1 in each of `rows` sequences, after a cache of random numbers."""
    rat, w = model_module("rat"), layer.wo.weight
    cache = rat.Cache(cfg, rows, T, device, w.dtype)
    for buffer in cache.k + cache.v:
        buffer.normal_()
    cache.lengths.fill_(T - 1)
    cache.longest = T - 1
    u = torch.randn(rows, 1, w.size(0), device=device, dtype=w.dtype)
    context = rat.Context(cfg, u, cache)

    @torch.inference_mode()
    def step():
        for _ in range(TOKENS):
            layer(u, 0, context)
    return step


def rat_seconds(layers, way, T, tokens, rows, rounds, device):
    """Seconds of each layer. On a CPU they take turns; on a GPU each is there alone, attention once with each of
    torch's backends, of which the fastest counts, and None tells what did not fit."""
    def contestant(make, backend=None):
        layer = make()
        call = (rat_decoding(*layer, T, rows, device) if way == "decoding" else
                rat_passes(*layer, T, max(1, tokens // T), device)[way])

        def run():
            with sdpa(backend):
                call()
        return None, run
    if device.type != "cuda":
        return medians({name: contestant(make) for name, make in layers.items()}, rounds, device)
    found = {}
    for name, make in layers.items():
        chosen = sdpa_backends(device) if name.startswith("attention") and way != "decoding" else {"": None}
        times = [alone(lambda: contestant(make, backend), rounds, device) for backend in chosen.values()]
        found[name] = min((t for t in times if t is not None), default=None)
    return found


def crossing(lengths, ratios):
    """From which length on a ratio stays above 1, in words; between two measured ones on a line of logarithms."""
    below = [i for i, ratio in enumerate(ratios) if ratio < 1]
    if not below:
        return "at all of these lengths"
    if below[-1] == len(ratios) - 1:
        return "at none of the longest lengths"
    a, b, x, y = *lengths[below[-1]:below[-1] + 2], *ratios[below[-1]:below[-1] + 2]
    return f"from T = {round(a * (b / a) ** (math.log(1 / x) / math.log(y / x))):,} on"


def bench_rat(cfg, device, lengths=None, tokens=None, rows=None, rounds=3):
    """One layer of RAT, attention and the RNN on the same number of tokens, cut into longer and longer sequences; then
    one token of `rows` sequences after as long a text; then how cost grows, and the caches."""
    gpu = device.type == "cuda"
    lengths = lengths or (LENGTHS if gpu else [2 ** n for n in range(8, 15)])
    tokens, rows = tokens or (2 ** 18 if gpu else 2 ** 14), rows or (64 if gpu else 8)
    ours, paper = f"RAT({cfg.chunk})", cfg.chunk == 16 and cfg.n_embd == 2048
    print(f"rat: one layer with its projections, width {cfg.n_embd}, {cfg.n_head} heads; {device_name(device)}, torch "
          f"{torch.__version__}; {'bfloat16' if gpu else 'float32'}, not compiled; milliseconds, medians of {rounds}")
    for way in ("training", "prefill", "decoding"):
        print(f"{way}, " + (f"a token of {rows} sequences" if way == "decoding" else f"{tokens:,} tokens"))
        ratios, table = {}, {}
        for T in lengths:
            table[T] = seconds = rat_seconds(rat_layers(cfg, T, device), way, T, tokens, rows, rounds, device)
            scale = 1000 / (TOKENS if way == "decoding" else 1)
            line = f"  T {T:7,}   " + "   ".join(f"{name} " + ("does not fit" if t is None else f"{scale * t:9.3f}")
                                                 for name, t in seconds.items())
            if seconds["attention"] and seconds[ours]:
                ratios[T] = seconds["attention"] / seconds[ours]
                line += f"   attention / {ours} {ratios[T]:.2f}"
            print(line + (f", the paper's {PAPER_RAT[way][T]}" if paper and T in PAPER_RAT[way] else ""), flush=True)
        if ratios:
            print(f"  {ours} is faster than attention " + crossing(list(ratios), list(ratios.values())))
        if way != "decoding" and len(ratios) > 1:
            (a, first), *_, (b, last) = table.items()
            growth = {n: 1 + math.log(last[n] / first[n]) / math.log(b / a) for n in first if first[n] and last[n]}
            print("  a sequence's time grows as T^e, e = " + ", ".join(f"{e:.2f} ({n})" for n, e in growth.items()))
    T, meta = lengths[-1], torch.device("meta")
    rat, layers = model_module("rat"), rat_layers(cfg, T, meta)
    sizes = {name: rat.Cache(make()[0], 1, T, meta, torch.float32).nbytes() for name, make in layers.items()}
    print(f"float32 cache of {T:,} tokens, bytes a token: " + ", ".join(f"{n / T:.1f} ({k})" for k, n in sizes.items()))
    print(f"  attention's is {sizes['attention'] / sizes[ours]:.2f}x {ours}'s")


def bench_lrt(model, cfg, device, ckpt=None, rounds=11):
    """A training step of each path beside the backbone's; then decoding, and prefill."""
    T = model.cfg.block_size
    if T < 2:
        raise UserError(f"block_size={T}: decoding needs at least 2 tokens")
    default = dict(memory=True, train_path="interleaved", prefill="exact")

    def make(**changes):
        return type(model)(dataclasses.replace(model.cfg, **{**default, **changes})).to(device)
    steps = {"backbone": dict(memory=False),
             **{f"interleaved, S = {S}": dict(subsets=S) for S in (2, 4, 8)},
             "interleaved, layerwise": dict(projections="layerwise"),
             **{f"chunked, C = {C}": dict(train_path="chunked", chunk=C) for C in (64, 256)}}
    if device.type == "cpu":
        calls = {name: (None, training_step(make(**c), cfg)) for name, c in steps.items()}
        times = timings(calls, rounds, device)
    else:                                           # one at a time: each with its optimizer's state
        times = {name: [alone(lambda: (None, training_step(make(**c), cfg)), rounds, device)]
                 for name, c in steps.items()}
    for name, t in times.items():
        took = "does not fit" if t == [None] else f"{1000 * statistics.median(t):10.1f} ms"
        ratio = ""
        if [None] not in (t, times["backbone"]):
            ratio = f"{times_as_long(t, times['backbone']):8.2f} x the backbone"
        print(f"training step  {name:26}{took}{ratio}", flush=True)
    both = {name: (None, passes(make(**steps[name]), cfg.batch_size, device)["forward + backward"])
            for name in ("backbone", "interleaved, S = 2")}
    times = timings(both, rounds, device)
    for name, t in times.items():
        print(f"forward + backward  {name:20}{1000 * statistics.median(t):11.1f} ms"
              f"{times_as_long(t, times['backbone']):8.2f} x the backbone", flush=True)
    goal = 2.2 if device.type == "cpu" else 2.08
    print(f"  goal: S = 2 at most {goal} x the backbone's step; the floor is 2.01")
    backbone, ours = make(memory=False), make(prefill="interleaved")    # to fill its cache fast
    for rows in sorted({cfg.batch_size, 1}, reverse=True):
        last_tokens({"backbone": backbone, "LRT": ours}, T, rows, 4 * rounds, device)
    sizes = [m.init_cache(1, T).nbytes() for m in (ours, backbone)]
    print(f"  goal: at most 1.05 x; cache of a row {sizes[0]:,} bytes, the backbone's {sizes[1]:,}")
    models = {"backbone": backbone, "exact": make(), "interleaved": ours}
    calls = {name: (None, prefilling(m.eval(), T - 1)) for name, m in models.items()}
    for name, t in medians(calls, rounds, device).items():
        print(f"prefill        {name:26}{1000 * t:10.1f} ms for {T - 1} tokens")


def last_tokens(models, T, rows, rounds, device):
    """Print how long models, the first of which the others are compared with, take for a token of `rows` rows. The last
    8 of a full context: few, so that rounds are short and many."""
    n, base = min(8, T - 1), next(iter(models))
    times = timings({name: decoding(m, T, n, rows)["with the cache"] for name, m in models.items()}, rounds, device)
    for name, t in times.items():
        print(f"decoding       {name + f', rows: {rows}':26}{1000 * statistics.median(t) / n:10.3f} ms a token"
              f"{times_as_long(t, times[base]):8.3f} x the {base}", flush=True)


def prefilling(model, T):
    """A function that prefills an empty cache with T tokens."""
    cache = model.init_cache(1, T)
    idx = torch.randint(0, model.cfg.vocab_size, (1, T), device=model.wte.weight.device)

    @torch.inference_mode()
    def prefill():
        cache.reset()
        model(idx, cache=cache)
    return prefill


def untied_transformer(cfg):
    """The model_gpt of the same unrolled layers as a model that ties them."""
    gpt = model_module("gpt")
    shared = {f.name for f in dataclasses.fields(gpt.Config)}
    return gpt.Model(gpt.Config(**{k: v for k, v in dataclasses.asdict(cfg).items() if k in shared}))


def bench_relaxed(model, cfg, device, ckpt, rounds=9):
    """Ranks of the deltas beside an untied Transformer of the same unrolled depth: training steps, decoding. Then, with
    trained weights, many requests."""
    if model.cfg.block_size < 2:
        raise UserError(f"block_size={model.cfg.block_size}: decoding needs at least 2 tokens")
    if ckpt is not None and (model.cfg.n_loop < 2 or model.cfg.share != "cycle"):
        raise UserError(f"n_loop={model.cfg.n_loop}, share={model.cfg.share}: at least 2, and cycle, are needed")
    text = None if ckpt is None else served_text(model, cfg, ckpt)      # what is wrong there is better found now
    ranks = sorted({0, 8, 64, model.cfg.rank})
    models = {"untied model": untied_transformer(model.cfg).to(device), **{
        f"rank {r}": type(model)(dataclasses.replace(model.cfg, rank=r, early_exit="none")).to(device) for r in ranks}}
    times = timings({name: (None, training_step(m, cfg)) for name, m in models.items()}, rounds, device)
    for name, t in times.items():
        size = sum(p.numel() for p in models[name].parameters())
        print(f"training step  {name:26}{1000 * statistics.median(t):10.2f} ms"
              f"{times_as_long(t, times['untied model']):8.2f} x the untied model{size:14,} parameters", flush=True)
    for rows in (1, 16):
        last_tokens(models, model.cfg.block_size, rows, 3 * rounds, device)
    if ckpt is None:
        return print("requests: need trained exits, init_from=RUN (README.md, Relaxed Recursive Transformers)")
    bench_batching(model, text, device)


PROMPT, ANSWER = (4, 16), (32, 96)      # tokens of a request, at least and at most
LONGEST = PROMPT[1] + ANSWER[1]


def served_text(model, cfg, ckpt):
    """The text that requests start from, token ids: the validation text of the run's data set."""
    if LONGEST > model.cfg.block_size:
        raise UserError(f"block_size={model.cfg.block_size}: at least {LONGEST} is needed")
    data = TokenData(open_data(cfg), "val")
    check_tokenizer(ckpt, data, cfg.init_from)
    if data.n_windows(1) <= LONGEST:
        raise UserError(f"{cfg.dataset} has {data.tokens} tokens to validate: more than {LONGEST} are needed")
    return data.windows(np.array([0]), min(data.n_windows(1), 100_000))[0]


def workload(text, requests=240):
    """A function that gives the same requests each time: where in text they start, and their sizes, are drawn once.
    What follows in text stands in `truth`."""
    rng = random.Random(0)
    sizes = [(rng.randint(*PROMPT), rng.randint(*ANSWER)) for _ in range(requests)]
    starts = [rng.randrange(len(text) - LONGEST) for _ in sizes]

    def make():
        found = [Request(text[a:a + n].tolist(), new, id=i) for i, (a, (n, new)) in enumerate(zip(starts, sizes))]
        for request, a in zip(found, starts):
            request.truth = text[a + len(request.prompt):][:request.max_new_tokens].tolist()
        return found
    return make


@dataclass
class Answered:
    """One run of the engine over all requests."""
    requests: list
    seconds: float          # all of it, caching included
    first: list             # seconds until each request's first token; all arrive at once, so queueing counts

    def delays(self):
        """First tokens and latencies in words."""
        p95 = lambda x: sorted(x)[int(0.95 * len(x))]
        return (f"first token {statistics.median(self.first):.2f} s (p95 {p95(self.first):.2f}), answer "
                f"{statistics.median(r.latency for r in self.requests):.2f} s "
                f"(p95 {p95([r.latency for r in self.requests]):.2f})")


def answered(work, model, slots, batching, device, exit=""):
    """The requests of work, answered by the engine."""
    first, start = {}, 0.0
    todo = work()
    engine = Engine(model.eval(), slots, LONGEST, batching, exit,
                    on_token=lambda r: first.setdefault(r.id, time.perf_counter() - start))
    wait(device)
    start = time.perf_counter()
    list(engine.run(todo))
    wait(device)
    return Answered(todo, time.perf_counter() - start, list(first.values()))


def served_quality(work, model, slots, batching, exit="", requests=48):
    """What the engine predicts where the text really goes on: (cross-entropy of the true tokens in nats, the likeliest
    token at each place, a list). The same code serves; only the token that follows is the text's."""
    nats, guesses = [], {}

    class Forced(Engine):
        def pick(self, slots, logits):
            todo = [slot.request for slot in slots]
            true = [r.truth[len(r.tokens)] for r in todo]
            nats.extend(F.cross_entropy(logits, torch.tensor(true, device=logits.device), reduction="none").tolist())
            for request, guess in zip(todo, logits.argmax(-1).tolist()):
                guesses.setdefault(request.id, []).append(guess)
            return true
    list(Forced(model.eval(), slots, LONGEST, batching, exit).run(work()[:requests]))
    return statistics.mean(nats), [guess for name in sorted(guesses) for guess in guesses[name]]


def agreement(a, b):
    """The fraction of places at which two lists have the same token."""
    return sum(x == y for x, y in zip(a, b, strict=True)) / len(a)


def in_turns(ways, answer, rounds):
    """{way: [answer(*way) of each round]}, in another order each round."""
    rng, runs = random.Random(0), {way: [] for way in ways}
    for _ in range(rounds):
        for way in rng.sample(ways, len(ways)):
            runs[way].append(answer(*way))
    return runs


def bench_batching(model, text, device, slots=32, share=0.65, rounds=4):
    """Many requests, answered by static, sequence-wise and depth-wise batching, without early exit and with it, at the
    confidence that lets about `share` of the tokens leave after the first loop."""
    work = workload(text)

    def answer(batching, exit, fill):
        model.cfg.fill = fill
        return answered(work, model, slots, batching, device, exit)
    exit = f"confidence:{first_loop_quantile(model.eval(), work()[:slots], LONGEST, 1 - share):.8g}"
    kinds = [("", "exact"), (exit, "propagate"), (exit, "exact")]
    ways = [(b, e, f) for e, f in kinds for b in ("static", "sequence", "depth")]
    report_batching(in_turns(ways, answer, rounds), model.cfg.n_loop)
    full = None
    for e, f in kinds:
        model.cfg.fill = f
        ce, guesses = served_quality(work, model, slots, "depth", e)
        full = full or guesses
        print(f"quality as served, {f'{e}, fill={f}' if e else 'no early exit':40}cross-entropy {ce:.4f} nats a token, "
              f"likeliest token that of all loops: {agreement(guesses, full):.1%}", flush=True)


def report_batching(runs, n_loop):
    """Print what bench_batching found: {(batching, exit, fill): [Answered of each round]}."""
    base = [run.seconds for run in runs["sequence", "", "exact"]]
    for (batching, exit, fill), found in runs.items():
        answers = found[0].requests
        exits = [depth for r in answers for depth in r.exits]
        seconds, p1 = [run.seconds for run in found], exits.count(1) / len(exits)
        want = [r.tokens for r in runs["static", exit, fill][0].requests]
        same = [[r.tokens for r in run.requests] == want for run in found]
        how = f"{exit}, fill={fill}" if exit else "no early exit"
        print(f"{len(answers)} requests, {how:40}{batching:10}{len(exits) / statistics.median(seconds):9,.0f} tokens/s"
              f"{1 / times_as_long(seconds, base):7.2f} x sequence without exit   "
              f"answers {'the same' if all(same) else 'DIFFER'}; {found[0].delays()}", flush=True)
        if exit and batching == "depth" and n_loop == 2:
            gain, bound = 1 / times_as_long(seconds, base), 2 / (2 - p1)
            print(f"  {p1:.0%} of the tokens leave after the first loop: bound 2 / (2 - p1) = {bound:.2f}, reached "
                  f"{gain / bound:.0%}" + (" (goal 85%)" if fill == "propagate" else ""))


def first_loop_quantile(model, requests, max_len, q):
    """The confidence of the first loop that a share q of the tokens does not reach, over what the model writes."""
    engine, found = Engine(model, len(requests), max_len, "sequence"), []

    def watch(logits, depth):                                   # a rule by which nothing leaves early
        found.append(logits[(depth == 0).to(logits.device)].softmax(-1).amax(-1).cpu())
        return depth == model.n_loop - 1
    engine.rule = watch
    list(engine.run(requests))
    return float(torch.cat(found).quantile(q))


def bench_mor(model, cfg, device, ckpt, rounds=9):
    """Training steps, decoding and cache beside a plain Transformer of the same unrolled depth. Then, with trained
    routers, many requests."""
    if model.cfg.block_size < 2 or model.cfg.router == "none":
        raise UserError(f"block_size={model.cfg.block_size}, router={model.cfg.router}: at least 2, and a router, are "
                        f"needed")
    text = None if ckpt is None else served_text(model, cfg, ckpt)
    make = lambda **change: type(model)(dataclasses.replace(model.cfg, capacity_warmup=0, **change)).to(device)
    plain, R = untied_transformer(model.cfg).to(device), model.cfg.n_loop
    mor = lambda **change: make(**{**dict(router="expert", router_func="", kv="recursion"), **change})
    models = {"plain model": plain, f"{R} recursions, no router": make(router="none")}
    for r in (2, 3, 4):
        if (model.cfg.n_layer - 2 * model.cfg.edge) % r == 0:
            models[f"MoR, {r} recursions"] = mor(n_loop=r)
    models |= {f"the same, {R}, kv=share": mor(kv="share"), f"the same, {R}, router=token": mor(router="token")}
    times = timings({name: (None, training_step(m, cfg)) for name, m in models.items()}, rounds, device)
    for name, t in times.items():
        flops = models[name].flops_per_token() / plain.flops_per_token()
        print(f"training step  {name:26}{1000 * statistics.median(t):10.2f} ms"
              f"{times_as_long(t, times['plain model']):8.2f} x the plain model, {flops:.2f} x its FLOPs", flush=True)
    goals = (0.90, 0.85) if device.type == "cpu" else (0.83, 0.77)
    print(f"  goals: 2 recursions at most {goals[0]}, 3 at most {goals[1]}")
    for rows in (1, 16):
        last_tokens({"plain model": plain, "MoR": model}, model.cfg.block_size, rows, 3 * rounds, device)
    sizes = [m.init_cache(1, model.cfg.block_size).nbytes() for m in (model, plain)]
    print(f"cache of a row {sizes[0]:,} bytes, {sizes[0] / sizes[1]:.3f} x the plain model's")
    if ckpt is None:
        return print("requests: need trained routers, init_from=RUN")
    # the engine asks a model for its loops, which model_gpt has not: here the same Transformer as one recursion
    one_loop = make(router="none", n_loop=1, share="cycle", kv="recursion")
    last_tokens({"plain model": plain, "plain, as one loop": one_loop}, model.cfg.block_size, 16, 3 * rounds, device)
    bench_mor_requests(model, one_loop, text, device)


def bench_mor_requests(model, plain, text, device, slots=16, rounds=3):
    """Many requests, beside the plain model with sequence-wise batching: with as many slots, and with as many as fit
    into the plain model's cache."""
    bytes_of = lambda m: m.init_cache(1, LONGEST).nbytes()
    work, more = workload(text), max(slots + 1, slots * bytes_of(plain) // bytes_of(model))
    base = ("plain", "sequence", slots)
    ways = [base, *(("MoR", b, slots) for b in ("static", "sequence", "depth")), ("plain", "sequence", more),
            ("MoR", "depth", more)]
    runs = in_turns(ways, lambda name, batching, n: answered(work, plain if name == "plain" else model, n, batching,
                                                             device), rounds)
    seconds = {way: [run.seconds for run in found] for way, found in runs.items()}
    gains = {way: 1 / times_as_long(t, seconds[base]) for way, t in seconds.items()}
    want = {name: [r.tokens for r in runs[name, batching, slots][0].requests] for name, batching in
            (("plain", "sequence"), ("MoR", "static"))}
    for way, found in runs.items():
        speed = sum(map(len, want[way[0]])) / statistics.median(seconds[way])
        same = all([r.tokens for r in run.requests] == want[way[0]] for run in found)
        print(f"{len(work())} requests, {way[0]:6}{way[1]:10}{way[2]:4} slots{speed:9,.0f} tokens/s"
              f"{gains[way]:7.2f} x the plain model   answers {'the same' if same else 'DIFFER'}; {found[0].delays()}",
              flush=True)
    report_depths(model, work, slots)
    exits = [loop for r in runs["MoR", "depth", slots][0].requests for loop in r.exits]
    cfg, mean = model.cfg, statistics.mean(exits)
    bound = cfg.n_layer / (2 * cfg.edge + cfg.n_stored * mean)
    print(f"  recursions {loop_fractions(exits, cfg.n_loop)}: a token takes {mean:.2f}, so "
          f"{1 / bound:.2f} of the plain model's layers")
    print(f"  {slots} slots: bound {bound:.2f}, reached {gains['MoR', 'depth', slots] / bound:.0%} (goal 90%)")
    for what, limit in (("where the time of a step does not grow with slots", bound * more / slots),
                        ("with what the plain model gains by as many slots", bound * gains[ways[-2]])):
        print(f"  {more} slots, as much memory: bound {limit:.2f} {what}, "
              f"reached {gains[ways[-1]] / limit:.0%} (goal 90%)")


def report_depths(model, work, slots):
    """Print what routing costs in quality: the same weights, served with at most 1, 2, .. recursions a token."""
    found = {}
    for loops in range(model.cfg.n_loop, 0, -1):
        model.cfg.exit_loop = loops % model.cfg.n_loop
        found[loops] = ce, guesses = served_quality(work, model, slots, "depth")
        print(f"quality as served, at most {loops} recursions: cross-entropy {ce:.4f} nats a token, likeliest token as "
              f"with {model.cfg.n_loop}: {agreement(guesses, found[model.cfg.n_loop][1]):.1%}", flush=True)
    model.cfg.exit_loop = 0


@dataclass
class ServeConfig:
    file: str = "serve.png"     # the picture
    slots: int = 16             # requests in work at a time
    requests: int = 240
    rounds: int = 3
    device: str = "auto"
    data_dir: str = "data"

    def __post_init__(self):
        for name in ("slots", "requests", "rounds"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if Path(self.file).suffix not in (".png", ".pdf", ".svg") or not Path(self.file).absolute().parent.is_dir():
            raise ValueError(f"file={self.file} must be a .png, .pdf or .svg in a folder that exists")


def bench_serve(folders, argv):
    """Trained runs answer the same requests, with as many slots each: tokens a second beside the last loss of their
    logs, printed and drawn. Models with a router go depth-wise, where their sharing lets them, all others
    sequence-wise."""
    cfg = typed_config(ServeConfig, split_args(argv))
    if not folders or len(set(folders)) < len(folders):
        raise UserError("give the folders of runs, each once: python bench.py serve out/NAME ... [key=value]")
    device = pick_device(cfg.device)
    runs = {folder: served_run(folder, cfg.data_dir, device) for folder in folders}
    texts = [text for _, text, _ in runs.values()]
    if not all(np.array_equal(text, texts[0]) for text in texts):
        raise UserError("the runs were not trained on the same tokens, so neither losses nor tokens/s compare")
    work, ways = workload(texts[0], cfg.requests), [(f, batching_of(model)) for f, (model, _, _) in runs.items()]
    found = in_turns(ways, lambda folder, how: answered(work, runs[folder][0], cfg.slots, how, device), cfg.rounds)
    places, width = [], max(map(len, folders))
    for (folder, how), answers in found.items():
        speed = sum(len(r.tokens) for r in answers[0].requests) / statistics.median(run.seconds for run in answers)
        places.append((Path(folder).name, speed, runs[folder][2]))
        print(f"{folder:{width}}  {how:10}{speed:9,.0f} tokens/s{runs[folder][2]:9.4f} bits per byte")
    draw_serve(places, cfg)


def served_run(folder, data_dir, device):
    """(model, the text that requests start from, the last val_bpb of the log) of a run."""
    model, _, ckpt = load_run(folder, device)
    if not hasattr(model, "loop"):
        raise UserError(f"{folder} is a model_{ckpt['model']}: requests are for relaxed and mor")
    bpb = points(folder, "step", "val_bpb")[-1][1]
    data = {key: ckpt["config"][key] for key in ("dataset", "tokenizer")}
    return model, served_text(model, TrainConfig(**data, data_dir=data_dir, init_from=folder), ckpt), bpb


def batching_of(model):
    """depth where a router lets tokens leave early, and rows may stand at different recursions."""
    routed = hasattr(model, "takes") and model.cfg.router != "none" and model.n_loop > 1
    return "depth" if routed and model.cfg.share.endswith("cycle") else "sequence"


def draw_serve(places, cfg):
    """The picture of bench_serve: (name, tokens a second, bits per byte) of each run."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    fig, ax = plt.subplots(figsize=(7, 4.5))
    for name, speed, bpb in places:
        ax.plot(speed, bpb, "o")
        ax.annotate(name, (speed, bpb), textcoords="offset points", xytext=(6, 4), fontsize=8)
    ax.set(xlabel=f"tokens a second, {cfg.slots} slots", ylabel="bits per byte")
    ax.margins(x=0.15)
    ax.grid(alpha=0.3)
    save_picture(fig, "file", cfg.file, dpi=120)
    plt.close(fig)
    print(f"{cfg.file}: loss against speed of {len(places)} runs")


def bench_gpt(model, cfg, device, ckpt=None):
    """Training, fast beside naive, and decoding at the end of the context, cached beside recomputed."""
    T, tokens = model.cfg.block_size, cfg.batch_size * model.cfg.block_size
    if T < 2:
        raise UserError(f"block_size={T}: decoding needs at least 2 tokens")
    changes = {"fast": {}, "naive": dict(fast=False), "GELU, no positions": dict(mlp="gelu", pos="none", n_mlp=0)}
    models = {name: type(model)(dataclasses.replace(model.cfg, **change)).to(device)
              for name, change in changes.items()}
    steps = medians({name: (None, training_step(m, cfg)) for name, m in models.items()}, 10, device)
    for name, seconds in steps.items():
        print(f"training, {name:20s}{1000 * seconds:9.2f} ms a step{tokens / seconds:12,.0f} tokens/s"
              f"{seconds / steps['fast']:8.2f} x the fast path")
    n = min(8, T - 1)
    times = medians(decoding(model, T, n), 10, device)
    for name, seconds in times.items():
        print(f"decoding, {name:20s}{1000 * seconds / n:9.2f} ms a token{n / seconds:11,.0f} tokens/s")
    ratio = times["prefix recomputed"] / times["with the cache"]
    print(f"at token {T} the cache is {ratio:.1f}x as fast as recomputing; in training the fast path is "
          f"{steps['naive'] / steps['fast']:.2f}x as fast as the naive one")


@dataclass
class KernelsConfig:
    device: str = "auto"
    rounds: int = 20

    def __post_init__(self):
        if self.rounds < 1:
            raise ValueError(f"rounds={self.rounds} must be at least 1")


def race(title, contestants, device, rounds, repeat):
    """Print milliseconds a call of each contestant (name: function), `repeat` calls at a time; returns seconds."""
    def again(call):
        return lambda: [call() for _ in range(repeat)]
    times = medians({name: (None, again(call)) for name, call in contestants.items()}, rounds, device)
    for name in times:
        times[name] /= repeat
        print(f"{title:58}{name:22}{1000 * times[name]:10.3f} ms")
    return times


def sdpa(backend):
    """A context in which torch's attention takes this backend; None: the one that it chooses."""
    return torch.nn.attention.sdpa_kernel(backend) if backend else contextlib.nullcontext()


def causal(q, k, v, backend=None):
    with sdpa(backend):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


@functools.cache
def sdpa_backends(device):
    """The backends of torch's attention that this build and this GPU have: {name: backend}."""
    kinds = torch.nn.attention.SDPBackend
    backends = {"SDPA flash": kinds.FLASH_ATTENTION, "SDPA cudnn": kinds.CUDNN_ATTENTION,
                "SDPA efficient": kinds.EFFICIENT_ATTENTION}
    found = {}
    for name, backend in backends.items():
        with contextlib.suppress(RuntimeError):         # this build or this GPU lacks it
            causal(*torch.randn(3, 1, 1, 64, 64, device=device, dtype=torch.bfloat16), backend)
            found[name] = backend
    return found


def sdpa_contestants(device):
    """torch's attention over plain causal positions, by every backend of this device: {name: function of q, k, v}."""
    if device.type != "cuda":
        return {"SDPA": causal}
    return {name: lambda q, k, v, backend=backend: causal(q, k, v, backend)
            for name, backend in sdpa_backends(device).items()}


def both_ways(function, tensors, do):
    """Contestants of one function of q, k, v: without gradients, and with all of them."""
    leaves = [x.detach().requires_grad_() for x in tensors]

    def forward():
        with torch.no_grad():
            function(*tensors)

    def backward():
        out = function(*leaves)
        torch.autograd.grad(out[0] if isinstance(out, tuple) else out, leaves, do)
    return {"forward": forward, "forward + backward": backward}


def bench_attend(device, rounds, shape=None, long=None):
    """Plain causal attention against torch's own; half the queries; the last key of each chunk of 16. shape: B, H, T, D
    of the first two; long: T of the last."""
    gpu = device.type == "cuda"
    dtype, repeat = (torch.bfloat16, 10) if gpu else (torch.float32, 1)
    B, H, T, D = shape or ((4, 16, 4096, 128) if gpu else (1, 8, 1024, 64))
    q, k, v, do = torch.randn(4, B, T, H, D, device=device, dtype=dtype).transpose(2, 3)
    functions = {**sdpa_contestants(device), "attend": kernels.attend}
    for way, goal in (("forward", 0.8 if gpu else 1 / 1.5), ("forward + backward", 0.7 if gpu else 1 / 1.5)):
        times = race(f"plain causal, {B} x {H} heads x {T} x {D}, {way}",
                     {name: both_ways(f, (q, k, v), do)[way] for name, f in functions.items()}, device, rounds, repeat)
        best = min((n for n in times if n != "attend"), key=times.get)
        print(f"  attend has {times[best] / times['attend']:.2f} of the speed of {best} (goal {goal:.2f})")

    at = torch.arange(T, device=device, dtype=torch.int32)
    second = at[1::2].contiguous()
    times = race(f"every second query of {T}, forward",
                 {"all": lambda: kernels.attend(q, k, v),
                  "half": lambda: kernels.attend(q[:, :, 1::2], k, v, second, at)}, device, rounds, repeat)
    print(f"  half the queries take {times['half'] / times['all']:.2f} of the time (goal on a GPU 0.60)")

    T = long or (65536 if gpu else 8192)
    q, k, v = torch.randn(3, 1, T, 16 if gpu else 4, D, device=device, dtype=dtype).transpose(2, 3)
    at = torch.arange(T, device=device, dtype=torch.int32)
    ends = at[15::16].contiguous()
    chunk_ends = lambda: kernels.attend(q, k[:, :, 15::16], v[:, :, 15::16], at, ends)
    times = race(f"keys at the ends of chunks of 16, T = {T}, forward",
                 {**{n: lambda f=f: f(q, k, v) for n, f in functions.items()}, "chunk ends": chunk_ends}, device, 5, 1)
    best = min((n for n in times if n != "chunk ends"), key=times.get)
    print(f"  they are {times[best] / times['chunk ends']:.1f}x as fast as {best} over all keys "
          "(goal on a GPU, at 65536, 8)")


def loop_scan(g, x, chunk):
    """The scan as a Python loop over positions."""
    h, state = torch.empty_like(x), None
    for t in range(x.size(1)):
        state = x[:, t] if t % chunk == 0 else g[:, t] * state + x[:, t]
        h[:, t] = state
    return h


def bench_scan(device, rounds, shape=(1, 2048, 512)):
    """On a CPU against a Python loop, on a GPU against the time that reading g and x and writing h takes."""
    if device.type != "cuda":
        g, x = torch.rand(shape), torch.randn(shape)
        times = race(f"scan, {' x '.join(map(str, shape))}, chunk 64, forward",
                     {"loop": lambda: loop_scan(g, x, 64), "scan": lambda: kernels.scan(g, x, 64)}, device, rounds, 1)
        return print(f"  scan is {times['loop'] / times['scan']:.1f}x as fast as the loop (goal 10)")
    for dtype in (torch.float32, torch.bfloat16):
        for chunk in (16, 64, 4096):
            g, x = torch.rand(2, 16, 4096, 2048, device=device, dtype=dtype)
            copy = torch.empty_like(x)
            times = race(f"scan, 16 x 4096 x 2048, {str(dtype)[6:]}, chunk {chunk}, forward",
                         {"copy of x": lambda: copy.copy_(x), "scan": lambda: kernels.scan(g, x, chunk)},
                         device, rounds, 5)
            floor = 1.5 * times["copy of x"]            # two tensors read and one written, a copy reads and writes one
            print(f"  scan takes {times['scan'] / floor:.2f} of the time its bytes take (goal 1.5)")


def bench_kernels(argv):
    cfg = typed_config(KernelsConfig, split_args(argv))
    device = pick_device(cfg.device)
    torch.manual_seed(0)
    print(f"{device_name(device)}, torch {torch.__version__}")
    bench_attend(device, cfg.rounds)
    bench_scan(device, cfg.rounds)


# Sizes of a bench that no config file and no width is given to: wide enough that products, not calls, take the time.
BENCH_SIZES = {"rat": ["n_embd=256"], "lrt": ["n_layer=6", "n_embd=256", "block_size=512", "batch_size=8"],
               "relaxed": ["n_embd=512", "n_head=8", "n_kv_head=2"],
               "mor": ["n_embd=256", "n_head=4", "batch_size=16"]}


def main(argv):
    if asks_help(argv):
        return print(__doc__.strip())
    names = [a for a in argv if "=" not in a]
    benches = {"gpt": bench_gpt, "rt": bench_rt, "lrt": bench_lrt, "relaxed": bench_relaxed, "mor": bench_mor}
    keys, others = [a for a in argv if "=" in a], ["rat", "kernels", "serve"]
    if names[:1] == ["serve"]:
        return bench_serve(names[1:], keys)
    if len(names) > 1 or not set(names) <= {*benches, *others}:
        raise UserError(f"python bench.py NAME [key=value ...], NAME one of: {', '.join([*benches, *others])}")
    name = names[0] if names else "gpt"
    if name == "kernels":
        return bench_kernels(keys)
    if not {"config", "n_embd", "init_from"} & {a.split("=")[0] for a in keys}:
        keys = BENCH_SIZES.get(name, []) + keys
    cfg, model_fields, ckpt, _ = read_config([f"model={name}", *keys])
    device = pick_device(cfg.device)
    module = model_module(name)
    torch.manual_seed(cfg.seed)
    if name == "rat":
        return bench_rat(module.Config(**model_fields), device)
    check_run_fits(cfg, module.Model, module.Config(**model_fields), device)
    model = make_model(cfg, model_fields, ckpt, model_fields["vocab_size"], ["vocab_size"]).to(device)
    print(f"{name}: {sum(p.numel() for p in model.parameters()):,} parameters, batch {cfg.batch_size} x "
          f"{model.cfg.block_size} tokens; {device_name(device)}, torch {torch.__version__}; training in "
          f"{'bfloat16 (autocast)' if device.type == 'cuda' else 'float32'}, decoding in float32, not compiled")
    benches[name](model, cfg, device, ckpt)


if __name__ == "__main__":
    run_cli(main)

"""
Speed, measured beside a baseline in the same run: where the README's ratios come from.

    python -m lab.bench gpt             one of gpt, rt, lrt, relaxed, mor: training and decoding
    python -m lab.bench rat             a layer of RAT beside attention and an RNN, by length
    python -m lab.bench kernels         attend and scan
    python -m lab.bench mor init_from=out/mor_tiny      requests too; relaxed: with early exit
    python -m lab.bench runs out/gpt_tiny out/mor_tiny  trained runs, training and decoding
    python -m lab.bench serve out/a out/b rounds=3      requests to runs of relaxed and mor, drawn

A model's keys are train.py's; sizes start from configs/<model>_tiny.yaml as there. Those of the
papers are in lab/experiments/gpu_speed.yaml. Every line names a candidate, its milliseconds (the
median over rounds), and how many times as long as the baseline it takes: less than 1 is faster.

kernels, runs and serve have keys of their own:
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
from common.config import read_config
from common.data import TokenData
from common.keys import (UserError, asks_help, first_line, help_text, model_module, run_cli,
                         split_args, typed_config, writing)
from common.optim import make_optimizers
from common.process import check_tokenizer, device_name, open_data, pick_device
from common.sampling import loop_fractions
from lab.plot import draw_points, points
from serve import Engine, Request, loops_of


@dataclass
class BenchConfig:
    device: str = "auto"            # auto | cpu | cuda | cuda:N
    rounds: int = 9                 # how often each candidate is timed
    json: str = ""                  # runs: write the numbers into this file
    file: str = "out/serve.png"     # serve: the picture

    def __post_init__(self):
        if self.rounds < 1:
            raise ValueError(f"rounds={self.rounds} must be at least 1")
        if Path(self.file).suffix not in (".png", ".pdf", ".svg"):
            raise ValueError(f"file={self.file} must be a .png, .pdf or .svg")


# ---- measuring ----

nothing = lambda: None      # what most candidates prepare


def compare(title, candidate, cases, device, rounds, *args, per=1, tokens=0, notes={}.get,
            warmup=2):
    """Time candidate(case, device, *args) of each of the cases {name: case}, and print a line each:
    the median, and the median of the rounds' ratios to the first case, which noise moves less.

    A candidate is (prepare, call): prepare runs before each call, outside the clock. On a CPU the
    candidates take turns, so that a noisy neighbour slows all alike. On a GPU they come one after
    the other: each has the memory for itself. per: what a call is divided by; tokens: of a call,
    for tokens/s; notes(name): what else to say. Returns {name: seconds of each round}, none where
    memory is short."""
    times, base = {}, next(iter(cases))
    for group in [[name] for name in cases] if device.type == "cuda" else [list(cases)]:
        try:
            some = {name: cases[name] for name in group}
            times |= take_turns(some, candidate, device, rounds, warmup, args)
        except torch.cuda.OutOfMemoryError:
            times |= {name: [] for name in group}
        rt_wavefront.GRAPHS.clear()         # they hold memory, and so does what is compiled
        torch.compiler.reset()
        torch.cuda.empty_cache()
    for name, t in times.items():
        ms, r = 1000 * statistics.median(t or [math.nan]), ratio(t, times[base])
        line = f"{title:28} {name:29} " + (f"{ms / per:11.3f} ms" if t else "  does not fit")
        line += f"{1000 * tokens / ms:11,.0f} tokens/s" if t and tokens else ""
        line += f"{r:8.3f} x {base}" if r else ""
        print(f"{line} {notes(name) or ''}".rstrip(), flush=True)
    return times


def take_turns(cases, candidate, device, rounds, warmup, args):
    wait = partial(torch.cuda.synchronize, device) if device.type == "cuda" else nothing
    calls = {name: candidate(case, device, *args) for name, case in cases.items()}
    times = {name: [] for name in cases}
    for _ in range(warmup + rounds):
        for name, (prepare, call) in calls.items():
            prepare()
            wait()
            start = time.perf_counter()
            call()
            wait()
            times[name].append(time.perf_counter() - start)
    return {name: t[warmup:] for name, t in times.items()}


def ratio(times, baseline):
    return statistics.median(a / b for a, b in zip(times, baseline)) if times and baseline else None


# ---- what a model does: each takes a function that makes the model ----

def build(name, cfg, **changes):
    """An untrained model_<name>, with the keys of cfg that it has and these changes."""
    module = model_module(name)
    names = {f.name for f in fields(module.Config)}
    same = {key: value for key, value in asdict(cfg).items() if key in names}
    try:
        return module.Model(module.Config(**{**same, **changes}))
    except ValueError as e:
        raise UserError(f"{name}: {first_line(e)}") from e


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


def decoding(make, device, T, rows, idx=None):
    """NEW tokens of each row (idx, or random ones), one after the other, in the last eighth of T.
    At its end the cache is filled again, outside the clock."""
    model = make().to(device).eval()
    if idx is None:
        idx = torch.randint(0, model.cfg.vocab_size, (rows, T), device=device)
    cache, new, at = model.init_cache(rows, T), min(NEW, T - 1), T
    start = T - max(new, T // 8 // new * new)

    @torch.inference_mode()
    def prepare():
        nonlocal at
        if at + new > T:
            at = start
            cache.reset()
            for ids in idx[:, :start].split(max(1, 2 ** 18 // rows), 1):    # as memory allows
                model(ids, cache=cache)

    @torch.inference_mode()
    def decode():
        nonlocal at
        for _ in range(new):
            model(idx[:, at:at + 1], cache=cache)
            at += 1
    return prepare, decode


def prefilling(make, device, T, rows):
    model = make().to(device).eval()
    idx = torch.randint(0, model.cfg.vocab_size, (rows, T), device=device)
    cache = model.init_cache(rows, T)
    return cache.reset, torch.inference_mode()(partial(model, idx, cache=cache))


def by_length(part, models, lengths, device, rounds, cfg, rows=0):
    """As many tokens, cut into longer and longer sequences; decoding: a token of `rows` sequences.
    models(T): {name: make}. e: a sequence's time grows as T^e."""
    found = {}
    for T in lengths:
        B = rows or max(1, lengths[-1] // T)
        candidate, *args = {"decoding": (decoding, T, B), "prefill": (prefilling, T, B)}.get(
            part, (training, replace(cfg, batch_size=B), part))
        found[T] = compare(f"{part}, T {T:,}", candidate, models(T), device, rounds, *args,
                           per=NEW if rows else 1)
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
        qk_norm = cfg.qk_norm == "full"
        plain = partial(build, "gpt", cfg, mlp="gelu", qk_norm=qk_norm)
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
        return models, dict(models)
    make, R = partial(make, capacity_warmup=0, router_func="", exit_loop=0), cfg.n_loop
    mor, inner = partial(make, router="expert", kv="recursion"), R * cfg.n_stored
    models = {"plain model": plain, f"{R} recursions, no router": make(router="none")}
    models |= {f"MoR, {r} recursions": mor(n_loop=r) for r in (2, 3, 4) if inner % r == 0}
    if cfg.share.endswith("cycle"):
        models[f"MoR, {R}, kv=share"] = mor(kv="share")
    models[f"MoR, {R}, router=token"] = mor(router="token")
    return models, {"plain model": plain, "MoR": make()}


def bench_model(name, model_cfg, cfg, device, trained=None, rounds=9,
                lengths=(128, 256, 512, 1024, 2048)):
    """Training, decoding and prefill. trained: (model, text) of a run that loops over depth.
    RT: on a GPU at the batch sizes of the paper's Table 2; and by length."""
    table_2, T = name == "rt" and device.type == "cuda", model_cfg.block_size
    models, decoders = candidates(name, model_cfg, device)
    if trained:
        (relaxed_requests if name == "relaxed" else mor_requests)(*trained, device)
        decoders["trained"] = lambda: trained[0]
    with torch.device("meta"):
        flops = {row: make().flops_per_token() for row, make in models.items()}
    cost = lambda row: f"{flops[row] / next(iter(flops.values())):.2f} x its FLOPs"
    for B in (8, 32, 128, 512) if table_2 else (cfg.batch_size,):
        if table_2:
            print(f"batch {B}: a forward takes at least {rt_floor(model_cfg, B):.2f} ms on an H200")
        for part in "forward", "forward + backward", "training step":
            compare(part, training, models, device, 3 if table_2 else rounds,
                    replace(cfg, batch_size=B), part, tokens=B * T, notes=cost)
        if table_2:
            models.pop("naive", None)       # at larger batches it takes too long
    for rows in 1, 16:
        compare(f"decoding batch {rows}", decoding, decoders, device, 3 * rounds, T, rows,
                per=min(NEW, T - 1))
    compare(f"prefill {T - 1} tokens", prefilling, decoders, device, rounds, T - 1, 1)
    for row, make in decoders.items():
        print(f"cache of a row: {make().init_cache(1, T).nbytes():,} bytes ({row})")
    if name == "rt":
        longer = lambda T: candidates("rt", replace(model_cfg, block_size=T), device)[1]
        by_length("forward + backward", longer, lengths, device, rounds, cfg)


def rt_floor(cfg, batch_size):
    """Milliseconds that a forward takes at least on an H200 (4.8 TB/s and 989e12 operations a
    second, of its data sheet): each position reads Wo, the MLP and Wk, Wv, and each token needs
    its operations."""
    d, T = cfg.n_embd, cfg.block_size
    wkv = 2 * d * cfg.n_kv_head * cfg.head_dim
    weights = d * d + 2 * d * cfg.n_mlp + wkv
    operations = 2 * (weights + d * d + wkv) + 2 * d * T
    seconds = max(2 * weights * T / 4.8e12, batch_size * T * operations / 989e12)
    return 1000 * cfg.n_layer * seconds


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


# ---- trained runs ----

def bench_runs(cfg, folders):
    """Runs of the same data: a training step, a token after a context of the run's own text (it
    decides how deep MoR's tokens go), and the cache. The first run is the baseline."""
    device, models, configs, data = pick_device(cfg.device), {}, {}, None
    for folder in folders:
        models[folder], _, ckpt = load_run(folder, device)
        configs[folder] = SimpleNamespace(**ckpt["config"])
        data = data or TokenData(open_data(configs[folder]), "val")
        check_tokenizer(ckpt, data, folder)
    T = min(model.cfg.block_size for model in models.values())
    if data.tokens < 16 * T:
        raise UserError(f"the validation text has {data.tokens} tokens: {16 * T} are needed")
    idx, new = torch.from_numpy(data.windows(np.arange(16) * T, T)).to(device), min(NEW, T - 1)

    def step(folder, device):
        return training(partial(copy.deepcopy, models[folder]), device, configs[folder])

    def token(folder, device, rows):
        return decoding(lambda: models[folder], device, T, rows, idx[:rows])
    same = dict(zip(folders, folders))
    found = {"train_ms": compare("training step", step, same, device, cfg.rounds)}
    for n in 1, 16:
        found[f"decode_{n}_ms"] = compare(f"decoding batch {n}", token, same, device,
                                          4 * cfg.rounds, n, per=new)
    result = {}
    for folder, model in models.items():
        result[folder] = {name: 1000 * statistics.median(times[folder])
                          / (1 if name == "train_ms" else new) for name, times in found.items()}
        result[folder]["cache_bytes"] = model.init_cache(1, T).nbytes() / T
        print(f"{folder}: cache {result[folder]['cache_bytes']:,.1f} bytes a token")
    if cfg.json:
        with writing(cfg.json):
            Path(cfg.json).write_text(json.dumps(result))


# ---- kernels ----

def kernel(function, device, tensors, do=None):
    """A function of tensors; with do, all gradients too."""
    tensors = [x.detach().requires_grad_(do is not None) for x in tensors]

    def call():
        out = function(*tensors)
        if do is not None:
            torch.autograd.grad(out[0] if isinstance(out, tuple) else out, tensors, do)
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
    device, rounds, attend = pick_device(cfg.device), cfg.rounds, kernels.attend
    gpu = device.type == "cuda"
    dtype = torch.bfloat16 if gpu else torch.float32
    print(f"{device_name(device)}, torch {torch.__version__}")
    sdpa = partial(F.scaled_dot_product_attention, is_causal=True)
    for B, H, T, D in sizes or ([(4, 16, 4096, 128), (1, 16, 65536, 128)] if gpu else
                                [(1, 8, 1024, 64), (1, 4, 8192, 64)]):
        q, k, v, do = torch.randn(4, B, T, H, D, device=device, dtype=dtype).transpose(2, 3)
        at = torch.arange(T, device=device, dtype=torch.int32)
        ends = lambda q, k, v: attend(q, k[:, :, 15::16], v[:, :, 15::16], at, at[15::16].clone())
        functions = {"SDPA": sdpa, "attend": attend, "attend, chunk ends": ends}
        for part, grad in ("forward", None), ("forward + backward", do):
            compare(f"{part}, T {T:,}", kernel, functions, device, rounds, (q, k, v), grad)
    shape = (2, 4096, 2048) if gpu else (1, 2048, 512)
    g, x = torch.rand(2, *shape, device=device, dtype=dtype)
    functions = {"copy of x": lambda g, x: x.clone()} if gpu else {
        "loop": partial(loop_scan, chunk=64)}
    functions |= {f"scan, chunk {L}": partial(kernels.scan, chunk=L) for L in (16, 64, shape[1])}
    compare("scan", kernel, functions, device, rounds, (g, x))


# ---- requests to trained models that loop over depth, by serve.py's Engine ----

PROMPT, ANSWER = (4, 16), (32, 96)      # tokens of a request, at least and at most
LONGEST = PROMPT[1] + ANSWER[1]


def served_text(model, ckpt, folder):
    """Token ids of the run's validation text, where requests start."""
    data = TokenData(open_data(SimpleNamespace(**ckpt["config"])), "val")
    check_tokenizer(ckpt, data, folder)
    if not LONGEST < min(data.n_windows(1), model.cfg.block_size + 1):
        raise UserError(f"{folder}: requests of {LONGEST} tokens need a larger block_size "
                        f"({model.cfg.block_size}) or validation text ({data.tokens} tokens)")
    return data.windows(np.array([0]), min(data.n_windows(1), 100_000))[0]


def workload(text, requests=240):
    """A function that gives the same requests each time: sizes and places in text are drawn once.
    id: (number, place)."""
    rng = random.Random(0)
    sizes = [(rng.randint(*PROMPT), rng.randint(*ANSWER)) for _ in range(requests)]
    places = [(i, rng.randrange(len(text) - LONGEST)) for i in range(requests)]
    return lambda: [Request(text[a:a + n].tolist(), new, id=(i, a))
                    for (i, a), (n, new) in zip(places, sizes)]


def compare_requests(cases, text, device, rounds, notes={}.get):
    """Print a line for each of the cases {name: (model, slots, options of the Engine)}: all of the
    requests arrive at once. Returns ratios to the first, and the answers."""
    work, answers, wanted = workload(text), {name: [] for name in cases}, {}

    def serving(name, device):
        model, slots, options = cases[name]

        def call():
            answers[name].append(requests := work())
            list(Engine(model.eval(), slots, LONGEST, **options).run(requests))
        return nothing, call

    def said(name):
        model, _, options = cases[name]
        found = [[r.tokens for r in requests] for requests in answers[name]]
        # whatever the batching and the slots, a model answers the same
        asked = id(model), options.get("exit"), options.get("fill")
        same = all(tokens == wanted.setdefault(asked, found[0]) for tokens in found)
        seconds = statistics.median(r.seconds for r in answers[name][-1])
        return (f"{notes(name) or ''} answers {'the same' if same else 'DIFFER'}, after "
                f"{seconds:.2f} s (median)").strip()
    tokens = sum(r.max_new_tokens for r in work())
    times = compare(f"{len(work())} requests", serving, dict(zip(cases, cases)), device, rounds,
                    per=tokens, tokens=tokens, notes=said, warmup=0)
    first = times[next(iter(cases))]
    return {name: ratio(t, first) for name, t in times.items()}, answers


def print_bound(name, took, bound, why):
    """How much of the possible speed is reached. took, bound: times relative to the baseline."""
    print(f"  {name}: at best {bound:.3f} x {why}; {bound / took:.0%} of that speed")


def quality(model, slots, options, text):
    """As served, where the text really goes on, so only the next token is the text's: (its
    cross-entropy in nats, the likeliest token at each place)."""
    nats, guesses = [], {}

    class Forced(Engine):
        def pick(self, slots, logits):
            asked = [slot.request for slot in slots]
            true = [int(text[r.id[1] + len(r.prompt) + len(r.tokens)]) for r in asked]
            target = torch.tensor(true, device=logits.device)
            nats.extend(F.cross_entropy(logits, target, reduction="none").tolist())
            for request, guess in zip(asked, logits.argmax(-1).tolist()):
                guesses.setdefault(request.id, []).append(guess)
            return true
    list(Forced(model.eval(), slots, LONGEST, **options).run(workload(text)()[:48]))
    return statistics.mean(nats), [guess for n in sorted(guesses) for guess in guesses[n]]


def relaxed_requests(model, text, device, slots=32, fraction=0.65, rounds=4):
    """Three batchings, without early exit and with it, at the confidence that lets about this
    fraction of the tokens exit after the first loop."""
    found, engine = [], Engine(model.eval(), slots, LONGEST, "sequence")

    def watch(logits, loop):                        # a rule by which nothing exits early
        found.append(logits[(loop == 1).to(logits.device)].softmax(-1).amax(-1).cpu())
        return loop == model.n_loop
    engine.rule = watch
    list(engine.run(workload(text)()[:slots]))
    exit = f"confidence:{float(torch.cat(found).quantile(1 - fraction)):.8g}"
    kinds = {"all loops": {}, "propagate": dict(exit=exit, fill="propagate"),
             "exact": dict(exit=exit, fill="exact")}
    took, answers = compare_requests(
        {f"{kind}, {batching}": (model, slots, dict(options, batching=batching))
         for kind, options in kinds.items() for batching in ("sequence", "static", "depth")},
        text, device, rounds)
    for name in "propagate, depth", "exact, depth":
        exits = [loop for r in answers[name][0] for loop in r.exits]
        # prompts take all loops, and their last tokens give the first ones of the answers
        loops = [loop for r in answers[name][0]
                 for loop in [*[model.n_loop] * len(r.prompt), *r.exits[1:]]]
        print_bound(name, took[name], statistics.mean(loops) / model.n_loop,
                    f"as {exits.count(1) / len(exits):.0%} exit after loop 1 ({exit})")
    full = None
    for kind, options in kinds.items():
        ce, guesses = quality(model, slots, options, text)
        full = full or guesses
        same = statistics.mean(a == b for a, b in zip(guesses, full, strict=True))
        print(f"quality of {kind}: cross-entropy {ce:.4f} nats a token as served, likeliest token "
              f"that of all loops: {same:.1%}")


def mor_requests(model, text, device, slots=16, rounds=3):
    """MoR beside the plain model with as many slots, and with as many as fit into its cache."""
    # the engine asks for loops, so the plain model is one recursion
    plain = build("mor", model.cfg, router="none", router_func="", n_loop=1, share="cycle",
                  kv="recursion", exit_loop=0).to(device)
    mor_bytes, plain_bytes = (m.init_cache(1, LONGEST).nbytes() for m in (model, plain))
    more = max(slots + 1, slots * plain_bytes // mor_bytes)
    few, many = f"MoR, {slots} slots, depth", f"MoR, {more} slots, depth"
    took, answers = compare_requests(
        {f"{name}, {n} slots, {batching}": (m, n, dict(batching=batching))
         for name, m, n, batching in (
             ("plain", plain, slots, "sequence"), ("MoR", model, slots, "static"),
             ("MoR", model, slots, "sequence"), ("MoR", model, slots, "depth"),
             ("plain", plain, more, "sequence"), ("MoR", model, more, "depth"))},
        text, device, rounds)
    exits = [loop for r in answers[few][0] for loop in r.exits]
    cfg, mean = model.cfg, statistics.mean(exits)
    outside = cfg.n_layer - cfg.n_loop * cfg.n_stored
    layers = (outside + cfg.n_stored * mean) / cfg.n_layer              # of the plain model's
    print(f"  recursions {loop_fractions(exits, cfg.n_loop)}: a token takes {mean:.2f}, so "
          f"{layers:.3f} of the plain model's layers")
    print_bound(few, took[few], layers, "by its layers")
    print_bound(many, took[many], layers * took[f"plain, {more} slots, sequence"],
                "with what more slots bring the plain model")
    print_bound(many, took[many], layers * slots / more,
                "if a step took no longer with more slots")


def bench_serve(cfg, folders, slots=16):
    """Loss vs. throughput: the same requests to each run, whose log has its loss. Models with a
    router go depth-wise, if their sharing lets them, all others sequence-wise."""
    device, cases, losses, text = pick_device(cfg.device), {}, {}, None
    for folder in folders:
        model, _, ckpt = load_run(folder, device)
        routed = loops_of(model).routed and model.cfg.router != "none" and model.n_loop > 1
        batching = "depth" if routed and model.cfg.share.endswith("cycle") else "sequence"
        before, text = text, served_text(model, ckpt, folder)
        if before is not None and not np.array_equal(before, text):
            raise UserError("the runs were not trained on the same tokens, so neither losses nor "
                            "tokens/s compare")
        cases[folder] = model, slots, dict(batching=batching)
        losses[folder] = points(folder, "step", "val_bpb")[-1][1]
    note = lambda f: f"{cases[f][2]['batching']}; {losses[f]:.4f} bits per byte;"
    took, _ = compare_requests(cases, text, device, cfg.rounds, note)
    places = [(Path(folder).name, 1 / took[folder], loss) for folder, loss in losses.items()]
    Path(cfg.file).parent.mkdir(parents=True, exist_ok=True)
    draw_points(places, f"speed, {places[0][0]} = 1, {slots} slots", "bits per byte", cfg.file)


# ---- the command ----

# Sizes if neither a config file nor a width is given: products, not calls, shall take the time.
BENCH_SIZES = {"rat": ["n_embd=256"], "relaxed": ["n_embd=512", "n_head=8", "n_kv_head=2"],
               "lrt": ["n_layer=6", "n_embd=256", "block_size=512", "batch_size=8"],
               "mor": ["n_embd=256", "n_head=4", "batch_size=16"]}
MODELS = "gpt", "rt", "lrt", "rat", "relaxed", "mor"
OWN_KEYS = {"kernels": bench_kernels, "runs": bench_runs, "serve": bench_serve}


def main(argv):
    if asks_help(argv):
        return print(help_text(BenchConfig))
    names, keys = [a for a in argv if "=" not in a] or [""], [a for a in argv if "=" in a]
    name, *folders = names
    if name not in (*MODELS, *OWN_KEYS) or bool(folders) != (name in ("runs", "serve")):
        raise UserError("python -m lab.bench NAME [key=value ...], NAME one of: "
                        + ", ".join([*MODELS, "kernels", "runs out/A ...", "serve out/A ..."]))
    torch.manual_seed(1337)
    if name in OWN_KEYS:
        return OWN_KEYS[name](typed_config(BenchConfig, split_args(keys)), folders)
    if not {"config", "n_embd", "init_from"} & split_args(keys).keys():
        keys = BENCH_SIZES.get(name, []) + keys
    cfg, model_fields, ckpt, _ = read_config([f"model={name}", *keys])
    device, model_cfg = pick_device(cfg.device), model_module(name).Config(**model_fields)
    if model_cfg.block_size < 2:
        raise UserError("block_size=1: decoding needs at least 2 tokens")
    trained = ()
    if ckpt is not None and name in ("relaxed", "mor"):
        model = load_run(cfg.init_from, device)[0]
        trained = model, served_text(model, ckpt, cfg.init_from)
    mixed = "bfloat16 (autocast)" if device.type == "cuda" else "float32"
    print(f"{name}: {model_cfg.n_layer} layers of width {model_cfg.n_embd}, batch {cfg.batch_size} "
          f"x {model_cfg.block_size} tokens; {device_name(device)}, torch {torch.__version__}; "
          f"training in {mixed}")
    if name == "rat":
        return bench_rat(model_cfg, cfg, device)
    bench_model(name, model_cfg, cfg, device, trained)


if __name__ == "__main__":
    run_cli(main)

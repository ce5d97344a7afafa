"""
Speed, measured beside a baseline in the same run: what the README's ratios come from.

    python -m lab.bench gpt               the baseline: training and decoding
    python -m lab.bench rt                RT's schedules beside a Transformer
    python -m lab.bench rat               a layer of RAT beside attention and an RNN, by length
    python -m lab.bench lrt               LRT's training paths beside its backbone
    python -m lab.bench relaxed           ranks of deltas beside an untied Transformer
    python -m lab.bench mor               recursions and routers beside a Transformer
    python -m lab.bench kernels           attend and scan (keys: device, rounds)

With trained weights, 240 requests are answered too, by relaxed models with early exit; and runs
can be drawn, loss vs. throughput (keys: file, slots, requests, rounds, device, data_dir):

    python -m lab.bench relaxed init_from=out/relaxed_exit
    python -m lab.bench mor init_from=out/mor_tiny
    python -m lab.bench serve out/a out/b file=pareto.png

Trained runs of any model beside each other, training and decoding (keys: device, rounds, json):

    python -m lab.bench runs out/gpt_tiny out/mor_tiny

On a GPU, at the papers' sizes; those of RT's Table 2, of RAT's Tables 6, 7 and 8:

    python -m lab.bench gpt n_layer=8 n_embd=512 device=cuda
    python -m lab.bench rt config=configs/rt_150m_12l.yaml
    python -m lab.bench rat config=configs/rat_1300m.yaml
    python -m lab.bench lrt config=configs/lrt_20l.yaml batch_size=4

The other keys are train.py's (python train.py help), and sizes start from
configs/<model>_tiny.yaml as there. Every line names a candidate, its milliseconds
(the median over rounds), and how many times as long as the baseline it takes:
less than 1 is faster.
"""
import contextlib
import copy
import functools
import json
import math
import statistics
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

import kernels
from lab.bench_requests import bench_serve, mor_requests, relaxed_requests, served_text
from common.checkpoint import load_run
from common.keys import (UserError, asks_help, model_module, run_cli, split_args, typed_config,
                    writing)
from common.data import TokenData
from common.config import TrainConfig, read_config
from common.optim import make_optimizers
from common.process import (check_run_fits, check_tokenizer, device_name, make_model, open_data,
                            pick_device)
from lab.timing import compare, fastest, ratio


# ---- candidates: each takes a function that makes the model ----

def training(make, device, cfg, part="whole step"):
    """On a fixed random batch: "forward", "forward + backward", or the optimizer's step too."""
    model, mixed = make().to(device).train(), device.type == "cuda"
    size = cfg.batch_size, model.cfg.block_size + 1
    idx = torch.randint(0, model.cfg.vocab_size, size, device=device)
    optimizers = make_optimizers(model, cfg) if part == "whole step" else []

    @torch.no_grad()
    def forward():
        with torch.autocast(device.type, torch.bfloat16, enabled=mixed):
            model(idx[:, :-1])

    def step():
        with torch.autocast(device.type, torch.bfloat16, enabled=mixed):
            loss = model(idx[:, :-1], idx[:, 1:])[1]
        loss.backward()
        if optimizers:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
        model.zero_grad(set_to_none=True)
    return None, forward if part == "forward" else step


def decoding(make, device, T, new, rows=1, cached=True, idx=None):
    """The last `new` of T tokens of each row (idx, or random ones), one after the other: from the
    cache of those before, or by running the whole prefix again for each. new = 0: the prefill."""
    model = make().to(device).eval()
    if idx is None:
        idx = torch.randint(0, model.cfg.vocab_size, (rows, T), device=device)
    cache = model.init_cache(rows, T)

    @torch.inference_mode()
    def prefill():
        cache.reset()
        model(idx[:, :T - new], cache=cache)

    @torch.inference_mode()
    def decode():
        for t in range(T - new, T):
            model(idx[:, t:t + 1], cache=cache) if cached else model(idx[:, :t + 1])
    return (prefill if cached else None, decode) if new else (None, prefill)


def compare_decoding(models, T, rows, device, rounds, **columns):
    """Tokens at the end of the context: few a call, so that rounds are short and many."""
    new = min(8, T - 1)
    compare(f"decoding batch {rows}", decoding, models, device, rounds, T, new, rows, per=new,
            **columns)


def variant(model, **changes):
    """A function that makes an untrained model of the same sizes."""
    return lambda: type(model)(replace(model.cfg, **changes))


def plain_transformer(cfg):
    """The model_gpt of the same sizes and positions, unrolled where cfg's model has loops."""
    gpt = model_module("gpt")
    names = {f.name for f in fields(gpt.Config)}
    same = {"mlp": "gelu", **{k: v for k, v in asdict(cfg).items() if k in names}}
    same["qk_norm"] = same["qk_norm"] not in (False, "none")    # RT's key names a kind of norm
    return gpt.Model(gpt.Config(**same))


# ---- models, one layer or all ----

def bench_gpt(model, cfg, device, text=None, rounds=10):
    T = model.cfg.block_size
    models = {"fast": variant(model), "naive": variant(model, fast=False),
              "GELU, no positions": variant(model, mlp="gelu", pos="none", n_mlp=0)}
    compare("training step", training, models, device, rounds, cfg, tokens=cfg.batch_size * T)
    new = min(8, T - 1)
    token = lambda cached, device: decoding(models["fast"], device, T, new, 1, cached)
    compare(f"decoding at {T}", token, {"cached": True, "recomputed": False}, device, rounds,
            per=new, tokens=new)


def bench_rt(model, cfg, device, text=None, rounds=5, lengths=(128, 256, 512, 1024, 2048)):
    """RT's schedules and the plain Transformer of the same size; then the wavefront and the plain
    one on the same number of tokens, cut into longer and longer sequences. The naive loop keeps
    keys in one buffer in the forward pass alone, and concatenates them where gradients are needed.
    """
    if model.cfg.block > 1 or not model.cfg.kv_norm:
        raise UserError("the wavefront, which is measured here, needs block=1 and kv_norm=true")
    if device.type == "cuda":
        return bench_rt_layers(model.cfg, cfg, device)
    models = {s: variant(model, schedule=s) for s in ("wavefront", "naive", "tiled")}
    plain = models["plain Transformer"] = partial(plain_transformer, model.cfg)
    for part in ("forward", "forward + backward"):
        compare(part, training, models, device, rounds, cfg, part)
    compare_decoding({"plain Transformer": plain, "RT": models["wavefront"]},
                     model.cfg.block_size, 1, device, 3 * rounds)
    found = {}
    for T in lengths:
        sized = replace(model.cfg, block_size=T)
        models = {"plain Transformer": partial(plain_transformer, sized),
                  "RT": variant(model, block_size=T)}
        found[T] = compare(f"T {T:5,}", training, models, device, rounds,
                           replace(cfg, batch_size=max(1, lengths[-1] // T)), "forward + backward")
    print(f"  a sequence's time grows as T^e, e = {growth(found)}")


# The paper's Table 2: milliseconds of one layer's forward at T 512, d 1024, 16 heads on an H100.
PAPER_RT = {32: 38.9, 64: 42.3, 128: 49.0, 256: 61.4, 512: 81.7}    # by batch size
H200_BYTES, H200_FLOPS = 4.8e12, 989e12     # a second, of its data sheet; operations in bfloat16


def rt_floor(cfg, batch_size):
    """Milliseconds that one layer's forward takes at least on an H200: each position reads Wo, the
    MLP and Wk, Wv, and each token needs its operations."""
    d, T = cfg.n_embd, cfg.block_size
    wkv = 2 * d * cfg.n_kv_head * cfg.head_dim
    weights = d * d + 2 * d * cfg.n_mlp + wkv
    operations = 2 * (weights + d * d + wkv) + 2 * d * T
    return 1000 * max(2 * weights * T / H200_BYTES, batch_size * T * operations / H200_FLOPS)


def bench_rt_layers(model_cfg, cfg, device, batch_sizes=(8, 32, 128, 512), rounds=3):
    """A GPU's table, in milliseconds a layer. The baseline is the plain Transformer compiled, as
    the wavefront is replayed as a CUDA graph."""
    def compiled():
        model = plain_transformer(model_cfg)
        if device.type == "cuda":
            model.compile()
        return model
    models = {"plain, compiled": compiled, "plain, eager": partial(plain_transformer, model_cfg)}
    for schedule in ("wavefront", "tiled", "naive"):
        models[schedule] = partial(model_module("rt").Model, replace(model_cfg, schedule=schedule))
    for B in batch_sizes:
        note = f"at least {rt_floor(model_cfg, B):.2f} ms on an H200"
        if (model_cfg.n_embd, model_cfg.block_size) == (1024, 512) and B in PAPER_RT:
            note += f", the paper's {PAPER_RT[B]} ms on an H100"
        for part, columns in (("forward", dict(notes={"wavefront": note})),
                              ("forward + backward", dict(goals={"wavefront": "2 at batch 512"}))):
            compare(f"{part}, {B}", training, models, device, rounds, replace(cfg, batch_size=B),
                    part, per=model_cfg.n_layer, tokens=B * model_cfg.block_size, **columns)
        models.pop("naive", None)       # at larger batches it takes too long


def bench_lrt(model, cfg, device, text=None, rounds=11):
    T = model.cfg.block_size
    make = partial(variant, model, memory=True, train_path="interleaved", prefill="exact")
    backbone, ours = make(memory=False), make(prefill="interleaved")    # fills its cache fast
    models = {"backbone": backbone,
              **{f"interleaved, S = {S}": make(subsets=S) for S in (2, 4, 8)},
              "interleaved, layerwise": make(projections="layerwise"),
              **{f"chunked, C = {C}": make(train_path="chunked", chunk=C) for C in (64, 256)}}
    goals = {"interleaved, S = 2": 2.2 if device.type == "cpu" else 2.08}       # 2.01 at least
    compare("training step", training, models, device, rounds, cfg, goals=goals)
    models = {name: models[name] for name in ("backbone", *goals)}
    compare("forward + backward", training, models, device, rounds, cfg, "forward + backward",
            goals=goals)
    for rows in sorted({cfg.batch_size, 1}, reverse=True):
        compare_decoding({"backbone": backbone, "LRT": ours}, T, rows, device, 4 * rounds,
                         goals={"LRT": 1.05})
    print_cache(ours(), backbone(), T)
    models = {"backbone": backbone, "exact": make(), "interleaved": ours}
    compare(f"prefill {T - 1} tokens", decoding, models, device, rounds, T - 1, 0)


def print_cache(model, baseline, T):
    ours, theirs = (m.init_cache(1, T).nbytes() for m in (model, baseline))
    print(f"cache of a row: {ours:,} bytes, {ours / theirs:.3f} x the baseline's {theirs:,}")


def bench_relaxed(model, cfg, device, text=None, rounds=9):
    """Ranks of the deltas. The baseline is an untied Transformer of the same unrolled depth."""
    if text is None:
        print("requests: need trained exits, init_from=RUN")
    else:
        relaxed_requests(model, text, device)
    models = {"untied model": partial(plain_transformer, model.cfg)}
    for rank in sorted({0, 8, 64, model.cfg.rank}):
        models[f"rank {rank}"] = variant(model, rank=rank, early_exit="none")
    compare("training step", training, models, device, rounds, cfg)
    for rows in (1, 16):
        compare_decoding(models, model.cfg.block_size, rows, device, 3 * rounds)


def bench_mor(model, cfg, device, text=None, rounds=9):
    """Recursions and routers. The baseline is a plain model of the same unrolled depth."""
    make = partial(variant, model, capacity_warmup=0, router_func="", exit_loop=0)
    plain, R = partial(plain_transformer, model.cfg), model.cfg.n_loop
    if text is None:
        print("requests: need trained routers, init_from=RUN")
    else:       # the engine asks for loops, so the plain model is one recursion there
        one_loop = make(router="none", n_loop=1, share="cycle", kv="recursion")
        mor_requests(model, one_loop().to(device), text, device)
    mor = partial(make, router="expert", kv="recursion")
    models = {"plain model": plain, f"{R} recursions, no router": make(router="none")}
    models |= {f"MoR, {r} recursions": mor(n_loop=r) for r in (2, 3, 4)
               if (model.cfg.n_layer - 2 * model.cfg.edge) % r == 0}
    if model.cfg.share.endswith("cycle"):
        models[f"MoR, {R}, kv=share"] = mor(kv="share")
    models[f"MoR, {R}, router=token"] = mor(router="token")
    flops = {name: m().flops_per_token() / plain().flops_per_token() for name, m in models.items()}
    goals = (0.90, 0.85) if device.type == "cpu" else (0.83, 0.77)
    compare("training step", training, models, device, rounds, cfg,
            goals={f"MoR, {r} recursions": goal for r, goal in zip((2, 3), goals)},
            notes={name: f"{x:.2f} x its FLOPs" for name, x in flops.items()})
    for rows in (1, 16):
        compare_decoding({"plain model": plain, "MoR": lambda: model}, model.cfg.block_size, rows,
                         device, 3 * rounds)
    print_cache(model, plain(), model.cfg.block_size)


# ---- trained runs ----

@dataclass
class RunsConfig:
    device: str = "auto"
    rounds: int = 9
    json: str = ""              # where to write the numbers, for reproduce.py


def bench_runs(folders, argv):
    """Runs of the same data: a training step, a token after a context of the run's own text (it
    decides how deep MoR's tokens go), and the cache. The first run is the baseline."""
    options = typed_config(RunsConfig, split_args(argv))
    device, models, configs, data = pick_device(options.device), {}, {}, None
    if not folders or options.rounds < 1:
        raise UserError("bench.py runs needs folders of runs, and rounds of at least 1")
    for folder in folders:
        model, _, ckpt = load_run(folder, device)
        keys = {f.name: ckpt["config"][f.name] for f in fields(TrainConfig)}
        models[folder], configs[folder] = model, TrainConfig(**keys)
        data = data or TokenData(open_data(configs[folder]), "val")
        check_tokenizer(ckpt, data, folder)
    T = min(model.cfg.block_size for model in models.values())
    if data.tokens < 16 * T:
        raise UserError(f"the validation text has {data.tokens} tokens: {16 * T} are needed")
    rows = data.windows(np.arange(16) * T, T)
    idx, new = torch.from_numpy(rows).to(device), min(8, T - 1)

    def step(folder, device):
        return training(lambda: copy.deepcopy(models[folder]), device, configs[folder])
    names = dict(zip(folders, folders))
    found = {"train_ms": compare("training step", step, names, device, options.rounds)}
    for n in (1, 16):
        found[f"decode_{n}_ms"] = compare(
            f"decoding batch {n}", decoding, {f: partial(models.get, f) for f in folders}, device,
            4 * options.rounds, T, new, n, True, idx[:n], per=new)
    result = {}
    for folder, model in models.items():
        result[folder] = {name: 1000 * statistics.median(times[folder])
                          / (1 if name == "train_ms" else new) for name, times in found.items()}
        result[folder]["cache_bytes"] = model.init_cache(1, T).nbytes() / T
        print(f"{folder}: cache {result[folder]['cache_bytes']:,.1f} bytes a token")
    if options.json:
        with writing(options.json):
            Path(options.json).write_text(json.dumps(result))


# ---- rat, one layer ----

# The paper's Tables 6, 7 and 8 (one layer, D 2048, a GH200): attention's time over RAT(16)'s, by
# T, for training and prefill of 200K tokens, and for a token of 64 rows (no memory at 262K).
LENGTHS = [2 ** n for n in range(12, 19)]
PAPER_RAT = {"training": dict(zip(LENGTHS, (0.81, 1.15, 1.75, 2.73, 4.34, 6.86, 9.04))),
             "prefill": dict(zip(LENGTHS, (0.84, 1.17, 1.76, 2.66, 4.28, 6.95, 10.02))),
             "decoding": dict(zip(LENGTHS, (1.85, 2.66, 5.20, 9.79, 12.4, 14.7)))}
CHUNKS = 64                 # of the candidate whose chunks grow with the text
TOKENS = 8                  # that one call decodes, all at the same position


def rat_configs(cfg, T):
    """Configs of one layer of each kind."""
    kinds = {f"RAT({cfg.chunk})": {}, f"RAT(T/{CHUNKS})": dict(chunk=max(1, T // CHUNKS)),
             "RNN": dict(mixer="rnn", reversed=False),
             "attention": dict(mixer="attention", reversed=False)}
    sizes = dict(block_size=T, n_layer=1, vocab_size=1, swa=0)
    return {name: replace(cfg, **sizes, **kind) for name, kind in kinds.items()}


def rat_layer(case, device, part, rows):
    """One layer with its projections on `rows` sequences of T tokens; decoding: on token T of each,
    after a cache of random numbers. case: Config, backend of torch's attention."""
    (cfg, backend), rat, cache = case, model_module("rat"), None
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    layer, T = rat.Model(cfg).blocks[0].mix.to(device, dtype), cfg.block_size
    size = rows, 1 if part == "decoding" else T, cfg.n_embd
    u, du = torch.randn(2, *size, device=device, dtype=dtype)
    if part == "decoding":
        cache = rat.Cache(cfg, rows, T, device, dtype)
        for buffer in cache.buffers():
            buffer.normal_()
        cache.lengths.fill_(T - 1)
        cache.longest = T - 1
    context = rat.Context(cfg, u, cache)
    leaves = [u.requires_grad_(), *layer.parameters()]

    def train():
        with sdpa(backend):
            torch.autograd.grad(layer(u, 0, context), leaves, du, materialize_grads=True)

    @torch.no_grad()
    def run():
        with sdpa(backend):
            for _ in range(TOKENS if part == "decoding" else 1):
                layer(u, 0, context)
    return None, train if part == "training" else run


def crossing(lengths, ratios):
    """From which length on a ratio stays above 1, in words; between two measured ones on a line of
    logarithms."""
    below = [i for i, x in enumerate(ratios) if x < 1]
    if not below:
        return "at all of these lengths"
    i = below[-1]
    if i == len(ratios) - 1:
        return "at none of the longest lengths"
    a, b, x, y = *lengths[i:i + 2], *ratios[i:i + 2]
    return f"from T = {round(a * (b / a) ** (math.log(1 / x) / math.log(y / x))):,} on"


def bench_rat(cfg, device, lengths=None, tokens=None, rows=None, rounds=3):
    """The same number of tokens, cut into longer and longer sequences; then one token of `rows`
    sequences after as long a text; then how time grows, and the caches."""
    gpu, ours = device.type == "cuda", f"RAT({cfg.chunk})"
    lengths = lengths or (LENGTHS if gpu else [2 ** n for n in range(8, 15)])
    tokens, rows = tokens or (2 ** 18 if gpu else 2 ** 14), rows or (64 if gpu else 8)
    print(f"rat: one layer with its projections, width {cfg.n_embd}, {cfg.n_head} heads, "
          f"{'bfloat16' if gpu else 'float32'}; {tokens:,} tokens, decoding: a token of {rows} "
          f"sequences; {device_name(device)}, torch {torch.__version__}")
    for part, paper in PAPER_RAT.items():
        found, gains, decodes = {}, {}, part == "decoding"
        backends = sdpa_backends(device) if gpu and not decodes else {"": None}
        for T in lengths:
            cases = {name: (c, None) for name, c in rat_configs(cfg, T).items()}
            one, _ = cases.pop("attention")
            cases |= {f"attention {name}".strip(): (one, backend)
                      for name, backend in backends.items()}
            found[T] = times = compare(f"{part}, T {T:7,}", rat_layer, cases, device, rounds, part,
                                       rows if decodes else max(1, tokens // T),
                                       per=TOKENS if decodes else 1)
            gain = ratio(times.get(fastest(times, "attention")), times[ours])
            if gain:
                gains[T] = gain
            if gain and cfg.chunk == 16 and cfg.n_embd == 2048 and T in paper:
                print(f"  attention / {ours}: {gain:.2f}, the paper's {paper[T]}")
        if gains:
            words = crossing(list(gains), list(gains.values()))
            print(f"  {ours} is faster than attention {words}")
        if not decodes and len(lengths) > 1:
            print(f"  a sequence's time grows as T^e, e = {growth(found)}")
    T, cache = lengths[-1], model_module("rat").Cache
    sizes = {name: cache(c, 1, T, "meta", torch.float32).nbytes()
             for name, c in rat_configs(cfg, T).items()}
    print(f"float32 cache of {T:,} tokens, bytes a token: "
          + ", ".join(f"{n / T:.1f} ({name})" for name, n in sizes.items()))
    print(f"  attention's is {sizes['attention'] / sizes[ours]:.2f}x {ours}'s")


def growth(found):
    """Exponents of the time of one sequence, between the shortest and the longest T."""
    (a, first), *_, (b, last) = found.items()
    ratios = {name: ratio(last[name], first[name]) for name in first}
    return ", ".join(f"{1 + math.log(r) / math.log(b / a):.2f} ({name})"
                     for name, r in ratios.items() if r)


# ---- kernels ----

@dataclass
class KernelsConfig:
    device: str = "auto"
    rounds: int = 20

    def __post_init__(self):
        if self.rounds < 1:
            raise ValueError(f"rounds={self.rounds} must be at least 1")


def sdpa(backend):
    """A context in which torch's attention takes this backend; None: the one that it chooses."""
    return torch.nn.attention.sdpa_kernel(backend) if backend else contextlib.nullcontext()


def causal(q, k, v, backend=None):
    with sdpa(backend):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


@functools.cache
def sdpa_backends(device):
    """The backends of torch's attention that run here: {name: backend}."""
    if device.type != "cuda":
        return {"SDPA": None}
    kinds, found = torch.nn.attention.SDPBackend, {}
    for kind in (kinds.FLASH_ATTENTION, kinds.CUDNN_ATTENTION, kinds.EFFICIENT_ATTENTION):
        with contextlib.suppress(RuntimeError):         # this build or this GPU lacks it
            causal(*torch.randn(3, 1, 1, 64, 64, device=device, dtype=torch.bfloat16), kind)
            found[f"SDPA {kind.name.split('_')[0].lower()}"] = kind
    return found


def kernel(function, device, tensors, do=None, repeat=1):
    """A function of tensors, `repeat` times; with do, all gradients too."""
    tensors = [x.detach().requires_grad_(do is not None) for x in tensors]

    def call():
        for _ in range(repeat):
            out = function(*tensors)
            if do is not None:
                torch.autograd.grad(out[0] if isinstance(out, tuple) else out, tensors, do)
    return None, call


def bench_attend(device, rounds, shape=None, long=None):
    """Plain causal attention; half the queries; the last key of each chunk of 16. shape: B, H, T,
    D of the first two; long: T of the last."""
    gpu = device.type == "cuda"
    dtype, repeat = (torch.bfloat16, 10) if gpu else (torch.float32, 1)
    B, H, T, D = shape or ((4, 16, 4096, 128) if gpu else (1, 8, 1024, 64))
    q, k, v, do = torch.randn(4, B, T, H, D, device=device, dtype=dtype).transpose(2, 3)
    functions = {name: partial(causal, backend=b) for name, b in sdpa_backends(device).items()}
    functions["attend"] = kernels.attend
    print(f"attend: {B} x {H} heads x {T} x {D}")
    for part, grad, goal in (("causal forward", None, 1.25), ("causal + backward", do, 1.43)):
        compare(part, kernel, functions, device, rounds, (q, k, v), grad, repeat, per=repeat,
                baseline="SDPA", goals={"attend": goal if gpu else 1.5})
    at = torch.arange(T, device=device, dtype=torch.int32)
    half = lambda q, k, v: kernels.attend(q[:, :, 1::2], k, v, at[1::2].contiguous(), at)
    compare("fewer queries", kernel, {"all": kernels.attend, "every second query": half}, device,
            rounds, (q, k, v), None, repeat, per=repeat,
            goals={"every second query": "on a GPU 0.60"})

    B, H, T = 1, 16 if gpu else 4, long or (65536 if gpu else 8192)
    q, k, v = torch.randn(3, B, T, H, D, device=device, dtype=dtype).transpose(2, 3)
    at = torch.arange(T, device=device, dtype=torch.int32)
    ends = at[15::16].contiguous()
    functions["chunk ends"] = lambda q, k, v: kernels.attend(q, k[:, :, 15::16], v[:, :, 15::16],
                                                             at, ends)
    compare(f"T = {T}, forward", kernel, functions, device, 5, (q, k, v), baseline="SDPA",
            goals={"chunk ends": "on a GPU 0.125"})


def loop_scan(g, x, chunk):
    """The scan as a Python loop over positions."""
    h, state = torch.empty_like(x), None
    for t in range(x.size(1)):
        state = x[:, t] if t % chunk == 0 else g[:, t] * state + x[:, t]
        h[:, t] = state
    return h


def bench_scan(device, rounds, shape=(1, 2048, 512)):
    """On a CPU the baseline is a Python loop. On a GPU it is a copy of x, which reads and writes
    one tensor; scan reads two and writes one."""
    scan = lambda chunk: lambda g, x: kernels.scan(g, x, chunk)
    if device.type != "cuda":
        functions = {"loop": partial(loop_scan, chunk=64), "scan": scan(64)}
        compare("scan, " + " x ".join(map(str, shape)), kernel, functions, device, rounds,
                (torch.rand(shape), torch.randn(shape)), goals={"scan": 0.1})
        return
    for dtype in (torch.float32, torch.bfloat16):
        g, x = torch.rand(2, 16, 4096, 2048, device=device, dtype=dtype)
        out = torch.empty_like(x)
        for chunk in (16, 64, 4096):
            functions = {"copy of x": lambda g, x: out.copy_(x), "scan": scan(chunk)}
            compare(f"{str(dtype)[6:]}, chunk {chunk}", kernel, functions, device, rounds, (g, x),
                    None, 5, per=5, goals={"scan": 2.25})


def bench_kernels(argv):
    cfg = typed_config(KernelsConfig, split_args(argv))
    device = pick_device(cfg.device)
    torch.manual_seed(0)
    print(f"{device_name(device)}, torch {torch.__version__}")
    bench_attend(device, cfg.rounds)
    bench_scan(device, cfg.rounds)


# ---- the command ----

# Sizes if neither a config file nor a width is given: products, not calls, shall take the time.
BENCH_SIZES = {"rat": ["n_embd=256"], "relaxed": ["n_embd=512", "n_head=8", "n_kv_head=2"],
               "lrt": ["n_layer=6", "n_embd=256", "block_size=512", "batch_size=8"],
               "mor": ["n_embd=256", "n_head=4", "batch_size=16"]}
BENCHES = {"gpt": bench_gpt, "rt": bench_rt, "lrt": bench_lrt, "relaxed": bench_relaxed,
           "mor": bench_mor}


def main(argv):
    if asks_help(argv):
        return print(__doc__.strip())
    names, keys = [a for a in argv if "=" not in a] or ["gpt"], [a for a in argv if "=" in a]
    name = names[0]
    if name in ("serve", "runs"):
        return (bench_serve if name == "serve" else bench_runs)(names[1:], keys)
    if len(names) > 1 or name not in (*BENCHES, "rat", "kernels"):
        raise UserError("python -m lab.bench NAME [key=value ...], NAME one of: "
                        + ", ".join([*BENCHES, "rat", "kernels", "serve", "runs"]))
    if name == "kernels":
        return bench_kernels(keys)
    if not {"config", "n_embd", "init_from"} & split_args(keys).keys():
        keys = BENCH_SIZES.get(name, []) + keys
    cfg, model_fields, ckpt, _ = read_config([f"model={name}", *keys])
    device, module = pick_device(cfg.device), model_module(name)
    torch.manual_seed(cfg.seed)
    if name == "rat":
        return bench_rat(module.Config(**model_fields), device)
    if model_fields["block_size"] < 2:
        raise UserError("block_size=1: decoding needs at least 2 tokens")
    check_run_fits(cfg, model_fields, device)
    model = make_model(cfg, model_fields, ckpt, model_fields["vocab_size"], ["vocab_size"])
    text = None
    if ckpt is not None and hasattr(model, "loop"):
        text = served_text(model, cfg, ckpt)    # before anything is measured: it may be missing
    print(f"{name}: {sum(p.numel() for p in model.parameters()):,} parameters, batch "
          f"{cfg.batch_size} x {model.cfg.block_size} tokens; {device_name(device)}, torch "
          f"{torch.__version__}; training in "
          f"{'bfloat16 (autocast)' if device.type == 'cuda' else 'float32'}, decoding in float32, "
          f"not compiled")
    BENCHES[name](model.to(device), cfg, device, text)


if __name__ == "__main__":
    run_cli(main)

"""
Requests to trained models that loop over depth (relaxed, mor): how fast serve.py answers them, and
how well. For bench.py, whose commands these are.
"""
import copy
import random
import statistics
import time
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from common.checkpoint import load_run
from common.keys import UserError, split_args, typed_config
from common.data import TokenData
from lab.plot import draw_points, points
from common.config import TrainConfig
from common.process import check_tokenizer, open_data, pick_device
from common.sampling import loop_fractions
from serve import Engine, Request
from lab.timing import measure, ratio, table

PROMPT, ANSWER = (4, 16), (32, 96)      # tokens of a request, at least and at most
LONGEST = PROMPT[1] + ANSWER[1]


def served_text(model, cfg, ckpt):
    """The validation text of the run's data set, token ids: where requests start."""
    if LONGEST > model.cfg.block_size:
        raise UserError(f"block_size={model.cfg.block_size}: at least {LONGEST} is needed")
    data = TokenData(open_data(cfg), "val")
    check_tokenizer(ckpt, data, cfg.init_from)
    if data.n_windows(1) <= LONGEST:
        raise UserError(f"{cfg.dataset} has {data.tokens} tokens to validate: more than {LONGEST} "
                        f"are needed")
    return data.windows(np.array([0]), min(data.n_windows(1), 100_000))[0]


def workload(text, requests=240):
    """A function that gives the same requests each time: places in text and sizes are drawn once.
    `truth` is what follows in text."""
    rng = random.Random(0)
    sizes = [(rng.randint(*PROMPT), rng.randint(*ANSWER)) for _ in range(requests)]
    starts = [rng.randrange(len(text) - LONGEST) for _ in sizes]

    def make():
        found = []
        for i, (a, (n, new)) in enumerate(zip(starts, sizes)):
            found.append(Request(text[a:a + n].tolist(), new, id=i))
            found[-1].truth = text[a + n:a + n + new].tolist()
        return found
    return make


# -------------------------------------------------------------------------------------------------
# speed and quality. candidates: {name: (model, slots, options of the Engine)}, the baseline first

def answering(candidate, device, work, answers):
    """What timing.measure calls: answer the requests of work, and append them to answers."""
    model, slots, options = candidate

    def note_first(request):    # all arrive at once, so that waiting for a slot counts
        if len(request.tokens) == 1:
            request.first = time.perf_counter() - start

    def call():
        nonlocal start
        requests, start = work(), time.perf_counter()
        engine = Engine(model.eval(), slots, LONGEST, on_token=note_first, **options)
        list(engine.run(requests))
        answers.append(requests)
    start = 0.0
    return None, call


def compare_requests(candidates, work, device, rounds, notes={}):
    """Print a line for each candidate. Returns times relative to the baseline, and the answers."""
    answers, baseline = {name: [] for name in candidates}, next(iter(candidates))
    times = measure({name: partial(answering, candidate, device, work, answers[name])
                     for name, candidate in candidates.items()}, device, rounds, warmup=0)
    said, wanted = {}, {}
    for name, (model, _, options) in candidates.items():
        # whatever the batching and the slots, a model answers the same
        asked = id(model), options.get("exit"), options.get("fill")
        found = [[r.tokens for r in requests] for requests in answers[name]]
        same = all(tokens == wanted.setdefault(asked, found[0]) for tokens in found)
        first, last = (delay([getattr(r, key) for r in answers[name][0]])
                       for key in ("first", "latency"))
        said[name] = (f"{notes.get(name, '')}answers {'the same' if same else 'DIFFER'}; "
                      f"first token {first}, answer {last}")
    tokens = sum(r.max_new_tokens for r in work())
    table(f"{len(work())} requests", times, baseline, per=tokens, tokens=tokens, notes=said)
    return ({name: ratio(t, times[baseline]) for name, t in times.items()},
            {name: runs[0] for name, runs in answers.items()})


def delay(seconds):
    p95 = sorted(seconds)[int(0.95 * len(seconds))]
    return f"{statistics.median(seconds):.2f} s (p95 {p95:.2f})"


def print_bound(name, took, bound, goal, why=""):
    """How much of the possible speed is reached. took, bound: times relative to the baseline."""
    goal = f" (goal {goal}%)" if goal else ""
    print(f"  {name}: at best {bound:.3f} x{why}; {bound / took:.0%} of that speed{goal}")


def compare_quality(candidates, work):
    """Print cross-entropy as served, and how often the likeliest token is the first candidate's."""
    full = None
    for name, (model, slots, options) in candidates.items():
        ce, guesses = served_quality(work, model, slots, **options)
        full = full or guesses
        same = statistics.mean(a == b for a, b in zip(guesses, full, strict=True))
        print(f"{'quality as served':20}{name:30}cross-entropy {ce:.4f} nats a token, likeliest "
              f"token that of {next(iter(candidates))}: {same:.1%}", flush=True)


def served_quality(work, model, slots, requests=48, **options):
    """What the engine predicts where the text really goes on: (cross-entropy of the true tokens in
    nats, the likeliest token at each place). The same code serves; only the next token is the
    text's."""
    nats, guesses = [], {}

    class Forced(Engine):
        def pick(self, slots, logits):
            asked = [slot.request for slot in slots]
            true = [r.truth[len(r.tokens)] for r in asked]
            target = torch.tensor(true, device=logits.device)
            nats.extend(F.cross_entropy(logits, target, reduction="none").tolist())
            for request, guess in zip(asked, logits.argmax(-1).tolist()):
                guesses.setdefault(request.id, []).append(guess)
            return true
    list(Forced(model.eval(), slots, LONGEST, **options).run(work()[:requests]))
    return statistics.mean(nats), [x for name in sorted(guesses) for x in guesses[name]]


# -------------------------------------------------------------------------------------------------
# relaxed

def relaxed_requests(model, text, device, slots=32, fraction=0.65, rounds=4):
    """Three batchings, without early exit and with it, at the confidence that lets about this
    fraction of the tokens exit after the first loop."""
    work = workload(text)
    bound = first_loop_quantile(model.eval(), work()[:slots], 1 - fraction)
    exit = f"confidence:{bound:.8g}"
    kinds = {"all loops": {}, "propagate": dict(exit=exit, fill="propagate"),
             "exact": dict(exit=exit, fill="exact")}
    candidates = {f"{kind}, {batching}": (model, slots, dict(options, batching=batching))
                  for kind, options in kinds.items()
                  for batching in ("sequence", "static", "depth")}
    took, answers = compare_requests(candidates, work, device, rounds)
    for name, goal in (("propagate, depth", 85), ("exact, depth", None)):
        exits = [loop for r in answers[name] for loop in r.exits]
        print_bound(name, took[name], statistics.mean(exits) / model.n_loop, goal,
                    f", as {exits.count(1) / len(exits):.0%} exit after loop 1 ({exit})")
        # prompts take all loops, and their last tokens give the first ones of the answers
        loops = [loop for r in answers[name]
                 for loop in [*[model.n_loop] * len(r.prompt), *r.exits[1:]]]
        print_bound(name, took[name], statistics.mean(loops) / model.n_loop, None,
                    " with the prompts, which take all loops")
    compare_quality({kind: (model, slots, options) for kind, options in kinds.items()}, work)


def first_loop_quantile(model, requests, q):
    """The confidence that a fraction q of the written tokens do not reach after the first loop."""
    engine, found = Engine(model, len(requests), LONGEST, "sequence"), []

    def watch(logits, depth):                       # a rule by which nothing exits early
        first = logits[(depth == 0).to(logits.device)]
        found.append(first.softmax(-1).amax(-1).cpu())
        return depth == model.n_loop - 1
    engine.rule = watch
    list(engine.run(requests))
    return float(torch.cat(found).quantile(q))


# -------------------------------------------------------------------------------------------------
# mor

def mor_requests(model, plain, text, device, slots=16, rounds=3):
    """MoR and the plain model, with as many slots, and with as many as fit into the plain model's
    cache; then the same weights with at most 1, 2, .. recursions a token."""
    mor_bytes, plain_bytes = (m.init_cache(1, LONGEST).nbytes() for m in (model, plain))
    more = max(slots + 1, slots * plain_bytes // mor_bytes)
    candidates, few, many = {}, f"MoR, {slots} slots, depth", f"MoR, {more} slots, depth"
    for name, m, n, batching in (
            ("plain", plain, slots, "sequence"), ("MoR", model, slots, "static"),
            ("MoR", model, slots, "sequence"), ("MoR", model, slots, "depth"),
            ("plain", plain, more, "sequence"), ("MoR", model, more, "depth")):
        candidates[f"{name}, {n} slots, {batching}"] = m, n, dict(batching=batching)
    work = workload(text)
    took, answers = compare_requests(candidates, work, device, rounds)
    exits = [loop for r in answers[few] for loop in r.exits]
    cfg, mean = model.cfg, statistics.mean(exits)
    layers = (2 * cfg.edge + cfg.n_stored * mean) / cfg.n_layer         # of the plain model's
    print(f"  recursions {loop_fractions(exits, cfg.n_loop)}: a token takes {mean:.2f}, so "
          f"{layers:.3f} of the plain model's layers")
    print_bound(few, took[few], layers, 90)
    print_bound(many, took[many], layers * took[f"plain, {more} slots, sequence"], 90,
                " with what more slots bring the plain model")
    print_bound(many, took[many], layers * slots / more, 90,
                " if a step took no longer with more slots")
    compare_quality({f"at most {loops} recursions": (at_most(model, loops), slots, {})
                     for loops in range(cfg.n_loop, 0, -1)}, work)


def at_most(model, loops):
    """The same weights, with which no token takes more recursions."""
    capped = copy.copy(model)
    capped.cfg = replace(model.cfg, exit_loop=loops)
    return capped


# -------------------------------------------------------------------------------------------------
# serve: loss vs. throughput of trained runs

@dataclass
class ThroughputConfig:
    file: str = "serve.png"     # the picture
    slots: int = 16             # requests in work at a time
    requests: int = 240
    rounds: int = 3
    device: str = "auto"
    data_dir: str = "data"

    def __post_init__(self):
        for f in fields(self):
            if f.type is int and getattr(self, f.name) < 1:
                raise ValueError(f"{f.name}={getattr(self, f.name)} must be at least 1")
        file = Path(self.file)
        if file.suffix not in (".png", ".pdf", ".svg") or not file.absolute().parent.is_dir():
            raise ValueError(f"file={file} must be a .png, .pdf or .svg in a folder that exists")


def bench_serve(folders, argv):
    """The same requests to each run, whose log has its loss. Models with a router go depth-wise,
    if their sharing lets them, all others sequence-wise."""
    cfg = typed_config(ThroughputConfig, split_args(argv))
    if not folders or len(set(folders)) < len(folders):
        raise UserError("give the folders of runs, each once: python -m lab.bench serve out/NAME ... "
                        "[key=value]")
    device, candidates, notes, losses, texts = pick_device(cfg.device), {}, {}, {}, []
    for folder in folders:
        model, text = served_run(folder, cfg.data_dir, device)
        routed = hasattr(model, "takes") and model.cfg.router != "none" and model.n_loop > 1
        batching = "depth" if routed and model.cfg.share.endswith("cycle") else "sequence"
        losses[folder] = points(folder, "step", "val_bpb")[-1][1]
        candidates[folder] = model, cfg.slots, dict(batching=batching)
        notes[folder] = f"{batching}; {losses[folder]:.4f} bits per byte; "
        texts.append(text)
    if not all(np.array_equal(text, texts[0]) for text in texts):
        raise UserError("the runs were not trained on the same tokens, so neither losses nor "
                        "tokens/s compare")
    work = workload(texts[0], cfg.requests)
    took, _ = compare_requests(candidates, work, device, cfg.rounds, notes)
    places = [(Path(folder).name, 1 / took[folder], losses[folder]) for folder in folders]
    draw_points(places, f"speed, {places[0][0]} = 1, {cfg.slots} slots", "bits per byte", cfg.file)


def served_run(folder, data_dir, device):
    """(model, the text that requests start from) of a run."""
    model, _, ckpt = load_run(folder, device)
    if not hasattr(model, "loop"):
        raise UserError(f"{folder} is a model_{ckpt['model']}: requests are for relaxed and mor")
    data = {key: ckpt["config"][key] for key in ("dataset", "tokenizer")}
    cfg = TrainConfig(**data, data_dir=data_dir, init_from=folder)
    return model, served_text(model, cfg, ckpt)

"""
Evaluation of a trained model. It reports the loss by position and by context length, or the scores
in the tasks of lm-evaluation-harness (the package lm_eval).

    python -m lab.eval out/gpt_tiny/best.pt               all validation text of the run
    python -m lab.eval out/rt_tiny lengths=1,2,4          contexts longer than in training
    python -m lab.eval out/mor_tiny exit_loop=2           at most 2 recursions
    python -m lab.eval out/task_s3 lengths=1,2,4,8        a synthetic task, also longer examples
    python -m lab.eval out/gpt_tiny tasks=hellaswag,piqa  tasks, which may run code of their own
    python -m lab.eval out/rt_tiny tasks=rt               a paper's tasks: rt, relaxed, mor or rat
    python -m lab.eval help                               every option with its meaning

The result is printed as one JSON object. Its `lengths` has an entry for each of the option's
numbers, under this number. An entry of a text has ce in nats a token, bpb, context (in tokens) and
positions (the mean ce of ranges of positions). An entry of a synthetic task has ce, context,
token_accuracy and sequence_accuracy. These are the fractions of scored tokens and of examples that
are right. The entries of the smallest number also stand at the top. For a text, `tokens` counts the
predicted tokens.

All losses are those of decoding: lrt computes its exact chain, and mor routes a token without
looking at later ones. The text is cut into windows of the longest of `lengths`, and a rest that
does not fill a window is left out. For shorter lengths the same windows are cut into pieces, so
that all lengths predict the same tokens.

`overlap` is the fraction of the validation tokens that are copied from the train text. A token
counts if a stretch of 64 tokens around it occurs there, too. Both texts are those of the data set
that is evaluated, which dataset= may have replaced. `clean` has the losses on the windows without
such tokens. Its bits per byte count these windows' own bytes. Both are left out with batches=,
because they read the whole text of both splits, and for a validation text of more than 50 million
tokens, because they would need more than 3 GB of memory.

With exit_loop=N, `agreement` is how often the likeliest token after N loops is the likeliest after
all loops. With MoR's expert choice, `scores` has ten fractions for each recursion after the first.
Only tokens count that could take the recursion. Fraction n is the part of them whose score lies in
the n-th tenth from 0 to 1. The score is sigmoid(s), where s is the router's output by which
decoding decides. A token with 0.5 or more takes the recursion. `agreement` and `scores` take at
most 50 batches, spread over the text.

For a synthetic task (common/tasks.py), longer contexts are longer examples, and each length has
1,280 of its own.

A task of lm_eval with choices has gold_ce, which is minus the log-likelihood of the right answer
after the question, in nats. It is summed over the tokens of the answer. prefill=interleaved scores
lrt by its training estimate of the memories, which is about ten times as fast as the exact chain,
and not equal to it.
"""
import copy
import json
import math
import re
from dataclasses import dataclass, replace
from statistics import fmean
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from tqdm import tqdm

from common.checkpoint import build_model, check_tokenizer, load_checkpoint
from common.data import Windows, bits_per_byte, is_task, open_data, repeated
from common.device import autocast, pick_device
from common.options import (Options, UserError, choice, first_line, need, run_cli, split_args,
                            typed_config)
from common.tasks import TaskBatches, count_right
from common.tokenizer import load_tokenizer
from sample import check_finite


@dataclass
class EvalConfig(Options):
    lengths: str = "1"       # context lengths in units of the trained length, such as 1,2,4
    batches: int = 0         # number of batches, spread evenly over the data (0: all of it)
    batch_size: int = 1      # sequences of the trained length in a batch (default: the run's)
    dataset: str = ""        # a data set with the run's tokenizer (default: the run's)
    data_dir: str = ""       # where that data set is (default: the run's)
    block_size: int = 0      # the longest context of the model (default: the run's)
    exit_loop: int = 0       # relaxed, mor: the most loops (default: the run's)
    fast: bool = True        # false: the equations written out
    device: str = "auto"     # auto | cpu | mps | cuda | cuda:N
    tasks: str = ""          # in place of a text: tasks of lm_eval (with commas), or a paper's
    prefill: str = choice("", "exact", "interleaved")   # of lrt in tasks (default: exact)
    num_fewshot: int = -1    # solved examples before a question (-1: as the task says)
    limit: int = 0           # examples of each task (0: all)
    include_path: str = ""   # folder of the tasks' YAML files (default: lm_eval's own)

    def __post_init__(self):
        self.between(batches=(0, None), batch_size=(1, None), num_fewshot=(-1, None),
                     limit=(0, None))
        if not re.fullmatch("[1-9][0-9]{0,5}(,[1-9][0-9]{0,5})*", self.lengths):
            raise ValueError(f"lengths={self.lengths:.60} must be whole numbers, as 1,2,4")
        self.units = sorted({int(k) for k in self.lengths.split(",")})
        if any(self.units[-1] % k for k in self.units):
            raise ValueError(f"lengths={self.lengths:.60}: each must divide the longest one")


LONGEST_COMPARED = 50_000_000   # tokens of the longest validation text that has `overlap`

# These options mean nothing with tasks=, and those of OF_HARNESS need it.
NOT_OF_HARNESS = {"lengths", "batches", "dataset", "data_dir"}
OF_HARNESS = {"prefill", "num_fewshot", "limit", "include_path"}


def config_of(given, **of_run):
    """Return the EvalConfig of the options `given`, which are text, and of those of a run. Raise
    UserError for an option that this kind of evaluation does not read."""
    cfg = typed_config(EvalConfig, {**of_run, **given})
    if unused := given.keys() & (NOT_OF_HARNESS if cfg.tasks else OF_HARNESS):
        how = "with" if cfg.tasks else "without"
        raise UserError(f"{min(unused)}= has no meaning {how} tasks=")
    return cfg


# ---- losses of a text ----

@torch.no_grad()
def losses(model, windows, batches, length, units):
    """Return two dicts of float64 tensors. Their keys are the k of `units`, and k stands for
    contexts of k * length tokens. The first has the mean cross-entropy at each position, {k: (k
    length,)}. The second has the sum of each window's cross-entropies, {k: (windows,)}. `length` is
    the trained length, and a window has the longest context."""
    device = model.wte.weight.device
    sums = {k: torch.zeros(k * length, dtype=torch.float64) for k in units}
    totals = {k: [] for k in units}
    for starts in tqdm(batches, disable=None, leave=False, unit="batch"):
        x, y = windows.cut(windows.val, starts)  # (B, longest)
        for k in units:
            idx, targets = (t.view(-1, k * length) for t in (x, y))
            logits = model(idx.to(device))[0].flatten(0, 1)
            check_finite(logits)
            nats = F.cross_entropy(logits, targets.flatten().to(device), reduction="none")
            nats = nats.cpu().double()
            sums[k] += nats.view_as(idx).sum(0)
            totals[k].append(nats.view_as(x).sum(1))
    rows = sum(map(len, batches))
    means = {k: sums[k] * k / units[-1] / rows for k in units}  # a window has units[-1] / k pieces
    return means, {k: torch.cat(totals[k]) for k in units}


def clean_losses(totals, starts, longest, data):
    """Return the fraction of the validation tokens that are repeated from train, and the losses of
    the windows without such tokens, {k: {ce, bpb, tokens}}. The latter is empty if there is no such
    window."""
    val = data["val"]
    copied = repeated(val.mapped(), data["train"].mapped())
    clean = [n for n, start in enumerate(starts) if not copied[start:start + longest + 1].any()]
    windows = [val.windows([starts[n]], longest + 1)[0] for n in clean]
    # The first token is no target. It is decoded because some tokenizers drop a text's first blank.
    size_of = lambda ids: len(val.tokenizer.decode_bytes(ids))
    size = sum(size_of(ids) - size_of(ids[:1]) for ids in windows)
    tokens = len(clean) * longest
    sums = {k: float(nats[clean].sum()) for k, nats in totals.items()}
    return float(copied.mean()), {str(k): {
        "ce": nats / tokens, "bpb": nats / math.log(2) / size, "tokens": tokens}
        for k, nats in sums.items() if clean}


def by_position(nats):
    """Return the means over positions 0-15, 16-31, 32-63 and so on, {"0-15": nats}."""
    n = len(nats)
    edges = [0, *(2 ** i for i in range(4, (n - 1).bit_length())), n]
    return {f"{a}-{b - 1}": float(nats[a:b].mean()) for a, b in zip(edges, edges[1:])}


@torch.no_grad()
def agreement(model, inputs):
    """Return how often the likeliest token after exit_loop loops is that after all loops."""
    whole = copy.copy(model)
    whole.cfg = replace(model.cfg, exit_loop=0)
    same = [model(x)[0].argmax(-1) == whole(x)[0].argmax(-1) for x in inputs]  # (B, T) each
    return float(torch.cat(same).float().mean())


@torch.no_grad()
def router_scores(model, inputs):
    """Return `scores` of the top of this file, {recursion: ten fractions}."""
    found = [model.states(x, top_k=False)[2] for x in inputs]
    spread = {}
    for r in range(1, model.loops_to_run):
        scores = [decides[r][active[r]] for _, decides, active, _ in found]
        counts = torch.histc(torch.cat(scores).float().sigmoid().cpu(), 10, 0, 1)
        spread[str(r + 1)] = (counts / counts.sum().clamp(min=1)).tolist()
    return spread


def evaluate_text(model, run, cfg, ckpt):
    """Return the JSON object's entries for a text."""
    length = ckpt["model_config"]["block_size"]     # as trained
    longest = cfg.units[-1] * length
    splits = open_data(run)
    check_tokenizer(ckpt, data := splits["val"], "the model")
    data.check()
    windows = Windows(data, max(1, cfg.batch_size // cfg.units[-1]), longest)
    batches, found = windows.val_batches(cfg.batches), {}
    means, totals = losses(model, windows, batches, length, cfg.units)
    for k, nats in means.items():
        ce = float(nats.mean())
        found[str(k)] = {"ce": ce, "bpb": bits_per_byte(ce, data), "context": len(nats),
                         "positions": by_position(nats)}
    tokens = sum(map(len, batches)) * longest
    starts = [start for batch in batches for start in batch]
    more = {}
    # With batches= this would take longer than all else.
    if not cfg.batches and len(data.mapped()) <= LONGEST_COMPARED:
        splits["train"].check()
        more["overlap"], clean = clean_losses(totals, starts, longest, splits)
        for k, values in clean.items():
            found[k]["clean"] = values
    result = {**found[str(cfg.units[0])], "tokens": tokens, **more, "lengths": found}
    some = batches[::math.ceil(len(batches) / 50)]  # at most 50 batches, from all of the text
    inputs = [windows.cut(data, starts)[0].to(model.wte.weight.device) for starts in some]
    if getattr(model.cfg, "exit_loop", 0):
        result["agreement"] = agreement(model, inputs)
    if getattr(model.cfg, "router", "") == "expert" and hasattr(model, "states"):
        result["scores"] = router_scores(model, inputs)
    return result


# ---- synthetic tasks ----

@torch.no_grad()
def evaluate_synthetic(model, run, cfg, ckpt):
    """Return the JSON object's entries for a synthetic task."""
    found, device = {}, model.wte.weight.device
    for k in cfg.units:
        run.batch_size = max(1, cfg.batch_size // k)
        batches, counts = TaskBatches(run, k * ckpt["model_config"]["block_size"]), []
        check_tokenizer(ckpt, batches.val, "the model")
        numbers = batches.val_batches(cfg.batches)
        for part in tqdm(numbers, disable=None, leave=False, unit="batch"):
            x, y = batches.cut(batches.val, part)
            logits, _, aux = model(x.to(device), y.to(device))
            check_finite(logits)
            scored, right = int((y != -1).sum()), [int(n) for n in count_right(logits, y)]
            counts.append((float(aux["ce"]) * scored, scored, len(y), *right))
        nats, tokens, examples, right_tokens, right_examples = map(sum, zip(*counts))
        found[str(k)] = {"ce": nats / tokens, "token_accuracy": right_tokens / tokens,
                         "sequence_accuracy": right_examples / examples, "context": x.size(1)}
    return {**found[str(cfg.units[0])], "lengths": found}


# ---- the tasks of lm_eval ----

# These are the tasks in each paper's tables. MoR scores MMLU by continuations.
COMMON = "hellaswag,piqa,winogrande,arc_easy"
TASK_SETS = {
    "rt": f"{COMMON},openbookqa,sciq",
    "relaxed": f"{COMMON},arc_challenge,lambada_openai,openbookqa",
    "mor": f"{COMMON},arc_challenge,lambada_openai,mmlu_continuation",
    "rat": f"{COMMON},arc_challenge,lambada_openai"}


class HarnessModel:
    """A model with the methods that lm_eval calls. evaluate_harness makes a subclass that also
    inherits from lm_eval's class LM, because this file must load where lm_eval is missing."""

    def __init__(self, model, tokenizer, batch_size, cached=False):
        """With `cached`, each sequence goes through an empty cache as a prompt does, so that the
        model's prefill= holds."""
        super().__init__()
        self.model, self.tokenizer, self.batch_size = model, tokenizer, batch_size
        self.cached = cached

    def encode(self, context, answer):
        """Return the token ids of the context and of the answer, which are encoded as one text. If
        one token would then have the context's end and the answer's beginning, each is encoded by
        itself, and the answer as a text that goes on. Blanks at the context's end belong to the
        answer, as in lm_eval. An empty context becomes end-of-text."""
        start = context.rstrip()
        before, both = (self.tokenizer.encode(text) for text in (start, context + answer))
        if both[:len(before)] != before:
            answer = context[len(start):] + answer
            both = before + self.tokenizer.encode_slice(answer, first=False).tolist()
        return before or [self.tokenizer.eot], both[len(before):]

    def loglikelihood(self, requests):
        return self.scores([self.encode(*request.args) for request in requests])

    @torch.no_grad()
    def scores(self, pairs):
        """Return for each pair (context, answer) of token ids the answer's log-likelihood, and
        whether greedy decoding would give the answer."""
        limit, device = self.model.context_limit, self.model.wte.weight.device
        longest = max((len(answer) for _, answer in pairs), default=0)
        if limit and longest > limit:
            raise UserError(f"a task has an answer of {longest} tokens: the model reads {limit} "
                            f"(block_size)")
        # A row that is too long loses its first tokens. Without a limit, [-0:] keeps all.
        rows = [[*context, *answer[:-1]][-(limit or 0):] for context, answer in pairs]
        order, found = sorted(range(len(rows)), key=lambda n: -len(rows[n])), {}
        for i in tqdm(range(0, len(order), self.batch_size), disable=None, leave=False):
            batch = order[i:i + self.batch_size]
            # Padding stands on the right, where no token attends to it.
            idx = torch.nn.utils.rnn.pad_sequence(
                [torch.tensor(rows[n]) for n in batch], batch_first=True).to(device)
            cache = self.model.init_cache(*idx.shape) if self.cached else None
            found_logits = self.model(idx, cache=cache)[0]
            check_finite(found_logits)
            for n, logits in zip(batch, found_logits):
                ids = torch.tensor(pairs[n][1], dtype=torch.long, device=device)
                ours = logits[len(rows[n]) - len(ids):len(rows[n])]  # (answer, V)
                total = ours.log_softmax(-1).gather(-1, ids[:, None]).sum()
                greedy = ours[:, :self.tokenizer.vocab_size].argmax(-1)
                found[n] = float(total), bool((greedy == ids).all())
        return [found[n] for n in range(len(pairs))]

    def generate_until(self, requests):
        raise UserError("a task generates text, or scores whole documents: only answers to a "
                        "question can be scored")

    loglikelihood_rolling = generate_until


def evaluate_harness(model, tokenizer, cfg):
    """Return the JSON object's entries for tasks."""
    need("lm_eval")
    try:
        from lm_eval import simple_evaluate
        from lm_eval.api.model import LM
        from lm_eval.tasks import TaskManager
        folder = cfg.include_path or None
        manager = TaskManager(include_path=folder, include_defaults=not folder)
        loaded = manager.load(TASK_SETS.get(cfg.tasks, cfg.tasks).split(","))
        manager.load = lambda names: loaded     # simple_evaluate loads no second time
        lm = type("RunModel", (HarnessModel, LM), {})(
            model, tokenizer, cfg.batch_size, cached=cfg.prefill == "interleaved")
        shots = None if cfg.num_fewshot < 0 else cfg.num_fewshot
        found = simple_evaluate(lm, tasks=list(loaded["tasks"]), task_manager=manager,
                                num_fewshot=shots, limit=cfg.limit or None)
        for name, task in loaded["tasks"].items():
            if task.OUTPUT_TYPE == "multiple_choice":
                found["results"][name]["gold_ce"] = gold_ce(task, found["samples"][name])
    except UserError:
        raise
    except Exception as e:  # a YAML file, a download or a task's own code raises any type
        raise UserError(f"tasks={cfg.tasks}: {type(e).__name__}: {first_line(e)}") from e
    numbers = lambda values: {k: v for k, v in values.items() if isinstance(v, float)}
    return {"tasks": {name: numbers(row) for name, row in found["results"].items()}}


def gold_ce(task, samples):
    """Return the mean over the samples of the right answer's cross-entropy in nats. If several
    answers are right, the likeliest one counts."""
    nats = []
    for sample in samples:
        doc, scores = sample["doc"], [-resps[0][0] for resps in sample["resps"]]
        gold = (task.doc_to_text if task.multiple_input else task.doc_to_target)(doc)
        gold = task.doc_to_choice(doc).index(gold) if isinstance(gold, str) else gold
        nats.append(min(scores[n] for n in (gold if isinstance(gold, list) else [gold])))
    return fmean(nats)


# ---- the command ----

def check_context(model, cfg, ckpt):
    """Raise UserError if the longest context is more than the model reads."""
    longest, limit = cfg.units[-1] * ckpt["model_config"]["block_size"], model.context_limit
    if limit and longest > limit:
        raise UserError(f"lengths={cfg.lengths}: {longest} tokens are more than the {limit} "
                        f"that this model reads (block_size={limit}): block_size={longest} lets it "
                        f"read them")


def main(argv):
    (path,), given = split_args(argv, least=1, most=1)
    ckpt = load_checkpoint(path)
    of_run = {key: ckpt["config"][key] for key in ("batch_size", "dataset", "data_dir")}
    cfg = config_of(given, **of_run)
    of_model = "block_size", "exit_loop", "prefill"
    changed = {key: getattr(cfg, key) for key in of_model if given.get(key)}
    if not cfg.block_size:      # as by default
        changed.pop("block_size", None)
    device = pick_device(cfg.device)
    model = build_model(ckpt, fast=cfg.fast, **changed).to(device).eval()
    run = SimpleNamespace(**{**ckpt["config"], "dataset": cfg.dataset, "data_dir": cfg.data_dir})
    tokenizer = load_tokenizer(ckpt["tokenizer"])
    with autocast(run, device):
        if cfg.tasks:
            result = evaluate_harness(model, tokenizer, cfg)
        else:
            check_context(model, cfg, ckpt)
            evaluate = evaluate_synthetic if is_task(cfg.dataset) else evaluate_text
            result = evaluate(model, run, cfg, ckpt)
    print(json.dumps({"model": ckpt["model"], "step": ckpt["step"], **result}, indent=2))


if __name__ == "__main__":
    run_cli(main, EvalConfig)

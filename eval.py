"""
Evaluation of a trained model, for every model: its loss by position and by context length, and
the tasks of lm-evaluation-harness.

    python eval.py out/gpt_tiny                     all of the run's validation text
    python eval.py out/gpt_tiny/best.pt dataset=file:notes.txt      that of another data set
    python eval.py out/rt_tiny lengths=1,2,4        longer contexts than in training
    python eval.py out/mor_tiny exit_loop=2 json=two.json   at most 2 recursions; to a file too
    python eval.py out/gpt_tiny tasks=hellaswag,piqa        after: pip install lm_eval
    python eval.py help                             every key with its meaning

Keys of train.py replace the run's values: dataset (of the run's tokenizer), data_dir,
batch_size, device, dtype. So do keys of the model that its weights do not depend on:
fast, exit_loop, block_size.

All losses are those of decoding: lrt computes its exact chain, mor routes without
later tokens.

Counted tokens: each file of the text is cut into windows of the longest of `lengths`.
Every token of a window is predicted, the first from one token before it. What does not
fill a window is left out. For shorter lengths the same windows are cut into pieces, so
that all lengths predict the same tokens. batches=N takes windows spread evenly over it.

Tasks: a context that is too long for the model (block_size) loses its first tokens. A
long document is read in windows of block_size. A task may bring code: run those you
trust.
"""
import json
import re
from dataclasses import dataclass, fields, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from tqdm import tqdm

from checkpoint import checkpoint_file, load_checkpoint
from config import (UserError, asks_help, first_line, help_text, model_module, need, run_cli,
                    split_args, typed_config, unknown_key, writing)
from data import TextBatches, bits_per_byte
from limits import check_run_fits
from run import (autocast, check_tokenizer, device_name, make_model, open_data, pick_device,
                 run_config, sized)
from sample import stream
from tasks import is_task
from tokenizer import load_tokenizer


@dataclass
class EvalConfig:
    lengths: str = "1"      # context lengths in units of the trained one: 1,2,4
    batches: int = 0        # batches of batch_size trained lengths (0: all the text)
    json: str = ""          # write the numbers into this file
    tasks: str = ""         # evaluate on these tasks, with commas between, instead of a text
    num_fewshot: int = -1   # solved examples before each question (-1: as the task says)
    limit: int = 0          # examples of each task (0: all)
    include_path: str = ""  # folder whose YAML files are the tasks (default: lm_eval's own tasks)

    def __post_init__(self):
        for name, least in ("batches", 0), ("num_fewshot", -1), ("limit", 0):
            if getattr(self, name) < least:
                raise ValueError(f"{name}={getattr(self, name)} must be at least {least}")
        if not re.fullmatch("[1-9][0-9]{0,5}(,[1-9][0-9]{0,5})*", self.lengths):
            raise ValueError(f"lengths={self.lengths:.60} must be whole numbers: 1,2,4")
        if any(self.units()[-1] % k for k in self.units()):
            raise ValueError(f"lengths={self.lengths:.60}: each must divide the longest")
        if not Path(self.json).absolute().parent.is_dir():      # told before the work
            raise ValueError(f"json={self.json}: there is no such folder")

    def units(self):
        return sorted({int(k) for k in self.lengths.split(",")})


# -------------------------------------------------------------------------------------------------
# the run

OF_THE_RUN = "dataset", "data_dir", "batch_size", "device", "dtype"


def open_run(path, given):
    """EvalConfig, the keys of the run (TrainConfig) and of its model, in place of which
    others may be given, and the checkpoint."""
    ckpt = load_checkpoint(checkpoint_file(path))
    module = model_module(ckpt["model"])
    own = [f.name for f in fields(EvalConfig)]
    names = [*own, *OF_THE_RUN, *(f.name for f in fields(module.Config))]
    for key in given:
        if key not in names:
            raise UserError(unknown_key(key, names))
    cfg = typed_config(EvalConfig, {key: given[key] for key in own if key in given})
    base = {**ckpt["config"], "init_from": "", "teacher": "", "resume": False, "overwrite": False,
            "eval_only": True, "device": "auto"}
    run, model_fields = run_config(module, {k: given[k] for k in given if k not in own}, base)
    if is_task(run.dataset):
        raise UserError(f"dataset={run.dataset} is no text: train.py with eval_only=true "
                        f"tells how many of its answers are right")
    return cfg, run, model_fields, ckpt


# -------------------------------------------------------------------------------------------------
# a text

@torch.no_grad()
def losses(model, batches, windows, length, units):
    """Mean cross-entropy at each position, {k: (k length,) float64} for each k of units, on the
    same windows of the longest. length: the trained length."""
    device = next(model.parameters()).device
    sums = {k: torch.zeros(k * length, dtype=torch.float64) for k in units}
    rows = 0
    for starts in tqdm(windows, disable=None, leave=False, unit="batch"):
        x, y = batches.cut(batches.val, starts)                         # (B, longest)
        rows += len(x)
        for k in units:
            idx, targets = (t.view(-1, k * length).to(device) for t in (x, y))
            logits = model(idx)[0].flatten(0, 1)
            nats = F.cross_entropy(logits, targets.flatten(), reduction="none")
            sums[k] += nats.view_as(targets).cpu().double().sum(0)
    return {k: sums[k] * k / units[-1] / rows for k in units}           # pieces of a window


def by_position(nats):
    """Means over positions 0-15, 16-31, 32-63, ...: {"0-15": nats}."""
    edges = [0, *(16 << n for n in range(50) if 16 << n < len(nats)), len(nats)]
    return {f"{a}-{b - 1}": float(nats[a:b].mean()) for a, b in zip(edges, edges[1:])}


def evaluate_text(model, run, ckpt, cfg):
    """What the JSON file gets of a text."""
    units, length = cfg.units(), ckpt["model_config"]["block_size"]     # as trained
    longest, limit = units[-1] * length, model.context_limit
    if limit and longest > limit:
        raise UserError(f"lengths={cfg.lengths}: {longest} tokens are more than the {limit} "
                        f"that this model reads (block_size={limit})")
    run = replace(run, batch_size=max(1, run.batch_size // units[-1]))
    batches = TextBatches(open_data(run), run, longest)
    check_tokenizer(ckpt, batches.val, "the model")
    windows = batches.val_batches(cfg.batches)
    results = {}
    for k, nats in losses(model, batches, windows, length, units).items():
        ce = float(nats.mean())
        results[str(k)] = {"ce": ce, "bpb": bits_per_byte(ce, batches.val),
                           "context": len(nats), "positions": by_position(nats)}
    tokens = sum(map(len, windows)) * longest
    return {**results[str(units[0])], "tokens": tokens, "lengths": results}


def print_text(result):
    """A table with a column for each length."""
    def row(name, values):
        cells = [f"{v:.4f}" if isinstance(v, float) else v for v in values]
        print(f"{name:16}" + "".join(f"{cell:>15}" for cell in cells).rstrip())
    lengths = result["lengths"].values()
    print(f"{result['tokens']:,} tokens are predicted, each once\n")
    row("context", [f"{found['context']:,} tokens" for found in lengths])
    row("cross-entropy", [found["ce"] for found in lengths])
    row("bits per byte", [found["bpb"] for found in lengths])
    names = {name for found in lengths for name in found["positions"]}
    for name in sorted(names, key=lambda name: [int(end) for end in name.split("-")]):
        row(f"ce at {name}", [found["positions"].get(name, "") for found in lengths])


# -------------------------------------------------------------------------------------------------
# lm-evaluation-harness

class HarnessModel:
    """What lm_eval asks of a model, for each of ours. Its TemplateLM is the second base."""

    def __init__(self, model, tokenizer, batch_size):
        super().__init__()
        self.model, self.tokenizer, self.batch_size = model, tokenizer, batch_size

    @property
    def eot_token_id(self):
        return self.tokenizer.eot

    def tok_encode(self, string, **_):
        return self.tokenizer.encode(string)

    @torch.no_grad()
    def _loglikelihood_tokens(self, requests, **_):
        """(texts, context, answer), of token ids -> the answer's log-likelihood and whether it
        is the greedy one. Answers that differ in the last token only share a row."""
        from lm_eval.models.utils import Collator
        limit = self.model.context_limit
        longest = max((len(answer) for _, _, answer in requests), default=0)
        if limit and longest > limit:
            raise UserError(f"a task has an answer of {longest} tokens: the model reads "
                            f"{limit} (block_size)")
        order = Collator(requests, sort_fn=lambda r: -len(r[1] + r[2]),
                         group_by="contexts", group_fn=lambda r: r[1] + r[2][:-1])
        found, bar = [], tqdm(total=len(requests), disable=None, leave=False)
        for chunk in order.get_batched(n=self.batch_size):
            # too long: without the first tokens
            rows = [(context + answer)[:-1][-(limit or 0):] for _, context, answer in chunk]
            for request, row, logits in zip(chunk, rows, self.logits(rows)):
                logits = logits[:len(row)][None]
                for _, answer, logits in order.get_cache(*request, logits):
                    found.append(self.score(logits[0, -len(answer):], answer))
                    bar.update()
        return order.get_original(found)

    def logits(self, rows):
        """Rows of token ids -> (B, T, V). Padding is on the right, where no token attends to it."""
        idx = torch.nn.utils.rnn.pad_sequence(list(map(torch.tensor, rows)), batch_first=True)
        return self.model(idx.to(next(self.model.parameters()).device))[0]

    def score(self, logits, answer):
        """The log-likelihood of an answer from its logits (n, V), and whether it is the greedy one
        among the tokens that the tokenizer has."""
        ids = torch.tensor(answer, device=logits.device)
        total = logits.log_softmax(-1).gather(-1, ids[:, None]).sum()
        greedy = logits[:, :self.tokenizer.vocab_size].argmax(-1)
        return float(total), bool((greedy == ids).all())

    def loglikelihood_rolling(self, requests, **_):
        """The log-likelihood of whole documents, each token predicted once."""
        from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
        length, documents = self.model.cfg.block_size, []
        for request in requests:
            ids = self.tok_encode(request.args[0])
            windows = get_rolling_token_windows(ids, self.eot_token_id, length, context_len=1)
            documents.append([(None, *make_disjoint_window(window)) for window in windows])
        scores = iter(self._loglikelihood_tokens([w for windows in documents for w in windows]))
        return [sum(next(scores)[0] for _ in windows) for windows in documents]

    def generate_until(self, requests, **_):
        from lm_eval.models.utils import Collator, normalize_gen_kwargs
        order = Collator([request.args for request in requests], sort_fn=lambda r: -len(r[0]),
                         group_by="gen_kwargs", group_fn=lambda r: r[1])
        texts = []
        for n, chunk in enumerate(order.get_batched(n=self.batch_size)):
            options = normalize_gen_kwargs(chunk[0][1])
            texts += self.generate([context for context, _ in chunk], options, seed=n)
        return order.get_original(texts)

    def generate(self, contexts, options, seed):
        """Continue texts as one batch, each up to the first stop string or end-of-text."""
        from lm_eval.models.utils import postprocess_generated_text
        new, limit = options["max_gen_toks"], self.model.context_limit
        kept = max(1, limit - new, limit // 2) if limit else 0          # of a context
        prompts = [(self.tok_encode(text) or [self.eot_token_id])[-kept:] for text in contexts]
        rows, answers = [[] for _ in prompts], [""] * len(prompts)
        for step in stream(self.model, prompts, new, options.get("temperature", 0.0),
                           options.get("top_k", 0), options.get("top_p", 1.0),
                           eot=self.eot_token_id, seed=seed, vocab_size=self.tokenizer.vocab_size):
            for row, token in zip(rows, step):
                row.extend([token] * (token is not None))
            texts = [self.tokenizer.decode(row) for row in rows]
            answers = [postprocess_generated_text(text, options["until"], None)
                       for text in texts]
            if all(token is None or answer != text
                   for token, answer, text in zip(step, answers, texts)):
                break                                   # every row has met a stop string
        return answers


def load_tasks(cfg):
    """lm_eval's tasks by name, with their data."""
    need("lm_eval")
    from lm_eval.tasks import TaskManager
    names, folder = cfg.tasks.split(","), cfg.include_path
    manager = TaskManager(include_path=folder or None, include_defaults=not folder)
    for name in names:
        if name not in manager.all_tasks:
            raise UserError(f"tasks={name:.60}: {folder or 'lm_eval'} has no such task")
    try:
        loaded = manager.load(names)
    except Exception as e:      # of a YAML file, of a download: of any kind
        raise UserError(f"tasks={cfg.tasks}: {type(e).__name__}: {first_line(e)}") from e
    for task in loaded["tasks"].values():
        shots = task.get_config("num_fewshot")
        if shots is None or (shots and cfg.num_fewshot >= 0):   # a task's own 0 stays
            task.set_config("num_fewshot", max(0, cfg.num_fewshot))
        task.set_fewshot_seed(seed=1234)
    return loaded


def evaluate_tasks(model, tokenizer, tasks, batch_size, limit=0):
    """What the JSON file gets of tasks."""
    from lm_eval.api.model import TemplateLM
    from lm_eval.evaluator import evaluate
    harness_model = type("RunModel", (HarnessModel, TemplateLM), {})
    try:
        found = evaluate(harness_model(model, tokenizer, batch_size), tasks,
                         limit=limit or None, log_samples=False)
    except ValueError as e:     # more shots than a task has examples; a task that runs programs
        raise UserError(f"tasks={','.join(tasks['tasks'])}: {first_line(e)}") from e
    numbers = lambda values: {key: v for key, v in values.items() if isinstance(v, float)}
    return {"tasks": {name: numbers(values) for name, values in found["results"].items()}}


def print_tasks(result):
    for name, values in result["tasks"].items():
        for metric, value in values.items():
            print(f"{name:24}{metric:32}{value:12.4f}")


# -------------------------------------------------------------------------------------------------
# the command line

def main(argv):
    if asks_help(argv):
        return print(help_text(EvalConfig))
    paths = [a for a in argv if "=" not in a]
    if len(paths) != 1:
        raise UserError("give one run folder or checkpoint: out/NAME [key=value ...]")
    cfg, run, model_fields, ckpt = open_run(*paths, split_args([a for a in argv if "=" in a]))
    device, tokenizer = pick_device(run.device), load_tokenizer(ckpt["tokenizer"])
    size = tokenizer.vocab_size
    check_run_fits(run, *sized(run, model_fields, model_fields, size), device)
    model = make_model(run, model_fields, ckpt, size, model_fields).to(device).eval()
    tasks = load_tasks(cfg) if cfg.tasks else {}
    with autocast(run, device):
        result = (evaluate_tasks(model, tokenizer, tasks, run.batch_size, cfg.limit) if tasks else
                  evaluate_text(model, run, ckpt, cfg))
    print(f"{paths[0]}: model {ckpt['model']}, step {ckpt['step']}, {device_name(device)}")
    (print_tasks if tasks else print_text)(result)
    if cfg.json:
        with writing(cfg.json):
            Path(cfg.json).write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    run_cli(main)

"""
Evaluation of a trained model, for every model: its loss by position and by context length, and
the tasks of lm-evaluation-harness.

    python -m lab.eval out/gpt_tiny                     all of the run's validation text
    python -m lab.eval out/gpt_tiny/best.pt text=notes.txt      a text file
    python -m lab.eval out/rt_tiny lengths=1,2,4        longer contexts than in training
    python -m lab.eval out/mor_tiny exit_loop=2 json=two.json   at most 2 recursions; to a file too
    python -m lab.eval out/gpt_tiny tasks=hellaswag,piqa        with lm_eval
    python -m lab.eval help                             every key with its meaning

Keys of train.py replace the run's values: dataset (one that was prepared with the very
tokenizer of the run), data_dir, batch_size, device, dtype. So do keys of the model that its
weights do not depend on: fast, exit_loop, block_size (the longest context that it reads).

All losses are those of decoding: lrt computes its exact chain, mor routes without
later tokens.

Counted tokens: the text is cut into windows of the longest of `lengths`, none of which
crosses from one .bin file of the data set into the next. Every token of a window is
predicted, the first from one token before it. What does not fill a window is left out. For
shorter lengths the same windows are cut into pieces, so that all lengths predict the same
tokens. batches=N takes windows spread evenly over it.

Tasks: a context that is too long for the model (block_size) loses its first tokens; where
an answer is written, room for it is kept, up to half of block_size. A long document is read
in windows of block_size. Texts begin without a token for their beginning, Llama's too. A
task may bring code: run those you trust.
"""
import copy
import json
import re
from dataclasses import dataclass, fields, replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from tqdm import tqdm

from common.checkpoint import checkpoint_file, load_checkpoint
from common.keys import (UserError, asks_help, help_text, model_module, read_text, run_cli,
                    split_args, typed_config, unknown_key, writing)
from common.data import TokenData, Windows, bits_per_byte
from lab.harness import evaluate_tasks, load_tasks, print_tasks
from common.limits import check_run_fits
from common.process import (autocast, check_tokenizer, device_name, make_model, open_data, pick_device,
                 run_config, sized)
from common.tasks import is_task
from common.tokenizer import load_tokenizer


@dataclass
class EvalConfig:
    lengths: str = "1"      # context lengths in units of the trained one: 1,2,4
    batches: int = 0        # batches of batch_size trained lengths (0: all the text)
    text: str = ""          # predict this file, all of it, instead of a data set
    json: str = ""          # write the numbers into this file
    tasks: str = ""         # evaluate on these tasks, with commas between, instead of a text
    num_fewshot: int = -1   # solved examples before each question (-1: as the task says)
    limit: int = 0          # examples of each task (0: all)
    include_path: str = ""  # folder whose YAML files are the tasks (default: lm_eval's own tasks)

    def __post_init__(self):
        for name, least in ("batches", 0), ("num_fewshot", -1), ("limit", 0):
            if getattr(self, name) < least:
                raise ValueError(f"{name}={getattr(self, name)} must be at least {least}")
        if self.tasks:
            unused, why = ("lengths", "batches", "text"), "with"
        else:
            unused, why = ("num_fewshot", "limit", "include_path"), "without"
        for key in fields(self):
            if key.name in unused and getattr(self, key.name) != key.default:
                raise ValueError(f"{key.name}= is of no use {why} tasks=")
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

LOOKED_AT = 50      # batches, evenly over the text: how exits agree, and what routers score
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

class FileTokens(TokenData):
    """A text file in the place of a data set."""

    def __init__(self, path, tokenizer):
        text = read_text(path, f"text={path}")
        self.folder, self.split, self.bytes = path, "whole", len(text.encode())
        self.ids = np.array(tokenizer.encode(text), dtype=np.int64)
        self.tokens = len(self.ids)

    def read(self, where):
        return self.ids[where]


@torch.no_grad()
def losses(model, batches, windows, length, units):
    """Mean cross-entropy at each position, {k: (k length,) float64} for each k of units, all from
    the same windows, which have the longest length. length: the trained length."""
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


@torch.no_grad()
def agreement(model, inputs):
    """How often the likeliest token after exit_loop loops is that after all loops."""
    whole = copy.copy(model)
    whole.cfg = replace(model.cfg, exit_loop=0)
    same = [model(x)[0].argmax(-1) == whole(x)[0].argmax(-1) for x in inputs]       # (B, T) each
    return float(torch.cat(same).float().mean())


@torch.no_grad()
def routing(model, inputs):
    """recursions: how many of MoR's a token takes on average. scores, of expert-choice routers: of
    the tokens that a recursion could take, the fractions whose scores sigmoid(s) lie in each tenth
    from 0 to 1, {recursion: [ten fractions]}. Those of 0.5 and more take it."""
    counts, taken = torch.zeros(model.n_loop, 10), []
    for x in inputs:
        _, n, for_loss = model.states(x, causal=True)                       # n (B, T)
        taken.append(n.float().flatten())
        if model.cfg.router == "expert":
            _, decides, active, _ = for_loss                                # (R, B, T) each
            bins = (10 * decides.sigmoid()).long().clamp(max=9).cpu()
            for r, count in enumerate(counts):
                count += bins[r][active[r].cpu()].bincount(minlength=10)
    found = {"recursions": float(torch.cat(taken).mean())}
    if model.cfg.router == "expert":
        found["scores"] = {str(r + 1): (count / count.sum().clamp(min=1)).tolist()
                           for r, count in enumerate(counts) if r}
    return found


def by_position(nats):
    """Means over positions 0-15, 16-31, 32-63, ...: {"0-15": nats}."""
    edges = [0, 16]
    while edges[-1] < len(nats):
        edges.append(2 * edges[-1])
    edges[-1] = len(nats)
    return {f"{a}-{b - 1}": float(nats[a:b].mean()) for a, b in zip(edges, edges[1:])}


def evaluate_text(model, run, ckpt, cfg):
    """What the JSON file gets of a text."""
    units, length = cfg.units(), ckpt["model_config"]["block_size"]     # as trained
    longest, limit = units[-1] * length, model.context_limit
    if limit and longest > limit:
        raise UserError(f"lengths={cfg.lengths}: {longest} tokens are more than the {limit} "
                        f"that this model reads (block_size={limit})")
    run = replace(run, batch_size=max(1, run.batch_size // units[-1]))
    if cfg.text:
        data = FileTokens(cfg.text, load_tokenizer(ckpt["tokenizer"]))
    else:
        check_tokenizer(ckpt, data := TokenData(open_data(run), "val"), "the model")
    batches = Windows(data, run.batch_size, longest)
    windows = batches.val_batches(cfg.batches)
    results = {}
    for k, nats in losses(model, batches, windows, length, units).items():
        ce = float(nats.mean())
        results[str(k)] = {"ce": ce, "bpb": bits_per_byte(ce, batches.val),
                           "context": len(nats), "positions": by_position(nats)}
    result = {**results[str(units[0])], "tokens": sum(map(len, windows)) * longest,
              "lengths": results}
    device, every = next(model.parameters()).device, -(-len(windows) // LOOKED_AT)
    inputs = [batches.cut(batches.val, starts)[0].to(device) for starts in windows[::every]]
    if getattr(model.cfg, "exit_loop", 0):
        result["agreement"] = agreement(model, inputs)
    if hasattr(model, "recursions"):
        result |= routing(model, inputs)
    return result


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
    if "recursions" in result:
        print(f"recursions a token: {result['recursions']:.2f}")
    if "agreement" in result:
        print(f"same likeliest token as after all loops: {result['agreement']:.1%} of the tokens")
    for recursion, bins in result.get("scores", {}).items():
        print(f"scores for recursion {recursion}, tenths from 0 to 1, % of the tokens: "
              + " ".join(f"{100 * x:.0f}" for x in bins))


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
        result = {"run": str(paths[0]), "model": ckpt["model"], "step": ckpt["step"], **result}
        with writing(cfg.json):
            Path(cfg.json).write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    run_cli(main)

"""
What a run writes: checkpoints, one file each, replaced in one move and verified when read; its
log; and exports.

    python -m common.checkpoint out/gpt_tiny export=gpt.pt
        without the optimizers, a third of the size: for sample.py, serve.py, lab.eval, init_from=
    python -m common.checkpoint out/relaxed_tiny export=hf/relaxed
        a Hugging Face folder: a Llama, Mistral, Qwen3 or Gemma, of exit_loop loops
"""
import contextlib
import fcntl
import hashlib
import json
import mmap
import os
import sys
import time
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from tqdm import tqdm

from common.data import bits_per_byte
from common.keys import (UserError, check_known, first_line, known, model_module, names, note,
                         open_file, replace_file, run_cli, split_args, typed_config)
from common.tokenizer import load_tokenizer, to_huggingface

# what a checkpoint holds
FIELDS = {"model": str, "config": dict, "model_config": dict, "tokenizer": dict, "weights": dict,
          "step": int, "tokens": int, "flops": float, "optimizers": list, "evaluated": int,
          "best_ce": float, "data": str, "rng": dict}


# ---- saving ----

def sync_folder(folder):
    """Makes a rename inside folder survive a power cut."""
    with contextlib.suppress(OSError):          # some network file systems cannot
        fd = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


LOCKS = {}      # {folder: its open descriptor}, of this process


def lock(folder):
    """Keep a run's folder for this process. The kernel releases the lock when it ends, however it
    ends. UserError if another process has it."""
    folder = folder.absolute()
    if folder in LOCKS:
        return
    LOCKS[folder] = fd = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(LOCKS.pop(folder))
        raise UserError(f"{folder} is in use: another run of this name goes on") from None
    except OSError:
        pass                                    # a network file system without locks


def save_checkpoint(path, state):
    """Write state (tensors and plain values), and after it the SHA-256 of all that. path is
    complete at every moment: a temporary file, flushed to the disk, replaces it in one move.
    UserError if the disk refuses; path is as before then."""
    path = Path(path)
    temporary = path.with_name(path.name + ".tmp")
    try:
        with open(temporary, "w+b") as f:
            torch.save(state, f)
            f.seek(0)
            f.write(hashlib.file_digest(f, "sha256").digest())
            f.flush()
            os.fsync(f.fileno())
        os.replace(temporary, path)
        sync_folder(path.parent)
    except (OSError, RuntimeError) as e:        # torch wraps a failed write in a RuntimeError
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        reason = getattr(e, "strerror", None) or first_line(e)
        raise UserError(f"could not save {path}: {reason}; what was there is untouched") from e


# ---- loading ----

def load_checkpoint(path):
    """The state saved at path, on the CPU. OSError if there is no such file; UserError if it is
    damaged, or not one of ours: the SHA-256 covers every byte, and the unpickler runs no code."""
    try:
        with open_file(path) as f, warnings.catch_warnings(action="ignore"):
            with mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ) as content:
                if hashlib.sha256(memoryview(content)[:-32]).digest() != content[-32:]:
                    raise ValueError("checksum")
            state = torch.load(f, map_location="cpu", weights_only=True)
    except (OSError, MemoryError):
        raise
    except Exception as e:      # torch fails on foreign files in any way
        raise UserError(f"{path} is damaged or is not a checkpoint of this project: its checksum "
                        f"or its format is wrong") from e
    check_state(state, path)
    return state


def newest(folder):
    """The last state of a run: ckpt.pt, or pending.pt if it was killed in an evaluation."""
    pending = folder / "pending.pt"
    return pending if pending.exists() else folder / "ckpt.pt"


def check_state(state, path):
    """UserError if a file that is whole does not describe a run. Keys of model_config that the
    model has no more are dropped, with a line."""
    try:
        for name, kind in FIELDS.items():
            if type(state[name]) is not kind:
                raise TypeError(f"its {name} cannot be right")
        schema = model_module(state["model"]).Config
        state["model_config"] = known(state["model_config"], names(schema), path)
        typed_config(schema, state["model_config"])
    except (KeyError, TypeError, AttributeError, UserError) as e:
        raise UserError(f"{path} is not a checkpoint of a run: {first_line(e)}") from e


# ---- models ----

def build_model(ckpt, **overrides):
    """The model of a checkpoint with its weights, on the CPU; overrides replace Config fields."""
    module = model_module(ckpt["model"])
    check_known(overrides, names(module.Config))
    try:
        model = module.Model(module.Config(**{**ckpt["model_config"], **overrides}))
        if "converts" in ckpt:                  # from another model's
            module.convert(model, ckpt["weights"])
        else:
            model.load_state_dict(ckpt["weights"])
    except (TypeError, ValueError, RuntimeError) as e:
        reason = str(e).splitlines()[-1].strip()
        raise UserError(f"the checkpoint does not fit model_{ckpt['model']}.py: {reason}") from e
    model.set_step(ckpt["step"])
    return model


def checkpoint_file(path):
    """A run folder's ckpt.pt, or the file itself."""
    return Path(path) / "ckpt.pt" if Path(path).is_dir() else Path(path)


def load_run(path, device="cpu", **overrides):
    """(model in eval mode, tokenizer, checkpoint) of a run folder or checkpoint file."""
    ckpt = load_checkpoint(checkpoint_file(path))
    return build_model(ckpt, **overrides).to(device).eval(), load_tokenizer(ckpt["tokenizer"]), ckpt


def load_initial(path, key="init_from"):
    """What init_from or teacher names, as a checkpoint: that of a run, or Hugging Face weights."""
    if checkpoint_file(path).is_file():
        return load_checkpoint(checkpoint_file(path))
    from common.llama import from_pretrained
    try:
        model = from_pretrained(path)
    except (ValueError, RuntimeError) as e:     # RuntimeError: no memory for its sizes
        raise UserError(f"{key}={path}: {first_line(e)}") from e
    return {"model": "gpt", "model_config": asdict(model.cfg), "weights": model.state_dict(),
            "step": 0}


# ---- log.jsonl, one object a line: written while training, read for pictures and tables ----

def read_log(path):
    """The objects of a log.jsonl; a line cut short by a crash is left out."""
    rows = []
    for line in open_file(path) if path.exists() else ():
        with contextlib.suppress(ValueError, RecursionError):
            rows.append(json.loads(line))
    return [row for row in rows if isinstance(row, dict)
            and all(type(row.get(key)) in (int, float) for key in ("step", "seconds"))]


class Log:
    """log.jsonl and the progress bar; on the first process only. A resumed run drops the lines
    after its checkpoint, which a killed run may have written."""

    def __init__(self, run):
        self.run, self.path = run, run.folder / "log.jsonl"
        rows = read_log(self.path) if run.step else []
        rows = [row for row in rows
                if row["step"] <= (run.evaluated if "val_ce" in row else run.step)]
        replace_file(self.path, "".join(json.dumps(row) + "\n" for row in rows).encode())
        self.start = time.perf_counter() - (rows[-1]["seconds"] if rows else 0)
        self.bar = tqdm(total=run.cfg.max_steps, initial=run.step, unit="step", disable=None,
                        dynamic_ncols=True, file=sys.stderr)
        self.lap = time.perf_counter(), run.tokens

    def step(self, logged, write):
        """One training step is done; a line about it if `write`."""
        self.bar.update()
        if not write:
            return
        start, tokens = self.lap
        rate = (self.run.tokens - tokens) / (time.perf_counter() - start)
        values = {**logged, "tokens_per_second": round(rate, 1)}
        if not self.run.task:
            values["bpb"] = bits_per_byte(logged["ce"], self.run.batches.train)
        self.write(values)
        self.bar.set_postfix_str(f"ce {logged['ce']:.3f}, {rate / 1000:.1f}k tokens/s")

    def evaluation(self, result, best):
        self.write(result)
        with self.bar.external_write_mode(file=sys.stdout):
            print(f"step {self.run.step}: {in_words(result)}{' (best)' * best}", flush=True)

    def write(self, values):
        row = {"step": self.run.step, "tokens": self.run.tokens, "flops": self.run.flops,
               "seconds": round(time.perf_counter() - self.start, 3), **values}
        with open(self.path, "a") as f:
            f.write(json.dumps(row) + "\n")
        self.lap = time.perf_counter(), self.run.tokens     # evaluations are not training time


def in_words(result):
    """The line that is printed about an evaluation; val_ce is missing where it is not finite."""
    words = [] if "val_ce" in result else ["val ce not finite"]
    words += [f"{name.replace('_', ' ')} {value:.4f}" for name, value in result.items()]
    return ", ".join(words)


# ---- the command line ----

@dataclass
class ExportConfig:
    export: str = ""            # where to: NAME.pt, or a folder for Hugging Face's format
    exit_loop: int = 0          # of relaxed and mor: how many loops (0: all)
    overwrite: bool = False     # replace what is there


def main(argv):
    (run,), keys = split_args(argv, least=1, most=1)
    cfg = typed_config(ExportConfig, keys)
    if not cfg.export:
        raise UserError("give one run and where to: out/NAME export=PATH")
    path, ckpt = Path(cfg.export), load_checkpoint(checkpoint_file(run))
    if path.exists() and not cfg.overwrite:
        raise UserError(f"{path} exists: overwrite=true replaces it")
    if cfg.exit_loop:
        ckpt["model_config"]["exit_loop"] = cfg.exit_loop
    model = build_model(ckpt).eval()
    if path.suffix == ".pt":
        path.parent.mkdir(parents=True, exist_ok=True)
        save_checkpoint(path, {**ckpt, "optimizers": []})
    else:
        export_folder(path, model, load_tokenizer(ckpt["tokenizer"]))
    print(f"{path}: {ckpt['model']}, step {ckpt['step']:,}")


def export_folder(path, model, tokenizer):
    from common.llama import to_pretrained
    to_pretrained(model, path, tokenizer.eot)
    for name in ("tokenizer.json", "tokenizer_config.json", "model.safetensors.index.json"):
        (path / name).unlink(missing_ok=True)       # of what was there before
    if not to_huggingface(tokenizer, path):
        note(f"{path} has no tokenizer: a {tokenizer.kind} tokenizer is no BPE of bytes")


if __name__ == "__main__":
    run_cli(main, ExportConfig)

"""
Checkpoints. A checkpoint is one file, which is replaced in one move and verified when it is read.
It can be exported:

    python -m common.checkpoint out/gpt_tiny export=gpt.pt
        a file without the optimizers, which has about a third of the size (AdamW) or half of
        it (Muon). sample.py, serve.py, lab.eval and init_from= read it.
    python -m common.checkpoint out/relaxed_tiny export=hf/relaxed
        a folder in Hugging Face's format, a Llama, Mistral, Qwen3 or Gemma. The loops of relaxed,
        and of mor without a router, are unrolled up to exit_loop.
"""
import contextlib
import hashlib
import json
import math
import mmap
import os
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from common.device import precision
from common.options import (UserError, check_known, first_line, is_inside, known, lacks_memory,
                            model_module, names, naming, note, open_file, run_cli, split_args,
                            typed_config)
from common.tokenizer import load_tokenizer

# Every checkpoint has these fields. New ones also have "precision" (train.state), and old ones have
# "teacher" and "rng", which nothing reads.
FIELDS = {"model": str, "config": dict, "model_config": dict, "tokenizer": dict, "weights": dict,
          "step": int, "tokens": int, "flops": float, "optimizers": list, "evaluated": int,
          "best_ce": float, "data": str}


# ---- saving ----

def sync_folder(folder):
    """Flush a folder to the disk, so that a rename inside it survives a power cut."""
    with contextlib.suppress(OSError):          # some network file systems cannot do it
        fd = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def save_checkpoint(path, state):
    """Write the state, which is tensors and plain values, and behind it the SHA-256 of its bytes.
    The file is complete at every moment, because a temporary file is flushed to the disk and then
    takes its place in one move. Raise UserError if the disk refuses, or if the state holds
    anything else. The file is then as before."""
    path = Path(path)
    temporary = path.with_name(path.name + ".tmp")
    try:
        with open(temporary, "w+b") as f:
            torch.save(state, f)
            f.seek(0)
            # load_checkpoint would refuse any other type, because to read it would run code.
            if others := torch.serialization.get_unsafe_globals_in_checkpoint(f):
                raise RuntimeError(f"the state holds a {min(others)}, and may hold nothing but "
                                   "tensors and plain values")
            f.seek(0)
            f.write(hashlib.file_digest(f, "sha256").digest())  # file_digest reads to the end
            f.flush()
            os.fsync(f.fileno())
        os.replace(temporary, path)
        sync_folder(path.parent)
    except Exception as e:      # torch fails with errors of many kinds
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        reasons = (getattr(error, "strerror", None) for error in (e, e.__context__))
        reason = next(filter(None, reasons), first_line(e))
        raise UserError(f"could not save {path}: {reason}; what was there is untouched") from e


# ---- loading ----

def load_checkpoint(path):
    """Return the last state of a run's folder, or the state in a file, with tensors on the CPU.
    Raise OSError if there is none, and UserError if the file is damaged or not one of ours. The
    SHA-256 covers every byte of the state, and the unpickler runs no code. A field that the model's
    Config no longer has is dropped, and a note tells this."""
    path = Path(path) / "ckpt.pt" if Path(path).is_dir() else Path(path)
    try:
        with naming(path), open_file(path) as f, warnings.catch_warnings(action="ignore"):
            with mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ) as content:
                if hashlib.sha256(memoryview(content)[:-32]).digest() != content[-32:]:
                    raise ValueError("checksum")
            state = torch.load(f, map_location="cpu", weights_only=True)
        if any(type(state[name]) is not kind for name, kind in FIELDS.items()):
            raise ValueError("it is another file of torch's")
    except OSError:
        raise
    except Exception as e:      # torch fails on foreign files with errors of many kinds
        if lacks_memory(e):
            raise
        raise UserError(f"{path} is damaged or is not a checkpoint of this project: its checksum "
                        f"or its format is wrong") from e
    try:
        schema = model_module(state["model"]).Config
        state["model_config"] = known(state["model_config"], names(schema), path)
        typed_config(schema, state["model_config"])
    except UserError as e:
        raise UserError(f"{path} cannot be loaded: {e}") from e
    return state


def stamp(path):
    """Return the SHA-256 at the end of a checkpoint, which identifies it, or None if there is no
    such file."""
    with contextlib.suppress(FileNotFoundError), open_file(path) as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - 32))
        return file.read()


def read_log(path):
    """Return the objects of a log.jsonl. A line that a crash has cut short is left out."""
    rows = []
    for line in open_file(path) if path.exists() else ():
        with contextlib.suppress(ValueError, RecursionError):
            rows.append(json.loads(line))
    return [row for row in rows if isinstance(row, dict)
            and all(type(row.get(key)) in (int, float) for key in ("step", "seconds"))]


# ---- models ----

def build_model(ckpt, **overrides):
    """Return the model of a checkpoint with its weights, on the CPU. The overrides replace fields
    of its Config."""
    module = model_module(ckpt["model"])
    values = {**ckpt["model_config"], **overrides}
    check_known(values, names(module.Config), f" of model={ckpt['model']}")
    cfg = typed_config(module.Config, values)
    try:
        model = module.Model(cfg)
        if "converts" in ckpt:                  # the weights are another model's (as_weights_of)
            if module.convert(model, ckpt["weights"]) is not None:
                raise TypeError("convert writes into the model and returns nothing")
        else:
            model.load_state_dict(ckpt["weights"])
    except (TypeError, ValueError, RuntimeError) as e:
        if lacks_memory(e):
            raise
        reason = (str(e).splitlines() or [type(e).__name__])[-1].strip()
        raise UserError(f"the checkpoint does not fit model_{ckpt['model']}.py: {reason}") from e
    return model


def fingerprint(ckpt) -> str:
    """Return the SHA-256 of a checkpoint's model name, Config and weights, which are all that
    decides what it computes."""
    found = hashlib.sha256(json.dumps([ckpt["model"], ckpt["model_config"]]).encode())
    for name, w in sorted(ckpt["weights"].items()):
        found.update(f"{name} {w.dtype} {[*w.shape]}".encode())
        found.update(w.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return found.hexdigest()


def load_run(path, device="cpu", dtype="float32", **overrides):
    """Return the model in eval mode, the tokenizer and the checkpoint of a run's folder or of a
    checkpoint's file. dtype names the type of the weights, which the model's caches have too
    (common/device.py says what auto is)."""
    ckpt, dtype = load_checkpoint(path), getattr(torch, precision(dtype, torch.device(device)))
    model = build_model(ckpt, **overrides).to(device, dtype).eval()
    return model, load_tokenizer(ckpt["tokenizer"]), ckpt


def load_start(start):
    """Return the checkpoint that a call of train.py starts from, or None. The TrainConfig `start`
    says which one, and is changed to what is done: resume=auto becomes true or false, and init_from
    becomes empty if the checkpoint is the run's own. In this last case the checkpoint has an entry
    "stamp", by which train.py sees whether another job has saved a newer one before the folder was
    locked."""
    own = start.folder / "ckpt.pt"
    unread = start.init_from if start.resume == "true" and not start.eval_only else ""
    if start.eval_only and start.init_from:
        start.resume = "false"
    if start.resume == "auto":                  # a scheduler starts the same command repeatedly
        start.resume = "true" if own.exists() else "false"
    if start.resume == "true" or start.eval_only and not start.init_from:
        start.init_from = ""
        before = stamp(own)
        ckpt = {**load_checkpoint(own), "stamp": before}
        if unread:
            note(f"init_from={unread} is not read, because resume=true goes on from {own}")
        return ckpt
    return load_initial(start.init_from) if start.init_from else None


def load_initial(path, option="init_from"):
    """Return the checkpoint that init_from= or teacher= names. Hugging Face weights become a
    checkpoint of model=gpt, without a tokenizer and a run's other fields."""
    with contextlib.suppress(FileNotFoundError):
        return load_checkpoint(path)
    if (Path(path) / "log.jsonl").exists():
        best = Path(path) / "best.pt"
        hint = f", but {option}={best} may be given" * best.exists()
        raise UserError(f"{option}={path}: this run has no last checkpoint{hint}")
    from common.huggingface import from_pretrained
    try:
        model = from_pretrained(path)
    except (UserError, ValueError, RuntimeError) as e:      # RuntimeError: memory is too small
        raise UserError(f"{option}={path}: {first_line(e)}") from e
    return {"model": "gpt", "model_config": asdict(model.cfg), "weights": model.state_dict(),
            "step": 0}


def load_teacher(cfg, model, data):
    """Return the model that teacher= names, in eval mode, or None. Raise UserError if its tokens
    are not the data's, if it reads shorter sequences, or if it stands in the run's own folder,
    where the student would replace it."""
    if not cfg.teacher or cfg.eval_only:
        return None
    if is_inside(cfg.teacher, cfg.folder):
        raise UserError(f"teacher={cfg.teacher} is in the folder of the run itself, whose weights "
                        f"take its place: run=NAME names another folder")
    ckpt = load_initial(cfg.teacher, "teacher")
    check_tokenizer(ckpt, data, f"teacher={cfg.teacher}")
    teacher = build_model(ckpt).eval().requires_grad_(False)
    size, limit = teacher.cfg.vocab_size, teacher.context_limit or math.inf
    V, T = model.cfg.vocab_size, model.cfg.block_size
    if size != V or limit < T:
        raise UserError(f"teacher={cfg.teacher} has vocab_size={size} and takes {limit} tokens, "
                        f"but the model has vocab_size={V} and block_size={T}")
    return teacher.to(next(model.parameters()).device)


def check_tokenizer(ckpt, data, what):
    """Raise UserError if weights and data have different tokenizers, because ids then mean
    different things."""
    ours = data.tokenizer.to_dict()
    theirs = ckpt.get("tokenizer", ours)
    if "tokenizer" not in ckpt:
        note(f"the tokenizer of {what} is not compared: it must be that of the data, "
             f"{data.tokenizer.kind}")
    if theirs != ours:
        other = " with another vocabulary" * (theirs.get("kind") == ours["kind"])
        raise UserError(f"{what} was trained with tokenizer {theirs.get('kind')}{other}, which is "
                        f"not the one of the data set ({data.tokenizer.kind}, {data.vocab_size} "
                        f"tokens)")


# ---- the command line ----

@dataclass
class ExportConfig:
    export: str = ""            # where it goes: NAME.pt, or a folder for Hugging Face's format
    exit_loop: int = 0          # of relaxed and mor: how many loops (default: the run's; 0: all)
    overwrite: bool = False     # replace the file or folder that is there


def main(argv):
    (run,), given = split_args(argv, least=1, most=1)
    cfg = typed_config(ExportConfig, given)
    if not cfg.export:
        raise UserError("export= is missing: give one run and a place, out/NAME export=PATH")
    path, ckpt = Path(cfg.export), load_checkpoint(run)
    if path.suffix == ".pt" and (path.parent / "log.jsonl").exists():
        raise UserError(f"{path} is in a run's folder, whose checkpoints train.py reads: give "
                        f"another place with export=")
    if path.exists() and not cfg.overwrite:
        raise UserError(f"{path} exists: overwrite=true replaces it")
    if "exit_loop" in given:
        ckpt["model_config"]["exit_loop"] = cfg.exit_loop
    model = build_model(ckpt).eval()
    if path.suffix == ".pt":
        made = [folder for folder in path.parents if not folder.exists()]
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            save_checkpoint(path, {**ckpt, "optimizers": []})
        except UserError:                       # nothing is left behind
            for folder in made:
                folder.rmdir()
            raise
    else:
        from common.huggingface import export
        export(model, load_tokenizer(ckpt["tokenizer"]), path)
    print(f"{path}: {ckpt['model']}, step {ckpt['step']:,}")


if __name__ == "__main__":
    run_cli(main, ExportConfig)

"""
The trainer of every model: one process on a CPU or GPU, or many through torchrun.

    python train.py                                              a small model on the embedded corpus
    python train.py config=configs/gpt_tiny.yaml n_layer=6       a config file, and keys that replace its values
    python train.py run=long max_steps=9000 resume=true          go on from out/long/ckpt.pt
    torchrun --nproc_per_node=8 train.py gradient_accumulation_steps=8 ...    data parallel, on any number of nodes
    python train.py help                                         every key with its meaning

All keys live in one flat namespace: those of TrainConfig below and those of the chosen model's Config.
out/<run>/ receives ckpt.pt (the last state), best.pt (the best validation loss), log.jsonl and curves.png.

What makes a run repeatable: the batch is a pure function of (seed, step), and the random numbers of a forward
one of (seed, step, micro-batch). There is no data-order state: a resumed run, a run with another number of
processes, and a run that evaluates more often all see the same tokens and end in the same weights.

`step` counts completed optimizer steps, everywhere.
"""
import contextlib
import hashlib
import importlib
import importlib.util
import io
import json
import math
import os
import signal
import struct
import sys
import time
import warnings
import zipfile
from dataclasses import asdict, dataclass, field, fields, make_dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from omegaconf import OmegaConf
from torch.overrides import TorchFunctionMode
from tqdm import tqdm

from limits import check_fits, check_run_fits, shapes_only
from llama import from_pretrained, llama_config, pretrained_folder
from prepare import (NAME, PrepareConfig, TokenData, UserError, asks_help, check_name, first_line,
                     folder_name, help_text, is_offline, key_lines, load_tokenizer, prepare,
                     read_bytes, run_cli, split_args, sync_folder, typed_config, typed_value)
from tasks import COMPRESSION, TaskBatches, count_right, fit_head, is_task, show_example

HERE = Path(__file__).resolve().parent


@dataclass
class TrainConfig:
    model: str = "gpt"               # which model_<name>.py
    config: str = ""                 # YAML file of keys (default: configs/<model>_tiny.yaml)
    run: str = ""                    # name of the folder for results (default: the config file's name)
    out_dir: str = "out"             # where run folders live
    # data
    dataset: str = "python"          # a source, as prepare.py takes it; a folder under data_dir; task:NAME (tasks.py)
    tokenizer: str = "byte"          # byte | char | bpe:SIZE | gpt2 | hf:PATH_OR_NAME, as prepare.py takes it
    data_dir: str = "data"           # where prepared data sets live
    task_examples: int = 0           # fixed training examples of a synthetic task (0: the task's own number)
    task_next_token: bool = False    # train the recall tasks on every next token, as MAD does, not on the scored ones
    batch_size: int = 12             # sequences in one forward (a micro-batch)
    gradient_accumulation_steps: int = 1   # micro-batches in one optimizer step, over all processes together
    # optimization
    max_steps: int = 2000            # optimizer steps
    max_flops: float = 0.0           # what training may cost in floating-point operations: sets max_steps (0: no limit)
    optimizer: str = "adamw"         # adamw | muon (torch.optim.Muon for the blocks' matrices, AdamW for the rest)
    learning_rate: float = 1e-3      # AdamW's peak
    muon_learning_rate: float = 0.02   # Muon's peak
    muon_momentum: float = 0.95      # Muon's momentum
    muon_momentum_steps: int = 0     # steps over which it rises linearly from 0.85 (0: it is there at once)
    weight_decay: float = 0.1        # on matrices and embeddings, not on vectors
    decay_schedule: str = "constant"   # of weight_decay: constant | linear (down to 0 at the last step)
    beta1: float = 0.9               # AdamW
    beta2: float = 0.99              # AdamW
    grad_clip: float = 1.0           # largest gradient norm (0: no clipping)
    lr_schedule: str = "cosine"      # cosine | linear (no warm-up; constant, down) | trapezoid (up, constant, down)
    warmup_steps: int = 100          # linear warm-up of cosine and trapezoid
    cooldown_frac: float = 0.2       # share of max_steps over which linear and trapezoid go down
    min_lr_frac: float = 0.1         # where every schedule ends, as a share of the peak
    # evaluation and logging
    eval_interval: int = 250         # steps between evaluations and checkpoints
    keep_interval: int = 0           # steps between checkpoints that are kept, step_N.pt (0: none)
    eval_batches: int = 40           # micro-batches of validation text an evaluation reads (0: all of it)
    exact_batches: int = 0           # of these, those on which lrt is evaluated as it decodes, slowly (0: all)
    log_interval: int = 10           # steps between lines in log.jsonl
    sample_prompt: str = "\n"        # what the sample at the end continues
    sample_tokens: int = 256         # its length in tokens (0: no sample)
    wandb: bool = False              # log to Weights & Biases too
    tensorboard: bool = False        # log to TensorBoard too
    # how to run
    seed: int = 1337                 # of the weights, the batches and dropout
    device: str = "auto"             # auto (cuda, mps or cpu, in this order) | cpu | mps | cuda | cuda:N
    dtype: str = "auto"              # auto (bfloat16 on cuda) | float32 (tf32 products on cuda) | bfloat16 (autocast)
    compile: str = "auto"            # torch.compile: auto (on cuda, where it can) | true | false
    init_from: str = ""              # start from these weights: a run folder, a checkpoint, Hugging Face folder or name
    teacher: str = ""                # distil from this model, named as init_from names one
    ce_weight: float = 1.0           # with a teacher: weight of the model's own loss, of early exits too
    kd_weight: float = 1.0           # with a teacher: weight of the KL divergence from its distribution
    kd_temperature: float = 1.0      # with a teacher: both distributions at this temperature
    resume: bool = False             # go on from the run's ckpt.pt
    overwrite: bool = False          # let a new run replace the one in its folder
    eval_only: bool = False          # only evaluate the run's ckpt.pt, or init_from; nothing is written

    def __post_init__(self):
        for name, allowed in (("optimizer", ("adamw", "muon")),
                              ("lr_schedule", ("cosine", "linear", "trapezoid")),
                              ("decay_schedule", ("constant", "linear")),
                              ("dtype", ("auto", "float32", "bfloat16")), ("compile", ("auto", "true", "false"))):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name}={getattr(self, name)} must be one of: {', '.join(allowed)}")
        for name in ("batch_size", "gradient_accumulation_steps", "max_steps", "eval_interval", "log_interval"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        for name in ("task_examples", "warmup_steps", "muon_momentum_steps", "eval_batches", "exact_batches",
                     "keep_interval", "sample_tokens", "seed", "learning_rate", "muon_learning_rate", "weight_decay",
                     "grad_clip", "ce_weight", "kd_weight"):
            if not 0 <= getattr(self, name) < 2 ** 63:
                raise ValueError(f"{name}={getattr(self, name)} must not be negative, and less than 2^63")
        for name in ("cooldown_frac", "min_lr_frac"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name}={getattr(self, name)} must lie between 0 and 1")
        for name in ("beta1", "beta2", "muon_momentum"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 0 and less than 1")
        if not 0 <= self.max_flops < math.inf:
            raise ValueError(f"max_flops={self.max_flops} must not be negative, and finite")
        if not 0.01 <= self.kd_temperature <= 100:
            raise ValueError(f"kd_temperature={self.kd_temperature} must lie between 0.01 and 100")
        if self.sample_tokens and not self.sample_prompt:
            raise ValueError("sample_prompt is empty: give at least one character, or sample_tokens=0")
        if self.resume and self.overwrite:
            raise ValueError("resume=true and overwrite=true exclude each other")
        if self.resume and self.init_from:
            raise ValueError("resume=true goes on from the run's own checkpoint: leave out init_from")


# ---------------------------------------------------------------------------------------------------------
# configuration

def model_module(name):
    """The module model_<name>.py; UserError with the names there are."""
    names = sorted(p.stem.removeprefix("model_") for p in HERE.glob("model_*.py"))
    if name not in names:
        raise UserError(f"model={name} is unknown: {', '.join(names)}")
    return importlib.import_module(f"model_{name}")


def full_schema(module):
    """One dataclass with the trainer's keys and the model's, all in one namespace."""
    def copy(cls):
        return [(f.name, f.type, field(default=f.default)) for f in fields(cls)]
    twice = {f.name for f in fields(TrainConfig)} & {f.name for f in fields(module.Config)}
    assert not twice, f"{module.__name__}.Config repeats the trainer's keys {twice}"
    return make_dataclass("RunConfig", copy(TrainConfig) + copy(module.Config))


def read_config(argv):
    """argv -> (TrainConfig, the model's Config fields, checkpoint or None, names of the keys that were set).

    A value comes from the command line; else from where the run starts (see starting_point); else it is the default.
    """
    given = split_args(argv)
    file = given.get("config", str(HERE / "configs" / f"{given.get('model', TrainConfig.model)}_tiny.yaml"))
    yaml = load_yaml(file) if "config" in given or Path(file).exists() else {}
    base, ckpt = starting_point(given, {"run": Path(file).stem, **yaml, "config": file})
    module = model_module(given.get("model", base.get("model", TrainConfig.model)))
    values = asdict(typed_config(full_schema(module), given, base, free_text=("sample_prompt",)))
    own = {f.name for f in fields(TrainConfig)}
    model_fields = {k: v for k, v in values.items() if k not in own}
    try:
        cfg = TrainConfig(**{k: values[k] for k in own})
        module.Config(**model_fields)           # refuses impossible sizes before anything else is done
    except ValueError as e:
        raise UserError(str(e)) from e
    return cfg, model_fields, ckpt, set(given) | set(base)


def starting_point(given, yaml):
    """The values below the command line's, and the checkpoint they come with (None for a run from scratch).

    From scratch they are the YAML file's. On resume and eval_only they are the run's own, from its checkpoint: where
    a file named on the command line differs, that is said. With init_from the weights bring the model's own fields;
    only block_size, dropout and what its Config calls STAGES may come from a file that was named. A model that converts
    another's weights takes the fields that both have from them, the rest from the file.
    """
    asked = {**asdict(TrainConfig()), **yaml, **given}
    for key in ("model", "run", "out_dir", "init_from"):
        typed_value(key, asked[key], str)
    if any(str(asked[key]).lower() == "true" for key in ("resume", "eval_only")) and not given.get("init_from"):
        ckpt = load_checkpoint(run_folder(asked["out_dir"], asked["run"]) / "ckpt.pt")
        same_model(given.get("model", ckpt["model"]), ckpt)
        now = {key: asked[key] for key in ("run", "out_dir")}
        now.update({key: yaml.get(key, False) for key in ("resume", "overwrite", "eval_only")}, init_from="")
        if "config" in given and int(os.environ.get("RANK", 0)) == 0:
            for key in sorted(yaml.keys() & ckpt["config"].keys() - now.keys() - given.keys() - {"config"}):
                if yaml[key] != ckpt["config"][key]:
                    print(f"{key}={ckpt['config'][key]} is the run's own and stays; the file has {yaml[key]} "
                          f"(a key on the command line would change it)")
        return {**ckpt["config"], **now}, ckpt
    if asked["init_from"]:
        named = {**(yaml if "config" in given else {}), **given}
        ckpt = load_initial(asked["init_from"])
        ckpt = as_weights_of(named.get("model", ckpt["model"]), ckpt)
        stages = {"block_size", "dropout", *getattr(model_module(ckpt["model"]).Config, "STAGES", ())}
        kept = {"fast"} | (stages & yaml.keys() if "config" in given else set())
        fields_of_weights = {k: v for k, v in ckpt["model_config"].items() if k not in kept}
        return {**yaml, **fields_of_weights, "model": ckpt["model"]}, ckpt
    return yaml, None


def same_model(name, ckpt):
    if name != ckpt["model"]:
        raise UserError(f"model={name}, but the checkpoint holds model={ckpt['model']}")


def as_weights_of(name, ckpt):
    """A checkpoint as the start of model `name`: its own, or that of a model which it can convert (its Config.SOURCES),
    with the fields both have; make_model then converts the weights."""
    if name == ckpt["model"]:
        return ckpt
    config = model_module(name).Config
    if ckpt["model"] not in getattr(config, "SOURCES", ()):
        same_model(name, ckpt)
    shared = {f.name for f in fields(config)} & ckpt["model_config"].keys()
    for key, value in getattr(config, "RETIRED", {}).items():
        if ckpt["model_config"].get(key, value) != value:
            raise UserError(f"the checkpoint's model has {key}={ckpt['model_config'][key]}, which model={name} has not")
    return {**ckpt, "model": name, "model_config": {k: ckpt["model_config"][k] for k in shared}, "converts": True}


def run_folder(out_dir, run):
    """out_dir/run, where run must be a plain name, so that it cannot leave out_dir."""
    check_name(run, "run")
    return Path(out_dir) / run


def load_yaml(file):
    """The flat keys of a config file. UserError where it is missing or is not `key: value` lines."""
    try:
        text = io.StringIO(read_bytes(file).decode())
        values = OmegaConf.to_container(OmegaConf.load(text), resolve=False)
    except (OSError, UnicodeDecodeError) as e:
        raise UserError(f"config={file} cannot be read: {getattr(e, 'strerror', None) or 'not a text file'}") from e
    except Exception as e:      # the YAML parser has many kinds of errors, all of them about this file
        raise UserError(f"config={file} is not valid YAML: {' '.join(str(e).split())[:200]}") from e
    if not isinstance(values, dict) or any(isinstance(v, (dict, list)) for v in values.values()):
        raise UserError(f"config={file} must hold flat `key: value` lines")
    return values


def print_help(argv):
    """The usage, then every key with its default and meaning: the trainer's, then the chosen model's."""
    name = next((a.split("=", 1)[1] for a in argv if a.startswith("model=")), TrainConfig.model)
    print("\n".join([help_text(TrainConfig), "", f"keys of model={name}:", *key_lines(model_module(name).Config)]))


# ---------------------------------------------------------------------------------------------------------
# data: every batch is a pure function of (seed, step)

class TextBatches:
    """Micro-batches of a prepared data set. A window starts at any token; the windows of one optimizer step
    are drawn together, so who computes which of them changes nothing."""

    def __init__(self, folder, cfg, block_size):
        self.train, self.val = TokenData(folder, "train"), TokenData(folder, "val")
        self.seed, self.rows, self.accumulation = cfg.seed, cfg.batch_size, cfg.gradient_accumulation_steps
        self.length = block_size + 1            # inputs, and the targets one token later
        for split, data in (("train", self.train), ("val", self.val)):
            if data.n_windows(self.length) < 1:
                raise UserError(f"block_size={block_size} is too long for {folder}: its {split} text has "
                                f"{data.tokens} tokens")
        self.micro_batch(0, 0)                  # damaged token files are found before anything is written

    def micro_batch(self, step, index):
        """Micro-batch `index` (over all processes) of the update after `step`: inputs and targets, each
        (batch_size, block_size) int64."""
        rng = np.random.default_rng(np.random.SeedSequence([self.seed, step]))
        starts = rng.integers(0, self.train.n_windows(self.length), self.rows * self.accumulation)
        return self.cut(self.train, starts[index * self.rows:(index + 1) * self.rows])

    def val_batches(self, limit):
        """The validation text in windows side by side, each token predicted once (the last few may be left
        out); with a limit, `limit` micro-batches spread evenly over it. The same every time."""
        starts = np.arange(0, self.val.n_windows(self.length), self.length - 1)
        if limit and limit * self.rows < len(starts):
            starts = starts[np.linspace(0, len(starts) - 1, limit * self.rows).astype(np.int64)]
        return [starts[i:i + self.rows] for i in range(0, len(starts), self.rows)]

    def cut(self, data, starts):
        windows = torch.from_numpy(data.windows(starts, self.length))
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()

    def sizes(self):
        return f"{self.train.tokens:,} tokens to train on, {self.val.tokens:,} to validate"


def open_data(cfg):
    """The folder of cfg.dataset, prepared first where it is missing and can be made without a network; a task's
    name as it is. Under torchrun the first process prepares while the others wait to be joined."""
    if is_task(cfg.dataset):
        return cfg.dataset
    named = Path(cfg.data_dir) / cfg.dataset
    if NAME.fullmatch(cfg.dataset) and (named / "meta.json").exists():
        return named
    folder = Path(cfg.data_dir) / folder_name(cfg.dataset, cfg.tokenizer)
    if folder.exists() or int(os.environ.get("RANK", 0)) > 0:
        return folder
    if not is_offline(cfg.dataset):
        raise UserError(f"{folder} does not exist: make it with "
                        f"python prepare.py dataset={cfg.dataset} tokenizer={cfg.tokenizer} data_dir={cfg.data_dir}")
    return prepare(PrepareConfig(dataset=cfg.dataset, tokenizer=cfg.tokenizer, data_dir=cfg.data_dir))


# ---------------------------------------------------------------------------------------------------------
# checkpoints: one file, replaced in one move, verified when read

def fingerprint(value):
    """SHA-256 over a nested value: every tensor by dtype, shape and bytes, everything else by type and value.
    Raises TypeError for what a checkpoint may not hold."""
    sha = hashlib.sha256()

    def add(x):
        if isinstance(x, torch.Tensor):
            x = x.detach().cpu().contiguous()
            sha.update(f"tensor {x.dtype} {tuple(x.shape)} ".encode())
            sha.update(x.reshape(-1).view(torch.uint8).numpy().data)
        elif isinstance(x, dict):
            sha.update(f"dict {len(x)} ".encode())
            for key in sorted(x, key=repr):
                add(key)
                add(x[key])
        elif isinstance(x, (list, tuple)):
            sha.update(f"{type(x).__name__} {len(x)} ".encode())
            for item in x:
                add(item)
        elif isinstance(x, (str, bytes)):
            data = x.encode("utf-8", "surrogatepass") if isinstance(x, str) else x
            sha.update(f"{type(x).__name__} {len(data)} ".encode() + data)
        elif isinstance(x, float):
            sha.update(b"float " + struct.pack("<d", x))
        elif x is None or isinstance(x, (bool, int)):
            sha.update(f"{type(x).__name__} {x} ".encode())
        else:
            raise TypeError(f"a checkpoint may not hold a {type(x).__name__}")

    add(value)
    return sha.hexdigest()


def save_checkpoint(path, state):
    """Write state (tensors and plain values) to path so that at every moment path is whole: a temporary file,
    flushed to the disk, takes its place in one move. UserError where the disk refuses; path is untouched then."""
    path = Path(path)
    temporary = path.with_name(path.name + ".tmp")
    try:
        with open(temporary, "wb") as f:
            torch.save({**state, "sha256": fingerprint(state)}, f)
            f.flush()
            os.fsync(f.fileno())
        os.replace(temporary, path)
        sync_folder(path.parent)
    except (OSError, RuntimeError) as e:        # torch wraps a failed write in a RuntimeError
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        reason = e.strerror if isinstance(e, OSError) and e.strerror else str(e).splitlines()[0]
        kept = "; the last good checkpoint is untouched" if path.exists() else ""
        raise UserError(f"could not save {path}: {reason}{kept}") from e


def load_checkpoint(path):
    """The state saved at path, on the CPU. UserError where it is missing, damaged, from elsewhere or from
    another version: the zip's own checksums, then a restricted unpickler that runs nothing, then the SHA-256
    over all contents must agree."""
    path = Path(path)
    if not path.is_file():
        there = "is not a regular file" if path.exists() else "does not exist: no checkpoint there"
        raise UserError(f"{path} {there}")
    try:
        check_zip(path)
        with warnings.catch_warnings(action="ignore"):
            state = torch.load(path, map_location="cpu", weights_only=True)
        whole = state.pop("sha256") == fingerprint(state) and state["format"] == 1
    except Exception as e:      # a damaged file can fail anywhere inside zipfile and torch, in any way
        raise UserError(f"{path} is damaged or is not a checkpoint of this project") from e
    if not whole:
        raise UserError(f"{path} is damaged: its contents do not match its checksum")
    try:
        check_state(state)
    except (UserError, ValueError) as e:
        raise UserError(f"{path} is not a checkpoint of a run: {e}") from e
    return state


FIELDS = {"model": str, "config": dict, "model_config": dict, "tokenizer": dict, "weights": dict,
          "optimizers": list, "step": int, "evaluated": int, "best_ce": float, "rng": dict}


def check_state(state):
    """ValueError or UserError where a checkpoint lacks a field, or its weights are not those of the
    model that model_config describes."""
    for name, kind in FIELDS.items():
        if type(state.get(name)) is not kind:
            wrong = f"no {kind.__name__}" if name in state else "missing"
            raise ValueError(f"its {name} is {wrong}")
    for name in ("step", "evaluated"):
        if not 0 <= state[name] < 2 ** 53:
            raise ValueError(f"its {name} is not a number of steps")
    if type(state["config"].get("dataset")) is not str:
        raise ValueError("its config names no dataset")
    module = model_module(state["model"])
    drop_retired_keys(module.Config, state)
    cfg, weights = typed_config(module.Config, {}, state["model_config"]), state["weights"]
    if not all(type(name) is str and isinstance(w, torch.Tensor) and w.isfinite().all()
               for name, w in weights.items()):
        raise ValueError("its weights are not named tensors of finite numbers")
    if cfg.n_layer // getattr(cfg, "n_loop", 1) > len(weights):
        raise ValueError(f"its weights are {len(weights)}, too few for n_layer={cfg.n_layer}")
    model = shapes_only(module.Model, cfg, trained_on(state))
    shape = lambda w: tuple(w.shape) if w.is_floating_point() else ("integers", *w.shape)
    wanted = {n: shape(w) for n, w in model.state_dict().items()}
    found = {n: shape(w) for n, w in weights.items()}
    # a buffer may be younger than the checkpoint: its model knows what to take for it
    younger = {n for n, _ in model.named_buffers()} - found.keys()
    for name in sorted(wanted.keys() - younger | found.keys()):
        if wanted.get(name) != found.get(name):
            raise ValueError(f"its weight {name} is {found.get(name, 'missing')}, the model's "
                             f"{wanted.get(name, 'missing')}")


def drop_retired_keys(config, state):
    """Take out of a checkpoint the keys that its model no longer has: config.RETIRED names each with the only value
    that is left of it. ValueError where the checkpoint has another."""
    for key, value in getattr(config, "RETIRED", {}).items():
        for keys in (state["config"], state["model_config"]):
            if keys.pop(key, value) != value:
                raise ValueError(f"its {key} is no longer supported, only {key}={value} is")


def check_zip(path):
    """Raise where the archive's checksums fail or its directory claims more than the file holds (torch would
    try to allocate what is claimed)."""
    size = path.stat().st_size
    with zipfile.ZipFile(path) as z:
        for info in z.infolist():
            if info.compress_type != zipfile.ZIP_STORED or info.file_size > size:
                raise zipfile.BadZipFile(info.filename)
        if z.testzip() is not None:
            raise zipfile.BadZipFile("checksum")


def checkpoint_file(path):
    """A run folder's ckpt.pt, or the file itself."""
    return Path(path) / "ckpt.pt" if Path(path).is_dir() else Path(path)


def build_model(ckpt, **overrides):
    """The model of a loaded checkpoint with its weights, on the CPU; overrides replace Config fields."""
    module = model_module(ckpt["model"])
    try:
        model = module.Model(module.Config(**{**ckpt["model_config"], **overrides}))
        fit_head(model, trained_on(ckpt)).load_state_dict(ckpt["weights"])
    except (TypeError, ValueError, RuntimeError) as e:
        reason = str(e).splitlines()[-1].strip()
        raise UserError(f"the checkpoint does not fit model_{ckpt['model']}.py: {reason}") from e
    model.set_step(ckpt["step"])
    return model


def trained_on(ckpt):
    """The data set of a checkpoint's run; "" where the weights come from elsewhere."""
    return ckpt.get("config", {}).get("dataset", "")


def load_run(path, device="cpu", **overrides):
    """(model in eval mode, tokenizer, checkpoint) of a run folder or checkpoint file."""
    ckpt = load_checkpoint(checkpoint_file(path))
    return build_model(ckpt, **overrides).to(device).eval(), load_tokenizer(ckpt["tokenizer"]), ckpt


def load_initial(path, key="init_from"):
    """What init_from or teacher names, in a checkpoint's form: a run folder, a checkpoint, or Hugging Face weights."""
    if Path(path).is_file() or (Path(path) / "ckpt.pt").is_file():
        return load_checkpoint(checkpoint_file(path))
    gpt = model_module("gpt")
    try:
        folder = pretrained_folder(path)
        blank = shapes_only(gpt.Model, gpt.Config(**llama_config(folder)))
        check_fits({f"{key}={path}": sum(p.nbytes for p in blank.parameters())})
        model = from_pretrained(folder)
    except ValueError as e:
        raise UserError(f"{key}={path}: {e}") from e
    return {"model": "gpt", "model_config": asdict(model.cfg), "weights": model.state_dict(), "step": 0}


# ---------------------------------------------------------------------------------------------------------
# optimizers

def parameter_groups(model, cfg):
    """A model's own groups where param_groups(cfg) gives some, else the common rule: matrices and embeddings decay,
    vectors do not, and with optimizer=muon the matrices inside the blocks (all but wte and head) go to Muon.
    Each group names its optimizer under "kind". Every parameter must stand in exactly one group."""
    groups = model.param_groups(cfg) if hasattr(model, "param_groups") else None
    if groups is None:
        named = list(model.named_parameters())
        muon = [p for n, p in named
                if cfg.optimizer == "muon" and p.dim() == 2 and not n.startswith(("wte.", "head."))]
        taken = {id(p) for p in muon}
        adamw = dict(kind="adamw", lr=cfg.learning_rate, betas=(cfg.beta1, cfg.beta2))
        groups = [dict(kind="muon", params=muon, lr=cfg.muon_learning_rate, momentum=cfg.muon_momentum,
                       weight_decay=cfg.weight_decay),
                  dict(adamw, params=[p for _, p in named if p.dim() >= 2 and id(p) not in taken],
                       weight_decay=cfg.weight_decay),
                  dict(adamw, params=[p for _, p in named if p.dim() < 2], weight_decay=0.0)]
    groups = [g for g in groups if g["params"]]
    counted = sorted(id(p) for g in groups for p in g["params"])
    assert counted == sorted(id(p) for p in model.parameters()), "a parameter stands in no group, or in two"
    return groups


class KeepFloat32(TorchFunctionMode):
    """Inside, .bfloat16() of a tensor on a CPU is a float32 copy."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.bfloat16 and args[0].device.type == "cpu":
            return args[0].to(torch.float32, copy=True)
        return func(*args, **(kwargs or {}))


class Muon(torch.optim.Muon):
    """torch's Muon, but on a CPU its Newton-Schulz iteration runs in float32: many CPUs have no
    instructions for bfloat16 and take twenty times as long."""

    def step(self, closure=None):
        with KeepFloat32():
            return super().step(closure)


def make_optimizers(model, cfg):
    """The optimizers of all groups. group["peak_lr"] and group["peak_decay"] keep each group's learning rate and weight
    decay before the schedules."""
    optimizers = []
    for kind, cls, extra in (("adamw", torch.optim.AdamW, {"fused": True}), ("muon", Muon, {})):
        groups = [{**{k: v for k, v in g.items() if k != "kind"}, "peak_lr": g["lr"]}
                  for g in parameter_groups(model, cfg) if g["kind"] == kind]
        if groups:
            optimizers.append(cls(groups, **extra))
            for group in optimizers[-1].param_groups:
                group["peak_decay"] = group["weight_decay"]
    return optimizers


def load_optimizers(optimizers, states):
    """Restore the optimizers' moments, but keep the settings they were made with: a key changed on resume holds."""
    if len(optimizers) != len(states):
        raise UserError("resume: the checkpoint was made with another optimizer")
    for optimizer, state in zip(optimizers, states):
        settings = [{k: v for k, v in g.items() if k not in ("params", "lr")} for g in optimizer.param_groups]
        try:
            optimizer.load_state_dict(state)
            check_moments(optimizer)
        except (ValueError, KeyError, TypeError, AttributeError, IndexError, RuntimeError) as e:
            raise UserError(f"resume: the optimizer's state does not fit: {type(e).__name__} "
                            f"{first_line(e)}") from e
        for group, setting in zip(optimizer.param_groups, settings):
            group.update(setting)


def check_moments(optimizer):
    """ValueError where an optimizer has loaded what it would not make: moments are as their parameter."""
    muon = isinstance(optimizer, torch.optim.Muon)
    names = {"momentum_buffer"} if muon else {"step", "exp_avg", "exp_avg_sq"}
    for p, state in optimizer.state.items():
        for name, x in state.items():
            if x.shape != (() if name == "step" else p.shape) or not x.is_floating_point():
                raise ValueError(f"{name} is {x.dtype} {tuple(x.shape)}")
        if state.keys() != names:
            raise ValueError(f"a parameter has {', '.join(map(str, state)) or 'nothing'}")


def lr_factor(step, cfg):
    """The share of the peak learning rate that the update after `step` completed steps uses."""
    if cfg.lr_schedule != "linear" and step < cfg.warmup_steps:
        return (step + 1) / (cfg.warmup_steps + 1)
    if cfg.lr_schedule == "cosine":
        progress = (step - cfg.warmup_steps) / max(1, cfg.max_steps - cfg.warmup_steps)
        share = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    else:
        cooldown = cfg.cooldown_frac * cfg.max_steps
        share = min(1.0, (cfg.max_steps - step) / cooldown) if cooldown else 1.0
    return cfg.min_lr_frac + (1 - cfg.min_lr_frac) * share


def set_schedules(group, step, cfg):
    """Set what a group of parameters uses for the update after `step` completed steps."""
    group["lr"] = group["peak_lr"] * lr_factor(step, cfg)
    if cfg.decay_schedule == "linear":
        group["weight_decay"] = group["peak_decay"] * (1 - step / cfg.max_steps)
    if "momentum" in group and cfg.muon_momentum_steps:
        share = min(1.0, step / cfg.muon_momentum_steps)
        group["momentum"] = 0.85 + share * (cfg.muon_momentum - 0.85)


# ---------------------------------------------------------------------------------------------------------
# device and processes

PEAK_FLOPS = {"A100": 312e12, "H100": 989e12, "H200": 989e12, "H20": 148e12, "B200": 2250e12, "L40S": 362e12,
              "L4": 121e12, "A10G": 70e12, "A10": 125e12, "4090": 165e12, "3090": 71e12}   # dense bfloat16


def pick_device(name, world=1):
    """The torch device of a device= key; of `world` processes on CUDA each takes the one of its LOCAL_RANK.
    UserError where this machine has no such device."""
    if name == "auto":
        mps = torch.backends.mps.is_available() and world == 1      # gloo cannot reach mps
        name = "cuda" if torch.cuda.is_available() else "mps" if mps else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as e:
        raise UserError(f"device={name} is not on this machine (device=auto finds one)") from e
    if world > 1 and (device.type == "mps" or device.index is not None):
        raise UserError(f"device={name} cannot be shared by {world} processes: device=cuda or device=cpu can")
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
    count = {"cpu": 1, "cuda": torch.cuda.device_count(), "mps": int(torch.backends.mps.is_available())}
    if (device.index or 0) >= count.get(device.type, 0):
        raise UserError(f"device={name} is not on this machine: there is no {device} (device=auto finds one)")
    return device


def device_name(device):
    """What to call the device in a line of print."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type}, {torch.get_num_threads()} threads"


def can_compile(device):
    """Whether torch.compile can make kernels for this device: CUDA with triton, on a chip that triton supports."""
    return (device.type == "cuda" and importlib.util.find_spec("triton") is not None
            and torch.cuda.get_device_capability(device) >= (7, 0))


class Processes:
    """Who takes part: this process's rank, how many there are, and its device."""

    def __init__(self, cfg):
        self.world, self.rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
        self.master = self.rank == 0
        self.device = pick_device(cfg.device, self.world)
        if cfg.gradient_accumulation_steps % self.world and not cfg.eval_only:
            raise UserError(f"gradient_accumulation_steps={cfg.gradient_accumulation_steps} is not divisible by "
                            f"the {self.world} processes that share it")

    def join(self):
        """Meet the other processes."""
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
            torch.set_float32_matmul_precision("high")
        if self.world > 1:
            cuda = self.device.type == "cuda"
            dist.init_process_group("nccl" if cuda else "gloo", device_id=self.device if cuda else None)

    def sum(self, *values):
        """Each number summed over all processes, as floats."""
        total = torch.tensor(values, dtype=torch.float64, device=self.device if self.device.type == "cuda" else "cpu")
        if self.world > 1:
            dist.all_reduce(total)
        return total.tolist()

    def leave(self):
        """Part after success. Not called on errors: the others may never come, and torchrun ends them."""
        if self.world > 1:
            dist.barrier()
            dist.destroy_process_group()


class StopRequest:
    """SIGTERM and SIGINT ask for a stop after the current step. A second Ctrl-C is obeyed at once, unless other
    processes take part; a second SIGTERM is not (torchrun and schedulers send several)."""

    def __init__(self, world):
        self.impatient = world == 1

    def __enter__(self):
        self.asked, self.previous = False, {}
        for sig in (signal.SIGTERM, signal.SIGINT):
            self.previous[sig] = signal.signal(sig, self.ask)
        return self

    def ask(self, sig, frame):
        if self.asked and sig == signal.SIGINT and self.impatient:
            raise KeyboardInterrupt
        self.asked = True

    def __exit__(self, *_):
        for sig, handler in self.previous.items():
            signal.signal(sig, handler)


# ---------------------------------------------------------------------------------------------------------
# the run

class Trainer:
    """A model, its optimizers and its data, and the loop that brings them from one step to the next."""

    def __init__(self, cfg, model, tokenizer, batches, procs, ckpt=None, teacher=None):
        self.cfg, self.model, self.tokenizer, self.batches, self.procs = cfg, model, tokenizer, batches, procs
        self.teacher = teacher
        self.task = is_task(cfg.dataset)
        if teacher is not None or self.task:
            model.max_logits = math.inf                 # the logits are needed, so the loss is not computed in pieces
        self.folder = run_folder(cfg.out_dir, cfg.run)
        self.optimizers = make_optimizers(model, cfg)
        self.step, self.evaluated, self.best_ce = 0, 0, math.inf
        if ckpt is not None:
            self.restore(ckpt)
        on = can_compile(procs.device) if cfg.compile == "auto" else cfg.compile == "true"
        self.forward = torch.compile(model) if on else model
        if procs.world > 1:
            self.forward = torch.nn.parallel.DistributedDataParallel(self.forward)
        mixed = cfg.dtype == "bfloat16" or (cfg.dtype == "auto" and procs.device.type == "cuda")
        self.autocast = lambda: torch.autocast(procs.device.type, torch.bfloat16, enabled=mixed)
        self.log = None

    def state(self):
        """All that a resumed run needs, tensors and plain values only. (The trainer itself draws no random number
        that depends on the RNG's state; a model that does finds it restored.)"""
        cuda = self.procs.device.type == "cuda"
        return {"format": 1, "model": self.cfg.model, "config": {**asdict(self.cfg), **asdict(self.model.cfg)},
                "model_config": asdict(self.model.cfg), "tokenizer": self.tokenizer.to_dict(),
                "weights": dict(self.model.state_dict()), "optimizers": [o.state_dict() for o in self.optimizers],
                "step": self.step, "evaluated": self.evaluated, "best_ce": self.best_ce,
                "rng": {"cpu": torch.get_rng_state(), "cuda": torch.cuda.get_rng_state() if cuda else None}}

    def restore(self, ckpt):
        load_optimizers(self.optimizers, ckpt["optimizers"])
        self.step, self.evaluated, self.best_ce = ckpt["step"], ckpt["evaluated"], ckpt["best_ce"]
        try:
            torch.set_rng_state(ckpt["rng"]["cpu"])
            if ckpt["rng"]["cuda"] is not None and self.procs.device.type == "cuda":
                torch.cuda.set_rng_state(ckpt["rng"]["cuda"])
        except (KeyError, TypeError, AttributeError, RuntimeError) as e:
            raise UserError(f"resume: the checkpoint's rng is wrong: {type(e).__name__} "
                            f"{first_line(e)}") from e

    def save(self, name):
        if self.procs.master:
            save_checkpoint(self.folder / name, self.state())

    def seed_forward(self, index):
        """Dropout and any other random number of a forward depend on (seed, step, micro-batch) alone."""
        words = np.random.SeedSequence([self.cfg.seed, self.step, index, 1]).generate_state(2, np.uint32)
        torch.manual_seed(int(words[0]) << 32 | int(words[1]))

    def train_step(self, stop):
        """One optimizer step over the global batch. Returns what to log, and whether any process was asked to
        stop. UserError where the loss or a gradient is not finite: on every process, before any weight moves."""
        cfg, procs = self.cfg, self.procs
        self.model.train()
        self.model.set_step(self.step)
        share = cfg.gradient_accumulation_steps // procs.world
        indices = range(procs.rank * share, (procs.rank + 1) * share)
        micro = [self.batches.micro_batch(self.step, i) for i in indices]
        counts = [int((y != -1).sum()) for _, y in micro]
        total = max(1.0, procs.sum(sum(counts))[0])
        all_rows = cfg.batch_size * cfg.gradient_accumulation_steps
        logged = {}
        for n, (index, (x, y), count) in enumerate(zip(indices, micro, counts)):
            self.seed_forward(index)
            last = n == share - 1
            with contextlib.nullcontext() if procs.world == 1 or last else self.forward.no_sync():
                with self.autocast():
                    x, y = self.to_device(x), self.to_device(y)
                    logits, loss, aux = self.forward(x, y)
                    if self.teacher is not None:
                        loss, aux = self.distil(x, y, logits, loss, aux)
                # DDP averages over processes, so each loss counts `world` times its share of the tokens
                (loss * (count / total * procs.world)).backward()
            for key, value in aux.items():
                logged[key] = logged.get(key, 0.0) + value.detach() * (count / total)
            if self.task:
                tokens, rows = count_right(logits, y)
                for key, share in (("token_accuracy", tokens / total), ("sequence_accuracy", rows / all_rows)):
                    logged[key] = logged.get(key, 0.0) + share
        return self.update(logged, stop)

    def distil(self, x, y, logits, loss, aux):
        """The loss of a model that learns from a teacher too: ce_weight times its own, and kd_weight times the KL
        divergence of its distribution from the teacher's at kd_temperature t, mean over the counted targets, times t^2
        (Hinton et al. 2015), so that the temperature does not change the gradient's size."""
        t, counted = self.cfg.kd_temperature, y != -1
        with torch.no_grad():
            p = (self.teacher(x)[0] / t).log_softmax(-1)                        # (B, T, V)
        kl = (p.exp() * (p - (logits / t).log_softmax(-1))).sum(-1)             # (B, T)
        kd = t ** 2 * (kl * counted).sum() / counted.sum().clamp(min=1)
        return self.cfg.ce_weight * loss + self.cfg.kd_weight * kd, {**aux, "kd": kd.detach()}

    def update(self, logged, stop):
        """Clip, agree with the other processes on the losses and on stopping, and move the weights, unless
        something is not finite."""
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.cfg.grad_clip or math.inf)
        *values, asked = self.procs.sum(*(float(v) for v in logged.values()), float(stop.asked))
        logged = dict(zip(logged, values), grad_norm=float(norm))
        bad = [k for k in ("ce", "grad_norm") if not math.isfinite(logged[k])]
        if bad:
            kept = "ckpt.pt is kept" if (self.folder / "ckpt.pt").exists() else "no checkpoint was saved yet"
            raise UserError(f"{bad[0]} is {logged[bad[0]]} at step {self.step}: stopped before the update, {kept}")
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                set_schedules(group, self.step, self.cfg)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        if hasattr(self.model, "end_step"):
            self.model.end_step(self.procs.sum)
        logged["lr"] = self.cfg.learning_rate * lr_factor(self.step, self.cfg)
        self.step += 1
        return logged, asked > 0

    def to_device(self, x):
        if self.procs.device.type == "cuda":
            return x.pin_memory().to(self.procs.device, non_blocking=True)
        return x.to(self.procs.device)

    @torch.no_grad()
    def evaluate(self):
        """Mean cross-entropy over the validation text in nats per token, and bits per byte of text; of a task the
        shares of scored tokens, and of rows, that are right. Touches no random number and no weight. The model
        computes its decoding function (eval mode). Where it can estimate that by its training path, it does so on all
        batches and computes the exact figures, by which best.pt is chosen, on exact_batches of them; val_gap is what
        the exact cross-entropy is above the estimate on the batches that have both."""
        self.model.eval()
        self.model.set_step(self.step)
        batches = self.batches.val_batches(self.cfg.eval_batches)
        exact = self.exact_batches(len(batches))
        # nats, targets, rows; of a task right targets, wholly right rows; of estimates nats, targets, gap in nats; then
        # what else the model tells of itself
        more = getattr(self.model, "eval_metrics", ())
        sums = np.zeros(8 + len(more))
        for i in range(self.procs.rank, len(batches), self.procs.world):
            x, y = map(self.to_device, self.batches.cut(self.batches.val, batches[i]))
            count = int((y != -1).sum())
            with self.autocast():
                estimate = self.model.estimate(x, y) if hasattr(self.model, "estimate") else None
                logits, _, aux = self.model(x, y) if i in exact or estimate is None else (None, None, None)
            estimated = None if estimate is None else float(estimate) * count
            if estimate is not None:
                sums[5:7] += estimated, count
            if logits is not None:
                nats, right = float(aux["ce"]) * count, (count_right(logits, y) if self.task else (0, 0))
                sums[:5] += nats, count, len(y), *map(int, right)
                sums[8:] += [float(aux[name]) * count for name in more]
                sums[7] += 0 if estimate is None else nats - estimated
        sums = self.procs.sum(*sums)
        told = {name: x / sums[1] for name, x in zip(more, sums[8:])}
        if hasattr(self.model, "end_evaluation"):       # what is no mean over batches
            told |= self.model.end_evaluation(self.procs.sum)
        return self.evaluation(*sums[:8]) | {f"val_{name}": x for name, x in told.items()}

    def exact_batches(self, n):
        """Which of n validation batches are evaluated exactly: exact_batches of them, spread evenly, or all."""
        wanted = self.cfg.exact_batches
        return set(np.linspace(0, n - 1, wanted).astype(int).tolist()) if 0 < wanted < n else set(range(n))

    def evaluation(self, nats, tokens, rows, right_tokens, right_rows, estimated, estimated_tokens, gap):
        """The sums over all processes as figures by name."""
        ce = nats / tokens
        found = {"val_ce": ce}
        if self.task:
            found |= {"val_token_accuracy": right_tokens / tokens, "val_sequence_accuracy": right_rows / rows}
        else:
            found["val_bpb"] = bits_per_byte(ce, self.batches.val)
        if estimated_tokens:
            found |= {"val_ce_estimate": estimated / estimated_tokens, "val_gap": gap / tokens}
        return found

    def save_and_evaluate(self, final=False):
        """The state is safe on the disk before the evaluation runs. A run that is stopped in between evaluates
        again when it is resumed (its checkpoint was evaluated at an earlier step), with the same result."""
        self.save("ckpt.pt")
        result = self.evaluate()
        self.evaluated = self.step
        best = result["val_ce"] < self.best_ce
        self.best_ce = min(self.best_ce, result["val_ce"])
        if best:
            self.save("best.pt")
        if self.log:
            self.log.write(self.step, result)
            self.log.plot(final)
            self.log.start_lap()                # evaluations are not training time
            self.log.say(f"step {self.step}: {in_words(result)}{' (best)' if best else ''}")

    def run(self):
        """Train to max_steps. Returns True when done, False when stopped by a signal (the state is saved)."""
        cfg = self.cfg
        with StopRequest(self.procs.world) as stop:
            while self.step < cfg.max_steps:
                if self.evaluated < self.step and self.step % cfg.eval_interval == 0:
                    self.save_and_evaluate()
                logged, asked = self.train_step(stop)
                if cfg.keep_interval and self.step % cfg.keep_interval == 0:
                    self.save(f"step_{self.step}.pt")
                if self.log:
                    self.log.step(self.step, logged, force=self.step % cfg.log_interval == 0 or asked)
                if asked:
                    self.save("ckpt.pt")
                    return False
            self.save_and_evaluate(final=True)
        return True


def in_words(result):
    """The line that tells what evaluate returned."""
    words = f"val ce {result['val_ce']:.4f} nats per token, "
    if "val_bpb" in result:
        words += f"{result['val_bpb']:.4f} bits per byte"
    else:
        words += (f"token accuracy {result['val_token_accuracy']:.3f}, "
                  f"sequence accuracy {result['val_sequence_accuracy']:.3f}")
    if "val_gap" in result:
        words += (f"; by the training path {result['val_ce_estimate']:.4f} on all batches, from which the exact figure "
                  f"differs by {result['val_gap']:+.4f} on those that have both")
    if "val_ce_topk" in result:
        words += f"; choosing among all tokens it would be {result['val_ce_topk']:.4f}"
    depths = {k[len("val_depth"):]: x for k, x in result.items() if k.startswith("val_depth")}
    return words + "".join(f"{', ' if n else '; depth '}{d}: {x:.0%}" for n, (d, x) in enumerate(depths.items()))


def bits_per_byte(ce, data):
    """Nats per token -> bits per byte of the text of `data`."""
    return ce / math.log(2) * data.tokens / data.bytes


class Log:
    """log.jsonl, the progress bar, the plot, and the switches for wandb and TensorBoard; first process only.

    log.jsonl holds one object a line. A resumed run drops the lines after its checkpoint (a killed run wrote
    them, and they come again) and counts seconds on from the last line kept.
    """

    def __init__(self, trainer):
        cfg, self.trainer = trainer.cfg, trainer
        makers = ((cfg.wandb, wandb_sink), (cfg.tensorboard, tensorboard_sink))
        self.sinks = [make(cfg, trainer) for on, make in makers if on]
        self.path = trainer.folder / "log.jsonl"
        self.before = self.restart(trainer.step, trainer.evaluated)
        self.start = self.plotted = time.perf_counter()
        self.tokens_per_step = tokens_per_step(cfg, trainer.model)
        self.flops_per_token = trainer.model.flops_per_token()
        self.peak = peak_flops(trainer.procs.device)
        self.bar = tqdm(total=cfg.max_steps, initial=trainer.step, unit="step", disable=None, dynamic_ncols=True)
        self.start_lap()

    def restart(self, step, evaluated):
        """Keep the lines up to the checkpoint; returns the seconds they count."""
        rows = read_log(self.path) if step else []
        kept = [row for row in rows if row["step"] <= (evaluated if "val_ce" in row else step)]
        temporary = self.path.with_name("log.jsonl.tmp")
        with writing(self.path):
            temporary.write_text("".join(json.dumps(row) + "\n" for row in kept))
            os.replace(temporary, self.path)
        return kept[-1]["seconds"] if kept else 0.0

    def start_lap(self):
        self.lap, self.lap_step = time.perf_counter(), self.trainer.step

    def say(self, text):
        with self.bar.external_write_mode(file=sys.stdout):
            print(text, flush=True)

    def write(self, step, values):
        seconds = self.before + time.perf_counter() - self.start
        tokens = step * self.tokens_per_step
        row = {"step": step, "tokens": tokens, "flops": tokens * self.flops_per_token, "seconds": round(seconds, 3),
               **values}
        with writing(self.path), open(self.path, "a") as f:
            f.write(json.dumps(row) + "\n")
        for sink in self.sinks:
            sink(step, values)

    def step(self, step, logged, force):
        """Count one step; with force write a line. tokens/s is that of the steps since the last line."""
        self.bar.update()
        if not force:
            return
        rate = (step - self.lap_step) * self.tokens_per_step / (time.perf_counter() - self.lap)
        self.start_lap()
        bpb = {} if self.trainer.task else {"bpb": bits_per_byte(logged["ce"], self.trainer.batches.train)}
        values = {**logged, **bpb, "tokens_per_second": round(rate, 1)}
        if self.peak:
            values["mfu"] = rate * self.flops_per_token / (self.peak * self.trainer.procs.world)
        self.write(step, values)
        self.bar.set_postfix_str(f"ce {logged['ce']:.3f}, {rate / 1000:.1f}k tokens/s")

    def plot(self, final):
        """curves.png: training and validation loss against steps; drawn at the end, and once a minute before."""
        if final or time.perf_counter() - self.plotted > 60:
            with writing(self.path.with_name("curves.png")):
                draw_curves(read_log(self.path), self.path.with_name("curves.png"), self.trainer.cfg.run)
            self.plotted = time.perf_counter()


@contextlib.contextmanager
def writing(path):
    """An OSError inside is a UserError that names path: a full disk is told in one line."""
    try:
        yield
    except OSError as e:
        raise UserError(f"could not write {path}: {e.strerror or e}") from e


def save_picture(fig, key, file, dpi):
    """Write a matplotlib figure to file, which `key` names on the command line."""
    with writing(file):
        try:
            fig.savefig(file, dpi=dpi, bbox_inches="tight")
        except ValueError as e:         # an ending that is no picture
            raise UserError(f"{key}={file}: {str(e).splitlines()[0]}") from e


def read_log(path):
    """The objects of a log.jsonl; a line cut short by a crash is left out."""
    rows = []
    try:
        lines = read_bytes(path).decode(errors="replace").splitlines() if path.exists() else []
    except OSError as e:
        raise UserError(f"{path} cannot be read: {e.strerror}") from e
    for line in lines:
        with contextlib.suppress(json.JSONDecodeError):
            rows.append(json.loads(line))
    return [row for row in rows if isinstance(row, dict) and {"step", "seconds"} <= row.keys()]


def draw_curves(rows, path, title):
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    fig, ax = plt.subplots(figsize=(7, 4.5))
    for key, label, style in (("ce", "training", "-"), ("val_ce", "validation", "o-")):
        points = [(row["step"], row[key]) for row in rows if key in row]
        if points:
            ax.plot(*zip(*points), style, label=label, markersize=3, linewidth=1)
            ax.legend()
    ax.set(xlabel="step", ylabel="cross-entropy (nats per token)", title=title)
    ax.grid(alpha=0.3)
    fig.savefig(path, dpi=120, bbox_inches="tight")
    plt.close(fig)


def wandb_sink(cfg, trainer):
    import wandb
    run = wandb.init(project="nanorecur", name=cfg.run, dir=trainer.folder,
                     config={**asdict(cfg), **asdict(trainer.model.cfg)})
    return lambda step, values: run.log(values, step=step)


def tensorboard_sink(cfg, trainer):
    from torch.utils.tensorboard import SummaryWriter
    writer = SummaryWriter(trainer.folder)

    def sink(step, values):
        for key, value in values.items():
            writer.add_scalar(key, value, step)
        writer.flush()
    return sink


def peak_flops(device):
    """Dense bfloat16 FLOP/s of a known GPU, else None."""
    words = device_name(device).replace("-", " ").split() if device.type == "cuda" else []
    return next((PEAK_FLOPS[word] for word in words if word in PEAK_FLOPS), None)


# ---------------------------------------------------------------------------------------------------------
# from arguments to a run

def sized(cfg, model_fields, given, vocab_size):
    """The model's class and its Config; vocab_size is the data's, where no other is given."""
    module = model_module(cfg.model)
    if "vocab_size" not in given:
        model_fields = {**model_fields, "vocab_size": vocab_size}
    return module.Model, module.Config(**model_fields)


def make_model(cfg, model_fields, ckpt, vocab_size, given):
    """The model, freshly initialised from the seed or with the checkpoint's weights. vocab_size is the data's;
    a larger one may be asked for. Finetuning and evaluating may change the sequence length, resuming may not."""
    module = model_module(cfg.model)
    model_class, model_cfg = sized(cfg, model_fields, given, vocab_size)
    if model_cfg.vocab_size < vocab_size:
        raise UserError(f"vocab_size={model_cfg.vocab_size} is less than the data's {vocab_size} tokens")
    torch.manual_seed(cfg.seed)
    if ckpt is None:
        return fit_head(model_class(model_cfg), cfg.dataset)
    if (trained_on(ckpt) == COMPRESSION) != (cfg.dataset == COMPRESSION):
        raise UserError(f"dataset={cfg.dataset}, but the weights are of {trained_on(ckpt) or 'another source'}: only "
                        f"{COMPRESSION} has a decoder for a head")
    free = {"fast", "dropout", *getattr(module.Config, "SAME_FUNCTION", ())}
    if not cfg.resume:
        free |= {"block_size", *getattr(module.Config, "STAGES", ())}
    for key, old in ckpt["model_config"].items():
        if key not in free and asdict(model_cfg).get(key) != old:
            raise UserError(f"{key}={asdict(model_cfg).get(key)}, but the checkpoint's model has {key}={old}")
    if not ckpt.get("converts"):
        return build_model({**ckpt, "model_config": asdict(model_cfg)})
    model = fit_head(model_class(model_cfg), cfg.dataset)
    try:
        module.convert(model, ckpt["weights"])
    except ValueError as e:
        raise UserError(f"init_from={cfg.init_from}: {e}") from e
    return model


def load_teacher(cfg, model, data):
    """The model that teacher= names, in eval mode; None where there is none to learn from. UserError where it does not
    speak of the same tokens, or takes in fewer of them."""
    if not cfg.teacher or cfg.eval_only:
        return None
    ckpt = load_initial(cfg.teacher, "teacher")
    check_tokenizer(ckpt, data, f"teacher={cfg.teacher}")
    teacher = build_model(ckpt).eval().requires_grad_(False)
    size, limit = teacher.cfg.vocab_size, teacher.context_limit
    if size != model.cfg.vocab_size:
        raise UserError(f"teacher={cfg.teacher} has vocab_size={size}, the model {model.cfg.vocab_size}")
    if limit is not None and limit < model.cfg.block_size:
        raise UserError(f"teacher={cfg.teacher} takes {limit} tokens, block_size={model.cfg.block_size} is more")
    return teacher


def check_run(cfg, folder):
    """UserError where the run would replace another one unasked, or needs a package that is not there."""
    if (folder / "ckpt.pt").exists() and not (cfg.resume or cfg.overwrite or cfg.eval_only):
        raise UserError(f"{folder} holds a checkpoint: resume=true goes on from it, overwrite=true replaces it, "
                        f"run=NAME starts another run")
    for package in ("wandb", "tensorboard"):
        if getattr(cfg, package) and importlib.util.find_spec(package) is None:
            raise UserError(f"{package}=true needs the package {package}: pip install {package}")


def claim_folder(cfg, folder):
    """Make the run's folder ready for writing: the last thing before training, when nothing else can be refused."""
    with writing(folder):
        missing = [path for path in (folder, *folder.parents) if not path.exists()]
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError:
            for path in missing:            # leave none behind of those that were made
                with contextlib.suppress(OSError):
                    path.rmdir()
            raise
        for name in ("ckpt.pt", "best.pt", "log.jsonl", "curves.png"):
            (folder / f"{name}.tmp").unlink(missing_ok=True)        # of a run that was killed while saving
            if cfg.overwrite:
                (folder / name).unlink(missing_ok=True)


def check_tokenizer(ckpt, data, what):
    """A model's ids mean what its tokenizer says: weights and data must share it."""
    if ckpt is not None and "tokenizer" in ckpt and ckpt["tokenizer"] != data.tokenizer.to_dict():
        raise UserError(f"{what} was trained with tokenizer {ckpt['tokenizer'].get('kind')}, which is not the "
                        f"one of the data set ({data.tokenizer.kind}, {data.vocab_size} tokens)")


def check_no_tokenizer(cfg, given):
    """A tokenizer that a file names for text is nothing to a task; one that the command line asks for is an error."""
    if given.get("tokenizer", TrainConfig.tokenizer) != TrainConfig.tokenizer:
        raise UserError(f"tokenizer={given['tokenizer']}, but dataset={cfg.dataset} is made of token ids: leave out "
                        f"tokenizer")


def setup(argv):
    """Check everything, then build the trainer. Nothing is written before all checks have passed, but for a
    data set that is made on the way."""
    cfg, model_fields, ckpt, given = read_config(argv)
    folder = run_folder(cfg.out_dir, cfg.run)
    check_run(cfg, folder)
    procs = Processes(cfg)
    check_run_fits(cfg, *sized(cfg, model_fields, given, 1), procs.device, procs.world)
    batch_folder = open_data(cfg)
    procs.join()
    if procs.world > 1:
        dist.barrier()                                  # the data set is there now
    if is_task(cfg.dataset):
        check_no_tokenizer(cfg, split_args(argv))
        batches = TaskBatches(cfg, model_fields["block_size"])
    else:
        batches = TextBatches(batch_folder, cfg, model_fields["block_size"])
    check_tokenizer(ckpt, batches.train, cfg.init_from or folder)
    if cfg.sample_tokens and not is_task(cfg.dataset):
        batches.train.tokenizer.encode(cfg.sample_prompt)   # a character it does not know is better found now
    sizes = sized(cfg, model_fields, given, batches.train.vocab_size)
    check_run_fits(cfg, *sizes, procs.device, procs.world)
    model = make_model(cfg, model_fields, ckpt, batches.train.vocab_size, given).to(procs.device)
    set_budget(cfg, model)
    teacher = load_teacher(cfg, model, batches.train)
    trainer = Trainer(cfg, model, batches.train.tokenizer, batches, procs, ckpt if cfg.resume else None,
                      teacher and teacher.to(procs.device))
    if cfg.eval_only and ckpt is not None:
        trainer.step = ckpt["step"]                     # a schedule inside the model stands where it stood
    if procs.sum(trainer.step)[0] != procs.world * trainer.step:
        raise UserError(f"resume: the processes read different checkpoints; {folder} must be the same on every node")
    if procs.master:
        if not cfg.eval_only:
            claim_folder(cfg, folder)
        describe(trainer, batch_folder)
        if ckpt is not None and "tokenizer" not in ckpt:
            print(f"note: {cfg.init_from} does not tell its tokenizer; the data's is {trainer.tokenizer.kind}")
        if not cfg.eval_only:
            trainer.log = Log(trainer)
    return trainer


def tokens_per_step(cfg, model):
    """Tokens of one optimizer step, over all processes."""
    return cfg.batch_size * cfg.gradient_accumulation_steps * model.cfg.block_size


def set_budget(cfg, model):
    """max_steps from max_flops, by the model's steps_within where its steps do not all cost the
    same, else by its flops_per_token; UserError where that is less than one step."""
    if not cfg.max_flops:
        return
    step = tokens_per_step(cfg, model) * model.flops_per_token()
    steps = int(cfg.max_flops / step)
    if hasattr(model, "steps_within"):
        steps = model.steps_within(cfg.max_flops, tokens_per_step(cfg, model))
    if steps == 0:
        raise UserError(f"max_flops={cfg.max_flops:.3g} is less than one step of {step:.3g} floating-point operations")
    cfg.max_steps = steps


def describe(trainer, data_folder):
    """What is about to run, in two or three lines."""
    cfg, model, procs = trainer.cfg, trainer.model, trainer.procs
    size = sum(p.numel() for p in model.parameters())
    tokens = tokens_per_step(cfg, model)
    print(f"{cfg.run}: model {cfg.model}, {size:,} parameters, {model.flops_per_token():.3g} FLOPs a token, "
          f"{getattr(model.cfg, 'path', 'fast' if model.cfg.fast else 'naive')} path\n"
          f"{data_folder}: {trainer.batches.sizes()}", flush=True)
    if not cfg.eval_only:
        print(f"{cfg.max_steps:,} steps of {tokens:,} tokens on {device_name(procs.device)}, "
              f"{procs.world} process{'es' * (procs.world > 1)}"
              + (f"; going on from step {trainer.step}" if trainer.step else ""), flush=True)


def finish(trainer, done):
    """The closing words: what the model writes (of a task, what it answers), and where everything is."""
    from sample import sample_text             # sample.py reads checkpoints through this file
    cfg, log = trainer.cfg, trainer.log
    log.bar.close()
    if not done:
        print(f"stopped at step {trainer.step}; go on with resume=true")
        return
    if cfg.sample_tokens:
        shown = (show_example(trainer.model, trainer.batches) if trainer.task else
                 sample_text(trainer.model, trainer.tokenizer, cfg.sample_prompt, cfg.sample_tokens, seed=cfg.seed))
        print("-" * 80 + "\n" + shown + "\n" + "-" * 80)
    more = "" if trainer.task else f"; more text: python sample.py {trainer.folder}"
    print(f"{trainer.folder}: ckpt.pt, best.pt, log.jsonl, curves.png{more}")


def main(argv):
    if asks_help(argv):
        return print_help(argv)
    trainer = setup(argv)
    if trainer.cfg.eval_only:
        result = trainer.evaluate()
        if trainer.procs.master:
            print(in_words(result))
    else:
        done = trainer.run()
        if trainer.procs.master:
            finish(trainer, done)
    trainer.procs.leave()


if __name__ == "__main__":
    run_cli(main)

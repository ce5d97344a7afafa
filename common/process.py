"""
From command-line keys to a model, its data and its device: what training and benchmarks share.
"""
import importlib.util
import math
import os
from dataclasses import asdict, dataclass, field, fields, make_dataclass
from pathlib import Path

import torch

from common.checkpoint import build_model, load_checkpoint, load_initial, trained_on
from common.keys import (HERE, NAME, UserError, check_name, load_yaml, model_module, split_args,
                    typed_config, typed_value)
from common.data import TokenData
from model_gpt import choice
from prepare import PrepareConfig, folder_name, is_offline, prepare
from common.tasks import COMPRESSION, fit_head, is_task


# ---- the keys ----

@dataclass
class TrainConfig:
    model: str = "gpt"          # which model_<name>.py
    config: str = ""            # YAML file of keys (default: configs/<model>_tiny.yaml)
    run: str = ""               # folder of the results (default: the config file's name)
    out_dir: str = "out"        # where run folders are
    # data
    dataset: str = "python"     # as for prepare.py; a folder in data_dir; task:NAME (tasks.py)
    tokenizer: str = "byte"     # byte | char | bpe:SIZE | gpt2 | hf:PATH_OR_NAME
    data_dir: str = "data"      # where prepared data sets are
    task_examples: int = 0      # fixed training examples of a task (0: the task's own number)
    task_next_token: bool = False  # recall tasks: train on every next token, as MAD does
    batch_size: int = 12        # sequences in one forward pass (a micro-batch)
    gradient_accumulation_steps: int = 1  # micro-batches of a step, over all processes
    # optimization
    max_steps: int = 2000       # optimizer steps
    max_flops: float = 0.0      # sets max_steps: what training may cost in FLOPs (0: no limit)
    optimizer: str = choice("adamw", "muon")  # muon: for the blocks' matrices only
    learning_rate: float = 1e-3  # AdamW's peak
    muon_learning_rate: float = 0.02  # Muon's peak
    muon_momentum: float = 0.95  # Muon's momentum
    muon_momentum_steps: int = 0  # steps over which it rises linearly from 0.85 (0: none)
    weight_decay: float = 0.1   # on matrices and embeddings, not on vectors
    decay_schedule: str = choice("constant", "linear")  # of weight_decay; linear: down to 0
    beta1: float = 0.9          # AdamW
    beta2: float = 0.99         # AdamW
    grad_clip: float = 1.0      # largest gradient norm (0: no clipping)
    lr_schedule: str = choice("cosine", "linear", "trapezoid")  # linear: trapezoid, no warm-up
    warmup_steps: int = 100     # linear warm-up of cosine and trapezoid
    cooldown_frac: float = 0.2  # fraction of max_steps over which linear and trapezoid go down
    min_lr_frac: float = 0.1    # where every schedule ends, as a fraction of the peak
    # evaluation and logging
    eval_interval: int = 250    # steps between evaluations and checkpoints
    keep_interval: int = 0      # steps between checkpoints that are kept, step_N.pt (0: none)
    eval_batches: int = 40      # micro-batches of validation text an evaluation reads (0: all)
    exact_batches: int = 0      # of these, those on which lrt is evaluated exactly, slowly (0: all)
    log_interval: int = 10      # steps between lines in log.jsonl
    sample_prompt: str = "\n"   # what the sample at the end continues
    sample_tokens: int = 256    # its length in tokens (0: no sample)
    wandb: bool = False         # log to Weights & Biases too
    tensorboard: bool = False   # log to TensorBoard too
    # how to run
    seed: int = 1337            # of the weights, the batches and dropout
    device: str = "auto"        # auto (cuda, mps or cpu, in this order) | cpu | mps | cuda | cuda:N
    dtype: str = choice("auto", "float32", "bfloat16")  # auto: bfloat16 (autocast) on cuda
    compile: str = choice("auto", "true", "false")  # torch.compile; auto: on cuda
    fsdp: bool = False          # torchrun: shard weights, gradients and optimizer state (FSDP2)
    init_from: str = ""         # weights to start from: run, checkpoint, Hugging Face folder, name
    teacher: str = ""           # distil from this model, named as init_from names one
    ce_weight: float = 1.0      # with a teacher: weight of the model's own loss, of early exits too
    kd_weight: float = 1.0      # with a teacher: weight of the KL divergence from its distribution
    kd_temperature: float = 1.0  # with a teacher: temperature of both distributions
    resume: bool = False        # go on from the run's ckpt.pt
    overwrite: bool = False     # let a new run replace the one in its folder
    eval_only: bool = False     # only evaluate the run's ckpt.pt, or init_from; nothing is written

    def __post_init__(self):
        for key in fields(self):
            value, allowed = getattr(self, key.name), key.metadata.get("allowed")
            if allowed and value not in allowed:
                raise ValueError(f"{key.name}={value} must be one of: {', '.join(allowed)}")
        for names, least, most in RANGES:
            for name in names.split():
                value = getattr(self, name)
                if not least <= value <= most:
                    also = f" and at most {most}" * (most < math.inf)
                    raise ValueError(f"{name}={value} must be at least {least}{also}")
        if self.sample_tokens and not self.sample_prompt:
            raise ValueError("sample_prompt is empty: give at least one character, "
                             "or sample_tokens=0")
        if self.resume and self.overwrite:
            raise ValueError("resume=true and overwrite=true exclude each other")
        if self.resume and self.init_from:
            raise ValueError("resume=true goes on from the run's own checkpoint: "
                             "leave out init_from")


# the least and the largest value of each key
RANGES = (
    ("batch_size gradient_accumulation_steps max_steps eval_interval log_interval", 1, math.inf),
    ("task_examples warmup_steps muon_momentum_steps eval_batches exact_batches keep_interval "
     "sample_tokens seed learning_rate muon_learning_rate weight_decay grad_clip max_flops "
     "ce_weight kd_weight", 0, math.inf),
    ("cooldown_frac min_lr_frac", 0, 1),
    ("beta1 beta2 muon_momentum", 0, 0.99999),
    ("kd_temperature", 0.01, 100))


def full_schema(module):
    """One dataclass with the trainer's keys and the model's."""
    ours = {f.name for f in fields(TrainConfig)}
    twice = ours & {f.name for f in fields(module.Config)}
    assert not twice, f"{module.__name__}.Config repeats the trainer's keys {twice}"
    keys = *fields(TrainConfig), *fields(module.Config)
    entries = [(f.name, f.type, field(default=f.default)) for f in keys]
    return make_dataclass("RunConfig", entries)


def read_config(argv):
    """argv -> (TrainConfig, the model's Config fields, checkpoint or None, names of keys set).

    A value comes from the command line, else from starting_point, else it is the default."""
    given = split_args(argv)
    base, ckpt = starting_point(given, config_file(given, TrainConfig.model))
    module = model_module(given.get("model", base.get("model", TrainConfig.model)))
    cfg, model_fields = run_config(module, given, base)
    if cfg.max_flops and "max_steps" in given:
        if "max_flops" in given:
            raise UserError("max_flops sets max_steps: give one of the two")
        cfg.max_flops = 0.0
    return cfg, model_fields, ckpt, set(given) | set(base)


def config_file(given, model):
    """The values of the file that config= names, or else of configs/MODEL_tiny.yaml."""
    file = given.get("config", str(HERE / "configs" / f"{given.get('model', model)}_tiny.yaml"))
    yaml = load_yaml(file) if "config" in given or Path(file).exists() else {}
    return {"run": Path(file).stem, **yaml, "config": file}


def run_config(module, given, base):
    """(TrainConfig, the model's Config fields) from text that is given, over plain values."""
    values = typed_config(full_schema(module), given, base, free_text=("sample_prompt",))
    own = {f.name for f in fields(TrainConfig)}
    model_fields = {k: v for k, v in asdict(values).items() if k not in own}
    try:
        cfg = TrainConfig(**{k: getattr(values, k) for k in own})
        module.Config(**model_fields)   # refuses impossible sizes early
    except ValueError as e:
        raise UserError(str(e)) from e
    return cfg, model_fields


def starting_point(given, yaml):
    """The values that the command line overrides, and the checkpoint they come with, or None.

    From scratch they are the YAML file's. With resume and eval_only they are the run's own,
    from its checkpoint; a line tells where a file named on the command line differs.
    With init_from the weights bring the model's fields. Only block_size, dropout and
    Config.FINETUNE_OVERRIDES may come from a file that was named. If the weights are
    converted, fields that the other model lacks come from the file."""
    asked = {**asdict(TrainConfig()), **yaml, **given}
    for key in ("model", "run", "out_dir", "init_from"):
        typed_value(key, asked[key], str)
    own_state = "true" in (str(asked[key]).lower() for key in ("resume", "eval_only"))
    if own_state and not given.get("init_from"):
        ckpt = load_checkpoint(run_folder(asked["out_dir"], asked["run"]) / "ckpt.pt")
        check_same_model(given.get("model", ckpt["model"]), ckpt)
        now = {key: yaml.get(key, False) for key in ("resume", "overwrite", "eval_only")}
        now.update(run=asked["run"], out_dir=asked["out_dir"], init_from="")
        if "config" in given and int(os.environ.get("RANK", 0)) == 0:
            differs = yaml.keys() & ckpt["config"].keys() - now.keys() - given.keys() - {"config"}
            for key in sorted(differs):
                if yaml[key] != ckpt["config"][key]:
                    print(f"{key}={ckpt['config'][key]} is the run's own and stays; the file has "
                          f"{yaml[key]} (a key on the command line would change it)")
        return {**ckpt["config"], **now}, ckpt
    if asked["init_from"]:
        file = yaml if "config" in given else {}
        ckpt = load_initial(asked["init_from"])
        ckpt = as_weights_of({**file, **given}.get("model", ckpt["model"]), ckpt)
        if "config" not in given:
            yaml = config_file(given, ckpt["model"])
        config = model_module(ckpt["model"]).Config
        free = {"block_size", "dropout", *getattr(config, "FINETUNE_OVERRIDES", ())}
        from_file = {"fast"} | (free & file.keys())
        fields_of_weights = {k: v for k, v in ckpt["model_config"].items() if k not in from_file}
        return {**yaml, **fields_of_weights, "model": ckpt["model"]}, ckpt
    return yaml, None


def check_same_model(name, ckpt):
    if name != ckpt["model"]:
        raise UserError(f"model={name}, but the checkpoint holds model={ckpt['model']}")


def as_weights_of(name, ckpt):
    """A checkpoint as the start of model `name`: its own, or that of a model in its
    Config.CONVERTS_FROM, with the fields that both have; make_model converts the weights."""
    if name == ckpt["model"]:
        return ckpt
    config, origin = model_module(name).Config, model_module(ckpt["model"]).Config
    old, names = ckpt["model_config"], {f.name for f in fields(config)}
    if ckpt["model"] not in getattr(config, "CONVERTS_FROM", ()):
        check_same_model(name, ckpt)
    for f in fields(origin):
        if f.name not in names and old.get(f.name, f.default) != f.default:
            raise UserError(f"the checkpoint's model has {f.name}={old[f.name]}, "
                            f"which model={name} has not")
    shared = {key: old[key] for key in names & old.keys()}
    return {**ckpt, "model": name, "model_config": shared, "converts": True}


def run_folder(out_dir, run):
    """out_dir/run, where run must be a plain name, so that it cannot leave out_dir."""
    check_name(run, "run")
    return Path(out_dir) / run


# ---- devices ----

PEAK_FLOPS = {"A100": 312e12, "H100": 989e12, "H200": 989e12, "H20": 148e12, "B200": 2250e12,
              "L40S": 362e12, "L4": 121e12, "A10G": 70e12, "A10": 125e12, "4090": 165e12,
              "3090": 71e12}       # dense bfloat16


def pick_device(name, world=1):
    """The torch device of a device= key; with several processes on CUDA, each takes the one of
    its LOCAL_RANK. UserError if this machine has no such device."""
    mps_there = torch.backends.mps.is_available()
    if name == "auto":                          # gloo cannot use mps
        name = ("cuda" if torch.cuda.is_available() else
                "mps" if mps_there and world == 1 else "cpu")
    missing = f"device={name} is not on this machine (device=auto finds one)"
    try:
        device = torch.device(name)
    except RuntimeError as e:
        raise UserError(missing) from e
    if world > 1 and (device.type == "mps" or device.index is not None):
        raise UserError(f"device={name} cannot be shared by {world} processes: "
                        f"device=cuda or device=cpu can")
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
    count = {"cpu": 1, "cuda": torch.cuda.device_count(), "mps": int(mps_there)}
    if (device.index or 0) >= count.get(device.type, 0):
        raise UserError(missing)
    return device


def device_name(device):
    """What to call the device in a line of print."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type}, {torch.get_num_threads()} threads"


def autocast(cfg, device):
    """The context of a forward pass: products are computed in bfloat16 where dtype= says so."""
    mixed = cfg.dtype == "bfloat16" or (cfg.dtype == "auto" and device.type == "cuda")
    return torch.autocast(device.type, torch.bfloat16, enabled=mixed)


def can_compile(device):
    """Whether torch.compile can make kernels for this device: CUDA, triton, and a chip that
    triton supports."""
    return (device.type == "cuda" and importlib.util.find_spec("triton") is not None
            and torch.cuda.get_device_capability(device) >= (7, 0))


def peak_flops(device):
    """Dense bfloat16 FLOP/s of a known GPU, else None."""
    if device.type != "cuda":
        return None
    words = device_name(device).replace("-", " ").split()
    return next((PEAK_FLOPS[word] for word in words if word in PEAK_FLOPS), None)


# ---- data and model ----

def open_data(cfg):
    """The folder of cfg.dataset; a task's name as it is. A missing data set that needs no
    download is prepared first, under torchrun by the first process while the others wait in
    Processes.join."""
    named = Path(cfg.data_dir) / cfg.dataset
    if is_task(cfg.dataset):
        return cfg.dataset
    if NAME.fullmatch(cfg.dataset) and (named / "meta.json").exists():
        return named
    folder = Path(cfg.data_dir) / folder_name(cfg.dataset, cfg.tokenizer)
    if (folder / "meta.json").exists():
        check_source(cfg, folder)
    if folder.exists() or int(os.environ.get("RANK", 0)) > 0:
        return folder
    keys = dict(dataset=cfg.dataset, tokenizer=cfg.tokenizer, data_dir=cfg.data_dir)
    if not is_offline(cfg.dataset):
        command = " ".join(f"{key}={value}" for key, value in keys.items())
        raise UserError(f"{folder} does not exist: make it with python prepare.py {command}")
    return prepare(PrepareConfig(**keys))


def check_source(cfg, folder):
    """UserError if the data set was made from something else, whose name gives the same folder.
    A line tells if its file has changed since."""
    meta = TokenData(folder, "train").meta
    for key, name in (("dataset", "dataset"), ("tokenizer", "tokenizer_name")):
        asked, made = getattr(cfg, key), meta.get(name)
        if made not in (None, asked):
            raise UserError(f"{folder} was made with {key}={made}: make another with python "
                            f"prepare.py dataset={cfg.dataset} tokenizer={cfg.tokenizer} "
                            f"name=NAME, and train with dataset=NAME")
    source = Path(cfg.dataset.removeprefix("file:"))
    newer = lambda: source.stat().st_mtime > (folder / "meta.json").stat().st_mtime
    first = int(os.environ.get("RANK", 0)) == 0
    if first and cfg.dataset.startswith("file:") and source.is_file() and newer():
        print(f"note: {source} has changed since {folder} was made: python prepare.py dataset="
              f"{cfg.dataset} tokenizer={cfg.tokenizer} overwrite=true makes it again")


def sized(cfg, model_fields, given, vocab_size):
    """The model's class and its Config; vocab_size is the data's, unless a key gives one."""
    module = model_module(cfg.model)
    if "vocab_size" not in given:
        model_fields = {**model_fields, "vocab_size": vocab_size}
    return module.Model, module.Config(**model_fields)


def make_model(cfg, model_fields, ckpt, vocab_size, given):
    """The model, initialised from the seed or with the checkpoint's weights. vocab_size is the
    data's; a key may ask for a larger one. UserError if a key contradicts the weights."""
    module = model_module(cfg.model)
    model_class, model_cfg = sized(cfg, model_fields, given, vocab_size)
    if model_cfg.vocab_size < vocab_size:
        raise UserError(f"vocab_size={model_cfg.vocab_size} is less than the data's "
                        f"{vocab_size} tokens")
    torch.manual_seed(cfg.seed)
    if ckpt is None:
        return fit_head(model_class(model_cfg), cfg.dataset)
    if (trained_on(ckpt) == COMPRESSION) != (cfg.dataset == COMPRESSION):
        raise UserError(f"dataset={cfg.dataset}, but the weights are of "
                        f"{trained_on(ckpt) or 'another source'}: only {COMPRESSION} has a "
                        f"decoder for a head")
    free = {"fast", "dropout", *getattr(module.Config, "RESUME_OVERRIDES", ())}
    if not cfg.resume:
        free |= {"block_size", *getattr(module.Config, "FINETUNE_OVERRIDES", ())}
    new = asdict(model_cfg)
    for key, old in ckpt["model_config"].items():
        if key not in free and new.get(key) != old:
            raise UserError(f"{key}={new.get(key)}, but the checkpoint's model has {key}={old}")
    if not ckpt.get("converts"):
        return build_model({**ckpt, "model_config": new})
    model = fit_head(model_class(model_cfg), cfg.dataset)
    try:
        module.convert(model, ckpt["weights"])
    except ValueError as e:
        raise UserError(f"init_from={cfg.init_from}: {e}") from e
    return model


def load_teacher(cfg, model, data):
    """The model that teacher= names, in eval mode; None without one. UserError if its tokens are
    not the data's, or if it reads shorter sequences."""
    if not cfg.teacher or cfg.eval_only:
        return None
    name = f"teacher={cfg.teacher}"
    ckpt = load_initial(cfg.teacher, "teacher")
    check_tokenizer(ckpt, data, name)
    teacher = build_model(ckpt).eval().requires_grad_(False)
    size, limit = teacher.cfg.vocab_size, teacher.context_limit
    if size != model.cfg.vocab_size:
        raise UserError(f"{name} has vocab_size={size}, the model {model.cfg.vocab_size}")
    if limit is not None and limit < model.cfg.block_size:
        raise UserError(f"{name} takes {limit} tokens, block_size={model.cfg.block_size} is more")
    return teacher


def check_tokenizer(ckpt, data, what):
    """Weights and data must have the same tokenizer, or else ids mean different things."""
    ours = data.tokenizer.to_dict()
    theirs = (ckpt or {}).get("tokenizer", ours)
    if theirs != ours:
        raise UserError(f"{what} was trained with tokenizer {theirs.get('kind')}, which is not the "
                        f"one of the data set ({data.tokenizer.kind}, {data.vocab_size} tokens)")


def check_asked_tokenizer(cfg, given, data):
    """tokenizer= on the command line must be the data set's; a task has none. (That of a config
    file is ignored.)"""
    asked = given.get("tokenizer")
    if is_task(cfg.dataset) and asked not in (None, TrainConfig.tokenizer):
        raise UserError(f"tokenizer={asked}, but dataset={cfg.dataset} is made of token ids: leave "
                        f"out tokenizer")
    made = None if is_task(cfg.dataset) else data.meta.get("tokenizer_name")
    if asked and made not in (None, asked):
        raise UserError(f"tokenizer={asked}, but {data.folder} was made with tokenizer={made}: "
                        f"leave out tokenizer")


def tokens_per_step(cfg, model):
    """Tokens of one optimizer step, over all processes."""
    return cfg.batch_size * cfg.gradient_accumulation_steps * model.cfg.block_size


def set_budget(cfg, model):
    """max_steps from max_flops; UserError where that is less than one step. A model whose
    first steps cost more has budget_flops(step), of one token."""
    if not cfg.max_flops:
        return
    of_token = getattr(model, "budget_flops", lambda step: model.flops_per_token())
    cost = lambda step: tokens_per_step(cfg, model) * of_token(step)
    steps, left, later = 0, cfg.max_flops, cost(math.inf)
    while left >= cost(steps) > later:
        left -= cost(steps)
        steps += 1
    if cost(steps) == later:
        steps += int(left / later)
    if steps == 0:
        raise UserError(f"max_flops={cfg.max_flops:.3g} is less than one step of {cost(0):.3g} "
                        f"floating-point operations")
    cfg.max_steps = steps

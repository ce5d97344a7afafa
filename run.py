"""
From command-line keys to a model, its data and its device: what training, benchmarks and evaluation share.
"""
import importlib.util
import math
import os
from dataclasses import asdict, dataclass, field, fields, make_dataclass
from pathlib import Path

import torch

from checkpoint import build_model, load_checkpoint, load_initial, trained_on
from config import (HERE, NAME, UserError, check_name, load_yaml, model_module, split_args,
                    typed_config, typed_value)
from prepare import PrepareConfig, folder_name, is_offline, prepare
from tasks import COMPRESSION, fit_head, is_task


# ---------------------------------------------------------------------------------------------------------
# the keys

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
    only block_size, dropout and its Config.FINETUNE_OVERRIDES may come from a file that was named. A model that
    converts another's weights takes the fields that both have from them, the rest from the file.
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
        config = model_module(ckpt["model"]).Config
        free = {"block_size", "dropout", *getattr(config, "FINETUNE_OVERRIDES", ())}
        kept = {"fast"} | (free & yaml.keys() if "config" in given else set())
        fields_of_weights = {k: v for k, v in ckpt["model_config"].items() if k not in kept}
        return {**yaml, **fields_of_weights, "model": ckpt["model"]}, ckpt
    return yaml, None


def same_model(name, ckpt):
    if name != ckpt["model"]:
        raise UserError(f"model={name}, but the checkpoint holds model={ckpt['model']}")


def as_weights_of(name, ckpt):
    """A checkpoint as the start of model `name`: its own, or that of a model in its Config.CONVERTS_FROM, with the
    fields both have; make_model then converts the weights."""
    if name == ckpt["model"]:
        return ckpt
    config = model_module(name).Config
    if ckpt["model"] not in getattr(config, "CONVERTS_FROM", ()):
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


# ---------------------------------------------------------------------------------------------------------
# devices

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


def peak_flops(device):
    """Dense bfloat16 FLOP/s of a known GPU, else None."""
    words = device_name(device).replace("-", " ").split() if device.type == "cuda" else []
    return next((PEAK_FLOPS[word] for word in words if word in PEAK_FLOPS), None)


# ---------------------------------------------------------------------------------------------------------
# data and model

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
    free = {"fast", "dropout", *getattr(module.Config, "RESUME_OVERRIDES", ())}
    if not cfg.resume:
        free |= {"block_size", *getattr(module.Config, "FINETUNE_OVERRIDES", ())}
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

"""
The keys of training, and the one place where they are merged.

A value comes from the command line, else from the checkpoint that the run
goes on from or starts at, else from the config file, else it is the default.
"""
import math
from dataclasses import asdict, dataclass, field, fields, make_dataclass
from pathlib import Path

from common.checkpoint import load_initial, load_own
from common.keys import (HERE, UserError, check_name, choice, load_yaml, model_module, note,
                         plain_name, split_args, typed_config, typed_value)


@dataclass
class TrainConfig:
    """The keys of train.py; those of a model stand in its file, with its Config."""
    model: str = "gpt"  # which model_<name>.py
    config: str = ""  # YAML file of keys (default: configs/<model>_tiny.yaml)
    run: str = ""  # folder of results (default: the config's name)
    out_dir: str = "out"  # where run folders are
    # data
    dataset: str = "python"  # as for prepare.py; or task:NAME
    tokenizer: str = "byte"  # byte | char | bpe:SIZE | gpt2 | hf:PATH_OR_NAME
    data_dir: str = "data"  # where prepared data sets are
    task_examples: int = 0  # fixed examples of a task (0: its own number)
    task_next_token: bool = False  # recall: train on every next token
    batch_size: int = 12  # sequences in one forward pass (a micro-batch)
    gradient_accumulation_steps: int = 1  # micro-batches a step
    # optimization
    max_steps: int = 2000  # optimizer steps
    max_flops: float = 0.0  # FLOPs of training; sets max_steps (0: no limit)
    optimizer: str = choice("adamw", "muon")  # muon: for the blocks' matrices only
    learning_rate: float = 1e-3  # AdamW's peak
    muon_learning_rate: float = 0.02  # Muon's peak
    muon_momentum: float = 0.95  # Muon's momentum
    muon_momentum_steps: int = 0  # steps of its rise from 0.85
    weight_decay: float = 0.1  # on matrices and embeddings, not on vectors
    decay_schedule: str = choice("constant", "linear")  # of weight_decay
    beta1: float = 0.9  # AdamW
    beta2: float = 0.99  # AdamW
    grad_clip: float = 1.0  # largest gradient norm (0: no clipping)
    lr_schedule: str = choice("cosine", "linear", "trapezoid")  # linear: no warm-up
    warmup_steps: int = 100  # linear warm-up of cosine and trapezoid
    cooldown_frac: float = 0.2  # end of linear, trapezoid: they fall
    min_lr_frac: float = 0.1  # where all schedules end, of the peak
    # evaluation and logging
    eval_interval: int = 250  # steps between evaluations and checkpoints
    keep_interval: int = 0  # steps between step_N.pt, kept (0: none)
    eval_batches: int = 40  # micro-batches of an evaluation (0: all)
    exact_batches: int = 0  # of these, lrt's exact, slow ones (0: all)
    log_interval: int = 10  # steps between lines in log.jsonl
    sample_prompt: str = "\n"  # what the sample at the end continues
    sample_tokens: int = 256  # its length in tokens (0: no sample)
    wandb: bool = False  # log to Weights & Biases too
    # how to run
    seed: int = 1337  # of the weights, the batches and dropout
    device: str = "auto"  # auto | cpu | mps | cuda | cuda:N
    dtype: str = choice("auto", "float32", "bfloat16")  # auto: bfloat16 on cuda
    compile: str = choice("auto", "true", "false")  # torch.compile; auto: on cuda
    fsdp: bool = False  # torchrun: shard weights and optimizer (FSDP2)
    init_from: str = ""  # start from a run or Hugging Face model
    teacher: str = ""  # distil from this model, named as in init_from
    ce_weight: float = 1.0  # with a teacher: weight of the own loss
    kd_weight: float = 1.0  # with a teacher: weight of the KL divergence
    kd_temperature: float = 1.0  # with a teacher: temperature of both
    resume: bool = False  # go on from the run's ckpt.pt
    overwrite: bool = False  # let a new run replace this one
    eval_only: bool = False  # only evaluate ckpt.pt, or init_from

    def __post_init__(self):
        for key in fields(self):
            value, allowed = getattr(self, key.name), key.metadata.get("allowed", ())
            if allowed and value not in allowed:
                raise ValueError(f"{key.name}={value} must be one of: {', '.join(allowed)}")
            low, high = int(key.name in POSITIVE), AT_MOST.get(key.name, math.inf)
            if type(value) in (int, float) and not low <= value <= high:
                also = f" and at most {high}" * (high < math.inf)
                raise ValueError(f"{key.name}={value} must be at least {low}{also}")
        if self.sample_tokens and not self.sample_prompt:
            raise ValueError("sample_prompt is empty: give a character, or sample_tokens=0")
        if not self.kd_temperature:
            raise ValueError("kd_temperature=0 must be more")
        if self.resume and self.overwrite:
            raise ValueError("resume=true and overwrite=true exclude each other")
        if self.resume and self.init_from:
            raise ValueError("resume=true has its own checkpoint: leave out init_from")

    @property
    def folder(self):
        """out_dir/run. run must be a plain name: it cannot leave out_dir."""
        return Path(self.out_dir) / check_name(self.run, "run")


# numbers that may not be 0, and those that have a largest value
POSITIVE = ("batch_size", "gradient_accumulation_steps",
            "max_steps", "eval_interval", "log_interval")
AT_MOST = dict(
    beta1=0.99999, beta2=0.99999, muon_momentum=0.99999,
    cooldown_frac=1, min_lr_frac=1, sample_tokens=2**20)


# ---- merging ----

def read_config(argv):
    """argv -> (TrainConfig, the model's Config fields, checkpoint or None, named).
    named: the keys that are set, True on the command line, False elsewhere."""
    given = split_args(argv)
    file = config_file(given)
    asked = {**asdict(TrainConfig()), **file, **given}
    for key in ("model", "run", "out_dir", "init_from"):
        typed_value(key, asked[key], str)
    own_state = "true" in (str(asked[key]).lower() for key in ("resume", "eval_only"))
    if own_state and not given.get("init_from"):
        base, ckpt = from_own_checkpoint(given, file, asked)
    elif asked["init_from"]:
        base, ckpt = from_weights(given, file, asked["init_from"])
    else:
        base, ckpt = file, None
    cfg, fields = run_config(given, base)
    if cfg.max_flops and {"max_steps", "max_flops"} <= given.keys():
        raise UserError("max_flops sets max_steps: give one of the two")
    if "max_steps" in given:
        cfg.max_flops = 0.0
    return cfg, fields, ckpt, dict.fromkeys(base, False) | dict.fromkeys(given, True)


def config_file(given, model=TrainConfig.model):
    """The values of the file that config= names, or else of configs/MODEL_tiny.yaml."""
    tiny = HERE / "configs" / f"{given.get('model', model)}_tiny.yaml"
    file = given.get("config", str(tiny))
    yaml = load_yaml(file) if "config" in given or Path(file).exists() else {}
    return {"run": plain_name(Path(file).stem), **yaml, "config": file}


def from_own_checkpoint(given, file, asked):
    """resume, eval_only: the keys of the run's checkpoint, and the checkpoint.
    A line tells where a file named on the command line differs from them."""
    ckpt = load_own(TrainConfig(run=asked["run"], out_dir=asked["out_dir"]).folder)
    check_same_model(given.get("model", ckpt["model"]), ckpt)
    now = {key: file.get(key, False) for key in ("resume", "overwrite", "eval_only")}
    now |= {"run": asked["run"], "out_dir": asked["out_dir"], "init_from": ""}
    named = file if "config" in given else {}
    for key in sorted(named.keys() & ckpt["config"].keys() - {"config", *now, *given}):
        if file[key] != ckpt["config"][key]:
            note(f"{key}={ckpt['config'][key]} is the run's own and stays; the file has "
                 f"{file[key]} (a key on the command line would change it)")
    known = {f.name for f in fields(TrainConfig)} | ckpt["model_config"].keys()
    for key in ckpt["config"].keys() - known:
        note(f"{key}={ckpt['config'].pop(key)!r} is dropped: the trainer has no such key")
    return {**ckpt["config"], **now}, ckpt


def from_weights(given, file, source):
    """init_from: the file's keys with the model's fields as the weights have
    them, and their checkpoint. From a file that was named come only fast,
    block_size, dropout, Config.FINETUNE_OVERRIDES, and fields that the weights
    lack, which are converted then."""
    named = file if "config" in given else {}
    ckpt = load_initial(source)
    ckpt = as_weights_of({**named, **given}.get("model", ckpt["model"]), ckpt)
    if not named:
        file = config_file(given, ckpt["model"])
    config = model_module(ckpt["model"]).Config
    free = {"block_size", "dropout", *getattr(config, "FINETUNE_OVERRIDES", ())}
    from_file = {"fast"} | (free & named.keys())
    fields_of_weights = {k: v for k, v in ckpt["model_config"].items() if k not in from_file}
    return {**file, **fields_of_weights, "model": ckpt["model"]}, ckpt


def as_weights_of(name, ckpt):
    """A checkpoint as the start of model `name`: its own, or that of a model
    in its Config.CONVERTS_FROM, with the fields that both have; make_model
    converts the weights."""
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


def check_same_model(name, ckpt):
    if name != ckpt["model"]:
        raise UserError(f"model={name}, but the checkpoint holds model={ckpt['model']}")


def run_config(given, base):
    """(TrainConfig, the model's Config fields) from text that is given, over plain values."""
    module = model_module(given.get("model", base.get("model", TrainConfig.model)))
    own = {f.name for f in fields(TrainConfig)}
    schema = full_schema(module)
    values = asdict(typed_config(schema, given, base, free_text=("sample_prompt",)))
    model_fields = {k: v for k, v in values.items() if k not in own}
    try:
        cfg = TrainConfig(**{k: values[k] for k in own})
        module.Config(**model_fields)                   # refuses impossible sizes early
    except ValueError as e:
        raise UserError(str(e)) from e
    cfg.folder                                          # refuses a name that is none
    return cfg, model_fields


def full_schema(module):
    """A dataclass of all keys of a run: the trainer's and the model's."""
    keys = *fields(TrainConfig), *fields(module.Config)
    entries = [(f.name, f.type, field(default=f.default)) for f in keys]
    return make_dataclass("RunConfig", entries)     # a TypeError for a key that both have

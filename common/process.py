"""
The keys of training, the one place where they are merged, and what they stand for: a run's
processes and their device, its data and its models.

A value comes from the command line, else from the checkpoint that the run goes on from or starts
at, else from the config file, else it is the default.
"""
import math
import os
import sys
from dataclasses import asdict, dataclass, field, fields, make_dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from common.checkpoint import build_model, load_initial, load_own
from common.data import TextBatches, data_folder, is_task, open_data
from common.keys import (HERE, UserError, check_name, choice, first_line, load_yaml,
                         model_module, note, plain_name, split_args, typed_config, typed_value)


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


# ---- what a run needs ----

def start(cfg, fields, ckpt, named, make_data):
    """What read_config gives -> what a process of the run needs: (Processes, batches, the model on
    its device, the teacher or None). make_data(cfg, folder) prepares a data set that is missing."""
    procs, task, size = Processes(cfg), is_task(cfg.dataset), fields["block_size"]
    check_fits(cfg, fields, procs)
    if procs.master and not task:
        make_data(cfg, data_folder(cfg))
    procs.join()                                # the others wait for the data
    if task:
        from common.tasks import TaskBatches
        batches = TaskBatches(cfg, size)
    else:
        batches = TextBatches(open_data(cfg), cfg, size)
    data = batches.train
    check_tokenizer(ckpt, data, cfg.init_from or cfg.folder)
    check_typed(cfg, named, data, task)
    model = make_model(cfg, fields, ckpt, data.vocab_size, named).to(procs.device)
    set_budget(cfg, model)
    teacher = load_teacher(cfg, model, data)
    return procs, batches, model, teacher and teacher.to(procs.device)


# ---- processes and their device ----

def pick_device(name, world=1):
    """The torch device of a device= key; with several processes on CUDA, each takes the one of
    its LOCAL_RANK. UserError if this machine has no such device."""
    if name == "auto":                          # gloo cannot use mps
        mps = torch.backends.mps.is_available() and world == 1
        name = "cuda" if torch.cuda.is_available() else "mps" if mps else "cpu"
    if world > 1 and name not in ("cpu", "cuda"):
        raise UserError(f"device={name} cannot be shared by {world} processes: "
                        f"device=cuda or device=cpu can")
    try:
        device = torch.device(f"cuda:{number('LOCAL_RANK', 0)}" if name == "cuda" else name)
        torch.ones(1, device=device).item()     # fails if this machine has no such device
    except (RuntimeError, AssertionError, NotImplementedError) as e:
        raise UserError(f"device={name} is not on this machine (device=auto finds one)") from e
    return device


def number(variable, default):
    """An environment variable that torchrun, or a scheduler, sets."""
    value = os.environ.get(variable, str(default))
    if not value.isdecimal():
        raise UserError(f"the environment has {variable}={value!r:.60}: torchrun sets a number")
    return int(value)


def device_name(device):
    """What to call the device in a line of print."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type}, {torch.get_num_threads()} threads"


def autocast(cfg, device):
    """The context of a forward pass: products are computed in bfloat16 where dtype= says so."""
    mixed = cfg.dtype == "bfloat16" or (cfg.dtype == "auto" and device.type == "cuda")
    return torch.autocast(device.type, torch.bfloat16, enabled=mixed)


class Processes:
    """This process's rank and device, and how many processes there are (torchrun's variables)."""

    def __init__(self, cfg):
        self.world, self.rank = number("WORLD_SIZE", 1), number("RANK", 0)
        self.master = self.rank == 0
        names = ["RANK", "WORLD_SIZE"] + ["MASTER_ADDR", "MASTER_PORT"] * (self.world > 1)
        missing = [name for name in names if name not in os.environ]
        if 0 < len(missing) < len(names) or self.rank >= self.world:
            raise UserError(f"the environment is that of RANK={self.rank} of WORLD_SIZE="
                            f"{self.world}, without {' and '.join(missing) or 'such a rank'}: "
                            f"start with torchrun, or unset RANK and WORLD_SIZE")
        self.device = pick_device(cfg.device, self.world)
        self.device_name = device_name(self.device)
        self.autocast = lambda: autocast(cfg, self.device)
        if cfg.gradient_accumulation_steps % self.world and not cfg.eval_only:
            raise UserError(f"gradient_accumulation_steps={cfg.gradient_accumulation_steps} is "
                            f"not divisible by the {self.world} processes that share it")
        if cfg.fsdp and self.world == 1:
            raise UserError("fsdp=true needs several processes: torchrun --nproc_per_node=N "
                            "train.py; one process takes fsdp=false, and the same checkpoints")

    def join(self):
        """Set up the GPU, and wait until all processes are here."""
        cuda = self.device.type == "cuda"
        if cuda:
            torch.cuda.set_device(self.device)
            torch.set_float32_matmul_precision("high")
        if self.world == 1:
            return
        try:
            dist.init_process_group("nccl" if cuda else "gloo",
                                    device_id=self.device if cuda else None)
        except (RuntimeError, ValueError) as e:
            raise UserError(f"the {self.world} processes do not meet: {first_line(e)}") from e
        dist.barrier()

    def sum(self, *values):
        """Each number summed over all processes, as floats."""
        on = self.device if self.device.type == "cuda" else "cpu"
        total = torch.tensor(values, dtype=torch.float64, device=on)
        if self.world > 1:
            dist.all_reduce(total)
        return total.tolist()

    def leave(self):
        """Disconnect after success, and end the process. Not called after an error: the other
        processes may never arrive here, and torchrun ends them."""
        if self.world > 1:
            dist.barrier()
            dist.destroy_process_group()
            # DDP and DTensor's caches keep the group, and gloo's threads with it: now and then,
            # Python's shutdown aborts on them (exit status -6). All is written, so leave without
            sys.stdout.flush()
            os._exit(0)


def check_fits(cfg, fields, procs):
    """UserError, before anything is allocated, where training needs more than the device has.
    Counted from below: 16 bytes a parameter (weight, gradient, AdamW's moments), of a block only
    Wq, Wo and two matrices of an MLP; a micro-batch's embeddings and logits; a step's ids."""
    C, V, T, n_layer = (fields[key] for key in ("n_embd", "vocab_size", "block_size", "n_layer"))
    heads = fields["n_head"] * fields["head_dim"] or C
    block = max(2 * C * (heads + fields.get("n_mlp", 0)), 1000)    # Python's objects are not free
    parameters = V * C + n_layer // fields.get("n_loop", 1) * block
    tokens, micro_batches = cfg.batch_size * T, cfg.gradient_accumulation_steps
    need = (4 if cfg.eval_only else 16) * parameters // (procs.world if cfg.fsdp else 1)
    need += 4 * tokens * (C + V) + 16 * tokens * max(1, micro_batches // procs.world)
    have = (torch.cuda.mem_get_info(procs.device)[1] if procs.device.type == "cuda" else
            os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    if need > have:
        raise UserError(f"n_layer={n_layer}, n_embd={C}, vocab_size={V}, block_size={T}, "
                        f"batch_size={cfg.batch_size}, gradient_accumulation_steps="
                        f"{micro_batches}: at least {need / 1e9:,.3g} GB of memory would be "
                        f"needed, {procs.device} has {have / 1e9:,.3g} GB")


# ---- what must fit the data ----

def check_typed(cfg, named, data, task):
    """UserError where a key of the command line does not fit the data. That of a config file is
    ignored: the tokenizer is the data's, the prompt then the first characters of the text."""
    made = TrainConfig.tokenizer if task else data.meta.get("tokenizer_name", cfg.tokenizer)
    if named.get("tokenizer") and cfg.tokenizer != made:
        raise UserError(f"tokenizer={cfg.tokenizer} is not the one of dataset={cfg.dataset}: "
                        f"leave out tokenizer")
    try:
        if cfg.sample_tokens and not task:
            data.tokenizer.encode(cfg.sample_prompt)
    except UserError as e:
        if named.get("sample_prompt"):
            raise UserError(f"sample_prompt: {e}") from e
        cfg.sample_prompt = data.tokenizer.decode(data.windows([0], 2)[0].tolist())


def check_tokenizer(ckpt, data, what):
    """Weights and data must have the same tokenizer, or else ids mean different things."""
    ours = data.tokenizer.to_dict()
    theirs = (ckpt or {}).get("tokenizer", ours)
    if theirs != ours:
        raise UserError(f"{what} was trained with tokenizer {theirs.get('kind')}, which is not the "
                        f"one of the data set ({data.tokenizer.kind}, {data.vocab_size} tokens)")


# ---- the model ----

def make_model(cfg, fields, ckpt, vocab_size, named):
    """The model, initialised from the seed or with the checkpoint's weights. vocab_size is the
    data's; a key may give a larger one. UserError if a key contradicts the weights."""
    module = model_module(cfg.model)
    size = fields["vocab_size"] if "vocab_size" in named else vocab_size
    if size < vocab_size:
        raise UserError(f"vocab_size={size} is less than the data's {vocab_size} tokens")
    model_cfg = module.Config(**{**fields, "vocab_size": size})
    torch.manual_seed(cfg.seed)
    if ckpt is None:
        return module.Model(model_cfg)
    free = {"fast", "dropout", *getattr(module.Config, "RESUME_OVERRIDES", ())}
    if not cfg.resume:
        free |= {"block_size", *getattr(module.Config, "FINETUNE_OVERRIDES", ())}
    if ckpt.get("converts"):
        free |= {"n_layer"}
    new = asdict(model_cfg)
    for key, old in ckpt["model_config"].items():
        if key not in free and new.get(key) != old:
            raise UserError(f"{key}={new.get(key)}, but the checkpoint's model has {key}={old}")
    if not ckpt.get("converts"):
        return build_model({**ckpt, "model_config": new})
    model = module.Model(model_cfg)
    try:
        module.convert(model, ckpt["weights"])
    except ValueError as e:
        raise UserError(f"init_from={cfg.init_from}: {e}") from e
    return model


def tokens_per_step(cfg, model):
    """Tokens of one optimizer step, over all processes."""
    return cfg.batch_size * cfg.gradient_accumulation_steps * model.cfg.block_size


def set_budget(cfg, model):
    """max_steps from max_flops; UserError where that is less than one step. In MoR's capacity
    warm-up steps cost more."""
    if not cfg.max_flops:
        return
    at = lambda step: {"step": step} if hasattr(model.cfg, "capacity_warmup") else {}
    cost = lambda step: tokens_per_step(cfg, model) * model.flops_per_token(**at(step))
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


def load_teacher(cfg, model, data):
    """The model that teacher= names, in eval mode; None without one. UserError if its tokens are
    not the data's, or if it reads shorter sequences."""
    if not cfg.teacher or cfg.eval_only:
        return None
    ckpt = load_initial(cfg.teacher, "teacher")
    check_tokenizer(ckpt, data, f"teacher={cfg.teacher}")
    teacher = build_model(ckpt).eval().requires_grad_(False)
    size, limit = teacher.cfg.vocab_size, teacher.context_limit
    if size != model.cfg.vocab_size:
        raise UserError(f"teacher={cfg.teacher} has vocab_size={size}, the model "
                        f"{model.cfg.vocab_size}")
    if limit is not None and limit < model.cfg.block_size:
        raise UserError(f"teacher={cfg.teacher} takes {limit} tokens, block_size="
                        f"{model.cfg.block_size} is more")
    return teacher

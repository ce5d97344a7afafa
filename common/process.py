"""
The keys of training, the one place where they are merged, and what they stand for: a run's
processes and their device, its data and its models.
"""
import math
import os
import sys
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch
import torch.distributed as dist

from common.checkpoint import (build_model, fingerprint, load_checkpoint, load_initial,
                               newest)
from common.data import TextBatches, is_task, open_data
from common.keys import (HERE, Keys, UserError, check_known, check_name, choice, first_line,
                         home, known, load_yaml, model_module, names, note, plain_name,
                         typed_config, typed_value)


# keys that are of one call of train.py: no checkpoint sets them
START = {"run", "out_dir", "init_from", "resume", "overwrite", "eval_only"}


@dataclass
class TrainConfig(Keys):
    """The keys of train.py; those of a model stand in its file, with its Config."""
    run: str = ""  # folder of results (default: the config's name)
    out_dir: str = "out"  # where run folders are
    init_from: str = ""  # start from a run or Hugging Face model
    resume: str = choice("false", "true", "auto")  # go on from ckpt.pt; auto: if there is one
    overwrite: bool = False  # let a new run replace this one
    eval_only: bool = False  # only evaluate ckpt.pt, or init_from
    model: str = "gpt"  # which model_<name>.py, here or in lab/experiments
    config: str = ""  # YAML file of keys (default: configs/<model>_tiny.yaml)
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
    learning_rate: float = 1e-3  # AdamW's peak (lrt with muon: see common/optim.py)
    muon_learning_rate: float = 0.02  # Muon's peak
    muon_momentum_steps: int = 0  # steps of its rise from 0.85
    weight_decay: float = 0.1  # on matrices and embeddings (lrt with muon: on matrices)
    decay_schedule: str = choice("constant", "linear")  # of weight_decay
    beta1: float = 0.9  # AdamW (lrt with muon: its own)
    beta2: float = 0.99  # AdamW (lrt with muon: its own)
    grad_clip: float = 1.0  # largest gradient norm (0: no clipping)
    lr_schedule: str = choice("cosine", "linear", "trapezoid")  # linear: constant, then falls
    warmup_steps: int = 100  # linear warm-up of cosine and trapezoid
    cooldown_frac: float = 0.2  # of the steps: the end that falls, of linear and trapezoid
    min_lr_frac: float = 0.1  # where all schedules end, of the peak
    # evaluation and logging
    eval_interval: int = 250  # steps between evaluations and checkpoints
    keep_interval: int = 0  # steps between step_N.pt, kept (0: none)
    eval_batches: int = 40  # micro-batches of an evaluation (0: all)
    exact_batches: int = 0  # of these, lrt's exact, slow ones (0: all)
    log_interval: int = 10  # steps between lines in log.jsonl
    sample_prompt: str = ""  # what the sample at the end continues (default: val's first words)
    sample_tokens: int = 256  # its length in tokens (0: no sample)
    # how to run
    seed: int = 1337  # of the weights, the batches and dropout
    device: str = "auto"  # auto | cpu | mps | cuda | cuda:N
    dtype: str = choice("auto", "float32", "bfloat16")  # auto: bfloat16 on cuda
    compile: str = choice("auto", "true", "false", "graph")  # true: torch.compile; auto: on cuda
    fsdp: bool = False  # torchrun: shard weights and optimizer (FSDP2)
    teacher: str = ""  # distil from this model, named as in init_from

    def __post_init__(self):
        numbers = {key.name: (0, None) for key in fields(self) if key.type in (int, float)}
        counts = dict.fromkeys(("batch_size", "gradient_accumulation_steps", "max_steps",
                                "eval_interval", "log_interval"), (1, None))
        self.between(**{**numbers, **counts, "sample_tokens": (0, 2 ** 20),
                        "beta1": (0, 0.99999), "beta2": (0, 0.99999),
                        "cooldown_frac": (0, 1), "min_lr_frac": (0, 1)})
        if self.resume != "false" and self.overwrite:
            raise ValueError(f"resume={self.resume} and overwrite=true exclude each other")

    @property
    def folder(self):
        """out_dir/run. run must be a plain name: it cannot leave out_dir."""
        return Path(self.out_dir) / check_name(self.run, "run")


# ---- merging: defaults < config file < checkpoint (but for free_fields) < command line ----

def read_config(given):
    """(TrainConfig, the model's Config fields, checkpoint or None) of keys of the command line, as
    text. Of the fields, vocab_size is missing where nothing sets it: it is the data's then."""
    base, ckpt = config_file(given), None
    named = base if "config" in given else {}
    values = {**base, **given}
    start = typed_config(TrainConfig, {key: values[key] for key in START & values.keys()})
    if start.resume == "auto":                  # of a run that a scheduler starts again and again
        start.resume = "true" if newest(start.folder).exists() else "false"
    given = {**given, "resume": start.resume}
    if start.resume == "true" or start.eval_only and not given.get("init_from"):
        given = {**given, "init_from": ""}      # what the run began with matters no more
        ckpt = load_checkpoint(newest(start.folder))
        base = keys_of_run(ckpt, start, named, given)
    elif start.init_from:
        ckpt = load_initial(start.init_from)
        ckpt = as_weights_of({**named, **given}.get("model", ckpt["model"]), ckpt)
        # the model is that of the weights, but for what the named file may change
        free = {key: named[key] for key in free_fields(ckpt) & named.keys()}
        base = {**config_file({"model": ckpt["model"], **given}), "model": ckpt["model"],
                **ckpt["model_config"], "fast": True, **free}
    cfg, model_fields = run_config(given, base)
    if start.resume != "true" and not start.eval_only and not Path(cfg.config).exists():
        note(f"there is no {cfg.config}: this is dataset={cfg.dataset} tokenizer={cfg.tokenizer} "
             f"optimizer={cfg.optimizer} max_steps={cfg.max_steps}, and what else is not given "
             f"has its default (train.py help)")
    for key, old in ckpt["model_config"].items() if ckpt else ():
        if model_fields[key] != old and key not in free_fields(ckpt):
            raise UserError(f"{key}={model_fields[key]}, but the checkpoint's model has "
                            f"{key}={old}")
    return cfg, model_fields, ckpt


def config_file(given):
    """The values of the file that config= names, or else of configs/MODEL_tiny.yaml."""
    tiny = HERE / "configs" / f"{given.get('model', TrainConfig.model)}_tiny.yaml"
    file = home(given.get("config", str(tiny)))
    yaml = load_yaml(file) if "config" in given or tiny.exists() else {}
    return {"run": plain_name(Path(file).stem), **yaml, "config": file}


def keys_of_run(ckpt, start, named, given):
    """A run keeps its keys, but for START. A line tells where the file that the command line names
    differs."""
    check_same_model(given.get("model", ckpt["model"]), ckpt)
    keys = names(TrainConfig, model_module(ckpt["model"]).Config)
    kept = known({**ckpt["config"], **ckpt["model_config"]}, keys, start.folder)
    for key in sorted(named.keys() & kept.keys() - START - given.keys()):
        if named[key] != kept[key]:
            note(f"{key}={kept[key]} is the run's own and stays; the file has {named[key]} (a key "
                 f"on the command line would change it)")
    return {**kept, **{key: getattr(start, key) for key in START}}


def check_same_model(name, ckpt):
    if name != ckpt["model"]:
        raise UserError(f"model={name}, but the checkpoint holds model={ckpt['model']}")


def as_weights_of(name, ckpt):
    """A checkpoint as the start of model `name`: its own, or that of a model in its
    Config.CONVERTS_FROM, with the fields that both have; build_model converts the weights."""
    config, origin = model_module(name).Config, model_module(ckpt["model"]).Config
    if ckpt["model"] not in getattr(config, "CONVERTS_FROM", ()) or name == ckpt["model"]:
        check_same_model(name, ckpt)
        return ckpt
    old = ckpt["model_config"]
    for f in fields(origin):
        if f.name not in names(config) and old.get(f.name, f.default) != f.default:
            raise UserError(f"the checkpoint's model has {f.name}={old[f.name]}, "
                            f"which model={name} has not")
    shared = {key: old[key] for key in names(config) & old.keys()}
    return {**ckpt, "model": name, "model_config": shared, "converts": True}


def free_fields(ckpt):
    """The fields of a model that its weights do not fix."""
    free = getattr(model_module(ckpt["model"]).Config, "NOT_IN_WEIGHTS", ())
    return {"fast", "dropout", "block_size", *free, *["n_layer"] * ("converts" in ckpt)}


def run_config(given, base):
    """(TrainConfig, the model's Config fields) from keys that are given, over those of base."""
    values = {**base, **given}
    if values.get("dataset") != base.get("dataset", TrainConfig.dataset) and "dataset" in given:
        values = {**base, "sample_prompt": "", **given}     # a prompt holds for its data set only
    schemas = TrainConfig, model_module(values.get("model", TrainConfig.model)).Config
    check_known(values, names(*schemas))
    cfg, model = (typed_config(schema, {key: values[key] for key in names(schema) if key in values})
                  for schema in schemas)
    model_fields = asdict(model)
    if cfg.max_flops and {"max_steps", "max_flops"} <= given.keys():
        raise UserError("max_flops sets max_steps: give one of the two")
    if "max_steps" in given:
        cfg.max_flops = 0.0
    if "vocab_size" not in values:
        del model_fields["vocab_size"]
    return cfg, model_fields


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
    local = os.environ.get("LOCAL_RANK", 0)
    try:
        device = torch.device(f"cuda:{local}" if name == "cuda" else name)
        torch.ones(1, device=device).item()     # fails if this machine has no such device
    except (RuntimeError, AssertionError, NotImplementedError, ImportError) as e:
        raise UserError(f"device={name} is not on this machine (device=auto finds one)") from e
    return device


def device_name(device):
    """What to call the device in a line of print."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type}, {torch.get_num_threads()} threads"


# A GPU reaches at most so many floating-point operations a second in dense matrix products of
# bfloat16, summed in float32, and so many bytes a second from its memory (NVIDIA's data sheets).
# The names are whole, because variants of one GPU differ. Products of float32 in TF32 reach half
# as many operations on each of them.
PEAKS = {"NVIDIA A100-SXM4-40GB": (312e12, 1555e9),
         "NVIDIA A100-SXM4-80GB": (312e12, 2039e9),
         "NVIDIA A100-PCIE-40GB": (312e12, 1555e9),
         "NVIDIA A100 80GB PCIe": (312e12, 1935e9),
         "NVIDIA B200": (2250e12, 8000e9),
         "NVIDIA GeForce RTX 3090": (71e12, 936e9),
         "NVIDIA GeForce RTX 4090": (165.2e12, 1008e9),
         "NVIDIA GeForce RTX 5090": (209.5e12, 1792e9),
         "NVIDIA H100 80GB HBM3": (989e12, 3350e9),
         "NVIDIA H100 PCIe": (756e12, 2000e9),
         "NVIDIA H200": (989e12, 4800e9),
         "NVIDIA L4": (121e12, 300e9),
         "NVIDIA L40S": (362e12, 864e9)}


def gpu_peaks(device):
    """Return PEAKS of the device, or None if it is a CPU or a GPU that the table has not."""
    return PEAKS.get(torch.cuda.get_device_name(device)) if device.type == "cuda" else None


def in_bfloat16(cfg, device):
    """Return whether dtype= says that products are computed in bfloat16."""
    return cfg.dtype == "bfloat16" or (cfg.dtype == "auto" and device.type == "cuda")


def precision(cfg, device):
    """Return the name of the type in which products are computed; auto depends on the device."""
    return "bfloat16" if in_bfloat16(cfg, device) else "float32"


def autocast(cfg, device):
    """The context of a forward pass: products are computed in bfloat16 where dtype= says so."""
    return torch.autocast(device.type, torch.bfloat16, enabled=in_bfloat16(cfg, device))


def peak_flops(cfg, procs):
    """Return the most floating-point operations a second that all GPUs together reach in training's
    products, or None where gpu_peaks does not know them."""
    peaks, part = gpu_peaks(procs.device), 1 if in_bfloat16(cfg, procs.device) else 0.5     # TF32
    return peaks and procs.world * part * peaks[0]


class Processes:
    """This process's rank and device, and how many processes there are (torchrun's variables)."""

    def __init__(self, cfg):
        self.world = typed_value("WORLD_SIZE", os.environ.get("WORLD_SIZE", "1"), int)
        self.rank = typed_value("RANK", os.environ.get("RANK", "0"), int)
        self.master = self.rank == 0
        if not 0 <= self.rank < self.world:
            raise UserError(f"RANK={self.rank} of WORLD_SIZE={self.world}: start with torchrun")
        self.device = pick_device(cfg.device, self.world)
        if cfg.gradient_accumulation_steps % self.world and not cfg.eval_only:
            raise UserError(f"gradient_accumulation_steps={cfg.gradient_accumulation_steps} is "
                            f"not divisible by the {self.world} processes that share it")
        if cfg.fsdp and self.world == 1:
            raise UserError("fsdp=true needs several processes: torchrun --nproc_per_node=N "
                            "train.py; one process takes fsdp=false, and the same checkpoints")

    def join(self):
        """Set up the GPU, and meet the other processes."""
        cuda = self.device.type == "cuda"
        if cuda:
            torch.cuda.set_device(self.device)
            torch.set_float32_matmul_precision("high")
        try:
            if self.world > 1:
                dist.init_process_group("nccl" if cuda else "gloo",
                                        device_id=self.device if cuda else None)
        except (RuntimeError, ValueError) as e:
            raise UserError(f"the {self.world} processes do not meet: {first_line(e)}") from e

    def sum(self, *values):
        """Each number summed over all processes, as floats."""
        on = self.device if self.device.type == "cuda" else "cpu"
        total = torch.tensor(values, dtype=torch.float64, device=on)
        if self.world > 1:
            dist.all_reduce(total)
        return total.tolist()

    def each(self, function, *given):
        """Return function(*given), which every process computes at the same time. The first one
        with an error tells it, and the others end without a word."""
        result, error = None, None
        try:
            result = function(*given)
        except (UserError, OSError, MemoryError) as e:
            error = e
        failed = self.sum(*(float(error is not None and r == self.rank) for r in range(self.world)))
        if any(failed):
            if self.rank == failed.index(1.0):
                raise error
            sys.exit(2)
        return result

    def meet(self):
        """Wait until every process is here."""
        if self.world > 1:
            dist.barrier()

    def leave(self):
        """End a process of several after success. It waits for no other one: the first process may
        write a sample for longer than a collective may take. (Call `meet` before.)"""
        if self.world > 1:
            # DDP and DTensor's caches keep the group, and gloo's threads with it: now and then,
            # Python's shutdown aborts on them (exit status -6). All is written, so leave without
            sys.stdout.flush()
            os._exit(0)


# ---- the data ----

def open_batches(cfg, block_size):
    if is_task(cfg.dataset):
        from common.tasks import TaskBatches
        return TaskBatches(cfg, block_size)
    return TextBatches(open_data(cfg), cfg, block_size)


def fit_to_data(cfg, given, batches):
    """UserError where a key of the command line does not fit the data. Keys of a config file give
    way: the tokenizer is the data's, and the first tokens of the validation data are the prompt
    where none is given or the tokenizer cannot encode it."""
    task, data = is_task(cfg.dataset), batches.train
    # (a task has no tokenizer to choose: only the default passes)
    made = TrainConfig.tokenizer if task else data.meta.get("tokenizer_name", cfg.tokenizer)
    if given.get("tokenizer", made) != made:
        raise UserError(f"tokenizer={cfg.tokenizer} is not the one of dataset={cfg.dataset}: "
                        f"leave out tokenizer")
    try:
        fits = data.tokenizer.encode(cfg.sample_prompt) if cfg.sample_prompt else []
    except UserError as e:
        if given.get("sample_prompt"):
            raise UserError(f"sample_prompt: {e}") from e
        fits = []
    if not fits:
        ids = batches.cut(batches.val, [0])[0][0, :16].tolist()
        text = data.tokenizer.decode(ids).replace("\0", "")    # which no option holds
        cfg.sample_prompt = text.rstrip("\ufffd") or text


def check_tokenizer(ckpt, data, what):
    """Weights and data must have the same tokenizer, or else ids mean different things."""
    ours = data.tokenizer.to_dict()
    theirs = ckpt.get("tokenizer", ours)
    if "tokenizer" not in ckpt:
        note(f"{what} does not tell its tokenizer; the data's is {data.tokenizer.kind}")
    if theirs != ours:
        raise UserError(f"{what} was trained with tokenizer {theirs.get('kind')}, which is not the "
                        f"one of the data set ({data.tokenizer.kind}, {data.vocab_size} tokens)")


# ---- the model ----

def make_model(cfg, fields, ckpt, vocab_size):
    """The model, initialised from the seed or with the checkpoint's weights. vocab_size is the
    data's; a key may give a larger one."""
    fields = {"vocab_size": vocab_size, **fields}
    if fields["vocab_size"] < vocab_size:
        raise UserError(f"vocab_size={fields['vocab_size']} is less than the data's {vocab_size} "
                        f"tokens")
    torch.manual_seed(cfg.seed)
    if ckpt is not None:
        return build_model(ckpt, **fields)
    module = model_module(cfg.model)
    return module.Model(module.Config(**fields))


def tokens_per_step(cfg, model):
    """Tokens of one optimizer step, over all processes."""
    return cfg.batch_size * cfg.gradient_accumulation_steps * model.cfg.block_size


def flops_of_step(cfg, model):
    """Floating-point operations of one optimizer step."""
    return tokens_per_step(cfg, model) * model.flops_per_token()


def set_budget(cfg, model, step=0, flops=0.0):
    """max_steps from max_flops; UserError where that is less than one step. A resumed run has
    spent `flops` on its first steps, which may have been larger or smaller than those to come."""
    cost = flops_of_step(cfg, model)
    if 0 < cfg.max_flops < cost:
        raise UserError(f"max_flops={cfg.max_flops:.3g} is less than one step of {cost:.3g} "
                        f"floating-point operations")
    other = step * cost - flops                 # but for rounding 0 where all steps are alike
    left = cfg.max_flops + (other if abs(other) > cost / 2 else 0)
    if cfg.max_flops:                           # (a checkpoint holds no larger int)
        cfg.max_steps = max(1, min(int(left / cost), 2**62))


def load_teacher(cfg, model, data):
    """Return the model that teacher= names, in eval mode, and the fingerprint of its weights; None
    and "" without one. UserError if its tokens are not the data's, if it reads shorter sequences,
    or if it stands in the run's own folder, where it would be replaced by the student."""
    if not cfg.teacher or cfg.eval_only:
        return None, ""
    path, own = Path(cfg.teacher).resolve(), cfg.folder.resolve()
    if own in (path, *path.parents):
        raise UserError(f"teacher={cfg.teacher} is in the folder of the run itself, whose weights "
                        f"take its place: run=NAME names another folder")
    ckpt = load_initial(cfg.teacher, "teacher")
    check_tokenizer(ckpt, data, f"teacher={cfg.teacher}")
    teacher = build_model(ckpt).eval().requires_grad_(False)
    size, limit = teacher.cfg.vocab_size, teacher.context_limit or math.inf
    V, T = model.cfg.vocab_size, model.cfg.block_size
    if size != V or limit < T:
        raise UserError(f"teacher={cfg.teacher} has vocab_size={size} and takes {limit} tokens, "
                        f"the model has vocab_size={V} and block_size={T}")
    return teacher.to(next(model.parameters()).device), fingerprint(ckpt)

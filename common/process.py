"""
What a run's keys stand for: its processes and their device, its data and its models.
"""
import math
import os
import sys
from dataclasses import asdict

import torch
import torch.distributed as dist

from common.checkpoint import build_model, load_initial
from common.config import TrainConfig
from common.data import TextBatches, data_folder, open_data
from common.keys import UserError, first_line, model_module
from common.tasks import TaskBatches, is_task


def start(cfg, fields, ckpt, named, make_data):
    """What read_config gives -> what a process of the run needs: (Processes, batches, the model on
    its device, the teacher or None). make_data(cfg, folder) prepares a data set that is missing."""
    procs, task, size = Processes(cfg), is_task(cfg.dataset), fields["block_size"]
    check_fits(cfg, fields, procs)
    if procs.master and not task:
        make_data(cfg, data_folder(cfg))
    procs.join()                                # the others wait for the data
    batches = TaskBatches(cfg, size) if task else TextBatches(open_data(cfg), cfg, size)
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
    block = max(2 * C * (C + fields.get("n_mlp", 0)), 1000)     # Python's objects are not free
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

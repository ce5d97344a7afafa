"""
What a run's keys stand for: its device, the memory it needs, its data and its model.
"""
import math
import os
import sys
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist

from common.checkpoint import build_model, load_initial
from common.data import TokenData
from common.keys import NAME, UserError, folder_name, model_module


# ---- the device ----

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


class Processes:
    """This process's rank and device, and how many processes there are (torchrun's variables)."""

    def __init__(self, cfg):
        self.world = int(os.environ.get("WORLD_SIZE", 1))
        self.rank = int(os.environ.get("RANK", 0))
        self.master = self.rank == 0
        self.device = pick_device(cfg.device, self.world)
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
        if self.world > 1:
            dist.init_process_group("nccl" if cuda else "gloo",
                                    device_id=self.device if cuda else None)
            dist.barrier()                      # rank 0 has prepared the data

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


# ---- sizes that no machine has are refused in one line, before anything is allocated ----

def check_run_fits(cfg, model_fields, device, world=1):
    """UserError where training needs more than the device has: 16 bytes a parameter (weight,
    gradient, AdamW's moments), a micro-batch's embeddings and logits, and the ids of a step.
    Counted from below, so that no run is refused that would fit: of a block only Wq, Wo, and two
    matrices of an MLP of the given width."""
    sizes = {**vars(cfg), **model_fields}
    C, V = sizes["n_embd"], sizes["vocab_size"]
    block = 2 * C * (C + sizes.get("n_mlp", 0))
    blocks = sizes["n_layer"] // sizes.get("n_loop", 1)
    parameters = V * C + blocks * max(block, 1000)      # Python's objects are not free either
    tokens = cfg.batch_size * sizes["block_size"]
    ids = 16 * tokens * max(1, cfg.gradient_accumulation_steps // world)
    need = (4 if cfg.eval_only else 16) * parameters // (world if cfg.fsdp else 1)
    need += ids + 4 * tokens * C + 4 * min(tokens * V, 2**28)
    names = ("n_layer", "n_embd", "vocab_size", "batch_size", "block_size",
             "gradient_accumulation_steps")
    check_fits(", ".join(f"{name}={sizes[name]}" for name in names), need, device)


def check_fits(what, need, device):
    """UserError where `need` bytes are more than the device has in all."""
    if torch.device(device).type == "cuda":
        have = torch.cuda.mem_get_info(device)[1]
    elif hasattr(os, "sysconf"):                        # not on Windows
        have = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    else:
        return
    if need > have:
        raise UserError(f"{what}: at least {need / 1e9:,.3g} GB of memory would be needed, "
                        f"{device} has {have / 1e9:,.3g} GB")


# ---- data ----

def data_folder(cfg):
    """Where the data set of cfg is, or will be made."""
    named = Path(cfg.data_dir) / cfg.dataset
    if NAME.fullmatch(cfg.dataset) and (named / "meta.json").exists():
        return named
    return Path(cfg.data_dir) / folder_name(cfg.dataset, cfg.tokenizer)


def open_data(cfg):
    """The folder of a prepared data set. UserError if there is none, or if it was made from
    something else, whose name gives the same folder. A line tells if its file has changed since."""
    folder = data_folder(cfg)
    again = f"python prepare.py dataset={cfg.dataset} tokenizer={cfg.tokenizer}"
    if not folder.exists():
        raise UserError(f"{folder} does not exist: make it with {again} data_dir={cfg.data_dir}")
    if folder.name == cfg.dataset:
        return folder
    meta = TokenData(folder, "train").meta
    for key, name in (("dataset", "dataset"), ("tokenizer", "tokenizer_name")):
        asked, made = getattr(cfg, key), meta.get(name)
        if made not in (None, asked):
            raise UserError(f"{folder} was made with {key}={made}: make another with {again} "
                            f"name=NAME, and train with dataset=NAME")
    source = Path(cfg.dataset.removeprefix("file:"))
    changed = lambda: source.stat().st_mtime > (folder / "meta.json").stat().st_mtime
    first = int(os.environ.get("RANK", 0)) == 0
    if first and cfg.dataset.startswith("file:") and source.is_file() and changed():
        print(f"note: {source} has changed since {folder} was made: {again} overwrite=true makes "
              f"it again")
    return folder


def check_tokenizer(ckpt, data, what):
    """Weights and data must have the same tokenizer, or else ids mean different things."""
    ours = data.tokenizer.to_dict()
    theirs = (ckpt or {}).get("tokenizer", ours)
    if theirs != ours:
        raise UserError(f"{what} was trained with tokenizer {theirs.get('kind')}, which is not the "
                        f"one of the data set ({data.tokenizer.kind}, {data.vocab_size} tokens)")


# ---- the model ----

def make_model(cfg, model_fields, ckpt, vocab_size, given):
    """The model, initialised from the seed or with the checkpoint's weights. vocab_size is the
    data's; a key may give a larger one. UserError if a key contradicts the weights."""
    module = model_module(cfg.model)
    size = model_fields["vocab_size"] if "vocab_size" in given else vocab_size
    if size < vocab_size:
        raise UserError(f"vocab_size={size} is less than the data's {vocab_size} tokens")
    model_cfg = module.Config(**{**model_fields, "vocab_size": size})
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

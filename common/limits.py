"""
What fits into memory: sizes that need more than the machine has are refused before anything is
allocated.

Counted is only what no run of these sizes can do without, so no run that would fit is refused.
"""
import os

import torch
from torch.overrides import TorchFunctionMode

from common.keys import UserError
from common.tasks import fit_head, is_task

LAYER, PASS = 10_000, 1_000     # least bytes of a layer's modules, and of one layer's forward


class Unfilled(TorchFunctionMode):
    """New weights get no numbers: computing these on the meta device loads torch's compiler."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        given = kwargs or {}
        filling = getattr(func, "__module__", "") == "torch.nn.init"
        if filling or func in (torch.Tensor.normal_, torch.Tensor.uniform_, torch.Tensor.log):
            return args[0] if args else given["tensor"]
        return func(*args, **given)


def shapes_only(model_class, cfg, dataset=""):
    """The model on the meta device: shapes without memory. ValueError for sizes no tensor has."""
    check_fits({f"n_layer={cfg.n_layer}": layers_bytes(cfg)})
    try:
        with torch.device("meta"), Unfilled():
            return fit_head(model_class(cfg), dataset)
    except (RuntimeError, TypeError, OverflowError) as e:
        raise ValueError(f"no machine has memory for such sizes ({str(e).splitlines()[0]})") from e


def layers_bytes(cfg):
    """What Python itself needs for n_layer layers, of which a model with loops stores a part."""
    return LAYER * (cfg.n_layer // getattr(cfg, "n_loop", 1)) + PASS * cfg.n_layer


def memory_of(device="cpu"):
    """Bytes that the device has in all, free or not."""
    if torch.device(device).type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    if not hasattr(os, "sysconf"):      # Windows
        return 2 ** 63
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def check_fits(parts, device="cpu"):
    """UserError where parts, {what: bytes}, need more memory than the device has."""
    need, have = sum(parts.values()), memory_of(device)
    if need > have:
        raise UserError(f"{max(parts, key=parts.get)}: at least {need / 1e9:,.3g} GB of memory "
                        f"would be needed, {device} has {have / 1e9:,.3g} GB")


def check_run_fits(cfg, model_class, model_cfg, device, world=1):
    """UserError where a run on `world` processes cannot fit. cfg: the trainer's keys."""
    C, layers = model_cfg.n_embd, model_cfg.n_layer
    steps = 1 if cfg.eval_only else max(1, cfg.gradient_accumulation_steps // world)
    tokens = cfg.batch_size * model_cfg.block_size          # of a micro-batch
    batch = f"batch_size={cfg.batch_size}, block_size={model_cfg.block_size}"
    ids = f"{batch}, gradient_accumulation_steps={cfg.gradient_accumulation_steps}"
    host = {ids: 16 * tokens * steps,                       # two int64 a token
            f"n_layer={layers}": layers_bytes(model_cfg)}
    check_fits(host)
    sizes = f"n_layer={layers}, n_embd={C}, vocab_size={model_cfg.vocab_size}"
    try:
        model = shapes_only(model_class, model_cfg, cfg.dataset)
    except ValueError as e:
        raise UserError(f"{sizes}: {e}") from e
    if hasattr(model_cfg, "router"):                        # a token may skip all loops but one
        layers //= model_cfg.n_loop
    # weights, gradients, Muon's momentum or AdamW's two; each layer's input, in 16 bits at least
    copies = 1 if cfg.eval_only else 3 if cfg.optimizer == "muon" else 4
    if cfg.fsdp and not cfg.eval_only:      # the processes share them, but evaluate with all weights
        copies = 1 + copies / world
    parts = {sizes: int(copies * sum(p.nbytes for p in model.parameters())),
             f"{batch}, {sizes}": 0 if cfg.eval_only else 2 * tokens * C * layers}
    check_fits(parts if torch.device(device).type == "cuda" else {**host, **parts}, device)
    if cfg.sample_tokens and not cfg.eval_only and not is_task(cfg.dataset):
        text = f"sample_tokens={cfg.sample_tokens}"
        check_text_fits(model, 1, 1 + cfg.sample_tokens, device, text)


def check_text_fits(model, rows, length, device, what):
    """UserError, which names `what`, where `rows` sequences of `length` tokens cannot be written:
    the tokens, the cache and the logits of a step."""
    check_fits({what: 8 * rows * length})
    weight = next(model.parameters())
    blank = shapes_only(type(model), model.cfg).to(weight.dtype)
    cache = blank.init_cache(rows, min(length, model.context_limit or length)).nbytes()
    check_fits({what: cache + 4 * rows * model.cfg.vocab_size}, device)

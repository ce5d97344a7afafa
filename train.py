"""
The trainer of every model: one process on a CPU or GPU, or many through torchrun.

    python train.py                                 a small model on Python's standard library
    python train.py config=configs/gpt_tiny.yaml n_layer=6    a config file, and keys that
                                                    replace its values
    python train.py run=long max_steps=9000 resume=true       go on from out/long/ckpt.pt
    torchrun --nproc_per_node=8 train.py gradient_accumulation_steps=8 ...    data parallel,
                                                    on any number of nodes; fsdp=true shards
    python train.py help                            every key with its meaning

All keys live in one flat namespace: those of TrainConfig (the top of common/process.py, with a
comment each; the merging of file, checkpoint and command line stands below) and those of the
chosen model's Config. out/<run>/ receives ckpt.pt (the last state), best.pt (the best validation
loss), log.jsonl and curves.png.

A run is repeatable: the batch is a pure function of (seed, step), and the random numbers of a
forward pass one of (seed, step, micro-batch). So a resumed run, a run on another number of
processes and a run that evaluates more often see the same tokens and end in the same weights.

`step` counts completed optimizer steps, everywhere. The file goes straight down: set-up,
evaluation, saving, the training loop, main.
"""
import contextlib
import functools
import importlib.util
import math
import os
import signal
import threading
import time
from dataclasses import asdict, dataclass

import numpy as np
import torch

from common.checkpoint import Log, in_words, lock, newest, read_log, save_checkpoint
from common.data import bits_per_byte, count_right, data_fingerprint, is_task
from common.keys import (UserError, as_command, asks_help, first_line, help_text, model_module,
                         need, note, run_cli, split_paths, writing)
from common.optim import blocks_of, load_optimizers, lr_factor, make_optimizers, set_schedules
from common.process import (Processes, TrainConfig, config_file, read_config, start,
                            tokens_per_step)
from prepare import PrepareConfig, is_offline, prepare
from sample import sample_text

# -------------------------------------------------------------------------------------------------
# set-up

@dataclass
class Run:
    """What a run is made of, and how far it is. The functions below take it."""
    cfg: TrainConfig
    procs: Processes
    batches: object         # TextBatches or TaskBatches
    model: torch.nn.Module
    forward: object         # the model as training calls it: compiled, data parallel
    optimizers: list
    teacher: object = None  # a model to distil from
    log: object = None      # Log, on the first process
    step: int = 0           # completed optimizer steps
    evaluated: int = 0      # the step of the last evaluation
    best_ce: float = math.inf

    @property
    def folder(self):
        return self.cfg.folder

    @property
    def task(self):
        return is_task(self.cfg.dataset)

    @functools.cached_property
    def data(self):
        """The fingerprint of the data."""
        return data_fingerprint(self.cfg, self.batches)


def setup(argv):
    """Arguments -> a Run. Everything is checked before anything is written, except a data set
    that has to be prepared."""
    cfg, model_fields, ckpt, named = read_config(argv)
    cfg.fsdp &= not cfg.eval_only               # each process evaluates with all weights
    check_run(cfg)
    procs, batches, model, teacher = start(cfg, model_fields, ckpt, named, make_data)
    if cfg.fsdp:
        from common.sharded import shard
        shard(model, blocks_of(model), procs.device, procs.world)
    run = Run(cfg, procs, batches, model, prepare_forward(cfg, model, procs),
              make_optimizers(model, cfg), teacher)
    if cfg.resume:
        restore(run, ckpt)
    elif cfg.eval_only and ckpt is not None:
        run.step = ckpt["step"]                 # for models in which something depends on it
    if procs.sum(run.step)[0] != procs.world * run.step:
        raise UserError(f"resume: the processes read different checkpoints; {run.folder} must be "
                        f"the same on every node")
    if procs.master:
        if not cfg.eval_only:
            claim_folder(run, ckpt)
        describe(run)
        if not cfg.eval_only:
            run.log = Log(run, tokens_per_step(cfg, model))
    if ckpt is not None and "tokenizer" not in ckpt:
        note(f"{cfg.init_from} does not tell its tokenizer; the data's is "
             f"{batches.train.tokenizer.kind}")
    return run


def check_run(cfg):
    """UserError if the run would replace another one, or needs a package that is missing."""
    if (cfg.folder / "ckpt.pt").exists() and not (cfg.resume or cfg.overwrite or cfg.eval_only):
        raise UserError(f"{cfg.folder} holds a checkpoint: resume=true goes on from it, "
                        f"overwrite=true replaces it, run=NAME starts another run")
    if cfg.wandb:
        need("wandb")


def make_data(cfg, folder):
    """Prepare a data set that is missing, if that needs no download."""
    if is_offline(cfg.dataset) and not folder.exists():
        prepare(PrepareConfig(dataset=cfg.dataset, tokenizer=cfg.tokenizer, data_dir=cfg.data_dir))


def prepare_forward(cfg, model, procs):
    """The model as training calls it: compiled where compile= says so, and data parallel."""
    compiled, device = cfg.compile == "true", procs.device
    if cfg.compile == "auto" and device.type == "cuda" and importlib.util.find_spec("triton"):
        compiled = torch.cuda.get_device_capability(device) >= (7, 0)   # what triton supports
    if cfg.fsdp:
        torch.compiler.config.recompile_limit = 64  # all blocks share one function's compilations
        for block in blocks_of(model) if compiled else ():
            block.compile()                     # the hooks around the blocks are not compiled
        return model
    forward = torch.compile(model) if compiled else model
    return torch.nn.parallel.DistributedDataParallel(forward) if procs.world > 1 else forward


def claim_folder(run, ckpt):
    """Make the run's folder, or clean it. From here to its end no other run can have it."""
    cfg, folder = run.cfg, run.folder
    with writing(folder):
        missing = [path for path in (folder, *folder.parents) if not path.exists()]
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError:
            for path in missing:                # remove those that were made before the error
                with contextlib.suppress(OSError):
                    path.rmdir()
            raise
        lock(folder.absolute())
        check_run(cfg)                          # again: another run may have ended meanwhile
        if cfg.resume and newest(folder).stat().st_mtime_ns != ckpt["stamp"]:
            raise UserError(f"{folder}: another run has replaced the checkpoint meanwhile")
        for name in ("ckpt.pt", "best.pt", "log.jsonl", "curves.png", "pending.pt"):
            (folder / f"{name}.tmp").unlink(missing_ok=True)    # left by a run killed while saving
            if cfg.overwrite or (name == "pending.pt" and not cfg.resume):
                (folder / name).unlink(missing_ok=True)
        for file in folder.glob("step_*.pt*") if cfg.overwrite else ():
            file.unlink()


def describe(run):
    """Print the model, the data, and what the run will do."""
    cfg, model, procs = run.cfg, run.model, run.procs
    tokens = tokens_per_step(cfg, model)
    size = sum(p.numel() for p in model.parameters())
    path = getattr(model.cfg, "path", "fast" if model.cfg.fast else "naive")
    print(f"{cfg.run}: model {cfg.model}, {size:,} parameters, "
          f"{model.flops_per_token():.3g} FLOPs a token, {path} path\n"
          f"{cfg.dataset if run.task else run.batches.train.folder}: {run.batches.sizes()}")
    if not cfg.eval_only:
        print(f"{cfg.max_steps:,} steps of {tokens:,} tokens on {procs.device_name}, "
              f"{procs.world} process{'es' * (procs.world > 1)}"
              + f"; going on from step {run.step}" * (run.step > 0), flush=True)


# -------------------------------------------------------------------------------------------------
# evaluation

@torch.no_grad()
def evaluate(run):
    """The validation text's mean cross-entropy in nats a token, and bits per byte; of a task, the
    fractions of scored tokens and of rows that are right. Draws no random number and changes no
    weight.

    The model computes its decoding function (eval mode). If it can estimate that by its training
    path, it does so on all batches, and computes the exact figures, by which best.pt is chosen, on
    exact_batches of them. val_gap: the exact cross-entropy minus the estimate, on the batches that
    have both."""
    model, procs, cfg = run.model.eval(), run.procs, run.cfg
    model.set_step(run.step)
    batches = run.batches.val_batches(cfg.eval_batches)
    n, wanted = len(batches), cfg.exact_batches
    exact = set(np.linspace(0, n - 1, wanted).astype(int) if 0 < wanted < n else range(n))
    metrics = getattr(model, "eval_metrics", ())
    sums = dict.fromkeys(("ce", "tokens", "rows", "right_tokens", "right_rows", "estimate",
                          "estimate_tokens", "gap", *metrics), 0.0)
    with all_weights(run):
        for i in range(procs.rank, n, procs.world):
            x, y = (to_device(z, run) for z in run.batches.cut(run.batches.val, batches[i]))
            with procs.autocast():
                add_batch(sums, model, x, y, i in exact, run.task, metrics)
    sums = dict(zip(sums, procs.sum(*sums.values())))
    result = {f"val_{name}": sums[name] / sums["tokens"] for name in ("ce", *metrics)}
    if run.task:
        result["val_token_accuracy"] = sums["right_tokens"] / sums["tokens"]
        result["val_sequence_accuracy"] = sums["right_rows"] / sums["rows"]
    else:
        result["val_bpb"] = bits_per_byte(result["val_ce"], run.batches.val)
    if sums["estimate_tokens"]:
        result["val_ce_estimate"] = sums["estimate"] / sums["estimate_tokens"]
        result["val_gap"] = sums["gap"] / sums["tokens"]
    return result


def add_batch(sums, model, x, y, exact, task, metrics):
    """Add a batch's figures, each times the number of tokens of which it is a mean."""
    tokens = int((y != -1).sum())
    estimate = model.estimate(x, y) if hasattr(model, "estimate") else None
    if estimate is not None:
        sums["estimate"] += float(estimate) * tokens
        sums["estimate_tokens"] += tokens
        if not exact:
            return
    logits, _, aux = model(x, y)
    for name in ("ce", *metrics):
        sums[name] += float(aux[name]) * tokens
    sums["tokens"] += tokens
    sums["rows"] += len(y)
    if estimate is not None:
        sums["gap"] += float(aux["ce"]) * tokens - float(estimate) * tokens
    if task:
        right_tokens, right_rows = count_right(logits, y)
        sums["right_tokens"] += int(right_tokens)
        sums["right_rows"] += int(right_rows)


def all_weights(run):
    """Inside, this process runs the model without the others."""
    if not run.cfg.fsdp:
        return contextlib.nullcontext()
    from common.sharded import gathered
    return gathered(run.model)


def to_device(x, run):
    if run.procs.device.type == "cuda":
        return x.pin_memory().to(run.procs.device, non_blocking=True)
    return x.to(run.procs.device)


# -------------------------------------------------------------------------------------------------
# saving

def save_and_evaluate(run):
    """Save the state, evaluate, and save best.pt if it is the best. The state is on the disk
    before the evaluation runs, as pending.pt: a run that is stopped in between evaluates again,
    with the same result, when it is resumed. It replaces ckpt.pt if the evaluation is finite."""
    pending = run.folder / "pending.pt"
    save(run, pending.name)
    result = evaluate(run)
    ce, estimate = result["val_ce"], result.get("val_ce_estimate", math.nan)
    finite = math.isfinite(ce) or math.isfinite(estimate)
    if run.procs.master:
        if finite:
            os.replace(pending, run.folder / "ckpt.pt")
        else:
            pending.unlink()
    if not finite:
        raise UserError(f"val_ce is {ce} at step {run.step}: stopped, {kept(run)}")
    if not math.isfinite(ce):
        return without_chain(run, estimate)
    best = ce < run.best_ce
    run.evaluated, run.best_ce = run.step, min(run.best_ce, ce)
    if best:
        save(run, "best.pt")
    if run.log:
        run.log.evaluation(result, best)


def without_chain(run, estimate):
    """Of lrt the exact chain may overflow where the training path's estimate is finite: that is
    told and logged, and the run goes on, as training may mend it."""
    run.evaluated = run.step
    if run.log:
        run.log.write({"val_ce_estimate": estimate})
        run.log.bar.write(f"step {run.step}: the exact chain is not finite (source_norm=true would "
                          f"bound it), val ce estimate {estimate:.4f}")


def save(run, name):
    """Save the state. UserError if a weight is not finite: the last good checkpoint stays."""
    saved = state(run)                          # of sharded weights: all processes take part
    if not all(w is None or w.isfinite().all() for w in saved["weights"].values()):
        raise UserError(f"a weight is not finite at step {run.step}: stopped, {kept(run)}")
    if run.procs.master:
        save_checkpoint(run.folder / name, saved)
        if name == "ckpt.pt":
            (run.folder / "pending.pt").unlink(missing_ok=True)     # it is older


def kept(run):
    saved = (run.folder / "ckpt.pt").exists()
    return "ckpt.pt is kept" if saved else "no checkpoint was saved yet"


def state(run):
    """All that a resumed run needs, as tensors and plain values. (The trainer draws no random
    number that depends on the RNG's state; a model may.)"""
    cuda = run.procs.device.type == "cuda"
    weights, optimizers = dict(run.model.state_dict()), [o.state_dict() for o in run.optimizers]
    if run.cfg.fsdp:
        from common.sharded import whole
        weights, optimizers = whole(weights), whole(optimizers)
    return {"model": run.cfg.model,
            "config": {**asdict(run.cfg), **asdict(run.model.cfg)},
            "model_config": asdict(run.model.cfg),
            "tokenizer": run.batches.train.tokenizer.to_dict(),
            "weights": weights, "optimizers": optimizers,
            "step": run.step, "evaluated": run.evaluated, "best_ce": run.best_ce,
            "data": run.data,
            "rng": {"cpu": torch.get_rng_state(),
                    "cuda": torch.cuda.get_rng_state() if cuda else None}}


def restore(run, ckpt):
    """Go on from the state of a checkpoint; the model has its weights already."""
    load_optimizers(run.optimizers, ckpt["optimizers"])
    run.step, run.evaluated, run.best_ce = (ckpt[k] for k in ("step", "evaluated", "best_ce"))
    if ckpt.get("data") != run.data:
        note("the data is another than the checkpoint's: the best loss is forgotten")
        run.best_ce = math.inf
    try:
        torch.set_rng_state(ckpt["rng"]["cpu"])
        if ckpt["rng"]["cuda"] is not None and run.procs.device.type == "cuda":
            torch.cuda.set_rng_state(ckpt["rng"]["cuda"])
    except (KeyError, TypeError, AttributeError, RuntimeError) as e:
        raise UserError(f"resume: the checkpoint's rng is wrong: {first_line(e)}") from e


# -------------------------------------------------------------------------------------------------
# the training loop

def train(run):
    """Train to max_steps. Returns True when done, False when a signal stopped the run (the state
    is saved)."""
    cfg = run.cfg
    with stop_request(run.procs.world) as stop:
        while run.step < cfg.max_steps:
            if run.evaluated < run.step and run.step % cfg.eval_interval == 0:
                save_and_evaluate(run)
            logged, asked = train_step(run, stop)
            if cfg.keep_interval and run.step % cfg.keep_interval == 0:
                save(run, f"step_{run.step}.pt")
            if run.log:
                run.log.step(logged, write=run.step % cfg.log_interval == 0 or asked)
            if asked:
                stop.append(SAVING)
                save(run, "ckpt.pt")
                return False
        if run.evaluated < run.step:
            save_and_evaluate(run)
            save(run, "ckpt.pt")            # a longer run goes on from here, with this evaluation
    return True


PATIENCE = 10       # seconds after which a second SIGTERM ends a step
SAVING = "saving"   # in the list of stop_request: the step is over


@contextlib.contextmanager
def stop_request(world):
    """A list that is empty until SIGTERM or SIGINT asks for a stop after the current step. If that
    step is very long: a second SIGTERM 10 s later ends the process at once, a second Ctrl-C any
    time, if it is the only process. (torchrun and schedulers send several within seconds.)"""
    asked, signals, (read, write) = [], (signal.SIGTERM, signal.SIGINT), os.pipe()

    def watch():        # a thread, because the main one may be inside a long operation of torch
        first = None
        while data := os.read(read, 1):
            late = first and time.monotonic() - first > PATIENCE and SAVING not in asked
            if data[0] in signals and (late or first and data[0] == signal.SIGINT and world == 1):
                os._exit(128 + data[0])
            first = first or (data[0] in signals and time.monotonic())
        os.close(read)

    threading.Thread(target=watch, daemon=True).start()
    os.set_blocking(write, False)
    handlers = {sig: signal.signal(sig, lambda sig, frame: asked.append(sig)) for sig in signals}
    wakeup = signal.set_wakeup_fd(write)        # the number of each signal goes there
    try:
        yield asked
    finally:
        signal.set_wakeup_fd(wakeup)
        os.close(write)                         # ends the thread
        for sig, handler in handlers.items():
            signal.signal(sig, handler)


def train_step(run, stop):
    """One optimizer step over the global batch. Returns the values to log, and whether any
    process was asked to stop. UserError on every process, before any weight moves, if the loss or
    a gradient is not finite."""
    run.model.train()
    run.model.set_step(run.step)
    logged, asked = check_step(run, forward_backward(run), stop)
    for optimizer in run.optimizers:
        for group in optimizer.param_groups:
            set_schedules(group, run.step, run.cfg)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    if hasattr(run.model, "end_step"):
        run.model.end_step(logged)
    factor = lr_factor(run.step, run.cfg)
    logged["lr"] = run.cfg.learning_rate * factor
    if run.cfg.optimizer == "muon":
        logged["muon_lr"] = run.cfg.muon_learning_rate * factor
    run.step += 1
    return logged, asked


def forward_backward(run):
    """The gradients of this process's micro-batches, one after the other. Returns the values to
    log, of which the sum over all processes is that of the global batch."""
    cfg, procs = run.cfg, run.procs
    n = cfg.gradient_accumulation_steps // procs.world      # micro-batches of this process
    indices = range(procs.rank * n, (procs.rank + 1) * n)
    micro = [run.batches.micro_batch(run.step, i) for i in indices]
    counts = [int((y != -1).sum()) for _, y in micro]
    total = max(1.0, procs.sum(sum(counts))[0])             # targets of the global batch
    all_rows, logged = cfg.batch_size * cfg.gradient_accumulation_steps, {}
    for index, (x, y), count in zip(indices, micro, counts):
        seed_forward(cfg.seed, run.step, index)
        # DDP sums gradients once a step; FSDP after each micro-batch, to keep them sharded
        last = procs.world == 1 or cfg.fsdp or index == indices[-1]
        with contextlib.nullcontext() if last else run.forward.no_sync():
            with procs.autocast():
                x, y = to_device(x, run), to_device(y, run)
                logits, loss, aux = run.forward(x, y)
                if run.teacher is not None:
                    loss, aux = distil(run.teacher, cfg, x, y, logits, loss, aux)
            # a mean over tokens; DDP and FSDP average over processes, so `world` undoes that
            (loss * (count / total * procs.world)).backward()
        values = {key: value.detach() * (count / total) for key, value in aux.items()}
        if run.task:
            tokens, rows = count_right(logits, y)
            values["token_accuracy"] = tokens / total
            values["sequence_accuracy"] = rows / all_rows
        for key, value in values.items():
            logged[key] = logged.get(key, 0.0) + value
    return logged


def seed_forward(seed, step, index):
    """Dropout, and any other random number of a forward pass, depends on (seed, step, micro-batch)
    only."""
    words = np.random.SeedSequence([seed, step, index, 1])      # 1: see tasks.py
    high, low = words.generate_state(2, np.uint32)
    torch.manual_seed(int(high) << 32 | int(low))


def distil(teacher, cfg, x, y, logits, loss, aux):
    """Add the distillation loss (Hinton et al. 2015): ce_weight * loss + kd_weight * kd. kd is the
    KL divergence from the teacher's distribution, both at kd_temperature t, averaged over the
    targets that count, times t^2, so that t does not change the gradient's size."""
    t, counted = cfg.kd_temperature, y != -1
    with torch.no_grad():
        p = (teacher(x)[0] / t).log_softmax(-1)                     # (B, T, V)
    kl = (p.exp() * (p - (logits / t).log_softmax(-1))).sum(-1)     # (B, T)
    kd = t ** 2 * (kl * counted).sum() / counted.sum().clamp(min=1)
    return cfg.ce_weight * loss + cfg.kd_weight * kd, {**aux, "kd": kd.detach()}


def check_step(run, logged, stop):
    """Clip the gradients and sum the logged values over processes. UserError on all of them if
    something is not finite; all learn whether one was asked to stop."""
    clip = run.cfg.grad_clip or math.inf
    norm = torch.nn.utils.clip_grad_norm_(run.model.parameters(), clip)
    norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm     # sharded gradients
    values = [float(v) for v in logged.values()]
    *values, asked = run.procs.sum(*values, float(len(stop) > 0))
    logged = dict(zip(logged, values), grad_norm=float(norm))
    for key in ("ce", "grad_norm"):
        if not math.isfinite(logged[key]):
            raise UserError(f"{key} is {logged[key]} at step {run.step}: stopped before the "
                            f"update, {kept(run)}")
    return logged, asked > 0


# -------------------------------------------------------------------------------------------------
# the command line

def main(argv):
    if asks_help(argv):
        return print_help(argv)
    run = setup(argv)
    if run.cfg.eval_only:
        result = evaluate(run)
        if not math.isfinite(result["val_ce"]):
            raise UserError(f"val_ce is {result['val_ce']}: the weights are broken")
        if run.procs.master:
            print(in_words(result))
    else:
        done = train(run)
        with all_weights(run):
            if run.procs.master:
                finish(run, done)
    run.procs.leave()


def print_help(argv):
    """The usage, then the trainer's keys and those of the chosen model."""
    given = split_paths(argv)[1]
    name = {**config_file(given), **given}.get("model", TrainConfig.model)
    print(help_text(TrainConfig, __doc__))
    print("\n" + help_text(model_module(name).Config, f"keys of model={name}:"))


def finish(run, done):
    """Print what the model writes (of a task, what it answers), and where the files are."""
    cfg = run.cfg
    run.log.bar.close()
    if not done:
        print(f"stopped at step {run.step}; go on with resume=true")
        return
    if cfg.sample_tokens:
        print("-" * 80 + "\n" + example(run) + "\n" + "-" * 80)
    picture = ", curves.png" * draw(run)
    more = "" if run.task else f"; more text: {as_command('sample.py', path=run.folder)}"
    best = ", best.pt" * (run.folder / "best.pt").exists()
    print(f"{run.folder}: ckpt.pt{best}, log.jsonl{picture}{more}")


def example(run):
    """What the model writes, or answers."""
    if run.task:
        from common.tasks import show_example
        return show_example(run.model, run.batches)
    return sample_text(run.model, run.batches.train.tokenizer, run.cfg.sample_prompt,
                       run.cfg.sample_tokens, seed=run.cfg.seed)


def draw(run):
    """Draw curves.png from the log. Returns whether it could: a picture never ends a run."""
    try:
        from lab.plot import draw_curves        # the one thing of lab that is used, if it is there
        draw_curves(read_log(run.log.path), run.folder / "curves.png", run.cfg.run)
        return True
    except Exception as e:      # no lab, no matplotlib, or whatever its settings break
        print(f"note: no curves.png: {first_line(e)}")
        return False


if __name__ == "__main__":
    run_cli(main)

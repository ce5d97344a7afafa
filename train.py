"""
The trainer of every model: one process on a CPU or GPU, or many through torchrun.

    python train.py                                              a small model on the embedded corpus
    python train.py config=configs/gpt_tiny.yaml n_layer=6       a config file, and keys that replace its values
    python train.py run=long max_steps=9000 resume=true          go on from out/long/ckpt.pt
    torchrun --nproc_per_node=8 train.py gradient_accumulation_steps=8 ...    data parallel, on any number of nodes
    python train.py help                                         every key with its meaning

All keys live in one flat namespace: those of TrainConfig (run.py) and those of the chosen model's Config.
out/<run>/ receives ckpt.pt (the last state), best.pt (the best validation loss), log.jsonl and curves.png.

What makes a run repeatable: the batch is a pure function of (seed, step), and the random numbers of a forward
one of (seed, step, micro-batch). There is no data-order state: a resumed run, a run with another number of
processes, and a run that evaluates more often all see the same tokens and end in the same weights.

`step` counts completed optimizer steps, everywhere.
"""
import contextlib
import importlib
import importlib.util
import json
import math
import os
import signal
import sys
import time
from dataclasses import asdict

import numpy as np
import torch
import torch.distributed as dist
from tqdm import tqdm

from checkpoint import save_checkpoint
from config import (UserError, asks_help, first_line, help_text, key_lines, model_module, run_cli,
                    split_args, writing)
from data import TextBatches, bits_per_byte
from limits import check_run_fits
from optim import load_optimizers, lr_factor, make_optimizers, set_schedules
from plot import draw_curves, read_log
from run import (TrainConfig, can_compile, check_no_tokenizer, check_tokenizer, device_name,
                 load_teacher, make_model, open_data, peak_flops, pick_device, read_config,
                 run_folder, set_budget, sized, tokens_per_step)
from sample import sample_text
from tasks import TaskBatches, count_right, is_task, show_example

# ---------------------------------------------------------------------------------------------------------
# configuration

def print_help(argv):
    """The usage, then every key with its default and meaning: the trainer's, then the chosen model's."""
    name = next((a.split("=", 1)[1] for a in argv if a.startswith("model=")), TrainConfig.model)
    keys = key_lines(model_module(name).Config)
    print("\n".join([help_text(TrainConfig, __doc__), "", f"keys of model={name}:", *keys]))


# ---------------------------------------------------------------------------------------------------------
# data: every batch is a pure function of (seed, step)

# ---------------------------------------------------------------------------------------------------------
# checkpoints: one file, replaced in one move, verified when read

# ---------------------------------------------------------------------------------------------------------
# optimizers

# ---------------------------------------------------------------------------------------------------------
# device and processes

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


# ---------------------------------------------------------------------------------------------------------
# from arguments to a run

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

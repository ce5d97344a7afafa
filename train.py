"""
The trainer of every model: one process on a CPU or GPU, or many through torchrun.

    python train.py                                 a small model on Python's standard library
    python train.py config=configs/gpt_tiny.yaml n_layer=6    a config file, and keys that
                                                    replace its values
    python train.py run=long max_steps=9000 resume=true       go on from out/long/ckpt.pt
    torchrun --nproc_per_node=8 train.py gradient_accumulation_steps=8 ...    data parallel,
                                                    on any number of nodes; fsdp=true shards
    python train.py help                            every key with its meaning

All keys live in one flat namespace: those of TrainConfig (run.py) and those of the chosen
model's Config. out/<run>/ receives ckpt.pt (the last state), best.pt (the best validation
loss), log.jsonl and curves.png.

A run is repeatable: the batch is a pure function of (seed, step), and the random numbers of a
forward pass one of (seed, step, micro-batch). So a resumed run, a run on another number of
processes and a run that evaluates more often see the same tokens and end in the same weights.

`step` counts completed optimizer steps, everywhere.
"""
import contextlib
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

from common.checkpoint import save_checkpoint
from common.keys import (UserError, asks_help, first_line, help_text, key_lines, model_module, run_cli,
                    split_args, writing)
from common.data import TextBatches, bits_per_byte
from common.limits import check_run_fits
from common.optim import load_optimizers, lr_factor, make_optimizers, set_schedules
from lab.plot import draw_curves, read_log
from common.process import (TrainConfig, autocast, can_compile, check_asked_tokenizer, check_tokenizer,
                 config_file, device_name, load_teacher, make_model, open_data, peak_flops,
                 pick_device, read_config, run_folder, set_budget, sized, tokens_per_step)
from sample import sample_text
from common.sharded import blocks_of, gathered, shard, whole
from common.tasks import TaskBatches, count_right, is_task, show_example

# -------------------------------------------------------------------------------------------------
# set-up

def print_help(argv):
    """The usage, then the trainer's keys and those of the chosen model."""
    given = split_args([a for a in argv if "=" in a])
    name = {**config_file(given, TrainConfig.model), **given}.get("model", TrainConfig.model)
    keys = key_lines(model_module(name).Config)
    print("\n".join([help_text(TrainConfig, __doc__), "", f"keys of model={name}:", *keys]))


def setup(argv):
    """Arguments -> a Trainer that is ready to run. Everything is checked before anything is
    written, except a data set that has to be prepared."""
    cfg, model_fields, ckpt, given = read_config(argv)
    folder = run_folder(cfg.out_dir, cfg.run)
    check_run(cfg, folder)
    procs = Processes(cfg)
    # sizes that cannot fit are refused before the data is prepared, and again with its vocabulary
    check_run_fits(cfg, *sized(cfg, model_fields, given, 1), procs.device, procs.world)
    data_folder = open_data(cfg)
    procs.join()
    if is_task(cfg.dataset):
        batches = TaskBatches(cfg, model_fields["block_size"])
    else:
        batches = TextBatches(data_folder, cfg, model_fields["block_size"])
    check_tokenizer(ckpt, batches.train, cfg.init_from or folder)
    check_asked_tokenizer(cfg, split_args(argv), batches.train)
    if cfg.sample_tokens and not is_task(cfg.dataset):
        try:
            batches.train.tokenizer.encode(cfg.sample_prompt)
        except UserError as e:      # it has no such character
            raise UserError(f"sample_prompt: {e}") from e
    vocab_size = batches.train.vocab_size
    check_run_fits(cfg, *sized(cfg, model_fields, given, vocab_size), procs.device, procs.world)
    model = make_model(cfg, model_fields, ckpt, vocab_size, given).to(procs.device)
    set_budget(cfg, model)
    teacher = load_teacher(cfg, model, batches.train)
    trainer = Trainer(cfg, model, batches.train.tokenizer, batches, procs,
                      ckpt if cfg.resume else None, teacher and teacher.to(procs.device))
    if cfg.eval_only and ckpt is not None:
        trainer.step = ckpt["step"]             # for models in which something depends on it
    if procs.sum(trainer.step)[0] != procs.world * trainer.step:
        raise UserError(f"resume: the processes read different checkpoints; {folder} must be "
                        f"the same on every node")
    if procs.master:
        if not cfg.eval_only:
            claim_folder(cfg, folder)
        describe(trainer, data_folder)
        if ckpt is not None and "tokenizer" not in ckpt:
            print(f"note: {cfg.init_from} does not tell its tokenizer; the data's is "
                  f"{trainer.tokenizer.kind}")
        if not cfg.eval_only:
            trainer.log = Log(trainer)
    return trainer


def check_run(cfg, folder):
    """UserError if the run would replace another one, or needs a package that is missing."""
    allowed = cfg.resume or cfg.overwrite or cfg.eval_only
    if (folder / "ckpt.pt").exists() and not allowed:
        raise UserError(f"{folder} holds a checkpoint: resume=true goes on from it, "
                        f"overwrite=true replaces it, run=NAME starts another run")
    for package in ("wandb", "tensorboard"):
        if getattr(cfg, package) and importlib.util.find_spec(package) is None:
            raise UserError(f"{package}=true needs the package {package}: pip install {package}")


def claim_folder(cfg, folder):
    """Make the run's folder, or clean it: the last step of the set-up, after all checks."""
    with writing(folder):
        missing = [path for path in (folder, *folder.parents) if not path.exists()]
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError:
            for path in missing:                # remove those that were made before the error
                with contextlib.suppress(OSError):
                    path.rmdir()
            raise
        for name in ("ckpt.pt", "best.pt", "log.jsonl", "curves.png"):
            (folder / f"{name}.tmp").unlink(missing_ok=True)    # left by a run killed while saving
            if cfg.overwrite:
                (folder / name).unlink(missing_ok=True)
        for file in folder.glob("step_*.pt") if cfg.overwrite else ():
            file.unlink()


def describe(trainer, data_folder):
    """Print the model, the data, and what the run will do."""
    cfg, model, procs = trainer.cfg, trainer.model, trainer.procs
    size = sum(p.numel() for p in model.parameters())
    path = getattr(model.cfg, "path", "fast" if model.cfg.fast else "naive")
    print(f"{cfg.run}: model {cfg.model}, {size:,} parameters, "
          f"{model.flops_per_token():.3g} FLOPs a token, {path} path\n"
          f"{data_folder}: {trainer.batches.sizes()}", flush=True)
    if not cfg.eval_only:
        start = f"; going on from step {trainer.step}" if trainer.step else ""
        print(f"{cfg.max_steps:,} steps of {tokens_per_step(cfg, model):,} tokens on "
              f"{device_name(procs.device)}, {procs.world} process{'es' * (procs.world > 1)}"
              f"{start}", flush=True)


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
        if cfg.fsdp and self.world == 1 and not cfg.eval_only:
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


class StopRequest:
    """SIGTERM or SIGINT asks for a stop after the current step. A second Ctrl-C stops a single
    process at once; a second SIGTERM does not (torchrun and schedulers send several)."""

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


class Trainer:
    """A model, its optimizers and its data: the training loop, evaluation, and saving."""

    def __init__(self, cfg, model, tokenizer, batches, procs, ckpt=None, teacher=None):
        self.cfg, self.model, self.tokenizer, self.procs = cfg, model, tokenizer, procs
        self.batches, self.teacher = batches, teacher
        self.task = is_task(cfg.dataset)
        if teacher is not None or self.task:
            model.max_logits = math.inf         # always return logits, whatever their size
        self.folder = run_folder(cfg.out_dir, cfg.run)
        self.fsdp = cfg.fsdp and not cfg.eval_only
        if self.fsdp:
            shard(model, procs.device, procs.world)
        self.optimizers = make_optimizers(model, cfg)
        self.step = 0
        self.evaluated = 0                      # the step of the last evaluation
        self.best_ce = math.inf
        if ckpt is not None:
            self.restore(ckpt)
        on = can_compile(procs.device) if cfg.compile == "auto" else cfg.compile == "true"
        if on and self.fsdp:
            torch._dynamo.config.recompile_limit = 64   # all blocks share one function's compilations
            for block in blocks_of(model):      # the hooks around the blocks are not compiled
                block.compile()
        self.forward = torch.compile(model) if on and not self.fsdp else model
        if procs.world > 1 and not self.fsdp:
            self.forward = torch.nn.parallel.DistributedDataParallel(self.forward)
        self.autocast = lambda: autocast(cfg, procs.device)
        self.log = None

    # ---------------------------------------------------------------------------------------------
    # the loop

    def run(self):
        """Train to max_steps. Returns True when done, False when a signal stopped the run (the
        state is saved)."""
        cfg = self.cfg
        with StopRequest(self.procs.world) as stop:
            while self.step < cfg.max_steps:
                if self.evaluated < self.step and self.step % cfg.eval_interval == 0:
                    self.save_and_evaluate()
                logged, asked = self.train_step(stop)
                if cfg.keep_interval and self.step % cfg.keep_interval == 0:
                    self.save(f"step_{self.step}.pt")
                if self.log:
                    self.log.step(logged, write=self.step % cfg.log_interval == 0 or asked)
                if asked:
                    self.save("ckpt.pt")
                    return False
            if self.evaluated < self.step:
                self.save_and_evaluate(final=True)
                self.save("ckpt.pt")        # a longer run goes on from here, with this evaluation
        return True

    def train_step(self, stop):
        """One optimizer step over the global batch. Returns the values to log, and whether any
        process was asked to stop. UserError on every process, before any weight moves, if the
        loss or a gradient is not finite."""
        cfg, procs = self.cfg, self.procs
        self.model.train()
        self.model.set_step(self.step)
        n = cfg.gradient_accumulation_steps // procs.world      # micro-batches of this process
        indices = range(procs.rank * n, (procs.rank + 1) * n)
        micro = [self.batches.micro_batch(self.step, i) for i in indices]
        counts = [int((y != -1).sum()) for _, y in micro]
        total = max(1.0, procs.sum(sum(counts))[0])             # targets of the global batch
        all_rows = cfg.batch_size * cfg.gradient_accumulation_steps
        logged = {}
        for index, (x, y), count in zip(indices, micro, counts):
            self.seed_forward(index)
            # DDP sums gradients once a step; FSDP after each micro-batch, to keep them sharded
            last = procs.world == 1 or self.fsdp or index == indices[-1]
            with contextlib.nullcontext() if last else self.forward.no_sync():
                with self.autocast():
                    x, y = self.to_device(x), self.to_device(y)
                    logits, loss, aux = self.forward(x, y)
                    if self.teacher is not None:
                        loss, aux = self.distil(x, y, logits, loss, aux)
                # a mean over tokens; DDP and FSDP average over processes, so `world` undoes that
                (loss * (count / total * procs.world)).backward()
            values = {key: value.detach() * (count / total) for key, value in aux.items()}
            if self.task:
                tokens, rows = count_right(logits, y)
                values["token_accuracy"] = tokens / total
                values["sequence_accuracy"] = rows / all_rows
            for key, value in values.items():
                logged[key] = logged.get(key, 0.0) + value
        return self.update(logged, stop)

    def seed_forward(self, index):
        """Dropout, and any other random number of a forward pass, depends on (seed, step,
        micro-batch) only."""
        seed = np.random.SeedSequence([self.cfg.seed, self.step, index, 1])   # 1: see tasks.py
        high, low = seed.generate_state(2, np.uint32)
        torch.manual_seed(int(high) << 32 | int(low))

    def to_device(self, x):
        if self.procs.device.type == "cuda":
            return x.pin_memory().to(self.procs.device, non_blocking=True)
        return x.to(self.procs.device)

    def distil(self, x, y, logits, loss, aux):
        """Add the distillation loss (Hinton et al. 2015): ce_weight * loss + kd_weight * kd. kd
        is the KL divergence from the teacher's distribution, both at kd_temperature t, averaged
        over the targets that count, times t^2, so that t does not change the gradient's size."""
        t, counted = self.cfg.kd_temperature, y != -1
        with torch.no_grad():
            p = (self.teacher(x)[0] / t).log_softmax(-1)                # (B, T, V)
        kl = (p.exp() * (p - (logits / t).log_softmax(-1))).sum(-1)     # (B, T)
        kd = t ** 2 * (kl * counted).sum() / counted.sum().clamp(min=1)
        loss = self.cfg.ce_weight * loss + self.cfg.kd_weight * kd
        return loss, {**aux, "kd": kd.detach()}

    def update(self, logged, stop):
        """Clip the gradients, sum the logged values over processes, and move the weights, unless
        something is not finite. All processes learn whether one was asked to stop."""
        cfg, model = self.cfg, self.model
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), cfg.grad_clip or math.inf)
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm     # sharded gradients
        values = [float(v) for v in logged.values()]
        *values, asked = self.procs.sum(*values, float(stop.asked))
        logged = dict(zip(logged, values), grad_norm=float(norm))
        bad = [k for k in ("ce", "grad_norm") if not math.isfinite(logged[k])]
        if bad:
            saved = (self.folder / "ckpt.pt").exists()
            kept = "ckpt.pt is kept" if saved else "no checkpoint was saved yet"
            raise UserError(f"{bad[0]} is {logged[bad[0]]} at step {self.step}: stopped before "
                            f"the update, {kept}")
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                set_schedules(group, self.step, cfg)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        if hasattr(self.model, "end_step"):
            self.model.end_step(logged)
        factor = lr_factor(self.step, cfg)
        logged["lr"] = cfg.learning_rate * factor
        if cfg.optimizer == "muon":
            logged["muon_lr"] = cfg.muon_learning_rate * factor
        self.step += 1
        return logged, asked > 0

    # ---------------------------------------------------------------------------------------------
    # evaluation

    @torch.no_grad()
    def evaluate(self):
        """Mean cross-entropy over the validation text in nats a token, and bits per byte; of a
        task, the fractions of scored tokens and of rows that are right. Draws no random number
        and changes no weight.

        The model computes its decoding function (eval mode). If it can estimate that by its
        training path, it does so on all batches, and computes the exact figures, by which best.pt
        is chosen, on exact_batches of them. val_gap: the exact cross-entropy minus the estimate,
        on the batches that have both."""
        self.model.eval()
        self.model.set_step(self.step)
        batches = self.batches.val_batches(self.cfg.eval_batches)
        n, wanted = len(batches), self.cfg.exact_batches
        exact = set(np.linspace(0, n - 1, wanted).astype(int) if 0 < wanted < n else range(n))
        metrics = getattr(self.model, "eval_metrics", ())
        sums = dict.fromkeys(("nats", "tokens", "rows", "right_tokens", "right_rows",
                              "estimated_nats", "estimated_tokens", "gap", *metrics), 0.0)
        with self.all_weights():
            for i in range(self.procs.rank, n, self.procs.world):
                x, y = map(self.to_device, self.batches.cut(self.batches.val, batches[i]))
                for name, value in self.evaluate_batch(x, y, i in exact, metrics).items():
                    sums[name] += value
        sums = dict(zip(sums, self.procs.sum(*sums.values())))
        result = self.losses_of(sums)
        result |= {f"val_{name}": sums[name] / sums["tokens"] for name in metrics}
        if hasattr(self.model, "end_evaluation"):       # figures that are no mean over batches
            more = self.model.end_evaluation(self.procs.sum)
            result |= {f"val_{name}": value for name, value in more.items()}
        return result

    def all_weights(self):
        """Inside, this process runs the model without the others."""
        return gathered(self.model) if self.fsdp else contextlib.nullcontext()

    def evaluate_batch(self, x, y, exact, metrics):
        """The sums of one batch, by the names in evaluate."""
        tokens, sums = int((y != -1).sum()), {}
        with self.autocast():
            estimate = self.model.estimate(x, y) if hasattr(self.model, "estimate") else None
            if estimate is not None:
                sums["estimated_nats"] = float(estimate) * tokens
                sums["estimated_tokens"] = tokens
                if not exact:
                    return sums
            logits, _, aux = self.model(x, y)
        sums |= {"nats": float(aux["ce"]) * tokens, "tokens": tokens, "rows": len(y)}
        if estimate is not None:
            sums["gap"] = sums["nats"] - sums["estimated_nats"]
        if self.task:
            sums["right_tokens"], sums["right_rows"] = map(int, count_right(logits, y))
        return sums | {name: float(aux[name]) * tokens for name in metrics}

    def losses_of(self, sums):
        """Losses and accuracies of an evaluation's sums, named as in log.jsonl."""
        ce = sums["nats"] / sums["tokens"]
        result = {"val_ce": ce}
        if self.task:
            result["val_token_accuracy"] = sums["right_tokens"] / sums["tokens"]
            result["val_sequence_accuracy"] = sums["right_rows"] / sums["rows"]
        else:
            result["val_bpb"] = bits_per_byte(ce, self.batches.val)
        if sums["estimated_tokens"]:
            result["val_ce_estimate"] = sums["estimated_nats"] / sums["estimated_tokens"]
            result["val_gap"] = sums["gap"] / sums["tokens"]
        return result

    # ---------------------------------------------------------------------------------------------
    # saving

    def save_and_evaluate(self, final=False):
        """Save ckpt.pt, evaluate, and save best.pt if it is the best. The state is on the disk
        before the evaluation runs: a run that is stopped in between evaluates again, with the
        same result, when it is resumed."""
        self.save("ckpt.pt")
        result = self.evaluate()
        self.evaluated = self.step
        best = result["val_ce"] < self.best_ce
        self.best_ce = min(self.best_ce, result["val_ce"])
        if best:
            self.save("best.pt")
        if self.log:
            self.log.evaluation(result, best, final)

    def save(self, name):
        state = self.state()                    # of sharded weights: all processes take part
        if self.procs.master:
            save_checkpoint(self.folder / name, state)

    def state(self):
        """All that a resumed run needs, as tensors and plain values. (The trainer draws no random
        number that depends on the RNG's state; a model may.)"""
        cuda = self.procs.device.type == "cuda"
        return {"format": 1, "model": self.cfg.model,
                "config": {**asdict(self.cfg), **asdict(self.model.cfg)},
                "model_config": asdict(self.model.cfg),
                "tokenizer": self.tokenizer.to_dict(),
                "weights": whole(dict(self.model.state_dict())),
                "optimizers": [whole(o.state_dict()) for o in self.optimizers],
                "step": self.step, "evaluated": self.evaluated, "best_ce": self.best_ce,
                "rng": {"cpu": torch.get_rng_state(),
                        "cuda": torch.cuda.get_rng_state() if cuda else None}}

    def restore(self, ckpt):
        """Go on from the state of a checkpoint; the model has its weights already."""
        load_optimizers(self.optimizers, ckpt["optimizers"])
        self.step, self.evaluated = ckpt["step"], ckpt["evaluated"]
        self.best_ce = ckpt["best_ce"]
        try:
            torch.set_rng_state(ckpt["rng"]["cpu"])
            if ckpt["rng"]["cuda"] is not None and self.procs.device.type == "cuda":
                torch.cuda.set_rng_state(ckpt["rng"]["cuda"])
        except (KeyError, TypeError, AttributeError, RuntimeError) as e:
            raise UserError(f"resume: the checkpoint's rng is wrong: {type(e).__name__} "
                            f"{first_line(e)}") from e


# -------------------------------------------------------------------------------------------------
# the log

class Log:
    """log.jsonl, the progress bar, the plot, wandb and TensorBoard; on the first process only.

    log.jsonl has one object a line. A resumed run drops the lines after its checkpoint, which a
    killed run may have written, and counts tokens, FLOPs and seconds on from the last line kept.
    """

    def __init__(self, trainer):
        cfg, self.trainer = trainer.cfg, trainer
        makers = ((cfg.wandb, wandb_sink), (cfg.tensorboard, tensorboard_sink))
        self.sinks = [make(cfg, trainer) for on, make in makers if on]
        self.path = trainer.folder / "log.jsonl"
        self.tokens_per_step = tokens_per_step(cfg, trainer.model)
        self.flops_per_token = trainer.model.flops_per_token()
        self.peak = peak_flops(trainer.procs.device)
        last = self.restart(trainer.step, trainer.evaluated)
        later = range(last["step"], trainer.step)
        self.tokens = last["tokens"] + self.tokens_per_step * len(later)
        self.flops = last["flops"] + self.tokens_per_step * sum(map(self.flops_of_step, later))
        self.seconds = last["seconds"]
        self.start = self.plotted = time.perf_counter()
        self.bar = tqdm(total=cfg.max_steps, initial=trainer.step, unit="step", disable=None,
                        dynamic_ncols=True)
        self.start_lap()

    def restart(self, step, evaluated):
        """Keep the lines up to the checkpoint; returns the last one."""
        rows = read_log(self.path) if step else []
        kept = [row for row in rows if row["step"] <= (evaluated if "val_ce" in row else step)]
        temporary = self.path.with_name("log.jsonl.tmp")
        with writing(self.path):
            temporary.write_text("".join(json.dumps(row) + "\n" for row in kept))
            os.replace(temporary, self.path)
        return kept[-1] if kept else dict(step=0, tokens=0, flops=0.0, seconds=0.0)

    def start_lap(self):
        """tokens_per_second counts from here."""
        self.lap, self.lap_step = time.perf_counter(), self.trainer.step

    def step(self, logged, write):
        """Count one training step, and write a line about it if `write`."""
        self.tokens += self.tokens_per_step
        self.flops += self.tokens_per_step * self.flops_of_step(self.trainer.step - 1)
        self.bar.update()
        if not write:
            return
        steps, seconds = self.trainer.step - self.lap_step, time.perf_counter() - self.lap
        rate = steps * self.tokens_per_step / seconds
        self.start_lap()
        values = {**logged, "tokens_per_second": round(rate, 1)}
        if not self.trainer.task:
            values["bpb"] = bits_per_byte(logged["ce"], self.trainer.batches.train)
        if self.peak:
            values["mfu"] = rate * self.flops_per_token / (self.peak * self.trainer.procs.world)
        self.write(values)
        self.bar.set_postfix_str(f"ce {logged['ce']:.3f}, {rate / 1000:.1f}k tokens/s")

    def flops_of_step(self, step):
        """FLOPs a token of the update after `step`: more in MoR's capacity warm-up."""
        if step < getattr(self.trainer.model.cfg, "capacity_warmup", 0):
            return self.trainer.model.flops_per_token(step=step)
        return self.flops_per_token

    def evaluation(self, result, best, final):
        self.write(result)
        self.plot(final)
        self.start_lap()                        # evaluations are not training time
        with self.bar.external_write_mode(file=sys.stdout):
            step = self.trainer.step
            print(f"step {step}: {in_words(result)}{' (best)' if best else ''}", flush=True)

    def write(self, values):
        step, seconds = self.trainer.step, self.seconds + time.perf_counter() - self.start
        row = {"step": step, "tokens": self.tokens, "flops": self.flops,
               "seconds": round(seconds, 3), **values}
        with writing(self.path), open(self.path, "a") as f:
            f.write(json.dumps(row) + "\n")
        for sink in self.sinks:
            sink(step, values)

    def plot(self, final):
        """Draw curves.png: at the end, and at most once a minute before."""
        if final or time.perf_counter() - self.plotted > 60:
            path = self.path.with_name("curves.png")
            with writing(path):
                draw_curves(read_log(self.path), path, self.trainer.cfg.run)
            self.plotted = time.perf_counter()


def in_words(result):
    """The line that is printed about an evaluation."""
    words = f"val ce {result['val_ce']:.4f} nats per token, "
    if "val_bpb" in result:
        words += f"{result['val_bpb']:.4f} bits per byte"
    else:
        words += (f"token accuracy {result['val_token_accuracy']:.3f}, "
                  f"sequence accuracy {result['val_sequence_accuracy']:.3f}")
    if "val_gap" in result:
        words += (f"; by the training path {result['val_ce_estimate']:.4f} on all batches, from "
                  f"which the exact figure differs by {result['val_gap']:+.4f} on those that have "
                  f"both")
    if "val_ce_topk" in result:
        words += f"; with top-k choice it would be {result['val_ce_topk']:.4f}"
    depths = [f"{key.removeprefix('val_depth')}: {fraction:.0%}"
              for key, fraction in result.items() if key.startswith("val_depth")]
    return words + ("; depth " + ", ".join(depths) if depths else "")


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


# -------------------------------------------------------------------------------------------------
# the command line

def finish(trainer, done):
    """Print what the model writes (of a task, what it answers), and where the files are."""
    cfg, model = trainer.cfg, trainer.model
    trainer.log.bar.close()
    if not done:
        print(f"stopped at step {trainer.step}; go on with resume=true")
        return
    if cfg.sample_tokens:
        text = (show_example(model, trainer.batches) if trainer.task else
                sample_text(model, trainer.tokenizer, cfg.sample_prompt, cfg.sample_tokens,
                            seed=cfg.seed))
        print("-" * 80 + "\n" + text + "\n" + "-" * 80)
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
        with trainer.all_weights():
            if trainer.procs.master:
                finish(trainer, done)
    trainer.procs.leave()


if __name__ == "__main__":
    run_cli(main)

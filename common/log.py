"""
log.jsonl, one object a line: written while training, read for pictures and tables.
"""
import contextlib
import json
import os
import sys
import time
from dataclasses import asdict

from tqdm import tqdm

from common.data import bits_per_byte
from common.keys import UserError, need, read_bytes, writing
from common.process import tokens_per_step


def read_log(path):
    """The objects of a log.jsonl; a line cut short by a crash is left out."""
    try:
        lines = read_bytes(path).decode(errors="replace").splitlines() if path.exists() else []
    except OSError as e:
        raise UserError(f"{path} cannot be read: {e.strerror}") from e
    rows = []
    for line in lines:
        with contextlib.suppress(ValueError, RecursionError):
            rows.append(json.loads(line))
    return [row for row in rows if isinstance(row, dict)
            and all(type(row.get(key)) in (int, float) for key in ("step", "seconds"))]


class Log:
    """log.jsonl, the progress bar and wandb; on the first process only.

    log.jsonl has one object a line. A resumed run drops the lines after its checkpoint, which a
    killed run may have written, and counts tokens, FLOPs and seconds on from the last line kept.
    """

    def __init__(self, run):
        self.run, self.path = run, run.folder / "log.jsonl"
        keys = {**asdict(run.cfg), **asdict(run.model.cfg)}
        self.wandb = run.cfg.wandb and need("wandb").init(
            project="nanorecur", name=run.cfg.run, dir=run.folder, config=keys)
        self.tokens_per_step = tokens_per_step(run.cfg, run.model)
        last = self.restart()
        later = range(last["step"], run.step)
        self.tokens = last["tokens"] + self.tokens_per_step * len(later)
        self.flops = last["flops"] + self.tokens_per_step * sum(map(self.flops_of_step, later))
        self.start = time.perf_counter() - last["seconds"]
        self.bar = tqdm(total=run.cfg.max_steps, initial=run.step, unit="step", disable=None,
                        dynamic_ncols=True, file=sys.stderr)
        self.start_lap()

    def restart(self):
        """Keep the lines up to the checkpoint; returns the last one."""
        rows = read_log(self.path) if self.run.step else []
        kept = [row for row in rows
                if row["step"] <= (self.run.evaluated if "val_ce" in row else self.run.step)]
        temporary = self.path.with_name("log.jsonl.tmp")
        with writing(self.path):
            temporary.write_text("".join(json.dumps(row) + "\n" for row in kept))
            os.replace(temporary, self.path)
        return kept[-1] if kept else dict(step=0, tokens=0, flops=0.0, seconds=0.0)

    def start_lap(self):
        """tokens_per_second counts from here: evaluations are not training time."""
        self.lap, self.lap_step = time.perf_counter(), self.run.step

    def flops_of_step(self, step):
        """FLOPs a token of the update after `step`: more in MoR's capacity warm-up."""
        warming = step < getattr(self.run.model.cfg, "capacity_warmup", 0)
        return self.run.model.flops_per_token(**{"step": step} if warming else {})

    def step(self, logged, write):
        """Count one training step, and write a line about it if `write`."""
        self.tokens += self.tokens_per_step
        self.flops += self.tokens_per_step * self.flops_of_step(self.run.step - 1)
        self.bar.update()
        if not write:
            return
        seconds = time.perf_counter() - self.lap
        rate = (self.run.step - self.lap_step) * self.tokens_per_step / seconds
        values = {**logged, "tokens_per_second": round(rate, 1)}
        if not self.run.task:
            values["bpb"] = bits_per_byte(logged["ce"], self.run.batches.train)
        self.write(values)
        self.bar.set_postfix_str(f"ce {logged['ce']:.3f}, {rate / 1000:.1f}k tokens/s")
        self.start_lap()

    def evaluation(self, result, best):
        self.write(result)
        with self.bar.external_write_mode(file=sys.stdout):
            print(f"step {self.run.step}: {in_words(result)}{' (best)' * best}", flush=True)
        self.start_lap()

    def write(self, values):
        row = {"step": self.run.step, "tokens": self.tokens, "flops": self.flops,
               "seconds": round(time.perf_counter() - self.start, 3), **values}
        with writing(self.path), open(self.path, "a") as f:
            f.write(json.dumps(row) + "\n")
        if self.wandb:
            self.wandb.log(values, step=self.run.step)


def in_words(result):
    """The line that is printed about an evaluation."""
    words = [f"val ce {result['val_ce']:.4f} nats per token"]
    if "val_bpb" in result:
        words.append(f"{result['val_bpb']:.4f} bits per byte")
    return ", ".join(words + [f"{name.removeprefix('val_').replace('_', ' ')} {value:.3f}"
                              for name, value in result.items()
                              if name not in ("val_ce", "val_bpb")])

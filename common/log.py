"""
The log of a training run: log.jsonl with one object a line, and what a terminal shows of it.
"""
import contextlib
import json
import os
import sys
import time

from tqdm import tqdm

from common.checkpoint import read_log
from common.data import bits_per_byte
from common.device import gpu_peaks
from common.options import note, replace_file, say

# train.py logs values of its own under these names. No value of a model may have one of them.
OWN_NAMES = {"step", "tokens", "flops", "seconds", "tokens_per_second", "mfu", "bpb", "lr",
             "grad_norm", "kd", "token_accuracy", "sequence_accuracy"}
SIGN_OF_LIFE = 30       # seconds between lines on a stderr that is no terminal


class Log:
    """A Log writes log.jsonl and the progress bar, or lines on stderr in the bar's place. Only the
    first process has one. A resumed run drops the lines that its checkpoint does not know of, which
    a killed run has written. Among them are evaluations after `evaluated`, which are made again. On
    known GPUs the lines have mfu (model FLOPs utilization), the fraction of the GPUs' peak that the
    model's FLOPs reach."""

    def __init__(self, run):
        self.run, self.path = run, run.folder / "log.jsonl"
        rows = read_log(self.path) if run.step else []
        rows = [row for row in rows         # lines of training steps have "lr", and others not
                if row["step"] <= (run.step if "lr" in row else run.evaluated)]
        replace_file(self.path, "".join(json.dumps(row) + "\n" for row in rows).encode())
        self.start = time.perf_counter() - (rows[-1]["seconds"] if rows else 0)
        # True hides the bar. This is for a terminal without columns. With None, tqdm hides the bar
        # if stderr is no terminal.
        self.bar = tqdm(total=run.cfg.max_steps, initial=run.step, unit="step",
                        disable=no_columns() or None, dynamic_ncols=True, file=sys.stderr)
        self.lap = time.perf_counter(), run.tokens              # at the last line of a step
        self.told = *self.lap, run.step                         # at the last sign of life
        self.torn = ""          # a line break after a line that could not be written whole
        # All GPUs together do `peak` operations a second at most. Products of float32 use TF32,
        # which has half the rate of bfloat16. peak is None for an unknown GPU or a CPU.
        peaks = gpu_peaks(run.procs.device)
        part = 1 if run.procs.precision == "bfloat16" else 0.5
        self.peak = peaks and run.procs.world * part * peaks[0]

    def leave_out(self, seconds):
        """Leave out of all speeds a time that went into saving and evaluating."""
        self.lap = self.lap[0] + seconds, *self.lap[1:]
        self.told = self.told[0] + seconds, *self.told[1:]

    def step(self, logged, write):
        """Count a training step that is done. If `write` is true, add a line with its values to
        the log."""
        self.bar.update()
        self.sign_of_life(logged["ce"])
        if not write:
            return
        start, tokens = self.lap
        rate = (self.run.tokens - tokens) / (time.perf_counter() - start)
        values = {**logged, "tokens_per_second": round(rate, 1)}
        if self.peak:
            values["mfu"] = round(rate * self.run.model.flops_per_token() / self.peak, 4)
        if not self.run.task:
            values["bpb"] = bits_per_byte(logged["ce"], self.run.batches.train)
        self.write(values)
        self.lap = time.perf_counter(), self.run.tokens
        self.bar.set_postfix_str(f"ce {logged['ce']:.3f}, {rate / 1000:.1f}k tokens/s")

    def sign_of_life(self, ce):
        """Print a line now and then if there is no progress bar."""
        run, now, (start, tokens, step) = self.run, time.perf_counter(), self.told
        if self.bar.disable and now - start >= SIGN_OF_LIFE:
            left = (run.cfg.max_steps - run.step) * (now - start) / (run.step - step)
            say(f"step {run.step:,} of {run.cfg.max_steps:,}: ce {ce:.3f}, "
                f"{(run.tokens - tokens) / (now - start) / 1000:.1f}k tokens/s, "
                f"{tqdm.format_interval(left)} left", sys.stderr)
            self.told = now, run.tokens, run.step

    def evaluation(self, result, best):
        self.write(result)
        with self.bar.external_write_mode(file=sys.stdout):
            say(f"step {self.run.step}: {in_words(result)}{' (best)' * best}")

    def write(self, values):
        row = {"step": self.run.step, "tokens": self.run.tokens, "flops": self.run.flops,
               "seconds": round(time.perf_counter() - self.start, 3), **values}
        try:
            with open(self.path, "a") as f:
                f.write(f"{self.torn}{json.dumps(row)}\n")
            self.torn = ""
        except OSError as e:    # a full disk may have room again when the run is saved
            if not self.torn:
                note(f"{self.path} cannot be written ({e.strerror}); the run goes on")
            self.torn = "\n"


def no_columns():
    """Return whether stderr is a terminal without columns, as some containers have it."""
    with contextlib.suppress(OSError, ValueError):
        return os.get_terminal_size(sys.stderr.fileno()).columns == 0
    return False


def in_words(result):
    """Return the line that is printed about an evaluation. val_ce is missing if it is not
    finite."""
    words = [] if "val_ce" in result else ["val ce not finite"]
    words += [f"{name.replace('_', ' ')} {value:.4f}" for name, value in result.items()]
    return ", ".join(words)

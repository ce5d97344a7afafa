"""
One way to measure, and one way to print it: candidates in turns, beside a baseline.
"""
import math
import statistics
import time
from functools import partial

import torch

import rt_wavefront


def measure(candidates, device, rounds, warmup=2):
    """{name: seconds of each round, or None if it does not fit}. candidates: {name: make}; make()
    gives (prepare, call), and prepare, if there is one, runs before each call, outside the clock.

    On a CPU the candidates take turns, so that a noisy neighbour slows all alike. On a GPU they
    come one after the other: each has the memory for itself."""
    times, names = {}, list(candidates)
    for group in [[name] for name in names] if device.type == "cuda" else [names]:
        try:
            times |= take_turns({name: candidates[name] for name in group}, device, rounds, warmup)
        except torch.cuda.OutOfMemoryError:
            times |= dict.fromkeys(group)
        rt_wavefront.GRAPHS.clear()         # they hold memory too, and so does what is compiled
        torch._dynamo.reset()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return times


def take_turns(candidates, device, rounds, warmup):
    calls = {name: make() for name, make in candidates.items()}
    times = {name: [] for name in calls}
    for n in range(warmup + rounds):
        for name, (prepare, call) in calls.items():
            seconds = clock(prepare, call, device)
            if n >= warmup:
                times[name].append(seconds)
    return times


def clock(prepare, call, device):
    wait = getattr(torch, device.type).synchronize      # of a CPU: there is nothing to wait for
    if device.type == "cuda":
        wait = partial(wait, device)            # which need not be the current one
    if prepare:
        prepare()
    wait()
    start = time.perf_counter()
    call()
    wait()
    return time.perf_counter() - start


def ratio(times, baseline):
    """The median of the rounds' ratios, which noise moves less than the times; None for None."""
    if times is None or baseline is None:
        return None
    return statistics.median(a / b for a, b in zip(times, baseline))


def fastest(times, word):
    """Of the candidates whose names begin with a word; None if none fits."""
    fit = [name for name, t in times.items() if t and name.startswith(word)]
    return min(fit, key=lambda name: statistics.median(times[name]), default=None)


def table(title, times, baseline, per=1, tokens=0, goals={}, notes={}):
    """Print a line for each candidate. per: what a call is divided by; tokens: of a call, for
    tokens/s; goals: the ratio to reach; notes: what else to say."""
    for name, t in times.items():
        line, r = f"{title:19} {name:29} ", ratio(t, times.get(baseline))
        seconds = statistics.median(t) if t else math.nan
        line += f"{1000 * seconds / per:11.3f} ms" if t else "  does not fit"
        line += f"{tokens / seconds:11,.0f} tokens/s" if t and tokens else ""
        line += f"{r:8.3f} x {baseline}" if r else ""
        line += f" (goal {goals[name]})" if name in goals else ""
        print(f"{line} {notes.get(name, '')}".rstrip(), flush=True)


def compare(title, candidate, cases, device, rounds, *args, baseline=None, **columns):
    """Measure candidate(case, device, *args) of each of the cases {name: case}, print the table and
    return the times. The baseline is the first case, or the fastest that begins with a word."""
    calls = {name: partial(candidate, case, device, *args) for name, case in cases.items()}
    times = measure(calls, device, rounds)
    table(title, times, fastest(times, baseline) if baseline else next(iter(cases)), **columns)
    return times

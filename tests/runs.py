"""Small training runs for the tests. This file has their arguments, a run in this process, and a run in a process that
may be killed."""
import multiprocessing
import os
import signal
import socket
import sys
import time
from unittest import mock

import torch
from torch.utils._pytree import tree_map_only

from common import checkpoint, options
from common.options import unlock
import train

SMALL = ["dataset=words", "tokenizer=byte", "block_size=16", "n_layer=2", "n_head=2", "n_embd=16", "dropout=0.1",
         "batch_size=2", "max_steps=6", "learning_rate=1e-3", "warmup_steps=2", "eval_interval=100", "eval_batches=2",
         "log_interval=1", "sample_tokens=0", "device=cpu", "compile=false",
         "optimizer=adamw", "lr_schedule=cosine", "weight_decay=0.1", "min_lr_frac=0.1"]

# These options are for models that SMALL and their own config file do not fit.
SIZES = {"gpt": ["tie_embeddings=true", "qk_norm=false"], "mor": ["n_layer=4", "n_loop=2"],
         "relaxed": ["tie_embeddings=true", "qk_norm=false"]}


def arguments(model, out_dir, data_dir, *extra):
    small = [key for key in SMALL if not key.startswith("max_steps") or "max_flops" not in " ".join(extra)]
    return [f"model={model}", f"out_dir={out_dir}", f"data_dir={data_dir}", "run=r", *small, *SIZES.get(model, []),
            *extra]


def run(model, out_dir, data_dir, *extra, stop_after=None):
    """Return a train.Run that trained in this process. stop_after=k sends SIGTERM in step k, twice, as timeout does."""
    run, step = train.setup(arguments(model, out_dir, data_dir, *extra)), train.train_step

    def counted(run, stop):
        if run.step + 1 == stop_after:
            for _ in range(2):
                os.kill(os.getpid(), signal.SIGTERM)
        return step(run, stop)
    with mock.patch.object(train, "train_step", counted):
        assert train.train(run) == (stop_after is None)
    unlock(run.folder)       # as at the end of a process
    return run


def fingerprint(x):
    """Return a nested value with each tensor as its dtype, shape and bytes. Two of them are equal if every bit is."""
    bits = lambda x: (x.dtype, x.shape, x.detach().contiguous().flatten().numpy().tobytes())
    return tree_map_only(torch.Tensor, bits, x)


def learned(run_or_state):
    """Return the fingerprint of what a run has learned: weights, optimizer, step, best loss."""
    state = run_or_state if isinstance(run_or_state, dict) else train.state(run_or_state)
    return fingerprint({k: v for k, v in state.items() if k != "config"})


def start_child(output):
    """Begin a forked process, whose output goes to a file. It hears SIGINT, which the parent ignores if a shell started
    it in the background."""
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 1)
    os.dup2(1, 2)


def main_in_child(argv, die_at=None, output=os.devnull):
    """Run train.main in a forked process. die_at=(call, n) kills it without warning just before (call="fsync") or just
    after (call="fsync!") the n-th such call inside save_checkpoint."""
    start_child(output)
    if die_at:
        name, calls = die_at[0].rstrip("!"), []
        place = {"save": checkpoint.torch, "sync_folder": checkpoint}.get(name, os)
        original = getattr(place, name)

        def deadly(*args, **kwargs):
            calls.append(1)
            result = original(*args, **kwargs) if len(calls) < die_at[1] or die_at[0].endswith("!") else None
            if len(calls) == die_at[1]:
                os.kill(os.getpid(), signal.SIGKILL)
            return result
        setattr(place, name, deadly)
    train.main(argv)


def rank_in_child(rank, port, folder, argv, change=None):
    """Run train.py as one of two processes, as torchrun starts it. Its output goes to folder/RANK.txt. change() is
    called before."""
    start_child(folder / f"{rank}.txt")
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="localhost", MASTER_PORT=str(port))
    if change:
        change()
    sys.argv = ["train.py", *argv]
    options.run_cli(train.main)
    sys.exit(86)        # Python's shutdown may abort, so that a run that succeeds does not come here (Processes.leave)


def two_ranks(folder, argv, change=None):
    """Return the exit codes of two processes, and what each prints. change is called in the first process."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    ranks = [fork(rank_in_child, rank, port, folder, argv, [change, None][rank]) for rank in (0, 1)]
    for rank in ranks:
        rank.join(120)
    return [child.exitcode for child in ranks], [(folder / f"{rank}.txt").read_text() for rank in (0, 1)]


def kill_after(saves, process, file, rng):
    """Kill a process soon after it has replaced file so many times. The replacements are counted, because machines
    differ in speed."""
    stamps = set()
    while process.is_alive() and len(stamps - {None}) < saves:
        stamps.add(file.stat().st_mtime_ns if file.exists() else None)
        time.sleep(0.002)
    time.sleep(rng.uniform(0, 0.05))
    process.kill()
    process.join()


def fork(function, *args):
    """Start a process that is forked from a server, and return it. The server has imported torch but never computed with
    it, because a fork after OpenMP has run would hang."""
    ctx = multiprocessing.get_context("forkserver")
    ctx.set_forkserver_preload(["torch", "torch.distributed.fsdp", "matplotlib.pyplot", "train", "runs"])
    process = ctx.Process(target=function, args=args, daemon=True)  # it does not outlive a test that fails
    process.start()
    return process

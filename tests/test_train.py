"""The trainer. The tests look at resuming, schedules, optimizers, logs, signals, several processes, and random
configurations."""
import itertools
import json
import math
import os
import random
import re
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from common import checkpoint, device, huggingface, log, options, optim
from common.data import Windows
from lab import eval as evaluation
import prepare
import runs
import sample
import train
from common.options import TrainConfig, UserError, merge
from conftest import MODELS, ROOT, TORCHRUN, move, python, snapshot, tiny
from emulated_graphs import emulate
from test_fsdp import assert_alike

models = pytest.mark.parametrize("name", MODELS)
RESUMED = [*((name, []) for name in MODELS), ("gpt", ["optimizer=muon"]),
           ("gpt", ["dataset=task:s3", "task_examples=0"]), ("gpt", ["dataset=task:recall", "task_examples=30"]),
           ("mor", ["router=token", "balance=loss_free", "max_steps=5"]), ("mor", ["loop_warmup=0.8", "n_layer=5", "n_loop=3"]),
           ("relaxed", ["loop_warmup=0.8", "n_layer=6", "n_loop=3", "rank=2", "qk_norm=true", "early_exit=weighted"])]


@pytest.mark.parametrize("name, more", RESUMED, ids=lambda x: x if isinstance(x, str) else ",".join(x[:2]))
def test_resume_at_every_step_is_bit_identical(name, more, tmp_path, data_dir):
    """Runs other than the plain gpt are stopped in the middle alone. Evaluation changes no weight, nor does
    load_run."""
    options = ["eval_interval=4", *more]
    whole = runs.run(name, tmp_path / "whole", data_dir, *options)
    assert "balance=loss_free" not in more or whole.model.balance_bias.any()
    never = runs.run(name, tmp_path / "never", data_dir, *options, "eval_interval=100")
    assert runs.fingerprint(train.state(never)["weights"]) == runs.fingerprint(train.state(whole)["weights"])
    x = torch.randint(0, whole.model.cfg.vocab_size, (1, 16))
    assert torch.equal(checkpoint.load_run(whole.folder)[0](x)[0], whole.model.eval()(x)[0])
    for k in range(1, 6) if (name, more) == ("gpt", []) else [3]:
        resume = f"resume={'auto' if k == 3 else 'true'}"       # a scheduler starts the same command again
        stopped = runs.run(name, tmp_path / str(k), data_dir, *options, *[resume] * (k == 3), stop_after=k)
        assert stopped.step == k
        resumed = runs.run(name, tmp_path / str(k), data_dir, *options, resume)
        assert resumed.step == whole.step and runs.learned(resumed) == runs.learned(whole)
        for file in ("ckpt.pt", "best.pt"):
            ours, theirs = (checkpoint.load_checkpoint(t.folder / file) for t in (resumed, whole))
            assert runs.learned(ours) == runs.learned(theirs)


SLOW = [("rt", ["schedule=naive"]), ("rt", ["schedule=tiled"]), ("lrt", ["train_path=exact"])]
RECORDED = [*((name, []) for name in MODELS), ("gpt", ["optimizer=muon", "dataset=task:recall", "task_examples=30"]),
            *(pytest.param(*case, marks=pytest.mark.full) for case in SLOW)]
GRAPH = ["gradient_accumulation_steps=2", "max_steps=2", "eval_interval=1"]


@pytest.mark.parametrize("name, more", RECORDED, ids=lambda x: x if isinstance(x, str) else ",".join(x[:2]))
def test_a_recorded_step_is_the_ordinary_one(name, more, tmp_path, data_dir, monkeypatch):
    """A run with compile=graph has the same weights, moments and log, bit for bit, with dropout, schedules and
    evaluations. Python does not run from the third call on."""
    ordinary = runs.run(name, tmp_path / "a", data_dir, *GRAPH, *more)
    emulate(monkeypatch)
    calls, micro_step = [], train.micro_step
    monkeypatch.setattr(train, "micro_step", lambda *given: (calls.append(given), micro_step(*given))[1])
    recorded = runs.run(name, tmp_path / "b", data_dir, *GRAPH, *more, "compile=graph")
    assert len(calls) == 2 and runs.learned(recorded) == runs.learned(ordinary)
    logs = [checkpoint.read_log(run.folder / "log.jsonl") for run in (recorded, ordinary)]
    timeless = [[{k: v for k, v in row.items() if k not in ("seconds", "tokens_per_second")} for row in log] for log in logs]
    assert timeless[0] == timeless[1]


def test_a_step_that_cannot_be_recorded_is_refused(tmp_path, data_dir, monkeypatch):
    """The error is one line, and it comes before the run has a folder. A checkpoint of a recorded run goes on without
    recording."""
    argv = runs.arguments("gpt", tmp_path, data_dir, *GRAPH)
    with pytest.raises(UserError, match="compile=graph needs triton and one process on a CUDA GPU, but this run has 1 on cpu"):
        train.setup([*argv, "compile=graph"])
    emulate(monkeypatch)
    with pytest.raises(UserError, match="model=mor with these options cannot be recorded .*: aten.* reads on the host"):
        train.setup(runs.arguments("mor", tmp_path, data_dir, "router=token", "compile=graph"))
    assert not (tmp_path / "r").exists()
    whole = runs.run("gpt", tmp_path / "whole", data_dir, *GRAPH)
    runs.run("gpt", tmp_path, data_dir, *GRAPH, "compile=graph", stop_after=1)
    assert runs.learned(runs.run("gpt", tmp_path, data_dir, *GRAPH, "resume=true")) == runs.learned(whole)


@models
def test_accumulation_is_one_large_batch(name, tmp_path, data_dir):
    """The same eight sequences in one, two or eight micro-batches have the same gradients, because losses count tokens,
    and each sequence has another number of them. (Losses of routing are means over sequences, so that all sequences
    have as many tokens there.)"""
    def gradients(rows, accumulation):
        run = train.setup(runs.arguments(name, tmp_path / str(rows), data_dir, f"batch_size={rows}", "dropout=0.0",
                                         f"gradient_accumulation_steps={accumulation}"))
        x, y = zip(*(run.batches.micro_batch(0, i) for i in range(accumulation)))
        if not hasattr(run.model, "routers"):
            y = torch.cat(y).masked_fill(torch.arange(16) > 2 * torch.arange(8)[:, None], -1).split(rows)
        run.batches.micro_batch = lambda step, i: (x[i], y[i])
        torch.manual_seed(0)
        move(run.model.double(), 0.1)
        train.forward_backward(run)
        return [p.grad for p in run.model.parameters() if p.grad is not None]
    whole, *parts = (gradients(*split) for split in ((8, 1), (4, 2), (1, 8)))
    for part in parts:
        assert all((a - b).norm() <= 1e-13 * b.norm() for a, b in zip(part, whole, strict=True))
    assert sum(g.abs().max() > 0 for g in whole) > len(whole) / 2


def test_resume_keeps_the_runs_settings_and_a_changed_key_holds(tmp_path, data_dir, capsys):
    """A file that is named again does not undo the first run's command line."""
    (tmp_path / "x.yaml").write_text("max_steps: 3\ninit_from: nowhere\n")
    first = [f"config={tmp_path / 'x.yaml'}", "init_from=", "weight_decay=0.1", "learning_rate=0.123"]
    runs.run("gpt", tmp_path, data_dir, *first, stop_after=3)
    argv = [f"out_dir={tmp_path}", "run=r", "resume=true", "device=cpu", first[0]]
    trainer = train.setup(argv)
    assert trainer.cfg.learning_rate == 0.123 and trainer.cfg.max_steps == 6 and trainer.model.cfg.n_embd == 16
    assert trainer.step == 3 and trainer.cfg.init_from == ""
    assert "max_steps=6 is the checkpoint's and stays; the file has 3" in capsys.readouterr().out
    trainer = train.setup([*argv, "weight_decay=0.05", "learning_rate=0.5", "max_steps=9", "block_size=8"])
    assert train.train(trainer) and trainer.step == 9 and trainer.tokens == (3 * 16 + 6 * 8) * 2
    assert {g["weight_decay"] for g in trainer.optimizers[0].param_groups} == {0.05, 0.0}
    assert {g["peak_lr"] for g in trainer.optimizers[0].param_groups} == {0.5}


@pytest.mark.parametrize("stop", [1, 2, 4])
def test_an_evaluation_is_never_skipped(stop, tmp_path, data_dir, monkeypatch):
    """If a run is stopped just where an evaluation was due, it makes up for it when it is resumed. The best loss is the
    same. The log has one line for each evaluation, and one for each step, also where a killed run got further than its
    checkpoint. The state is on the disk before the evaluation."""
    def evaluate(trainer):
        assert checkpoint.load_checkpoint(trainer.folder)["step"] == trainer.step
        return {"val_ce": {2: 1.0, 4: 3.0, 6: 2.0}[trainer.step], "val_bpb": 1.0}
    monkeypatch.setattr(train, "evaluate", evaluate)
    whole = runs.run("gpt", tmp_path / "a", data_dir, "eval_interval=2")
    runs.run("gpt", tmp_path / "b", data_dir, "eval_interval=2", stop_after=stop)
    with open(tmp_path / "b" / "r" / "log.jsonl", "a") as f:
        f.write(json.dumps({"step": stop + 1, "tokens": 1, "seconds": 1e6, "ce": 1.0}) + '\n{"step": 6, "tok')
    resumed = runs.run("gpt", tmp_path / "b", data_dir, "resume=true", "eval_interval=2")
    again = runs.run("gpt", tmp_path / "b", data_dir, "resume=true", "eval_interval=2")     # nothing is left to do
    for trainer in (resumed, again):
        assert runs.learned(trainer) == runs.learned(whole) and trainer.best_ce == 1.0
        assert checkpoint.load_checkpoint(trainer.folder)["evaluated"] == 6
        assert checkpoint.load_checkpoint(trainer.folder / "best.pt")["step"] == 2
        rows = checkpoint.read_log(trainer.folder / "log.jsonl")
        assert [[r["step"] for r in rows if key in r] for key in ("ce", "val_ce")] == [[1, 2, 3, 4, 5, 6], [2, 4, 6]]
        assert all(a["seconds"] <= b["seconds"] for a, b in zip(rows, rows[1:])) and rows[-1]["seconds"] < 1e5


def test_finetuning_starts_from_the_weights(tmp_path, data_dir, capsys):
    """The weights are those of a run or of a Hugging Face folder, and so are the sizes, which is told where a file that
    is named has others. It may change block_size and dropout."""
    first = runs.run("gpt", tmp_path / "a", data_dir)
    huggingface.to_pretrained(first.model, tmp_path / "hf")
    (tmp_path / "long.yaml").write_text("block_size: 32\ndropout: 0.25\nn_embd: 32\n")
    for source in tmp_path / "a" / "r", tmp_path / "hf":
        start = [f"init_from={source}", f"out_dir={tmp_path}", f"data_dir={data_dir}", "dataset=words", "max_steps=1",
                 f"run={source.name}2", "overwrite=true", "batch_size=2", "sample_tokens=0", "device=cpu"]
        second = train.setup(start)
        assert second.step == 0 and second.optimizers[0].state_dict()["state"] == {}
        assert runs.fingerprint(train.state(second)["weights"]) == runs.fingerprint(train.state(first)["weights"])
        fields = train.setup([*start, f"config={tmp_path / 'long.yaml'}"]).model.cfg
        assert fields.block_size == 32 and fields.dropout == 0.25 and fields.n_embd == 16
        assert "n_embd=16 is the checkpoint's and stays; the file has 32" in capsys.readouterr().out
    old = train.state(first)
    del old["model_config"]["window"]       # an option that is newer than the checkpoint
    checkpoint.save_checkpoint(tmp_path / "old.pt", old)
    (tmp_path / "window.yaml").write_text("window: 4\n")
    start = [f"init_from={tmp_path / 'old.pt'}", *start[1:], "run=old", f"config={tmp_path / 'window.yaml'}"]
    assert train.setup(start).model.cfg.window == 0
    folder = runs.run("rat", tmp_path / "b", data_dir, "max_steps=1").folder
    cfg, fields, _ = merge({"init_from": str(folder)}, checkpoint.load_start)
    with pytest.raises(UserError, match="resume= with init_from= needs run=NAME"):      # whose folder is it?
        merge({"init_from": str(folder), "resume": "auto"}, checkpoint.load_start)
    assert (cfg.model, cfg.run, fields["n_embd"]) == ("rat", "rat_tiny", 16), "the config file of their model"


def test_eval_only_writes_nothing(tmp_path, data_dir, capsys):
    """It says of the same step what the run's own evaluation said. It also evaluates at another length."""
    runs.run("gpt", tmp_path, data_dir, "pos=alibi")
    result = checkpoint.read_log(tmp_path / "r" / "log.jsonl")[-1]["val_ce"]
    (tmp_path / "a.yaml").write_text("init_from: what_the_run_began_with")
    before, argv = snapshot(tmp_path), [f"out_dir={tmp_path}", "run=r", "eval_only=true", f"data_dir={data_dir}"]
    capsys.readouterr()
    train.main([*argv, f"config={tmp_path}/a.yaml"])
    train.main([*argv, "block_size=64"])
    out = capsys.readouterr().out
    assert snapshot(tmp_path) == before and f"val ce {result:.4f}" in out and out.count("val ce") == 2
    assert train.setup(argv).step == 6 and tmp_path / "r" not in options.LOCKS      # another process may train there
    other = runs.run("gpt", tmp_path / "other", data_dir, "pos=alibi", "max_steps=1", "seed=5").model
    for resume in "false", "auto":
        more = "eval_only=true", f"init_from={tmp_path}/other/r", f"resume={resume}"
        named = train.setup(runs.arguments("gpt", tmp_path, data_dir, *more))
        assert named.step == 1 and torch.equal(named.model.wte.weight, other.wte.weight)


def test_windows_reach_the_last_token():
    val = SimpleNamespace(tokens=30)
    assert Windows(val, 2, 8).n_places(val) == 22


def test_any_number_of_processes_evaluates(monkeypatch):
    """Their number need not divide gradient_accumulation_steps."""
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(device.dist, "init_process_group", lambda *args, **more: None)
    assert device.Processes(TrainConfig(eval_only=True, gradient_accumulation_steps=1, device="cpu")).world == 3


@pytest.mark.parametrize("local, told", [("2", "there is no GPU 2 for this process"), ("1", "device=cuda cannot be used: ")])
def test_a_gpu_that_fails_is_not_called_missing(local, told, monkeypatch):
    if torch.cuda.is_available():
        pytest.skip("the second GPU does not fail")
    monkeypatch.setenv("LOCAL_RANK", local)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(UserError, match=told):
        device.pick_device("cuda", world=3)


def test_a_run_that_goes_on_tells_that_it_reads_no_other_weights(tmp_path, data_dir, capsys):
    first = runs.run("gpt", tmp_path, data_dir, "max_steps=1").folder
    for resume, told in ("auto", False), ("true", True):    # a scheduler repeats the command that began the run
        runs.run("gpt", tmp_path, data_dir, f"resume={resume}", f"init_from={first / 'best.pt'}", "max_steps=1")
        assert ("best.pt is not read, because resume=true goes on from" in capsys.readouterr().out) == told


def test_a_run_holds_the_tokenizer_of_its_data(tmp_path, data_dir):
    """lab.eval looks for it in other data sets. The data set's name does not tell it."""
    (tmp_path / "a.txt").write_text("abcde\n" * 99)
    prepare.prepare(prepare.PrepareConfig(f"file:{tmp_path}/a.txt", "char", str(tmp_path), name="named"))
    argv = runs.arguments("gpt", tmp_path, tmp_path, "dataset=named", f"config={ROOT}/configs/gpt_tiny.yaml")
    assert train.setup([key for key in argv if key != "tokenizer=byte"]).cfg.tokenizer == "char"


def test_weights_of_another_tokenizer_are_refused(tmp_path, data_dir):
    """Both data sets have six characters, but not the same ones."""
    for name, text in ("first", "abcde\n" * 99), ("second", "abcdx\n" * 99):
        (tmp_path / f"{name}.txt").write_text(text)
        prepare.prepare(prepare.PrepareConfig(f"file:{tmp_path}/{name}.txt", "char", str(tmp_path / "data"), name=name))
    words = [f"data_dir={tmp_path}/data", "tokenizer=char", "max_steps=1"]
    run = runs.run("gpt", tmp_path, data_dir, *words, "dataset=first").folder
    for how in ["resume=true"], ["run=other", f"init_from={run}"], ["run=other", f"teacher={run}"]:
        with pytest.raises(UserError, match="trained with tokenizer char with another vocabulary"):
            train.setup(runs.arguments("gpt", tmp_path, data_dir, *words, "dataset=second", *how))
    with pytest.raises(UserError, match="trained with tokenizer char, which is not the one of the data set"):
        train.setup(runs.arguments("gpt", tmp_path, data_dir, "dataset=task:s3", "run=other", f"init_from={run}"))


@pytest.mark.parametrize("schedule, factors", [
    ("cosine", {0: 0.1, 9: 1.0, 9 + 91 / 2: 0.55, 100: 0.1}), ("linear", {0: 1.0, 50: 1.0, 75: 0.55, 100: 0.1}),
    ("trapezoid", {0: 0.1, 30: 1.0, 75: 0.55, 100: 0.1})])
def test_schedules_by_hand(schedule, factors):
    cfg = TrainConfig(max_steps=100, warmup_steps=9, min_lr_frac=0.1, cooldown_frac=0.5, lr_schedule=schedule)
    for step, factor in factors.items():
        assert abs(optim.lr_factor(step, cfg) - factor) < 1e-12
    late = TrainConfig(max_steps=100, warmup_steps=90, min_lr_frac=0.1, cooldown_frac=0.2, lr_schedule="trapezoid")
    assert optim.lr_factor(85, late) == 0.1 + 0.9 * 0.75        # the warm-up goes into the cool-down, without a jump


def test_the_log_of_a_run_and_of_a_longer_one(tmp_path, data_dir):
    """The logged norm of the gradient is that before clipping. A longer run goes on from the last evaluation, which
    stays in the log and in best.pt, whatever eval_interval is. Tokens are counted at the size of their steps."""
    trainer = runs.run("gpt", tmp_path, data_dir, "eval_interval=4", "grad_clip=1e-3", "beta1=0", "eval_batches=0")
    rows = checkpoint.read_log(trainer.folder / "log.jsonl")
    steps, evaluations = ([r for r in rows if key in r] for key in ("ce", "val_ce"))
    assert [r["step"] for r in steps] == list(range(1, 7)) and [r["step"] for r in evaluations] == [4, 6]
    assert all(r["tokens"] == 32 * r["step"] for r in rows)
    assert {"ce", "bpb", "lr", "grad_norm", "tokens_per_second", "seconds"} <= steps[0].keys() and "mfu" not in steps[0]
    moments = [s["exp_avg"].flatten() for s in trainer.optimizers[0].state_dict()["state"].values()]
    assert abs(torch.cat(moments).norm() - 1e-3) < 1e-5 and steps[-1]["grad_norm"] > 0.1
    val, bpb = trainer.batches.val, evaluations[0]["val_bpb"]
    assert bpb == pytest.approx(evaluations[0]["val_ce"] / math.log(2) * val.tokens / val.bytes)
    runs.run("gpt", tmp_path, data_dir, "resume=true", "max_steps=6", "eval_batches=0")         # nothing is left to do
    worse = runs.run("gpt", tmp_path, data_dir, "resume=true", "max_steps=8", "batch_size=4", "learning_rate=50",
                     "eval_batches=0")
    rows = checkpoint.read_log(worse.folder / "log.jsonl")
    assert [row["step"] for row in rows if "val_ce" in row] == [4, 6, 8]
    assert checkpoint.load_checkpoint(worse.folder / "best.pt")["step"] == 6
    assert rows[-1]["tokens"] == (6 * 2 + 2 * 4) * 16
    assert rows[-1]["flops"] == pytest.approx(rows[-1]["tokens"] * worse.model.flops_per_token())


@pytest.mark.parametrize("dtype, part", [("auto", 0.5), ("bfloat16", 1)])
def test_the_fraction_of_a_known_gpus_peak(dtype, part, tmp_path, data_dir, monkeypatch):
    """The log has the fraction. Products of float32 have half of the peak. A CPU has no figure, as the test before
    shows."""
    monkeypatch.setattr(log, "gpu_peaks", lambda device: (1e9, 1e9))
    trainer = runs.run("gpt", tmp_path, data_dir, f"dtype={dtype}", "max_steps=2")
    for row in checkpoint.read_log(trainer.folder / "log.jsonl")[:2]:
        want = row["tokens_per_second"] * trainer.model.flops_per_token() / (part * 1e9)
        assert row["mfu"] == pytest.approx(want, rel=1e-3, abs=1e-4)


def test_a_budget_of_operations(tmp_path, data_dir):
    """The run has as many steps as the budget pays for. A max_steps= on resume wins over it."""
    model, cfg = tiny("gpt"), TrainConfig(batch_size=2, gradient_accumulation_steps=3)
    cost = 6 * model.cfg.block_size * model.flops_per_token()
    for steps, factor in itertools.product((2, 100), (1 + 1e-9, 1 - 1e-9)):
        cfg.max_flops = steps * cost * factor
        train.set_budget(cfg, model)
        assert cfg.max_steps == steps - (factor < 1)
    cfg.max_flops = 1000
    with pytest.raises(UserError, match="max_flops=1e[+]03 is less than one step of"):
        train.set_budget(cfg, model)
    whole = runs.run("gpt", tmp_path / "whole", data_dir, "max_flops=1e8").cfg.max_steps
    half = runs.run("gpt", tmp_path, data_dir, "max_flops=1e8", stop_after=2)
    assert half.cfg.max_steps == whole > 6
    # An evaluation needs no budget for a step of its batches.
    argv = runs.arguments("gpt", tmp_path, data_dir, "eval_only=true", "batch_size=999")
    assert train.setup([key for key in argv if key != "max_steps=6"]).cfg.max_flops == 1e8
    assert runs.run("gpt", tmp_path, data_dir, "resume=true").step == 6


def test_loops_rise_over_the_warm_up(tmp_path, data_dir, monkeypatch):
    """Each step trains with the loops that are due, and its FLOPs are those of its loops."""
    cfg = lambda **more: SimpleNamespace(n_loop=3, **more)
    assert optim.loop_starts(cfg(loop_warmup=0.4), 100) == [0, 20, 40] and optim.loop_starts(cfg(loop_warmup=0), 9) == [0] * 3
    assert optim.loop_starts(cfg(loop_warmup=1), 9) == [0, 5, 8]
    assert optim.loop_starts(cfg(loop_warmup=0.5), 5) == [0, 2, 3] and optim.loop_starts(SimpleNamespace(), 9) == [0]
    ran, micro_step = [], train.micro_step

    def counted(run, *batch):
        ran.append(run.model.training_loops)
        return micro_step(run, *batch)
    monkeypatch.setattr(train, "micro_step", counted)
    trainer = runs.run("relaxed", tmp_path, data_dir, "loop_warmup=0.8", "n_layer=6", "n_loop=3")
    assert ran[1:] == [1, 1, 1, 2, 2, 3]        # first comes try_micro_step
    costs = {}
    for trainer.model.training_loops in 1, 2, 3:
        costs[trainer.model.training_loops] = 32 * trainer.model.flops_per_token()
    assert costs[1] < costs[2] < costs[3] and costs[3] - costs[2] == costs[2] - costs[1]
    rows = [row for row in checkpoint.read_log(trainer.folder / "log.jsonl") if "lr" in row]
    assert [row["flops"] for row in rows] == [*itertools.accumulate(costs[loops] for loops in ran[1:])]


@pytest.mark.parametrize("warmup", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("name", ["relaxed", "mor"])
def test_a_budget_pays_for_the_loops_that_run(name, warmup):
    """Against a sum over steps."""
    model = tiny(name, loop_warmup=warmup, n_loop=3, n_layer=6 if name == "relaxed" else 5)
    cfg, costs = TrainConfig(batch_size=1), []
    for model.training_loops in 1, 2, 3:
        costs.append(model.cfg.block_size * model.flops_per_token())

    def spent(steps, max_steps):
        starts = optim.loop_starts(model.cfg, max_steps)
        return sum(costs[sum(step >= start for start in starts) - 1] for step in range(steps))
    for budget in 4.5, 10.1, 99.9:
        cfg.max_flops = budget * costs[2]
        train.set_budget(cfg, model)
        whole = cfg.max_steps
        assert spent(whole, whole) <= cfg.max_flops < spent(whole + 1, whole + 1) and model.training_loops == 3
    cfg.max_flops = 0.99 * spent(1, 1)
    with pytest.raises(UserError, match="is less than one step"):
        train.set_budget(cfg, model)


def test_a_warm_up_is_not_recorded():
    with pytest.raises(UserError, match="compile=graph records all loops"):
        train.record_micro_step(SimpleNamespace(model=tiny("relaxed", loop_warmup=0.5)))


def test_a_picture_with_a_notebooks_settings(tmp_path):
    p = python("-c", f"from lab.plot import draw; draw({str(tmp_path / 'x.png')!r}, [({{}}, [('a', [(1, 1)])])])",
               MPLBACKEND="nowhere")
    assert p.returncode == 0 and (tmp_path / "x.png").read_bytes()[:4] == b"\x89PNG", p.stderr


@pytest.mark.parametrize("environment, told", [
    ("RANK=1", "start with torchrun"), ("RANK=-1", "start with torchrun"), ("WORLD_SIZE=", "WORLD_SIZE must be an int"),
    ("WORLD_SIZE=2", "do not meet"), ("RANK=0 WORLD_SIZE=2 MASTER_ADDR=localhost MASTER_PORT=x", "do not meet")])
def test_a_half_set_distributed_environment(environment, told, tmp_path, data_dir, monkeypatch):
    for word in environment.split():
        monkeypatch.setenv(*word.split("="))
    with pytest.raises(UserError, match=told):
        train.setup(runs.arguments("gpt", tmp_path, data_dir, "gradient_accumulation_steps=2"))


def test_names_from_paths(tmp_path, data_dir, capsys):
    """Text in paths with = or $, and in a config file's name, is taken as plain text."""
    file, out = tmp_path / "_läng $1.yaml", tmp_path / "lr=0.1 $"
    file.write_text("model: gpt\n")
    argv = [a for a in runs.arguments("gpt", out, data_dir, "max_steps=1", f"config={file}") if a != "run=r"]
    train.main(argv)
    command = shlex.split(capsys.readouterr().out.rsplit("more text: ")[1])
    assert command[:2] == ["python", "sample.py"] and options.split_args(command[2:], most=None) == ([str(out / "l-ng--1")], {})
    sample.main([*command[2:], "max_new_tokens=2"])
    assert (out / "l-ng--1" / "curves.png").read_bytes()[:4] == b"\x89PNG"
    assert shlex.split(options.as_command("sample.py", path="a=1/r"))[2] == "./a=1/r"
    assert len(options.plain_name("_ä" * 300)) < 100 and options.plain_name("-") == "x"


@pytest.mark.parametrize("word", ["help", "--help", "-h"])
def test_help(word, capsys):
    train.main([word, "model=rt"])
    out = capsys.readouterr().out
    assert out.startswith("The trainer of every model") and "# which model_<name>.py" in out and "schedule: str" in out
    assert "rt_tiny.yaml has:" in out and "\ntokenizer: bpe:2048\n" in out


def test_a_prompt_that_nobody_asked_for(tmp_path, data_dir):
    """A config file's prompt is for its data set only. A run on another data set continues the first characters of its
    validation text."""
    (tmp_path / "ä.txt").write_text("äöü" * 500)
    (tmp_path / "x.yaml").write_text(f"dataset: words\nsample_prompt: ab\ndata_dir: '{data_dir}'\n")
    small = runs.arguments("gpt", tmp_path, data_dir, f"config={tmp_path / 'x.yaml'}")
    other = [*small, f"dataset=file:{tmp_path / 'ä.txt'}", f"data_dir={tmp_path}", "run=other"]
    assert train.setup(small).cfg.sample_prompt == "ab" and train.setup(other).cfg.sample_prompt == "äöüäöüäö"
    with pytest.raises(UserError, match="sample_prompt: character 'x' is not in"):
        train.setup([*other, "tokenizer=char", "sample_prompt=äx"])


def test_what_is_not_finite_stops_the_run_before_the_update(tmp_path, data_dir, monkeypatch):
    trainer = train.setup(runs.arguments("gpt", tmp_path, data_dir, "eval_interval=2"))
    trainer.model.wte.weight.register_hook(lambda g: g * (math.nan if trainer.step == 3 else 1))
    with pytest.raises(UserError, match="grad_norm is nan at step 3: the run stops before the update"):
        train.train(trainer)
    assert trainer.step == 3 and checkpoint.load_checkpoint(trainer.folder / "ckpt.pt")["step"] == 2
    assert all(torch.isfinite(p).all() for p in trainer.model.parameters())
    monkeypatch.setattr(train, "evaluate", lambda run: {"val_ce": 1.0 if run.step < 4 else math.nan})
    argv = runs.arguments("gpt", tmp_path / "b", data_dir, "eval_interval=2", "keep_interval=2")
    for more in [], ["resume=true"]:
        with pytest.raises(UserError, match="val_ce is nan at step 4: the run stops. If there is a best.pt, a copy of it"):
            train.train(trainer := train.setup([*argv, *more]))
        assert [checkpoint.load_checkpoint(trainer.folder / f"{name}.pt")["step"] for name in ("best", "ckpt")] == [2, 4]
        assert {f.name for f in trainer.folder.glob("step_*")} == {"step_2.pt"}
    trainer.model.wte.weight.data[0] = math.nan
    with pytest.raises(UserError, match="a weight is not finite"):
        train.save(trainer, "ckpt.pt")
    assert checkpoint.load_checkpoint(trainer.folder / "ckpt.pt")["weights"]["wte.weight"].isfinite().all()
    checkpoint.save_checkpoint(trainer.folder / "ckpt.pt", train.state(trainer))
    monkeypatch.undo()
    for main, argv, message in ((train.main, [*argv, "eval_only=true"], "val_ce is nan"),
                                (evaluation.main, [trainer.folder], "logits are not finite"),
                                (sample.main, [trainer.folder], "logits are not finite")):
        with pytest.raises(UserError, match=message):
            main([*map(str, argv)])


def test_a_signal_saves_and_exits_0(tmp_path, data_dir):
    """No other run can have the folder until then."""
    argv = runs.arguments("gpt", tmp_path, data_dir, "max_steps=1000000", "eval_interval=5")
    child = runs.fork(runs.main_in_child, argv, None, tmp_path / "told")
    while not (tmp_path / "r" / "ckpt.pt").exists() and child.is_alive():
        time.sleep(0.05)
    for key in "resume=true", "overwrite=true":
        with pytest.raises(UserError, match="is in use: another run of this name goes on"):
            train.setup([*argv, key])
    os.kill(child.pid, signal.SIGINT)       # runs.run sends SIGTERM instead
    child.join(60)
    told = (tmp_path / "told").read_text()
    step = checkpoint.load_checkpoint(tmp_path / "r" / "ckpt.pt")["step"]
    assert child.exitcode == 0 and "stopping after this step\n" in told and f"stopped at step {step}" in told, told
    assert "Traceback" not in told, told
    assert checkpoint.read_log(tmp_path / "r" / "log.jsonl")[-1]["step"] == step


def test_processes_are_told_apart_by_their_teachers(tmp_path, data_dir):
    """Their numbers also differ where one process has no teacher."""
    run = train.setup(runs.arguments("gpt", tmp_path, data_dir))
    numbers = [train.number_of(run.cfg, run.model, run.batches, teacher, None)
               for teacher in (None, run.model, tiny("gpt"), run.model)]
    assert len({*numbers}) == 3 and numbers[1] == numbers[3]


def test_convert_returns_nothing(monkeypatch):
    """A convert that returned new weights would be ignored, and the training would start from random ones."""
    monkeypatch.setattr("model_relaxed.convert", lambda model, weights: weights)
    ckpt = {"model": "relaxed", "model_config": {}, "weights": {}, "converts": True}
    with pytest.raises(UserError, match="convert writes into the model and returns nothing"):
        checkpoint.build_model(ckpt)


def test_two_runs_of_one_name(tmp_path, data_dir):
    """If two runs start together, one is refused. The second run that claims the folder does not undo what the first
    has saved."""
    second = train.setup(runs.arguments("gpt", tmp_path, data_dir))     # there is no checkpoint yet
    runs.run("gpt", tmp_path, data_dir)
    with pytest.raises(UserError, match="ckpt.pt is a checkpoint: resume"):
        train.claim_folder(second)


@pytest.mark.parametrize("changed, forgotten", [
    (["eval_batches=1"], "eval_batches"), (["batch_size=1"], "batch_size"), (["block_size=8"], "block_size"),
    (["dtype=bfloat16"], "precision"), (["dataset=file:{}/t.txt", "data_dir={}"], "data"), (["eval_batches=0", "batch_size=1"], "eval_batches"), (["learning_rate=1", "eval_interval=3"], "")])
def test_a_best_loss_of_another_measure(changed, forgotten, tmp_path, data_dir, capsys):
    """The best loss is forgotten, which is told. Losses of more or other text, or of numbers in another precision, do
    not compare."""
    (tmp_path / "t.txt").write_text("other text, " * 200)
    runs.run("gpt", tmp_path, data_dir, "max_steps=2")
    more = [option.format(tmp_path) for option in changed]
    resumed = train.setup(runs.arguments("gpt", tmp_path, data_dir, "resume=true", *more))
    options.unlock(resumed.folder)
    assert (resumed.best_ce == math.inf) == bool(forgotten)
    assert (f"with another {forgotten}" in capsys.readouterr().out) == bool(forgotten)


def test_a_log_that_cannot_be_written(tmp_path, data_dir, monkeypatch, capsys):
    """It is told, and the training goes on. The lines after it are whole."""
    def full(path, mode):
        Path(path).open(mode).write('{"step":')
        raise OSError(28, "No space left on device")

    def full_at_2(run, stop, step=train.train_step):
        values = step(run, stop)
        monkeypatch.setattr(log, "open", full if run.step in (2, 3) else open, raising=False)
        return values
    monkeypatch.setattr(train, "train_step", full_at_2)
    path = runs.run("gpt", tmp_path, data_dir, "max_steps=4").folder / "log.jsonl"
    rows, out = checkpoint.read_log(path), capsys.readouterr().out
    assert [row["step"] for row in rows if "ce" in row] == [1, 4] and "val_ce" in rows[-1]
    assert out.count("cannot be written") == 1
    assert f"note: {path} cannot be written (No space left on device); the run goes on\n" in out


def test_signs_of_life(tmp_path, data_dir, monkeypatch, capsys):
    """Where stderr is no terminal, a line comes every half minute. The clock here moves by 20 seconds a step."""
    now, step = [0.0], train.train_step
    monkeypatch.setattr(log.time, "perf_counter", lambda: now[0])
    trainer = train.setup(runs.arguments("gpt", tmp_path, data_dir))
    monkeypatch.setattr(train, "train_step", lambda *given: (now.__setitem__(0, now[0] + 20), step(*given))[1])
    train.train(trainer)
    lines = capsys.readouterr().err.splitlines()
    assert [re.sub("ce [0-9.]+", "ce x", line) for line in lines] == [
        f"step {n} of 6: ce x, 0.0k tokens/s, {left} left" for n, left in ((2, "01:20"), (4, "00:40"), (6, "00:00"))]


def test_what_is_told_before_a_run(tmp_path, data_dir, capsys, monkeypatch):
    """A model of lab/experiments is found. It is told what stands in the place of a config file that is not there, that
    nothing is left to train, and at the end that a model without a cache writes no sample."""
    run = runs.run("smear", tmp_path, data_dir, "max_steps=1", "sample_tokens=1")
    train.finish(run, done=True)
    assert "note: no sample: this model has no cache to decode with" in (told := capsys.readouterr().out)
    assert "there is no " in told and "smear_tiny.yaml: this is dataset=words tokenizer=byte optimizer=adamw max_steps=1" in told
    resumed = train.setup(runs.arguments("smear", tmp_path, data_dir, "resume=true", "max_steps=1"))
    told = capsys.readouterr().out
    assert "there is no " not in told
    assert "nothing is left to train: the checkpoint is of step 1, and max_steps=1" in told and resumed.step == 1


CONFIG = "from model_gpt import Model, dataclass\nimport model_gpt\n@dataclass\nclass Config(model_gpt.Config):\n    "


@pytest.mark.parametrize("text", [
    "class Config: pass", "from model_gpt import Config", "Config = 5\nfrom model_gpt import Model",
    "from model_gpt import Model, dataclass\n@dataclass\nclass Config:\n    block_size: int = 1",
    CONFIG.replace("@dataclass\n", "") + "n: int = 1", "from model_gpt import Config, nn\nclass Model(nn.Module):\n    pass",
    CONFIG + "cap: float | None = None", CONFIG + "widths: tuple = (1, 2)", CONFIG + "beta1: float = 0.5", CONFIG + "n_layer = 3"])
def test_a_file_that_is_no_model(text, tmp_path, monkeypatch):
    """Without the refusal it might train, and its checkpoint could not be read, or beta1= would also set AdamW's."""
    (tmp_path / "model_broken.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "model_broken", raising=False)
    no_option = ": (the type of (cap|widths) must be int, float, bool or str|beta1 is an option of train.py|n_layer of Config has no type)"
    no_model = " is not a model file: it needs a dataclass Config with block_size"
    with pytest.raises(UserError, match="model_broken.py" + (no_option if text.startswith(CONFIG) else no_model)):
        merge({"model": "broken"}, checkpoint.load_start)


@pytest.mark.parametrize("text, told", [
    ("rank: int = None", "rank must be an int"), ("rank: int = 0\n    def __post_init__(self): self.rank += 1", "rank=1")])
def test_a_config_that_would_be_loaded_as_another(text, told, tmp_path, monkeypatch):
    (tmp_path / "model_broken.py").write_text(CONFIG + text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "model_broken", raising=False)
    with pytest.raises(UserError, match=told):
        merge({"model": "broken"}, checkpoint.load_start)


def test_a_config_file_names_no_other(tmp_path):
    (tmp_path / "mine.yaml").write_text("config: configs/rat_tiny.yaml")
    with pytest.raises(UserError, match="mine.yaml has config="):
        merge({"config": f"{tmp_path}/mine.yaml"}, checkpoint.load_start)


def test_two_processes_refuse_a_parameter_without_a_gradient(tmp_path, data_dir, monkeypatch):
    """DistributedDataParallel would fail in the second step, after overwrite=true has removed the older run."""
    (tmp_path / "model_unused.py").write_text(
        "import model_gpt, torch\nfrom model_gpt import Config\nclass Model(model_gpt.Model):\n"
        "    def __init__(self, cfg):\n        super().__init__(cfg)\n        self.extra = torch.nn.Linear(2, 2)\n")
    monkeypatch.syspath_prepend(tmp_path)
    runs.run("gpt", tmp_path, data_dir, "max_steps=1")
    before = (tmp_path / "r" / "ckpt.pt").read_bytes()
    argv = runs.arguments("unused", tmp_path, data_dir, "gradient_accumulation_steps=2", "overwrite=true")
    codes, out = runs.two_ranks(tmp_path, argv)
    assert codes == [2, 2] and "extra.weight gets no gradient" in "".join(out)
    assert (tmp_path / "r" / "ckpt.pt").read_bytes() == before


def test_the_trial_changes_nothing(tmp_path, data_dir, monkeypatch):
    """The micro-batch before a run leaves no gradient. A buffer that a forward pass changes is as before."""
    def counting(*given, make_model=train.make_model):
        model = make_model(*given)
        model.register_buffer("counted", torch.zeros(()))
        model.register_forward_pre_hook(lambda *_: (model.counted.add_(1), None)[1])
        return model
    monkeypatch.setattr(train, "make_model", counting)
    trainer = train.setup(runs.arguments("gpt", tmp_path, data_dir))
    assert trainer.model.counted == 0 and all(p.grad is None for p in trainer.model.parameters())
    train.train_step(trainer, [])
    assert trainer.model.counted == 1


@pytest.mark.parametrize("name", ["SIGHUP", "SIGINT", "SIGTERM"])
def test_signals(name):
    """A signal asks for a stop, but not if it is ignored: SIGHUP below nohup, and SIGINT in a script's
    background."""
    sig = getattr(signal, name)
    for ignored in False, True:
        before = signal.signal(sig, signal.SIG_IGN if ignored else signal.SIG_DFL)
        with train.stop_request() as asked:
            os.kill(os.getpid(), sig)
        assert bool(asked) != ignored
        signal.signal(sig, before)


@pytest.mark.parametrize("name, more", [
    pytest.param("mor", ["router=token", "balance=loss_free", "balance_rate=2e-3", "max_steps=7"], id="mor"),
    pytest.param("gpt", ["gradient_accumulation_steps=4", "dataset=task:recall", "task_examples=30"], id="accumulation"),
    pytest.param("gpt", ["dataset=task:s3", "task_examples=0", "learning_rate=1e-2"], id="task", marks=pytest.mark.full),
    pytest.param("mor", ["loop_warmup=0.8", "n_layer=5", "n_loop=3"], id="loop_warmup", marks=pytest.mark.full),
    *(pytest.param(name, ["optimizer=muon"], id=f"{name}-muon", marks=pytest.mark.full) for name in MODELS)])
def test_two_processes_are_one_with_twice_the_accumulation(name, more, tmp_path, data_dir):
    """The weights are the same bit for bit, and so are the biases that the loads of MoR's recursions move. (Sums of four
    micro-batches have another order.) Accuracies are those of all tokens."""
    options = ["gradient_accumulation_steps=2", "eval_interval=3", "eval_batches=3", *more]
    one = runs.run(name, tmp_path / "one", data_dir, *options)
    argv = runs.arguments(name, tmp_path / "two", data_dir, *options)
    if "router=token" in more:          # one case is started by torchrun, as users do
        p = python(*TORCHRUN, "train.py", *argv)
        codes, out = [p.returncode] * 2, p.stdout
    else:
        codes, (out, _) = runs.two_ranks(tmp_path, argv)
    two = checkpoint.load_checkpoint(tmp_path / "two" / "r" / "ckpt.pt")
    assert codes == [0, 0] and "2 processes" in out and two["step"] == one.step
    assert_alike(two, train.state(one))
    if "gradient_accumulation_steps=4" not in more:
        assert runs.fingerprint(two["weights"]) == runs.fingerprint(train.state(one)["weights"])
    assert "balance=loss_free" not in more or one.model.balance_bias.any()
    rows = [checkpoint.read_log(tmp_path / n / "r" / "log.jsonl") for n in ("one", "two")]
    of_tasks = "token_accuracy", "sequence_accuracy"
    told = [[v for row in log for k, v in row.items() if k in ("ce", "val_ce") or k.endswith(of_tasks)] for log in rows]
    assert told[0] == pytest.approx(told[1], rel=1e-6, abs=1e-7)
    n_evaluations = sum("val_ce" in row for row in rows[0])
    assert n_evaluations > 1
    assert len(told[0]) == one.step + n_evaluations + (2 * 8 if "dataset=task" in " ".join(more) else 0)


def nan_at_3():
    def poisoned(run, whole=train.forward_backward):
        if run.step == 3:
            run.model.wte.weight.data.fill_(math.nan)
        return whole(run)
    train.forward_backward = poisoned


def infinite_weight():
    def broken(run, state=train.state):
        saved = state(run)
        saved["weights"]["wte.weight"] = torch.full((2,), math.inf)
        return saved
    train.state = broken


def other_width():
    train.merge = lambda given, load, merge=train.merge: merge({**given, "n_embd": "32"}, load)


@pytest.mark.parametrize("change, more, told, times", [
    (infinite_weight, ["fsdp=true"], "a weight is not finite at step 2", 1),
    (None, ["dataset=file:/dev/null/words.txt"], "make it with python prepare.py", 1),
    (other_width, [], "the processes have different options, data or checkpoints", 2),
    (nan_at_3, [], "ce is nan at step 3: the run stops before the update", 2)], ids=lambda x: getattr(x, "__name__", None))
def test_an_error_ends_both_processes(change, more, told, times, tmp_path, data_dir):
    """One process tells it. Or both do, where both find it (without torchrun's store). Neither waits for the other."""
    argv = runs.arguments("gpt", tmp_path, data_dir, "gradient_accumulation_steps=2", "eval_interval=2", *more)
    codes, out = runs.two_ranks(tmp_path, argv, change)
    assert codes == [2, 2] and [text.count("error: ") for text in out] == [1, times - 1], out
    assert all(told in text for text in out[:times]) and "Traceback" not in "".join(out), out
    assert change is not nan_at_3 or checkpoint.load_checkpoint(tmp_path / "r" / "ckpt.pt")["step"] == 2


def test_a_sample_that_cannot_be_made_ends_no_run(tmp_path, data_dir, monkeypatch, capsys):
    def broken(*given, **more):
        raise Exception("a kernel does not compile")
    run = runs.run("gpt", tmp_path, data_dir, "max_steps=1")
    run.cfg.sample_tokens = 5
    monkeypatch.setattr(train, "sample_text", broken)
    train.finish(run, done=True)
    assert "note: no sample: a kernel does not" in capsys.readouterr().out and (run.folder / "curves.png").exists()


@pytest.mark.full
def test_a_killed_process_ends_the_job(tmp_path, data_dir):
    argv = runs.arguments("gpt", tmp_path, data_dir, "gradient_accumulation_steps=2", "max_steps=1000000", "eval_interval=5")
    p = subprocess.Popen([sys.executable, *TORCHRUN, "train.py", *argv], cwd=ROOT, stderr=subprocess.DEVNULL)
    while not (tmp_path / "r" / "ckpt.pt").exists():
        assert p.poll() is None
        time.sleep(0.05)
    children = subprocess.run(["pgrep", "-P", str(p.pid)], capture_output=True, text=True).stdout.split()
    assert len(children) == 2
    os.kill(int(children[1]), signal.SIGKILL)
    assert p.wait(90) != 0          # torchrun waits 30 s for a process that hangs in a collective, then kills it
    assert checkpoint.load_checkpoint(tmp_path / "r" / "ckpt.pt")["step"] % 5 == 0


NUMBERS = {int: [0, 0, 1, 2, 3, 4, 8], float: [0.0, 0.1, 0.5, 1.0]}
SIZES = {"block_size": [2, 5, 16, 21], "n_layer": [2, 4, 6, 8, 3], "n_head": [1, 2, 3, 4], "n_kv_head": [0, 0, 1, 2],
         "norm_eps": [1e-5], "rope_theta": [100.0, 10000.0], "dropout": [0.0, 0.1]}
TRAINING = {"batch_size": [1, 2, 3], "gradient_accumulation_steps": [1, 2], "optimizer": ["adamw", "muon"],
            "lr_schedule": ["cosine", "linear", "trapezoid"], "dtype": ["float32", "bfloat16"], "grad_clip": [0, 1]}


def drawn(rng, model):
    """Return random options with values: there is every size, and half of the model's own options."""
    given = {name: rng.choice(values) for name, values in {**SIZES, **TRAINING}.items()}
    given["n_embd"] = given["n_head"] * rng.choice([3, 4, 8, 8, 16]) + (rng.random() < 0.1)
    for f in fields(options.model_module(model).Config):
        if f.name in given or f.name == "vocab_size" or rng.random() < 0.5:
            continue
        values = f.metadata.get("allowed") or ([True, False] if f.type is bool else NUMBERS.get(f.type))
        if values:
            given[f.name] = rng.choice(values)
    return [f"{name}={str(value).lower() if isinstance(value, bool) else value}" for name, value in given.items()]


@pytest.mark.parametrize("seed", [pytest.param(n, marks=[pytest.mark.full] * (n >= len(MODELS))) for n in range(200)])
def test_random_configurations_run_or_are_refused(seed, data_dir, tmp_path):
    """A refusal is one line, and nothing is written. The first configuration that is not refused trains, resumes and
    decodes."""
    rng, model = random.Random(seed), MODELS[seed % len(MODELS)]
    for given in (drawn(rng, model) for _ in range(200)):
        try:
            trainer = runs.run(model, tmp_path / "out", data_dir, *given, "max_steps=3")
            break
        except UserError as e:
            assert "\n" not in str(e).strip() and not (tmp_path / "out").exists(), given
    more = runs.run(model, tmp_path / "out", data_dir, *given, "max_steps=4", "resume=true")
    rows = checkpoint.read_log(tmp_path / "out" / "r" / "log.jsonl")
    assert more.step == 4 and all(math.isfinite(v) for row in rows for v in row.values()), given
    trained, tokenizer, _ = checkpoint.load_run(tmp_path / "out" / "r")
    text = sample.sample_text(trained, tokenizer, "ab", min(5, trainer.model.cfg.block_size - 1), seed=1)
    assert text.startswith("ab"), given


@pytest.mark.gpu
@models
@pytest.mark.parametrize("how", ["auto", "graph"])
def test_trains_compiled_on_cuda(how, name, tmp_path, data_dir):
    trainer = runs.run(name, tmp_path, data_dir, "max_steps=60", "learning_rate=1e-2", "n_embd=64", "device=auto",
                       f"compile={how}")
    losses = [row["ce"] for row in checkpoint.read_log(trainer.folder / "log.jsonl") if "ce" in row]
    assert trainer.procs.device.type == "cuda" and losses[-1] < losses[0] - 1


@pytest.mark.gpu
@models
def test_a_recorded_step_is_the_ordinary_one_on_cuda(name, tmp_path, data_dir):
    """The losses of ten steps with dropout are the same. Sums in another order differ by more than on a CPU."""
    more = [*GRAPH, "max_steps=10", "device=cuda", "dtype=float32"]
    folders = [runs.run(name, tmp_path / how, data_dir, *more, f"compile={how}").folder for how in ("graph", "false")]
    logs = [checkpoint.read_log(folder / "log.jsonl") for folder in folders]
    recorded, ordinary = ([row["ce"] for row in log if "ce" in row] for log in logs)
    assert len(recorded) == 10 and recorded == pytest.approx(ordinary, rel=1e-4)

"""Mixture-of-Recursions in training runs: what resumes, what processes agree on, budgets, what evaluations tell."""
import math

import pytest
import torch

from lab import bench
import model_mor
from common import checkpoint
from lab import plot
from common.process import TrainConfig
import runs
from common.keys import UserError
import train


def test_capacity_falls_with_the_runs_steps(tmp_path, data_dir):
    """Logged fractions: all tokens take all recursions at step 0, half do after the warm-up. Its steps cost more. A
    resumed run counts both as if it had not been stopped."""
    runs.run("mor", tmp_path, data_dir, "capacity_warmup=4", stop_after=4)
    trainer = runs.run("mor", tmp_path, data_dir, "resume=true")
    rows = [row for row in plot.read_log(trainer.folder / "log.jsonl") if "lr" in row]
    capacities = [(1 + (1 + math.cos(math.pi * step / 4)) / 2) / 2 for step in (1, 2, 3)]
    assert [row["depth2"] for row in rows] == [1.0, *(int(16 * capacity) / 16 for capacity in capacities), 0.5, 0.5]
    cost = [32 * trainer.model.flops_per_token(step=step) for step in range(6)]
    assert cost[0] > cost[2] > cost[4] == 32 * trainer.model.flops_per_token()
    assert [row["flops"] for row in rows] == pytest.approx([sum(cost[:step]) for step in range(1, 7)])


def test_a_budget_of_operations_sets_the_steps(tmp_path, data_dir):
    step = 2 * 16 * runs.run("gpt", tmp_path, data_dir, "max_steps=1").model.flops_per_token()
    trainer = runs.run("gpt", tmp_path / "b", data_dir, f"max_flops={4.5 * step}")
    row = plot.read_log(trainer.folder / "log.jsonl")[-1]
    assert trainer.step == trainer.cfg.max_steps == row["step"] == 4 and row["flops"] == pytest.approx(4 * step)
    assert runs.run("gpt", tmp_path / "b", data_dir, "resume=true").step == 6, "max_steps=6, given, wins"
    with pytest.raises(UserError, match="max_flops=1e[+]03 is less than one step of"):
        runs.run("gpt", tmp_path / "c", data_dir, "max_flops=1000")


def test_a_cool_down_starts_from_a_kept_checkpoint(tmp_path, data_dir):
    """Several budgets from one run: a plateau's checkpoint, resumed with a nearer end, is the shorter run."""
    keys = ["lr_schedule=trapezoid", "cooldown_frac=0.5", "warmup_steps=1", "gradient_accumulation_steps=1"]
    runs.run("mor", tmp_path / "long", data_dir, *keys, "max_steps=8", "keep_interval=2")
    assert sorted(p.name for p in (tmp_path / "long" / "r").glob("step_*.pt")) == [f"step_{n}.pt" for n in (2, 4, 6, 8)]
    short = runs.run("mor", tmp_path / "short", data_dir, *keys, "max_steps=4")
    (tmp_path / "branch" / "r").mkdir(parents=True)
    (tmp_path / "long" / "r" / "step_2.pt").rename(tmp_path / "branch" / "r" / "ckpt.pt")
    branch = runs.run("mor", tmp_path / "branch", data_dir, "resume=true", "max_steps=4")
    assert checkpoint.fingerprint(branch.state()["weights"]) == checkpoint.fingerprint(short.state()["weights"])


def test_the_bench_runs(capsys):
    """Every line of bench.py mor but those of requests, at tiny sizes on a CPU."""
    sizes = dict(block_size=8, vocab_size=31, n_layer=8, n_loop=3, n_head=2, n_embd=16)
    model, cfg = model_mor.Model(model_mor.Config(**sizes)), TrainConfig(model="mor", batch_size=2)
    bench.bench_mor(model, cfg, torch.device("cpu"), None, rounds=1)
    lines = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert [lines.count(word) for word in ("training", "decoding", "cache", "requests:")] == [6, 4, 1, 1]


def test_evaluation_tells_what_decoding_does(tmp_path, data_dir):
    """val_ce is that of the causal choice, val_ce_topk that of choosing among all. Dead positions took the last
    recursion in no row of any batch; each evaluation starts again. The depth may be capped."""
    trainer = runs.run("mor", tmp_path, data_dir, "eval_batches=6", "n_loop=4", "n_layer=6")
    rows = [trainer.batches.cut(trainer.batches.val, batch)[0] for batch in trainer.batches.val_batches(6)]
    model = trainer.model.eval()
    ever = torch.stack([(model.recursions(x) == 4).any(0) for x in rows])
    dead, each = 1 - ever.any(0).double().mean().item(), 1 - ever.double().mean().item()
    for _ in range(2):
        whole = trainer.evaluate()
        assert whole["val_dead"] == pytest.approx(dead) != pytest.approx(each)
    model.set_step(0)       # a process of two, of which only the other has a batch, adds to the sum too
    sums = []
    assert model.end_evaluation(lambda *values: sums.append(values) or values) == {"dead": 1} and len(sums[0]) == 16
    assert sum(whole[f"val_depth{d}"] for d in (1, 2, 3, 4)) == pytest.approx(1) and whole["val_depth1"] < 1
    argv = f"out_dir={tmp_path}", f"data_dir={data_dir}", "run=r", "eval_only=true", "exit_loop=1"
    capped = train.setup(argv).evaluate()
    assert capped["val_depth1"] == 1 and len({whole["val_ce"], whole["val_ce_topk"], capped["val_ce"]}) == 3

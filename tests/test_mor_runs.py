"""Mixture-of-Recursions in training runs: what resumes, what processes agree on, budgets, what evaluations tell."""
import math

import pytest
import torch

import bench
import model_mor
import checkpoint
import config
import plot
from run import TrainConfig
import runs
import sample
import train
from test_train import TORCHRUN, start


# -------------------------------------------------------------------------------------------------
# training

@pytest.mark.parametrize("keys", [["capacity_warmup=4"], ["router=token", "balance=loss_free", "max_steps=5"]],
                         ids=str)
def test_what_the_router_knows_of_the_run_survives_resume(keys, tmp_path, data_dir):
    """The warm-up's step and the biases: stopped in the middle and resumed is the same to the last bit."""
    whole = runs.run("mor", tmp_path / "whole", data_dir, *keys)
    runs.run("mor", tmp_path / "parts", data_dir, *keys, stop_after=3)
    resumed = runs.run("mor", tmp_path / "parts", data_dir, *keys, "resume=true")
    assert runs.learned(whole) == runs.learned(resumed)
    if "router=token" in keys:
        assert resumed.model.balance_bias.any()


def test_capacity_falls_with_the_runs_steps(tmp_path, data_dir):
    """Logged shares: all tokens take all recursions at step 0, half do after the warm-up."""
    trainer = runs.run("mor", tmp_path, data_dir, "capacity_warmup=4")
    rows = [row for row in plot.read_log(trainer.folder / "log.jsonl") if "lr" in row]
    assert [row["depth2"] for row in rows] == [1.0, *(int(16 * (1 + (1 + math.cos(math.pi * s / 4)) / 2) / 2) / 16
                                                      for s in (1, 2, 3)), 0.5, 0.5]


def test_a_checkpoint_with_the_step_of_its_warm_up_loads(tmp_path, data_dir):
    """Earlier versions saved it with the weights. It resumes, and starts a run of another warm-up."""
    trainer = runs.run("mor", tmp_path, data_dir, "capacity_warmup=4")
    path, weights = trainer.folder / "ckpt.pt", trainer.state()["weights"]
    state = checkpoint.load_checkpoint(path)
    checkpoint.save_checkpoint(path, {**state, "weights": {**weights, "warmup_step": torch.tensor(6)}})
    assert checkpoint.fingerprint(checkpoint.load_checkpoint(path)) == checkpoint.fingerprint(state)
    for keys in (["resume=true"], ["run=next", f"init_from={path}", "capacity_warmup=9"]):
        new = train.setup(runs.arguments("mor", tmp_path, data_dir, *keys))
        assert checkpoint.fingerprint(new.state()["weights"]) == checkpoint.fingerprint(weights)


def test_loads_are_summed_over_processes(tmp_path, data_dir):
    """Biases of two processes are those of one that sees the same tokens, and both processes have them."""
    keys = ["router=token", "balance=loss_free", "balance_rate=2e-3", "max_steps=7", "gradient_accumulation_steps=2"]
    one = runs.run("mor", tmp_path / "one", data_dir, *keys)
    p = start(*TORCHRUN, *runs.arguments("mor", tmp_path / "two", data_dir, *keys))
    out, err = p.communicate(timeout=120)
    assert p.returncode == 0, err
    two = checkpoint.load_checkpoint(tmp_path / "two" / "r" / "ckpt.pt")["weights"]
    assert one.model.balance_bias.any() and torch.equal(one.model.balance_bias, two["balance_bias"])
    assert checkpoint.fingerprint(two) == checkpoint.fingerprint(one.state()["weights"])


def test_evaluation_tells_what_decoding_does(tmp_path, data_dir):
    """val_ce is that of the causal choice, val_ce_topk that of choosing among all; shares of depths add up."""
    for keys in ([], ["router=token"]):
        trainer = runs.run("mor", tmp_path / str(len(keys)), data_dir, *keys)
        row = next(row for row in plot.read_log(trainer.folder / "log.jsonl") if "val_ce" in row)
        assert row["val_depth1"] + row["val_depth2"] == pytest.approx(1)
        assert ("val_ce_topk" in row) == (not keys)
        assert keys or row["val_ce_topk"] != row["val_ce"]


@pytest.mark.parametrize("model", ["gpt", "mor"])
def test_a_budget_of_operations_sets_the_steps(model, tmp_path, data_dir):
    trainer = runs.run(model, tmp_path, data_dir, "max_steps=1")
    step = 2 * 16 * trainer.model.flops_per_token()
    trainer = runs.run(model, tmp_path / "b", data_dir, f"max_flops={4.5 * step}")
    rows = plot.read_log(trainer.folder / "log.jsonl")
    assert trainer.step == trainer.cfg.max_steps == rows[-1]["step"] == 4
    assert rows[-1]["flops"] == pytest.approx(4 * step)
    with pytest.raises(config.UserError, match="less than one step of"):
        train.setup(runs.arguments(model, tmp_path / "c", data_dir, f"max_flops={0.9 * step}"))
    assert not (tmp_path / "c").exists()


def test_a_cool_down_starts_from_a_kept_checkpoint(tmp_path, data_dir):
    """Several budgets from one run: a plateau's checkpoint, resumed with a nearer end, is the shorter run."""
    keys = ["lr_schedule=trapezoid", "cooldown_frac=0.5", "warmup_steps=1", "gradient_accumulation_steps=1"]
    runs.run("mor", tmp_path / "long", data_dir, *keys, "max_steps=8", "keep_interval=2")
    assert sorted(p.name for p in (tmp_path / "long" / "r").glob("step_*.pt")) == [f"step_{n}.pt" for n in (2, 4, 6, 8)]
    short = runs.run("mor", tmp_path / "short", data_dir, *keys, "max_steps=4")
    (tmp_path / "branch" / "r").mkdir(parents=True)
    (tmp_path / "long" / "r" / "step_2.pt").rename(tmp_path / "branch" / "r" / "ckpt.pt")
    branch = runs.run("mor", tmp_path / "branch", data_dir, "resume=true", "max_steps=4")
    for ours, theirs in zip(branch.model.parameters(), short.model.parameters()):
        assert torch.equal(ours, theirs)


def test_depth_may_be_capped_when_evaluating(tmp_path, data_dir):
    trained = runs.run("mor", tmp_path, data_dir)
    found = []
    for loops in (1, 2):
        trainer = train.setup([f"out_dir={tmp_path}", f"data_dir={data_dir}", "run=r", "eval_only=true",
                               f"exit_loop={loops}"])
        found.append(trainer.evaluate())
    assert found[0]["val_depth1"] == 1 and found[1]["val_depth1"] < 1
    assert found[0]["val_ce"] != found[1]["val_ce"] == trained.evaluate()["val_ce"]


# -------------------------------------------------------------------------------------------------
# sample.py and bench.py


def test_depths_of_a_text_are_drawn_and_printed(tmp_path, data_dir, capsys):
    runs.run("mor", tmp_path, data_dir)
    runs.run("gpt", tmp_path / "gpt", data_dir, "max_steps=1")
    (tmp_path / "text.txt").write_text("def a(b):\n\treturn 1")
    capsys.readouterr()
    sample.main([str(tmp_path / "r"), f"prompt=FILE:{tmp_path / 'text.txt'}", f"depths={tmp_path / 'd.png'}"])
    shown = capsys.readouterr()
    assert shown.out.count("\033[0m") == 16 and "16 tokens, recursions 1:" in shown.err       # cropped to block_size
    assert (tmp_path / "d.png").read_bytes().startswith(b"\x89PNG")
    bad = ("gpt/r", "d.png", "is for a model that loops over depth"), ("r", "d.xyz", "d.xyz: Format")
    for run, file, message in bad:
        with pytest.raises(config.UserError, match=message):
            sample.main([str(tmp_path / run), f"depths={tmp_path / file}"])


def test_the_bench_runs(capsys):
    """Every line of bench.py mor but those of requests, at tiny sizes on a CPU."""
    sizes = dict(block_size=8, vocab_size=31, n_layer=8, n_loop=3, n_head=2, n_embd=16)
    model, cfg = model_mor.Model(model_mor.Config(**sizes)), TrainConfig(model="mor", batch_size=2)
    bench.bench_mor(model, cfg, torch.device("cpu"), None, rounds=1)
    lines = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert [lines.count(word) for word in ("training", "decoding", "cache", "requests:")] == [6, 4, 1, 1]


def test_dead_positions_are_those_of_the_whole_evaluation(tmp_path, data_dir):
    """In no row of any batch did they take the last recursion; each evaluation starts again."""
    trainer = runs.run("mor", tmp_path, data_dir, "eval_batches=6", "n_loop=4", "n_layer=6")
    batches = trainer.batches.val_batches(6)
    rows = [trainer.batches.cut(trainer.batches.val, batch)[0] for batch in batches]
    model = trainer.model.eval()
    ever = torch.stack([(model.recursions(x) == 4).any(0) for x in rows])
    dead, each = 1 - ever.any(0).double().mean().item(), 1 - ever.double().mean().item()
    for _ in range(2):
        assert trainer.evaluate()["val_dead"] == pytest.approx(dead) != pytest.approx(each)

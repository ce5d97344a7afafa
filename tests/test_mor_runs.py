"""Mixture-of-Recursions in training runs and in the engine: what resumes, what processes agree on, budgets, answers."""
import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import bench
import model_mor
import prepare
import runs
import sample
import serve
import train
from test_train import TORCHRUN, start

batchings = pytest.mark.parametrize("batching", ["static", "sequence", "depth"])
ROUTERS = {"expert": dict(), "aux_router": dict(causal="aux_router", kv="share_update"), "token": dict(router="token"),
           "token, share": dict(router="token", kv="share", share="cycle", n_layer=6), "none": dict(router="none"),
           "capped": dict(exit_loop=2)}


# ---------------------------------------------------------------------------------------------------------------------
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
    rows = [row for row in train.read_log(trainer.folder / "log.jsonl") if "lr" in row]
    assert [row["depth2"] for row in rows] == [1.0, *(int(16 * (1 + (1 + math.cos(math.pi * s / 4)) / 2) / 2) / 16
                                                      for s in (1, 2, 3)), 0.5, 0.5]


def test_loads_are_summed_over_processes(tmp_path, data_dir):
    """Biases of two processes are those of one that sees the same tokens, and both processes have them."""
    keys = ["router=token", "balance=loss_free", "balance_rate=2e-4", "max_steps=25", "gradient_accumulation_steps=2"]
    one = runs.run("mor", tmp_path / "one", data_dir, *keys)
    p = start(*TORCHRUN, *runs.arguments("mor", tmp_path / "two", data_dir, *keys))
    out, err = p.communicate(timeout=120)
    assert p.returncode == 0, err
    two = train.load_checkpoint(tmp_path / "two" / "r" / "ckpt.pt")["weights"]
    assert one.model.balance_bias.any() and torch.equal(one.model.balance_bias, two["balance_bias"])
    assert train.fingerprint(two) == train.fingerprint(one.state()["weights"])


def test_evaluation_is_no_load(tmp_path, data_dir):
    """Biases are those of training alone, however often it is evaluated."""
    keys = ["router=token", "balance=loss_free", "max_steps=5"]
    often, once = (runs.run("mor", tmp_path / n, data_dir, *keys, f"eval_interval={n}") for n in ("1", "9"))
    assert torch.equal(often.model.balance_bias, once.model.balance_bias)
    trainer = runs.run("mor", tmp_path / "more", data_dir, *keys)
    assert trainer.model.loads.eq(0).all() and trainer.model.balance_bias.any()


def test_evaluation_tells_what_decoding_does(tmp_path, data_dir):
    """val_ce is that of the causal choice, val_ce_topk that of choosing among all; shares of depths add up."""
    for keys in ([], ["router=token"]):
        trainer = runs.run("mor", tmp_path / str(len(keys)), data_dir, *keys)
        row = next(row for row in train.read_log(trainer.folder / "log.jsonl") if "val_ce" in row)
        assert row["val_depth1"] + row["val_depth2"] == pytest.approx(1)
        assert ("val_ce_topk" in row) == (not keys)
        assert keys or row["val_ce_topk"] != row["val_ce"]


def test_dead_positions_are_those_of_the_whole_evaluation(tmp_path, data_dir):
    """No token of any batch took the last recursion there; and each evaluation begins anew."""
    trainer = runs.run("mor", tmp_path, data_dir, "eval_batches=6", "n_loop=4", "n_layer=6")
    batches = trainer.batches.val_batches(6)
    rows = [trainer.batches.cut(trainer.batches.val, batch) for batch in batches]
    model = trainer.model.eval()
    ever = torch.stack([(model.recursions(x) == 4).any(0) for x, _ in rows])
    dead, each = 1 - ever.any(0).double().mean().item(), 1 - ever.double().mean().item()
    for _ in range(2):
        assert trainer.evaluate()["val_dead"] == pytest.approx(dead) != pytest.approx(each)
    with torch.no_grad():
        assert model(*rows[0])[2]["dead"] == pytest.approx(1 - ever[0].double().mean().item())


@pytest.mark.parametrize("model", ["gpt", "mor"])
def test_a_budget_of_operations_sets_the_steps(model, tmp_path, data_dir):
    trainer = runs.run(model, tmp_path, data_dir, "max_steps=1")
    step = 2 * 16 * trainer.model.flops_per_token()
    trainer = runs.run(model, tmp_path / "b", data_dir, f"max_flops={4.5 * step}")
    rows = train.read_log(trainer.folder / "log.jsonl")
    assert trainer.step == trainer.cfg.max_steps == rows[-1]["step"] == 4
    assert rows[-1]["flops"] == pytest.approx(4 * step)
    with pytest.raises(prepare.UserError, match="less than one step of"):
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


# ---------------------------------------------------------------------------------------------------------------------
# pictures of depth

def routing(seed=0, **sizes):
    """A small model whose tokens take one, two and three recursions."""
    torch.manual_seed(seed)
    small = dict(block_size=64, vocab_size=31, n_layer=5, n_loop=3, n_head=2, n_kv_head=1, n_embd=16)
    model = model_mor.Model(model_mor.Config(**{**small, **sizes})).double().eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.2 * torch.randn(p.shape, dtype=p.dtype))
    return model


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
        with pytest.raises(prepare.UserError, match=message):
            sample.main([str(tmp_path / run), f"depths={tmp_path / file}"])


# ---------------------------------------------------------------------------------------------------------------------
# bench.py

@pytest.fixture
def few_requests(monkeypatch):
    """Six short requests instead of 240 long ones."""
    monkeypatch.setattr(bench, "PROMPT", (1, 3))
    monkeypatch.setattr(bench, "ANSWER", (2, 5))
    monkeypatch.setattr(bench, "LONGEST", 8)
    whole = bench.workload
    monkeypatch.setattr(bench, "workload", lambda text, requests=6: whole(text, min(requests, 6)))


def test_the_bench_runs(few_requests, capsys):
    """Every line of bench.py mor, at tiny sizes on a CPU; bounds and shares are those of what was answered."""
    model, cfg = routing(block_size=8, n_layer=8, n_loop=3), train.TrainConfig(model="mor", batch_size=2)
    bench.bench_mor(model, cfg, torch.device("cpu"), None, rounds=1)
    lines = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert [lines.count(word) for word in ("training", "decoding", "cache", "requests:")] == [6, 4, 1, 1]
    text, plain = torch.arange(40).numpy() % 23, routing(router="none", n_loop=1, share="cycle", n_layer=8)
    model = routing(n_layer=8, n_loop=3)
    bench.bench_mor_requests(model, plain, text, torch.device("cpu"), slots=3, rounds=1)
    out = capsys.readouterr().out
    assert out.count("answers the same") == 6 and "DIFFER" not in out
    engine = serve.Engine(model, 3, 8)
    exits = [loop for r in engine.run(bench.workload(text)()) for loop in r.exits]
    mean = sum(exits) / len(exits)
    assert f"a token takes {mean:.2f}, so {(2 + 2 * mean) / 8:.2f} of the plain" in out
    assert f"3 slots: bound {8 / (2 + 2 * mean):.2f}, reached" in out and out.count("as much memory: bound") == 2


def test_loss_against_speed_is_drawn(tmp_path, data_dir, few_requests, capsys):
    """Runs of relaxed and mor, with and without a router, each with the loss of its log; others are refused."""
    for name, model, *keys in (("a", "mor"), ("b", "mor", "router=none"), ("c", "relaxed"), ("d", "gpt", "max_steps=1"),
                               ("e", "mor", "share=middle_sequence"), ("f", "mor", "dataset=file:" + str(__file__))):
        runs.run(model, tmp_path / name, data_dir, *keys)
    paths = {name: str(tmp_path / name / "r") for name in "abcdef"}
    capsys.readouterr()
    keys = [f"data_dir={data_dir}", "rounds=1", "slots=2", "requests=3"]
    bench.main(["serve", *(paths[name] for name in "abce"), f"file={tmp_path / 'p.png'}", *keys])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines[:4]] == ["depth", "sequence", "sequence", "sequence"]
    for line, name in zip(lines, "abce"):
        log = [json.loads(row) for row in open(tmp_path / name / "r" / "log.jsonl")]
        assert float(line.split()[4]) == pytest.approx([row["val_bpb"] for row in log if "val_bpb" in row][-1], abs=1e-4)
    assert lines[4].endswith("4 runs") and (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    for names, message in ((["d"], "is a model_gpt: requests are for"), (["a", "a"], "each once"), ([], "give the folders"),
                           (["a", "f"], "not trained on the same tokens")):
        with pytest.raises(prepare.UserError, match=message):
            bench.main(["serve", *(paths[name] for name in names), *keys, f"file={tmp_path / 'no.png'}"])
    assert not (tmp_path / "no.png").exists()

"""bench.py's requests: what it prints is what was answered, and quality is that of the model on the text."""
import json

import numpy as np
import pytest
import torch

import bench
import config
import runs
from conftest import tiny
from serve import Engine

CPU, TEXT = torch.device("cpu"), np.arange(60) * 7 % 61


@pytest.fixture(autouse=True)
def few_requests(monkeypatch):
    """Six short requests instead of 240 long ones."""
    monkeypatch.setattr(bench, "PROMPT", (1, 3))
    monkeypatch.setattr(bench, "ANSWER", (2, 5))
    monkeypatch.setattr(bench, "LONGEST", 8)
    whole = bench.workload
    monkeypatch.setattr(bench, "workload", lambda text, requests=6: whole(text, min(requests, 6)))


@pytest.mark.parametrize("name, sizes", [("relaxed", dict(n_layer=6, n_loop=3, rank=2)), ("mor", dict(n_layer=8)),
                                         ("mor", dict(n_layer=6, share="cycle", router="token"))], ids=str)
def test_quality_is_that_of_the_text(name, sizes):
    """Cross-entropy and likeliest tokens where the text goes on, as one forward over it has them."""
    model, work = tiny(name, **sizes), bench.workload(TEXT)
    ce, guesses = bench.served_quality(work, model, 3, "depth")
    nats, likeliest = [], []
    for request in work():
        tokens = torch.tensor([request.prompt + request.truth])
        logits = model(tokens)[0][0, len(request.prompt) - 1:-1].log_softmax(-1)
        nats += (-logits.gather(1, tokens[0, len(request.prompt):, None])[:, 0]).tolist()
        likeliest += logits.argmax(-1).tolist()
    assert abs(ce - np.mean(nats)) < 1e-10 and guesses == likeliest


def test_early_exit(capsys):
    bench.bench_batching(tiny("relaxed", n_layer=4, n_loop=2, rank=2), TEXT, CPU, slots=3, rounds=1)
    out = capsys.readouterr().out
    assert out.count("answers the same") == 9 and "DIFFER" not in out and out.count("p95") == 18
    assert out.count("bound 2 / (2 - p1)") == 2 and out.count("quality as served") == 3
    assert "no early exit" in out and out.count("likeliest token that of all loops: 100.0%") >= 1


def test_recursions(capsys):
    model = tiny("mor", n_layer=8)
    plain = tiny("mor", router="none", n_loop=1, share="cycle", n_layer=8)
    bench.bench_mor_requests(model, plain, TEXT, CPU, slots=3, rounds=1)
    out = capsys.readouterr().out
    assert out.count("answers the same") == 6 and "DIFFER" not in out
    exits = [loop for r in Engine(model, 3, 8).run(bench.workload(TEXT)()) for loop in r.exits]
    mean = sum(exits) / len(exits)
    assert f"a token takes {mean:.2f}, so {(2 + 2 * mean) / 8:.2f} of the plain" in out
    assert f"3 slots: bound {8 / (2 + 2 * mean):.2f}, reached" in out and out.count("as much memory: bound") == 2
    assert out.count("quality as served, at most") == 3 and model.cfg.exit_loop == 0


def test_loss_vs_throughput_is_drawn(tmp_path, data_dir, capsys):
    """Runs of relaxed and mor, with and without a router, each with the loss of its log; others are refused."""
    for name, model, *keys in (("a", "mor"), ("b", "mor", "router=none"), ("c", "relaxed"), ("d", "gpt", "max_steps=1"),
                               ("f", "mor", f"dataset=file:{__file__}")):
        runs.run(model, tmp_path / name, data_dir, *keys)
    paths = {name: str(tmp_path / name / "r") for name in "abcdf"}
    capsys.readouterr()
    keys = [f"data_dir={data_dir}", "rounds=1", "slots=2", "requests=3"]
    bench.main(["serve", *(paths[name] for name in "abc"), f"file={tmp_path / 'p.png'}", *keys])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines[:3]] == ["depth", "sequence", "sequence"]
    for line, name in zip(lines, "abc"):
        log = [json.loads(row) for row in open(tmp_path / name / "r" / "log.jsonl")]
        bpb = [row["val_bpb"] for row in log if "val_bpb" in row][-1]
        assert float(line.split()[4]) == pytest.approx(bpb, abs=1e-4)
    assert lines[3].endswith("3 runs") and (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    for names, message in ((["d"], "is a model_gpt: requests are for"), (["a", "a"], "each once"), ([], "give the folders"),
                           (["a", "f"], "not trained on the same tokens")):
        with pytest.raises(config.UserError, match=message):
            bench.main(["serve", *(paths[name] for name in names), *keys, f"file={tmp_path / 'no.png'}"])
    assert not (tmp_path / "no.png").exists()

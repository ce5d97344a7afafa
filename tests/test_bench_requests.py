"""bench.py: the harness; requests: what is printed is what was answered, quality is that of the model on the text."""
import numpy as np
import pytest
import torch

from lab import bench
from lab import bench_requests
from common.keys import UserError
from lab import plot
import runs
from lab import timing
from conftest import tiny
from serve import Engine

CPU, TEXT = torch.device("cpu"), np.arange(60) * 7 % 61


@pytest.fixture(autouse=True)
def few_requests(monkeypatch):
    """Six short requests instead of 240 long ones."""
    for name, value in (("PROMPT", (1, 3)), ("ANSWER", (2, 5)), ("LONGEST", 8)):
        monkeypatch.setattr(bench_requests, name, value)
    whole = bench_requests.workload
    monkeypatch.setattr(bench_requests, "workload", lambda text, requests=6: whole(text, min(requests, 6)))


def test_candidates_take_turns():
    """Two rounds warm up; prepare runs before each call; a ratio is the median of the rounds'."""
    calls = []
    note = lambda word: lambda: calls.append(word)
    candidates = {"a": lambda: (note("prepare"), note("a")), "b": lambda: (None, note("b"))}
    times = timing.measure(candidates, CPU, 3)
    assert calls == ["prepare", "a", "b"] * 5 and [len(t) for t in times.values()] == [3, 3]
    assert timing.ratio([2.0, 9.0, 8.0], [1.0, 3.0, 1.0]) == 3.0


def test_what_decoding_runs():
    """The prefill apart from the tokens after it; without a cache, the whole prefix for each."""
    model, seen = tiny("gpt"), []
    forward = model.forward
    model.forward = lambda idx, cache=None: seen.append((idx.size(1), cache is None)) or forward(idx, cache=cache)
    for new, cached in ((2, True), (2, False), (0, True)):
        for function in filter(None, bench.decoding(lambda: model, CPU, 9, new, 3, cached)):
            function()
    assert seen == [(7, False), (1, False), (1, False), (8, True), (9, True), (9, False)]


def test_quality_is_that_of_the_text():
    """Cross-entropy and likeliest tokens where the text goes on, as one forward over it has."""
    model, work = tiny("mor", n_layer=8), bench_requests.workload(TEXT)
    ce, guesses = bench_requests.served_quality(work, model, 3)
    nats, likeliest = [], []
    for request in work():
        tokens, n = torch.tensor([request.prompt + request.truth]), len(request.prompt)
        logits = model(tokens)[0][0, n - 1:-1].log_softmax(-1)
        nats += (-logits.gather(1, tokens[0, n:, None])[:, 0]).tolist()
        likeliest += logits.argmax(-1).tolist()
    assert abs(ce - np.mean(nats)) < 1e-10 and guesses == likeliest


def test_early_exit(capsys):
    model = tiny("relaxed", n_layer=4, n_loop=2, rank=2)
    bench_requests.relaxed_requests(model, TEXT, CPU, slots=3, rounds=1)
    out = capsys.readouterr().out
    assert out.count("answers the same") == 9 and "DIFFER" not in out and out.count("p95") == 18
    assert out.count("exit after loop 1") == 2 == out.count("with the prompts") and out.count("quality as served") == 3
    assert "that of all loops: 100.0%" in out


def test_recursions(capsys):
    model = tiny("mor", n_layer=8)
    plain = tiny("mor", router="none", n_loop=1, share="cycle", n_layer=8)
    bench_requests.mor_requests(model, plain, TEXT, CPU, slots=3, rounds=1)
    out, work = capsys.readouterr().out, bench_requests.workload(TEXT)
    assert out.count("answers the same") == 6 and "DIFFER" not in out
    exits_of = lambda model: [loop for r in Engine(model, 3, 8).run(work()) for loop in r.exits]
    mean = np.mean(exits_of(model))
    assert f"a token takes {mean:.2f}, so {(2 + 2 * mean) / 8:.3f} of the plain" in out and out.count(": at best") == 3
    assert out.count("quality as served   at most") == 3 and model.cfg.exit_loop == 0
    assert max(exits_of(bench_requests.at_most(model, 2))) == 2


def test_loss_vs_throughput_is_drawn(tmp_path, data_dir, capsys):
    """Runs of relaxed and mor, with and without a router, each with the loss of its log; other tokens are refused."""
    for name, model, *keys in (("a", "mor"), ("b", "mor", "router=none"), ("c", "relaxed"),
                               ("d", "mor", f"dataset=file:{__file__}")):
        runs.run(model, tmp_path / name, data_dir, *keys)
    paths = {name: str(tmp_path / name / "r") for name in "abcd"}
    capsys.readouterr()
    keys = [f"data_dir={data_dir}", "rounds=1", "slots=2", "requests=3", f"file={tmp_path / 'p.png'}"]
    with pytest.raises(UserError, match="not trained on the same tokens"):
        bench.main(["serve", paths["a"], paths["d"], *keys])
    bench.main(["serve", *(paths[name] for name in "abc"), *keys])
    *lines, last = capsys.readouterr().out.splitlines()
    for line, name, batching in zip(lines, "abc", ("depth", "sequence", "sequence"), strict=True):
        bpb = [row["val_bpb"] for row in plot.read_log(tmp_path / name / "r" / "log.jsonl") if "val_bpb" in row][-1]
        assert paths[name] in line and f"{batching}; {bpb:.4f} bits per byte" in line
    assert last.endswith("3 runs") and (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")

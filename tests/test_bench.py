"""bench.py: every line of every benchmark, at tiny sizes on a CPU; what is timed; requests: what is printed is what was
answered, quality is that of the model on the text."""
import json
from functools import partial

import numpy as np
import pytest
import torch

from common.keys import UserError, model_module
from common.config import TrainConfig
from conftest import tiny
from lab import bench
from lab import plot
import runs
from serve import Engine

CPU, TEXT = torch.device("cpu"), np.arange(60) * 7 % 61


@pytest.fixture(autouse=True)
def few_requests(monkeypatch):
    """Six short requests instead of 240 long ones."""
    for name, value in (("PROMPT", (1, 3)), ("ANSWER", (2, 5)), ("LONGEST", 8)):
        monkeypatch.setattr(bench, name, value)
    whole = bench.workload
    monkeypatch.setattr(bench, "workload", lambda text: whole(text, 6))


@pytest.mark.parametrize("name, keys, more, lines", [
    ("gpt", dict(), {}, {"training step": 2, "decoding batch": 4, "prefill 15 tokens": 2, "cache of a row": 2}),
    ("rt", dict(n_layer=2), dict(lengths=(8, 16)), {"forward, ": 0, "forward + backward, T 16": 2, " naive ": 3,
                                                    "wavefront": 3, "decoding": 4, "grows as T^": 2}),
    ("lrt", dict(n_layer=1, n_head=1), {}, {"training step": 7, "prefill 15 tokens": 3, "cache of a row": 3}),
    ("rat", dict(chunk=4), dict(lengths=[64, 128], rows=2), {"T 128": 12, "grows as T^": 8, "token (RAT(4))": 1}),
    ("relaxed", dict(n_layer=4, n_loop=2), {}, {"training step": 4, "decoding batch 16": 4, "0.99 x its FLOPs": 0}),
    ("mor", dict(n_layer=8), {}, {"training step": 6, "decoding": 4, "1.00 x its FLOPs": 6, "cache of a row": 2})])
def test_every_line_of_a_model(name, keys, more, lines, capsys):
    cfg = model_module(name).Config(**{**dict(block_size=16, vocab_size=31, n_head=2, n_embd=16, n_layer=2), **keys})
    call = bench.bench_rat if name == "rat" else partial(bench.bench_model, name)
    call(cfg, TrainConfig(model=name, batch_size=2), CPU, rounds=1, **more)
    out = capsys.readouterr().out
    assert {words: out.count(words) for words in lines} == lines, out
    assert "does not fit" not in out and "nan" not in out


def test_every_line_of_kernels(capsys):
    bench.bench_kernels(bench.BenchConfig(device="cpu", rounds=1), [], [(1, 2, 64, 8)])
    out = capsys.readouterr().out
    assert [out.count(word) for word in ("x SDPA", "backward", "x loop")] == [6, 3, 4] and "nan" not in out


def test_candidates_take_turns(capsys):
    """Two rounds warm up; prepare runs before each call; a ratio is the median of the rounds'."""
    calls = []
    note = lambda word: lambda: calls.append(word)
    candidate = lambda case, device: (note("prepare") if case == "a" else bench.nothing, note(case))
    times = bench.compare("title", candidate, {"first": "a", "second": "b"}, CPU, 3)
    assert calls == ["prepare", "a", "b"] * 5 and [len(t) for t in times.values()] == [3, 3]
    assert bench.ratio([2.0, 9.0, 8.0], [1.0, 3.0, 1.0]) == 3.0 and bench.ratio([], [1.0]) is None
    assert f"{bench.ratio(*reversed(times.values())):8.3f} x first" in capsys.readouterr().out


def test_what_decoding_runs():
    """Tokens of the last eighth, one after the other; the rest is prefilled when they are done."""
    model, seen = tiny("gpt"), []
    forward = model.forward
    model.forward = lambda idx, cache: seen.append((len(idx), idx.size(1), cache.longest)) or forward(idx, cache=cache)
    prepare, decode = bench.decoding(lambda: model, CPU, 100, 3)
    for _ in range(2):
        prepare()
        decode()
    assert seen == [(3, 92, 0), *[(3, 1, 92 + n) for n in range(8)]] * 2
    assert 2.2 < bench.rt_floor(model_module("rt").Config(n_layer=1, n_embd=1024, n_head=16, block_size=512), 8) < 2.8


def test_trained_runs(tmp_path, data_dir, capsys):
    """Numbers for reproduce.py."""
    folders = [str(runs.run(name, tmp_path / name, data_dir, "max_steps=1").folder) for name in ("gpt", "mor")]
    capsys.readouterr()
    bench.main(["runs", *folders, f"json={tmp_path / 'a.json'}", "rounds=1"])
    found, out = json.loads((tmp_path / "a.json").read_text()), capsys.readouterr().out
    assert [found[f].keys() for f in folders] == [{"train_ms", "decode_1_ms", "decode_16_ms", "cache_bytes"}] * 2
    assert out.count(f"x {folders[0]}") == 6 and f"{found[folders[1]]['train_ms']:11.3f} ms" in out


def test_quality_is_that_of_the_text():
    """Cross-entropy and likeliest tokens where the text goes on, as one forward over it has."""
    model, work = tiny("mor", n_layer=8), bench.workload(TEXT)
    ce, guesses = bench.quality(model, 3, {}, TEXT)
    nats, likeliest = [], []
    for request in work():
        n, (_, place) = len(request.prompt), request.id
        tokens = torch.from_numpy(TEXT[None, place:place + n + request.max_new_tokens])
        logits = model(tokens)[0][0, n - 1:-1].log_softmax(-1)
        nats += (-logits.gather(1, tokens[0, n:, None])[:, 0]).tolist()
        likeliest += logits.argmax(-1).tolist()
    assert abs(ce - np.mean(nats)) < 1e-10 and guesses == likeliest


def test_early_exit(capsys):
    bench.relaxed_requests(tiny("relaxed", n_layer=4, n_loop=2, rank=2), TEXT, CPU, slots=3, rounds=1)
    out = capsys.readouterr().out
    assert out.count("answers the same") == 9 and "DIFFER" not in out
    assert out.count("exit after loop 1") == 2 == out.count(": at best") and out.count("quality of") == 3
    assert "that of all loops: 100.0%" in out


def test_recursions(capsys):
    model = tiny("mor", n_layer=8)
    bench.mor_requests(model, TEXT, CPU, slots=3, rounds=1)
    out, work = capsys.readouterr().out, bench.workload(TEXT)
    assert out.count("answers the same") == 6 and "DIFFER" not in out and out.count(": at best") == 3
    mean = np.mean([loop for r in Engine(model, 3, 8).run(work()) for loop in r.exits])
    assert f"a token takes {mean:.2f}, so {(2 + 2 * mean) / 8:.3f} of the plain" in out


def test_loss_vs_throughput_is_drawn(tmp_path, data_dir, capsys):
    """Runs of relaxed and mor, with and without a router, each with the loss of its log; other tokens are refused."""
    for name, model, *keys in (("a", "mor"), ("b", "mor", "router=none"), ("c", "relaxed"),
                               ("d", "mor", f"dataset=file:{__file__}")):
        runs.run(model, tmp_path / name, data_dir, *keys)
    paths = {name: str(tmp_path / name / "r") for name in "abcd"}
    capsys.readouterr()
    keys = ["rounds=1", f"file={tmp_path / 'new' / 'p.png'}"]
    with pytest.raises(UserError, match="not trained on the same tokens"):
        bench.main(["serve", paths["a"], paths["d"], *keys])
    bench.main(["serve", *(paths[name] for name in "abc"), *keys])
    *lines, last = capsys.readouterr().out.splitlines()
    for line, name, batching in zip(lines, "abc", ("depth", "sequence", "sequence"), strict=True):
        bpb = [row["val_bpb"] for row in plot.read_log(tmp_path / name / "r" / "log.jsonl") if "val_bpb" in row][-1]
        assert paths[name] in line and f"{batching}; {bpb:.4f} bits per byte" in line
    assert last.endswith("3 runs") and (tmp_path / "new" / "p.png").read_bytes().startswith(b"\x89PNG")

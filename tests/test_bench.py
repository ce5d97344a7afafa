"""bench.py: every line of every benchmark, at tiny sizes on a CPU; what is timed, and the memory that is counted."""
import json
import re
from functools import partial

import numpy as np
import pytest
import torch

from common.keys import model_module
from common.process import TrainConfig
from conftest import tiny
from lab import bench
import runs
from serve import Engine

CPU, TEXT, TAKE_TURNS = torch.device("cpu"), np.arange(60) * 7 % 61, bench.take_turns


@pytest.fixture(autouse=True)
def few(monkeypatch):
    """One round without a warm-up; six short requests instead of 240 long ones."""
    monkeypatch.setattr(bench, "take_turns", lambda calls, device, rounds: TAKE_TURNS(calls, device, 1))
    monkeypatch.setattr(bench.gc, "collect", int)       # slow among all that pytest holds
    for name, value in dict(WARM_UP=0, PROMPT=(1, 3), ANSWER=(2, 5), LONGEST=8, REQUESTS=6).items():
        monkeypatch.setattr(bench, name, value)


@pytest.mark.parametrize("name, keys, more, lines", [
    ("gpt", dict(), {}, {"training step": 2, "decoding batch": 4, "prefill 15 tokens": 2, "cache, T 16": 2}),
    ("rt", dict(block_size=8), {}, {"forward + backward": 5, " naive ": 5, "decoding": 10, " MiB ": 25}),
    ("lrt", dict(n_layer=1, n_head=1), {}, {"training step": 7, "prefill 15 tokens": 7, "cache, T 16": 7}),
    ("rat", dict(chunk=4, block_size=64), dict(doublings=1), {"T 128": 9, "prefill 127 tokens": 3, "token (RAT(4))": 2, " MiB ": 18}),
    ("relaxed", dict(n_layer=4, n_loop=2), {}, {"training step": 3, "decoding batch 16": 3, "1.00 x (": 2}),
    ("rat", dict(chunk=4, swa=9), {}, {"sequences of 16": 6, " 4,096 bytes": 1, "1.00 x (attention)": 1}),
    ("mor", dict(n_layer=8), {}, {"training step": 6, "decoding": 12, "1.00 x (": 2, "cache, T 16": 6})])
def test_every_line_of_a_model(name, keys, more, lines, capsys):
    cfg = model_module(name).Config(**{**dict(block_size=16, vocab_size=31, n_head=2, n_embd=16, n_layer=2), **keys})
    of_rat = bench.bench_rat if more else bench.bench_throughput
    call = of_rat if name == "rat" else partial(bench.bench_model, name)
    call(cfg, TrainConfig(model=name, batch_size=2), CPU, **more)
    out = capsys.readouterr().out
    assert {words: out.count(words) for words in lines} == lines, out
    assert "does not fit" not in out and "nan" not in out


def test_every_line_of_kernels(capsys):
    bench.bench_kernels(CPU, [(1, 2, 64, 8)])
    out = capsys.readouterr().out
    assert out.count("x SDPA") == 2 and "nan" not in out


def test_cases_take_turns(capsys, monkeypatch):
    """Rounds that warm up do not count; prepare runs before each call; a ratio is the median of the rounds'."""
    monkeypatch.setattr(bench, "take_turns", lambda *how: {name: [9.0, *t] for name, t in TAKE_TURNS(*how).items()})
    monkeypatch.setattr(bench, "WARM_UP", 1)
    calls = []
    note = lambda word: lambda: calls.append(word)
    setup = lambda case: (note("prepare") if case == "a" else bench.nothing, note(case))
    assert max(bench.compare("title", {"first": "a", "second": "b"}, setup, CPU, 3).values()) < 1000
    assert calls[:9] == ["prepare", "a", "b"] * 3
    assert bench.tell("title", {"a": [1.0, 3.0, 1.0], "b": [2.0, 9.0, 8.0]}, {}, per=2) == {"a": 500.0, "b": 4000.0}
    assert "3.000 x a" in capsys.readouterr().out


@pytest.mark.skipif(not bench.RESET_PEAK.exists(), reason="memory of a CPU is told by Linux")
def test_peak_memory():
    """What is made in the setup and in the call, at the peak; not what prepare took, nor what is free again."""
    ones = lambda mib: torch.ones(mib * 2 ** 20 // 4)

    def setup(n):
        weights = ones(n)
        return lambda: ones(200), lambda: (weights, ones(40))[0]
    free = [ones(1) for _ in range(100)]
    del free
    for n in 20, 60:
        assert n + 36 < bench.peak_memory(setup, n, CPU) / 2 ** 20 < n + 48


def test_what_decoding_runs():
    """The last eight tokens, one after the other; the rest is prefilled before."""
    model, seen = tiny("gpt"), []
    forward = model.forward
    model.forward = lambda idx, cache: seen.append((len(idx), idx.size(1), cache.longest)) or forward(idx, cache=cache)
    prepare, decode = bench.decoding(model, CPU, 100, 3)
    for _ in range(2):
        prepare()
        assert seen.pop() == (3, 92, 0)
        decode()
    assert seen == [(3, 1, 92 + n) for n in range(8)] * 2


def test_trained_runs(tmp_path, data_dir, capsys):
    """Numbers for reproduce.py; requests to one of the runs, and to one that is converted."""
    folders = [str(runs.run(name, tmp_path / name, data_dir, "max_steps=1").folder) for name in ("gpt", "mor")]
    capsys.readouterr()
    bench.main(["runs", *folders])
    out = capsys.readouterr().out
    found = json.loads(out.splitlines()[-1])
    assert [found[f].keys() for f in folders] == [{"train_ms", "decode_1_ms", "decode_16_ms", "cache_bytes"}] * 2
    assert out.count(f"x {folders[0]}") == 8 and f"{found[folders[1]]['train_ms']:11.3f} ms" in out
    bench.main(["mor", f"init_from={folders[1]}", "device=cpu"])
    bench.main(["relaxed", f"init_from={folders[0]}", "device=cpu"])
    out = capsys.readouterr().out
    assert out.count("6 requests") == 3 + 7 and out.count("% of that speed") == 1 + 3


def test_early_exit(capsys, monkeypatch):
    """The rule lets 0.65 of a text's tokens go after the first loop; the loss is theirs, and the others' of all loops."""
    model, idx = tiny("relaxed", block_size=19, n_layer=4, n_loop=2, rank=2), torch.from_numpy(TEXT[:58])
    monkeypatch.setattr(bench, "LONGEST", 19)
    bench.early_exit(model, TEXT[:58], CPU)
    out = capsys.readouterr().out
    least, nats, _ = map(float, re.search("confidence:(.*): (.*) nats a token, without exits (.*)", out).groups())
    late = model(idx[:-1].view(3, 19))[0].flatten(0, 1).log_softmax(-1)
    model.cfg.exit_loop = 1
    early = model(idx[:-1].view(3, 19))[0].flatten(0, 1).log_softmax(-1)
    exits = early.exp().amax(-1) > least - 1e-6
    losses = -torch.where(exits[:, None], early, late).gather(1, idx[1:, None]).detach()
    assert int(exits.sum()) in (36, 37, 38) and nats == pytest.approx(float(losses.mean()), abs=1e-3)


def test_requests(capsys):
    model = tiny("mor", block_size=19, n_layer=8, n_loop=2)
    bench.bench_requests("mor", model, TEXT, CPU)
    mean = np.mean([loop for r in Engine(model, 3).run(bench.workload(TEXT)) for loop in r.exits])
    assert f"{(2 + 6 * mean / 2) / 8:.3f} of the layers" in capsys.readouterr().out

"""bench.py prints every line of every benchmark, at tiny sizes on a CPU. The tests also look at what is timed, and at
the memory that is counted."""
import json
import re
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from common.checkpoint import load_checkpoint, save_checkpoint
from common.options import TrainConfig, UserError, model_module
from conftest import tiny
from emulated_graphs import emulate
from lab import bench
from lab.bench import Call
import runs
import train
from serve import Engine

CPU, TEXT, TAKE_TURNS = torch.device("cpu"), np.arange(60) * 7 % 61, bench.take_turns


@pytest.fixture(autouse=True)
def few(monkeypatch):
    """There is one round without a warm-up, and there are six short requests instead of 240 long ones."""
    monkeypatch.setattr(bench, "take_turns", lambda calls, device, rounds: TAKE_TURNS(calls, device, 1))
    monkeypatch.setattr(bench.gc, "collect", int)       # this is slow among all that pytest holds
    for name, value in dict(WARM_UP=0, PROMPT=(1, 3), ANSWER=(2, 5), LONGEST=8, REQUESTS=6).items():
        monkeypatch.setattr(bench, name, value)


@pytest.mark.parametrize("name, keys, more, lines", [
    ("gpt", dict(), {}, {"training step, eager": 2, "decoding batch": 4, "prefill 15 tokens, float32": 2,
                         "cache, T 16": 2}),
    ("rt", dict(block_size=8), {}, {"forward + backward": 5, " naive ": 5, "decoding": 10, " MiB ": 25, " tokens/s": 25,
                                    " launches": 20}),
    ("rt", dict(block_size=8), dict(skip="naive,tiled"), {"naive": 0, "tiled": 0, "training step": 3, "decoding": 6}),
    ("lrt", dict(n_layer=1, n_head=1), {}, {"training step": 7, "prefill 15 tokens": 7, "cache, T 16": 7}),
    ("rat", dict(chunk=4, block_size=64), dict(longest=128), {
        "T 128": 9, "T 256": 0, "prefill 127 tokens": 3, "token (RAT(4))": 2, " MiB ": 18}),
    ("relaxed", dict(n_layer=4, n_loop=2), {}, {"training step": 3, "decoding batch 16": 3, "1.00 x (": 2}),
    ("rat", dict(chunk=4, swa=9), {}, {"sequences of 16": 6, " 4,096 bytes": 1, "1.00 x (attention)": 1}),
    ("mor", dict(n_layer=8), {}, {"training step": 6, "decoding": 12, "1.00 x (": 2, "cache, T 16": 6})])
def test_every_line_of_a_model(name, keys, more, lines, capsys):
    cfg = model_module(name).Config(**{**dict(block_size=16, vocab_size=31, n_head=2, n_embd=16, n_layer=2), **keys})
    of_rat = bench.bench_rat if more else bench.bench_throughput
    call = of_rat if name == "rat" else partial(bench.bench_model, name)
    call(cfg, TrainConfig(model=name, batch_size=2), CPU, bench.BenchConfig(**more))
    out = capsys.readouterr().out
    assert {words: out.count(words) for words in lines} == lines, out
    assert "does not fit" not in out and "nan" not in out


def test_a_model_has_the_vocabulary_of_its_tokenizer(monkeypatch):
    """It has that of train.py's runs, although no text is read."""
    found = []
    monkeypatch.setitem(bench.BENCHES, "gpt", lambda cfg, *more: found.append(cfg.vocab_size))
    for keys in [], ["tokenizer=gpt2"], ["tokenizer=byte"], ["tokenizer=hf:x", "vocab_size=9"]:
        bench.main(["gpt", "device=cpu", *keys])
    assert found == [2048, 50257, 257, 9]
    with pytest.raises(UserError, match="vocab_size= is needed with tokenizer=hf:x"):
        bench.main(["gpt", "tokenizer=hf:x"])


def test_every_line_of_kernels(capsys):
    bench.bench_kernels(CPU, sizes=[(1, 2, 64, 8)])
    out = capsys.readouterr().out
    assert out.count("x SDPA") == 2 and "nan" not in out


def test_cases_take_turns(capsys, monkeypatch):
    """Rounds that warm up do not count, and prepare runs before each call. A ratio is the median of the rounds'
    ratios."""
    def with_a_warm_up(*how):
        times, peaks = TAKE_TURNS(*how)
        return {name: [9.0, *seconds] for name, seconds in times.items()}, peaks
    monkeypatch.setattr(bench, "take_turns", with_a_warm_up)
    monkeypatch.setattr(bench, "WARM_UP", 1)
    calls = []
    note = lambda word: lambda: calls.append(word)
    setup = lambda case: {part: Call(note(case), note("prepare") if case == "a" else bench.nothing) for part in "xy"}
    found = bench.compare({"first": "a", "second": "b"}, setup, CPU, 3)
    assert [list(found), *map(list, found.values())] == [["x", "y"], *[["first", "second"]] * 2]
    assert max(max(times.values()) for times in found.values()) < 1000 and calls[:9] == ["prepare", "a", "b"] * 3
    capsys.readouterr()
    assert bench.tell("title", "b", Call(None, steps=2), [2.0, 9.0, 8.0], None, ("a", [1.0, 3.0, 1.0]), CPU) == 4000.0
    assert "4000.000 ms   3.000 x a" in capsys.readouterr().out


@pytest.mark.parametrize("compile, device, modes", [
    ("auto", "cpu", ["eager"]), ("auto", "cuda", ["compiled", "graph", "eager"]),
    ("true", "cpu", ["compiled", "eager"]), ("graph", "cuda", ["graph", "eager"]), ("false", "cuda", ["eager"])])
def test_training_is_compiled_where_that_of_train_is(compile, device, modes, monkeypatch):
    """Training is compiled where train.py compiles. Then the calls go through the function that torch.compile
    returns."""
    found = SimpleNamespace(util=SimpleNamespace(find_spec=lambda name: True))      # torch asks the real one
    monkeypatch.setattr("common.device.importlib", found)
    monkeypatch.setattr(bench, "recordable", lambda device: device.type == "cuda")
    cfg, device, used = TrainConfig(compile=compile, batch_size=2), torch.device(device), []
    assert bench.training_modes(cfg, device) == modes
    monkeypatch.setattr(torch, "compile", lambda model: lambda *batch: used.append(len(batch[0])) or model(*batch))
    assert (train.prepare_forward(cfg, torch.nn.Linear(1, 1), SimpleNamespace(device=device, world=1)).__class__
            is not torch.nn.Linear) == ("compiled" in modes)
    for mode in {*modes} - {"graph"}:
        calls = bench.training(tiny("gpt").float(), CPU, cfg, mode)
        assert list(calls) == [f"forward + backward, {mode}", f"training step, {mode}"]
        calls[f"training step, {mode}"].run()
    assert used == [2] * ("compiled" in modes)


def test_a_graph_trains_and_decodes_as_eager_code(monkeypatch):
    """The graph is emulated on a CPU. The weights are the same after steps whose gradients are added to others, and
    Python runs twice. In decoding, at most one step of each call is an ordinary one."""
    emulate(monkeypatch)
    cfg, weights = TrainConfig(batch_size=2), []
    for mode in "graph", "eager":
        torch.manual_seed(1)
        model = tiny("gpt").float()
        forwards, forward = [], model.forward
        model.forward = lambda *batch: forwards.append(1) or forward(*batch)
        calls = bench.training(model, CPU, cfg, mode)
        for call in [*calls.values()] * 2:
            call.run()
        weights.append([*model.parameters()])
        assert len(forwards) == (2 if mode == "graph" else 4)
    assert all(map(torch.equal, *weights))
    assert bench.training(tiny("mor", router="token"), CPU, cfg, "graph") == {}
    model, seen = tiny("gpt").float(), []
    hidden = model.hidden
    model.hidden = lambda idx, context: seen.append(idx.size(1)) or hidden(idx, context)
    call = bench.decoding(model, CPU, 100, 3)
    for _ in range(3):
        call.prepare()
        call.run()
    assert seen == [92, 1, 1, 92, 92] and call.count()[0] == 0


def test_modes_of_decoding(capsys, monkeypatch):
    """On a GPU the first mode is what sample.py does by itself, and it decodes all batches. Then come float32 and eager
    code."""
    gpu = torch.device("cuda")
    assert bench.decoding_modes(CPU) == [(torch.float32, "eager")]
    monkeypatch.setattr(bench, "recordable", lambda device: True)
    modes = [(torch.bfloat16, "graph"), (torch.float32, "graph"), (torch.bfloat16, "eager")]
    assert bench.decoding_modes(gpu) == modes
    monkeypatch.setattr(bench, "decoding_modes", lambda device: modes)
    found = bench.bench_decoding(lambda keys: tiny("gpt").float(), {"a": ""}, 16, CPU)
    assert list(found) == ["decode_1_ms", "decode_16_ms", "cache_bytes"] and found["cache_bytes"]["a"] == 2 * 2 * 32 * 2
    out = capsys.readouterr().out
    assert re.findall("(decoding.*?|prefill.*?)  ", out) == [
        "decoding batch 1, T 16, bfloat16, graph", "decoding batch 16, T 16, bfloat16, graph",
        "decoding batch 1, T 16, float32, graph", "decoding batch 1, T 16, bfloat16, eager",
        "prefill 15 tokens, bfloat16"]
    assert out.count(" launches") == 1


def test_tokens_of_a_prefill(monkeypatch):
    calls = {}

    def compare(cases, make, device, rounds):
        calls.update(made := make("a"))
        return dict.fromkeys(made, {})
    monkeypatch.setattr(bench, "compare", compare)
    models = []
    make = lambda case: models.append(tiny("gpt").float()) or models[-1]
    bench.bench_decoding(make, {"a": "a"}, 20, torch.device("cpu"), prompts=3)
    prefill, = (call for title, call in calls.items() if title.startswith("prefill"))
    assert prefill.tokens == 3 * 19
    rows = []   # tokens that have logits in a prefill
    for model in models:
        model.head.register_forward_pre_hook(lambda head, args: rows.append(args[0].shape[:-1].numel()))
    prefill.run()
    assert rows == [3]


def test_a_training_step_is_what_moves_the_weights():
    model = tiny("gpt").float()
    calls = bench.training(model, CPU, TrainConfig(batch_size=2), "eager")
    weights = [w.detach().clone() for w in model.parameters()]
    same = lambda: all(map(torch.equal, weights, model.parameters()))
    calls["forward + backward, eager"].run()
    assert same() and all(w.grad is None for w in model.parameters())
    calls["training step, eager"].run()
    assert not same()


def test_figures_of_a_known_gpu(capsys, monkeypatch):
    """A step takes 5 ms. In a millisecond it makes 20 operations where the GPU could make 80, and reads 10 bytes of
    50."""
    monkeypatch.setattr(bench, "gpu_peaks", lambda device: (8e4, 5e4))
    call = Call(None, steps=4, tokens=15, flops=100, count=lambda: (1234, 50))
    bench.tell("title", "a", call, [0.02], 3 << 20, ("a", [0.02]), CPU)
    line = "3 MiB   1.000 x a, 3,000 tokens/s, MFU 25.0%, MBU 20.0%, 1,234 launches"
    assert capsys.readouterr().out.endswith(f"{line}\n")


def test_what_counts_as_a_launch():
    x = torch.ones(2, 3, 16, 8)
    with bench.Counting() as counting:
        y = torch.empty(3, 1)
        (y.copy_(x[0, :, :1, 0]).view(3) + 1).relu_()
    assert counting.launches == 3
    pos = torch.arange(16, dtype=torch.int32)
    attend = lambda: bench.kernels.attend_by_position(x, x, x, pos, pos)
    assert bench.counted(Call(attend)) == (1, 0) == bench.counted(Call(lambda: [attend(), attend()], steps=2))
    assert bench.counted(Call(lambda: x.index_select(2, pos[:5])), [x]) == (1, 2 * 3 * 5 * 8 * x.itemsize)


def sizes_of(*parts):
    return sum(p.nbytes for part in parts for p in part.parameters())


def test_bytes_that_a_decode_step_reads():
    """A step reads the weights as often as they are used, and the cached slots so far, but no embedding. Positions 92
    to 99 read 96.5 keys on average."""
    keys = lambda model: 2 * len(model.init_cache(1, 1).k) * 32 * 8 * 96.5
    gpt, loops = tiny("gpt"), tiny("relaxed", n_loop=2, rank=0)
    once = sizes_of(gpt.blocks, gpt.norm, gpt.head)
    for rows in 1, 3:
        assert bench.decoding(gpt, CPU, 100, rows).count()[1] == once + rows * keys(gpt)
    read = bench.decoding(loops, CPU, 100, 1).count()[1]
    assert read == 2 * sizes_of(loops.blocks) + sizes_of(loops.norm) + loops.head.weight.nbytes + keys(loops)
    ring = tiny("rat", mixer="attention", swa=5)
    read = bench.decoding(ring, CPU, 100, 1).count()[1]
    assert read == sizes_of(ring.blocks, ring.norm) + ring.head.weight.nbytes + 2 * 32 * 8 * (96.5 + 5)


@pytest.mark.skipif(not bench.RESET_PEAK.exists(), reason="memory of a CPU is told by Linux")
def test_peak_memory():
    """Memory that the setup and the call take counts at its peak. Memory that prepare took does not count, nor does
    memory that is free again."""
    ones = lambda mib: torch.ones(mib * 2 ** 20 // 4)

    def setup(n):
        weights = ones(n)
        return Call(lambda: (weights, ones(40))[0], lambda: ones(200))
    free = [ones(1) for _ in range(100)]
    del free
    for n in 20, 60:
        assert n + 36 < bench.peak_memory(partial(setup, n), CPU) / 2 ** 20 < n + 48


def test_memory_of_graphs(monkeypatch):
    """On a GPU the peak counts what torch calls free in the pools of CUDA graphs, on this device. The pool (0, 0) belongs
    to no graph."""
    pools = [((0, 0), 0, 100, 10), ((0, 1), 0, 50, 20), ((0, 2), 1, 70, 0)]
    names = "segment_pool_id", "device", "total_size", "allocated_size"
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: [dict(zip(names, pool)) for pool in pools])
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 1000)
    assert bench.peak(torch.device("cuda", 0)) == 1030


def test_trained_runs(tmp_path, data_dir, capsys):
    """The last line has numbers for reproduce.py. Requests go to one of the runs, and to one that is converted."""
    folders = [str(runs.run(name, tmp_path / name, data_dir, "max_steps=1").folder) for name in ("gpt", "mor")]
    capsys.readouterr()
    bench.main(["runs", *folders])
    out = capsys.readouterr().out
    found = json.loads(out.splitlines()[-1])
    assert [found[f].keys() for f in folders] == [{"train_ms", "decode_1_ms", "decode_16_ms", "cache_bytes"}] * 2
    assert out.count(f"x {folders[0]}") == 8 and f"{found[folders[1]]['train_ms']:11.3f} ms" in out
    task = load_checkpoint(folders[0])
    task["config"]["dataset"] = "task:copy"
    save_checkpoint(tmp_path / "task.pt", task)
    with pytest.raises(UserError, match="^dataset=task:copy is a task: a text is needed here$"):
        bench.main(["runs", str(tmp_path / "task.pt")])
    bench.main(["mor", f"init_from={folders[1]}", "device=cpu"])
    bench.main(["relaxed", f"init_from={folders[0]}", "device=cpu"])
    out = capsys.readouterr().out
    assert out.count("6 requests") == 3 + 7 and out.count("% of the bound's speed") == 1 + 3


def test_early_exit(capsys, monkeypatch):
    """The rule lets 0.65 of a text's tokens go after the first loop. The loss is that of these tokens after one loop,
    and of the others after all loops."""
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
    bench.bench_requests("relaxed", tiny("relaxed", block_size=19, n_layer=4, n_loop=2, exit_loop=1), TEXT, CPU)
    assert "all loops, depth: tokens by loops 1: 100%, 2: 0%: 1.000 of the layers" in capsys.readouterr().out

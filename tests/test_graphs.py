"""graphs.py replays a decode step as a graph, and it computes what an ordinary step computes. A step that could not be
replayed is refused. On a CPU a dispatch mode stands for CUDA (emulated_graphs.py). With a GPU the same runs there, in
float32 and bfloat16."""
import collections
import contextlib
import gc
import itertools
import weakref
from types import SimpleNamespace

import pytest
import torch

import graphs
import train
from conftest import relative, tiny
from emulated_graphs import emulate
from sample import stream
from test_models import each, tokens

MORE = [("lrt", dict(prefill="interleaved", pattern="SL", swa=5))]
CASES = [*each(repeat=True), *[pytest.param(name, sizes, id=f"{name}-{sizes}") for name, sizes in MORE]]


@pytest.fixture
def recorded(monkeypatch):
    """Return a list that grows by each graph that is recorded, after emulate."""
    emulate(monkeypatch)
    count, record = [], graphs.record
    monkeypatch.setattr(graphs, "record", lambda *a, **k: (count.append(1), record(*a, **k))[1])
    return count


def decoded(model, step, cache, x, n_prompt, ends):
    """Prefill x[:, :n_prompt], of which row 1 has one token less if ends is given. Then go on step by step, where row b
    ends after ends[b] steps. Returns the real logits of each step, those of an ordinary call with two more tokens a
    row, and the lengths."""
    n = torch.full((len(x),), n_prompt, device=x.device)
    n[1:] -= int(ends is not None)
    model(x[:, :n_prompt], cache=cache, n_valid=n if ends else None)
    out = []
    for t in range(n_prompt, x.size(1) - 2):
        live = torch.tensor([1 if not ends else t - n_prompt < end for end in ends or [1] * len(x)]).long()
        n_valid = live.to(x.device) if t % 2 else live      # it may be on the CPU
        logits = step(x[:, t:t + 1], None if live.all() else n_valid)
        assert logits.isfinite().all()
        out.append(logits[live.bool()])
    return torch.cat(out), model(x[:, -2:], cache=cache)[0], cache.lengths.clone()


@pytest.mark.parametrize("ends", [None, (9, 4, 9)], ids=["equal", "ragged"])
@pytest.mark.parametrize("name, sizes", CASES)
def test_a_step_replayed_is_an_ordinary_one(name, sizes, ends, recorded):
    """It is done twice, because a cache that was reset must go on with its graph."""
    model, x = tiny(name, **sizes), tokens(3, 22)
    cache, graph_cache = model.init_cache(3, 24), model.init_cache(3, 24)
    step = graphs.decoder(model, graph_cache)
    ordinary = lambda idx, n_valid=None: model(idx, cache=cache, n_valid=n_valid)[0]
    for more in 0, 1:
        want = decoded(model, ordinary, cache, (x + more) % 61, 9, ends)
        with torch.no_grad():
            found = decoded(model, step, graph_cache, (x + more) % 61, 9, ends)
        for a, b in zip(found, want):
            assert relative(a.double(), b.double()) < 1e-10
        cache.reset(), graph_cache.reset()
    # One graph is of the step. LRT's prompts and pairs of tokens are steps, too.
    assert len(recorded) >= 1 and (getattr(model.cfg, "has_chain", False) or len(recorded) == 1)


@pytest.mark.parametrize("name, sizes", CASES)
def test_steps_from_an_empty_cache(name, sizes, recorded):
    """The second step, which is recorded, is the first one after a reset."""
    model, x = tiny(name, **sizes), tokens(2, 6)
    cache = model.init_cache(2, 8)
    step = graphs.decoder(model, cache)
    step(x[:, -1:])
    cache.reset()
    found = torch.cat([step(x[:, t:t + 1]) for t in range(6)], 1)
    assert recorded and relative(found, model(x)[0]) < 1e-10


def test_a_graph_recorded_under_autocast_goes_on_after_it(recorded):
    """Autocast frees its copies of the weights at its end."""
    model, x = tiny("gpt").float(), tokens(2, 6)
    autocast = lambda: torch.autocast("cpu", torch.bfloat16)
    with autocast():
        cache, other = model.init_cache(2, 6), model.init_cache(2, 6)
        step = graphs.decoder(model, cache)
        found = [step(x[:, t:t + 1]) for t in range(3)]
    for t in range(3, 6):
        with autocast():
            found.append(step(x[:, t:t + 1]))
    with autocast():
        want = torch.cat([model(x[:, t:t + 1], cache=other)[0] for t in range(6)], 1)
    assert recorded and relative(torch.cat(found, 1), want) < 1e-2


def test_inputs_of_another_shape_are_refused(recorded):
    model, x = tiny("gpt"), tokens(2, 6)
    cache = model.init_cache(2, 6)
    step = graphs.decoder(model, cache)
    for t in range(3):
        step(x[:, t:t + 1])
    for wrong in (x[:1, 3:4],), (x[:, 3:4], torch.ones(1).long()):
        with pytest.raises(ValueError, match="an input of the graph is"):
            step(*wrong)
    assert cache.lengths.tolist() == [3, 3]


@pytest.mark.parametrize("name", ["gpt", "lrt"])    # LRT's prompts are steps, too
def test_fast_false_records_nothing(name, recorded):
    model, x = tiny(name, fast=False), tokens(2, 8)
    cache = model.init_cache(2, 8)
    step = graphs.decoder(model, cache)
    model(x[:, :4], cache=cache)
    for t in range(4, 8):
        step(x[:, t:t + 1])
    assert not recorded


@pytest.mark.parametrize("name", ["gpt", "lrt"])    # LRT's prompts are steps, too
def test_a_model_with_the_hooks_of_fsdp_records_nothing(name, recorded):
    """fully_shard gives a model the method unshard (tests/test_fsdp.py). Its hooks are not to be in a graph."""
    model, x = tiny(name), tokens(2, 8)

    def decode():
        cache = model.init_cache(2, 8)
        model(x[:, :4], cache=cache)
        step = graphs.decoder(model, cache)
        for t in range(4, 8):
            step(x[:, t:t + 1])
    model.unshard = lambda: None
    with graphs.plain_steps(model):
        decode()
    assert not recorded
    del model.unshard
    with graphs.plain_steps(model):
        decode()
    assert recorded


def test_train_evaluates_a_sharded_model_without_graphs(recorded):
    model, x = tiny("lrt"), tokens(2, 9)
    batches = SimpleNamespace(val=None, val_batches=lambda n: [0], cut=lambda data, batch: (x[:, :-1], x[:, 1:]))
    procs = SimpleNamespace(rank=0, world=1, autocast=contextlib.nullcontext(), sum=lambda *x: list(x),
                            device=torch.device("cpu"))
    run = train.Run(train.TrainConfig(dataset="task:s3"), procs, batches, model, forward=None, optimizers=[])
    seen = [train.evaluate(run)["val_ce"]]
    n = len(recorded)
    model.unshard = model.reshard = lambda: None
    model.set_reshard_after_forward = lambda *a, **k: None
    seen.append(train.evaluate(run)["val_ce"])
    assert n > 0 and len(recorded) == n and seen[0] == pytest.approx(seen[1], rel=1e-10)


def test_a_full_cache_is_an_error_before_the_step(recorded):
    model = tiny("gpt")
    cache = model.init_cache(2, 4)
    step = graphs.decoder(model, cache)
    for _ in range(4):
        step(tokens(2, 1))
    with pytest.raises(ValueError, match="the cache is full: 5 tokens, max_len=4"):
        step(tokens(2, 1))
    assert cache.lengths.tolist() == [4, 4] and not cache.static


@pytest.mark.parametrize("counted", [False, True])
def test_after_a_step_that_fails_the_cache_goes_on(counted, recorded):
    """A recording may run out of memory, before or after the cache has counted the token."""
    def function(idx, n_valid):
        if counted:
            model(idx, cache=cache, n_valid=n_valid)
        raise MemoryError
    model, x = tiny("gpt"), tokens(2, 6)
    cache = model.init_cache(2, 8)
    model(x[:, :3], cache=cache)
    with pytest.raises(MemoryError):
        graphs.stepper(function, cache)(x[:, 3:4])
    start = 3 + counted
    assert not cache.static and cache.lengths.tolist() == [start, start]
    assert relative(model(x[:, start:], cache=cache)[0], model(x)[0][:, start:]) < 1e-10


def test_where_a_cache_cannot_grow_the_step_fails_alone(recorded, monkeypatch):
    def grow(cache):
        raise MemoryError
    model, x = tiny("mor"), tokens(2, 6)
    cache = model.init_cache(2, 8)
    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(type(cache.later[0]), "grow", grow)
        graphs.decoder(model, cache)(x[:, :1])
    assert not cache.static and not any(later.static for later in cache.later)
    assert relative(model(x, cache=cache)[0], model(x)[0]) < 1e-10


@pytest.mark.parametrize("options", [dict(temperature=0), dict(temperature=1.0, top_k=20, top_p=0.9)], ids=str)
@pytest.mark.parametrize("name", ["gpt", "rat", "mor"])
def test_text_is_the_same(name, options, recorded):
    """Rows end at different steps, and the context is full before the end (gpt and mor have a limit)."""
    model, prompts = tiny(name, block_size=16), [[5, 6, 7], [8], [9, 10]]
    plain = lambda: [*stream(model, prompts, 24, **options, eot=greedy[2][0] if options["temperature"] == 0 else 5)]
    greedy = [*stream(model, prompts, 4, temperature=0)]
    found = plain()
    assert recorded
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(graphs, "recordable", lambda x: False)
        assert plain() == found


@pytest.fixture
def fake_cuda(monkeypatch):
    """Let graphs.record run on plain objects in the place of what CUDA has. Returns the streams that it uses, and those
    that it makes current. CUDA hands out two streams here, in turn."""
    class Graph:
        replay = lambda graph: None

    used, current, pool = [], [], itertools.cycle("ab")
    fakes = dict(CUDAGraph=Graph, Stream=lambda: next(pool), current_device=lambda: 0,
                 current_stream=lambda: "own", set_stream=current.append,
                 graph=lambda graph, stream, capture_error_mode: used.append(stream) or contextlib.nullcontext())
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(graphs, "FREE", collections.defaultdict(list), raising=False)
    return used, current


def test_the_graph_that_was_not_used_for_the_longest_time_goes(recorded):
    x = torch.zeros(1)
    def use(key):
        return graphs.replay(key, lambda x: [x + 1], x)
    for key in [*range(graphs.MOST)] * 2 + [0] + ["new"] * 2:
        use(key)
    assert 0 in graphs.GRAPHS and 1 not in graphs.GRAPHS and len(graphs.GRAPHS) == graphs.MOST


def test_graphs_that_exist_have_streams_of_their_own(fake_cuda):
    """The stream of a graph that is gone is used again."""
    stays, goes = (graphs.record(list) for _ in range(2))
    del goes
    graphs.record(list)
    assert fake_cuda[0] == ["a", "b", "b"]


def test_garbage_is_collected_before_a_recording_and_not_in_it(fake_cuda):
    """After an error, the stream from before is the current one again."""
    class Cycle:
        def __init__(self):
            self.itself = self
    garbage = weakref.ref(Cycle())
    assert graphs.record(lambda: [gc.isenabled(), garbage()])[0] == [False, None] and gc.isenabled()
    with pytest.raises(ZeroDivisionError):
        graphs.record(lambda: 1 / 0)
    assert gc.isenabled() and fake_cuda[1] == ["own", "own"]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name, sizes", CASES)
def test_on_a_gpu(name, sizes, dtype, monkeypatch):
    """A graph repeats the same kernels, so that the logits are those of static calls without it. In float32 they are
    also those of ordinary calls, whose kernels differ. (In bfloat16 rounding could route a token of MoR in another
    way.)"""
    model, x = tiny(name, **sizes).to("cuda", dtype), tokens(3, 22).cuda()
    found = []
    for kind in "graph", "static", "ordinary":
        with pytest.MonkeyPatch.context() as patch, torch.no_grad():
            if kind == "static":
                patch.setattr(graphs, "Graph", lambda function, inputs, generators: function)
            if kind == "ordinary":
                patch.setattr(graphs, "recordable", lambda x: False)
            cache = model.init_cache(3, 24)
            found.append(decoded(model, graphs.decoder(model, cache), cache, x, 9, (9, 4, 9)))
    for graph, static, ordinary in zip(*found):
        assert torch.equal(graph, static)
        assert dtype != torch.float32 or relative(graph, ordinary) < 1e-3


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["gpt", "rat"])
def test_a_gpu_draws_the_same_tokens(name, monkeypatch):
    """The generator of sampling goes on from replay to replay as it does without a graph."""
    model = tiny(name, block_size=32).to("cuda", torch.float32)
    draw = lambda: [*stream(model, [[5, 6, 7], [8]], 24, temperature=1.0, top_p=0.9)]
    found = draw()
    monkeypatch.setattr(graphs, "Graph", lambda function, inputs, generators: function)
    assert draw() == found and len({row[0] for row in found}) > 5

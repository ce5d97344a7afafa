"""serve.py answers every request as if it were alone. The tests also look at scheduling, at early exit, and at the
command line."""
import json
import math
import random
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import model_gpt
import model_mor
import model_relaxed
from common import checkpoint
from common.options import UserError
from common.tokenizer import ByteTokenizer
import runs
import serve
import train
from conftest import move, relative

BATCHINGS = ("sequence", "depth")
RULE, TRAINED = "confidence:0.09", "confidence:0.06"    # some tokens take all loops: looping()'s; the trained model's


def looping(seed=0, module=model_relaxed, scale=0.15, **sizes):
    """Return a small float64 model."""
    torch.manual_seed(seed)
    small = dict(block_size=64, vocab_size=31, n_loop=3, n_head=2, n_embd=16, n_layer=6)
    return move(module.Model(module.Config(**{**small, **sizes})).double().eval(), scale)


def answered(model, work, batching, sampling=(0.0, 0, 1.0), seed=0, slots=3, **options):
    """Return [(tokens, exits, logits)] of work, which is a list of (prompt, max_new_tokens). logits (V,) chose each
    token, and end-of-text too."""
    requests = [serve.Request(list(prompt), n, i, sampling, serve.generator(seed, i, "cpu"))
                for i, (prompt, n) in enumerate(work)]
    engine = serve.Engine(model, slots, None, batching, **options)
    pick = engine.pick

    def noted(slots, logits):
        for slot, row in zip(slots, logits):
            slot.request.logits = [*getattr(slot.request, "logits", []), row.clone()]
        return pick(slots, logits)
    engine.pick = noted
    list(engine.run(requests))
    return [(r.tokens, r.exits, r.logits) for r in requests]


def assert_answers(want, model, work, **options):
    """Assert that tokens and exits are the same, and that logits are the same to 1e-9, because a wrong key may change
    no token."""
    for batching in BATCHINGS:
        got = answered(model, work, batching, **options)
        assert [answer[:2] for answer in got] == [answer[:2] for answer in want]
        for (*_, ours), (*_, theirs) in zip(got, want):
            assert relative(torch.stack(ours), torch.stack(theirs)) < 1e-9


def work_of(rng, n=5, most=10):
    """Return n requests with prompts of 1 to 9 tokens and 1 to `most` new tokens."""
    return [(rng.choices(range(31), k=rng.randint(1, 9)), rng.randint(1, most)) for _ in range(n)]


def one(model, prompt, n, exit="", fill="exact", eot=None, vocab=None):
    """Return (tokens, exits, logits). There is no cache, and the loops run over the whole text for each token. A
    prefill takes all loops. If fill=propagate, a token that left keeps the state that it left with, and deeper keys and
    values are projected from it."""
    cfg, text, exits, rows = model.cfg, list(prompt), [], []
    rule = serve.exit_rule(exit, model.loops_to_run) or (lambda loop, p: False)
    loops = [cfg.n_loop] * len(prompt)      # each token goes through so many
    while True:
        h = model.wte(torch.tensor([text]))
        context = model_gpt.Context(cfg, h)
        for layer in range(cfg.n_layer):
            loop, inside = divmod(layer + 1, cfg.n_stored)
            on = torch.tensor(loops)[:, None] > layer // cfg.n_stored
            h = torch.where(on, model.blocks[layer % cfg.n_stored](h, layer, context), h)
            logits = model.head(model.norm(h))[0, -1, :vocab]
            if not inside and (loop == model.loops_to_run or exits and rule(loop, float(logits.softmax(-1).max()))):
                break
        rows.append(logits)
        if int(logits.argmax()) == eot:
            return text[len(prompt):], exits, rows
        loops = loops[:-1] + [loop if fill == "propagate" and exits else cfg.n_loop, cfg.n_loop]
        exits.append(loop)
        text.append(int(logits.argmax()))
        if len(exits) == n:
            return text[len(prompt):], exits, rows


@torch.no_grad()
def alone(model, work, *options):
    """Return what serve should return."""
    return [one(model, prompt, n, *options) for prompt, n in work]


@given(seed=st.integers(0, 2 ** 40))
def test_random_requests_are_answered_as_if_alone(seed):
    """The model, the rule and the lengths are any, and the end of text is a token that comes."""
    rng = random.Random(seed)
    pick = lambda *values: rng.choice(values)
    loops, sure = pick(3, 3, 2, 1), f"confidence:{rng.uniform(0.08, 0.13)}"
    model = looping(seed, n_loop=loops, n_layer=loops * pick(1, 2), rank=pick(0, 2), n_kv_head=pick(1, 2),
                    pos=pick("rope", "rope", "none"), qk_norm=pick(True, False), fast=pick(True, False))
    work = work_of(rng, rng.randint(1, 6))
    exit, fill, vocab = pick(sure, sure, sure, "", "static:1", "confidence:0"), pick("exact", "propagate"), pick(None, 25)
    said = {token for tokens, *_ in alone(model, work, exit, fill, None, vocab) for token in tokens}
    eot = pick(None, *sorted(said))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(serve.Engine, "MANY", pick(1, 4, 16))     # tokens of a slot with more have a call of their own
        assert_answers(alone(model, work, exit, fill, eot, vocab), model, work, exit=exit, fill=fill, eot=eot,
                       vocab_size=vocab, slots=rng.randint(1, 4))


@pytest.mark.parametrize("fill, sizes", [("exact", {}), ("propagate", dict(exit_loop=2, qk_norm=True))], ids=str)
def test_later_tokens_find_the_keys_of_those_that_left(fill, sizes):
    model = looping(**sizes)
    work = work_of(random.Random(2), 12, most=20)
    want = alone(model, work, RULE, fill)
    deeper = [b > a for _, exits, _ in want for a, b in zip(exits, exits[1:])]
    assert sum(deeper) > 5 and {loop for _, exits, _ in want for loop in exits} == {*range(1, model.loops_to_run + 1)}
    assert_answers(want, model, work, exit=RULE, fill=fill)


def test_a_model_without_a_limit_has_room():
    assert serve.Engine(looping(pos="none"), 1).max_len == 8 * looping().cfg.block_size


def test_sampled_answers_do_not_depend_on_the_batching():
    model = looping()
    options = dict(exit="confidence:0.1", sampling=(0.7, 9, 0.95))
    work = [([1, 2, 3], n) for n in (6, 3, 6, 4, 6)]
    first = answered(model, work, "depth", slots=1, **options)
    assert_answers(first, model, work, **options)
    said = [tokens for tokens, *_ in first]
    assert said[0] != said[2] != said[4], "the same prompt, other random numbers"
    assert said != [tokens for tokens, *_ in answered(model, work, "depth", seed=7, **options)]


@pytest.mark.parametrize("exit, exits", [("static:1", {1, 2, 3}), ("static:3", {3}), ("confidence:0.5", {3}),
                                         ("confidence:0.499", {1, 2, 3})])
def test_rules_name_a_loop_or_a_bound_that_must_be_exceeded(exit, exits):
    assert {loop for loop in (1, 2, 3) if serve.exit_rule(exit, 3)(loop, 0.5)} == exits


@pytest.mark.parametrize("batching", BATCHINGS)
def test_when_requests_are_admitted_and_what_shares_a_call(batching):
    """A request is admitted as soon as a slot is free. Rows are tokens, which may be in different loops when batching
    is by depth. A long prompt is one row."""
    model, idle, depths, sizes = looping(), [], [], set()
    requests = [serve.Request(prompt, n) for prompt, n in [*work_of(random.Random(0), 12), ([1] * 20, 3)]]
    engine = serve.Engine(model, 3, None, batching, exit=RULE)
    admit, run_loop = engine.admit, engine.adapter.run_loop

    def noted(queue):
        admit(queue)
        idle.append(bool(queue) and len(engine.busy()) < len(engine.slots))

    def noted_loop(x, context):
        depths.append(set(context.loop.tolist()))
        sizes.add(x.shape[:2])
        return run_loop(x, context)
    engine.admit, engine.adapter.run_loop = noted, noted_loop
    answers = list(engine.run(requests))
    assert set(answers) == set(requests) and len(answers) == 13, "each is answered once"
    assert any(len(depth) > 1 for depth in depths) == (batching == "depth") and set.union(*depths) == {1, 2, 3}
    assert {size for size in sizes if size[1] > 1} == {(1, 20)} and not any(idle)


def test_the_life_of_four_tokens():
    """The table in Engine's docstring says in each step which loop a slot runs, and how many loops its tokens have
    taken."""
    engine, seen = serve.Engine(looping(), 1, 20, exit="static:1"), []
    exits = iter([True, True, False, False, True])      # in steps 3 to 7
    engine.rule = lambda loop, p: next(exits)
    engine.admit(serve.deque([serve.Request([1, 2], 3)]))
    while engine.busy():
        [slot] = engine.slots
        tokens = " ".join(f"{token.pos}:{token.loops}" for token in slot.unfinished)
        seen.append((str(len(seen) + 1), str(slot.loops_taken() + 1), tokens))
        engine.step()
    assert seen == re.findall(r"^ +(\d) +(\d) +(\d:\d(?: \d:\d)*)", serve.Engine.__doc__, re.M) and len(seen) == 7


def test_a_slot_forgets():
    """It forgets all that it has in any loop, even NaN. Other slots keep theirs."""
    engine = serve.Engine(looping(module=model_mor, n_layer=5), 3, 6)
    for lanes in (engine.taken, *engine.kv):
        lanes[:] = True
    engine.slots[0].request = engine.slots[1].request = request = serve.Request([1], 1)
    engine.admit(serve.deque([request]))
    assert [len(lanes) for lanes in engine.kv] == [9, 3, 3], "the first and last layer have no loops"
    for lanes in (engine.taken, *engine.kv):
        assert [n for n, lane in enumerate(lanes) if not lane.any()] == [2, 5, 8][:len(lanes) // 3]


def test_cudnn_does_not_plan_for_each_shape():
    engine, seen = serve.Engine(looping(vocab_size=257), 2), []
    layers = engine.run_layers
    engine.run_layers = lambda *args, **more: seen.append(torch.backends.cuda.cudnn_sdp_enabled()) or layers(*args, **more)
    list(engine.run([serve.Request([1, 2], 3)]))
    assert seen and not any(seen) and torch.backends.cuda.cudnn_sdp_enabled()


BAD = {
    b"{": "not a JSON object", b'{"prompt": "a", "id": NaN}': "not a JSON object", b'{"prompt": "a", "id": 1e999}': "not a JSON object", b"[" * 100_000: "not a JSON object", b"[1]": "not a JSON object",
    b"{}": "the prompt is empty", b'{"prompt": "\\ud800"}': "is not valid Unicode text",
    b'{"prompt": "a", "max_new_tokens": true}': "max_new_tokens must be an int",
    b'{"prompt": "a", "max_new_tokens": 0}': "max_new_tokens=0 must be at least 1",
    b'{"prompt": "a", "max_new_tokens": 1%s}' % (b"0" * 400): "max_new_tokens must be an int",
    b'{"prompt": "a", "temperature": 1}': "unknown option 'temperature': the options are prompt, max_new",
    b'{"prompt": "%s"}' % (b"a" * 64): "64 tokens leave no room for an answer: block_size=64"}


@pytest.mark.parametrize("line", BAD, ids=lambda line: str(line[:40]))
def test_a_bad_line_is_named(line, tmp_path):
    """The error is one short line, and it comes before anything is computed."""
    file = tmp_path / "x.jsonl"
    file.write_bytes(b'\xef\xbb\xbf{"prompt": "ab"}\n\n%s\n{"prompt": "ab"}' % line)   # a byte order mark comes first
    with pytest.raises(UserError) as e:
        serve.read_requests(looping(vocab_size=257), ByteTokenizer(), serve.ServeConfig(requests=str(file)))
    assert f"{file}, line 3: " in str(e.value) and BAD[line] in str(e.value) and len(str(e.value)) < 500


@pytest.fixture(scope="module")
def world(tmp_path_factory, data_dir):
    """Return a folder with trained runs, relaxed with early exit and mor, and with files of requests."""
    root = tmp_path_factory.mktemp("engine")
    trainer = runs.run("relaxed", root / "relaxed", data_dir, "n_layer=4", "early_exit=aggressive", "block_size=32")
    move(trainer.model, 0.3)        # after so few steps all loops would guess the same
    train.save(trainer, "ckpt.pt")
    runs.run("mor", root / "mor", data_dir)
    (root / "good.jsonl").write_text("\n".join(GOOD))
    return root


GOOD = ['{"prompt": "ab"}', '{"prompt": "Cd e", "max_new_tokens": 25, "id": "x"}', "",
        '{"prompt": "f", "id": 7}', '{"prompt": "hij", "id": "x", "max_new_tokens": 25}\r',
        '{"prompt": "ab ab ab ab ab ab ab ab abc", "id": null}']      # this one fills its context of 32


@pytest.mark.parametrize("options", [[], ["fill=propagate"]], ids=str)
def test_requests_are_answered(options, world, capsys):
    """Each answer is a line of JSON. An id may come twice, and a request without one has its line's number."""
    folder, good = str(world / "relaxed" / "r"), str(world / "good.jsonl")
    model, tokenizer, _ = checkpoint.load_run(folder)
    requests = serve.read_requests(model.double(), tokenizer, serve.ServeConfig(requests=good, max_new_tokens=8))
    work = [(r.prompt, r.max_new_tokens) for r in requests]
    assert [n for _, n in work] == [8, 25, 8, 25, 5], "as many as the context holds"
    exact, propagate = (alone(model, work, TRAINED, fill, tokenizer.eot) for fill in ("exact", "propagate"))
    assert [answer[:2] for answer in exact] != [answer[:2] for answer in propagate]
    capsys.readouterr()
    serve.main([folder, f"requests={good}", "max_new_tokens=8", "temperature=0", "dtype=float32", f"exit={TRAINED}",
                *options])
    out, err = capsys.readouterr()
    answers = [json.loads(line) for line in out.splitlines()]
    assert sorted((str(a["id"]), a["text"], a["tokens"], a["exits"]) for a in answers) == sorted(
        (str(r.id), tokenizer.decode(tokens), tokens, exits)
        for r, (tokens, exits, _) in zip(requests, propagate if "fill=propagate" in options else exact))
    assert [r.id for r in requests] == [1, "x", 7, "x", None] and all(a["seconds"] > 0 for a in answers)
    summary = r"5 requests, \d+ tokens in [\d.]+ s: [\d.]+ tokens/s; exited after loop 1: \d+%, 2: \d+%"
    assert re.search(summary, err)


def test_options_reach_the_engine(world, monkeypatch):
    given = []

    class Recorder(serve.Engine):
        def __init__(self, model, *how):
            given.append([model.cfg.fast, *how])
            super().__init__(model, *how)

        def run(self, requests):
            given.append([(r.sampling, r.generator.initial_seed()) for r in requests])
            return super().run(requests)
    monkeypatch.setattr(serve, "Engine", Recorder)
    folder, ask = str(world / "relaxed" / "r"), ["prompt=ab", "max_new_tokens=2"]
    serve.main([folder, *ask, "temperature=0.5", "top_k=3", "top_p=0.25", "seed=4", "fast=false", "batching=sequence", "stop=false"])
    serve.main([folder, *ask, "fill=propagate", f"exit={TRAINED}"])
    (first, [(sampling, seed)], second, [(_, other)]) = given
    assert first == [False, 1, 4, "sequence", "", "exact", None, 257] and sampling == (0.5, 3, 0.25) and seed != other
    assert second == [True, 1, 4, "depth", TRAINED, "propagate", 256, 257]


@pytest.mark.parametrize("run, exit", [("relaxed", TRAINED), ("mor", "")])
def test_a_prompt_is_continued_in_the_colours_of_the_loops(run, exit, world, capsys):
    """Blue is the first of two loops, and magenta is the last. The text is that of requests=."""
    (world / "one.jsonl").write_text('{"prompt": "\u00e9\u20ac"}\n' * 2)
    argv = [str(world / run / "r"), "max_new_tokens=30", "dtype=float32", f"exit={exit}"]
    serve.main([*argv, f"requests={world}/one.jsonl"])
    answers = map(json.loads, capsys.readouterr().out.splitlines()[-2:])
    (_, text), (_, other) = sorted((answer["id"], answer["text"]) for answer in answers)
    serve.main([*argv, "prompt=\u00e9\u20ac"])
    out, err = capsys.readouterr()
    assert re.sub(r"\033\[\d+m", "", out) == f"\u00e9\u20ac{text}\n" and text != other
    assert set(re.findall(r"\033\[(\d+)m", out)) == {"0", "34", "32"} and "exited after loop 1: " in err


@pytest.mark.parametrize("run", ["relaxed", "mor"])
def test_an_engine_in_bfloat16(run, world, capsys, monkeypatch):
    engines, make = [], serve.Engine
    monkeypatch.setattr(serve, "Engine", lambda *args: engines.append(make(*args)) or engines[-1])
    serve.main([str(world / run / "r"), "prompt=ab", "max_new_tokens=8", "stop=false", "dtype=bfloat16"])
    assert "1 request, 8 tokens" in capsys.readouterr().err
    engine, = engines
    assert {x.dtype for x in [*engine.kv, *engine.model.parameters()]} == {torch.bfloat16}


@pytest.mark.parametrize("model, options, message", [
    (lambda: looping(module=model_mor, share="sequence"), {}, "share=sequence is not served"),
    (lambda: looping(module=model_mor, n_layer=5), dict(fill="propagate"), "this model is a mor"),
    (lambda: looping(module=model_mor, n_layer=5, kv="share"), {}, "kv=share is not served"),
    *((looping, dict(exit=exit), "static:1 to static:3, confidence:P")
      for exit in ("early", "static:0", "static:4", "static:1.5", "confidence:nan", "confidence:2")),
    (lambda: model_gpt.Model(model_gpt.Config()), {}, "only model_relaxed and model_mor are served, and not a model_gpt")])
def test_what_an_engine_refuses(model, options, message):
    with pytest.raises(UserError, match=message):
        serve.Engine(model(), 1, **options)


def test_broken_weights_are_no_answer():
    """The likeliest tokens are no answer either, although nothing is sampled."""
    model = looping()
    model.norm.weight.data[0] = math.nan
    with pytest.raises(UserError, match="not finite"):
        list(serve.Engine(model, 1, 8).run([serve.Request([1], 2)]))


ROUTERS = {"expert": dict(), "aux_router": dict(causal="aux_router"), "token": dict(router="token"),
           "token, cycle": dict(router="token", share="cycle", n_layer=6), "none": dict(router="none"),
           "capped": dict(exit_loop=2), "token, capped": dict(router="token", exit_loop=2)}


@torch.no_grad()
def routed_alone(model, prompt, n):
    """Return (tokens, recursions that each was predicted after, logits). There is no cache, and each token has a
    forward of the whole text."""
    text, out = list(prompt), []
    for _ in range(n):
        idx = torch.tensor([text])
        logits = model(idx)[0][0, -1]
        out.append((int(logits.argmax()), int(model.states(idx, top_k=False)[1][0, -1]), logits))
        text.append(out[-1][0])
    return tuple(map(list, zip(*out)))


@pytest.mark.parametrize("name", ROUTERS)
def test_routed_answers_are_those_of_a_text_alone(name, monkeypatch):
    model = looping(module=model_mor, scale=0.2, **{"n_layer": 5, "n_kv_head": 1, **ROUTERS[name]})
    work = work_of(random.Random(2))
    want = [routed_alone(model, prompt, n) for prompt, n in work]
    for many in 3, 16:
        monkeypatch.setattr(serve.Engine, "MANY", many)
        assert_answers(want, model, work)
    loops = {"none": {3}, "capped": {1, 2}, "token, capped": {1, 2}}.get(name, {1, 2, 3})
    assert {loop for _, exits, _ in want for loop in exits} == loops

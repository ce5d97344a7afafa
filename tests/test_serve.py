"""serve.py: every request is answered as if alone, scheduling, early exit, and the command line."""
import json
import re

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import model_mor
import model_relaxed
import checkpoint
import config
from tokenizer import ByteTokenizer
import runs
import sample
import serve
import train
from conftest import relative
from model_gpt import attention_bias, attention_naive
from test_relaxed import ByHand, refusal
from test_sample import call

BATCHINGS = ("static", "sequence", "depth")
RULE = "confidence:0.12"    # with it the tokens of looping() exit after all three loops
batchings = pytest.mark.parametrize("batching", BATCHINGS)
fills = pytest.mark.parametrize("fill", ["exact", "propagate"])


def noise(name, p, generator=None):
    """N(0, 1) in the shape of a parameter; that of a B is drawn as B stands in the equations, (n_loop, out, r)."""
    x = torch.randn((p.mT if name.endswith(".b") else p).shape, dtype=p.dtype, generator=generator)
    return x.mT if name.endswith(".b") else x


def looping(seed=0, **sizes):
    """A small float64 model with every parameter moved by N(0, 0.15): its loops disagree."""
    torch.manual_seed(seed)
    small = dict(block_size=64, vocab_size=31, n_layer=6, n_loop=3, n_head=2, n_embd=16, rank=2)
    model = model_relaxed.Model(model_relaxed.Config(**{**small, **sizes})).double().eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.add_(0.15 * noise(name, p))
    return model


class Clock:
    """Time is the number of calls of model.loop, which it notes as (tokens a row, rows, depth), and what was slept."""

    def __init__(self, model):
        self.now, self.calls, loop = 0.0, [], type(model).loop

        def noted(h, depth, context):
            self.now += 1
            self.calls.append((int(context.n.max()), len(context.n), torch.from_numpy(context.level - 1)))
            return loop(model, h, depth, context)
        model.loop = noted

    def __call__(self):
        return self.now

    def sleep(self, seconds):
        assert seconds > 0
        self.now += seconds

    def decoding(self):
        """The depths of the calls that took one token a row."""
        return [depth for tokens, _, depth in self.calls if tokens == 1]


def engine_of(model, batching, slots=3, max_len=40, **options):
    """An Engine and its clock."""
    clock = Clock(model)
    return serve.Engine(model, slots, max_len, batching, clock=clock, sleep=clock.sleep, **options), clock


def answered(model, work, batching, **options):
    """[(tokens, exits, logits)] of work, a list of (prompt, max_new_tokens, arrival); logits (V,) chose each token, and
    end-of-text too."""
    requests = [serve.Request(list(prompt), n, arrival) for prompt, n, arrival in work]
    (engine, _), by = engine_of(model, batching, **options), {id(r): [] for r in requests}
    pick = engine.pick

    def noted(slots, logits):
        for slot, chosen_by in zip(slots, logits):
            by[id(slot.request)].append(chosen_by.clone())
        return pick(slots, logits)
    engine.pick = noted
    done = list(engine.run(requests))
    assert sorted(map(id, done)) == sorted(by), "each is answered once"
    return [(r.tokens, r.exits, by[id(r)]) for r in requests]


def assert_same(got, want):
    """The same tokens and exits, and the same logits to 1e-9: a wrong key may change no token."""
    assert [answer[:2] for answer in got] == [answer[:2] for answer in want]
    for (*_, ours), (*_, theirs) in zip(got, want):
        assert relative(torch.stack(ours), torch.stack(theirs)) < 1e-9


def work_of(model, n=5, seed=0, most=10):
    """n requests at time 0: prompts of 1 to 9 tokens, 2 to `most` new ones."""
    draw = lambda low, high, size=(): torch.randint(low, high, size, generator=generator).tolist()
    generator = torch.Generator().manual_seed(seed)
    return [(draw(0, model.cfg.vocab_size, (draw(1, 10),)), draw(2, most + 1), 0.0) for _ in range(n)]


# -------------------------------------------------------------------------------------------------
# one request at a time, without the engine

def fires(exit, loop, logits):
    """Whether a token leaves after loop `loop`, from 1, with these logits (V,)."""
    kind, _, bound = exit.partition(":")
    if kind == "static":
        return loop >= int(bound)
    p = (logits - logits.max()).exp()
    first, second = (p / p.sum()).sort(descending=True).values[:2].tolist()
    return {"": False, "confidence": first > float(bound or 0), "margin": first - second > float(bound or 0)}[kind]


def one(model, prompt, n, exit, max_len, vocab=None):
    """[(token, exit, logits)]: no cache, the loops over the whole text for each token. With fill=propagate a token that
    left keeps the state that it left with, from which the deeper layers' keys and values are projected."""
    hand, cfg, text, out = ByHand(model), model.cfg, list(prompt), []
    K = cfg.n_layer // cfg.n_loop           # layers of a loop
    loops = [cfg.n_loop] * len(prompt)      # that each token goes through; a prefill takes all
    while len(out) < n:
        if len(text) > max_len:
            text, loops = text[-max_len:], [cfg.n_loop] * max_len
        h, at = hand.w["wte.weight"][text], torch.arange(len(text))
        for layer in range(cfg.n_layer):
            loop, inside = divmod(layer + 1, K)
            on = torch.tensor(loops)[:, None] > layer // K
            h = torch.where(on, hand.layer(h, layer, at, *hand.keys_values(h, layer, at)), h)
            logits = hand.logits(h[-1])[:vocab]
            if not inside and fires(exit, loop, logits):
                break
        out.append((int(logits.argmax()), loop, logits))
        text.append(out[-1][0])
        loops = loops[:-1] + [loop, cfg.n_loop] if cfg.fill == "propagate" and out[1:] else loops + [cfg.n_loop]
    return out


@torch.no_grad()
def alone(model, work, exit="", max_len=40, eot=None, vocab=None):
    """What serve should return."""
    answers = []
    for prompt, n, _ in work:
        tokens, exits, logits = map(list, zip(*one(model, prompt, n, exit, max_len, vocab)))
        end = tokens.index(eot) if eot in tokens else n
        answers.append((tokens[:end], exits[:end], logits[:end + 1]))
    return answers


EXITS = st.one_of(st.sampled_from(["", "static:1", "confidence:0", "confidence:1", "margin:0", "margin:1"]),
                  st.floats(0.05, 0.3).map("confidence:{:.4f}".format),
                  st.floats(0.005, 0.2).map("margin:{:.4f}".format))
REQUESTS = st.tuples(st.lists(st.integers(0, 30), min_size=1, max_size=9), st.integers(1, 10),
                     st.sampled_from([0.0, 0.0, 0.0, 1.0, 4.5, 7.0, 60.0]))


@given(data=st.data())
def test_random_requests_are_answered_as_if_alone(data):
    """Any model, rule, lengths and arrivals; rows that overflow; an end of text that comes."""
    draw, pick = data.draw, lambda *values: data.draw(st.sampled_from(values))
    loops = draw(st.integers(1, 3))
    model = looping(draw(st.integers(0, 10 ** 6)), n_loop=loops, n_layer=loops * pick(1, 2),
                    rank=pick(0, 2), fill=pick("exact", "propagate"), n_kv_head=pick(1, 2),
                    pos=pick("rope", "rope", "none"), qk_norm=pick(True, False),
                    fast=pick(True, False))
    work, exit = draw(st.lists(REQUESTS, min_size=1, max_size=6)), draw(EXITS)
    options = dict(max_len=pick(40, 40, 12, 5), vocab=pick(None, 25))
    want = alone(model, work, exit, **options)
    options["eot"] = pick(None, *sorted({token for tokens, *_ in want for token in tokens}))
    want, vocab = alone(model, work, exit, **options), options.pop("vocab")
    for batching in BATCHINGS:
        slots = draw(st.integers(1, 4))
        got = answered(model, work, batching, exit=exit, slots=slots, vocab_size=vocab, **options)
        assert_same(got, want)


@fills
@pytest.mark.parametrize("max_len", [40, 8])
def test_later_tokens_find_the_keys_of_those_that_left(fill, max_len):
    """Exact and propagated ones differ, and each token is predicted from the right ones. Of a text longer than the
    cache they are those of the last max_len tokens, prefilled by all loops."""
    model = looping(fill=fill, block_size=max_len)
    work = work_of(model, 12, most=20)
    want = alone(model, work, RULE, max_len)
    deeper = [b > a for _, exits, _ in want for a, b in zip(exits, exits[1:])]
    assert sum(deeper) > 5 and {loop for _, exits, _ in want for loop in exits} == {1, 2, 3}
    for batching in BATCHINGS:
        assert_same(answered(model, work, batching, max_len=max_len, exit=RULE), want)
    model.cfg.fill = "propagate" if fill == "exact" else "exact"
    other = answered(model, work, "depth", max_len=max_len, exit=RULE)
    assert any(not torch.allclose(a[-1][-1], b[-1][-1]) for a, b in zip(want, other))


def test_loops_over_other_blocks_are_served_too():
    model = looping(share="sequence")
    with pytest.raises(config.UserError, match="share=cycle, not sequence"):
        answered(model, [], "depth")
    work = work_of(model)
    want = alone(model, work, "margin:0.03")
    for batching in ("static", "sequence"):
        assert_same(answered(model, work, batching, exit="margin:0.03"), want)


SAMPLING = [dict(temperature=1.0), dict(temperature=0.7, top_k=9, top_p=0.95), dict(repetition_penalty=1.8)]


@fills
@pytest.mark.parametrize("sampling", SAMPLING, ids=str)
def test_sampled_answers_do_not_depend_on_the_batching(sampling, fill):
    """Each request has random numbers of its own, by its place in the queue."""
    model = looping(fill=fill)
    work = [([1, 2, 3], n, arrival) for n, arrival in ((6, 0), (3, 0), (6, 0), (4, 2), (6, 60))]
    options = dict(exit="confidence:0.1", **sampling)
    answers = [answered(model, work, batching, slots=slots, **options)
               for batching, slots in (("depth", 1), *((batching, 3) for batching in BATCHINGS))]
    for answer in answers[1:]:
        assert_same(answer, answers[0])
    said = lambda answers: [tokens for tokens, *_ in answers]
    first, greedy = said(answers[0]), said(answered(model, work, "depth", exit="confidence:0.1"))
    assert first != greedy
    if "temperature" in sampling:
        assert first[0] != first[2] != first[4], "the same prompt, other random numbers"
        assert first != said(answered(model, work, "depth", seed=7, **options))


# -------------------------------------------------------------------------------------------------
# rules

@pytest.mark.parametrize("exit, loop", [
    ("static:1", 1), ("static:2", 2), ("static:3", 3), ("confidence:0", 1), ("confidence:1", 3),
    ("margin:0", 1), ("margin:1", 3), ("", 3)])
def test_rules_that_name_one_loop(exit, loop):
    model = looping()
    work = work_of(model, 4, most=6)
    got = answered(model, work, "depth", exit=exit)
    assert_same(got, alone(model, work, f"static:{loop}"))
    assert {b for _, exits, _ in got for b in exits} == {loop}


@pytest.mark.parametrize("exit, logits, exits", [
    ("confidence:0.5", [0.0, 0.0], False), ("confidence:0.5", [1e-6, 0.0], True),
    ("confidence:1", [0.0, -1e9], False), ("margin:0", [2.0, 2.0], False),
    ("margin:0", [2.0, 2.0 + 1e-6], True), ("margin:1", [0.0, -1e9], False),
    ("margin:0.4", [0.0, 1.0, 1.0], False), ("confidence:0.4", [0.0, 1.0, 1.0], True)])
def test_a_bound_must_be_exceeded(exit, logits, exits):
    rule = serve.exit_rule(exit, 2)
    rows = torch.tensor([logits, [1e9] + [0.0] * (len(logits) - 1)], dtype=torch.float64)
    sure = not exit.endswith(":1")
    assert rule(rows, torch.tensor([0, 0])).tolist() == [exits, sure]


def test_the_oracle_counts_and_changes_nothing():
    """No token differs from those without early exit; it exits after the first loop that would
    have chosen it."""
    model = looping(3)
    work, hand = work_of(model), ByHand(model)
    plain = [tokens for tokens, *_ in alone(model, work)]
    for batching in BATCHINGS:
        got = answered(model, work, batching, exit="oracle")
        assert [tokens for tokens, *_ in got] == plain
        for (prompt, *_), (tokens, exits, _) in zip(work, got):
            guesses = [logits.argmax(-1) for logits in hand.loops([*prompt, *tokens])]
            rows = torch.stack(guesses)[:, len(prompt) - 1:-1].T.tolist()
            assert exits == [row.index(row[-1]) + 1 for row in rows]
    assert len({b for _, exits, _ in got for b in exits}) > 1


@pytest.mark.parametrize("exit", [
    "early", "static", "static:0", "static:4", "static:1.5", "confidence", "confidence:x",
    "confidence:2", "confidence:-0.1", "confidence:nan", "margin:inf", "oracle:1", "margin:0:0"])
def test_a_rule_that_is_none_is_refused(exit):
    with pytest.raises(config.UserError, match="static:LOOP, confidence:P, margin:P, oracle are allowed, LOOP from 1"):
        serve.exit_rule(exit, 3)


# -------------------------------------------------------------------------------------------------
# scheduling

@batchings
@pytest.mark.parametrize("exit", ["margin:0.03", RULE])
def test_when_requests_are_admitted_and_which_depths_share_a_call(exit, batching):
    """static: when the batch before has ended. sequence, depth: as soon as a row is free. Rows at different loops stand
    in one call of depth batching, and of no other."""
    model, joined, idle = looping(), [], []
    work = [(prompt, n, float(arrival)) for (prompt, n, _), arrival in
            zip(work_of(model, 12), (0, 0, 0, 0, 0, 3, 3, 9, 20, 20, 21, 200))]
    engine, clock = engine_of(model, batching, exit=exit)
    admit = engine.admit

    def noted(queue, now):
        before, waiting = len(engine.busy()), len(queue)
        admit(queue, now)
        joined.append(before and len(queue) < waiting)
        idle.append(bool(queue) and queue[0].arrival <= now and len(engine.busy()) < len(engine.slots))
    engine.admit = noted
    assert len(list(engine.run([serve.Request(*r) for r in work]))) == 12
    assert (any(joined), any(idle)) == ((False, True) if batching == "static" else (True, False))
    depths = [set(depth.tolist()) for depth in clock.decoding()]
    assert any(len(depth) > 1 for depth in depths) == (batching == "depth") and set.union(*depths) == {0, 1, 2}


def test_latency_is_from_arrival_to_the_last_token():
    """In calls of model.loop: three for a prompt and its token, three for each further one."""
    model = looping()
    first, second, late = (serve.Request([1, 2], n, arrival) for n, arrival in ((3, 0.0), (2, 4.0), (2, 100.5)))
    list(engine_of(model, "sequence", slots=1)[0].run([first, late, second]))
    assert (first.latency, second.latency, late.latency) == (9, 9 - 4 + 6, 6)


# -------------------------------------------------------------------------------------------------
# memory

def test_the_cache_grows_and_forgets():
    """Room for what a level holds, doubled, at most max_len; what was written stays, but for a reset slot, even NaN."""
    cache = serve.SlotCache(3, 4, 200, 2, 4, torch.device("cpu"), torch.float64)
    cache.buffer(1, 0, 5)[:] = torch.nan
    cache.buffer(2, 1, 1)[1, :, :, :3] = 7.0
    assert [kv.size(3) for kv in cache.kv.values()] == [32, 32]
    for need, room in ((33, 64), (100, 128), (129, 200)):
        assert cache.buffer(1, 0, need).size(3) == room and cache.buffer(1, 0, need)[2, :, :, :32].isnan().all()
    cache.count[1] = 5
    cache.reset(2)
    assert (cache.kv[1, 0][2] == 0).all() and cache.kv[1, 0][0, :, :, :32].isnan().all()
    assert cache.count.tolist() == [[0, 0, 0], [5, 5, 0], [0, 0, 0], [0, 0, 0]]
    cache.copy(1, [0, 2], 2, [3])
    assert (cache.kv[3, 1][1, :, :, [0, 2]] == 7).all() and (cache.kv[3, 1][1, :, :, 1] == 0).all()


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("R", [2, 5])
def test_packed_tokens_attend_to_their_own_sequences(R, fast):
    """R rows of six slots, read in place or gathered, with one token and with three, each by itself."""
    cache = serve.SlotCache(6, 3, 20, 2, 4, torch.device("cpu"), torch.float64)
    slot, level, n = np.array([4, 1, 3, 0, 2][:R]), np.array([1, 2, 1, 1, 2][:R]), np.array([1, 1, 3, 1, 1][:R])
    kept = {}
    for step in range(4):
        N = int(n.sum())
        q, k, v = (torch.randn(1, heads, N, 4, dtype=torch.float64) for heads in (4, 2, 2))
        batch = serve.RaggedBatch(cache, level, slot, n, np.zeros(N, np.int64), None, fast)
        got, at = batch.attend(0, q, k, v), 0
        for row in range(R):
            own = slice(at, at + n[row])
            old = kept.get(row, (k[:, :, :0], v[:, :, :0]))
            kept[row] = [torch.cat([a, b[:, :, own]], 2) for a, b in zip(old, (k, v))]
            bias = attention_bias(torch.arange(old[0].size(2), kept[row][0].size(2))[None],
                                  torch.arange(kept[row][0].size(2)), dtype=torch.float64)
            assert relative(got[:, :, own], attention_naive(q[:, :, own], *kept[row], bias)) < 1e-12
            at += n[row]


# -------------------------------------------------------------------------------------------------
# requests and command lines

def test_requests_too_long_for_endless_positions(tmp_path):
    """Where no context ends, one long request would make every row as long: it is refused, by name."""
    model, tokenizer = looping(vocab_size=257, pos="none", block_size=8), ByteTokenizer()
    (tmp_path / "x.jsonl").write_text('{"prompt": "ab", "max_new_tokens": 62}\n{"prompt": "ab", "max_new_tokens": 63}')
    requests, errors = serve.read_requests(tmp_path / "x.jsonl", tokenizer, model, 5)
    assert [r.max_new_tokens for r in requests] == [62]
    (error,) = errors
    assert error["line"] == 2 and "63 after a prompt of 2 is more than 64, 8 times block_size" in error["error"]


@batchings
@pytest.mark.parametrize("loop, fill", [(1, "exact"), (2, "propagate")])
def test_a_model_that_ends_at_a_loop_is_served_so(loop, fill, batching):
    """No token goes deeper, those of a prompt neither, and none is told to exit early."""
    model = looping(exit_loop=loop, fill=fill)
    work = work_of(model)
    want = answered(looping(), work, batching, exit=f"static:{loop}")
    assert_same(answered(model, work, batching), want)
    engine, clock = engine_of(model, batching)
    list(engine.run([serve.Request(*r) for r in work]))
    assert max(int(depth.max()) for *_, depth in clock.calls) == loop - 1
    assert not any(slot.deferred for slot in engine.slots), "no state waits"


@pytest.fixture(scope="module")
def world(tmp_path_factory, data_dir):
    """Folders of trained runs: relaxed with early exit, one that shares in sequence, gpt."""
    root = tmp_path_factory.mktemp("engine")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "draw_curves", lambda *a: None)
        trainer = runs.run("relaxed", root / "relaxed", data_dir, "n_layer=4", "early_exit=aggressive", "block_size=32")
        with torch.no_grad():       # so few steps teach all loops to guess the same
            for name, p in trainer.model.named_parameters():
                p.add_(0.3 * noise(name, p, torch.Generator().manual_seed(p.numel())))
        trainer.save("ckpt.pt")
        runs.run("relaxed", root / "other", data_dir, "n_layer=4", "share=sequence")
        runs.run("gpt", root / "gpt", data_dir)
        runs.run("mor", root / "mor", data_dir)
    (root / "good.jsonl").write_text("\n".join(GOOD))
    (root / "empty.jsonl").write_text("\n \n")
    return root


TRAINED = "confidence:0.06"        # after which some tokens of the trained model leave early
GOOD = ['{"prompt": "ab"}', '{"prompt": "Cd e", "max_new_tokens": 5, "id": "x"}', "",
        '{"prompt": "f", "arrival": 0.01, "id": 7}', '{"prompt": "hij", "id": "x", "max_new_tokens": 12}\r',
        '{"prompt": "ab ab ab ab ab ab ab ab ab ab ab ab ab", "id": null}']


def strict(line):
    """The JSON value of a line; NaN and Infinity are none."""
    def refuse(name):
        raise ValueError(name)
    return json.loads(line, parse_constant=refuse)


def served(capsys, folder, file, *options):
    """What serve.py writes for the requests in a file: answers, errors, stderr."""
    capsys.readouterr()
    serve.main([str(folder), f"requests={file}", "max_new_tokens=8", *options])
    out, err = capsys.readouterr()
    lines = [strict(line) for line in out.splitlines()]
    return [x for x in lines if "error" not in x], [x for x in lines if "error" in x], err


def texts(answers):
    return sorted((str(a["id"]), a["text"], a["tokens"], a["exits"]) for a in answers)


@pytest.fixture(scope="module")
def good_answers(world):
    """What GOOD gets, without the engine."""
    model, tokenizer, _ = checkpoint.load_run(world / "relaxed" / "r")
    model.double()
    requests, errors = serve.read_requests(world / "good.jsonl", tokenizer, model, 8)
    answers = alone(model, [(r.prompt, r.max_new_tokens, 0) for r in requests], TRAINED, 32, tokenizer.eot)
    assert len(requests) == 5 and not errors and {loop for _, exits, _ in answers for loop in exits} == {1, 2}
    return sorted((str(r.id), tokenizer.decode(tokens), tokens, exits)
                  for r, (tokens, exits, _) in zip(requests, answers))


@pytest.mark.parametrize("options", [[f"batching={b}"] for b in BATCHINGS] + [["slots=1"], ["fast=false", "slots=2"]],
                         ids=str)
def test_requests_are_answered(options, world, good_answers, capsys):
    """A line of valid JSON each; an id may come twice, and without one it is the line's number."""
    answers, errors, err = served(capsys, world / "relaxed" / "r", world / "good.jsonl", "temperature=0",
                                  f"exit={TRAINED}", *options)
    assert texts(answers) == good_answers and errors == []
    assert all(a.keys() == {"id", "text", "tokens", "exits", "latency"} and a["latency"] >= 0 for a in answers)
    assert sorted(str(a["id"]) for a in answers) == ["1", "7", "None", "x", "x"]
    summary = r"5 requests, 0 errors, 41 tokens in [\d.]+ s: [\d.]+ tokens/s;.* exited after loop 1: \d+%, 2: \d+%"
    assert re.search(summary, err)


BAD = {
    b"{": "not a line of JSON", b"[" * 100_000: "not a line of JSON", b'{"prompt": "a"} {}': "not a line of JSON",
    b'{"prompt": "caf\xe9"}': "not a line of JSON in UTF-8", b'{"prompt": "\\ud800"}': "is not valid Unicode text",
    b"[1, 2]": "a request is a JSON object", b"null": "a request is a JSON object", b"{}": "the prompt is empty",
    b'{"prompt": null}': "prompt has a wrong type: None",
    b'{"prompt": "a", "max_new_tokens": true}': "max_new_tokens has a wrong type: True",
    b'{"prompt": "a", "max_new_tokens": 2.0}': "max_new_tokens has a wrong type: 2.0",
    b'{"prompt": "a", "max_new_tokens": 0}': "max_new_tokens=0 must be at least 1",
    b'{"prompt": "a", "max_new_tokens": 1%s}' % (b"0" * 30): "and at most 1048576",
    b'{"prompt": "a", "max_new_tokens": 1%s}' % (b"0" * 5000): "not a line of JSON",
    b'{"prompt": "a", "arrival": "soon"}': "arrival has a wrong type: 'soon'",
    b'{"prompt": "a", "arrival": NaN}': "arrival=nan must be seconds", b'{"prompt": "a", "arrival": -1}': "arrival=-1",
    b'{"prompt": "a", "arrival": 1%s}' % (b"0" * 400): "arrival",
    b'{"prompt": "a", "id": [NaN]}': "id has a wrong type: [nan]",
    b'{"prompt": "a", "id": 1e999}': "id has a wrong type",
    b'{"prompt": "a", "temperature": 1}': "unknown key 'temperature': the keys are prompt, max_new"}


@pytest.mark.parametrize("line", BAD, ids=lambda line: ascii(line[:60].decode(errors="replace")))
def test_a_bad_line_is_one_error(line, tmp_path):
    model, tokenizer = looping(vocab_size=257), ByteTokenizer()
    (tmp_path / "x.jsonl").write_bytes(b'{"prompt": "a"}\n' + line + b'\n{"prompt": "b", "id": "after"}')
    requests, errors = serve.read_requests(tmp_path / "x.jsonl", tokenizer, model, 5)
    assert [r.id for r in requests] == [1, "after"] and len(errors) == 1
    written = json.dumps(errors[0])
    assert strict(written)["line"] == 2 and BAD[line] in errors[0]["error"] and len(written) < 20_000


def test_fill_is_that_of_the_command_line(world, tmp_path, capsys):
    """And without it the model's own. What each answers is not the same."""
    (tmp_path / "x.jsonl").write_text("\n".join(json.dumps({"prompt": c, "max_new_tokens": 25}) for c in "abcdefgh"))
    options = "temperature=0", "repetition_penalty=1.3", f"exit={TRAINED}"
    answers = [texts(served(capsys, world / "relaxed" / "r", tmp_path / "x.jsonl", *options, *fill)[0])
               for fill in ([], ["fill=exact"], ["fill=propagate"])]
    assert answers[0] == answers[1] != answers[2]


def plain(text):
    return re.sub(r"\033\[\d+m", "", text)


@pytest.mark.parametrize("options", [
    [], ["num_samples=3"], ["prompt=LINES:{w}/lines.txt"], ["exit="], ["prompt=é€"]], ids=str)
def test_show_depth_colours_what_is_written_without_it(options, world, capsys):
    """In the colours of the loops, blue for the first and magenta for the last of two."""
    (world / "lines.txt").write_text("ab\n\nCde fgh\nx\n")
    shown = dict(option.split("=") for option in ["max_new_tokens=30", "prompt=ab", f"exit={TRAINED}", *options])
    argv = [str(world / "relaxed" / "r"), *(f"{k}={v.format(w=world)}" for k, v in shown.items())]
    out, err = call(capsys, *argv, "show_depth=true")
    assert "exited after loop 1: " in err and "\033[31m2\033[0m" in err
    assert set(re.findall(r"\033\[(\d+)m", out)) == {"0", "31", *(["34"] if shown["exit"] else [])}
    if shown["exit"]:
        want, its = call(capsys, *argv)
        assert plain(out) == want and "\033" not in want and "\033" not in its
        assert out.count("-" * 80) == {"num_samples=3": 3, "prompt=LINES:{w}/lines.txt": 3}.get("".join(options), 0)


WRONG_RULE = "static:LOOP, confidence:P, margin:P, oracle are allowed"
SERVE = [
    ("relaxed", ["exit=margin:2"], f"exit=margin:2: {WRONG_RULE}"),
    ("relaxed", ["batching=random"], "batching=random must be one of: static, sequence, depth"),
    ("relaxed", ["slots=0"], "slots=0 must be at least 1"), ("relaxed", ["slots=5000"], "slots=5000"),
    ("relaxed", ["requests={w}/missing.jsonl"], "missing.jsonl cannot be read: No such file"),
    ("relaxed", ["requests={w}/empty.jsonl"], "empty.jsonl is empty"), ("relaxed", ["requests={w}"], "Is a directory"),
    ("relaxed", ["requests="], "give requests=FILE.jsonl"), ("relaxed", ["request=a"], "did you mean requests?"),
    ("gpt", [], "good.jsonl is for a model that loops over depth"), ("mor", ["exit=oracle"], "the router decides"),
    ("other", ["batching=depth"], "batching=depth needs loops over the same blocks")]
SAMPLE = [
    ("relaxed", ["exit=static:3"], f"exit=static:3: {WRONG_RULE}"), ("relaxed", ["exit=sometimes"], "exit=sometimes: "),
    ("relaxed", ["fill=later"], "fill=later must be one of: exact, propagate"),
    ("relaxed", ["show_depth=red"], "show_depth: expected bool"),
    ("gpt", ["exit=static:1"], "exit=static:1 is for a model that loops over depth (relaxed, mor)"),
    ("gpt", ["fill=exact"], "fill=exact is for a model that loops"),
    ("gpt", ["show_depth=true"], "show_depth=True is for a model that loops"),
    ("mor", ["fill=propagate"], "the router decides")]


@pytest.mark.parametrize("program, run, options, message", [(serve, *case) for case in SERVE] +
                         [(sample, *case) for case in SAMPLE], ids=str)
def test_one_line_and_exit_2(program, run, options, message, world, monkeypatch, capfd):
    given = [f"requests={world}/good.jsonl"] if program is serve and "request" not in "".join(options) else []
    argv = [world / run / "r", *given, *(o.format(w=world) for o in options)]
    assert message in refusal(program.main, argv, monkeypatch, capfd)


# -------------------------------------------------------------------------------------------------
# mor: a router decides

ROUTERS = {"expert": dict(), "aux_router": dict(causal="aux_router", kv="share_update"), "token": dict(router="token"),
           "token, share": dict(router="token", kv="share", share="cycle", n_layer=6), "none": dict(router="none"),
           "expert, share": dict(kv="share"), "capped": dict(exit_loop=2)}


def routing(seed=0, **sizes):
    """A small model whose tokens take one, two and three recursions."""
    torch.manual_seed(seed)
    small = dict(block_size=64, vocab_size=31, n_layer=5, n_loop=3, n_head=2, n_kv_head=1, n_embd=16)
    model = model_mor.Model(model_mor.Config(**{**small, **sizes})).double().eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.2 * torch.randn(p.shape, dtype=p.dtype))
    return model


@torch.no_grad()
def routed_alone(model, prompt, n, max_len):
    """(tokens, recursions that each was predicted after, logits): no cache, a forward of the whole text for each."""
    text, out = list(prompt), []
    for _ in range(n):
        idx = torch.tensor([text[-max_len:]])
        logits = model(idx)[0][0, -1]
        out.append((int(logits.argmax()), int(model.recursions(idx)[0, -1]), logits))
        text.append(out[-1][0])
    return tuple(map(list, zip(*out)))


@pytest.mark.parametrize("name", ROUTERS)
def test_routed_answers_are_those_of_a_text_alone(name):
    """Texts longer than the cache too."""
    model, arrivals = routing(**ROUTERS[name]), (0, 0, 2, 2, 30)
    work = [(prompt, n, at) for (prompt, n, _), at in zip(work_of(model), arrivals)]
    for max_len in (8, 40):
        want = [routed_alone(model, prompt, n, max_len) for prompt, n, _ in work]
        for batching in BATCHINGS:
            assert_same(answered(model, work, batching, max_len=max_len), want)
    loops = {"none": {3}, "capped": {1, 2}}.get(name, {1, 2, 3})
    assert {loop for _, exits, _ in want for loop in exits} == loops


def test_deeper_levels_hold_the_keys_of_those_that_took_them():
    """So a level that few tokens reach needs less room."""
    model = routing(n_embd=8, n_head=1)
    engine, _ = engine_of(model, "depth", slots=2, max_len=60)
    requests = [serve.Request([5, 6], 50) for _ in range(2)]
    list(engine.run(requests))
    taken = [loop for loop in requests[0].exits]            # of all but the prompt's first token
    for loop in (1, 2, 3):
        took = sum(b >= loop for b in taken)
        assert 0 <= engine.cache.count[loop, 0] - took <= 1
    assert engine.cache.count[0, 0] == engine.cache.count[4, 0] == 51


@pytest.mark.parametrize("make", [routing, looping])
def test_only_the_newest_tokens_go_through_the_head(make):
    """And without a rule only where they exit."""
    model, rows = make(), []
    logits = model.logits
    model.logits = lambda h: rows.append(len(h)) or logits(h)
    engine, _ = engine_of(model, "depth", slots=1)
    list(engine.run([serve.Request(list(range(9)), 3)]))
    assert rows == [1, 1, 1]


def test_a_routed_run_is_served_and_coloured(world, capsys):
    answers, errors, _ = served(capsys, world / "mor" / "r", world / "good.jsonl", "temperature=0", "stop=false")
    assert len(answers) == 5 and errors == [] and {loop for a in answers for loop in a["exits"]} <= {1, 2}
    out, err = call(capsys, str(world / "mor" / "r"), "show_depth=true", "prompt=ab", "max_new_tokens=12")
    assert out.startswith("ab\033[") and "exited after loop 1:" in err

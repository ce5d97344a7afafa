"""Synthetic tasks: every example against a checker written from the task's definition, what an example depends on,
training on tasks, the accuracies, and compression's decoder."""
import itertools
import math
import re

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import checkpoint
import plot
from run import TrainConfig
import prepare
import runs
import sample
import tasks
import train
from conftest import MODELS
from config import UserError
from tokenizer import TaskTokenizer, load_tokenizer
from test_train import TORCHRUN, start

models = pytest.mark.parametrize("name", MODELS)
every_task = pytest.mark.parametrize("task", tasks.TASKS)
LENGTHS = {"recall": (4, 6, 128), "noisy_recall": (4, 6, 128), "fuzzy_recall": (11, 12, 17, 128),
           "selective_copying": (34, 35, 256), "compression": (2, 3, 32), "memorization": (2, 32),
           "copying": (2, 4, 128), "needles": (32, 33, 128), "s3": (1, 2, 33), "s5": (1, 2, 33)}


def batches(task, T, **options):
    return tasks.TaskBatches(TrainConfig(dataset=f"task:{task}", **options), T)


def examples(task, T, split="val", count=200, seed=1337, **options):
    """The first examples of a split, each a pair of lists of numbers."""
    data = getattr(batches(task, T, seed=seed, task_examples=count, **options), split)
    data.count = count
    return [(x.tolist(), y.tolist()) for x, y in zip(*data.examples)]


# what a task is: one checker each, of the targets that validation scores ---------------------------------------

def check_recall(x, y, noise=False):
    value_of = {}
    for i in range(0, len(x), 2):
        key, value = x[i], x[i + 1]
        assert y[i + 1] == -1
        if noise and key >= 16:
            assert key < 32 and 16 <= value < 32 and y[i] == -1
            continue
        assert 0 <= key < 8 <= value < 16
        assert y[i] == value_of.get(key, -1)
        assert value_of.setdefault(key, value) == value
    assert y[-2] != -1, "the last key was there before"


def pairs_of(tokens):
    """[(key, value)] of a fuzzy recall: runs of tokens below 7, and of 7 to 14."""
    runs_ = [tuple(run) for _, run in itertools.groupby(tokens, lambda t: t >= 7)]
    assert len(runs_) % 2 == 0 and runs_[0][0] < 7
    return list(zip(runs_[::2], runs_[1::2]))


def check_fuzzy_recall(x, y):
    tokens, want = [t for t in x if t != 15] + [y[-1]], []
    assert x[:len(x) + 1 - len(tokens)] == [15] * (len(x) + 1 - len(tokens)), "padding stands on the left"
    value_of = {}
    for key, value in pairs_of(tokens):
        assert len(set(key)) == len(key) <= 3 and len(set(value)) == len(value) <= 3
        assert max(key) < 7 <= min(value) <= max(value) < 15
        want += [-1] * len(key) + (list(value) if key in value_of else [-1] * len(value))
        assert value_of.setdefault(key, value) == value
    assert len(want) == len(tokens) and y == ([-1] * (len(x) + 1 - len(want)) + want)[1:]
    assert want[-1] != -1, "the last key was there before"


def check_selective_copying(x, y):
    n = sum(t != -1 for t in y)
    prefix, rest = x[:-n - 1], x[-n - 1:]
    assert rest == [15] + [14] * n and 15 not in prefix
    assert prefix[-1] != 14, "blanks stand before letters"
    letters = [t for t in prefix if t != 14]
    assert len(letters) == n and y == [-1] * (len(x) - n) + letters and 0 <= min(letters) <= max(letters) < 14


def check_compression(x, y):
    assert x[-1] == 15 and y == x[:-1] + [-1] and 0 <= min(y[:-1]) <= max(y[:-1]) < 15


def check_memorization(x, y):
    assert x[1::2] == [255] * (len(x) // 2) and y[::2] == [-1] * (len(x) // 2)
    assert 0 <= min(x[::2]) <= max(x[::2]) < 127 <= min(y[1::2]) <= max(y[1::2]) < 255


def check_copying(x, y):
    half = len(x) // 2
    assert x[half] == 26 and 0 <= min(x[:half]) <= max(x[:half]) < 26
    assert y == [-1] * half + x[:half] and x[half + 1:] == x[:half - 1]


def check_needles(x, y):
    pairs = sum(t != -1 for t in y)
    hay, asked = x[:-2 * pairs], x[-2 * pairs:]
    at = [i for i, t in enumerate(hay) if t < 16]
    value_of = {hay[i]: hay[i + 1] for i in at}
    assert len(value_of) == len(at) == pairs and all(16 <= v < 32 for v in value_of.values())
    assert all(32 <= t < 48 for i, t in enumerate(hay) if not {i, i - 1} & set(at))
    assert sorted(asked[::2]) == sorted(value_of) and asked[1::2] == [value_of[k] for k in asked[::2]]
    assert y == [-1] * len(hay) + [t for v in asked[1::2] for t in (v, -1)]


def check_state(x, y, n):
    """Follow each element through the permutations, which are numbered in the order of their digits."""
    numbered = sorted("".join(p) for p in itertools.permutations("01234"[:n]))
    places = list(range(n))
    for token, target in zip(x, y, strict=True):
        places = [int(numbered[token][place]) for place in places]
        assert target >= 0 and numbered[target] == "".join(map(str, places))


CHECKS = {"recall": check_recall, "fuzzy_recall": check_fuzzy_recall, "selective_copying": check_selective_copying,
          "noisy_recall": lambda x, y: check_recall(x, y, noise=True), "compression": check_compression,
          "memorization": check_memorization, "copying": check_copying, "needles": check_needles,
          "s3": lambda x, y: check_state(x, y, 3), "s5": lambda x, y: check_state(x, y, 5)}


@every_task
def test_examples_are_what_the_task_says(task):
    for T in LENGTHS[task]:
        for x, y in examples(task, T):
            assert len(x) == len(y) == T
            CHECKS[task](x, y)
    x, y = batches(task, T).cut(batches(task, T).val, np.arange(5))
    assert x.dtype == y.dtype == torch.int64 and x.shape == y.shape == (5, T)


@every_task
def test_training_examples_are_what_the_task_says(task):
    """As in validation; with task_next_token, as in MAD, the recall tasks score every next token."""
    for T in LENGTHS[task]:
        for x, y in examples(task, T, "train"):
            CHECKS[task](x, y)
        for x, y in examples(task, T, "train", task_next_token=True) if task.endswith("recall") else ():
            assert y[:-1] == x[1:]
            answers = answers_of_fuzzy(x, y[-1]) if task == "fuzzy_recall" else answers_of_recall(x)
            assert y[-1] == answers[-1]
            CHECKS[task](x, answers)


def test_needles_are_strewn_evenly_and_asked_in_any_order():
    rows = examples("needles", 128, count=2000)
    hidden = np.array([[i for i, t in enumerate(x[:112]) if t < 16] for x, _ in rows])
    asked = [x[112::2].index(x[hidden[n, 0]]) for n, (x, _) in enumerate(rows)]     # when the first pair is asked for
    assert hidden.min() == 0 and hidden.max() == 110 and abs(hidden.mean() - 55) < 1
    assert np.bincount(asked, minlength=8).min() > 190, "1 in 8 of 2,000 each: 250, give or take 15"
    assert np.array([x for x, _ in rows])[:, -2].min() == 0


def answers_of_recall(x):
    return [x[i + 1] if i % 2 == 0 and t < 8 and t in x[:i:2] else -1 for i, t in enumerate(x)]


def answers_of_fuzzy(x, last):
    pairs = pairs_of([t for t in x if t != 15] + [last])
    answers = [a for i, (key, value) in enumerate(pairs)
               for a in [-1] * len(key) + (list(value) if key in dict(pairs[:i]) else [-1] * len(value))]
    return ([-1] * (len(x) + 1 - len(answers)) + answers)[1:]


def test_the_examples_in_the_docstring():
    """What the file says of each task is an example of it."""
    name, shown, inputs = None, set(), None
    for line in tasks.__doc__.splitlines():
        header, row = re.match(r"(\w+) \(\d+", line), re.fullmatch(r"    (inputs|targets) ([ .\d]+)", line)
        name = header[1] if header else name
        if row:
            numbers = [-1 if t == "." else int(t) for t in row[2].split()]
            if row[1] == "inputs":
                inputs = numbers
            else:
                assert len(inputs) == len(numbers)
                CHECKS[name](inputs, numbers)
                shown.add(name)
    assert shown == tasks.TASKS.keys() - {"s5"}


def test_checkers_can_fail():
    """Each checker refuses an example with one target changed, or one more scored."""
    for task, lengths in LENGTHS.items():
        for x, y in examples(task, lengths[-1], count=5):
            scored = [i for i, t in enumerate(y) if t != -1]
            masked = [i for i, t in enumerate(y) if t == -1]
            for place, value in [(scored[0], -1), (scored[-1], y[scored[-1]] - 1), *[(i, 9) for i in masked[-1:]]]:
                if task == "memorization" and place == scored[-1]:
                    continue                                    # any value may be right: see the test of the map
                with pytest.raises((AssertionError, ValueError)):
                    CHECKS[task](x, y[:place] + [value] + y[place + 1:])


# how often ------------------------------------------------------------------------------------------------------

def uniform(numbers, among):
    """Whether every one of `among` comes about as often: five standard deviations."""
    counts = np.bincount(numbers, minlength=max(among) + 1)[list(among)]
    mean = len(numbers) / len(among)
    return sum(counts) == len(numbers) and abs(counts - mean).max() < 5 * math.sqrt(mean)


def test_draws_are_uniform():
    rows = examples("recall", 128, count=400)
    assert uniform([x[i] for x, _ in rows for i in range(0, 126, 2)], range(8))
    assert uniform([x[-2] for x, _ in rows], range(8))
    assert uniform([dict(zip(x[::2], x[1::2])).get(3, 8) for x, _ in rows], range(8, 16))
    assert uniform([t for x, _ in examples("s3", 32) for t in x], range(6))
    assert uniform([t for _, y in examples("s3", 32) for t in y], range(6))
    assert uniform([t for x, _ in examples("s5", 64) for t in x], range(120))
    assert uniform([t for x, _ in examples("copying", 64) for t in x[:32]], range(26))
    assert uniform([t for x, _ in examples("compression", 33) for t in x[:-1]], range(15))
    assert uniform([t for x, _ in examples("memorization", 32, count=800) for t in x[::2]], range(127))


def test_a_fifth_of_the_pairs_is_noise():
    """One pair that is asked for and the last, which asks, never are."""
    rows = np.array([x for x, _ in examples("noisy_recall", 128, count=400)])
    noise = (rows[:, ::2] >= 16).mean(0)
    assert noise[-1] == 0 and abs(noise[:-1].mean() - 0.2 * 62 / 63) < 0.01
    assert abs(noise[:-1] - 0.2).max() < 0.1, "noise comes anywhere"
    assert uniform(rows[rows >= 16], range(16, 32))


def test_fuzzy_motifs_have_all_lengths():
    for split, sizes in (("train", {1, 2, 3}), ("val", {3})):
        pairs = [pair for x, y in examples("fuzzy_recall", 128, split, 100)
                 for pair in pairs_of([t for t in x if t != 15] + y[-1:])]
        keys, values = ([len(part) for part in parts] for parts in zip(*pairs))
        assert set(keys) == sizes and set(values) == {1, 2, 3}
        assert uniform(values, range(1, 4)) or split == "train"         # a known key brings its value's length
    first = [next(i for i, (key, _) in enumerate(pairs) if key == pairs[-1][0]) / (len(pairs) - 1)
             for x, y in examples("fuzzy_recall", 128) for pairs in [pairs_of([t for t in x if t != 15] + y[-1:])]]
    assert min(first) < 0.1 and max(first) > 0.9 and abs(np.mean(first) - 0.5) < 0.1
    assert max(x.count(15) for x, _ in examples("fuzzy_recall", 128)) <= 5, "as many pairs as fit"


def test_blanks_are_strewn_evenly():
    """The 223 blanks before sixteen letters: as many before each."""
    gaps = np.array([np.diff([-1] + [i for i, t in enumerate(x) if t < 14]) - 1
                     for x, _ in examples("selective_copying", 256, count=400)])
    assert gaps.shape == (400, 16) and (gaps.sum(1) == 223).all()
    assert abs(gaps.mean(0) - 223 / 16).max() < 1 and gaps.min() < 5


def test_memorization_has_one_map():
    """For all training and all validation examples; every key has its own value; another seed has another map."""
    def mapping(seed, *splits):
        seen = {(k, v) for split in splits for x, y in examples("memorization", 32, split, 256, seed)
                for k, v in zip(x[::2], y[1::2])}
        assert len(dict(seen)) == len(seen) == len({v for _, v in seen}) == 127
        return dict(seen)
    one, other = mapping(1, "train", "val"), mapping(2, "train", "val")
    assert sum(one[k] == other[k] for k in range(127)) < 10
    fields = tasks.TASKS["memorization"]
    assert fields.examples == 256 and batches("memorization", 32).train.count == 256


# what an example depends on -------------------------------------------------------------------------------------

@every_task
@given(seed=st.integers(0, 2 ** 40), step=st.integers(0, 10 ** 6), rows=st.integers(1, 3))
def test_batches_are_a_pure_function_of_seed_and_step(task, seed, step, rows):
    """Whoever computes it, alone or as one of 2 or 4, in any order: a micro-batch is the same."""
    options = dict(seed=seed, batch_size=rows, gradient_accumulation_steps=4, task_examples=30 * (task not in ("s3", "s5")))
    T = max(34, LENGTHS[task][0])
    one = batches(task, T, **options)
    alone = [one.micro_batch(step, i) for i in range(4)]
    assert all(x.shape == y.shape == (rows, T) for x, y in alone)
    for world in (2, 4):
        share = 4 // world
        for rank in range(world):
            fresh = batches(task, T, **options)
            for i in reversed(range(rank * share, (rank + 1) * share)):
                for ours, theirs in zip(fresh.micro_batch(step, i), alone[i]):
                    assert torch.equal(ours, theirs)
    together = torch.cat([x for x, _ in alone])
    for changed in (dict(seed=seed + 1), {}):
        other = batches(task, T, **{**options, **changed})
        rows_ = torch.cat([other.micro_batch(step + (not changed), i)[0] for i in range(4)])
        assert not torch.equal(rows_, together)


@every_task
def test_words_of_a_seed_are_not_added(task):
    """Seed 1 at step 2 and seed 2 at step 1, or their examples 2 and 1, are different."""
    one, two = (batches(task, 64, seed=s, task_examples=4 * (task not in ("s3", "s5"))) for s in (1, 2))
    assert not torch.equal(one.micro_batch(2, 0)[0], two.micro_batch(1, 0)[0])
    for split in ("train", "val"):
        (x1, _), (x2, _) = (getattr(b, split).examples if getattr(b, split).count else b.val.examples for b in (one, two))
        assert not (x1[:4, None] == x2[None, :4]).all(-1).any()
    if task in ("s3", "s5"):
        assert not torch.equal(one.micro_batch(0, 1)[0], one.micro_batch(1, 0)[0])


def test_no_two_kinds_of_draws_share_their_random_numbers():
    """Also not with the trainer's: SeedSequence takes [1, 2] and [1, 2, 0] for the same."""
    few = range(4)
    seeds = [*((s, t) for s in few for t in few),                                       # the batch of a step
             *((s, t, i, 1) for s in few for t in few for i in few),                    # its forward
             *((s, i, split) for s in few for i in few for split in (tasks.TRAIN, tasks.VAL)),
             *((s, t, i, tasks.FRESH) for s in few for t in few for i in few), *((s, 0, tasks.MAP) for s in few)]
    states = {tuple(np.random.SeedSequence(words).generate_state(4)) for words in seeds}
    assert len(states) == len(seeds)
    assert len({tuple(np.random.SeedSequence(words).generate_state(4)) for words in [(1, 2), (1, 2, 0)]}) == 1


@every_task
def test_training_and_validation_are_different_examples(task):
    train_rows, val_rows = ({tuple(x) for x, _ in examples(task, 64, split)} for split in ("train", "val"))
    assert not train_rows & val_rows and len(train_rows) == len(val_rows) == 200


@every_task
def test_an_example_does_not_depend_on_how_many_there_are(task):
    few, many = examples(task, 64, "train", 5), examples(task, 64, "train", 20)
    assert many[:5] == few
    assert batches(task, 64, task_examples=5).val.count == batches(task, 64).val.count == 1280


def test_batches_draw_from_the_fixed_examples():
    one = batches("copying", 16, batch_size=8, task_examples=40)
    known = {tuple(row) for row in one.train.examples[0].tolist()}
    drawn = [tuple(row) for step in range(60) for row in one.micro_batch(step, 0)[0].tolist()]
    assert set(drawn) == known and len(known) == 40
    assert {name: batches(name, 64).train.count for name in tasks.TASKS} == {
        **{name: 12800 for name in tasks.TASKS}, "memorization": 256, "needles": 0, "s3": 0, "s5": 0}
    fresh = {tuple(row) for step in range(60) for row in batches("s5", 16, batch_size=8).micro_batch(step, 0)[0].tolist()}
    assert len(fresh) == 480
    fixed = batches("s5", 16, batch_size=8, task_examples=3)
    assert len({tuple(row) for step in range(20) for row in fixed.micro_batch(step, 0)[0].tolist()}) == 3


def test_validation_is_every_example_once():
    one = batches("copying", 8, batch_size=100)
    whole = one.val_batches(0)
    assert np.array_equal(np.concatenate(whole), np.arange(1280)) and len(whole) == 13 and len(whole[-1]) == 80
    limited = one.val_batches(3)
    assert sum(map(len, limited)) == 300 and limited[0][0] == 0 and limited[-1][-1] == 1279
    assert len(set(np.concatenate(limited))) == 300


# ids as text ----------------------------------------------------------------------------------------------------

@given(st.lists(st.integers(0, 119), min_size=1, max_size=30), st.integers(0, 30))
def test_ids_as_text(ids, cut):
    tokenizer = load_tokenizer(TaskTokenizer(120).to_dict())
    text = tokenizer.decode(ids)
    assert text == " ".join(map(str, ids)) and tokenizer.encode(text) == ids
    assert tokenizer.encode(f"\n {text}\t ") == ids
    head, tail = ids[:cut], ids[cut:]
    streamed = tokenizer.decode(head) + b"".join(tokenizer.decode_bytes([i]) for i in tail).decode()
    assert streamed == (text if head else " " + text)
    assert tokenizer.vocab_size == 120 and tokenizer.eot is None


@pytest.mark.parametrize("text", ["", " \n", "a", "1,2", "1 2 x", "-1", "6", "3 6", "1.0", "99999999999", "1e0", "²", "１"])
def test_other_text_is_refused(text):
    with pytest.raises(UserError, match="numbers from 0 to 5 with blanks between them"):
        TaskTokenizer(6).encode(text)


@pytest.mark.parametrize("value", [None, "16", 0, -3, 2.0, True, 1 << 40, [6]])
def test_a_malformed_tokenizer_is_refused(value):
    with pytest.raises(UserError, match="malformed task tokenizer"):
        load_tokenizer({"kind": "task", "vocab_size": value})
    with pytest.raises(UserError, match="malformed task tokenizer"):
        load_tokenizer({"kind": "task"})


# training on tasks ----------------------------------------------------------------------------------------------

SMALL = ["block_size=16", "task_examples=50", "dropout=0.1"]


def run(name, out, task, *extra, **options):
    return runs.run(name, out, out / "nodata", f"dataset=task:{task}", *SMALL, *extra, **options)


@pytest.mark.parametrize("task", ["recall", "s3", "compression"])
def test_resume_is_bit_identical(task, tmp_path):
    options = ["eval_interval=4", "task_examples=0"] if task == "s3" else ["eval_interval=4"]
    whole = run("gpt", tmp_path / "whole", task, *options)
    for k in range(1, 6):
        assert run("gpt", tmp_path / str(k), task, *options, stop_after=k).step == k
        resumed = run("gpt", tmp_path / str(k), task, *options, "resume=true")
        assert resumed.step == 6 and runs.learned(resumed) == runs.learned(whole)
        assert runs.learned(checkpoint.load_checkpoint(resumed.folder / "best.pt")) == \
            runs.learned(checkpoint.load_checkpoint(whole.folder / "best.pt"))


@pytest.mark.parametrize("task", ["recall", "s3", "compression"])
def test_evaluation_changes_no_weight(task, tmp_path):
    a, b, c = (run("gpt", tmp_path / n, task, *extra) for n, extra in
               (("a", ["eval_interval=1"]), ("b", ["eval_interval=50"]), ("c", ["seed=7"])))
    prints = [checkpoint.fingerprint(t.state()["weights"]) for t in (a, b, c)]
    assert prints[0] == prints[1] != prints[2]


@models
@pytest.mark.parametrize("task", ["noisy_recall", "s5"])
def test_every_model_trains_on_tasks(name, task, tmp_path, capsys):
    trainer = run(name, tmp_path, task, "max_steps=2")
    rows = plot.read_log(trainer.folder / "log.jsonl")
    assert {"ce", "token_accuracy", "sequence_accuracy", "grad_norm"} <= rows[0].keys() and "bpb" not in rows[0]
    estimated = {"val_ce_estimate", "val_gap"} if hasattr(trainer.model, "estimate") else set()
    told = {f"val_{name}" for name in getattr(trainer.model, "eval_metrics", ())}
    assert rows[-1].keys() == estimated | told | {"step", "tokens", "flops", "seconds", "val_ce", "val_token_accuracy",
                                                  "val_sequence_accuracy"}
    assert abs(rows[0]["ce"] - math.log(tasks.TASKS[task].vocab_size)) < 1
    assert trainer.model.cfg.vocab_size == tasks.TASKS[task].vocab_size
    assert not (tmp_path / "nodata").exists()


def test_two_processes_are_one_with_twice_the_accumulation(tmp_path):
    """Bit for bit, and the same accuracies; s3 has the longest words in its seeds."""
    options = ["gradient_accumulation_steps=2", "eval_interval=3", "eval_batches=3", "learning_rate=1e-2", "task_examples=0"]
    one = run("gpt", tmp_path / "one", "s3", *options)
    p = start(*TORCHRUN, *runs.arguments("gpt", tmp_path / "two", tmp_path, "dataset=task:s3", *SMALL, *options))
    _, err = p.communicate(timeout=120)
    assert p.returncode == 0, err
    two = checkpoint.load_checkpoint(tmp_path / "two" / "r" / "ckpt.pt")
    assert two["step"] == 6 and checkpoint.fingerprint(two["weights"]) == checkpoint.fingerprint(one.state()["weights"])
    rows = [plot.read_log(tmp_path / n / "r" / "log.jsonl") for n in ("one", "two")]
    assert len(rows[0]) == len(rows[1]) == 8
    for ours, theirs in zip(*rows):
        for key in {k for k in ours if "accuracy" in k}:
            assert ours[key] == pytest.approx(theirs[key], abs=1e-7) and "val_" in key or ours["token_accuracy"] > 0


@pytest.mark.parametrize("task, T, options, least", [
    ("memorization", 8, ["max_steps=250", "n_embd=32"], 0.95), ("s3", 2, ["max_steps=300", "n_embd=32"], 0.8),
    ("compression", 3, ["max_steps=500", "n_embd=64"], 0.5)])
def test_a_small_model_learns_a_short_task(task, T, options, least, tmp_path):
    """At chance the share of rows wholly right would be below 10^-8, 1/36 and 1/225. On s3 a plain Transformer reaches
    31/36: attention without absolute positions cannot tell p from p p."""
    trainer = run("gpt", tmp_path, task, f"block_size={T}", "batch_size=32", "dropout=0", "task_examples=0", "warmup_steps=10",
                  "learning_rate=1e-2", "eval_batches=0", "eval_interval=1000", "log_interval=100", *options)
    result = plot.read_log(trainer.folder / "log.jsonl")[-1]
    assert result["val_token_accuracy"] >= result["val_sequence_accuracy"] > least
    assert plot.read_log(trainer.folder / "log.jsonl")[-2]["sequence_accuracy"] > least - 0.2


def test_what_is_printed(tmp_path, capsys):
    """The evaluation's line, and at the end an example in place of text."""
    argv = [*runs.arguments("gpt", tmp_path, tmp_path, "dataset=task:recall", *SMALL), "sample_tokens=1"]
    train.main(argv)
    out = capsys.readouterr().out
    assert "task:recall: 50 examples to train on, 1,280 to validate" in out and "more text" not in out
    line = r"step 6: val ce \d\.\d{4} nats per token, token accuracy \d\.\d{3}, sequence accuracy \d\.\d{3} \(best\)\n"
    assert re.search(line, out), out
    assert re.search(r"-{80}\ninputs +[ \d]+\ntargets +[ \d.]+\npredictions +[ \d.]+\n-{80}\n", out)
    train.main([f"out_dir={tmp_path}", "run=r", "eval_only=true", "eval_batches=0"])
    assert re.search(r"^val ce \d\.\d{4} nats per token, token accuracy \d\.\d{3}, sequence", capsys.readouterr().out, re.M)


@pytest.mark.parametrize("T", [6, 40, 128])
def test_the_example_that_is_shown(T, tmp_path):
    trainer = run("gpt", tmp_path, "noisy_recall", "max_steps=1", f"block_size={T}")
    lines = tasks.show_example(trainer.model, trainer.batches).splitlines()
    assert len({len(line) for line in lines}) == 1 and len(lines[0]) <= 80
    inputs, targets, said = (line.replace("...", "").split()[1:] for line in lines)
    x, y = trainer.batches.cut(trainer.batches.val, [0])
    likeliest = trainer.model(x)[0][0].argmax(-1)
    n = len(inputs)
    assert n == min(T, 21) and ("..." in lines[0]) == (T > 21)
    assert inputs == [str(int(t)) for t in x[0, -n:]]
    assert targets == [str(int(t)) if t != -1 else "." for t in y[0, -n:]]
    assert said == [str(int(t)) if s != -1 else "." for t, s in zip(likeliest[-n:], y[0, -n:])]


# accuracies -----------------------------------------------------------------------------------------------------

def test_counting_by_hand():
    targets = torch.tensor([[1, -1, 2], [-1, -1, 0], [0, 1, 2], [2, 2, -1]])
    said = torch.tensor([[1, 0, 2], [2, 2, 1], [0, 1, 1], [2, 2, 2]])
    tokens, rows = tasks.count_right(torch.nn.functional.one_hot(said, 3) * 0.1, targets)
    assert (int(tokens), int(rows)) == (2 + 0 + 2 + 2, 2)


def oracle(trainer, monkeypatch, wrong):
    """Makes the model say the target, but where wrong(idx) (B, T) is True. Its loss is a number for each call."""
    calls = []

    def forward(idx, targets):
        said = torch.where(wrong(idx), (targets + 1) % 6, targets).clamp(min=0)
        calls.append((idx, targets))
        loss = trainer.model.wte.weight.sum() * 0 + len(calls)
        return torch.nn.functional.one_hot(said, 6).float(), loss, {"ce": loss.detach()}
    monkeypatch.setattr(trainer.model, "forward", forward)
    return calls


def shares(wrong, pairs):
    """(share of scored targets that are right, share of rows that are wholly right) over (idx, targets), row by row."""
    tokens = rows = right_tokens = right_rows = 0
    for idx, targets in pairs:
        for errors, row in zip(wrong(idx).tolist(), targets.tolist()):
            hits = [not e for e, t in zip(errors, row) if t != -1]
            tokens, right_tokens = tokens + len(hits), right_tokens + sum(hits)
            rows, right_rows = rows + 1, right_rows + all(hits)
    return right_tokens / tokens, right_rows / rows


def test_accuracies_count_tokens_and_rows_not_micro_batches(tmp_path, monkeypatch):
    """Micro-batches with few and with many targets: each target weighs the same, and each row."""
    original = tasks.TaskBatches.micro_batch

    def masked(self, step, index):
        x, y = original(self, step, index)
        return x, y.masked_fill(torch.arange(16) >= (2 if index == 1 else 12), -1)
    monkeypatch.setattr(tasks.TaskBatches, "micro_batch", masked)
    argv = runs.arguments("gpt", tmp_path, tmp_path, "dataset=task:s3", *SMALL, "gradient_accumulation_steps=3",
                          "batch_size=7", "max_steps=1", "grad_clip=0")
    trainer = train.setup(argv)
    wrong = lambda idx: (idx == 0) & (torch.arange(16) < 6)         # noqa: E731
    calls = oracle(trainer, monkeypatch, wrong)
    logged, _ = trainer.train_step(type("", (), {"asked": False}))
    token, sequence = shares(wrong, calls)
    assert len(calls) == 3 and 0 < sequence < token < 1
    assert logged["token_accuracy"] == pytest.approx(token, abs=1e-6)
    assert logged["sequence_accuracy"] == pytest.approx(sequence, abs=1e-6)
    assert logged["ce"] == pytest.approx((84 * 1 + 14 * 2 + 84 * 3) / 182, abs=1e-6)


def test_validation_accuracies(tmp_path, monkeypatch):
    """Over all examples, the last micro-batch being shorter."""
    argv = runs.arguments("gpt", tmp_path, tmp_path, "dataset=task:s3", *SMALL, "batch_size=300", "eval_batches=0")
    trainer = train.setup(argv)
    wrong = lambda idx: (idx == 0) & (idx.roll(1, 1) == 0)          # noqa: E731
    calls = oracle(trainer, monkeypatch, wrong)
    result = trainer.evaluate()
    assert [len(idx) for idx, _ in calls] == [300, 300, 300, 300, 80]
    want = shares(wrong, calls)
    assert 0.1 < want[1] < want[0] < 1
    assert (result["val_token_accuracy"], result["val_sequence_accuracy"]) == pytest.approx(want, abs=1e-12)
    assert result["val_ce"] == pytest.approx((300 * (1 + 2 + 3 + 4) + 80 * 5) / 1280)


# compression's decoder ------------------------------------------------------------------------------------------

def test_the_decoder_reads_the_last_position_alone():
    torch.manual_seed(0)
    head = tasks.CompressionHead(12, 16).double()
    hidden = torch.randn(3, 7, 12, dtype=torch.float64, requires_grad=True)
    logits = head(hidden)
    assert logits.shape == (3, 7, 16)
    for t in (0, 6):
        gradient, = torch.autograd.grad(logits[:, t].square().sum(), hidden, retain_graph=True)
        assert (gradient[:, :-1] == 0).all() and (gradient[:, -1] != 0).all()
    assert (logits[:, 0] - logits[:, 5]).abs().max() > 1e-3, "positions are told apart"
    gradient, = torch.autograd.grad(logits[0].sum(), hidden)
    assert (gradient[1:] == 0).all(), "rows do not mix"


@pytest.mark.parametrize("C", [8, 7, 2])
def test_sinusoids_by_hand(C):
    half = math.ceil(C / 2)
    table = tasks.sinusoids(5, C, "cpu", torch.float64)
    for t in range(5):
        angles = [t * 10000 ** (-i / max(1, half - 1)) for i in range(half)]
        assert table[t].tolist() == pytest.approx([*map(math.sin, angles), *map(math.cos, angles)][:C], abs=1e-12)


@models
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_compression_on_every_model(name, optimizer, tmp_path):
    """The first loss is that of guessing; the embedding is the model's own; the checkpoint brings the decoder back."""
    options = ["max_steps=3", "dropout=0", f"optimizer={optimizer}"]
    trainer = run(name, tmp_path, "compression", *options)
    rows = plot.read_log(trainer.folder / "log.jsonl")
    assert abs(rows[0]["ce"] - math.log(16)) < 0.1
    named = dict(trainer.model.named_parameters())
    heads = {n for n in named if n.startswith("head.")}
    assert len(heads) == 12 and all(named[n].requires_grad for n in heads)
    assert not any(named[n] is p for n in heads for o in trainer.optimizers if isinstance(o, torch.optim.Muon)
                   for g in o.param_groups for p in g["params"])
    fresh = train.setup(runs.arguments(name, tmp_path / "f", tmp_path, "dataset=task:compression", *SMALL, *options)).model
    start_, end = dict(fresh.named_parameters()), named
    assert all(not torch.equal(start_[n], end[n]) for n in heads | {n for n in named if n.startswith("wte")})
    model, tokenizer, _ = checkpoint.load_run(tmp_path / "r")
    x = trainer.batches.cut(trainer.batches.val, [0, 1])[0]
    assert torch.equal(model(x)[0], trainer.model.eval()(x)[0]) and tokenizer.vocab_size == 16


def test_the_embedding_stays_when_the_head_was_tied_to_it(tmp_path):
    tied, untied = (run("gpt", tmp_path / t, "compression", f"tie_embeddings={t}", "max_steps=1") for t in ("true", "false"))
    assert tied.model.wte.weight.shape == (16, 16)
    assert sum(p.numel() for p in tied.model.parameters()) == sum(p.numel() for p in untied.model.parameters())
    assert "head.weight" not in tied.model.state_dict() and "wte.weight" in tied.model.state_dict()


def test_weights_and_decoder_belong_together(tmp_path):
    """Finetuning and evaluating on compression need compression's weights, and the other way round."""
    for task in ("compression", "recall"):
        run("gpt", tmp_path / task, task, "max_steps=1", "pos=alibi")
    def argv(task, source, *extra):
        return [f"init_from={tmp_path / source / 'r'}", f"out_dir={tmp_path}", "run=new", f"dataset=task:{task}", "device=cpu",
                "max_steps=1", "eval_interval=10", "sample_tokens=0", *extra]
    again = train.setup(argv("compression", "compression"))
    assert isinstance(again.model.head, tasks.CompressionHead) and again.run()
    longer = train.setup(argv("compression", "compression", "block_size=20", "overwrite=true"))
    assert longer.model.cfg.block_size == 20 and longer.evaluate()["val_ce"] > 0
    assert train.setup(argv("fuzzy_recall", "recall", "overwrite=true")).model.cfg.vocab_size == 16
    for task, source in (("recall", "compression"), ("compression", "recall")):
        with pytest.raises(UserError, match="only task:compression has a decoder"):
            train.setup(argv(task, source, "overwrite=true"))
    with pytest.raises(UserError, match="only task:compression has a decoder"):
        train.setup([f"out_dir={tmp_path / 'recall'}", "run=r", "resume=true", "dataset=task:compression"])
    with pytest.raises(UserError, match=r"tokenizer task, which is not the one of the data set \(task, 32 tokens\)"):
        train.setup(argv("noisy_recall", "recall", "overwrite=true"))


# sampling, and what cannot be -----------------------------------------------------------------------------------

def test_sampling_ids(tmp_path, capsys):
    run("gpt", tmp_path, "copying", "max_steps=1")
    capsys.readouterr()
    sample.main([str(tmp_path / "r"), "prompt=3 9 1", "max_new_tokens=20"])
    words = capsys.readouterr().out.split()
    assert words[:3] == ["3", "9", "1"] and len(words) == 23 and all(0 <= int(w) < 27 for w in words)
    sample.main([str(tmp_path / "r"), "prompt=3 9 1", "max_new_tokens=20", "num_samples=2"])
    first, second, _ = capsys.readouterr().out.split("-" * 80 + "\n")
    assert first.startswith("3 9 1 ") and len(first.split()) == len(second.split()) == 23 and first != second
    (tmp_path / "lines.txt").write_text("1\n2 26\n")
    sample.main([str(tmp_path / "r"), f"prompt=LINES:{tmp_path / 'lines.txt'}", "max_new_tokens=1"])
    first, second, _ = capsys.readouterr().out.split("-" * 80 + "\n")
    assert len(first.split()) == 2 and second.split()[:2] == ["2", "26"]
    for prompt in ("hello", "3 27", "", "\n"):
        with pytest.raises(UserError, match="numbers from 0 to 26"):
            sample.main([str(tmp_path / "r"), f"prompt={prompt}"])


def test_compression_cannot_be_sampled(tmp_path):
    run("gpt", tmp_path, "compression", "max_steps=1")
    with pytest.raises(UserError, match="nothing to sample"):
        sample.main([str(tmp_path / "r"), "prompt=1"])


@pytest.mark.parametrize("task, T, message", [
    *((t, LENGTHS[t][0] - (2 if tasks.TASKS[t].even else 1), "block_size") for t in ("recall", "noisy_recall", "fuzzy_recall",
                                                                        "selective_copying", "compression")),
    *((t, 33, "an even number") for t in ("recall", "noisy_recall", "memorization", "copying")),
    ("recall", 1 << 20, "too many to hold"), ("nothing", 16, "the tasks are task:recall, "), ("", 16, "the tasks are")])
def test_impossible_settings(task, T, message):
    with pytest.raises(UserError, match=message):
        batches(task, T)


def test_a_tokenizer_is_for_text(tmp_path, capsys):
    """Asked for on the command line it is refused; in a config file (every one names a text's) it is nothing."""
    argv = [a for a in runs.arguments("gpt", tmp_path, tmp_path, "dataset=task:s3", *SMALL) if not a.startswith("tokenizer")]
    with pytest.raises(UserError, match="tokenizer=char, but dataset=task:s3"):
        train.setup([*argv, "tokenizer=char"])
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "x.yaml").write_text("tokenizer: bpe:1024\n")
    trainer = train.setup([*argv, f"config={tmp_path / 'x.yaml'}"])
    assert trainer.tokenizer.kind == "task" and trainer.run()
    assert train.setup([f"out_dir={tmp_path}", "run=r", "resume=true"]).step == 6
    with pytest.raises(UserError, match="needs no preparation"):
        prepare.prepare(prepare.PrepareConfig(dataset="task:s3", data_dir=str(tmp_path / "d")))

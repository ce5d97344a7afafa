"""Synthetic tasks: checkers that are written from their definitions accept the examples. The tests also look at what
examples depend on, at training, and at accuracies."""
import itertools
import math
import re

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import runs
import sample
from common import checkpoint, tasks
import train
from common.options import UserError
from common.data import TextBatches, load_data
from common.options import TrainConfig
from common.tokenizer import TaskTokenizer, load_tokenizer

every_task = pytest.mark.parametrize("task", tasks.TASKS)
LENGTHS = {"recall": (4, 6, 128), "noisy_recall": (4, 6, 128), "fuzzy_recall": (11, 12, 17, 128),
           "selective_copying": (34, 35, 256), "memorization": (2, 32),
           "copying": (2, 4, 128), "needles": (32, 33, 128), "s3": (1, 2, 33), "s5": (1, 2, 33)}


def batches(task, T, **options):
    return tasks.TaskBatches(TrainConfig(dataset=f"task:{task}", **options), T)


def examples(task, T, split="val", count=200):
    """Return the first examples of a split, each of which is a pair of lists of numbers."""
    data = getattr(batches(task, T, task_examples=count), split)
    data.count = count
    return [(x.tolist(), y.tolist()) for x, y in zip(*data.examples)]


def check_recall(x, y, noise=False):
    pairs = list(zip(x[::2], x[1::2]))
    known = {(k, v) for k, v in pairs if not noise or k < 16}
    assert all(0 <= k < 8 <= v < 16 for k, v in known) and len(dict(known)) == len(known)
    assert all(16 <= token < 32 for pair in set(pairs) - known for token in pair)
    # The target at a key that was there before is its value.
    assert y == [x[i + 1] if i % 2 == 0 and t < 8 and t in x[:i:2] else -1 for i, t in enumerate(x)]
    assert y[-2] != -1, "the last key was there before"


def check_fuzzy_recall(x, y):
    pad, targets = x.count(15), []
    tokens = x[pad:] + [y[-1]]
    motifs = [tuple(run) for _, run in itertools.groupby(tokens, lambda t: t >= 7)]
    assert x[:pad] == [15] * pad and motifs[0][0] < 7 and 0 <= min(tokens) <= max(tokens) < 15
    pairs = list(zip(motifs[::2], motifs[1::2], strict=True))
    assert len(dict(pairs)) == len(set(pairs)) and all(len(set(motif)) == len(motif) <= 3 for motif in motifs)
    for i, (key, value) in enumerate(pairs):
        targets += [-1] * len(key) + (list(value) if key in dict(pairs[:i]) else [-1] * len(value))
    assert y == ([-1] * pad + targets)[1:] and y[-1] != -1, "the last key was there before"


def check_selective_copying(x, y):
    n = sum(t != -1 for t in y)
    prefix, rest = x[:-n - 1], x[-n - 1:]
    letters = [t for t in prefix if t != 14]
    assert rest == [15] + [14] * n and prefix[-1] != 14, "blanks stand before letters"
    assert y == [-1] * (len(x) - n) + letters and 0 <= min(letters) <= max(letters) < 14


def check_memorization(x, y):
    keys, values = x[::2], y[1::2]
    assert x[1::2] == [255] * len(keys) and y[::2] == [-1] * len(keys)
    assert 0 <= min(keys) <= max(keys) < 127 <= min(values) <= max(values) < 255


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
    assert sorted(asked[::2]) == sorted(value_of)
    assert asked[1::2] == [value_of[k] for k in asked[::2]]
    assert y == [-1] * len(hay) + [t for v in asked[1::2] for t in (v, -1)]


def check_state(x, y, n):
    """Follow each element through permutations, which are numbered in the order of their digits."""
    numbered = sorted("".join(p) for p in itertools.permutations("01234"[:n]))
    places = list(range(n))
    for token, target in zip(x, y, strict=True):
        places = [int(numbered[token][place]) for place in places]
        assert target >= 0 and numbered[target] == "".join(map(str, places))


CHECKS = {"recall": check_recall, "noisy_recall": lambda x, y: check_recall(x, y, noise=True),
          "fuzzy_recall": check_fuzzy_recall, "selective_copying": check_selective_copying,
          "memorization": check_memorization, "copying": check_copying, "needles": check_needles,
          "s3": lambda x, y: check_state(x, y, 3), "s5": lambda x, y: check_state(x, y, 5)}


@every_task
@pytest.mark.parametrize("split", ["train", "val"])
def test_examples_are_what_the_task_says(task, split):
    seen = set()
    for T in LENGTHS[task]:
        for x, y in examples(task, T, split):
            assert len(x) == len(y) == T
            CHECKS[task](x, y)
            seen.update(x, y)
    assert len(seen - {-1}) >= tasks.TASKS[task].vocab_size - 1     # memorization leaves out a value


def test_chances_are_those_of_the_docstring():
    """They are the share of noise, the places of needles and letters, and which pair is asked for."""
    noise = np.mean([np.array(x[::2]) >= 16 for x, _ in examples("noisy_recall", 128)])
    needles = [np.array(x) < 16 for x, _ in examples("needles", 64)]
    letters = [np.flatnonzero(np.array(x) < 14) for x, _ in examples("selective_copying", 64)]
    assert noise == pytest.approx(0.2, abs=0.02)
    assert {n.sum() for n in needles} == {16} and len({n.argmax() for n in needles}) > 5
    assert np.mean([np.diff(at[at < 47]).mean() for at in letters]) > 1.5, "blanks stand between letters"
    asked = set()
    for x, _ in examples("fuzzy_recall", 60):
        motifs = [tuple(run) for _, run in itertools.groupby(x[x.count(15):], lambda t: t >= 7)]
        keys = motifs[::2]              # the last one is the key that is asked for
        asked.add(keys.index(keys[-1]))
    assert len(asked) > 1, "not always the first pair is asked for"


def test_a_fingerprint_is_of_all_that_a_run_reads(data_dir):
    tasks_read = [batches("recall", 8, task_examples=n).fingerprint for n in (0, 5)]
    texts = []
    for changed in ("", "train", "val"):
        splits = load_data(data_dir / "words")
        for split in splits.values():
            split.sha256 = "0" if split.split == changed else split.sha256
            split.check = lambda: None
        texts.append(TextBatches(splits, TrainConfig(), 8).fingerprint)
    assert len({*tasks_read}) == 2 and len({*texts}) == 3


def test_the_examples_in_the_docstring():
    shown = re.findall(r"    inputs ([ \d]+)\n    targets ([ .\d]+)\n", tasks.__doc__)
    for name, rows in zip([name for name in CHECKS if name not in ("noisy_recall", "s5")], shown, strict=True):
        CHECKS[name](*([-1 if t == "." else int(t) for t in row.split()] for row in rows))


def test_memorization_has_one_map():
    """Examples of both splits have the same map, in which every key has its own value."""
    rows = [row for split in ("train", "val") for row in examples("memorization", 32, split, 256)]
    seen = {pair for x, y in rows for pair in zip(x[::2], y[1::2])}
    assert len(dict(seen)) == len(seen) == len({v for _, v in seen}) == 127


@pytest.mark.parametrize("name", ["words", *tasks.TASKS])
@given(seed=st.integers(0, 2 ** 40), step=st.integers(1, 10 ** 6), rows=st.integers(1, 3))
def test_batches_are_a_pure_function_of_seed_and_step(name, data_dir, seed, step, rows):
    """A micro-batch is the same whoever computes it, and in any order."""
    T, fixed = max(34, LENGTHS.get(name, [8])[0]), name != "words" and tasks.TASKS[name].examples
    options = dict(batch_size=rows, gradient_accumulation_steps=4, task_examples=30 if fixed else 0)
    one, fresh, other = (batches(name, T, seed=seed + n, **options) if name != "words" else
                         TextBatches(load_data(data_dir / "words"), TrainConfig(seed=seed + n, **options), T) for n in (0, 0, 1))
    alone = [one.micro_batch(step, i) for i in range(4)]
    assert all(x.shape == y.shape == (rows, T) for x, y in alone)
    assert not all(torch.equal(x, alone[0][0]) for x, _ in alone), "each has rows of its own"
    assert name != "words" or all(torch.equal(x[:, 1:], y[:, :-1]) for x, y in alone)
    for i in 2, 0, 3, 1:
        assert all(torch.equal(a, b) for a, b in zip(fresh.micro_batch(step, i), alone[i]))
    together = torch.cat([x for x, _ in alone])
    for again, at in (other, step), (one, step + 1), (other, step - 1):     # seed and step are not added
        assert not torch.equal(torch.cat([again.micro_batch(at, i)[0] for i in range(4)]), together)
    if not fixed:       # nor are step and micro-batch added
        assert not torch.equal(one.micro_batch(step - 1, 1)[0], alone[0][0])
    if name != "words":     # nor are seed and number of an example of validation added
        one.val.count = other.val.count = 4
        rows = [b.val.examples[0] for b in (one, other)]
        assert not (rows[0][:, None] == rows[1]).all(-1).any()


@every_task
def test_the_fixed_examples(task):
    train_rows, val_rows = ({tuple(x) for x, _ in examples(task, 64, s)} for s in ("train", "val"))
    assert not train_rows & val_rows and len(train_rows) == len(val_rows) == 200
    one = batches(task, 64, batch_size=8, task_examples=40)
    known = {tuple(row) for row in one.train.examples[0].tolist()}
    drawn = {tuple(row) for step in range(60) for row in one.micro_batch(step, 0)[0].tolist()}
    assert drawn == known and len(known) == 40
    # An evaluation takes every example of validation once, or some that are spread evenly.
    whole, limited = (np.concatenate(one.val_batches(limit)) for limit in (0, 30))
    assert whole.tolist() == list(range(1280))
    assert len(set(limited)) == 240 and limited[0] == 0 and limited[-1] == 1279


def test_ids_as_text():
    tokenizer, ids = load_tokenizer(TaskTokenizer(120).to_dict()), [3, 0, 119, 12]
    assert tokenizer.encode("\n 3 0 119\t12 ") == ids and tokenizer.eot is None
    assert "3 0 119 12" == tokenizer.decode(ids) == tokenizer.decode(ids[:2]) + "".join(tokenizer.stream(ids[2:]))
    for other in " \n", "1,2", "-1", "120", "²":
        with pytest.raises(UserError, match="numbers from 0 to 119 with blanks between them"):
            tokenizer.encode(other)


def test_what_is_printed_and_logged(tmp_path, capsys):
    """Accuracies are printed and logged, and samples are ids. A config file's tokenizer is not used."""
    argv = runs.arguments("gpt", tmp_path, tmp_path / "nodata", "dataset=task:recall", "task_examples=50")
    argv = [a for a in argv if not a.startswith("tokenizer=")]
    (tmp_path / "x.yaml").write_text("tokenizer: bpe:1024\n")
    train.main([*argv, "sample_tokens=1", f"config={tmp_path / 'x.yaml'}"])
    out, rows = capsys.readouterr().out, checkpoint.read_log(tmp_path / "r" / "log.jsonl")
    assert re.search(r"val ce [\d.]+, val token accuracy [\d.]+, val sequence accuracy [\d.]+ \(best\)", out), out
    assert {"ce", "token_accuracy", "sequence_accuracy"} <= rows[0].keys() and "bpb" not in rows[0]
    assert abs(rows[0]["ce"] - math.log(16)) < 1 and not (tmp_path / "nodata").exists()
    sample.main([str(tmp_path / "r"), "prompt=3 9 1", "max_new_tokens=20"])
    words = capsys.readouterr().out.split("-" * 80)[0].split()
    assert words[:3] == ["3", "9", "1"] and len(words) == 23 and all(0 <= int(w) < 16 for w in words)


def test_accuracies_count_tokens_and_rows_not_micro_batches(tmp_path):
    """Micro-batches differ in their numbers of targets. The fractions are those of all rows at once."""
    def fractions(model, x, y):
        with torch.no_grad():
            right = (model(x)[0].argmax(-1) == y) | (y == -1)
        counts = int((right & (y != -1)).sum()) / int((y != -1).sum()), int(right.all(1).sum()) / len(y)
        return [pytest.approx(n, abs=1e-6) for n in counts]
    names = ["token_accuracy", "sequence_accuracy"]
    trainer = train.setup(runs.arguments(
        "gpt", tmp_path, tmp_path, "dataset=task:recall", "task_examples=50", "gradient_accumulation_steps=5",
        "batch_size=300", "dropout=0", "eval_batches=0", "block_size=6", "tie_embeddings=false"))
    parts = [trainer.batches.micro_batch(0, i) for i in range(5)]
    assert len({int((y != -1).sum()) for _, y in parts}) > 1
    want = fractions(trainer.model, *map(torch.cat, zip(*parts)))
    assert 0 < want[1].expected != want[0].expected > 0
    logged, _ = train.train_step(trainer, [])
    assert [logged[name] for name in names] == want

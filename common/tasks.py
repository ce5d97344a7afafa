"""
Synthetic tasks are data sets that are made while a model trains. They show in minutes what a
sequence model can do.

    python train.py dataset=task:recall block_size=128 run=recall

Inputs stand above targets: target t is the answer after tokens 0..t. A dot is a position that
is not scored. The parentheses hold the vocabulary size and a usual length T (block_size).

recall (16, T 128). An example is pairs of a key (0-7) and a value (8-15). Within an example a key
always has the same value. A value is scored if its key came before, as the last key always did.
    inputs    3  9  0 14  3  9  5  9  0 14
    targets   .  .  .  .  9  .  .  . 14  .

noisy_recall (32, T 128). This is recall, but a pair is two noise tokens (16-31) with probability
0.2.

fuzzy_recall (16, T 128). A key is one to three distinct tokens of 0-6, and a value is one to three
distinct tokens of 7-14. The token 15 pads on the left. In validation all keys have three tokens, as
in MAD.
    inputs   15  4  2  6  9 11  0  5  1  8  4  2  6  9
    targets   .  .  .  .  .  .  .  .  .  .  .  .  9 11

selective_copying (16, T 256). Sixteen letters, each of 0-13, stand among blanks (14). Then come the
copy token (15) and sixteen blanks, at which the letters are scored in order. The picture has three
letters:
    inputs   14 14  7 14  2 14 14 14  7 15 14 14 14
    targets   .  .  .  .  .  .  .  .  .  .  7  2  7

memorization (256, T 32). The insert token (255) follows each key (0-126), and the key's value
(127-254) is scored there. The values are drawn from the seed and are the same in all examples.
    inputs  101 255   3 255 101 255
    targets   . 140   . 222   . 140

copying (27, T 64). An example is T / 2 letters (0-25), the copy token (26), and the letters again.
    inputs    4 19  0 26  4 19
    targets   .  .  .  4 19  0

needles (48, T 64). Eight pairs of a key (0-15, all different) and a value (16-31) are strewn
over filler (32-47). Then all keys follow in another order, each with its value. The picture has
two pairs:
    inputs   40  3 17 33 33 11 30 45 11 30  3 17
    targets   .  .  .  .  .  .  .  . 30  . 17  .

s3 (6, T 32), s5 (120, T 32). These tasks track a state. Tokens are permutations of 3 or 5 elements,
numbered as itertools.permutations lists them. A target is the composition of all tokens so far, of
which the first is applied first. (Attention without absolute positions gives the same output after
the one token p and after the two tokens p p, because it averages equal values. The two targets
differ, unless p is the identity. In five of the 36 pairs of first and second token both are the
same and not the identity, so that a plain Transformer gets at most 31 of 36 rows of s3 wholly
right.)
    inputs    1  2  2  5
    targets   1  3  1  4

All else is drawn uniformly. (In selective_copying each blank falls before a letter that is drawn
uniformly, so that no blank stands after the last one.) Training has 12,800 fixed examples, but
memorization has 256, and needles, s3 and s5 draw new examples at every step. Validation has 1,280
other examples.

The first five are MAD's (Poli et al. 2024, "Mechanistic Design and Scaling of Hybrid
Architectures", github.com/athms/mad-lab). copying is from "Repeat After Me" (Jelassi et al. 2024).
s3 and s5 are from "The Illusion of State in State-Space Models" (Merrill et al. 2024). needles is
like RULER's multi-key, multi-query retrieval (Hsieh et al. 2024).

Where this file differs from MAD's code:
- recall. The last key of an example came before, and its value follows it. MAD drops this value.
- fuzzy_recall. An example takes pairs until one does not fit.
- selective_copying. The seed also draws the blanks.
- compression. The task is missing, because its decoder is not the model's head.
- Training. It scores what validation scores, while MAD scores every next token of the recall tasks.
  Examples are drawn with replacement, not in epochs.
- Accuracy. It is the mean over tokens, not over classes of tokens.
"""
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property, partial

import numpy as np
import torch

from common.data import draw, spread
from common.options import UserError
from common.tokenizer import TaskTokenizer

VAL_EXAMPLES = 1280
MOST_TOKENS = 1 << 27   # the most tokens of examples that are held in memory
# A seed ends in one of these words, so that no two kinds of draws share random numbers. No word is
# 0, because to numpy the seeds [seed, step] and [seed, step, 0] are the same. The seeds of forward
# passes end in 1 (train.seed_forward).
TRAIN, VAL, FRESH, MAP = 2, 3, 4, 5


# ---- one example of each task: (rng, T) -> inputs, targets (-1: not scored), (T,) int64 each ----

def recall(rng, T, noise=0.0):
    pairs = T // 2
    keys, value_of = rng.integers(0, 8, pairs), rng.integers(8, 16, 8)
    noisy = rng.random(pairs) < noise
    noisy[[rng.integers(pairs - 1), -1]] = False    # the last pair, and one that it can ask for
    keys[-1] = rng.choice(np.unique(keys[:-1][~noisy[:-1]]))
    tokens = np.stack([keys, value_of[keys]], 1)    # (pairs, 2)
    tokens[noisy] = rng.integers(16, 32, (noisy.sum(), 2))
    asks = ~noisy
    asks[np.unique(np.where(noisy, -1, keys), return_index=True)[1]] = False    # first of a key
    targets = np.full((pairs, 2), -1)
    targets[asks, 0] = tokens[asks, 1]
    return tokens.ravel(), targets.ravel()


def motifs(rng, count, alphabet, sizes):
    """Return count tuples of distinct tokens of the alphabet, with lengths drawn from sizes."""
    tokens = rng.permuted(np.tile(alphabet, (count, 1)), axis=1).tolist()
    lengths = rng.choice(sizes, count).tolist()
    return [tuple(row[:length]) for row, length in zip(tokens, lengths)]


def fuzzy_recall(rng, T, key_sizes=(1, 2, 3)):
    keys = motifs(rng, T // 2, range(7), key_sizes)
    values = motifs(rng, T // 2, range(7, 15), (1, 2, 3))
    asked = keys[0], values[0]
    value_of, pairs = {keys[0]: values[0]}, []
    room = T + 1 - 2 * len(keys[0] + values[0])     # T + 1: the last token is only a target
    for key, value in zip(keys[1:], values[1:]):
        value = value_of.setdefault(key, value)
        room -= len(key) + len(value)
        if room < 0:
            break
        pairs.append((key, value))
    pairs.insert(rng.integers(len(pairs) + 1), asked)
    tokens, targets, seen = [], [], set()
    for key, value in [*pairs, asked]:
        tokens += key + value
        targets += [-1] * len(key)
        targets += value if key in seen else [-1] * len(value)
        seen.add(key)
    pad = T + 1 - len(tokens)
    return np.array([15] * pad + tokens)[:-1], np.array([-1] * pad + targets)[1:]


def selective_copying(rng, T, letters=16):
    copied = rng.integers(0, 14, letters)
    # blanks before each letter
    blanks = rng.multinomial(T - 2 * letters - 1, np.full(letters, 1 / letters))
    inputs, targets = np.full(T, 14), np.full(T, -1)
    inputs[blanks.cumsum() + np.arange(letters)] = copied
    inputs[T - letters - 1] = 15
    targets[T - letters:] = copied
    return inputs, targets


def memorization(rng, T, values):
    keys = rng.integers(0, 127, T // 2)
    inputs, targets = np.full((T // 2, 2), 255), np.full((T // 2, 2), -1)
    inputs[:, 0], targets[:, 1] = keys, values[keys]
    return inputs.ravel(), targets.ravel()


def copying(rng, T):
    letters = rng.integers(0, 26, T // 2)
    inputs = np.concatenate([letters, [26], letters[:-1]])
    return inputs, np.concatenate([np.full(T // 2, -1), letters])


def needles(rng, T, pairs=8):
    keys, values = rng.permutation(16)[:pairs], rng.integers(16, 32, pairs)
    start = np.sort(rng.choice(T - 3 * pairs, pairs, replace=False)) + np.arange(pairs)
    inputs, targets = rng.integers(32, 48, T), np.full(T, -1)
    inputs[start], inputs[start + 1] = keys, values
    order = rng.permutation(pairs)
    asked = T - 2 * pairs           # where the second part begins
    inputs[asked::2], inputs[asked + 1::2] = keys[order], values[order]
    targets[asked::2] = values[order]
    return inputs, targets


@cache
def compositions(n):
    """Return a table, whose entry [s][p] is the number of the permutation of n elements that
    applies s and then p."""
    permutations = list(itertools.permutations(range(n)))
    number = {p: i for i, p in enumerate(permutations)}
    return [[number[tuple(p[x] for x in s)] for p in permutations] for s in permutations]


def state_tracking(rng, T, n):
    table = compositions(n)
    inputs = rng.integers(0, len(table), T)
    states = itertools.accumulate(inputs.tolist(), lambda s, p: table[s][p])
    return inputs, np.array(list(states))


@dataclass(frozen=True)
class Task:
    make: Callable              # (rng, T) -> inputs, targets
    vocab_size: int
    shortest: int               # least T
    even: bool = False          # whether T must be even
    examples: int = 12_800      # fixed ones to train on (0: fresh ones at every step)


# A new task has a function above, an entry here, an example in the docstring at the top (in the
# same order), and in tests/test_tasks.py its LENGTHS and its check (CHECKS).
TASKS = {
    "recall": Task(recall, 16, 4, even=True),
    "noisy_recall": Task(partial(recall, noise=0.2), 32, 4, even=True),
    "fuzzy_recall": Task(fuzzy_recall, 16, 11),      # 11: the longest pair twice
    "selective_copying": Task(selective_copying, 16, 34),
    "memorization": Task(memorization, 256, 2, even=True, examples=256),
    "copying": Task(copying, 27, 2, even=True),
    "needles": Task(needles, 48, 32, examples=0),
    "s3": Task(partial(state_tracking, n=3), 6, 1, examples=0),
    "s5": Task(partial(state_tracking, n=5), 120, 1, examples=0),
}


# ---- batches ----
# An example depends on (seed, split, its number) or (seed, step, micro-batch) alone.

class TaskData:
    """The examples of one split of a task."""

    def __init__(self, task, T, seed, split, count):
        self.seed, self.split, self.count = seed, split, count
        self.vocab_size, self.tokenizer = task.vocab_size, TaskTokenizer(task.vocab_size)
        self.example = partial(task.make, T=T)
        if task.make is memorization:
            rng = np.random.default_rng([seed, 0, MAP])
            values = 127 + rng.permutation(128)[:127]       # all different
            self.example = partial(memorization, T=T, values=values)
        if task.make is fuzzy_recall and split == VAL:
            self.example = partial(fuzzy_recall, T=T, key_sizes=(3,))

    @cached_property
    def examples(self):
        """All inputs and targets, (count, T) each. They are made when they are first used, which
        takes seconds."""
        seeds = ([self.seed, i, self.split] for i in range(self.count))
        return stack(self.example(np.random.default_rng(seed)) for seed in seeds)


def stack(examples):
    return tuple(torch.from_numpy(np.stack(rows)) for rows in zip(*examples))


class TaskBatches:
    """The micro-batches of a task. The methods are those of TextBatches, and examples stand in the
    place of windows."""

    def __init__(self, cfg, block_size):
        """Raise UserError if the name or the length is impossible."""
        task = TASKS.get(cfg.dataset.removeprefix("task:"))
        if task is None:
            known = ", ".join(f"task:{name}" for name in TASKS)
            raise UserError(f"dataset={cfg.dataset} is unknown: the tasks are {known}")
        if block_size < task.shortest or task.even and block_size % 2:
            raise UserError(f"block_size={block_size} is impossible for dataset={cfg.dataset}: it "
                            f"must be {'an even number, ' * task.even}{task.shortest} or larger")
        count, most = cfg.task_examples or task.examples, MOST_TOKENS // block_size
        if VAL_EXAMPLES > most:
            raise UserError(f"block_size={block_size} is too long for the {VAL_EXAMPLES} examples "
                            f"of an evaluation: it must be at most {MOST_TOKENS // VAL_EXAMPLES}")
        if count > most:
            raise UserError(f"{count} examples of block_size={block_size} are too many to hold in "
                            f"memory: task_examples={most} would fit")
        if cfg.batch_size > most:
            raise UserError(f"batch_size={cfg.batch_size} examples of block_size={block_size} are "
                            f"too many to hold in memory")
        self.seed, self.rows = cfg.seed, cfg.batch_size
        self.accumulation = cfg.gradient_accumulation_steps
        self.train = TaskData(task, block_size, cfg.seed, TRAIN, count)
        self.val = TaskData(task, block_size, cfg.seed, VAL, VAL_EXAMPLES)
        self.fingerprint = f"{cfg.dataset} {cfg.seed} {cfg.task_examples}"

    def val_batches(self, limit):
        """Return the numbers of the validation examples, in micro-batches."""
        return spread(np.arange(VAL_EXAMPLES), self.rows, limit)

    def micro_batch(self, step, index):
        """Return micro-batch `index` of the update after `step` steps. `index` counts over all
        processes."""
        if self.train.count:
            return self.cut(self.train, draw(self.seed, step, self.train.count, self.rows, index,
                                             self.accumulation))
        rng = np.random.default_rng([self.seed, step, index, FRESH])
        return stack(self.train.example(rng) for _ in range(self.rows))

    def cut(self, data, numbers):
        """Return the inputs and targets of some examples, each (B, T) int64."""
        return tuple(rows[numbers] for rows in data.examples)


def count_right(logits, targets):
    """Return two scalar tensors: how many scored targets (not -1) are the model's likeliest token,
    and in how many rows all scored targets are. logits (B, T, V), targets (B, T)."""
    targets = targets.to(logits.device)
    masked, right = targets == -1, logits.argmax(-1) == targets
    return right.sum(), (right | masked).all(1).sum()

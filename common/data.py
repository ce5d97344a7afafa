"""
The data of a run. This file finds the folder of a data set, reads its token files, and cuts batches
from them. With the same data and options, a batch depends only on (seed, step). prepare.py and
lab/eval.py also find here which validation text stands in the training text.
"""
import math
from pathlib import Path

import numpy as np

from common.options import (NAME, UserError, as_command, first_line, open_file, plain_name,
                            read_json, sha256_of)
from common.tokenizer import load_tokenizer

AGAIN = "prepare.py with overwrite=true makes it again"


# ---- the folder of a data set ----

def is_task(dataset):
    return dataset.startswith("task:")


def folder_name(cfg):
    return plain_name(f"{cfg.dataset}-{cfg.tokenizer}")


def data_folder(cfg):
    """Return the folder where the data set of cfg is, or will be made. dataset= may also be the
    name of a folder in data_dir that holds a data set."""
    root = Path(cfg.data_dir).expanduser()
    if NAME.fullmatch(cfg.dataset) and (root / cfg.dataset / "meta.json").exists():
        return root / cfg.dataset
    return root / folder_name(cfg)


def check_dataset(dataset):
    """Raise UserError if dataset= is a path alone, because the kind of a data set (file:, hf:)
    must stand before its path."""
    if dataset and ":" not in dataset and Path(dataset).expanduser().exists():
        raise UserError(f"dataset={dataset} is a path: dataset=file:{dataset} reads a text, a glob "
                        f"or a folder of texts, and dataset=hf:{dataset} reads tables")


def open_data(cfg):
    """Return {"train": TokenData, "val": TokenData} of a prepared data set. Raise UserError if
    there is none, or if the folder was made from another data set. This can happen, because
    folder_name may give two data sets the same name."""
    folder = data_folder(cfg)
    command = as_command("prepare.py", f"dataset={cfg.dataset}", f"tokenizer={cfg.tokenizer}",
                         f"data_dir={cfg.data_dir}")
    if not folder.exists():
        if is_task(cfg.dataset):
            raise UserError(f"dataset={cfg.dataset} is a task: a text is needed here")
        check_dataset(cfg.dataset)
        raise UserError(f"{folder} does not exist: make it with {command}")
    data = load_data(folder)
    meta = data["train"].meta
    made = meta.get("dataset"), meta.get("tokenizer_name")
    if folder.name != cfg.dataset and made != (cfg.dataset, cfg.tokenizer):
        raise UserError(f"{folder} was made with dataset={made[0]} tokenizer={made[1]}: make "
                        f"another with {command} name=NAME, and train with dataset=NAME")
    return data


# ---- token files ----

def load_data(folder) -> dict:
    """Return {"train": TokenData, "val": TokenData} of a folder. Raise UserError if it is not a
    data set."""
    meta = read_json(folder / "meta.json")
    try:
        tokenizer = load_tokenizer(meta["tokenizer"])
        return {split: TokenData(folder, split, meta, tokenizer) for split in ("train", "val")}
    except (KeyError, TypeError, ValueError, OverflowError, UserError) as e:
        problem = f"{type(e).__name__}: {first_line(e)}"
        raise UserError(f"{folder} is not a data set of this project, {problem}: {AGAIN}") from None


class TokenData:
    """The tokens of one split of a prepared data set. Both splits share the meta and the
    tokenizer."""

    def __init__(self, folder, split, meta, tokenizer):
        sizes = meta["splits"][split]
        self.folder, self.split, self.meta, self.tokenizer = folder, split, meta, tokenizer
        self.dtype = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}[meta["dtype"]]
        self.tokens, self.bytes = int(sizes["tokens"]), int(sizes["bytes"])
        self.vocab_size, self.sha256 = tokenizer.vocab_size, sizes["sha256"]
        # The file stays open, because a data set that is made again meanwhile is another file.
        self.path = folder / f"{split}.bin"
        self.file = open_file(self.path)

    def check(self):
        """Raise UserError if the file is not what prepare.py wrote."""
        if sha256_of(self.path) != self.sha256:
            raise UserError(f"{self.path} is damaged, and meta.json has another SHA-256: {AGAIN}")

    def mapped(self) -> np.ndarray:
        """Return all tokens (tokens,) as a mapped file."""
        try:
            return np.memmap(self.file, dtype=self.dtype, mode="r", shape=(self.tokens,))
        except ValueError as e:     # the file is too short
            raise UserError(f"{self.path} is damaged, {first_line(e)}: {AGAIN}") from None

    def windows(self, starts, length) -> np.ndarray:
        """Return the tokens (B, length) int64 that begin at starts (B,), each start in [0, tokens -
        length]. The file is mapped in each call, because a mapping that stays open keeps in memory
        every page that was ever read through it."""
        ids = self.mapped()[np.asarray(starts)[:, None] + np.arange(length)]
        if ids.size and ids.max() >= self.vocab_size:
            raise UserError(f"token {ids.max()} in {self.path} is out of the vocabulary "
                            f"({self.vocab_size} tokens)")
        return ids.astype(np.int64)


# ---- repeated text ----

GRAM = 64           # tokens of a stretch; one that stands in both splits is no coincidence
CHUNK = 1 << 20     # tokens of train that are hashed at once


def grams(ids) -> np.ndarray:
    """Return T - GRAM + 1 hashes of ids (T,). Hash i has 64 bits and covers the GRAM tokens that
    begin at token i."""
    odd, step = np.uint64(0x9E3779B97F4A7C15), 1
    hashes = (np.asarray(ids).astype(np.uint64) + np.uint64(1)) * odd
    while step < GRAM:  # two hashes of `step` tokens make one of twice as many
        hashes = hashes[:-step] * odd + hashes[step:]
        hashes ^= hashes >> np.uint64(29)
        hashes *= np.uint64(0xBF58476D1CE4E5B9)
        hashes ^= hashes >> np.uint64(32)
        step *= 2
    return hashes


def repeated(val, train) -> np.ndarray:
    """Return for each token of val (T,) whether it stands in a stretch of GRAM tokens that occurs
    in train. The tokens of train may be a mapped file, because they are read in chunks."""
    val_hashes = grams(val)
    known = np.unique(val_hashes)
    found = np.zeros(len(known), dtype=bool)
    for start in range(0, len(train) if len(known) else 0, CHUNK):
        hashes = grams(train[start:start + CHUNK + GRAM - 1])
        places = np.searchsorted(known, hashes).clip(max=len(known) - 1)
        found[places[known[places] == hashes]] = True
    starts = np.flatnonzero(found[np.searchsorted(known, val_hashes)])
    # A stretch counts from its start until its end, so that the running sum of these changes is the
    # number of stretches that a token stands in.
    change = np.zeros(len(val) + 1, dtype=np.int64)
    change[starts] += 1
    change[starts + GRAM] -= 1
    return change.cumsum()[:-1] > 0


# ---- batches ----

def draw(seed, step, n_places, rows, index, accumulation):
    """Return `rows` random numbers below n_places, drawn with replacement, for micro-batch number
    `index` of the `accumulation` ones of a step. All rows of an optimizer step are drawn together,
    so that it does not matter which process computes which micro-batch."""
    rng = np.random.default_rng(np.random.SeedSequence([seed, step]))
    return rng.integers(0, n_places, rows * accumulation)[index * rows:(index + 1) * rows]


def spread(starts, rows, limit):
    """Return the starts as a list of micro-batches of `rows` starts; the last may have fewer. If
    limit is not 0, there are at most `limit` micro-batches, whose starts lie evenly among all. The
    result is the same in each evaluation."""
    count = limit * rows
    if 0 < count < len(starts):
        starts = starts[np.linspace(0, len(starts) - 1, count).astype(np.int64)]
    return [starts[i:i + rows] for i in range(0, len(starts), rows)]


class Windows:
    """A window is a stretch of block_size + 1 tokens. Its first block_size tokens are the inputs,
    and its last block_size tokens are the targets. A batch has `rows` windows, and validation reads
    the windows that begin at `starts`."""

    def __init__(self, val, rows, block_size):
        self.val, self.rows, self.length = val, rows, block_size + 1
        self.starts = np.arange(0, self.n_places(val), block_size)

    def n_places(self, data) -> int:
        """Return the number of places where a window can start. Raise UserError if there is
        none."""
        if data.tokens < self.length:
            raise UserError(f"block_size={self.length - 1} is too long for {data.folder}: its "
                            f"{data.split} text has {data.tokens} tokens, so that "
                            f"{data.tokens - 1} is the most")
        return data.tokens - self.length + 1

    def val_batches(self, limit):
        """Return the starts of windows of the validation text, in micro-batches. Without a limit
        the windows follow each other and predict each token but the first once, and a few tokens at
        the end may be left out. With a limit there are fewer windows (see spread)."""
        return spread(self.starts, self.rows, limit)

    def cut(self, data, starts):
        """Return the inputs and targets of some windows, each (B, block_size) int64."""
        import torch  # here, because prepare.py imports this file and starts faster without torch
        windows = torch.from_numpy(data.windows(starts, self.length))
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


class TextBatches(Windows):
    """The micro-batches of a prepared data set. In training, a window starts at any token."""

    def __init__(self, data, cfg, block_size):
        """data is what open_data returns."""
        self.train = data["train"]
        super().__init__(data["val"], cfg.batch_size, block_size)
        self.seed, self.accumulation = cfg.seed, cfg.gradient_accumulation_steps
        for split in data.values():
            split.check()
        self.fingerprint = f"{self.train.sha256} {self.val.sha256}"     # of all that a run reads
        self.micro_batch(0, 0)      # an error comes here, before anything is written

    def micro_batch(self, step, index):
        """Return the inputs and the targets, each (batch_size, block_size) int64, of micro-batch
        `index` of the update after `step` steps. `index` counts over all processes."""
        places = self.n_places(self.train)
        return self.cut(self.train, draw(self.seed, step, places, self.rows, index,
                                         self.accumulation))


def bits_per_byte(ce, data):
    """Return a loss in nats per token as bits per byte of the text of `data`."""
    return ce / math.log(2) * data.tokens / data.bytes

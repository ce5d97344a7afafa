"""
The data of a run: its folder, token files and batches, each a pure function of (seed, step).
"""
import math
import os
from pathlib import Path

import numpy as np

from common.keys import (NAME, UserError, as_command, first_line, note, open_file, plain_name,
                         read_json)
from common.tokenizer import load_tokenizer


# ---- the folder of a data set ----

def is_task(dataset):
    return dataset.startswith("task:")


def folder_name(cfg):
    return plain_name(f"{cfg.dataset}-{cfg.tokenizer}")


def data_folder(cfg):
    """Where the data set of cfg is, or will be made."""
    named = Path(cfg.data_dir) / cfg.dataset
    if NAME.fullmatch(cfg.dataset) and (named / "meta.json").exists():
        return named
    return Path(cfg.data_dir) / folder_name(cfg)


def open_data(cfg):
    """The folder of a prepared data set. UserError if there is none, or if it was made from
    something else, whose name gives the same folder."""
    folder = data_folder(cfg)
    again = as_command("prepare.py", f"dataset={cfg.dataset}", f"tokenizer={cfg.tokenizer}",
                       f"data_dir={cfg.data_dir}")
    if not folder.exists():
        raise UserError(f"{folder} does not exist: make it with {again}")
    meta = read_json(folder / "meta.json")
    made = meta.get("dataset"), meta.get("tokenizer_name")
    if folder.name != cfg.dataset and made != (cfg.dataset, cfg.tokenizer):
        raise UserError(f"{folder} was made with dataset={made[0]} tokenizer={made[1]}: make "
                        f"another with {again} name=NAME, and train with dataset=NAME")
    kind, _, path = cfg.dataset.partition(":")
    source, made_at = Path(path).expanduser(), (folder / "meta.json").stat().st_mtime
    if kind == "file" and source.is_file() and source.stat().st_mtime > made_at:
        note(f"{source} is newer than {folder}: {again} overwrite=true reads it again")
    return folder


# ---- token files ----

class TokenData:
    """The tokens of one split of a prepared data set, and its meta."""

    def __init__(self, folder, split):
        """UserError if the folder is not a data set, or one that is damaged."""
        self.folder, self.split = Path(folder), split
        self.path, self.meta = folder / f"{split}.bin", read_json(folder / "meta.json")
        try:
            self.tokenizer = load_tokenizer(self.meta["tokenizer"])
            self.dtype = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}[self.meta["dtype"]]
            sizes = self.meta["splits"][split]
            self.tokens, self.bytes = int(sizes["tokens"]), int(sizes["bytes"])
            self.vocab_size, self.sha256 = self.tokenizer.vocab_size, sizes["sha256"]
        except (KeyError, TypeError, ValueError, OverflowError, UserError) as e:
            problem = f"{type(e).__name__}: {first_line(e)}"
            raise UserError(f"{folder} is not a data set of this project: {problem}") from None
        # stays open: a data set that is made again meanwhile is another file
        self.file, wanted = open_file(self.path), self.tokens * self.dtype.itemsize
        size = os.fstat(self.file.fileno()).st_size
        if size != wanted:
            raise UserError(f"{self.path} is damaged: {size} bytes, {wanted} expected")

    def windows(self, starts, length) -> np.ndarray:
        """starts (B,), each in [0, tokens - length], -> tokens (B, length) int64. The file is
        mapped every time: a mapping that is kept holds every page it ever touched in memory."""
        tokens = np.memmap(self.file, dtype=self.dtype, mode="r", shape=(self.tokens,))
        ids = tokens[np.asarray(starts)[:, None] + np.arange(length)]
        if ids.size and ids.max() >= self.vocab_size:
            raise UserError(f"token {ids.max()} in {self.path} is out of the vocabulary "
                            f"({self.vocab_size})")
        return ids.astype(np.int64)


# ---- batches ----

class Windows:
    """Windows of block_size + 1 tokens: inputs, and the targets one token later. rows: windows in
    a batch; starts: those to validate on."""

    def __init__(self, val, rows, block_size):
        self.val, self.rows, self.length = val, rows, block_size + 1
        self.starts = np.arange(0, self.n_windows(val), block_size)

    def n_windows(self, data) -> int:
        """The number of places where a window can start. UserError if there is none."""
        if data.tokens < self.length:
            raise UserError(f"block_size={self.length - 1} is too long for {data.folder}: its "
                            f"{data.split} text has {data.tokens} tokens")
        return data.tokens - self.length + 1

    def val_batches(self, limit):
        """The validation text in windows, each token predicted once (a few at its end may be left
        out); with a limit, so many micro-batches. Always the same."""
        starts, count = self.starts, limit * self.rows
        if 0 < count < len(starts):     # spread evenly
            starts = starts[np.linspace(0, len(starts) - 1, count).astype(np.int64)]
        return [starts[i:i + self.rows] for i in range(0, len(starts), self.rows)]

    def cut(self, data, starts):
        import torch  # here: prepare.py, which reads data sets too, starts faster without it
        windows = torch.from_numpy(data.windows(starts, self.length))
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


class TextBatches(Windows):
    """Micro-batches of a prepared data set. A window starts at any token; the windows of one
    optimizer step are drawn together, so who computes which of them changes nothing."""

    def __init__(self, folder, cfg, block_size):
        self.train = TokenData(folder, "train")
        super().__init__(TokenData(folder, "val"), cfg.batch_size, block_size)
        self.seed, self.accumulation = cfg.seed, cfg.gradient_accumulation_steps
        self.fingerprint = f"{self.train.sha256} {self.val.sha256}"     # of all that a run reads
        self.micro_batch(0, 0)      # what is wrong is told before anything is written

    def micro_batch(self, step, index):
        """Micro-batch `index` (over all processes) of the update after `step`: inputs and targets,
        each (batch_size, block_size) int64."""
        rng = np.random.default_rng(np.random.SeedSequence([self.seed, step]))
        starts = rng.integers(0, self.n_windows(self.train), self.rows * self.accumulation)
        return self.cut(self.train, starts[index * self.rows:(index + 1) * self.rows])


def bits_per_byte(ce, data):
    """Nats per token -> bits per byte of the text of `data`."""
    return ce / math.log(2) * data.tokens / data.bytes

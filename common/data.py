"""
Reading token files, and the batches of training: each a pure function of (seed, step).
"""
import json
import math
from pathlib import Path

import numpy as np

from common.keys import NAME, UserError, first_line, read_bytes
from common.tokenizer import load_tokenizer


class TokenData:
    """The tokens of one split of a prepared data set, and its meta.

        data = TokenData("data/python-byte", "train")
        starts = rng.integers(data.n_windows(257), size=8)
        x = data.windows(starts, 257)  # (8, 257) int64
    """

    def __init__(self, folder, split):
        """UserError if the folder is not a data set, or one that is damaged."""
        self.folder, self.split, self.meta = Path(folder), split, read_meta(folder)
        self.vocab_size, splits = self.meta["vocab_size"], self.meta["splits"]
        self.dtype = np.dtype(self.meta["dtype"]).newbyteorder("<")
        if split not in splits:
            raise UserError(f"{folder} has no split {split!r}: there are {', '.join(splits)}")
        info = splits[split]
        self.files, self.counts = info["files"], np.array(info["file_tokens"], dtype=np.int64)
        self.tokens, self.bytes = info["tokens"], info["bytes"]
        self.tokenizer = load_tokenizer(self.meta.get("tokenizer"))
        if self.tokenizer.vocab_size != self.vocab_size:
            raise UserError(f"{folder}/meta.json: vocab_size {self.vocab_size} is not its "
                            "tokenizer's")
        for file, count in zip(self.files, info["file_tokens"]):
            check_size(self.folder / file, count * self.dtype.itemsize)
        self.stamps = [stamp(self.folder / file) for file in self.files]

    def n_windows(self, length) -> int:
        """The number of places where `length` tokens can start, which are all in one file."""
        return int(np.maximum(0, self.counts - length + 1).sum())

    def windows(self, starts, length) -> np.ndarray:
        """starts (B,) in [0, n_windows(length)) -> tokens (B, length) int64. The file is mapped
        every time: a mapping that is kept holds every page it ever touched in memory."""
        starts = np.asarray(starts, dtype=np.int64)
        ends = np.maximum(0, self.counts - length + 1).cumsum()  # of each file's places
        if starts.size and not 0 <= starts.min() <= starts.max() < ends[-1]:
            raise IndexError(f"window starts must be in [0, {ends[-1]})")
        shard = np.searchsorted(ends, starts, side="right")  # (B,)
        out = np.empty((len(starts), length), dtype=np.int64)
        for k in np.unique(shard):
            rows = shard == k
            first = ends[k - 1] if k else 0
            out[rows] = self.read(k, (starts[rows] - first)[:, None] + np.arange(length))
        return out

    def read(self, k, where):
        """The tokens of file k at `where` (int64, any shape)."""
        path = self.folder / self.files[k]
        try:
            ids = np.memmap(path, dtype=self.dtype, mode="r", shape=(int(self.counts[k]),))[where]
            replaced = stamp(path) != self.stamps[k]
        except (OSError, ValueError) as e:
            raise UserError(f"cannot read {path}: {first_line(e)}") from None
        if replaced:
            raise UserError(f"{path} has been replaced while it was in use")
        if ids.size and ids.max() >= self.vocab_size:
            raise UserError(f"token {ids.max()} in {path.name} is out of the vocabulary "
                            f"({self.vocab_size})")
        return ids


def stamp(path):
    """What changes when a file is replaced or written."""
    info = path.stat()
    return info.st_mtime_ns, info.st_size


def read_meta(folder) -> dict:
    """meta.json, with every field that is read here checked."""
    path = Path(folder) / "meta.json"
    try:
        meta = json.loads(read_bytes(path))
    except FileNotFoundError:
        raise UserError(f"{folder} has no meta.json: not a data set; make it with "
                        "python prepare.py dataset=... tokenizer=...") from None
    except (OSError, ValueError, RecursionError) as e:
        raise UserError(f"cannot read {path}: {first_line(e)}") from None
    if not isinstance(meta, dict) or meta.get("format") != 1:
        raise UserError(f"{path} is not of format 1: make the data set again with this prepare.py")
    bad = bad_field(meta)
    if bad:
        raise UserError(f"{path}: {bad} is missing or wrong")
    if meta["dtype"] == "uint16" and meta["vocab_size"] > 1 << 16:
        raise UserError(f"{path}: a vocabulary of {meta['vocab_size']} does not fit dtype uint16")
    return meta


def bad_field(meta):
    """The name of the first field that is missing or wrong, or None."""
    if meta.get("dtype") not in ("uint16", "uint32"):
        return "dtype"
    if type(meta.get("vocab_size")) is not int or not 0 < meta["vocab_size"] <= 1 << 32:
        return "vocab_size"
    if not isinstance(meta.get("splits"), dict):
        return "splits"
    for split, info in meta["splits"].items():
        if not isinstance(info, dict):
            return f"splits.{split}"
        files, counts, n_bytes = (info.get(key) for key in ("files", "file_tokens", "bytes"))
        if not isinstance(files, list) or not all(
                isinstance(f, str) and NAME.fullmatch(f) for f in files):
            return f"splits.{split}.files"
        if not isinstance(counts, list) or not all(
                type(n) is int and 0 < n < 1 << 60 for n in counts):
            return f"splits.{split}.file_tokens"
        if not len(files) == len(counts) > 0:
            return f"the number of splits.{split}.files"
        if info.get("tokens") != sum(counts):
            return f"splits.{split}.tokens"
        if type(n_bytes) is not int or not 0 < n_bytes < 1 << 63:
            return f"splits.{split}.bytes"


def check_size(path, expected):
    try:
        size = path.stat().st_size
    except OSError as e:
        raise UserError(f"cannot read {path}: {e.strerror}") from None
    if not path.is_file():
        raise UserError(f"{path} is not a regular file")
    if size != expected:
        state = "truncated" if size < expected else "too long"
        raise UserError(f"{path} is {state}: {size} bytes, {expected} expected")


# ------------------------------------------------------------------------------------------------
# batches

class Windows:
    """A text to validate on, cut into windows of block_size + 1 tokens: inputs, and the targets
    one token later. rows: windows in a batch."""

    def __init__(self, val, rows, block_size):
        self.val, self.rows, self.length = val, rows, block_size + 1
        self.check(val)

    def check(self, data):
        if data.n_windows(self.length) < 1:
            raise UserError(f"block_size={self.length - 1} is too long for {data.folder}: its "
                            f"{data.split} text has {data.tokens} tokens")

    def val_batches(self, limit):
        """The validation text in windows, each token predicted once (a few at the end of a file
        may be left out); with a limit, so many micro-batches, spread evenly. Always the same."""
        starts = np.arange(0, self.val.n_windows(self.length), self.length - 1)
        if limit and limit * self.rows < len(starts):
            starts = starts[np.linspace(0, len(starts) - 1, limit * self.rows).astype(np.int64)]
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
        self.check(self.train)
        self.seed, self.accumulation = cfg.seed, cfg.gradient_accumulation_steps
        self.micro_batch(0, 0)      # an unreadable file is told before anything is written

    def micro_batch(self, step, index):
        """Micro-batch `index` (over all processes) of the update after `step`: inputs and targets,
        each (batch_size, block_size) int64."""
        rng = np.random.default_rng(np.random.SeedSequence([self.seed, step]))
        n_windows = self.train.n_windows(self.length)
        starts = rng.integers(0, n_windows, self.rows * self.accumulation)
        return self.cut(self.train, starts[index * self.rows:(index + 1) * self.rows])

    def sizes(self):
        return f"{self.train.tokens:,} tokens to train on, {self.val.tokens:,} to validate"


def bits_per_byte(ce, data):
    """Nats per token -> bits per byte of the text of `data`."""
    return ce / math.log(2) * data.tokens / data.bytes

"""
The data of a run: the folder that its keys name, its token files, and the batches of training,
each a pure function of (seed, step).
"""
import contextlib
import hashlib
import json
import math
from pathlib import Path

import numpy as np

from common.keys import NAME, UserError, as_command, first_line, folder_name, note, read_bytes
from common.sources import source_stamp, stamp
from common.tokenizer import load_tokenizer

FORMAT = 2  # of a data set's folder


# ------------------------------------------------------------------------------------------------
# the folder of a data set

def data_folder(cfg):
    """Where the data set of cfg is, or will be made."""
    named = Path(cfg.data_dir) / cfg.dataset
    if NAME.fullmatch(cfg.dataset) and (named / "meta.json").exists():
        return named
    return Path(cfg.data_dir) / folder_name(cfg.dataset, cfg.tokenizer)


def open_data(cfg):
    """The folder of a prepared data set. UserError if there is none, or if it was made from
    something else, whose name gives the same folder. A line tells if its files have changed."""
    folder = data_folder(cfg)
    again = as_command("prepare.py", f"dataset={cfg.dataset}", f"tokenizer={cfg.tokenizer}",
                       f"data_dir={cfg.data_dir}")
    if not folder.exists():
        raise UserError(f"{folder} does not exist: make it with {again}{other_names(cfg, folder)}")
    meta = read_meta(folder)
    for key, name in (("dataset", "dataset"), ("tokenizer", "tokenizer_name")):
        asked, made = getattr(cfg, key), meta.get(name)
        if folder.name != cfg.dataset and made not in (None, asked):
            raise UserError(f"{folder} was made with {key}={made}: make another with {again} "
                            f"name=NAME, and train with dataset=NAME")
    if has_changed(meta):
        note(f"{meta['dataset']} has changed since {folder} was made: prepare.py with "
             f"overwrite=true makes it again")
    return folder


def has_changed(meta) -> bool:
    """Whether the user's files, that the data set was made from, are others since."""
    if meta.get("dataset") == "python" or "source_stamp" not in meta:
        return False
    try:
        return source_stamp(meta["dataset"]) not in ("", meta["source_stamp"])
    except (UserError, OSError):                # they were on another machine
        return False


def other_names(cfg, folder) -> str:
    """Words that tell where else the same source and tokenizer were prepared, by name=."""
    same, found = {"dataset": cfg.dataset, "tokenizer_name": cfg.tokenizer}, []
    for file in sorted(Path(cfg.data_dir).glob("*/meta.json")):
        with contextlib.suppress(UserError):            # not a data set
            if file.parent != folder and read_meta(file.parent).items() >= same.items():
                found.append(f"dataset={file.parent.name}")
    return f"; {', '.join(found)} has the same source and tokenizer" if found else ""


def data_fingerprint(cfg) -> str:
    """A SHA-256 of what a run trains and validates on: the tokens of its data set, or the keys
    that a task's examples depend on."""
    if cfg.dataset.startswith("task:"):
        parts = [cfg.dataset, cfg.seed, cfg.task_examples, cfg.task_next_token]
    else:
        folder = data_folder(cfg)
        parts = [hash_of_tokens(folder, split) for split in ("train", "val")]
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def hash_of_tokens(folder, split) -> str:
    """As prepare.py noted it down; else, which takes longer, of the file."""
    noted = read_meta(folder)["splits"][split].get("sha256")
    if noted:
        return noted
    with open(folder / f"{split}.bin", "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# ------------------------------------------------------------------------------------------------
# token files

class TokenData:
    """The tokens of one split of a prepared data set, and its meta.

        data = TokenData("data/python-byte", "train")
        starts = rng.integers(data.n_windows(257), size=8)
        x = data.windows(starts, 257)  # (8, 257) int64
    """

    def __init__(self, folder, split):
        """UserError if the folder is not a data set, or one that is damaged."""
        self.folder, self.split, self.meta = Path(folder), split, read_meta(folder)
        self.path = self.folder / f"{split}.bin"
        try:
            self.tokenizer = load_tokenizer(self.meta["tokenizer"])
            self.vocab_size = self.tokenizer.vocab_size
            self.dtype = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}[self.meta["dtype"]]
            sizes = self.meta["splits"][split]
            self.tokens, self.bytes = int(sizes["tokens"]), int(sizes["bytes"])
            if min(self.tokens, self.bytes) < 1 or self.meta["vocab_size"] != self.vocab_size:
                raise ValueError("a size is wrong")
        except (KeyError, TypeError, ValueError, OverflowError, UserError) as e:
            problem = f"{type(e).__name__}: {first_line(e)}"
            raise UserError(f"{folder} is not a data set of this project: {problem}") from None
        check_size(self.path, self.tokens * self.dtype.itemsize)
        self.stamp = stamp(self.path)

    def n_windows(self, length) -> int:
        """The number of places where `length` tokens can start."""
        return max(0, self.tokens - length + 1)

    def windows(self, starts, length) -> np.ndarray:
        """starts (B,) in [0, n_windows(length)) -> tokens (B, length) int64"""
        return self.read(np.asarray(starts)[:, None] + np.arange(length)).astype(np.int64)

    def read(self, where):
        """The tokens at `where` (any shape). The file is mapped every time: a mapping that is kept
        holds every page it ever touched in memory."""
        try:
            ids = np.memmap(self.path, dtype=self.dtype, mode="r", shape=(self.tokens,))[where]
            replaced = stamp(self.path) != self.stamp
        except (OSError, ValueError) as e:
            raise UserError(f"cannot read {self.path}: {first_line(e)}") from None
        if replaced:
            raise UserError(f"{self.path} has been replaced while it was in use")
        if ids.size and ids.max() >= self.vocab_size:
            raise UserError(f"token {ids.max()} in {self.path} is out of the vocabulary "
                            f"({self.vocab_size})")
        return ids


def read_meta(folder) -> dict:
    path = Path(folder) / "meta.json"
    try:
        meta = json.loads(read_bytes(path))
    except FileNotFoundError:
        raise UserError(f"{folder} has no meta.json: not a data set; make it with "
                        "python prepare.py dataset=... tokenizer=...") from None
    except (OSError, ValueError, RecursionError) as e:
        raise UserError(f"cannot read {path}: {first_line(e)}") from None
    found = meta.get("format") if isinstance(meta, dict) else None
    if found != FORMAT:
        raise UserError(f"{folder} is of format {found!r:.60}, not {FORMAT}: make the data set "
                        "again with prepare.py")
    return meta


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

def in_batches(numbers, rows, limit):
    """The numbers of windows or examples, `rows` at a time: all of them, or, with a limit, so many
    batches that are spread evenly."""
    if limit and limit * rows < len(numbers):
        numbers = numbers[np.linspace(0, len(numbers) - 1, limit * rows).astype(np.int64)]
    return [numbers[i:i + rows] for i in range(0, len(numbers), rows)]


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
        """The validation text in windows, each token predicted once (a few at its end may be left
        out); with a limit, so many micro-batches. Always the same."""
        starts = np.arange(0, self.val.n_windows(self.length), self.length - 1)
        return in_batches(starts, self.rows, limit)

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

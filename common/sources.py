"""
Where the documents of a data set come from: text files, rows of a table, the Hugging Face hub.
"""
import glob
import hashlib
import json
import logging
import os
import sysconfig
import urllib.request
from pathlib import Path

from common.keys import UserError, first_line, need, read_bytes
from common.tokenizer import HUB_NAME

TEXT = (".txt", ".text", ".md", ".rst", ".tex", ".py", ".c", ".h", ".cc", ".cpp", ".hpp", ".js",
        ".ts", ".java", ".go", ".rs", ".sh")
# tests are a third of the standard library, and Debian's python3 lacks them
NO_TEXT = "test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"
TABLES = ".json", ".csv", ".tsv", ".parquet", ".arrow"  # read as by hf:
SHAKESPEARE = ("https://raw.githubusercontent.com/karpathy/char-rnn/master/data/"
               "tinyshakespeare/input.txt")


def source_files(dataset) -> list:
    """The files of a data set, sorted; none where it comes from the network."""
    kind, _, path = dataset.partition(":")
    path = os.path.expanduser(path)
    if dataset == "python":
        return text_files(sysconfig.get_path("stdlib"), (".py",), NO_TEXT)
    if kind == "file":
        return text_files(path)
    return text_files(path, ("",)) if kind == "hf" and os.path.exists(path) else []


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
        raise UserError(f"{path} is neither a file nor a folder with text files, and none match "
                        "it (hf:FOLDER reads .jsonl, .csv, .parquet)")
    return found


def unreadable(e):
    raise UserError(f"cannot read {e.filename}: {e.strerror}") from None


def source_stamp(dataset) -> str:
    """Another one where a file of the data set was written, added, renamed or removed since; ""
    where it has none."""
    files = [(file, *stamp(Path(file))) for file in source_files(dataset)]
    return hashlib.sha256(repr(files).encode()).hexdigest() if files else ""


def stamp(path):
    """What changes when a file is replaced or written."""
    info = path.stat()
    return info.st_mtime_ns, info.st_size


def file_documents(file, cfg):
    """The text of a file, or the texts of a file of rows; None for what is not UTF-8."""
    kind = Path(file).suffix.lower()
    try:
        if kind == ".jsonl":
            yield from json_lines(file, cfg.text_column)
        elif kind in TABLES:
            yield from hf_documents(file, cfg)
        else:
            yield read_bytes(file).decode("utf-8")
    except UnicodeDecodeError:
        yield None
    except OSError as e:
        unreadable(e)


def json_lines(file, column):
    """A text a line. Other columns may hold anything (the library wants one type in each)."""
    with open(file, "rb") as lines:
        for number, line in enumerate(lines, 1):
            try:
                if line.strip():
                    yield text_of(json.loads(line), column)
            except (ValueError, LookupError, TypeError, RecursionError) as e:
                raise UserError(f"{file}, line {number}, text_column={column}: "
                                f"{type(e).__name__}: {first_line(e)}") from None


def text_of(row, column):
    if not isinstance(row[column], (str, type(None))):
        raise TypeError(f"column {column} holds {type(row[column]).__name__}, not text")
    return row[column]


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
            yield text_of(row, column)
    except Exception as e:  # of the library, the hub or the network
        raise UserError(f"cannot read hf:{name}: {type(e).__name__}: {first_line(e)}") from None


def hf_rows(name, split):
    """Local data by its absolute path, else a data set of the hub. (Of other names the library
    makes its own sense: `text` and `json` read any file below the working directory.)"""
    datasets, path = need("datasets"), Path(name).expanduser().absolute()
    for library in "huggingface_hub", "datasets":  # what fails is told below, once
        logging.getLogger(library).setLevel(logging.CRITICAL)
    datasets.disable_progress_bars()
    if path.exists():
        folder, file = (path, None) if path.is_dir() else (path.parent, glob.escape(path.name))
        return datasets.load_dataset(str(folder), data_files=file, split=split, streaming=True)
    name, _, config = name.partition(":")
    if not HUB_NAME.fullmatch(name):
        raise ValueError("it is neither a folder, a data file nor a hub name (owner/name)")
    return datasets.load_dataset(name, config or None, split=split, streaming=True)

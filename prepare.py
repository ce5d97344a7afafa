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
import base64
import contextlib
import difflib
import errno
import glob
import hashlib
import importlib
import inspect
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
import typing
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from pathlib import Path

import numpy as np
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from tqdm import tqdm

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]*")
DATASETS = "python, python+packages, file:PATH, shakespeare, hf:NAME[:config]"
TOKENIZERS = "byte, char, bpe:SIZE, gpt2, hf:PATH_OR_NAME"
TEXT_EXTENSIONS = ".txt,.text,.md,.rst,.tex,.py,.c,.h,.cc,.cpp,.hpp,.js,.ts,.java,.go,.rs,.sh"
SHAKESPEARE = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
MAX_BPE = 1 << 18
MAX_HF = 1 << 20  # ids of a Hugging Face vocabulary
EOS_TOKENS = "<|endoftext|>", "</s>", "<|end_of_text|>"  # looked for where a model's files do not name its own
SLICE = 1 << 16  # characters encoded at once: tiktoken's regex runs out of stack on runs of 10^6 spaces
BATCH = 1 << 22  # characters handed to the encoding threads at once
CHUNK = 1 << 20  # tokens buffered before they are written
TOKENIZER_BYTES = 200_000_000  # text that a BPE is trained on, and looked at for characters in a stream

# GPT-4's manner of splitting text before byte pairs are merged; no merge crosses these pieces.
PATTERN = "|".join([
    r"'(?i:[sdmt]|ll|ve|re)(?!\p{L})",  # English contractions; not the start of 'data'
    r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+",  # a word, with the one space or sign before it
    r"\p{N}{1,3}",  # numbers, by three digits
    r" ?[^\s\p{L}\p{N}]+[\r\n]*",  # signs, with the line ends after them
    r"\s*[\r\n]+",  # line ends, with blank lines
    r"\s+(?!\S)",  # indentation, but for the last space, which goes with the word
    r"\s+",
])


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


class UserError(Exception):
    """Bad input. The message is one line that names the thing and what is allowed."""


# ---------------------------------------------------------------------------------------------------------
# Command line: key=value arguments, checked against a dataclass


def run_cli(main):
    """main(sys.argv[1:]); a UserError is one line on stderr and exit status 2, never a traceback."""
    if hasattr(sys.stdout, "reconfigure"):  # a terminal that cannot show a character shows a ? instead
        sys.stdout.reconfigure(errors="replace")
    try:
        main(sys.argv[1:])
        sys.stdout.flush()
    except UserError as e:
        sys.stderr.write(f"error: {' '.join(str(e).split())}\n")  # in one piece: other processes may write too
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # the reader (head) has gone: nothing more can be said, at exit neither
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except OSError as e:
        if not e.filename or e.errno != errno.ENAMETOOLONG:
            raise
        longest = max(Path(e.filename).parts, key=len)  # of a path that was given
        sys.stderr.write(f"error: {longest!r:.60} is too long for the name of a file or folder\n")
        sys.exit(2)


def parse_args(argv, schema, free_text=()):
    """key=value arguments as an instance of the dataclass `schema`; help prints the keys and exits 0.
    Keys in `free_text` are taken literally."""
    if asks_help(argv):
        print(help_text(schema), flush=True)
        sys.exit(0)
    return typed_config(schema, split_args(argv), free_text=free_text)


def asks_help(argv) -> bool:
    return bool({"-h", "--help", "help"} & set(argv))


def help_text(schema) -> str:
    """The docstring of the schema's module, then its keys."""
    usage = inspect.getdoc(sys.modules[schema.__module__]) or ""
    return "\n".join([usage, "", "keys, with their defaults:", *key_lines(schema)])


def key_lines(schema) -> list:
    """A line for each key: its default, what it may be, and the comment beside it in the source."""
    comments, lines = field_comments(schema), []
    for f in fields(schema):
        default = str(f.default).lower() if isinstance(f.default, bool) else repr(f.default)
        words = [" | ".join(f.metadata.get("allowed", ())), comments.get(f.name, "")]
        lines.append(f"  {f.name + '=' + default:34} {': '.join(w for w in words if w)}")
    return lines


def field_comments(schema) -> dict:
    """{field: the comment on its line in the source}, so that the meaning of a key is written once; those of the base
    classes too."""
    comments = {}
    for cls in reversed(schema.__mro__):
        with contextlib.suppress(OSError, TypeError):  # a class without source has no comments
            comments.update(re.findall(r"^    (\w+): .*?\s# (.*)$", inspect.getsource(cls), re.MULTILINE))
    return comments


def split_args(argv) -> dict:
    """["a=1", "b=x=y"] -> {"a": "1", "b": "x=y"}; of a key given twice the last value holds."""
    for arg in argv:
        if arg.find("=") < 1:
            raise UserError(f"argument {arg!r} is not of the form key=value")
    return dict(arg.split("=", 1) for arg in argv)


def typed_config(schema, values, base=None, free_text=()):
    """An instance of the dataclass `schema`: its defaults, then `base` (plain values, of a YAML file), then
    `values` (texts, of the command line). UserError names an unknown key or a value of the wrong type."""
    kinds = typing.get_type_hints(schema)
    names = [f.name for f in fields(schema)]
    free, layers = {}, []
    for given in (base or {}), values:
        if not isinstance(given, dict):
            raise UserError(f"a config file holds lines of key: value, got {given!r:.60}")
        for key in given:
            if key not in names:
                raise UserError(unknown_key(str(key), names))
        literal = {k: v for k, v in given.items() if k in free_text and isinstance(v, str)}
        layers.append({k: typed_value(k, v, kinds[k]) for k, v in given.items() if k not in literal})
        free.update(literal)
    try:
        blank = {key: "" for key in free}  # OmegaConf would read ${ and ??? in free text
        config = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(schema), *layers, blank))
        return replace(config, **free) if free else config
    except (OmegaConfBaseException, ValueError) as e:  # ValueError: of the schema's own checks
        raise UserError(first_line(e)) from None


def unknown_key(key, names) -> str:
    near = difflib.get_close_matches(key, names, n=1)
    hint = f"did you mean {near[0]}?" if near else "the keys are " + ", ".join(names)
    return f"unknown key {key!r:.60}: {hint}"


def typed_value(key, value, kind):
    """`value` (text, or plain from a YAML file) as `kind`: int, float, bool, str or Optional of these."""
    if isinstance(value, str) and "${" in value:
        raise UserError(f"{key}: interpolation is not supported, got {value!r:.60}")
    options = typing.get_args(kind) or (kind,)
    if type(None) in options and value in (None, "null", "none", "None"):
        return None
    want = next(t for t in options if t is not type(None))
    try:
        result = convert(value, want)
        if want is not int or abs(result) < 2**63:
            return result
        raise UserError(f"{key}={str(result):.60} must be less than 2^63")
    except (ValueError, OverflowError):
        wanted = {float: "float (finite)", bool: "bool (true or false)", str: "str (in YAML: in quotes)"}
        raise UserError(f"{key}: expected {wanted.get(want, want.__name__)}, got {value!r:.60}") from None


def convert(value, want):
    """Strict: an int is written as one (1000, 1_000; not 2.5, 1e3, true), a float is finite. ValueError."""
    text = type(value) is str
    if want is int and (type(value) is int or text and re.fullmatch("[+-]?[0-9]+(_[0-9]+)*", value)):
        return int(value)
    if want is float and type(value) in (int, float, str) and math.isfinite(float(value)):
        return float(value)
    if want is bool and (type(value) is bool or text and value.lower() in ("true", "false")):
        return str(value).lower() == "true"
    if want is str and text and value != "???" and "\0" not in value:
        return value  # OmegaConf reads ??? as "no value given"; no file name holds a zero byte
    raise ValueError(value)


def read_bytes(path) -> bytes:
    """What a file holds. OSError for a pipe or a device too: reading it may never end."""
    path = Path(path)
    if path.exists() and not path.is_file() and not path.is_dir():
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return path.read_bytes()


def first_line(e) -> str:
    """A foreign exception in one line."""
    return (str(e).strip() or type(e).__name__).splitlines()[0][:300]


# ---------------------------------------------------------------------------------------------------------
# Names


def check_name(name, what="name") -> str:
    """Names of data sets, runs and shards cannot leave their folder: no separators, no leading dot."""
    if not NAME.fullmatch(name) or len(name) > 200:
        raise UserError(f"{what} {name!r:.60} is not allowed: letters, digits and . _ + - (200 at most), "
                        "a letter or digit first")
    return name


def folder_name(dataset, tokenizer) -> str:
    """file:a/b.txt, bpe:512 -> file-a-b.txt-bpe-512"""
    return check_name(re.sub(r"[^A-Za-z0-9._+-]", "-", f"{dataset}-{tokenizer}").lstrip("._+-"))


def is_offline(dataset) -> bool:
    """Whether the data set can be made without a network."""
    return dataset in ("python", "python+packages") or dataset.startswith("file:")


# ---------------------------------------------------------------------------------------------------------
# Tokenizers


class Tokenizer:
    """`pieces`: the bytes each id stands for. End-of-text comes last and stands for none; no text is encoded
    as it, "<|endoftext|>" being thirteen signs like any other."""

    def __init__(self, kind, pieces):
        self.kind = kind
        self.pieces = [*pieces, b""]
        self.vocab_size = len(self.pieces)
        self.eot = self.vocab_size - 1

    def encode(self, text) -> list:
        """Text -> ids. UserError for a character that a char vocabulary lacks, or a lone surrogate."""
        try:
            text.encode()  # tiktoken would replace a surrogate
            return [i for part in slices(text) for i in self.encode_slice(part).tolist()]
        except UnicodeEncodeError as e:
            raise UserError(f"character {e.object[e.start]!r} is not valid Unicode text") from None

    def decode_bytes(self, ids) -> bytes:
        """Ids -> bytes, which may end inside a character. UserError for an id outside the vocabulary."""
        ids = [int(i) for i in ids]
        bad = next((i for i in ids if not 0 <= i < self.vocab_size), None)
        if bad is not None:
            raise UserError(f"token {bad} is out of the vocabulary ({self.vocab_size})")
        return b"".join([self.pieces[i] for i in ids])

    def decode(self, ids) -> str:
        return self.decode_bytes(ids).decode("utf-8", errors="replace")


class ByteTokenizer(Tokenizer):
    def __init__(self):
        super().__init__("byte", [bytes([i]) for i in range(256)])

    def encode_slice(self, text) -> np.ndarray:
        return np.frombuffer(text.encode(), dtype=np.uint8)

    def to_dict(self):
        return {"kind": "byte"}


class CharTokenizer(Tokenizer):
    def __init__(self, chars):
        """chars: the distinct characters, sorted, as one str."""
        if not chars or sorted(set(chars)) != list(chars):
            raise ValueError("chars are not sorted and distinct")
        super().__init__("char", [c.encode() for c in chars])
        self.chars = chars
        self.codes = np.frombuffer(chars.encode("utf-32-le"), "<u4")

    def encode_slice(self, text) -> np.ndarray:
        codes = np.frombuffer(text.encode("utf-32-le"), "<u4")
        ids = np.searchsorted(self.codes, codes).clip(max=len(self.codes) - 1)
        unknown = codes[self.codes[ids] != codes]
        if unknown.size:
            raise UserError(f"character {chr(unknown[0])!r} is not in the char tokenizer's vocabulary")
        return ids

    def to_dict(self):
        return {"kind": "char", "chars": self.chars}


class BPETokenizer(Tokenizer):
    def __init__(self, kind, pattern, ranks):
        """ranks: the bytes of each token in the order of their merging, which is the order of their ids."""
        super().__init__(kind, ranks)
        self.pattern, self.ranks = pattern, {piece: i for i, piece in enumerate(ranks)}
        if len(self.ranks) != len(ranks) or not {bytes([i]) for i in range(256)} <= self.ranks.keys():
            raise ValueError("ranks repeat, or a single byte is missing")
        self.bpe = need("tiktoken").Encoding(
            "nanorecur", pat_str=pattern, mergeable_ranks=self.ranks, special_tokens={})

    def encode_slice(self, text) -> np.ndarray:
        return np.array(self.bpe.encode_ordinary(text), dtype=np.uint32)

    def to_dict(self):
        ranks = " ".join(base64.b64encode(piece).decode() for piece in self.ranks)
        return {"kind": self.kind, "pattern": self.pattern, "ranks": ranks}


class HFTokenizer(Tokenizer):
    """The BPE of a Hugging Face model: one of bytes, as GPT-2's, SmolLM's and Llama 3's, or one with byte fallback,
    as Llama 2's. End-of-text may be any id. No text is encoded as an added token; the special ones stand for no
    bytes, the others for their own text. What the model's own tokenizer does to a text is done to it here too: a
    normalizer may change it (NFC composes its characters), a byte that has no token is left out, and with Llama 2's
    kind U+2581 comes back as a blank."""

    def __init__(self, data, eot):
        """data: what a tokenizer.json holds; eot: the id of end-of-text. ValueError for a tokenizer of another kind,
        KeyError, TypeError, AttributeError or RecursionError for what is none."""
        if type(eot) is not int:
            raise ValueError("end-of-text is not an id")
        spec = hf_spec(data)
        special = {eot, *(token["id"] for token in spec["added_tokens"] if token["special"])}
        self.pieces = hf_pieces(spec, special)
        self.kind, self.eot, self.vocab_size = "hf", eot, len(self.pieces)
        self.text = json.dumps(spec, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
        self.text.encode()  # a lone surrogate is a ValueError
        self.bpe = hf_encoder(spec, special)
        if self.decode(self.encode("  ")) != "  ":
            raise ValueError("a tokenizer that drops blanks is not supported")

    def encode_slice(self, text) -> np.ndarray:
        # a batch of one: unlike the library's encode it lets the other threads run
        return np.array(self.bpe.encode_batch_fast([text], add_special_tokens=False)[0].ids, dtype=np.uint32)

    def to_dict(self):
        return {"kind": "hf", "eot": self.eot, "json": self.text}


class TaskTokenizer(Tokenizer):
    """The token ids of a synthetic task (tasks.py) as text: decimal numbers between blanks. No id ends a text."""

    def __init__(self, vocab_size):
        if type(vocab_size) is not int or not 0 < vocab_size <= 1 << 20:
            raise ValueError("vocab_size is not a number of token ids")
        self.kind, self.vocab_size, self.eot = "task", vocab_size, None
        self.pieces = [f" {i}".encode() for i in range(vocab_size)]

    def encode(self, text) -> list:
        words = text.split()
        bad = [w for w in words if not re.fullmatch("[0-9]{1,7}", w) or int(w) >= self.vocab_size]
        if bad or not words:
            raise UserError(f"a task's tokens are numbers from 0 to {self.vocab_size - 1} with blanks between them, "
                            f"got {bad[0] if bad else text!r:.60}")
        return [int(w) for w in words]

    def decode(self, ids) -> str:
        return super().decode(ids).removeprefix(" ")

    def to_dict(self):
        return {"kind": "task", "vocab_size": self.vocab_size}


def load_tokenizer(d) -> Tokenizer:
    """The tokenizer of a meta.json or a checkpoint; no other file or download is needed. UserError if bad."""
    kind = d.get("kind") if isinstance(d, dict) else None
    try:
        if kind == "byte":
            return ByteTokenizer()
        if kind == "char":
            return CharTokenizer(d["chars"])
        if kind in ("bpe", "gpt2"):
            ranks = [base64.b64decode(piece, validate=True) for piece in d["ranks"].split(" ")]
            return BPETokenizer(kind, d["pattern"], ranks)
        if kind == "hf":
            return HFTokenizer(json.loads(d["json"]), d["eot"])
        if kind == "task":
            return TaskTokenizer(d["vocab_size"])
    except (KeyError, ValueError, TypeError, AttributeError, RecursionError) as e:
        raise UserError(f"malformed {kind} tokenizer: {type(e).__name__} {first_line(e)}") from None
    raise UserError(f"malformed tokenizer of kind {kind!r:.60}: the kinds are byte, char, bpe, gpt2, hf, task")


def bpe_size(name) -> int:
    """bpe:SIZE -> SIZE, and 0 for the other tokenizers; UserError for anything else."""
    match = re.fullmatch(r"bpe:([0-9]{1,9})", name)
    if not match and name not in ("byte", "char", "gpt2") and not re.match("hf:.", name):
        raise UserError(f"unknown tokenizer {name!r:.60}: the tokenizers are {TOKENIZERS}")
    size = int(match[1]) if match else 0
    if match and not 257 < size <= MAX_BPE:
        raise UserError(f"tokenizer {name}: SIZE must be 258 to {MAX_BPE} (256 bytes, merges, end-of-text)")
    return size


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


def train_bpe(size, texts) -> BPETokenizer:
    bpe = need("rustbpe").Tokenizer()
    bpe.train_from_iterator(texts, vocab_size=size - 1, pattern=PATTERN)
    ranks = [bytes(piece) for piece, _ in sorted(bpe.get_mergeable_ranks(), key=lambda rank: rank[1])]
    if len(ranks) < size - 1:
        raise UserError(f"tokenizer bpe:{size}: the text has merges for bpe:{len(ranks) + 1} only; "
                        "take a smaller size, or more text")
    return BPETokenizer("bpe", PATTERN, ranks)


def gpt2_tokenizer() -> BPETokenizer:
    tiktoken = need("tiktoken")
    try:
        gpt2 = tiktoken.get_encoding("gpt2")
    except Exception as e:  # whatever its download raises
        raise UserError("tokenizer gpt2 needs a network once, or its files in TIKTOKEN_CACHE_DIR: "
                        + first_line(e)) from None
    ranks = [gpt2.decode_single_token_bytes(i) for i in range(gpt2.eot_token)]
    return BPETokenizer("gpt2", gpt2._pat_str, ranks)


def hf_tokenizer(name) -> HFTokenizer:
    """The tokenizer of a model's folder or hub name. UserError if there is none, or none that HFTokenizer can be."""
    folder = hf_folder(name)
    data, config = hf_json(folder / "tokenizer.json"), folder / "tokenizer_config.json"
    try:
        spec = hf_spec(data)
        tokenizer = HFTokenizer(spec, hf_eot(spec, hf_json(config) if config.exists() else {}))
    except (KeyError, TypeError, AttributeError, RecursionError) as e:
        raise UserError(f"tokenizer hf:{name}: its files are malformed: {type(e).__name__} {first_line(e)}") from None
    except ValueError as e:
        raise UserError(f"tokenizer hf:{name}: {first_line(e)}") from None
    utf8 = bytes(i for i in range(0xF5) if i not in (0xC0, 0xC1))  # the bytes that occur in it
    lacking = utf8.translate(None, b"".join(piece for piece in tokenizer.pieces if len(piece) == 1))
    if lacking:  # SmolLM's has none for some control characters and for planes where nothing is assigned
        print(f"note: tokenizer hf:{name} has no tokens for the bytes {lacking.hex(' ')} (hexadecimal): they are left "
              "out of the text, as they were for the model")
    return tokenizer


def hf_folder(name) -> Path:
    """The folder that is named, or the local copy of what the hub has under that name."""
    folder = os.path.expanduser(name)
    if os.path.isdir(folder):
        return Path(folder)
    if os.path.exists(folder) or not re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", name):
        raise UserError(f"tokenizer hf:{name} is neither a folder nor a hub name (owner/name)")
    hub = need("huggingface_hub")
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # its retries; a failure is told in one line
    need("huggingface_hub.utils").disable_progress_bars()
    try:
        return Path(hub.snapshot_download(name, allow_patterns=["tokenizer.json", "tokenizer_config.json"]))
    except Exception as e:  # of the library, the hub or the network
        raise UserError(f"tokenizer hf:{name} is not a folder here and cannot be downloaded: {type(e).__name__}: "
                        + first_line(e)) from None


def hf_json(path) -> dict:
    """The object in a JSON file. UserError if there is none."""
    try:
        data = json.loads(read_bytes(path))
    except FileNotFoundError:
        raise UserError(f"{path.parent} has no {path.name}") from None
    except (OSError, ValueError, RecursionError) as e:
        raise UserError(f"cannot read {path}: {first_line(e)}") from None
    if not isinstance(data, dict):
        raise UserError(f"{path} is malformed: it holds no object")
    return data


def hf_eot(spec, config) -> int:
    """The id of end-of-text: eos_token of tokenizer_config.json, or else a usual one. ValueError if there is none."""
    ids = {**spec["model"]["vocab"], **{token["content"]: token["id"] for token in spec["added_tokens"]}}
    named = config.get("eos_token")
    named = named.get("content") if isinstance(named, dict) else named  # as older files have it
    names = EOS_TOKENS if named is None else [named]
    found = [ids[name] for name in names if name in ids]
    if not found:
        raise ValueError(f"the vocabulary has no end-of-text token ({', '.join(names)}): name one as eos_token in "
                         "tokenizer_config.json")
    return found[0]


def hf_spec(data) -> dict:
    """What decides the ids in a tokenizer.json, in one form for its several versions: equal tokenizers are equal
    dicts, and hf_spec(hf_spec(data)) == hf_spec(data). Left out are the cut at a model's context that many files
    ask for, BPE dropout, the unknown token (it may be end-of-text), and the blank that some put before any text:
    it would come back in front of it, and between its slices. ValueError for a kind that is not supported."""
    model, added = data["model"], data.get("added_tokens") or []
    normal = [step for step in hf_steps(data.get("normalizer"), "normalizers") if step["type"] != "Prepend"]
    before = [without_blank(step) for step in hf_steps(data.get("pre_tokenizer"), "pretokenizers")]
    check_hf_model(model, [step["type"] for step in normal + before])
    ids = list(model["vocab"].values())
    in_range = all(type(i) is int and 0 <= i < MAX_HF for i in ids + [token["id"] for token in added])
    if not in_range or len(set(ids)) < len(ids):
        raise ValueError(f"the ids of its vocabulary are not distinct numbers from 0 to {MAX_HF - 1}")
    tokens = [{"id": t["id"], "content": t["content"], "special": t.get("special") is True} for t in added]
    merges = [merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]]
    return {"added_tokens": sorted(tokens, key=lambda token: token["id"]),
            "normalizer": {"type": "Sequence", "normalizers": normal},
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": before},
            "model": {"type": "BPE", "vocab": model["vocab"], "merges": merges,
                      **{key: model.get(key) is True for key in ("byte_fallback", "ignore_merges")}}}


def hf_steps(part, key) -> list:
    """The steps of a normalizer or pre_tokenizer, which may be one, several under `key`, or None."""
    if part is None:
        return []
    if part["type"] == "Sequence":
        return [step for inner in part[key] for step in hf_steps(inner, key)]
    return [part]


def without_blank(step) -> dict:
    """A step of a pre_tokenizer that puts no blank before a text."""
    if step["type"] == "ByteLevel":
        return {**step, "add_prefix_space": False}
    if step["type"] == "Metaspace":
        return {"type": "Metaspace", "replacement": step["replacement"], "prepend_scheme": "never",
                "split": step.get("split", True)}
    return step


def check_hf_model(model, steps):
    """ValueError unless it is a BPE of bytes, or one that has a token of every byte to fall back to."""
    kind = model.get("type") or ("BPE" if "merges" in model else "unknown")  # old files name no type
    if kind != "BPE":
        raise ValueError(f"a {kind} tokenizer is not supported: it must be a BPE of bytes, or one with byte fallback")
    fallback = model.get("byte_fallback") is True and {f"<0x{i:02X}>" for i in range(256)} <= model["vocab"].keys()
    affixed = model.get("continuing_subword_prefix") or model.get("end_of_word_suffix")
    if affixed or not (fallback or "ByteLevel" in steps):
        raise ValueError("this kind of BPE is not supported: it must be one of bytes, as SmolLM's, or one with byte "
                         "fallback, as Llama 2's")
    if "Precompiled" in steps:  # rules in binary, which the library takes on trust
        raise ValueError("a normalizer of kind Precompiled is not supported")


def hf_pieces(spec, special) -> list:
    """The bytes of each id; none for the ids in `special`, and for those that no token has. ValueError for an id
    in `special` that no token has."""
    vocab, added = spec["model"]["vocab"], spec["added_tokens"]
    steps = spec["normalizer"]["normalizers"] + spec["pre_tokenizer"]["pretokenizers"]
    signs = byte_signs() if "ByteLevel" in [step["type"] for step in steps] else None
    others = [token for token in added if vocab.get(token["content"]) != token["id"]]  # they are plain text
    pieces = {i: hf_piece(token, signs) for token, i in vocab.items()}
    pieces.update({token["id"]: token["content"].encode() for token in others})
    if not special <= pieces.keys():
        raise ValueError("end-of-text is not in the vocabulary")
    return [b"" if i in special else pieces.get(i, b"") for i in range(max(pieces) + 1)]


def hf_piece(token, signs) -> bytes:
    """A word of the vocabulary -> the bytes it stands for. signs: byte_signs(), or None where blanks are U+2581."""
    if signs is not None:  # a word with another sign is plain text, as to the library's decoder
        return bytes(signs[c] for c in token) if signs.keys() >= set(token) else token.encode()
    if re.fullmatch("<0x[0-9A-F]{2}>", token):
        return bytes.fromhex(token[3:5])
    return token.replace("\u2581", " ").encode()


def byte_signs() -> dict:
    """{sign: byte} of a vocabulary of bytes: GPT-2 writes those that print as they are, the others as U+0100 and on."""
    printing = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [i for i in range(256) if i not in printing]
    return {**{chr(i): i for i in printing}, **{chr(256 + n): i for n, i in enumerate(others)}}


def hf_encoder(spec, special):
    """The library's tokenizer of a spec, to which `special` ids are unknown: no text can become one."""
    vocab = {token: i for token, i in spec["model"]["vocab"].items() if i not in special}
    known = {**spec, "version": "1.0", "added_tokens": [], "model": {**spec["model"], "vocab": vocab}}
    library = need("tokenizers")
    try:
        return library.Tokenizer.from_str(json.dumps(known))
    except Exception as e:  # it has no class of its own
        raise ValueError(first_line(e)) from None


def need(module):
    try:
        return importlib.import_module(module)
    except ImportError:
        raise UserError(f"the package {module} is missing: pip install {module}") from None


def slices(text, size=SLICE):
    """Cuts a text of any length into slices of at most `size` characters that are encoded one by one. A cut
    before a space that follows a non-space changes no token, as no token of a BPE holds the two; where `size`
    characters have no such place the cut is made anyway, so that one long word costs no quadratic time."""
    start = 0
    while len(text) - start > size:
        cut = text.rfind(" ", start + 1, start + size)
        while cut > start and text[cut - 1].isspace():
            cut = text.rfind(" ", start + 1, cut)
        end = cut if cut > start else start + size
        yield text[start:end]
        start = end
    if start < len(text):
        yield text[start:]


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


def sync_folder(folder):
    """Makes a rename inside folder survive a power cut. (Windows cannot open folders, and needs no such call.)"""
    if os.name == "posix":
        fd = os.open(folder, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)


# ---------------------------------------------------------------------------------------------------------
# Reading


class TokenData:
    """The tokens of one split of a prepared data set, and its meta.

        data = TokenData("data/python-byte", "train")
        starts = rng.integers(data.n_windows(257), size=8)
        x = data.windows(starts, 257)  # (8, 257) int64
    """

    def __init__(self, folder, split):
        """UserError if the folder is not a data set, or one that is damaged."""
        self.folder, self.meta = Path(folder), read_meta(folder)
        self.vocab_size, self.dtype = self.meta["vocab_size"], np.dtype(self.meta["dtype"]).newbyteorder("<")
        if split not in self.meta["splits"]:
            raise UserError(f"{folder} has no split {split!r}: there are {', '.join(self.meta['splits'])}")
        info = self.meta["splits"][split]
        self.files, self.counts = info["files"], np.array(info["file_tokens"], dtype=np.int64)
        self.tokens, self.bytes = info["tokens"], info["bytes"]
        self.tokenizer = load_tokenizer(self.meta.get("tokenizer"))
        if self.tokenizer.vocab_size != self.vocab_size:
            raise UserError(f"{folder}/meta.json: vocab_size {self.vocab_size} is not its tokenizer's")
        for file, count in zip(self.files, info["file_tokens"]):
            check_size(self.folder / file, count * self.dtype.itemsize)

    def n_windows(self, length) -> int:
        """Places where `length` tokens in a row can start; they do not cross from one file to the next."""
        return int(np.maximum(0, self.counts - length + 1).sum())

    def windows(self, starts, length) -> np.ndarray:
        """starts (B,) in [0, n_windows(length)) -> tokens (B, length) int64. The file is mapped anew each
        time: a mapping that is kept holds every page it ever touched in memory."""
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
        except (OSError, ValueError) as e:  # replaced while in use
            raise UserError(f"cannot read {path}: {first_line(e)}") from None
        if ids.size and ids.max() >= self.vocab_size:
            raise UserError(f"token {ids.max()} in {path.name} is out of the vocabulary ({self.vocab_size})")
        return ids


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
        raise UserError(f"{path} is not of format 1: make the data set anew with this prepare.py")
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
        files, counts = info.get("files"), info.get("file_tokens")
        if not isinstance(files, list) or not all(isinstance(f, str) and NAME.fullmatch(f) for f in files):
            return f"splits.{split}.files"
        if not isinstance(counts, list) or not all(type(n) is int and 0 < n < 1 << 60 for n in counts):
            return f"splits.{split}.file_tokens"
        if not len(files) == len(counts) > 0:
            return f"the number of splits.{split}.files"
        if info.get("tokens") != sum(counts):
            return f"splits.{split}.tokens"
        if type(info.get("bytes")) is not int or not 0 < info["bytes"] < 1 << 63:
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


def main(argv):
    prepare(parse_args(argv, PrepareConfig))


if __name__ == "__main__":
    run_cli(main)

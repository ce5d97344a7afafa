"""
Text <-> token ids: bytes, characters, byte-pair encoding trained here, GPT-2's, and those of Hugging Face models.
"""
import base64
import json
import logging
import os
import re
from pathlib import Path

import numpy as np

from config import UserError, first_line, need, read_bytes


TOKENIZERS = "byte, char, bpe:SIZE, gpt2, hf:PATH_OR_NAME"
MAX_BPE = 1 << 18
MAX_HF = 1 << 20  # ids of a Hugging Face vocabulary
EOS_TOKENS = "<|endoftext|>", "</s>", "<|end_of_text|>"  # looked for where a model's files do not name its own
SLICE = 1 << 16  # characters encoded at once: tiktoken's regex runs out of stack on runs of 10^6 spaces
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


# ---------------------------------------------------------------------------------------------------------
# tokenizers

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
# making them

def bpe_size(name) -> int:
    """bpe:SIZE -> SIZE, and 0 for the other tokenizers; UserError for anything else."""
    match = re.fullmatch(r"bpe:([0-9]{1,9})", name)
    if not match and name not in ("byte", "char", "gpt2") and not re.match("hf:.", name):
        raise UserError(f"unknown tokenizer {name!r:.60}: the tokenizers are {TOKENIZERS}")
    size = int(match[1]) if match else 0
    if match and not 257 < size <= MAX_BPE:
        raise UserError(f"tokenizer {name}: SIZE must be 258 to {MAX_BPE} (256 bytes, merges, end-of-text)")
    return size


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


# ---------------------------------------------------------------------------------------------------------
# Hugging Face tokenizers

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

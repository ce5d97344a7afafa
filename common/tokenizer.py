"""
Text <-> token ids: bytes, characters, byte-pair encoding trained here, GPT-2's, and those of
Hugging Face models. to_dict() holds all that load_tokenizer needs: no other file, no download.
"""
import base64
import json
import logging
import math
import os
import re
from pathlib import Path

import numpy as np

from common.keys import UserError, first_line, need, read_bytes

MAX_BPE = 1 << 18
MAX_HF = 1 << 20  # ids of a Hugging Face vocabulary
EOS_TOKENS = "<|endoftext|>", "</s>", "<|end_of_text|>"  # where a model's files name none
SLICE = 1 << 16  # characters encoded at once: tiktoken's stack overflows on 10^6 spaces
# How GPT-4 splits text before byte pairs are merged; no merge crosses these pieces.
PATTERN = "|".join([
    r"'(?i:[sdmt]|ll|ve|re)(?!\p{L})",  # English contractions; not the start of 'data'
    r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+",  # a word, with one space or sign before it
    r"\p{N}{1,3}",  # numbers, by three digits
    r" ?[^\s\p{L}\p{N}]+[\r\n]*",  # signs, with the line ends after them
    r"\s*[\r\n]+",  # line ends, with blank lines
    r"\s+(?!\S)",  # indentation, but for the last space, which goes with the word
    r"\s+",
])


# ------------------------------------------------------------------------------------------------
# tokenizers

class Tokenizer:
    """No text is encoded as end-of-text: "<|endoftext|>" is thirteen characters like any other."""

    def __init__(self, pieces, eot, saved):
        """pieces: the bytes of each id; eot: the id of end-of-text; saved: what makes it again."""
        self.pieces, self.eot, self.saved = pieces, eot, saved
        self.kind, self.vocab_size = saved["kind"], len(pieces)

    def to_dict(self) -> dict:
        return dict(self.saved)

    def encode(self, text) -> list:
        """Text -> ids. UserError for a lone surrogate, or a character unknown to char."""
        try:
            text.encode()  # tiktoken would replace a surrogate
        except UnicodeEncodeError as e:
            raise UserError(f"character {text[e.start]!r} is not valid Unicode text") from None
        return [i for part in slices(text) for i in self.encode_slice(part).tolist()]

    def decode_bytes(self, ids) -> bytes:
        """Ids -> bytes, which may end inside a character. UserError for an unknown id."""
        for i in ids:
            if not 0 <= i < self.vocab_size:
                raise UserError(f"token {i} is out of the vocabulary ({self.vocab_size})")
        return b"".join([self.pieces[i] for i in ids])

    def decode(self, ids) -> str:
        return self.decode_bytes(ids).decode("utf-8", errors="replace")


class ByteTokenizer(Tokenizer):
    def __init__(self):
        pieces = [bytes([i]) for i in range(256)]
        super().__init__([*pieces, b""], 256, {"kind": "byte"})

    def encode_slice(self, text) -> np.ndarray:
        return np.frombuffer(text.encode(), dtype=np.uint8)


class CharTokenizer(Tokenizer):
    def __init__(self, chars):
        """chars: the distinct characters, sorted, as one str."""
        if not chars or sorted(set(chars)) != list(chars):
            raise ValueError("chars are not sorted and distinct")
        pieces = [c.encode() for c in chars]
        super().__init__([*pieces, b""], len(chars), {"kind": "char", "chars": chars})
        self.codes = np.frombuffer(chars.encode("utf-32-le"), "<u4")

    def encode_slice(self, text) -> np.ndarray:
        codes = np.frombuffer(text.encode("utf-32-le"), "<u4")
        ids = np.searchsorted(self.codes, codes).clip(max=len(self.codes) - 1)
        unknown = codes[self.codes[ids] != codes]
        if unknown.size:
            raise UserError(f"character {chr(unknown[0])!r} is not in the char tokenizer's "
                            "vocabulary")
        return ids


class BPETokenizer(Tokenizer):
    def __init__(self, kind, pattern, ranks):
        """ranks: the bytes of each token, in the order of the merges and so of the ids."""
        ids = {piece: i for i, piece in enumerate(ranks)}
        if len(ids) != len(ranks) or not {bytes([i]) for i in range(256)} <= ids.keys():
            raise ValueError("ranks repeat, or a single byte is missing")
        text = " ".join(base64.b64encode(piece).decode() for piece in ranks)
        saved = {"kind": kind, "pattern": pattern, "ranks": text}
        super().__init__([*ranks, b""], len(ranks), saved)
        self.bpe = need("tiktoken").Encoding(
            "nanorecur", pat_str=pattern, mergeable_ranks=ids, special_tokens={})

    def encode_slice(self, text) -> np.ndarray:
        return np.array(self.bpe.encode_ordinary(text), dtype=np.uint32)


class HFTokenizer(Tokenizer):
    """The BPE of a Hugging Face model: one of bytes, as GPT-2's, SmolLM's and Llama 3's, or one
    with byte fallback, as Llama 2's. End-of-text may be any id. No text is encoded as an added
    token; special ones have no bytes, the others those of their text. The model's normalizer is
    kept, a byte without a token is left out, and U+2581 is a blank to Llama 2's kind."""

    def __init__(self, data, eot):
        """data: what a tokenizer.json holds. ValueError for a tokenizer of another kind, KeyError,
        TypeError or AttributeError for what is none."""
        spec = hf_spec(data)
        special = {eot, *(token["id"] for token in spec["added_tokens"] if token["special"])}
        self.bpe = hf_encoder(spec, special)
        text = json.dumps(spec, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
        saved = {"kind": "hf", "eot": eot, "json": text}
        super().__init__(hf_pieces(spec, special), eot, saved)
        sample = " 0  0\U0001d306"  # a rare character: has it tokens for bytes?
        if self.decode(self.encode(sample)) != sample:
            raise ValueError("it must be a BPE of bytes, as SmolLM's, or one with byte fallback, "
                             "as Llama 2's")

    def encode_slice(self, text) -> np.ndarray:
        # a batch of one: unlike the library's encode it lets the other threads run
        encoding, = self.bpe.encode_batch_fast([text], add_special_tokens=False)
        return np.array(encoding.ids, dtype=np.uint32)


class TaskTokenizer(Tokenizer):
    """The token ids of a synthetic task (tasks.py) as text: decimal numbers between blanks. There
    is no end-of-text."""

    def __init__(self, vocab_size):
        if type(vocab_size) is not int or not 0 < vocab_size <= 1 << 20:
            raise ValueError("vocab_size is not a number of token ids")
        pieces = [f" {i}".encode() for i in range(vocab_size)]
        super().__init__(pieces, None, {"kind": "task", "vocab_size": vocab_size})

    def encode(self, text) -> list:
        words = text.split()
        bad = [w for w in words if not re.fullmatch("[0-9]{1,7}", w) or int(w) >= self.vocab_size]
        if bad or not words:
            raise UserError(f"a task's tokens are numbers from 0 to {self.vocab_size - 1} with "
                            f"blanks between them, got {bad[0] if bad else text!r:.60}")
        return [int(w) for w in words]

    def decode(self, ids) -> str:
        return super().decode(ids).removeprefix(" ")


def load_tokenizer(saved) -> Tokenizer:
    """The tokenizer of a meta.json or a checkpoint. UserError if it is malformed."""
    kind = saved.get("kind") if isinstance(saved, dict) else None
    try:
        if kind == "byte":
            return ByteTokenizer()
        if kind == "char":
            return CharTokenizer(saved["chars"])
        if kind in ("bpe", "gpt2"):
            ranks = [base64.b64decode(p, validate=True) for p in saved["ranks"].split(" ")]
            return BPETokenizer(kind, saved["pattern"], ranks)
        if kind == "hf":
            return HFTokenizer(json.loads(saved["json"]), saved["eot"])
        if kind == "task":
            return TaskTokenizer(saved["vocab_size"])
        raise ValueError("the kinds are byte, char, bpe, gpt2, hf, task")
    except (KeyError, ValueError, TypeError, AttributeError, RecursionError) as e:
        problem = f"{type(e).__name__}: {first_line(e)}"
        raise UserError(f"malformed {kind!s:.60} tokenizer: {problem}") from None


def slices(text, size=SLICE):
    """Cuts a text into slices of at most `size` characters, which are encoded one by one. A cut
    before a space that follows a non-space changes no token, as no token of a BPE holds the two.
    Where there is no such place the cut is made anyway: a long word would cost quadratic time."""
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


# ------------------------------------------------------------------------------------------------
# making them

def bpe_size(name) -> int:
    """bpe:SIZE -> SIZE, and 0 for the other tokenizers; UserError for anything else."""
    match = re.fullmatch(r"bpe:([0-9]{1,9})", name)
    if not match and name not in ("byte", "char", "gpt2") and not re.match("hf:.", name):
        raise UserError(f"unknown tokenizer {name!r:.60}: the tokenizers are byte, char, "
                        "bpe:SIZE, gpt2, hf:PATH_OR_NAME")
    size = int(match[1]) if match else 0
    if match and not 257 < size <= MAX_BPE:  # 256 bytes, merges, end-of-text
        raise UserError(f"tokenizer {name}: SIZE must be 258 to {MAX_BPE}")
    return size


def train_bpe(size, texts) -> BPETokenizer:
    bpe = need("rustbpe").Tokenizer()
    bpe.train_from_iterator(texts, vocab_size=size - 1, pattern=PATTERN)
    ranks = sorted(bpe.get_mergeable_ranks(), key=lambda rank: rank[1])
    if len(ranks) < size - 1:
        raise UserError(f"tokenizer bpe:{size}: the text has merges for bpe:{len(ranks) + 1} "
                        "only; take a smaller size, or more text")
    return BPETokenizer("bpe", PATTERN, [bytes(piece) for piece, _ in ranks])


def gpt2_tokenizer() -> BPETokenizer:
    tiktoken = need("tiktoken")
    try:
        gpt2 = tiktoken.get_encoding("gpt2")
    except Exception as e:  # whatever its download raises
        raise UserError("tokenizer gpt2 needs a network once, or its files in "
                        f"TIKTOKEN_CACHE_DIR: {first_line(e)}") from None
    ranks = [gpt2.decode_single_token_bytes(i) for i in range(gpt2.eot_token)]
    return BPETokenizer("gpt2", gpt2._pat_str, ranks)


# ------------------------------------------------------------------------------------------------
# Hugging Face tokenizers

def hf_tokenizer(name) -> HFTokenizer:
    """The tokenizer of a model's folder or hub name."""
    folder = hf_folder(name)
    data, config = hf_json(folder / "tokenizer.json"), folder / "tokenizer_config.json"
    config = hf_json(config) if config.exists() else {}
    try:
        spec = hf_spec(data)
        tokenizer = HFTokenizer(spec, hf_eot(spec, config))
    except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as e:
        problem = f"{type(e).__name__}: {first_line(e)}"
        raise UserError(f"tokenizer hf:{name} cannot be used: {problem}") from None
    lacking = {*range(0xF5)} - {0xC0, 0xC1} - {p[0] for p in tokenizer.pieces if len(p) == 1}
    if lacking:  # SmolLM's: some control characters, and planes where nothing is assigned
        print(f"note: tokenizer hf:{name} leaves out the bytes {bytes(sorted(lacking)).hex(' ')} "
              "(hexadecimal), as it did for the model: it has no tokens for them")
    return tokenizer


def hf_folder(name) -> Path:
    """The folder that is named, or the local copy of what the hub has under that name."""
    folder = Path(os.path.expanduser(name))
    if folder.is_dir():
        return folder
    if folder.exists() or not re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", name):
        raise UserError(f"tokenizer hf:{name} is neither a folder nor a hub name (owner/name)")
    hub = need("huggingface_hub")
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # without its retries
    need("huggingface_hub.utils").disable_progress_bars()
    files = ["tokenizer.json", "tokenizer_config.json"]
    try:
        return Path(hub.snapshot_download(name, allow_patterns=files))
    except Exception as e:  # of the library, the hub or the network
        raise UserError(f"tokenizer hf:{name} is not a folder here and cannot be downloaded: "
                        f"{type(e).__name__}: {first_line(e)}") from None


def hf_json(path):
    try:
        return json.loads(read_bytes(path))
    except (OSError, ValueError, RecursionError) as e:
        raise UserError(f"cannot read {path}: {first_line(e)}") from None


def hf_eot(spec, config) -> int:
    """The id of end-of-text: eos_token of tokenizer_config.json, or else a usual one."""
    added = {token["content"]: token["id"] for token in spec["added_tokens"]}
    ids = {**spec["model"]["vocab"], **added}
    named = config.get("eos_token")
    if isinstance(named, dict):  # as older files have it
        named = named["content"]
    names = EOS_TOKENS if named is None else [named]
    found = [ids[name] for name in names if name in ids]
    if not found:
        raise ValueError(f"the vocabulary has no end-of-text token ({', '.join(names)}): name "
                         "one as eos_token in tokenizer_config.json")
    return found[0]


def hf_spec(data) -> dict:
    """What decides the ids in a tokenizer.json, in one form for its several versions: equal
    tokenizers have equal specs, and the spec of a spec is itself. Left out are a cut at the
    model's context, BPE dropout, the unknown token (it may be end-of-text), and the blank that
    some put before any text: it would also come between the slices of a text."""
    model, kind = data["model"], data["model"].get("type") or "BPE"  # old files name no type
    if kind != "BPE":
        raise ValueError(f"a {kind} tokenizer is not supported: it must be a BPE")
    if model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):
        raise ValueError("a BPE whose words have prefixes or suffixes is not supported")
    tokens = [{"id": t["id"], "content": t["content"], "special": t.get("special") is True}
              for t in data.get("added_tokens") or []]
    merges = [merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]]
    flags = {key: model.get(key) is True for key in ("byte_fallback", "ignore_merges")}
    normalizers = hf_steps(data.get("normalizer"), "normalizers")
    before = hf_steps(data.get("pre_tokenizer"), "pretokenizers")
    return {"added_tokens": sorted(tokens, key=lambda token: token["id"]),
            "normalizer": {"type": "Sequence", "normalizers": normalizers},
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": before},
            "model": {"type": "BPE", "vocab": model["vocab"], "merges": merges, **flags}}


def hf_steps(part, key) -> list:
    """The steps of a normalizer or pre_tokenizer (None, one, or several under `key`), none of
    which puts a blank before a text."""
    if part is None or part["type"] == "Prepend":
        return []
    if part["type"] == "Sequence":
        return [step for inner in part[key] for step in hf_steps(inner, key)]
    if part["type"] == "Precompiled":  # rules in binary, which the library does not check
        raise ValueError("a normalizer of kind Precompiled is not supported")
    if part["type"] == "Metaspace":
        return [{"type": "Metaspace", "replacement": part["replacement"],
                 "prepend_scheme": "never", "split": part.get("split", True)}]
    return [{**part, "add_prefix_space": False} if "add_prefix_space" in part else part]


def hf_encoder(spec, special):
    """The library's tokenizer, which does not know the `special` ids: no text becomes one."""
    words = {word: i for word, i in spec["model"]["vocab"].items() if i not in special}
    model = {**spec["model"], "vocab": words}
    known = {**spec, "version": "1.0", "added_tokens": [], "model": model}
    library = need("tokenizers")
    try:
        return library.Tokenizer.from_str(json.dumps(known))
    except Exception as e:  # it has no class of its own
        raise ValueError(first_line(e)) from None


def hf_pieces(spec, special) -> list:
    """The bytes of each id; none for the ids in `special`, and for those that no token has."""
    vocab, steps = spec["model"]["vocab"], spec["pre_tokenizer"]["pretokenizers"]
    steps = steps + spec["normalizer"]["normalizers"]
    signs = byte_signs() if any(step["type"] == "ByteLevel" for step in steps) else None
    pieces = {i: hf_piece(word, signs) for word, i in vocab.items()}
    for token in spec["added_tokens"]:
        if vocab.get(token["content"]) != token["id"]:  # not a word of the vocabulary: plain text
            pieces[token["id"]] = token["content"].encode()
    ids = set(vocab.values())
    if len(ids) < len(vocab) or not special <= pieces.keys() or max(pieces) >= MAX_HF:
        raise ValueError(f"its ids must be distinct, below {MAX_HF}, and hold end-of-text")
    return [b"" if i in special else pieces.get(i, b"") for i in range(max(pieces) + 1)]


def hf_piece(word, signs) -> bytes:
    """The bytes of a word. signs: byte_signs(), or None where blanks are U+2581."""
    if signs:  # a word with another sign is plain text, as to the library's decoder
        return bytes(signs[c] for c in word) if signs.keys() >= set(word) else word.encode()
    if re.fullmatch("<0x[0-9A-F]{2}>", word):
        return bytes.fromhex(word[3:5])
    return word.replace("\u2581", " ").encode()


def byte_signs() -> dict:
    """{sign: byte} in a vocabulary of bytes. GPT-2 writes the bytes that print as they are, the
    others as U+0100 and on."""
    printing = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [i for i in range(256) if i not in printing]
    return {**{chr(i): i for i in printing}, **{chr(256 + n): i for n, i in enumerate(others)}}


# how the library makes text of words: signs of bytes, or blanks as U+2581 and bytes as <0x41>
BYTE_DECODER = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True,
                "use_regex": False}
BLANK_DECODER = {"type": "Sequence", "decoders": [
    {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "},
    {"type": "ByteFallback"}, {"type": "Fuse"}]}


def to_huggingface(tokenizer, folder):
    """Write tokenizer.json and tokenizer_config.json for transformers. False for the kinds that are
    no BPE of bytes (char, and the numbers of tasks). "<|endoftext|>" is one token there."""
    if tokenizer.kind == "hf":
        spec, eot = json.loads(tokenizer.saved["json"]), tokenizer.eot
        steps = spec["normalizer"]["normalizers"] + spec["pre_tokenizer"]["pretokenizers"]
        in_bytes = any(step["type"] == "ByteLevel" for step in steps)
        spec["decoder"] = BYTE_DECODER if in_bytes else BLANK_DECODER
    elif tokenizer.kind in ("byte", "bpe", "gpt2"):
        signs = {byte: sign for sign, byte in byte_signs().items()}
        words = ["".join(signs[byte] for byte in piece) for piece in tokenizer.pieces[:-1]]
        split = [{"type": "Split", "pattern": {"Regex": tokenizer.saved["pattern"]},
                  "behavior": "Isolated", "invert": False}] if tokenizer.kind != "byte" else []
        eot = len(words)
        spec = {"added_tokens": [{"id": eot, "content": EOS_TOKENS[0], "special": True}],
                "normalizer": None,
                "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*split, {
                    "type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True,
                    "use_regex": False}]},
                "decoder": BYTE_DECODER,
                "model": {"type": "BPE", "vocab": {word: i for i, word in enumerate(words)},
                          "merges": merges(words)}}
    else:
        return False
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    added = [{**flags, **token} for token in spec["added_tokens"]]
    name = next((t["content"] for t in added if t["id"] == eot), None)
    write = lambda file, value: (Path(folder) / file).write_text(json.dumps(value, indent=1) + "\n")
    write("tokenizer.json", {"version": "1.0", **spec, "added_tokens": added})
    write("tokenizer_config.json",
          {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": name})
    return True


def merges(words):
    """The pair that each word of a BPE is made of: what merging by the words before it leaves."""
    rank, found = {word: i for i, word in enumerate(words)}, []
    for word in words:
        parts = list(word)
        while len(parts) > 2:
            ranks = [rank.get(a + b, math.inf) for a, b in zip(parts, parts[1:])]
            i = ranks.index(min(ranks))
            parts[i:i + 2] = [parts[i] + parts[i + 1]]
        found += [parts] if len(parts) == 2 else []
    return found

"""
Text <-> token ids: bytes, characters, byte-pair encoding trained here, GPT-2's, and those of
Hugging Face models. to_dict() holds all that load_tokenizer needs: no other file, no download.
"""
import base64
import codecs
import json
import re
import sys

import numpy as np

from common.keys import UserError, first_line, need

MAX_BPE = 1 << 18
EOS_TOKENS = "<|endoftext|>", "</s>", "<|end_of_text|>"  # where a model's files name none
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
MARK = "\U0010ffff"  # a character that no token holds
PROBE = "0  0 a b\U0001d306"  # with one that only tokens of bytes spell
# characters encoded at once: tiktoken's stack overflows on 10^6 spaces
SLICE = 1 << 16
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
GPT2_PATTERN = (r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+"
                r"| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")


class Tokenizer:
    """No text is encoded as end-of-text: "<|endoftext|>" is thirteen characters like any other."""

    def __init__(self, pieces, eot, kind, **made_of):
        """pieces: the bytes of each id; eot: the id of end-of-text; kind, made_of: the class and
        its arguments."""
        self.pieces, self.vocab_size, self.eot = pieces, len(pieces), eot
        self.kind, self.made_of = kind, made_of

    def to_dict(self) -> dict:
        return {"kind": self.kind, **self.made_of}

    def encode(self, text) -> list:
        """Text -> ids. UserError for a lone surrogate, or a character unknown to char."""
        try:
            text.encode()  # tiktoken would replace a surrogate
        except UnicodeEncodeError as e:
            raise UserError(f"character {text[e.start]!r} is not valid Unicode text") from None
        parts = [self.encode_slice(part, n == 0) for n, part in enumerate(slices(text))]
        return [i for ids in parts for i in ids.tolist()]

    def decode_bytes(self, ids) -> bytes:
        """Ids -> bytes, which may end inside a character."""
        return b"".join([self.pieces[i] for i in ids])

    def decode(self, ids) -> str:
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    def stream(self, ids):
        """Yields the text that each id adds; a character of several tokens comes with its last.
        Then, once more, what is left: U+FFFD for a character that was not finished."""
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        for i in ids:
            yield decoder.decode(self.decode_bytes([i]))
        yield decoder.decode(b"", final=True)


class ByteTokenizer(Tokenizer):
    def __init__(self):
        super().__init__([*(bytes([i]) for i in range(256)), b""], 256, "byte")

    def encode_slice(self, text, first=True) -> np.ndarray:
        return np.frombuffer(text.encode(), dtype=np.uint8)


class CharTokenizer(Tokenizer):
    def __init__(self, chars):
        chars = "".join(sorted(set(chars)))
        super().__init__([*map(str.encode, chars), b""], len(chars), "char", chars=chars)
        self.ids = np.full(sys.maxunicode + 1, -1)      # of each character; -1: unknown
        self.ids[list(map(ord, chars))] = range(len(chars))

    def encode_slice(self, text, first=True) -> np.ndarray:
        ids = self.ids[np.frombuffer(text.encode("utf-32-le"), "<u4")]
        if (ids < 0).any():
            char = text[int(ids.argmin())]
            raise UserError(f"character {char!r} is not in the char tokenizer's vocabulary")
        return ids


class BPETokenizer(Tokenizer):
    def __init__(self, pattern, ranks):
        """ranks: each token in base64, in the order of the merges and so of the ids."""
        pieces = [base64.b64decode(piece) for piece in ranks.split()]
        ids = {piece: i for i, piece in enumerate(pieces)}
        if len(ids) != len(pieces) or not {bytes([i]) for i in range(256)} <= ids.keys():
            raise ValueError("ranks repeat, or a byte is missing")  # tiktoken would panic
        super().__init__([*pieces, b""], len(pieces), "bpe", pattern=pattern, ranks=ranks)
        self.bpe = need("tiktoken").Encoding(
            "nanorecur", pat_str=pattern, mergeable_ranks=ids, special_tokens={})

    def encode_slice(self, text, first=True) -> np.ndarray:
        return np.array(self.bpe.encode_ordinary(text), dtype=np.uint32)


class HFTokenizer(Tokenizer):
    """A Hugging Face model's that gives every text back: a BPE of bytes (GPT-2, SmolLM, Llama 3)
    or one with byte fallback (Llama 2). Ids and text are those of the library `tokenizers`, but no
    text becomes a special token, and none is added."""

    def __init__(self, json, eos=None):
        """json: the text of a tokenizer.json; eos: that of end-of-text."""
        self.library, eos = hf_library(json, eos)
        added = self.library.get_added_tokens_decoder().values()
        special = {token.content for token in added if token.special}
        super().__init__(hf_pieces(self.library, special), self.library.token_to_id(eos), "hf",
                         eos=eos, json=self.library.to_str())
        # some put a blank before a text: between slices, before a mark that no token joins
        self.mark, self.n_mark = "", 0
        if self.decode_bytes(self.encode("a")).startswith(b" "):
            self.n_mark, self.mark = len(self.encode(MARK)), MARK
        ids = self.encode(text := PROBE + " ".join(sorted(special)))
        if {self.decode(ids).strip(), self.decode_bytes(ids).decode().strip()} != {text}:
            raise ValueError("not every text comes back, as from a BPE with tokens for all bytes")

    def encode_slice(self, text, first=True) -> np.ndarray:
        # a batch of one: unlike the library's encode it lets the other threads run
        batch = [text if first else self.mark + text]
        encoding, = self.library.encode_batch_fast(batch, add_special_tokens=False)
        return np.array(encoding.ids, dtype=np.uint32)[0 if first else self.n_mark:]

    def decode(self, ids) -> str:
        """The text that begins with these ids. (What they add to a text is stream's.)"""
        return self.library.decode(ids)


class TaskTokenizer(Tokenizer):
    """The token ids of a synthetic task (tasks.py) as text: decimal numbers between blanks. There
    is no end-of-text."""

    def __init__(self, vocab_size):
        pieces = [f" {i}".encode() for i in range(vocab_size)]
        super().__init__(pieces, None, "task", vocab_size=vocab_size)

    def encode(self, text) -> list:
        ids, words = {str(i): i for i in range(self.vocab_size)}, text.split()
        if not words or not set(words) <= ids.keys():
            raise UserError(f"a task's tokens are numbers from 0 to {self.vocab_size - 1} with "
                            f"blanks between them, got {text!r:.60}")
        return [ids[word] for word in words]

    def decode(self, ids) -> str:
        return super().decode(ids).removeprefix(" ")


KINDS = {"byte": ByteTokenizer, "char": CharTokenizer, "bpe": BPETokenizer, "hf": HFTokenizer,
         "task": TaskTokenizer}


def load_tokenizer(saved) -> Tokenizer:
    """The tokenizer of a meta.json or a checkpoint. UserError if it is malformed."""
    try:
        made_of = {name: value for name, value in saved.items() if name != "kind"}
        return KINDS[saved["kind"]](**made_of)
    except UserError:  # of a missing package
        raise
    except Exception as e:  # the libraries have no classes of their own
        raise UserError(f"malformed tokenizer: {type(e).__name__}: {first_line(e)}") from None


def slices(text, size=SLICE):
    """Cuts a text into slices of at most `size` characters, which are encoded one by one. A cut
    before a space that follows a non-space changes no token where none holds the two, as in a BPE
    of words. Where there is no such place the cut is made anyway."""
    most = rf"(?s:.{{1,{size}}})"
    pattern = rf"{most}\Z|{most}(?<=\S)(?= )|{most}"
    return (match[0] for match in re.finditer(pattern, text))


# ---- making them ----

def train_bpe(size, texts) -> BPETokenizer:
    if not 257 < size <= MAX_BPE:  # 256 bytes, merges, end-of-text
        raise UserError(f"tokenizer bpe:{size}: the size must be 258 to {MAX_BPE}")
    bpe = need("rustbpe").Tokenizer()
    bpe.train_from_iterator(texts, vocab_size=size - 1, pattern=PATTERN)
    ranks = sorted(bpe.get_mergeable_ranks(), key=lambda rank: rank[1])
    if len(ranks) < size - 1:
        raise UserError(f"tokenizer bpe:{size}: the text has merges for bpe:{len(ranks) + 1} "
                        "only; take a smaller size, or more text")
    return BPETokenizer(PATTERN, in_base64(bytes(piece) for piece, _ in ranks))


def gpt2_tokenizer() -> BPETokenizer:
    """By tiktoken, which takes a fraction of the time of hf:openai-community/gpt2."""
    tiktoken = need("tiktoken")
    try:
        gpt2 = tiktoken.get_encoding("gpt2")
    except Exception as e:  # whatever its download raises
        raise UserError("tokenizer gpt2 needs a network once, or its files in "
                        f"TIKTOKEN_CACHE_DIR: {first_line(e)}") from None
    ranks = map(gpt2.decode_single_token_bytes, range(gpt2.eot_token))
    return BPETokenizer(GPT2_PATTERN, in_base64(ranks))


def in_base64(pieces) -> str:
    return " ".join(base64.b64encode(piece).decode() for piece in pieces)


# ---- words of Hugging Face vocabularies ----

def byte_signs() -> dict:
    """{sign: byte} in a vocabulary of bytes. GPT-2 writes the bytes that print as they are, the
    others as U+0100 and on."""
    printing = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [i for i in range(256) if i not in printing]
    return {**{chr(i): i for i in printing}, **{chr(256 + n): i for n, i in enumerate(others)}}


def hf_library(text, eos):
    """A tokenizer.json as the library reads it, without what depends on more than the text, and
    without what adds special tokens or makes them from text. And its end-of-text, which is found
    where none is given."""
    data = {**json.loads(text), "truncation": None, "padding": None, "post_processor": None}
    data["model"].pop("dropout", None)
    library = need("tokenizers").Tokenizer.from_str(json.dumps(data))
    vocab = library.get_vocab()
    eos = eos or next((token for token in EOS_TOKENS if token in vocab), None)
    if eos not in vocab:
        raise ValueError("no end-of-text token: name one of its vocabulary as eos_token in "
                         "tokenizer_config.json")
    library.add_special_tokens([eos])
    library.encode_special_tokens = True
    return library, eos


def hf_pieces(library, special) -> list:
    """The bytes that each id adds to a text, maybe a part of a character; special tokens and
    unused ids add nothing."""
    vocab, of_bytes = library.get_vocab(), "ByteLevel" in str(library.decoder)
    pieces, signs = [b""] * (max(vocab.values()) + 1), byte_signs()
    for word, i in vocab.items():
        if word in special:
            continue
        if of_bytes:    # only added tokens have other signs
            known = signs.keys() >= set(word)
            pieces[i] = bytes(map(signs.get, word)) if known else word.encode()
        elif re.fullmatch("<0x[0-9A-F]{2}>", word):
            pieces[i] = bytes.fromhex(word[3:5])
        else:
            pieces[i] = word.replace("▁", " ").encode()
    return pieces

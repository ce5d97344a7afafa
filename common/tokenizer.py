"""
Text <-> token ids: bytes, characters, byte-pair encoding trained here, GPT-2's, and those of
Hugging Face models. to_dict() holds all that load_tokenizer needs, so that it reads no other file
and downloads nothing.
"""
import base64
import contextlib
import os
import re
import sys
from unicodedata import normalize

import numpy as np

from common.options import UserError, first_line, need

MAX_BPE = 1 << 18
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
SURROGATE = re.compile("[\ud800-\udfff]")  # half of a character in UTF-16
MARK = "\U0010ffff"  # no token holds this character
# The most characters that are encoded at once, because tiktoken's stack overflows on 10^6 spaces.
SLICE = 1 << 16
# Text is split into these pieces before byte pairs are merged, and no merge crosses them. This is
# GPT-4's pattern with two changes: a contraction does not begin a longer word ('data), and a word
# may hold combining marks.
PATTERN = "|".join([
    r"'(?i:[sdmt]|ll|ve|re)(?!\p{L})",  # English contractions
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
    """The base of all kinds. A kind has two methods of its own: encode_slice(text, first) returns
    the ids of a slice of a text, as an array (but for TaskTokenizer, which has encode), and
    spell(ids) returns the bytes of ids. No text is encoded as end-of-text: "<|endoftext|>" is
    thirteen characters like any other."""
    # `after` and `stream` put these ids before those that they decode, and cut their text off
    # again, because some tokenizers treat a text's first token in another way (see HFTokenizer).
    anchor = ()

    def __init__(self, vocab_size, eot, kind, /, **made_of):
        """eot is the id of end-of-text. kind and made_of are the class and its arguments."""
        self.vocab_size, self.eot, self.kind, self.made_of = vocab_size, eot, kind, made_of

    def to_dict(self) -> dict:
        return {"kind": self.kind, **self.made_of}

    def encode(self, text) -> list:
        """Return the ids of a text. Raise UserError for a lone surrogate, or a character that a
        char tokenizer does not know."""
        if wrong := SURROGATE.search(text):     # tiktoken would replace it
            raise UserError(f"character {wrong[0]!r} is not valid Unicode text")
        parts = [self.encode_slice(part, n == 0) for n, part in enumerate(slices(text))]
        return [i for ids in parts for i in ids.tolist()]

    def decode_bytes(self, ids) -> bytes:
        """Return the bytes of ids. End-of-text has none. If the bytes end inside a character,
        the kind hf gives U+FFFD for the unfinished one."""
        ids = np.asarray(ids, dtype=np.int64)
        return self.spell(ids[ids != self.eot])

    def decode(self, ids) -> str:
        """Return the text of ids that stand at the beginning of a text."""
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    def after(self, ids, before=None) -> str:
        """Return the text that ids add to the text of the ids before them."""
        before = self.anchor if before is None else before
        return self.decode([*before, *ids])[len(self.decode(before)):]

    def stream(self, ids):
        """Yield the text that each id adds to a text, then the text of the ids that still wait. Ids
        wait while their text ends in U+FFFD, because its character may be unfinished. An unfinished
        character has at most three bytes, so at most three ids wait."""
        before, waiting = self.anchor, []
        for i in ids:
            if i != self.eot:   # it has no text
                waiting.append(i)
            unfinished = self.after(waiting, before).endswith("\ufffd")
            ready = waiting[:-3] if unfinished else waiting[:]
            text = self.after(ready, before)
            before = ready if text else before
            del waiting[:len(ready)]
            yield text
        yield self.after(waiting, before)


class ByteTokenizer(Tokenizer):
    def __init__(self):
        super().__init__(257, 256, "byte")

    def encode_slice(self, text, first) -> np.ndarray:
        return np.frombuffer(text.encode(), dtype=np.uint8)

    def spell(self, ids):
        return ids.astype(np.uint8).tobytes()


class CharTokenizer(Tokenizer):
    def __init__(self, chars):
        chars = "".join(sorted(set(chars)))
        super().__init__(len(chars) + 1, len(chars), "char", chars=chars)
        self.codes = np.frombuffer(chars.encode("utf-32-le"), "<u4")    # of each id
        self.ids = np.full(sys.maxunicode + 1, -1)                      # of each code; -1: unknown
        self.ids[self.codes] = range(len(chars))

    def encode_slice(self, text, first) -> np.ndarray:
        ids = self.ids[np.frombuffer(text.encode("utf-32-le"), "<u4")]
        if (ids < 0).any():
            char = text[int(ids.argmin())]
            raise UserError(f"character {char!r} is not in the char tokenizer's vocabulary")
        return ids

    def spell(self, ids):
        return self.codes[ids].tobytes().decode("utf-32-le").encode()


class BPETokenizer(Tokenizer):
    def __init__(self, pattern, ranks):
        """ranks has each token in base64, in the order of the merges and so of the ids."""
        pieces = [base64.b64decode(piece) for piece in ranks.split()]
        ids = {piece: i for i, piece in enumerate(pieces)}
        if len(ids) != len(pieces) or not {bytes([i]) for i in range(256)} <= ids.keys():
            raise ValueError("ranks repeat, or a byte is missing")  # tiktoken would panic
        super().__init__(len(ids) + 1, len(ids), "bpe", pattern=pattern, ranks=ranks)
        self.bpe = need("tiktoken").Encoding(
            "nanorecur", pat_str=pattern, mergeable_ranks=ids, special_tokens={})
        text = "".join(map(chr, range(512)))    # a broken pattern may leave out some, or panic
        check_back(text, self.decode(self.encode(text)))

    def encode_slice(self, text, first) -> np.ndarray:
        return np.array(self.bpe.encode_ordinary(text), dtype=np.uint32)

    def spell(self, ids):
        return self.bpe.decode_bytes(ids.tolist())


class HFTokenizer(Tokenizer):
    """A tokenizer of the library `tokenizers`, as huggingface.py reads it from a model. Ids and
    text are those of the library, but no text becomes a special token, and none is added."""

    def __init__(self, json, eos):
        """json is the text of a tokenizer.json, eos the text of its end-of-text token."""
        self.library = need("tokenizers").Tokenizer.from_str(json)
        self.library.encode_special_tokens = True   # their text is encoded as any other
        vocab = self.library.get_vocab()
        super().__init__(max(vocab.values()) + 1, vocab[eos], "hf", eos=eos, json=json)
        self.anchor = self.encode("a")
        # Some tokenizers put a blank before a text. With these, a slice of a text that is not its
        # first is encoded behind a mark, which no token joins.
        n_mark = len(self.encode(MARK))
        blank = self.encode(MARK + "a")[n_mark:] != self.anchor
        self.mark, self.n_mark = (MARK, n_mark) if blank else ("", 0)

    def encode_slice(self, text, first) -> np.ndarray:
        # This is a batch of one: unlike the library's encode it lets the other threads run.
        batch = [text if first else self.mark + text]
        encoding, = self.library.encode_batch_fast(batch, add_special_tokens=False)
        return np.array(encoding.ids, dtype=np.uint32)[0 if first else self.n_mark:]

    def spell(self, ids):
        return self.library.decode(ids.tolist()).encode()


class TaskTokenizer(Tokenizer):
    """The token ids of a synthetic task (tasks.py) are decimal numbers between blanks. There is no
    end-of-text."""
    anchor = (0,)

    def __init__(self, vocab_size):
        super().__init__(vocab_size, None, "task", vocab_size=vocab_size)

    def encode(self, text) -> list:
        ids, words = {str(i): i for i in range(self.vocab_size)}, text.split()
        if not words or not set(words) <= ids.keys():
            raise UserError(f"a task's tokens are numbers from 0 to {self.vocab_size - 1} with "
                            f"blanks between them, got {text!r:.60}")
        return [ids[word] for word in words]

    def spell(self, ids):
        return " ".join(map(str, ids)).encode()


KINDS = {"byte": ByteTokenizer, "char": CharTokenizer, "bpe": BPETokenizer, "hf": HFTokenizer,
         "task": TaskTokenizer}


def load_tokenizer(saved) -> Tokenizer:
    """Return the tokenizer of a meta.json or a checkpoint. Raise UserError if it is malformed."""
    try:
        made_of = {name: value for name, value in saved.items() if name != "kind"}
        with no_panic():
            return KINDS[saved["kind"]](**made_of)
    except UserError:  # of a missing package
        raise
    except Exception as e:  # the libraries have no classes of their own
        raise UserError(f"malformed tokenizer: {type(e).__name__}: {first_line(e)}") from None


@contextlib.contextmanager
def no_panic():
    """Inside, a panic of a library in Rust is a ValueError, and what Rust prints about it is not
    shown. pyo3's PanicException is no Exception."""
    sys.stderr.flush()
    shown, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    except BaseException as e:
        if type(e).__module__ != "pyo3_runtime":
            raise
        raise ValueError(first_line(e)) from None
    finally:
        os.dup2(shown, 2)
        os.close(shown)
        os.close(nowhere)


def check_back(text, back) -> str:
    """Return `back`, which is a text that was encoded and decoded. Raise UserError if it is
    another text. It may have another, canonically equivalent form, as Unicode's NFC is, and blanks
    in place of "▁", which is SentencePiece's sign of a blank."""
    canonical = lambda t: normalize("NFC", t).replace("▁", " ")
    if text != back and canonical(text) != canonical(back):
        at = len(os.path.commonprefix([text, back]))
        raise UserError(f"not every text comes back from the tokenizer: {text[at:at + 20]!r} "
                        f"comes as {back[at:at + 20]!r}")
    return back


def slices(text, size=SLICE):
    """Cut a text into slices of at most `size` characters, which are encoded one by one. A cut
    before a space that follows a non-space changes no token if no token holds both characters, as
    in a BPE of words. The cut is made elsewhere if there is no such place."""
    most = rf"(?s:.{{1,{size}}})"
    pattern = rf"{most}\Z|{most}(?<=\S)(?= )|{most}"
    return (match[0] for match in re.finditer(pattern, text))


# ---- making them ----

def train_bpe(size, texts) -> BPETokenizer:
    if not 257 < size <= MAX_BPE:  # 256 bytes, merges, end-of-text
        raise UserError(f"tokenizer bpe:{size}: the size must be 258 to {MAX_BPE}")
    tokenizers, signs = need("tokenizers"), byte_signs()
    library = tokenizers.Tokenizer(tokenizers.models.BPE())
    library.pre_tokenizer = words_of_bytes(PATTERN)
    # The signs stand first, in the order of their bytes, so that the byte values are ids. Pairs
    # that are equally frequent are merged in the order of their ids.
    library.train_from_iterator(texts, tokenizers.trainers.BpeTrainer(
        vocab_size=size - 1, special_tokens=[*signs], show_progress=False))
    vocab = library.get_vocab()
    if len(vocab) < size - 1:
        raise UserError(f"tokenizer bpe:{size}: the text has merges for bpe:{len(vocab) + 1} "
                        "only; take a smaller size, or more text")
    words = sorted(vocab, key=vocab.get)
    return BPETokenizer(PATTERN, in_base64(bytes(map(signs.get, word)) for word in words))


def byte_signs() -> dict:
    """Return {sign: byte} in the order of the bytes. The library writes bytes in a vocabulary as
    GPT-2 did: bytes that print stand for themselves, and the others are U+0100 and on."""
    printing = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = (chr(code) for code in range(256, 512))
    return {chr(i) if i in printing else next(others): i for i in range(256)}


def words_of_bytes(pattern):
    """Return the library's pre-tokenizer of a BPE of bytes. No merge crosses the pieces of the
    pattern. Without a pattern a text is one piece."""
    library = need("tokenizers")
    steps = library.pre_tokenizers
    split = [steps.Split(library.Regex(pattern), "isolated")] if pattern else []
    return steps.Sequence([*split, steps.ByteLevel(add_prefix_space=False, use_regex=False)])


def gpt2_tokenizer() -> BPETokenizer:
    """Return GPT-2's tokenizer by tiktoken, which takes a fraction of the time of the same one as
    hf:openai-community/gpt2."""
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

"""prepare.py: tokenizers, sources, splits, shards, what stops and failures leave behind, and bad input."""
import base64
import codecs
import contextlib
import hashlib
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Optional

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import config
from tokenizer import ByteTokenizer, CharTokenizer, HFTokenizer, SLICE, hf_tokenizer, load_tokenizer, slices, train_bpe
import prepare
from config import UserError
from data import TokenData
from prepare import PrepareConfig

ROOT = Path(prepare.__file__).parent
EOT = "<|endoftext|>"
exact = settings(derandomize=True, deadline=None, database=None)
WORDS = ("the cat sat on a mat and the dog sat on the log, then they all went home again; however, nobody "
         "recognised the yellow building behind which seventeen quiet musicians practised. ") * 20


def make(root, **keys):
    """Prepares a data set below root and returns its folder."""
    return prepare.prepare(PrepareConfig(data_dir=str(root / "data"), **keys))


def write_docs(folder, docs):
    folder.mkdir(parents=True, exist_ok=True)
    for i, doc in enumerate(docs):
        (folder / f"{i:03}.txt").write_bytes(doc if isinstance(doc, bytes) else doc.encode())
    return f"file:{folder}"


def ids_of(folder, split):
    data = TokenData(folder, split)
    files = data.meta["splits"][split]["files"]
    return np.concatenate([np.fromfile(folder / f, data.meta["dtype"]) for f in files]).tolist()


def docs_of(folder, split):
    """The documents of a split, cut at the end-of-text tokens."""
    tokenizer, docs, doc = TokenData(folder, split).tokenizer, [], []
    for i in ids_of(folder, split):
        if i == tokenizer.eot:
            docs.append(tokenizer.decode(doc))
            doc = []
        else:
            doc.append(i)
    return docs + ([tokenizer.decode(doc)] if doc else [])


def tree(folder):
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def run(*argv, cwd, **options):
    """prepare.py as a user runs it."""
    return subprocess.run([sys.executable, str(ROOT / "prepare.py"), *argv], cwd=cwd, text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=60, **options)


def cli(monkeypatch, capsys, *argv):
    """The same in this process: (exit status, stdout, stderr)"""
    monkeypatch.setattr(sys, "argv", ["prepare.py", *argv])
    status = 0
    try:
        config.run_cli(prepare.main)
    except SystemExit as e:
        status = e.code
    return status, *capsys.readouterr()


@pytest.fixture(scope="module")
def bpe():
    return train_bpe(300, iter([WORDS + "\n        indented" * 100]))


SPECIAL = [EOT, "<|im_start|>", "<pad>"]  # ids 0 to 2, as SmolLM has its own


def write_model(folder, data, **config):
    """A model's folder: data as its tokenizer.json, and a tokenizer_config.json of the keys given."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(data), encoding="utf-8")
    if config:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return f"hf:{folder}"


def smollm(size=340):
    """The tokenizer.json of a small BPE of bytes with SmolLM's parts, trained by the library."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    library, parts = Tokenizer(models.BPE()), pre_tokenizers
    library.pre_tokenizer = parts.Sequence([parts.Digits(True), parts.ByteLevel(add_prefix_space=False)])
    library.decoder = decoders.ByteLevel()
    library.train_from_iterator([WORDS + "\n        indented" * 100], trainers.BpeTrainer(
        vocab_size=size, special_tokens=SPECIAL, initial_alphabet=parts.ByteLevel.alphabet(), show_progress=False))
    return json.loads(library.to_str())


def llama2(**parts):
    """The tokenizer.json of a tiny BPE with byte fallback, of Llama 2's form."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *"\u2581acht<>/s"]
    words += ["at", "\u2581c", "\u2581cat"]
    added = [{"id": i, "content": words[i], "single_word": False, "lstrip": False, "rstrip": False,
              "normalized": False, "special": True} for i in range(3)]
    normal = [{"type": "Prepend", "prepend": "\u2581"},
              {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}]
    return {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added,
            "normalizer": {"type": "Sequence", "normalizers": normal}, "pre_tokenizer": None,
            "post_processor": None, "decoder": None,
            "model": {"type": "BPE", "unk_token": "<unk>", "fuse_unk": True, "byte_fallback": True,
                      "vocab": {word: i for i, word in enumerate(words)},
                      "merges": ["a t", "\u2581 c", "\u2581c at"]}, **parts}


@pytest.fixture(scope="module")
def hf():
    return HFTokenizer(smollm(), 0)


@pytest.fixture
def docs():
    """Forty documents, some of them not ASCII."""
    return [f"document {i}: {'naïve 你好 ' * (i % 3)}{WORDS[: 50 * i]}\n" for i in range(40)]


def texts():
    special = st.sampled_from([EOT, "  \n\n ", "你好", "\U0001f600", "\r\n", "e\u0301", "'data's"])
    return st.lists(st.one_of(st.text(), special), max_size=8).map("".join)


# Tokenizers


@exact
@given(text=texts())
def test_byte_round_trip(text):
    tokenizer = ByteTokenizer()
    assert tokenizer.encode(text) == list(text.encode())
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert (tokenizer.vocab_size, tokenizer.eot) == (257, 256)


@exact
@given(text=texts().filter(bool))
def test_char_round_trip(text):
    tokenizer = CharTokenizer("".join(sorted(set(text))))
    again = load_tokenizer(json.loads(json.dumps(tokenizer.to_dict())))
    ids = tokenizer.encode(text)
    assert len(ids) == len(text) and again.decode(ids) == text and again.encode(text) == ids
    assert tokenizer.vocab_size == len(set(text)) + 1 and tokenizer.eot not in ids


@exact
@given(text=texts())
def test_bpe_round_trip(bpe, text):
    again = load_tokenizer(json.loads(json.dumps(bpe.to_dict())))
    ids = bpe.encode(text)
    assert again.decode_bytes(ids) == text.encode() and again.encode(text) == ids
    assert all(0 <= i < bpe.eot for i in ids)


def test_bpe_merges(bpe):
    assert (bpe.kind, bpe.vocab_size, bpe.eot) == ("bpe", 300, 299)
    assert len(bpe.encode(WORDS)) < 0.6 * len(WORDS)
    assert b" the" in bpe.pieces


@pytest.mark.parametrize("name", ["byte", "bpe", "hf"])
def test_end_of_text_is_ordinary_text_and_decodes_to_nothing(name, bpe, hf):
    tokenizer = {"byte": ByteTokenizer(), "bpe": bpe, "hf": hf}[name]
    ids = tokenizer.encode(f"a{EOT}b")
    assert tokenizer.eot not in ids and tokenizer.decode(ids) == f"a{EOT}b"
    assert tokenizer.decode([tokenizer.eot, *ids, tokenizer.eot]) == f"a{EOT}b"
    assert tokenizer.decode([]) == "" and tokenizer.encode("") == []


def test_decode_replaces_broken_characters():
    assert ByteTokenizer().decode("é".encode()[:1]) == "\ufffd"


@pytest.mark.parametrize("ids", [[257], [-1], np.array([3, 300])])
def test_decode_refuses_ids_outside_the_vocabulary(ids):
    with pytest.raises(UserError, match=r"token (257|-1|300) is out of the vocabulary \(257\)"):
        ByteTokenizer().decode(ids)


def test_unknown_character_is_named():
    with pytest.raises(UserError, match="'z'"):
        CharTokenizer("abc").encode("abza")


@pytest.mark.parametrize("name", ["byte", "char", "bpe", "hf"])
def test_lone_surrogate_is_refused(name, bpe, hf):
    tokenizer = {"byte": ByteTokenizer(), "char": CharTokenizer("ab"), "bpe": bpe, "hf": hf}[name]
    with pytest.raises(UserError, match="udc80"):
        tokenizer.encode("a\udc80b")


def bpe_dict(**changes):
    ranks = " ".join(base64.b64encode(bytes([i])).decode() for i in range(256))
    return {"kind": "bpe", "pattern": r"\S+|\s+", "ranks": ranks, **changes}


@pytest.mark.parametrize("bad", [
    None, [], "byte", {}, {"kind": None}, {"kind": ["byte"]}, {"kind": "tiktoken"}, {"kind": "char"},
    {"kind": "char", "chars": ""}, {"kind": "char", "chars": "ba"}, {"kind": "char", "chars": "aab"},
    {"kind": "char", "chars": 5}, {"kind": "char", "chars": ["a", "b"]}, {"kind": "char", "chars": "\ud800"},
    {"kind": "bpe"}, bpe_dict(pattern="("), bpe_dict(pattern=7), bpe_dict(ranks=7), bpe_dict(ranks=""),
    bpe_dict(ranks="!!!"), bpe_dict(ranks="YQ== YQ=="), bpe_dict(ranks=bpe_dict()["ranks"] + " YQ=="),
    bpe_dict(ranks=bpe_dict()["ranks"][5:]), {**bpe_dict(), "kind": "gpt3"}])
def test_malformed_tokenizers(bad):
    assert load_tokenizer(bpe_dict()).vocab_size == 257
    with pytest.raises(UserError, match="malformed"):
        load_tokenizer(bad)


@pytest.mark.parametrize("unit", [" ", "a", "\n", "a b", " \n", "\u0301", "!", "\u00a0", "\t"])
def test_a_very_large_document_is_encoded_quickly(bpe, unit):
    text = (unit * 1_000_000)[:1_000_000]
    start = time.monotonic()
    ids = bpe.encode(text)
    assert time.monotonic() - start < 5
    assert bpe.decode(ids) == text
    train_bpe(258, slices(text + WORDS))


@exact
@given(words=st.lists(st.text(st.sampled_from("abé1!'\n"), min_size=1, max_size=6), max_size=60),
       gaps=st.lists(st.sampled_from([" ", "  ", "         ", " \n", "\n      "]), min_size=60, max_size=60))
def test_slices_change_no_token(bpe, words, gaps):
    text = "".join(w + g for w, g in zip(words, gaps))
    parts = list(slices(text, 50))
    assert "".join(parts) == text and all(0 < len(part) <= 50 for part in parts)
    if all(part.startswith(" ") for part in parts[1:]):  # no cut was forced
        whole = bpe.encode_slice(text).tolist() if text else []
        assert [i for part in parts for i in bpe.encode_slice(part).tolist()] == whole


def test_slices_cut_before_spaces_of_real_text(bpe):
    parts = list(slices(WORDS, 100))
    assert len(parts) > 30 and all(part.startswith(" ") for part in parts[1:])
    assert [i for part in parts for i in bpe.encode_slice(part).tolist()] == bpe.encode_slice(WORDS).tolist()


def test_bpe_is_trained_on_the_train_split_only(tmp_path, docs, monkeypatch):
    seen, train = [], train_bpe
    monkeypatch.setattr(prepare, "train_bpe", lambda size, t: train(size, iter(seen.extend(t) or seen)))
    folder = make(tmp_path, dataset=write_docs(tmp_path / "docs", docs), tokenizer="bpe:300")
    assert seen == docs_of(folder, "train") and docs_of(folder, "val")
    assert TokenData(folder, "train").meta["tokenizer_bytes"] == sum(len(d.encode()) for d in seen)


def test_bpe_is_trained_on_a_limited_sample(tmp_path, monkeypatch):
    monkeypatch.setattr(prepare, "TOKENIZER_BYTES", 100_000)
    (tmp_path / "a.txt").write_text(WORDS * 200)
    folder = make(tmp_path, dataset=f"file:{tmp_path}/a.txt", tokenizer="bpe:300")
    data = TokenData(folder, "train")
    assert 100_000 <= data.meta["tokenizer_bytes"] <= 100_000 + SLICE
    assert data.bytes + TokenData(folder, "val").bytes == len(WORDS) * 200


def test_too_little_text_for_a_bpe(tmp_path):
    (tmp_path / "a.txt").write_text("hello hello")
    with pytest.raises(UserError, match="bpe:1000.*smaller size"):
        make(tmp_path, dataset=f"file:{tmp_path}/a.txt", tokenizer="bpe:1000")


def test_gpt2_without_a_network_is_one_line(tmp_path, monkeypatch, capsys):
    def fail(name):
        raise ConnectionError("no route\nto host")
    monkeypatch.setattr("tiktoken.get_encoding", fail)
    status, out, err = cli(monkeypatch, capsys, "tokenizer=gpt2", f"data_dir={tmp_path}/data")
    assert (status, out) == (2, "") and not (tmp_path / "data").exists()
    assert err.startswith("error: tokenizer gpt2 needs a network") and err.count("\n") == 1


def test_gpt2_data_set_needs_no_download_later(tmp_path, monkeypatch):
    import tiktoken
    ranks = {bytes([i]): 255 - i for i in range(256)} | {b"he": 256, b"ll": 257}
    fake = tiktoken.Encoding("gpt2", pat_str=r"\S+|\s+", mergeable_ranks=ranks, special_tokens={EOT: 258})
    monkeypatch.setattr(tiktoken, "get_encoding", lambda name: fake)
    (tmp_path / "a.txt").write_text("hello, " * 100)
    folder = make(tmp_path, dataset=f"file:{tmp_path}/a.txt", tokenizer="gpt2")
    monkeypatch.setattr(tiktoken, "get_encoding", None)
    data = TokenData(folder, "train")
    assert (data.tokenizer.kind, data.vocab_size, data.tokenizer.eot) == ("gpt2", 259, 258)
    assert data.tokenizer.encode("hello") == [256, 257, 255 - ord("o")]
    assert docs_of(folder, "train")[0].startswith("hello, hello")


@pytest.mark.parametrize("module, keys", [
    ("tiktoken", {"tokenizer": "gpt2"}), ("rustbpe", {"tokenizer": "bpe:300"}),
    ("datasets", {"dataset": "hf:x"})])
def test_missing_package_is_named(tmp_path, monkeypatch, module, keys):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UserError, match=f"pip install {module}"):
        make(tmp_path, **keys)


# Tokenizers of Hugging Face models


@exact
@given(text=texts())
def test_hf_round_trip(hf, text):
    again = load_tokenizer(json.loads(json.dumps(hf.to_dict())))
    ids = hf.encode(text)
    assert again.decode_bytes(ids) == text.encode() and again.encode(text) == ids
    assert all(len(SPECIAL) <= i < hf.vocab_size for i in ids)
    assert (again.eot, again.vocab_size, again.to_dict()) == (0, 340, hf.to_dict())


def test_hf_ids_are_the_models_own(hf):
    from tokenizers import Tokenizer
    own = Tokenizer.from_str(json.dumps(smollm()))
    text = WORDS + "naïve 你好 \U0001f600 2024\r\n\t'data's   x\n\n"
    ids = hf.encode(text)
    assert ids == own.encode(text, add_special_tokens=False).ids and len(ids) < 0.6 * len(text)
    assert own.encode(EOT).ids == [0] and hf.decode_bytes([0]) == b""


@pytest.mark.parametrize("text", [*SPECIAL, "".join(SPECIAL), f"x{EOT} y", f"\U0001f600{EOT}\U0001f468\u200d"])
def test_hf_special_tokens_are_ordinary_text(hf, text):
    ids = hf.encode(text)
    assert min(ids) >= len(SPECIAL) and len(ids) > 3 and hf.decode(ids) == text


def test_hf_bytes_can_be_streamed(hf):
    text = f"a\U0001f600é你{EOT}\U0001f468\u200d\U0001f469 the cat"
    decoder = codecs.getincrementaldecoder("utf-8")()  # strict: every byte is exact
    assert "".join(decoder.decode(hf.decode_bytes([i])) for i in hf.encode(text)) == text
    assert len(hf.decode_bytes(hf.encode("\U0001f600")[:1])) < 4  # a part of a character


def test_hf_data_set(tmp_path, docs, monkeypatch):
    docs = [f"{doc}\U0001f600{EOT}" for doc in docs]
    monkeypatch.chdir(tmp_path)
    write_model(tmp_path / "models/tiny", smollm(), eos_token=EOT)
    folder = make(tmp_path, dataset=write_docs(tmp_path / "docs", docs), tokenizer="hf:models/tiny", name="x")
    shutil.rmtree(tmp_path / "models")  # is not needed again
    data = TokenData(folder, "train")
    assert (data.tokenizer.kind, data.vocab_size, data.meta["eot"], data.meta["dtype"]) == ("hf", 340, 0, "uint16")
    assert data.meta["tokenizer_name"] == "hf:models/tiny"
    assert sorted(docs_of(folder, "train") + docs_of(folder, "val")) == sorted(docs)
    for split in ("train", "val"):
        ids = ids_of(folder, split)
        assert ids[-1] == 0 and ids.count(0) == len(docs_of(folder, split)) and not {1, 2} & set(ids)
        assert TokenData(folder, split).bytes == len(data.tokenizer.decode_bytes(ids))


@pytest.mark.parametrize("unit", [" ", "a", "a b", "\u0301"])
def test_hf_encodes_a_very_large_document_quickly(hf, unit):
    text = (unit * 1_000_000)[:1_000_000]
    start = time.monotonic()
    ids = hf.encode(text)
    assert time.monotonic() - start < 8
    assert hf.decode(ids) == text


def test_hf_equal_tokenizers_are_equal_dicts(hf):
    data = smollm()
    model = {**data["model"], "vocab": dict(reversed(data["model"]["vocab"].items())),
             "merges": [" ".join(pair) for pair in data["model"]["merges"]]}  # as older files have them
    assert data["model"]["merges"] != model["merges"]
    del model["type"], model["ignore_merges"]
    other = {**data, "model": model, "added_tokens": data["added_tokens"][::-1], "decoder": None,
             "post_processor": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
             "pre_tokenizer": {"type": "Sequence", "pretokenizers": [data["pre_tokenizer"]]}}
    assert HFTokenizer(other, 0).to_dict() == hf.to_dict()
    assert HFTokenizer(data, 1).to_dict() != hf.to_dict() != HFTokenizer(smollm(330), 0).to_dict()


def test_hf_nothing_is_cut_padded_dropped_or_put_before(hf):
    data = smollm()
    digits, byte_level = data["pre_tokenizer"]["pretokenizers"]
    steps = [digits, {**byte_level, "add_prefix_space": True}]
    parts = {"pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
             "truncation": {"direction": "Right", "max_length": 5, "strategy": "LongestFirst", "stride": 0},
             "padding": {"strategy": {"Fixed": 900}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 2,
                         "pad_type_id": 0, "pad_token": "<pad>"},
             "post_processor": {"type": "TemplateProcessing", "single": [
                 {"SpecialToken": {"id": EOT, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}], "pair": [],
                 "special_tokens": {EOT: {"id": EOT, "ids": [0], "tokens": [EOT]}}},
             "model": {**data["model"], "dropout": 0.5, "unk_token": EOT}}
    tokenizer = HFTokenizer({**data, **parts}, 0)
    assert tokenizer.to_dict() == hf.to_dict() and tokenizer.encode(WORDS) == hf.encode(WORDS)


def test_hf_no_word_of_the_vocabulary_is_taken_for_a_special_token():
    data = smollm()
    data["model"]["ignore_merges"] = True  # a whole piece of text that is in the vocabulary is its id
    data["pre_tokenizer"] = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    tokenizer = HFTokenizer(data, 0)
    for text in SPECIAL:
        assert min(tokenizer.encode(text)) >= len(SPECIAL) and tokenizer.decode(tokenizer.encode(text)) == text


def test_hf_added_tokens_match_no_text_and_gaps_have_no_bytes():
    data = smollm()
    extra = {"single_word": False, "lstrip": True, "rstrip": True, "normalized": True, "special": False}
    data["added_tokens"] += [{"id": 410, "content": "<think>", **extra}, {"id": 405, "content": "the cat é", **extra}]
    tokenizer = HFTokenizer(data, 0)
    assert tokenizer.vocab_size == 411 and tokenizer.decode([410, 405, 404, 409, 1]) == "<think>the cat é"
    ids = tokenizer.encode(" <think> the cat é")
    assert max(ids) < 340 and tokenizer.decode(ids) == " <think> the cat é"
    data = llama2()
    data["added_tokens"].append({"id": 270, "content": "\u2581cat", **extra})  # a word of the vocabulary, as Gemma's
    assert HFTokenizer(data, 2).decode([270, 270]) == " cat cat"


def test_hf_keeps_the_models_normalizer():
    tokenizer = HFTokenizer({**smollm(), "normalizer": {"type": "NFC"}}, 0)
    assert tokenizer.decode(tokenizer.encode("e\u0301 a")) == "é a"


def test_hf_bytes_without_a_token_are_left_out_and_named(tmp_path, capsys):
    data = smollm()
    for sign in "\u0104ñ":  # the bytes 04 and F1, which SmolLM lacks too
        del data["model"]["vocab"][sign]
    data["model"]["unk_token"] = EOT
    tokenizer = hf_tokenizer(write_model(tmp_path / "model", data).removeprefix("hf:"))
    out = capsys.readouterr().out
    assert "no tokens for the bytes 04 f1 (hexadecimal)" in out and out.count("\n") == 1
    assert tokenizer.decode(tokenizer.encode("a\x04b")) == "ab" and tokenizer.encode("\x04") == []


@pytest.mark.parametrize("parts", [
    {}, {"normalizer": None, "pre_tokenizer": {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "first",
                                               "split": False}},
    {"normalizer": None, "pre_tokenizer": {"type": "Metaspace", "replacement": "\u2581", "add_prefix_space": True}}])
def test_hf_byte_fallback(parts):
    from tokenizers import Tokenizer
    data = llama2(**parts)
    tokenizer, own = HFTokenizer(data, 2), Tokenizer.from_str(json.dumps(data))
    assert tokenizer.encode(" cat cat") == own.encode("cat cat").ids == [270, 270]  # it puts a blank before them
    for text in "cat", "  cat\n hat", "a </s><s> <0x0A>", "\U0001f600 é\t", "<unk>":
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text and not {0, 1, 2} & set(ids)
        assert b"".join(tokenizer.decode_bytes([i]) for i in ids) == text.encode()
    assert load_tokenizer(tokenizer.to_dict()).encode("hat \U0001f600") == tokenizer.encode("hat \U0001f600")
    parts = tokenizer.encode("cat" * 30_000 + " cat" * 30_000)
    assert tokenizer.decode(parts) == "cat" * 30_000 + " cat" * 30_000


@pytest.mark.parametrize("config, eot", [
    ({}, 0), ({"eos_token": None}, 0), ({"eos_token": "<|im_start|>"}, 1), ({"eos_token": {"content": "<pad>"}}, 2)])
def test_hf_end_of_text(tmp_path, config, eot, capsys):
    name = write_model(tmp_path / "model", smollm(), **config)
    tokenizer = hf_tokenizer(name.removeprefix("hf:"))
    assert tokenizer.eot == eot and tokenizer.decode([eot]) == "" == capsys.readouterr().out


def test_hf_end_of_text_that_no_file_calls_special(tmp_path):
    data = llama2(added_tokens=[])
    name = write_model(tmp_path / "model", data)
    tokenizer = hf_tokenizer(name.removeprefix("hf:"))
    assert tokenizer.eot == 2 and tokenizer.decode([2]) == "" and 2 not in tokenizer.encode("</s>")


BPE_MODEL = {"type": "BPE", "vocab": {"a": 0, EOT: 1}, "merges": []}


@pytest.mark.parametrize("parts, message", [
    ({"model": {"type": "WordPiece", "unk_token": "a", "vocab": {"a": 0, EOT: 1}}}, "a WordPiece tokenizer is not"),
    ({"model": {"type": "WordLevel", "unk_token": "a", "vocab": {"a": 0, EOT: 1}}}, "a WordLevel tokenizer is not"),
    ({"model": {"type": "Unigram", "unk_id": 0, "vocab": [["a", -1.0], [EOT, -2.0]]}}, "a Unigram tokenizer is not"),
    ({"model": {"vocab": {}}}, "a unknown tokenizer is not"),
    ({"pre_tokenizer": {"type": "Whitespace"}}, "this kind of BPE"), ({"pre_tokenizer": None}, "this kind of BPE"),
    ({"pre_tokenizer": None, "model": {**BPE_MODEL, "byte_fallback": True}}, "this kind of BPE"),
    ({"model": {**BPE_MODEL, "end_of_word_suffix": "</w>"}}, "this kind of BPE"),
    ({"model": {**BPE_MODEL, "continuing_subword_prefix": "##"}}, "this kind of BPE"),
    ({"pre_tokenizer": {"type": "Sequence", "pretokenizers": [
        {"type": "WhitespaceSplit"}, {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}]}},
     "drops blanks"),
    ({"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}}, "Precompiled"),
    ({"normalizer": {"type": "Nope"}}, "tokenizer hf:model: "),
    ({"model": {**BPE_MODEL, "merges": [["a", "b"]]}}, "out of vocabulary"),
    ({"model": {**BPE_MODEL, "vocab": {"a": -1, EOT: 1}}}, "not distinct numbers"),
    ({"model": {**BPE_MODEL, "vocab": {"a": 1, EOT: 1}}}, "not distinct numbers"),
    ({"model": {**BPE_MODEL, "vocab": {"a": 1 << 40, EOT: 1}}}, "not distinct numbers"),
    ({"model": {**BPE_MODEL, "vocab": {"a": "0", EOT: 1}}}, "not distinct numbers"),
    ({"added_tokens": [], "model": {**BPE_MODEL, "vocab": {"a": 0}}},
     "no end-of-text token (<|endoftext|>, </s>, <|end_of_text|>)"),
    ({"model": None}, "malformed"), ({"model": {**BPE_MODEL, "vocab": []}}, "malformed"),
    ({"added_tokens": [{"id": 0}]}, "malformed"), ({"pre_tokenizer": 3}, "malformed")])
def test_hf_refused_tokenizers(tmp_path, parts, message, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_docs(tmp_path / "texts", ["some text", "more text"])
    write_model(tmp_path / "model", {**smollm(260), **parts})
    before = sorted(tmp_path.rglob("*"))
    status, out, err = cli(monkeypatch, capsys, "dataset=file:texts", "tokenizer=hf:model")
    assert (status, out) == (2, "") and err.startswith("error: ") and err.count("\n") == 1 and message in err
    assert sorted(tmp_path.rglob("*")) == before and len(err) < 250


@pytest.mark.parametrize("files, message", [
    ({}, "model has no tokenizer.json"), ({"tokenizer.json": b""}, "cannot read model/tokenizer.json"),
    ({"tokenizer.json": b"{"}, "cannot read model/tokenizer.json"), ({"tokenizer.json": b"\xff"}, "cannot read"),
    ({"tokenizer.json": b"[" * 100_000}, "cannot read"), ({"tokenizer.json": b"[]"}, "holds no object"),
    ({"tokenizer.json": b"{}"}, "malformed"), ({"tokenizer_config.json": b"{"}, "cannot read model/tokenizer_config"),
    ({"tokenizer_config.json": b"3"}, "holds no object"),
    ({"tokenizer_config.json": b'{"eos_token": []}'}, "malformed"),
    ({"tokenizer_config.json": b'{"eos_token": "<eos>"}'}, "no end-of-text token (<eos>)")])
def test_hf_unreadable_folders(tmp_path, files, message, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    if "tokenizer_config.json" in files:
        write_model(tmp_path / "model", smollm(260))
    (tmp_path / "model").mkdir(exist_ok=True)
    for name, content in files.items():
        (tmp_path / "model" / name).write_bytes(content)
    before = tree(tmp_path)
    status, out, err = cli(monkeypatch, capsys, "tokenizer=hf:model")
    assert (status, out) == (2, "") and err.startswith("error: ") and err.count("\n") == 1 and message in err
    assert tree(tmp_path) == before


@pytest.mark.parametrize("changes", [
    {"eot": None}, {"eot": True}, {"eot": -1}, {"eot": 340}, {"eot": "0"}, {"eot": [0]}, {"json": None}, {"json": ""},
    {"json": "{"}, {"json": "[]"}, {"json": "{}"}, {"json": "[" * 100_000},
    {"json": '{"model": {"vocab": {}, "merges": []}}'}])
def test_hf_malformed(hf, changes):
    with pytest.raises(UserError, match="malformed hf tokenizer"):
        load_tokenizer({**hf.to_dict(), **changes})
    for key in changes:
        with pytest.raises(UserError, match="malformed hf tokenizer: KeyError"):
            load_tokenizer({k: v for k, v in hf.to_dict().items() if k != key})


def test_hf_hub_name(tmp_path, docs, monkeypatch):
    import huggingface_hub
    calls = []

    def download(name, **keys):
        calls.append((name, keys["allow_patterns"]))
        write_model(tmp_path / "cache", smollm(), eos_token=EOT)
        return str(tmp_path / "cache")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    folder = make(tmp_path, dataset=write_docs(Path("docs"), docs), tokenizer="hf:Owner/Name-1.0_b")
    assert folder.name == "file-docs-hf-Owner-Name-1.0_b" and TokenData(folder, "val").tokenizer.eot == 0
    assert calls == [("Owner/Name-1.0_b", ["tokenizer.json", "tokenizer_config.json"])]

    def fail(name, **keys):
        raise ConnectionError("no route\nto host")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    message = "^tokenizer hf:a/b is not a folder here and cannot be downloaded: ConnectionError: no route$"
    with pytest.raises(UserError, match=message):
        make(tmp_path, tokenizer="hf:a/b", name="y")


def test_hf_hub_name_without_a_network_is_one_line(tmp_path):
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "cache")}
    done = run("tokenizer=hf:HuggingFaceTB/SmolLM-135M", cwd=tmp_path, env=env)
    assert (done.returncode, done.stdout) == (2, "") and not (tmp_path / "data").exists()
    assert done.stderr.startswith("error: tokenizer hf:HuggingFaceTB/SmolLM-135M is not a folder here and cannot be")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("module, name", [("tokenizers", "model"), ("huggingface_hub", "owner/name")])
def test_hf_missing_package_is_named(tmp_path, monkeypatch, module, name):
    write_model(tmp_path / "model", smollm(260))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UserError, match=f"pip install {module}"):
        make(tmp_path, tokenizer=f"hf:{name}")


# Sources and splits


def test_one_document_is_split_in_order(tmp_path):
    text = "".join(f"line {i} é你\n" for i in range(100))
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    folder = make(tmp_path, dataset=f"file:{tmp_path}/a.txt", val_fraction=0.25)
    train, val = bytes(ids_of(folder, "train")), bytes(ids_of(folder, "val"))  # an end-of-text is no byte
    assert (train + val).decode() == text
    assert len(val.decode()) == round(len(text) / 4) and train.decode() == text[: len(train.decode())]


def test_documents_are_split_by_hash(tmp_path, docs):
    folder = make(tmp_path, dataset=write_docs(tmp_path / "docs", docs), val_fraction=0.3)
    expected = {"train": [], "val": []}
    for doc in docs:
        number = int(hashlib.sha256(doc.encode()).hexdigest()[:16], 16) / 2**64
        expected["val" if number < 0.3 else "train"].append(doc)
    assert len(expected["val"]) > 4
    for split in expected:
        assert docs_of(folder, split) == expected[split]
        assert ids_of(folder, split)[-1] == 256


def by_hash(split, n, fraction=0.5):
    docs = (f"document {i}" for i in range(10_000))
    return [d for d in docs if prepare.split_by_hash(d, fraction) == split][:n]


@pytest.mark.parametrize("split, other", [("train", "val"), ("val", "train")])
def test_the_last_document_fills_an_empty_split(tmp_path, split, other):
    docs = by_hash(split, 4)
    folder = make(tmp_path, dataset=write_docs(tmp_path / "docs", docs), val_fraction=0.5)
    assert docs_of(folder, split) == docs[:3] and docs_of(folder, other) == docs[3:]


def test_the_last_document_stays_where_it_belongs(tmp_path):
    docs = by_hash("val", 1) + by_hash("train", 2)
    folder = make(tmp_path, dataset=write_docs(tmp_path / "docs", docs), val_fraction=0.5)
    assert docs_of(folder, "train") == docs[1:] and docs_of(folder, "val") == docs[:1]


@pytest.mark.parametrize("text", ["a", "ab", "abc"])
def test_too_short_a_text(tmp_path, text):
    (tmp_path / "a.txt").write_text(text)
    with pytest.raises(UserError, match="too short"):
        make(tmp_path, dataset=f"file:{tmp_path}/a.txt")
    assert not (tmp_path / "data").exists()


def test_the_shortest_text(tmp_path):
    (tmp_path / "a.txt").write_text("abcd")
    folder = make(tmp_path, dataset=f"file:{tmp_path}/a.txt")
    assert (docs_of(folder, "train"), docs_of(folder, "val")) == (["ab"], ["cd"])


def test_invalid_utf8_is_skipped_and_counted(tmp_path, docs, capsys):
    dataset = write_docs(tmp_path / "docs", [docs[0], b"\xff\xfe", docs[1], b"caf\xe9", b"", docs[2]])
    folder = make(tmp_path, dataset=dataset)
    assert sorted(docs_of(folder, "train") + docs_of(folder, "val")) == docs[:3]
    assert TokenData(folder, "val").meta["skipped"] == 2
    assert "2 documents skipped" in capsys.readouterr().out


def test_line_ends_are_kept(tmp_path):
    folder = make(tmp_path, dataset=write_docs(tmp_path / "docs", ["a\r\nb\rc\n", "x\r\n"]))
    assert sorted(docs_of(folder, "train") + docs_of(folder, "val")) == ["a\r\nb\rc\n", "x\r\n"]


def test_meta_counts_are_exact(tmp_path, docs):
    folder = make(tmp_path, dataset=write_docs(tmp_path / "docs", docs), tokenizer="bpe:290")
    meta = json.loads((folder / "meta.json").read_text())
    for split in ("train", "val"):
        info, kept = meta["splits"][split], docs_of(folder, split)
        assert info["documents"] == len(kept)
        assert info["bytes"] == sum(len(d.encode()) for d in kept) == TokenData(folder, split).bytes
        assert info["tokens"] == len(ids_of(folder, split)) == TokenData(folder, split).tokens
        assert info["file_tokens"] == [info["tokens"]] and info["files"] == [f"{split}.bin"]
    assert (meta["format"], meta["vocab_size"], meta["eot"], meta["dtype"]) == (1, 290, 289, "uint16")
    assert meta["tokenizer_name"] == "bpe:290" and meta["val_fraction"] == 0.1 and meta["skipped"] == 0
    digest = b"".join(len(d.encode()).to_bytes(8, "little") + d.encode() for d in docs)
    assert meta["source_sha256"] == hashlib.sha256(digest).hexdigest()


@pytest.mark.parametrize("n_docs", [1, 40])
@pytest.mark.parametrize("tokenizer", ["byte", "bpe:300"])
def test_max_tokens_is_exact(tmp_path, docs, n_docs, tokenizer):
    dataset = write_docs(tmp_path / "docs", docs if n_docs > 1 else [WORDS])
    folder = make(tmp_path, dataset=dataset, tokenizer=tokenizer, max_tokens=777, val_fraction=0.2)
    whole = make(tmp_path, dataset=dataset, tokenizer=tokenizer, val_fraction=0.2, name="whole")
    for split, n in ("train", 777 - 155), ("val", 155):
        data, ids = TokenData(folder, split), ids_of(folder, split)
        assert data.tokens == n and ids == ids_of(whole, split)[:n]
        assert data.bytes == len(data.tokenizer.decode_bytes(ids))
        assert data.meta["splits"][split]["documents"] == len(docs_of(folder, split))


def test_max_tokens_stops_an_endless_stream(tmp_path, monkeypatch):
    def endless():
        for i in range(10_000):
            yield f"document {i} " * 100
        raise AssertionError("the stream should have been left")
    monkeypatch.setattr(prepare, "open_source", lambda cfg: prepare.Source("endless", endless))
    folder = make(tmp_path, max_tokens=1_000_000)
    assert TokenData(folder, "train").tokens == 900_000 and TokenData(folder, "val").tokens == 100_000


def test_folder_filter_and_order(tmp_path):
    root = tmp_path / "docs"
    files = {"b.txt": "B", "a/z.md": "AZ", "a-b.txt": "A-B", "c.py": "C", ".hidden.txt": "H",
             ".git/x.txt": "G", "d.bin": "D", "UPPER.TXT": "U"}
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    names = [os.path.relpath(p, root) for p in prepare.text_files(str(root), prepare.TEXT_EXTENSIONS)]
    assert names == ["UPPER.TXT", "a-b.txt", "a/z.md", "b.txt", "c.py"]
    names = [os.path.relpath(p, root) for p in prepare.text_files(str(root), "py, .md")]
    assert names == ["a/z.md", "c.py"]
    folder = make(tmp_path, dataset=f"file:{root}", extensions=".md,.py")
    assert sorted(docs_of(folder, "train") + docs_of(folder, "val")) == ["AZ", "C"]


def test_glob(tmp_path, docs):
    write_docs(tmp_path / "docs", docs[:12])
    folder = make(tmp_path, dataset=f"file:{tmp_path}/docs/00*.txt", name="globbed")
    assert sorted(docs_of(folder, "train") + docs_of(folder, "val")) == sorted(docs[:10])
    literal = tmp_path / "docs" / "[ab].txt"
    literal.write_text("brackets " * 10)
    assert prepare.text_files(str(literal), "") == [str(literal)]


def test_python_corpus_decodes_back_to_the_library(tmp_path):
    folder = make(tmp_path)
    assert folder.name == "python-byte"
    kept = docs_of(folder, "train") + docs_of(folder, "val")
    for module in json, contextlib:
        assert Path(module.__file__).read_bytes().decode() in kept
    assert len(kept) > 300 and TokenData(folder, "train").bytes > 4_000_000
    paths = prepare.python_files("python")
    assert not any(part in Path(p).parts for p in paths for part in ("test", "tests", "site-packages"))
    assert os.path.join(sysconfig.get_paths()["stdlib"], "json", "decoder.py") in paths


def test_python_and_packages(tmp_path):
    files = prepare.python_files("python+packages")
    assert files[: len(prepare.python_files("python"))] == prepare.python_files("python")
    assert os.path.realpath(np.__file__) in {os.path.realpath(f) for f in files}
    assert len({os.path.realpath(f) for f in files}) == len(files)
    assert not any("__pycache__" in f for f in files)


def test_is_offline():
    names = "python", "python+packages", "file:x", "shakespeare", "hf:x", "other"
    assert [prepare.is_offline(name) for name in names] == [True, True, True, False, False, False]


def test_shakespeare(tmp_path, monkeypatch):
    urls = []

    def reply(url, timeout):
        urls.append((url, timeout))
        return open(tmp_path / "play.txt", "rb")
    (tmp_path / "play.txt").write_text("First Citizen:\nSpeak, speak.\n" * 50)
    monkeypatch.setattr("urllib.request.urlopen", reply)
    folder = make(tmp_path, dataset="shakespeare", tokenizer="char")
    assert urls == [(prepare.SHAKESPEARE, 30)]
    assert docs_of(folder, "train")[0].startswith("First Citizen:") and sorted(tree(folder)) == [
        "meta.json", "train.bin", "val.bin"]


def test_shakespeare_without_a_network(tmp_path, monkeypatch, capsys):
    def fail(url, timeout):
        raise OSError("no route to host")
    monkeypatch.setattr("urllib.request.urlopen", fail)
    status, _, err = cli(monkeypatch, capsys, "dataset=shakespeare", f"data_dir={tmp_path}/data")
    assert status == 2 and err.count("\n") == 1 and "dataset=file:PATH" in err
    assert not (tmp_path / "data").exists()


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Folders written by save_to_disk: a Dataset, and a DatasetDict."""
    datasets = pytest.importorskip("datasets")
    root = tmp_path_factory.mktemp("hf")
    rows = [f"row {i} " * 5 for i in range(30)]
    columns = {"text": [*rows, None, ""], "other": [*rows, "x", "y"], "n": range(32)}
    single = datasets.Dataset.from_dict(columns)
    both = {"train": single.select(range(20)), "extra": single.select(range(20, 30))}
    single.save_to_disk(str(root / "single"))
    datasets.DatasetDict(both).save_to_disk(str(root / "dict"))
    return root, rows


def test_hf_dataset(tmp_path, saved):
    root, rows = saved
    folder = make(tmp_path, dataset=f"hf:{root}/single", name="single")
    assert sorted(docs_of(folder, "train") + docs_of(folder, "val")) == sorted(rows)
    assert TokenData(folder, "train").meta["skipped"] == 1
    folder = make(tmp_path, dataset=f"hf:{root}/dict", name="dict", split="extra")
    assert sorted(docs_of(folder, "train") + docs_of(folder, "val")) == sorted(rows[20:])
    keys = {"name": "other", "text_column": "other", "tokenizer": "bpe:270"}
    folder = make(tmp_path, dataset=f"hf:{root}/single", **keys)
    assert len(docs_of(folder, "train") + docs_of(folder, "val")) == 32


@pytest.mark.parametrize("keys, message", [
    ({"dataset": "single", "text_column": "txt"}, "no column 'txt': text_column can be text, other, n"),
    ({"dataset": "single", "text_column": "n"}, "column n holds int"),
    ({"dataset": "dict", "split": "test"}, "no split 'test': split can be train, extra")])
def test_hf_dataset_bad_input(tmp_path, saved, keys, message):
    with pytest.raises(UserError, match=message):
        make(tmp_path, **{**keys, "dataset": f"hf:{saved[0]}/{keys['dataset']}"}, name="x")
    assert not (tmp_path / "data").exists()


def test_hf_streaming(tmp_path, saved, monkeypatch):
    import datasets
    calls = []

    def load(*args, **keys):
        calls.append((args, keys))
        return datasets.load_from_disk(str(saved[0] / "single")).to_iterable_dataset()
    monkeypatch.setattr(datasets, "load_dataset", load)
    folder = make(tmp_path, dataset="hf:owner/name:config", split="validation", tokenizer="char")
    assert folder.name == "hf-owner-name-config-char" and len(docs_of(folder, "train")) > 20
    assert calls == [(("owner/name", "config"), {"split": "validation", "streaming": True})] * 2

    def fail(*args, **keys):
        raise ConnectionError("Couldn't reach the Hub\n(details)")
    monkeypatch.setattr(datasets, "load_dataset", fail)
    message = r"^cannot read hf:owner/name: ConnectionError: Couldn't reach the Hub$"
    with pytest.raises(UserError, match=message):
        make(tmp_path, dataset="hf:owner/name")


# Files: dtype, shards, windows


def test_a_large_vocabulary_is_uint32(tmp_path):
    text = "".join(map(chr, range(0x10000, 0x10000 + 70_000)))
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    folder = make(tmp_path, dataset=f"file:{tmp_path}/a.txt", tokenizer="char")
    data = TokenData(folder, "val")
    assert data.meta["dtype"] == "uint32" and data.vocab_size == 70_001
    assert data.windows([0], data.tokens).tolist() == [list(range(63_000, 70_000))]


def test_shards(tmp_path, docs, monkeypatch):
    monkeypatch.setattr(prepare, "CHUNK", 700)  # chunks and shards do not align
    dataset = write_docs(tmp_path / "docs", docs)
    whole = make(tmp_path, dataset=dataset, name="whole")
    parts = make(tmp_path, dataset=dataset, name="parts", shard_tokens=1000)
    info = TokenData(parts, "train").meta["splits"]["train"]
    assert info["files"][:3] == ["train.bin", "train.00001.bin", "train.00002.bin"] and len(info["files"]) > 5
    assert set(info["file_tokens"][:-1]) == {1000} and 0 < info["file_tokens"][-1] <= 1000
    for split in ("train", "val"):
        assert ids_of(parts, split) == ids_of(whole, split)
    val_files = TokenData(parts, "val").meta["splits"]["val"]["files"]
    assert set(tree(parts)) == {"meta.json", *info["files"], *val_files}


def write_set(folder, counts, vocab_size=257, dtype="uint16", tokenizer=None, ids=None):
    """A data set of given shards; the tokens count up."""
    folder.mkdir(exist_ok=True)
    ids = np.arange(sum(counts)) % 251 if ids is None else np.array(ids)
    files = [f"train.{i:05}.bin" if i else "train.bin" for i in range(len(counts))]
    for file, part in zip(files, np.split(ids, np.cumsum(counts)[:-1])):
        part.astype(dtype).tofile(folder / file)
    info = {"files": files, "file_tokens": list(counts), "tokens": sum(counts), "bytes": sum(counts)}
    meta = {"format": 1, "vocab_size": vocab_size, "dtype": dtype, "splits": {"train": info},
            "tokenizer": tokenizer or {"kind": "byte"}}
    (folder / "meta.json").write_text(json.dumps(meta))
    return folder


@exact
@given(counts=st.lists(st.integers(1, 40), min_size=1, max_size=5), length=st.integers(1, 45))
def test_windows_do_not_cross_shards(tmp_path_factory, counts, length):
    folder = write_set(tmp_path_factory.mktemp("set"), counts)
    data = TokenData(folder, "train")
    shards = np.split(np.arange(sum(counts)) % 251, np.cumsum(counts)[:-1])
    expected = [s[i: i + length].tolist() for s in shards for i in range(len(s) - length + 1)]
    assert data.n_windows(length) == len(expected)
    order = np.random.default_rng(0).permutation(len(expected))
    assert data.windows(order, length).tolist() == [expected[i] for i in order]
    for outside in (-1, len(expected)):
        with pytest.raises(IndexError):
            data.windows(np.array([outside]), length)


def test_windows_of_a_prepared_set(tmp_path, docs):
    folder = make(tmp_path, dataset=write_docs(tmp_path / "docs", docs))
    data, ids = TokenData(folder, "train"), ids_of(folder, "train")
    x = data.windows(np.array([5, 0, data.n_windows(64) - 1]), 64)
    assert x.dtype == np.int64 and x.shape == (3, 64) and data.n_windows(64) == len(ids) - 63
    assert x.tolist() == [ids[5:69], ids[:64], ids[-64:]]
    assert data.windows(np.array([], dtype=np.int64), 8).shape == (0, 8)


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="reads the resident size from /proc")
def test_memory_does_not_grow(tmp_path):
    n = 100_000_000  # 200 MB
    np.full(n, 7, "<u2").tofile(write_set(tmp_path / "set", [1]) / "train.bin")
    meta = json.loads((tmp_path / "set/meta.json").read_text())
    meta["splits"]["train"].update(file_tokens=[n], tokens=n)
    (tmp_path / "set/meta.json").write_text(json.dumps(meta))
    data, rng = TokenData(tmp_path / "set", "train"), np.random.default_rng(0)

    def resident():
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    data.windows(rng.integers(data.n_windows(257), size=8), 257)
    before, most = resident(), 0
    for _ in range(2000):
        assert data.windows(rng.integers(data.n_windows(257), size=8), 257)[0, 0] == 7
        most = max(most, resident())
    assert most - before < 20e6


# Damaged data sets


def edit_meta(folder, **changes):
    meta = json.loads((folder / "meta.json").read_text())
    (folder / "meta.json").write_text(json.dumps({**meta, **changes}))


def test_no_meta(tmp_path):
    with pytest.raises(UserError, match="no meta.json: not a data set; make it with python prepare.py"):
        TokenData(tmp_path / "nothing", "train")


@pytest.mark.parametrize("text", [b"", b"{", b"\xff\xfe", b"[" * 100_000])
def test_unreadable_meta(tmp_path, text):
    (tmp_path / "meta.json").write_bytes(text)
    with pytest.raises(UserError, match="cannot read .*meta.json"):
        TokenData(tmp_path, "train")


INFO = {"files": ["train.bin"], "file_tokens": [30], "tokens": 30, "bytes": 30}


@pytest.mark.parametrize("changes, message", [
    ({"format": 2}, "format 1"), ({"format": None}, "format 1"), ({"dtype": "int16"}, "dtype"),
    ({"dtype": None}, "dtype"), ({"vocab_size": "257"}, "vocab_size"), ({"vocab_size": True}, "vocab_size"),
    ({"vocab_size": 0}, "vocab_size"), ({"vocab_size": 258}, "vocab_size"), ({"splits": None}, "splits"),
    ({"splits": {}}, "no split 'train'"), ({"splits": {"train": 3}}, "splits.train"),
    ({"vocab_size": 70_000}, "70000 does not fit dtype uint16"), ({"tokenizer": None}, "tokenizer"),
    *[({"splits": {"train": {**INFO, **bad}}}, message) for bad, message in [
        ({"files": None}, "files"), ({"files": []}, "files"), ({"files": ["../set/train.bin"]}, "files"),
        ({"files": [3]}, "files"), ({"file_tokens": [30, 1]}, "files"), ({"file_tokens": 30}, "file_tokens"),
        ({"file_tokens": [-30]}, "file_tokens"), ({"file_tokens": [30.0]}, "file_tokens"),
        ({"tokens": 31}, "train.tokens"), ({"tokens": None}, "train.tokens"), ({"bytes": None}, "bytes"),
        ({"bytes": -1}, "bytes")]]])
def test_wrong_meta(tmp_path, changes, message):
    folder = write_set(tmp_path / "set", [30])
    TokenData(folder, "train")
    edit_meta(folder, **changes)
    with pytest.raises(UserError, match=message):
        TokenData(folder, "train")


@pytest.mark.parametrize("field", ["format", "dtype", "vocab_size", "splits", "tokenizer"])
def test_missing_field(tmp_path, field):
    folder = write_set(tmp_path / "set", [30])
    meta = json.loads((folder / "meta.json").read_text())
    del meta[field]
    (folder / "meta.json").write_text(json.dumps(meta))
    with pytest.raises(UserError, match=field):
        TokenData(folder, "train")


@pytest.mark.parametrize("file", ["train.bin", "train.00001.bin"])
def test_files_of_the_wrong_size(tmp_path, file):
    folder = write_set(tmp_path / "set", [30, 20])
    size = os.path.getsize(folder / file)
    os.truncate(folder / file, size - 2)
    with pytest.raises(UserError, match=f"{file} is truncated: {size - 2} bytes, {size} expected"):
        TokenData(folder, "train")
    os.truncate(folder / file, size + 2)
    with pytest.raises(UserError, match=f"{file} is too long"):
        TokenData(folder, "train")
    os.remove(folder / file)
    with pytest.raises(UserError, match=f"cannot read .*{file}"):
        TokenData(folder, "train")


def test_a_file_cut_while_in_use(tmp_path):
    folder = write_set(tmp_path / "set", [30])
    data = TokenData(folder, "train")
    os.truncate(folder / "train.bin", 10)
    with pytest.raises(UserError, match="cannot read .*train.bin"):
        data.windows([0], 5)


def test_token_outside_the_vocabulary(tmp_path):
    data = TokenData(write_set(tmp_path / "set", [4, 4], ids=[1, 2, 3, 256, 5, 6, 300, 8]), "train")
    assert data.windows([0], 4).tolist() == [[1, 2, 3, 256]]
    with pytest.raises(UserError, match=r"token 300 in train.00001.bin is out of the vocabulary \(257\)"):
        data.windows([0, 1], 4)


# Nothing half done


@pytest.mark.parametrize("tokenizer", ["byte", "char", "bpe:400", "hf:model"])
def test_prepared_twice_the_bytes_are_the_same(tmp_path, docs, tokenizer):
    write_docs(tmp_path / "docs", docs)
    write_model(tmp_path / "model", smollm())
    trees = []
    for data_dir, seed in ("one", "1"), ("else/where", "2"):
        done = run("dataset=file:docs", f"tokenizer={tokenizer}", f"data_dir={data_dir}", "shard_tokens=2000",
                   cwd=tmp_path, env={**os.environ, "PYTHONHASHSEED": seed})
        assert done.returncode == 0, done.stderr
        trees.append(tree(tmp_path / data_dir))
    assert trees[0] == trees[1] and len(trees[0]) > 3
    meta = trees[0][f"file-docs-{tokenizer.replace(':', '-')}/meta.json"].decode()
    assert str(tmp_path) not in meta and "tmp-" not in meta


def test_an_error_in_the_middle_leaves_nothing(tmp_path, monkeypatch):
    def broken():
        yield "a document " * 1000
        yield "another " * 1000
        assert list((tmp_path / "data").iterdir()) == [tmp_path / f"data/.python-byte.tmp-{os.getpid()}"]
        raise RuntimeError("in the middle")
    monkeypatch.setattr(prepare, "open_source", lambda cfg: prepare.Source("broken", broken))
    with pytest.raises(RuntimeError, match="in the middle"):
        make(tmp_path)
    assert list(tmp_path.iterdir()) == []


SLOW = """
import sys, time, config, prepare
def slow():
    while True:
        yield "some text " * 500_000
        print("written", flush=True)
        time.sleep(0.05)
prepare.open_source = lambda cfg: prepare.Source("slow", slow)
config.run_cli(prepare.main)
"""


@pytest.mark.parametrize("number, status, overwrite", [
    (signal.SIGTERM, 143, False), (signal.SIGINT, 130, False), (signal.SIGTERM, 143, True)])
def test_a_signal_leaves_nothing_or_the_old_set(tmp_path, docs, number, status, overwrite):
    if overwrite:
        make(tmp_path, dataset=write_docs(tmp_path / "docs", docs), name="python-byte")
    before = tree(tmp_path)
    process = subprocess.Popen([sys.executable, "-c", SLOW, f"data_dir={tmp_path}/data", "overwrite=true"],
                               cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    for _ in range(3):
        assert process.stdout.readline() == "written\n"
    assert any((tmp_path / "data").glob(".python-byte.tmp-*/*.bin"))
    process.send_signal(number)
    _, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (status, "")
    assert tree(tmp_path) == before and (overwrite or list(tmp_path.iterdir()) == [])


def test_signal_handlers_come_back(tmp_path, docs):
    before = [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)]
    make(tmp_path, dataset=write_docs(tmp_path / "docs", docs))
    assert [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)] == before


def test_a_full_disk_leaves_nothing(tmp_path):
    def limit():
        resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000))
    done = run("dataset=python", cwd=tmp_path, preexec_fn=limit)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: cannot write data/python-byte: File too large\n"
    assert list(tmp_path.iterdir()) == []


def test_leftovers_of_dead_processes_are_removed(tmp_path, docs):
    dataset = write_docs(tmp_path / "docs", docs)
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    data = tmp_path / "data"
    for name in (f".x.tmp-{dead.pid}", f".x.tmp-{os.getppid()}", f".y.tmp-{dead.pid}", ".x.notes"):
        (data / name).mkdir(parents=True)
        (data / name / "train.bin").write_text("half")
    make(tmp_path, dataset=dataset, name="x")
    assert sorted(p.name for p in data.iterdir()) == sorted(
        [f".x.tmp-{os.getppid()}", f".y.tmp-{dead.pid}", ".x.notes", "x"])


def test_a_set_that_was_being_replaced_comes_back(tmp_path, docs, monkeypatch):
    folder = make(tmp_path, dataset=write_docs(tmp_path / "docs", docs), name="x")
    before, rename = tree(folder), os.rename

    def fail_second(a, b):
        if ".tmp-" in str(a):
            raise OSError("between the two renames")
        rename(a, b)
    monkeypatch.setattr(os, "rename", fail_second)
    with pytest.raises(UserError, match="between the two renames"):
        make(tmp_path, name="x", overwrite=True, dataset=f"file:{tmp_path}/docs", val_fraction=0.5)
    assert tree(tmp_path / "data") == {f"x/{k}": v for k, v in before.items()}
    monkeypatch.undo()  # and the same after a kill, at the next start
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    inode = os.stat(folder).st_ino
    rename(folder, folder.with_name(f".x.old-{dead.pid}"))
    make(tmp_path, dataset=f"file:{tmp_path}/docs", name="x")
    assert os.stat(folder).st_ino == inode  # the old one, not one made again
    assert tree(tmp_path / "data") == {f"x/{k}": v for k, v in before.items()}


@pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="reads names of open files from /proc")
def test_files_are_synced_before_the_folder_is_renamed(tmp_path, docs, monkeypatch):
    dataset, events = write_docs(tmp_path / "docs", docs), []
    fsync, rename = os.fsync, os.rename

    def spy(fd):
        events.append(os.readlink(f"/proc/self/fd/{fd}"))
        fsync(fd)
    monkeypatch.setattr(os, "fsync", spy)
    monkeypatch.setattr(os, "rename", lambda a, b: events.append(f"rename {b}") or rename(a, b))
    make(tmp_path, dataset=dataset, name="x")
    names = [os.path.basename(e) for e in events]
    temporary = f".x.tmp-{os.getpid()}"
    assert sorted(names[:2]) == ["train.bin", "val.bin"]
    assert names[2:] == ["meta.json", temporary, "x", "data"]
    assert events[4] == f"rename {tmp_path}/data/x"


def test_an_existing_set_is_left_alone(tmp_path, docs, capsys):
    dataset = write_docs(tmp_path / "docs", docs)
    folder = make(tmp_path, dataset=dataset, name="x")
    inode, before = os.stat(folder).st_ino, tree(folder)
    assert make(tmp_path, dataset=dataset, name="x") == folder
    assert os.stat(folder).st_ino == inode and "already there" in capsys.readouterr().out
    for changes in ({"val_fraction": 0.2}, {"tokenizer": "char"}, {"max_tokens": 9}, {"extensions": ".txt"},
                    {"dataset": dataset + "/*"}, {"shard_tokens": 7}, {"split": "a"}, {"text_column": "b"}):
        with pytest.raises(UserError, match=f"{next(iter(changes))}.*overwrite=true"):
            make(tmp_path, **{"dataset": dataset, "name": "x", **changes})
    assert tree(folder) == before
    make(tmp_path, dataset=dataset, name="x", val_fraction=0.2, overwrite=True)
    assert TokenData(folder, "val").meta["val_fraction"] == 0.2
    assert [p.name for p in folder.parent.iterdir()] == ["x"]


def test_a_damaged_set_says_how_to_replace_it(tmp_path, docs):
    dataset = write_docs(tmp_path / "docs", docs)
    folder = make(tmp_path, dataset=dataset, name="x")
    before = tree(folder)
    os.truncate(folder / "val.bin", 4)
    with pytest.raises(UserError, match="val.bin is truncated.*overwrite=true"):
        make(tmp_path, dataset=dataset, name="x")
    make(tmp_path, dataset=dataset, name="x", overwrite=True)
    assert tree(folder) == before


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_folder_of_something_else_is_never_replaced(tmp_path, docs, overwrite):
    dataset = write_docs(tmp_path / "docs", docs)
    (tmp_path / "data/x").mkdir(parents=True)
    (tmp_path / "data/x/novel.txt").write_text("years of work")
    with pytest.raises(UserError, match="not a data set"):
        make(tmp_path, dataset=dataset, name="x", overwrite=overwrite)
    assert tree(tmp_path / "data") == {"x/novel.txt": b"years of work"}


def test_two_processes_make_the_same_set(tmp_path, docs, monkeypatch):
    dataset, write, inodes = write_docs(tmp_path / "docs", docs), prepare.write_dataset, []

    def other_first(folder, cfg):
        monkeypatch.setattr(prepare, "write_dataset", write)
        other = PrepareConfig(**{**vars(cfg), "data_dir": str(tmp_path / "other")})
        os.rename(prepare.prepare(other), tmp_path / "data/x")
        inodes.append(os.stat(tmp_path / "data/x").st_ino)
        return write(folder, cfg)
    monkeypatch.setattr(prepare, "write_dataset", other_first)
    folder = make(tmp_path, dataset=dataset, name="x")
    assert inodes == [os.stat(folder).st_ino]  # the first one stays
    assert len(docs_of(folder, "train")) > 30 and [p.name for p in folder.parent.iterdir()] == ["x"]


# Command line


@dataclass
class Schema:
    n_layer: int = 4  # number of layers
    learning_rate: float = 3e-4  # step size
    fast: bool = True
    prompt: str = "a"  # text, taken literally
    top_k: Optional[int] = None
    note: "str | None" = None  # anything


def typed(*argv, base=None):
    return config.typed_config(Schema, config.split_args(argv), base, free_text=("prompt",))


@pytest.mark.parametrize("arg, key, value", [
    ("n_layer=3", "n_layer", 3), ("n_layer=-3", "n_layer", -3), ("n_layer=1_000", "n_layer", 1000),
    ("learning_rate=1e-3", "learning_rate", 1e-3), ("learning_rate=3e-4", "learning_rate", 3e-4),
    ("learning_rate=2", "learning_rate", 2.0), ("fast=false", "fast", False), ("fast=True", "fast", True),
    ("prompt=${x} ??? {a: [", "prompt", "${x} ??? {a: ["), ("prompt=", "prompt", ""),
    ("prompt=???", "prompt", "???"), ("prompt=null", "prompt", "null"),
    ("note=123", "note", "123"), ("note=1e3", "note", "1e3"),
    ("note=a=b", "note", "a=b"), ("note=[1, 2]", "note", "[1, 2]"), ("note=null", "note", None),
    ("top_k=5", "top_k", 5), ("top_k=null", "top_k", None)])
def test_typed_values(arg, key, value):
    got = getattr(typed(arg), key)
    assert got == value and type(got) is type(value)
    others = {f.name for f in fields(Schema)} - {key}
    assert all(getattr(typed(arg), k) == getattr(Schema(), k) for k in others)


@pytest.mark.parametrize("arg, message", [
    ("n_layer=2.5", "n_layer: expected int, got '2.5'"), ("n_layer=true", "n_layer: expected int"),
    ("n_layer=1e3", "n_layer: expected int"), ("n_layer=", "n_layer: expected int"),
    ("n_layer=null", "n_layer: expected int"), ("n_layer=" + "9" * 5000, "n_layer: expected int"),
    ("learning_rate=nan", "learning_rate: expected float"), ("learning_rate=inf", "learning_rate: expected"),
    ("learning_rate=fast", "learning_rate: expected"), ("learning_rate=true", "learning_rate: expected"),
    ("fast=1", "fast: expected bool"), ("fast=yes", "fast: expected"), ("top_k=x", "top_k: expected int"),
    ("note=${n_layer}", "note: interpolation"), ("n_layer=${oc.env:HOME}", "n_layer: interpolation"),
    ("note=???", "note: expected str"), ("--fast=true", "did you mean fast"),
    ("n_layers=3", "unknown key 'n_layers': did you mean n_layer?"),
    ("zzz=3", "unknown key 'zzz': the keys are n_layer, learning_rate, fast, prompt, top_k, note"),
    ("fast", "argument 'fast' is not of the form key=value"), ("=3", "argument '=3' is not of the form"),
    ("", "argument '' is not")])
def test_refused_arguments(arg, message):
    with pytest.raises(UserError) as e:
        typed(arg)
    assert message in str(e.value) and "\n" not in str(e.value) and len(str(e.value)) < 200


def test_layers_of_a_config():
    base = {"n_layer": 7, "learning_rate": "1e-4", "fast": False, "note": "x", "top_k": None,
            "prompt": "${p}"}
    config = typed("n_layer=8", "n_layer=9", base=base)
    assert config == Schema(9, 1e-4, False, "${p}", None, "x")
    assert typed(base={"learning_rate": 1}).learning_rate == 1.0 and typed(base={}) == typed() == Schema()


@pytest.mark.parametrize("base, message", [
    ({"n_layer": 2.0}, "n_layer: expected int"), ({"n_layer": True}, "n_layer: expected int"),
    ({"learning_rate": float("nan")}, "learning_rate"), ({"learning_rate": 10**400}, "learning_rate"),
    ({"learning_rate": None}, "learning_rate"), ({"learning_rate": True}, "learning_rate: expected float"),
    ({"fast": 1}, "fast"), ({"note": 12}, "note.*in quotes"),
    ({"note": "${x}"}, "interpolation"), ({"note": {"a": 1}}, "note: expected"),
    ({"prompt": 3}, "prompt: expected str"), ({1: 2}, "unknown key '1'"),
    ({"layers": 2}, "did you mean n_layer"), (["a"], "key: value"), ("text", "key: value")])
def test_refused_config_files(base, message):
    with pytest.raises(UserError, match=message):
        typed("n_layer=3", base=base)


@exact
@given(argv=st.lists(st.one_of(st.text(max_size=12), st.builds(
    "{}={}".format, st.sampled_from([f.name for f in fields(Schema)]),
    st.one_of(st.text(max_size=12), st.sampled_from(["${a}", "1e400", "???", "[", "1", "\\${a}"])))),
    max_size=3))
def test_any_arguments_are_a_config_or_one_line(argv):
    try:
        config = typed(*argv)
    except UserError as e:
        assert len(str(e).splitlines()) == 1
        return
    given_text = dict(arg.split("=", 1) for arg in argv)
    for key in given_text.keys() & {"prompt", "note"}:
        assert getattr(config, key) == given_text[key] or given_text[key] in ("null", "none", "None")


def test_required_field():
    @dataclass
    class Needs:
        path: str
    with pytest.raises(UserError, match="path"):
        config.typed_config(Needs, {})
    assert config.typed_config(Needs, {"path": "x"}) == config.typed_config(
        Needs, {"path": "x"}, free_text=("path",)) == Needs("x")


def test_field_comments_are_the_help():
    assert config.field_comments(Schema) == {"n_layer": "number of layers", "learning_rate": "step size",
                                              "prompt": "text, taken literally", "note": "anything"}
    assert set(config.field_comments(PrepareConfig)) == {f.name for f in fields(PrepareConfig)}


@pytest.mark.parametrize("arg", ["-h", "--help", "help"])
def test_help(arg, monkeypatch, capsys):
    status, out, err = cli(monkeypatch, capsys, "dataset=python", arg)
    assert (status, err) == (0, "")
    assert "python prepare.py dataset=python tokenizer=bpe:4096" in out
    for f in fields(PrepareConfig):
        assert any(re.match(rf"  {f.name}=\S* +\S+ \S+", line) for line in out.splitlines()), f.name


@pytest.mark.parametrize("name", [
    "..", "../x", "/abs", "a/b", ".hidden", "-x", "a b", "é", "x" * 201, "a\n", "+"])
def test_names_stay_in_their_folder(tmp_path, name):
    with pytest.raises(UserError, match="name"):
        config.check_name(name)
    with pytest.raises(UserError, match="name"):
        make(tmp_path, name=name)
    assert list(tmp_path.iterdir()) == []


def test_empty_name():
    with pytest.raises(UserError, match="run ''"):
        config.check_name("", "run")
    assert config.check_name("a.b_c+d-1") == "a.b_c+d-1"


@pytest.mark.parametrize("dataset, tokenizer, folder", [
    ("python", "byte", "python-byte"), ("python+packages", "bpe:512", "python+packages-bpe-512"),
    ("file:a/b c.txt", "char", "file-a-b-c.txt-char"), ("file:../../x", "byte", "file-..-..-x-byte"),
    ("hf:O/N:c", "gpt2", "hf-O-N-c-gpt2"), ("../é", "byte", "byte"),
    ("python", "hf:O/N-1.7B", "python-hf-O-N-1.7B"), ("python", "hf:/abs/my model/", "python-hf--abs-my-model-"),
    ("python", "hf:../models/x", "python-hf-..-models-x"), ("python", "hf:~/x", "python-hf---x")])
def test_folder_name(dataset, tokenizer, folder):
    assert prepare.folder_name(dataset, tokenizer) == folder and config.NAME.fullmatch(folder)


BAD = [
    (["dataset=file:empty.txt"], "file:empty.txt is empty"), (["dataset=file:empties"], "is empty"),
    (["dataset=file:latin.txt"], "holds no UTF-8 text"), (["dataset=file:none.txt"], "no such file"),
    (["dataset=file:none/*.txt"], "no file matches"), (["dataset=file:pipe"], "neither a file"),
    (["dataset=file:texts", "extensions=.xyz"], "ends with .xyz"), (["dataset=file:"], "unknown dataset"),
    (["dataset=file:texts", "extensions=,"], "extensions"), (["dataset=hf:"], "unknown dataset"),
    (["dataset=pyton"], "python, python+packages, file:PATH"), (["dataset="], "unknown dataset"),
    (["tokenizer=bytes"], "byte, char, bpe:SIZE, gpt2, hf:PATH_OR_NAME"), (["tokenizer=bpe"], "unknown tokenizer"),
    (["tokenizer=bpe:"], "unknown tokenizer"), (["tokenizer=bpe:x"], "unknown tokenizer"),
    (["tokenizer=bpe:257"], "258 to"), (["tokenizer=bpe:-5"], "unknown tokenizer"),
    (["tokenizer=bpe:999999999"], "258 to"), (["tokenizer=hf:"], "unknown tokenizer"),
    (["tokenizer=hf"], "unknown tokenizer"), (["tokenizer=hf:none"], "hf:none is neither a folder nor a hub name"),
    (["tokenizer=hf:./none"], "neither a folder"), (["tokenizer=hf:/none/x"], "neither a folder"),
    (["tokenizer=hf:a/b/c"], "neither a folder"), (["tokenizer=hf:latin.txt"], "neither a folder"),
    (["tokenizer=hf:texts"], "texts has no tokenizer.json"), (["name=../x"], "name '../x'"), (["name=/abs"], "name"),
    (["datset=python"], "did you mean dataset?"), (["val_fraction=x"], "val_fraction: expected float"),
    (["val_fraction=0"], "val_fraction must"), (["val_fraction=1.0"], "val_fraction must"),
    (["max_tokens=-1"], "max_tokens"), (["max_tokens=3"], "max_tokens"), (["shard_tokens=0"], "shard_tokens"),
    (["overwrite=2"], "overwrite"), (["dataset=${oc.env:HOME}"], "interpolation"), (["python"], "key=value"),
    (["data_dir=empty.txt"], "data_dir empty.txt is not"), (["data_dir=empty.txt/x"], "cannot write"),
    (["name=latin.txt", "data_dir=."], "not a data set"),
]


@pytest.fixture
def bad_place(tmp_path):
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    write_docs(tmp_path / "empties", ["", ""])
    write_docs(tmp_path / "texts", ["some text", "more text"])
    os.mkfifo(tmp_path / "pipe")
    return tmp_path


@pytest.mark.parametrize("argv, message", BAD, ids=lambda x: str(x)[:40])
def test_bad_input_is_one_line(bad_place, argv, message, monkeypatch, capsys):
    monkeypatch.chdir(bad_place)
    before = sorted(bad_place.rglob("*"))
    status, out, err = cli(monkeypatch, capsys, *argv)
    assert (status, out) == (2, "") and err.startswith("error: ") and err.count("\n") == 1 and message in err
    assert sorted(bad_place.rglob("*")) == before


@pytest.mark.parametrize("argv", [
    ["dataset=file:empty.txt"], ["n_layer=3"], ["tokenizer=bpe:12"], ["data_dir=empty.txt"]])
def test_bad_input_of_a_real_process(bad_place, argv):
    before = sorted(bad_place.rglob("*"))
    done = run(*argv, cwd=bad_place)
    assert (done.returncode, done.stdout) == (2, "") and sorted(bad_place.rglob("*")) == before
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1


def test_messages_are_squashed_and_interrupts_quiet(monkeypatch, capsys):
    def fail(argv):
        raise UserError("one\n  two\tthree")
    with pytest.raises(SystemExit) as e:
        config.run_cli(fail)
    assert e.value.code == 2 and capsys.readouterr().err == "error: one two three\n"

    def interrupt(argv):
        raise KeyboardInterrupt
    with pytest.raises(SystemExit) as e:
        config.run_cli(interrupt)
    assert e.value.code == 130 and capsys.readouterr() == ("", "")


@pytest.mark.parametrize("code", ["prepare.main(['help'])", "[print(i) for i in range(100_000)]"])
def test_a_closed_pipe_is_quiet(code):
    program = f"import prepare\nprepare.run_cli(lambda argv: {code})"
    process = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE)
    process.stdout.close()
    assert process.stderr.read() == b"" and process.wait(30) == 141


def test_a_run_prints_its_line(tmp_path, docs):
    write_docs(tmp_path / "docs", docs)
    done = run("dataset=file:docs", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.count("\n") == 1
    data = TokenData(tmp_path / "data/file-docs-byte", "train")
    assert f"data/file-docs-byte: train {data.tokens:,} tokens ({data.bytes:,} bytes)" in done.stdout

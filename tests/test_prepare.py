"""prepare.py makes data sets with common/tokenizer.py and common/data.py. The tests look at tokenizers, sources, splits and
files, and at what stops and failures leave."""
import contextlib
import fcntl
import hashlib
import importlib.metadata
import itertools
import json
import math
import os
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import prepare
import runs
import train
from common.options import TrainConfig, UserError
from conftest import ROOT, python
from common import data, options
from common.data import load_data
from common.huggingface import hf_tokenizer, read_tokenizer
from common.tokenizer import (PATTERN, SLICE, ByteTokenizer, CharTokenizer, HFTokenizer, in_base64, load_tokenizer, slices,
                              train_bpe, words_of_bytes)

EOT = "<|endoftext|>"
SPECIAL = [EOT, "<|im_start|>", "<pad>"]  # ids 0 to 2, as SmolLM has its own
WORDS = ("the cat sat on a mat and the dog sat on the log, then they all went home again; however, nobody recognised "
         "the yellow building behind which seventeen quiet musicians practised. ") * 20
DOCS = [f"document {i}: {'naïve 你好 ' * (i % 3)}{WORDS[: 50 * i]}\n" for i in range(40)]


def make(root, **keys):
    """Prepare a data set below root, and return its folder."""
    return prepare.prepare(prepare.PrepareConfig(data_dir=str(root / "data"), **keys))


def write_docs(folder, docs):
    folder.mkdir(parents=True, exist_ok=True)
    for i, doc in enumerate(docs):
        (folder / f"{i:03}.txt").write_bytes(doc if isinstance(doc, bytes) else doc.encode())
    return f"file:{folder}"


def ids_of(folder, split):
    return np.fromfile(folder / f"{split}.bin", load_data(folder)[split].dtype).tolist()


def docs_of(folder, *splits):
    """Return the documents of the splits, cut at the end-of-text tokens."""
    docs = []
    for split in splits or ("train", "val"):
        tokenizer, ids = load_data(folder)[split].tokenizer, ids_of(folder, split)
        ends = [-1, *(i for i, t in enumerate(ids) if t == tokenizer.eot), len(ids)]
        docs += [tokenizer.decode(ids[a + 1: b]) for a, b in zip(ends, ends[1:]) if b > a + 1]
    return docs


def tree(folder):
    return {str(p.relative_to(folder)): p.read_bytes() if p.is_file() else None for p in folder.rglob("*")}


def write_model(folder, data, **config):
    """Write a model's folder, and return it. data is its tokenizer.json, and the keys given are its
    tokenizer_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(data), encoding="utf-8")
    if config:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return str(folder)


def smollm(size=340):
    """Return the tokenizer.json of a small BPE of bytes with SmolLM's parts, which the library trains."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    library, parts = Tokenizer(models.BPE()), pre_tokenizers
    library.pre_tokenizer = parts.Sequence([parts.Digits(True), parts.ByteLevel(add_prefix_space=False)])
    library.decoder = decoders.ByteLevel()
    library.train_from_iterator([WORDS + "\n        indented" * 100], trainers.BpeTrainer(
        vocab_size=size, special_tokens=SPECIAL, show_progress=False, initial_alphabet=parts.ByteLevel.alphabet()))
    return json.loads(library.to_str())


def llama2(**parts):
    """Return the tokenizer.json of a tiny BPE with byte fallback, which has the form of Llama 2's."""
    from tokenizers import Tokenizer, models, normalizers
    words = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *"▁acht<>/s", "at", "▁c", "▁cat"]
    vocab = {word: i for i, word in enumerate(words)}
    library = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    library.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    library.add_special_tokens(words[:3])
    data = json.loads(library.to_str())
    data["model"]["merges"] = ["a t", "▁ c", "▁c at"]  # older files have them in this form
    data["decoder"] = {"type": "Sequence", "decoders": [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0}]}
    return {**data, **parts}


def phi():
    """Return smollm() with runs of blanks as added tokens that are not special, as Phi-2 has them."""
    data = smollm()
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "special": False}
    data["added_tokens"] += [{"id": 340 + n, "content": content, "normalized": n < 3, **flags}
                             for n, content in enumerate(["    ", "   ", "\t\t", "<think>"])]
    return data


@pytest.fixture(scope="module")
def tokenizers():
    return {"byte": ByteTokenizer(), "bpe": train_bpe(300, iter([WORDS + "\n        indented" * 100])),
            **{data.__name__: HFTokenizer(json.dumps(data()), eos)
               for data, eos in ((smollm, EOT), (llama2, "</s>"), (phi, EOT))}}


PARTS = [*SPECIAL, "</s>", "<0x0A>", "  \n\n ", "你好", "\U0001f600", "\r\n", "e\u0301", "'d's", 5 * " ", "<think>", "▁"]
TEXTS = st.lists(st.one_of(st.text(), st.sampled_from(PARTS)), max_size=8).map("".join)


@pytest.mark.parametrize("name", ["byte", "char", "bpe", "smollm", "llama2", "phi"])
@given(text=TEXTS)
def test_any_text_comes_back_and_holds_no_special_token(name, tokenizers, text):
    tokenizer = tokenizers.get(name) or CharTokenizer("".join(sorted(set(text + "a"))))
    again = load_tokenizer(json.loads(json.dumps(tokenizer.to_dict())))
    ids = tokenizer.encode(text)
    assert again.encode(text) == ids and again.to_dict() == tokenizer.to_dict()
    with pytest.raises(UserError, match="udc80"):
        tokenizer.encode(text + "\udc80")
    blank = " " * (name == "llama2" and text > "")  # Llama 2 puts it before a text
    text = text.replace("▁", " ") if name == "llama2" else text         # this sign is Llama 2's space
    *shown, rest = again.stream(ids)
    assert "".join(shown) == blank + text and rest == "" and len(shown) == len(ids)
    assert [] == [s for s in shown if "\ufffd" in s and "\ufffd" not in text]
    special = {again.eot, *range(3 * (tokenizer.kind == "hf"))}
    assert not special & set(ids) and all(0 <= i < again.vocab_size for i in ids)
    assert again.decode([*special, *ids, *special]) == text


@given(ids=st.lists(st.one_of(st.integers(0, 256), st.sampled_from([0xC3, 0xE4, 0xBD, 0xF0, 0x9F, 0x80])), max_size=20))
def test_bytes_that_are_no_text_do_not_stop_a_stream(ids):
    """The text among the bytes comes, at most three tokens late."""
    tokenizer, shown = ByteTokenizer(), ""
    for n, text in enumerate(tokenizer.stream(ids)):
        shown += text
        known = tokenizer.decode(ids[:max(0, n - 3)]).rstrip("\ufffd").replace("\ufffd", "")
        assert shown.replace("\ufffd", "").startswith(known)
    assert shown.replace("\ufffd", "") == tokenizer.decode(ids).replace("\ufffd", "")


def test_an_end_of_text_inside_a_character_has_no_text():
    shown = [*ByteTokenizer().stream([97, 240, 159, 256, 152, 169, 98])]
    assert shown == ["a", "", "", "", "", "\U0001f629", "b", ""]


BYTES = in_base64(bytes([i]) for i in range(256))


@pytest.mark.parametrize("saved", [
    {"kind": ["byte"]}, {"kind": "bpe", "pattern": PATTERN, "ranks": "YQ== YQ=="},
    {"kind": "hf", "json": json.dumps(smollm(260)), "eos": 340}, {"kind": "hf", "json": "[" * 100_000, "eos": EOT},
    *({"kind": "bpe", "pattern": pattern, "ranks": BYTES} for pattern in ("(", "", "a*", "[0-9]+"))])
def test_a_malformed_tokenizer_is_one_error(saved, capfd):
    """Rust panics at some patterns and prints lines of its own, which are not shown. What is printed afterwards is. A
    pattern that leaves out text is as bad."""
    with pytest.raises(UserError, match="malformed tokenizer|not every text comes back"):
        load_tokenizer(saved)
    os.write(2, b"afterwards")
    assert capfd.readouterr().err == "afterwards"


def test_a_very_large_document_is_encoded(tokenizers):
    """It is encoded in slices, because tiktoken's stack overflows on so many spaces."""
    text = " " * 1_000_000
    for name in "bpe", "smollm", "llama2":
        assert tokenizers[name].decode(tokenizers[name].encode(text)) == text
    train_bpe(258, slices(text + WORDS))


def test_what_a_bpe_is_trained_on(tmp_path, monkeypatch):
    seen, train = [], train_bpe
    monkeypatch.setattr(prepare, "train_bpe", lambda size, t: train(size, iter(seen.extend(t) or seen)))
    folder = make(tmp_path, dataset=write_docs(tmp_path / "docs", DOCS), tokenizer="bpe:300")
    assert seen == docs_of(folder, "train") and docs_of(folder, "val")
    seen.clear()
    monkeypatch.setattr(prepare, "SAMPLE_BYTES", 100_000)
    make(tmp_path, dataset=write_docs(tmp_path / "long", [WORDS * 200]), tokenizer="bpe:300")
    assert 100_000 <= sum(map(len, seen)) <= 100_000 + SLICE
    with pytest.raises(UserError, match="bpe:10000.*smaller size"):
        make(tmp_path, dataset=f"file:{tmp_path}/docs", tokenizer="bpe:10000")


def test_gpt2(tmp_path, monkeypatch):
    import tiktoken
    ranks = {bytes([i]): 255 - i for i in range(256)} | {b"he": 256, b"ll": 257, b"20": 258, b"24": 259, b"2024": 260}
    fake = tiktoken.Encoding("gpt2", pat_str="unused", mergeable_ranks=ranks, special_tokens={EOT: 261})
    monkeypatch.setattr(tiktoken, "get_encoding", lambda name: fake)
    folder = make(tmp_path, dataset=write_docs(tmp_path / "docs", ["hello, " * 100]), tokenizer="gpt2")
    data = load_data(folder)["train"]
    assert (data.vocab_size, data.tokenizer.eot) == (262, 261)
    assert data.windows([0], 3).tolist() == [[256, 257, 255 - ord("o")]]
    assert data.tokenizer.encode("2024") == [260], "a number is one word, and not three digits at most"


def test_words_of_a_bpe():
    split = lambda text: [piece for piece, _ in words_of_bytes(PATTERN).pre_tokenize_str(text)]
    assert split("it's") == ["it", "'s"] and split("x'data") == ["x", "'data"] and split("12345") == ["123", "45"]
    assert len(split("xe\u0301x")) == 1, "an accent is a part of its word"
    bpe = train_bpe(262, ["hello hello world " * 50])
    assert [bpe.decode_bytes([i]) for i in range(256)] == [bytes([i]) for i in range(256)]


def test_ids_with_gaps_are_below_the_vocabularys_size():
    data = smollm(262)
    size, vocab = read_tokenizer(json.dumps(data), EOT).vocab_size, data["model"]["vocab"]
    vocab[max(vocab, key=vocab.get)] += 5
    assert read_tokenizer(json.dumps(data), EOT).vocab_size == size + 5


METASPACE = {"type": "Metaspace", "replacement": "▁"}
METASPACES = [{**METASPACE, "prepend_scheme": "first", "split": False}, {**METASPACE, "add_prefix_space": True}]
BPE = {"type": "BPE", "vocab": {"a": 0, EOT: 1}, "merges": []}


@pytest.mark.parametrize("data", [smollm, phi, llama2, *(
    lambda step=step: llama2(normalizer=None, pre_tokenizer=step) for step in METASPACES)])
def test_ids_and_text_are_the_librarys(data, monkeypatch):
    """This also holds for a text of several slices."""
    from tokenizers import Tokenizer
    library, text = Tokenizer.from_str(json.dumps(data())), "cat cat 2024     naïve 你好\r\n\t's  x cat <think>\t\ty"
    truncation = {"max_length": 9, "strategy": "LongestFirst", "stride": 0, "direction": "Right"}
    tokenizer = read_tokenizer(json.dumps({**data(), "truncation": truncation}), library.id_to_token(2))
    for part in text, " " + text, 100 * text:
        monkeypatch.setattr("common.tokenizer.slices", lambda text: slices(text, 700))
        assert tokenizer.encode(part) == (ids := library.encode(part, add_special_tokens=False).ids)
        assert tokenizer.decode(ids) == library.decode(ids)
        assert "".join(tokenizer.stream(ids)).strip() == library.decode(ids).strip()


@pytest.mark.parametrize("parts, message", [
    ({"model": {"type": "WordPiece", "vocab": {EOT: 0}}}, "cannot be used"),
    ({"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}}, "cannot be used"),       # Rust panics
    ({"added_tokens": [], "model": {**BPE, "vocab": {"a": 0}}}, "no end-of-text token"),
    ({"model": BPE}, "not every text comes back"), ({"normalizer": {"type": "Lowercase"}}, "not every text comes back.*'B "),
    ({"added_tokens": [*smollm(260)["added_tokens"], {"id": 260, "content": "<mask>", "single_word": False, "lstrip": True,
                                                      "rstrip": False, "normalized": False, "special": False}]}, "<mask>")])
def test_refused_models(tmp_path, parts, message):
    """A model is also refused if texts do not come back from it, because its bits per byte would compare with none."""
    with pytest.raises(UserError, match=message):
        hf_tokenizer(write_model(tmp_path, {**smollm(260), **parts}))


def test_a_text_that_does_not_come_back_is_refused(tmp_path, capsys):
    sat = {"type": "Replace", "pattern": {"String": "cat sat"}, "content": "dog sat"}
    model = write_model(tmp_path / "model", {**smollm(260), "normalizer": sat})
    with pytest.raises(UserError, match="not every text comes back from the tokenizer: 'cat sat on a mat and' comes as 'dog sat"):
        make(tmp_path, dataset=write_docs(tmp_path / "docs", DOCS), tokenizer=f"hf:{model}")
    # NFC passes and says so. bytes counts those of the text that the tokens give back.
    model = write_model(tmp_path / "nfc", {**smollm(260), "normalizer": {"type": "NFC"}})
    docs = ["cafe\u0301 \u212b " * 10] * 2
    data = load_data(make(tmp_path, dataset=write_docs(tmp_path / "accents", docs), tokenizer=f"hf:{model}", name="nfc"))
    assert "another form (Unicode's NFC" in capsys.readouterr().out
    assert data["train"].bytes + data["val"].bytes == 2 * len("café Å ".encode()) * 10


def test_a_tokenizer_of_the_hub(tmp_path, monkeypatch):
    import huggingface_hub
    cache, end = tmp_path / "cache", {"content": "<pad>"}  # the eos_token in the form of older files
    download = lambda *_, **keys: write_model(cache, smollm(), eos_token=end)  # noqa
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    docs = [f"{doc}\U0001f600{EOT}" for doc in DOCS]
    folder = make(tmp_path, dataset=write_docs(tmp_path / "docs", docs), tokenizer="hf:Owner/Name-1.0_b")
    shutil.rmtree(cache)  # it is not needed again
    assert folder.name.endswith("docs-hf-Owner-Name-1.0_b") and sorted(docs_of(folder)) == sorted(docs)
    assert load_data(folder)["val"].tokenizer.eot == 2 == ids_of(folder, "val")[-1]


@pytest.mark.parametrize("function, keys, message", [
    ("tiktoken.get_encoding", {"tokenizer": "gpt2"}, "gpt2 needs a network once"),
    ("urllib.request.urlopen", {"dataset": "shakespeare"}, "use dataset=file:PATH"),
    ("datasets.load_dataset_builder", {"dataset": "hf:a/b"}, "cannot read hf:a/b .prepare.py text_column=text.: ConnectionError: no route$"),
    ("huggingface_hub.snapshot_download", {"tokenizer": "hf:a/b"}, "hf:a/b cannot be used: .*: .*: no route$")])
def test_no_network(tmp_path, function, keys, message, monkeypatch):
    monkeypatch.setattr(function, Mock(side_effect=ConnectionError("no route\nto host")))
    with pytest.raises(UserError, match=message):
        make(tmp_path, **keys)
    assert list(tmp_path.iterdir()) == []


def test_one_document_is_split_in_order(tmp_path):
    text = "".join(f"line {i} é你\n" for i in range(100))
    folder = make(tmp_path, dataset=write_docs(tmp_path / "docs", ["\ufeff" + text]), val_fraction=0.25)
    train, val = bytes(ids_of(folder, "train")), bytes(ids_of(folder, "val"))  # no end-of-text, no byte order mark
    assert (train + val).decode() == text and len(val.decode()) == round(len(text) / 4)
    with pytest.raises(UserError, match="too short"):
        make(tmp_path, dataset=write_docs(tmp_path / "short", ["abc"]))
    assert docs_of(make(tmp_path, dataset=write_docs(tmp_path / "short", ["abcd"]))) == ["ab", "cd"]


def test_documents_are_split_whole_and_counted(tmp_path):
    docs = [*DOCS, "a\r\nb\rc\n", WORDS * 20]  # line ends are kept; the last has two slices
    dataset = write_docs(tmp_path / "docs", [*docs, b"\xff\xfe", b"caf\xe9", b""])
    folder = make(tmp_path, dataset=dataset, val_fraction=0.3, tokenizer="bpe:290")
    found = {}
    for split in "train", "val":
        found[split], data, ids = docs_of(folder, split), load_data(folder)[split], ids_of(folder, split)
        assert data.bytes == sum(len(doc.encode()) for doc in found[split]) and ids[-1] == 289
        assert data.tokens == len(ids) and ids.count(289) == len(found[split])
        assert [d for d in docs if d in found[split]] == found[split] and len(found[split]) > 4     # in order
    assert (data.vocab_size, data.meta["eot"], data.meta["skipped"]) == (290, 289, 2)
    assert sorted(sum(found.values(), [])) == sorted(docs)


@given(texts=st.lists(st.text(st.sampled_from("abcé你 "), min_size=1, max_size=40), min_size=1, max_size=30),
       fraction=st.sampled_from([0.1, 0.02, 0.5, 0.9]))
def test_a_document_stays_in_the_split_of_its_hash(texts, fraction):
    """The hash alone decides. Where that would leave a split empty, the end of each document goes to val."""
    in_val = [int(hashlib.sha256(t.encode()).hexdigest(), 16) / 2 ** 256 < fraction for t in texts]
    parts = list(prepare.Corpus(lambda: texts, fraction).parts())
    if len(set(in_val)) == 2:
        assert parts == [(("train", "val")[v], text) for v, text in zip(in_val, texts)]
    else:
        rest = iter(parts)
        for text in texts:
            tail = min(len(text), max(2, round(len(text) * fraction)))
            head = next(rest)[1] if tail < len(text) else ""
            assert (head + text[len(head):], next(rest)) == (text, ("val", text[len(text) - tail:]))


def test_a_stream_without_texts_ends():
    with pytest.raises(UserError, match="is text_column= right"):
        prepare.Corpus(lambda: itertools.repeat(5), 0.1)
    # The validation text may be the one that has none, or the one that has no end.
    room, val = {"train": 9, "val": 9}, Mock(side_effect=lambda: iter(rows))
    rows = itertools.repeat(5, 2000)
    with pytest.raises(UserError, match="is text_column= right"):
        list(prepare.TwoSources(lambda: ["abc"], val, room))
    rows = itertools.repeat("x", 2000)
    assert list(prepare.TwoSources(lambda: ["abc", "d"], val, room).sample(["train"], 1000)) == ["abc", "d"]
    assert next(rows) and len(list(rows)) == 1998       # one was read


@pytest.mark.parametrize("tokenizer", ["byte", "bpe:300"])
def test_max_tokens_is_exact(tmp_path, tokenizer):
    for source in DOCS, [WORDS]:
        keys = {"tokenizer": tokenizer, "val_fraction": 0.2, "overwrite": True,
                "dataset": write_docs(tmp_path / f"docs{len(source)}", source)}
        whole, folder = make(tmp_path, **keys, name="whole"), make(tmp_path, **keys, name="part", max_tokens=777)
        for split, count in ("train", 622), ("val", 155):
            data, ids = load_data(folder)[split], ids_of(folder, split)
            assert data.tokens == len(ids) == count and ids == ids_of(whole, split)[:count]
            assert data.bytes == len(data.tokenizer.decode_bytes(ids))


def test_files_of_a_folder_or_a_glob(tmp_path, monkeypatch, capsys):
    for name in ("b.txt", "a/z.md", "a-b.txt", "c.py", ".hidden.txt", ".git/x.txt", "d.bin", "U.TXT", "[ab].txt",
                 "__pycache__/p.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)

    found = lambda *a: [[os.path.relpath(p, tmp_path) for p in files] for files in prepare.text_files(*a)]  # noqa
    assert found(str(tmp_path)) == [["U.TXT", "[ab].txt", "a-b.txt", "a/z.md", "b.txt", "c.py"], ["d.bin"]]
    assert found(str(tmp_path), (".py", ".md"))[0] == ["a/z.md", "c.py"]
    assert found(f"{tmp_path}/*b.txt")[0] == ["a-b.txt", "b.txt"]
    assert found(f"{tmp_path}/[ab].txt") == [["[ab].txt"], []]  # it is a file's own name, not a glob
    assert len(found(f"{tmp_path}/**/**/z.md")[0]) == 1     # each file once, although the pattern finds it several times
    os.symlink("../a", tmp_path / "a/loop")
    os.symlink("a", tmp_path / "link")      # a linked folder is read like a linked file
    assert found(str(tmp_path), (".md",))[0] == ["a/z.md", "link/z.md"]
    assert found(f"{tmp_path}/a*") == [["a-b.txt"], ["a"]]
    make(tmp_path, dataset=f"file:{tmp_path}")
    assert f"note: file:{tmp_path}: not read: {tmp_path}/d.bin\n" in capsys.readouterr().out
    monkeypatch.setenv("HOME", str(tmp_path))
    assert prepare.source_files("file:~/b.txt", "train")[0] == [str(tmp_path / "b.txt")]


def test_packages_are_split_whole_and_without_what_is_in_train(tmp_path, monkeypatch, capsys):
    """A file that two packages have is train's. 70 bytes of `second` stand in train, so they are left out; the 63 in
    `third` are too few."""
    letters = lambda seed, n=90: bytes(np.random.default_rng(seed).integers(97, 123, n, dtype=np.uint8)).decode()
    first, copied, end = letters(0, 300), letters(1), letters(4)
    texts = {"first": [first, copied, "x\ny\n"], "second": [letters(2) + first[100:170] + letters(3), copied, end],
             "third": [letters(5) + first[20:83] + letters(6), letters(7)]}
    monkeypatch.setattr(prepare, "PACKAGES", {"first": ("train", ""), "second": ("val", ""), "third": ("tune", "")})
    monkeypatch.setattr(prepare, "package_text", lambda package: texts[package])
    folder = make(tmp_path, dataset="packages")
    del texts["second"]         # packages-tune does not read it
    tune = make(tmp_path, dataset="packages-tune")
    for split, docs in ("train", texts["first"]), ("val", [letters(2) + letters(3), end]):
        assert sorted(docs_of(folder, split)) == sorted(docs) and load_data(folder)[split].bytes == sum(map(len, docs))
    assert sorted(docs_of(tune, "val")) == sorted(texts["third"]) and ids_of(tune, "train") == ids_of(folder, "train")
    assert [load_data(f)["val"].meta["left_out"] for f in (folder, tune)] == [70, 0]
    assert "70 tokens of val left out" in capsys.readouterr().out


def test_packages_are_the_same_text_or_refused(tmp_path, monkeypatch):
    """Line ends of Windows change no text, and a file without a hash was made here. Another text, another version and a
    missing package are told with the command that mends them."""
    info, other = (tmp_path / f"second-{version}.dist-info" for version in ("2.0", "2.1"))
    metadata = "Metadata-Version: 2.1\nName: second\nVersion: 2.0\n"
    files = {"second/a.py": "x\r\ny\r\n", "second/b.md": "b", "second/c.py": "b", "second/d.txt": "no code",
             "second/made.py": "", f"{info.name}/LICENSE.md": "licence", f"{info.name}/METADATA": metadata}
    for file, text in files.items():
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_bytes(text.encode())
    record = (f"{file},{'sha256=x' if text else ''},{len(text)}\n" for file, text in files.items())
    (info / "RECORD").write_text("".join(record))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(prepare, "PACKAGES", {"second==2.0": ("val", hashlib.sha256(b"b\0x\ny\n").hexdigest()[:16])})
    assert prepare.package_text("second==2.0") == ["b", "x\ny\n"]
    for there, change in (
            ("installed as 2.0, but with other text than its wheel's", lambda: (tmp_path / "second/c.py").write_text("z")),
            ("installed as 2.1", lambda: (info.rename(other) / "METADATA").write_text(metadata.replace("2.0", "2.1"))),
            ("not installed", lambda: shutil.rmtree(other))):
        change()
        with pytest.raises(UserError) as error:
            prepare.package_text("second==2.0")
        assert f"second==2.0, which is {there}: pip install --force-reinstall --no-deps second==2.0" in str(error.value)


def test_the_packages_are_those_of_the_tests_requirements():
    """The pins, and the text of the packages that are installed with the pinned version."""
    pins = {line.strip() for file in ("requirements.txt", "tests/requirements.txt") for line in (ROOT / file).open()}
    assert prepare.PACKAGES.keys() <= pins
    for package in prepare.PACKAGES:
        name, version = package.split("==")
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            if importlib.metadata.version(name).partition("+")[0] == version:
                assert len(prepare.package_text(package)) > 20


@given(seed=st.integers(0, 2 ** 32), sizes=st.tuples(st.integers(0, 150), st.integers(1, 300)), copies=st.integers(0, 3))
def test_repeated_tokens(seed, sizes, copies):
    """Against every stretch compared with every other, with train in chunks."""
    rng = np.random.default_rng(seed)
    val, train = (rng.integers(0, 3, size).astype(np.uint16) for size in sizes)
    for _ in range(copies):
        n = int(min(rng.integers(55, 100), *sizes))
        a, b = (int(rng.integers(0, size - n + 1)) for size in sizes)
        val[a:a + n] = train[b:b + n]
    known = {train[i:i + 64].tobytes() for i in range(len(train) - 63)}
    expected = np.zeros(len(val), dtype=bool)
    for i in range(len(val) - 63):
        expected[i:i + 64] |= val[i:i + 64].tobytes() in known
    with mock.patch.object(data, "CHUNK", 50):
        assert data.repeated(val, train).tolist() == expected.tolist()


def test_local_data_sets(tmp_path, monkeypatch):
    """A data set is a folder, also one named like a builder of the library, or a single file of rows."""
    datasets = pytest.importorskip("datasets")
    monkeypatch.chdir(tmp_path)
    docs = [f"row {i} " * 5 for i in range(30)]
    rows = datasets.Dataset.from_dict({"text": [*docs, None, ""], "n": range(32)})
    for file in "json/train.parquet", "json/test.parquet", "[a].parquet", "d[1]/a.parquet":
        rows.to_parquet(file)
    rows.to_csv("rows.csv")
    Path("rows.jsonl").write_text("\ufeff" + "\n".join(json.dumps({"text": row}) for row in [*docs, None]))
    for n, dataset in enumerate(["hf:json", "hf:[a].parquet", "hf:d[1]", "hf:rows.csv", "hf:rows.jsonl"]):
        folder = make(tmp_path, dataset=dataset, split="test" if n == 0 else "train", name=str(n))
        assert sorted(docs_of(folder)) == sorted(docs)
        assert load_data(folder)["val"].meta["skipped"] == (dataset != "hf:rows.csv")   # an empty cell is an empty text
    prepare.prepare_missing(TrainConfig(dataset="hf:rows.csv", data_dir=str(tmp_path / "made")))     # as train.py does
    assert sorted(docs_of(tmp_path / "made/hf-rows.csv-byte")) == sorted(docs)
    for dataset, message in {"hf:text": "nor a hub name", "hf:text:rows.csv": "nor a hub name",  # it would read more
                             "hf:": "unknown dataset", "hf:[a].parquet": "0 documents of UTF-8 text, 32 others",
                             "file:rows.csv": "is a table: dataset=hf:PATH", "file:*.jsonl": "is a table",
                             "rows.csv": "dataset=hf:rows.csv reads tables", "hf:json": "cannot read hf:json"}.items():
        with pytest.raises(UserError, match=message):
            make(tmp_path, dataset=dataset, text_column="n" if "others" in message else "m")


def read_rows(dataset, split="train"):
    """Return the texts that are read, and the files that are not."""
    cfg = prepare.PrepareConfig(dataset=dataset, split=split)
    files, others = prepare.source_files(dataset, split)
    return list(prepare.documents(cfg, files)), [os.path.basename(f) for f in others]


def test_a_folder_is_all_of_its_tables_or_a_split(tmp_path):
    """Names of files are splits if all of them are, or if the data set's card says so."""
    pytest.importorskip("datasets")
    def write(file, *rows):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text("".join(f"{row}\n" for row in rows))
    for name in "crash-train", "crash-test", "road":
        write(f"d/{name}.jsonl", json.dumps({"text": name}))
    write("d/more.csv", "text,n", "null,1", "NA,2", "007,3", '"a, b",4')
    write("d/tab.tsv", "n\ttext", "1\tx y", "2\t5")
    write("d/notes.txt", "not a table")
    found = ["null", "NA", "007", "a, b", "crash-test", "crash-train", "road", "x y", "5"]
    assert read_rows(f"hf:{tmp_path}/d") == (found, ["notes.txt"])
    os.rename(tmp_path / "d/road.jsonl", tmp_path / "road.jsonl")
    os.remove(tmp_path / "d/tab.tsv")
    os.rename(tmp_path / "d/more.csv", tmp_path / "d/my_train.csv")     # another format, the same split
    others = ["crash-test.jsonl", "notes.txt"]
    assert read_rows(f"hf:{tmp_path}/d") == ([*found[:4], "crash-train"], others)
    assert read_rows(f"hf:{tmp_path}/d", "test")[0] == ["crash-test"]
    with pytest.raises(UserError, match="no table .* of split=validation"):
        read_rows(f"hf:{tmp_path}/d", "validation")
    os.remove(tmp_path / "d/my_train.csv")
    write("d/README.md", "---", "configs:", "- config_name: default", "  data_files:", "  - split: train",
          "    path: crash-test.jsonl", "---")
    assert read_rows(f"hf:{tmp_path}/d") == (["crash-test"], ["README.md", "crash-train.jsonl", "notes.txt"])


def test_a_validation_text_of_its_own(tmp_path, capsys):
    """It is a file, or a split of the tables. All of dataset= is train then, and no document is cut."""
    pytest.importorskip("datasets")
    texts = {part: [f"{part} {i}" for i in range(n)] for part, n in {"train": 5, "validation": 3}.items()}
    inputs = tmp_path / "in"
    inputs.mkdir()
    for part, rows in texts.items():
        (inputs / f"{part}.txt").write_text(rows[0])
        (inputs / f"{part}.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    files = dict(dataset=f"file:{inputs}/train.txt", val=f"file:{inputs}/validation.txt", name="files")
    for keys, n in (files, 1), (dict(dataset=f"hf:{inputs}", val="validation", name="tables"), 9):
        folder = make(tmp_path, **keys)
        assert docs_of(folder, "train") == texts["train"][:n] and docs_of(folder, "val") == texts["validation"][:n]
        capsys.readouterr()
        prepare.tell_changes(folder, load_data(folder)["val"].meta)
        assert make(tmp_path, **keys) == folder and "note" not in capsys.readouterr().out
    (inputs / "validation.txt").write_text("")
    prepare.tell_changes(tmp_path / "data/files", load_data(tmp_path / "data/files")["val"].meta)
    assert "train.txt or its val= has another size, date, content than when" in capsys.readouterr().out
    os.remove(inputs / "validation.txt")
    prepare.tell_changes(tmp_path / "data/files", load_data(tmp_path / "data/files")["val"].meta)
    assert "train.txt or its val= has another size, date, content, path than when" in capsys.readouterr().out
    (inputs / "validation.txt").write_text("")
    for more, message in {("val", ""): "was made with val='file:", ("name", ""): "val= needs name=NAME",
                          ("val", "test"): "val=test is no validation text for dataset=file", ("overwrite", True): "fewer than 2 tokens",
                          ("dataset", "packages"): "dataset=packages has a validation text of its own: leave out val="}.items():
        with pytest.raises(UserError, match=message):
            make(tmp_path, **files | dict([more]))
    for dataset, val in (f"file:{inputs}/train.txt", f"file:{inputs}/*.txt"), (f"hf:{inputs}/train.jsonl", "validation"):
        with pytest.raises(UserError, match="reads .*/train.(txt|jsonl), which dataset= reads, too"):
            make(tmp_path, dataset=dataset, val=val, name="new")
    (inputs / "link.txt").symlink_to(inputs / "train.txt")      # dataset= may have a text twice
    (inputs / "other.txt").write_text("other")
    assert docs_of(make(tmp_path, dataset=f"file:{inputs}/[tl]*.txt", val=f"file:{inputs}/other.txt", name="twice"),
                   "train") == texts["train"][:1] * 2
    with pytest.raises(UserError, match="val=train is the text of dataset=hf:a/b itself"):
        make(tmp_path, dataset="hf:a/b", val="train", name="new")


def test_a_stream_of_the_hub_is_left_early(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")

    def endless():
        for i in range(10_000):
            yield {"text": f"document {i} " * 100}
        raise AssertionError("the stream should have been left")
    stream = Mock(return_value=datasets.IterableDataset.from_generator(endless))
    builder = Mock(return_value=SimpleNamespace(name="parquet", as_streaming_dataset=stream))
    monkeypatch.setattr(datasets, "load_dataset_builder", builder)
    monkeypatch.setattr(prepare, "SAMPLE_BYTES", 10_000)
    folder = make(tmp_path, dataset="hf:owner/name:config", split="validation", tokenizer="char", max_tokens=100_000)
    assert folder.name == "hf-owner-name-config-char"
    assert [load_data(folder)[s].tokens for s in ("train", "val")] == [90_000, 10_000]
    builder.assert_called_with("owner/name", "config")
    stream.assert_called_with("validation")
    (tmp_path / "val.txt").write_text("document 0")
    for val, n in (f"file:{tmp_path}/val.txt", 11), ("other", 100):
        folder = make(tmp_path, dataset="hf:owner/name", val=val, tokenizer="char", max_tokens=1000, name=f"of_{n}")
        assert [load_data(folder)[s].tokens for s in ("train", "val")] == [900, n]
    stream.assert_called_with("other")


def test_a_large_vocabulary_is_uint32(tmp_path):
    text = "".join(map(chr, range(0x10000, 0x10000 + 70_000)))
    data = load_data(make(tmp_path, dataset=write_docs(tmp_path / "docs", [text]), tokenizer="char"))["val"]
    assert data.meta["dtype"] == "uint32" and (data.tokens, data.vocab_size) == (7000, 70_001)
    assert data.windows([9, 6990, 0], 10).tolist() == [list(range(63_000 + i, 63_010 + i)) for i in (9, 6990, 0)]


def write_set(folder, count=30, info=(), **changes):
    """Write a data set as prepare.py does, whose tokens count up."""
    folder.mkdir(exist_ok=True)
    for split in "train", "val":
        (np.arange(count) % 251).astype("<u2").tofile(folder / f"{split}.bin")
    sizes = {"tokens": count, "bytes": 9, "sha256": ""}
    meta = {"vocab_size": 257, "dtype": "uint16", "tokenizer": {"kind": "byte"},
            "splits": {"train": {**sizes, **dict(info)}, "val": sizes}, **changes}
    (folder / "meta.json").write_text(json.dumps(meta))
    return folder


@pytest.mark.parametrize("changes, message", [
    ({"dtype": "int16"}, "int16"), ({"splits": {}}, "train"), ({"splits": [3]}, "TypeError"),
    ({"info": {"bytes": math.inf}}, "OverflowError"), ({"tokenizer": 3}, "malformed tokenizer")])
def test_wrong_meta(tmp_path, changes, message):
    with pytest.raises(UserError, match=f"{tmp_path}/set is not a data set of this project.*{message}"):
        load_data(write_set(tmp_path / "set", **changes))


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="reads /proc")
def test_memory_does_not_grow(tmp_path):
    """There are 2,000 batches from all over a file of 200 MB, most of which is a hole."""
    n = 100_000_000
    folder = write_set(tmp_path / "set", info={"tokens": n})
    os.truncate(folder / "train.bin", 2 * n)
    data, rng = load_data(folder)["train"], np.random.default_rng(0)
    resident = lambda: int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()  # noqa
    before, most = resident(), 0
    for _ in range(2000):
        data.windows(rng.integers(n - 256, size=8), 257)
        most = max(most, resident())
    assert most - before < 20e6


def test_files_replaced_while_in_use(tmp_path):
    """A run that reads a data set goes on with it when another takes its place."""
    before = load_data(folder := write_set(tmp_path / "set", 4))["train"]
    os.rename(folder, tmp_path / "old")
    np.array([5, 6, 300, 8], "<u2").tofile(write_set(folder, 4) / "train.bin")
    with pytest.raises(UserError, match=r"token 300 in .*train.bin is out of the vocabulary"):
        load_data(folder)["train"].windows([0], 4)
    shutil.rmtree(tmp_path / "old")
    assert before.windows([0], 4).tolist() == [[0, 1, 2, 3]]


@pytest.mark.parametrize("tokenizer", ["char", pytest.param("bpe:400", marks=pytest.mark.full)])
def test_prepared_twice_the_bytes_are_the_same(tmp_path, tokenizer):
    keys = "dataset=" + write_docs(tmp_path / "docs", DOCS), f"tokenizer={tokenizer}", "name=x"
    for seed in "1", "2":
        done = python("prepare.py", *keys, f"data_dir={tmp_path}/data{seed}", PYTHONHASHSEED=seed)
        assert done.returncode == 0 and done.stderr == "" and done.stdout.count("\n") == 1
    assert tree(tmp_path / "data1") == tree(tmp_path / "data2") != {}


SLOW = """
import sys, time, prepare
from common import options
def slow(cfg, files):
    for i in range(1000):
        yield f"{i} some text " * 100_000
        print("read", flush=True)
        time.sleep(0.01)
prepare.BATCH = 20
prepare.documents, prepare.SAMPLE_BYTES = slow, 1
options.run_cli(prepare.main)
"""


@pytest.mark.parametrize("number, status, overwrite", [(signal.SIGTERM, 143, True), (signal.SIGINT, 130, False)])
def test_a_signal_leaves_nothing_or_the_old_set(tmp_path, number, status, overwrite):
    if overwrite:
        make(tmp_path, dataset=write_docs(tmp_path / "docs", DOCS), name="python-byte")
    before = tree(tmp_path)
    process = subprocess.Popen([sys.executable, "-c", SLOW, f"data_dir={tmp_path}/data", "overwrite=true",
                                "dataset=hf:x", "name=python-byte"],
                               cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                               # A shell starts `pytest &` with SIGINT ignored, which the child would inherit.
                               preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
    while not any(tmp_path.rglob(".python-byte.*/new/*.bin")):
        assert process.stdout.readline() == "read\n"
    process.send_signal(number)
    _, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (status, "") and tree(tmp_path) == before


def test_a_full_disk_leaves_nothing(tmp_path):
    limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000))  # noqa
    done = subprocess.run([sys.executable, ROOT / "prepare.py", "dataset=python"], cwd=tmp_path, preexec_fn=limit,
                          text=True, capture_output=True)
    assert (done.returncode, done.stdout) == (2, "") and list(tmp_path.iterdir()) == []
    assert done.stderr == "error: cannot make data/python-byte: [Errno 27] File too large\n"


def test_an_existing_set_is_left_alone(tmp_path, monkeypatch):
    keys = {"dataset": write_docs(tmp_path / "docs", DOCS), "name": "x"}
    folder = make(tmp_path, **keys)
    inode, before = os.stat(folder).st_ino, tree(folder)
    assert make(tmp_path, **keys) == folder and os.stat(folder).st_ino == inode
    for key, value in {"val_fraction": 0.2, "tokenizer": "char", "dataset": "python"}.items():
        with pytest.raises(UserError, match=f"{key}.*overwrite=true"):
            make(tmp_path, **{**keys, key: value})
    assert tree(folder) == before
    os.truncate(folder / "val.bin", 4)
    with pytest.raises(UserError, match="val.bin is damaged.*overwrite=true"):
        make(tmp_path, **keys)
    make(tmp_path, **keys, overwrite=True)
    assert tree(folder) == before and os.listdir(folder.parent) == ["x"]
    # The call is stopped between the two renames.
    rename = os.rename
    monkeypatch.setattr(os, "rename", lambda a, b: rename(a, b) if Path(a).name != "new" else sys.exit(143))
    with pytest.raises(SystemExit):
        make(tmp_path, **keys, overwrite=True)
    assert tree(folder) == before


def test_a_changed_source_is_told(tmp_path, capsys, monkeypatch):
    """A run tells if the size, the date or the content is another, also if the date is older. No path of this machine is
    written."""
    def told():
        train.setup(runs.arguments("gpt", tmp_path / "out", tmp_path / "data", "dataset=file:a.txt", "overwrite=true"))
        return [line.split(" than when")[0] for line in capsys.readouterr().out.splitlines() if "note:" in line]
    monkeypatch.chdir(tmp_path)
    text, note = "some text " * 100, "note: file:a.txt has another "
    for new, date, notes in ((text, 1e9, []), (text, 9e8, [note + "date"]), (text.upper(), 1e9, [note + "content"]),
                             (text + "x", 1e9, [note + "size, content"])):
        Path("a.txt").write_text(new)
        os.utime("a.txt", (date, date))
        assert told() == notes
    os.remove("a.txt")
    assert told() == [] and str(tmp_path) not in Path("data/file-a.txt-byte/meta.json").read_text()


def test_what_killed_calls_left_is_removed(tmp_path, monkeypatch):
    """A set that was to be replaced goes back, too. The folder of a call that goes on stays."""
    root, dataset = tmp_path / "data", write_docs(tmp_path / "docs", DOCS)
    folder = make(tmp_path, dataset=dataset, name="x")
    for name, locked in ("dead0000", False), ("_alive00", True):
        (root / f".x.{name}" / "new").mkdir(parents=True)
        if locked:
            fd = os.open(root / f".x.{name}", os.O_RDONLY)
            fcntl.flock(fd, fcntl.LOCK_EX)      # another descriptor is like another process
    os.rename(folder, root / ".x.dead0000" / "old")
    shutil.copytree(root / ".x.dead0000" / "old", root / ".x.late0000" / "old")     # it was being deleted
    with monkeypatch.context() as patch:
        patch.setattr(options, "fcntl", None)       # as on Windows: nobody knows which call goes on
        prepare.clear_killed(folder)
        assert len(os.listdir(root)) == 3
    assert make(tmp_path, dataset=dataset, name="x") == folder
    assert sorted(os.listdir(root)) == [".x._alive00", "x"]
    os.close(fd)
    make(tmp_path, dataset=dataset, name="x", overwrite=True)
    assert os.listdir(root) == ["x"]


def test_bytes_are_those_of_the_token_files(tmp_path, data_dir):
    """A run checks the token files themselves."""
    for name in "train.bin", "val.bin":
        shutil.copytree(data_dir / "words", tmp_path / name / "words")
        with open(tmp_path / name / "words" / name, "r+b") as f:
            f.write(b"zz")
        with pytest.raises(UserError, match=f"{name} is damaged, .* SHA-256"):
            train.setup(runs.arguments("gpt", tmp_path / "out", tmp_path / name))


def test_what_is_no_data_set_is_not_replaced(tmp_path):
    write_docs(tmp_path / "data/y", ["years of work"])
    for n in 1, 2:
        with pytest.raises(UserError, match="not a data set, or holds other files too"):
            make(tmp_path, name="y", overwrite=True)
        assert len(tree(tmp_path / "data/y")) == n
        (tmp_path / "data/y/meta.json").write_text("{}")


def test_a_set_on_another_disk(tmp_path):
    """It is replaced there, and the link to it stays. A stray file of a file manager does no harm, unless it would be
    deleted. A link to nothing is told before any work."""
    made = make(tmp_path, dataset=write_docs(tmp_path / "docs", DOCS), name="x")
    (tmp_path / "disk").mkdir()
    made.rename(tmp_path / "disk/x")
    made.symlink_to(tmp_path / "disk/x")
    (made / ".DS_Store").touch()
    again = dict(dataset=f"file:{tmp_path}/docs", name="x")
    make(tmp_path, **again)
    with pytest.raises(UserError, match="holds other files too"):
        make(tmp_path, **again, overwrite=True)
    (made / ".DS_Store").unlink()
    make(tmp_path, **again, overwrite=True, val_fraction=0.3)
    assert made.is_symlink() and load_data(tmp_path / "disk/x")["train"].meta["val_fraction"] == 0.3
    shutil.rmtree(tmp_path / "disk")
    with pytest.raises(UserError, match=f"{made} is a link to {tmp_path}/disk/x, which does not exist"):
        make(tmp_path, **again)


def test_programs_start_without_fcntl():
    """Windows has no fcntl, which common/options.py alone imports. There no lock tells two processes in a folder
    apart."""
    done = python("-c", "import sys; sys.modules['fcntl'] = None; import prepare, pathlib; prepare.lock(pathlib.Path('.'))")
    assert done.returncode == 0, done.stderr


def test_a_closed_pipe_is_quiet():
    process = subprocess.Popen([sys.executable, "prepare.py", "help"], cwd=ROOT, stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE)
    process.stdout.close()
    assert process.stderr.read() == b"" and process.wait(30) == 141

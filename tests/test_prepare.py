"""prepare.py, tokenizer.py, data.py and config.py: tokenizers, sources, splits, files, what stops and failures leave
behind, and bad input."""
import base64
import hashlib
import json
import os
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
from hypothesis import given
from hypothesis import strategies as st

import config
import prepare
from config import UserError
from conftest import ROOT
from data import TokenData
from prepare import PrepareConfig
from tokenizer import (SLICE, ByteTokenizer, CharTokenizer, HFTokenizer, hf_tokenizer, load_tokenizer, slices,
                       train_bpe)

EOT = "<|endoftext|>"
SPECIAL = [EOT, "<|im_start|>", "<pad>"]  # ids 0 to 2, as SmolLM has its own
WORDS = ("the cat sat on a mat and the dog sat on the log, then they all went home again; however, nobody recognised "
         "the yellow building behind which seventeen quiet musicians practised. ") * 20


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
    return np.concatenate([np.fromfile(folder / f, data.dtype) for f in data.files]).tolist()


def docs_of(folder, *splits):
    """The documents of the splits, cut at the end-of-text tokens."""
    docs = []
    for split in splits or ("train", "val"):
        tokenizer, doc = TokenData(folder, split).tokenizer, []
        for i in [*ids_of(folder, split), tokenizer.eot]:
            if i != tokenizer.eot:
                doc.append(i)
            elif doc:
                docs.append(tokenizer.decode(doc))
                doc = []
    return docs


def tree(folder):
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def refused(monkeypatch, capsys, message, *argv):
    """prepare.py in this process: one line, exit status 2, and nothing written."""
    before = sorted(Path.cwd().rglob("*"))
    monkeypatch.setattr(sys, "argv", ["prepare.py", *argv])
    with pytest.raises(SystemExit) as end:
        config.run_cli(prepare.main)
    out, err = capsys.readouterr()
    assert (end.value.code, out, err.count("\n")) == (2, "", 1), err
    assert err.startswith("error: ") and message in err and len(err) < 300, err
    assert sorted(Path.cwd().rglob("*")) == before


def run(*argv, cwd, **options):
    """prepare.py in a process of its own."""
    return subprocess.run([sys.executable, str(ROOT / "prepare.py"), *argv], cwd=cwd, text=True,
                          capture_output=True, timeout=60, **options)


@pytest.fixture
def docs():
    """Forty documents, some of them not ASCII."""
    return [f"document {i}: {'naïve 你好 ' * (i % 3)}{WORDS[: 50 * i]}\n" for i in range(40)]


def write_model(folder, data, **config):
    """A model's folder: data as its tokenizer.json, a tokenizer_config.json of the keys given."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(data), encoding="utf-8")
    if config:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return str(folder)


def smollm(size=340):
    """The tokenizer.json of a small BPE of bytes with SmolLM's parts, trained by the library."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    library, parts = Tokenizer(models.BPE()), pre_tokenizers
    library.pre_tokenizer = parts.Sequence([parts.Digits(True), parts.ByteLevel(add_prefix_space=False)])
    library.decoder = decoders.ByteLevel()
    library.train_from_iterator([WORDS + "\n        indented" * 100], trainers.BpeTrainer(
        vocab_size=size, special_tokens=SPECIAL, show_progress=False, initial_alphabet=parts.ByteLevel.alphabet()))
    return json.loads(library.to_str())


def llama2(**parts):
    """The tokenizer.json of a tiny BPE with byte fallback, of Llama 2's form."""
    bytes_ = [f"<0x{i:02X}>" for i in range(256)]
    words = ["<unk>", "<s>", "</s>", *bytes_, *"\u2581acht<>/s", "at", "\u2581c", "\u2581cat"]
    flags = dict.fromkeys(["single_word", "lstrip", "rstrip", "normalized"], False)
    added = [{"id": i, "content": words[i], **flags, "special": True} for i in range(3)]
    normalizers = [{"type": "Prepend", "prepend": "\u2581"},
                   {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}]
    model = {"type": "BPE", "unk_token": "<unk>", "fuse_unk": True, "byte_fallback": True,
             "vocab": {word: i for i, word in enumerate(words)}, "merges": ["a t", "\u2581 c", "\u2581c at"]}
    return {"version": "1.0", "added_tokens": added, "pre_tokenizer": None, "model": model,
            "normalizer": {"type": "Sequence", "normalizers": normalizers}, **parts}


@pytest.fixture(scope="module")
def tokenizers():
    return {"byte": ByteTokenizer(), "bpe": train_bpe(300, iter([WORDS + "\n        indented" * 100])),
            "smollm": HFTokenizer(smollm(), 0), "llama2": HFTokenizer(llama2(), 2)}


# tokenizers -----------------------------------------------------------------------------------------------------

def texts():
    parts = [*SPECIAL, "</s>", "<0x0A>", "  \n\n ", "你好", "\U0001f600", "\r\n", "e\u0301", "'d's"]
    return st.lists(st.one_of(st.text(), st.sampled_from(parts)), max_size=8).map("".join)


@pytest.mark.parametrize("name", ["byte", "char", "bpe", "smollm", "llama2"])
@given(text=texts())
def test_any_text_comes_back_and_holds_no_special_token(name, tokenizers, text):
    tokenizer = tokenizers.get(name) or CharTokenizer("".join(sorted(set(text + "a"))))
    again = load_tokenizer(json.loads(json.dumps(tokenizer.to_dict())))
    ids = tokenizer.encode(text)
    assert again.encode(text) == ids and again.to_dict() == tokenizer.to_dict()
    assert b"".join(again.decode_bytes([i]) for i in ids) == text.encode()  # as when it is streamed
    special = {again.eot, *range(3 * (tokenizer.kind == "hf"))}
    assert not special & set(ids) and all(0 <= i < again.vocab_size for i in ids)
    assert again.decode([*special, *ids, *special]) == text


def test_what_cannot_be_encoded_or_decoded(tokenizers):
    for tokenizer in tokenizers.values():
        with pytest.raises(UserError, match="udc80"):
            tokenizer.encode("a\udc80b")
        size = tokenizer.vocab_size
        for i in -1, size:
            with pytest.raises(UserError, match=rf"token {i} is out of the vocabulary \({size}\)"):
                tokenizer.decode([i])
    with pytest.raises(UserError, match="'z'"):
        CharTokenizer("abc").encode("abza")
    assert ByteTokenizer().decode("é".encode()[:1]) == "\ufffd"


def bpe_dict(**changes):
    ranks = " ".join(base64.b64encode(bytes([i])).decode() for i in range(256))
    return {"kind": "bpe", "pattern": r"\S+|\s+", "ranks": ranks, **changes}


@pytest.mark.parametrize("saved", [
    None, {}, {"kind": ["byte"]}, {"kind": "gpt3"}, {"kind": "char", "chars": "ba"}, {"kind": "char", "chars": 5},
    {"kind": "task"}, {"kind": "task", "vocab_size": True}, {"kind": "task", "vocab_size": 1 << 40},
    bpe_dict(pattern="("), bpe_dict(ranks=7), bpe_dict(ranks="!!!"), bpe_dict(ranks=bpe_dict()["ranks"] + " YQ=="),
    bpe_dict(ranks=bpe_dict()["ranks"][5:]), {"eot": None}, {"eot": 340}, {"eot": [0]}, {"json": None},
    {"json": "[" * 100_000}, {"json": '{"model": {"vocab": {}, "merges": []}}'}])
def test_malformed_tokenizers(saved, tokenizers):
    if saved and "kind" not in saved:
        saved = {**tokenizers["smollm"].to_dict(), **saved}
    with pytest.raises(UserError, match="malformed"):
        load_tokenizer(saved)


@pytest.mark.parametrize("unit", [" ", "a", "a b", "\u0301"])
def test_a_very_large_document_is_encoded_quickly(tokenizers, unit):
    text, start = (unit * 300_000)[:300_000], time.monotonic()
    for name in "bpe", "smollm", "llama2":
        assert tokenizers[name].decode(tokenizers[name].encode(text)) == text
    assert time.monotonic() - start < 8
    train_bpe(258, slices(text + WORDS))


@given(words=st.lists(st.text(st.sampled_from("abé1!'\n"), min_size=1, max_size=6), max_size=60),
       gaps=st.lists(st.sampled_from([" ", "  ", "       ", " \n", "\n   "]), min_size=60))
def test_slices_change_no_token(tokenizers, words, gaps):
    bpe, text = tokenizers["bpe"], "a" + "".join(w + g for w, g in zip(words, gaps))
    parts = list(slices(text, 50))
    assert "".join(parts) == text and all(0 < len(part) <= 50 for part in parts)
    if all(part.startswith(" ") for part in parts[1:]):  # no cut was forced
        ids = [i for part in parts for i in bpe.encode_slice(part).tolist()]
        assert ids == bpe.encode_slice(text).tolist()


def test_what_a_bpe_is_trained_on(tmp_path, docs, monkeypatch):
    seen, train = [], train_bpe
    monkeypatch.setattr(prepare, "train_bpe", lambda size, t: train(size, iter(seen.extend(t) or seen)))
    folder = make(tmp_path, dataset=write_docs(tmp_path / "docs", docs), tokenizer="bpe:300")
    assert seen == docs_of(folder, "train") and docs_of(folder, "val")
    assert len(ids_of(folder, "train")) < 0.6 * sum(map(len, seen))
    monkeypatch.setattr(prepare, "TOKENIZER_BYTES", 100_000)
    seen.clear()
    make(tmp_path, dataset=write_docs(tmp_path / "long", [WORDS * 200]), tokenizer="bpe:300", name="long")
    assert 100_000 <= sum(map(len, seen)) <= 100_000 + SLICE
    with pytest.raises(UserError, match="bpe:10000.*smaller size"):
        make(tmp_path, dataset=f"file:{tmp_path}/docs", tokenizer="bpe:10000")


def test_gpt2_is_downloaded_once(tmp_path, monkeypatch):
    import tiktoken
    ranks = {bytes([i]): 255 - i for i in range(256)} | {b"he": 256, b"ll": 257}
    fake = tiktoken.Encoding("gpt2", pat_str=r"\S+|\s+", mergeable_ranks=ranks, special_tokens={EOT: 258})
    monkeypatch.setattr(tiktoken, "get_encoding", lambda name: fake)
    dataset = write_docs(tmp_path / "docs", ["hello, " * 100])
    data = TokenData(make(tmp_path, dataset=dataset, tokenizer="gpt2", name="x"), "train")
    assert (data.tokenizer.kind, data.vocab_size, data.tokenizer.eot) == ("gpt2", 259, 258)
    assert data.windows([0], 3).tolist() == [[256, 257, 255 - ord("o")]]


# tokenizers of Hugging Face models ------------------------------------------------------------------------------

METASPACE = {"type": "Metaspace", "replacement": "\u2581"}


@pytest.mark.parametrize("data", [
    smollm, llama2,
    lambda: llama2(normalizer=None, pre_tokenizer={**METASPACE, "prepend_scheme": "first", "split": False}),
    lambda: llama2(normalizer=None, pre_tokenizer={**METASPACE, "add_prefix_space": True})])
def test_ids_are_the_models_own(data):
    from tokenizers import Tokenizer
    library, text = Tokenizer.from_str(json.dumps(data())), "cat cat 2024 naïve 你好\r\n\t's  x"
    tokenizer = HFTokenizer(data(), 2)
    blank = " " if data is not smollm else ""  # which Llama 2's kind puts before a text
    ids = tokenizer.encode(blank + text)
    assert ids == library.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids) == blank + text


def test_equal_tokenizers_are_equal_dicts(tokenizers):
    """What does not decide the ids of a text is left out, whatever the version of the file."""
    data, saved = smollm(), tokenizers["smollm"].to_dict()
    digits, byte_level = data["pre_tokenizer"]["pretokenizers"]
    steps = [{"type": "Sequence", "pretokenizers": [digits]}, {**byte_level, "add_prefix_space": True}]
    model = {"dropout": 0.5, "unk_token": EOT, "vocab": dict(reversed(data["model"]["vocab"].items())),
             "merges": [" ".join(pair) for pair in data["model"]["merges"]]}
    cut = {"direction": "Right", "max_length": 5, "strategy": "LongestFirst", "stride": 0}
    other = {**data, "model": model, "added_tokens": data["added_tokens"][::-1], "decoder": None,
             "truncation": cut, "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps}}
    assert HFTokenizer(other, 0).to_dict() == saved == HFTokenizer(data, 0).to_dict()
    assert HFTokenizer(data, 1).to_dict() != saved != HFTokenizer(smollm(330), 0).to_dict()


def test_no_word_of_the_vocabulary_is_taken_for_an_added_token():
    data = smollm()
    data["model"]["ignore_merges"] = True  # a whole word of the vocabulary is its id
    data["pre_tokenizer"] = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    extra = {"single_word": False, "lstrip": True, "rstrip": True, "normalized": True}
    data["added_tokens"] += [{"id": 410, "content": "<think>", "special": False, **extra},
                             {"id": 405, "content": "the cat é", "special": False, **extra}]
    tokenizer = HFTokenizer(data, 0)
    for text in *SPECIAL, " <think> the cat é":
        ids = tokenizer.encode(text)
        assert 3 <= min(ids) and max(ids) < 340 and tokenizer.decode(ids) == text
    assert tokenizer.vocab_size == 411 and tokenizer.decode([410, 405, 404, 1]) == "<think>the cat é"
    data = llama2()
    data["added_tokens"].append({"id": 270, "content": "\u2581cat", "special": False, **extra})
    assert HFTokenizer(data, 2).decode([270, 270]) == " cat cat"  # in the vocabulary, as Gemma's


@pytest.mark.parametrize("data, config, eot", [
    (smollm, {}, 0), (smollm, {"eos_token": "<pad>"}, 2), (smollm, {"eos_token": {"content": "<pad>"}}, 2),
    (lambda: llama2(added_tokens=[]), {}, 2)])
def test_end_of_text(tmp_path, data, config, eot):
    tokenizer = hf_tokenizer(write_model(tmp_path, data(), **config))
    assert tokenizer.eot == eot and tokenizer.decode([eot]) == ""
    assert eot not in tokenizer.encode("</s><pad>" + EOT)


BPE = {"type": "BPE", "vocab": {"a": 0, EOT: 1}, "merges": []}


@pytest.mark.parametrize("parts, message", [
    ({"model": {"type": "WordPiece", "vocab": {}}}, "a WordPiece tokenizer is not supported"),
    ({"pre_tokenizer": {"type": "Whitespace"}}, "it must be a BPE of bytes"),
    ({"pre_tokenizer": None, "model": {**BPE, "byte_fallback": True}}, "it must be a BPE of"),
    ({"model": {**BPE, "end_of_word_suffix": "</w>"}}, "suffixes"),
    ({"model": {**BPE, "continuing_subword_prefix": "##"}}, "prefixes"),
    ({"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}}, "Precompiled"),
    ({"model": {**BPE, "merges": [["a", "b"]]}}, "out of vocabulary"),
    ({"model": {**BPE, "vocab": {"a": 1, EOT: 1}}}, "must be distinct"),
    ({"model": {**BPE, "vocab": {"a": 1 << 30, EOT: 1}}}, "below 1048576"),
    ({"model": {**BPE, "vocab": {"a": "0", EOT: 1}}}, "cannot be used"),
    ({"added_tokens": [], "model": {**BPE, "vocab": {"a": 0}}}, "no end-of-text token"),
    ({"model": None}, "cannot be used"), ({"added_tokens": [{"id": 0}]}, "cannot be used"),
    ({"config": b"{"}, "cannot read model/tokenizer_config.json"), ({"config": b"3"}, "cannot be"),
    ({"config": b'{"eos_token": []}'}, "cannot be used"),
    ({"config": b'{"eos_token": "<eos>"}'}, "no end-of-text token (<eos>)"),
    ({"file": b"\xff"}, "cannot read model/tokenizer.json"), ({"file": b"[" * 100_000}, "cannot read"),
    ({"file": b"[]"}, "cannot be used")])
def test_refused_models(tmp_path, parts, message, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    files = {"file": "tokenizer.json", "config": "tokenizer_config.json"}
    raw = {files[key]: parts[key] for key in files.keys() & parts}
    write_model(tmp_path / "model", {**smollm(260), **({} if raw else parts)})
    for name, content in raw.items():
        (tmp_path / "model" / name).write_bytes(content)
    refused(monkeypatch, capsys, message, "tokenizer=hf:model")


def test_a_tokenizer_of_the_hub(tmp_path, docs, monkeypatch):
    import huggingface_hub
    calls = []

    def download(name, **keys):
        calls.append((name, keys["allow_patterns"]))
        return write_model(tmp_path / "cache", smollm(), eos_token=EOT)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.chdir(tmp_path)
    docs = [f"{doc}\U0001f600{EOT}" for doc in docs]
    write_docs(tmp_path / "docs", docs)
    folder = make(tmp_path, dataset="file:docs", tokenizer="hf:Owner/Name-1.0_b")
    shutil.rmtree(tmp_path / "cache")  # not needed again
    assert calls == [("Owner/Name-1.0_b", ["tokenizer.json", "tokenizer_config.json"])]
    assert folder.name == "file-docs-hf-Owner-Name-1.0_b" and sorted(docs_of(folder)) == sorted(docs)
    assert TokenData(folder, "val").meta["eot"] == 0 == ids_of(folder, "val")[-1]


def fail(*args, **keys):
    raise ConnectionError("no route\nto host")


@pytest.mark.parametrize("function, argv, message", [
    ("tiktoken.get_encoding", ["tokenizer=gpt2"], "gpt2 needs a network once"),
    ("urllib.request.urlopen", ["dataset=shakespeare"], "use dataset=file:PATH"),
    ("datasets.load_dataset", ["dataset=hf:a/b"], "cannot read hf:a/b: ConnectionError: no route"),
    ("huggingface_hub.snapshot_download", ["tokenizer=hf:a/b"], "cannot be downloaded: Connection")])
def test_no_network_and_no_package(tmp_path, function, argv, message, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(function, fail)
    refused(monkeypatch, capsys, message, *argv)
    package = function.split(".")[0]
    if package != "urllib":
        monkeypatch.setitem(sys.modules, package, None)
        refused(monkeypatch, capsys, f"pip install {package}", *argv)


# sources and splits ---------------------------------------------------------------------------------------------

def test_one_document_is_split_in_order(tmp_path):
    text = "".join(f"line {i} é你\n" for i in range(100))
    folder = make(tmp_path, dataset=write_docs(tmp_path / "docs", [text]), val_fraction=0.25)
    train, val = bytes(ids_of(folder, "train")), bytes(ids_of(folder, "val"))  # no end-of-text
    assert (train + val).decode() == text and len(val.decode()) == round(len(text) / 4)
    handler = signal.getsignal(signal.SIGTERM)
    with pytest.raises(UserError, match="too short"):
        make(tmp_path, dataset=write_docs(tmp_path / "short", ["abc"]))
    assert os.listdir(tmp_path / "data") == [folder.name] and signal.getsignal(signal.SIGTERM) is handler
    assert docs_of(make(tmp_path, dataset=write_docs(tmp_path / "short", ["abcd"]))) == ["ab", "cd"]


def test_documents_are_split_by_hash_and_counted(tmp_path, docs):
    docs += ["a\r\nb\rc\n", WORDS * 20]  # line ends are kept; a document of two slices
    dataset = write_docs(tmp_path / "docs", [*docs, b"\xff\xfe", b"caf\xe9", b""])
    folder = make(tmp_path, dataset=dataset, val_fraction=0.3, tokenizer="bpe:290")
    meta = json.loads((folder / "meta.json").read_text())
    number = lambda doc: int(hashlib.sha256(doc.encode()).hexdigest()[:16], 16) / 2**64  # noqa
    expected = {"train": [d for d in docs if number(d) >= 0.3], "val": [d for d in docs if number(d) < 0.3]}
    for split, wanted in expected.items():
        data, ids = TokenData(folder, split), ids_of(folder, split)
        assert docs_of(folder, split) == wanted and len(wanted) > 4 and ids[-1] == 289
        assert data.bytes == sum(len(doc.encode()) for doc in wanted)
        assert data.tokens == len(ids) and ids.count(289) == len(wanted)
    assert (meta["format"], meta["vocab_size"], meta["eot"], meta["skipped"]) == (1, 290, 289, 2)
    digest = b"".join(len(d.encode()).to_bytes(8, "little") + d.encode() for d in docs)
    assert meta["source_sha256"] == hashlib.sha256(digest).hexdigest()


@pytest.mark.parametrize("split, other", [("train", "val"), ("val", "train")])
def test_the_last_document_fills_an_empty_split(tmp_path, split, other):
    docs = [d for d in map("document {}".format, range(100)) if prepare.split_by_hash(d, 0.5) == split][:4]
    folder = make(tmp_path, dataset=write_docs(tmp_path / "docs", docs), val_fraction=0.5)
    assert docs_of(folder, split) == docs[:3] and docs_of(folder, other) == docs[3:]


@pytest.mark.parametrize("tokenizer", ["byte", "bpe:300", "hf:model"])
def test_max_tokens_is_exact(tmp_path, docs, tokenizer, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_model(tmp_path / "model", smollm())
    for source in docs, [WORDS]:
        keys = {"tokenizer": tokenizer, "val_fraction": 0.2, "overwrite": True,
                "dataset": write_docs(tmp_path / f"docs{len(source)}", source)}
        whole = make(tmp_path, **keys, name="whole")
        folder = make(tmp_path, **keys, name="part", max_tokens=777)
        for split, n in ("train", 777 - 155), ("val", 155):
            data, ids = TokenData(folder, split), ids_of(folder, split)
            assert data.tokens == n and ids == ids_of(whole, split)[:n]
            assert data.bytes == len(data.tokenizer.decode_bytes(ids))


def test_an_endless_stream_is_left(tmp_path, monkeypatch):
    def endless():
        for i in range(10_000):
            yield f"document {i} " * 100
        raise AssertionError("the stream should have been left")
    monkeypatch.setattr(prepare, "open_source", lambda cfg: prepare.Source("endless", endless))
    folder = make(tmp_path, max_tokens=1_000_000)
    assert [TokenData(folder, s).tokens for s in ("train", "val")] == [900_000, 100_000]


def test_files_of_a_folder_and_a_glob(tmp_path):
    for name in ("b.txt", "a/z.md", "a-b.txt", "c.py", ".hidden.txt", ".git/x.txt", "d.bin", "U.TXT", "[ab].txt",
                 "__pycache__/p.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)

    def found(path, extensions=prepare.TEXT_EXTENSIONS):
        return [os.path.relpath(p, tmp_path) for p in prepare.text_files(path, extensions)]
    assert found(str(tmp_path)) == ["U.TXT", "[ab].txt", "a-b.txt", "a/z.md", "b.txt", "c.py"]
    assert found(str(tmp_path), "py, .md") == ["a/z.md", "c.py"]
    assert found(f"{tmp_path}/*b.txt") == ["a-b.txt", "b.txt"]
    assert found(f"{tmp_path}/[ab].txt") == ["[ab].txt"]  # a file's own name, not a glob


def test_python_corpus(tmp_path):
    folder = make(tmp_path)
    assert folder.name == "python-byte" and TokenData(folder, "train").bytes > 4_000_000
    text = b"".join(bytes(i for i in ids_of(folder, s) if i < 256) for s in ("train", "val"))
    assert Path(json.__file__).read_bytes() in text
    files, more = (prepare.python_files(name) for name in ("python", "python+packages"))
    parts = {part for path in files for part in Path(path).parts[-3:]}
    assert not parts & {"test", "tests", "site-packages", "__pycache__"} and len(files) > 300
    assert os.path.join(sysconfig.get_paths()["stdlib"], "json", "decoder.py") in files
    assert more[:len(files)] == files and len({os.path.realpath(f) for f in more}) == len(more)
    assert os.path.realpath(np.__file__) in map(os.path.realpath, more)
    names = "python", "python+packages", "file:x", "shakespeare", "hf:x", "other"
    assert [prepare.is_offline(name) for name in names] == [True, True, True, False, False, False]


def test_hugging_face_data_sets(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    rows, calls = [f"row {i} " * 5 for i in range(30)], []
    single = datasets.Dataset.from_dict({"text": [*rows, None, ""], "n": range(32)})
    single.save_to_disk(str(tmp_path / "single"))
    datasets.DatasetDict({"train": single, "extra": single.select(range(20))}).save_to_disk(str(tmp_path / "dict"))
    folder = make(tmp_path, dataset=f"hf:{tmp_path}/single", name="single")
    assert sorted(docs_of(folder)) == sorted(rows) and TokenData(folder, "val").meta["skipped"] == 1
    folder = make(tmp_path, dataset=f"hf:{tmp_path}/dict", name="dict", split="extra")
    assert sorted(docs_of(folder)) == sorted(rows[:20])
    for dataset, keys, message in (("single", {"text_column": "txt"}, "'txt'.*'text', 'n'"),
                                   ("single", {"text_column": "n"}, "column n holds int"),
                                   ("dict", {"split": "test"}, "test")):
        with pytest.raises(UserError, match=f"^cannot read hf:{tmp_path}/{dataset}: .*{message}"):
            make(tmp_path, dataset=f"hf:{tmp_path}/{dataset}", name="x", **keys)
    monkeypatch.setattr(datasets, "load_dataset",
                        lambda *args, **keys: calls.append((args, keys)) or single.to_iterable_dataset())
    folder = make(tmp_path, dataset="hf:owner/name:config", split="validation", tokenizer="char")
    assert folder.name == "hf-owner-name-config-char" and len(docs_of(folder)) == 30
    assert calls == [(("owner/name", "config"), {"split": "validation", "streaming": True})] * 2


# files: dtype, shards, windows ----------------------------------------------------------------------------------

def test_a_large_vocabulary_is_uint32(tmp_path):
    text = "".join(map(chr, range(0x10000, 0x10000 + 70_000)))
    data = TokenData(make(tmp_path, dataset=write_docs(tmp_path / "docs", [text]), tokenizer="char"), "val")
    assert data.meta["dtype"] == "uint32" and data.vocab_size == 70_001
    assert data.windows([0], data.tokens).tolist() == [list(range(63_000, 70_000))]


def test_shards(tmp_path, docs):
    dataset = write_docs(tmp_path / "docs", docs)
    whole = make(tmp_path, dataset=dataset, name="whole")
    parts = make(tmp_path, dataset=dataset, name="parts", shard_tokens=1000)
    data = TokenData(parts, "train")
    assert data.files[:3] == ["train.bin", "train.00001.bin", "train.00002.bin"]
    assert set(data.counts[:-1]) == {1000} and 0 < data.counts[-1] <= 1000 and len(data.files) > 5
    for split in "train", "val":
        assert ids_of(parts, split) == ids_of(whole, split)
    assert set(tree(parts)) == {"meta.json", *data.files, *TokenData(parts, "val").files}


INFO = {"files": ["train.bin"], "file_tokens": [30], "tokens": 30, "bytes": 30}


def write_set(folder, counts=(30,), ids=None, **changes):
    """A data set of given shards, as prepare.py has always written it; the tokens count up."""
    folder.mkdir(exist_ok=True)
    ids = np.arange(sum(counts)) % 251 if ids is None else np.array(ids)
    files = [f"train.{i:05}.bin" if i else "train.bin" for i in range(len(counts))]
    for file, part in zip(files, np.split(ids, np.cumsum(counts)[:-1])):
        part.astype("<u2").tofile(folder / file)
    info = {"files": files, "file_tokens": list(counts), "tokens": sum(counts), "bytes": 9}
    meta = {"format": 1, "vocab_size": 257, "dtype": "uint16", "splits": {"train": info},
            "tokenizer": {"kind": "byte"}, **changes}
    (folder / "meta.json").write_text(json.dumps({key: value for key, value in meta.items() if value != "missing"}))
    return folder


@given(counts=st.lists(st.integers(1, 40), min_size=1, max_size=5), length=st.integers(1, 45))
def test_windows_do_not_cross_shards(tmp_path_factory, counts, length):
    data = TokenData(write_set(tmp_path_factory.mktemp("set"), counts), "train")
    shards = np.split(np.arange(sum(counts)) % 251, np.cumsum(counts)[:-1])
    expected = [s[i: i + length].tolist() for s in shards for i in range(len(s) - length + 1)]
    order = np.random.default_rng(0).permutation(len(expected))
    windows = data.windows(order, length)
    assert data.n_windows(length) == len(expected) and windows.dtype == np.int64
    assert windows.shape == (len(expected), length)
    assert windows.tolist() == [expected[i] for i in order]
    for outside in -1, len(expected):
        with pytest.raises(IndexError):
            data.windows([outside], length)


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="reads /proc")
def test_memory_does_not_grow(tmp_path):
    n = 100_000_000
    folder = write_set(tmp_path / "set", splits={"train": {**INFO, "file_tokens": [n], "tokens": n}})
    os.truncate(folder / "train.bin", 2 * n)  # 200 MB, most of them a hole
    data, rng = TokenData(folder, "train"), np.random.default_rng(0)
    resident = lambda: int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()  # noqa
    before, most = resident(), 0
    for _ in range(2000):
        data.windows(rng.integers(data.n_windows(257), size=8), 257)
        most = max(most, resident())
    assert most - before < 20e6


@pytest.mark.parametrize("changes, message", [
    ({"format": 2}, "format 1"), ({"dtype": "int16"}, "dtype"), ({"dtype": "missing"}, "dtype"),
    ({"vocab_size": True}, "vocab_size"), ({"vocab_size": 258}, "vocab_size"),
    ({"vocab_size": 70_000}, "70000 does not fit dtype uint16"), ({"tokenizer": None}, "tokenizer"),
    ({"splits": "missing"}, "splits"), ({"splits": {}}, "no split 'train'"), ({"splits": {"train": 3}}, "splits.train"),
    *[({"splits": {"train": {**INFO, **bad}}}, message) for bad, message in [
        ({"files": [3]}, "files"), ({"files": ["../x.bin"]}, "files"), ({"file_tokens": [30, 1]}, "files"),
        ({"file_tokens": [-30]}, "file_tokens"), ({"tokens": 31}, "train.tokens"), ({"bytes": 0}, "bytes")]]])
def test_wrong_meta(tmp_path, changes, message):
    with pytest.raises(UserError, match=message):
        TokenData(write_set(tmp_path / "set", **changes), "train")


def test_damaged_files(tmp_path):
    with pytest.raises(UserError, match="no meta.json: not a data set; make it with python prepare"):
        TokenData(tmp_path / "nothing", "train")
    folder = write_set(tmp_path / "set", [4, 4], ids=[1, 2, 3, 256, 5, 6, 300, 8])
    data = TokenData(folder, "train")
    assert data.windows([0], 4).tolist() == [[1, 2, 3, 256]]
    with pytest.raises(UserError, match=r"token 300 in train.00001.bin is out of the vocabulary"):
        data.windows([0, 1], 4)
    for size, message in (6, "train.00001.bin is truncated: 6 bytes, 8 expected"), (10, "too long"):
        os.truncate(folder / "train.00001.bin", size)
        with pytest.raises(UserError, match=message):
            TokenData(folder, "train")
    os.remove(folder / "train.bin")  # while it is in use
    for read in lambda: data.windows([0], 4), lambda: TokenData(folder, "train"):
        with pytest.raises(UserError, match="cannot read .*train.bin"):
            read()
    for text in b"", b"\xff\xfe", b"[" * 100_000:
        (folder / "meta.json").write_bytes(text)
        with pytest.raises(UserError, match="cannot read .*meta.json"):
            TokenData(folder, "train")


# nothing half done ----------------------------------------------------------------------------------------------

@pytest.mark.parametrize("tokenizer", ["char", "bpe:400", "hf:model"])
def test_prepared_twice_the_bytes_are_the_same(tmp_path, docs, tokenizer):
    write_docs(tmp_path / "docs", docs)
    write_model(tmp_path / "model", smollm())
    trees, name = [], f"file-docs-{tokenizer.replace(':', '-')}"
    for data_dir, seed in ("one", "1"), ("else/where", "2"):
        done = run("dataset=file:docs", f"tokenizer={tokenizer}", f"data_dir={data_dir}", "shard_tokens=2000",
                   cwd=tmp_path, env={**os.environ, "PYTHONHASHSEED": seed})
        assert done.returncode == 0 and done.stderr == "" and done.stdout.count("\n") == 1
        data = TokenData(tmp_path / data_dir / name, "train")
        assert done.stdout.startswith(f"{data_dir}/{name}: train {data.tokens:,} tokens ({data.bytes:,} bytes), val ")
        trees.append(tree(tmp_path / data_dir))
    assert trees[0] == trees[1] and len(trees[0]) > 3


SLOW = """
import sys, time, config, prepare
def slow():
    for i in range(1000):
        yield f"{i} some text " * 100_000
        print("read", flush=True)
        time.sleep(0.01)
prepare.BATCH = 20
prepare.open_source = lambda cfg: prepare.Source("slow", slow)
config.run_cli(prepare.main)
"""


@pytest.mark.parametrize("number, status, overwrite", [
    (signal.SIGTERM, 143, False), (signal.SIGTERM, 143, True), (signal.SIGINT, 130, False)])
def test_a_signal_leaves_nothing_or_the_old_set(tmp_path, docs, number, status, overwrite):
    if overwrite:
        make(tmp_path, dataset=write_docs(tmp_path / "docs", docs), name="python-byte")
    before = sorted(tmp_path.rglob("*")), tree(tmp_path)
    process = subprocess.Popen([sys.executable, "-c", SLOW, f"data_dir={tmp_path}/data", "overwrite=true"],
                               cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    for _ in range(10):
        assert process.stdout.readline() == "read\n"
    assert any((tmp_path / "data").glob(".python-byte.*/new/*.bin"))
    process.send_signal(number)
    _, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (status, "")
    assert (sorted(tmp_path.rglob("*")), tree(tmp_path)) == before


def test_a_full_disk_leaves_nothing(tmp_path):
    limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000))  # noqa
    done = run("dataset=python", cwd=tmp_path, preexec_fn=limit)
    assert (done.returncode, done.stdout) == (2, "") and list(tmp_path.iterdir()) == []
    assert done.stderr == "error: cannot write data/python-byte: File too large\n"


def test_an_existing_set_is_left_alone(tmp_path, docs, capsys):
    keys = {"dataset": write_docs(tmp_path / "docs", docs), "name": "x"}
    folder = make(tmp_path, **keys)
    inode, before = os.stat(folder).st_ino, tree(folder)
    assert make(tmp_path, **keys) == folder and os.stat(folder).st_ino == inode
    assert "already there" in capsys.readouterr().out
    for key, value in {"val_fraction": 0.2, "tokenizer": "char", "max_tokens": 9, "split": "a",
                       "dataset": "python", "shard_tokens": 7, "text_column": "b"}.items():
        with pytest.raises(UserError, match=f"{key}.*overwrite=true"):
            make(tmp_path, **{**keys, key: value})
    assert tree(folder) == before
    make(tmp_path, **keys, val_fraction=0.2, overwrite=True)
    assert TokenData(folder, "val").meta["val_fraction"] == 0.2
    os.truncate(folder / "val.bin", 4)
    with pytest.raises(UserError, match="val.bin is truncated.*overwrite=true"):
        make(tmp_path, **keys)
    make(tmp_path, **keys, overwrite=True)
    assert tree(folder) == before and [p.name for p in folder.parent.iterdir()] == ["x"]
    write_docs(tmp_path / "data/y", ["years of work"])
    with pytest.raises(UserError, match="not a data set"):  # overwrite=true does not delete it either
        make(tmp_path, name="y", overwrite=True)
    assert tree(tmp_path / "data/y") == {"000.txt": b"years of work"}


def test_a_stop_between_the_renames_brings_the_old_set_back(tmp_path, docs, monkeypatch):
    source = write_docs(tmp_path / "docs", docs)
    folder = make(tmp_path, dataset=source, name="set")
    before, rename = tree(folder), os.rename

    def stopped(a, b):
        if Path(a).name == "new":
            raise KeyboardInterrupt
        rename(a, b)
    monkeypatch.setattr(os, "rename", stopped)
    with pytest.raises(KeyboardInterrupt):
        make(tmp_path, dataset=source, name="set", overwrite=True)
    assert tree(folder) == before


def test_two_processes_make_the_same_set(tmp_path, docs, monkeypatch):
    keys = {"dataset": write_docs(tmp_path / "docs", docs), "name": "x"}
    write = prepare.write_dataset

    def other_first(folder, cfg):
        monkeypatch.undo()
        make(tmp_path, **keys)
        os.utime(tmp_path / "data/x/meta.json", (1, 1))
        return write(folder, cfg)
    monkeypatch.setattr(prepare, "write_dataset", other_first)
    folder = make(tmp_path, **keys)
    assert os.stat(folder / "meta.json").st_mtime == 1  # the first one stays
    assert [p.name for p in folder.parent.iterdir()] == ["x"]


# command line ---------------------------------------------------------------------------------------------------

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


@pytest.mark.parametrize("key, text, value", [
    ("n_layer", "-3", -3), ("n_layer", "1_000", 1000), ("learning_rate", "1e-3", 1e-3),
    ("learning_rate", "2", 2.0), ("fast", "False", False), ("note", "1e3", "1e3"),
    ("prompt", "${x} ??? {a: [", "${x} ??? {a: ["), ("prompt", "null", "null"),
    ("note", "a=b", "a=b"), ("note", "null", None), ("top_k", "5", 5), ("top_k", "null", None)])
def test_typed_values(key, text, value):
    cfg = typed(f"{key}=0", f"{key}={text}") if key == "n_layer" else typed(f"{key}={text}")
    got = getattr(cfg, key)
    assert got == value and type(got) is type(value)
    setattr(cfg, key, getattr(Schema(), key))
    assert cfg == Schema()  # the other keys keep their defaults
    base = {"n_layer": 7, "learning_rate": 1, "fast": False, "top_k": None, "prompt": "${p}"}  # of a file
    assert typed("n_layer=9", base=base) == Schema(9, 1.0, False, "${p}", None)


@pytest.mark.parametrize("given, message", [
    ("n_layer=1e3", "n_layer: expected int"), ("n_layer=", "n_layer: expected int"),
    ("n_layer=null", "n_layer: expected int"), ("n_layer=" + "9" * 5000, "n_layer: expected int"),
    ("n_layer=" + "9" * 19, "must be less than 2^63"), ("learning_rate=nan", "expected float (finite)"),
    ("learning_rate=true", "learning_rate: expected float"), ("fast=1", "fast: expected bool"),
    ("note=${oc.env:HOME}", "note: interpolation is not supported"), ("note=a\0b", "note: expected str"),
    ("--fast=true", "did you mean fast"), ("n_layer", "argument 'n_layer' is not of the form key=value"),
    ("zzz=3", "the keys are n_layer, learning_rate, fast, prompt, top_k, note"), ("=3", "'=3' is not"),
    ({"n_layer": 2.0}, "n_layer: expected int"), ({"n_layer": True}, "n_layer: expected int"),
    ({"learning_rate": 10**400}, "learning_rate"), ({"learning_rate": None}, "learning_rate"),
    ({"fast": 1}, "fast"), ({"note": 12}, "in quotes"), ({"note": {"a": 1}}, "note: expected"),
    ({"prompt": 3}, "prompt: expected str"), ({1: 2}, "unknown key '1'")])
def test_refused_values(given, message):
    with pytest.raises(UserError) as e:
        typed(given) if isinstance(given, str) else typed(base=given)
    assert message in str(e.value) and "\n" not in str(e.value) and len(str(e.value)) < 200


def test_help(capsys):
    prepare.main(["dataset=python", "--help"])
    out, comments = capsys.readouterr().out, config.field_comments(PrepareConfig)
    assert "python prepare.py dataset=python tokenizer=bpe:4096" in out
    for f in fields(PrepareConfig):  # every key with the comment beside it
        default = str(f.default).lower() if f.type is bool else repr(f.default)
        assert f"  {f.name + '=' + default:34} {comments[f.name]}\n" in out


@pytest.mark.parametrize("name", ["..", "/abs", "a/b", ".hidden", "-x", "é", "x" * 201, "a\n"])
def test_names_stay_in_their_folder(tmp_path, name):
    with pytest.raises(UserError, match="name"):
        make(tmp_path, name=name)
    assert list(tmp_path.iterdir()) == []
    assert prepare.folder_name("file:../a/b c.txt", "hf:../x") == "file-..-a-b-c.txt-hf-..-x"
    assert prepare.folder_name("../é", "byte") == "byte"


@pytest.mark.parametrize("argv, message", [
    (["dataset=file:latin.txt"], "holds no UTF-8 text"), (["dataset=file:empty.txt"], "is empty"),
    (["dataset=file:pipe"], "neither a file"), (["dataset=file:nothing*.txt"], "no file matches it"),
    (["dataset=file:texts", "extensions=.xyz"], "ends with .xyz"),
    (["dataset=file:texts", "extensions=,"], "extensions"), (["dataset=hf:"], "unknown dataset"),
    (["dataset=pyton"], "python, python+packages, file:PATH"), (["dataset=task:recall"], "needs no preparation"),
    (["tokenizer=hf:"], "unknown"), (["tokenizer=bpe:257"], "258 to"), (["tokenizer=bpe:999999999"], "258 to"),
    (["tokenizer=hf:none"], "hf:none is neither a folder nor a hub name"),
    (["tokenizer=hf:a/b/c"], "neither a folder"), (["tokenizer=hf:latin.txt"], "neither a folder"),
    (["tokenizer=hf:texts"], "cannot read texts/tokenizer.json"), (["datset=python"], "did you mean dataset?"),
    (["val_fraction=0"], "val_fraction must"), (["val_fraction=1.0"], "val_fraction must"),
    (["max_tokens=-1"], "max_tokens"), (["max_tokens=3"], "max_tokens"), (["shard_tokens=0"], "shard_tokens"),
    (["name=latin.txt", "data_dir=."], "not a data set"), (["name=../up"], "'../up' is not allowed"),
    (["data_dir=latin.txt"], "cannot write latin.txt/python-byte: Not a directory")])
def test_bad_input_is_one_line(tmp_path, argv, message, monkeypatch, capsys):
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    (tmp_path / "empty.txt").touch()
    write_docs(tmp_path / "texts", ["some text", "more text"])
    os.mkfifo(tmp_path / "pipe")
    monkeypatch.chdir(tmp_path)
    refused(monkeypatch, capsys, message, *argv)


@pytest.mark.parametrize("code", ["prepare.main(['help'])", "[print(i) for i in range(100_000)]"])
def test_a_closed_pipe_is_quiet(code):
    program = f"import prepare\nprepare.run_cli(lambda argv: {code})"
    process = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.close()
    assert process.stderr.read() == b"" and process.wait(30) == 141

"""eval.py has the loss of cross_entropy. lm_eval's tasks run with all models, and with transformers' Llama they give
the same numbers."""
import contextlib
import io
import json
import math
import random
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from lab import eval as evaluation
from lab.eval import EvalConfig, HarnessModel, evaluate_harness
import runs
import train
from common.checkpoint import load_run, read_log
from common.options import UserError
from conftest import MODELS, move, tiny
from common.data import TextBatches, load_data
from common.options import TrainConfig
from common.tasks import TaskBatches
from sample import stream
from test_gpt import saved_llama
from test_prepare import EOT, ids_of, llama2, make, smollm, write_model
from common.huggingface import from_pretrained, hf_tokenizer
from common.tokenizer import HFTokenizer, load_tokenizer


@pytest.fixture(scope="module", params=MODELS)
def run(request, tmp_path_factory, data_dir):
    """Return the folder of a run of each model, which is hardly trained."""
    out = tmp_path_factory.mktemp(request.param)
    return runs.run(request.param, out, data_dir, "max_steps=1", "learning_rate=1e-2", "block_size=24").folder


def evaluate(run, *keys):
    with contextlib.redirect_stdout(io.StringIO()) as out:
        evaluation.main([str(run), *keys])
    return json.loads(out.getvalue())


@pytest.mark.parametrize("run", ["relaxed", "mor", "rat_loops"], indirect=True)
def test_exits_and_routers_are_looked_at(run, data_dir):
    model = load_run(run)[0]
    batches = TextBatches(load_data(data_dir / "words"), TrainConfig(batch_size=2), 24)
    idx = torch.cat([batches.cut(batches.val, starts)[0] for starts in batches.val_batches(0)])
    if hasattr(model.cfg, "exit_loop"):
        first = load_run(run, exit_loop=1)[0]
        same = (model(idx)[0].argmax(-1) == first(idx)[0].argmax(-1)).double().mean()
        assert evaluate(run, "exit_loop=1")["agreement"] == pytest.approx(float(same))
        assert same < 1 or not hasattr(model, "routers")    # other models' loops hardly differ yet
    if hasattr(model, "routers"):
        found, taken = evaluate(run), model.states(idx, top_k=False)[1]
        scores = found["scores"]["2"]
        assert sum(scores) == pytest.approx(1) and scores != [0.1] * 10
        assert sum(scores[5:]) == pytest.approx(float((taken >= 2).double().mean()))


def test_options_change_what_is_read(tmp_path, data_dir, monkeypatch):
    """data_dir= names another text, batches= counts micro-batches of a task too, and longer contexts come in fewer rows."""
    run = runs.run("gpt", tmp_path, data_dir, "max_steps=1").folder
    (tmp_path / "other.txt").write_text("other text, " * 300)
    other = make(tmp_path, dataset=f"file:{tmp_path}/other.txt", name="words").parent
    assert evaluate(run, f"data_dir={other}")["ce"] != evaluate(run)["ce"]
    assert evaluate(run, "lengths=1,4", "block_size=64", "batch_size=4", "batches=3")["tokens"] == 3 * 64
    task = runs.run("gpt", tmp_path / "task", data_dir, "dataset=task:recall", "block_size=8", "max_steps=1").folder
    rows, count = [], evaluation.count_right
    monkeypatch.setattr(evaluation, "count_right", lambda logits, y: rows.append(len(y)) or count(logits, y))
    evaluate(task, "batches=3")
    assert rows == [2, 2, 2]


def test_a_run_in_bfloat16_is_scored_in_bfloat16(tmp_path, data_dir):
    trainer = runs.run("gpt", tmp_path, data_dir, "dtype=bfloat16", "eval_batches=0", "dropout=0")
    move(trainer.model, 0.3)
    train.save(trainer, "ckpt.pt")
    batches, model = trainer.batches, load_run(trainer.folder)[0]
    x, y = map(torch.cat, zip(*(batches.cut(batches.val, starts) for starts in batches.val_batches(0))))
    with torch.no_grad():
        wide = model(x, y)[2]["ce"].item()
        with torch.autocast("cpu", torch.bfloat16):
            narrow = model(x, y)[2]["ce"].item()
    assert evaluate(trainer.folder)["ce"] == pytest.approx(narrow, rel=1e-5) and abs(narrow - wide) > 1e-5


def test_prefill_reaches_the_model(tmp_path, data_dir, monkeypatch):
    run = runs.run("lrt", tmp_path, data_dir, "max_steps=1").folder
    monkeypatch.setattr(evaluation, "evaluate_harness", lambda model, tokenizer, cfg: {"prefill": model.cfg.prefill})
    assert evaluate(run, "tasks=any", "prefill=interleaved")["prefill"] == "interleaved"


def test_padding_of_the_vocabulary_and_several_right_answers():
    model, tokenizer = tiny("gpt", vocab_size=260, block_size=32), load_tokenizer({"kind": "byte"})
    model.head.register_forward_hook(lambda module, inputs, out: F.pad(out[..., :257], (0, 3), value=99.0))
    best = model(torch.tensor([[97, 98]]))[0][0, -1, :257].argmax().item()
    assert HarnessModel(model, tokenizer, 1).scores([([97, 98], [best])])[0][1], "greedy among real tokens"
    task = SimpleNamespace(multiple_input=False, doc_to_target=lambda doc: [0, 2])
    resps = [[(-1.0, False)], [(-0.5, True)], [(-3.0, False)]]
    assert evaluation.gold_ce(task, [{"doc": 0, "resps": resps}]) == 1


@pytest.mark.parametrize("run", ["gpt"], indirect=True)
def test_fast_is_an_option(run, monkeypatch):
    built, build = [], evaluation.build_model
    monkeypatch.setattr(evaluation, "build_model", lambda *given, **more: built.append(build(*given, **more)) or built[-1])
    losses = [evaluate(run, *keys, "batches=1")["ce"] for keys in ([], ["fast=false"])]
    assert [model.cfg.fast for model in built] == [True, False] and losses[0] == pytest.approx(losses[1], rel=1e-4)


@pytest.mark.parametrize("run", ["gpt"], indirect=True)
def test_a_long_validation_text_is_not_compared_with_the_train_text(run, monkeypatch):
    monkeypatch.setattr(evaluation, "LONGEST_COMPARED", 30)
    assert not {"overlap", "clean"} & evaluate(run).keys()


def test_all_lengths_predict_the_same_tokens(run, data_dir):
    for keys, told in {("limit=5",): "limit= has no meaning without tasks=",
                       ("tasks=piqa", "batches=1"): "batches= has no meaning with tasks="}.items():
        with pytest.raises(UserError, match=f"^{told}$"):
            evaluate(run, *keys)
    text, longer = np.fromfile(data_dir / "words" / "val.bin", dtype="<u2"), {}
    if load_run(run)[0].context_limit:
        longer = {"block_size": 96}
        with pytest.raises(UserError, match=r"lengths=1,4: 96 tokens are more than the 24 that .* \(block_size=24\)"):
            evaluate(run, "lengths=1,4")
    found = evaluate(run, "lengths=1,4", "batch_size=64", *(f"{key}={value}" for key, value in longer.items()))
    model, windows = load_run(run, **longer)[0], (len(text) - 1) // 96
    part = evaluate(run, "batches=3")
    assert found["tokens"] == windows * 96 and part["tokens"] == 3 * 2 * 24
    assert "overlap" in found and not {"overlap", "clean"} & part.keys()
    for k in (1, 4):
        x, y = (torch.from_numpy(text[a:][:windows * 96].astype(np.int64)).view(-1, 24 * k) for a in (0, 1))
        with torch.no_grad():
            want = F.cross_entropy(model(x)[0].mT, y, reduction="none").double().mean(0)
        got = found["lengths"][str(k)]
        assert got["ce"] == pytest.approx(want.mean().item(), rel=1e-6) and got["context"] == 24 * k
    assert got["positions"]["64-95"] == pytest.approx(want[64:].mean().item(), rel=1e-6)


def test_a_synthetic_task_is_scored_at_longer_lengths(tmp_path, data_dir, monkeypatch):
    monkeypatch.setattr("common.tasks.VAL_EXAMPLES", 128)
    run = runs.run("lrt", tmp_path, data_dir, "dataset=task:recall", "tokenizer=byte", "block_size=8", "max_steps=30",
                   "learning_rate=1e-2", "batch_size=16", "eval_batches=0", "exact_batches=0")
    found = evaluate(run.folder, "lengths=1,2", "block_size=16")
    last = read_log(run.folder / "log.jsonl")[-1]
    for name in ("ce", "token_accuracy", "sequence_accuracy"):  # as train.py has them
        assert found[name] == found["lengths"]["1"][name] == pytest.approx(last[f"val_{name}"], rel=1e-5)
    model, longer = load_run(run.folder, block_size=16)[0], found["lengths"]["2"]
    x, y = TaskBatches(TrainConfig(dataset="task:recall"), 16).val.examples
    with torch.no_grad():
        logits = model(x)[0]
    right = (logits.argmax(-1) == y)[y != -1]
    assert longer["token_accuracy"] == right.double().mean().item() and 0 < right.double().mean() < 1
    all_right = ((logits.argmax(-1) == y) | (y == -1)).all(1).double().mean()
    assert longer["sequence_accuracy"] == all_right and longer["context"] == 16
    assert longer["ce"] == pytest.approx(F.cross_entropy(logits.mT, y, ignore_index=-1).item(), rel=1e-5)
    with pytest.raises(UserError, match="16 tokens are more than the 8 that this model reads"):
        evaluate(run.folder, "lengths=2")


def test_what_is_repeated_from_train_is_told_apart(tmp_path):
    """A text of 25,000 random words, whose end, the validation text, has 800 bytes of its middle."""
    rng = random.Random(0)
    text = " ".join("".join(rng.choices("abcdefgh", k=rng.randint(2, 6))) for _ in range(25_000))
    text = text[:-5000] + text[30_000:30_800] + text[-4200:]
    (tmp_path / "copies.txt").write_text(text)
    folder = make(tmp_path, dataset=f"file:{tmp_path}/copies.txt", tokenizer="bpe:300", name="copies")
    run = runs.run("gpt", tmp_path, folder.parent, "max_steps=1", "block_size=24", "dataset=copies", "tokenizer=bpe:300").folder
    train, val = (ids_of(folder, split) for split in ("train", "val"))
    known, copied = {tuple(train[i:i + 64]) for i in range(len(train))}, set()
    for i in range(len(val) - 63):
        copied |= {*range(i, i + 64)} if tuple(val[i:i + 64]) in known else set()
    found = evaluate(run, "lengths=1,2", "block_size=48")
    assert found["overlap"] == pytest.approx(len(copied) / len(val)) and 200 < len(copied) < 800
    windows = [val[s:s + 49] for s in range(0, len(val) - 48, 48) if not copied & {*range(s, s + 49)}]
    model, tokenizer, _ = load_run(run, block_size=48)
    for k in 1, 2:
        with torch.no_grad():
            x, y = (torch.tensor([w[a:a + 48] for w in windows]).view(-1, 24 * k) for a in (0, 1))
            nats = F.cross_entropy(model(x)[0].mT, y, reduction="sum").item()
        size = sum(len(tokenizer.decode(w[1:])) for w in windows)
        assert found["lengths"][str(k)]["clean"] == {"tokens": y.numel(), "ce": pytest.approx(nats / y.numel(), rel=1e-5),
                                                     "bpb": pytest.approx(nats / math.log(2) / size, rel=1e-5)}
    assert found["clean"] == found["lengths"]["1"]["clean"] and found["clean"]["tokens"] < found["tokens"]
    assert evaluate(run, "block_size=0", "batches=2") == evaluate(run, "batches=2")
    for split in "train", "val":
        with open(folder / f"{split}.bin", "r+b") as file:
            file.write(b"ab")
        with pytest.raises(UserError, match=f"{split}.bin is damaged, and meta.json has another SHA-256"):
            evaluate(run)


def test_blanks_at_the_beginning_of_windows_count():
    """Llama 2's tokenizer drops the first blank of a text, and a window is no text."""
    tokenizer = HFTokenizer(json.dumps(llama2()), "</s>")
    ids = np.array(tokenizer.encode(" cat" * 41))
    val = SimpleNamespace(tokenizer=tokenizer, mapped=lambda: ids, windows=lambda starts, n: np.stack([ids[s:s + n] for s in starts]))
    starts = range(0, len(ids) - 8, 8)
    found = evaluation.clean_losses({1: torch.ones(len(starts))}, starts, 8, {"val": val, "train": val})[1]
    assert tokenizer.decode(ids[8:10]) == "cat cat"
    assert found["1"]["bpb"] == pytest.approx(len(starts) / math.log(2) / (len(" cat") * 8 * len(starts)))


def harness_model(model, tokenizer, batch_size, **how):
    lm = pytest.importorskip("lm_eval.api.model", reason="lm_eval is not installed: eval.py's tasks are not tested")
    return type("RunModel", (HarnessModel, lm.LM), {})(model, tokenizer, batch_size, **how)


def ask(lm, kind, *arguments):
    from lm_eval.api.instance import Instance
    return getattr(lm, kind)([Instance(kind, {}, args, n) for n, args in enumerate(arguments)])


PAIRS = [("the cat", " sat"), ("the cat", " ran"), ("a b ", "c d"), ("", "no context"), ("x" * 20 + "y" * 20, " yes"),
         ("short", "er and a longer answer"), ("one more", "s"), ("one more", "t"), (" \n ", "blank"), ("x", "")]


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    """Return the options of tasks of each kind, from local files."""
    pytest.importorskip("lm_eval", reason="lm_eval is not installed: eval.py's tasks are not tested")
    folder = tmp_path_factory.mktemp("tasks")
    rows = [{"text": f"number {n} is " + "even." * (n % 3 + 1), "choices": [" even", " odd", " neither"],
             "label": n % 2, "right": [" even", " odd"][n % 2]} for n in range(6)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    kinds = {"choose": ("multiple_choice", "{{text}}", "{{label}}"),        # the answer is a number
             "spell": ("multiple_choice", "{{text}}", "{{right}}"),         # the answer is spelt out
             "fill": ("multiple_choice", "{{label}}", "{{text}}"),          # the question is which beginning is right
             "write": ("generate_until", "{{text}}", "{{right}}")}
    for name, (kind, question, answer) in kinds.items():
        metric = "exact_match" if name == "write" else "acc"
        (folder / f"{name}.yaml").write_text(
            f"task: {name}\ndataset_path: json\noutput_type: {kind}\ntest_split: test\nfewshot_split: test\n"
            f"dataset_kwargs: {{data_files: {{test: {folder}/rows.jsonl}}, cache_dir: {folder}/cache}}\n"
            f"doc_to_text: '{question}'\ndoc_to_target: '{answer}'\nmetric_list: [{{metric: {metric}}}]\n"
            + "doc_to_choice: choices\n" * (kind == "multiple_choice"))
    return dict(tasks="choose,spell,fill", include_path=str(folder), num_fewshot=0)


@pytest.mark.parametrize("name", MODELS)
def test_batches_agree(name):
    model, tokenizer = tiny(name, vocab_size=260, block_size=32), load_tokenizer({"kind": "byte"})
    one, many = (ask(harness_model(model, tokenizer, size), "loglikelihood", *PAIRS) for size in (1, 8))
    assert many == [(pytest.approx(nats, abs=1e-5), greedy) for nats, greedy in one] and len({*one}) == len(PAIRS)
    if model.context_limit:
        with pytest.raises(UserError, match=r"an answer of 33 tokens: the model reads 32 \(block_size\)"):
            ask(harness_model(model, tokenizer, 1), "loglikelihood", ("a", "b" * 33))


def test_tasks_and_their_right_answers(tasks, tmp_path, data_dir):
    """gold_ce is right where the answer is a label, where it is spelt out, and where the right beginning is asked
    for."""
    run = runs.run("gpt", tmp_path, data_dir, "max_steps=2", "block_size=96").folder
    (model, tokenizer, _), argv = load_run(run), [f"{key}={value}" for key, value in tasks.items()]
    found = evaluate(run, "limit=5", *argv)["tasks"]
    assert found["choose"]["acc,none"] * 5 in range(6)
    texts = [f"number {n} is " + "even." * (n % 3 + 1) for n in range(5)]
    right = [" even", " odd", " even", " odd", " even"]
    lm = harness_model(model, tokenizer, 1)
    for name, pairs in dict(choose=zip(texts, right), spell=zip(texts, right), fill=zip(right, texts)).items():
        scores = ask(lm, "loglikelihood", *((context, " " + answer) for context, answer in pairs))
        assert found[name]["gold_ce"] == pytest.approx(-np.mean([score for score, _ in scores]), rel=1e-5), name
    assert evaluate(run, "limit=5", *argv, "num_fewshot=1")["tasks"] != found
    with pytest.raises(UserError, match="a task generates text, or scores whole documents"):
        evaluate_harness(model, tokenizer, EvalConfig(**{**tasks, "tasks": "write"}))


def test_the_papers_tasks_are_in_lm_eval():
    tasks = pytest.importorskip("lm_eval.tasks")
    names = {name for names in evaluation.TASK_SETS.values() for name in names.split(",")}
    folders = "arc", "hellaswag", "lambada", "mmlu/continuation", "openbookqa", "piqa", "sciq", "winogrande"
    here = [f"{tasks.__path__[0]}/{folder}" for folder in folders]          # listing all of its tasks takes 8 s
    assert names <= {*tasks.TaskManager(include_path=here, include_defaults=False).all_tasks}
    assert evaluation.TASK_SETS.keys() == {"rt", "relaxed", "mor", "rat"}


def test_lrt_scores_by_its_estimate():
    """The score comes from the logits of Algorithm 1, and not from those of the chain."""
    model, tokenizer = tiny("lrt", vocab_size=260, block_size=32), load_tokenizer({"kind": "byte"})
    exact, = ask(harness_model(model, tokenizer, 1), "loglikelihood", PAIRS[0])
    model.cfg.prefill = "interleaved"
    estimate, = ask(harness_model(model, tokenizer, 1, cached=True), "loglikelihood", PAIRS[0])
    ids = torch.tensor([tokenizer.encode("".join(PAIRS[0]))])
    with torch.no_grad():
        p = model.head(model.hidden(ids[:, :-1], path="interleaved"))[0].log_softmax(-1)
    want = sum(p[i - 1, ids[0, i]].item() for i in range(7, 11))
    assert estimate[0] == pytest.approx(want, rel=1e-5) and abs(estimate[0] - exact[0]) > 1e-3


@pytest.fixture(scope="module")
def llamas(tmp_path_factory):
    """Return lm_eval's model of a tiny Llama with a BPE of its own, and ours."""
    transformers, huggingface = map(pytest.importorskip, ("transformers", "lm_eval.models.huggingface"))
    folder = tmp_path_factory.mktemp("llama")
    write_model(folder, smollm(280))
    theirs = saved_llama(folder, vocab_size=280, max_position_embeddings=32, eos_token_id=0, bos_token_id=None)
    fast = transformers.PreTrainedTokenizerFast(tokenizer_file=f"{folder}/tokenizer.json", eos_token=EOT, pad_token=EOT)
    hf = huggingface.HFLM(pretrained=theirs, tokenizer=fast, batch_size=3, max_length=32)
    return hf, harness_model(from_pretrained(folder).eval(), hf_tokenizer(str(folder)), 3)


def test_the_numbers_are_those_of_lm_eval_with_transformers(llamas):
    (theirs, ours), encode = llamas, llamas[1].tokenizer.encode
    for request, a, b in zip(PAIRS[:8], *(ask(lm, "loglikelihood", *PAIRS[:8]) for lm in (ours, theirs))):
        assert a == (pytest.approx(b[0], abs=1e-4), b[1]), request
    for text in "hello wor ld", " \n a cat", "the  cat sat":       # any cut, inside a token too
        for cut in range(len(text)):
            context, answer = ours.encode(text[:cut], text[cut:])
            whole = answer if context == [ours.tokenizer.eot] else context + answer
            assert context and answer and ours.tokenizer.decode(whole) == text
    greedy = [step[0] for step in stream(ours.model, [encode("hello")], 5, temperature=0)]
    pairs = [(encode("hello"), greedy), (encode("hello"), [*greedy[:4], 1 + greedy[4] % 200])]
    assert [is_greedy for _, is_greedy in ours.scores(pairs)] == [True, False]


def test_an_answer_goes_on_where_its_context_ends():
    """A tokenizer that puts a blank before a text puts none before an answer, also where a token would cross the join."""
    tokenizer = HFTokenizer(json.dumps(llama2()), "</s>")
    lm = HarnessModel(None, tokenizer, 1)
    for context, answer in ("c", "at"), ("cat c", "at cat"), ("a", "t"), ("cat", " cat"), ("cat ", "cat"), ("", "cat"):
        before, after = lm.encode(context, answer)
        assert tokenizer.decode(before) == context.rstrip() and after
        assert tokenizer.decode([*before, *after]) == context + answer, (context, answer)


def test_what_fails_in_lm_eval_is_one_line(tasks, tmp_path, monkeypatch):
    """A package may be missing, or a task's code may raise an error of any type. Either is told in one line."""
    model, tokenizer = tiny("gpt", vocab_size=260), load_tokenizer({"kind": "byte"})
    (tmp_path / "broken.py").write_text("def score(doc):\n    raise ZeroDivisionError('first\\nsecond')\n")
    (tmp_path / "broken.yaml").write_text((tmp_path / tasks["include_path"] / "choose.yaml").read_text().replace(
        "task: choose", "task: broken").replace("'{{text}}'", "!function broken.score"))
    keys = dict(batch_size=2, include_path=str(tmp_path))
    with pytest.raises(UserError, match="^tasks=broken: ZeroDivisionError: first$"):
        evaluate_harness(model, tokenizer, EvalConfig(tasks="broken", **keys))
    monkeypatch.setitem(sys.modules, "lm_eval", None)       # an import fails as if it were not installed
    with pytest.raises(UserError, match="^the package lm_eval is missing: pip install lm_eval$"):
        evaluate_harness(model, tokenizer, EvalConfig(tasks="piqa", **keys))

"""reproduce.py trains what is missing, once, and makes tables from results. Every experiment's options are known."""
import ast
import dataclasses
import fcntl
import hashlib
import importlib
import json
import math
import os
import re
import shutil
import subprocess
import sys
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
from matplotlib.figure import Figure
import pytest
import torch

import prepare
from common.checkpoint import load_start
from common.data import load_data
from common.options import UserError, merge, split_args, unlock
from conftest import ROOT, move
from lab import reproduce
from lab.plot import draw
from runs import SIZES, SMALL

EXPERIMENTS = reproduce.load_experiments()
EXPERIMENT = {"title": "A trial", "tier": "quick", "seeds": 1,
              "options": " ".join(["model=control config=configs/gpt_tiny.yaml", *SMALL, *SIZES["gpt"], "dropout=0",
                                "keep_interval=3"]),
              "rows": {"first": {"options": "", "note": "as it is"},
                       "from the third step": "max_steps=5 from={first}/step_3.pt",
                       "from its weights": "init_from={first} max_steps=2 log_interval=10"},
              "columns": {"options": "options", "note": "text", "steps": "step .0f", "bits": "val_bpb .3f",
                          "half": "half.ce .3f", "ms": "speed.decode_1_ms .2f"},
              "evaluate": {"half": "batches=1"}, "bench": ["runs {rows}"],
              "picture": [{"x": "curves.tokens", "y": "curves.ce"}, {"x": "speed.decode_1_ms", "y": "val_bpb"}]}


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_has_known_keys(name):
    experiment = EXPERIMENTS[name]
    assert experiment.tier in reproduce.TIERS and (experiment.rows or experiment.bench)
    for run in reproduce.plan(experiment):
        if run.seed == 1:
            merge({**split_args(run.arguments)[1], "init_from": "", "run": "r"}, load_start)


def test_results_have_a_place_for_every_experiment_and_name_no_machine():
    """Nothing under lab/ has an absolute path or a home folder in it."""
    texts = [file.read_text() for file in (ROOT / "lab").rglob("*.md")]
    marks = re.findall("<!-- (.*) -->", "".join(texts))
    assert sorted(marks[::2]) == sorted(EXPERIMENTS.keys() - {"quick"}) and {*marks[1::2]} == {"end"}
    path = re.compile(r"(?<![\w./)\]-])(~?/[A-Za-z][\w.-]*/[\w.-]|[A-Z]:\\|~/)")
    for file in (ROOT / "lab").rglob("*"):
        if file.suffix in (".jsonl", ".yaml", ".md", ".txt"):
            assert not (found := path.search(file.read_text())), f"{file}: {found[0]}"


def test_runs_are_made_once_and_written_into_the_documents(data_dir, tmp_path):
    """In a copy of the repository one call fails halfway, one does the rest, and one comes after a result is lost."""
    copy = tmp_path / "copy"
    left_out = shutil.ignore_patterns(".*", "out", "data", "results", "experiments", "tests", "__pycache__")
    shutil.copytree(ROOT, copy, ignore=left_out)
    (copy / "lab" / "experiments").mkdir()
    (copy / "lab" / "experiments" / "model_control.py").write_text("from model_gpt import Config, Model\n")
    (copy / "README.md").write_text("before\n<!-- trial -->\nold\n<!-- end -->\nafter\n")
    no_end = "<!-- trial -->\nmine\n<!-- other -->\n<!-- end -->\n"    # it stays as it is
    (copy / "lab" / "mine.md").write_text(no_end)
    lines = copy / "lab" / "results" / "trial.jsonl"

    def call(**changes):
        trial = {**EXPERIMENT, **changes, "options": f"{EXPERIMENT['options']} data_dir={data_dir}"}
        (copy / "lab" / "experiments" / "trial.yaml").write_text(json.dumps(trial))
        return subprocess.run([sys.executable, "-m", "lab.reproduce", "trial"], cwd=copy, text=True, capture_output=True)
    p = call(evaluate={"half": "device=cuda:99"})
    assert p.returncode == 2 and "4 runs or benchmarks failed" in p.stderr and "Traceback" not in p.stderr
    p = call()
    assert p.returncode == 0, p.stdout + p.stderr
    written = (copy / "README.md").read_text()
    assert written.startswith("before") and written.endswith("<!-- end -->\nafter\n") and "old" not in written
    assert (copy / "lab" / "mine.md").read_text() == no_end
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in written.splitlines() if line.startswith("| f")]
    assert [(row[0], row[2], row[3]) for row in rows] == [("first", "as it is", "6"), ("from the third step", "", "5"),
                                                          ("from its weights", "", "2")]
    assert all(float(cell) > 0 for row in rows for cell in row[4:])
    results = [json.loads(line) for line in lines.read_text().splitlines()]
    assert len({line["command"] for line in results}) == len(results) == 4
    assert str(copy) not in json.dumps(results) and "training step" in lines.with_suffix(".txt").read_text()
    assert all(line["cpu"] and line["threads"] == 1 for line in results[:3])
    assert results[0]["text"].split() == [of.sha256 for of in load_data(data_dir / "words").values()]
    assert results[0]["keys"]["config"] == "configs/gpt_tiny.yaml" and "dropout" not in results[0]["keys"]
    assert (copy / "assets" / "trial.png").stat().st_size > 10_000
    # A run that starts from weights is resumed without them, and the others are left alone.
    stamps = {f: f.stat().st_mtime_ns for f in copy.glob("out/*/ckpt.pt")}
    lines.write_text("".join(line for line in lines.open() if "init_from=out/" not in line.split("commit")[0]))
    p = call()
    assert p.returncode == 0 and "2 of   3 runs done" in p.stdout and len(lines.read_text().splitlines()) == 4
    assert len([f for f in stamps if f.stat().st_mtime_ns == stamps[f]]) >= 2
    assert written.splitlines()[:6] == (copy / "README.md").read_text().splitlines()[:6]


def test_two_callers(tmp_path, monkeypatch):
    monkeypatch.setattr(reproduce, "OUT", tmp_path)
    other = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_EX)
    with pytest.raises(UserError, match="is in use"):
        reproduce.reproduce({})
    os.close(other)


def test_the_first_seed_comes_first_and_a_gpu_has_one_run_at_a_time(tmp_path, monkeypatch):
    seen, texts = [], []
    for name, value in (("OUT", tmp_path), ("signal", Mock()), ("prepare_missing", lambda cfg: texts.append(cfg.dataset)),
                        ("train_all", lambda runs, jobs: seen.append((jobs, [(r.label, r.seed) for r in runs])) or [])):
        monkeypatch.setattr(reproduce, name, value)
    for tier, jobs in ("cpu", reproduce.JOBS), ("gpu", 1):
        experiment = reproduce.Experiment("mine", "a trial", tier, seeds=2, rows={"a": "", "b": "init_from={a}"},
                                          options="dataset=packages", evaluate={"tune": "dataset=packages-tune"})
        reproduce.reproduce({experiment: reproduce.plan(experiment)})
        unlock(tmp_path)
        assert seen.pop() == (jobs, [("a", 1), ("b", 1), ("a", 2), ("b", 2)])
    assert reproduce.JOBS > 1 and texts == ["packages", "packages-tune"] * 8     # an evaluation's text is not missing in the end


def test_a_benchmark_is_of_the_last_weights(monkeypatch):
    experiment, lines = reproduce.Experiment("mine", "a trial", "cpu", seeds=1, rows={"a": ""}, bench=["runs {rows}"]), {}
    monkeypatch.setattr(reproduce, "read_results", lambda experiment: lines)
    run, = reproduce.plan(experiment)
    command, = reproduce.benches(experiment, [run])
    for was, now, valid in (["x"], "x", True), (["x"], "y", False), (["x"], None, True), (None, "y", True):
        lines[command], run.result = {"command": command} | ({"weights": was} if was else {}), {"weights": now}
        assert bool(reproduce.benches(experiment, [run])[command]) == valid


def test_the_fingerprint_of_code_is_that_of_every_python():
    code = "class A:\n    def f(self, x: int = None): return [x]"
    assert reproduce.dump(ast.parse(code)) == (
        "Module(body=[ClassDef(name='A', bases=[], keywords=[], body=[FunctionDef(name='f', args=arguments(posonlyargs=[], "
        "args=[arg(arg='self'), arg(arg='x', annotation=Name(id='int', ctx=Load()))], kwonlyargs=[], kw_defaults=[], "
        "defaults=[Constant(value=None)]), body=[Return(value=List(elts=[Name(id='x', ctx=Load())], ctx=Load()))], "
        "decorator_list=[])], decorator_list=[])], type_ignores=[])")


def test_a_log_without_the_last_evaluation_is_told(tmp_path, monkeypatch):
    """The disk may have been full when it was logged."""
    run = SimpleNamespace(folder=tmp_path)
    for name, value in dict(load_checkpoint=lambda path: {"step": 6}, 
                            made_from=lambda run: {}, made_by=lambda threads: {}).items():
        monkeypatch.setattr(reproduce, name, value)
    (tmp_path / "keys.json").write_text("{}")
    for log in "", '{"step": 4, "seconds": 1, "val_ce": 1}\n{"step": 6, "seconds": 2, "ce": 1, "lr": 1}\n':
        (tmp_path / "log.jsonl").write_text(log)
        with pytest.raises(UserError, match="lacks the evaluation of step 6"):
            reproduce.record(run)


def test_a_result_has_the_config_file_that_it_was_trained_with(tmp_path, monkeypatch):
    """The file may change while the run trains."""
    run, results = SimpleNamespace(folder=tmp_path, command="c", row={"evaluate": {}}, experiment=SimpleNamespace(picture=[])), []
    for name, value in dict(load_checkpoint=lambda path: {"step": 6}, fingerprint=lambda ckpt: "w",
                            build_model=lambda ckpt: torch.nn.Linear(1, 1), file_options=lambda run: {"batch_size": 13},
                            append=lambda experiment, line: results.append(line)).items():
        monkeypatch.setattr(reproduce, name, value)
    (tmp_path / "keys.json").write_text('{"batch_size": 12, "made_from": {"commit": "a"}}')
    (tmp_path / "log.jsonl").write_text('{"step": 6, "seconds": 2, "val_ce": 1, "tokens": 6, "flops": 1}\n')
    assert reproduce.record(run) and results[0]["keys"] == {"batch_size": 12} and results[0]["commit"] == "a"


def test_a_run_that_lost_the_checkpoint_it_continues(tmp_path, monkeypatch):
    """It gets the checkpoint again, because train.py would begin at step 0. If that is gone, too, nothing is deleted."""
    for name, value in dict(python=lambda *command, **more: None, file_options=lambda run: {}, made_from=lambda run: {},
                            made_by=lambda threads: {}).items():
        monkeypatch.setattr(reproduce, name, value)
    source, folder = tmp_path / "step_3.pt", tmp_path / "r"
    source.write_text("three")
    run = SimpleNamespace(folder=folder, name="r", checkpoint=str(source), arguments=[], needs=[])
    for _ in range(2):
        reproduce.start(run)
        assert (folder / "ckpt.pt").read_text() == "three"
        (folder / "ckpt.pt").unlink()
    source.unlink()
    with pytest.raises(UserError, match="step_3.pt is gone: delete .*, and the same command makes it again"):
        reproduce.start(run)
    assert (folder / "keys.json").exists()


@pytest.mark.parametrize("words, runs", [(["quick"], False), (["quick", "again"], True), (["quick", "write"], None), ([], None)])
def test_what_a_call_does(words, runs, monkeypatch, capsys):
    """Without a name it only tells what there is to do, and with `write` it makes no runs."""
    called, written, forgotten = [], [], []
    monkeypatch.setattr(reproduce, "load_experiments", lambda: {"quick": EXPERIMENTS["quick"]})
    monkeypatch.setattr(reproduce, "forget", lambda runs: forgotten.append(len(runs)))
    monkeypatch.setattr(reproduce, "reproduce", lambda plans: called.append((*plans, bool(forgotten))) or [])
    monkeypatch.setattr(reproduce, "write", lambda experiment, of_it: written.append(experiment.name))
    reproduce.main(words)
    assert [(e.name, again) for e, again in called] == ([("quick", runs)] if runs is not None else [])
    assert written == ["quick"] * bool(words)
    assert ("quick " in capsys.readouterr().out) == ("write" not in words)


def test_a_stopped_run_goes_on(tmp_path, monkeypatch):
    """A run starts from the beginning if its config file has changed, or if its model or text is another."""
    calls, config = [], {"batch_size": 12, "dropout": 0.1}
    monkeypatch.setattr(reproduce, "python", lambda *command, **more: calls.append(command[-1]))
    monkeypatch.setattr(reproduce, "file_options", lambda run: config)
    monkeypatch.setattr(reproduce, "made_from", lambda run: made)
    run, made = SimpleNamespace(folder=tmp_path / "r", name="r", checkpoint=None, arguments=[], needs=[]), {"model": "a"}
    monkeypatch.setattr(reproduce, "made_by", lambda threads: {"commit": "b"})
    reproduce.start(run)
    for changed in config, made:
        (run.folder / "ckpt.pt").touch()
        reproduce.start(run)
        assert (run.folder / "ckpt.pt").exists()
        changed[max(changed)] = 0.2
        reproduce.start(run)
        assert not (run.folder / "ckpt.pt").exists()
    made["text"] = "a c"                                # without a checkpoint, all is as it is now
    reproduce.start(run)
    assert calls == ["resume=auto"] * 6
    assert json.loads((run.folder / "keys.json").read_text())["made_from"] == {"commit": "b", "model": 0.2, "text": "a c"}


def test_a_run_is_finished_after_its_last_evaluation(monkeypatch):
    for step, evaluated in (4, 4), (6, 4), (6, 6):
        ckpt = {"step": step, "evaluated": evaluated, "config": {"max_steps": 6}}
        monkeypatch.setattr(reproduce, "load_checkpoint", lambda path: ckpt)
        assert reproduce.finished(SimpleNamespace(folder=ROOT)) == (evaluated == 6)


def test_a_run_that_others_start_from_is_done_again_if_it_is_not_whole(monkeypatch):
    a, b = (Mock(result=result, needs=[]) for result in ({"n": 1}, None))
    b.needs.append(a)
    for whole, wanted in (True, [b]), (False, [a, b]):
        monkeypatch.setattr(reproduce, "finished", lambda run: whole)
        assert reproduce.missing([a, b]) == wanted


def test_a_call_that_is_stopped_leaves_no_program_behind():
    """It also ends a program that starts after the signal."""
    try:
        wait = lambda: reproduce.python("-c", "import time; time.sleep(60)", stdout=subprocess.DEVNULL)
        before = wait()
        reproduce.stop_all()
        assert before.wait(30) == wait().wait(30) == -15
    finally:
        reproduce.STOP.clear()
        reproduce.STARTED.clear()


def test_what_tells_a_run_apart(tmp_path, monkeypatch):
    """A run is told apart by its evaluations, by the values of its config file, and by the step that it starts from."""
    monkeypatch.setattr(reproduce, "HERE", tmp_path)
    monkeypatch.setattr(reproduce, "LAB", tmp_path / "lab")
    file = tmp_path / "lab" / "experiments" / "trial.yaml"
    config = tmp_path / "configs" / "gpt_tiny.yaml"
    file.parent.mkdir(parents=True)
    config.parent.mkdir()
    config.write_text("n_layer: 4\nlearning_rate: 0.02345678901\nbatch_size: 12\n")

    def plan(text):
        file.write_text(text)
        return reproduce.plan(reproduce.load_experiments()["trial"])
    trial = "title: a\ntier: cpu\nseeds: 1\nrows: {{whole: '', part: 'from={{whole}}/step_{}.pt'}}\nevaluate: {}"
    first = plan(trial.format(3, "{}"))
    for run in first:
        reproduce.append(run.experiment, {"command": run.command, "keys": reproduce.file_options(run)})
        results = reproduce.results_file(run.experiment)
        results.write_text(results.read_text().rstrip())    # an editor removes the last line break
    done = lambda *changes: [bool(run.result) for run in plan(trial.format(*changes))]
    assert done(3, "{}") == [True, True] and done(3, "{half: batches=1}") == [False, False]
    assert done(4, "{}") == [True, False] and plan(trial.format(4, "{}"))[1].folder != first[1].folder
    for layers, same in (4, True), (5, False):          # the lost option was the default's; another value
        config.write_text(f"n_layer: {layers}\nlearning_rate: 0.02345678901\n")
        assert done(3, "{}") == [same, same]
    config.write_text("n_layer: 4\nlearning_rate: 0.02345678901\n")
    both = results.read_text()
    results.write_text(both.splitlines()[1])            # without the run that it starts from, a run is not done
    assert done(3, "{}") == [False, False]
    results.write_text(both)
    assert done(3, "{}") == [True, True]
    for mistake, told in {"row: 5": "trial.yaml: .*row", "rows: {y: 'from={x}'}": "no row above", "rows: {y: run=z}": "y: run= is set",
                          "rows: {y: seed=2}": "y: seed= is set",
                          "rows: {y: nlayer=1}": "trial.yaml: y: unknown option 'nlayer'",
                          "rows: {y: qk_norm=maybe}": "trial.yaml: y: qk_norm must be true or false",
                          "rows: {y: ''}\nevaluate: {half: lenghts=1}": "trial.yaml: y: unknown option 'lenghts'",
                          "rows: {y: ''}\ncolumns: {bits: val_bpb}": "column 'val_bpb' must be .* a name and a format",
                          "rows: {y: ''}\ncolumns: {bits: val_bpb %.3f}": "trial.yaml: Invalid format",
                          "rows: {y: ''}\nevaluate: lengths=1": "evaluate of y must be", "tier: cup": "tier must be one of",
                          "rows: {y: '', z: ''}": "trial.yaml: z has the options of y",
                          "picture: [{x: step, y: bpb, xlable: steps}]": "a panel of picture needs x and y, and may have of",
                          "bench: rt": "bench must be a list"}.items():
        with pytest.raises(UserError, match=told):
            plan(f"title: a\n{mistake}" + "\ntier: cpu" * ("tier" not in mistake))
    for line in "<<<<<<<", "{}":
        results.write_text(f"{both}\n{line}\n")
        with pytest.raises(UserError, match="trial.jsonl, line 3 is not a result in JSON"):
            plan(trial.format(3, "{}"))
    results.unlink()
    config.unlink()     # a model needs no file
    assert plan("title: a\ntier: cpu\nrows: {y: ''}")
    searched = plan("title: a\ntier: cpu\nseeds: 1\nrows: {y: n_layer=2, z: {minutes: 3}}\ngrid: {low: n_head=2, high: n_head=4}")
    assert [(run.label, *run.arguments[:-2], run.row["minutes"]) for run in searched] == [
        ("y, low", "n_layer=2", "n_head=2", 1), ("y, high", "n_layer=2", "n_head=4", 1), ("z, low", "n_head=2", 3), ("z, high", "n_head=4", 3)]


def test_what_a_run_was_made_from(tmp_path, monkeypatch, capsys):
    """It is told if the text is another, or if the code of the model or of what it imports is. `again` lets the run
    begin again, and each run that starts from it. Comments and docstrings are no code."""
    monkeypatch.setattr(reproduce, "HERE", tmp_path)
    monkeypatch.setattr(reproduce, "OUT", tmp_path / "out")
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "model_mine.py").write_text("import parts_of_mine\nx = 1\n")
    (tmp_path / "parts_of_mine.py").write_text('"""Words."""\nimport not_here.language\ny = 1\n')
    meta = tmp_path / "data" / "mine" / "meta.json"
    meta.parent.mkdir(parents=True)
    split = lambda sha256: json.dumps({"splits": {"train": {"sha256": sha256}, "val": {"sha256": "b"}}})
    meta.write_text(split("a"))
    config = tmp_path / "configs" / "gpt_tiny.yaml"
    config.parent.mkdir()
    config.touch()
    monkeypatch.setattr(reproduce, "file_options", lambda run: {"model": "mine"})
    experiment = reproduce.Experiment("mine", "a trial", "cpu", seeds=1, rows={"a": "", "b": "init_from={a}"},
                                      options=f"dataset=mine data_dir={tmp_path / 'data'}")
    monkeypatch.setattr(reproduce, "read_results", lambda experiment: {})
    runs = reproduce.plan(experiment)

    def told(*made):
        reproduce.code_of.cache_clear()
        for run, of in zip(runs, made):
            run.result = {**of} if of is not None else None
        reproduce.show(experiment, runs)
        return capsys.readouterr().out.partition("note: ")[2].partition(";")[0]
    first = reproduce.made_from(runs[0])
    assert first["text"] == "a b" and told(first, first) == told({}, first) == told(first, None) == ""
    (tmp_path / "parts_of_mine.py").write_text('"""Other words."""\nimport not_here.language\ny = 1     # one\n')
    assert told(first, first) == ""
    (tmp_path / "parts_of_mine.py").write_text("y = 2\n")
    assert told(first, first) == "2 of these runs were made with another version of the model's code (CHANGELOG.md tells what changes results)"
    config.unlink()
    assert told(first, first).startswith("a: there is no configs/gpt_tiny.yaml, so that it has the defaults of train.py")
    config.touch()
    meta.write_text(split("c"))
    assert told(first, {}) == "1 of these runs were made with another text and version of the model's code (CHANGELOG.md tells what changes results)"
    (tmp_path / "book.txt").write_text("a text")
    source = prepare.identify([tmp_path / "book.txt"])
    meta.write_text(json.dumps({**json.loads(split("a")), "dataset": f"file:{tmp_path / 'book.txt'}", "source": source}))
    assert told(None, None) == ""
    (tmp_path / "book.txt").write_text("a text and more")
    reproduce.tell_text.cache_clear()
    assert "book.txt has another size, date, content than when " in told(None, None) and told(None, None) == ""
    meta.write_text(split("c"))
    told(first, {})
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.setattr(reproduce, "HERE", tmp_path / "elsewhere")      # a model may lie outside of the repository
    reproduce.code_of.cache_clear()
    assert reproduce.code_of("model_mine") != hashlib.sha256(b"").hexdigest()[:16]
    monkeypatch.setattr(reproduce, "HERE", tmp_path)
    reproduce.forget(runs)
    assert [run.result for run in runs] == [None, None]
    for words, told in {("ratse",): "unknown experiment 'ratse': did you mean rates",
                        ("again",): "again needs the names of experiments", ("intervals",): "intervals needs the names",
                        ("again", "write", "rates"): "write makes no runs, and again does"}.items():
        with pytest.raises(UserError, match=told):
            reproduce.main(list(words))


def test_a_run_knows_the_weights_that_it_starts_from(monkeypatch):
    a, b = (SimpleNamespace(options={"dataset": "task:s3"}, result=None, needs=[]) for _ in range(2))
    b.needs.append(a)
    monkeypatch.setattr(reproduce, "file_options", lambda run: {})
    for weights, start, changed in (("x", ["x"], []), ("y", ["x"], ["run that they start from"]), ("y", None, []), (None, ["x"], [])):
        a.result = {"weights": weights}
        assert reproduce.changed(b, {"start": start}) == changed
    a.result, b.result = {"weights": "y"}, {"start": ["x"]}
    reproduce.forget([a, b])
    assert a.result and b.result is None
    a.result, b.result = None, {"start": ["x"]}
    reproduce.forget([a, b])
    assert b.result is None


def test_a_result_names_its_machine_and_what_differs_from_the_commit(tmp_path, monkeypatch):
    """A changed file, a new and a deleted one; a document is no code."""
    monkeypatch.setattr(reproduce, "HERE", tmp_path)
    git = lambda *command: subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false", *command], cwd=tmp_path,
                                          check=True, capture_output=True)
    for name in "a.py", "old.py", "README.md":
        (tmp_path / name).write_text(name)
    for command in ("init", "-q"), ("add", "."), ("commit", "-qm", "first"):
        git(*command)
    made = reproduce.made_by(1)
    assert "changed" not in made and re.fullmatch("[0-9a-f]{7,}", made["commit"])
    assert made["threads"] == 1 and made["cpu"] and made["versions"]["numpy"] == np.__version__
    assert made["versions"].keys() == {"torch", "numpy", "tokenizers"}
    (tmp_path / "a.py").write_text("b")
    (tmp_path / "README.md").write_text("b")
    (tmp_path / "old.py").unlink()
    (tmp_path / "lab/experiments").mkdir(parents=True)
    (tmp_path / "lab/experiments/new.yaml").write_text("b")
    of_b = hashlib.sha256(b"b").hexdigest()[:16]
    again = reproduce.made_by(1)
    assert again["changed"] == {"a.py": of_b, "lab/experiments/new.yaml": of_b, "old.py": "deleted"}
    assert again["commit"] == made["commit"] + "-changed"


@pytest.mark.parametrize("status, step, told", [(0, 2, "stopped; the same command goes on"), (-15, 2, "stopped;"), (0, 6, "done"),
                                                (2, 2, "FAILED, see ")])
def test_a_run_that_is_stopped_has_not_failed(status, step, told, monkeypatch, capsys):
    class run:
        experiment, label, seed, needs, folder = SimpleNamespace(name="mine"), "a", 1, [], "out/mine"
    process = SimpleNamespace(wait=lambda: status, terminate=lambda: None)
    for name, value in dict(start=lambda run: process, finished=lambda run: step == 6, record=lambda run: True).items():
        monkeypatch.setattr(reproduce, name, value)
    reproduce.train_all([run], 1)
    assert capsys.readouterr().out.startswith(f"mine: a, seed 1: {told}")


def test_cells_show_mean_and_deviation_over_the_seeds():
    results = [{"a": {"b": 1.0}, "speed": {"ms": 7}, "n": 3}, {"a": {"b": 2.0}, "n": 3}, {"n": 3}]
    assert reproduce.cell(results, "a.b .2f") == "1.50 ± 0.71 (2 of 3)" and reproduce.cell(results, "speed.ms .0f") == "7"
    assert reproduce.cell(results, "n ,.0f") == "3" and reproduce.cell(results, "missing .2f") == ""


def test_a_panel_has_the_curves_of_its_rows():
    """A star gives a list, which is a curve over the names in its place, and its points are means over the seeds."""
    of = lambda a, b: {"at": {"lengths": {"1": {"n": 8, "right": a}, "2": {"n": 16, "right": b}}}}
    rows = {"S3, RT": [of(1.0, 0.5), of(0.5, 0.25)], "copying, RT": [of(0.0, 0.0)], "S3, none": [{"at": {}}, {}]}
    x, y = "at.lengths.*.n", "at.lengths.*.right"
    assert reproduce.look_up(rows["S3, none"][0], y) is None and reproduce.look_up({"a": {}}, "a.*.n") == []
    style, curves = reproduce.panel_of(rows, x, y, of="S3, ", xscale="log")
    assert curves == [("RT", [(8, 0.75), (16, 0.375)])] and style == {"xlabel": x, "ylabel": y, "xscale": "log"}
    assert [name for name, _ in reproduce.panel_of(rows, x, y)[1]] == ["S3, RT", "copying, RT"]


def test_paired_differences_and_their_intervals(monkeypatch, capsys):
    """Runs are paired by their seeds. 2 +- 4.3027 / sqrt(3) is the interval of 1, 2 and 3; QUANTILES against the t
    distribution's integral. What includes 0, or 1 for ratios, is a tie if it is at most 0.1 wide, or else undecided.
    Two seeds have no interval."""
    for n, quantile in reproduce.QUANTILES.items():
        x = torch.linspace(0, quantile, 100_001, dtype=torch.float64)
        density = (1 + x ** 2 / (n - 1)) ** (-n / 2) * math.gamma(n / 2) / math.gamma((n - 1) / 2) / math.sqrt(math.pi * (n - 1))
        assert torch.trapezoid(density, x).item() == pytest.approx(0.475, abs=1e-5)
    assert reproduce.interval([1, 2, 3], ".3f") == "undecided, 2.000 (-0.484 to 4.484)"
    assert reproduce.interval([0.01, 0.02, 0.03], ".3f") == "tie, 0.020 (-0.005 to 0.045)"
    assert reproduce.interval([3, 4, 5], ".3f") == "4.000 (1.516 to 6.484)"
    assert reproduce.interval([3, 4, 5], ".3f", null=2) == "undecided, 4.000 (1.516 to 6.484)"
    assert reproduce.interval([1, 2], ".1f") == "1.5 (2 seeds)"
    of = lambda seeds, values: [{"seed": seed, "val_bpb": value, "speed": {"ms": value}} for seed, value in zip(seeds, values)]
    rows = {"a": of([1, 2, 3], [5.0, 7.0, 9.0]), "b": of([3, 1, 2], [5.0, 2.0, 3.0]), "c": of([2], [1.0])}
    assert reproduce.paired(rows["a"], rows["b"], "val_bpb") == [3, 4, 4]
    experiment = reproduce.Experiment("mine", "a trial", "cpu", rows=dict.fromkeys(rows, ""), columns={
        "bits": "val_bpb .1f", "to b": "val_bpb .2f against b", "ms": "speed.ms .2f"})
    cells = [line.split(" | ")[2] for line in reproduce.table(experiment, rows).splitlines()[2:-1]]
    assert cells == ["3.67 (2.23 to 5.10)", "", "-2.00 (1 seed)"] and "note" not in capsys.readouterr().out
    reproduce.table(reproduce.Experiment("mine", "a trial", "cpu", dict.fromkeys(rows, ""), {"bits": "val_bbp .1f"}), rows)
    assert "no result of mine has a value val_bbp" in capsys.readouterr().out
    monkeypatch.setattr(reproduce, "rows_of", lambda experiment, runs: rows)
    reproduce.print_intervals({experiment: []})
    printed = capsys.readouterr().out
    for line in ("val_bpb: a above b: 3.67 (2.23 to 5.10)", "val_bpb: a above c: 6.00 (1 seed)",
                 "speed.ms: a takes 2.211 (1.303 to 3.119) times b", "speed.ms: b takes 0.461 (0.256 to 0.667) times a"):
        assert line in printed
    with pytest.raises(ValueError, match="seeds of a must be from 1 to 9"):
        reproduce.Experiment("mine", "a trial", "cpu", rows={"a": ""}, seeds=10)
    for told, change in {"needs another name than text": {"evaluate": {"text": "batches=1"}},
                         "evaluate of a must be NAME": {"evaluate": {"half": 5}}, "bench must be": {"bench": [5]},
                         "row 16: 16 must be a text": {"rows": {16: ""}}, "minutes of a must be": {"minutes": "4 min"},
                         "row 'a': None must be a text": {"rows": {"a": None}}, "seeds of a": {"seeds": 3.0}}.items():
        with pytest.raises(ValueError, match=told):
            reproduce.Experiment("mine", "a trial", "cpu", **{"rows": {"a": ""}, **change})
    with pytest.raises(UserError, match="my exp"):
        reproduce.Experiment("my exp", "a trial", "cpu")
    with pytest.raises(ValueError, match="against no row"):
        reproduce.Experiment("mine", "a trial", "cpu", rows={"a": ""}, columns={"to b": "val_bpb .2f against b"})


def test_a_row_has_one_colour_in_all_panels(monkeypatch):
    figures, point = [], [(1, 1)]
    monkeypatch.setattr(Figure, "savefig", lambda figure, *args, **more: figures.append(figure))
    draw("x.png", [({}, [("a", point), ("b", point)]), ({}, [("b", point), ("_c", point)])])
    (a, b), (same, c) = [[line.get_color() for line in ax.lines] for ax in figures[0].axes]
    assert b == same and len({a, b, c}) == 3
    assert [text.get_text() for text in figures[0].legends[0].get_texts()] == ["a", "b", "_c"]


@pytest.mark.parametrize("name, keys, off, is_base", [
    ("smear", {}, lambda m: [block.a.data.fill_(99.0) for block in m.blocks], "model_rt"),   # s = 1: keys as they are
    ("smear", dict(smear="embeddings", recurrent=True), lambda m: m.wte.a.data.zero_(), "model_rt"),
    ("shift", dict(shift="output"), lambda m: m.mix.data.zero_(), "model_lrt"),
    ("shift", dict(shift="layer"), lambda m: [m.gamma.data.zero_(), m.rec.wk.weight.data.zero_(),
                                              m.rec.wv.weight.data.zero_()], "model_lrt"),
    ("lrt_smear", {}, lambda m: m.smear.data.zero_(), "model_lrt"),
    ("lrt_smear", dict(memory=False), lambda m: m.smear.data.zero_(), "model_lrt"),
    ("inject", {}, lambda m: m.blocks[0].gamma.data.zero_(), "model_relaxed"),
    ("canon", {}, lambda m: [p.data.zero_() for n, p in m.named_parameters() if "canon" in n], "model_lrt"),
    ("inside", {}, lambda m: [block.attn.w_gate.weight.data.zero_() for block in m.blocks], "model_lrt")])  # g_loc = 1
def test_a_control_is_its_model_but_for_one_thing(name, keys, off, is_base):
    """If that thing is switched off, the control computes what its base does. Otherwise it computes other values, which
    depend on no later token."""
    control, base = (importlib.import_module(name) for name in (f"model_{name}", is_base))
    cfg = control.Config(block_size=9, vocab_size=11, n_layer=2, n_head=2, n_embd=8, **keys)
    model = move(control.Model(cfg).double().eval(), 0.5)
    same = {f.name: getattr(cfg, f.name) for f in dataclasses.fields(base.Config)}
    plain = base.Model(base.Config(**same)).double().eval()
    idx = torch.randint(11, (2, 9))
    plain.load_state_dict(model.state_dict(), strict=False)
    logits, other = model(idx)[0], plain(idx)[0]
    changed = idx.clone()
    changed[:, -1] += 1
    assert (logits - other).abs().max() > 1e-3
    assert (model(changed % 11)[0] - logits)[:, :-1].abs().max() < 1e-12
    off(model)
    plain.load_state_dict(model.state_dict(), strict=False)
    assert (model(idx)[0] - plain(idx)[0]).abs().max() < 1e-10


def test_a_random_router_chooses_as_many_tokens_as_a_learned_one():
    """Its choice does not depend on the tokens, and it is the same in each evaluation. All else is MoR."""
    router, mor = importlib.import_module("model_random_router"), importlib.import_module("model_mor")
    cfg = router.Config(block_size=600, vocab_size=11, n_head=2, n_embd=8)
    model, x, y = router.Model(cfg).eval(), *torch.randint(11, (2, 4, 600))
    depths = lambda x: [value for name, value in model(x, y)[2].items() if name.startswith("depth")]
    assert depths(x) == depths(y) == pytest.approx([1 / 3] * 3, abs=0.04)
    model.train()
    assert depths(x) == pytest.approx([1 / 3] * 3, abs=0.01)    # by top k
    assert not torch.equal(model(x)[0], model(x)[0])
    plain = mor.Model(mor.Config(**{f.name: getattr(cfg, f.name) for f in dataclasses.fields(mor.Config)}))
    plain.load_state_dict(model.state_dict(), strict=False)
    plain.routers = model.routers
    assert torch.equal(plain.eval()(x)[0], model.eval()(x)[0])
    with pytest.raises(ValueError, match="needs router=expert"):
        router.Config(router="token")


def test_the_lstm_reads_earlier_tokens_alone():
    lstm = importlib.import_module("model_lstm")
    model = move(lstm.Model(lstm.Config(block_size=9, vocab_size=11, n_layer=2, n_head=2, n_embd=8)).double().eval(), 0.5)
    idx = torch.randint(11, (2, 9))
    for position in 0, 4, 8:
        changed = idx.clone()
        changed[:, position] = (changed[:, position] + 1) % 11
        moved = (model(changed)[0] - model(idx)[0]).abs().amax((0, 2)) > 1e-12
        assert moved.tolist() == [t >= position for t in range(9)]
    assert sum(p.numel() for p in model.blocks[0].attn.parameters() if p.dim() == 2) == 3.5 * 8 ** 2


def test_a_refresh_gives_keys_and_values_of_the_newest_memories():
    """In one layer with inject=kv, u does not depend on the memory. Then keys and values that are refreshed are those of a
    pass over all positions that reads the newest memories. With one subset there is nothing to refresh."""
    refresh, lrt = importlib.import_module("model_refresh"), importlib.import_module("model_lrt")
    sizes = dict(block_size=10, vocab_size=11, n_head=2, n_embd=8, swa=3)
    cfg = refresh.Config(**sizes, n_layer=1, source=1, inject="kv", subsets=3)
    model = move(refresh.Model(cfg).double(), 0.5)
    tokens = model.embed(torch.randint(11, (2, 10)))
    zero = torch.zeros_like(tokens.x0[:, :1])
    wanted_x, m = lrt.run_layers(model, lrt.Context(model, tokens, zero, {}))
    for s in range(3):
        x, new_m = lrt.run_layers(model, lrt.Context(model, tokens, lrt.shifted(m, zero), {}))
        wanted_x, m = (torch.slice_scatter(old, new[:, s::3], 1, s, 10, 3) for old, new in ((wanted_x, x), (m, new_m)))
    found_x, _, found_m, _ = refresh.interleaved(model, tokens)
    assert max((found_x - wanted_x).abs().max(), (found_m - m).abs().max()) < 1e-10
    assert (lrt.interleaved(model, tokens)[0] - wanted_x).abs().max() > 1e-3
    idx, targets = torch.randint(11, (2, 2, 10))
    for subsets, same in (1, True), (2, False):
        cfg = refresh.Config(**sizes, n_layer=3, subsets=subsets)
        model, plain = (move(of.Model(cfg).double(), 0.5).train() for of in (refresh, lrt))
        plain.load_state_dict(model.state_dict())
        losses = [of(idx, targets)[1] for of in (model, plain)]
        assert (abs(losses[0] - losses[1]) < 1e-10) == same
        grads = [torch.autograd.grad(loss, of.rec.wk.weight)[0] for loss, of in zip(losses, (model, plain))]
        assert ((grads[0] - grads[1]).abs().max() < 1e-10) == same
        estimates = [of.eval().estimate(idx, targets) for of in (model, plain)]
        assert (abs(estimates[0] - estimates[1]) < 1e-10) == same
        assert abs(model(idx, targets)[1] - plain(idx, targets)[1]) < 1e-10     # the exact chain

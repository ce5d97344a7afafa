"""reproduce.py: what is missing is trained, once; tables from results; every experiment's keys are known."""
import json
import resource
import shutil
import signal
import subprocess
import sys

import pytest

from lab import reproduce
from common.keys import UserError
from conftest import ROOT
from common.config import read_config
from runs import SIZES, SMALL

EXPERIMENT = {"title": "A trial", "tier": "quick", "seeds": 1,
              "keys": " ".join([*SMALL, *SIZES["gpt"], "dropout=0", "keep_interval=3"]),
              "rows": {"first": {"keys": "model=gpt", "note": "as it is"},
                       "from the third step": {"keys": "model=gpt max_steps=5", "from": ["first", 3]},
                       "from its weights": "model=gpt init_from={first} max_steps=2"},
              "columns": {"options": "options", "note": "text", "steps": "step .0f", "bits": "val_bpb .3f",
                          "half": "half.ce .3f", "ms": "speed.decode_1_ms .2f"},
              "evaluate": {"half": "batches=1"}, "bench": ["runs {rows} rounds=1"],
              "picture": [{"x": "tokens", "y": "ce"}]}


@pytest.mark.parametrize("name", reproduce.load_experiments())
def test_every_experiment_has_known_keys_and_its_place(name):
    experiment = reproduce.load_experiments()[name]
    assert f"<!-- {name} -->" in (ROOT / "lab" / "RESULTS.md").read_text() or name == "quick"
    assert experiment.tier in reproduce.TIERS and (experiment.rows or experiment.bench)
    for run in reproduce.plan(experiment):
        read_config([key for key in run.keys.split() if not key.startswith("init_from=")] + ["run=r"])


def test_runs_are_made_once_and_written_into_the_documents(data_dir, tmp_path):
    """In a copy of the repository: a first call that fails halfway, a second one that does the rest, a third one
    that has nothing to do."""
    copy = tmp_path / "copy"
    left_out = shutil.ignore_patterns(".*", "out", "data", "results", "experiments", "__pycache__")
    shutil.copytree(ROOT, copy, ignore=left_out)
    (copy / "lab" / "experiments").mkdir()
    (copy / "README.md").write_text("before\n<!-- trial -->\nold\n<!-- end -->\nafter\n")

    def call(**changes):
        trial = {**EXPERIMENT, **changes, "keys": f"{EXPERIMENT['keys']} data_dir={data_dir}"}
        (copy / "lab" / "experiments" / "trial.yaml").write_text(json.dumps(trial))
        return subprocess.run([sys.executable, "-m", "lab.reproduce", "trial"], cwd=copy, text=True, capture_output=True)
    p = call(evaluate={"half": "no_such_key=1"})
    assert p.returncode == 2 and "4 runs or benchmarks failed" in p.stderr and "Traceback" not in p.stderr
    p = call()
    assert p.returncode == 0, p.stdout + p.stderr
    written = (copy / "README.md").read_text()
    assert written.startswith("before") and written.endswith("<!-- end -->\nafter\n") and "old" not in written
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in written.splitlines() if line.startswith("| f")]
    assert [(row[0], row[2], row[3]) for row in rows] == [("first", "as it is", "6"), ("from the third step", "", "5"),
                                                          ("from its weights", "", "2")]
    assert all(float(cell) > 0 for row in rows for cell in row[4:])
    results = [json.loads(line) for line in (copy / "lab" / "results" / "trial.jsonl").read_text().splitlines()]
    assert len({line["command"] for line in results}) == len(results) == 4
    assert (copy / "assets" / "trial.png").stat().st_size > 10_000
    stamps = {f: f.stat().st_mtime_ns for f in copy.glob("out/*/ckpt.pt")}
    p = call()
    assert p.stdout.startswith("0 runs") and stamps == {f: f.stat().st_mtime_ns for f in stamps}
    assert written == (copy / "README.md").read_text()
    file = copy / "lab" / "results" / "trial.jsonl"         # a run that starts from weights is resumed without them
    file.write_text("".join(line for line in file.open() if "init_from=out/" not in line.split("commit")[0]))
    p = call()
    assert p.returncode == 0 and p.stdout.startswith("1 runs") and len(file.read_text().splitlines()) == 4


@pytest.fixture
def plan(tmp_path, monkeypatch):
    """The runs of an experiment whose file holds this text."""
    monkeypatch.setattr(reproduce, "HERE", tmp_path)
    (tmp_path / "lab" / "experiments").mkdir(parents=True)

    def planned(text):
        (tmp_path / "lab" / "experiments" / "trial.yaml").write_text(text)
        return reproduce.plan(reproduce.load_experiments()["trial"])
    return planned


@pytest.mark.parametrize("text, message", [
    ("title: a", "tier is missing"), ("title: a\ntier: cpu\nrow: 5", "unknown key 'row'"),
    ("title: [a", "trial.yaml: "), ("title: a\ntier: cpu\nrows: [a]", "trial.yaml: "),
    ("title: a\ntier: slow", "tier must be one of quick, cpu, gpu"),
    ("title: a\ntier: cpu\nrows: {x: {minute: 5}}", "x has an unknown key 'minute'"),
    ("title: a\ntier: cpu\nrows: {x: {seeds: 0}}", "x: seeds must be positive"),
    ("title: a\ntier: cpu\nrows: {x: {seeds: 1}, y: 'init_from={x}'}", "y starts .* no row above it with seed 2"),
    ("title: a\ntier: cpu\nrows: {x: 'init_from={y}', y: ''}", "x starts from 'y', which is no row above it")])
def test_mistakes_in_an_experiment_are_named(text, message, plan):
    with pytest.raises(UserError, match=message):
        plan(text)


def test_evaluations_and_the_step_that_it_starts_from_tell_a_run_apart(plan):
    """By its line in the results, as do the values of its config file; a damaged line is named."""
    trial = "title: a\ntier: cpu\nseeds: 1\nrows: {{whole: '', part: {{from: [whole, {}]}}}}\nevaluate: {}"
    first = plan(trial.format(3, "{}"))
    for run in first:
        reproduce.append(run.experiment, {"command": run.command})
    assert all(run.result for run in plan(trial.format(3, "{}")))
    assert not any(run.result for run in plan(trial.format(3, "{half: batches=1}")))
    reproduce.append(first[0].experiment, {"command": first[0].command, "keys": {"n_layer": 999}})
    assert not plan(trial.format(3, "{}"))[0].result         # another configs/gpt_tiny.yaml than today's
    reproduce.append(first[0].experiment, {"command": first[0].command})
    whole, part = plan(trial.format(4, "{}"))
    assert whole.result and not part.result and part.folder != first[1].folder
    written = reproduce.results_file(whole.experiment).read_text()
    full = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(written) + 20, full[1]))
    try:        # a full disk leaves no half line
        with pytest.raises(UserError, match="could not write .*trial.jsonl"):
            reproduce.append(whole.experiment, {"command": "x" * 10000})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, full)
        signal.signal(signal.SIGXFSZ, before)
    assert reproduce.results_file(whole.experiment).read_text() == written
    with open(reproduce.results_file(whole.experiment), "a") as file:
        file.write('{"comm')
    with pytest.raises(UserError, match="trial.jsonl: line 5 is not JSON"):
        plan(trial.format(4, "{}"))


def test_cells_show_mean_and_deviation_over_the_seeds():
    results = [{"a": {"b": 1.0}, "n": 3}, {"a": {"b": 2.0}, "n": 3}, {"n": 3}]
    assert reproduce.cell(results, "a.b", ".2f") == "1.50 ± 0.71"
    assert reproduce.cell(results, "n", ",.0f") == "3" and reproduce.cell(results, "missing", ".2f") == ""

"""
This program makes every table and picture of RESULTS.md again. It does the runs that are missing,
and then writes tables and pictures.

    python -m lab.reproduce                     the experiments, what is done, the time for the rest
    python -m lab.reproduce quick               a tier: quick (8 minutes of two cores), cpu, gpu
    python -m lab.reproduce rt_norm lrt_s3      experiments by name
    python -m lab.reproduce rt_norm again       also the runs whose text, model or start has changed
    python -m lab.reproduce write               no runs: only tables and pictures (of all, or some)
    python -m lab.reproduce intervals compare_flops compare_controls
                                                differences of all rows, with their 95 % intervals

lab/experiments/NAME.yaml has an experiment. Its runs stand in out/NAME-*. lab/results/NAME.jsonl
gets a line for each run and each call of lab.bench that is done, and they are not done again. There
are four exceptions. A run is repeated if its config file or its `evaluate` has other values today.
It is repeated if a run that it starts from has no valid line. It is also repeated if its last
checkpoint is gone and a run that is missing starts from it. A call of lab.bench is repeated if the
runs that it measured have other weights today. So a reproduction that was stopped goes on where it
was.

The line of a run has the commit at which the run began, a hash of each file of code, configs and
experiments that differed from the commit, the CPU, the threads and versions. It also has the
fingerprints of the prepared text, of the model's files, and of the weights that the run started
from and ended with. If the text, the model's files or the weights at the start have changed since,
a note says so, and `again` repeats the run. Another note names a text that has changed since it was
prepared. To repeat a run, delete its line and its folder.

A printed difference is a mean over the seeds: each run is compared with the other row's run of the
same seed. In brackets is its 95 % interval by the t distribution. If the interval of a difference
includes 0, or that of a ratio includes 1, the word tie stands before it. There is no interval for
fewer than three seeds.
"""
import ast
import hashlib
import importlib.util
import json
import math
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, fields
from functools import cache
from importlib.metadata import version
from itertools import combinations
from pathlib import Path
from statistics import fmean, median, stdev

import torch

from common.checkpoint import build_model, fingerprint, load_checkpoint, read_log
from common.data import data_folder
from common.options import (HERE, TrainConfig, UserError, asks_help, check_known, check_name,
                            first_line, load_yaml, lock, model_module, names, note, read_json,
                            replace_file, run_cli, sha256_of, split_args, typed_config)
from lab.eval import config_of
from lab.plot import draw
from prepare import prepare_missing, tell_changes

LAB, OUT = HERE / "lab", HERE / "out"
TIERS = "quick", "cpu", "gpu"
JOBS = 2                        # runs at the same time (gpu: one run)
THREADS = 1                     # threads of a run
BENCH_MINUTES = 5               # about what a call of bench.py takes
AGAINST = " against "           # between a column's format and the row that it is compared with
# The 97.5 % quantiles of the t distribution by the number of pairs (degrees of freedom plus one).
QUANTILES = {3: 4.3027, 4: 3.1824, 5: 2.7764, 6: 2.5706, 7: 2.4469, 8: 2.3646, 9: 2.3060}
TIE = 0.1                       # the widest interval that is called a tie, as RESULTS.md says
# What a line of the results has, beside val_ and the names of `evaluate`.
OF_LINE = {"command", "commit", "changed", "machine", "cpu", "threads", "versions", "text", "model",
           "start", "keys", "weights", "parameters", "tokens_per_second", "step", "tokens", "flops",
           "seconds", "evaluate", "curves", "speed", "bins", "seed"}
CURVE_POINTS = 60               # about how many points of a run's log its result keeps
APPENDING = threading.Lock()    # one line at a time goes into a file of results
STARTED = []                    # the programs that this call has started
STOP = threading.Event()        # it is set when these are to end
PANEL = {"x", "y", "of", "xlabel", "ylabel", "xscale", "yscale", "xlim", "ylim", "xticks", "yticks"}


@dataclass(eq=False)     # so that it can be a key of a dict
class Experiment:
    """An Experiment is the content of lab/experiments/NAME.yaml.

    A row is options of train.py, as a text or as `options` of a dict. A dict may also have seeds,
    minutes and evaluate of its own, in the place of the experiment's. In options, {LABEL} stands
    for the folder of the run of the row LABEL with the same seed, and that row must come earlier.
    from={LABEL}/step_N.pt, which is no option of train.py, goes on from a checkpoint that
    keep_interval= has kept. With a grid, such as the learning rates of a search, each row becomes
    as many rows as the grid has points: "ROW, POINT" has the options of both.

    A column is a title and what stands below it. This is `options` (the row's options), a value and
    its format, such as `val_bpb .3f`, or `text`. Below `text` a row shows words of its own: its
    dict has them under the column's title. With ` against ROW` behind the format, a column is the
    difference to that row.

    These are the values: parameters, tokens_per_second (the median), and step, tokens, flops and
    seconds of the log's last line; val_bpb and the other val_ values of the last evaluation; with
    evaluate={half: ..}, half.bpb and all else that lab.eval prints; and with bench=["runs {rows}"]
    speed.train_ms, speed.decode_1_ms, speed.decode_16_ms and speed.cache_bytes. The speeds are
    those of the first three seeds.

    An axis of a picture is such a name, too, or curves.NAME, or bins. curves.NAME is a value from
    the log of training steps. (A run's result keeps only the curves that the picture names when the
    run ends.) bins are the ten numbers 0.05, 0.15 .. 0.95, the other axis of a list of ten numbers,
    such as `scores` of lab.eval. A star in a name stands for all names in its place
    (NAME.lengths.*.bpb). A panel with `of` has the rows whose labels begin with it."""
    name: str
    title: str
    tier: str                   # quick | cpu | gpu
    rows: dict = field(default_factory=dict)
    columns: dict = field(default_factory=dict)
    options: str = ""           # of all rows
    seeds: int = 3              # runs of each row
    minutes: float = 1.0        # of a run on one core, an estimate
    grid: dict = field(default_factory=dict)    # {POINT: options}
    evaluate: dict = field(default_factory=dict)    # {NAME: options of lab.eval}, after training
    # arguments of lab.bench, in which {rows} are the folders of the first three seeds
    bench: list = field(default_factory=list)
    picture: list = field(default_factory=list)     # panels {x, y: names; xscale, ylim, ...}

    def __post_init__(self):
        if self.tier not in TIERS:
            raise ValueError(f"tier must be one of {', '.join(TIERS)}, and not {self.tier!r}")
        self.unit = "GPU" if self.tier == "gpu" else "core"     # of the times that are told
        check_name(self.name)       # because the folders of the runs begin with it
        if not isinstance(self.bench, list) or not all(isinstance(x, str) for x in self.bench):
            raise ValueError("bench must be a list of arguments of lab.bench")
        own = {"options": "", "seeds": self.seeds, "minutes": self.minutes,
               "evaluate": self.evaluate}
        rows = {label: own | (row if isinstance(row, dict) else {"options": row})
                for label, row in self.rows.items()}
        self.rows = rows if not self.grid else {
            f"{label}, {point}": {**row, "options": f"{row['options']} {options}"}
            for label, row in rows.items() for point, options in self.grid.items()}
        for label, row in self.rows.items():
            if unknown := row.keys() - {*own, *self.columns}:
                raise ValueError(f"{label} has an unknown field {min(unknown)!r}")
            for value in (label, row["options"]):
                if not isinstance(value, str):
                    raise ValueError(f"row {label!r}: {value!r} must be a text (use quotes)")
            if (not isinstance(row["evaluate"], dict)
                    or not all(isinstance(x, str) for x in row["evaluate"].values())):
                raise ValueError(f"evaluate of {label} must be NAME: options of lab.eval")
            if taken := [n for n in row["evaluate"] if n in OF_LINE or str(n).startswith("val_")]:
                raise ValueError(f"evaluate of {label} needs another name than {taken[0]}, which a "
                                 f"line of the results has already")
            if type(row["minutes"]) not in (int, float):
                raise ValueError(f"minutes of {label} must be a number")
            if type(row["seeds"]) is not int or not 1 <= row["seeds"] <= max(QUANTILES):
                raise ValueError(f"seeds of {label} must be from 1 to {max(QUANTILES)}")
        for what in self.columns.values():
            value, against, row = what.partition(AGAINST)
            if what in ("text", "options"):
                continue
            if len(value.split()) != 2:
                raise ValueError(f"column {what!r} must be `text`, `options`, or a name and a "
                                 f"format")
            format(0.0, value.split()[1])       # ValueError if it is no format
            if against and row not in self.rows:
                raise ValueError(f"column {what!r} is against no row")
        for panel in self.picture:
            if not {"x", "y"} <= panel.keys() <= PANEL:
                raise ValueError(f"a panel of picture needs x and y, and may have "
                                 f"{', '.join(sorted(PANEL - {'x', 'y'}))}")


def load_experiments():
    """Return {name: Experiment} of the folder experiments."""
    found = {}
    for file in sorted((LAB / "experiments").glob("*.yaml")):
        values = load_yaml(file)
        try:
            found[file.stem] = Experiment(file.stem, **values)
        except Exception as e:  # an unknown field and other errors are all about this file
            raise UserError(f"{file.name}: {first_line(e)}") from e
    return found


# ---- what there is to do ----

class Run:
    """A Run is one row of an experiment with one seed."""

    def __init__(self, experiment, label, row, seed, earlier):
        """`earlier` is {(label, seed): Run} of the rows above."""
        self.experiment, self.label, self.row, self.seed = experiment, label, row, seed
        self.result, self.needs = None, []      # its line of the results; runs that it starts from
        options = f"{experiment.options} {row['options']}"
        for other in re.findall("{(.*?)}", options):
            if (other, seed) not in earlier:
                raise UserError(f"it starts from {other!r}, which is no row above it with seed "
                                f"{seed}")
            self.needs.append(earlier[other, seed])
            options = options.replace("{%s}" % other, f"out/{self.needs[-1].name}")
        self.options = split_args(options.split())[1]
        if taken := {"out_dir", "run", "resume", "seed"} & self.options.keys():
            raise UserError(f"{min(taken)}= is set by the reproduction, and a row cannot have it")
        self.options |= {"seed": str(seed), "sample_tokens": "0"}
        self.checkpoint = self.options.pop("from", "")  # the one that it goes on from
        self.arguments = [f"{name}={value}" for name, value in self.options.items()]
        options = " ".join(self.arguments)
        self.command = f"train.py {options}" + f" from {self.checkpoint}" * bool(self.checkpoint)
        # The folder's name has a hash of the options, so that a changed row begins a new run.
        digest = hashlib.sha256((options + self.checkpoint).encode()).hexdigest()[:6]
        slug = re.sub("[^a-z0-9]+", "_", label.lower()).strip("_")
        self.name = f"{experiment.name}-{slug}-{seed}-{digest}"
        self.folder = OUT / self.name


def plan(experiment):
    """Return all runs of an experiment, in the order of its rows. A run has its line of the results
    if the line is still valid (see the top of this file). Raise UserError if a row has unknown
    options, or the options of another row."""
    lines, runs = read_results(experiment), {}
    for label, row in experiment.rows.items():
        for seed in range(1, row["seeds"] + 1):
            try:
                run = runs[label, seed] = Run(experiment, label, row, seed, runs)
                for options in row["evaluate"].values():
                    config_of(split_args(options.split())[1])
                of_file = file_options(run)
            except UserError as e:
                raise UserError(f"{experiment.name}.yaml: {label}: {e}") from None
            if twin := [other.label for other in runs.values() if other is not run
                        and other.command == run.command]:
                raise UserError(f"{experiment.name}.yaml: {label} has the options of {twin[0]}")
            line = lines.get(run.command, {})
            same = line.get("keys") == rounded(of_file) and all(r.result for r in run.needs)
            if same and line.get("evaluate", {}) == row["evaluate"]:
                run.result = line
    return list(runs.values())


def config_path(run):
    """Return the config file of a run, from the project's root. It need not exist."""
    return run.options.get("config", f"configs/{run.options.get('model', 'gpt')}_tiny.yaml")


def file_options(run):
    """Return the options that a run has from its config file, and the file's path as "config".
    Options that are defaults, or that the command gives, are left out. The run's line of the
    results has them as `keys`. Raise UserError if the command gives an option that the model does
    not have, or an impossible value."""
    file = config_path(run)
    of_file = load_yaml(HERE / file) if "config" in run.options or (HERE / file).exists() else {}
    values = {"model": "gpt", **of_file, **run.options}
    schemas = TrainConfig, model_module(values["model"]).Config
    check_known(run.options, names(*schemas))
    for schema in schemas:
        typed_config(schema, {n: value for n, value in values.items() if n in names(schema)})
    default = {f.name: f.default for schema in schemas for f in fields(schema)}
    given = {*run.options, "max_steps"} if "max_flops" in run.options else {*run.options}
    return {"config": file, **{name: value for name, value in values.items()
                               if name not in given and value != default.get(name)}}


def changed(run, made):
    """Return in words what has changed since the run was made: the text, the model's code, or the
    weights that the run starts from. `made` has the fingerprints of that time. It is the run's line
    of the results, or what `start` wrote. A fingerprint that `made` lacks, or has as None, was
    unknown at that time, and counts as unchanged."""
    now, words = made_from(run), {"text": "text", "model": "version of the model's code",
                                  "start": "run that they start from"}
    return [words[what] for what in now if now[what] and made.get(what) not in (None, now[what])]


def made_from(run):
    """Return the fingerprints of the prepared text, of the model's files, and of the last weights
    of the runs that this one starts from. The fingerprint of the text is what a checkpoint has as
    "data". It is None where no text is prepared, as for a task."""
    meta = data_folder(text_of(run)) / "meta.json"
    splits = read_json(meta)["splits"] if meta.exists() else {}
    if splits:
        tell_text(meta)
    text = " ".join(splits[split]["sha256"] for split in ("train", "val") if split in splits)
    start = [(other.result or {}).get("weights") for other in run.needs]
    model = {"model": "gpt", **file_options(run), **run.options}["model"]
    return {"text": text or None, "model": code_of(f"model_{model}"),
            "start": start if all(start) else None}


def made_by(threads):
    """Return the commit of the code, the files that differ from it, the machine, and the versions
    that decide the numbers. The SHA-256 of the text is in made_from."""
    where = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    differing = changed_files()
    commit = git("rev-parse", "--short", "HEAD").strip() or "unknown"
    differs = {"changed": differing} if differing else {}
    return {"commit": commit + "-changed" * bool(differing), **differs,
            "machine": f"{where}, torch {torch.__version__}, Python {platform.python_version()}",
            "cpu": cpu_model(), "threads": threads,
            "versions": {name: version(name) for name in ("torch", "numpy", "tokenizers")}}


def git(*command):
    """Return what git prints, and "" where there is no git."""
    return shutil.which("git") and subprocess.run(["git", *command], cwd=HERE, capture_output=True,
                                                  text=True).stdout or ""


def changed_files():
    """Return {file: its hash, or "deleted"} of the code, configs and experiments that are not as
    the commit has them."""
    of = "--", "*.py", "configs", "lab/experiments"
    files = (git("diff", "--relative", "--name-only", "--no-renames", "HEAD", *of)
             + git("ls-files", "--others", "--exclude-standard", *of)).splitlines()
    return {name: sha256_of(HERE / name)[:16] if (HERE / name).exists() else "deleted"
            for name in sorted(files)}


def cpu_model():
    """Return the name that the CPU gives itself, as far as the system tells it."""
    info = Path("/proc/cpuinfo")
    found = re.search(r"(?m)^model name\s*: (.+)$", info.read_text() if info.exists() else "")
    return found[1] if found else platform.processor() or platform.machine()


def text_of(run, given=None):
    """Return a TrainConfig with the text of a run, or of its evaluation with the options `given`.
    Its other options are defaults."""
    values = {**file_options(run), **run.options, **(given or {})}
    where = {"dataset", "tokenizer", "data_dir"} & values.keys()
    return typed_config(TrainConfig, {name: values[name] for name in where})


@cache
def tell_text(meta):
    """Tell once where a text has changed since it was prepared, because runs read what was
    prepared."""
    tell_changes(meta.parent, read_json(meta))


@cache
def code_of(module):
    """Return a fingerprint of the code of a model's module and of the modules of this project that
    it imports. Controls in lab/experiments count, because they are imported as model_NAME. The
    packages common and lab do not count, and neither do comments and docstrings."""
    todo, trees = [module], {}
    while todo:
        name = todo.pop()
        try:
            spec = importlib.util.find_spec(name)
        except ModuleNotFoundError:     # of "triton.language" on a machine without triton
            spec = None
        file = Path(spec.origin) if spec and spec.has_location else Path("/")
        ours = name == module or HERE in file.parents and "site-packages" not in file.parts
        if name in trees or not ours or name.split(".")[0] in ("common", "lab"):
            continue
        trees[name] = tree = ast.parse(file.read_text())
        for node in ast.walk(tree):
            match node:
                case ast.AST(body=[ast.Expr(value=ast.Constant()), *rest]):
                    node.body = rest
                case ast.Import():
                    todo += [alias.name for alias in node.names]
                case ast.ImportFrom(module=str()):
                    todo.append(node.module)
    code = "".join(name + dump(trees[name]) for name in sorted(trees))
    return hashlib.sha256(code.encode()).hexdigest()[:16]


def dump(tree):
    """Return what ast.dump returns in Python 3.11, because later versions write less or more."""
    more = {"show_empty": True} if sys.version_info >= (3, 13) else {}
    return ast.dump(tree, **more).replace(", type_params=[]", "")


def missing(runs):
    """Return the runs without a result, and the runs that these start from if their last
    checkpoints are gone."""
    wanted, whole = set(), cache(finished)      # it takes a while to read a checkpoint
    for run in reversed(runs):      # a run starts from earlier ones
        if run in wanted or not run.result:
            wanted |= {run, *(r for r in run.needs if not whole(r))}
    return [run for run in runs if run in wanted]


# ---- runs ----

def python(*command, stdout, stderr=subprocess.STDOUT, **environment):
    """Start one of our programs, and return its process, which stop_all can end."""
    process = subprocess.Popen([sys.executable, *command], text=True, cwd=HERE, stdout=stdout,
                               stderr=stderr, env={**os.environ, **environment})
    STARTED.append(process)
    if STOP.is_set():       # stop_all may have come before this process
        process.terminate()
    return process


def stop_all():
    """End all programs. A run saves its state then, and is resumed next time."""
    STOP.set()
    for process in STARTED:
        process.terminate()


def start(run):
    """Start or resume the training of a run, and return its process. If it has no checkpoint, or if
    its config file, text, model or start has changed since it began, its folder is deleted, and it
    begins again. FOLDER.txt receives the output."""
    code_of.cache_clear()       # a file may have changed since an earlier run was begun
    options, file = file_options(run), run.folder / "keys.json"
    was = read_json(file) if file.exists() else {}
    made, saved = was.pop("made_from", {}), (run.folder / "ckpt.pt").exists()
    if was != options or changed(run, made) or not saved:
        if run.checkpoint and not (HERE / run.checkpoint).exists():
            raise UserError(f"{run.checkpoint} is gone: delete {Path(run.checkpoint).parent}, and "
                            f"the same command makes it again")
        if run.folder.exists():
            if saved:
                note(f"{run.folder} begins again: its config file, text or model has changed, or "
                     f"the run that it starts from")
            shutil.rmtree(run.folder)
        run.folder.mkdir(parents=True)
        if run.checkpoint:
            os.link(HERE / run.checkpoint, run.folder / "ckpt.pt")
        made = {**made_by(THREADS), **made_from(run)}
        replace_file(file, json.dumps({**options, "made_from": made}).encode())
    with open(f"{run.folder}.txt", "w") as out:
        return python("train.py", *run.arguments, f"run={run.name}", "resume=auto", stdout=out,
                      OMP_NUM_THREADS=str(THREADS))


def train_all(runs, jobs):
    """Train the runs, `jobs` at a time. Return those that failed, and those that need them."""
    tasks = {}

    def train(run):
        # A run that this one needs stands before it, and so has begun.
        good = all([tasks[other].result() for other in run.needs if other in tasks])
        told = "left out, because a run that it starts from has not ended well"
        if good:
            try:
                status = start(run).wait()
                stopped = status == -signal.SIGTERM or status == 0 and not finished(run)
                good = status == 0 and not stopped and record(run)
                told = ("done" if good else "stopped; the same command goes on"
                        if stopped or STOP.is_set() else f"FAILED, see {run.folder}.txt")
            except (OSError, UserError) as e:
                good, told = False, f"FAILED: {first_line(e)}"
        print(f"{run.experiment.name}: {run.label}, seed {run.seed}: {told}", flush=True)
        return good
    with ThreadPoolExecutor(jobs) as pool:
        try:
            for run in runs:
                tasks[run] = pool.submit(train, run)
            return [run for run, task in tasks.items() if not task.result()]
        except BaseException:
            # After a signal no further run begins. The pool's threads wait for the programs, which
            # stop_all ends.
            pool.shutdown(wait=False, cancel_futures=True)
            stop_all()
            raise


def finished(run):
    """Return whether a run has the checkpoint of its last step, after its evaluation. A run that a
    signal stopped may have an earlier one."""
    try:
        ckpt = load_checkpoint(run.folder / "ckpt.pt")
    except (FileNotFoundError, UserError):      # a damaged one is not whole either
        return False
    return ckpt["evaluated"] >= ckpt["step"] >= ckpt["config"]["max_steps"]


def record(run):
    """Evaluate a run that has been trained, and write its line of the results. Return False if an
    evaluation fails."""
    ckpt, log = load_checkpoint(run.folder / "ckpt.pt"), read_log(run.folder / "log.jsonl")
    keys = read_json(run.folder / "keys.json")      # the config file may have changed since
    made = keys.pop("made_from", {})
    # Only rows of training steps have "lr". The others are evaluations.
    steps = [row for row in log if "lr" in row]
    evaluation = next((row for row in reversed(log) if "lr" not in row), {})
    if evaluation.get("step") != ckpt["step"]:      # the disk may have been full
        raise UserError(f"{run.folder}/log.jsonl lacks the evaluation of step {ckpt['step']}: "
                        f"delete the folder, and the same command makes the run again")
    # If the run has fewer steps than log_interval, the log has no line of a training step. Then the
    # speed is that of the whole run.
    speeds = [row["tokens_per_second"] for row in steps] or [log[-1]["tokens"] / log[-1]["seconds"]]
    result = {"command": run.command, **made, "keys": keys, "weights": fingerprint(ckpt)[:16],
              "parameters": sum(p.numel() for p in build_model(ckpt).parameters()),
              "tokens_per_second": median(speeds),
              **{k: v for k, v in evaluation.items() if k.startswith("val_")},
              **{k: log[-1][k] for k in ("step", "tokens", "flops", "seconds")}}
    for name, options in run.row["evaluate"].items():
        with open(f"{run.folder}.txt", "a") as messages:
            process = python("-m", "lab.eval", f"out/{run.name}", *options.split(),
                             stdout=subprocess.PIPE, stderr=messages,
                             OMP_NUM_THREADS=str(THREADS))
            output = process.communicate()[0]
        if process.returncode:
            return False
        result |= {"evaluate": run.row["evaluate"], name: json.loads(output)}
    if curves := re.findall(r"curves\.(\w+)", str(run.experiment.picture)):
        points = steps[::-max(1, round(len(steps) / CURVE_POINTS))][::-1]       # the last one too
        result["curves"] = {name: [row[name] for row in points] for name in curves
                            if all(name in row for row in points)}
    append(run.experiment, result)
    run.result = result
    return True


def benches(experiment, runs):
    """Return the experiment's calls of lab.bench, {command: its line in results/NAME.jsonl, or
    None}. A call measures runs of three seeds at most, because times hardly depend on the seed. Its
    line has the weights of these runs, and it is no longer valid when they were made again."""
    folders = " ".join(f"out/{run.name}" for run in runs if run.seed <= 3)
    lines, now = read_results(experiment), weights_of(runs)
    commands = [f"bench.py {args.replace('{rows}', folders)}" for args in experiment.bench]

    def still_valid(line):      # None stands for unknown weights
        return all(None in pair or pair[0] == pair[1] for pair in zip(line.get("weights", ()), now))
    return {command: lines[command] if command in lines and still_valid(lines[command]) else None
            for command in commands}


def weights_of(runs):
    """Return the fingerprints of the last weights of the runs that `benches` measures, in the order
    of its folders. None stands for a run that has none yet."""
    return [(run.result or {}).get("weights") for run in runs if run.seed <= 3]


def measure(experiment, runs):
    """Make the calls of lab.bench that have no line yet, one after the other, while no run trains.
    results/NAME.txt receives the output. Return the calls that failed."""
    failed = []
    for command, line in benches(experiment, runs).items():
        if line:
            continue
        arguments, made = command.split()[1:], made_by(torch.get_num_threads())
        process = python("-m", "lab.bench", *arguments, stdout=subprocess.PIPE)
        output = process.communicate()[0]
        *_, last = output.splitlines() or ["no output"]
        if process.returncode:
            print(f"{command}: {last}")
            failed.append(command)
            continue
        line = {"command": command, **made}
        if "out/" in command:
            line["weights"] = weights_of(runs)
        if arguments[0] == "runs":
            line["speed"] = {Path(f).name: v for f, v in json.loads(last).items()}
        append(experiment, line)
        with open(results_file(experiment).with_suffix(".txt"), "a") as text:
            text.write(f"$ python -m lab.bench {' '.join(arguments)}\n"
                       f"# commit {line['commit']}; {line['machine']}\n{output}\n")
    return failed


# ---- results ----

def results_file(experiment):
    return LAB / "results" / f"{experiment.name}.jsonl"


def read_results(experiment):
    """Return {command: the last line that has it} of results/NAME.jsonl."""
    file = results_file(experiment)
    lines = {}
    for n, text in enumerate(file.read_text().splitlines() if file.exists() else (), 1):
        try:
            line = json.loads(text)
            lines[line["command"]] = line
        except (ValueError, LookupError, TypeError) as e:
            raise UserError(f"{file}, line {n} is not a result in JSON: {first_line(e)}") from None
    return lines


def append(experiment, line):
    """Add a line to results/NAME.jsonl. If the disk is full, the file stays as it was."""
    file = results_file(experiment)
    with APPENDING:
        file.parent.mkdir(exist_ok=True)
        old = file.read_text() if file.exists() else ""
        old += "\n" * (old[-1:] not in ("", "\n"))      # an editor may have removed the last one
        replace_file(file, f"{old}{json.dumps(rounded(line))}\n".encode())


def rounded(values):
    """Return values with floats of seven digits, which keep the committed files short."""
    return json.loads(json.dumps(values), parse_float=lambda text: float(f"{float(text):.7g}"))


# ---- tables and pictures ----

def look_up(result, name):
    """Return the value of a dotted name, such as half.bpb, or None if the result has none. With a
    star, as in at.lengths.*.bpb, it is the list of the values that all names in its place give."""
    first, _, rest = name.partition(".")
    if not isinstance(result, dict):
        return None
    if first == "*":
        return [look_up(value, rest) for value in result.values()]
    value = result.get(first)
    return look_up(value, rest) if rest else value


def cell(results, what):
    """Return the text of a cell, the mean and the standard deviation over the seeds. If some seeds
    lack the value, the text says how many have it. `what` is the name of a value and its format."""
    name, form = what.split()
    values = [v for v in (look_up(r, name) for r in results) if v is not None]
    if not values:
        return ""
    text = format(fmean(values), form)
    lacking = len(values) < len(results) and not name.startswith("speed.")    # see benches
    few = f" ({len(values)} of {len(results)})" * lacking
    if max(values) - min(values) <= 1e-6 * abs(max(values)):    # equal but for rounding
        return text + few
    return f"{text} ± {format(stdev(values), form.strip('+'))}{few}"


def table(experiment, rows):
    """Return the table in Markdown. `rows` is {label: the results of its seeds}. A note names each
    value that no result has."""
    lines = ["| | " + " | ".join(experiment.columns) + " |",
             "|---" * (len(experiment.columns) + 1) + "|"]
    for label, results in rows.items():
        row = experiment.rows[label]
        few = f" ({len(results)} of {row['seeds']} seeds)" * (len(results) < row["seeds"])
        cells = [row.get(title, "") if what == "text" else
                 f"`{row['options']}`" if what == "options" else
                 against(rows, label, what) if AGAINST in what else cell(results, what)
                 for title, what in experiment.columns.items()]
        if any(cells):          # a row that only others start from may have no values
            lines.append("| " + " | ".join([label + few, *cells]) + " |")
    names_of = (what.split()[0] for what in experiment.columns.values() if " " in what)
    for name in dict.fromkeys(names_of):
        if all(look_up(result, name) is None for results in rows.values() for result in results):
            note(f"no result of {experiment.name} has a value {name}")
    return "\n".join([*lines, "", ""])


def rows_of(experiment, runs):
    """Return {label: the results of its seeds}, with what the benchmarks measured."""
    measured = filter(None, benches(experiment, runs).values())
    speeds = {name: v for line in measured for name, v in line.get("speed", {}).items()}
    rows, bins = {}, [(i + 0.5) / 10 for i in range(10)]
    for run in [run for run in runs if run.result]:
        more = {"speed": speeds.get(run.name), "bins": bins, "seed": run.seed}
        rows.setdefault(run.label, []).append(run.result | more)
    return rows


def how_made(experiment, lines):
    """Return the text below the table. It has the command, and the runs, seeds, commits and
    machines of these lines of the results."""
    said, seeds = [], sorted({row["seeds"] for row in experiment.rows.values()})
    if seconds := [line["seconds"] for line in lines if "seconds" in line]:
        said = [f"{len(seconds)} run{'s' * (len(seconds) > 1)}, {duration(sum(seconds) / 60)} of "
                f"a {experiment.unit}",
                "one seed" if seeds == [1] else
                f"mean ± standard deviation of {' or '.join(map(str, seeds))} seeds"]
    # Machines are lists, such as "CPU, torch 2.13.0". Each part of them is named once. Older lines
    # lack them.
    for key, word in ("commit", "commit "), ("machine", ""), ("cpu", ""):
        known = [line[key] for line in lines if key in line]
        parts = dict.fromkeys(", ".join(known).split(", "))
        few = f" ({len(known)} of {len(lines)} lines)" * (len(known) < len(lines))
        said += [word + ", ".join(parts) + few] * bool(known)
    return f"`python -m lab.reproduce {experiment.name}`: {'; '.join(said)}"


def panel_of(rows, x, y, of="", **style):
    """Return a panel as lab.plot draws it. It has the rows whose label begins with `of`, under the
    rest of the label. A row is a point, or a curve if its values are lists. Both are means over its
    seeds."""
    curves, listed = [], lambda value: value if isinstance(value, list) else [value]
    rows = {label.removeprefix(of): v for label, v in rows.items() if label.startswith(of)}
    for label, results in rows.items():
        pairs = [(look_up(result, x), look_up(result, y)) for result in results]
        pairs = [map(listed, pair) for pair in pairs if None not in pair]
        if pairs:
            xs, ys = ([fmean(v) for v in zip(*lists)] for lists in zip(*pairs))
            if x.startswith("curves."):     # a batch's loss is noisy, so it is a mean of neighbours
                ys = [fmean(ys[max(0, i - 4):i + 5]) for i in range(len(ys))]
            curves.append((label, list(zip(xs, ys))))
    return {"xlabel": x, "ylabel": y, **style}, curves


def write(experiment, runs):
    """Print the table, put it between the marks <!-- NAME --> and <!-- end --> of README.md and
    of files in lab, and draw the picture."""
    measured = [line for line in benches(experiment, runs).values() if line]
    rows = rows_of(experiment, runs)
    if not rows and not measured:
        return
    text = table(experiment, rows) if rows else ""
    text += how_made(experiment, sum(rows.values(), []) + measured)
    print(f"\n{experiment.title}\n\n{text}")
    # No other mark may stand between the two, so that no text is lost if an end is missing.
    marks = re.compile(f"(<!-- {experiment.name} -->\n)(?:(?!<!-- ).)*(<!-- end -->)", re.DOTALL)
    found = False
    for file in HERE / "README.md", *LAB.rglob("*.md"):
        if marks.search(old := file.read_text("utf-8")):
            new = marks.sub(lambda mark: f"{mark[1]}{text}\n{mark[2]}", old)
            replace_file(file, new.encode())
            found = True
    if not found:
        note(f"no file has the lines <!-- {experiment.name} --> and <!-- end --> for this table")
    panels = [panel_of(rows, **panel) for panel in experiment.picture]
    panels = [(style, curves) for style, curves in panels if curves]    # those with a result
    if panels:
        draw(HERE / "assets" / f"{experiment.name}.png", panels, experiment.title)


# ---- paired differences ----

def paired(results, others, name, of_other=None, ratio=False):
    """Return the differences, or the ratios, of a value in runs with the same seed."""
    known = {other["seed"]: look_up(other, of_other or name) for other in others}
    pairs = [(look_up(result, name), known.get(result["seed"])) for result in results]
    return [a / b if ratio else a - b for a, b in pairs if None not in (a, b)]


def interval(values, form, null=0):
    """Return the text of paired differences, "mean (low to high)". If the 95 % interval includes
    `null`, "tie, " stands before it, or "undecided, " if the interval is wider than TIE. Fewer than
    three values have no interval."""
    n, mean = len(values), fmean(values)
    if n < 3:
        return f"{mean:{form}} ({n} seed{'s' * (n > 1)})"
    half = QUANTILES[n] * stdev(values) / math.sqrt(n)
    word = "" if abs(mean - null) > half else "tie, " if 2 * half <= TIE else "undecided, "
    return f"{word}{mean:{form}} ({mean - half:{form}} to {mean + half:{form}})"


def against(rows, label, what):
    """Return the cell of a column "NAME FORMAT against ROW", which is empty in that row itself."""
    value, _, other = what.partition(AGAINST)
    name, form = value.split()
    values = paired(rows[label], rows.get(other, []), name)
    return interval(values, form) if values and label != other else ""


def print_intervals(plans):
    """Print the differences of all pairs of rows, for each value of the tables. A difference that
    is the same for all seeds is left out. The row with the larger value comes first, so that no
    difference is negative. Times get ratios, too. Then print the differences between the losses of
    each row. `plans` is {experiment: its runs}."""
    rows, forms = {}, {}
    for experiment, runs in plans.items():
        of = f"{experiment.name}: " * (len(plans) > 1)
        rows |= {f"{of}{label}": v for label, v in rows_of(experiment, runs).items()}
        forms |= dict(what.split()[:2] for what in experiment.columns.values() if " " in what)
    losses = [name for name in forms if name.endswith("bpb")]
    pairs = [(f"{name}: ", a, b, name, name) for name in forms for a, b in combinations(rows, 2)]
    pairs += [("", row, row, a, b) for row in rows for a, b in combinations(losses, 2)]
    for before, row, other, name, of_other in pairs:
        values = paired(rows[row], rows[other], name, of_other)
        if not any(values) or len(values) > 1 and stdev(values) <= 1e-6 * abs(values[0]):
            continue        # there is no pair, or the difference does not depend on the seed
        first, second = (row, other) if row != other else (f"{row}, {name}", of_other)
        if fmean(values) < 0:
            values, first, second = [-v for v in values], second, first
        print(f"{before}{first} above {second}: {interval(values, forms[name])}")
        for a, b in [(row, other), (other, row)] * name.startswith("speed."):
            values = paired(rows[a], rows[b], name, ratio=True)
            print(f"{before}{a} takes {interval(values, '.3f', 1)} times {b}")


# ---- the command ----

def duration(minutes):
    return f"{minutes / 60:.1f} hours" if minutes >= 90 else f"{minutes:.0f} minutes"


def show(experiment, runs):
    """Print what is done, and how long the rest takes by the experiment's estimate."""
    rest, calls = missing(runs), benches(experiment, runs)
    left = list(calls.values()).count(None)
    minutes = sum(run.row["minutes"] for run in rest) + left * BENCH_MINUTES
    print(f"{experiment.tier:5} {experiment.name:17} {len(runs) - len(rest):3} of {len(runs):3} "
          f"runs done, {duration(minutes):>10} of a {experiment.unit} left"
          + f", {left} of {len(calls)} benchmarks left" * bool(left) + f": {experiment.title}")
    for run in runs:
        if run.seed == 1 and not (HERE / config_path(run)).exists():
            note(f"{run.label}: there is no {config_path(run)}, so that it has the defaults of "
                 f"train.py; give rows of different models the same config=")
    others = {run: changed(run, run.result or {}) for run in runs}
    if count := sum(map(bool, others.values())):
        what = " and ".join(sorted(set(sum(others.values(), []))))
        note(f"{count} of these runs were made with another {what} (CHANGELOG.md tells what "
             f"changes results); to repeat them: python -m lab.reproduce {experiment.name} again")


def forget(runs):
    """Drop the results of the runs whose text, model or start has changed, and of the runs that
    start from these, so that they are missing. (`start` then deletes the folder of a run that began
    before the change, and goes on with a run that began after it.)"""
    for run in runs:
        if changed(run, run.result or {}) or any(other.result is None for other in run.needs):
            run.result = None


def main(argv):
    if asks_help(argv):
        return print(__doc__ or f"NAME one of: {', '.join(load_experiments())}")    # python -OO
    experiments, words, failed = load_experiments(), {*argv}, []
    check_known(argv, [*experiments, *TIERS, "write", "again", "intervals"],
                what="experiment")
    chosen = [e for e in experiments.values() if words <= {"write"} or {e.name, e.tier} & words]
    if not chosen:
        raise UserError(f"{min(words)} needs the names of experiments, or a tier")
    if {"write", "again"} <= words:
        raise UserError("write makes no runs, and again does: give one of the two")
    plans = {e: plan(e) for e in chosen}
    if "intervals" in words:
        return print_intervals(plans)
    if "again" in words:
        forget([run for runs in plans.values() for run in runs])
    if "write" not in words:
        for e, runs in plans.items():
            show(e, runs)
        failed = reproduce(plans) if words else []
    if words:
        for e, runs in plans.items():
            write(e, runs)
    if failed:
        raise UserError(f"{len(failed)} runs or benchmarks failed; the same command tries again")


def reproduce(plans):
    """Do what is missing of {experiment: its runs}, the first seed of all rows first, so that rows
    can be compared early. Return what failed."""
    OUT.mkdir(exist_ok=True)
    lock(OUT, "lab.reproduce")  # a second one at the same time ends here
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    jobs = 1 if "gpu" in {experiment.tier for experiment in plans} else JOBS
    by_seed = [run for runs in plans.values() for run in sorted(runs, key=lambda run: run.seed)]
    try:
        todo = missing(by_seed)
        for run in todo:        # before hours of training, and not in two processes at once
            try:
                for options in ("", *run.row["evaluate"].values()):
                    prepare_missing(text_of(run, split_args(options.split())[1]))
            except (OSError, UserError) as e:       # this run will fail, and others need not
                note(f"{run.experiment.name}: {run.label}: {first_line(e)}")
        failed = train_all(todo, jobs)
        return failed + [command for e, runs in plans.items() for command in measure(e, runs)]
    finally:
        stop_all()
        STARTED.clear()
        STOP.clear()


if __name__ == "__main__":
    run_cli(main)

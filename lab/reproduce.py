"""
Every table and picture of RESULTS.md, again: runs what is missing, then writes them.

    python -m lab.reproduce                     the experiments, what is done, the time for the rest
    python -m lab.reproduce quick               a tier: quick (8 minutes of two cores), cpu, gpu
    python -m lab.reproduce rt_blocks lrt_s3    experiments by name
    python -m lab.reproduce write               no runs: only tables and pictures (of all, or some)
    python -m lab.reproduce help                every key with its meaning

An experiment is a file experiments/NAME.yaml: rows of keys for train.py, each trained with several
seeds, and what of them to show (see Experiment). The runs are out/NAME-*. The results are
results/NAME.jsonl, a line for each command of train.py or bench.py (see record): one that has a
line there is not run again, so a reproduction that was stopped goes on where it was. But a run
whose config file has other values today is missing. To repeat a run after a change of the code,
delete its line and its folder, since a folder that is left is resumed.
"""
import fcntl
import hashlib
import json
import os
import platform
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, field, fields
from pathlib import Path

import torch
from omegaconf import OmegaConf

from common.checkpoint import load_checkpoint
from common.config import TrainConfig, config_file
from common.keys import (HERE, UserError, asks_help, first_line, help_text, run_cli, split_args,
                    typed_config, unknown_key, writing)
from lab.plot import pyplot, save_picture
from common.log import read_log
from common.process import device_name, pick_device

TIERS = ("quick", "cpu", "gpu")
LOG_KEYS = ("step", "tokens", "flops", "seconds")
CURVE_POINTS = 60               # of a run's log that its result keeps, about
AXES = {"flops": "training FLOPs", "bpb": "bits per byte of training batches",
        "bins": "score",
        "three.scores.2": "fraction of tokens, recursion 2",
        "three.scores.3": "fraction of tokens, recursion 3"}


@dataclass
class ReproduceConfig:
    jobs: int = 2               # runs at the same time, each on one thread

    def __post_init__(self):
        if self.jobs < 1:
            raise ValueError(f"jobs={self.jobs} must be at least 1")


@dataclass
class Experiment:
    """What experiments/NAME.yaml holds. A row is the keys of train.py, or a dict of
      keys               the same. {LABEL} is the folder of an earlier row's run of the same seed;
      from               [LABEL, STEP]: resume a copy of that row's step_STEP.pt (keep_interval);
      seeds, minutes, evaluate    instead of the experiment's;
      COLUMN             the text of that column, where it is `text`.

    A column is the name of a value and its format, such as `val_bpb .3f`, or `text`, or `options`:
    the row's keys. An axis of the picture has such a name too (x: bins where y is a list, such as
    eval.py's scores). Values have the names of
      the log            val_bpb, of the last evaluation; tokens, flops, of the last line;
      an evaluation      NAME.ce, of eval.py;
      bench.py runs      speed.decode_1_ms;
      the configuration  keys.chunk.

    bench: arguments of bench.py, in which {rows} is the folders of the runs with seeds 1 to 3."""
    title: str
    tier: str                   # quick | cpu | gpu
    rows: dict = field(default_factory=dict)
    columns: dict = field(default_factory=dict)
    keys: str = ""              # keys of all rows
    seeds: int = 3              # runs of each row
    jobs: int = 0               # at most so many at the same time (0: as many as asked for)
    minutes: float = 1.0        # of a run on one core, estimated
    evaluate: dict = field(default_factory=dict)    # {NAME: keys of eval.py}, after training
    bench: list = field(default_factory=list)
    bench_minutes: float = 5.0  # of each of these calls, estimated
    picture: list = field(default_factory=list)     # of panels: {x, y: names; xscale, ylim, ...}
    name: str = ""


def load_experiments():
    """{name: Experiment} of the folder experiments."""
    found = {}
    for file in sorted((HERE / "lab" / "experiments").glob("*.yaml")):
        try:
            found[file.stem] = load_experiment(file)
        except Exception as e:  # of YAML, or of values of another type: all about this file
            raise UserError(f"{file.name}: {first_line(e)}") from e
    return found


def load_experiment(file):
    values = OmegaConf.to_container(OmegaConf.load(file), resolve=False)
    names = [f.name for f in fields(Experiment) if f.name != "name"]
    for key in values.keys() - set(names):
        raise UserError(unknown_key(key, names))
    for key in {"title", "tier"} - values.keys():
        raise UserError(f"{key} is missing")
    e = Experiment(**values, name=file.stem)
    if e.tier not in TIERS or e.seeds < 1 or e.minutes <= 0:
        raise UserError(f"tier must be one of {', '.join(TIERS)}, seeds and minutes positive")
    for label, row in e.rows.items():
        row = row if isinstance(row, dict) else {"keys": row or ""}
        own = {"keys": "", "seeds": e.seeds, "minutes": e.minutes, "evaluate": e.evaluate}
        e.rows[label] = {**own, **row}
        for key in row.keys() - {*own, "from", *e.columns}:
            raise UserError(f"{label} has an unknown key {key!r}")
        if e.rows[label]["seeds"] < 1:
            raise UserError(f"{label}: seeds must be positive")
    return e


# -------------------------------------------------------------------------------------------------
# what there is to do

@dataclass(eq=False)
class Run:
    """One row of an experiment with one seed."""
    experiment: Experiment
    label: str
    seed: int
    row: dict
    keys: str                   # of train.py, without run
    needs: list                 # the runs whose folders the keys name
    start: str                  # the checkpoint that it is resumed from, or nothing
    folder: Path
    result: dict = None         # its line in results/NAME.jsonl
    began: float = 0.0          # when it was started, in seconds

    @property
    def command(self):
        return f"train.py {self.keys}" + f" from {self.start}" * bool(self.start)


def read_results(experiment):
    """{command: the last line that has it} of results/NAME.jsonl."""
    found, file = {}, results_file(experiment)
    for n, text in enumerate(file.open() if file.exists() else [], 1):
        try:
            line = json.loads(text)
        except ValueError as e:
            raise UserError(f"{file}: line {n} is not JSON") from e
        found[line["command"]] = line
    return found


def plan(experiment):
    """All runs of an experiment, in the order of its rows."""
    done, runs = read_results(experiment), {}
    for label, row in experiment.rows.items():
        for seed in range(1, row["seeds"] + 1):
            keys = f"{experiment.keys} {row['keys']} seed={seed} sample_tokens=0"
            (source, step), needs, start = row.get("from", ("", 0)), [], ""
            for other in [*re.findall("{(.*?)}", keys), *[source] * bool(source)]:
                if (other, seed) not in runs:
                    raise UserError(f"experiments/{experiment.name}.yaml: {label} starts from "
                                    f"{other!r}, which is no row above it with seed {seed}")
                needs.append(runs[other, seed])
                keys = keys.replace("{%s}" % other, f"out/{needs[-1].folder.name}")
            keys = " ".join(f"{k}={v}" for k, v in split_args(keys.split()).items())
            if source:
                start = f"out/{needs[-1].folder.name}/step_{step}.pt"
            # the folder's name tells the keys apart: a changed row does not go on from the old run
            digest = hashlib.sha256((keys + start).encode()).hexdigest()[:6]
            slug = re.sub("[^a-z0-9]+", "_", label.lower()).strip("_")
            folder = HERE / "out" / f"{experiment.name}-{slug}-{seed}-{digest}"
            run = Run(experiment, label, seed, row, keys, needs, start, folder)
            line = done.get(run.command)
            if (line and line.get("evaluate", {}) == row["evaluate"]
                    and as_configured(run, line.get("keys", {}))):
                run.result = line
            runs[label, seed] = run
    return list(runs.values())


def as_configured(run, config):
    """Whether a run's whole configuration has the values that its config file has today."""
    given = split_args(run.keys.split())
    other = {"run", "config", *given, *["max_steps"] * ("max_flops" in given)}
    file = config_file(given, TrainConfig.model)
    return all(config.get(key, file[key]) == file[key] for key in file.keys() - other)


def missing(runs):
    """The runs without a result, and before them those they start from whose folders are gone."""
    found = []

    def add(run):
        for need in run.needs:
            if need.result is None or not (need.folder / "ckpt.pt").exists():
                add(need)
        if run not in found:
            found.append(run)
    for run in runs:
        if run.result is None:
            add(run)
    return found


# -------------------------------------------------------------------------------------------------
# runs

def python(*command, one_thread=True, **options):
    """Start one of our programs."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"} if one_thread else None
    # close_fds=False: it holds the lock, too, and may outlive us
    return subprocess.Popen([sys.executable, *command], text=True, env=environment, cwd=HERE,
                            stderr=subprocess.STDOUT, close_fds=False, **options)


def start(run):
    """Train, or go on with a run that was stopped. What it prints goes to FOLDER.txt, the commits
    that it was made with to FOLDER.commit."""
    run.folder.mkdir(parents=True, exist_ok=True)
    ckpt, commits = run.folder / "ckpt.pt", Path(f"{run.folder}.commit")
    keys, how, before = run.keys, "overwrite", []
    if ckpt.exists() and not as_configured(run, load_checkpoint(ckpt)["config"]):
        ckpt.unlink()
    if run.start and not ckpt.exists():
        if not (HERE / run.start).exists():
            raise UserError(f"{run.start} is missing: delete its folder, to train it again")
        shutil.copy(HERE / run.start, f"{ckpt}.copy")
        os.replace(f"{ckpt}.copy", ckpt)
    if ckpt.exists():
        keys, how = re.sub(r"init_from=\S+", "", keys), "resume"
        before = commits.read_text().split() if commits.exists() else []
    commits.write_text("\n".join(dict.fromkeys([*before, commit()])))
    keys += f" run={run.folder.name} {how}=true"
    with open(f"{run.folder}.txt", "w") as out:
        return python("train.py", *keys.split(), stdout=out)


def train_all(runs, jobs):
    """Train the runs, `jobs` at a time. Returns those that failed, and those that need them."""
    waiting, running, failed = list(runs), {}, []
    taken = estimated = 0       # minutes of the runs that have ended
    try:
        while waiting or running:
            failed += [r for r in waiting if set(r.needs) & set(failed)]
            waiting = [r for r in waiting if r not in failed]
            unfinished = {*waiting, *running.values()}
            ready = [r for r in waiting if not unfinished & set(r.needs)]
            for run in ready[:jobs - len(running)]:
                waiting.remove(run)
                running[start(run)] = run
                run.began = time.monotonic()
            time.sleep(0.2)
            for process in [p for p in running if p.poll() is not None]:
                run = running.pop(process)
                left = [*waiting, *running.values()]
                taken += (time.monotonic() - run.began) / 60
                estimated += run.row["minutes"]
                good = process.returncode == 0 and record(run)
                if not good:
                    failed.append(run)
                print(f"{run.experiment.name}: {run.label}, seed {run.seed}: "
                      f"{'done' if good else f'FAILED, see {run.folder}.txt'}; "
                      f"{len(left)} left, about "
                      f"{duration(minutes(left) / jobs * taken / estimated)}", flush=True)
    finally:                    # they save their state, and are resumed the next time
        for process in running:
            process.terminate()
        for process in running:
            process.wait()
    return failed


def record(run):
    """Evaluate a run that has been trained, and write its line: the command, the commits of the
    code, the machine, keys (the whole configuration), the values of its last validation and of the
    log's last line, those of eval.py, and about CURVE_POINTS lines of the log. False if it was
    stopped, or if an evaluation fails."""
    ckpt, log = load_checkpoint(run.folder / "ckpt.pt"), read_log(run.folder / "log.jsonl")
    if ckpt["step"] < ckpt["config"]["max_steps"]:      # stopped by a signal: resumed next time
        return False
    # lines of training steps; a run that was stopped has logged other steps too
    every = ckpt["config"]["log_interval"]
    logged = [row for row in log if "lr" in row]
    steps = [row for row in logged if row["step"] % every == 0] or logged
    sizes = {w.data_ptr(): w.numel() for w in ckpt["weights"].values()}     # tied ones count once
    result = {"command": run.command, "evaluate": run.row["evaluate"],
              "commit": ", ".join(Path(f"{run.folder}.commit").read_text().split()),
              "machine": machine(ckpt["config"]["device"]), "parameters": sum(sizes.values()),
              "tokens_per_second": statistics.median(row["tokens_per_second"] for row in steps),
              "keys": ckpt["config"],
              **{k: v for row in log for k, v in row.items() if k.startswith("val_")},
              **{k: log[-1][k] for k in LOG_KEYS}}
    for name, keys in run.row["evaluate"].items():
        file = run.folder / f"{name}.json"
        with open(f"{run.folder}.txt", "a") as out:
            process = python("-m", "lab.eval", run.folder, *keys.split(), f"json={file}", stdout=out)
        if process.wait():
            return False
        result[name] = json.loads(file.read_text())
    points = steps[::-max(1, round(len(steps) / CURVE_POINTS))][::-1]       # the last one too
    points += [row for row in log if "val_ce" in row]
    result["log"] = [{k: v for k, v in row.items() if k.startswith("val_")
                      or k in (*LOG_KEYS, "ce", "bpb", "token_accuracy")} for row in points]
    run.result = result
    append(run.experiment, result)
    return True


def timed(runs):
    """Those that bench.py is given: times need no more than three seeds."""
    return [run for run in runs if run.seed <= 3]


def benches(experiment, runs):
    """The experiment's calls of bench.py, {command: its line in results/NAME.jsonl, or None}."""
    done, folders = read_results(experiment), " ".join(f"out/{r.folder.name}" for r in timed(runs))
    commands = [f"bench.py {args.replace('{rows}', folders)}" for args in experiment.bench]
    return {command: done.get(command) for command in commands}


def measure(experiment, runs):
    """Make the calls of bench.py that have no line yet, one after the other, with nothing else
    running. Returns those that failed, or that lack a run."""
    file, failed = HERE / "out" / f"{experiment.name}.json", []
    for command in [command for command, line in benches(experiment, runs).items() if not line]:
        if gone := [run for run in timed(runs)
                    if not (run.result and (run.folder / "ckpt.pt").exists())]:
            print(f"{command[:60]} needs {gone[0].folder}")
            failed.append(command)
            continue
        extra = [f"json={file}"] if command.startswith("bench.py runs") else []
        _, *arguments = command.split()      # "bench.py" is a label; the file is lab/bench.py
        process = python("-m", "lab.bench", *arguments, *extra, one_thread=False,
                         stdout=subprocess.PIPE)
        output = process.communicate()[0]
        if process.returncode:
            print(f"{command}: {(output.strip() or 'no output').splitlines()[-1]}")
            failed.append(command)
            continue
        line = {"command": command, "commit": commit(), "machine": machine("auto"),
                "output": output}
        if extra:
            line["speed"] = {Path(f).name: v for f, v in json.loads(file.read_text()).items()}
            file.unlink()
        append(experiment, line)
    return failed


def results_file(experiment):
    return HERE / "lab" / "results" / f"{experiment.name}.jsonl"


def append(experiment, line):
    file = results_file(experiment)
    with writing(file):
        file.parent.mkdir(exist_ok=True)
        seven_digits = lambda text: float(f"{float(text):.7g}")     # the file is committed
        line = json.loads(json.dumps(line), parse_float=seven_digits)
        size = file.stat().st_size if file.exists() else 0
        try:
            with open(file, "a") as f:
                f.write(json.dumps(line) + "\n")
        except OSError:         # no half line is left on a full disk
            os.truncate(file, size)
            raise


def machine(device):
    device = pick_device(device)
    where = device_name(device) if device.type == "cuda" else "CPU"
    return f"{where}, torch {torch.__version__}, Python {platform.python_version()}"


def commit():
    def git(*args):
        return subprocess.run(["git", "-C", HERE, *args], capture_output=True, text=True).stdout
    if shutil.which("git") is None:
        return "unknown"
    changed = git("status", "--porcelain", "--", "*.py", "configs", "lab/experiments")
    return (git("rev-parse", "--short", "HEAD").strip() or "unknown") + "-changed" * bool(changed)


# -------------------------------------------------------------------------------------------------
# tables and pictures

def look_up(result, name):
    """The value of a dotted name, such as keys.chunk; None where there is none."""
    for part in name.split("."):
        result = result.get(part) if isinstance(result, dict) else None
    return result


def cell(results, name, form):
    """Mean and standard deviation over the seeds."""
    values = [v for v in (look_up(r, name) for r in results) if v is not None]
    if not values:
        return ""
    text = format(statistics.fmean(values), form)
    if max(values) - min(values) <= 1e-6 * abs(max(values)):    # equal but for rounding
        return text
    return f"{text} ± {format(statistics.stdev(values), form.strip('+'))}"


def table(experiment, runs, measured):
    """The rows that have results, in Markdown, then how they were made, and what bench.py said.
    measured: lines of results/NAME.jsonl."""
    columns = experiment.columns
    lines = ["| | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for label in experiment.rows:
        mine = [run for run in runs if run.label == label]
        results = [run.result for run in mine if run.result]
        few = f" ({len(results)} of {len(mine)} seeds)" if len(results) < len(mine) else ""
        cells = [label + few]
        for title, what in columns.items():
            row = mine[0].row
            own = {"text": row.get(title, ""), "options": f"`{row['keys']}`"}
            cells.append(own[what] if what in own else cell(results, *what.split()))
        if results and any(cells[1:]):      # a source that is not evaluated has none
            lines.append("| " + " | ".join(cells) + " |")
    made = [run.result for run in runs if run.result]
    said, seeds = [], sorted({row["seeds"] for row in experiment.rows.values()})
    if made:
        seconds = sum(run["seconds"] for run in made)
        said = [f"{len(made)} run{'s' * (len(made) > 1)}, {duration(seconds / 60)} of a core",
                "one seed" if seeds == [1] else
                f"mean ± standard deviation of {' or '.join(map(str, seeds))} seeds"]
    for key, word in ("commit", "commit "), ("machine", ""):
        found = [line[key] for line in [*made, *measured] if key in line]
        if found:
            said.append(word + ", ".join(dict.fromkeys(", ".join(found).split(", "))))
    lines = [*lines, ""] if made else []
    lines.append(f"`python -m lab.reproduce {experiment.name}`: {'; '.join(said)}")
    for line in [line for line in measured if "speed" not in line]:     # those are in the columns
        lines += ["", "```", f"$ python {line['command']}", line["output"].rstrip(), "```"]
    return "\n".join(lines)


def draw(experiment, runs):
    """assets/NAME.png: for each panel curves of the log, the mean over seeds, or a point a row."""
    plt, n = pyplot(), len(experiment.picture)
    fig, axes = plt.subplots(1, n, figsize=(7 if n == 1 else 5.5 * n, 4.5), squeeze=False)
    titles = AXES | {what.split()[0]: title for title, what in experiment.columns.items()}
    for ax, panel in zip(axes[0], experiment.picture):
        x, y = panel["x"], panel["y"]
        for label in experiment.rows:
            results = [run.result for run in runs if run.label == label and run.result]
            if x in LOG_KEYS:
                curves = [{row["step"]: (row[x], row[y]) for row in r["log"] if y in row}
                          for r in results]
                steps = [n for n in (curves or [()])[0] if all(n in curve for curve in curves)]
                points = [[statistics.fmean(v) for v in zip(*(curve[n] for curve in curves))]
                          for n in steps]
                points = points if y.startswith("val_") else smoothed(points)
            elif x == "bins":       # a list from 0 to 1
                lists = [found for r in results if (found := look_up(r, y))]
                points = [((i + 0.5) / len(lists[0]), statistics.fmean(values))
                          for i, values in enumerate(zip(*lists))]
            else:
                found = [(look_up(r, x), look_up(r, y)) for r in results]
                points = [(a, b) for a, b in found if None not in (a, b)]
                points = points and [[statistics.fmean(v) for v in zip(*points)]]
            if points:          # few of them are drawn as points
                marker = "o" if len(points) < 10 else ""
                ax.plot(*zip(*points), label=label, linewidth=1.2, marker=marker, markersize=5)
        ax.set(xlabel=titles.get(x, x), ylabel=titles.get(y, y),
               **{k: v for k, v in panel.items() if k not in ("x", "y")})
        ax.grid(alpha=0.3)
    axes[0][0].legend(fontsize=8)
    fig.suptitle(experiment.title)
    save_picture(fig, "picture", HERE / "assets" / f"{experiment.name}.png", dpi=120)
    plt.close(fig)


def smoothed(points, reach=4):
    """The loss of a batch is noisy: each point's mean with its neighbours."""
    return [(x, statistics.fmean(y for _, y in points[max(0, i - reach):i + reach + 1]))
            for i, (x, _) in enumerate(points)]


def write(experiment, runs):
    """Print the table, put it between the marks <!-- NAME --> and <!-- end --> of RESULTS.md and
    README.md, and draw the picture."""
    measured = [line for line in benches(experiment, runs).values() if line]
    if not measured and not any(run.result for run in runs):
        return
    for line in read_results(experiment).values():      # measured with other rows, too
        for run in [run for run in runs if run.result]:
            if speed := line.get("speed", {}).get(run.folder.name):
                run.result["speed"] = speed
    text = table(experiment, runs, measured)
    print(f"\n{experiment.title}\n\n{text}")
    marks = re.compile(f"(<!-- {experiment.name} -->\n).*?(<!-- end -->)", re.DOTALL)
    found = {f: f.read_text() for f in (HERE / "lab" / "RESULTS.md", HERE / "README.md")}
    found = {file: old for file, old in found.items() if marks.search(old)}
    for file, old in found.items():
        with writing(file):
            file.write_text(marks.sub(lambda mark: f"{mark[1]}{text}\n{mark[2]}", old))
    if experiment.picture:
        draw(experiment, runs)


# -------------------------------------------------------------------------------------------------

def minutes(runs):
    """How long they take on one core, as their experiments say."""
    return sum(run.row["minutes"] for run in runs)


def calls_left(experiment, runs):
    """How many calls of bench.py have no line yet."""
    return list(benches(experiment, runs).values()).count(None)


def duration(minutes):
    return f"{minutes / 60:.1f} hours" if minutes >= 90 else f"{minutes:.0f} minutes"


def main(argv):
    if asks_help(argv):
        return print(help_text(ReproduceConfig))
    cfg = typed_config(ReproduceConfig, split_args([a for a in argv if "=" in a]))
    for number in (signal.SIGTERM, signal.SIGHUP):      # train_all stops its runs
        if signal.getsignal(number) != signal.SIG_IGN:  # of nohup
            signal.signal(number, lambda *_: sys.exit(143))
    experiments, names = load_experiments(), [a for a in argv if "=" not in a]
    for name in names:
        if name not in (allowed := [*experiments, *TIERS, "write"]):
            raise UserError(unknown_key(name, allowed))
    plans = {name: plan(experiment) for name, experiment in experiments.items()}
    if not names:
        for name, runs in plans.items():
            e, rest = experiments[name], missing(runs)
            calls = calls_left(e, runs)
            left = duration(minutes(rest) + calls * e.bench_minutes)
            print(f"{e.tier:5} {name:17} {len(runs) - len(rest):3} of {len(runs):3} runs done, "
                  f"{left:>10} of a core left"
                  + f", {calls} of {len(e.bench)} benchmarks left" * bool(calls) + f": {e.title}")
        return
    only_write = "write" in names
    chosen = [e for e in experiments.values() if names == ["write"] or {e.name, e.tier} & {*names}]
    todo = [] if only_write else missing([run for e in chosen for run in plans[e.name]])
    jobs = min([cfg.jobs, *(e.jobs for e in chosen if e.jobs)])
    then = 0 if only_write else sum(calls_left(e, plans[e.name]) * e.bench_minutes for e in chosen)
    print(f"{len(todo)} runs, {duration(minutes(todo) / jobs)} with {jobs} jobs"
          + f", then {duration(then)} of benchmarks" * bool(then), flush=True)
    if todo:
        (HERE / "out").mkdir(exist_ok=True)
        lock = open(HERE / "out" / "reproduce.lock", "w")       # held until this process ends
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as e:
            raise UserError("another reproduce.py, or a run of it, is training here") from e
        os.set_inheritable(lock.fileno(), True)
    failed = train_all(todo, jobs)
    for e in chosen:
        if not only_write:
            failed += measure(e, plans[e.name])
        write(e, plans[e.name])
    if failed:
        raise UserError(f"{len(failed)} runs or benchmarks failed; the same command tries again")


if __name__ == "__main__":
    run_cli(main)

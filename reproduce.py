"""
Every table and picture of RESULTS.md, again: runs what is missing, then writes them.

    python reproduce.py                     the experiments, what is done, the time for the rest
    python reproduce.py quick               a tier: quick (10 minutes of two cores), cpu, gpu
    python reproduce.py rt_blocks lrt_s3    experiments by name
    python reproduce.py write               no runs: only tables and pictures (of all, or some)
    python reproduce.py help                every key with its meaning

An experiment is a file experiments/NAME.yaml: rows of keys for train.py, each trained with several
seeds, and what of them to show (see Experiment). Its results are results/NAME.jsonl, a line for
each command: what it was, its log and its evaluations. A command that has a line there is not run
again. So a reproduction that was stopped goes on where it was. To repeat a run, delete its line:
after a change of a file in configs/, too, which is not noticed.
"""
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

from checkpoint import load_checkpoint
from config import (HERE, UserError, asks_help, help_text, run_cli, split_args, typed_config,
                    unknown_key, writing)
from plot import pyplot, read_log, save_picture
from run import device_name, pick_device

TIERS = ("quick", "cpu", "gpu")
LOG_KEYS = ("step", "tokens", "flops", "seconds")
CURVE_POINTS = 60               # of a run's log that its result keeps, about
AXES = {"flops": "training FLOPs", "bpb": "bits per byte of training batches", "bins": "score",
        "three.scores.2": "tokens, recursion 2", "three.scores.3": "tokens, recursion 3"}


@dataclass
class ReproduceConfig:
    jobs: int = 2               # runs at the same time, each on one thread
    seeds: int = 0              # of each row (0: as many as its experiment says)
    out_dir: str = "out"        # where the runs' folders are

    def __post_init__(self):
        if self.jobs < 1 or self.seeds < 0:
            raise ValueError(f"jobs={self.jobs} and seeds={self.seeds} must be at least 1 and 0")


@dataclass
class Experiment:
    """What experiments/NAME.yaml holds. A row is the keys of train.py, or a dict of
      keys             the same. {LABEL} is the folder of another row's run with the same seed;
      from             [LABEL, STEP]: resume a copy of that row's step_STEP.pt (keep_interval);
      seeds, minutes, evaluate    instead of the experiment's;
      COLUMN           the text of that column, where it is `text`.

    A column is the name of a value and its format, such as `val_bpb .3f`: values of the last
    evaluation, of the log's last line, of an evaluation (NAME.ce), of `bench.py runs`
    (speed.decode_1_ms), or of the keys (keys.block); `options`: the row's keys. An axis of the
    picture is such a name too; x: bins is for a y that is a list, such as eval.py's scores.

    bench: arguments of bench.py, in which {rows} is the folders of all runs."""
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
    picture: list = field(default_factory=list)     # of panels: {x, y: names; xscale, ylim}
    name: str = ""


def load_experiments():
    """{name: Experiment} of the folder experiments."""
    found, names = {}, [f.name for f in fields(Experiment)]
    for file in sorted((HERE / "experiments").glob("*.yaml")):
        values = OmegaConf.to_container(OmegaConf.load(file), resolve=False)
        for key in values.keys() - set(names):
            raise UserError(f"{file.name}: {unknown_key(key, names)}")
        found[file.stem] = Experiment(**values, name=file.stem)
    return found


# -------------------------------------------------------------------------------------------------
# what there is to do

@dataclass(eq=False)
class Run:
    """One row of an experiment with one seed."""
    experiment: Experiment
    label: str
    seed: int
    keys: str                   # of train.py, without run and out_dir
    needs: list                 # the runs whose folders the keys name
    row: dict
    folder: Path
    result: dict = None         # its line in results/NAME.jsonl
    commit: str = ""            # when it was started

    @property
    def minutes(self):
        return self.row["minutes"]


def read_results(experiment):
    """{command: the last line that has it} of results/NAME.jsonl."""
    file = results_file(experiment)
    try:
        lines = [json.loads(line) for line in file.open()] if file.exists() else []
    except ValueError as e:
        raise UserError(f"{file}: a line is not JSON: {e}") from e
    return {line["command"]: line for line in lines}


def plan(experiment, cfg):
    """All runs of an experiment, in the order of its rows."""
    done, runs = read_results(experiment), {}
    for label, row in experiment.rows.items():
        row = {"minutes": experiment.minutes, "evaluate": experiment.evaluate,
               "seeds": experiment.seeds, **({"keys": row} if isinstance(row, str) else row)}
        for seed in range(1, (cfg.seeds or row["seeds"]) + 1):
            keys = f"{experiment.keys} {row['keys']} seed={seed} sample_tokens=0"
            labels = re.findall("{(.*?)}", keys) + row.get("from", [])[:1]
            needs = [runs[label, seed] for label in labels]
            for other in needs:         # the same command whatever out_dir is
                keys = keys.replace("{%s}" % other.label, f"out/{other.folder.name}")
            keys = " ".join(f"{k}={v}" for k, v in split_args(keys.split()).items())
            # the folder's name tells the keys apart: a changed row does not go on from the old run
            digest = hashlib.sha256(keys.encode()).hexdigest()[:6]
            slug = re.sub("[^a-z0-9]+", "_", label.lower()).strip("_")
            folder = Path(cfg.out_dir) / f"{experiment.name}-{slug}-{seed}-{digest}"
            runs[label, seed] = Run(experiment, label, seed, keys, needs, row, folder,
                                    done.get(f"train.py {keys}"))
    return list(runs.values())


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

def python(program, *args, threads="1", **options):
    """Start one of our programs."""
    environment = {**os.environ, "OMP_NUM_THREADS": threads} if threads else None
    return subprocess.Popen([sys.executable, HERE / program, *args], text=True, env=environment,
                            stderr=subprocess.STDOUT, **options)


def start(run):
    """Train, or go on with a run that was stopped. What it prints goes to FOLDER.txt."""
    run.folder.mkdir(parents=True, exist_ok=True)
    ckpt = run.folder / "ckpt.pt"
    if "from" in run.row and not ckpt.exists():
        shutil.copy(run.needs[-1].folder / f"step_{run.row['from'][1]}.pt", ckpt)
    keys, how = run.keys.replace("=out/", f"={run.folder.parent}/"), "overwrite"
    if ckpt.exists():
        keys, how = re.sub(r"init_from=\S+", "", keys), "resume"
    run.commit = commit()
    with open(f"{run.folder}.txt", "w") as out:
        return python("train.py", *keys.split(), f"run={run.folder.name}",
                      f"out_dir={run.folder.parent}", f"{how}=true", stdout=out)


def train_all(runs, jobs):
    """Train the runs, `jobs` at a time. Returns those that failed, and those that need them."""
    waiting, running, failed = list(runs), {}, []
    begin, total, finished = time.time(), sum(r.minutes for r in runs), 0.0
    try:
        while waiting or running:
            failed += [r for r in waiting if set(r.needs) & set(failed)]
            waiting = [r for r in waiting if r not in failed]
            unfinished = {*waiting, *running.values()}
            ready = [r for r in waiting if not unfinished & set(r.needs)]
            for run in ready[:jobs - len(running)]:
                waiting.remove(run)
                running[start(run)] = run
            time.sleep(0.2)
            for process in [p for p in running if p.poll() is not None]:
                run = running.pop(process)
                good = process.returncode == 0 and record(run)
                failed += [] if good else [run]
                finished += run.minutes
                left = (time.time() - begin) / 60 * (total / finished - 1)
                print(f"{run.experiment.name}: {run.label}, seed {run.seed}: "
                      f"{'done' if good else f'FAILED, see {run.folder}.txt'}; "
                      f"{len(waiting) + len(running)} left, {duration(left)}", flush=True)
    finally:                    # they save their state, and are resumed the next time
        for process in running:
            process.terminate()
        for process in running:
            process.wait()
    return failed


def record(run):
    """Evaluate a run that has been trained, and write its line. False if it was stopped, or if an
    evaluation fails."""
    ckpt, log = load_checkpoint(run.folder / "ckpt.pt"), read_log(run.folder / "log.jsonl")
    if ckpt["step"] < ckpt["config"]["max_steps"]:      # stopped by a signal: resumed next time
        return False
    every, last, weights = ckpt["config"]["log_interval"], ckpt["step"], ckpt["weights"].values()
    # a run that was stopped has logged other steps too
    steps = [row for row in log if "lr" in row and (row["step"] % every == 0
                                                    or row["step"] == last)]
    result = {"command": f"train.py {run.keys}", "commit": run.commit, "machine": machine(ckpt),
              "parameters": sum({w.data_ptr(): w.numel() for w in weights}.values()),
              "tokens_per_second": statistics.median(row["tokens_per_second"] for row in steps),
              "keys": ckpt["config"],
              **{k: v for row in log for k, v in row.items() if k.startswith("val_")},
              **{k: log[-1][k] for k in LOG_KEYS}}
    for name, keys in run.row["evaluate"].items():
        file = run.folder / f"{name}.json"
        with open(f"{run.folder}.txt", "a") as out:
            process = python("eval.py", run.folder, *keys.split(), f"json={file}", stdout=out)
        if process.wait():
            return False
        result[name] = json.loads(file.read_text())
    points = steps[-1::-max(1, round(len(steps) / CURVE_POINTS))][::-1]
    points += [row for row in log if "val_ce" in row]
    result["log"] = [{k: v for k, v in row.items() if k.startswith("val_")
                      or k in (*LOG_KEYS, "ce", "bpb", "token_accuracy")} for row in points]
    run.result = result
    append(run.experiment, result)
    return True


def benches(experiment, runs):
    """The experiment's calls of bench.py, {command: its line in results/NAME.jsonl, or None}."""
    done, folders = read_results(experiment), " ".join(f"out/{run.folder.name}" for run in runs)
    commands = [f"bench.py {args.replace('{rows}', folders)}" for args in experiment.bench]
    return {command: done.get(command) for command in commands}


def measure(experiment, runs):
    """Make the calls of bench.py that have no line yet, one after the other, with nothing else
    running; not if a run is missing."""
    file = Path(f"{experiment.name}.json")
    for command, line in benches(experiment, runs).items():
        if line or not all(run.result and (run.folder / "ckpt.pt").exists() for run in runs):
            continue
        place = runs[0].folder.parent if runs else ""
        words = [word.replace("out/", f"{place}/") for word in command.split()]
        extra = [f"json={file}"] if "runs" in words else []
        process = python(*words, *extra, threads=None, stdout=subprocess.PIPE)
        output = process.communicate()[0]
        if process.returncode:
            raise UserError(f"{command}: {(output.strip() or 'no output').splitlines()[-1]}")
        line = {"command": command, "commit": commit(), "output": output}
        if extra:
            line["speed"] = {Path(f).name: v for f, v in json.loads(file.read_text()).items()}
            file.unlink()
        append(experiment, line)


def results_file(experiment):
    return HERE / "results" / f"{experiment.name}.jsonl"


def append(experiment, line):
    file = results_file(experiment)
    with writing(file):
        file.parent.mkdir(exist_ok=True)
        with open(file, "a") as f:
            seven_digits = lambda text: float(f"{float(text):.7g}")     # the file is committed
            line = json.loads(json.dumps(line), parse_float=seven_digits)
            f.write(json.dumps(line) + "\n")


def machine(ckpt):
    device = pick_device(ckpt["config"]["device"])
    where = device_name(device) if device.type == "cuda" else "CPU"
    return f"{where}, torch {torch.__version__}, Python {platform.python_version()}"


def commit():
    def git(*args):
        return subprocess.run(["git", "-C", HERE, *args], capture_output=True, text=True).stdout
    if shutil.which("git") is None:
        return "unknown"
    changed = git("status", "--porcelain", "--", "*.py", "configs", "experiments")
    return (git("rev-parse", "--short", "HEAD").strip() or "unknown") + "-changed" * bool(changed)


# -------------------------------------------------------------------------------------------------
# tables and pictures

def look_up(result, name):
    """The value of a dotted name, such as keys.block; None where there is none."""
    for part in name.split("."):
        result = result.get(part) if isinstance(result, dict) else None
    return result


def cell(results, name, form):
    """Mean and standard deviation over the seeds."""
    values = [v for v in (look_up(r, name) for r in results) if v is not None]
    if not values:
        return ""
    text = format(statistics.fmean(values), form)
    same = len(set(values)) == 1
    return text if same else f"{text} ± {format(statistics.stdev(values), form.strip('+'))}"


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
            cells.append(mine[0].row.get(title, "") if what == "text" else
                         f"`{mine[0].row['keys']}`" if what == "options" else
                         cell(results, *what.split()))
        if results:
            lines.append("| " + " | ".join(cells) + " |")
    made = [run.result for run in runs if run.result]
    lines = [*lines, ""] if made else []
    lines.append(f"`python reproduce.py {experiment.name}`: ")
    if made:
        took = duration(sum(run["seconds"] for run in made) / 60)
        lines[-1] += f"{len(made)} runs, {took} of a core; "
        seeds = max(run.seed for run in runs)
        lines[-1] += f"mean ± standard deviation of {seeds} seeds; " if seeds > 1 else "one seed; "
    for key in "commit", "machine":
        found = list(dict.fromkeys(line[key] for line in [*made, *measured] if key in line))
        lines[-1] += ("commit " * (key == "commit") + ", ".join(found) + "; ") * bool(found)
    lines[-1] = lines[-1].removesuffix("; ")
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
               ylim=panel.get("ylim", (None, None)),
               **{k: panel[k] for k in ("xscale", "yscale") if k in panel})
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
    for run in runs:
        for line in measured:
            if run.result and "speed" in line:
                run.result["speed"] = line["speed"].get(run.folder.name)
    text = table(experiment, runs, measured)
    print(f"\n{experiment.title}\n\n{text}")
    marks = re.compile(f"(<!-- {experiment.name} -->\n).*?(<!-- end -->)", re.DOTALL)
    found = {f: f.read_text() for f in (HERE / "RESULTS.md", HERE / "README.md")}
    found = {file: old for file, old in found.items() if marks.search(old)}
    for file, old in found.items():
        with writing(file):
            file.write_text(marks.sub(lambda mark: f"{mark[1]}{text}\n{mark[2]}", old))
    if not found:
        print(f"\nnote: neither RESULTS.md nor README.md has a place <!-- {experiment.name} -->")
    if experiment.picture:
        draw(experiment, runs)


# -------------------------------------------------------------------------------------------------

def duration(minutes):
    return f"{minutes / 60:.1f} hours" if minutes >= 90 else f"{minutes:.0f} minutes"


def main(argv):
    if asks_help(argv):
        return print(help_text(ReproduceConfig))
    cfg = typed_config(ReproduceConfig, split_args([a for a in argv if "=" in a]))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))     # train_all stops its runs
    experiments, names = load_experiments(), [a for a in argv if "=" not in a]
    for name in names:
        if name not in (allowed := [*experiments, *TIERS, "write"]):
            raise UserError(unknown_key(name, allowed))
    plans = {name: plan(experiment, cfg) for name, experiment in experiments.items()}
    if not names:
        for name, runs in plans.items():
            e, rest = experiments[name], missing(runs)
            calls = list(benches(e, runs).values())
            print(f"{e.tier:5} {name:16} {len(runs) - len(rest):3} of {len(runs):3} runs done, "
                  f"{duration(sum(run.minutes for run in rest)):>10} of a core left"
                  + f", {calls.count(None)} of {len(calls)} benchmarks left" * (None in calls)
                  + f": {e.title}")
        return
    only_write = "write" in names
    chosen = [e for e in experiments.values() if names == ["write"] or {e.name, e.tier} & {*names}]
    todo = [] if only_write else missing([run for e in chosen for run in plans[e.name]])
    jobs = min([cfg.jobs, *(e.jobs for e in chosen if e.jobs)])
    print(f"{len(todo)} runs, {duration(sum(run.minutes for run in todo) / jobs)} with {jobs} jobs",
          flush=True)
    failed = train_all(todo, jobs)
    for e in chosen:
        if not only_write:
            measure(e, plans[e.name])
        write(e, plans[e.name])
    if failed:
        raise UserError(f"{len(failed)} runs failed; the same command tries them again")


if __name__ == "__main__":
    run_cli(main)

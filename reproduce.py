"""
Every table and picture of RESULTS.md, again: trains the runs that are missing, then writes both.

    python reproduce.py                         the experiments, what is done, and the time for the rest
    python reproduce.py quick                   a tier: quick (10 minutes of two cores), cpu, gpu
    python reproduce.py rt_blocks rat_chunks    experiments by name
    python reproduce.py write                   only the tables and pictures, of the results there are

An experiment is a file experiments/NAME.yaml: rows of keys for train.py, each trained with several
seeds, and what of them to show (Experiment below). Its results are results/NAME.jsonl, a line for
each run: its command, its log, its evaluations. A run whose command stands there is done, so a
reproduction that was stopped goes on where it was, and one that is done again costs nothing.
"""
import hashlib
import json
import os
import re
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

TIERS = ("quick", "cpu", "gpu")
CURVE_POINTS = 60           # of a run's log that its result keeps


@dataclass
class ReproduceConfig:
    jobs: int = 2           # runs at the same time, each on one thread
    seeds: int = 0          # of each row (0: as many as its experiment says)
    out_dir: str = "out"    # where the runs' folders are


@dataclass
class Experiment:
    """What experiments/NAME.yaml holds."""
    title: str              # of the picture, and of the list
    tier: str               # quick | cpu | gpu
    rows: dict              # {label: keys of train.py}; {label} in them is another row's folder;
                            # or {label: {keys, seeds, minutes, evaluate, NAME: a cell of that column}}
    columns: dict           # {title: value and format}, such as `val_bpb .3f`; `text`: cells of the rows
    keys: str = ""          # keys of all rows
    seeds: int = 3          # runs of each row
    minutes: float = 1.0    # of one run on one core, about
    evaluate: dict = field(default_factory=dict)    # {name: keys of eval.py}, after training
    speed: bool = False     # bench.py runs, with the first seed of each row: speed.train_ms, ...
    picture: dict = field(default_factory=dict)     # x, y: values; of the log, or of the results
    name: str = ""


def load_experiments():
    """{name: Experiment} of the folder experiments."""
    found = {}
    for file in sorted((HERE / "experiments").glob("*.yaml")):
        values = OmegaConf.to_container(OmegaConf.load(file), resolve=False)
        for key in values:
            if key not in (names := [f.name for f in fields(Experiment)]):
                raise UserError(f"{file.name}: {unknown_key(key, names)}")
        found[file.stem] = Experiment(**values, name=file.stem)
    return found


# -------------------------------------------------------------------------------------------------
# runs

@dataclass(eq=False)
class Run:
    """One row of an experiment with one seed."""
    experiment: Experiment
    label: str
    seed: int
    keys: str               # of train.py, without run and out_dir
    needs: list             # runs whose folders the keys name
    evaluate: dict
    minutes: float
    folder: Path
    result: dict = None     # its line in results/NAME.jsonl


def plan(experiment, cfg):
    """{(label, seed): Run} of all rows. Of two results of one command the later one holds."""
    file = results_file(experiment)
    lines = file.read_text().splitlines() if file.exists() else []
    done = {line["command"]: line for line in map(json.loads, lines)}
    runs = {}
    for label, row in experiment.rows.items():
        row = {"keys": row} if isinstance(row, str) else row
        for seed in range(1, (cfg.seeds or row.get("seeds", experiment.seeds)) + 1):
            keys = f"{experiment.keys} {row['keys']} seed={seed} sample_tokens=0"
            needs = [runs[name, seed] for name in re.findall("{(.*?)}", keys)]
            for other in needs:
                keys = keys.replace("{%s}" % other.label, str(other.folder))
            keys = " ".join(f"{k}={v}" for k, v in split_args(keys.split()).items())
            # the name tells the keys apart, so that a changed row does not resume the old one
            digest = hashlib.sha256(keys.encode()).hexdigest()[:6]
            slug = re.sub("[^a-z0-9]+", "_", label.lower()).strip("_")
            folder = Path(cfg.out_dir) / f"{experiment.name}-{slug}-{seed}-{digest}"
            command = f"train.py {keys}"
            runs[label, seed] = Run(experiment, label, seed, keys, needs,
                                    row.get("evaluate", experiment.evaluate),
                                    row.get("minutes", experiment.minutes), folder,
                                    done.get(command))
    return runs


def missing(runs):
    """The runs to train, in order: those without results, and before them those whose folders they
    need and that are not there."""
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


def python(program, *args, **options):
    """Start one of our programs on one thread."""
    return subprocess.Popen([sys.executable, HERE / program, *args], text=True,
                            env={**os.environ, "OMP_NUM_THREADS": "1"}, **options)


def start(run):
    log = run.folder.with_name(run.folder.name + ".txt")
    log.parent.mkdir(parents=True, exist_ok=True)
    begun = (run.folder / "ckpt.pt").exists()
    keys = [*run.keys.split(), f"run={run.folder.name}", f"out_dir={run.folder.parent}"]
    with open(log, "w") as out:
        return python("train.py", *keys, f"{'resume' if begun else 'overwrite'}=true",
                      stdout=out, stderr=subprocess.STDOUT)


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
                      f"{len(waiting) + len(running)} left, about {hours(left)}", flush=True)
    finally:                    # they save their state, and are resumed the next time
        for process in running:
            process.terminate()
        for process in running:
            process.wait()
    return failed


def record(run):
    """Evaluate a run that has been trained, and write its line. False if an evaluation fails."""
    ckpt, log = load_checkpoint(run.folder / "ckpt.pt"), read_log(run.folder / "log.jsonl")
    steps = [row for row in log if "lr" in row]
    result = {"label": run.label, "seed": run.seed, "command": f"train.py {run.keys}",
              "commit": commit(), "parameters": sum(w.numel() for w in ckpt["weights"].values()),
              "tokens_per_second": statistics.median(r["tokens_per_second"] for r in steps),
              "grad_norm_max": max(row["grad_norm"] for row in steps), "keys": ckpt["config"],
              **{k: v for row in log for k, v in row.items() if k.startswith("val_")},
              **{k: log[-1][k] for k in ("step", "tokens", "flops", "seconds")}}
    for name, keys in run.evaluate.items():
        file = run.folder / f"{name}.json"
        with open(f"{run.folder}.txt", "a") as out:
            process = python("eval.py", str(run.folder), *keys.split(), f"json={file}",
                             stdout=out, stderr=subprocess.STDOUT)
        if process.wait():
            return False
        result[name] = json.loads(file.read_text())
    names = ("step", "tokens", "flops", "seconds", "ce", "bpb", "token_accuracy")
    points = steps[-1::-max(1, len(steps) // CURVE_POINTS)][::-1] + [r for r in log if "val_ce" in r]
    result["log"] = [{k: v for k, v in row.items() if k in names or k.startswith("val_")}
                     for row in points]
    append(run.experiment, result)
    run.result = result
    return True


def append(experiment, result):
    file = results_file(experiment)
    with writing(file):
        file.parent.mkdir(exist_ok=True)
        with open(file, "a") as f:
            f.write(json.dumps(rounded(result)) + "\n")


def results_file(experiment):
    return HERE / "results" / f"{experiment.name}.jsonl"


def measure_speed(experiment, runs):
    """bench.py runs: the rows' first seeds beside each other, with nothing else running; a line of
    its own in the results."""
    runs = [run for run in runs.values() if run.seed == 1 and run.result]
    known = [run for run in runs if "speed" in run.result]
    if known == runs or not all((run.folder / "ckpt.pt").exists() for run in runs):
        return
    file = Path(f"{runs[0].folder}.speed.json")
    process = python("bench.py", "runs", *(str(run.folder) for run in runs), f"json={file}")
    if process.wait() == 0:
        speeds = json.loads(file.read_text())
        for run in runs:
            run.result["speed"] = speeds[str(run.folder)]
            append(experiment, run.result)


def commit():
    with subprocess.Popen(["git", "-C", HERE, "rev-parse", "--short", "HEAD"], text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        return process.communicate()[0].strip()


def rounded(value):
    """Floats to seven digits, also inside lists and dicts: the results are read and committed."""
    if isinstance(value, dict):
        return {k: rounded(v) for k, v in value.items()}
    if isinstance(value, list):
        return [rounded(v) for v in value]
    return float(f"{value:.7g}") if isinstance(value, float) else value


# -------------------------------------------------------------------------------------------------
# tables and pictures

def look_up(result, name):
    """The value of a dotted name, such as lengths.2x; None where there is none."""
    for part in name.split("."):
        result = result.get(part) if isinstance(result, dict) else None
    return result


def cell(runs, name, form):
    """Mean and standard deviation over the seeds, in Markdown."""
    values = [v for v in (look_up(run.result, name) for run in runs) if v is not None]
    if not values:
        return ""
    if not isinstance(values[0], (int, float)):
        return str(values[0])
    text = format(statistics.fmean(values), form)
    same = len(set(values)) == 1
    return text if same else f"{text} ± {format(statistics.stdev(values), form)}"


def table(experiment, runs):
    """The experiment's rows that have results, as a table in Markdown, and what it was made from."""
    head = ["", *experiment.columns]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    done = [run for run in runs.values() if run.result]
    for label, row in experiment.rows.items():
        mine, wanted = [r for r in done if r.label == label], [r for r in runs.values()
                                                               if r.label == label]
        if not mine:
            continue
        few = f" ({len(mine)} of {len(wanted)} seeds)" if len(mine) < len(wanted) else ""
        cells = [label + few]
        for title, what in experiment.columns.items():
            if what == "text":
                cells.append(str(row.get(title, "")) if isinstance(row, dict) else "")
            elif what == "options":
                cells.append(f"`{row if isinstance(row, str) else row['keys']}`")
            else:
                cells.append(cell(mine, *what.split()))
        lines.append("| " + " | ".join(cells) + " |")
    hours = sum(r.result["seconds"] for r in done) / 3600
    commits = ", ".join(dict.fromkeys(r.result["commit"] for r in done))
    lines += ["", f"`python reproduce.py {experiment.name}`: {len(done)} runs, {hours:.1f} hours of a "
              f"core, commit {commits}; mean ± standard deviation over the seeds."]
    return "\n".join(lines)


def draw(experiment, runs):
    """assets/NAME.png: curves of the log, or a point for each row."""
    x, y = experiment.picture["x"], experiment.picture["y"]
    plt = pyplot()
    fig, ax = plt.subplots(figsize=(7, 4.5))
    for label in experiment.rows:
        mine = [r.result for r in runs.values() if r.label == label and r.result]
        if mine and x in ("step", "tokens", "flops", "seconds"):
            curves = [[(row[x], row[y]) for row in r["log"] if y in row] for r in mine]
            n = min(map(len, curves))
            mean = [statistics.fmean(c[i][1] for c in curves) for i in range(n)]
            ax.plot([p[0] for p in curves[0][:n]], mean, label=label, linewidth=1.2)
        elif mine:
            points = [(look_up(r, x), look_up(r, y)) for r in mine]
            ax.plot(*zip(*points), "o", markersize=4, label=label)
    ax.set(xlabel=x, ylabel=y, title=experiment.title, xscale=experiment.picture.get("xscale", "linear"))
    ax.set_ylim(*experiment.picture.get("ylim", (None, None)))
    ax.legend(fontsize=8)
    ax.grid(alpha=0.3)
    save_picture(fig, "picture", HERE / "assets" / f"{experiment.name}.png", dpi=120)
    plt.close(fig)


def write(experiment, runs):
    """Put the table between the marks `<!-- NAME -->` and `<!-- end -->` of RESULTS.md and README.md,
    and draw the picture."""
    text = table(experiment, runs)
    mark = re.compile(f"(<!-- {experiment.name} -->\n).*?(<!-- end -->)", re.DOTALL)
    for file in (HERE / "RESULTS.md", HERE / "README.md"):
        old = file.read_text()
        new = mark.sub(lambda m: f"{m[1]}{text}\n{m[2]}", old)
        if new != old:
            with writing(file):
                file.write_text(new)
    if experiment.picture:
        draw(experiment, runs)
    return text


# -------------------------------------------------------------------------------------------------

def hours(minutes):
    return f"{minutes / 60:.1f} h" if minutes >= 90 else f"{minutes:.0f} min"


def main(argv):
    if asks_help(argv):
        return print(help_text(ReproduceConfig))
    cfg = typed_config(ReproduceConfig, split_args([a for a in argv if "=" in a]))
    experiments = load_experiments()
    names = [a for a in argv if "=" not in a]
    for name in names:
        if name not in (*experiments, *TIERS, "write"):
            raise UserError(unknown_key(name, [*experiments, *TIERS, "write"]))
    plans = {name: plan(e, cfg) for name, e in experiments.items()}
    if not names:
        for name, runs in plans.items():
            todo = missing(runs.values())
            rest = hours(sum(r.minutes for r in todo)) + " of a core" if todo else "done"
            print(f"{experiments[name].tier:6} {name:20} {experiments[name].title}: "
                  f"{len(runs) - len(todo)} of {len(runs)} runs, {rest}")
        return
    chosen = [n for n, e in experiments.items() if names == ["write"] or {n, e.tier} & {*names}]
    todo = [] if names == ["write"] else missing([r for n in chosen for r in plans[n].values()])
    print(f"{len(todo)} runs, about {hours(sum(r.minutes for r in todo) / cfg.jobs)} with "
          f"{cfg.jobs} jobs", flush=True)
    failed = train_all(todo, cfg.jobs)
    for name in chosen:
        if experiments[name].speed and names != ["write"]:
            measure_speed(experiments[name], plans[name])
        text = write(experiments[name], plans[name])
        print(f"\n{experiments[name].title}\n\n{text}")
    if failed:
        raise UserError(f"{len(failed)} runs failed; the same command tries them again")


if __name__ == "__main__":
    run_cli(main)

"""
One picture of several runs: a value of their logs against steps, tokens or seconds.

    python -m lab.plot out/task_s3 out/task_s3_gpt y=val_sequence_accuracy file=s3.png
    python -m lab.plot out/rt_tiny out/gpt_tiny y=val_bpb x=tokens title="bits per byte"
    python -m lab.plot help                                     every key with its meaning
"""
from dataclasses import dataclass
from pathlib import Path

from common.keys import (UserError, asks_help, help_text, run_cli, split_args, typed_config,
                         writing)
from common.log import read_log


def pyplot():
    """matplotlib, imported where a picture is drawn, without a display."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    return plt


def save_picture(fig, key, file, dpi):
    """Write a matplotlib figure to file, which `key` names on the command line."""
    with writing(file):
        try:
            fig.savefig(file, dpi=dpi, bbox_inches="tight")
        except ValueError as e:         # an ending that is no picture
            raise UserError(f"{key}={file}: {str(e).splitlines()[0]}") from e


def draw_curves(rows, path, title):
    plt = pyplot()
    fig, ax = plt.subplots(figsize=(7, 4.5))
    for key, label, style in (("ce", "training", "-"), ("val_ce", "validation", "o-")):
        points = [(row["step"], row[key]) for row in rows if key in row]
        if points:
            ax.plot(*zip(*points), style, label=label, markersize=3, linewidth=1)
            ax.legend()
    ax.set(xlabel="step", ylabel="cross-entropy (nats per token)", title=title)
    ax.grid(alpha=0.3)
    fig.savefig(path, dpi=120, bbox_inches="tight")
    plt.close(fig)


def draw_points(places, xlabel, ylabel, file):
    """places: (name, x, y)."""
    plt = pyplot()
    fig, ax = plt.subplots(figsize=(7, 4.5))
    for name, x, y in places:
        ax.plot(x, y, "o")
        ax.annotate(name, (x, y), textcoords="offset points", xytext=(6, 4), fontsize=8)
    ax.set(xlabel=xlabel, ylabel=ylabel)
    ax.margins(x=0.15)
    ax.grid(alpha=0.3)
    save_picture(fig, "file", file, dpi=120)
    plt.close(fig)
    print(f"{file}: {ylabel} against {xlabel}, {len(places)} runs")


@dataclass
class PlotConfig:
    y: str = "val_ce"           # what is drawn: a key of log.jsonl
    x: str = "step"             # step | tokens | flops | seconds
    smooth: int = 1             # points of a curve that are averaged into one
    file: str = "plot.png"      # the picture
    title: str = ""             # above it
    labels: str = ""            # names, with commas between (default: the folders')

    def __post_init__(self):
        if self.x not in ("step", "tokens", "flops", "seconds"):
            raise ValueError(f"x={self.x} must be one of: step, tokens, flops, seconds")
        if self.smooth < 1:
            raise ValueError(f"smooth={self.smooth} must be at least 1")


def points(folder, x, y):
    """The (x, y) of each line of a run's log that has them. UserError where there is none."""
    file = Path(folder) / "log.jsonl"
    if not file.is_file():
        raise UserError(f"{file} does not exist: give folders of runs, out/NAME")
    rows = read_log(file)
    found = [(row[x], row[y]) for row in rows if x in row and isinstance(row.get(y), (int, float))]
    if not found:
        names = sorted({key for row in rows for key in row})
        raise UserError(f"{file} has no {y}: it has {', '.join(names)}")
    return found


def averaged(curve, n):
    """Each n points in a row as one: the last x, the mean y."""
    groups = [curve[i:i + n] for i in range(0, len(curve), n)]
    return [(group[-1][0], sum(y for _, y in group) / len(group)) for group in groups]


def main(argv):
    if asks_help(argv):
        return print(help_text(PlotConfig))
    folders = [a for a in argv if "=" not in a]
    keys = split_args([a for a in argv if "=" in a])
    cfg = typed_config(PlotConfig, keys, free_text=("title", "labels"))
    labels = cfg.labels.split(",") if cfg.labels else [Path(f).name for f in folders]
    if not folders or len(labels) != len(folders):
        raise UserError("give the folders of runs, and as many labels or none: "
                        "python -m lab.plot out/NAME ... [key=value]")
    curves = [averaged(points(folder, cfg.x, cfg.y), cfg.smooth) for folder in folders]
    plt = pyplot()
    fig, ax = plt.subplots(figsize=(7, 4))
    for label, curve in zip(labels, curves):
        ax.plot(*zip(*curve), "o-", markersize=3, linewidth=1.2, label=label)
    ax.set(xlabel=cfg.x, ylabel=cfg.y, title=cfg.title)
    ax.legend()
    ax.grid(alpha=0.3)
    save_picture(fig, "file", cfg.file, dpi=120)
    print(f"{cfg.file}: {cfg.y} of {', '.join(labels)}")


if __name__ == "__main__":
    run_cli(main)

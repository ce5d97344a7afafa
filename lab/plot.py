"""
One picture of several runs: a value of their logs against steps, tokens or seconds.

    python -m lab.plot out/task_s3 out/task_s3_gpt y=val_sequence_accuracy file=s3.png
    python -m lab.plot out/rt_tiny out/gpt_tiny y=val_bpb x=tokens title="bits per byte"
    python -m lab.plot help                                     every key with its meaning
"""
import os
from dataclasses import dataclass
from pathlib import Path

from common.checkpoint import read_log
from common.keys import UserError, choice, first_line, need, run_cli, split_args, typed_config


@dataclass
class PlotConfig:
    y: str = "val_ce"           # what is drawn: a key of log.jsonl
    x: str = choice("step", "tokens", "flops", "seconds")
    file: str = "out/plot.png"  # the picture
    title: str = ""             # above it


# ---- drawing ----

def pyplot():
    """matplotlib, imported where a picture is drawn, without a display."""
    os.environ["MPLBACKEND"] = "agg"        # a notebook's, which may not be there, ends the import
    need("matplotlib").use("Agg")
    return need("matplotlib.pyplot")


def draw(file, panels, title=""):
    """Panels beside each other, each (labels and scales of its axes, [(name, its points), ...])."""
    plt, n = pyplot(), len(panels)
    plain = lambda text: text.replace("$", r"\$")       # no formula
    fig, axes = plt.subplots(1, n, figsize=(7 if n == 1 else 5.5 * n, 4.5), squeeze=False)
    for ax, (style, curves) in zip(axes[0], panels):
        for name, curve in curves:      # a few points are marked
            marker = "o" if len(curve) < 10 else ""
            ax.plot(*zip(*curve), label=plain(name), linewidth=1.2, marker=marker, markersize=5)
        ax.set(**style)
        ax.grid(alpha=0.3)
    if lines := axes[0][0].lines:       # given to legend, a name may begin with _
        axes[0][0].legend(lines, [line.get_label() for line in lines], fontsize=8)
    fig.suptitle(plain(title))
    try:
        fig.savefig(file, dpi=120, bbox_inches="tight")
    except ValueError as e:             # an ending that is no picture
        raise UserError(f"file={file}: {first_line(e)}") from e
    plt.close(fig)


def draw_curves(rows, path, title):
    """The picture of one run: the cross-entropy in training and validation, by its log's rows."""
    curves = [(name, [(row["step"], row[key]) for row in rows if key in row])
              for key, name in (("ce", "training"), ("val_ce", "validation"))]
    style = dict(xlabel="step", ylabel="cross-entropy (nats per token)")
    draw(path, [(style, [(name, curve) for name, curve in curves if curve])], title)


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


def main(argv):
    folders, keys = split_args(argv, least=1, most=None)
    cfg = typed_config(PlotConfig, keys)
    names = [os.path.basename(os.path.abspath(folder)) for folder in folders]
    curves = [(name, points(folder, cfg.x, cfg.y)) for name, folder in zip(names, folders)]
    draw(cfg.file, [(dict(xlabel=cfg.x, ylabel=cfg.y), curves)], cfg.title)
    print(f"{cfg.file}: {cfg.y} of {', '.join(folders)}")


if __name__ == "__main__":
    run_cli(main, PlotConfig)

"""
Pictures are drawn here. train.py draws the curves of a run, and lab.reproduce draws the panels of
an experiment.
"""
import os

from common.options import need


def draw(file, panels, title=""):
    """Draw panels beside each other. A panel is a pair. It has a dict of arguments of matplotlib's
    Axes.set, such as labels and scales, and a list of curves. A curve is a pair, too: a name and a
    list of points (x, y)."""
    os.environ["MPLBACKEND"] = "agg"        # matplotlib would fail on a value that it does not know
    need("matplotlib")
    from matplotlib.figure import Figure    # pyplot would keep each figure in memory
    n = len(panels)
    fig = Figure(figsize=(7 if n == 1 else 5.5 * n, 4.5))
    axes, lines = fig.subplots(1, n, squeeze=False), {}
    for ax, (style, curves) in zip(axes[0], panels):
        for name, curve in curves:
            if not curve:               # as before the first evaluation
                continue
            marker = "o" if len(curve) < 10 else ""         # few points get markers
            color = lines[name].get_color() if name in lines else f"C{len(lines)}"
            line, = ax.plot(*zip(*curve), color=color, linewidth=1.2, marker=marker, markersize=5)
            lines.setdefault(name, line)
        ax.set(**style)
        ax.grid(alpha=0.3)
    # One legend for all panels stands below them, where it hides no curve.
    if lines:
        fig.legend(lines.values(), lines, loc="upper center", bbox_to_anchor=(0.5, 0), ncols=3,
                   fontsize=8)
    fig.suptitle(title)
    fig.savefig(file, dpi=120, bbox_inches="tight")


def draw_curves(rows, path, title):
    """Draw the picture of one run, which shows the cross-entropy in training and in validation.
    `rows` are those of the run's log."""
    curves = [(name, [(row["step"], row[key]) for row in rows if key in row])
              for key, name in (("ce", "training"), ("val_ce", "validation"))]
    style = dict(xlabel="step", ylabel="cross-entropy (nats per token)")
    draw(path, [(style, curves)], title)

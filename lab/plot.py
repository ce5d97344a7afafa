"""
Pictures: the curves of a run (train.py), and the panels of an experiment (lab.reproduce).
"""
import os

from common.options import need


def draw(file, panels, title=""):
    """Panels beside each other, each (labels and scales of its axes, [(name, its points), ...])."""
    os.environ["MPLBACKEND"] = "agg"        # one that matplotlib does not know ends its import
    need("matplotlib")
    from matplotlib.figure import Figure    # without pyplot: no display, none of its settings
    n = len(panels)
    fig = Figure(figsize=(7 if n == 1 else 5.5 * n, 4.5))
    axes = fig.subplots(1, n, squeeze=False)
    for ax, (style, curves) in zip(axes[0], panels):
        for name, curve in curves:      # a few points are marked
            marker = "o" if len(curve) < 10 else ""
            ax.plot(*zip(*curve), label=name, linewidth=1.2, marker=marker, markersize=5)
        ax.set(**style)
        ax.grid(alpha=0.3)
    if lines := axes[0][0].lines:       # given to legend, a name may begin with _
        axes[0][0].legend(lines, [line.get_label() for line in lines], fontsize=8)
    fig.suptitle(title)
    fig.savefig(file, dpi=120, bbox_inches="tight")


def draw_curves(rows, path, title):
    """The picture of one run: the cross-entropy in training and validation, by its log's rows."""
    curves = [(name, [(row["step"], row[key]) for row in rows if key in row])
              for key, name in (("ce", "training"), ("val_ce", "validation"))]
    style = dict(xlabel="step", ylabel="cross-entropy (nats per token)")
    draw(path, [(style, curves)], title)

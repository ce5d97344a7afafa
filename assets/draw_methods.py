"""
Draws methods.png: what one token at one layer reads, in a Transformer and in the five methods.

    python assets/draw_methods.py
"""
from pathlib import Path

import matplotlib
matplotlib.use("Agg")
import matplotlib.pyplot as plt

T, L = 6, 4     # tokens left to right, layers bottom to top (0: embedding)
GREY, INK, READ, RECUR = "#c8ccd2", "#30343b", "#2f6fb5", "#d1495b"
BLOCKS = "#8fbcbb", "#ebcb8b"   # two stored blocks


def panel(ax, title, subtitle):
    ax.set_title(title, fontsize=13, fontweight="bold", color=INK, pad=22)
    ax.text((T - 1) / 2, L + 0.62, subtitle, ha="center", fontsize=10, color=INK)
    ax.set(xlim=(-0.6, T - 0.4), ylim=(-0.75, L + 0.5), aspect="equal")
    ax.axis("off")
    ax.text((T - 1) / 2, -0.72, "tokens", ha="center", fontsize=10, color=INK)


def dots(ax, colour=lambda t, l: GREY, shown=lambda t, l: True):
    for t in range(T):
        for l in range(L + 1):
            if shown(t, l):
                ax.plot(t, l, "o", markersize=9, color=colour(t, l), zorder=3)


def arrow(ax, a, b, colour=READ, bend=0.0, width=1.3, style="-"):
    """From what is read, a = (token, layer), to what reads it."""
    ax.annotate("", b, a, zorder=2, arrowprops=dict(
        arrowstyle="-|>", color=colour, lw=width, shrinkA=5, shrinkB=5, linestyle=style,
        connectionstyle=f"arc3,rad={bend}"))


def target(ax, t, l):
    ax.plot(t, l, "o", markersize=9, color=INK, zorder=4)


def transformer(ax):
    panel(ax, "Transformer", "reads the layer below")
    dots(ax)
    for t in range(T - 1):
        arrow(ax, (t, 1), (4, 2))
    target(ax, 4, 2)


def rt(ax):
    panel(ax, "RT", "reads its own layer's outputs")
    dots(ax)
    arrow(ax, (4, 1), (4, 2))
    for t in range(4):
        arrow(ax, (t, 2), (4, 2), RECUR, bend=-0.13 * (4 - t) + 0.1)
    target(ax, 4, 2)


def lrt(ax):
    panel(ax, "LRT", "also the previous token's upper state")
    dots(ax)
    for t in range(T - 1):
        arrow(ax, (t, 1), (4, 2))
    for l in range(1, L + 1):
        arrow(ax, (3, 3), (4, l), RECUR, width=1.6)
    ax.plot(3, 3, "o", markersize=9, color=RECUR, zorder=4)
    target(ax, 4, 2)


def rat(ax):
    panel(ax, "RAT", "recurrence in chunks, attention across")
    for c in range(2):
        ax.add_patch(plt.Rectangle((3 * c - 0.42, 0.62), 2.84, 0.76, color="#eef1f5", zorder=0))
    dots(ax)
    for t in (0, 1, 3):
        arrow(ax, (t, 1), (t + 1, 1), RECUR, width=1.6)
    for t in (2, 4):
        arrow(ax, (t, 1), (4, 2))
    ax.plot(2, 1, "o", markersize=9, color=READ, zorder=4)
    target(ax, 4, 2)


def looped(ax, depth):
    """Two stored blocks, run twice; tokens of depth 1 skip the second loop."""
    stored = lambda t, l: GREY if l == 0 else BLOCKS[(l - 1) % 2]
    dots(ax, stored, lambda t, l: l <= 2 * depth[t])
    for t in range(T):
        for l in range(2 * depth[t]):
            arrow(ax, (t, l), (t, l + 1), INK, width=0.9)


def relaxed(ax):
    panel(ax, "Relaxed Recursive", "stored layers in loops, each with deltas")
    looped(ax, [2] * T)
    for u in range(2):
        text = f"loop {u + 1}:\n" + rf"$W + B_{u}A_{u}$"
        ax.text(T - 0.62, 2 * u + 1.5, text, fontsize=9, va="center", color=RECUR)


def mor(ax):
    panel(ax, "MoR", "each token takes its own number of loops")
    depth = [2, 1, 1, 2, 1, 2]
    looped(ax, depth)
    for t in (0, 3):
        arrow(ax, (t, 2), (5, 3))
    target(ax, 5, 3)


def main():
    fig, axes = plt.subplots(2, 3, figsize=(10, 5.9))
    for ax, draw in zip(axes.flat, (transformer, rt, lrt, rat, relaxed, mor)):
        draw(ax)
    fig.tight_layout(h_pad=0.8, w_pad=0)
    fig.savefig(Path(__file__).with_name("methods.png"), dpi=110)


if __name__ == "__main__":
    main()

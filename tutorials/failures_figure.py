"""The figure of `tutorials.failures`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from tutorials import common

if TYPE_CHECKING:
    from seqgp.batch_optimizer import BatchOptimizer

NUMBER = 161
COLOURS = {"learnt": "#12355b", "penalised": "#f05d23", "left out": "#8a8a8a"}


def draw(
    runs: dict[str, list[tuple[BatchOptimizer, Tensor]]], best: float, batch_size: int
) -> Path:
    """Draw the problem, what was learnt, the points of each strategy, and the regret.

    Args:
        runs: For each strategy and seed, the optimiser and all points in order.
        best: The best valid value.
        batch_size: The number of points in a batch.
    """
    from tutorials.failures import INITIAL, WAYS, regret, value, works

    figure = Figure(figsize=(15.5, 8.2), layout="constrained")
    axes = figure.subplots(2, 3)
    line = torch.linspace(0, 1, NUMBER, dtype=torch.float64)
    grid = torch.cartesian_prod(line, line)

    def image(values: Tensor) -> Tensor:
        return values.reshape(NUMBER, NUMBER).T

    truth, valid = image(value(grid)), image(works(grid).to(grid))
    peak = grid[torch.where(works(grid), value(grid), -torch.inf).argmax()]
    optimizer, asked = runs["learnt"][0]

    axis = axes[0, 0]
    axis.contourf(line, line, truth, 24, cmap="viridis")
    axis.contourf(line, line, valid, [-1, 0.5], colors="none", hatches=["////"])
    axis.contour(line, line, valid, [0.5], colors="white", linewidths=1.5)
    axis.plot(*peak, "*", color="white", markeredgecolor="black", markersize=17)
    axis.set_title("the function; evaluations fail where it is hatched")

    axis = axes[0, 1]
    probability = image(optimizer.probability_of_validity(grid))
    shown = axis.contourf(
        line, line, probability, torch.linspace(0, 1, 21), cmap="RdBu", vmin=-0.1, vmax=1.1
    )
    figure.colorbar(shown, ax=axis, ticks=[0, 0.5, 1], shrink=0.8, pad=0.01)
    axis.contour(line, line, valid, [0.5], colors="black", linewidths=1.2, linestyles=":")
    _points(axis, asked, works(asked))
    axis.set_title("probability of validity, as learnt (dotted: the truth)")

    axis = axes[0, 2]
    axis.contourf(line, line, truth, 24, cmap="Greys", alpha=0.5)
    axis.contour(line, line, valid, [0.5], colors="black", linewidths=1.2, linestyles=":")
    number = 1 + (len(asked) - INITIAL) // batch_size
    start = asked[:INITIAL]
    axis.scatter(start[:, 0], start[:, 1], s=22, color="0.6", label="initial", clip_on=False)
    shown_batches = sorted({1, 2, max(1, (number - 1) // 2), number - 1})
    for k in shown_batches:
        X = asked[INITIAL + (k - 1) * batch_size : INITIAL + k * batch_size]
        axis.scatter(*X.T, s=65, edgecolors="white", label=f"batch {k}", zorder=3, clip_on=False)
    axis.plot(*peak, "*", color="white", markeredgecolor="black", markersize=17, zorder=4)
    axis.legend(frameon=False, fontsize=9, loc="lower right")
    axis.set_title("points of a batch are apart, by fantasies")

    for axis, way in zip(axes[1, :2], ("penalised", "left out"), strict=True):
        _, points = runs[way][0]
        axis.contourf(line, line, truth, 24, cmap="Greys", alpha=0.5)
        axis.contour(line, line, valid, [0.5], colors="black", linewidths=1.2, linestyles=":")
        _points(axis, points, works(points))
        axis.plot(*peak, "*", color="white", markeredgecolor="black", markersize=17)
        failed = int((~works(points[INITIAL:])).sum())
        axis.set_title(f"{WAYS[way]}: {failed} of {len(points) - INITIAL} fail")

    axis = axes[1, 2]
    for way, colour in COLOURS.items():
        curves = torch.stack([regret(points, best) for _, points in runs[way]]).clamp_min(1e-4)
        x = range(INITIAL, curves.shape[1] + 1)
        for curve in curves[:, INITIAL - 1 :]:
            axis.semilogy(x, curve, color=colour, alpha=0.25, linewidth=0.9)
        middle = curves.quantile(0.5, dim=0)[INITIAL - 1 :]
        axis.semilogy(x, middle, color=colour, linewidth=3, label=WAYS[way])
    axis.set(title="regret, median and each seed", xlabel="evaluations")
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, fontsize=10)
    for axis in (*axes[0], *axes[1, :2]):
        axis.set(xlim=(0, 1), ylim=(0, 1), xticks=[0, 0.5, 1], yticks=[0, 0.5, 1], aspect="equal")

    return common.save(figure, "failures")


def _points(axis: Axes, X: Tensor, valid: Tensor) -> None:
    """Draw circles for valid points, crosses for failed ones."""
    good, bad = X[valid], X[~valid]
    style = {"zorder": 3, "clip_on": False}
    axis.scatter(*good.T, s=34, color="#1b7f3b", edgecolors="white", **style)
    axis.scatter(*bad.T, s=38, color="#c1121f", marker="x", **style)

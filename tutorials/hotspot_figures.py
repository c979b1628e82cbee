"""Figures of the hotspot tutorial."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from torch import Tensor

from seqgp import SequentialGP
from seqgp.simulated_survey import Country
from tutorials import common

if TYPE_CHECKING:
    from tutorials.hotspots import State

CHOSEN, RANDOM = "#c1121f", "0.45"
PREVALENCE = {"cmap": "viridis", "norm": LogNorm(0.005, 1.0)}


def first_map(country: Country, state: State, threshold: float) -> Path:
    """Predictions after the first surveys: prevalence, standard deviation, hotspots."""
    figure = Figure(figsize=(15, 4.8), layout="constrained")
    panels = figure.subplots(1, 3)
    titles = ("expected prevalence", "its standard deviation", f"P(prevalence > {threshold:.0%})")
    styles: tuple[dict[str, Any], ...] = (
        PREVALENCE,
        {"cmap": "magma", "vmin": 0},
        {"cmap": "RdBu_r", "vmin": 0, "vmax": 1},
    )
    values = (state.estimate, state.spread, state.hotspot)
    for axes, title, value, style in zip(panels, titles, values, styles, strict=True):
        drawn = _villages(axes, country, value, **style)
        _surveyed(axes, country, state.surveyed)
        figure.colorbar(drawn, ax=axes, shrink=0.85)
        axes.set_title(title)
    figure.suptitle(f"After {len(state.surveyed)} surveys (black rings)")
    return common.save(figure, "hotspots-first")


def next_map(country: Country, state: State, score: Tensor, chosen: Tensor) -> Path:
    """The scores of all villages, the best batch, and the reasons for a high score."""
    figure = Figure(figsize=(14, 5.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    open_ = score.isfinite()
    index = open_.nonzero().squeeze(-1)
    drawn = _villages(left, country, score, index, cmap="viridis")
    _surveyed(left, country, state.surveyed)
    place = country.inputs[chosen]
    left.scatter(place[:, 0], place[:, 1], s=170, marker="*", c=CHOSEN, edgecolors="w", zorder=4)
    for rank, (x, y) in enumerate(place[:, :2].tolist(), 1):
        left.annotate(f"{rank}", (x, y), (5, 5), textcoords="offset points", weight="bold")
    left.set_title("expected reduction of uncertainty, and the best batch (stars)")
    figure.colorbar(drawn, ax=left, shrink=0.85, label="expected relative reduction of uncertainty")
    right.scatter(
        state.hotspot[index], state.spread[index], c=score[index], s=14, cmap="viridis", lw=0
    )
    right.scatter(
        *(state.hotspot[chosen], state.spread[chosen]), s=170, marker="*", c=CHOSEN, edgecolors="w"
    )
    right.set(
        title="high scores: undecided, uncertain, and similar to many others",
        xlabel="probability of being a hotspot",
        ylabel="standard deviation of prevalence",
    )
    right.spines[["top", "right"]].set_visible(False)
    return common.save(figure, "hotspots-next")


def maps(country: Country, states: list[State], threshold: float) -> Path:
    """Estimates, hotspot probabilities and the truth after more and more surveys."""
    shown = _stages(len(states) - 1)
    figure = Figure(figsize=(3.7 * (len(shown) + 1), 7.2), layout="constrained")
    grid = figure.subplots(2, len(shown) + 1)
    first = len(states[0].surveyed)
    for column, step in enumerate(shown):
        state = states[step]
        estimate = _villages(grid[0, column], country, state.estimate, **PREVALENCE)
        hotspot = _villages(grid[1, column], country, state.hotspot, cmap="RdBu_r", vmin=0, vmax=1)
        for axes in grid[:, column]:
            _surveyed(axes, country, state.surveyed[first:], CHOSEN)
        grid[0, column].set_title(f"after {step} more surveys")
    _villages(grid[0, -1], country, country.prevalence, **PREVALENCE)
    truth = (country.prevalence > threshold).double()
    _villages(grid[1, -1], country, truth, cmap="RdBu_r", vmin=0, vmax=1)
    grid[0, -1].set_title("the truth")
    figure.colorbar(estimate, ax=grid[0, :], shrink=0.85, label="expected prevalence")
    figure.colorbar(hotspot, ax=grid[1, :], shrink=0.85, label=f"P(prevalence > {threshold:.0%})")
    return common.save(figure, "hotspots-maps")


def curves(results: dict[str, dict[str, list[float]]]) -> Path:
    """Scores by survey, chosen against random."""
    figure = Figure(figsize=(13, 3.8), layout="constrained")
    for axes, key in zip(figure.subplots(1, 3), results["chosen"], strict=True):
        _curve(axes, results, key)
    return common.save(figure, "hotspots-curves")


def memory_map(country: Country, state: State, X: Tensor, model: SequentialGP) -> Path:
    """The surveys in memory, by leverage, and those in the summary."""
    figure = Figure(figsize=(7.4, 5.4), layout="constrained")
    axes = figure.subplots()
    memory = model.memory
    axes.scatter(country.inputs[:, 0], country.inputs[:, 1], s=3, c="0.65", lw=0)
    place = country.inputs[state.surveyed]
    axes.scatter(
        *(place[:, 0], place[:, 1]), s=14, c="w", edgecolors="0.4", lw=0.7, label="in the summary"
    )
    same = torch.cdist(memory.inputs, X[state.surveyed]).argmin(-1)
    kept = country.inputs[state.surveyed[same]]
    drawn = axes.scatter(
        *(kept[:, 0], kept[:, 1]),
        s=20 + 120 * memory.leverage.clamp(0, 1),
        c=memory.leverage,
        cmap="plasma",
        vmin=0,
        vmax=1,
        lw=0,
        alpha=0.9,
        label="in memory",
    )
    figure.colorbar(drawn, ax=axes, shrink=0.85, label="leverage: influence on the posterior")
    axes.legend(frameon=True, framealpha=0.9, loc="upper right", fontsize=9)
    _bare(axes)
    axes.set_title(f"the memory: {len(kept)} of {len(state.surveyed)} surveys")
    return common.save(figure, "hotspots-memory")


def summary(
    country: Country,
    states: list[State],
    results: dict[str, dict[str, list[float]]],
    threshold: float,
) -> Path:
    """An overview: before, after, the truth, and two curves."""
    figure = Figure(figsize=(15, 7.6), layout="constrained")
    grid = figure.subplot_mosaic("AABBCC;DDDEEE", height_ratios=[1.25, 1])
    first = len(states[0].surveyed)
    steps = len(states) - 1
    for key, state, title in (
        ("A", states[0], f"after {first} surveys"),
        ("B", states[-1], f"after {steps} more, chosen (red)"),
    ):
        drawn = _villages(grid[key], country, state.hotspot, cmap="RdBu_r", vmin=0, vmax=1)
        _surveyed(grid[key], country, state.surveyed[:first], size=9)
        _surveyed(grid[key], country, state.surveyed[first:], CHOSEN)
        grid[key].set_title(title)
    truth = (country.prevalence > threshold).double()
    _villages(grid["C"], country, truth, cmap="RdBu_r", vmin=0, vmax=1)
    grid["C"].set_title("the truth")
    figure.colorbar(
        drawn, ax=[grid[key] for key in "ABC"], label=f"P(prevalence > {threshold:.0%})"
    )
    _curve(grid["D"], results, "accuracy")
    _curve(grid["E"], results, "MSE")
    return common.save(figure, "hotspots")


def _stages(last: int) -> list[int]:
    return sorted({0, last // 4, last // 2, last})


def _villages(
    axes: Axes, country: Country, value: Tensor, index: Tensor | None = None, **style: Any
) -> Any:
    """Draw all villages, coloured by a value, with the highest on top."""
    index = torch.arange(len(value)) if index is None else index
    order = index[value[index].argsort()]
    place = country.inputs[order]
    _bare(axes)
    return axes.scatter(place[:, 0], place[:, 1], c=value[order], s=14, lw=0, **style)


def _surveyed(
    axes: Axes, country: Country, index: Tensor, colour: str = "black", size: float = 22
) -> None:
    """Draw rings around surveyed villages."""
    place = country.inputs[index]
    axes.scatter(
        *(place[:, 0], place[:, 1]), s=size, facecolors="none", edgecolors=colour, lw=0.8, zorder=3
    )


def _curve(axes: Axes, results: dict[str, dict[str, list[float]]], key: str) -> None:
    for name, colour in (("random", RANDOM), ("chosen", CHOSEN)):
        axes.plot(results[name][key], color=colour, lw=2, label=name)
    axes.set(title=f"{key}, villages not yet surveyed", xlabel="surveys after the first ones")
    axes.legend(frameon=False)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def _bare(axes: Axes) -> None:
    """Style axes as a map: no ticks, and a grey background."""
    axes.set(xticks=[], yticks=[], aspect="equal", facecolor="0.86")
    axes.spines[:].set_visible(False)

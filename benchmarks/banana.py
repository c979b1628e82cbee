"""Two interleaved crescents in four batches, one of which is available at a time.

(a) Hyperparameters and inducing points are those of offline learning: what does conditioning alone
lose? (b) Everything is learnt along the way. In both, the methods are compared with an offline
model of all data: by their predictions of the 4,900 test points, and by the distance of the class
probabilities on a grid. Sorted, each batch is a strip of the plane; shuffled, it is a sample.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.baselines import bui, csato, ours, ovc
from benchmarks.data import find
from benchmarks.known_warnings import known_warnings
from benchmarks.runner import Options, Unit
from benchmarks.snapshots import Snapshot, of_ours, of_rival, pack, unpack
from benchmarks.streams import Latent, Stream, load, score

BATCHES, GRID, EXTENT = 4, 50, 3.2
ORDERS = ("sorted", "shuffled")


#: By part and name: from a stream to a snapshot after each batch.
METHODS: dict[str, dict[str, Callable[[Stream], Iterator[Snapshot]]]] = {
    "fixed": {
        "ours": lambda s: of_ours(ours.steps(s, learn=False)),
        "ours, no memory": lambda s: of_ours(ours.steps(s, learn=False, policy="none")),
        "paper's rule": lambda s: of_ours(ours.steps(s, learn=False, mode="paper")),
        "OVC": lambda s: of_rival(ovc.steps(s, learn=False), "Z"),
        "Bui et al.": lambda s: of_rival(bui.steps(s, learn=False), "Z"),
        "Csato & Opper": lambda s: of_rival(csato.steps(s, learn=False), "basis"),
    },
    "learnt": {
        "ours": lambda s: of_ours(ours.steps(s)),
        "ours, no memory": lambda s: of_ours(ours.steps(s, policy="none")),
        "paper's rule": lambda s: of_ours(ours.steps(s, mode="paper", inducing="adapt")),
        "OVC": lambda s: of_rival(ovc.steps(s), "Z"),
        "Bui et al.": lambda s: of_rival(bui.steps(s, iterations=100), "Z"),
        "Csato & Opper": lambda s: of_rival(csato.steps(s), "basis"),
    },
}

#: Rows of the figure, part and name, drawn for the first seed of the sorted stream.
DRAWN = (("fixed", "ours"), ("fixed", "OVC"), ("learnt", "ours"), ("learnt", "Bui et al."))


def units(options: Options) -> tuple[dict[str, Any], list[Unit]]:
    """All methods, orders and seeds."""
    seeds = options.repeats or (1 if options.quick else 3)
    m = 10 if options.quick else 25
    work = []
    for seed in range(seeds):
        for order in ORDERS[: 1 if options.quick else None]:
            key = f"{order}/offline/offline/seed{seed}"
            work.append(Unit(key, partial(measure_offline, order, seed, m, options.quick)))
            for part, methods in METHODS.items():
                for name in methods:
                    measure_one = partial(measure, order, part, name, seed, m, options.quick)
                    work.append(Unit(f"{order}/{part}/{name}/seed{seed}", measure_one))
    return {"quick": options.quick, "m": m, "batches": BATCHES, "dtype": "float64"}, work


def banana(order: str, seed: int, m: int, quick: bool = False) -> Stream:
    """The stream.

    Args:
        order: ``"sorted"`` by the first input, or ``"shuffled"``.
        seed: Of the shuffle, and of the choice of ``m`` training inputs as inducing points.
        m: Their number.
        quick: Whether to use made data.
    """
    if quick:
        X, y = load("made_classes")
        train, test = (X[:100], y[:100]), (X[200:], y[200:])
    else:
        tables = [
            np.loadtxt(find(f"uci/banana_{part}.csv"), delimiter=",", skiprows=1)
            for part in ("train", "test")
        ]
        train, test = ((table[:, :2], (table[:, 2] > 0).astype(float)) for table in tables)
    X, y = train
    shuffled = np.random.default_rng(seed).permutation(len(y))
    Z = torch.from_numpy(X[shuffled[:m]])
    index = np.argsort(X[:, 0], kind="stable") if order == "sorted" else shuffled
    pieces = [
        (torch.from_numpy(X[part]), torch.from_numpy(y[part]).unsqueeze(-1))
        for part in np.array_split(index, BATCHES)
    ]
    return Stream(pieces, (torch.from_numpy(test[0]), torch.from_numpy(test[1])[:, None]), Z, False)


def grid() -> Tensor:
    """``GRID^2 x 2`` points of the plane."""
    side = torch.linspace(-EXTENT, EXTENT, GRID, dtype=torch.float64)
    return torch.cartesian_prod(side, side)


@torch.no_grad()
def probability(predict: Callable[[Tensor], Latent], X: Tensor) -> Tensor:
    """Of the class 1."""
    mean, variance, _ = predict(X)
    return torch.special.ndtr(mean / (1 + variance).sqrt())


@lru_cache(maxsize=4)
def _offline(seed: int, m: int, quick: bool) -> Any:
    """The model of all data, for which there is no order."""
    stream = banana("shuffled", seed, m, quick)
    return ours.fitted_to(stream, *stream.everything)


def measure_offline(order: str, seed: int, m: int, quick: bool) -> dict[str, Any]:
    """All data at once."""
    stream = banana(order, seed, m, quick)
    model = _offline(seed, m, quick)
    predict = partial(ours.latent, model)
    result: dict[str, Any] = {**score(stream, predict), **_hyperparameters(model.covar_module)}
    if seed == 0 and order == "sorted":
        result["drawn"] = [pack(probability(predict, grid()))]
        points = [torch.cat([X, Y], -1) for X, Y in stream.pieces]
        result["points"] = [pack(piece) for piece in points]
    return result


def measure(
    order: str, part: str, name: str, seed: int, m: int, quick: bool = False
) -> dict[str, Any]:
    """One method: its scores after the last batch, and its distance from offline learning."""
    stream = banana(order, seed, m, quick)
    with known_warnings():
        model = _offline(seed, m, quick)
        if part == "fixed":
            stream = replace(
                stream,
                Z=model.variational_strategy.inducing_points.detach().clone(),
                lengthscale=model.covar_module.base_kernel.lengthscale.item(),
                variance=model.covar_module.outputscale.item(),
            )
        reference = probability(partial(ours.latent, model), grid())
        panels, curve = [], []
        for now in METHODS[part][name](stream):
            p = probability(now.predict, grid())
            panels.append({"p": pack(p), "Z": pack(now.Z), "memory": pack(now.memory)})
            curve.append(round(score(stream, now.predict)["nlpd"], 4))
    difference = p - reference
    result = {
        **score(stream, now.predict),
        "distance": float(difference.square().mean().sqrt()),
        "largest": float(difference.abs().max()),
        "nlpd_by_batch": curve,
    }
    if seed == 0 and order == "sorted" and (part, name) in DRAWN:
        result["drawn"] = panels
    return result


def _hyperparameters(kernel: Any) -> dict[str, float]:
    return {
        "lengthscale": round(kernel.base_kernel.lengthscale.item(), 4),
        "variance": round(kernel.outputscale.item(), 4),
    }


def render(units: dict[str, dict[str, Any]], directory: Path) -> str:
    """A table for each order, and the figure."""
    titles = {
        "offline": "all data at once",
        "fixed": "(a) hyperparameters of the offline model",
        "learnt": "(b) everything learnt",
    }
    parts = [
        "Means (standard deviations) over seeds, which choose the first inducing points and the "
        "shuffle. *Distance* is that of the class probabilities on a grid from those of the "
        "offline model, root mean square and largest. OVC and Csato & Opper have no rule for "
        "hyperparameters: in (b) they have those of offline learning of the first batch. Bui et "
        "al.: 100 iterations of L-BFGS a batch, which is better than 20 here. The paper's "
        "rule chooses inducing points by pivoted Cholesky, as its text has it, which is better "
        "here than learning them. Memory of both: 10 points a batch. Measured before with the "
        "reference code of the paper, everything learnt: offline error .100, NLPD .253; streaming "
        ".104-.107, .269-.278; Bui .102, .239-.243."
    ]
    for order in ORDERS:
        lines = [
            f"Batches {order}:",
            "",
            "| | | test NLPD | test error | distance | largest |",
            "|---|---|---|---|---|---|",
        ]
        for part, title in titles.items():
            for name in {"offline": 0, **METHODS["fixed"]} if part != "offline" else {"offline": 0}:
                rows = [
                    unit for key, unit in units.items() if key.startswith(f"{order}/{part}/{name}/")
                ]
                if rows:
                    cells = [
                        _cell([row[column] for row in rows if column in row])
                        for column in ("nlpd", "error", "distance", "largest")
                    ]
                    lines.append(f"| {title} | {name} | " + " | ".join(cells) + " |")
        if len(lines) > 4:
            parts.append("\n".join(lines))
    figure = plot(units, directory)
    return "\n\n".join([*parts, *([f"![class probabilities]({figure})"] if figure else [])])


def _cell(values: list[float]) -> str:
    if not values:
        return ""
    spread = f" ({statistics.stdev(values):.4f})" if len(values) > 1 else ""
    return f"{statistics.mean(values):.4f}{spread}"


def plot(units: dict[str, dict[str, Any]], directory: Path) -> str | None:
    """One row a method, one panel a batch; returns the file's name, if anything was drawn."""
    offline = units.get("sorted/offline/offline/seed0")
    keys = [(part, name, f"sorted/{part}/{name}/seed0") for part, name in DRAWN]
    rows = [(part, name, units[key]["drawn"]) for part, name, key in keys if key in units]
    if offline is None or not rows:
        return None
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    side = np.linspace(-EXTENT, EXTENT, GRID)
    reference = unpack(offline["drawn"][0], GRID).T
    data = [unpack(piece, 3) for piece in offline["points"]]
    figure, axes = plt.subplots(
        len(rows),
        BATCHES,
        figsize=(2.6 * BATCHES, 2.6 * len(rows) + 0.3),
        sharex=True,
        sharey=True,
        squeeze=False,
        layout="constrained",
    )
    titles = {"fixed": "hyperparameters fixed", "learnt": "everything learnt"}
    for line, (part, name, panels) in zip(axes, rows, strict=True):
        for batch, (panel, drawn) in enumerate(zip(line, panels, strict=True)):
            p = unpack(drawn["p"], GRID).T
            panel.contourf(side, side, p, np.linspace(0, 1, 21), cmap="RdBu_r", alpha=0.6)
            panel.contour(side, side, p, [0.5], colors="black", linewidths=1.8)
            panel.contour(side, side, reference, [0.5], colors="C1", linestyles="--")
            for old in data[:batch]:
                panel.scatter(*old[:, :2].T, s=3, color="0.6", linewidths=0)
            x = data[batch]
            colours = np.where(x[:, 2] > 0.5, "#b2182b", "#2166ac")
            panel.scatter(*x[:, :2].T, s=9, c=colours, edgecolors="white", linewidths=0.3)
            panel.scatter(*unpack(drawn["Z"], 2).T, s=22, c="black", marker="+", linewidths=0.9)
            memory = unpack(drawn["memory"], 2)
            panel.scatter(*memory.T, s=26, facecolors="none", edgecolors="#2ca02c", linewidths=1)
            panel.set(xlim=(-EXTENT, EXTENT), ylim=(-EXTENT, EXTENT), aspect="equal")
            panel.set(xticks=[], yticks=[])
        line[0].set_ylabel(f"{name}\n{titles[part]}")
    for batch, panel in enumerate(axes[0]):
        panel.set_title(f"batch {batch + 1}", fontsize=10)
    figure.supxlabel(
        "probability of the class 1 (black: one half; orange: offline model), batch at hand, "
        "older data (grey), inducing points (+), memory (o)",
        fontsize=8,
    )
    path = directory / "banana.png"
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path.name

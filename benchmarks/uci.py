"""The paper's streaming tables: six data sets, each in pieces that are seen once.

Inputs (and regression targets) standardised, ten folds, the training fold sorted by its first
input and split into 50 sets (mammographic: 20); Matern-5/2 with one lengthscale, m = 100, at most
10 more points in the memory after each set. Test negative log predictive density.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from benchmarks.baselines.bui import bui
from benchmarks.baselines.ours import offline, ours, paper
from benchmarks.runner import Options, Unit
from benchmarks.streams import Latent, Stream, fold_of, score


class DataSet(NamedTuple):
    """A data set, the figures that the paper prints for it, and what ours is to reach."""

    regression: bool
    num_pieces: int
    offline: str = ""
    paper: str = ""
    bui: str = ""
    target: float = float("nan")


DATA_SETS = {
    "elevators": DataSet(True, 50, ".50 (.01)", ".57 (.02)", ".57 (.02)", 0.53),
    "bike": DataSet(True, 50, ".24 (.03)", ".44 (.03)", ".49 (.03)", 0.25),
    "mammographic_ref": DataSet(False, 20, ".40 (.04)", ".41 (.05)", ".42 (.05)", 0.41),
    "bank_ref": DataSet(False, 50, ".25 (.03)", ".26 (.03)", ".28 (.04)", 0.26),
    "mushroom_ref": DataSet(False, 50, ".00 (.00)", ".02 (.00)", ".08 (.01)", 0.01),
    "adult_ref": DataSet(False, 50, ".32 (.00)", ".35 (.01)", ".36 (.00)", 0.34),
}
QUICK = {"made_regression": DataSet(True, 4), "made_classes": DataSet(False, 4)}

METHODS: dict[str, Callable[..., Callable[[Tensor], Latent]]] = {
    "ours": ours,
    "ours, random memory": partial(ours, policy="random"),
    "ours, no memory": partial(ours, policy="none"),
    "ours, ARD": partial(ours, ard=True),
    "paper's rule": paper,
    "Bui et al.": bui,
    "offline": offline,
    "offline, ARD": partial(offline, ard=True),
}


def units(options: Options) -> tuple[dict[str, Any], list[Unit]]:
    """Every method on every data set, fold by fold, the streams sorted and shuffled."""
    data_sets = QUICK if options.quick else DATA_SETS
    m = 10 if options.quick else 100
    folds = options.repeats or (1 if options.quick else 10)
    work = [
        Unit(
            f"{order}/{name}/{method}/fold{fold}",
            partial(measure, name, data_set, method, fold, order, m),
        )
        for fold in range(folds)
        for order in ("sorted", "shuffled")
        for name, data_set in data_sets.items()
        for method in METHODS
        if order == "sorted" or "offline" not in method  # for which there is no order
    ]
    return {"quick": options.quick, "dtype": "float64", "m": m}, work


def measure(
    name: str, data_set: DataSet, method: str, fold: int, order: str, m: int
) -> dict[str, Any]:
    """Train one method on one stream, and score it."""
    stream: Stream = fold_of(name, data_set.regression, fold, data_set.num_pieces, order, m)
    start = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        predict = METHODS[method](stream)
        train_seconds = time.perf_counter() - start
        return {**score(stream, predict), "train_seconds": round(train_seconds, 2)}


def render(units: dict[str, dict[str, Any]], directory: Path) -> str:
    """One table an order: rows are data sets, columns methods, with means over folds."""
    parts = []
    for order in ("sorted", "shuffled"):
        chosen = {key: unit for key, unit in units.items() if key.startswith(order + "/")}
        if chosen:
            parts.append(_table(order, chosen))
    return "\n\n".join(parts)


def _table(order: str, units: dict[str, dict[str, Any]]) -> str:
    rows: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for key, unit in units.items():
        _, name, method, _ = key.split("/")
        rows.setdefault(name, {}).setdefault(method, []).append(unit)
    methods = [method for method in METHODS if any(method in row for row in rows.values())]
    lines = [
        f"Streams {order}: test NLPD, mean (standard deviation) over the folds measured, their "
        "number, and seconds of training. The figures printed in the paper are marked P; the last "
        "column is what ours is to reach.",
        "",
        "| | " + " | ".join(methods) + " | P offline | P method | P Bui | target |",
        "|---" * (len(methods) + 5) + "|",
    ]
    for name, known in {**DATA_SETS, **QUICK}.items():
        if name not in rows:
            continue
        cells = [_cell(rows[name].get(method, [])) for method in methods]
        printed = (known.offline, known.paper, known.bui, f"{known.target:.2f}")
        lines.append(f"| {name.removesuffix('_ref')} | " + " | ".join([*cells, *printed]) + " |")
    return "\n".join(lines)


def _cell(units: list[dict[str, Any]]) -> str:
    if not units:
        return ""
    values = [unit["nlpd"] for unit in units]
    spread = f" ({statistics.stdev(values):.3f})" if len(values) > 1 else ""
    seconds = statistics.mean(unit["train_seconds"] for unit in units)
    return f"{statistics.mean(values):.3f}{spread}, {len(values)}, {seconds:.0f} s"

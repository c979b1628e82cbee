"""Predictions of a stream against the time to learn it, at fixed hyperparameters.

Adult, in 50 pieces, m = 100. Hyperparameters and inducing points are those of offline learning of
2,000 of the data, the same for all methods, so that only variational parameters are learnt; with
them, all data at once give the score to reach, that of *offline*. After each piece the clocks stop,
the test set is scored, and the clocks go on. One thread: on an idle machine its processor time is
the time on the wall; on a shared one, it is what can be compared.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.baselines import bui, csato, ours, ovc
from benchmarks.known_warnings import known_warnings
from benchmarks.runner import Options, Unit
from benchmarks.streams import Latent, Stream, fold_of, score

DATA, QUICK = ("adult_ref", 50, 100), ("made_classes", 4, 10)  # name, pieces, m
FITTED = 2000
ORDERS = ("shuffled", "sorted")

Predict = Callable[[Tensor], Latent]


def _predictors(models: Iterator[Any]) -> Iterator[Predict]:
    for model in models:
        yield model.predict


def _ours(stream: Stream, **options: Any) -> Iterator[Predict]:
    for model in ours.steps(stream, learn=False, inducing="fixed", **options):
        yield partial(ours.latent, model)


#: From a stream to predictions after each piece.
METHODS: dict[str, Callable[[Stream], Iterator[Predict]]] = {
    "ours": _ours,
    "ours, no memory": partial(_ours, policy="none"),
    "paper's rule": partial(_ours, mode="paper"),
    "Bui et al., L-BFGS": lambda s: _predictors(
        bui.steps(s, learn=False, natural=False, iterations=100)
    ),
    "Bui et al., L-BFGS (20)": lambda s: _predictors(
        bui.steps(s, learn=False, natural=False, iterations=20)
    ),
    "Bui et al., natural gradients": lambda s: _predictors(bui.steps(s, learn=False, iterations=0)),
    "OVC": lambda s: _predictors(ovc.steps(s, learn=False)),
    "Csato & Opper": lambda s: _predictors(csato.steps(s, learn=False)),
}


def units(options: Options) -> tuple[dict[str, Any], list[Unit]]:
    """All methods in both orders; the methods of a fold follow each other."""
    name, pieces, m = QUICK if options.quick else DATA
    folds = options.repeats or (1 if options.quick else 2)
    work = [
        Unit(f"{order}/{method}/fold{fold}", partial(measure, name, pieces, m, method, order, fold))
        for fold in range(folds)
        for order in ORDERS
        for method in METHODS
    ]
    settings = {"quick": options.quick, "data": name, "pieces": pieces, "m": m, "threads": 1}
    return settings, work


@lru_cache(maxsize=1)
def _offline(name: str, m: int, fold: int) -> dict[str, Any]:
    """Hyperparameters and inducing points, and the score that they have with all data."""
    stream = fold_of(name, False, fold, 1, "shuffled", m)
    X, Y = stream.everything
    model = ours.fitted_to(stream, X[:FITTED], Y[:FITTED])
    known: dict[str, Any] = {
        "Z": model.variational_strategy.inducing_points.detach().clone(),
        "lengthscale": model.covar_module.base_kernel.lengthscale.item(),
        "variance": model.covar_module.outputscale.item(),
    }
    everything = ours.fitted_to(replace(stream, **known), X, Y, learn=False)
    return {**known, "nlpd": score(stream, partial(ours.latent, everything))["nlpd"]}


def measure(name: str, pieces: int, m: int, method: str, order: str, fold: int) -> dict[str, Any]:
    """Seconds of learning so far, by both clocks, and test NLPD, after each piece."""
    known = dict(_offline(name, m, fold))
    offline = known.pop("nlpd")
    stream = replace(fold_of(name, False, fold, pieces, order, m), **known)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    seconds: list[float] = []
    walls: list[float] = []
    nlpd: list[float] = []
    with known_warnings():
        for _ in METHODS[method](replace(stream, pieces=stream.pieces[:2])):
            pass  # what the first call of anything costs is not counted
        spent, start = (0.0, 0.0), _clocks()
        for predict in METHODS[method](stream):
            now = _clocks()
            spent = (spent[0] + now[0] - start[0], spent[1] + now[1] - start[1])
            seconds.append(round(spent[0], 4))
            walls.append(round(spent[1], 4))
            nlpd.append(round(score(stream, predict)["nlpd"], 5))
            start = _clocks()
    torch.set_num_threads(threads)
    return {
        "elapsed": seconds,
        "wall": walls,
        "nlpd": nlpd,
        "offline": round(offline, 5),
        "lengthscale": round(known["lengthscale"], 4),
        "variance": round(known["variance"], 4),
    }


def _clocks() -> tuple[float, float]:
    """Processor time and time on the wall."""
    return time.process_time(), time.perf_counter()


def seconds_until(unit: dict[str, Any], target: float) -> float | None:
    """When a method was first at least as good as ``target``, ``None`` if never."""
    reached = (s for s, n in zip(unit["elapsed"], unit["nlpd"], strict=True) if n <= target)
    return next(reached, None)


def render(units: dict[str, dict[str, Any]], directory: Path) -> str:
    """One table an order, and a figure."""
    parts = [
        "Adult in 50 pieces, m = 100, one thread; lengthscale, variance and inducing points of "
        f"offline learning of {FITTED:,} observations, the same for all; *offline* has all data at "
        "once, with these. Test NLPD at the end, seconds of learning in all by "
        "processor time and on the wall (of a machine with other work), and processor seconds "
        "until the NLPD was first within .01 and .002 of the offline model's; means over folds, - "
        "if a fold never got there. *Bui et al.* maximise their bound over q by L-BFGS, "
        "100 iterations a piece as in the paper, or 20; *natural gradients* is the same bound by "
        "the steps that ours takes, which is not in their paper. Csato & Opper choose basis "
        "vectors of their own."
    ]
    for order in ORDERS:
        lines = [
            f"Pieces {order}:",
            "",
            "| | folds | NLPD | seconds | on the wall | within .01 | within .002 |",
            "|---|---|---|---|---|---|---|",
        ]
        offline = {}
        for method in METHODS:
            rows = [u for key, u in units.items() if key.startswith(f"{order}/{method}/")]
            if not rows:
                continue
            offline |= {row["offline"]: None for row in rows}
            cells = [
                f"{len(rows)}",
                f"{statistics.mean(row['nlpd'][-1] for row in rows):.4f}",
                f"{statistics.mean(row['elapsed'][-1] for row in rows):.2f}",
                f"{statistics.mean(row['wall'][-1] for row in rows):.2f}",
                *(_reached(rows, margin) for margin in (0.01, 0.002)),
            ]
            lines.append(f"| {method} | " + " | ".join(cells) + " |")
        if offline:
            lines.append(f"| offline | {len(offline)} | {statistics.mean(offline):.4f} | | | | |")
            parts.append("\n".join(lines))
    figure = plot(units, directory)
    return "\n\n".join([*parts, *([f"![NLPD against seconds]({figure})"] if figure else [])])


def _reached(rows: list[dict[str, Any]], margin: float) -> str:
    times = [seconds_until(row, row["offline"] + margin) for row in rows]
    known = [t for t in times if t is not None]
    return f"{statistics.mean(known):.2f}" if len(known) == len(times) else "-"


def plot(units: dict[str, dict[str, Any]], directory: Path) -> str | None:
    """NLPD of the first fold against seconds."""
    chosen = {
        order: {m: units[k] for m in METHODS if (k := f"{order}/{m}/fold0") in units}
        for order in ORDERS
    }
    if not any(chosen.values()):
        return None
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(11, 4.2), sharey=True, layout="constrained")
    colours = dict(zip(METHODS, ("C3", "C1", "C8", "C0", "C9", "C2", "C4", "C7"), strict=True))
    for panel, (order, methods) in zip(axes, chosen.items(), strict=True):
        for method, unit in methods.items():
            width = 2.4 if method == "ours" else 1.3
            panel.semilogx(
                unit["elapsed"], unit["nlpd"], color=colours[method], label=method, linewidth=width
            )
            panel.plot(unit["elapsed"][-1], unit["nlpd"][-1], "o", color=colours[method], ms=4)
        if methods:
            offline = next(iter(methods.values()))["offline"]
            panel.axhline(offline, color="black", linestyle="--", linewidth=1, label="offline")
            best = min(min(unit["nlpd"]) for unit in methods.values())
            panel.set_ylim(best - 0.003, best + 0.09)
        panel.set(title=f"pieces {order}", xlabel="processor seconds of learning, one thread")
    axes[0].set_ylabel("test NLPD")
    axes[0].legend(frameon=False, fontsize=8)
    path = directory / "timing.png"
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path.name

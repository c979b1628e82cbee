"""Ax experiments: best valid value by trial, and what a trial costs as trials grow.

All ways use Ax's `Client` with the same seed and so the same quasi-random trials; they differ in
the generation strategy, and in what they are told of trials that fail.
"""

from __future__ import annotations

import logging
import math
import statistics
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from botorch.test_functions import Hartmann
from botorch.test_functions.synthetic import ConstrainedGramacy, ConstrainedHartmann
from torch import Tensor

from benchmarks.runner import Options, Unit

#: How a strategy hears of a failure, and which strategy it is.
WAYS = {
    "penalised": "Ax's default, failures have the worst value seen",
    "failed": "Ax's default, failures marked failed",
    "abandoned": "Ax's default, failures marked abandoned",
    "ours": "ours, failures marked failed",
}


class Problem(NamedTuple):
    """What is minimised, with an optimum that is known, and where it can be evaluated."""

    make: Callable[[], Any]
    trials: int
    fails: bool


PROBLEMS = {
    "Hartmann6": Problem(lambda: Hartmann().double(), 100, False),
    "Gramacy": Problem(lambda: ConstrainedGramacy().double(), 40, True),
    "ConstrainedHartmann6": Problem(lambda: ConstrainedHartmann().double(), 60, True),
}
NUM_INITIAL = 5


def units(options: Options) -> tuple[dict[str, Any], list[Unit]]:
    """All ways on each problem, for each seed; two on the long experiment."""
    quick = options.quick
    seeds = options.repeats or (1 if quick else 5)
    work = []
    for seed in range(seeds):
        for name, problem in PROBLEMS.items():
            if quick and name != "Gramacy":
                continue
            ways = WAYS if problem.fails else {"failed": "", "ours": ""}
            trials = 8 if quick else problem.trials
            work += [
                Unit(f"regret/{name}/{way}/seed{seed}", partial(measure, name, way, seed, trials))
                for way in ways
            ]
    long = 12 if quick else 300
    for seed in range(1 if quick else 2):
        work += [
            Unit(f"long/Hartmann6/{way}/seed{seed}", partial(measure, "Hartmann6", way, seed, long))
            for way in ("failed", "ours")
        ]
    return {"quick": quick, "initial": NUM_INITIAL, "long": long}, work


def measure(name: str, way: str, seed: int, trials: int) -> dict[str, Any]:
    """Values by trial (``None`` where it failed), and seconds for each ``get_next_trials``."""
    from ax.api.client import Client
    from ax.api.configs import RangeParameterConfig

    import seqgp.ax

    problem = PROBLEMS[name].make()
    client = Client(random_seed=seed)
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    client.configure_experiment(
        [
            RangeParameterConfig(
                name=f"x{i}", parameter_type="float", bounds=(float(lower), float(upper))
            )
            for i, (lower, upper) in enumerate(problem.bounds.T)
        ]
    )
    client.configure_optimization(objective="-y")
    if way == "ours":
        client.set_generation_strategy(
            seqgp.ax.generation_strategy(num_initial=NUM_INITIAL, seed=seed)
        )
    else:
        client.configure_generation_strategy(
            initialization_budget=NUM_INITIAL, initialization_random_seed=seed
        )
    values: list[float | None] = []
    wall, cpu = [], []
    penalised: list[int] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        while len(values) < trials:
            start = time.perf_counter(), time.process_time()
            (index, parameters), *_ = client.get_next_trials(max_trials=1).items()
            wall.append(time.perf_counter() - start[0])
            cpu.append(time.process_time() - start[1])
            x = torch.tensor([list(parameters.values())], dtype=torch.double)
            valid = not PROBLEMS[name].fails or bool(problem.is_feasible(x))
            values.append(float(problem(x)) if valid else None)
            tell(client, index, values, valid, way, penalised)
    logging.disable(disabled)
    return {
        "values": values,
        "wall": [round(seconds, 4) for seconds in wall],
        "cpu": [round(seconds, 4) for seconds in cpu],
    }


def tell(
    client: Any,
    index: int,
    values: list[float | None],
    valid: bool,
    way: str,
    penalised: list[int],
) -> None:
    """Tell a client how a trial went; penalties follow the worst value seen."""
    known = [value for value in values if value is not None]
    if valid:
        client.complete_trial(index, raw_data={"y": values[-1]})
        if way == "penalised" and known[-1] == max(known):
            for other in penalised:
                client.attach_data(other, raw_data={"y": known[-1]})
    elif way == "penalised" and known:
        client.complete_trial(index, raw_data={"y": max(known)})
        penalised.append(index)
    elif way == "abandoned":
        client.mark_trial_abandoned(index)
    else:
        client.mark_trial_failed(index)


def regret(name: str, values: list[float | None]) -> Tensor:
    """Of the best valid value so far; NaN before the first."""
    optimum = float(PROBLEMS[name].make().optimal_value)
    numbers = torch.tensor([math.inf if value is None else value for value in values])
    best = numbers.cummin(0).values - optimum
    return torch.where(best.isinf(), torch.nan, best)


def render(units: dict[str, dict[str, Any]], directory: Path) -> str:
    """A table of regret and failures for each problem, one of times, and a figure."""
    curves: dict[str, dict[str, Tensor]] = {}
    lines = [
        "| problem | | seeds | regret half-way, median | regret at the end, median (range) "
        "| failed trials, median |",
        "|---|---|---|---|---|---|",
    ]
    for name in PROBLEMS:
        for way, label in WAYS.items():
            rows = [u for key, u in units.items() if key.startswith(f"regret/{name}/{way}/")]
            if not rows:
                continue
            label = label if PROBLEMS[name].fails else label.split(",")[0]
            runs = torch.stack([regret(name, row["values"]) for row in rows])
            curves.setdefault(name, {})[label] = runs
            final = sorted(runs[:, -1].tolist())
            failed = statistics.median(sum(v is None for v in row["values"]) for row in rows)
            lines.append(
                f"| {name}, {runs.shape[1]} trials | {label} | {len(rows)} "
                f"| {runs[:, runs.shape[1] // 2 - 1].nanmedian():.4f} "
                f"| {statistics.median(final):.4f} ({final[0]:.4f}-{final[-1]:.4f}) | {failed:g} |"
            )
    lines += ["", *render_times(units)]
    lines += ["", f"![regret and time]({plot(curves, units, directory)})"]
    return "\n".join(lines)


def render_times(units: dict[str, dict[str, Any]]) -> list[str]:
    """Seconds for each ``get_next_trials``, mean over stretches of the long experiment."""
    lines = [
        "| trials | | seeds | wall seconds a trial | processor seconds a trial "
        "| regret, median |",
        "|---|---|---|---|---|---|",
    ]
    long = {way: _rows(units, f"long/Hartmann6/{way}/") for way in ("failed", "ours")}
    lengths = [len(row["wall"]) for rows in long.values() for row in rows]
    if not lengths:
        return []
    total = min(lengths)
    step = max(total // 6, 1)
    for end in range(step, total + 1, step):
        for way, rows in long.items():
            if not rows:
                continue
            part = slice(end - step, end)
            wall = statistics.mean(statistics.mean(row["wall"][part]) for row in rows)
            cpu = statistics.mean(statistics.mean(row["cpu"][part]) for row in rows)
            final = [float(regret("Hartmann6", row["values"])[end - 1]) for row in rows]
            label = WAYS[way].split(",")[0]
            lines.append(
                f"| {end - step + 1}-{end} | {label} | {len(rows)} | {wall:.2f} | {cpu:.2f} "
                f"| {statistics.median(final):.4f} |"
            )
    return lines


def _rows(units: dict[str, dict[str, Any]], prefix: str) -> list[dict[str, Any]]:
    return [unit for key, unit in units.items() if key.startswith(prefix)]


def plot(
    curves: dict[str, dict[str, Tensor]], units: dict[str, dict[str, Any]], directory: Path
) -> str:
    """Regret by trial on each problem, and processor seconds by trial."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    count = len(curves) + 1
    figure, axes = plt.subplots(1, count, figsize=(4.2 * count, 3.6), layout="constrained")
    colours = {label: f"C{k}" for k, label in enumerate(WAYS.values())}
    for axis, (name, ways) in zip(axes, curves.items(), strict=False):
        for label, runs in ways.items():
            colour = next(c for full, c in colours.items() if full.startswith(label))
            if label.startswith("Ax's default") and "," not in label:
                colour = "C1"
            x = range(1, runs.shape[1] + 1)
            for run in runs.clamp_min(1e-5):
                axis.semilogy(x, run, color=colour, alpha=0.2, linewidth=0.7)
            axis.semilogy(
                x, runs.nanmedian(0).values.clamp_min(1e-5), color=colour, label=label
            )
        axis.set(xlabel="trials", ylabel="regret of the best valid value", title=name)
        axis.legend(frameon=False, fontsize=7)
    for way, colour in (("failed", "C1"), ("ours", "C3")):
        for row in _rows(units, f"long/Hartmann6/{way}/"):
            label = WAYS[way].split(",")[0]
            axes[-1].plot(row["cpu"], ".", markersize=2, color=colour, label=label)
    axes[-1].set(xlabel="trials", ylabel="processor seconds a trial", title="Hartmann6")
    handles, labels = axes[-1].get_legend_handles_labels()
    unique = dict(zip(labels, handles, strict=True))
    axes[-1].legend(unique.values(), unique.keys(), frameon=False, markerscale=5)
    path = directory / "ax.png"
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path.name

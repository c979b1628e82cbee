"""Ax experiments: best valid value by trial, and the cost of a trial as trials accumulate.

All methods use Ax's `Client` with the same seed, and so the same quasi-random trials. They differ
in the generation strategy, and in the data that they get of failed trials.
"""

from __future__ import annotations

import logging
import math
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from botorch.test_functions import Hartmann
from botorch.test_functions.synthetic import ConstrainedGramacy, ConstrainedHartmann
from torch import Tensor
from torch.quasirandom import SobolEngine

from benchmarks.known_warnings import known_warnings
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
    ways: tuple[str, ...]


PROBLEMS = {
    "Hartmann6": Problem(lambda: Hartmann().double(), 60, False, ("failed", "ours")),
    "Gramacy": Problem(lambda: ConstrainedGramacy().double(), 30, True, tuple(WAYS)),
    "ConstrainedHartmann6": Problem(
        lambda: ConstrainedHartmann().double(), 40, True, ("failed", "ours")
    ),
}
NUM_INITIAL = 5
INITIAL_NODES = ("CenterOfSearchSpace", "Sobol")

#: Trials that there are when the cost of the next ones is measured, and how many of these.
SIZES, STEPS = (50, 100, 200, 300), 6

#: Trials of the long experiment.
LONG = 300


def units(options: Options) -> tuple[dict[str, Any], list[Unit]]:
    """All ways on each problem, for each seed; the cost of a trial; a long experiment."""
    quick = options.quick
    seeds = options.repeats or (1 if quick else 5)
    work = []
    for seed in range(seeds):
        for name, problem in PROBLEMS.items():
            if quick and name != "Gramacy":
                continue
            trials = 7 if quick else problem.trials
            work += [
                Unit(f"regret/{name}/{way}/seed{seed}", partial(measure, name, way, seed, trials))
                for way in problem.ways
            ]
    work += [
        Unit(f"cost/{size}/{way}", partial(measure_cost, size, way, 2 if quick else STEPS))
        for size in ((10,) if quick else SIZES)
        for way in ("failed", "ours")
    ]
    if not quick:
        work += [
            Unit(f"long/Hartmann6/{way}/seed0", partial(measure, "Hartmann6", way, 0, LONG))
            for way in ("failed", "ours")
        ]
    return {"quick": quick, "initial": NUM_INITIAL, "steps": STEPS}, work


def make_client(name: str, way: str, seed: int) -> Any:
    """A client with an experiment and a generation strategy."""
    from ax.api.client import Client
    from ax.api.configs import RangeParameterConfig

    import seqgp.ax

    client = Client(random_seed=seed)
    client.configure_experiment(
        [
            RangeParameterConfig(
                name=f"x{i}", parameter_type="float", bounds=(float(lower), float(upper))
            )
            for i, (lower, upper) in enumerate(PROBLEMS[name].make().bounds.T)
        ]
    )
    client.configure_optimization(objective="-y")
    if way == "ours":
        strategy = seqgp.ax.generation_strategy(num_initial=NUM_INITIAL, seed=seed)
        client.set_generation_strategy(strategy)
    else:
        client.configure_generation_strategy(
            initialization_budget=NUM_INITIAL, initialization_random_seed=seed
        )
    return client


@contextmanager
def quietly() -> Iterator[None]:
    """Without the messages that Ax logs at each trial."""
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    with known_warnings():
        yield
    logging.disable(disabled)


def timed_next(client: Any) -> tuple[int, Tensor, float, float]:
    """The next trial: its index, its input ``1 x d``, wall and processor seconds."""
    start = time.perf_counter(), time.process_time()
    (index, parameters), *_ = client.get_next_trials(max_trials=1).items()
    wall, cpu = time.perf_counter() - start[0], time.process_time() - start[1]
    x = torch.tensor([list(parameters.values())], dtype=torch.double)
    return index, x, round(wall, 4), round(cpu, 4)


def measure(name: str, way: str, seed: int, trials: int) -> dict[str, Any]:
    """Values by trial (``None`` where it failed), and seconds for each ``get_next_trials``."""
    problem = PROBLEMS[name].make()
    values: list[float | None] = []
    wall, cpu = [], []
    penalised: list[int] = []
    with quietly():
        client = make_client(name, way, seed)
        while len(values) < trials:
            index, x, *seconds = timed_next(client)
            wall.append(seconds[0])
            cpu.append(seconds[1])
            valid = not PROBLEMS[name].fails or bool(problem.is_feasible(x))
            values.append(float(problem(x)) if valid else None)
            tell(client, index, values, valid, way, penalised)
    return {"values": values, "wall": wall, "cpu": cpu}


def measure_cost(size: int, way: str, steps: int) -> dict[str, Any]:
    """Seconds for the next trials of an experiment that has some already.

    Half of them are quasi-random, half around the optimum, as in an experiment that has come far.
    The first is left out: both fit a model from scratch for it. What ours spends on fits from
    scratch, whenever data have grown by a fifth, is part of the long experiment's times.
    """
    problem = PROBLEMS["Hartmann6"].make()
    generator = torch.Generator().manual_seed(0)
    X = SobolEngine(6, scramble=True, seed=0).draw(size).double()
    near = problem.optimizers[0] + 0.1 * torch.randn(size, 6, generator=generator)
    X[size // 2 :] = near[size // 2 :].clamp(0, 1)
    wall, cpu = [], []
    with quietly():
        client = make_client("Hartmann6", way, 0)
        for x in X:
            index = client.attach_trial({f"x{i}": float(value) for i, value in enumerate(x)})
            client.complete_trial(index, raw_data={"y": float(problem(x))})
        while client._generation_strategy.current_node_name in INITIAL_NODES:
            index, x, *_ = timed_next(client)
            client.complete_trial(index, raw_data={"y": float(problem(x))})
        for _ in range(steps):
            index, x, *seconds = timed_next(client)
            client.complete_trial(index, raw_data={"y": float(problem(x))})
            wall.append(seconds[0])
            cpu.append(seconds[1])
    return {"wall": wall, "cpu": cpu}


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
            half, final = (sorted(_numbers(runs[:, k])) for k in (runs.shape[1] // 2 - 1, -1))
            failed = statistics.median(sum(v is None for v in row["values"]) for row in rows)
            lines.append(
                f"| {name}, {runs.shape[1]} trials | {label} | {len(rows)} "
                f"| {statistics.median(half):.4f} "
                f"| {statistics.median(final):.4f} ({final[0]:.4f}-{final[-1]:.4f}) | {failed:g} |"
            )
    lines += ["", *render_times(units)]
    lines += ["", f"![regret and time]({plot(curves, units, directory)})"]
    return "\n".join(lines)


def _numbers(column: Tensor) -> list[float]:
    """Regrets at some trial, infinite where nothing valid has been found."""
    return torch.where(column.isnan(), math.inf, column).tolist()


def render_times(units: dict[str, dict[str, Any]]) -> list[str]:
    """Seconds for each ``get_next_trials``."""
    lines = [
        "| trials so far | | wall seconds a trial, median | processor seconds a trial, median |",
        "|---|---|---|---|",
    ]
    for key, unit in units.items():
        if not key.startswith("cost/"):
            continue
        _, size, way = key.split("/")
        wall, cpu = (statistics.median(unit[clock]) for clock in ("wall", "cpu"))
        lines.append(f"| {size} | {WAYS[way].split(',')[0]} | {wall:.2f} | {cpu:.2f} |")
    long = {way: _rows(units, f"long/Hartmann6/{way}/") for way in ("failed", "ours")}
    if not any(long.values()):
        return lines
    lines += [
        "",
        "| a long experiment, trials | | seeds | processor seconds, mean | regret, median |",
        "|---|---|---|---|---|",
    ]
    for end in range(50, LONG + 1, 50):
        for way, rows in long.items():
            if not rows:
                continue
            cpu = statistics.mean(statistics.mean(row["cpu"][end - 50 : end]) for row in rows)
            last = statistics.median(
                float(regret("Hartmann6", row["values"])[end - 1]) for row in rows
            )
            label = WAYS[way].split(",")[0]
            lines.append(f"| {end - 49}-{end} | {label} | {len(rows)} | {cpu:.2f} | {last:.4f} |")
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
            axis.semilogy(x, runs.nanquantile(0.5, 0).clamp_min(1e-5), color=colour, label=label)
        axis.set(xlabel="trials", ylabel="regret of the best valid value", title=name)
        axis.legend(frameon=False, fontsize=7)
    for way, colour in (("failed", "C1"), ("ours", "C3")):
        label = WAYS[way].split(",")[0]
        points = {
            int(key.split("/")[1]): statistics.median(unit["cpu"])
            for key, unit in units.items()
            if key.startswith("cost/") and key.endswith(way)
        }
        axes[-1].plot(*zip(*sorted(points.items()), strict=True), "o-", color=colour, label=label)
        for row in _rows(units, f"long/Hartmann6/{way}/"):
            axes[-1].plot(row["cpu"], ".", markersize=2, color=colour)
    axes[-1].set(xlabel="trials", ylabel="processor seconds a trial", title="Hartmann6, cost")
    axes[-1].set_ylim(bottom=0)
    axes[-1].legend(frameon=False)
    path = directory / "ax.png"
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path.name

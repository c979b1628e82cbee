"""An Ax experiment in which trials fail and the metric is a count, from `Client()` to the best.

Run ``python -m tutorials.ax_experiment``; ``--short`` takes fewer trials. A machine moulds parts.
Its temperature and its pressure are to be set such that few of the parts are defective: a trial
makes a tray of them and counts. If it is too hot for the pressure, the machine jams and there is
nothing to count: the trial has failed. The best settings are not far from where it jams.

Two experiments are run, through the same `Client`. One has Ax's default generation strategy, which
forgets about failed trials and takes counts for Gaussian. The other has that of `seqgp.ax`, one
line more. The figure is saved as ``figures/ax_experiment.png``.
"""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any, NamedTuple

import torch
from ax.api.client import Client
from ax.api.configs import RangeParameterConfig
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

import seqgp.ax
from seqgp.progress import progress_bar
from tutorials import common

TRIALS, SHORT = 30, 9
TEMPERATURE, PRESSURE = (180.0, 260.0), (40.0, 120.0)
WAYS = {"ours": "seqgp.ax", "default": "Ax's default"}


# ---------------------------------------------------------------- the machine


def rate(temperature: Tensor, pressure: Tensor) -> Tensor:
    """The number of defects to be expected on a tray."""
    t, p = (temperature - 231) / 25, (pressure - 58) / 25
    return 2.0 + 14 * (t - 0.5 * p).square() + 9 * (p + 0.3 * t).square()


def works(temperature: Tensor, pressure: Tensor) -> Tensor:
    """Where the machine does not jam."""
    return temperature + 0.45 * pressure < 266 + 6 * torch.sin(pressure / 12)


def run_tray(parameters: Any, generator: torch.Generator) -> float | None:
    """The number of defects, or nothing if the machine jams."""
    t, p = (torch.tensor(float(parameters[name])) for name in ("temperature", "pressure"))
    if not works(t, p):
        return None
    return float(torch.poisson(rate(t, p), generator=generator))


def best_there_is() -> float:
    """The least rate of defects, on a fine grid."""
    t, p = _grid(400)
    return float(rate(t, p)[works(t, p)].min())


# ---------------------------------------------------------------- the experiments


class Run(NamedTuple):
    """An experiment at its end: the client, and by trial its parameters and its count."""

    client: Client
    X: Tensor  # n x 2
    counts: list[float | None]


def experiment(way: str, trials: int, seed: int = 0) -> Run:
    """All there is to it: configure, then ask and tell."""
    client = Client(random_seed=seed)
    client.configure_experiment(
        [
            RangeParameterConfig(name="temperature", parameter_type="float", bounds=TEMPERATURE),
            RangeParameterConfig(name="pressure", parameter_type="float", bounds=PRESSURE),
        ]
    )
    client.configure_optimization(objective="-defects")
    if way == "ours":  # the one line
        client.set_generation_strategy(
            seqgp.ax.generation_strategy(likelihoods={"defects": "poisson"}, seed=seed)
        )
    else:
        client.configure_generation_strategy(initialization_random_seed=seed)

    generator = torch.Generator().manual_seed(seed)
    X, counts = [], []
    for _ in progress_bar(range(trials), desc=WAYS[way], leave=False):
        for index, parameters in client.get_next_trials(max_trials=1).items():
            count = run_tray(parameters, generator)
            if count is None:
                client.mark_trial_failed(index)
            else:
                client.complete_trial(index, raw_data={"defects": count})
            X.append([parameters["temperature"], parameters["pressure"]])
            counts.append(count)
    return Run(client, torch.tensor(X, dtype=torch.double), counts)


def recommended(run: Run) -> tuple[dict[str, Any], float]:
    """The best parameters according to Ax and the models, and how good they really are."""
    parameters, *_ = run.client.get_best_parameterization()
    t, p = (torch.tensor(float(parameters[name])) for name in ("temperature", "pressure"))
    return dict(parameters), float(rate(t, p))


def best_so_far(run: Run) -> Tensor:
    """The least rate among the trials so far that worked."""
    t, p = run.X.unbind(-1)
    return torch.where(works(t, p), rate(t, p), torch.inf).cummin(0).values


# ---------------------------------------------------------------- the figure


def _grid(n: int) -> tuple[Tensor, Tensor]:
    """``n x n`` temperatures and pressures."""
    t, p = (torch.linspace(*bounds, n, dtype=torch.double) for bounds in (TEMPERATURE, PRESSURE))
    return torch.meshgrid(t, p, indexing="ij")


def draw_trials(axes: Axes, run: Run, title: str) -> None:
    """What is true, and where trials were made."""
    t, p = _grid(200)
    truth = torch.where(works(t, p), rate(t, p), torch.nan)
    axes.contourf(t, p, truth, levels=[2, 3, 5, 8, 12, 20, 30, 50, 90], cmap="YlGnBu_r")
    axes.contourf(t, p, (~works(t, p)).double(), levels=[0.5, 1.5], colors="0.85")
    axes.text(246, 112, "jams", color="0.4")
    failed = torch.tensor([count is None for count in run.counts])
    axes.scatter(*run.X[~failed].T, c="#f05d23", s=26, edgecolors="white", label="counted")
    axes.scatter(*run.X[failed].T, c="black", s=30, marker="x", label="failed")
    parameters, true_rate = recommended(run)
    axes.scatter(
        parameters["temperature"],
        parameters["pressure"],
        s=190,
        marker="*",
        c="#f2a541",
        edgecolors="black",
        zorder=5,
        label=f"recommended: rate {true_rate:.1f}",
    )
    axes.set(title=title, xlabel="temperature", ylabel="pressure")
    axes.legend(loc="lower left", fontsize=8)


def draw_models(left: Axes, right: Axes, run: Run) -> None:
    """What ours has learnt: the probability that the machine works, and the rate of defects."""
    n = 40
    t, p = _grid(n)
    points = [
        {"temperature": a, "pressure": b}
        for a, b in zip(t.flatten().tolist(), p.flatten().tolist(), strict=True)
    ]
    valid = torch.tensor(seqgp.ax.probability_of_validity(run.client, points)).reshape(n, n)
    shown = left.contourf(t, p, valid, levels=torch.linspace(0, 1, 11), cmap="RdBu", alpha=0.8)
    left.figure.colorbar(shown, ax=left)
    left.contour(t, p, works(t, p).double(), levels=[0.5], colors="black", linestyles="--")
    left.set(title="learnt: probability that it works (dashed: truth)", xlabel="temperature")
    rates = torch.tensor([each["defects"][0] for each in run.client.predict(points)]).reshape(n, n)
    levels = [1, 2, 3, 5, 8, 12, 20, 30, 50, 90]
    shown = right.contourf(t, p, rates, levels=levels, cmap="YlGnBu_r", extend="both")
    right.figure.colorbar(shown, ax=right)
    right.contour(t, p, rate(t, p), levels=[3, 8, 20], colors="black", linestyles="--")
    right.set(title="learnt: defects on a tray (dashed: truth)", xlabel="temperature")


def draw(runs: dict[str, Run]) -> Path:
    """All of it."""
    figure = Figure(figsize=(15, 9), layout="constrained")
    axes = figure.subplots(2, 3)
    for column, way in enumerate(WAYS):
        draw_trials(axes[0, column], runs[way], WAYS[way])
    draw_models(axes[1, 0], axes[1, 1], runs["ours"])
    for way, colour in (("ours", "#12355b"), ("default", "#f05d23")):
        best = best_so_far(runs[way])
        axes[0, 2].step(range(1, len(best) + 1), best, where="post", c=colour, label=WAYS[way])
        failed = torch.tensor([count is None for count in runs[way].counts]).cumsum(0)
        axes[1, 2].step(range(1, len(best) + 1), failed, where="post", c=colour, label=WAYS[way])
    axes[0, 2].axhline(best_there_is(), color="0.6", linestyle=":", label="best there is")
    axes[0, 2].set(xlabel="trials", ylabel="rate of defects", title="best trial so far, in truth")
    axes[0, 2].set_yscale("log")
    axes[0, 2].set_yticks([2, 3, 5, 10, 20], ["2", "3", "5", "10", "20"])
    axes[0, 2].minorticks_off()
    axes[1, 2].set(xlabel="trials", ylabel="failed trials", title="trials that failed")
    axes[0, 2].legend()
    axes[1, 2].legend()
    path = Path("figures") / "ax_experiment.png"
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=100)
    return path


def main() -> None:
    """Two experiments, a table, a figure."""
    given = common.parser(__doc__).parse_args()
    common.begin(given)
    trials = SHORT if given.short else TRIALS
    logging.disable(logging.WARNING)  # Ax reports every trial
    print(f"best rate of defects there is: {best_there_is():.2f}\n")
    print("strategy       trials  failed  best tried  recommended: temperature  pressure  rate")
    runs = {}
    for way, label in WAYS.items():
        run = runs[way] = experiment(way, trials)
        parameters, true_rate = recommended(run)
        failed = sum(count is None for count in run.counts)
        best = float(best_so_far(run)[-1])
        tried = f"{best:10.2f}" if math.isfinite(best) else f"{'none':>10}"
        print(
            f"{label:14} {trials:6d} {failed:7d}  {tried}  {parameters['temperature']:24.1f}"
            f"  {parameters['pressure']:8.1f}  {true_rate:4.1f}"
        )
    print(f"\nThe figure is in {draw(runs)}.")


if __name__ == "__main__":
    main()

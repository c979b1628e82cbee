"""An Ax experiment with failed trials
===================================

A machine that jams, and a metric that is a count.

Run ``python -m tutorials.ax_experiment``; ``--short`` has fewer trials. A machine moulds parts. The
task is to choose its temperature and pressure such that few parts are defective: a trial makes a
tray of parts and counts the defects. If the temperature is too high for the pressure, the machine
jams and the trial fails. The best settings are close to those at which it jams.

There are two experiments with the same `Client`. One has Ax's default generation strategy, which
ignores failed trials and models counts as Gaussian. The other has that of `seqgp.ax`, which takes
one more line. The figure is saved as ``figures/ax_experiment.png``.
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


# %%
# The machine
# -----------


def rate(temperature: Tensor, pressure: Tensor) -> Tensor:
    """The expected number of defects on a tray."""
    t, p = (temperature - 231) / 25, (pressure - 58) / 25
    return 2.0 + 14 * (t - 0.5 * p).square() + 9 * (p + 0.3 * t).square()


def works(temperature: Tensor, pressure: Tensor) -> Tensor:
    """Whether the machine works (and does not jam)."""
    return temperature + 0.45 * pressure < 266 + 6 * torch.sin(pressure / 12)


def run_tray(parameters: Any, generator: torch.Generator) -> float | None:
    """The number of defects, ``None`` if the machine jams."""
    t, p = (torch.tensor(float(parameters[name])) for name in ("temperature", "pressure"))
    if not works(t, p):
        return None
    return float(torch.poisson(rate(t, p), generator=generator))


def best_there_is() -> float:
    """The lowest rate of defects, on a fine grid."""
    t, p = _grid(400)
    return float(rate(t, p)[works(t, p)].min())


# %%
# The experiments
# ---------------


class Run(NamedTuple):
    """A finished experiment: the client, and the parameters and counts of its trials."""

    client: Client
    X: Tensor  # n x 2
    counts: list[float | None]


def experiment(way: str, trials: int, seed: int = 0) -> Run:
    """Configure an experiment, and run it."""
    client = Client(random_seed=seed)
    client.configure_experiment(
        [
            RangeParameterConfig(name="temperature", parameter_type="float", bounds=TEMPERATURE),
            RangeParameterConfig(name="pressure", parameter_type="float", bounds=PRESSURE),
        ]
    )
    client.configure_optimization(objective="-defects")
    if way == "ours":
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
    """The best parameters according to the model, and their true rate of defects."""
    parameters, *_ = run.client.get_best_parameterization()
    t, p = (torch.tensor(float(parameters[name])) for name in ("temperature", "pressure"))
    return dict(parameters), float(rate(t, p))


def best_so_far(run: Run) -> Tensor:
    """The lowest true rate of the trials so far that did not fail."""
    t, p = run.X.unbind(-1)
    return torch.where(works(t, p), rate(t, p), torch.inf).cummin(0).values


# %%
# The figure
# ----------


def _grid(n: int) -> tuple[Tensor, Tensor]:
    """``n x n`` temperatures and pressures."""
    t, p = (torch.linspace(*bounds, n, dtype=torch.double) for bounds in (TEMPERATURE, PRESSURE))
    return torch.meshgrid(t, p, indexing="ij")


def draw_trials(axes: Axes, run: Run, title: str) -> None:
    """Draw the truth and the trials."""
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
    """Draw what our models have learnt: the probability of validity, and the rate of defects."""
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
    """Draw the figure."""
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


# %%
# Results
# -------


def main() -> None:
    """Run both experiments; print a table and draw a figure."""
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

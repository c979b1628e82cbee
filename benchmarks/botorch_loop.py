"""A BoTorch loop of 200 evaluations that conditions between refits, against refitting each step.

Hartmann6, one point a step by LogEI, from the same initial points. Three ways: `SingleTaskGP`
refitted at each step (what BoTorch's tutorials do), `SequentialGP` refitted at each step, and
`SequentialGP` that is conditioned on each new observation and refitted every 20. Seconds are those
spent on the model; the acquisition function is optimised alike for all.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from botorch.acquisition import LogExpectedImprovement
from botorch.fit import fit_gpytorch_mll
from botorch.models import SingleTaskGP
from botorch.models.transforms import Standardize
from botorch.optim import optimize_acqf
from botorch.test_functions import Hartmann
from botorch.utils.sampling import draw_sobol_samples
from gpytorch.mlls import ExactMarginalLogLikelihood
from torch import Tensor

from benchmarks.known_warnings import known_warnings
from benchmarks.runner import Options, Unit
from seqgp import DualELBO, SequentialGP

INITIAL = 12
WAYS = {
    "exact": "SingleTaskGP, refitted each step",
    "refit": "SequentialGP, refitted each step",
    "condition": "SequentialGP, conditioned, refitted every 20",
}


def units(options: Options) -> tuple[dict[str, Any], list[Unit]]:
    """All ways for each seed."""
    evaluations = 24 if options.quick else 200
    seeds = options.repeats or (1 if options.quick else 5)
    work = [
        Unit(f"{way}/seed{seed}", partial(measure, way, seed, evaluations))
        for seed in range(seeds)
        for way in WAYS
    ]
    settings = {"quick": options.quick, "evaluations": evaluations, "initial": INITIAL}
    return settings, work


def fit_exact(X: Tensor, Y: Tensor) -> SingleTaskGP:
    """BoTorch's exact GP."""
    model = SingleTaskGP(X, Y, outcome_transform=Standardize(1))
    fit_gpytorch_mll(ExactMarginalLogLikelihood(model.likelihood, model))
    return model


def fit_sparse(X: Tensor, Y: Tensor) -> SequentialGP:
    """Ours, with an inducing point for each evaluation."""
    model = SequentialGP(X, Y, inducing_points=len(X), outcome_transform=Standardize(1))
    fit_gpytorch_mll(DualELBO(model.likelihood, model))
    return model


def measure(way: str, seed: int, evaluations: int) -> dict[str, Any]:
    """Simple regret and seconds spent on the model, by evaluation."""
    torch.manual_seed(seed)
    problem = Hartmann(negate=True).double()
    bounds = torch.tensor([[0.0] * 6, [1.0] * 6], dtype=torch.float64)
    X = draw_sobol_samples(bounds, INITIAL, 1, seed=seed).squeeze(1)
    Y = problem(X).unsqueeze(-1)
    fit: Callable[[Tensor, Tensor], Any] = fit_exact if way == "exact" else fit_sparse
    seconds, regret, model = 0.0, [], None
    with known_warnings():
        for step in range(evaluations - INITIAL):
            start = time.perf_counter()
            if model is None or way != "condition" or step % 20 == 0:
                model = fit(X, Y)
            else:
                model = model.condition_on_observations(X[-1:], Y[-1:])
            seconds += time.perf_counter() - start
            candidate, _ = optimize_acqf(
                LogExpectedImprovement(model, best_f=Y.max()),
                bounds,
                q=1,
                num_restarts=4,
                raw_samples=128,
                options={"maxiter": 50},
            )
            X = torch.cat([X, candidate])
            Y = torch.cat([Y, problem(candidate).unsqueeze(-1)])
            regret.append(float(problem.optimal_value - Y.max()))
    return {"model_seconds": seconds, "regret": regret}


def render(units: dict[str, dict[str, Any]], directory: Path) -> str:
    """Regret and time of each way, and a figure."""
    lines = [
        "| | regret at the end, median (range) | seconds on the model, median | seconds in all |",
        "|---|---|---|---|",
    ]
    curves = {}
    for way, label in WAYS.items():
        rows = [unit for key, unit in units.items() if key.startswith(f"{way}/")]
        if not rows:
            continue
        final = sorted(row["regret"][-1] for row in rows)
        curves[label] = torch.tensor([row["regret"] for row in rows])
        lines.append(
            f"| {label} | {statistics.median(final):.4f} ({final[0]:.4f}-{final[-1]:.4f}) "
            f"| {statistics.median(row['model_seconds'] for row in rows):.1f} "
            f"| {statistics.median(row['seconds'] for row in rows):.1f} |"
        )
    lines += ["", f"![simple regret]({plot(curves, directory)})"]
    return "\n".join(lines)


def plot(curves: dict[str, Tensor], directory: Path) -> str:
    """Regret against evaluations, each seed thin, the median thick."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    for (label, runs), colour in zip(curves.items(), ("C7", "C0", "C3"), strict=False):
        x = range(INITIAL + 1, INITIAL + 1 + runs.shape[1])
        for run in runs.clamp_min(1e-4):
            axes.semilogy(x, run, color=colour, alpha=0.25, linewidth=0.8)
        axes.semilogy(x, runs.median(0).values.clamp_min(1e-4), color=colour, label=label)
    axes.set(xlabel="evaluations", ylabel="simple regret, Hartmann6")
    axes.legend(frameon=False)
    path = directory / "botorch_loop.png"
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return path.name

"""Hidden failing regions: regret with failures learnt and penalised; the cost of a batch.

Constrained problems of BoTorch whose constraints are seen only as pass or fail, and whose values
are not seen where they fail. All ways start from the same points, propose batches of three and
learn hyperparameters for each, with the same optimisers. The defaults of ours for the model of
validity were chosen on seeds from 100 on.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from botorch.models.transforms import Standardize
from botorch.test_functions import Ackley, Hartmann
from botorch.test_functions.synthetic import (
    ConstrainedGramacy,
    ConstrainedHartmann,
    ConstrainedSyntheticTestFunction,
)
from botorch.utils.sampling import draw_sobol_samples
from gpytorch.likelihoods import BernoulliLikelihood
from torch import Tensor

from benchmarks.baselines.qlognei import qlognei_batch
from benchmarks.baselines.scbo import SCBO
from benchmarks.known_warnings import known_warnings
from benchmarks.runner import Options, Unit
from seqgp import SequentialGP
from seqgp.acquisition import best_valid, fantasy_batch, valid_improvement
from seqgp.batch_optimizer import BatchOptimizer

BATCH = 3
OPTIMIZE: dict[str, Any] = {"num_restarts": 4, "raw_samples": 256, "options": {"maxiter": 40}}
FIT = {"maxiter": 50}


class ConstrainedAckley(Ackley, ConstrainedSyntheticTestFunction):
    """Ackley's function with two constraints of Eriksson and Poloczek (2021), in 20 dimensions.

    The sum of the inputs is at most zero, and their norm at most 14. (The domain is smaller than
    that of the paper, and the ball larger: about a tenth of random points are valid. Otherwise
    pass and fail alone would not tell where to begin.) The optimum is where the sum is zero.
    """

    num_constraints = 2

    def __init__(self, noise_std: None = None, negate: bool = False) -> None:
        super().__init__(dim=20, noise_std=noise_std, negate=negate, bounds=[(-5.0, 6.0)] * 20)

    def _evaluate_slack_true(self, X: Tensor) -> Tensor:
        return torch.stack([-X.sum(-1), 14 - X.norm(dim=-1)], -1)


#: Problem, initial evaluations, evaluations in all.
PROBLEMS: dict[str, tuple[Callable[..., ConstrainedSyntheticTestFunction], int, int]] = {
    "Gramacy": (ConstrainedGramacy, 6, 30),
    "Hartmann": (ConstrainedHartmann, 24, 48),
    "Ackley (20-d)": (ConstrainedAckley, 40, 160),
}
WAYS = {
    "learnt": "failures learnt (ours)",
    "region": "failures learnt, in a trust region (ours)",
    "qlognei": "qLogNEI, Gaussian 0/1",
    "scbo": "SCBO, Gaussian 0/1",
    "penalised": "failures have the worst value",
    "random": "random",
}


def units(options: Options) -> tuple[dict[str, Any], list[Unit]]:
    """All ways for each problem and seed, and the cost of a batch."""
    quick = options.quick
    seeds = options.repeats or (1 if quick else 10)
    work = [
        Unit(
            f"regret/{name}/{way}/seed{seed}",
            partial(measure, name, way, seed, initial + BATCH if quick else total),
        )
        for seed in range(seeds)
        for name, (_, initial, total) in PROBLEMS.items()
        for way in WAYS
        if not quick or name == "Gramacy"
    ]
    m, q = (30, 3) if quick else (200, 16)
    work.append(Unit("cost", partial(measure_cost, m, q)))
    return {"quick": quick, "batch": BATCH, "fit": FIT}, work


def regret_of(problem: ConstrainedSyntheticTestFunction, Y: Tensor, valid: Tensor) -> list[float]:
    """The regret of the best valid value after each evaluation; of none, that of the worst one."""
    values = torch.where(valid, Y, torch.nan)
    worst = float(values[valid].min()) if valid.any() else -math.inf
    best = torch.where(valid, Y, worst).cummax(0).values
    return (problem.optimal_value - best).tolist()


def measure(name: str, way: str, seed: int, evaluations: int) -> dict[str, Any]:
    """Regret after each evaluation, and how many failed."""
    make, initial, _ = PROBLEMS[name]
    torch.manual_seed(seed)
    problem = make(negate=True).double()
    bounds = problem.bounds.double()

    def evaluate(X: Tensor) -> tuple[Tensor, Tensor]:
        valid = problem.is_feasible(X)
        return torch.where(valid, problem(X), torch.nan), valid

    X = draw_sobol_samples(bounds, initial, 1, seed=seed).squeeze(1)
    start = time.perf_counter()
    with known_warnings():
        if way == "random":
            number = evaluations - initial
            X = torch.cat([X, draw_sobol_samples(bounds, number, 1, seed=1000 + seed).squeeze(1)])
        elif way == "qlognei":
            X = run_qlognei(X, evaluate, evaluations, bounds)
        elif way == "scbo":
            X = run_scbo(X, evaluate, evaluations, bounds, seed)
        else:
            X = run_ours(X, evaluate, evaluations, bounds, way, seed)
    Y, valid = evaluate(X)
    return {
        "regret": regret_of(problem, Y, valid),
        "failed": int((~valid[initial:]).sum()),
        "run_seconds": time.perf_counter() - start,
    }


def run_ours(
    X: Tensor, evaluate: Any, evaluations: int, bounds: Tensor, way: str, seed: int
) -> Tensor:
    """The loop: as it is, in a trust region, or with the worst value for failures."""
    loop = BatchOptimizer(
        bounds,
        num_initial=1,
        refit_every=BATCH,
        fit_options=FIT,
        seed=seed,
        trust_region=way == "region",
        **OPTIMIZE,
    )
    asked = X
    while True:
        Y, valid = evaluate(X)
        if way == "penalised":
            known = torch.cat([loop.Y, Y[valid]])
            loop.tell(X, torch.where(valid, Y, known.min() if len(known) else 0.0))
        else:
            loop.tell(X, Y, valid)
        if len(asked) >= evaluations:
            return asked
        X = loop.ask(BATCH)
        asked = torch.cat([asked, X])


def run_qlognei(X: Tensor, evaluate: Any, evaluations: int, bounds: Tensor) -> Tensor:
    """BoTorch's way, or random points as long as nothing is valid."""
    while len(X) < evaluations:
        Y, valid = evaluate(X)
        if valid.any():
            new = qlognei_batch(X, Y, valid, bounds, BATCH, FIT, OPTIMIZE)
        else:
            new = draw_sobol_samples(bounds, BATCH, 1, seed=len(X)).squeeze(1)
        X = torch.cat([X, new])
    return X


def run_scbo(X: Tensor, evaluate: Any, evaluations: int, bounds: Tensor, seed: int) -> Tensor:
    """SCBO; after a restart as many initial points as at first."""
    loop = SCBO(bounds, BATCH, len(X), FIT, seed)
    while True:
        loop.tell(X, *evaluate(X))
        if len(loop.X) >= evaluations:
            return loop.X
        X = loop.ask()


def measure_cost(m: int, q: int, rounds: int = 3) -> dict[str, Any]:
    """Processor seconds for a batch of ``q`` and for ``q`` single proposals, in turns."""
    torch.manual_seed(0)
    bounds = torch.tensor([[0.0] * 6, [1.0] * 6], dtype=torch.float64)
    X = draw_sobol_samples(bounds, m, 1, seed=0).squeeze(1)
    Y = Hartmann(negate=True).double()(X).unsqueeze(-1)
    valid = X.sum(-1, keepdim=True) < 3.3
    with known_warnings():
        objective = SequentialGP(
            X, Y, inducing_points=m, outcome_transform=Standardize(1)
        )  # the values of failures, too, for as many inducing points
        validity = SequentialGP(X, valid.to(X), likelihood=BernoulliLikelihood(), inducing_points=m)
        acquisition = valid_improvement(best_valid(Y, valid))

        def propose(number: int) -> float:
            start = time.process_time()  # on a machine with other work
            fantasy_batch(acquisition, [objective, validity], bounds, number)
            return time.process_time() - start

        propose(1)
        times = [(propose(q), sum(propose(1) for _ in range(q))) for _ in range(rounds)]
    return {"m": m, "q": q, "batch": [t[0] for t in times], "singles": [t[1] for t in times]}


def render(units: dict[str, dict[str, Any]], directory: Path) -> str:
    """Log regret at the end by problem and way, the cost of a batch, and a figure."""
    lines = [
        "Log10 of the regret of the best valid evaluation at the end, median (range), and the "
        "share of the evaluations that were chosen which failed:",
        "",
        "| | " + " | ".join(f"{name} | failed" for name in PROBLEMS) + " |",
        "|---" * (1 + 2 * len(PROBLEMS)) + "|",
    ]
    curves: dict[str, dict[str, Tensor]] = {}
    for way, label in WAYS.items():
        cells = []
        for name, (_, initial, _) in PROBLEMS.items():
            rows = [u for key, u in units.items() if key.startswith(f"regret/{name}/{way}/")]
            if not rows:
                cells += ["", ""]
                continue
            runs = torch.tensor([row["regret"] for row in rows]).clamp_min(1e-6).log10()
            curves.setdefault(name, {})[label] = runs
            final = runs[:, -1].sort().values.tolist()
            chosen = runs.shape[1] - initial
            cells.append(
                f"{statistics.median(final):.2f} ({final[0]:.2f} to {final[-1]:.2f}), {len(rows)}"
            )
            cells.append(f"{statistics.mean(row['failed'] / chosen for row in rows):.0%}")
        lines.append(f"| {label} | " + " | ".join(cells) + " |")
    if "cost" in units:
        cost = units["cost"]
        ratio = statistics.median(
            a / b for a, b in zip(cost["batch"], cost["singles"], strict=True)
        )
        lines += [
            "",
            f"A batch of {cost['q']} with m = {cost['m']} takes "
            f"{statistics.median(cost['batch']):.1f} s of processor time, {ratio:.2f} times as "
            f"long as {cost['q']} single proposals (target: at most 2).",
        ]
    if curves:
        lines += ["", f"![regret]({plot(curves, directory)})"]
    return "\n".join(lines)


def plot(curves: dict[str, dict[str, Tensor]], directory: Path) -> str:
    """Log regret against evaluations: each seed thin, the median thick."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    colours = dict(zip(WAYS.values(), ("C3", "C2", "C4", "C1", "C0", "C7"), strict=True))
    figure, axes = plt.subplots(
        1, len(curves), figsize=(5.5 * len(curves), 4), layout="constrained", squeeze=False
    )
    for axis, (name, ways) in zip(axes[0], curves.items(), strict=True):
        initial = PROBLEMS[name][1]
        for label, runs in ways.items():
            x = range(initial, runs.shape[1] + 1)
            for run in runs[:, initial - 1 :]:
                axis.plot(x, run, color=colours[label], alpha=0.2, linewidth=0.7)
            middle = runs.quantile(0.5, dim=0)[initial - 1 :]  # of an even number, between two
            axis.plot(x, middle, color=colours[label], linewidth=2.2, label=label)
        axis.set(title=name, xlabel="evaluations", ylabel="log10 of regret")
        axis.spines[["top", "right"]].set_visible(False)
    axes[0][0].legend(frameon=False, fontsize=9)
    path = directory / "constrained.png"
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return path.name

"""Optimising a function whose evaluations fail
============================================

Evaluations fail in an unknown region. The optimiser learns where.

Run ``python -m tutorials.failures`` (``--short`` for fewer batches). All evaluations of a function
of two inputs fail in a certain region, and return no value there. The maximum of the function is
inside of that region, and the best valid point is at its edge. Batches of four points are proposed
by expected improvement times probability of validity. This is compared with two other strategies:
to ignore failures, and to give them the worst value so far. The figure is saved as
``figures/failures.png``.
"""

from __future__ import annotations

import warnings
from typing import NamedTuple

import torch
from torch import Tensor

from seqgp.batch_optimizer import BatchOptimizer
from seqgp.progress import progress_bar
from tutorials import common
from tutorials.failures_figure import draw

INITIAL = 8
BOUNDS = torch.tensor([[0.0, 0.0], [1.0, 1.0]], dtype=torch.float64)
WAYS = {
    "learnt": "failures are learnt",
    "penalised": "failures get the worst value",
    "left out": "failures are ignored",
}


# %%
# The function
# ------------
#
# It returns no value in a region that the optimiser does not know.


class Plan(NamedTuple):
    """How large the example is."""

    batch: int  # points in a batch
    batches: int
    seeds: int


FULL, SHORT = Plan(4, 7, 3), Plan(3, 2, 1)


def value(X: Tensor) -> Tensor:
    """Two hills on a slope; the higher one is where evaluations fail."""
    x, y = X[..., 0], X[..., 1]
    first = 1.3 * torch.exp(-((x - 0.68) ** 2 + (y - 0.62) ** 2) / 0.08)
    second = 0.8 * torch.exp(-((x - 0.2) ** 2 + (y - 0.25) ** 2) / 0.03)
    return first + second + 0.2 * (x - y)


def works(X: Tensor) -> Tensor:
    """Whether evaluations are valid: outside of a curved band through the higher hill."""
    x, y = X[..., 0], X[..., 1]
    return (y - 0.62 - 0.3 * torch.sin(5 * (x - 0.68))).abs() > 0.11


def evaluate(X: Tensor) -> tuple[Tensor, Tensor]:
    """Values and labels: a failed evaluation has no value."""
    valid = works(X)
    return torch.where(valid, value(X), torch.nan), valid


def best_there_is() -> float:
    """The best valid value, on a fine grid."""
    grid = torch.cartesian_prod(*[torch.linspace(0, 1, 1001, dtype=torch.float64)] * 2)
    return float(value(grid)[works(grid)].max())


# %%
# Three strategies
# ----------------
#
# They only differ in what the optimiser is told about failed evaluations.


def optimise(way: str, seed: int, plan: Plan) -> tuple[BatchOptimizer, Tensor]:
    """Run an optimisation; return the optimiser and all points in the order of evaluation."""
    optimizer = BatchOptimizer(
        BOUNDS, num_initial=INITIAL, seed=seed, num_restarts=4, raw_samples=128
    )
    asked = BOUNDS[:0]
    for batch in progress_bar(range(plan.batches + 1), desc=f"{way}, seed {seed}", leave=False):
        X = optimizer.ask(plan.batch if batch else INITIAL)
        asked = torch.cat([asked, X])
        Y, valid = evaluate(X)
        if way == "learnt":
            optimizer.tell(X, Y, valid)
        elif way == "penalised":
            known = torch.cat([optimizer.Y, Y[valid]])
            optimizer.tell(X, torch.where(valid, Y, known.min()))
        else:
            optimizer.tell(X[valid], Y[valid])
            optimizer.num_initial = 1
    return optimizer, asked


def regret(asked: Tensor, best: float) -> Tensor:
    """The regret of the best valid value so far, after each evaluation."""
    Y, valid = evaluate(asked)
    return best - torch.where(valid, Y, -torch.inf).cummax(0).values


# %%
# Results
# -------
#
# The regret of each strategy, averaged over several seeds.


def main(arguments: list[str] | None = None) -> None:
    """A table, and a figure."""
    given = common.parser(__doc__).parse_args(arguments)
    common.begin(given)
    plan = SHORT if given.short else FULL
    warnings.simplefilter("ignore", RuntimeWarning)  # BoTorch's line searches that end early
    best = best_there_is()
    runs: dict[str, list[tuple[BatchOptimizer, Tensor]]] = {}
    print(f"best valid value {best:.4f}\n\nway        regret at the end (seeds)   failed")
    for way in WAYS:
        runs[way] = [optimise(way, seed, plan) for seed in range(plan.seeds)]
        final = [float(regret(asked, best)[-1]) for _, asked in runs[way]]
        failed = sum(int((~works(asked[INITIAL:])).sum()) for _, asked in runs[way])
        total = plan.seeds * plan.batch * plan.batches
        print(f"{way:10} {' '.join(f'{r:.4f}' for r in final):28} {failed / total:.0%}")
    print(f"\nThe figure is in {draw(runs, best, plan.batch)}.")


if __name__ == "__main__":
    main()

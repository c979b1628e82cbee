"""SCBO, against the formulas of its paper, and in the benchmarks that it is a rival in."""

from __future__ import annotations

import math

import pytest
import torch
from scipy import stats
from torch import Tensor

from benchmarks.baselines.scbo import SCBO, Region, candidates, copula, lengthscales, region_bounds
from benchmarks.constrained import PROBLEMS, measure
from tests.helpers import assert_close, make_inputs

pytestmark = pytest.mark.usefixtures("float64")


def test_length_of_the_region() -> None:
    """Three successes double it (d <= 30), d / q failures halve it; either ends a row."""
    region = Region()
    for success, length in [(True, 0.8), (True, 0.8), (True, 1.6), (True, 1.6), (False, 1.6)]:
        region = region.after(success, 12, 3)
        assert region.length == length
    assert (region.successes, region.failures) == (0, 1)
    for length in (1.6, 1.6, 0.8, 0.8, 0.8, 0.8, 0.4):
        region = region.after(False, 12, 3)
        assert region.length == length
    assert Region(1.6).after(True, 10, 1).after(True, 10, 1).after(True, 10, 1).length == 1.6
    region = Region()
    for k in range(5):  # in 50 dimensions five in a row
        assert (region.length, region.successes) == (0.8, k)
        region = region.after(True, 50, 1)
    assert region.length == 1.6


def test_sides_of_the_region() -> None:
    scales = torch.tensor([0.5, 1.0, 4.0])
    centre = torch.tensor([0.5, 0.5, 0.9])
    low, high = region_bounds(centre, 0.1, scales)
    sides = 0.1 * scales / scales.prod() ** (1 / 3)
    assert_close((high - low)[:2], sides[:2], 1e-12)
    assert sides.prod().item() == pytest.approx(1e-3)
    assert_close(low, centre - sides / 2, 1e-12)
    assert high[2] == 1.0


def test_candidates_change_twenty_inputs() -> None:
    centre, box = torch.full((40,), 0.5), torch.tensor([[0.4] * 40, [0.7] * 40])
    X = candidates(centre, box, 0)
    assert X.shape == (5000, 40)
    assert ((X >= 0.4) & (X <= 0.7)).all()
    changed = (centre != X).sum(-1).double()
    assert changed.min() >= 1
    assert abs(changed.mean() - 20) < 4 * math.sqrt(10 / 5000)  # binomial, variance 40 / 4
    assert (candidates(centre[:6], box[:, :6], 0) != centre[:6]).all()
    assert len(candidates(centre[:6], box[:, :6], 0)) == 2000
    assert len(candidates(centre[:15], box[:, :15], 0)) == 3000


def test_copula() -> None:
    Y = make_inputs(9, 1).squeeze(-1) ** 5
    expected = stats.norm.ppf((stats.rankdata(Y) - 0.5) / 9)
    assert_close(copula(Y), torch.tensor(expected), 1e-12)


@pytest.mark.filterwarnings("ignore::linear_operator.utils.warnings.NumericalWarning")
def test_loop() -> None:
    """It stays in the region, improves, and starts again when the region is too short."""
    bounds = torch.tensor([[-1.0, -1.0, -1.0], [3.0, 3.0, 3.0]])

    def evaluate(X: Tensor) -> tuple[Tensor, Tensor]:
        valid = X.sum(-1) < 2.5
        return torch.where(valid, -(X - 1).square().sum(-1), torch.nan), valid

    loop = SCBO(bounds, 2, 8, {"maxiter": 20}, 0)
    assert loop.ask().shape == (2, 3)  # nothing is known
    X = bounds[0] + 4 * make_inputs(8, 3)
    loop.tell(X, *evaluate(X))
    assert loop.region == Region()  # initial points move nothing
    first = loop.Y[loop.valid].max()
    loop.region = Region(0.2)
    X = loop.ask()
    best = loop.X[torch.where(loop.valid, loop.Y, -torch.inf).argmax()]
    model = loop._fitted(make_inputs(8, 3), make_inputs(8, 1).squeeze(-1), None)
    assert lengthscales(model).shape == (3,)
    assert ((X - best).abs().prod(-1) <= (0.1 * 4) ** 3).all()
    loop.tell(X, *evaluate(X))
    for _ in range(4):
        X = loop.ask()
        loop.tell(X, *evaluate(X))
    assert loop.Y[loop.valid].max() > first
    loop.region = Region(2.0**-7, failures=1)
    X = bounds[1].repeat(2, 1)  # fails
    loop.tell(X, *evaluate(X))
    assert loop.region == Region(start=len(loop.X))
    assert loop.ask().shape == (2, 3)


@pytest.mark.parametrize("way", ["scbo", "region"])
def test_runs_where_others_do(way: str) -> None:
    unit = measure("Gramacy", way, 0, 9)
    assert len(unit["regret"]) == 9
    assert unit["regret"][-1] <= unit["regret"][5]


def test_the_problem_of_twenty_inputs() -> None:
    problem = PROBLEMS["Ackley (20-d)"][0](negate=True).double()
    X = problem.bounds[0] + 11 * make_inputs(2000, 20)
    valid = problem.is_feasible(X)
    assert 0.05 < valid.double().mean() < 0.25
    inside = (X.sum(-1) <= 0) & (X.square().sum(-1) <= 14**2)
    assert torch.equal(valid, inside)
    origin = torch.zeros(1, 20)
    assert problem.is_feasible(origin).all()
    assert not problem.is_feasible(origin + 1e-6).any()  # the optimum is at the edge
    assert problem(origin).item() == pytest.approx(problem.optimal_value, abs=1e-12)

"""Optimisers of hyperparameters find optima in closed form."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from seqgp.variational.optimise import lbfgs
from tests.helpers import assert_close

pytestmark = pytest.mark.usefixtures("float64")


def evidence_of(parameters: dict[str, Tensor], noise: float) -> Tensor:
    """Minus the evidence of a thousand residuals of a given variance, and a valley beside it."""
    own = parameters["noise"]
    misfit = (parameters["lengthscale"].log() - 3).square().sum() + parameters["mean"].square()
    return 500 * (own.log() + noise / own) + misfit


def started() -> dict[str, Tensor]:
    values = {"noise": 0.1, "lengthscale": 0.5, "mean": 1.0}
    return {name: torch.tensor(value, requires_grad=True) for name, value in values.items()}


BOUNDS = {"noise": (1e-4, None), "lengthscale": (0.025, None)}


@pytest.mark.parametrize("noise", [1e-3, 1e-6])
def test_small_noise_does_not_stop_lengthscales(noise: float) -> None:
    """Which gain 15 nats, far more than the tolerance."""
    parameters = started()
    lbfgs(lambda: evidence_of(parameters, noise), parameters, BOUNDS, steps=40, tol=0.02)
    assert_close(parameters["noise"], torch.tensor(max(noise, 1e-4)), 0.01)
    found = {name: value.detach() for name, value in parameters.items()}
    assert float(found["noise"]) >= 1e-4
    assert float(evidence_of(found, noise) - evidence_of(best(noise), noise)) < 0.5


def best(noise: float) -> dict[str, Tensor]:
    values = {"noise": max(noise, 1e-4), "lengthscale": torch.e**3, "mean": 0.0}
    return {name: torch.tensor(value) for name, value in values.items()}


@pytest.mark.parametrize("noise", [1e-3, 1e-6])
def test_no_point_is_evaluated_twice(noise: float) -> None:
    """Nor is the start, unless it is out of bounds, where SciPy begins elsewhere."""
    parameters = started()
    with torch.no_grad():
        parameters["noise"].fill_(0.5 * BOUNDS["noise"][0] if noise < 1e-4 else 0.1)
    seen: list[tuple[float, ...]] = []

    def loss() -> Tensor:
        seen.append(tuple(float(p.detach()) for p in parameters.values()))
        return evidence_of(parameters, noise)

    lbfgs(loss, parameters, BOUNDS, steps=40, tol=0.02)
    assert len(set(seen)) == len(seen)
    assert seen[0][0] == pytest.approx(5e-5 if noise < 1e-4 else 0.1)
    assert_close(parameters["noise"], torch.tensor(max(noise, 1e-4)), 0.01)


def test_upper_bounds_hold() -> None:
    parameters = started()
    bounds = {"noise": (1e-4, 0.2), "lengthscale": (0.0, 2.0), "mean": (None, None)}
    lbfgs(lambda: evidence_of(parameters, 0.3), parameters, bounds, steps=40, tol=1e-9)
    assert_close(parameters["noise"], torch.tensor(0.2), 1e-8)
    assert_close(parameters["lengthscale"], torch.tensor(2.0), 1e-8)
    assert_close(parameters["mean"], torch.tensor(0.0), 1e-5)


def test_what_is_zero_moves_as_it_is() -> None:
    """Its logarithm would not."""
    parameters = {"scale": torch.tensor(0.0, requires_grad=True)}
    bounds = {"scale": (0.0, None)}
    lbfgs(lambda: (parameters["scale"] - 2).square(), parameters, bounds, steps=40, tol=1e-12)
    assert_close(parameters["scale"], torch.tensor(2.0), 1e-6)

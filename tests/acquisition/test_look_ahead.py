"""The effect of single observations, against conditioned models."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats

from seqgp import BinomialLikelihood
from seqgp.acquisition import look_ahead as steps
from seqgp.acquisition.look_ahead import Marginals, look_ahead, marginals, outcomes
from seqgp.likelihoods.expectations import expectations
from tests.acquisition.helpers import arguments_of, model_of, points
from tests.helpers import assert_close

pytestmark = pytest.mark.usefixtures("float64")


@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no grad"])
@pytest.mark.parametrize("inducing_points", [5, None])
@pytest.mark.parametrize("name", ["gaussian", "bernoulli", "binomial", "poisson", "student_t"])
def test_look_ahead_is_conditioning(
    name: str, inducing_points: int | None, grad: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Means and variances at all locations, for each outcome of each candidate."""
    monkeypatch.setattr(steps, "TOLERANCE", 1e-10)
    monkeypatch.setattr(steps, "EXACT_TOLERANCE", 1e-10)
    monkeypatch.setattr(steps, "PRECISION", torch.float64)
    model, X, locations = model_of(name, inducing_points=inducing_points), *map(points, (4, 9))
    with torch.set_grad_enabled(grad):
        at = marginals(model, X, locations)
        gain, fall, _ = look_ahead(model.likelihood, at, 3, 0, arguments_of(name))
        c = at.cross(slice(None))
    Y, _ = outcomes(
        model.likelihood,
        at.mean.unsqueeze(0),
        at.variance.unsqueeze(0),
        *(3, 0, arguments_of(name)),
    )
    Y = Y.detach()
    conditioned = model.condition_on_observations(
        X.unsqueeze(-2), Y.unsqueeze(-1).unsqueeze(-1), tol=1e-10, **arguments_of(name)
    )
    posterior = conditioned.posterior(locations)
    assert_close(at.location_mean + gain.unsqueeze(-1) * c, posterior.mean.squeeze(-1), 1e-5)
    variance = at.location_variance - fall.unsqueeze(-1) * c.square()
    assert_close(variance, posterior.variance.squeeze(-1), 1e-5)


def test_look_ahead_with_a_nugget_is_exact_to_a_few_percent() -> None:
    """Exact moments of the log odds given a count, by summation on a grid, per outcome.

    The look-ahead is variational, so only as close as a Gaussian is to that posterior.
    """
    model, X, locations = model_of("overdispersed_binomial"), *map(points, (4, 9))
    with torch.no_grad():
        at = marginals(model, X, locations)
        gain, fall, _ = look_ahead(model.likelihood, at, 6, 0, {"total_count": 20})
        total = at.variance + model.likelihood.nugget
        Y, _ = outcomes(BinomialLikelihood(20), at.mean, total, 6, 0, {})
    h = np.linspace(-12, 12, 4001)
    for k in range(6):
        for i in range(4):
            weights = stats.norm(float(at.mean[i]), float(total[i]) ** 0.5).pdf(h)
            weights = weights * stats.binom.pmf(float(Y[k, i]), 20, 1 / (1 + np.exp(-h)))
            weights = weights / weights.sum()
            mean = weights @ h
            variance = weights @ (h - mean) ** 2
            ours = float(at.mean[i] + total[i] * gain[k, i])
            left = float(total[i] - total[i] ** 2 * fall[k, i])
            assert abs(ours - mean) < 0.05 * float(total[i]) ** 0.5
            assert abs(left - variance) < 0.05 * float(total[i])


@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no grad"])
def test_many_trials_where_nothing_is_known(grad: bool) -> None:
    """The plain iteration does not converge there."""
    mean, variance = torch.tensor([-5.0, 0.0, 5.0]), torch.full((3,), 100.0)
    mean.requires_grad_(grad)
    at = Marginals(mean, variance, torch.zeros(3), mean[:0], mean[:0], lambda _: mean)
    likelihood = BinomialLikelihood(500)
    with torch.set_grad_enabled(grad):
        gain, fall, _ = look_ahead(likelihood, at, 3, 0, {})
    Y, _ = outcomes(likelihood, mean[None], variance[None], 3, 0, {})
    shifted, left = mean + variance * gain, variance * (1 - variance * fall)
    with torch.no_grad():
        _, alpha, beta = expectations(likelihood, Y, shifted, left)
    # What solves m' = m + C alpha and 1 / v' = 1 / C + beta, with expectations at (m', v').
    assert_close(shifted, mean + variance * alpha, 1e-3)
    assert_close(left, 1 / (1 / variance + beta), 1e-3)
    if grad:  # about v' / C
        (slope,) = torch.autograd.grad(shifted[0].sum(), mean)
        assert (slope > 0).all()
        assert (slope < 0.05).all()

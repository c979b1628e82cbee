"""The rivals' ways to condition on one more observation are what their papers say."""

from __future__ import annotations

import math

import pytest
import torch
from scipy import optimize

from benchmarks.baselines import lookahead
from seqgp import BinomialLikelihood, SequentialGP
from seqgp.acquisition import expected_reduction, look_ahead
from tests.helpers import assert_close, latent, make_inputs, make_kernel

pytestmark = pytest.mark.usefixtures("float64")


def counts_model(inducing_points: int = 6) -> SequentialGP:
    x = make_inputs(12, 2)
    y = (10 * torch.sigmoid(latent(x))).round().unsqueeze(-1)
    return SequentialGP(
        x,
        y,
        likelihood=BinomialLikelihood(20),
        covar_module=make_kernel(),
        inducing_points=inducing_points,
    )


@torch.no_grad()
def test_paper_look_ahead_is_fixed_inducing_conditioning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(look_ahead, "TOLERANCE", 1e-9)
    model, X, sites = counts_model(), make_inputs(3, 2), make_inputs(7, 2)
    Y = torch.tensor([[0.0, 4.0, 20.0], [11.0, 1.0, 3.0]])
    at, explained = lookahead.fixed_inducing(model, look_ahead.marginals(model, X, sites), X, sites)
    gain, fall = lookahead.fixed_inducing_gains(model.likelihood, Y, at, explained, 20)
    c = at.cross(slice(None))
    for i in range(3):
        for k in range(2):
            posterior = model.condition_on_observations(
                X[i : i + 1], Y[k, i].reshape(1, 1), fixed_inducing=True, tol=1e-10, max_steps=500
            ).posterior(sites)
            assert_close(at.location_mean + gain[k, i] * c[i], posterior.mean.squeeze(-1))
            variance = at.location_variance - fall[k, i] * c[i].square()
            assert_close(variance, posterior.variance.squeeze(-1))


@torch.no_grad()
def test_ovc_look_ahead_is_a_gp_given_the_pseudo_target() -> None:
    """Laplace's mode by bisection, and dense Gaussian conditioning on the pseudo-target."""
    model, X, sites = counts_model(), make_inputs(3, 2), make_inputs(7, 2)
    Y = torch.tensor([[0.0, 4.0, 20.0], [11.0, 1.0, 3.0]])
    at = look_ahead.marginals(model, X, sites)
    gain, fall = lookahead.newton_pseudo_targets(Y, at.mean, at.variance, 20)
    joint = model(torch.cat([X, sites])).covariance_matrix
    for i in range(3):
        m, v, c = float(at.mean[i]), float(at.variance[i]), joint[i, 3:]
        for k in range(2):
            y = float(Y[k, i])
            f = optimize.brentq(
                lambda f, y=y, m=m, v=v: y - 20 / (1 + math.exp(-f)) - (f - m) / v, -30, 30
            )
            p = 1 / (1 + math.exp(-f))
            noise = 1 / (20 * p * (1 - p))
            target = f + (y - 20 * p) * noise
            assert_close(
                at.location_mean + gain[k, i] * c, at.location_mean + c * (target - m) / (v + noise)
            )
            assert_close(fall[k, i] * c.square(), c.square() / (v + noise))


@torch.no_grad()
def test_joint_samples_estimate_the_same_scores() -> None:
    model, X, sites = counts_model(12), make_inputs(3, 2), make_inputs(7, 2)
    left = lookahead.joint_sample_reduction(model, X, sites, 0.4, 20, 64, num_samples=2000)
    scores = expected_reduction(model, X, sites, threshold=0.4, num_fantasies=64)
    # Both up to the present entropy, and to the error of 64 outcomes.
    assert_close(scores - scores.mean(), left - left.mean(), 0.01)
    for way in ("paper", "ovc"):
        rival = lookahead.rival_reduction(way, model, X, sites, 0.4, 20, 64)
        # With an inducing point at every input the two hardly differ from ours.
        assert_close(rival, scores, 0.02)

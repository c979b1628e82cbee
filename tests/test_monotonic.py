"""Monotonic inputs: virtual observations, what a model learns from them, and the loop."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gpytorch.kernels import RBFKernel
from gpytorch.likelihoods import BernoulliLikelihood
from gpytorch.means import ZeroMean
from scipy.special import roots_hermitenorm
from torch import Tensor

from seqgp import SequentialGP
from seqgp.active_learner import ActiveLearner
from seqgp.likelihoods.psychometric import PsychometricLikelihood
from seqgp.monotonic import with_slopes
from tests.best_gaussian import best_gaussian
from tests.helpers import assert_close, make_inputs

pytestmark = pytest.mark.usefixtures("float64")

BOUNDS = [[0.0, -1.0], [2.0, 3.0]]


def model_of(data: Any) -> SequentialGP:
    kernel = RBFKernel()
    kernel.lengthscale = 0.2
    return SequentialGP(
        data.X,
        data.Y,
        likelihood=BernoulliLikelihood(),
        coefficients=data.coefficients,
        covar_module=kernel,
        mean_module=ZeroMean(),
    )


def test_functionals_are_differences() -> None:
    """Of a function that is linear in each input, they are known; labels stay values."""
    bounds = torch.tensor(BOUNDS)
    X = bounds[0] + (bounds[1] - bounds[0]) * make_inputs(5, 2)
    Y = torch.tensor([[0.0], [1.0], [1.0], [0.0], [1.0]])
    data = with_slopes(X, Y, bounds, {0: -1, 1: 1}, number=7, step=0.25, sharpness=8.0)
    f = 3 * data.X[..., 0] + 5 * data.X[..., 1]
    h = (data.coefficients * f).sum(-1)
    assert_close(h[:5], 3 * X[:, 0] + 5 * X[:, 1], 1e-12)
    assert_close(h[5:12], torch.full((7,), -8 * 3 * 0.25 * 2.0), 1e-10)
    assert_close(h[12:], torch.full((7,), 8 * 5 * 0.25 * 4.0), 1e-10)
    assert torch.equal(data.Y[:5], Y)
    assert bool((data.Y[5:] == 1).all())
    assert bool(((bounds[0] <= data.X) & (bounds[1] >= data.X)).all())


def test_posterior_is_the_best_gaussian() -> None:
    """Against an ELBO maximised from scratch, for two labels and two slopes."""
    X, Y = torch.tensor([[0.2], [0.6]]), torch.tensor([[1.0], [0.0]])  # falling, against the rule
    data = with_slopes(X, Y, torch.tensor([[0.0], [1.0]]), {0: 1}, number=2, sharpness=3.0)
    model = model_of(data)
    points = torch.cat([X, data.X[2:].reshape(-1, 1)])
    with torch.no_grad():
        K = model.covar_module(points).to_dense()
    C = torch.zeros(4, 6)
    C[0, 0] = C[1, 1] = 1
    C[2, 2:4], C[3, 4:6] = data.coefficients[2], data.coefficients[3]
    signs = torch.tensor([1.0, -1, 1, 1]).unsqueeze(-1)
    nodes, weights = map(torch.from_numpy, roots_hermitenorm(80))

    def expected_log_prob(mean: Tensor, root: Tensor) -> Tensor:
        h = (C @ mean).unsqueeze(-1) + (C @ root).norm(dim=-1, keepdim=True) * nodes
        return (torch.special.log_ndtr(signs * h) @ (weights / weights.sum())).sum()

    mean, covariance, _ = best_gaussian(K + 1e-8 * torch.eye(6), expected_log_prob)
    posterior = model.posterior(points)
    with torch.no_grad():
        assert_close(posterior.mean.squeeze(-1), mean, 1e-6)
        assert_close(posterior.variance.squeeze(-1), covariance.diagonal(), 1e-6)


def test_few_labels_do_not_break_the_rule() -> None:
    """One wrong answer makes a plain model fall, but not a monotonic one."""
    X = torch.linspace(0, 1, 7).unsqueeze(-1)
    Y = torch.tensor([0.0, 0, 1, 0, 1, 1, 0]).unsqueeze(-1)
    grid = torch.linspace(0, 1, 50).unsqueeze(-1)
    bounds = torch.tensor([[0.0], [1.0]])
    for monotonic, falls in (({}, True), ({0: 1}, False)):
        data = with_slopes(X, Y, bounds, monotonic)
        with torch.no_grad():
            slopes = model_of(data).posterior(grid).mean.diff(dim=0)
        assert bool((slopes < -1e-3).any()) is falls


@pytest.mark.slow
def test_loop_resumes_bit_by_bit() -> None:
    def make() -> ActiveLearner:
        return ActiveLearner(
            torch.tensor(BOUNDS),
            threshold=0.5,
            monotonic={1: 1},
            num_initial=4,
            refit_every=2,
            fit_options={"maxiter": 5},
            num_restarts=1,
            raw_samples=8,
        )

    loop, other = make(), make()
    for _ in range(7):
        X = loop.ask()
        loop.tell(X, X[:, 1] > 0.5 + 0.5 * X[:, 0])
    other.load_state_dict(loop.state_dict())
    assert torch.equal(other.ask(2), loop.ask(2))
    line = torch.stack([torch.ones(20), torch.linspace(-1, 3, 20)], -1)
    assert bool((loop.expected_outcome(line)[0].diff() > -1e-3).all())


@pytest.mark.parametrize("monotonic", [{2: 1}, {0: 2}, {"a": 1}, [1]])
def test_bad_directions(monotonic: Any) -> None:
    with pytest.raises(ValueError, match=r"monotonic: expected \{input: 1 or -1\}"):
        ActiveLearner(torch.tensor(BOUNDS), threshold=0.5, monotonic=monotonic)


def test_only_for_labels() -> None:
    options: dict[str, Any] = {"threshold": 0.75, "monotonic": {1: 1}}
    with pytest.raises(ValueError, match="only supported for a BernoulliLikelihood"):
        ActiveLearner(torch.tensor(BOUNDS), likelihood=PsychometricLikelihood(), **options)
    with pytest.raises(ValueError, match="not of make_model"):
        ActiveLearner(torch.tensor(BOUNDS), make_model=SequentialGP, **options)

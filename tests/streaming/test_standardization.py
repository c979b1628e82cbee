"""The default standardisation follows the stream."""

from __future__ import annotations

import pytest
import torch
from botorch.models.transforms import Standardize
from gpytorch.kernels import RBFKernel
from gpytorch.likelihoods import StudentTLikelihood
from torch import Tensor

from seqgp import SequentialGP
from tests.helpers import assert_close, unscaled

pytestmark = pytest.mark.usefixtures("float64")


def data(m: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    X = torch.rand(90, 2, generator=generator).sort(0).values
    Y = torch.stack([100 + 50 * X[:, 0] ** 3, 3 + torch.sin(5 * X[:, 1])], -1)[:, :m]
    return X, Y + 0.1 * torch.randn(90, m, generator=generator)


def streamed(X: Tensor, Y: Tensor, memory: int, **options) -> SequentialGP:
    model = SequentialGP(
        X[:30], Y[:30], covar_module=RBFKernel(), inducing_points=X[::6], **options
    )
    for x, y in zip(X[30:].split(20), Y[30:].split(20), strict=True):
        model.update(x, y, memory=memory, learn=True, steps=0, inducing="fixed")
    return model


@pytest.mark.parametrize("m", [1, 2])
@pytest.mark.parametrize("memory", [0, 7, 100])
def test_it_is_that_of_all_data(m: int, memory: int) -> None:
    """At fixed hyperparameters the order does not matter, whatever has been folded."""
    X, Y = data(m)
    model = streamed(X, Y, memory)
    whole = SequentialGP(X, Y, covar_module=RBFKernel(), inducing_points=X[::6])
    assert_close(model.outcome_transform.means, whole.outcome_transform.means, 1e-10)
    assert_close(model.outcome_transform.stdvs, whole.outcome_transform.stdvs, 1e-10)
    whole.likelihood.noise = model.likelihood.noise.detach()
    whole.mean_module.constant = model.mean_module.constant.detach()
    whole.refresh()
    for grid in (X, X + 0.3):
        left, right = model.posterior(grid), whole.posterior(grid)
        assert_close(left.mean, right.mean, 1e-6)
        assert_close(left.variance, right.variance, 1e-6)


def test_the_noise_keeps_its_size() -> None:
    X, Y = data()
    model = SequentialGP(X[:30], Y[:30], inducing_points=X[::6])
    model.likelihood.noise = 0.5
    before = model.likelihood.noise.item() * model.outcome_transform.stdvs.item() ** 2
    model.update(X[30:], Y[30:], learn=True, steps=0)
    after = model.likelihood.noise.item() * model.outcome_transform.stdvs.item() ** 2
    assert after == pytest.approx(before)


def test_a_transform_of_the_user_stays() -> None:
    X, Y = data()
    model = streamed(X, Y, 7, outcome_transform=Standardize(1))
    assert_close(model.outcome_transform.means, Y[:30].mean(0, keepdim=True), 1e-12)


def test_other_likelihoods() -> None:
    """What was folded of a Student-t is the same function of ``a f + b``."""
    X, Y = data()
    model = SequentialGP(X, Y, likelihood=StudentTLikelihood(), inducing_points=X[::6])
    model.update(X[:0], Y[:0], memory=0, learn=False)
    strategy = model.variational_strategy
    scale, offset = torch.tensor(0.5), torch.tensor(0.25)
    lam, B = strategy.summary_lam.clone(), strategy.summary_B.clone()
    v = torch.randn(len(lam))
    before = lam @ v - 0.5 * v @ B @ v
    strategy.rescale(scale, offset, noise_free=False)
    v = scale * v
    assert_close(strategy.summary_lam @ v - 0.5 * v @ strategy.summary_B @ v, before, 1e-9)


@unscaled
def test_constant_targets() -> None:
    X, Y = data()
    model = SequentialGP(X[:10], torch.full_like(Y[:10], 7.0))
    model.update(X[10:20], torch.full_like(Y[:10], 7.0), learn=True, steps=2)
    assert_close(model.posterior(X[:10]).mean, torch.full_like(Y[:10], 7.0), 1e-2)
    model.update(X[20:], Y[20:], learn=True, steps=5)
    assert model.posterior(X).mean.isfinite().all()

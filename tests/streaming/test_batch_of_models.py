"""A batch of models is updated as each of them would be."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from gpytorch.kernels import RBFKernel
from gpytorch.likelihoods import BernoulliLikelihood, GaussianLikelihood, PoissonLikelihood
from gpytorch.means import ConstantMean
from torch import Tensor

from seqgp import SequentialGP
from tests.helpers import assert_close, latent, make_inputs

pytestmark = pytest.mark.usefixtures("float64")

BATCH = 2


def observed(likelihood: Any, outputs: int) -> tuple[Tensor, Tensor]:
    """Inputs of each model in a region of its own, and what it has observed there."""
    X = make_inputs(BATCH, 30, 2)
    X[1] = X[1] + 1
    f = torch.stack([latent(X + 0.3 * k) for k in range(outputs)], -1)
    if likelihood is BernoulliLikelihood:
        return X, (f > 0).to(f)
    return X, (2 * f.exp()).round() if likelihood is PoissonLikelihood else f


def build(likelihood: Any, outputs: int, *data: Tensor, **options: Any) -> SequentialGP:
    shape = torch.Size([*data[0].shape[:-2], outputs] if outputs > 1 else data[0].shape[:-2])
    noisy = likelihood is GaussianLikelihood
    return SequentialGP(
        *data,
        likelihood=likelihood(batch_shape=shape).initialize(noise=0.05) if noisy else likelihood(),
        covar_module=RBFKernel(batch_shape=shape).initialize(lengthscale=0.4),
        mean_module=ConstantMean(batch_shape=shape),
        outcome_transform=None,
        **options,
    )


@pytest.mark.parametrize("likelihood", [GaussianLikelihood, BernoulliLikelihood, PoissonLikelihood])
@pytest.mark.parametrize("outputs", [1, 2])
@pytest.mark.parametrize("memory", [0, 100])
def test_each_is_updated(likelihood: Any, outputs: int, memory: int) -> None:
    X, Y = observed(likelihood, outputs)
    joint = build(likelihood, outputs, X[:, :10], Y[:, :10])
    parts = [build(likelihood, outputs, X[k, :10], Y[k, :10]) for k in range(BATCH)]
    for i in (10, 20):
        options = {"learn": False, "memory": memory, "inducing": "fixed"}
        record = joint.update(X[:, i : i + 10], Y[:, i : i + 10], **options)
        records = [
            part.update(X[k, i : i + 10], Y[k, i : i + 10], **options)
            for k, part in enumerate(parts)
        ]
        densities = torch.tensor([each.log_density for each in records])
        assert record.log_density == pytest.approx(densities.mean().item())
        assert record.elbo == pytest.approx(sum(each.elbo for each in records))
    test = make_inputs(5, 2) + 0.5
    posteriors = [part.posterior(test) for part in parts]
    assert_close(joint.posterior(test).mean, torch.stack([p.mean for p in posteriors]))
    assert_close(joint.posterior(test).variance, torch.stack([p.variance for p in posteriors]))
    assert joint.num_seen == 30


@pytest.mark.parametrize("outputs", [1, 2])
def test_inducing_points_are_chosen_among_own_inputs(outputs: int) -> None:
    X, Y = observed(GaussianLikelihood, outputs)
    model = build(GaussianLikelihood, outputs, X[:, :8], Y[:, :8], inducing_points=5)
    model.update(X[:, 8:], Y[:, 8:], learn=False, inducing="adapt", max_inducing=12)
    Z = model.variational_strategy.inducing_points.detach().reshape(BATCH, -1, 2)
    assert 5 < Z.shape[1] <= 12
    for k in range(BATCH):
        assert all((X[k] == z).all(-1).any() for z in Z[k])
        assert len(Z[k].unique(dim=0)) == Z.shape[1]


def test_learning() -> None:
    """Each model has hyperparameters of its own, and the bounds of all rise."""
    X, Y = observed(GaussianLikelihood, 1)
    model = build(GaussianLikelihood, 1, X[:, :15], Y[:, :15], inducing_points=8)
    without = copy.deepcopy(model)
    without.update(X[:, 15:], Y[:, 15:], learn=False, inducing="fixed")
    before = without.refresh()
    model.update(X[:, 15:], Y[:, 15:], memory=100, steps=10, inducing="fixed")
    assert (model.refresh() > before).all()
    lengthscales = model.covar_module.lengthscale.flatten()
    assert abs(lengthscales[0] - lengthscales[1]) > 1e-3


@pytest.mark.parametrize("memory", [0, 100])
def test_forget(memory: int) -> None:
    X, Y = observed(GaussianLikelihood, 1)
    model = build(GaussianLikelihood, 1, X[:, :10], Y[:, :10])
    test = make_inputs(5, 2) + 0.5
    expected = model.posterior(test).mean
    model.update(X[:, 10:], Y[:, 10:], learn=False, memory=memory, inducing="fixed")
    assert (model.posterior(test).mean - expected).abs().max() > 1e-3
    model.forget(X[:, 10:], Y[:, 10:])
    assert_close(model.posterior(test).mean, expected)


def test_inputs_of_another_batch_shape() -> None:
    X, Y = observed(GaussianLikelihood, 1)
    model = build(GaussianLikelihood, 1, X[:, :10], Y[:, :10])
    with pytest.raises(ValueError, match=r"X: expected shape 2 x n x 2, got \(20, 2\)"):
        model.update(X[0, 10:], Y[0, 10:])

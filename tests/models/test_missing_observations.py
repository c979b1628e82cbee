"""Outputs that have not been observed everywhere: each is a model of what was seen of it."""

from __future__ import annotations

import pytest
import torch
from botorch.fit import fit_gpytorch_mll
from gpytorch.kernels import RBFKernel
from gpytorch.likelihoods import GaussianLikelihood, GaussianLikelihoodWithMissingObs
from gpytorch.means import ConstantMean
from torch import Tensor

from seqgp import DualELBO, SequentialGP
from tests.helpers import assert_close, latent, make_inputs

pytestmark = [
    pytest.mark.usefixtures("float64"),
    pytest.mark.filterwarnings("ignore:GaussianLikelihoodWithMissingObs:DeprecationWarning"),
]

OUTPUTS = torch.Size([2])


def observed(n: int) -> tuple[Tensor, Tensor]:
    """Inputs, and two columns of which different elements are missing."""
    X = make_inputs(n, 2)
    Y = torch.stack([latent(X), latent(X + 0.3)], -1)
    Y[::3, 0] = torch.nan
    Y[1::4, 1] = torch.nan
    return X, Y


def seen(X: Tensor, Y: Tensor, output: int) -> tuple[Tensor, Tensor]:
    """What there is of one output."""
    there = ~Y[:, output].isnan()
    return X[there], Y[there, output : output + 1]


def joint(X: Tensor, Y: Tensor, Z: Tensor) -> SequentialGP:
    return SequentialGP(
        X,
        Y,
        likelihood=GaussianLikelihoodWithMissingObs(batch_shape=OUTPUTS).initialize(noise=0.05),
        covar_module=RBFKernel(batch_shape=OUTPUTS),
        mean_module=ConstantMean(batch_shape=OUTPUTS),
        inducing_points=Z,
        outcome_transform=None,
    )


def separate(X: Tensor, Y: Tensor, Z: Tensor) -> list[SequentialGP]:
    return [
        SequentialGP(
            *seen(X, Y, k),
            likelihood=GaussianLikelihood().initialize(noise=0.05),
            covar_module=RBFKernel(),
            mean_module=ConstantMean(),
            inducing_points=Z,
            outcome_transform=None,
        )
        for k in range(2)
    ]


def assert_equal_models(model: SequentialGP, parts: list[SequentialGP]) -> None:
    X = make_inputs(5, 2)
    posteriors = [part.posterior(X) for part in parts]
    assert_close(model.posterior(X).mean, torch.cat([p.mean for p in posteriors], -1))
    assert_close(model.posterior(X).variance, torch.cat([p.variance for p in posteriors], -1))
    assert_close(model.bound()[0], torch.stack([part.bound()[0] for part in parts]))


def test_bound_and_posterior() -> None:
    X, Y = observed(12)
    model, parts = joint(X, Y, X), separate(X, Y, X)
    assert_equal_models(model, parts)
    assert_close(model.bound(exact=True)[0], torch.stack([p.bound(exact=True)[0] for p in parts]))


def test_stream() -> None:
    """Also what was folded counts for the outputs that it was observed of, and for no other."""
    X, Y = observed(20)
    model, parts = joint(X[:12], Y[:12], X[:6]), separate(X[:12], Y[:12], X[:6])
    record = model.update(X[12:], Y[12:], memory=3, learn=False)
    model.update(X[:0], Y[:0], memory=0, learn=False)
    new = [seen(X[12:], Y[12:], k) for k in range(2)]
    records = [part.update(*each, 0, learn=False) for part, each in zip(parts, new, strict=True)]
    assert_equal_models(model, parts)
    number = sum(each.num_new for each in records)
    density = sum(each.num_new * each.log_density for each in records) / number
    assert record.log_density == pytest.approx(density, rel=1e-8)
    counts = [part.variational_strategy.summary_count for part in parts]
    assert torch.equal(model.variational_strategy.summary_count, torch.stack(counts))


def test_learning() -> None:
    X, Y = observed(20)
    model = joint(X[:8], Y[:8], X[:6])
    before = model.likelihood.noise.clone()
    records = [model.update(X[i : i + 6], Y[i : i + 6], memory=3, steps=5) for i in (8, 14)]
    assert all(torch.tensor([r.elbo, r.log_density]).isfinite().all() for r in records)
    assert (model.likelihood.noise - before).abs().min() > 1e-4
    assert model.bound()[0].isfinite().all()


def test_fit() -> None:
    X, Y = observed(12)
    model, parts = joint(X, Y, X), separate(X, Y, X)
    for each in (model, *parts):
        fit_gpytorch_mll(DualELBO(each.likelihood, each))
    noise = torch.stack([part.likelihood.noise for part in parts])
    assert_close(model.likelihood.noise, noise, 1e-3)  # where two runs of L-BFGS stop


def test_forget() -> None:
    X, Y = observed(12)
    model = joint(X, Y, X)
    model.forget(X[:4], Y[:4])
    assert model.num_data == 8
    assert_equal_models(model, separate(X[4:], Y[4:], X))


def test_plain_likelihood_says_what_to_do() -> None:
    X, Y = observed(12)
    message = r"first in row 0; if some outputs .*WithMissingObs\(batch_shape=torch.Size\(\[2\]\)\)"
    with pytest.raises(ValueError, match=message):
        SequentialGP(X, Y, outcome_transform=None)
    with pytest.raises(ValueError, match="row 0; leave out rows that have not"):
        SequentialGP(X, Y[:, :1], outcome_transform=None)

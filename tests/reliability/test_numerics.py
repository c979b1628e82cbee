"""What was found at extreme scales, and mended."""

from __future__ import annotations

import pytest
import torch
from gpytorch.kernels import MaternKernel, ScaleKernel
from gpytorch.likelihoods import BernoulliLikelihood, BetaLikelihood, Likelihood, StudentTLikelihood
from torch import Tensor

from seqgp import OrdinalLikelihood, SequentialGP
from tests.helpers import latent, make_inputs, unscaled

pytestmark = [
    pytest.mark.usefixtures("float64"),
    unscaled,
    # At a variance of a million, a hundred steps are not enough for the last digits.
    pytest.mark.filterwarnings("ignore:The sites have not converged after"),
]


def make_model(X: Tensor, Y: Tensor, likelihood: Likelihood, variance: float) -> SequentialGP:
    kernel = ScaleKernel(MaternKernel(2.5))
    kernel.outputscale, kernel.base_kernel.lengthscale = variance, 0.3
    return SequentialGP(X, Y, likelihood=likelihood, covar_module=kernel, outcome_transform=None)


@pytest.mark.parametrize("variance", [1e2, 1e4, 1e6])
@pytest.mark.parametrize("seed", range(2))
def test_surprising_labels_can_be_conditioned_on(variance: float, seed: int) -> None:
    """The opposite of what a model is certain of; trial steps that fail are shortened."""
    X = make_inputs(20, 2)
    generator = torch.Generator().manual_seed(seed)
    model = make_model(X, (latent(X) > 1).double().unsqueeze(-1), BernoulliLikelihood(), variance)
    new = torch.rand(3, 2, generator=generator)
    conditioned = model.condition_on_observations(new, (latent(new) <= 1).double().unsqueeze(-1))
    posterior = conditioned.posterior(torch.cat([X, new]))
    assert posterior.mean.isfinite().all()
    assert (posterior.variance >= 0).all()


@pytest.mark.parametrize("variance", [1e3, 1e4])
def test_the_same_outliers_twice(variance: float) -> None:
    """The bound for the record exists wherever the update does."""
    X = make_inputs(20, 2)
    noise = torch.distributions.StudentT(3.0)
    torch.manual_seed(0)
    Y = latent(X).unsqueeze(-1) + noise.sample((20, 1))
    model = make_model(X, Y, StudentTLikelihood(), variance)
    for _ in range(2):
        record = model.update(X, Y, learn=False)
        assert torch.tensor(record.elbo).isfinite()


@pytest.mark.parametrize("likelihood", [BetaLikelihood(), OrdinalLikelihood(3)])
def test_batches_without_observations(likelihood: Likelihood) -> None:
    X = make_inputs(6, 2)
    Y = torch.tensor(
        [0.2, 0.5, 0.9] * 2 if isinstance(likelihood, BetaLikelihood) else [0.0, 1, 2] * 2
    )
    model = make_model(X, Y.unsqueeze(-1), likelihood, 1.0)
    record = model.update(X[:0], Y[:0].unsqueeze(-1), learn=False)
    assert record.num_new == 0
    assert record.log_density != record.log_density  # NaN: of none

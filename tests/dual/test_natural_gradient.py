from __future__ import annotations

import warnings
from itertools import pairwise

import gpytorch
import pytest
import torch
from gpytorch.likelihoods import BernoulliLikelihood
from gpytorch.mlls import VariationalELBO
from gpytorch.variational import (
    IndependentMultitaskVariationalStrategy,
    NaturalVariationalDistribution,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from linear_operator.utils.warnings import NumericalWarning
from torch import Tensor

from seqgp.dual import Sites, expected_log_prob, fixed_point
from tests.helpers import (
    CASES,
    CONJUGATE,
    GP,
    SVGP,
    Problem,
    assert_close,
    assert_same_posterior,
    dense_prior,
    problem,
    with_same_expectations,
)

pytestmark = pytest.mark.usefixtures("float64")

all_likelihoods = pytest.mark.parametrize("name", list(CASES))
others = [name for name in CASES if name not in CONJUGATE]


def svgp_by_natural_gradients(data: Problem, likelihood: torch.nn.Module) -> tuple[SVGP, Tensor]:
    """GPyTorch's own model and optimiser, run to convergence; and its bound."""
    m, c, n = len(data.Z), data.num_latents, len(data.x)
    batch_shape = torch.Size([] if c is None else [c])
    distribution = NaturalVariationalDistribution(m, batch_shape=batch_shape)

    def wrap(strategy: gpytorch.variational.VariationalStrategy) -> torch.nn.Module:
        return strategy if c is None else IndependentMultitaskVariationalStrategy(strategy, c)

    model = SVGP(data.Z.expand(*batch_shape, m, 2), distribution, wrap).train()
    elbo = VariationalELBO(likelihood, model, n)
    optimiser = gpytorch.optim.NGD(model.variational_parameters(), num_data=n, lr=0.3)
    for _ in range(120):
        optimiser.zero_grad()
        loss = -elbo(model(data.x), data.y, **data.arguments)
        loss.backward()
        optimiser.step()
    return model.eval(), -n * loss.detach()


@all_likelihoods
def test_fixed_point_is_that_of_gpytorch(name: str) -> None:
    data = problem(name)
    model = data.model().eval()
    # No floor: where log p is not concave, GPyTorch has none either.
    info = model.variational_strategy.converge(
        data.x, data.y, min_precision=None, tol=1e-10, **data.arguments
    )
    ours = name in ("bernoulli", "laplace", "softmax", "softmax_mixing")
    likelihood = with_same_expectations(data.likelihood) if ours else data.likelihood
    svgp, bound = svgp_by_natural_gradients(data, likelihood)
    print(name, info.steps, info.elbo-bound, (svgp(data.test).mean-model(data.test).mean).abs().max())
    assert_same_posterior(model, svgp, data.test)
    assert_close(info.elbo, bound)

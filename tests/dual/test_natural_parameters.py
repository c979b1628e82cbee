from __future__ import annotations

import pytest
import torch
from torch import Tensor

from seqgp.dual import Duals
from seqgp.dual.linalg import solve_cholesky
from seqgp.dual.natural_parameters import natural_factors
from seqgp.dual.posterior import factorise, kl_divergence
from tests.helpers import assert_close

pytestmark = pytest.mark.usefixtures("float64")


def make_duals(*batch: int) -> Duals:
    generator = torch.Generator().manual_seed(0)
    root = torch.randn(*batch, 4, 4, generator=generator)
    return Duals(torch.randn(*batch, 4, generator=generator), root @ root.mT)


def loss(mean: Tensor, covariance: Tensor) -> Tensor:
    """Something that depends on everything, not symmetric in it."""
    weights = torch.linspace(0.5, 2.0, 16).reshape(4, 4)
    return (weights * covariance.square()).sum() + (covariance @ mean.unsqueeze(-1)).sin().sum()


@pytest.mark.parametrize("batch", [(), (3,), (2, 3)])
def test_gradients_are_those_of_expectation_parameters(batch: tuple[int, ...]) -> None:
    duals = Duals(*(tensor.requires_grad_(True) for tensor in make_duals(*batch)))
    R, mean = natural_factors(duals)
    eye = torch.eye(4).expand_as(R)
    loss(mean, solve_cholesky(R, eye)).backward()
    with torch.no_grad():
        R, mean = factorise(duals)
        covariance = solve_cholesky(R, eye)
    first = mean.clone().requires_grad_(True)
    second = (covariance + mean.unsqueeze(-1) * mean.unsqueeze(-2)).requires_grad_(True)
    loss(first, second - first.unsqueeze(-1) * first.unsqueeze(-2)).backward()
    symmetric = (second.grad + second.grad.mT) / 2
    assert_close(duals.lam.grad, first.grad, 1e-10)
    assert_close(duals.B.grad, -2 * symmetric, 1e-10)  # B = -2 eta_2 - I


def test_the_natural_gradient_of_the_kl_divergence_is_the_duals() -> None:
    """A full step on the divergence alone ends at the prior."""
    duals = Duals(*(tensor.requires_grad_(True) for tensor in make_duals(2)))
    kl_divergence(natural_factors(duals)).sum().backward()
    assert_close(duals.lam.grad, duals.lam.detach(), 1e-12)
    assert_close(duals.B.grad, duals.B.detach(), 1e-12)

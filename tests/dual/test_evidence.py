"""The evidence of fixed sites: values and derivatives against dense formulas and autograd."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from seqgp.dual import Sites, scaled_cholesky, solve_lower
from seqgp.dual.evidence import (
    Block,
    evidence,
    exact_evidence,
    gaussian_evidence,
    unexplained_total,
)

pytestmark = pytest.mark.usefixtures("float64")
JITTER = 1e-6

batches = pytest.mark.parametrize("batch", [(), (3,), (2, 3)])


def kernel(a: Tensor, b: Tensor) -> Tensor:
    return torch.exp(-0.5 * (a.unsqueeze(-2) - b.unsqueeze(-3)).square().sum(-1))


def sites(n: int, *batch: int) -> Sites:
    return Sites(torch.randn(*batch, n), torch.rand(*batch, n))


def assert_same_with_gradients(actual: Tensor, expected: Tensor, inputs: list[Tensor]) -> None:
    assert_close(actual, expected, rtol=1e-9, atol=1e-9)
    outer = torch.randn_like(actual)
    found = torch.autograd.grad((outer * actual).sum(), inputs, retain_graph=True)
    wanted = torch.autograd.grad((outer * expected).sum(), inputs)
    for a, b in zip(found, wanted, strict=True):
        assert_close(a, b, rtol=1e-8, atol=1e-8)


@batches
@pytest.mark.parametrize("own_prior", [False, True])
def test_evidence_of_two_blocks(batch: tuple[int, ...], own_prior: bool) -> None:
    """Autograd of the formula at the top of the module; priors shared by the batch, or not."""
    prior_batch = batch if own_prior else ()
    Z = torch.rand(*prior_batch, 5, 2, requires_grad=True)
    scale = torch.tensor(1.3, requires_grad=True)
    x = [torch.rand(*prior_batch, 9, 2), torch.rand(*prior_batch, 4, 2)]
    known = [sites(9, *batch), sites(4, *batch)]
    for tensor in known[0]:
        tensor.requires_grad_(True)
    K = scale * kernel(Z, Z)
    blocks = [
        Block(scale * kernel(Z, each), scale * torch.ones(each.shape[-2]), site)
        for each, site in zip(x, known, strict=True)
    ]
    chol = scaled_cholesky(K.detach(), JITTER)
    whitened = [solve_lower(chol, block.cross.detach()) for block in blocks]
    actual = evidence(K, blocks, chol, whitened, JITTER).value

    L = torch.linalg.cholesky(K + JITTER * torch.diag_embed(K.diagonal(dim1=-2, dim2=-1)))
    A = torch.linalg.solve_triangular(L, torch.cat([b.cross for b in blocks], -1), upper=False)
    lam, beta = (torch.cat(parts, -1) for parts in zip(*known, strict=True))
    W = torch.eye(5) + (A * beta.unsqueeze(-2)) @ A.mT
    lam_w = A @ lam.unsqueeze(-1)
    expected = 0.5 * (lam_w * torch.linalg.solve(W, lam_w)).sum((-2, -1))
    expected = expected - 0.5 * torch.logdet(W)
    expected = expected - 0.5 * (beta * (scale - A.square().sum(-2))).sum(-1)
    assert_same_with_gradients(actual, expected, [Z, scale, *known[0]])


def test_blocks_of_different_batch_shapes() -> None:
    """Latents that share a prior, with a block of functionals for each."""
    Z = torch.rand(5, 2, requires_grad=True)
    x, C = torch.rand(9, 2), torch.randn(3, 4, 5)
    known = [sites(9, 3), sites(4, 3)]
    K = kernel(Z, Z)
    own = C @ K
    blocks = [
        Block(kernel(Z, x), torch.ones(9), known[0]),
        Block(own.mT, 2 + (own * C).sum(-1), known[1]),
    ]
    chol = scaled_cholesky(K.detach(), JITTER)
    whitened = [solve_lower(chol, block.cross.detach()) for block in blocks]
    actual = evidence(K, blocks, chol, whitened, JITTER).value
    L = torch.linalg.cholesky(K + JITTER * torch.eye(5))
    cross = torch.cat([blocks[0].cross.expand(3, 5, 9), blocks[1].cross], -1)
    variance = torch.cat([torch.ones(3, 9), blocks[1].variance], -1)
    A = torch.linalg.solve_triangular(L, cross, upper=False)
    lam, beta = (torch.cat(parts, -1) for parts in zip(*known, strict=True))
    W = torch.eye(5) + (A * beta.unsqueeze(-2)) @ A.mT
    lam_w = A @ lam.unsqueeze(-1)
    expected = 0.5 * (lam_w * torch.linalg.solve(W, lam_w)).sum((-2, -1))
    expected = expected - 0.5 * torch.logdet(W)
    expected = expected - 0.5 * (beta * (variance - A.square().sum(-2))).sum(-1)
    assert_same_with_gradients(actual, expected, [Z])


@batches
@pytest.mark.parametrize("own_prior", [False, True])
def test_unexplained_total(batch: tuple[int, ...], own_prior: bool) -> None:
    """Autograd of the sum itself; priors shared by the batch, or not."""
    prior_batch = batch if own_prior else ()
    Z = torch.rand(*prior_batch, 5, 2, requires_grad=True)
    scale = torch.tensor(1.3, requires_grad=True)
    x, weights = torch.rand(*prior_batch, 9, 2), torch.rand(*batch, 9)
    K, cross, variance = scale * kernel(Z, Z), scale * kernel(Z, x), scale * torch.ones(9)
    chol = scaled_cholesky(K.detach(), JITTER)
    actual = unexplained_total(K, cross, variance, weights, chol, JITTER)
    L = torch.linalg.cholesky(K + JITTER * torch.diag_embed(K.diagonal(dim1=-2, dim2=-1)))
    A = torch.linalg.solve_triangular(L, cross, upper=False)
    expected = (weights * (variance - A.square().sum(-2))).sum(-1)
    assert_same_with_gradients(actual, expected, [Z, scale])


@batches
def test_exact_evidence(batch: tuple[int, ...]) -> None:
    x = torch.rand(9, 2, requires_grad=True)
    lam, beta = sites(9, *batch)
    lam.requires_grad_(True)
    with torch.no_grad():
        beta[..., 3] = 0  # says nothing about its point
    beta.requires_grad_(True)
    K = kernel(x, x)
    eye = torch.eye(9)
    alpha = torch.linalg.solve(eye + beta.unsqueeze(-1) * K, lam.unsqueeze(-1)).squeeze(-1)
    expected = 0.5 * (lam * (K @ alpha.unsqueeze(-1)).squeeze(-1)).sum(-1)
    expected = expected - 0.5 * torch.logdet(eye + K * beta.unsqueeze(-2))
    assert_same_with_gradients(exact_evidence(K, Sites(lam, beta)), expected, [x, lam, beta])


def test_exact_evidence_keeps_its_digits_if_sites_are_precise() -> None:
    """Line searches of fits with little noise fail if the value changes by chance."""
    x, noise = torch.rand(12, 2), torch.tensor(1e-4)
    K, y = 10 * kernel(x, x), torch.sin(3 * x).sum(-1)
    sites = Sites(y / noise, noise.reciprocal().expand(12))
    constant = -0.5 * (y.square() / noise + (2 * math.pi * noise).log()).sum()
    expected = torch.distributions.MultivariateNormal(torch.zeros(12), K + noise * torch.eye(12))
    actual = exact_evidence(K, sites) + constant
    rounding = torch.finfo(y.dtype).eps * float(constant.abs())  # of the constant itself
    assert_close(actual, expected.log_prob(y), rtol=0.0, atol=100 * rounding)


@batches
def test_gaussian_evidence(batch: tuple[int, ...]) -> None:
    x, noise = torch.rand(7, 2, requires_grad=True), (0.1 + torch.rand(7)).requires_grad_(True)
    residual = torch.randn(*batch, 7, requires_grad=True)
    K = kernel(x, x)
    expected = torch.distributions.MultivariateNormal(torch.zeros(7), K + noise.diag())
    actual = gaussian_evidence(K, residual, noise)
    assert_same_with_gradients(actual, expected.log_prob(residual), [x, noise, residual])


def test_all_inputs_as_inducing_points_are_exact() -> None:
    x, site = torch.rand(12, 2), sites(12)
    K = kernel(x, x)
    chol = scaled_cholesky(K, 1e-10)
    blocks = [Block(K, torch.ones(12), site)]
    sparse = evidence(K, blocks, chol, [solve_lower(chol, K)], 1e-10).value
    assert_close(sparse, exact_evidence(K, site), rtol=1e-6, atol=1e-6)


def test_no_gradient_is_built_where_none_is_wanted() -> None:
    x, site = torch.rand(5, 2), sites(5)
    K = kernel(x, x).requires_grad_(True)
    with torch.no_grad():
        chol = scaled_cholesky(K, JITTER)
        blocks = [Block(K, torch.ones(5), site)]
        value = evidence(K, blocks, chol, [solve_lower(chol, K)], JITTER).value
    assert not value.requires_grad

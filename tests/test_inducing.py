"""Inducing points that follow a stream."""

from __future__ import annotations

import pytest
import torch
from botorch.models.utils.inducing_point_allocators import GreedyVarianceReduction
from gpytorch.kernels import ConstantKernel, Kernel, MaternKernel, ScaleKernel
from torch import Tensor

from seqgp import SequentialGP
from seqgp.inducing import choose_inducing_points

pytestmark = pytest.mark.usefixtures("float64")


def kernel(constant: float = 0.0) -> Kernel:
    result = ScaleKernel(MaternKernel(nu=2.5))
    result.base_kernel.lengthscale, result.outputscale = 1.0, 1.0
    if not constant:
        return result
    offset = ConstantKernel()
    offset.constant = torch.tensor([constant])
    return offset + result


def points(low: float, high: float, n: int) -> Tensor:
    return torch.linspace(low, high, n).unsqueeze(-1)


def unexplained(Z: Tensor, X: Tensor, k: Kernel) -> Tensor:
    """Densely, the variance at ``X`` given the values at ``Z``."""
    K = k(Z).to_dense() + 1e-10 * torch.eye(len(Z))
    cross = k(Z, X).to_dense()
    return (k(X, diag=True) - (cross * torch.linalg.solve(K, cross)).sum(0)).detach()


@pytest.mark.parametrize("constant", [0.0, 500.0])
def test_what_is_explained_already_changes_nothing(constant: float) -> None:
    Z = points(0, 5, 20)
    assert choose_inducing_points(Z, points(0.1, 4.9, 50), kernel(constant), 30) is Z
    assert choose_inducing_points(Z, Z[:0], kernel(constant), 30) is Z


@pytest.mark.parametrize("constant", [0.0, 500.0])
def test_points_are_added_until_all_is_explained(constant: float) -> None:
    """Whatever all values have in common."""
    Z, X, k = points(0, 5, 10), points(5, 15, 100), kernel(constant)
    chosen = choose_inducing_points(Z, X, k, 50)
    assert torch.equal(chosen[:10], Z)
    assert 10 < len(chosen) < 50
    assert unexplained(chosen, X, k).max() <= 0.1 + 1e-6
    assert unexplained(chosen[:-1], X, k).max() > 0.1


@pytest.mark.parametrize("constant", [0.0, 500.0])
def test_without_room_redundant_points_are_exchanged(constant: float) -> None:
    Z, X, k = points(0, 5, 20), points(5, 10, 100), kernel(constant)
    chosen = choose_inducing_points(Z, X, k, 20)
    kept = (chosen.unsqueeze(1) == Z).all(-1).any(-1)
    assert len(chosen) == 20
    assert 0 < kept.sum() < 20
    assert torch.logdet(k(chosen).to_dense()) > torch.logdet(k(Z).to_dense())
    for old_and_new in (points(0, 5, 100), X):
        assert unexplained(chosen, old_and_new, k).max() < 0.2
    # What has been exchanged does not come back.
    assert choose_inducing_points(chosen, X, k, 20) is chosen


def test_an_allocator_chooses_anew() -> None:
    Z, X, k = points(0, 5, 20), points(5, 10, 100), kernel()
    chosen = choose_inducing_points(Z, X, k, 20, GreedyVarianceReduction())
    union = torch.cat([Z, X])
    expected = GreedyVarianceReduction().allocate_inducing_points(union, k, 20, torch.Size())
    assert torch.equal(chosen, expected)


def test_points_travel_without_loss_until_they_are_rebased() -> None:
    """There and back again: predictions are the same; with a rebase in between they are not."""
    X = torch.rand(40, 2)
    Y = torch.sin(4 * X).sum(-1, keepdim=True)
    model = SequentialGP(X, Y, inducing_points=10)
    strategy, before = model.variational_strategy, model.posterior(X).mean
    Z = strategy.inducing_points.detach().clone()
    strategy.start_from(Z[:5])
    assert (model.posterior(X).mean - before).abs().max() > 1e-3
    strategy.start_from(Z)
    torch.testing.assert_close(model.posterior(X).mean, before, atol=1e-10, rtol=0)
    strategy.start_from(Z[:5])
    strategy.rebase()
    strategy.start_from(Z)
    assert (model.posterior(X).mean - before).abs().max() > 1e-3


def exchanged_one_by_one(Z: Tensor, X: Tensor, k: Kernel, gain: float = 2.0) -> Tensor:
    """The same rule, with everything computed densely at each exchange."""
    points, prior = Z.clone(), k(X, diag=True)
    spread = k(Z, diag=True).unsqueeze(-1) + prior - 2 * k(Z, X).to_dense()
    tolerated = 0.1 * 0.5 * spread.max()
    for _ in range(len(Z)):
        K = k(points).to_dense()
        inverse = torch.linalg.inv(K + 1e-8 * K.diagonal().diag())
        own = 1 / inverse.diagonal()
        cross = k(points, X).to_dense()
        left = prior - (cross * (inverse @ cross)).sum(0)
        if left.max() <= max(tolerated, gain * own.min()):
            break
        points[own.argmin()] = X[left.argmax()]
    return points


@pytest.mark.parametrize(("d", "m"), [(1, 20), (2, 60), (5, 100)])
@pytest.mark.parametrize("constant", [0.0, 500.0])
def test_exchanges_are_those_of_the_dense_rule(d: int, m: int, constant: float) -> None:
    generator = torch.Generator().manual_seed(m)
    Z = 2 * torch.rand(m, d, generator=generator)
    X = 2 * torch.rand(300, d, generator=generator) + 1
    with torch.no_grad():
        expected = exchanged_one_by_one(Z, X, kernel(constant))
        assert (expected != Z).any()
        assert torch.equal(choose_inducing_points(Z, X, kernel(constant), m), expected)


def test_exchanges_in_single_precision() -> None:
    Z, X = points(0, 5, 20).float(), points(5, 10, 100).float()
    chosen = choose_inducing_points(Z, X, kernel().float(), 20)
    assert chosen.dtype is torch.float32
    for old_and_new in (points(0, 5, 100), X.double()):
        assert unexplained(chosen.double(), old_and_new, kernel()).max() < 0.2

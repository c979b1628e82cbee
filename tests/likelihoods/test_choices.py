"""`ChoiceLikelihood`: the sites of choices among several items, against brute-force integration."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from seqgp import ChoiceLikelihood
from seqgp.dual.sites import Sites
from seqgp.likelihoods import BinomialLikelihood, expectations, log_predictive
from seqgp.likelihoods.choices import covariance_of, left_out, pairs_of
from seqgp.likelihoods.quadrature import gauss_hermite

pytestmark = pytest.mark.usefixtures("float64")


def differences(k: int) -> Tensor:
    """``P x k``, the pairs' differences as a matrix."""
    first, second = pairs_of(k)
    D = torch.zeros(len(first), k)
    D[range(len(first)), first], D[range(len(first)), second] = 1.0, -1.0
    return D


def moments(k: int, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """A mean and a covariance of the utilities of ``k`` items."""
    torch.manual_seed(k)
    root = scale * torch.randn(k, k) / k**0.5
    return torch.randn(k), root @ root.mT


@pytest.mark.parametrize(("k", "tolerance"), [(3, 1e-7), (4, 1e-4), (5, 1e-3), (7, 3e-3)])
def test_expectations(k: int, tolerance: float) -> None:
    """Sites on all pairs are gradient and Hessian of the expected log softmax, by samples."""
    mean, S = moments(k, 0.7)
    D, likelihood = differences(k), ChoiceLikelihood()
    ones, size = torch.ones(len(D)), torch.full((len(D),), float(k))
    own = expectations(likelihood, ones, D @ mean, (D @ S @ D.mT).diagonal(), choice_size=size)
    if k == 3:  # integrated in the two dimensions that there are
        nodes, weights = gauss_hermite(60, torch.float64, torch.device("cpu"))
        z, w = torch.cartesian_prod(nodes, nodes), torch.cartesian_prod(weights, weights).prod(-1)
        M = torch.cat([torch.zeros(1, 2), -torch.eye(2)])  # f up to f0, from f0 - f1 and f0 - f2
        f = ((D @ mean)[:2] + z @ torch.linalg.cholesky((D @ S @ D.mT)[:2, :2]).mT) @ M.mT
    else:
        z = torch.distributions.MultivariateNormal(mean, S).sample(torch.Size([100_000]))
        f = torch.cat([z, 2 * mean - z])
        w = torch.full((len(f),), 1 / len(f))
        tolerance += 2e-3  # of the samples
    p = f.softmax(-1)
    log_prob = w @ f.log_softmax(-1)[:, 0]
    torch.testing.assert_close(own.log_prob.sum(), log_prob, rtol=0, atol=tolerance)
    gradient = torch.eye(k)[0] - w @ p
    torch.testing.assert_close(D.mT @ own.alpha, gradient, rtol=0, atol=tolerance)
    hessian = (w @ p).diag() - (p.mT * w) @ p
    torch.testing.assert_close(D.mT @ own.beta.diag() @ D, hessian, rtol=0, atol=tolerance)
    assert bool((own.beta >= 0).all())
    density = log_predictive(
        likelihood, ones, D @ mean, (D @ S @ D.mT).diagonal(), choice_size=size
    )
    torch.testing.assert_close(density[0], (w @ p[:, 0]).log(), rtol=0, atol=2 * tolerance)
    assert bool(density[1:].isnan().all())


def test_choices_among_two_are_comparisons() -> None:
    mean, variance, y = torch.randn(5), torch.rand(5), torch.tensor([1.0, 0, 1, 1, 0])
    size = torch.full((5,), 2.0)
    logit = BinomialLikelihood(total_count=1, link="logit")
    for function in (expectations, log_predictive):
        own = function(ChoiceLikelihood(), y, mean, variance, choice_size=size)
        torch.testing.assert_close(own, function(logit, y, mean, variance))
    # In a batch of posteriors, beside choices among three.
    sizes = torch.tensor([2.0, 3, 3, 3, 2])
    both = expectations(
        ChoiceLikelihood(), y, mean.expand(4, 5), variance.expand(4, 5), choice_size=sizes
    )
    alone = expectations(logit, y, mean, variance)
    torch.testing.assert_close(both.alpha[2, [0, 4]], alone.alpha[[0, 4]])
    with pytest.raises(ValueError, match="expected all 3 pairs of each choice among 3 items"):
        expectations(ChoiceLikelihood(), y, mean, variance, choice_size=torch.full((5,), 3.0))


def test_left_out() -> None:
    """A choice is taken out of a posterior with all its pairs, by dense algebra."""
    mean, S = moments(4)
    D = differences(4)
    sites = Sites(torch.randn(6), 0.1 * torch.rand(6))
    size = torch.tensor([4.0] * 6 + [2.0])
    both = Sites(*(torch.cat([t, torch.tensor([0.3])]) for t in sites))
    own = left_out(
        both,
        torch.cat([D @ mean, torch.ones(1)]),
        torch.cat([(D @ S @ D.mT).diagonal(), torch.ones(1)]),
        size,
    )
    precision = S.inverse() - D.mT @ sites.beta.diag() @ D
    covariance = precision.inverse()
    expected = covariance @ (torch.linalg.solve(S, mean) - D.mT @ sites.lam)
    torch.testing.assert_close(own[0][:6], D @ expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(own[1][:6], (D @ covariance @ D.mT).diagonal(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(own[0][6], torch.tensor((1 - 0.3) / (1 - 0.3)))
    K = (D @ S @ D.mT)[:3, :3]
    torch.testing.assert_close(covariance_of((D @ S @ D.mT).diagonal(), 4), K)

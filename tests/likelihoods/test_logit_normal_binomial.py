"""Counts with scattering log odds, against SciPy's integration and against samples."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import integrate, optimize
from torch import Tensor

from seqgp.likelihoods.logit_normal_binomial import LogitNormalBinomial, log_prob_and_slope
from seqgp.models.posteriors import quantile

pytestmark = pytest.mark.usefixtures("float64")


def exact(y: int, N: int, g: float, variance: float) -> float:
    """``log p(y)`` by adaptive integration on both sides of the mode."""

    def log_integrand(h: float) -> float:
        return y * h - N * np.logaddexp(0, h) - 0.5 * (h - g) ** 2 / variance

    mode = optimize.minimize_scalar(lambda h: -log_integrand(h), bracket=(g - 1, g + 1)).x
    top, width = log_integrand(mode), 12 * variance**0.5 + 1
    total = sum(
        integrate.quad(
            lambda h: math.exp(log_integrand(h) - top), *ends, epsabs=0, epsrel=1e-11, limit=200
        )[0]
        for ends in ((mode - width, mode), (mode, mode + width))
    )
    return top + math.log(total / math.sqrt(2 * math.pi * variance)) + math.log(math.comb(N, y))


# The largest errors, which are those of y = 0 and y = N, by variance.
@pytest.mark.parametrize(("variance", "tol"), [(0.01, 1e-8), (0.3, 1e-8), (1.0, 1e-7), (4.0, 1e-4)])
@pytest.mark.parametrize("N", [1, 10, 100, 1000])
def test_log_prob_is_the_integral(N: int, variance: float, tol: float) -> None:
    for y in {0, 1, N // 3, N}:
        for g in (-6.0, -1.0, 2.5):
            actual = LogitNormalBinomial(
                torch.tensor(float(N)), torch.tensor(g), torch.tensor(variance)
            ).log_prob(torch.tensor(float(y)))
            # Far in the tail the logarithm is large: relative there.
            assert actual.item() == pytest.approx(exact(y, N, g, variance), rel=tol, abs=tol)


def test_probabilities_sum_to_one() -> None:
    g = torch.linspace(-6, 6, 13)
    d = LogitNormalBinomial(torch.tensor(40.0), g, torch.tensor(0.8))
    y = torch.arange(41.0).unsqueeze(-1)
    p = d.log_prob(y).exp()
    torch.testing.assert_close(p.sum(0), torch.ones(13), rtol=0, atol=1e-7)
    torch.testing.assert_close((y * p).sum(0), d.mean, rtol=1e-6, atol=1e-7)
    second = ((y - d.mean).square() * p).sum(0)
    torch.testing.assert_close(second, d.variance, rtol=1e-5, atol=1e-7)


def test_without_scatter_it_is_binomial() -> None:
    g, y = torch.linspace(-4, 4, 9), torch.arange(9.0)
    d = LogitNormalBinomial(torch.tensor(8.0), g, torch.tensor(1e-10))
    expected = torch.distributions.Binomial(8, logits=g).log_prob(y)
    torch.testing.assert_close(d.log_prob(y), expected, rtol=1e-7, atol=1e-7)


def test_derivatives() -> None:
    """The slope, and derivatives of log_prob and slope, by finite differences."""
    N, y = torch.tensor(30.0), torch.tensor([0.0, 3.0, 17.0, 30.0])
    g = torch.tensor([-3.0, 0.5, -1.0, 2.0], requires_grad=True)
    variance = torch.tensor([0.7], requires_grad=True)

    def function(g: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
        return log_prob_and_slope(y, N, g, variance)

    # The nodes are held while the argument moves, so values are derivatives up to the error of the
    # quadrature, 1e-8 here.
    assert torch.autograd.gradcheck(function, (g, variance), atol=1e-5)
    log_prob, slope = function(g, variance)
    (gradient,) = torch.autograd.grad(log_prob.sum(), g)
    torch.testing.assert_close(slope, gradient, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_extremes_are_finite_and_log_concave(dtype: torch.dtype) -> None:
    g = torch.linspace(-50, 50, 201, dtype=dtype, requires_grad=True)
    for total, y in ((3, 0), (3, 3), (1000, 0), (1000, 400), (1000, 1000)):
        for variance in (1e-4, 0.5, 10.0):
            log_prob, slope = log_prob_and_slope(
                torch.tensor(float(y), dtype=dtype),
                torch.tensor(float(total), dtype=dtype),
                g,
                torch.tensor(variance, dtype=dtype),
            )
            assert log_prob.dtype == slope.dtype == dtype
            assert log_prob.isfinite().all()
            assert slope.isfinite().all()
            if dtype == torch.float64 and variance < 1:
                assert slope.diff().max() < 1e-6 * total


def test_samples_have_the_moments() -> None:
    d = LogitNormalBinomial(
        torch.tensor([5.0, 50.0]), torch.tensor([[-1.0], [2.0]]), torch.tensor(1.5)
    )
    assert d.batch_shape == (2, 2)
    y = d.sample(torch.Size([40_000]))
    assert y.shape == (40_000, 2, 2)
    assert bool(d.support.check(y).all())
    for power, expected in ((y, d.mean), ((y - d.mean).square(), d.variance)):
        error = power.std(0) / 200
        assert ((power.mean(0) - expected).abs() < 5 * error).all()


def test_quantiles_are_inverse_to_the_cdf() -> None:
    d = LogitNormalBinomial(torch.tensor(90.0), torch.tensor([-2.0, 0.0, 3.0]), torch.tensor(0.9))
    levels = torch.tensor([1e-6, 0.1, 0.5, 0.9, 1 - 1e-6]).unsqueeze(-1)
    y = quantile(d, levels)
    cdf = d.log_prob(torch.arange(91.0).unsqueeze(-1)).exp().cumsum(0)
    index = y.long()
    assert (cdf.gather(0, index) >= levels - 1e-7).all()
    before = torch.where(index > 0, cdf.gather(0, (index - 1).clamp_min(0)), 0.0)
    assert (before < levels).all()


def test_expand() -> None:
    d = LogitNormalBinomial(torch.tensor(9.0), torch.zeros(3), torch.tensor(1.0))
    assert d.expand(torch.Size([2, 3])).log_prob(torch.tensor(4.0)).shape == (2, 3)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("total_count", (torch.tensor(2.5), torch.zeros(1), torch.ones(1))),
        ("logits", (torch.tensor(2.0), torch.tensor(torch.nan), torch.ones(1))),
        ("variance", (torch.tensor(2.0), torch.zeros(1), torch.zeros(1))),
    ],
)
def test_impossible_parameters(name: str, arguments: tuple[Tensor, Tensor, Tensor]) -> None:
    with pytest.raises(ValueError, match=name):
        LogitNormalBinomial(*arguments)

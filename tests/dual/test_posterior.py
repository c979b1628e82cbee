from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributions import MultivariateNormal, kl_divergence

from seqgp import dual
from seqgp.dual import Duals, Sites, factorise, posterior_covariance, posterior_mean, tie
from seqgp.dual.posterior import expected_log_summary, posterior_variance, unexplained_variance
from tests.helpers import assert_close, make_inputs, make_kernel

pytestmark = pytest.mark.usefixtures("float64")


class Setting:
    """Duals of random sites, whitened, and their posterior in the kernel's own basis, dense."""

    def __init__(self, seed: int = 0, m: int = 5, n: int = 8, t: int = 3, max_beta: float = 10.0):
        torch.manual_seed(seed)
        kernel = make_kernel().requires_grad_(False)
        Z, x, self.test = (make_inputs(k, 2) for k in (m, n, t))
        K, Kx, Kt = (kernel(Z, other).to_dense() for other in (Z, x, self.test))
        self.prior, self.prior_test = K, kernel(self.test).to_dense()
        self.L = torch.linalg.cholesky(K)
        self.A, self.A_test = torch.linalg.solve(self.L, Kx), torch.linalg.solve(self.L, Kt)
        self.sites = Sites(torch.randn(n), max_beta * torch.rand(n))
        self.duals = tie(self.A, self.sites)
        # q(u) = p(u) t(u) and q(f) = int p(f | u) q(u) du
        projection = torch.linalg.solve(K, Kx)
        self.precision = projection @ self.sites.beta.diag() @ projection.mT
        self.shift = projection @ self.sites.lam
        self.S = torch.linalg.inv(torch.linalg.inv(K) + self.precision)
        self.mean = self.S @ self.shift
        self.P = torch.linalg.solve(K, Kt)
        self.mean_test = self.P.mT @ self.mean
        self.covariance_test = self.prior_test - self.P.mT @ (K - self.S) @ self.P


def test_posterior_is_the_dense_one() -> None:
    s = Setting()
    factors = factorise(s.duals)
    assert_close(s.L @ factors.mean, s.mean, 1e-9)
    assert_close(posterior_mean(s.A_test, factors), s.mean_test, 1e-9)
    covariance = posterior_covariance(s.A_test, s.A_test, s.prior_test, factors)
    assert_close(covariance, s.covariance_test, 1e-9)
    unexplained = unexplained_variance(s.A_test, s.prior_test.diagonal())
    variance = posterior_variance(s.A_test, unexplained, factors)
    assert_close(variance, s.covariance_test.diagonal(), 1e-9)


def test_kl_divergence_is_that_of_normal_distributions() -> None:
    s = Setting()
    q = MultivariateNormal(s.mean, s.S)
    p = MultivariateNormal(torch.zeros_like(s.mean), s.prior)
    assert_close(dual.kl_divergence(factorise(s.duals)), kl_divergence(q, p), 1e-9)


def test_log_evidence_is_the_integral_of_prior_and_pseudo_likelihood() -> None:
    """By a Gaussian integral in the kernel's own basis: |K|, |S| and the mean."""
    s = Setting()
    log_det = torch.logdet(s.S) - torch.logdet(s.prior)
    expected = 0.5 * (log_det + s.shift @ s.S @ s.shift)
    factors = factorise(s.duals)
    assert_close(dual.log_evidence(s.duals, factors), expected, 1e-9)
    at_the_maximum = expected_log_summary(s.duals, factors) - dual.kl_divergence(factors)
    assert_close(at_the_maximum, expected, 1e-9)


def test_expected_log_summary_is_that_of_the_pseudo_likelihood() -> None:
    """``log t(u) = e^T u - u^T H u / 2`` under ``q(u)``."""
    s = Setting()
    second_moment = s.S + torch.outer(s.mean, s.mean)
    expected = s.shift @ s.mean - 0.5 * (s.precision * second_moment).sum()
    assert_close(expected_log_summary(s.duals, factorise(s.duals)), expected, 1e-9)


def test_batches() -> None:
    """One kernel with batches of sites, as fantasies have them; and batches of everything."""
    settings = [Setting(seed) for seed in range(3)]
    A, A_test = settings[0].A, settings[0].A_test
    K, k = settings[0].prior_test, settings[0].prior_test.diagonal()
    duals = Duals(
        *(torch.stack(tensors) for tensors in zip(*(s.duals for s in settings), strict=True))
    )
    factors = factorise(duals)
    for left in (A_test, A_test.expand(3, *A_test.shape)):
        mean = posterior_mean(left, factors)
        covariance = posterior_covariance(left, left, K, factors)
        variance = posterior_variance(left, unexplained_variance(left, k), factors)
        kl = dual.kl_divergence(factors)
        summary = expected_log_summary(duals, factors)
        for i, s in enumerate(settings):
            assert A.equal(s.A)
            assert_close(mean[i], s.mean_test, 1e-9)
            assert_close(covariance[i], s.covariance_test, 1e-9)
            assert_close(variance[i], s.covariance_test.diagonal(), 1e-9)
            alone = factorise(s.duals)
            assert_close(kl[i], dual.kl_divergence(alone), 1e-12)
            assert_close(summary[i], expected_log_summary(s.duals, alone), 1e-12)


def test_rounding_leaves_no_negative_variance() -> None:
    A = torch.full((2, 3), 1.0)
    k = torch.tensor([2.0 - 1e-12, 2.0, 2.5])
    assert unexplained_variance(A, k).tolist() == [0.0, 0.0, 0.5]


def test_no_data_no_change() -> None:
    s = Setting()
    factors = factorise(dual.zero_duals(s.A, 5))
    assert dual.kl_divergence(factors) == 0
    assert not posterior_mean(s.A_test, factors).any()
    covariance = posterior_covariance(s.A_test, s.A_test, s.prior_test, factors)
    assert torch.equal(covariance, s.prior_test)


def positive_definite(matrix: Tensor) -> bool:
    return bool(torch.linalg.eigvalsh(matrix).min() > -1e-9 * matrix.diagonal().max())


@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 999), m=st.integers(1, 6), n=st.integers(1, 9), power=st.floats(-3, 6))
def test_learning_reduces_uncertainty(seed: int, m: int, n: int, power: float) -> None:
    s = Setting(seed, m, n, max_beta=10**power)
    factors = factorise(s.duals)
    covariance = posterior_covariance(s.A_test, s.A_test, s.prior_test, factors)
    assert positive_definite(s.duals.B)
    assert positive_definite(covariance)
    assert positive_definite(s.prior_test - covariance)
    assert dual.kl_divergence(factors) >= 0
    unexplained = unexplained_variance(s.A_test, s.prior_test.diagonal())
    variance = posterior_variance(s.A_test, unexplained, factors)
    assert ((variance >= 0) & (variance <= s.prior_test.diagonal() * (1 + 1e-12))).all()

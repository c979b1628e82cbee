from __future__ import annotations

import functools
import importlib
import math

import numpy as np
import pytest
import torch
from gpytorch import likelihoods as gl
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import integrate
from torch import Tensor

from seqgp.likelihoods.expectations import expectations
from seqgp.likelihoods.quadrature import NUM_BASE_SAMPLES
from seqgp.likelihoods.softmax import softmax_bound_sites
from seqgp.likelihoods.traits import is_softmax
from tests.helpers import CASES, assert_close, marginals, observations, softmax

pytestmark = pytest.mark.usefixtures("float64")


def use_samples(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    for name in ("expectations", "quadrature", "softmax"):
        # Not by its path: the package's `expectations` is the function.
        module = importlib.import_module(f"seqgp.likelihoods.{name}")
        monkeypatch.setattr(module, "NUM_BASE_SAMPLES", number)


@pytest.mark.parametrize("name", ["softmax", "softmax_mixing"])
# Quasi-Monte-Carlo errors: in the third digit with the default number of samples.
@pytest.mark.parametrize(("num_samples", "tol"), [(NUM_BASE_SAMPLES, 5e-3), (2**15, 1e-4)])
@torch.no_grad()
def test_softmax_against_product_quadrature(
    name: str, num_samples: int, tol: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_samples(monkeypatch, num_samples)
    likelihood, n, c = CASES[name].make(), 4, 3
    (mean, variance), y = marginals(name, n), observations(name, n)
    nodes, weights = map(torch.as_tensor, np.polynomial.hermite_e.hermegauss(16))
    z = torch.cartesian_prod(*[nodes] * c).unsqueeze(1)  # nodes x 1 x c
    weights = torch.cartesian_prod(*[weights / weights.sum()] * c).prod(-1).reshape(-1, 1, 1)
    f = mean + variance.sqrt() * z
    if likelihood.mixing_weights is not None:
        f = f @ likelihood.mixing_weights.mT
    log_prob = f.log_softmax(-1).gather(-1, y.reshape(1, n, 1).expand(len(f), n, 1))
    expected = (
        (weights * log_prob).sum(0).squeeze(-1),
        (weights * log_prob * z).sum(0) / variance.sqrt(),
        -(weights * log_prob * (z**2 - 1)).sum(0) / variance,
    )
    actual = expectations(likelihood, y, mean, variance)
    for got, want in zip(actual, expected, strict=True):
        assert_close(got, want, tol)


@functools.cache
def ten_classes(
    mean: tuple[float, ...], variance: tuple[float, ...]
) -> tuple[float, np.ndarray, np.ndarray]:
    r"""``E[log sum exp f]``, ``E[p]`` and ``E[p (1 - p)]``, for any number of classes.

    With Gumbel noise, ``log sum exp f`` is the mean of ``max(f + g)`` less Euler's constant, and
    the distribution function of a maximum is a product: one integral instead of ten,
    ``F_k(t) = E[exp(-exp(f_k - t))]`` being one of one variable. ``E[p_k]`` is the probability that
    class k attains the maximum. The derivatives with respect to the variances are differences.
    """
    nodes, weights = np.polynomial.hermite_e.hermegauss(80)
    weights = weights / weights.sum()
    spread = np.sqrt(max(variance)) * nodes[weights > 1e-16].max()
    low, high = min(mean) - spread - 5, max(mean) + spread + 40
    t = np.linspace(low, high, 6001)

    def factor(mean: float, variance: float) -> np.ndarray:
        f = mean + math.sqrt(variance) * nodes
        return weights @ np.exp(-np.exp(np.clip(f[:, None] - t, -745, 700)))

    factors = np.stack([factor(m, v) for m, v in zip(mean, variance, strict=True)])

    def normaliser(factors: np.ndarray) -> float:
        above = high - integrate.simpson(factors.prod(0), x=t)  # E[max], if F(low) = 0
        return float(above - np.euler_gamma)

    def derivative(k: int, mean_step: float, variance_step: float) -> float:
        values = []
        for sign in (1, -1):
            changed = factors.copy()
            changed[k] = factor(mean[k] + sign * mean_step, variance[k] + sign * variance_step)
            values.append(normaliser(changed))
        return (values[0] - values[1]) / 2e-4

    p = np.array([derivative(k, 1e-4, 0) for k in range(len(mean))])
    curvature = np.array([2 * derivative(k, 0, 1e-4) for k in range(len(mean))])
    return normaliser(factors), p, curvature


def test_the_integral_of_ten_classes_is_right() -> None:
    """The oracle itself: two classes are one difference, a Gaussian."""
    mean, variance = (0.3, -0.8), (0.5, 1.2)
    z, w = np.polynomial.hermite_e.hermegauss(60)
    d = mean[1] - mean[0] + math.sqrt(sum(variance)) * z
    expected = mean[0] + float((w / w.sum()) @ np.logaddexp(0, d))
    assert ten_classes(mean, variance)[0] == pytest.approx(expected, abs=1e-8)


@pytest.mark.parametrize(
    ("num_samples", "spread", "scale", "tol"),
    [
        (NUM_BASE_SAMPLES, 1.0, 0.3, 2.5e-3),
        (NUM_BASE_SAMPLES, 3.0, 1.0, 8e-3),
        (NUM_BASE_SAMPLES, 3.0, 10.0, 3e-2),
        (2**15, 1.0, 0.3, 1e-4),
        (2**15, 3.0, 1.0, 1e-4),
        (2**15, 3.0, 10.0, 4e-3),
    ],
)
@torch.no_grad()
def test_softmax_of_ten_classes_against_brute_force(
    num_samples: int, spread: float, scale: float, tol: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Quasi-Monte-Carlo errors, which grow with the variance and vanish with more samples."""
    use_samples(monkeypatch, num_samples)
    generator = torch.Generator().manual_seed(0)
    mean = spread * torch.randn(3, 10, generator=generator, dtype=torch.float64)
    variance = scale * (0.5 + torch.rand(3, 10, generator=generator, dtype=torch.float64))
    y = torch.tensor([0, 4, 9])
    likelihood = gl.SoftmaxLikelihood(10, 10, mixing_weights=False)
    actual = expectations(likelihood, y, mean, variance)
    for i in range(3):
        value, p, curvature = ten_classes(tuple(mean[i].tolist()), tuple(variance[i].tolist()))
        one_hot = np.eye(10)[y[i]]
        assert float(actual.log_prob[i]) == pytest.approx(float(mean[i, y[i]]) - value, abs=tol)
        np.testing.assert_allclose(actual.alpha[i], one_hot - p, atol=tol)
        np.testing.assert_allclose(actual.beta[i], curvature, atol=tol)
        assert float(actual.alpha[i].sum()) == pytest.approx(0, abs=1e-12)


def test_many_observations_are_worked_on_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    likelihood, y = softmax(), observations("softmax", 50)
    mean, variance = marginals("softmax", 50)
    whole = expectations(likelihood, y, mean, variance)
    monkeypatch.setattr("seqgp.likelihoods.softmax._SAMPLES_AT_A_TIME", 7 * 3 * NUM_BASE_SAMPLES)
    for got, want in zip(expectations(likelihood, y, mean, variance), whole, strict=True):
        assert_close(got, want, 1e-13)


# ---------------------------------------------------------------- the bound


def log_bound(f: Tensor, y: Tensor, a: Tensor, xi: Tensor) -> Tensor:
    """Bouchard's bound with Jaakkola and Jordan's, constants and all, term by term."""
    x, lam = f - a, torch.tanh(xi / 2) / (4 * xi)
    each = lam * (x.square() - xi.square()) + (x - xi) / 2 + torch.nn.functional.softplus(xi)
    own = f.gather(-1, y.long().unsqueeze(-1).expand(*f.shape[:-1], 1)).squeeze(-1)
    return own - a.squeeze(-1) - each.sum(-1)


def best_bound(y: Tensor, mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The largest expectation of the bound by L-BFGS, and ``a`` and ``xi`` there."""
    a = torch.zeros(*mean.shape[:-1], 1, requires_grad=True)
    raw = torch.ones_like(mean).requires_grad_(True)
    optimizer = torch.optim.LBFGS(
        [a, raw],
        max_iter=500,
        tolerance_grad=1e-11,
        tolerance_change=0,
        line_search_fn="strong_wolfe",
    )

    def expected() -> Tensor:
        lam = torch.tanh(raw.exp() / 2) / (4 * raw.exp())
        return log_bound(mean, y, a, raw.exp()) - (lam * variance).sum(-1)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = -expected().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    return expected().detach(), a.detach(), raw.exp().detach()


@pytest.mark.parametrize("prior_mean", [0.0, 0.7])
def test_sites_of_the_bound_are_those_of_the_best_one(prior_mean: float) -> None:
    torch.manual_seed(0)
    mean, variance = 2 * torch.randn(6, 5), 0.1 + 3 * torch.rand(6, 5)
    y = torch.tensor([0, 1, 2, 3, 4, 0])
    lam, beta = softmax_bound_sites(
        y, mean, variance, torch.full_like(mean, prior_mean), iterations=500
    )
    _, a, xi = best_bound(y, mean, variance)
    # The bound as a function of one observation's latents: gradient and curvature.
    f = (mean - 1.3).requires_grad_(True)
    (slope,) = torch.autograd.grad(log_bound(f, y, a, xi).sum(), f)
    assert_close(lam - beta * (f.detach() - prior_mean), slope, 1e-6)
    assert_close(beta, torch.tanh(xi / 2) / (2 * xi), 1e-6)
    few = softmax_bound_sites(y, mean, variance, torch.full_like(mean, prior_mean))
    assert_close(few.beta, beta, 1e-3)  # twenty iterations have nearly converged


@settings(deadline=None, max_examples=50)
@given(
    seed=st.integers(0, 10**6),
    scale=st.floats(0.1, 20),
    spread=st.floats(0.01, 30),
    c=st.integers(2, 12),
)
def test_it_is_a_lower_bound(seed: int, scale: float, spread: float, c: int) -> None:
    """Whatever the latents are, near the posterior or far from it."""
    generator = torch.Generator().manual_seed(seed)
    mean = scale * torch.randn(c, generator=generator, dtype=torch.float64)
    variance = spread * torch.rand(c, generator=generator, dtype=torch.float64)
    y = torch.tensor(seed % c)
    lam, beta = softmax_bound_sites(y, mean, variance, torch.zeros_like(mean))
    assert bool((beta > 0).all())
    # Undo the sites: beta gives xi, and lam then a; with these the constant is known.
    one_hot = torch.nn.functional.one_hot(y, c).double()
    a = ((lam - one_hot + 0.5) / beta)[:1]
    xi = (variance + (mean - a).square()).sqrt()
    f = 10 * torch.randn(40, c, generator=generator, dtype=torch.float64)
    value = log_bound(f, y.expand(40), a.expand(40, 1), xi.expand(40, c))
    truth = f.log_softmax(-1)[:, int(y)]
    assert bool((value <= truth + 1e-9).all())
    quadratic = (lam * f - 0.5 * beta * f.square()).sum(-1)
    assert_close(value - quadratic, (value - quadratic)[:1].expand(40), 1e-6)


@torch.no_grad()
def test_base_samples_are_nearer_to_the_truth_than_the_bound() -> None:
    """So sites are made of samples; the bound is for what they cannot see."""
    torch.manual_seed(1)
    mean, variance = 3 * torch.randn(3, 10), 0.5 + torch.rand(3, 10)
    y = torch.tensor([0, 4, 9])
    likelihood = gl.SoftmaxLikelihood(10, 10, mixing_weights=False)
    sampled = expectations(likelihood, y, mean, variance).log_prob
    with torch.enable_grad():
        bound, _, _ = best_bound(y, mean, variance)
    truth = torch.tensor(
        [
            m[k] - ten_classes(tuple(m), tuple(v))[0]
            for m, v, k in zip(mean.tolist(), variance.tolist(), y.tolist(), strict=True)
        ]
    )
    assert bool(((sampled - truth).abs() < 1e-2).all())
    assert bool((truth - bound > 0.05).all())


def test_which_likelihoods_are_softmax() -> None:
    class Tempered(gl.SoftmaxLikelihood):
        def forward(self, function_samples: Tensor, *args: object, **kwargs: object) -> object:
            return super().forward(0.5 * function_samples, *args, **kwargs)

    assert is_softmax(softmax())
    assert not is_softmax(softmax(mixing=True))
    assert not is_softmax(Tempered(num_features=3, num_classes=3, mixing_weights=False))
    assert not is_softmax(gl.BernoulliLikelihood())

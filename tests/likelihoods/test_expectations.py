from __future__ import annotations

import math
from collections.abc import Callable

import mpmath
import pytest
import torch
from gpytorch import likelihoods as gl
from gpytorch.likelihoods import Likelihood
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import integrate, stats
from torch import Tensor
from torch.distributions import Normal, Poisson

from seqgp.dual import Expectations, sites
from seqgp.likelihoods.expectations import conditional_log_prob, expectations, expected_log_prob
from seqgp.likelihoods.predictive import log_predictive
from seqgp.likelihoods.traits import has_one_latent, is_conjugate, observation_noise
from tests.helpers import (
    CASES,
    CONJUGATE,
    ONE_LATENT,
    assert_close,
    latent,
    marginals,
    observations,
    softmax,
)

pytestmark = pytest.mark.usefixtures("float64")

all_likelihoods = pytest.mark.parametrize("name", list(CASES))
generic_expectations = expectations.dispatch(object)


def adaptive_quadrature(
    log_prob: Callable[[float], float], mean: float, variance: float, kink: float
) -> Tensor:
    """The three expectations of one observation, for any ``log p(y | f)``.

    By Stein's lemma the derivatives are expectations too: ``alpha = E[z log p] / sd`` and
    ``beta = -E[(z^2 - 1) log p] / variance``, ``z`` being ``f`` standardised.
    """
    sd = math.sqrt(variance)

    def expectation(weight: Callable[[float], float]) -> float:
        def integrand(z: float) -> float:
            return weight(z) * log_prob(mean + sd * z) * stats.norm.pdf(z)

        kinks = [min(max((kink - mean) / sd, -10), 10)]
        return integrate.quad(integrand, -10, 10, points=kinks, epsabs=1e-11, limit=200)[0]

    alpha = expectation(lambda z: z) / sd
    beta = -expectation(lambda z: z**2 - 1) / variance
    return torch.tensor([expectation(lambda z: 1.0), alpha, beta])


@pytest.mark.parametrize("name", ONE_LATENT)
@torch.no_grad()
def test_one_latent_against_adaptive_quadrature(name: str) -> None:
    likelihood, n = CASES[name].make(), 4
    (mean, variance), y = marginals(name, n), observations(name, n)
    arguments = CASES[name].arguments(n)
    actual = expectations(likelihood, y, mean, variance, **arguments)
    actual = torch.stack(torch.broadcast_tensors(*actual), -1)

    def log_prob(f: float, i: int) -> float:
        if name == "bernoulli":  # GPyTorch's own goes through the probability
            return stats.norm.logcdf((2 * y[i].item() - 1) * f)
        point = {key: value[i : i + 1] for key, value in arguments.items()}
        return likelihood.forward(torch.tensor([f]), **point).log_prob(y[i]).item()

    expected = [
        adaptive_quadrature(lambda f, i=i: log_prob(f, i), *moments, kink=y[i].item())
        for i, moments in enumerate(zip(mean.tolist(), variance.tolist(), strict=True))
    ]
    # 20 Gauss-Hermite nodes are exact for these, but for the tails of Student's t.
    assert_close(actual, torch.stack(expected), 1e-6 if name == "student_t" else 1e-10)


@all_likelihoods
def test_derivatives_of_the_expected_log_prob(name: str) -> None:
    """Closed forms and automatic ones alike; `gradcheck` is by finite differences."""
    likelihood, arguments = CASES[name].make(), CASES[name].arguments(4)
    (mean, variance), y = marginals(name, 4), observations(name, 4)
    mean, variance = mean.requires_grad_(True), variance.requires_grad_(True)

    def log_prob(mean: Tensor, variance: Tensor) -> Tensor:
        return expected_log_prob(likelihood, y, mean, variance, **arguments)

    assert torch.autograd.gradcheck(log_prob, (mean, variance))
    value = log_prob(mean, variance)
    d_mean, d_variance = torch.autograd.grad(value.sum(), (mean, variance))
    actual = expectations(likelihood, y, mean, variance, **arguments)
    for got, want in zip(actual, (value, d_mean, -2 * d_variance), strict=True):
        assert_close(got.expand_as(want), want, 1e-11)


@all_likelihoods
def test_expectations_are_differentiable(name: str) -> None:
    likelihood, arguments = CASES[name].make(), CASES[name].arguments(4)
    y = observations(name, 4)
    moments = [tensor.requires_grad_(True) for tensor in marginals(name, 4)]
    # The precision of a conjugate likelihood is a constant.
    outputs = slice(2) if name in CONJUGATE else slice(3)
    assert torch.autograd.gradcheck(
        lambda mean, variance: expectations(likelihood, y, mean, variance, **arguments)[outputs],
        moments,
    )


@all_likelihoods
def test_expectations_keep_no_graph_without_need(name: str) -> None:
    likelihood, arguments = CASES[name].make(), CASES[name].arguments(4)
    for parameter in likelihood.parameters():
        parameter.requires_grad_(False)
    expected = expectations(likelihood, observations(name, 4), *marginals(name, 4), **arguments)
    assert not any(tensor.requires_grad for tensor in expected)


@all_likelihoods
@pytest.mark.parametrize("num_sets", [2, 20])  # 20 is also the number of quadrature nodes
@torch.no_grad()
def test_sets_of_targets_broadcast_against_means(name: str, num_sets: int) -> None:
    """Targets ``f x b x q`` against means ``b x q [x c]``: the shapes of fantasies."""
    likelihood, arguments = CASES[name].make(), CASES[name].arguments(4)
    mean, variance = marginals(name, 2, 4)
    y = observations(name, num_sets, 2, 4)
    together = expectations(likelihood, y, mean, variance, **arguments)
    alone = [expectations(likelihood, targets, mean, variance, **arguments) for targets in y]
    for got, want in zip(together, zip(*alone, strict=True), strict=True):
        assert_close(got.expand(num_sets, *got.shape[-want[0].dim() :]), torch.stack(want), 1e-12)
    log_prob = expected_log_prob(likelihood, y, mean, variance, **arguments)
    assert_close(log_prob, together.log_prob, 1e-12)


@all_likelihoods
@torch.no_grad()
def test_one_set_of_targets_broadcasts_against_batches_of_means(name: str) -> None:
    likelihood, arguments = CASES[name].make(), CASES[name].arguments(4)
    mean, variance = marginals(name, 3, 4)
    y = observations(name, 4)
    together = expectations(likelihood, y, mean, variance, **arguments)
    for i in range(3):
        alone = expectations(likelihood, y, mean[i], variance[i], **arguments)
        for got, want in zip(together, alone, strict=True):
            got = got[i] if got.dim() > want.dim() else got
            assert_close(got, want, 1e-12)


@torch.no_grad()
def test_as_many_points_as_classes() -> None:
    """GPyTorch's softmax then transposes its input, taking it for ``c x n``."""
    likelihood, y = softmax(mixing=True), torch.tensor([2, 0, 1, 1])
    mean, variance = marginals("softmax", 4)
    all_four = expectations(likelihood, y, mean, variance)
    first_three = expectations(likelihood, y[:3], mean[:3], variance[:3])
    for three, four in zip(first_three, all_four, strict=True):
        assert_close(three, four[:3], 1e-12)


@all_likelihoods
@torch.no_grad()
def test_deterministic(name: str) -> None:
    (mean, variance), y = marginals(name, 5), observations(name, 5)
    twice = [
        expectations(CASES[name].make(), y, mean, variance, **CASES[name].arguments(5))
        for _ in range(2)
    ]
    assert all(torch.equal(a, b) for a, b in zip(*twice, strict=True))


@settings(deadline=None, max_examples=25)
@given(mean=st.floats(-6, 6), log_variance=st.floats(-12, 3), label=st.sampled_from([0.0, 1.0]))
def test_log_concave_likelihoods_have_positive_precision(
    mean: float, log_variance: float, label: float
) -> None:
    q = torch.tensor([mean]), torch.tensor([math.exp(log_variance)])
    for name in ("gaussian", "bernoulli", "laplace", "ordinal"):
        assert expectations(CASES[name].make(), torch.tensor([label]), *q).beta >= 0


@pytest.mark.parametrize("variance", [1e-12, 1e-6, 1e-2])
@pytest.mark.parametrize("name", ["bernoulli", "poisson", "student_t", "softmax"])
@torch.no_grad()
def test_small_variances_lead_to_the_derivatives_at_the_mean(name: str, variance: float) -> None:
    """As the variance vanishes, alpha and beta are the derivatives of ``log p`` itself."""
    likelihood, y = CASES[name].make(), observations(name, 4)
    mean, _ = marginals(name, 4)
    actual = expectations(likelihood, y, mean, torch.full_like(mean, variance))
    with torch.enable_grad():
        f = mean.clone().requires_grad_(True)
        if name == "softmax":
            log_prob = f.log_softmax(-1).gather(-1, y.unsqueeze(-1)).squeeze(-1)
        else:
            log_prob = likelihood.forward(f).log_prob(y)
        (slope,) = torch.autograd.grad(log_prob.sum(), f, create_graph=True)
        rows = [torch.autograd.grad(s.sum(), f, retain_graph=True)[0] for s in slope.unbind(-1)]
        curvature = torch.stack(rows, -2).diagonal(dim1=-2, dim2=-1)
    assert_close(actual.alpha, slope, 5 * variance + 1e-9)
    assert_close(actual.beta, -curvature, 5 * variance + 1e-9)


@pytest.mark.parametrize("floor", [0.0, 0.5, None])
def test_sites(floor: float | None) -> None:
    expected = Expectations(torch.zeros(3), torch.randn(3), torch.tensor([-1.0, 0.2, 3.0]))
    centred = torch.randn(3)
    lam, beta = sites(expected, centred, floor)
    floored = expected.beta if floor is None else expected.beta.clamp_min(floor)
    assert torch.equal(beta, floored)
    assert torch.equal(lam, expected.alpha + floored * centred)


@all_likelihoods
def test_no_observations_have_no_log_probabilities(name: str) -> None:
    """Those of a process without data, which takes part in sums over all of them."""
    case = CASES[name]
    moments = torch.zeros(0) if case.num_latents is None else torch.zeros(0, case.num_latents)
    arguments = {key: value[..., :0] for key, value in case.arguments(3).items()}
    y = case.sample(latent(torch.rand(3, 2), case.num_latents))[:0]
    actual = expected_log_prob(case.make(), y, moments, moments + 1, **arguments)
    assert actual.shape == (0,)


@pytest.mark.filterwarnings("ignore:GaussianLikelihoodWithMissingObs:DeprecationWarning")
def test_missing_targets_have_empty_sites() -> None:
    likelihood = gl.GaussianLikelihoodWithMissingObs()
    y = torch.tensor([0.5, torch.nan, -1.0])
    mean, variance = marginals("gaussian", 3)
    actual = expectations(likelihood, y, mean, variance)
    complete = expectations(gl.GaussianLikelihood(), y, mean, variance)
    for got, want in zip(actual, complete, strict=True):
        want = want.expand(3)
        assert_close(got[[0, 2]], want[[0, 2]], 1e-12)
        assert got[1] == 0


def test_observation_noise() -> None:
    homoscedastic = gl.GaussianLikelihood(batch_shape=torch.Size([2]))
    assert_close(observation_noise(homoscedastic, 3), homoscedastic.noise.expand(2, 3), 1e-15)
    noise = torch.tensor([0.1, 0.2, 0.3])
    assert torch.equal(observation_noise(homoscedastic, 3, noise=noise), noise)
    fixed = gl.FixedNoiseGaussianLikelihood(noise, learn_additional_noise=True)
    assert_close(observation_noise(fixed, 3), noise + fixed.second_noise, 1e-15)
    assert_close(
        observation_noise(fixed, 2, noise=noise[:2]), noise[:2] + fixed.second_noise, 1e-15
    )
    with pytest.raises(ValueError, match="noise: the likelihood has the noise of 3 points"):
        observation_noise(fixed, 2)


@all_likelihoods
def test_what_kind_of_likelihood_it_is(name: str) -> None:
    likelihood = CASES[name].make()
    assert has_one_latent(likelihood) == (CASES[name].num_latents is None)
    assert is_conjugate(likelihood) == (name in CONJUGATE)


class Heteroscedastic(Likelihood):
    """A user's own likelihood of two latents: a mean and a log standard deviation."""

    def forward(self, function_samples: Tensor, *args: object, **kwargs: object) -> Normal:
        return Normal(function_samples[..., 0], function_samples[..., 1].exp())


@torch.no_grad()
def test_any_likelihood_of_several_latents() -> None:
    mean, variance = marginals("gaussian", 4, 2)[0], torch.full((4, 2), 0.05)
    y = mean[:, 0] + torch.linspace(-1, 1, 4)
    (m, s), (v, w) = mean.mT, variance.mT
    square, precision = (y - m) ** 2 + v, (2 * w - 2 * s).exp()
    log_prob = -0.5 * math.log(2 * math.pi) - s - 0.5 * square * precision
    alpha = torch.stack([(y - m) * precision, square * precision - 1], -1)
    beta = torch.stack([precision, 2 * square * precision], -1)
    actual = expectations(Heteroscedastic(), y, mean, variance)
    for got, want in zip(actual, (log_prob, alpha, beta), strict=True):
        assert_close(got, want, 2e-2)  # 256 quasi-Monte-Carlo samples


def test_a_rule_of_ones_own_is_used() -> None:
    class Flat(gl.BernoulliLikelihood):
        pass

    @expectations.register(Flat)
    def _flat(likelihood: Flat, targets: Tensor, mean: Tensor, variance: Tensor) -> Expectations:
        return Expectations(*torch.zeros(3, *mean.shape))

    assert not expectations(Flat(), torch.ones(2), torch.ones(2), torch.ones(2)).beta.any()


class LogLink(gl.PoissonLikelihood):
    """A subclass that is another likelihood: the rate is ``exp(f)``."""

    def forward(self, function_samples: Tensor, *args: object, **kwargs: object) -> Poisson:
        return Poisson(function_samples.exp())


@torch.no_grad()
def test_a_subclass_with_another_link_does_not_inherit_the_rule() -> None:
    mean, variance = marginals("poisson", 4)
    y, rate = torch.tensor([0.0, 1.0, 2.0, 5.0]), (mean + variance / 2).exp()
    actual = expectations(LogLink(), y, mean, variance)
    expected = (y * mean - rate - (y + 1).lgamma(), y - rate, rate)
    for got, want in zip(actual, expected, strict=True):
        assert_close(got, want, 1e-10)


def log_prob_in_many_digits(name: str, y: int, f: float, p: float = 0.5) -> float:
    """``log p(y | f)`` with 50 digits, of which no rate underflows."""
    with mpmath.workdps(50):
        rate = mpmath.log1p(mpmath.exp(mpmath.mpf(f)))
        if name == "poisson":
            return float(y * mpmath.log(rate) - rate - mpmath.loggamma(y + 1))
        k = rate * (1 - p) / p
        choose = mpmath.loggamma(k + y) - mpmath.loggamma(k) - mpmath.loggamma(y + 1)
        return float(choose + k * mpmath.log(1 - p) + y * mpmath.log(p))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", ["poisson", "negative_binomial"])
def test_counts_far_below_zero(name: str, dtype: torch.dtype) -> None:
    """Where softplus underflows, as it does at a quadrature node of a large variance."""
    f = torch.tensor([-1e4, -800.0, -110.0, -40.0, -15.0, -1.0, 0.0, 3.0, 30.0], dtype=dtype)
    f.requires_grad_(True)
    likelihood = CASES[name].make().to(dtype)
    for y in (0, 1, 7):
        actual = conditional_log_prob(likelihood, torch.full_like(f, y), f)
        expected = [log_prob_in_many_digits(name, y, value) for value in f.tolist()]
        tol = 1e-5 if dtype == torch.float32 else 1e-8  # torch's softplus is linear above 20
        assert_close(actual, torch.tensor(expected), tol)
        (slope,) = torch.autograd.grad(actual.sum(), f)
        power = y if name == "poisson" else min(y, 1)  # of the rate to which p(y) tends
        assert_close(slope[0], torch.tensor(float(power)), 1e-6)
        assert slope.isfinite().all()


@pytest.mark.parametrize(("dtype", "tol"), [(torch.float32, 1e-5), (torch.float64, 1e-10)])
@torch.no_grad()
def test_slope_of_the_probit_in_the_tails(dtype: torch.dtype, tol: float) -> None:
    x = torch.cat([-torch.logspace(-2, 5, 200, dtype=dtype), torch.linspace(0, 8, 20, dtype=dtype)])
    # At the smallest variance the slope's expectation is the slope at the mean.
    actual = expectations(gl.BernoulliLikelihood(), torch.ones_like(x), x, 1e-12 + 0 * x).alpha
    expected = math.sqrt(2 / math.pi) / torch.special.erfcx(-x.double() / math.sqrt(2))
    assert ((actual - expected).abs() / expected.clamp_min(1e-3)).max() < 20 * tol


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("variance", [1e-4, 1.0, 1e4, 1e5])
@all_likelihoods
def test_finite_whatever_the_variance(name: str, variance: float, dtype: torch.dtype) -> None:
    likelihood = CASES[name].make().to(dtype)
    arguments = {key: value.to(dtype) for key, value in CASES[name].arguments(4).items()}
    mean, y = marginals(name, 4)[0].to(dtype), observations(name, 4)
    y = y if CASES[name].num_latents else y.to(dtype)
    moments = [mean.requires_grad_(True), torch.full_like(mean, variance).requires_grad_(True)]
    actual = expectations(likelihood, y, *moments, **arguments)
    assert all(tensor.isfinite().all() for tensor in actual)
    total = sum(tensor.sum() for tensor in actual)
    for gradient in torch.autograd.grad(total, moments):  # type: ignore[arg-type]
        assert gradient.isfinite().all()
    assert log_predictive(likelihood, y, *moments, **arguments).isfinite().all()

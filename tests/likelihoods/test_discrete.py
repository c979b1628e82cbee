"""The likelihoods against SciPy, against GPyTorch and against themselves."""

from __future__ import annotations

import copy
import doctest
import math
from collections.abc import Callable, Iterator

import gpytorch
import numpy as np
import pytest
import torch
from botorch.fit import fit_gpytorch_mll
from gpytorch.constraints import GreaterThan, Positive
from gpytorch.distributions import MultivariateNormal
from gpytorch.likelihoods import BernoulliLikelihood, Likelihood
from gpytorch.priors import GammaPrior
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import integrate, stats
from torch import Tensor

import seqgp.likelihoods.discrete
from seqgp import DualELBO, SequentialGP
from seqgp.likelihoods.discrete import (
    BinomialLikelihood,
    OrdinalLikelihood,
    OverdispersedBinomialLikelihood,
)
from seqgp.likelihoods.expectations import expectations

LINKS = ["logit", "probit"]
NOISE = {"logit": stats.logistic, "probit": stats.norm}
CUTPOINTS = [-1.2, 0.1, 0.9]
# Moderate moments, for which 20 exact Gauss-Hermite nodes suffice: the errors found up to v = 1 are
# 6e-10 for log p, which is nearly quadratic, and 3e-6 for p, which is a step or a bump. They grow
# with v (at v = 10 to 8e-4 and, for p of a binomial with the probit link, to 0.3).
MOMENTS = [(0.0, 0.1), (-1.3, 0.5), (2.0, 1.0), (0.7, 1.0)]
TOLERANCE = {"expected_log_prob": 1e-8, "log_marginal": 5e-6}
METHODS = list(TOLERANCE)


@pytest.fixture
def float64() -> Iterator[None]:
    """Construct in float64, in which GPyTorch's nodes are exact and not rounded to float32."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture
def meta_device() -> Iterator[None]:
    """Where a tensor made without a device holds no data, and meets no CPU tensor."""
    yield
    torch.set_default_device(None)


def normal(mean: Tensor, variance: Tensor) -> MultivariateNormal:
    return MultivariateNormal(mean, torch.diag_embed(variance))


def make(name: str, link: str, learn_scale: bool = False) -> Likelihood:
    """A likelihood of observations 0, 1, 2 and 3."""
    if name == "binomial":
        return BinomialLikelihood(total_count=3, link=link)
    return OrdinalLikelihood(4, link, learn_scale=learn_scale, cutpoints=torch.tensor(CUTPOINTS))


def log_pmf(name: str, link: str, y: int, f: float) -> float:
    """The definition: log p(y | f) of the likelihoods of `make`."""
    noise = NOISE[link]
    if name == "binomial":
        return math.log(math.comb(3, y)) + y * noise.logcdf(f) + (3 - y) * noise.logsf(f)
    low, high = np.array([-np.inf, *CUTPOINTS, np.inf])[[y, y + 1]] - f
    left = low + high < 0  # subtract the smaller two of the cdf and of the survival function
    return np.log(noise.cdf(high) - noise.cdf(low) if left else noise.sf(low) - noise.sf(high))


def integral(function: Callable[[float], float], mean: float, variance: float) -> float:
    """The expectation of `function` under a normal distribution."""
    q = stats.norm(mean, math.sqrt(variance))
    bounds = mean - 9 * q.std(), mean + 9 * q.std()
    return integrate.quad(lambda f: function(f) * q.pdf(f), *bounds, epsabs=1e-10)[0]


both = pytest.mark.parametrize("name", ["binomial", "ordinal"])
links = pytest.mark.parametrize("link", LINKS)


@links
def test_binomial_log_prob_is_scipys(link: str, float64: None) -> None:
    f = torch.linspace(-4, 4, 9)
    total = torch.tensor([0, 1, 2, 3, 5, 8, 13, 40, 100])
    y = (total * torch.linspace(0, 1, 9)).round()
    expected = stats.binom.logpmf(y.numpy(), total.numpy(), NOISE[link].cdf(f.numpy()))
    actual = BinomialLikelihood(link=link)(f, total_count=total).log_prob(y)
    np.testing.assert_allclose(actual.numpy(), expected, rtol=1e-9, atol=1e-11)


@links
def test_ordinal_log_prob_is_the_formula(link: str, float64: None) -> None:
    likelihood = make("ordinal", link)
    likelihood.scale = 0.7
    f = np.linspace(-4, 4, 17)
    z = (np.array([-np.inf, *CUTPOINTS, np.inf]) - f[:, None]) / 0.7
    actual = likelihood(torch.as_tensor(f)).probs.detach().numpy()
    np.testing.assert_allclose(actual, np.diff(NOISE[link].cdf(z)), rtol=1e-8, atol=1e-12)


@links
def test_ordinal_tails_are_accurate(link: str, float64: None) -> None:
    """Far out, where F(u) - F(l) = 1 - 1 or 0 - 0, against SciPy's survival functions."""
    likelihood = make("ordinal", link)
    f = torch.tensor([-30.0, 30.0])
    dist = NOISE[link]
    low, high = np.array(CUTPOINTS[:-1]), np.array(CUTPOINTS[1:])
    left = np.log(dist.sf(low + 30) - dist.sf(high + 30))
    right = np.log(dist.cdf(high - 30) - dist.cdf(low - 30))
    actual = likelihood(f).logits[:, 1:-1].detach().numpy()
    np.testing.assert_allclose(actual, np.stack([left, right]), rtol=1e-11)


@pytest.mark.parametrize("num_classes", [2, 3, 7])
@links
def test_probabilities_sum_to_one(link: str, num_classes: int, float64: None) -> None:
    likelihood = OrdinalLikelihood(num_classes, link=link)
    f = torch.linspace(-12, 12, 49)
    # Before `Categorical` normalizes them, which would hide a mistake.
    total = likelihood._class_log_probs(f, likelihood.scale).logsumexp(-1).detach()
    torch.testing.assert_close(total, torch.zeros(49), rtol=0, atol=1e-13)
    marginal = likelihood(normal(f, torch.ones(49)))
    assert marginal.batch_shape == (49,)
    torch.testing.assert_close(marginal.probs.sum(-1).detach(), torch.ones(49))
    binomial = BinomialLikelihood(total_count=6, link=link)(f)
    torch.testing.assert_close(binomial.log_prob(torch.arange(7.0)[:, None]).exp().sum(0), f**0)


def test_two_classes_are_bernoulli() -> None:
    likelihood = OrdinalLikelihood(2, cutpoints=torch.zeros(1)).double()
    bernoulli = BernoulliLikelihood().double()
    mean = torch.linspace(-3, 3, 8, dtype=torch.float64)
    variance = torch.linspace(0.01, 4, 8, dtype=torch.float64)
    y = (torch.arange(8) % 2).double()
    q = normal(mean, variance)
    torch.testing.assert_close(likelihood(q).probs[:, 1], bernoulli(q).probs, rtol=0, atol=1e-12)
    actual, expected = likelihood.log_marginal(y, q), bernoulli.log_marginal(y, q)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-6)
    # GPyTorch's `log_normal_cdf` is off by up to 2e-3 just left of -1, in float64 too, and exact to
    # the right of -1. So compare tightly where all the nodes lie there, and roughly elsewhere.
    actual, expected = likelihood.expected_log_prob(y, q), bernoulli.expected_log_prob(y, q)
    torch.testing.assert_close(actual, expected, rtol=0, atol=5e-4)
    q = normal(mean.abs() * (2 * y - 1), variance * 0.01)
    actual, expected = likelihood.expected_log_prob(y, q), bernoulli.expected_log_prob(y, q)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("y", [0, 1, 3])
@links
@both
def test_integrals_are_scipys(name: str, link: str, y: int, float64: None) -> None:
    likelihood = make(name, link)
    mean, variance = torch.tensor(MOMENTS).T
    q, observations = normal(mean, variance), torch.full_like(mean, y)
    expected_log_prob = likelihood.expected_log_prob(observations, q).detach()
    log_marginal = likelihood.log_marginal(observations, q).detach()
    for i, (m, v) in enumerate(MOMENTS):
        expected = integral(lambda f: log_pmf(name, link, y, f), m, v)
        assert expected_log_prob[i].item() == pytest.approx(
            expected, abs=TOLERANCE["expected_log_prob"]
        )
        expected = math.log(integral(lambda f: math.exp(log_pmf(name, link, y, f)), m, v))
        assert log_marginal[i].item() == pytest.approx(expected, abs=TOLERANCE["log_marginal"])


@links
@both
def test_nodes_rounded_to_float32_cost_little(name: str, link: str, float64: None) -> None:
    """Constructed in float32 and then made `.double()`, as BoTorch's users do."""
    exact = make(name, link)
    torch.set_default_dtype(torch.float32)
    rounded = make(name, link).double()
    q = normal(*torch.tensor(MOMENTS, dtype=torch.float64).T)
    y = torch.full((len(MOMENTS),), 2.0, dtype=torch.float64)
    for method in METHODS:
        actual, expected = getattr(rounded, method)(y, q), getattr(exact, method)(y, q)
        assert actual.dtype == torch.float64
        torch.testing.assert_close(actual, expected, rtol=0, atol=2e-6)


@links
def test_ordinal_marginal_is_log_marginal(link: str) -> None:
    likelihood = make("ordinal", link)
    assert likelihood.has_analytic_marginal == (link == "probit")
    q = normal(torch.tensor([-1.0, 0.0, 2.0]), torch.tensor([0.5, 1.0, 2.0]))
    for y in range(4):
        observations = torch.full((3,), y)
        nodes = likelihood._log_mean_exp(likelihood._log_probs(observations, q))
        log_marginal = likelihood.log_marginal(observations, q)
        torch.testing.assert_close(likelihood(q).logits[:, y], log_marginal)
        torch.testing.assert_close(nodes, log_marginal, rtol=0, atol=1e-5)


def test_log_marginal_does_not_underflow() -> None:
    q = normal(torch.tensor([-60.0]), torch.tensor([0.01]))
    likelihood = BinomialLikelihood(total_count=1000)
    actual = likelihood.log_marginal(torch.tensor([1000.0]), q)
    # log E[e^{1000 f}] = 1000 m + 1000^2 v / 2 lies beyond the last node, 7.6 deviations out.
    assert -60_000 < actual.item() < -52_000


@links
@both
@pytest.mark.parametrize("method", METHODS)
def test_gradcheck(name: str, link: str, method: str, float64: None) -> None:
    """First and second derivatives, in the moments and in the parameters."""
    module = Call(make(name, link, learn_scale=True), method)
    y = torch.tensor([0.0, 1.0, 2.0, 3.0])
    parameters = dict(module.named_parameters())

    def function(mean: Tensor, variance: Tensor, *values: Tensor) -> Tensor:
        state = dict(zip(parameters, values, strict=True))
        return torch.func.functional_call(module, state, (y, normal(mean, variance)))

    mean = torch.tensor([-0.5, 3.0, 0.2, -2.0], requires_grad=True)
    variance = torch.tensor([0.3, 1.0, 2.0, 0.5], requires_grad=True)
    inputs = (mean, variance, *(p.detach().clone().requires_grad_() for p in parameters.values()))
    assert torch.autograd.gradcheck(function, inputs)
    assert torch.autograd.gradgradcheck(function, inputs)


class Call(torch.nn.Module):
    """Call a method of a likelihood through `torch.func.functional_call`."""

    def __init__(self, likelihood: torch.nn.Module, method: str) -> None:
        super().__init__()
        self.likelihood, self.method = likelihood, method

    def forward(self, *args) -> Tensor:
        return getattr(self.likelihood, self.method)(*args)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@links
@both
def test_extremes_are_finite(name: str, link: str, dtype: torch.dtype) -> None:
    likelihood = make(name, link, learn_scale=True).to(dtype)
    f = torch.linspace(-50, 50, 1001, dtype=dtype, requires_grad=True)
    for y in range(4):
        log_prob = likelihood(f).log_prob(torch.full_like(f, y))
        assert log_prob.isfinite().all()
        inputs = [f, *likelihood.parameters()]
        gradients = torch.autograd.grad(log_prob.sum(), inputs, create_graph=True)
        assert all(g.isfinite().all() and g.dtype == dtype for g in gradients)
        (curvature,) = torch.autograd.grad(gradients[0].sum(), f)
        assert curvature.isfinite().all()
        # Log-concave in f: the curvature is negative up to rounding.
        assert curvature.max() < 1e-6


@links
def test_float32_tails_agree_with_float64(link: str) -> None:
    single, double = make("ordinal", link), make("ordinal", link).double()
    f = torch.linspace(-50, 50, 201)
    actual, expected = single(f).logits.double(), double(f.double()).logits
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)


@links
def test_a_vanished_class_stays_finite(link: str) -> None:
    likelihood = make("ordinal", link)
    likelihood.raw_gaps.data[0] = -300.0
    assert likelihood.cutpoints[0] == likelihood.cutpoints[1]
    f = torch.tensor([-50.0, -1.0, 0.0, 50.0], requires_grad=True)
    logits = likelihood(f).logits
    logits.sum().backward()
    assert logits.isfinite().all()
    assert logits[:, 1].max() < -12
    assert f.grad.isfinite().all()
    assert likelihood.raw_gaps.grad.isfinite().all()


def test_totals_per_point() -> None:
    f, total = torch.zeros(3), torch.tensor([2, 4, 6])
    q = normal(f, torch.ones(3))
    y = torch.tensor([1.0, 2.0, 3.0])
    stored, passed = BinomialLikelihood(total), BinomialLikelihood()
    overridden = BinomialLikelihood(99)
    for likelihood in [passed, overridden]:
        torch.testing.assert_close(likelihood(f, total_count=total).mean, y)
        for method in METHODS:
            actual = getattr(likelihood, method)(y, q, total_count=total)
            torch.testing.assert_close(actual, getattr(stored, method)(y, q))
        with gpytorch.settings.num_likelihood_samples(7):
            marginal = likelihood(q, total_count=total)
        assert marginal.batch_shape == (7, 3)
        torch.testing.assert_close(marginal.total_count, total.float().expand(7, 3))
    torch.testing.assert_close(passed(f, total_count=8).mean, torch.full((3,), 4.0))
    empty = passed.log_marginal(torch.zeros(3), q, total_count=torch.zeros(3))
    torch.testing.assert_close(empty, torch.zeros(3), rtol=0, atol=1e-6)


def test_total_count_follows_the_module() -> None:
    likelihood = BinomialLikelihood(torch.tensor([1, 2])).double()
    assert likelihood.total_count.dtype == torch.float64
    assert likelihood(torch.zeros(2, dtype=torch.float32)).mean.dtype == torch.float32
    assert likelihood.to("meta").total_count.device.type == "meta"
    total = torch.tensor([1.0, 2.0])
    likelihood = BinomialLikelihood(total)
    total.zero_()
    assert likelihood.total_count.tolist() == [1, 2]


@links
@both
@pytest.mark.parametrize("batch", [3, 20])  # 20: the number of nodes, not to be confused with it
def test_batches(name: str, link: str, batch: int) -> None:
    torch.manual_seed(0)
    likelihood = make(name, link)
    mean, y = torch.randn(batch, 5), torch.randint(4, (batch, 5))
    variance = torch.rand(batch, 5) + 0.1
    for method in METHODS:
        call = getattr(likelihood, method)
        pointwise = [call(y[i], normal(mean[i], variance[i])) for i in range(batch)]
        actual = call(y, normal(mean, variance))
        torch.testing.assert_close(actual, torch.stack(pointwise))
        # The observations, or the latent function, have batches of their own.
        actual = call(y, normal(mean[0], variance[0]))
        torch.testing.assert_close(actual[2], call(y[2], normal(mean[0], variance[0])))
        actual = call(y[0], normal(mean, variance))
        torch.testing.assert_close(actual[2], call(y[0], normal(mean[2], variance[2])))
    if name == "binomial":
        total = torch.randint(4, 9, (5,))
        actual = likelihood.log_marginal(y, normal(mean, variance), total_count=total)
        expected = likelihood.log_marginal(y[1], normal(mean[1], variance[1]), total_count=total)
        torch.testing.assert_close(actual[1], expected)


@links
@pytest.mark.parametrize("batch", [2, 20])
def test_batch_shape_of_the_parameters(link: str, batch: int) -> None:
    cutpoints = torch.tensor(CUTPOINTS) + torch.linspace(-1, 1, batch)[:, None]
    likelihood = OrdinalLikelihood(4, link, torch.Size([batch]), True, cutpoints=cutpoints)
    assert likelihood.cutpoints.shape == (batch, 3)
    assert likelihood.scale.shape == (batch, 1)
    torch.testing.assert_close(likelihood.cutpoints, cutpoints)
    q, y = normal(torch.zeros(5), torch.ones(5)), torch.tensor([0, 1, 2, 3, 0])
    one = OrdinalLikelihood(4, link, cutpoints=cutpoints[1])
    assert likelihood(torch.zeros(batch, 5)).batch_shape == (batch, 5)
    torch.testing.assert_close(likelihood(q).probs[1], one(q).probs)
    for method in METHODS:
        actual = getattr(likelihood, method)(y, q)
        assert actual.shape == (batch, 5)
        torch.testing.assert_close(actual[1], getattr(one, method)(y, q))


@pytest.mark.parametrize("num_classes", [2, 3, 5, 10])
@pytest.mark.parametrize(("link", "tolerance"), [("probit", 1e-5), ("logit", 0.05)])
def test_default_cutpoints(num_classes: int, link: str, tolerance: float) -> None:
    likelihood = OrdinalLikelihood(num_classes, link)
    cutpoints = likelihood.cutpoints.detach()
    torch.testing.assert_close(cutpoints, -cutpoints.flip(-1), rtol=0, atol=1e-6)
    probs = likelihood(normal(torch.zeros(1), torch.ones(1))).probs.detach()
    equal = torch.full((1, num_classes), 1 / num_classes)
    torch.testing.assert_close(probs, equal, rtol=tolerance, atol=0)
    constraint = Positive(initial_value=3.0)
    wide = OrdinalLikelihood(num_classes, link, learn_scale=True, scale_constraint=constraint)
    probs = wide(normal(torch.zeros(1), torch.ones(1))).probs.detach()
    torch.testing.assert_close(probs, equal, rtol=max(tolerance, 0.2 * (link == "logit")), atol=0)


def test_scale() -> None:
    fixed, learned = OrdinalLikelihood(3), OrdinalLikelihood(3, learn_scale=True)
    assert fixed.scale.item() == 1.0
    assert "fixed_scale" in dict(fixed.named_buffers())
    assert "raw_scale" in dict(learned.named_parameters())
    assert not any("scale" in name for name, _ in fixed.named_parameters())
    assert learned.scale.item() == pytest.approx(1.0, rel=1e-6)
    for likelihood in [fixed, learned]:
        likelihood.scale = 2.5
        assert likelihood.scale.item() == pytest.approx(2.5)
        likelihood.initialize(scale=torch.tensor(0.3))
        assert likelihood.scale.item() == pytest.approx(0.3)
        with pytest.raises(ValueError, match="positive"):
            likelihood.scale = 0.0
    # Only the ratio to the latent function and the cutpoints matters.
    f = torch.linspace(-2, 2, 5)
    expected = fixed(f).probs
    fixed.cutpoints, fixed.scale = 10 * fixed.cutpoints.detach(), 3.0
    torch.testing.assert_close(fixed(10 * f).probs, expected)


def test_scale_prior_and_constraint() -> None:
    constraint = GreaterThan(0.5, initial_value=2.0)
    prior = GammaPrior(2.0, 1.0)
    likelihood = OrdinalLikelihood(
        3, learn_scale=True, scale_prior=prior, scale_constraint=constraint
    )
    assert likelihood.scale.item() == pytest.approx(2.0)
    likelihood.raw_scale.data.fill_(-100.0)
    assert likelihood.scale.item() == pytest.approx(0.5)
    (_, module, _, closure, setting_closure), *rest = likelihood.named_priors()
    assert not rest
    setting_closure(module, torch.tensor(1.5))
    assert closure(module).item() == pytest.approx(1.5)
    assert copy.deepcopy(likelihood).scale.item() == pytest.approx(1.5)


def test_errors() -> None:
    f = torch.zeros(2)
    q = normal(f, torch.ones(2))
    likelihood = BinomialLikelihood()
    for call in [
        lambda: likelihood(f),
        lambda: likelihood(q),
        lambda: likelihood.expected_log_prob(f, q),
        lambda: likelihood.log_marginal(f, q),
    ]:
        with pytest.raises(ValueError, match="`total_count` is missing"):
            call()
    for total in [-1, 1.5, math.nan, math.inf]:
        with pytest.raises(ValueError, match="total_count"):
            BinomialLikelihood(total)
        with pytest.raises(ValueError, match="total_count"):
            likelihood(f, total_count=torch.tensor([1.0, total]))
    with pytest.raises(ValueError, match="support"):
        likelihood.expected_log_prob(torch.tensor([0.0, 3.0]), q, total_count=2)
    for constructor in [BinomialLikelihood, lambda link: OrdinalLikelihood(3, link)]:
        with pytest.raises(ValueError, match=r"`link` must be one of .*'cloglog'"):
            constructor(link="cloglog")
    with pytest.raises(ValueError, match="at least 2, got 1"):
        OrdinalLikelihood(1)
    with pytest.raises(ValueError, match="learn_scale"):
        OrdinalLikelihood(3, scale_prior=GammaPrior(1.0, 1.0))
    with pytest.raises(ValueError, match="support"):
        OrdinalLikelihood(3).expected_log_prob(torch.tensor([0, 3]), q)


@pytest.mark.parametrize("value", [[1.0, 0.0], [0.0, 0.0], [0.0, math.nan], [0.0, math.inf]])
def test_cutpoints_must_increase(value: list[float]) -> None:
    likelihood = OrdinalLikelihood(3)
    before = likelihood.cutpoints
    with pytest.raises(ValueError, match="strictly increasing"):
        likelihood.cutpoints = torch.tensor(value)
    with pytest.raises(ValueError, match="Expected 2 cutpoints"):
        likelihood.cutpoints = torch.zeros(3)
    torch.testing.assert_close(likelihood.cutpoints, before, rtol=0, atol=0)


@settings(max_examples=50, deadline=None)
@given(
    st.floats(-1e3, 1e3, width=32),
    st.lists(st.floats(-1e3, 1e3, width=32), min_size=0, max_size=8),
)
def test_cutpoints_never_decrease(first: float, raw_gaps: list[float]) -> None:
    """Wherever an optimizer takes the parameters, and then the classes' probabilities exist."""
    likelihood = OrdinalLikelihood(len(raw_gaps) + 2)
    likelihood.first_cutpoint.data.fill_(first)
    likelihood.raw_gaps.data.copy_(torch.tensor(raw_gaps))
    assert (likelihood.cutpoints.diff() >= 0).all()
    logits = likelihood(torch.tensor([-1.0, 0.0, 1.0])).logits
    logits.sum().backward()
    assert logits.isfinite().all()
    assert likelihood.raw_gaps.grad.isfinite().all()


@settings(max_examples=50, deadline=None)
@given(
    st.floats(-100, 100),
    st.lists(st.floats(1e-3, 100), min_size=0, max_size=8),
)
def test_cutpoints_round_trip(first: float, gaps: list[float]) -> None:
    value = torch.tensor([first, *gaps], dtype=torch.float64).cumsum(-1)
    likelihood = OrdinalLikelihood(len(value) + 1).double()
    likelihood.cutpoints = value
    torch.testing.assert_close(likelihood.cutpoints.detach(), value, rtol=1e-9, atol=1e-9)


def test_state_dict_round_trip() -> None:
    f = torch.linspace(-2, 2, 5)
    kwargs = {"num_classes": 4, "learn_scale": True}
    source, target = OrdinalLikelihood(**kwargs), OrdinalLikelihood(**kwargs)
    source.cutpoints, source.scale = torch.tensor(CUTPOINTS), 0.4
    target.load_state_dict(source.state_dict())
    torch.testing.assert_close(target(f).probs, source(f).probs, rtol=0, atol=0)

    fixed, other = OrdinalLikelihood(4), OrdinalLikelihood(4)
    fixed.scale = 3.0
    other.load_state_dict(fixed.state_dict())
    assert other.scale.item() == 3.0

    counts = BinomialLikelihood(torch.tensor([5, 6]))
    loaded = BinomialLikelihood(torch.tensor([1, 1]))
    loaded.load_state_dict(counts.state_dict())
    assert loaded.total_count.tolist() == [5, 6]
    assert BinomialLikelihood().state_dict() == {}


@pytest.mark.parametrize("training", [True, False])
@links
@both
def test_no_tensor_on_the_default_device(
    name: str, link: str, training: bool, meta_device: None
) -> None:
    torch.manual_seed(0)
    likelihood = make(name, link).train(training)
    f = torch.randn(3, requires_grad=True)
    q, y, total = normal(f, torch.ones(3)), torch.tensor([0.0, 1.0, 3.0]), torch.tensor([3, 4, 5])
    kwargs = {"total_count": total} if name == "binomial" else {}
    torch.set_default_device("meta")
    for options in [{}, kwargs]:
        value = likelihood(f, **options).log_prob(y).sum()
        value = value + likelihood.expected_log_prob(y, q, **options).sum()
        value = value + likelihood.log_marginal(y, q, **options).sum()
        value = value + likelihood(q, **options).log_prob(y).sum()
        value.backward()
        assert value.isfinite()
        assert f.grad.device.type == "cpu"
    if name == "ordinal":
        likelihood.cutpoints, likelihood.scale = [-1.0, 0.0, 2.0], 2.0
        assert likelihood.cutpoints.tolist() == pytest.approx([-1.0, 0.0, 2.0])


@links
@both
def test_recovers_the_function_of_sampled_data(name: str, link: str) -> None:
    torch.manual_seed(0)
    x = torch.linspace(-2, 2, 60)
    total = torch.randint(1, 20, (60,)) if name == "binomial" else None
    kwargs = {} if total is None else {"total_count": total}
    likelihood = BinomialLikelihood(link=link) if name == "binomial" else make(name, link)
    y = likelihood(2 * x, **kwargs).sample()
    slope = torch.zeros((), requires_grad=True)
    optimizer = torch.optim.Adam([slope, *likelihood.parameters()], lr=0.1)
    for _ in range(100):
        optimizer.zero_grad()
        loss = -likelihood.expected_log_prob(y, normal(slope * x, 0.01 + 0 * x), **kwargs).sum()
        loss.backward()
        optimizer.step()
    loss = -likelihood.expected_log_prob(y, normal(slope * x, 0.01 + 0 * x), **kwargs).sum()
    (gradient,) = torch.autograd.grad(loss, slope, create_graph=True)
    (information,) = torch.autograd.grad(gradient, slope)
    assert abs(slope.item() - 2) < 3 * information.item() ** -0.5  # standard errors


def test_examples() -> None:
    results = doctest.testmod(seqgp.likelihoods.discrete)
    assert results.attempted >= 5
    assert results.failed == 0


# -------------------------------------------------------------------- overdispersed counts


def overdispersed(nugget: float = 0.6, total_count: int | None = 12) -> Likelihood:
    likelihood = OverdispersedBinomialLikelihood(total_count)
    likelihood.nugget = nugget
    return likelihood


@pytest.mark.parametrize("y", [0, 5, 12])
def test_overdispersed_integrals_are_sums_on_a_grid(y: int, float64: None) -> None:
    """Both as double ones, by the trapezoidal rule: over the latent function and the scatter."""
    likelihood, z = overdispersed(), np.linspace(-9, 9, 721)
    weights = stats.norm.pdf(z) * (z[1] - z[0])

    def pmf(f: np.ndarray, variance: float) -> np.ndarray:
        h = np.asarray(f)[..., None] + math.sqrt(variance) * z
        return stats.binom.pmf(y, 12, 1 / (1 + np.exp(-h))) @ weights

    for m, v in MOMENTS[:3]:
        q, target = normal(torch.tensor([m]), torch.tensor([v])), torch.tensor([float(y)])
        expected = np.log(pmf(m + math.sqrt(v) * z, 0.6)) @ weights
        assert likelihood.expected_log_prob(target, q).item() == pytest.approx(expected, abs=1e-6)
        expected = math.log(pmf(np.array(m), v + 0.6))
        assert likelihood.log_marginal(target, q).item() == pytest.approx(expected, abs=1e-6)
        by_nodes = likelihood._log_mean_exp(likelihood._log_probs(target, q)).item()
        assert by_nodes == pytest.approx(expected, abs=1e-4)


def test_overdispersed_expectations_are_derivatives(float64: None) -> None:
    """The rule for sites, against automatic differentiation of the expected log probability."""
    likelihood = overdispersed()
    y = torch.tensor([0.0, 3.0, 12.0])
    mean = torch.tensor([-2.0, 0.3, 1.0], requires_grad=True)
    variance = torch.tensor([0.5, 1.0, 0.1], requires_grad=True)
    value = likelihood.expected_log_prob(y, normal(mean, variance))
    d_mean, d_variance = torch.autograd.grad(value.sum(), (mean, variance))
    log_prob, alpha, beta = expectations(likelihood, y, mean, variance)
    torch.testing.assert_close(log_prob, value, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(alpha, d_mean, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(beta, -2 * d_variance, rtol=1e-7, atol=1e-8)
    assert (beta > 0).all()


@pytest.mark.parametrize("link", LINKS)
def test_binomial_expectations_are_derivatives(link: str, float64: None) -> None:
    likelihood = BinomialLikelihood(total_count=12, link=link)
    y = torch.tensor([0.0, 3.0, 12.0])
    mean = torch.tensor([-2.0, 0.3, 1.0], requires_grad=True)
    variance = torch.tensor([0.5, 1.0, 0.1], requires_grad=True)
    value = likelihood.expected_log_prob(y, normal(mean, variance))
    d_mean, d_variance = torch.autograd.grad(value.sum(), (mean, variance))
    log_prob, alpha, beta = expectations(likelihood, y, mean, variance)
    torch.testing.assert_close(log_prob, value, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(alpha, d_mean, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(beta, -2 * d_variance, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("method", METHODS)
def test_overdispersed_gradcheck(method: str, float64: None) -> None:
    """In the moments and in the nugget, up to the error of the inner quadrature."""
    module = Call(overdispersed(total_count=3), method)
    y = torch.tensor([0.0, 1.0, 2.0, 3.0])
    parameters = dict(module.named_parameters())

    def function(mean: Tensor, variance: Tensor, *values: Tensor) -> Tensor:
        state = dict(zip(parameters, values, strict=True))
        return torch.func.functional_call(module, state, (y, normal(mean, variance)))

    mean = torch.tensor([-0.5, 3.0, 0.2, -2.0], requires_grad=True)
    variance = torch.tensor([0.3, 1.0, 0.4, 0.5], requires_grad=True)
    inputs = (mean, variance, *(p.detach().clone().requires_grad_() for p in parameters.values()))
    assert torch.autograd.gradcheck(function, inputs, atol=1e-4)


def test_little_scatter_is_binomial(float64: None) -> None:
    likelihood, binomial = overdispersed(1.1e-4), BinomialLikelihood(12)
    q = normal(torch.tensor([-1.0, 0.5]), torch.tensor([0.5, 1.0]))
    y = torch.tensor([2.0, 9.0])
    for method in METHODS:
        actual, expected = getattr(likelihood, method)(y, q), getattr(binomial, method)(y, q)
        torch.testing.assert_close(actual, expected, rtol=0, atol=2e-3)


def test_the_nugget_is_a_parameter() -> None:
    likelihood = OverdispersedBinomialLikelihood(5, nugget_prior=GammaPrior(2.0, 2.0))
    assert likelihood.nugget.item() == pytest.approx(0.5)
    likelihood.nugget = 1.5
    assert likelihood.nugget.item() == pytest.approx(1.5)
    assert len(list(likelihood.named_priors())) == 1
    copied = copy.deepcopy(likelihood)
    copied.load_state_dict(OverdispersedBinomialLikelihood(5).state_dict(), strict=False)
    assert copied.nugget.item() == pytest.approx(0.5)
    assert likelihood.conditional.total_count == 5
    assert type(likelihood.conditional) is BinomialLikelihood
    batch = OverdispersedBinomialLikelihood(5, batch_shape=torch.Size([2]))
    batch.nugget = torch.tensor([[0.2], [2.0]])
    log_prob = batch(torch.zeros(2, 3)).log_prob(torch.tensor(0.0))
    assert (log_prob[1] > log_prob[0]).all()
    with pytest.raises(ValueError, match="total_count"):
        OverdispersedBinomialLikelihood()(torch.zeros(2))


def test_the_nugget_is_learnt() -> None:
    """Counts that scatter, and counts that do not, around the same function."""
    generator = torch.Generator().manual_seed(0)
    X = torch.rand(150, 1, generator=generator, dtype=torch.float64)
    f = 2 * torch.sin(5 * X) - 1
    found = []
    for scatter in (0.0, 1.0):
        h = f + scatter * torch.randn(150, 1, generator=generator, dtype=torch.float64)
        Y = torch.binomial(torch.full_like(h, 60.0), h.sigmoid(), generator=generator)
        model = SequentialGP(
            X, Y, likelihood=OverdispersedBinomialLikelihood(60), inducing_points=20
        )
        fit_gpytorch_mll(DualELBO(model.likelihood, model))
        found.append(model.likelihood.nugget.item())
    assert found[0] < 0.05
    assert 0.6 < found[1] < 1.5

"""Uncertainties of a prevalence against integration, samples and their own definitions."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from botorch.exceptions.errors import UnsupportedError
from gpytorch import likelihoods as gl
from scipy import integrate, special, stats
from torch import Tensor

from seqgp import BinomialLikelihood, OrdinalLikelihood, OverdispersedBinomialLikelihood
from seqgp.acquisition import exceedance, prevalence
from seqgp.acquisition.uncertainty import (
    CRITERIA,
    LINKS,
    THRESHOLD_CRITERIA,
    Uncertainty,
    link_of,
    stretched_link,
)
from tests.helpers import assert_close

pytestmark = pytest.mark.usefixtures("float64")
LINK_FUNCTIONS: dict[str, Callable[[float], float]] = {
    "logit": special.expit,
    "probit": stats.norm.cdf,
    "softplus": lambda f: float(np.logaddexp(0, f)),
    "exp": math.exp,
    "identity": lambda f: f,
}
THRESHOLDS = {"logit": 0.1, "probit": 0.3, "softplus": 1.2, "exp": 1.2, "identity": 0.4}
MOMENTS = [(-2.0, 0.3), (0.1, 1.0), (3.0, 2.0)]


def entropy(p: float) -> float:
    return float(special.entr(p) + special.entr(1 - p))


def expected(criterion: str, link: str, mean: float, variance: float) -> float:
    """By integration of the definition."""
    F, q = LINK_FUNCTIONS[link], stats.norm(mean, math.sqrt(variance))

    def average(function: Callable[[float], float]) -> float:
        ends = (mean - 10 * q.std(), mean + 10 * q.std())
        return integrate.quad(lambda f: function(f) * q.pdf(f), *ends, epsabs=1e-12)[0]

    if criterion in THRESHOLD_CRITERIA:
        level = float(LINKS[link].inverse(torch.tensor(THRESHOLDS[link])))
        assert F(level) == pytest.approx(THRESHOLDS[link])
        p = q.sf(level)
        return {"threshold-entropy": entropy(p), "misclassification": min(p, 1 - p)}.get(
            criterion, p
        )
    first = average(F)
    if criterion == "entropy":
        return entropy(first)
    return average(lambda f: (F(f) - first) ** 2)


@pytest.mark.parametrize("link", [link for link in LINKS if not LINKS[link].probability])
def test_entropy_is_that_of_probabilities(link: str) -> None:
    with pytest.raises(ValueError, match="probabilities"):
        Uncertainty("entropy", LINKS[link])


@pytest.mark.parametrize(
    ("criterion", "link"),
    [
        (criterion, link)
        for criterion in CRITERIA
        for link in LINKS
        if criterion != "entropy" or LINKS[link].probability
    ],
)
def test_values_are_those_of_the_definition(criterion: str, link: str) -> None:
    u = Uncertainty(criterion, LINKS[link], THRESHOLDS[link])
    mean, variance = torch.tensor(MOMENTS).T
    actual = u(mean, variance)
    for value, (m, v) in zip(actual.tolist(), MOMENTS, strict=True):
        assert value == pytest.approx(expected(criterion, link, m, v), abs=1e-8)


@pytest.mark.parametrize("criterion", CRITERIA)
@pytest.mark.parametrize("link", ["logit", "probit"])
def test_fast_values(link: str, criterion: str) -> None:
    """The bounds that the documentation states, on points between those of the tables."""
    u = Uncertainty(criterion, LINKS[link], THRESHOLDS[link])
    mean = torch.linspace(-15.99, 15.99, 1201).unsqueeze(-1)
    variance = torch.linspace(0.05, 7.99, 301).square()
    bound = 1e-7 if criterion in THRESHOLD_CRITERIA else 4e-5
    bound = 2e-4 if (criterion, link) == ("entropy", "probit") else bound  # which bends more
    for dtype, extra in ((torch.float64, 0.0), (torch.float32, 1e-6)):
        m, v = mean.to(dtype), variance.to(dtype)
        fast = u.fast(m, v)
        assert fast.dtype == dtype
        exact = u(mean, variance)
        assert (fast - exact).abs().max() < bound + extra
    # The arguments are left alone.
    assert torch.equal(m, mean.to(dtype))
    assert torch.equal(v, variance.to(dtype))


def test_far_outside_of_the_table() -> None:
    for criterion in CRITERIA:
        u = Uncertainty(criterion, LINKS["logit"], 0.5)
        mean, variance = torch.tensor([-40.0, 20.0]), torch.tensor([100.0, 1e-3])
        assert_close(u.fast(mean, variance), u(mean, variance), 1e-7)
    rate = Uncertainty("variance", LINKS["softplus"])
    assert_close(rate.fast(mean, variance), rate(mean, variance), 1e-12)


@pytest.mark.parametrize("criterion", CRITERIA)
def test_gradients(criterion: str) -> None:
    u = Uncertainty(criterion, LINKS["logit"], 0.3)
    mean = torch.tensor([-2.0, 0.7, 3.0], requires_grad=True)
    variance = torch.tensor([0.5, 1.0, 2.0], requires_grad=True)
    assert torch.autograd.gradcheck(u, (mean, variance))


@pytest.mark.parametrize(
    ("likelihood", "link"),
    [
        (gl.BernoulliLikelihood(), "probit"),
        (BinomialLikelihood(link="probit"), "probit"),
        (BinomialLikelihood(), "logit"),
        (OverdispersedBinomialLikelihood(), "logit"),
        (gl.PoissonLikelihood(), "softplus"),
        (gl.GaussianLikelihood(), "identity"),
        (gl.FixedNoiseGaussianLikelihood(torch.ones(2)), "identity"),
        (gl.StudentTLikelihood(), "identity"),
        (gl.LaplaceLikelihood(), "identity"),
    ],
)
def test_links_of_likelihoods(likelihood: gl.Likelihood, link: str) -> None:
    assert link_of(likelihood).name == link
    f = torch.linspace(-2, 3, 6)
    if not isinstance(likelihood, gl.FixedNoiseGaussianLikelihood):
        arguments = {"total_count": 1} if "Binomial" in repr(likelihood) else {}
        if isinstance(likelihood, OverdispersedBinomialLikelihood):
            likelihood = likelihood.conditional
        assert_close(LINKS[link].forward(f), likelihood(f, **arguments).mean, 1e-6)
    assert_close(LINKS[link].inverse(LINKS[link].forward(f)), f, 1e-9)


def test_stretched_links() -> None:
    """Between a guess rate and a lapse rate, or as the mean of a `BetaLikelihood` is."""
    likelihood, f = gl.BetaLikelihood().initialize(scale=4.0), torch.linspace(-2, 3, 6)
    link = link_of(likelihood)
    assert_close(link.forward(f), likelihood(f).mean, 1e-10)
    assert_close(link.inverse(link.forward(f)), f, 1e-10)
    link = stretched_link("probit", 0.5, 0.96)
    assert_close(link.inverse(torch.tensor(0.73)), torch.tensor(0.0), 1e-12)
    mean, variance = torch.tensor(MOMENTS).T
    for criterion, bound in (("variance", 4e-5), ("entropy", 1e-12), ("volume", 1e-12)):
        u = Uncertainty(criterion, link, 0.75)
        assert_close(u.fast(mean, variance), u(mean, variance), bound)
    plain = Uncertainty("variance", LINKS["probit"])(mean, variance)
    assert_close(Uncertainty("variance", link)(mean, variance), 0.46**2 * plain, 1e-10)


@pytest.mark.parametrize("link", ["probit", "logit"])
def test_link_of_ratings(link: str) -> None:
    """The expected category, and where it takes a value."""
    likelihood = OrdinalLikelihood(4, link=link, learn_scale=True)
    likelihood.scale = 0.7
    found, f = link_of(likelihood), torch.linspace(-3, 3, 7)
    expected = likelihood(f).probs @ torch.arange(4.0)
    assert_close(found.forward(f), expected, 1e-8)
    assert_close(found.inverse(expected), f, 1e-8)
    for outside in (-0.1, 3.0):
        with pytest.raises(ValueError, match="threshold: expected a value in the range"):
            Uncertainty("volume", found, outside)


def test_what_an_observation_brings() -> None:
    """Less uncertainty on average, or an absolute change of the volume."""
    after, p = torch.tensor([[0.1, 0.4], [0.2, 0.2]]), torch.tensor([[1.0, 3.0], [2.0, 2.0]])
    entropies, volume = (Uncertainty(c, LINKS["logit"], 0.5) for c in CRITERIA[:3:2])
    now = torch.tensor([0.5, 0.3])
    assert_close(
        entropies.expected_gain(now, after, p, -1), now - torch.tensor([0.325, 0.2]), 1e-12
    )
    expected = torch.tensor([0.25 * 0.225 + 0.75 * 0.075, 0.0])
    assert_close(volume.expected_gain(now, after, p, -1), expected, 1e-12)
    assert_close(volume.expected_gain(now, after.T, None, 0), torch.tensor([0.15, 0.0]), 1e-12)


def test_unknown_likelihood() -> None:
    with pytest.raises(UnsupportedError, match=r"SoftmaxLikelihood.*register"):
        link_of(gl.SoftmaxLikelihood(num_classes=3, mixing_weights=False))


def samples(likelihood: OverdispersedBinomialLikelihood, m: float, v: float) -> Tensor:
    h = m + math.sqrt(v + likelihood.nugget.item()) * torch.randn(400_000)
    return h.sigmoid()


def test_prevalence_and_exceedance_count_the_nugget() -> None:
    likelihood = OverdispersedBinomialLikelihood()
    likelihood.nugget = 0.8
    for m, v in MOMENTS:
        theta = samples(likelihood, m, v)
        latent = torch.tensor([m]), torch.tensor([v])
        mean, variance = (moment.squeeze() for moment in prevalence(likelihood, *latent))
        above = exceedance(likelihood, 0.1, *latent).squeeze()
        assert_close(mean, theta.mean(), 5 * float(theta.std()) / 400_000**0.5)
        assert_close(variance, theta.var(), 5 * 0.2 / 400_000**0.5)
        assert_close(above, (theta > 0.1).double().mean(), 5 * 0.5 / 400_000**0.5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("knowledge", "logit", 0.1), "criterion: expected one of 'threshold-entropy'"),
        (("threshold-entropy", "logit", None), "threshold: required for 'threshold-entropy'"),
        (("misclassification", "logit", 1.5), "threshold: expected a probability between 0"),
        (("misclassification", "softplus", -1.0), "threshold: expected a value in the range"),
    ],
)
def test_errors(arguments: tuple[str, str, float | None], message: str) -> None:
    criterion, link, threshold = arguments
    with pytest.raises(ValueError, match=message):
        Uncertainty(criterion, LINKS[link], threshold)

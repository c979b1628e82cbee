"""Gamma, censored, psychometric and heteroscedastic likelihoods, against 50 digits."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import mpmath
import pytest
import torch
from botorch.acquisition import qKnowledgeGradient
from botorch.sampling import SobolQMCNormalSampler
from gpytorch.likelihoods import BernoulliLikelihood
from torch import Tensor

from seqgp import (
    CensoredGaussianLikelihood,
    GammaLikelihood,
    HeteroscedasticGaussianLikelihood,
    PsychometricLikelihood,
    SequentialGP,
)
from seqgp.acquisition import expected_reduction
from seqgp.acquisition.uncertainty import link_of
from seqgp.likelihoods import expectations, log_predictive
from tests.helpers import assert_close, make_inputs
from tests.models.helpers import data

pytestmark = pytest.mark.usefixtures("float64")

#: Means and variances, and how exact quadrature is: a wide normal has fewer nodes in the bend of
#: the logarithm of a guess or lapse rate. What has a closed form is exact everywhere.
MOMENTS = {
    (0.3, 0.05): 1e-11,
    (-1.0, 0.5): 1e-11,
    (1.2, 0.8): 1e-11,
    (-1.0, 3.0): 5e-8,
    (2.0, 9.0): 5e-5,
}
STEP = mpmath.mpf(1) / 8


def normal_expectations(
    function: Callable[[Any], Any], mean: float, variance: float, step: Any = STEP
) -> tuple[float, float, float, float]:
    """``E[g]``, its derivatives alpha and beta, and ``log E[exp g]``, with 50 digits.

    By the trapezoidal rule, which converges exponentially for analytic functions under a Gaussian.
    By Stein's lemma derivatives are expectations, too.
    """
    with mpmath.workdps(50):
        sd = mpmath.sqrt(mpmath.mpf(variance))
        last = int(16 / step)
        nodes = [step * k for k in range(-last, last + 1)]
        weights = [step * mpmath.npdf(z) for z in nodes]
        values = [function(mpmath.mpf(mean) + sd * z) for z in nodes]
        rows = list(zip(weights, nodes, values, strict=True))
        first = mpmath.fsum(w * g for w, _, g in rows)
        alpha = mpmath.fsum(w * z * g for w, z, g in rows) / sd
        beta = mpmath.fsum(w * (1 - z * z) * g for w, z, g in rows) / sd**2
        density = mpmath.fsum(w * mpmath.exp(g) for w, _, g in rows)
        return float(first), float(alpha), float(beta), float(mpmath.log(density))


def log_interval(low: Any, high: Any) -> Any:
    """``log(Phi(high) - Phi(low))``, in the tail where it is small."""
    if low + high > 0:
        low, high = -high, -low
    return mpmath.log(
        (mpmath.erfc(-high / mpmath.sqrt(2)) - mpmath.erfc(-low / mpmath.sqrt(2))) / 2
    )


def gamma(shape: float, y: float) -> tuple[GammaLikelihood, Callable[[Any], Any]]:
    a, y_ = mpmath.mpf(shape), mpmath.mpf(y)
    return (
        GammaLikelihood().initialize(shape=shape),
        lambda f: (
            (a * mpmath.log(a) - a * f - mpmath.loggamma(a) + (a - 1) * mpmath.log(y_))
            - a * y_ * mpmath.exp(-f)
        ),
    )


def psychometric(g: float, lapse: float, y: float) -> tuple[Any, Callable[[Any], Any]]:
    def log_prob(f: Any) -> Any:
        p = mpmath.mpf(g) + (1 - mpmath.mpf(g) - mpmath.mpf(lapse)) * mpmath.ncdf(f)
        return mpmath.log(p if y else 1 - p)

    return PsychometricLikelihood(g, lapse), log_prob


def censored(y: float, side: int, width: float) -> tuple[Any, Callable[[Any], Any]]:
    likelihood = CensoredGaussianLikelihood().initialize(noise=0.8)
    sd, y_ = mpmath.sqrt(mpmath.mpf(likelihood.noise.item())), mpmath.mpf(y)

    def log_prob(f: Any) -> Any:
        z = (y_ - f) / sd
        if width:
            return log_interval(z, z + mpmath.mpf(width) / sd)
        if side:
            return mpmath.log(mpmath.erfc(side * z / mpmath.sqrt(2)) / 2)
        return -z * z / 2 - mpmath.log(sd) - mpmath.log(2 * mpmath.pi) / 2

    return likelihood, log_prob


#: Made where they are used, in double precision.
ONE: dict[str, tuple[Callable[[], Any], float, dict[str, float]]] = {
    "gamma": (lambda: gamma(3.0, 0.7), 0.7, {}),
    "gamma of a large shape": (lambda: gamma(200.0, 5.0), 5.0, {}),
    "exponential": (lambda: gamma(1.0, 2.5), 2.5, {}),
    "guess, right": (lambda: psychometric(0.5, 0.02, 1.0), 1.0, {}),
    "guess, wrong": (lambda: psychometric(0.5, 0.02, 0.0), 0.0, {}),
    "lapse": (lambda: psychometric(0.1, 0.1, 0.0), 0.0, {}),
    "exact": (lambda: censored(0.7, 0, 0.0), 0.7, {"side": 0.0}),
    "above": (lambda: censored(0.7, 1, 0.0), 0.7, {"side": 1.0}),
    "below": (lambda: censored(0.7, -1, 0.0), 0.7, {"side": -1.0}),
    "between": (lambda: censored(0.2, 0, 0.5), 0.2, {"width": 0.5}),
}


@pytest.mark.parametrize("name", list(ONE))
@pytest.mark.parametrize("moments", MOMENTS, ids=str)
@torch.no_grad()
def test_one_latent_against_fifty_digits(name: str, moments: tuple[float, float]) -> None:
    make, y, given = ONE[name]
    likelihood, log_prob = make()
    mean, variance = moments
    arguments = {key: torch.tensor([value]) for key, value in given.items()}
    q = torch.tensor([mean]), torch.tensor([variance])
    actual = expectations(likelihood, torch.tensor([y]), *q, **arguments)
    step = STEP / 32 if name == "gamma of a large shape" else STEP  # its density is narrow
    *expected, log_density = normal_expectations(log_prob, mean, variance, step)
    for got, want in zip(actual, expected, strict=True):
        assert got.item() == pytest.approx(want, rel=MOMENTS[moments], abs=MOMENTS[moments])
    got = log_predictive(likelihood, torch.tensor([y]), *q, **arguments).item()
    assert got == pytest.approx(log_density, rel=1e-8)  # the gamma's is by quadrature


@torch.no_grad()
def test_heteroscedastic_against_fifty_digits() -> None:
    """By the trapezoidal rule in two dimensions, as above."""
    y, mean, variance = 0.7, [0.3, -1.0], [0.05, 0.5]
    q = torch.tensor([mean]), torch.tensor([variance])
    actual = expectations(HeteroscedasticGaussianLikelihood(), torch.tensor([y]), *q)
    log_prob, alpha, beta = 0, [0, 0], [0, 0]
    with mpmath.workdps(50):
        sd = [mpmath.sqrt(mpmath.mpf(v)) for v in variance]
        nodes = [mpmath.mpf(k) / 2 for k in range(-32, 33)]
        for z in itertools.product(nodes, nodes):
            f, g = (mpmath.mpf(m) + s * each for m, s, each in zip(mean, sd, z, strict=True))
            weight = mpmath.npdf(z[0]) * mpmath.npdf(z[1]) / 4
            square = (mpmath.mpf(y) - f) ** 2 * mpmath.exp(-g)
            term = -weight * (mpmath.log(2 * mpmath.pi) + g + square) / 2
            log_prob += term
            alpha = [a + term * each / s for a, each, s in zip(alpha, z, sd, strict=True)]
            beta = [b + term * (1 - each**2) / s**2 for b, each, s in zip(beta, z, sd, strict=True)]
    assert actual.log_prob.item() == pytest.approx(float(log_prob), rel=1e-13)
    assert actual.alpha[0].tolist() == pytest.approx([float(a) for a in alpha], rel=1e-13)
    assert actual.beta[0].tolist() == pytest.approx([float(b) for b in beta], rel=1e-13)


@torch.no_grad()
def test_heteroscedastic_predictive_density_against_fifty_digits() -> None:
    q = torch.tensor([[0.3, -1.0]]), torch.tensor([[0.05, 0.5]])

    def log_density(g: Any) -> Any:
        total = mpmath.mpf(0.05) + mpmath.exp(g)
        square = (mpmath.mpf(0.7) - mpmath.mpf(0.3)) ** 2
        return -square / (2 * total) - mpmath.log(2 * mpmath.pi * total) / 2

    expected = normal_expectations(log_density, -1.0, 0.5)[-1]
    actual = log_predictive(HeteroscedasticGaussianLikelihood(), torch.tensor([0.7]), *q)
    assert actual.item() == pytest.approx(expected, rel=1e-9)


def test_without_rates_it_is_a_bernoulli_likelihood() -> None:
    X = make_inputs(20, 2)
    Y = (X.sum(-1, keepdim=True) > 1).to(X)
    plain = SequentialGP(X, Y, likelihood=BernoulliLikelihood())
    other = SequentialGP(X, Y, likelihood=PsychometricLikelihood(0.0, 0.0))
    other.mean_module, other.covar_module = plain.mean_module, plain.covar_module
    assert_close(other.posterior(X).mean, plain.posterior(X).mean)
    assert_close(other.posterior(X).variance, plain.posterior(X).variance)


@pytest.mark.parametrize(
    ("likelihood", "f", "expected"),
    [
        (PsychometricLikelihood(0.5, 0.1), 0.0, 0.7),
        (GammaLikelihood(), 1.0, 2.718281828459045),
        (CensoredGaussianLikelihood(), 1.5, 1.5),
        (HeteroscedasticGaussianLikelihood(), 1.5, 1.5),
    ],
    ids=["psychometric", "gamma", "censored", "heteroscedastic"],
)
def test_links(likelihood: Any, f: float, expected: float) -> None:
    link = link_of(likelihood)
    value = link.forward(torch.tensor(f, dtype=torch.float64))
    assert value.item() == pytest.approx(expected)
    assert link.inverse(value).item() == pytest.approx(f)


def test_censored_observations_pull_in_one_direction() -> None:
    X = torch.linspace(0, 1, 9).unsqueeze(-1)
    Y, side = torch.zeros_like(X), torch.zeros(9)
    side[4] = 1.0
    kwargs: dict[str, Any] = {"likelihood": CensoredGaussianLikelihood()}
    bound = Y.clone()
    bound[4] = 2.0
    model = SequentialGP(X, bound, likelihood_arguments={"side": side}, **kwargs)
    assert model.posterior(X[4:5]).mean.item() > 0.5
    bound[4] = -20.0  # that it is above -20 says nothing new
    free = SequentialGP(X, bound, likelihood_arguments={"side": side}, **kwargs)
    others = [i for i in range(9) if i != 4]
    without = SequentialGP(X[others], Y[others], **kwargs)
    assert_close(free.posterior(X).mean, without.posterior(X).mean)


@pytest.mark.parametrize("argument", [{"side": 2.0}, {"width": -1.0}])
def test_censoring_that_makes_no_sense(argument: dict[str, float]) -> None:
    X = make_inputs(3, 1)
    given = {key: torch.full((3,), value) for key, value in argument.items()}
    with pytest.raises(ValueError, match=next(iter(argument))):
        SequentialGP(X, X, likelihood=CensoredGaussianLikelihood(), likelihood_arguments=given)


@pytest.mark.parametrize("rates", [(-0.1, 0.0), (0.6, 0.5), (0.0, 1.0)])
def test_rates_that_make_no_sense(rates: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match="guess_rate and lapse_rate"):
        PsychometricLikelihood(*rates)


@pytest.mark.parametrize(
    "likelihood",
    [CensoredGaussianLikelihood(), GammaLikelihood(), PsychometricLikelihood()],
    ids=["censored", "gamma", "psychometric"],
)
def test_where_to_observe_next(likelihood: Any) -> None:
    """In single precision, which the parameters of a likelihood are not."""
    X = make_inputs(15, 2)
    labels = (X.sum(-1, keepdim=True) > 1).to(X)
    Y = labels if isinstance(likelihood, PsychometricLikelihood) else X.sum(-1, keepdim=True).exp()
    model = SequentialGP(X, Y, likelihood=likelihood)
    reduction = expected_reduction(model, X[:4], X, criterion="variance")
    assert (reduction > 0).all()
    assert reduction.isfinite().all()


@pytest.mark.parametrize("name", ["censored", "gamma", "psychometric", "heteroscedastic"])
def test_knowledge_gradient_is_an_average_over_observations(name: str) -> None:
    """By hand, with the fantasies' own maximisers fixed; what is imagined could be observed."""
    model, number = data(name).model(), 8
    sampler = SobolQMCNormalSampler(torch.Size([number]), seed=0)
    acquisition = qKnowledgeGradient(model, num_fantasies=number, sampler=sampler)
    X = make_inputs(3, 1 + number, 2).requires_grad_(True)
    actual, Y = acquisition(X), sampler(model.posterior(X[:, :1], observation_noise=True))
    assert bool(conditional(model, X[:, :1]).support.check(Y.squeeze(-1)).all())
    for b in range(3):
        means = [
            model.condition_on_observations(X[b, :1], Y[k, b]).posterior(X[b, 1 + k, None]).mean
            for k in range(number)
        ]
        assert_close(actual[b], torch.cat(means).mean())
    (gradient,) = torch.autograd.grad(actual.sum(), X)
    assert gradient.isfinite().all()
    assert gradient[:, 1:].abs().sum() > 0


def conditional(model: SequentialGP, X: Tensor) -> Any:
    """The distribution of observations at the mean of the latents."""
    return model.likelihood.forward(model(X).mean)


def heteroscedastic(n: int = 60) -> tuple[SequentialGP, Tensor, Tensor]:
    X = torch.linspace(0, 1, n).unsqueeze(-1)
    noise = torch.randn(n, 1, generator=torch.Generator().manual_seed(0))
    Y = 3 + 2 * torch.sin(5 * X) + (0.05 + X) * noise
    return SequentialGP(X, Y, likelihood=HeteroscedasticGaussianLikelihood()), X, Y


def test_posterior_is_over_the_mean_and_observations_have_the_noise_learnt_there() -> None:
    model, X, _ = heteroscedastic()
    latent, observed = model.posterior(X), model.posterior(X, observation_noise=True)
    assert model.num_outputs == 1
    assert latent.mean.shape == (60, 1)
    assert_close(latent.mean, observed.mean, 1e-12)
    f = model(X)  # both latents, standardised
    scale = model.outcome_transform.stdvs.square()
    noise = (f.mean[..., 1:] + 0.5 * f.variance[..., 1:]).exp() * scale
    assert_close(observed.variance, latent.variance + noise, 1e-10)
    assert (noise[-10:].mean() > 4 * noise[:10].mean()).item()


def test_heteroscedastic_stream_is_batch_learning() -> None:
    model, X, Y = heteroscedastic()
    other = SequentialGP(
        X[:30], Y[:30], likelihood=HeteroscedasticGaussianLikelihood(), inducing_points=X
    )
    other.outcome_transform = model.outcome_transform
    other.set_train_data(targets=model.train_targets[:30])
    other.refresh()
    other.update(X[30:], Y[30:], memory=100, learn=False)
    assert_close(other.posterior(X).mean, model.posterior(X).mean)
    assert_close(other.posterior(X).variance, model.posterior(X).variance)


def test_heteroscedastic_fantasies_and_knowledge_gradient() -> None:
    model, X, _ = heteroscedastic(20)
    fantasies = model.fantasize(X[:3].unsqueeze(-2), SobolQMCNormalSampler(torch.Size([4])))
    assert fantasies.posterior(X).mean.shape == (4, 3, 20, 1)
    gradient = qKnowledgeGradient(model, num_fantasies=4)
    candidates = make_inputs(2, 5, 1).requires_grad_(True)
    value = gradient(candidates)
    assert value.shape == (2,)
    value.sum().backward()
    assert candidates.grad is not None
    assert candidates.grad.isfinite().all()

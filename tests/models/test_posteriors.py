from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from botorch.exceptions.errors import UnsupportedError
from botorch.sampling import IIDNormalSampler, MCSampler, SobolQMCNormalSampler
from botorch.sampling.get_sampler import get_sampler
from gpytorch.likelihoods import BernoulliLikelihood, PoissonLikelihood
from scipy import stats
from torch import Tensor
from torch import distributions as td

from seqgp import SequentialGP
from seqgp.likelihoods.psychometric import PsychometricLikelihood
from seqgp.models.posteriors import ObservationPosterior, quantile
from tests.helpers import CASES, CONJUGATE, assert_close, make_inputs, make_kernel, make_mean
from tests.models.helpers import data, totals

pytestmark = pytest.mark.usefixtures("float64")
OTHERS = [name for name in CASES if name not in CONJUGATE]
others = pytest.mark.parametrize("name", OTHERS)


def observed(name: str, *shape: int, conditioned: bool = False) -> ObservationPosterior:
    """Observations at ``... x q x 2`` inputs."""
    train = data(name)
    model = train.model()
    if conditioned:
        arguments = {key: value[:2].unsqueeze(-1) for key, value in train.arguments.items()}
        X, Y = train.X[:2].unsqueeze(-2), train.Y[:2].unsqueeze(-2)  # a batch of two
        model = model.condition_on_observations(X, Y, **arguments)
    return model.posterior(
        make_inputs(*shape, 2), observation_noise=True, **totals(name, shape[-1])
    )


# -------------------------------------------------------------------- quantiles

RATES = torch.tensor([[1e-3], [0.7], [4.0], [35.0], [1e3]], dtype=torch.float64)
PROBS = torch.tensor([[1e-6], [0.2], [0.5], [0.97]], dtype=torch.float64)
LEVELS = torch.tensor([1e-9, 1e-3, 0.1, 0.3, 0.5, 0.77, 0.99, 1 - 1e-9], dtype=torch.float64)
TOTALS = torch.tensor([[0.0], [1.0], [7.0], [200.0]], dtype=torch.float64)
QUANTILES = {
    "bernoulli": (td.Bernoulli(PROBS), stats.bernoulli(PROBS)),
    "binomial": (td.Binomial(TOTALS, PROBS), stats.binom(TOTALS, PROBS)),
    "poisson": (td.Poisson(RATES), stats.poisson(RATES)),
    "negative_binomial": (
        td.NegativeBinomial(RATES[:4], PROBS),
        stats.nbinom(RATES[:4], 1 - PROBS),
    ),
    "student_t": (td.StudentT(RATES[1:], 0.3, PROBS[1]), stats.t(RATES[1:], 0.3, PROBS[1])),
    "beta": (td.Beta(RATES[1:], 2.0), stats.beta(RATES[1:], 2.0)),
    "gamma": (td.Gamma(RATES[1:], 2.0), stats.gamma(RATES[1:], scale=0.5)),
    "laplace": (td.Laplace(0.3, RATES), stats.laplace(0.3, RATES)),
    "normal": (td.Normal(0.3, RATES), stats.norm(0.3, RATES)),
}


@pytest.mark.parametrize("name", list(QUANTILES))
def test_quantiles_are_those_of_scipy(name: str) -> None:
    ours, theirs = QUANTILES[name]
    expected = torch.as_tensor(np.asarray(theirs.ppf(LEVELS)))
    assert_close(quantile(ours, LEVELS), expected, 1e-8)  # torch's Laplace is off by 1e-9


def test_quantiles_of_classes() -> None:
    probs = torch.tensor([[0.2, 0.5, 0.3], [0.0, 0.0, 1.0], [1.0, 0.0, 0.0]])
    for row, expected in zip(probs, [[0, 0, 1, 1, 2, 2], [2] * 6, [0] * 6], strict=True):
        levels = torch.tensor([0.01, 0.19, 0.21, 0.69, 0.71, 0.99])
        actual = quantile(td.Categorical(row), levels)
        assert torch.equal(actual, torch.tensor(expected).to(actual))


def test_quantiles_of_counts_are_inverse_to_the_cdf() -> None:
    """Far beyond the first block of counts that is added up."""
    rate, levels = torch.tensor([[50.0], [500.0], [5000.0]]), torch.rand(40)
    counts = quantile(td.Poisson(rate), levels)
    assert (torch.as_tensor(stats.poisson(rate).cdf(counts)) >= levels).all()
    assert (torch.as_tensor(stats.poisson(rate).cdf(counts - 1)) < levels).all()


def test_derivatives_of_beta_quantiles() -> None:
    a, b = (torch.rand(6) + 0.5).requires_grad_(), (torch.rand(6) + 0.5).requires_grad_()
    levels = torch.linspace(0.05, 0.95, 6)
    assert torch.autograd.gradcheck(lambda a, b: quantile(td.Beta(a, b), levels), (a, b))


def test_unknown_distribution() -> None:
    with pytest.raises(
        NotImplementedError, match=r"No inverse CDF is known for VonMises.*register"
    ):
        quantile(td.VonMises(1.0, 1.0), torch.tensor(0.5))


# -------------------------------------------------------------------- moments and samples


def assert_mean(samples: Tensor, expected: Tensor) -> None:
    """The mean over the first dimension is within five standard errors."""
    error = samples.std(0) / len(samples) ** 0.5
    assert ((samples.mean(0) - expected).abs() < 5 * error + 1e-12).all()


@others
@pytest.mark.parametrize("conditioned", [False, True], ids=["", "conditioned"])
def test_moments_are_those_of_samples(name: str, conditioned: bool) -> None:
    posterior = observed(name, 3, conditioned=conditioned)
    with torch.no_grad():
        samples = posterior.rsample(torch.Size([20_000]))
    assert_mean(samples, posterior.mean)
    assert_mean((samples - posterior.mean).square(), posterior.variance)


def test_joint_samples() -> None:
    """Two labels are dependent through the latent function: orthant probabilities."""
    X = torch.tensor([[0.5, 0.5], [0.6, 0.5]])
    posterior = data("bernoulli").model().posterior(X, observation_noise=True)
    latent = posterior.latent.distribution
    mean, cov = latent.mean.detach().numpy(), latent.covariance_matrix.detach().numpy()
    both = stats.multivariate_normal(np.zeros(2), cov + np.eye(2)).cdf(mean)
    samples = posterior.rsample(torch.Size([40_000])).prod(-2)
    assert_mean(samples, torch.tensor([both]))
    assert abs(both - posterior.mean.prod().item()) > 0.01  # five standard errors


@others
@pytest.mark.parametrize("shape", [(3,), (1,), (4, 2), (2, 4, 3)], ids=str)
def test_shapes(name: str, shape: tuple[int, ...]) -> None:
    posterior = observed(name, *shape)
    c = CASES[name].num_latents or 1
    assert posterior.num_outputs == 1
    assert posterior.batch_shape == shape[:-1]
    assert posterior.base_sample_shape == (*shape, c + 1)
    assert posterior._extended_shape(torch.Size([5])) == (5, *shape, 1)
    assert posterior.mean.shape == posterior.variance.shape == (*shape, 1)
    assert posterior.rsample().shape == (1, *shape, 1)
    assert posterior.rsample(torch.Size([6, 5])).shape == (6, 5, *shape, 1)
    assert posterior.dtype == posterior.mean.dtype == torch.float64
    assert posterior.device == posterior.mean.device


# -------------------------------------------------------------------- samplers


@others
@pytest.mark.parametrize("kind", [SobolQMCNormalSampler, IIDNormalSampler])
def test_samplers_of_botorch(name: str, kind: type[MCSampler]) -> None:
    posterior = observed(name, 4, 2)
    samples = [kind(torch.Size([8]), seed=seed)(posterior) for seed in (0, 0, 1)]
    assert samples[0].shape == (8, 4, 2, 1)
    assert torch.equal(samples[0], samples[1])
    assert not torch.equal(samples[0], samples[2])


def test_get_sampler() -> None:
    sampler = get_sampler(observed("poisson", 2), torch.Size([8]), seed=3)
    assert isinstance(sampler, SobolQMCNormalSampler)
    assert sampler.seed == 3
    assert sampler(observed("poisson", 2)).shape == (8, 2, 1)


@others
def test_candidates_share_base_samples(name: str) -> None:
    """Two candidates at the same place have the same samples: common random numbers."""
    train = data(name)
    X = make_inputs(1, 2, 2).expand(3, 2, 2)
    posterior = train.model().posterior(X, observation_noise=True, **totals(name, 2))
    sampler = SobolQMCNormalSampler(torch.Size([16]))
    samples = sampler(posterior)
    assert sampler.base_samples.shape == (16, 1, *posterior.base_sample_shape[-2:])
    # but for rounding: vectorised arithmetic depends on the place in memory, on some processors
    torch.testing.assert_close(samples, samples[:, :1].expand_as(samples), rtol=1e-12, atol=1e-12)
    # and an update of the candidates does not draw new ones
    assert torch.equal(sampler(posterior), samples)


# -------------------------------------------------------------------- several outputs


@pytest.mark.parametrize("likelihood", [BernoulliLikelihood, PoissonLikelihood])
def test_outputs_are_independent(likelihood: Any) -> None:
    X = make_inputs(10, 2)
    Y = torch.stack([(X[:, 0] > 0.5), (X[:, 1] > 0.5)], -1).to(X)
    modules = {
        "likelihood": likelihood(),
        "covar_module": make_kernel(),
        "mean_module": make_mean(),
    }
    test = make_inputs(4, 3, 2)
    joint = SequentialGP(X, Y, **modules).posterior(test, observation_noise=True)
    assert joint.num_outputs == 2
    assert joint.base_sample_shape == (4, 3, 4)
    samples = SobolQMCNormalSampler(torch.Size([2048]), seed=0)(joint)
    assert samples.shape == (2048, 4, 3, 2)
    for k in range(2):
        single = SequentialGP(X, Y[:, k : k + 1], **modules).posterior(test, observation_noise=True)
        assert_close(joint.mean[..., k : k + 1], single.mean)
        assert_close(joint.variance[..., k : k + 1], single.variance)
    assert_mean(samples, joint.mean)  # conservative: the samples are quasi-random


# -------------------------------------------------------------------- what it is not


@others
def test_no_joint_distribution(name: str) -> None:
    posterior = observed(name, 2)
    kind = type(data(name).likelihood).__name__
    with pytest.raises(UnsupportedError, match=rf"Observations of a {kind} are not jointly Gaus"):
        _ = posterior.distribution


# -------------------------------------------------------------------- gradients


def sample_at(model: SequentialGP, X: Tensor) -> Tensor:
    sampler = SobolQMCNormalSampler(torch.Size([4]), seed=0)
    return sampler(model.posterior(X, observation_noise=True))


@pytest.mark.parametrize("name", ["gaussian", "student_t", "laplace", "beta"])
def test_gradients_of_continuous_observations(name: str) -> None:
    model, X = data(name).model(), make_inputs(2, 2).requires_grad_()
    assert torch.autograd.gradcheck(lambda X: sample_at(model, X), X, atol=1e-5)
    (gradient,) = torch.autograd.grad(sample_at(model, X).sum(), X)
    assert gradient.abs().min() > 0


@pytest.mark.parametrize(
    "name", ["bernoulli", "poisson", "negative_binomial", "ordinal", "softmax"]
)
def test_discrete_observations_have_no_gradient(name: str) -> None:
    model, X = data(name).model(), make_inputs(2, 2).requires_grad_()
    assert not sample_at(model, X).requires_grad


@pytest.mark.parametrize("name", OTHERS)
def test_gradients_of_moments(name: str) -> None:
    model, X = data(name).model(), make_inputs(2, 2).requires_grad_()

    def moments(X: Tensor) -> tuple[Tensor, Tensor]:
        posterior = model.posterior(X, observation_noise=True, **totals(name, 2))
        return posterior.mean, posterior.variance

    assert torch.autograd.gradcheck(moments, X, atol=1e-5)


@pytest.mark.parametrize("name", ["bernoulli", "ordinal", "softmax", "softmax_mixing"])
@torch.no_grad()
def test_class_probabilities(name: str) -> None:
    """They sum to one, and give the moments of the class."""
    posterior = observed(name, 2, 5)
    p = posterior.probabilities
    index = torch.arange(p.shape[-1], dtype=p.dtype)
    assert p.shape[:-1] == (2, 5)
    assert bool((p >= 0).all())
    assert_close(p.sum(-1), torch.ones(2, 5), 1e-12)
    mean = (p * index).sum(-1, keepdim=True)
    assert_close(mean, posterior.mean, 1e-10)
    square = (p * index.square()).sum(-1, keepdim=True)
    assert_close(square - mean.square(), posterior.variance, 1e-10)


def test_counts_are_no_classes() -> None:
    with pytest.raises(UnsupportedError, match="PoissonLikelihood are not classes"):
        _ = observed("poisson", 3).probabilities


@torch.no_grad()
def test_predict_proba() -> None:
    X = make_inputs(12, 1)
    label = (X > 0.5).to(X)
    likelihood = PsychometricLikelihood(guess_rate=0.5, lapse_rate=0.1)
    model = SequentialGP(X, label, likelihood=likelihood)
    latent = model.posterior(X)
    scaled = latent.mean / (1 + latent.variance).sqrt()
    positive = 0.5 + 0.4 * torch.special.ndtr(scaled)
    proba = model.predict_proba(X)
    assert_close(proba, torch.cat([1 - positive, positive], -1), 1e-6)  # by quadrature
    assert_close(proba.sum(-1), torch.ones(12), 1e-12)
    assert model.predict_proba(X.reshape(3, 4, 1)).shape == (3, 4, 2)
    with pytest.raises(UnsupportedError, match="GaussianLikelihood has no classes"):
        SequentialGP(X, label).predict_proba(X)
    several = SequentialGP(X, label.expand(12, 2), likelihood=BernoulliLikelihood())
    with pytest.raises(UnsupportedError, match="expected one output, got 2"):
        several.predict_proba(X)

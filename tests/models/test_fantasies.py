from __future__ import annotations

import subprocess
import sys
import textwrap
import warnings
from typing import Any
from unittest.mock import patch

import pytest
import torch
from botorch.sampling import IIDNormalSampler, MCSampler, SobolQMCNormalSampler
from linear_operator.utils.warnings import NumericalWarning
from torch import Tensor
from torch.distributions import constraints

from seqgp import SequentialGP
from seqgp.variational.stationary import Stationary
from tests.helpers import CASES, assert_close, assert_untouched, make_inputs, state_of
from tests.models.helpers import assert_same, data, observe, pair, totals

pytestmark = pytest.mark.usefixtures("float64")
MATRIX = Stationary.matrix
all_likelihoods = pytest.mark.parametrize("name", list(CASES))


def sampler(*shape: int, seed: int = 0) -> MCSampler:
    return SobolQMCNormalSampler(torch.Size(shape), seed=seed)


# -------------------------------------------------------------------- what they are

SUPPORT = {
    "bernoulli": constraints.boolean,
    "poisson": constraints.nonnegative_integer,
    "negative_binomial": constraints.nonnegative_integer,
    "binomial": constraints.integer_interval(0, torch.tensor([2.0, 3.0, 4.0, 5.0])),
    "overdispersed_binomial": constraints.integer_interval(0, torch.tensor([2.0, 3.0, 4.0, 5.0])),
    "ordinal": constraints.integer_interval(0, 3),
    "softmax": constraints.integer_interval(0, 2),
    "softmax_mixing": constraints.integer_interval(0, 2),
    "beta": constraints.unit_interval,
}


@all_likelihoods
def test_fantasies_are_possible_observations(name: str) -> None:
    X = make_inputs(6, 4, 2)
    posterior = data(name).model().posterior(X, observation_noise=True, **totals(name, 4))
    Y = sampler(32)(posterior)
    assert Y.shape == (32, 6, 4, 1)
    assert SUPPORT.get(name, constraints.real).check(Y.squeeze(-1)).all()
    assert Y.unique().numel() > 1


@pytest.mark.parametrize("name", ["gaussian", "bernoulli"])
def test_fantasies_evaluate_no_prior_twice(name: str) -> None:
    """Covariances at the candidates are those of the posterior that fantasies are drawn from."""
    model, X, test = data(name).model(), make_inputs(6, 3, 2), make_inputs(5, 2)
    model.posterior(X)
    with torch.no_grad(), patch.object(Stationary, "matrix", autospec=True) as matrix:
        matrix.side_effect = MATRIX
        fantasies = model.fantasize(X, sampler(4))
        assert matrix.call_count == 2  # with the inducing points, and among themselves
        fantasies.posterior(test)
        assert matrix.call_count == 5  # with these, with the candidates, and among themselves


@all_likelihoods
def test_fantasizing_is_conditioning_on_samples(name: str) -> None:
    model, test = data(name).model(), make_inputs(5, 2)
    before = state_of(model)
    X, arguments = make_inputs(6, 3, 2), totals(name, 3)
    fantasies = model.fantasize(X, sampler(4), **arguments)
    assert type(fantasies) is SequentialGP
    assert fantasies.batch_shape == (4, 6)
    Y = sampler(4)(model.posterior(X, observation_noise=True, **arguments))
    expected = model.condition_on_observations(X, Y, **arguments)
    assert_same(fantasies.posterior(test), expected.posterior(test))
    assert fantasies.posterior(test).mean.shape == (4, 6, 5, model.num_outputs)
    assert_untouched(model, before)


@pytest.mark.parametrize("outputs", [1, 2])
@pytest.mark.parametrize("fixed_noise", [False, True], ids=["inferred", "fixed"])
@pytest.mark.parametrize("batch_shape", [(), (3,)], ids=["", "batch"])
def test_gaussian_fantasies_are_those_of_botorch(
    outputs: int, fixed_noise: bool, batch_shape: tuple[int, ...]
) -> None:
    models = pair(outputs=outputs, fixed_noise=fixed_noise, batch_shape=torch.Size(batch_shape))
    X, test = make_inputs(4, *batch_shape, 2, 2), make_inputs(5, 2)
    assert_same(*(model.fantasize(X, sampler(3)).posterior(test) for model in models))
    noise = 0.1 + torch.rand(*batch_shape, 1, outputs)
    if fixed_noise:  # a Gaussian of BoTorch ignores the noise when it is conditioned
        given = [m.fantasize(X, sampler(3), observation_noise=noise) for m in models]
        assert_same(*(model.posterior(test) for model in given))


@all_likelihoods
@pytest.mark.parametrize("kind", [SobolQMCNormalSampler, IIDNormalSampler])
def test_common_random_numbers(name: str, kind: type[MCSampler]) -> None:
    """The same sampler draws the same fantasies; equal candidates have equal ones."""
    model, test = data(name).model(), make_inputs(5, 2)
    X, draw = make_inputs(1, 2, 2).expand(3, 2, 2), kind(torch.Size([32]))
    first, again = (model.fantasize(X, draw, **totals(name, 2)).posterior(test) for _ in range(2))
    assert torch.equal(first.mean, again.mean)
    assert_close(first.mean, first.mean[:, :1].expand_as(first.mean))
    other = model.fantasize(X, kind(torch.Size([32]), seed=99), **totals(name, 2)).posterior(test)
    assert not torch.equal(first.mean, other.mean)


@all_likelihoods
@pytest.mark.parametrize("batch", [(), (3,)], ids=str)
def test_no_candidates(name: str, batch: tuple[int, ...]) -> None:
    model, test = data(name).model(), make_inputs(5, 2)
    fantasies = model.fantasize(torch.empty(*batch, 0, 2), sampler(4), **totals(name, 0))
    posterior, expected = fantasies.posterior(test), model.posterior(test)
    assert posterior.mean.shape == (4, *batch, *expected.mean.shape)
    assert_close(posterior.mean, expected.mean.expand_as(posterior.mean))
    assert_close(posterior.variance, expected.variance.expand_as(posterior.variance))


@pytest.mark.parametrize("name", ["bernoulli", "binomial", "softmax"])
def test_batch_of_models(name: str) -> None:
    """Each has candidates of its own."""
    train, test, arguments = make_inputs(3, 10, 2), make_inputs(5, 2), totals(name, 2)
    Y, _ = observe(name, train)
    single = [data(name, n=10)._replace(X=train[k], Y=Y[k]).model() for k in range(3)]
    joint = data(name, n=10)._replace(X=train, Y=Y).model()
    X = make_inputs(4, 3, 2, 2)
    posterior = joint.fantasize(X, sampler(6), **arguments).posterior(test)
    drawn = sampler(6)(joint.posterior(X, observation_noise=True, **arguments))
    for k in range(3):
        expected = single[k].condition_on_observations(X[:, k], drawn[:, :, k], **arguments)
        assert_close(posterior.mean[:, :, k], expected.posterior(test).mean)
        assert_close(posterior.variance[:, :, k], expected.posterior(test).variance)


def test_fantasies_of_fantasies() -> None:
    model, test = data("bernoulli").model(), make_inputs(5, 2)
    first = model.fantasize(make_inputs(6, 1, 2), sampler(4))
    second = first.fantasize(make_inputs(4, 6, 2, 2), sampler(3, seed=1))
    assert second.batch_shape == (3, 4, 6)
    assert second.posterior(test).mean.shape == (3, 4, 6, 5, 1)
    # On average: a surprising label lowers the precision of earlier ones.
    assert second.posterior(test).variance.mean() < first.posterior(test).variance.mean()


# -------------------------------------------------------------------- on average

#: How far variational inference is off the laws of total expectation and variance, in units of
#: the posterior variance's root (and of the variance). A Gaussian is not, but for its samples.
LAWS = {"gaussian": (0.0, 0.0), "bernoulli": (0.02, 0.03), "poisson": (0.05, 0.05)}


@pytest.mark.parametrize("name", list(LAWS))
@pytest.mark.parametrize("q", [1, 2])
def test_laws_of_total_expectation_and_variance(name: str, q: int) -> None:
    model, test, number = data(name).model(), make_inputs(5, 2), 4096
    X = (0.37 + make_inputs(q, 2)) % 1
    with torch.no_grad():
        prior = model.posterior(test)
        fantasies = model.fantasize(X, sampler(number)).posterior(test)
        mean, variance = fantasies.mean, fantasies.variance
    bias, bias2 = LAWS[name]
    # Five standard errors of plain Monte Carlo; the quasi-random samples are better than that.
    error = 5 * mean.std(0) / number**0.5
    scale = prior.variance.sqrt()
    assert ((mean.mean(0) - prior.mean).abs() <= error + bias * scale).all()
    spread = (mean - prior.mean).square() + variance
    error = 5 * spread.std(0) / number**0.5
    assert ((spread.mean(0) - prior.variance).abs() <= error + bias2 * prior.variance).all()
    assert (variance.mean(0) < prior.variance).all()


# -------------------------------------------------------------------- gradients


def moments(model: SequentialGP, X: Tensor) -> tuple[Tensor, Tensor]:
    posterior = model.posterior(X)
    return posterior.mean, posterior.variance


@all_likelihoods
def test_gradients_of_conditioning(name: str) -> None:
    """With respect to the inputs of observations that are given."""
    model, test = data(name).model(), make_inputs(3, 2)
    X = ((0.37 + make_inputs(2, 2)) % 1).requires_grad_()
    Y, arguments = observe(name, X.detach())

    def conditioned(X: Tensor) -> tuple[Tensor, Tensor]:
        return moments(
            model.condition_on_observations(X, Y, tol=1e-13, max_steps=1000, **arguments), test
        )

    assert torch.autograd.gradcheck(conditioned, X, eps=1e-5, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("name", ["gaussian", "fixed_noise", "laplace", "student_t", "beta"])
def test_gradients_through_fantasies(name: str) -> None:
    """Observations that are continuous move with the candidates, and with them the posterior."""
    model, test = data(name).model(), make_inputs(3, 2)
    X = ((0.37 + make_inputs(2, 2)) % 1).requires_grad_()

    def fantasized(X: Tensor) -> tuple[Tensor, Tensor]:
        return moments(model.fantasize(X, sampler(2), tol=1e-13, max_steps=1000), test)

    assert torch.autograd.gradcheck(fantasized, X, eps=1e-5, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("name", ["bernoulli", "poisson", "softmax"])
def test_gradients_of_discrete_fantasies(name: str) -> None:
    """Those of conditioning on the observations that were drawn."""
    model, test = data(name).model(), make_inputs(3, 2)
    X = make_inputs(4, 2, 2).requires_grad_()
    Y = sampler(3)(model.posterior(X, observation_noise=True))
    gradients = [
        torch.autograd.grad(sum(m.square().sum() for m in moments(fantasies, test)), X)[0]
        for fantasies in (model.fantasize(X, sampler(3)), model.condition_on_observations(X, Y))
    ]
    assert_close(*gradients)
    assert (gradients[0].abs().amax(-1) > 0).all()


@pytest.mark.parametrize("q", [1, 2])
def test_gradients_where_the_precision_is_negative(q: int) -> None:
    """An outlier makes the posterior wider."""
    model, test = data("student_t").model(), make_inputs(3, 2)
    X = ((0.37 + make_inputs(q, 2)) % 1).requires_grad_()
    Y = torch.tensor([[30.0], [0.0]])[:q]
    alone = model.condition_on_observations(X[:1], Y[:1])
    assert (alone.posterior(X[:1]).variance > model.posterior(X[:1]).variance).all()

    def conditioned(X: Tensor) -> tuple[Tensor, Tensor]:
        return moments(model.condition_on_observations(X, Y, tol=1e-13, max_steps=1000), test)

    assert torch.autograd.gradcheck(conditioned, X, eps=1e-5, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("name", ["student_t", "beta", "negative_binomial"])
def test_gradients_are_finite(name: str) -> None:
    """For many fantasies of likelihoods that are not log-concave, whose sites all converge."""
    model, X = data(name).model(), make_inputs(20, 8, 2).requires_grad_()
    warnings.simplefilter("error", NumericalWarning)
    mean, variance = moments(model.fantasize(X, sampler(16)), make_inputs(4, 2))
    (gradient,) = torch.autograd.grad(mean.sum() + variance.sum(), X)
    assert gradient.isfinite().all()


def test_gradients_reach_test_inputs() -> None:
    model = data("bernoulli").model()
    fantasies = model.fantasize(make_inputs(4, 1, 2), sampler(3))
    X = make_inputs(3, 4, 2, 2).requires_grad_()
    assert torch.autograd.gradcheck(lambda X: moments(fantasies, X), X)


# -------------------------------------------------------------------- size

LARGE = """
    import resource, torch
    from botorch.sampling import SobolQMCNormalSampler
    from gpytorch.likelihoods import BernoulliLikelihood
    from seqgp import SequentialGP

    def peak():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # from kB to GB

    torch.set_num_threads(1)
    torch.manual_seed(0)
    X = torch.rand(200, 2, dtype=torch.float64)
    Y = (X.sum(-1, keepdim=True) > 1).to(X)
    model = SequentialGP(X, Y, likelihood=BernoulliLikelihood(), inducing_points=50)
    grid = torch.rand(1400, 2, dtype=torch.float64)
    model.fantasize(grid[:2].unsqueeze(-2), SobolQMCNormalSampler(torch.Size([16])))
    before = peak()
    with torch.no_grad():
        sampler = SobolQMCNormalSampler(torch.Size([16]), seed=0)
        posterior = model.fantasize(grid.unsqueeze(-2), sampler).posterior(grid)
        assert posterior.mean.shape == posterior.variance.shape == (16, 1400, 1400, 1)
        assert (posterior.variance > 0).all()
    print(peak() - before)
"""


@pytest.mark.slow
def test_many_fantasies_fit_in_memory() -> None:
    """1,400 candidates of 16 fantasies, at 1,400 points: each moment alone is .25 GB."""
    command: list[Any] = [sys.executable, "-c", textwrap.dedent(LARGE)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert float(result.stdout) < 3.0

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from gpytorch import settings as gpytorch_settings
from gpytorch.distributions import MultivariateNormal
from gpytorch.likelihoods import StudentTLikelihood
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from seqgp.dual import Expectations, Sites, condition
from seqgp.dual.conditioning import conditioned_from_sites
from seqgp.likelihoods.expectations import expectations
from seqgp.likelihoods.traits import precision_floor
from tests.helpers import (
    CASES,
    GP,
    NOT_LOG_CONCAVE,
    ONE_LATENT,
    Problem,
    assert_close,
    assert_same_posterior,
    assert_untouched,
    dense_prior,
    latent,
    make_inputs,
    problem,
    state_of,
)

pytestmark = pytest.mark.usefixtures("float64")

all_likelihoods = pytest.mark.parametrize("name", list(CASES))
TIGHT = {"tol": 1e-11, "max_steps": 1000}


def observations(name: str, *shape: int) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """New inputs ``... x q x d``, targets ``... x q`` and arguments of the likelihood."""
    x = 0.1 + 0.8 * make_inputs(*shape, 2)
    return (
        x,
        CASES[name].sample(latent(x, CASES[name].num_latents)),
        CASES[name].arguments(shape[-1]),
    )


def augmented(data: Problem, x: Tensor, y: Tensor, **arguments: Any) -> GP:
    """The full update: the new inputs join the inducing points, then their sites converge."""
    model = data.converged()
    model.variational_strategy.set_inducing_points(torch.cat([data.Z, x]))
    assert model.variational_strategy.converge(x, y, add=True, **TIGHT, **arguments).converged
    return model


@all_likelihoods
def test_is_the_update_with_augmented_inducing_points(name: str) -> None:
    data, (x, y, arguments) = problem(name), observations(name, 4)
    fantasy = data.converged().get_fantasy_model(x, y, **TIGHT, **arguments)
    full = augmented(data, x, y, **arguments)
    assert_same_posterior(fantasy, full, torch.cat([data.test, x]))
    assert_close(fantasy.train()(data.test).variance, full.train()(data.test).variance)


@all_likelihoods
def test_twice_is_once_on_both(name: str) -> None:
    data, (x, y, arguments) = problem(name), observations(name, 4)
    first, second = slice(1), slice(1, 4)
    twice = data.converged()
    for part in (first, second):
        given_part = {key: value[part] for key, value in arguments.items()}
        twice = twice.get_fantasy_model(x[part], y[part], **TIGHT, **given_part)
    once = data.converged().get_fantasy_model(x, y, **TIGHT, **arguments)
    assert_same_posterior(twice, once, data.test, 1e-9)


def test_is_exact_with_all_data_as_inducing_points() -> None:
    """Gaussian, Z = X: the exact GP of old and new data together."""
    data, (x, y, _) = problem("gaussian", n=12), observations("gaussian", 4)
    fantasy = data.converged(data.x, jitter_val=1e-13).get_fantasy_model(x, y)
    everything, targets = torch.cat([data.x, x]), torch.cat([data.y, y])
    prior = dense_prior(fantasy, everything, data.test)
    S = prior.zz + data.likelihood.noise.detach() * torch.eye(16)
    solved = torch.linalg.solve(S, prior.zx)
    mean = prior.mean_x + solved.mT @ (targets - prior.mean_z)
    exact = MultivariateNormal(mean, prior.xx - prior.zx.mT @ solved)
    assert_same_posterior(fantasy, exact, data.test, 1e-8)


@pytest.mark.parametrize("name", ["gaussian", "fixed_noise", "bernoulli", "binomial", "softmax"])
@pytest.mark.parametrize(
    ("input_batch", "target_batch"),
    [((), (5,)), ((2,), (2,)), ((2,), (5, 2)), ((5, 2), (5, 2)), ((2,), ()), ((5, 1), (2,))],
)
def test_batches_of_fantasies(
    name: str, input_batch: tuple[int, ...], target_batch: tuple[int, ...]
) -> None:
    """Inputs ``[f x] b x q x d`` and targets ``[f x] b x q``: each as if alone."""
    data, q = problem(name), 3
    _, y, arguments = observations(name, *target_batch, q)
    x = make_inputs(*input_batch, q, 2)
    fantasies = data.converged().get_fantasy_model(x, y, **TIGHT, **arguments)
    batch = torch.broadcast_shapes(input_batch, target_batch)
    posterior = fantasies(data.test)
    assert posterior.batch_shape == batch
    assert fantasies.variational_strategy.batch_shape == batch
    x, y = x.expand(*batch, q, 2), y.expand(*batch, q)
    for index in [(0,) * len(batch), tuple(size - 1 for size in batch)]:
        alone = data.converged().get_fantasy_model(x[index], y[index], **TIGHT, **arguments)
        expected = alone(data.test)
        assert_close(posterior.mean[index], expected.mean)
        assert_close(posterior.covariance_matrix[index], expected.covariance_matrix)
    # Test inputs of their own for each of the inputs, as acquisition functions have them.
    if input_batch:
        own = make_inputs(*input_batch, 1, 2)
        assert_close(fantasies(own).mean[-1], fantasies(own.expand(*batch, 1, 2)).mean[-1], 1e-10)


@pytest.mark.parametrize("name", ["gaussian", "bernoulli"])
def test_batches_of_models(name: str) -> None:
    data, (x, y, _) = problem(name), observations(name, 3, 4)
    Z = make_inputs(3, 6, 2)
    fantasies = data.converged(Z).get_fantasy_model(x, y, **TIGHT)(data.test)
    for i in range(3):
        alone = data.converged(Z[i]).get_fantasy_model(x[i], y[i], **TIGHT)(data.test)
        assert_close(fantasies.mean[i], alone.mean)
        assert_close(fantasies.covariance_matrix[i], alone.covariance_matrix)


def test_conditioned_batches_broadcast_when_conditioned_again() -> None:
    """Fantasies of fantasies: ``4 x 1`` and then ``2``."""
    data = problem("bernoulli")
    (x, y, _), (other_x, other_y, _) = (
        observations("bernoulli", 4, 1, 2),
        observations("bernoulli", 2, 3),
    )
    both = data.converged().get_fantasy_model(x, y, **TIGHT)
    both = both.get_fantasy_model(other_x, other_y, **TIGHT)
    assert both(data.test).batch_shape == (4, 2)
    alone = data.converged().get_fantasy_model(
        torch.cat([x[3, 0], other_x[1]]), torch.cat([y[3, 0], other_y[1]]), **TIGHT
    )
    assert_close(both(data.test).mean[3, 1], alone(data.test).mean)


@all_likelihoods
def test_leaves_the_model_alone(name: str) -> None:
    data, (x, y, arguments) = problem(name), observations(name, 3)
    model = data.converged()
    before, posterior = state_of(model), model(data.test)
    fantasy = model.get_fantasy_model(x, y, **arguments)
    assert type(fantasy) is GP
    assert fantasy.covar_module is model.covar_module
    assert fantasy.variational_strategy.is_conditioned
    assert not model.variational_strategy.is_conditioned
    fantasy(data.test)
    fantasy.variational_strategy.rebase()
    assert_untouched(model, before)
    assert_same_posterior(posterior, model, data.test, 1e-15)


def test_learning_later_does_not_reach_fantasies() -> None:
    data, (x, y, _) = problem("gaussian"), observations("gaussian", 3)
    model = data.converged()
    fantasy = model.get_fantasy_model(x, y)
    before = fantasy(data.test)
    model.variational_strategy.converge(data.x[:5], data.y[:5])
    model.variational_strategy.set_inducing_points(make_inputs(3, 2))
    assert_same_posterior(before, fantasy, data.test, 1e-12)


def test_other_hyperparameters_reach_fantasies() -> None:
    """They are shared: what was observed stays, the prior moves, its mean included."""
    data, (x, y, _) = problem("gaussian"), observations("gaussian", 3)
    models = [data.converged() for _ in range(2)]
    fantasy = models[0].get_fantasy_model(x, y)
    fantasy(data.test)
    for model in models:
        model.covar_module.outputscale = 2.5
        model.mean_module.initialize(constant=-0.7)
    assert_same_posterior(fantasy, models[1].get_fantasy_model(x, y), data.test, 1e-9)


def test_a_fantasy_cannot_be_taught() -> None:
    data, (x, y, _) = problem("gaussian"), observations("gaussian", 3)
    strategy = data.converged().get_fantasy_model(x, y).variational_strategy
    for method in (strategy.converge, strategy.natural_gradient_step):
        with pytest.raises(RuntimeError, match="get_fantasy_model"):
            method(x, y)
    with pytest.raises(RuntimeError, match="inducing points"):
        strategy.set_inducing_points(x)


@pytest.mark.parametrize("name", ["gaussian", "bernoulli", "softmax"])
def test_fixed_inducing_points(name: str) -> None:
    """The paper's own update: the duals at Z change and nothing else."""
    data, (x, y, arguments) = problem(name), observations(name, 3)
    model, same = data.converged(), data.converged()
    fantasy = model.get_fantasy_model(x, y, fixed_inducing=True, **arguments)
    same.variational_strategy.converge(x, y, add=True, **arguments)
    assert_same_posterior(fantasy, same, data.test, 1e-12)
    assert not fantasy.variational_strategy.is_conditioned
    process = model.get_fantasy_model(x, y, **arguments)
    assert (process(x).variance < fantasy(x).variance).all()


@pytest.mark.parametrize(
    "name", ["gaussian", "bernoulli", "poisson", "laplace", "softmax", "student_t"]
)
def test_gradients_reach_the_inputs(name: str) -> None:
    """Those of the fantasised inputs, through converged sites, and those of the test inputs."""
    data, (x, y, arguments) = problem(name, n=10, m=4), observations(name, 2)
    model = data.converged()
    weights = torch.randn(2, *model(data.test).mean.shape)

    def value(x: Tensor, test: Tensor) -> Tensor:
        fantasy = model.get_fantasy_model(x, y, **TIGHT, **arguments)
        posterior = fantasy(test)
        return (weights * torch.stack([posterior.mean, posterior.variance])).sum()

    inputs = (x.requires_grad_(True), data.test.clone().requires_grad_(True))
    assert torch.autograd.gradcheck(value, inputs, eps=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["gaussian", "laplace", "student_t"])
@pytest.mark.parametrize("with_inputs", [True, False])
def test_gradients_reach_continuous_targets(name: str, with_inputs: bool) -> None:
    """As for fantasised observations, which are samples of a posterior at the inputs."""
    data, (x, y, arguments) = problem(name, n=10, m=4), observations(name, 2)
    model = data.converged().requires_grad_(False)
    x.requires_grad_(with_inputs)

    def value(y: Tensor) -> Tensor:
        fantasy = model.get_fantasy_model(x, y, **TIGHT, **arguments)
        return fantasy(data.test).mean.sum() + fantasy(data.test).variance.sum()

    assert torch.autograd.gradcheck(value, (y.requires_grad_(True),), eps=1e-5, atol=1e-6)


def test_no_graph_without_need() -> None:
    data, (x, y, _) = problem("bernoulli"), observations("bernoulli", 3)
    model = data.converged()
    with torch.no_grad():
        fantasy = model.get_fantasy_model(x, y)
        assert not fantasy(data.test).mean.requires_grad
    restored = pickle.loads(pickle.dumps(fantasy))
    for other in (copy.deepcopy(fantasy), restored):
        assert_same_posterior(other, fantasy, data.test, 1e-12)


def test_other_precisions_follow() -> None:
    data, (x, y, _) = problem("bernoulli"), observations("bernoulli", 3)
    with torch.no_grad():
        fantasy = data.converged().get_fantasy_model(x, y)
        expected = fantasy(data.test)
        single = fantasy.float()(data.test.float())
    assert single.mean.dtype == torch.float32
    assert_close(single.mean, expected.mean, 1e-4)
    assert_close(single.variance, expected.variance, 1e-4)


def test_gradients_of_hyperparameters_when_asked_for() -> None:
    """``detach_test_caches`` off: also through the state at the inducing points."""
    data, (x, y, _) = problem("gaussian", n=10, m=4), observations("gaussian", 2)
    model = data.converged()
    raw, h = model.covar_module.raw_outputscale, 1e-5

    def value(shift: float = 0.0) -> Tensor:
        raw.data.add_(shift)
        with gpytorch_settings.detach_test_caches(False):
            result = model.get_fantasy_model(x, y)(data.test).mean.sum()
        raw.data.sub_(shift)
        return result

    value().backward()
    slope = (value(h) - value(-h)).detach() / (2 * h)
    assert_close(raw.grad, slope.expand_as(raw), 1e-6)


@all_likelihoods
def test_observing_reduces_uncertainty(name: str) -> None:
    data, (x, y, arguments) = problem(name), observations(name, 3)
    model = data.converged()
    before, after = model(x), model.get_fantasy_model(x, y, **arguments)(x)
    reduction = before.covariance_matrix - after.covariance_matrix
    assert torch.linalg.eigvalsh(after.covariance_matrix).min() > -1e-10
    assert torch.linalg.eigvalsh(reduction).min() > -1e-10 or name in NOT_LOG_CONCAVE
    assert (after.variance < before.variance).any()


@pytest.mark.parametrize("scale", [1.0, 10.0, 100.0])
@pytest.mark.parametrize("q", [1, 3])
def test_outliers_widen_the_posterior(q: int, scale: float) -> None:
    """Negative precisions, as exact as any: the full update with the inputs added to Z."""
    data, (x, _, _) = problem("student_t"), observations("student_t", q)
    y = scale * torch.tensor([1.0, -0.6, 0.1])[:q] + 3
    model = data.converged()
    fantasy = model.get_fantasy_model(x, y, **TIGHT)
    assert (fantasy(x).variance > model(x).variance).any() or scale == 1
    assert torch.linalg.eigvalsh(fantasy(data.test).covariance_matrix).min() > 0
    assert_same_posterior(fantasy, augmented(data, x, y), data.test)


@pytest.mark.parametrize("name", [name for name in NOT_LOG_CONCAVE if name in ONE_LATENT])
@pytest.mark.parametrize("variance", [0.1, 1.0, 2.0])
def test_sites_converge_whatever_is_observed(name: str, variance: float) -> None:
    """A thousand sets of correlated observations, most of them most unlikely.

    At larger variances 20 quadrature nodes miss the peak of Student's t between them, and a bound
    of such expectations has more maxima than the true one.
    """
    torch.manual_seed(0)
    likelihood, num, q = CASES[name].make().requires_grad_(False), 1000, 4
    root = torch.randn(num, q, 2)
    C = variance * (root @ root.mT + 0.01 * torch.eye(q)) / 2
    mean = variance**0.5 * torch.randn(num, q)
    y = CASES[name].sample(3 * torch.randn(num, q))
    _, info = condition(
        *(mean, C, torch.zeros_like(mean)),
        lambda mean, variance: expectations(likelihood, y, mean, variance),
        min_precision=precision_floor(likelihood),
    )
    assert info.converged


@pytest.mark.parametrize("name", ["gaussian", "bernoulli", "softmax"])
def test_repeated_and_known_inputs(name: str) -> None:
    """New inputs twice, and one that is an inducing point: the covariance is singular."""
    data, (x, y, arguments) = problem(name), observations(name, 4)
    x = torch.stack([x[0], x[0], data.Z[0], data.Z[0]])
    fantasy = data.converged().get_fantasy_model(x, y, **TIGHT, **arguments)
    full = augmented(data, x, y, **arguments)
    # Here the jitter of the copies in Z is part of the oracle.
    assert_same_posterior(fantasy, full, data.test, 1e-6)


@all_likelihoods
def test_no_observations(name: str) -> None:
    data, (x, y, arguments) = problem(name), observations(name, 4)
    model, none = data.converged(), slice(0)
    arguments = {key: value[none] for key, value in arguments.items()}
    fantasy = model.get_fantasy_model(x[none], y[none], **arguments)
    assert_same_posterior(fantasy, model, data.test, 1e-12)


def test_arguments_must_be_the_same_each_time() -> None:
    data, (x, y, _) = problem("gaussian"), observations("gaussian", 2)
    fantasy = data.converged().get_fantasy_model(x, y, noise=torch.full((2,), 0.1))
    with pytest.raises(ValueError, match="arguments"):
        fantasy.get_fantasy_model(x, y)


def test_likelihood_must_be_the_same_each_time() -> None:
    data, (x, y, _) = problem("gaussian"), observations("gaussian", 2)
    fantasy = data.converged().get_fantasy_model(x, y)
    with pytest.raises(ValueError, match="likelihood"):
        fantasy.get_fantasy_model(x, y, likelihood=StudentTLikelihood())


def test_likelihood_is_the_models_or_given() -> None:
    data, (x, y, _) = problem("gaussian"), observations("gaussian", 2)
    model = GP(data.Z).eval()
    model.variational_strategy.converge(data.x, data.y, data.likelihood)
    with pytest.raises(ValueError, match="likelihood: pass one"):
        model.get_fantasy_model(x, y)
    expected = data.converged().get_fantasy_model(x, y)
    assert_same_posterior(
        model.get_fantasy_model(x, y, likelihood=data.likelihood), expected, data.test, 1e-12
    )


def gaussian(y: Tensor, noise: Tensor) -> Any:
    return lambda mean, variance: Expectations(
        -0.5 * (y - mean) ** 2, (y - mean) / noise, 1 / noise
    )


@settings(deadline=None, max_examples=20)
@given(seed=st.integers(0, 999), q=st.integers(1, 5), power=st.floats(-4, 4))
def test_condition_is_the_textbook_formula(seed: int, q: int, power: float) -> None:
    torch.manual_seed(seed)
    root, mean, prior_mean, y = torch.randn(q, q + 1), *torch.randn(3, q)
    C, noise = root @ root.mT, 10**power * (0.5 + torch.rand(q))
    conditioned, info = condition(mean, C, prior_mean, gaussian(y, noise), conjugate=True)
    solved = torch.linalg.solve(C + noise.diag(), torch.column_stack([y - mean, C]))
    assert info.converged
    scale = C.diagonal().max() + mean.abs().max()
    assert_close(C @ conditioned.gain / scale, C @ solved[:, 0] / scale, 1e-9)
    reduction = conditioned.root @ C
    assert_close(reduction.mT @ reduction / scale, C @ solved[:, 1:] / scale, 1e-9)


def test_fantasies_of_one_input_share_their_covariance() -> None:
    mean, y = torch.zeros(3), torch.randn(16, 3)
    conditioned, _ = condition(mean, torch.eye(3), mean, gaussian(y, torch.ones(3)), conjugate=True)
    assert conditioned.gain.shape == (16, 3)
    assert conditioned.root.shape == (3, 3)


def test_precisions_of_zero_change_nothing() -> None:
    def flat(mean: Tensor, variance: Tensor) -> Expectations:
        return Expectations(*torch.zeros(3, *mean.shape))

    conditioned, info = condition(torch.randn(3), torch.eye(3), torch.randn(3), flat)
    assert info.converged
    assert not conditioned.gain.any()
    assert conditioned.root.abs().max() < 1e-70  # a root that has a derivative at zero


@pytest.mark.parametrize("signed", [False, True])
def test_gain_of_precisions_of_zero_has_derivatives(signed: bool) -> None:
    """Those of sites that say something are not disturbed by one that does not."""
    root = torch.randn(3, 4)
    C, lam = (root @ root.mT).requires_grad_(True), torch.randn(3, requires_grad=True)
    beta = torch.tensor([0.5, 0.0, -0.01 if signed else 2.0], requires_grad=True)
    centred = torch.randn(3, requires_grad=True)
    inputs = (C, lam, beta, centred)
    gain = conditioned_from_sites(centred, C, Sites(lam, beta), signed).gain
    expected = torch.linalg.solve(torch.eye(3) + beta.unsqueeze(-1) * C, lam - beta * centred)
    assert_close(gain, expected, 1e-10)
    outer = torch.randn(3)
    found = torch.autograd.grad((outer * gain).sum(), inputs)
    wanted = torch.autograd.grad((outer * expected).sum(), inputs)
    symmetric = found[0] + found[0].mT, wanted[0] + wanted[0].mT
    assert_close(*symmetric, 1e-8)
    assert_close(found[1], wanted[1], 1e-8)
    assert_close(found[2][::2], wanted[2][::2], 1e-8)  # a root has no derivative at zero
    assert_close(found[3], wanted[3], 1e-8)


def test_float32_with_little_noise() -> None:
    """The gain does not lose the digits of ``beta C``, which would be all that there are."""
    x = torch.rand(8, 2)
    C, y = 10 * torch.exp(-0.5 * torch.cdist(x, x).square()), torch.sin(3 * x).sum(-1)
    noise = torch.full_like(y, 1e-4)
    expected = C @ torch.linalg.solve(C + noise.diag(), y)
    single = Sites((y / noise).float(), noise.reciprocal().float())
    conditioned = conditioned_from_sites(torch.zeros(8).float(), C.float(), single)
    assert_close((C.float() @ conditioned.gain).double(), expected, 1e-3)


def test_condition_starts_where_it_is_told() -> None:
    data, (x, y, _) = problem("poisson"), observations("poisson", 3)
    posterior = data.converged()(x)
    arguments = (posterior.mean.detach(), posterior.covariance_matrix.detach(), torch.zeros(3))

    def evaluate(mean: Tensor, variance: Tensor) -> Expectations:
        return expectations(data.likelihood, y, mean, variance)

    cold, slow = condition(*arguments, evaluate, tol=1e-9)
    warm, fast = condition(*arguments, evaluate, start=cold.sites, tol=1e-9)
    assert fast.steps == 1 < slow.steps
    assert isinstance(warm.sites, Sites)
    assert_close(warm.gain, cold.gain, 1e-8)

"""Caches that are never stale, and states that survive copies, files and other precisions."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from unittest.mock import patch

import gpytorch
import pytest
import torch

from seqgp import DualELBO
from seqgp.variational.state import fixed_sites
from tests.helpers import (
    GP,
    assert_close,
    assert_same_posterior,
    make_inputs,
    make_kernel,
    problem,
    state_of,
)

pytestmark = pytest.mark.usefixtures("float64")

some_likelihoods = pytest.mark.parametrize("name", ["gaussian", "bernoulli", "softmax"])


def optimise(model: GP) -> None:
    data = problem("gaussian")
    optimiser = torch.optim.Adam(model.parameters(), lr=0.1)
    model.train()
    (-DualELBO(model.likelihood, model)(model(data.x), data.y)).backward()
    optimiser.step()
    model.eval()


def load_other_state(model: GP) -> None:
    other = problem("gaussian").converged(make_inputs(5, 2))
    other.covar_module.outputscale = 0.4
    model.load_state_dict(other.state_dict())


CHANGES: dict[str, Callable[[GP], object]] = {
    "lengthscale": lambda model: setattr(model.covar_module.base_kernel, "lengthscale", 0.7),
    "outputscale in place": lambda model: model.covar_module.raw_outputscale.data.fill_(1.5),
    "initialize": lambda model: model.initialize(**{"covar_module.outputscale": 2.0}),
    "mean": lambda model: model.mean_module.constant.data.fill_(-1.0),
    "another kernel": lambda model: setattr(model, "covar_module", make_kernel(0.9)),
    "optimiser": optimise,
    "inducing points in place": lambda model: model.variational_strategy.inducing_points.data.add_(
        0.05
    ),
    "inducing points": lambda model: model.variational_strategy.set_inducing_points(
        make_inputs(5, 2)
    ),
    "duals in place": lambda model: model.variational_strategy.dual_lam.mul_(0.5),
    "duals": lambda model: setattr(
        model.variational_strategy, "dual_B", 2 * model.variational_strategy.dual_B
    ),
    "more data": lambda model: model.variational_strategy.converge(
        make_inputs(3, 2), torch.ones(3), add=True
    ),
    "jitter": lambda model: setattr(model.variational_strategy, "jitter_val", 1e-3),
    "state": load_other_state,
}


def fresh(model: GP) -> GP:
    """A model that has never been called, with the same state and settings."""
    Z = model.variational_strategy.inducing_points.detach()
    kernel = copy.deepcopy(model.covar_module)
    other = GP(torch.rand_like(Z), copy.deepcopy(model.likelihood), kernel=kernel)
    other.variational_strategy.jitter_val = model.variational_strategy.jitter_val
    other.load_state_dict(copy.deepcopy(model.state_dict()))
    return other.eval()


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_seen_by_the_next_call(change: str) -> None:
    data = problem("gaussian")
    model = data.converged()
    before = model(data.test)
    kl = model.variational_strategy.kl_divergence()
    CHANGES[change](model)
    after, expected = model(data.test), fresh(model)
    assert (after.mean - before.mean).abs().max() > 1e-5
    assert_same_posterior(after, expected, data.test, 1e-12)
    assert_close(
        model.variational_strategy.kl_divergence(),
        expected.variational_strategy.kl_divergence(),
        1e-12,
    )
    if change != "mean":
        assert model.variational_strategy.kl_divergence() != kl


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_seen_in_train_mode(change: str) -> None:
    data = problem("gaussian")
    model = data.converged().train()
    model(data.test)
    CHANGES[change](model)
    model.train()
    expected = fresh(model).train()
    assert_close(model(data.test).variance, expected(data.test).variance, 1e-12)
    kls = [each.variational_strategy.kl_divergence() for each in (model, expected)]
    assert_close(*kls, 1e-12)


@some_likelihoods
@pytest.mark.parametrize("conditioned", [False, True])
def test_a_second_call_factorises_nothing(name: str, conditioned: bool) -> None:
    data = problem(name)
    model = data.converged()
    if conditioned:
        model = model.get_fantasy_model(data.x[:2], data.y[:2])
    with patch("torch.linalg.cholesky_ex", wraps=torch.linalg.cholesky_ex) as cholesky:
        first = model(data.test)
        calls = cholesky.call_count
        second = model(data.test)
        model.variational_strategy.kl_divergence()
        assert cholesky.call_count == calls
    assert_same_posterior(first, second, data.test, 0)


def test_a_training_step_factorises_twice() -> None:
    """``Kzz`` and ``W``, shared by the prediction and the KL of one pass."""
    data = problem("gaussian")
    model = data.converged().train()
    elbo = DualELBO(data.likelihood, model)
    for _ in range(2):
        with patch("torch.linalg.cholesky_ex", wraps=torch.linalg.cholesky_ex) as cholesky:
            elbo(model(data.x), data.y).backward()
        assert cholesky.call_count == 2


def test_graphs_are_not_used_twice() -> None:
    """Predictions and KL may have backward passes of their own, in any order."""
    data = problem("bernoulli")
    model = data.converged().train()
    strategy, raw = model.variational_strategy, model.covar_module.raw_outputscale

    def gradient(*terms: Callable[[], torch.Tensor]) -> torch.Tensor:
        model.zero_grad()
        for term in terms:
            term().backward()
        return raw.grad.clone()

    def kl() -> torch.Tensor:
        with fixed_sites():
            return strategy.kl_divergence()

    fit = lambda: model(data.x).mean.sum()  # noqa: E731
    both = gradient(lambda: fit() + kl())
    assert both.abs() > 0
    for terms in ([fit, kl], [kl, fit], [fit, lambda: kl() + 0, lambda: 0 * kl()]):
        assert_close(gradient(*terms), both, 1e-12)


@some_likelihoods
@pytest.mark.parametrize("Z_shape", [(7, 2), (3, 2), (11, 2)])
@pytest.mark.parametrize("learn", [True, False])
def test_state_dict_round_trip(name: str, Z_shape: tuple[int, ...], learn: bool) -> None:
    """Into a model that has another number of inducing points, and has been used."""
    data = problem(name)
    model = data.converged(learn_inducing_locations=learn)
    model.covar_module.outputscale = 0.8
    other = data.model(make_inputs(*Z_shape), learn_inducing_locations=learn).eval()
    other(data.test)
    other.load_state_dict(model.state_dict())
    assert_same_posterior(model, other, data.test, 1e-14)
    for key, value in state_of(model).items():
        assert torch.equal(other.state_dict()[key], value), key
    # The state is a copy: what happens to one does not reach the other.
    expected = model(data.test)
    data.learn(other, add=True)
    other.variational_strategy.dual_lam.zero_()
    assert_same_posterior(model, expected, data.test, 1e-14)


@pytest.mark.parametrize(("before", "after"), [((), (3,)), ((3,), ()), ((3,), (2, 3))])
def test_state_dict_with_other_batch_shape(before: tuple[int, ...], after: tuple[int, ...]) -> None:
    """The duals have grown by broadcasting when batched data were learnt."""
    data = problem("gaussian")
    model, other = data.model().eval(), data.model().eval()
    for each, batch in ((model, after), (other, before)):
        y = data.y + torch.randn(*batch, 1)
        each.variational_strategy.converge(data.x, y)
    other.load_state_dict(model.state_dict())
    assert_same_posterior(model, other, data.test, 1e-14)


def copies(model: GP) -> list[GP]:
    return [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]


@some_likelihoods
@pytest.mark.parametrize("training", [True, False])
def test_copies_and_pickles(name: str, training: bool) -> None:
    data = problem(name)
    model = data.converged().train(training)
    model(data.x)  # which leaves something in the cache
    for other in copies(model):
        assert other.training == training
        assert other.variational_strategy.model is other
        assert_same_posterior(model.eval(), other.eval(), data.test, 1e-14)
        expected = model(data.test)
        other.covar_module.outputscale = 3.0
        data.learn(other, add=True)
        assert_same_posterior(model, expected, data.test, 0)
        model.train(training)


@some_likelihoods
def test_other_precisions(name: str) -> None:
    data = problem(name)
    model = data.converged()
    expected, state = model(data.test), state_of(model)
    single = model.float()(data.test.float())
    assert single.mean.dtype == single.variance.dtype == torch.float32
    # The jitter is 1e-5 now, relative to a prior variance of 1.3.
    assert_close(single.mean, expected.mean, 1e-4)
    assert_close(single.variance, expected.variance, 1e-4)
    model.variational_strategy.converge(
        data.x.float(), data.y if data.num_latents else data.y.float()
    )
    assert_close(model(data.test.float()).mean, expected.mean, 1e-3)
    model.double().load_state_dict(state)
    assert_same_posterior(model, expected, data.test, 1e-12)


def test_float32_targets_for_a_float64_model_and_the_reverse() -> None:
    data = problem("gaussian")
    model = data.converged()
    data.learn(model)
    expected = model(data.test).mean
    model.variational_strategy.converge(data.x, data.y.float())
    assert_close(model(data.test).mean, expected, 1e-6)
    model.float().variational_strategy.converge(data.x.float(), data.y)
    assert model.variational_strategy.dual_lam.dtype == torch.float32
    assert_close(model(data.test.float()).mean, expected, 1e-4)


def test_gradients_through_caches_when_asked_for() -> None:
    """As in GPyTorch: in eval mode caches are detached, unless ``detach_test_caches`` is off."""
    data = problem("gaussian")
    model = data.converged()
    raw, h = model.covar_module.raw_outputscale, 1e-5

    def value(shift: float = 0.0) -> torch.Tensor:
        raw.data.add_(shift)
        with gpytorch.settings.detach_test_caches(False):
            result = model(data.test).mean.sum()
        raw.data.sub_(shift)
        return result

    value().backward()
    slope = (value(h) - value(-h)).detach() / (2 * h)
    assert_close(raw.grad, slope.expand_as(raw), 1e-6)

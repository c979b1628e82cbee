from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from gpytorch.likelihoods import GaussianLikelihood
from gpytorch.mlls import VariationalELBO
from gpytorch.priors import GammaPrior, NormalPrior
from torch import Tensor

from seqgp import DualELBO
from tests.helpers import (
    CASES,
    GP,
    assert_close,
    make_inputs,
    make_kernel,
    make_mean,
    problem,
    with_same_expectations,
)

pytestmark = pytest.mark.usefixtures("float64")

all_likelihoods = pytest.mark.parametrize("name", list(CASES))


def coordinates(model: torch.nn.Module) -> Iterator[tuple[str, Tensor, int]]:
    """A few elements of every parameter: ``name, tensor, index``."""
    for name, parameter in model.named_parameters():
        for index in {0, parameter.numel() - 1}:
            yield name, parameter, index


def assert_gradient_by_finite_differences(model: GP, loss: Any, tol: float = 1e-6) -> None:
    model.zero_grad()
    loss().backward()
    for name, parameter, index in coordinates(model):
        flat, h = parameter.data.view(-1), 1e-5
        start = flat[index].item()
        ends = []
        for sign in (1, -1):
            flat[index] = start + sign * h
            ends.append(loss().item())
        flat[index] = start
        expected = (ends[0] - ends[1]) / (2 * h)
        actual = parameter.grad.view(-1)[index].item()
        assert actual == pytest.approx(expected, rel=tol, abs=tol), (name, index)


@all_likelihoods
@pytest.mark.parametrize("converged", [True, False])
def test_gradient_by_finite_differences(name: str, converged: bool) -> None:
    """Of kernel, mean, likelihood and inducing points, with the sites held fixed."""
    data = problem(name, n=12, m=4)
    model = data.model()
    if converged:
        data.learn(model)
    else:
        model.variational_strategy.natural_gradient_step(data.x, data.y, rho=0.4, **data.arguments)
    model.train()
    elbo = DualELBO(data.likelihood, model)
    loss = lambda: -elbo(model(data.x), data.y, **data.arguments)  # noqa: E731
    assert_gradient_by_finite_differences(model, loss)
    names = {parameter for parameter, _, _ in coordinates(model)}
    assert "variational_strategy.inducing_points" in names
    assert "mean_module.raw_constant" in names


@all_likelihoods
def test_gradient_is_that_of_the_bound_maximised_over_q(name: str) -> None:
    """With converged sites, to first order nothing depends on them any more."""
    data = problem(name, n=12, m=4)
    model = data.model()
    data.learn(model)
    elbo = DualELBO(data.likelihood, model)
    model.train()
    (12 * elbo(model(data.x), data.y, **data.arguments)).backward()

    def maximum() -> float:
        other = data.model()
        other.load_state_dict(model.state_dict())
        return data.learn(other, tol=1e-12).elbo.item()

    raws = [model.covar_module.raw_outputscale, model.covar_module.base_kernel.raw_lengthscale]
    for parameter in [
        *raws,
        model.mean_module.raw_constant,
        model.variational_strategy.inducing_points,
    ]:
        flat, h = parameter.data.view(-1), 1e-4
        start = flat[0].item()
        ends = []
        for step in (2, 1, -1, -2):
            flat[0] = start + step * h
            ends.append(maximum())
        flat[0] = start
        slope = (-ends[0] + 8 * ends[1] - 8 * ends[2] + ends[3]) / (12 * h)
        assert parameter.grad.view(-1)[0].item() == pytest.approx(slope, rel=1e-5, abs=1e-5)


def test_gradient_is_that_of_the_collapsed_bound() -> None:
    """Gaussian: Titsias' bound in plain tensors, differentiated."""
    data = problem("gaussian")
    model = data.model(jitter_val=1e-13)
    data.learn(model)
    model.train()
    (30 * DualELBO(data.likelihood, model)(model(data.x), data.y)).backward()
    actual = {key: parameter.grad.clone() for key, parameter in model.named_parameters()}
    model.zero_grad()
    Z, noise = model.variational_strategy.inducing_points, data.likelihood.noise
    kernel, mean = model.covar_module, model.mean_module(data.x)
    Kzz, Kzx = kernel(Z).to_dense(), kernel(Z, data.x).to_dense()
    Q = Kzx.mT @ torch.linalg.solve(Kzz, Kzx)
    marginal = torch.distributions.MultivariateNormal(mean, Q + noise * torch.eye(30))
    rest = kernel(data.x).diagonal(dim1=-1, dim2=-2) - Q.diagonal()
    (marginal.log_prob(data.y) - 0.5 * (rest / noise).sum()).backward()
    for key, parameter in model.named_parameters():
        assert_close(actual[key], parameter.grad, 1e-7)


@all_likelihoods
def test_value_is_that_of_gpytorch_and_of_the_iteration(name: str) -> None:
    data = problem(name)
    model = data.model()
    elbo = data.learn(model).elbo
    model.train()
    posterior = model(data.x)
    value = DualELBO(data.likelihood, model)(posterior, data.y, **data.arguments)
    assert_close(30 * value, elbo, 1e-6)
    ours = name in ("bernoulli", "heteroscedastic", "laplace", "softmax", "softmax_mixing")
    likelihood = with_same_expectations(data.likelihood) if ours else data.likelihood
    theirs = VariationalELBO(likelihood, model, 30)(model(data.x), data.y, **data.arguments)
    assert_close(value, theirs, 1e-10)


@pytest.mark.parametrize("name", ["gaussian", "bernoulli", "softmax"])
def test_minibatches_estimate_the_bound(name: str) -> None:
    data = problem(name)
    model = data.model()
    data.learn(model)
    model.train()
    elbo = DualELBO(data.likelihood, model, num_data=30)
    parts = [elbo(model(data.x[s]), data.y[s]) for s in (slice(10), slice(10, 20), slice(20, 30))]
    assert_close(torch.stack(parts).mean(), elbo(model(data.x), data.y), 1e-12)


@pytest.mark.parametrize("beta", [1.0, 0.3])
@pytest.mark.parametrize("num_data", [None, 100])
def test_terms(beta: float, num_data: int | None) -> None:
    data = problem("bernoulli")
    model = data.model()
    data.learn(model)
    model.covar_module.register_prior("prior", GammaPrior(2.0, 3.0), "outputscale")
    model.train()
    whole = DualELBO(data.likelihood, model, num_data, beta)(model(data.x), data.y)
    apart = DualELBO(data.likelihood, model, num_data, beta, combine_terms=False)
    fit, kl, prior = apart(model(data.x), data.y)
    n = num_data or 30
    assert_close(kl, beta * model.variational_strategy.kl_divergence() / n, 1e-12)
    assert_close(prior, GammaPrior(2.0, 3.0).log_prob(model.covar_module.outputscale) / n, 1e-12)
    assert_close(whole, fit - kl + prior, 1e-12)


def test_priors_count_once() -> None:
    """Also those of a likelihood that is the model's own, which GPyTorch finds twice."""
    data = problem("gaussian")
    likelihood = GaussianLikelihood(noise_prior=GammaPrior(1.1, 0.5))
    model = GP(data.Z, likelihood)
    model.mean_module.register_prior("prior", NormalPrior(0.0, 2.0), "constant")
    model.train()
    _, _, prior = DualELBO(likelihood, model, combine_terms=False)(model(data.x), data.y)
    expected = GammaPrior(1.1, 0.5).log_prob(likelihood.noise).sum()
    expected = expected + NormalPrior(0.0, 2.0).log_prob(model.mean_module.constant)
    assert_close(prior, expected / 30, 1e-12)


def test_batches_of_models_have_bounds_of_their_own() -> None:
    data, batch = problem("gaussian"), torch.Size([3])
    scales = torch.tensor([0.5, 1.0, 2.0])

    def make(scale: float | Tensor, batch_shape: torch.Size) -> tuple[GP, DualELBO]:
        kernel = make_kernel(outputscale=scale, batch_shape=batch_shape)
        kernel.register_prior("prior", GammaPrior(2.0, 3.0), "outputscale")
        model = GP(data.Z, data.likelihood, make_mean(0.3, batch_shape), kernel)
        data.learn(model)
        return model.train(), DualELBO(data.likelihood, model)

    together, elbo = make(scales, batch)
    values = elbo(together(data.x), data.y)
    assert values.shape == batch
    for i, scale in enumerate(scales.tolist()):
        alone, elbo = make(scale, torch.Size())
        assert_close(values[i], elbo(alone(data.x), data.y), 1e-9)


def test_sets_of_targets_have_bounds_of_their_own() -> None:
    """Targets with more batch dimensions than the posterior, as many as quadrature nodes."""
    data = problem("poisson")
    model = data.model()
    data.learn(model)
    model.train()
    elbo = DualELBO(data.likelihood, model)
    targets = torch.stack([data.y + k for k in range(20)])
    values = elbo(model(data.x), targets)
    for y, value in zip(targets, values, strict=True):
        assert_close(value, elbo(model(data.x), y), 1e-12)


@pytest.mark.parametrize("name", ["gaussian", "bernoulli", "softmax"])
def test_alternating_with_natural_gradients_learns(name: str) -> None:
    data = problem(name)
    model = data.model(kernel=make_kernel(3.0, 0.1))
    elbo, optimiser = (
        DualELBO(data.likelihood, model),
        torch.optim.Adam(model.parameters(), lr=0.05),
    )
    bounds = []
    for _ in range(15):
        bounds.append(data.learn(model, tol=1e-6).elbo.item())
        model.train()
        optimiser.zero_grad()
        (-elbo(model(data.x), data.y)).backward()
        optimiser.step()
    assert bounds[-1] > bounds[0] + 0.1
    assert math.isfinite(bounds[-1])


@all_likelihoods
def test_bound_maximised_over_q(name: str) -> None:
    """`DualVariationalStrategy.bound`: value, gradient, and no trace of it in the state."""
    data = problem(name, n=12, m=4)
    model = data.model()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    strategy = model.variational_strategy
    value, sites = strategy.bound(data.x, data.y, tol=1e-11, **data.arguments)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    value.backward()
    actual = [parameter.grad.clone() for parameter in model.parameters()]
    assert_close(value, data.learn(model).elbo, 1e-8)
    model.zero_grad()
    model.train()
    (12 * DualELBO(data.likelihood, model)(model(data.x), data.y, **data.arguments)).backward()
    for got, parameter in zip(actual, model.parameters(), strict=True):
        assert_close(got, parameter.grad, 1e-6)
    again, _ = strategy.bound(data.x, data.y, start=sites, **data.arguments)
    assert_close(again, value, 1e-8)


def test_inducing_points_far_from_the_data_have_no_influence() -> None:
    data = problem("bernoulli")
    far = data.model(torch.cat([data.Z, 100 + make_inputs(2, 2)]))
    assert_close(data.learn(far).elbo, data.learn(data.model()).elbo, 1e-7)

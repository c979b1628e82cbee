"""Posteriors and bounds against exact and sparse GPs, for all shapes of models and data."""

from __future__ import annotations

import math
from typing import Any

import gpytorch
import pytest
import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.kernels import InducingPointKernel
from gpytorch.likelihoods import FixedNoiseGaussianLikelihood, GaussianLikelihood, Likelihood
from gpytorch.means import ConstantMean, LinearMean, Mean, ZeroMean
from gpytorch.mlls import ExactMarginalLogLikelihood
from torch import Tensor
from torch.distributions import Normal, constraints, kl_divergence

from seqgp import BinomialLikelihood, DualVariationalStrategy
from tests.helpers import (
    CASES,
    GP,
    NOT_LOG_CONCAVE,
    assert_close,
    assert_same_posterior,
    dense_prior,
    latent,
    make_inputs,
    make_kernel,
    make_mean,
    problem,
)

pytestmark = pytest.mark.usefixtures("float64")

some_likelihoods = pytest.mark.parametrize("name", ["gaussian", "bernoulli"])


class ExactGP(gpytorch.models.ExactGP):
    def __init__(self, x: Tensor, y: Tensor, likelihood: Likelihood, mean: Mean, kernel: Any):
        super().__init__(x, y, likelihood)
        self.mean_module, self.covar_module = mean, kernel

    def forward(self, x: Tensor) -> MultivariateNormal:
        return MultivariateNormal(self.mean_module(x), self.covar_module(x))


def linear_mean() -> Mean:
    mean = LinearMean(2)
    return mean.initialize(weights=torch.tensor([[0.5], [-2.0]]), bias=0.7)


@pytest.mark.parametrize("make_mean", [ZeroMean, lambda: make_mean(2.0), linear_mean])
@pytest.mark.parametrize("name", ["gaussian", "fixed_noise"])
def test_all_data_as_inducing_points_is_the_exact_gp(name: str, make_mean: Any) -> None:
    data = problem(name, n=15)
    likelihood = data.likelihood
    if name == "fixed_noise":
        likelihood = FixedNoiseGaussianLikelihood(data.arguments["noise"])
    exact = ExactGP(data.x, data.y, likelihood, make_mean(), make_kernel())
    bound = 15 * ExactMarginalLogLikelihood(likelihood, exact)(exact(data.x), data.y)
    model = GP(data.x, likelihood, make_mean(), make_kernel(), jitter_val=1e-13).eval()
    info = model.variational_strategy.converge(data.x, data.y)
    assert_same_posterior(model, exact.eval(), data.test, 1e-8)
    assert_close(info.elbo, bound, 1e-8)


def titsias(model: GP, x: Tensor, y: Tensor, noise: Tensor, test: Tensor) -> tuple[Any, Tensor]:
    """Posterior and bound of Titsias (2009), dense, noise per point."""
    Z = model.variational_strategy.inducing_points.detach()
    prior, new = dense_prior(model, Z, x), dense_prior(model, Z, test)
    Q = prior.zx.mT @ torch.linalg.solve(prior.zz, prior.zx)
    marginal = torch.distributions.MultivariateNormal(prior.mean_x, Q + noise.diag())
    bound = marginal.log_prob(y) - 0.5 * ((prior.xx - Q).diagonal() / noise).sum()
    S = prior.zz + (prior.zx / noise) @ prior.zx.mT
    mean = new.mean_x + new.zx.mT @ torch.linalg.solve(S, prior.zx @ ((y - prior.mean_x) / noise))
    explained = torch.linalg.solve(prior.zz, new.zx) - torch.linalg.solve(S, new.zx)
    return MultivariateNormal(mean, new.xx - new.zx.mT @ explained), bound


@pytest.mark.parametrize("chunk", [None, 20])
@pytest.mark.parametrize("m", [1, 5, 12])
@pytest.mark.parametrize("name", ["gaussian", "fixed_noise"])
def test_any_inducing_points_are_titsias(
    name: str, m: int, chunk: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = problem(name, m=m)
    if chunk is not None:  # fewer elements than m * n
        monkeypatch.setattr("seqgp.variational.strategy.CHUNK_ELEMENTS", chunk)
        monkeypatch.setattr("seqgp.variational.strategy.KEEP_ELEMENTS", chunk)
    model = data.model(jitter_val=1e-13).eval()
    info = data.learn(model)
    noise = data.arguments.get("noise", data.likelihood.noise.detach().expand(30))
    posterior, bound = titsias(model, data.x, data.y, noise, data.test)
    assert_same_posterior(model, posterior, data.test, 1e-8)
    assert_close(info.elbo, bound, 1e-8)


def test_any_inducing_points_are_gpytorchs_sgpr() -> None:
    data = problem("gaussian")
    kernel = InducingPointKernel(make_kernel(), data.Z, data.likelihood)
    sgpr = ExactGP(data.x, data.y, data.likelihood, make_mean(), kernel)
    bound = 30 * ExactMarginalLogLikelihood(data.likelihood, sgpr)(sgpr(data.x), data.y)
    model = data.model(jitter_val=1e-13).eval()
    info = data.learn(model)
    assert_close(info.elbo, bound, 1e-8)
    with gpytorch.settings.sgpr_diagonal_correction(False):
        assert_close(model(data.test).mean, sgpr.eval()(data.test).mean, 1e-8)


@pytest.mark.parametrize(
    ("name", "argument", "make"),
    [
        ("fixed_noise", "noise", FixedNoiseGaussianLikelihood),
        ("binomial", "total_count", BinomialLikelihood),
    ],
)
@pytest.mark.parametrize("chunk", [20, 10**6])
def test_arguments_that_the_likelihood_holds(
    name: str, argument: str, make: Any, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of the very points that it was made with, or given with each call."""
    monkeypatch.setattr("seqgp.variational.strategy.CHUNK_ELEMENTS", chunk)
    data = problem(name)
    held = data._replace(likelihood=make(data.arguments[argument]), arguments={})
    assert_same_posterior(held.converged(), data.converged(), data.test, 1e-9)
    with pytest.raises(ValueError, match=f"{argument}: the likelihood h(old|a)s"):
        held.converged().get_fantasy_model(data.x[:3], data.y[:3])
    first = {argument: data.arguments[argument][:3]}
    assert_same_posterior(
        held.converged().get_fantasy_model(data.x[:3], data.y[:3], **first),
        data.converged().get_fantasy_model(data.x[:3], data.y[:3], **first),
        data.test,
        1e-9,
    )


def test_before_any_data_the_posterior_is_the_prior() -> None:
    data = problem("gaussian")
    for mode in (True, False):
        model = data.model().train(mode)
        posterior, prior = model(data.test), model(data.test, prior=True)
        assert_close(posterior.mean, prior.mean, 1e-12)
        assert_close(posterior.variance, prior.variance, 1e-7)  # jitter
        assert model.variational_strategy.kl_divergence() == 0


@pytest.mark.parametrize("name", ["gaussian", "bernoulli", "softmax"])
def test_train_and_eval_mode_agree(name: str) -> None:
    data = problem(name)
    model = data.converged()
    expected = model(data.test)
    model.train()
    diagonal, full = model(data.test), model(data.test, diag=False)
    assert_close(diagonal.mean, expected.mean, 1e-7)
    assert_close(diagonal.variance, expected.variance, 1e-7)
    assert_same_posterior(full, expected, data.test, 1e-7)


@pytest.mark.parametrize("name", ["gaussian", "bernoulli", "softmax"])
def test_distributions_at_the_inducing_points(name: str) -> None:
    data = problem(name)
    model = data.converged(jitter_val=1e-13)
    strategy = model.variational_strategy
    q, p = strategy.variational_distribution, strategy.prior_distribution
    kl = kl_divergence(q, p)
    assert_close(strategy.kl_divergence(), kl if data.num_latents is None else kl.sum(-1), 1e-9)
    L = strategy.chol
    prior_mean = model(data.Z, prior=True).mean
    posterior = model(data.Z)
    mean = (L @ q.mean.unsqueeze(-1)).squeeze(-1)
    assert_close(strategy.alpha, mean, 1e-10)
    assert_close(posterior.mean - prior_mean, mean.mT if data.num_latents else mean, 1e-9)
    variance = (L @ q.covariance_matrix @ L.mT).diagonal(dim1=-2, dim2=-1)
    assert_close(posterior.variance, variance.mT if data.num_latents else variance, 1e-9)


# ---------------------------------------------------------------- batches


@some_likelihoods
@pytest.mark.parametrize(
    ("kernel_batch", "mean_batch", "Z_batch", "data_batch"),
    [
        ((3,), (3,), (), ()),  # batches of models
        ((), (3,), (), ()),  # that share a kernel
        ((), (), (3,), ()),
        ((3,), (3,), (3,), (3,)),
        ((), (), (), (3,)),  # batches of data
        ((), (), (), (2, 3)),
        ((3,), (), (), (2, 3)),  # and both
        ((2, 1), (), (), (3,)),
        ((3,), (3,), (2, 1), (3,)),
    ],
)
def test_batches_are_as_if_alone(
    name: str,
    kernel_batch: tuple[int, ...],
    mean_batch: tuple[int, ...],
    Z_batch: tuple[int, ...],
    data_batch: tuple[int, ...],
) -> None:
    n, m = 9, 4
    scales = 0.5 + torch.rand(kernel_batch)
    constants = torch.randn(mean_batch)
    Z, x = make_inputs(*Z_batch, m, 2), make_inputs(*data_batch, n, 2)
    y = CASES[name].sample(latent(make_inputs(*data_batch, n, 2)))
    mean = ConstantMean(batch_shape=torch.Size(mean_batch)).initialize(constant=constants)
    kernel = make_kernel(outputscale=scales, batch_shape=torch.Size(kernel_batch))
    together = GP(Z, CASES[name].make(), mean, kernel).eval()
    info = together.variational_strategy.converge(x, y, tol=1e-10)
    test = make_inputs(5, 2)
    posterior = together(test)
    shape = torch.broadcast_shapes(kernel_batch, mean_batch, Z_batch, data_batch)
    assert posterior.batch_shape == info.elbo.shape == shape
    assert together.variational_strategy.batch_shape == shape
    assert together.variational_strategy.kl_divergence().shape in (shape, ())
    scales, constants = scales.expand(shape), constants.expand(shape)
    Z, x, y = Z.expand(*shape, m, 2), x.expand(*shape, n, 2), y.expand(*shape, n)
    own_test = make_inputs(*shape, 5, 2)
    own_posterior = together(own_test)
    for index in [(0,) * len(shape), tuple(size - 1 for size in shape)]:
        mean = make_mean(constants[index].item())
        kernel = make_kernel(outputscale=scales[index].item())
        alone = GP(Z[index], CASES[name].make(), mean, kernel).eval()
        alone_info = alone.variational_strategy.converge(x[index], y[index], tol=1e-10)
        assert_close(info.elbo[index], alone_info.elbo, 1e-8)
        for batched, inputs in ((posterior, test), (own_posterior, own_test[index])):
            assert_close(batched.mean[index], alone(inputs).mean)
            assert_close(batched.covariance_matrix[index], alone(inputs).covariance_matrix)


def test_batches_of_noises() -> None:
    """One model and one data set, three likelihoods."""
    data, noises = problem("gaussian"), torch.tensor([[0.1], [0.3], [1.0]])
    likelihood = GaussianLikelihood(batch_shape=torch.Size([3])).initialize(noise=noises)
    together = GP(data.Z, likelihood).eval()
    info = together.variational_strategy.converge(data.x, data.y)
    for i, noise in enumerate(noises):
        alone = GP(data.Z, GaussianLikelihood().initialize(noise=noise)).eval()
        assert_close(info.elbo[i], alone.variational_strategy.converge(data.x, data.y).elbo, 1e-9)
        assert_close(together(data.test).mean[i], alone(data.test).mean, 1e-9)
        covariance = together(data.test).covariance_matrix
        assert_close(covariance[i], alone(data.test).covariance_matrix, 1e-9)


class EachLatent(Likelihood):
    """Every latent is observed with the same noisy value, independently: c GPs at once."""

    def forward(self, function_samples: Tensor, *args: Any, **kwargs: Any) -> Any:
        class Conditional:
            support = constraints.real

            def log_prob(self, y: Tensor) -> Tensor:
                return Normal(function_samples, math.sqrt(0.2)).log_prob(y.unsqueeze(-1)).sum(-1)

        return Conditional()


@pytest.mark.parametrize("kernel_batch", [(), (3,)])
@pytest.mark.parametrize("mean_batch", [(), (3,)])
@pytest.mark.parametrize("Z_batch", [(), (3,)])
def test_latents_are_independent(
    kernel_batch: tuple[int, ...], mean_batch: tuple[int, ...], Z_batch: tuple[int, ...]
) -> None:
    """Kernel, mean and inducing points shared by the latents, or for each its own."""
    data = problem("gaussian")
    Z = make_inputs(*Z_batch, 6, 2)
    scales, constants = 0.5 + torch.rand(kernel_batch), torch.randn(mean_batch)
    mean = ConstantMean(batch_shape=torch.Size(mean_batch)).initialize(constant=constants)
    kernel = make_kernel(outputscale=scales, batch_shape=torch.Size(kernel_batch))
    together = GP(Z, EachLatent(), mean, kernel, num_latents=3).eval()
    info = together.variational_strategy.converge(data.x, data.y, tol=1e-10)
    posterior = together(data.test)
    assert posterior.event_shape == (6, 3)
    expected, bound = [], 0
    for k in range(3):
        pick = lambda tensor, batch, k=k: tensor[k] if batch else tensor  # noqa: E731
        alone = GP(
            pick(Z, Z_batch),
            GaussianLikelihood().initialize(noise=0.2),
            make_mean(pick(constants, mean_batch).item()),
            make_kernel(outputscale=pick(scales, kernel_batch).item()),
        ).eval()
        bound = bound + alone.variational_strategy.converge(data.x, data.y).elbo
        expected.append(alone(data.test))
    # The samples that stand in for the expectation are exact for quadratic functions.
    assert_close(info.elbo, bound, 1e-8)
    assert_close(posterior.mean, torch.stack([q.mean for q in expected], -1), 1e-8)
    assert_close(posterior.variance, torch.stack([q.variance for q in expected], -1), 1e-8)


@pytest.mark.parametrize("name", ["softmax", "softmax_mixing"])
def test_shared_and_separate_kernels_are_the_same_if_equal(name: str) -> None:
    data = problem(name)
    separate = data.converged(kernel=make_kernel(batch_shape=torch.Size([3])))
    assert_same_posterior(separate, data.converged(), data.test)


def test_batches_of_models_with_several_latents() -> None:
    data = problem("softmax", n=12, m=4)
    Z = make_inputs(2, 1, 4, 2)
    x = make_inputs(2, 12, 2)
    together = data.model(Z).eval()
    info = together.variational_strategy.converge(x, data.y, tol=1e-10, max_steps=300)
    posterior = together(data.test)
    assert posterior.batch_shape == info.elbo.shape == (2,)
    for i in range(2):
        alone = data.model(Z[i, 0]).eval()
        alone.variational_strategy.converge(x[i], data.y, tol=1e-10, max_steps=300)
        assert_close(posterior.mean[i], alone(data.test).mean)
        assert_close(posterior.variance[i], alone(data.test).variance)


# ---------------------------------------------------------------- sizes


@pytest.mark.parametrize("name", list(CASES))
@pytest.mark.parametrize(("n", "m"), [(1, 1), (1, 5), (8, 1)])
def test_small_sizes(name: str, n: int, m: int) -> None:
    data = problem(name, n=n, m=m)
    posterior = data.converged()(data.test)
    assert posterior.mean.isfinite().all()
    prior = data.model()(data.test, prior=True)
    assert (posterior.variance < prior.variance * (1 + 1e-7)).all() or name in NOT_LOG_CONCAVE


@pytest.mark.parametrize("name", list(CASES))
def test_no_data(name: str) -> None:
    data = problem(name)
    model, none = data.converged(), slice(0)
    arguments = {key: value[none] for key, value in data.arguments.items()}
    for update in ("converge", "natural_gradient_step"):
        getattr(model.variational_strategy, update)(data.x[none], data.y[none], **arguments)
        assert_close(model(data.test).mean, model(data.test, prior=True).mean, 1e-12)


@pytest.mark.parametrize("name", ["gaussian", "softmax"])
@pytest.mark.parametrize("batch", [(), (3,), (2, 3)])
def test_no_test_points(name: str, batch: tuple[int, ...]) -> None:
    data = problem(name)
    event = (0,) if data.num_latents is None else (0, 3)
    for mode in (True, False):
        model = data.converged().train(mode)
        posterior = model(make_inputs(*batch, 0, 2))
        assert posterior.mean.shape == posterior.variance.shape == (*batch, *event)


@pytest.mark.parametrize("name", ["gaussian", "bernoulli"])
def test_repeated_inputs_are_repeated_observations(name: str) -> None:
    """Twice the same data is one data set with all sites doubled; copies in Z change nothing."""
    data = problem(name)
    x, y = data.x.repeat(2, 1), data.y.repeat(2)
    model = data.model(torch.cat([data.Z, data.Z[:3], data.x[:4]])).eval()
    once = data.model(torch.cat([data.Z, data.x[:4]])).eval()
    for each in (model, once):
        assert each.variational_strategy.converge(x, y, tol=1e-10).converged
    assert_same_posterior(model, once, torch.cat([data.test, data.x[:2], data.x[:2]]))
    samples = model(torch.cat([data.test, data.test])).rsample(torch.Size([4]))
    assert samples.isfinite().all()


def test_one_input_dimension_may_come_as_a_vector() -> None:
    x = torch.linspace(0, 1, 9)
    model = GP(x.unsqueeze(-1)[::2], GaussianLikelihood()).eval()
    model.variational_strategy.converge(x.unsqueeze(-1), x.sin())
    assert_same_posterior(model(x), model(x.unsqueeze(-1)), x, 1e-12)


def test_inducing_points_are_a_parameter_or_not() -> None:
    learns = GP(make_inputs(3, 2), learn_inducing_locations=True)
    fixed = GP(make_inputs(3, 2), learn_inducing_locations=False)
    name = "variational_strategy.inducing_points"
    assert name in dict(learns.named_parameters())
    assert name not in dict(fixed.named_parameters())
    assert name in fixed.state_dict()
    for model in (learns, fixed):
        model.variational_strategy.set_inducing_points(make_inputs(5, 2))
        kind = torch.nn.Parameter if model is learns else Tensor
        assert type(model.variational_strategy.inducing_points) is kind
        assert model.variational_strategy.inducing_points.shape == (5, 2)
    assert isinstance(learns.variational_strategy, DualVariationalStrategy)
    assert not list(learns.variational_parameters())


def test_minibatches_may_share_a_buffer() -> None:
    """Other numbers in the same tensor are other observations."""
    x = make_inputs(20, 2)
    y, buffer = torch.sin(3 * x.sum(-1)), x[:10].clone()
    own, expected = (GP(x[:6], GaussianLikelihood()).eval() for _ in range(2))
    for part in (slice(10), slice(10, 20)):
        buffer.copy_(x[part])
        for model, inputs in ((own, buffer), (expected, x[part].clone())):
            strategy = model.variational_strategy
            strategy.natural_gradient_step(inputs, y[part], rho=0.5, num_data=20)
    assert_same_posterior(own, expected, x, 1e-12)

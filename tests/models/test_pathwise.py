from __future__ import annotations

from typing import Any

import pytest
import torch
from botorch.models.transforms import Normalize, Standardize
from botorch.sampling.pathwise import (
    draw_kernel_feature_paths,
    draw_matheron_paths,
    gaussian_update,
    get_matheron_path_model,
)
from botorch.utils.multitask import separate_mtmvn
from torch import Tensor

from seqgp import SequentialGP
from tests.helpers import ONE_LATENT, assert_close, make_inputs, make_kernel, make_mean
from tests.models.helpers import data, pair

pytestmark = pytest.mark.usefixtures("float64")

NUMBER = 4000


def assert_moments(samples: Tensor, mean: Tensor, covariance: Tensor) -> None:
    """Sample moments within five standard errors, and the error of random Fourier features.

    Functions are drawn with 1024 features for the prior, of which the covariance is then off by
    1 / sqrt(1024), times the outputscale of 1.3.
    """
    variance = covariance.diagonal(dim1=-2, dim2=-1)
    assert ((samples.mean(0) - mean).abs() < 5 * (variance / len(samples)).sqrt()).all()
    centred = samples - mean
    products = centred.unsqueeze(-1) * centred.unsqueeze(-2)
    error = 5 * products.std(0) / len(samples) ** 0.5 + 1.3 / 32
    assert ((products.mean(0) - covariance).abs() < error).all()


@torch.no_grad()
def draw(model: SequentialGP, X: Tensor, **kwargs: Any) -> Tensor:
    return draw_matheron_paths(model, torch.Size([NUMBER]), **kwargs)(X)


@pytest.mark.parametrize("name", ONE_LATENT)
@pytest.mark.parametrize("inducing_points", [None, 6], ids=["all", "few"])
def test_paths_have_the_moments_of_the_posterior(name: str, inducing_points: int | None) -> None:
    model, X = data(name).model(inducing_points=inducing_points), make_inputs(5, 2)
    posterior = model.posterior(X).distribution
    assert_moments(draw(model, X), posterior.mean, posterior.covariance_matrix)


@pytest.mark.parametrize("known", [False, True])
def test_updates_for_given_targets(known: bool) -> None:
    """They are noisy observations, as for an exact GP; of a sparse model inducing values."""
    paths = []
    for model in pair(fixed_noise=known, input_transform=Normalize(2)):
        torch.manual_seed(0)
        sample_values, targets = torch.randn(3, 12), model.train_targets + 1
        path = gaussian_update(model, sample_values=sample_values, target_values=targets)
        paths.append(path(make_inputs(5, 2)))
    assert_close(*paths, 1e-8)


def test_transforms() -> None:
    X = 3 + 5 * make_inputs(12, 2)
    model = SequentialGP(
        X,
        10 + 4 * X.sum(-1, keepdim=True).sin(),
        covar_module=make_kernel(),
        mean_module=make_mean(),
        input_transform=Normalize(2),
        outcome_transform=Standardize(1),
    )
    test = 3 + 5 * make_inputs(5, 2)
    posterior = model.posterior(test).distribution
    scale = model.outcome_transform.stdvs.squeeze()
    samples = (draw(model, test) - posterior.mean) / scale
    assert_moments(samples, torch.zeros(5), posterior.covariance_matrix / scale**2)


@pytest.mark.parametrize("inducing_points", [None, 6], ids=["all", "few"])
def test_several_outputs(inducing_points: int | None) -> None:
    model, X = two_outputs(inducing_points), make_inputs(5, 2)
    samples = draw(model, X)
    assert samples.shape == (NUMBER, 2, 5)  # as BoTorch has them for `SingleTaskGP`
    for k in range(2):
        posterior = model.subset_output([k]).posterior(X).distribution
        assert_moments(samples[:, k], posterior.mean.squeeze(-1), posterior.covariance_matrix)


def two_outputs(inducing_points: int | None) -> SequentialGP:
    exact = pair(outputs=2)[1]
    return SequentialGP(
        make_inputs(12, 2),
        exact.train_targets.mT,
        likelihood=exact.likelihood,
        covar_module=exact.covar_module,
        mean_module=exact.mean_module,
        inducing_points=inducing_points,
    )


def test_batch_of_models() -> None:
    model, X = pair(batch_shape=torch.Size([3]))[0], make_inputs(5, 2)
    samples, posterior = draw(model, X), model.posterior(X).distribution
    assert samples.shape == (NUMBER, 3, 5)
    assert_moments(samples, posterior.mean, posterior.covariance_matrix)


def test_paths_are_functions() -> None:
    """The same path at other inputs, or inputs of its own for each path: one function each."""
    paths: Any = draw_matheron_paths(data("bernoulli").model(), torch.Size([7]))
    X = make_inputs(5, 2)
    values = paths(X)
    assert values.shape == (7, 5)
    assert_close(paths(X[2:]), values[:, 2:])
    assert_close(paths(X.expand(7, 5, 2)), values)
    assert values.std(0).min() > 0.1


def test_prior_paths() -> None:
    model, X = data("poisson").model(), make_inputs(5, 2)
    with torch.no_grad():
        samples = draw_kernel_feature_paths(model, torch.Size([NUMBER]))(X)
    prior = model.forward(X)
    assert_moments(samples, prior.mean, prior.covariance_matrix)


@pytest.mark.parametrize("name", ["gaussian", "bernoulli"])
def test_conditioned_model(name: str) -> None:
    """The observations on top are not among the inducing points, nor are those of a batch."""
    model, X = data(name).model(inducing_points=6), make_inputs(5, 2)
    known, more = make_inputs(2, 3, 2), make_inputs(1, 2)
    fantasy = model.condition_on_observations(known, torch.ones(2, 3, 1))
    fantasy = fantasy.condition_on_observations(more, torch.zeros(1, 1))
    samples, posterior = draw(fantasy, X), fantasy.posterior(X).distribution
    assert samples.shape == (NUMBER, 2, 5)
    assert_moments(samples, posterior.mean, posterior.covariance_matrix)


def test_conditioned_model_of_two_outputs() -> None:
    model, X = two_outputs(6), make_inputs(5, 2)
    fantasy = model.condition_on_observations(make_inputs(3, 2), torch.ones(1, 3, 2))
    samples, posterior = draw(fantasy, X), fantasy.posterior(X)
    assert samples.shape == (NUMBER, 1, 2, 5)
    covariance = torch.stack(
        [mvn.covariance_matrix for mvn in separate_mtmvn(posterior.distribution)], 1
    )
    assert_moments(samples, posterior.mean.mT, covariance)


@pytest.mark.parametrize("conditioned", [False, True])
def test_several_latents(conditioned: bool) -> None:
    """One path for each class, though the latents share kernel and mean."""
    model, X = data("softmax").model(inducing_points=6), make_inputs(4, 2)
    if conditioned:
        model = model.condition_on_observations(make_inputs(2, 2), torch.tensor([[[0.0], [2.0]]]))
    samples, posterior = draw(model, X), model.posterior(X)
    covariance = [mvn.covariance_matrix for mvn in separate_mtmvn(posterior.distribution)]
    assert samples.shape == (NUMBER, *[1] * conditioned, 3, 4)
    assert_moments(samples, posterior.mean.mT, torch.stack(covariance, -3))


def test_outputs_that_share_a_kernel() -> None:
    """Their functions are drawn independently all the same."""
    model, X = two_outputs(6), make_inputs(5, 2)
    model = SequentialGP(
        make_inputs(12, 2),
        model.train_targets.mT,
        covar_module=make_kernel(),
        mean_module=make_mean(),
        outcome_transform=None,
    )
    samples = draw(model, X)
    assert samples.shape == (NUMBER, 2, 5)
    for k in range(2):
        posterior = model.subset_output([k]).posterior(X).distribution
        assert_moments(samples[:, k], posterior.mean.squeeze(-1), posterior.covariance_matrix)
    correlation = torch.corrcoef(samples[:, :, 0].T)[0, 1]
    assert abs(correlation) < 5 / NUMBER**0.5


def test_given_values() -> None:
    """Paths go through values that are given, instead of drawn, at the inducing points."""
    model = data("bernoulli").model(inducing_points=6)
    Z = model.variational_strategy.inducing_points.detach()
    prior: Any = draw_kernel_feature_paths(model, torch.Size([3]))
    values = torch.linspace(-1, 1, 6)
    update = gaussian_update(model, prior(Z), target_values=values)
    assert_close(prior(Z) + update(Z), values.expand(3, 6), 1e-5)  # but for the jitter


def test_path_model() -> None:
    """`get_matheron_path_model` of a conditioned model: a function with the model's outputs."""
    fantasy = two_outputs(6).condition_on_observations(make_inputs(3, 2), torch.ones(3, 2))
    path, X = get_matheron_path_model(fantasy), make_inputs(4, 1, 2)
    assert path.posterior(X).mean.shape == (4, 1, 2)
    assert_close(path.posterior(X).mean[2:], path.posterior(X[2:]).mean)


def test_what_has_no_paths() -> None:
    X = make_inputs(2, 5, 2)
    Y = torch.arange(10.0).reshape(2, 5, 1) % 3
    model = SequentialGP(X, Y, likelihood=data("softmax").likelihood)
    with pytest.raises(NotImplementedError, match="a batch of models with several latents"):
        draw_matheron_paths(model, torch.Size([2]))

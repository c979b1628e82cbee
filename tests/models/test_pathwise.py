from __future__ import annotations

from typing import Any

import pytest
import torch
from botorch.models.transforms import Normalize, Standardize
from botorch.sampling.pathwise import draw_kernel_feature_paths, draw_matheron_paths
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


def test_what_has_no_paths() -> None:
    X = make_inputs(2, 2)
    conditioned = data("bernoulli").model().condition_on_observations(X, torch.ones(2, 1))
    for model in (conditioned, data("softmax").model()):
        with pytest.raises(NotImplementedError, match="Pathwise samples of a conditioned"):
            draw_matheron_paths(model, torch.Size([2]))

"""BoTorch's pathwise (Matheron) sampling for `SequentialGP`: sample functions of the posterior.

A sample function is one of the prior, corrected by what is known at a set of support points:
:math:`f(x) + k(x, S) K_{SS}^{-1} (u - f(S))` with :math:`u` drawn from the posterior at :math:`S`.
The support points are the inducing points and, for a conditioned model, the inputs of what it was
conditioned on; together they carry all that the posterior knows.

Importing `seqgp.models` registers the rules below with BoTorch's dispatchers.
"""

from __future__ import annotations

from collections.abc import Callable
from types import NoneType
from typing import Any

import torch
from botorch.models.transforms.input import InputTransform
from botorch.sampling.pathwise import GeneralizedLinearPath, KernelEvaluationMap, MatheronPath
from botorch.sampling.pathwise.paths import SamplePath
from botorch.sampling.pathwise.posterior_samplers import DrawMatheronPaths
from botorch.sampling.pathwise.prior_samplers import DrawKernelFeaturePaths
from botorch.sampling.pathwise.update_strategies import GaussianUpdate
from botorch.sampling.pathwise.utils import get_input_transform, get_output_transform
from botorch.utils.context_managers import delattr_ctx
from gpytorch.likelihoods import GaussianLikelihood, Likelihood
from gpytorch.models import ExactGP
from linear_operator import to_dense
from torch import Tensor

from seqgp.dual import scaled_cholesky
from seqgp.dual.linalg import broadcast_shapes
from seqgp.models.fit import has_exact_objectives
from seqgp.models.sequential_gp import SequentialGP
from seqgp.variational.strategy import DualVariationalStrategy


@DrawMatheronPaths.register(SequentialGP)
def _draw_matheron_paths(
    model: SequentialGP,
    *,
    sample_shape: torch.Size,
    prior_sampler: Callable[..., SamplePath],
    update_strategy: Callable[..., SamplePath],
) -> MatheronPath:
    """Sample functions with values ``sample_shape x batch_shape [x m] x n``, ``m`` or latents."""
    shape = torch.Size([*sample_shape, *_batches_of_one_prior(model)])
    with delattr_ctx(model, "outcome_transform"):
        prior_paths = prior_sampler(model=model, sample_shape=shape)
        sample_values = prior_paths.forward(_support_points(model.variational_strategy))
        update_paths = update_strategy(model=model, sample_values=sample_values)
    return MatheronPath(prior_paths, update_paths, output_transform=get_output_transform(model))


@DrawKernelFeaturePaths.register(SequentialGP)
def _draw_kernel_feature_paths(model: SequentialGP, **kwargs: Any) -> GeneralizedLinearPath:
    strategy = model.variational_strategy
    if _posterior_batch_shape(strategy):
        # BoTorch's default is one Sobol sequence for all: outputs next to each other in it would
        # be correlated.
        kwargs = {"weight_generator": torch.randn, **kwargs}
    return DrawKernelFeaturePaths(
        model,
        strategy,
        num_inputs=strategy.inducing_points.shape[-1],
        input_transform=get_input_transform(model),
        output_transform=get_output_transform(model),
        **kwargs,
    )


@GaussianUpdate.register(SequentialGP, (Likelihood, NoneType))
def _gaussian_update_model(
    model: SequentialGP, likelihood: Likelihood | None, **kwargs: Any
) -> GeneralizedLinearPath:
    if kwargs.get("target_values") is not None and has_exact_objectives(model):
        # They are those of the observations, which have noise, as for other exact models.
        return GaussianUpdate.dispatch(ExactGP, GaussianLikelihood)(model, likelihood, **kwargs)
    return GaussianUpdate(
        model, model.variational_strategy, input_transform=get_input_transform(model), **kwargs
    )


@GaussianUpdate.register(SequentialGP, DualVariationalStrategy)
def _gaussian_update(
    model: SequentialGP,
    strategy: DualVariationalStrategy,
    *,
    sample_values: Tensor,
    target_values: Tensor | None = None,
    input_transform: InputTransform | None = None,
) -> GeneralizedLinearPath:
    """Matheron's rule.

    Args:
        model: The model.
        strategy: Its strategy.
        sample_values: ``... x s`` values of the prior at the support points.
        target_values: ``... x s`` values of the posterior there; by default they are drawn. (For a
            model with an inducing point at each Gaussian observation they are targets instead.)
        input_transform: The model's.
    """
    points = _support_points(strategy)
    batch_shape = _posterior_batch_shape(strategy)
    shape = sample_values.shape[: sample_values.dim() - 1 - len(batch_shape)]
    chol = strategy.chol
    if strategy.is_conditioned:
        chol = scaled_cholesky(to_dense(model.covar_module(points)), strategy.jitter_val)
    if target_values is not None:
        values = target_values
    elif not strategy.is_conditioned:
        v = strategy.variational_distribution.rsample(shape)
        values = model.mean_module(points) + (chol @ v.unsqueeze(-1)).squeeze(-1)
    elif strategy.num_latents is None:
        values = strategy(points, diag=False).rsample(shape)
    else:
        values = strategy(points.squeeze(-3), diag=False).rsample(shape).mT
    weight = torch.cholesky_solve((values - sample_values).unsqueeze(-1), chol).squeeze(-1)
    features = KernelEvaluationMap(model.covar_module, points, input_transform=input_transform)
    return GeneralizedLinearPath(feature_map=features, weight=weight)


def _support_points(strategy: DualVariationalStrategy) -> Tensor:
    """``... x s x d``: the inducing points, and the inputs of what came on top of them."""
    Z, observed = strategy.inducing_points, strategy.observed
    if observed is None:
        return Z
    X = observed.data.points.detach()
    X = X if strategy.num_latents is None else X.unsqueeze(-3)
    batch = broadcast_shapes(Z.shape[:-2], X.shape[:-2])
    return torch.cat([Z.expand(*batch, *Z.shape[-2:]), X.expand(*batch, *X.shape[-2:])], -2)


def _posterior_batch_shape(strategy: DualVariationalStrategy) -> torch.Size:
    """Batch shape of the posterior, with a dimension for the latents if there are several."""
    latents = [] if strategy.num_latents is None else [strategy.num_latents]
    return torch.Size([*strategy.batch_shape, *latents])


def _batches_of_one_prior(model: SequentialGP) -> torch.Size:
    """Leading batch dimensions of the posterior that share a kernel, but not their functions."""
    strategy = model.variational_strategy
    shape, own = _posterior_batch_shape(strategy), model.covar_module.batch_shape
    number = len(shape) - len(own)
    own_points = strategy.num_latents is not None and strategy.inducing_points.dim() > 2
    if shape[number:] != own or (own_points and strategy.is_conditioned):
        raise NotImplementedError(
            "Pathwise samples of a batch of models with several latents each, or of a conditioned "
            "model whose latents have inducing points of their own, are not supported; use "
            "model.posterior(X).rsample()."
        )
    return shape[:number]

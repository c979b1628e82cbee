"""BoTorch's pathwise (Matheron) sampling for `SequentialGP`: sample functions of the posterior.

Importing `seqgp.models` registers the rules below with BoTorch's dispatchers.
"""

from __future__ import annotations

from types import NoneType
from typing import Any

import torch
from botorch.models.transforms.input import InputTransform
from botorch.sampling.pathwise import GeneralizedLinearPath, KernelEvaluationMap
from botorch.sampling.pathwise.prior_samplers import DrawKernelFeaturePaths
from botorch.sampling.pathwise.update_strategies import GaussianUpdate
from botorch.sampling.pathwise.utils import get_input_transform, get_output_transform
from gpytorch.likelihoods import Likelihood
from torch import Tensor

from seqgp.models.sequential_gp import SequentialGP
from seqgp.variational.strategy import DualVariationalStrategy


@DrawKernelFeaturePaths.register(SequentialGP)
def _draw_kernel_feature_paths(model: SequentialGP, **kwargs: Any) -> GeneralizedLinearPath:
    return DrawKernelFeaturePaths(
        model,
        model.variational_strategy,
        num_inputs=model.variational_strategy.inducing_points.shape[-1],
        input_transform=get_input_transform(model),
        output_transform=get_output_transform(model),
        **kwargs,
    )


@GaussianUpdate.register(SequentialGP, (Likelihood, NoneType))
def _gaussian_update_model(
    model: SequentialGP, likelihood: Likelihood | None, **kwargs: Any
) -> GeneralizedLinearPath:
    return GaussianUpdate(
        model, model.variational_strategy, input_transform=get_input_transform(model), **kwargs
    )


@GaussianUpdate.register(SequentialGP, DualVariationalStrategy)
def _gaussian_update(
    model: SequentialGP,
    strategy: DualVariationalStrategy,
    *,
    sample_values: Tensor,
    input_transform: InputTransform | None = None,
    **ignore: Any,
) -> GeneralizedLinearPath:
    """Matheron's rule with inducing values drawn from ``q(u)``, ``u = mu(Z) + L v``."""
    if strategy.is_conditioned or strategy.num_latents is not None:
        raise NotImplementedError(
            "Pathwise samples of a conditioned (fantasy) model, or of several latents, are not "
            "supported; use model.posterior(X).rsample(), or update the model instead of "
            "conditioning it."
        )
    chol, Z = strategy.chol, strategy.inducing_points
    extra = sample_values.dim() - 1 - strategy.dual_lam.dim() + 1
    v = strategy.variational_distribution.rsample(sample_values.shape[:extra])
    values = model.mean_module(Z) + (chol @ v.unsqueeze(-1)).squeeze(-1)
    weight = torch.cholesky_solve((values - sample_values).unsqueeze(-1), chol).squeeze(-1)
    features = KernelEvaluationMap(model.covar_module, Z, input_transform=input_transform)
    return GeneralizedLinearPath(feature_map=features, weight=weight)

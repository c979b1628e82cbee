"""Failures in BoTorch's way: a Gaussian model of the outcome 0 or 1, which has to exceed a half."""

from __future__ import annotations

from typing import Any

import torch
from botorch.acquisition import qLogNoisyExpectedImprovement
from botorch.acquisition.objective import GenericMCObjective
from botorch.fit import fit_gpytorch_mll
from botorch.models import ModelListGP, SingleTaskGP
from botorch.models.transforms import Normalize, Standardize
from botorch.optim import optimize_acqf
from botorch.sampling import SobolQMCNormalSampler
from gpytorch.kernels import Kernel
from gpytorch.mlls import ExactMarginalLogLikelihood
from torch import Tensor


def qlognei_batch(
    X: Tensor,
    Y: Tensor,
    valid: Tensor,
    bounds: Tensor,
    q: int,
    fit: dict[str, Any],
    optimize: dict[str, Any],
    kernel: Kernel | None = None,
) -> Tensor:
    """Propose ``q x d`` points, with both models fitted anew.

    Args:
        X: ``n x d`` evaluations.
        Y: ``n`` values, NaN for those that the objective's model is not to learn from.
        valid: ``n`` labels.
        bounds: ``2 x d``.
        q: How many points.
        fit: Options of L-BFGS for hyperparameters.
        optimize: Options of `optimize_acqf`.
        kernel: The objective's; by default BoTorch's.
    """
    known, models = ~Y.isnan(), []
    for inputs, targets, covariance in ((X[known], Y[known], kernel), (X, valid.to(X), None)):
        model = SingleTaskGP(
            inputs,
            targets.unsqueeze(-1),
            covar_module=covariance,
            input_transform=Normalize(X.shape[-1], bounds=bounds),
            outcome_transform=Standardize(1),
        )
        mll = ExactMarginalLogLikelihood(model.likelihood, model)
        fit_gpytorch_mll(mll, optimizer_kwargs={"options": fit})
        models.append(model)
    acquisition = qLogNoisyExpectedImprovement(
        ModelListGP(*models),
        X_baseline=X,
        sampler=SobolQMCNormalSampler(torch.Size([128]), seed=0),
        objective=GenericMCObjective(lambda samples, X: samples[..., 0]),
        constraints=[lambda samples: 0.5 - samples[..., 1]],
    )
    return optimize_acqf(acquisition, bounds, q, sequential=True, **optimize)[0]

"""The integrated posterior variance after an observation, for active learning."""

from __future__ import annotations

from typing import Any

import torch
from botorch.acquisition.active_learning import (
    qNegIntegratedPosteriorVariance as _BoTorchNegIntegratedPosteriorVariance,
)
from botorch.models.model import Model
from botorch.sampling.base import MCSampler
from botorch.sampling.normal import SobolQMCNormalSampler
from botorch.utils.transforms import concatenate_pending_points, t_batch_mode_transform
from torch import Tensor


class qNegIntegratedPosteriorVariance(_BoTorchNegIntegratedPosteriorVariance):
    r"""Integrated negative posterior variance for any likelihood.

    BoTorch's class of this name conditions on one dummy observation, because with a Gaussian
    likelihood the variance does not depend on the observation. With any other likelihood it does (a
    surprising label is more informative than an expected one), and this takes the expectation over
    observations:

    .. math::
        -E_{y | X} \int \operatorname{Var}[f(x) | D, (X, y)] \, dx

    Args:
        model: A model with a `fantasize` method.
        mc_points: ``batch_shape x N x d`` points over which the variance is averaged.
        num_fantasies: The number of observations sampled for each candidate.
        sampler: Draws these samples. By default a `SobolQMCNormalSampler`.
        kwargs: ``posterior_transform`` and ``X_pending``, as in BoTorch.

    Example:
        >>> import torch
        >>> from gpytorch.likelihoods import BernoulliLikelihood
        >>> from seqgp import SequentialGP
        >>> from seqgp.acquisition import qNegIntegratedPosteriorVariance
        >>> X = torch.linspace(0, 1, 20, dtype=torch.double).unsqueeze(-1)
        >>> model = SequentialGP(X, (X > 0.5).to(X), likelihood=BernoulliLikelihood())
        >>> acqf = qNegIntegratedPosteriorVariance(model, mc_points=X)
        >>> acqf(torch.rand(5, 1, 1, dtype=torch.double)).shape
        torch.Size([5])
    """

    model: Any
    sampler: Any
    mc_points: Tensor

    def __init__(
        self,
        model: Model,
        mc_points: Tensor,
        num_fantasies: int = 16,
        sampler: MCSampler | None = None,
        **kwargs: Any,
    ) -> None:
        if sampler is None:
            sampler = SobolQMCNormalSampler(sample_shape=torch.Size([num_fantasies]), seed=0)
        super().__init__(model, mc_points, sampler=sampler, **kwargs)

    @concatenate_pending_points
    @t_batch_mode_transform()  # type: ignore[arg-type]
    def forward(self, X: Tensor) -> Tensor:
        """The value at ``b x q x d`` candidates, of shape ``b``."""
        fantasies = self.model.fantasize(X=X, sampler=self.sampler)
        points = self.mc_points.reshape(*[1] * (X.dim() - 2), -1, X.shape[-1])
        posterior = fantasies.posterior(points, posterior_transform=self.posterior_transform)
        return -posterior.variance.mean((-2, -1)).mean(0)

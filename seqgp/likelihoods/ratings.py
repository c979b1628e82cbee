"""Ratings: numbers that tell how good an item is, on a scale that is learnt."""

from __future__ import annotations

import math
from typing import Any

import torch
from gpytorch.constraints import GreaterThan, Interval, Positive
from gpytorch.distributions import MultivariateNormal
from torch import Tensor
from torch.distributions import Normal

from seqgp.likelihoods.quadrature import OneDimensionalLikelihood

__all__ = ["RatingLikelihood"]


class RatingLikelihood(OneDimensionalLikelihood):
    r"""A rating given a utility :math:`f`, on a scale that is learnt.

    .. math:: y = s \, (f + a + e), \qquad e \sim N(0, \sigma^2).

    Comparisons determine the unit of a utility, and not its level. So ratings have a scale
    :math:`s > 0`, a level :math:`a` and noise :math:`\sigma^2`, the latter two in the unit of the
    utility, and all three are learnt. For a few ordered grades take an `OrdinalLikelihood` instead.

    Args:
        scale: The initial scale.
        level: The initial level.
        noise: The initial variance of the noise.
        noise_constraint: Constraint of the variance (default: at least 1e-4).
        batch_shape: The batch shape ``b`` of the parameters.

    Example:
        >>> likelihood = RatingLikelihood(scale=2.0, level=1.5)
        >>> likelihood(torch.ones(1)).mean.detach()
        tensor([5.])
    """

    def __init__(
        self,
        scale: float = 1.0,
        level: float = 0.0,
        noise: float = 1.0,
        noise_constraint: Interval | None = None,
        batch_shape: torch.Size = torch.Size([]),  # noqa: B008
    ) -> None:
        super().__init__()
        for name, value in (("scale", scale), ("noise", noise)):
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"`{name}` must be finite and positive.")
        if not math.isfinite(level):
            raise ValueError("`level` must be finite.")
        for name in ("raw_scale", "level", "raw_noise"):
            self.register_parameter(name, torch.nn.Parameter(torch.zeros(*batch_shape, 1)))
        self.register_constraint("raw_scale", Positive())
        self.register_constraint("raw_noise", noise_constraint or GreaterThan(1e-4))
        self.initialize(
            raw_scale=self.raw_scale_constraint.inverse_transform(torch.tensor(float(scale))),
            level=float(level),
            raw_noise=self.raw_noise_constraint.inverse_transform(torch.tensor(float(noise))),
        )

    @property
    def scale(self) -> Tensor:
        """The scale :math:`s`, ``(b) x 1``."""
        return self.raw_scale_constraint.transform(self.raw_scale)

    @property
    def noise(self) -> Tensor:
        r"""The variance :math:`\sigma^2` of the noise, ``(b) x 1``."""
        return self.raw_noise_constraint.transform(self.raw_noise)

    def forward(self, function_samples: Tensor, *args: Any, **kwargs: Any) -> Normal:
        """The distribution of ratings given utilities ``... x n``."""
        mean = self.scale * (function_samples + self.level)
        return Normal(mean, (self.scale * self.noise.sqrt()).expand_as(mean))

    def marginal(self, function_dist: MultivariateNormal, *args: Any, **kwargs: Any) -> Normal:
        """The distribution of ratings under marginals of the utilities, ``... x n``."""
        return self.marginal_of(function_dist.mean, function_dist.variance)

    def marginal_of(self, mean: Tensor, variance: Tensor) -> Normal:
        """Return the distribution of ratings if utilities are ``N(mean, variance)``.

        Args:
            mean: ``... x n``.
            variance: ``... x n``.
        """
        spread = self.scale * (variance + self.noise).sqrt()
        return Normal(self.scale * (mean + self.level), spread)

    def expected_log_prob(
        self, observations: Tensor, function_dist: MultivariateNormal, *args: Any, **kwargs: Any
    ) -> Tensor:
        """In closed form, ``... x n``."""
        residual = observations / self.scale - self.level - function_dist.mean
        square = residual.square() + function_dist.variance
        log_normaliser = 0.5 * (2 * math.pi * self.noise).log() + self.scale.log()
        return -log_normaliser - 0.5 * square / self.noise

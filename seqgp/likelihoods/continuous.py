"""Likelihoods of positive numbers, and of numbers of which only bounds may be known."""

from __future__ import annotations

import math
from typing import Any

import torch
from gpytorch.constraints import GreaterThan, Interval, Positive
from gpytorch.distributions import MultivariateNormal
from gpytorch.priors import Prior
from torch import Tensor
from torch.distributions import Gamma, Normal, constraints

from seqgp.likelihoods.quadrature import OneDimensionalLikelihood, normal_nodes, normal_weights

__all__ = ["CensoredGaussianLikelihood", "GammaLikelihood"]

_NO_BATCH = torch.Size([])


def bounded_exp(x: Tensor) -> Tensor:
    """Return ``exp(x)``, continued by its tangent where its square would overflow.

    If a latent variance is in the thousands, expectations of exponentials overflow. With the
    tangent, they and their derivatives stay finite, so that an optimiser can recover from a bad
    step.

    Args:
        x: ``...`` exponents.
    """
    most = 0.5 * math.log(torch.finfo(x.dtype).max)
    return x.clamp_max(most).exp() * (1 + (x - most).clamp_min(0.0))


class GammaLikelihood(OneDimensionalLikelihood):
    r"""Positive numbers whose spread is proportional to their mean: durations, concentrations.

    The latent function is the logarithm of the mean, and the shape :math:`a` is learnt:

    .. math::
        p(y \mid f) = \frac{(a e^{-f})^a}{\Gamma(a)} \, y^{a - 1} \exp(-a y e^{-f}),
        \qquad E[y \mid f] = e^f, \quad \operatorname{Var}[y \mid f] = e^{2f} / a.

    With :math:`a = 1` observations are exponential. The likelihood is log-concave in :math:`f`.

    Args:
        shape_prior: Prior of :math:`a`.
        shape_constraint: Constraint of :math:`a` (default: positive, initially 2).
        batch_shape: The batch shape ``b`` of the shape.

    Example:
        >>> likelihood = GammaLikelihood()
        >>> likelihood(torch.zeros(1)).variance.detach()
        tensor([0.5000])
    """

    def __init__(
        self,
        shape_prior: Prior | None = None,
        shape_constraint: Interval | None = None,
        batch_shape: torch.Size = _NO_BATCH,
    ) -> None:
        super().__init__()
        self.raw_shape = torch.nn.Parameter(torch.zeros(*batch_shape, 1))
        self.register_constraint("raw_shape", shape_constraint or Positive(initial_value=2.0))
        if shape_prior is not None:
            self.register_prior(
                "shape_prior", shape_prior, lambda m: m.shape, lambda m, v: m.initialize(shape=v)
            )

    @property
    def shape(self) -> Tensor:
        """The shape :math:`a`, ``(b) x 1``."""
        return self.raw_shape_constraint.transform(self.raw_shape)

    @shape.setter
    def shape(self, value: float | Tensor) -> None:
        value = torch.as_tensor(value, dtype=self.raw_shape.dtype, device=self.raw_shape.device)
        self.initialize(raw_shape=self.raw_shape_constraint.inverse_transform(value))

    def forward(self, function_samples: Tensor, *args: Any, **kwargs: Any) -> Gamma:
        """The distribution of observations given latent values ``... x n``."""
        shape = self.shape.expand_as(function_samples)
        return Gamma(shape, shape * (-function_samples).exp())

    def expected_log_prob(
        self, observations: Tensor, function_dist: MultivariateNormal, *args: Any, **kwargs: Any
    ) -> Tensor:
        r"""In closed form, as :math:`E[e^{-f}] = e^{-m + v/2}`, ``... x n``."""
        mean, variance = function_dist.mean, function_dist.variance
        return self._log_density(observations, mean, 0.5 * variance - mean)

    def log_prob(self, targets: Tensor, f: Tensor) -> Tensor:
        """Return ``log p(y | f)``, finite for any latent value.

        Args:
            targets: ``...`` observations.
            f: ``...`` latent values.
        """
        return self._log_density(targets, f, -f)

    def _log_density(self, y: Tensor, f: Tensor, log_rate: Tensor) -> Tensor:
        a = self.shape
        constant = a * a.log() - a.lgamma() + (a - 1) * y.log()
        return constant - a * f - a * y * bounded_exp(log_rate)


class CensoredNormal(Normal):
    """Normal observations, some of them known only to lie below, above or between bounds.

    Args:
        loc: ``...`` means.
        scale: ``...`` standard deviations.
        side: ``...``, as for `CensoredGaussianLikelihood`.
        width: ``...``, likewise.
    """

    def __init__(
        self, loc: Tensor, scale: Tensor, side: Tensor | None = None, width: Tensor | None = None
    ) -> None:
        super().__init__(loc, scale, validate_args=False)
        self.side, self.width = side, width

    @property
    def support(self) -> Any:  # type: ignore[override]
        """All real numbers. Checks of the data read it, so the arguments are checked here, too."""
        side, width = self.side, self.width
        if side is not None and not ((side == 0) | (side == 1) | (side == -1)).all():
            raise ValueError("side: expected -1 (below), 0 (exact) or 1 (above).")
        if width is not None and not (width >= 0).all():
            raise ValueError("width: expected numbers that are not negative.")
        return constraints.real

    def log_prob(self, value: Tensor) -> Tensor:
        """Return log densities of exact observations, and log probabilities of the others."""
        z = (value - self.loc) / self.scale
        log_prob = -0.5 * z.square() - self.scale.log() - 0.5 * math.log(2 * math.pi)
        if self.side is not None:
            side = self.side.to(z)
            tail = torch.special.log_ndtr(-side * z)
            log_prob = torch.where(side == 0, log_prob, tail)
        if self.width is not None:
            width = self.width.to(z)
            gap = torch.where(width > 0, width, 1.0) / self.scale
            log_prob = torch.where(width > 0, log_normal_interval(z, z + gap), log_prob)
        return log_prob


def log_normal_interval(lower: Tensor, upper: Tensor) -> Tensor:
    r"""Return :math:`\log(\Phi(u) - \Phi(l))` for :math:`l < u`, without cancellation.

    The interval is reflected to the left of zero, where :math:`\log \Phi` keeps its precision.

    Args:
        lower: ``...`` lower ends.
        upper: ``...`` upper ends.
    """
    flip = lower + upper > 0
    left = torch.special.log_ndtr(torch.where(flip, -upper, lower))
    right = torch.special.log_ndtr(torch.where(flip, -lower, upper))
    # A gap lost to rounding counts as one of machine precision, to avoid -inf and NaN gradients.
    return right + (left - right).clamp(max=-torch.finfo(left.dtype).eps).expm1().neg().log()


class CensoredGaussianLikelihood(OneDimensionalLikelihood):
    r"""Gaussian observations, of some of which only bounds are known.

    An evaluation that was stopped because its result was already too large says that the result
    is *above* a number; a measurement under a detection limit is *below* it. With
    :math:`h = f + \epsilon`, :math:`\epsilon \sim N(0, \sigma^2)`, an observation ``y`` contributes

    * the density of :math:`h = y` if ``side`` is 0 (or is not given),
    * :math:`P(h \ge y) = \Phi((f - y) / \sigma)` if ``side`` is 1,
    * :math:`P(h \le y) = \Phi((y - f) / \sigma)` if ``side`` is -1,
    * :math:`P(y \le h \le y + w)` if ``width`` is :math:`w > 0`.

    ``side`` and ``width`` are per-point arguments. New observations, such as fantasies, are not
    censored. The likelihood is log-concave.

    Observations are not standardised by default, because widths would have to be, too. With an
    ``outcome_transform`` of your own, widths are on the scale of transformed targets.

    Args:
        noise_prior: Prior of :math:`\sigma^2`.
        noise_constraint: Constraint of :math:`\sigma^2` (default: above 1e-4, initially 0.1).
        batch_shape: The batch shape ``b`` of the noise.

    Example:
        >>> likelihood = CensoredGaussianLikelihood()
        >>> likelihood.noise = 1.0
        >>> y, side = torch.zeros(3), torch.tensor([-1, 0, 1])  # below, exactly, above
        >>> likelihood(torch.ones(3), side=side).log_prob(y).exp().detach()
        tensor([0.1587, 0.2420, 0.8413])
    """

    def __init__(
        self,
        noise_prior: Prior | None = None,
        noise_constraint: Interval | None = None,
        batch_shape: torch.Size = _NO_BATCH,
    ) -> None:
        super().__init__()
        self.raw_noise = torch.nn.Parameter(torch.zeros(*batch_shape, 1))
        constraint = noise_constraint or GreaterThan(1e-4, initial_value=0.1)
        self.register_constraint("raw_noise", constraint)
        if noise_prior is not None:
            self.register_prior(
                "noise_prior", noise_prior, lambda m: m.noise, lambda m, v: m.initialize(noise=v)
            )

    @property
    def noise(self) -> Tensor:
        r"""The noise variance :math:`\sigma^2`, ``(b) x 1``."""
        return self.raw_noise_constraint.transform(self.raw_noise)

    @noise.setter
    def noise(self, value: float | Tensor) -> None:
        value = torch.as_tensor(value, dtype=self.raw_noise.dtype, device=self.raw_noise.device)
        self.initialize(raw_noise=self.raw_noise_constraint.inverse_transform(value))

    def forward(
        self,
        function_samples: Tensor,
        *args: Any,
        side: Tensor | None = None,
        width: Tensor | None = None,
        **kwargs: Any,
    ) -> CensoredNormal:
        """The distribution of observations given latent values ``... x n``."""
        scale = self.noise.sqrt().expand_as(function_samples)
        return CensoredNormal(function_samples, scale, side, width)

    def expected_log_prob(
        self, observations: Tensor, function_dist: MultivariateNormal, *args: Any, **kwargs: Any
    ) -> Tensor:
        r""":math:`E[\log p(y \mid f)]`, ``... x n``.

        By quadrature, which is exact for observations that are not censored. That of the others
        needs more nodes than GPyTorch's 20 if the latent variance is larger than the noise.
        """
        mean, variance = function_dist.mean, function_dist.variance
        nodes = normal_nodes(mean, dim=max(mean.dim(), observations.dim()))
        f = mean + variance.sqrt() * nodes
        log_probs = self.forward(f, **kwargs).log_prob(observations)
        return torch.tensordot(normal_weights(log_probs), log_probs, 1)

"""Gaussian observations whose noise varies with the inputs."""

from __future__ import annotations

import math
from typing import Any

import torch
from gpytorch.likelihoods import Likelihood
from torch import Tensor
from torch.distributions import Normal

from seqgp.dual.sites import Expectations
from seqgp.likelihoods.continuous import bounded_exp
from seqgp.likelihoods.expectations import expectations, expected_log_prob, per_target, rule_for
from seqgp.likelihoods.predictive import log_predictive
from seqgp.likelihoods.quadrature import normal_nodes, normal_weights

__all__ = ["HeteroscedasticGaussianLikelihood"]


class HeteroscedasticGaussianLikelihood(Likelihood):
    r"""Gaussian observations whose noise variance is a function of the inputs, learnt with it.

    There are two latent functions, the mean :math:`f` and the log variance :math:`g`:

    .. math::
        p(y \mid f, g) = N(y; f, e^g).

    Each has a kernel and a mean of its own. A model's ``posterior(X)`` is over :math:`f` alone, so
    that acquisition functions see one output. With ``observation_noise=True`` it is over
    observations, whose variance is that of :math:`f` plus the expected noise :math:`E[e^g]`.

    Attributes:
        num_features: The number of latent functions.
        output_latents: Which of them are outputs of a model.
        initial_means: Constants that their default means begin with.

    Example:
        >>> from seqgp import SequentialGP
        >>> X = torch.linspace(0, 1, 40, dtype=torch.double).unsqueeze(-1)
        >>> Y = torch.sin(6 * X) + X * torch.linspace(0, 999, 40).sin().unsqueeze(-1)
        >>> model = SequentialGP(X, Y, likelihood=HeteroscedasticGaussianLikelihood())
        >>> model.posterior(X).mean.shape
        torch.Size([40, 1])
        >>> noisy = model.posterior(X, observation_noise=True)
        >>> noise = noisy.variance - model.posterior(X).variance
        >>> bool(noise[-1] > 2 * noise[0])
        True
    """

    num_features = 2
    output_latents = (0,)
    #: Observations can be standardised: nothing here is on their scale.
    observes_real_numbers = True
    initial_means = (0.0, -2.0)  # a noise variance of .14

    def forward(self, function_samples: Tensor, *args: Any, **kwargs: Any) -> Normal:
        """The distribution of observations given latent values ``... x n x 2``."""
        scale = (0.5 * function_samples[..., 1]).exp()
        return Normal(function_samples[..., 0], scale, validate_args=False)

    def expected_noise(self, mean: Tensor, variance: Tensor) -> Tensor:
        r""":math:`E[e^g] = e^{m_g + v_g / 2}`, ``... x n``, the noise of an observation.

        Args:
            mean: ``... x n x 2`` means of the latents.
            variance: ``... x n x 2`` variances.
        """
        return bounded_exp(mean[..., 1] + 0.5 * variance[..., 1])


@rule_for(expected_log_prob, HeteroscedasticGaussianLikelihood)
def _log_prob(
    likelihood: HeteroscedasticGaussianLikelihood,
    targets: Tensor,
    mean: Tensor,
    variance: Tensor,
    **kwargs: Any,
) -> Tensor:
    r""":math:`-\tfrac12 (\log 2\pi + m_g + ((y - m_f)^2 + v_f) e^{-m_g + v_g / 2})`."""
    mean, variance = per_target(likelihood, targets, mean, variance)
    squares = (targets - mean[..., 0]).square() + variance[..., 0]
    precision = bounded_exp(0.5 * variance[..., 1] - mean[..., 1])
    return -0.5 * (math.log(2 * math.pi) + mean[..., 1] + squares * precision)


@rule_for(expectations, HeteroscedasticGaussianLikelihood)
def _expectations(
    likelihood: HeteroscedasticGaussianLikelihood,
    targets: Tensor,
    mean: Tensor,
    variance: Tensor,
    **kwargs: Any,
) -> Expectations:
    r"""With :math:`w = e^{-m_g + v_g/2}` and :math:`s = (y - m_f)^2 + v_f`.

    :math:`\alpha = ((y - m_f) w, \; (s w - 1) / 2)` and :math:`\beta = (w, \; s w / 2)`, all
    precisions positive.
    """
    mean, variance = per_target(likelihood, targets, mean, variance)
    residual = targets - mean[..., 0]
    w = bounded_exp(0.5 * variance[..., 1] - mean[..., 1])
    sw = (residual.square() + variance[..., 0]) * w
    return Expectations(
        -0.5 * (math.log(2 * math.pi) + mean[..., 1] + sw),
        torch.stack([residual * w, 0.5 * (sw - 1)], -1),
        torch.stack([w, 0.5 * sw], -1),
    )


@rule_for(log_predictive, HeteroscedasticGaussianLikelihood)
def _log_predictive(
    likelihood: HeteroscedasticGaussianLikelihood,
    targets: Tensor,
    mean: Tensor,
    variance: Tensor,
    **kwargs: Any,
) -> Tensor:
    r""":math:`\log E_g[N(y; m_f, v_f + e^g)]`: one integral is left, which is by quadrature."""
    mean, variance = per_target(likelihood, targets, mean, variance)
    nodes = normal_nodes(mean[..., 1])
    total = variance[..., 0] + (mean[..., 1] + variance[..., 1].sqrt() * nodes).exp()
    log_density = -0.5 * ((targets - mean[..., 0]).square() / total + (2 * math.pi * total).log())
    log_weights = normal_weights(mean, log=True).reshape(-1, *[1] * (log_density.dim() - 1))
    return (log_weights + log_density).logsumexp(0)

r"""Predictive densities and moments of observations, for any likelihood.

Log predictive densities are :math:`\log \int p(y | f) N(f; m, v) df`.
"""

from __future__ import annotations

import math
from functools import singledispatch
from typing import Any

import torch
from botorch.models.likelihoods.sparse_outlier_noise import SparseOutlierGaussianLikelihood
from gpytorch.likelihoods import (
    BernoulliLikelihood,
    FixedNoiseGaussianLikelihood,
    GaussianLikelihood,
    Likelihood,
)
from torch import Tensor
from torch.distributions import Categorical, Distribution

from seqgp.likelihoods.continuous import (
    CensoredGaussianLikelihood,
    CensoredNormal,
    GammaLikelihood,
    bounded_exp,
)
from seqgp.likelihoods.discrete import OverdispersedBinomialLikelihood
from seqgp.likelihoods.expectations import conditional_log_prob, per_target, rule_for
from seqgp.likelihoods.logit_normal_binomial import log_prob_and_slope
from seqgp.likelihoods.psychometric import PsychometricLikelihood
from seqgp.likelihoods.quadrature import latent_nodes, normal_nodes, normal_weights
from seqgp.likelihoods.ratings import RatingLikelihood
from seqgp.likelihoods.traits import has_one_latent, observation_noise


@singledispatch
def log_predictive(
    likelihood: Likelihood, targets: Tensor, mean: Tensor, variance: Tensor, **kwargs: Any
) -> Tensor:
    """Return the log predictive density of each target.

    In closed form for Gaussian and Bernoulli likelihoods and their relatives, by quadrature for
    others of one latent function, and by fixed base samples for those of several.

    Args:
        likelihood: A GPyTorch likelihood.
        targets: ``... x n`` targets.
        mean: ``... x n [x c]`` means.
        variance: ``... x n [x c]`` variances.
        kwargs: Per-point arguments of the likelihood.

    Returns:
        A ``... x n`` tensor.
    """
    if not targets.numel():  # some distributions of PyTorch do not support this
        points = mean if has_one_latent(likelihood) else mean[..., 0]
        return torch.zeros_like(points + targets)
    nodes, log_weights = latent_nodes(mean, not has_one_latent(likelihood))
    samples = mean + variance.sqrt() * nodes
    log_prob = conditional_log_prob(likelihood, targets, samples, **kwargs)
    return (log_weights.reshape(-1, *[1] * (log_prob.dim() - 1)) + log_prob).logsumexp(0)


@log_predictive.register(GaussianLikelihood)
@log_predictive.register(FixedNoiseGaussianLikelihood)
@log_predictive.register(SparseOutlierGaussianLikelihood)
def _gaussian(
    likelihood: GaussianLikelihood, targets: Tensor, mean: Tensor, variance: Tensor, **kwargs: Any
) -> Tensor:
    total = variance + observation_noise(likelihood, mean.shape[-1], **kwargs)
    return -0.5 * ((targets - mean).square() / total + (2 * math.pi * total).log())


@log_predictive.register(RatingLikelihood)
def _rating(
    likelihood: RatingLikelihood, targets: Tensor, mean: Tensor, variance: Tensor, **kwargs: Any
) -> Tensor:
    return likelihood.marginal_of(mean, variance).log_prob(targets)


@log_predictive.register(BernoulliLikelihood)
def _bernoulli(
    likelihood: BernoulliLikelihood, targets: Tensor, mean: Tensor, variance: Tensor, **kwargs: Any
) -> Tensor:
    return torch.special.log_ndtr((2 * targets - 1) * mean / (1 + variance).sqrt())


@log_predictive.register(PsychometricLikelihood)
def _psychometric(
    likelihood: PsychometricLikelihood,
    targets: Tensor,
    mean: Tensor,
    variance: Tensor,
    **kwargs: Any,
) -> Tensor:
    return likelihood.log_prob(targets, mean / (1 + variance).sqrt())


@rule_for(log_predictive, CensoredGaussianLikelihood)
def _censored(
    likelihood: CensoredGaussianLikelihood,
    targets: Tensor,
    mean: Tensor,
    variance: Tensor,
    side: Tensor | None = None,
    width: Tensor | None = None,
    **kwargs: Any,
) -> Tensor:
    r"""In closed form: what is censored is :math:`h \sim N(m, v + \sigma^2)`."""
    mean, variance = per_target(likelihood, targets, mean, variance)
    scale = (variance + likelihood.noise).sqrt()
    return CensoredNormal(mean, scale, side, width).log_prob(targets)


@rule_for(log_predictive, GammaLikelihood)
def _gamma(
    likelihood: GammaLikelihood, targets: Tensor, mean: Tensor, variance: Tensor, **kwargs: Any
) -> Tensor:
    r"""By quadrature about the mode of :math:`p(y \mid f) N(f; m, v)`.

    A likelihood of a large shape is narrow: nodes that are spread over :math:`N(m, v)` would miss
    it. The mode is where :math:`a (y e^{-f} - 1) = (f - m) / v`. Newton's method begins left of it,
    at :math:`\min(m, \log y)`, and increases to it, as the left-hand side is convex.
    """
    mean, variance = per_target(likelihood, targets, mean, variance)
    with torch.no_grad():
        a, mode = likelihood.shape, torch.minimum(mean, targets.log())
        for _ in range(50):
            slope = a * targets * bounded_exp(-mode)
            step = (slope - a - (mode - mean) / variance) / (slope + 1 / variance)
            mode = mode + step
            if not bool((step.abs() > 1e-6 * (1 + mode.abs())).any()):
                break
        scale = (a * targets * bounded_exp(-mode) + 1 / variance).rsqrt()
    nodes = normal_nodes(mean)
    f = mode + scale * nodes
    log_ratio = 0.5 * (nodes.square() - (f - mean).square() / variance) + (
        scale.log() - 0.5 * variance.log()
    )
    log_weights = normal_weights(mean, log=True).reshape(-1, *[1] * mean.dim())
    return (log_weights + likelihood.log_prob(targets, f) + log_ratio).logsumexp(0)


@log_predictive.register(OverdispersedBinomialLikelihood)
def _overdispersed_binomial(
    likelihood: OverdispersedBinomialLikelihood,
    targets: Tensor,
    mean: Tensor,
    variance: Tensor,
    total_count: int | Tensor | None = None,
    **kwargs: Any,
) -> Tensor:
    totals = likelihood.totals(mean, total_count)
    return log_prob_and_slope(targets, totals, mean, variance + likelihood.nugget)[0]


def conditional_moments(distribution: Distribution) -> tuple[Tensor, Tensor]:
    """Return mean and variance of observations given the latent function.

    PyTorch has no moments of a categorical distribution; here they are those of the class index.

    Args:
        distribution: ``p(y | f)``, with batch shape ``...``.

    Returns:
        Two tensors of shape ``...``.
    """
    if isinstance(distribution, Categorical):
        probs = distribution.probs
        index = torch.arange(probs.shape[-1], dtype=probs.dtype, device=probs.device)
        mean = (probs * index).sum(-1)
        return mean, (probs * (index - mean.unsqueeze(-1)).square()).sum(-1)
    return distribution.mean, distribution.variance

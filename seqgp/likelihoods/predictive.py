r"""Predictive densities and moments of observations, for any likelihood.

Log predictive densities are :math:`\log \int p(y | f) N(f; m, v) df`.
"""

from __future__ import annotations

import math
from functools import singledispatch
from typing import Any

import torch
from gpytorch.likelihoods import (
    BernoulliLikelihood,
    FixedNoiseGaussianLikelihood,
    GaussianLikelihood,
    Likelihood,
)
from torch import Tensor
from torch.distributions import Categorical, Distribution

from seqgp.likelihoods.discrete import OverdispersedBinomialLikelihood
from seqgp.likelihoods.expectations import conditional_log_prob
from seqgp.likelihoods.logit_normal_binomial import log_prob_and_slope
from seqgp.likelihoods.psychometric import PsychometricLikelihood
from seqgp.likelihoods.quadrature import latent_nodes
from seqgp.likelihoods.ratings import RatingLikelihood
from seqgp.likelihoods.traits import has_one_latent, observation_noise


@singledispatch
def log_predictive(
    likelihood: Likelihood, targets: Tensor, mean: Tensor, variance: Tensor, **kwargs: Any
) -> Tensor:
    """Log predictive density of each target.

    In closed form for Gaussian and Bernoulli likelihoods, by quadrature for others of one latent
    function, and by fixed base samples for those of several.

    Args:
        likelihood: A GPyTorch likelihood.
        targets: ``... x n`` targets.
        mean: ``... x n [x c]`` means.
        variance: ``... x n [x c]`` variances.
        kwargs: Per-point arguments of the likelihood.

    Returns:
        A ``... x n`` tensor.
    """
    if not targets.numel():  # of which PyTorch does not make some distributions
        points = mean if has_one_latent(likelihood) else mean[..., 0]
        return torch.zeros_like(points + targets)
    nodes, log_weights = latent_nodes(mean, not has_one_latent(likelihood))
    samples = mean + variance.sqrt() * nodes
    log_prob = conditional_log_prob(likelihood, targets, samples, **kwargs)
    return (log_weights.reshape(-1, *[1] * (log_prob.dim() - 1)) + log_prob).logsumexp(0)


@log_predictive.register(GaussianLikelihood)
@log_predictive.register(FixedNoiseGaussianLikelihood)
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
    """Mean and variance of observations given the latent function.

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

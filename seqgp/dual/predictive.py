r"""Log predictive densities :math:`\log \int p(y | f) N(f; m, v) df`, for any likelihood."""

from __future__ import annotations

import math
from functools import lru_cache, singledispatch
from typing import Any

import numpy as np
import torch
from gpytorch.likelihoods import (
    BernoulliLikelihood,
    FixedNoiseGaussianLikelihood,
    GaussianLikelihood,
    Likelihood,
)
from torch import Tensor

from seqgp.distributions import log_prob_and_slope
from seqgp.dual.sites import (
    NUM_BASE_SAMPLES,
    base_samples,
    conditional_log_prob,
    has_one_latent,
    observation_noise,
)
from seqgp.likelihoods import OverdispersedBinomialLikelihood

#: More nodes than for expected log probabilities: densities are less smooth than their logarithms.
NUM_NODES = 64


@singledispatch
def log_predictive(
    likelihood: Likelihood, targets: Tensor, mean: Tensor, variance: Tensor, **kwargs: Any
) -> Tensor:
    """Log predictive density of each target.

    Closed forms for Gaussian and Bernoulli likelihoods, quadrature for others of one latent, and
    fixed base samples for those of several.

    Args:
        likelihood: A GPyTorch likelihood.
        targets: ``... x n`` targets.
        mean: ``... x n [x c]`` means.
        variance: ``... x n [x c]`` variances.
        kwargs: Per-point arguments of the likelihood.

    Returns:
        A ``... x n`` tensor.
    """
    if has_one_latent(likelihood):
        nodes, log_weights = _hermite_nodes(NUM_NODES, mean.dtype, mean.device)
        nodes = nodes.reshape(-1, *[1] * mean.dim())
    else:
        nodes = base_samples(mean.shape[-1], NUM_BASE_SAMPLES, mean.dtype, mean.device)
        log_weights = torch.full_like(nodes[:, 0], -math.log(len(nodes)))
        nodes = nodes.reshape(-1, *[1] * (mean.dim() - 1), mean.shape[-1])
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


@log_predictive.register(BernoulliLikelihood)
def _bernoulli(
    likelihood: BernoulliLikelihood, targets: Tensor, mean: Tensor, variance: Tensor, **kwargs: Any
) -> Tensor:
    return torch.special.log_ndtr((2 * targets - 1) * mean / (1 + variance).sqrt())


@log_predictive.register(OverdispersedBinomialLikelihood)
def _overdispersed_binomial(
    likelihood: OverdispersedBinomialLikelihood,
    targets: Tensor,
    mean: Tensor,
    variance: Tensor,
    total_count: int | Tensor | None = None,
    **kwargs: Any,
) -> Tensor:
    totals = likelihood._totals(mean, total_count)
    return log_prob_and_slope(targets, totals, mean, variance + likelihood.nugget)[0]


@lru_cache(maxsize=16)
def _hermite_nodes(num: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Nodes and log weights of Gauss-Hermite quadrature for a standard normal."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(num)
    log_weights = np.log(weights / math.sqrt(2 * math.pi))
    return (
        torch.from_numpy(nodes).to(dtype=dtype, device=device),
        torch.from_numpy(log_weights).to(dtype=dtype, device=device),
    )

r"""Nodes and weights for Gaussian expectations: quadrature, or fixed samples for several latents.

All nodes :math:`x_k` and weights :math:`w_k` here are for a *standard normal*,
:math:`E[g(x)] \approx \sum_k w_k \, g(x_k)`, so that the nodes of :math:`N(m, v)` are
:math:`m + \sqrt{v} \, x_k`.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from botorch.sampling.qmc import MultivariateNormalQMCEngine

# GPyTorch's base class of likelihoods of one latent function, which has no public name.
from gpytorch.likelihoods.likelihood import _OneDimensionalLikelihood as OneDimensionalLikelihood
from torch import Tensor

#: Number of nodes for integrands less smooth than a log probability: densities, moments.
NUM_NODES = 64

#: Number of base samples for likelihoods of several latents: antithetic pairs of a Sobol sequence.
NUM_BASE_SAMPLES = 256


@lru_cache(maxsize=64)
def gauss_hermite(num: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """``num`` nodes and weights of Gauss-Hermite quadrature for a standard normal."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(num)
    return (
        torch.from_numpy(nodes).to(dtype=dtype, device=device),
        torch.from_numpy(weights / math.sqrt(2 * math.pi)).to(dtype=dtype, device=device),
    )


@lru_cache(maxsize=64)
def _log_weights(num: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Logarithms of the weights; in float32 the smallest weights would underflow."""
    _, weights = np.polynomial.hermite_e.hermegauss(num)
    log_weights = np.log(weights / math.sqrt(2 * math.pi))
    return torch.from_numpy(log_weights).to(dtype=dtype, device=device)


def normal_nodes(like: Tensor, num: int = NUM_NODES, dim: int | None = None) -> Tensor:
    """``num x 1 x ... x 1`` nodes that broadcast against a tensor of ``dim`` dimensions.

    Args:
        like: A tensor with the dtype and device, and by default the number of dimensions.
        num: The number of nodes.
        dim: The number of dimensions that follow that of the nodes.
    """
    nodes, _ = gauss_hermite(num, like.dtype, like.device)
    return nodes.reshape(-1, *[1] * (like.dim() if dim is None else dim))


def normal_weights(like: Tensor, num: int = NUM_NODES, log: bool = False) -> Tensor:
    """The ``num`` weights that belong to `normal_nodes`, or their logarithms."""
    if log:
        return _log_weights(num, like.dtype, like.device)
    return gauss_hermite(num, like.dtype, like.device)[1]


def likelihood_nodes(
    likelihood: OneDimensionalLikelihood, dim: int, like: Tensor
) -> tuple[Tensor, Tensor]:
    """Nodes and weights of a likelihood's own quadrature, ``k x 1 x ... x 1``.

    Their number is GPyTorch's `num_gauss_hermite_locs` when the likelihood was constructed.

    Args:
        likelihood: The likelihood.
        dim: The number of dimensions that follow that of the nodes.
        like: A tensor with the dtype and device.
    """
    num, shape = len(likelihood.quadrature.weights), (-1, *[1] * dim)
    nodes, weights = gauss_hermite(num, like.dtype, like.device)
    return nodes.reshape(shape), weights.reshape(shape)


@lru_cache(maxsize=32)
def base_samples(dim: int, num: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """``num x dim`` standard normal quasi-Monte-Carlo samples, exact for quadratic functions.

    Antithetic pairs make their mean exact. The estimate of ``beta``, whose summands are of order
    ``1 / sqrt(v)``, needs this for small variances. Whitening makes their covariance exact, too.
    """
    with torch.device("cpu"):  # the engine makes tensors on the default device
        engine = MultivariateNormalQMCEngine(
            mean=torch.zeros(dim, dtype=torch.float64),
            cov=torch.eye(dim, dtype=torch.float64),
            seed=0,
        )
        half: Any = engine.draw(num // 2)
    if dim < len(half):
        root = torch.linalg.cholesky(half.mT @ half / len(half))
        half = torch.linalg.solve_triangular(root, half.mT, upper=False).mT
    return torch.cat([half, -half]).to(dtype=dtype, device=device)


def latent_nodes(mean: Tensor, several_latents: bool) -> tuple[Tensor, Tensor]:
    """Standard normal nodes ``k x ...`` that broadcast against latent means, and log weights ``k``.

    Args:
        mean: ``... x n`` means, or ``... x n x c`` of several latents.
        several_latents: Whether the last dimension is that of several latents. Then the nodes are
            base samples, all with the same weight.
    """
    if not several_latents:
        return normal_nodes(mean), normal_weights(mean, log=True)
    base = base_samples(mean.shape[-1], NUM_BASE_SAMPLES, mean.dtype, mean.device)
    log_weights = torch.full_like(base[:, 0], -math.log(len(base)))
    return base.reshape(-1, *[1] * (mean.dim() - 1), mean.shape[-1]), log_weights

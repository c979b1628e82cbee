"""Scales of kernels: an initial lengthscale, and a fixed variance."""

from __future__ import annotations

import torch
from gpytorch.kernels import Kernel, ScaleKernel
from torch import Tensor

__all__ = ["median_distance", "sharp"]


@torch.no_grad()
def median_distance(X: Tensor, max_points: int = 500) -> float:
    """The median distance between inputs, a good initial lengthscale in many dimensions.

    A lengthscale of 1 suits standardised inputs of a few dimensions. It makes images of 784 pixels
    independent of each other, so that nothing can be learnt, not even the lengthscale.

    Args:
        X: ``n x d`` inputs, at least two of them different.
        max_points: The maximum number of inputs to use, at even intervals.

    Example:
        >>> import torch
        >>> from seqgp.kernel_scales import median_distance
        >>> X = torch.rand(1000, 784, dtype=torch.double)
        >>> 11 < median_distance(X) < 12  # about the square root of 784 / 6
        True
    """
    if X.dim() != 2 or len(X) < 2:
        raise ValueError(f"X: expected at least two inputs n x d, got shape {tuple(X.shape)}.")
    step = max(len(X) // max_points, 1)
    distances = torch.pdist(X[::step][:max_points])
    positive = distances[distances > 0]
    if not len(positive):
        raise ValueError("X: all inputs are the same, so all distances are zero.")
    return float(positive.median())


def sharp(kernel: Kernel, variance: float = 100.0) -> ScaleKernel:
    """A kernel with a large fixed variance, for labels with sharp boundaries.

    An example is whether an experiment works. A classifier is certain near data if the variance of
    its latent function is large. A learnt variance is too small for that: sharp labels only say
    that it is large, and the evidence lower bound prefers a posterior that is easy to approximate.

    Args:
        kernel: A kernel of variance one.
        variance: The variance.

    Example:
        >>> import torch
        >>> from gpytorch.kernels import MaternKernel
        >>> from gpytorch.likelihoods import BernoulliLikelihood
        >>> from seqgp import SequentialGP
        >>> from seqgp.kernel_scales import sharp
        >>> X = torch.linspace(0, 1, 20, dtype=torch.double).unsqueeze(-1)
        >>> kernel = sharp(MaternKernel(nu=2.5)).to(X)
        >>> works = (X < 0.5).to(X)
        >>> model = SequentialGP(X, works, likelihood=BernoulliLikelihood(), covar_module=kernel)
        >>> bool(model.posterior(X[:1], observation_noise=True).mean > 0.98)
        True
    """
    scaled = ScaleKernel(kernel)
    scaled.outputscale = variance
    scaled.raw_outputscale.requires_grad_(False)
    return scaled

"""Kernels for inputs of many dimensions: where their lengthscale should begin."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["median_distance"]


@torch.no_grad()
def median_distance(X: Tensor, max_points: int = 500) -> float:
    """The median distance between inputs, a lengthscale to begin with.

    A lengthscale of 1, which suits standardised inputs of a few dimensions, makes images of 784
    pixels independent of each other: nothing can be learnt, not even the lengthscale.

    Args:
        X: ``n x d`` inputs, at least two of them different.
        max_points: How many of them, evenly spread, are looked at.

    Example:
        >>> import torch
        >>> from seqgp.kernels import median_distance
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
        raise ValueError("X: all inputs are the same; their distances say nothing.")
    return float(positive.median())

"""Moving inducing points along a stream."""

from __future__ import annotations

import torch
from botorch.models.utils.inducing_point_allocators import InducingPointAllocator
from gpytorch.kernels import Kernel
from linear_operator import to_dense
from torch import Tensor

from seqgp.dual import scaled_cholesky, solve_lower
from seqgp.dual.linalg import relative_jitter


def choose_inducing_points(
    Z: Tensor,
    candidates: Tensor,
    kernel: Kernel,
    max_points: int,
    allocator: InducingPointAllocator,
    tol: float = 1e-2,
) -> Tensor:
    r"""Inducing points for what is known (on ``Z``) and what is new (``candidates``).

    A candidate brings something new if the present points leave more than ``tol`` of its prior
    variance unexplained, :math:`k_{xx} - k_{xz} K_{zz}^{-1} k_{zx} > \tau k_{xx}`. If none does,
    ``Z`` stays as it is. Otherwise the worst explained candidate is added, again and again, while
    there is room. If there is no room left, the points are chosen anew among old ones and
    candidates, by the allocator (pivoted Cholesky, as in the paper).

    Args:
        Z: ``m x d`` present inducing points.
        candidates: ``n x d`` inputs to choose from.
        kernel: The kernel; if it is a batch, its first member decides.
        max_points: The largest number of inducing points.
        allocator: A BoTorch allocator.
        tol: The fraction of unexplained prior variance that is tolerated.

    Returns:
        ``m' x d`` inducing points; ``Z`` itself if nothing is new.
    """
    with torch.no_grad():
        prior = _first(kernel(candidates, diag=True), 1)
        chol = scaled_cholesky(_first(to_dense(kernel(Z)), 2), relative_jitter(Z.dtype))
        A = solve_lower(chol, _first(to_dense(kernel(Z, candidates)), 2))
        residual = prior - A.square().sum(0)
        chosen: list[int] = []
        roots: list[Tensor] = []  # rows of the candidates' own pivoted Cholesky factor, given Z
        while len(candidates) and bool((residual > tol * prior).any()):
            if len(Z) + len(chosen) >= max_points:
                union = torch.cat([Z, candidates])
                return allocator.allocate_inducing_points(
                    union, kernel, min(max_points, len(union)), torch.Size()
                )
            pivot = int((residual / prior).argmax())
            row = _first(to_dense(kernel(candidates[pivot : pivot + 1], candidates)), 2)[0]
            row = row - A[:, pivot] @ A
            for root in roots:
                row = row - root[pivot] * root
            root = row / row[pivot].sqrt()
            residual = (residual - root.square()).clamp_min(0)
            residual[pivot] = 0
            roots.append(root)
            chosen.append(pivot)
    return torch.cat([Z, candidates[chosen]]) if chosen else Z


def _first(tensor: Tensor, event_dims: int) -> Tensor:
    """The first member of a batch."""
    return tensor.reshape(-1, *tensor.shape[tensor.dim() - event_dims :])[0]

r"""Duals: the sites of any number of observations, tied to ``m`` inducing points.

In the kernel's basis the tied duals are :math:`\lambda = \sum_i k_{zi} \lambda_i` and
:math:`B = \sum_i k_{zi} \beta_i k_{iz}`. They are stored in whitened form,

.. math::
    \lambda_w = L^{-1} \lambda = A \lambda_{1:n}, \qquad
    B_w = L^{-1} B L^{-T} = A \operatorname{diag}(\beta_{1:n}) A^T.

For inducing values :math:`u = \mu_z + L v`, these are the natural parameters of q minus those of
the prior. They are sums over data, so those of chunks, shards and batches are simply added.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from seqgp.dual.sites import Sites

#: Number of rows of a symmetric product that are computed at once.
GRAM_BLOCK = 60


class Duals(NamedTuple):
    """Whitened tied duals.

    Attributes:
        lam: ``... x m``.
        B: ``... x m x m``, symmetric positive semi-definite.
    """

    lam: Tensor
    B: Tensor


Pair = TypeVar("Pair", Duals, Sites)


def zero_duals(like: Tensor, num_inducing: int, batch_shape: Sequence[int] = ()) -> Duals:
    """Return the duals of no data, on the device and of the dtype of ``like``."""
    lam = torch.zeros(*batch_shape, num_inducing, dtype=like.dtype, device=like.device)
    return Duals(lam, torch.diag_embed(lam))


def tie(A: Tensor, sites: Sites) -> Duals:
    """Return the duals of ``n`` sites.

    Args:
        A: ``... x m x n`` whitened cross-covariance.
        sites: Sites with ``... x n`` elements.
    """
    lam = (A @ sites.lam.unsqueeze(-1)).squeeze(-1)
    beta = sites.beta
    if A.shape[:-2].numel() == 1 and beta.shape[:-1].numel() > 1:
        # Latents that share a prior are processed one at a time, to avoid a copy of A for each.
        shared = A.reshape(A.shape[-2:])
        B = torch.stack([weighted_gram(shared, row) for row in beta.flatten(0, -2)])
        return Duals(lam, B.reshape(*beta.shape[:-1], *B.shape[-2:]))
    return Duals(lam, weighted_gram(A, beta))


def weighted_gram(A: Tensor, weights: Tensor) -> Tensor:
    """Return the symmetric ``A diag(weights) A^T``; about half of it is computed, and mirrored.

    Args:
        A: ``... x m x n``.
        weights: ``... x n``.
    """
    weighted = A * weights.unsqueeze(-2)
    m = A.shape[-2]
    if m <= 2 * GRAM_BLOCK or torch.is_grad_enabled():
        return weighted @ A.mT
    result = weighted.new_empty(*weighted.shape[:-1], m)
    for start in range(0, m, GRAM_BLOCK):
        end = min(start + GRAM_BLOCK, m)
        rows = weighted[..., start:end, :] @ A[..., :end, :].mT
        result[..., start:end, :end] = rows
        result[..., :start, start:end] = rows[..., :start].mT
    return result


def accumulate(chunks: Iterable[tuple[Tensor, Sites]], start: Duals) -> Duals:
    """Add the duals of chunks of data to ``start``, with one chunk in memory at a time.

    Args:
        chunks: Pairs of a whitened cross-covariance ``... x m x n_k`` and its sites.
        start: The duals to start from; `zero_duals` for none.
    """
    for A, chunk in chunks:
        start = add(start, tie(A, chunk))
    return start


def add(a: Duals, b: Duals) -> Duals:
    """Return the duals of the union of two disjoint data sets."""
    return Duals(a.lam + b.lam, a.B + b.B)


def interpolate(a: Pair, b: Pair, rho: float | Tensor) -> Pair:
    """Return ``(1 - rho) a + rho b``, a natural-gradient step, for duals or sites.

    Args:
        a: The start of the step.
        b: The end of a full step.
        rho: The step size, or one for each member of the batch.
    """
    pairs = zip(a, b, strict=True)
    if isinstance(rho, Tensor):
        return type(a)(*(x + align(rho, x) * (y - x) for x, y in pairs))
    return type(a)(*(x + rho * (y - x) for x, y in pairs))


def align(batch: Tensor, tensor: Tensor) -> Tensor:
    """Add trailing singleton dimensions to ``batch``, so that it broadcasts against ``tensor``."""
    return batch.reshape(*batch.shape, *[1] * (tensor.dim() - batch.dim()))

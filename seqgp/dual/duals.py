r"""Duals: the sites of any number of observations, tied to ``m`` inducing points.

In the kernel's basis the tied duals are
:math:`\lambda = \sum_i k_{zi} \lambda_i` and :math:`B = \sum_i k_{zi} \beta_i k_{iz}`. We keep
them whitened,

.. math::
    \lambda_w = L^{-1} \lambda = A \lambda_{1:n}, \qquad
    B_w = L^{-1} B L^{-T} = A \operatorname{diag}(\beta_{1:n}) A^T,

which are the natural parameters of q minus those of the prior, for inducing values
:math:`u = \mu_z + L v`. They are sums over data: chunks, shards and batches just add.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from seqgp.dual.sites import Sites

#: How many rows of a symmetric product are computed at once.
GRAM_BLOCK = 100


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
    """The duals of no data at all, on the device and of the dtype of ``like``."""
    lam = torch.zeros(*batch_shape, num_inducing, dtype=like.dtype, device=like.device)
    return Duals(lam, torch.diag_embed(lam))


def tie(A: Tensor, sites: Sites) -> Duals:
    """The duals of ``n`` sites.

    Args:
        A: ``... x m x n`` whitened cross-covariance.
        sites: Sites with ``... x n`` elements.
    """
    lam = (A @ sites.lam.unsqueeze(-1)).squeeze(-1)
    beta = sites.beta
    if A.shape[:-2].numel() == 1 and beta.shape[:-1].numel() > 1:
        # Latents that share a prior: one after the other, so that no copy of A for each is made.
        shared = A.reshape(A.shape[-2:])
        B = torch.stack([weighted_gram(shared, row) for row in beta.flatten(0, -2)])
        return Duals(lam, B.reshape(*beta.shape[:-1], *B.shape[-2:]))
    return Duals(lam, weighted_gram(A, beta))


def weighted_gram(A: Tensor, weights: Tensor) -> Tensor:
    """``A diag(weights) A^T``, of which products of large blocks leave out half: it is symmetric.

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
    """``start`` plus the duals of chunks of data, of which only one is in memory at a time.

    Args:
        chunks: Pairs of a whitened cross-covariance ``... x m x n_k`` and its sites.
        start: The duals to begin with, `zero_duals` for none.
    """
    for A, chunk in chunks:
        start = add(start, tie(A, chunk))
    return start


def add(a: Duals, b: Duals) -> Duals:
    """The duals of two disjoint sets of data together."""
    return Duals(a.lam + b.lam, a.B + b.B)


def interpolate(a: Pair, b: Pair, rho: float | Tensor) -> Pair:
    """``(1 - rho) a + rho b``, the natural-gradient step, for duals as for sites.

    Args:
        a: Where the step starts.
        b: Where a full step leads.
        rho: The step size, or one for each member of the batch.
    """
    pairs = zip(a, b, strict=True)
    if isinstance(rho, Tensor):
        return type(a)(*(x + align(rho, x) * (y - x) for x, y in pairs))
    return type(a)(*(x + rho * (y - x) for x, y in pairs))


def align(batch: Tensor, tensor: Tensor) -> Tensor:
    """``batch`` with trailing singleton dimensions, so that it broadcasts against ``tensor``."""
    return batch.reshape(*batch.shape, *[1] * (tensor.dim() - batch.dim()))

r"""The summary: a Gaussian pseudo-likelihood that replaces folded observations.

It is a function of the function values at the inducing points of its own basis,
:math:`\log t = \lambda_w^T v - \tfrac12 v^T B_w v`, with :math:`v = L_S^{-1} (u_S - \mu_S)`. For
observations with Gaussian noise, the stored quantities do not depend on the noise variance, so that
this is learnt from all of them,

.. math::
    \log t(v; \sigma^2) = -\frac{n_0}{2} \log(2 \pi \sigma^2)
        - \frac{1}{2 \sigma^2} (s_0 - 2 \lambda_0^T v + v^T B_0 v), \qquad
    \lambda_0 = \sum_i a_i r_i, \; B_0 = \sum_i a_i a_i^T, \; s_0 = \sum_i r_i^2,

with :math:`r_i = y_i - \mu_i` and :math:`a_i` the whitened cross-covariances.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from seqgp.dual.duals import Duals, add, tie
from seqgp.dual.linalg import solve_lower
from seqgp.dual.projection import project, recentre
from seqgp.dual.sites import Sites


class Summary(NamedTuple):
    """The summary of folded observations.

    Attributes:
        duals: Their whitened duals; times the noise variance for Gaussian observations.
        square: ``...``, sum of squared centred targets, for Gaussian observations.
        number: ``...``, the number of folded observations.
    """

    duals: Duals
    square: Tensor
    number: Tensor


class Basis(NamedTuple):
    """The present inducing points, relative to those of a summary.

    Attributes:
        transport: ``... x m x s``, see `seqgp.dual.projection.transport_matrix`; ``None`` if points
            and hyperparameters are those of the summary.
        reference_chol: ``... x s x s`` factor of the old points under the old kernel.
        shift: ``... x s``, the old prior mean minus the new one, at the old points.
        unexplained: ``... x s x s``, covariance of the old points' values given the new ones',
            under the new kernel; ``None`` for none.
    """

    transport: Tensor | None
    reference_chol: Tensor
    shift: Tensor
    unexplained: Tensor | None


def fold(
    summary: Summary,
    A: Tensor,
    sites: Sites,
    residual: Tensor,
    noise: Tensor | None,
    sign: int = 1,
    weights: Tensor | None = None,
) -> Summary:
    """Add observations to a summary for good, or remove them again.

    Args:
        summary: The summary, in the basis of ``A``.
        A: ``... x m x n`` whitened cross-covariance.
        sites: Their sites.
        residual: ``... x n``, targets minus prior mean; NaN where an observation is missing.
        noise: ``... x 1`` or ``... x n`` noise variance of Gaussian observations, ``None`` for
            other likelihoods.
        sign: 1 to add, -1 to remove.
        weights: ``n``, how often each observation counts; by default once.
    """
    count: Tensor | int = sign if weights is None else sign * weights
    square, number = summary.square, summary.number + (count * ~residual.isnan()).sum(-1)
    scale = count
    if noise is not None:
        scale = count * noise
        square = square + (count * residual.square()).nansum(-1)
    sites = Sites(sites.lam * scale, (sites.beta * scale).expand_as(sites.lam))
    return Summary(add(summary.duals, tie(A, sites)), square, number)


def least_square(summary: Summary) -> Tensor:
    r"""Return ``...``, the smallest sum of squared residuals that any function can reach.

    This is :math:`s_0 - \lambda_0^T B_0^+ \lambda_0`. It is at least zero, except for rounding
    errors.
    """
    lam, B = summary.duals
    eigenvalues, vectors = torch.linalg.eigh(B)
    # Where observations have next to no information, it is dominated by rounding errors.
    certain = eigenvalues > torch.finfo(B.dtype).eps ** 0.5 * eigenvalues.amax(-1, keepdim=True)
    certain = certain & (eigenvalues > 0)
    along = (vectors.mT @ lam.unsqueeze(-1)).squeeze(-1).square()
    fitted = torch.where(certain, along / eigenvalues.where(certain, 1.0), 0.0)
    return summary.square - fitted.sum(-1)


def duals_now(summary: Summary, basis: Basis, noise: Tensor | None) -> Duals:
    """Return the summary's duals in the present basis; the noise variance is ``... x 1``."""
    duals = summary.duals
    if noise is not None:
        duals = Duals(duals.lam / noise, duals.B / noise.unsqueeze(-1))
    return moved(duals, basis)


def moved(duals: Duals, basis: Basis) -> Duals:
    """Return duals of the same pseudo-likelihood in the present basis."""
    if basis.transport is None:
        return duals
    return project(recentre(duals, basis.reference_chol, basis.shift), basis.transport)


def log_constant(
    summary: Summary, basis: Basis, noise: Tensor | None, residual: Tensor | None = None
) -> Tensor:
    r"""Return the part of :math:`E_q[\log t]` that depends on hyperparameters but not on q.

    `seqgp.dual.posterior.expected_log_summary` of `duals_now` is the other part. This part has
    terms for the change of the centre; for the variance that the present points do not explain,
    :math:`-\tfrac12 \operatorname{tr}(B_w L_S^{-1} (K_{SS} - Q_{SS}) L_S^{-T})`; for the variance
    of the folded observations that the summary's own points do not explain; and for the noise.

    Args:
        summary: The summary.
        basis: The change from its basis to the present one.
        noise: ``... x 1``, the present noise variance of Gaussian observations.
        residual: ``...``, :math:`\sum_i \beta_i (k_{ii} - k_{iS} K_{SS}^{-1} k_{Si})` over the
            folded observations, times the noise variance for Gaussian ones; ``None`` for zero.
    """
    lam, B = summary.duals
    constant = torch.zeros_like(summary.square)
    if basis.transport is not None:  # v = v' - shift, in whitened coordinates
        shift = solve_lower(basis.reference_chol, basis.shift.unsqueeze(-1)).squeeze(-1)
        constant = -(lam * shift).sum(-1)
        constant = constant - 0.5 * ((B @ shift.unsqueeze(-1)).squeeze(-1) * shift).sum(-1)
    if basis.unexplained is not None:
        half = solve_lower(basis.reference_chol, basis.unexplained)
        inner = solve_lower(basis.reference_chol, half.mT)
        constant = constant - 0.5 * (B * inner).sum((-2, -1))
    if residual is not None:
        constant = constant - 0.5 * residual
    if noise is not None:
        noise = noise.squeeze(-1)
        constant = (constant - 0.5 * summary.square) / noise
        constant = constant - 0.5 * summary.number * (2 * math.pi * noise).log()
    return constant


def rebase_summary(summary: Summary, basis: Basis) -> Summary:
    """Return the summary of the same observations in the present basis."""
    if basis.transport is None:
        return summary
    shift = solve_lower(basis.reference_chol, basis.shift.unsqueeze(-1)).squeeze(-1)
    lam, B = summary.duals
    along = (B @ shift.unsqueeze(-1)).squeeze(-1)
    square = summary.square + 2 * (lam * shift).sum(-1) + (along * shift).sum(-1)
    return Summary(moved(summary.duals, basis), square, summary.number)


def discounted(summary: Summary, factor: float) -> Summary:
    """Return the summary with the weight of its observations multiplied by ``factor``."""
    duals = Duals(factor * summary.duals.lam, factor * summary.duals.B)
    return Summary(duals, factor * summary.square, factor * summary.number)


def empty_summary(like: Duals) -> Summary:
    """Return the summary of no observations, in the shapes of ``like``."""
    zero = torch.zeros_like(like.lam[..., 0])
    return Summary(Duals(torch.zeros_like(like.lam), torch.zeros_like(like.B)), zero, zero)

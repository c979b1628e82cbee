r"""The posterior that duals imply, in whitened form.

Let :math:`W = I + B_w = R R^T`. Its eigenvalues are at least one if no site has negative precision.
Then

.. math::
    q(v) &= N(W^{-1} \lambda_w, W^{-1}), \\
    E[f_*] &= \mu_* + A_*^T W^{-1} \lambda_w, \\
    \operatorname{Cov}[f_a, f_b] &= k(a, b) - A_a^T A_b + A_a^T W^{-1} A_b, \\
    \mathrm{KL}[q \| p] &= \tfrac12 (\log|W| + \operatorname{tr} W^{-1} - m
        + |W^{-1} \lambda_w|^2).

``Kzz`` is factorised once and never inverted, and no condition number is squared.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from seqgp.dual.duals import Duals
from seqgp.dual.linalg import scaled_cholesky, solve_cholesky, solve_lower


class Factors(NamedTuple):
    """The whitened posterior :math:`q(v) = N(mean, (R R^T)^{-1})`.

    Attributes:
        R: ``... x m x m``, lower Cholesky factor of ``W``.
        mean: ``... x m``.
    """

    R: Tensor
    mean: Tensor


def factorise(duals: Duals, strict: bool = False) -> Factors:
    """Return the whitened posterior of some duals, with one Cholesky factorisation.

    Args:
        duals: The duals.
        strict: Whether duals without a posterior give NaN instead of an error.
    """
    eye = torch.eye(duals.lam.shape[-1], dtype=duals.B.dtype, device=duals.B.device)
    R = scaled_cholesky(duals.B + eye, strict=strict)
    return Factors(R, torch.cholesky_solve(duals.lam.unsqueeze(-1), R).squeeze(-1))


def has_posterior(duals: Duals) -> bool:
    """Whether ``W`` is positive definite, for every member of the batch."""
    eye = torch.eye(duals.lam.shape[-1], dtype=duals.B.dtype, device=duals.B.device)
    return not bool(scaled_cholesky(duals.B + eye, strict=True).isnan().any())


def posterior_mean(A: Tensor, factors: Factors) -> Tensor:
    """Return ``E[f] - mu``, ``... x n``, for a whitened cross-covariance ``... x m x n``."""
    return (A.mT @ factors.mean.unsqueeze(-1)).squeeze(-1)


def unexplained_variance(A: Tensor, prior_variance: Tensor) -> Tensor:
    """Return ``k(x, x) - |A_x|^2 >= 0``, the prior variance that Z does not explain."""
    return (prior_variance - A.square().sum(-2)).clamp_min(0)


def posterior_variance(A: Tensor, unexplained: Tensor, factors: Factors) -> Tensor:
    """Return ``Var[f]``, ``... x n``: a sum of two nonnegative terms."""
    R = factors.R
    if R.shape[:-2].numel() > 1 and A.shape[:-2].numel() == 1:
        # Latents that share a prior are processed one at a time, to avoid a copy of A for each.
        eye = torch.eye(R.shape[-1], dtype=R.dtype, device=R.device)
        inverses = solve_lower(R, eye.expand_as(R)).reshape(-1, *R.shape[-2:])
        shared = A.reshape(A.shape[-2:])
        parts = torch.stack([(inverse @ shared).square().sum(-2) for inverse in inverses])
        return unexplained + parts.reshape(*R.shape[:-2], -1)
    return unexplained + solve_lower(R, A).square().sum(-2)


def explained(A: Tensor, factors: Factors) -> Tensor:
    """Return ``(I - W^-1) A``, so that ``Cov[f_a, f_b] = k(a, b) - A_a^T explained(A_b)``."""
    return A - solve_cholesky(factors.R, A)


def posterior_covariance(
    A_left: Tensor, A_right: Tensor, prior_covariance: Tensor, factors: Factors
) -> Tensor:
    """Return ``Cov[f_a, f_b]``, ``... x n_a x n_b``."""
    return prior_covariance - A_left.mT @ explained(A_right, factors)


def kl_divergence(factors: Factors) -> Tensor:
    """Return ``KL[q(u) || p(u)]``, of the batch shape of the factors."""
    R, mean = factors
    m = mean.shape[-1]
    eye = torch.eye(m, dtype=R.dtype, device=R.device)
    log_det = 2 * R.diagonal(dim1=-2, dim2=-1).log().sum(-1)
    trace = solve_lower(R, eye.expand_as(R)).square().sum((-2, -1))
    return 0.5 * (log_det + trace - m + mean.square().sum(-1))


def log_evidence(duals: Duals, factors: Factors) -> Tensor:
    r"""Return :math:`\log \int p(v) \exp(\lambda_w^T v - \tfrac12 v^T B_w v) dv`, batch-shaped.

    This equals :math:`E_q[\log t] - \mathrm{KL}[q \| p]` at the posterior itself.
    """
    R, mean = factors
    return 0.5 * (duals.lam * mean).sum(-1) - R.diagonal(dim1=-2, dim2=-1).log().sum(-1)


def expected_log_summary(duals: Duals, factors: Factors) -> Tensor:
    r"""Return :math:`E_q[\log t(u)]` of the pseudo-likelihood with the given duals.

    :math:`t(u) = \exp(\lambda_w^T v - \tfrac12 v^T B_w v)`; the result has the batch shape of the
    factors.
    """
    R, mean = factors
    linear = (duals.lam * mean).sum(-1)
    quadratic = ((duals.B @ mean.unsqueeze(-1)).squeeze(-1) * mean).sum(-1)
    trace = solve_cholesky(R, duals.B).diagonal(dim1=-2, dim2=-1).sum(-1)
    return linear - 0.5 * (quadratic + trace)

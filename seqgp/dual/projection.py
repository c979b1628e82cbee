r"""Projection of duals onto other inducing points and hyperparameters.

Duals represent a Gaussian pseudo-likelihood of the function values at the inducing points of their
own basis, :math:`t(u_S) = \exp(e^T u_S - \tfrac12 u_S^T H u_S)` with :math:`e = K_S^{-1} \lambda`
and :math:`H = K_S^{-1} B K_S^{-1}`. That function stays fixed when the kernel or the inducing
points change. In the whitened basis both changes are one matrix,

.. math::
    T = L'^{-1} K'_{z' z_S} L_S^{-T}, \qquad \lambda_w' = T \lambda_w, \qquad B_w' = T B_w T^T,

where :math:`L_S` is the Cholesky factor of their own basis, and primes mark the new kernel and
points. Duals are centred on the prior mean but :math:`t` is not: if the prior mean at the old
points changes from :math:`\mu_S` to :math:`\mu'_S`, then :math:`\lambda_w` first becomes
:math:`\lambda_w + B_w L_S^{-1} (\mu_S - \mu'_S)`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from seqgp.dual.duals import Duals
from seqgp.dual.linalg import solve_lower


def transport_matrix(chol: Tensor, reference_chol: Tensor, cross: Tensor | None = None) -> Tensor:
    r"""Return the matrix ``T`` that takes whitened duals from their own basis to another.

    Args:
        chol: ``... x m x m`` factor of ``K'`` at the new inducing points.
        reference_chol: ``... x s x s`` factor of the duals' own basis.
        cross: ``... x m x s`` covariance ``K'(Z', Z_S)`` under the new kernel. ``None`` if the
            inducing points are the same: then ``K'(Z', Z_S) = L' L'^T``, jitter included, and
            :math:`T = L'^T L_S^{-T}` is exactly the identity if the kernel has not changed.

    Returns:
        ``... x m x s``.
    """
    if cross is None:
        return solve_lower(reference_chol, chol).mT
    return solve_lower(chol, solve_lower(reference_chol, cross.mT).mT)


def recentre(duals: Duals, reference_chol: Tensor, shift: Tensor) -> Duals:
    """Return duals of the same pseudo-likelihood, centred on another prior mean.

    Args:
        duals: Whitened duals.
        reference_chol: ``... x s x s`` factor of their basis.
        shift: ``... x s``, the old prior mean minus the new one, at the points of the duals.
    """
    whitened = solve_lower(reference_chol, shift.unsqueeze(-1))
    return Duals(duals.lam + (duals.B @ whitened).squeeze(-1), duals.B)


def project(duals: Duals, transport: Tensor) -> Duals:
    """Change the basis of duals by the ``... x m x s`` matrix ``transport``."""
    lam = (transport @ duals.lam.unsqueeze(-1)).squeeze(-1)
    B = transport @ duals.B @ transport.mT
    return Duals(lam, 0.5 * (B + B.mT))


def coincident(Z: Tensor, Z_reference: Tensor) -> Tensor:
    """Return a ``... x m x s`` indicator, in the dtype of ``Z``, of pairs of rows that are equal.

    An inducing point that is kept keeps its jitter too, so that projecting on a superset of
    inducing points loses nothing.
    """
    distance = torch.cdist(Z.detach(), Z_reference.detach(), p=float("inf"))
    return (distance == 0).to(Z.dtype)

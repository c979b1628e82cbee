r"""Moving duals to other inducing points and other hyperparameters.

Duals stand for a Gaussian pseudo-likelihood of the function values at the inducing points that
they were made with, :math:`t(u_S) = \exp(e^T u_S - \tfrac12 u_S^T H u_S)` with
:math:`e = K_S^{-1} \lambda` and :math:`H = K_S^{-1} B K_S^{-1}`. That function stays fixed when
the kernel or the inducing points change. In the whitened basis both moves are one matrix,

.. math::
    T = L'^{-1} K'_{z' z_S} L_S^{-T}, \qquad \lambda_w' = T \lambda_w, \qquad B_w' = T B_w T^T,

with :math:`L_S` the factor at the time when the duals were made, and primes for the kernel and
points of now. Duals are centred on the prior mean but :math:`t` is not: if the prior mean at the
old points has moved from :math:`\mu_S` to :math:`\mu'_S`, then :math:`\lambda_w` becomes
:math:`\lambda_w + B_w L_S^{-1} (\mu_S - \mu'_S)` first.
"""

from __future__ import annotations

import torch
from torch import Tensor

from seqgp.dual.duals import Duals
from seqgp.dual.linalg import solve_lower


def transport_matrix(chol: Tensor, reference_chol: Tensor, cross: Tensor | None = None) -> Tensor:
    r"""The matrix ``T`` that carries whitened duals from their own basis to another.

    Args:
        chol: ``... x m x m`` factor of ``K'`` at the new inducing points.
        reference_chol: ``... x s x s`` factor that the duals were made with.
        cross: ``... x m x s`` covariance ``K'(Z', Z_S)`` under the new kernel. ``None`` when the
            inducing points are the same: then ``K'(Z', Z_S) = L' L'^T``, jitter included, and
            :math:`T = L'^T L_S^{-T}` is exactly the identity if the kernel has not changed.

    Returns:
        ``... x m x s``.
    """
    if cross is None:
        return solve_lower(reference_chol, chol).mT
    return solve_lower(chol, solve_lower(reference_chol, cross.mT).mT)


def recentre(duals: Duals, reference_chol: Tensor, shift: Tensor) -> Duals:
    """Duals of the same pseudo-likelihood, centred on another prior mean.

    Args:
        duals: Whitened duals.
        reference_chol: ``... x s x s`` factor that they were made with.
        shift: ``... x s``, the old prior mean minus the new one, at the points of the duals.
    """
    whitened = solve_lower(reference_chol, shift.unsqueeze(-1))
    return Duals(duals.lam + (duals.B @ whitened).squeeze(-1), duals.B)


def project(duals: Duals, transport: Tensor) -> Duals:
    """Duals in the basis that the ``... x m x s`` matrix ``transport`` leads to."""
    lam = (transport @ duals.lam.unsqueeze(-1)).squeeze(-1)
    B = transport @ duals.B @ transport.mT
    return Duals(lam, 0.5 * (B + B.mT))


def coincident(Z: Tensor, Z_reference: Tensor) -> Tensor:
    """``... x m x s`` indicator, in the dtype of ``Z``, of rows that are the same point.

    An inducing point that is kept keeps its jitter too, so that projecting on a superset of
    inducing points loses nothing.
    """
    distance = torch.cdist(Z.detach(), Z_reference.detach(), p=float("inf"))
    return (distance == 0).to(Z.dtype)

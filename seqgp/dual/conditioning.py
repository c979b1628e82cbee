r"""Conditioning of the posterior process on more observations, through their sites.

The posterior of a sparse GP is a Gaussian process with covariance function
:math:`c(a, b) = k(a, b) - A_a^T (I - W^{-1}) A_b`. Observing ``q`` more points with sites
:math:`(\lambda_c, \beta_c)` gives, with :math:`S = \beta_c^{1/2}`, :math:`d = E[f_x] - \mu_x`
and :math:`M = I + S C_{xx} S`,

.. math::
    \text{mean}'(a) &= \text{mean}(a) + c(a, x) \, g, \qquad
        g = (I + \beta_c C_{xx})^{-1} (\lambda_c - \beta_c d), \\
    \text{cov}'(a, b) &= c(a, b) - c(a, x) S M^{-1} S c(x, b).

(For negative precisions, there is a second correction of this form with the opposite sign.) This
is the same as adding ``x`` to the inducing points, but without operations of size ``m``: the sites
of any likelihood are found by an iteration on the ``q x q`` block :math:`C_{xx}` alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from seqgp.dual.linalg import inverse_lower, scaled_cholesky, solve_cholesky, solve_lower
from seqgp.dual.natural_gradient import Convergence, Evaluate, fixed_point, without_nan
from seqgp.dual.sites import Sites, sites


class Conditioned(NamedTuple):
    """The effect of ``q`` more observations on a posterior.

    Attributes:
        sites: Their sites.
        gain: ``... x q``, the vector ``g`` by which the mean moves along ``c(., x)``.
        root: ``... x r x q``, in general ``chol(M)^-1 S``: the covariance falls by
            ``(root c(x, a))^T diag(sign) (root c(x, b))``. It has no more batch dimensions than
            the precisions, so fantasies with equal precisions share it.
        sign: ``r x 1``: 1, or -1 where the covariance grows.
    """

    sites: Sites
    gain: Tensor
    root: Tensor
    sign: Tensor


def condition(
    mean: Tensor,
    covariance: Tensor,
    prior_mean: Tensor,
    evaluate: Evaluate,
    conjugate: bool = False,
    latent_dims: int = 0,
    min_precision: float | None = 0.0,
    start: Sites | None = None,
    rho: float = 1.0,
    tol: float = 1e-6,
    max_steps: int = 100,
) -> tuple[Conditioned, Convergence]:
    """Converge the sites of ``q`` new observations on top of a posterior.

    Args:
        mean: ``... x q`` posterior mean at the new inputs.
        covariance: ``... x q x q`` posterior covariance there.
        prior_mean: ``... x q`` prior mean there.
        evaluate: Their likelihood.
        conjugate: Whether the sites do not depend on the posterior.
        latent_dims: Number of trailing batch dimensions that are latents of one model.
        min_precision: Lower limit for the sites' precision.
        start: Sites to start from; by default those under the unconditioned posterior's marginals.
        rho: The maximum step size.
        tol: Relative tolerance.
        max_steps: The maximum number of iterations.
    """
    centred = mean - prior_mean
    if conjugate or start is None:
        marginal = covariance.diagonal(dim1=-2, dim2=-1).clamp_min(0)
        start = sites(evaluate(mean, marginal), centred)
    signed = min_precision is None
    if conjugate:
        zero = mean.new_zeros(mean.shape[: mean.dim() - 1 - latent_dims])
        conditioned = conditioned_from_sites(centred, covariance, start)
        return conditioned, Convergence(1, zero, zero, True)

    prior_variance = covariance.diagonal(dim1=-2, dim2=-1)

    def step(state: Sites, strict: bool = True) -> tuple[Sites, Tensor]:
        r = state.lam - state.beta * centred
        gain, reduction, sign, log_det = _reduce(covariance, state.beta, r, signed, strict)
        shift = (covariance @ gain.unsqueeze(-1)).squeeze(-1)
        variance = prior_variance - (sign * reduction.square()).sum(-2)
        variance = variance.clamp_min(torch.finfo(variance.dtype).tiny)
        expected = evaluate(*without_nan(mean + shift, variance))
        # E[log p] - E[log t] + log Z, with the terms of log Z and log t that cancel left out:
        # log Z = r C g / 2 - log|M| / 2 + (lam d - beta d^2 / 2), and log t is expanded about d.
        log_site = r * shift - 0.5 * state.beta * (shift.square() + variance)
        bound = (0.5 * r * shift - log_site).sum(-1) - 0.5 * log_det
        if latent_dims:
            bound = bound.sum(tuple(range(-latent_dims, 0)))
        return sites(expected, centred + shift, min_precision), expected.log_prob.sum(-1) + bound

    with torch.no_grad():
        state, info = fixed_point(step, start, rho=rho, tol=tol, max_steps=max_steps)
    state = _attach_gradient(lambda s: step(s)[0], state)
    # The iteration only visits sites with a posterior, so no host synchronisation is needed.
    return _condition(centred, covariance, state, signed, strict=True), info


def conditioned_from_sites(
    centred: Tensor, covariance: Tensor, state: Sites, signed: bool = False
) -> Conditioned:
    """Condition a posterior on observations with given sites.

    Args:
        centred: ``... x q`` posterior mean minus prior mean at the new inputs.
        covariance: ``... x q x q`` posterior covariance there.
        state: The sites.
        signed: Whether some of their precisions may be negative.
    """
    return _condition(centred, covariance, state, signed)


def _condition(
    centred: Tensor, covariance: Tensor, state: Sites, signed: bool, strict: bool = False
) -> Conditioned:
    """Return `conditioned_from_sites`; if ``strict``, failures give NaN, not jitter or errors."""
    lam, beta = state
    solution = _solve(covariance, beta, lam - beta * centred, signed, strict)
    return Conditioned(state, solution.gain, solution.root, solution.sign)


class _Solution(NamedTuple):
    r"""The solution ``gain`` of :math:`(I + \beta C) g = r`, with what belongs to the matrix.

    Attributes:
        gain: ``... x q``.
        root: ``... x r x q``, see `Conditioned`.
        sign: ``r x 1``, see `Conditioned`.
        log_det: ``...``, the log determinant of the matrix.
    """

    gain: Tensor
    root: Tensor
    sign: Tensor
    log_det: Tensor


def _solve(
    covariance: Tensor, beta: Tensor, r: Tensor, signed: bool, strict: bool = False
) -> _Solution:
    r"""Solve :math:`(I + \beta C) g = r`.

    With positive precisions, :math:`g_+ = S M^{-1} S^{-1} r`. (The difference :math:`r - S M^{-1} S
    C r` is the same, but loses as many digits as :math:`\beta C` has.) Negative precisions come
    second. Let :math:`C_+ = C - C S M^{-1} S C` be the covariance given the positive ones, and
    :math:`T = (-\beta)_+^{1/2}`. The negative ones add :math:`C_+ T (I - T C_+ T)^{-1} T C_+` to
    the covariance, and :math:`(I - S M^{-1} S C) T (I - T C_+ T)^{-1} T C g_+` to the gain. If the
    matrix in the middle is not positive definite, there is no such posterior: the result is NaN.
    """
    S, chol = _factor(covariance, beta, strict)
    inverse = inverse_lower(chol)
    root = inverse * S.mT
    gain = S * (inverse.mT @ (inverse @ (r.unsqueeze(-1) / S)))
    log_det, sign = _log_det(chol), beta.new_ones(beta.shape[-1], 1)
    if signed:
        T = (-beta).clamp_min(torch.finfo(beta.dtype).tiny).sqrt().unsqueeze(-1)
        eye = torch.eye(beta.shape[-1], dtype=beta.dtype, device=beta.device)
        kept = eye - covariance @ root.mT @ root  # C+ = kept C
        chol = scaled_cholesky(eye - T * (kept @ covariance) * T.mT, strict=True)
        negative = solve_lower(chol, T * kept)
        gain = gain + negative.mT @ solve_lower(chol, T * (covariance @ gain))
        root = torch.cat([root, negative], -2)
        sign, log_det = torch.cat([sign, -sign]), log_det + _log_det(chol)
    return _Solution(gain.squeeze(-1), root, sign, log_det)


def _factor(covariance: Tensor, beta: Tensor, strict: bool) -> tuple[Tensor, Tensor]:
    """Return ``S``, ``... x q x 1``, and the Cholesky factor of ``M = I + S C S``."""
    # Not exactly zero, where the root has no derivative and cannot be divided by.
    S = beta.clamp_min(torch.finfo(beta.dtype).tiny ** 0.5).sqrt().unsqueeze(-1)
    eye = torch.eye(beta.shape[-1], dtype=beta.dtype, device=beta.device)
    return S, scaled_cholesky(eye + S * covariance * S.mT, strict=strict)


def _reduce(
    covariance: Tensor, beta: Tensor, r: Tensor, signed: bool, strict: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return ``gain``, ``root C``, ``sign`` and the log determinant; no roots if possible."""
    if signed:
        solution = _solve(covariance, beta, r, signed, strict)
        return solution.gain, solution.root @ covariance, solution.sign, solution.log_det
    S, chol = _factor(covariance, beta, strict)
    reduction = solve_lower(chol, S * covariance)
    gain = (S * solve_cholesky(chol, r.unsqueeze(-1) / S)).squeeze(-1)
    return gain, reduction, r.new_ones(r.shape[-1], 1), _log_det(chol)


def _log_det(chol: Tensor) -> Tensor:
    """Return the log determinant of a matrix, given its Cholesky factor."""
    return 2 * chol.diagonal(dim1=-2, dim2=-1).log().sum(-1)


def _attach_gradient(step: Callable[[Sites], Sites], solution: Sites) -> Sites:
    r"""Give the solution of ``s = step(s)`` its gradient, by the implicit function theorem.

    With :math:`s = F(s, \phi)`, :math:`\dot s = (I - F_s)^{-1} F_\phi \dot\phi`. One evaluation of
    ``step`` provides :math:`F_\phi`. The inverse is applied to the incoming gradient by iteration,
    at the cost of a few more backward passes of size ``q``.
    """
    if not torch.is_grad_enabled():
        return solution
    target = step(Sites(*(tensor.detach() for tensor in solution)))
    if not any(tensor.requires_grad for tensor in target):
        return solution
    leaves = Sites(*(tensor.detach().clone().requires_grad_(True) for tensor in solution))
    again = step(leaves)

    def transposed_jacobian(*cotangents: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(again, leaves, cotangents, retain_graph=True)

    return Sites(*_ImplicitGradient.apply(transposed_jacobian, solution, *target))


class _ImplicitGradient(torch.autograd.Function):
    """Return the solution of ``s = F(s)`` with a gradient; backward solves ``v = g + F_s^T v``."""

    @staticmethod
    def forward(
        ctx: Any, transposed_jacobian: Any, solution: Sites, lam: Tensor, beta: Tensor
    ) -> Any:
        ctx.transposed_jacobian = transposed_jacobian
        # Not F's value, which may have no posterior if the iteration was stopped early.
        return solution.lam.expand_as(lam).clone(), solution.beta.expand_as(beta).clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        v, rho, previous = list(gradients), 1.0, torch.inf
        for _ in range(200):
            product = ctx.transposed_jacobian(*v)
            residuals = [g + p - u for g, p, u in zip(gradients, product, v, strict=True)]
            size = max(float(r.abs().max()) for r in residuals)
            if size <= 1e-10 * max(float(u.abs().max()) for u in v) or size == 0:
                break
            if size > previous:  # the plain iteration does not contract, so damp it
                rho /= 2
            previous = size
            v = [u + rho * r for u, r in zip(v, residuals, strict=True)]
        return None, None, *v

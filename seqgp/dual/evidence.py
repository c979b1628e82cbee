r"""The evidence of fixed sites, with closed-form derivatives.

Whatever is known of a function :math:`f` is a set of sites :math:`\exp(\lambda_i g_i - \tfrac12
\beta_i g_i^2)` on linear functionals :math:`h_i` of it (`seqgp.variational.prior_blocks`), with
:math:`g_i = h_i - E[h_i]`. Their evidence under a sparse prior is

.. math::
    F = \tfrac12 \lambda_w^T W^{-1} \lambda_w - \tfrac12 \log|W|
        - \tfrac12 \sum_i \beta_i (\operatorname{var} h_i - |A_i|^2), \qquad
    A = L^{-1} K_{zh}, \; W = I + A \beta A^T, \; \lambda_w = A \lambda,

a function of :math:`(K_{zz}, K_{zh}, \operatorname{var} h)` and of the sites only. With
:math:`\mu = W^{-1} \lambda_w`, :math:`\bar g = A^T \mu`, posterior variances :math:`v` and
:math:`G = \mu (\lambda - \beta \bar g)^T + (I - W^{-1}) A \beta`,

.. math::
    \partial_{K_{zh}} F = L^{-T} G, \quad
    \partial_{K_{zz}} F = -\tfrac12 L^{-T} (G A^T) L^{-1}, \quad
    \partial_{\operatorname{var}} F = -\tfrac12 \beta, \quad
    \partial_\lambda F = \bar g, \quad
    \partial_\beta F = -\tfrac12 (\bar g^2 + v).

If the inducing points are the inputs, :math:`A = L^T` is known and the evidence is that of the
exact GP, from one Cholesky factor (`exact_evidence`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from seqgp.dual.duals import Duals, add, tie
from seqgp.dual.linalg import broadcast_shapes, scaled_cholesky, solve_lower, solve_upper
from seqgp.dual.posterior import Factors, factorise, unexplained_variance
from seqgp.dual.sites import Sites


class Block(NamedTuple):
    """Some of the functionals that sites are about, and the sites themselves.

    Attributes:
        cross: ``... x m x n``, their prior covariance with the inducing values.
        variance: ``... x n``, their prior variances.
        sites: Sites with ``... x n`` elements.
    """

    cross: Tensor
    variance: Tensor
    sites: Sites


class Evidence(NamedTuple):
    """The evidence of sites, and the posterior that they lead to.

    Attributes:
        value: ``...``, the evidence, differentiable.
        factors: The whitened posterior, without a graph.
    """

    value: Tensor
    factors: Factors


def evidence(
    covariance: Tensor,
    blocks: Sequence[Block],
    chol: Tensor,
    whitened: Sequence[Tensor],
    jitter: float = 0.0,
) -> Evidence:
    """The evidence of fixed sites under a sparse prior.

    Args:
        covariance: ``... x m x m`` prior covariance of the inducing values.
        blocks: The functionals and their sites. Batch shapes broadcast.
        chol: ``... x m x m``, the Cholesky factor ``L`` of the covariance, without a graph.
        whitened: ``A = L^-1 cross`` of each block, without a graph.
        jitter: The relative jitter that is part of ``chol``.
    """
    with torch.no_grad():
        total: Duals | None = None
        for A, block in zip(whitened, blocks, strict=True):
            duals = tie(A, block.sites)
            total = duals if total is None else add(total, duals)
        assert total is not None
        factors = factorise(Duals(*(tensor.detach() for tensor in total)))
        value = 0.5 * (total.lam * factors.mean).sum(-1)
        value = value - factors.R.diagonal(dim1=-2, dim2=-1).log().sum(-1)
        for A, block in zip(whitened, blocks, strict=True):
            unexplained = unexplained_variance(A, block.variance)
            value = value - 0.5 * (block.sites.beta * unexplained).sum(-1)
    if torch.is_grad_enabled():
        flat = [t for b in blocks for t in (b.cross, b.variance, *b.sites)]
        fixed = (value.detach(), chol.detach(), factors, list(whitened), jitter)
        value = _Evidence.apply(fixed, covariance, *flat)
    return Evidence(value, factors)


class _Evidence(torch.autograd.Function):
    """The derivatives at the top of this file, block by block."""

    @staticmethod
    def forward(ctx: Any, fixed: Any, covariance: Tensor, *flat: Tensor) -> Tensor:
        value, chol, factors, whitened, jitter = fixed
        ctx.save_for_backward(covariance, chol, *factors, *whitened, *flat)
        ctx.jitter, ctx.num_blocks = jitter, len(whitened)
        return value.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, outer: Tensor) -> Any:
        covariance, chol, R, mean, *rest = ctx.saved_tensors
        k = ctx.num_blocks
        whitened, flat = rest[:k], rest[k:]
        factors, outer = Factors(R, mean), outer.unsqueeze(-1)
        inner, gradients = covariance.new_zeros(()), []
        for number, A in enumerate(whitened):
            own = flat[4 * number : 4 * number + 4]
            _, variance, lam, beta = own
            unexplained = unexplained_variance(A, variance)
            g, v, G = _derivatives(A, unexplained, lam, beta, factors, outer)
            d_cross = solve_upper(chol, G)
            # Summed first: a block may have batch dimensions that another one has not.
            inner = inner + _reduce(d_cross @ A.mT, chol.shape)
            d_beta = -0.5 * outer * (g.square() + v)
            parts = (d_cross, -0.5 * outer * beta, outer * g, d_beta)
            gradients += [_reduce(p, t.shape) for p, t in zip(parts, own, strict=True)]
        d_covariance = -0.5 * solve_upper(chol, inner.mT)
        d_covariance = 0.5 * (d_covariance + d_covariance.mT)
        diagonal = d_covariance.diagonal(dim1=-2, dim2=-1)
        d_covariance = d_covariance + torch.diag_embed(ctx.jitter * diagonal)
        return None, _reduce(d_covariance, covariance.shape), *gradients


def _reduce(gradient: Tensor, shape: torch.Size) -> Tensor:
    """A gradient summed to the shape of what it belongs to, which may have leading ones."""
    missing = len(shape) - gradient.dim()
    return gradient.reshape(*[1] * missing, *gradient.shape).sum_to_size(shape)


def _derivatives(
    A: Tensor, unexplained: Tensor, lam: Tensor, beta: Tensor, factors: Factors, outer: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Posterior means and variances of a block, and ``G`` times the incoming gradient."""
    shape = broadcast_shapes(factors.mean.shape[:-1], lam.shape[:-1], outer.shape[:-1])
    if A.shape[:-2].numel() == 1 and shape.numel() > 1:
        # Latents that share a prior: one after the other, so that no copy of A for each is made.
        n, m = A.shape[-1], A.shape[-2]
        shared, unexplained = A.reshape(m, n), unexplained.reshape(n)
        means, variances, total = [], [], torch.zeros_like(shared)
        c = shape.numel()
        parts = zip(
            factors.R.expand(*shape, m, m).reshape(c, m, m),
            factors.mean.expand(*shape, m).reshape(c, m),
            lam.expand(*shape, n).reshape(c, n),
            beta.expand(*shape, n).reshape(c, n),
            outer.expand(*shape, 1).reshape(c, 1),
            strict=True,
        )
        for R, mean, lam_c, beta_c, outer_c in parts:
            g, v, G = _derivatives(shared, unexplained, lam_c, beta_c, Factors(R, mean), outer_c)
            means.append(g)
            variances.append(v)
            total += G
        g, v = (torch.stack(each).reshape(*shape, n) for each in (means, variances))
        return g, v, total
    g = (A.mT @ factors.mean.unsqueeze(-1)).squeeze(-1)
    half = solve_lower(factors.R, A)
    v = unexplained + half.square().sum(-2)
    slope = (lam - beta * g) * outer
    G = factors.mean.unsqueeze(-1) * slope.unsqueeze(-2)
    G = G + (A - solve_upper(factors.R, half)) * (beta * outer).unsqueeze(-2)
    return g, v, G


def exact_evidence(covariance: Tensor, sites: Sites) -> Tensor:
    r"""The evidence of sites of precisions of at least zero on values with a given covariance.

    With :math:`S = \beta^{1/2}`, :math:`M = I + S K S` and :math:`\alpha = (I + \beta K)^{-1}
    \lambda`,

    .. math::
        F = \tfrac12 \lambda^T K \alpha - \tfrac12 \log|M|, \qquad
        \partial_K F = \tfrac12 (\alpha \alpha^T - S M^{-1} S).

    Args:
        covariance: ``... x n x n``.
        sites: Sites with ``... x n`` elements.
    """
    return _ExactEvidence.apply(covariance, *sites)


class _ExactEvidence(torch.autograd.Function):
    """One Cholesky factor forward; its inverse backward."""

    @staticmethod
    def forward(ctx: Any, covariance: Tensor, lam: Tensor, beta: Tensor) -> Tensor:
        root = beta.sqrt()
        chol = precision_factor(covariance, root)
        mean = (covariance @ lam.unsqueeze(-1)).squeeze(-1)  # of precisions of zero
        alpha = lam - root * _solve(chol, root * mean)
        ctx.save_for_backward(covariance, lam, beta, root, chol, alpha)
        log_det = chol.diagonal(dim1=-2, dim2=-1).log().sum(-1)
        return 0.5 * (mean * alpha).sum(-1) - log_det

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, outer: Tensor) -> Any:
        covariance, lam, beta, root, chol, alpha = ctx.saved_tensors
        outer = outer.unsqueeze(-1)
        D = root.unsqueeze(-1) * torch.cholesky_inverse(chol) * root.unsqueeze(-2)
        d_covariance = 0.5 * outer.unsqueeze(-1) * (alpha.unsqueeze(-1) * alpha.unsqueeze(-2) - D)
        g = (covariance @ alpha.unsqueeze(-1)).squeeze(-1)
        d_beta = None
        if ctx.needs_input_grad[2]:
            prior = covariance.diagonal(dim1=-2, dim2=-1)
            v = prior - ((covariance @ D) * covariance).sum(-1)
            d_beta = (-0.5 * outer * (g.square() + v)).sum_to_size(beta.shape)
        d_lam = (outer * g).sum_to_size(lam.shape)
        return d_covariance.sum_to_size(covariance.shape), d_lam, d_beta


def gaussian_evidence(covariance: Tensor, residual: Tensor, noise: Tensor) -> Tensor:
    r""":math:`\log N(r; 0, K + \operatorname{diag}(\sigma^2))`, from one Cholesky factor.

    Args:
        covariance: ``... x n x n``.
        residual: ``... x n``, targets minus prior mean.
        noise: ``... x n`` noise variances.
    """
    return _GaussianEvidence.apply(covariance, residual, noise)


class _GaussianEvidence(torch.autograd.Function):
    r"""With :math:`\alpha = (K + \sigma^2)^{-1} r`, the derivative with respect to ``K`` is
    :math:`\tfrac12 (\alpha \alpha^T - (K + \sigma^2)^{-1})`.
    """  # noqa: D205

    @staticmethod
    def forward(ctx: Any, covariance: Tensor, residual: Tensor, noise: Tensor) -> Tensor:
        chol = scaled_cholesky(covariance + torch.diag_embed(noise))
        half = torch.linalg.solve_triangular(chol, residual.unsqueeze(-1), upper=False)
        ctx.save_for_backward(chol, half)
        ctx.shapes = covariance.shape, residual.shape, noise.shape
        log_det = chol.diagonal(dim1=-2, dim2=-1).log().sum(-1)
        n = residual.shape[-1]
        return -0.5 * half.square().sum((-2, -1)) - log_det - 0.5 * n * math.log(2 * math.pi)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, outer: Tensor) -> Any:
        chol, half = ctx.saved_tensors
        alpha = torch.linalg.solve_triangular(chol.mT, half, upper=True)
        outer = outer[..., None, None]
        gradient = 0.5 * outer * (alpha * alpha.mT - torch.cholesky_inverse(chol))
        own, residual, noise = ctx.shapes
        return (
            gradient.sum_to_size(own),
            -(outer * alpha).squeeze(-1).sum_to_size(residual),
            gradient.diagonal(dim1=-2, dim2=-1).sum_to_size(noise),
        )


def precision_factor(covariance: Tensor, root: Tensor) -> Tensor:
    """Cholesky factor of ``I + S K S``, for ``... x n`` roots ``S`` of precisions."""
    M = root.unsqueeze(-1) * covariance * root.unsqueeze(-2)
    M.diagonal(dim1=-2, dim2=-1).add_(1)
    return scaled_cholesky(M)


def _solve(chol: Tensor, vector: Tensor) -> Tensor:
    return torch.cholesky_solve(vector.unsqueeze(-1), chol).squeeze(-1)

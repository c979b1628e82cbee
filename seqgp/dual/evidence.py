r"""The evidence of fixed sites, with closed-form derivatives.

A posterior over a function :math:`f` is given by sites :math:`\exp(\lambda_i g_i - \tfrac12 \beta_i
g_i^2)` on linear functionals :math:`h_i` of it (`seqgp.variational.prior_blocks`), where
:math:`g_i = h_i - E[h_i]`. The evidence of the sites under a sparse prior is

.. math::
    F = \tfrac12 \lambda_w^T W^{-1} \lambda_w - \tfrac12 \log|W|
        - \tfrac12 \sum_i \beta_i (\operatorname{var} h_i - |A_i|^2), \qquad
    A = L^{-1} K_{zh}, \; W = I + A \beta A^T, \; \lambda_w = A \lambda,
:math:`B_w = A \beta A^T`, :math:`\mu = W^{-1} \lambda_w`, :math:`D = I - W^{-1} = W^{-1} B_w`,
posterior means :math:`\bar g = A^T \mu` and variances :math:`v`,

.. math::
    \partial_{K_{zh}} F &= L^{-T} (\mu (\lambda - \beta \bar g)^T + D A \beta), \\
    \partial_{K_{zz}} F &= -\tfrac12 L^{-T} (\mu \mu^T + B_w - D) L^{-1}, \\
    \partial_{\operatorname{var}} F &= -\tfrac12 \beta, \quad
    \partial_\lambda F = \bar g, \quad
    \partial_\beta F = -\tfrac12 (\bar g^2 + v).

since :math:`D B_w = D W - D = B_w - D`. So value and derivatives only take three products of
:math:`m \times n` matrices: two for :math:`A` and :math:`B_w`, and one with :math:`L^{-T} D`.

If the inducing points are the inputs, :math:`A = L^T` is known and the evidence is that of the
exact GP, from one Cholesky factor (`exact_evidence`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from seqgp.distributed import ALONE, Ranks
from seqgp.dual.duals import Duals, add, tie, weighted_gram
from seqgp.dual.linalg import broadcast_shapes, scaled_cholesky, solve_cholesky, solve_upper
from seqgp.dual.posterior import Factors, factorise, log_evidence
from seqgp.dual.sites import Sites


class Block(NamedTuple):
    """Some functionals, and their sites.

    Attributes:
        cross: ``... x m x n``, their prior covariance with the inducing values.
        variance: ``... x n``, their prior variances; zero if their part of the trace term,
            ``-1/2 sum beta variance``, is counted elsewhere.
        sites: Sites with ``... x n`` elements.
    """

    cross: Tensor
    variance: Tensor
    sites: Sites


class Evidence(NamedTuple):
    """The evidence of sites, and the posterior that they imply.

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
    ranks: Ranks = ALONE,
) -> Evidence:
    """Return the evidence of fixed sites under a sparse prior.

    Args:
        covariance: ``... x m x m`` prior covariance of the inducing values.
        blocks: The functionals and their sites. Batch shapes broadcast.
        chol: ``... x m x m``, the Cholesky factor ``L`` of the covariance, without a graph.
        whitened: ``A = L^-1 cross`` of each block, without a graph.
        jitter: The relative jitter that is part of ``L``.
        ranks: The processes that share the functionals of the first block. The others are common to
            all. The value is the total; derivatives are this rank's share of it.
    """
    with torch.no_grad():
        traces = [(block.sites.beta * block.variance).sum(-1) for block in blocks]
        lam, B, traces[0] = ranks.sum(*tie(whitened[0], blocks[0].sites), traces[0])
        total = Duals(lam, B)
        for A, block in zip(whitened[1:], blocks[1:], strict=True):
            total = add(total, tie(A, block.sites))
        factors = factorise(total)
        value = log_evidence(total, factors)
        # The sum of beta |A|^2 over all functionals is the trace of B.
        value = value + 0.5 * total.B.diagonal(dim1=-2, dim2=-1).sum(-1)
        for trace in traces:
            value = value - 0.5 * trace
    if torch.is_grad_enabled():
        flat = [t for b in blocks for t in (b.cross, b.variance, *b.sites)]
        fixed = (value, chol, total.B, factors, list(whitened), jitter)
        value = _Evidence.apply(fixed, ranks.shared(covariance), *flat)
    return Evidence(value, factors)


class _Evidence(torch.autograd.Function):
    """The evidence, with the derivatives at the top of this file, block by block."""

    @staticmethod
    def forward(ctx: Any, fixed: Any, covariance: Tensor, *flat: Tensor) -> Tensor:
        value, chol, B, factors, whitened, jitter = fixed
        ctx.save_for_backward(chol, B, *factors, *whitened, *flat)
        ctx.jitter, ctx.num_blocks, ctx.shape = jitter, len(whitened), covariance.shape
        return value.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, outer: Tensor) -> Any:
        chol, B, R, mean, *rest = ctx.saved_tensors
        k = ctx.num_blocks
        whitened, flat = rest[:k], rest[k:]
        D = -torch.cholesky_inverse(R)
        D.diagonal(dim1=-2, dim2=-1).add_(1)
        inner = B - D + mean.unsqueeze(-1) * mean.unsqueeze(-2)
        inner = _reduce(outer[..., None, None] * inner, chol.shape)
        half = solve_upper(chol, inner)
        d_covariance = -0.5 * solve_upper(chol, half.mT)
        d_covariance = 0.5 * (d_covariance + d_covariance.mT)
        diagonal = d_covariance.diagonal(dim1=-2, dim2=-1)
        diagonal += ctx.jitter * diagonal
        weights = solve_upper(chol, mean.unsqueeze(-1)).squeeze(-1)
        common = _Common(outer.unsqueeze(-1), mean, weights, solve_upper(chol, D))
        gradients = []
        for number, A in enumerate(whitened):
            own = cross, variance, lam, beta = flat[4 * number : 4 * number + 4]
            block = Block(cross, variance, Sites(lam, beta))
            parts = _derivatives(A, block, common, ctx.needs_input_grad[4 * number + 5])
            gradients += [
                None if part is None else _reduce(part, t.shape)
                for part, t in zip(parts, own, strict=True)
            ]
        return None, _reduce(d_covariance, ctx.shape), *gradients


class _Common(NamedTuple):
    """The quantities that the derivatives of all blocks share."""

    outer: Tensor  # ... x 1, the incoming gradient
    mean: Tensor  # ... x m, mu
    weights: Tensor  # ... x m, L^-T mu
    matrix: Tensor  # ... x m x m, L^-T D

    def of_each(self, shape: torch.Size) -> Iterator[_Common]:
        """Iterate over the members of a batch of the given shape."""
        m = self.mean.shape[-1]
        yield from map(
            _Common,
            self.outer.expand(*shape, 1).reshape(-1, 1),
            self.mean.expand(*shape, m).reshape(-1, m),
            self.weights.expand(*shape, m).reshape(-1, m),
            self.matrix.expand(*shape, m, m).reshape(-1, m, m),
        )


def _reduce(gradient: Tensor, shape: torch.Size) -> Tensor:
    """Sum a gradient to the shape of its tensor, which may have leading ones."""
    missing = len(shape) - gradient.dim()
    return gradient.reshape(*[1] * missing, *gradient.shape).sum_to_size(shape)


def _derivatives(
    A: Tensor, block: Block, common: _Common, wants_beta: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return derivatives with respect to a block's cross-covariance, variance and sites."""
    cross, variance, (lam, beta) = block
    outer, mean, weights, matrix = common
    shape = broadcast_shapes(matrix.shape[:-2], lam.shape[:-1], outer.shape[:-1])
    if A.shape[:-2].numel() == 1 and shape.numel() > 1:
        # Latents that share a prior are processed one at a time, to avoid a copy of A for each.
        m, n = A.shape[-2:]
        A, cross = A.reshape(m, n), cross.reshape(m, n)
        variance, lam, beta = (
            t.expand(*shape, n).reshape(shape.numel(), n) for t in (variance, lam, beta)
        )
        d_cross, rest = torch.zeros_like(A), []
        for v, l, b, own in zip(variance, lam, beta, common.of_each(shape), strict=True):
            d_own, *others = _derivatives(A, Block(cross, v, Sites(l, b)), own, wants_beta)
            d_cross += d_own
            rest.append(others)
        d_variance, d_lam, d_beta = (
            None if each[0] is None else torch.stack(each).reshape(*shape, n)
            for each in zip(*rest, strict=True)
        )
        assert d_variance is not None
        assert d_lam is not None
        return d_cross, d_variance, d_lam, d_beta
    g = (A.mT @ mean.unsqueeze(-1)).squeeze(-1)
    product = matrix @ A
    d_beta = None
    if wants_beta:
        v = variance - (cross * product).sum(-2)
        d_beta = -0.5 * outer * (g.square() + v)
    slope = (lam - beta * g) * outer
    d_cross = product * (beta * outer).unsqueeze(-2)
    d_cross.addcmul_(weights.unsqueeze(-1), slope.unsqueeze(-2))
    return d_cross, -0.5 * outer * beta, outer * g, d_beta


def unexplained_total(
    covariance: Tensor,
    cross: Tensor,
    variance: Tensor,
    weights: Tensor,
    chol: Tensor,
    jitter: float = 0.0,
) -> Tensor:
    r"""Return the weighted sum of the variances that some values do not explain of functionals.

    With :math:`E = K^{-1} K_{zh}`, :math:`T = \sum_i w_i (\operatorname{var} h_i - k_i^T E_i)`, and

    .. math::
        \partial_{K_{zh}} T = -2 E w, \qquad \partial_K T = E w E^T.

    Args:
        covariance: ``... x m x m``, ``K``.
        cross: ``... x m x n``.
        variance: ``... x n``.
        weights: ``... x n``, without a graph.
        chol: ``... x m x m``, the Cholesky factor of the covariance, without a graph.
        jitter: The relative jitter that is part of ``chol``.
    """
    return _UnexplainedTotal.apply(covariance, cross, variance, weights, chol, jitter)


class _UnexplainedTotal(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        covariance: Tensor,
        cross: Tensor,
        variance: Tensor,
        weights: Tensor,
        chol: Tensor,
        jitter: float,
    ) -> Tensor:
        E = solve_cholesky(chol, cross)
        ctx.save_for_backward(weights, E)
        ctx.jitter, ctx.shapes = jitter, (covariance.shape, cross.shape, variance.shape)
        return (weights * (variance - (cross * E).sum(-2))).sum(-1)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, outer: Tensor) -> Any:
        weights, E = ctx.saved_tensors
        own, cross, variance = ctx.shapes
        weights = outer.unsqueeze(-1) * weights
        # Sum first: latents may share their prior.
        common = _reduce(weights, torch.Size([*cross[:-2], cross[-1]]))
        d_covariance = weighted_gram(E, common)
        diagonal = d_covariance.diagonal(dim1=-2, dim2=-1)
        diagonal += ctx.jitter * diagonal
        d_cross = _reduce(E * (-2 * common).unsqueeze(-2), cross)
        return _reduce(d_covariance, own), d_cross, _reduce(weights, variance), None, None, None


def exact_evidence(covariance: Tensor, sites: Sites) -> Tensor:
    r"""Return the evidence of sites with nonnegative precisions on values with given covariance.

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
    """The evidence from one Cholesky factor; backward uses its inverse."""

    @staticmethod
    def forward(ctx: Any, covariance: Tensor, lam: Tensor, beta: Tensor) -> Tensor:
        root = beta.clamp_min(torch.finfo(beta.dtype).tiny).sqrt()  # of missing observations, too
        chol = precision_factor(covariance, root)
        mean = (covariance @ lam.unsqueeze(-1)).squeeze(-1)
        # S M^-1 S^-1 lam: the difference lam - S M^-1 S K lam would lose digits if beta is large.
        alpha = root * _solve(chol, lam / root)
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
    r"""Return :math:`\log N(r; 0, K + \operatorname{diag}(\sigma^2))`, from one Cholesky factor.

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
    """Return the Cholesky factor of ``I + S K S``, for ``... x n`` roots ``S`` of precisions."""
    M = root.unsqueeze(-1) * covariance * root.unsqueeze(-2)
    M.diagonal(dim1=-2, dim2=-1).add_(1)
    return scaled_cholesky(M)


def _solve(chol: Tensor, vector: Tensor) -> Tensor:
    return torch.cholesky_solve(vector.unsqueeze(-1), chol).squeeze(-1)

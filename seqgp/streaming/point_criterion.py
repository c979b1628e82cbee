r"""A criterion in nats for the number and the choice of inducing points.

Inducing points lower the bound by

.. math:: \tfrac12 \sum_i n_i \sum_b \beta_{bi} r_{bi}

nats, their *cost*, where :math:`r_{bi} = k_b(x_i, x_i) - k_{iz} K_{zz}^{-1} k_{zi}` is the variance
that they leave unexplained at candidate ``i``, :math:`\beta_{bi}` is the precision of its site, and
:math:`n_i` is the number of observations that it stands for. Outputs or latents with different
kernels :math:`k_b` share the inducing points. If they share one kernel, its precisions are sums
over outputs and latents.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from botorch.models.utils.inducing_point_allocators import InducingPointAllocator
from gpytorch.kernels import Kernel
from torch import Tensor

from seqgp.dual import scaled_cholesky, solve_lower
from seqgp.dual.linalg import relative_jitter
from seqgp.variational.stationary import covariance_function, prior_variance

#: The default tolerance for the cost, in nats per observation.
TOLERANCE = 0.005

#: The maximum size of the sample used where the computation is quadratic in its size.
LARGEST_SAMPLE = 4096

#: How many candidates are compared with a redundant point at once, if the first is not worth it.
TOGETHER = 32


class _Criterion(NamedTuple):
    """The terms of the criterion."""

    prior: Tensor  # b x n, prior variances
    precision: Tensor  # b x n
    number: Tensor  # n, the number of observations that each candidate stands for
    A: Tensor  # b x m x n, whitened cross-covariances with the present points
    residual: Tensor  # b x n, the variance that they leave unexplained

    def cost(self, residual: Tensor) -> Tensor:
        """Return the cost, in nats, of an unexplained variance."""
        return 0.5 * (self.number * self.precision * residual).sum()


def _criterion(
    Z: Tensor,
    candidates: Tensor,
    kernel: Kernel,
    precision: Tensor | None,
    represents: Tensor | None,
) -> _Criterion:
    prior = _members(prior_variance(kernel, candidates), 1)
    beta = torch.ones_like(prior[:1]) if precision is None else precision.to(prior)
    if beta.dim() < 2 or len(beta) != len(prior):  # shared evenly by all kernels
        beta = beta.reshape(-1, beta.shape[-1]).sum(0) / len(prior)
    beta = beta.expand_as(prior)
    number = torch.ones_like(prior[0]) if represents is None else represents.to(prior)
    A, residual = prior.new_zeros(len(prior), 0, len(candidates)), prior.clone()
    if len(Z):
        matrix = _matrix_of(kernel)
        K, cross = matrix(Z, Z), matrix(Z, candidates)
        A = solve_lower(scaled_cholesky(K, relative_jitter(Z.dtype)), cross)
        residual = (prior - A.square().sum(-2)).clamp_min(0)
    return _Criterion(prior, beta, number, A, residual)


@torch.no_grad()
def inducing_cost(
    Z: Tensor,
    candidates: Tensor,
    kernel: Kernel,
    precision: Tensor | None = None,
    represents: Tensor | None = None,
) -> float:
    """Return the cost of inducing points, in nats per observation.

    Args:
        Z: ``m x d`` inducing points.
        candidates: ``n x d`` inputs of observations; at least one.
        kernel: The kernel, or a batch of kernels.
        precision: ``[b x] n`` precisions of the sites; by default one.
        represents: ``n``, the number of observations that each stands for; by default one.
    """
    parts = _criterion(Z, candidates, kernel, precision, represents)
    return float(parts.cost(parts.residual) / parts.number.sum())


@torch.no_grad()
def choose_inducing_points(
    Z: Tensor,
    candidates: Tensor,
    kernel: Kernel,
    max_points: int,
    precision: Tensor | None = None,
    represents: Tensor | None = None,
    allocator: InducingPointAllocator | None = None,
    tol: float = TOLERANCE,
    gain: float = 2.0,
) -> Tensor:
    r"""Choose inducing points, given the present ones and candidates.

    If the present points ``Z`` cost less than the tolerance, they stay as they are. Otherwise the
    candidate with the largest cost is added, again and again (a pivoted Cholesky factorisation of
    the candidates given ``Z``), while there is room. After that, candidates replace redundant
    points. The most redundant point is the one with the smallest variance given the others. It is
    exchanged for the candidate with the largest unexplained variance if that is more than ``gain``
    times larger. With one kernel, every exchange raises :math:`|K_{zz}|`, so points do not come and
    go. Nor is there an exchange that costs more nats than it gains: the folded observations are
    only known at ``Z`` and lose by an exchange, and only the observations at hand can gain.

    Args:
        Z: ``m x d`` present inducing points; ``m`` may be zero.
        candidates: ``n x d`` inputs to choose from.
        kernel: The kernel, or a batch of ``b`` kernels whose costs are added up.
        max_points: The maximum number of inducing points.
        precision: ``[b x] n`` precisions of the sites; by default one.
        represents: ``n``, the number of observations that each candidate stands for; by default
            one.
        allocator: A BoTorch allocator that chooses among present points and candidates when there
            is no room, instead of exchanges. It gets the first kernel of a batch.
        tol: The tolerated cost, in nats per observation.
        gain: The factor by which a candidate has to be better than the point it replaces.

    Returns:
        ``m' x d`` inducing points; ``Z`` itself if nothing changes.
    """
    if not len(candidates):
        return Z
    parts = _criterion(Z, candidates, kernel, precision, represents)
    beta, residual, jitter = parts.precision, parts.residual, relative_jitter(Z.dtype)
    tolerated = tol * parts.number.sum()
    chosen: list[int] = []
    matrix = _matrix_of(kernel)
    roots = [parts.A]  # rows of the Cholesky factors of the candidates, block by block
    while bool(parts.cost(residual) > tolerated):
        if len(Z) + len(chosen) >= max_points:
            Z = torch.cat([Z, candidates[chosen]])
            if allocator is None:
                shares = (parts.number * beta).sum(-1)
                least = float(2 * tolerated / shares.sum())
                shares = shares / shares.sum()
                known = parts.number * beta
                return _exchange(Z, candidates, kernel, shares, known, beta, least, gain)
            union = torch.cat([Z, candidates])
            return allocator.allocate_inducing_points(
                union, first_kernel(kernel), min(max_points, len(union)), torch.Size()
            )
        pivot = int((beta * residual).sum(0).argmax())
        if len(roots) == 33:  # products with a few large blocks are faster than with many rows
            roots = [torch.cat(roots, -2)]
        row = matrix(candidates[pivot : pivot + 1], candidates)[:, 0]
        for block in roots:
            row = row - (block[..., pivot].unsqueeze(-2) @ block).squeeze(-2)
        own = row[:, pivot].unsqueeze(-1)
        is_new = own > jitter * parts.prior[:, pivot].unsqueeze(-1)
        if not bool(is_new.any()):
            break  # only rounding errors are left
        root = torch.where(is_new, row / own.where(is_new, 1.0).sqrt(), 0.0)
        residual = (residual - root.square()).clamp_min(0)
        residual[:, pivot] = 0
        roots.append(root.unsqueeze(-2))
        chosen.append(pivot)
    if not len(Z) and not chosen:
        chosen = [int((beta * residual).sum(0).argmax())]
    return torch.cat([Z, candidates[chosen]]) if chosen else Z


@torch.no_grad()
def explain_residuals(
    Z: Tensor,
    inputs: Tensor,
    kernel: Kernel,
    slope: Tensor,
    max_points: int,
    tol: float = 2 * TOLERANCE,
) -> Tensor:
    r"""Add inducing points where the residuals of a fit show that some are missing.

    Let :math:`\alpha_i` be the slope of the expected log density of an observation in its mean; for
    Gaussian noise it is :math:`(y_i - m_i) / \sigma^2`. Inducing points at all inputs would raise
    the quadratic form of the evidence by at most

    .. math:: \tfrac12 \alpha^T (K - K_{xz} K_{zz}^{-1} K_{zx}) \alpha

    nats, since it is convex in the covariance. If the kernel is right, this is less than
    `inducing_cost`. If the function varies faster than the kernel says, it is more. The input with
    the largest gain is added, again and again, until the gain is small.

    The size of the matrix is quadratic in the number of observations. If there are more than
    `LARGEST_SAMPLE`, a sample of that size is used. With :math:`c` observations for each one in the
    sample, the form is estimated by :math:`c^2` times its off-diagonal part plus :math:`c` times
    its diagonal part.

    Args:
        Z: ``m x d`` inducing points of the fit.
        inputs: ``n x d`` inputs of the observations.
        kernel: The kernel.
        slope: ``[b x] n`` slopes, for one or several outputs or latents.
        max_points: The maximum number of inducing points.
        tol: The gain that may remain, in nats per observation.

    Returns:
        ``m' x d`` inducing points; ``Z`` itself if they are enough.
    """
    slope, each = slope.reshape(-1, slope.shape[-1]), 1.0
    if len(inputs) > LARGEST_SAMPLE:
        each = len(inputs) / LARGEST_SAMPLE
        some = torch.linspace(0, len(inputs) - 1, LARGEST_SAMPLE, device=inputs.device).long()
        inputs, slope = inputs[some], slope[:, some]
    parts = _criterion(Z, inputs, kernel, None, None)
    prior, residual, roots = parts.prior[0], parts.residual[0], [parts.A[0]]
    # The kernel matrix is evaluated in blocks of rows: there may be many inputs.
    matrix = _matrix_of(kernel)
    rows = [matrix(part, inputs)[0] @ slope.mT for part in inputs.split(512)]
    left = torch.cat(rows).mT - (slope @ parts.A[0].mT) @ parts.A[0]
    left = each * left - (each - 1) * residual * slope
    tolerated, jitter = tol * len(inputs), relative_jitter(Z.dtype)
    chosen: list[int] = []
    while len(Z) + len(chosen) < max_points:
        if bool(0.5 * (slope * left).sum() <= tolerated):
            break
        is_new = residual > jitter * prior
        gains = torch.where(is_new, left.square().sum(0) / residual.where(is_new, 1.0), 0.0)
        pivot = int(gains.argmax())
        if not bool(is_new[pivot]):
            break  # only rounding errors are left
        row = matrix(inputs[pivot : pivot + 1], inputs)[0, 0]
        for block in roots:
            row = row - block[:, pivot] @ block
        root = row / residual[pivot].sqrt()
        left = left - each * (slope @ root).unsqueeze(-1) * root
        left = left + (each - 1) * root.square() * slope
        residual = (residual - root.square()).clamp_min(0)
        residual[pivot] = 0
        roots = [torch.cat(roots), root.unsqueeze(0)] if len(roots) > 32 else [*roots, root[None]]
        chosen.append(pivot)
    return torch.cat([Z, inputs[chosen]]) if chosen else Z


def _exchange(
    Z: Tensor,
    candidates: Tensor,
    kernel: Kernel,
    shares: Tensor,
    known: Tensor,
    at_hand: Tensor,
    tolerated: float,
    gain: float,
) -> Tensor:
    r"""Exchange redundant points for candidates, at most once each.

    Three matrices are updated at :math:`O(m^2 + m n)` per exchange: :math:`P = K_{zz}^{-1}`, where
    :math:`1 / P_{jj}` is the variance of the value at point ``j`` given those at all others; the
    weights :math:`B = P K_{zx}`; and the unexplained variance :math:`r`. Without point ``j``, they
    are

    .. math::
        P' = P - P_j P_j^T / P_{jj}, \quad B' = B - P_j B_j^T / P_{jj}, \quad
        r' = r + B_j^2 / P_{jj}.

    A point with covariances ``g`` and variance ``s`` given the others is added by the inverse of
    these formulas. All of this is in double precision, so that rounding errors are far smaller than
    the differences that matter. For several kernels, variances are averaged with the weights
    ``shares``, which are the kernels' shares of the precision of all observations.

    So an exchange costs :math:`\tfrac12 \sum_i n_i \beta_i B_{ji}^2 / P_{jj}` nats, where ``known``
    holds the ``b x n`` precisions of all observations that the candidates stand for. It gains
    :math:`\tfrac12 \sum_i \beta_i g_i^2 / s` nats with the precisions ``at_hand``.
    """
    jitter, points = relative_jitter(Z.dtype), Z.clone()
    share = shares.double().unsqueeze(-1)
    prior = _members(prior_variance(kernel, candidates), 1).double()
    matrix = _matrix_of(kernel)
    K, cross = matrix(Z, Z).double(), matrix(Z, candidates).double().clone()
    P = torch.cholesky_inverse(scaled_cholesky(K, jitter))
    B = P @ cross
    unexplained = prior - (cross * B).sum(-2)
    known, at_hand = known.double(), at_hand.double()
    worth_it = torch.ones_like(prior[0], dtype=torch.bool)
    exchanged = False
    for _ in range(len(Z)):
        own, left = (share / P.diagonal(dim1=-2, dim2=-1)).sum(0), (share * unexplained).sum(0)
        old = int(own.argmin())
        deviation = P[:, old, old].sqrt().unsqueeze(-1)
        weights, row = P[:, old] / deviation, B[:, old] / deviation
        least, loss = max(tolerated, gain * float(own[old])), (known * row.square()).sum()
        accepted, together = False, 1
        while not accepted:
            largest = left.where(worth_it, 0.0).topk(min(together, len(left)))
            trial = largest.indices[largest.values > least]
            if not len(trial):
                break
            covariances = matrix(candidates[trial], candidates).double()
            all_given = covariances - cross[:, :, trial].mT @ B
            all_given += row[:, trial].unsqueeze(-1) * row.unsqueeze(-2)
            own = all_given[..., trial].diagonal(dim1=-2, dim2=-1)
            variances = own + jitter * prior[:, trial]
            gains = at_hand.unsqueeze(-2) * all_given.square() / variances.unsqueeze(-1)
            better = (gains.sum((0, -1)) > loss).tolist()
            accepted = any(better)
            first = better.index(True) if accepted else len(trial)
            worth_it[trial[:first]] = False
            together = TOGETHER  # products with a few take hardly longer than with one
        if not accepted:
            break
        new, given = int(trial[first]), all_given[:, first]
        covariance, variance = covariances[:, first], variances[:, first].unsqueeze(-1)
        P.addcmul_(weights.unsqueeze(-1), weights.unsqueeze(-2), value=-1)
        B.addcmul_(weights.unsqueeze(-1), row.unsqueeze(-2), value=-1)
        unexplained += row.square()
        P[:, old], P[:, :, old], B[:, old] = 0, 0, 0

        deviation = variance.sqrt()
        weights, row = -B[:, :, new] / deviation, given / deviation
        weights[:, old] = 1 / deviation.squeeze(-1)
        P.addcmul_(weights.unsqueeze(-1), weights.unsqueeze(-2))
        B.addcmul_(weights.unsqueeze(-1), row.unsqueeze(-2))
        unexplained -= row.square()
        points[old], cross[:, old], exchanged = candidates[new], covariance, True
    return points if exchanged else Z


def first_kernel(kernel: Kernel) -> Kernel:
    """Return the first kernel of a batch: BoTorch's allocators support few batches.

    Args:
        kernel: The batch.
    """
    return kernel[(0,) * len(kernel.batch_shape)] if kernel.batch_shape else kernel


def _matrix_of(kernel: Kernel) -> Callable[[Tensor, Tensor], Tensor]:
    """Return a function from ``p x d`` and ``n x d`` inputs to ``b x p x n`` covariances."""
    covariances = covariance_function(kernel)
    return lambda left, right: _members(covariances(left, right), 2)


def _members(tensor: Tensor, event_dims: int) -> Tensor:
    """Reshape to ``b x ...``, with one batch dimension."""
    return tensor.reshape(-1, *tensor.shape[tensor.dim() - event_dims :])

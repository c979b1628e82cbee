"""Moving inducing points along a stream."""

from __future__ import annotations

import torch
from botorch.models.utils.inducing_point_allocators import InducingPointAllocator
from gpytorch.kernels import Kernel
from linear_operator import to_dense
from torch import Tensor

from seqgp.dual import scaled_cholesky, solve_lower
from seqgp.dual.linalg import relative_jitter


def choose_inducing_points(
    Z: Tensor,
    candidates: Tensor,
    kernel: Kernel,
    max_points: int,
    allocator: InducingPointAllocator | None = None,
    tol: float = 0.1,
    gain: float = 2.0,
) -> Tensor:
    r"""Inducing points for what is known (on ``Z``) and what is new (``candidates``).

    A candidate brings something new if the present points leave more of its variance unexplained
    than is tolerated, :math:`k_{xx} - k_{xz} K_{zz}^{-1} k_{zx} > \tau s`. Here :math:`s`, the
    largest semivariance :math:`\tfrac12 \operatorname{Var}[f(x) - f(z)]` between the two sets, is
    the function's variance but for what all its values share. If none does, ``Z`` stays as it is.
    Otherwise the worst explained candidate is added, again and again (a pivoted Cholesky
    factorisation of the candidates given ``Z``), while there is room. Then it takes the place of
    the most redundant point, that of which the others leave the least unexplained, as long as this
    is ``gain`` times less than its own. Every exchange raises :math:`|K_{zz}|`: points do not come
    and go.

    Args:
        Z: ``m x d`` present inducing points.
        candidates: ``n x d`` inputs to choose from.
        kernel: The kernel; if it is a batch, its first member decides.
        max_points: The largest number of inducing points.
        allocator: A BoTorch allocator that chooses anew among old points and candidates when there
            is no room, instead of exchanges.
        tol: The fraction :math:`\tau` of unexplained variance that is tolerated.
        gain: How much an exchange has to bring.

    Returns:
        ``m' x d`` inducing points; ``Z`` itself if nothing is new.
    """
    if not len(candidates):
        return Z
    with torch.no_grad():
        prior = _first(kernel(candidates, diag=True), 1)
        K = _first(to_dense(kernel(Z)), 2)
        cross = _first(to_dense(kernel(Z, candidates)), 2)
        tolerated = tol * 0.5 * float((K.diagonal().unsqueeze(-1) + prior - 2 * cross).max())
        A = solve_lower(scaled_cholesky(K, relative_jitter(Z.dtype)), cross)
        residual = prior - A.square().sum(0)
        chosen: list[int] = []
        roots: list[Tensor] = []  # rows of the candidates' own pivoted Cholesky factor, given Z
        while bool((residual > tolerated).any()):
            if len(Z) + len(chosen) >= max_points:
                Z = torch.cat([Z, candidates[chosen]])
                if allocator is None:
                    return _exchange(Z, candidates, kernel, prior, tolerated, gain)
                union = torch.cat([Z, candidates])
                number = min(max_points, len(union))
                return allocator.allocate_inducing_points(union, kernel, number, torch.Size())
            pivot = int(residual.argmax())
            row = _row(kernel, candidates, pivot) - A[:, pivot] @ A
            for root in roots:
                row = row - root[pivot] * root
            root = row / row[pivot].sqrt()
            residual = (residual - root.square()).clamp_min(0)
            residual[pivot] = 0
            roots.append(root)
            chosen.append(pivot)
    return torch.cat([Z, candidates[chosen]]) if chosen else Z


@torch.no_grad()
def cluster_inducing_points(
    Z: Tensor,
    inputs: Tensor,
    weights: Tensor,
    num_new: int,
    num_seen: int,
    max_points: int,
    generator: torch.Generator,
    iterations: int = 5,
) -> Tensor:
    """Inducing points that are centres of clusters of all inputs of a stream.

    First new inputs fill empty places, and take those of old points at random, in proportion to
    their number among all inputs so far. Then a few iterations of Lloyd's algorithm (k-means) on
    what is at hand: new inputs, remembered ones with their weights, and the old points, which stand
    for all inputs that nothing remembered stands for. Unlike `choose_inducing_points` this does not
    prefer outliers, which is what the worst explained inputs are when there are many dimensions.

    Args:
        Z: ``m x d`` present inducing points.
        inputs: ``n x d`` remembered inputs, then new ones.
        weights: ``n``, for how many inputs each stands.
        num_new: How many are new.
        num_seen: How many inputs came before those.
        max_points: The largest number of inducing points.
        generator: Draws them, on the CPU.
        iterations: Of Lloyd's algorithm.

    Returns:
        ``m' x d`` inducing points; ``Z`` itself if there are no new inputs.
    """
    if not num_new:
        return Z
    device, new = Z.device, inputs[len(inputs) - num_new :].to(Z)
    number = min(max_points, (len(Z) if num_seen else 0) + num_new)
    added = max(round(number * num_new / (num_seen + num_new)), number - len(Z))
    added = min(added, num_new)
    order = torch.randperm(num_new, generator=generator, device="cpu")[:added].to(device)
    kept = torch.randperm(len(Z), generator=generator, device="cpu")[: number - added].to(device)
    centres = torch.cat([Z[kept.sort().values], new[order.sort().values]])
    represented = float(weights[: len(inputs) - num_new].sum())
    own = max(num_seen - represented, 0.0) / max(len(Z), 1)
    points = torch.cat([inputs.to(Z), Z])
    mass = torch.cat([weights.to(Z), torch.full_like(Z[:, 0], own)])
    for _ in range(iterations):
        nearest = torch.cdist(points, centres).argmin(-1)
        total = torch.zeros_like(centres[:, 0]).index_add(0, nearest, mass)
        moment = torch.zeros_like(centres).index_add(0, nearest, mass.unsqueeze(-1) * points)
        occupied = (total > 0).unsqueeze(-1)
        centres = torch.where(occupied, moment / total.clamp_min(1e-12).unsqueeze(-1), centres)
    return centres


def _exchange(
    Z: Tensor, candidates: Tensor, kernel: Kernel, prior: Tensor, tolerated: float, gain: float
) -> Tensor:
    r"""Redundant points exchanged for candidates, at most each of them once.

    Kept up to date, at :math:`O(m^2 + m n)` an exchange, are :math:`P = K_{zz}^{-1}`, of which
    :math:`1 / P_{jj}` is the variance of a point's value given those of all others, the weights
    :math:`B = P K_{zx}` and what they leave unexplained. Without point ``j``

    .. math::
        P' = P - P_j P_j^T / P_{jj}, \quad B' = B - P_j B_j^T / P_{jj}, \quad
        r' = r + B_j^2 / P_{jj},

    and a point with covariances ``g`` and variance ``s`` given the others comes in by the same
    formulas read backwards. In double precision, in which rounding errors stay far below what is
    decided on.
    """
    jitter, points = relative_jitter(Z.dtype), Z.clone()
    K = _first(to_dense(kernel(Z)), 2).double()
    cross = _first(to_dense(kernel(Z, candidates)), 2).double().clone()
    P = torch.cholesky_inverse(scaled_cholesky(K, jitter))
    B, prior = P @ cross, prior.double()
    unexplained = prior - (cross * B).sum(0)
    exchanged = False
    for _ in range(len(Z)):
        old, new = int(P.diagonal().argmax()), int(unexplained.argmax())
        if float(unexplained[new]) <= max(tolerated, gain / float(P[old, old])):
            break
        weights, own = P[old] / P[old, old].sqrt(), B[old] / P[old, old].sqrt()
        P.addr_(weights, weights, alpha=-1)
        B.addr_(weights, own, alpha=-1)
        unexplained += own.square()
        P[old], P[:, old], B[old] = 0, 0, 0

        row = _row(kernel, candidates, new).double()
        column = cross[:, new].clone()
        column[old] = 0  # what is left of the points
        given = row - column @ B
        deviation = (given[new] + jitter * prior[new]).sqrt()
        weights, own = -B[:, new] / deviation, given / deviation
        weights[old] = 1 / deviation
        P.addr_(weights, weights)
        B.addr_(weights, own)
        unexplained -= own.square()
        points[old], cross[old], exchanged = candidates[new], row, True
    return points if exchanged else Z


def _row(kernel: Kernel, inputs: Tensor, i: int) -> Tensor:
    """``n`` covariances of one of ``n`` inputs with all of them."""
    return _first(to_dense(kernel(inputs[i : i + 1], inputs)), 2)[0]


def _first(tensor: Tensor, event_dims: int) -> Tensor:
    """The first member of a batch."""
    return tensor.reshape(-1, *tensor.shape[tensor.dim() - event_dims :])[0]

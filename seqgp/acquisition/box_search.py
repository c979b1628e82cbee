"""A search for the best point of a box that scores many points at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from seqgp.acquisition.mixed_space import quasi_random_points

#: Options that `search_box` supports. Others need one of BoTorch's optimisers.
SEARCHABLE = frozenset({"fixed_features", "discrete_dims", "cat_dims"})

#: Number of points in the first round; of points to move in later rounds; and of moves of each.
NUM_FIRST, NUM_BEST, NUM_MOVES = 256, 2, 64

#: Average number of inputs that a move changes.
NUM_MOVED = 3


@torch.no_grad()
def search_box(
    score: Callable[[Tensor], Tensor], bounds: Tensor, options: Mapping[str, Any], seed: int
) -> Tensor:
    r"""Maximise a function that is cheaper at many points together than with a gradient at a few.

    The first points are quasi-random. Then the best two are moved at random, for ``d + 2`` rounds:
    :math:`x' = x + t^2 (u - u')` in some of the inputs, with points :math:`u, u'` of the space and
    :math:`t` uniform on [0, 1], so that there are moves of all sizes. (The difference of two points
    is symmetric and, unlike :math:`u - x`, leads up to the bounds.) A level of a discrete input is
    replaced by that of :math:`u`.

    Args:
        score: A function of ``n x d`` points that returns ``n`` scores.
        bounds: ``2 x d`` bounds.
        options: Some of `SEARCHABLE`, as for BoTorch's optimisers.
        seed: Seed of the points.

    Returns:
        The best point, ``d``.

    Example:
        >>> import torch
        >>> bounds = torch.tensor([[0.0, 0.0], [1.0, 1.0]], dtype=torch.double)
        >>> best = search_box(lambda X: -(X - 0.3).square().sum(-1), bounds, {}, seed=0)
        >>> bool((best - 0.3).abs().max() < 0.05)
        True
    """
    d = bounds.shape[-1]
    levels = {**(options.get("discrete_dims") or {}), **(options.get("cat_dims") or {})}
    fixed = options.get("fixed_features") or {}
    is_level = torch.tensor([k in levels and k not in fixed for k in range(d)]).to(bounds.device)
    generator = torch.Generator().manual_seed(seed)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator, dtype=bounds.dtype, device="cpu").to(bounds)

    rounds, moves = d + 2, NUM_BEST * NUM_MOVES
    points = quasi_random_points(NUM_FIRST + 2 * rounds * moves, bounds, options, seed)
    X, pairs = points[:NUM_FIRST], points[NUM_FIRST:].reshape(rounds, 2, moves, d)
    scores = score(X)
    for u, other in pairs:
        kept = scores.topk(NUM_BEST).indices
        start = X[kept].repeat(NUM_MOVES, 1)
        moved = start + uniform(moves, 1).square() * (u - other)
        moved = torch.where(is_level, u, moved.clamp(bounds[0], bounds[1]))
        moved = torch.where(uniform(moves, d) * d < NUM_MOVED, moved, start)
        X, scores = torch.cat([X[kept], moved]), torch.cat([scores[kept], score(moved)])
    return X[scores.argmax()]

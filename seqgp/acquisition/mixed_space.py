"""Points of mixed spaces with linear constraints.

BoTorch's `sample_feasible_points` rounds points and drops those that are no longer feasible: with
an equality among inputs that have levels, nearly all. Here they are moved to the nearest that are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from scipy import optimize  # a dependency of BoTorch
from torch import Tensor


def nearest_allowed(
    X: Tensor,
    bounds: Tensor,
    levels_of: Mapping[int, Any],
    inequality_constraints: Sequence[tuple[Tensor, Tensor, float]] = (),
    equality_constraints: Sequence[tuple[Tensor, Tensor, float]] = (),
) -> Tensor:
    r"""The nearest points at which some inputs have one of their levels, and constraints hold.

    Of each point a mixed-integer linear program: of all :math:`x` that are allowed the one with the
    least sum of distances :math:`t_i \ge |x_i - X_i|`, relative to the bounds, where
    :math:`x_i = \sum_l z_{il} \ell_{il}` with one :math:`z_{il} \in \{0, 1\}` for each level.

    Args:
        X: ``n x d`` points.
        bounds: ``2 x d`` bounds.
        levels_of: The levels of inputs that have such.
        inequality_constraints: Triples of indices, coefficients and what they are to add up to at
            least, as for BoTorch.
        equality_constraints: The same, exactly.
    """
    d = X.shape[-1]
    low, high = bounds.double().cpu().numpy()
    levels = [(index, float(level)) for index, values in levels_of.items() for level in values]
    size = 2 * d + len(levels)  # x, t, z
    rows, least, most = [], [], []

    def demand(entries: Mapping[int, float], at_least: float, at_most: float) -> None:
        row = np.zeros(size)
        for column, value in entries.items():
            row[column] += value
        rows.append(row)
        least.append(at_least)
        most.append(at_most)

    for constraints, at_most in ((inequality_constraints, np.inf), (equality_constraints, None)):
        for indices, coefficients, total in constraints or ():
            entries = dict(zip(indices.tolist(), coefficients.tolist(), strict=True))
            demand(entries, total, total if at_most is None else at_most)
    for index in levels_of:
        own = {2 * d + k: level for k, (i, level) in enumerate(levels) if i == index}
        demand({index: -1.0, **own}, 0.0, 0.0)
        demand(dict.fromkeys(own, 1.0), 1.0, 1.0)
    fixed = len(rows)
    for i in range(d):
        demand({i: 1.0, d + i: -1.0}, -np.inf, 0.0)  # x - t <= X
        demand({i: 1.0, d + i: 1.0}, 0.0, np.inf)  # x + t >= X
    cost = np.concatenate([np.zeros(d), 1 / np.maximum(high - low, 1e-12), np.zeros(len(levels))])
    box = optimize.Bounds(
        np.concatenate([low, np.zeros(d + len(levels))]),
        np.concatenate([high, np.full(d, np.inf), np.ones(len(levels))]),
    )
    integrality = np.concatenate([np.zeros(2 * d), np.ones(len(levels))])
    result = []
    for point in X.double().cpu().numpy():
        lower, upper = np.array(least), np.array(most)
        upper[fixed::2], lower[fixed + 1 :: 2] = point, point
        linear = optimize.LinearConstraint(np.array(rows), lower, upper)
        solved = optimize.milp(cost, constraints=linear, bounds=box, integrality=integrality)
        if solved.x is None:
            raise ValueError("constraints: no point satisfies them with the levels that there are.")
        x = solved.x[:d]
        for index, values in levels_of.items():  # exactly
            allowed = np.array([float(level) for level in values])
            x[index] = allowed[np.abs(allowed - x[index]).argmin()]
        result.append(torch.as_tensor(x))
    return torch.stack(result).to(X)

"""Mixed spaces: inputs with a finite number of levels, and linear constraints.

BoTorch's `sample_feasible_points` rounds points and drops those that are no longer feasible: nearly
all, if there is an equality constraint on inputs with levels. Here they are moved to the nearest
feasible points instead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from botorch.exceptions.errors import UnsupportedError
from botorch.utils.sampling import get_polytope_samples
from botorch.utils.transforms import unnormalize
from scipy import optimize  # a dependency of BoTorch
from torch import Tensor
from torch.quasirandom import SobolEngine

from seqgp.validation import check_tensor


@torch.no_grad()
def quasi_random_points(n: int, bounds: Tensor, options: Mapping[str, Any], seed: int) -> Tensor:
    """The first points of a quasi-random sequence, in the space that the options define.

    Args:
        n: How many points.
        bounds: ``2 x d`` bounds.
        options: Options of BoTorch's optimizers of acquisition functions (``fixed_features``,
            ``inequality_constraints``, ``discrete_dims``, ``choices``, ...). Nonlinear constraints
            are ignored.
        seed: Seed of the sequence. Without linear constraints, a larger ``n`` extends it.

    Returns:
        ``n x d`` points.
    """
    generator = torch.Generator().manual_seed(seed)
    if "choices" in options:
        choices = options["choices"]
        order = torch.randperm(len(choices), generator=generator, device="cpu")
        chosen = order[torch.arange(n, device="cpu") % len(choices)]
        return choices[chosen.to(choices.device)].to(bounds)
    constraints = {
        name: options[name]
        for name in ("inequality_constraints", "equality_constraints")
        if options.get(name)
    }
    X = _continuous_points(n, bounds, options.get("fixed_features") or {}, constraints, seed)
    alternatives = options.get("fixed_features_list")
    if alternatives:
        for k, row in enumerate(X):
            for index, value in alternatives[k % len(alternatives)].items():
                row[index] = value
    levels_of = {**(options.get("discrete_dims") or {}), **(options.get("cat_dims") or {})}
    if levels_of and constraints:
        fixed = options.get("fixed_features") or {}
        X = nearest_allowed(X, _fix(bounds, fixed), levels_of, **constraints)
    else:
        for index, levels in levels_of.items():
            width = (bounds[1, index] - bounds[0, index]).clamp_min(1e-12)
            X[:, index] = _pick(levels, (X[:, index] - bounds[0, index]) / width)
    if "discrete_choices" in options:
        for index, levels in enumerate(options["discrete_choices"]):
            X[:, index] = _pick(levels, torch.rand(n, generator=generator, device="cpu").to(X))
    if options.get("post_processing_func"):
        X = options["post_processing_func"](X)
    return X


def _continuous_points(
    n: int,
    bounds: Tensor,
    fixed: Mapping[int, float],
    constraints: Mapping[str, Any],
    seed: int,
) -> Tensor:
    """Points of a Sobol sequence or, with linear constraints, uniform samples of the polytope."""
    if constraints:
        within = _fix(bounds, fixed)
        X = get_polytope_samples(n, within, seed=seed, n_burnin=1000, **constraints)
    else:
        with torch.device("cpu"):
            engine = SobolEngine(bounds.shape[-1], scramble=True, seed=seed)
            unit = engine.draw(n, dtype=bounds.dtype)
        X = unnormalize(unit.to(bounds), bounds)
    for index, value in fixed.items():
        X[:, index] = value
    return X


def _fix(bounds: Tensor, fixed: Mapping[int, float]) -> Tensor:
    """Bounds whose width is zero for fixed inputs."""
    bounds = bounds.clone()
    for index, value in fixed.items():
        bounds[:, index] = value
    return bounds


def _pick(levels: Any, share: Tensor) -> Tensor:
    """Map numbers from 0 to 1 to levels, in order."""
    levels = torch.as_tensor(levels, dtype=share.dtype, device=share.device)
    return levels[(share.clamp(0, 1) * len(levels)).long().clamp_max(len(levels) - 1)]


def nearest_allowed(
    X: Tensor,
    bounds: Tensor,
    levels_of: Mapping[int, Any],
    inequality_constraints: Sequence[tuple[Tensor, Tensor, float]] = (),
    equality_constraints: Sequence[tuple[Tensor, Tensor, float]] = (),
) -> Tensor:
    r"""Move points to the nearest ones that satisfy all constraints.

    This solves a mixed-integer linear program for each point. It minimises the sum of the distances
    :math:`t_i \ge |x_i - X_i|`, relative to the range of the bounds, where
    :math:`x_i = \sum_l z_{il} \ell_{il}` with one :math:`z_{il} \in \{0, 1\}` for each level.

    Args:
        X: ``n x d`` points.
        bounds: ``2 x d`` bounds.
        levels_of: The levels of the inputs that have any, by index.
        inequality_constraints: Triples of indices, coefficients and a lower bound, as in BoTorch.
        equality_constraints: Triples of indices, coefficients and a value, as in BoTorch.

    Returns:
        ``n x d`` points.
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
            raise ValueError("constraints: no point satisfies all of them with the given levels.")
        x = solved.x[:d]
        for index, values in levels_of.items():  # remove rounding errors
            allowed = np.array([float(level) for level in values])
            x[index] = allowed[np.abs(allowed - x[index]).argmin()]
        result.append(torch.as_tensor(x))
    return torch.stack(result).to(X)


def check_bounds(bounds: Tensor, strict: bool = False) -> None:
    """Raise unless bounds are ``2 x d``, with the lower bounds first.

    Args:
        bounds: The bounds.
        strict: Whether lower and upper bounds must differ.
    """
    check_tensor(bounds, "bounds")
    shape = tuple(bounds.shape)
    if bounds.dim() != 2 or bounds.shape[0] != 2:
        hint = "; transpose d x 2 bounds with bounds.mT" if shape[1:] == (2,) else ""
        raise ValueError(f"bounds: expected shape 2 x d, lower bounds first, got {shape}{hint}.")
    wrong = bounds[0] >= bounds[1] if strict else bounds[0] > bounds[1]
    if wrong.any():
        k = int(wrong.nonzero()[0])
        lower, upper = bounds[:, k].tolist()
        hint = "; transpose d x 2 bounds with bounds.mT" if shape == (2, 2) else ""
        if lower == upper:
            hint += f"; to fix an input, give it a range and pass fixed_features={{{k}: {lower:g}}}"
        raise ValueError(
            "bounds: expected shape 2 x d, lower bounds first, each below the upper one, got "
            f"{lower:g} and {upper:g} for input {k}{hint}."
        )


def check_levels(levels: Any, bounds: Tensor, name: str) -> None:
    """Raise unless levels are a mapping from indices of inputs to values within the bounds.

    Args:
        levels: What was passed.
        bounds: ``2 x d`` bounds.
        name: The name of the option, for errors.
    """
    if not isinstance(levels, Mapping):
        raise TypeError(
            f"{name}: expected a dictionary from indices of inputs to their values, as in "
            f"{{1: range(6)}}, got {levels!r:.50}."
        )
    d = bounds.shape[-1]
    for index, values in levels.items():
        if not isinstance(index, int) or not 0 <= index < d:
            raise ValueError(f"{name}: expected indices from 0 to {d - 1}, got {index!r}.")
        if not isinstance(values, Sequence | Tensor) or not len(values):
            raise ValueError(f"{name}: expected a list of values for input {index}, got {values}.")
        low, high = bounds[:, index]
        given = torch.as_tensor(list(values)).to(bounds)  # rounded like the bounds
        if not ((low <= given) & (given <= high)).all():
            raise ValueError(
                f"{name}: expected values of input {index} within its bounds, {low:g} and "
                f"{high:g}, got {values}."
            )


def check_constraint(constraint: Any, bounds: Tensor, name: str) -> None:
    """Raise unless a linear constraint has BoTorch's form and is about a single point.

    Args:
        constraint: What was passed.
        bounds: ``2 x d`` bounds.
        name: The name of the option, for errors.
    """
    given = isinstance(constraint, Sequence) and len(constraint) == 3
    if not given or not all(isinstance(part, Tensor) for part in constraint[:2]):
        raise TypeError(
            f"{name}: expected triples (indices, coefficients, total) of two tensors and a number, "
            f"got {constraint!r:.80}."
        )
    indices, coefficients, _ = constraint
    if indices.dim() > 1:
        raise UnsupportedError(
            f"{name}: points are proposed one at a time, so there are no constraints between "
            "points."
        )
    d = bounds.shape[-1]
    if indices.is_floating_point() or not ((indices >= 0) & (indices < d)).all():
        raise ValueError(f"{name}: expected indices from 0 to {d - 1}, got {indices.tolist()}.")
    if coefficients.shape != indices.shape or coefficients.dtype != bounds.dtype:
        raise ValueError(
            f"{name}: expected a coefficient of {bounds.dtype} for each of {len(indices)} indices, "
            f"got {coefficients.dtype} of shape {tuple(coefficients.shape)}."
        )

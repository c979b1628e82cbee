"""Contexts: inputs whose values are given for one proposal, such as today's temperature."""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from seqgp.validation import is_whole

#: The values of some inputs, by index.
Context = Mapping[int, float]


def check_context(context: Any, bounds: Tensor) -> None:
    """Raise unless a context maps indices of inputs to values within the bounds.

    Args:
        context: What was passed.
        bounds: ``2 x d`` bounds.
    """
    if not isinstance(context, Mapping):
        raise TypeError(
            "context: expected a dictionary from indices of inputs to their values, as in "
            f"{{2: 0.3}}, got {context!r:.50}."
        )
    d = bounds.shape[-1]
    for index, value in context.items():
        if not is_whole(index) or not 0 <= index < d:
            raise ValueError(f"context: expected indices from 0 to {d - 1}, got {index!r}.")
        if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value):
            raise ValueError(f"context: expected a number for input {index}, got {value!r:.50}.")
        low, high = bounds[:, index].tolist()
        if not low <= torch.tensor(float(value)).to(bounds).item() <= high:  # rounded like them
            raise ValueError(
                f"context: expected a value of input {index} within its bounds, {low:g} and "
                f"{high:g}, got {value:g}."
            )
    if len(context) == d:
        raise ValueError(f"context: all {d} inputs are given, so there is nothing to propose.")


def in_context(X: Tensor, context: Context) -> Tensor:
    """Points with the inputs of a context replaced.

    Args:
        X: ``... x d`` points.
        context: The context.

    Returns:
        ``... x d`` points. They are copies.
    """
    X = X.clone()
    for index, value in context.items():
        X[..., index] = value
    return X


def matches_context(X: Tensor, context: Context) -> Tensor:
    """Return which points have the values of a context.

    Args:
        X: ``... x d`` points.
        context: The context.

    Returns:
        ``...`` booleans.
    """
    return (in_context(X, context) == X).all(-1)


def options_in_context(options: Mapping[str, Any], context: Context) -> dict[str, Any]:
    """Return options for BoTorch's optimisers that fix the inputs of a context.

    Args:
        options: The options.
        context: The context, see `check_context`.

    Example:
        >>> options_in_context({"num_restarts": 2, "fixed_features": {0: 0.5}}, {1: 0.3})
        {'num_restarts': 2, 'fixed_features': {0: 0.5, 1: 0.3}}
    """
    result = dict(options)
    if not context:
        return result
    given = {int(index): float(value) for index, value in context.items()}
    fixed = options.get("fixed_features") or {}
    for index in fixed.keys() & given.keys():
        if fixed[index] != given[index]:
            raise ValueError(
                f"context: input {index} is {given[index]:g}, but fixed_features sets it to "
                f"{fixed[index]:g}."
            )
    for name in ("discrete_dims", "cat_dims"):
        levels_of = dict(options.get(name) or {})
        for index in levels_of.keys() & given.keys():
            _check_level(given[index], levels_of.pop(index), index)
        if options.get(name) is not None:
            result[name] = levels_of
    if "choices" in options:
        kept = options["choices"][matches_context(options["choices"], given)]
        if not len(kept):
            raise ValueError(f"context: none of the choices has the values {given}.")
        return result | {"choices": kept}
    if "discrete_choices" in options:
        choices = list(options["discrete_choices"])
        for index, value in given.items():
            _check_level(value, choices[index], index)
            choices[index] = torch.as_tensor(choices[index]).new_tensor([value])
        return result | {"discrete_choices": choices}
    if options.get("fixed_features_list"):
        kept = [
            each | given
            for each in options["fixed_features_list"]
            if all(each.get(index, value) == value for index, value in given.items())
        ]
        if not kept:
            raise ValueError(f"context: none of fixed_features_list has the values {given}.")
        return result | {"fixed_features_list": kept}
    return result | {"fixed_features": {**fixed, **given}}


def _check_level(value: float, levels: Any, index: int) -> None:
    """Raise unless a value is one of the levels of an input."""
    if value not in (float(level) for level in levels):
        raise ValueError(
            f"context: expected one of the values of input {index}, {list(levels)}, got {value:g}."
        )

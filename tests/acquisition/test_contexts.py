"""Contexts, in every kind of space."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from seqgp.acquisition.contexts import (
    check_context,
    in_context,
    matches_context,
    options_in_context,
)
from seqgp.acquisition.mixed_space import quasi_random_points

pytestmark = pytest.mark.usefixtures("float64")

BOUNDS = torch.tensor([[0.0, 0.0, -1.0], [1.0, 5.0, 1.0]], dtype=torch.float64)


@pytest.mark.parametrize(
    ("context", "error", "message"),
    [
        ([1, 2], TypeError, "context: expected a dictionary"),
        ({3: 0.0}, ValueError, "context: expected indices from 0 to 2"),
        ({"a": 0.0}, ValueError, "context: expected indices from 0 to 2"),
        ({True: 0.0}, ValueError, "context: expected indices"),
        ({0: "warm"}, ValueError, "context: expected a number for input 0"),
        ({0: torch.nan}, ValueError, "context: expected a number for input 0"),
        ({2: 1.1}, ValueError, "context: expected a value of input 2 within its bounds, -1 and 1"),
        ({0: 0.1, 1: 0.2, 2: 0.3}, ValueError, "context: all 3 inputs"),
    ],
)
def test_bad_contexts(context: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        check_context(context, BOUNDS)


def test_contexts_are_rounded_as_bounds_are() -> None:
    bounds = torch.tensor([[0.0, 0.0], [0.7, 1.0]], dtype=torch.float32)
    check_context({0: 0.7}, bounds)  # 0.7 in double precision is above that of single precision
    X = in_context(torch.rand(3, 2, dtype=torch.float32), {0: 0.7})
    assert matches_context(X, {0: 0.7}).all()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"fixed_features": {0: 0.5}},
        {"discrete_dims": {1: [0.0, 2.0, 5.0], 2: [-1.0, 1.0]}},
        {"choices": torch.cartesian_prod(*[torch.tensor([0.0, 1.0])] * 3)},
        {"discrete_choices": [torch.tensor([0.0, 1.0])] * 3},
        {"fixed_features_list": [{0: 0.0}, {0: 1.0, 2: -1.0}, {2: 1.0}]},
        {"inequality_constraints": [(torch.tensor([0, 2]), torch.ones(2).double(), 0.5)]},
    ],
)
def test_spaces(options: dict[str, Any]) -> None:
    """Quasi-random points are in the context, and in the space without it."""
    before = {key: repr(value) for key, value in options.items()}
    given = options_in_context(options, {2: 1.0})
    X = quasi_random_points(8, BOUNDS, given, seed=0)
    assert (X[:, 2] == 1).all()
    assert {key: repr(value) for key, value in options.items()} == before
    if "fixed_features" in options:
        assert (X[:, 0] == 0.5).all()
    if "discrete_dims" in options:
        assert set(X[:, 1].tolist()) <= {0.0, 2.0, 5.0}
    if "discrete_choices" in options or "choices" in options:
        assert set(X[:, :2].reshape(-1).tolist()) == {0.0, 1.0}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fixed_features": {2: 0.5}}, "fixed_features sets it to 0.5"),
        ({"discrete_dims": {2: [0.0, 1.0]}}, "expected one of the values of input 2"),
        ({"choices": torch.zeros(2, 3)}, "none of the choices"),
        ({"discrete_choices": [torch.zeros(1)] * 3}, "expected one of the values of input 2"),
        ({"fixed_features_list": [{2: 0.5}]}, "none of fixed_features_list"),
    ],
)
def test_contexts_outside_of_the_space(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        options_in_context(options, {2: -0.25})

from __future__ import annotations

import pytest
import torch

from seqgp.acquisition.mixed_space import nearest_allowed
from tests.helpers import assert_close, make_inputs

pytestmark = pytest.mark.usefixtures("float64")


def test_against_trying_all_that_are_allowed() -> None:
    """Of whole numbers, an equality and an inequality."""
    bounds = torch.tensor([[0.0, 0.0, 0.0], [4.0, 4.0, 1.0]], dtype=torch.float64)
    X = make_inputs(6, 3).clamp(0, 1) * bounds[1]
    one = torch.tensor([1.0, 1.0], dtype=torch.float64)
    equal, least = (torch.tensor([0, 2]), one, 2.5), (torch.tensor([0, 1]), one, 4.0)
    levels = {0: range(5), 1: range(5)}
    found = nearest_allowed(X, bounds, levels, [least], [equal])
    for x, nearest in zip(X, found, strict=True):
        allowed = [
            torch.tensor([i, j, 2.5 - i], dtype=torch.float64)
            for i in range(5)
            for j in range(5)
            if i + j >= 4 and 0 <= 2.5 - i <= 1
        ]
        distances = [((x - point).abs() / bounds[1]).sum() for point in allowed]
        assert_close(((x - nearest).abs() / bounds[1]).sum(), min(distances), 1e-6)
        assert_close(nearest[0] + nearest[2], torch.tensor(2.5).double(), 1e-6)
    with pytest.raises(ValueError, match="no point"):
        nearest_allowed(X, bounds, levels, [(torch.tensor([0]), one[:1], 9.0)])

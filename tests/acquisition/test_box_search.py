"""The search without gradients, against known maxima."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from seqgp.acquisition.box_search import search_box
from tests.helpers import assert_close

pytestmark = pytest.mark.usefixtures("float64")

SCALE = 2 ** torch.arange(6)
BOUNDS = torch.stack([-torch.ones(6), SCALE.double()])


def closeness(to: Tensor) -> Any:
    """Minus the squared distance, relative to the range; it counts its calls."""

    def score(X: Tensor) -> Tensor:
        score.calls += 1  # type: ignore[attr-defined]
        assert ((BOUNDS[0] <= X) & (BOUNDS[1] >= X)).all()
        return -((X - to) / (BOUNDS[1] - BOUNDS[0])).square().sum(-1)

    score.calls = 0  # type: ignore[attr-defined]
    return score


@pytest.mark.parametrize("share", [0.5, 0.23, 0.0], ids=["middle", "inside", "corner"])
def test_finds_the_maximum(share: float) -> None:
    best = BOUNDS[0] + share * (BOUNDS[1] - BOUNDS[0])
    score = closeness(best)
    found = search_box(score, BOUNDS, {}, 0)
    assert -score(found) < 0.02
    assert score.calls == 1 + 8 + 1  # d + 2 rounds
    assert torch.equal(search_box(score, BOUNDS, {}, 0), found)
    assert not torch.equal(search_box(score, BOUNDS, {}, 1), found)


def test_levels_and_fixed_inputs() -> None:
    levels = {2: [-1.0, 0.5, 4.0], 4: [0.0, 16.0]}
    options = {"discrete_dims": levels, "fixed_features": {0: 0.25, 4: 0.0}}
    found = search_box(closeness(torch.tensor([1.0, 1.0, 0.6, 1.0, 9.0, 1.0])), BOUNDS, options, 0)
    assert found[[0, 2, 4]].tolist() == [0.25, 0.5, 0.0]
    assert_close(found[[1, 3, 5]], torch.ones(3), 2.0)
    options = {"cat_dims": levels}
    found = search_box(closeness(torch.tensor([1.0, 1.0, 0.6, 1.0, 9.0, 1.0])), BOUNDS, options, 0)
    assert found[[2, 4]].tolist() == [0.5, 16.0]

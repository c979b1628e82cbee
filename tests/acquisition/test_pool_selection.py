"""Choices from a pool, against scores and joint acquisition values."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gpytorch.likelihoods import BernoulliLikelihood
from torch import Tensor

from seqgp import BinomialLikelihood, OverdispersedBinomialLikelihood, SequentialGP
from seqgp.acquisition import expected_reduction, qExpectedUncertaintyReduction, select_from_pool
from tests.acquisition.helpers import TOTAL, model_of, points
from tests.helpers import assert_close, make_inputs, make_kernel, make_mean

pytestmark = pytest.mark.usefixtures("float64")


def test_selection_is_the_arg_max() -> None:
    model, pool = model_of("binomial"), points(30)
    options: dict[str, Any] = {"threshold": 0.3, "total_count": TOTAL}
    scores = expected_reduction(model, pool, pool, **options)
    selection = select_from_pool(model, pool, **options)
    assert selection.chosen.tolist() == [int(scores.argmax())]
    assert_close(selection.scores[0], scores)


def test_masks_and_costs() -> None:
    model, pool = model_of("binomial"), points(30)
    options: dict[str, Any] = {"threshold": 0.3, "total_count": torch.full((30,), TOTAL)}
    surveyed = torch.tensor([3, 4, 17])
    mask = torch.zeros(30, dtype=torch.bool)
    mask[surveyed] = True
    first = select_from_pool(model, pool, surveyed=surveyed, **options)
    assert_close(first.scores, select_from_pool(model, pool, surveyed=mask, **options).scores)
    # Those surveyed neither can be chosen nor count.
    assert (first.scores[0, surveyed] == -torch.inf).all()
    left = pool[~mask]
    expected = expected_reduction(
        model, left, left, threshold=0.3, total_count=TOTAL, weights=torch.full((27,), 1 / 30)
    )
    assert_close(first.scores[0, ~mask], expected)
    # What is not available counts, but is not chosen.
    best = int(first.chosen)
    available = torch.ones(30, dtype=torch.bool)
    available[best] = False
    second = select_from_pool(model, pool, surveyed=mask, available=available, **options)
    assert int(second.chosen) != best
    keep = available & ~mask
    assert_close(second.scores[0, keep], first.scores[0, keep])
    # Costs divide.
    costs = torch.ones(30)
    costs[best] = 1e3
    third = select_from_pool(model, pool, surveyed=mask, costs=costs, **options)
    assert int(third.chosen) == int(second.chosen)
    assert_close(third.scores[0, best], first.scores[0, best] / 1e3)


def clustered() -> tuple[SequentialGP, Tensor]:
    """Two clusters of locations that nothing is known about, one a little larger."""
    pool = torch.cat(
        [0.2 + 0.01 * make_inputs(12, 2), 0.8 + 0.01 * make_inputs(10, 2), make_inputs(3, 2)]
    )
    X = torch.tensor([[0.2, 0.8], [0.8, 0.2]])
    model = SequentialGP(
        X,
        torch.tensor([[5.0], [5.0]]),
        likelihood=OverdispersedBinomialLikelihood(50),
        covar_module=make_kernel(0.15),
        mean_module=make_mean(-1.0),
    )
    model.likelihood.nugget = 0.05
    return model, pool


def test_a_batch_beats_the_best_few() -> None:
    """Greedy given fantasies: one location in each cluster; the best two alone: two in one."""
    model, pool = clustered()
    options: dict[str, Any] = {"threshold": 0.3}
    batch = select_from_pool(model, pool, q=2, **options)
    top = batch.scores[0].topk(2).indices
    assert (top < 12).all()
    assert sorted((batch.chosen // 12).tolist()) == [0, 1]
    joint = qExpectedUncertaintyReduction(model, pool, num_fantasies=128, **options)
    with torch.no_grad():
        values = joint(torch.stack([pool[batch.chosen], pool[top]]))
    assert values[0] > 1.3 * values[1]
    assert batch.scores[1, batch.chosen[0]] == -torch.inf


def test_labels_near_the_boundary_are_wanted() -> None:
    """For labels, the location to ask about is one where they change, not one in a corner."""
    X = torch.linspace(0, 1, 8).unsqueeze(-1)
    model = SequentialGP(
        X, (X > 0.5).to(X), likelihood=BernoulliLikelihood(), covar_module=make_kernel(0.3, 4.0)
    )
    pool = torch.linspace(0, 1, 41).unsqueeze(-1)
    chosen = select_from_pool(model, pool, criterion="misclassification", threshold=0.5).chosen
    assert abs(float(pool[chosen]) - 0.5) < 0.15


def test_places_that_cannot_be_chosen_stay_out_whatever_they_cost() -> None:
    pool = torch.rand(20, 2, dtype=torch.double, generator=torch.Generator().manual_seed(0))
    Y = torch.full((5, 1), 3.0, dtype=torch.double)
    model = SequentialGP(pool[:5], Y, likelihood=BinomialLikelihood(20))
    costs = torch.ones(20, dtype=torch.double)
    costs[:5] = torch.inf
    options = {"threshold": 0.2, "surveyed": torch.arange(5), "costs": costs}
    assert int(select_from_pool(model, pool, **options).chosen) >= 5
    mask = torch.zeros(20, dtype=torch.long)
    mask[:5] = 1
    with pytest.raises(ValueError, match=r"surveyed: .* 20 zeros and ones; for a mask"):
        select_from_pool(model, pool, **{**options, "surveyed": mask})
    with pytest.raises(ValueError, match="q: expected 1 to 15"):
        select_from_pool(model, pool, q=1.5, **options)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="weights: expected 20 nonnegative"):
        select_from_pool(model, pool, weights=torch.full_like(costs, torch.nan), **options)


def test_pending_points_come_first() -> None:
    """A batch is its points one after the other, with the previous ones pending."""
    model, pool = model_of("binomial"), points(30)
    options: dict[str, Any] = {"threshold": 0.3, "total_count": torch.full((30,), TOTAL)}
    batch = select_from_pool(model, pool, q=2, **options)
    second = select_from_pool(model, pool, pending=batch.chosen[:1], **options)
    assert int(second.chosen) == int(batch.chosen[1])
    assert second.scores[0, batch.chosen[0]] == -torch.inf
    with pytest.raises(ValueError, match="there is no point left"):
        select_from_pool(model, pool, pending=torch.ones(30, dtype=torch.bool), **options)

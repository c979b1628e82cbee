"""Policies of the memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from seqgp.streaming.memory import POLICIES, MemoryOptions


@pytest.mark.parametrize("policy", ["leverage", "random"])
def test_draws_follow_the_leverage(policy: str) -> None:
    """Inclusion frequencies of single draws, by a chi-square test."""
    leverage = torch.tensor([0.1, 0.4, 0.2, 0.3, 1.0])
    memory = MemoryOptions(capacity=1, policy=policy)
    counts = torch.zeros(5)
    for update in range(3000):
        counts[memory.choose(leverage, 5, update)] += 1
    expected = leverage / leverage.sum() if policy == "leverage" else torch.full((5,), 0.2)
    assert stats.chisquare(counts, expected * 3000).pvalue > 1e-3


@settings(deadline=None, max_examples=50)
@given(
    old=st.integers(0, 12),
    new=st.integers(0, 12),
    capacity=st.none() | st.integers(0, 15),
    per_update=st.none() | st.integers(0, 15),
    policy=st.sampled_from([*POLICIES, "none"]),
)
def test_limits_are_kept(
    old: int, new: int, capacity: int | None, per_update: int | None, policy: str
) -> None:
    leverage = torch.rand(old + new)
    memory = MemoryOptions(capacity, per_update, policy)
    kept = memory.choose(leverage, new, 0)
    assert len(set(kept.tolist())) == len(kept)
    assert torch.equal(kept, kept.sort().values)
    wanted = old + min(new, new if per_update is None else per_update)
    capacity = 0 if policy == "none" else capacity
    assert len(kept) == min(wanted, wanted if capacity is None else capacity)
    assert torch.equal(kept, memory.choose(leverage, new, 0))


def test_recent_keeps_the_last() -> None:
    kept = MemoryOptions(capacity=2, policy="recent").choose(torch.rand(5), 3, 0)
    assert kept.tolist() == [3, 4]


def test_a_policy_of_ones_own() -> None:
    memory = MemoryOptions(
        capacity=2, policy=lambda leverage, size, _: leverage.topk(size).indices.sort()[0]
    )
    assert memory.choose(torch.tensor([0.1, 0.9, 0.3, 0.8]), 2, 0).tolist() == [1, 3]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"policy": "best"}, "policy: expected one of"),
        ({"policy": None}, "policy: expected a name or a function"),
        ({"capacity": -1}, "capacity"),
        ({"capacity": float("nan")}, "capacity"),
        ({"per_update": 0.5}, "per_update: expected a whole number"),
        ({"replay": "x"}, "replay: expected a number"),
        ({"replay": 1.0, "capacity": 0}, "replay: nothing is remembered"),
        ({"replay": 1.0, "policy": "none"}, "replay: nothing is remembered"),
    ],
)
def test_bad_settings(arguments: dict, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        MemoryOptions(**arguments)


def test_whole_numbers_of_numpy() -> None:
    assert MemoryOptions(np.int64(4), per_update=np.int32(2)) == MemoryOptions(4, per_update=2)
    assert MemoryOptions.of(np.int64(4)) == MemoryOptions(4)
    assert MemoryOptions(np.float32(0.5)) == MemoryOptions(0.5)


@pytest.mark.parametrize(
    "chosen",
    [torch.arange(5), torch.tensor([1, 1]), torch.tensor([7]), torch.tensor([0.5]), [0, 1]],
    ids=["too many", "twice", "not there", "no index", "no tensor"],
)
def test_a_policy_that_chooses_what_cannot_be(chosen: Any) -> None:
    memory = MemoryOptions(capacity=2, policy=lambda *_: chosen)
    with pytest.raises((TypeError, ValueError), match="policy: expected"):
        memory.choose(torch.rand(5), 2, 0)


@pytest.mark.parametrize(
    "memory",
    [
        MemoryOptions(capacity=8),
        MemoryOptions(capacity=None, per_update=4),
        MemoryOptions(capacity=6, policy="random"),
    ],
)
def test_inverse_inclusion_probabilities_make_sums_unbiased(memory: MemoryOptions) -> None:
    """To two per cent: the probabilities are asymptotic."""
    leverage = torch.rand(30, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) + 0.1
    values = leverage.sqrt()
    weights = 1 / memory.inclusion_of(leverage, 20)
    estimates = []
    for update in range(2000):
        kept = memory.choose(leverage, 20, update)
        estimates.append(float((weights * values)[kept].sum()))
    mean = sum(estimates) / len(estimates)
    assert mean == pytest.approx(float(values.sum()), rel=0.02)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_weights_are_moderate_where_leverage_is_zero(dtype: torch.dtype) -> None:
    """Points that taught nothing but fill an empty place stand for a few others, not for all."""
    leverage = torch.zeros(20, dtype=dtype)
    leverage[:5] = 1.0
    inclusion = MemoryOptions(capacity=10).inclusion_of(leverage, 20)
    torch.testing.assert_close(inclusion.sum(), torch.tensor(10.0, dtype=dtype))
    assert (1 / inclusion).max() < 4
    nothing = MemoryOptions(capacity=10).inclusion_of(torch.zeros(20, dtype=dtype), 20)
    torch.testing.assert_close(nothing, torch.full((20,), 0.5, dtype=dtype))


def test_a_share_of_what_was_seen() -> None:
    memory = MemoryOptions(capacity=0.05)
    assert memory.at(2000).capacity == 100
    assert memory.at(10).capacity == 1  # of few, not none
    assert MemoryOptions(capacity=0.0).at(10).capacity == 0
    assert MemoryOptions(capacity=7).at(2000).capacity == 7
    for wrong in (1.5, -0.1):
        with pytest.raises(ValueError, match="capacity: expected"):
            MemoryOptions(capacity=wrong)
    with pytest.raises(ValueError, match="replay: expected"):
        MemoryOptions(replay=2.0)


@settings(deadline=None, max_examples=50)
@given(
    labels=st.lists(st.integers(0, 3), max_size=30),
    new=st.integers(0, 30),
    capacity=st.none() | st.integers(0, 15),
    per_update=st.none() | st.integers(0, 15),
)
def test_balance_is_even_and_fills_the_memory(
    labels: list[int], new: int, capacity: int | None, per_update: int | None
) -> None:
    n, new = len(labels), min(new, len(labels))
    classes, leverage = torch.tensor(labels, dtype=torch.long), torch.rand(n)
    memory = MemoryOptions(capacity, per_update, balance=True)
    kept = memory.choose(leverage, new, 0, classes)
    assert torch.equal(kept, kept.unique())
    plain = MemoryOptions(capacity, per_update).choose(leverage, new, 0)
    if per_update is None or capacity is None:  # else quotas of both stages may not meet
        assert len(kept) == len(plain)
    assert len(kept) <= len(plain)
    if per_update is None:  # no class has two more than another that had more to give
        for k in classes.unique():
            own, rest = int((classes[kept] == k).sum()), int((classes == k).sum())
            if own < rest:
                counts = [int((classes[kept] == j).sum()) for j in classes.unique()]
                assert max(counts) <= own + 1


def test_inclusion_with_balance_is_that_of_each_class() -> None:
    classes = torch.tensor([0] * 30 + [1] * 10)
    leverage = torch.rand(40, generator=torch.Generator().manual_seed(0)) + 0.1
    memory = MemoryOptions(capacity=10, balance=True)
    expected = memory.inclusion_of(leverage, 40, classes)
    counts = torch.zeros(40)
    for update in range(3000):
        counts[memory.choose(leverage, 40, update, classes)] += 1
    assert float(expected[:30].sum()) == pytest.approx(5, abs=1e-3)
    assert float(expected[30:].sum()) == pytest.approx(5, abs=1e-3)
    # Rosen's probabilities are asymptotic; the draws' own error is 0.01.
    torch.testing.assert_close(counts / 3000, expected, atol=0.05, rtol=0)

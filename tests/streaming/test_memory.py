"""Policies of the memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import optimize, stats

from seqgp.streaming.memory import POLICIES, MemoryOptions, SamplingPolicy, draw, inclusion


def test_draws_follow_their_sizes() -> None:
    """Frequencies of single draws, by a chi-square test."""
    sizes = torch.tensor([0.1, 0.4, 0.2, 0.3, 1.0])
    counts = torch.zeros(5)
    for update in range(1000):
        counts[MemoryOptions(capacity=1).choose(torch.ones(5), 5, update, sizes=sizes).kept] += 1
    assert stats.chisquare(counts, sizes / sizes.sum() * 1000).pvalue > 1e-3


@settings(deadline=None, max_examples=50)
@given(
    sizes=st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=40),
    number=st.integers(0, 45),
    seed=st.integers(0, 1000),
)
def test_inclusion_is_that_of_varopt(sizes: list[float], number: int, seed: int) -> None:
    """``min(1, s / tau)`` with the tau, found by bisection, for which they add up."""
    s = torch.tensor(sizes, dtype=torch.float64)
    probability = inclusion(s, number)
    if number >= len(s) or not number:
        expected = torch.full_like(s, float(number > 0))
    else:
        tau = optimize.brentq(lambda t: float((s / t).clamp_max(1).sum()) - number, 1e-9, 1e9)
        expected = (s / tau).clamp_max(1)
    torch.testing.assert_close(probability, expected, rtol=1e-6, atol=1e-9)
    kept = draw(probability, torch.Generator().manual_seed(seed))
    assert len(kept) == min(number, len(s))
    assert torch.equal(kept, kept.unique())
    certain = (probability == 1).nonzero().squeeze(-1)
    assert set(certain.tolist()) <= set(kept.tolist())


def stream_of_weights(policy: str, capacity: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Values that a memory holds after 20 batches of ten, and for how many each stands."""
    generator = torch.Generator().manual_seed(5)
    memory = MemoryOptions(capacity, policy=policy, seed=seed)
    chooser = memory.chooser
    assert isinstance(chooser, SamplingPolicy)
    values, importance = torch.zeros(0).double(), torch.zeros(0).double()
    represents = torch.zeros(0).double()
    for update in range(20):
        new = torch.rand(10, generator=generator).double() + update  # later ones are larger
        leverage = torch.rand(10, generator=generator).double() ** 4
        values = torch.cat([values, new])
        importance = torch.cat([importance, chooser.importance(leverage)])
        represents = torch.cat([represents, torch.ones(10).double()])
        sizes = importance * represents
        kept, probability = memory.choose(sizes, 10, update, sizes=sizes)
        values, importance = values[kept], importance[kept]
        represents = (represents / probability.double())[kept]
    return values, represents


@pytest.mark.parametrize("policy", ["leverage", "random"])
@pytest.mark.parametrize("capacity", [5, 40])
def test_sums_over_the_memory_are_unbiased_and_weights_are_bounded(
    policy: str, capacity: int
) -> None:
    """Sums over a stream of 200, whose mean is known, within four standard errors."""
    _, everything = stream_of_weights(policy, 200, 0)
    assert torch.equal(everything, torch.ones(200).double())
    total = float(stream_of_weights(policy, 200, 0)[0].sum())
    sums, largest = [], 0.0
    for seed in range(150):
        values, represents = stream_of_weights(policy, capacity, seed)
        assert len(values) == capacity
        sums.append(float((values * represents).sum()))
        largest = max(largest, float(represents.max()))
    error = np.std(sums) / len(sums) ** 0.5
    assert abs(np.mean(sums) - total) < 4 * error
    # Uniform: 200 / capacity. Half of the importance is shared evenly.
    assert largest <= (1 if policy == "random" else 2) * 200 / capacity * (1 + 1e-5)


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
    kept = memory.choose(leverage, new, 0).kept
    assert len(set(kept.tolist())) == len(kept)
    assert torch.equal(kept, kept.sort().values)
    wanted = old + min(new, new if per_update is None else per_update)
    capacity = 0 if policy == "none" else capacity
    assert len(kept) == min(wanted, wanted if capacity is None else capacity)
    assert torch.equal(kept, memory.choose(leverage, new, 0).kept)


def test_recent_keeps_the_last() -> None:
    kept = MemoryOptions(capacity=2, policy="recent").choose(torch.rand(5), 3, 0).kept
    assert kept.tolist() == [3, 4]


def test_a_policy_of_ones_own() -> None:
    memory = MemoryOptions(
        capacity=2, policy=lambda leverage, size, _: leverage.topk(size).indices.sort()[0]
    )
    assert memory.choose(torch.tensor([0.1, 0.9, 0.3, 0.8]), 2, 0).kept.tolist() == [1, 3]


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
    kept = memory.choose(leverage, new, 0, classes).kept
    assert torch.equal(kept, kept.unique())
    plain = MemoryOptions(capacity, per_update).choose(leverage, new, 0).kept
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
    sizes = torch.rand(40, generator=torch.Generator().manual_seed(0)) + 0.1
    memory = MemoryOptions(capacity=10, balance=True)
    counts = torch.zeros(40)
    for update in range(1000):
        kept, expected = memory.choose(torch.ones(40), 40, update, classes, sizes)
        counts[kept] += 1
    torch.testing.assert_close(expected[:30], inclusion(sizes[:30], 5))
    torch.testing.assert_close(expected[30:], inclusion(sizes[30:], 5))
    # The draws' own error is up to 0.016.
    torch.testing.assert_close(counts / 1000, expected, atol=0.08, rtol=0)

"""Random sequences of calls, the same each time; ``python -m benchmarks attack`` has others."""

from __future__ import annotations

import copy

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

from tests.reliability.interrupts import Interrupts
from tests.reliability.loops import LOOPS, Loops, copied, is_same_state, outcomes, random_points
from tests.reliability.machine import Machine, quiet

pytestmark = pytest.mark.usefixtures("float64")


def run(machine: type[RuleBasedStateMachine], number: int) -> None:
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=number,
            stateful_step_count=10,
            deadline=None,
            derandomize=True,
            phases=[Phase.generate],  # a sequence as it is says enough, and shrinking takes minutes
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.mark.slow
def test_sequences() -> None:
    run(Machine, 20)


@pytest.mark.slow
def test_sequences_of_loops() -> None:
    run(Loops, 10)


@pytest.mark.parametrize("kind", list(LOOPS))
def test_interrupted_loops_have_been_told_or_have_not(kind: str) -> None:
    """Once there are models, at each of the last lines of `tell`, where the loop is changed."""
    loop = LOOPS[kind]()
    for seed in range(2):
        X = random_points(4, seed)
        X = X.unflatten(0, (2, 2)) if kind == "duels" else X
        with quiet():
            loop.tell(X, outcomes(loop, X, seed))
    before = copy.deepcopy(loop.state_dict())
    counter, done = Interrupts(set()), copied(loop, kind)
    X = X[:1] + 0.01

    def tell(loop: object) -> None:
        with quiet():
            loop.tell(X, outcomes(loop, X, 0))  # type: ignore[attr-defined]

    assert not counter.run(lambda: tell(done))
    after = copy.deepcopy(done.state_dict())
    for line in range(counter.lines - 12, counter.lines + 1):
        each = copied(loop, kind)
        assert Interrupts({line}).run(lambda each=each: tell(each))
        now = each.state_dict()
        assert is_same_state(now, before) or is_same_state(now, after), line

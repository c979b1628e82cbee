"""A hundred and fifty steps of random sequences; ``python -m benchmarks attack`` runs many more."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.reliability.machine import Machine


@pytest.mark.slow
@pytest.mark.usefixtures("float64")
def test_sequences() -> None:
    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=15,
            stateful_step_count=10,
            deadline=None,
            derandomize=True,  # the same sequences each time; others are the benchmark's
            phases=[Phase.generate],  # a sequence as it is says enough, and shrinking takes minutes
            suppress_health_check=list(HealthCheck),
        ),
    )

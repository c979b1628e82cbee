"""The benchmark with Ax, for real but quick."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from benchmarks.ax import PROBLEMS, WAYS, regret
from tests.benchmarks.test_commands import command


@pytest.mark.slow
def test_it_runs(tmp_path: Path) -> None:
    printed = command("ax", "--quick", "--out", str(tmp_path))
    units = json.loads((tmp_path / "ax-quick.json").read_text())["units"]
    assert "![regret and time](ax.png)" in printed
    assert (tmp_path / "ax.png").stat().st_size > 10_000
    for way, label in WAYS.items():
        unit = units[f"regret/Gramacy/{way}/seed0"]
        assert len(unit["values"]) == len(unit["cpu"]) == 7
        assert label in printed
        # All start from the same quasi-random trials.
        assert unit["values"][:4] == units["regret/Gramacy/ours/seed0"]["values"][:4]
    assert units["cost/10/ours"]["cpu"]


def test_regret_is_that_of_the_best_valid_value() -> None:
    optimum = float(PROBLEMS["Gramacy"].make().optimal_value)
    curve = regret("Gramacy", [None, optimum + 1, None, optimum + 0.25, optimum + 2])
    assert math.isnan(curve[0])
    assert curve[1:].tolist() == pytest.approx([1, 1, 0.25, 0.25], abs=1e-6)
    assert torch.equal(curve[1:], curve[1:].cummin(0).values)

"""The benchmark of outputs: what it compares, and a quick run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import outputs
from tests.benchmarks.test_commands import command


def test_pairs_are_related_or_not() -> None:
    for pair, related in (("Branin", True), ("Hartmann", True), ("unrelated", False)):
        d, function = outputs.functions(pair)
        T = outputs.box(d)
        correlation = torch.stack([function(T, task) for task in (0, 1)]).corrcoef()[0, 1]
        assert (abs(correlation) > 0.5) == related, pair
        X, Y = outputs.observations(pair, (5, 3), seed=0)
        assert X.shape == (8, d + 1)
        assert X[:, -1].tolist() == [0.0] * 5 + [1.0] * 3
        assert Y.isfinite().all()


def test_cliffs_are_where_the_objective_is_high() -> None:
    bounds, best, evaluate = outputs.problem_of("cliff")
    X = torch.rand(2000, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    Y, valid = evaluate(bounds[0] + (bounds[1] - bounds[0]) * X)
    assert 0.05 < (~valid).double().mean() < 0.7
    assert best - 0.05 < Y[valid].max() < best


@pytest.mark.slow
def test_quick(tmp_path: Path) -> None:
    for only in ("mixed/*", "scarce/*/ours*", "noise/*/[oc]*", "stream/ours/*"):
        printed = command("outputs", "--quick", "--only", only, "--out", str(tmp_path))
    assert "| Branin, 60 and 8 | SequentialMultiTaskGP |" in printed
    assert "| few labels: 60 and 12 | one model |" in printed
    units = json.loads((tmp_path / "outputs-quick.json").read_text())["units"]
    together, alone = (
        units[f"scarce/Branin/{way}/seed0"]["error"] for way in ("ours", "ours alone")
    )
    assert together < alone
    assert len(units["stream/ours/seed0"]["batch_seconds"]) == 4

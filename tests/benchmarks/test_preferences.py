"""The benchmark of preferences, for real but quick, and its person."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import preferences
from tests.benchmarks.test_commands import command


def test_the_person_prefers_what_is_better() -> None:
    X, Y = preferences.duels_of(2000, 3, seed=0)
    f = preferences.utility(X)
    assert 0.8 < (f[Y[:, 0]] > f[Y[:, 1]]).double().mean() < 1
    assert torch.equal(Y.sort(-1).values, torch.arange(4000).reshape(-1, 2))


@pytest.mark.slow
def test_quick(tmp_path: Path) -> None:
    printed = command("preferences", "--quick", "--out", str(tmp_path))
    assert "| 20 | 2 | PreferenceGP |" in printed
    assert "| 20 | 2 | 1, 1 |" in printed
    units = json.loads((tmp_path / "preferences-quick.json").read_text())["units"]
    assert len(units) == 5
    exact = units["mcmc/n=20/d=2/seed0"]
    assert abs(exact["ours"]["density"] - exact["mcmc"]["density"]) < 0.05
    assert abs(exact["ours"]["correlation"] - exact["mcmc"]["correlation"]) < 0.05
    for way in ("ours", "pairwise"):
        unit = units[f"{way}/n=20/d=2/seed0"]
        assert -0.7 < unit["density"] < 0
        assert unit["correlation"] > 0.5
        assert min(unit[name] for name in ("learnt", "kept", "conditioned")) > 0
        assert len(units[f"loop/{way}/d=2/seed0"]["regret"]) == 2

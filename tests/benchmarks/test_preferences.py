"""The benchmark of preferences, for real but quick, and its person."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import preferences
from benchmarks.utilities import KINDS, random_utility
from tests.benchmarks.test_commands import command


def test_the_person_prefers_what_is_better() -> None:
    X, Y = preferences.duels_of(2000, 3, seed=0)
    f = preferences.utility(X)
    assert 0.8 < (f[Y[:, 0]] > f[Y[:, 1]]).double().mean() < 1
    assert torch.equal(Y.sort(-1).values, torch.arange(4000).reshape(-1, 2))


@pytest.mark.parametrize("d", [2, 8])
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_other_utilities(kind: str, d: int) -> None:
    """They have the scale that is asked for, are finite, and depend on the seed alone."""
    X = torch.rand(20_000, d, dtype=torch.double, generator=torch.Generator().manual_seed(9))
    f = random_utility(kind, d, 1, 1.5)(X)
    assert f.shape == (20_000,)
    # The error of a mean, and of a standard deviation, of 4,096 values that are not Gaussian.
    assert abs(f.mean()) < 0.1
    assert abs(f.std() - 1.5) < 0.1
    assert torch.equal(f, random_utility(kind, d, 1, 1.5)(X))


@pytest.mark.slow
def test_quick(tmp_path: Path) -> None:
    printed = command("preferences", "--quick", "--out", str(tmp_path))
    assert "| 20 | 2 | PreferenceGP |" in printed
    assert "| 20 | 2 | 1, 1 |" in printed
    units = json.loads((tmp_path / "preferences-quick.json").read_text())["units"]
    assert len(units) == 6
    exact = units["mcmc/n=20/d=2/seed0"]
    assert abs(exact["ours"]["density"] - exact["mcmc"]["density"]) < 0.05
    assert abs(exact["ours"]["correlation"] - exact["mcmc"]["correlation"]) < 0.05
    other = units["others/n=20/d=2/sines/seed0"]
    for way in ("ours", "pairwise"):
        assert -0.7 < other[way]["density"] < 0
        unit = units[f"{way}/n=20/d=2/seed0"]
        assert -0.7 < unit["density"] < 0
        assert unit["correlation"] > 0.5
        assert min(unit[name] for name in ("learnt", "kept", "conditioned")) > 0
        assert len(units[f"loop/{way}/d=2/seed0"]["regret"]) == 2

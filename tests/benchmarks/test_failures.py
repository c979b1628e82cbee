"""The benchmarks with failures, for real but quick, and the lander that one of them steers."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from botorch.test_functions.synthetic import ConstrainedGramacy

from benchmarks.constrained import regret_of
from benchmarks.lander import CONSTANTS, LEFT, MAIN, NOTHING, RIGHT, Lander, Steering, bounds
from tests.benchmarks.test_commands import command

USUAL = torch.tensor(list(CONSTANTS.values()), dtype=torch.float64)


def state(**values: float) -> np.ndarray:
    """Of a lander that rests in the air above the pad, but for what is given."""
    names = ["x", "y", "drift", "climb", "angle", "turning", "left", "right"]
    return np.array([{"y": 1.0, **values}.get(name, 0.0) for name in names])


@pytest.mark.parametrize(
    ("values", "engine"),
    [
        ({}, NOTHING),
        ({"climb": -5.0}, MAIN),  # falls
        ({"angle": 0.5}, RIGHT),  # leans to the left, which is positive
        ({"angle": -0.5}, LEFT),
        ({"turning": 1.0}, RIGHT),
        ({"x": 1.0}, LEFT),  # lean towards the pad
        ({"x": -1.0}, RIGHT),
        ({"angle": 0.5, "left": 1.0, "right": 1.0}, NOTHING),  # on the ground it rests
        ({"climb": -1.0, "left": 1.0}, MAIN),
    ],
)
def test_steering(values: dict[str, float], engine: int) -> None:
    assert Steering(USUAL.numpy())(state(**values)) == engine


def test_each_constant_matters() -> None:
    """Random states: another value of any constant fires another engine in some of them."""
    generator = np.random.default_rng(0)
    states = generator.normal(size=(3000, 8)) * [0.3, 0.3, 0.3, 0.3, 0.1, 0.1, 0, 0]
    states[::2, 6:] = 1.0

    def engines(constants: torch.Tensor) -> list[int]:
        return [Steering(constants.numpy())(each) for each in states]

    usual = engines(USUAL)
    for k in range(len(CONSTANTS)):
        other = USUAL.clone()
        other[k] = 1.0 if k == 8 else 0.2 * other[k]
        assert engines(other) != usual, list(CONSTANTS)[k]


def test_landings_repeat_themselves() -> None:
    first, again, elsewhere = (Lander(seed, episodes=3).evaluate(USUAL) for seed in (0, 0, 1))
    assert first == again
    assert first != elsewhere
    assert -500 < first.reward < 350
    assert 0 <= first.landed <= 1
    never = torch.zeros(12)
    never[10:] = 1e3  # engines that never fire: it falls
    assert Lander(0, episodes=3).evaluate(never).landed == 0


def test_usual_constants_are_within_the_bounds() -> None:
    assert torch.equal(USUAL.clamp(*bounds()), USUAL)


def test_a_lander_without_gymnasium(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    with pytest.raises(SystemExit, match="pip install"):
        Lander(0, 1)


@pytest.mark.slow
def test_lunar_runs(tmp_path: Path) -> None:
    printed = command("lunar", "--quick", "--only", "[fr]*", "--out", str(tmp_path))
    assert "| fantasies, batches of 3 |" in printed
    assert (tmp_path / "lunar.png").stat().st_size > 10_000
    units = json.loads((tmp_path / "lunar-quick.json").read_text())["units"]
    assert units.keys() == {"fantasies/seed0", "region/seed0", "random/seed0"}
    for unit in units.values():
        assert len(unit["rewards"]) == len(unit["landed"]) == 30
        assert unit["rewards"][:24] == units["random/seed0"]["rewards"][:24]


@pytest.mark.slow
def test_constrained_runs(tmp_path: Path) -> None:
    printed = command("constrained", "--quick", "--out", str(tmp_path))
    assert "| failures learnt (ours) |" in printed
    assert "times as long as 3 single proposals" in printed
    assert (tmp_path / "constrained.png").stat().st_size > 10_000


def test_regret_is_that_of_valid_evaluations() -> None:
    problem = ConstrainedGramacy(negate=True)
    best = problem.optimal_value
    Y = torch.tensor([9.0, -2.0, -1.0, 9.0, -0.7])
    valid = torch.tensor([False, True, True, False, True])
    expected = [best + 2, best + 2, best + 1, best + 1, best + 0.7]
    assert regret_of(problem, Y, valid) == pytest.approx(expected, abs=1e-6)
    assert regret_of(problem, Y[:1], valid[:1]) == [math.inf]

"""A lunar lander in wind, controlled by a rule with twelve constants.

The problem of `benchmarks.lunar`. It needs ``gymnasium`` with Box2D: ``pip install
'gymnasium[box2d]'``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

#: What each constant is for, and its value in the rule that is well known to land.
CONSTANTS = {
    "tilt against distance": 0.5,
    "tilt against drift": 1.0,
    "largest tilt": 0.4,
    "height per distance": 0.55,
    "gain of tilt": 0.5,
    "damping of tilt": 1.0,
    "gain of height": 0.5,
    "damping of descent": 0.5,
    "gain of tilt on the ground": 0.0,
    "damping of descent on the ground": 0.5,
    "dead band of the main engine": 0.05,
    "dead band of the side engines": 0.05,
}
DIMENSION = len(CONSTANTS)
NOTHING, LEFT, MAIN, RIGHT = range(4)


class Landing(NamedTuple):
    """How some constants did: reward, mean over episodes, and in how many of these it landed."""

    reward: float
    landed: float


class Steering:
    """A proportional-derivative controller of tilt and height.

    Args:
        constants: Twelve numbers, in the order of `CONSTANTS`.
    """

    def __init__(self, constants: np.ndarray) -> None:
        (
            self.tilt_per_distance,
            self.tilt_per_drift,
            self.largest_tilt,
            self.height_per_distance,
            self.tilt_gain,
            self.tilt_damping,
            self.height_gain,
            self.descent_damping,
            self.ground_tilt_gain,
            self.ground_damping,
            self.main_band,
            self.side_band,
        ) = map(float, constants)

    def __call__(self, state: np.ndarray) -> int:
        """Which engine to fire.

        Args:
            state: Position and velocity (2 each), angle and its velocity, contact of both legs.
        """
        x, y, drift, climb, angle, turning, left_leg, right_leg = map(float, state)
        wanted = self.tilt_per_distance * x + self.tilt_per_drift * drift
        wanted = min(max(wanted, -self.largest_tilt), self.largest_tilt)
        turn = self.tilt_gain * (wanted - angle) - self.tilt_damping * turning
        lift = self.height_gain * (self.height_per_distance * abs(x) - y)
        lift -= self.descent_damping * climb
        if left_leg or right_leg:
            turn *= self.ground_tilt_gain
            lift = -self.ground_damping * climb
        if lift > max(abs(turn), self.main_band):
            return MAIN
        if abs(turn) > self.side_band:
            return LEFT if turn > 0 else RIGHT
        return NOTHING


class Lander:
    """Lands with given constants, on terrains and in winds that a seed determines.

    Args:
        seed: Of terrains and winds: the same ones at each evaluation.
        episodes: How many of them an evaluation is the mean over.
    """

    def __init__(self, seed: int, episodes: int) -> None:
        try:
            import gymnasium
            from gymnasium.envs.box2d import lunar_lander  # noqa: F401
        except Exception as error:
            raise SystemExit(
                f"The lunar lander needs gymnasium with Box2D ({error}): "
                "pip install 'gymnasium[box2d]'"
            ) from None
        self.environment: Any = gymnasium.make("LunarLander-v3", enable_wind=True)
        self.seeds = [10_000 * (seed + 1) + k for k in range(episodes)]

    def episode(self, steering: Steering, seed: int) -> tuple[float, bool]:
        """Reward of one landing, and whether it came to rest on the ground without a crash.

        Args:
            steering: The rule.
            seed: Of terrain and wind.
        """
        state, _ = self.environment.reset(seed=seed)
        total, reward, over = 0.0, 0.0, False
        while not over:
            state, reward, terminated, truncated, _ = self.environment.step(steering(state))
            total += float(reward)
            over = terminated or truncated
        return total, bool(terminated and reward > 0)

    def evaluate(self, constants: Tensor) -> Landing:
        """All episodes with these constants.

        Args:
            constants: ``12`` numbers.
        """
        steering = Steering(constants.detach().cpu().numpy())
        rewards, landed = zip(*(self.episode(steering, seed) for seed in self.seeds), strict=True)
        return Landing(float(np.mean(rewards)), float(np.mean(landed)))


def bounds() -> Tensor:
    """``2 x 12`` bounds of the constants: up to twice the usual ones, or up to one."""
    upper = [2 * usual if usual else 1.0 for usual in CONSTANTS.values()]
    return torch.tensor([[0.0] * DIMENSION, upper], dtype=torch.float64)

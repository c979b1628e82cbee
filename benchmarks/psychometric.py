"""Simulated observers: the probability of a response as a function of a stimulus.

Detection and discrimination with a context follow Owen et al. (2021), "Adaptive nonparametric
psychophysics", and the binarised Hartmann function Letham et al. (2022), "Look-ahead acquisition
functions for Bernoulli level set estimation". They were written from the papers, for inputs in the
unit cube. The detection in eight dimensions is our own: seven properties of a stimulus move the
threshold of its intensity.

This module only needs PyTorch and BoTorch, so that rivals can use it in environments of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from botorch.test_functions import Hartmann
from torch import Tensor


def _sensitivity(context: Tensor, intensity: Tensor) -> Tensor:
    """Intensity over a threshold that changes with the context, both from -1 to 1."""
    return (1 + intensity) / (0.05 + 0.4 * (0.2 * context - 1).square() * context.square())


def discrimination(X: Tensor) -> Tensor:
    """At chance (one half) without intensity. The threshold is roughly parabolic in the context."""
    x = 2 * X - 1
    return torch.special.ndtr(_sensitivity(x[..., 0], x[..., 1]))


def detection(X: Tensor) -> Tensor:
    """Never detected without intensity."""
    x = 2 * X - 1
    return torch.special.ndtr(4 * _sensitivity(x[..., 0], x[..., 1]) - 4)


def hartmann(X: Tensor) -> Tensor:
    """Hartmann's function of six inputs, as a latent function."""
    return torch.special.ndtr(3 * Hartmann(negate=True).to(X)(X) - 2)


def many_properties(X: Tensor) -> Tensor:
    """Detection in eight dimensions: the threshold is a smooth function of seven of them."""
    x, intensity = 2 * X[..., :7] - 1, X[..., 7]
    weights = torch.tensor([0.3, 0.2, 0.1, 0.1, 0.05, 0.05, 0.0], dtype=X.dtype, device=X.device)
    threshold = 0.4 + (weights * (x.square() - 1 / 3)).sum(-1) + 0.1 * x[..., 0] * x[..., 1]
    return torch.special.ndtr(8 * (intensity - threshold))


class Observer(NamedTuple):
    """A simulated observer, and what is asked about it.

    Attributes:
        probability: Of a response 1, a function of ``n x d`` stimuli in the unit cube.
        dim: The number of inputs.
        threshold: The level whose set is to be found.
        initial: The number of initial trials, the same for all ways, if both responses are among
            them.
        trials: The number of all trials.
    """

    probability: Callable[[Tensor], Tensor]
    dim: int
    threshold: float
    initial: int
    trials: int

    def initial_stimuli(self, seed: int) -> Tensor:
        """Quasi-random stimuli, at least ``initial x d``: until both responses have been seen.

        AEPsych starts by the same rule. From a single response no way would learn anything.
        """
        engine = torch.quasirandom.SobolEngine(self.dim, scramble=True, seed=seed)
        X = engine.draw(self.trials, dtype=torch.float64)
        responses = self.respond(X, 0, seed)
        others = (responses != responses[0]).nonzero()
        return X[: max(self.initial, int(others[0]) + 1)]

    def respond(self, X: Tensor, first: int, seed: int) -> Tensor:
        """Responses to the trials from a number on, ``n``. All ways share the random numbers."""
        generator = torch.Generator().manual_seed(seed)
        uniform = torch.rand(10_000, generator=generator, dtype=torch.float64)
        return (uniform[first : first + len(X)] < self.probability(X)).to(X)

    def test_stimuli(self) -> Tensor:
        """Stimuli at which answers are scored, ``1000 x d``."""
        engine = torch.quasirandom.SobolEngine(self.dim, scramble=True, seed=12345)
        return engine.draw(1000, dtype=torch.float64)

    def score(self, above: Tensor) -> dict[str, float]:
        """Brier score and share of errors of probabilities to be above the threshold.

        Args:
            above: Probabilities at `test_stimuli`.
        """
        truth = (self.probability(self.test_stimuli()) > self.threshold).to(above)
        return {
            "brier": float((above - truth).square().mean()),
            "error": float(((above > 0.5).to(above) - truth).abs().mean()),
        }


OBSERVERS = {
    "detection (2-d)": Observer(detection, 2, 0.75, 10, 60),
    "discrimination (2-d)": Observer(discrimination, 2, 0.75, 10, 60),
    "Hartmann (6-d)": Observer(hartmann, 6, 0.5, 20, 100),
    "properties (8-d)": Observer(many_properties, 8, 0.75, 20, 100),
}

#: After how many trials answers are scored.
EVERY = 10

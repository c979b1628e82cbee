"""A penalty that keeps the points of a batch apart."""

from __future__ import annotations

from typing import Any

import torch
from botorch.acquisition.acquisition import AcquisitionFunction
from torch import Tensor

#: Default distance between points, in units of the range of the bounds; see `fantasy_batch`.
SEPARATION = 0.01


class Separated(AcquisitionFunction):
    """An acquisition function with a penalty around given points.

    The penalty starts smoothly from zero at a certain distance, and soon exceeds any improvement
    of the acquisition function. Outside of that distance the value is unchanged.

    Args:
        function: The acquisition function.
        taken: ``k x d`` points to keep away from.
        bounds: ``2 x d`` bounds of the inputs.
        distance: The distance, as a root mean square over inputs, in units of the range of the
            bounds.
    """

    def __init__(
        self, function: AcquisitionFunction, taken: Tensor, bounds: Tensor, distance: float
    ) -> None:
        model: Any = getattr(function, "model", None)
        super().__init__(model=model)
        self.function = function
        # A root mean square over inputs as a Euclidean distance.
        self.radius = distance * taken.shape[-1] ** 0.5
        width = bounds[1] - bounds[0]
        self.scale = torch.where(width.isfinite() & (width > 0), width, 1.0)
        self.taken = taken / self.scale

    def set_X_pending(self, X_pending: Tensor | None = None) -> None:
        """Pass pending points on to the acquisition function.

        Args:
            X_pending: As in BoTorch.
        """
        self.function.set_X_pending(X_pending)

    def forward(self, X: Tensor) -> Tensor:
        """The value at ``b x q x d`` candidates, of shape ``b``."""
        value = self.function(X)
        penalty = self.overlap(X).square().sum((-2, -1))
        return value - 30 * (1 + value.detach().abs()) * penalty

    def overlap(self, X: Tensor) -> Tensor:
        """How close inputs are to the points to keep away from.

        Args:
            X: ``... x d`` inputs.

        Returns:
            ``... x k`` values: 1 at the point itself, 0 at the distance and beyond.
        """
        squared = (X.unsqueeze(-2) / self.scale - self.taken).square().sum(-1)
        # The square root has no gradient at zero. Any direction leads away from there.
        distance = squared.clamp_min(torch.finfo(X.dtype).tiny).sqrt()
        return (1 - distance / self.radius).clamp_min(0)

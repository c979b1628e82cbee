"""The graph of training data that were passed with one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from seqgp.observations import Observations


@dataclass(frozen=True)
class TrainingGraph:
    """Training data as they were passed, if they have a graph, such as the outputs of a network.

    The model learns from copies without it. In train mode it shows these, so that objectives can be
    differentiated with respect to them. Copies of a model have none, since tensors in the middle of
    a graph cannot be copied.

    Attributes:
        observations: What the model made of them. If it holds others now, the graph is outdated.
        inputs: ``batch_shape x n x d`` raw inputs.
        targets: ``batch_shape [x m] x n`` transformed targets.
    """

    observations: Observations
    inputs: Tensor
    targets: Tensor

    @classmethod
    def of(
        cls, observations: Observations, inputs: Tensor, targets: Tensor
    ) -> TrainingGraph | None:
        """The graph of tensors; ``None`` if there is none."""
        known = inputs.requires_grad or targets.requires_grad
        return cls(observations, inputs, targets) if known else None

    def to(self, fn: Callable[[Tensor], Tensor], observations: Observations) -> TrainingGraph:
        """The graph of converted tensors, of which these observations have been made."""
        return TrainingGraph(observations, fn(self.inputs), fn(self.targets))

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()

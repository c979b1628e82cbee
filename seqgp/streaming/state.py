"""What a stream has left behind: everything that an update changes beside the posterior."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from seqgp.observations import Observations


@dataclass(frozen=True)
class StreamState:
    """The state of a stream. An update makes a new one.

    Attributes:
        observations: What the model holds as it is (the memory): raw inputs, transformed targets.
        represents: ``n``, how many observations of the stream each of these stands for: the inverse
            of the probability that it was kept.
        num_seen: How many observations have been learnt, including those it no longer holds.
        num_updates: How many updates there have been.
        rule: The name of the rule by which the stream is learnt.
        classes_seen: The classes of a softmax that there have been so far.
        replay: For how much of what has been folded the memory stands, see `MemoryOptions`.
    """

    observations: Observations
    represents: Tensor
    num_seen: int
    num_updates: int = 0
    rule: str = "pseudo-likelihood"
    classes_seen: tuple[int, ...] = ()
    replay: float = 0.0

    @classmethod
    def begin(cls, observations: Observations) -> StreamState:
        """The state of a model that has been built with some observations."""
        n = len(observations)
        return cls(
            observations, observations.targets.new_ones(n, dtype=observations.inputs.dtype), n
        )

    def append(self, new: Observations) -> StreamState:
        """With more observations at hand, none of which counts as seen yet."""
        one = torch.ones(len(new), dtype=self.represents.dtype, device=self.represents.device)
        return replace(
            self,
            observations=self.observations.append(new),
            represents=torch.cat([self.represents, one]),
        )

    def select(self, index: Tensor) -> StreamState:
        """With some of the observations only."""
        return replace(
            self,
            observations=self.observations.select(index),
            represents=self.represents[index],
        )

    def to(self, convert: Callable[[Tensor], Tensor]) -> StreamState:
        """The same on another device or in another precision."""
        return replace(
            self,
            observations=self.observations.to(convert),
            represents=convert(self.represents),
        )

    @property
    def weights(self) -> Tensor | None:
        """``n``, how often each observation at hand counts; ``None`` for once."""
        return None if not self.replay else 1 + self.replay * (self.represents - 1)

    @property
    def summary_share(self) -> float:
        """How much of the summary counts; the rest is what the memory stands for."""
        return 1 - self.replay

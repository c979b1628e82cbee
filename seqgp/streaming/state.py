"""What a stream has left behind: everything that an update changes beside the posterior."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

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
        importance: ``n``, how much the memory's policy prefers each of these, set when it came.
        fade: ``n``, how much each of these still counts in a stream that drifts.
        fades: Whether any of these counts less than once.
        drift: The evidence for each of several discounts, see `seqgp.streaming.drift`.
        num_seen: How many observations have been learnt, including those it no longer holds.
        num_updates: How many updates there have been.
        rule: The name of the rule by which the stream is learnt.
        classes_seen: The classes of a softmax that there have been so far.
        replay: For how much of what has been folded the memory stands, see `MemoryOptions`.
        learned_at: How many observations had been seen when hyperparameters were learnt last.
        initial: The hyperparameters that the stream began with, by name.
        moments: ``3 [x m]``, the number, the mean and the sum of squared deviations of all targets
            so far, as they were observed; ``None`` if nobody needs them.
        warned: Whether it has been said that more inducing points would be needed.
        restarted_at: How many had been when learning last started from scratch as well.
    """

    observations: Observations
    represents: Tensor
    importance: Tensor
    fade: Tensor
    num_seen: int
    num_updates: int = 0
    rule: str = "pseudo-likelihood"
    classes_seen: tuple[int, ...] = ()
    replay: float = 0.0
    learned_at: int = 0
    restarted_at: int = 0
    fades: bool = False
    warned: bool = False
    drift: tuple[float, ...] = ()
    initial: dict[str, Tensor] = field(default_factory=dict)
    moments: Tensor | None = None

    @classmethod
    def begin(cls, observations: Observations) -> StreamState:
        """The state of a model that has been built with some observations."""
        n = len(observations)
        one = observations.inputs.new_ones(n)
        return cls(observations, one, one, one, n)

    def append(self, new: Observations) -> StreamState:
        """With more observations at hand, none of which counts as seen yet."""
        one = torch.ones(len(new), dtype=self.represents.dtype, device=self.represents.device)
        return replace(
            self,
            observations=self.observations.append(new),
            represents=torch.cat([self.represents, one]),
            importance=torch.cat([self.importance, one]),
            fade=torch.cat([self.fade, one]),
        )

    def select(self, index: Tensor) -> StreamState:
        """With some of the observations only."""
        return replace(
            self,
            observations=self.observations.select(index),
            represents=self.represents[index],
            importance=self.importance[index],
            fade=self.fade[index],
        )

    def to(self, convert: Callable[[Tensor], Tensor]) -> StreamState:
        """The same on another device or in another precision."""
        return replace(
            self,
            observations=self.observations.to(convert),
            represents=convert(self.represents),
            importance=convert(self.importance),
            fade=convert(self.fade),
            moments=None if self.moments is None else convert(self.moments),
            initial={name: convert(value) for name, value in self.initial.items()},
        )

    @property
    def weights(self) -> Tensor | None:
        """``n``, how often each observation at hand counts; ``None`` for once."""
        if not self.replay:
            return self.fade if self.fades else None
        return self.fade * (1 + self.replay * (self.represents - 1))

    @property
    def summary_share(self) -> float:
        """How much of the summary counts; the rest is what the memory stands for."""
        return 1 - self.replay

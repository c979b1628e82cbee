"""The state of a stream: everything that an update changes besides the posterior."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from seqgp.distributed import ALONE, Ranks
from seqgp.observations import Observations


@dataclass(frozen=True)
class Shard:
    """The shard of one process, if several processes share the observations.

    Attributes:
        ranks: The processes.
        position: ``n``, the place of each observation among those of all ranks, oldest first; new
            ones in the order of the ranks that they came to.
        total: The number of these.
        mean_noise: ``[m x] 1``, the mean of their noise variances, if they have such. Predictions,
            which do not communicate, take it for new ones.
    """

    ranks: Ranks
    position: Tensor
    total: int
    mean_noise: Tensor | None = None

    @classmethod
    def begin(cls, number: int, device: torch.device, ranks: Ranks) -> Shard:
        """The shard of the first observations, of which this rank has a given number."""
        return cls(ranks, torch.zeros(0, dtype=torch.long, device=device), 0).append(number)

    def append(self, number: int) -> Shard:
        """With so many observations more on this rank."""
        counts = self.ranks.counts(number)
        first = self.total + sum(counts[: self.ranks.rank])
        new = torch.arange(first, first + number, device=self.position.device)
        return replace(
            self, position=torch.cat([self.position, new]), total=self.total + sum(counts)
        )

    def among(self, kept: Tensor) -> Shard:
        """With positions among those that are kept, of which the positions so far are given."""
        return replace(self, position=torch.searchsorted(kept, self.position), total=len(kept))

    def gather(self, values: Tensor, dim: int = -1) -> Tensor:
        """Per-point values of all ranks, in the order of their positions."""
        order = self.ranks.gather(self.position).argsort()
        return self.ranks.gather(values, dim).index_select(dim, order)


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
        power: With a replay, each of these observations counts for this power of how many it stands
            for: once with 0, for all of them with 1.
        learned_at: How many observations had been seen when hyperparameters were learnt last.
        expected: The mean log density of observations like those so far, when hyperparameters were
            learnt last; ``None`` if they have not been.
        surprise: How many nats less probable than that new ones have been since.
        initial: The hyperparameters that the stream began with, by name.
        moments: ``3 [x m]``, the number, the mean and the sum of squared deviations of all targets
            so far, as they were observed; ``None`` if they are not needed.
        warned: Whether it has been said that more inducing points would be needed.
        restarted_at: How many had been when learning last started from scratch as well.
        shard: The place of these observations among those of all processes that share the stream;
            ``None`` for one process.
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
    power: float = 1.0
    learned_at: int = 0
    restarted_at: int = 0
    expected: float | None = None
    surprise: float = 0.0
    fades: bool = False
    warned: bool = False
    drift: tuple[float, ...] = ()
    initial: dict[str, Tensor] = field(default_factory=dict)
    moments: Tensor | None = None
    shard: Shard | None = None

    @classmethod
    def begin(cls, observations: Observations, ranks: Ranks = ALONE) -> StreamState:
        """The state of a model that has been built with some observations, on each rank."""
        n = len(observations)
        one = observations.inputs.new_ones(n)
        if ranks.alone:
            return cls(observations, one, one, one, n)
        shard = Shard.begin(n, one.device, ranks)
        return cls(observations, one, one, one, shard.total, shard=shard).noting_noise()

    def noting_noise(self) -> StreamState:
        """With the mean noise variance of the observations of all ranks."""
        noise = self.observations.arguments.get("noise")
        if self.shard is None or noise is None:
            return self
        (total,) = self.shard.ranks.sum(noise.sum(-1, keepdim=True))
        shard = replace(self.shard, mean_noise=total / max(self.num_held, 1))
        return replace(self, shard=shard)

    def whole(self) -> StreamState:
        """The state of a single process that holds the observations of all ranks."""
        if self.shard is None:
            return self
        order = self.shard.ranks.gather(self.shard.position).argsort()
        return replace(
            self,
            observations=self.observations.gathered(self.shard.ranks).select(order),
            represents=self.gather(self.represents),
            importance=self.gather(self.importance),
            fade=self.gather(self.fade),
            shard=None,
        )

    def split(self, ranks: Ranks) -> StreamState:
        """The state of one of several processes that share the observations evenly."""
        if ranks.alone:
            return self
        n, parts = len(self.observations), self.observations.first_parts
        first, last = (n * rank // ranks.size for rank in (ranks.rank, ranks.rank + 1))
        if parts is not None:  # those of an answer go to one process
            first, last = (int(parts[k]) if k < n else n for k in (first, last))
        index = torch.arange(first, last, device=self.fade.device)
        shard = Shard(ranks, index, n)
        return replace(self.select(index), shard=shard).noting_noise()

    @property
    def num_held(self) -> int:
        """How many observations are at hand, on all ranks."""
        return len(self.observations) if self.shard is None else self.shard.total

    def gather(self, values: Tensor, dim: int = -1) -> Tensor:
        """Values for each of the observations at hand, those of all ranks, oldest first."""
        return values if self.shard is None else self.shard.gather(values, dim)

    def own(self, values: Tensor) -> Tensor:
        """The values of this rank's observations, of those that `gather` returns."""
        return values if self.shard is None else values[..., self.shard.position]

    def append(self, new: Observations) -> StreamState:
        """With more observations at hand, none of which counts as seen yet."""
        one = torch.ones(len(new), dtype=self.represents.dtype, device=self.represents.device)
        return replace(
            self,
            observations=self.observations.append(new),
            represents=torch.cat([self.represents, one]),
            importance=torch.cat([self.importance, one]),
            fade=torch.cat([self.fade, one]),
            shard=None if self.shard is None else self.shard.append(len(new)),
        )

    def select(self, index: Tensor) -> StreamState:
        """With some of the observations only."""
        return replace(
            self,
            observations=self.observations.select(index),
            represents=self.represents[index],
            importance=self.importance[index],
            fade=self.fade[index],
            shard=None
            if self.shard is None
            else replace(self.shard, position=self.shard.position[index]),
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
            shard=None
            if self.shard is None
            else replace(self.shard, position=self.shard.position.to(convert(self.fade).device)),
            initial={name: convert(value) for name, value in self.initial.items()},
        )

    @property
    def weights(self) -> Tensor | None:
        """``n``, how often each observation at hand counts; ``None`` for once."""
        return self.counts if self.replay or self.fades else None

    @property
    def counts(self) -> Tensor:
        """``n``, how often each observation at hand is part of the posterior."""
        if not self.replay:
            return self.fade
        return self.fade * (1 + self.replay * (self.represents**self.power - 1))

    @property
    def summary_share(self) -> float:
        """How much of the summary counts; the rest is what the memory stands for."""
        return 1 - self.replay

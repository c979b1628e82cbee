"""The state of a stream: everything besides the posterior that an update changes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from seqgp.distributed import ALONE, Ranks
from seqgp.observations import Observations


@dataclass(frozen=True)
class Shard:
    """The observations of one process, if several processes share them.

    Attributes:
        ranks: The processes.
        position: ``n``, the position of each observation among those of all ranks, oldest first.
            Observations that arrive together are in the order of the ranks.
        total: The number of observations of all ranks.
        mean_noise: ``[m x] 1``, the mean of their noise variances, if they have any. Predictions,
            which do not communicate, use it for new observations.
    """

    ranks: Ranks
    position: Tensor
    total: int
    mean_noise: Tensor | None = None

    @classmethod
    def begin(cls, number: int, device: torch.device, ranks: Ranks) -> Shard:
        """Return the shard of the first observations, given their number on this rank."""
        return cls(ranks, torch.zeros(0, dtype=torch.long, device=device), 0).append(number)

    def append(self, number: int) -> Shard:
        """Return the shard with more observations, given their number on this rank."""
        counts = self.ranks.counts(number)
        first = self.total + sum(counts[: self.ranks.rank])
        new = torch.arange(first, first + number, device=self.position.device)
        return replace(
            self, position=torch.cat([self.position, new]), total=self.total + sum(counts)
        )

    def among(self, kept: Tensor) -> Shard:
        """Return the shard with positions among the kept ones, given the old positions of these."""
        return replace(self, position=torch.searchsorted(kept, self.position), total=len(kept))

    def gather(self, values: Tensor, dim: int = -1) -> Tensor:
        """Gather per-point values of all ranks, in the order of their positions."""
        order = self.ranks.gather(self.position).argsort()
        return self.ranks.gather(values, dim).index_select(dim, order)


@dataclass(frozen=True)
class StreamState:
    """The state of a stream. Each update creates a new one.

    Attributes:
        observations: The memory: observations that are kept as they are, with raw inputs and
            transformed targets.
        represents: ``n``, the number of observations of the stream that each of these stands for:
            the inverse of its inclusion probability.
        importance: ``n``, the preference of the memory's policy, set when an observation arrives.
        fade: ``n``, the remaining weight of each observation in a stream that drifts.
        fades: Whether any observation counts less than once.
        drift: The evidence for each of several discounts; see `seqgp.streaming.drift`.
        num_seen: The number of observations learnt, including those that are no longer kept.
        num_updates: The number of updates.
        rule: The name of the update rule of this stream.
        classes_seen: The classes of a softmax likelihood that have been observed.
        replay: The share of the summary that the memory replaces; see `MemoryOptions`.
        power: With a replay, each observation in memory counts ``represents ** power`` times: once
            for 0, as often as the observations that it stands for for 1.
        learned_at: The number of observations seen when hyperparameters were last learnt.
        expected: The mean log density of an observation of the stream when hyperparameters were
            last learnt; ``None`` if they have not been learnt.
        surprise: How many nats less probable than expected the observations since then were.
        patience: The factor by which a surprise has to be larger than usual to matter.
        initial: The hyperparameters at the start of the stream, by name.
        moments: ``3 [x m]``, the number, the mean and the sum of squared deviations of all targets
            so far, in their original units; ``None`` if they are not needed.
        bound: The evidence lower bound; ``None`` if the sites have never been converged.
        unexplained: By how many nats the inducing points lower the bound at the observations that
            have come since these were last chosen.
        warned: Whether the user has been warned that more inducing points are needed.
        restarted_at: The number of observations seen when learning last started from scratch.
        shard: The positions of these observations among those of all processes that share the
            stream; ``None`` for one process.
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
    patience: float = 1.0
    fades: bool = False
    bound: Tensor | None = None
    unexplained: float = 0.0
    warned: bool = False
    drift: tuple[float, ...] = ()
    initial: dict[str, Tensor] = field(default_factory=dict)
    moments: Tensor | None = None
    shard: Shard | None = None

    @classmethod
    def begin(cls, observations: Observations, ranks: Ranks = ALONE) -> StreamState:
        """Return the state of a model that was built with some observations, on each rank."""
        n = len(observations)
        one = observations.inputs.new_ones(n)
        if ranks.alone:
            return cls(observations, one, one, one, n)
        shard = Shard.begin(n, one.device, ranks)
        return cls(observations, one, one, one, shard.total, shard=shard).noting_noise()

    def noting_noise(self) -> StreamState:
        """Return the state with the mean noise variance of the observations of all ranks."""
        noise = self.observations.arguments.get("noise")
        if self.shard is None or noise is None:
            return self
        (total,) = self.shard.ranks.sum(noise.sum(-1, keepdim=True))
        shard = replace(self.shard, mean_noise=total / max(self.num_held, 1))
        return replace(self, shard=shard)

    def whole(self) -> StreamState:
        """Return the state of a single process that holds the observations of all ranks."""
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
        """Return the state of one of several processes that share the observations evenly."""
        if ranks.alone:
            return self
        n, parts = len(self.observations), self.observations.first_parts
        first, last = (n * rank // ranks.size for rank in (ranks.rank, ranks.rank + 1))
        if parts is not None:  # all parts of an answer go to one process
            first, last = (int(parts[k]) if k < n else n for k in (first, last))
        index = torch.arange(first, last, device=self.fade.device)
        shard = Shard(ranks, index, n)
        return replace(self.select(index), shard=shard).noting_noise()

    @property
    def num_held(self) -> int:
        """The number of observations at hand, on all ranks."""
        return len(self.observations) if self.shard is None else self.shard.total

    def gather(self, values: Tensor, dim: int = -1) -> Tensor:
        """Gather per-point values of the observations at hand on all ranks, oldest first."""
        return values if self.shard is None else self.shard.gather(values, dim)

    def own(self, values: Tensor) -> Tensor:
        """Return this rank's part of values as `gather` returns them."""
        return values if self.shard is None else values[..., self.shard.position]

    def append(self, new: Observations) -> StreamState:
        """Return the state with more observations at hand; these do not count as seen yet."""
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
        """Return the state with a selection of the observations."""
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
        """Return the state on another device or in another precision."""
        return replace(
            self,
            observations=self.observations.to(convert),
            represents=convert(self.represents),
            importance=convert(self.importance),
            fade=convert(self.fade),
            moments=None if self.moments is None else convert(self.moments),
            bound=None if self.bound is None else convert(self.bound),
            shard=None
            if self.shard is None
            else replace(self.shard, position=self.shard.position.to(convert(self.fade).device)),
            initial={name: convert(value) for name, value in self.initial.items()},
        )

    @property
    def weights(self) -> Tensor | None:
        """``n``, the weight of each observation at hand; ``None`` if all count once."""
        return self.counts if self.replay or self.fades else None

    @property
    def counts(self) -> Tensor:
        """``n``, the weight of each observation at hand in the posterior."""
        if not self.replay:
            return self.fade
        return self.fade * (1 + self.replay * (self.represents**self.power - 1))

    @property
    def summary_share(self) -> float:
        """The share of the summary that counts; the memory replaces the rest."""
        return 1 - self.replay

"""The memory: which observations of a stream are kept as they are.

A `MemoryPolicy` chooses them by their leverage scores. Subclass it for one of your own, or pass a
function ``policy(leverage, size, generator)`` that returns the indices of at most ``size`` of ``n``
observations, oldest first.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from numbers import Real

import numpy as np
import torch
from torch import Tensor

from seqgp.validation import is_whole

#: A policy as a function.
PolicyFunction = Callable[[Tensor, int, torch.Generator], Tensor]


class MemoryPolicy(ABC):
    """Chooses which observations to keep."""

    #: Whether what it chooses has to be checked.
    is_checked = True

    @abstractmethod
    def choose(self, leverage: Tensor, size: int, generator: torch.Generator) -> Tensor:
        """Indices of at most ``size`` of ``n`` observations, in increasing order.

        Args:
            leverage: ``n`` leverage scores on the CPU, oldest observation first.
            size: The largest number of indices.
            generator: For draws, on the CPU.
        """

    def inclusion(self, leverage: Tensor, size: int) -> Tensor:
        """``n``, the probability of each observation to be chosen; by default the same for all.

        Args:
            leverage: ``n`` leverage scores.
            size: How many are chosen.
        """
        return torch.full_like(leverage, size / max(len(leverage), 1))


class ByLeverage(MemoryPolicy):
    """Draw without replacement, with probabilities proportional to the leverage scores."""

    is_checked = False

    def choose(self, leverage: Tensor, size: int, generator: torch.Generator) -> Tensor:
        """Those with the largest of exponential keys (Efraimidis and Spirakis, 2006)."""
        weights = _positive(leverage.double())
        uniform = torch.rand(
            len(weights), dtype=torch.float64, generator=generator, device=weights.device
        )
        keys = uniform.clamp_min(torch.finfo(torch.float64).tiny).log() / weights
        return keys.topk(size).indices.sort().values

    def inclusion(self, leverage: Tensor, size: int) -> Tensor:
        r"""Probabilities to be among ``size`` that are drawn.

        For successive draws without replacement, :math:`1 - \exp(-t h_i)` with the one
        :math:`t` for which they add up to ``size`` (Rosen, 1972), found by bisection.

        Args:
            leverage: ``n`` leverage scores.
            size: How many are chosen.
        """
        share = _positive(leverage.double()).cpu().numpy()
        share = share / share.mean()
        low, high = -40.0, 40.0  # log t
        for _ in range(60):
            middle = 0.5 * (low + high)
            total = -np.expm1(-math.exp(middle) * share).sum()
            low, high = (middle, high) if total < size else (low, middle)
        return torch.from_numpy(-np.expm1(-math.exp(high) * share)).to(leverage)


class AtRandom(MemoryPolicy):
    """Draw without replacement, all alike."""

    is_checked = False

    def choose(self, leverage: Tensor, size: int, generator: torch.Generator) -> Tensor:
        """The first of a random permutation."""
        order = torch.randperm(len(leverage), generator=generator, device=leverage.device)
        return order[:size].sort().values


class MostRecent(MemoryPolicy):
    """Keep the newest ones."""

    is_checked = False

    def choose(self, leverage: Tensor, size: int, generator: torch.Generator) -> Tensor:
        """The last ones."""
        return torch.arange(len(leverage) - size, len(leverage), device=leverage.device)


class FunctionPolicy(MemoryPolicy):
    """A policy that is given as a function.

    Args:
        function: As described at the top of this module.
    """

    def __init__(self, function: PolicyFunction) -> None:
        self.function = function

    def choose(self, leverage: Tensor, size: int, generator: torch.Generator) -> Tensor:
        """What the function returns."""
        return self.function(leverage, size, generator)


def _positive(leverage: Tensor) -> Tensor:
    """Scores of zero, of points that taught nothing, may still fill an empty place."""
    return leverage.clamp_min(leverage.max() * 1e-12 + torch.finfo(leverage.dtype).tiny)


#: Policies by their short names.
POLICIES: dict[str, MemoryPolicy] = {
    "leverage": ByLeverage(),
    "random": AtRandom(),
    "recent": MostRecent(),
}


def _ask(policy: MemoryPolicy, leverage: Tensor, size: int, generator: torch.Generator) -> Tensor:
    """What a policy chooses, which may be the user's own."""
    chosen = policy.choose(leverage, size, generator)
    if not policy.is_checked:
        return chosen
    if not isinstance(chosen, Tensor) or chosen.dim() != 1 or chosen.dtype != torch.long:
        raise TypeError(
            f"policy: expected a function that returns a tensor of indices, got {chosen!r:.80}."
        )
    within = bool(((chosen >= 0) & (chosen < len(leverage))).all())
    if not within or len(chosen) > size or len(chosen.unique()) < len(chosen):
        raise ValueError(
            f"policy: expected at most {size} indices below {len(leverage)}, each once, got "
            f"{chosen.tolist()!r:.80}."
        )
    return chosen.to(leverage.device)


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _even_shares(counts: list[int], total: int | float | None) -> list[int | None]:
    """``total`` places for groups of some sizes: as even as it goes, none empty if it can be."""
    if total is None:
        return [None for _ in counts]
    shares: list[int | None] = [0 for _ in counts]
    left = int(total)
    for number, k in enumerate(sorted(range(len(counts)), key=lambda k: counts[k])):
        share = min(counts[k], left // (len(counts) - number))
        shares[k], left = share, left - share
    return shares


@dataclass(frozen=True)
class MemoryOptions:
    """How much of a stream is remembered, and what.

    Attributes:
        capacity: The largest number of observations that are kept, or, as a ``float`` between 0
            and 1, their share of all that have been seen (at least one of them); ``None`` for no
            limit.
        per_update: The largest number of new ones that are taken over at each update; ``None``
            for no limit. With a limit, old ones are only given up if the capacity demands it.
        policy: ``"leverage"``, ``"random"``, ``"recent"``, ``"none"``, a `MemoryPolicy` or a
            function.
        seed: Seed of the draws.
        replay: For how much of what has been folded the memory stands, from 0 to 1. A folded
            observation that is not Gaussian keeps the site that it had, which grows stale as the
            posterior moves on. With 0 (the default) that has to do. With 1 the summary does not
            count; instead every remembered observation counts for all those that it was drawn
            from, by the inverse of the probability of being kept: for a memory that is large, and
            a posterior that moves far. In between, each counts in part.
        balance: Whether the classes of a classification share the places evenly, as far as there
            are enough of each.

    Example:
        >>> import torch
        >>> from seqgp.streaming.memory import MemoryOptions
        >>> options = MemoryOptions(capacity=3, policy="recent")
        >>> options.choose(torch.rand(10), num_new=4, update=0)
        tensor([7, 8, 9])
        >>> def largest(leverage, size, generator):  # a policy of your own
        ...     return leverage.topk(size).indices.sort().values
        >>> MemoryOptions(capacity=2, policy=largest).choose(torch.arange(5.0), 2, 0)
        tensor([3, 4])
    """

    capacity: int | float | None = 500
    per_update: int | None = None
    policy: str | MemoryPolicy | PolicyFunction = "leverage"
    seed: int = 0
    replay: float = 0.0
    balance: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.policy, str) and self.policy not in {*POLICIES, "none"}:
            names = ", ".join(map(repr, [*POLICIES, "none"]))
            raise ValueError(f"policy: expected one of {names} or a function, got {self.policy!r}.")
        known = isinstance(self.policy, str | MemoryPolicy) or callable(self.policy)
        if not known or isinstance(self.policy, type):
            raise TypeError(f"policy: expected a name or a function, got {self.policy!r}.")
        if not _is_number(self.replay):
            raise TypeError(f"replay: expected a number in [0, 1], got {self.replay!r}.")
        if not 0 <= self.replay <= 1:
            raise ValueError(f"replay: expected a number in [0, 1], got {self.replay}.")
        if self.replay and (self.policy == "none" or 0 in (self.capacity, self.per_update)):
            raise ValueError("replay: nothing is remembered that could stand for the rest.")
        for name in ("capacity", "per_update"):
            value = getattr(self, name)
            if value is None:
                continue
            if not is_whole(value) and (name != "capacity" or not _is_number(value)):
                share = ", or a share of what has been seen," if name == "capacity" else ""
                raise TypeError(f"{name}: expected a whole number{share} or None, got {value!r}.")
            if not value >= 0:
                raise ValueError(f"{name}: expected a number of observations, got {value}.")
            python = int(value) if is_whole(value) else float(value)
            object.__setattr__(self, name, python)  # NumPy's become Python's
        if isinstance(self.capacity, float) and self.capacity > 1:
            raise ValueError(
                f"capacity: expected a whole number, or a share between 0 and 1, got "
                f"{self.capacity}."
            )

    @classmethod
    def of(cls, given: MemoryOptions | int) -> MemoryOptions:
        """Options as they are, or from a number of observations."""
        if isinstance(given, MemoryOptions):
            return given
        if is_whole(given):
            return cls(capacity=int(given))
        share = f"; a share of what has been seen is MemoryOptions({given})"
        raise TypeError(
            f"memory: expected MemoryOptions or a whole number of observations, got {given!r}"
            f"{share if isinstance(given, float) and 0 < given <= 1 else ''}."
        )

    def at(self, num_seen: int) -> MemoryOptions:
        """The same with the capacity as a number, once so many observations have been seen."""
        if not isinstance(self.capacity, float):
            return self
        # A share of few is one of them, not none.
        number = max(int(self.capacity * num_seen), 1) if self.capacity else 0
        return replace(self, capacity=number)

    @property
    def chooser(self) -> MemoryPolicy | None:
        """The policy as an object; ``None`` if nothing is to be remembered."""
        if isinstance(self.policy, MemoryPolicy):
            return self.policy
        if isinstance(self.policy, str):
            return POLICIES.get(self.policy)
        return FunctionPolicy(self.policy)

    def inclusion_of(self, leverage: Tensor, num_new: int, classes: Tensor | None = None) -> Tensor:
        """How probable it was for each of ``n`` observations to be kept; arguments as `choose`."""
        n, probability = len(leverage), torch.ones_like(leverage)
        if self.balance and classes is not None:
            for index, options, number in self._by_class(classes, num_new):
                probability[index] = options.inclusion_of(leverage[index], number)
            return probability
        chooser, expected = self.chooser, float(n)
        if chooser is None:
            chooser = POLICIES["random"]
        if self.per_update is not None and num_new > self.per_update:
            new = slice(n - num_new, n)
            probability[new] = chooser.inclusion(leverage[new], self.per_update)
            expected += self.per_update - num_new
        if self.capacity is not None and expected > self.capacity:
            probability = probability * chooser.inclusion(leverage, int(self.capacity))
        return probability.clamp_min(torch.finfo(leverage.dtype).tiny)

    def _by_class(
        self, classes: Tensor, num_new: int
    ) -> Iterator[tuple[Tensor, MemoryOptions, int]]:
        """Indices of the observations of each class, what they may take, and how many are new."""
        labels, members = classes.unique(return_inverse=True)
        is_new = torch.arange(len(classes), device=classes.device) >= len(classes) - num_new
        index = [(members == k).nonzero().squeeze(-1) for k in range(len(labels))]
        new = [int(is_new[i].sum()) for i in index]
        capacity = _even_shares([len(i) for i in index], self.capacity)
        per_update = _even_shares(new, self.per_update)
        for k, i in enumerate(index):
            options = replace(
                self,
                capacity=capacity[k],
                per_update=per_update[k],
                seed=self.seed + 7919 * k,
                replay=0.0,
                balance=False,
            )
            yield i, options, new[k]

    def choose(
        self, leverage: Tensor, num_new: int, update: int, classes: Tensor | None = None
    ) -> Tensor:
        """Indices of the observations to keep.

        Args:
            leverage: ``n`` leverage scores, those of the ``num_new`` new observations last.
            num_new: How many are new.
            update: The number of the update, which with the seed determines the draws.
            classes: ``n`` classes, for a balance between them.
        """
        n, device, policy = len(leverage), leverage.device, self.chooser
        if self.balance and classes is not None and policy is not None:
            chosen = [
                index[options.choose(leverage[index], number, update)]
                for index, options, number in self._by_class(classes, num_new)
            ]
            return torch.cat([*chosen, torch.arange(0, device=device)]).sort().values
        if policy is None or self.capacity == 0:
            return torch.arange(0, device=device)
        host = torch.device("cpu")
        scores = leverage.detach().to(host)
        generator = torch.Generator(host).manual_seed(self.seed * 1_000_003 + update)
        candidates = torch.arange(n, device=host)
        if self.per_update is not None and num_new > self.per_update:
            old = n - num_new
            candidates = candidates[:old]
            if self.per_update:
                new = _ask(policy, scores[old:], self.per_update, generator)
                candidates = torch.cat([candidates, old + new])
        if self.capacity is not None and len(candidates) > self.capacity:
            kept = _ask(policy, scores[candidates], int(self.capacity), generator)
            candidates = candidates[kept]
        return candidates.to(device)

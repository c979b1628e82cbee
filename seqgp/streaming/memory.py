"""The memory: which observations of a stream are kept as they are.

A policy is any function ``policy(leverage, size, generator)`` that returns the indices of at most
``size`` of ``n`` observations, oldest first, given their leverage scores (``n``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from numbers import Real

import torch
from torch import Tensor

from seqgp.validation import is_whole

Policy = Callable[[Tensor, int, torch.Generator], Tensor]


def by_leverage(leverage: Tensor, size: int, generator: torch.Generator) -> Tensor:
    """Draw without replacement, with probabilities proportional to the leverage scores."""
    weights = _positive(leverage.detach().to(device="cpu", dtype=torch.float64))
    drawn = torch.multinomial(weights, size, replacement=False, generator=generator)
    return drawn.sort().values.to(leverage.device)


def _positive(leverage: Tensor) -> Tensor:
    """Scores of zero, of points that taught nothing, may still fill an empty place."""
    return leverage.clamp_min(leverage.max() * 1e-12 + torch.finfo(leverage.dtype).tiny)


def at_random(leverage: Tensor, size: int, generator: torch.Generator) -> Tensor:
    """Draw without replacement, all alike."""
    order = torch.randperm(len(leverage), generator=generator, device="cpu")
    return order[:size].sort().values.to(leverage.device)


def most_recent(leverage: Tensor, size: int, generator: torch.Generator) -> Tensor:
    """The newest ones."""
    n = len(leverage)
    return torch.arange(n - size, n, device=leverage.device)


POLICIES: dict[str, Policy] = {
    "leverage": by_leverage,
    "random": at_random,
    "recent": most_recent,
}


def _ask(policy: Policy, leverage: Tensor, size: int, generator: torch.Generator) -> Tensor:
    """What a policy chooses, which may be the user's own."""
    chosen = policy(leverage, size, generator)
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
    return chosen


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
        policy: ``"leverage"``, ``"random"``, ``"recent"``, ``"none"`` or a function.
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
    policy: str | Policy = "leverage"
    seed: int = 0
    replay: float = 0.0
    balance: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.policy, str) and self.policy not in {*POLICIES, "none"}:
            names = ", ".join(map(repr, [*POLICIES, "none"]))
            raise ValueError(f"policy: expected one of {names} or a function, got {self.policy!r}.")
        if not isinstance(self.policy, str) and not callable(self.policy):
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

    def inclusion_of(self, leverage: Tensor, num_new: int, classes: Tensor | None = None) -> Tensor:
        """How probable it was for each of ``n`` observations to be kept; arguments as `choose`."""
        n, probability = len(leverage), torch.ones_like(leverage)
        if self.balance and classes is not None:
            for index, options, number in self._by_class(classes, num_new):
                probability[index] = options.inclusion_of(leverage[index], number)
            return probability
        if self.per_update is not None and num_new > self.per_update:
            new = slice(n - num_new, n)
            probability[new] = self._inclusion(leverage[new], self.per_update)
        expected = float(probability.sum())
        if self.capacity is not None and expected > self.capacity:
            probability = probability * self._inclusion(leverage, int(self.capacity))
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

    def _inclusion(self, leverage: Tensor, size: int) -> Tensor:
        r"""Probabilities to be among ``size`` that are drawn.

        For successive draws without replacement, :math:`1 - \exp(-t h_i)` with the one
        :math:`t` for which they add up to ``size`` (Rosen, 1972), found by bisection.
        """
        if self.policy != "leverage":
            return torch.full_like(leverage, size / len(leverage))
        share = _positive(leverage.double())
        share = share / share.mean()
        low, high = -40.0, 40.0  # log t
        for _ in range(60):
            middle = 0.5 * (low + high)
            total = float(-torch.expm1(-math.exp(middle) * share).sum())
            low, high = (middle, high) if total < size else (low, middle)
        return -torch.expm1(-math.exp(high) * share).to(leverage)

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
        n, device = len(leverage), leverage.device
        if self.balance and classes is not None and self.policy != "none":
            chosen = [
                index[options.choose(leverage[index], number, update)]
                for index, options, number in self._by_class(classes, num_new)
            ]
            return torch.cat([*chosen, torch.arange(0, device=device)]).sort().values
        if self.policy == "none":
            return torch.arange(0, device=device)
        policy = POLICIES[self.policy] if isinstance(self.policy, str) else self.policy
        if self.capacity == 0:
            return torch.arange(0, device=device)
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + update)
        candidates = torch.arange(n, device=device)
        if self.per_update is not None and num_new > self.per_update:
            old = n - num_new
            candidates = candidates[:old]
            if self.per_update:
                new = _ask(policy, leverage[old:], self.per_update, generator)
                candidates = torch.cat([candidates, old + new])
        if self.capacity is not None and len(candidates) > self.capacity:
            kept = _ask(policy, leverage[candidates], int(self.capacity), generator)
            candidates = candidates[kept]
        return candidates

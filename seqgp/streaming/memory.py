"""The memory: which observations of a stream are kept as they are.

A `MemoryPolicy` chooses them by their leverage scores. For a policy of your own, write a subclass,
or pass a function ``policy(leverage, size, generator)`` that returns the indices of at most
``size`` of ``n`` observations. The oldest observation comes first.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from numbers import Real
from typing import NamedTuple

import torch
from torch import Tensor

from seqgp.validation import is_whole

#: A policy as a function.
PolicyFunction = Callable[[Tensor, int, torch.Generator], Tensor]


class MemoryPolicy(ABC):
    """A policy that chooses which observations to keep."""

    #: Whether the indices that it returns are validated.
    is_checked = True

    @abstractmethod
    def choose(self, leverage: Tensor, size: int, generator: torch.Generator) -> Tensor:
        """Return indices of at most ``size`` of ``n`` observations, in increasing order.

        Args:
            leverage: ``n`` leverage scores on the CPU, oldest observation first.
            size: The maximum number of indices.
            generator: The random generator, on the CPU.
        """


class SamplingPolicy(MemoryPolicy):
    r"""A policy that keeps a sample that represents the whole stream.

    Each observation has an importance :math:`w_i`, which is set once, when the observation arrives.
    The sample is drawn as in VarOpt (Cohen, Duffield, Kaplan, Lund and Thorup, 2009). With a
    threshold :math:`\tau` that never decreases, an observation is kept with probability
    :math:`\min(1, w_i / \tau)`, and then stands for :math:`\max(1, \tau / w_i)` observations. Sums
    over the sample with these weights are unbiased estimates of sums over the stream. The weights
    are bounded: they do not multiply from update to update.
    """

    is_checked = False
    #: Whether importances depend on leverage scores, which are not computed otherwise.
    uses_leverage = True

    def importance(self, leverage: Tensor) -> Tensor:
        """Return ``n`` positive importances of new observations; by default all are equal.

        Args:
            leverage: ``n`` leverage scores.
        """
        return torch.ones_like(leverage)

    def choose(self, leverage: Tensor, size: int, generator: torch.Generator) -> Tensor:
        """Draw a sample of observations that are all new."""
        return draw(inclusion(self.importance(leverage), size), generator)


class AtRandom(SamplingPolicy):
    """A uniform sample of the stream."""

    uses_leverage = False


class ByLeverage(SamplingPolicy):
    """A sample of the stream that prefers observations with large leverage scores.

    Half of the importance is shared evenly, so that an observation stands for at most twice as many
    observations as it would in a uniform sample. Scores are relative to the mean of their batch:
    early batches have large scores only because little was known before.
    """

    def importance(self, leverage: Tensor) -> Tensor:
        """Return one half, plus half of the score relative to the mean score of the batch."""
        mean = leverage.mean() if len(leverage) else 1.0
        scores = leverage / mean if len(leverage) and bool(mean > 0) else torch.ones_like(leverage)
        return 0.5 + 0.5 * scores


def summed_over_parts(leverage: Tensor, first: Tensor) -> Tensor:
    """Return ``n`` leverage scores of answers: the sum of the scores of their parts.

    Args:
        leverage: ``n`` scores of the parts.
        first: ``n``, for each part, the index of the first part of its answer.
    """
    return torch.zeros_like(leverage).index_add(0, first, leverage)[first]


def inclusion(sizes: Tensor, number: int) -> Tensor:
    r"""Return the probabilities :math:`\min(1, s_i / \tau)` that add up to a given number.

    Args:
        sizes: ``n`` positive sizes.
        number: The sum of the probabilities, if it is at most ``n``.
    """
    n = len(sizes)
    if number >= n:
        return torch.ones_like(sizes)
    if number == 0:
        return torch.zeros_like(sizes)
    ordered = sizes.double().sort(descending=True).values
    # With the k largest kept for certain, tau = sum of the other sizes / number of other places.
    rest = ordered.flip(0).cumsum(0).flip(0)
    places = number - torch.arange(n, device=sizes.device)
    tau = rest[:number] / places[:number]
    certain = int((ordered[:number] >= tau).sum())
    tau_now = tau[min(certain, number - 1)]
    return (sizes.double() / tau_now).clamp_max(1.0).to(sizes)


def draw(probability: Tensor, generator: torch.Generator) -> Tensor:
    """Draw a sample with given inclusion probabilities, and return its indices in increasing order.

    This is systematic sampling in random order: the size of the sample is the sum of the
    probabilities.

    Args:
        probability: ``n`` probabilities that add up to a whole number.
        generator: The random generator, on the CPU.
    """
    host = torch.device("cpu")
    order = torch.randperm(len(probability), generator=generator, device=host)
    start = torch.rand((), dtype=torch.float64, generator=generator, device=host)
    upper = probability.detach().to(host, torch.float64)[order].cumsum(0)
    total = round(float(upper[-1])) if len(upper) else 0
    if len(upper):
        upper[-1] = total  # removes the rounding error
    # An observation is kept if one of the points start, start + 1, ... lies in its interval.
    ticks = (upper - start).ceil().clamp(0, total)
    kept = ticks.diff(prepend=torch.zeros_like(ticks[:1])) > 0
    return order[kept].sort().values


class MostRecent(MemoryPolicy):
    """A policy that keeps the newest observations."""

    is_checked = False

    def choose(self, leverage: Tensor, size: int, generator: torch.Generator) -> Tensor:
        """Return the last ``size`` indices."""
        return torch.arange(len(leverage) - size, len(leverage), device=leverage.device)


class FunctionPolicy(MemoryPolicy):
    """A policy given as a function.

    Args:
        function: The function, as described at the top of this module.
    """

    def __init__(self, function: PolicyFunction) -> None:
        self.function = function

    def choose(self, leverage: Tensor, size: int, generator: torch.Generator) -> Tensor:
        """Call the function."""
        return self.function(leverage, size, generator)


#: Policies by their short names.
POLICIES: dict[str, MemoryPolicy] = {
    "leverage": ByLeverage(),
    "random": AtRandom(),
    "recent": MostRecent(),
}


class Choice(NamedTuple):
    """The observations that are kept out of ``n``.

    Attributes:
        kept: Indices, in increasing order.
        inclusion: ``n`` inclusion probabilities; only those of the kept observations matter.
    """

    kept: Tensor
    inclusion: Tensor


def _ask(
    policy: MemoryPolicy, leverage: Tensor, sizes: Tensor, size: int, generator: torch.Generator
) -> Choice:
    """Ask a policy for its choice, and validate it if the policy is the user's own."""
    if isinstance(policy, SamplingPolicy):
        probability = inclusion(sizes, size)
        return Choice(draw(probability, generator), probability)
    if not size:
        return Choice(torch.arange(0, device=leverage.device), torch.ones_like(leverage))
    chosen = policy.choose(leverage, size, generator)
    alike = torch.full_like(leverage, min(size / max(len(leverage), 1), 1.0))
    if not policy.is_checked:
        return Choice(chosen, alike)
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
    return Choice(chosen.to(leverage.device), alike)


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _even_shares(counts: list[int], total: int | float | None) -> list[int | None]:
    """Distribute ``total`` places over groups of given sizes, as evenly as possible."""
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
    """How many observations of a stream are kept in memory, and which.

    Attributes:
        capacity: The maximum number of observations in memory. A ``float`` between 0 and 1 is a
            share of all observations so far (at least one is kept). ``None`` means no limit.
        per_update: The maximum number of new observations that each update adds to the memory.
            ``None`` means no limit. With a limit, old observations leave the memory only if the
            capacity requires it.
        policy: ``"leverage"``, ``"random"``, ``"recent"``, ``"none"``, a `MemoryPolicy` or a
            function.
        seed: Seed of the random choice.
        replay: How much of the summary is replaced by the memory, from 0 to 1. The summary freezes
            the contribution of an observation that is not Gaussian, and this becomes outdated as
            the posterior changes. 0 always uses the summary. 1 ignores the summary, and weights
            each observation in memory by the number of observations that it represents. This is
            for a large memory and a posterior that changes a lot. Values in between use both in
            part. ``None`` (the default) decides along the stream (`seqgp.streaming.replay`): the
            summary is used unless the memory alone predicts better.
        balance: Whether the classes of a classification get equal shares of the memory, as far as
            there are enough observations of each.

    Example:
        >>> import torch
        >>> from seqgp.streaming.memory import MemoryOptions
        >>> options = MemoryOptions(capacity=3, policy="recent")
        >>> options.choose(torch.rand(10), num_new=4, update=0).kept
        tensor([7, 8, 9])
        >>> def largest(leverage, size, generator):  # a policy of your own
        ...     return leverage.topk(size).indices.sort().values
        >>> MemoryOptions(capacity=2, policy=largest).choose(torch.arange(5.0), 2, 0).kept
        tensor([3, 4])
    """

    capacity: int | float | None = 2000
    per_update: int | None = None
    policy: str | MemoryPolicy | PolicyFunction = "random"
    seed: int = 0
    replay: float | None = None
    balance: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.policy, str) and self.policy not in {*POLICIES, "none"}:
            names = ", ".join(map(repr, [*POLICIES, "none"]))
            raise ValueError(f"policy: expected one of {names} or a function, got {self.policy!r}.")
        known = isinstance(self.policy, str | MemoryPolicy) or callable(self.policy)
        if not known or isinstance(self.policy, type):
            raise TypeError(f"policy: expected a name or a function, got {self.policy!r}.")
        if self.replay is not None and not _is_number(self.replay):
            raise TypeError(f"replay: expected a number in [0, 1] or None, got {self.replay!r}.")
        if self.replay is not None and not 0 <= self.replay <= 1:
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
            object.__setattr__(self, name, python)  # also converts NumPy scalars
        if isinstance(self.capacity, float) and self.capacity > 1:
            raise ValueError(
                f"capacity: expected a whole number, or a share between 0 and 1, got "
                f"{self.capacity}."
            )

    @classmethod
    def of(cls, given: MemoryOptions | int) -> MemoryOptions:
        """Return options, given the options themselves or a number of observations."""
        if isinstance(given, MemoryOptions):
            return given
        if is_whole(given):
            return cls(capacity=int(given))
        is_share = isinstance(given, float) and 0 < given <= 1
        if isinstance(given, Tensor):
            raise TypeError(
                "memory: expected MemoryOptions or a whole number of observations, got a tensor; "
                "variances of the noise are passed by name, as noise=."
            )
        raise TypeError(
            f"memory: expected MemoryOptions or a whole number of observations, got {given!r}; "
            + (
                f"MemoryOptions({given}) keeps this share of all observations."
                if is_share
                else "MemoryOptions(None) keeps all observations."
            )
        )

    def at(self, num_seen: int) -> MemoryOptions:
        """Return options whose capacity is a number, for a given number of observations seen."""
        if not isinstance(self.capacity, float):
            return self
        # A positive share is at least one observation.
        number = max(int(self.capacity * num_seen), 1) if self.capacity else 0
        return replace(self, capacity=number)

    @property
    def chooser(self) -> MemoryPolicy | None:
        """The policy as an object; ``None`` if nothing is kept."""
        if isinstance(self.policy, MemoryPolicy):
            return self.policy
        if isinstance(self.policy, str):
            return POLICIES.get(self.policy)
        return FunctionPolicy(self.policy)

    @property
    def is_sample(self) -> bool:
        """Whether the memory is a random sample of the stream."""
        some = self.capacity is None or self.capacity > 0
        return some and self.per_update != 0 and isinstance(self.chooser, SamplingPolicy)

    def _by_class(
        self, classes: Tensor, num_new: int
    ) -> Iterator[tuple[Tensor, MemoryOptions, int]]:
        """Yield, for each class, its indices, its options and its number of new observations."""
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

    def choose_answers(
        self,
        first: Tensor | None,
        leverage: Tensor,
        num_new: int,
        update: int,
        classes: Tensor | None = None,
        sizes: Tensor | None = None,
    ) -> Choice:
        """Choose as `choose` does, but keep all parts of an answer together.

        The capacity counts answers. Leverage, classes and sizes are those of answers, the same for
        all parts of an answer.

        Args:
            first: ``n``, for each observation, the index of the first part of its answer; ``None``
                if each observation is an answer of its own.
            leverage: See `choose`.
            num_new: See `choose`.
            update: See `choose`.
            classes: See `choose`.
            sizes: See `choose`.
        """
        if first is None:
            return self.choose(leverage, num_new, update, classes, sizes)
        at = first.unique()
        answer = torch.searchsorted(at, first)
        chosen = self.choose(
            leverage[at],
            int((at >= len(first) - num_new).sum()),
            update,
            None if classes is None else classes[at],
            None if sizes is None else sizes[at],
        )
        is_kept = torch.zeros(len(at), dtype=torch.bool, device=at.device)
        is_kept[chosen.kept] = True
        return Choice(is_kept[answer].nonzero().squeeze(-1), chosen.inclusion[answer])

    def choose(
        self,
        leverage: Tensor,
        num_new: int,
        update: int,
        classes: Tensor | None = None,
        sizes: Tensor | None = None,
    ) -> Choice:
        """Choose the observations to keep.

        Args:
            leverage: ``n`` leverage scores; those of the new observations come last.
            num_new: The number of new observations.
            update: The number of the update. Together with the seed, it determines the random
                draws.
            classes: ``n`` classes, for a balance between them.
            sizes: ``n``, importance times the number of observations that each stands for; by
                default all are equal.
        """
        n, device, policy = len(leverage), leverage.device, self.chooser
        sizes = torch.ones_like(leverage) if sizes is None else sizes
        probability = torch.ones_like(leverage)
        if self.balance and classes is not None and policy is not None:
            parts = []
            for index, options, number in self._by_class(classes, num_new):
                part = options.choose(leverage[index], number, update, None, sizes[index])
                parts.append(index[part.kept])
                probability[index] = part.inclusion
            empty = torch.arange(0, device=device)
            return Choice(torch.cat([*parts, empty]).sort().values, probability)
        if policy is None or self.capacity == 0:
            return Choice(torch.arange(0, device=device), probability)
        host = torch.device("cpu")
        scores, sizes = leverage.detach().to(host), sizes.detach().to(host)
        generator = torch.Generator(host).manual_seed(self.seed * 1_000_003 + update)
        kept, chance = torch.arange(n, device=host), torch.ones_like(scores)
        if self.per_update is not None and num_new > self.per_update:
            old = n - num_new
            new, own = _ask(policy, scores[old:], sizes[old:], self.per_update, generator)
            chance[old:] = own.to(chance)
            kept = torch.cat([kept[:old], old + new])
        if self.capacity is not None and len(kept) > self.capacity:
            left = sizes[kept] / chance[kept]
            again, own = _ask(policy, scores[kept], left, int(self.capacity), generator)
            chance[kept] = chance[kept] * own.to(chance)
            kept = kept[again]
        return Choice(kept.to(device), chance.to(leverage))

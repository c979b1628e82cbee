"""Moving inducing points along a stream.

An `InducingPointRule` chooses them before hyperparameters are learnt. Subclass it for one of your
own; the short names are those of `RULES`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import ClassVar, NamedTuple

import torch
from botorch.models.utils.inducing_point_allocators import InducingPointAllocator
from gpytorch.kernels import Kernel
from torch import Tensor

from seqgp.streaming.greedy_allocator import GreedyAllocator
from seqgp.streaming.point_criterion import TOLERANCE, choose_inducing_points, first_kernel
from seqgp.validation import is_whole

#: The largest number of inducing points along a stream, unless the user has said how many.
DEFAULT_LIMIT = 300


class Candidates(NamedTuple):
    """What inducing points are chosen from, and for.

    Attributes:
        inputs: ``n x d`` transformed inputs: those that are remembered, then the new ones.
        represents: ``n``, for how many inputs of the stream each stands.
        precision: ``[b x] n``, the precision of each observation's site: for each of ``b`` kernels
            that share the inducing points, or summed over outputs and latents.
        num_new: How many are new.
        num_seen: How many inputs came before those.
        anew: Whether they may be chosen from scratch: nothing has been folded that is only known
            at the present ones.
        kernel: The present kernel, or a batch of them.
        max_points: The largest number of inducing points.
        allocator: A BoTorch allocator that the model was given, if any.
        seed: For draws, different for each update.
    """

    inputs: Tensor
    represents: Tensor
    precision: Tensor
    num_new: int
    num_seen: int
    anew: bool
    kernel: Kernel
    max_points: int
    allocator: InducingPointAllocator | None
    seed: int


class InducingPointRule(ABC):
    """What becomes of the inducing points when new observations arrive.

    Attributes:
        moves: Whether they are also moved by gradient, along with the hyperparameters.
        follows_kernel: Whether they are chosen again once hyperparameters have been learnt.
    """

    moves: bool = False
    follows_kernel: ClassVar[bool] = False

    def generous(self) -> InducingPointRule:
        """The rule while hyperparameters are learnt, of which some may need more of them."""
        return self

    @abstractmethod
    def choose(self, Z: Tensor, candidates: Candidates) -> Tensor:
        """``m' x d`` inducing points, for example the present ones.

        Args:
            Z: ``m x d`` present inducing points.
            candidates: What to choose from.
        """


@dataclass(frozen=True)
class Keep(InducingPointRule):
    """They stay, unless they are moved by gradient.

    Attributes:
        moves: Whether they are.
    """

    moves: bool = False

    def choose(self, Z: Tensor, candidates: Candidates) -> Tensor:
        """The present ones."""
        return Z


@dataclass(frozen=True)
class Exchange(InducingPointRule):
    """As many as the data need: added, and then exchanged, see `choose_inducing_points`.

    Attributes:
        moves: Whether they are also moved by gradient.
        tol: The loss that is tolerated, in nats for each observation.
        gain: How much an exchange has to bring.
        fills_up: Whether other inputs are added up to the largest number, see `fill_up`.
    """

    moves: bool = False
    tol: float = TOLERANCE
    gain: float = 2.0
    fills_up: bool = False
    follows_kernel: ClassVar[bool] = True

    def generous(self) -> InducingPointRule:
        """As many as there may be, also where the present kernel has no use for them."""
        return replace(self, tol=0.0, fills_up=True)

    def choose(self, Z: Tensor, candidates: Candidates) -> Tensor:
        """Fewer, more or others, as the inputs ask for."""
        inputs, kernel, limit = candidates.inputs, candidates.kernel, candidates.max_points
        if len(Z) > limit and not candidates.anew:  # the best of them, and of the inputs
            allocator = candidates.allocator or GreedyAllocator()
            return allocator.allocate_inducing_points(
                torch.cat([Z, inputs]), first_kernel(kernel), limit, torch.Size()
            )
        if not len(inputs):
            return Z
        chosen = choose_inducing_points(
            Z[:0] if candidates.anew else Z,
            inputs,
            kernel,
            limit,
            candidates.precision,
            candidates.represents,
            candidates.allocator,
            self.tol,
            self.gain,
        )
        return fill_up(chosen, inputs, limit) if self.fills_up else chosen


@dataclass(frozen=True)
class Cluster(InducingPointRule):
    """They are centres of clusters of all inputs so far, see `cluster_inducing_points`.

    For inputs of many dimensions, where each is far from all others.

    Attributes:
        moves: Whether they are also moved by gradient.
        iterations: Of Lloyd's algorithm.
    """

    moves: bool = False
    iterations: int = 5

    def choose(self, Z: Tensor, candidates: Candidates) -> Tensor:
        """The centres; the present ones if there are no new inputs."""
        return cluster_inducing_points(
            Z,
            candidates.inputs,
            candidates.represents,
            candidates.num_new,
            candidates.num_seen,
            candidates.max_points,
            torch.Generator().manual_seed(candidates.seed),
            self.iterations,
        )


@dataclass(frozen=True)
class AllInputs(Exchange):
    """They are the inputs at hand, as long as there is room; then they are exchanged.

    For models that remember everything: what has been folded is known at its inducing points only.
    """

    def choose(self, Z: Tensor, candidates: Candidates) -> Tensor:
        """The inputs, or else as `Exchange`."""
        if 0 < len(candidates.inputs) <= candidates.max_points:
            return candidates.inputs
        return super().choose(Z, candidates)


#: Rules by their short names.
RULES: dict[str, InducingPointRule] = {
    "fixed": Keep(),
    "learn": Keep(moves=True),
    "adapt": Exchange(),
    "both": Exchange(moves=True),
    "cluster": Cluster(),
}


def inducing_point_rule(rule: str | InducingPointRule) -> InducingPointRule:
    """A rule, or that with a given name.

    Args:
        rule: A rule or its short name.
    """
    if isinstance(rule, InducingPointRule):
        return rule
    if isinstance(rule, str) and rule in RULES:
        return RULES[rule]
    hint = "; max_inducing= is the maximum number of inducing points" if is_whole(rule) else ""
    raise ValueError(
        f"inducing: expected learn, adapt, both, cluster or fixed, or an InducingPointRule, got "
        f"{rule!r}{hint}."
    )


def choose_for_each(
    rule: InducingPointRule, Z: Tensor, inputs: Tensor, candidates: Candidates
) -> Tensor:
    """``... x m' x d`` inducing points of a batch of models, each by its own inputs and kernel.

    Models that ask for fewer than others get some of their inputs on top, so that all have as many.

    Args:
        rule: The rule.
        Z: ``... x m x d`` present inducing points.
        inputs: ``... x n x d`` inputs of the observations.
        candidates: What to choose from, but for inputs and kernel.
    """
    batch, kernel = Z.shape[:-2], candidates.kernel
    inputs = inputs.expand(*batch, *inputs.shape[-2:])
    own = len(kernel.batch_shape) == len(batch)
    chosen = []
    for index in product(*map(range, batch)):
        within = tuple(min(i, size - 1) for i, size in zip(index, kernel.batch_shape, strict=own))
        mine = candidates._replace(inputs=inputs[index], kernel=kernel[within] if own else kernel)
        chosen.append(rule.choose(Z[index], mine))
    number = max(len(points) for points in chosen)
    padded = [
        fill_up(points, X, number)
        for points, X in zip(chosen, inputs.reshape(-1, *inputs.shape[-2:]), strict=True)
    ]
    number = min(len(points) for points in padded)
    return torch.stack([points[:number] for points in padded]).reshape(*batch, number, Z.shape[-1])


def fill_up(points: Tensor, inputs: Tensor, number: int) -> Tensor:
    """Points, and inputs that are none of them, drawn at random, up to a number.

    A smooth kernel needs few inducing points, and few inducing points favour a smooth kernel: what
    varies faster than these can follow passes for noise. So hyperparameters are learnt with more
    inducing points than the present ones ask for.

    Args:
        points: ``m x d`` points that are kept.
        inputs: ``n x d`` inputs to draw from; the same ones whatever the global random state.
        number: How many points there are to be, if there are enough inputs.
    """
    if len(points) >= number:
        return points
    order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(0), device="cpu")
    new = inputs[order[: 10 * number].to(inputs.device)]  # enough, unless most are points already
    new = new[~(new.unsqueeze(-2) == points.unsqueeze(-3)).all(-1).any(-1)]
    return torch.cat([points, new[: number - len(points)]])


@torch.no_grad()
def on_seen_values(points: Tensor, seen: Tensor, dims: Sequence[int]) -> Tensor:
    """Points whose values in discrete columns have been seen, together, at one of some points.

    Centres of clusters, for example, lie between categories. They get those of the nearest point.

    Args:
        points: ``... x m x d`` points.
        seen: ``... x n x d`` points that there have been.
        dims: The discrete columns.
    """
    columns = list(dims)
    if not columns or not seen.shape[-2]:
        return points
    values, known = points[..., columns], seen[..., columns]
    is_seen = (values.unsqueeze(-2) == known.unsqueeze(-3)).all(-1).any(-1, keepdim=True)
    nearest = torch.cdist(points, seen).argmin(-1, keepdim=True)
    replaced = points.clone()
    replaced[..., columns] = torch.where(
        is_seen, values, known.gather(-2, nearest.expand_as(values))
    )
    return replaced


@torch.no_grad()
def cluster_inducing_points(
    Z: Tensor,
    inputs: Tensor,
    weights: Tensor,
    num_new: int,
    num_seen: int,
    max_points: int,
    generator: torch.Generator,
    iterations: int = 5,
) -> Tensor:
    """Inducing points that are centres of clusters of all inputs of a stream.

    First new inputs fill empty places, and take those of old points at random, in proportion to
    their number among all inputs so far. Then a few iterations of Lloyd's algorithm (k-means) on
    what is at hand: new inputs, remembered ones with their weights, and the old points, which stand
    for all inputs that nothing remembered stands for. Unlike `choose_inducing_points` this does not
    prefer outliers, which is what the worst explained inputs are when there are many dimensions.

    Args:
        Z: ``m x d`` present inducing points.
        inputs: ``n x d`` remembered inputs, then new ones.
        weights: ``n``, for how many inputs each stands.
        num_new: How many are new.
        num_seen: How many inputs came before those.
        max_points: The largest number of inducing points.
        generator: Draws them, on the CPU.
        iterations: Of Lloyd's algorithm.

    Returns:
        ``m' x d`` inducing points; ``Z`` itself if there are no new inputs.
    """
    if not num_new:
        return Z
    device, new = Z.device, inputs[len(inputs) - num_new :].to(Z)
    number = min(max_points, (len(Z) if num_seen else 0) + num_new)
    added = max(round(number * num_new / (num_seen + num_new)), number - len(Z))
    added = min(added, num_new)
    order = torch.randperm(num_new, generator=generator, device="cpu")[:added].to(device)
    kept = torch.randperm(len(Z), generator=generator, device="cpu")[: number - added].to(device)
    centres = torch.cat([Z[kept.sort().values], new[order.sort().values]])
    represented = float(weights[: len(inputs) - num_new].sum())
    own = max(num_seen - represented, 0.0) / max(len(Z), 1)
    points = torch.cat([inputs.to(Z), Z])
    mass = torch.cat([weights.to(Z), torch.full_like(Z[:, 0], own)])
    for _ in range(iterations):
        nearest = torch.cdist(points, centres).argmin(-1)
        total = torch.zeros_like(centres[:, 0]).index_add(0, nearest, mass)
        moment = torch.zeros_like(centres).index_add(0, nearest, mass.unsqueeze(-1) * points)
        occupied = (total > 0).unsqueeze(-1)
        centres = torch.where(occupied, moment / total.clamp_min(1e-12).unsqueeze(-1), centres)
    return centres

"""Rules that change the inducing points along a stream.

An `InducingPointRule` chooses them before hyperparameters are learnt. For a rule of your own, write
a subclass. The short names are those of `RULES`.
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

#: The maximum number of inducing points along a stream, unless the user sets it.
DEFAULT_LIMIT = 300


class Candidates(NamedTuple):
    """The candidates for inducing points, and the information to choose among them.

    Attributes:
        inputs: ``n x d`` transformed inputs: remembered ones first, then new ones.
        represents: ``n``, the number of inputs of the stream that each stands for.
        precision: ``[b x] n``, the precision of each observation's site: for each of ``b`` kernels
            that share the inducing points, or summed over outputs and latents.
        num_new: The number of new inputs.
        num_seen: The number of inputs before those.
        anew: Whether the inducing points may be chosen from scratch, because there is no summary
            that is only known at the present ones.
        kernel: The present kernel, or a batch of kernels.
        max_points: The maximum number of inducing points.
        allocator: The BoTorch allocator that the model was given, if any.
        seed: The seed of random draws, different for each update.
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
    """A rule that chooses inducing points when new observations arrive.

    Attributes:
        moves: Whether they are also optimised by gradient, along with the hyperparameters.
        follows_kernel: Whether they are chosen again once hyperparameters have been learnt.
    """

    moves: bool = False
    follows_kernel: ClassVar[bool] = False

    def generous(self) -> InducingPointRule:
        """Return the rule to use while hyperparameters are learnt, which may need more points."""
        return self

    @abstractmethod
    def choose(self, Z: Tensor, candidates: Candidates) -> Tensor:
        """Return ``m' x d`` inducing points; these may be the present ones.

        Args:
            Z: ``m x d`` present inducing points.
            candidates: The candidates for inducing points.
        """


@dataclass(frozen=True)
class Keep(InducingPointRule):
    """Keep the inducing points, except for moves by gradient.

    Attributes:
        moves: Whether they are optimised by gradient.
    """

    moves: bool = False

    def choose(self, Z: Tensor, candidates: Candidates) -> Tensor:
        """Return the present inducing points."""
        return Z


@dataclass(frozen=True)
class Exchange(InducingPointRule):
    """Add inducing points as the data need, and exchange them; see `choose_inducing_points`.

    Attributes:
        moves: Whether they are also optimised by gradient.
        tol: The tolerated loss, in nats per observation.
        gain: The factor by which an exchange has to improve on the point it replaces.
        fills_up: Whether to add other inputs up to the maximum number; see `fill_up`.
    """

    moves: bool = False
    tol: float = TOLERANCE
    gain: float = 2.0
    fills_up: bool = False
    follows_kernel: ClassVar[bool] = True

    def generous(self) -> InducingPointRule:
        """Return a rule that uses the maximum number, even if the present kernel needs fewer."""
        return replace(self, tol=0.0, fills_up=True)

    def choose(self, Z: Tensor, candidates: Candidates) -> Tensor:
        """Return the present inducing points, or change their number or places as needed."""
        inputs, kernel, limit = candidates.inputs, candidates.kernel, candidates.max_points
        if len(Z) > limit and not candidates.anew:  # choose the best of Z and the inputs
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
    """Use the centres of clusters of all inputs so far; see `cluster_inducing_points`.

    This is for inputs of many dimensions, where all inputs are far from each other.

    Attributes:
        moves: Whether they are also optimised by gradient.
        iterations: The number of iterations of Lloyd's algorithm.
    """

    moves: bool = False
    iterations: int = 5

    def choose(self, Z: Tensor, candidates: Candidates) -> Tensor:
        """Return the centres, or the present inducing points if there are no new inputs."""
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
    """Use all inputs at hand up to the maximum number; beyond it, exchange inducing points.

    This is for models whose memory is unlimited: folded observations are only known at the inducing
    points.
    """

    def choose(self, Z: Tensor, candidates: Candidates) -> Tensor:
        """Return the inputs, or else the choice of `Exchange`."""
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
    """Return an inducing-point rule, given the rule itself or its short name.

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
    """Choose ``... x m' x d`` inducing points for a batch of models, each by its inputs and kernel.

    Models that need fewer than others get some of their inputs in addition, so that the number is
    the same for all.

    Args:
        rule: The rule.
        Z: ``... x m x d`` present inducing points.
        inputs: ``... x n x d`` inputs of the observations.
        candidates: The candidates; their inputs and kernel are replaced by those of each model.
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
    """Add randomly drawn inputs to inducing points, up to a given number.

    A smooth kernel needs few inducing points, and few inducing points favour a smooth kernel:
    whatever varies faster than they can follow is taken for noise. So hyperparameters are learnt
    with more inducing points than the present ones need.

    Args:
        points: ``m x d`` points, which are kept.
        inputs: ``n x d`` inputs to draw from. The draw does not depend on the global random state.
        number: The number of points to return, if there are enough inputs.
    """
    if len(points) >= number:
        return points
    order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(0), device="cpu")
    new = inputs[order[: 10 * number].to(inputs.device)]  # enough, unless most are in points
    new = new[~(new.unsqueeze(-2) == points.unsqueeze(-3)).all(-1).any(-1)]
    return torch.cat([points, new[: number - len(points)]])


@torch.no_grad()
def on_seen_values(points: Tensor, seen: Tensor, dims: Sequence[int]) -> Tensor:
    """Replace unseen combinations of discrete values by those of the nearest seen point.

    For example, centres of clusters may lie between categories.

    Args:
        points: ``... x m x d`` points.
        seen: ``... x n x d`` points with valid discrete values.
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
    """Return the centres of clusters of all inputs of a stream, as inducing points.

    First, new inputs fill the free places. They also replace randomly chosen old points, in
    proportion to the number of new inputs among all inputs so far. Then there are a few iterations
    of Lloyd's algorithm (k-means) on new inputs, remembered ones with their weights, and the old
    points, which stand for all inputs that no remembered one stands for. Unlike
    `choose_inducing_points`, this does not prefer outliers. In many dimensions, the inputs that are
    explained worst are outliers.

    Args:
        Z: ``m x d`` present inducing points.
        inputs: ``n x d`` remembered inputs, then new ones.
        weights: ``n``, the number of inputs that each stands for.
        num_new: The number of new inputs.
        num_seen: The number of inputs before those.
        max_points: The maximum number of inducing points.
        generator: The random generator, on the CPU.
        iterations: The number of iterations of Lloyd's algorithm.

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

"""The interface of update rules, and the default rule."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from seqgp.dual.natural_gradient import step_limit
from seqgp.dual.posterior import log_evidence
from seqgp.likelihoods.traits import is_conjugate, is_softmax, precision_floor, summary_noise
from seqgp.observations import Observations
from seqgp.streaming.inducing_points import Exchange, InducingPointRule, Keep
from seqgp.streaming.learning import Decision, learn_best
from seqgp.streaming.memory import MemoryOptions
from seqgp.streaming.model import StreamModel
from seqgp.streaming.options import UpdateOptions

#: Relative tolerance of the sites of a small batch. Later updates converge them further.
SMALL_BATCH_TOLERANCE = 1e-4


class Batch(NamedTuple):
    """The observations of an update.

    Attributes:
        data: Remembered and new observations, as the strategy sees them.
        num_old: The number of remembered observations; they come first.
        stands_for: The share of the summary that each remembered one stands for; ``None`` for none.
        is_small: Whether the new ones are so few that conditioning on them is enough, with the
            sites of the others as they are. A later update converges all of them.
    """

    data: Observations
    num_old: int
    stands_for: Tensor | None
    is_small: bool = False


class Plan(NamedTuple):
    """Instructions for an update rule.

    Attributes:
        decision: Whether to learn hyperparameters.
        moves_Z: Whether inducing points are optimised by gradient.
        place: Chooses inducing points for the present hyperparameters of a model. With ``True``,
            it chooses enough for other hyperparameters, too.
    """

    decision: Decision
    moves_Z: bool
    place: Callable[[StreamModel, bool], None]


class Learned(NamedTuple):
    """The result of learning.

    Attributes:
        steps: Number of evaluations of the objective for hyperparameters.
        bound: The bound at the end.
        outcome: What happened to the hyperparameters, in words.
    """

    steps: int
    bound: Tensor
    outcome: str = "learnt hyperparameters"


class UpdateRule(ABC):
    """A rule to learn memory and new observations, and to fold those that are not kept."""

    #: The short name. A stream stores it, since all of its updates have to use one rule.
    name: str
    #: Whether the default standardisation of the targets follows the stream.
    follows_scale = True
    #: Whether the memory may replace some of the summary.
    chooses_replay = True
    #: Whether the rule only conditions on small batches (`Batch.is_small`).
    conditions = False

    def check(self, model: StreamModel, options: UpdateOptions, memory: MemoryOptions) -> None:
        """Raise if the rule does not support some of the options.

        Args:
            model: The model to be updated.
            options: The options.
            memory: The memory options.
        """
        if memory.replay and is_conjugate(model.likelihood):
            raise ValueError(
                "replay: not supported for Gaussian observations, whose summary is never outdated; "
                "use MemoryOptions(replay=0)."
            )

    def learns_by_default(self, learn: bool | None) -> bool | None:
        """Return whether to learn hyperparameters; ``None`` to let the data decide.

        Args:
            learn: The user's choice; ``None`` for no preference.
        """
        return learn

    @abstractmethod
    def default_inducing(self, may_change: bool, moves: bool) -> InducingPointRule:
        """Return the default rule for the inducing points.

        Args:
            may_change: Whether they may change.
            moves: Whether the user wants them to be optimised by gradient.
        """

    @abstractmethod
    def learn(
        self, model: StreamModel, batch: Batch, options: UpdateOptions, plan: Plan
    ) -> Learned:
        """Learn hyperparameters, if the plan says so, and converge the posterior.

        Args:
            model: The model, which holds remembered and new observations.
            batch: The same observations.
            options: The options.
            plan: The instructions.
        """

    @abstractmethod
    def remember(
        self, model: StreamModel, batch: Batch, kept: Tensor, options: UpdateOptions
    ) -> None:
        """Reduce the model's observations to those that are kept, and fold the others.

        Args:
            model: The model.
            batch: All of its observations.
            kept: Indices of the observations to keep.
            options: The options.
        """


class PseudoLikelihood(UpdateRule):
    """The default rule: the summary is a fixed function of the inducing values of its own basis.

    That function, a Gaussian pseudo-likelihood, stays fixed while hyperparameters and inducing
    points change. The memory's sites are converged again.

    Args:
        bounds_new_classes: Whether to fold sites of a softmax such that the model can still learn
            classes that have not been observed, see `fold_all_but`.
    """

    name = "pseudo-likelihood"
    conditions = True

    def __init__(self, bounds_new_classes: bool = True) -> None:
        self.bounds_new_classes = bounds_new_classes

    def default_inducing(self, may_change: bool, moves: bool) -> InducingPointRule:
        """Add as many points as the data need, unless they may not change."""
        return Exchange(moves=moves) if may_change else Keep()

    def learn(
        self, model: StreamModel, batch: Batch, options: UpdateOptions, plan: Plan
    ) -> Learned:
        """Maximise the bound of memory, new observations and summary."""
        if batch.is_small:
            return Learned(0, condition(model, batch, options))
        if not plan.decision.learn:
            return Learned(0, model.refresh(max_steps=options.site_steps))
        return Learned(
            *learn_best(
                model,
                options,
                plan.moves_Z,
                batch.stands_for,
                plan.decision.restart,
                plan.place,
            )
        )

    def remember(
        self, model: StreamModel, batch: Batch, kept: Tensor, options: UpdateOptions
    ) -> None:
        """Fold what is not kept, and update the posterior if that changes it."""
        unseen = unseen_classes(model) if self.bounds_new_classes else None
        changed = fold_all_but(model, batch.data, kept, unseen)
        # Folded observations keep their sites, so the posterior stays the same, unless the memory
        # replaces part of the summary.
        if (changed or model.stream.replay) and not batch.is_small:
            steps = options.site_steps
            model.refresh(max_steps=None if steps is None else -(-steps // 2))  # close already


@torch.no_grad()
def condition(model: StreamModel, batch: Batch, options: UpdateOptions) -> Tensor:
    r"""Condition the posterior on the new observations of a small batch.

    Their sites are converged on top of the posterior, whose duals stay as they are. If the
    likelihood is Gaussian, this is exact. Otherwise the sites of the memory become a little
    outdated, until a larger update converges them again.

    Args:
        model: The model, which holds remembered and new observations.
        batch: The same observations.
        options: The options.

    Returns:
        The bound before, plus the log evidence of the new observations given the others (a bound of
        it, if they are not Gaussian).
    """
    strategy, before = model.variational_strategy, model.stream.bound
    assert before is not None
    state = strategy.state()
    evidence = log_evidence(state.duals, state.factors)
    evidence = evidence.sum(-1) if strategy.latent_dims else evidence
    with step_limit(options.site_steps) as limit:
        info = strategy.converge(
            batch.data.select(slice(batch.num_old, len(batch.data))),
            likelihood=model.likelihood,
            add=True,
            tol=SMALL_BATCH_TOLERANCE,
            max_steps=limit,
        )
    bound = before + (info.elbo - evidence)
    model.stream = replace(model.stream, bound=bound)
    return bound


def fold_all_but(
    model: StreamModel, data: Observations, kept: Tensor, unseen: Tensor | None
) -> bool:
    """Fold observations that are not kept, with their sites, except for latents of new classes.

    When a new class appears, its latent function increases somewhere. Where another class is
    certain, its own sites have no curvature and would not prevent this. The sites of a lower bound
    of the likelihood do.

    Args:
        model: The model.
        data: All of its observations, as the strategy sees them.
        kept: Indices of the observations to keep.
        unseen: ``c`` flags for the classes that have not been observed yet.

    Returns:
        Whether the posterior has changed: because of sites of a bound, or because negative
        precisions, which cannot be folded, have been clipped to zero.
    """
    n, strategy = len(data), model.variational_strategy
    some = strategy.ranks.total(n - len(kept)) > 0
    if some:
        gone = torch.ones(n, dtype=torch.bool, device=kept.device)
        gone[kept] = False
        index = gone.argsort(stable=True)[len(kept) :]  # without a host synchronisation
        weights = model.stream.fade if model.stream.fades else None
        part = replace(data, weights=weights).select(index)
        sites, _ = strategy.sites(part, likelihood=model.likelihood, unseen=unseen)
        strategy.fold(part, sites=sites, likelihood=model.likelihood)
    model.stream = model.stream.select(kept)
    bounded = unseen is not None and some
    return bounded or precision_floor(model.likelihood) is None


def note_classes(model: StreamModel, targets: Tensor | None = None) -> None:
    """Record which classes of a softmax have been observed.

    Args:
        model: The model.
        targets: The targets; by default those at hand.
    """
    if is_softmax(model.likelihood):
        stream = model.stream
        targets = stream.observations.targets if targets is None else targets
        targets = targets.unique().long()
        now = model.variational_strategy.ranks.gather(targets).tolist()
        model.stream = replace(stream, classes_seen=tuple(sorted({*stream.classes_seen, *now})))


def unseen_classes(model: StreamModel) -> Tensor | None:
    """Return ``c`` flags for the unobserved classes of a softmax; ``None`` if there are none.

    Args:
        model: The model.
    """
    stream = model.stream
    if not is_softmax(model.likelihood) or len(stream.classes_seen) >= model.likelihood.num_classes:
        return None
    targets = stream.observations.targets
    unseen = targets.new_ones(model.likelihood.num_classes, dtype=torch.bool)
    for seen in stream.classes_seen:
        unseen[seen] = False
    return unseen


def stands_for(model: StreamModel, data: Observations) -> Tensor | None:
    """Return the share of the summary that each remembered observation stands for.

    One that was kept with probability ``p`` stands for ``1/p - 1`` others like it, which have been
    folded with about the present precision of its own site.

    Args:
        model: The model before new observations have been added.
        data: The remembered observations, as the strategy sees them.
    """
    strategy, stream = model.variational_strategy, model.stream
    if not stream.num_held or not strategy.has_summary:
        return None
    others = (stream.represents - 1) * stream.fade
    if summary_noise(model.likelihood) is not None:
        return others
    sites, _ = strategy.sites(data, likelihood=model.likelihood)
    return others * sites.beta

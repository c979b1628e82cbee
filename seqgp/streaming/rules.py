"""The two rules by which a batch of a stream is learnt, behind one interface."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from seqgp.dual import Sites
from seqgp.likelihoods.traits import is_conjugate, is_softmax, precision_floor, summary_noise
from seqgp.observations import Observations
from seqgp.streaming.inducing_points import Exchange, InducingPointRule, Keep
from seqgp.streaming.learning import Decision, learn_best
from seqgp.streaming.memory import MemoryOptions
from seqgp.streaming.model import StreamModel
from seqgp.streaming.options import UpdateOptions


class Batch(NamedTuple):
    """The observations of an update.

    Attributes:
        data: Remembered and new ones, as the strategy sees them.
        num_old: How many are remembered; they come first.
        stands_for: For how much of the summary each remembered one stands; ``None`` for nothing.
    """

    data: Observations
    num_old: int
    stands_for: Tensor | None


class Plan(NamedTuple):
    """What a rule is to do.

    Attributes:
        decision: Whether to learn hyperparameters.
        moves_Z: Whether inducing points are moved by gradient.
        place: Chooses inducing points for the present hyperparameters of a model; with ``True``,
            enough for others, too.
        tol: The relative tolerance of the sites if hyperparameters are not learnt.
    """

    decision: Decision
    moves_Z: bool
    place: Callable[[StreamModel, bool], None]
    tol: float = 1e-8


class Learned(NamedTuple):
    """What learning did.

    Attributes:
        steps: Evaluations of the objective for hyperparameters.
        bound: The bound at the end.
        outcome: What was done to the hyperparameters, in words.
    """

    steps: int
    bound: Tensor
    outcome: str = "learnt hyperparameters"


class UpdateRule(ABC):
    """How memory and new observations are learnt, and how those that are not kept are folded."""

    #: The short name, which a stream remembers: it is learnt by one rule.
    name: str
    #: Whether the default standardisation of the targets follows the stream.
    follows_scale = True
    #: Whether the memory may stand for some of what has been folded.
    chooses_replay = True

    def check(self, model: StreamModel, options: UpdateOptions, memory: MemoryOptions) -> None:
        """Raise if the rule does not know some of the options.

        Args:
            model: The model to be updated.
            options: The options.
            memory: What to remember.
        """
        if memory.replay and is_conjugate(model.likelihood):
            raise ValueError(
                "replay: not supported for Gaussian observations, whose summary is never outdated; "
                "use MemoryOptions(replay=0)."
            )

    def learns_by_default(self, learn: bool | None) -> bool | None:
        """Whether to learn hyperparameters if the user does not say; ``None`` to decide by data.

        Args:
            learn: What the user says.
        """
        return learn

    @abstractmethod
    def default_inducing(self, may_change: bool, moves: bool) -> InducingPointRule:
        """What becomes of the inducing points if the user does not say.

        Args:
            may_change: Whether they may be others.
            moves: Whether the user wants them to be moved by gradient.
        """

    @abstractmethod
    def learn(
        self, model: StreamModel, batch: Batch, options: UpdateOptions, plan: Plan
    ) -> Learned:
        """Learn hyperparameters, if that is the plan, and converge the posterior.

        Args:
            model: The model, which holds remembered and new observations.
            batch: The same observations.
            options: The options.
            plan: What to do.
        """

    @abstractmethod
    def remember(
        self, model: StreamModel, batch: Batch, kept: Tensor, sites: Sites, options: UpdateOptions
    ) -> None:
        """Reduce the model's observations to those that are kept, and fold the others.

        Args:
            model: The model.
            batch: All of its observations.
            kept: Indices of those to keep.
            sites: The sites of all.
            options: The options.
        """


class PseudoLikelihood(UpdateRule):
    """What has been folded is a fixed function of the inducing values that it was folded with.

    That function, a Gaussian pseudo-likelihood, is held fixed while hyperparameters and inducing
    points move; the memory's sites are converged anew.

    Args:
        bounds_new_classes: Whether to fold sites of a softmax such that the model can still learn
            classes that have not been observed, see `fold_all_but`.
    """

    name = "pseudo-likelihood"

    def __init__(self, bounds_new_classes: bool = True) -> None:
        self.bounds_new_classes = bounds_new_classes

    def default_inducing(self, may_change: bool, moves: bool) -> InducingPointRule:
        """As many as the data need, unless nothing is to change but the posterior."""
        return Exchange(moves=moves) if may_change else Keep()

    def learn(
        self, model: StreamModel, batch: Batch, options: UpdateOptions, plan: Plan
    ) -> Learned:
        """Maximise the bound of memory, new observations and summary."""
        if not plan.decision.learn:
            return Learned(0, model.refresh(tol=plan.tol, max_steps=options.site_steps))
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
        self, model: StreamModel, batch: Batch, kept: Tensor, sites: Sites, options: UpdateOptions
    ) -> None:
        """Fold what is not kept, and let the posterior follow if that changes it."""
        unseen = unseen_classes(model) if self.bounds_new_classes else None
        changed = fold_all_but(model, batch.data, kept, sites, unseen)
        # What is folded keeps its sites, so the posterior stays, unless the memory counts for what
        # has been folded.
        if changed or model.stream.replay:
            steps = options.site_steps
            model.refresh(max_steps=None if steps is None else -(-steps // 2))  # it is not far


def fold_all_but(
    model: StreamModel,
    data: Observations,
    kept: Tensor,
    sites: Sites,
    unseen: Tensor | None,
) -> bool:
    """Fold what is not kept into the summary, with its sites, but for those of new classes.

    When a new class appears, its latent function increases somewhere. Where another class is
    certain, its own sites have no curvature and would not prevent this. The sites of a lower bound
    of the likelihood do.

    Args:
        model: The model.
        data: All of its observations, as the strategy sees them.
        kept: Indices of those to keep.
        sites: The sites of all.
        unseen: ``c``, which classes have not been observed yet.

    Returns:
        Whether the posterior is another now: because of such sites, or of those of negative
        precision, which cannot be folded and have been cut off.
    """
    n, strategy = len(data), model.variational_strategy
    some = strategy.ranks.total(n - len(kept)) > 0
    if some:
        gone = torch.ones(n, dtype=torch.bool, device=kept.device)
        gone[kept] = False
        index = gone.argsort(stable=True)[len(kept) :]  # without asking the device
        if unseen is not None:
            sites, _ = strategy.sites(data, likelihood=model.likelihood, unseen=unseen)
        weights = model.stream.fade if model.stream.fades else None
        strategy.fold(
            replace(data, weights=weights), sites=sites, likelihood=model.likelihood, index=index
        )
    model.stream = model.stream.select(kept)
    bounded = unseen is not None and some
    return bounded or precision_floor(model.likelihood) is None


def note_classes(model: StreamModel, targets: Tensor | None = None) -> None:
    """Remember which classes of a softmax there have been.

    Args:
        model: The model.
        targets: Some targets; by default those at hand.
    """
    if is_softmax(model.likelihood):
        stream = model.stream
        targets = stream.observations.targets if targets is None else targets
        targets = targets.unique().long()
        now = model.variational_strategy.ranks.gather(targets).tolist()
        model.stream = replace(stream, classes_seen=tuple(sorted({*stream.classes_seen, *now})))


def unseen_classes(model: StreamModel) -> Tensor | None:
    """``c``, which classes of a softmax have not been observed; ``None`` if all have.

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
    """For how much of the summary each remembered observation stands.

    One that was kept with probability ``p`` stands for ``1/p - 1`` others like it, which have been
    folded with about the precision that its own site has now.

    Args:
        model: The model before new observations have been added.
        data: What it remembers, as the strategy sees it.
    """
    strategy, stream = model.variational_strategy, model.stream
    if not stream.num_held or not strategy.has_summary:
        return None
    others = (stream.represents - 1) * stream.fade
    if summary_noise(model.likelihood) is not None:
        return others
    sites, _ = strategy.sites(data, likelihood=model.likelihood)
    return others * sites.beta

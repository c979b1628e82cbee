"""The two rules by which a batch of a stream is learnt, behind one interface."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace
from typing import NamedTuple

import torch
from botorch.optim.utils import get_parameters_and_bounds
from torch import Tensor

from seqgp.dual import Sites
from seqgp.likelihoods.traits import is_conjugate, is_softmax, precision_floor, summary_noise
from seqgp.observations import Observations
from seqgp.streaming.inducing_points import Exchange, InducingPointRule, Keep
from seqgp.streaming.memory import MemoryOptions
from seqgp.streaming.model import StreamModel
from seqgp.streaming.options import UpdateOptions
from seqgp.variational.elbo import DualELBO
from seqgp.variational.optimise import Bounds, Parameters, adam, lbfgs, turning_back


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


class Learned(NamedTuple):
    """What learning did.

    Attributes:
        steps: Evaluations of the objective for hyperparameters.
        bound: The bound at the end.
    """

    steps: int
    bound: Tensor


class UpdateRule(ABC):
    """How memory and new observations are learnt, and how those that are not kept are folded."""

    #: The short name, which a stream remembers: it is learnt by one rule.
    name: str

    def check(self, model: StreamModel, options: UpdateOptions, memory: MemoryOptions) -> None:
        """Raise if the rule does not know some of the options.

        Args:
            model: The model to be updated.
            options: The options.
            memory: What to remember.
        """
        if memory.replay and is_conjugate(model.likelihood):
            raise ValueError(
                "replay: the paper's rule knows none, and Gaussian observations need none: their "
                "sites stay exact; pass MemoryOptions(replay=0)."
            )

    @abstractmethod
    def default_inducing(self, learns: bool, moves: bool) -> InducingPointRule:
        """What becomes of the inducing points if the user does not say.

        Args:
            learns: Whether hyperparameters are learnt.
            moves: Whether the inducing points are a parameter.
        """

    @abstractmethod
    def learn(
        self, model: StreamModel, batch: Batch, options: UpdateOptions, moves_Z: bool
    ) -> Learned:
        """Learn hyperparameters, if asked for, and converge the posterior.

        Args:
            model: The model, which holds remembered and new observations.
            batch: The same observations.
            options: The options.
            moves_Z: Whether inducing points are moved by gradient.
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
        bounds_new_classes: Whether what is folded of a softmax leaves room for classes that nobody
            has seen yet, see `fold_all_but`.
    """

    name = "pseudo-likelihood"

    def __init__(self, bounds_new_classes: bool = True) -> None:
        self.bounds_new_classes = bounds_new_classes

    def default_inducing(self, learns: bool, moves: bool) -> InducingPointRule:
        """Exchanged and moved by gradient, if something is learnt and they are a parameter."""
        return Exchange(moves=True) if learns and moves else Keep()

    def learn(
        self, model: StreamModel, batch: Batch, options: UpdateOptions, moves_Z: bool
    ) -> Learned:
        """Maximise the bound of memory, new observations and summary."""
        steps = _maximise(model, batch, options, moves_Z) if options.learn else 0
        return Learned(steps, model.refresh(max_steps=options.site_steps))

    def remember(
        self, model: StreamModel, batch: Batch, kept: Tensor, sites: Sites, options: UpdateOptions
    ) -> None:
        """Fold what is not kept, and let the posterior follow if that changes it."""
        unseen = unseen_classes(model) if self.bounds_new_classes else None
        changed = fold_all_but(model, batch.data, kept, sites, options.discount, unseen)
        # What is folded keeps its sites, so the posterior stays, unless old data fade or the
        # memory counts for what has been folded.
        if changed or options.discount != 1 or model.stream.replay:
            steps = options.site_steps
            model.refresh(max_steps=None if steps is None else -(-steps // 2))  # it is not far


def learnable(model: StreamModel, moves_Z: bool) -> tuple[DualELBO, Parameters, Bounds]:
    """The objective of a model, what it is maximised over, and bounds.

    Args:
        model: The model.
        moves_Z: Whether the inducing points are among it.
    """
    mll = DualELBO(model.likelihood, model)
    Z = model.variational_strategy.inducing_points
    if moves_Z and isinstance(Z, torch.nn.Parameter):
        Z.requires_grad_(True)
    parameters, bounds = get_parameters_and_bounds(
        mll,
        name_filter=None if moves_Z else lambda name: "inducing_points" not in name,
        requires_grad=True,
    )
    return mll, parameters, bounds


@torch.enable_grad()
def _maximise(model: StreamModel, batch: Batch, options: UpdateOptions, moves_Z: bool) -> int:
    """Maximise the bound of memory, new observations and summary; returns the evaluations."""
    mll, parameters, bounds = learnable(model, moves_Z)
    steps = options.steps
    if steps is None:
        steps = 40 if options.optimizer == "lbfgs" else 100
    if not parameters or not steps:
        return 0
    sites, taken = None, 0
    # The sites follow the hyperparameters closely from step to step: a loose tolerance.
    tol = 1e-3 if options.optimizer == "adam" else 1e-4

    def objective() -> Tensor:
        nonlocal sites, taken
        taken += 1
        bound, sites = model.bound(sites, tol, batch.stands_for, options.site_steps)
        return -mll.with_priors(bound, 1).sum()

    def forget_sites() -> None:
        nonlocal sites
        sites = None

    loss = turning_back(objective, parameters, forget_sites)
    training = model.training
    model.train()
    if options.optimizer == "adam":
        for _ in adam([loss] * steps, parameters, bounds, options.learning_rate):
            pass
    else:
        lbfgs(loss, parameters, bounds, steps, options.tol)
    model.train(training)
    return taken


def fold_all_but(
    model: StreamModel,
    data: Observations,
    kept: Tensor,
    sites: Sites,
    discount: float,
    unseen: Tensor | None,
) -> bool:
    """Fold what is not kept into the summary, with its sites, but for those of new classes.

    The latent of a class that nobody has seen yet will rise somewhere once it comes. Where others
    are certain, their own sites would not object: a certain choice has no curvature. Those of a
    lower bound do.

    Args:
        model: The model.
        data: All of its observations, as the strategy sees them.
        kept: Indices of those to keep.
        sites: The sites of all.
        discount: Factor for what the summary held before.
        unseen: ``c``, which classes nobody has seen yet.

    Returns:
        Whether the posterior is another now: because of such sites, or of those of negative
        precision, which cannot be folded and have been cut off.
    """
    n, strategy = len(data), model.variational_strategy
    if len(kept) < n or discount != 1.0:
        gone = torch.ones(n, dtype=torch.bool, device=kept.device)
        gone[kept] = False
        index = gone.argsort(stable=True)[len(kept) :]  # without asking the device
        if unseen is not None:
            sites, _ = strategy.sites(data, likelihood=model.likelihood, unseen=unseen)
        strategy.fold(
            data, sites=sites, likelihood=model.likelihood, discount=discount, index=index
        )
    model.stream = model.stream.select(kept)
    bounded = unseen is not None and len(kept) < n
    return bounded or precision_floor(model.likelihood) is None


def note_classes(model: StreamModel) -> None:
    """Remember which classes of a softmax there have been.

    Args:
        model: The model.
    """
    if is_softmax(model.likelihood):
        stream = model.stream
        now = stream.observations.targets.unique().long().tolist()
        model.stream = replace(stream, classes_seen=tuple(sorted({*stream.classes_seen, *now})))


def unseen_classes(model: StreamModel) -> Tensor | None:
    """``c``, which classes of a softmax nobody has seen yet; ``None`` if there are none.

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
    if not len(data) or not strategy.has_summary:
        return None
    others = (stream.represents - 1) * stream.summary_share
    if summary_noise(model.likelihood) is not None:
        return others
    sites, _ = strategy.sites(data, likelihood=model.likelihood)
    return others * sites.beta

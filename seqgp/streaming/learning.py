r"""Learning hyperparameters along a stream: when, from where, and whether it was worth it.

Hyperparameters are learnt when the data have grown by a certain factor since they were learnt last:
often at first, and ever more rarely; sooner if new observations are much less probable than those
at hand were. The bound of memory, new observations and summary is
maximised from the present hyperparameters. What has been folded was folded under these, though, and
the summary favours them. So there is a second start from the observations at hand alone, a sample
of the whole stream, for which the past has no say.

Which hyperparameters stay is decided by leave-one-out densities of the observations at hand, each
weighted by how many it stands for: an estimate of the mean log density of observations like those
of the whole stream. If new hyperparameters are worse than the present ones, beyond what chance
explains, nothing has been learnt.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from linear_operator.utils.errors import NanError, NotPSDError
from torch import Tensor

from seqgp.dual import Sites, posterior_mean
from seqgp.likelihoods import log_predictive
from seqgp.likelihoods.choices import left_out
from seqgp.likelihoods.noise_floor import noise_floor
from seqgp.likelihoods.traits import precision_floor
from seqgp.observations import Observations
from seqgp.streaming.draft import adopt, draft_of
from seqgp.streaming.model import StreamModel
from seqgp.streaming.options import UpdateOptions
from seqgp.streaming.state import StreamState
from seqgp.variational.elbo import DualELBO
from seqgp.variational.optimise import (
    Bounds,
    Parameters,
    adam,
    lbfgs,
    learnable_parameters,
    shared_loss,
    turning_back,
)

#: Learn when the number of observations has grown by this factor since it was learnt last.
GROWTH = 1.2
#: Start from scratch, too, when it has grown by this factor since that was done last.
RESTART_GROWTH = 2.0
#: Learn when new observations have been this much less probable than expected, in nats for each
#: observation of the stream, since it was learnt last; at least so many nats.
SURPRISE, LEAST_SURPRISE = 0.05, 10.0
#: More than this, in nats, an observation does not count: it may be an outlier.
MOST_SURPRISING = 3.0
#: L-BFGS stops when an iteration gains less than this, in nats for each observation.
TOLERANCE = 5e-5
#: Relative tolerance of the sites at each evaluation. Those of log-concave likelihoods are a step
#: further than it says: the gradient's relative error is some 1e-4, the bound's 1e-6 nats.
SITE_TOLERANCE, LOG_CONCAVE_TOLERANCE = 1e-4, 1e-2
#: How many standard errors make a difference between leave-one-out densities count.
CERTAINTY = 2.0


class Decision(NamedTuple):
    """Whether an update learns hyperparameters.

    Attributes:
        learn: Whether it does.
        restart: Whether also from the observations at hand alone.
        reason: In words.
    """

    learn: bool
    restart: bool
    reason: str


def decide(
    stream: StreamState, num_new: int, learn: bool | None, surprise: float = 0.0
) -> Decision:
    """Whether to learn hyperparameters at an update.

    Args:
        stream: The stream before the update.
        num_new: How many observations are new.
        learn: What the user wants; ``None`` for no preference.
        surprise: What `surprise_of` says of the new observations.
    """
    if learn is False:
        return Decision(False, False, "conditioned on the data: learn=False")
    number = stream.num_seen + num_new
    surprised = surprise > max(LEAST_SURPRISE, SURPRISE * number)
    growth = GROWTH if surprised else RESTART_GROWTH
    restart = number >= growth * stream.restarted_at
    if learn:
        return Decision(True, False, "learn=True")
    if not number:
        return Decision(False, False, "no data")
    if surprised:
        reason = f"new observations were {surprise:.0f} nats less probable than expected"
        return Decision(True, restart, reason)
    if number < GROWTH * stream.learned_at:
        reason = f"{number} observations, {stream.learned_at} when hyperparameters were learnt"
        return Decision(False, False, f"conditioned on the data: {reason}")
    before = f"{stream.learned_at} the last time" if stream.learned_at else "the first time"
    return Decision(True, restart, f"{number} observations, {before}")


def surprise_of(stream: StreamState, density: Tensor) -> float:
    """How much less probable observations were than expected since hyperparameters were learnt.

    Args:
        stream: The stream before the update.
        density: ``[m x] n`` log densities of new observations before they are learnt.

    Returns:
        Nats. Those of observations that were more probable count against it.
    """
    if stream.expected is None:
        return 0.0
    density = density.nan_to_num(0.0)
    density = density.sum(tuple(range(density.dim() - 1))) if density.dim() > 1 else density
    lost = (stream.expected - density).clamp(-MOST_SURPRISING, MOST_SURPRISING)
    return max(stream.surprise + float(lost.sum()), 0.0)


@torch.no_grad()
def expected_density(model: StreamModel) -> float:
    """The mean log density of observations like those of the stream so far, on the scale of Y.

    Args:
        model: The model.
    """
    mean, scale = stream_densities(model).mean(), model.log_target_scale()
    return float(mean if scale is None else mean - scale.sum())


@torch.no_grad()
def leave_one_out(model: StreamModel, data: Observations, counts: Tensor) -> Tensor:
    """``n`` log predictive densities of observations at hand, each given all others.

    An observation's site is one on what the inducing points know of it, and is taken out of the
    posterior of that (`left_out`). What the inducing points leave unexplained is added to the
    variance.

    Args:
        model: A model that has learnt the observations.
        data: The observations, as the strategy sees them.
        counts: ``n``, how often each of them is part of the posterior.
    """
    strategy = model.variational_strategy
    sites, variance = strategy.sites(data, likelihood=model.likelihood)
    state = strategy.state()
    A, unexplained, prior_mean = strategy.whitened(state.chol, state.shared, data)
    known = (variance - unexplained).clamp_min(0)
    own = Sites(counts * sites.lam, counts * sites.beta)
    choice_size = data.arguments.get("choice_size")
    centred, left = left_out(own, posterior_mean(A, state.factors), known, choice_size)
    mean, variance = prior_mean + centred, unexplained + left
    if strategy.num_latents is not None:
        mean, variance = mean.mT, variance.mT
    return log_predictive(model.likelihood, data.targets, mean, variance, **data.arguments)


def stream_densities(model: StreamModel) -> Tensor:
    """``n`` leave-one-out densities of the observations at hand, for a mean over the whole stream.

    Args:
        model: The model.

    Returns:
        Densities, summed over outputs, times how many observations of the stream each stands for,
        relative to the mean of that; missing ones are zero.
    """
    stream = model.stream
    density = leave_one_out(model, model.transformed(stream.observations), stream.counts)
    density = density.nan_to_num(0.0)
    density = density.sum(tuple(range(density.dim() - 1))) if density.dim() > 1 else density
    ranks = model.variational_strategy.ranks
    density, weights = ranks.gather(density), ranks.gather(stream.represents)
    return density * weights / weights.mean()


def is_better(densities: Tensor, others: Tensor, certainty: float = CERTAINTY) -> bool:
    """Whether the mean of densities is larger, beyond what chance explains.

    Args:
        densities: ``n`` densities.
        others: ``n`` densities of the same observations.
        certainty: How many standard errors make a difference count.
    """
    if len(densities) < 2:
        return False
    difference = densities - others
    error = difference.std() / len(difference) ** 0.5
    return bool(difference.mean() > certainty * error)


def learnable(model: StreamModel, moves_Z: bool) -> tuple[DualELBO, Parameters, Bounds]:
    """The objective of a model, what it is maximised over, and bounds.

    Args:
        model: The model.
        moves_Z: Whether the inducing points are among it.
    """
    mll = DualELBO(model.likelihood, model)
    parameters, bounds = learnable_parameters(mll, moves_Z and model.changes_inducing_points)
    targets, ranks = model.stream.observations.targets, model.variational_strategy.ranks
    floor = noise_floor(model.likelihood, targets, ranks)
    return mll, parameters, {**bounds, **floor}


@torch.enable_grad()
def maximise(
    model: StreamModel,
    options: UpdateOptions,
    moves_Z: bool,
    stands_for: Tensor | None,
    with_past: bool = True,
) -> int:
    """Maximise the bound of memory, new observations and summary over hyperparameters.

    Args:
        model: The model, whose hyperparameters are moved in place.
        options: Optimiser and its limits.
        moves_Z: Whether inducing points are moved as well.
        stands_for: For how much of the summary each remembered observation stands.
        with_past: Whether the summary counts.

    Returns:
        The number of evaluations.
    """
    mll, parameters, bounds = learnable(model, moves_Z)
    steps = options.steps
    if steps is None:
        steps = 40 if options.optimizer == "lbfgs" else 100
    if not parameters or not steps:
        return 0
    sites, taken = None, 0
    tol = SITE_TOLERANCE if precision_floor(model.likelihood) is None else LOG_CONCAVE_TOLERANCE
    tol = max(tol, 1e-3) if options.optimizer == "adam" else tol

    def objective() -> Tensor:
        nonlocal sites, taken
        taken += 1
        bound, sites = model.bound(sites, tol, stands_for, options.site_steps, with_past=with_past)
        return -mll.with_priors(bound, 1).sum()

    def forget_sites() -> None:
        nonlocal sites
        sites = None

    ranks = model.variational_strategy.ranks
    loss = turning_back(shared_loss(objective, parameters, ranks), parameters, forget_sites)
    training = model.training
    model.train()
    if options.optimizer == "adam":
        for _ in adam([loss] * steps, parameters, bounds, options.learning_rate):
            pass
    else:
        tolerance = options.tol
        if tolerance is None:
            (number,) = ranks.sum(model.stream.represents.sum())
            tolerance = max(0.01, TOLERANCE * number.item())
        lbfgs(loss, parameters, bounds, steps, tolerance)
    model.train(training)
    return taken


def learn_best(
    model: StreamModel,
    options: UpdateOptions,
    moves_Z: bool,
    stands_for: Tensor | None,
    restart: bool,
    place: Callable[[StreamModel, bool], None],
) -> tuple[int, Tensor, str]:
    """Learn hyperparameters, and keep them unless they predict what is at hand worse.

    Args:
        model: The model, which becomes the best of the candidates.
        options: Optimiser and its limits.
        moves_Z: Whether inducing points are moved by gradient.
        stands_for: For how much of the summary each remembered observation stands.
        restart: Whether to start also from the observations at hand alone.
        place: Chooses inducing points for the present hyperparameters of a model; with ``True``,
            enough for others, too.

    Returns:
        The number of evaluations, the bound, and which candidate has been chosen.
    """
    steps = 0

    def candidate(name: str, learn: bool, with_past: bool) -> _Candidate:
        nonlocal steps
        draft = draft_of(model, learn=learn)
        if not with_past:
            draft.set_hyperparameters(model.stream.initial)
        if learn:
            strategy = draft.variational_strategy
            Z = strategy.inducing_points.detach().clone()
            place(draft, True)
            steps += maximise(draft, options, moves_Z, stands_for if with_past else None, with_past)
            if not moves_Z:
                # What is only known at the points of before is not to be spread over more.
                strategy.start_from(Z)
                place(draft, False)
        bound = draft.refresh(max_steps=options.site_steps)
        return _Candidate(name, draft, bound, stream_densities(draft))

    present = candidate("kept hyperparameters", False, True)
    learnt: list[_Candidate] = []
    names = "learnt hyperparameters", "learnt hyperparameters from scratch"
    for name, with_past in zip(names, (True, False), strict=True):
        if not with_past and not (restart and model.stream.num_updates):
            continue
        try:
            with model.variational_strategy.ranks.together():
                learnt.append(candidate(name, True, with_past))
        except (FloatingPointError, NanError, NotPSDError):
            continue  # hyperparameters without a posterior are no candidate
    best = learnt[0] if learnt else present
    for other in (*learnt[1:], present):
        if is_better(other.densities, best.densities):
            best = other
    adopt(model, best.model)
    return steps, best.bound, best.name


class _Candidate(NamedTuple):
    name: str
    model: StreamModel
    bound: Tensor
    densities: Tensor

r"""Learning hyperparameters along a stream: when to learn, where to start, and what to keep.

Hyperparameters are learnt whenever the number of observations has grown by a certain factor since
they were last learnt: often at first, then ever more rarely. They are learnt sooner if new
observations are much less probable than expected. The bound of memory, new observations and summary
is maximised from the present hyperparameters. However, the summary was folded under these, and
favours them. So there is a second start that leaves out the summary and uses only the observations
at hand (memory and new ones), which are a sample of the whole stream.

The candidates are compared by their leave-one-out densities of the observations at hand. Each
observation is weighted by the number of observations that it stands for, so the mean estimates the
mean log density over the whole stream. If the present hyperparameters are significantly better than
the learnt ones, they are kept.
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

#: Learn when the number of observations has grown by this factor since the last time.
GROWTH = 1.2
#: Also start from scratch when it has grown by this factor since the last such start.
RESTART_GROWTH = 2.0
#: Learn when the surprise (`surprise_of`) exceeds both this many nats per observation of the stream
#: and this many nats in total.
SURPRISE, LEAST_SURPRISE = 0.05, 10.0
#: After a surprise, the next one has to be this many times as large, until the data have grown: at
#: the end of a sorted stream, observations are always less probable than elsewhere. If learning did
#: not help, the factor is doubled up to a maximum.
PATIENCE, MOST_PATIENCE = 2.0, 8.0
#: An observation counts for at most this many nats: it may be an outlier.
MOST_SURPRISING = 3.0
#: L-BFGS stops when an iteration gains less than this, in nats per observation.
TOLERANCE = 5e-5
#: Relative tolerance of the sites at each evaluation. Sites of log-concave likelihoods are one step
#: more accurate than the tolerance says: the relative error of the gradient is about 1e-4, that of
#: the bound 1e-6 nats.
SITE_TOLERANCE, LOG_CONCAVE_TOLERANCE = 1e-4, 1e-2
#: A difference between leave-one-out densities counts if it exceeds this many standard errors.
CERTAINTY = 2.0


#: The outcome of learning that did not help.
KEPT = "kept hyperparameters"


class Decision(NamedTuple):
    """Whether an update learns hyperparameters.

    Attributes:
        learn: Whether hyperparameters are learnt.
        restart: Whether there is also a start from the observations at hand alone.
        reason: The reason, in words.
        surprised: Whether the reason is a surprise.
    """

    learn: bool
    restart: bool
    reason: str
    surprised: bool = False


def decide(
    stream: StreamState, num_new: int, learn: bool | None, surprise: float = 0.0
) -> Decision:
    """Decide whether an update learns hyperparameters.

    Args:
        stream: The stream before the update.
        num_new: The number of new observations.
        learn: The user's choice; ``None`` for no preference.
        surprise: The surprise after the new observations, see `surprise_of`.
    """
    if learn is False:
        return Decision(False, False, "conditioned on the data: learn=False")
    number = stream.num_seen + num_new
    surprised = surprise > stream.patience * max(LEAST_SURPRISE, SURPRISE * number)
    growth = GROWTH if surprised else RESTART_GROWTH
    restart = number >= growth * stream.restarted_at
    if learn:
        return Decision(True, False, "learn=True")
    if not number:
        return Decision(False, False, "no data")
    if surprised:
        reason = f"new observations were {surprise:.0f} nats less probable than expected"
        return Decision(True, restart, reason, True)
    if number < GROWTH * stream.learned_at:
        reason = f"{number} observations, {stream.learned_at} when hyperparameters were learnt"
        return Decision(False, False, f"conditioned on the data: {reason}")
    before = f"{stream.learned_at} the last time" if stream.learned_at else "the first time"
    return Decision(True, restart, f"{number} observations, {before}")


def patience_after(stream: StreamState, decision: Decision, helped: bool) -> float:
    """Return by which factor the next surprise has to be larger than the first one.

    Args:
        stream: The stream before hyperparameters were learnt.
        decision: Why they were.
        helped: Whether others than before have been chosen.
    """
    if not decision.surprised:
        return 1.0
    return PATIENCE if helped else min(2 * stream.patience, MOST_PATIENCE)


def surprise_of(stream: StreamState, density: Tensor) -> float:
    """Return the surprise since hyperparameters were last learnt.

    This is how much less probable than expected the observations since then were.

    Args:
        stream: The stream before the update.
        density: ``[m x] n`` log densities of new observations before they are learnt.

    Returns:
        The surprise in nats, at least zero. Observations that were more probable than expected
        reduce it.
    """
    if stream.expected is None:
        return 0.0
    density = density.nan_to_num(0.0)
    density = density.sum(tuple(range(density.dim() - 1))) if density.dim() > 1 else density
    lost = (stream.expected - density).clamp(-MOST_SURPRISING, MOST_SURPRISING)
    return max(stream.surprise + float(lost.sum()), 0.0)


@torch.no_grad()
def expected_density(model: StreamModel) -> float:
    """Return the expected log density of an observation of the stream so far, on the scale of Y.

    Args:
        model: The model.
    """
    mean, scale = stream_densities(model).mean(), model.log_target_scale()
    return float(mean if scale is None else mean - scale.sum())


@torch.no_grad()
def leave_one_out(model: StreamModel, data: Observations, counts: Tensor) -> Tensor:
    """Return ``n`` leave-one-out log densities: of each observation, given all others.

    The site of an observation depends on the function only through the inducing points. It is
    removed from the posterior of that part (`left_out`). The variance that the inducing points
    leave unexplained is then added.

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
    """Return ``n`` weighted leave-one-out densities, whose mean estimates that of the stream.

    Args:
        model: The model.

    Returns:
        The densities of the observations at hand, summed over outputs. Each is multiplied by the
        number of observations of the stream that it stands for, relative to the mean of these
        numbers. Missing observations have density zero.
    """
    stream = model.stream
    density = leave_one_out(model, model.transformed(stream.observations), stream.counts)
    density = density.nan_to_num(0.0)
    density = density.sum(tuple(range(density.dim() - 1))) if density.dim() > 1 else density
    ranks = model.variational_strategy.ranks
    density, weights = ranks.gather(density), ranks.gather(stream.represents)
    return density * weights / weights.mean()


def is_better(densities: Tensor, others: Tensor, certainty: float = CERTAINTY) -> bool:
    """Whether some densities are better on average than others, by a significant difference.

    Args:
        densities: ``n`` densities.
        others: ``n`` densities of the same observations.
        certainty: The number of standard errors that a difference has to exceed.
    """
    if len(densities) < 2:
        return False
    difference = densities - others
    error = difference.std() / len(difference) ** 0.5
    return bool(difference.mean() > certainty * error)


def learnable(model: StreamModel, moves_Z: bool) -> tuple[DualELBO, Parameters, Bounds]:
    """Return the objective of a model, its learnable parameters and their bounds.

    Args:
        model: The model.
        moves_Z: Whether the inducing points are among the parameters.
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
        model: The model, whose hyperparameters are changed in place.
        options: The optimiser and its limits.
        moves_Z: Whether the inducing points are optimised as well.
        stands_for: The share of the summary that each remembered observation stands for.
        with_past: Whether the summary is part of the bound.

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
    """Learn hyperparameters, and keep them unless they predict the observations at hand worse.

    Args:
        model: The model, which becomes the best of the candidates.
        options: The optimiser and its limits.
        moves_Z: Whether the inducing points are optimised by gradient.
        stands_for: The share of the summary that each remembered observation stands for.
        restart: Whether there is also a start from the observations at hand alone.
        place: Chooses inducing points for the present hyperparameters of a model. With ``True``,
            it chooses enough for other hyperparameters, too.

    Returns:
        The number of evaluations, the bound, and the name of the chosen candidate.
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
                # What is only known at the old points must not be spread over more of them.
                strategy.start_from(Z)
                place(draft, False)
        bound = draft.refresh(max_steps=options.site_steps)
        return _Candidate(name, draft, bound, stream_densities(draft))

    present = candidate(KEPT, False, True)
    learnt: list[_Candidate] = []
    names = "learnt hyperparameters", "learnt hyperparameters from scratch"
    for name, with_past in zip(names, (True, False), strict=True):
        if not with_past and not (restart and model.stream.num_updates):
            continue
        try:
            with model.variational_strategy.ranks.together():
                learnt.append(candidate(name, True, with_past))
        except (FloatingPointError, NanError, NotPSDError):
            continue  # hyperparameters without a posterior are not a candidate
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

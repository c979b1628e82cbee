"""Update a model with the next batch of a stream.

Every observation lives in exactly one place: in the memory, where it is kept as it is, or folded
into the summary for good. An update takes memory and new observations together, converges their
sites on top of the summary, learns hyperparameters, chooses which observations to keep in the
memory and folds the others.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from gpytorch.likelihoods import BernoulliLikelihood, SoftmaxLikelihood
from torch import Tensor

from seqgp.dual import posterior_mean
from seqgp.dual.sites import sites as make_sites
from seqgp.likelihoods import log_predictive
from seqgp.likelihoods.choices import first_parts
from seqgp.likelihoods.discrete import OrdinalLikelihood
from seqgp.likelihoods.traits import is_conjugate
from seqgp.observations import Observations
from seqgp.progress import progress_bar
from seqgp.streaming.draft import adopt, draft_of
from seqgp.streaming.drift import choose_discount, fade
from seqgp.streaming.greedy_allocator import GreedyAllocator
from seqgp.streaming.inducing_points import (
    DEFAULT_LIMIT,
    Candidates,
    Cluster,
    Exchange,
    InducingPointRule,
    Keep,
    choose_for_each,
    inducing_point_rule,
    on_seen_values,
)
from seqgp.streaming.learning import (
    KEPT,
    Decision,
    decide,
    expected_density,
    patience_after,
    surprise_of,
)
from seqgp.streaming.memory import MemoryOptions, SamplingPolicy, summed_over_parts
from seqgp.streaming.model import StreamModel
from seqgp.streaming.options import UpdateOptions
from seqgp.streaming.paper import PaperRule
from seqgp.streaming.point_criterion import explain_residuals, inducing_cost
from seqgp.streaming.replay import choose_replay
from seqgp.streaming.rules import (
    Batch,
    Learned,
    Plan,
    PseudoLikelihood,
    UpdateRule,
    note_classes,
    stands_for,
    unseen_classes,
)
from seqgp.streaming.standardization import note_scale, restandardize
from seqgp.streaming.state import StreamState
from seqgp.validation import check_bound, renamed

#: A batch is small if the memory is at least this many times larger.
SMALL_BATCH = 20

#: Update rules by their short names.
RULES: dict[str, Callable[[], UpdateRule]] = {
    "pseudo-likelihood": PseudoLikelihood,
    "paper": PaperRule,
}


class Remembered(NamedTuple):
    """The observations in a model's memory.

    Attributes:
        inputs: ``n x d`` inputs, as you passed them.
        targets: ``[m x] n`` transformed targets.
        leverage: ``n`` Bayesian leverage scores under the present posterior.
    """

    inputs: Tensor
    targets: Tensor
    leverage: Tensor


@dataclass(frozen=True)
class UpdateRecord:
    """A record of an update.

    Attributes:
        elbo: The evidence lower bound after the update. With a likelihood that is not Gaussian,
            it is only known up to a constant once observations have been folded. After a small
            batch, it is the previous one plus the log evidence of the new observations.
        log_density: Mean log predictive density of the new observations before they were learnt.
            NaN if there were none.
        steps: The number of evaluations of the objective while hyperparameters were learnt.
        decision: Why hyperparameters were learnt or not, and which ones were kept.
        discount: The factor by which everything learnt before was down-weighted. With
            ``discount="auto"``, a factor below 1 means that the stream has changed, or keeps
            changing.
        num_new: The number of new observations.
        num_memory: The number of observations in the memory after the update.
        memory_gained: The number of new observations among them.
        memory_lost: The number of observations that left the memory.
        num_inducing: The number of inducing points.
        hyperparameters: All hyperparameters by name, with their constraints applied.
        seconds: The duration of the update.
    """

    elbo: float
    log_density: float
    steps: int
    decision: str
    discount: float
    num_new: int
    num_memory: int
    memory_gained: int
    memory_lost: int
    num_inducing: int
    hyperparameters: dict[str, Tensor]
    seconds: float


def update_rule(mode: str | UpdateRule) -> UpdateRule:
    """Return an update rule, given the rule itself or its short name.

    Args:
        mode: A rule or its short name.
    """
    if isinstance(mode, UpdateRule):
        return mode
    if isinstance(mode, str) and mode in RULES:
        return RULES[mode]()
    raise ValueError(f"mode: expected pseudo-likelihood or paper, got {mode!r}.")


def update(
    model: StreamModel,
    X: Tensor,
    Y: Tensor,
    noise: Tensor | None,
    arguments: dict[str, Any],
    mode: str | UpdateRule = "pseudo-likelihood",
    options: UpdateOptions | None = None,
) -> UpdateRecord:
    """Learn from the next batch of a stream; see `SequentialGP.update`.

    Args:
        model: The model. It is changed once the update is complete; if there is an error, it is
            left as it was.
        X: ``n x d`` inputs.
        Y: ``n x m`` observations.
        noise: Noise variances of Gaussian observations.
        arguments: Per-point arguments of the likelihood.
        mode: The update rule.
        options: The options.
    """
    start_time = time.perf_counter()
    options = UpdateOptions() if options is None else options
    rule = update_rule(mode)
    model.check_not_fantasy()
    if model.stream.num_updates and rule.name != model.stream.rule:
        raise ValueError(
            f"mode: expected {model.stream.rule!r}, as in earlier updates, since the other mode "
            f"cannot use their summary; got {rule.name!r}."
        )
    if not model.stream.num_seen and bool(model.variational_strategy.dual_B.any()):
        raise RuntimeError(
            "The posterior has been learnt in a training loop, from observations that the model "
            "does not hold. Pass these to the constructor, and update that model."
        )
    ranks, num_old = model.variational_strategy.ranks, model.stream.num_held
    with ranks.together():
        with model.variational_strategy.steady():
            new = model.checked(X, Y, noise, arguments)
            memory = MemoryOptions.of(
                model.memory_options if options.memory is None else options.memory
            )
            rule.check(model, options, memory)
            num_new = ranks.total(len(new))
            grown = model.stream.append(new)
            density = ranks.gather(_density(model, grown.observations, len(new)))
        surprise = surprise_of(model.stream, density)
        wanted = rule.learns_by_default(options.learn)
        decision = decide(model.stream, num_new, wanted, surprise)
        draft = draft_of(model, decision.learn)
        grown = replace(grown, surprise=0.0 if decision.learn else surprise)
        # Without learning, only the posterior changes.
        steady = nullcontext() if decision.learn else draft.variational_strategy.steady()
        with steady:
            parts = _learn(draft, grown, new, num_new, rule, options, memory, decision)
        elbo, log_density = torch.stack([parts.bound.sum(), density.nanmean()]).tolist()
        if not math.isfinite(elbo):
            check_bound(parts.bound, "Y")
        gained = int((parts.kept >= num_old).sum())
        ranks.commit(lambda: adopt(model, draft))
    return UpdateRecord(
        elbo=elbo,
        log_density=log_density,
        steps=parts.steps,
        decision=parts.decision,
        discount=parts.discount,
        num_new=num_new,
        num_memory=len(parts.kept),
        memory_gained=gained,
        memory_lost=num_old - (len(parts.kept) - gained),
        num_inducing=model.variational_strategy.inducing_points.shape[-2],
        hyperparameters=model.constrained_hyperparameters(),
        seconds=time.perf_counter() - start_time,
    )


class _Parts(NamedTuple):
    """The results of `_learn` that become part of the record of an update."""

    bound: Tensor
    steps: int
    decision: str
    discount: float
    kept: Tensor


def _learn(
    model: StreamModel,
    grown: StreamState,
    new: Observations,
    num_new: int,
    rule: UpdateRule,
    options: UpdateOptions,
    memory: MemoryOptions,
    decision: Decision,
) -> _Parts:
    """Run the steps of an update on a draft of the model, whose stream becomes the grown one.

    If several processes share the stream, ``new`` holds the new observations of this process, and
    ``num_new`` is their number over all processes.
    """
    strategy = model.variational_strategy
    num_old, num_points = len(model.stream.observations), strategy.inducing_points.shape[-2]
    represented = None
    if decision.learn:
        represented = stands_for(model, model.transformed(model.stream.observations))
    if not grown.num_updates:
        grown = replace(grown, initial=model.hyperparameter_values())
    model.stream = grown
    if memory.replay is not None:
        model.stream = replace(model.stream, replay=float(memory.replay), power=1.0)
    note_classes(model)
    data = model.transformed(model.stream.observations)
    factor = _discount(model, data, num_old, options, decision)
    if factor != 1:
        fade(model, num_old, factor)
    if model.standardizes_by_default and rule.follows_scale and not model.batch_shape:
        note_scale(model, new)
        if decision.learn:
            restandardize(model)
            data = model.transformed(model.stream.observations)
    inducing = _inducing_rule(model, rule, options)

    def place(draft: StreamModel, generously: bool) -> None:
        if inducing.follows_kernel:
            own = inducing.generous() if generously else inducing
            _choose_inducing_points(draft, num_new, own, options.max_inducing, rule)

    # Choose from scratch only if hyperparameters are learnt, or if the user names a rule for an
    # update without learning. Otherwise a few more points suffice.
    anew = decision.learn or (options.learn is False and options.inducing is not None)
    checks = decision.learn or _is_time_to_check(model, num_new)
    small = not checks and factor == 1 and _is_small(model, num_new, inducing, rule)
    if small:
        small = _have_their_points(model, num_new, inducing, options.max_inducing)
    if not small:
        _choose_inducing_points(model, num_new, inducing, options.max_inducing, rule, anew)
    if memory.replay is None and checks and rule.chooses_replay and memory.is_sample:
        choose_replay(
            model, stream_size=model.stream.num_seen + num_new, max_steps=options.site_steps
        )
    if represented is not None:
        represented = represented * model.stream.summary_share
    plan = Plan(decision, inducing.moves, place)
    learned = rule.learn(model, Batch(data, num_old, represented, small), options, plan)
    if checks and inducing.follows_kernel and not isinstance(rule, PaperRule):
        learned = _add_where_misfitting(model, learned, options)
    # Hyperparameters that have been learnt from little may need many points for a while.
    is_full = num_points >= DEFAULT_LIMIT and model.stream.num_updates > 0
    if is_full and (decision.learn or options.learn is False):
        _warn_at_limit(model, inducing, options.max_inducing)
    if decision.learn and options.learn is None:
        patience = patience_after(model.stream, decision, learned.outcome != KEPT)
        model.stream = replace(model.stream, expected=expected_density(model), patience=patience)
    # Transform again: the input transform may have been learnt.
    batch = Batch(model.transformed(model.stream.observations), num_old, represented, small)
    kept = _remember(model, batch, num_new, rule, options, memory)
    stream = model.stream
    number = stream.num_seen + num_new
    model.stream = replace(
        model.stream,
        rule=rule.name,
        num_updates=stream.num_updates + 1,
        num_seen=number,
        learned_at=number if decision.learn else stream.learned_at,
        restarted_at=number if decision.restart else stream.restarted_at,
    ).noting_noise()
    if not (decision.learn or strategy.has_summary):
        strategy.state()  # cached for the first prediction
    reason = f"{learned.outcome}: {decision.reason}" if decision.learn else decision.reason
    return _Parts(learned.bound, learned.steps, reason, factor, kept)


def _remember(
    model: StreamModel,
    batch: Batch,
    num_new: int,
    rule: UpdateRule,
    options: UpdateOptions,
    memory: MemoryOptions,
) -> Tensor:
    """Choose which observations to keep in the memory, and fold the others.

    Returns:
        The indices of those that are kept, among the observations of all ranks.
    """
    stream = model.stream
    leverage = stream.gather(_leverage(model, batch, memory))
    size = stream.observations.arguments.get("choice_size")
    first = None if size is None else first_parts(stream.gather(size))
    leverage = leverage if first is None else summed_over_parts(leverage, first)
    importance = _importance(stream, memory, leverage, num_new)
    choice = memory.at(stream.num_seen + num_new).choose_answers(
        first,
        leverage,
        num_new,
        stream.num_updates,
        stream.gather(classes_of(model)) if memory.balance else None,
        importance * stream.gather(stream.represents),
    )
    tiny = torch.finfo(leverage.dtype).tiny
    represents = stream.represents / stream.own(choice.inclusion).clamp_min(tiny)
    model.stream = replace(stream, represents=represents, importance=stream.own(importance))
    rule.remember(model, batch, _note_kept(model, choice.kept), options)
    return choice.kept


def _discount(
    model: StreamModel,
    data: Observations,
    num_old: int,
    options: UpdateOptions,
    decision: Decision,
) -> float:
    """Return the factor by which everything learnt so far is down-weighted from now on."""
    if not isinstance(options.discount, str):
        return options.discount
    if decision.learn and not model.stream.learned_at:
        return 1.0  # the hyperparameters are still arbitrary, so nothing counts as surprising yet
    old, new = data.select(slice(num_old)), data.select(slice(num_old, len(data)))
    stream = model.stream
    factor, evidence = choose_discount(model, new, old, stream.counts[:num_old], stream.drift)
    model.stream = replace(model.stream, drift=evidence)
    return factor


def _importance(
    stream: StreamState, memory: MemoryOptions, leverage: Tensor, num_new: int
) -> Tensor:
    """Return the importance of all observations; the memory's policy sets that of the new ones."""
    policy, importance = memory.chooser, stream.gather(stream.importance)
    if not num_new or not isinstance(policy, SamplingPolicy):
        return importance
    new = policy.importance(leverage[len(leverage) - num_new :])
    old = importance[: len(leverage) - num_new]
    return torch.cat([old, new.to(old)])


def _note_kept(model: StreamModel, kept: Tensor) -> Tensor:
    """Return the indices of this rank's observations that are kept, and update their positions.

    Args:
        model: The model.
        kept: Indices among the observations of all ranks, in increasing order.
    """
    stream = model.stream
    if stream.shard is None:
        return kept
    is_kept = torch.zeros(stream.num_held, dtype=torch.bool, device=kept.device)
    is_kept[kept] = True
    model.stream = replace(stream, shard=stream.shard.among(kept))
    return stream.own(is_kept).nonzero().squeeze(-1)


@torch.no_grad()
def _density(model: StreamModel, held: Observations, num_new: int) -> Tensor:
    """Return the log predictive density of the last observations, on Y's scale, before the update.

    If inputs are not transformed, covariances are evaluated for all observations, since the update
    will use them again, unless there are few new ones.
    """
    number = len(held)
    new = slice(number - num_new, number)
    with model.guard.reading:
        data = None if _are_few(num_new, number - num_new) else model.transformed(held)
        if data is None or data.inputs is not held.inputs:
            data, new = model.transformed(held.select(new)), slice(num_new)
        mean, variance = model.variational_strategy.marginals(data, new)
        part = data.select(new)
    if model.variational_strategy.num_latents is not None:
        mean, variance = mean.mT, variance.mT
    density = log_predictive(model.likelihood, part.targets, mean, variance, **part.arguments)
    scale = model.log_target_scale()
    return density if scale is None else density - scale


def _inducing_rule(
    model: StreamModel, rule: UpdateRule, options: UpdateOptions
) -> InducingPointRule:
    if options.inducing is not None:
        return inducing_point_rule(options.inducing)
    # Without learning, points that the user has chosen stay where they are.
    stay = options.learn is False and model.keeps_inducing_points
    may_change = model.changes_inducing_points and not stay
    return rule.default_inducing(may_change, model.fits_inducing_points)


def _choose_inducing_points(
    model: StreamModel,
    num_new: int,
    inducing: InducingPointRule,
    max_points: int | None,
    rule: UpdateRule,
    anew: bool = True,
) -> None:
    """Replace the inducing points by those that the rule chooses.

    The duals stay in their original basis, so that nothing is lost until the new points are final.
    """
    strategy = model.variational_strategy
    Z = strategy.inducing_points.detach()
    if isinstance(inducing, Cluster) and Z.dim() > 2:
        raise ValueError('inducing: "cluster" is not supported for several models or outputs.')
    allocator = model.inducing_point_allocator
    if isinstance(rule, PaperRule) and allocator is None:
        allocator = GreedyAllocator()
    if isinstance(inducing, Keep):
        return
    stream = model.stream
    points, represents, precision, J = _weighted_inputs(model)
    limit = _limit(model) if max_points is None else max_points
    candidates = Candidates(
        _first_of_batch(points),
        represents,
        precision,
        num_new * J,
        stream.num_seen,
        (anew or Z.shape[-2] > limit) and not (strategy.has_summary or model.keeps_inducing_points),
        model.covar_module,
        limit,
        allocator,
        stream.num_updates,
    )
    if Z.dim() == 2:
        chosen = inducing.choose(Z, candidates)
    else:
        chosen = choose_for_each(inducing, Z, points, candidates)
    if chosen is not Z and model.discrete_dims:
        points = points.expand(*Z.shape[:-2], *points.shape[-2:])
        chosen = on_seen_values(chosen, torch.cat([points, Z], -2), model.discrete_dims)
    if chosen is not Z and (chosen.shape != Z.shape or not torch.equal(chosen, Z)):
        strategy.start_from(chosen)
    model.stream = replace(stream, unexplained=0.0)


def _is_time_to_check(model: StreamModel, num_new: int) -> bool:
    """Whether the stream has crossed a power of 1.05 in size, which is rare for small batches."""
    before, now = model.stream.num_seen, model.stream.num_seen + num_new
    return before > 0 and int(math.log(now, 1.05)) > int(math.log(before, 1.05))


def _is_small(
    model: StreamModel, num_new: int, inducing: InducingPointRule, rule: UpdateRule
) -> bool:
    """Whether a batch is so small, relative to the memory, that the memory is left as it is."""
    stream = model.stream
    known = stream.bound is not None and stream.shard is None
    simple = rule.conditions and type(inducing) in (Exchange, Keep)
    return known and _are_few(num_new, stream.num_held) and simple and model.is_settled()


def _are_few(num_new: int, num_held: int) -> bool:
    """Whether there are few new observations, relative to those that are held."""
    return num_held >= 100 and SMALL_BATCH * num_new <= num_held


def _have_their_points(
    model: StreamModel, num_new: int, inducing: InducingPointRule, max_points: int | None
) -> bool:
    """Whether the inducing points explain the new inputs of small batches well enough.

    What they do not explain is added up until they are chosen again. The inputs in the memory were
    checked then. So the cost of all is tolerable if that of the new ones, on average over all, is.
    """
    Z, stream = model.variational_strategy.inducing_points.detach(), model.stream
    if not isinstance(inducing, Exchange):
        return True  # they are kept
    if Z.dim() > 2 or len(Z) > (_limit(model) if max_points is None else max_points):
        return False
    data = stream.observations
    new = model.transformed(data.select(slice(len(data) - num_new, len(data))))
    if not num_new:
        return True
    J = 1 if new.coefficients is None else new.coefficients.shape[-1]
    precision = _precision(model, new).repeat_interleave(J, -1)
    cost = inducing_cost(Z, new.points, model.covar_module, precision)
    unexplained = stream.unexplained + num_new * J * cost
    model.stream = replace(stream, unexplained=unexplained)
    return unexplained <= inducing.tol * stream.num_held


def _add_where_misfitting(model: StreamModel, learned: Learned, options: UpdateOptions) -> Learned:
    """Add inducing points where the residuals of the fit show that some are missing.

    The criterion in nats (`inducing_cost`) assumes that the kernel is right. Where the function
    varies faster than the kernel says, the residuals are not just noise, and missing inducing
    points cost more than the criterion says; see `explain_residuals`.
    """
    strategy, stream = model.variational_strategy, model.stream
    Z, kernel = strategy.inducing_points.detach(), model.covar_module
    data = model.transformed(stream.observations)
    if Z.dim() > 2 or kernel.batch_shape or data.coefficients is not None or not stream.num_held:
        return learned
    sites, _ = strategy.sites(data, likelihood=model.likelihood)
    state = strategy.state()
    A = strategy.whitened(state.chol, state.shared, data).A
    slope = (sites.lam - sites.beta * posterior_mean(A, state.factors)).detach()
    limit = _limit(model) if options.max_inducing is None else options.max_inducing
    points, slope = stream.gather(data.points.detach(), -2), stream.gather(slope)
    chosen = explain_residuals(Z, points, kernel, slope, limit)
    if chosen is Z:
        return learned
    strategy.start_from(chosen)
    return learned._replace(bound=model.refresh(max_steps=options.site_steps))


def _weighted_inputs(model: StreamModel) -> tuple[Tensor, Tensor, Tensor, int]:
    """Return the points of the observations at hand with their weights in `inducing_cost`.

    Returns:
        The ``n J x d`` points of all ranks, as the strategy sees them, with any batch dimensions in
        front; ``n J``, the number of observations that each stands for; ``[b x] n J``, the
        precisions of the sites, either a row for each kernel or their sum; and ``J``, the number of
        points of each observation.
    """
    stream = model.stream
    data = model.transformed(stream.observations)
    J = 1 if data.coefficients is None else data.coefficients.shape[-1]
    precision = _precision(model, data)
    points = data.points.detach().unflatten(-2, (len(data), J))
    return (
        stream.gather(points, -3).flatten(-3, -2),
        stream.gather(stream.represents).repeat_interleave(J),
        stream.gather(precision).repeat_interleave(J, -1),
        J,
    )


def _precision(model: StreamModel, data: Observations) -> Tensor:
    """Return ``[b x] n`` precisions of sites: a row for each kernel, or their sum."""
    strategy, likelihood = model.variational_strategy, model.likelihood
    if is_conjugate(likelihood):  # the sites do not depend on the posterior
        prior = torch.zeros_like(data.targets)
        sites = make_sites(data.evaluate(likelihood, False)(prior, prior), prior)
    else:
        sites, _ = strategy.sites(data, likelihood=likelihood)
    precision = sites.beta.expand_as(sites.lam)
    # Kernels of several outputs or latents share the inducing points.
    if strategy.inducing_points.dim() > 2 or precision.shape[:-1] != model.covar_module.batch_shape:
        precision = _sum_over_batch(precision)
    return precision


def _warn_at_limit(model: StreamModel, inducing: InducingPointRule, limit: int | None) -> None:
    """Warn, once per stream, if the data need more inducing points than the default limit."""
    Z, stream = model.variational_strategy.inducing_points.detach(), model.stream
    default = limit is None and model.max_inducing == DEFAULT_LIMIT
    default = default and not model.keeps_inducing_points
    reached = Z.dim() == 2 and len(Z) >= DEFAULT_LIMIT and stream.num_held
    if not (isinstance(inducing, Exchange) and default and reached) or stream.warned:
        return
    points, represents, precision, _ = _weighted_inputs(model)
    cost = inducing_cost(Z, points, model.covar_module, precision, represents)
    if cost > inducing.tol:
        model.stream = replace(stream, warned=True)
        warnings.warn(
            f"{len(Z)} inducing points, the default maximum, are too few for these data: they "
            f"lower the bound by {cost:.3g} nats per observation (target: {inducing.tol}). For "
            "better predictions but slower updates, pass max_inducing=600, for example, to update, "
            "or inducing_points=600 to the constructor.",
            stacklevel=6,
        )


def _limit(model: StreamModel) -> int:
    """Return the maximum number of inducing points.

    After the first update, this is at least the present number, which may exceed
    ``model.max_inducing``.
    """
    present = model.variational_strategy.inducing_points.shape[-2]
    first = model.stream.num_updates == 0
    return model.max_inducing if first else max(present, model.max_inducing)


def leverage_of(model: StreamModel, data: Observations) -> Tensor:
    """Return ``n`` leverage scores of observations under the present posterior.

    Args:
        model: The model.
        data: Observations as the strategy sees them.
    """
    sites, variance = model.variational_strategy.sites(data, likelihood=model.likelihood)
    return _sum_over_batch(sites.beta * variance)


def _leverage(model: StreamModel, batch: Batch, memory: MemoryOptions) -> Tensor:
    """Return ``n`` leverage scores as far as the memory's policy needs them, and zero elsewhere."""
    data, old, policy = batch.data, batch.num_old, memory.chooser
    if not isinstance(policy, SamplingPolicy):
        return leverage_of(model, data)
    if not policy.uses_leverage:
        return torch.zeros_like(model.stream.represents)
    new = leverage_of(model, data.select(slice(old, len(data))))
    return torch.cat([new.new_zeros(old), new])


def classes_of(model: StreamModel) -> Tensor:
    """Return the classes of the observations at hand.

    Args:
        model: The model.
    """
    targets, likelihood = model.stream.observations.targets, model.likelihood
    kinds = BernoulliLikelihood | OrdinalLikelihood | SoftmaxLikelihood
    if isinstance(likelihood, kinds) and targets.dim() == 1:
        return targets
    raise ValueError(
        "balance: expected observations of one output that are classes, got those of "
        f"{model.num_columns} with a {type(likelihood).__name__}."
    )


def update_stream(
    update_with: Callable[..., UpdateRecord],
    stream: Iterable[Sequence[Any]],
    callback: Callable[[UpdateRecord], object] | None,
    progress: bool,
    options: dict[str, Any],
) -> list[UpdateRecord]:
    """Update with each batch of a stream; see `SequentialGP.update_stream`.

    Args:
        update_with: Updates the model with one batch.
        stream: The batches.
        callback: Called with the record of each update.
        progress: Whether to show a progress bar.
        options: Options of each update.
    """
    records = []
    bar = progress_bar(stream, desc="stream", unit=" updates", disable=None if progress else True)
    for number, item in enumerate(bar):
        if not isinstance(item, Sequence) or len(item) not in (2, 3):
            raise TypeError(
                "stream: expected pairs (X, Y), or triples (X, Y, arguments), the last a "
                f"dictionary; got a {type(item).__name__} as batch {number}."
            )
        X, Y, *more = item
        try:
            record = update_with(X, Y, **options, **(more[0] if more else {}))
        except Exception as error:
            error.add_note(
                f"This was batch {number} of the stream, counted from 0; those before it have "
                "been learnt."
            )
            raise
        records.append(record)
        bar.set_postfix(log_density=f"{record.log_density:.3f}", memory=record.num_memory)
        if callback is not None:
            callback(record)
    return records


def forget(model: StreamModel, known: Observations, fade: Tensor | None = None) -> None:
    """Remove observations; see `SequentialGP.forget`.

    Args:
        model: The model. It is changed once all observations have been removed; if there is an
            error, it is left as it was.
        known: The observations, as the model stores them.
        fade: ``n'``, the remaining weight of each observation that is no longer in the memory.
    """
    model.check_not_fantasy()
    draft = draft_of(model, learn=False)
    ranks, held = draft.variational_strategy.ranks, draft.stream.observations
    known = known.gathered(ranks)  # any rank may hold them
    fade = None if fade is None else ranks.gather(fade)
    keep = torch.ones(len(held), dtype=torch.bool, device=held.inputs.device)
    rest = list(range(len(known)))
    for rank in range(ranks.size):  # rank by rank, so that each observation is removed once
        found = torch.zeros(len(rest), device=keep.device)
        if rank == ranks.rank:
            matches = _matches(
                held, known.select(torch.tensor(rest, dtype=torch.long, device=keep.device))
            )
            keep[[i for i in matches if i is not None]] = False
            found[[k for k, i in enumerate(matches) if i is not None]] = 1.0
        (found,) = ranks.sum(found)
        rest = [k for k, is_found in zip(rest, found.tolist(), strict=True) if not is_found]
    if rest:
        if fade is None and draft.stream.fades:
            raise ValueError(
                f"X: {len(rest)} of these observations are no longer in the memory, and the stream "
                "has been discounted. Pass fade=, the product of all discounts since each of them "
                "was learnt."
            )
        index = torch.tensor(rest, dtype=torch.long, device=keep.device)
        parts = known.select(index).first_parts
        answer = torch.arange(len(rest)) if parts is None else parts.unique(return_inverse=True)[1]
        index = index[answer.to(index) % ranks.size == ranks.rank]
        gone = draft.transformed(known.select(index))
        if fade is not None:
            gone = replace(gone, weights=fade.to(held.inputs)[index])
        with renamed(inputs="X", targets="Y"):
            draft.variational_strategy.unfold(
                gone,
                likelihood=draft.likelihood,
                unseen=unseen_classes(draft),
            )
    kept = draft.stream.gather(keep).nonzero().squeeze(-1)
    own = _note_kept(draft, kept)
    stream = draft.stream.select(own)
    draft.stream = replace(stream, num_seen=stream.num_seen - len(known)).noting_noise()
    draft.refresh()
    ranks.commit(lambda: adopt(model, draft))


def _first_of_batch(X: Tensor) -> Tensor:
    """Return the first ``n x d`` of a batch ``... x n x d``; ``n`` may be zero."""
    return X if X.dim() == 2 else X.flatten(0, -3)[0]


def _sum_over_batch(scores: Tensor) -> Tensor:
    """Sum ``... x n`` scores over all batch dimensions."""
    return scores.sum(tuple(range(scores.dim() - 1))) if scores.dim() > 1 else scores


def _all_of_batch(flags: Tensor) -> Tensor:
    """Return ``n x k`` flags that are true where all of a batch ``... x n x k`` are."""
    return flags.flatten(0, -3).all(0) if flags.dim() > 2 else flags


def _each(observations: Observations) -> list[slice]:
    """Return one slice for each observation."""
    return [slice(i, i + 1) for i in range(len(observations))]


def _matches(held: Observations, known: Observations) -> list[int | None]:
    """Return, for each known observation, the index of an equal one that is held, or None."""
    if (held.coefficients is None) != (known.coefficients is None):
        return [None for _ in range(len(known))]
    dims = tuple(range(-1 if held.coefficients is None else -2, 0))
    # Row by row: inputs may be images, and an array of new x old x d elements would be too large.
    rows = [(held.inputs == known.select(index).inputs).all(dims) for index in _each(known)]
    none = held.targets.new_zeros(0, len(held), dtype=torch.bool)
    same = torch.stack(rows, -2) if rows else none
    if held.coefficients is not None and known.coefficients is not None and rows:
        coefficients = known.coefficients.unsqueeze(-2)
        same = same & (held.coefficients.unsqueeze(-3) == coefficients).all(-1)
    theirs = known.targets.unsqueeze(-1).to(held.targets)
    ours = held.targets.unsqueeze(-2)
    # `isclose(equal_nan=True)` does not broadcast in torch 2.4.
    equal = (ours == theirs) | (ours.isnan() & theirs.isnan())
    same = _all_of_batch(same) & _all_of_batch(equal)
    if held.first_parts is None or known.first_parts is None:
        sizes = torch.ones(len(known)), torch.ones(len(held))
    else:
        sizes = _numbers_of_parts(known.first_parts), _numbers_of_parts(held.first_parts)
    same = same & (sizes[0].to(same.device).unsqueeze(-1) == sizes[1].to(same.device))
    taken: set[int] = set()
    result: list[int | None] = []
    while len(result) < len(known):  # an answer matches if all of its parts do
        row = len(result)
        parts = max(int(sizes[0][row]), 1)
        places = max(len(held) + 1 - parts, 0)
        alike = torch.stack([same[row + k, k : places + k] for k in range(parts)])
        free = [i for i in alike.all(0).nonzero().flatten().tolist() if i not in taken]
        result += [free[0] + k if free else None for k in range(parts)]
        taken.update(free[:1])
    return result


def _numbers_of_parts(first: Tensor) -> Tensor:
    """Return ``n`` counts: the number of parts of the answer that begins here, else zero."""
    return torch.zeros_like(first).index_add(0, first, torch.ones_like(first))

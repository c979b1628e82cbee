r"""Merging models of one prior that have learnt from different data.

A posterior is determined by a sum over observations: the memory, and the summary, a
pseudo-likelihood of the function values at the inducing points. So the union of two data sets is
represented by both memories and the sum of both summaries, projected onto common inducing points.
If these contain those of each model, nothing is lost.

The summary of a model stays a fixed function of the inducing values when the hyperparameters
change. It is exact in its dependence on these values. But the weights with which each observation
was tied to them, and the sites of observations that are not Gaussian, are those of the
hyperparameters at which they were folded. This is the same approximation as in a stream that learns
hyperparameters.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn import Module

from seqgp.dual import Duals, Summary, add
from seqgp.dual.posterior import has_posterior
from seqgp.dual.summary import Basis, log_constant, rebase_summary
from seqgp.likelihoods.traits import summary_noise
from seqgp.streaming.draft import draft_of
from seqgp.streaming.inducing_points import Candidates, Exchange, choose_for_each
from seqgp.streaming.memory import MemoryOptions
from seqgp.streaming.model import StreamModel
from seqgp.streaming.options import UpdateOptions
from seqgp.streaming.rules import Batch, PseudoLikelihood
from seqgp.streaming.standardization import moments_of, pooled, restandardize
from seqgp.streaming.state import StreamState
from seqgp.streaming.update import classes_of, leverage_of

Model = TypeVar("Model", bound=StreamModel)

#: Attributes of modules that have to be equal if they have one of these types.
_PLAIN = (bool, int, float, str, type(None), torch.Size, tuple)


def merge_models(
    models: Sequence[Model],
    hyperparameters: int | None = None,
    memory: MemoryOptions | int | None = None,
    max_inducing: int | None = None,
    note: Callable[[], object] = lambda: None,
) -> Model:
    """Merge several models into one; see `seqgp.merge`.

    Args:
        models: The models, which are not changed.
        hyperparameters: The index of the model whose hyperparameters are used; by default those
            with the largest bound.
        memory: The memory options; by default those of the first model.
        max_inducing: The maximum number of inducing points.
        note: Called after each candidate for the hyperparameters, for a progress bar.
    """
    first = models[0]
    check_mergeable(models)
    if max_inducing is None:
        sizes = [model.variational_strategy.inducing_points.shape[-2] for model in models]
        max_inducing = max(*sizes, *(model.max_inducing for model in models))
    options = MemoryOptions.of(first.memory_options if memory is None else memory)
    PseudoLikelihood().check(first, UpdateOptions(), options)
    alike = _in_common_units(models)
    chosen = different(alike) if hyperparameters is None else [hyperparameters]
    candidates = []
    for index in chosen:
        candidates.append(_join(alike, index, options.replay or 0.0, max_inducing))
        note()
    bounds = torch.stack([bound for _, bound in candidates]).nan_to_num(nan=-torch.inf)
    best, _ = candidates[int(bounds.argmax())]
    _remember(best, options)
    return best


def different(models: Sequence[StreamModel]) -> list[int]:
    """Return the index of one model for each distinct set of hyperparameters.

    Args:
        models: The models.
    """
    found: list[tuple[int, dict[str, Tensor]]] = []
    for index, model in enumerate(models):
        state = _hyperparameters(model)
        if not any(_equal(state, other) for _, other in found):
            found.append((index, state))
    return [index for index, _ in found]


# ---------------------------------------------------------------- checks


def check_mergeable(models: Sequence[StreamModel]) -> None:
    """Raise unless models have the same prior, likelihood and transforms.

    Args:
        models: The models.
    """
    for index, model in enumerate(models):
        try:
            model.check_not_fantasy()
        except RuntimeError as error:
            raise ValueError(
                f"models: number {index} has been conditioned on observations (a fantasy); merge "
                "the model that it came from."
            ) from error
        if model.stream.shard is not None:
            raise ValueError(
                f"models: number {index} has a process_group and holds only a shard of its data; "
                "call gathered() on every rank, and merge the result."
            )
        if model.stream.rule != PseudoLikelihood.name:
            raise ValueError(
                f"models: number {index} was updated with mode={model.stream.rule!r}, whose "
                f"summaries cannot be added; expected {PseudoLikelihood.name!r}."
            )
    first = models[0]
    for index, model in enumerate(models[1:], 1):
        difference = _difference(first, model)
        if difference:
            raise ValueError(f"models: number {index} cannot be merged with number 0: {difference}")


def _difference(first: Any, other: Any) -> str | None:
    """Return the reason why two models cannot be merged, or ``None`` if they can."""
    if type(first) is not type(other):
        return f"it is a {type(other).__name__}, that a {type(first).__name__}."
    Z, theirs = (m.variational_strategy.inducing_points for m in (first, other))
    for what, mine, its in (
        ("inputs of dtype", Z.dtype, theirs.dtype),
        ("inputs on device", Z.device, theirs.device),
        ("the batch shape", tuple(first.batch_shape), tuple(other.batch_shape)),
        ("a number of outputs of", first.num_outputs, other.num_outputs),
        ("a number of inputs of", first.num_inputs, other.num_inputs),
        ("inducing points of batch shape", tuple(Z.shape[:-2]), tuple(theirs.shape[:-2])),
        (
            "the jitter",
            first.variational_strategy.jitter_val,
            other.variational_strategy.jitter_val,
        ),
    ):
        if mine != its:
            return f"it has {what} {its}, expected {mine}."
    mine, its = _modules(first), _modules(other)
    for name in sorted({*mine, *its}):
        if name not in mine or name not in its:
            owner, more = ("it", its) if name in its else ("number 0", mine)
            return f"only {owner} has a {type(more[name]).__name__} as {name}."
        a, b = mine[name], its[name]
        if type(a) is not type(b):
            return f"{name} is a {type(b).__name__}, expected a {type(a).__name__}."
        for key in sorted({*vars(a), *vars(b)} - {"training"}):
            one, two = vars(a).get(key), vars(b).get(key)
            plain = isinstance(one, _PLAIN) and isinstance(two, _PLAIN)
            if plain and not key.startswith("_") and one != two:
                return f"{name}.{key} is {two!r:.60}, expected {one!r:.60}."
    one, two = ({k: v.shape for k, v in _hyperparameters(m).items()} for m in (first, other))
    for name in one:
        if one[name] != two.get(name):
            return f"{name} has shape {tuple(two.get(name, ()))}, expected {tuple(one[name])}."
    if first.standardizes_by_default and other.standardizes_by_default and not first.batch_shape:
        return None  # default standardisation is converted
    transforms = [m.outcome_transform for m in (first, other) if hasattr(m, "outcome_transform")]
    if transforms and not _equal(*(dict(transform.named_buffers()) for transform in transforms)):
        return (
            f"the {type(transforms[0]).__name__} of its outcomes has other statistics, so that its "
            "targets are in other units; give all models the same outcome_transform, or none."
        )
    return None


def _modules(model: Module) -> dict[str, Module]:
    """Return all modules except the model and its strategy, by name."""
    return {
        name: module
        for name, module in model.named_modules()
        if name and not name.startswith("variational_strategy")
    }


def _hyperparameters(model: Any) -> dict[str, Tensor]:
    """Return parameters and buffers of all modules except the strategy."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {k: v for k, v in tensors.items() if not k.startswith("variational_strategy.")}


def _equal(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(
        torch.equal(value, second[name]) for name, value in first.items()
    )


# ---------------------------------------------------------------- merging


def _in_common_units(models: Sequence[Model]) -> list[Model]:
    """Return the models, with default standardisation by the targets of all of them.

    Everything that has been learnt is converted without loss; see
    `seqgp.streaming.standardization`.
    """
    first = models[0]
    if not first.standardizes_by_default or first.batch_shape:
        return list(models)
    moments = torch.stack(list(pooled([moments_of(model) for model in models])))
    converted = []
    for model in models:
        draft = draft_of(model, learn=True)
        draft.stream = replace(model.stream, moments=moments)
        restandardize(draft)
        converted.append(draft)
    return converted


def _join(
    models: Sequence[Model], index: int, replay: float, max_inducing: int
) -> tuple[Model, Tensor]:
    """Merge models at the hyperparameters of one of them; return the result and its bound."""
    result = copy.deepcopy(models[index])
    strategy, noise = result.variational_strategy, summary_noise(result.likelihood)
    tensors = []
    for model in models:
        own = dict(model.variational_strategy.tensors())
        for name in ("inducing_points", "reference_points"):
            own[name] = _in_input_space(own[name], model, result)
        tensors.append(own)
    Z = _inducing_points(result, [own["inducing_points"] for own in tensors], index, max_inducing)
    duals: Duals | None = None
    summary: Summary | None = None
    with torch.no_grad():
        constant = torch.zeros_like(strategy.summary_square)
        for own in tensors:
            strategy.set_tensors(own)
            state = strategy.build(Z)
            here = rebase_summary(strategy.summary, state.basis)
            if strategy.has_summary:
                # The variance of a model's own points given the common ones.
                stays = Basis(None, state.chol, torch.zeros_like(state.prior_mean), None)
                constant = constant + log_constant(strategy.summary, state.basis, noise)
                constant = constant - log_constant(here, stays, noise)
            duals = state.duals if duals is None else add(duals, state.duals)
            summary = here if summary is None else _added(summary, here)
        assert duals is not None
        assert summary is not None
        if not has_posterior(duals):  # the sites are not log-concave: start from the summary
            duals = Duals(torch.zeros_like(duals.lam), torch.zeros_like(duals.B))
        strategy.store(duals, state, Z, summary)
    result.max_inducing = max_inducing
    result.stream = _together(models, index, replay)
    bound = result.refresh().sum() + constant.sum() * result.stream.summary_share
    return result, bound


def _added(first: Summary, second: Summary) -> Summary:
    duals = add(first.duals, second.duals)
    return Summary(duals, first.square + second.square, first.number + second.number)


def _in_input_space(points: Tensor, model: Any, result: Any) -> Tensor:
    """Return the transformed inputs of one model in the input space of another."""
    own, other = (getattr(m, "input_transform", None) for m in (model, result))
    if own is None or other is None or _equal(own.state_dict(), other.state_dict()):
        return points
    try:
        with torch.no_grad():
            changed: Tensor = other.preprocess_transform(own.untransform(points))
            return changed
    except NotImplementedError:
        raise ValueError(
            f"models: their input transforms, a {type(own).__name__} each, differ and cannot be "
            "undone; give all models the same input_transform."
        ) from None


def _inducing_points(
    model: StreamModel, points: list[Tensor], index: int, max_inducing: int
) -> Tensor:
    """Return the inducing points of all models that add information, up to the maximum number."""
    first = points[index].detach()
    others = [Z.detach() for k, Z in enumerate(points) if k != index and not _same(Z, first)]
    if not others and first.shape[-2] <= max_inducing:
        return first
    more = torch.cat(others, -2) if others else first[..., :0, :]
    one = more.new_ones(more.shape[-2])
    candidates = Candidates(
        more,
        *(one, one),
        len(one),
        model.stream.num_seen,
        anew=False,
        kernel=model.covar_module,
        max_points=max_inducing,
        allocator=model.inducing_point_allocator,
        seed=model.stream.num_updates,
    )
    rule = Exchange(tol=0.0)
    if first.dim() == 2:
        return rule.choose(first, candidates)
    return choose_for_each(rule, first, more, candidates)


def _same(Z: Tensor, other: Tensor) -> bool:
    return Z.shape == other.shape and torch.equal(Z, other)


def _together(models: Sequence[StreamModel], index: int, replay: float) -> StreamState:
    """Concatenate the streams of all models."""
    streams = [model.stream for model in models]
    joined = streams[0]
    for stream in streams[1:]:
        joined = replace(
            joined,
            observations=joined.observations.append(stream.observations),
            represents=torch.cat([joined.represents, stream.represents]),
            importance=torch.cat([joined.importance, stream.importance]),
            fade=torch.cat([joined.fade, stream.fade]),
        )
    own = streams[index]
    return replace(
        joined,
        num_seen=sum(stream.num_seen for stream in streams),
        num_updates=sum(stream.num_updates for stream in streams),
        classes_seen=tuple(sorted({c for stream in streams for c in stream.classes_seen})),
        fades=any(stream.fades for stream in streams),
        replay=replay,
        drift=(),
        learned_at=own.learned_at,
        restarted_at=own.restarted_at,
        initial=own.initial,
        moments=own.moments,
    )


def _remember(model: StreamModel, memory: MemoryOptions) -> None:
    """Keep as many observations as the memory has room for, and fold the others."""
    stream = model.stream
    data = model.transformed(stream.observations)
    leverage = leverage_of(model, data)
    choice = memory.at(stream.num_seen).choose(
        leverage,
        0,
        stream.num_updates,
        classes_of(model) if memory.balance else None,
        stream.importance * stream.represents,
    )
    tiny = torch.finfo(leverage.dtype).tiny
    represents = stream.represents / choice.inclusion.clamp_min(tiny)
    model.stream = replace(stream, represents=represents)
    model.memory_options = memory
    batch = Batch(data, len(data), None)
    PseudoLikelihood().remember(model, batch, choice.kept, UpdateOptions())

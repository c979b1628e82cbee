"""Loading the state of a model: hyperparameters and transforms, for the data that it holds.

A ``state_dict`` holds no data. Hyperparameters and transforms are loaded from it, and inducing
points unless they are the inputs. Then the posterior of the model's own data is computed. All this
happens on a copy, which replaces the model in the end: a state that does not fit changes nothing.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from botorch.exceptions.warnings import BotorchWarning
from gpytorch.likelihoods import FixedNoiseGaussianLikelihood
from gpytorch.priors import Prior
from torch import Tensor

from seqgp.models.outcomes import transform_observations, untransform_observations
from seqgp.models.protocol import DataModel
from seqgp.streaming.draft import adopt, draft_of
from seqgp.variational.state import TENSORS

#: The prefix of the names that belong to the variational strategy.
_STRATEGY = "variational_strategy."
#: By how much, in nats, the inducing points of a model have to be better than those of the state.
_GAIN = 0.1


@torch.no_grad()
def load_state(
    model: DataModel,
    state: Mapping[str, Any],
    strict: bool = True,
    keep_transforms: bool = True,
    assign: bool = False,
) -> None:
    """Load a state, as a whole or not at all; `SequentialGP.load_state_dict` documents it.

    Args:
        model: The model.
        state: What ``state_dict()`` returned.
        strict: Whether its keys have to be those of this model.
        keep_transforms: Whether the training targets are transformed anew, by the transforms of
            the state; otherwise transforms keep the statistics that they have.
        assign: Whether to take on the precision and the device of the state.
    """
    model.check_not_fantasy()
    ranks = model.variational_strategy.ranks
    with ranks.together():
        draft, like = _loaded(model, dict(state), strict, keep_transforms, assign)

        def change() -> None:
            with model.guard.reading:
                if like is not None:
                    model.to(like)
                adopt(model, draft)
                for module in model.modules():
                    if isinstance(module, Prior):
                        # From its buffers to its distribution.
                        module.load_state_dict(module.state_dict())
                _set_fixed_noise(model)
                model.note_hyperparameters()

        ranks.commit(change)


def _loaded(
    model: DataModel, state: dict[str, Any], strict: bool, keep_transforms: bool, assign: bool
) -> tuple[DataModel, Tensor | None]:
    """A draft with a state, and a tensor of its precision and device if they are to be taken on."""
    own = model.variational_strategy
    saved = {name: state[_STRATEGY + name] for name in TENSORS if _STRATEGY + name in state}
    _check_tensors(saved, own.inducing_points.shape[-1])
    _check_summary(model, saved)
    covers = model.inducing_points_cover_data
    draft = draft_of(model, learn=True)
    like = next((v for v in state.values() if isinstance(v, Tensor)), None) if assign else None
    if like is not None:
        draft.to(like)
    raw = _raw_observations(draft) if keep_transforms else None
    before = _transforms(draft)
    if not keep_transforms:
        state |= {k: v for k, v in _statistics(draft).items() if k in state}
    _load_modules(draft, state, strict)
    _check_transforms(model, before, _transforms(draft))
    if raw is not None:
        _transform_again(draft, *raw)
    _choose_inducing_points(draft, saved, covers)
    return draft, like


def _check_tensors(saved: Mapping[str, Any], dim: int) -> None:
    """Raise unless the strategy's tensors fit each other, and inputs of so many columns."""
    for name, value in saved.items():
        if not isinstance(value, Tensor) or value.dim() < TENSORS[name]:
            shape = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise RuntimeError(
                f"state_dict: {_STRATEGY}{name} should have at least {TENSORS[name]} dimensions, "
                f"got {shape}. The model is unchanged."
            )
    sizes = {name: saved[name].shape[len(saved[name].shape) - TENSORS[name] :] for name in saved}
    points = saved.get("reference_points")
    for name, size in sizes.items():
        of_points = name in ("inducing_points", "reference_points")
        number = None if points is None else points.shape[-2]
        wrong = size[-1] != dim if of_points else any(k != number for k in size)
        if wrong and (of_points or number is not None):
            expected = f"... x m x {dim}" if of_points else f"{number} for each dimension"
            raise RuntimeError(
                f"state_dict: {_STRATEGY}{name} has shape {tuple(saved[name].shape)}, expected "
                f"{expected}. The model is unchanged."
            )
    if any(not bool(saved[name].isfinite().all()) for name in sizes if "points" in name):
        raise RuntimeError("state_dict: inducing points are not finite. The model is unchanged.")


def _check_summary(model: DataModel, saved: Mapping[str, Tensor]) -> None:
    """Raise if the state is that of a stream whose past this model does not know."""
    count, own = saved.get("summary_count"), model.variational_strategy.summary_count
    if count is not None and bool(count.any()):
        if count.shape != own.shape or not torch.equal(count.to(own), own):
            raise ValueError(
                "state_dict: it comes from a stream in which observations have been folded into a "
                "summary. This model has not learnt these observations, and a state_dict holds no "
                "data. Use seqgp.save and seqgp.load. To load hyperparameters only, leave out the "
                f"keys that begin with '{_STRATEGY}'. The model is unchanged."
            )
    elif not model.num_data and "dual_B" in saved and bool(saved["dual_B"].any()):
        warnings.warn(
            "This state_dict comes from a model with data, but a state_dict holds no data. This "
            "model has none, so it predicts with its prior. Use seqgp.save and seqgp.load.",
            stacklevel=5,
        )


def _load_modules(draft: DataModel, state: Mapping[str, Any], strict: bool) -> None:
    """Everything but the strategy, which is optional: the posterior is computed anew."""
    known = {_STRATEGY + name for name in draft.variational_strategy.state_dict()}
    modules = {name: value for name, value in state.items() if name not in known}
    module: Any = draft
    missing, unexpected = torch.nn.Module.load_state_dict(module, modules, strict=False)
    missing = [name for name in missing if name not in known]
    if strict and (missing or unexpected):
        raise RuntimeError(
            f"Error(s) in loading state_dict for {type(draft).__name__}: "
            f"Missing key(s) in state_dict: {', '.join(missing) or 'none'}. "
            f"Unexpected key(s) in state_dict: {', '.join(unexpected) or 'none'}. "
            "The model is unchanged; strict=False loads what fits."
        )


# -------------------------------------------------------------------- transforms


def _transforms(model: DataModel) -> dict[str, Tensor]:
    """The tensors of the transforms by name, copied."""
    parts = ("input_transform.", "outcome_transform.")
    return {k: v.clone() for k, v in model.state_dict().items() if k.startswith(parts)}


def _statistics(model: DataModel) -> dict[str, Tensor]:
    """What the transforms have learnt from the data at hand, by name; copies.

    The targets have been transformed with it, so it stays unless they are transformed anew. (An
    exact GP of BoTorch loads it, and learns it again at the next training step.)
    """
    module: Any = model
    parameters = {name for name, _ in module.named_parameters()}
    return {k: v for k, v in _transforms(model).items() if k not in parameters}


def _check_transforms(
    model: DataModel, before: Mapping[str, Tensor], after: Mapping[str, Tensor]
) -> None:
    """Raise if transforms would change that a summary has been made with."""
    if not model.variational_strategy.has_summary:
        return
    for name, value in before.items():
        if not torch.equal(value, after[name]):
            raise ValueError(
                f"state_dict: {name} differs from that of this model, whose summary of folded "
                "observations belongs to it. Leave the transforms out, with strict=False. The "
                "model is unchanged."
            )


def _raw_observations(draft: DataModel) -> tuple[Tensor, Tensor | None] | None:
    """Targets and noise variances before the outcome transform; ``None`` if there is none."""
    transform = getattr(draft, "outcome_transform", None)
    if transform is None:
        return None
    held = draft.stream.observations
    noise = held.arguments.get("noise")
    if noise is not None:
        noise = draft.to_columns(noise.expand_as(held.targets))
    try:
        return untransform_observations(
            transform,
            draft.to_columns(held.targets),
            noise,
            draft.transform_train_inputs(held.points),
            held.coefficients,
        )
    except NotImplementedError:
        warnings.warn(
            "Outcome transform does not support untransforming: "
            f"{type(transform).__name__} cannot be undone, so the training targets are not "
            "transformed anew (keep_transforms=False).",
            BotorchWarning,
            stacklevel=5,
        )
        return None


def _transform_again(draft: DataModel, Y: Tensor, noise: Tensor | None) -> None:
    """Give a draft its observations as the transform that it has now makes them."""
    held = draft.stream.observations
    X = draft.transform_train_inputs(held.points)
    Y, noise = transform_observations(draft.outcome_transform, Y, noise, X, held.coefficients)
    arguments = dict(held.arguments)
    if noise is not None:
        arguments["noise"] = draft.to_targets(noise)
    held = replace(held, targets=draft.to_targets(Y), arguments=arguments)
    draft.stream = replace(draft.stream, observations=held).noting_noise()
    _set_fixed_noise(draft)


def _set_fixed_noise(model: DataModel) -> None:
    """The noise that a likelihood holds for its data is that of the observations."""
    noise = model.stream.observations.arguments.get("noise")
    if noise is not None and isinstance(model.likelihood, FixedNoiseGaussianLikelihood):
        model.likelihood.noise_covar.noise = model.stream.gather(noise)


# -------------------------------------------------------------------- inducing points


def _choose_inducing_points(draft: DataModel, saved: Mapping[str, Tensor], covers: bool) -> None:
    """Converge a draft with inducing points for the data that it holds.

    They are its inputs, if they were before. Otherwise they are those of the state; unless the
    model chooses them itself, and those that it has are better for its data, which may not be the
    data of the state.
    """
    strategy = draft.variational_strategy
    own = strategy.inducing_points.detach()
    complete = saved.keys() == TENSORS.keys() and not strategy.has_summary
    tensors = {name: value.to(own).clone() for name, value in saved.items()} if complete else {}
    Z = saved.get("inducing_points")
    if covers:
        points = draft.transform_train_inputs(draft.stream.observations.points)
        points = draft.stream.gather(points, -2)
        points = points.reshape(own.shape)
        if complete and torch.equal(tensors["inducing_points"], points):
            _start_from(draft, tensors)
        else:
            strategy.start_from(points)
            draft.refresh()
        return
    if Z is None or Z.shape[:-2] != own.shape[:-2]:
        draft.refresh()
        return
    if complete:
        strategy.set_tensors(tensors)
    else:
        strategy.start_from(Z)
    bound = draft.refresh()
    if draft.keeps_inducing_points or draft.fits_inducing_points:
        return
    strategy.start_from(own)
    if bool(draft.refresh().sum() < bound.sum() + _GAIN):
        strategy.start_from(Z)
        draft.refresh()


def _start_from(draft: DataModel, tensors: Mapping[str, Tensor]) -> None:
    """Converge a draft from a state of the same inputs; if it has converged, it stays as it is."""
    strategy = draft.variational_strategy
    strategy.set_tensors(tensors)
    draft.refresh()
    new = strategy.tensors()
    if all(_is_close(tensors[name], new[name]) for name in ("dual_lam", "dual_B")):
        strategy.set_tensors(tensors)


def _is_close(old: Tensor, new: Tensor) -> bool:
    """Whether two tensors are the same but for rounding, and for where an iteration ended."""
    if old.shape != new.shape:
        return False
    tol = torch.finfo(new.dtype).eps ** 0.4  # 5e-7 in double precision
    return bool((old - new).abs().amax() <= tol * new.abs().amax())

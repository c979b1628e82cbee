"""Options of `fantasy_batch`: their checks, and the optimiser of BoTorch that they belong to."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Collection, Sequence
from typing import Any

from botorch.acquisition.acquisition import AcquisitionFunction, OneShotAcquisitionFunction
from botorch.exceptions.errors import UnsupportedError
from botorch.optim import (
    optimize_acqf,
    optimize_acqf_discrete,
    optimize_acqf_discrete_local_search,
    optimize_acqf_mixed,
    optimize_acqf_mixed_alternating,
)
from botorch.optim.initializers import gen_batch_initial_conditions
from torch import Tensor

from seqgp.acquisition.fantasies import Fantasy, check_fantasy
from seqgp.acquisition.mixed_space import check_bounds, check_constraint, check_levels
from seqgp.validation import check_inputs

#: The optimiser that an option belongs to. Without any of these options it is `optimize_acqf`.
_OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "fixed_features_list": optimize_acqf_mixed,
    "choices": optimize_acqf_discrete,
    "discrete_choices": optimize_acqf_discrete_local_search,
    "discrete_dims": optimize_acqf_mixed_alternating,
    "cat_dims": optimize_acqf_mixed_alternating,
}

#: Options of BoTorch that `fantasy_batch` sets itself.
_OURS = ("acq_function", "q", "sequential", "return_best_only", "acq_function_sequence")


def find_optimizer(
    optimizer: Callable[..., Any] | None, options: dict[str, Any]
) -> Callable[..., Any]:
    """Return the given optimiser, or the one of BoTorch that the options belong to."""
    if optimizer is not None:
        return optimizer
    found = {_OPTIMIZERS[name] for name in options if name in _OPTIMIZERS}
    if len(found) > 1:
        names = ", ".join(name for name in options if name in _OPTIMIZERS)
        raise ValueError(f"options: {names} belong to different optimisers of BoTorch.")
    return found.pop() if found else optimize_acqf


def single_point_optimizer(
    optimizer: Callable[..., Any], bounds: Tensor, options: dict[str, Any]
) -> Callable[[AcquisitionFunction, Tensor], tuple[Tensor, Tensor]]:
    """Bind the options of an optimiser.

    Args:
        optimizer: An optimiser with the interface of `optimize_acqf`.
        bounds: ``2 x d`` bounds.
        options: Its options.

    Returns:
        A function of an acquisition function and of ``k x d`` points proposed so far. It returns
        ``r x d`` candidates and their ``r`` values, of all restarts if the optimiser has them.
    """
    known = inspect.signature(optimizer).parameters
    arguments: dict[str, Any] = {"q": 1, "bounds": bounds, "num_restarts": 10, "raw_samples": 512}
    if optimizer is optimize_acqf:
        arguments["return_best_only"] = False
    if optimizer is optimize_acqf and "batch_initial_conditions" in options:
        del arguments["raw_samples"]
    arguments = {name: value for name, value in arguments.items() if name in known} | options

    def optimize(acquisition: AcquisitionFunction, proposed: Tensor) -> tuple[Tensor, Tensor]:
        more: dict[str, Any] = {}
        if "X_avoid" in known and len(proposed):
            more["X_avoid"] = proposed
        if (
            optimizer is optimize_acqf
            and (options.get("inequality_constraints") or options.get("equality_constraints"))
            and not options.get("nonlinear_inequality_constraints")
            and not isinstance(acquisition, OneShotAcquisitionFunction)
        ):
            more["ic_generator"] = _starts_within_constraints
        X, values = optimizer(acq_function=acquisition, **(more | arguments))
        return X.detach().reshape(-1, X.shape[-1]), values.detach().reshape(-1)

    return optimize


def _starts_within_constraints(options: dict[str, Any] | None = None, **arguments: Any) -> Any:
    """BoTorch's initial conditions with less thinning, which otherwise takes most of the time."""
    options = {"n_burnin": 1000, "n_thinning": 4} | (options or {})
    return gen_batch_initial_conditions(options=options, **arguments)


def check_options(
    bounds: Tensor,
    q: int,
    fantasies: Sequence[Fantasy],
    X_pending: Tensor | None,
    X_avoid: Tensor | None,
    separation: float,
    optimizer: Callable[..., Any] | None,
    options: dict[str, Any],
    own: Collection[str] = (),
) -> None:
    """Raise for invalid arguments of `fantasy_batch`, before anything is computed.

    Args:
        bounds: As in `fantasy_batch`.
        q: As in `fantasy_batch`.
        fantasies: The rules for fantasies.
        X_pending: As in `fantasy_batch`.
        X_avoid: As in `fantasy_batch`.
        separation: As in `fantasy_batch`.
        optimizer: As in `fantasy_batch`.
        options: As in `fantasy_batch`.
        own: Arguments of the caller, to be suggested for a misspelt option.
    """
    for fantasy in fantasies:
        check_fantasy(fantasy)
    known = inspect.signature(find_optimizer(optimizer, options)).parameters
    takes_all = any(p.kind == p.VAR_KEYWORD for p in known.values())
    names = {*known, *(inspect.signature(gen_batch_initial_conditions).parameters)}
    for name in options:
        if name in names or (takes_all and optimizer is not None):
            continue
        near = difflib.get_close_matches(name, {*names, *own}, n=1)
        raise TypeError(
            f"{name}: neither an option here nor one of BoTorch's "
            f"{getattr(find_optimizer(optimizer, options), '__name__', 'optimizer')}"
            f"{f'; did you mean {near[0]}?' if near else '.'}"
        )
    check_bounds(bounds)
    for name in ("discrete_dims", "cat_dims"):
        if options.get(name) is not None:
            check_levels(options[name], bounds, name)
    if q < 1:
        raise ValueError(f"q: expected at least one point, got {q}.")
    if not 0 <= separation < 1:
        raise ValueError(f"separation: expected a fraction of the range, got {separation}.")
    for name, points in (("X_pending", X_pending), ("X_avoid", X_avoid)):
        if points is None:
            continue
        check_inputs(points, name=name)
        if points.dim() != 2 or points.shape[-1] != bounds.shape[-1]:
            raise ValueError(
                f"{name}: expected shape k x {bounds.shape[-1]}, got {tuple(points.shape)}."
            )
    for name in _OURS:
        if name in options:
            raise ValueError(f"options: {name} cannot be chosen here.")
    for name in ("inequality_constraints", "equality_constraints"):
        for constraint in options.get(name) or ():
            check_constraint(constraint, bounds, name)
    for _, within in options.get("nonlinear_inequality_constraints") or ():
        if not within:
            raise UnsupportedError(
                "nonlinear_inequality_constraints: points are proposed one at a time, so there "
                "are no constraints between points."
            )

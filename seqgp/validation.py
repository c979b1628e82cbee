"""Checks of what users pass in: what was wrong, what was expected, before any state changes."""

from __future__ import annotations

import difflib
import inspect
import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from numbers import Integral, Real
from typing import Any

import torch
from botorch.models.likelihoods.sparse_outlier_noise import SparseOutlierGaussianLikelihood
from gpytorch.likelihoods import (
    BernoulliLikelihood,
    BetaLikelihood,
    GaussianLikelihoodWithMissingObs,
    Likelihood,
    SoftmaxLikelihood,
)
from torch import Tensor
from torch.distributions import constraints

from seqgp.dual.linalg import broadcast_shapes
from seqgp.likelihoods.traits import has_one_latent, is_conjugate, takes_noise


@contextmanager
def renamed(**names: str) -> Iterator[None]:
    """Rename arguments in errors that are raised inside, to the names that the caller knows.

    Args:
        names: New names: ``targets="Y"``.
    """
    try:
        yield
    except (TypeError, ValueError) as error:
        name, colon, rest = str(error).partition(":")
        if colon and name in names:
            raise type(error)(f"{names[name]}:{rest}") from error.__cause__
        raise


def check_tensor(value: Any, name: str) -> None:
    """Raise unless a value is a dense tensor of real numbers.

    Args:
        value: The value.
        name: What to call it in the error.
    """
    if not isinstance(value, Tensor):
        table = hasattr(value, "to_numpy")  # of pandas or polars
        # Arrays of pandas cannot be written to: `torch.as_tensor` warns of them, unlike a copy.
        convert = f"torch.tensor({name}.to_numpy()" if table else f"torch.as_tensor({name}"
        raise TypeError(
            f"{name}: expected a torch.Tensor, got {type(value).__name__}; convert it with "
            f"{convert}, dtype=torch.double)."
        )
    if value.layout != torch.strided:
        raise TypeError(
            f"{name}: expected a dense tensor, got {value.layout}; convert it with "
            f"{name}.to_dense()."
        )
    if value.is_complex():
        raise TypeError(f"{name}: expected real numbers, got {value.dtype}.")
    if value.is_meta:
        raise ValueError(f"{name}: expected numbers, got a tensor on the meta device.")


def is_whole(value: Any) -> bool:
    """Whether something is a whole number; NumPy's are, true and false are not."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def check_inputs(inputs: Tensor, dim: int | None = None, name: str = "inputs") -> None:
    """Raise unless ``inputs`` is a finite ``... x n x d`` floating point tensor.

    Args:
        inputs: The tensor to check.
        dim: The expected ``d``, if it is known.
        name: What to call it in the error.
    """
    check_input_shape(inputs, dim, name)
    check_finite(inputs, name, -2)


def check_input_shape(inputs: Tensor, dim: int | None, name: str) -> None:
    """As `check_inputs`, without looking at the numbers.

    Args:
        inputs: The tensor to check.
        dim: The expected ``d``, if it is known.
        name: What to call it in the error.
    """
    check_tensor(inputs, name)
    if inputs.dtype not in (torch.float32, torch.float64):
        raise TypeError(
            f"{name}: expected torch.float64 or torch.float32, got {inputs.dtype}; convert it with "
            f"{name}.double()."
        )
    if inputs.dim() < 2:
        raise ValueError(
            f"{name}: expected shape ... x n x d, got {tuple(inputs.shape)}; a single "
            f"point is {name}.unsqueeze(0), a single column of inputs {name}.unsqueeze(-1)."
        )
    if dim is not None and inputs.shape[-1] != dim:
        raise ValueError(f"{name}: expected shape ... x n x {dim}, got {tuple(inputs.shape)}.")


def check_instance(value: Any, kind: type, name: str, optional: bool = True) -> None:
    """Raise a `TypeError` unless a value is an object of a class, or ``None``.

    Args:
        value: The value.
        kind: The class.
        name: What to call it in the error.
        optional: Whether it may be ``None``.
    """
    if isinstance(value, kind) or (optional and value is None):
        return
    if isinstance(value, type):
        raise TypeError(
            f"{name}: expected a {kind.__name__}, got the class {value.__name__}; pass an "
            f"instance: {value.__name__}(...)."
        )
    raise TypeError(f"{name}: expected a {kind.__name__}, got {value!r:.50}.")


def check_points(X: Any, dim: int | None, name: str) -> None:
    """Raise unless ``X`` is a ``... x n x d`` tensor, finite or not.

    Args:
        X: The tensor to check.
        dim: The expected ``d``, if it is known.
        name: What to call it in the error.
    """
    check_tensor(X, name)
    if X.dim() < 2 and dim != 1:
        raise ValueError(
            f"{name}: expected shape ... x n x {'d' if dim is None else dim}, got "
            f"{tuple(X.shape)}; a single point is {name}.unsqueeze(0)."
        )
    if X.dim() >= 2 and dim is not None and X.shape[-1] != dim:
        raise ValueError(f"{name}: expected shape ... x n x {dim}, got {tuple(X.shape)}.")


def check_Y(
    X: Tensor,
    Y: Tensor,
    X_name: str,
    Y_name: str,
    columns: int | None = None,
    likelihood: Likelihood | None = None,
    broadcasts: bool = False,
) -> None:
    """Raise unless ``Y`` is ``... x n x m`` for inputs ``... x n x d``.

    Args:
        X: The inputs.
        Y: The observations.
        X_name: What to call the inputs in the error.
        Y_name: What to call the observations.
        columns: The expected ``m``, if it is known.
        likelihood: What they are observations of, to recognise labels in another form.
        broadcasts: Whether ``Y`` may have a batch shape of its own.
    """
    check_tensor(Y, Y_name)
    if X.dim() < 2:
        raise ValueError(f"{X_name}: expected shape ... x n x d, got {tuple(X.shape)}.")
    start = -2 if broadcasts else 0
    fits = Y.shape[start:-1] == X.shape[start:-1] and Y.dim() >= 2 and Y.shape[-1] > 0
    if fits and columns in (None, Y.shape[-1]):
        return
    leading = f"... x {X.shape[-2]}" if broadcasts else " x ".join(map(str, X.shape[:-1]))
    hint = "."
    if columns in (None, 1) and Y.shape == X.shape[:-1]:
        hint = f"; one column of them is {Y_name}.unsqueeze(-1)."
    elif fits and columns == 1:
        hint = one_hot_hint(likelihood, Y, Y_name)
    raise ValueError(
        f"{Y_name}: expected shape {leading} x {'m' if columns is None else columns} (one column "
        f"per output) for {X_name} of shape {tuple(X.shape)}, got {tuple(Y.shape)}{hint}"
    )


def one_hot_hint(likelihood: Likelihood | None, Y: Tensor, name: str) -> str:
    """The end of an error about too many columns: what to do if they are one for each class."""
    classes = 2 if isinstance(likelihood, BernoulliLikelihood) else None
    if Y.shape[-1] != getattr(likelihood, "num_classes", classes):
        return "."
    return f"; expected labels, not one-hot rows: {name}.argmax(-1, keepdim=True)."


def check_noise(noise: Tensor, shape: torch.Size, name: str) -> None:
    """Raise unless noise variances are finite, at least zero, and broadcast to a shape.

    Args:
        noise: The variances.
        shape: ``... x n x m``, that of the observations.
        name: What to call them in the error.
    """
    check_tensor(noise, name)
    try:
        fits = broadcast_shapes(noise.shape, shape) == shape
    except RuntimeError:
        fits = False
    if not fits:
        raise ValueError(
            f"{name}: expected a shape that broadcasts to {tuple(shape)}, got {tuple(noise.shape)}."
        )
    if not bool((noise.isfinite() & (noise >= 0)).all()):
        check_finite(noise, name)
        raise ValueError(f"{name}: expected variances, got {noise.min().item():g}.")


def check_flag(value: Any, name: str) -> None:
    """Raise unless a value is true or false."""
    if not isinstance(value, bool):
        raise TypeError(f"{name}: expected True or False, got {value!r:.50}.")


def check_steps(tol: Any, max_steps: Any) -> None:
    """Raise unless a tolerance and the largest number of steps, or ``None``, are possible."""
    check_number(tol, "tol", zero=True)
    check_count(max_steps, "max_steps")


def check_number(value: Any, name: str, zero: bool = False) -> None:
    """Raise unless a value is a finite number that is more than zero.

    Args:
        value: The value.
        name: What to call it in the error.
        zero: Whether it may be zero.
    """
    if not isinstance(value, Real) or isinstance(value, bool):
        raise TypeError(f"{name}: expected a number, got {value!r:.50}.")
    number = float(value)
    if not (math.isfinite(number) and (number > 0 or (zero and number == 0))):
        least = "at least" if zero else "more than"
        raise ValueError(f"{name}: expected a finite number of {least} zero, got {value}.")


def check_count(value: Any, name: str, optional: bool = True) -> None:
    """Raise unless a value is a whole number of at least one, or ``None``.

    Args:
        value: The value.
        name: What to call it in the error.
        optional: Whether it may be ``None``.
    """
    if value is None and optional:
        return
    if not is_whole(value):
        none = " or None" if optional else ""
        raise TypeError(f"{name}: expected a whole number{none}, got {value!r:.50}.")
    if value < 1:
        raise ValueError(f"{name}: expected at least one, got {value}.")


def check_bound(bound: Tensor, name: str) -> None:
    """Raise unless a bound is finite: numbers may be too large for their squares.

    Args:
        bound: The evidence lower bound.
        name: What to call the observations in the error.
    """
    if not bool(bound.isfinite().all()):
        raise FloatingPointError(
            f"{name}: the bound is not finite ({bound.flatten()[0].item()}). Check the scales of "
            f"observations, inputs and hyperparameters: numbers must be far from the largest of "
            f"{bound.dtype}, {torch.finfo(bound.dtype).max:.0e}. Nothing has been changed."
        )


def check_inducing_points(inducing_points: Tensor) -> None:
    """Raise unless ``inducing_points`` is a finite ``... x m x d`` tensor with ``m >= 1``."""
    check_inputs(inducing_points, name="inducing_points")
    if inducing_points.shape[-2] == 0 or inducing_points.shape[-1] == 0:
        raise ValueError(
            "inducing_points: expected at least one point with at least one input, got shape "
            f"{tuple(inducing_points.shape)}."
        )


def check_step_size(rho: float) -> None:
    """Raise unless ``rho`` is a step size in (0, 1]."""
    if not 0 < rho <= 1:
        raise ValueError(f"rho: expected a step size in (0, 1], got {rho}.")


def check_arguments(
    likelihood: Likelihood,
    given: Iterable[str],
    options: Collection[str] = (),
    needed: bool = True,
) -> None:
    """Raise a `TypeError` for arguments that are neither options nor the likelihood's.

    Args:
        likelihood: The likelihood.
        given: Names of arguments that are taken for per-point arguments of the likelihood.
        options: What else could have been meant.
        needed: Whether those that the likelihood cannot do without have to be there.
    """
    kind_of: Any = type(likelihood)  # hashable, as all classes are
    known, required = _arguments_of(kind_of, takes_noise(likelihood))
    for part in getattr(likelihood, "likelihoods", ()):  # of tasks, which pass them on
        kind_of = type(part)
        own, _ = _arguments_of(kind_of, takes_noise(part))
        known = None if known is None or own is None else known | own
    given, kind = list(given), type(likelihood).__name__
    for name in given:
        if known is not None and name not in known:
            near = difflib.get_close_matches(name, [*options, *known], n=1, cutoff=0.7)
            hint = f"; did you mean {near[0]}?" if near else "."
            if name in ("arguments", "likelihood_arguments") and known:
                hint = f"; pass {min(known)}= by name."
            knows = f"which knows {', '.join(sorted(known))}" if known else "which has none"
            raise TypeError(
                f"{name}: neither an option here nor a per-point argument of {kind}, {knows}{hint}"
            )
    for name in required if needed else ():
        if name not in given:
            raise TypeError(
                f"{name}: {kind} needs it for each observation; pass {name}=, a tensor of shape "
                "... x n."
            )


@lru_cache(maxsize=64)
def _arguments_of(
    kind: type[Likelihood], noisy: bool
) -> tuple[frozenset[str] | None, frozenset[str]]:
    """Names of the per-point arguments that a likelihood knows, and of those that it needs.

    They are the named arguments of its methods. ``None`` for one that does not name them.
    """
    if issubclass(kind, SparseOutlierGaussianLikelihood):
        return frozenset({"noise", "outlier"}), frozenset()
    known, required = ({"noise"} if noisy else set()), set()
    leading = {"forward": 1, "marginal": 1, "expected_log_prob": 2, "log_marginal": 2}
    anything = False
    for method, skipped in leading.items():
        function = inspect.unwrap(getattr(kind, method))
        root = (function.__module__ or "").partition(".")[0]
        parameters = list(inspect.signature(function).parameters.values())[1 + skipped :]
        named = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
        known |= {p.name for p in named}
        required |= {p.name for p in named if p.default is p.empty}
        if root not in ("gpytorch", "seqgp", "torch") and not named:
            anything |= any(p.kind == p.VAR_KEYWORD for p in parameters)
    if anything and not known:
        return None, frozenset(required)
    return frozenset(known), frozenset(required)


def check_data(
    inputs: Tensor,
    points: Tensor,
    targets: Tensor,
    likelihood: Likelihood,
    arguments: Mapping[str, Any],
    dim: int | None = None,
    dtype: torch.dtype | None = None,
    names: tuple[str, str] = ("inputs", "targets"),
) -> None:
    """Raise unless inputs, targets and arguments fit each other, the likelihood and the model.

    The numbers are looked at all at once, so that a device is waited for once; only if something is
    wrong is it found out what.

    Args:
        inputs: All inputs, ``... x d``.
        points: ``... x n x d``, one of them for each observation.
        targets: ``... x n``, broadcastable against the inputs' batch shape.
        likelihood: The likelihood that the targets are observations of.
        arguments: Its per-point arguments.
        dim: The expected ``d``, if it is known.
        dtype: The precision of the model, if it is known.
        names: What to call inputs and targets in errors.
    """
    check_input_shape(points, dim, names[0])
    if dtype is not None and torch.promote_types(inputs.dtype, dtype) != dtype:
        raise TypeError(
            f"{names[0]}: expected {dtype} as the inducing points are, got {inputs.dtype}; convert "
            f"them with .to({dtype}), or the model."
        )
    check_target_shape(targets, points, names[1])
    for name, value in arguments.items():
        _check_argument_shape(value, name, targets)
    flags = [inputs.isfinite().all()]
    if not isinstance(likelihood, GaussianLikelihoodWithMissingObs) and targets.is_floating_point():
        flags.append(targets.isfinite().all())
    for name, value in arguments.items():
        if isinstance(value, Tensor) and value.is_floating_point():
            flags.append(value.isfinite().all().to(inputs.device))
            if name == "noise":
                flags.append((value >= 0).all().to(inputs.device))
    if targets.numel():
        try:
            _, allowed = _possible(targets, likelihood, **arguments)
        except ValueError:  # distributions check their arguments, too, but do not name them
            for name, value in arguments.items():
                _check_argument(value, name, targets)
            raise
        if allowed is not None:
            flags.append(allowed.all())
    if not bool(torch.stack(flags).all()):
        check_finite(inputs, names[0], -2)
        check_targets(targets, points, likelihood, names[1], **arguments)


def check_coefficients(coefficients: Tensor, inputs: Tensor, name: str) -> None:
    """Raise unless coefficients ``... x n x J`` fit inputs ``... x n x J x d``.

    Args:
        coefficients: Of the functionals that are observed.
        inputs: The inputs of each.
        name: What to call the inputs in errors.
    """
    check_tensor(coefficients, "coefficients")
    check_tensor(inputs, name)
    if inputs.dim() < 3 or coefficients.shape[-2:] != inputs.shape[-3:-1]:
        raise ValueError(
            f"coefficients: expected shape ... x n x J for {name} of shape ... x n x J x d, got "
            f"{tuple(coefficients.shape)} and {tuple(inputs.shape)}."
        )
    check_finite(coefficients, "coefficients", -2)


def check_weights(weights: Tensor | None, n: int) -> None:
    """Raise unless weights are ``None`` or ``n`` finite numbers of at least zero.

    Args:
        weights: How often each observation counts.
        n: The number of observations.
    """
    if weights is None:
        return
    check_tensor(weights, "weights")
    if weights.shape != (n,):
        raise ValueError(f"weights: expected shape ({n},), got {tuple(weights.shape)}.")
    if not bool((weights.isfinite() & (weights >= 0)).all()):
        check_finite(weights, "weights", -1)
        raise ValueError(f"weights: expected at least zero, got {weights.min().item():g}.")


def check_targets(
    targets: Tensor, inputs: Tensor, likelihood: Likelihood, name: str = "targets", **kwargs: Any
) -> None:
    """Raise unless ``targets`` fits ``inputs`` and lies in the likelihood's support.

    Args:
        targets: ``... x n``, broadcastable against the inputs' batch shape.
        inputs: ``... x n x d``.
        likelihood: The likelihood that the targets are observations of.
        name: What to call the targets in the error.
        kwargs: Per-point arguments of the likelihood (``total_count=``, ...).
    """
    check_target_shape(targets, inputs, name)
    if not isinstance(likelihood, GaussianLikelihoodWithMissingObs):
        check_finite(targets, name, -1, _missing_hint(targets, likelihood))
    for argument, value in kwargs.items():
        _check_argument(value, argument, targets)
    if targets.numel():
        _check_support(targets, likelihood, name, **kwargs)


def check_target_shape(targets: Tensor, inputs: Tensor, name: str) -> None:
    """Raise unless targets are ``... x n`` for inputs ``... x n x d``.

    Args:
        targets: The targets.
        inputs: The inputs.
        name: What to call the targets in the error.
    """
    check_tensor(targets, name)
    num_data = inputs.shape[-2]
    if targets.dim() == 0 or targets.shape[-1] != num_data:
        raise ValueError(
            f"{name}: expected shape ... x {num_data} for inputs of shape {tuple(inputs.shape)}, "
            f"got {tuple(targets.shape)}."
        )
    try:
        broadcast_shapes(targets.shape[:-1], inputs.shape[:-2])
    except RuntimeError:
        raise ValueError(
            f"{name}: batch shape {tuple(targets.shape[:-1])} does not broadcast against that of "
            f"the inputs, {tuple(inputs.shape[:-2])}."
        ) from None


def _check_argument(value: Any, name: str, targets: Tensor) -> None:
    """A per-point argument of a likelihood: ``... x n``, and what noise and totals can be."""
    _check_argument_shape(value, name, targets)
    if not isinstance(value, Tensor):
        return
    check_finite(value, name, -1)
    if name == "noise" and bool((value < 0).any()):
        raise ValueError(f"noise: expected variances, got {value.min().item():g}.")
    if name == "total_count":
        wrong = value[(value < 0) | (value != value.round())]
        if len(wrong):
            raise ValueError(
                f"total_count: expected integers that are not negative, got {wrong[0].item():g}."
            )


def _check_argument_shape(value: Any, name: str, targets: Tensor) -> None:
    if not isinstance(value, Tensor):
        return
    n = targets.shape[-1]
    column = value.shape[-2:] == (n, 1) != (1, 1) and targets.shape[-2:-1] != (n,)
    if column or (value.dim() and value.shape[-1] not in (1, n)):
        raise ValueError(
            f"{name}: expected shape ... x {n}, an element for each observation, got "
            f"{tuple(value.shape)}."
        )


def _missing_hint(targets: Tensor, likelihood: Likelihood) -> str:
    """The end of an error about NaN: what to do if observations are missing."""
    if not is_conjugate(likelihood) or not targets.is_floating_point():
        return "."
    if targets.dim() > 1 and bool(targets.isnan().any()):
        return (
            "; if some outputs have not been observed everywhere, pass likelihood="
            f"GaussianLikelihoodWithMissingObs(batch_shape=torch.Size({[*targets.shape[:-1]]}))."
        )
    return "; leave out rows that have not been observed."


def check_finite(tensor: Tensor, name: str, dim: int = -2, hint: str = ".") -> None:
    """Raise unless all numbers are finite.

    Args:
        tensor: The numbers.
        name: What to call them in the error.
        dim: The dimension along which observations come one after the other.
        hint: The end of the error: what to do.
    """
    if not tensor.is_floating_point():
        return
    bad = ~tensor.isfinite()
    if bad.any():
        first = f", the first in row {int(bad.nonzero()[:, dim].min())}" if tensor.dim() else ""
        raise ValueError(
            f"{name}: expected finite numbers, got {int(bad.sum())} NaN or infinite out of "
            f"{tensor.numel()}{first}{hint}"
        )


def _possible(targets: Tensor, likelihood: Likelihood, **kwargs: Any) -> tuple[Any, Tensor | None]:
    """The support of ``p(y | f)`` and which targets lie in it; ``None`` where all numbers do."""
    if is_conjugate(likelihood):
        return constraints.real, None
    if isinstance(likelihood, SoftmaxLikelihood):
        support: Any = constraints.integer_interval(0, likelihood.num_classes - 1)
    elif isinstance(likelihood, BernoulliLikelihood):
        support = constraints.boolean
    else:
        shape = targets.shape
        if not has_one_latent(likelihood):
            shape = torch.Size([*shape, getattr(likelihood, "num_features", 1)])
        latent = torch.zeros(shape, dtype=torch.get_default_dtype(), device=targets.device)
        try:
            support = likelihood.forward(latent, **kwargs).support
        except (TypeError, RuntimeError, AttributeError, KeyError, IndexError) as error:
            shapes = [f"{k} {tuple(getattr(v, 'shape', ()))}" for k, v in kwargs.items()]
            raise ValueError(
                f"likelihood: {type(likelihood).__name__}.forward failed for latent values of "
                f"shape {tuple(latent.shape)} and {', '.join(shapes) or 'no arguments'}: {error} "
                "It has to return a distribution of observations; per-point arguments have an "
                "element for each observation."
            ) from error
    allowed = support.check(targets)
    if isinstance(likelihood, BetaLikelihood):  # the density at 0 and 1 is zero or infinite
        allowed = allowed & (targets > 0) & (targets < 1)
    return support, allowed


def _check_support(targets: Tensor, likelihood: Likelihood, name: str, **kwargs: Any) -> None:
    """Compare targets with the support of the conditional distribution ``p(y | f)``."""
    support, allowed = _possible(targets, likelihood, **kwargs)
    if allowed is None or allowed.all():
        return
    example = targets[~allowed].flatten()[0].item()
    classes = getattr(likelihood, "num_classes", None)
    largest = getattr(support, "upper_bound", None)
    kind = type(likelihood).__name__
    if isinstance(likelihood, BernoulliLikelihood):
        hint = "labels must be 0 or 1"
        if example == -1:
            hint += "; turn -1/+1 labels into 0/1 with (y + 1) / 2"
    elif isinstance(likelihood, BetaLikelihood):
        hint = "targets must lie strictly between 0 and 1"
    elif classes is not None:
        hint = (
            f"labels must be integers from 0 to {classes - 1}; num_classes counts all classes that "
            "may come, seen or not"
        )
        if example == classes and bool((targets >= 1).all()):
            hint += "; if ratings start at 1, pass y - 1"
    elif isinstance(largest, Tensor):  # one for each: that of the example alone
        most = torch.broadcast_to(largest, allowed.shape)[~allowed].flatten()[0].item()
        hint = f"it must be an integer from 0 to {most:g}"
        if 0 < example < 1:
            hint += "; pass counts, not rates"
    elif support is constraints.nonnegative_integer:
        hint = "counts must be whole numbers from 0"
    else:
        hint = f"targets must satisfy {support}"
    raise ValueError(f"{name}: {example:g} is not a possible observation of {kind}: {hint}.")

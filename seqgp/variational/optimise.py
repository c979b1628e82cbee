"""Optimisers for hyperparameters: L-BFGS for exact objectives, Adam for stochastic ones."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from botorch.optim.closures import ForwardBackwardClosure
from botorch.optim.core import scipy_minimize
from botorch.optim.utils import get_parameters_and_bounds
from gpytorch.mlls import MarginalLogLikelihood
from linear_operator.utils.errors import NanError, NotPSDError
from linear_operator.utils.warnings import NumericalWarning
from torch import Tensor

from seqgp.distributed import Ranks

Parameters = dict[str, Tensor]
Bounds = dict[str, tuple[float | None, float | None]]


def learnable_parameters(mll: MarginalLogLikelihood, moves_Z: bool) -> tuple[Parameters, Bounds]:
    """Return the learnable hyperparameters of an objective, and bounds of some of them.

    Args:
        mll: The objective of a model with a `DualVariationalStrategy`.
        moves_Z: Whether the inducing points are among them, as a parameter or as a buffer. If so,
            they require a gradient from then on.
    """
    parameters, bounds = get_parameters_and_bounds(
        mll, name_filter=lambda name: not name.endswith("inducing_points"), requires_grad=True
    )
    if moves_Z:
        Z = mll.model.variational_strategy.inducing_points
        parameters["model.variational_strategy.inducing_points"] = Z.requires_grad_(True)
    return parameters, bounds


def lbfgs(
    loss: Callable[[], Tensor],
    parameters: Parameters,
    bounds: Bounds,
    steps: int,
    tol: float,
) -> None:
    """Minimise a loss with L-BFGS-B.

    Positive parameters are optimised on a log scale. BoTorch's default lengthscales and noise are
    not transformed. With small noise, its derivative would dominate the gradient, and L-BFGS would
    make little progress, and stop, long before the lengthscales have changed.

    Args:
        loss: The loss, a scalar.
        parameters: The parameters, which are changed in place.
        bounds: Bounds of some of them. A lower bound of zero or more marks a positive parameter.
        steps: The maximum number of iterations.
        tol: Stop when an iteration lowers the loss by less than this.
    """
    logs = {
        name: parameters[name].detach().log()
        for name, (lower, _) in bounds.items()
        if lower is not None and lower >= 0 and bool((parameters[name] > 0).all())
    }
    free = {name: logs.get(name, parameter) for name, parameter in parameters.items()}
    within = {name: _log(pair) if name in logs else pair for name, pair in bounds.items()}
    inner = ForwardBackwardClosure(loss, parameters)

    @torch.no_grad()
    def become() -> None:
        for name, value in logs.items():
            parameters[name].copy_(value.exp())

    def closure() -> tuple[Tensor, list[Tensor | None]]:
        become()
        value, gradients = inner()
        return value, [
            gradient
            if gradient is None or name not in logs
            else gradient * parameters[name].detach()
            for name, gradient in zip(parameters, gradients, strict=True)
        ]

    first = [closure()]
    size, start = abs(float(first[0][0].detach())), {k: v.clone() for k, v in free.items()}

    def evaluate() -> tuple[Tensor, list[Tensor | None]]:
        """Evaluate the closure, or return the known value at the start (if within bounds)."""
        known = first.pop() if first else None
        if known is not None and all(torch.equal(free[name], start[name]) for name in free):
            return known
        return closure()

    with warnings.catch_warnings():
        # Ignore warnings at trial hyperparameters; the final ones are checked later.
        warnings.simplefilter("ignore", NumericalWarning)
        options = {"maxiter": steps, "ftol": tol / max(size, 1.0)}  # relative to the loss
        scipy_minimize(evaluate, free, within, options=options)
    become()
    clamp_to_bounds({name: parameters[name] for name in logs}, {n: bounds[n] for n in logs})


def _log(pair: tuple[float | None, float | None]) -> tuple[float | None, float | None]:
    """Return bounds on a log scale."""
    lower, upper = (None if bound is None else float(bound) for bound in pair)
    return math.log(lower) if lower else None, None if upper is None else math.log(upper)


def adam(
    losses: Iterable[Callable[[], Tensor]],
    parameters: Parameters,
    bounds: Bounds,
    learning_rate: float,
    scheduler: Callable[[torch.optim.Optimizer], Any] | None = None,
) -> Iterator[Tensor]:
    """Take an Adam step for each loss.

    BoTorch's default kernels and likelihoods are not transformed and rely on the optimiser for
    their bounds, so parameters are clamped to the bounds after each step.

    Args:
        losses: The loss of each step: always the same, or one for each minibatch.
        parameters: The parameters, which are changed in place.
        bounds: Bounds of some of them.
        learning_rate: The step size.
        scheduler: Makes a schedule for it.

    Yields:
        The loss before each step.
    """
    optimizer = torch.optim.Adam(list(parameters.values()), lr=learning_rate)
    schedule = None if scheduler is None else scheduler(optimizer)
    for loss in losses:
        optimizer.zero_grad()
        value = loss()
        value.backward()
        optimizer.step()
        clamp_to_bounds(parameters, bounds)
        if schedule is not None:
            schedule.step()
        yield value.detach()


def shared_loss(
    loss: Callable[[], Tensor], parameters: Mapping[str, Tensor], ranks: Ranks
) -> Callable[[], Tensor]:
    """Return a loss with the total gradient, given one with this rank's share of the gradient.

    The value and the gradient of the result are bitwise the same on all ranks, so optimisers take
    the same steps on each of them.

    Args:
        loss: A loss whose value is known to each rank, with its share of the gradient.
        parameters: The parameters to differentiate with respect to.
        ranks: The processes that share the data.
    """
    if ranks.alone:
        return loss

    def whole() -> Tensor:
        with ranks.together():
            value, inputs = loss(), list(parameters.values())
            if not (torch.is_grad_enabled() and value.requires_grad):
                return ranks.sum(value / ranks.size)[0]
            shares = torch.autograd.grad(value, inputs, allow_unused=True)
            known = [
                torch.zeros_like(p) if g is None else g for p, g in zip(inputs, shares, strict=True)
            ]
            total, *gradient = ranks.sum(value.detach() / ranks.size, *known)
        slopes = zip(inputs, gradient, strict=True)
        return total + torch.stack([((p - p.detach()) * g).sum() for p, g in slopes]).sum()

    return whole


def turning_back(
    objective: Callable[[], Tensor],
    parameters: Mapping[str, Tensor],
    forget: Callable[[], None] = lambda: None,
) -> Callable[[], Tensor]:
    """Return an objective that makes a line search backtrack where it is not defined.

    Hyperparameters without a posterior (for example with a scale of zero) get a large value and no
    gradient, instead of an error. At the very first evaluation, an error is raised.

    Args:
        objective: The objective, which may raise.
        parameters: The parameters that the optimiser changes.
        forget: Called after an error to discard everything that belongs to these hyperparameters.
    """
    worst: float | None = None

    def guarded() -> Tensor:
        nonlocal worst
        try:
            value = objective()
        except (ValueError, FloatingPointError, NanError, NotPSDError):
            if worst is None:
                raise
            forget()
            return worst + torch.stack([0.0 * p.sum() for p in parameters.values()]).sum()
        if worst is None:
            worst = 2 * abs(value.item()) + 1e3
        return value

    return guarded


@torch.no_grad()
def clamp_to_bounds(parameters: Parameters, bounds: Bounds) -> None:
    """Clamp parameters to their bounds.

    Args:
        parameters: The parameters.
        bounds: Bounds of some of them.
    """
    for name, (lower, upper) in bounds.items():
        if lower is not None or upper is not None:
            parameters[name].clamp_(lower, upper)

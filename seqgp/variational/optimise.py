"""Optimisers for hyperparameters: L-BFGS where an objective is exact, Adam where it is not."""

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
    """The hyperparameters of an objective that are learnt, and bounds of some of them.

    Args:
        mll: The objective of a model with a `DualVariationalStrategy`.
        moves_Z: Whether the inducing points are among what is learnt, be they a parameter or a
            buffer. They require a gradient from then on.
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

    Positive parameters move on a log scale. BoTorch's default lengthscales and noise are not
    transformed: if the noise is small, the gradient is all but that of the noise, and iterations
    gain little, and stop, long before the lengthscales have moved.

    Args:
        loss: The loss, a scalar.
        parameters: What to move, in place.
        bounds: Bounds of some of them. What cannot be negative is positive.
        steps: The largest number of iterations.
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
        """The same; at the start, where SciPy begins unless that is out of bounds, it is known."""
        known = first.pop() if first else None
        if known is not None and all(torch.equal(free[name], start[name]) for name in free):
            return known
        return closure()

    with warnings.catch_warnings():
        # Of sites at hyperparameters that are only tried out; those that stay are checked.
        warnings.simplefilter("ignore", NumericalWarning)
        options = {"maxiter": steps, "ftol": tol / max(size, 1.0)}  # relative to the loss
        scipy_minimize(evaluate, free, within, options=options)
    become()
    clamp_to_bounds({name: parameters[name] for name in logs}, {n: bounds[n] for n in logs})


def _log(pair: tuple[float | None, float | None]) -> tuple[float | None, float | None]:
    """Bounds on a log scale."""
    lower, upper = (None if bound is None else float(bound) for bound in pair)
    return math.log(lower) if lower else None, None if upper is None else math.log(upper)


def adam(
    losses: Iterable[Callable[[], Tensor]],
    parameters: Parameters,
    bounds: Bounds,
    learning_rate: float,
    scheduler: Callable[[torch.optim.Optimizer], Any] | None = None,
) -> Iterator[Tensor]:
    """Adam, a step for each loss.

    BoTorch's default kernels and likelihoods are not transformed: their bounds are the optimiser's
    business, so parameters are brought back into them after each step.

    Args:
        losses: The loss of each step: all the same, or one for each minibatch.
        parameters: What to move, in place.
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
    """A loss of which each rank knows the value, and its share of the gradient.

    The result has the whole gradient, and the same bits on all ranks, so that an optimiser takes
    the same steps on each of them.

    Args:
        loss: The loss.
        parameters: What it is differentiated with respect to.
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
    """An objective to be minimised from which a line search turns back where there is none.

    Hyperparameters without a posterior, a scale of zero say, have a large value and no gradient
    instead of an error; but at the very first evaluation an error is one.

    Args:
        objective: May raise.
        parameters: What the optimiser moves.
        forget: Called after an error: nothing of where it happened is to be used again.
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
    """Bring parameters back into their bounds.

    Args:
        parameters: The parameters.
        bounds: Bounds of some of them.
    """
    for name, (lower, upper) in bounds.items():
        if lower is not None or upper is not None:
            parameters[name].clamp_(lower, upper)

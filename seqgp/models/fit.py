"""Fitting hyperparameters to a data set, through BoTorch's own hooks."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from botorch.fit import _fit_fallback, _fit_fallback_approximate
from botorch.optim.closures import ForwardBackwardClosure
from botorch.optim.utils import get_parameters, get_parameters_and_bounds
from gpytorch.mlls import MarginalLogLikelihood
from gpytorch.mlls._approximate_mll import _ApproximateMarginalLogLikelihood
from linear_operator.utils.errors import NanError, NotPSDError
from torch import Tensor

from seqgp.likelihoods.traits import is_conjugate
from seqgp.progress import progress_bar
from seqgp.variational.elbo import DualELBO

if TYPE_CHECKING:
    from seqgp.models.sequential_gp import SequentialGP

#: Largest data set that is fitted with all data at each step.
FULL_BATCH_LIMIT = 4096

#: Relative tolerance for the sites at each evaluation: the bound's error is of second order in it.
SITE_TOLERANCE = 1e-5


def fit(
    model: SequentialGP,
    mll: MarginalLogLikelihood,
    closure: Callable[[], Any] | None = None,
    closure_kwargs: dict[str, Any] | None = None,
    optimizer_kwargs: dict[str, Any] | None = None,
    batch_size: int | None = None,
    epochs: int = 20,
    learning_rate: float = 0.03,
    rho: float = 0.5,
    starts: int | None = None,
    progress: bool = False,
    **kwargs: Any,
) -> MarginalLogLikelihood:
    """Fit the hyperparameters of a model; called by `botorch.fit.fit_gpytorch_mll`.

    Up to `FULL_BATCH_LIMIT` observations: L-BFGS on the bound maximised over q. At each evaluation
    the sites are converged, so that the gradient is exact, and the optimiser sees hyperparameters
    only. Beyond: minibatches, each a natural-gradient step and an Adam step.

    Args:
        model: The model, which holds its training data.
        mll: The objective: `DualELBO`, or any other of GPyTorch's bounds for approximate GPs. For
            an exact marginal likelihood, which a sparse GP does not have, the `DualELBO` is used.
        closure: A closure of the user's own, for BoTorch's fallback.
        closure_kwargs: Its arguments.
        optimizer_kwargs: Passed to the optimiser (``options={"maxiter": ...}``, ``timeout_sec``).
        batch_size: Size of minibatches; ``None``: all data if there are not too many.
        epochs: Passes over the data in minibatches.
        learning_rate: Adam's, for minibatches.
        rho: Natural-gradient step size for minibatches.
        starts: From how many sets of inducing points L-BFGS starts, if it learns them: those of the
            model, and others chosen under the hyperparameters that were found. The best fit is
            kept. By default two for a Gaussian likelihood, where they are cheap, and else one.
        progress: Whether to show a progress bar.
        kwargs: Passed to BoTorch's fallback (``max_attempts``, ...).
    """
    model.check_not_fantasy()
    if closure is not None:
        mll = _fit_fallback_approximate(
            mll,
            closure=closure,
            closure_kwargs=closure_kwargs,
            optimizer_kwargs=optimizer_kwargs,
            **kwargs,
        )
        model.refresh()
        return mll
    objective = mll
    if not isinstance(mll, _ApproximateMarginalLogLikelihood):
        objective = DualELBO(mll.likelihood, model)
    if batch_size is None and model.num_data > FULL_BATCH_LIMIT:
        batch_size = 1024
    if batch_size is None:
        starts = (2 if is_conjugate(model.likelihood) else 1) if starts is None else starts
        _fit_full_batch(model, objective, optimizer_kwargs or {}, starts, progress, **kwargs)
    else:
        objective.train()
        _fit_minibatches(model, objective, batch_size, epochs, learning_rate, rho, progress)
    model.refresh()
    return mll.eval()


def _fit_full_batch(
    model: SequentialGP,
    mll: _ApproximateMarginalLogLikelihood,
    optimizer_kwargs: dict[str, Any],
    starts: int,
    progress: bool,
    **kwargs: Any,
) -> None:
    parameters = {
        name: parameter
        for name, parameter in get_parameters(mll, requires_grad=True).items()
        # Inducing points at all inputs are optimal already.
        if not (name.endswith("inducing_points") and model.inducing_points_cover_data)
    }
    bar = progress_bar(desc="fit", unit=" evaluations", disable=None if progress else True)

    sites = None

    def converged_loss() -> Tensor:
        nonlocal sites
        bound, sites = model.bound(sites, tol=SITE_TOLERANCE)
        return -mll.with_priors(bound, max(model.num_data, 1)).sum()

    def forget_sites() -> None:
        nonlocal sites
        sites = None

    guarded_loss = turning_back(converged_loss, parameters, forget_sites)

    def dual_loss() -> Tensor:
        bar.update()
        return guarded_loss()

    def loss() -> Tensor:
        bar.update()
        model.refresh()
        return -mll(
            model(model.train_inputs[0]), model.train_targets, **model.likelihood_arguments
        ).sum()

    objective = dual_loss if isinstance(mll, DualELBO) and mll.beta == 1 else loss
    name = next((name for name in parameters if name.endswith("inducing_points")), None)
    best: dict[str, Tensor] | None = None
    least = torch.inf
    for _ in range(starts if name is not None else min(len(parameters), 1)):
        if best is not None and name is not None:
            Z = model.choose_inducing_points(parameters[name].shape[-2])
            if Z.numel() != parameters[name].numel():  # the kernel has no use for as many
                break
            parameters[name].data.copy_(Z.reshape_as(parameters[name]))
            sites = None
        _fit_fallback(
            mll,
            closure=ForwardBackwardClosure(objective, parameters),
            optimizer_kwargs={"parameters": parameters, **optimizer_kwargs},
            **kwargs,
        )
        mll.train()
        with torch.no_grad():
            value = float(objective())
        if value < least:
            least, best = value, {key: p.detach().clone() for key, p in parameters.items()}
    for key, value_of in (best or {}).items():
        parameters[key].data.copy_(value_of)
    bar.close()


def turning_back(
    objective: Callable[[], Tensor], parameters: dict[str, Tensor], forget: Callable[[], None]
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
        worst = max(worst or 1e3, 2 * abs(value.item()) + 1)
        return value

    return guarded


def _fit_minibatches(
    model: SequentialGP,
    mll: _ApproximateMarginalLogLikelihood,
    batch_size: int,
    epochs: int,
    learning_rate: float,
    rho: float,
    progress: bool,
) -> None:
    (X,), Y, n = model.train_inputs, model.train_targets, model.num_data
    parameters, bounds = get_parameters_and_bounds(mll, requires_grad=True)
    optimizer = torch.optim.Adam(list(parameters.values()), lr=learning_rate)
    steps = epochs * -(-n // batch_size)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    # The same minibatches whatever the global random state: fits are reproducible.
    generator = torch.Generator().manual_seed(0)
    with progress_bar(
        total=steps, desc="fit", unit=" steps", disable=None if progress else True
    ) as bar:
        for _ in range(epochs):
            order = torch.randperm(n, generator=generator, device="cpu").to(X.device)
            for index in order.split(batch_size):
                x, y = X[..., index, :], Y[..., index]
                arguments = {k: v[..., index] for k, v in model.likelihood_arguments.items()}
                model.natural_gradient_step(x, y, rho, **arguments)
                optimizer.zero_grad()
                loss = -mll(model(x), y, **arguments).sum()
                loss.backward()
                optimizer.step()
                clamp_to_bounds(parameters, bounds)
                schedule.step()
                bar.update()
                bar.set_postfix(elbo=f"{-loss.item():.4f}", refresh=False)


@torch.no_grad()
def clamp_to_bounds(
    parameters: dict[str, Tensor], bounds: dict[str, tuple[float | None, float | None]]
) -> None:
    """Bring parameters back into their bounds.

    BoTorch's default kernels and likelihoods are not transformed: their bounds are the
    optimiser's business, and Adam does not know of bounds.
    """
    for name, (lower, upper) in bounds.items():
        if lower is not None or upper is not None:
            parameters[name].clamp_(lower, upper)

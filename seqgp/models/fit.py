"""Fit hyperparameters to a data set, called through BoTorch's own hooks."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import torch
from botorch.exceptions.warnings import OptimizationWarning
from botorch.fit import _fit_fallback, _fit_fallback_approximate
from botorch.models.pairwise_gp import PairwiseLaplaceMarginalLogLikelihood
from botorch.optim.closures import ForwardBackwardClosure
from botorch.optim.utils import get_parameters
from gpytorch.mlls import ExactMarginalLogLikelihood, MarginalLogLikelihood
from gpytorch.mlls._approximate_mll import _ApproximateMarginalLogLikelihood
from torch import Tensor

from seqgp.dual import Sites
from seqgp.likelihoods.noise_floor import noise_floor
from seqgp.likelihoods.traits import has_closed_form, is_conjugate, precision_floor
from seqgp.models.protocol import DataModel
from seqgp.models.staleness import catch_up
from seqgp.observations import Observations
from seqgp.progress import progress_bar
from seqgp.streaming.inducing_points import DEFAULT_LIMIT
from seqgp.streaming.state import StreamState
from seqgp.validation import check_count, check_flag, check_number, check_step_size
from seqgp.variational.elbo import DualELBO
from seqgp.variational.optimise import adam, learnable_parameters, shared_loss, turning_back
from seqgp.variational.state import fixed_sites

#: Objectives of exact models, and of approximations of them, that `DualELBO` replaces.
EVIDENCE = (ExactMarginalLogLikelihood, PairwiseLaplaceMarginalLogLikelihood)

#: Maximum number of elements of the cross-covariance, ``m x n``, that is evaluated at once. For
#: larger data sets, minibatches are used.
FULL_BATCH_ELEMENTS = 2**25

#: Relative tolerance of the sites at each evaluation. The error of the bound is of second order.
SITE_TOLERANCE = 1e-5

#: A round with newly chosen inducing points has to raise the bound by this many nats.
ROUND_TOLERANCE = 0.1

#: Maximum number of L-BFGS iterations that move chosen inducing points by gradient.
MOVES = 100

#: Relative change of the bound between epochs at which minibatches have converged.
EPOCH_TOLERANCE = 1e-4


class FittedModel(DataModel, Protocol):
    """The methods that a fit needs of a model, besides those of `DataModel`."""

    max_inducing: int

    def choose_inducing_points(self, number: int, fills_up: bool = False) -> Tensor:
        """Return inducing points for the present kernel."""
        ...

    def natural_gradient_step(
        self, observations: Observations, rho: float, num_data: int | None = None
    ) -> None:
        """Take one natural-gradient step on a minibatch."""
        ...

    def named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Return hyperparameters and inducing points by name."""
        ...

    @property
    def train_inputs(self) -> tuple[Tensor]:
        """Inputs of the observations, as they are passed in train mode."""
        ...

    @property
    def train_targets(self) -> Tensor:
        """Transformed targets."""
        ...

    def transform_inputs(self, X: Tensor) -> Tensor:
        """Return inputs as the model's strategy sees them."""
        ...

    def __call__(self, inputs: Tensor, prior: bool = False) -> Any:
        """Return the posterior, or the prior."""
        ...


def fit(
    model: FittedModel,
    mll: MarginalLogLikelihood,
    closure: Callable[[], Any] | None = None,
    closure_kwargs: dict[str, Any] | None = None,
    optimizer_kwargs: dict[str, Any] | None = None,
    batch_size: int | None = None,
    epochs: int | None = None,
    learning_rate: float = 0.03,
    rho: float = 0.5,
    rounds: int = 4,
    progress: bool = False,
    **kwargs: Any,
) -> MarginalLogLikelihood:
    """Fit the hyperparameters of a model; called by `botorch.fit.fit_gpytorch_mll`.

    By default, L-BFGS maximises the bound, maximised over q. At each evaluation the sites are
    converged, so the gradient is exact and the optimiser sees hyperparameters only. If all inputs
    are inducing points, the cost is that of an exact GP.

    If the model has chosen fewer inducing points, they are chosen again under the fitted
    hyperparameters, and another round of L-BFGS follows, as long as this raises the bound (Burt et
    al., 2020). Each round uses the maximum number of inducing points, because few of them favour
    smooth functions. Points that turn out not to be needed are dropped at the end. If the user has
    asked for fewer inducing points than the data need, there is one round, and then a number of
    iterations that move them by gradient, since the best places need not be inputs.

    Data sets that are too large for this are fitted in minibatches. Each takes a natural-gradient
    step and an Adam step, until the bound no longer rises.

    Args:
        model: The model, which holds its training data.
        mll: The objective: `DualELBO`, or any other of GPyTorch's bounds for approximate GPs. An
            `ExactMarginalLogLikelihood`, which a sparse GP does not have, is replaced by the
            `DualELBO`. Other objectives of exact models (`LeaveOneOutPseudoLikelihood`) raise an
            error unless the model is exact.
        closure: A closure of the user's own, for BoTorch's fallback.
        closure_kwargs: Its arguments.
        optimizer_kwargs: Passed to the optimiser (``options={"maxiter": ...}``, ``timeout_sec``).
        batch_size: Size of minibatches. ``None`` uses all data at once, unless there are too many.
        epochs: Passes over the data in minibatches. By default until they have converged, but at
            most 500, with a warning if that is not enough.
        learning_rate: Adam's learning rate, for minibatches.
        rho: Natural-gradient step size, for minibatches.
        rounds: The maximum number of rounds of L-BFGS.
        progress: Whether to show a progress bar.
        kwargs: Passed to BoTorch's fallback (``max_attempts``, ...).
    """
    model.check_not_fantasy()
    ranks = model.variational_strategy.ranks
    if not ranks.alone:
        _check_shared(mll, closure, optimizer_kwargs)
    check_count(batch_size, "batch_size")
    check_count(epochs, "epochs")
    check_count(rounds, "rounds", optional=False)
    check_number(learning_rate, "learning_rate")
    check_number(rho, "rho")
    check_step_size(rho)
    check_flag(progress, "progress")
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
    if type(mll) in EVIDENCE:
        objective = DualELBO(mll.likelihood, model)
    elif not isinstance(mll, _ApproximateMarginalLogLikelihood):
        mll = _fit_fallback(mll, optimizer_kwargs=optimizer_kwargs, **kwargs)
        catch_up(model)
        return mll.eval()
    m = model.variational_strategy.inducing_points.shape[-2]
    if batch_size is None and model.num_data * m > FULL_BATCH_ELEMENTS:
        batch_size = 1024
    with _on_all_ranks(model):
        sites = None
        if batch_size is None:
            sites = _fit_full_batch(
                model, objective, optimizer_kwargs or {}, rounds, progress, **kwargs
            )
        else:
            objective.train()
            source = _minibatches_at_hand(model, batch_size)
            fit_minibatches(model, objective, source, epochs, learning_rate, rho, progress)
            model.variational_strategy.inducing_points.requires_grad_(model.fits_inducing_points)
        model.refresh(start=sites)
    return mll.eval()


def _check_shared(
    mll: MarginalLogLikelihood,
    closure: Callable[[], Any] | None,
    optimizer_kwargs: dict[str, Any] | None,
) -> None:
    """Raise if several processes cannot share what they are asked to do."""
    approximate = isinstance(mll, _ApproximateMarginalLogLikelihood)
    if closure is not None or (approximate and not (isinstance(mll, DualELBO) and mll.beta == 1)):
        raise ValueError(
            "mll: with a process_group, the objective is a DualELBO with beta=1 (or an exact "
            "marginal log likelihood in its place), without a closure of your own."
        )
    if (optimizer_kwargs or {}).get("timeout_sec") is not None:
        raise ValueError(
            "timeout_sec: processes with clocks of their own would stop at different steps; pass "
            'options={"maxiter": ...}.'
        )


@contextmanager
def _on_all_ranks(model: FittedModel) -> Iterator[None]:
    """Run a fit in several processes, which draw the same random numbers and fail together.

    After a failure, hyperparameters and posterior are restored.
    """
    strategy = model.variational_strategy
    if strategy.ranks.alone:
        yield
        return
    parameters = {n: p.detach().clone() for n, p in model.named_parameters()}
    state = {name: tensor.detach().clone() for name, tensor in strategy.tensors().items()}

    def restore() -> None:
        strategy.set_tensors(state)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name != "variational_strategy.inducing_points":
                    parameter.copy_(parameters[name])
        model.note_hyperparameters()

    with strategy.ranks.all_or_none(restore), torch.random.fork_rng():
        torch.manual_seed(0)
        yield


def loss(model: FittedModel, mll: MarginalLogLikelihood) -> Tensor:
    """Return the negative objective per observation at the training data, with converged sites.

    Args:
        model: The model.
        mll: See `fit`.

    Returns:
        A tensor of the batch shape of the model; if several processes share the data, its sum.
    """
    model.check_not_fantasy()
    if isinstance(mll, _ApproximateMarginalLogLikelihood) and not isinstance(mll, DualELBO):
        model.refresh()
        return _loss(model, mll, model.stream.observations)
    ranks = model.variational_strategy.ranks
    if not isinstance(mll, _ApproximateMarginalLogLikelihood):
        if has_exact_objectives(model):
            return _loss_of_exact_model(model, mll)
        if type(mll) not in EVIDENCE:
            raise ValueError(
                f"mll: a {type(mll).__name__} is for exact models. This one is sparse, has "
                "discarded observations, or some are missing or not Gaussian; use DualELBO."
            )
    dual = mll if isinstance(mll, DualELBO) else DualELBO(mll.likelihood, model)

    def own() -> Tensor:
        bound, _ = model.bound(tol=SITE_TOLERANCE, max_steps=100, exact=_is_exact(model))
        return -dual.with_priors(bound, max(model.num_data, 1))

    if ranks.alone:
        return own()
    parameters = get_parameters(dual, requires_grad=True)
    return shared_loss(lambda: own().sum(), parameters, ranks)()


def has_exact_objectives(model: FittedModel) -> bool:
    """Whether a model is exact: Gaussian observations, with an inducing point at each.

    Args:
        model: The model.
    """
    alone = model.variational_strategy.ranks.alone and not model.variational_strategy.is_fantasy
    gaussian = is_conjugate(model.likelihood) and has_closed_form(model.likelihood)
    return alone and gaussian and _is_exact(model)


def _loss_of_exact_model(model: FittedModel, mll: MarginalLogLikelihood) -> Tensor:
    """Return the negative of an objective that depends on the prior and Gaussian noise only."""
    (inputs,) = model.train_inputs
    f = model(inputs, prior=True)
    if model.training:
        inputs = model.transform_inputs(inputs)
    value: Tensor = mll(f, model.train_targets, inputs)
    return -value


def _is_exact(model: FittedModel) -> bool:
    """Whether the bound can be computed with inducing points at all inputs."""
    if not model.inducing_points_cover_data or model.variational_strategy.has_summary:
        return False
    return precision_floor(model.likelihood) == 0.0


def _fit_full_batch(
    model: FittedModel,
    mll: _ApproximateMarginalLogLikelihood,
    optimizer_kwargs: dict[str, Any],
    rounds: int,
    progress: bool,
    **kwargs: Any,
) -> Sites | None:
    """Fit to all data at once; return the sites at the fitted hyperparameters, if known."""
    strategy = model.variational_strategy
    covers, dual = model.inducing_points_cover_data, isinstance(mll, DualELBO) and mll.beta == 1
    # Inducing points at all inputs are already optimal.
    parameters = {
        name: parameter
        for name, parameter in get_parameters(mll, requires_grad=True).items()
        if not name.endswith("inducing_points") or (model.fits_inducing_points and not covers)
    }
    if not parameters:
        return None
    targets = model.stream.observations.targets
    bounds = noise_floor(model.likelihood, targets, model.variational_strategy.ranks)
    bounds |= optimizer_kwargs.get("bounds") or {}
    optimizer_kwargs = {"parameters": parameters, **optimizer_kwargs}
    if bounds:
        optimizer_kwargs["bounds"] = bounds
    exact = dual and _is_exact(model)
    bar = progress_bar(desc="fit", unit=" evaluations", disable=None if progress else True)
    sites: Sites | None = None

    def converged_loss() -> Tensor:
        nonlocal sites
        bound, sites = model.bound(sites, SITE_TOLERANCE, max_steps=100, exact=exact)
        return -mll.with_priors(bound, max(model.num_data, 1)).sum()

    def forget_sites() -> None:
        nonlocal sites
        sites = None

    whole = shared_loss(converged_loss, parameters, strategy.ranks)
    guarded_loss = turning_back(whole, parameters, forget_sites)

    def dual_loss() -> Tensor:
        bar.update()
        return guarded_loss()

    def loss() -> Tensor:
        bar.update()
        model.refresh()
        return _summed_loss(model, mll, model.stream.observations)

    objective = dual_loss if dual else loss
    chosen = _chosen_anew(model, covers)
    best: tuple[float, dict[str, Tensor]] | None = None
    batch_shape = strategy.inducing_points.shape[:-2]
    moves = chosen and dual and model.changes_inducing_points and model.max_inducing < DEFAULT_LIMIT
    for _ in range(rounds if chosen and not moves else 1):
        if chosen:
            Z = model.choose_inducing_points(model.max_inducing, fills_up=True)
            strategy.start_from(Z.reshape(*batch_shape, *Z.shape[-2:]))
            sites = None
        _fit_fallback(
            mll,
            closure=ForwardBackwardClosure(objective, parameters),
            optimizer_kwargs=optimizer_kwargs,
            **kwargs,
        )
        mll.train()
        if not chosen:
            break
        with torch.no_grad():
            value = float(objective())
        values = {key: p.detach().clone() for key, p in parameters.items()}
        gain = torch.inf if best is None else (best[0] - value) * max(model.num_data, 1)
        if gain > 0:
            best = value, values
        if gain < ROUND_TOLERANCE:
            break
    if best is not None:
        for key, value_of in best[1].items():
            parameters[key].data.copy_(value_of)
        Z = model.choose_inducing_points(model.max_inducing)
        strategy.start_from(Z.reshape(*batch_shape, *Z.shape[-2:]))
        sites = None
    if best is not None and moves and strategy.inducing_points.shape[-2] == model.max_inducing:
        Z = strategy.inducing_points.requires_grad_(True)
        parameters |= {"model.variational_strategy.inducing_points": Z}
        options = {"maxiter": MOVES, **optimizer_kwargs.get("options", {})}
        _fit_fallback(
            mll,
            closure=ForwardBackwardClosure(objective, parameters),
            optimizer_kwargs={**optimizer_kwargs, "parameters": parameters, "options": options},
            **kwargs,
        )
        Z.requires_grad_(model.fits_inducing_points)
        mll.train()
    if covers:  # the input transform may have been learnt
        with torch.no_grad():
            Z = model.stream.gather(model.transformed(model.stream.observations).points, -2)
        strategy.start_from(Z.reshape(strategy.inducing_points.shape))
    if dual:
        with torch.no_grad():
            objective()
    bar.close()
    return sites


def _chosen_anew(model: FittedModel, covers: bool) -> bool:
    """Whether inducing points are chosen again among the inputs under the fitted kernel."""
    strategy = model.variational_strategy
    fixed = covers or model.fits_inducing_points or model.keeps_inducing_points
    return not (fixed or strategy.has_summary) and model.num_data > 0


class Minibatches(NamedTuple):
    """A source of minibatches.

    Attributes:
        num_data: The number of all observations.
        per_epoch: The number of minibatches in an epoch.
        epoch: Returns the minibatches of an epoch, as the model stores them.
        targets: ``... x k`` targets that show their scale.
    """

    num_data: int
    per_epoch: int
    epoch: Callable[[], Iterable[Observations]]
    targets: Tensor


def _minibatches_at_hand(model: FittedModel, size: int) -> Minibatches:
    """Return minibatches of the observations that a model holds, in random order."""
    data, n = model.stream.observations, model.num_data
    # The order does not depend on the global random state, so fits are reproducible.
    generator = torch.Generator().manual_seed(0)

    def epoch() -> Iterator[Observations]:
        order = torch.randperm(n, generator=generator, device="cpu").to(data.inputs.device)
        return map(data.select, _own_minibatches(order, size, model.stream))

    return Minibatches(n, -(-n // size), epoch, data.targets)


def fit_minibatches(
    model: FittedModel,
    mll: _ApproximateMarginalLogLikelihood,
    source: Minibatches,
    epochs: int | None,
    learning_rate: float,
    rho: float,
    progress: bool,
) -> None:
    """Take a natural-gradient step and an Adam step on the hyperparameters for each minibatch.

    Args:
        model: The model.
        mll: A bound, in train mode.
        source: The minibatches.
        epochs: Passes over the data, after which the learning rate is zero; by default until the
            bound no longer grows.
        learning_rate: Adam's learning rate.
        rho: Natural-gradient step size.
        progress: Whether to show a progress bar.
    """
    ranks = model.variational_strategy.ranks
    moves = model.fits_inducing_points or not model.inducing_points_cover_data
    parameters, bounds = learnable_parameters(mll, moves and model.changes_inducing_points)
    bounds |= noise_floor(model.likelihood, source.targets, ranks)
    most, per_epoch = 500 if epochs is None else epochs, source.per_epoch
    schedules: list[Any] = []

    def losses() -> Iterator[Callable[[], Tensor]]:
        for _ in range(most):
            for part in source.epoch():
                model.natural_gradient_step(part, rho, source.num_data)
                yield shared_loss(partial(_summed_loss, model, mll, part), parameters, ranks)

    def scheduler(optimizer: torch.optim.Optimizer) -> Any:
        if epochs is not None:
            steps = epochs * per_epoch
            return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        schedules.append(_Halving(optimizer))
        return schedules[0]

    total, values = most * per_epoch, []
    with progress_bar(
        total=total, desc="fit", unit=" steps", disable=None if progress else True
    ) as bar:
        for value in adam(losses(), parameters, bounds, learning_rate, scheduler):
            bar.update()
            bar.set_postfix(elbo=f"{-value.item():.4f}", refresh=False)
            values.append(value)
            if epochs is None and len(values) == per_epoch:
                epoch, values = float(torch.stack(values).mean()), []
                if schedules[0].epoch(epoch):
                    return
    if epochs is None:
        warnings.warn(
            f"The fit has not converged after {most} epochs of minibatches; pass epochs= for more.",
            OptimizationWarning,
            stacklevel=2,
        )


def _own_minibatches(order: Tensor, size: int, stream: StreamState) -> Iterator[Tensor]:
    """Yield the indices of this rank's observations in each minibatch of all ranks.

    Args:
        order: The observations of all ranks in the order in which they are learnt.
        size: The size of a minibatch.
        stream: The stream, which has the positions of this rank's observations.
    """
    if stream.shard is None:
        yield from order.split(size)
        return
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order), device=order.device)
    place, own = place[stream.shard.position].sort()
    ends = torch.arange(0, len(order) + size, size, device=order.device).clamp_max(len(order))
    bounds = torch.searchsorted(place, ends).tolist()
    for first, last in pairwise(bounds):
        yield own[first:last]


def _loss(model: FittedModel, mll: _ApproximateMarginalLogLikelihood, data: Observations) -> Tensor:
    """Return the negative of any bound as a function of hyperparameters, with the present sites."""
    with fixed_sites():
        value: Tensor = mll(model(data.inputs), data.targets, **data.arguments)
        return -value


def _summed_loss(
    model: FittedModel, mll: _ApproximateMarginalLogLikelihood, data: Observations
) -> Tensor:
    return _loss(model, mll, data).sum()


class _Halving:
    """A schedule that halves the learning rate when the loss of an epoch no longer falls."""

    patience, most = 5, 5

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.best, self.waited, self.halved = optimizer, torch.inf, 0, 0

    def step(self) -> None:
        """Do nothing: the learning rate is constant within an epoch."""

    def epoch(self, loss: float) -> bool:
        """Record the mean loss of an epoch, and return whether the fit has converged."""
        if loss < self.best - EPOCH_TOLERANCE * (1 + abs(loss)):
            self.best, self.waited = loss, 0
            return False
        self.waited += 1
        if self.waited < self.patience:
            return False
        self.waited, self.halved = 0, self.halved + 1
        for group in self.optimizer.param_groups:
            group["lr"] /= 2
        return self.halved > self.most

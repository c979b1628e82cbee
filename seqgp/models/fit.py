"""Fitting hyperparameters to a data set, through BoTorch's own hooks."""

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

#: Objectives of exact models, or approximations of them, which `DualELBO` replaces.
EVIDENCE = (ExactMarginalLogLikelihood, PairwiseLaplaceMarginalLogLikelihood)

#: Largest number of elements of the cross-covariance that is evaluated at once, ``m x n``; with
#: more, the data come in minibatches.
FULL_BATCH_ELEMENTS = 2**25

#: Relative tolerance for the sites at each evaluation: the bound's error is of second order in it.
SITE_TOLERANCE = 1e-5

#: Nats by which another round, with inducing points chosen anew, has to raise the bound.
ROUND_TOLERANCE = 0.1

#: Iterations of L-BFGS that move inducing points, once they have been chosen.
MOVES = 100

#: Relative change of the bound from epoch to epoch at which minibatches have converged.
EPOCH_TOLERANCE = 1e-4


class FittedModel(DataModel, Protocol):
    """What a fit needs of a model beyond what others do."""

    max_inducing: int

    def choose_inducing_points(self, number: int, fills_up: bool = False) -> Tensor:
        """Inducing points for the present kernel."""
        ...

    def natural_gradient_step(
        self, observations: Observations, rho: float, num_data: int | None = None
    ) -> None:
        """One step on a minibatch."""
        ...

    def named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Hyperparameters and inducing points by name."""
        ...

    @property
    def train_inputs(self) -> tuple[Tensor]:
        """Inputs of the observations, as they were given in train mode."""
        ...

    @property
    def train_targets(self) -> Tensor:
        """Transformed targets."""
        ...

    def transform_inputs(self, X: Tensor) -> Tensor:
        """Inputs as the model sees them."""
        ...

    def __call__(self, inputs: Tensor, prior: bool = False) -> Any:
        """The posterior, or the prior."""
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

    L-BFGS on the bound maximised over q. At each evaluation the sites are converged, so that the
    gradient is exact, and the optimiser sees hyperparameters only. If all inputs are inducing
    points this costs what an exact GP does. If the model has chosen fewer, they are chosen anew
    under the hyperparameters that were found, for another round, while that raises the bound (Burt
    et al., 2020). Meanwhile there are as many as there may be, since few of them favour smooth
    functions; those that turn out not to be needed are dropped at the end. If the user has asked
    for so few that the model could do with more, one round is followed by a number of iterations
    in which they move by gradient: no inputs are as good as the best of all places. Data sets that
    are too large for that come in minibatches, each a natural-gradient step and an Adam step, until
    the bound no longer rises.

    Args:
        model: The model, which holds its training data.
        mll: The objective: `DualELBO`, or any other of GPyTorch's bounds for approximate GPs. For
            an `ExactMarginalLogLikelihood`, which a sparse GP does not have, the `DualELBO` is
            used. Other objectives of exact models (`LeaveOneOutPseudoLikelihood`) raise an error
            unless the model is one.
        closure: A closure of the user's own, for BoTorch's fallback.
        closure_kwargs: Its arguments.
        optimizer_kwargs: Passed to the optimiser (``options={"maxiter": ...}``, ``timeout_sec``).
        batch_size: Size of minibatches; ``None``: all data if there are not too many.
        epochs: Passes over the data in minibatches. By default until they have converged, at most
            500, with a warning if that is not enough.
        learning_rate: Adam's, for minibatches.
        rho: Natural-gradient step size for minibatches.
        rounds: The largest number of rounds of L-BFGS.
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
    """Raise if several processes could not do together what they are asked for."""
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
    """A fit by several processes: they draw the same random numbers, and fail together.

    If they fail, hyperparameters and posterior are what they were before.
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
    """The negative objective per observation at the training data, the sites converged.

    Args:
        model: The model.
        mll: As for `fit`.

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
    """Whether a model is an exact one: Gaussian observations, an inducing point at each.

    Args:
        model: The model.
    """
    alone = model.variational_strategy.ranks.alone and not model.variational_strategy.is_fantasy
    gaussian = is_conjugate(model.likelihood) and has_closed_form(model.likelihood)
    return alone and gaussian and _is_exact(model)


def _loss_of_exact_model(model: FittedModel, mll: MarginalLogLikelihood) -> Tensor:
    """The negative of an objective that is a functional of the prior, and of Gaussian noise."""
    (inputs,) = model.train_inputs
    f = model(inputs, prior=True)
    if model.training:
        inputs = model.transform_inputs(inputs)
    value: Tensor = mll(f, model.train_targets, inputs)
    return -value


def _is_exact(model: FittedModel) -> bool:
    """Whether the bound can be computed as that of inducing points at all inputs."""
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
    """Returns the sites at the hyperparameters that were found, as far as they are known."""
    strategy = model.variational_strategy
    covers, dual = model.inducing_points_cover_data, isinstance(mll, DualELBO) and mll.beta == 1
    # Inducing points at all inputs are optimal already.
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
    if covers:  # the inputs may be transformed by what was learnt
        with torch.no_grad():
            Z = model.stream.gather(model.transformed(model.stream.observations).points, -2)
        strategy.start_from(Z.reshape(strategy.inducing_points.shape))
    if dual:
        with torch.no_grad():
            objective()
    bar.close()
    return sites


def _chosen_anew(model: FittedModel, covers: bool) -> bool:
    """Whether inducing points are chosen among the inputs again once the kernel is known."""
    strategy = model.variational_strategy
    fixed = covers or model.fits_inducing_points or model.keeps_inducing_points
    return not (fixed or strategy.has_summary) and model.num_data > 0


class Minibatches(NamedTuple):
    """Where minibatches come from.

    Attributes:
        num_data: The number of all observations.
        per_epoch: The number of minibatches in an epoch.
        epoch: Called for each epoch: its minibatches, as the model stores them.
        targets: ``... x k`` targets that tell their scale.
    """

    num_data: int
    per_epoch: int
    epoch: Callable[[], Iterable[Observations]]
    targets: Tensor


def _minibatches_at_hand(model: FittedModel, size: int) -> Minibatches:
    """Minibatches of the observations that a model holds, in random order."""
    data, n = model.stream.observations, model.num_data
    # The same minibatches whatever the global random state: fits are reproducible.
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
    """For each minibatch a natural-gradient step, and a step of Adam on hyperparameters.

    Args:
        model: The model.
        mll: A bound, in train mode.
        source: The minibatches.
        epochs: Passes over the data, after which the learning rate is zero; by default until the
            bound no longer grows.
        learning_rate: Of Adam.
        rho: Step size of the natural gradient.
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
    """Indices of this rank's observations in each minibatch of all that the ranks hold.

    Args:
        order: The observations of all ranks in the order in which they are learnt.
        size: Of a minibatch.
        stream: The stream, which knows the positions of those of this rank.
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
    """Any bound as a function of hyperparameters, with the sites as they are."""
    with fixed_sites():
        value: Tensor = mll(model(data.inputs), data.targets, **data.arguments)
        return -value


def _summed_loss(
    model: FittedModel, mll: _ApproximateMarginalLogLikelihood, data: Observations
) -> Tensor:
    return _loss(model, mll, data).sum()


class _Halving:
    """Halves the learning rate when the loss of an epoch no longer falls, a few times."""

    patience, most = 5, 5

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.best, self.waited, self.halved = optimizer, torch.inf, 0, 0

    def step(self) -> None:
        """Nothing to do within an epoch."""

    def epoch(self, loss: float) -> bool:
        """Note the mean loss of an epoch; returns whether the fit has converged."""
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

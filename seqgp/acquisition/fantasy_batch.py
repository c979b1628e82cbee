"""Batches by fantasies: for any acquisition function, and for models of any likelihood.

Propose a point, imagine its outcome, condition all models on it, propose the next (Algorithm 2 of
the paper that this library comes from). The acquisition function need not know of batches, of
pending points or of likelihoods.
"""

from __future__ import annotations

import difflib
import inspect
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from botorch.acquisition import LogExpectedImprovement
from botorch.acquisition.acquisition import AcquisitionFunction, OneShotAcquisitionFunction
from botorch.exceptions.errors import UnsupportedError
from botorch.models.model import Model, ModelList
from botorch.optim import (
    optimize_acqf,
    optimize_acqf_discrete,
    optimize_acqf_discrete_local_search,
    optimize_acqf_mixed,
    optimize_acqf_mixed_alternating,
)
from botorch.optim.initializers import gen_batch_initial_conditions
from botorch.sampling.normal import IIDNormalSampler
from torch import Tensor

from seqgp.acquisition.validity import (
    THRESHOLD,
    LogValidExpectedImprovement,
    best_valid,
    takes_for_valid,
)
from seqgp.models.posteriors import ObservationPosterior
from seqgp.models.sequential_gp import SequentialGP
from seqgp.progress import progress_bar
from seqgp.validation import check_inputs, check_tensor

#: What a point's outcome is imagined to be; see `fantasy_outcome`.
FANTASIES = ("mean", "sample", "believer", "constant_min", "constant_mean", "constant_max")

#: In units of the bounds' range; see `fantasy_batch`.
SEPARATION = 0.01

Fantasy = str | None | Callable[[Model, Tensor], Tensor | None]

#: Which of BoTorch's optimisers an option belongs to; without any of them it is `optimize_acqf`.
_OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "fixed_features_list": optimize_acqf_mixed,
    "choices": optimize_acqf_discrete,
    "discrete_choices": optimize_acqf_discrete_local_search,
    "discrete_dims": optimize_acqf_mixed_alternating,
    "cat_dims": optimize_acqf_mixed_alternating,
}

_OURS = ("acq_function", "q", "sequential", "return_best_only", "acq_function_sequence")


class Fantasies(NamedTuple):
    """Points whose outcomes have been imagined.

    Attributes:
        X: ``k x d`` inputs, pending ones first.
        Y: For each model, ``k x m`` outcomes, NaN at points where it was left alone, or ``None`` if
            it was at all of them.
    """

    X: Tensor
    Y: tuple[Tensor | None, ...]


class FantasyBatch(NamedTuple):
    """A batch of proposals.

    Attributes:
        X: ``q x d`` inputs.
        values: ``q`` values of the acquisition function, each of it as it was when it was
            maximised.
        fantasies: All points whose outcomes have been imagined: pending ones, then those of the
            batch but for the last, on which nothing depends any more.
    """

    X: Tensor
    values: Tensor
    fantasies: Fantasies


Factory = Callable[[list[Model], Fantasies], AcquisitionFunction]


def fantasy_batch(
    acquisition: Factory,
    models: Sequence[Model],
    bounds: Tensor,
    q: int,
    fantasy: Fantasy | Sequence[Fantasy] = "mean",
    X_pending: Tensor | None = None,
    X_avoid: Tensor | None = None,
    separation: float = SEPARATION,
    optimizer: Callable[..., Any] | None = None,
    seed: int | None = None,
    progress: bool = False,
    arguments: Sequence[dict[str, float] | None] | None = None,
    **options: Any,
) -> FantasyBatch:
    """Propose a batch, point by point, each knowing of the ones before by their fantasies.

    Args:
        acquisition: Makes the acquisition function from the models, as conditioned on the fantasies
            so far, and those fantasies (for an incumbent, say): ``acquisition(models, fantasies)``.
        models: Models that can be conditioned on observations: those of `seqgp` with any
            likelihood, BoTorch's with a Gaussian one. They are not changed.
        bounds: ``2 x d`` bounds of the inputs.
        q: How many points to propose.
        fantasy: How outcomes are imagined, see `fantasy_outcome`: one way, or one for each model.
        X_pending: ``k x d`` points that are being evaluated elsewhere. Their outcomes are imagined
            first.
        X_avoid: ``k x d`` points that are not to be proposed again, failed ones say.
        separation: How far points keep from each other, from pending ones and from those to avoid,
            as the root mean square over inputs, in units of the bounds' range. A model that is sure
            of where the best point is, or whose observations are noisy, would else propose it
            again; instead the best of the other maxima that were found is taken.
        optimizer: Maximises the acquisition function. By default `optimize_acqf` or, where an
            option asks for it (``fixed_features_list``, ``choices``, ``discrete_dims``, ...), that
            one of BoTorch's relatives of it which knows that option.
        seed: Of outcomes that are drawn.
        progress: Whether to show a progress bar (only on a terminal).
        arguments: For each model, per-point arguments of its likelihood for imagined observations,
            as numbers (``{"total_count": 10}``); for a `SequentialGP` whose likelihood needs them.
        options: All options of the optimiser: ``num_restarts``, ``raw_samples``,
            ``inequality_constraints``, ``fixed_features``, ``timeout_sec``, ... By default 10
            restarts from 512 samples. Points are proposed one at a time, so constraints are those
            of a point, not between points.

    Example:
        >>> import torch
        >>> from botorch.acquisition import UpperConfidenceBound
        >>> from gpytorch.likelihoods import PoissonLikelihood
        >>> from seqgp import SequentialGP
        >>> from seqgp.acquisition import fantasy_batch
        >>> X = torch.rand(20, 1, dtype=torch.double)
        >>> model = SequentialGP(X, torch.poisson(3 * X), likelihood=PoissonLikelihood())
        >>> batch = fantasy_batch(
        ...     lambda models, fantasies: UpperConfidenceBound(models[0], beta=4.0),
        ...     [model],
        ...     bounds=torch.tensor([[0.0], [1.0]], dtype=torch.double),
        ...     q=3,
        ...     num_restarts=2,
        ...     raw_samples=16,
        ... )
        >>> batch.X.shape
        torch.Size([3, 1])
    """
    if not models:
        raise ValueError("models: expected at least one.")
    ways = _one_each(fantasy, models)
    own = inspect.signature(fantasy_batch).parameters
    check_options(bounds, q, ways, X_pending, X_avoid, separation, optimizer, options, own)
    optimize = _with_defaults(_find_optimizer(optimizer, options), bounds, options)
    models = list(models)
    given = _arguments_of(models, arguments)
    X = bounds.new_empty(0, bounds.shape[-1]) if X_pending is None else X_pending.detach()
    fantasies = Fantasies(bounds.new_empty(0, bounds.shape[-1]), (None,) * len(models))
    if len(X):
        models, fantasies = _imagine(models, fantasies, X, ways, seed, given)
    if X_avoid is not None:
        X = torch.cat([X_avoid.detach().to(X), X])
    proposed, values = bounds.new_empty(0, bounds.shape[-1]), []
    for k in progress_bar(range(q), desc="batch", disable=None if progress else True):
        taken = torch.cat([X, proposed])
        function = acquisition(models, fantasies)
        candidates, found = optimize(function, taken)
        if separation and not isinstance(function, OneShotAcquisitionFunction):
            separated = _Separated(function, taken, bounds, separation)
            apart = ~separated.overlap(candidates).any(-1)
            if apart.any():
                candidates, found = candidates[apart], found[apart]
            else:
                with warnings.catch_warnings():
                    # It has a kink where points may begin, and that is where line searches end.
                    warnings.filterwarnings("ignore", "Optimization failed", RuntimeWarning)
                    candidates, penalised = optimize(separated, taken)
                candidates = candidates[penalised.argmax()].unsqueeze(0)
                with torch.no_grad():
                    found = function(candidates).reshape(1)
        best = found.argmax()
        candidate = candidates[best].unsqueeze(0)
        proposed = torch.cat([proposed, candidate])
        values.append(found[best])
        if k < q - 1:
            step = None if seed is None else seed + k + 1
            models, fantasies = _imagine(models, fantasies, candidate, ways, step, given)
    return FantasyBatch(proposed, torch.stack(values), fantasies)


@torch.no_grad()
def fantasy_outcome(
    model: Model,
    X: Tensor,
    fantasy: Fantasy = "mean",
    seed: int | None = None,
    **arguments: Tensor,
) -> Tensor | None:
    """What the outcome of points is imagined to be: always a possible observation.

    Args:
        model: A model.
        X: ``k x d`` inputs.
        fantasy: One of

            * ``"mean"``: the mean of the function, as in the paper. If observations are not
              real-valued, the median one there: of labels the more probable one, of counts an
              integer.
            * ``"sample"``: an observation, drawn from the posterior jointly at all points.
            * ``"believer"``: the Kriging believer of Ginsbourger et al. (2010): ``"mean"`` for
              Gaussian observations. It is not defined for others; those models are left alone.
            * ``"constant_min"``, ``"constant_mean"``, ``"constant_max"``: their constant liar. The
              smallest, mean or largest of the observations that a model was trained with, if they
              are Gaussian, and else as ``"mean"``.
            * ``None``: the model is left alone.
            * a function of model and inputs, which returns ``k x m`` outcomes or ``None``.
        seed: Of samples.
        arguments: Per-point arguments of the likelihood, ``k`` each, of a `SequentialGP`.

    Returns:
        ``k x m`` outcomes, or ``None`` if the model is not to be conditioned.

    Example:
        >>> import torch
        >>> from gpytorch.likelihoods import BernoulliLikelihood
        >>> from seqgp import SequentialGP
        >>> from seqgp.acquisition import fantasy_outcome
        >>> X = torch.linspace(0, 1, 20, dtype=torch.double).unsqueeze(-1)
        >>> model = SequentialGP(X, (X > 0.5).to(X), likelihood=BernoulliLikelihood())
        >>> fantasy_outcome(model, X[[0, -1]])
        tensor([[0.],
                [1.]], dtype=torch.float64)
    """
    if fantasy is None:
        return None
    if callable(fantasy):
        return fantasy(model, X)
    _check_fantasy(fantasy)
    if fantasy == "sample":
        posterior = _noisy(model, X, arguments)
        if seed is None:
            seed = int(torch.randint(2**31, (), device="cpu"))
        return IIDNormalSampler(torch.Size([1]), seed=seed)(posterior).squeeze(0)
    observations = _noisy(model, X, arguments)
    if isinstance(observations, ObservationPosterior):
        if fantasy == "believer":
            return None
        zeros = torch.zeros(observations.base_sample_shape, dtype=X.dtype, device=X.device)
        return observations.rsample_from_base_samples(torch.Size(), zeros)
    if fantasy.startswith("constant"):
        Y = _observed(model)
        constant = {"min": Y.amin(-2), "mean": Y.mean(-2), "max": Y.amax(-2)}[fantasy[9:]]
        return constant.expand(X.shape[-2], -1).to(X)
    latent: Any = model.posterior(X)
    return latent.mean


def valid_improvement(
    best_f: float | Tensor | None, maximize: bool = True, threshold: float = THRESHOLD
) -> Factory:
    """Expected improvement times validity, for `fantasy_batch`.

    The models are those of the objective, unless there is no valid observation yet, and of validity
    (see `LogValidExpectedImprovement`); without one of validity it is expected improvement. What is
    to be improved on is the best valid observation, or a better one that has been imagined at a
    point that was imagined to be valid.

    Args:
        best_f: The best valid observation; ``None`` if there is none, nor a model of the objective.
        maximize: Whether larger values of the objective are better.
        threshold: What validity models with a Gaussian posterior have to exceed, and the share of
            trials that those of counts have to.

    Example:
        >>> import torch
        >>> from botorch.models.transforms import Standardize
        >>> from gpytorch.likelihoods import BernoulliLikelihood
        >>> from seqgp import SequentialGP
        >>> from seqgp.acquisition import best_valid, fantasy_batch, valid_improvement
        >>> X = torch.linspace(0, 1, 10, dtype=torch.double).unsqueeze(-1)
        >>> Y, valid = torch.sin(5 * X), X < 0.8
        >>> scale = Standardize(1)
        >>> objective = SequentialGP(X[valid[:, 0]], Y[valid[:, 0]], outcome_transform=scale)
        >>> validity = SequentialGP(X, valid.to(X), likelihood=BernoulliLikelihood())
        >>> bounds = torch.tensor([[0.0], [1.0]], dtype=torch.double)
        >>> acquisition = valid_improvement(best_valid(Y, valid))
        >>> fantasy_batch(acquisition, [objective, validity], bounds, q=2, raw_samples=32).X.shape
        torch.Size([2, 1])
    """

    def acquisition(models: list[Model], fantasies: Fantasies) -> AcquisitionFunction:
        if best_f is None:
            return LogValidExpectedImprovement(None, models, None)
        best, imagined = best_f, fantasies.Y[0]
        if imagined is not None:
            counts = ~imagined.isnan().any(-1)
            for model, labels in zip(models[1:], fantasies.Y[1:], strict=True):
                if labels is not None:
                    valid = labels.isnan() | takes_for_valid(model, labels, threshold)
                    counts = counts & valid.all(-1)
            better = best_valid(imagined, counts, maximize)
            if better is not None:
                best = max(better, best_f) if maximize else min(better, best_f)
        if len(models) == 1:
            return LogExpectedImprovement(models[0], best, maximize=maximize)
        return LogValidExpectedImprovement(
            models[0], models[1:], best, maximize=maximize, threshold=threshold
        )

    return acquisition


class _Separated(AcquisitionFunction):
    """An acquisition function that keeps away from points that are taken.

    Within the distance, a penalty larger than any difference there is to be had grows smoothly from
    zero; the value is unchanged elsewhere.
    """

    def __init__(
        self, function: AcquisitionFunction, taken: Tensor, bounds: Tensor, distance: float
    ) -> None:
        model: Any = getattr(function, "model", None)
        super().__init__(model=model)
        self.function = function
        # The root mean square over inputs, as a Euclidean distance.
        self.radius = distance * taken.shape[-1] ** 0.5
        width = bounds[1] - bounds[0]
        self.scale = torch.where(width.isfinite() & (width > 0), width, 1.0)
        self.taken = taken / self.scale

    def set_X_pending(self, X_pending: Tensor | None = None) -> None:
        """Of the function inside.

        Args:
            X_pending: As in BoTorch.
        """
        self.function.set_X_pending(X_pending)

    def forward(self, X: Tensor) -> Tensor:
        """The value at ``b x q x d`` candidates, of shape ``b``."""
        value = self.function(X)
        penalty = self.overlap(X).square().sum((-2, -1))
        return value - 30 * (1 + value.detach().abs()) * penalty

    def overlap(self, X: Tensor) -> Tensor:
        """``... x k``: one at each of the points that are taken, falling to zero at the distance.

        Args:
            X: ``... x d`` inputs.
        """
        squared = (X.unsqueeze(-2) / self.scale - self.taken).square().sum(-1)
        # The square root has no gradient at zero, from where any direction is as good.
        distance = squared.clamp_min(torch.finfo(X.dtype).tiny).sqrt()
        return (1 - distance / self.radius).clamp_min(0)


def _noisy(model: Any, X: Tensor, arguments: dict[str, Tensor]) -> Any:
    """The posterior over observations."""
    return model.posterior(X, observation_noise=True, **arguments)


def _imagine(
    models: list[Model],
    fantasies: Fantasies,
    X: Tensor,
    ways: Sequence[Fantasy],
    seed: int | None,
    arguments: Sequence[dict[str, float]],
) -> tuple[list[Model], Fantasies]:
    """All models conditioned on fantasies at ``k x d`` further points."""
    conditioned, outcomes = [], []
    for k, (model, way, old) in enumerate(zip(models, ways, fantasies.Y, strict=True)):
        given = {name: X.new_full((len(X),), value) for name, value in arguments[k].items()}
        Y = fantasy_outcome(model, X, way, None if seed is None else seed + 7919 * k, **given)
        if Y is not None:
            model = _condition(model, X, Y, given)
        conditioned.append(model)
        outcomes.append(_append(old, Y, len(fantasies.X), len(X)))
    return conditioned, Fantasies(torch.cat([fantasies.X, X]), tuple(outcomes))


def _append(old: Tensor | None, new: Tensor | None, num_old: int, num_new: int) -> Tensor | None:
    """Outcomes ``k x m``, one after the other, NaN for those that are missing."""
    if old is None and new is None:
        return None
    like = new if old is None else old
    assert like is not None
    parts = zip((old, new), (num_old, num_new), strict=True)
    return torch.cat(
        [like.new_full((n, like.shape[-1]), torch.nan) if Y is None else Y for Y, n in parts]
    )


@torch.no_grad()
def _condition(model: Model, X: Tensor, Y: Tensor, arguments: dict[str, Tensor]) -> Model:
    if not isinstance(model, SequentialGP):
        model.posterior(X)  # fills the caches of BoTorch's exact models
    try:
        return model.condition_on_observations(X, Y, **arguments)
    except (AttributeError, NotImplementedError, UnsupportedError) as error:
        raise UnsupportedError(
            f"{type(model).__name__} cannot be conditioned on fantasies ({error}). Use a "
            "SequentialGP, or leave this model alone with None among the fantasies."
        ) from error


def _observed(model: Any) -> Tensor:
    """``n x m`` training observations of a model, as they were before outcome transforms."""
    if isinstance(model, ModelList):
        columns = [_observed(part) for part in model.models]
        if len({len(Y) for Y in columns}) > 1:
            raise UnsupportedError(
                "fantasy: models of a list that were trained on different data have no constant "
                "in common; pass them one by one."
            )
        return torch.cat(columns, -1)
    targets = model.train_targets
    Y = targets.unsqueeze(-1) if model.num_outputs == 1 else targets.mT
    transform = getattr(model, "outcome_transform", None)
    return Y if transform is None else transform.untransform(Y)[0]


def _one_each(fantasy: Fantasy | Sequence[Fantasy], models: Sequence[Model]) -> list[Fantasy]:
    if fantasy is None or isinstance(fantasy, str) or callable(fantasy):
        return [fantasy] * len(models)
    if len(fantasy) != len(models):
        raise ValueError(
            f"fantasy: expected one way, or one for each of {len(models)} models, got "
            f"{len(fantasy)}."
        )
    return list(fantasy)


def _find_optimizer(
    optimizer: Callable[..., Any] | None, options: dict[str, Any]
) -> Callable[..., Any]:
    if optimizer is not None:
        return optimizer
    found = {_OPTIMIZERS[name] for name in options if name in _OPTIMIZERS}
    if len(found) > 1:
        names = ", ".join(name for name in options if name in _OPTIMIZERS)
        raise ValueError(f"options: {names} belong to different optimisers of BoTorch.")
    return found.pop() if found else optimize_acqf


def _with_defaults(
    optimizer: Callable[..., Any], bounds: Tensor, options: dict[str, Any]
) -> Callable[[AcquisitionFunction, Tensor], tuple[Tensor, Tensor]]:
    """The optimiser as a function of the acquisition function and of what has been proposed.

    It returns ``r x d`` candidates and ``r`` values: of all restarts, if it can.
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
    """BoTorch's starting points, drawn less evenly: its own take longer than all the rest."""
    options = {"n_burnin": 1000, "n_thinning": 4} | (options or {})
    return gen_batch_initial_conditions(options=options, **arguments)


def _arguments_of(
    models: Sequence[Model], arguments: Sequence[dict[str, float] | None] | None
) -> list[dict[str, float]]:
    """Arguments of the likelihood of each model."""
    if arguments is None:
        return [{} for _ in models]
    if isinstance(arguments, dict) or len(arguments) != len(models):
        raise ValueError(
            f"arguments: expected a list with a dictionary, or None, for each of {len(models)} "
            "models."
        )
    given = [dict(each or {}) for each in arguments]
    for model, each in zip(models, given, strict=True):
        if each and not isinstance(model, SequentialGP):
            raise ValueError(
                f"arguments: those of a likelihood are for a SequentialGP, got {each} for a "
                f"{type(model).__name__}."
            )
        if "noise" in each:
            raise ValueError(
                "arguments: imagined Gaussian observations have the likelihood's own noise."
            )
    return given


def _check_fantasy(fantasy: Fantasy) -> None:
    if isinstance(fantasy, str) and fantasy not in FANTASIES:
        names = ", ".join(map(repr, FANTASIES))
        raise ValueError(f"fantasy: expected one of {names}, None or a function, got {fantasy!r}.")


def check_bounds(bounds: Tensor, strict: bool = False) -> None:
    """Raise unless bounds are ``2 x d``, lower ones first.

    Args:
        bounds: The bounds.
        strict: Whether lower and upper bounds have to differ.
    """
    check_tensor(bounds, "bounds")
    shape = tuple(bounds.shape)
    if bounds.dim() != 2 or bounds.shape[0] != 2:
        hint = "; d x 2 bounds become these by bounds.mT" if shape[1:] == (2,) else ""
        raise ValueError(f"bounds: expected shape 2 x d, lower bounds first, got {shape}{hint}.")
    wrong = bounds[0] >= bounds[1] if strict else bounds[0] > bounds[1]
    if wrong.any():
        k = int(wrong.nonzero()[0])
        lower, upper = bounds[:, k].tolist()
        hint = "; d x 2 bounds become these by bounds.mT" if shape == (2, 2) else ""
        if lower == upper:
            hint += f"; to fix an input, give it a range and pass fixed_features={{{k}: {lower:g}}}"
        raise ValueError(
            "bounds: expected shape 2 x d, lower bounds first, each below the upper one, got "
            f"{lower:g} and {upper:g} for input {k}{hint}."
        )


def _check_levels(levels: Any, bounds: Tensor, name: str) -> None:
    """Raise unless values that inputs may have are given by the indices of these inputs."""
    if not isinstance(levels, Mapping):
        raise TypeError(
            f"{name}: expected a dictionary from inputs to the values that they may have, as in "
            f"{{1: range(6)}}, got {levels!r:.50}."
        )
    d = bounds.shape[-1]
    for index, values in levels.items():
        if not isinstance(index, int) or not 0 <= index < d:
            raise ValueError(f"{name}: expected inputs from 0 to {d - 1}, got {index!r}.")
        if not isinstance(values, Sequence | Tensor) or not len(values):
            raise ValueError(f"{name}: expected a list of values for input {index}, got {values}.")
        low, high = bounds[:, index]
        given = torch.as_tensor(list(values)).to(bounds)  # rounded as the bounds are
        if not ((low <= given) & (given <= high)).all():
            raise ValueError(
                f"{name}: expected values of input {index} within its bounds, {low:g} and "
                f"{high:g}, got {values}."
            )


def _check_constraint(constraint: Any, bounds: Tensor, name: str) -> None:
    """Raise unless a linear constraint is one of BoTorch's, on one point."""
    given = isinstance(constraint, Sequence) and len(constraint) == 3
    if not given or not all(isinstance(part, Tensor) for part in constraint[:2]):
        raise TypeError(
            f"{name}: expected triples (indices, coefficients, total) of two tensors and a number, "
            f"got {constraint!r:.80}."
        )
    indices, coefficients, _ = constraint
    if indices.dim() > 1:
        raise UnsupportedError(f"{name}: points are proposed one at a time: none between them.")
    d = bounds.shape[-1]
    if indices.is_floating_point() or not ((indices >= 0) & (indices < d)).all():
        raise ValueError(f"{name}: expected indices from 0 to {d - 1}, got {indices.tolist()}.")
    if coefficients.shape != indices.shape or coefficients.dtype != bounds.dtype:
        raise ValueError(
            f"{name}: expected a coefficient of {bounds.dtype} for each of {len(indices)} indices, "
            f"got {coefficients.dtype} of shape {tuple(coefficients.shape)}."
        )


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
    """Raise for options of `fantasy_batch` that cannot be, before anything is computed.

    All but the last as there; ``own`` are names that could have been meant, besides BoTorch's.
    """
    for fantasy in fantasies:
        _check_fantasy(fantasy)
    known = inspect.signature(_find_optimizer(optimizer, options)).parameters
    takes_all = any(p.kind == p.VAR_KEYWORD for p in known.values())
    names = {*known, *(inspect.signature(gen_batch_initial_conditions).parameters)}
    for name in options:
        if name in names or (takes_all and optimizer is not None):
            continue
        near = difflib.get_close_matches(name, {*names, *own}, n=1)
        raise TypeError(
            f"{name}: neither an option here nor one of BoTorch's "
            f"{getattr(_find_optimizer(optimizer, options), '__name__', 'optimizer')}"
            f"{f'; did you mean {near[0]}?' if near else '.'}"
        )
    check_bounds(bounds)
    for name in ("discrete_dims", "cat_dims"):
        if options.get(name) is not None:
            _check_levels(options[name], bounds, name)
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
            raise ValueError(f"options: {name} is not for the user to choose here.")
    for name in ("inequality_constraints", "equality_constraints"):
        for constraint in options.get(name) or ():
            _check_constraint(constraint, bounds, name)
    for _, within in options.get("nonlinear_inequality_constraints") or ():
        if not within:
            raise UnsupportedError(
                "nonlinear_inequality_constraints: points are proposed one at a time: none "
                "between them."
            )

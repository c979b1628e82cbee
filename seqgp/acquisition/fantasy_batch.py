"""Batches from fantasies, for any acquisition function and any likelihood.

Propose a point, imagine its outcome, condition all models on it, propose the next point (Algorithm
2 of the paper). The acquisition function need not support batches, pending points or likelihoods
that are not Gaussian.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from botorch.acquisition import LogExpectedImprovement
from botorch.acquisition.acquisition import AcquisitionFunction, OneShotAcquisitionFunction
from botorch.models.model import Model
from torch import Tensor

from seqgp.acquisition.batch_options import check_options, find_optimizer, single_point_optimizer
from seqgp.acquisition.fantasies import (
    Fantasies,
    Fantasy,
    arguments_for_each,
    condition_on_fantasies,
    one_for_each,
)
from seqgp.acquisition.separation import SEPARATION, Separated
from seqgp.acquisition.valid_expected_improvement import LogValidExpectedImprovement
from seqgp.acquisition.validity import THRESHOLD, best_valid, takes_for_valid
from seqgp.progress import progress_bar


class FantasyBatch(NamedTuple):
    """A batch of candidates.

    Attributes:
        X: ``q x d`` inputs.
        values: ``q`` values of the acquisition function. Each is the value when that point was
            proposed, given the fantasies at that time.
        fantasies: All fantasies: at pending points, then at the points of the batch except for the
            last one.
    """

    X: Tensor
    values: Tensor
    fantasies: Fantasies


#: Makes an acquisition function from conditioned models and the fantasies so far.
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
    """Propose a batch point by point, each given fantasies at the previous ones.

    Args:
        acquisition: A function ``acquisition(models, fantasies)`` that makes the acquisition
            function. The models are conditioned on the fantasies, which are passed, too (to find
            the incumbent, for example).
        models: Models that can be conditioned on observations: a `SequentialGP` with any
            likelihood, or BoTorch's models with a Gaussian likelihood. They are not changed.
        bounds: ``2 x d`` bounds of the inputs.
        q: The number of points to propose.
        fantasy: How outcomes are imagined, see `fantasy_outcome`: one rule, or one for each model.
        X_pending: ``k x d`` points that are being evaluated. Their outcomes are imagined first.
        X_avoid: ``k x d`` points not to be proposed again, for example failed ones.
        separation: The minimum distance between points, and to pending points and points to avoid,
            as a root mean square over inputs, in units of the range of the bounds. Without it, a
            model that is certain of the best point, or whose observations are noisy, would propose
            the same point again. Instead the best of the other maxima is proposed.
        optimizer: Maximises the acquisition function. By default `optimize_acqf`, or the variant of
            it that an option belongs to (``fixed_features_list``, ``choices``, ``discrete_dims``,
            ...).
        seed: Seed of fantasies that are sampled.
        progress: Whether to show a progress bar (only on a terminal).
        arguments: For each model, arguments of its likelihood for fantasies, as numbers
            (``{"total_count": 10}``). For a `SequentialGP` whose likelihood needs them.
        options: Options of the optimiser: ``num_restarts``, ``raw_samples``,
            ``inequality_constraints``, ``fixed_features``, ``timeout_sec``, ... By default 10
            restarts from 512 samples. Points are proposed one at a time, so constraints apply to
            single points, not between points.

    Returns:
        The points, their acquisition values and the fantasies.

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
    rules = one_for_each(fantasy, models)
    own = inspect.signature(fantasy_batch).parameters
    check_options(bounds, q, rules, X_pending, X_avoid, separation, optimizer, options, own)
    optimize = single_point_optimizer(find_optimizer(optimizer, options), bounds, options)
    models = list(models)
    given = arguments_for_each(models, arguments)
    X = bounds.new_empty(0, bounds.shape[-1]) if X_pending is None else X_pending.detach()
    fantasies = Fantasies(bounds.new_empty(0, bounds.shape[-1]), (None,) * len(models))
    if len(X):
        models, fantasies = condition_on_fantasies(models, fantasies, X, rules, seed, given)
    if X_avoid is not None:
        X = torch.cat([X_avoid.detach().to(X), X])
    proposed, values = bounds.new_empty(0, bounds.shape[-1]), []
    for k in progress_bar(range(q), desc="batch", disable=None if progress else True):
        taken = torch.cat([X, proposed])
        function = acquisition(models, fantasies)
        candidates, found = optimize(function, taken)
        if separation and not isinstance(function, OneShotAcquisitionFunction):
            separated = Separated(function, taken, bounds, separation)
            apart = ~separated.overlap(candidates).any(-1)
            if apart.any():
                candidates, found = candidates[apart], found[apart]
            else:
                with warnings.catch_warnings():
                    # The penalty has a kink, which is where line searches end.
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
            models, fantasies = condition_on_fantasies(
                models, fantasies, candidate, rules, step, given
            )
    return FantasyBatch(proposed, torch.stack(values), fantasies)


def valid_improvement(
    best_f: float | Tensor | None, maximize: bool = True, threshold: float = THRESHOLD
) -> Factory:
    """Expected improvement times probability of validity, for `fantasy_batch`.

    The models to pass to `fantasy_batch` are that of the objective, then those of validity (see
    `LogValidExpectedImprovement`). Without a validity model, this is expected improvement. The
    incumbent is the best valid observation, or a better fantasy at a point whose validity fantasies
    are valid, too.

    Args:
        best_f: The best valid observation. If there is none, ``None``, and then there is no model
            of the objective among the models.
        maximize: Whether larger values of the objective are better.
        threshold: The value that a validity model with a Gaussian posterior must exceed, or the
            share of valid trials if it models counts.

    Example:
        >>> import torch
        >>> from gpytorch.likelihoods import BernoulliLikelihood
        >>> from seqgp import SequentialGP
        >>> from seqgp.acquisition import best_valid, fantasy_batch, valid_improvement
        >>> X = torch.linspace(0, 1, 10, dtype=torch.double).unsqueeze(-1)
        >>> Y, valid = torch.sin(5 * X), X < 0.8
        >>> objective = SequentialGP(X[valid[:, 0]], Y[valid[:, 0]])
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


def by_task(acquisition: Factory) -> Factory:
    """An acquisition function of several models, for one `SequentialMultiTaskGP` in their place.

    Fantasies of all tasks are told to the one model, so that each of them informs all tasks. It is
    then passed on as a model of each output task, together with the fantasies of that task.

    Args:
        acquisition: Makes an acquisition function from a model for each task.

    Example:
        >>> import torch
        >>> from gpytorch.likelihoods import BernoulliLikelihood, GaussianLikelihood
        >>> from seqgp import SequentialMultiTaskGP
        >>> from seqgp.acquisition import best_valid, by_task, fantasy_batch, valid_improvement
        >>> X = torch.linspace(0, 1, 10, dtype=torch.double).unsqueeze(-1)
        >>> valid = X < 0.8
        >>> Y = torch.where(valid, torch.sin(5 * X), torch.nan)
        >>> each = [GaussianLikelihood(), BernoulliLikelihood()]
        >>> both = SequentialMultiTaskGP(X, torch.cat([Y, valid], -1), None, likelihood=each)
        >>> bounds = torch.tensor([[0.0], [1.0]], dtype=torch.double)
        >>> acquisition = by_task(valid_improvement(best_valid(Y, valid)))
        >>> fantasy_batch(acquisition, [both], bounds, q=2, raw_samples=32).X.shape
        torch.Size([2, 1])
    """

    def of_each(models: list[Model], fantasies: Fantasies) -> AcquisitionFunction:
        (model,), (Y,) = models, fantasies.Y
        m = model.num_outputs
        columns = (None,) * m if Y is None else Y.split(1, -1)
        return acquisition(
            [model.subset_output([i]) for i in range(m)], Fantasies(fantasies.X, tuple(columns))
        )

    return of_each

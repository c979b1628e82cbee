"""Fantasies: imagined outcomes at points that have not been observed.

Conditioning a model on fantasies makes it propose other points next.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from botorch.exceptions.errors import UnsupportedError
from botorch.models.model import Model, ModelList
from botorch.sampling.normal import IIDNormalSampler
from torch import Tensor

from seqgp.models.multi_task_gp import SequentialMultiTaskGP
from seqgp.models.posteriors import ObservationPosterior
from seqgp.models.sequential_gp import SequentialGP

#: Names of the rules that `fantasy_outcome` knows.
FANTASIES = ("mean", "sample", "believer", "constant_min", "constant_mean", "constant_max")

#: A rule for fantasies: a name, ``None``, or a function of model and inputs.
Fantasy = str | None | Callable[[Model, Tensor], Tensor | None]


class Fantasies(NamedTuple):
    """Fantasies at ``k`` points.

    Attributes:
        X: ``k x d`` inputs, pending points first.
        Y: One entry per model: ``k x m`` outcomes, with NaN at points that the model was not
            conditioned on, or ``None`` if it was not conditioned on any.
    """

    X: Tensor
    Y: tuple[Tensor | None, ...]


@torch.no_grad()
def fantasy_outcome(
    model: Model,
    X: Tensor,
    fantasy: Fantasy = "mean",
    seed: int | None = None,
    **arguments: Tensor,
) -> Tensor | None:
    """Imagine outcomes at ``k`` points. They are always possible observations.

    Args:
        model: A model.
        X: ``k x d`` inputs.
        fantasy: One of

            * ``"mean"``: The posterior mean of the function, as in the paper. If observations are
              not real-valued, their median: the more probable label, a whole count.
            * ``"sample"``: A joint sample of observations from the posterior.
            * ``"believer"``: The Kriging believer of Ginsbourger et al. (2010), which is ``"mean"``
              for Gaussian observations. It is not defined for others: those models are not
              conditioned.
            * ``"constant_min"``, ``"constant_mean"``, ``"constant_max"``: The constant liar of the
              same authors: the smallest, mean or largest training observation if observations are
              Gaussian, otherwise the same as ``"mean"``.
            * ``None``: The model is not conditioned.
            * A function of model and inputs that returns ``k x m`` outcomes or ``None``.
        seed: Seed of samples.
        arguments: Per-point arguments of the likelihood, each of shape ``k``. Only for a
            `SequentialGP`.

    Returns:
        ``k x m`` outcomes, or ``None`` if the model is not to be conditioned on the points. Those
        of a `SequentialMultiTaskGP` are NaN where it is not to be conditioned on some tasks.

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
    check_fantasy(fantasy)
    if fantasy == "sample":
        posterior = _noisy(model, X, arguments)
        if seed is None:
            seed = int(torch.randint(2**31, (), device="cpu"))
        return IIDNormalSampler(torch.Size([1]), seed=seed)(posterior).squeeze(0)
    if isinstance(model, SequentialMultiTaskGP) and model.num_outputs > 1:
        tasks = [model.subset_output([i]) for i in range(model.num_outputs)]
        columns = [fantasy_outcome(task, X, fantasy) for task in tasks]
        nan = X.new_full((len(X), 1), torch.nan)
        known = any(column is not None for column in columns)
        return torch.cat([nan if Y is None else Y for Y in columns], -1) if known else None
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


def _noisy(model: Any, X: Tensor, arguments: dict[str, Tensor]) -> Any:
    """The posterior over observations."""
    return model.posterior(X, observation_noise=True, **arguments)


def condition_on_fantasies(
    models: list[Model],
    fantasies: Fantasies,
    X: Tensor,
    rules: Sequence[Fantasy],
    seed: int | None,
    arguments: Sequence[dict[str, float]],
) -> tuple[list[Model], Fantasies]:
    """Condition all models on fantasies at more points.

    Args:
        models: The models, conditioned on all fantasies so far.
        fantasies: The fantasies so far.
        X: ``k x d`` further points.
        rules: A rule for fantasies for each model.
        seed: Seed of samples.
        arguments: Arguments of the likelihood for each model.

    Returns:
        The conditioned models, and all fantasies.
    """
    conditioned, outcomes = [], []
    for k, (model, rule, old) in enumerate(zip(models, rules, fantasies.Y, strict=True)):
        given = {name: X.new_full((len(X),), value) for name, value in arguments[k].items()}
        Y = fantasy_outcome(model, X, rule, None if seed is None else seed + 7919 * k, **given)
        if Y is not None:
            model = _condition(model, X, Y, given)
        conditioned.append(model)
        outcomes.append(_append(old, Y, len(fantasies.X), len(X)))
    return conditioned, Fantasies(torch.cat([fantasies.X, X]), tuple(outcomes))


def _append(old: Tensor | None, new: Tensor | None, num_old: int, num_new: int) -> Tensor | None:
    """Concatenate outcomes ``k x m``, with NaN for those that are missing."""
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
            "SequentialGP, or pass None as the fantasy of this model."
        ) from error


def _observed(model: Any) -> Tensor:
    """Training observations ``n x m`` of a model, before outcome transforms."""
    if isinstance(model, ModelList):
        columns = [_observed(part) for part in model.models]
        if len({len(Y) for Y in columns}) > 1:
            raise UnsupportedError(
                "fantasy: the models of a list were trained on different data, so there is no "
                "constant for all of them; pass them one by one."
            )
        return torch.cat(columns, -1)
    if isinstance(model, SequentialMultiTaskGP):
        return model.observed_of(model.output_tasks[0])
    targets = model.train_targets
    Y = targets.unsqueeze(-1) if model.num_outputs == 1 else targets.mT
    transform = getattr(model, "outcome_transform", None)
    return Y if transform is None else transform.untransform(Y)[0]


def one_for_each(fantasy: Fantasy | Sequence[Fantasy], models: Sequence[Model]) -> list[Fantasy]:
    """Return a rule for fantasies for each model, given one for all or one for each."""
    if fantasy is None or isinstance(fantasy, str) or callable(fantasy):
        return [fantasy] * len(models)
    if len(fantasy) != len(models):
        raise ValueError(
            f"fantasy: expected one rule, or one for each of {len(models)} models, got "
            f"{len(fantasy)}."
        )
    return list(fantasy)


def arguments_for_each(
    models: Sequence[Model], arguments: Sequence[dict[str, float] | None] | None
) -> list[dict[str, float]]:
    """Return checked arguments of the likelihood for each model."""
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
                f"arguments: only a SequentialGP takes arguments of its likelihood, got {each} for "
                f"a {type(model).__name__}."
            )
        if "noise" in each:
            raise ValueError(
                "arguments: fantasies of Gaussian observations have the noise of the likelihood."
            )
    return given


def check_fantasy(fantasy: Fantasy) -> None:
    """Raise a `ValueError` for an unknown rule."""
    if isinstance(fantasy, str) and fantasy not in FANTASIES:
        names = ", ".join(map(repr, FANTASIES))
        raise ValueError(f"fantasy: expected one of {names}, None or a function, got {fantasy!r}.")

"""Selection of the points of a pool to observe next."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from botorch.sampling.normal import SobolQMCNormalSampler
from torch import Tensor

from seqgp.acquisition.tasks import of_output, with_task
from seqgp.acquisition.uncertainty_reduction import (
    check_likelihood_arguments,
    checked_criteria,
    checked_weights,
    expected_reduction,
)
from seqgp.models.sequential_gp import SequentialGP
from seqgp.validation import is_whole


class Selection(NamedTuple):
    """The result of `select_from_pool`.

    Attributes:
        chosen: ``q`` indices into the pool, in the order in which they were chosen.
        scores: ``q x n`` expected reductions (per cost) of all points of the pool, one row for each
            choice; ``-inf`` at points that could not be chosen.
    """

    chosen: Tensor
    scores: Tensor


def select_from_pool(
    model: SequentialGP,
    pool: Tensor,
    q: int = 1,
    criterion: str | Sequence[str] = "threshold-entropy",
    threshold: float | None = None,
    surveyed: Tensor | None = None,
    available: Tensor | None = None,
    costs: Tensor | None = None,
    weights: Tensor | None = None,
    num_fantasies: int = 16,
    num_batch_fantasies: int = 8,
    seed: int = 0,
    progress: bool = False,
    local: bool = False,
    pending: Tensor | None = None,
    **arguments: Any,
) -> Selection:
    """Choose the points of a pool whose outcomes are expected to reduce uncertainty the most.

    Points are chosen one after the other, each given fantasies at the previous ones, so that the
    points of a batch do not provide the same information twice.

    Args:
        model: A model of one output.
        pool: ``n x d`` points: candidates, and the locations whose uncertainty is to be reduced.
            With a `SequentialMultiTaskGP`, they may have a task column. Those of other tasks than
            the output are candidates, but no locations.
        q: The number of points to choose.
        criterion: One of `seqgp.acquisition.uncertainty.CRITERIA`, or several of them. The score of
            several is the sum of relative reductions, each divided by the present uncertainty.
            The score of ``"volume"`` is the expected absolute change of the volume.
        threshold: The threshold of the prevalence (rate, level), for criteria that have one.
        surveyed: ``n`` booleans, or indices, of points that have been observed. They are not
            chosen, and their uncertainty is ignored.
        available: ``n`` booleans, or indices, of points that may be chosen. The uncertainty of the
            other points is to be reduced, too.
        costs: ``n`` positive costs. The reduction per cost is maximised.
        weights: ``n`` weights of the points as locations. By default all are the same.
        num_fantasies: The number of outcomes sampled for each candidate. If no more outcomes are
            possible, all of them are used, weighted by their probabilities.
        num_batch_fantasies: The number of joint outcomes sampled at points already chosen.
        seed: Seed of the samples.
        progress: Whether to show a progress bar (only on a terminal).
        local: Whether only the uncertainty at the point itself counts.
        pending: ``n`` booleans, or indices, of points that are being observed. Outcomes are
            sampled there first. As if they had been chosen, their uncertainty is ignored.
        arguments: Arguments of the likelihood (``total_count=``), each a number or of shape ``n``.

    Returns:
        The chosen points, and the scores of all points.

    Example:
        >>> import torch
        >>> from seqgp import BinomialLikelihood, SequentialGP
        >>> pool = torch.rand(60, 2, dtype=torch.double)
        >>> Y = torch.full((10, 1), 3.0, dtype=torch.double)
        >>> model = SequentialGP(pool[:10], Y, likelihood=BinomialLikelihood(20))
        >>> seen = torch.arange(10)
        >>> chosen = select_from_pool(model, pool, q=2, threshold=0.2, surveyed=seen).chosen
        >>> bool((chosen >= 10).all()), len(chosen)
        (True, 2)
    """
    check_likelihood_arguments(model, arguments, select_from_pool)
    # Points of tasks other than the output are candidates, but not locations.
    pool, mine = with_task(model, pool, "pool"), of_output(model, pool)
    checked_criteria(model, pool if mine is None else pool[mine], criterion, threshold, "pool")
    n = len(pool)
    for name, value in arguments.items():
        if isinstance(value, Tensor) and value.dim() and value.shape != (n,):
            raise ValueError(
                f"{name}: expected a number, or {n} of them, one for each point of the pool; got "
                f"shape {tuple(value.shape)}."
            )
    counts = ~_mask(surveyed, n, pool.device, "surveyed", False)
    awaited = _mask(pending, n, pool.device, "pending", False)
    counts &= ~awaited
    open_ = counts & _mask(available, n, pool.device, "available", True)
    if mine is not None:
        counts &= mine
    if not open_.any():
        raise ValueError("surveyed, available: there is no point left to choose.")
    if not is_whole(q) or q < 1 or int(open_.sum()) < q:
        raise ValueError(
            f"q: expected 1 to {int(open_.sum())}, the number of points left, got {q}."
        )
    if costs is not None:
        costs = torch.as_tensor(costs, device=pool.device)
        if costs.shape != (n,) or not bool((costs > 0).all()):
            got = f"shape {tuple(costs.shape)}" if costs.shape != (n,) else f"{costs.min():g}"
            raise ValueError(f"costs: expected {n} positive numbers, got {got}.")
    if mine is not None and weights is None and not local:
        weights = mine / mine.sum()
    weights = checked_weights(weights, None if local else pool)
    imagined: list[int] = awaited.nonzero().squeeze(-1).tolist()
    start, rows = len(imagined), []
    while True:
        conditioned = model
        if imagined:
            index = torch.tensor(imagined, device=pool.device)
            given = _at(arguments, index, n)
            conditioned = imagine(model, pool[index], num_batch_fantasies, seed, given)
        candidates, kept = open_.nonzero().squeeze(-1), counts.nonzero().squeeze(-1)
        if not len(kept):
            raise ValueError(
                "pool: no point of the output task is left whose uncertainty could be reduced."
            )
        scores = torch.full((n,), -torch.inf, dtype=pool.dtype, device=pool.device)
        scores[candidates] = expected_reduction(
            conditioned,
            pool[candidates],
            None if local else pool[kept],
            criterion,
            threshold,
            None if weights is None else weights[kept],
            num_fantasies,
            seed,
            progress,
            **_at(arguments, candidates, n),
        )
        if costs is not None:
            scores[candidates] /= costs.to(scores)[candidates]
        rows.append(scores)
        imagined.append(int(scores.argmax()))
        if len(rows) == q:
            chosen = torch.tensor(imagined[start:], device=pool.device)
            return Selection(chosen, torch.stack(rows))
        open_[imagined[-1]] = counts[imagined[-1]] = False


@torch.no_grad()
def imagine(
    model: SequentialGP, X: Tensor, number: int, seed: int, arguments: dict[str, Any]
) -> SequentialGP:
    """A batch of models, each conditioned on sampled outcomes at pending or chosen points.

    Args:
        model: The model. It is not changed.
        X: ``k x d`` points.
        number: The number of samples, the batch shape of the result.
        seed: Seed of the samples.
        arguments: Arguments of the likelihood at these points.
    """
    sampler = SobolQMCNormalSampler(torch.Size([number]), seed=seed + 1)
    return model.fantasize(X, sampler, **arguments)


def _mask(given: Tensor | None, n: int, device: torch.device, name: str, default: bool) -> Tensor:
    """A mask of ``n`` booleans, from a mask or from indices."""
    if given is None:
        return torch.full((n,), default, device=device)
    if not isinstance(given, Tensor):  # a list, an array
        try:
            given = torch.as_tensor(given)
        except (TypeError, ValueError) as error:
            raise TypeError(
                f"{name}: expected {n} booleans or a list of indices, got {given!r:.50}."
            ) from error
        given = given.long() if given.numel() == 0 else given
    if given.dtype == torch.bool and given.shape == (n,):
        return given.to(device).clone()
    if given.dtype in (torch.int64, torch.int32) and given.dim() == 1:
        if n > 2 and given.shape == (n,) and bool(((given == 0) | (given == 1)).all()):
            raise ValueError(
                f"{name}: expected booleans or indices, got {n} zeros and ones; for a mask, "
                "convert them to booleans."
            )
        if given.numel() and not (int(given.min()) >= 0 and int(given.max()) < n):
            raise ValueError(f"{name}: expected indices from 0 to {n - 1}.")
        mask = torch.zeros(n, dtype=torch.bool, device=device)
        mask[given.to(device).long()] = True
        return mask
    raise ValueError(
        f"{name}: expected {n} booleans or a list of indices, got {given.dtype} of shape "
        f"{tuple(given.shape)}."
    )


def _at(arguments: dict[str, Any], index: Tensor, n: int) -> dict[str, Any]:
    """Per-point arguments of some of ``n`` points."""
    return {
        key: value[index] if isinstance(value, Tensor) and value.shape == (n,) else value
        for key, value in arguments.items()
    }

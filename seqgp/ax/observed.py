"""The observations of a metric, and which of them are new."""

from __future__ import annotations

from collections import defaultdict
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Observed(NamedTuple):
    """All observations of a model, in the order in which it learnt them.

    Attributes:
        X: ``n x d`` inputs.
        Y: ``n x 1`` observations; counts if the metric is binomial.
        Yvar: ``n x 1`` noise variances, if known.
        totals: ``n`` totals of a binomial metric.
    """

    X: Tensor
    Y: Tensor
    Yvar: Tensor | None = None
    totals: Tensor | None = None

    def rows(self) -> Tensor:
        """One row per observation, ``n x k``, with everything that identifies it."""
        totals = None if self.totals is None else self.totals.unsqueeze(-1)
        parts = [self.X, self.Y, self.Yvar, totals]
        return torch.cat([part for part in parts if part is not None], -1)

    def select(self, index: Tensor) -> Observed:
        """Select observations.

        Args:
            index: Indices of the observations.
        """
        return Observed(*(None if part is None else part[index] for part in self))  # type: ignore[arg-type]


def what_is_new(known: Observed, given: Observed) -> Tensor | None:
    """Indices of the given observations that are not known, ``None`` if a known one is missing.

    Observations may be in any order. Repeated observations count as often as they occur.

    Args:
        known: The observations learnt so far.
        given: All observations.

    Example:
        >>> X = torch.arange(4.0).unsqueeze(-1)
        >>> what_is_new(Observed(X[:2], X[:2]), Observed(X.flip(0), X.flip(0)))
        tensor([0, 1])
        >>> what_is_new(Observed(X[:2], X[:2]), Observed(X, X + 1)) is None
        True
    """
    old, new = known.rows(), given.rows()
    if old.shape[-1] != new.shape[-1]:
        return None
    places: defaultdict[tuple[float, ...], list[int]] = defaultdict(list)
    for i, row in enumerate(new.tolist()):
        places[tuple(row)].append(i)
    for row in old.tolist():
        if not places[tuple(row)]:
            return None
        places[tuple(row)].pop(0)
    left = sorted(i for indices in places.values() for i in indices)
    return torch.tensor(left, dtype=torch.long, device=new.device)


def observed_as(
    X: Tensor, Y: Tensor, Yvar: Tensor | None, likelihood_name: str, total_count: Any, name: str
) -> Observed:
    """Convert values of a metric to observations of its likelihood.

    Args:
        X: ``n x d`` inputs.
        Y: ``n x 1`` values; rates of success if the metric is binomial.
        Yvar: ``n x 1`` noise variances.
        likelihood_name: The name of the likelihood.
        total_count: Totals of a binomial metric.
        name: The name of ``Y``, for errors.
    """
    if likelihood_name == "gaussian":
        return Observed(X, Y, Yvar)
    if likelihood_name != "binomial":
        return Observed(X, Y)
    totals = torch.as_tensor(total_count, dtype=X.dtype, device=X.device).expand(len(X))
    counts = Y * totals.unsqueeze(-1)
    wrong = ((counts - counts.round()).abs() > 1e-3) | ((Y - 0.5).abs() > 0.5 + 1e-6)
    if bool(wrong.any()):
        row = int(wrong.squeeze(-1).nonzero()[0])
        raise ValueError(
            f"{name}: expected a rate of success, k/n with n = {totals[row].item():g}, got "
            f"{Y[row].item():g}; report the rate k/n, not the count k."
        )
    return Observed(X, counts.round(), totals=totals)

r"""Comparisons of items, as observations of differences.

"Item ``a`` is preferred to item ``b``" is an observation of the functional

.. math:: h = s \, (f(a) - f(b)),

that it is positive, in noise. With the logit link :math:`s = 1` and :math:`p(a \succ b) =
\sigma(h)`. With the probit link, utilities are seen with independent noise of variance one each, so
that :math:`s = 1 / \sqrt 2` and :math:`p(a \succ b) = \Phi(h)`. Both are BoTorch's conventions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from botorch.models.likelihoods.pairwise import PairwiseLogitLikelihood, PairwiseProbitLikelihood
from gpytorch.constraints import GreaterThan, Interval
from gpytorch.kernels import Kernel, RBFKernel, ScaleKernel
from gpytorch.likelihoods import BernoulliLikelihood, Likelihood
from gpytorch.priors import GammaPrior
from gpytorch.priors.smoothed_box_prior import SmoothedBoxPrior
from torch import Tensor

from seqgp.dual.linalg import broadcast_shapes
from seqgp.likelihoods.by_task import TaskLikelihood
from seqgp.likelihoods.choices import ChoiceLikelihood, pairs_of
from seqgp.likelihoods.discrete import BinomialLikelihood
from seqgp.likelihoods.ratings import RatingLikelihood
from seqgp.likelihoods.ties import TieLikelihood
from seqgp.validation import check_finite, check_tensor


def check_comparisons(comparisons: Any, num_items: int, name: str = "comparisons") -> Tensor:
    """Comparisons as whole numbers; raises unless they are ``... x k x 2`` indices of items.

    Args:
        comparisons: Pairs of indices, the preferred item first.
        num_items: The number of items.
        name: What to call the comparisons in errors.
    """
    check_tensor(comparisons, name)
    if comparisons.dim() < 2 or comparisons.shape[-1] != 2:
        raise ValueError(
            f"{name}: expected shape ... x k x 2, the indices of two items in each row, the "
            f"preferred one first, got {tuple(comparisons.shape)}."
        )
    check_finite(comparisons, name)
    indices = comparisons.long()
    if comparisons.dtype == torch.bool or not torch.equal(indices.to(comparisons), comparisons):
        raise ValueError(f"{name}: expected indices of items, which are whole numbers.")
    outside = (indices < 0) | (indices >= num_items)
    if bool(outside.any()):
        raise ValueError(
            f"{name}: expected indices of {num_items} items, from 0 to {num_items - 1}, got "
            f"{int(indices[outside][0])}."
        )
    same = indices[..., 0] == indices[..., 1]
    if bool(same.any()):
        raise ValueError(
            f"{name}: an item cannot be compared with itself, got item "
            f"{int(indices[..., 0][same][0])} twice in a row."
        )
    return indices


def check_choices(choices: Any, items: Tensor) -> Tensor:
    """Choices as whole numbers; raises unless they are ``n x k`` indices of items, each once.

    Args:
        choices: The indices, that of the chosen item first in each row; -1 at the end of rows with
            fewer items.
        items: ``n x d`` items.
    """
    check_tensor(choices, "choices")
    if items.dim() > 2:
        raise ValueError("choices: not supported for a batch of models.")
    if choices.dim() != 2 or choices.shape[-1] < 2:
        raise ValueError(
            "choices: expected shape n x k, the indices of at least two items in each row, the "
            f"chosen one first, got {tuple(choices.shape)}."
        )
    check_finite(choices, "choices")
    indices = choices.long()
    if choices.dtype == torch.bool or not torch.equal(indices.to(choices), choices):
        raise ValueError("choices: expected indices of items, which are whole numbers.")
    outside = (indices < -1) | (indices >= len(items))
    if bool(outside.any()):
        raise ValueError(
            f"choices: expected indices of {len(items)} items, from 0 to {len(items) - 1}, or -1 "
            f"for none, got {int(indices[outside][0])}."
        )
    none = indices < 0
    if bool(none[:, :2].any() | (none[:, :-1] & ~none[:, 1:]).any()):
        raise ValueError(
            "choices: expected at least two items in each row, and -1 only at the end of a row."
        )
    return indices.to(items.device)


def pairs_of_choices(items: Tensor, choices: Tensor) -> tuple[Tensor, Tensor]:
    """All pairs of the items of each choice, as a `ChoiceLikelihood` has them.

    Losers are in the order of their coordinates, so that equal choices have equal pairs.

    Args:
        items: ``n x d`` items.
        choices: ``c x k`` indices of them, checked.

    Returns:
        ``p x 2`` pairs, those of a choice next to each other, and ``p`` sizes of choices.
    """
    if not choices.numel():
        return choices.new_empty(0, 2), items.new_empty(0)
    place = items.unique(dim=0, return_inverse=True)[1]
    size, parts = (choices >= 0).sum(-1), []
    for k in size.unique().tolist():
        row = (size == k).nonzero().squeeze(-1)
        chosen, losers = choices[row, :1], choices[row, 1:k]
        losers = losers.gather(-1, place[losers].argsort(-1))
        among = torch.cat([chosen, losers], -1)
        at = place[among].sort(-1).values
        same = (at[:, 1:] == at[:, :-1]).any(-1)
        if bool(same.any()):
            raise ValueError(
                "choices: expected each item once in a choice, got one of them twice in row "
                f"{int(row[same][0])}."
            )
        first, second = pairs_of(k)
        pairs = torch.stack([among[:, first], among[:, second]], -1)
        parts.append((row.repeat_interleave(len(first)), pairs.flatten(0, 1)))
    row, pairs = (torch.cat([part[i] for part in parts]) for i in (0, 1))
    order = row.argsort(stable=True)
    return pairs[order], size[row[order]].to(items)


@dataclass(frozen=True)
class Answers:
    """What people said, as observations of functionals of two points: first of the differences.

    A rating is an observation of the utility of an item itself. The second of its points is the
    item once more, with a coefficient of zero. A choice is one of the differences of all pairs of
    its items.

    Attributes:
        inputs: ``... x k x 2 x d`` items.
        targets: ``... x k`` outcomes, see `outcomes`, or ratings.
        coefficients: ``... x k x 2``.
        arguments: Which likelihood each is of, if there is one of ratings; of how many items each
            choice is, if the likelihood is one of choices.
    """

    inputs: Tensor
    targets: Tensor
    coefficients: Tensor
    arguments: dict[str, Tensor]

    @classmethod
    def of(
        cls,
        likelihood: Likelihood,
        items: Tensor,
        comparisons: Tensor,
        ties: Tensor | None = None,
        ratings: Tensor | None = None,
        choices: Tensor | None = None,
    ) -> Answers:
        """Comparisons, choices and ratings of items, checked.

        Args:
            likelihood: The likelihood of the model.
            items: ``... x n x d``.
            comparisons: ``... x k x 2`` indices of them, checked.
            ties: ``... x k``, which of the comparisons were ties.
            ratings: ``n`` ratings, NaN for items that were not rated.
            choices: ``c x k`` indices of items, as for `check_choices`.
        """
        compared, arguments = likelihood_of_comparisons(likelihood), {}
        if isinstance(compared, ChoiceLikelihood):
            sizes = items.new_full((comparisons.shape[-2],), 2.0)
            if choices is not None:
                pairs, more = pairs_of_choices(items, check_choices(choices, items))
                comparisons = torch.cat([comparisons.to(items.device), pairs])
                sizes = torch.cat([sizes, more])
            arguments["choice_size"] = sizes
        elif choices is not None:
            raise ValueError(
                f"choices: not supported by a {type(compared).__name__}; build the model with "
                "likelihood=seqgp.ChoiceLikelihood()."
            )
        inputs = compared_items(items, comparisons.to(items.device))
        targets = outcomes(compared, inputs, ties)
        coefficients = difference_coefficients(compared, inputs)
        if likelihood_of_ratings(likelihood) is None:
            if ratings is not None:
                raise ValueError(
                    "ratings: this model has no likelihood of ratings; build it with "
                    "rating_likelihood=seqgp.RatingLikelihood()."
                )
            return cls(inputs, targets, coefficients, arguments)
        if ratings is None:
            arguments["task"] = torch.zeros_like(targets)
            return cls(inputs, targets, coefficients, arguments)
        is_rated = ~check_ratings(ratings, items).isnan()
        rated, values = items[is_rated], ratings[is_rated].to(items)
        task = torch.cat([torch.zeros_like(targets), torch.ones_like(values)], -1)
        if "choice_size" in arguments:  # each is an answer by itself, like a comparison
            sizes = arguments["choice_size"]
            arguments["choice_size"] = torch.cat([sizes, torch.full_like(values, 2.0)])
        one = torch.tensor([1.0, 0.0], dtype=items.dtype, device=items.device)
        return cls(
            torch.cat([inputs, rated.unsqueeze(-2).expand(*rated.shape[:-1], 2, -1)], -3),
            torch.cat([targets, values], -1),
            torch.cat([coefficients, one.expand(len(values), 2)], -2),
            {**arguments, "task": task},
        )


def check_ratings(ratings: Any, items: Tensor) -> Tensor:
    """Ratings; raises unless they are numbers or NaN, one for each of ``n x d`` items.

    Args:
        ratings: The ratings.
        items: The items.
    """
    check_tensor(ratings, "ratings")
    if items.dim() > 2:
        raise ValueError("ratings: not supported for a batch of models.")
    if ratings.shape != items.shape[:1]:
        raise ValueError(
            f"ratings: expected {len(items)} numbers, one for each item and NaN for those that "
            f"were not rated, got shape {tuple(ratings.shape)}."
        )
    if bool(ratings.isinf().any()):
        raise ValueError("ratings: expected finite numbers, or NaN for items not rated.")
    return ratings


def with_ratings(likelihood: Likelihood, ratings: Likelihood | Tensor | None) -> Likelihood:
    """The likelihood of comparisons and ratings together.

    Args:
        likelihood: The likelihood of comparisons.
        ratings: The likelihood of ratings, or the ratings themselves. These get a
            `RatingLikelihood` that is initialised with their mean and standard deviation. ``None``
            if there are no ratings.
    """
    if ratings is None:
        return likelihood
    if isinstance(ratings, Tensor):
        values = ratings[~ratings.isnan()].double()
        scale = float(values.std()) if len(values) > 1 else 0.0
        scale = scale if scale > 0 else 1.0
        ratings = RatingLikelihood(scale, float(values.mean()) / scale if len(values) else 0.0)
    return TaskLikelihood([likelihood, ratings])


def likelihood_of_comparisons(likelihood: Likelihood) -> Likelihood:
    """The part of a model's likelihood that is for comparisons.

    Args:
        likelihood: The likelihood of the model.
    """
    if not isinstance(likelihood, TaskLikelihood):
        return likelihood
    part: Any = likelihood.likelihoods[0]
    return part


def likelihood_of_ratings(likelihood: Likelihood) -> Likelihood | None:
    """The part of a model's likelihood that is for ratings, ``None`` if it has none.

    Args:
        likelihood: The likelihood of the model.
    """
    if not isinstance(likelihood, TaskLikelihood):
        return None
    part: Any = likelihood.likelihoods[1]
    return part


def outcomes(likelihood: Likelihood, pairs: Tensor, ties: Tensor | None) -> Tensor:
    """``... x k``, what was observed of comparisons: that they were won, or tied.

    Args:
        likelihood: The likelihood of the differences.
        pairs: ``... x k x 2 x d``, the items of each comparison, the preferred one first.
        ties: ``... x k``, which of the comparisons were ties instead; ``None`` for none of them.
    """
    shape = pairs.shape[:-2]
    allowed = isinstance(likelihood, TieLikelihood)
    won = pairs.new_full(shape, 2.0 if allowed else 1.0)
    if ties is None:
        return won
    check_tensor(ties, "ties")
    if ties.dtype != torch.bool or ties.shape[-1:] != shape[-1:]:
        raise ValueError(
            f"ties: expected {shape[-1]} booleans, one for each comparison, got shape "
            f"{tuple(ties.shape)} of {ties.dtype}."
        )
    if not allowed:
        raise ValueError(
            f"ties: not supported by a {type(likelihood).__name__}; build the model with "
            "likelihood=seqgp.TieLikelihood()."
        )
    return won - ties.to(won)


def compared_items(items: Tensor, comparisons: Tensor) -> Tensor:
    """``... x k x 2 x d``, the items of each comparison.

    Args:
        items: ``... x n x d`` items.
        comparisons: ``... x k x 2`` indices; batch shapes broadcast.
    """
    n, d = items.shape[-2:]
    batch = broadcast_shapes(items.shape[:-2], comparisons.shape[:-2])
    index = comparisons.expand(*batch, *comparisons.shape[-2:]).flatten(-2).unsqueeze(-1)
    rows = items.expand(*batch, n, d).gather(-2, index.expand(*index.shape[:-1], d))
    return rows.unflatten(-2, comparisons.shape[-2:])


def difference_coefficients(likelihood: Likelihood, pairs: Tensor) -> Tensor:
    """``... x k x 2``, the coefficients of differences for pairs of items ``... x k x 2 x d``.

    Args:
        likelihood: The likelihood of the differences, whose link determines their scale.
        pairs: The items.
    """
    logit = getattr(likelihood, "link", "probit") == "logit"
    scale = 1.0 if logit else math.sqrt(0.5)
    return torch.tensor([scale, -scale], dtype=pairs.dtype, device=pairs.device).expand(
        pairs.shape[:-1]
    )


def comparison_likelihood(likelihood: Likelihood | None) -> Likelihood:
    """The likelihood of differences: that of the user, or the counterpart of one of BoTorch's.

    Args:
        likelihood: The user's; ``None`` for the probit.
    """
    if likelihood is None or isinstance(likelihood, PairwiseProbitLikelihood):
        return BernoulliLikelihood()
    if isinstance(likelihood, PairwiseLogitLikelihood):
        return BinomialLikelihood(total_count=1, link="logit")
    if isinstance(likelihood, BernoulliLikelihood | BinomialLikelihood):
        return likelihood
    if isinstance(likelihood, TieLikelihood | ChoiceLikelihood):
        return likelihood
    raise TypeError(
        "likelihood: expected BoTorch's PairwiseProbitLikelihood or PairwiseLogitLikelihood, a "
        f"TieLikelihood or a ChoiceLikelihood, got {type(likelihood).__name__}."
    )


def default_kernel(dim: int, batch_shape: torch.Size) -> Kernel:
    """The kernel of `botorch.models.PairwiseGP`, with its priors and initial values.

    Differences say nothing about the level of the utility, and their noise has a scale of one, so
    the outputscale is kept where probabilities do not saturate.

    Args:
        dim: The number of inputs.
        batch_shape: The batch shape of the lengthscales.
    """
    low, high = 1e-2, 1e2
    prior = GammaPrior(concentration=2.4, rate=2.7)
    mode = (prior.concentration - 1) / prior.rate
    return ScaleKernel(
        RBFKernel(
            batch_shape=batch_shape,
            ard_num_dims=dim,
            lengthscale_prior=prior,
            lengthscale_constraint=GreaterThan(1e-4, transform=None, initial_value=mode),
        ),
        outputscale_prior=SmoothedBoxPrior(a=low, b=high),
        # That of `PairwiseGP` is wider. But beyond the box the prior is so steep that line searches
        # of L-BFGS fail there, where easy comparisons want a large outputscale.
        outputscale_constraint=Interval(low, high, initial_value=1.0),
    )

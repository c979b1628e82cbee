"""Outcome transforms: the default one, and the transformation of observations by any of them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from botorch.models.transforms.outcome import (
    OutcomeTransform,
    Standardize,
    StratifiedStandardize,
)
from gpytorch.likelihoods import Likelihood
from torch import Tensor

from seqgp.likelihoods.traits import is_real_valued


class Affine(NamedTuple):
    """The inverse of a linear outcome transform: ``y = offset + scale * target``.

    Attributes:
        offset: ``... x 1 x m``.
        scale: ``... x 1 x m``, positive.
    """

    offset: Tensor
    scale: Tensor


def default_transform(
    Y: Tensor, likelihood: Likelihood | None, functionals: bool = False
) -> Standardize | None:
    """Return `Standardize` for real-valued observations, as in `SingleTaskGP`, else ``None``.

    Its statistics are those of the observations. It is the identity if there are no observations,
    and likewise for an output whose observations are all missing (NaN).

    Observations of functionals are not transformed by default. For example, the mean of differences
    contains no information about the mean of the function.

    Args:
        Y: ``... x n x m`` observations.
        likelihood: Their likelihood; ``None`` for a Gaussian.
        functionals: Whether they are observations of functionals.
    """
    if functionals or not (likelihood is None or is_real_valued(likelihood)):
        return None
    transform = Standardize(Y.shape[-1], batch_shape=Y.shape[:-2])
    if not Y.shape[-2]:
        Y = Y.new_zeros(*Y.shape[:-2], 1, Y.shape[-1])
    transform(Y.where(~Y.isnan().all(-2, keepdim=True), 0.0))
    return transform.eval()


def transform_observations(
    transform: OutcomeTransform,
    Y: Tensor,
    noise: Tensor | None,
    X: Tensor,
    coefficients: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Transform observations and noise variances, with the learnt statistics.

    If ``f = offset + scale * g``, then the observation ``sum_j c_j f(x_j)`` of a functional is
    ``offset * sum_j c_j + scale * sum_j c_j g(x_j)``.

    Args:
        transform: The transform.
        Y: ``... x n x m`` observations.
        noise: ``... x n x m`` noise variances.
        X: ``... x n x d`` inputs, after the input transform.
        coefficients: ``... x n x J``, if the observations are of functionals.
    """
    transform.eval()
    if coefficients is not None:
        Y = Y + _offset(transform) * (1 - coefficients.sum(-1, keepdim=True))
    result: tuple[Tensor, Tensor | None] = transform(Y=Y, Yvar=noise, X=X)
    return result


def untransform_observations(
    transform: OutcomeTransform,
    Y: Tensor,
    noise: Tensor | None,
    X: Tensor,
    coefficients: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Undo `transform_observations`.

    Args:
        transform: The transform.
        Y: ``... x n x m`` transformed observations.
        noise: ``... x n x m`` transformed noise variances.
        X: ``... x n x d`` inputs, after the input transform.
        coefficients: ``... x n x J``, if the observations are of functionals.
    """
    result: tuple[Tensor, Tensor | None] = transform.untransform(Y=Y, Yvar=noise, X=X)
    if coefficients is None:
        return result
    return result[0] - _offset(transform) * (1 - coefficients.sum(-1, keepdim=True)), result[1]


def _offset(transform: OutcomeTransform) -> Tensor:
    """Return the offset of a transform for functionals, which has to be linear."""
    inverse = affine(transform)
    if inverse is None:
        raise ValueError(
            "outcome_transform: observations of functionals need a linear one that does not depend "
            f"on the inputs, such as Standardize; got {type(transform).__name__}."
        )
    return inverse.offset


def affine(transform: OutcomeTransform) -> Affine | None:
    """Return the offset and the scale of a transform; ``None`` if it is not linear.

    Args:
        transform: The transform.
    """
    if not transform._is_linear or isinstance(transform, StratifiedStandardize):
        return None
    like = next((b for b in transform.buffers() if b.is_floating_point()), torch.zeros(1, 1))
    offset, variance = transform.untransform(torch.zeros_like(like), torch.ones_like(like))
    return None if variance is None else Affine(offset, variance.sqrt())

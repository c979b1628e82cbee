"""Blocks of a GP prior, as a model's ``forward`` gives it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from gpytorch.distributions import MultivariateNormal
from linear_operator import LinearOperator, to_dense
from torch import Tensor

#: A model's ``forward``: the prior at inputs ``... x n x d``.
Forward = Callable[[Tensor], MultivariateNormal]


class Prior(NamedTuple):
    """The prior at some inputs, and its covariance with the function elsewhere."""

    cross: Tensor  # ... x p x n
    mean: Tensor  # ... x n
    variance: Callable[[], Tensor]  # ... x n
    covariance: Callable[[], LinearOperator]  # ... x n x n
    left: tuple[Tensor, Tensor] | None = None  # mean ... x p and covariance ... x p x p elsewhere


def joint_prior(
    forward: Forward, left: Tensor, right: Tensor, shared: bool, with_left: bool = False
) -> Prior:
    """The prior at inputs ``right``, and its covariance with the values at ``left``.

    Only the blocks that are asked for are evaluated, if the kernel is lazy.

    Args:
        forward: The prior.
        left: ``... x p x d``.
        right: ``... x n x d``.
        shared: Whether one prior serves all batches. Then a batch of inputs against a single set
            is one flat kernel matrix.
        with_left: Whether the prior at ``left`` is wanted, too; one evaluation of the kernel gives
            both blocks.
    """
    (p, d), n = left.shape[-2:], right.shape[-2]
    left_batch, right_batch = left.shape[:-2], right.shape[:-2]
    flat_right = shared and left_batch.numel() == 1
    flat_left = shared and right_batch.numel() == 1 and not flat_right and not with_left
    prior_left = None
    if flat_left or flat_right:
        joint = forward(torch.cat([left.reshape(-1, d), right.reshape(-1, d)]))
        p = left_batch.numel() * p
        covariance = joint.lazy_covariance_matrix
        cross = to_dense(covariance[..., :p, 0 if with_left else p :])
        if with_left:
            prior_left = joint.mean[..., :p], cross[..., :p]
            cross = cross[..., p:]
        if flat_right:
            cross = cross.reshape(p, *right_batch, n).movedim(0, -2)
        else:
            cross = cross.reshape(*left_batch, -1, n)
        mean = joint.mean[..., p:].reshape(*right_batch, n)
    else:
        batch = torch.broadcast_shapes(left_batch, right_batch)
        joint = forward(torch.cat([left.expand(*batch, p, d), right.expand(*batch, n, d)], -2))
        covariance = joint.lazy_covariance_matrix
        cross = to_dense(covariance[..., :p, 0 if with_left else p :])
        if with_left:
            prior_left = joint.mean[..., :p], cross[..., :p]
            cross = cross[..., p:]
        mean = joint.mean[..., p:]
        right_batch = covariance.shape[:-2]

    def variance() -> Tensor:
        diagonal = covariance[..., p:, p:].diagonal(dim1=-1, dim2=-2)
        return diagonal.reshape(*right_batch, n)

    def full() -> LinearOperator:
        if (flat_left or flat_right) and right_batch:
            return forward(right).lazy_covariance_matrix
        return covariance[..., p:, p:]

    return Prior(cross, mean, variance, full, prior_left)

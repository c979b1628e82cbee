r"""The default `Standardize`, adapted along a stream.

Its statistics are those of all targets so far, including folded ones. They are updated whenever
hyperparameters are learnt. From targets :math:`t` to :math:`t' = a t + b`, everything is converted
without loss: the targets at hand, and the summary, which can be written as a function of
:math:`f' = a f + b` as well as of :math:`f`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from botorch.models.transforms.outcome import Standardize
from gpytorch.means import ConstantMean
from torch import Tensor

from seqgp.likelihoods.traits import summary_noise
from seqgp.observations import Observations
from seqgp.streaming.model import StreamModel


class Moments(NamedTuple):
    """The number, the mean and the sum of squared deviations of some numbers, ``[m]`` each."""

    number: Tensor
    mean: Tensor
    square: Tensor


@torch.no_grad()
def note_scale(model: StreamModel, new: Observations) -> None:
    """Add new targets to the moments of all targets.

    Args:
        model: The model.
        new: The new observations, as the model stores them.
    """
    fresh = _of_all(model, moments(new.targets, *_statistics(model)))
    known = torch.stack(list(pooled([moments_of(model, len(new)), fresh])))
    model.stream = replace(model.stream, moments=known)


@torch.no_grad()
def moments_of(model: StreamModel, num_new: int = 0) -> Moments:
    """Return the moments of all targets that a model has learnt.

    Args:
        model: The model.
        num_new: The number of observations at hand, from the last one, that do not count yet.
    """
    if model.stream.moments is not None:
        return Moments(*model.stream.moments)
    held = model.stream.observations.targets
    held = held[..., : held.shape[-1] - num_new]
    return _of_all(model, moments(held, *_statistics(model)))


def _of_all(model: StreamModel, own: Moments) -> Moments:
    """Return the moments of the targets of all ranks."""
    rows = model.variational_strategy.ranks.gather(torch.stack(list(own)).unsqueeze(0), 0)
    return pooled([Moments(*row) for row in rows])


def pooled(parts: Sequence[Moments]) -> Moments:
    """Return the moments of the union of several sets of numbers.

    Args:
        parts: The moments of each.
    """
    return functools.reduce(_together, parts)


@torch.no_grad()
def set_statistics(model: StreamModel, known: Moments) -> None:
    """Set the statistics of the transform to given moments; nothing else is converted.

    Args:
        model: The model.
        known: The moments, ``[m]`` each.
    """
    transform = model.outcome_transform
    assert isinstance(transform, Standardize)
    old_mean, old_scale = _statistics(model)
    scale = (known.square / (known.number - 1).clamp_min(1)).sqrt()
    if not bool((known.mean.isfinite() & scale.isfinite()).all()):
        raise FloatingPointError(
            f"Y: the mean or the standard deviation of all observations overflows in {scale.dtype}."
            " Nothing has been changed; scale the observations."
        )
    usable = (known.number > 1) & (scale > 1e-8)  # as in Standardize
    scale, mean = torch.where(usable, scale, old_scale), torch.where(usable, known.mean, old_mean)
    statistics = {"means": mean, "stdvs": scale, "_stdvs_sq": scale.square()}
    shape = transform.means.shape
    transform.load_state_dict(
        {**transform.state_dict(), **{k: v.reshape(shape) for k, v in statistics.items()}}
    )


@torch.no_grad()
def restandardize(model: StreamModel) -> None:
    """Standardise by all targets so far.

    Args:
        model: The model, which shares no module with another one.
    """
    assert model.stream.moments is not None
    old_mean, old_scale = (each.clone() for each in _statistics(model))
    set_statistics(model, Moments(*model.stream.moments))
    mean, scale = _statistics(model)
    a, b = old_scale / scale, (old_mean - mean) / scale
    held, column = model.stream.observations, (a.unsqueeze(-1), b.unsqueeze(-1))
    if not a.dim():
        column = (a, b)
    arguments = dict(held.arguments)
    if "noise" in arguments:
        arguments["noise"] = arguments["noise"] * column[0].square()
    held = replace(held, targets=held.targets * column[0] + column[1], arguments=arguments)
    model.stream = replace(model.stream, observations=held)
    noise_free = summary_noise(model.likelihood) is not None
    model.variational_strategy.rescale(a, b, noise_free)
    # Convert parameters that were learnt in the old units.
    if isinstance(model.mean_module, ConstantMean):
        constant = model.mean_module.constant
        model.mean_module.constant = constant * a.reshape(constant.shape) + b.reshape(
            constant.shape
        )
    if noise_free and "noise" not in arguments:
        noise = model.likelihood.noise
        lower = model.likelihood.noise_covar.raw_noise_constraint.lower_bound
        model.likelihood.noise = torch.maximum(
            noise * a.square().reshape(noise.shape), 1.01 * lower
        )


def _statistics(model: StreamModel) -> tuple[Tensor, Tensor]:
    """Return mean and standard deviation of the transform, ``[m]`` each."""
    transform = model.outcome_transform
    assert isinstance(transform, Standardize)
    mean, scale = transform.means.flatten(), transform.stdvs.flatten()
    several = model.stream.observations.targets.dim() > 1
    return (mean, scale) if several else (mean.squeeze(0), scale.squeeze(0))


def moments(targets: Tensor, mean: Tensor, scale: Tensor) -> Moments:
    """Return the moments of targets in their original units.

    Args:
        targets: ``[m x] n`` transformed targets, some of which may be missing.
        mean: ``[m]``, the mean that was subtracted.
        scale: ``[m]``, the standard deviation that they were divided by.
    """
    seen = ~targets.isnan()
    number = seen.sum(-1).to(scale)
    values = targets.where(seen, 0.0)
    average = values.sum(-1) / number.clamp_min(1)
    square = (values - average.unsqueeze(-1)).where(seen, 0.0).square().sum(-1)
    return Moments(number, mean + scale * average, scale.square() * square)


def _together(first: Moments, second: Moments) -> Moments:
    """Return the moments of the union of two sets (Chan, Golub and LeVeque, 1983)."""
    number = first.number + second.number
    share = second.number / number.clamp_min(1)
    shift = second.mean - first.mean
    mean = torch.where(first.number > 0, first.mean + share * shift, second.mean)
    square = first.square + second.square + first.number * share * shift.square()
    return Moments(number, mean, square)

"""Properties of likelihoods.

A *site* is the Gaussian that replaces the likelihood of an observation, see `seqgp.dual`.
"""

from __future__ import annotations

from typing import Any

import torch
from gpytorch.likelihoods import (
    BernoulliLikelihood,
    DirichletClassificationLikelihood,
    FixedNoiseGaussianLikelihood,
    GaussianLikelihood,
    GaussianLikelihoodWithMissingObs,
    LaplaceLikelihood,
    Likelihood,
    PoissonLikelihood,
    SoftmaxLikelihood,
    StudentTLikelihood,
)
from torch import Tensor

from seqgp.likelihoods.continuous import CensoredGaussianLikelihood, GammaLikelihood
from seqgp.likelihoods.discrete import BinomialLikelihood, OrdinalLikelihood
from seqgp.likelihoods.outliers import has_outliers, noise_of_new_data
from seqgp.likelihoods.quadrature import OneDimensionalLikelihood
from seqgp.likelihoods.ratings import RatingLikelihood

_LOG_CONCAVE = (
    BernoulliLikelihood,
    BinomialLikelihood,
    CensoredGaussianLikelihood,
    GammaLikelihood,
    LaplaceLikelihood,
    OrdinalLikelihood,
    PoissonLikelihood,
    RatingLikelihood,
    SoftmaxLikelihood,
)


def has_one_latent(likelihood: Likelihood) -> bool:
    """Whether the likelihood has a single latent function (a softmax, for example, has several)."""
    return is_conjugate(likelihood) or isinstance(likelihood, OneDimensionalLikelihood)


def output_latents(likelihood: Likelihood) -> tuple[int, ...] | None:
    """Return which of several latents are outputs of a model, ``None`` if all are.

    A likelihood says so by an attribute ``output_latents``. Its latents are functions of different
    kinds, such as a mean and a log variance, and have kernels and means of their own.

    Args:
        likelihood: The likelihood.
    """
    return getattr(likelihood, "output_latents", None)


def likelihoods_of_tasks(likelihood: Likelihood) -> list[Any] | None:
    """Return the likelihoods of the tasks if there is one for each task, otherwise ``None``.

    Args:
        likelihood: The likelihood.
    """
    each = getattr(likelihood, "likelihoods", None)
    return list(each) if isinstance(each, torch.nn.ModuleList) else None


def precision_floor(likelihood: Likelihood) -> float | None:
    """Return the minimum precision of sites: zero if log-concave, else ``None``.

    Other likelihoods (Student-t, Beta, negative binomial, unknown ones) have sites of negative
    precision where they are not log-concave, for example at an outlier. With a minimum, the
    posterior would not maximise the evidence lower bound. Without one, step sizes must keep the
    posterior precision positive: see `seqgp.dual.natural_gradient.fixed_point`.
    """
    each = likelihoods_of_tasks(likelihood)
    if each is not None:
        return 0.0 if all(precision_floor(part) == 0.0 for part in each) else None
    known = is_conjugate(likelihood) or isinstance(likelihood, _LOG_CONCAVE)
    return 0.0 if known or getattr(likelihood, "is_log_concave", False) else None


def is_conjugate(likelihood: Likelihood) -> bool:
    """Whether sites do not depend on the posterior, so that one step is exact."""
    known = isinstance(likelihood, GaussianLikelihood | FixedNoiseGaussianLikelihood)
    return known or has_outliers(likelihood)


def takes_noise(likelihood: Likelihood) -> bool:
    """Whether all observations are Gaussian, so that each can come with a noise variance."""
    each = likelihoods_of_tasks(likelihood)
    return all(map(is_conjugate, [likelihood] if each is None else each))


def is_real_valued(likelihood: Likelihood) -> bool:
    """Whether observations are real numbers in units of their own, which can be standardised.

    Likelihoods that are not known may have limits or constants on the scale of the observations:
    theirs are left alone.
    """
    known = is_conjugate(likelihood) or isinstance(
        likelihood, LaplaceLikelihood | StudentTLikelihood
    )
    known = known or getattr(likelihood, "observes_real_numbers", False)
    return known and not isinstance(likelihood, DirichletClassificationLikelihood)


def has_closed_form(likelihood: Likelihood) -> bool:
    """Whether all targets are Gaussian observations, of any task, and none can be missing."""
    each = likelihoods_of_tasks(likelihood)
    if each is not None:
        return all(map(has_closed_form, each))
    missing = isinstance(likelihood, GaussianLikelihoodWithMissingObs)
    return is_conjugate(likelihood) and not missing


def observation_noise(
    likelihood: Likelihood,
    num_data: int,
    noise: Tensor | None = None,
    task: Tensor | None = None,
    **kwargs: Any,
) -> Tensor:
    """The noise variance of each of ``num_data`` observations, ``... x num_data``.

    Args:
        likelihood: A Gaussian likelihood, or one for each task.
        num_data: The number of observations.
        noise: Their noise variances. Required for a `FixedNoiseGaussianLikelihood` unless
            ``num_data`` is the number of points that it was built with.
        task: The indices of their tasks, ``... x num_data``, if each has a likelihood of its own.
        kwargs: Ignored.
    """
    each = likelihoods_of_tasks(likelihood)
    if each is not None:
        assert task is not None
        result = observation_noise(each[0], num_data, noise)
        for index, part in enumerate(each[1:], 1):
            result = torch.where(task == index, observation_noise(part, num_data, noise), result)
        return result
    if isinstance(likelihood, GaussianLikelihood):
        variance = likelihood.noise if noise is None else noise
        return variance.expand(*variance.shape[:-1], num_data) if variance.dim() else variance
    if has_outliers(likelihood):
        variance = noise_of_new_data(likelihood) if noise is None else noise
        return variance.expand(*variance.shape[:-1], num_data)
    if noise is None:
        noise = likelihood.noise_covar.noise
        if noise.shape[-1] not in (1, num_data):
            raise ValueError(
                f"noise: the likelihood has the noise of {noise.shape[-1]} points, but there are "
                f"{num_data}; pass their noise variances as noise=."
            )
    noise = noise + likelihood.second_noise
    return noise.expand(*noise.shape[:-1], num_data)


def summary_noise(likelihood: Likelihood) -> Tensor | None:
    """The noise variance ``... x 1`` that summaries do not depend on, ``None`` if there is none."""
    return likelihood.noise if isinstance(likelihood, GaussianLikelihood) else None


def is_softmax(likelihood: Likelihood) -> bool:
    """Whether each class has its own latent function, without mixing weights."""
    return (
        isinstance(likelihood, SoftmaxLikelihood)
        and type(likelihood).forward is SoftmaxLikelihood.forward
        and likelihood.mixing_weights is None
    )

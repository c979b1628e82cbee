"""Predictions to draw: mean, standard deviation and 95 % band of the expected observation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from gpytorch.likelihoods import BernoulliLikelihood, SoftmaxLikelihood
from torch import Tensor

from seqgp.likelihoods.discrete import BinomialLikelihood
from seqgp.likelihoods.predictive import conditional_moments
from seqgp.likelihoods.quadrature import normal_nodes, normal_weights
from seqgp.likelihoods.traits import has_one_latent, is_conjugate
from seqgp.models.sequential_gp import SequentialGP
from seqgp.plots.axes import array

#: Half the width of a 95 % band, in standard deviations.
Z95 = 1.959964

_CHUNK = 1000  # inputs per call of the model
_NUM_DRAWS = 512  # samples of several latent functions


class Prediction(NamedTuple):
    """The expected observation at ``n`` inputs, as tensors or arrays."""

    mean: Any  # n
    sd: Any  # n, standard deviation of the expected observation
    low: Any  # n, 2.5 % quantile
    high: Any  # n, 97.5 % quantile
    noise: Any  # n, standard deviation of Gaussian observations, or None


@torch.no_grad()
def predict(model: SequentialGP, X: Tensor, output: int, arguments: dict[str, float]) -> Prediction:
    """Predict in chunks of inputs, and return arrays.

    Args:
        model: The model.
        X: ``n x d`` inputs.
        output: The output, or the class.
        arguments: Arguments of the likelihood.
    """
    training = model.training
    try:
        parts = [_predict_chunk(model, x, output, arguments) for x in X.split(_CHUNK)]
    finally:
        model.train(training)
    columns: list[Any] = [
        None if parts[0][i] is None else array(torch.cat([part[i] for part in parts]))
        for i in range(len(parts[0]))
    ]
    return Prediction(*columns)


def _predict_chunk(
    model: SequentialGP, X: Tensor, output: int, arguments: dict[str, float]
) -> Prediction:
    likelihood = model.likelihood
    if is_conjugate(likelihood):
        f: Any = model.posterior(X)
        y: Any = model.posterior(X, observation_noise=True)
        mean, sd = (t[..., output] for t in (f.mean, f.variance.clamp_min(0).sqrt()))
        noise = y.variance[..., output].clamp_min(0).sqrt()
        return Prediction(mean, sd, mean - Z95 * sd, mean + Z95 * sd, noise)
    given: dict[str, Any] = (
        {"total_count": 1.0} if isinstance(likelihood, BinomialLikelihood) else {}
    )
    given = {k: torch.full(X.shape[:1], float(v)).to(X) for k, v in {**given, **arguments}.items()}
    latent: Any = model.posterior(X)
    mean, variance = latent.mean, latent.variance.clamp_min(0)
    if not has_one_latent(likelihood):
        generator = torch.Generator().manual_seed(0)
        draws = torch.randn(_NUM_DRAWS, 1, mean.shape[-1], generator=generator, device="cpu").to(X)
        values = mean + variance.sqrt() * draws
        probabilities = likelihood.forward(values.unsqueeze(-2), **given).probs[..., 0, output]
        low, high = (probabilities.quantile(p, 0) for p in (0.025, 0.975))
        return Prediction(probabilities.mean(0), probabilities.std(0), low, high, None)
    mean, sd = mean[..., output], variance[..., output].sqrt()

    def expected(f: Tensor) -> Tensor:
        return conditional_moments(likelihood.forward(f, **given))[0]

    return _moments_of(expected, mean, sd)


def _moments_of(expected: Callable[[Tensor], Tensor], mean: Tensor, sd: Tensor) -> Prediction:
    """Mean, standard deviation and band of a monotone function of a Gaussian."""
    nodes, weights = normal_nodes(mean), normal_weights(mean).unsqueeze(-1)
    values = expected(mean + sd * nodes)
    first = (weights * values).sum(0)
    second = (weights * (values - first).square()).sum(0)
    ends = torch.stack([expected(mean - Z95 * sd), expected(mean + Z95 * sd)])
    return Prediction(first, second.sqrt(), ends.amin(0), ends.amax(0), None)


def num_classes(model: SequentialGP) -> int:
    """The number of classes of a likelihood with several latent functions."""
    return int(getattr(model.likelihood, "num_classes", model.num_outputs))


def is_probability(model: SequentialGP) -> bool:
    """Whether the expected observation is the probability of a label or class.

    Proportions of counts are not: they may all be small, and 0.5 is no boundary.
    """
    return isinstance(model.likelihood, BernoulliLikelihood | SoftmaxLikelihood)


def label_of(model: SequentialGP, output: int) -> str:
    """What the expected observation is called in a plot."""
    likelihood = model.likelihood
    if not has_one_latent(likelihood):
        return f"probability of class {output}"
    known = {
        "BernoulliLikelihood": "probability of a 1",
        "PsychometricLikelihood": "probability of a 1",
        "PoissonLikelihood": "rate",
        "OrdinalLikelihood": "expected class",
    }
    label = known.get(type(likelihood).__name__, "y")
    if isinstance(likelihood, BinomialLikelihood):
        label = "proportion"
    return f"{label}, output {output}" if model.has_output_dim else label

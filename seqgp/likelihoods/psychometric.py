"""Labels with guesses and lapses."""

from __future__ import annotations

import math
from typing import Any

import torch
from gpytorch.distributions import MultivariateNormal
from torch import Tensor
from torch.distributions import Bernoulli

from seqgp.likelihoods.quadrature import OneDimensionalLikelihood, normal_nodes, normal_weights

__all__ = ["PsychometricLikelihood"]

#: Number of nodes for expected log probabilities.
NUM_NODES = 128


class PsychometricLikelihood(OneDimensionalLikelihood):
    r"""Labels 0 and 1 of an observer who guesses and lapses: Bernoulli with two error rates.

    .. math::
        p(y = 1 \mid f) = g + (1 - g - l) \, \Phi(f).

    In a two-alternative forced choice, half of all guesses are right, :math:`g = 1/2`. The lapse
    rate :math:`l` is the share of wrong responses where the stimulus is obvious. With
    :math:`g = l = 0` this is `gpytorch.likelihoods.BernoulliLikelihood`. With rates, it is not
    log-concave: no single response is very surprising, so outliers do little harm.

    Args:
        guess_rate: :math:`g`, from 0 to 1.
        lapse_rate: :math:`l`, from 0 to 1; :math:`g + l < 1`.

    Example:
        >>> likelihood = PsychometricLikelihood(guess_rate=0.5, lapse_rate=0.02)
        >>> likelihood(torch.tensor([-9.0, 0.0, 9.0])).mean
        tensor([0.5000, 0.7400, 0.9800])
    """

    has_analytic_marginal = True

    def __init__(self, guess_rate: float = 0.5, lapse_rate: float = 0.0) -> None:
        super().__init__()
        if not (0 <= guess_rate < 1 and 0 <= lapse_rate < 1 and guess_rate + lapse_rate < 1):
            raise ValueError(
                "guess_rate and lapse_rate: expected numbers from 0 to 1 whose sum is less than "
                f"1, got {guess_rate} and {lapse_rate}."
            )
        self.guess_rate, self.lapse_rate = float(guess_rate), float(lapse_rate)

    def probability(self, f: Tensor) -> Tensor:
        """Return the probability of a 1 at latent values ``...``."""
        slope = 1 - self.guess_rate - self.lapse_rate
        return self.guess_rate + slope * torch.special.ndtr(f)

    def log_prob(self, targets: Tensor, f: Tensor) -> Tensor:
        r"""``log p(y | f)``, also where one of the rates is zero and :math:`\Phi` underflows.

        :math:`\log(r + s \Phi(x))`, with :math:`r` the rate that the label has where it is
        improbable, and :math:`x = \pm f`.

        Args:
            targets: ``...`` labels.
            f: ``...`` latent values.
        """
        rate = torch.where(targets > 0.5, self.guess_rate, self.lapse_rate).to(f)
        slope = 1 - self.guess_rate - self.lapse_rate
        signed = (2 * targets - 1) * f
        bounded = rate > 0  # from below, so that there is nothing to underflow
        inside = torch.where(bounded, rate, 1.0) + slope * torch.special.ndtr(signed)
        outside = torch.special.log_ndtr(torch.where(bounded, 0.0, signed))
        return torch.where(bounded, inside.log(), math.log(slope) + outside)

    def forward(self, function_samples: Tensor, *args: Any, **kwargs: Any) -> Bernoulli:
        """The distribution of labels given latent values ``... x n``."""
        return Bernoulli(self.probability(function_samples), validate_args=False)

    def marginal(self, function_dist: MultivariateNormal, *args: Any, **kwargs: Any) -> Bernoulli:
        r"""In closed form: :math:`E[\Phi(f)] = \Phi(m / \sqrt{1 + v})`."""
        scaled = function_dist.mean / (1 + function_dist.variance).sqrt()
        return Bernoulli(self.probability(scaled), validate_args=False)

    def log_marginal(
        self, observations: Tensor, function_dist: MultivariateNormal, *args: Any, **kwargs: Any
    ) -> Tensor:
        r""":math:`\log E[p(y \mid f)]`, ``... x n``."""
        scaled = function_dist.mean / (1 + function_dist.variance).sqrt()
        return self.log_prob(observations, scaled)

    def expected_log_prob(
        self, observations: Tensor, function_dist: MultivariateNormal, *args: Any, **kwargs: Any
    ) -> Tensor:
        r""":math:`E[\log p(y \mid f)]` by quadrature, ``... x n``.

        With more nodes than others: the rates make it bend where :math:`\Phi` meets them.
        """
        mean, variance = function_dist.mean, function_dist.variance
        nodes = normal_nodes(mean, NUM_NODES, max(mean.dim(), observations.dim()))
        log_probs = self.log_prob(observations, mean + variance.sqrt() * nodes)
        return torch.tensordot(normal_weights(log_probs, NUM_NODES), log_probs, 1)

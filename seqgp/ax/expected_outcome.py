r"""Posteriors of the expected value of a metric, on the scale in which it is reported.

This is :math:`F(f(x))`, with :math:`F` the link of the likelihood: a rate of counts, or a rate of
success.
"""

from __future__ import annotations

from typing import Any

import torch
from botorch.models.transforms.outcome import OutcomeTransform
from botorch.posteriors import GPyTorchPosterior, Posterior, TransformedPosterior
from botorch.sampling.base import MCSampler
from botorch.sampling.get_sampler import GetSampler, get_sampler
from gpytorch.likelihoods import BernoulliLikelihood, Likelihood
from torch import Tensor

from seqgp.acquisition.uncertainty import link_of, prevalence
from seqgp.models.posteriors import ObservationPosterior


class NotGaussian:
    """A placeholder for a distribution that is not Gaussian."""


class LinkPosterior(TransformedPosterior, GPyTorchPosterior):
    """The posterior of the expected value of a metric: of the link of latent values.

    It is not Gaussian. Ax's sensitivity analyses require a `GPyTorchPosterior`, of which they use
    only the mean. So this is a subclass of it, with a placeholder as ``distribution``.

    Args:
        latent: The posterior of the latent function.
        likelihood: The likelihood, which has the link.
    """

    def __init__(self, latent: GPyTorchPosterior, likelihood: Likelihood) -> None:
        TransformedPosterior.__init__(
            self,
            latent,
            sample_transform=link_of(likelihood).forward,
            mean_transform=lambda mean, variance: _expected(likelihood, mean, variance),
            variance_transform=lambda mean, variance: prevalence(likelihood, mean, variance)[1],
        )
        self.latent = latent
        self.distribution = NotGaussian()

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}.")


def _expected(likelihood: Likelihood, mean: Tensor, variance: Tensor) -> Tensor:
    """The mean of the link of latent values: in closed form for probit, else by quadrature."""
    if isinstance(likelihood, BernoulliLikelihood):
        return torch.special.ndtr(mean * (1 + variance).rsqrt())
    return prevalence(likelihood, mean, variance)[0]


@GetSampler.register(NotGaussian)
def _get_sampler(
    posterior: LinkPosterior, sample_shape: torch.Size, *, seed: int | None = None
) -> MCSampler:
    return get_sampler(posterior.latent, sample_shape, seed=seed)


class ExpectedOutcome(OutcomeTransform):
    """Maps the posterior to that of expected observations, and does not change observations.

    Args:
        likelihood: The likelihood.
    """

    _is_linear = False

    def __init__(self, likelihood: Likelihood) -> None:
        super().__init__()
        object.__setattr__(self, "likelihood", likelihood)  # a module of the model, not of this one

    def forward(
        self, Y: Tensor, Yvar: Tensor | None = None, X: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Return the observations unchanged."""
        return Y, Yvar

    def untransform(
        self, Y: Tensor, Yvar: Tensor | None = None, X: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Return the observations unchanged."""
        return Y, Yvar

    def untransform_posterior(self, posterior: Posterior, X: Tensor | None = None) -> Posterior:
        """Return the posterior of expected observations, or of binomial observations as rates."""
        if type(posterior) is GPyTorchPosterior:
            return LinkPosterior(posterior, self.likelihood)
        if isinstance(posterior, ObservationPosterior) and "total_count" in posterior.arguments:
            total = posterior.arguments["total_count"].unsqueeze(-1)
            return TransformedPosterior(
                posterior,
                sample_transform=lambda Y: Y / total,
                mean_transform=lambda mean, variance: mean / total,
                variance_transform=lambda mean, variance: variance / total.square(),
            )
        return posterior

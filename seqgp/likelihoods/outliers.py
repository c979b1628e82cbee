r"""The noise of a `SparseOutlierGaussianLikelihood`, BoTorch's likelihood for relevance pursuit.

Some of the observations that it was made for have additional noise. Observation :math:`i` has the
variance

.. math::
    \sigma^2 + \rho_i \quad \text{or} \quad \sigma^2 + \rho_i (k(x_i, x_i) + \sigma^2),

the latter in the convex parameterisation, in which :math:`\rho_i` is relative to the variance of
the observation. So each observation has noise of its own that depends on hyperparameters, also on
those of the kernel. The index :math:`i` is a per-point argument of the training data, ``outlier=``.
New observations are not outliers.
"""

from __future__ import annotations

from botorch.models.likelihoods.sparse_outlier_noise import (
    SparseOutlierGaussianLikelihood,
    SparseOutlierNoise,
)
from gpytorch.likelihoods import Likelihood
from torch import Tensor


def has_outliers(likelihood: Likelihood) -> bool:
    """Whether training observations may have additional noise, which is learnt."""
    return isinstance(likelihood, SparseOutlierGaussianLikelihood)


def noise_of_training_data(likelihood: Likelihood, outlier: Tensor, variance: Tensor) -> Tensor:
    """Return the noise variances ``... x n`` of training observations.

    Args:
        likelihood: A `SparseOutlierGaussianLikelihood`.
        outlier: ``n``, the indices of the observations among those that it was made for.
        variance: ``... x n``, the prior variance at their inputs.
    """
    covariance: SparseOutlierNoise = likelihood.noise_covar
    index, base = outlier.long(), covariance.base_noise.noise
    if base.shape[-1] > 1:  # known, for each of them
        base = base[..., index]
    rho = covariance.rho[..., index]
    return base + rho * (variance + base) if covariance.convex_parameterization else base + rho


def noise_of_new_data(likelihood: Likelihood) -> Tensor:
    """Return the noise variance ``... x 1`` of observations that are not outliers.

    If it is known for each training observation, it is the mean, as for known noise in BoTorch.

    Args:
        likelihood: A `SparseOutlierGaussianLikelihood`.
    """
    base: Tensor = likelihood.noise_covar.base_noise.noise
    return base.mean(-1, keepdim=True)


def show_training_inputs(likelihood: Likelihood, inputs: Tensor) -> None:
    """Let a likelihood know the training inputs, as an exact GP does before its first prediction.

    It recognises its outliers by them, and takes the first inputs that it sees for those.

    Args:
        likelihood: A `SparseOutlierGaussianLikelihood`.
        inputs: ``... x n x d``, transformed.
    """
    covariance: SparseOutlierNoise = likelihood.noise_covar
    training = covariance.training
    covariance.train()
    covariance(X=[inputs], shape=inputs.shape[:-1])
    covariance.train(training)

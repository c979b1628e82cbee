"""Prior means and kernels for metrics."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from botorch.models.kernels.categorical import CategoricalKernel
from botorch.models.utils.gpytorch_modules import get_covar_module_with_dim_scaled_prior
from gpytorch.constraints import GreaterThan
from gpytorch.kernels import Kernel, ScaleKernel
from gpytorch.likelihoods import Likelihood, PoissonLikelihood
from gpytorch.means import ConstantMean
from gpytorch.priors import GammaPrior, LogNormalPrior

from seqgp.acquisition.uncertainty import link_of
from seqgp.ax.observed import Observed
from seqgp.kernel_scales import sharp
from seqgp.models.construction import default_mean


def prior_of(
    observed: Observed, likelihood: Likelihood | None, jumps: bool, categorical: Sequence[int]
) -> tuple[ConstantMean | None, Kernel]:
    """Mean and kernel of the latent function.

    For a Gaussian metric, which Ax has standardised, these are BoTorch's defaults. For others, the
    mean is initialised such that the link of it is the average observation. The variance is
    initialised to that of the counts if the metric is a count, and to one typical of log odds if it
    is a rate.

    Args:
        observed: The observations.
        likelihood: The likelihood, ``None`` if it is Gaussian.
        jumps: Whether the metric is expected to jump, as validity does.
        categorical: Indices of inputs of which only equality matters.
    """
    X, Y = observed.X, observed.Y
    n = len(Y)
    kernel = _kernel(X.shape[-1], categorical, jumps)
    if likelihood is None:
        # Without a kernel, BoTorch would warn that the data are not exactly standardised, which
        # they are not while statistics are held: see `HeldStatistics`.
        return None, kernel.to(X)
    total = float(n if observed.totals is None else observed.totals.sum())
    average = (float(Y.sum()) + 0.5) / (total + 1)
    scale = 2.0
    if isinstance(likelihood, PoissonLikelihood):  # its link is close to the identity
        scale = max(float(Y.var()) if n > 1 else 0.0, 0.25 * average**2, 0.25)
    mean = default_mean(likelihood, torch.Size())
    if jumps:
        scaled = sharp(kernel)
    else:
        scaled = ScaleKernel(kernel, outputscale_prior=LogNormalPrior(math.log(scale), 1.0))
        scaled.outputscale = scale
        start = link_of(likelihood).inverse(torch.tensor(average, dtype=X.dtype, device=X.device))
        mean.constant.data.fill_(float(start))
    return mean.to(X), scaled.to(X)


def _kernel(d: int, categorical: Sequence[int], jumps: bool) -> Kernel:
    """BoTorch's default, times a factor for each categorical input that differs."""
    ordinal = [i for i in range(d) if i not in categorical]
    factors: list[Kernel] = []
    if ordinal:
        factors.append(
            get_covar_module_with_dim_scaled_prior(
                len(ordinal),
                use_rbf_kernel=not jumps,
                active_dims=ordinal if categorical else None,
            )
        )
    if categorical:
        factors.append(
            CategoricalKernel(
                ard_num_dims=len(categorical),
                active_dims=list(categorical),
                lengthscale_prior=GammaPrior(3.0, 3.0),  # around one
                lengthscale_constraint=GreaterThan(1e-2),
            )
        )
    return factors[0] if len(factors) == 1 else factors[0] * factors[1]

"""Dual sparse Gaussian processes as pure functions on tensors.

Data flows one way through these files, and so do their imports::

    likelihood --sites--> Sites --duals--> Duals --posterior--> mean, (co)variance, KL
                                    |                 |
         projection, summary (other Z, the past)   conditioning (more sites)

`natural_gradient` closes the loop: it moves the duals to the fixed point, where the sites are
those of the posterior that the duals imply.

Notation: ``m`` inducing points ``Z``, ``L = chol(Kzz)``, whitened cross-covariance
``A_x = L^-1 K_zx`` (``m x n``). Every tensor may carry leading batch dimensions ``...``; several
latent functions are one more batch dimension, the last of them.

Example:
    A Gaussian process from scratch, from a kernel matrix to predictions:

    >>> import torch
    >>> from gpytorch.likelihoods import PoissonLikelihood
    >>> from seqgp.dual import *
    >>> from seqgp.likelihoods import expectations
    >>> x = torch.linspace(0, 5, 50, dtype=torch.double)
    >>> y = torch.poisson(3 + 2 * torch.sin(x), generator=torch.Generator().manual_seed(0))
    >>> def k(a, b):
    ...     return torch.exp(-0.5 * (a[:, None] - b) ** 2)
    >>> L = scaled_cholesky(k(x[::5], x[::5]), 1e-8)
    >>> A = solve_lower(L, k(x[::5], x))
    >>> variance = 1 - A.square().sum(-2)  # what the inducing points do not explain
    >>> def evaluate(mean, variance):
    ...     return expectations(PoissonLikelihood(), y, mean, variance)
    >>> batch = Batch(A, variance, torch.zeros_like(x), evaluate)
    >>> duals = zero_duals(x, 10)
    >>> for _ in range(20):
    ...     duals, bound = natural_gradient_step(duals, [batch], rho=0.8)
    >>> factors = factorise(duals)
    >>> f = posterior_mean(A, factors)
    >>> posterior_variance(A, variance, factors).shape
    torch.Size([50])
    >>> rate = torch.nn.functional.softplus(f)  # at the ends of the first and the third quarter
    >>> bool(rate[15] > 3 > rate[45])
    True
"""

from seqgp.dual.conditioning import Conditioned, condition
from seqgp.dual.duals import Duals, accumulate, add, interpolate, tie, zero_duals
from seqgp.dual.linalg import scaled_cholesky, solve_lower
from seqgp.dual.natural_gradient import (
    Batch,
    Convergence,
    conjugate_duals,
    converge,
    converge_sites,
    fixed_point,
    natural_gradient_step,
)
from seqgp.dual.posterior import (
    Factors,
    expected_log_summary,
    factorise,
    kl_divergence,
    log_evidence,
    posterior_covariance,
    posterior_mean,
    posterior_variance,
)
from seqgp.dual.projection import project, recentre, transport_matrix
from seqgp.dual.sites import Expectations, Sites, sites
from seqgp.dual.summary import (
    Basis,
    Summary,
    discounted,
    duals_now,
    empty_summary,
    fold,
    log_constant,
    rebase_summary,
)

__all__ = [
    "Basis",
    "Batch",
    "Conditioned",
    "Convergence",
    "Duals",
    "Expectations",
    "Factors",
    "Sites",
    "Summary",
    "accumulate",
    "add",
    "condition",
    "conjugate_duals",
    "converge",
    "converge_sites",
    "discounted",
    "duals_now",
    "empty_summary",
    "expected_log_summary",
    "factorise",
    "fixed_point",
    "fold",
    "interpolate",
    "kl_divergence",
    "log_constant",
    "log_evidence",
    "natural_gradient_step",
    "posterior_covariance",
    "posterior_mean",
    "posterior_variance",
    "project",
    "rebase_summary",
    "recentre",
    "scaled_cholesky",
    "sites",
    "solve_lower",
    "tie",
    "transport_matrix",
    "zero_duals",
]

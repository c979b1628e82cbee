"""Dual sparse Gaussian processes as pure functions on tensors.

Data flows one way through these files, and so do their imports::

    likelihood --sites--> Sites --duals--> Duals --posterior--> mean, (co)variance, KL
                                    |                 |
         projection, summary (other Z, the past)   conditioning (more sites)

`natural_gradient` closes the loop: it moves the duals to the fixed point at which the sites are
those of the posterior that they imply.

Notation: ``m`` inducing points ``Z``, ``L = chol(Kzz)``, whitened cross-covariance
``A_x = L^-1 K_zx`` (``m x n``). Every tensor may carry leading batch dimensions ``...``; several
latent functions are one more batch dimension, the last of them.
"""

from seqgp.dual.conditioning import Conditioned, condition
from seqgp.dual.duals import Duals, accumulate, add, interpolate, tie, zero_duals
from seqgp.dual.linalg import scaled_cholesky, solve_lower
from seqgp.dual.natural_gradient import (
    Batch,
    Convergence,
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
from seqgp.dual.sites import Expectations, Sites, expectations, expected_log_prob, sites
from seqgp.dual.summary import (
    Basis,
    Summary,
    discounted,
    duals_now,
    empty_summary,
    fold,
    log_constant,
    rebase_summary,
    summary_noise,
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
    "converge",
    "converge_sites",
    "discounted",
    "duals_now",
    "empty_summary",
    "expectations",
    "expected_log_prob",
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
    "summary_noise",
    "tie",
    "transport_matrix",
    "zero_duals",
]

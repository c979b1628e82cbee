"""One model of an objective and of whether evaluations are valid."""

from __future__ import annotations

from typing import Any

import torch
from botorch.models.utils.gpytorch_modules import get_gaussian_likelihood_with_lognormal_prior
from gpytorch.kernels import Kernel
from gpytorch.likelihoods import Likelihood
from gpytorch.priors import NormalPrior
from torch import Tensor

from seqgp.models.multi_task_gp import SequentialMultiTaskGP
from seqgp.models.tasks import LoadingKernel

#: Standard deviation of the prior of the objective's weight in the latent function of validity, as
#: large as that of the other part of it (see `seqgp.kernel_scales.sharp`).
LOADING = 10.0


def objective_and_validity(
    X: Tensor,
    Y: Tensor,
    objective: Kernel,
    validity: Kernel,
    likelihood: Likelihood,
    **options: Any,
) -> SequentialMultiTaskGP:
    """A model of an objective (task 0) and of validity (task 1), which are correlated.

    The latent function of validity has a multiple of that of the objective as a part. With a weight
    of zero, with which it starts, the two are independent.

    Args:
        X: ``n x d`` inputs.
        Y: ``n x 2`` values, NaN where there is none to learn from, and labels.
        objective: The kernel of the objective.
        validity: The kernel of the other part of the latent function of validity.
        likelihood: The likelihood of validity.
        options: Further options of `SequentialMultiTaskGP`.
    """
    shared = LoadingKernel([0, 1], [1.0, 0.0], [0], loading_prior=NormalPrior(0.0, LOADING))
    own = LoadingKernel([0, 1], [0.0, 1.0], [0, 1])
    return SequentialMultiTaskGP(
        X,
        Y,
        None,
        covar_module=[objective, validity],
        task_covar_module=[shared, own],
        likelihood=[get_gaussian_likelihood_with_lognormal_prior(torch.Size()), likelihood],
        **options,
    )

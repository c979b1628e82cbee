"""Validity that is correlated with the objective."""

from __future__ import annotations

import copy
from typing import Any

import torch
from ax.generators.torch.botorch_modular.surrogate import Surrogate
from ax.generators.torch_base import TorchOptConfig
from ax.storage.botorch_modular_registry import register_acquisition
from botorch.fit import fit_gpytorch_mll
from botorch.models.model import Model
from gpytorch.likelihoods import BernoulliLikelihood
from gpytorch.means import MultitaskMean
from torch import Tensor

from seqgp.ax.acquisition import ValidAcquisition, validity_of
from seqgp.ax.model import UPDATE_STEPS, AxSequentialGP
from seqgp.likelihoods.traits import is_conjugate
from seqgp.models.correlated_validity import objective_and_validity
from seqgp.variational.elbo import DualELBO


class CorrelatedValidity(Model):
    """A validity model that learns from the values of the objective, too.

    It starts from the hyperparameters of the two models, which are independent.

    Args:
        objective: The model of a Gaussian metric.
        validity: The model of which trials are valid.
    """

    def __init__(self, objective: AxSequentialGP, validity: AxSequentialGP) -> None:
        super().__init__()
        known, tried = objective.observed, validity.observed
        X = torch.cat([known.X, tried.X])
        values = torch.cat([known.Y, torch.full_like(tried.Y, torch.nan)])
        labels = torch.cat([torch.full_like(known.Y, torch.nan), tried.Y])
        self.validity = validity
        self.likelihood = BernoulliLikelihood()
        means = [copy.deepcopy(each.mean_module) for each in (objective, validity)]
        with X.device:
            self.model = objective_and_validity(
                validity.transform_inputs(X),
                torch.cat([values, labels], -1),
                copy.deepcopy(objective.covar_module),
                copy.deepcopy(validity.covar_module),
                self.likelihood,
                mean_module=MultitaskMean(means, num_tasks=2),
                outcome_transform=None,
                learn_inducing_points=False,
            )
        options = {"options": {"maxiter": UPDATE_STEPS}}
        fit_gpytorch_mll(DualELBO(self.model.likelihood, self.model), optimizer_kwargs=options)

    @property
    def num_outputs(self) -> int:
        """One."""
        return 1

    @property
    def batch_shape(self) -> torch.Size:
        """None."""
        return torch.Size()

    def posterior(self, X: Tensor, *args: Any, **kwargs: Any) -> Any:
        """The posterior of the latent function of validity.

        Args:
            X: ``... x q x d`` inputs.
            args: Not used.
            kwargs: Not used.
        """
        return self.model.posterior(self.validity.transform_inputs(X), output_indices=[1])


class CorrelatedAcquisition(ValidAcquisition):
    """`ValidAcquisition` with validity that is correlated with the objective.

    If there is one objective and it is Gaussian. Otherwise it is the same.
    """

    def _validity_of(
        self, surrogate: Surrogate, torch_opt_config: TorchOptConfig
    ) -> tuple[Model | None, Tensor | None]:
        validity, failed = validity_of(surrogate)
        objective = _objective_of(surrogate, torch_opt_config.objective_weights)
        if validity is None or objective is None:
            return validity, failed
        return CorrelatedValidity(objective, validity), failed


def _objective_of(surrogate: Surrogate, weights: Tensor) -> AxSequentialGP | None:
    """The model of the only objective, ``None`` if there are several or it is not Gaussian.

    Args:
        surrogate: The models.
        weights: ``objectives x outcomes`` weights.
    """
    used = weights.reshape(-1, weights.shape[-1]).abs().sum(0).nonzero().flatten().tolist()
    models: Any = getattr(surrogate.model, "models", None)
    if len(used) != 1 or models is None:
        return None
    model = models[used[0]]
    is_gaussian = isinstance(model, AxSequentialGP) and is_conjugate(model.likelihood)
    return model if is_gaussian else None


register_acquisition(CorrelatedAcquisition)

"""Ax's acquisition function, times the probability that a trial is valid."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from ax.core.search_space import SearchSpaceDigest
from ax.generators.torch.botorch_modular.acquisition import Acquisition
from ax.generators.torch.botorch_modular.surrogate import Surrogate
from ax.generators.torch_base import TorchOptConfig
from ax.generators.utils import mk_discrete_choices
from ax.storage.botorch_modular_registry import register_acquisition
from botorch.acquisition.acquisition import AcquisitionFunction
from botorch.acquisition.objective import (
    LinearMCObjective,
    MCAcquisitionObjective,
    PosteriorTransform,
)
from botorch.exceptions.errors import UnsupportedError
from botorch.models.model import Model, ModelList
from botorch.optim.initializers import is_nonnegative
from botorch.sampling.get_sampler import get_sampler
from torch import Tensor

from seqgp.acquisition.validity import log_validity
from seqgp.ax.expected_outcome import ExpectedOutcome
from seqgp.ax.model import AxSequentialGP
from seqgp.ax.transforms import VALIDITY

#: Minimum distance to failed trials, in units of the ranges of the parameters.
CLEARANCE = 1e-3

#: Initial candidates per call of the acquisition function. Few large calls are fastest.
INIT_BATCH_LIMIT = 512

#: Samples of posteriors that are not Gaussian, as many as BoTorch has for multiple objectives.
NUM_SAMPLES = 128

_LEAST = -1e3  # log value at a failed trial: less than any other


class ValidAcquisition(Acquisition):
    """Ax's acquisition, for experiments with failed trials.

    The value of a candidate is multiplied by the probability that it is valid. Failed trials are
    not proposed again. They are not pending, either (Ax considers abandoned trials to be pending).
    Objectives on metrics that are not Gaussian are evaluated by samples.

    Args:
        surrogate: The models.
        search_space_digest: Ax's description of the parameters.
        torch_opt_config: Ax's description of the objective.
        botorch_acqf_class: The acquisition function that Ax has chosen.
        kwargs: Ax's other arguments.
    """

    def __init__(
        self,
        surrogate: Surrogate,
        search_space_digest: SearchSpaceDigest,
        torch_opt_config: TorchOptConfig,
        botorch_acqf_class: type[AcquisitionFunction] | None,
        **kwargs: Any,
    ) -> None:
        self.validity_model, self.failed = self._validity_of(surrogate, torch_opt_config)
        pending = torch_opt_config.pending_observations
        if pending is not None and self.failed is not None:
            pending = [X[~_is_in(X, self.failed)] if X.numel() else X for X in pending]
            torch_opt_config = replace(torch_opt_config, pending_observations=pending)
        super().__init__(
            surrogate=surrogate,
            search_space_digest=search_space_digest,
            torch_opt_config=torch_opt_config,
            botorch_acqf_class=botorch_acqf_class,
            **kwargs,
        )

    def _validity_of(
        self, surrogate: Surrogate, torch_opt_config: TorchOptConfig
    ) -> tuple[Model | None, Tensor | None]:
        """The validity model and the inputs of failed trials, ``None`` if no trial has failed."""
        return validity_of(surrogate)

    def optimize(  # type: ignore[override]
        self,
        n: int,
        search_space_digest: SearchSpaceDigest,
        *,
        fixed_features: dict[int, float] | None = None,
        optimizer_options: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Optimise as Ax does, but avoid failed trials in discrete spaces, too.

        Args:
            n: The number of candidates.
            search_space_digest: Ax's description of the parameters.
            fixed_features: Values of fixed parameters, by index.
            optimizer_options: Options of the optimiser.
            kwargs: As in Ax.
        """
        options = dict(optimizer_options or {})
        choices = mk_discrete_choices(search_space_digest, fixed_features)
        if len(choices) < len(search_space_digest.feature_names):  # not all are discrete
            options["options"] = {
                "init_batch_limit": INIT_BATCH_LIMIT,
                **options.get("options", {}),
            }
        pending = self.X_pending
        if self.failed is not None:
            known = [X for X in (pending, self.failed) if X is not None]
            self.X_pending = torch.cat(known)
        try:
            return super().optimize(
                n,
                search_space_digest,
                fixed_features=fixed_features,
                optimizer_options=options,
                **kwargs,
            )
        finally:
            self.X_pending = pending

    def _construct_botorch_acquisition(
        self,
        botorch_acqf_class: type[AcquisitionFunction],
        botorch_acqf_options: dict[str, Any],
        model: Model,
    ) -> AcquisitionFunction:
        options = dict(botorch_acqf_options)
        if not _is_gaussian(model) and self.X_observed is not None:
            # BoTorch does not always use the sampler that belongs to a kind of posterior.
            posterior: Any = model.posterior(self.X_observed[:1])
            options.setdefault("sampler", get_sampler(posterior, torch.Size([NUM_SAMPLES])))
        acqf = super()._construct_botorch_acquisition(
            botorch_acqf_class=botorch_acqf_class, botorch_acqf_options=options, model=model
        )
        if self.validity_model is None or self.failed is None:
            return acqf
        bounds = (
            torch.tensor(self.search_space_digest.bounds, dtype=torch.double).to(self.failed).mT
        )
        return TimesValidity(acqf, self.validity_model, self.failed, bounds)

    def get_botorch_objective_and_transform(  # type: ignore[override]
        self,
        botorch_acqf_class: type[AcquisitionFunction],
        model: Model,
        objective_weights: Tensor,
        **kwargs: Any,
    ) -> tuple[MCAcquisitionObjective | None, PosteriorTransform | None]:
        """As in Ax, but evaluate objectives by samples if a posterior is not Gaussian.

        Args:
            botorch_acqf_class: The acquisition function that Ax has chosen.
            model: The models of objectives and constraints.
            objective_weights: ``objectives x outcomes`` weights.
            kwargs: As in Ax.
        """
        objective, transform = super().get_botorch_objective_and_transform(
            botorch_acqf_class=botorch_acqf_class,
            model=model,
            objective_weights=objective_weights,
            **kwargs,
        )
        if transform is not None and not _is_gaussian(model):
            return LinearMCObjective(objective_weights.sum(0)), None
        return objective, transform


class TimesValidity(AcquisitionFunction):
    r"""An acquisition function times the probability of validity.

    .. math::
        a(x_1, \dots, x_q) \prod_i p(x_i) \, h(x_i), \qquad
        h(x) = \min_k \left(1 - e^{-|x - x_k|^2 / 2 \epsilon^2}\right),

    or the logarithm of this if :math:`a` is a logarithm. The factor :math:`h` is zero at each
    failed trial :math:`x_k`: a sparse classifier may ignore a single failure, which must not be
    repeated.

    Args:
        acqf: An acquisition function whose values are logarithms or nonnegative.
        validity_model: A model with a Bernoulli likelihood: an `AxSequentialGP`, or one whose
            posterior is on the latent scale.
        failed: ``k x d`` inputs of failed trials.
        bounds: ``2 x d`` bounds of the inputs.
        clearance: :math:`\epsilon`, in units of the range of the bounds.
    """

    lower: Tensor
    ranges: Tensor
    failed: Tensor

    def __init__(
        self,
        acqf: AcquisitionFunction,
        validity_model: Model,
        failed: Tensor,
        bounds: Tensor,
        clearance: float = CLEARANCE,
    ) -> None:
        super().__init__(model=acqf.model)
        self._log = bool(getattr(acqf, "_log", False))
        if not self._log and not is_nonnegative(acqf):
            raise UnsupportedError(
                f"{type(acqf).__name__}: to be multiplied by the probability of validity, the "
                "values of an acquisition function must be logarithms or nonnegative. Choose "
                "another, or failures=() in generation_strategy."
            )
        self.acqf, self.validity_model = acqf, validity_model
        ranges = (bounds[1] - bounds[0]).clamp_min(1e-12)
        self.register_buffer("lower", bounds[0])
        self.register_buffer("ranges", ranges)
        self.register_buffer("failed", (failed - bounds[0]) / ranges)
        self.clearance = clearance

    @property  # type: ignore[override]
    def X_pending(self) -> Tensor | None:
        """Pending points ``m x d`` of the acquisition function."""
        return getattr(self.acqf, "X_pending", None)

    @X_pending.setter
    def X_pending(self, X_pending: Tensor | None) -> None:
        pass  # set by the constructor of the base class

    def set_X_pending(self, X_pending: Tensor | None = None) -> None:
        """Set the pending points of the acquisition function.

        Args:
            X_pending: ``m x d`` inputs.
        """
        self.acqf.set_X_pending(X_pending)

    def forward(self, X: Tensor) -> Tensor:
        """The value at ``b x q x d`` candidates, of shape ``b``."""
        value = self.acqf(X)
        factor = self.log_factor(X).sum(-1)
        return value + factor if self._log else value * factor.exp()

    def log_factor(self, X: Tensor) -> Tensor:
        """The logarithm of the two factors, ``b x q``.

        Args:
            X: ``b x q x d`` candidates.
        """
        difference = ((X - self.lower) / self.ranges).unsqueeze(-2) - self.failed
        square = difference.square().sum(-1).amin(-1) / (2 * self.clearance**2)
        hole = torch.log(-torch.expm1(-square.clamp_min(torch.finfo(X.dtype).tiny)))
        model = self.validity_model
        latent = _Latent(model) if isinstance(model, AxSequentialGP) else model
        return log_validity(latent, X) + hole.clamp_min(_LEAST)


class _Latent(Model):
    """A model whose posterior is on the latent scale."""

    def __init__(self, model: AxSequentialGP) -> None:
        super().__init__()
        self.model = model
        self.likelihood = model.likelihood

    def posterior(self, X: Tensor, *args: Any, **kwargs: Any) -> Any:
        posterior: Any = self.model.posterior(X)
        return posterior.latent


def validity_of(surrogate: Surrogate) -> tuple[AxSequentialGP | None, Tensor | None]:
    """The validity model and the inputs of failed trials, ``None`` if no trial has failed."""
    if VALIDITY not in surrogate.outcomes:
        return None, None
    index = surrogate.outcomes.index(VALIDITY)
    model: Any = surrogate.model
    if isinstance(model, ModelList):
        model = model.models[index]
    assert isinstance(model, AxSequentialGP)
    observed = model.observed
    return model, observed.X[observed.Y.squeeze(-1) < 0.5]


def _is_in(X: Tensor, others: Tensor) -> Tensor:
    """Which of the inputs ``n x d`` are among the others ``k x d``, ``n`` booleans."""
    return (X.unsqueeze(-2) == others).all(-1).any(-1)


def _is_gaussian(model: Model) -> bool:
    """Whether the posteriors of all metrics are Gaussian."""
    models = model.models if isinstance(model, ModelList) else [model]
    transforms = [getattr(each, "outcome_transform", None) for each in models]
    return not any(isinstance(transform, ExpectedOutcome) for transform in transforms)


register_acquisition(ValidAcquisition)

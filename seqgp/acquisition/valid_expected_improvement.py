"""Expected improvement where evaluations can fail; see `seqgp.acquisition.validity`."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from botorch.acquisition.acquisition import AcquisitionFunction

# Not public, but 40 lines of careful numerics. `LogExpectedImprovement`, which is public, calls
# `.to(X)` at each evaluation, and that drops the caches of the model.
from botorch.acquisition.analytic import _log_ei_helper
from botorch.acquisition.logei import TAU_RELU
from botorch.acquisition.monte_carlo import MCAcquisitionFunction
from botorch.acquisition.objective import MCAcquisitionObjective, PosteriorTransform
from botorch.exceptions.errors import UnsupportedError
from botorch.models.model import Model
from botorch.sampling.base import MCSampler
from botorch.sampling.normal import SobolQMCNormalSampler
from botorch.utils.safe_math import log_fatmoid, log_fatplus, log_softplus, logmeanexp
from botorch.utils.transforms import (
    concatenate_pending_points,
    is_ensemble,
    t_batch_mode_transform,
)
from torch import Tensor

from seqgp.acquisition.validity import (
    MIN_VARIANCE,
    NO_VALID_OBSERVATION,
    THRESHOLD,
    LogChances,
    Models,
    NoValidObservationWarning,
    all_hold,
    condition_of,
    flatten_models,
    log_expected_best,
    log_validity,
)
from seqgp.dual.linalg import broadcast_shapes

#: Temperature of the indicator that a sample exceeds the threshold, as in BoTorch.
ETA = 1e-3


class LogValidExpectedImprovement(AcquisitionFunction):
    r"""Logarithm of expected improvement times probability of validity, for a single point.

    .. math::
        \log E[(f(x) - f^*)_+] + \sum_k \log p_k(x)

    Without a valid observation (``best_f=None``) there is no incumbent. Then this is the log
    probability of validity alone, with a `NoValidObservationWarning`.

    Args:
        model: A model of the objective, with a Gaussian posterior. May be ``None`` if ``best_f``
            is ``None``.
        validity_models: One or several validity models, see `seqgp.acquisition.validity`.
        best_f: The best valid observation (`best_valid`), a scalar or a tensor of the batch shape
            of the models.
        posterior_transform: Applied to the posterior of the objective. Required if it has several
            outputs.
        maximize: Whether larger values of the objective are better.
        threshold: The value that a validity model with a Gaussian posterior must exceed, or the
            share of valid trials if it models counts.

    Example:
        >>> import torch
        >>> from gpytorch.likelihoods import BernoulliLikelihood
        >>> from seqgp import SequentialGP
        >>> from seqgp.acquisition import LogValidExpectedImprovement, best_valid
        >>> X = torch.linspace(0, 1, 20, dtype=torch.double).unsqueeze(-1)
        >>> Y, valid = torch.sin(5 * X), X < 0.8
        >>> objective = SequentialGP(X[valid[:, 0]], Y[valid[:, 0]])
        >>> validity = SequentialGP(X, valid.to(X), likelihood=BernoulliLikelihood())
        >>> acqf = LogValidExpectedImprovement(objective, validity, best_valid(Y, valid))
        >>> acqf(torch.rand(5, 1, 1, dtype=torch.double)).shape
        torch.Size([5])
    """

    _log = True
    best_f: Tensor | None

    def __init__(
        self,
        model: Model | None,
        validity_models: Models,
        best_f: float | Tensor | None,
        posterior_transform: PosteriorTransform | None = None,
        maximize: bool = True,
        threshold: float = THRESHOLD,
    ) -> None:
        models = flatten_models(validity_models)
        model = _check_objective(model, best_f, models)
        if best_f is not None and posterior_transform is None and model.num_outputs != 1:
            raise UnsupportedError(
                "posterior_transform: required for an objective with several outputs, to make them "
                "one."
            )
        super().__init__(model=model)
        self.validity_models = torch.nn.ModuleList(models)
        self.posterior_transform = posterior_transform
        self.maximize, self.threshold = maximize, threshold
        self.register_buffer("best_f", _as_buffer(best_f))

    def set_X_pending(self, X_pending: Tensor | None = None) -> None:
        """Not supported.

        Args:
            X_pending: As in BoTorch.
        """
        if X_pending is not None:
            raise UnsupportedError(
                "X_pending: not supported by an acquisition function of a single point; use "
                "fantasy_batch, or qLogValidExpectedImprovement."
            )

    @t_batch_mode_transform(expected_q=1)  # type: ignore[arg-type]
    def forward(self, X: Tensor) -> Tensor:
        """The value at ``b x 1 x d`` candidates, of shape ``b``."""
        models: Any = self.validity_models
        value = log_validity(list(models), X, self.threshold).squeeze(-1)
        if self.best_f is None:
            return value
        posterior: Any = self.model.posterior(X, posterior_transform=self.posterior_transform)
        mean = posterior.mean.squeeze(-1).squeeze(-1)
        sigma = posterior.variance.clamp_min(MIN_VARIANCE).sqrt().squeeze(-1).squeeze(-1)
        gain = mean - self.best_f.to(mean) if self.maximize else self.best_f.to(mean) - mean
        log_improvement = _log_ei_helper(gain / sigma) + sigma.log()
        if is_ensemble(self.model):
            log_improvement = logmeanexp(log_improvement, dim=-1)
        return log_improvement + value


class qLogValidExpectedImprovement(MCAcquisitionFunction):
    r"""Logarithm of the expected improvement by a batch of ``q`` points that can fail.

    .. math::
        \log E_{f, g} \, E_v \Big[ \max_i v_i \, (f(x_i) - f^*)_+ \Big]

    The outer expectation is over joint samples of objective and validity at all points. Given
    these, the labels are integrated out exactly (`log_expected_best`). So two points that would
    fail together are worth less than two that would not. Without a valid observation
    (``best_f=None``) this is the log probability that at least one of the points is valid, with a
    `NoValidObservationWarning`.

    Args:
        model: A model of the objective. May be ``None`` if ``best_f`` is ``None``.
        validity_models: One or several validity models, see `seqgp.acquisition.validity`.
        best_f: The best valid observation (`best_valid`).
        sampler: Draws samples of the objective. By default a `SobolQMCNormalSampler` of 512.
        objective: A function of the outputs of ``model``, as in BoTorch.
        posterior_transform: Applied to the posterior of the objective, as in BoTorch.
        X_pending: ``m x d`` points that are being evaluated. They are part of every batch.
        threshold: The value that a validity model with a Gaussian posterior must exceed, or the
            share of valid trials if it models counts.
        eta: Temperature of the indicator that a sample exceeds the threshold.
        fat: Whether the improvement is smoothed with fat tails, as in BoTorch.
        tau_relu: Temperature of the smoothed improvement.

    Example:
        >>> import torch
        >>> from gpytorch.likelihoods import BernoulliLikelihood
        >>> from seqgp import SequentialGP
        >>> from seqgp.acquisition import best_valid, qLogValidExpectedImprovement
        >>> X = torch.linspace(0, 1, 20, dtype=torch.double).unsqueeze(-1)
        >>> Y, valid = torch.sin(5 * X), X < 0.8
        >>> objective = SequentialGP(X[valid[:, 0]], Y[valid[:, 0]])
        >>> validity = SequentialGP(X, valid.to(X), likelihood=BernoulliLikelihood())
        >>> acqf = qLogValidExpectedImprovement(objective, validity, best_valid(Y, valid))
        >>> acqf(torch.rand(5, 3, 1, dtype=torch.double)).shape
        torch.Size([5])
    """

    _log = True
    best_f: Tensor | None
    sampler: MCSampler

    def __init__(
        self,
        model: Model | None,
        validity_models: Models,
        best_f: float | Tensor | None,
        sampler: MCSampler | None = None,
        objective: MCAcquisitionObjective | None = None,
        posterior_transform: PosteriorTransform | None = None,
        X_pending: Tensor | None = None,
        threshold: float = THRESHOLD,
        eta: float = ETA,
        fat: bool = True,
        tau_relu: float = TAU_RELU,
    ) -> None:
        models = flatten_models(validity_models)
        if sampler is None:
            sampler = SobolQMCNormalSampler(sample_shape=torch.Size([512]), seed=0)
        model = _check_objective(model, best_f, models)
        if best_f is None:
            # Only its shape is used.
            objective = objective or _FirstOutput()
        super().__init__(
            model=model,
            sampler=sampler,
            objective=objective,
            posterior_transform=posterior_transform,
            X_pending=X_pending,
        )
        if any(is_ensemble(model) for model in models):
            raise UnsupportedError(
                "validity_models: ensembles are supported by LogValidExpectedImprovement only."
            )
        self.validity_models = torch.nn.ModuleList(models)
        self.threshold, self.eta = threshold, eta
        self.fat, self.tau_relu = fat, tau_relu
        self.register_buffer("best_f", _as_buffer(best_f))
        seed = getattr(sampler, "seed", None) or 0
        self.validity_samplers = torch.nn.ModuleList(
            SobolQMCNormalSampler(sample_shape=sampler.sample_shape, seed=seed + k)
            for k in range(1, len(models) + 1)
        )
        # Two quasi-random sequences are correlated, whatever their seeds: shuffle the samples of
        # each model.
        number = sampler.sample_shape.numel()
        generator = torch.Generator().manual_seed(seed)
        self.orders = [
            torch.randperm(number, generator=generator, device="cpu") for _ in range(len(models))
        ]

    @concatenate_pending_points
    @t_batch_mode_transform()  # type: ignore[arg-type]
    def forward(self, X: Tensor) -> Tensor:
        """The value at ``b x q x d`` candidates, of shape ``b``."""
        chances = self._chances(X)
        if self.best_f is None:
            log_improvement = torch.zeros_like(chances.valid)
        else:
            _, values = self._get_samples_and_objectives(X)
            best_f = self.best_f.to(values).unsqueeze(-1)
            smooth = log_fatplus if self.fat else log_softplus
            log_improvement = smooth(values - best_f, tau=self.tau_relu)
            if is_ensemble(self.model):
                chances = LogChances(*(part.unsqueeze(-2) for part in chances))
        # Only one of the two may have the batch shape of the models.
        shape = broadcast_shapes(log_improvement.shape, chances.valid.shape)
        value = log_expected_best(log_improvement.expand(shape), chances)
        dim = tuple(range(len(self.sample_shape)))
        if self.best_f is not None and is_ensemble(self.model):
            dim = (*dim, -1)
        return logmeanexp(value, dim=dim)

    def _chances(self, X: Tensor) -> LogChances:
        """Log probabilities that all conditions hold, ``sample_shape x b x q``."""
        valid: list[Tensor] = []
        invalid: list[Tensor] = []
        models: Any = self.validity_models
        for model, sampler, order in zip(models, self.validity_samplers, self.orders, strict=True):
            samples = sampler(model.posterior(X))
            flat = samples.reshape(len(order), *samples.shape[len(self.sample_shape) :])
            g = flat[order.to(samples.device)].reshape(samples.shape)
            level, noise = condition_of(model, self.threshold)
            if noise:
                scaled = (g - level) / noise**0.5
                parts = LogChances(torch.special.log_ndtr(scaled), torch.special.log_ndtr(-scaled))
            else:
                scaled = (g - level) / self.eta
                parts = LogChances(log_fatmoid(scaled), log_fatmoid(-scaled))
            valid += parts.valid.unbind(-1)
            invalid += parts.invalid.unbind(-1)
        return all_hold(valid, invalid)


class _FirstOutput(MCAcquisitionObjective):
    """A placeholder while there is no model of the objective."""

    def forward(self, samples: Tensor, X: Tensor | None = None) -> Tensor:
        return samples[..., 0]


def _check_objective(
    model: Model | None, best_f: float | Tensor | None, validity_models: list[Model]
) -> Model:
    """Return the model of the objective, or a placeholder if there is no valid observation."""
    if best_f is None:
        warnings.warn(NO_VALID_OBSERVATION, NoValidObservationWarning, stacklevel=3)
        return validity_models[0]
    if model is None:
        raise ValueError("model: expected a model of the objective, since best_f is given.")
    return model


def _as_buffer(best_f: float | Tensor | None) -> Tensor | None:
    # A scalar on the CPU can be combined with tensors on any device.
    if best_f is None or isinstance(best_f, Tensor):
        return best_f
    return torch.tensor(best_f, dtype=torch.float64, device="cpu")

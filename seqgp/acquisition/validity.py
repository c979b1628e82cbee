r"""Expected improvement where evaluations can fail.

An evaluation at :math:`x` is valid with probability :math:`p(x)` and has a value :math:`f(x)` only
then: what one can expect of it is :math:`p(x) \, E[(f(x) - f^*)_+]`, with :math:`f^*` the best
*valid* observation so far. The model of the objective learns from valid evaluations, that of
validity from all.

A **validity model** is any BoTorch model. Several of them, or several outputs of one, are
conditions that must all hold, independently of each other.

* With a `BernoulliLikelihood` (labels 1 for valid, 0 for failed), and latent values
  :math:`g(x) \sim N(m, v)`, :math:`p(x) = E[\Phi(g(x))] = \Phi(m / \sqrt{1 + v})`.
* With a `BinomialLikelihood` (how many of several trials were valid), valid is where more than a
  share :math:`t` of them is to be expected, :math:`p(x) = P(F(g(x)) > t) = \Phi((m - F^{-1}(t)) /
  \sqrt v)`.
* Any other has a Gaussian posterior, of labels 0 and 1 or of a constraint that is measured. Valid
  is what exceeds a threshold: :math:`p(x) = P(g(x) > t) = \Phi((m - t) / \sqrt v)`, as in BoTorch's
  `LogConstrainedExpectedImprovement`.

All of these are :math:`P(g(x) + \epsilon > \ell)` for some level and some noise
:math:`\epsilon \sim N(0, s)`: :math:`\Phi(g) = P(g + \epsilon > 0)` with :math:`s = 1`.

BoTorch's own way to a classifier, ``constraints=[...]`` with ``fat=[None]``, is not used: for
`qLogNoisyExpectedImprovement` it takes no observation for valid, and so inflates the improvement.

Everything is in logarithms, by `log_ndtr` and BoTorch's log-EI: nothing underflows, and gradients
point somewhere also where little is to be gained.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from botorch.acquisition.acquisition import AcquisitionFunction

# Not public, but 40 lines of careful numerics. `LogExpectedImprovement`, which is public, calls
# `.to(X)` at each evaluation, and that drops the caches of the model.
from botorch.acquisition.analytic import _log_ei_helper
from botorch.acquisition.logei import TAU_RELU
from botorch.acquisition.monte_carlo import MCAcquisitionFunction
from botorch.acquisition.objective import MCAcquisitionObjective, PosteriorTransform
from botorch.exceptions.errors import UnsupportedError
from botorch.models.model import Model, ModelList
from botorch.sampling.base import MCSampler
from botorch.sampling.normal import SobolQMCNormalSampler
from botorch.utils.safe_math import (
    log_fatmoid,
    log_fatplus,
    log_softplus,
    logmeanexp,
    logsumexp,
)
from botorch.utils.transforms import (
    concatenate_pending_points,
    is_ensemble,
    t_batch_mode_transform,
)
from gpytorch.likelihoods import BernoulliLikelihood

# The only class that all Gaussian likelihoods of GPyTorch and BoTorch have in common.
from gpytorch.likelihoods.gaussian_likelihood import _GaussianLikelihoodBase
from torch import Tensor

from seqgp.acquisition.uncertainty import link_of, nugget_of
from seqgp.likelihoods.discrete import BinomialLikelihood

#: Labels are 0 and 1: a Gaussian model of them is above this where it takes a point for valid.
THRESHOLD = 0.5

#: As in BoTorch, of the indicator that a sample exceeds the threshold.
ETA = 1e-3

_MIN_VARIANCE = 1e-12  # as in BoTorch's analytic acquisition functions

Models = Model | Sequence[Model]


#: What that warning says.
NO_VALID_OBSERVATION = (
    "There is no valid observation yet: maximising the probability of validity instead of an "
    "improvement."
)


class NoValidObservationWarning(UserWarning):
    """There is nothing to improve on yet: validity itself is what is maximised."""


class LogChances(NamedTuple):
    """Log-probabilities of a point to be valid and to be not."""

    valid: Tensor
    invalid: Tensor


def best_valid(Y: Tensor, valid: Tensor, maximize: bool = True) -> Tensor | None:
    """The best valid observation.

    Args:
        Y: ``n x 1`` or ``n`` observations. Those of failed evaluations do not matter, NaN or not.
        valid: As many labels: nonzero or true for valid.
        maximize: Whether the best is the largest.

    Returns:
        A scalar, or ``None`` if there is none.

    Example:
        >>> import torch
        >>> from seqgp.acquisition import best_valid
        >>> best_valid(torch.tensor([1.0, 3.0, torch.nan]), torch.tensor([1, 0, 0]))
        tensor(1.)
    """
    if Y.numel() != valid.numel():
        raise ValueError(
            f"valid: expected a label for each of {Y.numel()} observations, got {valid.numel()}."
        )
    values = Y.flatten()[valid.flatten().bool()]
    if values.isnan().any():
        raise ValueError("Y: an observation that is labelled as valid is NaN.")
    if not len(values):
        return None
    return values.max() if maximize else values.min()


def log_validity(models: Models, X: Tensor, threshold: float = THRESHOLD) -> Tensor:
    r"""Log-probability that evaluations are valid, each by itself.

    Args:
        models: Validity models, see `seqgp.acquisition.validity`.
        X: ``... x q x d`` inputs.
        threshold: What a model with a Gaussian posterior has to exceed, and the share of trials
            that one of counts has to.

    Returns:
        ``... x q``, with the batch shapes of the models broadcast.

    Example:
        >>> import torch
        >>> from gpytorch.likelihoods import BernoulliLikelihood
        >>> from seqgp import SequentialGP
        >>> from seqgp.acquisition import log_validity
        >>> X = torch.linspace(0, 1, 20, dtype=torch.double).unsqueeze(-1)
        >>> model = SequentialGP(X, (X > 0.5).to(X), likelihood=BernoulliLikelihood())
        >>> (log_validity(model, X) > -0.7).equal(X.squeeze(-1) > 0.5)
        True
    """
    total: Tensor | float = 0.0
    for model in _flatten(models):
        posterior: Any = model.posterior(X)
        mean, variance = posterior.mean, posterior.variance
        level, noise = _condition(model, threshold)
        scaled = (mean - level) / (variance + noise).clamp_min(_MIN_VARIANCE).sqrt()
        log_probability = torch.special.log_ndtr(scaled).sum(-1)
        if is_ensemble(model):
            log_probability = logmeanexp(log_probability, dim=-2)
        total = total + log_probability
    assert isinstance(total, Tensor)
    return total


def log_expected_best(log_values: Tensor, chances: LogChances) -> Tensor:
    r"""Expected best of ``q`` positive values, each of which counts only if its point is valid.

    Given the values :math:`a_1 \ge \dots \ge a_q` in order, the best is that of the first valid
    point,

    .. math::
        E[\max_i v_i a_i] = \sum_i a_i \, p_i \prod_{j < i} (1 - p_j),

    which has no maximum to be smoothed and, unless all points are valid for sure, a gradient for
    each of them.

    Args:
        log_values: ``... x q`` values :math:`\log a_i`, in any order.
        chances: ``... x q`` log-probabilities :math:`\log p_i` and :math:`\log (1 - p_i)`.

    Returns:
        ``...``, the logarithm of the expectation.
    """
    log_values, order = log_values.sort(dim=-1, descending=True)
    valid, invalid = (part.expand_as(order).gather(-1, order) for part in chances)
    none_before = torch.nn.functional.pad(invalid[..., :-1], (1, 0)).cumsum(-1)
    return logsumexp(log_values + valid + none_before, dim=-1)


class LogValidExpectedImprovement(AcquisitionFunction):
    r"""Logarithm of expected improvement times probability of validity, for one point.

    .. math::
        \log E[(f(x) - f^*)_+] + \sum_k \log p_k(x)

    With no valid observation yet (``best_f=None``) there is nothing to improve on: then it is the
    probability of validity alone, and a `NoValidObservationWarning` says so.

    Args:
        model: A model of the objective, with a Gaussian posterior. May be ``None`` if ``best_f``
            is.
        validity_models: One or several, see `seqgp.acquisition.validity`.
        best_f: The best valid observation (`best_valid`), a scalar or a tensor of the models'
            batch shape.
        posterior_transform: For the objective; required if it has several outputs.
        maximize: Whether larger values of the objective are better.
        threshold: What validity models with a Gaussian posterior have to exceed, and the share of
            trials that those of counts have to.

    Example:
        >>> import torch
        >>> from botorch.models.transforms import Standardize
        >>> from gpytorch.likelihoods import BernoulliLikelihood
        >>> from seqgp import SequentialGP
        >>> from seqgp.acquisition import LogValidExpectedImprovement, best_valid
        >>> X = torch.linspace(0, 1, 20, dtype=torch.double).unsqueeze(-1)
        >>> Y, valid = torch.sin(5 * X), X < 0.8
        >>> scale = Standardize(1)
        >>> objective = SequentialGP(X[valid[:, 0]], Y[valid[:, 0]], outcome_transform=scale)
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
        models = _flatten(validity_models)
        model = _check_objective(model, best_f, models)
        if best_f is not None and posterior_transform is None and model.num_outputs != 1:
            raise UnsupportedError(
                "posterior_transform: an objective with several outputs needs one that makes one "
                "of them."
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
                "X_pending: this function is of one point; use fantasy_batch, or "
                "qLogValidExpectedImprovement."
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
        sigma = posterior.variance.clamp_min(_MIN_VARIANCE).sqrt().squeeze(-1).squeeze(-1)
        gain = mean - self.best_f.to(mean) if self.maximize else self.best_f.to(mean) - mean
        log_improvement = _log_ei_helper(gain / sigma) + sigma.log()
        if is_ensemble(self.model):
            log_improvement = logmeanexp(log_improvement, dim=-1)
        return log_improvement + value


class qLogValidExpectedImprovement(MCAcquisitionFunction):
    r"""Logarithm of the expected improvement by a batch of ``q`` points that can fail.

    .. math::
        \log E_{f, g} \, E_v \Big[ \max_i v_i \, (f(x_i) - f^*)_+ \Big]

    over joint samples of objective and validity at all points; whether they are valid is then
    integrated out exactly (`log_expected_best`). Two points that would fail together are so worth
    less than two that would not. With no valid observation yet (``best_f=None``) it is the
    probability that at least one of the points is valid, and a `NoValidObservationWarning` says so.

    Args:
        model: A model of the objective. May be ``None`` if ``best_f`` is.
        validity_models: One or several, see `seqgp.acquisition.validity`.
        best_f: The best valid observation (`best_valid`).
        sampler: Draws samples of the objective; by default 512 of a `SobolQMCNormalSampler`.
        objective: A function of the outputs of ``model``, as in BoTorch.
        posterior_transform: For the objective, as in BoTorch.
        X_pending: ``m x d`` points that are being evaluated: points of the batch that are given.
        threshold: What validity models with a Gaussian posterior have to exceed, and the share of
            trials that those of counts have to.
        eta: Temperature of the indicator that a sample of theirs does.
        fat: Whether the improvement is smoothed with fat tails, as in BoTorch.
        tau_relu: Temperature of the improvement's smoothing.

    Example:
        >>> import torch
        >>> from botorch.models.transforms import Standardize
        >>> from gpytorch.likelihoods import BernoulliLikelihood
        >>> from seqgp import SequentialGP
        >>> from seqgp.acquisition import best_valid, qLogValidExpectedImprovement
        >>> X = torch.linspace(0, 1, 20, dtype=torch.double).unsqueeze(-1)
        >>> Y, valid = torch.sin(5 * X), X < 0.8
        >>> scale = Standardize(1)
        >>> objective = SequentialGP(X[valid[:, 0]], Y[valid[:, 0]], outcome_transform=scale)
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
        models = _flatten(validity_models)
        if sampler is None:
            sampler = SobolQMCNormalSampler(sample_shape=torch.Size([512]), seed=0)
        model = _check_objective(model, best_f, models)
        if best_f is None:
            # Only shapes of it are asked for.
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
                "validity_models: an ensemble of them is supported by "
                "LogValidExpectedImprovement only."
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
        # Two quasi-random sequences agree in their leading digits, whatever their seeds: put the
        # samples of each model into an order of its own.
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
        # Of batches of models, not all may be there in both: sort what is.
        shape = torch.broadcast_shapes(log_improvement.shape, chances.valid.shape)
        value = log_expected_best(log_improvement.expand(shape), chances)
        dim = tuple(range(len(self.sample_shape)))
        if self.best_f is not None and is_ensemble(self.model):
            dim = (*dim, -1)
        return logmeanexp(value, dim=dim)

    def _chances(self, X: Tensor) -> LogChances:
        """Of all conditions to hold, ``sample_shape x b x q``."""
        valid: list[Tensor] = []
        invalid: list[Tensor] = []
        models: Any = self.validity_models
        for model, sampler, order in zip(models, self.validity_samplers, self.orders, strict=True):
            samples = sampler(model.posterior(X))
            flat = samples.reshape(len(order), *samples.shape[len(self.sample_shape) :])
            g = flat[order.to(samples.device)].reshape(samples.shape)
            level, noise = _condition(model, self.threshold)
            if noise:
                scaled = (g - level) / noise**0.5
                parts = LogChances(torch.special.log_ndtr(scaled), torch.special.log_ndtr(-scaled))
            else:
                scaled = (g - level) / self.eta
                parts = LogChances(log_fatmoid(scaled), log_fatmoid(-scaled))
            valid += parts.valid.unbind(-1)
            invalid += parts.invalid.unbind(-1)
        return _all_hold(valid, invalid)


class _FirstOutput(MCAcquisitionObjective):
    """Stands in for an objective that there is no model of yet."""

    def forward(self, samples: Tensor, X: Tensor | None = None) -> Tensor:
        return samples[..., 0]


def _all_hold(valid: Sequence[Tensor], invalid: Sequence[Tensor]) -> LogChances:
    """Log-probabilities that all of some independent conditions hold, and that not all do.

    Not all of them do if one is the first that does not.
    """
    all_valid, terms = torch.zeros_like(valid[0]), []
    for holds, fails in zip(valid, invalid, strict=True):
        terms.append(all_valid + fails)
        all_valid = all_valid + holds
    return LogChances(all_valid, logsumexp(torch.stack(terms, -1), dim=-1))


def _flatten(models: Models) -> list[Model]:
    """The models of a list, and of model lists in it; raises for what is no validity model."""

    def visit(models: Any) -> Iterator[Model]:
        if isinstance(models, ModelList):
            yield from models.models  # type: ignore[misc]
        elif isinstance(models, Model):
            yield models
        else:
            for model in models:
                yield from visit(model)

    result = list(visit(models))
    if not result:
        raise ValueError("validity_models: expected at least one model.")
    for model in result:
        _condition(model, THRESHOLD)
    return result


class _Condition(NamedTuple):
    """That a latent value plus Gaussian noise exceeds a level.

    Attributes:
        level: The level.
        noise: The variance of the noise.
    """

    level: float
    noise: float


def _condition(model: Model | torch.nn.Module, threshold: float) -> _Condition:
    """What the latent function of a validity model is to fulfil."""
    likelihood = getattr(model, "likelihood", None)
    if likelihood is None or isinstance(likelihood, _GaussianLikelihoodBase):
        return _Condition(threshold, 0.0)
    if isinstance(likelihood, BernoulliLikelihood):
        return _Condition(0.0, 1.0)
    if isinstance(likelihood, BinomialLikelihood):
        share = torch.tensor(threshold, dtype=torch.float64, device="cpu")
        level = link_of(likelihood).inverse(share)
        if not level.isfinite():
            raise ValueError(f"threshold: expected a share of trials below 1, got {threshold}.")
        noise = torch.as_tensor(nugget_of(likelihood)).detach()
        return _Condition(float(level), float(noise))
    raise UnsupportedError(
        "validity_models: expected a BernoulliLikelihood (labels 0 and 1), a BinomialLikelihood "
        f"(counts) or a Gaussian one, got {type(likelihood).__name__}."
    )


def takes_for_valid(
    model: Model | torch.nn.Module, observed: Tensor, threshold: float = THRESHOLD
) -> Tensor:
    """Which observations of a validity model are those of valid points.

    Args:
        model: The validity model.
        observed: ``... x m`` observations: labels, counts or real values.
        threshold: What labels and values have to exceed, and the share of trials that counts do.

    Returns:
        Booleans of the same shape.
    """
    likelihood = getattr(model, "likelihood", None)
    if not isinstance(likelihood, BinomialLikelihood):
        return observed > threshold
    total = likelihood.total_count
    if total is None or total.numel() > 1:
        raise UnsupportedError(
            "validity_models: of counts, the likelihood is to know one total for all, as in "
            "BinomialLikelihood(total_count=5)."
        )
    return observed > threshold * total.to(observed)


def _check_objective(
    model: Model | None, best_f: float | Tensor | None, validity_models: list[Model]
) -> Model:
    """The model of the objective, or one that stands in for it while there is none."""
    if best_f is None:
        warnings.warn(NO_VALID_OBSERVATION, NoValidObservationWarning, stacklevel=3)
        return validity_models[0]
    if model is None:
        raise ValueError("model: expected a model of the objective, as there is a best_f.")
    return model


def _as_buffer(best_f: float | Tensor | None) -> Tensor | None:
    # A number is kept on the CPU, from where it can be combined with any device.
    if best_f is None or isinstance(best_f, Tensor):
        return best_f
    return torch.tensor(best_f, dtype=torch.float64, device="cpu")

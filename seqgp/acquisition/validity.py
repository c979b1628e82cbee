r"""Expected improvement where evaluations can fail.

An evaluation at :math:`x` is valid with probability :math:`p(x)`, and has a value :math:`f(x)` only
if it is. Its expected improvement is :math:`p(x) \, E[(f(x) - f^*)_+]`, where :math:`f^*` is the
best *valid* observation so far. The model of the objective learns from valid evaluations, the
validity model from all evaluations.

A **validity model** is any BoTorch model. Several validity models, or several outputs of one, are
independent conditions that must all hold.

* With a `BernoulliLikelihood` (labels 1 for valid, 0 for failed) and latent values
  :math:`g(x) \sim N(m, v)`, :math:`p(x) = E[\Phi(g(x))] = \Phi(m / \sqrt{1 + v})`.
* With a `BinomialLikelihood` (the number of valid trials out of several), an evaluation is valid if
  the expected share of valid trials is more than :math:`t`: :math:`p(x) = P(F(g(x)) > t) =
  \Phi((m - F^{-1}(t)) / \sqrt v)`.
* Any other validity model has a Gaussian posterior, of labels 0 and 1 or of a measured constraint.
  An evaluation is valid if it exceeds a threshold: :math:`p(x) = P(g(x) > t) =
  \Phi((m - t) / \sqrt v)`, as in BoTorch's `LogConstrainedExpectedImprovement`.

All of these are :math:`P(g(x) + \epsilon > \ell)` for some level :math:`\ell` and some noise
:math:`\epsilon \sim N(0, s)`. For example, :math:`\Phi(g) = P(g + \epsilon > 0)` with
:math:`s = 1`.

BoTorch's own support for classifiers, ``constraints=[...]`` with ``fat=[None]``, is not used: with
it, `qLogNoisyExpectedImprovement` considers no observation to be valid, and so overestimates the
improvement.

Everything is computed in logarithms, by `log_ndtr` and BoTorch's log-EI. Nothing underflows, and
gradients do not vanish where little improvement is expected.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from botorch.exceptions.errors import UnsupportedError
from botorch.models.model import Model, ModelList
from botorch.utils.safe_math import logmeanexp, logsumexp
from botorch.utils.transforms import is_ensemble
from gpytorch.likelihoods import BernoulliLikelihood, Likelihood

# The only class that all Gaussian likelihoods of GPyTorch and BoTorch have in common.
from gpytorch.likelihoods.gaussian_likelihood import _GaussianLikelihoodBase
from torch import Tensor

from seqgp.acquisition.uncertainty import link_of, nugget_of
from seqgp.likelihoods.discrete import BinomialLikelihood

#: Default threshold of validity, halfway between the labels 0 and 1.
THRESHOLD = 0.5

#: Smallest variance, as in BoTorch's analytic acquisition functions.
MIN_VARIANCE = 1e-12

Models = Model | Sequence[Model]

#: The message of a `NoValidObservationWarning`.
NO_VALID_OBSERVATION = (
    "There is no valid observation yet: maximising the probability of validity instead of the "
    "improvement."
)


class NoValidObservationWarning(UserWarning):
    """There is no valid observation yet, so the probability of validity is maximised."""


class LogChances(NamedTuple):
    """Log probabilities that a point is valid, and that it is not."""

    valid: Tensor
    invalid: Tensor


def best_valid(Y: Tensor, valid: Tensor, maximize: bool = True) -> Tensor | None:
    """Return the best valid observation.

    Args:
        Y: ``n x 1`` or ``n`` observations. Those of failed evaluations are ignored and may be NaN.
        valid: As many labels, nonzero or true for valid.
        maximize: Whether the best observation is the largest one.

    Returns:
        A scalar, or ``None`` if no observation is valid.

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
        raise ValueError("Y: an observation that is labelled valid is NaN.")
    if not len(values):
        return None
    return values.max() if maximize else values.min()


def log_validity(models: Models, X: Tensor, threshold: float = THRESHOLD) -> Tensor:
    r"""Log probability that evaluations are valid, for each input separately.

    Args:
        models: Validity models, see `seqgp.acquisition.validity`.
        X: ``... x q x d`` inputs.
        threshold: The value that a validity model with a Gaussian posterior must exceed, or the
            share of valid trials if it models counts.

    Returns:
        ``... x q``, with the batch shapes of the models broadcast.

    Example:
        >>> import torch
        >>> from gpytorch.likelihoods import BernoulliLikelihood, Likelihood
        >>> from seqgp import SequentialGP
        >>> from seqgp.acquisition import log_validity
        >>> X = torch.linspace(0, 1, 20, dtype=torch.double).unsqueeze(-1)
        >>> model = SequentialGP(X, (X > 0.5).to(X), likelihood=BernoulliLikelihood())
        >>> (log_validity(model, X) > -0.7).equal(X.squeeze(-1) > 0.5)
        True
    """
    total: Tensor | float = 0.0
    for model in flatten_models(models):
        posterior: Any = model.posterior(X)
        mean, variance = posterior.mean, posterior.variance
        level, noise = condition_of(model, threshold)
        scaled = (mean - level) / (variance + noise).clamp_min(MIN_VARIANCE).sqrt()
        log_probability = torch.special.log_ndtr(scaled).sum(-1)
        if is_ensemble(model):
            log_probability = logmeanexp(log_probability, dim=-2)
        total = total + log_probability
    assert isinstance(total, Tensor)
    return total


def log_expected_best(log_values: Tensor, chances: LogChances) -> Tensor:
    r"""Log expectation of the best of ``q`` positive values that only count if they are valid.

    If the values are sorted, :math:`a_1 \ge \dots \ge a_q`, the best is the first valid one:

    .. math::
        E[\max_i v_i a_i] = \sum_i a_i \, p_i \prod_{j < i} (1 - p_j).

    There is no maximum to be smoothed. Unless all points are certain to be valid, each of them has
    a gradient.

    Args:
        log_values: ``... x q`` values :math:`\log a_i`, in any order.
        chances: ``... x q`` log probabilities :math:`\log p_i` and :math:`\log (1 - p_i)`.

    Returns:
        ``...``, the logarithm of the expectation.
    """
    log_values, order = log_values.sort(dim=-1, descending=True)
    valid, invalid = (part.expand_as(order).gather(-1, order) for part in chances)
    none_before = torch.nn.functional.pad(invalid[..., :-1], (1, 0)).cumsum(-1)
    return logsumexp(log_values + valid + none_before, dim=-1)


def flatten_models(models: Models) -> list[Model]:
    """Return all models of (nested) lists. Raise if one of them is not a validity model."""

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
        condition_of(model, THRESHOLD)
    return result


class Condition(NamedTuple):
    """The condition that a latent value plus Gaussian noise exceeds a level.

    Attributes:
        level: The level.
        noise: The variance of the noise.
    """

    level: float
    noise: float


def likelihood_of(model: Model | torch.nn.Module) -> Likelihood | None:
    """Return the likelihood of the outputs of a model's posterior, ``None`` if it is unknown.

    For a `SequentialMultiTaskGP` with one output task, it is the likelihood of that task.

    Args:
        model: The model.
    """
    return getattr(model, "output_likelihood", getattr(model, "likelihood", None))


def condition_of(model: Model | torch.nn.Module, threshold: float) -> Condition:
    """Return the condition on the latent function of a validity model."""
    likelihood = likelihood_of(model)
    if likelihood is None or isinstance(likelihood, _GaussianLikelihoodBase):
        return Condition(threshold, 0.0)
    if isinstance(likelihood, BernoulliLikelihood):
        return Condition(0.0, 1.0)
    if isinstance(likelihood, BinomialLikelihood):
        share = torch.tensor(threshold, dtype=torch.float64, device="cpu")
        level = link_of(likelihood).inverse(share)
        if not level.isfinite():
            raise ValueError(f"threshold: expected a share of trials below 1, got {threshold}.")
        noise = torch.as_tensor(nugget_of(likelihood)).detach()
        return Condition(float(level), float(noise))
    raise UnsupportedError(
        "validity_models: expected a BernoulliLikelihood (labels 0 and 1), a BinomialLikelihood "
        f"(counts) or a Gaussian one, got {type(likelihood).__name__}."
    )


def takes_for_valid(
    model: Model | torch.nn.Module, observed: Tensor, threshold: float = THRESHOLD
) -> Tensor:
    """Return which observations of a validity model count as valid.

    Args:
        model: The validity model.
        observed: ``... x m`` observations: labels, counts or real values.
        threshold: The value that labels and real values must exceed, or the share of valid trials
            if the observations are counts.

    Returns:
        ``... x m`` booleans.
    """
    likelihood = likelihood_of(model)
    if not isinstance(likelihood, BinomialLikelihood):
        return observed > threshold
    total = likelihood.total_count
    if total is None or total.numel() > 1:
        raise UnsupportedError(
            "validity_models: for counts, the likelihood must have one total for all observations, "
            "as in BinomialLikelihood(total_count=5)."
        )
    return observed > threshold * total.to(observed)


def all_hold(valid: Sequence[Tensor], invalid: Sequence[Tensor]) -> LogChances:
    """Log probabilities that all of several independent conditions hold, and that not all do.

    The latter is the sum over conditions of the probability that it is the first one to fail.

    Args:
        valid: Log probabilities that the conditions hold, each of shape ``...``.
        invalid: Log probabilities that they do not.
    """
    all_valid, terms = torch.zeros_like(valid[0]), []
    for holds, fails in zip(valid, invalid, strict=True):
        terms.append(all_valid + fails)
        all_valid = all_valid + holds
    return LogChances(all_valid, logsumexp(torch.stack(terms, -1), dim=-1))

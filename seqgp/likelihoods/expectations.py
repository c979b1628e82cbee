r"""Expected log probabilities of observations and their derivatives, for any likelihood.

Shapes: targets are ``... x n``. Means and variances are ``... x n`` for one latent function and
``... x n x c`` for ``c`` of them (the shape of GPyTorch's multitask distributions).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import singledispatch
from typing import Any

import torch
from botorch.models.likelihoods.sparse_outlier_noise import SparseOutlierGaussianLikelihood
from gpytorch import settings
from gpytorch.distributions import MultivariateNormal
from gpytorch.likelihoods import (
    BernoulliLikelihood,
    FixedNoiseGaussianLikelihood,
    GaussianLikelihood,
    GaussianLikelihoodWithMissingObs,
    LaplaceLikelihood,
    Likelihood,
    NegativeBinomialLikelihood,
    PoissonLikelihood,
)
from linear_operator.operators import DiagLinearOperator
from torch import Tensor

from seqgp.dual.linalg import broadcast_shapes
from seqgp.dual.sites import Expectations
from seqgp.likelihoods.continuous import GammaLikelihood
from seqgp.likelihoods.discrete import BinomialLikelihood, OverdispersedBinomialLikelihood
from seqgp.likelihoods.logit_normal_binomial import log_prob_and_slope
from seqgp.likelihoods.psychometric import PsychometricLikelihood
from seqgp.likelihoods.quadrature import (
    NUM_BASE_SAMPLES,
    OneDimensionalLikelihood,
    base_samples,
    likelihood_nodes,
)
from seqgp.likelihoods.traits import has_one_latent, observation_noise


def rule_for(
    function: Any, *kinds: type[Likelihood]
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a rule for classes of likelihoods, but not for subclasses that override `forward`.

    A subclass with its own `forward`, for example with another link, is another likelihood. It gets
    the generic rule, or a rule registered for itself.

    Args:
        function: A `singledispatch` function.
        kinds: The classes of likelihoods.
    """

    def register(rule: Callable[..., Any]) -> Callable[..., Any]:
        for kind in kinds:

            def guarded(
                likelihood: Likelihood, *args: Any, _kind: Any = kind, **kwargs: Any
            ) -> Any:
                same = type(likelihood).forward is _kind.forward
                return (rule if same else function.dispatch(object))(likelihood, *args, **kwargs)

            function.register(kind, guarded)
        return rule

    return register


@singledispatch
def expected_log_prob(
    likelihood: Likelihood, targets: Tensor, mean: Tensor, variance: Tensor, **kwargs: Any
) -> Tensor:
    r""":math:`E_{N(m, v)}[\log p(y | f)]` per target, deterministic for every likelihood.

    Likelihoods of one latent use GPyTorch's closed forms and Gauss-Hermite quadrature, with two
    exceptions: the Laplace likelihood, which has a kink, has a closed form, and quadrature of
    Bernoulli, Poisson and negative binomial likelihoods uses our own `conditional_log_prob`. All
    others, for which GPyTorch draws new samples at each call, use one fixed set of
    `NUM_BASE_SAMPLES` quasi-Monte-Carlo base samples.

    Args:
        likelihood: A GPyTorch likelihood.
        targets: ``... x n`` targets.
        mean: ``... x n [x c]`` means.
        variance: ``... x n [x c]`` variances.
        kwargs: Per-point arguments of the likelihood (``noise=``, ``total_count=``, ...).

    Returns:
        A ``... x n`` tensor.
    """
    mean, variance = per_target(likelihood, targets, mean, variance)
    if mean.numel() == 0:  # not all distributions support this
        return mean if has_one_latent(likelihood) else mean.sum(-1)
    if has_one_latent(likelihood):
        marginals = MultivariateNormal(mean, DiagLinearOperator(variance))
        return likelihood.expected_log_prob(targets, marginals, **kwargs)
    base = base_samples(mean.shape[-1], NUM_BASE_SAMPLES, mean.dtype, mean.device)
    base = base.reshape(-1, *[1] * (mean.dim() - 1), mean.shape[-1])
    return conditional_log_prob(likelihood, targets, mean + variance.sqrt() * base, **kwargs).mean(
        0
    )


@rule_for(expected_log_prob, LaplaceLikelihood)
def _laplace_log_prob(
    likelihood: LaplaceLikelihood, targets: Tensor, mean: Tensor, variance: Tensor, **kwargs: Any
) -> Tensor:
    r"""Closed form, by the mean of a folded normal.

    With :math:`d = y - m`,
    :math:`E|y - f| = d \operatorname{erf}(d / \sqrt{2v}) + \sqrt{2v/\pi} \exp(-d^2 / 2v)`.
    With quadrature, the kink of :math:`|y - f|` would make the derivatives jump.
    """
    scale = likelihood.noise.sqrt()
    difference = targets - mean
    ratio = difference / (2 * variance).sqrt()
    folded = difference * ratio.erf() + (2 * variance / math.pi).sqrt() * (-ratio.square()).exp()
    return -folded / scale - (2 * scale).log()


@rule_for(expected_log_prob, BernoulliLikelihood, PoissonLikelihood, NegativeBinomialLikelihood)
def _quadrature_log_prob(
    likelihood: OneDimensionalLikelihood,
    targets: Tensor,
    mean: Tensor,
    variance: Tensor,
    **kwargs: Any,
) -> Tensor:
    """On the nodes of the likelihood's own quadrature."""
    nodes, weights = likelihood_nodes(likelihood, max(mean.dim(), targets.dim()), mean)
    f = mean + variance.sqrt() * nodes
    return (weights * conditional_log_prob(likelihood, targets, f, **kwargs)).sum(0)


@singledispatch
def expectations(
    likelihood: Likelihood, targets: Tensor, mean: Tensor, variance: Tensor, **kwargs: Any
) -> Expectations:
    r"""Expected log probability, :math:`\alpha` and :math:`\beta` under :math:`N(m, v)`.

    Dispatches on the likelihood's type: closed forms for Gaussian likelihoods, closed-form
    derivatives for Bernoulli, Poisson and binomial ones, and for all others the derivatives of
    `expected_log_prob` by automatic differentiation. All results are differentiable with respect to
    mean and variance. Register a faster rule for your own likelihood with
    ``@expectations.register(MyLikelihood)``.

    Args:
        likelihood: A GPyTorch likelihood.
        targets: ``... x n`` targets.
        mean: ``... x n [x c]`` means.
        variance: ``... x n [x c]`` variances.
        kwargs: Per-point arguments of the likelihood.
    """
    create_graph = torch.is_grad_enabled() and any(
        tensor.requires_grad for tensor in (targets, mean, variance)
    )
    with torch.enable_grad():
        if not create_graph:
            mean, variance = mean.detach(), variance.detach()
        # The derivatives are per observation: each needs a mean and a variance of its own.
        mean, variance = per_target(likelihood, targets, mean, variance)
        mean, variance = mean.clone(), resolved(variance)
        if mean.numel() == 0:  # not all distributions support this
            log_prob = mean if has_one_latent(likelihood) else mean[..., 0]
            return Expectations(log_prob, mean, variance)
        for tensor in (mean, variance):
            if not tensor.requires_grad:
                tensor.requires_grad_(True)
        log_prob = expected_log_prob(likelihood, targets, mean, variance, **kwargs)
        d_mean, d_variance = torch.autograd.grad(
            log_prob.sum(), (mean, variance), create_graph=create_graph
        )
    if not create_graph:
        log_prob = log_prob.detach()
    return Expectations(log_prob, d_mean, -2 * d_variance)


@expectations.register(GaussianLikelihood)
@expectations.register(FixedNoiseGaussianLikelihood)
@expectations.register(SparseOutlierGaussianLikelihood)
def _gaussian(
    likelihood: GaussianLikelihood | FixedNoiseGaussianLikelihood,
    targets: Tensor,
    mean: Tensor,
    variance: Tensor,
    **kwargs: Any,
) -> Expectations:
    r""":math:`\alpha = (y - m) / \sigma^2` and :math:`\beta = 1 / \sigma^2` for any :math:`q`.

    ``beta`` has the batch shape of the noise: fantasies that differ only in their targets share
    their covariance.
    """
    noise = observation_noise(likelihood, mean.shape[-1], **kwargs)
    residual = targets - mean
    log_prob = -0.5 * ((residual.square() + variance) / noise + noise.log() + math.log(2 * math.pi))
    return Expectations(log_prob, residual / noise, noise.reciprocal())


# GPyTorch's `expected_log_prob` masks NaN targets.
expectations.register(GaussianLikelihoodWithMissingObs, expectations.dispatch(object))


@rule_for(expectations, BernoulliLikelihood)
def _bernoulli(
    likelihood: BernoulliLikelihood, targets: Tensor, mean: Tensor, variance: Tensor, **kwargs: Any
) -> Expectations:
    r"""Probit: :math:`g(f) = \log\Phi(sf)`, :math:`s = 2y - 1`, :math:`g' = s \phi / \Phi`."""
    nodes, weights = likelihood_nodes(likelihood, max(mean.dim(), targets.dim()), mean)
    spread = resolved(variance).sqrt()
    sign = 2 * targets - 1
    signed = sign * (mean + spread * nodes)
    log_cdf, ratio = _log_cdf_and_slope(signed)
    return _from_slopes(log_cdf, sign * ratio, nodes, weights, spread)


def _log_cdf_and_slope(x: Tensor) -> tuple[Tensor, Tensor]:
    r""":math:`\log\Phi(x)` and its slope :math:`\phi(x) / \Phi(x)`, from one special function.

    With :math:`u = \mathrm{erfcx}(|x| / \sqrt 2)`, which neither overflows nor underflows,
    :math:`\Phi(-|x|) = \frac12 u e^{-x^2/2}`.
    """
    negative = x < 0
    size = torch.where(negative, -x, x)  # unlike abs(), with a slope at zero
    scaled = torch.special.erfcx(size * math.sqrt(0.5))
    exponent = -0.5 * x.square()
    density = exponent.exp()
    tail = 0.5 * scaled * density
    log_cdf = torch.where(negative, (0.5 * scaled).log() + exponent, (-tail).log1p())
    slope = torch.where(negative, 1 / scaled, 0.5 * density / (1 - tail))
    return log_cdf, math.sqrt(2 / math.pi) * slope


@rule_for(expectations, PoissonLikelihood)
def _poisson(
    likelihood: PoissonLikelihood, targets: Tensor, mean: Tensor, variance: Tensor, **kwargs: Any
) -> Expectations:
    r"""With rate :math:`r(f) = \log(1 + e^f)`, :math:`g(f) = y \log r - r - \log y!`.

    As :math:`r' = 1 - e^{-r}`, :math:`g' = (y - r) (1 - e^{-r}) / r`.
    """
    nodes, weights = likelihood_nodes(likelihood, max(mean.dim(), targets.dim()), mean)
    spread = resolved(variance).sqrt()
    rate, log_rate = _softplus(mean + spread * nodes)
    slope = (rate - targets) * torch.expm1(-rate) / rate
    value, alpha, beta = _from_slopes(targets * log_rate - rate, slope, nodes, weights, spread)
    return Expectations(value - torch.lgamma(targets + 1), alpha, beta)


@rule_for(expectations, BinomialLikelihood)
def _binomial(
    likelihood: BinomialLikelihood,
    targets: Tensor,
    mean: Tensor,
    variance: Tensor,
    total_count: int | Tensor | None = None,
    **kwargs: Any,
) -> Expectations:
    r""":math:`g(f) = y \log F(f) + (N - y) \log F(-f)` plus a constant.

    Logit: :math:`g' = y - N F(f)`; probit: :math:`g' = y \phi/\Phi(f) - (N - y) \phi/\Phi(-f)`.
    """
    nodes, weights = likelihood_nodes(likelihood, max(mean.dim(), targets.dim()), mean)
    spread = resolved(variance).sqrt()
    f, N = mean + spread * nodes, likelihood.totals(mean, total_count)
    if likelihood.link == "logit":
        value, slope = targets * f - N * torch.nn.functional.softplus(f), targets - N * f.sigmoid()
    else:
        (right, rise), (left, fall) = _log_cdf_and_slope(f), _log_cdf_and_slope(-f)
        value = targets * right + (N - targets) * left
        slope = targets * rise - (N - targets) * fall
    value, alpha, beta = _from_slopes(value, slope, nodes, weights, spread)
    log_choose = (N + 1).lgamma() - (targets + 1).lgamma() - (N - targets + 1).lgamma()
    return Expectations(value + log_choose, alpha, beta)


@rule_for(expectations, OverdispersedBinomialLikelihood)
def _overdispersed_binomial(
    likelihood: OverdispersedBinomialLikelihood,
    targets: Tensor,
    mean: Tensor,
    variance: Tensor,
    total_count: int | Tensor | None = None,
    **kwargs: Any,
) -> Expectations:
    """`log_prob_and_slope` computes the slope of the log probability, too."""
    nodes, weights = likelihood_nodes(likelihood, max(mean.dim(), targets.dim()), mean)
    spread = resolved(variance).sqrt()
    N, f = likelihood.totals(mean, total_count), mean + spread * nodes
    value, slope = log_prob_and_slope(targets, N, f, likelihood.nugget)
    return _from_slopes(value, slope, nodes, weights, spread)


def _from_slopes(
    values: Tensor, slopes: Tensor, nodes: Tensor, weights: Tensor, spread: Tensor
) -> Expectations:
    r"""Expectations from :math:`g = \log p(y | \cdot)` and :math:`g'` at quadrature nodes.

    On the nodes :math:`f_k = m + \sqrt{v} x_k`, :math:`\alpha = \sum_k w_k g'(f_k)` and
    :math:`\beta = -\sum_k w_k g'(f_k) x_k / \sqrt{v}` are the exact derivatives of the
    quadrature's value; if :math:`g'` decreases, :math:`\beta > 0`.
    """
    slopes = weights * slopes
    return Expectations((weights * values).sum(0), slopes.sum(0), -(slopes * nodes).sum(0) / spread)


def per_target(
    likelihood: Likelihood, targets: Tensor, mean: Tensor, variance: Tensor
) -> tuple[Tensor, Tensor]:
    """Expand mean and variance to the batch shape of the targets.

    Args:
        likelihood: The likelihood.
        targets: ``... x n`` targets.
        mean: ``... x n [x c]`` means.
        variance: ``... x n [x c]`` variances.
    """
    latents = () if has_one_latent(likelihood) else mean.shape[-1:]
    shape = broadcast_shapes((*targets.shape, *latents), mean.shape, variance.shape)
    return mean.expand(shape), variance.expand(shape)


def resolved(variance: Tensor) -> Tensor:
    """Clamp the variance to the smallest value for which quadrature resolves the curvature.

    GPyTorch clamps smaller variances, and then the derivative with respect to them is zero.

    Args:
        variance: ``...`` variances.

    Returns:
        A new tensor ``...``.
    """
    return variance.clamp_min(settings.min_variance.value(variance.dtype))


@singledispatch
def conditional_log_prob(
    likelihood: Likelihood, targets: Tensor, samples: Tensor, **kwargs: Any
) -> Tensor:
    """The log probability ``log p(y | f)`` of targets given samples of the latents.

    By default this is GPyTorch's, which underflows for extreme latent values of Bernoulli, Poisson
    and negative binomial likelihoods. The rules for these are finite everywhere.

    Args:
        likelihood: A GPyTorch likelihood.
        targets: ``... x n`` targets.
        samples: ``s x ... x n [x c]`` latent values.
        kwargs: Per-point arguments of the likelihood.
    """
    return likelihood.forward(samples, **kwargs).log_prob(targets)


@rule_for(conditional_log_prob, BernoulliLikelihood)
def _probit(
    likelihood: BernoulliLikelihood, targets: Tensor, samples: Tensor, **kwargs: Any
) -> Tensor:
    """Without GPyTorch's `log_normal_cdf`, which has errors of up to 2e-3."""
    return torch.special.log_ndtr((2 * targets - 1) * samples)


@rule_for(conditional_log_prob, GammaLikelihood, PsychometricLikelihood)
def _of_its_own(
    likelihood: GammaLikelihood | PsychometricLikelihood,
    targets: Tensor,
    samples: Tensor,
    **kwargs: Any,
) -> Tensor:
    return likelihood.log_prob(targets, samples)


@rule_for(conditional_log_prob, PoissonLikelihood)
def _count(
    likelihood: PoissonLikelihood, targets: Tensor, samples: Tensor, **kwargs: Any
) -> Tensor:
    rate, log_rate = _softplus(samples)
    return targets * log_rate - rate - torch.lgamma(targets + 1)


@rule_for(conditional_log_prob, NegativeBinomialLikelihood)
def _overdispersed_count(
    likelihood: NegativeBinomialLikelihood, targets: Tensor, samples: Tensor, **kwargs: Any
) -> Tensor:
    r""":math:`\log\Gamma(k + y) - \log\Gamma(k) - \log y! + k \log(1 - p) + y \log p`.

    No term has a pole at :math:`k = 0`, because :math:`-\log\Gamma(k) = \log k -
    \log\Gamma(1 + k)`, and the first two terms cancel if :math:`y = 0`.
    """
    probs = likelihood.probs.clamp(1e-6, 1 - 1e-6)  # as GPyTorch does
    odds = 1.0 if likelihood.num_failures_param else (1 - probs) / probs
    scale = torch.as_tensor(odds, dtype=samples.dtype, device=samples.device)
    rate, log_rate = _softplus(samples)
    k, log_k = rate * scale, log_rate + scale.log()
    ratio = torch.lgamma(k + targets.clamp_min(1)) - torch.lgamma(1 + k) + log_k
    log_choose = torch.where(targets > 0, ratio, 0.0) - torch.lgamma(targets + 1)
    return log_choose + k * torch.log1p(-probs) + targets * probs.log()


def _softplus(f: Tensor) -> tuple[Tensor, Tensor]:
    """``log(1 + e^f)`` without underflow, and its logarithm, which is ``f`` far below zero."""
    floor = torch.finfo(f.dtype).eps ** 2
    rate = torch.nn.functional.softplus(f).clamp_min(floor)
    return rate, torch.where(rate > floor, rate.log(), f)

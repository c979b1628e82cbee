r"""Sites: the Gaussians that stand in for the likelihoods of single observations.

With :math:`q(f_i) = N(m_i, v_i)` and prior mean :math:`\mu_i`,

.. math::
    \alpha_i = \partial_{m_i} E_q[\log p(y_i | f_i)], \qquad
    \beta_i = -2 \, \partial_{v_i} E_q[\log p(y_i | f_i)], \qquad
    \lambda_i = \alpha_i + \beta_i (m_i - \mu_i).

The site :math:`\exp(\lambda_i g_i - \beta_i g_i^2 / 2)`, :math:`g_i = f_i - \mu_i`, is centred on
the prior mean, so that any mean module works.

Shapes: targets are ``... x n``. Means and variances are ``... x n`` for one latent function and
``... x n x c`` for ``c`` of them (the shape of GPyTorch's multitask distributions).
"""

from __future__ import annotations

import math
from functools import lru_cache, singledispatch
from typing import Any, NamedTuple

import torch
from botorch.sampling.qmc import MultivariateNormalQMCEngine
from gpytorch import settings
from gpytorch.distributions import MultivariateNormal
from gpytorch.likelihoods import (
    BernoulliLikelihood,
    FixedNoiseGaussianLikelihood,
    GaussianLikelihood,
    GaussianLikelihoodWithMissingObs,
    LaplaceLikelihood,
    Likelihood,
    SoftmaxLikelihood,
)
from gpytorch.likelihoods.likelihood import _OneDimensionalLikelihood
from linear_operator.operators import DiagLinearOperator
from torch import Tensor

#: Base samples for likelihoods of several latents (in antithetic pairs, from a Sobol sequence).
NUM_BASE_SAMPLES = 256


class Expectations(NamedTuple):
    """What a likelihood says about ``q(f)``: log probability, gradient and curvature.

    Attributes:
        log_prob: ``... x n``, the expected log probability of each target.
        alpha: Like the mean, its derivative with respect to the mean.
        beta: Like the mean or broadcastable to it, -2 times its derivative with respect to the
            variance.
    """

    log_prob: Tensor
    alpha: Tensor
    beta: Tensor


class Sites(NamedTuple):
    """Natural mean and precision of the sites, both ``... x n``, centred on the prior mean."""

    lam: Tensor
    beta: Tensor


def sites(expected: Expectations, centred_mean: Tensor, min_precision: float | None = 0.0) -> Sites:
    """The sites of ``n`` observations, from their expectations under the posterior.

    Args:
        expected: The expectations of the observations.
        centred_mean: The posterior mean minus the prior mean, of the shape of ``expected.alpha``.
        min_precision: Floor for ``beta``. Likelihoods that are not log-concave (Student-t, Beta,
            negative binomial) can ask for a negative precision; with the floor of zero the
            posterior precision never falls below the prior's. ``None``: no floor.
    """
    beta = expected.beta if min_precision is None else expected.beta.clamp_min(min_precision)
    return Sites(expected.alpha + beta * centred_mean, beta)


@singledispatch
def expected_log_prob(
    likelihood: Likelihood, targets: Tensor, mean: Tensor, variance: Tensor, **kwargs: Any
) -> Tensor:
    r""":math:`E_{N(m, v)}[\log p(y | f)]` per target, deterministic for every likelihood.

    Likelihoods of one latent use GPyTorch's closed forms and Gauss-Hermite quadrature, with two
    exceptions: the Laplace likelihood, which has a kink, has a closed form, and the Bernoulli uses
    `torch.special.log_ndtr` (GPyTorch's `log_normal_cdf` is off by up to 2e-3). All others, for
    which GPyTorch draws new samples at each call, use one fixed set of `NUM_BASE_SAMPLES`
    quasi-Monte-Carlo base samples.

    Args:
        likelihood: A GPyTorch likelihood.
        targets: ``... x n`` targets.
        mean: ``... x n [x c]`` means.
        variance: ``... x n [x c]`` variances.
        kwargs: Per-point arguments of the likelihood (``noise=``, ``total_count=``, ...).

    Returns:
        A ``... x n`` tensor.
    """
    mean, variance = _per_target(likelihood, targets, mean, variance)
    if has_one_latent(likelihood):
        marginals = MultivariateNormal(mean, DiagLinearOperator(variance))
        return likelihood.expected_log_prob(targets, marginals, **kwargs)
    base = base_samples(mean.shape[-1], NUM_BASE_SAMPLES, mean.dtype, mean.device)
    base = base.reshape(-1, *[1] * (mean.dim() - 1), mean.shape[-1])
    return conditional_log_prob(likelihood, targets, mean + variance.sqrt() * base, **kwargs).mean(
        0
    )


@expected_log_prob.register(LaplaceLikelihood)
def _laplace_log_prob(
    likelihood: LaplaceLikelihood, targets: Tensor, mean: Tensor, variance: Tensor, **kwargs: Any
) -> Tensor:
    r"""Closed form, by the mean of a folded normal.

    With :math:`d = y - m`,
    :math:`E|y - f| = d \operatorname{erf}(d / \sqrt{2v}) + \sqrt{2v/\pi} \exp(-d^2 / 2v)`.
    Quadrature would put the kink of :math:`|y - f|` between nodes, and make the derivatives jump.
    """
    scale = likelihood.noise.sqrt()
    difference = targets - mean
    ratio = difference / (2 * variance).sqrt()
    folded = difference * ratio.erf() + (2 * variance / math.pi).sqrt() * (-ratio.square()).exp()
    return -folded / scale - (2 * scale).log()


@singledispatch
def expectations(
    likelihood: Likelihood, targets: Tensor, mean: Tensor, variance: Tensor, **kwargs: Any
) -> Expectations:
    r"""Expected log probability, :math:`\alpha` and :math:`\beta` under :math:`N(m, v)`.

    Dispatches on the likelihood's type: closed forms for Gaussian likelihoods, closed-form
    derivatives for the Bernoulli, and for everything else the derivatives of
    `expected_log_prob` by automatic differentiation. All of them are themselves differentiable
    with respect to mean and variance. Register a faster rule for a likelihood of your own with
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
        mean, variance = _per_target(likelihood, targets, mean, variance)
        mean, variance = mean.clone(), _resolved(variance)
        if mean.numel() == 0:  # which not all distributions know how to deal with
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
def _gaussian(
    likelihood: GaussianLikelihood | FixedNoiseGaussianLikelihood,
    targets: Tensor,
    mean: Tensor,
    variance: Tensor,
    **kwargs: Any,
) -> Expectations:
    r""":math:`\alpha = (y - m) / \sigma^2`, :math:`\beta = 1 / \sigma^2`, whatever q is.

    ``beta`` keeps the batch shape of the noise: fantasies that differ only in their targets share
    their covariance.
    """
    noise = observation_noise(likelihood, mean.shape[-1], **kwargs)
    residual = targets - mean
    log_prob = -0.5 * ((residual.square() + variance) / noise + noise.log() + math.log(2 * math.pi))
    return Expectations(log_prob, residual / noise, noise.reciprocal())


# The masking of NaN targets is in GPyTorch's `expected_log_prob`: use it.
expectations.register(GaussianLikelihoodWithMissingObs, expectations.dispatch(object))


@expectations.register(BernoulliLikelihood)
def _bernoulli(
    likelihood: BernoulliLikelihood,
    targets: Tensor,
    mean: Tensor,
    variance: Tensor,
    **kwargs: Any,
) -> Expectations:
    r"""Probit: :math:`g(f) = \log\Phi(sf)`, :math:`s = 2y - 1`, :math:`g' = s \phi / \Phi`.

    On the nodes :math:`f_k = m + \sqrt{2v} x_k` of the likelihood's quadrature,
    :math:`\alpha = \sum_k w_k g'(f_k)` and
    :math:`\beta = -2 \sum_k w_k g'(f_k) x_k / \sqrt{2v}` are the exact derivatives of the
    quadrature's value; :math:`\beta > 0` because :math:`g'` decreases.
    """
    nodes, weights = _nodes(likelihood, targets, mean)
    sign = 2 * targets - 1
    spread = (2 * _resolved(variance)).sqrt()
    signed = sign * (mean + spread * nodes)
    log_cdf = torch.special.log_ndtr(signed)
    log_pdf = -0.5 * signed.square() - 0.5 * math.log(2 * math.pi)
    slope = weights * sign * (log_pdf - log_cdf).exp()
    return Expectations(
        (weights * log_cdf).sum(0), slope.sum(0), -2 * (slope * nodes).sum(0) / spread
    )


@expected_log_prob.register(BernoulliLikelihood)
def _bernoulli_log_prob(
    likelihood: BernoulliLikelihood, targets: Tensor, mean: Tensor, variance: Tensor, **kwargs: Any
) -> Tensor:
    nodes, weights = _nodes(likelihood, targets, mean)
    f = mean + (2 * variance).sqrt() * nodes
    return (weights * torch.special.log_ndtr((2 * targets - 1) * f)).sum(0)


def _nodes(
    likelihood: _OneDimensionalLikelihood, targets: Tensor, mean: Tensor
) -> tuple[Tensor, Tensor]:
    """Nodes and normalised weights of the likelihood's quadrature, ``k x 1 x ... x 1``."""
    shape = (-1, *[1] * max(mean.dim(), targets.dim()))
    quadrature = likelihood.quadrature
    weights = quadrature.weights.to(mean) / math.sqrt(math.pi)
    return quadrature.locations.to(mean).reshape(shape), weights.reshape(shape)


def has_one_latent(likelihood: Likelihood) -> bool:
    """Whether the likelihood is one of a single latent function (as against, say, a softmax)."""
    return is_conjugate(likelihood) or isinstance(likelihood, _OneDimensionalLikelihood)


def is_conjugate(likelihood: Likelihood) -> bool:
    """Whether the sites do not depend on the posterior, so that one step is exact."""
    return isinstance(likelihood, GaussianLikelihood | FixedNoiseGaussianLikelihood)


def observation_noise(
    likelihood: GaussianLikelihood | FixedNoiseGaussianLikelihood,
    num_data: int,
    noise: Tensor | None = None,
    **kwargs: Any,
) -> Tensor:
    """The noise variance of each of ``num_data`` observations, ``... x num_data``.

    Args:
        likelihood: A Gaussian likelihood.
        num_data: The number of observations.
        noise: Their noise variances. Required for a `FixedNoiseGaussianLikelihood` unless
            ``num_data`` is the number of points that it was built with.
        kwargs: Ignored.
    """
    if isinstance(likelihood, GaussianLikelihood):
        variance = likelihood.noise if noise is None else noise
        return variance.expand(*variance.shape[:-1], num_data) if variance.dim() else variance
    if noise is None:
        noise = likelihood.noise_covar.noise
        if noise.shape[-1] not in (1, num_data):
            raise ValueError(
                f"noise: the likelihood holds the noise of {noise.shape[-1]} points but was given "
                f"{num_data}; pass their noise variances as noise=."
            )
    noise = noise + likelihood.second_noise
    return noise.expand(*noise.shape[:-1], num_data)


def _per_target(
    likelihood: Likelihood, targets: Tensor, mean: Tensor, variance: Tensor
) -> tuple[Tensor, Tensor]:
    """Mean and variance, expanded to the batch shape of the targets."""
    latents = () if has_one_latent(likelihood) else mean.shape[-1:]
    shape = torch.broadcast_shapes((*targets.shape, *latents), mean.shape, variance.shape)
    return mean.expand(shape), variance.expand(shape)


def _resolved(variance: Tensor) -> Tensor:
    """The variance, or the smallest at which quadrature can see a curvature, as a new tensor.

    Below it GPyTorch clamps, and the derivative with respect to the variance would be zero.
    """
    return variance.clamp_min(settings.min_variance.value(variance.dtype))


def conditional_log_prob(
    likelihood: Likelihood, targets: Tensor, samples: Tensor, **kwargs: Any
) -> Tensor:
    """``log p(y | f)`` at samples ``s x ... x n x c`` of the latents."""
    if isinstance(likelihood, SoftmaxLikelihood):
        # Not through `forward`: it transposes its input whenever n equals c.
        weights = likelihood.mixing_weights
        logits = samples if weights is None else samples @ weights.mT
        log_probs = logits.log_softmax(-1)
        index = targets.long().unsqueeze(-1).expand(*log_probs.shape[:-1], 1)
        return log_probs.gather(-1, index).squeeze(-1)
    return likelihood.forward(samples, **kwargs).log_prob(targets)


@lru_cache(maxsize=32)
def base_samples(dim: int, num: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """``num x dim`` standard normal quasi-Monte-Carlo samples, exact for quadratic functions.

    Antithetic pairs make their mean exact, which the estimate of ``beta``, whose summands are of
    order ``1 / sqrt(v)``, needs for small variances; whitened, their covariance is exact too.
    """
    engine = MultivariateNormalQMCEngine(
        mean=torch.zeros(dim, dtype=torch.float64, device="cpu"),
        cov=torch.eye(dim, dtype=torch.float64, device="cpu"),
        seed=0,
    )
    half: Any = engine.draw(num // 2)
    if dim < len(half):
        root = torch.linalg.cholesky(half.mT @ half / len(half))
        half = torch.linalg.solve_triangular(root, half.mT, upper=False).mT
    return torch.cat([half, -half]).to(dtype=dtype, device=device)

r"""Expectations of softmax likelihoods, and a bound on them.

There is one latent function per class, :math:`p(y | f) = e^{f_y} / \sum_k e^{f_k}`. Targets are
``... x n``, means and variances ``... x n x c``.
"""

from __future__ import annotations

from typing import Any

import torch
from gpytorch.likelihoods import SoftmaxLikelihood
from torch import Tensor

from seqgp.dual.sites import Expectations, Sites
from seqgp.likelihoods.expectations import (
    conditional_log_prob,
    expectations,
    expected_log_prob,
    per_target,
    resolved,
    rule_for,
)
from seqgp.likelihoods.quadrature import NUM_BASE_SAMPLES, base_samples

#: Maximum number of elements of samples in a chunk.
_SAMPLES_AT_A_TIME = 2**17


@rule_for(expected_log_prob, SoftmaxLikelihood)
def _softmax_log_prob(
    likelihood: SoftmaxLikelihood, targets: Tensor, mean: Tensor, variance: Tensor, **kwargs: Any
) -> Tensor:
    r""":math:`E[f_y] - E[\log \sum_k e^{f_k}]`; only the first term depends on the class."""
    if likelihood.mixing_weights is not None:
        rule: Any = expected_log_prob.dispatch(object)
        return rule(likelihood, targets, mean, variance, **kwargs)
    mean, variance = per_target(likelihood, targets, mean, variance)
    normaliser: Tensor = _ExpectedNormaliser.apply(mean, variance)
    return mean.gather(-1, _class_index(targets, mean)).squeeze(-1) - normaliser


@rule_for(expectations, SoftmaxLikelihood)
def _softmax_expectations(
    likelihood: SoftmaxLikelihood, targets: Tensor, mean: Tensor, variance: Tensor, **kwargs: Any
) -> Expectations:
    r""":math:`\alpha_k = [y = k] - E[p_k]` and :math:`\beta_k = E[p_k (1 - p_k)]`."""
    if likelihood.mixing_weights is not None:
        rule: Any = expectations.dispatch(object)
        return rule(likelihood, targets, mean, variance, **kwargs)
    mean, variance = per_target(likelihood, targets, mean, variance)
    normaliser, probability, curvature = softmax_normaliser(mean, variance)
    index = _class_index(targets, mean)
    log_prob = mean.gather(-1, index).squeeze(-1) - normaliser
    one_hot = torch.zeros_like(mean).scatter(-1, index, 1.0)
    return Expectations(log_prob, one_hot - probability, curvature)


def _class_index(targets: Tensor, latents: Tensor) -> Tensor:
    """``... x 1`` indices of the targets' classes among latents (or logits) ``... x c``."""
    return targets.long().unsqueeze(-1).expand(*latents.shape[:-1], 1)


class _ExpectedNormaliser(torch.autograd.Function):
    """The first result of `softmax_normaliser`, without the graph of its samples.

    The forward pass computes its derivatives, too. Only second derivatives need the graph of the
    samples.
    """

    @staticmethod
    def forward(ctx: Any, mean: Tensor, variance: Tensor) -> Tensor:
        normaliser, probability, curvature = softmax_normaliser(mean, variance)
        ctx.save_for_backward(mean, variance, probability, curvature)
        return normaliser

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        mean, variance, probability, curvature = ctx.saved_tensors
        if torch.is_grad_enabled():
            _, probability, curvature = softmax_normaliser(mean, variance)
        grad = grad.unsqueeze(-1)
        return grad * probability, 0.5 * grad * curvature


def softmax_normaliser(mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    r"""The expectation of :math:`s(f) = \log \sum_k e^{f_k}`, and its derivatives.

    On base samples :math:`f_k = m_k + \sqrt{v_k} z_k`, with :math:`p = \nabla s` the classes'
    probabilities, :math:`\partial_{m_k} E[s] = E[p_k]` and
    :math:`2 \partial_{v_k} E[s] = E[p_k z_k] / \sqrt{v_k}`, exactly those of the average. In exact
    arithmetic the latter is :math:`E[p_k (1 - p_k)] \ge 0`, by Stein's lemma. Observations are
    processed in chunks whose samples fit in the processor's cache.

    Args:
        mean: ``... x n x c``.
        variance: ``... x n x c``.

    Returns:
        ``... x n``, ``... x n x c`` and ``... x n x c``.
    """
    c = mean.shape[-1]
    z = base_samples(c, NUM_BASE_SAMPLES, mean.dtype, mean.device).mT.unsqueeze(1)  # c x 1 x s
    size = max(_SAMPLES_AT_A_TIME // (c * z.shape[-1]), 1)
    means, scales = mean.reshape(-1, c).mT, resolved(variance).sqrt().reshape(-1, c).mT
    parts = []
    for m, scale in zip(means.split(size, -1), scales.split(size, -1), strict=True):
        f = m.unsqueeze(-1) + scale.unsqueeze(-1) * z  # c x k x s
        top = f.detach().amax(0)
        weight = (f - top).exp()
        total = weight.sum(0)
        p = weight / total
        parts.append(((top + total.log()).mean(-1), p.mean(-1), (p * z).mean(-1) / scale))
    if not parts:
        return mean[..., 0], mean, variance
    normaliser, probability, curvature = (
        torch.cat([part[i] for part in parts], -1) for i in range(3)
    )
    shape = mean.shape
    return (
        normaliser.reshape(shape[:-1]),
        probability.mT.reshape(shape),
        curvature.mT.reshape(shape),
    )


@rule_for(conditional_log_prob, SoftmaxLikelihood)
def _softmax(
    likelihood: SoftmaxLikelihood, targets: Tensor, samples: Tensor, **kwargs: Any
) -> Tensor:
    """Without `forward`, which transposes its input if ``n`` equals ``c``."""
    weights = likelihood.mixing_weights
    logits = samples if weights is None else samples @ weights.mT
    log_probs = logits.log_softmax(-1)
    return log_probs.gather(-1, _class_index(targets, log_probs)).squeeze(-1)


def softmax_bound_sites(
    targets: Tensor, mean: Tensor, variance: Tensor, prior_mean: Tensor, iterations: int = 20
) -> Sites:
    r"""Sites of the best quadratic lower bound of :math:`\log p(y | f)` under :math:`q`.

    A site is the Gaussian that replaces the likelihood of an observation, see `seqgp.dual`. By
    Bouchard (2007) and by Jaakkola and Jordan (2000), for any :math:`a` and :math:`\xi_k`,

    .. math::
        \log \sum_k e^{f_k} \le a + \sum_k \log(1 + e^{f_k - a}), \qquad
        \log(1 + e^x) \le \lambda(\xi) (x^2 - \xi^2) + \tfrac12 (x - \xi) + \log(1 + e^\xi),

    with :math:`\lambda(\xi) = \tanh(\xi / 2) / 4 \xi`. The bound is best where
    :math:`\xi_k^2 = v_k + (m_k - a)^2` and
    :math:`a = (\tfrac12 (\tfrac{c}{2} - 1) + \sum_k \lambda_k m_k) / \sum_k \lambda_k`, a fixed
    point that is found by iteration. The precision :math:`2 \lambda(\xi)` decreases as
    :math:`1 / 2\xi`, whereas the curvature of the likelihood vanishes exponentially. So an
    observation that is certain keeps a precision.

    Args:
        targets: ``... x n`` classes.
        mean: ``... x n x c``.
        variance: ``... x n x c``.
        prior_mean: ``... x n x c`` prior means, which sites are relative to.
        iterations: The number of iterations for ``a``.
    """
    a = mean.logsumexp(-1, keepdim=True)
    for _ in range(iterations):
        curvature = _jaakkola(variance + (mean - a).square())
        offset = 0.5 * (0.5 * mean.shape[-1] - 1)
        a = (offset + (curvature * mean).sum(-1, keepdim=True)) / curvature.sum(-1, keepdim=True)
    beta = 2 * _jaakkola(variance + (mean - a).square())
    one_hot = torch.zeros_like(mean).scatter(-1, _class_index(targets, mean), 1.0)
    return Sites(one_hot - 0.5 + beta * (a - prior_mean), beta)


def _jaakkola(squared: Tensor) -> Tensor:
    r""":math:`\tanh(\xi / 2) / 4 \xi` at :math:`\xi^2`, which is 1/8 at zero."""
    xi = squared.clamp_min(torch.finfo(squared.dtype).eps).sqrt()
    return torch.tanh(0.5 * xi) / (4 * xi)

r"""Sites: Gaussian approximations of the likelihoods of single observations.

With :math:`q(f_i) = N(m_i, v_i)` and prior mean :math:`\mu_i`,

.. math::
    \alpha_i = \partial_{m_i} E_q[\log p(y_i | f_i)], \qquad
    \beta_i = -2 \, \partial_{v_i} E_q[\log p(y_i | f_i)], \qquad
    \lambda_i = \alpha_i + \beta_i (m_i - \mu_i).

The site is :math:`\exp(\lambda_i g_i - \beta_i g_i^2 / 2)` with :math:`g_i = f_i - \mu_i`. It is
centred on the prior mean, so that any mean module works. The likelihood determines how
:math:`\alpha` and :math:`\beta` are computed (`seqgp.likelihoods.expectations`); this package gets
them from a callable.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Expectations(NamedTuple):
    """Expectations of a likelihood under ``q(f)``: log probability, gradient and curvature.

    Attributes:
        log_prob: ``... x n``, the expected log probability of each target.
        alpha: Its derivative with respect to the mean, of the shape of the mean.
        beta: -2 times its derivative with respect to the variance, of the shape of the mean or
            broadcastable to it.
    """

    log_prob: Tensor
    alpha: Tensor
    beta: Tensor


class Sites(NamedTuple):
    """Natural mean and precision of the sites, both ``... x n``, centred on the prior mean."""

    lam: Tensor
    beta: Tensor


def sites(expected: Expectations, centred_mean: Tensor, min_precision: float | None = 0.0) -> Sites:
    """Return the sites of ``n`` observations, from their expectations under the posterior.

    Args:
        expected: The expectations of the observations.
        centred_mean: The posterior mean minus the prior mean, of the shape of ``expected.alpha``.
        min_precision: Lower limit for ``beta``, ``None`` for none; see `precision_floor`.
    """
    beta = expected.beta if min_precision is None else expected.beta.clamp_min(min_precision)
    return Sites(expected.alpha + beta * centred_mean, beta)

r"""The bound that learning maximises, as a function of hyperparameters and inducing points.

Everything is expressed by sites on functionals of :math:`f`: those of the observations at hand, and
those that the summary stands for. Let the summary have whitened duals :math:`(\lambda_w, B_w)` in
the basis :math:`L_S`, and let :math:`B_w = Q \operatorname{diag}(h) Q^T`. Then it is exactly
:math:`s` sites with precisions :math:`h` and natural means :math:`Q^T \lambda_w` on the functionals
:math:`C (f(S) - \mu_S)`, where :math:`C = Q^T L_S^{-1}`. So it needs no formulas of its own.

The bound, maximised over q, is the evidence :math:`F` of the converged sites
(`seqgp.dual.evidence`) plus :math:`\sum_i E_q[\log p(y_i | h_i)] - E_q[\log t_i(h_i)]`. At
convergence, the derivative of the latter with respect to q vanishes: it is evaluated, but only
differentiated with respect to parameters of the likelihood. Gaussian sites do not depend on q, and
:math:`F` plus a constant is Titsias' collapsed bound. With inducing points at all inputs it is the
evidence of the exact GP.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from gpytorch.likelihoods import Likelihood
from linear_operator import to_dense
from torch import Tensor

from seqgp.distributed import ALONE, Ranks
from seqgp.dual import Batch, Duals, Sites, condition, converge_sites, tie
from seqgp.dual.evidence import (
    Block,
    evidence,
    exact_evidence,
    gaussian_evidence,
    unexplained_total,
)
from seqgp.dual.linalg import broadcast_shapes, scaled_cholesky, solve_lower
from seqgp.dual.posterior import posterior_mean, posterior_variance, unexplained_variance
from seqgp.likelihoods.expectations import expected_log_prob
from seqgp.likelihoods.traits import (
    has_closed_form,
    is_conjugate,
    observation_noise,
    precision_floor,
    summary_noise,
)
from seqgp.observations import Observations
from seqgp.variational.prior_blocks import Forward, contract, functional_variance, joint_prior


class Past(NamedTuple):
    """The summary as sites on functionals ``C (f(S) - mu_S)``.

    Attributes:
        points: ``... x s x d``, ``S``.
        mean: ``... x s``, the prior mean at ``S`` when the sites were made.
        coefficients: ``... x s x s``, ``C``.
        precision: ``... x s x s``, ``C^T diag(beta) C``.
        sites: ``... x s``; times the noise variance for Gaussian observations.
        square: ``...``, sum of squared targets of Gaussian observations.
        number: ``...``, the number of observations that they stand for.
    """

    points: Tensor
    mean: Tensor
    coefficients: Tensor
    precision: Tensor
    sites: Sites
    square: Tensor
    number: Tensor

    def select(self, order: Tensor) -> Past:
        """Return the same summary with its points in another order."""
        return self._replace(
            points=self.points[..., order, :],
            mean=self.mean[..., order],
            coefficients=self.coefficients[..., order],
            precision=self.precision[..., order, :][..., order],
        )


class Setting(NamedTuple):
    """The parts of a strategy that a bound depends on.

    Attributes:
        forward: The prior.
        inducing_points: ``... x m x d``.
        jitter: Relative jitter on the diagonal of ``Kzz``.
        num_latents: The number of latents of the likelihood, ``None`` for one.
        past: The summary, if there is one.
        stays: Whether the inducing points are those of the summary, and do not move.
        kept: ``... x m x s``, which inducing points coincide with which points of the summary, if
            neither move. A point that is kept keeps its jitter, so that nothing is lost.
        alone: The number of points of the summary that are not inducing points, if these come first
            and the others are the first inducing points, in the same order; ``None`` if not.
        ranks: The processes that share the observations.
    """

    forward: Forward
    inducing_points: Tensor
    jitter: float
    num_latents: int | None
    past: Past | None
    stays: bool
    kept: Tensor | None = None
    alone: int | None = None
    ranks: Ranks = ALONE


def maximised_bound(
    setting: Setting,
    data: Observations,
    likelihood: Likelihood,
    start: Sites | None = None,
    tol: float = 1e-8,
    max_steps: int = 100,
    stands_for: Tensor | None = None,
) -> tuple[Tensor, Sites]:
    """Return the bound of observations and summary, maximised over q, and the sites there.

    Args:
        setting: Prior, inducing points and summary.
        data: The observations.
        likelihood: Their likelihood.
        start: Sites to start from.
        tol: Relative tolerance for the sites.
        max_steps: The maximum number of passes over the data to converge the sites.
        stands_for: ``... [x c] x k``, the summed precision of the folded observations that each of
            the first ``k`` observations stands for; for Gaussian noise, their number.
    """
    Z, past, jitter = setting.inducing_points, setting.past, setting.jitter
    ranks = setting.ranks
    x, c = _with_latents(data, setting.num_latents)
    shared = setting.forward(Z[..., :1, :]).batch_shape.numel() == 1
    # Covariances of common points of summary and Z are evaluated once.
    alone, left = setting.alone or 0, Z
    if past is not None and alone:
        left = torch.cat([past.points[:alone], Z])
    prior = joint_prior(setting.forward, left, x, shared, with_left=True, once=True)
    assert prior.left is not None
    (mean_left, K_left), cross_left, mean = prior.left, prior.cross, prior.mean
    if c is None:
        variance = prior.variance()
    else:
        cross_left, mean = contract(cross_left, c), contract(mean.unsqueeze(-2), c).squeeze(-2)
        variance = functional_variance(setting.forward, x, c)
    K, cross = K_left[..., alone:, alone:], cross_left[..., alone:, :]
    mean = _for_each_latent(mean, setting.num_latents)
    with torch.no_grad():
        chol = scaled_cholesky(K.detach(), jitter)
        A = solve_lower(chol, cross.detach())
    blocks, whitened = [], [A]
    constant: Tensor = mean.new_zeros(())
    base: Duals | None = None
    if past is not None:
        noise, count = summary_noise(likelihood), 0
        if stands_for is not None:
            count = stands_for.shape[-1]
        if setting.stays:
            diagonal = K.diagonal(dim1=-2, dim2=-1)
            own_K = K + torch.diag_embed(jitter * diagonal)
            own = _Own(mean_left, own_K, own_K, cross[..., :count], chol, 0.0)
        elif setting.alone is None:
            own = _own_blocks(setting, past, x, c, count, shared)
        else:
            s = past.points.shape[-2]
            own_K = K_left[..., :s, :s]
            own = _Own(
                mean_left[..., :s],
                own_K,
                K_left[..., alone:, :s],
                cross_left[..., :s, :count],
                scaled_cholesky(own_K.detach(), jitter),
                jitter,
            )
        if setting.kept is not None:
            nugget = setting.kept * (jitter * K.diagonal(dim1=-2, dim2=-1).unsqueeze(-1))
            own = own._replace(with_Z=own.with_Z + nugget)
        block, constant = _past_block(past, own, noise)
        block = Block(
            ranks.shared(block.cross), block.variance, Sites(*map(ranks.shared, block.sites))
        )
        constant = ranks.shared(constant)
        if stands_for is not None:
            residual = own.unexplained(variance[..., :count], stands_for)
            residual = residual if noise is None else residual / noise.squeeze(-1)
            constant = constant - 0.5 * ranks.totalled(residual)
        blocks.append(block)
        with torch.no_grad():
            whitened.append(solve_lower(chol, block.cross.detach()))
            base = tie(whitened[-1], Sites(*(t.detach() for t in block.sites)))
    if has_closed_form(likelihood) and data.weights is None:
        site, fit = _gaussian(data, likelihood, mean)
        blocks.insert(0, Block(cross, variance, site))
        value = evidence(K, blocks, chol, whitened, jitter, ranks).value + constant
        return value + ranks.totalled(fit), Sites(*(tensor.detach() for tensor in site))
    latent_dims = 0 if setting.num_latents is None else 1
    with torch.no_grad():
        unexplained = unexplained_variance(A, variance.detach())
        evaluate = data.evaluate(likelihood, bool(latent_dims))
        site = converge_sites(
            Batch(A, unexplained, mean.detach(), evaluate),
            start,
            base,
            is_conjugate(likelihood),
            latent_dims,
            precision_floor(likelihood),
            tol=tol,
            max_steps=max_steps,
            ranks=ranks,
        )
    blocks.insert(0, Block(cross, variance, _centred(site, mean)))
    value, factors = evidence(K, blocks, chol, whitened, jitter, ranks)
    with torch.no_grad():
        g, v = posterior_mean(A, factors), posterior_variance(A, unexplained, factors)
    value = value + constant + _follow(site, mean)
    fit = _fit(data, likelihood, site, mean.detach() + g, g, v, bool(latent_dims))
    fit = ranks.totalled(fit)
    return (value.sum(-1) if latent_dims else value) + fit, site


def exact_bound(
    setting: Setting,
    data: Observations,
    likelihood: Likelihood,
    start: Sites | None = None,
    tol: float = 1e-8,
    max_steps: int = 100,
) -> tuple[Tensor, Sites]:
    """Return the same as `maximised_bound`, with inducing points at all inputs.

    The likelihood has to be log-concave.

    Args:
        setting: Prior and jitter; there must be no summary.
        data: The observations, of values and not of functionals.
        likelihood: Their likelihood.
        start: Sites to start from.
        tol: Relative tolerance for the sites.
        max_steps: The maximum number of iterations to converge the sites.
    """
    x, _ = _with_latents(data, setting.num_latents)
    prior = setting.forward(x)
    K = to_dense(prior.lazy_covariance_matrix)
    K = K + torch.diag_embed(setting.jitter * K.diagonal(dim1=-2, dim2=-1))
    mean = _for_each_latent(prior.mean, setting.num_latents)
    if has_closed_form(likelihood) and data.weights is None:
        noise = observation_noise(likelihood, len(data), **data.arguments)
        residual = data.targets - mean
        value = gaussian_evidence(K, residual, noise.expand_as(residual))
        site = Sites((residual / noise).detach(), noise.reciprocal().detach().expand_as(residual))
        return value, site
    latent_dims = 0 if setting.num_latents is None else 1
    with torch.no_grad():
        m0, K0 = mean.detach(), K.detach()
        evaluate = data.evaluate(likelihood, bool(latent_dims))
        conditioned, _ = condition(
            m0,
            K0,
            m0,
            evaluate,
            is_conjugate(likelihood),
            latent_dims,
            precision_floor(likelihood),
            start,
            tol=tol,
            max_steps=max_steps,
        )
        site = Sites(conditioned.sites.lam, conditioned.sites.beta.clamp_min(0))
        g = (K0 @ conditioned.gain.unsqueeze(-1)).squeeze(-1)
        reduction = conditioned.root @ K0
        v = K0.diagonal(dim1=-2, dim2=-1) - (conditioned.sign * reduction.square()).sum(-2)
        v = v.clamp_min(torch.finfo(v.dtype).tiny)
    value = exact_evidence(K, _centred(site, mean)) + _follow(site, mean)
    fit = _fit(data, likelihood, site, m0 + g, g, v, bool(latent_dims))
    return (value.sum(-1) if latent_dims else value) + fit, site


def _gaussian(data: Observations, likelihood: Likelihood, mean: Tensor) -> tuple[Sites, Tensor]:
    """Return the sites of Gaussian observations, and the part of the bound without q."""
    noise = observation_noise(likelihood, len(data), **data.arguments)
    residual = data.targets - mean
    fit = -0.5 * (residual.square() / noise + (2 * math.pi * noise).log()).sum(-1)
    return Sites(residual / noise, noise.reciprocal().expand_as(residual)), fit


def _centred(site: Sites, mean: Tensor) -> Sites:
    """Centre fixed sites on a prior mean that depends on the hyperparameters."""
    return Sites(site.lam + site.beta * (mean.detach() - mean), site.beta)


def _follow(site: Sites, mean: Tensor) -> Tensor:
    """Return zero, with the gradient due to the moving centre of fixed sites."""
    if not mean.requires_grad:
        return mean.new_zeros(())
    return (site.lam * (mean - mean.detach())).sum(-1)


def _fit(
    data: Observations,
    likelihood: Likelihood,
    site: Sites,
    mean: Tensor,
    centred: Tensor,
    variance: Tensor,
    several_latents: bool,
) -> Tensor:
    """Return ``sum E_q[log p] - E_q[log t]``, with a graph of the likelihood's parameters only."""
    log_site = site.lam * centred - 0.5 * site.beta * (centred.square() + variance)
    log_site = log_site.sum(-1)
    if several_latents:
        mean, variance, log_site = mean.mT, variance.mT, log_site.sum(-1)
    learns = any(p.requires_grad for p in likelihood.parameters())
    with torch.set_grad_enabled(torch.is_grad_enabled() and learns):
        log_prob = expected_log_prob(likelihood, data.targets, mean, variance, **data.arguments)
        log_prob = log_prob if data.weights is None else data.weights * log_prob
    return log_prob.sum(-1) - log_site


def _past_block(past: Past, own: _Own, noise: Tensor | None) -> tuple[Block, Tensor]:
    """Return the summary's functionals and sites, and its part of the bound without q.

    Args:
        past: The summary.
        own: The present prior at its points.
        noise: ``... x 1``, the noise variance of Gaussian observations.
    """
    C, (lam, beta) = past.coefficients, past.sites
    shift = (C @ (own.mean - past.mean).unsqueeze(-1)).squeeze(-1)
    constant = (lam * shift - 0.5 * beta * shift.square()).sum(-1)
    lam = lam - beta * shift
    if noise is not None:
        lam, beta = lam / noise, beta / noise
        constant = (constant - 0.5 * past.square) / noise.squeeze(-1)
        constant = constant - 0.5 * past.number * (2 * math.pi * noise.squeeze(-1)).log()
    # The sum over all functionals of precision times variance.
    trace = (past.precision * own.covariance).sum((-2, -1))
    trace = trace if noise is None else trace / noise.squeeze(-1)
    return Block(own.with_Z @ C.mT, torch.zeros_like(past.sites.beta), Sites(lam, beta)), (
        constant - 0.5 * trace
    )


class _Own(NamedTuple):
    """The prior at the summary's own points, and its covariances with other points.

    Attributes:
        mean: ``... x s``.
        covariance: ``... x s x s``.
        with_Z: ``... x m x s``, with the inducing points.
        cross: ``... x s x k``, with observations.
        chol: ``... x s x s``, the Cholesky factor of the covariance, without a graph.
        jitter: The relative jitter that is part of the factor but not of the covariance.
    """

    mean: Tensor
    covariance: Tensor
    with_Z: Tensor
    cross: Tensor
    chol: Tensor
    jitter: float

    def unexplained(self, variance: Tensor, stands_for: Tensor) -> Tensor:
        r"""Return the variance of folded observations that the summary's points do not explain.

        This is :math:`\sum_i \beta_i (k_{ii} - k_{iS} K_{SS}^{-1} k_{Si})`, estimated by
        observations at hand that stand for the folded ones. Without this term, short lengthscales
        would look better than they are.
        """
        return unexplained_total(
            self.covariance, self.cross, variance, stands_for, self.chol, self.jitter
        )


def _own_blocks(
    setting: Setting, past: Past, x: Tensor, c: Tensor | None, count: int, shared: bool
) -> _Own:
    """Return the prior at the summary's points, the inducing points and the first observations."""
    J = 1 if c is None else c.shape[-1]
    Z, points = setting.inducing_points, x[..., : count * J, :]
    batch = broadcast_shapes(Z.shape[:-2], points.shape[:-2])
    right = torch.cat([t.expand(*batch, *t.shape[-2:]) for t in (Z, points)], -2)
    prior = joint_prior(setting.forward, past.points, right, shared, with_left=True, once=True)
    assert prior.left is not None
    mean, covariance = prior.left
    m = Z.shape[-2]
    with_Z, cross = prior.cross.split([m, prior.cross.shape[-1] - m], -1)
    if c is not None:
        cross = contract(cross, c[..., :count, :])
    chol = scaled_cholesky(covariance.detach(), setting.jitter)
    return _Own(mean, covariance, with_Z.mT, cross, chol, setting.jitter)


def _with_latents(data: Observations, num_latents: int | None) -> tuple[Tensor, Tensor | None]:
    """Return points and coefficients, with a batch dimension for several latents."""
    x, c = data.points, data.coefficients
    if num_latents is None:
        return x, c
    return x.unsqueeze(-3), None if c is None else c.unsqueeze(-3)


def _for_each_latent(mean: Tensor, num_latents: int | None) -> Tensor:
    """Return ``... [x c] x n`` prior means; one prior may serve all latents."""
    if num_latents is not None and mean.shape[-2] == 1:
        return mean.expand(*mean.shape[:-2], num_latents, mean.shape[-1])
    return mean

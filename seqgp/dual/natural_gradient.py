r"""Natural-gradient variational inference as a fixed-point iteration on duals.

A natural-gradient step of size :math:`\rho` on the evidence lower bound is a convex combination,

.. math::
    (\lambda_w, B_w) \leftarrow (1 - \rho)\, (\lambda_w, B_w)
        + \rho\, \Big[ (\lambda_w, B_w)_\text{base} + w \sum_i A_i\, \text{site}_i(q) \Big],

where the sites are those of the observations under the current posterior, ``base`` stands for
what is already known (nothing, or a summary of the past) and ``w`` for the size of the data over
that of a minibatch. With a Gaussian likelihood the sites do not depend on the posterior, and one
step with :math:`\rho = 1` is exact.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from linear_operator.utils.warnings import NumericalWarning
from torch import Tensor

from seqgp.dual.duals import Duals, Pair, add, align, interpolate, tie
from seqgp.dual.posterior import (
    expected_log_summary,
    factorise,
    kl_divergence,
    posterior_mean,
    posterior_variance,
)
from seqgp.dual.sites import Expectations, Sites, sites

#: A relative change of the sites that is more than rounding and worth a warning.
_STUCK = 1e-3

#: Maps marginal means and variances, ``... x n``, to expectations of the same shape.
Evaluate = Callable[[Tensor, Tensor], Expectations]


class Batch(NamedTuple):
    """Observations as the natural gradient sees them.

    Attributes:
        A: ``... x m x n`` whitened cross-covariance.
        unexplained: ``... x n``, prior variance not explained by Z.
        prior_mean: ``... x n``.
        evaluate: Their likelihood.
    """

    A: Tensor
    unexplained: Tensor
    prior_mean: Tensor
    evaluate: Evaluate

    def detach(self) -> Batch:
        """The same without the graph of the hyperparameters."""
        A, unexplained, prior_mean, evaluate = self
        return Batch(A.detach(), unexplained.detach(), prior_mean.detach(), evaluate)


class Convergence(NamedTuple):
    """How a fixed-point iteration ended.

    Attributes:
        steps: Evaluations of the fixed-point map.
        residual: ``...``, relative size of the step that was left to make.
        elbo: ``...``, the bound that the iteration maximises.
        converged: Whether every member of the batch met the tolerance.
    """

    steps: int
    residual: Tensor
    elbo: Tensor
    converged: bool


def natural_gradient_target(
    duals: Duals,
    batches: Iterable[Batch],
    base: Duals | None = None,
    weight: float = 1.0,
    latent_dims: int = 0,
    min_precision: float | None = 0.0,
) -> tuple[Duals, Tensor]:
    """The duals that a full natural-gradient step leads to, and the bound at the present ones.

    Args:
        duals: The present duals.
        batches: The observations, in chunks; one pass is made.
        base: Duals of what is already known, added to those of the observations.
        weight: Factor for the observations' sites and log likelihood (minibatches).
        latent_dims: How many trailing batch dimensions are latent functions of one model, over
            which the bound is summed.
        min_precision: Floor for the sites' precision, see `seqgp.dual.sites.sites`.

    Returns:
        The target, and the bound ``sum E[log p(y|f)] + E[log t_base] - KL``, of the batch shape.
    """
    factors = factorise(duals)
    bound = -kl_divergence(factors)
    if base is not None:
        bound = bound + expected_log_summary(base, factors)
    if latent_dims:
        bound = bound.sum(tuple(range(-latent_dims, 0)))
    target = base
    for batch in batches:
        mean = posterior_mean(batch.A, factors)
        variance = posterior_variance(batch.A, batch.unexplained, factors)
        expected = batch.evaluate(batch.prior_mean + mean, variance)
        bound = bound + weight * expected.log_prob.sum(-1)
        site = sites(expected, mean, min_precision)
        if weight != 1.0:
            site = Sites(weight * site.lam, weight * site.beta)
        tied = tie(batch.A, site)
        target = tied if target is None else add(target, tied)
    if target is None:  # no data and nothing known: the prior
        target = Duals(torch.zeros_like(duals.lam), torch.zeros_like(duals.B))
    return target, bound


def natural_gradient_step(
    duals: Duals,
    batches: Iterable[Batch],
    rho: float = 1.0,
    base: Duals | None = None,
    weight: float = 1.0,
    latent_dims: int = 0,
    min_precision: float | None = 0.0,
) -> tuple[Duals, Tensor]:
    """One damped step of size ``rho``; arguments as for `natural_gradient_target`.

    Returns:
        The new duals, and the bound at the old ones.
    """
    target, bound = natural_gradient_target(
        duals, batches, base, weight, latent_dims, min_precision
    )
    return (target if rho == 1.0 else interpolate(duals, target, rho)), bound


def converge(
    duals: Duals,
    batches: Callable[[], Iterable[Batch]],
    base: Duals | None = None,
    conjugate: bool = False,
    latent_dims: int = 0,
    min_precision: float | None = 0.0,
    rho: float = 1.0,
    tol: float = 1e-6,
    max_steps: int = 100,
) -> tuple[Duals, Convergence]:
    """Natural-gradient steps until the duals are those of their own posterior's sites.

    Args:
        duals: Where to start.
        batches: Called for each step: the observations in chunks.
        base: Duals of what is already known.
        conjugate: The sites do not depend on the posterior: one step, and one for the bound.
        latent_dims: As for `natural_gradient_target`.
        min_precision: As for `natural_gradient_target`.
        rho: The largest step.
        tol: Relative change of the duals at which to stop.
        max_steps: Passes over the data at which to stop.
    """

    def step(state: Duals) -> tuple[Duals, Tensor]:
        return natural_gradient_target(state, batches(), base, 1.0, latent_dims, min_precision)

    return fixed_point(step, duals, conjugate, rho, tol, max_steps)


def converge_sites(
    batch: Batch,
    start: Sites | None = None,
    base: Duals | None = None,
    conjugate: bool = False,
    latent_dims: int = 0,
    min_precision: float | None = 0.0,
    rho: float = 1.0,
    tol: float = 1e-6,
    max_steps: int = 100,
) -> Sites:
    """The sites of one batch of observations at the fixed point, instead of their duals.

    Args:
        batch: All observations.
        start: Sites to start from; by default those under the prior.
        base: Duals of what is already known.
        conjugate: As for `converge`.
        latent_dims: As for `natural_gradient_target`.
        min_precision: As for `natural_gradient_target`.
        rho: As for `converge`.
        tol: As for `converge`.
        max_steps: As for `converge`.
    """
    A, unexplained, prior_mean, evaluate = batch
    if start is None or conjugate:
        variance = unexplained + A.square().sum(-2)
        start = sites(evaluate(prior_mean, variance), torch.zeros_like(variance), min_precision)
    if conjugate:
        return start
    first = tie(A, start)
    duals, _ = converge(
        first if base is None else add(first, base),
        lambda: [batch],
        base,
        latent_dims=latent_dims,
        min_precision=min_precision,
        rho=rho,
        tol=tol,
        max_steps=max_steps,
    )
    factors = factorise(duals)
    mean = posterior_mean(A, factors)
    expected = evaluate(prior_mean + mean, posterior_variance(A, unexplained, factors))
    return sites(expected, mean, min_precision)


def fixed_point(
    step: Callable[[Pair], tuple[Pair, Tensor]],
    state: Pair,
    conjugate: bool = False,
    rho: float = 1.0,
    tol: float = 1e-6,
    max_steps: int = 100,
) -> tuple[Pair, Convergence]:
    r"""Solve ``state = target(state)`` by damped iteration that does not lower the bound.

    Each member of the batch has its own step size. It is halved when a step would lower the
    bound (or end in NaN). After a successful step it is the one that would have solved the
    equation had ``target`` been linear along the residual :math:`r`, the secant step
    :math:`\rho \, \langle r, r \rangle / \langle r, r - r' \rangle`, but at most ``rho``. A member
    is finished when its target differs from its state by less than ``tol``, relative to the
    largest element.

    Where sites of a likelihood that is not log-concave are floored, the solution is not the
    bound's maximum and no step towards it may raise the bound. A member that is stuck for this
    reason goes on with steps that shrink its residual instead.

    Args:
        step: Maps a state to its target and to the bound at the state (``...``, the batch shape).
        state: Where to start: a pair of tensors with leading batch shape ``...``.
        conjugate: The target does not depend on the state: take it.
        rho: The largest step size.
        tol: The relative tolerance.
        max_steps: The largest number of calls to ``step``.
    """
    target, bound = step(state)
    if conjugate:
        _, bound = step(target)
        return target, Convergence(2, torch.zeros_like(bound), bound, True)
    state = type(target)(*(s.expand_as(t) for s, t in zip(state, target, strict=True)))
    rhos = torch.full_like(bound, rho)
    tol = max(tol, 16 * torch.finfo(bound.dtype).eps)  # no tighter than rounding allows
    # A step smaller than this changes the bound by less than its rounding error.
    smallest = rho * 2.0**-12
    slack = torch.finfo(bound.dtype).eps ** 0.5 * 1e-2
    steps = 1
    residual = _relative_change(state, target, bound)
    relaxed = torch.zeros_like(bound, dtype=torch.bool)
    while True:
        stuck = (residual > tol) & (rhos <= smallest) & ~relaxed
        relaxed, rhos = relaxed | stuck, torch.where(stuck, 0.5 * rho, rhos)
        active = (residual > tol) & (rhos > smallest)
        if steps >= max_steps or not bool(active.any()):
            break
        trial = interpolate(state, target, torch.where(active, rhos, 0.0))
        trial_target, trial_bound = step(trial)
        steps += 1
        trial_residual = _relative_change(trial, trial_target, trial_bound)
        accepted = (trial_bound >= bound - slack * (1 + bound.abs())) | (
            relaxed & (trial_residual < residual) & trial_bound.isfinite()
        )
        accepted = accepted & active
        secant = _secant(state, target, trial, trial_target, rhos).clamp_max(rho)
        state, target = _where(accepted, trial, state), _where(accepted, trial_target, target)
        bound = torch.where(accepted, trial_bound, bound)
        residual = torch.where(accepted, trial_residual, residual)
        rhos = torch.where(accepted, secant, torch.where(active, rhos / 2, rhos))
    converged = not bool((residual > tol).any())
    if not converged and (steps >= max_steps or float(residual.max()) > _STUCK):
        reason = f"after {steps} natural-gradient steps"
        advice = "allow more steps or a smaller step size"
        if steps < max_steps:
            reason = "and no step raises the bound any more"
            advice = "with a likelihood that is not log-concave, min_precision=None may help"
        warnings.warn(
            f"The sites have not converged {reason} (largest relative change "
            f"{residual.max().item():.1e}, tolerance {tol:.1e}); {advice}.",
            NumericalWarning,
            stacklevel=3,
        )
    return state, Convergence(steps, residual, bound, converged)


def _relative_change(state: Pair, target: Pair, bound: Tensor) -> Tensor:
    """Largest change of any element relative to the largest element, per member of the batch."""
    residual = torch.zeros_like(bound)
    for s, t in zip(state, target, strict=True):
        dims = tuple(range(bound.dim(), t.dim()))
        if t.numel() == 0:
            continue
        scale = t.abs().amax(dims).clamp_min(torch.finfo(t.dtype).tiny)
        residual = torch.maximum(residual, (t - s).abs().amax(dims) / scale)
    return residual.nan_to_num(nan=torch.inf)


def _secant(state: Pair, target: Pair, trial: Pair, trial_target: Pair, rhos: Tensor) -> Tensor:
    """The step size that the residuals before and after a step suggest; at least a quarter."""
    square, product = torch.zeros_like(rhos), torch.zeros_like(rhos)
    for s, t, new_s, new_t in zip(state, target, trial, trial_target, strict=True):
        dims = tuple(range(rhos.dim(), t.dim()))
        if t.numel() == 0:
            continue
        scale = t.abs().amax(dims).clamp_min(torch.finfo(t.dtype).tiny)
        before, after = (t - s) / align(scale, t), (new_t - new_s) / align(scale, t)
        square = square + before.square().sum(dims)
        product = product + (before * (before - after)).sum(dims)
    step = torch.where(product > 0, rhos * square / product, torch.inf)
    return torch.maximum(step, rhos / 4)


def _where(condition: Tensor, a: Pair, b: Pair) -> Pair:
    """Member by member of the batch, ``a`` where the condition holds and ``b`` elsewhere."""
    return type(a)(*(torch.where(align(condition, x), x, y) for x, y in zip(a, b, strict=True)))

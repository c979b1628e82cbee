r"""Natural-gradient variational inference as a fixed-point iteration on duals.

A natural-gradient step of size :math:`\rho` on the evidence lower bound is a convex combination,

.. math::
    (\lambda_w, B_w) \leftarrow (1 - \rho)\, (\lambda_w, B_w)
        + \rho\, \Big[ (\lambda_w, B_w)_\text{base} + w \sum_i A_i\, \text{site}_i(q) \Big],

where the sites are those of the observations under the current posterior, ``base`` holds the duals
of earlier knowledge (zero, or a summary of the past), and ``w`` is the size of the data over that
of a minibatch. With a Gaussian likelihood the sites do not depend on the posterior, and one step
with :math:`\rho = 1` is exact.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Generic, NamedTuple

import torch
from linear_operator.utils.warnings import NumericalWarning
from torch import Tensor

from seqgp.distributed import ALONE, Ranks
from seqgp.dual.duals import Duals, Pair, add, interpolate, tie
from seqgp.dual.linalg import broadcast_shapes
from seqgp.dual.posterior import (
    Factors,
    expected_log_summary,
    factorise,
    has_posterior,
    kl_divergence,
    log_evidence,
    posterior_mean,
    posterior_variance,
)
from seqgp.dual.sites import Expectations, Sites, sites

#: A relative change of the sites above this is more than rounding, and leads to a warning.
_STUCK = 1e-3

#: Maps marginal means and variances, ``... x n``, to expectations of the same shape.
Evaluate = Callable[[Tensor, Tensor], Expectations]


class Batch(NamedTuple):
    """Observations in the form that the natural gradient needs.

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
        """Detach all tensors from the graph of the hyperparameters."""
        A, unexplained, prior_mean, evaluate = self
        return Batch(A.detach(), unexplained.detach(), prior_mean.detach(), evaluate)


class Convergence(NamedTuple):
    """The result of a fixed-point iteration.

    Attributes:
        steps: Number of evaluations of the fixed-point map.
        residual: ``...``, relative size of the remaining step.
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
    strict: bool = False,
    ranks: Ranks = ALONE,
) -> tuple[Duals, Tensor]:
    """Return the duals after a full natural-gradient step, and the bound at the present ones.

    Args:
        duals: The present duals.
        batches: The observations, in chunks; there is one pass over them.
        base: Duals of earlier knowledge, which are added to those of the observations.
        weight: Factor for the observations' sites and log likelihood (minibatches).
        latent_dims: Number of trailing batch dimensions that are latent functions of one model; the
            bound is summed over them.
        min_precision: Lower limit for the sites' precision, see `seqgp.dual.sites.precision_floor`.
        strict: Whether duals without a posterior have a bound of NaN. Without ``min_precision``,
            they always do.
        ranks: The processes that share the observations; the batches are those of this one.

    Returns:
        The target, and the bound ``sum E[log p(y|f)] + E[log t_base] - KL``, of the batch shape.
    """
    factors = factorise(duals, strict or min_precision is None)
    bound = -kl_divergence(factors)
    if base is not None:
        bound = bound + expected_log_summary(base, factors)
    if latent_dims:
        bound = bound.sum(tuple(range(-latent_dims, 0)))
    target = base if ranks.alone else None
    log_prob = torch.zeros_like(bound)
    for batch in batches:
        mean = posterior_mean(batch.A, factors)
        variance = posterior_variance(batch.A, batch.unexplained, factors)
        expected = batch.evaluate(*without_nan(batch.prior_mean + mean, variance))
        log_prob = log_prob + weight * expected.log_prob.sum(-1)
        site = sites(expected, mean, min_precision)
        if weight != 1.0:
            site = Sites(weight * site.lam, weight * site.beta)
        tied = tie(batch.A, site)
        target = tied if target is None else add(target, tied)
    target, log_prob = _added_up(target, log_prob, base, duals, ranks)
    return target, bound + log_prob


def _added_up(
    own: Duals | None, log_prob: Tensor, base: Duals | None, like: Duals, ranks: Ranks
) -> tuple[Duals, Tensor]:
    """Sum duals and log probabilities over all ranks, and add the base.

    Args:
        own: The duals of this rank's observations; with a single rank, including the base.
        log_prob: Their log probability.
        base: Duals of earlier knowledge.
        like: Duals of the right shape, in case there are none.
        ranks: The processes that share the observations.
    """
    if own is None:  # no data
        own = Duals(torch.zeros_like(like.lam), torch.zeros_like(like.B))
    if ranks.alone:
        return own, log_prob
    lam, B, log_prob = ranks.sum(*own, log_prob)
    total = Duals(lam, B)
    return total if base is None else add(base, total), log_prob


def natural_gradient_step(
    duals: Duals,
    batches: Iterable[Batch],
    rho: float = 1.0,
    base: Duals | None = None,
    weight: float = 1.0,
    latent_dims: int = 0,
    min_precision: float | None = 0.0,
    ranks: Ranks = ALONE,
) -> tuple[Duals, Tensor]:
    """Take one damped step of size ``rho``; see `natural_gradient_target` for the arguments.

    Returns:
        The new duals, and the bound at the old ones. Without ``min_precision``, a step after which
        there would be no posterior is shortened until there is one.
    """
    target, bound = natural_gradient_target(
        duals, batches, base, weight, latent_dims, min_precision, ranks=ranks
    )
    new = target if rho == 1.0 else interpolate(duals, target, rho)
    smallest = rho * 2.0**-16
    while min_precision is None and rho > smallest and not has_posterior(new):
        rho /= 2
        new = interpolate(duals, target, rho)
    return new, bound


def conjugate_duals(
    batches: Iterable[Batch], base: Duals | None, like: Duals, ranks: Ranks = ALONE
) -> tuple[Duals, Factors, Tensor]:
    r"""Return the duals of observations whose sites do not depend on the posterior, in one pass.

    Args:
        batches: The observations, in chunks.
        base: Duals of earlier knowledge.
        like: Duals of the right shape, in case there are no observations.
        ranks: The processes that share the observations.

    Returns:
        The duals, their posterior, and the bound: with :math:`Z` for the evidence of all sites,
        :math:`\log Z - \tfrac12 \sum_i \beta_i u_i + \sum_i \log p(y_i | f_i = \mu_i)`, where
        :math:`u_i` is the variance that the inducing points leave unexplained.
    """
    total = base if ranks.alone else None
    constant = torch.zeros_like(like.lam[..., 0])
    for batch in batches:
        zero = torch.zeros_like(batch.prior_mean)
        expected = batch.evaluate(batch.prior_mean, zero)
        site = sites(expected, zero)
        constant = constant + expected.log_prob.sum(-1)
        constant = constant - 0.5 * (site.beta * batch.unexplained).sum(-1)
        tied = tie(batch.A, site)
        total = tied if total is None else add(total, tied)
    total, constant = _added_up(total, constant, base, like, ranks)
    factors = factorise(total)
    return total, factors, constant + log_evidence(total, factors)


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
    ranks: Ranks = ALONE,
) -> tuple[Duals, Convergence]:
    """Take natural-gradient steps until the duals are those of their own posterior's sites.

    Args:
        duals: The duals to start from.
        batches: Returns the observations in chunks; called for each step.
        base: Duals of earlier knowledge.
        conjugate: Whether the sites do not depend on the posterior. Then there is one step, and a
            pass for the bound.
        latent_dims: See `natural_gradient_target`.
        min_precision: See `natural_gradient_target`.
        rho: The maximum step size.
        tol: Relative change of the duals at which to stop.
        max_steps: The maximum number of passes over the data.
        ranks: The processes that share the observations.
    """

    def step(state: Duals, strict: bool) -> tuple[Duals, Tensor]:
        return natural_gradient_target(
            state, batches(), base, 1.0, latent_dims, min_precision, strict, ranks
        )

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
    ranks: Ranks = ALONE,
) -> Sites:
    r"""Return the sites of one batch of observations at the fixed point, instead of their duals.

    This is the same iteration as in `converge`, but on ``n`` sites instead of an ``m x m`` matrix.
    With :math:`t_i` for the sites and :math:`Z` for their evidence, the bound is

    .. math::
        \sum_i E_q[\log p(y_i | f_i)] - E_q[\log t_i(f_i)] + \log Z.

    Args:
        batch: All observations.
        start: Sites to start from; by default those under the prior.
        base: Duals of earlier knowledge.
        conjugate: See `converge`.
        latent_dims: See `natural_gradient_target`.
        min_precision: See `natural_gradient_target`.
        rho: See `converge`.
        tol: See `converge`.
        max_steps: See `converge`.
        ranks: The processes that share the observations; sites are those of this one.
    """
    A, unexplained, prior_mean, evaluate = batch
    if start is None or conjugate:
        variance = unexplained + A.square().sum(-2)
        start = sites(evaluate(prior_mean, variance), torch.zeros_like(variance))
    if conjugate:
        return start
    signed = min_precision is None
    if signed and not has_posterior(_tied(A, start, base, ranks)):  # as hyperparameters have moved
        start = Sites(start.lam, start.beta.clamp_min(0))

    def step(state: Sites, strict: bool) -> tuple[Sites, Tensor]:
        duals = _tied(A, state, base, ranks)
        factors = factorise(duals, strict or signed)
        mean = posterior_mean(A, factors)
        variance = posterior_variance(A, unexplained, factors)
        expected = evaluate(*without_nan(prior_mean + mean, variance))
        log_site = state.lam * mean - 0.5 * state.beta * (mean.square() + variance)
        own = 0.5 * (state.beta * unexplained).sum(-1) + log_site.sum(-1)
        own, log_prob = ranks.sum(own, expected.log_prob.sum(-1))
        bound = log_evidence(duals, factors) - own
        if latent_dims:
            bound = bound.sum(tuple(range(-latent_dims, 0)))
        return sites(expected, mean, min_precision), log_prob + bound

    # The state has the batch shape of the bound, and that of the latents if there are several.
    shape = broadcast_shapes(start.lam.shape, A.shape[:-2] + A.shape[-1:])
    if base is not None:
        shape = broadcast_shapes(shape, (*base.lam.shape[:-1], shape[-1]))
    start = Sites(start.lam.expand(shape), start.beta.expand(shape))
    # If precisions may be negative, the target of a state may have no posterior.
    state, _ = fixed_point(
        step, start, False, rho, tol, max_steps, ranks=ranks, ahead_of_tol=not signed
    )
    return state


def _tied(A: Tensor, state: Sites, base: Duals | None, ranks: Ranks) -> Duals:
    duals = Duals(*ranks.sum(*tie(A, state)))
    return duals if base is None else add(duals, base)


@contextmanager
def step_limit(max_steps: int | None) -> Iterator[int]:
    """Yield the maximum number of steps; suppress the convergence warning if the user set it.

    Args:
        max_steps: The user's limit; ``None`` for 100, with a warning.
    """
    if max_steps is None:
        yield 100
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The sites have not converged after", NumericalWarning)
        yield max_steps


def fixed_point(
    step: Callable[[Pair, bool], tuple[Pair, Tensor]],
    state: Pair,
    conjugate: bool = False,
    rho: float = 1.0,
    tol: float = 1e-6,
    max_steps: int = 100,
    ranks: Ranks = ALONE,
    ahead_of_tol: bool = False,
) -> tuple[Pair, Convergence]:
    r"""Solve ``state = target(state)`` by an accelerated iteration that does not lower the bound.

    Each member of the batch has its own step size. Plain steps go from the state towards its
    target, along the natural gradient, so a step that is small enough raises the bound. A step is
    halved if it would lower the bound (or end where there is none). After a successful step, the
    next size is that which would have solved the equation if ``target`` were linear along the
    residual :math:`r`. This is the secant step
    :math:`\rho \, \langle r, r \rangle / \langle r, r - r' \rangle`, limited to ``rho``. Once there
    are steps to learn from, Anderson extrapolation is tried. If it would lower the bound, these
    steps are discarded and a plain step is made. A member has converged when its target differs
    from its state by less than ``tol``, relative to `_Layout.scale`.

    Args:
        step: Maps a state to its target and to the bound at the state (``...``, the batch shape).
            Its second argument tells whether the state may have no posterior, in which case the
            bound is NaN.
        state: The state to start from: a pair of tensors with leading batch shape ``...``.
        conjugate: Whether the target does not depend on the state. Then it is the solution.
        rho: The maximum step size.
        tol: The relative tolerance.
        max_steps: The maximum number of calls to ``step``.
        ranks: The processes, each of which has some elements of the state. Bounds are totals.
        ahead_of_tol: Whether to return the target of the final state, if that is within the
            tolerance. This has no extra cost, and the target is mostly closer to the solution.
    """
    target, bound = step(state, False)
    if conjugate:
        _, bound = step(target, False)
        return target, Convergence(2, torch.zeros_like(bound), bound, True)
    layout = _Layout(target, bound.dim(), ranks)
    state = type(target)(*(s.expand_as(t) for s, t in zip(state, target, strict=True)))
    now, ahead = layout.pack(state), layout.pack(target)
    rhos = torch.full_like(bound, rho)
    tol = max(tol, 16 * torch.finfo(bound.dtype).eps)  # no tighter than rounding allows
    # A step smaller than this changes the bound by less than its rounding error.
    smallest = rho * 2.0**-16
    slack = torch.finfo(bound.dtype).eps ** 0.5 * 1e-2
    steps, history = 1, _History(bound, ranks)
    while True:
        scale, move = layout.scale(now, ahead), ahead - now
        change = move / scale
        residual = ranks.largest(_largest(change)).nan_to_num(nan=torch.inf)
        unfinished = residual > tol
        active = unfinished & (rhos > smallest)
        accelerated = active & history.usable()
        plain = active & ~accelerated
        # All decisions of a step, with one host synchronisation.
        flags = torch.stack([plain, accelerated, unfinished], -1).reshape(-1, 3).any(0)
        goes_plainly, extrapolates, is_left = flags.cpu().tolist()
        if not (goes_plainly or extrapolates) or steps >= max_steps:
            break
        trial = now
        if goes_plainly:
            trial = now + torch.where(plain, rhos, 0.0).unsqueeze(-1) * move
        if extrapolates:
            further = history.extrapolate(ahead, change, scale)
            trial = torch.where(accelerated.unsqueeze(-1), further, trial)
        target, trial_bound = step(layout.unpack(trial), True)
        trial_ahead = layout.pack(target)
        steps += 1
        accepted = active & (trial_bound >= bound - slack * (1 + bound.abs()))
        trial_move = trial_ahead - trial
        if extrapolates:
            history.forget(accelerated & ~accepted)
        history.remember(accepted, trial - now, trial_move - move)
        if goes_plainly:
            secant = _secant(change, trial_move / scale, rhos, ranks).clamp_max(rho)
            rhos = torch.where(plain, torch.where(accepted, secant, rhos / 2), rhos)
        moves = accepted.unsqueeze(-1)
        now, ahead = torch.where(moves, trial, now), torch.where(moves, trial_ahead, ahead)
        bound = torch.where(accepted, trial_bound, bound)
    if is_left and (steps >= max_steps or float(residual.max()) > _STUCK):
        reason = f"after {steps} natural-gradient steps"
        advice = "allow more steps or a smaller step size"
        if steps < max_steps:
            reason = "and no step raises the bound any more"
            advice = "check the scale of inputs, targets and hyperparameters"
        warnings.warn(
            f"The sites have not converged {reason} (largest relative change "
            f"{residual.max().item():.1e}, tolerance {tol:.1e}); {advice}.",
            NumericalWarning,
            stacklevel=3,
        )
    if ahead_of_tol and not is_left:
        now = ahead
    return layout.unpack(now), Convergence(steps, residual, bound, not is_left)


class _Layout(Generic[Pair]):
    """A layout of pairs of tensors as vectors, one vector for each member of the batch.

    Args:
        like: A pair of the shapes to be packed, with leading batch dimensions.
        batch_dims: The number of batch dimensions.
        ranks: The processes, each of which has some elements of the tensors.
    """

    def __init__(self, like: Pair, batch_dims: int, ranks: Ranks) -> None:
        self.ranks = ranks
        self.kind: type[Pair] = type(like)
        self.batch_dims = batch_dims
        self.shapes: list[torch.Size] = [tensor.shape[batch_dims:] for tensor in like]
        self.sizes = [shape.numel() for shape in self.shapes]

    def pack(self, pair: Pair) -> Tensor:
        """Return ``... x k``, all elements of both tensors."""
        return torch.cat([tensor.flatten(self.batch_dims) for tensor in pair], -1)

    def unpack(self, vector: Tensor) -> Pair:
        """Return the pair that a vector was packed from."""
        parts = zip(vector.split(self.sizes, -1), self.shapes, strict=True)
        return self.kind(*(part.reshape(*part.shape[:-1], *shape) for part, shape in parts))

    def scale(self, state: Tensor, target: Tensor) -> Tensor:
        """Return ``... x k``, the scale that a change of each element is compared with.

        This is the largest element of the tensor before or after the step. (The sites of labels
        that a state is too certain of vanish.) For natural means, it is the root of the largest
        precision if that is larger, because natural means may cancel: those of equally many ones
        and zeros at an input do.
        """
        smallest = torch.finfo(target.dtype).tiny
        lam, precision = torch.maximum(state.abs(), target.abs()).split(self.sizes, -1)
        both = torch.stack([_largest(lam), _largest(precision)])
        largest_lam, largest = self.ranks.largest(both).unsqueeze(-1)
        largest = largest.clamp_min(smallest)
        means = torch.maximum(largest_lam, largest.sqrt())
        return torch.cat([means.expand_as(lam), largest.expand_as(precision)], -1)


class _History:
    r"""The last few steps of an iteration, for Anderson extrapolation.

    With changes of states :math:`\Delta S` and of residuals :math:`\Delta R` as columns, the next
    state is :math:`s + r - (\Delta S + \Delta R) \gamma`, where :math:`\gamma` minimises
    :math:`|r - \Delta R \gamma|`. It is the solution if the equation is linear and the steps span
    the space. A step that a member of the batch did not make is a column of zeros.
    """

    depth = 5

    def __init__(self, bound: Tensor, ranks: Ranks) -> None:
        self.ranks = ranks
        self.none = torch.zeros_like(bound, dtype=torch.bool)
        # For each step: the sum of step and change of the residual, the change of the residual, and
        # which members of the batch made the step.
        self.steps: list[tuple[Tensor, Tensor, Tensor]] = []

    def usable(self) -> Tensor:
        """Return which members of the batch have steps to learn from."""
        if not self.steps:
            return self.none
        return torch.stack([made for _, _, made in self.steps]).any(0)

    def forget(self, members: Tensor) -> None:
        """Discard all steps of some members."""
        self.steps = [(total, change, made & ~members) for total, change, made in self.steps]

    def remember(self, members: Tensor, move: Tensor, change: Tensor) -> None:
        """Record a step of some members, and the change of the residual."""
        made = members.unsqueeze(-1)
        latest = torch.where(made, move + change, 0.0), torch.where(made, change, 0.0), members
        self.steps = [*self.steps, latest][-self.depth :]

    def extrapolate(self, target: Tensor, residual: Tensor, scale: Tensor) -> Tensor:
        """Return the next state; the residual must already be divided by the scale."""
        totals, changes = (torch.stack([step[i] for step in self.steps], -2) for i in (0, 1))
        made = torch.stack([made for _, _, made in self.steps], -1).unsqueeze(-1)
        changes = changes / scale.unsqueeze(-2)
        gram, product = self.ranks.sum(changes @ changes.mT, changes @ residual.unsqueeze(-1))
        size = gram.diagonal(dim1=-2, dim2=-1).sqrt().unsqueeze(-1)
        made = made & (size > 0)
        size = torch.where(made, size, 1.0)
        gram = torch.where(made & made.mT, gram / (size * size.mT), 0.0)
        # A small ridge for steps that are nearly parallel, and ones for steps that were not made.
        ridge = torch.where(made, torch.finfo(gram.dtype).eps ** (2 / 3), 1.0).to(gram)
        product = torch.where(made, product / size, 0.0)
        gamma = torch.linalg.solve_ex(gram + torch.diag_embed(ridge.squeeze(-1)), product).result
        return target - ((gamma / size).mT @ totals).squeeze(-2)


def without_nan(mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
    """Replace NaN in moments where there is no posterior (and no bound) by valid values."""
    return mean.nan_to_num(), variance.nan_to_num(nan=1.0)


def _largest(vectors: Tensor) -> Tensor:
    """Return the largest absolute value of each of ``... x k`` vectors; zero if they are empty."""
    if vectors.shape[-1] == 0:
        return vectors.new_zeros(vectors.shape[:-1])
    return vectors.abs().amax(-1)


def _secant(before: Tensor, after: Tensor, rhos: Tensor, ranks: Ranks) -> Tensor:
    """Return the step size suggested by the residuals before and after a step; at least 1/4."""
    square, product = ranks.sum(before.square().sum(-1), (before * (before - after)).sum(-1))
    step = torch.where(product > 0, rhos * square / product, torch.inf)
    return torch.maximum(step, rhos / 4)

r"""Streams that drift: letting everything old fade, and by how much.

With a discount :math:`\gamma`, all that has been learnt before counts :math:`\gamma` times what it
did, whether it is remembered or folded. The duals are sums over observations, so that is the
posterior with duals :math:`\gamma (\lambda, B)`, of which the factor :math:`I + \gamma B` costs one
small Cholesky factorisation. Hence the density of a new batch before it is learnt is known for a
few candidates at little cost.

``discount="auto"`` compares them. The log of the ratio of a candidate's density to that without a
discount is summed over batches, and a candidate is used once that evidence is large. If nothing
changes, the ratio has an expectation of one, so evidence of :math:`c` nats for one of :math:`k`
candidates has a probability of about :math:`k e^{-c}`. A model whose noise is too small would
prefer any discount, though, since that makes it less certain. So a batch only counts if it is less
probable than the observations at hand are, each left out in turn: by itself, or with those before
it, since a function that moves slowly surprises a little each time.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from seqgp.dual import Duals, factorise, posterior_mean, posterior_variance
from seqgp.likelihoods import log_predictive
from seqgp.observations import Observations
from seqgp.streaming.learning import leave_one_out
from seqgp.streaming.model import StreamModel

#: What ``discount="auto"`` chooses from, beside no discount.
CANDIDATES = (0.9, 0.6, 0.3, 0.1, 0.01)
#: Evidence, in nats, at which a candidate is used.
EVIDENCE = 6.0
#: By how many standard errors a batch has to be less probable than what is remembered.
SURPRISE = 2.5
#: The fewest observations by which that can be judged.
FEWEST = 30
#: How much of the evidence of earlier batches counts at the next one.
KEEP = 0.8


class Discounting(NamedTuple):
    """What has been decided about a batch.

    Attributes:
        factor: The factor for all that was known before.
        evidence: The evidence for each candidate so far, by how many nats batches have been less
            probable than what is remembered, and the variance of that.
    """

    factor: float
    evidence: tuple[float, ...]


@torch.no_grad()
def discount_for(
    model: StreamModel, X: Tensor, Y: Tensor, evidence: tuple[float, ...]
) -> Discounting:
    """The discount that raw observations ask for, of a model that remembers all that it knows.

    Args:
        model: The model before it has learnt them.
        X: ``n x d`` inputs.
        Y: ``n x m`` observations.
        evidence: As for `choose_discount`.
    """
    new = model.transformed(model.checked(X, Y, None, {}))
    old = model.transformed(model.stream.observations)
    return choose_discount(model, new, old, model.stream.counts, evidence)


@torch.no_grad()
def choose_discount(
    model: StreamModel,
    new: Observations,
    old: Observations,
    counts: Tensor,
    evidence: tuple[float, ...],
) -> Discounting:
    """The discount that a new batch asks for.

    Args:
        model: The model before it has learnt the batch.
        new: The new observations, as the strategy sees them.
        old: Those that it remembers.
        counts: ``n``, how often each of these is part of the posterior.
        evidence: What there was before; may be empty.
    """
    *earlier, lost, variance = evidence or (0.0,) * (len(CANDIDATES) + 2)
    ranks = model.variational_strategy.ranks
    if not ranks.total(len(new)) or ranks.total(len(old)) < FEWEST:
        return Discounting(1.0, (*earlier, lost, variance))
    present = ranks.gather(density_with(model, new, 1.0))
    loss, error = _loss(present, ranks.gather(leave_one_out(model, old, counts)))
    lost, variance = KEEP * lost + loss, KEEP**2 * variance + error**2
    surprising = loss > SURPRISE * error or lost > SURPRISE * variance**0.5
    if not surprising:
        return Discounting(1.0, (*(KEEP * value for value in earlier), lost, variance))
    densities = [ranks.gather(density_with(model, new, factor)) for factor in CANDIDATES]
    ratios = [(density - present).nan_to_num(0.0).sum().item() for density in densities]
    now = tuple(max(KEEP * old + ratio, 0.0) for old, ratio in zip(earlier, ratios, strict=True))
    best = max(range(len(now)), key=lambda k: now[k])
    if now[best] < EVIDENCE:
        return Discounting(1.0, (*now, lost, variance))
    return Discounting(CANDIDATES[best], ())


def _loss(new: Tensor, old: Tensor) -> tuple[float, float]:
    """How many nats less probable new observations are than old ones, and its standard error."""
    new, old = (density.nan_to_num(0.0).flatten() for density in (new, old))
    error = (old.var() * (1 / len(old) + 1 / len(new))).sqrt()
    return len(new) * float(old.mean() - new.mean()), len(new) * float(error)


@torch.no_grad()
def density_with(model: StreamModel, data: Observations, factor: float) -> Tensor:
    """Log predictive densities of observations if all that is known counted less.

    Args:
        model: The model.
        data: The observations, as the strategy sees them.
        factor: How much it counts.
    """
    strategy = model.variational_strategy
    state = strategy.state()
    factors = state.factors
    if factor != 1.0:
        factors = factorise(Duals(factor * state.duals.lam, factor * state.duals.B))
    A, unexplained, prior_mean = strategy.whitened(state.chol, state.shared, data)
    mean = prior_mean + posterior_mean(A, factors)
    variance = posterior_variance(A, unexplained, factors)
    if strategy.num_latents is not None:
        mean, variance = mean.mT, variance.mT
    return log_predictive(model.likelihood, data.targets, mean, variance, **data.arguments)


@torch.no_grad()
def fade(model: StreamModel, num_old: int, factor: float) -> None:
    """Let all that has been learnt count less.

    Args:
        model: The model.
        num_old: How many of the observations at hand are old; they come first.
        factor: How much it counts.
    """
    stream = model.stream
    age = stream.fade.clone()
    age[:num_old] *= factor
    model.stream = replace(stream, fade=age, fades=True)
    model.variational_strategy.discount(factor)

r"""Streams that drift: letting everything old fade, and by how much.

With a discount :math:`\gamma`, all that has been learnt before counts :math:`\gamma` times what it
did, whether it is remembered or folded. The duals are sums over observations, so that is the
posterior with duals :math:`\gamma (\lambda, B)`. Hence the evidence of a new batch before it is
learnt, :math:`\log p_\gamma(y) = \log Z[\gamma (\lambda, B) + \text{its sites}] - \log
Z[\gamma (\lambda, B)]` (a bound, if it is not Gaussian), is known for a few candidates at little
cost. It is that of the batch as a whole: a function that has moved a little is wrong in the same
way at neighbouring inputs, which says much more than that each of them is a little less probable.

``discount="auto"`` compares them. The log of the ratio of a candidate's evidence to that without a
discount is added up from batch to batch, never below zero, and the candidate is used once the sum
is large. So changes are noticed that are abrupt, or small but lasting. If nothing changes, the
ratio has an expectation of one, so a sum of :math:`c` nats for one of :math:`k` candidates has a
probability of about :math:`k e^{-c}` at each batch.

That holds if the model is right. One whose noise is too small, or whose kernel is too smooth, would
prefer any discount, since that makes it less certain. So before a candidate is used, the same ratio
is computed for parts of the memory, each left out. What it is there has other reasons than a
change, and does not count.
"""

from __future__ import annotations

from dataclasses import replace
from statistics import mean, stdev
from typing import NamedTuple

import torch
from torch import Tensor

from seqgp.dual import Duals, Sites, factorise, tie
from seqgp.dual.natural_gradient import conjugate_duals, converge
from seqgp.dual.posterior import log_evidence
from seqgp.likelihoods.traits import is_conjugate, precision_floor
from seqgp.observations import Observations
from seqgp.streaming.model import StreamModel

#: What ``discount="auto"`` chooses from, beside no discount.
CANDIDATES = (0.9, 0.6, 0.3, 0.1, 0.01)
#: Evidence, in nats, at which a candidate is used.
EVIDENCE = 5.0
#: Of candidates whose evidence differs by less than this, the one that keeps the most is used.
ALIKE = 2.0
#: The fewest observations in memory that have not faded by half, by which other reasons than a
#: change can be told.
FEWEST = 30
#: How many parts of the memory are left out, one after the other.
PARTS = 10
#: The most observations of a batch that are looked at.
MOST = 500
#: Relative tolerance of the sites.
TOLERANCE = 1e-4


class Discounting(NamedTuple):
    """What has been decided about a batch.

    Attributes:
        factor: The factor for all that was known before.
        evidence: For each candidate the evidence so far, and then for each how many observations
            that is from.
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
    evidence = evidence or (0.0,) * (2 * len(CANDIDATES))
    ranks = model.variational_strategy.ranks
    number = ranks.total(len(new))
    # What has faded is not like the stream any more.
    lasting = (counts >= 0.5).nonzero().squeeze(-1)
    if not number or ranks.total(len(lasting)) < FEWEST:
        return Discounting(1.0, evidence)
    nats, known = evidence[: len(CANDIDATES)], evidence[len(CANDIDATES) :]
    ratios = log_ratios(model, _some(new), model.variational_strategy.state().duals)
    scale = number / ranks.total(len(_some(new)))
    nats = tuple(max(before + scale * now, 0.0) for before, now in zip(nats, ratios, strict=True))
    known = tuple(n + number if e else 0.0 for e, n in zip(nats, known, strict=True))
    if max(nats) >= EVIDENCE:
        usual = usual_ratios(model, old.select(lasting), counts[lasting], number)
        parts = zip(nats, known, usual, strict=True)
        nats = tuple(max(e - most_usual(u, n), 0.0) for e, n, u in parts)
        known = (0.0,) * len(known)
    enough = max(EVIDENCE, max(nats) - ALIKE)
    chosen = [factor for factor, e in zip(CANDIDATES, nats, strict=True) if e >= enough]
    if chosen:
        return Discounting(chosen[0], ())
    return Discounting(1.0, (*nats, *known))


def _some(data: Observations) -> Observations:
    """At most so many observations of a batch as are looked at."""
    step = -(-len(data) // MOST)
    return data.select(slice(None, None, step)) if step > 1 else data


class Usual(NamedTuple):
    """The log of how much more probable parts of the memory are with a candidate.

    Attributes:
        size: How many observations there are in a part.
        mean: The mean over parts.
        deviation: The standard deviation.
    """

    size: float
    mean: float
    deviation: float


def most_usual(usual: Usual, number: float) -> float:
    """How much a candidate may well gain by a number of observations if nothing has changed.

    Two standard deviations more than the mean; nothing, unless that is positive beyond chance.

    Args:
        usual: What it gains by parts of the memory.
        number: How many observations.
    """
    parts = number / usual.size
    if usual.mean * PARTS**0.5 <= usual.deviation:
        return 0.0
    return parts * usual.mean + 2 * parts**0.5 * usual.deviation


@torch.no_grad()
def usual_ratios(model: StreamModel, old: Observations, counts: Tensor, number: int) -> list[Usual]:
    """How much each candidate gains by parts of what is remembered, each left out.

    Args:
        model: The model.
        old: The observations that it remembers, as the strategy sees them.
        counts: ``n``, how often each of these is part of the posterior.
        number: The size of the parts, if there are enough.
    """
    strategy, n = model.variational_strategy, len(old)
    ranks, state = strategy.ranks, strategy.state()
    held = ranks.total(n)
    size = max(min(held // PARTS, number, MOST), 1)
    site, _ = strategy.sites(old, likelihood=model.likelihood)
    A = strategy.whitened(state.chol, state.shared, old).A
    order = torch.randperm(n, generator=torch.Generator().manual_seed(n), device="cpu")
    each = -(-size * n // held)  # of this rank
    found = []
    for k in range(PARTS):
        part = order[k * each : (k + 1) * each].to(counts.device)
        weight = counts[part]
        own = Sites(weight * site.lam[..., part], weight * site.beta.expand_as(site.lam)[..., part])
        lam, B = ranks.sum(*tie(A[..., part], own))
        without = Duals(state.duals.lam - lam, state.duals.B - B)
        found.append(log_ratios(model, old.select(part), without))
    return [Usual(size, mean(own), stdev(own)) for own in zip(*found, strict=True)]


@torch.no_grad()
def log_ratios(model: StreamModel, data: Observations, duals: Duals) -> list[float]:
    """For each candidate the log of how much more probable observations are than without it.

    Args:
        model: The model.
        data: Observations, as the strategy sees them.
        duals: The duals of everything known without these observations.
    """
    values = [evidence_of(model, data, duals, factor) for factor in (1.0, *CANDIDATES)]
    return [value - values[0] for value in values[1:]]


@torch.no_grad()
def evidence_of(model: StreamModel, data: Observations, duals: Duals, factor: float) -> float:
    """The evidence of observations, or a bound of it, if all that is known counted less.

    Args:
        model: The model.
        data: Observations, as the strategy sees them.
        duals: The duals of everything known without these observations.
        factor: How much it counts.
    """
    strategy, likelihood = model.variational_strategy, model.likelihood
    batches = strategy.batches(strategy.state(), replace(data, weights=None), likelihood)
    base = Duals(factor * duals.lam, factor * duals.B)
    if is_conjugate(likelihood):
        bound = conjugate_duals(batches(), base, base, strategy.ranks)[2]
    else:
        _, info = converge(
            base,
            batches,
            base,
            latent_dims=strategy.latent_dims,
            min_precision=precision_floor(likelihood),
            tol=TOLERANCE,
            ranks=strategy.ranks,
        )
        bound = info.elbo
    return float(bound.sum() - log_evidence(base, factorise(base)).sum())


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

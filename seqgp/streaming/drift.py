r"""Streams that drift: discounting old observations, and choosing the discount.

With a discount :math:`\gamma`, everything learnt before counts :math:`\gamma` times as much as
before, whether it is in the memory or folded. Since duals are sums over observations, this is the
posterior with duals :math:`\gamma (\lambda, B)`. So the evidence of a new batch before it is
learnt, :math:`\log p_\gamma(y) = \log Z[\gamma (\lambda, B) + \text{its sites}] - \log
Z[\gamma (\lambda, B)]` (a bound, if it is not Gaussian), can be computed for a few candidates at
little cost. It is the evidence of the batch as a whole. If a function has changed a little, its
errors are similar at neighbouring inputs. This says much more than the fact that each observation
is a little less probable.

``discount="auto"`` compares the candidates. The log ratio of a candidate's evidence to that without
a discount is added up from batch to batch, never below zero, and the candidate is used once the sum
is large. So both abrupt changes and small but lasting ones are detected. If nothing changes, the
ratio has an expectation of one. Then the sum of one of :math:`k` candidates reaches :math:`c` nats
with a probability of about :math:`k e^{-c}` at each batch.

This holds if the model is right. A model with too little noise, or too smooth a kernel, would
prefer any discount, since that makes it less certain. So before a candidate is used, the same ratio
is computed for parts of the memory, each left out. A gain that also occurs there has other causes
than a change, and does not count.

A function that keeps moving causes one such change after the other. So from the second one on,
everything also fades with time, by :math:`e^{-n/w}` for :math:`n` new observations. The window
:math:`w` is the number of observations since the previous change, and is halved at each further
one. It is doubled once new observations have been more probable without fading, by :math:`c'` nats.
So the window of a function that has come to rest grows again.
"""

from __future__ import annotations

import math
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

#: The candidates of ``discount="auto"``, besides no discount.
CANDIDATES = (0.9, 0.6, 0.3, 0.1, 0.01)
#: Evidence, in nats, at which a candidate is used.
EVIDENCE = 5.0
#: Among candidates whose evidence differs by less than this, the largest factor is used.
ALIKE = 2.0
#: Minimum number of observations in memory that have not faded by half. With fewer, a change cannot
#: be told from other causes.
FEWEST = 30
#: Evidence, in nats, at which a window is doubled.
DOUBT = 1.0
#: The shortest window: with fewer observations, a change cannot be told from other causes.
LEAST_WINDOW = 2.0 * FEWEST
#: The number of parts of the memory that are left out, one at a time.
PARTS = 10
#: The maximum number of observations of a batch that are used.
MOST = 500
#: Relative tolerance of the sites.
TOLERANCE = 1e-4


class Drift(NamedTuple):
    """What is known about the drift of a stream.

    Attributes:
        nats: The evidence so far for each candidate.
        known: The number of observations that it comes from, for each candidate.
        since: The number of observations since the last change.
        changes: The number of changes.
        window: The number of observations after which everything has faded to :math:`1/e`.
        doubt: The evidence so far against that.
    """

    nats: tuple[float, ...] = (0.0,) * len(CANDIDATES)
    known: tuple[float, ...] = (0.0,) * len(CANDIDATES)
    since: float = 0.0
    changes: float = 0.0
    window: float = math.inf
    doubt: float = 0.0

    @classmethod
    def of(cls, values: tuple[float, ...]) -> Drift:
        """Return what plain numbers say; nothing is known if there are none."""
        k = len(CANDIDATES)
        return cls(values[:k], values[k : 2 * k], *values[2 * k :]) if values else cls()

    @property
    def values(self) -> tuple[float, ...]:
        """Plain numbers, as a stream stores them."""
        return (*self.nats, *self.known, *self[2:])

    def after_change(self) -> Drift:
        """Return what is known once a change has been detected and everything old discounted."""
        window = math.inf
        if self.changes:
            window = max(min(self.since, self.window / 2), LEAST_WINDOW)
        return Drift(changes=self.changes + 1, window=window)


class Discounting(NamedTuple):
    """The choice of a discount for a batch.

    Attributes:
        factor: The factor for everything learnt before.
        evidence: What is known about the drift, see `Drift.values`.
    """

    factor: float
    evidence: tuple[float, ...]


@torch.no_grad()
def discount_for(
    model: StreamModel, X: Tensor, Y: Tensor, evidence: tuple[float, ...]
) -> Discounting:
    """Choose the discount for raw observations, for a model that keeps all observations.

    Args:
        model: The model before it has learnt them.
        X: ``n x d`` inputs.
        Y: ``n x m`` observations.
        evidence: See `choose_discount`.
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
    """Choose the discount for a new batch.

    Args:
        model: The model before it has learnt the batch.
        new: The new observations, as the strategy sees them.
        old: The remembered observations.
        counts: ``n``, how often each of these is part of the posterior.
        evidence: What earlier batches said, see `Drift.values`; may be empty.
    """
    drift, ranks = Drift.of(evidence), model.variational_strategy.ranks
    number = ranks.total(len(new))
    usual_fading = math.exp(-number / drift.window)
    drift = drift._replace(since=drift.since + number)
    # Observations that have faded are no longer representative of the stream.
    lasting = (counts >= 0.5).nonzero().squeeze(-1)
    if not number or ranks.total(len(lasting)) < FEWEST:
        return Discounting(usual_fading, drift.values)
    scale = number / ranks.total(len(_some(new)))
    duals = model.variational_strategy.state().duals
    faded = Duals(usual_fading * duals.lam, usual_fading * duals.B)
    ratios = [scale * ratio for ratio in log_ratios(model, _some(new), faded)]
    nats = tuple(max(e + ratio, 0.0) for e, ratio in zip(drift.nats, ratios, strict=True))
    known = tuple(n + number if e else 0.0 for e, n in zip(nats, drift.known, strict=True))
    if max(nats) >= EVIDENCE:
        usual = usual_ratios(model, old.select(lasting), counts[lasting], number)
        parts = zip(nats, known, usual, strict=True)
        nats = tuple(max(e - most_usual(u, n), 0.0) for e, n, u in parts)
        known = (0.0,) * len(known)
    enough = max(EVIDENCE, max(nats) - ALIKE)
    chosen = [factor for factor, e in zip(CANDIDATES, nats, strict=True) if e >= enough]
    if chosen:
        return Discounting(chosen[0] * usual_fading, drift.after_change().values)
    drift = drift._replace(nats=nats, known=known)
    if usual_fading < 1:
        with_fading, without = (evidence_of(model, _some(new), d, 1.0) for d in (faded, duals))
        doubt = max(drift.doubt + scale * (without - with_fading), 0.0)
        drift = drift._replace(doubt=doubt)
        if doubt >= DOUBT:
            window = 2 * drift.window if drift.window < model.stream.num_seen else math.inf
            drift = drift._replace(window=window, doubt=0.0)
    return Discounting(usual_fading, drift.values)


def _some(data: Observations) -> Observations:
    """Return at most `MOST` observations of a batch."""
    step = -(-len(data) // MOST)
    return data.select(slice(None, None, step)) if step > 1 else data


class Usual(NamedTuple):
    """The log ratios of parts of the memory, as statistics of one candidate.

    Attributes:
        size: The number of observations in a part.
        mean: The mean over parts.
        deviation: The standard deviation over parts.
    """

    size: float
    mean: float
    deviation: float


def most_usual(usual: Usual, number: float) -> float:
    """Return the gain that a candidate may well have from observations if nothing has changed.

    This is the mean plus two standard deviations; zero, unless it is significantly positive.

    Args:
        usual: The log ratios of parts of the memory.
        number: The number of observations.
    """
    parts = number / usual.size
    if usual.mean * PARTS**0.5 <= usual.deviation:
        return 0.0
    return parts * usual.mean + 2 * parts**0.5 * usual.deviation


@torch.no_grad()
def usual_ratios(model: StreamModel, old: Observations, counts: Tensor, number: int) -> list[Usual]:
    """Return the log ratios of each candidate for parts of the memory, each left out.

    Args:
        model: The model.
        old: The remembered observations, as the strategy sees them.
        counts: ``n``, how often each of these is part of the posterior.
        number: The size of the parts, if there are enough observations.
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
    """Return, for each candidate, the log ratio of its evidence to that without discount.

    Args:
        model: The model.
        data: Observations, as the strategy sees them.
        duals: The duals of everything learnt without these observations.
    """
    values = [evidence_of(model, data, duals, factor) for factor in (1.0, *CANDIDATES)]
    return [value - values[0] for value in values[1:]]


@torch.no_grad()
def evidence_of(model: StreamModel, data: Observations, duals: Duals, factor: float) -> float:
    """Return the evidence of observations, or a bound of it, after a discount.

    Args:
        model: The model.
        data: Observations, as the strategy sees them.
        duals: The duals of everything learnt without these observations.
        factor: The discount.
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
    """Discount everything that has been learnt.

    Args:
        model: The model.
        num_old: The number of old observations among those at hand; they come first.
        factor: The discount.
    """
    stream = model.stream
    age = stream.fade.clone()
    age[:num_old] *= factor
    model.stream = replace(stream, fade=age, fades=True)
    model.variational_strategy.discount(factor)

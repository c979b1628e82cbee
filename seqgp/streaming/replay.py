r"""How much of what has been folded the memory stands for.

An observation that is not Gaussian is folded with the site that it has at that time. If the
posterior moves on, the site grows stale. The worst case is a stream of one class, followed by
another: where everything is certain, sites have no curvature, so that the summary of the first
class does not object to the second one.

The memory is a sample of the stream, and its sites are always current. Each remembered observation
stands for :math:`n_i` observations of the stream. If the summary :math:`t` does not count, the
posterior is proportional to

.. math:: p(f) \prod_i p(y_i \mid f_i)^{n_i^\rho}

With :math:`\rho = 1` every observation of the stream counts once in expectation. But an observation
that counts many times says no more about :math:`f` elsewhere than one that counts once: if the
memory is a small part of the stream, the posterior becomes too certain. With :math:`\rho = 0` it is
that of the memory alone. With the summary nothing is lost to sampling; without it nothing is stale.
Which one predicts better is asked of the observations at hand, each left out with all that it
counts for.
"""

from __future__ import annotations

from dataclasses import replace

from linear_operator.utils.errors import NanError, NotPSDError
from torch import Tensor

from seqgp.likelihoods.traits import is_conjugate
from seqgp.streaming.learning import is_better, stream_densities
from seqgp.streaming.model import StreamModel

#: Powers of how many observations each one stands for. The others are tried if the first is better.
POWERS = (0.5, 0.0, 1.0)
#: How many standard errors make the summary stale. It is asked often, so that two are too few. A
#: summary that has been stale stays out as long as the memory predicts better at all.
CERTAINTY = 3.0
#: The memory has to stand for at least this share of the stream.
LEAST_SHARE = 0.5


def choose_replay(model: StreamModel, stream_size: int, max_steps: int | None = None) -> None:
    """Let the memory stand for what has been folded if the summary has grown stale.

    Args:
        model: The model, whose posterior is that of the chosen replay afterwards.
        stream_size: How many observations there have been, including those at hand.
        max_steps: The largest number of passes over the data for each candidate.
    """
    strategy, before = model.variational_strategy, model.stream
    if is_conjugate(model.likelihood) or not strategy.has_summary:
        return
    (stands_for,) = strategy.ranks.sum(before.represents.sum())
    if not before.replay and stands_for < LEAST_SHARE * stream_size:
        return

    def densities(replay: float, power: float = 1.0) -> Tensor | None:
        model.stream = replace(before, replay=replay, power=power)
        try:
            with strategy.ranks.together():
                model.refresh(max_steps=max_steps)
                return stream_densities(model)
        except (FloatingPointError, NanError, NotPSDError):
            return None  # a replay without a posterior is no candidate

    with_summary = densities(0.0)

    def gains(density: Tensor | None) -> bool:
        if density is None or with_summary is None:
            return density is not None
        return is_better(density, with_summary, 0.0 if before.replay else CERTAINTY)

    found = {power: densities(1.0, power) for power in (POWERS if before.replay else POWERS[:1])}
    if not before.replay and gains(found[POWERS[0]]):
        found |= {power: densities(1.0, power) for power in POWERS[1:]}
    known = {power: density for power, density in found.items() if density is not None}
    best = max(known, key=lambda power: float(known[power].mean()), default=None)
    if best is not None and gains(known[best]):
        model.stream = replace(before, replay=1.0, power=best)
    else:
        model.stream = replace(before, replay=0.0, power=1.0)
    model.refresh(max_steps=max_steps)

r"""Replay: how much of the folded observations the memory represents.

An observation that is not Gaussian is folded with its site at that time. If the posterior changes
later, the site becomes stale. The worst case is a stream of one class, followed by another: where
the model is certain, sites have no curvature, so the summary of the first class does not oppose the
second one.

The memory is a sample of the stream, and its sites are always current. Each remembered observation
stands for :math:`n_i` observations of the stream. If the summary :math:`t` does not count, the
posterior is proportional to

.. math:: p(f) \prod_i p(y_i \mid f_i)^{n_i^\rho}

With :math:`\rho = 1` every observation of the stream counts once in expectation. But an observation
that counts many times contains no more information about :math:`f` elsewhere than one that counts
once: if the memory is a small part of the stream, the posterior becomes too certain. With
:math:`\rho = 0` it is the posterior given the memory alone. With the summary nothing is lost to
sampling; without it nothing is stale. The choice is made by leave-one-out densities of the
observations at hand, where each is left out with its full weight.
"""

from __future__ import annotations

from dataclasses import replace

from linear_operator.utils.errors import NanError, NotPSDError
from torch import Tensor

from seqgp.likelihoods.traits import is_conjugate
from seqgp.streaming.draft import adopt, draft_of
from seqgp.streaming.learning import is_better, stream_densities
from seqgp.streaming.model import StreamModel

#: Candidates for the power :math:`\rho`. The others are tried if the first is better.
POWERS = (0.5, 0.0, 1.0)
#: Standard errors by which the memory has to be better. The test is frequent, so two are too few.
#: A summary that was stale stays out as long as the memory predicts better at all.
CERTAINTY = 3.0
#: The memory has to stand for at least this share of the stream.
LEAST_SHARE = 0.5


def choose_replay(model: StreamModel, stream_size: int, max_steps: int | None = None) -> None:
    """Let the memory replace the summary if the summary has become stale.

    Args:
        model: The model, whose posterior is afterwards that of the chosen replay.
        stream_size: The number of observations so far, including those at hand.
        max_steps: The maximum number of passes over the data for each candidate.
    """
    strategy, before = model.variational_strategy, model.stream
    if is_conjugate(model.likelihood) or not strategy.has_summary:
        return
    (stands_for,) = strategy.ranks.sum(before.represents.sum())
    if not before.replay and stands_for < LEAST_SHARE * stream_size:
        return

    def candidate(replay: float, power: float = 1.0) -> tuple[StreamModel, Tensor | None]:
        draft = draft_of(model, learn=False)
        draft.stream = replace(before, replay=replay, power=power)
        try:
            with strategy.ranks.together():
                draft.refresh(max_steps=max_steps)
                return draft, stream_densities(draft)
        except (FloatingPointError, NanError, NotPSDError):
            return draft, None  # a replay without a posterior is not a candidate

    chosen, with_summary = candidate(0.0)

    def gains(density: Tensor | None) -> bool:
        if density is None or with_summary is None:
            return density is not None
        return is_better(density, with_summary, 0.0 if before.replay else CERTAINTY)

    found = [candidate(1.0, power) for power in (POWERS if before.replay else POWERS[:1])]
    if not before.replay and gains(found[0][1]):
        found += [candidate(1.0, power) for power in POWERS[1:]]
    known = [(draft, density) for draft, density in found if density is not None]
    best = max(known, key=lambda each: float(each[1].mean()), default=None)
    if best is not None and gains(best[1]):
        chosen = best[0]
    adopt(model, chosen)

r"""How much of what has been folded the memory stands for.

An observation that is not Gaussian is folded with the site that it has at that time. If the
posterior moves on, the site grows stale. The worst case is a stream of one class, followed by
another: where everything is certain, sites have no curvature, so that the summary of the first class
does not object to the second one.

The memory is a sample of the stream, and its sites are always current. Each remembered observation
stands for :math:`n_i` observations. With a replay of :math:`r`, the posterior is that of

.. math:: (1 - r) \, t(u) \prod_i p(y_i \mid f_i)^{1 + r (n_i - 1)},

in which the summary :math:`t` counts :math:`1 - r` times. Whatever :math:`r`, every observation
counts once in expectation. With 0 nothing is lost to sampling, with 1 nothing is stale. Which one
predicts better is asked of the observations at hand, each left out with all that it stands for.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from seqgp.likelihoods.traits import is_conjugate
from seqgp.streaming.learning import is_better, stream_densities
from seqgp.streaming.model import StreamModel

#: What is chosen from, beside 0.
CANDIDATES = (0.5, 1.0)


def choose_replay(model: StreamModel, max_steps: int | None = None) -> None:
    """Set the replay of a stream to the smallest that does not predict significantly worse.

    Args:
        model: The model, whose posterior is that of the chosen replay afterwards.
        max_steps: The largest number of passes over the data for each candidate.
    """
    if is_conjugate(model.likelihood) or not model.variational_strategy.has_summary:
        return

    def densities(replay: float) -> Tensor:
        model.stream = replace(model.stream, replay=replay)
        model.refresh(max_steps=max_steps)
        return stream_densities(model)

    before = model.stream.replay
    candidates = {0.0: densities(0.0), 1.0: densities(1.0)}
    chosen = 0.0
    if before or is_better(candidates[1.0], candidates[0.0]):
        candidates |= {r: densities(r) for r in CANDIDATES if r not in candidates}
        best = max(candidates, key=lambda r: float(candidates[r].mean()))
        good = [r for r in candidates if not is_better(candidates[best], candidates[r])]
        chosen = min([best, *good])
    model.stream = replace(model.stream, replay=chosen)
    model.refresh(max_steps=max_steps)

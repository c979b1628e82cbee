"""A threshold in sixty trials
===========================

An audiogram: how loud must a tone be to be heard, at each frequency?

Run ``python -m tutorials.threshold`` (``--short`` for 25 trials). A tone of some frequency and
level is played, and a simulated listener says whether it was heard. `ActiveLearner` chooses the
next tone: the one that is expected to tell most about the set of tones that are heard in more than
half of the trials. The boundary of this set is the threshold.

What to look for: after a few quasi-random trials, all tones are near the threshold, which is where
answers are uncertain. The estimate has an error band, which is wide where the threshold is not
known yet. The same number of quasi-random trials leaves more errors. The figure is saved in
``figures/``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from seqgp.active_learner import ActiveLearner
from seqgp.progress import progress_bar
from tutorials import common

#: Octaves above 250 Hz, and level in dB.
BOUNDS = [[0.0, -10.0], [5.0, 90.0]]


# %%
# The listener
# ------------
#
# With a loss of hearing at high frequencies. Near the threshold, answers are a matter of chance.


def true_threshold(octaves: Tensor) -> Tensor:
    """The level in dB that is heard in half of the trials, at ``n`` frequencies."""
    return 15 + 40 * torch.sigmoid(2.5 * (octaves - 3.2)) + 4 * torch.cos(1.5 * octaves)


def listen(X: Tensor) -> Tensor:
    """Whether ``n x 2`` tones were heard, 0 or 1."""
    return torch.bernoulli(torch.special.ndtr((X[:, 1] - true_threshold(X[:, 0])) / 4))


# %%
# What is learnt
# --------------
#
# The probability that a tone belongs to the level set says where the threshold is: it is the level
# at which this probability is one half, and between 10 % and 90 % is the error band.


def tones(size: int) -> tuple[Tensor, Tensor, Tensor]:
    """A grid of frequencies and levels, and all pairs of them, ``size^2 x 2``."""
    low, high = torch.tensor(BOUNDS)
    octaves, levels = (
        torch.linspace(float(a), float(b), size) for a, b in zip(low, high, strict=True)
    )
    return octaves, levels, torch.cartesian_prod(octaves, levels)


def thresholds(learner: ActiveLearner, share: float, size: int = 60) -> Tensor:
    """At each frequency, the lowest level that probably (``share``) is above the threshold."""
    _, levels, X = tones(size)
    above = learner.probability_above(X).reshape(size, size) >= share
    first = levels[above.int().argmax(-1)]
    return torch.where(above.any(-1), first, levels[-1])


def error(learner: ActiveLearner) -> float:
    """The mean absolute error of the threshold in dB."""
    octaves, _, _ = tones(60)
    return float((thresholds(learner, 0.5) - true_threshold(octaves)).abs().mean())


def draw(panels: Any, learner: ActiveLearner, errors: dict[str, list[tuple[int, float]]]) -> None:
    """The map of all trials, psychometric functions, and the error against trials."""
    size = 60
    octaves, levels, X = tones(size)
    probability, sd = (part.reshape(size, size) for part in learner.expected_outcome(X))
    panel = panels[0]
    image = panel.pcolormesh(
        octaves, levels, probability.T, cmap="Greys", vmin=0, vmax=1, alpha=0.6
    )
    panel.figure.colorbar(image, ax=panel, label="probability of hearing it")
    lower, upper = thresholds(learner, 0.1), thresholds(learner, 0.9)
    panel.fill_between(octaves, lower, upper, color="C0", alpha=0.3, label="10 % to 90 %")
    panel.plot(octaves, thresholds(learner, 0.5), "C0", label="threshold")
    panel.plot(octaves, true_threshold(octaves), "k--", label="true threshold")
    for answer, marker, label in ((1, "o", "heard"), (0, "x", "not heard")):
        chosen = learner.X[learner.Y.eq(answer)]
        panel.scatter(*chosen.T, c="C3", s=22, marker=marker, label=label, zorder=3)
    panel.set_xticks(range(6), [f"{250 * 2**k / 1000:g}" for k in range(6)])
    panel.set(xlabel="frequency in kHz", ylabel="level in dB", title=f"{len(learner.X)} trials")
    panel.legend(fontsize=8, loc="lower right")

    panel = panels[1]
    for number, k in enumerate((6, 30, 54)):
        colour = f"C{number}"
        f = 250 * 2 ** float(octaves[k]) / 1000
        panel.plot(levels, probability[k], colour, label=f"{f:.1f} kHz")
        band = (probability[k] - 2 * sd[k]).clamp(0), (probability[k] + 2 * sd[k]).clamp(max=1)
        panel.fill_between(levels, *band, color=colour, alpha=0.2)
        truth = torch.special.ndtr((levels - true_threshold(octaves[k])) / 4)
        panel.plot(levels, truth, colour, linestyle="--", linewidth=0.8)
    panel.set(xlabel="level in dB", ylabel="probability of hearing it")
    panel.set_title("psychometric functions (dashed: true)")
    panel.legend(fontsize=8)

    for label, curve in errors.items():
        panels[2].plot(*zip(*curve, strict=True), "o-", markersize=3, label=label)
    panels[2].set(xlabel="trials", ylabel="mean error in dB", title="error of the threshold")
    panels[2].legend(fontsize=8)


# %%
# The session
# -----------
#
# Ask for a tone, play it, tell the answer.


def main(arguments: list[str] | None = None) -> None:
    """Find the threshold by active learning and from quasi-random trials."""
    given = common.parser(__doc__).parse_args(arguments)
    common.begin(given)
    trials, every = (25, 5) if given.short else (60, 5)
    bounds = torch.tensor(BOUNDS)
    errors: dict[str, list[tuple[int, float]]] = {}
    learners = {
        "chosen tones": ActiveLearner(bounds, threshold=0.5),
        "quasi-random tones": ActiveLearner(bounds, threshold=0.5, num_initial=trials),
    }
    for label, learner in learners.items():
        torch.manual_seed(1)
        errors[label] = []
        q = 1 if label == "chosen tones" else every
        for n in progress_bar(range(q, trials + 1, q), desc=label, leave=False):
            tones_now = learner.ask(q)
            learner.tell(tones_now, listen(tones_now))
            if n % every == 0 and n >= 10:
                errors[label].append((n, error(learner)))
    for label, curve in errors.items():
        n, last = curve[-1]
        print(f"{label}: mean error {last:.1f} dB after {n} trials")
    learner = learners["chosen tones"]
    print(f"expected share of errors about the level set: {learner.uncertainty:.3f}")
    figure, panels = common.new_figure(1, 3, (16, 4.6))
    draw(panels[0], learner, errors)
    print(f"Figure: {common.save(figure, 'threshold')}")


if __name__ == "__main__":
    main()

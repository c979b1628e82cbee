"""What does this person like?
===========================

A hearing aid with four knobs, tuned by asking "which of these two sounds better?"

Run ``python -m tutorials.preferences`` (``--short`` for 30 duels). A simulated person compares two
settings at a time, and answers with noise: nobody can put a number on how good a setting is.
`DuelOptimizer` learns the utility behind the answers, and chooses the next pair: the one of which
the better setting is expected to be best (EUBO, the expected utility of the best option).

What to look for: an answer is learnt in milliseconds, because the model is updated instead of
fitted to all answers again, and it takes no longer after many answers than after few. It takes some
hundred milliseconds when hyperparameters are learnt, too, which becomes rare. The setting that the
model believes to be best comes closer and closer to the one that really is. The same number of
random pairs leads to a worse setting. The figure is saved in ``figures/``.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor

from seqgp.duel_optimizer import DuelOptimizer
from seqgp.progress import progress_bar
from tutorials import common

# %%
# The person
# ----------
#
# Wants little bass, much treble and a moderate rest. The knobs work together: with more noise
# reduction, more treble is wanted. Each setting is heard with noise, so that close duels can go
# either way.

KNOBS = ("bass", "middle", "treble", "noise reduction")
BOUNDS = [[0.0] * 4, [10.0] * 4]
NOISE = 0.3


def utility(X: Tensor) -> Tensor:
    """How much the person likes ``... x 4`` settings; the best one has a utility of zero."""
    bass, middle, treble, reduction = (X / 10).unbind(-1)
    wanted = 0.6 + 0.4 * (reduction - 0.5)  # of treble
    loss = (bass - 0.2).square() + (middle - 0.5).square() + 2 * (treble - wanted).square()
    return -12 * (loss + 0.5 * (reduction - 0.5).square())


def prefers_first(duels: Tensor) -> Tensor:
    """Which of ``n x 2 x 4`` duels are won by their first setting, as far as the person hears."""
    seen = utility(duels) + NOISE * torch.randn(duels.shape[:-1])
    return seen[:, 0] > seen[:, 1]


# %%
# Duel by duel
# ------------
#
# Ask for a pair, let it be compared, tell the answer. The first ten pairs are quasi-random, and a
# model is fitted to them. Pairs from elsewhere can be told, too: here, random ones.


def tune(duels: int, chosen: bool, label: str) -> tuple[DuelOptimizer, Tensor, list[float]]:
    """The loop after its last duel, ``n x 2`` (duels, loss), and seconds of each answer."""
    torch.manual_seed(1)
    optimizer = DuelOptimizer(torch.tensor(BOUNDS))
    random = torch.quasirandom.SobolEngine(8, scramble=True, seed=1)
    losses, seconds = [], []
    for number in progress_bar(range(1, duels + 1), desc=label, leave=False):
        pair = optimizer.ask() if chosen else 10 * random.draw(1).reshape(1, 2, 4)
        answer = prefers_first(pair)
        start = time.perf_counter()
        optimizer.tell(pair, answer)
        seconds.append(time.perf_counter() - start)
        if number >= optimizer.num_initial and number % 5 == 0:
            losses.append([number, -float(utility(optimizer.best))])
    return optimizer, torch.tensor(losses), seconds


# %%
# What was learnt
# ---------------
#
# Utilities are known up to a constant, so that each curve is shown relative to the best setting.
# Their unit is the standard deviation of the noise. The band is that of the difference to the best.
# Far from it, answers say that a setting is much worse, but not how much.


def profile(optimizer: DuelOptimizer, knob: int, size: int = 60) -> tuple[Tensor, ...]:
    """Positions of a knob, the others at their best, and the utility there less that of the best.

    Returns:
        Positions, true differences, and the posterior mean and standard deviation of them.
    """
    best = optimizer.best
    X = best.repeat(size + 1, 1)
    X[:-1, knob] = torch.linspace(0, 10, size)
    with torch.no_grad():
        f: Any = optimizer.model.posterior(X)
        mean, S = f.mean.squeeze(-1), f.distribution.covariance_matrix
    variance = S.diagonal()[:-1] + S[-1, -1] - 2 * S[:-1, -1]
    truth = utility(X) / NOISE
    return X[:-1, knob], truth[:-1] - truth[-1], mean[:-1] - mean[-1], variance.clamp(0).sqrt()


def draw(figure: Any, optimizer: DuelOptimizer, losses: dict[str, Tensor], ms: Tensor) -> None:
    """A profile of each knob, then the loss and the milliseconds of an answer against duels."""
    panels = figure.axes
    for knob, panel in enumerate(panels[:4]):
        X, truth, mean, sd = profile(optimizer, knob)
        panel.plot(X, mean, "C0", label="learnt")
        panel.fill_between(X, mean - 2 * sd, mean + 2 * sd, alpha=0.2)
        panel.plot(X, truth, "k--", label="true")
        panel.axvline(float(optimizer.best[knob]), color="C3", linewidth=0.8)
        panel.set(xlabel=KNOBS[knob], ylabel="utility less that of the best")
    panels[0].legend(fontsize=8)
    for label, curve in losses.items():
        panels[4].plot(*curve.T, "o-", markersize=3, label=label)
    panels[4].set(xlabel="duels", ylabel="utility lost", yscale="log")
    panels[4].legend(fontsize=8)
    panels[5].plot(range(1, len(ms) + 1), ms, ".")
    panels[5].set(xlabel="duels", ylabel="ms to learn an answer", yscale="log")


def main(arguments: list[str] | None = None) -> None:
    """Tune by chosen and by random duels, print how good the settings are and draw a figure."""
    given = common.parser(__doc__).parse_args(arguments)
    common.begin(given)
    duels = 30 if given.short else 100
    losses = {}
    chosen, losses["chosen duels"], seconds = tune(duels, True, "chosen duels")
    _, losses["random duels"], _ = tune(duels, False, "random duels")
    for label, curve in losses.items():
        print(f"{label}: utility lost {float(curve[-1, 1]):.3f} after {duels}")
    best = ", ".join(f"{name} {x:.1f}" for name, x in zip(KNOBS, chosen.best.tolist(), strict=True))
    print(f"best setting: {best}")
    ms = 1e3 * torch.tensor(seconds)
    later = ms[chosen.num_initial :]
    print(f"an answer is learnt in {later.median():.0f} ms (median)")
    figure, _ = common.new_figure(2, 3, (13, 7))
    draw(figure, chosen, losses, ms)
    print(f"Figure: {common.save(figure, 'preferences')}")


if __name__ == "__main__":
    main()

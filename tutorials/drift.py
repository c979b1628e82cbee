"""A stream whose function changes
===============================

What was true yesterday may mislead today.

Run ``python -m tutorials.drift`` (``--short`` for fewer data). A function is measured in batches.
There are three streams: the function stays the same, changes its sign half-way, or moves a little
all the time. Three models predict each batch and then learn it: one without a discount, one with
``discount="auto"``, and one with a fixed discount. The figure is saved as ``figures/drift.png``.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from seqgp import SequentialGP
from seqgp.progress import progress_bar
from tutorials import common

# %%
# Three streams
# -------------
#
# The same sine with noise. Its phase is what changes.

NOISE, BATCH = 0.25, 20
CHANGES = {
    "stationary": lambda age: 0 * age,
    "abrupt": lambda age: math.pi * (age > 0.5),
    "gradual": lambda age: 2 * math.pi * age,
}
WAYS: dict[str, float | str] = {"no discount": 1.0, "auto": "auto", "0.7": 0.7}


def stream(change: str, number: int) -> tuple[Tensor, Tensor]:
    """Inputs ``n x 1`` and observations ``n x 1``, in the order in which they come."""
    age = torch.arange(number) / number
    X = torch.rand(number, 1)
    f = torch.sin(6 * X + CHANGES[change](age).unsqueeze(-1))
    return X, f + NOISE * torch.randn(number, 1)


# %%
# Predict, then learn
# -------------------
#
# A discount gives less weight to everything learnt before. The record contains the discount that
# was chosen. If it is below 1, the stream has changed.


def errors(X: Tensor, Y: Tensor, discount: float | str) -> tuple[list[float], list[int]]:
    """The RMSE of each batch before it is learnt, and at which of them there was an alarm."""
    model = SequentialGP(X[:BATCH], Y[:BATCH])
    found, alarms = [], []
    batches = list(zip(X[BATCH:].split(BATCH), Y[BATCH:].split(BATCH), strict=True))
    for number, (x, y) in enumerate(progress_bar(batches, desc=f"discount {discount}")):
        found.append((model.posterior(x).mean - y).square().mean().sqrt().item())
        record = model.update(x, y, discount=discount)
        if discount == "auto" and record.discount < 1:
            alarms.append(number)
    return found, alarms


def main(arguments: list[str] | None = None) -> None:
    """Learn all streams in all ways, print a table and draw a figure."""
    given = common.parser(__doc__).parse_args(arguments)
    common.begin(given)
    number = 240 if given.short else 2000
    figure, axes = common.new_figure(1, len(CHANGES), (11, 3.2), sharey=True)
    print(f"{'RMSE ahead':>12}" + "".join(f"{way:>14}" for way in WAYS) + f"{'alarms':>8}")
    for ax, change in zip(axes[0], CHANGES, strict=True):
        X, Y = stream(change, number)
        row, alarms = [], []
        for way, discount in WAYS.items():
            found, seen = errors(X, Y, discount)
            alarms += seen
            row.append(sum(found) / len(found))
            smooth = torch.tensor(found).unfold(0, 5, 1).mean(-1)
            ax.plot(range(4, len(found)), smooth, label=way)
        for batch in alarms:
            ax.axvline(batch, color="0.7", linestyle=":", zorder=0)
        ax.axhline(NOISE, color="0.5", linewidth=0.8, zorder=0)
        ax.set(title=change, xlabel="batch")
        print(f"{change:>12}" + "".join(f"{v:14.3f}" for v in row) + f"{len(alarms):8d}")
    axes[0][0].set_ylabel("RMSE before it is learnt")
    axes[0][0].legend()
    print(f"saved {common.save(figure, 'drift')}")


# %%
# If the function does not change, ``"auto"`` does nothing. After an abrupt change, it forgets at
# once. If the function moves all the time, it notices one change after the other, and then fades
# the past at each update. A fixed discount is better, provided that you know how fast it moves.

if __name__ == "__main__":
    main()

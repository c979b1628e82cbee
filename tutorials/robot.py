"""A map that grows
================

A robot measures a magnetic field while it drives through unknown rooms.

Run ``python -m tutorials.robot`` (``--short`` for a shorter drive). Steel in walls and floors
disturbs the magnetic field of the earth, and a robot can use a map of the field to find its
position. It cannot wait until it has visited the whole building, and it cannot store all
measurements. The map has to be updated after each stretch of the drive, at a constant cost.

What to look for: inducing points (+) follow the robot into new rooms. The map of the first room
stays accurate although most of its data have been discarded, thanks to a few points in memory
(white) and the summary of all others. Figures are saved in ``figures/``.
"""

from __future__ import annotations

import math
import time
from typing import NamedTuple

import torch
from gpytorch.kernels import MaternKernel, ScaleKernel
from torch import Tensor

import seqgp
from seqgp.progress import progress_bar
from seqgp.streaming import MemoryOptions
from seqgp.streaming.update import UpdateRecord
from tutorials import common

UNIT = 10.0  # microtesla: about what steel adds to the field of the earth, which is 50
NOISE = 0.1  # of the magnetometer, in these units
ROOMS = 3  # one after the other, from left to right, each 4 m x 4 m


# %%
# The building
# ------------
#
# Steel is placed at random in three rooms. The robot drives in lanes through one room after the
# other.


class Drive(NamedTuple):
    """The measurements of the robot, in order."""

    X: Tensor  # n x 2, metres
    Y: Tensor  # n x 1, tens of microtesla above the undisturbed field: numbers of order one


def field(X: Tensor) -> Tensor:
    """The disturbance of the field by steel, ``n x 1``, in units of 10 microtesla."""
    generator = torch.Generator().manual_seed(7)
    number = 9 * ROOMS
    place = torch.rand(number, 2, generator=generator) * torch.tensor([4.0 * ROOMS, 4.0])
    strength = 0.9 * torch.randn(number, generator=generator)
    width = 0.6 + 0.5 * torch.rand(number, generator=generator)
    distance = (X.unsqueeze(-2) - place).square().sum(-1)
    return (strength * torch.exp(-0.5 * distance / width**2)).sum(-1, keepdim=True)


def drive(measurements: int) -> Drive:
    """Lanes up and down through one room after the other."""
    t = torch.linspace(0, ROOMS, measurements)
    lanes = 10 * ROOMS
    x = 4 * t
    y = 2 + 1.8 * torch.cos(math.pi * lanes / ROOMS * t) + 0.1 * torch.sin(9 * t)
    X = torch.stack([x + 0.15 * torch.sin(23 * t), y], -1)
    return Drive(X, field(X) + NOISE * torch.randn(measurements, 1))


# %%
# The model
# ---------
#
# It is built from the first stretch. Nothing about the rest of the building is known yet.


def first_model(first: Drive) -> seqgp.SequentialGP:
    """A model of the first stretch. The size of the building need not be known."""
    return seqgp.SequentialGP(
        first.X, first.Y, covar_module=ScaleKernel(MaternKernel(nu=2.5)), inducing_points=40
    )


@torch.no_grad()
def error(model: seqgp.SequentialGP, room: int) -> float:
    """Root mean square error of the map in a room, in microtesla."""
    a, b = 4.0 * room + torch.linspace(0.3, 3.7, 25), torch.linspace(0.3, 3.7, 25)
    grid = torch.cartesian_prod(a, b)
    return UNIT * float((model.posterior(grid).mean - field(grid)).square().mean().sqrt())


# %%
# The drive
# ---------
#
# Each stretch is learnt once, by ``update``, and most of its data are discarded.


def main(arguments: list[str] | None = None) -> None:
    """Drive, learn, and draw the map at three stages."""
    given = common.parser(__doc__).parse_args(arguments)
    common.begin(given)
    stretches, size = (6, 40) if given.short else (18, 100)
    way = drive(stretches * size)
    parts = list(zip(way.X.split(size), way.Y.split(size), strict=True))
    model = first_model(Drive(*parts[0]))
    most = 60 if given.short else 120
    shown = {stretches // 3: 0, 2 * stretches // 3: 1, stretches: 2}
    figure, panels = common.new_figure(3, 2, (13, 9.2), sharex=True, sharey=True)
    bounds = torch.tensor([[-0.3, -0.3], [4.0 * ROOMS + 0.3, 4.3]])
    records: list[UpdateRecord] = []
    print("stretch   seen  memory  inducing  ms update   error in room 1, 2, 3 (microtesla)")
    for k, (X, Y) in enumerate(progress_bar(parts[1:], desc="drive", leave=False), 2):
        start = time.perf_counter()
        # Learn the next stretch, and discard most of its data.
        record = model.update(X, Y, memory=MemoryOptions(capacity=60), max_inducing=most)
        records.append(record)
        milliseconds = 1e3 * (time.perf_counter() - start)
        if k in shown:
            errors = "  ".join(f"{error(model, room):5.2f}" for room in range(ROOMS))
            print(
                f"{k:7}{k * size:7}{record.num_memory:8}{record.num_inducing:10}"
                f"{milliseconds:11.0f}   {errors}"
            )
            row = panels[shown[k]]
            seqgp.plots.posterior(model, row, bounds=bounds, resolution=70)
            for panel in row:
                panel.plot(*way.X[: k * size].T.numpy(), color="white", lw=0.5, alpha=0.7)
                panel.set(aspect="equal", xlabel="", ylabel="")
            row[0].set_title(f"the map after stretch {k} of {stretches}, {UNIT:g} microtesla")
            row[1].set_title("standard deviation")
    paths = [common.save(figure, "robot")]
    history, axes = common.new_figure(3, 1, (8, 8), sharex=True)
    seqgp.plots.history(records, axes)
    paths.append(common.save(history, "robot-history"))
    print("Figures: " + ", ".join(map(str, paths)))


if __name__ == "__main__":
    main()

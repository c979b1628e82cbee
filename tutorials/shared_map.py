"""A map that four robots make together
====================================

Four processes each hold a quarter of the data, and all end with the same map.

Run ``python -m tutorials.shared_map`` (``--short`` for fewer measurements). Four robots explore a
hall, each its own quarter, and measure a field. Each robot is a process that keeps its own
measurements. Together they learn one model, with a ``process_group`` of `torch.distributed`. They
mostly exchange sums over their measurements, whose size does not depend on the number of
measurements. In the end, the map is compared with that of a single process that has all
measurements. On several machines, start the same code with ``torchrun``. Figures are saved in
``figures/``.
"""

from __future__ import annotations

import tempfile
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from gpytorch.kernels import MaternKernel, ScaleKernel
from torch import Tensor

import seqgp
from tutorials import common

ROBOTS, BATCHES = 4, 3


# %%
# The field, and what the robots measure
# --------------------------------------
#
# Each robot stays in one quarter of the unit square.


def field(X: Tensor) -> Tensor:
    """``n x 1`` values of the field."""
    x, y = X[:, :1], X[:, 1:]
    return torch.sin(7 * x) * torch.cos(5 * y) + x * y


def measure(robot: int, batch: int, size: int) -> tuple[Tensor, Tensor]:
    """The measurements of a robot, reproducible."""
    generator = torch.Generator().manual_seed(10 * robot + batch)
    corner = torch.tensor([robot % 2, robot // 2]) / 2
    X = corner + torch.rand(size, 2, generator=generator, dtype=torch.double) / 2
    return X, field(X) + 0.1 * torch.randn(size, 1, generator=generator, dtype=torch.double)


def grid(number: int) -> Tensor:
    """``number^2 x 2`` points of the hall."""
    axis = torch.linspace(0, 1, number, dtype=torch.double)
    return torch.cartesian_prod(axis, axis)


# %%
# What each robot does
# --------------------
#
# It builds the model and updates it with its own measurements only. Apart from that, the code is
# that of a single process. All robots call the same methods and end with the same model.


def learn(
    shards: list[tuple[Tensor, Tensor]], group: dist.ProcessGroup | None
) -> seqgp.SequentialGP:
    """A model of a stream of measurements."""
    model = seqgp.SequentialGP(
        *shards[0],
        covar_module=ScaleKernel(MaternKernel(nu=2.5, ard_num_dims=2)),
        inducing_points=grid(7),
        process_group=group,
    )
    for X, Y in shards[1:]:
        model.update(X, Y, memory=40, steps=5)
    return model


def robot(rank: int, size: int, directory: str) -> None:
    """The process of one robot."""
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{directory}/store",
        rank=rank,
        world_size=ROBOTS,
        timeout=timedelta(minutes=2),
    )
    model = learn([measure(rank, k, size) for k in range(BATCHES)], dist.group.WORLD)
    mean = model.posterior(grid(30)).mean.detach()  # needs no communication
    result = {"mean": mean, "sent": model.variational_strategy.ranks.bytes_sent}
    torch.save(result, Path(directory) / f"{rank}.pt")
    seqgp.save(model, Path(directory) / "map.seqgp")  # rank 0 writes it
    dist.destroy_process_group()


# %%
# The map
# -------


def draw(mean: Tensor, sent: list[float], size: int) -> None:
    """The true field, the map, and what was sent."""
    figure, axes = common.new_figure(1, 3, (11, 3.4))
    X = grid(30)
    for axis, values, title in (
        (axes[0, 0], field(X), "field"),
        (axes[0, 1], mean, "map, and where each robot measured"),
    ):
        axis.imshow(values.reshape(30, 30).T, origin="lower", extent=(0, 1, 0, 1), vmin=-1, vmax=2)
        axis.set_title(title)
    for rank in range(ROBOTS):
        points, _ = measure(rank, 0, size)
        axes[0, 1].plot(*points[:60].T, ".", ms=4)
    held = 3 * 8 * BATCHES * size / 1e3
    places = torch.arange(ROBOTS).double()
    for shift, values, label in ((-0.2, [held] * ROBOTS, "measured"), (0.2, sent, "sent")):
        axes[0, 2].bar((places + shift).tolist(), values, width=0.38, label=label)
    axes[0, 2].set_xticks(places.tolist(), [f"robot {rank}" for rank in range(ROBOTS)])
    axes[0, 2].set_title("kilobytes of each robot")
    axes[0, 2].set_ylim(top=1.3 * max(held, *sent))  # room for the legend
    axes[0, 2].legend()
    print(f"Figures: {common.save(figure, 'shared_map')}")


def main(given: list[str] | None = None) -> None:
    """Run the tutorial.

    Args:
        given: The command line; by default that of the process.
    """
    from tutorials.shared_map import robot  # new processes import what they run

    options = common.parser(__doc__).parse_args(given)
    common.begin(options)
    size = 60 if options.short else 5_000
    with tempfile.TemporaryDirectory() as directory:
        torch.multiprocessing.spawn(robot, (size, directory), nprocs=ROBOTS)
        results = [torch.load(Path(directory) / f"{rank}.pt") for rank in range(ROBOTS)]
        saved = seqgp.load(Path(directory) / "map.seqgp")
    means = [result["mean"] for result in results]
    sent = [result["sent"] / 1e3 for result in results]
    parts = [[measure(rank, k, size) for rank in range(ROBOTS)] for k in range(BATCHES)]
    alone = learn([tuple(map(torch.cat, zip(*part, strict=True))) for part in parts], None)
    print(f"all robots have the same map: {all(torch.equal(means[0], m) for m in means)}")
    difference = (means[0] - alone.posterior(grid(30)).mean).abs().max()
    print(f"difference from one process with all data: {difference:.1e}")
    print(f"measurements of each: {3 * 8 * BATCHES * size / 1e3:.0f} kB")
    print(f"sent by each robot: {max(sent):.0f} kB")
    print(f"learnt by the map that was saved: {saved.num_seen} measurements")
    draw(means[0], sent, size)


if __name__ == "__main__":
    main()

"""Processes that share the data of one model: time, memory and communication of each.

``build`` is a model of Gaussian observations, at given hyperparameters and inducing points, from
batches that each rank holds. ``labels`` is one of labels, whose natural-gradient steps, each a pass
over the data, are repeated until they have converged. The same is done by one process with all data
and by two with half of them each, with one thread and gloo, and the predictions are compared. What
more ranks would take is simulated: the processor seconds that were measured, divided among them,
and the messages that were measured, over a network whose bandwidth and latency are given.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gpytorch.kernels import MaternKernel, ScaleKernel
from gpytorch.likelihoods import BernoulliLikelihood
from torch import Tensor

import seqgp
from benchmarks.known_warnings import known_warnings
from benchmarks.memory import peak_memory
from benchmarks.runner import Options, Unit

D, CHUNK = 6, 50_000
RANKS = 1, 2
#: Of the simulation.
MORE = 2, 4, 16, 64, 256
NETWORKS = {"10 Gbit/s, 50 us": (1.25e9, 50e-6), "1 Gbit/s, 200 us": (1.25e8, 200e-6)}


def units(options: Options) -> tuple[dict[str, Any], list[Unit]]:
    """Each number of ranks, and of observations: few, to know what is not shared among ranks."""
    sizes = {"build": [20_000, 10**6, 10**7], "labels": [20_000, 10**5, 10**6]}
    if options.quick:
        sizes = {case: [2_000, 4_000] for case in sizes}
    m = 20 if options.quick else 300
    work = [
        Unit(f"{case}/ranks={size}/n={n}", partial(measure, case, size, n, m))
        for case in sizes
        for n in sizes[case]
        for size in RANKS
    ]
    settings = {"quick": options.quick, "dtype": "float64", "m": m, "d": D}
    return settings, work


# -------------------------------------------------------------------------------- measuring


def make_data(case: str, n: int, rank: int, size: int) -> list[tuple[Tensor, Tensor]]:
    """The batches of one rank: every batch has a seed of its own, whoever has it.

    Args:
        case: ``"build"`` or ``"labels"``.
        n: How many observations all ranks have.
        rank: Which rank.
        size: How many ranks.
    """
    length = min(CHUNK, n // 4)
    batches = []
    for first in range(rank * length, n, size * length):
        generator = torch.Generator().manual_seed(first)
        X = torch.rand(min(length, n - first), D, dtype=torch.double, generator=generator)
        f = torch.sin(3 * X).sum(-1, keepdim=True) - 3.9
        Y = f + 0.3 * torch.randn(f.shape, dtype=torch.double, generator=generator)
        batches.append((X, Y if case == "build" else (Y > 0).to(X)))
    return batches


def inputs(number: int, seed: int) -> Tensor:
    """Inducing points, or points of a test."""
    generator = torch.Generator().manual_seed(-seed)
    return torch.rand(number, D, dtype=torch.double, generator=generator)


def learn(case: str, batches: Sequence[Any], m: int, group: Any) -> seqgp.SequentialGP:
    """The model of one rank."""
    kernel = ScaleKernel(MaternKernel(nu=2.5, ard_num_dims=D)).double()
    kernel.base_kernel.lengthscale = 1.0
    likelihood = None if case == "build" else BernoulliLikelihood()
    with known_warnings():
        return seqgp.from_batches(
            batches,
            inducing_points=inputs(m, 1),
            covar_module=kernel,
            likelihood=likelihood,
            process_group=group,
        )


@contextmanager
def recorded() -> Iterator[list[tuple[str, int]]]:
    """What this rank sends: the kinds and bytes of its messages."""
    messages: list[tuple[str, int]] = []
    gather, reduce = dist.all_gather, dist.all_reduce

    def record(kind: str, call: Callable[..., Any], which: int) -> Callable[..., Any]:
        def wrapper(*tensors: Any, **options: Any) -> Any:
            messages.append((kind, tensors[which].nbytes))
            return call(*tensors, **options)

        return wrapper

    dist.all_gather = record("gather", gather, 1)
    dist.all_reduce = record("reduce", reduce, 0)
    try:
        yield messages
    finally:
        dist.all_gather, dist.all_reduce = gather, reduce


def work(case: str, rank: int, size: int, n: int, m: int, directory: str) -> Iterator[int]:
    """What one rank does, for `benchmarks.memory.peak_memory`."""
    torch.set_num_threads(1)
    batches = make_data(case, n, rank, size)
    group = None
    if size > 1:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{directory}/store",
            rank=rank,
            world_size=size,
            timeout=timedelta(hours=1),
        )
        group = dist.group.WORLD
    learn(case, make_data(case, 200, rank, size), min(m, 20), group)  # imports, and first calls
    if size > 1:
        dist.barrier()
    yield sum(X.nbytes + Y.nbytes for X, Y in batches)
    with recorded() as messages:
        start, processor = time.perf_counter(), time.process_time()
        model = learn(case, batches, m, group)
        wall, processor = time.perf_counter() - start, time.process_time() - processor
    posterior = model.posterior(inputs(50, 2))
    predicted = torch.cat([posterior.mean, posterior.variance]).squeeze(-1)
    result = {
        "wall": wall,
        "processor": processor,
        "messages": messages,
        "seen": model.num_seen,
        "predicted": predicted.tolist(),
    }
    Path(directory, f"{rank}.json").write_text(json.dumps(result))
    if size > 1:
        dist.barrier()
        dist.destroy_process_group()


def measure(case: str, size: int, n: int, m: int) -> dict[str, Any]:
    """The numbers of all ranks, each in a process of its own."""
    with tempfile.TemporaryDirectory() as directory, ThreadPoolExecutor(size) as threads:
        started = [
            threads.submit(
                peak_memory, work, case=case, rank=rank, size=size, n=n, m=m, directory=directory
            )
            for rank in range(size)
        ]
        memory = [each.result() for each in started]
        ranks = [json.loads(Path(directory, f"{rank}.json").read_text()) for rank in range(size)]
    if not all(each["seen"] == n for each in ranks):
        raise AssertionError(f"expected {n} observations, got {[each['seen'] for each in ranks]}")
    if any(each["predicted"] != ranks[0]["predicted"] for each in ranks):
        raise AssertionError("the ranks have different models")
    return {
        "wall": [round(each["wall"], 3) for each in ranks],
        "processor": [round(each["processor"], 3) for each in ranks],
        "data": [each["data"] for each in memory],
        "extra": [each["extra"] for each in memory],
        "messages": ranks[0]["messages"],
        "predicted": ranks[0]["predicted"],
    }


# -------------------------------------------------------------------------------- simulation


def network_seconds(
    messages: Sequence[Sequence[Any]], size: int, bandwidth: float, latency: float
) -> float:
    """What messages take if they go round in a ring, as gloo sends large ones.

    Args:
        messages: Kinds and bytes of what each rank sends.
        size: How many ranks.
        bandwidth: Bytes a second between two neighbours.
        latency: Seconds of each message.
    """
    seconds = 0.0
    for kind, number in messages:
        if kind == "reduce":  # each part of 1 / size goes round twice
            seconds += 2 * (size - 1) * (latency + number / size / bandwidth)
        else:  # what each has goes to all others
            seconds += (size - 1) * (latency + number / bandwidth)
    return seconds


def simulated(
    once: float,
    seconds: float,
    messages: Sequence[Sequence[Any]],
    size: int,
    bandwidth: float,
    latency: float,
) -> float:
    """Seconds of a rank: what it computes, and what it waits for the network.

    Args:
        once: Processor seconds that every rank needs, whatever its share of the data.
        seconds: Those of one process with all data.
        messages: What each rank sends.
        size: How many ranks.
        bandwidth: Bytes a second between two neighbours.
        latency: Seconds of each message.
    """
    computed = once + (seconds - once) / size
    return computed + network_seconds(messages, size, bandwidth, latency)


# -------------------------------------------------------------------------------- the report


def render(units: dict[str, dict[str, Any]], directory: Path) -> str:
    """Seconds and memory by number of ranks, and the simulation."""
    measured: dict[str, dict[int, dict[int, dict[str, Any]]]] = {}
    for key, unit in units.items():
        case, ranks, n = key.split("/")
        by_size = measured.setdefault(case, {}).setdefault(int(n.partition("=")[2]), {})
        by_size[int(ranks.partition("=")[2])] = unit
    lines = [
        "`build`: Gaussian observations. `labels`: natural-gradient steps until they converge. "
        "Hyperparameters and inducing points are given; each rank holds its shard in memory and "
        "has one thread. Wall-clock depends on what else the machine does, processor seconds (of "
        "the slowest rank) less; speed-ups are those of processor seconds and of wall-clock. "
        "Megabytes: the shard, the peak above it, and what a rank sends. Difference: the largest "
        "between predictions (mean and variance at 50 points) and those of one process. All ranks "
        "predict the same, bit by bit.",
        "",
        "| | n | ranks | wall-clock (s) | processor (s) | speed-up | data | memory | sent | "
        "messages | difference |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for case, by_n in measured.items():
        for n, by_size in by_n.items():
            one = by_size.get(1)
            for size, unit in by_size.items():
                processor, wall = max(unit["processor"]), max(unit["wall"])
                sent = sum(number for _, number in unit["messages"])
                cells = [case, f"{n:,}", str(size), f"{wall:.1f}", f"{processor:.1f}"]
                ratios = (one["processor"][0] / processor, one["wall"][0] / wall) if one else ()
                cells.append(", ".join(f"{ratio:.2f}" for ratio in ratios))
                cells += [f"{max(unit['data']):.0f}", f"{max(unit['extra']):.0f}"]
                cells += [f"{sent / 1e6:.2f}", str(len(unit["messages"]))]
                cells.append(f"{difference(unit, one):.1e}" if one else "")
                lines.append(f"| {' | '.join(cells)} |")
    lines += ["", *render_simulation(measured)]
    return "\n".join(lines)


def difference(unit: dict[str, Any], other: dict[str, Any]) -> float:
    """The largest difference between two predictions."""
    pairs = zip(unit["predicted"], other["predicted"], strict=True)
    return max(abs(a - b) for a, b in pairs)


def render_simulation(measured: dict[str, dict[int, dict[int, dict[str, Any]]]]) -> list[str]:
    """A row for each number of ranks."""
    names = [name.replace("us", "µs") for name in NETWORKS]
    lines = [
        "Simulated: the processor seconds of one process, divided among the ranks but for what "
        "each of them has to do (twice those of two ranks less those of one, for the smallest n), "
        "and the messages of two ranks, sent in a ring: an all-reduce of s bytes among p ranks "
        "takes 2 (p - 1) (latency + s / p / bandwidth), a gather (p - 1) (latency + s / "
        "bandwidth). Seconds, of which the network, and the speed-up:",
        "",
        f"| | n | ranks | {' | '.join(names)} |",
        "|---|---|---|" + "---|" * len(names),
    ]
    for case, by_n in measured.items():
        sizes = sorted(n for n, by_size in by_n.items() if set(RANKS) <= by_size.keys())
        if len(sizes) < 2:
            continue
        few, many = by_n[sizes[0]], by_n[sizes[-1]]
        once = max(2 * max(few[2]["processor"]) - few[1]["processor"][0], 0.0)
        seconds, messages = many[1]["processor"][0], many[2]["messages"]
        for size in MORE:
            cells = []
            for network in NETWORKS.values():
                total = simulated(once, seconds, messages, size, *network)
                waiting = network_seconds(messages, size, *network)
                cells.append(f"{total:.2f} ({waiting:.2f}), {seconds / total:.1f} x")
            lines.append(f"| {case} | {sizes[-1]:,} | {size} | {' | '.join(cells)} |")
    return lines

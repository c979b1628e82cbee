"""One update of a stream: its time and memory as the stream grows, compared with a refit.

500 new observations, at most 400 in the memory, one thread. ``condition`` learns no
hyperparameters, ``learn`` takes 20 steps on them and on the inducing points; ``refit`` builds a
model from all that has been seen, at given hyperparameters, which is the least that starting again
can cost. ``drift`` updates with one observation at a time, and compares with a model that is given
all of them at once.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from gpytorch.kernels import MaternKernel, ScaleKernel
from gpytorch.likelihoods import BernoulliLikelihood, GaussianLikelihood, Likelihood
from torch import Tensor

from benchmarks.memory import peak_memory
from benchmarks.runner import Options, Unit
from seqgp import SequentialGP
from seqgp.streaming import MemoryOptions

LIKELIHOODS: dict[str, type[Likelihood]] = {
    "gaussian": GaussianLikelihood,
    "bernoulli": BernoulliLikelihood,
}
MEMORY = MemoryOptions(capacity=400)
NEW, D = 500, 8


def units(options: Options) -> tuple[dict[str, Any], list[Unit]]:
    """Each likelihood, number of inducing points and size of the past."""
    sizes = [1_000, 3_000] if options.quick else [1_000, 10_000, 100_000, 1_000_000]
    inducing = [20] if options.quick else [100, 300]
    rounds = 2 if options.quick else 5
    work = [
        Unit(f"time/{name}/m={m}/n={n}", partial(measure, name, m, n, rounds))
        for name in LIKELIHOODS
        for m in inducing
        for n in sizes
    ]
    work += [
        Unit(f"memory/n={n}", partial(peak_memory, memory_of_update, n=n, m=inducing[0]))
        for n in sizes
    ]
    work.append(Unit("drift", partial(measure_drift, 300 if options.quick else 100_000)))
    return {"quick": options.quick, "dtype": "float64", "new": NEW, "memory": 400, "d": D}, work


def make_data(name: str, n: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """A smooth function on the unit cube."""
    X = torch.rand(n, D, dtype=torch.float64, generator=generator)
    f = torch.sin(3 * X).sum(-1, keepdim=True) - 5.3
    noise = torch.randn(n, 1, dtype=torch.float64, generator=generator)
    return X, f + 0.3 * noise if name == "gaussian" else (f + 0.3 * noise > 0).to(f)


def make_model(name: str, m: int, X: Tensor, Y: Tensor, Z: Tensor | None = None) -> SequentialGP:
    """A Matern-5/2 model."""
    kernel = ScaleKernel(MaternKernel(nu=2.5)).double()
    kernel.base_kernel.lengthscale = 1.0
    return SequentialGP(
        X,
        Y,
        likelihood=LIKELIHOODS[name](),
        covar_module=kernel,
        inducing_points=m if Z is None else Z,
        outcome_transform=None,
    )


def stream_of(name: str, m: int, n: int, generator: torch.Generator) -> SequentialGP:
    """A model that has seen ``n`` observations, at fixed hyperparameters."""
    model, seen = make_model(name, m, *make_data(name, 1000, generator)), 1000
    while seen < n:
        size = min(10_000, n - seen)
        model.update(*make_data(name, size, generator), memory=MEMORY, learn=False)
        seen += size
    model.update(*make_data(name, NEW, generator), memory=MEMORY, learn=False)
    return model


def measure(name: str, m: int, n: int, rounds: int) -> dict[str, Any]:
    """Seconds of an update, with and without learning, and of a refit; the fastest rounds."""
    generator = torch.Generator().manual_seed(0)
    model = stream_of(name, m, n, generator)
    seconds: dict[str, list[float]] = {"condition": [], "learn": [], "refit": []}
    for _ in range(rounds):
        for way in ("condition", "learn"):
            batch = make_data(name, NEW, generator)
            start = time.perf_counter()
            model.update(*batch, memory=MEMORY, learn=way == "learn", steps=20, tol=0.0)
            seconds[way].append(time.perf_counter() - start)
    X, Y = make_data(name, n, generator)
    Z = X[:m].clone()
    for _ in range(1 if n > 100_000 else 2):
        start = time.perf_counter()
        make_model(name, m, X, Y, Z)
        seconds["refit"].append(time.perf_counter() - start)
    return {way: round(min(times), 4) for way, times in seconds.items()}


def memory_of_update(n: int, m: int) -> Iterator[int]:
    """One Bernoulli update after ``n`` observations, for `benchmarks.memory.peak_memory`."""
    generator = torch.Generator().manual_seed(0)
    model = stream_of("bernoulli", m, n, generator)
    model.update(*make_data("bernoulli", NEW, generator), memory=MEMORY, steps=3)
    X, Y = make_data("bernoulli", NEW, generator)
    yield X.nbytes + Y.nbytes
    model.update(X, Y, memory=MEMORY, steps=20)


def measure_drift(n: int, m: int = 20) -> dict[str, Any]:
    """How far ``n`` updates with one observation each are from learning all of them at once."""
    generator = torch.Generator().manual_seed(0)
    X, Y = make_data("gaussian", n, generator)
    Z, points = X[:m], make_data("gaussian", 200, generator)[0]
    model = make_model("gaussian", m, X[:0], Y[:0], Z)
    seen, checks, differences = 0, [n // 100, n // 10, n], []
    for check in checks:
        for i in range(seen, check):
            model.update(X[i : i + 1], Y[i : i + 1], memory=0, learn=False)
        seen = check
        with torch.no_grad():
            streamed = model.posterior(points)
            at_once = make_model("gaussian", m, X[:seen], Y[:seen], Z).posterior(points)
            differences.append(
                [
                    float((getattr(streamed, moment) - getattr(at_once, moment)).abs().max())
                    for moment in ("mean", "variance")
                ]
            )
    return {"updates": checks, "differences": differences}


def render(units: dict[str, dict[str, Any]], directory: Path) -> str:
    """Three tables."""
    lines = [
        "Seconds of one update with 500 new observations and 400 in the memory (fastest round), "
        "after ``n`` have been seen; and of building a model from those ``n``:",
        "",
        "| likelihood | m | n seen | update, fixed hyperparameters | update, 20 steps | refit |",
        "|---|---|---|---|---|---|",
    ]
    times = [(*key.split("/")[1:], unit) for key, unit in units.items() if key.startswith("time/")]
    for name, m, n, unit in sorted(times, key=lambda row: (row[0], row[1], int(row[2][2:]))):
        lines.append(
            f"| {name} | {m[2:]} | {int(n[2:]):,} | {unit['condition']:.3f} "
            f"| {unit['learn']:.3f} | {unit['refit']:.3f} |"
        )
    lines += [
        "",
        "Memory of one Bernoulli update, in a process of its own, in megabytes: what the process "
        "holds when it begins, and what the update adds at its peak:",
        "",
        "| n seen | before | added |",
        "|---|---|---|",
    ]
    for key, unit in units.items():
        if key.startswith("memory/"):
            n = int(key.partition("=")[2])
            lines.append(f"| {n:,} | {unit['before']:.0f} | {unit['extra']:.0f} |")
    if "drift" in units:
        lines += [
            "",
            "Largest difference of the posterior at 200 points after updates with one observation "
            "each, all folded, from that of a model given all at once:",
            "",
            "| updates | mean | variance |",
            "|---|---|---|",
        ]
        rows = zip(units["drift"]["updates"], units["drift"]["differences"], strict=True)
        lines += [f"| {n:,} | {mean:.1e} | {variance:.1e} |" for n, (mean, variance) in rows]
    return "\n".join(lines)

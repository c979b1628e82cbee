"""Everything on a GPU: the same results as on the CPU, and the time that it takes.

Each job is run on the CPU and on the GPU, with the same data and the same seeds. What it returns is
compared, and both are timed. Without a GPU, jobs are run on the CPU alone, which checks that they
run, and the report says so. Optimisers turn differences by rounding into larger ones, so jobs
that learn have a larger tolerance. The tolerances were set without a GPU at hand.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from botorch.acquisition import qLogExpectedImprovement
from botorch.fit import fit_gpytorch_mll
from botorch.sampling import SobolQMCNormalSampler
from gpytorch.likelihoods import BernoulliLikelihood, PoissonLikelihood
from torch import Tensor

import seqgp
from benchmarks.runner import Options, Unit
from seqgp import DualELBO, SequentialGP
from seqgp.acquisition import select_from_pool

CPU = torch.device("cpu")
LIKELIHOODS: dict[str, Callable[[], Any]] = {
    "gaussian": lambda: None,
    "bernoulli": BernoulliLikelihood,
    "poisson": PoissonLikelihood,
}
NO_GPU = (
    "**There is no GPU here** (`torch.cuda.is_available()` is false), so nothing below says "
    "anything about GPUs: all jobs were run on the CPU alone, to check that they run."
)


class Job(NamedTuple):
    """Something to run on both devices.

    Attributes:
        run: Takes a model, inputs and targets, and returns what is to be compared.
        learns: Whether an optimiser is involved.
    """

    run: Callable[[SequentialGP, Tensor, Tensor], Tensor]
    learns: bool = False


def _posterior(model: SequentialGP, X: Tensor, Y: Tensor) -> Tensor:
    posterior = model.posterior(X)
    return torch.cat([posterior.mean, posterior.variance], -1)


def _update(model: SequentialGP, X: Tensor, Y: Tensor, learn: bool) -> Tensor:
    steps = 5 if learn else None
    model.update(X, Y, memory=len(X) // 2, learn=learn, steps=steps)
    return _posterior(model, X, Y)


def _fit(model: SequentialGP, X: Tensor, Y: Tensor) -> Tensor:
    fit_gpytorch_mll(
        DualELBO(model.likelihood, model), optimizer_kwargs={"options": {"maxiter": 5}}
    )
    return _posterior(model, X, Y)


def _fantasies(model: SequentialGP, X: Tensor, Y: Tensor) -> Tensor:
    sampler = SobolQMCNormalSampler(torch.Size([16]), seed=0)
    return _posterior(model.fantasize(X[:32].unsqueeze(-2), sampler), X, Y)


def _acquisition(model: SequentialGP, X: Tensor, Y: Tensor) -> Tensor:
    sampler = SobolQMCNormalSampler(torch.Size([64]), seed=0)
    acquisition = qLogExpectedImprovement(model, best_f=0.5, sampler=sampler)
    points = X[:32].unsqueeze(-2).clone().requires_grad_()
    value = acquisition(points)
    (gradient,) = torch.autograd.grad(value.sum(), points)
    return torch.cat([value.unsqueeze(-1), gradient.squeeze(-2)], -1)


def _pool(model: SequentialGP, X: Tensor, Y: Tensor) -> Tensor:
    return select_from_pool(model, X, criterion="variance").scores


def _checkpoint(model: SequentialGP, X: Tensor, Y: Tensor) -> Tensor:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "model.pt"
        seqgp.save(model, path)
        return _posterior(seqgp.load(path, device=X.device), X, Y)


JOBS = {
    "posterior": Job(_posterior),
    "update": Job(partial(_update, learn=False)),
    "update, learning": Job(partial(_update, learn=True), learns=True),
    "fit": Job(_fit, learns=True),
    "fantasies": Job(_fantasies),
    "acquisition and gradient": Job(_acquisition),
    "choice from a pool": Job(_pool),
    "save and load": Job(_checkpoint),
}


def gpu() -> torch.device | None:
    """The GPU, if there is one."""
    return torch.device("cuda") if torch.cuda.is_available() else None


def tolerance(job: Job, dtype: torch.dtype) -> float:
    """The largest difference, relative to the largest value, that counts as the same."""
    exact = {torch.float64: 1e-8, torch.float32: 1e-2}[dtype]
    return max(exact, 1e-2) if job.learns else exact


def data(name: str, n: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Inputs ``n x 3`` and targets ``n x 1``, on the CPU."""
    generator = torch.Generator().manual_seed(0)
    X = torch.rand(n, 3, generator=generator, dtype=torch.float64)
    f = torch.sin(6 * X).sum(-1, keepdim=True)
    noise = torch.randn(f.shape, generator=generator, dtype=f.dtype)
    if name == "gaussian":
        Y = f + 0.1 * noise
    elif name == "bernoulli":
        Y = (f + noise > 0).to(f)
    else:
        Y = torch.poisson(f.exp(), generator=generator)
    return X.to(dtype), Y.to(dtype)


def run_on(
    device: torch.device, job: Job, name: str, n: int, inducing: int, dtype: torch.dtype
) -> tuple[Tensor, float]:
    """What a job returns, on the CPU, and the seconds that it took the second time."""
    X, Y = (t.to(device) for t in data(name, n, dtype))
    for _ in range(2):  # the first time, CUDA compiles and allocates
        model = SequentialGP(
            X[: n // 2], Y[: n // 2], likelihood=LIKELIHOODS[name](), inducing_points=inducing
        )
        torch.manual_seed(0)
        _wait(device)
        start = time.perf_counter()
        result = job.run(model, X[n // 2 :], Y[n // 2 :])
        _wait(device)
        seconds = time.perf_counter() - start
    if result.device.type != device.type:
        raise RuntimeError(f"The result is on {result.device}, not on {device}.")
    return result.detach().cpu(), seconds


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def compare(
    device: torch.device | None, key: str, name: str, n: int, inducing: int, dtype: torch.dtype
) -> dict[str, Any]:
    """A job on the CPU and, if there is one, on another device."""
    job = JOBS[key]
    expected, seconds = run_on(CPU, job, name, n, inducing, dtype)
    measured: dict[str, Any] = {
        "finite": bool(expected.isfinite().all()),
        "cpu_seconds": round(seconds, 4),
    }
    if device is None:
        return measured
    result, seconds = run_on(device, job, name, n, inducing, dtype)
    difference = float((result - expected).abs().max() / expected.abs().max())
    return measured | {
        "device_seconds": round(seconds, 4),
        "difference": difference,
        "same": difference <= tolerance(job, dtype),
    }


def units(options: Options) -> tuple[dict[str, Any], list[Unit]]:
    """Each job for each likelihood, precision and size."""
    device = gpu()
    sizes = [(60, 15)] if options.quick else [(400, 100), (4000, 400)]
    settings = {
        "device": torch.cuda.get_device_name(device) if device is not None else None,
        "sizes": sizes,
    }
    return settings, [
        Unit(
            f"{job}/{name}/{str(dtype).removeprefix('torch.')}/n={n},m={inducing}",
            partial(compare, device, job, name, n, inducing, dtype),
        )
        for n, inducing in sizes
        for name in LIKELIHOODS
        for dtype in (torch.float64, torch.float32)
        for job in JOBS
    ]


def render(units: dict[str, dict[str, Any]], directory: Path) -> str:
    """A table of differences and times."""
    without = all("same" not in unit for unit in units.values())
    lines = [NO_GPU if without else "The same jobs on the CPU and on the GPU.", ""]
    lines += [
        "| job | CPU, s | GPU, s | times faster | largest difference | |",
        "|---|---|---|---|---|---|",
    ]
    for key, unit in units.items():
        cells = [key, f"{unit['cpu_seconds']:.4f}"]
        if "same" in unit:
            cells += [
                f"{unit['device_seconds']:.4f}",
                f"{unit['cpu_seconds'] / unit['device_seconds']:.2f}",
                f"{unit['difference']:.1e}",
                "same" if unit["same"] else "**differs**",
            ]
        else:
            cells += ["", "", "", "runs" if unit["finite"] else "**not finite**"]
        lines.append(f"| {' | '.join(cells)} |")
    bad = sum(not unit.get("same", unit["finite"]) for unit in units.values())
    return "\n".join(
        [*lines, "", f"{len(units) - bad} of {len(units)} jobs are as they should be."]
    )

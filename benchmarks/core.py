"""One natural-gradient step: its speed compared with bare arithmetic, and its memory.

(1) `DualVariationalStrategy.natural_gradient_step` against the same arithmetic in bare tensors and
against a step of GPyTorch's natural-gradient descent. All three start from the same posterior, and
are checked to end at the same one.

(2) The memory that a step takes beyond the data themselves, as their number grows.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import gpytorch
import numpy as np
import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.likelihoods import (
    BernoulliLikelihood,
    GaussianLikelihood,
    Likelihood,
    PoissonLikelihood,
)
from gpytorch.variational import NaturalVariationalDistribution, VariationalStrategy
from torch import Tensor

from benchmarks.memory import peak_memory
from benchmarks.runner import Options, Unit, race
from seqgp import DualVariationalStrategy

LIKELIHOODS: dict[str, type[Likelihood]] = {
    "bernoulli": BernoulliLikelihood,
    "gaussian": GaussianLikelihood,
    "poisson": PoissonLikelihood,
}
LENGTHSCALE, OUTPUTSCALE, RHO, JITTER = 1.0, 1.5, 0.5, 1e-8
WAYS = ("ours", "bare", "gpytorch")
TARGET = 1.5  # times the bare arithmetic, at most


def units(options: Options) -> tuple[dict[str, Any], list[Unit]]:
    """Speed for three likelihoods and several seeds, memory for several sizes."""
    speed = {"n": 10_000, "m": 200, "d": 8, "rounds": 15}
    memory = {"m": 100, "d": 4}
    sizes, seeds = [10_000, 100_000, 300_000, 1_000_000], 3
    threads_tried = sorted({1, torch.get_num_threads()})
    if options.quick:
        speed, sizes, seeds = {"n": 500, "m": 30, "d": 4, "rounds": 5}, sizes[:2], 1
        threads_tried = [1]
    work = [
        Unit(
            f"step/{name}/threads={threads}/seed{seed}",
            partial(measure_step, name, seed, threads, **speed),
        )
        for seed in range(options.repeats or seeds)
        for threads in threads_tried
        for name in LIKELIHOODS
    ]
    work += [
        Unit(f"memory/n={n}", partial(peak_memory, memory_of_step, n=n, **memory)) for n in sizes
    ]
    settings = {"quick": options.quick, "dtype": "float64", "speed": speed, "memory": memory}
    return settings, work


# -------------------------------------------------------------------------------- the model


class GP(gpytorch.models.ApproximateGP):
    """A zero-mean Matern-5/2 process with fixed hyperparameters and any variational strategy."""

    def __init__(self, strategy: Callable[[gpytorch.models.ApproximateGP], Any]) -> None:
        super().__init__(strategy(self))
        self.mean_module = gpytorch.means.ZeroMean()
        self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.MaternKernel(nu=2.5))
        self.double()
        self.covar_module.base_kernel.lengthscale = LENGTHSCALE
        self.covar_module.outputscale = OUTPUTSCALE
        self.covar_module.requires_grad_(False)

    def forward(self, x: Tensor) -> MultivariateNormal:
        """The prior."""
        return MultivariateNormal(self.mean_module(x), self.covar_module(x))


def make_data(name: str, n: int, d: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """A smooth function on the unit cube, observed through each kind of likelihood."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(n, d, dtype=torch.float64, generator=generator)
    f = 2 * (torch.sin(3 * x).mean(-1) - 0.66) * math.sqrt(10 * d)
    noise = torch.randn(n, dtype=torch.float64, generator=generator)
    if name == "gaussian":
        return x, f + 0.5 * noise
    if name == "bernoulli":
        return x, (f + noise > 0).to(f)
    return x, torch.poisson(torch.nn.functional.softplus(f), generator=generator)


# -------------------------------------------------------------------------------- bare tensors


class Duals(NamedTuple):
    """Whitened duals, ``m`` and ``m x m``."""

    lam: Tensor
    B: Tensor


def bare_step(duals: Duals, Z: Tensor, x: Tensor, y: Tensor, likelihood: Likelihood) -> Duals:
    """What `natural_gradient_step` does, the bound included, with nothing around it."""
    (lam, B), m = duals, len(Z)
    eye = torch.eye(m, dtype=x.dtype)
    L = torch.linalg.cholesky(matern(Z, Z) + JITTER * OUTPUTSCALE * eye)
    A = torch.linalg.solve_triangular(L, matern(Z, x), upper=False)
    R = torch.linalg.cholesky(B + eye)
    v = torch.cholesky_solve(lam.unsqueeze(-1), R)
    root = torch.linalg.solve_triangular(R, A, upper=False)
    mean = (A.mT @ v).squeeze(-1)
    unexplained = (OUTPUTSCALE - A.square().sum(0)).clamp_min_(0)
    expected, alpha, beta = bare_expectations(
        likelihood, y, mean, unexplained + root.square().sum(0)
    )
    trace = torch.linalg.solve_triangular(R, eye, upper=False).square().sum()
    kl = 0.5 * (2 * R.diagonal().log().sum() + trace - m + v.square().sum())
    if not torch.isfinite(expected.sum() - kl):
        raise FloatingPointError("The bound is not finite.")
    new_lam, new_B = A @ (alpha + beta * mean), (A * beta) @ A.mT
    return Duals(lam + RHO * (new_lam - lam), B + RHO * (new_B - B))


def matern(a: Tensor, b: Tensor) -> Tensor:
    """Matern-5/2 covariance, in two matrices' worth of memory."""
    r = torch.cdist(a / LENGTHSCALE, b / LENGTHSCALE).mul_(math.sqrt(5))
    polynomial = r.square().div_(3).add_(r).add_(1)
    return r.neg_().exp_().mul_(polynomial).mul_(OUTPUTSCALE)


@cache
def gauss_hermite(number: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """``number x 1`` nodes and weights, which GPyTorch keeps in float32."""
    nodes, weights = map(torch.from_numpy, np.polynomial.hermite.hermgauss(number))
    weights = weights / math.sqrt(math.pi)
    return nodes.to(dtype).unsqueeze(-1), weights.to(dtype).unsqueeze(-1)


def bare_expectations(
    likelihood: Likelihood, y: Tensor, mean: Tensor, variance: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Expected log probability, alpha and beta, with derivatives by hand on as many nodes."""
    if isinstance(likelihood, GaussianLikelihood):
        noise, residual = likelihood.noise, y - mean
        log_prob = -0.5 * ((residual.square() + variance) / noise + (2 * math.pi * noise).log())
        return log_prob, residual / noise, noise.reciprocal()
    nodes, weights = gauss_hermite(len(likelihood.quadrature.weights), mean.dtype)
    spread = (2 * variance).sqrt()
    f = mean + spread * nodes
    if isinstance(likelihood, BernoulliLikelihood):
        sign = 2 * y - 1
        signed = sign * f
        log_prob = torch.special.log_ndtr(signed)
        slope = sign * (-0.5 * signed.square() - 0.5 * math.log(2 * math.pi) - log_prob).exp()
    else:
        rate = torch.nn.functional.softplus(f)
        log_prob = torch.xlogy(y, rate) - rate - torch.lgamma(y + 1)
        slope = (y / rate - 1) * torch.sigmoid(f)
    slope = slope * weights
    alpha, beta = slope.sum(0), -2 * (slope * nodes).sum(0) / spread
    return (weights * log_prob).sum(0), alpha, beta.clamp_min_(0)


# -------------------------------------------------------------------------------- measurements


def measure_step(
    name: str, seed: int, threads: int, n: int, m: int, d: int, rounds: int
) -> dict[str, Any]:
    """Time for one step three ways, and how far their results lie apart."""
    x, y = make_data(name, n, d, seed)
    Z = x[:m].clone()
    likelihood = LIKELIHOODS[name]().double().requires_grad_(False)

    ours = GP(lambda model: DualVariationalStrategy(model, Z)).eval()
    strategy = ours.variational_strategy
    strategy.natural_gradient_step(x, y, likelihood, RHO)  # away from the prior
    bare = Duals(strategy.dual_lam, strategy.dual_B)

    def gpytorch_strategy(model: gpytorch.models.ApproximateGP) -> VariationalStrategy:
        return VariationalStrategy(
            model, Z, NaturalVariationalDistribution(m), False, jitter_val=JITTER * OUTPUTSCALE
        )

    peer = GP(gpytorch_strategy)
    natural = peer.variational_strategy._variational_distribution
    natural.natural_vec.data = bare.lam.clone()
    natural.natural_mat.data = -0.5 * (torch.eye(m, dtype=x.dtype) + bare.B)
    peer.variational_strategy.variational_params_initialized.fill_(1)
    optimizer = gpytorch.optim.NGD(peer.variational_parameters(), num_data=n, lr=RHO)
    elbo = gpytorch.mlls.VariationalELBO(likelihood, peer, num_data=n)

    def our_step() -> None:
        strategy.natural_gradient_step(x, y, likelihood, RHO)

    @torch.no_grad()
    def step_in_bare_tensors() -> None:
        nonlocal bare
        bare = bare_step(bare, Z, x, y, likelihood)

    def gpytorch_step() -> None:
        optimizer.zero_grad()
        (-elbo(peer(x), y)).backward()
        optimizer.step()

    steps = {"ours": our_step, "bare": step_in_bare_tensors, "gpytorch": gpytorch_step}
    for step in steps.values():
        step()
    theirs = Duals(
        natural.natural_vec.detach(),
        -2 * natural.natural_mat.detach() - torch.eye(m, dtype=x.dtype),
    )
    differences = {
        "bare": _difference(bare, Duals(strategy.dual_lam, strategy.dual_B)),
        "gpytorch": _difference(theirs, Duals(strategy.dual_lam, strategy.dual_B)),
    }
    # GPyTorch's gradient of log Phi, for the Bernoulli, is an approximation good to 1e-4.
    for rival, tolerance in (("bare", 1e-8), ("gpytorch", 1e-3)):
        if not differences[rival] <= tolerance:
            raise RuntimeError(
                f"{name}: the step in {rival} leads elsewhere than ours (relative difference "
                f"{differences[rival]:.1e}), so their times cannot be compared."
            )
    default = torch.get_num_threads()
    torch.set_num_threads(threads)
    times = race(steps, repeats=rounds)
    torch.set_num_threads(default)
    return {
        "milliseconds": {way: round(1e3 * times.median(way), 2) for way in times},
        "fastest": {way: round(1e3 * times.fastest(way), 2) for way in times},
        "ratio": {way: round(times.ratio("ours", way), 3) for way in ("bare", "gpytorch")},
        "difference": differences,
    }


def _difference(a: Duals, b: Duals) -> float:
    """The largest difference of any element, relative to the largest element."""
    return max(float((s - t).abs().max() / t.abs().max()) for s, t in zip(a, b, strict=True))


def memory_of_step(n: int, m: int, d: int) -> Iterator[int]:
    """One Bernoulli step on ``n`` points, for `benchmarks.memory.peak_memory`."""
    small, labels = make_data("bernoulli", 2 * m, d)
    likelihood = BernoulliLikelihood().double()
    strategy = GP(lambda model: DualVariationalStrategy(model, small[:m]))
    strategy = strategy.eval().variational_strategy
    strategy.natural_gradient_step(small, labels, likelihood)  # loads what a first call loads
    x, y = torch.empty(n, d, dtype=torch.float64), torch.empty(n, dtype=torch.float64)
    for block, chunk in enumerate(torch.arange(n).split(10_000)):  # no temporaries of size n
        rows = slice(int(chunk[0]), int(chunk[-1]) + 1)
        x[rows], y[rows] = make_data("bernoulli", len(chunk), d, seed=block)
    yield x.nbytes + y.nbytes
    strategy.natural_gradient_step(x, y, likelihood)


# -------------------------------------------------------------------------------- the report


def render(units: dict[str, dict[str, Any]], directory: Path) -> str:
    """Two tables."""
    lines = [
        "One step in milliseconds (fastest round), and how many times as long ours takes as the "
        f"same arithmetic in bare tensors (target: at most {TARGET}): of the fastest rounds, and "
        "the median of the rounds' ratios with its range over seeds, which shows what else the "
        "machine was doing.",
        "",
        "| likelihood | threads | ours | bare | GPyTorch | ours/bare | rounds | GPyTorch/ours |",
        "|---|---|---|---|---|---|---|---|",
    ]
    groups: dict[str, list[dict[str, Any]]] = {}
    for key, unit in units.items():
        if key.startswith("step/"):
            groups.setdefault(key.rpartition("/")[0], []).append(unit)
    for group, rows in sorted(groups.items()):
        _, name, threads = group.split("/")
        ours, bare, peer = (min(row["fastest"][way] for row in rows) for way in WAYS)
        ratios = sorted(row["ratio"]["bare"] for row in rows)
        spread = f" ({ratios[0]:.2f}-{ratios[-1]:.2f})" if len(ratios) > 1 else ""
        lines.append(
            f"| {name} | {threads.removeprefix('threads=')} | {ours:.1f} | {bare:.1f} | {peer:.1f} "
            f"| {ours / bare:.2f} | {statistics.median(ratios):.2f}{spread} | {peer / ours:.2f} |"
        )
    lines += [
        "",
        "Memory of one Bernoulli step, measured in a process of its own, in megabytes: what the "
        "process holds when the step begins, of which data, and what the step adds at its peak:",
        "",
        "| n | before | data | added by the step |",
        "|---|---|---|---|",
    ]
    sizes = {int(key.partition("=")[2]): unit for key, unit in units.items() if "memory/" in key}
    for n, unit in sorted(sizes.items()):
        lines.append(f"| {n:,} | {unit['before']:.0f} | {unit['data']:.1f} | {unit['extra']:.0f} |")
    return "\n".join(lines)

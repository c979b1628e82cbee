"""Fits to a data set: the bound that is reached, and the time to reach it.

`SequentialGP` with `DualELBO` against BoTorch's `SingleTaskVariationalGP` with `VariationalELBO`,
both through `fit_gpytorch_mll` with its defaults: same kernel, priors, number of inducing points
(chosen alike and then learnt), same data. Both bounds are evaluated by the same code.
"""

from __future__ import annotations

import statistics
import time
from functools import partial
from pathlib import Path
from typing import Any

import gpytorch
import torch
from botorch.fit import fit_gpytorch_mll
from botorch.models import SingleTaskVariationalGP
from gpytorch.likelihoods import BernoulliLikelihood, PoissonLikelihood
from gpytorch.mlls import VariationalELBO
from torch import Tensor

from benchmarks.known_warnings import known_warnings
from benchmarks.runner import Options, Unit
from seqgp import DualELBO, SequentialGP
from seqgp.likelihoods.expectations import expected_log_prob

LIKELIHOODS = {"gaussian": None, "bernoulli": BernoulliLikelihood, "poisson": PoissonLikelihood}


def units(options: Options) -> tuple[dict[str, Any], list[Unit]]:
    """Three likelihoods, several data sets each."""
    problem = {"n": 60, "m": 15, "d": 2} if options.quick else {"n": 500, "m": 50, "d": 4}
    seeds = options.repeats or (1 if options.quick else 5)
    work = [
        Unit(f"{name}/seed{seed}", partial(measure, name, seed, **problem))
        for seed in range(seeds)
        for name in LIKELIHOODS
    ]
    return {"quick": options.quick, "dtype": "float64", **problem}, work


def make_data(name: str, n: int, d: int, seed: int) -> tuple[Tensor, Tensor]:
    """A smooth function on the unit cube, observed through each likelihood."""
    generator = torch.Generator().manual_seed(seed)
    X = torch.rand(n, d, dtype=torch.float64, generator=generator)
    f = torch.sin(5 * X).sum(-1, keepdim=True)
    noise = torch.randn(f.shape, dtype=torch.float64, generator=generator)
    if name == "gaussian":
        Y = f + 0.3 * noise
        return X, (Y - Y.mean()) / Y.std()
    if name == "bernoulli":
        return X, (f + noise > f.median()).to(f)
    return X, torch.poisson(torch.nn.functional.softplus(1 + f), generator=generator)


def bound(mll: Any, model: gpytorch.models.ApproximateGP, X: Tensor, Y: Tensor) -> float:
    """Evidence lower bound per observation, log prior included."""
    model.train()
    mll.likelihood.train()
    with torch.no_grad():
        q = model(X)
        fit_term = expected_log_prob(mll.likelihood, Y.squeeze(-1), q.mean, q.variance).sum()
        kl = model.variational_strategy.kl_divergence().sum()
        prior = sum(
            p.log_prob(closure(module)).sum() for _, module, p, closure, _ in mll.named_priors()
        )
    model.eval()
    return float((fit_term - kl + prior) / len(X))


def measure(name: str, seed: int, n: int, m: int, d: int) -> dict[str, Any]:
    """Bounds and seconds of both."""
    X, Y = make_data(name, n, d, seed)
    kind = LIKELIHOODS[name]
    result: dict[str, Any] = {}
    with known_warnings():
        start = time.perf_counter()
        ours = SequentialGP(
            X, Y, likelihood=kind and kind(), inducing_points=m, outcome_transform=None
        )
        mll = DualELBO(ours.likelihood, ours)
        fit_gpytorch_mll(mll)
        result["ours"] = {"seconds": time.perf_counter() - start, "bound": bound(mll, ours, X, Y)}
        start = time.perf_counter()
        peer = SingleTaskVariationalGP(X, Y, likelihood=kind and kind(), inducing_points=m)
        mll = VariationalELBO(peer.likelihood, peer.model, num_data=n)
        fit_gpytorch_mll(mll)
        result["botorch"] = {
            "seconds": time.perf_counter() - start,
            "bound": bound(mll, peer.model, X, Y),
        }
    return result


def render(units: dict[str, dict[str, Any]], directory: Path) -> str:
    """One row a likelihood."""
    lines = [
        "Evidence lower bound per observation (higher is better) and seconds, means over seeds, "
        "and in how many of the seeds ours is the higher bound (by more than -1e-4):",
        "",
        "| likelihood | bound, ours | bound, SingleTaskVariationalGP | ours at least as high "
        "| seconds, ours | seconds, theirs | times faster |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in LIKELIHOODS:
        rows = [unit for key, unit in units.items() if key.startswith(f"{name}/")]
        if not rows:
            continue
        value = {
            (way, what): statistics.mean(row[way][what] for row in rows)
            for way in ("ours", "botorch")
            for what in ("bound", "seconds")
        }
        wins = sum(row["ours"]["bound"] >= row["botorch"]["bound"] - 1e-4 for row in rows)
        faster = statistics.median(r["botorch"]["seconds"] / r["ours"]["seconds"] for r in rows)
        lines.append(
            f"| {name} | {value['ours', 'bound']:.4f} | {value['botorch', 'bound']:.4f} "
            f"| {wins}/{len(rows)} | {value['ours', 'seconds']:.2f} "
            f"| {value['botorch', 'seconds']:.2f} | {faster:.1f} |"
        )
    return "\n".join(lines)

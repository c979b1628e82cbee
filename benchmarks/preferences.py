"""Utilities learnt from comparisons, against BoTorch's `PairwiseGP`.

A noisy person compares random pairs of items in a box. Ours is fitted to the first comparisons and
updated with the rest, in batches; `PairwiseGP` is fitted to all of them, where it can be in
reasonable time. Both have the same kernel, priors and probit likelihood, and are compared on
held-out duels. One more comparison costs an `update` of ours (which learns hyperparameters now and
then: the mean counts), and of `PairwiseGP` either a refit or, with hyperparameters as they are, a
new posterior of all data. Duel loops ask for the pair of largest expected utility of the best
option (EUBO), and their regret is that of the item of largest posterior mean.

On small sets, both approximations are compared with long MCMC at the same hyperparameters, those of
ours. Times are processor seconds of one thread, which other work on the machine disturbs little.
"""

from __future__ import annotations

import math
import statistics
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from botorch.acquisition import PosteriorMean
from botorch.acquisition.preference import AnalyticExpectedUtilityOfBestOption
from botorch.fit import fit_gpytorch_mll
from botorch.models import PairwiseGP
from botorch.models.pairwise_gp import PairwiseLaplaceMarginalLogLikelihood
from botorch.optim import optimize_acqf
from torch import Tensor

from benchmarks.baselines.elliptical_slice import elliptical_slice
from benchmarks.known_warnings import known_warnings
from benchmarks.runner import Options, Unit
from seqgp import DualELBO, PreferenceGP
from seqgp.duel_optimizer import DuelOptimizer

#: Standard deviation of the noise of each utility, the first fit of ours, the size of updates.
NOISE, FIRST, BATCH = 0.3, 50, 50
TEST, MORE = 500, 20
#: How many seeds there are for each number of comparisons, for `PreferenceGP` and `PairwiseGP`. The
#: latter has a Laplace approximation at all items, so that a fit to 500 takes minutes.
SEEDS = {50: (3, 3), 150: (3, 3), 500: (3, 1), 2000: (1, 0), 10_000: (1, 0)}
#: Chains, samples of each that are kept, and samples before that are not.
CHAINS, SAMPLES, BURN_IN = 16, 1000, 300
WAYS = {"ours": "PreferenceGP", "pairwise": "PairwiseGP"}


def units(options: Options) -> tuple[dict[str, Any], list[Unit]]:
    """Small sets and the loops, and then the larger ones: the cheapest first."""
    numbers, dims, repeats, duels = SEEDS, [2, 4, 8], options.repeats or 3, 24
    if options.quick:
        numbers, dims, repeats, duels = {20: (1, 1)}, [2], 1, 12

    def sets(n: int) -> list[Unit]:
        return [
            Unit(f"{way}/n={n}/d={d}/seed{seed}", partial(measure, way, n, d, seed))
            for seed in range(repeats)
            for d in dims
            for way, seeds in zip(WAYS, numbers[n], strict=True)
            if seed < seeds
        ]

    smallest, *larger = numbers
    work = sets(smallest)
    work += [
        Unit(f"mcmc/n={smallest}/d={d}/seed0", partial(against_mcmc, smallest, d, 0)) for d in dims
    ]
    work += [
        Unit(f"loop/{way}/d={d}/seed{seed}", partial(loop, way, d, duels, seed))
        for seed in range(repeats)
        for d in dims[:2]
        for way in WAYS
    ]
    work += [unit for n in larger for unit in sets(n)]
    settings = {
        "quick": options.quick,
        "dtype": "float64",
        "noise": NOISE,
        "first": FIRST,
        "batch": BATCH,
        "test": TEST,
        "duels": duels,
        "clock": "processor",
        "chains": [CHAINS, SAMPLES, BURN_IN],
    }
    return settings, work


def utility(X: Tensor) -> Tensor:
    """The person's utility of ``... x d`` items, ``...``: smooth, with one maximum in the box."""
    weight = torch.linspace(1, 0.4, X.shape[-1], dtype=X.dtype)
    return 6 * torch.sin(4 * X * weight).mean(-1) - 4 * (X - 0.6).square().mean(-1)


def duels_of(n: int, d: int, seed: int) -> tuple[Tensor, Tensor]:
    """``2n x d`` random items and ``n x 2`` comparisons of each with the next one."""
    generator = torch.Generator().manual_seed(seed)
    X = torch.rand(2 * n, d, dtype=torch.float64, generator=generator)
    noise = NOISE * torch.randn(2 * n, dtype=torch.float64, generator=generator)
    return X, answers(utility(X) + noise)


def answers(seen: Tensor) -> Tensor:
    """``n x 2`` comparisons of ``2n`` utilities as they are seen, each with the next one."""
    pairs = torch.arange(len(seen)).reshape(-1, 2)
    return torch.where(seen[pairs[:, :1]] > seen[pairs[:, 1:]], pairs, pairs.flip(-1))


def fitted(way: str, X: Tensor, Y: Tensor) -> Any:
    """A model with all defaults, fitted."""
    if way == "ours":
        model = PreferenceGP(X, Y)
        fit_gpytorch_mll(DualELBO(model.likelihood, model))
        return model
    peer = PairwiseGP(X, Y)
    fit_gpytorch_mll(PairwiseLaplaceMarginalLogLikelihood(peer.likelihood, peer))
    return peer.eval()


def held_out(d: int, seed: int) -> tuple[Tensor, Tensor]:
    """Items and ``2 x n`` comparisons that no model learns: winners, losers."""
    X, Y = duels_of(TEST, d, 1000 + seed)
    return X, Y.mT


@torch.no_grad()
def score(model: Any, d: int, seed: int) -> dict[str, float]:
    """Log density of held-out duels, and correlation with the utility."""
    X, (won, lost) = held_out(d, seed)
    f = model.posterior(X).distribution
    S = f.covariance_matrix
    variance = S[won, won] + S[lost, lost] - 2 * S[won, lost]
    density = torch.special.log_ndtr((f.mean[won] - f.mean[lost]) / (2 + variance).sqrt())
    both = torch.stack([f.mean, utility(X)])
    return {"density": float(density.mean()), "correlation": float(both.corrcoef()[0, 1])}


def seconds(function: Any) -> float:
    """How many processor seconds a call takes."""
    start = time.process_time()
    function()
    return time.process_time() - start


def acquisition(model: Any, d: int) -> Tensor:
    """The pair that maximises EUBO, with few restarts."""
    bounds = torch.tensor([[0.0], [1.0]], dtype=torch.float64).expand(2, d)
    eubo = AnalyticExpectedUtilityOfBestOption(model)
    return optimize_acqf(eubo, bounds, q=2, num_restarts=4, raw_samples=64)[0]


def measure(way: str, n: int, d: int, seed: int) -> dict[str, Any]:
    """Accuracy after ``n`` comparisons, and seconds of one more."""
    torch.manual_seed(seed)
    X, Y = duels_of(n + MORE, d, seed)
    with known_warnings():
        start = time.process_time()
        first = min(n, FIRST) if way == "ours" else n
        model = fitted(way, X[: 2 * first], Y[:first])
        for i in range(first, n, BATCH):
            j = min(i + BATCH, n)
            model.update(X[2 * i : 2 * j], Y[i:j] - 2 * i)
        result: dict[str, Any] = {"fit": time.process_time() - start, **score(model, d, seed)}
        result["acquisition"] = seconds(lambda: acquisition(model, d))
        if way == "ours":
            more = [
                seconds(partial(model.update, X[2 * i : 2 * i + 2], Y[i : i + 1] - 2 * i))
                for i in range(n, n + MORE)
            ]
            result["one_more"] = {"mean": statistics.mean(more), "median": statistics.median(more)}
            result["inducing"] = model.variational_strategy.inducing_points.shape[-2]
        else:
            data = X[: 2 * n + 2], Y[: n + 1]
            again = PairwiseGP(*data, covar_module=model.covar_module)
            keep = seconds(lambda: (again.set_train_data(*data), again.eval().posterior(X[:2])))
            result["one_more"] = {"refit": seconds(lambda: fitted(way, *data)), "keep": keep}
    return result


def against_mcmc(n: int, d: int, seed: int) -> dict[str, Any]:
    """Log density of held-out duels at the same hyperparameters: ours, Laplace, long MCMC."""
    torch.manual_seed(seed)
    (X, Y), (test, (won, lost)) = duels_of(n, d, seed), held_out(d, seed)
    with known_warnings():
        ours = fitted("ours", X, Y)
        laplace = PairwiseGP(X, Y, covar_module=ours.covar_module).eval()
        result = {"ours": score(ours, d, seed), "laplace": score(laplace, d, seed)}
    with torch.no_grad():
        K = ours.covar_module(torch.cat([X, test])).to_dense()
        N = len(X)
        L = torch.linalg.cholesky(K[:N, :N] + 1e-6 * torch.eye(N, dtype=K.dtype))
        A = torch.linalg.solve_triangular(L, K[:N, N:], upper=False)
        start = torch.linalg.solve_triangular(L, ours.posterior(X).mean, upper=False)

        def log_likelihood(z: Tensor) -> Tensor:
            f = z @ L.mT
            difference = f[..., Y[:, 0]] - f[..., Y[:, 1]]
            return torch.special.log_ndtr(difference * math.sqrt(0.5)).sum(-1)

        generator = torch.Generator().manual_seed(seed)
        start = start.squeeze(-1).expand(CHAINS, N)
        z = elliptical_slice(log_likelihood, start, SAMPLES, BURN_IN, generator)
        S = K[N:, N:] - A.mT @ A
        variance = S[won, won] + S[lost, lost] - 2 * S[won, lost]
        p = torch.special.ndtr(z @ (A[:, won] - A[:, lost]) / (2 + variance).sqrt()).mean(0)
    each = p.log().mean(-1)  # a chain
    return {
        **{way: measured["density"] for way, measured in result.items()},
        "mcmc": float(p.mean(0).log().mean()),
        "error": float(each.std() / math.sqrt(CHAINS)),
    }


def loop(way: str, d: int, duels: int, seed: int) -> dict[str, Any]:
    """Regret half-way and at the end: the largest utility less that of the supposed best item."""
    torch.manual_seed(seed)
    bounds = torch.tensor([[0.0], [1.0]], dtype=torch.float64).expand(2, d).contiguous()
    noise = torch.Generator().manual_seed(seed)
    grid = torch.rand(200_000, d, dtype=torch.float64, generator=noise)
    top = float(utility(grid).max())
    optimizer = DuelOptimizer(bounds, seed=seed)
    initial = optimizer.num_initial
    X, Y = torch.empty(0, d, dtype=torch.float64), torch.empty(0, 2, dtype=torch.long)
    regret, spent = [], 0.0
    with known_warnings():
        for i in range(duels):
            start = time.process_time()
            if way == "ours" or i < initial:
                pair = optimizer.ask().squeeze(0)
            else:
                pair = acquisition(fitted(way, X, Y), d).detach()
            spent += time.process_time() - start
            seen = utility(pair)
            seen = seen + NOISE * torch.randn(2, dtype=torch.float64, generator=noise)
            X, Y = torch.cat([X, pair]), torch.cat([Y, answers(seen) + 2 * i])
            start = time.process_time()
            if way == "ours" or i < initial - 1:
                optimizer.tell(pair.unsqueeze(0), [bool(seen[0] > seen[1])])
            spent += time.process_time() - start
            if i + 1 in (duels // 2, duels):
                model = optimizer.model if way == "ours" else fitted(way, X, Y)
                mean = PosteriorMean(model)
                best = optimize_acqf(mean, bounds, q=1, num_restarts=4, raw_samples=64)[0]
                regret.append(max(top - float(utility(best)), 0.0))
    return {"regret": regret, "loop": spent}


def render(units: dict[str, dict[str, Any]], directory: Path) -> str:
    """Accuracy and times by size and dimension, and regrets of loops; medians over seeds."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for key, unit in units.items():
        groups.setdefault(key.rpartition("/")[0], []).append(unit)

    def median(rows: list[dict[str, Any]], *names: str) -> float:
        values = []
        for row in rows:
            value: Any = row
            for name in names:
                value = value[name]
            values.append(value)
        return statistics.median(values)

    lines = [
        "| comparisons | d | | log density of a duel | correlation | s fit | s one more: mean; "
        "median | s one more: refit; same hyperparameters | s acquisition | seeds |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for key, rows in groups.items():
        if key.startswith(("loop/", "mcmc/")):
            continue
        way, n, d = key.split("/")
        names = ("mean", "median") if way == "ours" else ("refit", "keep")
        more = "; ".join(f"{median(rows, 'one_more', name):.3f}" for name in names)
        more = f"{more} | " if way == "ours" else f" | {more}"
        lines.append(
            f"| {n[2:]} | {d[2:]} | {WAYS[way]} | {median(rows, 'density'):.4f} "
            f"| {median(rows, 'correlation'):.4f} | {median(rows, 'fit'):.2f} | {more} "
            f"| {median(rows, 'acquisition'):.2f} | {len(rows)} |"
        )
    lines += ["", "| loop | d | regret half-way | regret at the end | s in all | seeds |"]
    lines.append("|---|---|---|---|---|---|")
    for key, rows in groups.items():
        if not key.startswith("loop/"):
            continue
        _, way, d = key.split("/")
        half, end = (statistics.median(row["regret"][i] for row in rows) for i in (0, 1))
        lines.append(
            f"| {WAYS[way]} | {d[2:]} | {half:.4f} | {end:.4f} | {median(rows, 'loop'):.1f} "
            f"| {len(rows)} |"
        )
    lines += [
        "",
        "| comparisons | d | log density of a duel by MCMC | its standard error | PreferenceGP "
        "| Laplace at the same hyperparameters | seeds |",
        "|---|---|---|---|---|---|---|",
    ]
    for key, rows in groups.items():
        if key.startswith("mcmc/"):
            _, n, d = key.split("/")
            names = ("mcmc", "error", "ours", "laplace")
            values = " | ".join(f"{median(rows, name):.4f}" for name in names)
            lines.append(f"| {n[2:]} | {d[2:]} | {values} | {len(rows)} |")
    return "\n".join(lines)

"""Utilities learnt from comparisons, against BoTorch's `PairwiseGP`.

A noisy person compares random pairs of items in a box. Ours is fitted to the first comparisons and
updated with the rest, in batches; `PairwiseGP` is fitted to all of them, as far as its cost allows.
Both have the same kernel, priors and probit likelihood, and are compared on held-out duels. What
one more comparison costs is measured in three ways, each with a prediction after it:

* as a user would learn it: an `update` of ours, which learns hyperparameters now and then (the mean
  counts), and a refit of `PairwiseGP` that starts from the hyperparameters that it has;
* with hyperparameters as they are: those updates of ours that did not learn any, and
  ``set_train_data`` of `PairwiseGP`;
* as a conditioned copy, ``condition_on_observations`` of both.

Duel loops ask for the pair of largest expected utility of the best option (EUBO), and their regret
is that of the item of largest posterior mean.

Accuracy alone is also compared on utilities of other kinds, drawn at random
(`benchmarks.utilities`), of people who answer with as little noise, or with much more of it.

On small sets, both approximations are compared with long MCMC at the same hyperparameters, those of
ours. Times are processor seconds of one thread, which other work on the machine disturbs little.
"""

from __future__ import annotations

import copy
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
from benchmarks.utilities import KINDS, Utility, random_utility
from seqgp import DualELBO, PreferenceGP
from seqgp.duel_optimizer import DuelOptimizer

#: Standard deviation of the noise of each utility, and the size of the first fit of ours.
NOISE, FIRST = 0.3, 50
#: How many duels are held out, and how many times one more comparison is learnt.
TEST, MORE = 500, 20
#: How many seeds there are for each number of comparisons, for `PreferenceGP` and `PairwiseGP`. The
#: latter has a Laplace approximation at all items, so that a fit to 500 takes minutes.
SEEDS = {50: (20, 20), 150: (5, 5), 500: (3, 2), 2000: (3, 0), 10_000: (3, 0)}
#: The noise of people with other utilities, relative to the standard deviation of these. How many
#: seeds there are of each kind of utility, for each number of comparisons.
PEOPLE = {"others": 0.2, "noisier": 1.0}
OTHERS = {"others": {50: 5, 150: 1}, "noisier": {50: 3}}
#: How many seeds of duel loops there are.
LOOPS = 10
#: Chains, samples of each that are kept, and samples before that are not.
CHAINS, SAMPLES, BURN_IN = 16, 1000, 300
WAYS = {"ours": "PreferenceGP", "pairwise": "PairwiseGP"}


def units(options: Options) -> tuple[dict[str, Any], list[Unit]]:
    """Small sets and loops, and then the larger ones, seed by seed: the cheapest first."""
    numbers, others, dims, duels = SEEDS, OTHERS, [2, 4, 8], 24
    kinds, repeats, loops = list(KINDS), 3, LOOPS
    if options.quick:
        numbers, others, dims, duels = {20: (1, 1)}, {"others": {20: 1}}, [2], 12
        kinds, repeats, loops = kinds[:1], 1, 1
    small, *larger = numbers
    repeats, loops = options.repeats or repeats, options.repeats or loops

    def sets(n: int, seeds: list[int]) -> list[Unit]:
        return [
            Unit(f"{way}/n={n}/d={d}/seed{seed}", partial(measure, way, n, d, seed))
            for seed in seeds
            for d in dims
            for way, number in zip(WAYS, numbers[n], strict=True)
            if seed < (options.repeats or number)
        ]

    work = sets(small, list(range(options.repeats or max(numbers[small]))))
    work += [
        Unit(f"mcmc/n={small}/d={d}/seed{seed}", partial(against_mcmc, small, d, seed))
        for seed in range(repeats)
        for d in dims
    ]
    for n in larger[:1]:
        work += sets(n, list(range(options.repeats or max(numbers[n]))))
    work += [
        Unit(f"loop/{way}/d={d}/seed{seed}", partial(loop, way, d, duels, seed))
        for seed in range(loops)
        for d in dims[:2]
        for way in WAYS
    ]
    work += [
        Unit(f"{who}/n={n}/d={d}/{kind}/seed{seed}", partial(other, who, kind, n, d, seed))
        for who, seeds in others.items()
        for n, number in seeds.items()
        for seed in range(options.repeats or number)
        for d in dims
        for kind in kinds
    ]
    work += [unit for seed in range(repeats) for n in larger[1:] for unit in sets(n, [seed])]
    settings = {
        "quick": options.quick,
        "dtype": "float64",
        "noise": NOISE,
        "first": FIRST,
        "test": TEST,
        "duels": duels,
        "clock": "processor",
        "chains": [CHAINS, SAMPLES, BURN_IN],
    }
    return settings, work


def batch_size(n: int) -> int:
    """How many comparisons an update of a stream of ``n`` learns at once."""
    return max(50, n // 40)


def utility(X: Tensor) -> Tensor:
    """The person's utility of ``... x d`` items, ``...``: smooth, with one maximum in the box."""
    weight = torch.linspace(1, 0.4, X.shape[-1], dtype=X.dtype)
    return 6 * torch.sin(4 * X * weight).mean(-1) - 4 * (X - 0.6).square().mean(-1)


def duels_of(n: int, d: int, seed: int, of: Utility = utility) -> tuple[Tensor, Tensor]:
    """``2n x d`` random items and ``n x 2`` comparisons of each with the next one."""
    generator = torch.Generator().manual_seed(seed)
    X = torch.rand(2 * n, d, dtype=torch.float64, generator=generator)
    noise = NOISE * torch.randn(2 * n, dtype=torch.float64, generator=generator)
    return X, answers(of(X) + noise)


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


def held_out(d: int, seed: int, of: Utility = utility) -> tuple[Tensor, Tensor]:
    """Items and ``2 x n`` comparisons that no model learns: winners, losers."""
    X, Y = duels_of(TEST, d, 1000 + seed, of)
    return X, Y.mT


@torch.no_grad()
def score(model: Any, d: int, seed: int, of: Utility = utility) -> dict[str, float]:
    """Log density of held-out duels, and correlation with the utility."""
    X, (won, lost) = held_out(d, seed, of)
    f = model.posterior(X).distribution
    S = f.covariance_matrix
    variance = S[won, won] + S[lost, lost] - 2 * S[won, lost]
    density = torch.special.log_ndtr((f.mean[won] - f.mean[lost]) / (2 + variance).sqrt())
    both = torch.stack([f.mean, of(X)])
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
        fitted(way, X[:8], Y[:4])  # what is only slow the first time
        start = time.process_time()
        first, batch = min(n, FIRST) if way == "ours" else n, batch_size(n)
        model = fitted(way, X[: 2 * first], Y[:first])
        for i in range(first, n, batch):
            j = min(i + batch, n)
            model.update(X[2 * i : 2 * j], Y[i:j] - 2 * i)
        result: dict[str, Any] = {"fit": time.process_time() - start, **score(model, d, seed)}
        result["acquisition"] = seconds(lambda: acquisition(model, d))
        return result | (one_more if way == "ours" else one_more_refitted)(model, X, Y, n)


def other(who: str, kind: str, n: int, d: int, seed: int) -> dict[str, Any]:
    """Scores of both after a fit to ``n`` comparisons by one of the other `PEOPLE`."""
    torch.manual_seed(seed)
    of = random_utility(kind, d, 10_000 + seed, NOISE / PEOPLE[who])
    X, Y = duels_of(n, d, seed, of)
    with known_warnings():
        return {way: score(fitted(way, X, Y), d, seed, of) for way in WAYS}


def one_more(model: Any, X: Tensor, Y: Tensor, n: int) -> dict[str, Any]:
    """Seconds that `PreferenceGP` takes for one more comparison, and a prediction after it."""

    def learn(i: int) -> int:
        record = model.update(X[2 * i : 2 * i + 2], Y[i : i + 1] - 2 * i)
        predict(model, X)
        return int(record.steps)

    conditioned = seconds_of_conditioning(model, X, Y, n)
    spent, only_conditions = [], []
    for i in range(n, n + MORE):
        start = time.process_time()
        steps = learn(i)
        spent.append(time.process_time() - start)
        if not steps:
            only_conditions.append(spent[-1])
    return {
        "learnt": statistics.mean(spent),
        "kept": statistics.median(only_conditions),
        "conditioned": conditioned,
        "inducing": model.variational_strategy.inducing_points.shape[-2],
    }


def one_more_refitted(model: Any, X: Tensor, Y: Tensor, n: int) -> dict[str, Any]:
    """The same for `PairwiseGP`."""

    def refit() -> None:
        data = X[: 2 * n + 2], Y[: n + 1]
        again = PairwiseGP(*data, covar_module=copy.deepcopy(model.covar_module))
        fit_gpytorch_mll(PairwiseLaplaceMarginalLogLikelihood(again.likelihood, again))
        predict(again.eval(), X)

    def keep(number: int) -> None:
        model.set_train_data(X[: 2 * number], Y[:number], update_model=True)
        predict(model, X)

    conditioned, learnt = seconds_of_conditioning(model, X, Y, n), seconds(refit)
    kept = statistics.median(seconds(partial(keep, n + i)) for i in (1, 2, 3))
    return {"learnt": learnt, "kept": kept, "conditioned": conditioned}


def seconds_of_conditioning(model: Any, X: Tensor, Y: Tensor, n: int) -> float:
    """Seconds that a conditioned copy of either model takes, and a prediction of it."""
    item, answer = X[2 * n : 2 * n + 2], Y[n : n + 1] - 2 * n
    return statistics.median(
        seconds(lambda: predict(model.condition_on_observations(item, answer), X)) for _ in range(3)
    )


@torch.no_grad()
def predict(model: Any, X: Tensor) -> None:
    """A prediction, before which no model has finished its work."""
    model.posterior(X[:2])


def against_mcmc(n: int, d: int, seed: int) -> dict[str, Any]:
    """Scores on held-out duels at the same hyperparameters: ours, Laplace, long MCMC."""
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
        f = z.mean((0, 1)) @ A
    each = p.log().mean(-1)  # a chain
    exact = {
        "density": float(p.mean(0).log().mean()),
        "error": float(each.std() / math.sqrt(CHAINS)),
        "correlation": float(torch.stack([f, utility(test)]).corrcoef()[0, 1]),
    }
    return {**result, "mcmc": exact}


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
    """Accuracy, times, regrets of loops, and agreement with MCMC."""
    groups: dict[str, dict[str, Any]] = {}  # units by seed
    for key, unit in units.items():
        group, _, seed = key.rpartition("/")
        groups.setdefault(group, {})[seed] = unit
    compared = {key: rows for key, rows in groups.items() if key.startswith(tuple(WAYS))}
    loops = {key: rows for key, rows in groups.items() if key.startswith("loop/")}
    exact = {key: rows for key, rows in groups.items() if key.startswith("mcmc/")}
    others = {key: rows for key, rows in groups.items() if key.startswith(tuple(PEOPLE))}
    tables = [_accuracy(compared), _others(others), _times(compared), _regrets(loops)]
    return "\n\n".join("\n".join(table) for table in [*tables, _exact(exact)])


def _accuracy(groups: dict[str, dict[str, Any]]) -> list[str]:
    """Means over seeds, and of the differences on the same data, with standard errors."""
    lines = [
        "| comparisons | d | seeds: ours, PairwiseGP | log density of a duel: ours | PairwiseGP "
        "| difference | correlation: ours | PairwiseGP | difference |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for key, ours in groups.items():
        way, n, d = key.split("/")
        if way != "ours":
            continue
        theirs = groups.get(f"pairwise/{n}/{d}", {})
        cells = _scores(list(ours.values()), [(ours[s], theirs[s]) for s in ours if s in theirs])
        seeds = f"{len(ours)}, {len(theirs)}"
        lines.append(f"| {n[2:]} | {d[2:]} | {seeds} | " + " | ".join(cells) + " |")
    return lines


def _others(groups: dict[str, dict[str, Any]]) -> list[str]:
    """The same for other utilities, over kinds and seeds."""
    lines = [
        "| noise | comparisons | d | utilities | log density of a duel: ours | PairwiseGP "
        "| difference | correlation: ours | PairwiseGP | difference |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    sizes: dict[tuple[float, str, str], list[tuple[Any, Any]]] = {}
    for key, rows in groups.items():
        who, n, d, _ = key.split("/")
        both = [(row["ours"], row["pairwise"]) for row in rows.values()]
        sizes.setdefault((PEOPLE[who], n[2:], d[2:]), []).extend(both)
    for (noise, n, d), both in sizes.items():
        cells = " | ".join(_scores([ours for ours, _ in both], both))
        lines.append(f"| {noise} | {n} | {d} | {len(both)} | {cells} |")
    return lines


def _scores(ours: list[Any], both: list[tuple[Any, Any]]) -> list[str]:
    """For each score: the mean of ours, that of `PairwiseGP`, and that of the differences.

    Args:
        ours: Results of ours.
        both: Results of both on the same data, if there are any.
    """
    cells = []
    for score in ("density", "correlation"):
        values = [(a[score], b[score]) for a, b in both]
        cells += [
            f"{statistics.mean(row[score] for row in ours):.4f}",
            f"{statistics.mean(b for _, b in values):.4f}" if values else "",
            _with_error([a - b for a, b in values]),
        ]
    return cells


def _with_error(differences: list[float]) -> str:
    """Their mean, and its standard error if there are several."""
    if not differences:
        return ""
    mean = f"{statistics.mean(differences):+.4f}"
    if len(differences) < 2:
        return mean
    return f"{mean} ± {statistics.stdev(differences) / math.sqrt(len(differences)):.4f}"


def _times(groups: dict[str, dict[str, Any]]) -> list[str]:
    """Medians over seeds."""
    lines = [
        "| comparisons | d | | s fit | s one more, learnt | s one more, same hyperparameters "
        "| s one more, as a conditioned copy | s acquisition |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for key, rows in groups.items():
        way, n, d = key.split("/")
        fit, *more, acquired = (
            statistics.median(row[name] for row in rows.values())
            for name in ("fit", "learnt", "kept", "conditioned", "acquisition")
        )
        cells = " | ".join(f"{value:.3f}" for value in more)
        lines.append(f"| {n[2:]} | {d[2:]} | {WAYS[way]} | {fit:.2f} | {cells} | {acquired:.2f} |")
    return lines


def _regrets(groups: dict[str, dict[str, Any]]) -> list[str]:
    """Medians over seeds, and the mean difference at the end on the same seeds."""
    lines = [
        "| loop | d | regret half-way | regret at the end | difference | s in all | seeds |",
        "|---|---|---|---|---|---|---|",
    ]
    for key, seeds in groups.items():
        _, way, d = key.split("/")
        rows = list(seeds.values())
        half, end = (statistics.median(row["regret"][i] for row in rows) for i in (0, 1))
        spent = statistics.median(row["loop"] for row in rows)
        others = groups.get(f"loop/pairwise/{d}", {}) if way == "ours" else {}
        both = [(seeds[s]["regret"][1], others[s]["regret"][1]) for s in seeds if s in others]
        cells = [WAYS[way], d[2:], f"{half:.4f}", f"{end:.4f}"]
        cells += [_with_error([a - b for a, b in both]), f"{spent:.1f}", str(len(rows))]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _exact(groups: dict[str, dict[str, Any]]) -> list[str]:
    """Means over seeds of scores at the same hyperparameters."""
    lines = [
        "| comparisons | d | log density of a duel by MCMC | its standard error | PreferenceGP "
        "| Laplace | correlation by MCMC | PreferenceGP | Laplace | seeds |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for key, rows in groups.items():
        _, n, d = key.split("/")
        names = ["mcmc/density", "mcmc/error", "ours/density", "laplace/density"]
        names += ["mcmc/correlation", "ours/correlation", "laplace/correlation"]
        means = []
        for name in names:
            way, score = name.split("/")
            means.append(statistics.mean(row[way][score] for row in rows.values()))
        cells = " | ".join(f"{value:.4f}" for value in means)
        lines.append(f"| {n[2:]} | {d[2:]} | {cells} | {len(rows)} |")
    return lines

"""Batch Bayesian optimisation of a lunar lander: reward, and whether it lands.

Twelve constants of a controller, in wind (`benchmarks.lander`). An evaluation is the mean reward of
five landings, the same terrains and winds each time; it is a success if most of them end on
the ground without a crash. All ways start from the same 24 points and have 90 evaluations. The
models are those of the paper: for the reward an ARD Matern-5/2 kernel, for success an ARD RBF
kernel of variance 100, with BoTorch's prior on lengthscales for all alike. All learn
hyperparameters after every three evaluations, from rewards without their long lower tail
(`without_tail`). The rewards of failures are known to all.

A *committee* is three optimisers that see the same evaluations through different models
(`COMMITTEE`) and take turns; each imagines the outcomes of what the others have proposed for the
same batch.
"""

from __future__ import annotations

import itertools
import statistics
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from botorch.models.transforms import Normalize, Standardize
from botorch.models.transforms.input import InputTransform, Warp
from botorch.models.utils.gpytorch_modules import get_covar_module_with_dim_scaled_prior
from botorch.utils.sampling import draw_sobol_samples
from gpytorch.kernels import Kernel, MaternKernel, ScaleKernel
from gpytorch.likelihoods import BernoulliLikelihood
from gpytorch.means import ConstantMean, ZeroMean
from gpytorch.priors import GammaPrior
from torch import Tensor

from benchmarks.baselines.qlognei import qlognei_batch
from benchmarks.baselines.scbo import SCBO
from benchmarks.known_warnings import known_warnings
from benchmarks.lander import CONSTANTS, DIMENSION, Lander, bounds
from benchmarks.runner import Options, Unit
from seqgp import SequentialGP
from seqgp.batch_optimizer import BatchOptimizer
from seqgp.likelihoods.discrete import BinomialLikelihood

INITIAL, BATCH, EPISODES = 24, 3, 5
OPTIMIZE: dict[str, Any] = {"num_restarts": 4, "raw_samples": 256, "options": {"maxiter": 40}}
FIT = {"maxiter": 50}
WAYS = {
    "fantasies": "fantasies, batches of 3",
    "sequential": "one at a time",
    "believer": "Kriging believer, batches of 3",
    "region": "trust region, batches of 3",
    "qlognei": "qLogNEI, Gaussian 0/1, batches of 3",
    "scbo": "SCBO, Gaussian 0/1, batches of 3",
    "random": "random",
    "committee": "committee of three models, batches of 3",
    "committee one at a time": "committee of three models, one at a time",
}


def units(options: Options) -> tuple[dict[str, Any], list[Unit]]:
    """All ways for each seed."""
    quick = options.quick
    evaluations, episodes = (INITIAL + 6, 1) if quick else (90, EPISODES)
    seeds = options.repeats or (1 if quick else 10)
    work = [
        Unit(f"{way}/seed{seed}", partial(measure, way, seed, evaluations, episodes))
        for seed in range(seeds)
        for way in WAYS
    ]
    settings = {"quick": quick, "evaluations": evaluations, "episodes": episodes}
    return settings, work


def without_tail(Y: Tensor) -> Tensor:
    """Rewards with those of the worst crashes raised to the median less 1.5 interquartile ranges.

    How bad a crash is tells nothing about landings, and much about the scale of a Gaussian model.
    """
    low, middle, high = Y.quantile(torch.tensor([0.25, 0.5, 0.75]).to(Y))
    return Y.clamp_min(middle - 1.5 * (high - low))


def make_objective(
    X: Tensor, Y: Tensor, kernel: Kernel | None = None, inputs: InputTransform | None = None
) -> SequentialGP:
    """The reward: Gaussian, Matern-5/2."""
    kernel = kernel or get_covar_module_with_dim_scaled_prior(DIMENSION, use_rbf_kernel=False)
    return SequentialGP(
        X,
        without_tail(Y),
        covar_module=ScaleKernel(kernel).to(X),
        input_transform=inputs or Normalize(DIMENSION, bounds=bounds()),
        outcome_transform=Standardize(1),
    )


def make_validity(
    X: Tensor, landings: Tensor, episodes: int | None = None, learn_mean: bool = False
) -> SequentialGP:
    """Success: an RBF of variance 100.

    Args:
        X: Constants.
        landings: Whether there was success, or how many landings there were.
        episodes: Of how many, if they were counted.
        learn_mean: Whether the mean is learnt, or zero, so that nothing is given up early.
    """
    kernel = ScaleKernel(get_covar_module_with_dim_scaled_prior(DIMENSION)).to(X)
    kernel.outputscale = 100.0
    kernel.raw_outputscale.requires_grad_(False)
    counts = episodes is not None
    return SequentialGP(
        X,
        landings,
        likelihood=BinomialLikelihood(episodes, link="probit") if counts else BernoulliLikelihood(),
        covar_module=kernel,
        mean_module=ConstantMean() if learn_mean else ZeroMean(),
        input_transform=Normalize(DIMENSION, bounds=bounds()),
    )


def with_short_lengthscales(X: Tensor, Y: Tensor) -> SequentialGP:
    """The reward, with BoTorch's former prior on lengthscales."""
    prior = GammaPrior(3.0, 6.0)
    return make_objective(X, Y, MaternKernel(2.5, ard_num_dims=DIMENSION, lengthscale_prior=prior))


def of_square_roots(X: Tensor, Y: Tensor) -> SequentialGP:
    """The reward, as a function of the constants' square roots."""
    roots = Warp(DIMENSION, list(range(DIMENSION)), bounds=bounds()).to(X)
    roots.initialize(concentration1=torch.full_like(roots.concentration1, 0.5))
    roots.requires_grad_(False)
    return make_objective(X, Y, inputs=roots)


#: A model of the reward each, and whether landings are counted and their mean share is learnt.
COMMITTEE = (
    (make_objective, False, False),
    (with_short_lengthscales, True, False),
    (of_square_roots, True, True),
)


def measure(way: str, seed: int, evaluations: int, episodes: int) -> dict[str, Any]:
    """Reward and success of each evaluation, in order, and seconds that proposing took."""
    torch.manual_seed(seed)
    lander = Lander(seed, episodes)
    X = draw_sobol_samples(bounds(), INITIAL, 1, seed=seed).squeeze(1)
    rewards: list[float] = []
    landed: list[float] = []

    def evaluate(X: Tensor) -> tuple[Tensor, Tensor]:
        outcomes = [lander.evaluate(x) for x in X]
        rewards.extend(outcome.reward for outcome in outcomes)
        landed.extend(outcome.landed for outcome in outcomes)
        return (
            torch.tensor([outcome.reward for outcome in outcomes]).to(X),
            torch.tensor([round(episodes * outcome.landed) for outcome in outcomes]),
        )

    def judge(X: Tensor) -> tuple[Tensor, Tensor]:
        Y, landings = evaluate(X)
        return Y, landings > episodes / 2

    common = {
        "num_initial": INITIAL,
        "learn_from_failures": True,
        "refit_every": BATCH,
        "fit_options": FIT,
        **OPTIMIZE,
    }
    start = time.perf_counter()
    with known_warnings():
        if way == "random":
            judge(X)
            judge(bounds()[1] * torch.rand(evaluations - INITIAL, DIMENSION).to(X))
        elif way == "qlognei":
            run_qlognei(X, *judge(X), judge, evaluations)
        elif way == "scbo":
            run_scbo(X, *judge(X), judge, evaluations, seed)
        elif way.startswith("committee"):
            q = BATCH if way == "committee" else 1
            run_committee(X, *evaluate(X), evaluate, evaluations, q, episodes, seed, common)
        else:
            optimizer = BatchOptimizer(
                bounds(),
                fantasy="believer" if way == "believer" else "mean",
                make_objective=make_objective,
                make_validity=make_validity,
                seed=seed,
                trust_region=way == "region",
                **common,
            )
            optimizer.tell(X, *judge(X))
            optimizer.run(judge, evaluations, 1 if way == "sequential" else BATCH, False)
    return {
        "rewards": rewards,
        "landed": landed,
        "usual": lander.evaluate(torch.tensor(list(CONSTANTS.values()))).reward,
        "run_seconds": time.perf_counter() - start,
    }


def run_qlognei(X: Tensor, Y: Tensor, valid: Tensor, evaluate: Any, evaluations: int) -> None:
    """BoTorch's way, with the same kernel for the reward."""
    while len(X) < evaluations:
        kernel = get_covar_module_with_dim_scaled_prior(DIMENSION, use_rbf_kernel=False)
        candidates = qlognei_batch(
            X, without_tail(Y), valid, bounds(), BATCH, FIT, OPTIMIZE, ScaleKernel(kernel).to(X)
        )
        new_Y, new_valid = evaluate(candidates)
        X, Y = torch.cat([X, candidates]), torch.cat([Y, new_Y])
        valid = torch.cat([valid, new_valid])


def run_scbo(
    X: Tensor, Y: Tensor, valid: Tensor, evaluate: Any, evaluations: int, seed: int
) -> None:
    """SCBO, with the same kernel for the reward and its own transform of it."""

    def kernel() -> Kernel:
        of_reward = get_covar_module_with_dim_scaled_prior(DIMENSION, use_rbf_kernel=False)
        return ScaleKernel(of_reward).to(X)

    loop = SCBO(bounds(), BATCH, INITIAL, FIT, seed, kernel)
    loop.tell(X, Y, valid)
    while len(loop.X) < evaluations:
        X = loop.ask()
        loop.tell(X, *evaluate(X))


def run_committee(
    X: Tensor,
    Y: Tensor,
    landings: Tensor,
    evaluate: Any,
    evaluations: int,
    q: int,
    episodes: int,
    seed: int,
    options: dict[str, Any],
) -> None:
    """Optimisers that take turns; what one has proposed for a batch is pending for the next."""
    members = []
    for number, (objective, counted, learn_mean) in enumerate(COMMITTEE):
        trials = episodes if counted else None
        validity = partial(make_validity, episodes=trials, learn_mean=learn_mean)
        member = BatchOptimizer(
            bounds(),
            num_trials=trials or 1,
            make_objective=objective,
            make_validity=validity,
            seed=seed + 1000 * number,
            **options,
        )
        members.append((member, counted))
    total = 0
    for batch in itertools.count():
        for member, counted in members:
            member.tell(X, Y, landings if counted else landings > episodes / 2)
        total += len(X)
        if total >= evaluations:
            return
        X = X[:0]
        for turn in range(batch, batch + min(q, evaluations - total)):
            member, _ = members[turn % len(members)]
            X = torch.cat([X, member.ask(1, X_pending=X)])
        Y, landings = evaluate(X)


def best_so_far(row: dict[str, Any]) -> Tensor:
    """The best reward after each evaluation."""
    return torch.tensor(row["rewards"]).cummax(0).values


def render(units: dict[str, dict[str, Any]], directory: Path) -> str:
    """Best reward at the end and rate of success, and a figure."""
    lines = [
        "| | best reward at the end, mean | of each seed | successes among evaluations that were "
        "chosen | seconds, median |",
        "|---|---|---|---|---|",
    ]
    curves = {}
    present = [way for way in WAYS if any(key.startswith(f"{way}/") for key in units)]
    first = [key.partition("/")[2] for key in units if key.startswith(f"{present[0]}/")]
    seeds = [  # that all ways have: an unfinished run compares like with like
        seed
        for seed in sorted(first, key=lambda seed: int(seed.removeprefix("seed")))
        if all(f"{way}/{seed}" in units for way in present)
    ]
    for way, label in WAYS.items():
        rows = [units[f"{way}/{seed}"] for seed in seeds if way in present]
        if not rows:
            continue
        curves[label] = torch.stack([best_so_far(row) for row in rows])
        final = curves[label][:, -1].tolist()
        rate = statistics.mean(
            statistics.mean(share >= 0.5 for share in row["landed"][INITIAL:]) for row in rows
        )
        lines.append(
            f"| {label} | {statistics.mean(final):.1f} "
            f"| {', '.join(f'{value:.0f}' for value in final)} | {rate:.0%} "
            f"| {statistics.median(row['run_seconds'] for row in rows):.0f} |"
        )
    ours = curves.get(WAYS["committee"])
    if ours is not None and len(ours) > 1:
        leads = []
        for label, runs in curves.items():
            if runs is not ours:
                lead = ours[:, -1] - runs[:, -1]
                error = float(lead.std()) / len(lead) ** 0.5
                leads.append(f"{label}: {float(lead.mean()):.1f} ({error:.1f})")
        lines += [
            "",
            "Lead of the committee in batches, mean (standard error): " + "; ".join(leads) + ".",
        ]
    usual = [units[f"{present[0]}/{seed}"]["usual"] for seed in seeds]
    if usual:
        lines += ["", f"The usual constants have {statistics.mean(usual):.1f} in the same worlds."]
    lines += ["", f"![best reward so far]({plot(curves, directory)})"]
    return "\n".join(lines)


def plot(curves: dict[str, Tensor], directory: Path) -> str:
    """Best reward against evaluations, each seed thin, the mean thick."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    for (label, runs), colour in zip(
        curves.items(), ("C3", "C0", "C2", "C5", "C4", "C6", "C7", "C1", "C9"), strict=False
    ):
        x = range(INITIAL, runs.shape[1] + 1)
        for run in runs[:, INITIAL - 1 :]:
            axes.plot(x, run, color=colour, alpha=0.25, linewidth=0.8)
        axes.plot(x, runs.mean(0)[INITIAL - 1 :], color=colour, linewidth=2.2, label=label)
    axes.set(xlabel="evaluations", ylabel="best reward so far, lunar lander")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9)
    path = directory / "lunar.png"
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return path.name

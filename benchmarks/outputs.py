"""Correlated outputs, varying noise, labels together with values, and correlated validity.

* ``scarce``: two outputs in a box, one of them observed at few inputs, whose errors are compared:
  ours, also with a part of its own for the scarce one (`shared_and_own`), `MultiTaskGP`, and models
  of the scarce output alone. The outputs of the third pair have
  nothing to do with each other.
* ``large``: seconds of a fit and errors as observations become more, ours with 100 inducing points.
* ``stream``: the same pair in batches, of one output at a time, each learnt by `update`, or by a
  refit of `MultiTaskGP` to everything so far.
* ``noise``: functions of one input whose noise varies, as in the literature: ours, a likelihood of
  two latents in GPyTorch, GPJax, and ours with constant noise. All have Gaussian predictions with
  the expected noise. GPJax runs in an environment of its own, whose Python is ``$GPJAX_PYTHON``
  (tested with GPJax 1.0.0); otherwise its rows are left out.
* ``mixed``: values and labels of related functions, one of the two scarce: together or each alone.
* ``loop``: `BatchOptimizer` with validity that is correlated with the objective, or independent.
  Evaluations of the first problem fail where the objective is high, those of the others elsewhere.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import subprocess
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from botorch.fit import fit_gpytorch_mll
from botorch.models import MultiTaskGP, SingleTaskGP
from botorch.models.transforms.outcome import StratifiedStandardize
from botorch.test_functions.multi_fidelity import AugmentedBranin, AugmentedHartmann
from botorch.test_functions.synthetic import ConstrainedGramacy
from botorch.utils.sampling import draw_sobol_samples
from gpytorch.likelihoods import BernoulliLikelihood, GaussianLikelihood
from gpytorch.mlls import ExactMarginalLogLikelihood
from torch import Tensor

from benchmarks.baselines.two_latents import TwoLatents
from benchmarks.known_warnings import known_warnings
from benchmarks.runner import ROOT, Options, Unit
from seqgp import (
    DualELBO,
    HeteroscedasticGaussianLikelihood,
    SequentialGP,
    SequentialMultiTaskGP,
)
from seqgp.batch_optimizer import BatchOptimizer
from seqgp.models.tasks import shared_and_own

TEST = 500
#: Standard deviation of the noise of both outputs, as a share of that of the function.
NOISE = 0.05
#: Observations of the first and the scarce output, by pair of outputs.
PAIRS = {"Branin": (60, 8), "Hartmann": (120, 20), "unrelated": (60, 8)}
SCARCE = {
    "ours": "SequentialMultiTaskGP",
    "parts": "SequentialMultiTaskGP, `shared_and_own`",
    "MultiTaskGP": "MultiTaskGP",
    "ours alone": "SequentialGP, alone",
    "SingleTaskGP": "SingleTaskGP, alone",
}
LARGE, LARGEST_EXACT, INDUCING = (100, 300, 1000, 3000), 1000, 100
NOISY = ("Goldberg", "Yuan", "Williams")
HETEROSCEDASTIC = {
    "ours": "HeteroscedasticGaussianLikelihood",
    "gpytorch": "GPyTorch, two latents",
    "gpjax": "GPJax",
    "constant": "SequentialGP, constant noise",
}
#: Numbers of values and labels.
MIXED = {"few labels": (60, 12), "few values": (8, 100)}
PROBLEMS = {"cliff": (6, 24), "Gramacy": (6, 24)}
BATCH = 3
OPTIMIZE: dict[str, Any] = {"num_restarts": 2, "raw_samples": 64, "options": {"maxiter": 30}}
FIT = {"maxiter": 30}


def units(options: Options) -> tuple[dict[str, Any], list[Unit]]:
    """All parts, seed by seed."""
    quick = options.quick
    sizes = LARGE[:1] if quick else LARGE
    length, batch = (60, 30) if quick else (400, 40)
    evaluations = {name: n + BATCH if quick else total for name, (n, total) in PROBLEMS.items()}
    gpjax = os.environ.get("GPJAX_PYTHON")
    work = []
    for seed in range(options.repeats or (1 if quick else 5)):
        work += [
            Unit(f"scarce/{pair}/{way}/seed{seed}", partial(measure_scarce, pair, way, seed))
            for pair in (("Branin",) if quick else PAIRS)
            for way in SCARCE
        ]
        work += [
            Unit(f"noise/{name}/{way}/seed{seed}", partial(measure_noise, name, way, seed, gpjax))
            for name in (NOISY[:1] if quick else NOISY)
            for way in HETEROSCEDASTIC
            if way != "gpjax" or gpjax
        ]
        work += [
            Unit(f"mixed/{name}/{way}/seed{seed}", partial(measure_mixed, name, way, seed))
            for name in MIXED
            for way in ("together", "alone")
        ]
        work += [
            Unit(f"large/{n}/{way}/seed{seed}", partial(measure_large, n, way, seed))
            for n in sizes
            for way in ("ours", "MultiTaskGP")
            if way == "ours" or n <= LARGEST_EXACT
        ]
        work += [
            Unit(f"stream/{way}/seed{seed}", partial(measure_stream, way, seed, length, batch))
            for way in ("ours", "MultiTaskGP")
        ]
        work += [
            Unit(f"loop/{name}/{way}/seed{seed}", partial(measure_loop, name, way, seed, number))
            for name, number in evaluations.items()
            for way in ("correlated", "independent")
            if not quick or name == "cliff"
        ]
    return {"quick": quick, "noise": NOISE, "stream": [length, batch], "fit": FIT}, work


# -------------------------------------------------------------------- two outputs


def functions(pair: str) -> tuple[int, Callable[[Tensor, int], Tensor]]:
    """The dimension, and a function of ``n x d`` inputs in the unit cube and a task, ``n``."""
    problem: Any = (AugmentedHartmann if pair == "Hartmann" else AugmentedBranin)()
    problem = problem.double()
    d = problem.dim - 1
    lower, upper = problem.bounds[0, :d], problem.bounds[1, :d]

    def function(X: Tensor, task: int) -> Tensor:
        if pair == "unrelated" and task:
            return torch.sin(7 * X[:, 0] - 2) * torch.cos(5 * X[:, 1])
        fidelity = X.new_full((len(X), 1), 1.0 if task else 0.5)
        values = problem(torch.cat([lower + (upper - lower) * X, fidelity], -1))
        # Branin's valleys are what is to be found; its far corner is a hundred times as large.
        return -values if pair == "Hartmann" else values.sqrt()

    return d, function


def observations(pair: str, numbers: tuple[int, int], seed: int) -> tuple[Tensor, Tensor]:
    """``n x (d + 1)`` inputs of both tasks, the task last, and ``n x 1`` noisy observations."""
    d, function = functions(pair)
    generator = torch.Generator().manual_seed(seed)
    X, Y = [], []
    for task, n in enumerate(numbers):
        x = torch.rand(n, d, dtype=torch.float64, generator=generator)
        scale = function(box(d), task).std()
        noise = torch.randn(n, dtype=torch.float64, generator=generator)
        X.append(torch.cat([x, torch.full_like(x[:, :1], task)], -1))
        Y.append((function(x, task) + NOISE * scale * noise).unsqueeze(-1))
    return torch.cat(X), torch.cat(Y)


def box(d: int) -> Tensor:
    """``TEST x d`` inputs to compare at."""
    return draw_sobol_samples(torch.tensor([[0.0] * d, [1.0] * d]).double(), TEST, 1, 0).squeeze(1)


def fitted(way: str, X: Tensor, Y: Tensor, **options: Any) -> Any:
    """A model of both tasks, or of the second alone."""
    if way in ("ours alone", "SingleTaskGP"):
        mine = X[:, -1] == 1
        X, Y = X[mine, :-1], Y[mine]
    if way in ("ours", "parts"):
        if way == "parts":
            options["task_covar_module"] = shared_and_own([0, 1])
        model: Any = SequentialMultiTaskGP(X, Y, -1, all_tasks=[0, 1], **options)
    elif way == "MultiTaskGP":
        seen = X[:, -1].unique().long()
        transform = StratifiedStandardize(X.shape[-1] - 1, seen)
        model = MultiTaskGP(X, Y, -1, outcome_transform=transform)
    else:
        model = (SequentialGP if way == "ours alone" else SingleTaskGP)(X, Y, **options)
    kind = DualELBO if isinstance(model, SequentialGP) else ExactMarginalLogLikelihood
    fit_gpytorch_mll(kind(model.likelihood, model))
    return model.eval()


@torch.no_grad()
def score(model: Any, pair: str, tasks: tuple[int, ...] = (1,)) -> dict[str, float]:
    """Relative error of the function and log density of it, means over tasks."""
    d, function = functions(pair)
    T, errors, densities = box(d), [], []
    for task in tasks:
        truth, at = function(T, task), torch.full_like(T[:, :1], task)
        of_both = isinstance(model, MultiTaskGP | SequentialMultiTaskGP)
        posterior = model.posterior(torch.cat([T, at], -1) if of_both else T)
        mean, variance = posterior.mean.squeeze(-1), posterior.variance.squeeze(-1)
        errors.append(float((mean - truth).square().mean().sqrt() / truth.std()))
        variance = variance + (NOISE * truth.std()).square()
        z = (truth - mean).square() / variance
        densities.append(float(-0.5 * (z + (2 * math.pi * variance / truth.var()).log()).mean()))
    return {"error": statistics.mean(errors), "density": statistics.mean(densities)}


def measure_scarce(pair: str, way: str, seed: int) -> dict[str, Any]:
    """Errors of the scarce output."""
    torch.manual_seed(seed)
    with known_warnings():
        start = time.process_time()
        model = fitted(way, *observations(pair, PAIRS[pair], seed))
        return {"fit": time.process_time() - start, **score(model, pair)}


def measure_large(n: int, way: str, seed: int) -> dict[str, Any]:
    """Seconds and errors of both outputs, with ``n`` observations in all."""
    torch.manual_seed(seed)
    X, Y = observations("Branin", (n // 2, n - n // 2), seed)
    options = {"inducing_points": min(n, INDUCING)} if way == "ours" else {}
    with known_warnings():
        start = time.process_time()
        model = fitted(way, X, Y, **options)
        return {"fit": time.process_time() - start, **score(model, "Branin", (0, 1))}


def measure_stream(way: str, seed: int, length: int, batch: int) -> dict[str, Any]:
    """Seconds of each batch, and errors of both outputs at the end."""
    torch.manual_seed(seed)
    X, Y = observations("Branin", (length // 2, length // 2), seed)
    # One output at a time, the second of which has not been seen at first.
    half, halves = length // 2, batch // 2
    order = torch.arange(length).reshape(2, -1, halves).transpose(0, 1).reshape(-1)
    order = order.reshape(-1, 2, halves)[:, torch.randperm(2)].reshape(-1)
    assert half % halves == 0
    seconds, model = [], None
    with known_warnings():
        for i in range(0, length, halves):
            start = time.process_time()
            if model is None or way != "ours":
                rows = order[: i + halves]
                if way == "ours" or len(X[rows, -1].unique()) > 1:
                    model = fitted(way, X[rows], Y[rows])
            else:
                model.update(X[order[i : i + halves]], Y[order[i : i + halves]])
            seconds.append(time.process_time() - start)
    return {"batch_seconds": seconds, **score(model, "Branin", (0, 1))}


# -------------------------------------------------------------------- noise that varies


def noisy_function(name: str, x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of observations at inputs in [0, 1]."""
    if name == "Goldberg":  # Goldberg et al. (1998)
        return 2 * torch.sin(2 * math.pi * x), 0.5 + x
    if name == "Yuan":  # Yuan and Wahba (2004)
        mean = 2 * (torch.exp(-30 * (x - 0.25).square()) + torch.sin(math.pi * x.square())) - 2
        return mean, torch.sin(2 * math.pi * x).exp()
    t = math.pi * x  # Williams (1996)
    return torch.sin(2.5 * t) * torch.sin(1.5 * t), 0.01 + 0.25 * (1 - torch.sin(2.5 * t)).square()


def measure_noise(name: str, way: str, seed: int, gpjax: str | None) -> dict[str, Any]:
    """Density of new observations, errors of the mean and of the log standard deviation."""
    torch.manual_seed(seed)
    n = 200
    X = torch.rand(n, 1, dtype=torch.float64)
    mean, sd = noisy_function(name, X)
    Y = mean + sd * torch.randn_like(X)
    T = torch.linspace(0, 1, TEST, dtype=torch.float64).unsqueeze(-1)
    truth, true_sd = noisy_function(name, T)
    observed = truth + true_sd * torch.randn_like(T)
    centre, scale = Y.mean(), Y.std()
    with known_warnings():
        start = time.process_time()
        if way == "gpjax":
            assert gpjax is not None
            found = predictions_of_gpjax(gpjax, X, (Y - centre) / scale, T)
            seconds = found.pop("fit")
            f, noise = (torch.tensor(found[key]).unsqueeze(-1) for key in ("mean", "noise"))
            v = torch.tensor(found["variance"]).unsqueeze(-1)
        elif way == "gpytorch":
            f, v, noise = TwoLatents(X, (Y - centre) / scale).fit().predict(T)
            seconds = time.process_time() - start
        else:
            likelihood = HeteroscedasticGaussianLikelihood() if way == "ours" else None
            model = SequentialGP(X, (Y - centre) / scale, likelihood=likelihood)
            fit_gpytorch_mll(DualELBO(model.likelihood, model))
            seconds = time.process_time() - start
            with torch.no_grad():
                latent: Any = model.posterior(T)
                noisy: Any = model.posterior(T, observation_noise=True)
                f, v = latent.mean, latent.variance
                noise = noisy.variance - v
    f, v, noise = centre + scale * f, scale.square() * v, scale.square() * noise
    log_density = -0.5 * ((observed - f).square() / (v + noise) + (2 * math.pi * (v + noise)).log())
    return {
        "fit": seconds,
        "density": float(log_density.mean()),
        "error": float((f - truth).square().mean().sqrt()),
        "noise_error": float((0.5 * noise.log() - true_sd.log()).abs().mean()),
    }


def predictions_of_gpjax(python: str, X: Tensor, Y: Tensor, T: Tensor) -> dict[str, Any]:
    """Moments of latents and the expected noise by GPJax, in a process of its own."""
    worker = ROOT / "benchmarks" / "baselines" / "gpjax_worker.py"
    done = subprocess.run(
        [python, str(worker)],
        input=json.dumps({"X": X.tolist(), "Y": Y.tolist(), "T": T.tolist()}) + "\n",
        env={**os.environ, "OMP_NUM_THREADS": "1", "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"GPJax failed: {done.stderr[-2000:]}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


# -------------------------------------------------------------------- values and labels


def measure_mixed(name: str, way: str, seed: int) -> dict[str, Any]:
    """What is scarce: density of labels, or error of values."""
    torch.manual_seed(seed)
    d, function = functions("Branin")
    number, labels = MIXED[name]
    T = box(d)
    level = function(T, 1).median()

    def label(x: Tensor) -> Tensor:  # of a related function
        return (function(x, 1) > level).double().unsqueeze(-1)

    X, X_label = (torch.rand(n, d, dtype=torch.float64) for n in (number, labels))
    Y = function(X, 0).unsqueeze(-1)
    Y = Y + NOISE * Y.std() * torch.randn_like(Y)
    with known_warnings():
        start = time.process_time()
        if way == "together":
            tasks = torch.cat([torch.zeros(number), torch.ones(labels)]).to(X).unsqueeze(-1)
            both = torch.cat([torch.cat([X, X_label]), tasks], -1)
            each = [GaussianLikelihood().double(), BernoulliLikelihood()]
            model: Any = SequentialMultiTaskGP(
                both, torch.cat([Y, label(X_label)]), -1, likelihood=each
            )
            fit_gpytorch_mll(DualELBO(model.likelihood, model))
            models = [model.subset_output([i]) for i in (0, 1)]
        else:
            models = [
                SequentialGP(X, Y, likelihood=GaussianLikelihood().double()),
                SequentialGP(X_label, label(X_label), likelihood=BernoulliLikelihood()),
            ]
            for each_model in models:
                fit_gpytorch_mll(DualELBO(each_model.likelihood, each_model))
        seconds = time.process_time() - start
        with torch.no_grad():
            truth = function(T, 0)
            mean = models[0].posterior(T).mean.squeeze(-1)
            p = models[1].posterior(T, observation_noise=True).mean.clamp(1e-6, 1 - 1e-6)
            right = torch.where(label(T) > 0.5, p, 1 - p)
    return {
        "fit": seconds,
        "error": float((mean - truth).square().mean().sqrt() / truth.std()),
        "density": float(right.log().mean()),
        "accuracy": float((right > 0.5).double().mean()),
    }


# -------------------------------------------------------------------- correlated validity


def problem_of(name: str) -> tuple[Tensor, float, Callable[[Tensor], tuple[Tensor, Tensor]]]:
    """Bounds, the best valid value, and evaluations with their validity."""
    if name == "Gramacy":
        problem = ConstrainedGramacy(negate=True).double()

        def constrained(X: Tensor) -> tuple[Tensor, Tensor]:
            valid = problem.is_feasible(X)
            return torch.where(valid, problem(X), torch.nan), valid

        return problem.bounds.double(), float(problem.optimal_value), constrained
    bounds = torch.tensor([[0.0, 0.0], [1.0, 1.0]], dtype=torch.float64)

    def load(X: Tensor) -> Tensor:  # what is gained; too much of it breaks the machine
        return torch.sin(4 * X[:, 0]) + torch.cos(3 * X[:, 1] - 1) + 0.5 * X.prod(-1)

    def cliff(X: Tensor) -> tuple[Tensor, Tensor]:
        valid = load(X) < 1.5
        return torch.where(valid, load(X), torch.nan), valid

    return bounds, 1.5, cliff


def measure_loop(name: str, way: str, seed: int, evaluations: int) -> dict[str, Any]:
    """Regret after each evaluation, and how many failed."""
    torch.manual_seed(seed)
    bounds, best, evaluate = problem_of(name)
    initial = PROBLEMS[name][0]
    X = draw_sobol_samples(bounds, initial, 1, seed=seed).squeeze(1)
    loop = BatchOptimizer(
        bounds,
        num_initial=1,
        refit_every=BATCH,
        fit_options=FIT,
        seed=seed,
        correlated=way == "correlated",
        **OPTIMIZE,
    )
    start = time.process_time()
    with known_warnings():
        while True:
            loop.tell(X, *evaluate(X))
            if len(loop.X) >= evaluations:
                break
            X = loop.ask(BATCH)
    values = torch.where(loop.valid, loop.Y, -torch.inf).cummax(0).values
    worst = float(loop.Y[loop.valid].min()) if loop.valid.any() else -math.inf
    regret = best - values.clamp_min(worst)
    return {
        "regret": regret.tolist(),
        "failed": int((~loop.valid[initial:]).sum()),
        "loop": time.process_time() - start,
    }


# -------------------------------------------------------------------- report


def render(units: dict[str, dict[str, Any]], directory: Path) -> str:
    """One table for each part; medians over seeds, with ranges of what is compared."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for key, unit in units.items():
        groups.setdefault(key.rpartition("/")[0], []).append(unit)

    def table(part: str, head: list[str], cells: Callable[..., list[str]]) -> list[str]:
        lines = ["| " + " | ".join([*head, "seeds"]) + " |", "|---" * (len(head) + 1) + "|"]
        for key in sorted(groups, key=order):
            if key.startswith(f"{part}/"):
                row = [*cells(*key.split("/")[1:], groups[key]), str(len(groups[key]))]
                lines.append("| " + " | ".join(row) + " |")
        return ["", *lines] if len(lines) > 2 else []

    def order(key: str) -> list[Any]:
        names = (*PAIRS, *NOISY, *MIXED, *PROBLEMS, *SCARCE, *HETEROSCEDASTIC)
        ranks = {name: i for i, name in enumerate(dict.fromkeys(names))}
        return [int(part) if part.isdigit() else ranks.get(part, -1) for part in key.split("/")[1:]]

    def spread(rows: list[dict[str, Any]], name: str, digits: int = 3) -> str:
        values = sorted(row[name] for row in rows)
        low, middle, high = values[0], statistics.median(values), values[-1]
        return f"{middle:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"

    def seconds(rows: list[dict[str, Any]], name: str = "fit") -> str:
        return f"{statistics.median(row[name] for row in rows):.1f}"

    def loop(rows: list[dict[str, Any]]) -> str:
        values = sorted(row["regret"][-1] for row in rows)
        return f"{statistics.median(values):.3f} ({values[0]:.3f} to {values[-1]:.3f})"

    lines = [
        "Median (range) over seeds; errors are relative to the standard deviation of the function, "
        "except for those of noise; seconds are of the processor.",
        *table(
            "scarce",
            ["one output is scarce", "", "error of it", "log density", "s fit"],
            lambda pair, way, rows: [
                f"{pair}, {' and '.join(map(str, PAIRS[pair]))}",
                SCARCE[way],
                spread(rows, "error"),
                spread(rows, "density", 2),
                seconds(rows),
            ],
        ),
        *table(
            "large",
            ["observations", "", "error", "s fit"],
            lambda n, way, rows: [n, SCARCE[way], spread(rows, "error"), seconds(rows)],
        ),
        *table(
            "stream",
            ["stream", "error at the end", "s first half of the batches", "s second half"],
            lambda way, rows: [
                "ours, `update`" if way == "ours" else "MultiTaskGP, refitted",
                spread(rows, "error"),
                *(
                    f"{statistics.median(map(sum, halves)):.1f}"
                    for halves in zip(*(in_halves(row["batch_seconds"]) for row in rows))  # noqa: B905
                ),
            ],
        ),
        *table(
            "noise",
            ["noise", "", "log density", "error of the mean", "error of log sd", "s fit"],
            lambda name, way, rows: [
                name,
                HETEROSCEDASTIC[way],
                spread(rows, "density"),
                spread(rows, "error"),
                spread(rows, "noise_error"),
                seconds(rows),
            ],
        ),
        *table(
            "mixed",
            ["values and labels", "", "error of values", "log density of labels", "s fit"],
            lambda name, way, rows: [
                f"{name}: {' and '.join(map(str, MIXED[name]))}",
                "one model" if way == "together" else "two models",
                spread(rows, "error"),
                spread(rows, "density"),
                seconds(rows),
            ],
        ),
        *table(
            "loop",
            ["validity", "", "regret at the end", "failed", "s loop"],
            lambda name, way, rows: [
                name,
                way,
                loop(rows),
                f"{statistics.mean(row['failed'] for row in rows):.1f}",
                seconds(rows, "loop"),
            ],
        ),
    ]
    return "\n".join(lines)


def in_halves(values: list[float]) -> tuple[list[float], list[float]]:
    """The first and the second half."""
    middle = len(values) // 2
    return values[:middle], values[middle:]

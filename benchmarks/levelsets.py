"""Level sets of simulated observers, trial by trial: against AEPsych and random trials.

All ways start from the same trials, until both responses have been seen, and share random numbers.
Each has its defaults: AEPsych refits its model after every trial, ours learns hyperparameters when
there are a tenth more trials. AEPsych runs in an environment of its
own, if ``$AEPSYCH_PYTHON`` is the path of its Python (tested with AEPsych 0.8.0); otherwise its
rows are skipped.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.known_warnings import known_warnings
from benchmarks.psychometric import EVERY, OBSERVERS
from benchmarks.runner import ROOT, Options, Unit
from seqgp.active_learner import ActiveLearner

WAYS = {
    "volume": "expected volume change (ours)",
    "threshold-entropy": "mutual information (ours)",
    "random": "quasi-random, our model",
    "EAVC": "AEPsych, EAVC",
    "GlobalMI": "AEPsych, GlobalMI",
}
RIVALS = ("EAVC", "GlobalMI")


def units(options: Options) -> tuple[dict[str, Any], list[Unit]]:
    """All ways for each observer and seed."""
    quick = options.quick
    python = os.environ.get("AEPSYCH_PYTHON")
    work = []
    for seed in range(options.repeats or (1 if quick else 5)):
        for name, observer in OBSERVERS.items():
            if quick and observer.dim > 2:
                continue
            start = len(observer.initial_stimuli(seed))
            trials = start + 2 if quick else observer.trials
            for way in WAYS:
                if way not in RIVALS:
                    run: Any = partial(measure, name, way, seed, trials)
                elif python:
                    run = partial(measure_aepsych, python, name, way, seed, trials)
                else:
                    continue
                work.append(Unit(f"{name}/{way}/seed{seed}", run))
    return {"quick": quick}, work


def measure(name: str, way: str, seed: int, trials: int) -> dict[str, Any]:
    """Scores by number of trials, and processor seconds of each trial."""
    observer = OBSERVERS[name]
    torch.manual_seed(seed)
    bounds = torch.tensor([[0.0] * observer.dim, [1.0] * observer.dim], dtype=torch.float64)
    learner = ActiveLearner(
        bounds,
        criterion="volume" if way == "random" else way,
        threshold=observer.threshold,
        num_initial=trials if way == "random" else observer.initial,
        seed=seed,
    )
    X = observer.initial_stimuli(seed)
    seconds: list[float] = []
    scores: dict[str, dict[str, float]] = {}
    with known_warnings():
        while True:
            Y = observer.respond(X, len(learner.X), seed)
            start = time.process_time()
            learner.tell(X, Y)
            told = time.process_time() - start
            n = len(learner.X)
            if n % EVERY == 0 or n >= trials:
                scores[str(n)] = observer.score(learner.probability_above(observer.test_stimuli()))
            if n >= trials:
                return {"trial_seconds": seconds, "scores": scores}
            start = time.process_time()
            X = learner.ask()
            seconds.append(told + time.process_time() - start)


def measure_aepsych(python: str, name: str, way: str, seed: int, trials: int) -> dict[str, Any]:
    """The same by AEPsych, in a process of its own."""
    worker = ROOT / "benchmarks" / "baselines" / "aepsych_worker.py"
    job = {"observer": name, "criterion": way, "seed": seed, "trials": trials}
    with tempfile.TemporaryDirectory() as directory:  # AEPsych writes logs where it is run
        done = subprocess.run(
            [python, str(worker)],
            input=json.dumps(job) + "\n",
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            cwd=directory,
            capture_output=True,
            text=True,
            check=False,
        )
    if done.returncode:
        raise RuntimeError(f"AEPsych failed: {done.stderr[-2000:]}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def render(units: dict[str, dict[str, Any]], directory: Path) -> str:
    """Scores half-way and at the end, and seconds a trial, by observer and way."""
    lines = [
        "Level sets: Brier score of the probability to belong to the level set, half-way and after "
        "all trials, share of errors after all trials (mean +- standard error over seeds), and "
        "processor seconds a trial (median; mean without the first trial of a run, in which "
        "modules are imported):",
    ]
    for name, observer in OBSERVERS.items():
        lines += [
            "",
            f"{name}, {observer.threshold:.0%}, {observer.trials} trials of which "
            f"{observer.initial} or more are initial:",
            "",
            "| | Brier score half-way | Brier score | error | seconds a trial | mean | seeds |",
            "|---|---|---|---|---|---|---|",
        ]
        by_way = {
            way: {
                key.rpartition("/")[2]: unit
                for key, unit in units.items()
                if key.startswith(f"{name}/{way}/")
            }
            for way in WAYS
        }
        present = [set(by_seed) for by_seed in by_way.values() if by_seed]
        # Seeds that all ways have: an unfinished run compares like with like.
        seeds = sorted(set.intersection(*present)) if present else []
        for way, label in WAYS.items():
            rows = [by_way[way][seed] for seed in seeds if by_way[way]]
            if not rows:
                continue
            half = [_half_way(row["scores"])["brier"] for row in rows]
            last = [row["scores"][max(row["scores"], key=int)] for row in rows]
            cells = [half, *([score[key] for score in last] for key in ("brier", "error"))]
            seconds = statistics.median(s for row in rows for s in row["trial_seconds"])
            mean = statistics.mean(s for row in rows for s in _after_first(row["trial_seconds"]))
            lines.append(
                f"| {label} | {' | '.join(map(_mean, cells))} | {seconds:.2f} | {mean:.2f} "
                f"| {len(rows)} |"
            )
    return "\n".join(lines)


def _half_way(scores: dict[str, dict[str, float]]) -> dict[str, float]:
    """The first score after half of the trials, or the last one."""
    numbers = sorted(map(int, scores))
    return scores[str(next(n for n in numbers if 2 * n >= numbers[-1]))]


def _after_first(seconds: list[float]) -> list[float]:
    """All but the first, if there are others."""
    return seconds[1:] or seconds


def _mean(values: list[float]) -> str:
    """Mean and standard error."""
    mean = statistics.mean(values)
    if len(values) == 1:
        return f"{mean:.3f}"
    return f"{mean:.3f} +- {statistics.stdev(values) / len(values) ** 0.5:.3f}"

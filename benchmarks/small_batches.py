"""Thousands of updates with a few labels each, against one fit to all of them.

What an update costs should not depend on how often there is one: hyperparameters are learnt when
the data have grown, not at each of them.
"""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from botorch.fit import fit_gpytorch_mll
from gpytorch.likelihoods import BernoulliLikelihood
from torch import Tensor

from benchmarks.known_warnings import known_warnings
from benchmarks.runner import Options, Unit
from seqgp import DualELBO, SequentialGP

#: The first batch, the size of all others, and how much is never learnt.
FIRST, SIZE, TEST = 30, 3, 2000


def labels(number: int, seed: int) -> tuple[Tensor, Tensor]:
    """Labels of a smooth function of two inputs, ``n x 2`` and ``n x 1``.

    Args:
        number: How many.
        seed: Of the draws.
    """
    generator = torch.Generator().manual_seed(seed)
    X = torch.rand(number, 2, generator=generator, dtype=torch.double)
    f = 3 * torch.sin(5 * X[:, :1]) + 2 * torch.cos(7 * X[:, 1:])
    return X, (torch.rand(number, 1, generator=generator).to(X) < torch.sigmoid(f)).to(X)


def units(options: Options) -> tuple[dict[str, Any], list[Unit]]:
    """The stream and the fit, seed by seed."""
    number = 20 if options.quick else 2000
    settings = {"quick": options.quick, "updates": number, "labels": SIZE}
    return settings, [
        Unit(f"{method}/seed{seed}", partial(measure, method, number, seed))
        for seed in range(options.repeats or 1)
        for method in ("ours", "offline")
    ]


def measure(method: str, number: int, seed: int) -> dict[str, Any]:
    """Learn, in batches or at once, and predict labels that were never learnt."""
    X, Y = labels(FIRST + SIZE * number + TEST, seed)
    start = time.process_time()
    with known_warnings():
        if method == "offline":
            model = SequentialGP(X[:-TEST], Y[:-TEST], likelihood=BernoulliLikelihood())
            fit_gpytorch_mll(DualELBO(model.likelihood, model))
        else:
            model = SequentialGP(X[:FIRST], Y[:FIRST], likelihood=BernoulliLikelihood())
            for part in torch.arange(FIRST, len(X) - TEST).split(SIZE):
                model.update(X[part], Y[part])
    seconds = time.process_time() - start
    density = model.log_predictive_density(X[-TEST:], Y[-TEST:].squeeze(-1))
    return {"nlpd": -float(density.mean()), "train_seconds": round(seconds, 2)}


def render(units: dict[str, dict[str, Any]], directory: Path) -> str:
    """One row a seed."""
    lines = [
        f"Updates with {SIZE} labels each, defaults only, against one fit to all of them: test "
        "NLPD, and processor seconds of training.",
        "",
        "| | ours | offline |",
        "|---|---|---|",
    ]
    seeds = dict.fromkeys(key.split("/")[1] for key in units)
    for seed in seeds:
        cells = [units.get(f"{method}/{seed}") for method in ("ours", "offline")]
        text = (
            "" if unit is None else f"{unit['nlpd']:.4f}, {unit['train_seconds']:.0f} s"
            for unit in cells
        )
        lines.append(f"| {seed} | " + " | ".join(text) + " |")
    return "\n".join(lines)

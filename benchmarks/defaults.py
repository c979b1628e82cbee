"""Streams with default arguments only: the first batch, then updates.

``SequentialGP(X, Y[, likelihood])`` of the first piece, then ``update(X, Y)`` for each further one.
Inputs are scaled by known bounds. No method may look at later pieces, for inducing points, scales
or anything else. The gold standard is the same model with the same defaults, fitted to all data at
once until another fit changes nothing.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from botorch.fit import fit_gpytorch_mll
from botorch.models.utils.gpytorch_modules import (
    get_covar_module_with_dim_scaled_prior,
    get_gaussian_likelihood_with_lognormal_prior,
)
from gpytorch.kernels import Kernel
from gpytorch.likelihoods import BernoulliLikelihood, Likelihood
from torch import Tensor

from benchmarks.baselines import bui, csato, ovc
from benchmarks.known_warnings import known_warnings
from benchmarks.runner import Options, Unit
from benchmarks.streams import Latent, Stream, load
from seqgp import DualELBO, SequentialGP
from seqgp.likelihoods.predictive import log_predictive

#: Data sets, whether their targets are real numbers, and how many pieces there are.
DATA_SETS = {
    "mammographic": (False, 20),
    "bank": (False, 50),
    "mushroom": (False, 50),
    "adult": (False, 50),
    "elevators": (True, 50),
    "bike": (True, 50),
}
QUICK = {"made_regression": (True, 4), "made_classes": (False, 4)}
ORDERS = ("sorted", "shuffled", "blocked")

#: Inducing points of the rivals, who have to be told how many.
RIVALS_INDUCING = 100

#: A prediction of raw observations: latent means and variances in some units, and the units.
Predict = Callable[[Tensor], tuple[Latent, float, float]]


@dataclass(frozen=True)
class Pieces:
    """A stream.

    Attributes:
        pieces: Inputs and targets, in the order in which they come.
        test: Inputs and targets that are never learnt.
        regression: Whether targets are real numbers, or 0/1.
        scale: The standard deviation of all targets, in which densities are reported.
    """

    pieces: list[tuple[Tensor, Tensor]]
    test: tuple[Tensor, Tensor]
    regression: bool
    scale: float

    @property
    def everything(self) -> tuple[Tensor, Tensor]:
        """All training data at once."""
        X, Y = zip(*self.pieces, strict=True)
        return torch.cat(X), torch.cat(Y)


class FirstPiece(Stream):
    """A stream for rivals: the kernel and the likelihood that ours has by default."""

    def kernel(self, ard: bool = False) -> Kernel:
        """BoTorch's default, with a lengthscale for each input."""
        return get_covar_module_with_dim_scaled_prior(ard_num_dims=self.Z.shape[-1]).to(self.Z)

    def likelihood(self, noise: float = 0.1) -> Likelihood:
        """BoTorch's default, or Bernoulli."""
        if not self.regression:
            return BernoulliLikelihood()
        return get_gaussian_likelihood_with_lognormal_prior().to(self.Z)


def pieces_of(name: str, regression: bool, number: int, fold: int, order: str) -> Pieces:
    """One fold of a data set in pieces.

    Args:
        name: The data set.
        regression: Whether its targets are real numbers.
        number: How many pieces.
        fold: Which tenth is the test set.
        order: ``"sorted"`` by the first input, ``"shuffled"``, or ``"blocked"``: class after class,
            or cluster after cluster.
    """
    X, y = load(name)
    low, high = X.min(0), X.max(0)
    X = (X - low) / np.where(high > low, high - low, 1)
    y = y if regression else (y > y.min()).astype(float)
    folds = np.array_split(np.random.RandomState(0).permutation(len(y)), 10)
    train = np.concatenate([part for i, part in enumerate(folds) if i != fold])
    if order == "sorted":
        train = train[np.argsort(X[train, 0], kind="stable")]
    elif order == "blocked":
        train = train[np.argsort(_blocks(X[train], y[train], regression), kind="stable")]

    def tensors(index: np.ndarray[Any, Any]) -> tuple[Tensor, Tensor]:
        return torch.from_numpy(X[index]), torch.from_numpy(y[index]).unsqueeze(-1)

    pieces = [tensors(part) for part in np.array_split(train, number)]
    scale = float(y[train].std()) if regression else 1.0
    return Pieces(pieces, tensors(folds[fold]), regression, scale)


def _blocks(
    X: np.ndarray[Any, Any], y: np.ndarray[Any, Any], regression: bool
) -> np.ndarray[Any, Any]:
    """For each observation its class, or the number of its cluster of inputs."""
    if not regression:
        return y
    from sklearn.cluster import KMeans

    labels: np.ndarray[Any, Any] = KMeans(5, n_init=1, random_state=0).fit_predict(X)
    return labels


def ours(stream: Pieces) -> Iterator[Predict]:
    """Every default, and nothing else."""
    model = _model(*stream.pieces[0], stream.regression)
    yield partial(_latent, model)
    for X, Y in stream.pieces[1:]:
        model.update(X, Y)
        yield partial(_latent, model)


def offline(stream: Pieces) -> Iterator[Predict]:
    """The same model, fitted to all data at once."""
    model = _fitted(*stream.everything, stream.regression)
    yield partial(_latent, model)


def offline_longer(stream: Pieces) -> Iterator[Predict]:
    """Fitted a second time, from where the first fit ended: this must not help."""
    model = _fitted(*stream.everything, stream.regression)
    fit_gpytorch_mll(DualELBO(model.likelihood, model))
    yield partial(_latent, model)


def ten_refits(stream: Pieces) -> Iterator[Predict]:
    """Fitted to all data so far, ten times along the stream."""
    X, Y = stream.everything
    for k in range(1, 11):
        n = len(X) * k // 10
        model = _fitted(X[:n], Y[:n], stream.regression)
    yield partial(_latent, model)


def _model(X: Tensor, Y: Tensor, regression: bool) -> SequentialGP:
    return (
        SequentialGP(X, Y) if regression else SequentialGP(X, Y, likelihood=BernoulliLikelihood())
    )


def _fitted(X: Tensor, Y: Tensor, regression: bool) -> SequentialGP:
    model = _model(X, Y, regression)
    fit_gpytorch_mll(DualELBO(model.likelihood, model))
    return model


@torch.no_grad()
def _latent(model: SequentialGP, X: Tensor) -> tuple[Latent, float, float]:
    posterior = model.eval()(X)
    latent = Latent(posterior.mean, posterior.variance, model.likelihood)
    if not hasattr(model, "outcome_transform"):
        return latent, 0.0, 1.0
    return latent, model.outcome_transform.means.item(), model.outcome_transform.stdvs.item()


def rival(steps: Callable[[Stream], Iterator[Any]], stream: Pieces) -> Iterator[Predict]:
    """A rival that begins with the first piece: its scale, and inducing points among its inputs."""
    X, Y = stream.pieces[0]
    offset, scale = (Y.mean().item(), Y.std().item() or 1.0) if stream.regression else (0.0, 1.0)
    pieces = [(x, (y - offset) / scale) for x, y in stream.pieces]
    order = torch.randperm(len(X), generator=torch.Generator().manual_seed(0))
    first = FirstPiece(pieces, stream.test, X[order[:RIVALS_INDUCING]], stream.regression)
    for model in steps(first):
        yield lambda x, model=model: (model.predict(x), offset, scale)


METHODS: dict[str, Callable[[Pieces], Iterator[Predict]]] = {
    "ours": ours,
    "offline": offline,
    "offline, fitted again": offline_longer,
    "ten refits": ten_refits,
    "Bui et al.": partial(rival, bui.steps),
    "OVC": partial(rival, ovc.steps),
    "Csato & Opper": partial(rival, csato.steps),
}
ANY_ORDER = ("offline", "offline, fitted again")
#: Too dear for the largest sets.
SMALL_ONLY = ("offline, fitted again", "ten refits")
SMALL = ("mammographic", "bank", *QUICK)


def units(options: Options) -> tuple[dict[str, Any], list[Unit]]:
    """Every method on every data set in every order, fold by fold."""
    data_sets = QUICK if options.quick else DATA_SETS
    folds = options.repeats or 1
    work = [
        Unit(
            f"{order}/{name}/{method}/fold{fold}",
            partial(measure, name, regression, number, method, fold, order),
        )
        for fold in range(folds)
        for name, (regression, number) in data_sets.items()
        for order in ORDERS
        for method in METHODS
        if (order == "sorted" or method not in ANY_ORDER)
        and (name in SMALL or method not in SMALL_ONLY)
    ]
    return {"quick": options.quick, "dtype": "float64", "rivals' m": RIVALS_INDUCING}, work


def measure(
    name: str, regression: bool, number: int, method: str, fold: int, order: str
) -> dict[str, Any]:
    """Learn one stream; predict each piece before it is learnt, and the test data at the end."""
    stream = pieces_of(name, regression, number, fold, order)
    learners = METHODS[method](stream)
    seconds, ahead = 0.0, []
    with known_warnings():
        for k in range(number):
            start = time.process_time()
            predict = next(learners, None)
            seconds += time.process_time() - start
            if predict is None:
                break
            last = predict
            if k + 1 < number:
                ahead.append(float(_densities(stream, last, *stream.pieces[k + 1]).mean()))
        result = _scores(stream, last)
    if len(ahead) > 1:
        result |= {"ahead": statistics.mean(ahead), "worst_ahead": min(ahead)}
    return {**result, "train_seconds": round(seconds, 2)}


@torch.no_grad()
def _densities(stream: Pieces, predict: Predict, X: Tensor, Y: Tensor) -> Tensor:
    """Log densities, in units of the standard deviation of all targets."""
    (mean, variance, likelihood), offset, scale = predict(X)
    y = (Y.squeeze(-1) - offset) / scale
    density = log_predictive(likelihood, y, mean, variance)
    return density - math.log(scale / stream.scale)


@torch.no_grad()
def _scores(stream: Pieces, predict: Predict) -> dict[str, float]:
    X, Y = stream.test
    nlpd = -float(_densities(stream, predict, X, Y).mean())
    (mean, variance, likelihood), offset, scale = predict(X)
    y = (Y.squeeze(-1) - offset) / scale
    if not stream.regression:
        return {"nlpd": nlpd, "error": float(((mean > 0) != (y > 0)).double().mean())}
    rmse = float((mean - y).square().mean().sqrt()) * scale / stream.scale
    width = 1.6449 * (variance + likelihood.noise).sqrt()
    coverage = float(((mean - y).abs() < width).double().mean())
    return {"nlpd": nlpd, "error": rmse, "coverage": coverage}


def render(units: dict[str, dict[str, Any]], directory: Path) -> str:
    """A table for each order: rows are data sets, columns methods."""
    lines = [
        "The first piece and `update`, no other argument. Test NLPD (densities in units of the "
        "targets' standard deviation), error rate or RMSE, processor seconds of training; for "
        "streams, also the mean and the worst log density of a piece before it was learnt. Rivals "
        f"have {RIVALS_INDUCING} inducing points among the inputs of the first piece. *offline* is "
        "ours with all data at once, *ten refits* the same ten times along the stream.",
    ]
    for order in ORDERS:
        rows: dict[str, dict[str, list[dict[str, Any]]]] = {}
        for key, unit in units.items():
            own, name, method, _ = key.split("/")
            if own == order or (own == "sorted" and method in ANY_ORDER):
                rows.setdefault(name, {}).setdefault(method, []).append(unit)
        methods = [m for m in METHODS if any(m in row for row in rows.values())]
        if not any("ours" in row for row in rows.values()):
            continue
        lines += [
            "",
            f"**{order}**",
            "",
            "| | " + " | ".join(methods) + " |",
            "|---" * (len(methods) + 1) + "|",
        ]
        for name in [*DATA_SETS, *QUICK]:
            if name in rows:
                cells = " | ".join(_cell(rows[name].get(method, [])) for method in methods)
                lines.append(f"| {name} | {cells} |")
    return "\n".join(lines)


def _cell(units: list[dict[str, Any]]) -> str:
    if not units:
        return ""
    nlpd, error, seconds = (
        statistics.mean(unit[key] for unit in units) for key in ("nlpd", "error", "train_seconds")
    )
    cell = f"{nlpd:.3f}, {error:.3f}, {seconds:.0f} s"
    if "ahead" in units[0]:
        mean = statistics.mean(unit["ahead"] for unit in units)
        worst = min(unit["worst_ahead"] for unit in units)
        cell += f" ({mean:.2f}, {worst:.1f})"
    return cell

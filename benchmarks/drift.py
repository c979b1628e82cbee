"""Streams that change: each batch is predicted and then learnt.

All learners predict a whole batch before they learn any of it, and see the first batch before they
predict anything. Ours scale inputs by the range of the first batch; linear rivals standardise
theirs as they go, as `river` recommends. Nothing has been tuned for any of the streams.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from botorch.models.transforms.input import Normalize
from gpytorch.likelihoods import BernoulliLikelihood
from torch import Tensor

from benchmarks.known_warnings import known_warnings
from benchmarks.runner import Options, Unit
from seqgp import SequentialGP

#: The first batch, all others, and the largest number of observations.
FIRST, SIZE, MOST = 100, 20, 2000
#: Probabilities are kept this far from 0 and 1 in log losses, those of all learners.
CLIP = 1e-3


class Kind(NamedTuple):
    """A stream.

    Attributes:
        labels: Whether targets are 0/1, or real numbers.
        make: Inputs ``n x d`` and targets ``n x 1``, from a number and a seed.
    """

    labels: bool
    make: Callable[[int, int], tuple[Tensor, Tensor]]


class Learner(Protocol):
    """Predicts means of real targets or probabilities of a 1, ``n``, and learns."""

    def predict(self, X: Tensor) -> Tensor:
        """Predictions at ``n x d`` inputs."""
        ...

    def learn(self, X: Tensor, Y: Tensor) -> None:
        """Learn ``n`` observations."""
        ...


# -------------------------------------------------------------------------------- streams


def sine(number: int, seed: int, change: str) -> tuple[Tensor, Tensor]:
    """Noisy values of a function of two inputs that changes in a given way.

    Args:
        number: How many.
        seed: Of the draws.
        change: ``"none"``, ``"abrupt"``: it becomes its negative half-way, or ``"gradual"``: its
            phase moves by half a period from the first observation to the last.
    """
    generator = torch.Generator().manual_seed(seed)
    X = torch.rand(number, 2, generator=generator, dtype=torch.double)
    age = torch.linspace(0, 1, number, dtype=torch.double)
    phase = {"none": 0 * age, "abrupt": math.pi * (age > 0.5), "gradual": math.pi * age}[change]
    f = torch.sin(6 * X[:, 0] + phase) + X[:, 1]
    noise = 0.2 * torch.randn(number, generator=generator, dtype=torch.double)
    return X, (f + noise).unsqueeze(-1)


def signs(number: int, seed: int, change: str) -> tuple[Tensor, Tensor]:
    """Whether the values of `sine` are larger than a half."""
    X, Y = sine(number, seed, change)
    return X, (Y > 0.5).to(Y)


def from_river(name: str, number: int, seed: int) -> tuple[Tensor, Tensor]:
    """A stream of `river`, the first observations of it.

    Args:
        name: The stream.
        number: The largest number of observations.
        seed: Of synthetic streams.
    """
    from river import datasets
    from river.datasets import synth

    half = number // 2
    made: dict[str, Callable[[], Any]] = {
        "FriedmanDrift": lambda: synth.FriedmanDrift(
            "lea", position=(number // 4, half, 3 * number // 4), seed=seed
        ),
        "TrumpApproval": datasets.TrumpApproval,
        "SEA": lambda: synth.ConceptDriftStream(
            synth.SEA(0, seed=seed),
            synth.SEA(2, seed=seed),
            position=half,
            width=20,
            seed=seed,
        ),
        "RandomRBFDrift": lambda: synth.RandomRBFDrift(
            seed,
            seed,
            n_classes=2,
            n_features=5,
            n_centroids=20,
            n_drift_centroids=20,
            change_speed=0.001,
        ),
        "Hyperplane": lambda: synth.Hyperplane(seed, n_features=5, mag_change=0.005),
        "Phishing": datasets.Phishing,
        "Bananas": datasets.Bananas,
    }
    rows = list(itertools.islice(iter(made[name]()), number))
    names = sorted(rows[0][0])
    X = torch.tensor([[float(x[key]) for key in names] for x, _ in rows], dtype=torch.double)
    return X, torch.tensor([[float(y)] for _, y in rows], dtype=torch.double)


STREAMS = {
    "sine, stationary": Kind(False, partial(sine, change="none")),
    "sine, abrupt": Kind(False, partial(sine, change="abrupt")),
    "sine, gradual": Kind(False, partial(sine, change="gradual")),
    "FriedmanDrift": Kind(False, partial(from_river, "FriedmanDrift")),
    "TrumpApproval": Kind(False, partial(from_river, "TrumpApproval")),
    "signs, stationary": Kind(True, partial(signs, change="none")),
    "signs, abrupt": Kind(True, partial(signs, change="abrupt")),
    "signs, gradual": Kind(True, partial(signs, change="gradual")),
    "SEA": Kind(True, partial(from_river, "SEA")),
    "RandomRBFDrift": Kind(True, partial(from_river, "RandomRBFDrift")),
    "Hyperplane": Kind(True, partial(from_river, "Hyperplane")),
    "Phishing": Kind(True, partial(from_river, "Phishing")),
    "Bananas": Kind(True, partial(from_river, "Bananas")),
}
#: Those that need nothing installed.
QUICK = ("sine, abrupt", "signs, abrupt")


# -------------------------------------------------------------------------------- learners


class Ours:
    """`SequentialGP` with defaults, but for the discount."""

    def __init__(self, discount: float | str, labels: bool) -> None:
        self.discount, self.labels = discount, labels
        self.model: SequentialGP | None = None
        self.alarms = 0

    def predict(self, X: Tensor) -> Tensor:
        """Means of observations."""
        assert self.model is not None
        with torch.no_grad():
            return self.model.posterior(X, observation_noise=True).mean.squeeze(-1)

    def learn(self, X: Tensor, Y: Tensor) -> None:
        """Build the model, or update it."""
        if self.model is None:
            transform = Normalize(X.shape[-1])
            likelihood = BernoulliLikelihood() if self.labels else None
            self.model = SequentialGP(X, Y, likelihood=likelihood, input_transform=transform)
        else:
            self.alarms += self.model.update(X, Y, discount=self.discount).discount < 1


class River:
    """A learner of `river`, one observation after the other."""

    def __init__(self, name: str, labels: bool) -> None:
        from river import drift, dummy, forest, linear_model, preprocessing, stats, tree

        scaler = preprocessing.StandardScaler()
        classifiers: dict[str, Callable[[], Any]] = {
            "adaptive random forest": lambda: forest.ARFClassifier(seed=0),
            "Hoeffding adaptive tree": lambda: tree.HoeffdingAdaptiveTreeClassifier(seed=0),
            "linear": lambda: scaler | linear_model.LogisticRegression(),
            "linear with DDM": lambda: (
                scaler
                | drift.DriftRetrainingClassifier(
                    model=linear_model.LogisticRegression(), drift_detector=drift.binary.DDM()
                )
            ),
            "constant": dummy.PriorClassifier,
        }
        regressors: dict[str, Callable[[], Any]] = {
            "adaptive random forest": lambda: forest.ARFRegressor(seed=0),
            "Hoeffding adaptive tree": lambda: tree.HoeffdingAdaptiveTreeRegressor(seed=0),
            "linear": lambda: scaler | linear_model.LinearRegression(),
            "constant": lambda: dummy.StatisticRegressor(stats.Mean()),
        }
        self.labels = labels
        self.model = (classifiers if labels else regressors)[name]()

    def predict(self, X: Tensor) -> Tensor:
        """Means or probabilities."""
        rows = [dict(enumerate(row)) for row in X.tolist()]
        if self.labels:
            values = [self.model.predict_proba_one(row).get(True, 0.0) for row in rows]
        else:
            values = [self.model.predict_one(row) for row in rows]
        return torch.tensor(values, dtype=X.dtype)

    def learn(self, X: Tensor, Y: Tensor) -> None:
        """One by one."""
        for row, y in zip(X.tolist(), Y.squeeze(-1).tolist(), strict=True):
            self.model.learn_one(dict(enumerate(row)), y > 0.5 if self.labels else y)


OURS = {"ours, auto": "auto", "ours, no discount": 1.0}
RIVALS = (
    "adaptive random forest",
    "Hoeffding adaptive tree",
    "linear",
    "linear with DDM",
    "constant",
)


def learner(name: str, labels: bool) -> Learner:
    """A learner by its name.

    Args:
        name: One of ours or a rival.
        labels: Whether targets are 0/1.
    """
    return Ours(OURS[name], labels) if name in OURS else River(name, labels)


# -------------------------------------------------------------------------------- measurements


def units(options: Options) -> tuple[dict[str, Any], list[Unit]]:
    """Every learner on every stream, seed by seed."""
    number = 300 if options.quick else MOST
    names = QUICK if options.quick else tuple(STREAMS)
    learners = tuple(OURS) if options.quick else (*OURS, *RIVALS)
    settings = {"quick": options.quick, "first": FIRST, "batch": SIZE, "most": number}
    return settings, [
        Unit(f"{stream}/{name}/seed{seed}", partial(measure, stream, name, number, seed))
        for seed in range(options.repeats or 1)
        for stream in names
        for name in learners
        if STREAMS[stream].labels or name != "linear with DDM"
    ]


def measure(stream: str, name: str, number: int, seed: int) -> dict[str, Any]:
    """Predict each batch, then learn it."""
    kind = STREAMS[stream]
    X, Y = kind.make(number, seed)
    start = time.process_time()
    own = learner(name, kind.labels)
    with known_warnings():
        predictions = torch.cat(list(_predictions(own, X, Y)))
    seconds = time.process_time() - start
    targets = Y[FIRST:].squeeze(-1)
    result: dict[str, Any] = {"train_seconds": round(seconds, 2)}
    if isinstance(own, Ours):
        result["alarms"] = own.alarms
    if not kind.labels:
        error = (predictions - targets).square().mean().sqrt() / targets.std()
        return {**result, "score": float(error)}
    p = predictions.clamp(CLIP, 1 - CLIP)
    loss = -torch.where(targets > 0.5, p, 1 - p).log().mean()
    errors = ((p > 0.5) != (targets > 0.5)).double().mean()
    return {**result, "score": float(loss), "error": float(errors)}


def _predictions(own: Learner, X: Tensor, Y: Tensor) -> Iterator[Tensor]:
    own.learn(X[:FIRST], Y[:FIRST])
    for part in torch.arange(FIRST, len(X)).split(SIZE):
        yield own.predict(X[part])
        own.learn(X[part], Y[part])


def render(units: dict[str, dict[str, Any]], directory: Path) -> str:
    """One table of real targets, one of labels."""
    lines = [
        f"Each batch of {SIZE} is predicted, then learnt. Real targets: root mean square error in "
        "standard deviations of the targets. Labels: log loss and error rate. Then processor "
        "seconds, and for ours the number of batches at which a change was seen.",
    ]
    for labels in (False, True):
        names = [s for s in STREAMS if STREAMS[s].labels == labels]
        names = [s for s in names if any(key.startswith(f"{s}/") for key in units)]
        columns = [*OURS, *RIVALS] if labels else [*OURS, *(r for r in RIVALS if "DDM" not in r)]
        if not names:
            continue
        lines += ["", f"| {'labels' if labels else 'real targets'} | " + " | ".join(columns) + " |"]
        lines.append("|---" * (len(columns) + 1) + "|")
        for name in names:
            cells = (
                _cell([unit for key, unit in units.items() if key.startswith(f"{name}/{column}/")])
                for column in columns
            )
            lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cell(units: list[dict[str, Any]]) -> str:
    if not units:
        return ""
    score = statistics.mean(unit["score"] for unit in units)
    seconds = statistics.mean(unit["train_seconds"] for unit in units)
    cell = f"{score:.3f}"
    if "error" in units[0]:
        cell += f", {statistics.mean(unit['error'] for unit in units):.3f}"
    cell += f", {seconds:.0f} s"
    if "alarms" in units[0]:
        cell += f" ({statistics.mean(unit['alarms'] for unit in units):.0f})"
    return cell

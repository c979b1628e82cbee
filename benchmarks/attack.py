"""Stress tests of the library: random calls, kills, corruption, interrupts, long streams.

Every unit counts attempts and failures, and records the first failures; the aim is zero. The tests
themselves are those of `tests/reliability` and `tests/checkpoint`, with more repetitions. Those of
models cycle through all kinds of models in `tests.reliability.subjects`: one for each likelihood,
several outputs, discrete columns, comparisons and tasks. Units of a soak test resume from a
checkpoint of the previous unit, in a new process.
"""

from __future__ import annotations

import copy
import itertools
import multiprocessing
import os
import random
import resource
import signal
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from botorch.exceptions.warnings import BotorchWarning
from gpytorch.kernels import MaternKernel, ScaleKernel
from gpytorch.likelihoods import (
    BernoulliLikelihood,
    GaussianLikelihood,
    PoissonLikelihood,
    StudentTLikelihood,
)
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import run_state_machine_as_test
from linear_operator.utils.warnings import NumericalWarning
from torch import Tensor

import seqgp
from benchmarks import update
from benchmarks.runner import Options, Unit
from seqgp import SequentialGP
from seqgp.checkpoint import CheckpointError
from tests import distributed_checks
from tests.checkpoint import test_storage
from tests.checkpoint.hostile import forge
from tests.processes import start
from tests.reliability.interrupts import Interrupts, is_same, snapshot
from tests.reliability.loops import Loops
from tests.reliability.machine import Machine
from tests.reliability.subjects import SUBJECTS, Data, Subject

#: Where soaks leave their checkpoints, and find them again.
SOAK = Path(tempfile.gettempdir()) / "seqgp-attack"
#: Updates of a soak, and in how many units.
SOAKS = {"gaussian": (1_000_000, 100), "bernoulli": (100_000, 20), "learning": (10_000, 20)}
#: Subjects by number.
KINDS = list(SUBJECTS)
#: The last batch of the streams that are killed.
LAST = 200
#: Counts of a machine that are not calls.
COUNTED_APART = ("sequences", "steps")
#: What several processes that share data survive, by the names of `tests.distributed_checks`.
IN_GROUPS = ["failures", "interrupts", "silence", "death"]


def units(options: Options) -> tuple[dict[str, Any], list[Unit]]:
    """All attacks, in pieces of a minute or a few."""
    quick = options.quick
    work = [
        Unit(f"sequences/{k:03d}", partial(sequences, Machine, 2 if quick else 50, k))
        for k in range(1 if quick else 200)
    ]
    work += [
        Unit(f"sequences of loops/{k:02d}", partial(sequences, Loops, 2 if quick else 50, k))
        for k in range(1 if quick else 20)
    ]
    work += [
        Unit(f"kills/{k}", partial(kills, 2 if quick else 50, k)) for k in range(1 if quick else 10)
    ]
    work += [
        Unit(f"corruptions/{k}", partial(corruptions, 20 if quick else 500, k))
        for k in range(1 if quick else 10)
    ]
    work += [
        Unit(f"interrupts/{k}", partial(interrupts, 4 if quick else 100, k))
        for k in range(1 if quick else 10)
    ]
    work.append(Unit("malicious files", malicious))
    for name, test, number in (
        ("full disk", test_storage.test_no_space, 20),
        (
            "read-only directories",
            lambda _: test_storage.test_directories_that_cannot_be_written(),
            20,
        ),
        ("writers and readers", test_storage.test_many_writers_and_readers, 20),
    ):
        work.append(Unit(name, partial(repeated, test, 1 if quick else number)))
    if not quick:  # to start processes takes longer than all the rest
        work.append(Unit("processes that share data", partial(groups, 10)))
    for dtype in ("float64", "float32"):
        for name in NUMERICS:
            work.append(Unit(f"numerics/{name}/{dtype}", partial(numerics, name, dtype, quick)))
        for name in KINDS:
            piece = partial(scales, name, dtype, quick)
            work.append(Unit(f"scales/{name}/{dtype}", piece))
    for name, (number, pieces) in SOAKS.items():
        number, pieces = (40, 2) if quick else (number, pieces)
        for k in range(pieces):
            piece = partial(soak, name, number // pieces, k, quick)
            work.append(Unit(f"soak/{name}/{k:02d}", piece))
    return {"quick": quick}, work


class Tally:
    """How many trials there were, and which of them failed."""

    def __init__(self) -> None:
        self.trials, self.failures = 0, list[str]()

    @contextmanager
    def trial(self, what: str) -> Iterator[None]:
        """Count a trial; an exception is a failure."""
        self.trials += 1
        try:
            yield
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            text = f"{type(error).__name__}: {error}"[:300]
            self.failures.append(f"{what}: {text} ({Path(where.filename).name}:{where.lineno})")

    def result(self, **more: Any) -> dict[str, Any]:
        """For the JSON."""
        failed = {"failures": len(self.failures), "first": self.failures[:5]}
        return {"trials": self.trials, **failed, **more}


@contextmanager
def quiet() -> Iterator[None]:
    """Without warnings about data that are extreme on purpose."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BotorchWarning)
        warnings.simplefilter("ignore", NumericalWarning)
        yield


@contextmanager
def in_double() -> Iterator[None]:
    """With float64 as the default, as the tests have it."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


# -------------------------------------------------------------------- calls


@in_double()
def sequences(kind: type[Machine] | type[Loops], number: int, k: int) -> dict[str, Any]:
    """Random sequences of calls, each a trial; hypothesis stops a piece at its first failure."""
    machine: Any = type("Attack", (kind,), {"counts": Counter()})
    tally = Tally()
    with tally.trial(f"seed {k}"):
        run_state_machine_as_test(
            seed(k)(machine),
            settings=settings(
                max_examples=number,
                stateful_step_count=15,
                deadline=None,
                database=None,
                phases=[Phase.generate],
                report_multiple_bugs=False,
                suppress_health_check=list(HealthCheck),
            ),
        )
    tally.trials = machine.counts["sequences"]
    calls = {key: number for key, number in machine.counts.items() if key not in COUNTED_APART}
    steps = sum(number for key, number in calls.items() if not key.startswith("of "))
    return tally.result(steps=steps, calls=calls)


# -------------------------------------------------------------------- checkpoints


def subject_of(k: int) -> Subject:
    """All kinds in turns."""
    kind = KINDS[k % len(KINDS)]
    return SUBJECTS[kind](kind, 2, torch.float64)


def batches(subject: Subject, k: int) -> Iterator[Data]:
    """An endless stream of observations, the same for the same ``k``."""
    for number in itertools.count():
        yield subject.observe(3, 1000 * k + number)


def small_model(subject: Subject, k: int) -> SequentialGP:
    """A model of the first batch."""
    with quiet():
        return subject.build(3, 3, 1000 * k)


def learn_batch(model: SequentialGP, batch: Data, **options: Any) -> None:
    """Update a model."""
    X, Y, arguments = batch
    with quiet():
        model.update(X, Y, **arguments, **options)


@in_double()
def kills(number: int, k: int) -> dict[str, Any]:
    """A process learns and saves; killed at any time, its file is one of those that it saved."""
    tally, chance, subject = Tally(), random.Random(k), subject_of(7 * k)
    model, known = small_model(subject, k), {}
    points, options = subject.inputs(3, 1), {"learn": False, "memory": 3}
    known[model.num_updates] = model.posterior(points).mean
    for batch in itertools.islice(batches(subject, k), 1, LAST):
        learn_batch(model, batch, **options)
        known[model.num_updates] = model.posterior(points).mean
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "model"
        seqgp.save(small_model(subject, k), path)

        def learn() -> None:
            torch.set_num_threads(1)
            model = seqgp.load(path)
            for batch in itertools.islice(batches(subject, k), 1 + model.num_updates, LAST):
                learn_batch(model, batch, **options)
                seqgp.save(model, path)

        for trial in range(number):
            pid = start(learn)
            time.sleep(chance.uniform(0.0, 0.3))
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            with tally.trial(f"kill {trial}"):
                found = seqgp.load(path)
                assert torch.equal(found.posterior(points).mean, known[found.num_updates])
                if found.num_updates > LAST - 50:
                    seqgp.save(small_model(subject, k), path)
    return tally.result()


@in_double()
def corruptions(number: int, k: int) -> dict[str, Any]:
    """A checkpoint of which anything has changed is refused, with the error that says so."""
    tally, chance = Tally(), random.Random(k)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "model"
        for trial in range(number):
            if trial % 20 == 0:
                kind = number // 20 * k + trial // 20
                seqgp.save(small_model(subject_of(kind), k), path)
                good = path.read_bytes()
            bad = bytearray(good)
            way = chance.choice(["bit", "byte", "zeros", "cut", "more", "swap"])
            at, length = chance.randrange(len(good)), chance.randrange(1, 64)
            if way == "bit":
                bad[at] ^= 1 << chance.randrange(8)
            elif way == "byte":
                bad[at] = chance.randrange(256)
            elif way == "zeros":
                bad[at : at + length] = bytes(len(bad[at : at + length]))
            elif way == "cut":
                del bad[at:]
            elif way == "more":
                bad[at:at] = chance.randbytes(length)
            else:
                other = chance.randrange(len(good))
                bad[at], bad[other] = bad[other], bad[at]
            if bytes(bad) == good:
                continue
            path.write_bytes(bytes(bad))
            with tally.trial(f"{way} at {at}"):
                try:
                    seqgp.load(path)
                except CheckpointError:
                    continue
                raise AssertionError("was accepted")
    return tally.result()


def malicious() -> dict[str, Any]:
    """Forged headers with correct digests."""
    tally = Tally()
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "model"
        for name, header in test_storage.HOSTILE.items():
            forge(path, header, test_storage.DATA)
            with tally.trial(name):
                try:
                    seqgp.load(path)
                except CheckpointError:
                    continue
                raise AssertionError("was accepted")
    return tally.result()


def repeated(test: Callable[[Path], None], number: int) -> dict[str, Any]:
    """One of the tests, again and again."""
    tally = Tally()
    for k in range(number):
        with tempfile.TemporaryDirectory() as directory, tally.trial(str(k)):
            test(Path(directory))
    return tally.result()


# -------------------------------------------------------------------- interrupts


@in_double()
def interrupts(number: int, k: int) -> dict[str, Any]:
    """At a random line of an update, and at another soon after: it has happened, or it has not."""
    tally, chance = Tally(), random.Random(k)
    for trial in range(number):
        if trial % 5 == 0:
            subject = subject_of(number // 5 * k + trial // 5)
            model, stream = small_model(subject, k), batches(subject, k)
            next(stream)
        options: dict[str, Any] = {"learn": trial % 2 == 0, "memory": 4}
        options |= {"steps": 1} if options["learn"] else {}
        learn = partial(learn_batch, batch=next(stream), **options)
        before, done, interrupted = snapshot(model), copy.deepcopy(model), copy.deepcopy(model)
        counter = Interrupts(set())
        counter.run(partial(learn, done))
        line = chance.randrange(1, counter.lines)
        if trial % 4 == 0:  # towards the end, where the model is changed
            line = counter.lines - chance.randrange(min(100, counter.lines - 1))
        with tally.trial(f"line {line} of {counter.lines}"):
            second = line + chance.randrange(1, 40)
            Interrupts({line, second}).run(partial(learn, interrupted))
            now = snapshot(interrupted)
            assert is_same(now, before) or is_same(now, snapshot(done)), "a mixture"
        model = done
    return tally.result()


def groups(number: int) -> dict[str, Any]:
    """Errors, interrupts and deaths of one of two processes that share the data of a model."""
    tally = Tally()
    for _ in range(number):
        for name, error in distributed_checks.run(2, IN_GROUPS).items():
            with tally.trial(name):
                assert not error, error[-300:]
    return tally.result()


# -------------------------------------------------------------------- numerics

NUMERICS = {
    "gaussian": GaussianLikelihood,
    "bernoulli": BernoulliLikelihood,
    "poisson": PoissonLikelihood,
    "student_t": StudentTLikelihood,
}


def numerics(name: str, dtype: str, quick: bool) -> dict[str, Any]:
    """Scales of everything: no NaN, no error; float32 close to float64 with the same jitter.

    Errors are relative to the prior's standard deviation. The jitter of both is that of float32:
    what is compared is rounding.
    """
    kind = getattr(torch, dtype)
    tally, worst = Tally(), 0.0
    sizes = [10] if quick else [30, 500]
    grid = itertools.product(
        [1.0] if quick else [1e-4, 1e-2, 1.0, 1e2, 1e4],  # variance of the kernel
        [0.3] if quick else [0.03, 0.3, 3.0],  # lengthscale
        [0.0] if quick else [0.0, 1e3],  # offset of the inputs
        [1e-2] if quick else [1e-4, 1e-2, 1.0],  # noise over the variance of the kernel
        [False, True],  # duplicates
        sizes,
    )
    for variance, lengthscale, offset, noise, duplicates, m in grid:
        if name != "gaussian" and noise != 1e-2:
            continue
        if m > 100 and (duplicates or lengthscale != 0.3):
            continue
        what = f"{variance:g} {lengthscale:g} {offset:g} {noise:g} {duplicates} {m}"
        with tally.trial(what), quiet():
            case = (name, variance, lengthscale, offset, noise, duplicates, m)
            mean, var = one_case(*case, dtype=kind)
            assert mean.isfinite().all(), "mean"
            assert (var >= 0).all(), "variance"
            if kind == torch.float32:
                exact, _ = one_case(*case, dtype=torch.float64)
                error = float((mean.double() - exact).abs().max() / variance**0.5)
                # Little noise, or inputs far away for their lengthscale, are more than seven digits
                # can resolve; others have iterations of their own.
                resolved = noise >= 1e-2 and offset <= 1e4 * lengthscale
                if name == "gaussian":
                    worst = max(worst, error if resolved else 0.0)
                    assert error < (1e-3 if resolved else 1e-2), f"error {error:.1e}"
    return tally.result(**({"worst": worst} if kind == torch.float32 else {}))


def one_case(
    name: str,
    variance: float,
    lengthscale: float,
    offset: float,
    noise: float,
    duplicates: bool,
    m: int,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Predictions of a model that has learnt, conditioned and learnt the same again."""
    generator = torch.Generator().manual_seed(0)
    X = torch.rand(max(60, m), 2, generator=generator, dtype=torch.float64)
    if duplicates:
        X[1::2] = X[::2]
    f = variance**0.5 * (torch.sin(6 * X).sum(-1, keepdim=True) - 0.5)
    if name == "bernoulli":
        Y = (f > 0).double()
    elif name == "poisson":
        Y = f.clamp(-2, 3).exp().round()
    else:
        Y = f
    X, Y = (X + offset).to(dtype), Y.to(dtype)
    kernel = ScaleKernel(MaternKernel(2.5)).to(dtype)
    kernel.outputscale, kernel.base_kernel.lengthscale = variance, lengthscale
    likelihood = NUMERICS[name]().to(dtype)
    if name == "gaussian":
        likelihood.noise = max(noise * variance, 1.1e-4)
    model = SequentialGP(
        X[:-10],
        Y[:-10],
        likelihood=likelihood,
        covar_module=kernel,
        inducing_points=X[:m],
        outcome_transform=None,
    )
    model.variational_strategy.jitter_val = 1e-5
    model.refresh()
    for _ in range(2):
        model.update(X[-10:], Y[-10:], learn=False, memory=20)
    model.condition_on_observations(X[:3], Y[:3]).posterior(X[:20])
    with torch.no_grad():
        posterior = model.posterior(X[:20])
        return posterior.mean, posterior.variance


@in_double()
def scales(name: str, dtype: str, quick: bool) -> dict[str, Any]:
    """Scales of the kernel, for all kinds of models: no NaN, no error, variances at least zero.

    ``worst`` is the largest difference of a mean from float64 with the same jitter, over the
    kernel's standard deviation, where both are as large as the noise or smaller.
    """
    kind, tally, worst = getattr(torch, dtype), Tally(), 0.0
    variances = [1.0] if quick else [1e-4, 1e-2, 1.0, 1e2, 1e4]
    for variance, lengthscale in itertools.product(variances, [0.3] if quick else [0.03, 0.3, 3.0]):
        with tally.trial(f"{variance:g} {lengthscale:g}"), quiet():
            mean, var = scaled_case(name, variance, lengthscale, kind)
            assert mean.isfinite().all(), "mean"
            assert (var >= 0).all(), "variance"
            if kind == torch.float32 and variance <= 1.0:
                exact, _ = scaled_case(name, variance, lengthscale, torch.float64)
                worst = max(worst, float((mean.double() - exact).abs().max()) / variance**0.5)
    return tally.result(**({"worst": worst} if kind == torch.float32 else {}))


def scaled_case(
    name: str, variance: float, lengthscale: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """The latent posterior of a model that has learnt, conditioned and learnt the same again."""
    subject = SUBJECTS[name](name, 2, dtype)
    kernel = ScaleKernel(MaternKernel(2.5)).to(dtype)
    kernel.outputscale, kernel.base_kernel.lengthscale = variance, lengthscale
    model = subject.build(40, 20, 0, covar_module=kernel)
    model.variational_strategy.jitter_val = 1e-5
    model.refresh()
    X, Y, arguments = subject.observe(6, 3)
    for _ in range(2):
        model.update(X, Y, learn=False, memory=20, **arguments)
    model.condition_on_observations(X, Y, **arguments).posterior(subject.inputs(5, 4))
    with torch.no_grad():
        f = model.eval()(model.transform_inputs(subject.points(20, 5)))
        return f.mean, f.variance


# -------------------------------------------------------------------- soak


def soak(name: str, number: int, k: int, quick: bool) -> dict[str, Any]:
    """A piece of a soak, in a process of its own, whose memory is that of the soak alone."""
    if quick:
        return _soak(name, number, k, quick)
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_soak, name, number, k, quick).result()


def _soak(name: str, number: int, k: int, quick: bool) -> dict[str, Any]:
    """Updates of one observation each, from where the unit before ended.

    The drift is the largest difference from a model that was given the data in large batches; time
    is that of an update, in the first and the last tenth of the unit; memory that of the process.
    """
    torch.set_num_threads(1)
    SOAK.mkdir(exist_ok=True)
    kind = "gaussian" if name == "gaussian" else "bernoulli"
    path, m = SOAK / f"{name}{'-quick' * quick}-{number}-{k}.pt", 20
    before = path.with_name(f"{name}{'-quick' * quick}-{number}-{k - 1}.pt")
    generator = torch.Generator().manual_seed(0)
    Z = update.make_data(kind, m, generator)[0]
    if k and not before.exists():
        _soak(name, number, k - 1, quick)
    X0, Y0 = update.make_data(kind, 0, generator)
    with quiet():
        model = seqgp.load(before) if k else update.make_model(kind, m, X0, Y0, Z)
        X, Y = update.make_data(kind, number, torch.Generator().manual_seed(k + 1))
        seconds, rss = torch.zeros(number), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        options: dict[str, Any] = {"memory": 0 if kind == "gaussian" else 10, "learn": False}
        if name == "learning":
            options |= {"learn": True, "steps": 1, "memory": 20}
        for i in range(number):
            begin = time.perf_counter()
            model.update(X[i : i + 1], Y[i : i + 1], **options)
            seconds[i] = time.perf_counter() - begin
            if i == number // 10:  # after what is allocated once
                rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - rss
        seqgp.save(model, path)
        points = update.make_data(kind, 50, torch.Generator().manual_seed(99))[0]
        drift, tally = None, Tally()
        with tally.trial("finite"):
            posterior = model.posterior(points)
            assert posterior.mean.isfinite().all()
            assert (posterior.variance >= 0).all()
            assert model.num_seen == (k + 1) * number
        if name == "gaussian":
            at_once = update.make_model(kind, m, X0, Y0, Z)
            for piece in range(k + 1):
                data = update.make_data(kind, number, torch.Generator().manual_seed(piece + 1))
                for part in zip(data[0].split(10_000), data[1].split(10_000), strict=True):
                    at_once.update(*part, memory=0, learn=False)
            expected = at_once.posterior(points)
            drift = float((posterior.mean - expected.mean).detach().abs().max())
            with tally.trial(f"drift {drift:.1e}"):
                assert drift < 1e-8
    tenth = max(number // 10, 1)
    first, last = (float(part.median()) for part in (seconds[:tenth], seconds[-tenth:]))
    tally.trials = number
    times = {"first": round(1e3 * first, 3), "last": round(1e3 * last, 3)}
    return tally.result(drift=drift, milliseconds=times, megabytes=round(grown / 1024, 1))


# -------------------------------------------------------------------- report


def render(units: dict[str, dict[str, Any]], directory: Path) -> str:
    """Counts by kind of attack; failures in full."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for key, unit in units.items():
        parts = key.split("/")
        group = "/".join(parts[:-1]) if parts[-1].isdigit() or parts[0] == "numerics" else parts[0]
        groups.setdefault(group, []).append(unit)
    lines = ["| attack | trials | failures | |", "|---|---|---|---|"]
    for group, members in groups.items():
        trials, failures = (sum(unit[key] for unit in members) for key in ("trials", "failures"))
        notes = []
        if "steps" in members[0]:
            notes.append(f"{sum(unit['steps'] for unit in members):,} calls")
        worst = [unit["worst"] for unit in members if "worst" in unit]
        if worst and max(worst):
            notes.append(f"float32 within {max(worst):.0e} of float64")
        drifts = [unit["drift"] for unit in members if unit.get("drift") is not None]
        if drifts:
            notes.append(f"drift {max(drifts):.0e}")
        if "milliseconds" in members[0]:
            first, last = members[0]["milliseconds"]["first"], members[-1]["milliseconds"]["last"]
            notes.append(f"{first:.1f} ms an update at first, {last:.1f} ms at last")
            notes.append(f"memory grew by {max(unit['megabytes'] for unit in members):.0f} MB")
        lines.append(f"| {group} | {trials:,} | {failures} | {', '.join(notes)} |")
    failed = [f"* `{key}`: {text}" for key, unit in units.items() for text in unit["first"]]
    return "\n".join(lines + (["", "Failures:", "", *failed] if failed else []))

"""Speed of the present tree, compared with an earlier revision and with rivals.

Each piece of work is timed in the present tree (*ours*), in an earlier revision (*old*:
``--against PATH_OR_REVISION``) and, where there is one, by a rival: BoTorch's own model, or the
same arithmetic in bare tensors. Times are processor seconds of one thread; all ways take turns,
and a ratio is the median of the rounds' ratios. An old tree cannot be imported beside the present
one, so each has a process of its own, `benchmarks.regression_worker`, that is sent one job after
the other.
"""

from __future__ import annotations

import atexit
import json
import math
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

from benchmarks import fantasies
from benchmarks.runner import ROOT, Options, Times, Unit

AGAINST = "e6e82c4"
WORKER = Path(__file__).with_name("regression_worker.py")
#: Which tree does the work in each way, and how.
WAYS = {
    "ours": ("present", "seqgp"),
    "botorch": ("present", "botorch"),
    "bare": ("present", "bare"),
    "old": ("old", "seqgp"),
}
NAMES = {"botorch": "BoTorch", "bare": "bare tensors", "old": "old"}
RMSE_TOLERANCE = 0.02  # relative to the rival's
BOUND_TOLERANCE = 1e-4  # nats an observation


class Target(NamedTuple):
    """What is to be reached.

    Attributes:
        rival: The way to compare with.
        kind: Whether ours takes ``"at most"`` so many times as long as the rival, or the rival
            ``"at least"`` so many times as long as ours.
        number: The number.
    """

    rival: str
    kind: Literal["at most", "at least"]
    number: float

    def measured(self, unit: dict[str, Any]) -> float:
        """The ratio that the target is about."""
        ratio = float(unit["ratio"][self.rival])
        return ratio if self.kind == "at most" else 1 / ratio

    def is_met_by(self, ratio: float) -> bool:
        """Whether a ratio reaches the target."""
        return ratio <= self.number if self.kind == "at most" else ratio >= self.number

    def __str__(self) -> str:
        name = NAMES[self.rival]
        if self.kind == "at most":
            return f"ours / {name} <= {self.number:g}"
        return f"{name} / ours >= {self.number:g}"


class Row(NamedTuple):
    """A kind of line of the table.

    Attributes:
        title: What is timed; a format for the arguments of the work.
        target: What is to be reached.
        quality: What has to be as good as the rival's.
    """

    title: str
    target: Target
    quality: Literal["rmse", "bound"] | None = None


UPDATE = "update, {likelihood}, m = {m}, {new} new, {memory} in memory"
#: By the beginnings of the keys.
ROWS = {
    "hartmann6": Row(
        "fit, Hartmann6, n = {n:,}; `SingleTaskGP`", Target("botorch", "at most", 1.3), "rmse"
    ),
    "large": Row(
        "fit, {likelihood}, n = {n:,}, m = {m}; `SingleTaskVariationalGP`",
        Target("botorch", "at least", 5),
        "bound",
    ),
    "learn/gaussian": Row(f"{UPDATE}, {{steps}} steps", Target("old", "at least", 2)),
    "learn/bernoulli": Row(f"{UPDATE}, {{steps}} steps", Target("old", "at least", 2.5)),
    "condition": Row(f"{UPDATE}, without learning", Target("bare", "at most", 1.5)),
    "fantasies": Row(
        "{candidates} candidates of q = {q} x {fantasies} fantasies, posterior at {test} points, "
        "m = {m}",
        Target("bare", "at most", 2),
    ),
    "import": Row("`import seqgp`; `import botorch`", Target("botorch", "at most", 1.1)),
}


# ------------------------------------------------------------- trees and processes


def git(directory: Path, *arguments: str) -> str | None:
    """What git says about a directory, ``None`` if it fails."""
    # In a hook, git sets variables that would point it to the hook's repository.
    environment = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    try:
        answer = subprocess.run(
            ["git", "-C", str(directory), *arguments],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return answer.stdout.strip()


def is_tree(against: str) -> bool:
    """Whether this is a directory with a ``seqgp`` in it, and not a revision."""
    return (Path(against) / "seqgp" / "__init__.py").exists()


def name_of(against: str, repository: Path = ROOT) -> str:
    """The full revision of a revision or of a tree, as it is written to the results.

    Args:
        against: A directory with a ``seqgp`` in it, or a revision of the repository.
        repository: The repository.
    """
    if is_tree(against):
        path = Path(against)
        revision = git(path, "rev-parse", "HEAD")
        if revision is None:
            return path.resolve().name
        changed = git(path, "status", "--porcelain", "--", "seqgp")
        return revision + (" with changes" if changed else "")
    revision = git(repository, "rev-parse", "--verify", "--quiet", f"{against}^{{commit}}")
    if revision is None:
        raise SystemExit(
            f"--against: expected a directory with a seqgp in it, or a revision of {repository}, "
            f"got {against!r}."
        )
    return revision


class Worktree:
    """A temporary worktree of a revision; a context manager.

    Args:
        revision: The revision.
        repository: The repository.
    """

    def __init__(self, revision: str, repository: Path = ROOT) -> None:
        self.revision, self.repository = revision, repository

    def __enter__(self) -> Path:
        self.directory = tempfile.TemporaryDirectory(prefix="seqgp-old-")
        self.path = Path(self.directory.name) / "tree"
        options = ("--detach", str(self.path), self.revision)
        if git(self.repository, "worktree", "add", *options) is None:
            self.directory.cleanup()
            raise RuntimeError(f"git cannot make a worktree of {self.revision}.")
        return self.path

    def __exit__(self, *error: object) -> None:
        git(self.repository, "worktree", "remove", "--force", str(self.path))
        self.directory.cleanup()


def environment_of(tree: Path) -> dict[str, str]:
    """Environment variables of a process that sees the ``seqgp`` of one tree, with one thread."""
    return {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


class Worker:
    """A process that does jobs with the ``seqgp`` of one tree; a context manager.

    Args:
        tree: The tree.
    """

    def __init__(self, tree: Path) -> None:
        # -P: the directory of the script, with names such as ``ax``, is not to be imported from.
        self.process = subprocess.Popen(
            [sys.executable, "-P", str(WORKER)],
            env=environment_of(tree),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *error: object) -> None:
        self.process.communicate()  # no more jobs: it ends

    def ask(self, **job: Any) -> dict[str, Any]:
        """What the worker answers to a job; see `benchmarks.regression_worker`."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with suppress(BrokenPipeError):  # then there is no answer either
            self.process.stdin.write(json.dumps(job) + "\n")
            self.process.stdin.flush()
        try:
            line = self.process.stdout.readline()
        except KeyboardInterrupt:
            self.process.terminate()  # what it does now may take minutes
            raise
        if not line:
            raise RuntimeError(f"The worker has ended, with {self.process.wait()}.")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise RuntimeError(f"In the worker's process:\n{answer['error']}")
        return answer


class Trees:
    """The present tree and an old one, with a worker each; made when they are first needed.

    Args:
        against: A directory or a revision.
    """

    def __init__(self, against: str) -> None:
        self.against = against
        self._open = ExitStack()

    @cached_property
    def paths(self) -> dict[str, Path]:
        """Where they are."""
        atexit.register(self._open.close)
        if is_tree(self.against):
            old = Path(self.against)
        else:
            old = self._open.enter_context(Worktree(self.against))
        return {"present": ROOT, "old": old.resolve()}

    @cached_property
    def workers(self) -> dict[str, Worker]:
        """Their processes."""
        return {name: self._open.enter_context(Worker(path)) for name, path in self.paths.items()}


# ------------------------------------------------------------- measurements


def take_turns(ways: Mapping[str, Callable[[], float]], rounds: int, patience: float) -> Times:
    """Like `benchmarks.runner.race`, for functions that return the seconds that they took.

    Args:
        ways: The functions, *ours* first.
        rounds: How many rounds at most.
        patience: A way that has taken so many seconds does not take part in further rounds.
    """
    times = Times({name: [] for name in ways})
    for _ in range(rounds):
        if sum(times["ours"]) >= patience:
            break
        for name, function in ways.items():
            if sum(times[name]) < patience:
                times[name].append(function())
    return times


def summary_of(times: Times) -> dict[str, Any]:
    """What is written of the times: medians, ratios of ours to each other way, rounds."""
    ratio = {}
    for way in times:
        if way != "ours":
            both = min(len(times["ours"]), len(times[way]))
            pair = Times({name: times[name][:both] for name in ("ours", way)})
            ratio[way] = round(pair.ratio("ours", way), 4)
    return {
        "processor_seconds": {way: float(f"{times.median(way):.4g}") for way in times},
        "ratio": ratio,
        "rounds": {way: len(seconds) for way, seconds in times.items()},
    }


@dataclass(frozen=True)
class Measurement:
    """How a piece of work is timed.

    Attributes:
        work: Its name in `benchmarks.regression_worker`.
        arguments: Its arguments.
        ways: All ways to do it, *ours* first.
        rounds: How many rounds at most.
        warm_up: Arguments that differ in a first round that does not count; a single round has
            none before it.
        calls: How many calls are timed together.
        patience: A way that has taken so many seconds does not take part in further rounds.
        same: Names of facts, lists of numbers, that have to be the same in some of the ways.
        same_ways: The ways.
        tolerance: How much they may differ, relative to the largest number.
    """

    work: str
    arguments: dict[str, Any]
    ways: tuple[str, ...]
    rounds: int
    warm_up: dict[str, Any] = field(default_factory=dict)
    calls: int = 1
    patience: float = 20.0
    same: tuple[str, ...] = ()
    same_ways: tuple[str, ...] = ()
    tolerance: float = 1e-6


def measure(measurement: Measurement, trees: Trees) -> dict[str, Any]:
    """Times of all ways, and the facts about what they computed."""
    facts: dict[str, dict[str, Any]] = {}

    def ask(way: str, arguments: dict[str, Any], **job: Any) -> dict[str, Any]:
        tree, kind = WAYS[way]
        job = {"work": measurement.work, "way": kind, "arguments": arguments, **job}
        return trees.workers[tree].ask(**job)

    def turn(way: str) -> float:
        first = way not in facts
        answer = ask(way, measurement.arguments, calls=measurement.calls, facts=first)
        if first:
            facts[way] = answer["facts"]
        return float(answer["seconds"])

    if measurement.rounds > 1:
        for way in measurement.ways:
            ask(way, {**measurement.arguments, **measurement.warm_up}, calls=1, facts=False)
    turns = {way: partial(turn, way) for way in measurement.ways}
    times = take_turns(turns, measurement.rounds, measurement.patience)
    return {
        "arguments": measurement.arguments,
        **summary_of(times),
        "differences": {
            f"{name}/{way}": difference(
                name, facts["ours"][name], facts[way][name], measurement.tolerance
            )
            for name in measurement.same
            for way in measurement.same_ways
        },
        "facts": {
            way: {name: value for name, value in each.items() if not isinstance(value, list)}
            for way, each in facts.items()
        },
    }


def difference(name: str, ours: list[float], theirs: list[float], tolerance: float) -> float:
    """The largest difference, relative to the largest number; raises if it is too large."""
    scale = max(map(abs, ours))
    differences = [abs(a - b) / scale for a, b in zip(ours, theirs, strict=True)]
    largest = math.nan if any(map(math.isnan, differences)) else max(differences)
    if not largest <= tolerance:
        raise RuntimeError(
            f"{name}: two ways compute something else (relative difference {largest:.1e}), so "
            "their times cannot be compared."
        )
    return float(f"{largest:.2g}")


def import_seconds(module: str, tree: Path) -> float:
    """Processor seconds of a Python that imports a module."""

    def children() -> float:
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        return usage.ru_utime + usage.ru_stime

    before = children()
    subprocess.run(
        [sys.executable, "-P", "-c", f"import {module}"], env=environment_of(tree), check=True
    )
    return children() - before


def measure_import(trees: Trees, ways: tuple[str, ...], rounds: int) -> dict[str, Any]:
    """Times of ``import seqgp`` in both trees and of ``import botorch``."""
    modules = {
        way: partial(import_seconds, kind, trees.paths[tree])
        for way, (tree, kind) in WAYS.items()
        if way in ways
    }
    if rounds > 1:  # compiles what is not compiled yet, and fills the file system's cache
        for each in modules.values():
            each()
    return {"arguments": {}, **summary_of(take_turns(modules, rounds, patience=60.0))}


def units(options: Options) -> tuple[dict[str, Any], list[Unit]]:
    """All rows; the fits for several data sets."""
    against = options.against or AGAINST
    trees = Trees(against)
    work = [
        Unit(key, partial(measure, measurement, trees))
        for key, measurement in measurements(options).items()
    ]
    ways, rounds = ("ours", "botorch", "old"), 7
    if options.quick:
        ways, rounds = ("ours", "botorch"), 1
    work.append(Unit("import", partial(measure_import, trees, ways, rounds)))
    return {"quick": options.quick, "dtype": "float64", "against": name_of(against)}, work


def measurements(options: Options) -> dict[str, Measurement]:
    """All that the workers measure, by key."""
    quick = options.quick
    sizes, large = [100, 150, 300, 1_000], {"n": 5_000, "m": 100}
    fit: dict[str, Any] = {"test": 1_000}
    stream = {"new": 500, "memory": 400, "past": 1_000, "dim": 8}
    rounds, repeats, calls = 15, 3, 10
    limit = {}
    if quick:
        sizes, large, fit = [20], {"n": 1_100, "m": 10}, {"test": 50}
        stream = {"new": 50, "memory": 40, "past": 100, "dim": 8}
        rounds, repeats, calls = 1, 1, 1
        limit = {"max_steps": 5}
    result: dict[str, Measurement] = {}
    # In fits the old revision is not the rival, and may be slow: it fits one data set.
    ways, with_old = ("ours", "botorch"), ("ours", "botorch", "old")
    for seed in range(options.repeats or repeats):
        for n in sizes:
            result[f"hartmann6/n={n}/seed{seed}"] = Measurement(
                "Fit",
                {"n": n, "seed": seed, **fit, **limit},
                ways if seed else with_old,
                min(rounds, 3),
                warm_up={"n": 20, "max_steps": 3},
            )
    for seed in range(options.repeats or 1):  # BoTorch takes minutes
        for name in ("gaussian", "bernoulli"):
            result[f"large/{name}/n={large['n']}/seed{seed}"] = Measurement(
                "FitLarge",
                {"likelihood": name, **large, "seed": seed, **limit},
                ways if seed else with_old,
                min(rounds, 3),
                warm_up={"n": 1_050, "m": 10, "max_steps": 3},
            )
    before = ("before_mean", "before_variance")
    after = ("after_mean", "after_variance")
    rivals = ("bare", "old")
    for name in ("gaussian", "bernoulli"):
        steps = {"learn": True, "steps": 3 if quick else 20}
        result[f"learn/{name}"] = Measurement(
            "Update",
            {"likelihood": name, "m": 20 if quick else 300, **steps, **stream},
            ("ours", "old"),
            rounds,
            same=before,
            same_ways=("old",),
            # Sites that are not Gaussian are iterated until they change by less than 1e-6.
            tolerance=1e-6 if name == "gaussian" else 1e-4,
        )
    result["condition/gaussian"] = Measurement(
        "Update",
        {"likelihood": "gaussian", "m": 20 if quick else 100, "learn": False, **stream},
        ("ours", *rivals),
        rounds,
        calls=calls,
        same=before + after,
        same_ways=rivals,
    )
    for q in (1, 4):
        result[f"fantasies/q={q}"] = Measurement(
            "Fantasies",
            {
                "m": 10 if quick else 50,
                "q": q,
                "candidates": fantasies.CANDIDATES,
                "fantasies": fantasies.FANTASIES,
                "test": fantasies.TEST,
                "data": 100 if quick else fantasies.DATA,
                "dim": fantasies.DIM,
                "lengthscale": fantasies.LENGTHSCALE,
                "noise": fantasies.NOISE,
            },
            ("ours", *rivals),
            rounds,
            calls=calls,
            same=after,
            same_ways=rivals,
        )
    return result


# ------------------------------------------------------------- the report


def row_of(key: str) -> Row:
    """The row that a measurement belongs to."""
    return next(row for name, row in ROWS.items() if f"{key}/".startswith(f"{name}/"))


def is_as_good(quality: str, rows: list[dict[str, Any]], rival: str) -> tuple[bool, str]:
    """Whether what ours computed is as good as what the rival did, and both in words."""
    ours, theirs = (
        statistics.mean(row["facts"][way][quality] for row in rows) for way in ("ours", rival)
    )
    if quality == "rmse":
        return ours <= (1 + RMSE_TOLERANCE) * theirs, f"RMSE {ours:.4f}, {theirs:.4f}"
    n = rows[0]["arguments"]["n"]
    points = ", ".join(str(rows[0]["facts"][way]["m"]) for way in ("ours", rival))
    text = f"bound {ours:.1f}, {theirs:.1f}; inducing points {points}"
    return ours >= theirs - BOUND_TOLERANCE * n, text


def remarks_on(facts: dict[str, dict[str, Any]]) -> str:
    """How far both revisions did the same work in updates that learn."""
    if "evaluations" not in facts.get("ours", {}) or not facts["ours"]["evaluations"]:
        return ""
    counts = ", ".join(str(facts[way]["evaluations"]) for way in ("ours", "old"))
    moved = ", ".join(
        "move" if facts[way]["moves_inducing_points"] else "stay" for way in ("ours", "old")
    )
    return f"evaluations {counts}; inducing points {moved}"


def render(units: dict[str, dict[str, Any]], directory: Path) -> str:
    """One table."""
    lines = [
        "Processor seconds of one thread (medians), by this revision (*ours*), by the rival, and "
        "by an earlier revision (*old*). All take turns; a ratio is the median of the ratios of "
        "the rounds, with its range over data sets if there are several. A fit also has to be as "
        f"good as the rival's: root mean square error at most {100 * RMSE_TOLERANCE:g} % larger, "
        f"bound at most {BOUND_TOLERANCE:g} nats an observation lower. In the last column, the "
        "first of two values is ours.",
        "",
        "| work | ours | rival | old | ratio | target | met | old / ours | |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    groups: dict[str, list[dict[str, Any]]] = {}
    for key, unit in units.items():
        groups.setdefault(key.partition("/seed")[0], []).append(unit)
    for key, rows in groups.items():
        row = row_of(key)
        rival = row.target.rival
        ratios = sorted(row.target.measured(unit) for unit in rows)
        ratio = statistics.median(ratios)
        met, remark = row.target.is_met_by(ratio), remarks_on(rows[0].get("facts", {}))
        if row.quality is not None:
            good, remark = is_as_good(row.quality, rows, rival)
            met = met and good
        spread = f" ({ratios[0]:.2f}-{ratios[-1]:.2f})" if len(ratios) > 1 else ""
        seconds = [
            [unit["processor_seconds"][way] for unit in rows if way in unit["processor_seconds"]]
            for way in ("ours", rival if rival != "old" else "", "old")
        ]
        cells = [f"{statistics.median(each):.3g}" if each else "" for each in seconds]
        old = [1 / unit["ratio"]["old"] for unit in rows if "old" in unit["ratio"]]
        cells += [
            f"{ratio:.2f}{spread}",
            str(row.target),
            "yes" if met else "no",
            f"{statistics.median(old):.2f}" if old else "",
            remark,
        ]
        lines.append(f"| {row.title.format(**rows[0]['arguments'])} | {' | '.join(cells)} |")
    return "\n".join(lines)

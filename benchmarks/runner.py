"""Measurements: how they are taken, and stored one by one."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from fnmatch import fnmatch
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from seqgp.progress import progress_bar

try:
    import fcntl
except ImportError:  # Windows, where only one process may measure at a time
    fcntl = None  # type: ignore[assignment]

ROOT = Path(__file__).parent.parent
PACKAGES = ("torch", "gpytorch", "botorch", "numpy", "seqgp")


@dataclass(frozen=True)
class Options:
    """What the command line asks of a benchmark.

    Attributes:
        quick: A smoke run: the same code on the smallest sensible problem.
        repeats: Number of seeds or folds; ``None`` for the benchmark's own default.
        against: For ``regression``: the tree or the revision to compare with; ``None`` for its
            default.
    """

    quick: bool = False
    repeats: int | None = None
    against: str | None = None


@dataclass(frozen=True)
class Unit:
    """The smallest piece of work that is written and skipped as a whole: a fold, a seed, a size.

    Attributes:
        key: Its name, unique in the benchmark: ``"step/poisson/seed0"``.
        measure: Does the work and returns what is to be written, as JSON can hold it.
    """

    key: str
    measure: Callable[[], dict[str, Any]]


@dataclass
class Result:
    """What a benchmark has measured so far, as it is on disk.

    Attributes:
        benchmark: Its name.
        settings: What all units share; results made with other settings do not mix.
        runs: Where and with what each run was made, see `environment`.
        units: The measurements by key; ``run`` says in which of the runs, ``seconds`` how long.
    """

    benchmark: str
    settings: dict[str, Any]
    runs: list[dict[str, Any]] = field(default_factory=list)
    units: dict[str, dict[str, Any]] = field(default_factory=dict)

    @classmethod
    def load(cls, path: Path) -> Result:
        """Read a result."""
        return cls(**json.loads(path.read_text()))

    @contextmanager
    def update(self, path: Path) -> Iterator[None]:
        """Change the result and its file together, whole or not at all.

        What other processes have written in the meantime is read first.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        with _alone(path.parent):
            if path.exists():
                on_disk = Result.load(path)
                self.runs, self.units = on_disk.runs, on_disk.units
            yield
            partial = path.with_suffix(".part")
            partial.write_text(json.dumps(asdict(self), indent=1) + "\n")
            partial.replace(path)

    def provenance(self) -> str:
        """One line on where the numbers come from: every run that one of them was made in."""
        used = [self.runs[i] for i in sorted({unit["run"] for unit in self.units.values()})]
        seconds = sum(unit["seconds"] for unit in self.units.values())

        def distinct(values: Iterable[str]) -> str:
            return ", ".join(dict.fromkeys(values))

        revisions = distinct(
            f"{(made['revision'] or 'none')[:10]}{' with changes' * made['changed']}"
            for made in used
        )
        versions = distinct(
            f"{name} {number}" for made in used for name, number in made["versions"].items()
        )
        return (
            f"{len(self.units)} measurements in {seconds:.0f} s, "
            f"{distinct(str(made['threads']) for made in used)} threads by default, "
            f"{distinct(made['started'][:10] for made in used)}, revision {revisions}; {versions}."
        )


@contextmanager
def _alone(directory: Path) -> Iterator[None]:
    """Keep other processes from changing files of a directory, where the system has locks."""
    if fcntl is None:
        yield
        return
    lock = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def run(
    name: str,
    settings: dict[str, Any],
    units: list[Unit],
    path: Path,
    fresh: bool = False,
    only: str | None = None,
) -> Result:
    """Make the measurements that are not in ``path`` yet, writing each at once.

    Args:
        name: The benchmark.
        settings: What all units share.
        units: What to measure, in order.
        path: The JSON file.
        fresh: Forget what the file holds.
        only: Measure only units whose key matches this pattern.
    """
    settings = json.loads(json.dumps(settings))  # tuples become lists, as on disk
    if fresh:
        path.unlink(missing_ok=True)
    result = Result.load(path) if path.exists() else Result(name, settings)
    if result.settings != settings:
        raise SystemExit(f"{path} was made with other settings: pass --fresh or another --out.")
    wanted = [unit for unit in units if only is None or fnmatch(unit.key, only)]
    todo = [unit for unit in wanted if unit.key not in result.units]
    if not todo:
        return result
    with result.update(path):
        result.runs.append(environment())
    number = len(result.runs) - 1
    bar = progress_bar(
        todo, desc=name, initial=len(wanted) - len(todo), total=len(wanted), unit="unit"
    )
    for unit in bar:
        bar.set_postfix_str(unit.key)
        start = time.perf_counter()
        measured = unit.measure()
        seconds = round(time.perf_counter() - start, 3)
        with result.update(path):
            result.units[unit.key] = {"run": number, "seconds": seconds, **measured}
    return result


def environment() -> dict[str, Any]:
    """Versions, revision and threads of this process."""
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {
            "python": platform.python_version(),
            **{package: version(package) for package in PACKAGES},
        },
        "revision": _git("rev-parse", "HEAD"),
        "changed": bool(_git("status", "--porcelain", "--", ".", ":!benchmarks/results")),
        "threads": torch.get_num_threads(),
        "processor": platform.machine(),
    }


def _git(*arguments: str) -> str | None:
    """What git says about the tree that this file is in, ``None`` if nothing."""
    try:
        answer = subprocess.run(
            ["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return answer.stdout.strip() or None


class Times(dict[str, list[float]]):
    """Seconds that each of several functions took, round by round."""

    def median(self, name: str) -> float:
        """The median over the rounds."""
        return statistics.median(self[name])

    def fastest(self, name: str) -> float:
        """The least disturbed round."""
        return min(self[name])

    def ratio(self, name: str, to: str) -> float:
        """How many times as long ``name`` takes as ``to``: the median of the rounds' ratios."""
        return statistics.median(a / b for a, b in zip(self[name], self[to], strict=True))


def race(
    functions: Mapping[str, Callable[[], object]], repeats: int = 10, warm_up: int = 2
) -> Times:
    """Time functions in turns, so that whatever else the machine does slows them all alike.

    Args:
        functions: What to time, by name.
        repeats: How many rounds.
        warm_up: How many rounds before that are not counted.
    """
    times = Times({name: [] for name in functions})
    for _ in range(warm_up + repeats):
        for name, function in functions.items():
            start = time.perf_counter()
            function()
            times[name].append(time.perf_counter() - start)
    return Times({name: seconds[warm_up:] for name, seconds in times.items()})

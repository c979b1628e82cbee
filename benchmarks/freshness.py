"""Whether results were measured with the present code.

A measurement of revision :math:`r` is *current* if none of the files that its benchmark uses has
changed since :math:`r`. These files are the benchmark's module and, transitively, what it imports
from this repository. ``from package import name`` leads to the module that defines the name, so
that a benchmark of one class does not depend on everything that the package's ``__init__`` offers.
Comments, docstrings and layout do not count as changes.

This is stricter than it has to be: a row of a rival counts as outdated when the library has
changed, although it runs none of it.
"""

from __future__ import annotations

import ast
import functools
import subprocess
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from benchmarks.imports import import_statements, module_files
from benchmarks.runner import ROOT, Result

PACKAGES = ("seqgp", "benchmarks")
#: What measurements do not depend on: the command line, this file, and how pages are written.
UNRELATED = frozenset(
    f"benchmarks.{name}" for name in ("__main__", "freshness", "headlines", "imports", "runner")
) | {"benchmarks", "seqgp._version", "seqgp.progress"}


@functools.cache
def modules(root: Path = ROOT) -> dict[str, Path]:
    """Names and files of all modules in the repository's packages."""
    return {k: v for package in PACKAGES for k, v in module_files(root / package).items()}


@functools.cache
def _imported(name: str, root: Path) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """What a module imports from the repository, and which names."""
    path = modules(root)[name]
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    statements = import_statements(path.read_text(), package)
    return tuple((module, tuple(names)) for module, names in statements if module in modules(root))


def _origin(module: str, name: str, root: Path) -> str:
    """The module that ``from module import name`` takes the name from."""
    if f"{module}.{name}" in modules(root):
        return f"{module}.{name}"
    if modules(root)[module].name == "__init__.py":
        for source, names in _imported(module, root):
            if name in names:
                return _origin(source, name, root)
    return module


def sources(benchmark: str, root: Path = ROOT) -> dict[str, Path]:
    """Modules and files that a benchmark's measurements depend on.

    Args:
        benchmark: Its name, as in ``python -m benchmarks NAME``.
        root: The repository.
    """
    found: set[str] = set()
    waiting = {f"benchmarks.{benchmark}"}
    while waiting:
        name = waiting.pop()
        found.add(name)
        for module, names in _imported(name, root):
            used = {_origin(module, each, root) for each in names} or {module}
            waiting |= used - found - UNRELATED
    return {name: modules(root)[name] for name in sorted(found)}


def code(source: str) -> str:
    """The syntax tree of a source without docstrings: equal for sources that do the same."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                node.body = node.body[1:]
    return ast.dump(tree)


def _git(root: Path, *arguments: str) -> str:
    command = ["git", "-C", str(root), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@functools.cache
def changed_since(revision: str, root: Path = ROOT) -> frozenset[Path] | None:
    """Files of the packages whose code differs from that of a revision.

    Args:
        revision: A commit.
        root: The repository.

    Returns:
        The files, or ``None`` if there is no such commit, or no history at all.
    """
    try:
        listed = _git(root, "diff", "--name-only", "--no-renames", revision, "--", *PACKAGES)
        before = set(_git(root, "ls-tree", "-r", "--name-only", revision).splitlines())
        result = set()
        for name in listed.splitlines():
            here = root / name
            if here.suffix != ".py" or not here.exists():
                continue  # what does not exist is not imported by anything
            old = _git(root, "show", f"{revision}:{name}") if name in before else None
            if old is None or code(old) != code(here.read_text()):
                result.add(here)
    except (OSError, subprocess.CalledProcessError):
        return None
    return frozenset(result)


@dataclass(frozen=True)
class Freshness:
    """How many measurements of a benchmark are of the code that is here now.

    Attributes:
        current: Number of measurements of the present code.
        outdated: Number of those made before something that they use has changed, by group.
        unknown: Number of those made with changes that were not committed, or at a revision that
            the repository does not have.
        changed: Modules that have changed since the oldest of the outdated measurements.
    """

    current: int
    outdated: Counter[str]
    unknown: int
    changed: tuple[str, ...]

    def __bool__(self) -> bool:
        """Whether all measurements are of the present code."""
        return not (self.outdated or self.unknown)

    def __str__(self) -> str:
        """One paragraph of Markdown."""
        if self:
            return "All measurements are of the present code."
        parts = []
        if self.outdated:
            groups = [f"{group} ({n})" for group, n in sorted(self.outdated.items())]
            parts.append(
                f"**Outdated: {sum(self.outdated.values())} measurements** were made before code "
                f"that they use was changed: {_some(groups, 12)}. Changed since: "
                f"{_some([f'`{name}`' for name in self.changed], 6)}."
            )
        if self.unknown:
            parts.append(
                f"**{self.unknown} measurements** were made with changes that were not committed, "
                "or at a revision that is not in the history."
            )
        return " ".join([*parts, f"Of the present code: {self.current}."])


def _some(names: list[str], at_most: int) -> str:
    """The first names of a list, and how many more there are."""
    more = len(names) - at_most
    return ", ".join(names[:at_most]) + (f" and {more} more" if more > 0 else "")


def freshness(result: Result, root: Path = ROOT) -> Freshness:
    """Compare the revisions of measurements with the code that is here now.

    Args:
        result: What was measured.
        root: The repository.
    """
    used = {path: name for name, path in sources(result.benchmark, root).items()}
    current, unknown = 0, 0
    outdated: Counter[str] = Counter()
    touched: set[str] = set()
    for key, unit in result.units.items():
        made = result.runs[unit["run"]]
        since = changed_since(made["revision"], root) if made["revision"] else None
        if since is None or (made["changed"] and not since & used.keys()):
            unknown += 1
        elif since & used.keys():
            outdated[key.rpartition("/")[0] or key] += 1
            touched |= {used[path] for path in since & used.keys()}
        else:
            current += 1
    return Freshness(current, outdated, unknown, tuple(sorted(touched)))

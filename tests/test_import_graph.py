"""Imports point one way: from the model's faces down to tensor maths, and never back.

The graph is read off the sources, with imports inside functions and under ``TYPE_CHECKING`` too: a
type that a lower layer needs of a higher one is a dependency like any other.
"""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

import seqgp
from benchmarks.imports import import_statements, module_files

ROOT = Path(seqgp.__file__).parent

#: What a module may import: its own package, its own layer and the layers before it.
LAYERS = (
    ("_version", "progress", "distributed"),
    ("dual",),
    ("likelihoods",),
    ("validation", "observations"),
    ("variational",),
    ("streaming",),
    ("models",),
    ("acquisition", "kernel_scales", "simulated_survey"),
    ("checkpoint",),
    (
        *("active_learner", "ask_tell", "batch_optimizer", "duel_optimizer", "merging"),
        "out_of_core",
        *("monotonic", "plots", "trust_region"),
    ),
    ("ax",),
    ("seqgp",),  # the package's own __init__
)
LAYER_OF = {part: layer for layer, parts in enumerate(LAYERS) for part in parts}


@functools.cache
def import_graph(root: Path = ROOT) -> dict[str, set[str]]:
    """The modules of the same package that each module imports.

    ``from package import name`` is an import of ``package.name`` if that is a module, and of the
    package's ``__init__`` otherwise.
    """
    files = module_files(root)
    graph: dict[str, set[str]] = {}
    for name, path in files.items():
        package = name if path.name == "__init__.py" else name.rpartition(".")[0]
        graph[name] = set()
        for module, taken in import_statements(path.read_text(), package):
            within = {f"{module}.{each}" for each in taken}
            graph[name] |= within & files.keys()
            if not taken or within - files.keys():
                graph[name] |= {module} & files.keys()
    return graph


def cycles(graph: dict[str, set[str]]) -> list[set[str]]:
    """Largest sets of modules each of which can be reached from each other."""
    reachable = {name: set(direct) for name, direct in graph.items()}
    for middle in graph:  # Warshall's algorithm
        for name in graph:
            if middle in reachable[name]:
                reachable[name] |= reachable[middle]
    knots = [
        {other for other in reachable[name] if name in reachable[other]}
        for name in graph
        if name in reachable[name]
    ]
    return [knot for k, knot in enumerate(knots) if knot not in knots[:k]]


def part_of(module: str) -> str:
    """The part of the library that a module belongs to, as in `LAYERS`."""
    return module.split(".")[1] if "." in module else module


def test_every_part_has_a_layer() -> None:
    assert {part_of(module) for module in import_graph()} == LAYER_OF.keys()


@pytest.mark.parametrize("part", LAYER_OF)
def test_imports_point_downwards(part: str) -> None:
    upwards = {
        f"{module} imports {other}"
        for module, others in import_graph().items()
        for other in others
        if part_of(module) == part and LAYER_OF[part_of(other)] > LAYER_OF[part]
    }
    assert upwards == set()


def test_there_are_no_cycles() -> None:
    assert cycles(import_graph()) == []


def test_graph_and_cycles_of_a_small_package(tmp_path: Path) -> None:
    """Imports of all kinds are found, and knots are."""
    sources = {
        "__init__": "from .a import name",
        "a": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from toy.sub import b, f",
        "sub/__init__": "import os\nfrom . import b\nfrom ..c import name",
        "sub/b": "def f():\n    import toy.a",
        "c": "import importlib\nd = importlib.import_module('toy.d')",
        "d": "",
    }
    for name, source in sources.items():
        path = tmp_path / "toy" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    graph = import_graph(tmp_path / "toy")
    assert graph == {
        "toy": {"toy.a"},
        "toy.a": {"toy.sub", "toy.sub.b"},
        "toy.c": {"toy.d"},
        "toy.d": set(),
        "toy.sub": {"toy.sub.b", "toy.c"},
        "toy.sub.b": {"toy.a"},
    }
    assert cycles(graph) == [{"toy.a", "toy.sub", "toy.sub.b"}]

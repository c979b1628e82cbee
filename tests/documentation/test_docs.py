"""The documentation: it builds without warnings, and has everything in it."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from sphinx.util.inventory import InventoryFile

import seqgp
import seqgp.ax
from seqgp import (
    acquisition,
    batch_optimizer,
    checkpoint,
    dual,
    kernel_scales,
    plots,
    simulated_survey,
    streaming,
)

ROOT = Path(__file__).parent.parent.parent

#: Modules, and the names that users call them by.
PUBLIC: list[tuple[ModuleType, list[str]]] = [
    (seqgp, [name for name in seqgp.__all__ if name not in ("__version__", "plots")]),
    (acquisition, acquisition.__all__),
    (checkpoint, checkpoint.__all__),
    (simulated_survey, ["Country", "make_country", "read_country"]),
    (kernel_scales, kernel_scales.__all__),
    (batch_optimizer, ["BatchOptimizer"]),
    (streaming, ["MemoryOptions"]),
    (plots, plots.__all__),
]
NAMES = [(module, name) for module, names in PUBLIC for name in names]


def is_result(thing: object) -> bool:
    """Whether it is only ever returned, or warned of: the example is that of what returns it."""
    if not inspect.isclass(thing) or thing is simulated_survey.Country:
        return False
    return issubclass(thing, tuple | Warning)


@pytest.mark.parametrize(("module", "name"), NAMES, ids=[name for _, name in NAMES])
def test_public_names_have_an_example_that_runs(module: ModuleType, name: str) -> None:
    thing = getattr(module, name)
    assert thing.__doc__
    if not is_result(thing):
        assert ">>>" in thing.__doc__
        assert "Args:" in thing.__doc__ or "Attributes:" in thing.__doc__


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, as ``make docs`` builds it."""
    site = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html", "docs", site],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return site


@pytest.mark.slow
def test_everything_is_in_the_site(built: Path) -> None:
    with (built / "objects.inv").open("rb") as file:
        inventory = InventoryFile.load(file, "", lambda base, path: path)
    known = {name for kind in inventory if kind.startswith("py:") for name in inventory[kind]}
    others = [
        (module, name)
        for module in (dual, seqgp.ax)
        for name in module.__all__
        if callable(getattr(module, name))
    ]
    for module, name in [*NAMES, *others]:
        assert f"{module.__name__}.{name}" in known or f"seqgp.{name}" in known, name
    members = ("update", "update_stream", "forget", "fantasize", "posterior", "memory", "num_seen")
    for member in members:
        assert f"seqgp.SequentialGP.{member}" in known, member


@pytest.mark.slow
def test_pages_are_not_empty(built: Path) -> None:
    for page in ("index", "tutorials", "method", "benchmarks", "api/model", "api/dual"):
        assert len((built / f"{page}.html").read_text()) > 10_000


def test_promises_name_tests_that_exist() -> None:
    text = (ROOT / "docs" / "promises.md").read_text()
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", text)
    assert len(named) > 20
    for path, function in named:
        assert f"\ndef {function}(" in (ROOT / path).read_text(), (path, function)
    promises = [line for line in text.split("## What is not")[0].splitlines() if line[:2] == "* "]
    assert len(promises) <= len(named)

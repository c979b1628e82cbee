"""The documentation: it builds without warnings, and has everything in it."""

from __future__ import annotations

import inspect
import json
import re
from html import unescape
from pathlib import Path
from types import ModuleType
from urllib.parse import unquote

import pytest
from sphinx.cmd.build import build_main as build_site
from sphinx.util.inventory import InventoryFile

import seqgp
import seqgp.ax
from benchmarks import __main__ as benchmarks_main
from docs.gallery import TUTORIALS
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
from tests.processes import printed_by

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
    """The site, as ``make docs`` builds it, but for the figures of tutorials: they are not run."""
    site = tmp_path_factory.mktemp("site")
    options = ["-W", "--keep-going", "-q", "-b", "html", "-D", "plot_gallery=0"]

    def build() -> None:
        assert build_site([*options, str(ROOT / "docs"), str(site)]) == 0

    printed_by(build, ROOT)
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
    for page in (
        "index",
        "tutorials/index",
        "tutorials/robot",
        "method",
        "benchmarks",
        "api/model",
        "api/dual",
    ):
        assert len((built / f"{page}.html").read_text()) > 10_000


@pytest.mark.slow
def test_links_of_the_site_lead_somewhere(built: Path) -> None:
    pages = {path: path.read_text() for path in built.rglob("*.html")}
    targets = {path: set(re.findall(r'\bid="([^"]+)"', text)) for path, text in pages.items()}
    number = 0
    for page, text in pages.items():
        for link in re.findall(r'\b(?:href|src)="([^"]+)"', text):
            if link.startswith(("http:", "https:", "mailto:", "data:", "javascript:")):
                continue
            file, _, fragment = unescape(link).partition("#")
            target = (page.parent / file.partition("?")[0]).resolve() if file else page
            assert target.exists(), (page.name, link)
            # Sources link back to where Sphinx thinks that a name is documented.
            if fragment and target in targets and "_modules" not in page.parts:
                assert unquote(fragment) in targets[target], (page.name, link)
            number += 1
    assert number > 1000


@pytest.mark.slow
def test_tutorials_can_be_downloaded_as_notebooks(built: Path) -> None:
    for name in TUTORIALS:
        page = (built / "tutorials" / f"{name}.html").read_text()
        assert f"{name}.ipynb" in page
        (notebook,) = built.glob(f"_downloads/*/{name}.ipynb")
        cells = json.loads(notebook.read_text())["cells"]
        assert {cell["cell_type"] for cell in cells} == {"markdown", "code"}
        assert len(cells) >= 4  # text, code, text, code


def test_every_tutorial_is_in_the_gallery() -> None:
    scripts = [p.stem for p in (ROOT / "tutorials").glob("*.py") if "def main(" in p.read_text()]
    assert sorted(scripts) == sorted(TUTORIALS)
    by_job = re.findall(r":doc:`(\w+)`", (ROOT / "tutorials" / "GALLERY_HEADER.txt").read_text())
    assert by_job == list(TUTORIALS)


def test_promises_name_tests_that_exist() -> None:
    text = (ROOT / "docs" / "promises.md").read_text()
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", text)
    assert len(named) > 20
    for path, function in named:
        assert f"\ndef {function}(" in (ROOT / path).read_text(), (path, function)
    # Each bullet has one of its own.
    for promise in re.split(r"\n\* ", text.split("## What is not")[0])[1:]:
        assert re.search(r"`tests/[\w/]+\.py::\w+`", promise), promise


def test_contributors_are_sent_to_files_that_exist() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    named = re.findall(r"`((?:seqgp|tests|docs)/[\w/]+\.py)`", text)
    assert len(named) > 10
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_tables_are_those_of_the_committed_results() -> None:
    page = benchmarks_main.PAGE.read_text()
    for name in benchmarks_main.ON_PAGE:
        block = f"{benchmarks_main.comment_of(name)}\n{benchmarks_main.whole_table(name)}\n"
        assert block in page, f"{name}: python -m benchmarks report"

"""Every Python block of the README and of the pages of the site runs as it stands."""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import matplotlib as mpl
import pytest
import torch
from botorch.exceptions.warnings import BotorchWarning

from benchmarks import headlines
from tests.models.acquisition_table import render

ROOT = Path(__file__).parent.parent.parent
README, GUIDE = ROOT / "README.md", ROOT / "docs" / "guide.md"
PAGES = sorted(path for folder in ("", "tours") for path in (ROOT / "docs" / folder).glob("*.md"))
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(*files: Path) -> Iterator[tuple[Path, int, str]]:
    """Files, line numbers and sources."""
    for file in files or (README, *PAGES):
        text = file.read_text()
        for match in BLOCK.finditer(text):
            yield file, text.count("\n", 0, match.start(1)), match.group(1)


@functools.cache
def run(file: Path, line: int, source: str) -> dict[str, object]:
    """Execute a block in a namespace of its own; tracebacks show the file's lines."""
    namespace: dict[str, object] = {"__name__": "__main__"}
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        warnings.simplefilter("error", BotorchWarning)
        # Of linear_operator's sparse tensors, as in pyproject.toml.
        warnings.filterwarnings("ignore", "Sparse invariant checks are implicitly disabled")
        exec(compile("\n" * line + source, str(file), "exec"), namespace)
    return namespace


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)
    mpl.use("Agg")


def test_there_are_examples() -> None:
    assert len(list(blocks(README))) == 3  # a stream, a BoTorch loop, Ax
    assert len(list(blocks(GUIDE))) >= 5
    assert len(list(blocks(ROOT / "docs" / "cookbook.md"))) >= 10


def parameters(file: Path, line: int, source: str) -> Any:
    """Of a test of a block: a quick run leaves out those that optimise something."""
    engine = re.search(r"^import (dask|ray)$", source, re.MULTILINE)
    slow = engine or re.search(r"\b(BatchOptimizer|optimize_acqf|Client|PeriodicKernel)\(", source)
    marks = [pytest.mark.slow] if slow else []
    if engine is not None and find_spec(engine[1]) is None:  # the extras `test` and `cluster`
        marks.append(pytest.mark.skip(reason=f"{engine[1]} is not installed"))
    return pytest.param(file, line, source, id=f"{file.stem}-line{line}", marks=marks)


@pytest.mark.parametrize(("file", "line", "source"), [parameters(*block) for block in blocks()])
def test_block_runs(file: Path, line: int, source: str) -> None:
    assert run(file, line, source)["__name__"] == "__main__"


def test_sums_example_predicts_villages() -> None:
    """From counts of districts; within what the posterior says of its errors."""
    block = next(block for block in blocks(GUIDE) if "by_village" in block[2])
    namespace: dict[str, Any] = dict(run(*block))
    error = namespace["by_village"].mean.squeeze(-1) - namespace["rate"].log().flatten()
    assert float(error.square().mean().sqrt().detach()) < 0.05  # rates have a spread of .53
    deviation = namespace["by_village"].variance.squeeze(-1).sqrt()
    assert float((error.abs() < 2 * deviation).double().mean()) > 0.9


def test_stream_example_predicts_the_rate() -> None:
    block = next(block for block in blocks() if "PoissonLikelihood" in block[2])
    names = run(*block)
    x = torch.tensor([[1.6], [4.7]])
    f = names["model"](x)  # type: ignore[operator]
    truth = (4 + 3 * torch.sin(x.squeeze(-1))).expm1().log()  # the link is softplus
    assert ((f.mean - truth).abs() < 3 * f.variance.sqrt()).all()
    assert f.variance.sqrt().max() < 0.4
    torch.testing.assert_close(names["rate"], torch.nn.functional.softplus(f.mean))


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["dask", "ray"])
def test_tasks_learn_what_one_model_does(engine: str) -> None:
    block = next(block for block in blocks() if f"\nimport {engine}\n" in f"\n{block[2]}")
    if find_spec(engine) is None:
        pytest.skip(f"{engine} is not installed")
    together = run(*block)["together"]
    assert (together.num_seen, together.num_data) == (300, 0)  # type: ignore[attr-defined]
    X = torch.rand(50, 2, dtype=torch.double, generator=torch.manual_seed(9))
    Y = torch.sin(6 * X).sum(-1, keepdim=True)
    assert (together.posterior(X).mean - Y).abs().mean() < 0.1  # type: ignore[attr-defined]


@pytest.mark.slow
def test_fantasy_example_has_the_shape_it_says() -> None:
    block = next(block for block in blocks() if "fantasize" in block[2])
    names = run(*block)
    mean = names["fantasies"].posterior(names["X"]).mean  # type: ignore[attr-defined]
    assert mean.shape == (16, 8, 50, 1)


def test_table_of_acquisition_functions_is_the_tested_one() -> None:
    assert f"tests/models/acquisition_table.py -->\n{render()}\n<!-- end -->" in GUIDE.read_text()


def test_headlines_are_those_of_the_committed_results() -> None:
    block = f"{headlines.START}\n{headlines.render()}\n{headlines.END}"
    assert block in README.read_text()


def test_readme_is_a_page() -> None:
    assert len(README.read_text().splitlines()) <= 150


def test_links_lead_somewhere() -> None:
    """Files that are no pages of the site: `test_docs.py` checks the links of those."""
    pages = [ROOT / "benchmarks" / "results" / "README.md", ROOT / "tutorials" / "README.md"]
    for file in (*ROOT.glob("*.md"), *pages):
        for link, anchor in re.findall(r"\]\(([^)#]*)#?([^)]*)\)", file.read_text()):
            if link.startswith("http"):
                continue
            target = file.parent / link
            assert target.exists(), (file.name, link)
            if anchor:
                assert anchor in anchors(target.read_text()), (file.name, link, anchor)


def anchors(text: str) -> set[str]:
    """Those that GitHub gives to headings."""
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}

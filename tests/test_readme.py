"""Every Python block of the README runs as it stands."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.botorch.acquisition_table import render

README = Path(__file__).parent.parent / "README.md"
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks() -> Iterator[tuple[int, str]]:
    """Line numbers and sources."""
    text = README.read_text()
    for match in BLOCK.finditer(text):
        yield text.count("\n", 0, match.start(1)), match.group(1)


def run(line: int, source: str) -> dict[str, object]:
    """Execute a block in a namespace of its own; tracebacks show the README's lines."""
    namespace: dict[str, object] = {"__name__": "__main__"}
    exec(compile("\n" * line + source, str(README), "exec"), namespace)
    return namespace


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def test_there_are_examples() -> None:
    assert len(list(blocks())) >= 2


@pytest.mark.parametrize(
    ("line", "source"), [pytest.param(*block, id=f"line{block[0]}") for block in blocks()]
)
def test_block_runs(line: int, source: str) -> None:
    run(line, source)


def test_stream_example_predicts_the_rate() -> None:
    block = next(block for block in blocks() if "PoissonLikelihood" in block[1])
    rate = run(*block)["rate"]
    torch.testing.assert_close(rate, torch.tensor([7.0, 1.0]), rtol=0, atol=0.7)


def test_fantasy_example_has_the_shape_it_says() -> None:
    block = next(block for block in blocks() if "fantasize" in block[1])
    names = run(*block)
    mean = names["fantasies"].posterior(names["X"]).mean  # type: ignore[attr-defined]
    assert mean.shape == (16, 8, 50, 1)


def test_table_of_acquisition_functions_is_the_tested_one() -> None:
    assert f"tests/botorch/acquisition_table.py -->\n{render()}\n<!-- end -->" in README.read_text()

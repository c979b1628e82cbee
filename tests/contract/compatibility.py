"""The tables of `docs/compatibility.md`, from the cases that the contract tests check.

``python -m tests.contract.compatibility`` writes them.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from tests.contract.acquisition_cases import CASES, OTHER_MODELS
from tests.contract.differences import BEYOND, REFUSED
from tests.contract.test_optimizers import OPTIMIZERS
from tests.contract.transform_cases import INPUTS, OUTCOMES

PAGE = Path(__file__).parent.parent.parent / "docs" / "compatibility.md"
BEGIN, END = "<!-- tables: python -m tests.contract.compatibility -->", "<!-- end -->"


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A table in Markdown."""
    head = list(head)
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def acquisition_functions() -> str:
    """What each acquisition function is compared with."""
    rows = []
    for name, case in sorted(CASES.items(), key=lambda item: item[0].lower()):
        same = f"to {case.tol:.0e}" if case.compares else "see note"
        slopes = "yes" if case.differentiable else "has none"
        rows.append((f"`{name}`", same, slopes, case.note))
    rows += [(f"`{name}`", "", "", f"Needs {kind}.") for name, kind in OTHER_MODELS.items()]
    return table(("", "value of `SingleTaskGP`", "gradient by finite differences", "note"), rows)


def transforms() -> str:
    """All transforms, which give the posterior of `SingleTaskGP` to 1e-6."""
    rows = [(f"`{name}`", "inputs", case.note) for name, case in INPUTS.items()]
    rows += [(f"`{name}`", "outcomes", case.note) for name, case in OUTCOMES.items()]
    return table(("", "of", "note"), rows)


def beyond() -> str:
    """What only `SequentialGP` can do."""
    rows = [
        (what, f"`{case.theirs.__name__}`: `{case.error.__name__}`")
        for what, case in BEYOND.items()
    ]
    return table(("works with `SequentialGP`", "raises with BoTorch's class"), rows)


def refused() -> str:
    """What raises an error that says what to do."""
    rows = [(what, f"`{case.error.__name__}`", case.instead) for what, case in REFUSED.items()]
    return table(("what", "raises", "instead"), rows)


def render() -> str:
    """All tables, with their headings."""
    optimizers = ", ".join(f"`{name}`" for name in OPTIMIZERS)
    return f"""## Acquisition functions

{acquisition_functions()}

## Transforms

Posterior, conditioning and fantasies are those of `SingleTaskGP` to 1e-6.

{transforms()}

## Optimisers

From the same starting points to the same candidates: {optimizers}.

## What BoTorch's classes cannot do

{beyond()}

## What raises an error

{refused()}
"""


def updated(page: str) -> str:
    """A page whose tables are those of now."""
    before, rest = page.split(BEGIN)
    after = rest.split(END)[1]
    return f"{before}{BEGIN}\n\n{render()}\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(updated(PAGE.read_text()))

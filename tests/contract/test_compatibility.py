from __future__ import annotations

from tests.contract.compatibility import PAGE, updated


def test_page_is_up_to_date() -> None:
    """Run ``python -m tests.contract.compatibility`` if this fails."""
    page = PAGE.read_text()
    assert updated(page) == page

from __future__ import annotations

import pytest

from seqgp import SequentialGP
from tests.contract.differences import BEYOND, REFUSED
from tests.helpers import unscaled

pytestmark = [pytest.mark.usefixtures("float64"), unscaled]


@pytest.mark.parametrize("name", list(BEYOND))
def test_ours_can(name: str) -> None:
    BEYOND[name].do(SequentialGP)


@pytest.mark.parametrize("name", list(BEYOND))
def test_theirs_cannot(name: str) -> None:
    """If this fails, BoTorch has learnt to do it, and the documentation should say so."""
    theirs, error, do = BEYOND[name]
    with pytest.raises(error) as raised:
        do(theirs)
    assert type(raised.value) is error


@pytest.mark.parametrize("name", list(REFUSED))
def test_refused(name: str) -> None:
    refusal = REFUSED[name]
    with pytest.raises(refusal.error, match=refusal.message):
        refusal.do()

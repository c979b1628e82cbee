"""Ratings from 1 to 5: the error says what to do."""

from __future__ import annotations

import pytest
import torch

from seqgp import OrdinalLikelihood, SequentialGP


def test_ratings_that_start_at_one() -> None:
    X = torch.linspace(0, 1, 10, dtype=torch.float64).unsqueeze(-1)
    ratings = torch.arange(10, dtype=torch.float64).remainder(5).unsqueeze(-1) + 1
    with pytest.raises(ValueError, match="if ratings start at 1, pass y - 1"):
        SequentialGP(X, ratings, likelihood=OrdinalLikelihood(5))
    SequentialGP(X, ratings - 1, likelihood=OrdinalLikelihood(5))
    with pytest.raises(ValueError, match=r"seen or not\.$"):  # there is a zero: another mistake
        SequentialGP(X, (ratings - 1) * 2, likelihood=OrdinalLikelihood(5))

"""What is left of observations that have been folded."""

from __future__ import annotations

import torch

from seqgp.dual.duals import zero_duals
from seqgp.dual.sites import Sites
from seqgp.dual.summary import Summary, fold, least_square
from tests.helpers import assert_close


def test_least_square_is_that_of_the_best_fit() -> None:
    """Against ordinary least squares, of more observations than unknowns and of fewer."""
    torch.manual_seed(0)
    for n in (9, 3):
        A, residual = torch.randn(2, 4, n).double(), torch.randn(2, n).double()
        noise = torch.full((2, 1), 0.3).double()
        empty = Summary(zero_duals(A, 4, (2,)), torch.zeros(2).double(), torch.zeros(2).double())
        sites = Sites(residual / noise, (1 / noise).expand_as(residual))
        summary = fold(empty, A, sites, residual, noise)
        fitted = torch.linalg.pinv(A.mT) @ residual.unsqueeze(-1)
        expected = (residual - (A.mT @ fitted).squeeze(-1)).square().sum(-1)
        assert_close(least_square(summary), expected, 1e-6)
        assert_close(least_square(empty), torch.zeros(2).double(), 1e-12)

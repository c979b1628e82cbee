"""Where lengthscales begin."""

from __future__ import annotations

import pytest
import torch
from scipy.spatial.distance import pdist

from seqgp.kernel_scales import median_distance


def test_median_of_all_distances() -> None:
    X = torch.rand(101, 7, dtype=torch.float64)
    distances = torch.from_numpy(pdist(X.numpy()))
    assert median_distance(X) == pytest.approx(float(distances.median()), abs=1e-10)


def test_repeated_inputs_do_not_count() -> None:
    X = torch.tensor([[0.0], [0.0], [0.0], [3.0]])
    assert median_distance(X) == 3
    for wrong in (X[:3], X[:1], X.squeeze(-1)):
        with pytest.raises(ValueError, match="X: "):
            median_distance(wrong)

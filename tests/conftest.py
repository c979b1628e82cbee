from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

torch.set_num_threads(1)  # small tensors, and a worker for each core


@pytest.fixture(scope="module")
def float64() -> Iterator[None]:
    """Make everything in float64, in which GPyTorch's quadrature nodes are exact as well.

    For the whole module, so that Hypothesis may use it: ``pytestmark = usefixtures("float64")``.
    """
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)

"""Tensors are counted before they are made."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from gpytorch.kernels import LinearKernel, RBFKernel
from torch import Tensor

from seqgp.checkpoint.limits import AllocationLimit
from seqgp.checkpoint.storage import CheckpointError

MAKERS: dict[str, Callable[[], Tensor]] = {
    "zeros": lambda: torch.zeros(3, 4),
    "ones": lambda: torch.ones((3, 4)),
    "empty": lambda: torch.empty(torch.Size([3, 4]), dtype=torch.long),
    "randn": lambda: torch.randn(*(3, 4), 1),
    "size=": lambda: torch.rand(size=(3, 4)),
    "full": lambda: torch.full((3, 4), 1000),
    "full by names": lambda: torch.full(fill_value=1000, size=[3, 4]),
    "randint": lambda: torch.randint(5, 1000, (3, 4)),
    "normal": lambda: torch.normal(5.0, 1.0, (12,)),
    "empty_strided": lambda: torch.empty_strided((3, 4), (4, 1)),
    "eye": lambda: torch.eye(3, 4),
    "arange": lambda: torch.arange(12),
    "arange from": lambda: torch.arange(1000, 1012),
    "arange by": lambda: torch.arange(0, -6, -0.5),
    "arange by names": lambda: torch.arange(start=1, end=13),
    "linspace": lambda: torch.linspace(0, 1e9, 12),
    "linspace by names": lambda: torch.linspace(0, 1e9, steps=12),
    "randperm": lambda: torch.randperm(12),
    "new_zeros": lambda: torch.tensor(1.0).new_zeros(3, 4),
    "new_full": lambda: torch.tensor(1.0).new_full((3, 4), 1000.0),
    "expand": lambda: torch.tensor([1.0]).expand(3, 4),
    "repeat": lambda: torch.tensor([1.0, 2.0, 3.0]).repeat(2, 2),
}


@pytest.mark.parametrize("name", list(MAKERS))
def test_elements_are_counted(name: str) -> None:
    made = MAKERS[name]()
    assert made.numel() == 12
    with AllocationLimit(12) as limit:
        MAKERS[name]()
        assert limit.left == 0
    with pytest.raises(CheckpointError, match="too many elements"), AllocationLimit(11):
        MAKERS[name]()


def test_all_together() -> None:
    with AllocationLimit(100):
        for _ in range(9):
            torch.zeros(11)
        with pytest.raises(CheckpointError):
            torch.zeros(11)
    torch.zeros(1000)  # and nothing outside


def test_data_are_not_sizes() -> None:
    with AllocationLimit(10):
        torch.tensor([1000, 1000, 1000])
        torch.tensor(10**12) + torch.tensor(10**15)
        torch.tensor([1.0, 2.0]).sum([0]).reshape(1, 1).permute(1, 0)


@pytest.mark.parametrize("device", ["cpu", None])
def test_constructors(device: str | None) -> None:
    with torch.device(device or torch.get_default_device()):
        for make in (
            lambda: RBFKernel(ard_num_dims=10**12),
            lambda: RBFKernel(batch_shape=torch.Size([10**6, 10**6])),
            lambda: LinearKernel(batch_shape=torch.Size([10**12])),
        ):
            with pytest.raises(CheckpointError), AllocationLimit(10**6):
                make()

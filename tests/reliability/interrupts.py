"""Interrupts at any line of the library, and what a model was before them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from seqgp import SequentialGP


def snapshot(model: SequentialGP) -> list[Tensor]:
    """Everything that an update changes."""
    held = model.stream.observations
    counts = torch.tensor([model.num_seen, model.num_updates])
    # Not all buffers are in a state. Those of the strategy that are not are made when needed.
    buffers = [b for name, b in model.named_buffers() if not name.startswith("variational")]
    state = [*model.state_dict().values(), *buffers]
    tensors = [*state, held.inputs, held.targets, model.memory_weights]
    return [tensor.clone() for tensor in (*tensors, counts)]


def is_same(a: list[Tensor], b: list[Tensor]) -> bool:
    """Whether two snapshots are the same, bit by bit."""
    return all(
        x.shape == y.shape and x.dtype == y.dtype and torch.equal(x, y)
        for x, y in zip(a, b, strict=True)
    )


class Interrupts:
    """Raises a KeyboardInterrupt at some of the lines of the library that are executed."""

    def __init__(self, at: set[int]) -> None:
        self.at, self.lines = at, 0

    def __call__(self, frame: FrameType, event: str, argument: Any) -> Callable[..., Any] | None:
        if "/seqgp/" not in frame.f_code.co_filename:
            return None
        if event == "line":
            self.lines += 1
            if self.lines in self.at:
                raise KeyboardInterrupt
        return self

    def run(self, action: Callable[[], object]) -> bool:
        """Whether the action was interrupted."""
        before = sys.gettrace()
        sys.settrace(self)
        try:
            action()
        except KeyboardInterrupt:
            return True
        finally:
            sys.settrace(before)
        return False

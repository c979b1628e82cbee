"""How much memory may be taken while a model is built from a file.

Files are small, but what they say can be large: a kernel of 10^12 dimensions is a few bytes. No
constructor checks that, so the tensors that constructors make are counted, before they are made.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from seqgp.checkpoint.storage import CheckpointError

#: Makers of tensors that are told numbers of elements, not a shape.
_COUNTED = {"eye", "randperm", "tril_indices", "triu_indices"}


class AllocationLimit(TorchDispatchMode):
    """Raise a `CheckpointError` inside of it before tensors of too many elements are made.

    Counted are the elements of all tensors that are made from a shape, temporary ones included.

    Args:
        elements: How many there may be in total.

    Example:
        >>> import torch
        >>> with AllocationLimit(1000):
        ...     x = torch.zeros(20, 20)
        ...     try:
        ...         torch.ones(10**9, 10**9)
        ...     except CheckpointError as error:
        ...         print(error)
        The checkpoint describes tensors with too many elements.
    """

    def __init__(self, elements: int) -> None:
        super().__init__()
        self._left = elements

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Count, then call.

        Args:
            func: An operation of torch.
            types: Of its tensors.
            args: Its arguments.
            kwargs: Its keyword arguments.
        """
        self._left -= _num_elements(func.overloadpacket.__name__, args)
        if self._left < 0:
            raise CheckpointError("The checkpoint describes tensors with too many elements.")
        return func(*args, **(kwargs or {}))


def _num_elements(name: str, args: tuple[Any, ...]) -> int:
    """At most how many elements the result of an operation has, as far as arguments tell."""
    if name == "arange":
        start, end = (0, args[0]) if len(args) == 1 else args[:2]
        step = args[2] if len(args) > 2 else 1
        return math.ceil(abs((end - start) / step))
    if name in ("linspace", "logspace"):
        return int(args[2])
    if name in _COUNTED:
        return math.prod(n for n in args if type(n) is int)
    for value in args:
        # The first list of numbers is a shape; strides follow.
        if isinstance(value, list | tuple) and all(type(size) is int for size in value):
            times = args[0].numel() if name == "repeat" and isinstance(args[0], Tensor) else 1
            return times * math.prod(abs(size) for size in value)
    return 0

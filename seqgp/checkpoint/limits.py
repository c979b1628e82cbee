"""A limit on the memory that is allocated while a model is built from a file.

Files are small, but what they say can be large: a kernel of 10^12 dimensions is a few bytes. No
constructor checks that, so the tensors that constructors make are counted, before they are made.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

from seqgp.checkpoint.storage import CheckpointError

#: Makers of tensors whose arguments are sizes, one by one or as a list.
_SIZED = {
    *("empty", "eye", "ones", "rand", "randn", "randperm", "tril_indices", "triu_indices", "zeros"),
    *("broadcast_to", "expand", "new_empty", "new_ones", "new_zeros", "repeat", "tile"),
}
#: Makers of tensors with a list of sizes, among other arguments.
_SHAPED = {"empty_strided", "full", "new_empty_strided", "new_full", "normal", "randint"}


class AllocationLimit(TorchFunctionMode):
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
        self.left = elements

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Count, then call.

        Args:
            func: A function of torch.
            types: Of its tensors.
            args: Its arguments.
            kwargs: Its keyword arguments.
        """
        kwargs = kwargs or {}
        self.left -= _num_elements(getattr(func, "__name__", ""), args, kwargs)
        if self.left < 0:
            raise CheckpointError("The checkpoint describes tensors with too many elements.")
        return func(*args, **kwargs)


def _num_elements(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    """At most how many elements the tensor has that a function makes; 0 if it makes none."""
    values = (*args, *kwargs.values())
    if name == "arange":
        start, end, step = _range_of(*(value for value in values if type(value) in (int, float)))
        return math.ceil(abs((end - start) / step))
    if name in ("linspace", "logspace"):
        return int(kwargs["steps"] if "steps" in kwargs else args[2])
    if name in _SIZED:
        times = args[0].numel() if name in ("repeat", "tile") else 1
        return times * math.prod(abs(size) for size in _sizes(values))
    if name in _SHAPED:
        shapes = (value for value in values if isinstance(value, list | tuple))
        return math.prod(abs(size) for size in next(shapes, ()))
    return 0


def _range_of(first: float, second: float | None = None, step: float = 1) -> tuple[float, ...]:
    """Start, end and step of what is given to ``arange``."""
    return (0, first, step) if second is None else (first, second, step)


def _sizes(values: Iterable[Any]) -> Iterator[int]:
    """All whole numbers in arguments, and in lists of them."""
    for value in values:
        if type(value) is int:
            yield value
        elif isinstance(value, list | tuple) and not isinstance(value, Tensor):
            yield from _sizes(value)

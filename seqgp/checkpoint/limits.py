"""A limit on the memory that is allocated while a model is built from a file.

A small file can describe large tensors: a kernel of 10^12 dimensions is a few bytes. No constructor
checks that, so the elements of new tensors are counted before they are allocated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

from seqgp.checkpoint.storage import CheckpointError

#: Functions that create tensors and whose arguments are sizes, one by one or as a list.
_SIZED = {
    *("empty", "eye", "ones", "rand", "randn", "randperm", "tril_indices", "triu_indices", "zeros"),
    *("broadcast_to", "expand", "new_empty", "new_ones", "new_zeros", "repeat", "tile"),
}
#: Functions that create tensors from a list of sizes, among other arguments.
_SHAPED = {"empty_strided", "full", "new_empty_strided", "new_full", "normal", "randint"}


class AllocationLimit(TorchFunctionMode):
    """A context that raises a `CheckpointError` before tensors with too many elements are created.

    All tensors that are created from a shape count, including temporary ones.

    Args:
        elements: The maximum number of elements in total.

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
        """Count elements, then call the function.

        Args:
            func: A function of torch.
            types: The types of its tensors.
            args: Its arguments.
            kwargs: Its keyword arguments.
        """
        kwargs = kwargs or {}
        self.left -= _num_elements(getattr(func, "__name__", ""), args, kwargs)
        if self.left < 0:
            raise CheckpointError("The checkpoint describes tensors with too many elements.")
        return func(*args, **kwargs)


def _num_elements(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    """Return an upper limit for the number of elements that a function creates; 0 for none."""
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
    """Return start, end and step of the arguments of ``arange``."""
    return (0, first, step) if second is None else (first, second, step)


def _sizes(values: Iterable[Any]) -> Iterator[int]:
    """Yield all whole numbers in arguments, and in lists of them."""
    for value in values:
        if type(value) is int:
            yield value
        elif isinstance(value, list | tuple) and not isinstance(value, Tensor):
            yield from _sizes(value)

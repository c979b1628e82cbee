"""Counts host synchronisations, and all torch operations, without a GPU.

On CUDA, an operation whose result the host needs (``.item()``, ``bool(tensor)``, ``torch.equal``,
``nonzero``, ...) waits until the device has computed everything before it. On the CPU the same
operations pass through the dispatcher, where they can be counted::

    with Synchronisations() as counter:
        model.posterior(X).mean
    print(counter.count, counter.operations)
    print(table(counter.sources))

The count is an upper bound: ``torch.equal`` does not wait where sizes differ or both arguments are
the same memory, and is counted all the same, but labelled. Copies between host and device are no
operations on the CPU (``.cpu()``, ``.tolist()``, and ``torch.tensor(..., device=)``, which waits as
well); ``tests/pretend_cuda.py`` counts them.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import seqgp

#: Operations whose result, or the size of whose result, the host has to know.
SYNCHRONISING = frozenset(
    {
        "aten::_local_scalar_dense",  # item, float, int and bool
        "aten::is_nonzero",
        "aten::equal",
        "aten::allclose",
        "aten::nonzero",
        "aten::_unique2",
        "aten::unique_dim",
        "aten::unique_consecutive",
        "aten::unique_dim_consecutive",
        "aten::masked_select",
        "aten::multinomial",  # checks its probabilities
        "aten::bincount",
        "aten::_linalg_check_errors",  # `torch.linalg.cholesky` and the like, unlike `cholesky_ex`
        "aten::_linalg_eigh",
        "aten::_linalg_svd",
        "aten::linalg_eig",
        "aten::linalg_lstsq",
    }
)

#: Operations that look for the non-zero elements of a mask.
_INDEXING = frozenset({"aten::index", "aten::index_put", "aten::index_put_"})

_HARNESS = ("synchronisation", "pretend_cuda")
_PACKAGE = str(Path(seqgp.__file__).parent)
_ROOT = str(Path(seqgp.__file__).parent.parent)
#: Lines of these say nothing about why something was computed.
_NOT_SHOWN = (str(Path(torch.__file__).parent), *(f"{_ROOT}/tests/{name}.py" for name in _HARNESS))


class Source(NamedTuple):
    """Where a synchronisation comes from.

    Attributes:
        operation: What waits, ``equal`` say; for one that would not wait, in brackets why.
        ours: The innermost line of seqgp on the stack, ``file:line function``, or an empty string.
        library: The innermost line of all outside of torch, if that is another one.
    """

    operation: str
    ours: str
    library: str


def synchronises(name: str, args: tuple[Any, ...]) -> bool:
    """Whether an operation would make the host wait for a device.

    Args:
        name: The name in its schema, ``aten::index`` say.
        args: Its positional arguments.
    """
    if name in SYNCHRONISING:
        return True
    if name not in _INDEXING:
        return False
    if name != "aten::index" and args[2].numel() == 1:
        return False  # a `masked_fill`
    masks = (torch.bool, torch.uint8)
    return any(isinstance(i, torch.Tensor) and i.dtype in masks for i in tree_leaves(args[1]))


class Synchronisations(TorchDispatchMode):
    """Counts synchronisations and operations while it is active.

    Attributes:
        operations: The number of all torch operations, views included.
        sources: Where each synchronisation came from, with the number of times.
    """

    def __init__(self) -> None:
        super().__init__()
        self.operations = 0
        self.sources: Counter[Source] = Counter()

    @property
    def count(self) -> int:
        """The number of synchronisations."""
        return self.sources.total()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.operations += 1
        name = func._schema.name
        if synchronises(name, args):
            self.sources[source(_label(name, args), sys._getframe(1))] += 1
        return func(*args, **(kwargs or {}))


def _label(name: str, args: tuple[Any, ...]) -> str:
    """The name of an operation; of an `equal` that the host can answer alone, with the reason."""
    short = name.removeprefix("aten::")
    if name != "aten::equal":
        return short
    a, b = args
    if a.shape != b.shape:
        return f"{short} (sizes differ)"
    same = a.data_ptr() == b.data_ptr() and a.stride() == b.stride()
    return f"{short} (same memory)" if same else short


def source(operation: str, frame: FrameType | None) -> Source:
    """Where on a stack an operation comes from.

    Args:
        operation: Its name.
        frame: The innermost frame to look at.
    """
    library = ""
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(_PACKAGE):
            ours = _describe(frame)
            return Source(operation, ours, "" if library in ("", ours) else library)
        if not library and not file.startswith(_NOT_SHOWN):
            library = _describe(frame)
        frame = frame.f_back
    return Source(operation, "", library)


def _describe(frame: FrameType) -> str:
    file = frame.f_code.co_filename.removeprefix(_ROOT + "/").rpartition("site-packages/")[2]
    return f"{file}:{frame.f_lineno} {frame.f_code.co_name}"


def table(sources: Counter[Source]) -> str:
    """Sources, most frequent first, one on a line.

    Args:
        sources: The number of synchronisations from each; those of two counters can be subtracted.
    """
    lines = []
    for source, number in sources.most_common():
        through = f"  <- {source.library}" if source.library else ""
        lines.append(f"{number:5d}  {source.operation:20s}  {source.ours}{through}")
    return "\n".join(lines)

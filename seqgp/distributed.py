"""Processes that share one data set, each with a shard of it, on `torch.distributed`.

A posterior is determined by sums over observations. So each process (a *rank*) sums over its own
shard, one all-reduce adds up the sums, and all ranks continue with the same numbers and make the
same decisions.

A rank that fails must not leave the others waiting. Every exchange therefore begins with a short
header that tells whether a rank has failed. A rank that fails anywhere in its own code sends its
next header with that flag (`Ranks.together`), in whatever exchange the others are waiting for, and
all ranks raise its error.
"""

from __future__ import annotations

import builtins
import signal
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from linear_operator.utils.errors import NanError, NotPSDError
from torch import Tensor

#: Tensors with up to this number of elements are gathered, and summed in the order of the ranks.
_SMALL = 1024
#: The kind of an exchange, as part of its header: it has to be the same on all ranks.
_FAILED, _AGREE, _SUM, _GATHER = -1, 0, 1, 2


class Ranks:
    """The processes that share the data of a model; without a group, this one alone.

    All methods except the properties are collective: every rank calls them, in the same order.

    A model does not keep its group alive. So after `torch.distributed.destroy_process_group`, the
    threads of the group end, and the process can exit safely while models still exist. Threads of
    gloo that are running when the interpreter shuts down would abort the process.

    Args:
        process_group: A group of `torch.distributed` (``torch.distributed.group.WORLD`` for all
            processes), ``None`` for this process alone.

    Example:
        >>> import torch
        >>> from seqgp.distributed import Ranks
        >>> alone = Ranks()
        >>> alone.size, alone.gather(torch.ones(3)).shape
        (1, torch.Size([3]))
    """

    def __init__(self, process_group: dist.ProcessGroup | None = None) -> None:
        self._group: weakref.ref[dist.ProcessGroup] | None = None
        self.rank, self.size = 0, 1
        if process_group is not None:
            if not isinstance(process_group, dist.ProcessGroup):
                raise TypeError(
                    "process_group: expected a group of torch.distributed, such as "
                    f"torch.distributed.group.WORLD, got {process_group!r:.60}."
                )
            self._group = weakref.ref(process_group)
            self.rank, self.size = dist.get_rank(process_group), process_group.size()
            config = dist.get_backend_config(process_group)
            #: The backend for each type of device.
            self.backends = dict(pair.split(":") for pair in config.split(","))
        #: Bytes that this rank has contributed to exchanges so far.
        self.bytes_sent = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> Ranks:
        return self  # copies of a model belong to the same processes

    def __reduce__(self) -> Any:
        if self._group is not None:
            raise TypeError(
                "A model with a process_group cannot be pickled: save it with seqgp.save, or "
                "pickle what model.gathered() returns."
            )
        return Ranks, ()

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The process group, ``None`` for this process alone."""
        if self._group is None:
            return None
        group = self._group()
        if group is None:
            raise _marked(
                RuntimeError(
                    "The process_group of this model has been destroyed. Predictions work without "
                    "it; to learn, load a checkpoint into a new group."
                )
            )
        return group

    @property
    def alone(self) -> bool:
        """Whether this is the only process."""
        return self.size == 1

    # ---------------------------------------------------------------- exchanges

    def agree(self) -> None:
        """Wait for all ranks; if one has failed, raise on each of them."""
        self.commit(lambda: None)

    def commit(self, change: Callable[[], None]) -> None:
        """Make a change on all ranks, or on none of them if one has failed.

        Args:
            change: Changes the model of this rank. It cannot be interrupted.
        """
        if self.alone:
            change()
            return
        with _exchange(self):
            self._header(_AGREE, 0, 0)
            try:
                change()
            except BaseException as error:  # the same on all ranks, which have the same data
                raise _marked(error) from None

    def sum(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Return sums of tensors over the ranks, bitwise the same on all of them."""
        if self.alone or not tensors:
            return tensors
        flat = torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
        with _exchange(self):
            self._header(_SUM, 0, 16 * flat.numel() + flat.element_size())
            if flat.numel() <= _SMALL:
                flat = self._all_gather(flat).sum(0)
            else:
                self.bytes_sent += flat.numel() * flat.element_size()
                carried = self._carried(flat)
                dist.all_reduce(carried, group=self.group)
                flat = carried.to(flat.device)
        parts = flat.split([tensor.numel() for tensor in tensors])
        return tuple(p.reshape(t.shape).to(t) for p, t in zip(parts, tensors, strict=True))

    def largest(self, tensor: Tensor) -> Tensor:
        """Return the elementwise maximum over the ranks; NaN where any rank has NaN."""
        return tensor if self.alone else self.gather(tensor.unsqueeze(0), 0).amax(0)

    def gather(self, tensor: Tensor, dim: int = -1) -> Tensor:
        """Concatenate the tensors of all ranks; their sizes may differ in that dimension."""
        if self.alone:
            return tensor
        dim = dim % tensor.dim()
        rows = tensor.detach().movedim(dim, 0)
        with _exchange(self):
            width = rows.shape[1:].numel()
            counts = self._header(_GATHER, len(rows), 16 * width + rows.element_size())
            padded = rows.new_zeros(max(counts), *rows.shape[1:])
            padded[: len(rows)] = rows
            gathered = self._all_gather(padded)
        parts = [part[:count] for part, count in zip(gathered, counts, strict=True)]
        return torch.cat(parts).movedim(0, dim)

    def counts(self, number: int) -> list[int]:
        """Return the numbers of all ranks."""
        if self.alone:
            return [number]
        with _exchange(self):
            return self._header(_GATHER, number, -1)

    def total(self, number: int) -> int:
        """Return the sum of whole numbers over the ranks."""
        return sum(self.counts(number))

    # ---------------------------------------------------------------- gradients

    def totalled(self, share: Tensor) -> Tensor:
        """Return the sum over the ranks; the gradient on each rank is that of its own share."""
        if self.alone:
            return share
        (total,) = self.sum(share)
        return total + (share - share.detach()) if share.requires_grad else total

    def shared(self, common: Tensor) -> Tensor:
        """Return a value that all ranks have computed; its gradient is divided among them."""
        if self.alone or not common.requires_grad:
            return common
        return common.detach() + (common - common.detach()) / self.size

    # ---------------------------------------------------------------- failure

    @contextmanager
    def together(self) -> Iterator[None]:
        """Raise an error of one rank on all ranks, at the latest at their next exchange.

        The error is that of the first rank that failed, and names the rank. A rank that has ended,
        or does not answer within the timeout of the group, leads to a `ConnectionError`.
        """
        try:
            yield
        except BaseException as error:
            if self.alone or getattr(error, "is_shared", False):
                raise
            try:
                with _exchange(self):
                    self._header(_FAILED, 0, 0, error)
            except BaseException as shared:
                raise shared from error

    @contextmanager
    def all_or_none(self, restore: Callable[[], None]) -> Iterator[None]:
        """Do the same as `together`, and restore the state unless all ranks have succeeded.

        Args:
            restore: Undoes the changes of this rank. It is not called if there is no group.
        """
        done: list[bool] = []
        try:
            with self.together():
                yield
                self.commit(lambda: done.append(True))
        except BaseException:
            if not self.alone and not done:
                restore()
            raise

    def _header(
        self, kind: int, number: int, key: int, error: BaseException | None = None
    ) -> list[int]:
        """Exchange what each rank is about to do; return the numbers of all ranks, or raise."""
        own = torch.tensor([kind, number, key], device=self._device)
        rows = self._all_gather(own).tolist()
        failed = [rank for rank, row in enumerate(rows) if row[0] == _FAILED]
        if failed:
            text = "" if error is None else f"{type(error).__name__}\n{error}"
            words = torch.tensor(list(text.encode()), dtype=torch.uint8, device=self._device)
            sizes = self._all_gather(own.new_tensor(len(words))).tolist()
            padded = words.new_zeros(max(sizes))
            padded[: len(words)] = words
            message = self._all_gather(padded)[failed[0]][: sizes[failed[0]]]
            raise _shared(bytes(message.tolist()).decode(), failed[0])
        if any(row[0] != kind or row[2] != key for row in rows):
            raise _marked(
                RuntimeError(
                    "The ranks have called different methods of the model, or with options or "
                    "observations of different kinds. All that learns has to be called by every "
                    "rank, in the same order and with the same options."
                )
            )
        return [row[1] for row in rows]

    def _all_gather(self, tensor: Tensor) -> Tensor:
        """Return ``size x ...``: the tensors of all ranks, which have the same shape."""
        carried = self._carried(tensor.contiguous())
        self.bytes_sent += carried.numel() * carried.element_size()
        result = [torch.empty_like(carried) for _ in range(self.size)]
        dist.all_gather(result, carried, group=self.group)
        return torch.stack(result).to(tensor.device)

    def _carried(self, tensor: Tensor) -> Tensor:
        """Move a tensor to a device that the group can exchange; gloo cannot gather on GPUs."""
        kind = tensor.device.type
        direct = kind == "cpu" or self.backends.get(kind) != "gloo"
        return tensor if direct and kind in self.backends else tensor.to(self._device)

    @property
    def _device(self) -> torch.device:
        """The device for headers: the host, if the group supports it."""
        if "cpu" in self.backends:
            return torch.device("cpu")
        kind = next(iter(self.backends))
        return torch.device(kind, torch.get_device_module(kind).current_device())


#: This process, alone.
ALONE = Ranks()


def _marked(error: BaseException) -> BaseException:
    """Mark an error that all ranks raise, so that it is not sent to them again."""
    error.is_shared = True  # type: ignore[attr-defined]
    return error


def _shared(text: str, rank: int) -> BaseException:
    """Return the error that all ranks raise, given that of one of them."""
    name, _, message = text.partition("\n")
    kind = {"NanError": NanError, "NotPSDError": NotPSDError}.get(name, getattr(builtins, name, 0))
    message = f"Rank {rank}: {message}" if message else f"Rank {rank}: {name}"
    if not (isinstance(kind, type) and issubclass(kind, BaseException)):
        kind, message = RuntimeError, f"{message} ({name})"
    try:
        return _marked(kind(message))
    except TypeError:  # its constructor needs more arguments
        return _marked(RuntimeError(f"{message} ({name})"))


@contextmanager
def _exchange(ranks: Ranks) -> Iterator[None]:
    """Run an exchange without interruption; raise an interrupt that arrives meanwhile afterwards.

    If another process has ended or does not answer, raise a `ConnectionError`.
    """
    interrupts: list[Any] = []
    handler = None
    if threading.current_thread() is threading.main_thread():
        handler = signal.getsignal(signal.SIGINT)
        if callable(handler):
            signal.signal(signal.SIGINT, lambda *args: interrupts.append(args))
    try:
        yield
    except RuntimeError as error:
        if getattr(error, "is_shared", False):
            raise
        reason = str(error).splitlines()[0]
        raise _marked(
            ConnectionError(
                f"Rank {ranks.rank} of {ranks.size} has lost another process of the group, which "
                "has ended or does not answer within the timeout. This model is as it was; end "
                f"all processes, and resume from a checkpoint ({reason:.200})."
            )
        ) from error
    finally:
        if callable(handler):
            signal.signal(signal.SIGINT, handler)
    if interrupts and callable(handler):
        handler(*interrupts[0])

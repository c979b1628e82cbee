"""A device that does not exist: tensors that say they are elsewhere and compute on the CPU.

It proves without a GPU that nothing mixes devices, and that everything else works there::

    with PretendCUDA() as device:
        X = torch.rand(20, 2).to(DEVICE)
        model = SequentialGP(X, X.sum(-1, keepdim=True))
        model.posterior(X).mean  # a tensor on DEVICE
        model.posterior(X.cpu())  # RuntimeError: Expected all tensors to be on the same device
    print(table(device.waits))  # what the host had to wait for, and where

What holds on CUDA holds here:

* an operation on tensors of both devices raises, but for CPU tensors without dimensions in
  elementwise operations, indices on the CPU, and copies;
* random numbers on the device need a generator of the device: one of the CPU raises;
* ``.numpy()`` raises, ``.cpu()``, ``.item()``, ``bool()`` and ``.tolist()`` bring values back;
* factories (``torch.zeros(..., device=)``, ``new_zeros``, ``torch.tensor``) put them there;
* ``module.to(DEVICE)`` keeps its parameters as objects (here unless a graph refers to them);
* ``torch.save`` and ``copy.deepcopy`` work.

Values are those of the CPU, random numbers too, so results can be compared bit by bit. Of kernels
that are different on a real GPU, nothing is learnt.

The device calls itself ``meta``, the only one beside the CPU that a build of torch without CUDA
allows, and the only one whose gradients are computed in the thread of the caller, where modes are
active. Outside of `PretendCUDA` its tensors can only be printed.
"""

from __future__ import annotations

import gc
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import cache
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from tests.synchronisation import Source, source, synchronises

#: What tensors are moved to: ``X.to(DEVICE)``.
DEVICE = torch.device("meta")

_CPU = torch.device("cpu")

#: Operations that take CPU tensors without dimensions, beside those that are tagged as elementwise.
_TAKE_NUMBERS = frozenset(
    f"aten::{name}"
    for name in ("fill", "fill_", "masked_fill", "masked_fill_", "floor_divide", "rsub")
)
_INDEXING = frozenset({"aten::index", "aten::index_put", "aten::index_put_"})
_COPIES = frozenset({"aten::copy_", "aten::_to_copy"})


class PretendTensor(Tensor):
    """A tensor that holds another one on the CPU, and says that it is on `DEVICE`.

    Args:
        value: The tensor to hold. It is not copied.
    """

    _value: Tensor

    @staticmethod
    def __new__(cls, value: Tensor) -> PretendTensor:
        return Tensor._make_wrapper_subclass(
            cls,
            value.size(),
            strides=value.stride(),
            storage_offset=value.storage_offset(),
            dtype=value.dtype,
            layout=value.layout,
            device=DEVICE,
        )

    def __init__(self, value: Tensor) -> None:
        self._value = value.detach() if value.requires_grad else value

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError(f"{func}: a tensor on the pretended device, outside of PretendCUDA.")

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"PretendTensor({self._value!r})"

    # What torch treats in a special way on "meta", where there are no values.

    @property
    def is_meta(self) -> bool:  # type: ignore[override]
        return False

    def data_ptr(self) -> int:
        return self._value.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self._value.untyped_storage()

    def __deepcopy__(self, memo: dict[int, Any]) -> PretendTensor:
        if not self.is_leaf:
            raise RuntimeError("Only graph leaves support the deepcopy protocol.")
        if id(self) not in memo:
            copied = PretendTensor(self._value.clone())
            memo[id(self)] = copied
            if isinstance(self, torch.nn.Parameter):  # of which torch copies neither gradients
                copied._is_param = True  # type: ignore[attr-defined]
            elif self.grad is not None:
                copied.grad = self.grad.__deepcopy__(memo)
            copied.requires_grad_(self.requires_grad)
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        # As a file that is read with ``map_location="cpu"``.
        value = self._value.clone().requires_grad_(self.requires_grad)
        if isinstance(self, torch.nn.Parameter):
            value = torch.nn.Parameter(value, self.requires_grad)
        return value.__reduce_ex__(protocol)


class PretendCUDA:
    """Inside, there is a second device, `DEVICE`.

    Attributes:
        waits: What the host waited for: synchronisations, and copies from one device to the other.
    """

    def __init__(self) -> None:
        self.waits: Counter[Source] = Counter()
        self._stack = ExitStack()

    def __enter__(self) -> PretendCUDA:
        self._stack.enter_context(_Functions(self.wait))
        self._stack.enter_context(_Operations(self.wait))
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)

    def wait(self, what: str) -> None:
        """Note that the host waits.

        Args:
            what: The name of an operation, or of a copy.
        """
        self.waits[source(what, sys._getframe(2))] += 1


class _Operations(TorchDispatchMode):
    """What reaches the dispatcher: computed on the CPU after a look at where its arguments are."""

    def __init__(self, wait: Callable[[str], None]) -> None:
        super().__init__()
        self.wait = wait

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # which takes as long as all of the rest

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name, changes_shape = _properties(func)
        device, tensors = kwargs.get("device"), _tensors((*args, *kwargs.values()))
        there = [t for t in tensors if type(t) is PretendTensor]
        goes_there = bool(there) if device is None else _is_there(device)
        if not there and not goes_there:
            return func(*args, **kwargs)
        if device is not None:
            kwargs["device"] = _CPU
            kwargs.pop("pin_memory", None)
        if name in _COPIES:
            goes_there = self._copy(name, args, goes_there)
        elif device is None and len(there) < len(tensors):
            _check_devices(func, args, kwargs)
        self._note_waits(name, args)
        if goes_there and kwargs.get("generator") is not None:
            raise RuntimeError("Expected a 'cuda' device type for generator but found 'cpu'")
        out = func(*_unwrapped(args), **{key: _unwrapped(v) for key, v in kwargs.items()})
        if changes_shape:  # `squeeze_`: that of the wrapper, too
            with torch._C._DisableTorchDispatch():
                func(*args, **kwargs)
        return _wrapped(out, name, {id(t._value): t for t in there}) if goes_there else out

    def _copy(self, name: str, args: Any, goes_there: bool) -> bool:
        """Whether a copy ends on the device; between devices, the host waits for it."""
        source_there = isinstance(args[1 if name == "aten::copy_" else 0], PretendTensor)
        if name == "aten::copy_":
            goes_there = isinstance(args[0], PretendTensor)
        if source_there != goes_there:
            self.wait("copy to the device" if goes_there else "copy to the host")
        return goes_there

    def _note_waits(self, name: str, args: Any) -> None:
        if synchronises(name, args):
            self.wait(name.removeprefix("aten::"))
        if name in _INDEXING:
            for index in args[1]:
                if isinstance(index, Tensor) and not isinstance(index, PretendTensor):
                    self.wait("copy to the device")


@cache
def _properties(func: Any) -> tuple[str, bool]:
    """The name of an operation, and whether it changes shapes in place."""
    return func._schema.name, torch.Tag.inplace_view in func.tags


def _check_devices(func: Any, args: Any, kwargs: Any) -> None:
    """Raise for arguments on both devices where CUDA would."""
    name = func._schema.name
    if name in _INDEXING:  # indices may be anywhere
        if not isinstance(args[0], PretendTensor):
            raise RuntimeError(
                f"{name}: indices should be either on cpu or on the same device as the indexed "
                "tensor (cpu)"
            )
        args = (args[0], [], *args[2:])
    elementwise = torch.Tag.pointwise in func.tags and name != "aten::equal"
    takes_numbers = elementwise or name in _TAKE_NUMBERS | _INDEXING
    given = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs
    for argument in func._schema.arguments:
        is_written = argument.alias_info is not None and argument.alias_info.is_write
        for tensor in _tensors([given.get(argument.name)]):
            is_number = tensor.dim() == 0 and takes_numbers and not is_written
            if not isinstance(tensor, PretendTensor) and not is_number:
                raise RuntimeError(
                    "Expected all tensors to be on the same device, but found at least two "
                    f"devices, cuda:0 and cpu! {name} got a CPU tensor of shape "
                    f"{tuple(tensor.shape)}."
                )


class _Functions(TorchFunctionMode):
    """What does not reach the dispatcher, or not as it does on CUDA."""

    #: Makers of tensors from data of the host, with the names of their first arguments.
    MAKERS: ClassVar[dict[Any, str]] = {
        torch.tensor: "data",
        torch.as_tensor: "data",
        torch.asarray: "obj",
        Tensor.new_tensor: "data",
    }

    def __init__(self, wait: Callable[[str], None]) -> None:
        super().__init__()
        self.wait = wait

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in self.MAKERS:
            return self._make(func, args, kwargs)
        first = args[0] if args else None
        if func is torch._has_compatible_shallow_copy_type and _is_mixed(*args[:2]):
            return _can_be_swapped(first)
        if func == Tensor.data.__set__:  # type: ignore[attr-defined]
            return self._set_data(first, args[1])
        if isinstance(first, PretendTensor):
            if func is Tensor.tolist:
                return first.cpu().tolist()
            if func is Tensor.numpy:
                raise TypeError(
                    "can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu()"
                )
            if func is Tensor.__getitem__:
                return func(first, self._index(args[1]))
            if func is Tensor.__setitem__:
                return func(first, self._index(args[1]), _as_number(args[2], first))
        return func(*args, **kwargs)

    def _make(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Tensor:
        """A tensor from data of the host, which "meta" would leave empty."""
        if func is Tensor.new_tensor:
            like, *args = args
            kwargs = {"dtype": like.dtype, "device": like.device} | kwargs
            func = torch.tensor
        data, *args = args or [kwargs.pop(self.MAKERS[func])]
        if isinstance(data, list | tuple):  # with the numbers of tensors that are in it
            data = tree_map_only(PretendTensor, lambda t: t.cpu().tolist(), data)
        device = kwargs.get("device")
        if device is None or not _is_there(device) or isinstance(data, PretendTensor):
            return func(data, *args, **kwargs)
        if isinstance(data, Tensor):
            return func(data, *args, **kwargs | {"device": _CPU}).to(DEVICE)
        self.wait("copy to the device")
        made: Tensor = func(data, *args, **kwargs | {"device": _CPU})
        return PretendTensor(made.clone()).requires_grad_(kwargs.get("requires_grad", False))

    def _set_data(self, tensor: Tensor, new: Tensor) -> None:
        """``tensor.data = new``, from where the one object may be to where the other is."""
        if not _is_mixed(tensor, new):
            Tensor.data.__set__(tensor, new)  # type: ignore[attr-defined]
            if isinstance(tensor, PretendTensor):
                tensor._value = new._value
            return
        replacement = _alias(new, isinstance(new, PretendTensor))
        if isinstance(tensor, torch.nn.Parameter):
            replacement = torch.nn.Parameter(replacement, tensor.requires_grad)
        else:
            replacement.requires_grad_(tensor.requires_grad)
        if tensor.grad is not None and tensor.shape == new.shape:  # torch leaves it where it is
            replacement.grad = _alias(tensor.grad, isinstance(new, PretendTensor), new.dtype)
        torch.utils.swap_tensors(tensor, replacement)

    def _index(self, index: Any) -> Any:
        """An index whose lists and ranges are tensors on the device."""
        if isinstance(index, tuple):
            return tuple(self._index(i) for i in index)
        if isinstance(index, list | range | np.ndarray) and not _holds_slices(index):
            self.wait("copy to the device")
            made = torch.as_tensor(index)
            return PretendTensor(made if made.numel() else made.long())
        return index


def _is_there(device: Any) -> bool:
    return torch.device(device).type == DEVICE.type


def _is_mixed(a: Tensor, b: Tensor) -> bool:
    return isinstance(a, PretendTensor) != isinstance(b, PretendTensor)


def _can_be_swapped(tensor: Tensor) -> bool:
    """Whether an object can become a tensor on the other device: no graph refers to it."""
    for collect in (False, True):
        if collect:  # graphs that are no longer used
            gc.collect()
        try:
            other = torch.nn.Parameter(torch.zeros(0), requires_grad=False)
            torch.utils.swap_tensors(tensor, other)
        except RuntimeError:
            continue
        torch.utils.swap_tensors(tensor, other)
        return True
    return False


def _alias(tensor: Tensor, is_there: bool, dtype: torch.dtype | None = None) -> Tensor:
    """The same values on the one device or the other, not copied unless the dtype changes."""
    value = tensor._value if isinstance(tensor, PretendTensor) else tensor.detach()
    value = value.to(dtype=dtype)
    return PretendTensor(value) if is_there else value.detach()


def _tensors(arguments: Iterable[Any]) -> list[Tensor]:
    """The tensors among the arguments of an operation, some of which may be lists."""
    found = []
    for argument in arguments:
        if isinstance(argument, Tensor):
            found.append(argument)
        elif isinstance(argument, list | tuple):
            found += [t for t in argument if isinstance(t, Tensor)]
    return found


def _unwrapped(argument: Any) -> Any:
    """Arguments of an operation with what pretended tensors hold in their place."""
    if type(argument) is PretendTensor:
        return argument._value
    if isinstance(argument, list | tuple):
        return type(argument)(map(_unwrapped, argument))
    return argument


def _wrapped(out: Any, name: str, held: dict[int, PretendTensor]) -> Any:
    """The results of an operation, as pretended tensors: those that it changed are themselves."""
    if isinstance(out, list | tuple):
        return type(out)(_wrapped(part, name, held) for part in out)
    if not isinstance(out, Tensor):
        return out
    wrapper = held.get(id(out))
    if wrapper is None:
        return PretendTensor(out)
    if wrapper.shape != out.shape:
        raise NotImplementedError(f"{name}: a pretended tensor cannot change its shape.")
    return wrapper


def _holds_slices(index: Any) -> bool:
    return any(isinstance(i, slice | type(...)) or i is None for i in index)


def _as_number(value: Any, like: Tensor) -> Any:
    """A number to assign, as a tensor that still has it."""
    return value if isinstance(value, Tensor) else torch.tensor(value, dtype=like.dtype)

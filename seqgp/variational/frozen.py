"""Modules as they are now, for results that are evaluated later."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn import Module

M = TypeVar("M", bound=Module)


def frozen(module: M) -> M:
    """A module that keeps the present values of its parameters, without copying them.

    Its tensors are views of those of the module: gradients reach the parameters, and values that
    are written into these later are seen. But a parameter that is given *other memory*, as
    `seqgp.streaming.draft.adopt` does, leaves the views with what it had.

    Args:
        module: The module, which is not changed.
    """
    return _copy(module, {}, _view)


def with_same_tensors(module: M, copies: dict[int, Module]) -> M:
    """A copy of a module with the very same parameters.

    To evaluate a kernel is not safe in two threads at once: GPyTorch sets its ``active_dims`` aside
    meanwhile.

    Args:
        module: The module, which is not changed.
        copies: Copies that have been made so far, by the identity of the originals.
    """
    return _copy(module, copies, lambda tensor: tensor)


def _copy(
    module: M, copies: dict[int, Module], convert: Callable[[Tensor | None], Tensor | None]
) -> M:
    if id(module) not in copies:
        copy = copies[id(module)] = object.__new__(type(module))
        attributes = dict(vars(module))
        for name in ("_parameters", "_buffers"):
            attributes[name] = {key: convert(value) for key, value in attributes[name].items()}
        attributes["_modules"] = {
            key: None if child is None else _copy(child, copies, convert)
            for key, child in attributes["_modules"].items()
        }
        vars(copy).update(attributes)
    return copies[id(module)]  # type: ignore[return-value]


def _view(tensor: Tensor | None) -> Tensor | None:
    if tensor is None:
        return None
    if tensor.requires_grad and torch.is_grad_enabled():
        return tensor.view_as(tensor)
    return tensor.detach()

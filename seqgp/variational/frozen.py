"""Modules frozen at their present values, for results that are evaluated later."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn import Module

M = TypeVar("M", bound=Module)


def frozen(module: M) -> M:
    """Return a module that keeps the present values of its parameters, without copying them.

    Its tensors are views of those of the module: gradients reach the parameters, and values that
    are later written in place are visible. But if a parameter gets *other memory*, as in
    `seqgp.streaming.draft.adopt`, the views keep the old memory.

    Args:
        module: The module, which is not changed.
    """
    return _copy(module, {}, _view)


def with_same_tensors(module: M, copies: dict[int, Module]) -> M:
    """Return a copy of a module that has the same parameters, not copies of them.

    Evaluating a kernel is not thread-safe: GPyTorch temporarily removes its ``active_dims``.

    Args:
        module: The module, which is not changed.
        copies: Copies that have already been made, by the identity of the originals.
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

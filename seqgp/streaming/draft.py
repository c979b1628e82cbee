"""Updates happen on the side: a draft of the model is changed, and adopted as a whole.

Until it is adopted the model is as it was, whatever goes wrong and whoever reads it meanwhile.
"""

from __future__ import annotations

import copy
from typing import Any, TypeVar

import torch
from torch.nn import Module, Parameter

from seqgp.streaming.model import StreamModel

Model = TypeVar("Model", bound=StreamModel)


def draft_of(model: Model, learn: bool) -> Model:
    """A copy of a model that may be updated; it shares with the model what it will not change.

    Args:
        model: The model.
        learn: Whether hyperparameters are going to change.
    """
    draft: Any = model.variational_strategy.shallow_copy()
    if learn:
        memo: dict[int, Any] = {}
        strategy = draft.variational_strategy
        for name, module in list(draft.named_children()):
            if module is not strategy:
                setattr(draft, name, copy.deepcopy(module, memo))
        Z = strategy.inducing_points
        own = Z.detach().clone()  # gradients may move them, in place
        if isinstance(Z, Parameter):
            own = Parameter(own, requires_grad=Z.requires_grad)
        strategy.inducing_points = own
    return draft


def adopt(model: Model, draft: Model) -> None:
    """Make the state of a draft that of the model, as a whole.

    An interrupt that arrives meanwhile is raised after the model has become the draft: each step
    can be repeated, so it is started again.

    Args:
        model: The model.
        draft: What `draft_of` made of it, and an update changed.
    """
    interrupt: KeyboardInterrupt | None = None
    while True:
        try:
            _copy_into(model, draft)
            break
        except KeyboardInterrupt as error:
            interrupt = error
    if interrupt is not None:
        raise interrupt


@torch.no_grad()
def _copy_into(model: Any, draft: Any) -> None:
    into, source = _hyperparameters(model), _hyperparameters(draft)
    for name, tensor in into.items():
        if tensor is not source[name]:
            tensor.data.copy_(source[name].data)
    model.variational_strategy.adopt(draft.variational_strategy)
    model.stream = draft.stream


def _hyperparameters(model: Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers of all modules but the strategy."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {k: v for k, v in tensors.items() if not k.startswith("variational_strategy.")}

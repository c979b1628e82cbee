"""Drafts: copies of a model that updates work on, and that replace the model in the end.

Until then the model is unchanged, whatever goes wrong, and can be read by other threads. It is
replaced while no thread reads it (`seqgp.streaming.guard`).
"""

from __future__ import annotations

import copy
from typing import Any, TypeVar

import torch
from torch.nn import Module, Parameter

from seqgp.streaming.guard import Guard
from seqgp.streaming.model import StreamModel
from seqgp.variational.frozen import with_same_tensors

Model = TypeVar("Model", bound=StreamModel)


def draft_of(model: Model, learn: bool) -> Model:
    """Return a copy of a model that may be updated; it shares the tensors that do not change.

    Args:
        model: The model.
        learn: Whether hyperparameters will change.
    """
    with model.guard.reading:
        draft: Any = model.variational_strategy.shallow_copy()
        draft.guard = Guard()
        strategy, memo = draft.variational_strategy, {}  # type: ignore[var-annotated]
        with strategy.keeping_state():
            for name, module in list(draft.named_children()):
                if module is not strategy:
                    own = (copy.deepcopy if learn else with_same_tensors)(module, memo)
                    setattr(draft, name, own)
            Z = strategy.inducing_points
            if learn:
                own_Z = Z.detach().clone()  # gradient steps may change them in place
                if isinstance(Z, Parameter):
                    own_Z = Parameter(own_Z, requires_grad=Z.requires_grad)
                strategy.inducing_points = own_Z
    return draft


def adopt(model: Model, draft: Model) -> None:
    """Replace the state of a model by that of a draft, as a whole.

    Parameters stay the same objects in the same modules, but get other memory. So results that were
    computed from the old memory can still be evaluated or differentiated (see
    `seqgp.variational.frozen`). Conditioned models keep the hyperparameters that they were made
    with.

    An interrupt during the replacement is raised after it is complete. Each step can be repeated,
    so the replacement is then run again.

    Args:
        model: The model.
        draft: The updated result of `draft_of`. It cannot be used afterwards.
    """
    interrupt: KeyboardInterrupt | None = None
    with model.guard.reading:
        while True:
            try:
                _move_into(model, draft)
                break
            except KeyboardInterrupt as error:
                interrupt = error
    if interrupt is not None:
        raise interrupt


@torch.no_grad()
def _move_into(model: Any, draft: Any) -> None:
    into, source = _hyperparameters(model), _hyperparameters(draft)
    changed = [(into[name], source[name]) for name in into if into[name] is not source[name]]
    if changed:
        memo: dict[int, Any] = {}
        for sharer in list(model.guard.sharers):
            sharer.unshare(memo)
            model.guard.sharers.discard(sharer)
    for own, other in changed:
        own.data = other.data
    model.variational_strategy.adopt(draft.variational_strategy)
    model.stream = draft.stream
    model.note_hyperparameters()


def _hyperparameters(model: Module) -> dict[str, torch.Tensor]:
    """Return parameters and buffers of all modules except the strategy."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {k: v for k, v in tensors.items() if not k.startswith("variational_strategy.")}

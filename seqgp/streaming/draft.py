"""Updates work on a draft, a copy of the model, which replaces the model in the end.

Until then the model is unchanged, whatever goes wrong and whoever reads it. It is replaced while
nobody reads it (`seqgp.streaming.guard`).
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
    """A copy of a model that may be updated; it shares tensors that it will not change.

    Args:
        model: The model.
        learn: Whether hyperparameters are going to change.
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
                own_Z = Z.detach().clone()  # gradients may move them, in place
                if isinstance(Z, Parameter):
                    own_Z = Parameter(own_Z, requires_grad=Z.requires_grad)
                strategy.inducing_points = own_Z
    return draft


def adopt(model: Model, draft: Model) -> None:
    """Make the state of a draft that of the model, as a whole.

    Parameters stay the same objects, in the same modules, and are given other memory: what has been
    computed from the old one, and is yet to be evaluated or differentiated, is not disturbed (see
    `seqgp.variational.frozen`). Conditioned models keep the hyperparameters that they were made
    with.

    An interrupt that arrives meanwhile is raised after the model has become the draft: each step
    can be repeated, so it is started again.

    Args:
        model: The model.
        draft: What `draft_of` made of it, and an update changed; of no use any more.
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
    """Parameters and buffers of all modules but the strategy."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {k: v for k, v in tensors.items() if not k.startswith("variational_strategy.")}

"""Locks for threads: reads wait while a model is replaced, and updates run one at a time."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


class Guard:
    """The locks of a model and of all conditioned models that share its hyperparameters.

    A copy or a pickle of a model has a new guard.

    Attributes:
        reading: Held while something is read, and for the moment in which a finished update
            replaces the old state. Learning, which takes long, does not hold it.
        writing: Held during updates, so that none is lost.
        sharers: Conditioned models that share hyperparameters with the model.
    """

    def __init__(self) -> None:
        self.reading = threading.RLock()
        self.writing = threading.RLock()
        self.sharers: weakref.WeakSet[Any] = weakref.WeakSet()

    def __deepcopy__(self, memo: dict[int, Any]) -> Guard:
        return Guard()

    def __reduce__(self) -> tuple[Any, ...]:
        return Guard, ()


def reads(method: F) -> F:
    """Decorate a method that reads a model: it sees the model before or after an update.

    Args:
        method: The method of a class whose instances have a ``guard``.
    """

    @functools.wraps(method)
    def guarded(self: Any, *args: Any, **kwargs: Any) -> Any:
        with self.guard.reading:
            return method(self, *args, **kwargs)

    return guarded  # type: ignore[return-value]


def writes(method: F) -> F:
    """Decorate a method that replaces the state of a model: such methods run one at a time.

    Args:
        method: The method of a class whose instances have a ``guard``.
    """

    @functools.wraps(method)
    def guarded(self: Any, *args: Any, **kwargs: Any) -> Any:
        with self.guard.writing:
            return method(self, *args, **kwargs)

    return guarded  # type: ignore[return-value]

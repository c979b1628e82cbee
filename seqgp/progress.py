"""Progress bars, if `tqdm` is there to draw them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any


class _NoBar:
    """What a progress bar has to be able to do, done in silence."""

    def __init__(self, iterable: Iterable[Any] | None = None) -> None:
        self.iterable = iterable

    def __iter__(self) -> Iterator[Any]:
        return iter(self.iterable or ())

    def __enter__(self) -> _NoBar:
        return self

    def __exit__(self, *exception: object) -> None:
        """Nothing to close."""

    def update(self, n: int = 1) -> None:
        """Nothing to draw."""

    def set_postfix(self, *args: Any, **kwargs: Any) -> None:
        """Nothing to draw."""

    def set_postfix_str(self, *args: Any, **kwargs: Any) -> None:
        """Nothing to draw."""

    def close(self) -> None:
        """Nothing to close."""


def progress_bar(
    iterable: Iterable[Any] | None = None, disable: bool | None = None, **kwargs: Any
) -> Any:
    """A `tqdm` progress bar, or none without `tqdm`.

    The environment variable ``TQDM_DISABLE=1`` silences all of them.

    Args:
        iterable: What to iterate over.
        disable: ``True`` for no bar, ``None`` for one on terminals only, ``False`` for one in any
            case.
        kwargs: Options of `tqdm` (``desc``, ``total``, ``unit``, ...).
    """
    if disable is not True:
        try:
            from tqdm.auto import tqdm
        except ImportError:
            pass
        else:
            return tqdm(iterable, disable=disable, **kwargs)
    return _NoBar(iterable)

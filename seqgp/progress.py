"""Progress bars, if `tqdm` is installed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any


class _NoBar:
    """The interface of a progress bar that draws nothing."""

    def __init__(self, iterable: Iterable[Any] | None = None) -> None:
        self.iterable = iterable

    def __iter__(self) -> Iterator[Any]:
        return iter(self.iterable or ())

    def __enter__(self) -> _NoBar:
        return self

    def __exit__(self, *exception: object) -> None:
        """Do nothing."""

    def update(self, n: int = 1) -> None:
        """Do nothing."""

    def set_postfix(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing."""

    def set_postfix_str(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


def progress_bar(
    iterable: Iterable[Any] | None = None, disable: bool | None = None, **kwargs: Any
) -> Any:
    """A `tqdm` progress bar, or one that draws nothing if `tqdm` is not installed.

    The environment variable ``TQDM_DISABLE=1`` disables all progress bars.

    Args:
        iterable: The iterable.
        disable: ``True`` for no bar, ``None`` for a bar on terminals only, ``False`` for a bar
            everywhere.
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

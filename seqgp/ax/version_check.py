"""Whether Ax is installed, and new enough."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

#: The oldest supported version of Ax.
MINIMUM = "1.3.1"


def check_version(installed: str | None, minimum: str = MINIMUM) -> None:
    """Raise an `ImportError` that says what to install, unless Ax is new enough.

    Args:
        installed: The installed version, ``None`` if Ax is not installed.
        minimum: The oldest supported version.

    Example:
        >>> check_version("1.4.0")
        >>> check_version("1.2.9")
        Traceback (most recent call last):
        ImportError: seqgp.ax needs ax-platform >= 1.3.1, found 1.2.9: pip install "seqgp[ax]".
    """
    if installed is not None and _release(installed) >= _release(minimum):
        return
    found = "which is not installed" if installed is None else f"found {installed}"
    raise ImportError(
        f'seqgp.ax needs ax-platform >= {minimum}, {found}: pip install "seqgp[ax]".',
        name="ax",
    )


def installed_version() -> str | None:
    """The installed version of Ax, ``None`` if it is not installed."""
    try:
        return version("ax-platform")
    except PackageNotFoundError:
        return None


def _release(text: str) -> tuple[int, ...]:
    """The leading numbers: those of ``1.3.1.dev2`` are ``(1, 3, 1)``."""
    parts: list[int] = []
    for part in text.split("+")[0].split("."):
        if not part.isdigit():
            break
        parts.append(int(part))
    return tuple(parts)

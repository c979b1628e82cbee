"""Axes, arrays and colours that all plots share."""

from __future__ import annotations

from typing import Any

from torch import Tensor

MEAN_COLOUR, POINT_COLOUR = "#12355b", "#f05d23"


def array(values: Tensor) -> Any:
    """The values as a NumPy array."""
    return values.detach().cpu().numpy()


def axes_or_new(
    axes: Any, number: int, size: tuple[float, float], share: bool = False
) -> list[Any]:
    """Return the given axes as a list, or the axes of a new figure.

    Args:
        axes: What was passed: axes, a list or array of them, or ``None``.
        number: The expected number of axes.
        size: Size of a new figure, in inches.
        share: Whether the axes of a new figure are in a column and share their x-axis.
    """
    try:
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise ImportError(
            'seqgp.plots needs matplotlib, which is not installed: pip install "seqgp[plots]".'
        ) from error
    if axes is None:
        shape = (number, 1) if share else (1, number)
        _, made = plt.subplots(
            *shape, figsize=size, squeeze=False, layout="constrained", sharex=share
        )
        return list(made.flatten())
    panels = list(axes.flatten()) if hasattr(axes, "flatten") else axes
    panels = list(panels) if isinstance(panels, list | tuple) else [panels]
    if len(panels) != number:
        raise ValueError(f"axes: expected {number}, got {len(panels)}.")
    return panels

"""Options and figures of all tutorials."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def parser(description: str | None) -> argparse.ArgumentParser:
    """Options of a tutorial: ``--short`` and ``--quiet``.

    Args:
        description: The tutorial's docstring, of which the first line is shown.
    """
    cli = argparse.ArgumentParser(description=(description or "").partition("\n")[0])
    cli.add_argument("--short", action="store_true", help="smaller, in a few seconds")
    cli.add_argument("--quiet", action="store_true", help="no progress bars")
    return cli


def begin(given: argparse.Namespace, seed: int = 0) -> None:
    """Set the seed, float64 and a single thread.

    Args:
        given: The options of the command line.
        seed: Seed of PyTorch's random numbers.
    """
    torch.manual_seed(seed)
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)  # fastest for small matrices
    if given.quiet:
        os.environ["TQDM_DISABLE"] = "1"


def new_figure(rows: int, columns: int, size: tuple[float, float], **options: Any) -> Any:
    """A figure and its axes, ``rows x columns``.

    Args:
        rows: The number of rows of axes.
        columns: The number of columns.
        size: Width and height in inches.
        options: Options of ``Figure.subplots``.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False, **options)


def save(figure: Figure, name: str) -> Path:
    """Save a figure in ``figures/``.

    Args:
        figure: The figure.
        name: Its name, without extension.
    """
    path = Path("figures") / f"{name}.png"
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=110)
    return path

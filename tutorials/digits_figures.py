"""Figures of the tutorial on digits."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor


def save_confusion(found: dict[str, list[Tensor]]) -> Path:
    """Draw confusion matrices: a row for each model, a column for each task.

    Args:
        found: ``10 x 10`` counts, after each task.
    """
    tasks = len(next(iter(found.values())))
    figure = Figure(figsize=(3 * tasks, 3.1 * len(found)), layout="constrained")
    axes = figure.subplots(len(found), tasks, squeeze=False)
    for row, (name, matrices) in zip(axes, found.items(), strict=True):
        for task, (panel, matrix) in enumerate(zip(row, matrices, strict=True)):
            share = matrix / matrix.sum(-1, keepdim=True).clamp_min(1)
            panel.imshow(share.numpy(), cmap="Blues", vmin=0, vmax=1)
            accuracy = float(matrix.trace() / matrix.sum())
            panel.set_title(f"after {2 * task} and {2 * task + 1}: {accuracy:.1%}", fontsize=10)
            panel.set_xticks(range(10))
            panel.set_yticks(range(10))
        row[0].set_ylabel(f"{name}\ntrue class")
    for panel in axes[-1]:
        panel.set_xlabel("predicted class")
    return _save(figure, "digits-confusion")


def save_memory(
    kept: Tensor, kept_labels: Tensor, X: Tensor, y: Tensor, leverage: Tensor, shown: int = 10
) -> Path:
    """Draw the memory, and the images of lowest and highest leverage of each class.

    Args:
        kept: Images in memory, ``k x 64``.
        kept_labels: Their classes.
        X: All images, ``n x 64``.
        y: Their classes.
        leverage: Their leverage.
        shown: The number of images of each class and kind.
    """
    figure = Figure(figsize=(14, 5.2), layout="constrained")
    panels = figure.subplots(1, 3)
    own = [(X[y == k], leverage[y == k].argsort()) for k in range(10)]
    rows = {
        "memory": [kept[kept_labels == k][:shown] for k in range(10)],
        "lowest leverage": [images[order[:shown]] for images, order in own],
        "highest leverage": [images[order.flip(0)[:shown]] for images, order in own],
    }
    for panel, (title, classes) in zip(panels, rows.items(), strict=True):
        panel.imshow(np.vstack([_row(images, shown) for images in classes]), cmap="gray_r")
        panel.set_title(title)
        panel.set_axis_off()
    return _save(figure, "digits-memory")


def _row(images: Tensor, number: int) -> np.ndarray:
    """Up to ``number`` images side by side, padded with blank ones."""
    blank = torch.zeros(number - len(images), images.shape[-1], dtype=images.dtype)
    return np.hstack([np.pad(image.reshape(8, 8), 1) for image in torch.cat([images, blank])])


def _save(figure: Figure, name: str) -> Path:
    path = Path("figures") / f"{name}.png"
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=100)
    return path

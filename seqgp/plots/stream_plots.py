"""The history of a stream, and the leverage of the memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from seqgp.models.sequential_gp import SequentialGP
from seqgp.plots.axes import MEAN_COLOUR, POINT_COLOUR, array, axes_or_new
from seqgp.plots.data_points import check_model, memory_inputs, memory_targets
from seqgp.streaming.update import UpdateRecord

GAINED_COLOUR, LOST_COLOUR = "#2a9d8f", "#c1121f"


def history(records: Sequence[UpdateRecord] | UpdateRecord, axes: Any = None) -> list[Any]:
    """Draw the history of a stream: log density, hyperparameters and memory.

    The upper panel shows the log density of each batch before the model learnt it, and the running
    average, which increases while the model improves. The middle panel shows hyperparameters:
    positive ones on a logarithmic axis on the left, others dashed on the right. The lower panel
    shows how many observations have entered and left the memory.

    Args:
        records: The results of `SequentialGP.update` (one or a list) or `update_stream`.
        axes: Three axes to draw into. By default those of a new figure.

    Returns:
        The axes.

    Example:
        >>> import torch, seqgp
        >>> X = torch.rand(90, 1, dtype=torch.double)
        >>> Y = torch.sin(9 * X)
        >>> Y = (Y - Y[:30].mean()) / Y[:30].std()
        >>> model = seqgp.SequentialGP(X[:30], Y[:30])
        >>> batches = zip(X[30:].split(20), Y[30:].split(20))
        >>> records = [model.update(x, y, memory=20, steps=3) for x, y in batches]
        >>> panels = seqgp.plots.history(records)
    """
    records = [records] if isinstance(records, UpdateRecord) else list(records)
    if not records or not all(isinstance(record, UpdateRecord) for record in records):
        raise ValueError("records: expected the records of at least one update.")
    upper, middle, lower = axes_or_new(axes, 3, (7.5, 8.0), share=True)
    new = torch.tensor([float(r.num_new) for r in records], device="cpu")
    seen = new.cumsum(0).tolist()
    density = torch.tensor([r.log_density for r in records], device="cpu")
    known = ~density.isnan()
    weight = torch.where(known, new, 0.0)
    running = torch.where(known, density * new, 0.0).cumsum(0) / weight.cumsum(0).clamp_min(1)
    upper.plot(seen, array(density), "o", markersize=4, color=POINT_COLOUR, label="of the batch")
    upper.plot(seen, array(running), color=MEAN_COLOUR, linewidth=2, label="average so far")
    upper.set_ylabel("log density, before learning")
    upper.legend(frameon=False)
    _draw_hyperparameters(middle, seen, records)
    width = 0.8 * min((b - a for a, b in zip([0.0, *seen], seen, strict=False) if b > a), default=1)
    gained, lost = [r.memory_gained for r in records], [-r.memory_lost for r in records]
    lower.bar(seen, gained, width, color=GAINED_COLOUR, label="remembered")
    lower.bar(seen, lost, width, color=LOST_COLOUR, label="folded")
    lower.plot(
        seen, [r.num_memory for r in records], color=MEAN_COLOUR, linewidth=2, label="in memory"
    )
    lower.plot(seen, [r.num_inducing for r in records], "k:", label="inducing points")
    lower.axhline(0, color="0.6", linewidth=0.8)
    lower.set(xlabel="observations in updates", ylabel="observations")
    above = {"loc": "lower center", "bbox_to_anchor": (0.5, 1.0)}  # above the bars
    lower.legend(frameon=False, ncols=4, fontsize=8, **above)
    for panel in (upper, middle, lower):
        panel.spines[["top"]].set_visible(False)
        panel.grid(alpha=0.2)
    return [upper, middle, lower]


def leverage(
    model: SequentialGP, axes: Any = None, top: int = 20, names: Sequence[str] | None = None
) -> list[Any]:
    """Draw the observations in memory that have the most Bayesian leverage.

    These determine the posterior most.

    Args:
        model: The model.
        axes: Axes to draw into. By default those of a new figure.
        top: The number of observations to draw.
        names: Names of all observations in memory. By default their inputs and targets.

    Returns:
        The axes.

    Example:
        >>> import torch, seqgp
        >>> X = torch.linspace(0, 1, 30, dtype=torch.double).unsqueeze(-1)
        >>> Y = torch.sin(6 * X)
        >>> model = seqgp.SequentialGP(X, (Y - Y.mean()) / Y.std())
        >>> panels = seqgp.plots.leverage(model, top=10)
    """
    check_model(model)
    scores = model.memory.leverage.detach().cpu()
    if not len(scores):
        raise ValueError("model: its memory is empty.")
    if top < 1:
        raise ValueError(f"top: expected at least 1, got {top}.")
    if names is None:
        targets = [memory_targets(model, k) for k in range(model.num_columns)]
        names = [
            f"x = ({', '.join(f'{v:.3g}' for v in x)}), y = {', '.join(f'{v:.3g}' for v in y)}"
            for x, y in zip(
                memory_inputs(model).tolist(), torch.stack(targets, -1).tolist(), strict=True
            )
        ]
    elif len(names) != len(scores):
        raise ValueError(f"names: expected {len(scores)}, got {len(names)}.")
    order = scores.argsort(descending=True)[:top].tolist()
    (panel,) = axes_or_new(axes, 1, (7.0, 0.9 + 0.24 * len(order)))
    places = list(range(len(order)))
    panel.barh(places, array(scores[order]), color=MEAN_COLOUR)
    panel.set_yticks(places, [names[i] for i in order], fontsize=8)
    panel.set_ylim(len(order) - 0.4, -0.6)
    share = float(scores[order].sum() / scores.sum().clamp_min(torch.finfo(scores.dtype).tiny))
    panel.set(
        xlabel="Bayesian leverage",
        title=f"{len(order)} of {len(scores)} in memory, {share:.0%} of all leverage",
    )
    panel.spines[["top", "right"]].set_visible(False)
    return [panel]


def _draw_hyperparameters(panel: Any, seen: list[float], records: list[UpdateRecord]) -> None:
    """Draw positive ones on a logarithmic axis, the others dashed on a second axis."""
    other = None
    for k, name in enumerate(records[0].hyperparameters):
        values = [r.hyperparameters.get(name) for r in records]
        shape = values[0].shape if values[0] is not None else None
        if any(value is None or value.shape != shape for value in values):
            continue  # not the same parameter in all records
        curves = torch.stack([v.detach().cpu().flatten() for v in values if v is not None])
        if not curves.numel():
            continue
        positive = bool((curves > 0).all())
        short, colour = name.rpartition(".")[-1].replace("_", " "), f"C{k % 10}"
        if not positive and other is None:
            other = panel.twinx()
            other.spines[["top"]].set_visible(False)
        target: Any = panel if positive else other
        style = "-" if positive else "--"
        for i, curve in enumerate(curves.T):
            label = short if i == 0 else None
            target.plot(seen, array(curve), style, color=colour, linewidth=1.6, alpha=0.8)
            panel.plot([], [], style, color=colour, label=label)
    panel.set_yscale("log")
    panel.set_ylabel("hyperparameters")
    panel.legend(frameon=False, fontsize=8, ncols=2)

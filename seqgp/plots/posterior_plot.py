"""The posterior over one or two inputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from seqgp.likelihoods.traits import has_one_latent
from seqgp.models.sequential_gp import SequentialGP
from seqgp.plots.axes import MEAN_COLOUR, POINT_COLOUR, array, axes_or_new
from seqgp.plots.data_points import (
    DataPoints,
    check_model,
    inducing_points_of,
    memory_inputs,
    memory_targets,
    sizes,
)
from seqgp.plots.prediction import Z95, Prediction, is_probability, label_of, num_classes, predict
from seqgp.validation import check_inputs


def posterior(
    model: SequentialGP,
    axes: Any = None,
    bounds: Tensor | None = None,
    dims: Sequence[int] | None = None,
    at: Tensor | None = None,
    output: int = 0,
    show: str = "both",
    inducing_points: bool = True,
    memory: bool = True,
    resolution: int | None = None,
    arguments: dict[str, float] | None = None,
    legend: bool = True,
) -> list[Any]:
    """Draw the posterior over one or two inputs, with its uncertainty.

    The plot shows the expected observation. With a Gaussian likelihood, this is the function
    itself, with a band for the function and a lighter band for observations. With other
    likelihoods, it is the probability of a 1, the rate of counts, and so on; with a softmax
    likelihood, the probability of class ``output``. Over one input, the plot shows the mean and its
    95 % band. Over two inputs, it shows the mean and, beside it, the standard deviation. The
    memory is drawn as points whose size grows with their leverage, inducing points as crosses.

    Args:
        model: The model.
        axes: Axes to draw into: two of them for two inputs with ``show="both"``, otherwise one. By
            default those of a new figure.
        bounds: ``2 x d`` bounds of the inputs to show. By default the range of the data in
            memory, or that of the inducing points if the memory holds too little to have a range.
        dims: The one or two inputs to vary, if there are more.
        at: ``d`` inputs, the values at which the other inputs are held. By default the medians of
            the memory.
        output: The output, or the class.
        show: For two inputs: ``"mean"``, ``"sd"`` or ``"both"``.
        inducing_points: Whether to draw the inducing points.
        memory: Whether to draw the memory.
        resolution: The number of points along each input. By default 300 for one input, 60 for two.
        arguments: Arguments of the likelihood (``{"exposure": 1.0}``). Binomial counts are always
            drawn as proportions.
        legend: Whether to draw a legend (for one input).

    Returns:
        The axes.

    Example:
        >>> import torch, seqgp
        >>> from gpytorch.likelihoods import BernoulliLikelihood
        >>> X = torch.rand(100, 2, dtype=torch.double)
        >>> Y = (X.sum(-1, keepdim=True) > 1).to(X)
        >>> model = seqgp.SequentialGP(X, Y, likelihood=BernoulliLikelihood(), inducing_points=20)
        >>> left, right = seqgp.plots.posterior(model)  # then left.figure.savefig(...)
        >>> left.get_title(), right.get_title()
        ('probability of a 1', 'standard deviation')
    """
    check_model(model)
    if show not in ("mean", "sd", "both"):
        raise ValueError(f"show: expected 'mean', 'sd' or 'both', got {show!r}.")
    memory_X, Z = memory_inputs(model), inducing_points_of(model)
    d = Z.shape[-1]
    dims = _check_dims(dims, d)
    bounds = _bounds(bounds, memory_X if _has_range(memory_X) else Z)
    if at is None:
        at = (memory_X if len(memory_X) else Z).median(0).values
    at = torch.as_tensor(at).to(Z)
    if at.shape != (d,):
        raise ValueError(f"at: expected {d} inputs, got shape {tuple(at.shape)}.")
    outputs = num_classes(model) if not has_one_latent(model.likelihood) else model.num_outputs
    if not 0 <= output < outputs:
        raise ValueError(f"output: expected one of 0 to {outputs - 1}, got {output}.")
    resolution = resolution or (300 if len(dims) == 1 else 60)
    lines = [
        torch.linspace(float(low), float(high), resolution, dtype=Z.dtype, device=Z.device)
        for low, high in bounds[:, list(dims)].T
    ]
    grid = torch.cartesian_prod(*lines).reshape(-1, len(dims))
    X = at.repeat(len(grid), 1)
    X[:, list(dims)] = grid
    prediction = predict(model, X, output, arguments or {})
    points = DataPoints(
        memory_X[:, list(dims)] if memory else None,
        memory_targets(model, output) if memory else None,
        sizes(model) if memory else None,
        Z[:, list(dims)] if inducing_points else None,
    )
    label = label_of(model, output)
    names = [f"$x_{{{i + 1}}}$" if d > 1 else "x" for i in dims]
    if len(dims) == 1:
        panels = axes_or_new(axes, 1, (7.0, 4.2))
        _draw_line(panels[0], lines[0], prediction, points, label, names[0], legend)
        return panels
    kinds = ["mean", "sd"] if show == "both" else [show]
    panels = axes_or_new(axes, len(kinds), (5.4 * len(kinds), 4.4))
    for panel, kind in zip(panels, kinds, strict=True):
        _draw_map(panel, lines, prediction, points, label, names, kind, is_probability(model))
    return panels


def _check_dims(dims: Sequence[int] | None, d: int) -> tuple[int, ...]:
    if dims is None:
        if d > 2:
            raise ValueError(f"dims: with {d} inputs, choose one or two to vary: dims=(0, 1).")
        return tuple(range(d))
    dims = tuple(dims)
    if len(dims) not in (1, 2) or len(set(dims)) != len(dims) or not set(dims) <= set(range(d)):
        raise ValueError(f"dims: expected one or two of 0 to {d - 1}, got {dims}.")
    return dims


def _has_range(X: Tensor) -> bool:
    """Whether inputs vary in every dimension. Inducing points may lie far from all data."""
    return len(X) > 1 and bool((X.amin(0) < X.amax(0)).all())


def _bounds(bounds: Tensor | None, X: Tensor) -> Tensor:
    if bounds is None:
        low, high = X.amin(0), X.amax(0)
        margin = 0.05 * (high - low) + 1e-9
        return torch.stack([low - margin, high + margin])
    check_inputs(bounds, X.shape[-1], "bounds")
    if bounds.shape != (2, X.shape[-1]) or not (bounds[0] < bounds[1]).all():
        raise ValueError(
            f"bounds: expected shape 2 x {X.shape[-1]}, lower bounds first, got "
            f"{tuple(bounds.shape)}."
        )
    return bounds.detach()


def _draw_line(
    panel: Any,
    x: Any,
    prediction: Prediction,
    points: DataPoints,
    label: str,
    name: str,
    legend: bool,
) -> None:
    x, mean = array(x), prediction.mean
    if prediction.noise is not None:
        low, high = mean - Z95 * prediction.noise, mean + Z95 * prediction.noise
        panel.fill_between(
            x, low, high, color=MEAN_COLOUR, alpha=0.1, linewidth=0, label="observations"
        )
    band = {"color": MEAN_COLOUR, "alpha": 0.25, "linewidth": 0, "label": "95 %"}
    panel.fill_between(x, prediction.low, prediction.high, **band)
    panel.plot(x, mean, color=MEAN_COLOUR, linewidth=2, label="mean")
    if points.inputs is not None and points.targets is not None:
        panel.scatter(
            *(array(points.inputs[:, 0]), array(points.targets)),
            s=array(points.sizes),
            color=POINT_COLOUR,
            edgecolors="white",
            linewidths=0.4,
            zorder=3,
            label="memory (size: leverage)",
        )
    if points.Z is not None:
        panel.plot(
            *(array(points.Z[:, 0]), [0.025] * len(points.Z)),
            "k+",
            markersize=6,
            markeredgewidth=0.9,
            transform=panel.get_xaxis_transform(),
            label="inducing points",
        )
    panel.set(xlabel=name, ylabel=label, xlim=(float(x[0]), float(x[-1])))
    panel.spines[["top", "right"]].set_visible(False)
    if legend:
        panel.legend(frameon=False, fontsize=8)


def _draw_map(
    panel: Any,
    lines: list[Tensor],
    prediction: Prediction,
    points: DataPoints,
    label: str,
    names: list[str],
    kind: str,
    probability: bool,
) -> None:
    a, b = (array(line) for line in lines)
    value = prediction.mean if kind == "mean" else prediction.sd
    image = value.reshape(len(a), len(b)).T
    colours: dict[str, Any] = {"cmap": "viridis" if kind == "mean" else "magma"}
    low, high = float(image.min()), float(image.max())
    if kind == "mean" and probability:
        colours, low, high = {"cmap": "RdBu_r"}, 0.0, 1.0
    elif kind == "sd":
        low = 0.0
    high = max(high, low + 1e-12)
    drawn = panel.imshow(
        image,
        origin="lower",
        extent=(float(a[0]), float(a[-1]), float(b[0]), float(b[-1])),
        aspect="auto",
        interpolation="bilinear",
        vmin=low,
        vmax=high,
        alpha=0.85,
        **colours,
    )
    if kind == "mean" and probability:
        panel.contour(a, b, image, [0.5], colors="black", linewidths=1.2)
    if points.inputs is not None and points.targets is not None:
        style: dict[str, Any] = {"color": "white"}
        if kind == "mean":
            style = {"c": array(points.targets), "vmin": low, "vmax": high, **colours}
        panel.scatter(
            *array(points.inputs.T),
            s=array(points.sizes),
            edgecolors="black",
            linewidths=0.5,
            **style,
        )
    if points.Z is not None:
        colour = "black" if kind == "mean" else "0.75"
        panel.scatter(*array(points.Z.T), s=26, marker="+", c=colour, linewidths=0.9)
    panel.figure.colorbar(drawn, ax=panel, shrink=0.9)
    panel.set(
        xlabel=names[0],
        ylabel=names[1],
        title=label if kind == "mean" else "standard deviation",
        xlim=(float(a[0]), float(a[-1])),
        ylim=(float(b[0]), float(b[-1])),
    )

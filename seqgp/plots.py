"""Plots of your own model: its posterior, the history of its stream, what its memory holds.

They need matplotlib (``pip install "seqgp[plots]"``), which is imported when one of them is called.
Each draws into axes that it is given, or into a new figure, and returns the axes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributions import Bernoulli, Categorical

from seqgp.likelihoods.discrete import BinomialLikelihood, OrdinalLikelihood
from seqgp.likelihoods.predictive import conditional_moments
from seqgp.likelihoods.quadrature import normal_nodes, normal_weights
from seqgp.likelihoods.traits import has_one_latent, is_conjugate
from seqgp.models.sequential_gp import SequentialGP
from seqgp.streaming.update import UpdateRecord
from seqgp.validation import check_inputs

__all__ = ["history", "leverage", "posterior"]

_MEAN, _GAINED, _LOST, _POINTS = "#12355b", "#2a9d8f", "#c1121f", "#f05d23"
_Z95 = 1.959964
_CHUNK = 1000  # inputs that are predicted at a time
_NUM_NODES, _NUM_DRAWS = 32, 512


class _Prediction(NamedTuple):
    """What is drawn of a posterior at ``n`` inputs: tensors, then arrays."""

    mean: Any  # n
    sd: Any  # n, of the function that is drawn
    low: Any  # n, 2.5 %
    high: Any  # n, 97.5 %
    noise: Any  # n, standard deviation of Gaussian observations, or None


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

    What is drawn is what observations are expected to be: the function itself if the likelihood is
    Gaussian, with a band for the function and a lighter one for observations; else the probability
    of a 1, the rate of counts, and so on. Of a softmax likelihood, it is the probability of class
    ``output``. Of one input: the mean, and its 95 % band. Of two: the mean, and beside it the
    standard deviation. What the memory holds is drawn as points, the larger the more leverage they
    have, and inducing points as crosses.

    Args:
        model: The model.
        axes: Axes to draw into; of two inputs and ``show="both"``, two of them. By default those of
            a new figure.
        bounds: ``2 x d`` bounds of the inputs to show; by default where the memory and the inducing
            points are.
        dims: Which one or two inputs to vary, if there are more.
        at: ``d`` inputs at which the others are held; by default the medians of the memory.
        output: Which output, or class.
        show: Of two inputs: ``"mean"``, ``"sd"`` or ``"both"``.
        inducing_points: Whether to draw them.
        memory: Whether to draw it.
        resolution: Points along each input; by default 300, or 60 of two inputs.
        arguments: Arguments of the likelihood (``{"exposure": 1.0}``). Of binomial counts, the
            proportion is drawn, whatever the totals.
        legend: Whether to explain lines and points, of one input.

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
    _check_model(model)
    if show not in ("mean", "sd", "both"):
        raise ValueError(f"show: expected mean, sd or both, got {show!r}.")
    memory_X, Z = _memory_inputs(model), _inducing_points(model)
    d = Z.shape[-1]
    dims = _check_dims(dims, d)
    bounds = _bounds(bounds, torch.cat([memory_X, Z]))
    if at is None:
        at = (memory_X if len(memory_X) else Z).median(0).values
    at = torch.as_tensor(at).to(Z)
    if at.shape != (d,):
        raise ValueError(f"at: expected {d} inputs, got shape {tuple(at.shape)}.")
    outputs = _num_classes(model) if not has_one_latent(model.likelihood) else model.num_outputs
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
    prediction = _predict(model, X, output, arguments or {})
    points = _Points(
        memory_X[:, list(dims)] if memory else None,
        _memory_targets(model, output) if memory else None,
        _sizes(model) if memory else None,
        Z[:, list(dims)] if inducing_points else None,
    )
    label = _label(model, output)
    names = [f"$x_{{{i + 1}}}$" if d > 1 else "x" for i in dims]
    if len(dims) == 1:
        panels = _axes(axes, 1, (7.0, 4.2))
        _draw_line(panels[0], lines[0], prediction, points, label, names[0], legend)
        return panels
    kinds = ["mean", "sd"] if show == "both" else [show]
    panels = _axes(axes, len(kinds), (5.4 * len(kinds), 4.4))
    for panel, kind in zip(panels, kinds, strict=True):
        _draw_map(panel, lines, prediction, points, label, names, kind, _is_probability(model))
    return panels


def history(records: Sequence[UpdateRecord] | UpdateRecord, axes: Any = None) -> list[Any]:
    """Draw what a stream has been like: density, hyperparameters, and what the memory did.

    Above, the log density of each batch before it was learnt, and its average so far: a model that
    learns climbs. In the middle, hyperparameters: positive ones on the left in logarithms, others
    dashed on the right. Below, how many observations the memory has taken and given up.

    Args:
        records: What `SequentialGP.update` (a record, or a list of them) or `update_stream`
            returned.
        axes: Three axes to draw into; by default those of a new figure.

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
    upper, middle, lower = _axes(axes, 3, (7.5, 8.0), share=True)
    new = torch.tensor([float(r.num_new) for r in records], device="cpu")
    seen = new.cumsum(0).tolist()
    density = torch.tensor([r.log_density for r in records], device="cpu")
    known = ~density.isnan()
    weight = torch.where(known, new, 0.0)
    running = torch.where(known, density * new, 0.0).cumsum(0) / weight.cumsum(0).clamp_min(1)
    upper.plot(seen, _array(density), "o", markersize=4, color=_POINTS, label="of the batch")
    upper.plot(seen, _array(running), color=_MEAN, linewidth=2, label="average so far")
    upper.set_ylabel("log density, before learning")
    upper.legend(frameon=False)
    _draw_hyperparameters(middle, seen, records)
    width = 0.8 * min((b - a for a, b in zip([0.0, *seen], seen, strict=False) if b > a), default=1)
    gained, lost = [r.memory_gained for r in records], [-r.memory_lost for r in records]
    lower.bar(seen, gained, width, color=_GAINED, label="remembered")
    lower.bar(seen, lost, width, color=_LOST, label="given up")
    lower.plot(seen, [r.num_memory for r in records], color=_MEAN, linewidth=2, label="in memory")
    lower.plot(seen, [r.num_inducing for r in records], "k:", label="inducing points")
    lower.axhline(0, color="0.6", linewidth=0.8)
    lower.set(xlabel="observations that came in updates", ylabel="observations")
    above = {"loc": "lower center", "bbox_to_anchor": (0.5, 1.0)}  # where no bar can be
    lower.legend(frameon=False, ncols=4, fontsize=8, **above)
    for panel in (upper, middle, lower):
        panel.spines[["top"]].set_visible(False)
        panel.grid(alpha=0.2)
    return [upper, middle, lower]


def leverage(
    model: SequentialGP, axes: Any = None, top: int = 20, names: Sequence[str] | None = None
) -> list[Any]:
    """Draw which of the remembered observations determine the posterior most.

    Args:
        model: The model.
        axes: Axes to draw into; by default those of a new figure.
        top: How many of them.
        names: What to call the observations in the memory; by default their inputs and target.

    Returns:
        The axes.

    Example:
        >>> import torch, seqgp
        >>> X = torch.linspace(0, 1, 30, dtype=torch.double).unsqueeze(-1)
        >>> Y = torch.sin(6 * X)
        >>> model = seqgp.SequentialGP(X, (Y - Y.mean()) / Y.std())
        >>> panels = seqgp.plots.leverage(model, top=10)
    """
    _check_model(model)
    scores = model.memory.leverage.detach().cpu()
    if not len(scores):
        raise ValueError("model: its memory is empty.")
    if top < 1:
        raise ValueError(f"top: expected at least 1, got {top}.")
    if names is None:
        targets = [_memory_targets(model, k) for k in range(model.num_columns)]
        names = [
            f"x = ({', '.join(f'{v:.3g}' for v in x)}), y = {', '.join(f'{v:.3g}' for v in y)}"
            for x, y in zip(
                _memory_inputs(model).tolist(), torch.stack(targets, -1).tolist(), strict=True
            )
        ]
    elif len(names) != len(scores):
        raise ValueError(f"names: expected {len(scores)}, got {len(names)}.")
    order = scores.argsort(descending=True)[:top].tolist()
    (panel,) = _axes(axes, 1, (7.0, 0.9 + 0.24 * len(order)))
    places = list(range(len(order)))
    panel.barh(places, _array(scores[order]), color=_MEAN)
    panel.set_yticks(places, [names[i] for i in order], fontsize=8)
    panel.set_ylim(len(order) - 0.4, -0.6)
    share = float(scores[order].sum() / scores.sum().clamp_min(torch.finfo(scores.dtype).tiny))
    panel.set(
        xlabel="Bayesian leverage",
        title=f"{len(order)} of {len(scores)} in memory, {share:.0%} of all leverage",
    )
    panel.spines[["top", "right"]].set_visible(False)
    return [panel]


# -------------------------------------------------------------------------------- what to draw


def _check_model(model: Any) -> None:
    if not isinstance(model, SequentialGP):
        raise TypeError(f"model: expected a SequentialGP, got a {type(model).__name__}.")
    if model.batch_shape:
        raise ValueError(
            f"model: expected a single one, got a batch of shape {tuple(model.batch_shape)}."
        )


def _check_dims(dims: Sequence[int] | None, d: int) -> tuple[int, ...]:
    if dims is None:
        if d > 2:
            raise ValueError(f"dims: with {d} inputs, say which one or two to vary: dims=(0, 1).")
        return tuple(range(d))
    dims = tuple(dims)
    if len(dims) not in (1, 2) or len(set(dims)) != len(dims) or not set(dims) <= set(range(d)):
        raise ValueError(f"dims: expected one or two of 0 to {d - 1}, got {dims}.")
    return dims


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


def _memory_inputs(model: SequentialGP) -> Tensor:
    return model.train_inputs[0].detach()


def _inducing_points(model: SequentialGP) -> Tensor:
    """``k x d``, on the scale of the inputs as they were given."""
    Z = model.variational_strategy.inducing_points.detach()
    Z = Z.reshape(-1, *Z.shape[-2:])[0]
    transform = getattr(model, "input_transform", None)
    return Z if transform is None else transform.untransform(Z)


def _memory_targets(model: SequentialGP, output: int) -> Tensor:
    """``n``, on the scale of what is drawn."""
    columns = model.to_columns(model.train_targets.detach())
    if hasattr(model, "outcome_transform"):
        columns, _ = model.outcome_transform.untransform(columns)
    targets = columns[..., output if model.has_output_dim else 0]
    if isinstance(model.likelihood, BinomialLikelihood):
        totals = model.likelihood_arguments.get("total_count", model.likelihood.total_count)
        if totals is not None:
            targets = targets / totals.to(targets).clamp_min(1)
    if not has_one_latent(model.likelihood):
        targets = (targets == output).to(targets)
    return targets


def _sizes(model: SequentialGP) -> Tensor:
    if model.variational_strategy.is_fantasy or not model.num_data:
        return torch.full((model.num_data,), 12.0, device="cpu")
    scores = model.memory.leverage.detach().cpu()
    return 8 + 50 * scores / scores.max().clamp_min(torch.finfo(scores.dtype).tiny)


def _num_classes(model: SequentialGP) -> int:
    return int(getattr(model.likelihood, "num_classes", model.num_outputs))


def _is_probability(model: SequentialGP) -> bool:
    kind = _kind(model)
    return kind in (Bernoulli, Categorical) and not isinstance(model.likelihood, OrdinalLikelihood)


def _kind(model: SequentialGP) -> type:
    """`Bernoulli` for proportions, `Categorical` for classes, else anything."""
    if isinstance(model.likelihood, BinomialLikelihood):
        return Bernoulli
    names = {"BernoulliLikelihood": Bernoulli, "SoftmaxLikelihood": Categorical}
    return names.get(type(model.likelihood).__name__, object)


def _label(model: SequentialGP, output: int) -> str:
    likelihood = model.likelihood
    if not has_one_latent(likelihood):
        return f"probability of class {output}"
    known = {
        "BernoulliLikelihood": "probability of a 1",
        "PoissonLikelihood": "rate",
        "OrdinalLikelihood": "expected class",
    }
    label = known.get(type(likelihood).__name__, "y")
    if isinstance(likelihood, BinomialLikelihood):
        label = "proportion"
    return f"{label}, output {output}" if model.has_output_dim else label


@torch.no_grad()
def _predict(
    model: SequentialGP, X: Tensor, output: int, arguments: dict[str, float]
) -> _Prediction:
    """Mean, standard deviation and 95 % band of what is drawn, a chunk of inputs at a time."""
    training = model.training
    try:
        parts = [_predict_chunk(model, x, output, arguments) for x in X.split(_CHUNK)]
    finally:
        model.train(training)
    columns: list[Any] = [
        None if parts[0][i] is None else _array(torch.cat([part[i] for part in parts]))
        for i in range(len(parts[0]))
    ]
    return _Prediction(*columns)


def _predict_chunk(
    model: SequentialGP, X: Tensor, output: int, arguments: dict[str, float]
) -> _Prediction:
    likelihood = model.likelihood
    if is_conjugate(likelihood):
        f: Any = model.posterior(X)
        y: Any = model.posterior(X, observation_noise=True)
        mean, sd = (t[..., output] for t in (f.mean, f.variance.clamp_min(0).sqrt()))
        noise = y.variance[..., output].clamp_min(0).sqrt()
        return _Prediction(mean, sd, mean - _Z95 * sd, mean + _Z95 * sd, noise)
    given: dict[str, Any] = (
        {"total_count": 1.0} if isinstance(likelihood, BinomialLikelihood) else {}
    )
    given = {k: torch.full(X.shape[:1], float(v)).to(X) for k, v in {**given, **arguments}.items()}
    latent: Any = model.posterior(X)
    mean, variance = latent.mean, latent.variance.clamp_min(0)
    if not has_one_latent(likelihood):
        generator = torch.Generator().manual_seed(0)
        draws = torch.randn(_NUM_DRAWS, 1, mean.shape[-1], generator=generator, device="cpu").to(X)
        values = mean + variance.sqrt() * draws
        probabilities = likelihood.forward(values.unsqueeze(-2), **given).probs[..., 0, output]
        low, high = (probabilities.quantile(p, 0) for p in (0.025, 0.975))
        return _Prediction(probabilities.mean(0), probabilities.std(0), low, high, None)
    mean, sd = mean[..., output], variance[..., output].sqrt()

    def expected(f: Tensor) -> Tensor:
        return conditional_moments(likelihood.forward(f, **given))[0]

    return _moments_of(expected, mean, sd)


def _moments_of(expected: Callable[[Tensor], Tensor], mean: Tensor, sd: Tensor) -> _Prediction:
    """Mean, standard deviation and band of a monotone function of a Gaussian."""
    nodes, weights = normal_nodes(mean), normal_weights(mean).unsqueeze(-1)
    values = expected(mean + sd * nodes)
    first = (weights * values).sum(0)
    second = (weights * (values - first).square()).sum(0)
    ends = torch.stack([expected(mean - _Z95 * sd), expected(mean + _Z95 * sd)])
    return _Prediction(first, second.sqrt(), ends.amin(0), ends.amax(0), None)


# -------------------------------------------------------------------------------- drawing


class _Points(NamedTuple):
    """Memory and inducing points, as far as they are drawn."""

    inputs: Tensor | None
    targets: Tensor | None
    sizes: Any
    Z: Tensor | None


def _array(values: Tensor) -> Any:
    return values.detach().cpu().numpy()


def _axes(axes: Any, number: int, size: tuple[float, float], share: bool = False) -> list[Any]:
    """The axes that were given, or those of a new figure."""
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


def _draw_line(
    panel: Any,
    x: Any,
    prediction: _Prediction,
    points: _Points,
    label: str,
    name: str,
    legend: bool,
) -> None:
    x, mean = _array(x), prediction.mean
    if prediction.noise is not None:
        low, high = mean - _Z95 * prediction.noise, mean + _Z95 * prediction.noise
        panel.fill_between(x, low, high, color=_MEAN, alpha=0.1, linewidth=0, label="observations")
    band = {"color": _MEAN, "alpha": 0.25, "linewidth": 0, "label": "95 %"}
    panel.fill_between(x, prediction.low, prediction.high, **band)
    panel.plot(x, mean, color=_MEAN, linewidth=2, label="mean")
    if points.inputs is not None and points.targets is not None:
        panel.scatter(
            *(_array(points.inputs[:, 0]), _array(points.targets)),
            s=_array(points.sizes),
            color=_POINTS,
            edgecolors="white",
            linewidths=0.4,
            zorder=3,
            label="memory (size: leverage)",
        )
    if points.Z is not None:
        panel.plot(
            *(_array(points.Z[:, 0]), [0.025] * len(points.Z)),
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
    prediction: _Prediction,
    points: _Points,
    label: str,
    names: list[str],
    kind: str,
    probability: bool,
) -> None:
    a, b = (_array(line) for line in lines)
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
            style = {"c": _array(points.targets), "vmin": low, "vmax": high, **colours}
        panel.scatter(
            *_array(points.inputs.T),
            s=_array(points.sizes),
            edgecolors="black",
            linewidths=0.5,
            **style,
        )
    if points.Z is not None:
        colour = "black" if kind == "mean" else "0.75"
        panel.scatter(*_array(points.Z.T), s=26, marker="+", c=colour, linewidths=0.9)
    panel.figure.colorbar(drawn, ax=panel, shrink=0.9)
    panel.set(
        xlabel=names[0],
        ylabel=names[1],
        title=label if kind == "mean" else "standard deviation",
        xlim=(float(a[0]), float(a[-1])),
        ylim=(float(b[0]), float(b[-1])),
    )


def _draw_hyperparameters(panel: Any, seen: list[float], records: list[UpdateRecord]) -> None:
    """Positive ones in logarithms, the others dashed against an axis of their own."""
    other = None
    for k, name in enumerate(records[0].hyperparameters):
        values = [r.hyperparameters.get(name) for r in records]
        shape = values[0].shape if values[0] is not None else None
        if any(value is None or value.shape != shape for value in values):
            continue  # not the same parameter all along
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
            target.plot(seen, _array(curve), style, color=colour, linewidth=1.6, alpha=0.8)
            panel.plot([], [], style, color=colour, label=label)
    panel.set_yscale("log")
    panel.set_ylabel("hyperparameters")
    panel.legend(frameon=False, fontsize=8, ncols=2)

"""The figure of `tutorials.stream`, whose models are not a `SequentialGP`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

if TYPE_CHECKING:
    from tutorials.stream import Comparison, Stream

STREAM, REFIT, NEW, OLD = "#12355b", "#f05d23", "#f2a541", "0.82"


class StreamFigure:
    """Two streams: the posterior after some of the batches, and the test NLPD after all.

    Args:
        batches: The number of batches.
        size: The number of points in a batch.
    """

    def __init__(self, batches: int, size: int) -> None:
        self.figure = Figure(figsize=(15, 7.4), layout="constrained")
        self.axes = self.figure.subplots(2, 4)
        self.batches, self.size = batches, size
        self.shown = (batches // 5, batches // 2, batches)
        self.nlpd: list[list[tuple[float, float]]] = [[], []]
        for row in self.axes:
            row[1].sharey(row[0])
            row[2].sharey(row[0])

    @torch.no_grad()
    def add_labels(self, data: Stream, now: Comparison) -> None:
        """Draw the probability of a 1, and the decision boundaries of both models."""
        axes = self._panel(0, data, now)
        if axes is None:
            return
        a, b = torch.linspace(-2.3, 2.3, 90), torch.linspace(-1.5, 1.5, 60)
        x = torch.cartesian_prod(a, b)
        p, q = (data.likelihood(m(x)).probs.view(90, 60).T for m in (now.stream, now.refit))
        axes.contourf(a, b, p, torch.linspace(0, 1, 21), cmap="RdBu_r", alpha=0.55)
        self._points(axes, data, now.batch, c=data.y, cmap="RdBu_r", vmin=0, vmax=1)
        axes.scatter(
            data.inducing_points[:, 0],
            data.inducing_points[:, 1],
            s=16,
            c="black",
            marker="+",
            linewidths=0.8,
        )
        axes.contour(a, b, p, [0.5], colors=STREAM, linewidths=3)
        axes.contour(a, b, q, [0.5], colors=REFIT, linewidths=1.6, linestyles="--")
        axes.set(xlabel="$x_1$", ylabel="$x_2$" if axes is self.axes[0, 0] else "")

    @torch.no_grad()
    def add_counts(self, data: Stream, now: Comparison, rate: Callable[[Tensor], Tensor]) -> None:
        """Draw the rates of both models with a 95 % band, and the true rate."""
        axes = self._panel(1, data, now)
        if axes is None:
            return
        t, link = torch.linspace(0, 10, 300), torch.nn.functional.softplus
        f, g = (model(t.unsqueeze(-1)) for model in (now.stream, now.refit))
        low, high = (link(f.mean + z * f.stddev) for z in (-1.96, 1.96))
        colors = [OLD] * (now.batch - 1) * self.size + [NEW] * self.size
        self._points(axes, data, now.batch, c=colors)
        axes.fill_between(t, low, high, color=STREAM, alpha=0.2, linewidth=0)
        axes.plot(t, rate(t), "k:", linewidth=1.2, label="truth")
        axes.plot(t, link(f.mean), color=STREAM, linewidth=3, label="stream")
        axes.plot(t, link(g.mean), "--", color=REFIT, linewidth=1.6, label="refit on all so far")
        zeros = torch.zeros(len(data.inducing_points))
        axes.plot(data.inducing_points, zeros - 0.6, "k+", markersize=5, label="inducing points")
        axes.set(
            xlabel="time",
            ylabel="count" if axes is self.axes[1, 0] else "",
            ylim=(-1.2, float(data.y.max()) + 1),
        )
        if now.batch == self.shown[0]:
            axes.legend(frameon=False, loc="upper right", fontsize=9)

    def _panel(self, row: int, data: Stream, now: Comparison) -> Axes | None:
        """The axes for the posterior after this batch, ``None`` if it is not shown."""
        self.nlpd[row].append(now.nlpd)
        if now.batch == self.batches:
            axes, batch = self.axes[row, 3], range(1, self.batches + 1)
            stream, refit = zip(*self.nlpd[row], strict=True)
            axes.plot(
                batch, stream, color=STREAM, linewidth=3, label="stream: each batch used once"
            )
            axes.plot(batch, refit, "o--", color=REFIT, linewidth=1.6, label="refit on all so far")
            axes.set(title=f"{data.name}: test NLPD", xlabel="batch")
            if row == 0:
                axes.legend(frameon=False)
            axes.spines[["top", "right"]].set_visible(False)
        if now.batch not in self.shown:
            return None
        axes = self.axes[row, self.shown.index(now.batch)]
        axes.set_title(f"{data.name} after batch {now.batch} of {self.batches}")
        return axes

    def _points(self, axes: Axes, data: Stream, batch: int, c: Any, **style: Any) -> None:
        """Draw the data so far: small points for earlier batches, large ones for this one."""
        old, new = slice((batch - 1) * self.size), slice((batch - 1) * self.size, batch * self.size)
        across, up = (data.x[:, 0], data.y) if data.x.shape[-1] == 1 else data.x.T
        axes.scatter(across[old], up[old], c=c[old], s=5, alpha=0.6, linewidths=0, **style)
        axes.scatter(across[new], up[new], c=c[new], s=20, linewidths=0.4, edgecolors="w", **style)

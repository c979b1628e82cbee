"""A GPyTorch model that learns from a stream
==========================================

Labels in the plane and counts in time, one batch after another.

Run ``python -m tutorials.stream`` (``--short`` for fewer data). Both streams arrive from left to
right, which is the hardest order for a model that uses each batch only once. After each batch it is
compared with a model that is fitted from scratch to all data so far. The figure is
saved as ``figures/stream.png``.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import NamedTuple

import gpytorch
import torch
from gpytorch.likelihoods import BernoulliLikelihood, Likelihood, PoissonLikelihood
from torch import Tensor

from seqgp import DualVariationalStrategy
from seqgp.progress import progress_bar
from tutorials import common
from tutorials.plotting import StreamFigure

# %%
# The model
# ---------
#
# Only the variational strategy differs from any other GPyTorch model.


class GP(gpytorch.models.ApproximateGP):
    """An ordinary GPyTorch model, with another variational strategy."""

    def __init__(self, inducing_points: Tensor, mean: float) -> None:
        super().__init__(DualVariationalStrategy(self, inducing_points))
        self.mean_module = gpytorch.means.ConstantMean().initialize(constant=mean)
        kernel = gpytorch.kernels.MaternKernel(nu=2.5).initialize(lengthscale=0.8)
        self.covar_module = gpytorch.kernels.ScaleKernel(kernel).initialize(outputscale=6.0)

    def forward(self, x: Tensor) -> gpytorch.distributions.MultivariateNormal:
        """The prior."""
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


# %%
# Two streams
# -----------
#
# Labels in the plane and counts in time. Both arrive from left to right.


class Stream(NamedTuple):
    """Data in the order of arrival, test data, and the options of the model."""

    name: str
    x: Tensor
    y: Tensor
    test_x: Tensor
    test_y: Tensor
    likelihood: Likelihood
    inducing_points: Tensor
    batches: int
    mean: float = 0.0


class Comparison(NamedTuple):
    """Two models after a batch: one learnt from the stream, one fitted to all data so far."""

    batch: int
    stream: GP
    refit: GP
    nlpd: tuple[float, float]


def labels(batches: int, size: int) -> Stream:
    """Two interleaved half circles, 0 and 1, sorted by the first input."""

    def draw(n: int) -> tuple[Tensor, Tensor]:
        angle, y = torch.pi * torch.rand(n), torch.arange(n) % 2
        sign = 1.0 - 2.0 * y
        x = torch.stack([angle.cos() - 0.5 * sign, sign * (angle.sin() - 0.25)], -1)
        return x + 0.25 * torch.randn(n, 2), y.to(x)

    x, y = draw(batches * size)
    order = x[:, 0].argsort()
    Z = torch.cartesian_prod(torch.linspace(-2, 2, 9), torch.linspace(-1.2, 1.2, 6))
    return Stream("labels", x[order], y[order], *draw(1000), BernoulliLikelihood(), Z, batches)


def rate(t: Tensor) -> Tensor:
    """The rate of the events."""
    return 4 + 3 * torch.sin(1.3 * t) + 6 * torch.exp(-((t - 6.5) ** 2) / 0.3)


def counts(batches: int, size: int) -> Stream:
    """Events whose rate changes with time."""

    def draw(t: Tensor) -> tuple[Tensor, Tensor]:
        return t.unsqueeze(-1), torch.poisson(rate(t))

    x, y = draw(torch.linspace(0, 10, batches * size))
    Z = torch.linspace(0, 10, 30).unsqueeze(-1)
    test = draw(10 * torch.rand(1000))
    return Stream("counts", x, y, *test, PoissonLikelihood(), Z, batches, mean=4.0)


# %%
# Learning
# --------
#
# ``converge(..., add=True)`` adds a batch to what has been learnt. For comparison, a second model
# is fitted to all data so far.


def learn(data: Stream) -> Iterator[Comparison]:
    """Learn from a stream, batch by batch."""
    print(f"\n{data.name}\nbatch   seen  steps  ms update  ms refit  NLPD stream  NLPD refit")
    stream, size = GP(data.inducing_points, data.mean).eval(), len(data.x) // data.batches
    for batch in progress_bar(range(1, data.batches + 1), desc=data.name, leave=False):
        new, seen = slice((batch - 1) * size, batch * size), slice(batch * size)
        start = time.perf_counter()

        # Uses the new batch only; add=True adds it to what has been learnt.
        info = stream.variational_strategy.converge(
            data.x[new], data.y[new], data.likelihood, add=True
        )
        middle = time.perf_counter()

        # For comparison: a new model that uses all data so far.
        refit = GP(data.inducing_points, data.mean).eval()
        refit.variational_strategy.converge(data.x[seen], data.y[seen], data.likelihood)
        end = time.perf_counter()

        nlpd = nlpd_of(stream, data), nlpd_of(refit, data)
        print(
            f"{batch:5}{batch * size:7}{info.steps:7}{1e3 * (middle - start):11.1f}"
            f"{1e3 * (end - middle):10.1f}{nlpd[0]:13.4f}{nlpd[1]:12.4f}"
        )
        yield Comparison(batch, stream, refit, nlpd)


@torch.no_grad()
def nlpd_of(model: GP, data: Stream) -> float:
    """Negative log predictive density of the test data, per point: lower is better."""
    return -float(data.likelihood.log_marginal(data.test_y, model(data.test_x)).mean())


# %%
# Results
# -------
#
# Two tables, and one figure.


def main(arguments: list[str] | None = None) -> None:
    """Two streams: two tables and one figure."""
    given = common.parser(__doc__).parse_args(arguments)
    common.begin(given)
    batches, size = (5, 40) if given.short else (10, 200)
    figure = StreamFigure(batches, size)
    for comparison in learn(data := labels(batches, size)):
        figure.add_labels(data, comparison)
    for comparison in learn(data := counts(batches, size)):
        figure.add_counts(data, comparison, rate)
    print(f"\nThe figure is in {common.save(figure.figure, 'stream')}.")


if __name__ == "__main__":
    main()

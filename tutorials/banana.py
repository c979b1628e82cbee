"""What the memory is for
======================

Labels arrive from left to right, and each batch is used once.

Run ``python -m tutorials.banana`` (``--short`` for fewer points). Two classes have the shape of
interlocking bananas. Their points arrive from left to right in four batches, and each batch is used
once. A model that is fitted to each new batch forgets the others. A model that is refitted to all
data has to store all of them. `SequentialGP.update` keeps forty points in its memory, and a summary
of all others.

What to look for: the decision boundary (black) on the left does not move when data arrive on the
right, and the points in memory (ringed) are those that determine the boundary. The last figure
ranks them by leverage, which measures their influence on the posterior. Figures are saved in
``figures/``.
"""

from __future__ import annotations

import torch
from botorch.fit import fit_gpytorch_mll
from gpytorch.kernels import MaternKernel, ScaleKernel
from gpytorch.likelihoods import BernoulliLikelihood
from torch import Tensor

import seqgp
from seqgp.progress import progress_bar
from seqgp.streaming import MemoryOptions
from tutorials import common

BATCHES = 4


# %%
# The data
# --------
#
# Two interlocking classes.


def bananas(n: int) -> tuple[Tensor, Tensor]:
    """Inputs ``n x 2`` and labels ``n x 1``, 0 or 1, in random order."""
    label = torch.arange(n) % 2
    angle = torch.pi * torch.rand(n)
    sign = 1.0 - 2.0 * label
    X = torch.stack([1.3 * (angle.cos() - 0.5 * sign), sign * (angle.sin() - 0.3)], -1)
    return X + 0.24 * torch.randn(n, 2), label.to(X).unsqueeze(-1)


# %%
# The models
# ----------
#
# The same classifier learns in three ways: from the stream, from the last batch only, and by
# refitting it to all data so far.


def new_model(X: Tensor, Y: Tensor) -> seqgp.SequentialGP:
    """A classifier of the first data."""
    return seqgp.SequentialGP(
        X,
        Y,
        likelihood=BernoulliLikelihood(),
        covar_module=ScaleKernel(MaternKernel(nu=2.5)),
        inducing_points=30,
    )


def fitted(X: Tensor, Y: Tensor) -> seqgp.SequentialGP:
    """The same model with hyperparameters fitted to the data."""
    model = new_model(X, Y)
    options = {"options": {"maxiter": 30}}
    fit_gpytorch_mll(seqgp.DualELBO(model.likelihood, model), optimizer_kwargs=options)
    return model


@torch.no_grad()
def accuracy(model: seqgp.SequentialGP, X: Tensor, Y: Tensor) -> float:
    """The share of correct labels."""
    return float(((model.posterior(X).mean > 0) == (Y > 0.5)).double().mean())


# %%
# Four batches
# ------------
#
# The stream needs one call of ``update`` per batch.


def main(arguments: list[str] | None = None) -> None:
    """Learn four batches in three ways."""
    given = common.parser(__doc__).parse_args(arguments)
    common.begin(given)
    size = 60 if given.short else 200
    X, Y = bananas(BATCHES * size)
    order = X[:, 0].argsort()
    X, Y = X[order], Y[order]
    test = bananas(2000)
    parts = list(zip(X.split(size), Y.split(size), strict=True))

    figure, panels = common.new_figure(1, BATCHES, (19, 4.3), sharex=True, sharey=True)
    bounds = torch.tensor([[-2.8, -1.6], [2.8, 1.6]])
    model = new_model(*parts[0])
    model.update(*(part[:0] for part in parts[0]))  # nothing new: learns hyperparameters
    records = []
    print("accuracy everywhere    the stream   this batch only   refitted to all so far")
    for k, (x, y) in enumerate(progress_bar(parts, desc="batches", leave=False)):
        if k:
            records.append(model.update(x, y, memory=MemoryOptions(capacity=40)))
        seen = slice((k + 1) * size)
        only, refitted = fitted(x, y), fitted(X[seen], Y[seen])
        cells = [f"{accuracy(way, *test):.3f}" for way in (model, only, refitted)]
        print(f"after batch {k + 1}{cells[0]:>20}{cells[1]:>18}{cells[2]:>22}")
        panel = panels[0, k]
        now = {"c": y.squeeze(-1).numpy(), "cmap": "RdBu_r", "s": 6, "alpha": 0.6}
        seqgp.plots.posterior(model, panel, bounds=bounds, show="mean", memory=k > 0)
        panel.scatter(*x.T.numpy(), vmin=0, vmax=1, zorder=1.5, **now)
        panel.set_title(f"after batch {k + 1} (small points)")
    paths = [common.save(figure, "banana")]
    ranking, axes = common.new_figure(1, 1, (7, 6))
    seqgp.plots.leverage(model, axes)
    paths.append(common.save(ranking, "banana-leverage"))
    history, axes = common.new_figure(3, 1, (8, 8), sharex=True)
    seqgp.plots.history(records, axes)
    paths.append(common.save(history, "banana-history"))
    print(f"The model has learnt {model.num_seen} points, {model.num_data} are in its memory.")
    print("Figures: " + ", ".join(map(str, paths)))


if __name__ == "__main__":
    main()

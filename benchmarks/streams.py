"""Data sets in pieces, and predictions of models that have learnt some of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from gpytorch.kernels import ConstantKernel, Kernel, MaternKernel, ScaleKernel
from gpytorch.likelihoods import BernoulliLikelihood, GaussianLikelihood, Likelihood
from torch import Tensor

from benchmarks.data import find
from seqgp.likelihoods.predictive import log_predictive


@dataclass(frozen=True)
class Stream:
    """One fold of a data set, in pieces.

    Attributes:
        pieces: Inputs ``n_i x d`` and targets ``n_i x 1``, in the order in which they come.
        test: Inputs and targets that are never learnt.
        Z: ``m x d`` initial inducing points.
        regression: Whether targets are real numbers, or 0/1.
        offset: Variance of a constant that is added to the function; 0 for none.
        lengthscale: The kernel's, to begin with.
        variance: The kernel's, to begin with.
    """

    pieces: list[tuple[Tensor, Tensor]]
    test: tuple[Tensor, Tensor]
    Z: Tensor
    regression: bool
    offset: float = 0.0
    lengthscale: float = 1.0
    variance: float = 1.0

    @property
    def everything(self) -> tuple[Tensor, Tensor]:
        """All training data at once."""
        X, Y = zip(*self.pieces, strict=True)
        return torch.cat(X), torch.cat(Y)

    def kernel(self, ard: bool = False) -> Kernel:
        """Matern-5/2, by default with unit lengthscale and variance."""
        dims = self.Z.shape[-1] if ard else None
        kernel = ScaleKernel(MaternKernel(nu=2.5, ard_num_dims=dims)).to(self.Z)
        kernel.base_kernel.lengthscale, kernel.outputscale = self.lengthscale, self.variance
        if not self.offset:
            return kernel
        constant = ConstantKernel().to(self.Z)
        constant.constant = self.Z.new_full((1,), self.offset)
        return constant + kernel

    def likelihood(self, noise: float = 0.1) -> Likelihood:
        """Gaussian or Bernoulli."""
        if not self.regression:
            return BernoulliLikelihood()
        likelihood = GaussianLikelihood().to(self.Z)
        likelihood.noise = noise
        return likelihood


class Latent(NamedTuple):
    """What a method says about the function at some inputs, ``n`` each, and its likelihood."""

    mean: Tensor
    variance: Tensor
    likelihood: Likelihood


#: A method is trained on a stream and returns its predictions at given inputs.
Method = Callable[[Stream], Callable[[Tensor], Latent]]


@torch.no_grad()
def score(stream: Stream, predict: Callable[[Tensor], Latent]) -> dict[str, float]:
    """Negative log predictive density, and root mean square error or error rate, on test data."""
    X, Y = stream.test
    mean, variance, likelihood = predict(X)
    y = Y.squeeze(-1)
    nlpd = -log_predictive(likelihood, y, mean, variance).mean()
    if stream.regression:
        return {"nlpd": float(nlpd), "rmse": float((mean - y).square().mean().sqrt())}
    return {"nlpd": float(nlpd), "error": float(((mean > 0) != (y > 0)).double().mean())}


def load(name: str) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Inputs and targets of a data set of ``uci/``; ``made`` needs no file."""
    if name.startswith("made"):
        rng = np.random.default_rng(0)
        X = rng.normal(size=(300, 2))
        f = np.sin(2 * X[:, 0]) + X[:, 1]
        y = f + 0.3 * rng.normal(size=300)
        return X, y if name == "made_regression" else (y > 0).astype(float)
    path = find(f"uci/{name}.csv")
    table = np.loadtxt(path, delimiter=",", skiprows=1)
    return table[:, :-1], table[:, -1]


def fold_of(
    name: str,
    regression: bool,
    fold: int,
    num_pieces: int,
    order: str,
    m: int = 100,
    num_folds: int = 10,
) -> Stream:
    """One fold of a data set: standardised, sorted by its first input or shuffled, in pieces.

    Args:
        name: The data set.
        regression: Whether its targets are real numbers.
        fold: Which tenth is the test set.
        num_pieces: How many pieces.
        order: ``"sorted"`` or ``"shuffled"``.
        m: The number of inducing points, at the first of the shuffled training inputs.
        num_folds: The number of folds.
    """
    X, y = load(name)
    scale = X.std(0)
    X = (X - X.mean(0)) / np.where(scale > 0, scale, 1)
    y = (y - y.mean()) / y.std() if regression else (y > y.min()).astype(float)
    shuffled = np.random.RandomState(0).permutation(len(y))
    folds = np.array_split(shuffled, num_folds)
    train = np.concatenate([part for i, part in enumerate(folds) if i != fold])
    Z = X[train[:m]]
    if order == "sorted":
        train = train[np.argsort(X[train, 0], kind="stable")]
    pieces = [
        (torch.from_numpy(X[part]), torch.from_numpy(y[part]).unsqueeze(-1))
        for part in np.array_split(train, num_pieces)
    ]
    test = torch.from_numpy(X[folds[fold]]), torch.from_numpy(y[folds[fold]]).unsqueeze(-1)
    return Stream(pieces, test, torch.from_numpy(Z.copy()), regression)

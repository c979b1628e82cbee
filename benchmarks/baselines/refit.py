"""BoTorch's variational GP, refitted from scratch on all data so far whenever a piece arrives."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from botorch.fit import fit_gpytorch_mll
from botorch.models import SingleTaskVariationalGP
from gpytorch.means import ZeroMean
from gpytorch.mlls import VariationalELBO
from torch import Tensor

from benchmarks.streams import Latent, Stream


class Refit:
    """A `SingleTaskVariationalGP` of all data that it has been given."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.seen: list[tuple[Tensor, Tensor]] = []

    def learn(self, X: Tensor, Y: Tensor) -> None:
        """One more piece of data, ``n x d`` and ``n x 1``: start again."""
        self.seen.append((X, Y))
        inputs, targets = (torch.cat(part) for part in zip(*self.seen, strict=True))
        self.model = SingleTaskVariationalGP(
            inputs,
            targets,
            likelihood=self.stream.likelihood(),
            covar_module=self.stream.kernel(),
            mean_module=ZeroMean(),
            inducing_points=self.stream.Z.clone(),
        )
        bound = VariationalELBO(self.model.likelihood, self.model.model, num_data=len(inputs))
        fit_gpytorch_mll(bound)

    @torch.no_grad()
    def predict(self, X: Tensor) -> Latent:
        """Mean and variance of the function."""
        f = self.model.eval()(X)
        return Latent(f.mean, f.variance, self.model.likelihood)


def steps(stream: Stream) -> Iterator[Refit]:
    """The model after each piece."""
    model = Refit(stream)
    for X, Y in stream.pieces:
        model.learn(X, Y)
        yield model


def refit(stream: Stream) -> Callable[[Tensor], Latent]:
    """Trained on a stream."""
    *_, model = steps(stream)
    return model.predict

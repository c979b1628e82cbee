"""`SequentialGP` on a stream, by the paper's rule, and on all data at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from botorch.fit import fit_gpytorch_mll
from gpytorch.means import ZeroMean
from torch import Tensor

from benchmarks.streams import Latent, Stream
from seqgp import DualELBO, SequentialGP
from seqgp.memory import MemoryOptions


def ours(
    stream: Stream, ard: bool = False, policy: str = "leverage", **options: Any
) -> Callable[[Tensor], Latent]:
    """All defaults, but for the memory: 10 more points after each piece, as in the paper."""
    X, Y = stream.pieces[0]
    model = SequentialGP(
        X[:0],
        Y[:0],
        likelihood=stream.likelihood(),
        covar_module=stream.kernel(ard),
        mean_module=ZeroMean(),
        inducing_points=stream.Z,
    )
    memory = MemoryOptions(capacity=None, per_update=10, policy=policy)
    model.update_stream(stream.pieces, progress=False, memory=memory, **options)
    return lambda inputs: _latent(model, inputs)


def paper(stream: Stream, **options: Any) -> Callable[[Tensor], Latent]:
    """The paper's own rule."""
    return ours(stream, mode="paper", **options)


def offline(stream: Stream, ard: bool = False) -> Callable[[Tensor], Latent]:
    """All data at once: what streaming is to equal."""
    model = fitted_to(stream, *stream.everything, ard=ard)
    return lambda inputs: _latent(model, inputs)


def fitted_to(
    stream: Stream, X: Tensor, Y: Tensor, ard: bool = False, learn_inducing_points: bool = True
) -> SequentialGP:
    """A model with the hyperparameters that are best for some data."""
    model = SequentialGP(
        X,
        Y,
        likelihood=stream.likelihood(),
        covar_module=stream.kernel(ard),
        mean_module=ZeroMean(),
        inducing_points=stream.Z,
        learn_inducing_points=learn_inducing_points,
    )
    fit_gpytorch_mll(DualELBO(model.likelihood, model), starts=1, epochs=50)
    return model


@torch.no_grad()
def _latent(model: SequentialGP, X: Tensor) -> Latent:
    posterior = model.eval()(X)
    return Latent(posterior.mean, posterior.variance, model.likelihood)

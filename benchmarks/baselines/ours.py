"""`SequentialGP` on a stream, by the paper's rule, and on all data at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from botorch.fit import fit_gpytorch_mll
from gpytorch.means import ZeroMean
from torch import Tensor

from benchmarks.streams import Latent, Stream
from seqgp import DualELBO, SequentialGP
from seqgp.streaming import MemoryOptions


def steps(
    stream: Stream,
    ard: bool = False,
    policy: str = "leverage",
    memory: MemoryOptions | None = None,
    learn: bool = True,
    learn_for: int | None = None,
    **options: Any,
) -> Iterator[SequentialGP]:
    """The model after each piece.

    Args:
        stream: The data.
        ard: Whether each input has a lengthscale of its own.
        policy: Of the memory, which takes over 10 points of each piece, as in the paper.
        memory: Another memory instead.
        learn: Whether hyperparameters are learnt.
        learn_for: For how many pieces; by default for all.
        options: Of `SequentialGP.update`; all others have their defaults.
    """
    X, Y = stream.pieces[0]
    model = SequentialGP(
        X[:0],
        Y[:0],
        likelihood=stream.likelihood(),
        covar_module=stream.kernel(ard),
        mean_module=ZeroMean(),
        inducing_points=stream.Z,
        outcome_transform=None,
    )
    if memory is None:
        memory = MemoryOptions(capacity=None, per_update=10, policy=policy)
    for number, (X, Y) in enumerate(stream.pieces):
        learns = learn and (learn_for is None or number < learn_for)
        model.update(X, Y, memory=memory, learn=learns, **options)
        yield model


def ours(stream: Stream, **options: Any) -> Callable[[Tensor], Latent]:
    """Trained on a stream; options as for `steps`."""
    *_, model = steps(stream, **options)
    return partial(latent, model)


def paper(stream: Stream, **options: Any) -> Callable[[Tensor], Latent]:
    """The paper's own rule."""
    return ours(stream, mode="paper", **options)


def offline(stream: Stream, ard: bool = False) -> Callable[[Tensor], Latent]:
    """All data at once: what streaming is to equal."""
    model = fitted_to(stream, *stream.everything, ard=ard)
    return partial(latent, model)


def fitted_to(
    stream: Stream,
    X: Tensor,
    Y: Tensor,
    ard: bool = False,
    learn: bool = True,
    learn_inducing_points: bool = True,
) -> SequentialGP:
    """A model of some data, with the hyperparameters and inducing points that are best for them.

    Args:
        stream: Gives kernel, likelihood and initial inducing points.
        X: ``n x d`` inputs.
        Y: ``n x 1`` targets.
        ard: Whether each input has a lengthscale of its own.
        learn: Whether anything but the posterior is learnt at all.
        learn_inducing_points: Whether inducing points are.
    """
    model = SequentialGP(
        X,
        Y,
        likelihood=stream.likelihood(),
        covar_module=stream.kernel(ard),
        mean_module=ZeroMean(),
        inducing_points=stream.Z,
        learn_inducing_points=learn_inducing_points,
        outcome_transform=None,
    )
    if learn:
        fit_gpytorch_mll(DualELBO(model.likelihood, model), starts=1, epochs=50)
    return model


@torch.no_grad()
def latent(model: SequentialGP, X: Tensor) -> Latent:
    """What a model says about the function at some inputs."""
    posterior = model.eval()(X)
    return Latent(posterior.mean, posterior.variance, model.likelihood)

"""States of methods after each piece of a stream, stored for figures."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from benchmarks.baselines import ours
from benchmarks.streams import Latent


class Snapshot(NamedTuple):
    """A method after some of the pieces: what it predicts, its inducing points, its memory."""

    predict: Callable[[Tensor], Latent]
    Z: Tensor
    memory: Tensor


def of_rival(models: Iterator[Any], points: str) -> Iterator[Snapshot]:
    """Snapshots of a rival, which has no memory; ``points`` names its inducing points."""
    for model in models:
        Z = getattr(model, points).detach()
        yield Snapshot(model.predict, Z, Z[:0])


def of_ours(models: Iterator[Any]) -> Iterator[Snapshot]:
    """Snapshots of a `SequentialGP`."""
    for model in models:
        Z = model.variational_strategy.inducing_points.detach()
        yield Snapshot(partial(ours.latent, model), Z, model.stream.observations.inputs)


def pack(values: Tensor) -> str:
    """Numbers for a figure, in half precision, as text."""
    return base64.b64encode(values.detach().numpy().astype("<f2").tobytes()).decode()


def unpack(text: str, columns: int) -> np.ndarray[Any, Any]:
    """The inverse of `pack`: ``n x columns``."""
    values = np.frombuffer(base64.b64decode(text), dtype="<f2").astype(float)
    return values.reshape(-1, columns)

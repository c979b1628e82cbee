"""What loading, fitting and showing its data need of a model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor

from seqgp.models.training_graph import TrainingGraph
from seqgp.streaming.model import StreamModel


class DataModel(StreamModel, Protocol):
    """A model with its data and transforms; `seqgp.SequentialGP` is one."""

    outcome_transform: Any
    #: Whether the user has passed inducing points as a tensor.
    keeps_inducing_points: bool
    #: Whether inducing points are moved by gradient.
    fits_inducing_points: bool
    #: Whether inducing points may be replaced.
    changes_inducing_points: bool
    #: Whether the last batch dimension is that of the outputs.
    has_output_dim: bool
    #: Inputs that the model has been conditioned on.
    conditioned_inputs: tuple[Tensor, ...]
    #: The training data as they were passed, if they have a graph.
    training_graph: TrainingGraph | None
    #: The hyperparameters and transforms that the posterior belongs to.
    settled_at: tuple[Tensor, ...]

    @property
    def num_data(self) -> int:
        """How many observations the model holds."""
        ...

    @property
    def num_seen(self) -> int:
        """How many it has learnt."""
        ...

    @property
    def num_updates(self) -> int:
        """How many updates there have been."""
        ...

    @property
    def inducing_points_cover_data(self) -> bool:
        """Whether the inducing points are the inputs."""
        ...

    def transform_train_inputs(self, X: Tensor) -> Tensor:
        """Training inputs as the model sees them."""
        ...

    def to_targets(self, Y: Tensor) -> Tensor:
        """Observations ``... x n x m`` as ``... [x m] x n``."""
        ...

    def to_columns(self, targets: Tensor) -> Tensor:
        """The inverse of `to_targets`."""
        ...

    def to(self, like: Tensor) -> Any:
        """Take on the precision and the device of a tensor."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """The state of the model."""
        ...

    def modules(self) -> Iterator[torch.nn.Module]:
        """All modules in it."""
        ...

    def children(self) -> Iterator[torch.nn.Module]:
        """The modules that it consists of."""
        ...

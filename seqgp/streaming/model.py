"""The interface of a model that updates need."""

from __future__ import annotations

from typing import Any, Protocol, Self

import torch
from botorch.models.transforms.outcome import OutcomeTransform
from botorch.models.utils.inducing_point_allocators import InducingPointAllocator
from gpytorch.kernels import Kernel
from gpytorch.likelihoods import Likelihood
from gpytorch.means import Mean
from torch import Tensor

from seqgp.dual import Sites
from seqgp.observations import Observations
from seqgp.streaming.guard import Guard
from seqgp.streaming.memory import MemoryOptions
from seqgp.streaming.state import StreamState
from seqgp.variational.strategy import DualVariationalStrategy


class StreamModel(Protocol):
    """A model that learns from a stream; `seqgp.SequentialGP` is one."""

    variational_strategy: DualVariationalStrategy
    likelihood: Likelihood
    covar_module: Kernel
    stream: StreamState
    #: Locks, so that readers never see half an update.
    guard: Guard
    memory_options: MemoryOptions
    max_inducing: int
    inducing_point_allocator: InducingPointAllocator | None
    #: Columns in which inducing points only have observed values.
    discrete_dims: tuple[int, ...]
    #: Whether targets are standardised by default, and not by the user's choice.
    standardizes_by_default: bool
    #: Whether the user has passed inducing points as a tensor.
    keeps_inducing_points: bool
    #: Whether inducing points are optimised by gradient.
    fits_inducing_points: bool
    #: Whether inducing points may be replaced.
    changes_inducing_points: bool
    training: bool
    outcome_transform: OutcomeTransform
    mean_module: Mean

    @property
    def batch_shape(self) -> torch.Size:
        """The batch shape of the model."""
        ...

    @property
    def num_columns(self) -> int:
        """The number of columns of observations."""
        ...

    def train(self, mode: bool = True) -> Self:
        """Set train or eval mode."""
        ...

    def check_not_fantasy(self) -> None:
        """Raise if the model is a conditioned (fantasy) model."""
        ...

    def checked(
        self, X: Tensor, Y: Tensor, noise: Tensor | None, arguments: dict[str, Any]
    ) -> Observations:
        """Check new observations, and return them as the model stores them."""
        ...

    def transformed(self, observations: Observations) -> Observations:
        """Return stored observations as the strategy sees them."""
        ...

    def refresh(
        self, tol: float = 1e-8, max_steps: int | None = None, start: Sites | None = None
    ) -> Tensor:
        """Converge the sites of the stored observations, and return the bound."""
        ...

    def bound(
        self,
        start: Sites | None = None,
        tol: float = 1e-8,
        stands_for: Tensor | None = None,
        max_steps: int | None = None,
        exact: bool = False,
        with_past: bool = True,
    ) -> tuple[Tensor, Sites]:
        """Return the bound of stored observations and summary, maximised over q."""
        ...

    def log_target_scale(self) -> Tensor | None:
        """Return ``[m x] 1``, the log of the ratio of observations to stored targets in scale."""
        ...

    def note_hyperparameters(self) -> None:
        """Record that the posterior belongs to the present hyperparameters and transforms."""
        ...

    def is_settled(self) -> bool:
        """Return whether the posterior is that of the present hyperparameters and transforms."""
        ...

    def hyperparameter_values(self) -> dict[str, Tensor]:
        """Return copies of all learnable parameters except inducing points, by name."""
        ...

    def set_hyperparameters(self, values: dict[str, Tensor]) -> None:
        """Set the values of parameters."""
        ...

    def constrained_hyperparameters(self) -> dict[str, Tensor]:
        """Return all hyperparameters by name, with their constraints applied."""
        ...

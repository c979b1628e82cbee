"""The memory and the inducing points of a model, as points to draw."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from seqgp.likelihoods.discrete import BinomialLikelihood
from seqgp.likelihoods.traits import has_one_latent
from seqgp.models.sequential_gp import SequentialGP


class DataPoints(NamedTuple):
    """The points to draw; ``None`` for those that are not drawn."""

    inputs: Tensor | None  # n x d, of the memory
    targets: Tensor | None  # n, of the memory
    sizes: Any  # n, by leverage
    Z: Tensor | None  # k x d, inducing points


def check_model(model: Any) -> None:
    """Raise unless a model can be drawn: a single `SequentialGP`, not a batch."""
    if not isinstance(model, SequentialGP):
        raise TypeError(f"model: expected a SequentialGP, got a {type(model).__name__}.")
    if model.batch_shape:
        raise ValueError(
            f"model: expected a single model, got a batch of shape {tuple(model.batch_shape)}."
        )


def memory_inputs(model: SequentialGP) -> Tensor:
    """Inputs ``n x d`` of the memory, before input transforms."""
    return model.stream.observations.inputs.detach()


def inducing_points_of(model: SequentialGP) -> Tensor:
    """Inducing points ``k x d``, on the scale of the inputs before input transforms."""
    Z = model.variational_strategy.inducing_points.detach()
    Z = Z.reshape(-1, *Z.shape[-2:])[0]
    transform = getattr(model, "input_transform", None)
    return Z if transform is None else transform.untransform(Z)


def memory_targets(model: SequentialGP, output: int) -> Tensor:
    """Targets ``n`` of the memory, on the scale of the plot: proportions of binomial counts."""
    columns = model.to_columns(model.stream.observations.targets.detach())
    if hasattr(model, "outcome_transform"):
        columns, _ = model.outcome_transform.untransform(columns)
    targets = columns[..., output if model.has_output_dim else 0]
    if isinstance(model.likelihood, BinomialLikelihood):
        totals = model.likelihood_arguments.get("total_count", model.likelihood.total_count)
        if totals is not None:
            targets = targets / totals.to(targets).clamp_min(1)
    if not has_one_latent(model.likelihood):
        targets = (targets == output).to(targets)
    return targets


def sizes(model: SequentialGP) -> Tensor:
    """Marker sizes ``n`` of the memory, which grow with leverage."""
    if model.variational_strategy.is_fantasy or not model.num_data:
        return torch.full((model.num_data,), 12.0, device="cpu")
    scores = model.memory.leverage.detach().cpu()
    return 8 + 50 * scores / scores.max().clamp_min(torch.finfo(scores.dtype).tiny)

"""The training data of a model, in the form in which BoTorch's models return them.

The data themselves are in `SequentialGP.stream`.
"""

from __future__ import annotations

import copy
import warnings

import torch
from gpytorch.likelihoods import DirichletClassificationLikelihood, FixedNoiseGaussianLikelihood
from torch import Tensor

from seqgp.dual.linalg import broadcast_shapes
from seqgp.models.protocol import DataModel
from seqgp.models.training_graph import TrainingGraph
from seqgp.observations import concatenate


def graph_of(model: DataModel) -> TrainingGraph | None:
    """The graph of the training data, if the model still holds them, and only them.

    Args:
        model: The model.
    """
    graph, observed = model.training_graph, model.variational_strategy.observed
    current = graph is not None and graph.observations is model.stream.observations
    return graph if current and observed is None else None


def train_inputs(model: DataModel, raw: bool) -> Tensor:
    """``batch_shape x n x d`` inputs, with those that the model was conditioned on; a copy.

    Of functionals, ``... x n x J x d``: without those that the model has been conditioned on.

    Args:
        model: The model.
        raw: Whether they are returned as they were given, or after the input transform.
    """
    data, graph = model.stream.observations, graph_of(model)
    if raw and graph is not None:
        return graph.inputs
    with torch.no_grad():
        if not raw:
            data = data.with_inputs(model.transform_train_inputs(data.points))
        held = data.inputs.detach().clone()
    observed = model.variational_strategy.observed
    if observed is None or data.coefficients is not None:
        return held
    if raw:
        for X in model.conditioned_inputs:
            held = concatenate(held, X, -2)
    else:
        points = observed.data.points.detach()
        held = concatenate(held, points.squeeze(-3) if model.has_output_dim else points, -2)
    # Fantasies of the same points differ in their targets only.
    return held.expand(*broadcast_shapes(held.shape[:-2], model.batch_shape), *held.shape[-2:])


def train_targets(model: DataModel) -> Tensor:
    """``... [x m] x n`` targets, with those that the model has been conditioned on; a copy.

    Warns if they are not all that the model has learnt from.

    Args:
        model: The model.
    """
    if model.variational_strategy.has_summary:
        warnings.warn(
            f"train_targets: these are the {model.num_data} observations in the memory, out of "
            f"{model.num_seen} that the model has learnt. Whatever needs all of them, such as "
            "leave-one-out cross validation or the best observation so far, has to use your own "
            "copy of the data. model.memory returns those in the memory without this warning.",
            stacklevel=3,
        )
    graph = graph_of(model)
    if graph is not None:
        return graph.targets
    targets = model.stream.observations.targets.detach().clone()
    observed = model.variational_strategy.observed
    if observed is None:
        return targets
    return concatenate(targets, observed.data.targets.detach().to(targets), -1)


def known_noise(model: DataModel) -> Tensor:
    """``... [x m] x n`` noise variances of the observations of a model with fixed noise.

    Args:
        model: The model. If it is a conditioned one, what it was conditioned on is included.
    """
    held = model.stream.observations.arguments.get("noise")
    if held is None or held.shape[-1] == 0 or model.variational_strategy.is_fantasy:
        noise: Tensor = model.likelihood.noise_covar.noise
        return noise
    return held


def note_conditioned(model: DataModel, X: Tensor, noise: Tensor | None) -> None:
    """Let the training data of a new fantasy model include what it was conditioned on.

    As in BoTorch, a likelihood with fixed noise has that of all observations. Everything else of
    it is still shared with the model that was conditioned.

    Args:
        model: The fantasy model, which shares all this with the model that was conditioned.
        X: ``... x q x d`` raw inputs.
        noise: ``... [x m] x q`` noise variances.
    """
    model.conditioned_inputs = (*model.conditioned_inputs, X.detach())
    old = model.likelihood
    if noise is None or not isinstance(old, FixedNoiseGaussianLikelihood):
        return
    if isinstance(old, DirichletClassificationLikelihood):
        return
    likelihood, covariance = copy.copy(old), copy.copy(old.noise_covar)
    likelihood.__dict__["_modules"] = dict(old.__dict__["_modules"])
    first = not model.conditioned_inputs[:-1]
    held = model.stream.observations.arguments.get("noise") if first else None
    covariance.noise = concatenate(covariance.noise if held is None else held, noise, -1)
    likelihood.noise_covar = covariance
    model.likelihood = likelihood
    model.variational_strategy.replace_likelihood(old, likelihood)


def untransformed_inputs(model: DataModel, X: Tensor) -> Tensor:
    """Inputs as they were given, from what `train_inputs` shows in the present mode.

    Args:
        model: The model.
        X: ``... x n x d`` inputs, transformed in eval mode.
    """
    transform = getattr(model, "input_transform", None)
    if transform is None or model.training:
        return X
    try:
        with torch.no_grad():
            return transform.untransform(X)
    except NotImplementedError:
        raise ValueError(
            f"train_inputs: in eval mode they are transformed, and {type(transform).__name__} "
            "cannot be undone; use set_train_data, which takes inputs as they were observed."
        ) from None

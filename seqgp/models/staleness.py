"""Whether the posterior is up to date with hyperparameters, noise and transforms.

As in BoTorch's models, you can set these directly at any time. The next prediction detects the
change and recomputes the posterior.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from botorch.models.likelihoods.sparse_outlier_noise import SparseOutlierNoise
from gpytorch.likelihoods import FixedNoiseGaussianLikelihood
from torch import Tensor

from seqgp.likelihoods.traits import output_latents
from seqgp.models.protocol import DataModel
from seqgp.models.training_data import graph_of
from seqgp.observations import Observations
from seqgp.validation import check_finite


@torch.no_grad()
def values_of(model: DataModel) -> Tensor:
    """Return all numbers besides the data that the sites depend on, concatenated.

    Args:
        model: The model.
    """
    strategy = model.variational_strategy
    like: Tensor = strategy.inducing_points
    found: list[Tensor] = []
    for child in model.children():
        if child is strategy:
            continue
        for module in child.modules():
            found += [t for t in module._parameters.values() if t is not None]
            found += [t for t in module._buffers.values() if t is not None]
            found += [t for t in vars(module).values() if isinstance(t, Tensor)]
            if isinstance(module, SparseOutlierNoise):
                found.append(module.rho)  # which observations are outliers is no tensor
    graph = graph_of(model)
    if graph is not None:  # an optimiser may change them in place
        found += [graph.inputs, graph.targets]
    flat = [tensor.reshape(-1).to(like.device, like.dtype) for tensor in found]
    return torch.cat(flat) if flat else like.new_empty(0)


def is_finite_and_current(model: DataModel, X: Tensor) -> tuple[bool, bool]:
    """Whether inputs are finite and the posterior is up to date, with one host synchronisation.

    Args:
        model: The model.
        X: The inputs.
    """
    flags = [X.isfinite().all()]
    # With the paper's rule, other quantities are held fixed when hyperparameters change.
    if not model.variational_strategy.is_fantasy and model.stream.rule == "pseudo-likelihood":
        flags += is_current(model)
    answers = torch.stack(flags).tolist()
    return answers[0], answers[-1] or len(answers) == 1


def is_current(model: DataModel) -> list[Tensor]:
    """Return a flag: whether the posterior is up to date; nothing, if it has not been computed.

    Args:
        model: The model.
    """
    if not model.settled_at:
        return []
    now, (then,) = values_of(model), model.settled_at
    if now.shape != then.shape:
        return [torch.tensor(False, device=now.device)]
    # Tables of tasks have NaN in unused places.
    return [torch.isclose(now, then, rtol=0.0, atol=0.0, equal_nan=True).all()]


@torch.no_grad()
def catch_up(model: DataModel) -> None:
    """Converge the sites at the present hyperparameters, noise and transforms.

    Args:
        model: The model.
    """
    strategy = model.variational_strategy
    if not strategy.ranks.alone:
        raise RuntimeError(
            "Hyperparameters, noise or transforms have been set since the posterior was computed. "
            "Predictions do not communicate: call refresh() on every rank first."
        )
    if strategy.learnt_in_loop:
        _check_scale_of_loop(model)
    _take_from_graph(model)
    held = model.stream.observations
    likelihood, noise = model.likelihood, held.arguments.get("noise")
    chosen = model.keeps_inducing_points or model.fits_inducing_points or model.num_updates
    if not chosen and held.coefficients is None:
        Z = strategy.inducing_points
        if Z.shape[-2] == held.points.shape[-2]:  # Z are the transformed inputs
            strategy.start_from(model.transform_train_inputs(held.points).reshape(Z.shape))
    if isinstance(likelihood, FixedNoiseGaussianLikelihood) and not model.num_updates:
        own = likelihood.noise_covar.noise
        if noise is not None and own.shape == noise.shape:
            arguments = {**held.arguments, "noise": own.detach().clone()}
            _hold(model, replace(held, arguments=arguments))
    if model.stream.num_seen:
        model.refresh()
    else:  # the posterior is the prior, or the result of a training loop
        model.note_hyperparameters()


def _take_from_graph(model: DataModel) -> None:
    """Let a model hold the training data that it shows, if they are tensors of the user's."""
    graph = graph_of(model)
    if graph is None:
        return
    inputs, targets = graph.inputs.detach().clone(), graph.targets.detach().clone()
    check_finite(inputs, "train_X")
    check_finite(targets, "train_Y", -1)
    _hold(model, replace(model.stream.observations, inputs=inputs, targets=targets))


def _hold(model: DataModel, observations: Observations) -> None:
    """Replace the observations of a model by the same ones with other numbers."""
    graph = graph_of(model)
    model.stream = replace(model.stream, observations=observations)
    if graph is not None:
        model.training_graph = replace(graph, observations=observations)


def _check_scale_of_loop(model: DataModel) -> None:
    """Raise if a training loop used targets that were not transformed.

    The hyperparameters would then be in other units than the targets that the model holds.
    """
    held, transform = model.stream.observations, getattr(model, "outcome_transform", None)
    if transform is None or held.coefficients is not None or not len(held):
        return
    targets = model.to_columns(held.targets)
    mean, _ = model.variational_strategy.marginals(model.transformed(held))
    given, _ = transform.untransform(targets, X=held.inputs)
    if model.variational_strategy.num_latents is not None:  # only one latent is observed
        mean = mean[..., (output_latents(model.likelihood) or (0,))[0], :]
    mean = model.to_columns(mean)
    to_given, to_held = ((mean - each).square().nanmean() for each in (given, targets))
    if bool(to_given < 0.5 * to_held):
        raise RuntimeError(
            "The training loop has taught the model observations as they are, but its targets are "
            f"transformed by a {type(transform).__name__}. Pass model.train_targets to the "
            "objective, or build the model with outcome_transform=None."
        )

"""Selecting some of the independent outputs of a model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Protocol

import torch
from gpytorch.kernels import Kernel
from gpytorch.means import Mean
from torch import Tensor

from seqgp.observations import Observations
from seqgp.streaming.model import StreamModel
from seqgp.variational.state import TENSORS
from seqgp.variational.strategy import DualVariationalStrategy


class SeveralOutputs(StreamModel, Protocol):
    """What selecting outputs needs of a model."""

    mean_module: Mean

    @property
    def num_outputs(self) -> int:
        """The number of outputs."""
        ...


def select_outputs(model: SeveralOutputs, idcs: list[int]) -> None:
    """Reduce a model of several outputs, in place, to those with the given indices.

    Args:
        model: A model whose last batch dimension is that of its outputs.
        idcs: Indices of outputs.
    """
    m, strategy = model.num_outputs, model.variational_strategy
    batch_shape = strategy.dual_lam.shape[:-1]
    held = model.stream.observations
    index = torch.tensor(idcs, device=held.targets.device)
    dim = len(batch_shape) - 1
    _select_from_strategy(strategy, m, dim, index)

    def select(module: torch.nn.Module, min_event_dims: int) -> None:
        own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        for name, value in own:
            if value.dim() < dim + 1 + min_event_dims or not value.is_floating_point():
                continue
            if value.shape[: dim + 1] == batch_shape:
                setattr(module, name, _like(value, value.index_select(dim, index)))

    for kernel in model.covar_module.modules():
        if isinstance(kernel, Kernel) and kernel.batch_shape[dim : dim + 1] == (m,):
            select(kernel, 0)
            kernel.batch_shape = torch.Size([*kernel.batch_shape[:-1], len(idcs)])
    probe = held.points[..., :1, :].unsqueeze(-3)
    if model.mean_module(probe).shape[-2] == m:
        for module in model.mean_module.modules():
            select(module, 0)
            _select_batch_shape(module, dim, m, len(idcs))
    for module in model.likelihood.modules():
        select(module, 1)
        noise = vars(module).get("noise")  # of fixed noise, which is neither of the two
        if isinstance(noise, Tensor) and noise.shape[-2:-1] == (m,):
            module.noise = noise.index_select(-2, index)
    model.stream = replace(model.stream, observations=_select_from_data(held, m, index))
    transform = getattr(model, "outcome_transform", None)
    if transform is not None:
        model.outcome_transform = transform.subset_output(idcs)
    strategy.clear_cache()


def _select_from_strategy(
    strategy: DualVariationalStrategy, m: int, dim: int, index: Tensor
) -> None:
    tensors = {}
    for name, value in strategy.tensors().items():
        if value.dim() == dim + 1 + TENSORS[name] and value.shape[dim] == m:
            tensors[name] = value.index_select(dim, index)
    strategy.set_tensors(tensors)


def _select_from_data(held: Observations, m: int, index: Tensor) -> Observations:
    return replace(
        held,
        targets=held.targets.index_select(-2, index),
        arguments={
            key: value.index_select(-2, index) if value.shape[-2:-1] == (m,) else value
            for key, value in held.arguments.items()
        },
    )


def _select_batch_shape(module: Any, dim: int, m: int, number: int) -> None:
    """The batch shape of a mean that has no parameters, such as `ZeroMean`."""
    shape = vars(module).get("batch_shape")
    if isinstance(shape, torch.Size) and shape[dim : dim + 1] == (m,):
        module.batch_shape = torch.Size([*shape[:dim], number, *shape[dim + 1 :]])


def _like(old: Tensor, new: Tensor) -> Tensor:
    """``new``, as a parameter if ``old`` is one."""
    if isinstance(old, torch.nn.Parameter):
        return torch.nn.Parameter(new.detach(), requires_grad=old.requires_grad)
    return new

"""Selecting some of the independent outputs of a model."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from gpytorch.kernels import Kernel
from torch import Tensor

if TYPE_CHECKING:
    from seqgp.models.sequential_gp import SequentialGP

#: Trailing dimensions of the strategy's tensors that are not batch dimensions.
_EVENT_DIMS = {
    "inducing_points": 2,
    "reference_points": 2,
    "dual_lam": 1,
    "dual_B": 2,
    "reference_mean": 1,
    "reference_chol": 2,
    "summary_lam": 1,
    "summary_B": 2,
    "summary_square": 0,
    "summary_count": 0,
}


def select_outputs(model: SequentialGP, idcs: list[int]) -> None:
    """Reduce a model of several outputs, in place, to those with the given indices.

    Args:
        model: A model whose last batch dimension is that of its outputs.
        idcs: Indices of outputs.
    """
    m, strategy = model.num_outputs, model.variational_strategy
    batch_shape = strategy.dual_lam.shape[:-1]
    index = torch.tensor(idcs, device=model.train_targets.device)
    dim = len(batch_shape) - 1

    def select(module: torch.nn.Module, min_event_dims: int) -> None:
        for name, value in [*module._parameters.items(), *module._buffers.items()]:
            if value is None or value.dim() < dim + 1 + min_event_dims:
                continue
            if value.shape[: dim + 1] == batch_shape and value.is_floating_point():
                setattr(module, name, _like(value, value.index_select(dim, index)))

    for name, event_dims in _EVENT_DIMS.items():
        value = getattr(strategy, name)
        if value.dim() == dim + 1 + event_dims and value.shape[dim] == m:
            strategy._assign(name, value.detach().index_select(dim, index))
    for kernel in model.covar_module.modules():
        if isinstance(kernel, Kernel) and kernel.batch_shape[dim : dim + 1] == (m,):
            select(kernel, 0)
            kernel.batch_shape = torch.Size([*kernel.batch_shape[:-1], len(idcs)])
    probe = model.train_inputs[0][..., :1, :].unsqueeze(-3)
    if model.mean_module(probe).shape[-2] == m:
        for module in model.mean_module.modules():
            select(module, 0)
    for module in model.likelihood.modules():
        select(module, 1)
        noise = module.__dict__.get("noise")  # of fixed noise, which is neither of the two
        if isinstance(noise, Tensor) and noise.shape[-2:-1] == (m,):
            module.noise = noise.index_select(-2, index)
    model.train_targets = model.train_targets.index_select(-2, index)
    model.likelihood_arguments = {
        key: value.index_select(-2, index) if value.shape[-2:-1] == (m,) else value
        for key, value in model.likelihood_arguments.items()
    }
    if hasattr(model, "outcome_transform"):
        model.outcome_transform = model.outcome_transform.subset_output(idcs)
    model._num_outputs = len(idcs)
    strategy.clear_cache()


def _like(old: Tensor, new: Tensor) -> Tensor:
    """``new``, as a parameter if ``old`` is one."""
    if isinstance(old, torch.nn.Parameter):
        return torch.nn.Parameter(new.detach(), requires_grad=old.requires_grad)
    return new

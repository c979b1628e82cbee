"""Observations: inputs, targets, and what their likelihood needs to know about each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from gpytorch.likelihoods import Likelihood
from torch import Tensor

from seqgp.dual.natural_gradient import Evaluate
from seqgp.dual.sites import Expectations, expectations


@dataclass(frozen=True)
class Observations:
    """Observations that share a likelihood.

    Attributes:
        inputs: ``... x n x d``.
        targets: ``... x n``.
        likelihood: Their likelihood.
        arguments: Per-point arguments of the likelihood, ``... x n`` (``noise=``,
            ``total_count=``, ...).
    """

    inputs: Tensor
    targets: Tensor
    likelihood: Likelihood
    arguments: dict[str, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        return self.inputs.shape[-2]

    def select(self, index: slice | Tensor) -> Observations:
        """Some of them, by a slice or by indices."""
        n = len(self)
        arguments = {
            key: value[..., index] if _is_per_point(value, n) else value
            for key, value in self.arguments.items()
        }
        return replace(
            self,
            inputs=self.inputs[..., index, :],
            targets=self.targets[..., index],
            arguments=arguments,
        )

    def append(self, other: Observations) -> Observations:
        """These and then the others; batch shapes broadcast."""
        if other.likelihood is not self.likelihood:
            kinds = type(self.likelihood).__name__, type(other.likelihood).__name__
            raise ValueError(
                f"likelihood: earlier observations came with a {kinds[0]}, these with another "
                f"{kinds[1]}; pass the same object each time."
            )
        if other.arguments.keys() != self.arguments.keys():
            raise ValueError(
                f"arguments: earlier observations came with {sorted(self.arguments)}, these with "
                f"{sorted(other.arguments)}; pass the same per-point arguments each time."
            )
        arguments = {
            key: _concatenate(self._per_point(key), other._per_point(key), -1)
            for key in self.arguments
        }
        return replace(
            self,
            inputs=_concatenate(self.inputs, other.inputs, -2),
            targets=_concatenate(self.targets, other.targets.to(self.targets), -1),
            arguments=arguments,
        )

    def to(self, convert: Callable[[Tensor], Tensor]) -> Observations:
        """The same observations on another device or in another precision."""
        arguments = {
            key: convert(value) if isinstance(value, Tensor) else value
            for key, value in self.arguments.items()
        }
        return replace(
            self, inputs=convert(self.inputs), targets=convert(self.targets), arguments=arguments
        )

    def _per_point(self, key: str) -> Tensor:
        """An argument of the likelihood as a tensor with one element for each point."""
        value = torch.as_tensor(self.arguments[key], device=self.targets.device)
        return value.expand(*value.shape[:-1], len(self))

    def evaluate(self, several_latents: bool) -> Evaluate:
        """Their likelihood as a function of marginals ``... [x c] x n``.

        Args:
            several_latents: Whether the last batch dimension of the marginals is that of the
                latent functions of one likelihood.
        """

        def evaluate(mean: Tensor, variance: Tensor) -> Expectations:
            if not several_latents:
                return expectations(self.likelihood, self.targets, mean, variance, **self.arguments)
            log_prob, alpha, beta = expectations(
                self.likelihood, self.targets, mean.mT, variance.mT, **self.arguments
            )
            return Expectations(log_prob, alpha.mT, beta.mT)

        return evaluate


def _is_per_point(value: Any, n: int) -> bool:
    """Whether a likelihood's argument has one element for each of ``n`` points."""
    return isinstance(value, Tensor) and value.dim() > 0 and value.shape[-1] == n


def _concatenate(left: Tensor, right: Tensor, dim: int) -> Tensor:
    """Concatenate along ``dim`` (-1 or -2), batch shapes broadcast."""
    batch = torch.broadcast_shapes(left.shape[:dim], right.shape[:dim])
    left = left.expand(*batch, *left.shape[dim:])
    return torch.cat([left, right.expand(*batch, *right.shape[dim:])], dim)

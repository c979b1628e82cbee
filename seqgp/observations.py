"""Observations: inputs, targets, and what their likelihood needs to know about each."""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from gpytorch.likelihoods import FixedNoiseGaussianLikelihood, Likelihood
from torch import Tensor

from seqgp.dual.natural_gradient import Evaluate
from seqgp.dual.sites import Expectations
from seqgp.likelihoods.discrete import BinomialLikelihood
from seqgp.likelihoods.expectations import expectations
from seqgp.likelihoods.traits import observation_noise


@dataclass(frozen=True)
class Observations:
    """Observations that share a likelihood.

    Attributes:
        inputs: ``... x n x d``.
        targets: ``... x n``.
        likelihood: Their likelihood.
        arguments: Per-point arguments of the likelihood, ``... x n`` (``noise=``,
            ``total_count=``, ...).
        weights: ``n``, how often each counts; ``None`` for once.
    """

    inputs: Tensor
    targets: Tensor
    likelihood: Likelihood
    arguments: dict[str, Any] = field(default_factory=dict)
    weights: Tensor | None = None

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
            weights=None if self.weights is None else self.weights[index],
        )

    def append(self, other: Observations) -> Observations:
        """These and then the others; batch shapes broadcast."""
        if other.likelihood is not self.likelihood:
            kinds = type(self.likelihood).__name__, type(other.likelihood).__name__
            raise ValueError(
                f"likelihood: earlier observations came with a {kinds[0]}, these with another "
                f"{kinds[1]}; pass the same object each time."
            )
        ours, theirs = self._with_missing(other), other._with_missing(self)
        if theirs.arguments.keys() != ours.arguments.keys():
            names = [", ".join(sorted(each.arguments)) or "none" for each in (self, other)]
            raise ValueError(
                f"arguments: earlier observations came with {names[0]}, these with {names[1]}; "
                "pass the same per-point arguments each time."
            )
        arguments = {
            key: _concatenate(ours._per_point(key), theirs._per_point(key), -1)
            for key in ours.arguments
        }
        return replace(
            self,
            inputs=_concatenate(self.inputs, other.inputs, -2),
            targets=_concatenate(self.targets, other.targets.to(self.targets), -1),
            arguments=arguments,
        )

    def _with_missing(self, other: Observations) -> Observations:
        """With those arguments of others that are known although they were not given.

        These are the total of a binomial likelihood that has one, and those of no observations.
        """
        arguments = dict(self.arguments)
        for key, value in other.arguments.items():
            if key in arguments:
                continue
            if key == "total_count" and isinstance(self.likelihood, BinomialLikelihood):
                total = self.likelihood.total_count
                if total is not None and total.numel() == 1:
                    arguments[key] = total.reshape(1).to(torch.as_tensor(value))
            if not len(self) and key != "noise":
                arguments[key] = torch.as_tensor(value)[..., :0]
        return replace(self, arguments=arguments)

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
            if self.weights is None:
                return once(mean, variance)
            return Expectations(*(self.weights * each for each in once(mean, variance)))

        def once(mean: Tensor, variance: Tensor) -> Expectations:
            if not several_latents:
                return expectations(self.likelihood, self.targets, mean, variance, **self.arguments)
            log_prob, alpha, beta = expectations(
                self.likelihood, self.targets, mean.mT, variance.mT, **self.arguments
            )
            return Expectations(log_prob, alpha.mT, beta.mT)

        return evaluate


def arguments_held_by(likelihood: Likelihood, n: int, given: Container[str]) -> dict[str, Any]:
    """Per-point arguments that a likelihood was made with, for ``n`` observations.

    Raises an error if they belong to another number of points.

    Args:
        likelihood: The likelihood.
        n: The number of observations.
        given: Names of the arguments that come with the observations instead.
    """
    if isinstance(likelihood, FixedNoiseGaussianLikelihood) and "noise" not in given:
        observation_noise(likelihood, n)
        return {"noise": likelihood.noise_covar.noise}
    if isinstance(likelihood, BinomialLikelihood) and "total_count" not in given:
        totals = likelihood.total_count
        if totals is not None and totals.numel() > 1:
            if totals.shape[-1] != n:
                raise ValueError(
                    f"total_count: the likelihood holds the totals of {totals.shape[-1]} points "
                    f"but was given {n}; pass their totals as total_count=."
                )
            return {"total_count": totals}
    return {}


def check_not_held(likelihood: Likelihood, given: Container[str]) -> None:
    """Raise if new observations would get the totals that a likelihood holds for its first ones.

    Args:
        likelihood: The likelihood.
        given: Names of the arguments that come with the observations.
    """
    if isinstance(likelihood, BinomialLikelihood) and "total_count" not in given:
        totals = likelihood.total_count
        if totals is not None and totals.numel() > 1:
            raise ValueError(
                f"total_count: the likelihood holds the totals of the first {totals.shape[-1]} "
                "observations; pass those of new ones as total_count=."
            )


def _is_per_point(value: Any, n: int) -> bool:
    """Whether a likelihood's argument has one element for each of ``n`` points."""
    return isinstance(value, Tensor) and value.dim() > 0 and value.shape[-1] == n


def _concatenate(left: Tensor, right: Tensor, dim: int) -> Tensor:
    """Concatenate along ``dim`` (-1 or -2), batch shapes broadcast."""
    batch = torch.broadcast_shapes(left.shape[:dim], right.shape[:dim])
    left = left.expand(*batch, *left.shape[dim:])
    return torch.cat([left, right.expand(*batch, *right.shape[dim:])], dim)

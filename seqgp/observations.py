"""Observations: inputs, targets, and what their likelihood needs to know about each."""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from gpytorch.likelihoods import FixedNoiseGaussianLikelihood, Likelihood
from gpytorch.settings import min_fixed_noise
from torch import Tensor

from seqgp.distributed import Ranks
from seqgp.dual.linalg import broadcast_shapes
from seqgp.dual.natural_gradient import Evaluate
from seqgp.dual.sites import Expectations
from seqgp.likelihoods.choices import first_parts
from seqgp.likelihoods.discrete import BinomialLikelihood
from seqgp.likelihoods.expectations import expectations
from seqgp.likelihoods.outliers import has_outliers
from seqgp.likelihoods.traits import observation_noise
from seqgp.validation import check_arguments, check_coefficients, check_data, check_weights


@dataclass(frozen=True)
class Observations:
    """Observations that share a likelihood: of values of a function, or of functionals of it.

    Make them with `checked`, the only place where raw tensors are looked at.

    Attributes:
        inputs: ``... x n x d``; for functionals ``... x n x J x d``.
        targets: ``... x n``.
        arguments: Per-point arguments of the likelihood, ``... x n`` (``noise=``,
            ``total_count=``, ...).
        weights: ``n``, how often each counts; ``None`` for once.
        coefficients: ``... x n x J``: the observations are of ``sum_j c_ij f(x_ij)``. ``None`` for
            values ``f(x_i)``. Functionals of fewer than ``J`` points have coefficients of zero.
    """

    inputs: Tensor
    targets: Tensor
    arguments: Mapping[str, Tensor] = field(default_factory=dict)
    weights: Tensor | None = None
    coefficients: Tensor | None = None

    @classmethod
    def checked(
        cls,
        inputs: Tensor,
        targets: Tensor,
        likelihood: Likelihood,
        arguments: Mapping[str, Any] | None = None,
        weights: Tensor | None = None,
        coefficients: Tensor | None = None,
        dim: int | None = None,
        dtype: torch.dtype | None = None,
        options: Collection[str] = (),
        names: tuple[str, str] = ("inputs", "targets"),
        has_outputs: bool = False,
    ) -> Observations:
        """Observations that have passed all checks; raises an error that says what is wrong.

        Args:
            inputs: ``... x n x d``, or ``... x n x J x d`` with coefficients.
            targets: ``... x n``.
            likelihood: What the targets are observations of.
            arguments: Per-point arguments of the likelihood, ``... x n`` or one for all.
            weights: As for the attribute.
            coefficients: As for the attribute.
            dim: The expected number of input columns.
            dtype: The expected precision; inputs of more are refused.
            options: Names that could have been meant by unknown arguments.
            names: What to call inputs and targets in errors.
            has_outputs: Whether the targets have a batch dimension more than the inputs, the last,
                for outputs that share these.
        """
        arguments = {k: v for k, v in (arguments or {}).items() if v is not None}
        points = inputs
        if coefficients is not None:
            check_coefficients(coefficients, inputs, names[0])
            points = inputs[..., 0, :] if inputs.shape[-2] else inputs.sum(-2)
        n = points.shape[-2] if isinstance(points, Tensor) and points.dim() > 1 else 0
        check_arguments(likelihood, arguments, options, needed=n > 0)
        arguments = arguments_held_by(likelihood, n, arguments) | arguments
        at = points.unsqueeze(-3) if has_outputs else points
        check_data(inputs, at, targets, likelihood, arguments, dim, dtype, names)
        check_weights(weights, n)
        dtype = inputs.dtype
        per_point = {key: torch.as_tensor(v, device=inputs.device) for key, v in arguments.items()}
        per_point = {k: v.to(dtype).expand(*v.shape[:-1], n) for k, v in per_point.items()}
        if "noise" in per_point:  # as GPyTorch does: not quite zero
            per_point["noise"] = per_point["noise"].clamp_min(min_fixed_noise.value(dtype))
        if targets.is_floating_point():
            targets = targets.to(dtype)
        return cls(
            inputs,
            targets,
            per_point,
            None if weights is None else weights.to(inputs),
            None if coefficients is None else coefficients.to(inputs),
        )

    def __len__(self) -> int:
        return self.targets.shape[-1]

    @property
    def points(self) -> Tensor:
        """``... x n x d``, or ``... x (n J) x d``: all inputs, whatever is observed of them."""
        return self.inputs if self.coefficients is None else self.inputs.flatten(-3, -2)

    @property
    def first_parts(self) -> Tensor | None:
        """``n``, the index of the first part of the answer that each of them is a part of.

        A choice among several items has several parts, which are only kept, folded, or forgotten
        together. ``None`` if each is an answer by itself.
        """
        size = self.arguments.get("choice_size")
        return None if size is None else first_parts(size)

    def with_inputs(self, inputs: Tensor) -> Observations:
        """The same observations with other `points`, transformed ones for instance."""
        if self.coefficients is not None:
            inputs = inputs.unflatten(-2, self.coefficients.shape[-2:])
        return replace(self, inputs=inputs)

    def with_batch_dimension(self) -> Observations:
        """The same observations with one more batch dimension, for outputs that share inputs."""
        c = self.coefficients
        return replace(
            self,
            inputs=self.inputs.unsqueeze(-3 if c is None else -4),
            coefficients=None if c is None else c.unsqueeze(-3),
        )

    def select(self, index: slice | Tensor) -> Observations:
        """Some of them, by a slice or by indices."""
        functional = self.coefficients is not None
        c = self.coefficients
        return replace(
            self,
            inputs=self.inputs[..., index, :, :] if functional else self.inputs[..., index, :],
            targets=self.targets[..., index],
            arguments={key: value[..., index] for key, value in self.arguments.items()},
            weights=None if self.weights is None else self.weights[index],
            coefficients=None if c is None else c[..., index, :],
        )

    def append(self, other: Observations) -> Observations:
        """These and then the others; batch shapes broadcast."""
        ours, theirs = self._like(other), other._like(self)
        if theirs.arguments.keys() != ours.arguments.keys():
            names = [", ".join(sorted(each.arguments)) or "none" for each in (self, other)]
            raise ValueError(
                f"arguments: earlier observations came with {names[0]}, these with {names[1]}; "
                "pass the same per-point arguments each time."
            )
        weights = None
        if ours.weights is not None and theirs.weights is not None:
            weights = torch.cat([ours.weights, theirs.weights])
        coefficients = None
        if ours.coefficients is not None and theirs.coefficients is not None:
            coefficients = concatenate(ours.coefficients, theirs.coefficients, -2)
        return Observations(
            concatenate(ours.inputs, theirs.inputs, -2 if coefficients is None else -3),
            concatenate(ours.targets, theirs.targets.to(ours.targets), -1),
            {
                key: concatenate(value, theirs.arguments[key], -1)
                for key, value in ours.arguments.items()
            },
            weights,
            coefficients,
        )

    def _like(self, other: Observations) -> Observations:
        """The same observations with the attributes that others have."""
        result = self
        if not len(self):  # no observations have any arguments; but noise is the model's business
            missing = {k: v[..., :0] for k, v in other.arguments.items() if k != "noise"}
            result = replace(result, arguments={**missing, **self.arguments})
        if self.weights is None and other.weights is not None:
            result = replace(result, weights=other.weights.new_ones(len(self)))
        if other.coefficients is not None:
            result = result.as_functionals(other.coefficients.shape[-1])
        elif self.coefficients is not None:
            result = result.as_functionals(self.coefficients.shape[-1])
        return result

    def as_functionals(self, number: int) -> Observations:
        """The same observations as functionals of at least so many points."""
        inputs, c = self.inputs, self.coefficients
        if c is None:
            inputs, c = inputs.unsqueeze(-2), torch.ones_like(inputs[..., :1])
        more = number - c.shape[-1]
        if more > 0:
            # A coefficient of zero, at a point that is there already: nothing new is evaluated.
            repeated = inputs[..., :1, :].expand(*inputs.shape[:-2], more, inputs.shape[-1])
            inputs = torch.cat([inputs, repeated], -2)
            c = torch.cat([c, torch.zeros_like(c[..., :1]).expand(*c.shape[:-1], more)], -1)
        return replace(self, inputs=inputs, coefficients=c)

    def gathered(self, ranks: Ranks) -> Observations:
        """The observations of all ranks, one rank after the other.

        Args:
            ranks: The processes that share them.
        """
        if ranks.alone:
            return self
        c = self.coefficients
        return Observations(
            ranks.gather(self.inputs, -2 if c is None else -3),
            ranks.gather(self.targets),
            {key: ranks.gather(value) for key, value in sorted(self.arguments.items())},
            None if self.weights is None else ranks.gather(self.weights),
            None if c is None else ranks.gather(c, -2),
        )

    def to(self, convert: Callable[[Tensor], Tensor]) -> Observations:
        """The same observations on another device or in another precision."""
        return Observations(
            convert(self.inputs),
            convert(self.targets),
            {key: convert(value) for key, value in self.arguments.items()},
            None if self.weights is None else convert(self.weights),
            None if self.coefficients is None else convert(self.coefficients),
        )

    def evaluate(self, likelihood: Likelihood, several_latents: bool) -> Evaluate:
        """Their likelihood as a function of marginals ``... [x c] x n``.

        Args:
            likelihood: The likelihood.
            several_latents: Whether the last batch dimension of the marginals is that of the
                latent functions of one likelihood.
        """

        def evaluate(mean: Tensor, variance: Tensor) -> Expectations:
            if self.weights is None:
                return once(mean, variance)
            return Expectations(*(self.weights * each for each in once(mean, variance)))

        def once(mean: Tensor, variance: Tensor) -> Expectations:
            if not several_latents:
                return expectations(likelihood, self.targets, mean, variance, **self.arguments)
            log_prob, alpha, beta = expectations(
                likelihood, self.targets, mean.mT, variance.mT, **self.arguments
            )
            return Expectations(log_prob, alpha.mT, beta.mT)

        return evaluate


def arguments_held_by(likelihood: Likelihood, n: int, given: Collection[str]) -> dict[str, Any]:
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
    if has_outliers(likelihood) and not {"noise", "outlier"} & set(given):
        if likelihood.noise_covar.dim != n:
            raise ValueError(
                f"likelihood: this {type(likelihood).__name__} was made for "
                f"dim={likelihood.noise_covar.dim} observations but was given {n}."
            )
        return {"outlier": torch.arange(n)}
    if isinstance(likelihood, BinomialLikelihood) and "total_count" not in given:
        totals = likelihood.total_count
        if totals is not None and totals.numel() == 1:
            return {"total_count": totals.reshape(1)}
        if totals is not None:
            if totals.shape[-1] != n:
                raise ValueError(
                    f"total_count: the likelihood holds the totals of {totals.shape[-1]} points "
                    f"but was given {n}; pass their totals as total_count=."
                )
            return {"total_count": totals}
    return {}


def check_not_held(likelihood: Likelihood, given: Container[str]) -> None:
    """Raise if a likelihood knows things of its first observations that new ones would need, too.

    Args:
        likelihood: The likelihood.
        given: Names of the arguments that come with the observations.
    """
    if has_outliers(likelihood):
        raise ValueError(
            f"likelihood: a {type(likelihood).__name__} looks for outliers among the observations "
            "that the model was built with. Build a new model for more observations, or use a "
            "gpytorch.likelihoods.StudentTLikelihood, which can learn from a stream."
        )
    if isinstance(likelihood, BinomialLikelihood) and "total_count" not in given:
        totals = likelihood.total_count
        if totals is not None and totals.numel() > 1:
            raise ValueError(
                f"total_count: the likelihood holds the totals of the first {totals.shape[-1]} "
                "observations; pass those of new ones as total_count=."
            )


def concatenate(left: Tensor, right: Tensor, dim: int) -> Tensor:
    """Concatenate two tensors whose batch shapes broadcast.

    Args:
        left: The first tensor.
        right: The second one.
        dim: The dimension, negative; all before it are batch dimensions.
    """
    batch = broadcast_shapes(left.shape[:dim], right.shape[:dim])
    left = left.expand(*batch, *left.shape[dim:])
    return torch.cat([left, right.expand(*batch, *right.shape[dim:])], dim)

r"""Trust regions: Bayesian optimisation of many inputs, near the best point so far.

In many dimensions most of a box is far from all data, where expected improvement is large only
because nothing is known. A trust region (TuRBO, Eriksson et al., 2019; SCBO with constraints,
Eriksson and Poloczek, 2021) is a box around the best point with sides

.. math::
    L \, \ell_i \Big/ \Big(\prod_j \ell_j\Big)^{1/d}

in units of the range of the inputs, where :math:`\ell_i` are the lengthscales. Its length :math:`L`
doubles after several successes in a row and halves after several failures. If it becomes too short,
the search starts again elsewhere.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from botorch.models.model import Model
from botorch.models.transforms import Normalize
from gpytorch.kernels import Kernel
from torch import Tensor

from seqgp.validation import is_whole

#: The improvement of the best value that is a success, relative to that value.
IMPROVEMENT = 1e-3


@dataclass(frozen=True)
class TrustRegionOptions:
    """How a trust region grows and shrinks.

    Args:
        length: Its initial length, as a share of the range of the inputs.
        min_length: The length below which the search starts again elsewhere.
        max_length: The largest length.
        success_tolerance: The number of successes in a row (batches that improve on the best value)
            after which the length doubles.
        failure_tolerance: The number of evaluations in a row without success after which the length
            halves. By default the number of inputs, at least 4.

    Example:
        >>> TrustRegionOptions(length=0.4).min_length
        0.0078125
    """

    length: float = 0.8
    min_length: float = 2.0**-7
    max_length: float = 1.6
    success_tolerance: int = 3
    failure_tolerance: int | None = None

    def __post_init__(self) -> None:
        if not 0 < self.min_length < self.length <= self.max_length:
            raise ValueError(
                "TrustRegionOptions: expected 0 < min_length < length <= max_length, got "
                f"{self.min_length}, {self.length} and {self.max_length}."
            )
        for name in ("success_tolerance", "failure_tolerance"):
            value = getattr(self, name)
            if value is not None and (not is_whole(value) or value < 1):
                raise ValueError(f"{name}: expected a whole number, at least 1, got {value!r}.")


@dataclass(frozen=True)
class TrustRegion:
    """The state of a trust region.

    Attributes:
        length: Its length, as a share of the range of the inputs.
        successes: The number of successes in a row.
        failures: The number of evaluations in a row without success.
        start: The number of evaluations before the search (re)started. The region is around the
            best of the others.
    """

    length: float
    successes: int = 0
    failures: int = 0
    start: int = 0

    def after(
        self,
        success: bool,
        num_new: int,
        num_total: int,
        dim: int,
        options: TrustRegionOptions,
    ) -> TrustRegion:
        """The region after a batch of evaluations.

        Args:
            success: Whether the batch improved on the best value.
            num_new: The number of evaluations in the batch.
            num_total: The number of all evaluations.
            dim: The number of inputs.
            options: How the region grows and shrinks.

        Example:
            >>> options = TrustRegionOptions(failure_tolerance=2)
            >>> TrustRegion(0.8).after(False, 2, 10, 5, options)
            TrustRegion(length=0.4, successes=0, failures=0, start=0)
        """
        patience = options.failure_tolerance or max(dim, 4)
        if success:
            region = replace(self, successes=self.successes + 1, failures=0)
        else:
            region = replace(self, successes=0, failures=self.failures + num_new)
        if region.successes >= options.success_tolerance:
            return replace(region, length=min(2 * self.length, options.max_length), successes=0)
        if region.failures >= patience:
            region = replace(region, length=self.length / 2, failures=0)
        if region.length < options.min_length:
            return TrustRegion(options.length, start=num_total)
        return region

    def state_dict(self) -> dict[str, Any]:
        """The state as numbers."""
        return asdict(self)


def is_success(before: Tensor | None, after: Tensor | None, maximize: bool) -> bool:
    """Whether the best value has improved, by more than a small share of it.

    Args:
        before: The best value before, ``None`` if nothing was valid.
        after: The best value now.
        maximize: Whether larger values are better.
    """
    if after is None or before is None:
        return after is not None
    gain = after - before if maximize else before - after
    return bool(gain > IMPROVEMENT * before.abs())


@torch.no_grad()
def region_bounds(
    centre: Tensor, length: float, weights: Tensor, bounds: Tensor, whole: Collection[int] = ()
) -> Tensor:
    """The box around a point, within the bounds.

    Args:
        centre: ``d`` inputs, within the bounds.
        length: The length of the region.
        weights: ``d`` relative lengths of its sides.
        bounds: ``2 x d`` bounds of the inputs.
        whole: Indices of inputs that keep their whole range, such as those with levels.

    Returns:
        ``2 x d`` bounds.

    Example:
        >>> import torch
        >>> unit = torch.tensor([[0.0, 0.0], [1.0, 1.0]])
        >>> region_bounds(torch.tensor([0.5, 0.9]), 0.4, torch.ones(2), unit)
        tensor([[0.3000, 0.7000],
                [0.7000, 1.0000]])
    """
    half = 0.5 * length * weights * (bounds[1] - bounds[0])
    region = torch.stack([centre - half, centre + half]).clamp(bounds[0], bounds[1])
    for index in whole:
        region[:, index] = bounds[:, index]
    return region


@torch.no_grad()
def side_weights(model: Model | None, bounds: Tensor) -> Tensor:
    r"""Relative lengths of sides, :math:`\ell_i / (\prod_j \ell_j)^{1/d}`.

    Args:
        model: The model of the objective. Without lengthscales for each input, all are one.
        bounds: ``2 x d`` bounds of the inputs, the unit of lengthscales of a model without
            `Normalize`.

    Returns:
        ``d`` numbers, whose product is one.
    """
    d = bounds.shape[-1]
    kernels = [] if model is None else [m for m in model.modules() if isinstance(m, Kernel)]
    for kernel in kernels:
        lengthscale = kernel.lengthscale if kernel.has_lengthscale else None
        if lengthscale is not None and lengthscale.shape == (1, d):
            log = lengthscale.detach().to(bounds).reshape(d).log()
            if not isinstance(getattr(model, "input_transform", None), Normalize):
                log = log - (bounds[1] - bounds[0]).log()
            return (log - log.mean()).exp()
    return bounds.new_ones(d)

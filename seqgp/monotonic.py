r"""Monotonic inputs of classifiers: louder is never harder to hear.

A soft constraint by virtual observations (Riihimäki and Vehtari, 2010): the finite difference of
the latent function between two points, of which only one input differs, is observed to be positive,

.. math::
    p(\text{increasing}) = \Phi\big(\nu \, s \, (f(x + h e_i) - f(x))\big),

where :math:`s` is 1 or -1 and :math:`\nu` the sharpness. This is a label 1 of the functional with
coefficients :math:`(\nu s, -\nu s)`, with the same probit likelihood as that of the labels. So the
model learns from it as from any other observation.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from gpytorch.likelihoods import BernoulliLikelihood, Likelihood
from torch import Tensor

#: The number of virtual observations of an input.
NUM_SLOPES = 24
#: The distance between the two points, as a share of the range of the input.
STEP = 0.1
#: The default sharpness of virtual observations.
SHARPNESS = 10.0


class WithSlopes(NamedTuple):
    """Labels and virtual observations, as observations of functionals.

    Attributes:
        X: ``(n + v) x 2 x d`` inputs.
        Y: ``(n + v) x 1`` labels.
        coefficients: ``(n + v) x 2``. They are (1, 0) for labels.
    """

    X: Tensor
    Y: Tensor
    coefficients: Tensor


def check_monotonic(monotonic: Any, num_inputs: int, likelihood: Likelihood) -> None:
    """Raise unless directions of inputs are given as ``{index: 1 or -1}``, for labels.

    Args:
        monotonic: What is to be checked.
        num_inputs: The number of inputs.
        likelihood: The likelihood of the labels.
    """
    if not isinstance(monotonic, Mapping) or not all(
        isinstance(index, int) and 0 <= index < num_inputs and sign in (-1, 1)
        for index, sign in monotonic.items()
    ):
        raise ValueError(
            f"monotonic: expected {{input: 1 or -1}}, with inputs from 0 to {num_inputs - 1}, got "
            f"{monotonic!r}."
        )
    if not isinstance(likelihood, BernoulliLikelihood):
        raise ValueError(
            "monotonic: only supported for a BernoulliLikelihood, got a "
            f"{type(likelihood).__name__}."
        )


@torch.no_grad()
def with_slopes(
    X: Tensor,
    Y: Tensor,
    bounds: Tensor,
    monotonic: Mapping[int, int],
    number: int = NUM_SLOPES,
    step: float = STEP,
    sharpness: float = SHARPNESS,
) -> WithSlopes:
    """Add virtual observations of slopes, at quasi-random points in a box.

    Args:
        X: ``n x d`` inputs.
        Y: ``n x 1`` labels, 0 or 1.
        bounds: ``2 x d`` bounds of the inputs.
        monotonic: The direction of some inputs: ``{0: 1, 2: -1}`` for one that never lowers the
            probability of a 1, and one that never raises it.
        number: The number of virtual observations of each of these inputs.
        step: The distance between the two points of a difference, as a share of the range.
        sharpness: The factor of differences.

    Example:
        >>> import torch
        >>> from gpytorch.likelihoods import BernoulliLikelihood
        >>> from seqgp import SequentialGP
        >>> X = torch.rand(10, 1, dtype=torch.double)
        >>> bounds = torch.tensor([[0.0], [1.0]], dtype=torch.double)
        >>> data = with_slopes(X, (X > 0.5).to(X), bounds, {0: 1})
        >>> model = SequentialGP(
        ...     data.X,
        ...     data.Y,
        ...     likelihood=BernoulliLikelihood(),
        ...     coefficients=data.coefficients,
        ... )
        >>> grid = torch.linspace(0, 1, 20, dtype=torch.double).unsqueeze(-1)
        >>> bool((model.posterior(grid).mean.diff(dim=0) > 0).all())
        True
    """
    d = X.shape[-1]
    low, span = bounds[0], bounds[1] - bounds[0]
    points, signs = [torch.stack([X, X], -2)], [X.new_zeros(0)]
    for index, sign in sorted(monotonic.items()):
        engine = torch.quasirandom.SobolEngine(d, scramble=True, seed=index)
        unit = engine.draw(number, dtype=X.dtype).to(X)
        unit[:, index] *= 1 - step
        above = unit.clone()
        above[:, index] += step
        points.append(low + span * torch.stack([above, unit], -2))
        signs.append(X.new_full((number,), float(sign)))
    slopes = sharpness * torch.cat(signs)
    values = X.new_tensor([1.0, 0.0]).expand(len(X), 2)
    return WithSlopes(
        torch.cat(points),
        torch.cat([Y, Y.new_ones(len(slopes), 1)]),
        torch.cat([values, torch.stack([slopes, -slopes], -1)]),
    )

"""Elliptical slice sampling (Murray, Adams and MacKay, 2010): long MCMC for small problems."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor


def elliptical_slice(
    log_likelihood: Callable[[Tensor], Tensor],
    start: Tensor,
    num_samples: int,
    burn_in: int,
    generator: torch.Generator,
) -> Tensor:
    r"""Samples of :math:`p(z) \propto N(z | 0, I) L(z)`, by several chains next to each other.

    A step draws a level below :math:`L(z)` and moves along the ellipse through :math:`z` and a draw
    from the prior. The bracket of angles shrinks until the likelihood is above the level.

    Args:
        log_likelihood: Takes ``c x n`` points, returns ``c`` values.
        start: ``c x n``, where the chains start.
        num_samples: How many samples to keep of each chain.
        burn_in: How many to leave out before.
        generator: For all draws.

    Returns:
        ``num_samples x c x n`` samples.

    Example:
        >>> generator = torch.Generator().manual_seed(0)
        >>> def log_likelihood(z):  # an observation of 1 with a noise variance of 1
        ...     return -0.5 * (z - 1).square().sum(-1)
        >>> z = elliptical_slice(log_likelihood, torch.zeros(200, 1), 50, 10, generator)
        >>> bool((z.mean() - 0.5).abs() < 0.05)
        True
    """

    def uniform() -> Tensor:
        return torch.rand(len(start), dtype=start.dtype, generator=generator)

    z, value, kept = start, log_likelihood(start), []
    for _ in range(burn_in + num_samples):
        other = torch.randn(start.shape, dtype=start.dtype, generator=generator)
        level = value + uniform().log()
        angle = 2 * math.pi * uniform()
        low, high = angle - 2 * math.pi, angle.clone()
        moving, new, new_value = torch.ones_like(angle, dtype=torch.bool), z, value
        while bool(moving.any()):
            proposed = z * angle.cos().unsqueeze(-1) + other * angle.sin().unsqueeze(-1)
            proposed_value = log_likelihood(proposed)
            accepted = moving & (proposed_value > level)
            new = torch.where(accepted.unsqueeze(-1), proposed, new)
            new_value = torch.where(accepted, proposed_value, new_value)
            moving = moving & ~accepted
            low = torch.where(moving & (angle < 0), angle, low)
            high = torch.where(moving & (angle >= 0), angle, high)
            angle = torch.where(moving, low + (high - low) * uniform(), angle)
        z, value = new, new_value
        kept.append(z)
    return torch.stack(kept[burn_in:])

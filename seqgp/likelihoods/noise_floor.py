"""Lower bounds for noise that is learnt."""

from __future__ import annotations

from botorch.models.utils.gpytorch_modules import MIN_INFERRED_NOISE_LEVEL
from gpytorch.constraints import Interval
from gpytorch.likelihoods import LaplaceLikelihood, Likelihood, StudentTLikelihood
from torch import Tensor

from seqgp.distributed import ALONE, Ranks
from seqgp.likelihoods.traits import is_real_valued


def noise_floor(
    likelihood: Likelihood, targets: Tensor, ranks: Ranks = ALONE
) -> dict[str, tuple[float | None, float | None]]:
    r"""Bounds for the noise of real-valued observations that are not Gaussian.

    Without noise the evidence grows without end as the noise falls, and sites, whose precision is
    its inverse, no longer converge. For that reason BoTorch's Gaussian noise is at least
    ``MIN_INFERRED_NOISE_LEVEL`` times the variance of standardised targets; a Student-t or Laplace
    likelihood of GPyTorch has no such minimum. While it is learnt, it gets the same one,
    :math:`\sigma^2 \geq 10^{-4} \operatorname{Var}[y]`, unless its constraint has another, or the
    noise has been set to less.

    Args:
        likelihood: The likelihood.
        targets: ``... x n`` targets, as the likelihood observes them.
        ranks: The processes that have such targets.

    Returns:
        Bounds of the raw parameter, by its name; none if there is nothing to bound.
    """
    if not isinstance(likelihood, StudentTLikelihood | LaplaceLikelihood):
        return {}
    constraint: Interval = likelihood.raw_noise_constraint
    if not is_real_valued(likelihood) or float(constraint.lower_bound.max()) > 0:
        return {}
    targets = ranks.gather(targets.detach())
    if targets.shape[-1] < 2:
        return {}
    variance = targets.var(-1).min()
    floor = (MIN_INFERRED_NOISE_LEVEL * variance).minimum(likelihood.noise.detach().min())
    if not float(floor) > 0:
        return {}
    return {"likelihood.raw_noise": (float(constraint.inverse_transform(floor)), None)}

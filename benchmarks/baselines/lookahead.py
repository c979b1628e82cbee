r"""Rival ways to condition on one more observation, for scores of candidates.

* ``paper``: the duals are updated at the inducing points that there are (Chang et al., 2023). With
  :math:`c_q(a, b) = A_a^T W^{-1} A_b`, the part of the posterior covariance that the inducing
  points carry, :math:`m'_a = m_a + c_q(a, x) g` and :math:`v'_a = v_a - c_q(a, x)^2 \beta / (1 +
  \beta c_q(x, x))`; the variance that they do not explain stays.
* ``ovc``: online variational conditioning (Maddox et al., 2021). The observation becomes a
  Gaussian pseudo-target by Laplace's method: Newton's iteration for the mode :math:`\hat f` of
  :math:`\log p(y | f) + \log N(f; m_x, c_{xx})`, precision :math:`\beta = -\partial^2 \log p(y |
  \hat f)`, pseudo-target :math:`\hat f + \partial \log p(y | \hat f) / \beta`; the posterior
  process is conditioned on that.
"""

from __future__ import annotations

import torch
from torch import Tensor

from seqgp import SequentialGP
from seqgp.acquisition.look_ahead import (
    TOLERANCE,
    LookAhead,
    Marginals,
    condition_each,
    draw,
    marginals,
)
from seqgp.acquisition.uncertainty import Uncertainty, link_of
from seqgp.acquisition.uncertainty_reduction import score_candidates
from seqgp.likelihoods.discrete import BinomialLikelihood, OverdispersedBinomialLikelihood
from seqgp.likelihoods.expectations import expectations
from seqgp.variational.linear_operators import PosteriorCovariance


@torch.no_grad()
def rival_reduction(
    way: str,
    model: SequentialGP,
    X: Tensor,
    sites: Tensor,
    threshold: float,
    total_count: int,
    num_fantasies: int = 16,
    seed: int = 0,
) -> Tensor:
    """Expected reductions of thresholded entropy, ``n``, with a rival's conditioning.

    Args:
        way: ``"paper"`` or ``"ovc"``.
        model: A model with a binomial likelihood, logit link.
        X: ``n x d`` candidates.
        sites: ``s x d`` sites.
        threshold: The threshold.
        total_count: Tests at each candidate.
        num_fantasies: Outcomes drawn for each candidate.
        seed: Seed of the draws.
    """
    likelihood = model.likelihood
    assert type(likelihood) is BinomialLikelihood
    uncertainty = Uncertainty("threshold-entropy", link_of(likelihood), threshold)
    at = marginals(model, X, sites)
    mean, variance = at.mean.unsqueeze(-2), at.variance.unsqueeze(-2)
    Y = draw(likelihood, mean, variance, num_fantasies, seed, {"total_count": total_count})
    if way == "ovc":
        gain, fall = newton_pseudo_targets(Y, mean, variance, total_count)
    else:
        at, explained = fixed_inducing(model, at, X, sites)
        gain, fall = fixed_inducing_gains(likelihood, Y, at, explained, total_count)
    weights = sites.new_full((len(sites),), 1 / len(sites))
    return score_candidates([uncertainty], at, LookAhead(gain, fall), X, sites, weights)


def newton_pseudo_targets(
    Y: Tensor, mean: Tensor, variance: Tensor, total_count: int, steps: int = 50
) -> tuple[Tensor, Tensor]:
    """Gains and falls ``f x n`` of counts ``f x n`` by Laplace's method."""
    f = mean.expand_as(Y)
    for _ in range(steps):
        p = f.sigmoid()
        slope = Y - total_count * p - (f - mean) / variance
        # Damped where far from the mode: Newton's method alone may overshoot.
        step = (slope / (total_count * p * (1 - p) + 1 / variance)).clamp(-1, 1)
        f = f + step
        if float(step.abs().max()) < 1e-8:
            break
    p = f.sigmoid()
    beta = (total_count * p * (1 - p)).clamp_min(1e-10)
    target = f + (Y - total_count * p) / beta
    fall = beta / (1 + beta * variance)
    return fall * (target - mean), fall


def fixed_inducing(
    model: SequentialGP, at: Marginals, X: Tensor, sites: Tensor
) -> tuple[Marginals, Tensor]:
    """Covariances through the inducing points alone, and those of the candidates themselves."""
    n = len(X)
    f = model(model.transform_inputs(torch.cat([X, sites])))
    covariance = f.lazy_covariance_matrix
    assert isinstance(covariance, PosteriorCovariance)
    A = covariance.A
    solved = A - covariance.explained  # W^-1 A
    own = (A[..., :n] * solved[..., :n]).sum(-2)

    def cross(chunk: slice) -> Tensor:
        return A[..., :n][..., chunk].mT @ solved[..., n:]

    return at._replace(cross=cross), own


def fixed_inducing_gains(
    likelihood: BinomialLikelihood, Y: Tensor, at: Marginals, explained: Tensor, total_count: int
) -> tuple[Tensor, Tensor]:
    """Gains and falls ``f x n``, sites converged under the marginals of the fixed-Z posterior."""
    targets = Y.unsqueeze(-1)
    mean = at.mean.unsqueeze(-2).unsqueeze(-1)
    own = explained.unsqueeze(-2).unsqueeze(-1)
    rest = (at.variance - explained).clamp_min(0).unsqueeze(-2).unsqueeze(-1)

    def evaluate(m: Tensor, v: Tensor):  # type: ignore[no-untyped-def]
        return expectations(likelihood, targets, m, v + rest, total_count=total_count)

    gain, fall, _ = condition_each(mean, own, evaluate, TOLERANCE)
    return gain, fall


def joint_sample_reduction(
    model: SequentialGP,
    X: Tensor,
    sites: Tensor,
    threshold: float,
    total_count: int,
    num_fantasies: int = 16,
    num_samples: int = 64,
    seed: int = 0,
) -> Tensor:
    """The reference's way: joint samples of every fantasised posterior over all sites.

    Args:
        model: The model.
        X: ``n x d`` candidates.
        sites: ``s x d`` sites.
        threshold: The threshold.
        total_count: Tests at each candidate.
        num_fantasies: Fantasies for each candidate.
        num_samples: Joint samples of each fantasised posterior.
        seed: Seed of the fantasies.
    """
    from botorch.sampling import SobolQMCNormalSampler

    sampler = SobolQMCNormalSampler(torch.Size([num_fantasies]), seed=seed)
    values = []
    nugget = 0.0
    if isinstance(model.likelihood, OverdispersedBinomialLikelihood):
        nugget = model.likelihood.nugget.item()
    with torch.no_grad():
        for x in X:
            fantasies = model.fantasize(x.unsqueeze(0), sampler, total_count=total_count)
            samples = fantasies.posterior(sites).rsample(torch.Size([num_samples])).squeeze(-1)
            samples = samples + nugget**0.5 * torch.randn_like(samples)
            p = (samples.sigmoid() > threshold).to(samples).mean(0)
            values.append(-(torch.special.entr(p) + torch.special.entr(1 - p)).mean())
    return torch.stack(values)

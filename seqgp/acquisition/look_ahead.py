r"""Effects of an observation at a candidate on the posterior at all locations.

The likelihood of an outcome :math:`y` at a candidate :math:`x` is approximated by a Gaussian of
precision :math:`\beta`. (That Gaussian is called a *site*, see `seqgp.dual`; it is no location.)
With the posterior covariance :math:`c`, conditioning (`seqgp.dual.conditioning`) is elementwise
arithmetic at all locations :math:`a`,

.. math::
    m'_a = m_a + c(a, x) \, g, \qquad v'_a = v_a - c(a, x)^2 \, \frac{\beta}{1 + \beta c(x, x)},

so there is no need to sample jointly at the locations.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from botorch.models.utils import gpt_posterior_settings
from gpytorch.likelihoods import (
    BernoulliLikelihood,
    FixedNoiseGaussianLikelihood,
    GaussianLikelihood,
    Likelihood,
)
from linear_operator import to_dense
from torch import Tensor
from torch.distributions import Bernoulli

from seqgp.acquisition.tasks import with_task
from seqgp.acquisition.uncertainty import nugget_of
from seqgp.dual.conditioning import Conditioned, condition
from seqgp.dual.linalg import broadcast_shapes
from seqgp.dual.natural_gradient import Evaluate
from seqgp.dual.sites import Expectations
from seqgp.likelihoods.discrete import (
    BinomialLikelihood,
    OrdinalLikelihood,
    OverdispersedBinomialLikelihood,
)
from seqgp.likelihoods.expectations import expectations
from seqgp.likelihoods.predictive import log_predictive
from seqgp.likelihoods.psychometric import PsychometricLikelihood
from seqgp.likelihoods.traits import (
    has_one_latent,
    is_conjugate,
    observation_noise,
    output_latents,
    precision_floor,
)
from seqgp.models.posteriors import quantile
from seqgp.models.sequential_gp import SequentialGP
from seqgp.variational.linear_operators import PosteriorCovariance

#: Relative tolerance for the sites of fantasies at the candidates of a pool: far below the error
#: of an average over few fantasies.
TOLERANCE = 2e-3

#: Relative tolerance for the sites of fantasies with gradients, which are about as exact.
EXACT_TOLERANCE = 1e-8

#: The dtype in which candidates of a pool are scored.
PRECISION = torch.float32


class Latents(NamedTuple):
    """The posterior of all ``c`` latent functions of one likelihood at ``n`` candidates."""

    mean: Tensor  # b x n x c
    variance: Tensor  # b x n x c
    prior_mean: Tensor  # b x n x c
    output: int  # which of them the criteria are about


class Marginals(NamedTuple):
    """The posterior at ``n`` candidates and ``s`` locations, with batch shape ``b`` (or none).

    It is that of the latent function that the criteria are about. If observations depend on others,
    too, ``latents`` has all of them.
    """

    mean: Tensor  # b x n
    variance: Tensor  # b x n
    prior_mean: Tensor  # n
    location_mean: Tensor  # b x s
    location_variance: Tensor  # b x s
    cross: Callable[[slice], Tensor]  # covariances of a slice of candidates: b x k x s
    latents: Latents | None = None


class LookAhead(NamedTuple):
    """Effects of ``f`` outcomes at ``n`` candidates: ``m' = m + c gain``, ``v' = v - c^2 fall``.

    Probabilities are not normalised. They are differentiable even if the outcomes are not. ``None``
    if all outcomes have the same probability and depend on the candidate instead.
    """

    gain: Tensor  # b x f x n
    fall: Tensor  # b x f x n
    probability: Tensor | None = None  # b x f x n

    def at(self, part: slice, dtype: torch.dtype) -> LookAhead:
        """The effects at a slice of the candidates."""
        gain, fall, p = self
        p = p if p is None else p[..., part].to(dtype)
        return LookAhead(gain[..., part].to(dtype), fall[..., part].to(dtype), p)


def marginals(model: SequentialGP, X: Tensor, locations: Tensor) -> Marginals:
    """Posterior means, variances and (a chunk at a time) covariances.

    Args:
        model: The model.
        X: ``n x d`` candidates.
        locations: ``s x d`` locations.
    """
    n, output = X.shape[-2], output_of(model.likelihood)
    inputs = model.eval().transform_inputs(torch.cat([X, locations]))
    with gpt_posterior_settings():
        f = model(inputs)
    covariance: Any = f.lazy_covariance_matrix
    if output is not None:
        covariance = covariance.base_linear_op  # b x c x (n + s) x (n + s)
    assert isinstance(covariance, PosteriorCovariance)
    variance = covariance.diagonal(dim1=-1, dim2=-2)
    variance = variance.clamp_min(torch.finfo(variance.dtype).eps)

    def cross(chunk: slice) -> Tensor:
        start, stop, _ = chunk.indices(n)
        prior = to_dense(covariance.prior[..., start:stop, n:])
        explained = covariance.A[..., start:stop].mT @ covariance.explained[..., n:]
        reduction = covariance.reduction
        own = (covariance.sign * reduction[..., start:stop]).mT @ reduction[..., n:]
        value = prior - explained - own
        if output is None:
            return value
        return value.expand(*covariance.shape[:-2], *value.shape[-2:])[..., output, :, :]

    if output is None:
        mean, prior_mean, latents = f.mean, model.mean_module(inputs)[..., :n], None
    else:
        prior_means = model.mean_module(inputs.unsqueeze(-3)).expand(variance.shape)
        each = (f.mean.mT, variance, prior_means)
        at_X = [tensor[..., :n].mT for tensor in each]
        latents = Latents(at_X[0], at_X[1], at_X[2], output)
        mean, variance, prior_mean = (tensor[..., output, :] for tensor in each)
        prior_mean = prior_mean[..., :n]
    return Marginals(
        mean[..., :n],
        variance[..., :n],
        prior_mean,
        mean[..., n:],
        variance[..., n:],
        cross,
        latents,
    )


def latent_moments(model: SequentialGP, X: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and variance ``...`` of the latent function that is the output.

    Args:
        model: A model of one output.
        X: ``... x d`` inputs.
    """
    output = output_of(model.likelihood)
    with gpt_posterior_settings():
        f = model.eval()(model.transform_inputs(with_task(model, X)))
    mean, variance = f.mean, f.variance
    return (mean, variance) if output is None else (mean[..., output], variance[..., output])


def output_of(likelihood: Likelihood) -> int | None:
    """Return which of several latents is the only output; ``None`` if there is one latent.

    Args:
        likelihood: The likelihood of a model of one output.
    """
    outputs = output_latents(likelihood)
    return None if outputs is None else outputs[0]


def look_ahead(
    likelihood: Likelihood, at: Marginals, num_fantasies: int, seed: int, arguments: dict[str, Any]
) -> LookAhead:
    """Imagine outcomes at the candidates, and compute the effect of each.

    With a nugget, what is observed is the latent function plus an independent term. This has a
    larger variance, and the same covariance with all other locations.

    Args:
        likelihood: The likelihood.
        at: The posterior at candidates and locations.
        num_fantasies: Outcomes per candidate; see `outcomes`.
        seed: Seed of outcomes that are sampled.
        arguments: Per-point arguments of the likelihood at the candidates.
    """
    if at.latents is not None:
        return _look_ahead_of_latents(likelihood, at.latents, num_fantasies, seed, arguments)
    n = at.mean.shape[-1]
    variance = at.variance + nugget_of(likelihood)
    if isinstance(likelihood, OverdispersedBinomialLikelihood):
        likelihood = likelihood.conditional
    mean, variance = at.mean.unsqueeze(-2), variance.unsqueeze(-2)  # b x 1 x n
    Y, probability = outcomes(likelihood, mean, variance, num_fantasies, seed, arguments)
    if is_conjugate(likelihood):
        total = variance + _noise(likelihood, n, arguments).detach()
        gain = (Y - mean) / total
        return LookAhead(gain, total.reciprocal().expand_as(gain))
    arguments, targets = _one_by_one(arguments), Y.unsqueeze(-1)

    def evaluate(m: Tensor, v: Tensor) -> Any:
        return expectations(likelihood, targets, m, v, **arguments)

    if precision_floor(likelihood) is not None:
        differentiable = torch.is_grad_enabled()
        dtype = mean.dtype if differentiable else PRECISION
        targets = targets.to(dtype)
        m, v = (tensor.to(dtype).unsqueeze(-1) for tensor in (mean, variance))
        tol = EXACT_TOLERANCE if differentiable else TOLERANCE
        gain, fall, converged = condition_each(m, v, evaluate, tol)
        if converged:
            return LookAhead(gain, fall, probability)
        targets = targets.to(mean.dtype)
    conditioned, _ = condition(
        mean.expand_as(Y).unsqueeze(-1),
        variance.expand_as(Y).unsqueeze(-1).unsqueeze(-1),
        at.prior_mean.expand_as(Y).unsqueeze(-1),
        evaluate,
        min_precision=precision_floor(likelihood),
        tol=EXACT_TOLERANCE,
    )
    return LookAhead(conditioned.gain.squeeze(-1), _fall(conditioned), probability)


def _look_ahead_of_latents(
    likelihood: Likelihood,
    latents: Latents,
    num_fantasies: int,
    seed: int,
    arguments: dict[str, Any],
) -> LookAhead:
    """Return effects on one latent of outcomes that depend on several, conditioned jointly."""
    mean, variance, prior_mean = (t.unsqueeze(-3) for t in latents[:3])  # b x 1 x n x c
    Y, probability = outcomes(likelihood, mean, variance, num_fantasies, seed, arguments)
    shape = (*Y.shape, mean.shape[-1], 1)  # each outcome is a data set of one observation
    targets, arguments = Y.unsqueeze(-1), _one_by_one(arguments)

    def evaluate(m: Tensor, v: Tensor) -> Expectations:
        log_prob, alpha, beta = expectations(likelihood, targets, m.mT, v.mT, **arguments)
        return Expectations(log_prob, alpha.mT, beta.mT)

    conditioned, _ = condition(
        mean.unsqueeze(-1).expand(shape),
        variance.unsqueeze(-1).expand(shape).unsqueeze(-1),
        prior_mean.unsqueeze(-1).expand(shape),
        evaluate,
        latent_dims=1,
        min_precision=precision_floor(likelihood),
        tol=1e-6,
    )
    gain, i = conditioned.gain.squeeze(-1), latents.output
    return LookAhead(gain[..., i], _fall(conditioned)[..., i], probability)


def _one_by_one(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return per-point arguments ``n`` as ``n x 1``, for ``n`` data sets of one observation."""
    return {
        key: value.unsqueeze(-1) if isinstance(value, Tensor) and value.dim() else value
        for key, value in arguments.items()
    }


def _fall(conditioned: Conditioned) -> Tensor:
    """Return ``...``, the reduction of the variance, for data sets of one observation."""
    return (conditioned.sign * conditioned.root.square()).sum((-2, -1))


def outcomes(
    likelihood: Likelihood,
    mean: Tensor,
    variance: Tensor,
    number: int,
    seed: int,
    arguments: dict[str, Any],
) -> tuple[Tensor, Tensor | None]:
    r"""Return outcomes ``b x f x n``, and their probabilities up to a factor.

    If at most ``number`` outcomes are possible, these are all of them. Otherwise ``number`` of them
    are sampled. Real numbers are differentiable functions of the candidate. Discrete samples are
    not, but their probabilities are: the weights are one, with the gradient of
    the predictive probability, so that
    :math:`\nabla E[u] = E[\nabla u + (u - E[u]) \nabla \log p(y)]`.

    Args:
        likelihood: The likelihood.
        mean: ``b x 1 x n`` means of the latent function at the candidates, or ``b x 1 x n x c``.
        variance: ``b x 1 x n [x c]`` variances.
        number: The number of outcomes.
        seed: Seed of the samples.
        arguments: Per-point arguments of the likelihood.
    """
    most = _largest_outcome(likelihood, arguments)
    if most is not None and most < number:
        shape = broadcast_shapes(mean.shape, (most + 1, 1))
        steps = torch.arange(most + 1, dtype=mean.dtype, device=mean.device).unsqueeze(-1)
        Y = steps.expand(shape)
        possible = None
        if isinstance(likelihood, BinomialLikelihood):
            totals = likelihood.totals(mean, arguments.get("total_count"))
            Y, possible = torch.minimum(Y, totals), totals >= steps
        p = log_predictive(likelihood, Y, mean, variance, **arguments).exp()
        return Y, p if possible is None else p * possible
    Y = draw(likelihood, mean, variance, number, seed, arguments)
    if is_conjugate(likelihood) or Y.requires_grad or not torch.is_grad_enabled():
        return Y, None
    density = log_predictive(likelihood, Y, mean, variance, **arguments)
    return Y, (density - density.detach()).exp()


def _largest_outcome(likelihood: Likelihood, arguments: dict[str, Any]) -> int | None:
    """Return the largest possible count or category, or ``None`` if there is none."""
    if isinstance(likelihood, BernoulliLikelihood | PsychometricLikelihood):
        return 1
    if isinstance(likelihood, OrdinalLikelihood):
        return likelihood.num_classes - 1
    if isinstance(likelihood, BinomialLikelihood):
        totals = arguments.get("total_count", likelihood.total_count)
        if totals is not None:
            return int(totals.max() if isinstance(totals, Tensor) else totals)
    return None


def condition_each(
    mean: Tensor, variance: Tensor, evaluate: Evaluate, tol: float
) -> tuple[Tensor, Tensor, bool]:
    r"""Return gains and falls of many single observations, with gradients if they are enabled.

    The same as `condition` for ``q = 1`` and log-concave likelihoods, but faster. It may fail to
    converge: from hundreds of trials at once at a point of which next to nothing is known, say.

    With :math:`C` the variance,
    :math:`r = \lambda - \beta (m - \mu)`, :math:`m' = m + C r / (1 + \beta C)` and
    :math:`v' = C / (1 + \beta C)`, it iterates :math:`r \leftarrow \alpha + \beta (m' - m)` and
    :math:`\beta`, with :math:`\alpha` and :math:`\beta` evaluated at :math:`(m', v')`.

    Args:
        mean: ``... x n x 1`` means.
        variance: ``... x n x 1`` variances.
        evaluate: Expectations under the likelihood, a function of mean and variance.
        tol: Relative tolerance for the sites.

    Returns:
        Two tensors ``... x n``, and whether all of them have converged.
    """

    def step(r: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
        shrink = 1 / (1 + beta * variance)
        shift = variance * r * shrink
        _, alpha, new = evaluate(mean + shift, variance * shrink)
        new = new.clamp_min(0)
        return alpha + new * shift, new

    with torch.no_grad():
        _, r, beta = evaluate(mean, variance)
        beta = beta.clamp_min(0)
        for k in range(50):
            target, new = step(r, beta)
            rho = 1.0 if k < 10 else 0.5  # damped if the iteration oscillates
            dr, dbeta = target - r, new - beta
            scale = r.abs() + beta * variance.sqrt() + torch.finfo(r.dtype).tiny
            shrink = 1 / (1 + beta * variance)
            error = torch.maximum((dr / scale).abs(), dbeta.abs() / (beta + shrink / variance))
            r, beta = r + rho * dr, beta + rho * dbeta
            if converged := not bool((error > tol).any()):
                break
    if torch.is_grad_enabled():
        r, beta = _newton_step(step, r, beta)
    shrink = 1 / (1 + beta * variance)
    return (r * shrink).squeeze(-1), (beta * shrink).squeeze(-1), converged


def _newton_step(
    step: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]], r: Tensor, beta: Tensor
) -> tuple[Tensor, Tensor]:
    r"""Take a last step towards ``s = step(s)``, which gives the solution its gradient.

    With :math:`s = F(s, \phi)` and the Jacobian :math:`J = \partial F / \partial s`, this is
    :math:`s + (I - J)^{-1} (F(s, \phi) - s)`. Only :math:`F(s, \phi)` has a gradient, so that of
    the result is :math:`(I - J)^{-1} \partial F / \partial \phi`: the implicit function theorem.

    Args:
        step: The function, which acts on each element alone.
        r: First half of the solution.
        beta: Second half.
    """
    leaves = tuple(tensor.detach().requires_grad_(True) for tensor in (r, beta))
    target = step(*leaves)
    (a, b), (c, d) = (torch.autograd.grad(part.sum(), leaves, retain_graph=True) for part in target)
    a, d = 1 - a, 1 - d  # I - J = ((a, -b), (-c, d))
    dr, dbeta = (new - old.detach() for new, old in zip(step(r, beta), (r, beta), strict=True))
    det = a * d - b * c
    return r + (d * dr + b * dbeta) / det, beta + (c * dr + a * dbeta) / det


def _noise(likelihood: Likelihood, n: int, arguments: dict[str, Any]) -> Tensor:
    """Return noise variances of Gaussian observations at the candidates."""
    noise = arguments.get("noise")
    if noise is not None and not isinstance(likelihood, GaussianLikelihood):
        noise = torch.as_tensor(noise)
        return noise.squeeze(-1) if noise.dim() else noise
    if noise is None and isinstance(likelihood, FixedNoiseGaussianLikelihood):
        return likelihood.noise_covar.noise.mean(-1, keepdim=True)
    return observation_noise(likelihood, n)


def draw(
    likelihood: Likelihood,
    mean: Tensor,
    variance: Tensor,
    number: int,
    seed: int,
    arguments: dict[str, Any],
) -> Tensor:
    """Sample outcomes ``b x f x n``, the same quantiles at every candidate.

    Real numbers are differentiable; labels, counts and the like are not.

    Args:
        likelihood: The likelihood.
        mean: ``b x 1 x n`` means of the latent function at the candidates, or ``b x 1 x n x c``.
        variance: ``b x 1 x n [x c]`` variances.
        number: The number of outcomes.
        seed: Seed of the samples.
        arguments: Per-point arguments of the likelihood.
    """
    several = not has_one_latent(likelihood)
    c = mean.shape[-1] if several else 1
    engine = torch.quasirandom.SobolEngine(c + 1, scramble=True, seed=seed)
    uniform = engine.draw(number, dtype=torch.float64).to(mean)
    eps = torch.finfo(mean.dtype).eps
    uniform = uniform.clamp(eps, 1 - eps)
    z = torch.special.ndtri(uniform[:, :c])  # f x c
    f = mean + variance.sqrt() * (z.unsqueeze(-2) if several else z)
    if is_conjugate(likelihood):
        noise = _noise(likelihood, f.shape[-1], arguments)
        return f + noise.sqrt() * torch.special.ndtri(uniform[:, c:])
    conditional = (
        Bernoulli(torch.special.ndtr(f), validate_args=False)
        if isinstance(likelihood, BernoulliLikelihood)
        else likelihood.forward(f, **arguments)
    )
    levels = uniform[:, c:].expand(f.shape[:-1] if several else f.shape)
    with torch.set_grad_enabled(torch.is_grad_enabled() and conditional.has_rsample):
        return quantile(conditional, levels).to(f)

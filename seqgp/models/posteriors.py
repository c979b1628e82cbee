r"""Posteriors over observations, for likelihoods that are not Gaussian.

BoTorch's samplers pass standard normal base samples to a posterior. Here the first of them give
samples of the latent function, jointly at all inputs. The others give observations given the latent
function, by the inverse CDF: :math:`y = F^{-1}(\Phi(z) \mid f)`. Samples are possible observations
(0 or 1, counts, classes), and the same base samples give common random numbers.
"""

from __future__ import annotations

from functools import singledispatch
from typing import Any

import numpy as np
import torch
from botorch.exceptions.errors import UnsupportedError
from botorch.posteriors import GPyTorchPosterior, Posterior
from botorch.sampling.get_sampler import GetSampler
from botorch.sampling.normal import SobolQMCNormalSampler
from gpytorch.distributions import MultitaskMultivariateNormal
from gpytorch.likelihoods import BernoulliLikelihood, Likelihood, SoftmaxLikelihood
from scipy import special  # a dependency of BoTorch; `scipy.stats` would take longer to import
from torch import Tensor
from torch.distributions import (
    Bernoulli,
    Beta,
    Binomial,
    Categorical,
    Distribution,
    Gamma,
    NegativeBinomial,
    Poisson,
    StudentT,
)

from seqgp.dual.linalg import broadcast_shapes
from seqgp.likelihoods.by_task import TaskDistribution
from seqgp.likelihoods.discrete import OverdispersedBinomialLikelihood
from seqgp.likelihoods.heteroscedastic import HeteroscedasticGaussianLikelihood
from seqgp.likelihoods.logit_normal_binomial import LogitNormalBinomial
from seqgp.likelihoods.predictive import conditional_moments
from seqgp.likelihoods.quadrature import latent_nodes
from seqgp.likelihoods.softmax import softmax_normaliser


class ObservationPosterior(Posterior):
    """The distribution of observations at ``q`` inputs, for latent Gaussians and a likelihood.

    Args:
        latent: ``q(f)``, a posterior over ``... x q x l`` latent values. If the likelihood is an
            `OverdispersedBinomialLikelihood`, its variance includes the nugget.
        likelihood: The likelihood.
        arguments: Per-point arguments of the likelihood, ``... x q``.
        several_latents: Whether one observation per input depends on all ``l`` latents, instead of
            one observation per latent.

    Example:
        >>> import torch
        >>> from gpytorch.likelihoods import PoissonLikelihood
        >>> from seqgp import SequentialGP
        >>> X = torch.linspace(0, 1, 10, dtype=torch.double).unsqueeze(-1)
        >>> model = SequentialGP(X, torch.ones_like(X), likelihood=PoissonLikelihood())
        >>> counts = model.posterior(X, observation_noise=True)
        >>> samples = counts.rsample(torch.Size([100]))
        >>> samples.shape, bool((samples == samples.round()).all())
        (torch.Size([100, 10, 1]), True)
    """

    def __init__(
        self,
        latent: GPyTorchPosterior,
        likelihood: Likelihood,
        arguments: dict[str, Any] | None = None,
        several_latents: bool = False,
    ) -> None:
        self.latent = latent
        self.likelihood = likelihood
        self.arguments = arguments or {}
        self.several_latents = several_latents

    @property
    def device(self) -> torch.device:
        """The device of the samples."""
        return self.latent.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the samples."""
        return self.latent.dtype

    @property
    def batch_shape(self) -> torch.Size:
        """The batch shape ``...``."""
        return self.latent.batch_shape

    @property
    def num_outputs(self) -> int:
        """The number ``m`` of observations per input."""
        return 1 if self.several_latents else self._latent_shape[-1]

    def _extended_shape(self, sample_shape: torch.Size = torch.Size()) -> torch.Size:  # noqa: B008
        """The shape of samples, ``sample_shape x ... x q x m``."""
        return torch.Size([*sample_shape, *self._latent_shape[:-1], self.num_outputs])

    @property
    def _latent_shape(self) -> torch.Size:
        """``... x q x l``, the shape of the latent values."""
        shape = self.latent.base_sample_shape
        several = isinstance(self.latent.distribution, MultitaskMultivariateNormal)
        return shape if several else torch.Size([*shape, 1])

    @property
    def base_sample_shape(self) -> torch.Size:
        """``... x q x (l + m)``: base samples of the latents, then of the observations."""
        *batch, num_latents = self._latent_shape
        return torch.Size([*batch, num_latents + self.num_outputs])

    @property
    def batch_range(self) -> tuple[int, int]:
        """The t-batch dimensions of the base samples."""
        return (0, -2)

    def rsample_from_base_samples(self, sample_shape: torch.Size, base_samples: Tensor) -> Tensor:
        """Observations from standard normal base samples.

        Args:
            sample_shape: The sample shape.
            base_samples: ``sample_shape x ... x q x (l + m)``.

        Returns:
            ``sample_shape x ... x q x m``. Continuous observations are differentiable through the
            latents; discrete ones have no gradient.
        """
        m = self.num_outputs
        latent_base, uniform = base_samples[..., :-m], torch.special.ndtr(base_samples[..., -m:])
        latent_base = latent_base.expand(*sample_shape, *self._latent_shape)
        if self.latent.base_sample_shape != self._latent_shape:
            latent_base = latent_base.squeeze(-1)  # GPyTorchPosterior of one output
        f = self.latent.rsample_from_base_samples(sample_shape, latent_base.contiguous())
        conditional = self._conditional(f)
        eps = torch.finfo(uniform.dtype).eps
        uniform = uniform.clamp(eps, 1 - eps)
        if self.several_latents:
            return quantile(conditional, uniform.squeeze(-1)).to(f).unsqueeze(-1)
        return quantile(conditional, uniform.mT).to(f).mT

    def rsample(self, sample_shape: torch.Size | None = None) -> Tensor:
        """Samples of shape ``sample_shape x ... x q x m``."""
        sample_shape = torch.Size([1]) if sample_shape is None else sample_shape
        base = torch.randn(
            *sample_shape, *self.base_sample_shape, dtype=self.dtype, device=self.device
        )
        return self.rsample_from_base_samples(sample_shape, base)

    @property
    def mean(self) -> Tensor:
        """``E[y]``, ``... x q x m``. For classes, the mean of their index."""
        return self._moments()[0]

    @property
    def probabilities(self) -> Tensor:
        """The probability of each class, ``... x q x c``, if observations are classes or labels."""
        mean, variance = self.latent.mean, self.latent.variance
        if not self.several_latents and mean.shape[-1] > 1:
            raise UnsupportedError(
                f"Probabilities of classes: expected one output, got {mean.shape[-1]}; select one "
                "with output_indices, or use the mean, which is the probability of a label 1."
            )
        if isinstance(self.likelihood, SoftmaxLikelihood) and (
            self.likelihood.mixing_weights is None
        ):
            return softmax_normaliser(mean, variance)[1]
        nodes, weights = self._nodes(mean)
        conditional = self._conditional(mean + variance.sqrt() * nodes)
        if isinstance(conditional, Bernoulli):
            positive = self.mean
            return torch.cat([1 - positive, positive], -1)
        if not isinstance(conditional, Categorical):
            raise UnsupportedError(
                f"Observations of a {type(self.likelihood).__name__} are not classes."
            )
        probabilities = torch.tensordot(weights, conditional.probs, 1)
        return probabilities if self.several_latents else probabilities.squeeze(-3)

    @property
    def variance(self) -> Tensor:
        """``Var[y]``, ``... x q x m``, by the law of total variance."""
        return self._moments()[1]

    @property
    def distribution(self) -> Distribution:
        """Not available: PyTorch has no joint distribution of observations at several inputs."""
        raise UnsupportedError(
            f"Observations of a {type(self.likelihood).__name__} are not jointly Gaussian, but the "
            "caller assumes that they are (as do entropy search with qMaxValueEntropy, and "
            "ModelListGP). Use an acquisition function that only needs samples or the latent "
            "function (qKnowledgeGradient, qLogNoisyExpectedImprovement, UpperConfidenceBound), "
            "and a ModelList for observations of several models."
        )

    def _nodes(self, mean: Tensor) -> tuple[Tensor, Tensor]:
        """Nodes ``k x ...`` that broadcast against the latents' mean, and ``k`` weights."""
        nodes, log_weights = latent_nodes(mean, self.several_latents)
        return nodes, log_weights.exp()

    def _moments(self) -> tuple[Tensor, Tensor]:
        mean, variance = self.latent.mean, self.latent.variance
        if not mean.numel():  # of which PyTorch does not make some distributions
            nothing = torch.zeros_like(mean[..., :1] if self.several_latents else mean)
            return nothing, nothing
        if isinstance(self.likelihood, HeteroscedasticGaussianLikelihood):
            noise = self.likelihood.expected_noise(mean, variance)
            return mean[..., :1], variance[..., :1] + noise.unsqueeze(-1)
        nodes, weights = self._nodes(mean)
        conditional = self._conditional(mean + variance.sqrt() * nodes)
        first, second = conditional_moments(conditional)
        average = torch.tensordot(weights, first, 1)
        spread = torch.tensordot(weights, second + (first - average).square(), 1)
        if self.several_latents:
            return average.unsqueeze(-1), spread.unsqueeze(-1)
        return average.mT, spread.mT

    def _conditional(self, f: Tensor) -> Distribution:
        """``p(y | f)`` at latents ``... x q x l``, with batch shape ``... [x m] x q``."""
        if isinstance(self.likelihood, BernoulliLikelihood):
            # Without `forward`, which makes a tensor on the default device.
            return Bernoulli(torch.special.ndtr(f.mT), validate_args=False)
        if isinstance(self.likelihood, OverdispersedBinomialLikelihood):
            return self.likelihood.conditional.forward(f.mT, **self.arguments)
        if not self.several_latents:
            return self.likelihood.forward(f.mT, **self.arguments)
        if isinstance(self.likelihood, SoftmaxLikelihood):
            # Without `forward`, which transposes its input if q equals the number of classes.
            weights = self.likelihood.mixing_weights
            return Categorical(logits=f if weights is None else f @ weights.mT)
        return self.likelihood.forward(f, **self.arguments)


@GetSampler.register(ObservationPosterior)
def _get_sampler(
    posterior: ObservationPosterior, sample_shape: torch.Size, *, seed: int | None = None
) -> SobolQMCNormalSampler:
    return SobolQMCNormalSampler(sample_shape=sample_shape, seed=seed)


@singledispatch
def quantile(distribution: Distribution, u: Tensor) -> Tensor:
    """The inverse CDF at ``u``, also for distributions for which PyTorch has none.

    Register a rule for your own distribution with ``@quantile.register(MyDistribution)``.

    Args:
        distribution: A distribution with batch shape ``...``.
        u: Numbers in (0, 1), broadcastable to ``...``.
    """
    try:
        return distribution.icdf(u)
    except NotImplementedError:
        raise NotImplementedError(
            f"No inverse CDF is known for {type(distribution).__name__}, which is needed to sample "
            "observations; register one with @seqgp.models.posteriors.quantile.register."
        ) from None


@quantile.register(TaskDistribution)
def _task_quantile(distribution: TaskDistribution, u: Tensor) -> Tensor:
    return distribution.chosen(lambda each: quantile(each, u))


@quantile.register(Bernoulli)
def _bernoulli_quantile(distribution: Bernoulli, u: Tensor) -> Tensor:
    return (u > 1 - distribution.probs).to(u)


@quantile.register(Categorical)
def _categorical_quantile(distribution: Categorical, u: Tensor) -> Tensor:
    cumulative = distribution.probs.cumsum(-1)
    below = (cumulative < u.unsqueeze(-1)).sum(-1)
    return below.clamp_max(cumulative.shape[-1] - 1).to(u)


@quantile.register(Binomial)
def _binomial_quantile(distribution: Binomial, u: Tensor) -> Tensor:
    r"""By the recurrence :math:`p_{k+1} = p_k \, \frac{N - k}{k + 1} \, e^f`.

    It is applied to the rarer of successes and failures, so that :math:`p_0 \ge 2^{-N}`.
    """
    total = distribution.total_count
    most = int(total.max()) if total.numel() else 0
    if most > 1000:
        return _count_quantile(distribution, u)
    with torch.no_grad():
        u = u.expand(broadcast_shapes(u.shape, distribution.batch_shape))
        logits, N = distribution.logits.double(), total.double()
        flip = (logits > 0).expand(u.shape)
        odds = (-logits.abs()).exp()
        p = (-N * torch.log1p(odds)).exp().expand(u.shape)
        level = torch.where(flip, 1 - u.double(), u.double())
        cumulative, below = torch.zeros_like(p), torch.zeros_like(p)
        for k in range(most):
            cumulative = cumulative + p
            # The smallest k with P(K <= k) >= u; counted from the other side, the largest.
            below = below + torch.where(flip, cumulative <= level, cumulative < level)
            if k % 16 == 15 and not bool((cumulative < level).any()):
                break
            p = p * ((N - k) / (k + 1) * odds)
        below = torch.minimum(below, N)
        return torch.where(flip, N - below, below).to(u)


@quantile.register(NegativeBinomial)
@quantile.register(Poisson)
@quantile.register(LogitNormalBinomial)
def _count_quantile(distribution: Distribution, u: Tensor) -> Tensor:
    """Sum probabilities, a block of counts at a time, until every ``u`` is reached."""
    with torch.no_grad():
        u = u.expand(broadcast_shapes(u.shape, distribution.batch_shape))
        limit = distribution.mean + 40 * distribution.stddev + 40  # the mass beyond is negligible
        below, total, start, block = torch.zeros_like(u), torch.zeros_like(u), 0, 64
        while True:
            counts = torch.arange(start, start + block, device=u.device, dtype=u.dtype)
            counts = counts.reshape(-1, *[1] * u.dim())
            log_prob = _unchecked_log_prob(distribution, counts)
            cumulative = total + log_prob.exp().cumsum(0)
            below = below + (cumulative < u).sum(0)
            total, start = cumulative[-1], start + block
            if bool(((total >= u) | (start > limit)).all()):
                break
        if isinstance(distribution, Binomial | LogitNormalBinomial):
            below = torch.minimum(below, distribution.total_count.to(below))
        return below


def _unchecked_log_prob(distribution: Distribution, counts: Tensor) -> Tensor:
    """``log_prob`` that is ``-inf`` outside of the support, instead of raising an error."""
    if isinstance(distribution, Binomial):
        total = distribution.total_count
        inside = counts <= total
        log_prob = Binomial(total, logits=distribution.logits, validate_args=False).log_prob(
            torch.minimum(counts, total)
        )
        return torch.where(inside, log_prob, -torch.inf)
    if isinstance(distribution, LogitNormalBinomial):
        total = distribution.total_count
        log_prob = distribution.log_prob(torch.minimum(counts, total))
        return torch.where(counts <= total, log_prob, -torch.inf)
    return distribution.log_prob(counts)


@quantile.register(StudentT)
def _student_t_quantile(distribution: StudentT, u: Tensor) -> Tensor:
    df = distribution.df.detach().cpu().numpy()
    standard = torch.from_numpy(np.asarray(special.stdtrit(df, u.cpu().numpy()))).to(u)
    return distribution.loc + distribution.scale * standard


@quantile.register(Gamma)
def _gamma_quantile(distribution: Gamma, u: Tensor) -> Tensor:
    """Differentiable with respect to the rate, through which the latent function acts."""
    shape = distribution.concentration.detach().cpu().numpy()
    standard = torch.from_numpy(np.asarray(special.gammaincinv(shape, u.cpu().numpy()))).to(u)
    return standard.clamp_min(torch.finfo(u.dtype).tiny) / distribution.rate


@quantile.register(Beta)
def _beta_quantile(distribution: Beta, u: Tensor) -> Tensor:
    r"""Differentiable, since the CDF is constant at ``y``: :math:`\dot y = -\dot F(y) / p(y)`."""
    parameters = (distribution.concentration1, distribution.concentration0)
    a, b = (parameter.detach().cpu().numpy() for parameter in parameters)
    y = np.asarray(special.betaincinv(a, b, u.cpu().numpy()))
    value = torch.from_numpy(y).to(u)
    if any(parameter.requires_grad for parameter in parameters):
        log_density = special.xlogy(a - 1, y) + special.xlog1py(b - 1, -y) - special.betaln(a, b)
        density, step = np.exp(log_density), 1e-5  # relative, for central differences
        for parameter, da, db in zip(parameters, (step, 0.0), (0.0, step), strict=True):
            right = special.betainc(a * (1 + da), b * (1 + db), y)
            left = special.betainc(a * (1 - da), b * (1 - db), y)
            slope = (left - right) / (2 * step * parameter.detach().cpu().numpy() * density)
            slope = np.nan_to_num(slope, nan=0.0, posinf=0.0, neginf=0.0)  # at 0 and 1
            value = value + torch.from_numpy(slope).to(u) * (parameter - parameter.detach())
    eps = torch.finfo(u.dtype).eps
    return value.clamp(eps, 1 - eps)

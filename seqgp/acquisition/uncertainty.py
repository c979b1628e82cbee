r"""Measures of uncertainty about a quantity of interest, given the marginal of the latent function.

What a survey wants to know at a location is a prevalence (a rate, a level) :math:`\theta = F(h)`,
with an increasing link :math:`F` and a latent value :math:`h \sim N(m, v)`. All measures are
functions of :math:`(m, v)` only, so there is no need to sample jointly at several locations:

* ``"threshold-entropy"``: the entropy of "is :math:`\theta > t`?",
  :math:`H(p)` with :math:`p = \Phi(z)`, :math:`z = (m - F^{-1}(t)) / \sqrt v`;
* ``"misclassification"``: the probability :math:`\min(p, 1 - p)` of the wrong answer;
* ``"volume"``: the probability :math:`p` itself, whose average is the expected volume of the level
  set :math:`\{\theta > t\}`. It is no uncertainty. What counts is how much an observation is
  expected to change it, in either direction;
* ``"variance"``: :math:`\operatorname{Var} F(h)`;
* ``"entropy"``: :math:`H(E[F(h)])`, the entropy of the result of one more test there.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache, singledispatch
from typing import NamedTuple

import numpy as np
import torch
from botorch.exceptions.errors import UnsupportedError
from gpytorch.likelihoods import (
    BernoulliLikelihood,
    BetaLikelihood,
    FixedNoiseGaussianLikelihood,
    GaussianLikelihood,
    LaplaceLikelihood,
    Likelihood,
    PoissonLikelihood,
    StudentTLikelihood,
)
from scipy import special  # a dependency of BoTorch
from torch import Tensor

from seqgp.dual.linalg import broadcast_shapes
from seqgp.likelihoods.continuous import CensoredGaussianLikelihood, GammaLikelihood
from seqgp.likelihoods.discrete import (
    BinomialLikelihood,
    OrdinalLikelihood,
    OverdispersedBinomialLikelihood,
)
from seqgp.likelihoods.heteroscedastic import HeteroscedasticGaussianLikelihood
from seqgp.likelihoods.psychometric import PsychometricLikelihood
from seqgp.likelihoods.quadrature import gauss_hermite

#: The measures by name.
CRITERIA = ("threshold-entropy", "misclassification", "volume", "variance", "entropy")

#: The measures for the question whether the quantity of interest exceeds a threshold.
THRESHOLD_CRITERIA = CRITERIA[:3]

#: Quadrature nodes for the moments of the quantity of interest.
NUM_NODES = 64

#: Range of the polynomial; spacing and range of the tables.
_MAX_Z = 8.0
_STEP, _MAX_MEAN, _MAX_SD = 2.0**-5, 16.0, 8.0


class Link(NamedTuple):
    """The increasing function that maps latent values to the quantity of interest.

    Attributes:
        name: Identifies the link: links with the same name are the same.
        forward: The function.
        inverse: Its inverse.
        probability: Whether its values are probabilities.
        scale: The derivative of a linear link, ``None`` for others.
        base: The name of the link in `LINKS` that this one is a linear function of.
        slope: The slope of that function.
    """

    name: str
    forward: Callable[[Tensor], Tensor]
    inverse: Callable[[Tensor], Tensor]
    probability: bool = False
    scale: float | None = None
    base: str | None = None
    slope: float = 1.0


LINKS = {
    "logit": Link("logit", torch.sigmoid, torch.logit, True),
    "probit": Link("probit", torch.special.ndtr, torch.special.ndtri, True),
    "softplus": Link(
        "softplus", torch.nn.functional.softplus, lambda t: t + (-torch.expm1(-t)).log()
    ),
    "exp": Link("exp", torch.exp, torch.log),
    "identity": Link("identity", lambda f: f, lambda t: t, scale=1.0),
}


def linear_link(offset: float, scale: float) -> Link:
    """The link of a latent function that is standardised: ``offset + scale * f``.

    Args:
        offset: The offset.
        scale: The scale, positive.
    """
    return Link(
        f"linear({offset!r}, {scale!r})",
        lambda f: offset + scale * f,
        lambda t: (t - offset) / scale,
        scale=scale,
    )


def stretched_link(base: str, low: float, high: float) -> Link:
    """A link whose values are between two others than zero and one.

    For example, the probability of a correct response is between a guess rate and one minus a lapse
    rate.

    Args:
        base: The name of a link in `LINKS`.
        low: The value that stands for zero.
        high: The value that stands for one.

    Example:
        >>> import torch
        >>> stretched_link("probit", 0.5, 1.0).inverse(torch.tensor(0.75))
        tensor(0.)
    """
    link, slope = LINKS[base], high - low
    return Link(
        f"{base} from {low!r} to {high!r}",
        lambda f: low + slope * link.forward(f),
        lambda t: link.inverse((t - low) / slope),
        link.probability,
        None,
        base,
        slope,
    )


@singledispatch
def link_of(likelihood: Likelihood) -> Link:
    """Return the link of a likelihood, from the latent function to the expected observation.

    Register your own likelihood with ``@link_of.register(MyLikelihood)``.

    Args:
        likelihood: The likelihood.
    """
    raise UnsupportedError(
        f"{type(likelihood).__name__}: its link is not known; register a Link with "
        "@seqgp.acquisition.uncertainty.link_of.register."
    )


@link_of.register(BernoulliLikelihood)
def _bernoulli(likelihood: BernoulliLikelihood) -> Link:
    return LINKS["probit"]


@link_of.register(BinomialLikelihood)
def _binomial(likelihood: BinomialLikelihood) -> Link:
    return LINKS[likelihood.link]


@link_of.register(PoissonLikelihood)
def _poisson(likelihood: PoissonLikelihood) -> Link:
    return LINKS["softplus"]


@link_of.register(BetaLikelihood)
def _beta(likelihood: BetaLikelihood) -> Link:
    """GPyTorch adds one to both parameters, so that the mean is neither zero nor one."""
    scale = float(likelihood.scale.detach())
    return stretched_link("logit", 1 / (scale + 2), (scale + 1) / (scale + 2))


@link_of.register(PsychometricLikelihood)
def _psychometric(likelihood: PsychometricLikelihood) -> Link:
    return stretched_link("probit", likelihood.guess_rate, 1 - likelihood.lapse_rate)


@link_of.register(GammaLikelihood)
def _gamma(likelihood: GammaLikelihood) -> Link:
    return LINKS["exp"]


@link_of.register(CensoredGaussianLikelihood)
@link_of.register(HeteroscedasticGaussianLikelihood)
@link_of.register(GaussianLikelihood)
@link_of.register(FixedNoiseGaussianLikelihood)
@link_of.register(LaplaceLikelihood)
@link_of.register(StudentTLikelihood)
def _location(likelihood: Likelihood) -> Link:
    return LINKS["identity"]


@link_of.register(OrdinalLikelihood)
def _ordinal(likelihood: OrdinalLikelihood) -> Link:
    """Return the expected category, the sum over ``k`` of ``P(y >= k)``."""
    cutpoints, scale = likelihood.cutpoints.detach(), likelihood.scale.detach()
    cdf = LINKS[likelihood.link].forward

    def forward(f: Tensor) -> Tensor:
        return cdf((f.unsqueeze(-1) - cutpoints.to(f)) / scale.to(f)).sum(-1)

    span = 40 * float(scale.max())
    ends = float(cutpoints.min()) - span, float(cutpoints.max()) + span
    return Link(
        f"ordinal({likelihood.link}, {cutpoints.tolist()!r}, {scale.tolist()!r})",
        forward,
        lambda t: inverse_by_bisection(forward, t, *ends),
    )


def inverse_by_bisection(
    function: Callable[[Tensor], Tensor], values: Tensor, low: float, high: float
) -> Tensor:
    """Return where an increasing function takes given values; infinite or NaN if it does not.

    Args:
        function: The function.
        values: ``...`` values.
        low: Where to begin.
        high: Where to end.
    """
    low_, high_ = torch.full_like(values, low), torch.full_like(values, high)
    possible = (function(low_) < values) & (values < function(high_))
    for _ in range(100):
        middle = (low_ + high_) / 2
        below = function(middle) < values
        low_, high_ = torch.where(below, middle, low_), torch.where(below, high_, middle)
    return torch.where(possible, (low_ + high_) / 2, torch.nan)


def nugget_of(likelihood: Likelihood) -> Tensor | float:
    """Return the variance of the log odds at a location, given the latent function; often zero."""
    return likelihood.nugget if isinstance(likelihood, OverdispersedBinomialLikelihood) else 0.0


class Uncertainty:
    """One of `CRITERIA` as a function of the marginal mean and variance.

    Args:
        criterion: Its name.
        link: The link.
        threshold: The threshold of ``theta``, for `THRESHOLD_CRITERIA`.

    Example:
        >>> import torch
        >>> u = Uncertainty("misclassification", LINKS["logit"], threshold=0.5)
        >>> u(torch.tensor([0.0, 1.0]), torch.ones(2))
        tensor([0.5000, 0.1587])
    """

    def __init__(self, criterion: str, link: Link, threshold: float | None = None) -> None:
        if criterion not in CRITERIA:
            names = ", ".join(map(repr, CRITERIA))
            raise ValueError(f"criterion: expected one of {names}, got {criterion!r}.")
        self.needs_threshold = criterion in THRESHOLD_CRITERIA
        if self.needs_threshold and threshold is None:
            raise ValueError(f"threshold: required for {criterion!r}, got None.")
        if criterion == "entropy" and not link.probability:
            raise ValueError(
                f"criterion: 'entropy' is for probabilities, but the link is {link.name}; use "
                "'variance' or 'threshold-entropy'."
            )
        self.criterion, self.link, self.latent_threshold = criterion, link, 0.0
        if self.needs_threshold:
            value = torch.tensor(threshold, dtype=torch.float64, device="cpu")
            self.latent_threshold = float(link.inverse(value))
            if not math.isfinite(self.latent_threshold):
                wanted = f"a value in the range of the {link.name} link"
                if link.probability and link.base is None:
                    wanted = "a probability between 0 and 1"
                raise ValueError(f"threshold: expected {wanted}, got {threshold}.")

    def __call__(self, mean: Tensor, variance: Tensor) -> Tensor:
        """Evaluate the criterion in closed form or by quadrature, with gradients.

        Args:
            mean: ``...`` means of the latent function.
            variance: ``...`` variances.
        """
        if self.needs_threshold:
            z = (mean - self.latent_threshold) * variance.rsqrt()
            return _of_z(self.criterion, z)
        if self.link.scale is not None:
            moments = self.link.scale**2 * variance
            return moments.expand(broadcast_shapes(mean.shape, variance.shape))
        first, second = link_moments(self.link, mean, variance)
        return _of_moments(self.criterion, first, second)

    def expected_gain(
        self, now: Tensor, after: Tensor, probability: Tensor | None, dim: int
    ) -> Tensor:
        r"""Return the expected effect of an observation: a reduction, or a change of the volume.

        The change of a volume is :math:`E_y |V_y - E_y V_y|`. By the law of total expectation,
        :math:`E_y V_y` is the volume now. With Gaussians for the posteriors this only holds
        approximately, and without the difference an observation that tells nothing scores zero.

        Args:
            now: ``...``, the (average) value now.
            after: Values after each outcome, along dimension ``dim``.
            probability: Probabilities of the outcomes up to a factor. By default all are the same.
            dim: The dimension of the outcomes.

        Returns:
            ``...``, without that dimension.
        """
        if probability is None:
            probability = torch.ones_like(after)
        share = probability / probability.sum(dim, keepdim=True)
        expected = (share * after).sum(dim, keepdim=True)
        if self.criterion == "volume":
            return (share * (after - expected).abs()).sum(dim)
        return now - expected.squeeze(dim)

    def fast(self, mean: Tensor, variance: Tensor) -> Tensor:
        """Evaluate the criterion approximately, which is fast, without gradients.

        The entropy of a threshold uses a polynomial, with an error of at most 1e-7. Criteria
        without a threshold use
        linear interpolation in a table, with an error of at most 4e-5 (entropy with a probit link:
        2e-4), if ``|m| <= 16`` and ``v <= 64``. Outside of that range, or if the link is not
        bounded, the result is that of `__call__`.

        Args:
            mean: ``...`` means of the latent function.
            variance: ``...`` variances.
        """
        if self.needs_threshold:
            z = (mean - self.latent_threshold) * variance.rsqrt()
            if self.criterion != "threshold-entropy":
                return _of_z(self.criterion, z)
            z = z.abs_().clamp_(max=_MAX_Z)
            *lower, last = torch.tensor(_ENTROPY, dtype=z.dtype, device=z.device)
            result = torch.addcmul(lower.pop(), last, z)
            while lower:  # Horner's rule
                torch.addcmul(lower.pop(), result, z, out=result)
            return result.mul_(z.square_().mul_(-0.5).exp_())
        if self.link.base is not None and self.criterion == "variance":
            base = Uncertainty("variance", LINKS[self.link.base])
            return self.link.slope**2 * base.fast(mean, variance)
        if not self.link.probability or self.link.base is not None:
            return self(mean, variance)
        table = _table(self.criterion, self.link.name, mean.dtype, mean.device)
        # Bilinear interpolation of an image: coordinates are in [-1, 1], columns first.
        rows, columns = ((n - 1) * _STEP / 2 for n in table.shape)
        where = torch.broadcast_tensors(
            variance.sqrt() / columns - 1, (mean + _MAX_MEAN) / rows - 1
        )
        values = torch.nn.functional.grid_sample(
            table[None, None],
            torch.stack(where).reshape(2, -1).mT[None, None],  # a view, no copy
            align_corners=True,
            padding_mode="border",
        )
        values = values.reshape(where[0].shape)
        (low, high), most = mean.aminmax(), variance.amax()
        if bool((low < -_MAX_MEAN) | (high > _MAX_MEAN) | (most > _MAX_SD**2)):
            outside = (mean.abs() > _MAX_MEAN) | (variance > _MAX_SD**2)
            mean, variance, outside = torch.broadcast_tensors(mean, variance, outside)
            values[outside] = self(mean[outside], variance[outside])
        return values


def _of_z(criterion: str, z: Tensor) -> Tensor:
    """The criteria with a threshold, at ``z``."""
    if criterion == "misclassification":
        return torch.special.ndtr(-z.abs())
    if criterion == "volume":
        return torch.special.ndtr(z)
    log_p, log_q = torch.special.log_ndtr(z), torch.special.log_ndtr(-z)
    return -(log_p.exp() * log_p + log_q.exp() * log_q)


def _of_moments(criterion: str, first: Tensor, second: Tensor) -> Tensor:
    """The other criteria, given ``E[theta]`` and ``Var[theta]``."""
    if criterion == "variance":
        return second
    p = first.clamp(torch.finfo(first.dtype).tiny, 1 - torch.finfo(first.dtype).eps)
    return -(p * p.log() + (1 - p) * torch.log1p(-p))


def link_moments(link: Link, mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
    r"""Mean and variance of :math:`F(h)` with :math:`h \sim N(m, v)`, by quadrature.

    Args:
        link: The link :math:`F`.
        mean: ``...`` means :math:`m`.
        variance: ``...`` variances :math:`v`.

    Returns:
        Two tensors ``...``. They are summed node by node to save memory.
    """
    nodes, weights = gauss_hermite(NUM_NODES, mean.dtype, mean.device)
    sd = variance.sqrt()
    values = [link.forward(mean + sd * node) for node in nodes]
    first = sum(weight * value for weight, value in zip(weights, values, strict=True))
    second = sum(
        weight * (value - first).square() for weight, value in zip(weights, values, strict=True)
    )
    assert isinstance(first, Tensor)
    assert isinstance(second, Tensor)
    return first, second


def prevalence(likelihood: Likelihood, mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
    r"""Mean and variance of the prevalence (rate, level), given those of the latent function.

    The mean is :math:`E[F(f + \epsilon)]`, not :math:`F(E[f])`, where the variance of
    :math:`\epsilon` is the nugget of the likelihood, if it has one.

    Args:
        likelihood: The likelihood.
        mean: ``...`` means of the latent function.
        variance: ``...`` variances.

    Example:
        >>> import torch
        >>> likelihood = BinomialLikelihood()
        >>> prevalence(likelihood, torch.tensor([-3.0]), torch.tensor([4.0]))[0]
        tensor([0.1296])
    """
    return link_moments(link_of(likelihood), mean, variance + nugget_of(likelihood))


def exceedance(likelihood: Likelihood, threshold: float, mean: Tensor, variance: Tensor) -> Tensor:
    """The probability that the prevalence (rate, level) is above a threshold.

    Args:
        likelihood: The likelihood.
        threshold: The threshold.
        mean: ``...`` means of the latent function.
        variance: ``...`` variances.

    Example:
        >>> import torch
        >>> zero = torch.zeros(1)
        >>> exceedance(BinomialLikelihood(), 0.5, zero, zero + 1)
        tensor([0.5000])
    """
    level = Uncertainty("misclassification", link_of(likelihood), threshold).latent_threshold
    return torch.special.ndtr((mean - level) * (variance + nugget_of(likelihood)).rsqrt())


def _fit_entropy(degree: int = 8) -> list[float]:
    r"""Coefficients of a polynomial :math:`P(|z|)` such that :math:`H(\Phi(z)) = e^{-z^2/2} P`.

    Without that factor the function is smooth and grows slowly. The fit is by weighted least
    squares on Chebyshev nodes in ``0 <= |z| <= 8``; beyond, the entropy is below 1e-13.
    """
    t = 0.5 * _MAX_Z * (1 - np.cos(np.pi * (np.arange(2000) + 0.5) / 2000))
    log_p, log_q = special.log_ndtr(t), special.log_ndtr(-t)
    values = -(np.exp(log_p) * log_p + np.exp(log_q) * log_q)
    weights = np.exp(-0.5 * t**2)
    fit = np.polynomial.Chebyshev.fit(t, values / weights, degree, w=weights)
    return [float(c) for c in fit.convert(kind=np.polynomial.Polynomial).coef]


_ENTROPY = _fit_entropy()


@lru_cache(maxsize=16)
def _table(criterion: str, link: str, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Values on a grid of means and standard deviations."""
    count = round(2 * _MAX_MEAN / _STEP) + 2, round(_MAX_SD / _STEP) + 2
    steps = [torch.arange(n, dtype=torch.float64, device="cpu") * _STEP for n in count]
    mean, sd = (steps[0] - _MAX_MEAN).unsqueeze(-1), steps[1]
    first, second = link_moments(LINKS[link], mean, sd.square())
    return _of_moments(criterion, first, second).to(device, dtype)

"""Likelihoods of counts out of a total (overdispersed or not) and of ordered categories."""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable
from typing import Any

import torch
from gpytorch.constraints import GreaterThan, Interval, Positive
from gpytorch.distributions import MultivariateNormal
from gpytorch.priors import Prior
from torch import Tensor
from torch.distributions import Binomial, Categorical, constraints

from seqgp.dual.linalg import broadcast_shapes
from seqgp.likelihoods.logit_normal_binomial import LogitNormalBinomial, log_prob_and_slope
from seqgp.likelihoods.quadrature import OneDimensionalLikelihood, likelihood_nodes

__all__ = ["BinomialLikelihood", "OrdinalLikelihood", "OverdispersedBinomialLikelihood"]

_NO_BATCH = torch.Size([])
_LOG_CDF: dict[str, Callable[[Tensor], Tensor]] = {
    "logit": torch.nn.functional.logsigmoid,
    "probit": torch.special.log_ndtr,
}


class _QuadratureLikelihood(OneDimensionalLikelihood, ABC):
    """A one-dimensional likelihood with a link, integrated by Gauss-Hermite quadrature.

    Unlike in its base class, `log_marginal` cannot underflow and accepts keyword arguments, and the
    dimension of the nodes is separate from the batch dimensions of the observations.
    """

    batch_shape: torch.Size = _NO_BATCH

    def __init__(self, link: str) -> None:
        super().__init__()
        if link not in _LOG_CDF:
            raise ValueError(f"`link` must be one of {sorted(_LOG_CDF)}, got {link!r}.")
        self.link = link

    def _log_cdf(self, x: Tensor) -> Tensor:
        return _LOG_CDF[self.link](x)

    def _nodes(self, function_dist: MultivariateNormal, shape: torch.Size = _NO_BATCH) -> Tensor:
        """The nodes ``q x ... x n`` of `function_dist`, broadcastable with `shape` ``... x n``."""
        mean, variance = function_dist.mean, function_dist.variance
        dim = len(broadcast_shapes(mean.shape, (*self.batch_shape, 1), shape))
        nodes, _ = likelihood_nodes(self, dim, mean)
        return mean + variance.sqrt() * nodes

    def _weights(self, values: Tensor) -> Tensor:
        """The nodes' weights, ``q x 1 x ... x 1``, for `values` ``q x ...``."""
        return likelihood_nodes(self, values.dim() - 1, values)[1]

    def _log_mean_exp(self, log_values: Tensor) -> Tensor:
        return (log_values + self._weights(log_values).log()).logsumexp(dim=0)

    def _log_probs(self, y: Tensor, f: MultivariateNormal, *args: Any, **kwargs: Any) -> Tensor:
        return self(self._nodes(f, y.shape), *args, **kwargs).log_prob(y)

    def expected_log_prob(
        self, observations: Tensor, function_dist: MultivariateNormal, *args: Any, **kwargs: Any
    ) -> Tensor:
        r""":math:`\mathbb E_{q(f)}[\log p(y \mid f)]`, ``... x n``."""
        log_probs = self._log_probs(observations, function_dist, *args, **kwargs)
        return (log_probs * self._weights(log_probs)).sum(dim=0)

    def log_marginal(
        self, observations: Tensor, function_dist: MultivariateNormal, *args: Any, **kwargs: Any
    ) -> Tensor:
        r""":math:`\log \mathbb E_{q(f)}[p(y \mid f)]`, ``... x n``."""
        if self.has_analytic_marginal:
            return self.marginal(function_dist, *args, **kwargs).log_prob(observations)
        return self._log_mean_exp(self._log_probs(observations, function_dist, *args, **kwargs))


class BinomialLikelihood(_QuadratureLikelihood):
    r"""Counts :math:`y` out of a total :math:`N`, with success probability :math:`F(f)`.

    .. math::
        p(y \mid f) = \binom{N}{y} F(f)^y \, (1 - F(f))^{N - y},

    where :math:`F` is the logistic function (``"logit"``) or the standard normal CDF
    (``"probit"``). The marginal is GPyTorch's Monte-Carlo one: a leading dimension of
    `gpytorch.settings.num_likelihood_samples` conditional distributions.

    Args:
        total_count: The total(s) :math:`N`, an integer or a tensor ``n``. Overridden by the
            keyword `total_count` (``... x n``) of `__call__`, `forward`, `marginal`,
            `expected_log_prob` and `log_marginal`.
        link: ``"logit"`` or ``"probit"``.

    Example:
        >>> likelihood = BinomialLikelihood(total_count=10)
        >>> likelihood(torch.zeros(3)).mean
        tensor([5., 5., 5.])
        >>> likelihood(torch.zeros(3), total_count=torch.tensor([1, 2, 8])).mean
        tensor([0.5000, 1.0000, 4.0000])
    """

    total_count: Tensor | None

    def __init__(self, total_count: int | Tensor | None = None, link: str = "logit") -> None:
        super().__init__(link=link)
        if total_count is not None:
            total_count = torch.as_tensor(total_count, dtype=torch.get_default_dtype()).clone()
            if not constraints.nonnegative_integer.check(total_count).all():
                raise ValueError("`total_count` must consist of non-negative integers.")
        self.register_buffer("total_count", total_count)

    def forward(
        self,
        function_samples: Tensor,
        *args: Any,
        total_count: int | Tensor | None = None,
        **kwargs: Any,
    ) -> Binomial:
        """The distribution of the counts given latent values ``... x n``."""
        f, total_count = function_samples, self.totals(function_samples, total_count)
        logits = f if self.link == "logit" else self._log_cdf(f) - self._log_cdf(-f)
        return Binomial(total_count=total_count, logits=logits)  # which checks both

    def totals(self, f: Tensor, total_count: int | Tensor | None) -> Tensor:
        """The totals of a call, or by default those of the constructor.

        Args:
            f: Latent values, which determine the dtype and device.
            total_count: The totals of the call, if any.
        """
        total_count = self.total_count if total_count is None else total_count
        if total_count is None:
            raise ValueError(
                "`total_count` is missing: give one for all to the likelihood, or "
                "pass total_count= with the observations (to a model's constructor as "
                "likelihood_arguments={'total_count': ...})."
            )
        return torch.as_tensor(total_count, dtype=f.dtype, device=f.device)


class OverdispersedBinomialLikelihood(BinomialLikelihood):
    r"""Counts :math:`y` out of a total :math:`N` that vary more than binomial counts.

    The log odds of each observation differ from the latent function by an independent term:

    .. math::
        y \mid h \sim \operatorname{Binomial}(N, \sigma(h)), \qquad
        h = f + \epsilon, \qquad \epsilon \sim N(0, s^2).

    The nugget :math:`s^2` is learnt. It is the variance between locations with the same inputs.
    Without it, a model of large counts mistakes this variance for signal, and its lengthscales
    become too short. The term :math:`\epsilon` is integrated out (`LogitNormalBinomial`), and the
    likelihood remains log-concave.

    Args:
        total_count: The total(s) :math:`N`, as for `BinomialLikelihood`.
        nugget_prior: Prior of :math:`s^2`.
        nugget_constraint: Constraint of :math:`s^2` (default: greater than 1e-4, initially 0.5).
        batch_shape: The batch shape ``b`` of the nugget.

    Example:
        >>> likelihood = OverdispersedBinomialLikelihood(total_count=10)
        >>> likelihood.nugget = 1.0
        >>> likelihood(torch.zeros(1)).variance.detach()  # that of binomial counts is 2.5
        tensor([6.4041])
    """

    def __init__(
        self,
        total_count: int | Tensor | None = None,
        nugget_prior: Prior | None = None,
        nugget_constraint: Interval | None = None,
        batch_shape: torch.Size = _NO_BATCH,
    ) -> None:
        super().__init__(total_count)
        self.batch_shape = torch.Size(batch_shape)
        self.raw_nugget = torch.nn.Parameter(torch.zeros(*batch_shape, 1))
        constraint = GreaterThan(1e-4, initial_value=0.5)
        self.register_constraint("raw_nugget", nugget_constraint or constraint)
        if nugget_prior is not None:
            self.register_prior(
                "nugget_prior",
                nugget_prior,
                lambda m: m.nugget,
                lambda m, v: m.initialize(nugget=v),
            )

    @property
    def nugget(self) -> Tensor:
        """The variance :math:`s^2` of the log odds around the latent function, ``(b) x 1``."""
        return self.raw_nugget_constraint.transform(self.raw_nugget)

    @nugget.setter
    def nugget(self, value: float | Tensor) -> None:
        value = torch.as_tensor(value, dtype=self.raw_nugget.dtype, device=self.raw_nugget.device)
        self.initialize(raw_nugget=self.raw_nugget_constraint.inverse_transform(value))

    @property
    def conditional(self) -> BinomialLikelihood:
        """The likelihood given the log odds themselves: binomial, with the same totals."""
        likelihood = BinomialLikelihood()
        likelihood.total_count = self.total_count
        return likelihood

    def forward(  # type: ignore[override]
        self,
        function_samples: Tensor,
        *args: Any,
        total_count: int | Tensor | None = None,
        **kwargs: Any,
    ) -> LogitNormalBinomial:
        """The distribution of the counts given latent values ``... x n``."""
        totals = self.totals(function_samples, total_count)
        return LogitNormalBinomial(totals, function_samples, self.nugget)

    def log_marginal(
        self,
        observations: Tensor,
        function_dist: MultivariateNormal,
        *args: Any,
        total_count: int | Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        r""":math:`\log \mathbb E_{q(f)}[p(y \mid f)]`, ``... x n``: the two variances add up."""
        totals = self.totals(function_dist.mean, total_count)
        variance = function_dist.variance + self.nugget
        return log_prob_and_slope(observations, totals, function_dist.mean, variance)[0]


class OrdinalLikelihood(_QuadratureLikelihood):
    r"""Ordered categories :math:`y \in \{0, \dots, K - 1\}`: the cumulative-link model.

    .. math::
        p(y = k \mid f) = F\left(\frac{c_{k+1} - f}{s}\right) - F\left(\frac{c_k - f}{s}\right),
        \qquad -\infty = c_0 < c_1 < \dots < c_{K-1} < c_K = \infty,

    where :math:`F` is the standard normal CDF (``"probit"``) or the logistic function
    (``"logit"``). The cutpoints :math:`c_1, \dots, c_{K-1}` are learned as the first of them
    and the gaps between them, which a constraint keeps positive, so that they stay in order.
    The marginal is a `Categorical`: in closed form for the probit link (:math:`s^2` becomes
    :math:`s^2 + \operatorname{Var} f`), by quadrature for the logit link.

    .. note::
        Neither :math:`s` and a kernel's outputscale nor the cutpoints' location and a constant
        mean are separately identifiable. So :math:`s` is fixed at 1 by default; fix the
        outputscale, or give a prior, before setting `learn_scale`.

    Args:
        num_classes: The number of categories :math:`K \ge 2`.
        link: ``"probit"`` or ``"logit"``.
        batch_shape: The batch shape ``b`` of the parameters.
        learn_scale: Whether :math:`s` is a parameter, rather than a buffer.
        scale_prior: Prior of :math:`s`, if learned.
        scale_constraint: Constraint of :math:`s`, if learned (default: `Positive`, initially 1).
        cutpoints: Initial cutpoints ``(b) x (K - 1)``. By default they make the classes equally
            likely under :math:`f \sim \mathcal N(0, 1)` (approximately so for the logit link).

    Example:
        >>> likelihood = OrdinalLikelihood(num_classes=3, cutpoints=torch.tensor([-1.0, 1.0]))
        >>> likelihood(torch.tensor([0.0, 2.0])).probs.detach()
        tensor([[0.1587, 0.6827, 0.1587],
                [0.0013, 0.1573, 0.8413]])
    """

    def __init__(
        self,
        num_classes: int,
        link: str = "probit",
        batch_shape: torch.Size = _NO_BATCH,
        learn_scale: bool = False,
        scale_prior: Prior | None = None,
        scale_constraint: Interval | None = None,
        cutpoints: Tensor | None = None,
    ) -> None:
        super().__init__(link=link)
        if num_classes < 2:
            raise ValueError(f"`num_classes` must be at least 2, got {num_classes}.")
        if not learn_scale and (scale_prior is not None or scale_constraint is not None):
            raise ValueError("`scale_prior` and `scale_constraint` require `learn_scale=True`.")
        self.num_classes, self.batch_shape = num_classes, torch.Size(batch_shape)
        self.has_analytic_marginal, self.learn_scale = link == "probit", learn_scale
        if learn_scale:
            self.raw_scale = torch.nn.Parameter(torch.zeros(*batch_shape, 1))
            self.register_constraint("raw_scale", scale_constraint or Positive(initial_value=1.0))
        else:
            self.register_buffer("fixed_scale", torch.ones(*batch_shape, 1))
        if scale_prior is not None:
            self.register_prior(
                "scale_prior", scale_prior, lambda m: m.scale, lambda m, v: m.initialize(scale=v)
            )

        self.first_cutpoint = torch.nn.Parameter(torch.zeros(*batch_shape, 1))
        self.raw_gaps = torch.nn.Parameter(torch.zeros(*batch_shape, num_classes - 2))
        self.register_constraint("raw_gaps", Positive())
        if cutpoints is None:
            variance = 1.0 if link == "probit" else 2.89  # of the normal nearest to the logistic
            quantiles = torch.special.ndtri(torch.arange(1, num_classes) / num_classes)
            cutpoints = (quantiles - quantiles.flip(-1)) / 2
            cutpoints = (1 + variance * self.scale.detach() ** 2).sqrt() * cutpoints
        self.cutpoints = cutpoints

    @property
    def scale(self) -> Tensor:
        """The noise scale :math:`s`, ``(b) x 1``."""
        if not self.learn_scale:
            return self.fixed_scale
        return self.raw_scale_constraint.transform(self.raw_scale)

    @scale.setter
    def scale(self, value: float | Tensor) -> None:
        value = torch.as_tensor(value, dtype=self.scale.dtype, device=self.scale.device)
        if not (value > 0).all():
            raise ValueError("`scale` must be positive.")
        if self.learn_scale:
            self.initialize(raw_scale=self.raw_scale_constraint.inverse_transform(value))
        else:
            self.initialize(fixed_scale=value)

    @property
    def cutpoints(self) -> Tensor:
        r"""The cutpoints :math:`c_1 < \dots < c_{K-1}`, ``(b) x (K - 1)``."""
        gaps = self.raw_gaps_constraint.transform(self.raw_gaps)
        return torch.cat([self.first_cutpoint, gaps], dim=-1).cumsum(dim=-1)

    @cutpoints.setter
    def cutpoints(self, value: Tensor) -> None:
        first = self.first_cutpoint
        value = torch.as_tensor(value, dtype=first.dtype, device=first.device)
        if value.shape[-1:] != (self.num_classes - 1,):
            raise ValueError(f"Expected {self.num_classes - 1} cutpoints, got {list(value.shape)}.")
        gaps = value.diff(dim=-1)
        if not (value.isfinite().all() and (gaps > 0).all()):
            raise ValueError("`cutpoints` must be finite and strictly increasing.")
        raw_gaps = self.raw_gaps_constraint.inverse_transform(gaps)
        self.initialize(first_cutpoint=value[..., :1], raw_gaps=raw_gaps)

    def _class_log_probs(self, f: Tensor, scale: Tensor) -> Tensor:
        r"""Log-probabilities ``... x n x K`` at latent values and noise scales ``... x n``.

        An inner class is :math:`\log F(u) + \log(1 - e^{\log F(l) - \log F(u)})`, its interval
        :math:`(l, u)` reflected to the left of 0, where :math:`\log F` keeps its precision.
        """
        z = (self.cutpoints.unsqueeze(-2) - f.unsqueeze(-1)) / scale.unsqueeze(-1)
        flip = z[..., :-1] + z[..., 1:] > 0
        lower = self._log_cdf(torch.where(flip, -z[..., 1:], z[..., :-1]))
        upper = self._log_cdf(torch.where(flip, -z[..., :-1], z[..., 1:]))
        # A gap lost to rounding counts as one of machine precision: no -inf, no nan gradient.
        inner = upper + (lower - upper).clamp(max=-torch.finfo(z.dtype).eps).expm1().neg().log()
        return torch.cat([self._log_cdf(z[..., :1]), inner, self._log_cdf(-z[..., -1:])], dim=-1)

    def forward(self, function_samples: Tensor, *args: Any, **kwargs: Any) -> Categorical:
        """The distribution of the classes given latent values ``... x n``."""
        return Categorical(logits=self._class_log_probs(function_samples, self.scale))

    def marginal(self, function_dist: MultivariateNormal, *args: Any, **kwargs: Any) -> Categorical:
        """The distribution of the classes, the latent values (``... x n``) integrated out."""
        if self.has_analytic_marginal:
            scale = (self.scale**2 + function_dist.variance).sqrt()
            return Categorical(logits=self._class_log_probs(function_dist.mean, scale))
        return Categorical(logits=self._log_mean_exp(self(self._nodes(function_dist)).logits))

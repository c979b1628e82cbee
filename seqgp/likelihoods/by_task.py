"""A likelihood for each task of a model of several tasks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.likelihoods import BetaLikelihood, Likelihood

# GPyTorch's base class of Gaussian likelihoods, which has no public name.
from gpytorch.likelihoods.gaussian_likelihood import _GaussianLikelihoodBase
from linear_operator.operators import DiagLinearOperator
from torch import Tensor
from torch.distributions import Distribution, Normal, constraints

from seqgp.dual.linalg import broadcast_shapes
from seqgp.dual.sites import Expectations
from seqgp.likelihoods.expectations import (
    conditional_log_prob,
    expectations,
    expected_log_prob,
    per_target,
)
from seqgp.likelihoods.predictive import log_predictive
from seqgp.likelihoods.quadrature import OneDimensionalLikelihood
from seqgp.likelihoods.traits import has_one_latent

__all__ = ["GaussianTaskLikelihood", "TaskLikelihood"]


class TaskLikelihood(OneDimensionalLikelihood):
    r"""A separate likelihood for each task: observations of task ``t`` have the ``t``-th one.

    .. math:: p(y_i \mid f_i) = p_{t_i}(y_i \mid f_i).

    The index :math:`t_i` of the task is a per-point argument, ``task=``, ``... x n``.

    Args:
        likelihoods: One for each task, each of one latent function.

    Example:
        >>> from gpytorch.likelihoods import BernoulliLikelihood, PoissonLikelihood
        >>> likelihood = TaskLikelihood([BernoulliLikelihood(), PoissonLikelihood()])
        >>> likelihood(torch.zeros(2), task=torch.tensor([0, 1])).mean
        tensor([0.5000, 0.6931])
    """

    def __init__(self, likelihoods: Sequence[Likelihood]) -> None:
        super().__init__()
        for index, each in enumerate(likelihoods):
            if not isinstance(each, Likelihood) or not has_one_latent(each):
                raise TypeError(
                    f"likelihoods[{index}]: expected a likelihood of one latent function, got "
                    f"{each!r:.50}."
                )
        if not likelihoods:
            raise ValueError("likelihoods: expected at least one, got none.")
        self.likelihoods = torch.nn.ModuleList(likelihoods)

    def forward(
        self, function_samples: Tensor, *args: Any, task: Tensor | None = None, **kwargs: Any
    ) -> TaskDistribution:
        """The distribution of observations given latent values ``... x n``."""
        task = self._checked(task)
        return TaskDistribution(
            [each.forward(function_samples, **kwargs) for each in self.likelihoods],
            task.expand(function_samples.shape),
        )

    def _checked(self, task: Tensor | None) -> Tensor:
        if task is None:
            raise TypeError("task: expected the index of each observation's task, got None.")
        return task

    def each(
        self,
        function: Callable[..., Any],
        targets: Tensor,
        *latents: Tensor,
        task: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """Evaluate a function of a likelihood and its targets, with the likelihood of each task.

        A likelihood is also evaluated for the targets of other tasks, which are replaced by a
        possible value. The results there are not used, but have to be finite, and likewise their
        derivatives.

        Args:
            function: Takes a likelihood, targets, the latents or their moments, and ``kwargs``.
            targets: ``... x n`` targets.
            latents: Tensors that broadcast to it.
            task: ``... x n`` indices of tasks.
            kwargs: Per-point arguments of the likelihoods.
        """
        task, result = self._checked(task), None
        for index, likelihood in enumerate(self.likelihoods):
            mine = task == index
            own = function(
                likelihood, targets.where(mine, _possible(likelihood)), *latents, **kwargs
            )
            if result is None:
                result = own
            elif isinstance(own, Expectations):
                pairs = zip(own, result, strict=True)
                result = Expectations(*(torch.where(mine, a, b) for a, b in pairs))
            else:
                result = torch.where(mine, own, result)
        return result


class _WithNoiseOfItsOwn(_GaussianLikelihoodBase):
    """A Gaussian likelihood with a noise model that replaces that of its base class."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        Likelihood.__init__(self)


class GaussianTaskLikelihood(TaskLikelihood, _WithNoiseOfItsOwn):
    r"""A `TaskLikelihood` of tasks that are all Gaussian, each with its own noise.

    It takes the place of `gpytorch.likelihoods.HadamardGaussianLikelihood`: objectives for exact
    GPs know that it is Gaussian.

    Args:
        likelihoods: A `GaussianLikelihood` for each task.

    Example:
        >>> from gpytorch.likelihoods import GaussianLikelihood
        >>> likelihood = GaussianTaskLikelihood([GaussianLikelihood(), GaussianLikelihood()])
        >>> likelihood.noise = torch.tensor([0.25, 4.0])
        >>> likelihood(torch.zeros(2), task=torch.tensor([1, 0])).stddev.detach()
        tensor([2.0000, 0.5000])
    """

    has_analytic_marginal = True

    @property
    def noise(self) -> Tensor:
        """The noise variances of the tasks, ``t``."""
        parts: list[Any] = list(self.likelihoods)
        return torch.cat([each.noise.reshape(1) for each in parts])

    @noise.setter
    def noise(self, value: Tensor) -> None:
        parts: list[Any] = list(self.likelihoods)
        for each, own in zip(parts, value.expand(len(parts)), strict=True):
            each.noise = own

    def _shaped_noise_covar(
        self, base_shape: torch.Size, *params: Any, **kwargs: Any
    ) -> DiagLinearOperator:
        noise = self.noise[self._checked(kwargs.get("task"))]
        return DiagLinearOperator(noise.expand(base_shape))

    def forward(  # type: ignore[override]
        self, function_samples: Tensor, *args: Any, task: Tensor | None = None, **kwargs: Any
    ) -> Normal:
        """The distribution of observations given latent values ``... x n``."""
        normal: Normal = _GaussianLikelihoodBase.forward(
            self, function_samples, task=task, **kwargs
        )
        return normal

    def marginal(
        self, function_dist: MultivariateNormal, *args: Any, **kwargs: Any
    ) -> MultivariateNormal:
        """Return the distribution of observations.

        Args:
            function_dist: That of the latent function. In train mode, a model has said there which
                task each of its inputs belongs to.
            args: Not used.
            kwargs: ``task``.
        """
        kwargs = {**getattr(function_dist, "arguments", {}), **kwargs}
        return _GaussianLikelihoodBase.marginal(self, function_dist, **kwargs)

    def log_marginal(
        self, observations: Tensor, function_dist: MultivariateNormal, *args: Any, **kwargs: Any
    ) -> Tensor:
        """Log densities, ``... x n``; arguments are those of `marginal`."""
        return _GaussianLikelihoodBase.log_marginal(self, observations, function_dist, **kwargs)

    def expected_log_prob(
        self, observations: Tensor, function_dist: MultivariateNormal, *args: Any, **kwargs: Any
    ) -> Tensor:
        """In closed form, ``... x n``; arguments are those of `marginal`."""
        kwargs = {**getattr(function_dist, "arguments", {}), **kwargs}
        return _GaussianLikelihoodBase.expected_log_prob(
            self, observations, function_dist, **kwargs
        )


class TaskDistribution(Distribution):
    """Observations of several tasks, where each task has its own distribution.

    Args:
        distributions: One for each task, with batch shapes ``... x n``.
        task: ``... x n`` indices of tasks.
    """

    def __init__(self, distributions: Sequence[Distribution], task: Tensor) -> None:
        super().__init__(task.shape, validate_args=False)
        self.distributions, self.task = list(distributions), task

    def chosen(self, function: Callable[[Distribution], Tensor]) -> Tensor:
        """Evaluate a function of a distribution for the task of each observation."""
        result = function(self.distributions[0])
        for index, each in enumerate(self.distributions[1:], 1):
            result = torch.where(self.task == index, function(each).to(result), result)
        return result

    @property
    def support(self) -> constraints.Constraint:
        """The possible observations of each task."""
        return _Support(self)

    @property
    def mean(self) -> Tensor:
        """``... x n``."""
        return self.chosen(lambda each: each.mean)

    @property
    def variance(self) -> Tensor:
        """``... x n``."""
        return self.chosen(lambda each: each.variance)

    def log_prob(self, value: Tensor) -> Tensor:
        """``... x n``."""
        return self.chosen(lambda each: each.log_prob(value))


class _Support(constraints.Constraint):
    def __init__(self, distribution: TaskDistribution) -> None:
        self.distribution = distribution
        self.is_discrete = False
        super().__init__()

    def check(self, value: Tensor) -> Tensor:
        """Whether each value is possible for its task."""

        def possible(each: Distribution) -> Tensor:
            support: Any = each.support
            return support.check(value)

        return self.distribution.chosen(possible)

    def __repr__(self) -> str:
        return "the likelihood of their task"


def _possible(likelihood: Likelihood) -> float:
    """Return a possible target of a likelihood."""
    return 0.5 if isinstance(likelihood, BetaLikelihood) else 1.0


@expectations.register(TaskLikelihood)
def _expectations(
    likelihood: TaskLikelihood, targets: Tensor, mean: Tensor, variance: Tensor, **kwargs: Any
) -> Expectations:
    mean, variance = per_target(likelihood, targets, mean, variance)
    result = likelihood.each(expectations, targets, mean, variance, **kwargs)
    # Precisions of Gaussian observations may have fewer batch dimensions than their targets.
    shape = broadcast_shapes(targets.shape, mean.shape)
    return Expectations(*(each.expand(broadcast_shapes(each.shape, shape)) for each in result))


@expected_log_prob.register(TaskLikelihood)
def _expected_log_prob(
    likelihood: TaskLikelihood, targets: Tensor, mean: Tensor, variance: Tensor, **kwargs: Any
) -> Tensor:
    return likelihood.each(expected_log_prob, targets, mean, variance, **kwargs)


@log_predictive.register(TaskLikelihood)
def _log_predictive(
    likelihood: TaskLikelihood, targets: Tensor, mean: Tensor, variance: Tensor, **kwargs: Any
) -> Tensor:
    return likelihood.each(log_predictive, targets, mean, variance, **kwargs)


@conditional_log_prob.register(TaskLikelihood)
def _conditional_log_prob(
    likelihood: TaskLikelihood, targets: Tensor, samples: Tensor, **kwargs: Any
) -> Tensor:
    return likelihood.each(conditional_log_prob, targets, samples, **kwargs)

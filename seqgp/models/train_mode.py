"""The distribution that a model returns in train mode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gpytorch.distributions import MultivariateNormal
from linear_operator import LinearOperator
from linear_operator.operators import DiagLinearOperator
from torch import Tensor

Prior = Callable[[], MultivariateNormal]


class TrainingMarginals(MultivariateNormal):
    r"""The posterior at training inputs, for bounds, whose targets have the prior's density.

    Objectives for sparse GPs ask for :math:`q(f_i)`, so that is what mean and variance are. In
    train mode an exact GP returns its prior, whose density of the targets,
    :math:`\log N(y; m, K + \Sigma)`, is the marginal likelihood. Objectives for exact GPs apply the
    likelihood, which adds the noise :math:`\Sigma`, and ask for that density: here they get the
    same. The density under the posterior is nothing to maximise. Nor is anything else that needs
    the joint distribution of the targets, which raises.

    Args:
        mean: ``... x n`` posterior means.
        covariance: ``... x n x n``, diagonal, the `TrainingVariances` or their sum with the noise.
    """

    def __init__(self, mean: Tensor, covariance: LinearOperator, **kwargs: Any) -> None:
        super().__init__(mean, covariance, **kwargs)
        self.variances = covariance

    @classmethod
    def of(cls, f: MultivariateNormal, prior: Prior | None) -> MultivariateNormal:
        """The same distribution; of several latents, none of whose targets are Gaussian, itself.

        Args:
            f: The posterior marginals at training inputs.
            prior: The prior there; ``None`` if it is not the prior of all that was observed.
        """
        if type(f) is not MultivariateNormal:
            return f
        covariance = f.lazy_covariance_matrix
        if not isinstance(covariance, DiagLinearOperator):
            return cls(f.mean, covariance)
        return cls(f.mean, TrainingVariances(f.variance, prior=prior))

    @property
    def lazy_covariance_matrix(self) -> LinearOperator:
        """The posterior variances; raises if this is the distribution of noisy targets."""
        if isinstance(self.variances, TrainingVariances) and self.variances.noise is not None:
            raise _refusal("lazy_covariance_matrix")
        return self.variances

    @property
    def variance(self) -> Tensor:
        """``... x n`` posterior variances."""
        return self.variances.diagonal(dim1=-1, dim2=-2).expand(self.loc.shape)

    def log_prob(self, value: Tensor) -> Tensor:
        """The log density of all targets under the prior, ``...``; raises without their noise.

        Args:
            value: ``... x n`` targets.
        """
        own = self.variances
        if not isinstance(own, TrainingVariances) or own.prior is None or own.noise is None:
            raise _refusal("log_prob")
        prior = own.prior()
        covariance = prior.lazy_covariance_matrix + own.noise
        return MultivariateNormal(prior.mean, covariance).log_prob(value)


class TrainingVariances(DiagLinearOperator):
    """Posterior variances, which remember the prior, and the noise that is added to them.

    Args:
        diag: ``... x n`` variances.
        prior: The prior at the same inputs.
        noise: ``... x n x n``, that of the targets, if it is part of the variances.
    """

    def __init__(
        self, diag: Tensor, prior: Prior | None = None, noise: LinearOperator | None = None
    ) -> None:
        super().__init__(diag)
        self.prior, self.noise = prior, noise

    def __add__(self, other: Any) -> LinearOperator:
        """With noise, which is known to be such by being diagonal."""
        if not isinstance(other, DiagLinearOperator) or self.noise is not None:
            return super().__add__(other)
        diagonal = self._diag + other.diagonal(dim1=-1, dim2=-2)
        return TrainingVariances(diagonal, self.prior, other)


def _refusal(name: str) -> RuntimeError:
    return RuntimeError(
        f"{name}: in train mode a SequentialGP returns its posterior, under which its own targets "
        "are not to be scored. Of objectives for exact GPs, ExactMarginalLogLikelihood works, as "
        "long as the model holds all that it has learnt. DualELBO(model.likelihood, model) always "
        "does, and botorch.fit.fit_gpytorch_mll takes either."
    )

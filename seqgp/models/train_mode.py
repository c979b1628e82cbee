"""What a model returns in train mode."""

from __future__ import annotations

from gpytorch.distributions import MultivariateNormal
from torch import Tensor


class TrainingMarginals(MultivariateNormal):
    """The posterior at training inputs, for bounds; it refuses to score the targets.

    In train mode an exact GP returns its prior, whose density of the targets is the marginal
    likelihood. The density of the targets under the posterior is not: to maximise it is to overfit.
    """

    @classmethod
    def of(cls, f: MultivariateNormal) -> MultivariateNormal:
        """The same distribution; of several latents, none of whose targets are Gaussian, itself.

        Args:
            f: The distribution.
        """
        if type(f) is not MultivariateNormal:
            return f
        return cls(f.mean, f.lazy_covariance_matrix)

    def log_prob(self, value: Tensor) -> Tensor:
        """Raises, since a loss that gets here is that of an exact GP."""
        raise RuntimeError(
            "log_prob: in train mode a SequentialGP returns its posterior, under which its own "
            "targets are not to be scored, as ExactMarginalLogLikelihood does. Use "
            "DualELBO(model.likelihood, model) as the loss, or botorch.fit.fit_gpytorch_mll, which "
            "takes either."
        )

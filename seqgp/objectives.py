"""Objectives for hyperparameters."""

from __future__ import annotations

from typing import Any

from gpytorch.distributions import MultivariateNormal
from gpytorch.likelihoods import Likelihood
from gpytorch.mlls._approximate_mll import _ApproximateMarginalLogLikelihood
from gpytorch.models import ApproximateGP
from torch import Tensor

from seqgp.dual.sites import expected_log_prob


class DualELBO(_ApproximateMarginalLogLikelihood):
    r"""The evidence lower bound as a function of the hyperparameters, with the sites held fixed.

    .. math::
        \mathcal{L}(\theta) = \sum_i E_{q(f_i; \theta)}[\log p(y_i | f_i)]
            - \mathrm{KL}[q(u; \theta) \| p_\theta(u)], \qquad
        q(u; \theta) \propto p_\theta(u) \, t(u)

    The value is that of `gpytorch.mlls.VariationalELBO`; the difference is what stays fixed when
    :math:`\theta` moves. A `VariationalStrategy` holds its (whitened) mean and covariance fixed.
    A `DualVariationalStrategy` holds the sites :math:`t(u)` fixed and lets the posterior follow
    the prior, so that the bound stays tight over longer steps. When the sites have converged, the
    gradient is that of the bound maximised over q (for a Gaussian likelihood, Titsias' collapsed
    bound). Alternate it with `DualVariationalStrategy.converge` or `natural_gradient_step`.

    Expectations are deterministic for every likelihood, also for those of several latents, for
    which GPyTorch would draw samples.

    Args:
        likelihood: The likelihood.
        model: A model whose variational strategy is a `DualVariationalStrategy`.
        num_data: The total number of observations, if the bound is evaluated on minibatches; by
            default the number of targets given.
        beta: Factor of the KL term.
        combine_terms: Whether to return the sum, or its terms.

    Example:
        >>> import torch, gpytorch
        >>> from seqgp import DualELBO, DualVariationalStrategy
        >>> class GP(gpytorch.models.ApproximateGP):
        ...     def __init__(self, Z):
        ...         super().__init__(DualVariationalStrategy(self, Z))
        ...         self.mean_module = gpytorch.means.ConstantMean()
        ...         self.covar_module = gpytorch.kernels.RBFKernel()
        ...     def forward(self, x):
        ...         return gpytorch.distributions.MultivariateNormal(
        ...             self.mean_module(x), self.covar_module(x))
        >>> x = torch.linspace(0, 1, 20).unsqueeze(-1)
        >>> y = (x.squeeze(-1) > 0.5).to(x)
        >>> model, likelihood = GP(x[::4]), gpytorch.likelihoods.BernoulliLikelihood()
        >>> mll = DualELBO(likelihood, model)
        >>> info = model.variational_strategy.converge(x, y, likelihood)
        >>> loss = -mll(model(x), y)
        >>> loss.backward()
        >>> bool(model.covar_module.raw_lengthscale.grad.norm() > 0)
        True
    """

    def __init__(
        self,
        likelihood: Likelihood,
        model: ApproximateGP,
        num_data: int | None = None,
        beta: float = 1.0,
        combine_terms: bool = True,
    ) -> None:
        self.num_data: int | None
        super().__init__(likelihood, model, num_data, beta, combine_terms)

    def forward(
        self, approximate_dist_f: MultivariateNormal, target: Tensor, **kwargs: Any
    ) -> Tensor | tuple[Tensor, ...]:
        """The bound divided by the number of observations.

        Args:
            approximate_dist_f: ``q(f)`` at the ``n`` inputs, as the model returns it.
            target: ``... x n`` targets.
            kwargs: Per-point arguments of the likelihood.

        Returns:
            A tensor of the batch shape of model and data.
        """
        given: int | None = self.num_data
        self.num_data = given or approximate_dist_f.event_shape[0]
        try:
            return super().forward(approximate_dist_f, target, **kwargs)
        finally:
            self.num_data = given

    def _log_likelihood_term(
        self, approximate_dist_f: MultivariateNormal, target: Tensor, **kwargs: Any
    ) -> Tensor:
        mean, variance = approximate_dist_f.mean, approximate_dist_f.variance
        return expected_log_prob(self.likelihood, target, mean, variance, **kwargs).sum(-1)

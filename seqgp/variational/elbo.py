"""Objectives for hyperparameters."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.likelihoods import Likelihood
from gpytorch.mlls._approximate_mll import _ApproximateMarginalLogLikelihood
from gpytorch.models import ApproximateGP
from torch import Tensor

from seqgp.distributed import ALONE, Ranks
from seqgp.likelihoods.expectations import expected_log_prob
from seqgp.variational.state import fixed_sites


class DualELBO(_ApproximateMarginalLogLikelihood):
    r"""The evidence lower bound as a function of the hyperparameters, with the sites held fixed.

    .. math::
        \mathcal{L}(\theta) = \sum_i E_{q(f_i; \theta)}[\log p(y_i | f_i)]
            - \mathrm{KL}[q(u; \theta) \| p_\theta(u)], \qquad
        q(u; \theta) \propto p_\theta(u) \, t(u)

    Its value is that of `gpytorch.mlls.VariationalELBO`, but its gradient is not. A
    `VariationalStrategy` holds its (whitened) mean and covariance fixed when :math:`\theta`
    changes. A `DualVariationalStrategy` holds the pseudo-likelihood :math:`t(u)` fixed, and the
    posterior follows the prior, so that the bound remains tight over longer steps. Once the
    posterior has converged, the gradient is that of the bound maximised over q (for a Gaussian
    likelihood, Titsias' collapsed bound). Alternate it with `DualVariationalStrategy.converge` or
    `natural_gradient_step`. In a training loop with `DualNGD`, it is the same as GPyTorch's.

    Expectations are deterministic for every likelihood, including those with several latents, for
    which GPyTorch draws samples.

    Args:
        likelihood: The likelihood.
        model: A model whose variational strategy is a `DualVariationalStrategy`.
        num_data: The total number of observations, if the bound is evaluated on minibatches; by
            default the model's ``num_data`` if it has one, else the number of targets given.
        beta: The factor of the KL term.
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
        if not hasattr(getattr(model, "variational_strategy", None), "kl_divergence"):
            raise TypeError(
                "model: expected one with a DualVariationalStrategy, such as a SequentialGP, got a "
                f"{type(model).__name__}; exact models have gpytorch's ExactMarginalLogLikelihood."
            )
        self.num_data: int | None
        num_data = num_data or getattr(model, "num_data", None)
        super().__init__(likelihood, model, num_data, beta, combine_terms)

    def forward(
        self, approximate_dist_f: MultivariateNormal, target: Tensor, **kwargs: Any
    ) -> Tensor | tuple[Tensor, ...]:
        """Return the bound divided by the number of observations.

        Args:
            approximate_dist_f: ``q(f)`` at the ``n`` inputs, as the model returns it.
            target: ``... x n`` targets.
            kwargs: Per-point arguments of the likelihood, except for those that a model takes from
                its inputs.

        Returns:
            A tensor of the batch shape of model and data.
        """
        ranks: Ranks = getattr(self.model.variational_strategy, "ranks", ALONE)
        n = ranks.total(approximate_dist_f.event_shape[0])
        num_data = self.num_data or n
        log_likelihood = self._log_likelihood_term(approximate_dist_f, target, **kwargs) / n
        log_likelihood = ranks.totalled(log_likelihood)
        with fixed_sites():
            kl = self.model.variational_strategy.kl_divergence() * (self.beta / num_data)
        kl = ranks.shared(kl)
        log_prior = ranks.shared(self._log_prior(log_likelihood) / num_data)
        added = self._added(ranks)
        if not self.combine_terms:
            terms = [torch.stack(added).sum(0)] if added else []
            return (log_likelihood, kl, log_prior, *terms)
        return log_likelihood - kl + log_prior - sum(added)

    def with_priors(self, bound: Tensor, num_data: int) -> Tensor:
        """Return a bound over all data plus the log priors, per observation.

        Args:
            bound: A tensor of the batch shape of model and data.
            num_data: The number of observations.
        """
        ranks: Ranks = getattr(self.model.variational_strategy, "ranks", ALONE)
        added = sum(self._added(ranks))
        return (bound + ranks.shared(self._log_prior(bound))) / num_data - added

    def _added(self, ranks: Ranks) -> list[Tensor]:
        """Return the added loss terms of the model's modules."""
        return [ranks.shared(term.loss()) for term in self.model.added_loss_terms()]

    def _log_prior(self, like: Tensor) -> Tensor:
        """Return log priors. Unlike in GPyTorch, each counts once, for the model it belongs to."""
        log_prior = torch.zeros_like(like)
        for _, module, prior, closure, _ in self.named_priors():
            term = prior.log_prob(closure(module))
            # Parameters of a batch of models have its shape in front; others are shared.
            batched = term.shape[: like.dim()] == like.shape and getattr(
                module, "batch_shape", True
            )
            term = term.reshape(*like.shape, -1).sum(-1) if batched else term.sum()
            log_prior = log_prior + term
        return log_prior

    def named_priors(self) -> Iterator[tuple[str, Any, Any, Any, Any]]:
        """Yield priors as GPyTorch does, but those of the model's own likelihood only once."""
        seen = set()
        for name, module, prior, closure, setting_closure in super().named_priors():
            key = (id(module), name.rpartition(".")[2])
            if key not in seen:
                seen.add(key)
                yield name, module, prior, closure, setting_closure

    def _log_likelihood_term(
        self, approximate_dist_f: MultivariateNormal, target: Tensor, **kwargs: Any
    ) -> Tensor:
        mean, variance = approximate_dist_f.mean, approximate_dist_f.variance
        kwargs = {**getattr(approximate_dist_f, "arguments", {}), **kwargs}
        return expected_log_prob(self.likelihood, target, mean, variance, **kwargs).sum(-1)

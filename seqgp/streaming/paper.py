r"""The update rule of the paper, for comparison: fixed duals, and a growing, weighted memory.

One update (Chang et al., 2023, Algorithm 1), with duals :math:`\lambda = \sum_i k_{zi} \lambda_i`
and :math:`B = \sum_i k_{zi} \beta_i k_{zi}^T` of all data so far:

1. if requested, inducing points by pivoted Cholesky of old ones and new inputs, and
   :math:`\lambda \leftarrow P \lambda`, :math:`B \leftarrow P B P^T`,
   :math:`P = K_{z'z} K_{zz}^{-1}`;
2. the memory's contribution under the present posterior is subtracted;
3. natural-gradient steps :math:`(\lambda, B) \leftarrow (1 - \rho) (\lambda, B) + \rho
   [(\lambda, B)_{\setminus M} + \sum_{new, M} \dots]`;
4. Adam on :math:`\sum_{new} E_q \log p(y_i | f_i) + \frac{n_{old}}{n_M} \sum_M E_q \log p(y_i |
   f_i) - \mathrm{KL}`, with fixed :math:`\lambda` and :math:`B`, so that the pseudo-data that they
   represent change with the hyperparameters;
5. some of the new points, drawn by leverage, join the memory.

``PaperRule(removes_memory=False)`` omits step 2, as the authors do for split MNIST. If classes come
and go, the memory's sites under the present posterior are not those that its points were added
with, and there may be no posterior after subtracting them. The memory then counts again at each
update.
"""

from __future__ import annotations

import torch
from linear_operator import to_dense
from torch import Tensor

from seqgp.dual import (
    Duals,
    Summary,
    add,
    factorise,
    kl_divergence,
    natural_gradient_step,
    posterior_mean,
    posterior_variance,
    scaled_cholesky,
    solve_lower,
    tie,
)
from seqgp.likelihoods.expectations import expected_log_prob
from seqgp.likelihoods.traits import is_conjugate, precision_floor, summary_noise
from seqgp.observations import Observations
from seqgp.streaming.inducing_points import InducingPointRule, Keep
from seqgp.streaming.learning import learnable
from seqgp.streaming.memory import MemoryOptions
from seqgp.streaming.model import StreamModel
from seqgp.streaming.options import UpdateOptions
from seqgp.streaming.rules import Batch, Learned, Plan, UpdateRule
from seqgp.variational.optimise import adam, shared_loss

#: Step size and number of natural-gradient steps, for Gaussian and for other likelihoods.
NATURAL_GRADIENT_STEPS = {True: (0.8, 2), False: (0.5, 4)}


class PaperRule(UpdateRule):
    """The paper's update rule, which includes Adam.

    Args:
        removes_memory: Whether the memory's contribution is subtracted first (step 2).
    """

    name = "paper"
    follows_scale = False

    def __init__(self, removes_memory: bool = True) -> None:
        self.removes_memory = removes_memory

    def check(self, model: StreamModel, options: UpdateOptions, memory: MemoryOptions) -> None:
        """Raise for a discount and for replay, which the paper's rule does not support."""
        if options.discount != 1:
            raise ValueError('discount: not supported with mode="paper".')
        if memory.replay:
            raise ValueError('replay: not supported with mode="paper"; pass replay=0.')

    def learns_by_default(self, learn: bool | None) -> bool | None:
        """Learn at every update, unless the user decides otherwise."""
        return True if learn is None else learn

    def default_inducing(self, may_change: bool, moves: bool) -> InducingPointRule:
        """Optimise the inducing points by gradient if hyperparameters are learnt."""
        return Keep(moves=may_change)

    def learn(
        self, model: StreamModel, batch: Batch, options: UpdateOptions, plan: Plan
    ) -> Learned:
        """Run steps 2 to 4."""
        natural_gradient(model, batch.data, batch.num_old if self.removes_memory else 0)
        mll, parameters, bounds = learnable(model, plan.moves_Z and plan.decision.learn)
        strategy = model.variational_strategy
        tied = Duals(strategy.lam.detach(), strategy.B.detach())
        weights, num_old = tied.lam.new_ones(len(batch.data)), strategy.ranks.total(batch.num_old)
        if num_old:
            weights[: batch.num_old] = model.stream.num_seen / num_old
        steps = 100 if options.steps is None else options.steps
        steps = steps if plan.decision.learn and parameters else 0

        def loss() -> Tensor:
            # Transform again each time: the input transform may change.
            data = model.transformed(model.stream.observations)
            bound, _ = weighted_bound(model, data, tied, weights)
            return -mll.with_priors(bound, 1).sum()

        training = model.training
        model.train()
        whole = shared_loss(loss, parameters, strategy.ranks)
        with torch.enable_grad():
            for _ in adam([whole] * steps, parameters, bounds, options.learning_rate):
                pass
        with torch.no_grad():
            data = model.transformed(model.stream.observations)
            bound, duals = weighted_bound(model, data, tied, weights)
            strategy.store(duals, strategy.state())
        model.train(training)
        return Learned(steps, bound)

    @torch.no_grad()
    def remember(
        self, model: StreamModel, batch: Batch, kept: Tensor, options: UpdateOptions
    ) -> None:
        """Run step 5: reduce the data to the memory, and store the other duals separately."""
        strategy = model.variational_strategy
        num_gone = strategy.ranks.total(len(batch.data) - len(kept))
        model.stream = model.stream.select(kept)
        data = batch.data.select(kept)
        state = strategy.state()
        rest = state.duals
        if model.stream.num_held:
            rest = _without(rest, _contribution(model, data))
        noise = summary_noise(model.likelihood)
        if noise is not None:
            rest = Duals(rest.lam * noise, rest.B * noise.unsqueeze(-1))
        number = strategy.summary_count + num_gone
        zero = torch.zeros_like(rest.lam[..., 0])
        summary = Summary(rest, zero, number.expand(rest.lam.shape[:-1]))
        strategy.store(state.duals, state, summary=summary)


def _without(duals: Duals, part: Duals) -> Duals:
    return add(duals, Duals(-part.lam, -part.B))


def _contribution(model: StreamModel, data: Observations) -> Duals:
    """Return the duals of observations with their sites under the present posterior."""
    strategy = model.variational_strategy
    sites, _ = strategy.sites(data, likelihood=model.likelihood)
    own = tie(strategy.batch(strategy.state(), data, model.likelihood).A, sites)
    return Duals(*strategy.ranks.sum(*own))


@torch.no_grad()
def natural_gradient(model: StreamModel, data: Observations, num_removed: int) -> None:
    """Run steps 2 and 3.

    Args:
        model: The model.
        data: Memory and new observations.
        num_removed: The number of observations, from the first one, to subtract first.
    """
    strategy, likelihood = model.variational_strategy, model.likelihood
    state = strategy.state()
    duals, rest = state.duals, state.duals
    if strategy.ranks.total(num_removed):
        rest = _without(duals, _contribution(model, data.select(slice(num_removed))))
    rho, number = NATURAL_GRADIENT_STEPS[is_conjugate(likelihood)]
    batches = strategy.batches(state, data, likelihood)
    for _ in range(number):
        duals, _ = natural_gradient_step(
            duals,
            batches(),
            rho,
            rest,
            latent_dims=strategy.latent_dims,
            min_precision=precision_floor(likelihood),
            ranks=strategy.ranks,
        )
    strategy.store(duals, state)


def weighted_bound(
    model: StreamModel, data: Observations, tied: Duals, weights: Tensor
) -> tuple[Tensor, Duals]:
    """Return the objective of step 4, and the tied duals in the present whitened basis.

    Args:
        model: The model.
        data: Its observations.
        tied: ``lam`` and ``B``, which stay fixed.
        weights: ``n`` weights of the observations.
    """
    strategy = model.variational_strategy
    prior = strategy.prior_at(strategy.inducing_points)
    chol = scaled_cholesky(to_dense(prior.lazy_covariance_matrix), strategy.jitter_val)
    half = solve_lower(chol, tied.B)
    duals = Duals(
        solve_lower(chol, tied.lam.unsqueeze(-1)).squeeze(-1), solve_lower(chol, half.mT).mT
    )
    factors = factorise(duals)
    batch = strategy.whitened(chol, prior.batch_shape.numel() == 1, data)
    mean = batch.prior_mean + posterior_mean(batch.A, factors)
    variance = posterior_variance(batch.A, batch.unexplained, factors)
    kl = kl_divergence(factors)
    if strategy.latent_dims:
        mean, variance, kl = mean.mT, variance.mT, kl.sum(-1)
    fit = expected_log_prob(model.likelihood, data.targets, mean, variance, **data.arguments)
    ranks = strategy.ranks
    return ranks.totalled((weights * fit).sum(-1)) - ranks.shared(kl), duals

r"""The rule of the paper, for comparison: tied duals held, memory weighted, memory growing.

One update (Chang et al., 2023, Algorithm 1), with duals :math:`\lambda = \sum_i k_{zi} \lambda_i`
and :math:`B = \sum_i k_{zi} \beta_i k_{zi}^T` of all data so far:

1. inducing points by pivoted Cholesky of old ones and new inputs, if asked for, and
   :math:`\lambda \leftarrow P \lambda`, :math:`B \leftarrow P B P^T`,
   :math:`P = K_{z'z} K_{zz}^{-1}`;
2. the memory's contribution under the present posterior is taken out;
3. natural-gradient steps :math:`(\lambda, B) \leftarrow (1 - \rho) (\lambda, B) + \rho
   [(\lambda, B)_{\setminus M} + \sum_{new, M} \dots]`;
4. Adam on :math:`\sum_{new} E_q \log p(y_i | f_i) + \frac{n_{old}}{n_M} \sum_M E_q \log p(y_i |
   f_i) - \mathrm{KL}`, with :math:`\lambda` and :math:`B` themselves held fixed, so that the
   pseudo-data that they stand for change along with the hyperparameters;
5. some of the new points, drawn by leverage, join the memory.

Step 2 is left out if the model's ``paper_removes_memory`` is false, as the authors do for split
MNIST: with classes that come and go the memory's sites under the present posterior are not those
that its points came with, and without them there may be no posterior. The memory then counts anew
at each update.
"""

from __future__ import annotations

from typing import Any

import torch
from botorch.optim.utils import get_parameters_and_bounds
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
from seqgp.models.fit import clamp_to_bounds
from seqgp.variational.elbo import DualELBO
from seqgp.variational.strategy import DualVariationalStrategy

#: Step size and number of natural-gradient steps, for Gaussian likelihoods and for others.
NATURAL_GRADIENT_STEPS = {True: (0.8, 2), False: (0.5, 4)}


def paper_step(
    model: Any, num_old: int, learn: bool, steps: int, learning_rate: float, learn_inducing: bool
) -> tuple[int, Tensor]:
    """Steps 2 to 4, for a model whose training data are memory and new observations.

    Args:
        model: A `SequentialGP`.
        num_old: How many of its training data, the first ones, are the memory.
        learn: Whether to learn hyperparameters.
        steps: Of Adam.
        learning_rate: Adam's.
        learn_inducing: Whether Adam moves the inducing points, too.

    Returns:
        The number of Adam's steps, and the objective at the end.
    """
    natural_gradient(model, num_old)
    mll = DualELBO(model.likelihood, model)
    parameters, bounds = get_parameters_and_bounds(
        mll,
        name_filter=None if learn_inducing else lambda name: "inducing_points" not in name,
        requires_grad=True,
    )
    strategy: DualVariationalStrategy = model.variational_strategy
    tied = Duals(strategy.lam.detach(), strategy.B.detach())
    weights = tied.lam.new_ones(model.num_data)
    if num_old:
        weights[:num_old] = model.num_seen / num_old
    steps = steps if learn and parameters else 0
    training = model.training
    model.train()
    if steps:
        adam = torch.optim.Adam(list(parameters.values()), lr=learning_rate)
    for _ in range(steps):
        adam.zero_grad()
        bound, _ = weighted_bound(model, tied, weights)
        (-mll.with_priors(bound, 1).sum()).backward()
        adam.step()
        clamp_to_bounds(parameters, bounds)
    with torch.no_grad():
        bound, duals = weighted_bound(model, tied, weights)
        strategy._store(duals, strategy.state())
    model.train(training)
    return steps, bound


@torch.no_grad()
def remember(model: Any, kept: Tensor) -> None:
    """Step 5: reduce the training data to the memory, and keep the rest of the duals apart."""
    strategy: DualVariationalStrategy = model.variational_strategy
    num_data = model.num_data
    model._select(kept)
    X, Y, arguments = model.training_data()
    data = strategy._check_data(X, Y, model.likelihood, arguments)
    state = strategy.state()
    rest = state.duals
    if len(kept):
        sites, _ = strategy.sites(X, Y, model.likelihood, **arguments)
        rest = _without(rest, tie(strategy._batch(state.chol, state.shared, data).A, sites))
    noise = summary_noise(model.likelihood)
    if noise is not None:
        rest = Duals(rest.lam * noise, rest.B * noise.unsqueeze(-1))
    number = strategy.summary_count + (num_data - len(kept))
    summary = Summary(rest, torch.zeros_like(rest.lam[..., 0]), number.expand(rest.lam.shape[:-1]))
    strategy._store(state.duals, state, summary=summary)


def _without(duals: Duals, part: Duals) -> Duals:
    return add(duals, Duals(-part.lam, -part.B))


@torch.no_grad()
def natural_gradient(model: Any, num_old: int) -> None:
    """Steps 2 and 3."""
    strategy: DualVariationalStrategy = model.variational_strategy
    X, Y, arguments = model.training_data()
    data = strategy._check_data(X, Y, model.likelihood, arguments)
    state = strategy.state()
    duals, rest = state.duals, state.duals
    if num_old and model.paper_removes_memory:
        memory = data.select(torch.arange(num_old, device=X.device))
        sites, _ = strategy.sites(
            memory.inputs, memory.targets, model.likelihood, **memory.arguments
        )
        rest = _without(duals, tie(strategy._batch(state.chol, state.shared, memory).A, sites))
    rho, number = NATURAL_GRADIENT_STEPS[is_conjugate(model.likelihood)]
    batches = strategy._batches(state, data)
    for _ in range(number):
        duals, _ = natural_gradient_step(
            duals,
            batches(),
            rho,
            rest,
            latent_dims=strategy.latent_dims,
            min_precision=precision_floor(model.likelihood),
        )
    strategy._store(duals, state)


def weighted_bound(model: Any, tied: Duals, weights: Tensor) -> tuple[Tensor, Duals]:
    """The objective of step 4, and the tied duals in the whitened basis of now.

    Args:
        model: A `SequentialGP`.
        tied: ``lam`` and ``B``, which are held fixed.
        weights: ``n`` weights of the training data.
    """
    strategy: DualVariationalStrategy = model.variational_strategy
    X, Y, arguments = model.training_data()
    data = strategy._check_data(X, Y, model.likelihood, arguments)
    prior = model.forward(strategy.inducing_points)
    chol = scaled_cholesky(to_dense(prior.lazy_covariance_matrix), strategy.jitter_val)
    half = solve_lower(chol, tied.B)
    duals = Duals(
        solve_lower(chol, tied.lam.unsqueeze(-1)).squeeze(-1), solve_lower(chol, half.mT).mT
    )
    factors = factorise(duals)
    batch = strategy._batch(chol, prior.batch_shape.numel() == 1, data)
    mean = batch.prior_mean + posterior_mean(batch.A, factors)
    variance = posterior_variance(batch.A, batch.unexplained, factors)
    kl = kl_divergence(factors)
    if strategy.latent_dims:
        mean, variance, kl = mean.mT, variance.mT, kl.sum(-1)
    fit = expected_log_prob(model.likelihood, data.targets, mean, variance, **data.arguments)
    return (weights * fit).sum(-1) - kl, duals

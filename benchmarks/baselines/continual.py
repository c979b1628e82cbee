r"""Tasks of new classes, one after the other: ours, the rule of the paper, and rivals.

All have the same kernel to begin with, the same likelihood and as many inducing points.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from gpytorch.means import ZeroMean
from torch import Tensor

from benchmarks.known_warnings import known_warnings
from benchmarks.tasks import Predict, Tasks
from seqgp import SequentialGP
from seqgp.dual import Batch, converge, factorise, scaled_cholesky, solve_lower, zero_duals
from seqgp.dual.linalg import relative_jitter
from seqgp.dual.posterior import Factors, posterior_mean, posterior_variance, unexplained_variance
from seqgp.likelihoods.softmax import softmax_normaliser
from seqgp.models.posteriors import ObservationPosterior
from seqgp.observations import Observations
from seqgp.streaming import MemoryOptions, PaperRule, PseudoLikelihood
from seqgp.streaming.inducing_points import cluster_inducing_points

#: Passes over the data for the sites, each time that they are converged.
PASSES = 14


#: Folds all observations with their own sites, also of classes that nobody has seen yet.
OWN_SITES = PseudoLikelihood(bounds_new_classes=False)


def empty_model(tasks: Tasks) -> SequentialGP:
    """A model that has seen nothing."""
    X, y = tasks.tasks[0][0]
    return SequentialGP(
        X[:0],
        y[:0].unsqueeze(-1),
        likelihood=tasks.likelihood(),
        covar_module=tasks.kernel(),
        mean_module=ZeroMean(),
        inducing_points=X[: tasks.m],
        learn_inducing_points=False,
    )


@torch.no_grad()
def probabilities(model: SequentialGP, X: Tensor) -> Tensor:
    """``n x c`` class probabilities."""
    posterior = model.posterior(X, observation_noise=True)
    assert isinstance(posterior, ObservationPosterior)
    return posterior.probabilities


def stream(
    tasks: Tasks,
    memory: MemoryOptions,
    learn: bool = False,
    **options: Any,
) -> Iterator[SequentialGP]:
    """The model after each task; options of `SequentialGP.update`."""
    model = empty_model(tasks)
    for task in tasks.tasks:
        for X, y in task:
            model.update(
                X,
                y.unsqueeze(-1),
                memory=memory,
                learn=learn,
                inducing="cluster",
                max_inducing=tasks.m,
                site_steps=PASSES,
                **options,
            )
        yield model


def ours(
    tasks: Tasks,
    replay: float | None = None,
    policy: str = "leverage",
    memory: int | None = None,
    **options: Any,
) -> Iterator[Predict]:
    """Predictions after each task.

    Args:
        tasks: The data.
        replay: For how much of what was folded the memory stands; by default as the data set says.
        policy: What is remembered.
        memory: How much of each batch; by default what the data set says.
        options: As for `stream`.
    """
    number = tasks.memory if memory is None else memory
    replay = tasks.replay if replay is None else replay
    kept = MemoryOptions(capacity=None, per_update=number, policy=policy, replay=replay)
    for model in stream(tasks, kept, **options):
        yield partial(probabilities, model)


def without_memory(tasks: Tasks, **options: Any) -> Iterator[Predict]:
    """Everything is folded at once."""
    return ours(tasks, replay=0.0, policy="none", **options)


def paper(tasks: Tasks, policy: str = "leverage", steps: int = 20) -> Iterator[Predict]:
    """The rule of the paper; ``steps`` of Adam a batch."""
    kept = MemoryOptions(capacity=None, per_update=tasks.memory, policy=policy)
    for model in stream(tasks, kept, learn=True, mode=PaperRule(removes_memory=False), steps=steps):
        yield partial(probabilities, model)


def bui(tasks: Tasks, steps: int = 5) -> Iterator[Predict]:
    """Bui et al. (2017): what is kept of the past is the posterior of the inducing values.

    Their bound is that of our summary without a memory and with observations' own sites;
    hyperparameters are learnt by ``steps`` of L-BFGS a batch, and new inputs take the places of
    some inducing points.
    """
    return without_memory(tasks, learn=True, steps=steps, mode=OWN_SITES)


def offline(tasks: Tasks, passes: int = 25) -> Iterator[Predict]:
    """All data at once."""
    yield partial(probabilities, fitted_to(tasks, *tasks.everything, passes))


def fitted_to(tasks: Tasks, X: Tensor, y: Tensor, passes: int = 25) -> SequentialGP:
    """A model of some data, at the kernel to begin with."""
    model = empty_model(tasks)
    generator = torch.Generator().manual_seed(0)
    Z = cluster_inducing_points(
        X[:0], X, torch.ones_like(y), len(X), 0, tasks.m, generator, iterations=10
    )
    model.variational_strategy.set_inducing_points(Z)
    with known_warnings():
        model.variational_strategy.converge(X, y, model.likelihood, max_steps=passes)
    return model


class VARGP:
    r"""Variational auto-regressive GPs (Kapoor, Karaletsos and Bui, ICML 2021).

    Each task has inducing points of its own. Their values given those of earlier tasks have a
    variational distribution :math:`q(u_t | u_{<t})`; those of earlier tasks stay as they are. In
    the coordinates :math:`u = L v`, with :math:`L` the Cholesky factor of the covariance of all
    points in order, :math:`v_t` is what the values of task t add to those before: independent of
    them under the prior, and :math:`q(v) = \prod_t q(v_t)`. Each factor is the optimal one, found
    by natural gradients. Hyperparameters stay where they begin, where the authors have a
    distribution over them; inducing points are centres of clusters of the inputs of their task,
    where they learn them.
    """

    def __init__(self, tasks: Tasks) -> None:
        self.tasks, self.kernel, self.likelihood = tasks, tasks.kernel(), tasks.likelihood()
        self.Z = tasks.tasks[0][0][0][:0]
        self.blocks: list[tuple[slice, Factors]] = []

    @torch.no_grad()
    def learn(self, X: Tensor, y: Tensor, number: int) -> None:
        """One task, with ``number`` inducing points."""
        generator = torch.Generator().manual_seed(len(self.blocks))
        own_Z = cluster_inducing_points(
            X[:0], X, torch.ones_like(y), len(X), 0, number, generator, iterations=10
        )
        self.Z = torch.cat([self.Z, own_Z])
        A, mean, variance = self._latents(X)
        own = slice(len(self.Z) - number, len(self.Z))
        data = Observations(X, y)
        batch = Batch(
            A[own].unsqueeze(0),
            variance - A[own].square().sum(0),
            mean,
            data.evaluate(self.likelihood, True),
        )
        with known_warnings():
            start = zero_duals(X, number, (self.tasks.num_classes,))
            duals, _ = converge(start, lambda: [batch], latent_dims=1, max_steps=2 * PASSES)
        self.blocks.append((own, factorise(duals)))

    @torch.no_grad()
    def predict(self, X: Tensor) -> Tensor:
        """``n x c`` class probabilities."""
        _, mean, variance = self._latents(X)
        return softmax_normaliser(mean.mT, variance.mT)[1]

    def _latents(self, X: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """``L^-1 Kzx``, and means and variances ``c x n``, given the tasks so far."""
        L = scaled_cholesky(self.kernel(self.Z).to_dense(), relative_jitter(X.dtype))
        A = solve_lower(L, self.kernel(self.Z, X).to_dense())
        unexplained = unexplained_variance(A, self.kernel(X, diag=True))
        mean = torch.zeros(self.tasks.num_classes, len(X), dtype=X.dtype)
        variance = unexplained.expand_as(mean)
        known = 0
        for block, factors in self.blocks:
            part = A[block].unsqueeze(0)
            mean = mean + posterior_mean(part, factors)
            variance = posterior_variance(part, variance, factors)
            known = block.stop
        return A, mean, variance + A[known:].square().sum(0)


def var_gp(tasks: Tasks) -> Iterator[Predict]:
    """Trained on one task after the other, each of them whole."""
    model = VARGP(tasks)
    for task in tasks.tasks:
        X, y = zip(*task, strict=True)
        model.learn(torch.cat(X), torch.cat(y), tasks.m // len(tasks.tasks))
        yield model.predict

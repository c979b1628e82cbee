"""Learning from a stream: one update of a `SequentialGP` with a new batch of observations.

Every observation lives in exactly one place: in the memory, as it is, or in the summary, folded
for good. An update takes memory and new observations together, converges their sites on top of the
summary, learns hyperparameters, chooses what to remember and folds the rest.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from seqgp.dual import Sites
from seqgp.memory import Memory
from seqgp.objectives import DualELBO

if TYPE_CHECKING:
    from seqgp.model import SequentialGP


@dataclass(frozen=True)
class UpdateRecord:
    """What an update did.

    Attributes:
        elbo: The evidence lower bound of all that is known, after the update.
        log_density: Mean log predictive density of the new observations before they were learnt.
        steps: Evaluations of the objective for hyperparameters.
        num_new: How many observations were new.
        num_memory: How many are in the memory now.
        memory_gained: How many of the new ones are.
        memory_lost: How many old ones were folded.
        num_inducing: The number of inducing points.
        hyperparameters: All hyperparameters, constrained, by name.
        seconds: The time that the update took.
    """

    elbo: float
    log_density: float
    steps: int
    num_new: int
    num_memory: int
    memory_gained: int
    memory_lost: int
    num_inducing: int
    hyperparameters: dict[str, Tensor]
    seconds: float


def update(
    model: SequentialGP,
    X: Tensor,
    targets: Tensor,
    arguments: dict[str, Any],
    memory: Memory,
    learn: bool = True,
    steps: int = 100,
    learning_rate: float = 0.01,
    learn_inducing: bool = True,
    discount: float = 1.0,
    tol: float = 1e-3,
) -> UpdateRecord:
    """Learn from a new batch, in place; see `SequentialGP.update`.

    Args:
        model: The model.
        X: ``n x d`` raw inputs.
        targets: ``[m x] n`` transformed targets.
        arguments: Per-point arguments of the likelihood.
        memory: What to remember.
        learn: Whether to learn hyperparameters.
        steps: Adam steps on them.
        learning_rate: Adam's learning rate.
        learn_inducing: Whether to learn the inducing points along with them.
        discount: Factor for what the summary held before.
        tol: Relative tolerance for the sites while hyperparameters are learnt.
    """
    start_time = time.perf_counter()
    num_old, num_new = model.num_data, X.shape[-2]
    with restored_on_error(model):
        log_density = float(model.log_predictive_density(X, targets, **arguments).mean())
        model.extend_train_data(X, targets, arguments)
        taken = 0
        if learn and steps:
            taken = _learn(model, steps, learning_rate, learn_inducing, tol)
        model.refresh()
        X_all, Y_all, arguments_all = model.training_data()
        sites, variance = model.variational_strategy.sites(
            X_all, Y_all, model.likelihood, **arguments_all
        )
        with torch.no_grad():
            bound, _ = model.bound(sites)
        leverage = (sites.beta * variance).reshape(-1, num_old + num_new).sum(0)
        kept = memory.choose(leverage, num_new, model.num_updates)
        _fold_all_but(model, kept, sites, discount)
        model.refresh()
        model.num_updates += 1
    gained = int((kept >= num_old).sum())
    return UpdateRecord(
        elbo=float(bound.sum()),
        log_density=log_density,
        steps=taken,
        num_new=num_new,
        num_memory=len(kept),
        memory_gained=gained,
        memory_lost=num_old - (len(kept) - gained),
        num_inducing=model.variational_strategy.inducing_points.shape[-2],
        hyperparameters=model.constrained_hyperparameters(),
        seconds=time.perf_counter() - start_time,
    )


def _learn(
    model: SequentialGP, steps: int, learning_rate: float, learn_inducing: bool, tol: float
) -> int:
    """Adam on the bound of memory, new observations and summary."""
    mll = DualELBO(model.likelihood, model)
    parameters = [
        parameter
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and (learn_inducing or not name.endswith("inducing_points"))
    ]
    optimizer = torch.optim.Adam(parameters, lr=learning_rate)
    training, sites = model.training, None
    model.train()
    for _ in range(steps):
        optimizer.zero_grad()
        bound, sites = model.bound(sites, tol)
        (-mll.with_priors(bound, 1).sum()).backward()
        optimizer.step()
    model.train(training)
    return steps


def _fold_all_but(model: SequentialGP, kept: Tensor, sites: Sites, discount: float) -> None:
    """Fold what is not kept into the summary, and keep the rest as training data."""
    n = model.num_data
    gone = torch.ones(n, dtype=torch.bool, device=kept.device)
    gone[kept] = False
    X, Y, arguments = model.training_data()
    index = gone.nonzero().squeeze(-1)
    if len(index) or discount != 1.0:
        model.variational_strategy.fold(
            X[..., index, :],
            Y[..., index],
            Sites(sites.lam[..., index], sites.beta.expand_as(sites.lam)[..., index]),
            model.likelihood,
            discount,
            **{key: value[..., index] for key, value in arguments.items()},
        )
    model.select_train_data(kept)


@contextmanager
def restored_on_error(model: SequentialGP) -> Iterator[None]:
    """Whatever goes wrong inside, the model is as it was before."""
    parameters = [(p, p.detach().clone()) for p in model.parameters()]
    modules = [
        (module, dict(module._buffers), dict(module._parameters)) for module in model.modules()
    ]
    data = (model.train_inputs, model.train_targets, model.likelihood_arguments)
    training, updates = model.training, model.num_updates
    try:
        yield
    except BaseException:
        for module, buffers, own in modules:
            module._buffers.update(buffers)
            module._parameters.update(own)
        with torch.no_grad():
            for parameter, value in parameters:
                parameter.copy_(value)
        model.train_inputs, model.train_targets, model.likelihood_arguments = data
        model.num_updates = updates
        model.variational_strategy._clear_cache()
        model.train(training)
        raise

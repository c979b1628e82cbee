"""Every tensor follows its inputs.

There is no GPU in continuous integration. Instead the default device is "meta" while models and
data are on the CPU: a tensor that is made without a device then holds no data, and fails when it
meets one that does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from seqgp import DualELBO
from tests.helpers import (
    CASES,
    GP,
    Problem,
    assert_close,
    make_inputs,
    make_kernel,
    make_mean,
    problem,
)

pytestmark = pytest.mark.usefixtures("float64")


def elbo(model: GP, data: Problem) -> Tensor:
    model.train()
    value = DualELBO(model.likelihood, model)(model(data.x), data.y, **data.arguments)
    value.backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


def step(model: GP, data: Problem) -> Tensor:
    strategy = model.variational_strategy
    return strategy.natural_gradient_step(data.x, data.y, rho=0.5, num_data=50, **data.arguments)


def bound(model: GP, data: Problem) -> Tensor:
    value, _ = model.variational_strategy.bound(data.x, data.y, **data.arguments)
    value.backward()
    return model.covar_module.raw_outputscale.grad


def fantasies(model: GP, data: Problem, **options: Any) -> Tensor:
    x = data.x[:2].clone().requires_grad_(True)
    arguments = {key: value[:2] for key, value in data.arguments.items()}
    for _ in range(1 if options else 2):
        model = model.get_fantasy_model(x, data.y[:2], **options, **arguments)
    posterior = model(data.test)
    (posterior.mean.sum() + posterior.variance.sum()).backward()
    return x.grad if x.grad is not None else posterior.mean


def move(model: GP, data: Problem) -> Tensor:
    model.variational_strategy.set_inducing_points(torch.cat([data.Z[:4], data.x[:3]]))
    model.covar_module.raw_outputscale.data.add_(1.0)
    model.variational_strategy.rebase()
    return model.variational_strategy.dual_B


def reload(model: GP, data: Problem) -> Tensor:
    model.load_state_dict(model.state_dict())
    model.variational_strategy.set_inducing_points(data.Z[:3])
    return model.variational_strategy.lam


ACTIONS: dict[str, Callable[[GP, Problem], Tensor]] = {
    "converge": lambda model, data: data.learn(model).elbo,
    "add": lambda model, data: data.learn(model, add=True).elbo,
    "step": step,
    "bound": bound,
    "eval": lambda model, data: model(data.test).covariance_matrix,
    "prior": lambda model, data: model(data.test, prior=True).covariance_matrix,
    "train": lambda model, data: model.train()(data.test).variance,
    "elbo": elbo,
    "kl": lambda model, data: model.variational_strategy.kl_divergence(),
    "q": lambda model, data: model.variational_strategy.variational_distribution.covariance_matrix,
    "fantasies": fantasies,
    "fantasies, fixed Z": lambda model, data: fantasies(model, data, fixed_inducing=True),
    "move": move,
    "reload": reload,
}


@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("name", list(CASES))
def test_nothing_is_made_on_the_default_device(
    name: str, action: str, meta: Callable[[], None]
) -> None:
    data = problem(name, n=8, m=4)
    expected = ACTIONS[action](data.converged(), data).detach()
    model = problem(name, n=8, m=4).converged()
    meta()
    actual = ACTIONS[action](model, data).detach()
    assert actual.device == torch.device("cpu")
    assert_close(actual, expected, 1e-12)


def test_arguments_that_are_numbers(meta: Callable[[], None]) -> None:
    data = problem("binomial", n=8, m=4)
    model, x, y = data.converged(), make_inputs(2, 2), torch.ones(2)
    meta()
    for _ in range(2):
        model = model.get_fantasy_model(x, y, total_count=3)
    assert model(data.test).mean.isfinite().all()


def test_construction(meta: Callable[[], None]) -> None:
    """The strategy's own buffers are where the inducing points are."""
    Z, mean, kernel = make_inputs(4, 2), make_mean(), make_kernel()
    meta()
    strategy = GP(Z, mean=mean, kernel=kernel).variational_strategy
    for name, buffer in strategy.named_buffers():
        if name != "variational_params_initialized":  # GPyTorch's own
            assert buffer.device == Z.device, name

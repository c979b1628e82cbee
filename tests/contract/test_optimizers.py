"""Every optimiser of acquisition functions that BoTorch has, and what generates candidates."""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Callable
from importlib import import_module
from typing import Any

import botorch.optim
import pytest
import torch
from botorch.acquisition import (
    LogExpectedImprovement,
    qKnowledgeGradient,
    qLogExpectedImprovement,
    qLogNoisyExpectedImprovement,
)
from botorch.generation import (
    BoltzmannSampling,
    MaxPosteriorSampling,
    gen_candidates_scipy,
    gen_candidates_torch,
)
from botorch.optim import (
    FixedHomotopySchedule,
    Homotopy,
    HomotopyParameter,
    gen_batch_initial_conditions,
    optimize_acqf,
    optimize_acqf_cyclic,
    optimize_acqf_discrete,
    optimize_acqf_discrete_local_search,
    optimize_acqf_homotopy,
    optimize_acqf_mixed,
    optimize_acqf_mixed_alternating,
)
from botorch.optim.initializers import gen_one_shot_kg_initial_conditions
from botorch.optim.optimize import optimize_acqf_list
from botorch.sampling import SobolQMCNormalSampler
from torch import Tensor

from tests.helpers import assert_close, make_inputs
from tests.models.helpers import pair

pytestmark = [
    pytest.mark.usefixtures("float64"),
    pytest.mark.filterwarnings("ignore:Optimization failed"),
    pytest.mark.filterwarnings("ignore:If using a 2-dim `batch_initial_conditions`"),
]

BOUNDS = torch.tensor([[0.0, 0.0], [1.0, 1.0]])


def bounds() -> Tensor:
    return BOUNDS.double()


def analytic(model: Any) -> LogExpectedImprovement:
    return LogExpectedImprovement(model, best_f=0.3)


def improvement(model: Any) -> qLogExpectedImprovement:
    return qLogExpectedImprovement(model, 0.3, SobolQMCNormalSampler(torch.Size([8]), seed=0))


def noisy(model: Any) -> qLogNoisyExpectedImprovement:
    sampler = SobolQMCNormalSampler(torch.Size([8]), seed=0)
    return qLogNoisyExpectedImprovement(model, make_inputs(4, 2), sampler, prune_baseline=False)


def starts(q: int = 1) -> Tensor:
    return torch.linspace(0.2, 0.8, 2).reshape(2, 1, 1) + 0.15 * make_inputs(2, q, 2)


OPTIONS: dict[str, Any] = {"num_restarts": 2, "raw_samples": 4, "options": {"maxiter": 5}}
CHOICES = make_inputs(6, 2)

#: What each does with a model; returns candidates and their value.
OPTIMIZERS: dict[str, Callable[[Any], tuple[Tensor, Tensor]]] = {
    "optimize_acqf": lambda m: optimize_acqf(
        improvement(m), bounds(), 2, batch_initial_conditions=starts(2), **OPTIONS
    ),
    "optimize_acqf_cyclic": lambda m: optimize_acqf_cyclic(
        improvement(m), bounds(), 2, cyclic_options={"maxiter": 2}, **OPTIONS
    ),
    "optimize_acqf_list": lambda m: optimize_acqf_list(
        [improvement(m), improvement(m)], bounds(), **OPTIONS
    ),
    "optimize_acqf_mixed": lambda m: optimize_acqf_mixed(
        noisy(m), bounds(), 2, fixed_features_list=[{1: 0.2}, {1: 0.7}], **OPTIONS
    ),
    "optimize_acqf_discrete": lambda m: optimize_acqf_discrete(noisy(m), 2, CHOICES.double()),
    "optimize_acqf_discrete_local_search": lambda m: optimize_acqf_discrete_local_search(
        noisy(m),
        q=2,
        discrete_choices=[torch.linspace(0, 1, 4), torch.linspace(0, 1, 4)],
        num_restarts=2,
        raw_samples=4,
    ),
    "optimize_acqf_homotopy": lambda m: homotopy(m),
    "optimize_acqf_mixed_alternating": lambda m: optimize_acqf_mixed_alternating(
        improvement(m),
        bounds(),
        discrete_dims={0: [0.0, 1.0]},
        q=1,
        num_restarts=2,
        raw_samples=4,
        options={"maxiter_alternating": 2},
    ),
}


def homotopy(model: Any) -> tuple[Tensor, Tensor]:
    acquisition = analytic(model)
    schedule = FixedHomotopySchedule([0.1, 0.3])
    parameter = HomotopyParameter(parameter=acquisition.best_f, schedule=schedule)
    return optimize_acqf_homotopy(
        acquisition, bounds(), q=1, homotopy=Homotopy([parameter]), **OPTIONS
    )


def test_every_optimizer_has_a_case() -> None:
    found = set()
    for info in pkgutil.walk_packages(botorch.optim.__path__, "botorch.optim."):
        for name, function in vars(import_module(info.name)).items():
            own = inspect.isfunction(function) and function.__module__ == info.name
            if own and name.startswith("optimize_acqf"):
                found.add(name)
    assert found == set(OPTIMIZERS)


@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_optimizer(name: str) -> None:
    """From the same starting points to the same candidates, of the same value."""
    results = []
    for model in pair():
        torch.manual_seed(0)
        results.append(OPTIMIZERS[name](model))
    (ours, value), (theirs, expected) = results
    assert_close(ours, theirs, 1e-4)  # where steps of L-BFGS amplify what differs by rounding
    assert_close(value, expected, 1e-5)


@pytest.mark.parametrize(
    ("generate", "options"),
    [
        (gen_candidates_scipy, {"maxiter": 5}),
        (gen_candidates_torch, {"stopping_criterion_options": {"maxiter": 5}}),
    ],
)
def test_candidates_from_given_points(generate: Any, options: dict[str, Any]) -> None:
    results = [
        generate(starts(), improvement(model), 0.0, 1.0, options=options) for model in pair()
    ]
    assert_close(results[0][0], results[1][0], 1e-4)
    assert_close(results[0][1], results[1][1], 1e-5)


def test_initial_conditions() -> None:
    results = []
    for model in pair():
        torch.manual_seed(0)
        results.append(gen_batch_initial_conditions(noisy(model), bounds(), 2, 2, 8))
    assert_close(*results)


def test_initial_conditions_of_a_look_ahead() -> None:
    shapes = []
    for model in pair():
        acquisition = qKnowledgeGradient(model, num_fantasies=2)
        X = gen_one_shot_kg_initial_conditions(
            acquisition, bounds(), 1, 2, 4, options={"maxiter": 3}
        )
        assert X is not None
        shapes.append(X.shape)
    assert shapes == [(2, 3, 2)] * 2


@pytest.mark.parametrize("kind", ["best", "boltzmann"])
def test_sampling_from_choices(kind: str) -> None:
    chosen = []
    for model in pair():
        torch.manual_seed(0)
        if kind == "best":
            strategy = MaxPosteriorSampling(model, replacement=False)
        else:
            strategy = BoltzmannSampling(analytic(model), replacement=False)
        chosen.append(strategy(CHOICES.double(), num_samples=3))
    assert_close(*chosen)

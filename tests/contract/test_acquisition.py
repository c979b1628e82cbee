from __future__ import annotations

from typing import Any

import pytest
import torch
from botorch.acquisition import AcquisitionFunction
from torch import Tensor

from tests.contract.acquisition_cases import CASES, OTHER_MODELS, acquisition_functions
from tests.helpers import assert_close

pytestmark = [
    pytest.mark.usefixtures("float64"),
    pytest.mark.filterwarnings("ignore:.*has known numerical issues"),
]
KINDS = {kind.__name__: kind for kind in acquisition_functions()}
every = pytest.mark.parametrize("name", list(CASES))


def build(name: str, model: Any) -> AcquisitionFunction:
    torch.manual_seed(0)
    return CASES[name].build(KINDS[name], model)


def value(acquisition: AcquisitionFunction, X: Tensor) -> Tensor:
    torch.manual_seed(1)
    return acquisition(X)


def test_every_acquisition_function_has_a_case() -> None:
    assert set(KINDS) == set(CASES) | set(OTHER_MODELS)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.compares])
def test_values_are_those_of_an_exact_gp(name: str) -> None:
    case = CASES[name]
    X = case.inputs()
    values = [value(build(name, model), X) for model in case.models()]
    assert values[0].std() > 1e-6
    assert_close(*values, case.tol)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.differentiable])
def test_gradients_are_those_of_finite_differences(name: str) -> None:
    case = CASES[name]
    acquisition = build(name, case.models()[0])
    X = case.inputs()[:1].requires_grad_()
    gradient = torch.autograd.grad(value(acquisition, X).sum(), X)[0]
    direction = torch.randn(X.shape, generator=torch.Generator().manual_seed(0))
    step = 1e-5
    with torch.no_grad():
        up, down = (value(acquisition, X + sign * step * direction) for sign in (1, -1))
    slope = (up - down).sum() / (2 * step)
    assert_close((gradient * direction).sum(), slope, 1e-4)

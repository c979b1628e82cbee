"""What is set by hand after construction is seen by the next prediction, as in BoTorch."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from botorch.models.transforms import Normalize, Standardize
from botorch.sampling import SobolQMCNormalSampler

import seqgp
from seqgp import SequentialGP
from tests.helpers import CASES, assert_close, make_inputs, make_kernel
from tests.models.helpers import assert_same, data, pair

pytestmark = pytest.mark.usefixtures("float64")


def number_of_refreshes(model: SequentialGP, X: torch.Tensor) -> int:
    with patch.object(
        SequentialGP, "refresh", autospec=True, side_effect=SequentialGP.refresh
    ) as f:
        model.posterior(X)
    return f.call_count


@pytest.mark.parametrize("inducing", [None, 6])
@pytest.mark.parametrize("name", ["gaussian", "student_t", "laplace", "negative_binomial"])
def test_parameters_of_the_likelihood(name: str, inducing: int | None) -> None:
    """Also of a copy, and of one that has been saved."""
    model, X = data(name).model(inducing_points=inducing), make_inputs(5, 2)
    copied = copy.deepcopy(model)
    before = model.posterior(X)
    for parameter in model.likelihood.parameters():
        parameter.data += 1.0
    Z = model.variational_strategy.inducing_points.detach()
    expected = data(name).model(likelihood=copy.deepcopy(model.likelihood), inducing_points=Z)
    assert_same(model.posterior(X), expected.posterior(X))
    assert not torch.allclose(before.mean, expected.posterior(X).mean)
    for parameter in copied.likelihood.parameters():
        parameter.data += 1.0
    assert_same(copied.posterior(X), expected.posterior(X))
    assert number_of_refreshes(model, X) == 0


def test_noise_of_a_gaussian_is_that_of_botorch() -> None:
    for fixed_noise in (False, True):
        ours, exact = pair(fixed_noise=fixed_noise)
        X = make_inputs(5, 2)
        for model in (ours, exact):
            model.posterior(X)
            if fixed_noise:
                model.likelihood.noise = 3 * model.likelihood.noise
            else:
                model.likelihood.noise = 0.05
            model.train()
        assert_same(ours.posterior(X), exact.posterior(X))
        assert_same(
            ours.posterior(X, observation_noise=True), exact.posterior(X, observation_noise=True)
        )


@pytest.mark.parametrize("name", ["gaussian", "bernoulli"])
def test_kernel_and_mean(name: str) -> None:
    model, X = data(name).model(inducing_points=6), make_inputs(5, 2)
    model.covar_module = make_kernel(0.2, 2.0)
    model.mean_module.constant.data.fill_(0.7)
    Z = model.variational_strategy.inducing_points.detach()
    expected = data(name).model(
        covar_module=make_kernel(0.2, 2.0), mean_module=model.mean_module, inducing_points=Z
    )
    assert_same(model.posterior(X), expected.posterior(X))


@pytest.mark.parametrize("replaced", [True, False])
def test_input_transforms(replaced: bool) -> None:
    """Whether another one takes its place, or it gets other bounds."""
    wide = torch.tensor([[-1.0, -1.0], [2.0, 2.0]])
    model, X = data("bernoulli").model(input_transform=Normalize(2)), make_inputs(5, 2)
    model.posterior(X)
    if replaced:
        model.input_transform = Normalize(2, bounds=wide)
    else:
        other = Normalize(2, bounds=wide)
        model.input_transform.load_state_dict(other.state_dict())
    expected = data("bernoulli").model(input_transform=Normalize(2, bounds=wide))
    assert_same(model.posterior(X), expected.posterior(X))


def test_outcome_transforms() -> None:
    """As in BoTorch: the targets stay as they are, and are on another scale."""
    ours, exact = pair(outcome_transform=Standardize(1))
    X, other = make_inputs(5, 2), Standardize(1)
    other(100 + 5 * torch.randn(10, 1))
    for model in (ours, exact):
        model.posterior(X)
        model.outcome_transform = copy.deepcopy(other).eval()
    assert_same(ours.posterior(X), exact.posterior(X), tol=1e-5)


def test_a_posterior_is_not_computed_in_vain(tmp_path: Path) -> None:
    """After anything that learns, copies or restores."""
    train, X = data("bernoulli", n=14), make_inputs(5, 2)
    model = train._replace(X=train.X[:10], Y=train.Y[:10]).model(input_transform=Normalize(2))
    assert number_of_refreshes(model, X) == 0
    model.update(train.X[10:], train.Y[10:], steps=2, memory=8)
    for each in (model, copy.deepcopy(model), copy.deepcopy(model).float()):
        assert number_of_refreshes(each, X.to(each.train_inputs[0])) == 0
    seqgp.save(model, tmp_path / "model.pt")
    assert number_of_refreshes(seqgp.load(tmp_path / "model.pt"), X) == 0
    model.forget(train.X[12:13], train.Y[12:13])
    fantasies = model.fantasize(X.unsqueeze(1), SobolQMCNormalSampler(torch.Size([2])))
    for each in (model, fantasies):
        assert number_of_refreshes(each, X) == 0
    single = pair(outputs=2)[0].subset_output([1])
    assert number_of_refreshes(single, X) == 0
    model.load_state_dict({k: v for k, v in model.state_dict().items() if "variational" not in k})
    assert number_of_refreshes(model, X) == 0


def test_the_transform_of_the_caller_is_not_frozen() -> None:
    """It has learnt from the data, as in BoTorch, and can be used again."""
    X, Y = 3 * make_inputs(12, 2), make_inputs(12, 1)
    transform = Normalize(2)
    first = SequentialGP(X, Y, covar_module=make_kernel(), input_transform=transform)
    assert_close(transform.bounds, torch.stack([X.amin(0), X.amax(0)]))
    assert transform.learn_coefficients
    expected = first.posterior(X)
    second = SequentialGP(9 * X, Y, covar_module=make_kernel(), input_transform=transform)
    assert_same(first.posterior(X), expected, tol=0)
    assert_same(second.posterior(9 * X), expected)


# -------------------------------------------------------------------- the precision of inputs


DTYPES = [torch.int64, torch.int32, torch.uint8, torch.bool, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float32], ids=str)
@pytest.mark.parametrize("name", ["gaussian", "bernoulli", "softmax"])
def test_inputs_of_any_precision(name: str, dtype: torch.dtype) -> None:
    """Are those of the model, and change neither transforms nor later predictions."""
    train = data(name)
    X = train.X.round().unique(dim=0)  # the corners, which each of them can represent
    kwargs: dict[str, Any] = {"input_transform": Normalize(2)}
    if name == "gaussian":
        kwargs["outcome_transform"] = Standardize(1)
    model = train.model(**kwargs)
    Y = train.Y[: len(X)]
    state = copy.deepcopy(model.state_dict())
    expected = model.posterior(X)
    given = X.to(dtype)
    targets = model.train_targets[: len(X)]
    sampler = SobolQMCNormalSampler(torch.Size([2]), seed=0)
    calls = {
        "posterior": lambda x: model.posterior(x).mean,
        "call": lambda x: model.eval()(model.transform_inputs(x)).mean,
        "train": lambda x: model.train()(x).mean,
        "condition": lambda x: model.condition_on_observations(x, Y).posterior(X).mean,
        "fantasy model": lambda x: model.get_fantasy_model(x, targets).posterior(X).mean,
        "fantasize": lambda x: model.fantasize(x, sampler).posterior(X).mean,
        "leverage": lambda x: model.leverage(x, Y),
        "density": lambda x: model.log_predictive_density(x, targets),
        "update": lambda x: _updated(model, x, Y).posterior(X).mean,
    }
    for call in calls.values():
        assert_close(call(given), call(X), 1e-9)
        assert call(given).dtype == torch.float64
        assert all(torch.equal(state[k], v) for k, v in model.state_dict().items())
    assert_same(model.posterior(X), expected, tol=0)


def _updated(model: SequentialGP, X: torch.Tensor, Y: torch.Tensor) -> SequentialGP:
    model = copy.deepcopy(model)
    model.update(X, Y, learn=False)
    return model


@pytest.mark.parametrize("name", list(CASES))
def test_inputs_that_are_not_numbers(name: str) -> None:
    model, X = data(name).model(input_transform=Normalize(2)), make_inputs(4, 3, 2)
    for bad in (torch.nan, torch.inf):
        X[2, 1, 0] = bad
        with pytest.raises(ValueError, match="X: expected finite numbers, got 1 NaN or infinite"):
            model.posterior(X)
        with pytest.raises(ValueError, match="X: expected finite numbers"):
            model.fantasize(X, SobolQMCNormalSampler(torch.Size([2])))

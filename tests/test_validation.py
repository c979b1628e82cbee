"""Bad input is refused by name, and leaves no trace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from gpytorch.likelihoods import (
    BernoulliLikelihood,
    GaussianLikelihood,
    GaussianLikelihoodWithMissingObs,
)
from torch import Tensor

from seqgp.validation import check_inducing_points, check_inputs, check_targets
from tests.helpers import (
    CASES,
    GP,
    assert_untouched,
    make_inputs,
    problem,
    softmax,
    state_of,
)

pytestmark = pytest.mark.usefixtures("float64")

UPDATES: dict[str, Callable[..., Any]] = {
    "converge": lambda model, *data, **kw: model.variational_strategy.converge(*data, **kw),
    "step": lambda model, *data, **kw: model.variational_strategy.natural_gradient_step(
        *data, **kw
    ),
    "bound": lambda model, *data, **kw: model.variational_strategy.bound(*data, **kw),
    "fantasy": lambda model, *data, **kw: model.get_fantasy_model(*data, **kw),
    "fixed Z": lambda model, *data, **kw: model.get_fantasy_model(*data, fixed_inducing=True, **kw),
}


def with_nan(tensor: Tensor, value: float = torch.nan) -> Tensor:
    tensor = tensor.clone()
    tensor.view(-1)[3] = value
    return tensor


BAD_DATA: dict[str, tuple[Callable[[Tensor, Tensor], tuple[Any, Any]], type, str]] = {
    "inputs: not a tensor": (lambda x, y: (x.tolist(), y), TypeError, "inputs: .*torch.Tensor"),
    "inputs: integers": (lambda x, y: (x.long(), y), TypeError, "inputs: .*torch.float64"),
    "inputs: a vector": (lambda x, y: (x[:, 0], y), ValueError, r"inputs: .*unsqueeze\(-1\)"),
    "inputs: columns": (lambda x, y: (x[:, :1], y), ValueError, "inputs: expected shape"),
    "inputs: NaN": (lambda x, y: (with_nan(x), y), ValueError, "inputs: .*1 NaN or infinite"),
    "inputs: inf": (lambda x, y: (with_nan(x, torch.inf), y), ValueError, "inputs: .*finite"),
    "targets: not a tensor": (lambda x, y: (x, y.tolist()), TypeError, "targets: .*torch.Tensor"),
    "targets: too few": (lambda x, y: (x, y[1:]), ValueError, "targets: expected shape ... x 30"),
    "targets: a column": (lambda x, y: (x, y.unsqueeze(-1)), ValueError, "targets: .*shape"),
    "targets: a number": (lambda x, y: (x, y[0]), ValueError, "targets: .*shape"),
    "targets: batch": (
        lambda x, y: (x.expand(3, 30, 2), y.expand(2, 30)),
        ValueError,
        "targets: batch shape .* does not broadcast",
    ),
    "targets: NaN": (lambda x, y: (x, with_nan(y)), ValueError, "targets: .*1 NaN or infinite"),
    "targets: inf": (lambda x, y: (x, with_nan(y, -torch.inf)), ValueError, "targets: .*finite"),
}


@pytest.mark.parametrize("case", BAD_DATA)
@pytest.mark.parametrize("update", UPDATES)
def test_bad_data(update: str, case: str) -> None:
    spoil, error, message = BAD_DATA[case]
    data = problem("gaussian")
    model = data.converged()
    before = state_of(model)
    with pytest.raises(error, match=message):
        UPDATES[update](model, *spoil(data.x, data.y))
    assert_untouched(model, before)


SUPPORT: dict[str, list[tuple[str, float, str]]] = {
    "bernoulli": [
        ("labels of the other kind", -1.0, r"-1 .*BernoulliLikelihood.* 0/1 with \(y \+ 1\) / 2"),
        ("a fraction", 0.5, "labels must be 0 or 1"),
        ("another class", 2.0, "labels must be 0 or 1"),
    ],
    "poisson": [("negative", -1.0, "PoissonLikelihood"), ("a fraction", 1.5, "PoissonLikelihood")],
    "negative_binomial": [("negative", -2.0, "NegativeBinomialLikelihood")],
    "beta": [
        ("at the edge", 0.0, "strictly between 0 and 1"),
        ("at the other edge", 1.0, "strictly between 0 and 1"),
        ("outside", 1.2, "BetaLikelihood"),
    ],
    "binomial": [
        ("more than the total", 9.0, "BinomialLikelihood"),
        ("negative", -1.0, "Binomial"),
    ],
    "ordinal": [("too large", 4.0, "OrdinalLikelihood"), ("a fraction", 0.5, "OrdinalLikelihood")],
    "softmax": [("too large", 3.0, "SoftmaxLikelihood"), ("negative", -1.0, "SoftmaxLikelihood")],
}


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        pytest.param(name, value, message, id=f"{name}: {kind}")
        for name, cases in SUPPORT.items()
        for kind, value, message in cases
    ],
)
@pytest.mark.parametrize("update", UPDATES)
def test_impossible_observations(update: str, name: str, value: float, message: str) -> None:
    data = problem(name)
    model = data.converged()
    before = state_of(model)
    with pytest.raises(ValueError, match=f"targets: .*{message}"):
        UPDATES[update](model, data.x, with_nan(data.y.double(), value), **data.arguments)
    assert_untouched(model, before)


@pytest.mark.parametrize("name", list(CASES))
def test_possible_observations_pass(name: str) -> None:
    data = problem(name)
    check_targets(data.y, data.x, data.likelihood, **data.arguments)
    assert data.converged().variational_strategy.dual_lam.any()


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *[("bernoulli", torch.bool), ("bernoulli", torch.long), ("ordinal", torch.long)],
        *[("softmax", torch.long), ("softmax", torch.int32), ("poisson", torch.long)],
    ],
)
def test_labels_of_any_dtype(name: str, dtype: torch.dtype) -> None:
    x, y, case = make_inputs(8, 2), torch.arange(8) % 2, CASES[name]
    models = [GP(x[:4], case.make(), num_latents=case.num_latents).eval() for _ in range(2)]
    for model, targets in zip(models, (y.to(dtype), y.double()), strict=True):
        model.variational_strategy.converge(x, targets)
    assert torch.equal(models[0](x).mean, models[1](x).mean)


@pytest.mark.filterwarnings("ignore:GaussianLikelihoodWithMissingObs:DeprecationWarning")
def test_missing_targets_pass_where_they_have_a_meaning() -> None:
    data = problem("gaussian")
    y = with_nan(data.y)
    model = data.model().eval()
    model.likelihood = GaussianLikelihoodWithMissingObs().initialize(noise=0.2)
    model.variational_strategy.converge(data.x, y)
    observed = y.isfinite()
    expected = data.model().eval()
    expected.variational_strategy.converge(data.x[observed], y[observed])
    torch.testing.assert_close(model(data.test).mean, expected(data.test).mean)


def fails(call: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize("rho", [0.0, -0.5, 1.5, float("nan")])
@pytest.mark.parametrize("update", ["step", "converge"])
def test_step_size(update: str, rho: float) -> None:
    data = problem("bernoulli")
    model = data.converged()
    before = state_of(model)
    with pytest.raises(ValueError, match=r"rho: expected a step size in \(0, 1\]"):
        UPDATES[update](model, data.x, data.y, rho=rho)
    assert_untouched(model, before)


@pytest.mark.parametrize("update", UPDATES)
def test_likelihood(update: str) -> None:
    data = problem("gaussian")
    model, several = GP(data.Z), GP(data.Z, num_latents=3)
    act = UPDATES[update]
    fails(lambda: act(model, data.x, data.y), ValueError, "likelihood: pass one")
    for each, wrong in ((model, softmax()), (several, GaussianLikelihood())):
        before = state_of(each)
        fails(
            lambda each=each, wrong=wrong: act(each, data.x, data.y, likelihood=wrong),
            ValueError,
            f"likelihood: {type(wrong).__name__} .* num_latents=",
        )
        assert_untouched(each, before)


@pytest.mark.parametrize("update", UPDATES)
def test_noise_of_other_points(update: str) -> None:
    data = problem("fixed_noise")
    model = data.converged()
    model.likelihood.noise_covar.noise = data.arguments["noise"]
    before = state_of(model)
    with pytest.raises(ValueError, match="noise: the likelihood has the noise of 30 points"):
        UPDATES[update](model, data.x[:5], data.y[:5])
    assert_untouched(model, before)


BAD_POINTS: dict[str, tuple[Any, type, str]] = {
    "a list": ([[0.0, 0.0]], TypeError, "torch.Tensor"),
    "integers": (torch.zeros(2, 2, dtype=torch.long), TypeError, "torch.float64"),
    "none": (torch.zeros(0, 2), ValueError, "at least one point"),
    "no columns": (torch.zeros(3, 0), ValueError, "at least one point"),
    "a vector": (torch.zeros(3), ValueError, "shape"),
    "NaN": (torch.full((3, 2), torch.nan), ValueError, "NaN"),
    "inf": (torch.full((3, 2), torch.inf), ValueError, "NaN or infinite"),
}


@pytest.mark.parametrize("case", BAD_POINTS)
def test_bad_inducing_points(case: str) -> None:
    points, error, message = BAD_POINTS[case]
    message = f"inducing_points: .*{message}"
    fails(lambda: GP(points), error, message)
    fails(lambda: check_inducing_points(points), error, message)
    model = problem("gaussian").converged()
    before = state_of(model)
    fails(lambda: model.variational_strategy.set_inducing_points(points), error, message)
    fails(
        lambda: model.variational_strategy.set_inducing_points(torch.rand(3, 5)),
        ValueError,
        "inducing_points: expected shape ... x n x 2",
    )
    assert_untouched(model, before)


def test_number_of_latents() -> None:
    fails(lambda: GP(make_inputs(3, 2), num_latents=0), ValueError, "num_latents: .* at least 1")


@pytest.mark.parametrize("training", [True, False])
def test_test_inputs(training: bool) -> None:
    model = problem("gaussian").converged().train(training)
    fails(lambda: model(make_inputs(4, 3)), ValueError, "x: expected shape ... x n x 2")


@pytest.mark.filterwarnings("ignore::linear_operator.utils.warnings.NumericalWarning")
def test_overflow_changes_nothing() -> None:
    data = problem("gaussian")
    model = data.converged()
    model.likelihood.noise = 1e-4
    before = state_of(model)
    with pytest.raises(FloatingPointError, match="nothing has been changed"):
        model.variational_strategy.converge(data.x, torch.full((30,), 1e307))
    assert_untouched(model, before)


def test_checks_take_what_is_right() -> None:
    x = make_inputs(4, 3, 2)
    check_inputs(x)
    check_inputs(x, 2)
    check_inputs(x[..., :0, :], 2)
    check_inducing_points(x)
    check_targets(torch.zeros(4, 3), x, GaussianLikelihood())
    check_targets(torch.zeros(5, 1, 3), x, GaussianLikelihood())
    check_targets(torch.zeros(0), x[0, :0], BernoulliLikelihood())
    assert GP(x).variational_strategy.batch_shape == (4,)

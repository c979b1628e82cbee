"""What is refused at the door, and what is let in and used to fail later."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from botorch.exceptions.warnings import InputDataWarning
from botorch.fit import fit_gpytorch_mll
from botorch.models.transforms import Normalize, Standardize
from botorch.sampling import SobolQMCNormalSampler
from gpytorch.likelihoods import BernoulliLikelihood, PoissonLikelihood, StudentTLikelihood

from seqgp import BinomialLikelihood, DualELBO, SequentialGP
from tests.helpers import CASES, assert_close, make_inputs, make_kernel
from tests.models.helpers import assert_same, conditioning, data, totals

pytestmark = pytest.mark.usefixtures("float64")
all_likelihoods = pytest.mark.parametrize("name", list(CASES))


def plain(**kwargs: Any) -> SequentialGP:
    X = make_inputs(10, 2).double()
    return SequentialGP(X, X[:, :1], **{"covar_module": make_kernel().double(), **kwargs})


# -------------------------------------------------------------------- nothing at all


@all_likelihoods
def test_no_observations_change_nothing(name: str) -> None:
    """Nor do they fail, whatever is done with them."""
    train, test = data(name), make_inputs(5, 2)
    model = train.model()
    empty = {key: value[:0] for key, value in train.arguments.items()}
    none = conditioning(empty)
    X, Y = train.X[:0], train.Y[:0]
    expected = model.posterior(test)
    record = model.update(X, Y, learn=False, **none)
    assert record.num_new == 0
    model.forget(X, Y, **none)
    assert model.leverage(X, Y, **none).shape == (0,)
    assert_same(model.posterior(test), expected)
    conditioned = model.condition_on_observations(X, Y, **none)
    assert_same(conditioned.posterior(test), expected)
    observed = model.posterior(X, observation_noise=True, **totals(name, 0))
    assert observed.mean.shape == observed.variance.shape == (0, 1)
    density = model.log_predictive_density(X, Y.squeeze(-1), **empty)
    assert density.shape == (0,)


def test_noise_that_is_not_known() -> None:
    """Of a model of fixed noise that has no observations yet."""
    X = make_inputs(4, 2)
    none = X[:0, :1]
    model = SequentialGP(X[:0], none, none, covar_module=make_kernel(), inducing_points=X)
    assert model.posterior(X).variance.isfinite().all()
    with pytest.raises(ValueError, match=r"noise: the model has no observations yet"):
        model.posterior(X, observation_noise=True)
    with pytest.raises(ValueError, match="noise: the model has no observations yet"):
        model.condition_on_observations(X, X[:, :1])
    noise = torch.full((4, 1), 0.3)
    variance = model.posterior(X, observation_noise=noise).variance
    assert_close(variance, model.posterior(X).variance + 0.3, 1e-9)
    assert (
        model.condition_on_observations(X, X[:, :1], noise=noise).posterior(X).mean.abs().max() > 0
    )


# -------------------------------------------------------------------- numbers that are too large


def test_observations_that_overflow() -> None:
    X = make_inputs(8, 2)
    Y = X.sum(-1, keepdim=True)
    for dtype, scale in ((torch.float64, 1e300), (torch.float32, 1e30)):
        for transform in ({}, {"outcome_transform": Standardize(1)}):
            with pytest.raises(ValueError, match="train_Y: its mean or its standard deviation"):
                SequentialGP(X.to(dtype), scale * Y.to(dtype), **transform)  # type: ignore[arg-type]
        with pytest.raises(FloatingPointError, match="train_Y: the bound is not finite"):
            SequentialGP(
                X.to(dtype),
                scale * Y.to(dtype),
                covar_module=make_kernel().to(dtype),
                outcome_transform=None,
            )
        model = SequentialGP(X.to(dtype), Y.to(dtype), covar_module=make_kernel().to(dtype))
        expected = model.posterior(X.to(dtype))
        for learn in (True, False):
            with pytest.raises(FloatingPointError, match=r"[Nn]othing has been changed"):
                model.update(X.to(dtype), scale * Y.to(dtype), learn=learn, steps=2)
        assert model.num_data == 8
        assert_same(model.posterior(X.to(dtype)), expected, tol=0)


# -------------------------------------------------------------------- tensors of other kinds


TENSORS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], str]] = {
    "sparse": (torch.Tensor.to_sparse, "expected a dense tensor.*to_dense"),
    "complex": (lambda t: t + 1j, "expected real numbers, got torch.complex128"),
    "meta": (lambda t: t.to("meta"), "expected numbers, got a tensor on the meta device"),
}


@pytest.mark.parametrize("kind", list(TENSORS))
def test_tensors_of_other_kinds(kind: str) -> None:
    change, message = TENSORS[kind]
    X = make_inputs(10, 2)
    Y, model, sampler = X[:, :1], plain(), SobolQMCNormalSampler(torch.Size([2]))
    wrong: dict[str, Callable[[], Any]] = {
        "train_X": lambda: SequentialGP(change(X), Y),
        "train_Y": lambda: SequentialGP(X, change(Y)),
        "train_Yvar": lambda: SequentialGP(X, Y, change(Y)),
        "X": lambda: model.posterior(change(X)),
        "X ": lambda: model.update(change(X), Y),
        "X  ": lambda: model.condition_on_observations(change(X), Y),
        "X   ": lambda: model.fantasize(change(X), sampler),
        "X    ": lambda: model.log_predictive_density(change(X), Y.squeeze(-1)),
        "inputs": lambda: model.get_fantasy_model(change(X), Y.squeeze(-1)),
        "Y": lambda: model.update(X, change(Y)),
        "Y ": lambda: model.condition_on_observations(X, change(Y)),
        "observation_noise": lambda: model.posterior(X, observation_noise=change(Y)),
        "noise": lambda: plain(train_Yvar=Y).update(X, Y, noise=change(Y)),
    }
    for name, call in wrong.items():
        with pytest.raises((TypeError, ValueError), match=f"{name.strip()}: {message}"):
            call()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int64])
def test_models_are_of_32_or_64_bits(dtype: torch.dtype) -> None:
    X = torch.arange(10).reshape(5, 2)
    with pytest.raises(TypeError, match=r"train_X: expected torch.float64 or torch.float32"):
        SequentialGP(X.to(dtype), X[:, :1].to(dtype))


def test_graphs_stay_outside() -> None:
    """Inputs, observations, noise and arguments that require gradients are learnt as numbers."""
    X, noise = make_inputs(10, 2).requires_grad_(), torch.full((10, 1), 0.1, requires_grad=True)
    Y, counts = X.sum(-1, keepdim=True), torch.full((10,), 5.0, requires_grad=True)
    gaussian = SequentialGP(X, Y, noise, input_transform=Normalize(2), covar_module=make_kernel())
    gaussian.update(2 * X, 2 * Y, noise=2 * noise, learn=False)
    binomial = SequentialGP(
        X,
        Y.round(),
        likelihood=BinomialLikelihood(),
        covar_module=make_kernel(),
        likelihood_arguments={"total_count": counts},
    )
    binomial.update(X, Y.round(), total_count=2 * counts, learn=False)
    for model in (gaussian, binomial):
        held = model.stream.observations
        tensors = [held.inputs, held.targets, *held.arguments.values(), *model.buffers()]
        tensors += [
            t for m in model.modules() for t in vars(m).values() if isinstance(t, torch.Tensor)
        ]
        assert not any(tensor.requires_grad for tensor in tensors)


# -------------------------------------------------------------------- options


NOISE = [
    (-torch.ones(10, 1), ValueError, "observation_noise: expected variances, got -1"),
    (torch.full((10, 1), torch.nan), ValueError, "observation_noise: expected finite numbers"),
    (torch.ones(3, 1), ValueError, r"observation_noise: expected a shape that broadcasts to \(10"),
    ("yes", TypeError, "observation_noise: expected True, False, or a tensor"),
    (0.3, TypeError, "observation_noise: expected True, False, or a tensor"),
]


@pytest.mark.parametrize(("noise", "error", "message"), NOISE)
def test_observation_noise(noise: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        plain().posterior(make_inputs(10, 2), observation_noise=noise)


OPTIONS: list[tuple[str, Any, type[Exception]]] = [
    ("batch_size", 1.5, TypeError),
    ("batch_size", 0, ValueError),
    ("epochs", 1.5, TypeError),
    ("rounds", None, TypeError),
    ("learning_rate", torch.nan, ValueError),
    ("rho", "a half", TypeError),
    ("rho", 2.0, ValueError),
    ("progress", "no", TypeError),
]


@pytest.mark.parametrize(("name", "value", "error"), OPTIONS)
def test_options_of_a_fit(name: str, value: Any, error: type[Exception]) -> None:
    model = plain()
    with pytest.raises(error, match=f"{name}: expected"):
        fit_gpytorch_mll(DualELBO(model.likelihood, model), **{name: value})


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("tol", torch.nan, ValueError),
        ("tol", -1.0, ValueError),
        ("tol", "small", TypeError),
        ("max_steps", 1.5, TypeError),
        ("max_steps", 0, ValueError),
    ],
)
def test_options_of_iterations(name: str, value: Any, error: type[Exception]) -> None:
    model, X = plain(), make_inputs(3, 2)
    with pytest.raises(error, match=f"{name}: expected"):
        model.refresh(**{name: value})
    with pytest.raises(error, match=f"{name}: expected"):
        model.condition_on_observations(X, X[:, :1], **{name: value})


def test_flags_are_true_or_false() -> None:
    X = make_inputs(3, 2)
    with pytest.raises(TypeError, match="fixed_inducing: expected True or False, got 'no'"):
        plain().condition_on_observations(X, X[:, :1], fixed_inducing="no")
    with pytest.raises(TypeError, match="learn_inducing_points: expected True or False"):
        plain(learn_inducing_points="no")
    with pytest.raises(TypeError, match="inducing_points: expected a tensor or a whole number"):
        plain(inducing_points=True)


# -------------------------------------------------------------------- scales


LIKELIHOODS = {
    "gaussian": None,
    "bernoulli": BernoulliLikelihood,
    "poisson": PoissonLikelihood,
    "student": StudentTLikelihood,
}


@pytest.mark.parametrize("name", list(LIKELIHOODS))
def test_inputs_far_from_the_unit_cube(name: str) -> None:
    """BoTorch's warning, for every likelihood; none if they are scaled, or the kernel is given."""
    X = make_inputs(10, 2)
    X = (X - X.amin(0)) / (X.amax(0) - X.amin(0))
    Y, make = (X[:, :1] > 0.5).to(X), LIKELIHOODS[name]
    kwargs: dict[str, Any] = {} if make is None else {"likelihood": make()}
    with pytest.warns(InputDataWarning, match="not contained to the unit cube"):
        SequentialGP(1000 * X, Y, **kwargs)
    SequentialGP(X, Y, **kwargs)
    SequentialGP(1000 * X, Y, input_transform=Normalize(2), **kwargs)
    SequentialGP(1000 * X, Y, covar_module=make_kernel(), **kwargs)
    functionals = {"coefficients": torch.tensor([[1.0, -1.0]]).expand(5, 2), **kwargs}
    with pytest.warns(InputDataWarning, match="not contained to the unit cube"):
        SequentialGP(1000 * X.reshape(5, 2, 2), Y[:5], **functionals)


@pytest.mark.parametrize("name", ["gaussian", "student"])
def test_observations_that_are_not_standardised(name: str) -> None:
    """If the default, which would have done it, has been switched off."""
    X, make = make_inputs(10, 2), LIKELIHOODS[name]
    kwargs: dict[str, Any] = {} if make is None else {"likelihood": make()}
    with pytest.warns(InputDataWarning, match="not standardized"):
        SequentialGP(X, 100 + X[:, :1], outcome_transform=None, **kwargs)

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from botorch.acquisition import qNoisyExpectedImprovement
from botorch.acquisition.objective import ScalarizedPosteriorTransform
from botorch.acquisition.risk_measures import VaR
from botorch.fit import fit_gpytorch_mll
from botorch.models import SingleTaskGP
from botorch.models.transforms import ChainedInputTransform, Log, Normalize, Standardize, Warp
from botorch.models.transforms.input import (
    AppendFeatures,
    FilterFeatures,
    InputPerturbation,
    InputTransform,
)
from botorch.models.transforms.outcome import ChainedOutcomeTransform, OutcomeTransform
from botorch.posteriors import TransformedPosterior
from botorch.sampling import SobolQMCNormalSampler
from gpytorch.priors import LogNormalPrior
from torch import Tensor

from seqgp import DualELBO, SequentialGP
from tests.helpers import (
    CASES,
    assert_close,
    assert_same_posterior,
    latent,
    make_inputs,
    make_kernel,
    make_mean,
)
from tests.models.helpers import assert_same, conditioning, data, gaussian_likelihood

pytestmark = pytest.mark.usefixtures("float64")


def warp() -> Warp:
    transform = Warp(d=2, indices=[0, 1], concentration0_prior=LogNormalPrior(0.0, 0.75**0.5))
    transform._set_concentration(0, torch.tensor([0.6, 1.7]))
    return transform


INPUTS: dict[str, Callable[[], InputTransform | None]] = {
    "none": lambda: None,
    "normalize": lambda: Normalize(2),
    "warp": lambda: ChainedInputTransform(unit=Normalize(2, bounds=bounds()), warp=warp()),
    "perturb": lambda: InputPerturbation(torch.tensor([[0.0, 0.0], [0.1, -0.1]])),
}
OUTCOMES: dict[str, Callable[[], OutcomeTransform | None]] = {
    "none": lambda: None,
    "standardize": lambda: Standardize(1),
    "log": Log,
    "both": lambda: ChainedOutcomeTransform(log=Log(), standardize=Standardize(1)),
}
input_transforms = pytest.mark.parametrize("inputs", list(INPUTS))
outcome_transforms = pytest.mark.parametrize("outcomes", list(OUTCOMES))


def bounds() -> Tensor:
    return torch.tensor([[3.0, 3.0], [8.0, 8.0]])


def raw(*shape: int) -> Tensor:
    """Inputs that are not in the unit cube."""
    return 3 + 5 * make_inputs(*shape)


def positive(X: Tensor) -> Tensor:
    return latent(0.2 * (X - 3)).exp().unsqueeze(-1)


def both(inputs: str, outcomes: str) -> tuple[SequentialGP, SingleTaskGP]:
    """The same Gaussian model twice, with an inducing point at each input."""
    X = raw(12, 2)
    arguments: dict[str, Any] = {
        "input_transform": INPUTS[inputs](),
        "outcome_transform": OUTCOMES[outcomes](),
        "likelihood": gaussian_likelihood(),
        "covar_module": make_kernel(lengthscale=2.0 if inputs in ("none", "perturb") else 0.4),
        "mean_module": make_mean(),
    }
    ours = SequentialGP(X, positive(X), **copy.deepcopy(arguments))
    return ours, SingleTaskGP(X, positive(X), **arguments).eval()


@input_transforms
@outcome_transforms
def test_posterior_is_that_of_botorch(inputs: str, outcomes: str) -> None:
    ours, exact = both(inputs, outcomes)
    X = raw(4, 3, 2)
    assert_same(ours.posterior(X), exact.posterior(X))
    assert isinstance(ours.posterior(X), TransformedPosterior) == (outcomes in ("log", "both"))


@pytest.mark.parametrize("inputs", ["none", "normalize", "warp"])  # not one-to-many
@outcome_transforms
def test_conditioning_is_that_of_botorch(inputs: str, outcomes: str) -> None:
    ours, exact = both(inputs, outcomes)
    test, X = raw(3, 2), raw(2, 2)
    exact.posterior(test)  # fills the caches that it is conditioned with
    new = (X, positive(X))
    assert_same(*(m.condition_on_observations(*new).posterior(test) for m in (ours, exact)))


@input_transforms
@outcome_transforms
def test_fantasies_are_those_of_botorch(inputs: str, outcomes: str) -> None:
    ours, exact = both(inputs, outcomes)
    X, test = raw(3, 2, 2), raw(4, 2)
    fantasies = []
    for model in (ours, exact):
        sampler = SobolQMCNormalSampler(torch.Size([5]), seed=0)
        fantasies.append(model.fantasize(X, sampler).posterior(test))
    assert_same(*fantasies)
    assert fantasies[0].mean.shape[:2] == (5, 3)


def test_perturbed_in_eval_mode_only() -> None:
    model, _ = both("perturb", "none")
    X = raw(4, 2)
    assert_close(model.train()(X).mean, model.eval()(X).mean)
    assert model.posterior(X).mean.shape == (8, 1)


@pytest.mark.parametrize("inputs", [name for name in INPUTS if name != "perturb"])
def test_modes(inputs: str) -> None:
    """Raw inputs in train mode, transformed ones in eval mode."""
    model, _ = both(inputs, "none")
    X = raw(4, 2)
    transform = model.input_transform if inputs != "none" else torch.nn.Identity()
    expected = model.eval()(transform(X))
    assert_close(model.train()(X).mean, expected.mean)
    assert_close(model.train()(X).variance, expected.variance)
    assert_close(model.posterior(X).mean.squeeze(-1), expected.mean)


@pytest.mark.parametrize("name", list(CASES))
def test_transformed_by_hand(name: str) -> None:
    """A model with a transform is one without, of transformed inputs."""
    plain = data(name)
    X = 3 + 5 * plain.X
    transformed = plain._replace(X=X).model(input_transform=Normalize(2, bounds=bounds()))
    test = make_inputs(4, 2)
    model = plain.model()
    assert_same(transformed.posterior(3 + 5 * test), model.posterior(test))
    new = plain.Y[:2]
    arguments = conditioning({k: v[:2] for k, v in plain.arguments.items()})
    assert_same(
        transformed.condition_on_observations(X[:2] + 1, new, **arguments).posterior(3 + 5 * test),
        model.condition_on_observations(plain.X[:2] + 0.2, new, **arguments).posterior(test),
    )


@pytest.mark.parametrize("inputs", list(INPUTS))
def test_fit(inputs: str) -> None:
    model, _ = both(inputs, "standardize")
    mll = DualELBO(model.likelihood, model)
    mll.train()
    before = mll(model(*model.train_inputs), model.train_targets).item()
    fit_gpytorch_mll(mll, optimizer_kwargs={"options": {"maxiter": 3}})
    mll.train()
    assert mll(model(*model.train_inputs), model.train_targets).item() > before


def test_statistics_are_frozen() -> None:
    X = raw(12, 2)
    inputs, outcomes = Normalize(2), Standardize(1)
    model = SequentialGP(X, positive(X), input_transform=inputs, outcome_transform=outcomes)
    before = {k: v.clone() for k, v in model.state_dict().items() if "transform" in k}
    other = 10 * raw(5, 2)
    model.train()(other)
    model.eval().posterior(other)
    model.train().condition_on_observations(other, positive(X[:5]))
    model.eval().condition_on_observations(other, positive(X[:5]))
    model.fantasize(other, SobolQMCNormalSampler(torch.Size([2])))
    model.refresh()
    after = model.state_dict()
    assert before
    for key, value in before.items():
        assert torch.equal(after[key], value), key


def test_targets_are_stored_transformed_and_inputs_raw() -> None:
    X = raw(12, 2)
    model = SequentialGP(
        X, positive(X), input_transform=Normalize(2), outcome_transform=Standardize(1)
    )
    assert torch.equal(model.stream.observations.inputs, X)
    assert_close(model.train_targets.mean(), torch.zeros(()))
    assert_close(model.train_targets.std(), torch.ones(()))
    assert torch.equal(model.variational_strategy.inducing_points, model.input_transform(X))


def test_noise_variances_are_transformed() -> None:
    X = raw(12, 2)
    arguments = {"train_Yvar": 0.1 + torch.rand(12, 1), "covar_module": make_kernel(2.0)}
    models = [
        kind(X, 2 * positive(X), outcome_transform=Standardize(1), **copy.deepcopy(arguments))
        for kind in (SequentialGP, SingleTaskGP)
    ]
    assert_same(*(model.eval().posterior(raw(4, 2)) for model in models))


def test_posterior_transform_sees_raw_outcomes() -> None:
    model, _ = both("normalize", "standardize")
    X = raw(4, 2)
    transform = ScalarizedPosteriorTransform(torch.tensor([-2.0]), offset=1.0)
    scaled = model.posterior(X, posterior_transform=transform)
    assert_close(scaled.mean, 1 - 2 * model.posterior(X).mean)
    assert_close(scaled.variance, 4 * model.posterior(X).variance)


def test_shared_evaluation_of_a_transformed_model() -> None:
    """``model(x)`` of the strategy is that of the model in eval mode."""
    model = both("normalize", "none")[0].eval()
    X = model.input_transform(raw(4, 2))
    assert_same_posterior(model, model.variational_strategy(X), X)


@pytest.mark.filterwarnings("ignore:qNoisyExpectedImprovement has known numerical issues")
def test_risk_measure_of_environmental_variables() -> None:
    """The user chooses one input, `AppendFeatures` adds a set of values of the other."""
    X = make_inputs(12, 2)
    values = []
    for kind in (SequentialGP, SingleTaskGP):
        model = kind(
            X,
            positive(X),
            likelihood=gaussian_likelihood(),
            covar_module=make_kernel(),
            outcome_transform=None,
            input_transform=AppendFeatures(torch.linspace(0, 1, 4).unsqueeze(-1)),
        ).eval()
        test = torch.linspace(0, 1, 5).reshape(5, 1, 1)
        assert model.posterior(test).mean.shape == (5, 4, 1)
        acquisition = qNoisyExpectedImprovement(
            model,
            X[:3, :1],
            SobolQMCNormalSampler(torch.Size([16]), seed=0),
            objective=VaR(0.5, 4),
            prune_baseline=False,
        )
        values.append(acquisition(test))
    assert values[0].max() > 0
    assert_close(*values)


def test_observations_are_not_appended_to() -> None:
    X, test = make_inputs(12, 2), make_inputs(3, 1)
    features = AppendFeatures(torch.tensor([[0.2], [0.6]]))
    modules = {"covar_module": make_kernel(), "likelihood": gaussian_likelihood()}
    options = {**modules, "outcome_transform": None}
    model = SequentialGP(X, positive(X), input_transform=features, **copy.deepcopy(options))
    plain = SequentialGP(X, positive(X), **copy.deepcopy(options))
    both_values = features.eval()(test)
    new = X[:2] + 0.05, positive(X[:2])
    assert_same(model.posterior(test), plain.posterior(both_values))
    known, plainly = (m.condition_on_observations(*new) for m in (model, plain))
    assert_same(known.posterior(test), plainly.posterior(both_values))
    targets = new[1].squeeze(-1)
    assert_close(*(m.log_predictive_density(new[0], targets) for m in (model, plain)))
    for each in (model, plain):
        each.update(*new, learn=False)
    assert_same(model.posterior(test), plain.posterior(both_values))


def test_columns_that_do_not_fit() -> None:
    X = make_inputs(12, 2)
    model = SequentialGP(
        X,
        positive(X),
        covar_module=make_kernel(),
        outcome_transform=None,
        input_transform=AppendFeatures(torch.tensor([[0.2], [0.6]])),
    )
    with pytest.raises(ValueError, match="X: expected 2 inputs after the input transform"):
        model.posterior(X)
    with pytest.raises(ValueError, match=r"X: expected shape ... x n x 2, got \(3, 1\)"):
        model.condition_on_observations(X[:3, :1], positive(X[:3]))


def test_fewer_inputs_after_the_transform() -> None:
    X = make_inputs(12, 3)
    models = [
        kind(
            X,
            positive(X),
            likelihood=gaussian_likelihood(),
            covar_module=make_kernel(),
            outcome_transform=None,
            input_transform=FilterFeatures(torch.tensor([0, 2])),
        ).eval()
        for kind in (SequentialGP, SingleTaskGP)
    ]
    test, new = make_inputs(4, 3), make_inputs(2, 3)
    assert_same(*(model.posterior(test) for model in models))
    known = [model.condition_on_observations(new, positive(new)) for model in models]
    assert_same(*(model.posterior(test) for model in known))
    expected = models[0].condition_on_observations(new, positive(new), fixed_inducing=True)
    models[0].update(new, positive(new), learn=False, inducing="fixed")
    assert_same(models[0].posterior(test), expected.posterior(test))

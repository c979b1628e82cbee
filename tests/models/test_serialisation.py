from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from botorch.fit import fit_gpytorch_mll
from botorch.models.transforms import Normalize, Standardize
from botorch.sampling import SobolQMCNormalSampler
from botorch.utils.datasets import SupervisedDataset
from gpytorch.likelihoods import BernoulliLikelihood

from seqgp import DualELBO, SequentialGP
from tests.helpers import CASES, assert_close, make_inputs, make_kernel
from tests.models.helpers import assert_same, data, observe, pair

pytestmark = pytest.mark.usefixtures("float64")
all_likelihoods = pytest.mark.parametrize("name", list(CASES))


def by_pickle(model: Any) -> Any:
    return pickle.loads(pickle.dumps(model))


def by_torch(model: Any) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": by_pickle,
    "torch": by_torch,
}
copies = pytest.mark.parametrize("make_copy", list(COPIES.values()), ids=list(COPIES))


# -------------------------------------------------------------------- copies


@all_likelihoods
@copies
def test_copies(name: str, make_copy: Callable[[Any], Any]) -> None:
    train, X = data(name), make_inputs(5, 2)
    model = train.model(inducing_points=5, input_transform=Normalize(2))
    model.posterior(X)  # with whatever is cached
    new = make_copy(model)
    assert_same(new.posterior(X), model.posterior(X), tol=1e-12)
    assert torch.equal(new.train_targets, model.train_targets)
    # The copy has a life of its own.
    before = model.posterior(X)
    for parameter in new.parameters():
        parameter.data.add_(0.1)
    new.refresh()
    assert not torch.allclose(new.posterior(X).mean, before.mean)
    assert_same(model.posterior(X), before, tol=1e-12)


@copies
def test_copies_of_conditioned_models(make_copy: Callable[[Any], Any]) -> None:
    model, X = data("bernoulli").model(), make_inputs(5, 2)
    fantasies = model.fantasize(make_inputs(4, 2, 2), SobolQMCNormalSampler(torch.Size([3])))
    new = make_copy(fantasies)
    assert new.batch_shape == (3, 4)
    assert_same(new.posterior(X), fantasies.posterior(X), tol=1e-12)


def test_copies_of_conditioned_models_with_gradients() -> None:
    """Candidates that require gradients are in a fantasy model: copies are detached from them."""
    model, X = data("bernoulli").model(), make_inputs(4, 2, 2).requires_grad_()
    fantasies = model.fantasize(X, SobolQMCNormalSampler(torch.Size([3])))
    new = copy.deepcopy(fantasies)
    test = make_inputs(5, 2)
    assert_same(new.posterior(test), fantasies.posterior(test), tol=1e-12)


# -------------------------------------------------------------------- state dictionaries


@all_likelihoods
@pytest.mark.parametrize("keep_transforms", [True, False])
def test_state_is_the_posterior(name: str, keep_transforms: bool) -> None:
    """All that a posterior needs is in the state, inducing points of another number included."""
    train, X = data(name), make_inputs(5, 2)
    model = train.model(covar_module=make_kernel(0.2, 0.7), inducing_points=7)
    other = train.model(inducing_points=4)
    assert not torch.allclose(other.posterior(X).mean, model.posterior(X).mean)
    other.load_state_dict(model.state_dict(), keep_transforms=keep_transforms)
    assert_same(other.posterior(X), model.posterior(X), tol=1e-12)
    assert other.variational_strategy.inducing_points.shape == (7, 2)
    other.refresh()  # it still learns
    assert_same(other.posterior(X), model.posterior(X))


def test_state_in_other_precision() -> None:
    model, X = data("poisson").model(), make_inputs(5, 2)
    other = data("poisson").model().float()
    other.load_state_dict(model.state_dict())
    assert other.posterior(X.float()).mean.dtype == torch.float32
    assert_same(other.posterior(X.float()), model.posterior(X), tol=1e-3)


def test_strict_loading() -> None:
    model = data("poisson").model()
    state = model.state_dict()
    del state["covar_module.raw_outputscale"]
    with pytest.raises(RuntimeError, match="Missing key"):
        model.load_state_dict(state)
    model.load_state_dict(state, strict=False)


@pytest.mark.parametrize("outputs", [1, 2])
@pytest.mark.parametrize("fixed_noise", [False, True], ids=["inferred", "fixed"])
@pytest.mark.parametrize("keep_transforms", [True, False])
def test_transforms_come_with_the_state(
    keep_transforms: bool, fixed_noise: bool, outputs: int
) -> None:
    """``keep_transforms`` says whether training targets are transformed anew, as in BoTorch."""
    X, test = 3 * make_inputs(12, 2), 3 * make_inputs(5, 2)
    Y = torch.stack([X.sum(-1).sin(), X[:, 0].cos()], -1)[:, :outputs]
    Yvar = 0.1 + torch.rand(Y.shape) if fixed_noise else None

    def make(index: slice) -> SequentialGP:
        return SequentialGP(
            X[index],
            Y[index],
            None if Yvar is None else Yvar[index],
            covar_module=make_kernel(),
            input_transform=Normalize(2),
            outcome_transform=Standardize(outputs),
        )

    model, other = make(slice(12)), make(slice(8))
    targets = other.train_targets.clone()
    other.load_state_dict(model.state_dict(), keep_transforms=keep_transforms)
    assert_same(other.posterior(test), model.posterior(test), tol=1e-12)
    assert torch.equal(other.input_transform.bounds, model.input_transform.bounds)
    expected = model.train_targets[..., :8] if keep_transforms else targets
    assert_close(other.train_targets, expected)
    if fixed_noise and keep_transforms:
        assert_close(other.likelihood.noise, model.likelihood.noise[..., :8])
        noise = model.likelihood_arguments["noise"]
        assert_close(other.likelihood_arguments["noise"], noise[..., :8])


def test_state_of_exact_models_can_be_loaded() -> None:
    """Hyperparameters have the names that they have in `SingleTaskGP`."""
    ours, exact = pair()
    exact.covar_module.base_kernel.lengthscale = 0.9
    exact.likelihood.noise = 0.05
    missing = ours.load_state_dict(exact.state_dict(), strict=False)
    assert missing is None or all("variational" in key for key in missing.missing_keys)
    ours.refresh()
    X = make_inputs(5, 2)
    # The noise is smaller, so jitter matters more.
    assert_same(ours.posterior(X), exact.eval().posterior(X), tol=1e-5)


def test_assign() -> None:
    model, X = data("bernoulli").model(), make_inputs(5, 2)
    other = data("bernoulli").model(covar_module=make_kernel(0.1)).float()
    other.load_state_dict(model.state_dict(), assign=True)
    assert_same(other.posterior(X), model.posterior(X), tol=1e-12)


# -------------------------------------------------------------------- precision and modes


@all_likelihoods
def test_change_of_precision(name: str) -> None:
    model, X = data(name).model(), make_inputs(5, 2)
    expected = model.posterior(X)
    single = copy.deepcopy(model).float()
    assert all(tensor.dtype == torch.float32 for tensor in single.parameters())
    assert single.train_inputs[0].dtype == single.train_targets.dtype == torch.float32
    assert single.posterior(X.float()).mean.dtype == torch.float32
    assert_same(single.posterior(X.float()), expected, tol=2e-3)
    double = single.double()
    assert double.posterior(X).mean.dtype == torch.float64
    double.refresh()
    assert_same(double.posterior(X), expected, tol=1e-5)  # parameters were rounded to float32


def test_precision_of_conditioned_models() -> None:
    model, X = data("bernoulli").model(), make_inputs(5, 2)
    fantasies = model.condition_on_observations(X[:2], torch.ones(2, 1))
    expected = fantasies.posterior(X)
    single = copy.deepcopy(fantasies).float().posterior(X.float())
    assert single.mean.dtype == torch.float32
    assert_same(single, expected, tol=2e-3)


@all_likelihoods
def test_modes(name: str) -> None:
    """In train mode variances come without covariances; the posterior is in eval mode."""
    model, X = data(name).model(input_transform=Normalize(2)), make_inputs(5, 2)
    expected = model.posterior(X)
    assert model.train() is model
    assert model.training
    assert model.likelihood.training
    trained = model(X)
    if CASES[name].num_latents is None:
        assert_close(trained.mean.unsqueeze(-1), expected.mean)
        assert_close(trained.variance.unsqueeze(-1), expected.variance)
    else:
        assert_close(trained.mean, expected.mean)
    posterior = model.posterior(X)
    assert not model.training
    assert_same(posterior, expected, tol=1e-12)
    assert torch.equal(model.train_inputs[0], data(name).X)


# -------------------------------------------------------------------- construct_inputs


def test_construct_inputs() -> None:
    X = make_inputs(10, 2)
    Y, _ = observe("bernoulli", X)
    dataset = SupervisedDataset(X, Y, feature_names=["a", "b"], outcome_names=["y"])
    inputs = SequentialGP.construct_inputs(dataset, likelihood=BernoulliLikelihood())
    model = SequentialGP(**inputs)
    assert isinstance(model.likelihood, BernoulliLikelihood)
    assert torch.equal(model.train_inputs[0], X)
    assert torch.equal(model.train_targets, Y.squeeze(-1))


def test_construct_inputs_with_noise() -> None:
    X = make_inputs(10, 2)
    Y = torch.randn(10, 1)
    Y, Yvar = (Y - Y.mean()) / Y.std(), torch.rand(10, 1)
    dataset = SupervisedDataset(X, Y, Yvar=Yvar, feature_names=["a", "b"], outcome_names=["y"])
    model = SequentialGP(**SequentialGP.construct_inputs(dataset))
    assert_close(model.likelihood.noise, Yvar.squeeze(-1))


def test_a_fitted_model_is_restored() -> None:
    model, X = data("poisson", n=15).model(inducing_points=6), make_inputs(5, 2)
    fit_gpytorch_mll(
        DualELBO(model.likelihood, model), optimizer_kwargs={"options": {"maxiter": 3}}
    )
    other = data("poisson", n=15).model(inducing_points=6)
    other.load_state_dict(model.state_dict())
    assert_same(other.posterior(X), model.posterior(X), tol=1e-12)

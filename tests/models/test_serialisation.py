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
from gpytorch.kernels import RBFKernel
from gpytorch.likelihoods import BernoulliLikelihood
from gpytorch.priors import LogNormalPrior

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
def test_state_of_the_same_data(name: str, keep_transforms: bool) -> None:
    """Hyperparameters and inducing points, also of another number, give the same posterior."""
    train, X = data(name), make_inputs(5, 2)
    model = train.model(covar_module=make_kernel(0.2, 0.7), inducing_points=7)
    other = train.model(inducing_points=4)
    assert not torch.allclose(other.posterior(X).mean, model.posterior(X).mean)
    other.load_state_dict(model.state_dict(), keep_transforms=keep_transforms)
    assert_same(other.posterior(X), model.posterior(X))
    assert other.variational_strategy.inducing_points.shape == (7, 2)


@all_likelihoods
@pytest.mark.parametrize("inducing", [None, 5], ids=["all inputs", "some"])
def test_newer_data_stay(name: str, inducing: int | None) -> None:
    """A state is that of hyperparameters: the posterior is that of the data that a model holds."""
    X = torch.cat([make_inputs(12, 2), 1 + make_inputs(6, 2)])  # where there were none before
    Y, _ = observe(name, X)
    train = data(name)._replace(X=X, Y=Y, arguments=CASES[name].arguments(18))
    first = {key: value[:12] for key, value in train.arguments.items()}
    old = train._replace(X=X[:12], Y=Y[:12], arguments=first).model(
        covar_module=make_kernel(0.3, 0.9), inducing_points=inducing
    )
    new = train.model(inducing_points=inducing and 12)
    Z = new.variational_strategy.inducing_points.detach().clone()
    expected = train.model(covar_module=make_kernel(0.3, 0.9), inducing_points=Z)
    new.load_state_dict(old.state_dict())
    assert_same(new.posterior(X), expected.posterior(X))
    assert new.num_data == 18


def stream(n: int = 20) -> SequentialGP:
    X = make_inputs(n, 2)
    model = SequentialGP(X[:10], X[:10].sum(-1, keepdim=True), covar_module=make_kernel())
    model.update(X[10:], X[10:].sum(-1, keepdim=True), memory=5, learn=False)
    return model


def test_streams_are_not_in_a_state() -> None:
    model, X = stream(), make_inputs(5, 2)
    other = SequentialGP(X, X[:, :1], covar_module=make_kernel())
    before = other.posterior(X)
    with pytest.raises(ValueError, match=r"from a stream.*seqgp\.load"):
        other.load_state_dict(model.state_dict())
    assert_same(other.posterior(X), before, tol=0)
    # The hyperparameters alone can be had, and a stream can have those of other models.
    learnt = {k: v for k, v in model.state_dict().items() if "variational" not in k}
    with pytest.raises(ValueError, match=r"outcome_transform\.means differs"):
        model.load_state_dict({**learnt, "outcome_transform.means": torch.zeros(1, 1)})
    other.load_state_dict(learnt)
    expected = model.posterior(X)
    model.load_state_dict(model.state_dict())
    assert_same(model.posterior(X), expected, tol=1e-9)
    learnt["covar_module.raw_outputscale"] += 0.5
    model.load_state_dict(learnt)
    changed = stream()
    changed.covar_module.raw_outputscale.data += 0.5
    changed.refresh()
    assert_same(model.posterior(X), changed.posterior(X), tol=1e-8)
    assert model.num_seen == 20


def test_without_data_there_is_the_prior() -> None:
    X = make_inputs(8, 2)
    model = SequentialGP(X, X[:, :1], covar_module=make_kernel(0.2))
    empty = SequentialGP(X[:0], X[:0, :1], covar_module=make_kernel(), inducing_points=X)
    with pytest.warns(UserWarning, match=r"predicts with its prior.*seqgp\.load"):
        empty.load_state_dict(model.state_dict())
    assert_close(empty.covar_module.base_kernel.lengthscale, torch.tensor([[0.2]]))
    variance = model.outcome_transform.stdvs.square() * 1.3
    assert_close(empty.posterior(X).variance, variance.expand(8, 1), 1e-7)  # jitter


def _without(state: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in state.items() if key != name}


MISFITS: dict[str, tuple[Callable[[dict[str, Any]], dict[str, Any]], str]] = {
    "missing": (lambda s: _without(s, "covar_module.raw_outputscale"), "Missing key"),
    "unexpected": (lambda s: {**s, "surprise": torch.zeros(1)}, "Unexpected key"),
    "unexpected of the strategy": (
        lambda s: {**s, "variational_strategy.surprise": torch.zeros(1)},
        "Unexpected key",
    ),
    "shape": (lambda s: {**s, "likelihood.noise_covar.raw_noise": torch.zeros(7)}, "size mismatch"),
    "columns": (lambda s: {**s, "variational_strategy.inducing_points": torch.rand(4, 9)}, "m x 2"),
    "dimensions": (lambda s: {**s, "variational_strategy.dual_B": torch.rand(4)}, "2 dimensions"),
    "sizes": (lambda s: {**s, "variational_strategy.dual_B": torch.rand(4, 3)}, "shape"),
    "no tensor": (lambda s: {**s, "variational_strategy.dual_B": "a"}, "got str"),
    "no points": (
        lambda s: {**s, "variational_strategy.inducing_points": torch.full((4, 2), torch.nan)},
        "not finite",
    ),
    "no number": (
        lambda s: {**s, "covar_module.raw_outputscale": torch.tensor(torch.nan)},
        "NaN|nan|finite",
    ),
}


@pytest.mark.parametrize("kind", list(MISFITS))
def test_a_state_that_does_not_fit_changes_nothing(kind: str) -> None:
    make, message = MISFITS[kind]
    X, transform = data("gaussian").X, Standardize(1)
    model = data("gaussian").model(inducing_points=6, outcome_transform=transform)
    other = data("gaussian").model(
        covar_module=make_kernel(0.9, 3.0), outcome_transform=Standardize(1), inducing_points=4
    )
    state = {k: v.clone() for k, v in model.state_dict().items()}
    expected, targets = model.posterior(X), model.train_targets.clone()
    bad = make({**other.state_dict(), "outcome_transform.means": torch.full((1, 1), 5.0)})
    with pytest.raises((RuntimeError, ValueError, FloatingPointError), match=message):
        model.load_state_dict(bad)
    assert state.keys() == model.state_dict().keys()
    assert all(torch.equal(state[k], v) for k, v in model.state_dict().items())
    assert torch.equal(model.train_targets, targets)
    assert_same(model.posterior(X), expected, tol=0)


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
    """Unless they are learnt from the data at hand, and so are the training targets."""
    X = 3 * make_inputs(12, 2)
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
    targets, fresh = other.train_targets.clone(), copy.deepcopy(other)
    model.covar_module.base_kernel.lengthscale = 0.9
    other.load_state_dict(model.state_dict(), keep_transforms=keep_transforms)
    source = model if keep_transforms else fresh
    assert torch.equal(other.input_transform.bounds, source.input_transform.bounds)
    if not keep_transforms:  # statistics of its own data, with the hyperparameters of the state
        fresh.covar_module.base_kernel.lengthscale = 0.9
        test = 3 * make_inputs(4, 2)
        assert_same(other.posterior(test), fresh.posterior(test))
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
    ours.load_state_dict(exact.state_dict())
    X = make_inputs(5, 2)
    # The noise is smaller, so jitter matters more.
    assert_same(ours.posterior(X), exact.eval().posterior(X), tol=1e-5)


@pytest.mark.parametrize("assign", [False, True])
def test_priors_come_with_the_state(assign: bool) -> None:
    """Those, too, whose distribution does not read its buffers (a log-normal one)."""
    X = make_inputs(6, 2)
    models = [
        SequentialGP(X, X[:, :1], covar_module=RBFKernel(lengthscale_prior=prior))
        for prior in (LogNormalPrior(1.2, 0.7), LogNormalPrior(-0.5, 0.3))
    ]
    models[1].load_state_dict(models[0].state_dict(), assign=assign)
    old, new = (model.covar_module.lengthscale_prior for model in models)
    value = torch.tensor([0.4, 1.0, 3.0])
    assert_close(new.log_prob(value), LogNormalPrior(1.2, 0.7).log_prob(value), 1e-6)
    assert_close(new.log_prob(value), old.log_prob(value), 1e-6)


def test_assign() -> None:
    model, X = data("bernoulli").model(), make_inputs(5, 2)
    other = data("bernoulli").model(covar_module=make_kernel(0.1)).float()
    other.load_state_dict(model.state_dict(), assign=True)
    assert other.train_targets.dtype == torch.float64
    # Its data have been rounded to float32.
    assert_same(other.posterior(X), model.posterior(X), tol=1e-5)


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
        mean = trained.mean[..., : CASES[name].num_outputs]
        if hasattr(model, "outcome_transform"):
            mean = model.outcome_transform.untransform(mean)[0]
        assert_close(mean, expected.mean)
    assert torch.equal(model.train_inputs[0], data(name).X)
    posterior = model.posterior(X)
    assert not model.training
    assert_same(posterior, expected, tol=1e-12)
    assert torch.equal(model.train_inputs[0], model.input_transform(data(name).X))


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
    assert_same(other.posterior(X), model.posterior(X))

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from botorch.exceptions.warnings import OptimizationWarning
from botorch.fit import fit_gpytorch_mll
from botorch.models import SingleTaskGP, SingleTaskVariationalGP
from botorch.models.transforms import Normalize, Warp
from botorch.models.utils.gpytorch_modules import get_covar_module_with_dim_scaled_prior
from botorch.optim.closures import get_loss_closure_with_grads
from botorch.optim.utils import get_parameters
from gpytorch.likelihoods import BernoulliLikelihood, LaplaceLikelihood, StudentTLikelihood
from gpytorch.means import ConstantMean
from gpytorch.mlls import ExactMarginalLogLikelihood, PredictiveLogLikelihood, VariationalELBO
from torch import Tensor

from seqgp import DualELBO, SequentialGP
from seqgp.models import fit as fit_module
from seqgp.streaming.memory import MemoryOptions
from tests.helpers import (
    CASES,
    assert_close,
    latent,
    make_inputs,
    make_kernel,
    make_mean,
    terminal,
    unscaled,
    with_same_expectations,
)
from tests.models.helpers import assert_same, data, gaussian_likelihood, observe, pair

pytestmark = pytest.mark.usefixtures("float64")


def value(mll: torch.nn.Module, model: SequentialGP) -> Tensor:
    """An objective at the training data, the sites converged; higher is better."""
    model.refresh()
    mll.train()
    with torch.no_grad():
        output = model(model.train_inputs[0])
        result = mll(output, model.train_targets, **model.likelihood_arguments)
    mll.eval()
    return result


def marginal_likelihood(model: SingleTaskGP, source: torch.nn.Module) -> Tensor:
    """The exact objective, with priors, at the hyperparameters of ``source``."""
    model = copy.deepcopy(model)
    model.load_state_dict(source.state_dict(), strict=False)
    mll = ExactMarginalLogLikelihood(model.likelihood, model).train()
    with torch.no_grad():
        return mll(model(*model.train_inputs), model.train_targets)


# -------------------------------------------------------------------- the optimum


@pytest.mark.parametrize(
    "kwargs", [{}, {"outputs": 2}, {"fixed_noise": True}, {"batch_shape": torch.Size([2])}], ids=str
)
def test_gaussian_reaches_the_exact_optimum(kwargs: dict[str, Any]) -> None:
    ours, exact = pair(n=20, **kwargs)
    start = marginal_likelihood(exact, exact)
    fit_gpytorch_mll(DualELBO(ours.likelihood, ours))
    fit_gpytorch_mll(ExactMarginalLogLikelihood(exact.likelihood, exact))
    reached, expected = (marginal_likelihood(exact, source) for source in (ours, exact))
    # Both optimisers are L-BFGS, which stops at a relative change of 2e-9 a step.
    assert (reached >= expected - 1e-5).all()
    assert (expected > start).all()


def test_default_priors_reach_the_exact_optimum() -> None:
    X = make_inputs(20, 2)
    Y = (6 * X[:, :1]).sin() + X[:, 1:]
    Y = (Y - Y.mean()) / Y.std()
    ours, exact = SequentialGP(X, Y), SingleTaskGP(X, Y)
    fit_gpytorch_mll(DualELBO(ours.likelihood, ours))
    fit_gpytorch_mll(ExactMarginalLogLikelihood(exact.likelihood, exact))
    reached, expected = (marginal_likelihood(exact, source) for source in (ours, exact))
    assert reached >= expected - 1e-5


@pytest.mark.parametrize("mll", [VariationalELBO, ExactMarginalLogLikelihood])
def test_objectives_agree(mll: Any) -> None:
    ours, _ = pair(n=15)
    expected = copy.deepcopy(ours)
    arguments = {"num_data": 15} if mll is VariationalELBO else {}
    fitted = fit_gpytorch_mll(mll(ours.likelihood, ours, **arguments))
    assert type(fitted) is mll
    assert fitted.model is ours
    fit_gpytorch_mll(DualELBO(expected.likelihood, expected))
    X = make_inputs(5, 2)
    assert_same(ours.posterior(X), expected.posterior(X), tol=1e-4)  # two L-BFGS runs


def test_other_bounds_improve() -> None:
    model = data("poisson", n=20).model(inducing_points=6)
    mll = PredictiveLogLikelihood(model.likelihood, model, num_data=20)
    before = value(mll, model)
    assert value(fit_gpytorch_mll(mll), model) > before


@pytest.mark.parametrize("name", ["bernoulli", "poisson", "negative_binomial"])
@pytest.mark.parametrize("m", [4, 10])
def test_bound_is_at_least_that_of_botorch(name: str, m: int) -> None:
    n, train = 10, data(name, n=10)
    same = with_same_expectations if name == "bernoulli" else copy.deepcopy
    modules = {
        "covar_module": get_covar_module_with_dim_scaled_prior(ard_num_dims=2),
        "mean_module": ConstantMean(),
        "inducing_points": train.X[:m],
        "learn_inducing_points": False,  # or else there are several local optima
    }

    def bound(likelihood: torch.nn.Module, model: torch.nn.Module) -> Tensor:
        mll = VariationalELBO(likelihood, model, n).train()
        with torch.no_grad():
            return mll(model(train.X), train.Y.squeeze(-1))

    peer = SingleTaskVariationalGP(
        train.X, train.Y, same(train.likelihood), **copy.deepcopy(modules)
    )
    fit_gpytorch_mll(VariationalELBO(peer.likelihood, peer.model, n))
    theirs = bound(peer.likelihood, peer.model)
    ours = train.model(**modules)
    fit_gpytorch_mll(DualELBO(ours.likelihood, ours))
    assert bound(same(ours.likelihood), ours) >= theirs - 1e-5  # where L-BFGS stops
    # At the peer's own hyperparameters, q is the best there is.
    for module, source in (
        (ours.covar_module, peer.model.covar_module),
        (ours.mean_module, peer.model.mean_module),
        (ours.likelihood, peer.likelihood),
    ):
        module.load_state_dict(source.state_dict())
    ours.refresh()
    assert bound(same(ours.likelihood), ours) >= theirs - 1e-9


def test_batches_are_fitted_independently() -> None:
    X = make_inputs(2, 15, 2)
    Y, _ = observe("bernoulli", X)

    def fitted(X: Tensor, Y: Tensor, shape: torch.Size) -> SequentialGP:
        model = SequentialGP(
            X,
            Y,
            likelihood=BernoulliLikelihood(),
            covar_module=get_covar_module_with_dim_scaled_prior(2, shape),
            mean_module=make_mean(batch_shape=shape),
        )
        fit_gpytorch_mll(DualELBO(model.likelihood, model))
        return model

    joint = fitted(X, Y, torch.Size([2]))
    bounds = value(DualELBO(joint.likelihood, joint), joint)
    for k in range(2):
        single = fitted(X[k], Y[k], torch.Size())
        assert_close(bounds[k], value(DualELBO(single.likelihood, single), single), 1e-5)


@pytest.mark.parametrize("name", list(CASES))
def test_every_likelihood_improves(name: str) -> None:
    model = data(name, n=15).model(inducing_points=6)
    mll = DualELBO(model.likelihood, model)
    before, hyperparameters = value(mll, model), dict(model.named_parameters())
    old = {key: parameter.detach().clone() for key, parameter in hyperparameters.items()}
    fit_gpytorch_mll(mll, optimizer_kwargs={"options": {"maxiter": 5}})
    assert value(mll, model) > before
    moved = {key for key, p in hyperparameters.items() if not torch.equal(p, old[key])}
    learnt = {key for key, p in hyperparameters.items() if p.requires_grad}
    assert moved - learnt == set()
    assert learnt - moved <= {"variational_strategy.inducing_points"}  # which are chosen, not moved


# -------------------------------------------------------------------- how it is done


def bernoulli(n: int = 40, **kwargs: Any) -> tuple[SequentialGP, DualELBO]:
    kernel = get_covar_module_with_dim_scaled_prior(ard_num_dims=2)
    model = data("bernoulli", n).model(
        **{"inducing_points": 8, "covar_module": kernel, "mean_module": ConstantMean(), **kwargs}
    )
    return model, DualELBO(model.likelihood, model)


@pytest.mark.parametrize("way", ["full batch", "minibatches", "closure"])
def test_the_model_is_left_ready(way: str) -> None:
    model, mll = bernoulli()
    before, kwargs = value(mll, model), {"optimizer_kwargs": {"options": {"maxiter": 10}}}
    if way == "minibatches":
        kwargs = {"batch_size": 16, "epochs": 5}
    elif way == "closure":
        kwargs = {"optimizer_kwargs": {"step_limit": 10}}
        kwargs["closure"] = get_loss_closure_with_grads(mll, get_parameters(mll, True))
    assert fit_gpytorch_mll(mll, **kwargs) is mll
    assert not any(module.training for module in mll.modules())
    posterior = model.posterior(make_inputs(5, 2))
    assert value(mll, model) > before
    model.refresh(tol=1e-12)
    assert_same(model.posterior(make_inputs(5, 2)), posterior)  # the sites had converged


def test_inducing_points_at_all_inputs_stay() -> None:
    model, mll = bernoulli(inducing_points=None)
    fit_gpytorch_mll(mll)
    assert torch.equal(model.variational_strategy.inducing_points, model.train_inputs[0])


@unscaled
def test_more_rounds_are_never_worse() -> None:
    """Inducing points are chosen anew for the hyperparameters that were found; the best is kept."""
    values = []
    for rounds in (1, 2, 4):
        X, Y = make_inputs(40, 2), latent(make_inputs(40, 2)).unsqueeze(-1)
        Y = Y + 0.1 * torch.sin(50 * Y)
        model = SequentialGP(X, Y, inducing_points=4, learn_inducing_points=False)
        mll = DualELBO(model.likelihood, model)
        fit_gpytorch_mll(mll, rounds=rounds)
        Z = model.variational_strategy.inducing_points
        assert all((z == X).all(-1).any() for z in Z)
        values.append(mll.with_priors(model.bound()[0], model.num_data).item())
    assert values[0] <= values[1] + 1e-6


@pytest.mark.parametrize("name", ["gaussian", "poisson"])
def test_so_many_and_no_more_inducing_points_are_moved_by_gradient(name: str) -> None:
    """The bound is that of moving them from where they were chosen, and higher than there."""
    values, train = {}, data(name, n=40)
    for learn in (None, False):
        model = train.model(inducing_points=4, learn_inducing_points=learn)
        mll = DualELBO(model.likelihood, model)
        fit_gpytorch_mll(mll)
        Z = model.variational_strategy.inducing_points
        assert Z.shape[-2] == 4
        assert not Z.requires_grad
        values[learn] = mll.with_priors(model.bound()[0], model.num_data).item()
    assert values[None] > values[False] + 1e-4


def test_given_inducing_points_stay_unless_they_are_learnt() -> None:
    for learn in (False, True):
        model, mll = bernoulli(inducing_points=make_inputs(6, 2), learn_inducing_points=learn)
        before = model.variational_strategy.inducing_points.clone()
        fit_gpytorch_mll(mll)
        assert torch.equal(model.variational_strategy.inducing_points, before) != learn


def test_nothing_to_learn() -> None:
    model, mll = bernoulli()
    model.requires_grad_(False)
    before = model.posterior(make_inputs(5, 2))
    fit_gpytorch_mll(mll)
    assert_same(model.posterior(make_inputs(5, 2)), before)


def test_maxiter() -> None:
    bounds = []
    for maxiter in (1, 4, 200):
        model, mll = bernoulli()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*ITERATIONS REACHED LIMIT", OptimizationWarning)
            fit_gpytorch_mll(mll, optimizer_kwargs={"options": {"maxiter": maxiter}})
        bounds.append(value(mll, model))
    assert bounds[0] < bounds[1] < bounds[2]


@pytest.mark.parametrize(
    ("kwargs", "unit"), [({}, "evaluations"), ({"batch_size": 16, "epochs": 2}, "steps")]
)
@pytest.mark.parametrize("progress", [True, False])
def test_progress(kwargs: dict[str, int], unit: str, progress: bool) -> None:
    with terminal() as stream:
        fit_gpytorch_mll(bernoulli()[1], progress=progress, **kwargs)
    shown = stream.getvalue()
    assert (f" {unit}" in shown) == progress
    assert ("6/6" in shown) == (progress and unit == "steps")  # 2 epochs of 3 minibatches


@pytest.mark.slow
def test_minibatches() -> None:
    model, mll = bernoulli(200)
    full, full_mll = bernoulli(200)
    start = value(mll, model)
    fit_gpytorch_mll(mll, batch_size=64, epochs=30)
    assert not any(module.training for module in mll.modules())
    fit_gpytorch_mll(full_mll)
    reached, best = value(mll, model), value(full_mll, full)
    assert reached > start + 0.8 * (best - start)


def test_minibatches_are_reproducible() -> None:
    models = []
    for seed in range(2):
        torch.manual_seed(seed)
        model, mll = bernoulli()
        fit_gpytorch_mll(mll, batch_size=16, epochs=2)
        models.append(model)
    assert_same(*(model.posterior(make_inputs(5, 2)) for model in models), tol=1e-12)


def test_minibatches_of_per_point_arguments() -> None:
    train = data("binomial", n=60)
    model = train.model(inducing_points=8)
    mll = DualELBO(model.likelihood, model)
    before = value(mll, model)
    fit_gpytorch_mll(mll, batch_size=25, epochs=10)
    assert value(mll, model) > before


def test_many_data_come_in_minibatches(monkeypatch: pytest.MonkeyPatch) -> None:
    _, mll = bernoulli(4097)
    monkeypatch.setattr(fit_module, "FULL_BATCH_ELEMENTS", 4096)
    with terminal() as stream:
        fit_gpytorch_mll(mll, epochs=1, progress=True)
    assert "5/5" in stream.getvalue()  # steps of 1024


def test_minibatches_stop_when_they_have_converged() -> None:
    """Twice as many epochs would not help; too few are a warning."""
    model, mll = bernoulli(200)
    fit_gpytorch_mll(mll, batch_size=50)
    found = value(mll, model)
    fit_gpytorch_mll(mll, batch_size=50, epochs=200)
    assert value(mll, model) < found + 0.01


def test_few_inducing_points_do_not_pass_a_fast_function_off_as_noise() -> None:
    """The initial kernel needs a dozen of them; the one that an exact GP finds needs more."""
    X = torch.rand(300, 1, generator=torch.Generator().manual_seed(0))
    noise = torch.randn(300, 1, generator=torch.Generator().manual_seed(1))
    Y = torch.sin(40 * X) + 0.1 * noise
    model = SequentialGP(X, Y, inducing_points=100)
    assert model.variational_strategy.inducing_points.shape[-2] < 20
    fit_gpytorch_mll(DualELBO(model.likelihood, model))
    exact = SingleTaskGP(X, Y)
    fit_gpytorch_mll(ExactMarginalLogLikelihood(exact.likelihood, exact))
    assert_close(model.covar_module.lengthscale, exact.covar_module.lengthscale, 1e-3)
    assert_close(model.likelihood.noise, exact.likelihood.noise, 1e-3)
    assert_close(model.posterior(X).mean, exact.posterior(X).mean, 1e-3)
    # Those that are not needed in the end are dropped.
    assert 20 < model.variational_strategy.inducing_points.shape[-2] < 90


# -------------------------------------------------------------------- learnable transforms


def test_warp_is_learnt() -> None:
    X = make_inputs(25, 1)
    Y = torch.sin(8 * X**3)
    transform = Warp(d=1, indices=[0])
    model = SequentialGP(
        X,
        Y,
        likelihood=gaussian_likelihood(0.05),
        covar_module=make_kernel(),
        mean_module=make_mean(),
        inducing_points=X,
        input_transform=transform,
    )
    mll = DualELBO(model.likelihood, model)
    before = value(mll, model)
    model.train()
    (-mll(model(X), model.train_targets)).backward()
    assert transform.concentration0.grad.abs() > 1e-3
    assert transform.concentration1.grad.abs() > 1e-3
    concentration = transform.concentration1.clone()
    fit_gpytorch_mll(mll)
    assert value(mll, model) > before
    assert (transform.concentration1 - concentration).abs() > 0.1


def test_gradient_of_warp_is_right() -> None:
    """Against finite differences: of the bound maximised over q."""
    X = make_inputs(12, 2)
    model = SequentialGP(
        X,
        observe("bernoulli", X)[0],
        likelihood=BernoulliLikelihood(),
        covar_module=make_kernel(),
        inducing_points=5,
        input_transform=Warp(d=2, indices=[0, 1]),
    )
    mll = DualELBO(model.likelihood, model)
    parameter = model.input_transform.concentration0

    def bound(shift: float) -> Tensor:
        with torch.no_grad():
            parameter[0] += shift
        result = value(mll, model)
        with torch.no_grad():
            parameter[0] -= shift
        return result

    numerical = (bound(1e-4) - bound(-1e-4)) / 2e-4
    model.refresh(tol=1e-10)
    mll.train()
    mll(model(X), model.train_targets).backward()
    assert_close(parameter.grad[0], numerical)


def test_statistics_are_frozen_while_fitting() -> None:
    X = 3 + 5 * make_inputs(20, 2)
    model = SequentialGP(
        X,
        (X.sum(-1, keepdim=True) > 11).to(X),
        likelihood=BernoulliLikelihood(),
        input_transform=Normalize(2),
    )
    bounds = model.input_transform.bounds.clone()
    fit_gpytorch_mll(DualELBO(model.likelihood, model), batch_size=5, epochs=2)
    assert torch.equal(model.input_transform.bounds, bounds)


@pytest.mark.slow
@unscaled
@pytest.mark.filterwarnings("ignore::linear_operator.utils.warnings.NumericalWarning")
@pytest.mark.parametrize("standardized", [False, True], ids=["raw", "standardized"])
@pytest.mark.parametrize("likelihood", [StudentTLikelihood, LaplaceLikelihood])
def test_noise_that_wants_to_be_zero(likelihood: Any, standardized: bool) -> None:
    """Data without noise: it ends at BoTorch's minimum, where the posterior is still right."""
    X = make_inputs(30, 2)
    Y = torch.sin(5 * X).sum(-1, keepdim=True)
    options = {} if standardized else {"outcome_transform": None}
    model = SequentialGP(X, Y, likelihood=likelihood(), **options)
    fit_gpytorch_mll(DualELBO(model.likelihood, model))
    expected = 1e-4 * model.train_targets.var()
    assert model.likelihood.noise.item() == pytest.approx(expected.item(), rel=1e-6)
    assert (model.posterior(X).mean - Y).abs().max() < 0.01


def test_a_model_without_data_of_its_own() -> None:
    """All of them folded: hyperparameters are fitted to the summary."""
    X = make_inputs(30, 2)
    model = SequentialGP(X, (X[:, :1] > 0.5).double(), likelihood=BernoulliLikelihood())
    model.update(X[:5], torch.ones(5, 1), memory=MemoryOptions(policy="none"), learn=False)
    assert model.memory.leverage.shape == (0,)
    fit_gpytorch_mll(DualELBO(model.likelihood, model))
    assert model.posterior(X).mean.isfinite().all()


def test_targets_that_the_likelihood_cannot_have_are_refused_at_the_door() -> None:
    model = data("bernoulli").model()
    before = model.train_targets.clone()
    with pytest.raises(ValueError, match="labels must be 0 or 1"):
        model.train_targets = model.train_targets - 1
    assert torch.equal(model.train_targets, before)

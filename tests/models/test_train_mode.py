"""Fitting by other doors than `fit_gpytorch_mll`."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from botorch.fit import fit_gpytorch_mll
from botorch.models import ModelListGP, SingleTaskGP
from botorch.models.transforms import Normalize
from botorch.models.transforms.input import Round
from botorch.optim.closures import get_loss_closure
from botorch.optim.fit import fit_gpytorch_mll_scipy, fit_gpytorch_mll_torch
from botorch.sampling import IIDNormalSampler
from botorch.sampling.pathwise import draw_matheron_paths
from botorch.utils.evaluation import compute_in_sample_model_fit_metric
from gpytorch.mlls import (
    ExactMarginalLogLikelihood,
    LeaveOneOutPseudoLikelihood,
    SumMarginalLogLikelihood,
    VariationalELBO,
)

from seqgp import DualELBO, SequentialGP
from tests.helpers import assert_close, make_inputs
from tests.models.helpers import assert_same, data, pair

pytestmark = pytest.mark.usefixtures("float64")


def both(few: bool = False, **kwargs: Any) -> tuple[SequentialGP, SingleTaskGP]:
    X = make_inputs(20, 2)
    Y = 100 + 50 * ((6 * X[:, :1]).sin() + X[:, 1:])
    ours = SequentialGP(X, Y, **kwargs, inducing_points=4 if few else None)
    return ours, SingleTaskGP(X, Y, **kwargs)


@pytest.mark.parametrize(
    "kwargs", [{}, {"outputs": 2}, {"fixed_noise": True}, {"batch_shape": torch.Size([2])}], ids=str
)
@pytest.mark.parametrize("objective", [ExactMarginalLogLikelihood, DualELBO])
def test_losses_are_those_of_the_exact_model(objective: Any, kwargs: dict[str, Any]) -> None:
    """The values, and the gradients of all hyperparameters."""
    ours, exact = pair(n=15, **kwargs)
    losses = [
        get_loss_closure(mll.train())()
        for mll in (
            objective(ours.likelihood, ours),
            ExactMarginalLogLikelihood(exact.likelihood, exact),
        )
    ]
    assert_close(losses[0], losses[1], 1e-6)
    for loss in losses:
        loss.sum().backward()
    theirs = dict(exact.named_parameters())
    for name, parameter in ours.named_parameters():
        if name in theirs:
            assert_close(parameter.grad, theirs[name].grad, 1e-5)


@pytest.mark.parametrize("objective", [ExactMarginalLogLikelihood, DualELBO])
def test_scipy(objective: Any) -> None:
    ours, exact = both(input_transform=Normalize(2))
    fit_gpytorch_mll_scipy(objective(ours.likelihood, ours).train())
    fit_gpytorch_mll_scipy(ExactMarginalLogLikelihood(exact.likelihood, exact).train())
    assert_close(ours.covar_module.lengthscale, exact.covar_module.lengthscale, 2e-3)
    X = make_inputs(7, 2)
    means = [model.eval().posterior(X).mean for model in (ours, exact)]
    assert (means[0] - means[1]).abs().max() < 0.05  # of 50: two L-BFGS runs


def test_scipy_with_several_outputs() -> None:
    """Output by output, as BoTorch does."""
    ours, exact = pair(n=15, outputs=2)
    for model in (ours, exact):
        fit_gpytorch_mll_scipy(ExactMarginalLogLikelihood(model.likelihood, model).train())
    X = make_inputs(5, 2)
    means = [model.eval().posterior(X).mean for model in (ours, exact)]
    assert_close(means[0], means[1], 1e-3)  # two L-BFGS runs


def test_torch() -> None:
    """Step by step the same."""
    results = []
    for model in both():
        mll = ExactMarginalLogLikelihood(model.likelihood, model).train()
        result = fit_gpytorch_mll_torch(mll, step_limit=15)
        results.append((result.fval, model.covar_module.lengthscale.detach()))
    assert_close(torch.tensor(results[0][0]), torch.tensor(results[1][0]), 1e-5)
    assert_close(results[0][1], results[1][1], 1e-4)


@pytest.mark.parametrize(
    "kwargs", [{}, {"outputs": 2}, {"fixed_noise": True}, {"batch_shape": torch.Size([2])}], ids=str
)
def test_the_loop_of_an_exact_model(kwargs: dict[str, Any]) -> None:
    """The same hyperparameters after Adam's steps, to rounding, and the same predictions."""
    results, X = [], make_inputs(5, 2)
    for model in pair(n=12, **kwargs):
        mll = ExactMarginalLogLikelihood(model.likelihood, model).train()
        adam = torch.optim.Adam(model.parameters(), lr=0.05)
        for _ in range(5):
            adam.zero_grad()
            loss = -mll(model(*model.train_inputs), model.train_targets).sum()
            loss.backward()
            adam.step()
        posterior = model.eval().posterior(X)
        results.append((loss, dict(model.named_parameters()), posterior))
    (ours, mine, posterior), (theirs, exact, expected) = results
    assert_close(ours, theirs, 1e-10)
    assert mine.keys() == exact.keys()
    for name, parameter in mine.items():
        assert_close(parameter, exact[name], 1e-8)
    assert_same(posterior, expected)


def test_the_loop_of_a_model_that_has_just_been_built() -> None:
    """It is in train mode, as BoTorch's are: a loop that does not ask for it takes their steps."""
    results, X = [], make_inputs(12, 2)
    Y = (4 * X).sin().sum(-1, keepdim=True)
    for kind in (SequentialGP, SingleTaskGP):
        models = ModelListGP(kind(X, Y), kind(X, X[:, :1] + Y.square()))
        mll = SumMarginalLogLikelihood(models.likelihood, models)
        fval = fit_gpytorch_mll_torch(mll, step_limit=5).fval
        results.append((torch.as_tensor(fval), models.posterior(X).mean))
    for ours, theirs in zip(*results, strict=True):
        assert_close(ours, theirs)


def test_what_is_not_a_loop_ends_train_mode() -> None:
    """A new model can be conditioned and updated; what it is given is seen as in predictions."""
    X, Y = make_inputs(12, 2), make_inputs(12, 2)[:, :1]
    new, sampler = 0.5 * make_inputs(2, 2), IIDNormalSampler(torch.Size([3]), seed=0)
    rounding = partial(Round, integer_indices=[1], transform_on_train=False)
    for do in (
        lambda model: model.condition_on_observations(new, Y[:2]),
        lambda model: model.fantasize(new, sampler),
        lambda model: model.update(new, Y[:2], learn=False) and model,
        lambda model: model.forget(X[:2], Y[:2]) or model,
        lambda model: draw_matheron_paths(model, torch.Size([2])) and model,
    ):
        fresh, used = (SequentialGP(X, Y, input_transform=rounding()) for _ in range(2))
        used.posterior(X)
        assert fresh.training
        assert_same(do(fresh).posterior(X), do(used).posterior(X), 1e-9)
        assert not fresh.training


def test_the_loop_with_an_input_transform_and_few_inducing_points() -> None:
    """It is the exact model's: inducing points make no difference to the prior."""
    losses = []
    for model in both(input_transform=Normalize(2), few=True):
        mll = ExactMarginalLogLikelihood(model.likelihood, model).train()
        losses.append(mll(model(*model.train_inputs), model.train_targets))
    assert_close(losses[0], losses[1], 1e-10)


@pytest.mark.parametrize("criterion", ["MLL", "AIC", "BIC"])
def test_in_sample_metrics(criterion: str) -> None:
    ours, exact = pair(n=12)
    values = [compute_in_sample_model_fit_metric(model, criterion) for model in (ours, exact)]
    assert values[0] == pytest.approx(values[1], rel=1e-10)


@pytest.mark.parametrize("outputs", [1, 2])
def test_leave_one_out_objective(outputs: int) -> None:
    """Other objectives of exact models are theirs, and are what is fitted."""
    pairs = pair(n=12, outputs=outputs, input_transform=Normalize(2))
    mlls = [LeaveOneOutPseudoLikelihood(model.likelihood, model).train() for model in pairs]
    assert_close(*(get_loss_closure(mll)() for mll in mlls), 1e-8)
    for mll in mlls:
        fit_gpytorch_mll(mll)
    X = make_inputs(5, 2)
    assert_same(*(model.posterior(X) for model in pairs), 1e-3)  # two runs of L-BFGS


def test_leave_one_out_objective_of_what_is_not_exact() -> None:
    model = both(few=True)[0]
    before = model.hyperparameter_values()
    with pytest.raises(ValueError, match="LeaveOneOutPseudoLikelihood is for exact models"):
        fit_gpytorch_mll(LeaveOneOutPseudoLikelihood(model.likelihood, model))
    assert all(torch.equal(v, before[k]) for k, v in model.hyperparameter_values().items())


def test_what_an_exact_objective_cannot_know() -> None:
    """Observations that are no longer there, conditioned models, leave-one-out objectives."""
    model = pair(n=12)[0]
    loo = LeaveOneOutPseudoLikelihood(model.likelihood, model).train()
    with pytest.raises(RuntimeError, match="DualELBO"):
        loo(model(*model.train_inputs), model.train_targets)
    with pytest.raises(RuntimeError, match="DualELBO"):
        model(*model.train_inputs).log_prob(model.train_targets)  # without noise
    model.update(make_inputs(4, 2), torch.zeros(4, 1), memory=5, learn=False)
    mll = ExactMarginalLogLikelihood(model.likelihood, model).train()
    with pytest.warns(UserWarning, match="memory"):
        targets = model.train_targets
    with pytest.raises(RuntimeError, match="DualELBO"):
        mll(model(*model.train_inputs), targets)


def test_predictive_objectives_get_posterior_variances() -> None:
    r""":math:`\log \int p(y_i | f_i) q(f_i) df_i`, not the prior's density."""
    model = pair(n=12)[0]
    f = model.eval()(*model.train_inputs)
    variance = f.variance + model.likelihood.noise
    expected = torch.distributions.Normal(f.mean, variance.sqrt()).log_prob(model.train_targets)
    targets = model.train_targets
    actual = model.likelihood.log_marginal(targets, model.train()(*model.train_inputs))
    assert_close(actual, expected, 1e-6)


def test_bounds_get_what_they_expect() -> None:
    """In train mode; for labels, too."""
    for name in ("gaussian", "bernoulli", "softmax"):
        model = data(name).model().train()
        arguments = {"num_data": model.num_data}
        dual = DualELBO(model.likelihood, model)(model(*model.train_inputs), model.train_targets)
        if name != "softmax":  # of which GPyTorch draws samples
            mll = VariationalELBO(model.likelihood, model, **arguments)
            # GPyTorch's quadrature of labels has twenty nodes.
            assert_close(mll(model(*model.train_inputs), model.train_targets), dual, 1e-4)
        assert dual.requires_grad


def test_other_bounds_can_be_minimised() -> None:
    model = data("poisson", n=15).model(inducing_points=6)
    mll = VariationalELBO(model.likelihood, model, num_data=15).train()
    loss = get_loss_closure(mll)()
    assert_close(loss, get_loss_closure(DualELBO(model.likelihood, model).train())(), 1e-5)


def test_after_a_fit_the_posterior_is_up_to_date() -> None:
    model, X = data("bernoulli", n=15).model(), make_inputs(5, 2)
    mll = DualELBO(model.likelihood, model).train()
    fit_gpytorch_mll_torch(mll, step_limit=3)
    posterior = model.posterior(X)
    model.refresh()
    assert_same(posterior, model.posterior(X))


def test_training_inputs_are_one_tensor() -> None:
    ours, _ = pair(n=6)
    with pytest.raises(TypeError, match="train_inputs: expected a tuple with one tensor"):
        ours.train_inputs = ((make_inputs(6, 2), make_inputs(6, 2)),)

"""Fitting by other doors than `fit_gpytorch_mll`."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from botorch.models import SingleTaskGP
from botorch.models.transforms import Normalize
from botorch.optim.closures import get_loss_closure
from botorch.optim.fit import fit_gpytorch_mll_scipy, fit_gpytorch_mll_torch
from gpytorch.mlls import ExactMarginalLogLikelihood, VariationalELBO

from seqgp import DualELBO, SequentialGP
from tests.helpers import assert_close, make_inputs
from tests.models.helpers import assert_same, data, pair

pytestmark = pytest.mark.usefixtures("float64")


def both(**kwargs: Any) -> tuple[SequentialGP, SingleTaskGP]:
    X = make_inputs(20, 2)
    Y = 100 + 50 * ((6 * X[:, :1]).sin() + X[:, 1:])
    return SequentialGP(X, Y, **kwargs), SingleTaskGP(X, Y, **kwargs)


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
    """Output by output, as BoTorch does; which inducing points that are moved do not allow."""
    exact = pair(n=15, outputs=2)[1]
    X, Y = exact.train_inputs[0][0], exact.train_targets.mT
    ours = SequentialGP(
        X,
        Y,
        covar_module=copy.deepcopy(exact.covar_module),
        mean_module=copy.deepcopy(exact.mean_module),
        likelihood=copy.deepcopy(exact.likelihood),
        outcome_transform=None,
        learn_inducing_points=False,
    )
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


@pytest.mark.parametrize("kwargs", [{}, {"outputs": 2}, {"fixed_noise": True}], ids=str)
def test_the_loop_of_an_exact_model_is_refused(kwargs: dict[str, Any]) -> None:
    model = pair(**kwargs)[0].train()
    mll = ExactMarginalLogLikelihood(model.likelihood, model)
    output = model(*model.train_inputs)
    with pytest.raises(RuntimeError, match="DualELBO"):
        mll(output, model.train_targets)


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

"""What users of `SingleTaskVariationalGP` do beyond what they do with `SingleTaskGP`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from botorch.fit import fit_gpytorch_mll
from botorch.models.transforms import Normalize
from botorch.models.utils.inducing_point_allocators import (
    GreedyImprovementReduction,
    GreedyVarianceReduction,
)
from gpytorch.kernels import RBFKernel
from gpytorch.likelihoods import (
    BernoulliLikelihood,
    GaussianLikelihood,
    PoissonLikelihood,
    SoftmaxLikelihood,
)
from gpytorch.mlls import VariationalELBO
from torch import Tensor

from seqgp import DualNGD, SequentialGP
from tests.helpers import assert_close, latent, make_inputs, make_kernel
from tests.models.helpers import assert_same, gaussian_likelihood

pytestmark = pytest.mark.usefixtures("float64")


def observed(n: int = 20) -> tuple[Tensor, Tensor]:
    X = make_inputs(n, 2)
    return X, latent(X).unsqueeze(-1)


def softmax() -> SoftmaxLikelihood:
    return SoftmaxLikelihood(num_classes=3, mixing_weights=False)


@pytest.mark.parametrize(
    ("make", "outputs"),
    [
        (lambda: None, 1),
        (lambda: None, 2),
        (BernoulliLikelihood, 1),
        (PoissonLikelihood, 2),
        (softmax, 3),
    ],
)
@pytest.mark.parametrize("batch_shape", [(), (2,)], ids=str)
def test_without_targets(make: Any, outputs: int, batch_shape: tuple[int, ...]) -> None:
    """Inducing points are chosen, the posterior is the prior."""
    X, test = make_inputs(*batch_shape, 12, 2), make_inputs(3, 2)
    model = SequentialGP(
        X,
        likelihood=make(),
        num_outputs=outputs,
        input_transform=Normalize(2, batch_shape=torch.Size(batch_shape)),
        inducing_points=5,
    )
    assert (model.num_data, model.num_outputs) == (0, outputs)
    assert model.variational_strategy.inducing_points.shape[-2] <= 5
    posterior = model.posterior(test)
    assert posterior.mean.shape == (*batch_shape, 3, outputs)
    assert_close(posterior.mean, torch.zeros_like(posterior.mean))
    assert_close(posterior.variance, torch.ones_like(posterior.variance))


def test_stream_from_nothing() -> None:
    """The first update is the first that the model hears of targets."""
    X, Y = observed()
    modules = {"covar_module": make_kernel(), "inducing_points": X[:6], "outcome_transform": None}
    begun = SequentialGP(X, likelihood=gaussian_likelihood(), **modules)
    begun.update(X, Y, learn=False)
    modules["covar_module"] = make_kernel()
    at_once = SequentialGP(X, Y, likelihood=gaussian_likelihood(), **modules)
    assert_same(*(model.posterior(make_inputs(3, 2)) for model in (begun, at_once)))


def test_training_loop_without_targets() -> None:
    """What a loop has learnt stays: one full step is the posterior of all data."""
    X, Y = observed()

    def modules() -> dict[str, Any]:
        likelihood = gaussian_likelihood()
        return {"likelihood": likelihood, "covar_module": make_kernel(), "inducing_points": X}

    model = SequentialGP(X, **modules())
    ngd = DualNGD(model, num_data=20, lr=1.0)
    adam = torch.optim.Adam(model.hyperparameters(), lr=0.1)
    mll = VariationalELBO(model.likelihood, model.model, num_data=20).train()
    for optimizer in (adam, ngd):
        ngd.zero_grad()
        (-mll(model(X), Y.squeeze(-1))).backward()
        optimizer.step()
    expected = SequentialGP(X, Y, outcome_transform=None, **modules())
    expected.load_state_dict(model.state_dict(), strict=False)
    assert_same(*(each.eval().posterior(make_inputs(3, 2)) for each in (model, expected)))
    with pytest.raises(RuntimeError, match="has been learnt in a training loop"):
        model.update(X, Y)


def test_objective_for_the_model_inside() -> None:
    X, Y = observed()
    model = SequentialGP(X, Y, inducing_points=6)
    assert model.model is model
    before = model.covar_module.lengthscale.detach().clone()
    mll = VariationalELBO(model.likelihood, model.model, num_data=len(X))
    fit_gpytorch_mll(mll, optimizer_kwargs={"options": {"maxiter": 3}})
    assert (model.covar_module.lengthscale - before).abs().max() > 1e-3


@pytest.mark.parametrize("learn", [True, False])
@pytest.mark.parametrize("points", ["number", "tensor", "allocator"])
def test_inducing_points(points: str, learn: bool) -> None:
    X, Y = observed()
    options: dict[str, Any] = {"inducing_points": X[:5] if points == "tensor" else 5}
    if points == "allocator":
        options["inducing_point_allocator"] = GreedyVarianceReduction()
    model = SequentialGP(X, Y, learn_inducing_points=learn, **options)
    Z = model.variational_strategy.inducing_points
    assert Z.shape == (5, 2)
    assert isinstance(Z, torch.nn.Parameter) == learn


def test_allocator_that_looks_at_the_model() -> None:
    X, Y = observed()
    first = SequentialGP(X, Y)
    allocator = GreedyImprovementReduction(first, maximize=True)
    model = SequentialGP(
        X, Y, inducing_points=6, inducing_point_allocator=allocator, covar_module=make_kernel()
    )
    assert model.variational_strategy.inducing_points.shape == (6, 2)


@pytest.mark.parametrize("batch_shape", [(), (2,)], ids=str)
@pytest.mark.parametrize("outputs", [1, 2])
def test_inducing_points_are_chosen_anew(batch_shape: tuple[int, ...], outputs: int) -> None:
    """The posterior is that of the data with the new inducing points."""
    X = make_inputs(*batch_shape, 20, 2)
    Y = torch.stack([latent(X + 0.3 * k) for k in range(outputs)], -1)
    shape = torch.Size([*batch_shape, outputs] if outputs > 1 else batch_shape)
    modules = {"outcome_transform": None, "likelihood": gaussian_likelihood(batch_shape=shape)}
    model = SequentialGP(X, Y, covar_module=RBFKernel(), inducing_points=6, **modules)
    model.covar_module.lengthscale = 0.2
    Z = model.init_inducing_points(X[..., :10, :])
    assert Z.shape == (*batch_shape, 6, 2)
    held = model.model.variational_strategy.base_variational_strategy.inducing_points
    assert_close(held.reshape(Z.shape), Z, 0.0)
    expected = SequentialGP(X, Y, covar_module=model.covar_module, inducing_points=Z, **modules)
    assert_same(*(each.posterior(make_inputs(3, 2)) for each in (model, expected)))


def test_what_is_said_to_those_who_pass_what_there_is_not() -> None:
    X, Y = observed()
    with pytest.raises(TypeError, match="got a GaussianLikelihood; pass it as likelihood="):
        SequentialGP(X, Y, GaussianLikelihood())
    with pytest.raises(ValueError, match="num_outputs: expected 1"):
        SequentialGP(X, Y, num_outputs=2)
    with pytest.raises(ValueError, match="num_outputs: expected 3"):
        SequentialGP(X, num_outputs=2, likelihood=softmax())
    with pytest.raises(ValueError, match="train_Y: required with coefficients"):
        SequentialGP(X.unsqueeze(-2), coefficients=torch.ones(20, 1))
    model = SequentialGP(X, Y).condition_on_observations(X[:1], Y[:1])
    with pytest.raises(RuntimeError, match="conditioned"):
        model.init_inducing_points(X)

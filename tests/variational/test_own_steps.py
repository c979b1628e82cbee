"""GPyTorch's training loops without `DualNGD`: each backward pass is a step of the posterior."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from botorch.models import SingleTaskVariationalGP
from gpytorch.kernels import RBFKernel
from gpytorch.likelihoods import (
    BernoulliLikelihood,
    GaussianLikelihood,
    GaussianLikelihoodWithMissingObs,
    StudentTLikelihood,
)
from gpytorch.mlls import ExactMarginalLogLikelihood, PredictiveLogLikelihood, VariationalELBO
from gpytorch.variational import CholeskyVariationalDistribution, VariationalStrategy
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from seqgp import (
    DualELBO,
    DualNGD,
    DualVariationalStrategy,
    HeteroscedasticGaussianLikelihood,
    SequentialGP,
)
from seqgp.likelihoods.expectations import expected_log_prob
from seqgp.variational.own_steps import STEP_SIZE
from tests.helpers import (
    ONE_LATENT,
    assert_close,
    assert_same_posterior,
    make_inputs,
    problem,
    state_of,
    unscaled,
)
from tests.variational.test_ngd import LOOPS, Regression, ours, targets

pytestmark = pytest.mark.usefixtures("float64")


def duals_of(model: Any) -> list[Tensor]:
    """All duals of a model's strategies."""
    return [t.clone() for name, t in model.named_buffers() if "dual_" in name]


@pytest.mark.parametrize("name", [name for name in LOOPS if name not in ("batch_norm", "dropout")])
def test_steps_are_those_of_the_optimiser(name: str) -> None:
    """A backward pass is a step of `DualNGD`, which is checked against GPyTorch's."""
    make, likelihood, objective = LOOPS[name]
    model, lik, x = make(ours), likelihood(), make_inputs(20, 2)
    for key, parameter in model.named_parameters():  # or else duals are moved to where they are
        parameter.requires_grad_("inducing_points" not in key)
    peer = copy.deepcopy(model)
    ngd = DualNGD(peer, num_data=40, lr=STEP_SIZE)
    for _ in range(3):
        torch.manual_seed(0)
        (-objective(lik, model, num_data=40)(model(x), targets(name, x))).backward()
        torch.manual_seed(0)
        ngd.zero_grad()
        (-objective(lik, peer, num_data=40)(peer(x), targets(name, x))).backward()
        ngd.step()
    for a, b in zip(duals_of(model), duals_of(peer), strict=True):
        assert_close(a, b, 1e-7)


@pytest.mark.parametrize("name", ONE_LATENT)
def test_loops_are_alternating_steps(name: str) -> None:
    """A natural-gradient step on a minibatch, and the gradient of `DualELBO` before it."""
    data = problem(name, n=20, m=6)
    model = data.model()
    model.variational_strategy.inducing_points.requires_grad_(False)
    peer = copy.deepcopy(model).train()
    model.train()
    for step in range(4):
        part = slice(step % 2, None, 2)
        arguments = {key: value[part] for key, value in data.arguments.items()}
        batch, y = data.x[part], data.y[part]
        model.zero_grad()
        f = model(batch)  # GPyTorch's quadrature has fewer nodes than ours, or else VariationalELBO
        fit = expected_log_prob(model.likelihood, y, f.mean, f.variance, **arguments).mean()
        (model.variational_strategy.kl_divergence() / 20 - fit).backward()
        peer.zero_grad()
        mll = DualELBO(peer.likelihood, peer, num_data=20)
        (-mll(peer(batch), y, **arguments)).backward()
        peer.variational_strategy.natural_gradient_step(
            batch, y, rho=STEP_SIZE, num_data=20, **arguments
        )
        with torch.no_grad():
            for a, b in zip(model.parameters(), peer.parameters(), strict=True):
                if b.grad is not None:
                    assert_close(a.grad, b.grad, 1e-8)
                    a -= 0.05 * b.grad
                    b -= 0.05 * b.grad
    assert_same_posterior(model.eval(), peer.eval(), data.test, 1e-8)


@pytest.mark.parametrize(
    "scale",
    [
        lambda mll: -mll,
        lambda mll: -1000 * mll,
        lambda mll: mll,  # maximised
        lambda mll: -torch.stack([mll, mll]).sum(),
    ],
)
def test_the_scale_of_a_loss_does_not_matter(scale: Callable[[Tensor], Tensor]) -> None:
    data = problem("gaussian", n=20, m=6)
    model = data.model().train()
    mll = VariationalELBO(data.likelihood, model, num_data=20)
    scale(mll(model(data.x), data.y)).backward()
    expected = data.model()
    expected.variational_strategy.natural_gradient_step(data.x, data.y, rho=STEP_SIZE)
    for a, b in zip(duals_of(model), duals_of(expected), strict=True):
        assert_close(a, b, 1e-8)


def test_losses_with_several_passes_and_accumulated_gradients() -> None:
    """The sum of two objectives is one step; two backward passes of one graph are two."""
    data = problem("gaussian", n=20, m=6)
    model = data.model().train()
    mll = VariationalELBO(data.likelihood, model, num_data=20)
    losses = [mll(model(data.x[half]), data.y[half]) for half in (slice(10), slice(10, None))]
    torch.stack(losses).sum().backward()
    expected = data.model()
    expected.variational_strategy.natural_gradient_step(data.x, data.y, rho=STEP_SIZE)
    for a, b in zip(duals_of(model), duals_of(expected), strict=True):
        assert_close(a, b, 1e-8)
    loss = mll(model(data.x), data.y)
    for retain in (True, False):
        loss.backward(retain_graph=retain)
        assert not torch.equal(duals_of(model)[0], duals_of(expected)[0])
    assert model.eval()(data.test).variance.min() > 0


@pytest.mark.parametrize("outputs", [1, 2])
def test_batches_of_models(outputs: int) -> None:
    """Each of a batch takes the step that it would take alone."""
    X = make_inputs(2, 12, 2)
    Y = torch.stack([(5 * X[..., 0] + k).sin() for k in range(outputs)], -1)

    def step(X: Tensor, Y: Tensor) -> Any:
        model = SequentialGP(X, num_outputs=outputs, covar_module=RBFKernel(), inducing_points=5)
        Z = make_inputs(5, 2)
        shape = model.variational_strategy.inducing_points.shape
        model.variational_strategy.start_from(Z.expand(*shape[:-2], 5, 2).clone())
        model.likelihood.noise = 0.1
        mll = VariationalELBO(model.likelihood, model.train(), num_data=12)
        (-mll(model(X), model.to_targets(Y))).sum().backward()
        return model.eval().posterior(make_inputs(3, 2))

    whole = step(X, Y)
    for k in range(2):
        alone = step(X[k], Y[k])
        assert_close(whole.mean[k], alone.mean, 1e-8)
        assert_close(whole.variance[k], alone.variance, 1e-8)


@pytest.mark.parametrize("labels", [False, True])
def test_minibatches_learn_as_well_as_stock_svgp(labels: bool) -> None:
    """The loop that everybody writes, unchanged."""
    x = make_inputs(300, 2)
    torch.manual_seed(0)
    f = 2 * ((6 * x[:, 0]).sin() + (5 * x[:, 1]).cos())
    y = (f + torch.randn(300) > 0).to(f) if labels else f + 0.2 * torch.randn(300)
    losses = []

    def stock(model: Any, Z: Tensor, batch: torch.Size) -> Any:
        return VariationalStrategy(model, Z, CholeskyVariationalDistribution(Z.shape[-2]))

    for make in (ours, stock):
        torch.manual_seed(1)
        model = Regression(make)
        likelihood = BernoulliLikelihood() if labels else GaussianLikelihood()
        mll = VariationalELBO(likelihood, model, 300)
        parameters = [*model.parameters(), *likelihood.parameters()]
        adam = torch.optim.Adam([{"params": p} for p in parameters], lr=0.03)
        model.train()
        for _ in range(15):
            for batch, target in DataLoader(TensorDataset(x, y), batch_size=75, shuffle=True):
                adam.zero_grad()
                loss = -mll(model(batch), target)
                loss.backward()
                adam.step()
        with torch.no_grad():
            losses.append(-mll(model(x), y).item())
    assert losses[0] < losses[1]


@unscaled
def test_the_loop_of_single_task_variational_gp() -> None:
    """BoTorch's class and ours in the same loop, with and without targets at construction."""
    X = make_inputs(60, 2)
    torch.manual_seed(0)
    f = 3 + (6 * X[:, :1]).sin() + X[:, 1:]
    Y = f + 0.1 * torch.randn_like(f)
    errors = []
    for kind, held in ((SequentialGP, Y), (SequentialGP, None), (SingleTaskVariationalGP, Y)):
        torch.manual_seed(1)
        options = {"outcome_transform": None} if kind is SequentialGP else {}
        model = kind(X, held, likelihood=GaussianLikelihood(), inducing_points=15, **options)
        mll = VariationalELBO(model.likelihood, model.model, num_data=60)
        adam = torch.optim.Adam(mll.parameters(), lr=0.05)
        mll.train()
        for _ in range(150):
            adam.zero_grad()
            loss = -mll(model(X), Y.squeeze(-1))
            loss.backward()
            adam.step()
        mll.eval()
        errors.append((model.posterior(X).mean - f).square().mean().sqrt().item())
    assert max(errors[:2]) < 0.1
    assert max(errors[:2]) < errors[2] + 0.01


def test_a_model_with_data_converges_afterwards() -> None:
    """Its posterior is that of its own targets at the hyperparameters that were learnt."""
    data = problem("bernoulli", n=20)
    model = SequentialGP(data.x, data.y.unsqueeze(-1), likelihood=BernoulliLikelihood())
    mll = VariationalELBO(model.likelihood, model, 20)
    adam = torch.optim.Adam(mll.parameters(), lr=0.1)
    for _ in range(5):
        adam.zero_grad()
        (-mll(model.train()(data.x), data.y)).backward()
        adam.step()
    found = model.posterior(data.test)
    model.refresh()
    assert_close(found.mean, model.posterior(data.test).mean, 1e-6)


@pytest.mark.filterwarnings("ignore:GaussianLikelihoodWithMissingObs:DeprecationWarning")
@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize(
    ("make", "outputs", "batch_shape"),
    [
        (GaussianLikelihood, 1, ()),
        (GaussianLikelihood, 2, ()),
        (GaussianLikelihood, 2, (2,)),
        (GaussianLikelihoodWithMissingObs, 1, ()),
    ],
)
@pytest.mark.parametrize("own_steps", [True, False])
def test_targets_that_had_to_be_transformed(
    own_steps: bool, make: Any, outputs: int, batch_shape: tuple[int, ...], given: bool
) -> None:
    """Hyperparameters of raw observations are not used with standardised targets."""
    X = make_inputs(*batch_shape, 30, 2)
    Y = torch.stack([100 + 50 * (6 * X[..., 0] + k).sin() for k in range(outputs)], -1)
    if make is GaussianLikelihoodWithMissingObs:
        Y[3] = torch.nan
    shape = torch.Size([*batch_shape, outputs] if outputs > 1 else batch_shape)
    model = SequentialGP(X, Y, likelihood=make(batch_shape=shape), covar_module=RBFKernel())
    y = model.to_targets(Y) if given else model.train_targets
    mll = VariationalELBO(model.likelihood, model, num_data=30)
    adam = torch.optim.Adam(mll.parameters(), lr=0.02)
    ngd = None if own_steps else DualNGD(model, num_data=30)
    for _ in range(40):
        adam.zero_grad()
        if ngd is not None:
            ngd.zero_grad()
        (-mll(model(X), y)).sum().backward()
        adam.step()
        if ngd is not None:
            ngd.step()
    if given:
        with pytest.raises(RuntimeError, match=r"outcome_transform=None"):
            model.posterior(X)
    else:
        assert (model.posterior(X).mean - Y).square().nanmean().sqrt() < 20


@pytest.mark.parametrize("make", [StudentTLikelihood, HeteroscedasticGaussianLikelihood])
def test_likelihoods_that_are_not_log_concave(make: Any) -> None:
    """Sites of negative precision, under a prior that changes with each step."""
    X = make_inputs(30, 2)
    torch.manual_seed(0)
    Y = 100 + 50 * (6 * X[:, :1]).sin()
    Y[::7] += 300 * torch.randn_like(Y[::7])
    model = SequentialGP(X, Y, likelihood=make())
    y, mll = model.train_targets, VariationalELBO(model.likelihood, model, num_data=30)
    adam = torch.optim.Adam(model.covar_module.parameters(), lr=0.01)
    losses = []
    for _ in range(30):
        adam.zero_grad()
        loss = -mll(model(X), y)
        loss.backward()
        adam.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert model.posterior(X).variance.min() > 0


# -------------------------------------------------------------------- what makes no step


def test_what_makes_no_step() -> None:
    """Objectives that hold the sites fixed, evidence, gradients of predictions, inspections."""
    data = problem("gaussian", n=20)
    model = SequentialGP(data.x, data.y.unsqueeze(-1))
    before = duals_of(model)
    y, lik = model.train_targets, model.likelihood
    (-DualELBO(lik, model)(model(data.x), y)).backward()
    (-ExactMarginalLogLikelihood(lik, model)(model(data.x), y)).backward()
    model(data.x.clone().requires_grad_()).mean.sum().backward()
    loss = -VariationalELBO(lik, model, 20)(model(data.x), y)
    parameters = [p for p in model.parameters() if p.requires_grad]
    assert torch.autograd.grad(loss, parameters, allow_unused=True)[0] is not None
    with torch.no_grad():
        VariationalELBO(lik, model, 20)(model(data.x), y)
    for a, b in zip(duals_of(model), before, strict=True):
        assert torch.equal(a, b)


def test_a_posterior_that_is_gone() -> None:
    """Its gradient is not applied to another one."""
    data = problem("poisson", n=20, m=6)
    model = data.model().train()
    loss = -VariationalELBO(data.likelihood, model, 20)(model(data.x), data.y)
    model.variational_strategy.converge(data.x, data.y)
    before = duals_of(model)
    loss.backward()
    for a, b in zip(duals_of(model), before, strict=True):
        assert torch.equal(a, b)


def test_copies_take_steps_of_their_own() -> None:
    data = problem("gaussian", n=20, m=6)
    model = data.model().train()
    mll = VariationalELBO(data.likelihood, model, 20)
    (-mll(model(data.x), data.y)).backward()
    copied = copy.deepcopy(model)
    before = duals_of(model)
    (-VariationalELBO(data.likelihood, copied, 20)(copied(data.x), data.y)).backward()
    for a, b, c in zip(duals_of(model), before, duals_of(copied), strict=True):
        assert torch.equal(a, b)
        assert not torch.equal(a, c)


def test_float32_in_between() -> None:
    data = problem("gaussian", n=20, m=6)
    model = data.model().train()
    for dtype in (torch.float64, torch.float32):
        model, likelihood = model.to(dtype), data.likelihood.to(dtype)
        mll = VariationalELBO(likelihood, model, 20)
        (-mll(model(data.x.to(dtype)), data.y.to(dtype))).backward()
        assert all(dual.dtype == dtype for dual in duals_of(model))


def test_all_hyperparameters_fixed() -> None:
    """Then the posterior is all that there is to learn."""
    data = problem("bernoulli", n=20, m=6)
    model = data.model().train().requires_grad_(False)
    mll = PredictiveLogLikelihood(data.likelihood, model, 20)
    losses = []
    for _ in range(20):
        loss = -mll(model(data.x), data.y)
        loss.backward()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.01


# -------------------------------------------------------------------- refused


def test_steps_without_a_posterior_are_shortened() -> None:
    data = problem("student_t", n=20, m=6)
    model = data.model().train()
    mll = VariationalELBO(data.likelihood, model, 20, beta=0.001)  # far from the sites
    for _ in range(5):
        (-mll(model(data.x), data.y)).backward()
    assert model.eval()(data.test).variance.isfinite().all()


def test_what_is_not_in_the_objective_is_not_forgotten() -> None:
    """A summary, and objectives whose KL term is another or has no weight."""
    data = problem("gaussian", n=20)
    model = data.converged().train()
    model.variational_strategy.fold(data.x, data.y)
    fresh = data.model().train()
    cases: list[tuple[Any, Callable[[Any], Tensor], str]] = [
        (model, lambda m: VariationalELBO(data.likelihood, m, 20)(m(data.x), data.y), "update"),
        (
            fresh,
            lambda m: m(data.x).mean.sum() + 0 * m.variational_strategy.kl_divergence(),
            "no weight",
        ),
        (
            fresh,
            lambda m: m.variational_strategy.variational_distribution.mean.sum(),
            r"seqgp\.DualNGD\(model, num_data, lr=0\.1\)",
        ),
    ]
    for each, objective, match in cases:
        before = state_of(each)
        with pytest.raises(RuntimeError, match=match):
            (-objective(each)).backward()
        for key, value in each.state_dict().items():
            assert key.endswith("initialized") or torch.equal(value, before[key])


def test_gradients_that_are_not_finite_change_nothing() -> None:
    x = make_inputs(10, 2)
    model, likelihood = Regression(ours), GaussianLikelihood()
    before = duals_of(model)
    mll = VariationalELBO(likelihood, model, 10)
    with pytest.raises(FloatingPointError, match="nothing has been changed"):
        (-mll(model(x), torch.full((10,), torch.inf))).backward()
    for a, b in zip(duals_of(model), before, strict=True):
        assert torch.equal(a, b)


def test_strategy_without_data_is_still_the_prior() -> None:
    """Evaluating an objective teaches nothing."""
    model = Regression(lambda m, Z, batch: DualVariationalStrategy(m, Z, batch_shape=batch))
    x = make_inputs(5, 2)
    VariationalELBO(GaussianLikelihood(), model, 5)(model.train()(x), x[:, 0])
    prior = model.eval()(x, prior=True)
    assert_close(model(x).mean, prior.mean, 1e-10)
    assert_close(model(x).covariance_matrix, prior.covariance_matrix, 1e-6)

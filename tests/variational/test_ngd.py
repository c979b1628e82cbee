"""GPyTorch's training loops on our strategy, against the same loops on GPyTorch's own.

The peer is `NaturalVariationalDistribution` with `gpytorch.optim.NGD`. Seeds are the same, so that
even loops with samples, dropout and batch normalisation are the same, step by step.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.kernels import MaternKernel, ScaleKernel
from gpytorch.likelihoods import (
    BernoulliLikelihood,
    GaussianLikelihood,
    Likelihood,
    MultitaskGaussianLikelihood,
)
from gpytorch.means import ConstantMean
from gpytorch.mlls import DeepApproximateMLL, PredictiveLogLikelihood, VariationalELBO
from gpytorch.models import ApproximateGP
from gpytorch.models.deep_gps import DeepGP, DeepGPLayer
from gpytorch.optim import NGD
from gpytorch.variational import (
    CholeskyVariationalDistribution,
    IndependentMultitaskVariationalStrategy,
    LMCVariationalStrategy,
    NaturalVariationalDistribution,
    VariationalStrategy,
)
from torch import Tensor, nn

import seqgp
from seqgp import DualELBO, DualNGD, DualVariationalStrategy
from tests.helpers import (
    CASES,
    GP,
    ONE_LATENT,
    SVGP,
    assert_close,
    assert_same_posterior,
    make_inputs,
    problem,
    state_of,
    with_same_expectations,
)

pytestmark = pytest.mark.usefixtures("float64")

EMPTY = torch.Size()
#: GPyTorch's is absolute and also on the diagonal of the data; with this little there is no matter.
JITTER = 1e-9


def ours(model: Any, Z: Tensor, batch_shape: torch.Size = EMPTY) -> Any:
    return DualVariationalStrategy(model, Z, batch_shape=batch_shape, jitter_val=JITTER)


def theirs(model: Any, Z: Tensor, batch_shape: torch.Size = EMPTY) -> Any:
    q = NaturalVariationalDistribution(Z.shape[-2], batch_shape=batch_shape, mean_init_std=0.0)
    return VariationalStrategy(model, Z, q, jitter_val=JITTER)


Make = Callable[..., Any]


class Regression(ApproximateGP):
    """One output, or several of them behind one of GPyTorch's wrappers."""

    def __init__(
        self, make: Make, d: int = 2, tasks: int = 0, wrap: Callable[[Any], Any] = lambda s: s
    ) -> None:
        batch = torch.Size([tasks] if tasks else [])
        super().__init__(wrap(make(self, make_inputs(6, d), batch)))
        self.mean_module = ConstantMean(batch_shape=batch)
        self.covar_module = ScaleKernel(MaternKernel(1.5, batch_shape=batch), batch_shape=batch)

    def forward(self, x: Tensor) -> MultivariateNormal:
        return MultivariateNormal(self.mean_module(x), self.covar_module(x))


class DeepKernel(Regression):
    """Features of a network whose output depends on the batch, or on chance."""

    def __init__(self, make: Make, layer: nn.Module) -> None:
        super().__init__(make)
        with torch.random.fork_rng():
            torch.manual_seed(3)
            self.features = nn.Sequential(nn.Linear(2, 8), layer, nn.ReLU(), nn.Linear(8, 2))

    def forward(self, x: Tensor) -> MultivariateNormal:
        return super().forward(self.features(x))


class Layer(DeepGPLayer):
    def __init__(self, make: Make, inputs: int, outputs: int | None) -> None:
        batch = torch.Size([] if outputs is None else [outputs])
        Z = make_inputs(*batch, 6, inputs)
        super().__init__(make(self, Z, batch), inputs, outputs)
        self.mean_module = ConstantMean(batch_shape=batch)
        kernel = MaternKernel(1.5, batch_shape=batch, ard_num_dims=inputs)
        self.covar_module = ScaleKernel(kernel, batch_shape=batch)

    def forward(self, x: Tensor) -> MultivariateNormal:
        return MultivariateNormal(self.mean_module(x), self.covar_module(x))


class Deep(DeepGP):
    def __init__(self, make: Make) -> None:
        super().__init__()
        self.hidden, self.last = Layer(make, 2, 2), Layer(make, 2, None)

    def forward(self, x: Tensor) -> Any:
        return self.last(self.hidden(x))


def independent(strategy: Any) -> Any:
    return IndependentMultitaskVariationalStrategy(strategy, num_tasks=3)


def mixed(strategy: Any) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(4)
        return LMCVariationalStrategy(strategy, num_tasks=3, num_latents=2)


#: What GPyTorch offers around a strategy: a model, its likelihood and its objective.
LOOPS: dict[str, tuple[Callable[[Make], Any], Callable[[], Likelihood], Any]] = {
    "plain": (Regression, GaussianLikelihood, VariationalELBO),
    "predictive": (Regression, GaussianLikelihood, PredictiveLogLikelihood),
    "labels": (Regression, BernoulliLikelihood, VariationalELBO),
    "independent": (
        lambda make: Regression(make, tasks=3, wrap=independent),
        lambda: MultitaskGaussianLikelihood(num_tasks=3),
        VariationalELBO,
    ),
    "mixed": (
        lambda make: Regression(make, tasks=2, wrap=mixed),
        lambda: MultitaskGaussianLikelihood(num_tasks=3),
        VariationalELBO,
    ),
    "deep": (
        Deep,
        GaussianLikelihood,
        lambda *args, **kwargs: DeepApproximateMLL(VariationalELBO(*args, **kwargs)),
    ),
    "batch_norm": (
        lambda make: DeepKernel(make, nn.BatchNorm1d(8)),
        GaussianLikelihood,
        VariationalELBO,
    ),
    "dropout": (
        lambda make: DeepKernel(make, nn.Dropout(0.3)),
        GaussianLikelihood,
        VariationalELBO,
    ),
}


def targets(name: str, x: Tensor) -> Tensor:
    f = (5 * x[:, 0]).sin() + x[:, 1]
    if name == "labels":
        return (f > 0.5).to(f)
    return torch.stack([f, f.square(), -f], -1) if name in ("independent", "mixed") else f


class Loop:
    """A model in GPyTorch's training loop."""

    def __init__(self, name: str, make: Make, n: int = 40, lr: float = 0.1, **options: Any) -> None:
        model, likelihood, objective = LOOPS[name]
        self.model, self.likelihood = model(make), likelihood()
        self.x = make_inputs(n, 2)
        self.y = targets(name, self.x)
        self.mll = objective(self.likelihood, self.model, num_data=n, **options)
        if make is ours:
            self.ngd: Any = DualNGD(self.model, n, lr)
            hyperparameters = list(self.model.parameters())
        else:
            self.ngd = NGD(list(self.model.variational_parameters()), n, lr)
            hyperparameters = list(self.model.hyperparameters())
            for module in self.model.modules():  # or else it draws numbers at the first call
                if isinstance(module, VariationalStrategy):
                    module.variational_params_initialized.fill_(1)
        self.adam = torch.optim.Adam([*hyperparameters, *self.likelihood.parameters()], lr=0.02)
        self.steps = 0

    def run(self, steps: int, batch_size: int | None = None, accumulate: int = 1) -> float:
        self.model.train()
        self.likelihood.train()
        for _ in range(steps):
            self.ngd.zero_grad()
            self.adam.zero_grad()
            for _ in range(accumulate):
                torch.manual_seed(self.steps)
                index = torch.randperm(len(self.x))[: batch_size or len(self.x)]
                loss = -self.mll(self.model(self.x[index]), self.y[index]) / accumulate
                loss.backward()
                self.steps += 1
            self.ngd.step()
            self.adam.step()
        return loss.item()

    def predict(self) -> tuple[Tensor, Tensor]:
        self.model.eval()
        torch.manual_seed(0)
        with torch.no_grad():
            f = self.model(make_inputs(5, 2))
        return f.mean, f.variance


@pytest.mark.parametrize(
    ("name", "options"),
    [*((name, {"batch_size": 12, "accumulate": 2}) for name in LOOPS), ("plain", {})],
)
def test_loops_are_those_of_gpytorch(name: str, options: dict[str, int]) -> None:
    """Losses and predictions, after steps with all data or accumulated minibatches."""
    mine, peer = Loop(name, ours), Loop(name, theirs)
    start = mine.run(1)
    assert_close(torch.tensor(start), torch.tensor(peer.run(1)), 1e-7)
    for _ in range(2):  # evaluating in between changes nothing
        losses = [loop.run(3, **options) for loop in (mine, peer)]
        assert_close(*map(torch.tensor, losses), 1e-6)
        for a, b in zip(mine.predict(), peer.predict(), strict=True):
            assert_close(a, b, 1e-5)  # features that are alike magnify what jitter there is
    assert losses[0] < start


@pytest.mark.parametrize("name", ONE_LATENT)
def test_steps_are_those_of_gpytorch(name: str) -> None:
    """For every likelihood, hyperparameters and inducing points included."""
    data = problem(name, n=20, m=6)
    model = data.model()
    q = NaturalVariationalDistribution(6, mean_init_std=0.0)
    modules = copy.deepcopy({"mean": model.mean_module, "kernel": model.covar_module})
    peer = SVGP(data.Z, q, jitter_val=1.3e-8, likelihood=copy.deepcopy(data.likelihood), **modules)
    ngd = DualNGD(model, 20, lr=0.3)
    model.variational_strategy.inducing_points.requires_grad_(False)
    peer_ngd = NGD(list(peer.variational_parameters()), 20, lr=0.3)
    loops = []
    for each, optimizer, parameters in (
        (model, ngd, model.parameters()),
        (peer, peer_ngd, peer.hyperparameters()),
    ):
        adam = torch.optim.Adam([p for p in parameters if p.requires_grad], lr=0.01)
        mll = VariationalELBO(each.likelihood, each.train(), 20)
        loops.append((each, mll, optimizer, adam))
    for step in range(8):
        part = slice(step % 2, None, 2)
        arguments = {key: value[part] for key, value in data.arguments.items()}
        for each, mll, *optimizers in loops:
            for optimizer in optimizers:
                optimizer.zero_grad()
            (-mll(each(data.x[part]), data.y[part], **arguments)).backward()
            for optimizer in optimizers:
                optimizer.step()
    for (key, a), b in zip(
        model.covar_module.named_parameters(), peer.covar_module.parameters(), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6, msg=key)
    assert_same_posterior(model.eval(), peer.eval(), data.test, 1e-6)


@pytest.mark.parametrize("name", list(CASES))
def test_the_fixed_point_is_that_of_converge(name: str) -> None:
    """With all data; our own expectations, deterministic also for several latents."""
    data = problem(name, n=15, m=5)
    model = data.model()
    ngd = DualNGD(model, 15, lr=0.5)
    mll = DualELBO(data.likelihood, model.train(), num_data=15)
    for _ in range(60):
        ngd.zero_grad()
        loss = -mll(model(data.x), data.y, **data.arguments)
        loss.backward()
        ngd.step()
    expected = data.converged()
    assert_same_posterior(model.eval(), expected, data.test, 1e-6)
    with torch.no_grad():
        bound = mll(expected.train()(data.x), data.y, **data.arguments)
    assert_close(-loss, bound, 1e-8)


@pytest.mark.parametrize("name", ["bernoulli", "poisson"])
def test_the_fixed_point_is_that_of_gpytorch(name: str) -> None:
    """q and the bound, where both have converged."""
    data = problem(name, n=15, m=5)
    likelihood = with_same_expectations(data.likelihood)
    model = GP(data.Z, likelihood)
    q = NaturalVariationalDistribution(5, mean_init_std=0.0)
    peer = SVGP(data.Z, q, jitter_val=1.3e-8, likelihood=likelihood)
    bounds = []
    for each, ngd in (
        (model, DualNGD(model, 15, lr=0.5)),
        (peer, NGD(list(peer.variational_parameters()), 15, lr=0.5)),
    ):
        mll = VariationalELBO(likelihood, each.train(), 15)
        for _ in range(60):
            ngd.zero_grad()
            bound = mll(each(data.x), data.y)
            (-bound).backward()
            ngd.step()
        bounds.append(bound)
    assert_close(*bounds, 1e-8)
    assert_close(model.eval().variational_strategy.variational_distribution.mean, q().mean, 1e-6)
    assert_same_posterior(model, peer.eval(), data.test, 1e-6)


@pytest.mark.parametrize("beta", [1.0, 0.3])
def test_one_step_is_exact_for_gaussian_data(beta: float) -> None:
    """With ``beta``, the noise is scaled: a tempered likelihood."""
    data = problem("gaussian", n=25, m=6)
    model = data.model()
    ngd = DualNGD(model, 25, lr=1 / beta)
    mll = VariationalELBO(data.likelihood, model.train(), 25, beta=beta)
    (-mll(model(data.x), data.y)).backward()
    ngd.step()
    scaled = GaussianLikelihood().initialize(noise=beta * data.likelihood.noise.item())
    expected = GP(data.Z, scaled).eval()
    expected.variational_strategy.converge(data.x, data.y)
    if beta == 1:
        assert_same_posterior(model.eval(), expected, data.test, 1e-9)
    else:  # (1 - lr beta) of the old q, none of it, plus lr of the sites
        assert_close(model.eval()(data.test).mean, expected(data.test).mean, 1e-9)


def test_minibatches_learn_as_well_as_stock_svgp() -> None:
    x = make_inputs(300, 2)
    torch.manual_seed(0)
    f = (6 * x[:, 0]).sin() + (5 * x[:, 1]).cos()
    y = f + 0.2 * torch.randn(300)
    errors = []
    for stock in (False, True):
        torch.manual_seed(1)

        def make(model: Any, Z: Tensor, batch: torch.Size, stock: bool = stock) -> Any:
            Z = x[:30]
            if not stock:
                return DualVariationalStrategy(model, Z)
            return VariationalStrategy(model, Z, CholeskyVariationalDistribution(30))

        model, likelihood = Regression(make), GaussianLikelihood()
        mll = VariationalELBO(likelihood, model, 300)
        adam = torch.optim.Adam([*model.parameters(), *likelihood.parameters()], lr=0.03)
        ngd = None if stock else DualNGD(model, 300, lr=0.2)
        model.train()
        dataset = torch.utils.data.TensorDataset(x, y)
        for _ in range(10):
            for part in torch.utils.data.DataLoader(dataset, batch_size=75, shuffle=True):
                adam.zero_grad()
                if ngd is not None:
                    ngd.zero_grad()
                (-mll(model(part[0]), part[1])).backward()
                adam.step()
                if ngd is not None:
                    ngd.step()
        with torch.no_grad():
            errors.append((model.eval()(x).mean - f).square().mean().sqrt().item())
    assert errors[0] < 0.2
    assert errors[0] < errors[1]  # which needs more epochs than that


# -------------------------------------------------------------------- what it does to the strategy


def learnt(lr: float = 0.5, steps: int = 5) -> tuple[Loop, DualNGD]:
    loop = Loop("labels", ours, lr=lr)
    loop.run(steps)
    return loop, loop.ngd


def test_copies_state_dicts_and_checkpoints(tmp_path: Path) -> None:
    """Taken in train mode, from a loop that goes on."""
    loop, _ = learnt()
    copied, state = copy.deepcopy(loop.model), state_of(loop.model)
    seqgp.save(loop.model, tmp_path / "model")
    loaded = seqgp.load(tmp_path / "model", like=Regression(ours))
    again = Regression(ours)
    again.load_state_dict(state)
    mean, variance = loop.predict()
    for other in (copied, loaded, again):
        f = other.eval()(make_inputs(5, 2))
        assert_close(f.mean, mean, 1e-10)
        assert_close(f.variance, variance, 1e-10)
    loop.run(1)
    assert not torch.equal(loop.predict()[0], mean)
    loop.model.load_state_dict(state)
    assert_close(loop.predict()[0], mean, 1e-10)


def test_the_posterior_follows_the_prior_again_afterwards() -> None:
    """In eval mode the duals are sites: what was observed stays when hyperparameters change."""
    loop, _ = learnt()
    loop.predict()
    strategy = loop.model.variational_strategy
    sites = strategy.B.clone()
    K = strategy.chol @ strategy.chol.mT
    loop.model.covar_module.outputscale = 3.0
    assert_close(strategy.chol @ strategy.chol.mT / K, torch.full_like(K, 3 / K[0, 0].item()), 1e-6)
    inverse = torch.linalg.inv(K)
    changed = torch.linalg.inv(strategy.chol @ strategy.chol.mT)
    assert_close(changed @ strategy.B @ changed, inverse @ sites @ inverse, 1e-4)


def test_dual_elbo_after_the_optimiser_is_gone() -> None:
    loop, ngd = learnt()
    del loop.ngd, ngd
    gc.collect()
    loop.model.train()
    mean = loop.model(loop.x).mean
    with torch.no_grad():
        assert_close(mean, loop.model.eval()(loop.x).mean, 1e-8)
    before = loop.model.variational_strategy.dual_B
    (-loop.mll(loop.model.train()(loop.x), loop.y)).backward()  # a step of its own
    assert not torch.equal(loop.model.variational_strategy.dual_B, before)
    loop.model.zero_grad()
    DualELBO(loop.likelihood, loop.model)(loop.model(loop.x), loop.y).backward()
    assert loop.model.covar_module.raw_outputscale.grad is not None


def test_a_change_from_elsewhere_is_learnt_from() -> None:
    """Gradients of a posterior that is gone are not used; the next step starts from the new one."""
    loop, ngd = learnt()
    loop.run(1)
    loop.model.variational_strategy.converge(loop.x, loop.y, loop.likelihood)
    expected = loop.predict()
    loop.model.train()
    loop.model(loop.x)
    with pytest.raises(RuntimeError, match="no gradients"):
        ngd.step()
    for a, b in zip(loop.predict(), expected, strict=True):
        assert_close(a, b, 1e-10)


def test_float32_and_back() -> None:
    loop, _ = learnt()
    loop.model.float()
    loop.likelihood.float()
    loop.x, loop.y = loop.x.float(), loop.y.float()
    loop.ngd.zero_grad()
    loop.model.train()
    (-loop.mll(loop.model(loop.x), loop.y)).backward()
    loop.ngd.step()
    assert loop.model.variational_strategy.dual_B.dtype == torch.float32


def test_steps_without_a_posterior_are_shortened() -> None:
    data = problem("student_t", n=20, m=6)
    model = data.model()
    ngd = DualNGD(model, 20, lr=20.0)
    mll = VariationalELBO(data.likelihood, model.train(), 20)
    for _ in range(5):
        ngd.zero_grad()
        (-mll(model(data.x), data.y)).backward()
        ngd.step()
    assert model.eval()(data.test).variance.isfinite().all()


def test_schedules_and_closures() -> None:
    loop = Loop("plain", ours)
    schedule = torch.optim.lr_scheduler.ConstantLR(loop.ngd, 0.5, 3)
    assert loop.ngd.param_groups[0]["lr"] == 0.05
    loop.model.train()

    def closure() -> Tensor:
        loop.ngd.zero_grad()
        loss = -loop.mll(loop.model(loop.x), loop.y)
        loss.backward()
        return loss

    losses = []
    for _ in range(3):
        losses.append(loop.ngd.step(closure).item())
        schedule.step()
    assert losses == sorted(losses, reverse=True)


# -------------------------------------------------------------------- refused


@pytest.mark.parametrize("name", ["batch_norm", "dropout"])
def test_priors_that_are_no_functions_are_learnt_in_loops_only(name: str) -> None:
    """Blocks that were evaluated one after the other would not belong to one prior."""
    model, likelihood, x = LOOPS[name][0](ours), GaussianLikelihood(), make_inputs(10, 2)
    y = targets("plain", x)
    with pytest.raises(RuntimeError, match=r"(BatchNorm1d|Dropout) makes the prior depend"):
        model.variational_strategy.converge(x, y, likelihood)
    with pytest.raises(RuntimeError, match="DualNGD"):
        model(x)
    assert model.eval().variational_strategy.converge(x, y, likelihood).converged


def test_misuse() -> None:
    loop, ngd = learnt()
    for bad in (0, -1, True):
        with pytest.raises(ValueError, match="num_data"):
            DualNGD(loop.model, bad)
    for lr in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="lr"):
            DualNGD(loop.model, 10, lr)
    with pytest.raises(TypeError, match=r"gpytorch\.optim\.NGD"):
        DualNGD(Regression(theirs), 10)
    before = state_of(loop.model)
    ngd.zero_grad()
    with pytest.raises(RuntimeError, match="no gradients"):
        ngd.step()
    loop.model.train()
    (torch.nan * loop.model(loop.x).mean.sum()).backward()
    with pytest.raises(FloatingPointError, match="nothing has been changed"):
        ngd.step()
    other = DualNGD(loop.model, 10)
    with pytest.raises(RuntimeError, match="Another DualNGD"):
        ngd.step()
    del other
    assert_close(loop.model.variational_strategy.dual_B, before["variational_strategy.dual_B"])


def test_summaries_and_conditions_are_refused() -> None:
    data = problem("gaussian", n=20)
    model = data.converged()
    fantasy = model.get_fantasy_model(data.test, torch.zeros(6))
    model.variational_strategy.fold(data.x, data.y)
    for each in (model, fantasy):
        with pytest.raises(ValueError, match="knows of observations"):
            DualNGD(each, 20)


def test_what_gpytorchs_strategy_is_given_is_explained() -> None:
    with pytest.raises(TypeError, match=r"write DualVariationalStrategy\(self, inducing_points\)"):
        GP(make_inputs(4, 2), num_latents=CholeskyVariationalDistribution(4))
    with pytest.raises(ValueError, match="at least 1"):
        GP(make_inputs(4, 2), num_latents=True)

"""The whole public surface on another device, where results are those of the CPU, bit by bit.

The device is that of `tests/pretend_cuda.py`: mixing it with the CPU raises. Every test computes
the same twice, on the CPU and there, from data and modules as a user would pass them: data on the
device, likelihoods, kernels and transforms as they were made.
"""

from __future__ import annotations

import copy
import inspect
import math
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from botorch.acquisition import (
    UpperConfidenceBound,
    qKnowledgeGradient,
    qLogExpectedImprovement,
    qLogNoisyExpectedImprovement,
)
from botorch.acquisition.multi_objective import qLogNoisyExpectedHypervolumeImprovement
from botorch.acquisition.objective import ScalarizedPosteriorTransform
from botorch.fit import fit_gpytorch_mll
from botorch.models import ModelListGP, SingleTaskGP
from botorch.models.transforms import Log, Normalize, Standardize, Warp
from botorch.optim import optimize_acqf
from botorch.sampling import SobolQMCNormalSampler
from botorch.sampling.pathwise import draw_matheron_paths
from gpytorch.kernels import Kernel
from gpytorch.likelihoods import BernoulliLikelihood
from gpytorch.mlls import VariationalELBO
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

import seqgp
from seqgp import DualELBO, PreferenceGP, SequentialGP
from seqgp.acquisition import (
    InformationAboutBest,
    LogValidExpectedImprovement,
    best_valid,
    exceedance,
    expected_reduction,
    fantasy_batch,
    fantasy_outcome,
    log_validity,
    prevalence,
    qExpectedUncertaintyReduction,
    qLogValidExpectedImprovement,
    qNegIntegratedPosteriorVariance,
    select_from_pool,
    valid_improvement,
)
from seqgp.acquisition.fantasies import FANTASIES
from seqgp.acquisition.uncertainty import CRITERIA
from seqgp.active_learner import ActiveLearner
from seqgp.batch_optimizer import BatchOptimizer
from seqgp.checkpoint import load_extra
from seqgp.duel_optimizer import DuelOptimizer
from seqgp.kernel_scales import median_distance, sharp
from seqgp.streaming.memory import MemoryOptions
from tests import test_devices
from tests.helpers import CASES, GP, Problem, make_inputs, make_kernel, make_mean, problem, unscaled
from tests.models.helpers import data, observe, totals
from tests.pretend_cuda import DEVICE, PretendCUDA

pytestmark = pytest.mark.usefixtures("float64")

CPU = torch.device("cpu")
NAMES = [*CASES, "train_Yvar"]
each = pytest.mark.parametrize("name", NAMES)
#: What acquisition functions that ask about uncertainty know.
LINKED = ["gaussian", "fixed_noise", "bernoulli", "poisson", "binomial", "overdispersed_binomial"]


@pytest.fixture(autouse=True, scope="module")
def _no_caches() -> Iterator[None]:
    """Constants that have been cached on a device belong to this file, or to the others."""

    def clear() -> None:
        for name, module in list(sys.modules.items()):
            if name.startswith("seqgp."):
                for _, function in inspect.getmembers(module, lambda f: hasattr(f, "cache_clear")):
                    function.cache_clear()

    clear()
    yield
    clear()


# -------------------------------------------------------------------- both devices


def moved(nest: Any, device: torch.device) -> Any:
    return tree_map(lambda t: t.to(device) if isinstance(t, Tensor) else t, nest)


def assert_on(nest: Any, device: torch.device) -> None:
    for leaf in tree_flatten(nest)[0]:
        if isinstance(leaf, Tensor):
            assert leaf.device == device


def assert_equal(actual: Any, expected: Any) -> None:
    """Equal nests of tensors and numbers, bit by bit; NaN is NaN."""
    leaves, structure = tree_flatten(actual)
    others, other_structure = tree_flatten(expected)
    assert structure == other_structure
    for ours, theirs in zip(leaves, others, strict=True):
        if isinstance(theirs, Tensor):
            assert ours.dtype == theirs.dtype
            assert ours.shape == theirs.shape
            assert torch.equal(ours.isnan(), theirs.isnan())
            assert torch.equal(ours.nan_to_num(), theirs.nan_to_num())
        else:
            assert ours == theirs or math.isnan(ours) == math.isnan(theirs) is True


def on_both(action: Callable[[torch.device], Any]) -> None:
    """What an action returns is the same on both devices, and where it belongs."""
    torch.manual_seed(0)
    expected = action(CPU)
    assert any(isinstance(leaf, Tensor) for leaf in tree_flatten(expected)[0])
    with PretendCUDA():
        torch.manual_seed(0)
        actual = action(DEVICE)
        assert_on(actual, DEVICE)
        assert_equal(moved(actual, CPU), expected)


# -------------------------------------------------------------------- models


def build(name: str, device: torch.device, n: int = 8, **options: Any) -> SequentialGP:
    """A model of the data of a case, with modules on the CPU."""
    options = {
        "covar_module": make_kernel(),
        "mean_module": make_mean(),
        "inducing_points": 4,
        **options,
    }
    if name == "train_Yvar":
        given = data("gaussian", n)
        X, Y = moved((given.X, given.Y), device)
        return SequentialGP(X, Y, (0.1 + Y.abs() / 10).detach(), **options)
    given = data(name, n)
    X, Y, arguments = moved((given.X, given.Y, given.arguments), device)
    options = {"likelihood": given.likelihood, "likelihood_arguments": arguments, **options}
    return SequentialGP(X, Y, **options)


@cache
def _built(name: str, device: torch.device) -> SequentialGP:
    return build(name, device)


def model_of(name: str, device: torch.device) -> SequentialGP:
    """The same without the time to build it; a copy, which may be changed."""
    return copy.deepcopy(_built(name, device))


def points(device: torch.device, *shape: int) -> Tensor:
    return make_inputs(*shape, 2).to(device)


def observed(name: str, X: Tensor) -> tuple[Tensor, dict[str, Any]]:
    """Observations at inputs, and the arguments to condition on them with."""
    if name == "train_Yvar":
        Y, _ = observe("gaussian", X.cpu())
        arguments: dict[str, Any] = {"noise": 0.1 + Y.abs() / 10}
    else:
        Y, arguments = observe(name, X.cpu())
    return moved((Y, arguments), X.device)


def sampler(*shape: int) -> SobolQMCNormalSampler:
    return SobolQMCNormalSampler(torch.Size(shape), seed=0)


def moments(model: Any, X: Tensor, **options: Any) -> list[Tensor]:
    posterior = model.posterior(X, **options)
    return [posterior.mean.detach(), posterior.variance.detach()]


def state(model: SequentialGP) -> Any:
    """Everything that a model holds."""
    return [
        {name: value.detach().clone() for name, value in model.state_dict().items()},
        model.stream.observations.inputs,
        model.stream.observations.targets,
        model.memory_weights,
        dict(model.likelihood_arguments),
        model.num_seen,
    ]


def of_record(record: seqgp.streaming.update.UpdateRecord) -> Any:
    values = vars(record) | {"seconds": 0.0}
    return list(values.values())


def gradients(model: torch.nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@each
def test_building(name: str) -> None:
    def action(device: torch.device) -> Any:
        model = build(name, device)
        model.train()
        mll = DualELBO(model.likelihood, model)
        output = model(model.train_inputs[0])
        value = mll(output, model.train_targets, **model.likelihood_arguments)
        value.backward()
        return state(model), value.detach(), gradients(model)

    on_both(action)


@each
def test_posterior(name: str) -> None:
    def action(device: torch.device) -> Any:
        model, X = model_of(name, device), points(device, 3, 2)
        posterior = model.posterior(X)
        samples = [sampler(4)(posterior).detach(), posterior.rsample(torch.Size([2])).detach()]
        covariance = posterior.distribution.covariance_matrix.detach()
        prior = model(X, prior=True).covariance_matrix.detach()
        return moments(model, X), samples, covariance, prior

    on_both(action)


@each
def test_posterior_of_observations(name: str) -> None:
    def action(device: torch.device) -> Any:
        model, X = model_of(name, device), points(device, 3, 2)
        arguments = moved(totals(name, 2), device)
        posterior = model.posterior(X, observation_noise=True, **arguments)
        samples = sampler(4)(posterior).detach()
        return moments(model, X, observation_noise=True, **arguments), samples

    on_both(action)


@each
def test_conditioning(name: str) -> None:
    def action(device: torch.device) -> Any:
        model, X = model_of(name, device), points(device, 2)
        Y, arguments = observed(name, X)
        arguments["tol"] = 1e-2  # few passes
        one = model.condition_on_observations(X, Y, **arguments)
        batches = X + 0.1 * points(device, 3, 2)
        two = one.condition_on_observations(batches, Y, **arguments)
        return [moments(each, points(device, 4)) for each in (model, one, two)]

    on_both(action)


@pytest.mark.parametrize("name", ["gaussian", "train_Yvar", "bernoulli", "softmax"])
def test_conditioning_as_in_the_paper(name: str) -> None:
    def action(device: torch.device) -> Any:
        model, X = model_of(name, device), points(device, 2)
        Y, arguments = observed(name, X)
        model = model.condition_on_observations(X, Y, fixed_inducing=True, **arguments)
        return moments(model, points(device, 4))

    on_both(action)


@each
def test_fantasies(name: str) -> None:
    def action(device: torch.device) -> Any:
        model, X = model_of(name, device), points(device, 3, 2).requires_grad_()
        fantasies = model.fantasize(X, sampler(2), tol=1e-2, **moved(totals(name, 2), device))
        posterior = fantasies.posterior(points(device, 4), observation_noise=False)
        (posterior.mean.sum() + posterior.variance.sum()).backward()
        return posterior.mean.detach(), posterior.variance.detach(), X.grad

    on_both(action)


def with_update(name: str, device: torch.device, **options: Any) -> tuple[SequentialGP, Any]:
    model, X = model_of(name, device), points(device, 4)
    Y, arguments = observed(name, X)
    return model, model.update(X, Y, **options, **arguments)


@each
@pytest.mark.parametrize(
    "options",
    [
        {"learn": False, "memory": 5, "site_steps": 3},
        {"steps": 1, "memory": 5, "site_steps": 2, "discount": 0.8},
    ],
    ids=["without learning", "with learning, discounted"],
)
def test_update(name: str, options: dict[str, Any]) -> None:
    def action(device: torch.device) -> Any:
        model, record = with_update(name, device, **options)
        return of_record(record), state(model), moments(model, points(device, 4))

    on_both(action)


@each
def test_leverage_and_memory(name: str) -> None:
    def action(device: torch.device) -> Any:
        model, X = model_of(name, device), points(device, 4)
        Y, arguments = observed(name, X)
        targets = Y.squeeze(-1)
        noise = {
            key: value.squeeze(-1) if key == "noise" else value for key, value in arguments.items()
        }
        density = model.log_predictive_density(X, targets, **noise)
        return model.leverage(X, Y, **arguments), tuple(model.memory), density

    on_both(action)


@each
def test_forgetting(name: str) -> None:
    def action(device: torch.device) -> Any:
        model, X = model_of(name, device), points(device, 4)
        Y, arguments = observed(name, X)
        memory = MemoryOptions(6, policy="recent")
        model.update(X, Y, learn=False, memory=memory, site_steps=3, **arguments)
        model.forget(X[-2:], Y[-2:], **{key: value[-2:] for key, value in arguments.items()})
        return state(model), moments(model, X)

    on_both(action)


@pytest.mark.parametrize("name", ["gaussian", "train_Yvar", "bernoulli", "binomial"])
def test_forgetting_what_has_been_folded(name: str) -> None:
    def action(device: torch.device) -> Any:
        model, X = model_of(name, device), points(device, 4)
        Y, arguments = observed(name, X)
        model.update(X, Y, learn=False, memory=0, **arguments)
        first = {key: value[:2] for key, value in arguments.items()}
        model.forget(X[:2], Y[:2], **first)
        return state(model), moments(model, X)

    on_both(action)


@each
def test_fit(name: str) -> None:
    def action(device: torch.device) -> Any:
        model = model_of(name, device)
        mll = DualELBO(model.likelihood, model)
        options = {"maxiter": 1, "maxfun": 2}
        fit_gpytorch_mll(mll, optimizer_kwargs={"options": options}, starts=1)
        return state(model), moments(model, points(device, 4))

    on_both(action)


@each
def test_checkpoints(name: str, tmp_path: Path) -> None:
    """From each device to each, and on with the stream."""
    X, path = points(CPU, 4), tmp_path / "model.pt"
    options: dict[str, Any] = {"learn": False, "memory": 5, "site_steps": 3}
    model, _ = with_update(name, CPU, **options)
    expected = state(model), moments(model, X)
    with PretendCUDA():
        there, _ = with_update(name, DEVICE, **options)
        seqgp.save(there, path, extra={"X": points(DEVICE, 2), "next": 3})
        assert_equal(load_extra(path), {"X": points(CPU, 2), "next": 3})
        here = seqgp.load(path)
        assert_equal((state(here), moments(here, X)), expected)
        for source in (there, here):
            seqgp.save(source, path)
            again = seqgp.load(path, device=DEVICE)
            assert_on(state(again), DEVICE)
            like = seqgp.load(path, like=_built(name, DEVICE))
            for loaded in (again, like):
                found = state(loaded), moments(loaded, X.to(DEVICE))
                assert_on(found, DEVICE)
                assert_equal(moved(found, CPU), expected)
        Y, arguments = observed(name, X)
        model.update(X, Y, **options, **arguments)
        again.update(*moved((X, Y), DEVICE), **options, **moved(arguments, DEVICE))
        assert_equal(moved(state(again), CPU), state(model))


@pytest.mark.parametrize("name", ["gaussian", "train_Yvar", "bernoulli", "binomial", "softmax"])
def test_moving_a_model(name: str) -> None:
    """A model that was built on the CPU, there and back, and a fantasy of it."""
    X = points(CPU, 4)
    Y, arguments = observed(name, X)
    model = model_of(name, CPU)
    expected = state(model), moments(model, X)
    conditioned = model.condition_on_observations(X, Y, **arguments)
    expected_conditioned = moments(conditioned.to(CPU), X)  # which clears caches, too
    with PretendCUDA():
        fantasy = model.condition_on_observations(X, Y, **arguments).to(DEVICE)
        assert_equal(moved(moments(fantasy, X.to(DEVICE)), CPU), expected_conditioned)
        assert_equal((state(model), moments(model, X)), expected)
        model.to(DEVICE)
        found = state(model), moments(model, X.to(DEVICE))
        assert_on(found, DEVICE)
        assert_equal(moved(found, CPU), expected)
        model.cpu()
        assert_equal((state(model), moments(model, X)), expected)


# -------------------------------------------------------------------- streams


UPDATES: dict[str, dict[str, Any]] = {
    "adam": {"optimizer": "adam", "steps": 1},
    "paper": {"mode": "paper", "steps": 1, "memory": 5},
    "adapted": {"inducing": "adapt", "max_inducing": 6, "learn": False},
    "clusters": {"inducing": "cluster", "learn": False},
    "recent": {"learn": False, "memory": MemoryOptions(5, policy="recent")},
    "random": {"learn": False, "memory": MemoryOptions(0.5, policy="random")},
    "per update": {"learn": False, "memory": MemoryOptions(6, per_update=1)},
    "none": {"learn": False, "memory": MemoryOptions(policy="none")},
    "balance": {"learn": False, "memory": MemoryOptions(5, balance=True), "site_steps": 2},
    "replay": {"steps": 1, "memory": MemoryOptions(5, replay=0.5), "site_steps": 2},
}


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *(("gaussian", options) for options in UPDATES if options not in ("balance", "replay")),
        *(("bernoulli", options) for options in ("paper", "adapted", "balance", "replay")),
        ("softmax", "balance"),
    ],
)
def test_streams(name: str, options: str) -> None:
    def action(device: torch.device) -> Any:
        model, X = model_of(name, device), points(device, 4)
        Y, arguments = observed(name, X)
        stream = list(zip(X.split(2), Y.split(2), strict=True))
        records = model.update_stream(stream, progress=False, **UPDATES[options], **arguments)
        return [of_record(record) for record in records], state(model), moments(model, X)

    on_both(action)


def test_classes_to_come() -> None:
    def action(device: torch.device) -> Any:
        X, likelihood = points(device, 12), CASES["softmax"].make()
        Y = (X[:, :1] > 0.5).to(X)
        model = SequentialGP(X, Y, likelihood=likelihood, inducing_points=5)
        model.update(X[:4], Y[:4] + 1, learn=False, memory=3)
        return state(model), moments(model, X)

    on_both(action)


def test_without_data() -> None:
    def action(device: torch.device) -> Any:
        X = points(device, 6)
        Y, _ = observed("gaussian", X)
        model = SequentialGP(X[:0], Y[:0], inducing_points=X[:4])
        before = moments(model, X)
        model.update(X, Y, steps=1)
        return before, state(model)

    on_both(action)


@pytest.mark.parametrize("name", ["gaussian", "bernoulli"])
def test_fit_in_minibatches(name: str) -> None:
    def action(device: torch.device) -> Any:
        model = model_of(name, device)
        fit_gpytorch_mll(DualELBO(model.likelihood, model), batch_size=5, epochs=1)
        return state(model)

    on_both(action)


def test_other_bounds() -> None:
    def action(device: torch.device) -> Any:
        model = model_of("poisson", device)
        mll = VariationalELBO(model.likelihood, model, num_data=12)
        fit_gpytorch_mll(mll, optimizer_kwargs={"options": {"maxiter": 1}})
        return state(model)

    on_both(action)


# -------------------------------------------------------------------- outputs and transforms


@pytest.mark.parametrize("name", ["gaussian", "train_Yvar", "bernoulli"])
def test_several_outputs(name: str) -> None:
    def action(device: torch.device) -> Any:
        X, new = points(device, 12), points(device, 4)
        kind = "gaussian" if name == "train_Yvar" else name
        Y, new_Y = (
            torch.cat([observed(kind, x)[0], observed(kind, 1 - x)[0]], -1) for x in (X, new)
        )
        noise = [0.1 + y.abs() for y in (Y, new_Y)] if name == "train_Yvar" else [None, None]
        likelihood = None if name in ("gaussian", "train_Yvar") else CASES[name].make()
        model = SequentialGP(X, Y, noise[0], likelihood=likelihood, inducing_points=5)
        found = [moments(model, new), moments(model, new, observation_noise=True)]
        fantasies = model.fantasize(new[:2], sampler(2))
        found.append(moments(fantasies, new))
        model.update(new, new_Y, noise=noise[1], steps=1, memory=8)
        found += [moments(model, new), moments(model.subset_output([1]), new)]
        return found, state(model), moments(model, new, output_indices=[0])

    on_both(action)


def test_several_objectives() -> None:
    def action(device: torch.device) -> Any:
        X = points(device, 8)
        Y = torch.cat([observed("gaussian", x)[0] for x in (X, 1 - X)], -1)
        joint = SequentialGP(X, Y)
        listed = ModelListGP(*(SequentialGP(X, y) for y in Y.split(1, -1)))
        values = []
        for model in (joint, listed):
            acquisition = qLogNoisyExpectedHypervolumeImprovement(
                model, ref_point=[-1.0, -1.0], X_baseline=X, sampler=sampler(4)
            )
            values.append(acquisition(points(device, 2, 2)).detach())
        return values

    on_both(action)


def test_batches_of_models() -> None:
    def action(device: torch.device) -> Any:
        X, test = points(device, 2, 8), points(device, 4)
        Y = torch.sin(4 * X[..., :1])
        gaussian = SequentialGP(X, Y, inducing_points=5)
        bernoulli = SequentialGP(X, (Y > 0).to(Y), likelihood=BernoulliLikelihood())
        return moments(gaussian, test), moments(bernoulli, test)

    on_both(action)


def transforms(device: torch.device) -> dict[str, dict[str, Any]]:
    bounds = torch.tensor([[0.0, 0.0], [1.0, 2.0]], device=device)
    return {
        "bounds": {"input_transform": Normalize(2, bounds=bounds)},
        "log": {"outcome_transform": Log()},
        "both": {"input_transform": Normalize(2), "outcome_transform": Standardize(1)},
        "warp": {"input_transform": Warp(d=2, indices=[0, 1])},
    }


@unscaled
@pytest.mark.parametrize("name", transforms(CPU))
def test_transforms(name: str) -> None:
    def action(device: torch.device) -> Any:
        X, new = points(device, 12), points(device, 4)
        Y, new_Y = ((4 * x[:, :1]).sin() + x[:, 1:] + 2 for x in (X, new))
        model = SequentialGP(X, Y, inducing_points=5, **transforms(device)[name])
        found = [moments(model, new), moments(model, new, observation_noise=True)]
        found.append(moments(model.condition_on_observations(new, new_Y), new))
        if name != "log":  # whose posterior has no base samples
            found.append(moments(model.fantasize(new[:2], sampler(2)), new))
        fit_gpytorch_mll(
            DualELBO(model.likelihood, model), optimizer_kwargs={"options": {"maxiter": 1}}
        )
        model.update(new, new_Y, steps=1, memory=8)
        return found, state(model), moments(model, new)

    on_both(action)


def test_transform_with_checkpoint(tmp_path: Path) -> None:
    def action(device: torch.device) -> Any:
        X = points(device, 8)
        Y = X.sum(-1, keepdim=True)
        options = {"input_transform": Normalize(2), "outcome_transform": Standardize(1)}
        seqgp.save(SequentialGP(X, Y, **options), tmp_path / "model.pt")
        model = seqgp.load(tmp_path / "model.pt", device=device)
        return state(model), moments(model, X)

    on_both(action)


def test_defaults() -> None:
    """The kernel, the mean and the likelihood of BoTorch, and all that a fit does."""

    def action(device: torch.device) -> Any:
        X = points(device, 10)
        model = SequentialGP(X, torch.sin(4 * X[:, :1]))
        fit_gpytorch_mll(
            DualELBO(model.likelihood, model), optimizer_kwargs={"options": {"maxiter": 3}}
        )
        return state(model), moments(model, X)

    on_both(action)


@pytest.mark.parametrize("name", ["gaussian", "bernoulli", "binomial"])
def test_single_precision(name: str) -> None:
    def action(device: torch.device) -> Any:
        given = data(name)
        X, Y = given.X.float().to(device), given.Y.float().to(device)
        arguments = {key: value.to(X) for key, value in given.arguments.items()}
        likelihood = given.likelihood
        model = SequentialGP(
            X, Y, likelihood=likelihood, inducing_points=5, likelihood_arguments=arguments
        )
        few = {key: value[:4] for key, value in arguments.items()}
        model.update(X[:4], Y[:4], steps=1, memory=8, **few)
        double = copy.deepcopy(model).double()
        found = [moments(model, X[:3]), moments(double, X[:3].double())]
        assert found[0][0].dtype == torch.float32
        return found, state(model)

    on_both(action)


# -------------------------------------------------------------------- GPyTorch's face


@cache
def _converged(name: str, device: torch.device) -> tuple[GP, Problem]:
    given = problem(name, n=8, m=4)
    x, y, Z, test, arguments = moved(
        (given.x, given.y, given.Z, given.test, given.arguments), device
    )
    there = given._replace(x=x, y=y, Z=Z, test=test, arguments=arguments)
    model = there.model().to(device).eval()
    assert there.learn(model).converged
    return model, there


@pytest.mark.parametrize("action", test_devices.ACTIONS)
@pytest.mark.parametrize("name", ["gaussian", "bernoulli", "softmax"])
def test_strategy(name: str, action: str) -> None:
    """A bare `ApproximateGP` with a `DualVariationalStrategy`."""

    def act(device: torch.device) -> Any:
        model, given = copy.deepcopy(_converged(name, device))
        result = test_devices.ACTIONS[action](model, given).detach()
        return result, dict(model.state_dict())

    on_both(act)


# -------------------------------------------------------------------- acquisition


def with_gradient(acquisition: Any, X: Tensor) -> Any:
    X = X.detach().clone().requires_grad_()
    value = acquisition(X)
    value.sum().backward()
    return value.detach(), X.grad


def threshold_of(name: str) -> float:
    return 0.4 if name in ("bernoulli", "binomial", "overdispersed_binomial") else 0.7


def criteria_of(name: str) -> list[str]:
    return [c for c in CRITERIA if c != "entropy" or name.endswith(("bernoulli", "binomial"))]


@pytest.mark.parametrize("name", LINKED)
def test_uncertainty_reduction(name: str) -> None:
    def action(device: torch.device) -> Any:
        model, X, sites = model_of(name, device), points(device, 5), points(device, 7)
        given: dict[str, Any] = {"total_count": 3} if name.endswith("binomial") else {}
        options = {"threshold": threshold_of(name), "num_fantasies": 2, **given}
        found = [expected_reduction(model, X, sites, c, **options) for c in criteria_of(name)]
        weights = torch.linspace(1, 2, 7, device=device)
        criteria = ["threshold-entropy", "misclassification"]
        function = qExpectedUncertaintyReduction(model, sites, criteria, weights=weights, **options)
        return found, [with_gradient(function, points(device, 2, q)) for q in (1, 2)]

    on_both(action)


@pytest.mark.parametrize("name", ["gaussian", "bernoulli", "overdispersed_binomial"])
def test_selection_from_a_pool(name: str) -> None:
    def action(device: torch.device) -> Any:
        model, pool = model_of(name, device), points(device, 9)
        given: dict[str, Any] = {}
        if name == "overdispersed_binomial":
            given = {"total_count": torch.full((9,), 4.0, device=device)}
        masks: list[dict[str, Any]] = [
            {"surveyed": [0, 1], "available": torch.arange(8)},
            {"surveyed": torch.arange(9, device=device) < 2, "costs": 1 + pool[:, 0]},
        ]
        options = {"threshold": threshold_of(name), "num_fantasies": 4, "num_batch_fantasies": 2}
        return [tuple(select_from_pool(model, pool, 2, **options, **m, **given)) for m in masks]

    on_both(action)


@pytest.mark.parametrize("name", LINKED)
def test_prevalence(name: str) -> None:
    def action(device: torch.device) -> Any:
        model = model_of(name, device)
        mean, variance = moments(model, points(device, 5))
        above = exceedance(model.likelihood, threshold_of(name), mean, variance)
        return prevalence(model.likelihood, mean, variance), above

    on_both(lambda device: moved(action(device), device))


@pytest.mark.parametrize("name", ["gaussian", "bernoulli", "poisson", "softmax"])
def test_integrated_variance(name: str) -> None:
    def action(device: torch.device) -> Any:
        model = model_of(name, device)
        scalarize = None
        if model.num_outputs > 1:
            scalarize = ScalarizedPosteriorTransform(torch.ones(model.num_outputs, device=device))
        function = qNegIntegratedPosteriorVariance(
            model, points(device, 5), num_fantasies=4, posterior_transform=scalarize
        )
        return with_gradient(function, points(device, 3, 2))

    on_both(action)


def evaluations(device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs, values and labels; some fail."""
    X = points(device, 6)
    valid = X.sum(-1, keepdim=True) < 1.2
    return X, torch.sin(4 * X[:, :1]), valid


def plain_validity(X: Tensor, y: Tensor) -> SequentialGP:
    return SequentialGP(X, y, likelihood=BernoulliLikelihood(), covar_module=make_kernel())


VALIDITY: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "bernoulli": plain_validity,
    "binomial": lambda X, y: SequentialGP(X, 3 * y, likelihood=seqgp.BinomialLikelihood(3)),
    "overdispersed": lambda X, y: SequentialGP(
        X, 3 * y, likelihood=seqgp.OverdispersedBinomialLikelihood(3)
    ),
    "gaussian": lambda X, y: SequentialGP(X, y, covar_module=make_kernel()),
    "exact": lambda X, y: SingleTaskGP(X, y, outcome_transform=None),
}


@unscaled
@pytest.mark.parametrize("kind", VALIDITY)
def test_validity(kind: str) -> None:
    def action(device: torch.device) -> Any:
        X, Y, valid = evaluations(device)
        index = valid.squeeze(-1)
        objective = SequentialGP(X[index], Y[index], outcome_transform=Standardize(1))
        validity = VALIDITY[kind](X, valid.to(X))
        best = best_valid(Y, valid)
        assert best is not None
        one = LogValidExpectedImprovement(objective, validity, best)
        several = qLogValidExpectedImprovement(
            objective, validity, best.item(), sampler=sampler(4), X_pending=X[:1]
        )
        with pytest.warns(UserWarning, match="no valid observation"):
            none = qLogValidExpectedImprovement(None, validity, None, sampler=sampler(4))
        return (
            best,
            log_validity(validity, X).detach(),
            with_gradient(one, points(device, 3, 1)),
            with_gradient(several, points(device, 3, 2)),
            with_gradient(none, points(device, 3, 2)),
        )

    on_both(action)


@pytest.mark.parametrize("fantasy", FANTASIES)
@pytest.mark.parametrize("name", ["gaussian", "train_Yvar", "bernoulli", "poisson"])
def test_fantasy_outcomes(name: str, fantasy: str) -> None:
    def action(device: torch.device) -> Any:
        X = points(device, 3)
        return fantasy_outcome(model_of(name, device), X, fantasy, seed=0), X

    on_both(action)


SMALL: dict[str, Any] = {"num_restarts": 2, "raw_samples": 2, "options": {"maxiter": 1}}


def test_fantasy_batches() -> None:
    def action(device: torch.device) -> Any:
        X, Y, valid = evaluations(device)
        index = valid.squeeze(-1)
        models = [
            SequentialGP(X[index], Y[index], outcome_transform=Standardize(1)),
            plain_validity(X, valid.to(X)),
        ]
        bounds = torch.tensor([[0.0, 0.0], [1.0, 1.0]], device=device)
        batch = fantasy_batch(
            valid_improvement(best_valid(Y, valid)),
            models,
            bounds,
            q=2,
            fantasy=["mean", "sample"],
            X_pending=X[:1],
            X_avoid=X[1:3],
            seed=0,
            **SMALL,
        )
        return [batch.X, batch.values, *batch.fantasies]

    on_both(action)


def test_fantasy_batches_of_counts() -> None:
    def action(device: torch.device) -> Any:
        bounds = torch.tensor([[0.0, 0.0], [1.0, 1.0]], device=device)
        batch = fantasy_batch(
            lambda models, _: UpperConfidenceBound(models[0], beta=4.0),
            [model_of("binomial", device)],
            bounds,
            q=2,
            arguments=[{"total_count": 4}],
            separation=0.5,
            **SMALL,
        )
        return [batch.X, batch.values, batch.fantasies.X, batch.fantasies.Y]

    on_both(action)


@pytest.mark.parametrize("name", ["gaussian", "bernoulli", "poisson"])
def test_acquisition_of_botorch(name: str) -> None:
    def action(device: torch.device) -> Any:
        model, X = model_of(name, device), points(device, 3, 2)
        improvement = qLogExpectedImprovement(model, best_f=0.5, sampler=sampler(4))
        noisy = qLogNoisyExpectedImprovement(
            model, points(device, 4), sampler=sampler(4), prune_baseline=True
        )
        gradient = qKnowledgeGradient(model, num_fantasies=2, sampler=sampler(2))
        bounds = torch.tensor([[0.0, 0.0], [1.0, 1.0]], device=device)
        best = optimize_acqf(improvement, bounds, q=2, **SMALL)
        return (
            with_gradient(improvement, X),
            with_gradient(noisy, X),
            with_gradient(gradient, points(device, 2, 3)),
            best,
        )

    on_both(action)


@pytest.mark.parametrize("name", ["gaussian", "bernoulli"])
def test_pathwise_samples(name: str) -> None:
    def action(device: torch.device) -> Any:
        paths = draw_matheron_paths(model_of(name, device), torch.Size([3]))
        return paths(points(device, 4)).detach()

    on_both(action)


def test_kernel_scales() -> None:
    def action(device: torch.device) -> Any:
        X = points(device, 6)
        kernel: Kernel = sharp(make_kernel()).to(device)
        return median_distance(X), kernel(X).to_dense().detach()

    on_both(action)


# -------------------------------------------------------------------- optimisation


def linear(device: torch.device) -> list[tuple[Tensor, Tensor, float]]:
    return [(torch.tensor([0, 1], device=device), torch.ones(2, device=device), 0.5)]


OPTIMIZERS: dict[str, Callable[[torch.device], dict[str, Any]]] = {
    "default": lambda device: {**SMALL, "make_validity": None},
    "trials": lambda device: {**SMALL, "num_trials": 3, "make_validity": None},
    "failures": lambda device: {**SMALL, "learn_from_failures": True, "incumbent": "mean"},
    "minimum": lambda device: {**SMALL, "maximize": False, "fantasy": "sample", "refit_every": 4},
    "levels": lambda device: {
        **SMALL,
        "discrete_dims": {1: [0.0, 0.5, 1.0]},
        "fixed_features": {0: 0.5},
        "options": {"maxiter_alternating": 1, "maxiter_continuous": 1},
    },
    "constraints": lambda device: {**SMALL, "inequality_constraints": linear(device)},
    "choices": lambda device: {"choices": points(device, 9)},
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_batch_optimizer(name: str) -> None:
    def action(device: torch.device) -> Any:
        options = {"make_validity": plain_validity, **OPTIMIZERS[name](device)}
        bounds = torch.tensor([[0.0, 0.0], [1.0, 1.0]], device=device)
        optimizer, other = (
            BatchOptimizer(bounds, num_initial=5, fit_options={"maxiter": 0}, **options)
            for _ in range(2)
        )
        first = optimizer.ask(4, X_pending=points(device, 1))
        X = torch.cat([first, points(device, 1) / 2])
        valid = (X.sum(-1) < 1.1).long() * optimizer.num_trials
        assert 0 < int((valid > 0).sum()) < len(X)
        Y = torch.where(valid > 0, torch.sin(4 * X[:, 0]), torch.nan)
        if name == "minimum":  # the last point is not refitted to
            optimizer.tell(X[:4], Y[:4], valid[:4])
        optimizer.tell(X[len(optimizer.X) :], Y[len(optimizer.X) :], valid[len(optimizer.X) :])
        other.load_state_dict(optimizer.state_dict())
        proposed = other.ask(2, X_pending=points(device, 1))
        probability = optimizer.probability_of_validity(points(device, 4))
        return first, proposed, probability, optimizer.best

    on_both(action)


@pytest.mark.parametrize("ties", [False, True])
def test_preferences(ties: bool) -> None:
    def action(device: torch.device) -> Any:
        items = points(device, 9)
        pairs = torch.tensor([[0, 1], [2, 3], [4, 5], [6, 7], [1, 8]], device=device)
        tied = torch.tensor([False, True, False, False, True], device=device) if ties else None
        model = PreferenceGP(items, pairs, covar_module=make_kernel(), ties=tied)
        model.update(items, pairs[:2], ties=None if tied is None else tied[:2], steps=1)
        conditioned = model.condition_on_observations(items, pairs[2:3])
        sampler = SobolQMCNormalSampler(torch.Size([4]), seed=0)
        return (
            model.posterior(items).mean,
            model.answers(items[:2]).mean,
            model.datapoints,
            model.comparisons,
            model.ties,
            model.log_predictive_density(items, pairs),
            conditioned.posterior(items).mean,
            model.fantasize(items[:2], sampler).posterior(items).mean,
            InformationAboutBest(model, items, 16)(items[:2].unsqueeze(0)),
        )

    on_both(action)


def test_rated_items() -> None:
    def action(device: torch.device) -> Any:
        items = points(device, 5)
        pairs = torch.tensor([[0, 1], [2, 3]], device=device)
        ratings = torch.tensor([1.0, math.nan, 2.0, math.nan, 3.0], device=device)
        model = PreferenceGP(items, pairs, covar_module=make_kernel(), ratings=ratings)
        model.update(items, pairs, ratings=ratings, steps=1)
        conditioned = model.condition_on_observations(items, pairs[:1], ratings=ratings)
        return (
            model.predicted_ratings(items).mean,
            model.answers(items[:2]).mean,
            model.comparisons,
            *model.ratings,
            conditioned.posterior(items).mean,
        )

    on_both(action)


def test_choices_among_items() -> None:
    def action(device: torch.device) -> Any:
        items = points(device, 7)
        pairs = torch.tensor([[0, 1], [2, 3]], device=device)
        choices = torch.tensor([[4, 0, 1, -1], [2, 6, 5, 3]], device=device)
        model = PreferenceGP(items, pairs, covar_module=make_kernel(), choices=choices)
        model.update(items, pairs, choices=choices[:1], steps=1)
        conditioned = model.condition_on_observations(items, pairs[:1], choices=choices)
        sampler = SobolQMCNormalSampler(torch.Size([4]), seed=0)
        return (
            model.answers(items[:2]).mean,
            model.comparisons,
            model.choices,
            model.leverage(items, pairs, choices=choices),
            model.log_predictive_density(items, pairs, choices=choices),
            conditioned.posterior(items).mean,
            model.fantasize(items[:2], sampler).posterior(items).mean,
            InformationAboutBest(model, items, 16)(items[:2].unsqueeze(0)),
        )

    on_both(action)


def test_duel_optimizer() -> None:
    def action(device: torch.device) -> Any:
        bounds = torch.tensor([[0.0, 0.0], [1.0, 1.0]], device=device)
        optimizer = DuelOptimizer(bounds, 3, fit_options={"maxiter": 1}, **SMALL)
        first = optimizer.ask(3)
        optimizer.tell(first, first[:, 0].sum(-1) > first[:, 1].sum(-1))
        second = optimizer.ask(2, remember_pending=True)
        optimizer.tell(second, [True, False])
        return first, second, optimizer.best

    on_both(action)


@pytest.mark.parametrize("way", ["pool", "search", "gradient"])
def test_active_learner(way: str) -> None:
    def action(device: torch.device) -> Any:
        pool = points(device, 9) if way == "pool" else None
        bounds = torch.tensor([[0.0, 0.0], [1.0, 1.0]], device=device)
        learner, other = (
            ActiveLearner(
                bounds,
                pool,
                threshold=0.5,
                fit_options={"maxiter": 0},
                locations=points(device, 9),
                **(SMALL if way == "gradient" else {}),
            )
            for _ in range(2)
        )
        first = learner.ask(4, remember_pending=True)
        X = torch.cat([first, points(device, 4) / 2])
        learner.tell(X, X.sum(-1) > 0.9)
        other.load_state_dict(learner.state_dict())
        pending = points(device, 9)[3:4]
        return (
            first,
            other.ask(2, X_pending=pending),
            learner.expected_outcome(X),
            learner.probability_above(X),
        )

    on_both(action)


def test_optimizers_between_devices() -> None:
    """Lists and arrays can be told, and a state goes from one device to the other."""
    bounds = torch.tensor([[0.0, 0.0], [1.0, 1.0]])
    X = points(CPU, 5)
    with PretendCUDA():
        options = {"make_validity": plain_validity, "fit_options": {"maxiter": 0}, **SMALL}
        there = BatchOptimizer(bounds.to(DEVICE), **options)
        there.tell(X.to(DEVICE), X.sum(-1).tolist(), [True] * 4 + [False])
        here = BatchOptimizer(bounds, **options)
        here.load_state_dict(there.state_dict())
        here.tell(X[:1], X[:1].sum(-1))
        there.tell(X[:1].to(DEVICE), X[:1].sum(-1).numpy())
        assert_equal(moved(there.ask(1), CPU), here.ask(1))

"""Checkpoints: what comes back is what was saved, and goes on as if nothing had happened."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from botorch.models.transforms import Normalize, Standardize
from gpytorch.kernels import MaternKernel, RBFKernel, ScaleKernel
from torch import Tensor

import seqgp
from seqgp import SequentialGP
from seqgp.checkpoint import CheckpointError, load_extra, storage
from seqgp.streaming.memory import MemoryOptions
from tests.checkpoint.hostile import forge_content
from tests.helpers import CASES, latent, make_inputs, problem, unscaled
from tests.processes import peak_memory

pytestmark = pytest.mark.usefixtures("float64")

ROOT = Path(__file__).parent.parent.parent


def data_of(name: str) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    case = CASES[name]
    X = make_inputs(60, 2)
    return X, case.sample(latent(X, case.num_latents)).unsqueeze(-1), case.arguments(60)


def begin(name: str, **options: Any) -> SequentialGP:
    X, Y, arguments = data_of(name)
    first = {key: value[:20] for key, value in arguments.items()}
    kernel = ScaleKernel(MaternKernel(nu=1.5))
    options = {"inducing_points": 10, "covar_module": kernel} | options
    if name == "fixed_noise":
        return SequentialGP(X[:20], Y[:20], first["noise"].unsqueeze(-1), **options)
    return SequentialGP(
        X[:20], Y[:20], likelihood=CASES[name].make(), likelihood_arguments=first, **options
    )


def go_on(model: SequentialGP, name: str, part: slice) -> Any:
    X, Y, arguments = data_of(name)
    now = {key: value[part] for key, value in arguments.items()}
    if "noise" in now:
        now["noise"] = now["noise"].unsqueeze(-1)
    return model.update(X[part], Y[part], memory=8, steps=3, **now)


def everything(model: Any) -> dict[str, Tensor]:
    """All that a model knows and says, to be compared bit by bit."""
    posterior = model.posterior(make_inputs(7, 2))
    memory = {}
    if not model.variational_strategy.is_fantasy and not model.batch_shape:
        memory = model.memory._asdict()
    return {
        **model.state_dict(),
        **model.likelihood_arguments,
        **memory,
        "weights": model.memory_weights,
        "mean": posterior.mean,
        "variance": posterior.variance,
    }


def assert_identical(a: Any, b: Any) -> None:
    left, right = everything(a), everything(b)
    assert left.keys() == right.keys()
    for key, value in left.items():
        assert value.dtype == right[key].dtype, key
        assert torch.equal(value, right[key]), key
    for name in ("num_updates", "num_seen", "stream_mode", "memory_options", "max_inducing"):
        assert getattr(a, name) == getattr(b, name), name
    assert a.training == b.training
    assert [p.requires_grad for p in a.parameters()] == [p.requires_grad for p in b.parameters()]


@pytest.mark.parametrize("name", list(CASES))
def test_a_stream_goes_on_bit_by_bit(name: str, tmp_path: Path) -> None:
    model = begin(name)
    go_on(model, name, slice(20, 40))
    seqgp.save(model, tmp_path / "model.pt")
    again = seqgp.load(tmp_path / "model.pt")
    assert_identical(model, again)
    a, b = (go_on(m, name, slice(40, 60)) for m in (model, again))
    assert a.elbo == b.elbo
    assert a.log_density == b.log_density
    assert_identical(model, again)


VARIANTS: dict[str, dict[str, Any]] = {
    "transforms": {"input_transform": Normalize(2), "outcome_transform": Standardize(1)},
    "botorch's kernel": {"covar_module": None},
    "inducing points that stay": {"learn_inducing_points": False},
}


@unscaled
@pytest.mark.parametrize("variant", list(VARIANTS))
def test_variants(variant: str, tmp_path: Path) -> None:
    model = begin("gaussian", **VARIANTS[variant])
    model.mean_module.raw_constant.requires_grad_(False)
    go_on(model, "gaussian", slice(20, 40))
    model.train()
    seqgp.save(model, tmp_path / "model.pt")
    again = seqgp.load(tmp_path / "model.pt")
    assert again.training
    model.eval(), again.eval()
    for m in (model, again):
        go_on(m, "gaussian", slice(40, 60))
    assert_identical(model, again)


WAYS: dict[str, dict[str, Any]] = {
    "paper": {"mode": "paper", "learning_rate": 0.05},
    "adam": {"optimizer": "adam"},
    "discount": {"discount": 0.9},
    "cluster": {"inducing": "cluster"},
    "replay": {"memory": MemoryOptions(capacity=8, replay=0.5)},
    "balance": {"memory": MemoryOptions(capacity=0.3, balance=True, policy="random", seed=3)},
}


@pytest.mark.parametrize("way", list(WAYS))
def test_ways_to_learn(way: str, tmp_path: Path) -> None:
    X, Y, _ = data_of("bernoulli")
    options = {"memory": 8, "steps": 3, **WAYS[way]}
    model = begin("bernoulli")
    model.update(X[20:40], Y[20:40], **options)
    seqgp.save(model, tmp_path / "model.pt")
    again = seqgp.load(tmp_path / "model.pt")
    for m in (model, again):
        m.update(X[40:], Y[40:], **options)
    assert_identical(model, again)


@pytest.mark.parametrize("noisy", [True, False])
def test_several_outputs(noisy: bool, tmp_path: Path) -> None:
    X = make_inputs(40, 2)
    Y = torch.cat([latent(X).unsqueeze(-1), X[:, :1].cos()], -1)
    noise = 0.1 + 0.1 * torch.rand_like(Y)
    model = SequentialGP(
        X[:20],
        Y[:20],
        noise[:20] if noisy else None,
        outcome_transform=Standardize(2),
        inducing_points=8,
    )
    model.update(X[20:30], Y[20:30], memory=8, steps=3, noise=noise[20:30] if noisy else None)
    seqgp.save(model, tmp_path / "model.pt")
    again = seqgp.load(tmp_path / "model.pt")
    for m in (model, again):
        m.update(X[30:], Y[30:], memory=8, steps=3, noise=noise[30:] if noisy else None)
    assert_identical(model, again)


def test_a_batch_of_models(tmp_path: Path) -> None:
    X = make_inputs(3, 20, 2)
    model = SequentialGP(X, latent(X).unsqueeze(-1), inducing_points=6, covar_module=RBFKernel())
    seqgp.save(model, tmp_path / "model.pt")
    assert_identical(model, seqgp.load(tmp_path / "model.pt"))


@pytest.mark.parametrize("name", ["gaussian", "bernoulli", "binomial", "student_t", "softmax"])
@pytest.mark.parametrize("fixed", [True, False])
def test_conditioned_models(name: str, fixed: bool, tmp_path: Path) -> None:
    X, Y, arguments = data_of(name)
    now = {key: value[:2] for key, value in arguments.items()}
    model = begin(name).condition_on_observations(X[:2], Y[:2], fixed_inducing=fixed, **now)
    seqgp.save(model, tmp_path / "model.pt")
    again = seqgp.load(tmp_path / "model.pt")
    later = {key: value[2:4] for key, value in arguments.items()}
    further = [
        m if fixed else m.condition_on_observations(X[2:4], Y[2:4], **later) for m in (model, again)
    ]
    for a, b in ((model, again), further):
        left, right = (m.posterior(X[30:35]) for m in (a, b))
        # Not bit by bit: what the observations do is computed anew from their sites.
        torch.testing.assert_close(left.mean, right.mean, rtol=1e-8, atol=1e-8)
        torch.testing.assert_close(left.variance, right.variance, rtol=1e-8, atol=1e-8)
    with pytest.raises(RuntimeError, match="conditioned"):
        again.update(X[:2], Y[:2], **now)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_another_precision(dtype: torch.dtype, tmp_path: Path) -> None:
    model = begin("poisson")
    go_on(model, "poisson", slice(20, 40))
    seqgp.save(model, tmp_path / "model.pt")
    single = seqgp.load(tmp_path / "model.pt", dtype=torch.float32, device="cpu")
    assert {p.dtype for p in single.parameters()} == {torch.float32}
    assert single.stream.observations.inputs.dtype == single.memory_weights.dtype == torch.float32
    X, Y, _ = data_of("poisson")
    expected = model.posterior(X).mean
    # float32: rounding, and jitter of 1e-5
    torch.testing.assert_close(
        single.posterior(X.float()).mean.double(), expected, atol=2e-3, rtol=0
    )
    single.update(X[40:].float(), Y[40:].float(), memory=8, learn=False)
    seqgp.save(single, tmp_path / "single.pt")
    back = seqgp.load(tmp_path / "single.pt", dtype=dtype)
    assert back.posterior(X.to(dtype)).mean.dtype == dtype


@pytest.mark.parametrize("conditioned", [True, False])
def test_another_device(conditioned: bool, tmp_path: Path) -> None:
    """There is no GPU in continuous integration, but "meta" is a device, too."""
    model = begin("binomial")
    go_on(model, "binomial", slice(20, 40))
    if conditioned:
        X, Y, arguments = data_of("binomial")
        model = model.condition_on_observations(
            X[:2], Y[:2], total_count=arguments["total_count"][:2]
        )
    seqgp.save(model, tmp_path / "model.pt")
    moved = seqgp.load(tmp_path / "model.pt", device="meta")
    strategy = moved.variational_strategy
    tensors = [
        *moved.parameters(),
        *moved.buffers(),
        moved.stream.observations.inputs,
        moved.stream.observations.targets,
        moved.memory_weights,
        *moved.likelihood_arguments.values(),
        *(strategy._observed.sites if conditioned else ()),
    ]
    assert {tensor.device.type for tensor in tensors} == {"meta"}
    assert {p.device.type for p in seqgp.load(tmp_path / "model.pt").parameters()} == {"cpu"}
    back = seqgp.load(tmp_path / "model.pt", like=model)
    assert {p.device.type for p in back.parameters()} == {"cpu"}


def test_the_default_dtype_and_device_do_not_matter(tmp_path: Path) -> None:
    model = begin("bernoulli")
    seqgp.save(model, tmp_path / "model.pt")
    try:
        torch.set_default_dtype(torch.float32)
        again = seqgp.load(tmp_path / "model.pt")
        torch.set_default_dtype(torch.float64)
        assert_identical(model, again)
        torch.set_default_device("meta")
        seqgp.save(model, tmp_path / "model.pt")
        torch.set_default_device(None)
        assert_identical(model, seqgp.load(tmp_path / "model.pt"))
    finally:
        torch.set_default_dtype(torch.float64)
        torch.set_default_device(None)


# -------------------------------------------------------------------------------- users' classes


class OwnKernel(RBFKernel):
    """A kernel that seqgp knows nothing of."""


def own_policy(leverage: Tensor, size: int, generator: torch.Generator) -> Tensor:
    return torch.arange(size)


def test_own_classes_need_a_model_that_is_alike(tmp_path: Path) -> None:
    model = begin("gaussian", covar_module=ScaleKernel(OwnKernel()))
    model.memory_options = MemoryOptions(capacity=5, policy=own_policy)
    go_on(model, "gaussian", slice(20, 40))
    seqgp.save(model, tmp_path / "model.pt")
    with pytest.raises(ValueError, match=r"covar_module.base_kernel is .*OwnKernel.*Pass like="):
        seqgp.load(tmp_path / "model.pt")
    like = begin("gaussian", covar_module=ScaleKernel(OwnKernel()))
    like.memory_options = MemoryOptions(capacity=5, policy=own_policy)
    before = everything(like)
    again = seqgp.load(tmp_path / "model.pt", like=like)
    for m in (model, again):
        go_on(m, "gaussian", slice(40, 60))
    assert_identical(model, again)
    after = everything(like)
    assert all(torch.equal(value, after[key]) for key, value in before.items())
    with pytest.raises(ValueError, match=r"like: .*base_kernel is gpytorch.MaternKernel, that"):
        seqgp.load(tmp_path / "model.pt", like=begin("gaussian"))
    with pytest.raises(TypeError, match="like: expected a model as the one"):
        seqgp.load(tmp_path / "model.pt", like=RBFKernel())


def test_a_policy_of_the_users_own(tmp_path: Path) -> None:
    model = begin("gaussian")
    model.memory_options = MemoryOptions(capacity=5, policy=own_policy)
    seqgp.save(model, tmp_path / "model.pt")
    with pytest.raises(ValueError, match="does not hold memory_options"):
        seqgp.load(tmp_path / "model.pt")


def test_shared_parameters_need_a_model_that_is_alike(tmp_path: Path) -> None:
    kernel = RBFKernel()
    model = begin("gaussian", covar_module=kernel + ScaleKernel(kernel))
    seqgp.save(model, tmp_path / "model.pt")
    with pytest.raises(ValueError, match="share their parameters"):
        seqgp.load(tmp_path / "model.pt")
    kernel = RBFKernel()
    like = begin("gaussian", covar_module=kernel + ScaleKernel(kernel))
    again = seqgp.load(tmp_path / "model.pt", like=like)
    assert_identical(model, again)
    first, second = again.covar_module.kernels
    assert first.raw_lengthscale is second.base_kernel.raw_lengthscale


@pytest.mark.parametrize("name", ["poisson", "softmax"])
def test_any_model_with_our_strategy(name: str, tmp_path: Path) -> None:
    data = problem(name)
    model = data.converged()
    model.variational_strategy.set_inducing_points(torch.cat([data.Z, data.x[:2]]))
    seqgp.save(model, tmp_path / "model.pt")
    again = seqgp.load(tmp_path / "model.pt", like=data.model())
    for m in (model, again):
        m.variational_strategy.converge(data.x, data.y, **data.arguments, add=True)
    a, b = model(data.test), again(data.test)
    assert torch.equal(a.mean, b.mean)
    assert torch.equal(a.variance, b.variance)
    with pytest.raises(ValueError, match=r"the model is a GP\. Pass like="):
        seqgp.load(tmp_path / "model.pt")


# -------------------------------------------------------------------------------- files


def test_extra_and_random_state(tmp_path: Path) -> None:
    model = begin("gaussian")
    extra = {"batch": 3, "names": ("a", 1.5), "adam": torch.optim.Adam(model.parameters())}
    with pytest.raises(TypeError, match=r"extra: .*extra\['adam'\] is torch.optim"):
        seqgp.save(model, tmp_path / "model.pt", extra=extra)
    with pytest.raises(TypeError, match="extra: expected a dictionary, got a list"):
        seqgp.save(model, tmp_path / "model.pt", extra=[1, 2])  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []
    extra["adam"] = extra["adam"].state_dict()
    torch.manual_seed(3), random.seed(3), np.random.seed(3)  # noqa: NPY002
    seqgp.save(model, tmp_path / "model.pt", extra=extra)

    def draw() -> tuple[float, float, float]:
        return float(torch.rand(1)), random.random(), float(np.random.rand())  # noqa: NPY002

    expected = draw()
    seqgp.load(tmp_path / "model.pt")
    assert draw() != expected
    seqgp.load(tmp_path / "model.pt", random_state=True)
    assert draw() == expected
    assert load_extra(tmp_path / "model.pt") == extra


def test_records_can_be_extra(tmp_path: Path) -> None:
    """So that the history of a stream is not lost with the process."""
    model, X = begin("gaussian"), torch.rand(6, 2)
    records = [model.update(X, X[:, :1], steps=1), model.update(X[:0], X[:0, :1], learn=False)]
    seqgp.save(model, tmp_path / "model.pt", extra={"records": records})
    again = load_extra(tmp_path / "model.pt")["records"]
    assert str(again) == str(records)  # NaN is not equal to itself
    assert len(seqgp.plots.history(again)) == 3


def test_bad_arguments(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    with pytest.raises(FileNotFoundError):
        seqgp.load(path)
    with pytest.raises(FileNotFoundError, match="does not exist; create it"):
        seqgp.save(begin("gaussian"), tmp_path / "nowhere" / "model.pt")
    with pytest.raises(TypeError, match="model: expected a SequentialGP"):
        seqgp.save(RBFKernel(), path)
    with pytest.raises(TypeError, match=r"dtype: .* torch.float32, got 'float32'"):
        seqgp.load(path, dtype="float32")  # type: ignore[arg-type]
    cycle: list[Any] = []
    cycle.append(cycle)
    with pytest.raises(ValueError, match="extra: it is nested too deeply, or it contains itself"):
        seqgp.save(begin("gaussian"), path, extra={"cycle": cycle})
    assert list(tmp_path.iterdir()) == []


def test_files_are_small_and_links_are_followed(tmp_path: Path) -> None:
    """A model of a few rows of a large tensor does not take the rest to the disk."""
    X = torch.rand(200_000, 2)
    model = SequentialGP(X[:20], X[:20, :1], covar_module=RBFKernel(), inducing_points=5)
    (tmp_path / "real.pt").touch()
    (tmp_path / "link.pt").symlink_to(tmp_path / "real.pt")
    seqgp.save(model, tmp_path / "link.pt")
    assert (tmp_path / "link.pt").is_symlink()
    assert 1000 < (tmp_path / "real.pt").stat().st_size < 200_000
    assert_identical(model, seqgp.load(tmp_path / "link.pt"))
    assert len(list(tmp_path.iterdir())) == 2


# -------------------------------------------------------------------------------- wrong contents


@pytest.fixture(scope="module")
def content(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What is in the file of a small model."""
    path = tmp_path_factory.mktemp("content") / "model.pt"
    model = begin("binomial", inducing_points=4, input_transform=Normalize(2))
    go_on(model, "binomial", slice(20, 40))
    X, Y, arguments = data_of("binomial")
    now = {key: value[:2] for key, value in arguments.items()}
    model = model.condition_on_observations(X[:2], Y[:2], fixed_inducing=True, **now)
    seqgp.save(model, path, extra={"next": 1, "more": [(1.5, "a")]})
    found: dict[str, Any] = storage.read(path, 2)
    return found


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where everything is in a structure; of long lists only the beginning."""
    if path:
        yield path
    if isinstance(value, dict):
        for key in value:
            yield from places(value[key], (*path, key))
    elif isinstance(value, list):
        for index in range(min(len(value), 3)):
            yield from places(value[index], (*path, index))


def replaced(value: Any, path: tuple[Any, ...], new: Callable[[Any], Any]) -> Any:
    """A structure with something else at a place; without it if that is an ellipsis."""
    if not path:
        return new(value)
    key, *rest = path
    changed = replaced(value[key], tuple(rest), new)
    items = list(value.items() if isinstance(value, dict) else enumerate(value))
    kept = [(k, changed if k == key else v) for k, v in items if k != key or changed is not ...]
    return dict(kept) if isinstance(value, dict) else [v for _, v in kept]


def other_shape(value: Any) -> Any:
    """The same tensor with one row more, or a dimension; something else for all others."""
    if isinstance(value, Tensor):
        return torch.cat([value, value[:1]]) if value.dim() else value.repeat(2)
    return torch.rand(2, 3)


CHANGES: dict[str, Callable[[Any], Any]] = {
    "missing": lambda value: ...,
    "nothing": lambda value: None,
    "a number": lambda value: 10**30,
    "a string": lambda value: "__class__",
    "an empty list": lambda value: [],
    "a dictionary": lambda value: {"__": "tuple", "items": [1]},
    "a list": lambda value: [[value]],
    "another key": lambda value: {"_parameters": value, "__": "part", "class": "torch.Softplus"},
    "another shape": other_shape,
    "no elements": lambda value: torch.zeros(0, 10**9),
    "other numbers": lambda value: torch.zeros(3, 2, dtype=torch.int64),
}


@pytest.mark.filterwarnings("ignore:Using a non-tuple sequence:UserWarning")
def test_wrong_contents_are_refused_or_harmless(content: dict[str, Any], tmp_path: Path) -> None:
    """Something at a place in a checkpoint is not what it should be; digests are right."""
    state = torch.get_rng_state(), random.getstate(), np.random.get_state()  # noqa: NPY002
    changes = [(path, name) for path in places(content) for name in CHANGES]
    chosen = random.Random(0).sample(changes, 150)
    chosen += [((field,), name) for field in content for name in CHANGES]
    refused = 0
    for path, name in chosen:
        forge_content(tmp_path / "model.pt", replaced(content, path, CHANGES[name]))
        function = load_extra if path[0] == "extra" else partial(seqgp.load, random_state=True)
        try:
            function(tmp_path / "model.pt")
        except CheckpointError:
            refused += 1
        except BaseException as error:
            raise AssertionError(f"{path}, {name}: {error!r}") from error
    assert refused > len(chosen) / 2
    torch.set_rng_state(state[0])
    random.setstate(state[1])
    np.random.set_state(state[2])  # noqa: NPY002


KERNEL = ("parts", "covar_module", "arguments")
STRATEGY = "variational_strategy"
WRONG: dict[str, tuple[tuple[Any, ...], Callable[[Any], Any]]] = {
    "no parameters": (("parameters",), lambda value: {}),
    "a parameter's shape": (
        ("parameters", "covar_module.raw_outputscale", "value"),
        lambda value: value.expand(3),
    ),
    "inducing points of another dimension": (
        ("buffers", f"{STRATEGY}.inducing_points"),
        lambda value: value[:, :1],
    ),
    "inducing points without a row": (
        ("buffers", f"{STRATEGY}.inducing_points"),
        lambda value: value[0],
    ),
    "a posterior's shape": (("buffers", f"{STRATEGY}.dual_B"), lambda value: value[:-1]),
    "a posterior of others": (("buffers", f"{STRATEGY}.dual_lam"), lambda value: value[:-1]),
    "a transform's shape": (("buffers", "input_transform._offset"), lambda value: value[..., :1]),
    "rows of targets": (
        ("attributes", "", "stream", "arguments", "observations", "arguments", "targets"),
        lambda value: value[1:],
    ),
    "the kind of an attribute": (
        ("attributes", "", "stream", "arguments", "represents"),
        lambda value: "all",
    ),
    "an attribute of torch": (("attributes", ""), lambda value: {**value, "_modules": 1}),
    "a held attribute of torch": (
        ("held",),
        lambda value: {"likelihood._parameters": torch.zeros(1)},
    ),
    "an unknown module": (("training",), lambda value: {**value, "nowhere": True}),
    "an unknown class": (("parts", "mean_module", "class"), lambda value: "os.system"),
    "an unknown argument": (KERNEL, lambda value: {**value, "shell": True}),
    "many dimensions": (
        (*KERNEL, "base_kernel", "arguments"),
        lambda value: {**value, "ard_num_dims": 5 * 10**8},
    ),
    "more dimensions than there can be": (
        (*KERNEL, "base_kernel", "arguments"),
        lambda value: {**value, "ard_num_dims": 10**15},
    ),
    "a large batch": (
        KERNEL,
        lambda value: {**value, "batch_shape": {"__": "size", "items": [20_000, 30_000]}},
    ),
    "many inducing points": (
        ("buffers", f"{STRATEGY}.inducing_points"),
        lambda value: torch.rand(20_000, 2),
    ),
    "no data, many times": (
        ("attributes", "", "stream", "arguments", "observations", "arguments", "inputs"),
        lambda value: torch.zeros(10**9, 0, 2),
    ),
}


@pytest.mark.parametrize("name", list(WRONG))
def test_wrong_contents(name: str, content: dict[str, Any], tmp_path: Path) -> None:
    path, change = WRONG[name]
    forge_content(tmp_path / "model.pt", content)
    seqgp.load(tmp_path / "model.pt")
    forge_content(tmp_path / "model.pt", replaced(content, path, change))

    def load() -> None:
        with pytest.raises(CheckpointError, match=r"model\.pt"):
            seqgp.load(tmp_path / "model.pt")

    assert peak_memory(load) < 200


def test_random_states_are_set_together(content: dict[str, Any], tmp_path: Path) -> None:
    """NumPy's, with a wrong position, would read beyond its memory."""
    for place, new in (
        (("numpy", "items", 2), 10**6),
        (("numpy", "items", 1), [1, 2]),
        (("python", "items", 1), {"__": "tuple", "items": [1]}),
        (("torch",), torch.zeros(5056, dtype=torch.uint8)),
    ):
        changed = replaced(content, ("random", *place), lambda value, new=new: new)
        forge_content(tmp_path / "model.pt", changed)
        before = torch.get_rng_state(), random.getstate(), str(np.random.get_state())  # noqa: NPY002
        with pytest.raises(CheckpointError):
            seqgp.load(tmp_path / "model.pt", random_state=True)
        after = torch.get_rng_state(), random.getstate(), str(np.random.get_state())  # noqa: NPY002
        assert torch.equal(before[0], after[0])
        assert before[1:] == after[1:]


# -------------------------------------------------------------------------------- killed

STREAM = """
    import sys, time, torch, seqgp
    from pathlib import Path
    from gpytorch.likelihoods import BernoulliLikelihood
    from seqgp.checkpoint import load_extra

    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)


    def run(path, batches, slow=False):
        path = Path(path)
        if path.exists():
            model, start = seqgp.load(path, random_state=True), load_extra(path)["next"]
        else:
            torch.manual_seed(0)
            X = torch.rand(30, 2)
            model = seqgp.SequentialGP(
                X, (X.sum(-1, keepdim=True) > 1).to(X), likelihood=BernoulliLikelihood(),
                inducing_points=12,
            )
            start = 0
        for batch in range(start, batches):
            X = torch.rand(20, 2)  # a stream whose data come from torch's own generator
            model.update(X, (X.sum(-1, keepdim=True) > 1).to(X), memory=10, steps=3)
            seqgp.save(model, path, extra={"next": batch + 1})
            print(batch, flush=True)
            if slow and batch == 2:
                while True:  # until it is killed, in the middle of saving
                    seqgp.save(model, path, extra={"next": batch + 1})
        return model
"""


@pytest.mark.slow
def test_a_killed_stream_goes_on_bit_by_bit(tmp_path: Path) -> None:
    """A real process, killed while it writes; another one that goes on; and one without a pause."""
    source = textwrap.dedent(STREAM)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}

    def start(path: Path, slow: bool) -> subprocess.Popen[str]:
        code = f"{source}\nrun({str(path)!r}, 6, slow={slow})"
        return subprocess.Popen(
            [sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True
        )

    process = start(tmp_path / "killed.pt", slow=True)
    assert process.stdout is not None
    while process.stdout.readline().strip() != "2":
        assert process.poll() is None
    for _ in range(20):  # while it is being overwritten again and again, it is always whole
        assert load_extra(tmp_path / "killed.pt") == {"next": 3}
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    second = start(tmp_path / "killed.pt", slow=False)
    output, _ = second.communicate()
    assert second.returncode == 0
    assert output.split() == ["3", "4", "5"]
    threads = torch.get_num_threads()
    namespace: dict[str, Any] = {}
    exec(source, namespace)
    without_pause = namespace["run"](tmp_path / "whole.pt", 6)
    torch.set_num_threads(threads)
    assert_identical(without_pause, seqgp.load(tmp_path / "killed.pt"))


def test_a_loaded_model_that_is_saved_again_is_like_the_first(tmp_path: Path) -> None:
    """Modules that GPyTorch shares, such as the transforms of constraints, are no longer shared."""
    X = make_inputs(8, 2)
    first = SequentialGP(X, torch.sin(X[:, :1]))
    seqgp.save(first, tmp_path / "model.pt")
    seqgp.save(seqgp.load(tmp_path / "model.pt"), tmp_path / "model.pt")
    again = seqgp.load(tmp_path / "model.pt", like=SequentialGP(X, torch.sin(X[:, :1])))
    assert torch.equal(again.posterior(X).mean, first.posterior(X).mean)

"""What each process of a group does in `tests/test_distributed.py`.

A check is a function of the group. Every rank makes the whole data set, learns its own shard of it
together with the others, and compares with a model that has learnt all of it alone.
"""

from __future__ import annotations

import copy
import importlib
import os
import signal
import tempfile
import traceback
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from botorch.fit import fit_gpytorch_mll
from botorch.models.transforms import Normalize
from botorch.models.utils.inducing_point_allocators import GreedyVarianceReduction
from gpytorch.kernels import MaternKernel, ScaleKernel
from gpytorch.likelihoods import (
    BernoulliLikelihood,
    SoftmaxLikelihood,
    StudentTLikelihood,
)
from torch import Tensor

import seqgp
from seqgp import DualELBO, SequentialGP, SequentialMultiTaskGP
from seqgp.streaming.memory import MemoryOptions
from tests.helpers import CASES, problem
from tests.processes import forking

Check = Callable[[dist.ProcessGroup], None]
CHECKS: dict[str, Check] = {}
#: Modules that have more of them.
MORE = ("tests.distributed_model_checks",)
SEED = 3


def check(function: Check) -> Check:
    """Register a check."""
    CHECKS[function.__name__] = function
    return function


# ---------------------------------------------------------------------------- data and models


def shards(n: int, group: dist.ProcessGroup) -> list[slice]:
    """Uneven shards of ``n`` observations; with three ranks the second has none."""
    ends = {1: [n], 2: [n // 3, n], 3: [n // 4, n // 4, n]}[group.size()]
    return [slice(a, b) for a, b in zip([0, *ends[:-1]], ends, strict=True)]


def own(n: int, group: dist.ProcessGroup) -> slice:
    """That of this rank."""
    return shards(n, group)[dist.get_rank(group)]


def data(kind: str, n: int = 60, dtype: torch.dtype = torch.double) -> tuple[Tensor, Tensor]:
    """Inputs and observations of a kind."""
    torch.manual_seed(SEED)
    X = torch.rand(n, 2, dtype=dtype)
    f = torch.sin(6 * X[:, :1]) + X[:, 1:]
    if kind in ("gaussian", "student"):
        return X, f + 0.2 * torch.randn_like(f)
    if kind == "outputs":
        return X, torch.cat([f, f.cos()], -1) + 0.2 * torch.randn(n, 2, dtype=dtype)
    if kind == "bernoulli":
        return X, (f + 0.4 * torch.randn_like(f) > 0.8).to(X)
    return X, (1.4 * f + 0.3 * torch.randn_like(f)).round().clamp(0, 2)  # softmax


def options(kind: str) -> dict[str, Any]:
    """Arguments of the model; a kernel without priors, so that data decide."""
    torch.manual_seed(SEED)
    made: dict[str, Any] = {
        "bernoulli": lambda: {"likelihood": BernoulliLikelihood()},
        "student": lambda: {"likelihood": StudentTLikelihood()},
        "softmax": lambda: {"likelihood": SoftmaxLikelihood(num_classes=3, mixing_weights=False)},
    }
    result = made.get(kind, dict)()
    if kind != "outputs":
        result["covar_module"] = ScaleKernel(MaternKernel(2.5, ard_num_dims=2))
    return result


def pair(
    kind: str,
    group: dist.ProcessGroup,
    n: int = 60,
    first: int | None = None,
    dtype: torch.dtype = torch.double,
    **more: Any,
) -> tuple[SequentialGP, SequentialGP, Tensor, Tensor]:
    """A model of all ranks, one that is alone, and the data that come after the first ones."""
    X, Y = data(kind, n, dtype)
    first = n if first is None else first
    X0, Y0 = X[:first], Y[:first]
    part = own(first, group)
    alone = SequentialGP(X0, Y0, **copy.deepcopy(more), **options(kind))
    model = SequentialGP(
        X0[part], Y0[part], process_group=group, **copy.deepcopy(more), **options(kind)
    )
    return model, alone, X[first:], Y[first:]


def close(a: Any, b: Any, rtol: float = 1e-8, atol: float = 1e-8) -> None:
    """Raise unless numbers are the same."""
    torch.testing.assert_close(a, b, rtol=rtol, atol=atol, check_device=False)


def same_models(model: SequentialGP, alone: SequentialGP, tol: float = 1e-8) -> None:
    """Raise unless both are the same, on all ranks bit by bit."""
    test = torch.rand(7, 2, dtype=model.train_inputs[0].dtype, generator=torch.manual_seed(1))
    ours, theirs = model.posterior(test), alone.posterior(test)
    close(ours.mean, theirs.mean, tol, tol)
    close(ours.variance, theirs.variance, tol, tol)
    for name, value in alone.hyperparameter_values().items():
        close(model.hyperparameter_values()[name], value, tol, tol)
    close(
        model.variational_strategy.inducing_points, alone.variational_strategy.inducing_points, tol
    )
    assert model.num_seen == alone.num_seen
    assert model.num_data == alone.num_data
    held, stream = alone.stream, model.stream
    close(stream.gather(stream.observations.inputs, -2), held.observations.inputs)
    close(stream.gather(stream.observations.targets), held.observations.targets, tol, tol)
    close(stream.gather(stream.represents), held.represents, tol, tol)
    same_bits(model)


def same_bits(model: SequentialGP) -> None:
    """Raise unless all ranks hold the same numbers."""
    tensors = [*model.variational_strategy.tensors().values(), *model.parameters()]
    flat = torch.cat([t.detach().reshape(-1).double() for t in tensors])
    rows = model.variational_strategy.ranks.gather(flat.unsqueeze(0), 0)
    assert bool((rows == rows[0]).all()), "the ranks differ"


KINDS = ("gaussian", "student", "softmax", "outputs")


@check
def gradients(group: dist.ProcessGroup) -> None:
    """Of the bound with respect to all hyperparameters."""
    for kind in KINDS:
        for number in (8, None):  # sparse, and at all inputs
            model, alone, *_ = pair(kind, group, n=20, inducing_points=number)
            losses = [
                each.compute_custom_loss(DualELBO(each.likelihood, each)).sum()
                for each in (model, alone)
            ]
            close(*losses)
            grads = [
                torch.autograd.grad(value, [p for p in each.parameters() if p.requires_grad])
                for value, each in zip(losses, (model, alone), strict=True)
            ]
            for ours, theirs in zip(*grads, strict=True):
                # Sites are converged to a tolerance of 1e-5.
                close(ours, theirs, 1e-7, 1e-7)


@check
def fits(group: dist.ProcessGroup) -> None:
    """Of all data at once: exact, and with inducing points that are chosen anew."""
    few = {"optimizer_kwargs": {"options": {"maxiter": 2}}}
    for kind, number in (("gaussian", None), ("bernoulli", 6)):
        model, alone, *_ = pair(kind, group, n=20, inducing_points=number)
        for each in (model, alone):
            fit_gpytorch_mll(DualELBO(each.likelihood, each), **few)
        same_models(model, alone)


@check
def out_of_core(group: dist.ProcessGroup) -> None:
    """Batches that no process holds, another number of them on each."""
    for kind in ("gaussian", "student", "softmax"):
        X, Y = data(kind, 40)
        X, Y, Z = X, Y + 10 * (kind == "gaussian"), X[:8]
        part = own(40, group)
        given = {"inducing_points": Z, "tol": 1e-10}
        alone = seqgp.from_batches([(X, Y)], **given, **options(kind))
        shard = [*zip(X[part].split(9), Y[part].split(9), strict=True)]
        model = seqgp.from_batches(shard, process_group=group, **given, **options(kind))
        same_models(model, alone)
    bad = Y[part] * (torch.nan if dist.get_rank(group) == 1 else 1)
    with pytest.raises(ValueError, match=r"Rank 1: \w*Y"):
        seqgp.from_batches([(X[part], bad)], process_group=group, **given, **options(kind))
    # Candidates for inducing points are drawn from all data together, in proportion.
    counts: list[int] = []

    class Counting(GreedyVarianceReduction):
        def allocate_inducing_points(self, inputs: Tensor, *args: Any, **more: Any) -> Tensor:
            counts.append(len(inputs))
            return super().allocate_inducing_points(inputs, *args, **more)

    X, Y = data("gaussian", 400)
    part = own(400, group)
    few = seqgp.from_batches(
        [*zip(X[part].split(50), Y[part].split(50), strict=True)] or [(X[:0], Y[:0])],
        inducing_points=6,
        num_candidates=100,
        inducing_point_allocator=Counting(),
        input_transform=Normalize(2),
        process_group=group,
    )
    extremes = 2 * 2 * group.size()
    assert counts
    assert all(100 <= number <= 100 + group.size() + extremes for number in counts)
    close(few.input_transform.bounds, torch.stack([X.amin(0), X.amax(0)]))
    assert few.num_seen == 400
    same_bits(few)


@check
def minibatches(group: dist.ProcessGroup) -> None:
    """The same ones as in one process."""
    model, alone, *_ = pair("bernoulli", group, n=50, inducing_points=10)
    for each in (model, alone):
        fit_gpytorch_mll(DualELBO(each.likelihood, each), batch_size=16, epochs=3)
    same_models(model, alone)


def stream(
    kind: str,
    group: dist.ProcessGroup,
    tol: float = 1e-8,
    more: dict[str, Any] | None = None,
    **given: Any,
) -> tuple[SequentialGP, SequentialGP]:
    """Two updates by all ranks, and by one process."""
    model, alone, X, Y = pair(kind, group, n=60, first=30, inducing_points=10, **(more or {}))
    same_models(model, alone, tol)
    close(model.refresh(), alone.refresh(), tol, tol)
    for x, y in zip(X.split(15), Y.split(15), strict=True):
        part = own(15, group)
        ours, theirs = model.update(x[part], y[part], **given), alone.update(x, y, **given)
        for name in ("elbo", "log_density", "discount"):
            close(getattr(ours, name), getattr(theirs, name), tol, tol)
        for name in ("num_new", "num_memory", "memory_gained", "memory_lost", "num_inducing"):
            assert getattr(ours, name) == getattr(theirs, name), name
        assert ours.decision == theirs.decision
        same_models(model, alone, tol)
    return model, alone


@check
def updates(group: dist.ProcessGroup) -> None:
    """Without learning, also of several outputs; the memory is the same."""
    for kind in ("gaussian", "outputs"):
        stream(kind, group, learn=False, memory=20)


@check
def likelihoods(group: dist.ProcessGroup) -> None:
    """Construction, gradients of the bound, and an update, for every likelihood."""
    torch.set_default_dtype(torch.double)
    parts = slice(None), own(15, group), slice(None), own(9, group)
    for name in CASES:
        x, y, Z, _, likelihood, given, _ = problem(name, 24, 5)
        Y, noise = y.to(x).unsqueeze(-1), given.pop("noise", None)
        models, slopes = [], []
        for first, later, of in ((parts[0], parts[2], None), (parts[1], parts[3], group)):
            arguments = {k: v[:15][first] for k, v in given.items()}
            if noise is not None:
                arguments["noise"] = noise[:15][first]
            model = SequentialGP(
                x[:15][first],
                Y[:15][first],
                likelihood=copy.deepcopy(likelihood),
                covar_module=MaternKernel(1.5),
                inducing_points=Z,
                likelihood_arguments=arguments,
                process_group=of,
            )
            models.append(model)
            learnt = [p for p in model.parameters() if p.requires_grad]
            loss = model.compute_custom_loss(DualELBO(model.likelihood, model)).sum()
            slopes.append(torch.autograd.grad(loss, learnt, materialize_grads=True))
            arguments = {k: v[15:][later] for k, v in given.items()}
            if noise is not None:
                arguments["noise"] = noise[15:][later].unsqueeze(-1)
            model.update(x[15:][later], Y[15:][later], learn=False, memory=8, **arguments)
        try:
            for theirs, ours in zip(*slopes, strict=True):
                close(ours, theirs, 1e-7, 1e-7)  # sites are converged to a tolerance of 1e-5
            same_models(models[1], models[0])
        except AssertionError as error:
            raise AssertionError(name) from error
    torch.set_default_dtype(torch.float32)


@check
def updates_of_a_regression(group: dist.ProcessGroup) -> None:
    """With learning: hyperparameters, inducing points, standardisation and memory."""
    stream("gaussian", group, 1e-8, memory=20, steps=3)


@check
def updates_of_others(group: dist.ProcessGroup) -> None:
    """With learning, of other kinds, and by other rules."""
    for kind, given in (
        ("bernoulli", {"memory": MemoryOptions(15, policy="leverage", balance=True)}),
        ("outputs", {"inducing": "both"}),
        ("gaussian", {"mode": "paper", "optimizer": "adam"}),
        ("student", {"optimizer": "adam"}),
    ):
        stream(kind, group, 1e-8, **{"memory": 20, "steps": 2, **given})


@check
def tasks(group: dist.ProcessGroup) -> None:
    """A task that only the last rank observes is standardised alike on all of them."""
    X, Y = data("gaussian", 24)
    X[:, 1] = (torch.arange(24) >= 18).to(X)  # the first rank's batches have no task 1
    Y = torch.where(X[:, 1:] == 1, 100 + 30 * Y, Y)
    given: dict[str, Any] = {"all_tasks": [0, 1], "inducing_points": X[::4].clone()}
    part = own(12, group)
    alone = SequentialMultiTaskGP(X[:12], Y[:12], 1, **given)
    model = SequentialMultiTaskGP(X[:12][part], Y[:12][part], 1, process_group=group, **given)
    records = [
        each.update(x, y, learn=False, memory=20)
        for each, x, y in ((model, X[12:][part], Y[12:][part]), (alone, X[12:], Y[12:]))
    ]
    close(records[0].elbo, records[1].elbo)
    assert model.outcome_transform.observed == (0, 1)
    close(model.outcome_transform.means, alone.outcome_transform.means)
    close(model.outcome_transform.stdvs, alone.outcome_transform.stdvs)
    for x in (X[:, :1], X):
        close(model.posterior(x).mean, alone.posterior(x).mean)
        close(model.posterior(x).variance, alone.posterior(x).variance)
    same_bits(model)


@check
def drift(group: dist.ProcessGroup) -> None:
    """Discounts, given and chosen."""
    model, alone = stream("gaussian", group, learn=False, discount=0.9)
    X, Y = data("gaussian", 30)
    part = own(30, group)
    record = model.update(X[part], 8 - 3 * Y[part], learn=False, discount="auto")
    assert record.discount == alone.update(X, 8 - 3 * Y, learn=False, discount="auto").discount
    assert record.discount < 1
    same_models(model, alone)


@check
def forgetting(group: dist.ProcessGroup) -> None:
    """What any rank holds, or what has been folded, whichever rank asks for it."""
    model, alone = stream("gaussian", group, learn=False, memory=20)
    X, Y = data("gaussian", 60)
    wanted = torch.tensor([2, 3, 30, 41, 58, 59])
    part = own(6, group)
    model.forget(X[wanted[part]], Y[wanted[part]])
    alone.forget(X[wanted], Y[wanted])
    same_models(model, alone)


@check
def transforms(group: dist.ProcessGroup) -> None:
    """Statistics are those of all data."""
    model, alone, *_ = pair("gaussian", group, input_transform=Normalize(2), inducing_points=12)
    same_models(model, alone)
    close(model.input_transform.bounds, alone.input_transform.bounds)
    close(model.outcome_transform.stdvs, alone.outcome_transform.stdvs)


@check
def single_precision(group: dist.ProcessGroup) -> None:
    """float32: the same on all ranks, and close to one process."""
    model, alone, X, Y = pair("bernoulli", group, 80, 50, torch.float32, inducing_points=12)
    part = own(30, group)
    for each, rows in ((model, part), (alone, slice(None))):
        each.update(X[rows], Y[rows], learn=False, memory=20)
    same_models(model, alone, 2e-3)
    assert model.posterior(X).mean.dtype == torch.float32


@check
def fixed_noise(group: dist.ProcessGroup) -> None:
    """Noise variances come with the observations; predictions take their mean over all ranks."""
    X, Y = data("gaussian", 50)
    noise = 0.05 + 0.1 * X[:, :1]
    part, more = own(30, group), slice(30, 50)
    later = [slice(30 + s.start, 30 + s.stop) for s in shards(20, group)][dist.get_rank(group)]
    given = {"covar_module": MaternKernel(2.5), "inducing_points": X[:10]}
    alone = SequentialGP(X[:30], Y[:30], noise[:30], **copy.deepcopy(given))
    model = SequentialGP(X[part], Y[part], noise[part], process_group=group, **given)
    for _ in range(2):
        same_models(model, alone)
        close(*(m.posterior(X, observation_noise=True).variance for m in (model, alone)))
        if alone.num_updates == 0:
            model.update(X[later], Y[later], noise=noise[later], learn=False, memory=20)
            alone.update(X[more], Y[more], noise=noise[more], learn=False, memory=20)


@check
def checkpoints(group: dist.ProcessGroup) -> None:
    """What all ranks know is in one file, from which any number of ranks can go on."""
    model, alone = stream("bernoulli", group, learn=False, memory=20)
    path = Path(tempfile.gettempdir()) / f"seqgp-{os.getppid()}-{group.size()}.pt"
    seqgp.save(model, path, extra={"next": 4})
    single, again = seqgp.load(path), seqgp.load(path, process_group=group)
    dist.barrier(group)
    path.unlink(missing_ok=True)
    assert single.stream.shard is None
    same_models(again, alone)
    X, Y = data("bernoulli", 24)
    part = own(24, group)
    for each, rows in ((model, part), (again, part), (single, slice(None)), (alone, slice(None))):
        each.update(X[rows], Y[rows], learn=False, memory=20)
    for each in (model, again):
        same_models(each, alone)
    close(single.posterior(X).mean, alone.posterior(X).mean)
    close(model.gathered().memory.leverage, alone.memory.leverage)


@check
def more_processes(group: dist.ProcessGroup) -> None:
    """A checkpoint of two processes, with which three go on."""
    two = dist.new_group([0, 1])
    path = Path(tempfile.gettempdir()) / f"seqgp-{os.getppid()}-more.pt"
    X, Y = data("bernoulli", 24)
    alone = SequentialGP(*data("bernoulli", 30), inducing_points=8, **options("bernoulli"))
    alone.update(X, Y, learn=False, memory=20)
    if dist.get_rank(group) < 2:
        model, *_ = pair("bernoulli", two, n=30, inducing_points=8)
        part = own(24, two)
        model.update(X[part], Y[part], learn=False, memory=20)
        seqgp.save(model, path)
    dist.barrier(group)
    model = seqgp.load(path, process_group=group)
    dist.barrier(group)
    path.unlink(missing_ok=True)
    same_models(model, alone)
    part = own(24, group)
    model.update(1 - X[part], Y[part], steps=2, learn=True, memory=20)
    alone.update(1 - X, Y, steps=2, learn=True, memory=20)
    same_models(model, alone)


class Injected(Exception):
    """Something that goes wrong on one rank."""


def state_of(model: SequentialGP) -> list[Tensor]:
    """All that a failure could have changed."""
    tensors = [*model.variational_strategy.tensors().values(), *model.parameters()]
    stream = model.stream
    held = stream.observations
    tensors += [held.inputs, held.targets, stream.represents, stream.importance, stream.fade]
    return [*(t.detach().clone() for t in tensors), torch.tensor(stream.num_seen)]


def fails(
    model: SequentialGP, action: Callable[[], Any], kind: type[BaseException], words: str
) -> None:
    """Raise unless an action raises an error that names the rank, and changes nothing."""
    before = state_of(model)
    with pytest.raises(kind, match=words):
        action()
    for old, new in zip(before, state_of(model), strict=True):
        assert torch.equal(old, new)
    same_bits(model)


@check
def failures(group: dist.ProcessGroup) -> None:
    """Bad data, an exception or an interrupt, in each phase and on each rank."""
    model, _, X, Y = pair("bernoulli", group, n=24, first=16, inducing_points=5)
    me, part = dist.get_rank(group), own(8, group)
    x, y = X[part], Y[part]
    known = model.train_inputs[0][:1], model.train_targets[:1].unsqueeze(-1)
    path = Path(tempfile.gettempdir()) / "there is no such directory" / "model.pt"
    for guilty in range(group.size()):
        mine = me == guilty
        bad = torch.full((1, 2), torch.nan, dtype=x.dtype) if mine else x
        one = torch.ones(1, 1, dtype=x.dtype) if mine else y
        for method in (model.update, model.forget):
            fails(model, partial(method, bad, one), ValueError, f"Rank {guilty}: X")
        with pytest.raises(ValueError, match=f"Rank {guilty}: train_X"):
            SequentialGP(
                bad, one, process_group=group, inducing_points=X[:5], **options("bernoulli")
            )
        # Whatever an update calls, the first and the second time that it does, before and after
        # the exchanges of others.
        phases = [
            ("seqgp.streaming.update.draft_of", 1),
            ("seqgp.streaming.update._leverage", 1),
            ("seqgp.streaming.learning.maximise", 1),
            ("seqgp.streaming.learning.stream_densities", 2),
            ("seqgp.streaming.rules.fold_all_but", 1),
            ("seqgp.dual.natural_gradient.tie", 2),
            ("seqgp.variational.bound.converge_sites", 3),
            ("seqgp.dual.natural_gradient.posterior_variance", 7),
        ]
        kinds = ((Injected, RuntimeError), (KeyboardInterrupt, KeyboardInterrupt))
        for number, (phase, call) in enumerate(phases):
            raised, seen = kinds[number % 2]
            with injected(phase, call, raised, mine):
                learn = partial(model.update, x, y, learn=True, steps=2, memory=10)
                fails(model, learn, seen, f"Rank {guilty}")
        mll = DualELBO(model.likelihood, model)
        # Everything else that changes a model or writes a file.
        others: list[tuple[str, int, Callable[[], Any]]] = [
            ("seqgp.variational.bound.evidence", 3, partial(fit_gpytorch_mll, mll)),
            ("seqgp.models.fit._loss", 4, partial(fit_gpytorch_mll, mll, batch_size=8, epochs=3)),
            ("seqgp.dual.natural_gradient.tie", 2, partial(model.refresh, 1e-12)),
            ("seqgp.streaming.update._matches", 1, partial(model.forget, *known)),
            ("seqgp.streaming.update._note_kept", 1, partial(model.forget, *known)),
            ("seqgp.models.sharding._copy", 1, partial(seqgp.save, model, path)),
        ]
        for number, (phase, call, action) in enumerate(others):
            raised, seen = kinds[number % 2]
            with injected(phase, call, raised, mine):
                fails(model, action, seen, f"Rank {guilty}")
    fails(model, partial(seqgp.save, model, path), FileNotFoundError, "Rank 0")
    fails(model, lambda: model.update(x, y) if me else model.refresh(), RuntimeError, "different")
    model.update(x, y, memory=10)  # and it goes on


@contextmanager
def injected(target: str, call: int, error: type[BaseException], active: bool) -> Iterator[None]:
    """Let a function raise an error at its n-th call, on one rank."""
    if not active:
        yield
        return
    module_name, _, name = target.rpartition(".")
    module, calls = importlib.import_module(module_name), 0
    original = getattr(module, name)

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call:
            raise error("injected")
        return original(*args, **kwargs)

    setattr(module, name, wrapper)
    try:
        yield
    finally:
        setattr(module, name, original)
    assert calls >= call, f"{target} has been called {calls} times"


@check
def interrupts(group: dist.ProcessGroup) -> None:
    """Ctrl-C on one rank, at any moment of a fit, is raised on all of them."""
    model, *_ = pair("bernoulli", group, n=40, inducing_points=8)
    fit = partial(fit_gpytorch_mll, DualELBO(model.likelihood, model), batch_size=8)
    fit(epochs=1)  # imports what torch imports late, which an interrupt would leave half imported

    def interrupted(delay: float) -> None:
        if dist.get_rank(group) == 1:
            # And again after a while: Python ignores one that comes while a destructor runs.
            signal.setitimer(signal.ITIMER_REAL, delay, 10.0)
        try:
            fit(epochs=1000)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)

    for delay in (0.05, 0.2):
        fails(model, partial(interrupted, delay), KeyboardInterrupt, "Rank 1")


@check
def interrupted_exchanges(group: dist.ProcessGroup) -> None:
    """Ctrl-C on one rank during an exchange, the last one as well: all are changed, or none."""
    model, _, X, Y = pair("bernoulli", group, n=24, first=16, inducing_points=5)
    part, ranks = own(8, group), model.variational_strategy.ranks
    guilty, gather = dist.get_rank(group) == 1, dist.all_gather
    calls, wanted = 0, -1

    def interrupting(*args: Any, **more: Any) -> None:
        nonlocal calls
        calls += 1
        if guilty and calls == wanted:
            signal.raise_signal(signal.SIGINT)
        gather(*args, **more)

    def then_agree(action: Callable[[SequentialGP], Any], changed: SequentialGP) -> None:
        action(changed)
        ranks.agree()

    state = model.state_dict()
    model.covar_module.outputscale = 2.0
    few = {"batch_size": 8, "epochs": 1}
    actions: list[Callable[[SequentialGP], Any]] = [
        lambda model: model.refresh(),
        lambda model: fit_gpytorch_mll(DualELBO(model.likelihood, model), **few),
        lambda model: model.update(X[part], Y[part], learn=False, memory=10),
        lambda model: model.load_state_dict(state),
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_gather", interrupting)
        for action in actions:
            calls, wanted = 0, -1
            action(copy.deepcopy(model))
            for call in sorted({1, calls // 2, calls}):
                changed = copy.deepcopy(model)
                calls, wanted = 0, call
                with pytest.raises(KeyboardInterrupt, match="Rank 1"):
                    then_agree(action, changed)
                same_bits(changed)


@check
def destroyed(group: dist.ProcessGroup) -> None:
    """A model does not keep its group alive; it predicts without it, and says what is missing."""
    other = dist.new_group()
    model, alone, X, Y = pair("gaussian", other, n=20, first=15, inducing_points=5)
    before, gone = state_of(model), weakref.ref(other)
    dist.destroy_process_group(other)
    del other
    assert gone() is None
    close(model.posterior(X).mean, alone.posterior(X).mean)
    with pytest.raises(RuntimeError, match="process_group of this model has been destroyed"):
        model.update(X, Y)
    for old, new in zip(before, state_of(model), strict=True):
        assert torch.equal(old, new)


@check
def silence(group: dist.ProcessGroup) -> None:
    """A rank that does not answer is an error after the timeout of the group."""
    _, alone, X, Y = pair("gaussian", group, n=20, first=15, inducing_points=5)
    other = dist.new_group(timeout=timedelta(seconds=3))
    dist.barrier(group)  # so that nobody is late before it matters
    model = alone.scattered(other)
    before = state_of(model)
    if dist.get_rank(group) == 0:
        with pytest.raises(ConnectionError, match="does not answer"):
            model.update(X, Y)
        for old, new in zip(before, state_of(model), strict=True):
            assert torch.equal(old, new)
    dist.barrier(group)  # the others are there, but busy with this


@check
def death(group: dist.ProcessGroup) -> None:
    """A rank that ends is an error on the others. This is the last check."""
    model, _, X, Y = pair("gaussian", group, n=20, first=15, inducing_points=5)
    if dist.get_rank(group) == 1:
        return  # and ends
    with pytest.raises(ConnectionError, match="has ended"):
        model.update(X, Y)


# ---------------------------------------------------------------------------- the processes


def work(rank: int, size: int, store: str, names: list[str], report: Any) -> None:
    """What each process does: all checks, one after the other."""
    torch.set_num_threads(1)
    for module in MORE:
        importlib.import_module(module)
    # A timer interrupts, as Ctrl-C does, on this rank alone. Shells start what runs in the
    # background with interrupts ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=size,
        timeout=timedelta(minutes=3),  # on a busy machine
    )
    for name in names:
        try:
            CHECKS[name](dist.group.WORLD)
            error = ""
        except BaseException:  # an interrupt is one of the things that is checked
            error = traceback.format_exc()
        report.put((name, rank, error))
        if error:
            break  # the others may be anywhere
    report.close()
    report.join_thread()
    os._exit(0)  # without waiting for those that have failed


def run(size: int, names: list[str]) -> dict[str, str]:
    """The errors of all checks on so many processes, by name; empty ones if there are none."""
    context = torch.multiprocessing.get_context("fork")
    report = context.Queue()
    with tempfile.TemporaryDirectory() as directory:
        store = str(Path(directory) / "store")
        processes = [
            context.Process(target=work, args=(rank, size, store, names, report))
            for rank in range(size)
        ]
        with forking():
            for process in processes:
                process.start()
        for process in processes:
            process.join(600)
        errors = {name: "not run" for name in names}
        found: dict[str, list[str]] = {name: [] for name in names}
        while not report.empty():
            name, rank, error = report.get()
            found[name].append(f"rank {rank}: {error}" if error else "")
        for name, each in found.items():
            if len(each) == size:
                errors[name] = "\n".join(filter(None, each))
            elif each:
                errors[name] = "\n".join(["some ranks did not finish", *filter(None, each)])
        return errors

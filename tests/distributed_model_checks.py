"""Further checks of `tests/test_distributed.py`: other models, other data, and other shards."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from botorch.fit import fit_gpytorch_mll
from botorch.models.utils.inducing_point_allocators import GreedyVarianceReduction
from gpytorch.kernels import MaternKernel
from gpytorch.likelihoods import BernoulliLikelihood, GaussianLikelihood
from torch import Tensor

import seqgp
from seqgp import DualELBO, PreferenceGP, SequentialGP, SequentialMultiTaskGP
from seqgp.distributed import Ranks
from tests.distributed_checks import (
    check,
    close,
    data,
    fails,
    options,
    own,
    pair,
    same_bits,
    same_models,
    shards,
)
from tests.pretend_cuda import DEVICE, PretendCUDA

CPU = torch.device("cpu")


def without(n: int, group: dist.ProcessGroup, empty: int) -> slice:
    """The shard of this rank if one of the ranks has no data, and the others have the rest."""
    others = [rank for rank in range(group.size()) if rank != empty]
    me = dist.get_rank(group)
    if me == empty:
        return slice(0, 0)
    k = others.index(me)
    return slice(n * k // len(others), n * (k + 1) // len(others))


@check
def empty_shards(group: dist.ProcessGroup) -> None:
    """Nothing on one of the ranks, whichever it is: built, fitted, updated, or in batches."""
    X, Y = data("bernoulli", 36)
    few = {"optimizer_kwargs": {"options": {"maxiter": 1}}}
    for empty in range(group.size()):
        models = []
        for of, part, later in (
            (None, slice(None), slice(None)),
            (group, without(24, group, empty), without(12, group, empty)),
        ):
            model = SequentialGP(
                X[:24][part],
                Y[:24][part],
                process_group=of,
                inducing_points=6,
                **options("bernoulli"),
            )
            mll = DualELBO(model.likelihood, model)
            fit_gpytorch_mll(mll, **few)
            fit_gpytorch_mll(mll, batch_size=10, epochs=1)
            model.update(X[24:][later], Y[24:][later], steps=1, learn=True, memory=10)
            model.refresh()
            models.append(model)
        same_models(models[1], models[0])
        part = without(24, group, empty)
        given: dict[str, Any] = {"inducing_points": X[:6], "tol": 1e-10}
        one = seqgp.from_batches([(X[:24], Y[:24])], **given, **options("bernoulli"))
        batches = [(X[:24][part], Y[:24][part])]
        ours = seqgp.from_batches(batches, process_group=group, **given, **options("bernoulli"))
        same_models(ours, one)


@check
def fits_of_batches(group: dist.ProcessGroup) -> None:
    """As many steps as the rank with most batches has; minibatches are those of one process."""
    X, Y = data("bernoulli", 40)
    part = own(40, group)
    mine = list(zip(X[part].split(6), Y[part].split(6), strict=True)) or [(X[:0], Y[:0])]
    most = max(-(-len(X[s]) // 6) for s in shards(40, group))
    whole = [[X[s].split(6), Y[s].split(6)] for s in shards(40, group)]
    joined = [
        tuple(torch.cat([each[i][k] for each in whole if k < len(each[i])]) for i in (0, 1))
        for k in range(most)
    ]
    models = []
    for of, batches in ((None, joined), (group, mine)):
        model = seqgp.from_batches(
            batches, inducing_points=X[:6], process_group=of, tol=1e-10, **options("bernoulli")
        )
        models.append(seqgp.fit_batches(model, batches, epochs=2, tol=1e-10))
    same_models(models[1], models[0])
    guilty = dist.get_rank(group) == 1
    bad = [*mine, (X[:2], Y[:2] * torch.nan)] if guilty else mine
    fails(models[1], lambda: seqgp.fit_batches(models[1], bad), ValueError, "Rank 1: Y")

    class Broken:
        def __iter__(self) -> Iterator[Any]:
            yield mine[0]
            raise OSError("no such file")

    for action in (
        lambda: seqgp.fit_batches(models[1], Broken() if guilty else mine),
        lambda: seqgp.from_batches(
            Broken() if guilty else mine,
            inducing_points=X[:6],
            process_group=group,
            **options("bernoulli"),
        ),
    ):
        fails(models[1], action, OSError, "Rank 1: no such file")


@check
def nothing_at_all(group: dist.ProcessGroup) -> None:
    """Built before anything has been observed, and updated with batches of which one is empty."""
    X, Y = data("gaussian", 30)
    given = {"inducing_points": X[:6], "covar_module": MaternKernel(2.5, ard_num_dims=2)}
    alone = SequentialGP(X[:0], Y[:0], **given)
    given["covar_module"] = MaternKernel(2.5, ard_num_dims=2)
    model = SequentialGP(X[:0], Y[:0], process_group=group, **given)
    for rows in (slice(0, 0), slice(0, 30), slice(0, 0)):
        part = own(len(X[rows]), group)
        model.update(X[rows][part], Y[rows][part], learn=False, memory=10)
        alone.update(X[rows], Y[rows], learn=False, memory=10)
        same_models(model, alone)


@check
def small_batches(group: dist.ProcessGroup) -> None:
    """One observation at a time, of which only one rank has any."""
    model, alone, X, Y = pair("gaussian", group, n=124, first=120, inducing_points=12)
    for row in range(4):
        mine = slice(row, row + 1) if dist.get_rank(group) == row % group.size() else slice(0, 0)
        model.update(X[mine], Y[mine], memory=100, learn=False)
        alone.update(X[row : row + 1], Y[row : row + 1], memory=100, learn=False)
        same_models(model, alone)


@check
def discrete(group: dist.ProcessGroup) -> None:
    """Inducing points keep to values that have been seen by any of the ranks."""
    X, Y = data("gaussian", 40)
    X[:, 1] = torch.arange(40) // 10  # each value on few of the ranks
    for allocator in (None, GreedyVarianceReduction()):
        models = []
        for of, part, later in (
            (None, slice(None), slice(None)),
            (group, own(30, group), own(10, group)),
        ):
            model = SequentialGP(
                X[:30][part],
                Y[:30][part],
                process_group=of,
                inducing_points=8,
                inducing_point_allocator=allocator,
                discrete_dims=[1],
                **options("gaussian"),
            )
            model.update(X[30:][later], Y[30:][later], learn=True, steps=2, inducing="both")
            models.append(model)
        same_models(models[1], models[0])
        Z = models[1].variational_strategy.inducing_points[:, 1]
        assert {*Z.tolist()} <= {0.0, 1.0, 2.0, 3.0}


def task_data(n: int) -> tuple[Tensor, Tensor]:
    """Inputs with a task, and observations: numbers of two tasks, and labels of a third."""
    X, Y = data("outputs", n)
    task = torch.arange(n) % 3 if n > 20 else torch.full((n,), 5)
    task = torch.where(task == 2, 5, task)
    values = torch.where(task == 0, Y[:, 0], 20 + 3 * Y[:, 1])
    values = torch.where(task == 5, (Y[:, 0] > 0.5).to(X), values)
    return torch.cat([X, task.to(X).unsqueeze(-1)], -1), values.unsqueeze(-1)


@check
def tasks_of_few_ranks(group: dist.ProcessGroup) -> None:
    """Tasks of which each rank has some, one of which appears later, on one rank."""
    X, Y = task_data(45)
    first = X[:, 2] != 1
    X, Y = torch.cat([X[first], X[~first]]), torch.cat([Y[first], Y[~first]])
    order = X[:30, 2].argsort(stable=True)  # so that no rank has all tasks
    X, Y = torch.cat([X[order], X[30:]]), torch.cat([Y[order], Y[30:]])
    models = []
    for of, part, later in (
        (None, slice(None), slice(None)),
        (group, own(30, group), slice(0, 15) if dist.get_rank(group) == 1 else slice(0, 0)),
    ):
        model = SequentialMultiTaskGP(
            X[:30][part],
            Y[:30][part],
            task_feature=2,
            all_tasks=[0, 1, 5],
            likelihood=[GaussianLikelihood(), GaussianLikelihood(), BernoulliLikelihood()],
            inducing_points=10,
            process_group=of,
        )
        model.update(X[30:][later], Y[30:][later], learn=True, steps=2, memory=20)
        models.append(model)
    model, alone = models
    close(alone.outcome_transform.means, model.outcome_transform.means)
    same_tasks(alone, model)
    unseen = SequentialMultiTaskGP(X[:30][part], Y[:30][part], 2, process_group=group)
    assert unseen.all_tasks == (0, 5)  # those of all ranks
    bad = X[:2].clone()
    bad[:, 2] = 7 if dist.get_rank(group) == 1 else 0
    fails(alone, lambda: alone.update(bad, Y[:2]), ValueError, "Rank 1: X")


def same_tasks(model: SequentialMultiTaskGP, alone: SequentialMultiTaskGP) -> None:
    """Raise unless both are the same."""
    test = torch.rand(5, 2, dtype=torch.double, generator=torch.manual_seed(1))
    ours, theirs = model.posterior(test), alone.posterior(test)
    close(ours.mean, theirs.mean)
    close(ours.variance, theirs.variance)
    assert (model.num_seen, model.num_data) == (alone.num_seen, alone.num_data)
    same_bits(model)


@check
def preferences(group: dist.ProcessGroup) -> None:
    """Comparisons: of the same items on all ranks, or of items that only one of them has."""
    items, _ = data("gaussian", 12)
    pairs = torch.tensor([[i, (i + k) % 12] for k in (1, 5) for i in range(12)])
    worse = items[pairs].sum(-1).diff(dim=-1).squeeze(-1) > 0
    pairs = torch.where(worse.unsqueeze(-1), pairs.flip(-1), pairs)
    part, later = own(16, group), own(8, group)
    test = torch.rand(5, 2, dtype=torch.double, generator=torch.manual_seed(1))
    for cut in (False, True):
        mine = items
        chosen = pairs[:16][part]
        if cut:  # the items of this rank only, which has other indices for them
            used, index = chosen.unique(return_inverse=True)
            mine, chosen = items[used], index.reshape(-1, 2)
        alone = PreferenceGP(items, pairs[:16], inducing_points=items[:6] if cut else None)
        model = PreferenceGP(
            mine, chosen, inducing_points=items[:6] if cut else None, process_group=group
        )
        model.update(items, pairs[16:][later], learn=True, steps=2, memory=14)
        alone.update(items, pairs[16:], learn=True, steps=2, memory=14)
        close(model.posterior(test).mean, alone.posterior(test).mean)
        close(model.posterior(test).variance, alone.posterior(test).variance)
        assert (model.num_seen, model.num_data) == (24, 14)
        same_bits(model)
    bad = pairs[:1] + 100 * (dist.get_rank(group) == 1)
    fails(model, lambda: model.update(items, bad), ValueError, "Rank 1: Y")
    model.set_train_data(items, pairs[later])
    alone.set_train_data(items, pairs[:8])
    close(model.posterior(test).mean, alone.posterior(test).mean)


@check
def other_data(group: dist.ProcessGroup) -> None:
    """Training data, or hyperparameters, that are replaced on all ranks."""
    model, alone, X, Y = pair("gaussian", group, n=50, first=20, outcome_transform=None)
    part = own(30, group)
    model.set_train_data(X[part], Y[part].squeeze(-1), strict=False)
    alone.set_train_data(X, Y.squeeze(-1), strict=False)
    for each in (model, alone):
        each.refresh()
    assert model.num_data == 30
    test = X[:5]
    close(model.posterior(test).mean, alone.posterior(test).mean)
    other, *_ = pair("gaussian", group, n=20, outcome_transform=None)
    other.covar_module.outputscale = 2.0
    other.refresh()
    state = other.state_dict()
    first, second, *_ = pair("gaussian", group, n=24, outcome_transform=None)
    for each in (first, second):
        each.load_state_dict(state)
    same_models(first, second)
    wrong = {k: v for k, v in state.items() if dist.get_rank(group) != 1 or "raw" not in k}
    fails(first, lambda: first.load_state_dict(wrong), RuntimeError, "Rank 1")
    first.covar_module.outputscale = 3.0
    with pytest.raises(RuntimeError, match=r"call refresh\(\) on every rank"):
        first.posterior(X)


@check
def merged(group: dist.ProcessGroup) -> None:
    """What several groups have learnt is merged once it has been gathered."""
    model, alone, X, Y = pair("gaussian", group, n=30, first=20, inducing_points=8)
    other = SequentialGP(X, Y, inducing_points=8, **options("gaussian"))
    with pytest.raises(ValueError, match=r"gathered\(\)"):
        seqgp.merge([model, other])
    ours, theirs = seqgp.merge([model.gathered(), other]), seqgp.merge([alone, other])
    close(ours.posterior(X).mean, theirs.posterior(X).mean)


@check
def devices(group: dist.ProcessGroup) -> None:
    """Models on a GPU: of a group that has to take tensors to the host, and of one like NCCL's."""
    X, Y = data("bernoulli", 40)
    part, later = own(20, group), own(20, group)
    given: dict[str, Any] = {"inducing_points": 8, "process_group": group}

    def learnt(device: torch.device) -> tuple[Tensor, Tensor]:
        x, y = X.to(device), Y.to(device)
        model = SequentialGP(x[:20][part], y[:20][part], likelihood=BernoulliLikelihood(), **given)
        model.update(x[20:][later], y[20:][later], learn=True, steps=2, memory=15)
        fit_gpytorch_mll(DualELBO(model.likelihood, model), batch_size=8, epochs=1)
        model.forget(x[20:22][own(2, group)], y[20:22][own(2, group)])
        if device != CPU:
            assert {p.device for p in model.parameters()} == {device}
            assert model.stream.shard is not None
            assert model.stream.shard.position.device == device
        posterior = model.posterior(x[:5])
        return posterior.mean.detach().cpu(), posterior.variance.detach().cpu()

    there = {}
    with PretendCUDA():
        there["host"] = learnt(DEVICE)
    gather, reduce = dist.all_gather, dist.all_reduce

    def strict_gather(result: list[Tensor], tensor: Tensor, **more: Any) -> None:
        assert {t.device for t in (*result, tensor)} == {DEVICE}
        gather(result, tensor, **more)

    def strict_reduce(tensor: Tensor, **more: Any) -> None:
        assert tensor.device == DEVICE
        reduce(tensor, **more)

    with pytest.MonkeyPatch.context() as patch, PretendCUDA():
        patch.setattr(dist, "get_backend_config", lambda _: f"{DEVICE.type}:nccl")
        patch.setattr(dist, "all_gather", strict_gather)
        patch.setattr(dist, "all_reduce", strict_reduce)
        patch.setattr(Ranks, "_device", DEVICE)
        there["device"] = learnt(DEVICE)
    for name, pair_of in there.items():
        for ours, theirs in zip(pair_of, learnt(CPU), strict=True):
            assert torch.equal(ours, theirs), name

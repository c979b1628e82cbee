"""Several processes that share a stream: real ones, on one machine, with gloo.

All checks (`tests/distributed_checks.py`) run in one go, in copies of this process.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import weakref
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from seqgp import SequentialGP
from seqgp.distributed import ALONE, Ranks
from tests import distributed_model_checks  # noqa: F401  (which registers checks)
from tests.distributed_checks import CHECKS, run

#: With three processes, of which one has no data, those in which that matters.
OF_THREE = [
    *("updates_of_a_regression", "likelihoods", "forgetting", "more_processes", "minibatches"),
    *("empty_shards", "fits_of_batches", "tasks_of_few_ranks", "preferences", "drift", "discrete"),
]
#: With two. Those after which a process is no more come last.
LAST = ["death"]
OF_TWO = [name for name in CHECKS if name not in ("more_processes", *LAST)] + LAST


@cache
def errors(size: int) -> dict[str, str]:
    return run(size, OF_TWO if size == 2 else OF_THREE)


@pytest.mark.slow
@pytest.mark.parametrize("name", OF_TWO)
def test_two_processes(name: str) -> None:
    assert errors(2)[name] == ""


@pytest.mark.slow
@pytest.mark.parametrize("name", OF_THREE)
def test_three_processes_one_of_them_without_data(name: str) -> None:
    assert errors(3)[name] == ""


SCRIPT = """
import torch, torch.distributed as dist
import seqgp

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
X = torch.rand(40, 1, dtype=torch.double, generator=torch.manual_seed(0))
Y = torch.sin(6 * X)
mine = slice(rank, None, size)
model = seqgp.SequentialGP(X[:20][mine], Y[:20][mine], process_group=dist.group.WORLD)
model.update(X[20:][mine], Y[20:][mine], steps=2)
error = (model.posterior(X).mean - Y).abs().max()
assert error < 0.1 and model.num_seen == 40, error
print(f"rank {rank} has finished")
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_torchrun(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    root = Path(__file__).parents[1]
    done = subprocess.run(
        [*command, script],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=root,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(root)},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "rank 0 has finished" in done.stdout
    assert "rank 1 has finished" in done.stdout


def test_a_process_alone_exchanges_nothing() -> None:
    tensor = torch.arange(6.0, requires_grad=True)
    assert ALONE.sum(tensor)[0] is tensor
    assert ALONE.gather(tensor) is tensor
    assert ALONE.largest(tensor) is tensor
    assert ALONE.totalled(tensor) is tensor
    assert ALONE.shared(tensor) is tensor
    assert ALONE.counts(3) == [3]
    with pytest.raises(ValueError, match=r"^mine$"), ALONE.together():
        raise ValueError("mine")
    assert ALONE.bytes_sent == 0


def test_a_group_has_to_be_one() -> None:
    with pytest.raises(TypeError, match=r"process_group: expected a group of torch"):
        SequentialGP(torch.rand(3, 1), torch.rand(3, 1), process_group="gloo")


@pytest.fixture
def group_of_one(tmp_path: Path) -> dist.ProcessGroup:
    dist.init_process_group("gloo", f"file://{tmp_path}/store", rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_one_rank_is_as_no_group(group_of_one: dist.ProcessGroup) -> None:
    X = torch.rand(30, 1, dtype=torch.double, generator=torch.manual_seed(0))
    Y = torch.sin(6 * X)
    models = [SequentialGP(X[:20], Y[:20], process_group=g) for g in (None, group_of_one)]
    records = [model.update(X[20:], Y[20:], steps=3, memory=10) for model in models]
    assert records[0].elbo == records[1].elbo
    means = [model.posterior(X).mean for model in models]
    assert torch.equal(*means)
    assert torch.equal(models[1].gathered().posterior(X).mean, means[0])


def test_ranks_do_not_keep_their_group_alive(tmp_path: Path) -> None:
    """Threads of a group that outlive it would abort the process when it ends."""
    dist.init_process_group("gloo", f"file://{tmp_path}/store", rank=0, world_size=1)
    ranks, group = Ranks(dist.group.WORLD), weakref.ref(dist.group.WORLD)
    assert ranks.group is group()
    dist.destroy_process_group()
    assert group() is None
    with pytest.raises(RuntimeError, match=r"process_group of this model has been destroyed"):
        _ = ranks.group


def test_a_model_of_a_group_is_not_pickled(group_of_one: dist.ProcessGroup) -> None:
    with pytest.raises(TypeError, match=r"save it with seqgp"):
        pickle.dumps(Ranks(group_of_one))
    assert pickle.loads(pickle.dumps(Ranks())).alone

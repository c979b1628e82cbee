"""The speed-regression benchmark, quick and against this very tree; its parts against oracles."""

from __future__ import annotations

import json
import math
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gpytorch.kernels import MaternKernel, ScaleKernel
from gpytorch.mlls import VariationalELBO

from benchmarks import fit, regression
from benchmarks.__main__ import main
from benchmarks.regression import Target, Trees, Worker, Worktree, name_of
from benchmarks.regression_worker import BareStream, FitLarge, Update, bare_moments, bare_update
from benchmarks.runner import Options, Times
from tests.benchmarks.test_commands import ROOT, command

OLD_SEQGP = """
DualELBO = None
def SequentialGP(*args, **kwargs):
    print("not an answer")
    raise RuntimeError("this is the old tree")
"""


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any]]:
    directory = tmp_path_factory.mktemp("results")
    printed = command("regression", "--quick", "--against", str(ROOT), "--out", str(directory))
    return printed, json.loads((directory / "regression-quick.json").read_text())


@pytest.mark.slow
def test_all_rows_are_measured(quick: tuple[str, dict[str, Any]]) -> None:
    printed, result = quick
    assert {regression.row_of(key) for key in result["units"]} == set(regression.ROWS.values())
    for key, unit in result["units"].items():
        title = regression.row_of(key).title.format(**unit["arguments"])
        assert f"| {title} |" in printed
        assert unit["ratio"].keys() == unit["processor_seconds"].keys() - {"ours"}
        assert all(0 < value < math.inf for value in unit["ratio"].values())
        assert all(value > 0 for value in unit["processor_seconds"].values())


@pytest.mark.slow
def test_a_tree_computes_what_it_computes_itself(quick: tuple[str, dict[str, Any]]) -> None:
    """Compared with itself: two processes, the same numbers, bit by bit."""
    compared = 0
    for unit in quick[1]["units"].values():
        facts = unit.get("facts", {})
        if "old" in facts:
            assert facts["old"] == facts["ours"]
            compared += 1
        for name, difference in unit.get("differences", {}).items():
            assert difference <= (0 if name.endswith("/old") else 1e-6)
    assert compared == len(quick[1]["units"]) - 1  # all but the import


@pytest.mark.slow
def test_rivals_compute_the_same(quick: tuple[str, dict[str, Any]]) -> None:
    units = quick[1]["units"]
    rmse = units["hartmann6/n=20/seed0"]["facts"]
    assert rmse["ours"]["rmse"] == pytest.approx(rmse["botorch"]["rmse"], rel=1e-4)
    for name in ("gaussian", "bernoulli"):
        facts = units[f"large/{name}/n=1100/seed0"]["facts"]
        assert facts["ours"]["m"] == facts["botorch"]["m"] == 10
        assert math.isfinite(facts["botorch"]["bound"])
        # The evidence of labels, or of standardized targets, that are pure noise.
        noise = {"bernoulli": math.log(0.5), "gaussian": -0.5 * (math.log(2 * math.pi) + 1)}[name]
        assert facts["ours"]["bound"] > 1_100 * noise
    assert units["condition/gaussian"]["differences"].keys() == {
        f"{when}_{moment}/{way}"
        for when in ("before", "after")
        for moment in ("mean", "variance")
        for way in ("bare", "old")
    }


@pytest.mark.usefixtures("float64")
def test_bare_update_is_the_sparse_posterior_of_all_data() -> None:
    """Titsias' formulas in the space of inducing values, whatever is remembered."""
    generator = torch.Generator().manual_seed(0)
    X = torch.rand(60, 2, generator=generator)
    y = torch.sin(5 * X).sum(-1) + 0.1 * torch.randn(60, generator=generator)
    Z, X_test = X[:9].clone(), torch.rand(7, 2, generator=generator)
    kernel, noise = ScaleKernel(MaternKernel(nu=2.5)), torch.tensor([0.3])
    kernel.base_kernel.lengthscale = 0.4
    stream = BareStream.empty(Z, kernel, noise)

    def k(a: torch.Tensor, b: torch.Tensor) -> np.ndarray:
        return np.asarray(kernel(a, b).to_dense().detach())

    def sparse(n: int) -> tuple[np.ndarray, np.ndarray]:
        Kzz = k(Z, Z) + 1e-8 * np.diag(np.diag(k(Z, Z)))
        Kzx, Kz, s = k(Z, X[:n]), k(Z, X_test), float(noise)
        middle = np.linalg.inv(Kzz + Kzx @ Kzx.T / s)
        reduction = Kz.T @ (np.linalg.inv(Kzz) - middle) @ Kz
        return Kz.T @ middle @ Kzx @ np.asarray(y[:n]) / s, np.diag(k(X_test, X_test) - reduction)

    for n in (20, 40, 60):
        stream, density = bare_update(stream, X[n - 20 : n], y[n - 20 : n], capacity=15)
        for ours, expected in zip(bare_moments(stream, X_test), sparse(n), strict=True):
            np.testing.assert_allclose(ours, expected, rtol=1e-6, atol=1e-8)
        assert len(stream.y) == len(stream.X) == 15
        folded = y[:n].square().sum() - stream.y.square().sum()
        torch.testing.assert_close(stream.square, folded)
        if n == 20:  # what was expected is the prior
            total = np.diag(k(X[:20], X[:20])) + float(noise)
            expected = -0.5 * (np.asarray(y[:20]) ** 2 / total + np.log(2 * np.pi * total))
            assert float(density) == pytest.approx(expected.mean(), rel=1e-10)


@pytest.mark.usefixtures("float64")
def test_bare_update_expects_what_ours_expects() -> None:
    sizes = {"m": 8, "learn": False, "new": 20, "memory": 10, "past": 30, "dim": 3}
    facts = {}
    for way in ("seqgp", "bare"):
        task = Update(way, "gaussian", **sizes)
        facts[way] = task.facts(task.fresh()())
    assert facts["bare"]["log_density"] == pytest.approx(facts["seqgp"]["log_density"], rel=1e-7)
    assert facts["seqgp"]["memory"] == 10
    assert not facts["seqgp"]["moves_inducing_points"]


@pytest.mark.usefixtures("float64")
@pytest.mark.filterwarnings("ignore::botorch.exceptions.InputDataWarning")  # labels, to BoTorch
@pytest.mark.parametrize("way", ["seqgp", "botorch"])
@pytest.mark.parametrize("likelihood", ["gaussian", "bernoulli"])
def test_bounds_are_those_of_the_other_benchmark(way: str, likelihood: str) -> None:
    """GPyTorch's log probability of a label is an approximation, off by up to 2e-3."""
    task = FitLarge(way, likelihood, n=1_050, m=8, seed=0, max_steps=3)
    model = task.fresh()()
    process = model.model if way == "botorch" else model
    mll = VariationalELBO(model.likelihood, process, num_data=1_050)
    expected = 1_050 * fit.bound(mll, process, task.X, task.Y)
    tolerance = 0.0 if likelihood == "gaussian" else 2e-3 * 1_050
    assert task.facts(model)["bound"] == pytest.approx(expected, rel=1e-8, abs=tolerance)


@pytest.mark.usefixtures("float64")
def test_each_round_starts_from_the_same_stream() -> None:
    sizes = {"m": 8, "learn": True, "new": 20, "memory": 10, "past": 30, "dim": 3, "steps": 2}
    task = Update("seqgp", "bernoulli", **sizes)
    first, second = (task.facts(task.fresh()()) for _ in range(2))
    assert first == second
    assert first["evaluations"] >= 2
    assert first["before_mean"] != first["after_mean"]


@pytest.mark.slow
def test_worker_sees_its_own_tree(tmp_path: Path) -> None:
    """A tree whose model can do nothing: errors come back, prints do not get in the way."""
    (tmp_path / "seqgp").mkdir()
    (tmp_path / "seqgp" / "__init__.py").write_text(OLD_SEQGP)
    job = {"work": "Fit", "arguments": {"n": 5, "seed": 0, "test": 4}, "calls": 1, "facts": True}
    with Worker(tmp_path) as worker:
        with pytest.raises(RuntimeError, match="this is the old tree"):
            worker.ask(way="seqgp", **job)
        job["arguments"]["max_steps"] = 2
        answer = worker.ask(way="botorch", **job)  # goes on after an error
        assert answer["facts"]["rmse"] > 0
        assert answer["seconds"] > 0
    assert worker.process.returncode == 0


@pytest.fixture
def repository(tmp_path: Path) -> tuple[Path, Callable[..., str]]:
    """A repository with a ``seqgp`` in two versions."""
    path = tmp_path / "repository"
    (path / "seqgp").mkdir(parents=True)

    def git(*arguments: str) -> str:
        identity = ["-c", "user.name=nobody", "-c", "user.email=nobody@example.org"]
        done = subprocess.run(
            ["git", "-C", str(path), *identity, *arguments],
            env={key: value for key, value in os.environ.items() if not key.startswith("GIT_")},
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stdout.strip()

    git("init", "--quiet")
    for version in ("1", "2"):
        (path / "seqgp" / "__init__.py").write_text(f"version = {version}\n")
        git("add", ".")
        git("commit", "--quiet", "-m", version)
    return path, git


def test_worktree_of_a_revision(repository: tuple[Path, Callable[..., str]]) -> None:
    path, git = repository
    with Worktree("HEAD~1", path) as tree:
        assert (tree / "seqgp" / "__init__.py").read_text() == "version = 1\n"
        assert name_of(str(tree)) == git("rev-parse", "HEAD~1")
        assert len(git("worktree", "list").splitlines()) == 2
    assert not tree.exists()
    assert len(git("worktree", "list").splitlines()) == 1
    assert (path / "seqgp" / "__init__.py").read_text() == "version = 2\n"
    with pytest.raises(RuntimeError, match="worktree of nothing"), Worktree("nothing", path):
        pass


def test_names_of_what_is_compared_with(repository: tuple[Path, Callable[..., str]]) -> None:
    """A revision and a tree of it have one name, without a path of this machine."""
    path, git = repository
    head = git("rev-parse", "HEAD")
    assert name_of("HEAD", path) == name_of(head[:10], path) == name_of(str(path)) == head
    (path / "notes").write_text("")
    assert name_of(str(path)) == head
    (path / "seqgp" / "__init__.py").write_text("version = 3\n")
    assert name_of(str(path)) == f"{head} with changes"
    with pytest.raises(SystemExit, match="--against: expected a directory"):
        name_of("there-is-no-such-revision", path)


def test_nothing_starts_before_it_is_needed(tmp_path: Path) -> None:
    settings, units = regression.units(Options(quick=True, against=str(ROOT)))
    assert len({unit.key for unit in units}) == len(units)
    assert str(ROOT) not in json.dumps(settings)
    trees = Trees(str(ROOT))
    assert not {"paths", "workers"} & vars(trees).keys()


def test_slow_ways_take_fewer_turns() -> None:
    calls: list[str] = []

    def way(name: str, *seconds: float) -> Callable[[], float]:
        left = iter(seconds)

        def turn() -> float:
            calls.append(name)
            return next(left)

        return turn

    ways = {"ours": way("a", 1, 2, 4), "old": way("b", 10), "bare": way("c", 1, 1, 1)}
    times = regression.take_turns(ways, rounds=3, patience=7.5)
    assert calls == ["a", "b", "c", "a", "c", "a", "c"]
    assert times == {"ours": [1, 2, 4], "old": [10], "bare": [1, 1, 1]}
    summary = regression.summary_of(times)
    assert summary["ratio"] == {"old": 0.1, "bare": 2.0}
    assert summary["rounds"] == {"ours": 3, "old": 1, "bare": 3}
    assert summary["processor_seconds"] == {"ours": 2.0, "old": 10.0, "bare": 1.0}
    short = regression.take_turns({"ours": lambda: 5.0, "old": lambda: 1.0}, 4, patience=7.5)
    assert short == Times(ours=[5.0, 5.0], old=[1.0, 1.0])


def test_other_results_are_not_compared() -> None:
    assert regression.difference("mean", [2.0, -4.0], [2.0, -4.0 + 4e-7], 1e-6) == 1e-7
    for theirs in ([2.0, -4.1], [2.0, math.nan]):
        with pytest.raises(RuntimeError, match="mean: two ways"):
            regression.difference("mean", [2.0, -4.0], theirs, 1e-6)


def test_targets() -> None:
    unit = {"ratio": {"botorch": 0.2, "bare": 1.6}}
    faster, close = Target("botorch", "at least", 5), Target("bare", "at most", 1.5)
    assert faster.measured(unit) == 5
    assert faster.is_met_by(5)
    assert not faster.is_met_by(4.9)
    assert close.measured(unit) == 1.6
    assert close.is_met_by(1.5)
    assert not close.is_met_by(1.6)
    assert str(faster) == "BoTorch / ours >= 5"
    assert str(close) == "ours / bare tensors <= 1.5"


def unit_of(ratio: dict[str, float], arguments: dict[str, Any], **facts: Any) -> dict[str, Any]:
    seconds = {"ours": 1.0, **{way: 1 / each for way, each in ratio.items()}}
    return {"ratio": ratio, "processor_seconds": seconds, "arguments": arguments, "facts": facts}


@pytest.mark.parametrize(
    ("ratio", "rmse", "met"), [(1.2, 0.101, "yes"), (1.2, 0.103, "no"), (1.4, 0.1, "no")]
)
def test_a_fit_has_to_be_fast_and_good(ratio: float, rmse: float, met: str) -> None:
    units = {
        f"hartmann6/n=100/seed{seed}": unit_of(
            {"botorch": ratio + 0.1 * (seed - 1), "old": 0.5},
            {"n": 100},
            ours={"rmse": rmse},
            botorch={"rmse": 0.1},
        )
        for seed in range(3)
    }
    row = regression.render(units, Path()).splitlines()[-1]
    spread = f"{ratio:.2f} ({ratio - 0.1:.2f}-{ratio + 0.1:.2f})"
    assert f"| {spread} | ours / BoTorch <= 1.3 | {met} | 2.00 | RMSE {rmse:.4f}, 0.1000 |" in row


@pytest.mark.parametrize(("bound", "met"), [(-99.6, "yes"), (-101.0, "no")])
def test_a_large_fit_has_to_reach_the_bound(bound: float, met: str) -> None:
    unit = unit_of(
        {"botorch": 0.1},
        {"likelihood": "bernoulli", "n": 5000, "m": 100},
        ours={"bound": bound, "m": 100},
        botorch={"bound": -99.5, "m": 90},
    )
    row = regression.render({"large/bernoulli/n=5000/seed0": unit}, Path()).splitlines()[-1]
    assert "| fit, bernoulli, n = 5,000, m = 100;" in row
    assert f"| 10.00 | BoTorch / ours >= 5 | {met} |" in row
    assert row.endswith(f"bound {bound:.1f}, -99.5; inducing points 100, 90 |")


def test_updates_say_how_much_they_did() -> None:
    unit = unit_of(
        {"old": 0.4},
        {"likelihood": "gaussian", "m": 300, "new": 500, "memory": 400, "steps": 20},
        ours={"evaluations": 20, "moves_inducing_points": False},
        old={"evaluations": 24, "moves_inducing_points": True},
    )
    row = regression.render({"learn/gaussian": unit}, Path()).splitlines()[-1]
    assert "| 2.50 | old / ours >= 2 | yes | 2.50 |" in row
    assert row.endswith("| evaluations 20, 24; inducing points stay, move |")


def test_only_regression_compares_with_another_tree(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["core", "--against", "HEAD"])
    assert "--against is for regression" in capsys.readouterr().err

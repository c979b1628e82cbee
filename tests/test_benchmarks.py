"""The benchmark runner, and one benchmark for real but quick."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks import BENCHMARKS, data
from benchmarks.__main__ import main, report
from benchmarks.memory import MEGABYTE, peak_memory
from benchmarks.runner import PACKAGES, Result, Times, Unit, race, run

ROOT = Path(__file__).parent.parent


def command(*arguments: str) -> str:
    """What ``python -m benchmarks`` prints; one thread, as tests share the machine."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", *arguments],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def core(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    directory = tmp_path_factory.mktemp("results")
    printed = command("core", "--quick", "--out", str(directory))
    assert "| bernoulli |" in printed
    return directory, json.loads((directory / "core-quick.json").read_text())


def test_help_lists_the_benchmarks() -> None:
    printed = command("--help")
    for name, entry in BENCHMARKS.items():
        assert name in printed
        assert entry.description in printed
        assert (ROOT / "benchmarks" / f"{name}.py").exists()


@pytest.mark.parametrize(
    ("name", "only", "row"),
    [
        ("uci", "sorted/made_*/ours/*", "| made_regression |"),
        ("update", "time/gaussian/*", "| gaussian | 20 | 3,000 |"),
    ],
)
def test_streaming_benchmarks_run(name: str, only: str, row: str, tmp_path: Path) -> None:
    printed = command(name, "--quick", "--only", only, "--out", str(tmp_path))
    assert row in printed
    units = json.loads((tmp_path / f"{name}-quick.json").read_text())["units"]
    assert len(units) >= 2
    for unit in units.values():
        assert all(np.isfinite(value) for value in unit.values())


def test_core_says_how_it_was_made(core: tuple[Path, dict[str, Any]]) -> None:
    result = core[1]
    assert result["benchmark"] == "core"
    assert result["settings"]["quick"] is True
    assert result["settings"]["speed"] == {"n": 500, "m": 30, "d": 4, "rounds": 5}
    (made,) = result["runs"]
    assert made["versions"].keys() == {"python", *PACKAGES}
    assert made["versions"]["torch"] == torch.__version__
    assert made["threads"] == 1
    assert made["revision"] is None or len(made["revision"]) == 40


@pytest.mark.parametrize("name", ["bernoulli", "gaussian", "poisson"])
def test_core_compares_like_with_like(core: tuple[Path, dict[str, Any]], name: str) -> None:
    unit = core[1]["units"][f"step/{name}/threads=1/seed0"]
    assert unit["difference"]["bare"] <= 1e-8
    assert unit["difference"]["gpytorch"] <= 1e-3
    assert all(ms > 0 for ms in unit["milliseconds"].values())
    for way, fastest in unit["fastest"].items():
        assert fastest <= unit["milliseconds"][way]
    assert unit["ratio"]["bare"] > 0
    assert unit["seconds"] > 0


def test_core_measures_memory(core: tuple[Path, dict[str, Any]]) -> None:
    for n in (10_000, 100_000):
        unit = core[1]["units"][f"memory/n={n}"]
        assert unit["data"] == pytest.approx(n * 5 * 8 / MEGABYTE, abs=0.1)
        assert unit["extra"] == pytest.approx(unit["peak"] - unit["before"], abs=0.11)
        assert 0 < unit["extra"] < 400


def test_finished_run_is_not_repeated(core: tuple[Path, dict[str, Any]]) -> None:
    directory, result = core
    main(["core", "--quick", "--out", str(directory)])
    assert json.loads((directory / "core-quick.json").read_text()) == result


def test_report_renders_full_results_only(core: tuple[Path, dict[str, Any]]) -> None:
    directory, result = core
    assert "| bernoulli |" not in report(directory).read_text()
    (directory / "core.json").write_text(json.dumps(result))
    text = report(directory).read_text()
    assert "## core: " in text
    assert "| bernoulli | 1 |" in text
    assert "| 100,000 |" in text
    assert f"torch {torch.__version__}" in text


def test_interrupted_run_goes_on(tmp_path: Path) -> None:
    path, calls = tmp_path / "new" / "toy.json", []

    def work(key: str, fails: bool = False) -> Unit:
        def measure() -> dict[str, Any]:
            calls.append(key)
            if fails:
                raise KeyboardInterrupt
            return {"value": key.upper()}

        return Unit(key, measure)

    with pytest.raises(KeyboardInterrupt):
        run("toy", {"k": (1, 2)}, [work("a"), work("b", fails=True), work("c")], path)
    assert Result.load(path).units.keys() == {"a"}
    result = run("toy", {"k": (1, 2)}, [work("a"), work("b"), work("c")], path, only="[ab]")
    assert calls == ["a", "b", "b"]
    assert result.units["b"]["value"] == "B"
    assert [result.units[key]["run"] for key in "ab"] == [0, 1]
    with pytest.raises(SystemExit, match="other settings"):
        run("toy", {"k": 3}, [work("a")], path)
    assert run("toy", {"k": 3}, [work("a")], path, fresh=True).units.keys() == {"a"}
    assert calls == ["a", "b", "b", "a"]


def test_processes_can_share_a_result(tmp_path: Path) -> None:
    path = tmp_path / "toy.json"
    first, second = Result("toy", {}), Result("toy", {})
    with first.update(path):
        first.units["a"] = {}
    with second.update(path):
        second.units["b"] = {}
    assert Result.load(path).units.keys() == {"a", "b"}


def test_wrong_kind_of_repeats_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["core", "--folds", "2"])
    assert "--seeds" in capsys.readouterr().err


def test_race_takes_turns() -> None:
    calls: list[str] = []
    times = race(
        {"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, repeats=3, warm_up=1
    )
    assert calls == ["a", "b"] * 4
    assert len(times["a"]) == len(times["b"]) == 3
    times = Times(a=[2.0, 30.0, 4.0], b=[1.0, 10.0, 4.0])
    assert times.median("a") == 4.0
    assert times.fastest("a") == 2.0
    assert times.ratio("a", "b") == 2.0


def allocate(before: int, during: int) -> Iterator[int]:
    """Work for `peak_memory` whose answer is known, in megabytes."""
    data = torch.ones(before * MEGABYTE, dtype=torch.uint8)
    yield data.nbytes
    torch.ones(during * MEGABYTE, dtype=torch.uint8)


def test_peak_memory_is_that_of_the_work_alone() -> None:
    ballast = torch.ones(700 * MEGABYTE, dtype=torch.uint8)  # must not count in the other process
    measured = peak_memory(allocate, before=30, during=100)
    del ballast
    assert measured["data"] == 30
    assert measured["extra"] == pytest.approx(100, abs=5)
    assert measured["before"] < 700


def test_data_are_looked_for_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    cached = tmp_path / "cache" / "seqgp" / "toy.csv"
    cached.parent.mkdir(parents=True)
    cached.touch()
    assert data.find("toy.csv") == cached
    monkeypatch.setenv("SEQGP_DATA", str(tmp_path))
    (tmp_path / "toy.csv").touch()
    assert data.find("toy.csv") == tmp_path / "toy.csv"
    with pytest.raises(FileNotFoundError, match="SEQGP_DATA"):
        data.find("there-is-no-such-file")


def test_hotspots_compares_like_with_like(tmp_path: Path) -> None:
    """All ways start from the same sites; those with the same model from the same scores."""
    printed = command("hotspots", "--quick", "--out", str(tmp_path))
    assert "| paper mode" in printed
    assert "times as long" in printed
    assert (tmp_path / "hotspots.png").stat().st_size > 10_000
    units = json.loads((tmp_path / "hotspots-quick.json").read_text())["units"]
    for way in ("ours", "random", "paper", "ovc", "entropy", "binomial"):
        unit = units[f"{way}/seed0"]
        assert len(unit["chosen"]) == len(set(unit["chosen"])) == 3
        assert all(np.isfinite(unit[key]).all() for key in ("mse", "accuracy", "step_seconds"))
        assert len(unit["mse"]) == 4
    for ways in (("ours", "random", "entropy"), ("paper", "ovc", "binomial")):
        assert len({units[f"{way}/seed0"]["mse"][0] for way in ways}) == 1
    reference = units["reference/seed0"]
    assert reference["joint_cpu_seconds"] > 10 * reference["marginals_cpu_seconds"]

"""The benchmark runner, and one benchmark for real but quick."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks import BENCHMARKS, banana, data, magnetic, snapshots, splitmnist, timing
from benchmarks.__main__ import main, report
from benchmarks.memory import MEGABYTE, peak_memory
from benchmarks.runner import PACKAGES, Result, Times, Unit, race, run

ROOT = Path(__file__).parent.parent.parent


def command(*arguments: str) -> str:
    """What ``python -m benchmarks`` prints, in this process: torch takes seconds to import."""
    dtype, printed = torch.get_default_dtype(), io.StringIO()
    try:
        with redirect_stdout(printed):
            main(list(arguments))
    finally:
        torch.set_default_dtype(dtype)
    return printed.getvalue()


@pytest.fixture(scope="module")
def core(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    directory = tmp_path_factory.mktemp("results")
    printed = command("core", "--quick", "--out", str(directory))
    assert "| bernoulli |" in printed
    return directory, json.loads((directory / "core-quick.json").read_text())


@pytest.mark.slow
def test_help_lists_the_benchmarks() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", "--help"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    printed = done.stdout
    for name, entry in BENCHMARKS.items():
        assert name in printed
        assert entry.description in printed
        assert (ROOT / "benchmarks" / f"{name}.py").exists()


@pytest.mark.slow
def test_attacks_run_and_fail_nowhere(tmp_path: Path) -> None:
    """But for the last soaks, which take longer."""
    for only in ("[cikms]*s/*", "numerics/*", "*files", "soak/gaussian/*"):
        printed = command("attack", "--quick", "--only", only, "--out", str(tmp_path))
    units = json.loads((tmp_path / "attack-quick.json").read_text())["units"]
    assert {key: unit["first"] for key, unit in units.items() if unit["failures"]} == {}
    assert all(unit["trials"] for unit in units.values())
    for row in ("| sequences | 2 | 0 |", "| kills | 2 | 0 |", "| soak/gaussian | 40 | 0 | drift"):
        assert row in printed


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "only", "row"),
    [
        ("uci", "sorted/made_*/ours/*", "| made_regression |"),
        ("drift", "*/ours, auto/*", "| sine, abrupt |"),
        ("small_batches", "*", "| seed0 |"),
        ("uci", "sorted/made_*/[OC]*/*", "| | OVC | Csato & Opper |"),
        ("uci", "ten sets/made_regression/*", "| | leverage | random |"),
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


@pytest.mark.slow
def test_banana_runs(tmp_path: Path) -> None:
    """All methods on made data: the table, the figure, and what has to be so."""
    printed = command("banana", "--quick", "--out", str(tmp_path))
    units = json.loads((tmp_path / "banana-quick.json").read_text())["units"]
    assert "![class probabilities](banana.png)" in printed
    assert (tmp_path / "banana.png").stat().st_size > 10_000
    for part, methods in banana.METHODS.items():
        for name in methods:
            assert f"| {name} |" in printed
            unit = units[f"sorted/{part}/{name}/seed0"]
            assert np.isfinite(unit["nlpd"])
            assert 0 <= unit["distance"] <= unit["largest"] <= 1
            assert len(unit["nlpd_by_batch"]) == banana.BATCHES
            assert unit["nlpd_by_batch"][-1] == pytest.approx(unit["nlpd"], abs=1e-4)
    # At fixed hyperparameters the bound of Bui et al. is ours without a memory.
    fixed = [units[f"sorted/fixed/{name}/seed0"] for name in ("Bui et al.", "ours, no memory")]
    assert fixed[0]["distance"] == pytest.approx(fixed[1]["distance"], abs=1e-4)


@pytest.mark.slow
def test_magnetic_runs(tmp_path: Path) -> None:
    """On a made spiral: every step has its row, and ours keeps what it has driven through."""
    only = "explore/in order/ours"
    printed = command("magnetic", "--quick", "--only", only, "--out", str(tmp_path))
    units = json.loads((tmp_path / "magnetic-quick.json").read_text())["units"]
    assert "![maps](magnetic.png)" in printed
    assert (tmp_path / "magnetic.png").stat().st_size > 10_000
    for step in magnetic.SHOWN:
        assert f"| ours | {step} |" in printed
        assert units[only]["steps"][str(step)]["a"] < 0.4  # the made noise is 0.3
    assert len(magnetic.stream_of("revisit", "in order", quick=True).pieces) == 4


@pytest.mark.slow
def test_splitmnist_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On few of scikit-learn's digits: ours remembers, also without a memory; own sites do not."""
    name = splitmnist.QUICK
    own = "ours, no memory, own sites"
    for only in ("ours", "ours, no memory", own, "VAR-GP", "offline", "leverage"):
        key = f"{name}/{only}/seed0"
        main(["splitmnist", "--quick", "--only", key, "--out", str(tmp_path)])
    printed = capsys.readouterr().out
    units = json.loads((tmp_path / "splitmnist-quick.json").read_text())["units"]
    assert (tmp_path / "splitmnist-digits.png").stat().st_size > 10_000
    accuracy = {key.split("/")[1]: unit.get("accuracy") for key, unit in units.items()}
    assert min(accuracy["ours"], accuracy["ours, no memory"]) > 0.85
    assert accuracy[own] < 0.7
    assert accuracy["offline"] > max(0.9, accuracy["VAR-GP"] - 0.02)
    by_task = units[f"{name}/ours/seed0"]["by_task"]
    assert [len(row) for row in by_task] == [1, 2, 3, 4, 5]
    assert "| after task | 0, 1 | 2, 3 |" in printed
    moved = units[f"{name}/leverage/seed0"]["moved"]
    assert moved["leverage"]["20"] < moved["random"]["20"]


def test_figures_keep_what_they_draw() -> None:
    values = torch.rand(7, 3, dtype=torch.float64)
    np.testing.assert_allclose(snapshots.unpack(snapshots.pack(values), 3), values, atol=1e-3)


@pytest.mark.slow
def test_timing_runs(tmp_path: Path) -> None:
    printed = command("timing", "--quick", "--out", str(tmp_path))
    units = json.loads((tmp_path / "timing-quick.json").read_text())["units"]
    assert (tmp_path / "timing.png").stat().st_size > 10_000
    for method in timing.METHODS:
        assert f"| {method} |" in printed
        for order in timing.ORDERS:
            unit = units[f"{order}/{method}/fold0"]
            assert len(unit["nlpd"]) == len(unit["elapsed"]) == 4
            assert unit["elapsed"] == sorted(unit["elapsed"])
            assert np.isfinite(unit["nlpd"]).all()


def test_seconds_until() -> None:
    unit = {"elapsed": [1.0, 2.0, 3.0], "nlpd": [0.5, 0.3, 0.4]}
    assert timing.seconds_until(unit, 0.3) == 2.0
    assert timing.seconds_until(unit, 0.5) == 1.0
    assert timing.seconds_until(unit, 0.2) is None


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
def test_core_measures_memory(core: tuple[Path, dict[str, Any]]) -> None:
    for n in (10_000, 100_000):
        unit = core[1]["units"][f"memory/n={n}"]
        # Rounded to a tenth of a megabyte, each of them.
        assert unit["data"] == pytest.approx(n * 5 * 8 / MEGABYTE, abs=0.051)
        assert unit["extra"] == pytest.approx(unit["peak"] - unit["before"], abs=0.151)
        assert 0 < unit["extra"] < 400


@pytest.mark.slow
def test_finished_run_is_not_repeated(core: tuple[Path, dict[str, Any]]) -> None:
    directory, result = core
    main(["core", "--quick", "--out", str(directory)])
    assert json.loads((directory / "core-quick.json").read_text()) == result


@pytest.mark.slow
def test_report_renders_full_results_only(core: tuple[Path, dict[str, Any]]) -> None:
    directory, result = core
    report(directory)
    assert "| bernoulli |" not in (directory / "README.md").read_text()
    (directory / "core.json").write_text(json.dumps(result))
    report(directory)
    text = (directory / "README.md").read_text()
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


@pytest.mark.slow
def test_peak_memory_is_that_of_the_work_alone() -> None:
    ballast = torch.ones(700 * MEGABYTE, dtype=torch.uint8)  # must not count in the other process
    measured = peak_memory(allocate, before=30, during=100)
    del ballast
    assert measured["data"] == 30
    assert measured["extra"] == pytest.approx(100, abs=5)  # and what torch needs to begin with
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


@pytest.mark.slow
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

"""The tutorials, for real but short."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
import warnings
from functools import partial
from pathlib import Path

import matplotlib.image
import pytest
import torch

import seqgp.ax  # noqa: F401 (which each of the tutorials would import anew)
from tests.processes import printed_by

ROOT = Path(__file__).parent.parent.parent
#: Warnings that Python does not show by default.
HIDDEN = (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning)


def run(name: str, directory: Path, *options: str) -> tuple[Path, str]:
    """Run a tutorial in its short mode: no warnings, and no bars where there is no terminal."""

    def tutorial() -> None:
        sys.argv = [f"tutorials.{name}", *(options or ("--short",))]
        sys.modules.pop(sys.argv[0], None)  # it is run, not imported
        os.environ["PYTHONPATH"] = str(ROOT)  # of processes of its own; if it can, it copies itself
        torch.multiprocessing.spawn = partial(
            torch.multiprocessing.start_processes, start_method="fork"
        )
        warnings.simplefilter("error")
        for category in HIDDEN:
            warnings.simplefilter("ignore", category)
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)

    output, errors = printed_by(tutorial, directory)
    assert errors == ""
    return directory, output


def check_figure(path: Path, rows: int, columns: int) -> None:
    """Something is drawn in each of its panels."""
    image = matplotlib.image.imread(path)[..., :3]
    height, width = image.shape[0] // rows, image.shape[1] // columns
    assert image.shape[1] >= 700
    for row in range(rows):
        for column in range(columns):
            panel = image[row * height : (row + 1) * height, column * width : (column + 1) * width]
            assert (panel.min(-1) < 0.9).mean() > 0.01
            assert panel.std() > 0.04


def rows_of(output: str, columns: int) -> list[list[float]]:
    """Rows of a table: lines of so many numbers."""
    rows = [line.split() for line in output.splitlines() if line.strip()[:1].isdigit()]
    return [list(map(float, row)) for row in rows if len(row) == columns]


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Where the tutorial on streams was run, and what it printed."""
    return run("stream", tmp_path_factory.mktemp("stream"))


@pytest.fixture(scope="module")
def hotspots(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The same of the tutorial on hotspots."""
    return run("hotspots", tmp_path_factory.mktemp("hotspots"), "--tiny")


def test_index_has_them_all() -> None:
    """Every tutorial says how it is run, and is in the index."""
    index = (ROOT / "tutorials" / "README.md").read_text()
    for path in sorted((ROOT / "tutorials").glob("*.py")):
        if "def main(" in path.read_text():
            assert f"python -m tutorials.{path.stem}" in path.read_text()
            assert f"({path.name})" in index
            assert "--short" in path.read_text()


@pytest.mark.slow
def test_robot(tmp_path: Path) -> None:
    directory, output = run("robot", tmp_path)
    first, second, third = rows_of(output, 8)
    assert max(first[5], second[6], third[7]) < 4 < min(first[6], first[7], second[7])
    assert max(third[5], third[6]) < 2  # rooms that have been seen are not forgotten
    check_figure(directory / "figures" / "robot.png", 3, 2)
    check_figure(directory / "figures" / "robot-history.png", 3, 1)


@pytest.mark.slow
def test_banana(tmp_path: Path) -> None:
    directory, output = run("banana", tmp_path)
    rows = [line.split()[3:] for line in output.splitlines() if line.startswith("after batch")]
    stream, only, refitted = map(float, rows[-1])
    assert abs(stream - refitted) < 0.02  # as good as with all data at hand
    assert stream > only + 0.1  # and better than without the past
    check_figure(directory / "figures" / "banana.png", 1, 4)
    for name in ("banana-leverage", "banana-history"):
        check_figure(directory / "figures" / f"{name}.png", 1, 1)


@pytest.mark.slow
def test_checkpoints(tmp_path: Path) -> None:
    directory, output = run("checkpoints", tmp_path)
    assert "bitwise the same: True" in output
    assert output.index("(killed)") < output.index("resumes with batch 3")
    check_figure(directory / "figures" / "checkpoints.png", 1, 3)


@pytest.mark.slow
def test_shared_map(tmp_path: Path) -> None:
    directory, output = run("shared_map", tmp_path)
    assert "all robots have the same map: True" in output
    (line,) = [line for line in output.splitlines() if line.startswith("difference")]
    assert float(line.split()[-1]) < 1e-6
    check_figure(directory / "figures" / "shared_map.png", 1, 3)


@pytest.mark.slow
def test_new_processes_find_what_they_run(tmp_path: Path) -> None:
    """As when the site is built: `__main__` is not the tutorial."""
    script = ROOT / "tutorials" / "shared_map.py"
    code = f"exec(compile({script.read_text()!r}, {str(script)!r}, 'exec'))"
    subprocess.run(
        [sys.executable, "-c", code, "--short", "--quiet"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=True,
    )
    check_figure(tmp_path / "figures" / "shared_map.png", 1, 3)


@pytest.mark.slow
def test_figure_is_not_blank(demo: tuple[Path, str]) -> None:
    check_figure(demo[0] / "figures" / "stream.png", 2, 4)


@pytest.mark.slow
def test_stream_is_as_good_as_a_refit(demo: tuple[Path, str]) -> None:
    rows = [line.split() for line in demo[1].splitlines() if line.strip()[:1].isdigit()]
    assert len(rows) == 2 * 5
    for *_, stream, refit in rows:
        assert abs(float(stream) - float(refit)) < 0.02
    for task in (rows[:5], rows[5:]):
        assert float(task[-1][-2]) < float(task[0][-2]) - 0.1  # it has learnt something


@pytest.mark.slow
def test_threshold(tmp_path: Path) -> None:
    directory, output = run("threshold", tmp_path)
    chosen, random = (
        float(line.split("mean error ")[1].split()[0])
        for line in output.splitlines()
        if "mean error" in line
    )
    assert chosen < 5
    assert chosen < random  # at equal trials
    check_figure(directory / "figures" / "threshold.png", 1, 3)


@pytest.mark.slow
def test_preferences(tmp_path: Path) -> None:
    directory, output = run("preferences", tmp_path)
    chosen, random = (
        float(line.split("utility lost ")[1].split()[0])
        for line in output.splitlines()
        if "utility lost" in line
    )
    assert chosen < 0.5 * random  # at equal duels
    assert chosen < 0.3  # as much as the person's noise
    check_figure(directory / "figures" / "preferences.png", 2, 3)


@pytest.mark.slow
def test_failures(tmp_path: Path) -> None:
    directory, output = run("failures", tmp_path)
    for way in ("learnt", "penalised", "left out"):
        (row,) = [line for line in output.splitlines() if line.startswith(way)]
        assert row.endswith("%")
    check_figure(directory / "figures" / "failures.png", 2, 3)


@pytest.mark.slow
def test_ax_experiment(tmp_path: Path) -> None:
    directory, output = run("ax_experiment", tmp_path)
    for way in ("seqgp.ax", "Ax's default"):
        (row,) = [line for line in output.splitlines() if line.startswith(way)]
        assert row[len(way) :].split()[0] == "9"
    image = matplotlib.image.imread(directory / "figures" / "ax_experiment.png")[..., :3]
    height, width, _ = image.shape
    for row_of, column in ((r, c) for r in range(2) for c in range(3)):
        panel = image[
            row_of * height // 2 : (row_of + 1) * height // 2,
            column * width // 3 : (column + 1) * width // 3,
        ]
        assert panel.std() > 0.05


#: Rows and columns of panels in each figure of the tutorial on hotspots.
PANELS = {
    "hotspots": (1, 1),
    "hotspots-first": (1, 3),
    "hotspots-next": (1, 2),
    "hotspots-maps": (2, 4),
    "hotspots-curves": (1, 3),
    "hotspots-memory": (1, 1),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", list(PANELS))
def test_hotspot_figures_are_not_blank(name: str, hotspots: tuple[Path, str]) -> None:
    check_figure(hotspots[0] / "figures" / f"{name}.png", *PANELS[name])


@pytest.mark.slow
def test_hotspot_table(hotspots: tuple[Path, str]) -> None:
    """Accuracy, sensitivity and MSE of both ways, at several stages, starting alike."""
    rows = [line.split() for line in hotspots[1].splitlines() if line.strip()[:1].isdigit()]
    table = [list(map(float, row)) for row in rows if len(row) == 7]
    assert [row[0] for row in table] == [0, 2, 4, 6, 8]
    assert table[0][1::2] == table[0][2::2]
    for row in table:
        assert all(0 <= value <= 1 for value in row[1:])
        assert row[1] > 0.6
    assert "28 of 33 surveys" in hotspots[1]


def test_no_village_is_surveyed_twice() -> None:
    """The loop itself: every step adds one more village."""
    from seqgp.simulated_survey import make_country
    from tutorials.hotspots import TINY, learn, scores

    torch.set_default_dtype(torch.float64)
    try:
        country = make_country(80)
        first = torch.arange(15)
        plan = TINY._replace(steps=3, memory=20)
        for active in (True, False):
            states, model, _ = learn(country, country.scaled(first), first, plan, active)
            assert [len(state.surveyed) for state in states] == [15, 16, 17, 18]
            assert len(states[-1].surveyed.unique()) == 18
            assert model.num_seen == 18
            assert len(scores(country, states)["MSE"]) == 4
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.slow
def test_digits(tmp_path: Path) -> None:
    """Five tasks, three ways; the paper's forgets without a memory, ours does not."""
    directory, printed = run("digits", tmp_path, "--short")
    rows = {
        name: [float(value) for value in line[len(name) :].split()]
        for name in ("paper, no memory", "no memory", "memory")
        for line in printed.splitlines()
        if line.startswith(name + "  ")
    }
    assert all(len(row) == 5 for row in rows.values())
    last = {name: row[-1] for name, row in rows.items()}
    assert last["paper, no memory"] < 0.5
    assert min(last["no memory"], last["memory"]) > 0.85
    assert "remembered: 50 of 500, by class [5, 5, 5, 5, 5, 5, 5, 5, 5, 5]" in printed
    shares = printed.split("right class: ")[1].split(", ")[:2]
    low, high = (float(part.split()[0]) for part in shares)
    assert low > high + 0.2
    for name, rows_of, columns in (("confusion", 3, 5), ("memory", 1, 3)):
        image = matplotlib.image.imread(directory / "figures" / f"digits-{name}.png")[..., :3]
        height, width = image.shape[0] // rows_of, image.shape[1] // columns
        for row in range(rows_of):
            for column in range(columns):
                panel = image[
                    row * height : (row + 1) * height, column * width : (column + 1) * width
                ]
                assert panel.std() > 0.05


@pytest.mark.slow
def test_drift(tmp_path: Path) -> None:
    """An abrupt change is followed, and a stream that stays loses nothing."""
    directory, output = run("drift", tmp_path)
    check_figure(directory / "figures" / "drift.png", 1, 3)
    rows = {
        line.split()[0]: list(map(float, line.split()[1:])) for line in output.splitlines()[1:4]
    }
    without, auto, _, alarms = rows["stationary"]
    assert (auto, alarms) == (without, 0)
    assert rows["abrupt"][1] < 0.8 * rows["abrupt"][0]
    assert rows["gradual"][1] < rows["gradual"][0]

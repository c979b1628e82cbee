"""The tutorials, for real but short."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import matplotlib.image
import pytest

ROOT = Path(__file__).parent.parent


def run(name: str, directory: Path, *arguments: str) -> tuple[Path, str]:
    """Run a tutorial in its short mode."""
    done = subprocess.run(
        [sys.executable, "-W", "error::UserWarning", "-m", f"tutorials.{name}", *arguments],
        cwd=directory,
        env={**os.environ, "SEQGP_SMOKE": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return directory, done.stdout


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Where the tutorial on streams was run, and what it printed."""
    return run("stream", tmp_path_factory.mktemp("stream"))


@pytest.fixture(scope="module")
def hotspots(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The same of the tutorial on hotspots."""
    return run("hotspots", tmp_path_factory.mktemp("hotspots"))


def test_figure_is_not_blank(demo: tuple[Path, str]) -> None:
    image = matplotlib.image.imread(demo[0] / "figures" / "stream.png")[..., :3]
    height, width, _ = image.shape
    assert height >= 500
    assert width >= 1000
    # Something is drawn in each of the 2 x 4 panels.
    for row in range(2):
        for column in range(4):
            panel = image[
                row * height // 2 : (row + 1) * height // 2,
                column * width // 4 : (column + 1) * width // 4,
            ]
            assert (panel.min(-1) < 0.9).mean() > 0.01
            assert panel.std() > 0.05


def test_stream_is_as_good_as_a_refit(demo: tuple[Path, str]) -> None:
    rows = [line.split() for line in demo[1].splitlines() if line.strip()[:1].isdigit()]
    assert len(rows) == 2 * 5
    for *_, stream, refit in rows:
        assert abs(float(stream) - float(refit)) < 0.02
    for task in (rows[:5], rows[5:]):
        assert float(task[-1][-2]) < float(task[0][-2]) - 0.1  # it has learnt something


def test_failures(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tutorials.failures"],
        cwd=tmp_path,
        env={**os.environ, "SEQGP_SMOKE": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for way in ("learnt", "penalised", "left out"):
        (row,) = [line for line in done.stdout.splitlines() if line.startswith(way)]
        assert row.endswith("%")
    image = matplotlib.image.imread(tmp_path / "figures" / "failures.png")[..., :3]
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


@pytest.mark.parametrize("name", list(PANELS))
def test_hotspot_figures_are_not_blank(name: str, hotspots: tuple[Path, str]) -> None:
    image = matplotlib.image.imread(hotspots[0] / "figures" / f"{name}.png")[..., :3]
    rows, columns = PANELS[name]
    height, width = image.shape[0] // rows, image.shape[1] // columns
    assert image.shape[1] >= 700
    for row in range(rows):
        for column in range(columns):
            panel = image[row * height : (row + 1) * height, column * width : (column + 1) * width]
            assert (panel.min(-1) < 0.9).mean() > 0.01
            assert panel.std() > 0.04


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
    import torch

    from seqgp.datasets import make_country
    from tutorials.hotspots import SMOKE, learn, scores

    torch.set_default_dtype(torch.float64)
    try:
        country = make_country(80)
        first = torch.arange(15)
        plan = SMOKE._replace(steps=3, memory=20)
        for active in (True, False):
            states, model, _ = learn(country, country.scaled(first), first, plan, active)
            assert [len(state.surveyed) for state in states] == [15, 16, 17, 18]
            assert len(states[-1].surveyed.unique()) == 18
            assert model.num_seen == 18
            assert len(scores(country, states)["MSE"]) == 4
    finally:
        torch.set_default_dtype(torch.float32)


def test_digits(tmp_path: Path) -> None:
    """Five tasks, three memories; the one that is replayed forgets least."""
    directory, printed = run("digits", tmp_path, "--short")
    rows = {
        name: [float(value) for value in line[len(name) :].split()]
        for name in ("no memory", "memory", "memory, replayed")
        for line in printed.splitlines()
        if line.startswith(name + "  ")
    }
    assert all(len(row) == 5 for row in rows.values())
    last = {name: row[-1] for name, row in rows.items()}
    assert last["memory, replayed"] > max(0.75, last["memory"]) > last["no memory"]
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

"""The demo, for real but short."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import matplotlib.image
import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Where the demo was run, and what it printed."""
    directory = tmp_path_factory.mktemp("demo")
    done = subprocess.run(
        [sys.executable, "-W", "error::UserWarning", "-m", "tutorials.stream"],
        cwd=directory,
        env={**os.environ, "SEQGP_SMOKE": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return directory, done.stdout


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

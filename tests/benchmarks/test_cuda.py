"""The benchmark for GPUs, without one: on the CPU alone, and on a pretended device."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import cuda
from benchmarks.__main__ import main
from tests.pretend_cuda import DEVICE, PretendCUDA

pytestmark = pytest.mark.filterwarnings("ignore::botorch.exceptions.InputDataWarning")


@pytest.mark.parametrize(
    "job",
    [pytest.param(n, marks=pytest.mark.slow) if j.learns else n for n, j in cuda.JOBS.items()],
)
def test_jobs_run_on_another_device(job: str) -> None:
    """Where values are those of the CPU, and mixing devices raises."""
    with PretendCUDA() as device:
        measured = cuda.compare(DEVICE, job, "bernoulli", 40, 10, torch.float64)
    assert device.waits  # it was there
    assert measured["finite"]
    assert measured["same"]
    assert measured["difference"] == 0


def test_differences_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(model: object, X: torch.Tensor, Y: torch.Tensor) -> torch.Tensor:
        return X + 1e-6 * (X.device != cuda.CPU)

    monkeypatch.setitem(cuda.JOBS, "wrong", cuda.Job(wrong))
    with PretendCUDA():
        measured = cuda.compare(DEVICE, "wrong", "gaussian", 20, 5, torch.float64)
    assert not measured["same"]
    text = cuda.render({"wrong": measured}, Path())
    assert "**differs**" in text
    assert text.endswith("0 of 1 jobs are as they should be.")


def test_without_a_gpu_it_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    main(["cuda", "--quick", "--only", "posterior/*", "--out", str(tmp_path)])
    printed = capsys.readouterr().out
    assert "There is no GPU here" in printed
    assert "6 of 6 jobs are as they should be." in printed
    saved = json.loads((tmp_path / "cuda-quick.json").read_text())
    assert saved["settings"]["device"] is None
    assert not any("difference" in unit for unit in saved["units"].values())

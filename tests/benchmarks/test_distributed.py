"""The benchmark of processes that share data: one measurement, and what is made of the numbers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import distributed
from benchmarks.__main__ import main


@pytest.mark.slow
def test_two_ranks_are_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With predictions of one process, which is this one."""
    key = "build/ranks=2/n=2000"
    main(["distributed", "--quick", "--only", key, "--out", str(tmp_path)])
    unit = json.loads((tmp_path / "distributed-quick.json").read_text())["units"][key]
    assert "| build | 2,000 | 2 |" in capsys.readouterr().out
    model = distributed.learn("build", distributed.make_data("build", 2000, 0, 1), 20, None)
    posterior = model.posterior(distributed.inputs(50, 2))
    alone = torch.cat([posterior.mean, posterior.variance]).squeeze(-1)
    predicted = torch.tensor(unit["predicted"], dtype=torch.double)
    torch.testing.assert_close(predicted, alone, rtol=1e-8, atol=1e-8)
    assert all(seconds > 0 for seconds in (*unit["wall"], *unit["processor"]))
    sent = sum(number for _, number in unit["messages"])
    # Sums over the data, and what each rank knows of ten inputs and the scale of the targets.
    assert 8 * (20 * 20 + 20) < sent < 1_000_000


def test_shards_are_all_the_data() -> None:
    whole = distributed.make_data("labels", 1003, 0, 1)
    parts = [distributed.make_data("labels", 1003, rank, 3) for rank in range(3)]
    assert sum(len(X) for part in parts for X, _ in part) == 1003
    for number, (X, Y) in enumerate(whole):
        theirs = parts[number % 3][number // 3]
        assert torch.equal(X, theirs[0])
        assert torch.equal(Y, theirs[1])
        assert set(Y.flatten().tolist()) == {0.0, 1.0}


def test_simulation() -> None:
    messages = [("reduce", 1000), ("gather", 24)]
    # Four ranks: parts of 250 bytes go round twice, in three hops each; headers of 24 once.
    seconds = distributed.network_seconds(messages, 4, bandwidth=100.0, latency=0.5)
    assert seconds == pytest.approx(6 * (0.5 + 2.5) + 3 * (0.5 + 0.24))
    assert distributed.network_seconds(messages, 1, 100.0, 0.5) == 0
    total = distributed.simulated(1.0, 9.0, messages, 4, bandwidth=100.0, latency=0.5)
    assert total == pytest.approx(1 + 8 / 4 + seconds)


def test_report(tmp_path: Path) -> None:
    """Of half of the measurements, or of all."""
    measured = {"data": [1.0], "extra": [5.0], "predicted": [0.5]}
    units = {
        f"build/ranks={size}/n={n}": {
            **measured,
            "wall": [2.0 * n / size] * size,
            "processor": [1.0 + n / size] * size,
            "messages": [["reduce", 8_000_000]] * (size - 1),
        }
        for n in (10, 1000)
        for size in (1, 2)
    }
    text = distributed.render(units, tmp_path)
    assert (
        "| build | 1,000 | 2 | 1000.0 | 501.0 | 2.00, 2.00 | 1 | 5 | 8.00 | 1 | 0.0e+00 |" in text
    )
    # What every rank does once is 1 s: (1 + 1000 / 4) s, and the network.
    waiting = distributed.network_seconds([("reduce", 8_000_000)], 4, 1.25e9, 50e-6)
    assert f"| build | 1,000 | 4 | {251 + waiting:.2f} ({waiting:.2f}), 4.0 x |" in text
    del units["build/ranks=1/n=1000"]
    assert f"{row}  | 1 |" in distributed.render(units, tmp_path)

"""The benchmark of level sets: its observers, and that it runs."""

from __future__ import annotations

import pytest
import torch

from benchmarks.levelsets import measure, render
from benchmarks.psychometric import OBSERVERS


@pytest.mark.parametrize("name", OBSERVERS)
def test_observers(name: str) -> None:
    observer = OBSERVERS[name]
    X = observer.test_stimuli()
    p = observer.probability(X)
    assert ((p >= 0) & (p <= 1)).all()
    truth = (p > observer.threshold).to(X)
    assert 0.02 < truth.mean() < 0.98  # there is something to find
    assert observer.score(truth) == {"brier": 0.0, "error": 0.0}
    assert observer.score(torch.full_like(truth, 0.5))["brier"] == 0.25
    many = torch.stack([observer.respond(X, 0, seed) for seed in range(200)]).mean(0)
    assert (many - p).abs().mean() < 0.04
    # A trial has the same random number, in a batch or alone.
    assert torch.equal(observer.respond(X[5:6], 5, 0), observer.respond(X[:10], 0, 0)[5:6])
    start = observer.initial_stimuli(3)
    assert torch.equal(start, observer.initial_stimuli(3))
    # Initial trials end as soon as both responses have been seen.
    responses = observer.respond(start, 0, 3)
    assert len(start) >= observer.initial
    assert responses.unique().numel() == 2
    assert len(start) == observer.initial or responses[:-1].unique().numel() == 1


def test_runs(tmp_path: object) -> None:
    name = "detection (2-d)"
    unit = measure(name, "threshold-entropy", 1, 11)
    assert list(unit["scores"]) == ["10", "11"]
    assert len(unit["trial_seconds"]) == 1
    table = render({f"{name}/threshold-entropy/seed1": unit}, tmp_path)  # type: ignore[arg-type]
    assert "| mutual information (ours) | 0." in table

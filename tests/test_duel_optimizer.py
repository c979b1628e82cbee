"""A person compares items, and what it likes best is found."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import Tensor

from seqgp import PreferenceGP
from seqgp.acquisition import InformationAboutBest
from seqgp.duel_optimizer import DuelOptimizer

pytestmark = pytest.mark.usefixtures("float64")
BEST = torch.tensor([0.3, 0.6], dtype=torch.double)
BOUNDS = torch.tensor([[0.0, 0.0], [1.0, 1.0]], dtype=torch.double)
CHEAP: dict[str, Any] = {"num_restarts": 2, "raw_samples": 32, "options": {"maxiter": 20}}


def prefers_first(duels: Tensor) -> Tensor:
    distance = (duels - BEST).norm(dim=-1)
    return distance[:, 0] < distance[:, 1]


def loop(duels: int = 8, **options: Any) -> DuelOptimizer:
    optimizer = DuelOptimizer(BOUNDS, num_initial=4, **{**CHEAP, **options})
    while len(optimizer.answers) < duels:
        asked = optimizer.ask()
        optimizer.tell(asked, prefers_first(asked))
    return optimizer


@pytest.mark.slow
def test_the_best_item_is_found() -> None:
    optimizer = loop(24)
    assert bool((optimizer.best - BEST).norm() < 0.15)


def test_asking() -> None:
    """The same again, until something is told; batches and pending duels differ."""
    optimizer = loop()
    first = optimizer.ask()
    assert torch.equal(optimizer.ask(), first)
    batch = optimizer.ask(2)
    assert batch.shape == (2, 2, 2)
    assert torch.equal(batch[:1], first)
    assert not torch.allclose(batch[0], batch[1], atol=1e-3)
    assert not torch.allclose(optimizer.ask(X_pending=first), first, atol=1e-3)
    remembered = optimizer.ask(remember_pending=True)
    assert torch.equal(optimizer.pending, remembered[0])
    assert not torch.allclose(optimizer.ask(), first, atol=1e-3)
    optimizer.tell(remembered, [True])
    assert len(optimizer.pending) == 0


def test_initial_duels() -> None:
    optimizer = DuelOptimizer(BOUNDS)
    with pytest.raises(RuntimeError, match="no model yet: it is built after 6 answers"):
        optimizer.best  # noqa: B018
    first = optimizer.ask(2, remember_pending=True)
    more = optimizer.ask(2)
    assert len(torch.cat([first, more]).reshape(-1, 2).unique(dim=0)) == 8


def test_answers_are_learnt_as_given() -> None:
    optimizer = loop(4)
    model = optimizer.model
    winners = model.datapoints[model.comparisons[:, 0]]
    duels = optimizer.X.unflatten(0, (-1, 2))
    expected = torch.where(optimizer.answers.unsqueeze(-1), duels[:, 0], duels[:, 1])
    assert torch.equal(winners, expected)


def test_state() -> None:
    optimizer = loop(6, update_options={"learn": False, "inducing": "fixed"})
    optimizer.ask(remember_pending=True)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    again = DuelOptimizer(BOUNDS, num_initial=4, **CHEAP)
    again.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(again.X, optimizer.X)
    assert torch.equal(again.pending, optimizer.pending)
    for (name, a), b in zip(
        again.model.hyperparameter_values().items(),
        optimizer.model.hyperparameter_values().values(),
        strict=True,
    ):
        assert torch.equal(a, b), name
    empty = DuelOptimizer(BOUNDS)
    empty.load_state_dict(DuelOptimizer(BOUNDS).state_dict())


def test_another_acquisition_function() -> None:
    def information(model: PreferenceGP, pending: Tensor | None) -> InformationAboutBest:
        return InformationAboutBest(model, model.datapoints, 64)

    assert loop(5, make_acquisition=information).ask().shape == (1, 2, 2)


@pytest.mark.parametrize(
    ("duels", "answers", "message"),
    [
        (torch.rand(3, 2), [1, 0, 1], "duels: expected shape n x 2 x 2"),
        (torch.rand(1, 2, 2), [1, 0], "answers: expected 1, one for each duel"),
        (torch.rand(1, 2, 2), [0.5], "answers: expected True or False"),
        (torch.ones(1, 2, 2), [1], "an item cannot be compared with itself, as in row 0"),
        (torch.full((1, 2, 2), torch.nan), [1], "duels: expected finite numbers"),
    ],
)
def test_bad_input(duels: Tensor, answers: Any, message: str) -> None:
    optimizer = DuelOptimizer(BOUNDS)
    with pytest.raises(ValueError, match=message):
        optimizer.tell(duels.double(), answers)
    assert len(optimizer.answers) == 0

"""Updates work on a draft: the model is as it was before, or as it is after, and nothing else."""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch
from gpytorch.likelihoods import BernoulliLikelihood
from torch import Tensor

from seqgp import SequentialGP
from seqgp.streaming.draft import adopt, draft_of
from tests.helpers import make_inputs

pytestmark = pytest.mark.usefixtures("float64")


def make_model() -> SequentialGP:
    X = make_inputs(12, 2)
    Y = (X[:, :1] > 0.5).double()
    return SequentialGP(X, Y, likelihood=BernoulliLikelihood(), inducing_points=5)


def update(model: SequentialGP) -> None:
    X = make_inputs(20, 2)[12:]
    model.update(X, (X[:, 1:] > 0.5).double(), steps=2, memory=10)


def snapshot(model: SequentialGP) -> list[Tensor]:
    """Everything that an update changes."""
    held = model.stream.observations
    counts = torch.tensor([model.num_seen, model.num_updates])
    tensors = [*model.state_dict().values(), held.inputs, held.targets, model.memory_weights]
    return [tensor.clone() for tensor in (*tensors, counts)]


def is_same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(x.shape == y.shape and torch.equal(x, y) for x, y in zip(a, b, strict=True))


class Interrupts:
    """Raises a KeyboardInterrupt at some of the lines of the library that are executed."""

    def __init__(self, at: set[int]) -> None:
        self.at, self.lines = at, 0

    def __call__(self, frame: FrameType, event: str, argument: Any) -> Callable[..., Any] | None:
        if "/seqgp/" not in frame.f_code.co_filename:
            return None
        if event == "line":
            self.lines += 1
            if self.lines in self.at:
                raise KeyboardInterrupt
        return self

    def run(self, action: Callable[[], None]) -> bool:
        """Whether the action was interrupted."""
        before = sys.gettrace()
        sys.settrace(self)
        try:
            action()
        except KeyboardInterrupt:
            return True
        finally:
            sys.settrace(before)
        return False


def test_interrupts_anywhere_leave_no_mixture() -> None:
    """Single ones all over an update, and second ones shortly after the first."""
    first = make_model()
    before, updated = snapshot(first), copy.deepcopy(first)
    counter = Interrupts(set())
    assert not counter.run(lambda: update(updated))
    after = snapshot(updated)
    assert not is_same(before, after)
    generator = random.Random(0)
    lines = [generator.randrange(counter.lines) for _ in range(12)]
    lines += [counter.lines - k for k in range(1, 60, 3)]  # while the draft is adopted
    for line in lines:
        model = copy.deepcopy(first)
        second = line + generator.randrange(1, 20)
        assert Interrupts({line, second}).run(lambda model=model: update(model))
        now = snapshot(model)
        assert is_same(now, before) or is_same(now, after), line


def test_an_interrupt_while_adopting_is_raised_when_all_is_done() -> None:
    model = make_model()
    draft = draft_of(model, learn=True)
    update(draft)
    wanted = snapshot(draft)
    assert Interrupts({10}).run(lambda: adopt(model, draft))
    assert is_same(snapshot(model), wanted)


def test_a_draft_shares_what_it_does_not_change() -> None:
    model = make_model()
    conditions, learns = draft_of(model, learn=False), draft_of(model, learn=True)
    assert conditions.covar_module is model.covar_module
    assert learns.covar_module is not model.covar_module
    kernel = model.covar_module
    update(model)
    assert model.covar_module is kernel  # whoever holds it sees what has been learnt

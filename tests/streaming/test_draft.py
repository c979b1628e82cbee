"""Updates work on a draft: the model is as it was before, or as it is after, and nothing else."""

from __future__ import annotations

import copy
import random

import pytest
from gpytorch.likelihoods import BernoulliLikelihood

from seqgp import SequentialGP
from seqgp.streaming.draft import adopt, draft_of
from tests.helpers import make_inputs
from tests.reliability.interrupts import Interrupts, is_same, snapshot

pytestmark = pytest.mark.usefixtures("float64")


def make_model() -> SequentialGP:
    X = make_inputs(12, 2)
    Y = (X[:, :1] > 0.5).double()
    return SequentialGP(X, Y, likelihood=BernoulliLikelihood(), inducing_points=5)


def update(model: SequentialGP) -> None:
    X = make_inputs(20, 2)[12:]
    model.update(X, (X[:, 1:] > 0.5).double(), steps=2, memory=10)


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
    parameters = [list(each.covar_module.parameters()) for each in (model, conditions, learns)]
    for own, same, other in zip(*parameters, strict=True):
        assert same is own
        assert other is not own
    kernel = model.covar_module
    update(model)
    assert model.covar_module is kernel  # whoever holds it sees what has been learnt

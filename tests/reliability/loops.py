"""Random sequences of calls to ask-and-tell loops, and what has to hold whatever they are.

* `ask` returns points within the bounds, the same ones again, and changes nothing.
* What cannot be told is refused with a documented error, and an interrupted `tell` has happened, or
  has not; the state is bit by bit that of before or after.
* A loop that is saved and resumed has the same state.
"""

from __future__ import annotations

import copy
import inspect
import io
from collections import Counter
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from torch import Tensor

from seqgp.active_learner import ActiveLearner
from seqgp.ask_tell import AskTell
from seqgp.batch_optimizer import BatchOptimizer
from seqgp.duel_optimizer import DuelOptimizer
from tests.reliability.interrupts import Interrupts
from tests.reliability.machine import DOCUMENTED, SEEDS, quiet

BOUNDS = torch.tensor([[0.0, -1.0], [1.0, 3.0]], dtype=torch.float64)
SEARCH: dict[str, Any] = {"num_restarts": 1, "raw_samples": 4, "options": {"maxiter": 2}}
SHARED: dict[str, Any] = {"num_initial": 2, "fit_options": {"maxiter": 2}}


def random_points(n: int, seed: int) -> Tensor:
    """``n x 2`` points within the bounds."""
    generator = torch.Generator().manual_seed(seed)
    unit = torch.rand(n, 2, generator=generator, dtype=torch.float64)
    return BOUNDS[0] + (BOUNDS[1] - BOUNDS[0]) * unit


def learner_in_a_box() -> AskTell:
    """A learner of a level set, which refits now and then."""
    locations = random_points(8, 1)
    return ActiveLearner(
        BOUNDS, threshold=0.5, locations=locations, refit_every=3, **SHARED, **SEARCH
    )


def learner_from_a_pool() -> AskTell:
    """A learner that chooses from a pool."""
    return ActiveLearner(pool=random_points(10, 1), criterion="variance", **SHARED)


def optimizer() -> AskTell:
    """An optimiser with a trust region, of a function that may fail."""
    return BatchOptimizer(BOUNDS, trust_region=True, refit_every=2, **SHARED, **SEARCH)


def duels() -> AskTell:
    """An optimiser by duels."""
    return DuelOptimizer(BOUNDS, update_options={"steps": 1}, **SHARED, **SEARCH)


LOOPS: dict[str, Callable[[], AskTell]] = {
    "learner_in_a_box": learner_in_a_box,
    "learner_from_a_pool": learner_from_a_pool,
    "optimizer": optimizer,
    "duels": duels,
}


def outcomes(loop: AskTell, X: Tensor, seed: int) -> Tensor:
    """What is told about proposals."""
    f = (3 * X).sin().sum(-1)
    if isinstance(loop, DuelOptimizer):
        return f[:, 0] > f[:, 1]
    if isinstance(loop, ActiveLearner):
        return (f > 0.4).double()
    failed = torch.arange(len(X)) % 4 == seed % 4
    return torch.where(failed, torch.nan, f)


def is_same_state(a: Any, b: Any) -> bool:
    """Whether two states are the same, bit by bit."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(is_same_state(a[key], b[key]) for key in a)
    if isinstance(a, Tensor):
        return a.shape == b.shape and torch.equal(a.nan_to_num(-9.0), b.nan_to_num(-9.0))
    return bool(a == b)


def copied(loop: AskTell, kind: str) -> AskTell:
    """Another loop that has the same state, models included."""
    other = LOOPS[kind]()
    for name, value in vars(loop).items():
        if not inspect.isroutine(value):  # those are methods of the loop itself
            setattr(other, name, copy.deepcopy(value))
    return other


class Loops(RuleBasedStateMachine):
    """One loop, whatever happens to it."""

    #: How often each rule has been applied, by name; for reports.
    counts: ClassVar[Counter[str]] = Counter()

    @initialize(kind=st.sampled_from(list(LOOPS)))
    def build(self, kind: str) -> None:
        self.counts["sequences"] += 1
        self.counts[f"of {kind}"] += 1
        self.kind, self.loop = kind, LOOPS[kind]()

    def state(self) -> dict[str, Any]:
        return copy.deepcopy(self.loop.state_dict())

    def ask(self, q: int, **options: Any) -> Tensor:
        with quiet():
            return self.loop.ask(q, **options)

    def random(self, n: int, seed: int) -> Tensor:
        X = random_points(2 * n, seed)
        return X.unflatten(0, (n, 2)) if self.kind == "duels" else X[:n]

    @rule(q=st.integers(1, 2))
    def ask_twice(self, q: int) -> None:
        self.counts["ask"] += 1
        before = self.state()
        X = self.ask(q)
        assert X.shape[0] == q
        assert torch.equal(X.clamp(BOUNDS[0], BOUNDS[1]), X)
        assert torch.equal(self.ask(q), X)
        assert is_same_state(self.state(), before)

    @rule(q=st.integers(1, 2), seed=SEEDS, pending=st.booleans())
    def ask_and_tell(self, q: int, seed: int, pending: bool) -> None:
        self.counts["tell"] += 1
        X, n = self.ask(q, remember_pending=pending), len(self.loop.X)
        with quiet():
            self.loop.tell(X, outcomes(self.loop, X, seed))
        assert len(self.loop.X) == n + X[..., 0].numel()
        assert not len(self.loop.pending)

    @rule(n=st.integers(0, 3), seed=SEEDS)
    def tell_something_else(self, n: int, seed: int) -> None:
        self.counts["tell"] += 1
        X = self.random(n, seed)
        with quiet():
            self.loop.tell(X, outcomes(self.loop, X, seed))

    @rule(bad=st.sampled_from(["nan", "columns", "rows", "impossible", "text", "q"]), seed=SEEDS)
    def refuse(self, bad: str, seed: int) -> None:
        self.counts["refuse"] += 1
        X = self.random(3, seed)
        Y: Any = outcomes(self.loop, X, seed)
        if bad == "nan":
            X = X.clone()
            X[1, 0] = torch.nan
        elif bad == "columns":
            X = torch.cat([X, X], -1)
        elif bad == "rows":
            Y = Y[:2]
        elif bad == "impossible":
            Y = torch.full((3,), torch.inf)
        elif bad == "text":
            Y = ["a", "b", "c"]
        before = self.state()
        try:
            with quiet():
                self.loop.ask(1.5) if bad == "q" else self.loop.tell(X, Y)  # type: ignore[attr-defined]
        except DOCUMENTED:
            pass
        else:
            raise AssertionError(f"{bad}: was accepted")
        assert is_same_state(self.state(), before), bad

    @rule(seed=SEEDS, where=st.floats(0, 1), then=st.integers(1, 30))
    def interrupt(self, seed: int, where: float, then: int) -> None:
        """At a random line of `tell`, and again soon after."""
        self.counts["interrupt"] += 1
        X = self.random(1, seed)
        Y = outcomes(self.loop, X, seed)

        def tell(loop: Any) -> None:
            with quiet():
                loop.tell(X, Y)

        before, done = self.state(), copied(self.loop, self.kind)
        counter = Interrupts(set())
        assert not counter.run(lambda: tell(done))
        line = 1 + int(where * (counter.lines - 1))
        Interrupts({line, line + then}).run(lambda: tell(self.loop))
        now = self.state()
        assert is_same_state(now, before) or is_same_state(now, done.state_dict())

    @rule()
    def resume(self) -> None:
        self.counts["resume"] += 1
        file = io.BytesIO()
        torch.save(self.loop.state_dict(), file)
        file.seek(0)
        other: Any = LOOPS[self.kind]()
        with quiet():
            other.load_state_dict(torch.load(file, weights_only=True))
        assert is_same_state(other.state_dict(), self.loop.state_dict())
        self.loop = other

"""Random sequences of calls to the public interface, and what has to hold whatever they are.

* Good data are learnt, conditioned on, fantasised about, saved and converted without an error. Bad
  data are refused with an error of the kinds that are documented, and the model is bit by bit what
  it was before.
* Predictions are finite, variances at least zero, covariances positive semi-definite.
* Conditioning raises no variance if the likelihood is log-concave, and changes no model.
* A model that was saved and loaded is the same, and so is its next update.
* An interrupted update has happened, or has not.

`Machine` makes one sequence; hypothesis chooses. ``python -m benchmarks attack`` runs thousands.
"""

from __future__ import annotations

import copy
import pickle
import tempfile
import warnings
from collections import Counter
from pathlib import Path
from typing import Any, ClassVar

import torch
from botorch.acquisition import qUpperConfidenceBound
from botorch.exceptions.errors import BotorchError
from botorch.exceptions.warnings import BotorchWarning
from botorch.fit import fit_gpytorch_mll
from botorch.optim import optimize_acqf
from botorch.sampling import SobolQMCNormalSampler
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from linear_operator.utils.warnings import NumericalWarning
from torch import Tensor

import seqgp
from seqgp import DualELBO, SequentialGP
from seqgp.likelihoods.traits import precision_floor
from tests.reliability.interrupts import Interrupts, is_same, snapshot
from tests.reliability.subjects import SUBJECTS

#: What a call may raise, and say why.
DOCUMENTED = (ValueError, TypeError, BotorchError)
SEEDS = st.integers(0, 10_000)
TEST_POINTS = 6
#: Subjects with one output and acquisition functions of it.
OPTIMISED = ("gaussian", "bernoulli", "poisson", "student_t", "discrete", "preferences")


class Machine(RuleBasedStateMachine):
    """One model, whatever happens to it."""

    #: How often each rule has been applied, by name; for reports.
    counts: ClassVar[Counter[str]] = Counter()

    @initialize(
        kind=st.sampled_from(list(SUBJECTS)),
        dtype=st.sampled_from([torch.float64, torch.float64, torch.float32]),
        n=st.sampled_from([0, 1, 5, 12]),
        d=st.sampled_from([1, 2]),
        m=st.sampled_from([None, 1, 5]),
        seed=SEEDS,
    )
    def build(
        self, kind: str, dtype: torch.dtype, n: int, d: int, m: int | None, seed: int
    ) -> None:
        self.counts["sequences"] += 1
        self.counts[f"of {kind}"] += 1
        self.subject = SUBJECTS[kind](kind, d, dtype)
        self.directory = tempfile.TemporaryDirectory()
        torch.manual_seed(seed)
        with quiet():
            self.model = self.subject.build(n, m, seed)

    def teardown(self) -> None:
        if hasattr(self, "directory"):
            self.directory.cleanup()

    @property
    def log_concave(self) -> bool:
        return precision_floor(self.model.likelihood) is not None

    @property
    def test_inputs(self) -> Tensor:
        return self.subject.inputs(TEST_POINTS, 77_777)

    def predict(self, model: Any = None) -> tuple[Tensor, Tensor]:
        with torch.no_grad(), quiet():
            f = (self.model if model is None else model).posterior(self.test_inputs)
            return f.mean, f.variance

    # ---------------------------------------------------------------- learning

    @rule(
        n=st.integers(0, 6),
        seed=SEEDS,
        learn=st.booleans(),
        memory=st.sampled_from([None, 0, 1, 4]),
        inducing=st.sampled_from([None, None, "fixed", "adapt", "cluster"]),
        discount=st.sampled_from([1.0, 1.0, 0.9]),
    )
    def update(
        self,
        n: int,
        seed: int,
        learn: bool,
        memory: int | None,
        inducing: str | None,
        discount: float,
    ) -> None:
        self.counts["update"] += 1
        seen = self.model.num_seen
        X, Y, arguments = self.subject.observe(n, seed)
        options: dict[str, Any] = {} if memory is None else {"memory": memory}
        with quiet():
            record = self.model.update(
                X,
                Y,
                learn=learn,
                steps=2 if learn else None,
                inducing=inducing,
                discount=discount,
                **options,
                **arguments,
            )
        assert self.model.num_seen == seen + n
        assert record.num_new == n
        assert torch.tensor(record.elbo).isfinite()

    @rule(
        bad=st.sampled_from(
            ["nan input", "nan target", "inf", "columns", "rows", "impossible", "complex", "text"]
        ),
        seed=SEEDS,
        conditions=st.booleans(),
    )
    def refuse(self, bad: str, seed: int, conditions: bool) -> None:
        self.counts["refuse"] += 1
        X, Y, arguments = self.subject.observe(3, seed)
        bad_X: Any = X
        bad_Y: Any = Y
        if bad == "nan input":
            bad_X = X.clone()
            bad_X[1, 0] = torch.nan
        elif bad in ("nan target", "inf"):
            bad_Y = Y.to(self.subject.dtype, copy=True)
            bad_Y[2, 0] = torch.nan if bad == "nan target" else torch.inf
        elif bad == "columns":
            bad_X = torch.cat([X, X], -1)
        elif bad == "rows":
            bad_Y = self.subject.too_few(Y)
        elif bad == "impossible":
            bad_Y = self.subject.impossible(Y)
            if bad_Y is None:
                return
        elif bad == "complex":
            bad_Y = Y.to(torch.complex128)
        else:
            bad_Y = ["a", "b", "c"]
        before = snapshot(self.model)
        method = self.model.condition_on_observations if conditions else self.model.update
        try:
            with quiet():
                method(bad_X, bad_Y, **arguments)
        except DOCUMENTED:
            pass
        else:
            raise AssertionError(f"{bad}: was accepted")
        assert is_same(before, snapshot(self.model)), bad

    @rule(seed=SEEDS)
    def fit(self, seed: int) -> None:
        self.counts["fit"] += 1
        if len(self.model.stream.observations) == 0 or self.model.num_updates:
            return
        with quiet():
            fit_gpytorch_mll(
                DualELBO(self.model.likelihood, self.model),
                optimizer_kwargs={"options": {"maxiter": 2}},
            )

    @rule(seed=SEEDS, where=st.floats(0, 1), then=st.integers(1, 30), learn=st.booleans())
    def interrupt(self, seed: int, where: float, then: int, learn: bool) -> None:
        """At a random line of an update, and again soon after."""
        self.counts["interrupt"] += 1
        X, Y, arguments = self.subject.observe(2, seed)

        def learn_it(model: SequentialGP) -> None:
            with quiet():
                model.update(X, Y, learn=learn, steps=1 if learn else None, memory=3, **arguments)

        before, done = snapshot(self.model), copy.deepcopy(self.model)
        counter = Interrupts(set())
        assert not counter.run(lambda: learn_it(done))
        line = 1 + int(where * (counter.lines - 1))
        Interrupts({line, line + then}).run(lambda: learn_it(self.model))
        now = snapshot(self.model)
        assert is_same(now, before) or is_same(now, snapshot(done)), (line, counter.lines)

    # ---------------------------------------------------------------- conditioning

    @rule(n=st.integers(1, 3), seed=SEEDS, twice=st.booleans())
    def condition(self, n: int, seed: int, twice: bool) -> None:
        self.counts["condition"] += 1
        before = snapshot(self.model)
        _, variance = self.predict()
        model = self.model
        for k in range(1 + twice):
            X, Y, arguments = self.subject.observe(n, seed + k)
            with quiet():
                model = model.condition_on_observations(X, Y, **arguments)
        mean, after = self.predict(model)
        assert mean.isfinite().all()
        assert (after >= 0).all()
        if self.log_concave:
            slack = 1e-6 if self.subject.dtype == torch.float64 else 1e-3
            assert (after <= variance * (1 + slack) + slack).all()
        assert is_same(before, snapshot(self.model))

    @rule(seed=SEEDS, q=st.integers(1, 2), candidates=st.integers(1, 2))
    def fantasise(self, seed: int, q: int, candidates: int) -> None:
        self.counts["fantasise"] += 1
        if not self.subject.can_fantasise:
            return
        X = self.subject.candidates(candidates, q, seed)
        # Of comparisons it is drawn whether they are ties.
        arguments = {k: v for k, v in self.subject.arguments(q).items() if k != "ties"}
        before = snapshot(self.model)
        with quiet():
            fantasies = self.model.fantasize(
                X, SobolQMCNormalSampler(torch.Size([3]), seed=seed), **arguments
            )
            mean = fantasies.posterior(self.test_inputs).mean
        assert mean.shape[:3] == (3, candidates, TEST_POINTS)
        assert mean.isfinite().all()
        assert is_same(before, snapshot(self.model))

    @rule(seed=SEEDS)
    @precondition(lambda self: self.subject.kind in OPTIMISED)
    def optimise(self, seed: int) -> None:
        self.counts["optimise"] += 1
        before = snapshot(self.model)
        torch.manual_seed(seed)
        bounds = torch.tensor([[0.0], [1.0]], dtype=self.subject.dtype).expand(2, self.subject.d)
        acquisition = qUpperConfidenceBound(
            self.model, 2.0, sampler=SobolQMCNormalSampler(torch.Size([4]), seed=0)
        )
        with quiet():
            x, value = optimize_acqf(
                acquisition, bounds, 1, 1, 4, options={"maxiter": 2, "seed": seed}
            )
        assert value.isfinite().all()
        assert ((x >= 0) & (x <= 1)).all()
        assert is_same(before, snapshot(self.model))

    # ---------------------------------------------------------------- copies

    @rule(seed=SEEDS, way=st.sampled_from(["save", "copy", "pickle"]))
    def come_back(self, seed: int, way: str) -> None:
        """What is loaded or copied is the same, and learns the same."""
        self.counts[way] += 1
        path = Path(self.directory.name) / "model"
        if way == "save":
            seqgp.save(self.model, path)
            other = seqgp.load(path)
        elif way == "copy":
            other = copy.deepcopy(self.model)
        else:
            other = pickle.loads(pickle.dumps(self.model))
        assert is_same(snapshot(self.model), snapshot(other))
        for a, b in zip(self.predict(), self.predict(other), strict=True):
            assert torch.equal(a, b)
        X, Y, arguments = self.subject.observe(2, seed)
        for model in (self.model, other):
            torch.manual_seed(seed)
            with quiet():
                model.update(X, Y, learn=False, memory=3, **arguments)
        assert is_same(snapshot(self.model), snapshot(other))
        self.model = other

    @rule()
    def convert(self) -> None:
        self.counts["convert"] += 1
        old, self.subject.dtype = self.subject.dtype, torch.float32
        if old == torch.float32:
            self.subject.dtype = torch.float64
        self.model = self.model.to(self.subject.dtype)
        assert self.predict()[0].dtype == self.subject.dtype

    # ---------------------------------------------------------------- always

    @invariant()
    def predictions_are_possible(self) -> None:
        if not hasattr(self, "model"):
            return
        self.counts["steps"] += 1
        x = self.subject.points(TEST_POINTS, 77_777)
        with torch.no_grad(), quiet():
            f = self.model.eval()(self.model.transform_inputs(x))
            mean, covariance = f.mean, f.covariance_matrix
        assert mean.isfinite().all()
        assert (f.variance >= 0).all()
        eigenvalues = torch.linalg.eigvalsh(covariance.double())
        slack = 1e-6 if self.subject.dtype == torch.float64 else 1e-4
        assert (eigenvalues >= -slack * eigenvalues.amax(-1, keepdim=True)).all()
        if self.subject.kind in ("bernoulli", "poisson", "discrete"):
            with torch.no_grad(), quiet():
                noisy = self.model.posterior(x, observation_noise=True).mean
            assert (noisy >= 0).all()


class quiet(warnings.catch_warnings):
    """Without the warnings that any data of this kind have: unscaled, little, extreme."""

    def __enter__(self) -> Any:
        result = super().__enter__()
        warnings.simplefilter("ignore", BotorchWarning)
        warnings.simplefilter("ignore", NumericalWarning)
        warnings.filterwarnings("ignore", "Optimization failed", RuntimeWarning)
        return result

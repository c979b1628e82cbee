"""The loop of active learning: what it asks for, and what it must not know."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from gpytorch.likelihoods import GaussianLikelihood, PoissonLikelihood
from torch import Tensor

from seqgp import BinomialLikelihood, HeteroscedasticGaussianLikelihood, SequentialGP
from seqgp.acquisition import expected_reduction, prevalence, qExpectedUncertaintyReduction
from seqgp.active_learner import ActiveLearner, PerCost
from tests.helpers import assert_close, early_line_searches, make_inputs, unscaled

pytestmark = [pytest.mark.usefixtures("float64"), unscaled, early_line_searches]

FEW: dict[str, Any] = {"fit_options": {"maxiter": 10}, "threshold": 0.5, "criterion": "volume"}
#: An optimiser of BoTorch instead of the search.
BY_GRADIENT: dict[str, Any] = {"num_restarts": 2, "raw_samples": 32, "options": {"maxiter": 10}}


def unit(d: int = 2) -> Tensor:
    return torch.tensor([[0.0] * d, [1.0] * d], dtype=torch.float64)


def above(X: Tensor) -> Tensor:
    return X[:, 0] + 0.5 * X[:, 1] > 0.8


def learner(n: int = 12, pool: Tensor | None = None, **options: Any) -> ActiveLearner:
    """One that has been told ``n`` labels."""
    where = {} if pool is not None else {"locations": make_inputs(40, 2)}
    result = ActiveLearner(unit(), pool, **{**FEW, **where, **options})
    if n:
        X = make_inputs(n, 2)
        result.tell(X, above(X))
    return result


@pytest.mark.parametrize("criterion", ["volume", "threshold-entropy", "misclassification"])
def test_finds_a_level_set(criterion: str) -> None:
    pool = make_inputs(200, 2)
    loop = learner(0, pool, criterion=criterion, refit_every=6)
    loop.run(above, 6, progress=False)
    before = loop.uncertainty
    loop.run(above, 36, q=3, progress=False)
    assert len(loop.X) == 36
    right = (loop.probability_above(pool) > 0.5) == above(pool)
    assert right.double().mean() > 0.93
    assert 0 < loop.uncertainty < before / 2


@pytest.mark.parametrize("options", [{}, BY_GRADIENT], ids=["search", "gradient"])
def test_proposals_maximise_the_criterion(options: dict[str, Any]) -> None:
    """In a box as good as the best of many candidates, from a pool the best of all."""
    loop, candidates = learner(**options), make_inputs(400, 2)
    scores = expected_reduction(loop.model, candidates, loop.locations, "volume", 0.5)
    acquisition = qExpectedUncertaintyReduction(loop.model, loop.locations, "volume", 0.5)
    assert acquisition(loop.ask()).item() > 0.99 * scores.max()
    loop = learner(pool=candidates)
    scores = expected_reduction(loop.model, candidates, candidates, "volume", 0.5)
    assert torch.equal(loop.ask(), candidates[scores.argmax()].unsqueeze(0))


@pytest.mark.parametrize("pooled", [False, True])
def test_asking_changes_nothing(pooled: bool) -> None:
    loop = learner(pool=make_inputs(50, 2) if pooled else None)
    generator = torch.get_rng_state()
    first = loop.ask(2)
    assert torch.equal(loop.ask(2), first)
    assert torch.equal(torch.get_rng_state(), generator)
    other = loop.ask(1, X_pending=first[:1])
    assert_close(other, first[1:], 1e-12)  # a batch is its points one after the other
    assert len(loop.X) == 12
    assert len(loop.pending) == 0


@pytest.mark.parametrize("pooled", [False, True])
def test_pending_trials_are_remembered_until_they_are_told(pooled: bool) -> None:
    pool = make_inputs(50, 2) if pooled else None
    loop, plain = learner(pool=pool), learner(pool=pool)
    first = loop.ask(remember_pending=True)
    second = loop.ask(remember_pending=True)
    assert_close(torch.cat([first, second]), plain.ask(2), 1e-12)
    assert torch.equal(loop.pending, torch.cat([first, second]))
    loop.tell(second, above(second))
    assert torch.equal(loop.pending, first)
    plain.tell(second, above(second))
    assert_close(loop.ask(), plain.ask(X_pending=first), 1e-12)
    loop.forget_pending(first)
    assert_close(loop.ask(), plain.ask(), 1e-12)


def test_pending_trials_do_not_leak() -> None:
    """The model stays as it was, and proposals do not depend on the outcome to come."""
    loops = [learner(), learner()]
    X = [loop.ask(1, remember_pending=True) for loop in loops]
    next_ = [loop.ask(2) for loop in loops]
    assert torch.equal(X[0], X[1])
    assert torch.equal(next_[0], next_[1])
    assert loops[0].model.num_data == 12
    for loop, outcome in zip(loops, (0.0, 1.0), strict=True):
        loop.tell(X[0], torch.tensor([outcome]))
    assert not torch.equal(loops[0].ask(), loops[1].ask())


@pytest.mark.parametrize("refit_every", [None, 1, 100])
@pytest.mark.parametrize("pooled", [False, True])
def test_resumes_bit_by_bit(pooled: bool, refit_every: int | None) -> None:
    pool = make_inputs(50, 2) if pooled else None
    loop = learner(pool=pool, refit_every=refit_every)
    loop.tell(make_inputs(3, 2) * 0.9, torch.tensor([0, 1, 1]))
    loop.ask(remember_pending=True)
    file = io.BytesIO()
    torch.save(loop.state_dict(), file)
    file.seek(0)
    other = learner(0, pool, refit_every=refit_every)
    other.load_state_dict(torch.load(file, weights_only=True))
    for _ in range(2):
        X = loop.ask(2)
        assert torch.equal(other.ask(2), X)
        for each in (loop, other):
            each.tell(X, above(X))
    assert torch.equal(other.expected_outcome(X)[0], loop.expected_outcome(X)[0])
    with pytest.raises(ValueError, match=r"threshold = 0\.5"):
        learner(0, pool, threshold=0.7).load_state_dict(loop.state_dict())
    with pytest.raises(ValueError, match="not the state of a ActiveLearner"):
        other.load_state_dict({})


def test_starts_until_outcomes_differ() -> None:
    loop = learner(0, num_initial=4, max_initial=9)
    for n in range(12):
        assert loop.is_initial == (n < 9)
        loop.tell(loop.ask(), torch.ones(1))
    loop = learner(0, num_initial=4)
    loop.tell(make_inputs(3, 2), torch.tensor([0, 1, 1]))
    assert loop.is_initial
    loop.tell(make_inputs(1, 2), torch.ones(1))
    assert not loop.is_initial
    # A rule of the user's own: three of each.
    loop = learner(0, start_until=lambda Y: min(int(Y.sum()), int((1 - Y).sum())) >= 3)
    loop.tell(make_inputs(8, 2), torch.tensor([0, 0, 1, 1, 1, 1, 1, 1]))
    assert loop.is_initial
    loop.tell(make_inputs(1, 2), torch.zeros(1))
    assert not loop.is_initial


def test_a_hundred_labels_of_one_kind() -> None:
    """It cannot be certain of what it has never seen, and goes on to look for it."""
    loop = learner(0, max_initial=20, refit_every=10)
    loop.tell(make_inputs(95, 2) * torch.tensor([1.0, 0.5]), torch.ones(95))
    for _ in range(5):
        X = loop.ask()
        loop.tell(X, torch.ones(1))
    assert loop.X[95:, 1].min() > 0.5  # where nothing is known
    mean, sd = loop.expected_outcome(torch.cat([unit(), make_inputs(50, 2)]))
    assert (mean < 1 - 1e-4).all()
    assert (sd > 1e-5).all()
    loop = learner(0, refit_every=10)
    loop.tell(make_inputs(5, 2) * 0.3, torch.ones(5))
    assert loop.expected_outcome(unit()[1:])[0] < 0.95


def test_learns_when_there_are_a_tenth_more() -> None:
    """And at once when the second kind of label is seen for the first time."""
    loop = learner(0)
    loop.tell(make_inputs(22, 2), torch.ones(22))
    unlearnt = loop.model.covar_module.outputscale.item()
    fitted = []
    for n in range(22, 28):
        X = make_inputs(n + 1, 2)[n:]
        loop.tell(X, torch.tensor([float(n != 22)]))
        fitted.append(loop._learner.num_fitted)
        assert loop.model.train_inputs[0].shape[-2] == n + 1
        assert (loop.model.covar_module.outputscale.item() == unlearnt) is False
    assert fitted == [23, 23, 25, 25, 27, 27]
    same = loop.model.covar_module.state_dict()
    loop.tell(loop.X[:1], loop.Y[:1])
    again = SequentialGP(
        loop.X,
        loop.Y.unsqueeze(-1),
        likelihood=loop.likelihood,
        covar_module=copy.deepcopy(loop.model.covar_module),
        mean_module=copy.deepcopy(loop.model.mean_module),
        input_transform=copy.deepcopy(loop.model.input_transform),
    )
    X = make_inputs(9, 2)
    for name, value in loop.model.covar_module.state_dict().items():
        assert torch.equal(value, same[name])
    assert_close(loop.expected_outcome(X)[0], again.predict_proba(X)[:, 1], 1e-6)


def test_options_of_the_space() -> None:
    """Levels and fixed inputs, whether searched or by an optimiser of BoTorch."""
    levels = {1: [0.0, 0.25, 1.0]}
    for options in ({}, {"num_restarts": 2, "raw_samples": 32}):
        X = learner(discrete_dims=levels, **options).ask(2)
        assert torch.isin(X[:, 1], torch.tensor(levels[1])).all()
        assert (learner(fixed_features={0: 0.3}, **options).ask(2)[:, 0] == 0.3).all()
    line = (torch.tensor([0, 1]), torch.ones(2), 1.5)  # x0 + x1 >= 1.5
    assert (learner(inequality_constraints=[line]).ask(2).sum(-1) > 1.5 - 1e-6).all()


def test_costs() -> None:
    def costs(X: Tensor) -> Tensor:
        return torch.where(X[:, 0] < 0.5, 1.0, 100.0)

    pool = make_inputs(60, 2)
    assert (learner(pool=pool, costs=costs).ask(2)[:, 0] < 0.5).all()
    for options in ({}, BY_GRADIENT):
        loop = learner(costs=costs, **options)
        assert loop.ask()[0, 0] < 0.5
    acquisition = qExpectedUncertaintyReduction(loop.model, loop.locations, "volume", 0.5)
    X = make_inputs(5, 1, 2)
    assert_close(PerCost(acquisition, costs)(X), acquisition(X) / costs(X[:, 0]), 1e-12)
    with pytest.raises(ValueError, match="costs: expected positive"):
        learner(costs=lambda X: X[:, 0] * 0).ask()
    with pytest.raises(ValueError, match="costs: expected a function that returns"):
        learner(pool=pool, costs=lambda X: X).ask()


def test_contexts() -> None:
    loop = learner()
    X = loop.ask(2, context={1: 0.25})
    assert (X[:, 1] == 0.25).all()
    assert not (loop.ask(2)[:, 1] == 0.25).any()  # for this proposal only
    assert (learner(0).ask(3, context={0: 0.5})[:, 0] == 0.5).all()
    pool = torch.cartesian_prod(torch.linspace(0, 1, 8), torch.tensor([0.0, 0.5, 1.0])).double()
    loop = learner(pool=pool)
    assert (loop.ask(3, context={1: 0.5})[:, 1] == 0.5).all()
    with pytest.raises(ValueError, match="q: expected at most 0"):
        loop.ask(context={1: 0.3})
    with pytest.raises(ValueError, match="context: expected a value of input 1 within its bounds"):
        loop.ask(context={1: 1.5})


def test_pools_without_repeats() -> None:
    pool = make_inputs(10, 2)
    loop = learner(0, pool, repeat=False, num_initial=3)
    for _ in range(5):
        X = loop.ask(2)
        loop.tell(X, above(X))
    assert len(loop.X.unique(dim=0)) == 10
    with pytest.raises(ValueError, match="q: expected at most 0"):
        loop.ask()
    with pytest.raises(ValueError, match="X_pending: expected points of the pool"):
        learner(pool=pool).ask(X_pending=make_inputs(1, 2) + 0.01)


@pytest.mark.parametrize(
    ("likelihood", "criterion", "outcome"),
    [
        (BinomialLikelihood(20), "threshold-entropy", lambda X: (20 * X[:, 0]).round()),
        (PoissonLikelihood(), "variance", lambda X: (6 * X[:, 0]).round()),
        (GaussianLikelihood(), "volume", lambda X: 30 + 5 * X.sum(-1)),
        (HeteroscedasticGaussianLikelihood(), "volume", lambda X: 30 + 5 * X.sum(-1)),
    ],
)
def test_any_likelihood(likelihood: Any, criterion: str, outcome: Any) -> None:
    threshold = {"volume": 35.0, "variance": None}.get(criterion, 0.5)
    loop = ActiveLearner(
        unit(),
        criterion=criterion,
        threshold=threshold,
        likelihood=likelihood,
        fit_options={"maxiter": 20},
        locations=make_inputs(10, 2),
        num_fantasies=4,
    )
    X = make_inputs(12, 2)
    loop.tell(X, outcome(X))
    assert loop.ask().shape == (1, 2)
    mean, sd = loop.expected_outcome(X)
    if isinstance(likelihood, GaussianLikelihood | HeteroscedasticGaussianLikelihood):
        posterior = loop.model.posterior(X)  # on the scale of the outcomes
        assert_close(mean, posterior.mean.squeeze(-1), 1e-8)
        assert_close(sd, posterior.variance.squeeze(-1).sqrt(), 1e-8)
        z = (posterior.mean - 35) / posterior.variance.sqrt()
        assert_close(loop.probability_above(X), torch.special.ndtr(z).squeeze(-1), 1e-8)
    else:
        f = loop.model.posterior(X)
        expected = prevalence(loop.model.likelihood, f.mean, f.variance)
        assert_close(mean, expected[0].squeeze(-1), 1e-8)
        assert_close(sd, expected[1].sqrt().squeeze(-1), 1e-8)


def test_local_information_and_weights() -> None:
    pool = make_inputs(60, 2)
    loop = learner(pool=pool, criterion="threshold-entropy", local=True)
    scores = expected_reduction(loop.model, pool, None, "threshold-entropy", 0.5)
    assert torch.equal(loop.ask(), pool[scores.argmax()].unsqueeze(0))
    weights = (pool[:, 1] > 0.5).double()
    loop = learner(pool=pool, weights=weights)
    scores = expected_reduction(loop.model, pool, pool, "volume", 0.5, weights)
    assert torch.equal(loop.ask(), pool[scores.argmax()].unsqueeze(0))
    p = loop.probability_above(pool)
    expected = torch.minimum(p, 1 - p)[weights > 0].mean()
    assert loop.uncertainty == pytest.approx(expected.item(), rel=1e-10)


def test_models_of_the_users_own() -> None:
    def make(X: Tensor, Y: Tensor) -> SequentialGP:
        return SequentialGP(X, Y, likelihood=BinomialLikelihood(1))

    loop = learner(make_model=make)
    assert isinstance(loop.model.likelihood, BinomialLikelihood)
    assert loop.ask().shape == (1, 2)


def test_copies_are_independent() -> None:
    loop = learner()
    other = copy.deepcopy(loop)
    other.tell(make_inputs(1, 2), torch.ones(1))
    assert len(loop.X) == 12
    assert loop.model.num_data == 12


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"threshold": None}, ValueError, "threshold: required"),
        ({"threshold": 1.5}, ValueError, "threshold: expected a probability between 0 and 1"),
        ({"criterion": "eavc"}, ValueError, "criterion: expected one of"),
        ({"bounds": None}, TypeError, "bounds: required"),
        ({"num_restart": 2}, TypeError, "did you mean num_restarts"),
        ({"max_initial": 1}, ValueError, "max_initial: expected at least"),
        ({"locations": torch.zeros(3, 1).double()}, ValueError, "locations: expected shape n x 2"),
        ({"weights": torch.ones(3)}, ValueError, "weights: expected 256"),
        ({"pool": torch.rand(5).double()}, ValueError, "pool: expected"),
        ({"pool": torch.rand(5, 2).double(), "num_restarts": 2}, TypeError, "not an option of a"),
        ({"refit_every": 0}, ValueError, "refit_every"),
    ],
)
def test_bad_options(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        ActiveLearner(**{"bounds": unit(), "threshold": 0.5, **options})


def test_bad_outcomes_leave_it_as_it_was() -> None:
    loop = learner()
    before = loop.state_dict()
    for X, Y, message in (
        (make_inputs(2, 2), torch.tensor([1.0, 2.0]), "Y: "),
        (make_inputs(2, 2), torch.ones(3), "Y: expected 2 values"),
        (make_inputs(2, 3), torch.ones(2), "X: expected shape n x 2"),
    ):
        with pytest.raises(ValueError, match=message):
            loop.tell(X, Y)
    after = loop.state_dict()
    assert torch.equal(before["X"], after["X"])
    assert before["model"]["num_fitted"] == after["model"]["num_fitted"]
    with pytest.raises(RuntimeError, match="Nothing has been told"):
        _ = learner(0).uncertainty

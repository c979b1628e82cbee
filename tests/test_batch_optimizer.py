from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from botorch.acquisition.acquisition import AcquisitionFunction
from botorch.models import SingleTaskGP
from botorch.models.transforms import Standardize
from torch import Tensor

from seqgp import SequentialGP
from seqgp.acquisition import NoValidObservationWarning, fantasy_outcome, log_validity
from seqgp.batch_optimizer import BatchOptimizer
from seqgp.likelihoods.discrete import BinomialLikelihood
from seqgp.likelihoods.quadrature import base_samples
from tests.helpers import (
    FEW_RESTARTS,
    assert_close,
    assert_untouched,
    early_line_searches,
    make_inputs,
    state_of,
    unscaled,
)

pytestmark = [pytest.mark.usefixtures("float64"), unscaled, early_line_searches]


def evaluate(X: Tensor) -> tuple[Tensor, Tensor]:
    """The best point is at (0.6, 0.6), just where evaluations begin to fail."""
    valid = X.sum(-1) < 1.25
    return torch.where(valid, -(X - 0.6).square().sum(-1), torch.nan), valid


def unit(d: int = 2, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.tensor([[0.0] * d, [1.0] * d], dtype=dtype)


def optimizer(n: int = 12, **options: Any) -> BatchOptimizer:
    """One that has been told ``n`` evaluations."""
    result = BatchOptimizer(unit(), **{**FEW_RESTARTS, **options})
    if n:
        X = make_inputs(n, 2)
        result.tell(X, *evaluate(X))
    return result


def test_finds_the_best_valid_point() -> None:
    loop = BatchOptimizer(unit(), **FEW_RESTARTS)
    loop.run(evaluate, 24, q=3, progress=False)
    assert len(loop.X) == 24
    assert loop.best is not None
    assert loop.best[1] > -2e-3
    x = torch.tensor([[0.2, 0.3], [0.95, 0.95]])
    probability = loop.probability_of_validity(x)
    assert probability[0] > 0.9
    assert probability[1] < 0.2
    assert_close(probability.log(), log_validity(loop.validity_model, x), 1e-8)


def test_minimises() -> None:
    loop = BatchOptimizer(unit(), maximize=False, **FEW_RESTARTS)
    loop.run(lambda X: (-evaluate(X)[0], evaluate(X)[1]), 21, q=3, progress=False)
    assert loop.best is not None
    assert loop.best[1] < 5e-3


def test_asking_changes_nothing() -> None:
    loop = optimizer()
    before, generator = loop.state_dict(), torch.get_rng_state()
    models = [state_of(m) for m in (loop.objective_model, loop.validity_model) if m is not None]
    first = loop.ask(2)
    second = loop.ask(2, X_pending=make_inputs(2, 2))
    assert torch.equal(loop.ask(2), first)
    assert not torch.equal(second, first)
    assert torch.equal(torch.get_rng_state(), generator)
    for model, known in zip((loop.objective_model, loop.validity_model), models, strict=True):
        assert model is not None
        assert_untouched(model, known)
    after = loop.state_dict()
    for name in ("X", "Y", "num_valid"):
        assert torch.equal(after[name].nan_to_num(), before[name].nan_to_num())
    loop.tell(first, *evaluate(first))
    assert len(loop.X) == 14
    assert not torch.equal(loop.ask(2), first)


def test_who_learns_what() -> None:
    """The objective from valid evaluations, validity from all."""
    loop, (X, Y, valid) = optimizer(), (make_inputs(12, 2), *evaluate(make_inputs(12, 2)))
    assert not valid.all()
    assert isinstance(loop.objective_model, SequentialGP)
    assert isinstance(loop.validity_model, SequentialGP)
    assert torch.equal(loop.objective_model.stream.observations.inputs, X[valid])
    assert_close(loop.objective_model.outcome_transform.means.squeeze(), Y[valid].mean())
    assert torch.equal(loop.validity_model.stream.observations.inputs, X)
    assert torch.equal(loop.validity_model.stream.observations.targets, valid.to(X))
    # Values of failures are ignored, or not, as it is asked for.
    values = Y.nan_to_num(-3.0)
    for learns, number in ((False, int(valid.sum())), (True, 12)):
        other = optimizer(0, learn_from_failures=learns)
        other.tell(X, values, valid)
        assert other.objective_model.num_data == number  # type: ignore[union-attr]
        assert other.best is not None
        assert other.best[1] == Y[valid].max()


def test_pending_points_are_kept_clear_of() -> None:
    loop = optimizer()
    first = loop.ask(1)
    second = loop.ask(2, X_pending=first)
    assert torch.pdist(torch.cat([first, second])).min() > 0.012
    # A batch is the same as its points one after the other.
    assert_close(loop.ask(1, X_pending=None), first)


def test_failed_points_are_not_proposed_again() -> None:
    loop = optimizer()
    for _ in range(3):
        X = loop.ask(2)
        assert torch.cdist(X, loop.X[~loop.valid]).min() > 0.012
        loop.tell(X, torch.full((2,), torch.nan))  # whatever it is, it fails


@pytest.mark.parametrize("refit_every", [1, 100])
def test_goes_on_from_its_state(refit_every: int) -> None:
    """Saved and loaded without pickled code, also between refits."""
    loop = optimizer(refit_every=refit_every)
    X = make_inputs(3, 2)
    loop.tell(X, *evaluate(X))
    file = io.BytesIO()
    torch.save(loop.state_dict(), file)
    file.seek(0)
    other = optimizer(0, refit_every=refit_every)
    other.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(other.ask(2), loop.ask(2))
    x = loop.ask(2)
    for each in (loop, other):
        each.tell(x, *evaluate(x))
    assert torch.equal(other.ask(1), loop.ask(1))
    with pytest.raises(ValueError, match="version"):
        other.load_state_dict({"version": 0})


def test_can_be_pickled_and_copied() -> None:
    """As a whole, with its options: also between refits."""
    loop, X = optimizer(refit_every=100), make_inputs(2, 2)
    loop.tell(X, *evaluate(X))
    others = pickle.loads(pickle.dumps(loop)), copy.deepcopy(loop)
    # Tensors of copies are laid out in memory in another way, on which rounding depends.
    for other in others:
        torch.testing.assert_close(other.ask(1), loop.ask(1), atol=1e-6, rtol=0)
    assert torch.equal(others[1].ask(1), copy.deepcopy(loop).ask(1))


def test_between_refits_models_are_conditioned() -> None:
    """Hyperparameters stay, and what is new is known."""
    loop, X = optimizer(refit_every=4), make_inputs(3, 2)
    fitted = loop.validity_model
    loop.tell(X, *evaluate(X))
    assert loop.validity_model is not fitted
    expected = fitted.condition_on_observations(X, evaluate(X)[1].to(X).unsqueeze(-1))
    x = make_inputs(5, 2)
    assert_close(loop.validity_model.posterior(x).mean, expected.posterior(x).mean)
    loop.tell(X[:1] + 0.01, *evaluate(X[:1] + 0.01))  # the fourth
    assert loop.validity_model.num_data == 16
    assert not loop.validity_model.variational_strategy.is_fantasy


def test_no_valid_evaluation_yet() -> None:
    loop, X = BatchOptimizer(unit(), num_initial=4, **FEW_RESTARTS), make_inputs(6, 2)
    loop.tell(X, torch.full((6,), torch.nan))
    assert loop.best is None
    assert loop.objective_model is None
    with pytest.warns(NoValidObservationWarning):
        x = loop.ask(2)
    # Away from all that failed, and from each other.
    assert torch.cdist(x, X).min() > 0.05
    assert torch.pdist(x).min() > 0.05
    loop.tell(x, torch.zeros(2), torch.ones(2))
    assert loop.objective_model is not None
    assert loop.ask(1).shape == (1, 2)


def test_values_of_failures_before_anything_is_valid() -> None:
    """They say where to go: the best of them is to be improved on, and nothing is to be said."""
    X = make_inputs(12, 2)
    Y = -(X - 0.5).square().sum(-1)
    loop = BatchOptimizer(unit(), learn_from_failures=True, **FEW_RESTARTS)
    loop.tell(X, Y, torch.zeros(12))
    assert loop.best is None
    assert loop.best_f == Y.max()
    with warnings.catch_warnings():
        warnings.simplefilter("error", NoValidObservationWarning)
        loop.ask(1)
    loop.tell(X[:1] + 0.01, Y[:1], torch.ones(1))
    assert loop.best_f == Y[0]


@pytest.mark.parametrize("n", [1, 8])
def test_all_valid_or_one_evaluation(n: int) -> None:
    loop, X = BatchOptimizer(unit(), num_initial=1, **FEW_RESTARTS), make_inputs(n, 2)
    loop.tell(X, X.sum(-1))
    x = loop.ask(2)
    assert x.isfinite().all()
    assert loop.probability_of_validity(X).min() > 0.5
    loop.tell(x, torch.tensor([2.0, torch.nan]))
    assert loop.ask(1).isfinite().all()


def test_all_values_alike() -> None:
    loop, X = BatchOptimizer(unit(), num_initial=1, **FEW_RESTARTS), make_inputs(6, 2)
    loop.tell(X, torch.ones(6))
    assert loop.ask(2).isfinite().all()


def test_incumbent_of_noisy_observations() -> None:
    X = make_inputs(20, 2)
    Y = X.sum(-1) + 0.5 * torch.randn(20, generator=torch.Generator().manual_seed(0))
    observed, mean = (
        BatchOptimizer(unit(), incumbent=which, **FEW_RESTARTS) for which in ("observed", "mean")
    )
    for loop in (observed, mean):
        loop.tell(X, Y)
    assert observed.best_f == Y.max()
    posterior = mean.objective_model.posterior(X).mean  # type: ignore[union-attr]
    assert_close(mean.best_f, posterior.max(), 1e-8)


def test_models_of_the_users_own() -> None:
    """BoTorch's exact models, of the objective and of labels."""

    def exact(X: Tensor, Y: Tensor) -> SingleTaskGP:
        return SingleTaskGP(X, Y, outcome_transform=Standardize(1))

    loop = optimizer(make_objective=exact, make_validity=exact, refit_every=4)
    for _ in range(2):
        x = loop.ask(2)
        loop.tell(x, *evaluate(x))
    assert isinstance(loop.validity_model, SingleTaskGP)
    other = optimizer(0, make_objective=exact, make_validity=exact, refit_every=4)
    other.load_state_dict(loop.state_dict())
    assert_close(other.ask(1), loop.ask(1), 1e-6)


# -------------------------------------------------------------------- initial points


def test_initial_points() -> None:
    """A quasi-random sequence, of which each point is proposed once."""
    loop = BatchOptimizer(torch.tensor([[1.0, -2.0], [3.0, 5.0]]), num_initial=8)
    X = loop.ask(8)
    assert torch.equal(X.clamp(*loop.bounds), X)
    assert torch.equal(loop.ask(3, X_pending=X[:2]), X[2:5])
    loop.tell(X[:3], torch.zeros(3))
    assert torch.equal(loop.ask(2), X[3:5])
    assert not torch.equal(BatchOptimizer(loop.bounds, num_initial=8, seed=1).ask(8), X)


@pytest.mark.parametrize(
    ("options", "holds"),
    [
        ({"fixed_features": {1: 0.3}}, lambda X: X[:, 1] == 0.3),
        (
            {
                "inequality_constraints": [
                    (torch.tensor([0, 1]), torch.tensor([-1.0, -1.0], dtype=torch.float64), -0.5)
                ]
            },
            lambda X: X.sum(-1) <= 0.5 + 1e-6,
        ),
        ({"fixed_features_list": [{0: 0.0}, {0: 1.0}]}, lambda X: (X[:, 0] % 1) == 0),
        (
            {"discrete_dims": {0: [0.0, 0.5, 1.0]}, "options": {}},
            lambda X: (2 * X[:, 0] % 1) == 0,
        ),
        (
            {
                "discrete_dims": {0: [0.0, 0.3, 1.0]},
                "options": {},
                "inequality_constraints": [
                    (torch.tensor([0, 1]), torch.tensor([-1.0, -1.0], dtype=torch.float64), -0.5)
                ],
            },
            lambda X: (
                torch.isin(X[:, 0], torch.tensor([0.0, 0.3]).double()) & (X.sum(-1) <= 0.5 + 1e-6)
            ),
        ),
        (
            {"choices": torch.cartesian_prod(*[torch.linspace(0, 1, 4)] * 2).double()},
            lambda X: ((3 * X - (3 * X).round()).abs() < 1e-6).all(-1),
        ),
    ],
    ids=["fixed", "constrained", "list", "discrete", "both", "choices"],
)
def test_spaces(options: dict[str, Any], holds: Callable[[Tensor], Tensor]) -> None:
    """First and later points alike are where they may be."""
    few = {k: v for k, v in FEW_RESTARTS.items() if "choices" not in options or k == "fit_options"}
    loop = BatchOptimizer(unit(), num_initial=6, **{**few, **options})
    for _ in range(3):
        X = loop.ask(3)
        assert holds(X).all()
        loop.tell(X, *evaluate(X))


# -------------------------------------------------------------------- devices, dtypes, errors


def test_levels_are_rounded_as_bounds_are() -> None:
    bounds = torch.tensor([[0.1, 0.0], [0.7, 1.0]], dtype=torch.float32)
    X = BatchOptimizer(bounds, discrete_dims={0: [0.1, 0.7]}).ask(4)
    assert torch.isin(X[:, 0], bounds[:, 0]).all()


def test_single_precision() -> None:
    loop = BatchOptimizer(unit(dtype=torch.float32), **FEW_RESTARTS)
    loop.run(evaluate, 12, q=3, progress=False)
    assert loop.ask(2).dtype == torch.float32
    assert loop.best is not None
    assert loop.best[1] > -0.05


def test_nothing_is_made_on_the_default_device() -> None:
    """With the bounds on the CPU, nothing may be made on the default device, "meta".

    BoTorch's own `optimize_acqf` does make tensors there, so another optimiser maximises here.
    """
    candidates = make_inputs(64, 1, 2)

    def best_candidate(acq_function: AcquisitionFunction, bounds: Tensor) -> tuple[Tensor, Tensor]:
        values = acq_function(candidates)
        return candidates[values.argmax()], values.max()

    X = make_inputs(12, 2)
    Y, valid = evaluate(X)
    loops = [
        BatchOptimizer(unit(), optimizer=best_candidate, fit_options={"maxiter": 5})
        for _ in range(2)
    ]
    loops[0].tell(X, Y, valid)
    expected = loops[0].ask(3)
    base_samples.cache_clear()
    torch.set_default_device("meta")
    try:
        initial = loops[1].ask(2)
        loops[1].tell(X, Y, valid)
        actual = loops[1].ask(3)
    finally:
        torch.set_default_device(None)
        base_samples.cache_clear()
    assert initial.device.type == "cpu"
    assert_close(actual, expected, 1e-12)


@pytest.mark.parametrize(
    ("X", "Y", "valid", "error", "message"),
    [
        (torch.rand(2, 3).double(), torch.zeros(2), None, ValueError, "n x 2"),
        (torch.rand(2, 2).float(), torch.zeros(2), None, TypeError, "like the bounds"),
        (torch.rand(2, 2).double() / 0, torch.zeros(2), None, ValueError, "finite"),
        (torch.rand(2, 2).double(), torch.zeros(3), None, ValueError, "2 values"),
        (torch.rand(2, 2).double(), torch.zeros(2), torch.ones(1), ValueError, "2 labels"),
        (torch.rand(2, 2).double(), torch.zeros(2), torch.tensor([0.5, 1]), ValueError, "labels"),
        (
            torch.rand(2, 2).double(),
            torch.tensor([0.0, torch.nan]),
            torch.ones(2),
            ValueError,
            "valid evaluation is NaN",
        ),
        (
            torch.rand(2, 2).double(),
            torch.tensor([0.0, torch.inf]),
            torch.tensor([1, 0]),
            ValueError,
            "infinite",
        ),
    ],
)
def test_bad_outcomes_leave_it_as_it_was(
    X: Tensor, Y: Tensor, valid: Tensor | None, error: type[Exception], message: str
) -> None:
    loop = optimizer(8)
    before = loop.state_dict()
    with pytest.raises(error, match=message):
        loop.tell(X, Y, valid)
    assert torch.equal(loop.X, before["X"])
    assert loop.ask(1).shape == (1, 2)


def in_five_trials(X: Tensor) -> tuple[Tensor, Tensor]:
    """Fewer and fewer of five trials are valid from where one would fail."""
    num_valid = (5 * (1.5 - X.sum(-1)) / 0.5).round().clamp(0, 5)
    return -(X - 0.6).square().sum(-1), num_valid


def test_evaluations_of_several_trials() -> None:
    """What is learnt is how many of them were valid, not only whether most were."""
    loop = BatchOptimizer(unit(), num_trials=5, learn_from_failures=True, **FEW_RESTARTS)
    loop.run(in_five_trials, 24, q=3, progress=False)
    Y, num_valid = in_five_trials(loop.X)
    assert torch.equal(loop.num_valid, num_valid.long())
    assert torch.equal(loop.valid, num_valid >= 3)
    assert len(num_valid.unique()) > 2
    assert isinstance(loop.validity_model, SequentialGP)
    assert isinstance(loop.validity_model.likelihood, BinomialLikelihood)
    assert torch.equal(loop.validity_model.stream.observations.targets, num_valid)
    assert loop.best is not None
    assert loop.best[1] == Y[num_valid >= 3].max()
    assert loop.best[1] > -5e-3
    few, many = loop.probability_of_validity(torch.tensor([[0.95, 0.95], [0.2, 0.3]]))
    assert few < 0.1 < 0.9 < many


def test_trials_are_saved_and_loaded() -> None:
    options = {"num_trials": 5, "learn_from_failures": True, "refit_every": 4}
    X = make_inputs(14, 2)
    loop = optimizer(0, **options)
    loop.tell(X[:12], *in_five_trials(X[:12]))
    loop.tell(X[12:], *in_five_trials(X[12:]))  # conditioned, not fitted
    other = optimizer(0, **options)
    other.load_state_dict(loop.state_dict())
    assert torch.equal(other.num_valid, loop.num_valid)
    assert_close(other.ask(2), loop.ask(2), 1e-8)
    with pytest.raises(ValueError, match="num_trials"):
        optimizer(0).load_state_dict(loop.state_dict())
    with pytest.raises(ValueError, match="learn_from_failures"):
        optimizer(0, num_trials=5).load_state_dict(loop.state_dict())


def test_numbers_of_valid_trials() -> None:
    X, Y = make_inputs(3, 2), torch.zeros(3)
    for valid, error in [
        (torch.tensor([True, False, True]), TypeError),
        (torch.tensor([0, 6, 1]), ValueError),
        (torch.tensor([0.5, 1, 1]), ValueError),
        (torch.tensor([-1, 1, 1]), ValueError),
        (torch.tensor([1, 1]), ValueError),
    ]:
        loop = optimizer(0, num_trials=5)
        with pytest.raises(error, match=r"valid: expected .*numbers of valid trials"):
            loop.tell(X, Y, valid)
        assert not len(loop.X)
    loop = optimizer(0, num_trials=5)
    loop.tell(X, torch.tensor([0.0, torch.nan, 1.0]))
    assert loop.num_valid.tolist() == [5, 0, 5]
    with pytest.raises(ValueError, match="num_trials"):
        optimizer(0, num_trials=0)


def test_a_model_that_fails_leaves_it_as_it_was() -> None:
    calls = []

    def make(X: Tensor, labels: Tensor) -> SingleTaskGP:
        calls.append(1)
        if len(calls) > 1:
            raise RuntimeError("out of luck")
        return SingleTaskGP(X, labels)

    loop = optimizer(8, make_validity=make)
    with pytest.raises(RuntimeError, match="luck"):
        loop.tell(make_inputs(2, 2), torch.zeros(2))
    assert len(loop.X) == 8
    assert len(loop.objective_model.stream.observations.inputs) < 9  # type: ignore[union-attr]


def test_bad_options() -> None:
    for options, message in [
        ({"bounds": unit().flip(0)}, "lower bounds first"),
        ({"incumbent": "best"}, "incumbent"),
        ({"refit_every": 0}, "refit_every"),
        ({"discrete_dims": {1: [7, 8]}}, "within its bounds"),
        ({"inequality_constraints": [([0, 1], [1.0, 1.0], 1.0)]}, "expected triples"),
        ({"equality_constraints": [(torch.tensor([2]), unit()[1, :1], 1.0)]}, "from 0 to 1"),
        (
            {"inequality_constraints": [(torch.tensor([0]), torch.ones(1).float(), 1.0)]},
            "a coefficient of torch.float64",
        ),
    ]:
        with pytest.raises((TypeError, ValueError), match=message):
            BatchOptimizer(**{"bounds": unit(), **options})
    with pytest.raises(ValueError, match="at least one"):
        optimizer(0).ask(0)
    with pytest.raises(ValueError, match="n x 2"):
        optimizer(0).ask(1, X_pending=torch.rand(2, 3))
    with pytest.raises(RuntimeError, match="Nothing"):
        optimizer(0).probability_of_validity(torch.rand(2, 2))


def test_contexts_fix_inputs_for_one_proposal() -> None:
    loop = optimizer()
    X = loop.ask(2, context={1: 0.3})
    assert (X[:, 1] == 0.3).all()
    assert not (loop.ask(2)[:, 1] == 0.3).any()
    assert (optimizer(0).ask(3, context={0: 0.5})[:, 0] == 0.5).all()
    with pytest.raises(ValueError, match="context: expected a value of input 0 within its bounds"):
        loop.ask(context={0: -0.1})
    with pytest.raises(ValueError, match="context: all 2 inputs"):
        loop.ask(context={0: 0.1, 1: 0.2})
    # The same as an optimiser whose input is always fixed, with the incumbent of that context.
    fixed = optimizer(fixed_features={1: 0.3}, incumbent="mean")
    x, value = fixed.incumbent_in({1: 0.3})
    assert x[1] == 0.3
    candidates = fixed.X[fixed.valid].clone()
    candidates[:, 1] = 0.3
    assert_close(value, fixed.objective_model.posterior(candidates).mean.max(), 1e-8)


def test_incumbent_of_a_context() -> None:
    """The optimum moves with the context, and an observed value counts where it was observed."""
    loop = optimizer(0)
    X = make_inputs(20, 2)
    loop.tell(X, -(X[:, 0] - X[:, 1]).square())
    for c in (0.2, 0.8):
        x, value = loop.incumbent_in({1: c})
        assert x[1] == c
        assert abs(x[0] - c) < 0.1
        assert value > -0.02
        assert abs(loop.ask(context={1: c})[0, 0] - c) < 0.2
    known = loop.X[3]
    loop.tell(known.unsqueeze(0), torch.tensor([5.0]))
    assert_close(loop.incumbent_in({1: float(known[1])})[1], torch.tensor(5.0), 1e-12)
    with pytest.raises(RuntimeError, match="no evaluation to learn from"):
        optimizer(0).incumbent_in({1: 0.5})


def test_an_incumbent_is_probably_valid_in_its_context() -> None:
    loop = optimizer(0)
    X = make_inputs(30, 2)
    valid = X.sum(-1) < 1
    loop.tell(X, torch.where(valid, X[:, 0], torch.nan), valid)
    x, _ = loop.incumbent_in({1: 0.7})
    best = loop.best
    assert best is not None
    assert best[0][0] > 0.6
    assert loop.probability_of_validity(x.unsqueeze(0)) > 0.5
    assert x[0] < 0.5


def test_pending_points_are_remembered_if_asked() -> None:
    loop, plain = optimizer(), optimizer()
    first = loop.ask(1, remember_pending=True)
    assert torch.equal(loop.ask(1), plain.ask(1, X_pending=first))
    assert torch.equal(loop.state_dict()["pending"], first)
    other = optimizer(0)
    other.load_state_dict(loop.state_dict())
    assert torch.equal(other.ask(1), loop.ask(1))
    loop.tell(first, *evaluate(first))
    assert len(loop.pending) == 0
    loop = optimizer(0)
    X = torch.cat([loop.ask(2, remember_pending=True) for _ in range(3)])
    assert torch.equal(X, optimizer(0).ask(6))
    loop.forget_pending()
    assert torch.equal(loop.ask(6), X)


def test_correlated_models_with_a_weight_of_zero_are_the_independent_ones() -> None:
    """At equal hyperparameters: what is learnt is the weight."""
    X = make_inputs(14, 2)
    Y, valid = evaluate(X)
    plain, loop = BatchOptimizer(unit()), BatchOptimizer(unit(), correlated=True)
    both = loop._make_both(X, torch.stack([torch.where(valid, Y, torch.nan), valid.to(X)], -1))
    objective = plain.make_objective(X[valid], Y[valid].unsqueeze(-1))
    validity = plain.make_validity(X, valid.to(X).unsqueeze(-1))
    T = make_inputs(6, 2).flip(0) + 0.01
    for index, model in enumerate((objective, validity)):
        expected, actual = model.posterior(T), both.subset_output([index]).posterior(T)
        assert_close(actual.mean, expected.mean, 1e-6)
        assert_close(actual.variance, expected.variance, 1e-6)


def test_correlated_models_learn_from_each_other() -> None:
    loop = optimizer(0, correlated=True, num_initial=3)
    X = make_inputs(12, 2)
    Y, valid = evaluate(X)
    loop.tell(X[valid][:3], Y[valid][:3], valid[valid][:3])
    assert loop._both.model is None  # labels of one kind: nothing to be correlated with
    assert loop.ask().shape == (1, 2)
    loop.tell(X, Y, valid)
    model = loop._both.model
    assert model is not None
    assert model.num_data == 15 + int(loop.valid.sum())
    assert loop.objective_model.num_outputs == loop.validity_model.num_outputs == 1
    probability = loop.probability_of_validity(loop.X)
    assert ((probability > 0.5) == loop.valid).double().mean() > 0.8
    assert_close(loop.best_f, loop.Y[loop.valid].max())
    batch = loop.ask(2)
    assert batch.shape == (2, 2)
    # What is imagined at the first point of a batch informs both tasks.
    imagined = fantasy_outcome(model, batch[:1])
    known = model.condition_on_observations(batch[:1], imagined)
    assert (known.posterior(batch[:1]).variance < model.posterior(batch[:1]).variance).all()


@pytest.mark.parametrize("refit_every", [1, 20])
def test_correlated_models_go_on_from_their_state(refit_every: int) -> None:
    options: dict[str, Any] = {"correlated": True, "refit_every": refit_every}
    loop, again = optimizer(10, **options), optimizer(0, **options)
    X = loop.ask(2)
    loop.tell(X, *evaluate(X))
    state = loop.state_dict()
    again.load_state_dict(state)
    assert_close(again.ask(2), loop.ask(2), 1e-8)
    with pytest.raises(ValueError, match="saved with correlated"):
        optimizer(0).load_state_dict(state)


def test_correlated_models_of_several_trials_in_a_trust_region() -> None:
    loop = BatchOptimizer(
        unit(),
        correlated=True,
        num_trials=5,
        learn_from_failures=True,
        trust_region=True,
        **FEW_RESTARTS,
    )
    X = make_inputs(10, 2)
    loop.tell(X, *in_five_trials(X))
    assert loop._both.model is not None
    assert loop.ask(2, context={0: 0.3})[:, 0].tolist() == [0.3, 0.3]


def test_correlated_models_are_not_the_users_own() -> None:
    with pytest.raises(ValueError, match=r"correlated: .* leave out make_objective"):
        BatchOptimizer(unit(), correlated=True, make_objective=SingleTaskGP)


# -------------------------------------------------------------------------------- that moves


def peak_at(X: Tensor, centre: float) -> Tensor:
    return -(X.squeeze(-1) - centre).square() * 4


def moved(**options: Any) -> BatchOptimizer:
    """One that was told of a peak at .2, and then of one at .8 where that had been and beyond."""
    loop = BatchOptimizer(unit(1), num_initial=4, **{**FEW_RESTARTS, **options})
    X = torch.linspace(0, 0.5, 8).unsqueeze(-1)
    loop.tell(X, peak_at(X, 0.2))
    for x in torch.tensor([[0.2], [0.0], [0.45]]):
        loop.tell(x.unsqueeze(-1), peak_at(x.unsqueeze(-1), 0.8))
    return loop


def test_an_optimum_that_has_moved_is_found_again() -> None:
    """The best is by what is known now, not a value that was observed before it moved."""
    stale = moved().best
    assert stale is not None
    assert float((stale[0] - 0.2).abs()) < 0.05
    loop = moved(discount=0.6)
    for _ in range(10):
        x = loop.ask()
        loop.tell(x, peak_at(x, 0.8))
    assert loop.best is not None
    assert float((loop.best[0] - 0.8).abs()) < 0.1
    assert abs(float(loop.best[1])) < 0.05


@pytest.mark.parametrize("refit_every", [1, 100])
def test_a_discount_is_a_larger_noise(refit_every: int) -> None:
    """An evaluation that counts half is one with twice the noise variance."""
    loop = moved(discount=0.5, refit_every=refit_every)
    fade = torch.cat([torch.full((8,), 0.125), torch.tensor([0.25, 0.5, 1.0])])
    assert_close(loop.fade, fade)
    model = loop.objective_model
    assert isinstance(model, SequentialGP)
    noise = (model.likelihood.noise / fade).unsqueeze(-1)
    transform = model.outcome_transform
    mean, scale = transform.means.squeeze(), transform.stdvs.squeeze()
    expected = SequentialGP(
        loop.X,
        (loop.Y.unsqueeze(-1) - mean) / scale,
        noise.detach(),
        mean_module=copy.deepcopy(model.mean_module),
        covar_module=copy.deepcopy(model.covar_module),
        input_transform=copy.deepcopy(model.input_transform),
        outcome_transform=None,
    )
    grid = torch.linspace(0, 1, 30).unsqueeze(-1)
    assert_close(model.posterior(grid).mean, expected.posterior(grid).mean * scale + mean, 1e-6)
    assert_close(model.posterior(grid).variance, expected.posterior(grid).variance * scale**2, 1e-6)


@pytest.mark.parametrize("refit_every", [1, 100])
@pytest.mark.parametrize("discount", [0.5, "auto"])
def test_resumes_with_what_has_faded(discount: float | str, refit_every: int) -> None:
    loop = moved(discount=discount, refit_every=refit_every)
    other = BatchOptimizer(
        unit(1), num_initial=4, discount=discount, refit_every=refit_every, **FEW_RESTARTS
    )
    buffer = io.BytesIO()
    torch.save(loop.state_dict(), buffer)
    buffer.seek(0)
    other.load_state_dict(torch.load(buffer, weights_only=True))
    assert torch.equal(other.fade, loop.fade)
    assert_close(other.ask(1), loop.ask(1), 1e-6)
    x = torch.tensor([[0.7]])
    for each in (loop, other):
        each.tell(x, peak_at(x, 0.8))
    grid = torch.linspace(0, 1, 30).unsqueeze(-1)
    assert loop.objective_model is not None
    assert other.objective_model is not None
    means = [each.posterior(grid).mean for each in (loop.objective_model, other.objective_model)]
    assert_close(means[0], means[1], 1e-5)


def test_a_discount_by_itself() -> None:
    """Values are as they were, and then they are not."""
    loop = BatchOptimizer(unit(1), num_initial=4, discount="auto", **FEW_RESTARTS)
    generator = torch.Generator().manual_seed(0)
    factors = []
    for sign in (1, 1, 1, 1, -1):
        X = torch.rand(12, 1, generator=generator)
        Y = sign * torch.sin(6 * X.squeeze(-1)) + 0.1 * torch.randn(12, generator=generator)
        before = loop.fade
        loop.tell(X, Y)
        factors.append(float(loop.fade[0]) if len(before) else 1.0)
    assert factors[:4] == [1.0] * 4
    assert factors[4] < 0.5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"discount": 0}, r"discount: expected a number in \(0, 1\], got 0"),
        ({"discount": 1.5}, "discount: expected a number in"),
        ({"discount": "often"}, 'discount: expected a number in .* or "auto"'),
        ({"discount": True}, 'discount: expected a number in .* or "auto"'),
        ({"discount": 0.9, "trust_region": True}, "trust_region: not supported with"),
        ({"discount": "auto", "correlated": True}, 'discount: "auto" is not supported'),
    ],
)
def test_impossible_discounts(options: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        BatchOptimizer(unit(1), **options)


def test_models_that_cannot_fade() -> None:
    loop = BatchOptimizer(unit(1), discount=0.9, make_objective=SingleTaskGP, **FEW_RESTARTS)
    X = make_inputs(5, 1)
    with pytest.raises(TypeError, match="discount: only supported for SequentialGP"):
        loop.tell(X, peak_at(X, 0.2))
    assert not len(loop.X)

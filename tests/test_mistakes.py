"""What a new user gets wrong: each mistake has a message that says what to do."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from botorch.acquisition import UpperConfidenceBound
from botorch.models import SingleTaskGP
from botorch.models.transforms import Normalize, Standardize
from gpytorch.kernels import RBFKernel
from gpytorch.likelihoods import BernoulliLikelihood, PoissonLikelihood
from gpytorch.likelihoods.likelihood import _OneDimensionalLikelihood
from torch import Tensor
from torch.distributions import Poisson

from seqgp import BinomialLikelihood, DualELBO, SequentialGP
from seqgp.acquisition import (
    NoValidObservationWarning,
    expected_reduction,
    fantasy_batch,
    fantasy_outcome,
    qExpectedUncertaintyReduction,
    select_from_pool,
)
from seqgp.batch_optimizer import BatchOptimizer
from seqgp.progress import progress_bar
from seqgp.streaming.memory import MemoryOptions
from tests.helpers import make_inputs, make_kernel, softmax

pytestmark = pytest.mark.usefixtures("float64")

FEW: dict[str, Any] = {"num_restarts": 1, "raw_samples": 8, "fit_options": {"maxiter": 3}}


def unit(d: int = 2) -> Tensor:
    return torch.stack([torch.zeros(d), torch.ones(d)])


def labels(n: int = 30) -> SequentialGP:
    X = make_inputs(n, 2)
    return SequentialGP(
        X, (X.sum(-1, keepdim=True) > 1).to(X), likelihood=BernoulliLikelihood(), inducing_points=8
    )


class Exposed(_OneDimensionalLikelihood):
    """Counts of events while something was exposed."""

    def forward(self, function_samples: Tensor, *args: Any, exposure: Tensor, **kwargs: Any) -> Any:
        return Poisson(exposure * function_samples.exp())


class Anything(_OneDimensionalLikelihood):
    """The same, but for a name in its signature."""

    def forward(self, function_samples: Tensor, **kwargs: Any) -> Any:
        return Poisson(kwargs["exposure"] * function_samples.exp())


# -------------------------------------------------------------------------------- misspelt options


def test_misspelt_options_are_named() -> None:
    model, X = labels(), make_inputs(5, 2)
    ones = torch.ones(5, 1)
    calls: list[tuple[Any, str]] = [
        (lambda: model.posterior(X, observation_nose=True), "did you mean observation_noise"),
        (lambda: model.update(X, ones, stps=3), "stps: neither an option .* did you mean steps"),
        (lambda: model.forget(X, ones, nois=ones), "nois"),
        (lambda: model.condition_on_observations(X, ones, fixed_inducin=True), "fixed_inducing"),
        (lambda: select_from_pool(model, X, treshold=0.5), "did you mean threshold"),
        (lambda: expected_reduction(model, X, X, treshold=0.5), "did you mean threshold"),
        (lambda: qExpectedUncertaintyReduction(model, X, treshold=0.5), "did you mean threshold"),
        (lambda: model.posterior(X, total_count=3), "BernoulliLikelihood, which has none"),
        (lambda: model.update(X, ones, tested=3), "tested: .*, which has none[.]$"),
        (lambda: model.update(X, ones, ones), "memory: .* got a tensor; .* by name, as noise="),
    ]
    before = {key: value.clone() for key, value in model.state_dict().items()}
    for call, message in calls:
        with pytest.raises(TypeError, match=message):
            call()
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert model.num_updates == 0


def test_arguments_of_ones_own_likelihood() -> None:
    X = make_inputs(20, 2)
    Y = torch.poisson(torch.ones(20, 1))
    given = {"exposure": torch.full((20,), 2.0)}
    with pytest.raises(TypeError, match=r"exposure: Exposed needs it .* pass exposure="):
        SequentialGP(X, Y, likelihood=Exposed())
    with pytest.raises(TypeError, match=r"exposre: .* which knows exposure; did you mean exposure"):
        SequentialGP(X, Y, likelihood=Exposed(), likelihood_arguments={"exposre": torch.ones(20)})
    model = SequentialGP(
        X, Y, likelihood=Exposed(), likelihood_arguments=given, covar_module=make_kernel()
    )
    with pytest.raises(TypeError, match="exposure: Exposed needs it"):
        model.update(X, Y)
    with pytest.raises(TypeError, match="exposure: Exposed needs it"):
        model.posterior(X, observation_noise=True)
    with pytest.raises(ValueError, match=r"exposure: expected shape ... x 20"):
        model.update(X, Y, exposure=torch.ones(3))
    assert model.posterior(X).mean.shape == (20, 1)  # the latent function needs none
    record = model.update(X, Y, exposure=given["exposure"], steps=2)
    assert record.num_new == 20
    # One that does not name its arguments gets what it is given, and its errors are explained.
    SequentialGP(
        X, Y, likelihood=Anything(), likelihood_arguments=given, covar_module=make_kernel()
    )
    with pytest.raises(ValueError, match=r"likelihood: Anything.forward failed .* no arguments"):
        SequentialGP(X, Y, likelihood=Anything(), covar_module=make_kernel())


class Frame:
    """A table as those of pandas."""

    def to_numpy(self) -> Any:
        return torch.rand(20, 2).numpy()


X, Y = torch.rand(20, 2, dtype=torch.float64), torch.rand(20, 1, dtype=torch.float64)
SHAPES: dict[str, tuple[Any, type[Exception], str]] = {
    "a class, not an object": (
        lambda: SequentialGP(X, Y, likelihood=BernoulliLikelihood),
        TypeError,
        r"likelihood: .* got the class BernoulliLikelihood; pass an instance",
    ),
    "a name": (
        lambda: SequentialGP(X, Y, likelihood="bernoulli"),
        TypeError,
        "likelihood: expected a Likelihood, got 'bernoulli'",
    ),
    "a class of kernels": (
        lambda: SequentialGP(X, Y, covar_module=RBFKernel),
        TypeError,
        "covar_module: expected a Kernel, got the class",
    ),
    "a class of transforms": (
        lambda: SequentialGP(X, Y, input_transform=Normalize),
        TypeError,
        "input_transform",
    ),
    "inducing points, a fraction": (
        lambda: SequentialGP(X, Y, inducing_points=2.5),
        TypeError,
        "inducing_points: expected a tensor or a whole number",
    ),
    "inducing points elsewhere": (
        lambda: SequentialGP(X, Y, inducing_points=torch.rand(5, 3)),
        ValueError,
        "inducing_points: expected shape k x 2",
    ),
    "noise of another shape": (
        lambda: SequentialGP(X, Y, Y.squeeze(-1)),
        ValueError,
        "train_Yvar: expected the shape of train_Y",
    ),
    "noise of labels": (
        lambda: SequentialGP(X, Y.round(), Y, likelihood=BernoulliLikelihood()),
        ValueError,
        "train_Yvar: noise variances are for Gaussian",
    ),
    "a list": (lambda: labels().posterior(X.tolist()), TypeError, "X: .* with torch.as_tensor"),
    "an array": (lambda: labels().posterior(X.numpy()), TypeError, "got ndarray"),
    "a point": (lambda: labels().posterior(X[0]), ValueError, r"single point is X\.unsqueeze"),
    "a column too many": (
        lambda: labels().posterior(torch.rand(5, 3)),
        ValueError,
        r"X: expected shape \.\.\. x n x 2, got \(5, 3\)",
    ),
    "a negative total": (
        lambda: SequentialGP(
            X,
            torch.zeros(len(X), 1),
            likelihood=BinomialLikelihood(),
            likelihood_arguments={"total_count": torch.full((len(X),), -9.0)},
        ),
        ValueError,
        "total_count: expected integers that are not negative, got -9[.]$",
    ),
    "no total": (
        lambda: SequentialGP(
            X,
            torch.zeros(len(X), 1),
            likelihood=BinomialLikelihood(),
            likelihood_arguments={"total_count": torch.full((len(X),), torch.nan)},
        ),
        ValueError,
        "total_count: expected finite numbers, got 20 NaN",
    ),
    "a point to condition on": (
        lambda: labels().condition_on_observations(X[0], Y[0].round()),
        ValueError,
        r"X\.unsqueeze",
    ),
    "a table": (
        lambda: SequentialGP(Frame(), Y),
        TypeError,
        r"train_X: .* with torch.tensor\(train_X.to_numpy\(\), dtype=torch.double\)\.$",
    ),
    "lists to condition on": (
        lambda: labels().condition_on_observations(X, Y.tolist()),
        TypeError,
        "Y: expected a torch.Tensor",
    ),
    "lists to learn": (
        lambda: SequentialGP(X.tolist(), Y),
        TypeError,
        "train_X: .* got list; convert it with torch.as_tensor",
    ),
    "an array to learn next": (
        lambda: labels().update(X.numpy(), Y),
        TypeError,
        "X: .* got ndarray; convert it with torch.as_tensor",
    ),
    "no sampler": (
        lambda: labels().fantasize(X, None),
        TypeError,
        "sampler: expected a MCSampler, got None",
    ),
    "an output that there is not": (
        lambda: labels().posterior(X, output_indices=[3]),
        ValueError,
        "output_indices: expected indices of the 1 outputs",
    ),
    "labels that are standardised": (
        lambda: SequentialGP(
            X, Y.round(), likelihood=BernoulliLikelihood(), outcome_transform=Standardize(1)
        ),
        ValueError,
        "outcome_transform: after a Standardize, .* BernoulliLikelihood; leave it out",
    ),
    "labels that were wrong before they were standardised": (
        lambda: SequentialGP(
            X, 2 + Y.round(), likelihood=BernoulliLikelihood(), outcome_transform=Standardize(1)
        ),
        ValueError,
        "train_Y: [23] is not a possible observation",
    ),
    "one-hot rows": (
        lambda: SequentialGP(X, torch.eye(3).repeat(7, 1)[:20].to(X), likelihood=softmax()),
        ValueError,
        r"train_Y: .* one column of targets, got 3; .* train_Y\.argmax\(-1, keepdim=True\)",
    ),
    "a class too many": (
        lambda: SequentialGP(X, 3 * torch.ones_like(Y), likelihood=softmax()),
        ValueError,
        "3 is not a possible .* integers from 0 to 2; num_classes counts all classes",
    ),
    "counts beyond their total": (
        lambda: SequentialGP(
            X,
            4 * torch.ones_like(Y),
            likelihood=BinomialLikelihood(),
            likelihood_arguments={"total_count": 3.0 + (torch.arange(20) != 7)},
        ),
        ValueError,
        "4 is not a possible observation of BinomialLikelihood: it must be .* from 0 to 3[.]$",
    ),
    "a number of fantasies": (
        lambda: labels().fantasize(X, 16),
        TypeError,
        "sampler: expected a MCSampler, got 16",
    ),
    "inputs without targets": (
        lambda: labels().update_stream([X]),
        TypeError,
        r"stream: expected pairs \(X, Y\)",
    ),
    "noise that is learnt": (
        lambda: SequentialGP(X, Y, covar_module=make_kernel()).update(X, Y, noise=Y),
        ValueError,
        "noise: expected None, since this model was built without train_Yvar",
    ),
    "a capacity in words": (
        lambda: MemoryOptions(capacity="many"),  # type: ignore[arg-type]
        TypeError,
        "capacity: expected a whole number.* or None, got 'many'",
    ),
    "an exact model": (
        lambda: DualELBO(SingleTaskGP(X, Y).likelihood, SingleTaskGP(X, Y)),  # type: ignore[arg-type]
        TypeError,
        "model: .* got a SingleTaskGP; exact models have .* ExactMarginalLogLikelihood",
    ),
    "half a point": (lambda: BatchOptimizer(unit()).ask(0.5), ValueError, "q: expected a whole"),
}


@pytest.mark.parametrize("mistake", list(SHAPES))
def test_things_of_the_wrong_kind(mistake: str) -> None:
    call, error, message = SHAPES[mistake]
    with pytest.raises(error, match=message):
        call()


# -------------------------------------------------------------------------------- columns


TWO = torch.rand(2, 2, dtype=torch.float64)
COLUMNS: dict[str, tuple[Any, Tensor, str]] = {
    "one column for two outputs": (
        lambda: SequentialGP(X, torch.cat([Y, -Y], -1), covar_module=make_kernel()),
        Y[:2],
        r"Y: expected shape 2 x 2 .* got \(2, 1\)",
    ),
    "three for two": (
        lambda: SequentialGP(X, torch.cat([Y, -Y], -1), covar_module=make_kernel()),
        torch.cat([Y, Y, Y], -1)[:2],
        r"Y: expected shape 2 x 2 .* got \(2, 3\)",
    ),
    "a square for one": (
        lambda: SequentialGP(X, Y, covar_module=make_kernel()),
        TWO,
        r"Y: expected shape 2 x 1 .* got \(2, 2\)\.",
    ),
    "one-hot labels of two classes": (
        labels,
        torch.eye(2, dtype=torch.float64),
        r"Y: .* expected labels, not one-hot rows: Y\.argmax\(-1, keepdim=True\)",
    ),
    "one-hot labels of three": (
        lambda: SequentialGP(X, (3 * Y).floor(), likelihood=softmax()),
        torch.eye(3, dtype=torch.float64)[:2],
        r"Y: expected shape 2 x 1 .* Y\.argmax\(-1, keepdim=True\)",
    ),
    "no column at all": (
        lambda: SequentialGP(X, Y, covar_module=make_kernel()),
        Y[:2, 0],
        r"Y: expected shape 2 x 1 .* one column of them is Y\.unsqueeze\(-1\)",
    ),
}


@pytest.mark.parametrize("mistake", list(COLUMNS))
@pytest.mark.parametrize("method", ["update", "forget", "leverage", "condition_on_observations"])
def test_columns_are_those_of_the_outputs(mistake: str, method: str) -> None:
    make, wrong, message = COLUMNS[mistake]
    model = make()
    before = model.posterior(X).mean
    message = message.replace("expected shape 2", r"expected shape (?:\.\.\. x )?2")
    with pytest.raises(ValueError, match=message):
        getattr(model, method)(X[:2], wrong)
    assert torch.equal(model.posterior(X).mean, before)
    assert (model.num_updates, model.num_seen) == (0, model.num_data)


def test_densities_of_targets_of_another_shape() -> None:
    one = SequentialGP(X, Y, covar_module=make_kernel())
    two = SequentialGP(X, torch.cat([Y, -Y], -1), covar_module=make_kernel())
    for model, targets in ((one, TWO), (one, TWO[:, :1]), (two, TWO[0]), (two, torch.rand(3, 2))):
        with pytest.raises(ValueError, match=r"targets: expected shape (2|2 x 2) \(a row per"):
            model.log_predictive_density(X[:2], targets)
    with pytest.raises(ValueError, match="not a possible observation"):
        labels().log_predictive_density(X[:2], torch.tensor([0.0, 2.0]))
    assert two.log_predictive_density(X[:2], TWO).shape == (2, 2)
    assert one.log_predictive_density(X[:4].reshape(2, 2, 2), TWO).shape == (2, 2)


# -------------------------------------------------------------------------------- pools


def test_lists_instead_of_tensors() -> None:
    model, pool = labels(), make_inputs(12, 2)
    with pytest.raises(TypeError, match=r"pool: expected a torch.Tensor, got list"):
        select_from_pool(model, pool.tolist(), threshold=0.5)  # type: ignore[arg-type]
    expected = select_from_pool(
        model,
        pool,
        threshold=0.5,
        surveyed=torch.tensor([0, 1]),
        available=torch.arange(12) < 6,
        costs=torch.arange(1.0, 13.0),
        weights=torch.ones(12),
    )
    actual = select_from_pool(
        model,
        pool,
        threshold=0.5,
        surveyed=[0, 1],  # type: ignore[arg-type]
        available=[True] * 6 + [False] * 6,  # type: ignore[arg-type]
        costs=list(range(1, 13)),  # type: ignore[arg-type]
        weights=[1] * 12,  # type: ignore[arg-type]
    )
    assert torch.equal(actual.chosen, expected.chosen)
    assert torch.equal(actual.scores, expected.scores)
    by_index = select_from_pool(model, pool, threshold=0.5, available=torch.tensor([3]))
    assert by_index.chosen.tolist() == [3]
    nothing = select_from_pool(model, pool, threshold=0.5, surveyed=[])  # type: ignore[arg-type]
    assert nothing.scores.isfinite().all()
    with pytest.raises(ValueError, match="surveyed, available: there is no point left"):
        select_from_pool(model, pool, threshold=0.5, surveyed=torch.arange(12))
    counts = SequentialGP(pool, torch.ones(12, 1), likelihood=BinomialLikelihood(5))
    with pytest.raises(ValueError, match="total_count: expected a number, or 12 of them"):
        select_from_pool(counts, pool, threshold=0.5, total_count=torch.ones(3))
    with pytest.raises(TypeError, match=r"arguments: .* pass total_count= by name"):
        select_from_pool(counts, pool, threshold=0.5, arguments={"total_count": 5})
    with pytest.raises(ValueError, match="threshold: expected a probability between 0 and 1"):
        select_from_pool(counts, pool, threshold=10)
    with pytest.raises(TypeError, match="surveyed: expected 12 booleans or a list of indices, got"):
        select_from_pool(counts, pool, threshold=0.5, surveyed=["a", "b"])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="costs: expected 12 positive numbers, got -1"):
        select_from_pool(counts, pool, threshold=0.5, costs=-torch.ones(12))
    with pytest.raises(ValueError, match="must be an integer from 0 to 5; pass counts, not rates"):
        counts.update(pool[:2], torch.full((2, 1), 0.3))


# -------------------------------------------------------------------------------- ask and tell


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"num_restart": 3}, TypeError, "did you mean num_restarts"),
        ({"fantasy": "median"}, ValueError, "fantasy: expected one of"),
        ({"separation": 2.0}, ValueError, "separation"),
        ({"num_initial": -1}, ValueError, "num_initial"),
        ({"q": 3}, ValueError, "q cannot be chosen"),
        ({"choices": unit(), "discrete_dims": {0: [0.0]}}, ValueError, "different optimisers"),
        ({"maximise": False}, TypeError, "did you mean maximize"),
        ({"discrete_dims": [1]}, TypeError, r"discrete_dims: .* as in \{1: range\(6\)\}"),
        ({"discrete_dims": {5: [0, 1]}}, ValueError, "discrete_dims: expected indices from 0 to 1"),
        ({"cat_dims": {0: []}}, ValueError, "cat_dims: expected a list of values for input 0"),
    ],
)
def test_options_are_checked_at_once(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        BatchOptimizer(unit(), **options)


@pytest.mark.parametrize(
    ("bounds", "message"),
    [
        (
            [[0, 3], [0, 3]],
            r"got 0 and 0 for input 0; transpose d x 2 .* bounds\.mT; .* fixed_features=\{0",
        ),
        ([[0, 1], [1, 0]], r"lower bounds first, .* got 1 and 0 for input 1; .* bounds\.mT"),
        ([[0, 1], [0, 1], [0, 1]], r"2 x d, .* got \(3, 2\); transpose d x 2 bounds .* bounds\.mT"),
        (
            [[0, 0, 2], [1, 1, 2]],
            r"got 2 and 2 for input 2; to fix.*fixed_features=\{2: 2",
        ),
    ],
)
def test_bounds_are_ranges(bounds: list[list[float]], message: str) -> None:
    with pytest.raises(ValueError, match=f"bounds: expected shape .*{message}"):
        BatchOptimizer(torch.tensor(bounds, dtype=torch.double))


def test_bounds_of_a_batch_may_fix_an_input() -> None:
    X = make_inputs(12, 2)
    model = SequentialGP(X, torch.poisson(3 * X[:, :1]), likelihood=PoissonLikelihood())

    def propose(bounds: list[list[float]]) -> Tensor:
        return fantasy_batch(
            lambda models, fantasies: UpperConfidenceBound(models[0], beta=1.0),
            [model],
            torch.tensor(bounds),
            q=2,
            num_restarts=1,
            raw_samples=8,
        ).X

    assert propose([[0.0, 0.4], [1.0, 0.4]])[:, 1].tolist() == [0.4, 0.4]
    with pytest.raises(ValueError, match=r"bounds: .* got 1 and 0 for input 1"):
        propose([[0.0, 1.0], [1.0, 0.0]])


def test_what_is_told_and_returned_is_checked() -> None:
    loop, X = BatchOptimizer(unit(), num_initial=2, **FEW), make_inputs(2, 2)
    with pytest.raises(TypeError, match="Y: expected numbers, got 'a'"):
        loop.tell(X, "a")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"Y: .* got \[None, 1.0\]; use NaN where there is no val"):
        loop.tell(X, [None, 1.0])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="valid: expected numbers, got 'yes'"):
        loop.tell(X, torch.zeros(2), "yes")  # type: ignore[arg-type]
    with pytest.raises(
        TypeError, match=r"evaluate: .* a pair \(Y, valid\), .* it returned a Tensor"
    ):
        loop.run(lambda X: X.sum(-1), 2)  # type: ignore[arg-type, return-value]
    for state in ({"a": 1}, {"version": loop._version}, [1]):
        with pytest.raises(ValueError, match="state: not the state of a BatchOptimizer"):
            loop.load_state_dict(state)  # type: ignore[arg-type]
    assert not len(loop.X)
    loop.tell(X, torch.zeros(2))
    with pytest.raises(TypeError, match=r"X: .* got list; convert it with torch.as_tensor"):
        loop.probability_of_validity([[0.5, 0.5]])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"X: expected shape \.\.\. x 2, got \(1, 3\)"):
        loop.probability_of_validity(torch.rand(1, 3))


def test_one_warning_that_nothing_is_valid_where_it_was_asked() -> None:
    loop, X = BatchOptimizer(unit(), num_initial=2, **FEW), make_inputs(2, 2)
    loop.tell(X, torch.full((2,), torch.nan))
    calls: list[Any] = [
        lambda: loop.ask(2),
        lambda: loop.run(lambda X: (X.sum(-1), None), 4, q=2),  # type: ignore[arg-type, return-value]
    ]
    for call in calls:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            call()
        (warning,) = [w for w in caught if issubclass(w.category, NoValidObservationWarning)]
        assert warning.filename == __file__


def test_options_of_initial_conditions_pass() -> None:
    """Two starts at a time, of two: it is what it would be without."""
    X = make_inputs(4, 2)
    asked = []
    for options in ({}, {"options": {"batch_limit": 2}, "ic_generator": None}):
        loop = BatchOptimizer(unit(), num_initial=2, num_restarts=2, raw_samples=16, **options)
        loop.tell(X, X.sum(-1))
        asked.append(loop.ask(1))
    assert torch.equal(*asked)


def test_state_of_another_problem() -> None:
    state = BatchOptimizer(unit()).state_dict()
    BatchOptimizer(unit()).load_state_dict(state)
    for other in (BatchOptimizer(2 * unit()), BatchOptimizer(unit(3))):
        with pytest.raises(ValueError, match="state: saved with bounds"):
            other.load_state_dict(state)
    with pytest.raises(ValueError, match="state: saved with maximize = True"):
        BatchOptimizer(unit(), maximize=False).load_state_dict(state)
    with pytest.raises(ValueError, match="expected version 6, got 1"):
        BatchOptimizer(unit()).load_state_dict({**state, "version": 1})


def test_initial_points_are_not_repeated() -> None:
    """Told in any order, some of them, or with others between: what is known is not asked again."""
    loop = BatchOptimizer(unit(), num_initial=12, **FEW)
    first = loop.ask(4)
    assert torch.equal(loop.ask(4), first)
    loop.tell(first[2:], torch.zeros(2))
    second = loop.ask(4)
    assert torch.equal(second[:2], first[:2])  # as nobody said that they are being evaluated
    third = loop.ask(4, X_pending=first[:2])
    both = torch.cat([first, third])
    assert len(both.unique(dim=0)) == 8
    loop.tell(first[:2], torch.zeros(2))
    assert torch.equal(loop.ask(4), third)


def test_labels_are_zero_or_one() -> None:
    loop, X = BatchOptimizer(unit(), **FEW), make_inputs(2, 2)
    for valid in (torch.tensor([-1, 1]), torch.tensor([2, 0])):
        with pytest.raises(ValueError, match="valid: expected labels"):
            loop.tell(X, torch.zeros(2), valid)
    loop.tell(X, torch.zeros(2), torch.tensor([0, 1]))
    assert loop.valid.tolist() == [False, True]


def test_values_that_are_all_the_same_are_nothing_to_warn_of() -> None:
    loop, X = BatchOptimizer(unit(), num_initial=2, **FEW), make_inputs(6, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loop.tell(X[:1], torch.ones(1))
        loop.tell(X[1:], torch.ones(5))
    assert loop.ask(1).shape == (1, 2)


# -------------------------------------------------------------------------------- batches


def test_fantasies_with_per_point_arguments() -> None:
    X = make_inputs(12, 2)
    Y = (5 * X.mean(-1, keepdim=True)).round()
    totals = {"total_count": torch.full((12,), 5.0)}
    model = SequentialGP(X, Y, likelihood=BinomialLikelihood(), likelihood_arguments=totals)

    def propose(arguments: Any) -> Tensor:
        return fantasy_batch(
            lambda models, fantasies: UpperConfidenceBound(models[0], beta=1.0),
            [model],
            unit(),
            q=2,
            num_restarts=1,
            raw_samples=8,
            seed=0,
            arguments=arguments,
        )

    with pytest.raises(ValueError, match="total_count"):
        propose(None)
    batch = propose([{"total_count": 7}])
    imagined = batch.fantasies.Y[0]
    assert imagined is not None
    assert bool(((imagined >= 0) & (imagined <= 7) & (imagined == imagined.round())).all())
    held = SequentialGP(X, Y, likelihood=BinomialLikelihood(5))
    assert torch.equal(
        fantasy_outcome(held, X, total_count=torch.full((12,), 7.0)),
        fantasy_outcome(model, X, total_count=torch.full((12,), 7.0)),
    )
    with pytest.raises(ValueError, match="a dictionary, or None, for each of 1 models"):
        propose({"total_count": 7})
    with pytest.raises(ValueError, match="only a SequentialGP takes"):
        fantasy_batch(
            lambda models, fantasies: UpperConfidenceBound(models[0], beta=1.0),
            [SingleTaskGP(X, Y)],
            unit(),
            q=2,
            arguments=[{"total_count": 7}],
        )


def test_batches_that_crowd_do_not_warn() -> None:
    """The distance that points keep has a kink, at which BoTorch's line searches end."""
    X = torch.linspace(0, 1, 20).unsqueeze(-1)
    torch.manual_seed(0)
    model = SequentialGP(X, torch.poisson(3 * X), likelihood=PoissonLikelihood())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        batch = fantasy_batch(
            lambda models, fantasies: UpperConfidenceBound(models[0], beta=4.0),
            [model],
            unit(1),
            q=2,
            num_restarts=2,
            raw_samples=16,
        )
    assert float((batch.X[0] - batch.X[1]).abs()) < 0.02


# -------------------------------------------------------------------------------- streams


def test_which_batch_it_was() -> None:
    model, wrong = SequentialGP(X, Y, covar_module=make_kernel()), Y.clone()
    wrong[7] = torch.nan
    records: list[Any] = []
    with pytest.raises(ValueError, match=r"Y: .* got 1 NaN .* the first in row 7") as raised:
        model.update_stream([(X, Y), (X, wrong), (X, Y)], records.append, learn=False)
    assert "batch 1 of the stream" in raised.value.__notes__[0]
    assert model.num_updates == len(records) == 1
    with pytest.raises(TypeError, match=r"stream: expected pairs .* got a Tensor as batch 0"):
        model.update_stream([X])


def test_what_cannot_be_forgotten_is_named() -> None:
    model = SequentialGP(X, Y, covar_module=make_kernel())
    with pytest.raises(ValueError, match="Y: these observations are not part of what has been"):
        model.forget(X[:2] + 3, Y[:2])


def test_precision_of_inputs() -> None:
    model = SequentialGP(X.float(), Y.float(), covar_module=make_kernel().float())
    with pytest.raises(TypeError, match=r"inputs: expected torch.float32 .* got torch.float64"):
        model.variational_strategy.converge(X, Y.squeeze(-1), model.likelihood, add=True)
    model.update(X, Y, learn=False)  # converts, as all do that take what was observed
    assert model.condition_on_observations(X, Y).posterior(X).mean.dtype == torch.float32
    assert model.double().condition_on_observations(X.float(), Y.float()).num_data == 40


def test_the_state_of_a_stream_in_a_model_with_data() -> None:
    stream, other = labels(), labels()
    stream.update(make_inputs(20, 2), torch.ones(20, 1), memory=5, learn=False)
    state = stream.state_dict()
    with pytest.raises(ValueError, match=r"comes from a stream.*seqgp\.save"):
        other.load_state_dict(state)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        stream.load_state_dict(state)  # its own
        labels().load_state_dict(labels().state_dict())  # not of a stream


def test_data_are_copied() -> None:
    X = make_inputs(10, 2)
    Y, totals = torch.ones(10, 1), torch.full((10,), 3.0)
    model = SequentialGP(
        X, Y, likelihood=BinomialLikelihood(), likelihood_arguments={"total_count": totals}
    )
    expected = SequentialGP(
        X.clone(),
        Y.clone(),
        likelihood=BinomialLikelihood(),
        likelihood_arguments={"total_count": totals.clone()},
    )
    X.zero_(), Y.zero_(), totals.zero_()
    model.refresh()
    grid = make_inputs(5, 2)
    assert torch.equal(model.posterior(grid).mean, expected.posterior(grid).mean)


@pytest.mark.parametrize("likelihood", [BernoulliLikelihood, PoissonLikelihood])
def test_streams_in_single_precision_do_not_warn(likelihood: Any) -> None:
    X = make_inputs(200, 2).float()
    Y = (torch.sin(6 * X).sum(-1, keepdim=True) > 0.5).float()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = SequentialGP(X[:40], Y[:40], likelihood=likelihood(), inducing_points=15)
        for x, y in zip(X[40:].split(40), Y[40:].split(40), strict=True):
            model.update(x, y, memory=20, steps=5)
    assert model.num_seen == 200


# -------------------------------------------------------------------------------- progress


def test_bars_are_for_terminals(capsys: pytest.CaptureFixture[str]) -> None:
    list(progress_bar(range(3)))
    X, Y = make_inputs(20, 2), torch.ones(20, 1)
    model = SequentialGP(X, Y, likelihood=PoissonLikelihood(), inducing_points=5)
    model.update_stream([(X, Y)], learn=False)
    select_from_pool(model, X, threshold=1.0, progress=True)
    assert capsys.readouterr() == ("", "")
    list(progress_bar(range(3), disable=False))
    assert "3/3" in capsys.readouterr().err

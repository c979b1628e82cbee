from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from botorch.acquisition import (
    LogExpectedImprovement,
    UpperConfidenceBound,
    qKnowledgeGradient,
    qLogExpectedImprovement,
)
from botorch.acquisition.acquisition import AcquisitionFunction
from botorch.exceptions.errors import UnsupportedError
from botorch.models import ModelListGP, SingleTaskGP, SingleTaskVariationalGP
from botorch.models.model import Model
from botorch.models.transforms import Normalize, Standardize
from botorch.optim import optimize_acqf
from gpytorch.likelihoods import BernoulliLikelihood
from torch import Tensor

from seqgp import BinomialLikelihood, SequentialGP
from seqgp.acquisition import (
    Fantasies,
    FantasyBatch,
    LogValidExpectedImprovement,
    best_valid,
    fantasy_batch,
    fantasy_outcome,
    valid_improvement,
)
from seqgp.acquisition.fantasies import FANTASIES
from seqgp.acquisition.separation import Separated
from tests.helpers import (
    assert_close,
    assert_untouched,
    early_line_searches,
    make_inputs,
    make_kernel,
    state_of,
    unscaled,
)
from tests.models.helpers import data, pair

pytestmark = [pytest.mark.usefixtures("float64"), unscaled, early_line_searches]

FEW: dict[str, Any] = {"num_restarts": 4, "raw_samples": 32, "options": {"maxiter": 40}}


def unit(d: int = 2) -> Tensor:
    return torch.tensor([[0.0] * d, [1.0] * d])


def confidence(models: list[Model], fantasies: Fantasies) -> AcquisitionFunction:
    return UpperConfidenceBound(models[0], beta=4.0)


class Failing:
    """An objective with a region where it fails, and models of both."""

    def __init__(self, n: int = 25, noise: float = 1e-3) -> None:
        self.X = make_inputs(n, 2)
        self.Y = -(self.X - 0.4).square().sum(-1, keepdim=True) + 0.1 * (9 * self.X[:, :1]).sin()
        self.valid = (self.X.sum(-1, keepdim=True) < 1.2).to(self.X)
        ok = self.valid.squeeze(-1).bool()
        kernel = make_kernel(0.4)
        self.objective = SequentialGP(
            self.X[ok], self.Y[ok], covar_module=kernel, outcome_transform=Standardize(1)
        )
        self.objective.likelihood.noise = noise
        self.objective.refresh()
        self.validity = SequentialGP(
            self.X,
            self.valid,
            likelihood=BernoulliLikelihood(),
            covar_module=make_kernel(0.5, 5.0),
        )
        self.best = best_valid(self.Y, self.valid)

    @property
    def models(self) -> list[Model]:
        return [self.objective, self.validity]

    def batch(self, q: int, **options: Any) -> FantasyBatch:
        torch.manual_seed(0)
        return fantasy_batch(
            valid_improvement(self.best), self.models, unit(), q, **{**FEW, **options}
        )


# -------------------------------------------------------------------- outcomes


@pytest.mark.parametrize("fantasy", ["mean", "sample", "constant_min"])
@pytest.mark.parametrize(
    "name", ["gaussian", "bernoulli", "poisson", "negative_binomial", "ordinal", "softmax", "beta"]
)
def test_outcomes_are_possible_observations(name: str, fantasy: str) -> None:
    """The model takes them: it checks that they are in the support of its likelihood."""
    model, X = data(name).model(), make_inputs(5, 2)
    Y = fantasy_outcome(model, X, fantasy, seed=1)
    assert Y is not None
    assert Y.shape == (5, 1)
    assert model.condition_on_observations(X, Y).posterior(X).mean.isfinite().all()
    if name in ("bernoulli", "poisson", "negative_binomial", "ordinal", "softmax"):
        assert (Y % 1 == 0).all()


def test_counts_out_of_a_total() -> None:
    X = make_inputs(10, 2)
    model = SequentialGP(X, torch.arange(10.0).unsqueeze(-1), likelihood=BinomialLikelihood(9))
    for fantasy in ("mean", "sample"):
        Y = fantasy_outcome(model, X, fantasy, seed=0)
        assert Y is not None
        assert ((Y % 1 == 0) & (Y >= 0) & (Y <= 9)).all()


def test_the_mean_of_labels_is_the_more_probable_one() -> None:
    model, X = data("bernoulli", n=30).model(), make_inputs(40, 2)
    probability = model.posterior(X, observation_noise=True).mean
    assert torch.equal(fantasy_outcome(model, X), (probability > 0.5).to(X))


def test_outcomes_of_gaussian_models() -> None:
    """On the scale of the observations, whatever the transforms, and alike for both models."""
    X, x = make_inputs(10, 2), make_inputs(3, 2)
    Y = torch.cat([100 + X, 3 - X], -1)[:, ::2]
    transform = Standardize(2)
    for model in (
        SequentialGP(X, Y, outcome_transform=Standardize(2)),
        SingleTaskGP(X, Y, outcome_transform=transform),
    ):
        for fantasy in ("mean", "believer"):
            assert_close(fantasy_outcome(model, x, fantasy), model.posterior(x).mean)
        for fantasy, expected in {
            "constant_min": Y.amin(0),
            "constant_mean": Y.mean(0),
            "constant_max": Y.amax(0),
        }.items():
            assert_close(fantasy_outcome(model, x, fantasy), expected.expand(3, 2))
        assert fantasy_outcome(model, x, None) is None
        assert_close(fantasy_outcome(model, x, lambda model, x: x), x)
    parts = [SingleTaskGP(X, Y[:, k : k + 1]) for k in range(2)]
    assert_close(
        fantasy_outcome(ModelListGP(*parts), x, "constant_max"), Y.amax(0).expand(3, 2), 1e-8
    )


def test_samples_are_those_of_the_posterior() -> None:
    model, x, number = pair()[0], make_inputs(2, 2), 300
    draws = torch.stack([fantasy_outcome(model, x, "sample", seed=k) for k in range(number)])
    posterior = model.posterior(x, observation_noise=True)
    C, variance = posterior.covariance_matrix, posterior.variance
    assert ((draws.mean(0) - posterior.mean).abs() < 4 * (variance / number).sqrt()).all()
    # The standard error of a Gaussian's sample covariance.
    error = ((C.square() + variance * variance.mT) / number).sqrt()
    assert ((draws.squeeze(-1).T.cov() - C).abs() < 4 * error).all()
    assert torch.equal(
        fantasy_outcome(model, x, "sample", seed=5), fantasy_outcome(model, x, "sample", seed=5)
    )


def test_the_believer_believes_only_gaussians() -> None:
    assert fantasy_outcome(data("bernoulli").model(), make_inputs(3, 2), "believer") is None
    with pytest.raises(ValueError, match="constant_min"):
        fantasy_outcome(data("bernoulli").model(), make_inputs(3, 2), "prophet")


# -------------------------------------------------------------------- batches


def test_batch_is_algorithm_2() -> None:
    """Written out: maximise, imagine, condition, and again."""
    problem = Failing()
    batch = problem.batch(3, separation=0.0)
    torch.manual_seed(0)
    models, best, points = list(problem.models), problem.best, []
    for value in batch.values:
        x, expected = optimize_acqf(
            LogValidExpectedImprovement(*models, best), unit(), 1, return_best_only=False, **FEW
        )
        index = expected.argmax()
        assert_close(value, expected[index], 1e-8)
        points.append(x[index])
        y = models[0].posterior(points[-1]).mean.detach()
        label = (models[1].posterior(points[-1]).mean > 0).to(y).detach()
        if label:
            best = torch.maximum(best, y.squeeze())
        models[0] = models[0].condition_on_observations(points[-1], y)
        models[1] = models[1].condition_on_observations(points[-1], label)
    assert_close(batch.X, torch.cat(points), 1e-8)
    assert_close(batch.fantasies.X, batch.X[:2])


def test_models_are_untouched() -> None:
    problem = Failing()
    before = [state_of(model) for model in problem.models]
    problem.batch(3, X_pending=make_inputs(2, 2))
    for model, state in zip(problem.models, before, strict=True):
        assert_untouched(model, state)


@pytest.mark.slow
@pytest.mark.parametrize("fantasy", FANTASIES)
@pytest.mark.parametrize("noise", [1e-4, 0.3])
def test_no_near_duplicates(fantasy: str, noise: float) -> None:
    """However sure or noisy the model, among themselves and with pending points."""
    problem, pending = Failing(noise=noise), make_inputs(2, 2)
    batch = problem.batch(4, fantasy=fantasy, X_pending=pending, seed=0, separation=0.01)
    assert batch.X.shape == (4, 2)
    # Root mean square over two inputs.
    assert torch.pdist(torch.cat([pending, batch.X])).min() / 2**0.5 > 0.009


def test_batch_is_more_diverse_than_independent_proposals() -> None:
    problem = Failing()
    batch = problem.batch(4, separation=0.0)
    alone = [problem.batch(1, raw_samples=16 + k, separation=0.0).X for k in range(4)]
    assert torch.pdist(batch.X).mean() > 2 * torch.pdist(torch.cat(alone)).mean()


def test_fixed_inducing_points_would_propose_the_same_again() -> None:
    """Why the process itself is conditioned: few inducing points cannot tell what is known."""
    X = torch.linspace(0, 1, 12).unsqueeze(-1)
    Y = (6 * X).sin()

    def batch(**condition: Any) -> Tensor:
        class Model(SequentialGP):
            def condition_on_observations(self, X: Tensor, Y: Tensor, **kwargs: Any) -> Any:
                return super().condition_on_observations(X, Y, **condition)

        model = Model(X, Y, inducing_points=X[::6], covar_module=make_kernel(0.1))
        torch.manual_seed(0)
        return fantasy_batch(confidence, [model], unit(1), 4, separation=0.0, **FEW).X

    assert torch.pdist(batch()).min() > 0.02
    assert torch.pdist(batch(fixed_inducing=True)).min() < 1e-3


def test_pending_points_come_first() -> None:
    """The same as conditioning by hand and then proposing."""
    problem, pending = Failing(), make_inputs(3, 2)
    batch = problem.batch(1, X_pending=pending)
    outcomes = [fantasy_outcome(model, pending) for model in problem.models]
    for expected, actual in zip(outcomes, batch.fantasies.Y, strict=True):
        assert_close(actual, expected)
    conditioned = [
        model.condition_on_observations(pending, Y)
        for model, Y in zip(problem.models, outcomes, strict=True)
    ]
    counts = (outcomes[1] > 0.5).squeeze(-1)
    imagined = best_valid(outcomes[0], counts)
    best = problem.best if imagined is None else torch.maximum(problem.best, imagined)
    torch.manual_seed(0)
    again = fantasy_batch(valid_improvement(best), conditioned, unit(), 1, **FEW)
    assert_close(batch.X, again.X, 1e-6)
    assert_close(batch.values, again.values, 1e-8)


def test_points_to_avoid() -> None:
    """Kept clear of, but nothing is imagined there."""
    problem = Failing()
    first = problem.batch(1)
    second = problem.batch(1, X_avoid=first.X)
    assert torch.cdist(first.X, second.X).item() > 0.012
    assert second.values < first.values
    assert len(second.fantasies.X) == 0


def test_exact_models_of_botorch_propose_the_same() -> None:
    ours, exact = pair(n=10)
    batches = []
    for model in (ours, exact):
        torch.manual_seed(0)
        batches.append(fantasy_batch(confidence, [model], unit(), 3, **FEW))
    assert_close(batches[0].X, batches[1].X, 1e-4)  # of an optimiser that stops at 1e-5 or so
    assert_close(batches[0].values, batches[1].values, 1e-6)


def test_transforms_of_botorchs_models() -> None:
    """Conditioning an exact model with transforms is the same as training on all."""
    X, x = 3 * make_inputs(10, 2), 3 * make_inputs(2, 2)
    bounds = 3 * unit()
    model = SingleTaskGP(
        X,
        X.sum(-1, keepdim=True) + 7,
        outcome_transform=Standardize(1),
        input_transform=Normalize(2, bounds=bounds),
    )
    batch = fantasy_batch(
        lambda models, fantasies: LogExpectedImprovement(models[0], 12.0),
        [model],
        bounds,
        1,
        X_pending=x,
        **FEW,
    )
    assert batch.fantasies.Y[0] is not None
    assert_close(batch.fantasies.Y[0], model.posterior(x).mean, 1e-8)
    assert ((batch.X >= 0) & (batch.X <= 3)).all()


def test_a_way_for_each_model() -> None:
    problem = Failing()
    batch = problem.batch(2, fantasy=["constant_max", None], X_pending=make_inputs(1, 2))
    assert_close(
        batch.fantasies.Y[0],
        problem.objective.outcome_transform.untransform(
            problem.objective.train_targets.unsqueeze(-1)
        )[0]
        .amax(0)
        .expand(2, 1),
    )
    assert batch.fantasies.Y[1] is None
    with pytest.raises(ValueError, match="each of 2 models"):
        problem.batch(2, fantasy=["mean"])

    seen = []

    def sometimes(model: Model, X: Tensor) -> Tensor | None:
        seen.append(X)
        return None if len(seen) == 1 else torch.ones(len(X), 1)

    batch = problem.batch(2, fantasy=["mean", sometimes], X_pending=make_inputs(1, 2))
    assert batch.fantasies.Y[1] is not None
    assert torch.equal(batch.fantasies.Y[1].isnan().flatten(), torch.tensor([True, False]))


def test_incumbent_of_imagined_outcomes() -> None:
    """A better outcome counts if it is imagined to be valid, also when minimising."""
    models = Failing().models
    X = make_inputs(3, 2)
    Y, labels = torch.tensor([[5.0], [-9.0], [7.0]]), torch.tensor([[1.0], [1.0], [0.0]])
    for maximize, expected in ((True, 5.0), (False, -9.0)):
        factory = valid_improvement(torch.tensor(1.0), maximize)
        assert factory(models, Fantasies(X, (Y, labels))).best_f == expected
        assert factory(models, Fantasies(X, (Y[:1], 0 * labels[:1]))).best_f == 1
        assert factory(models, Fantasies(X[:0], (None, None))).best_f == 1
    assert valid_improvement(1.0)(models, Fantasies(X, (Y, None))).best_f == 7


def test_without_validity_it_is_expected_improvement() -> None:
    model, X = Failing().objective, make_inputs(5, 1, 2)
    factory = valid_improvement(0.1)
    actual = factory([model], Fantasies(X[:0, 0], (None,)))(X)
    assert_close(actual, LogExpectedImprovement(model, 0.1)(X), 1e-10)
    imagined = factory([model], Fantasies(X[:1, 0], (torch.tensor([[0.3]]),)))(X)
    assert_close(imagined, LogExpectedImprovement(model, 0.3)(X), 1e-10)


@pytest.mark.slow
@pytest.mark.parametrize(
    "factory",
    [
        lambda models, fantasies: qKnowledgeGradient(models[0], num_fantasies=4),
        lambda models, fantasies: qLogExpectedImprovement(models[0], best_f=0.5),
        lambda models, fantasies: LogExpectedImprovement(models[0], best_f=0.5),
    ],
    ids=["qKG", "qLogEI", "LogEI"],
)
@pytest.mark.parametrize("name", ["gaussian", "poisson"])
def test_any_acquisition_function(name: str, factory: Callable[..., Any]) -> None:
    torch.manual_seed(0)
    few = {"num_restarts": 2, "raw_samples": 8, "options": {"maxiter": 8}}
    batch = fantasy_batch(factory, [data(name).model()], unit(), 3, **few)
    assert batch.X.shape == (3, 2)
    assert batch.values.shape == (3,)
    assert torch.pdist(batch.X).min() > 1e-3


# -------------------------------------------------------------------- spaces


def test_fixed_features() -> None:
    X = Failing().batch(3, fixed_features={0: 0.25}).X
    assert (X[:, 0] == 0.25).all()
    assert X[:, 1].unique().numel() == 3


def test_inequality_constraints() -> None:
    constraint = (torch.tensor([0, 1]), torch.tensor([-1.0, -1.0]), -0.4)  # x0 + x1 <= 0.4
    X = Failing().batch(3, inequality_constraints=[constraint]).X
    assert (X.sum(-1) <= 0.4 + 1e-6).all()
    assert torch.pdist(X).min() > 5e-3


@pytest.mark.slow
def test_mixed_spaces() -> None:
    levels = [0.0, 0.5, 1.0]
    X = Failing().batch(4, fixed_features_list=[{0: level} for level in levels]).X
    assert torch.isin(X[:, 0], torch.tensor(levels)).all()
    X = Failing().batch(4, discrete_dims={0: levels}, options={}).X
    assert torch.isin(X[:, 0], torch.tensor(levels)).all()
    assert torch.pdist(X).min() > 5e-3


def test_discrete_spaces() -> None:
    choices, problem = make_inputs(12, 2), Failing()
    batch = fantasy_batch(
        valid_improvement(problem.best),
        problem.models,
        unit(),
        6,
        X_pending=choices[:2],
        X_avoid=choices[2:4],
        choices=choices,
    )
    index = (batch.X.unsqueeze(1) == choices).all(-1).nonzero()[:, 1]
    assert len(index.unique()) == 6
    assert (index >= 4).all()  # not what is pending or to be avoided


def test_an_optimiser_of_the_users_own() -> None:
    calls = []

    def optimizer(acq_function: AcquisitionFunction, bounds: Tensor, q: int, n: int) -> Any:
        X = torch.rand(n, q, 2)
        values = acq_function(X)
        calls.append(n)
        return X[values.argmax()], values.max()

    problem = Failing()
    batch = fantasy_batch(
        valid_improvement(problem.best), problem.models, unit(), 3, optimizer=optimizer, n=50
    )
    assert batch.X.shape == (3, 2)
    assert set(calls) == {50}


# -------------------------------------------------------------------- what is refused


def test_separation_penalises_only_what_is_near() -> None:
    model, taken, X = pair()[0], make_inputs(2, 2), make_inputs(20, 1, 2)
    plain = UpperConfidenceBound(model, beta=4.0)
    separated = Separated(plain, taken, unit(), 0.1)
    distance = torch.cdist(X.squeeze(-2), taken).min(-1).values / 2**0.5
    near = distance < 0.1
    assert near.any()
    assert_close(separated(X)[~near], plain(X)[~near], 1e-12)
    assert (separated(X)[near] < plain(X)[near]).all()
    # Inputs without a range, or with an infinite one, are compared as they are.
    odd = torch.tensor([[-torch.inf, 0.3], [torch.inf, 0.3]])
    assert_close(Separated(plain, taken, odd, 0.1)(X), separated(X), 1e-12)
    x = taken[:1].unsqueeze(0).requires_grad_()
    (gradient,) = torch.autograd.grad(separated(x).sum(), x)
    assert gradient.isfinite().all()


def test_errors() -> None:
    problem = Failing()
    for options, message in [
        ({"q": 0}, "at least one point"),
        ({"X_pending": torch.rand(2, 3)}, "X_pending: expected shape k x 2"),
        ({"X_avoid": torch.rand(2, 3)}, "X_avoid: expected shape k x 2"),
        ({"sequential": True}, "sequential"),
        ({"separation": 1.5}, "fraction"),
        ({"fixed_features_list": [{0: 0.0}], "choices": torch.rand(3, 2)}, "different"),
    ]:
        with pytest.raises(ValueError, match=message):
            problem.batch(**{"q": 2, **options})
    between = (torch.tensor([[0, 0], [1, 0]]), torch.tensor([1.0, -1.0]), 0.0)
    with pytest.raises(UnsupportedError, match="one at a time"):
        problem.batch(2, inequality_constraints=[between])
    with pytest.raises(UnsupportedError, match="one at a time"):
        problem.batch(2, nonlinear_inequality_constraints=[(lambda x: x.sum(), False)])
    with pytest.raises(ValueError, match="models"):
        fantasy_batch(confidence, [], unit(), 2)
    with pytest.raises(ValueError, match="2 x d"):
        fantasy_batch(confidence, problem.models, unit().T[:1], 2)


def test_models_that_cannot_be_conditioned() -> None:
    X = make_inputs(10, 2)
    model = SingleTaskVariationalGP(X, X.sum(-1, keepdim=True))
    with pytest.raises(UnsupportedError, match="SingleTaskVariationalGP cannot be conditioned"):
        fantasy_batch(confidence, [model], unit(), 2, **FEW)
    assert len(fantasy_batch(confidence, [model], unit(), 2, fantasy=None, **FEW).X) == 2

"""Observations of one task that tell about another, against conditioned models."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gpytorch.likelihoods import BernoulliLikelihood, GaussianLikelihood
from torch import Tensor

from seqgp import SequentialMultiTaskGP
from seqgp.acquisition import (
    expected_reduction,
    qExpectedUncertaintyReduction,
    select_from_pool,
)
from seqgp.acquisition.look_ahead import draw
from seqgp.acquisition.uncertainty import Uncertainty
from seqgp.acquisition.uncertainty_reduction import model_link
from tests.acquisition.helpers import points
from tests.helpers import assert_close, make_inputs

pytestmark = pytest.mark.usefixtures("float64")


def values_and_labels(output: int = 0) -> SequentialMultiTaskGP:
    """A model of values (task 0) and labels (task 3), one of which is the output."""
    X = make_inputs(14, 2)
    f = 10 + 3 * torch.sin(5 * X[:, :1]) + X[:, 1:]
    Y = torch.cat([f, (f > 11).to(X)], -1)
    Y[8:, 0] = torch.nan
    model = SequentialMultiTaskGP(
        X, Y, None, likelihood=[GaussianLikelihood(), BernoulliLikelihood()], all_tasks=[0, 3]
    )
    return model.subset_output([output])


def at(X: Tensor, task: int) -> Tensor:
    return torch.cat([X, torch.full_like(X[:, :1], task)], -1)


def uncertainty(model: Any, criterion: str, level: float | None, locations: Tensor) -> Tensor:
    """The average over locations, on the scale of the observations."""
    u = Uncertainty(criterion, model_link(model), level)
    f = model(model.transform_inputs(model.long_inputs(locations)))
    return u(f.mean, f.variance).mean(-1)


@torch.no_grad()
def test_values_that_tell_about_labels_and_about_themselves() -> None:
    """The variance after a Gaussian observation does not depend on its value."""
    for output, criterion in ((0, "variance"), (1, "threshold-entropy")):
        model, X, locations = values_and_labels(output), *map(points, (4, 9))
        level = None if criterion == "variance" else 0.5
        y = model.posterior(at(X, 0)).mean.unsqueeze(-1)
        z = torch.linspace(-8, 8, 401)
        now, expected = uncertainty(model, criterion, level, locations), []
        for x, mean in zip(at(X, 0), y, strict=True):
            sd = model.posterior(x.unsqueeze(0), observation_noise=True).variance.sqrt()
            outcomes = (mean + sd * z).reshape(-1, 1, 1)
            after = model.condition_on_observations(x.expand(401, 1, 3), outcomes)
            weights = torch.softmax(-0.5 * z.square(), 0)
            expected.append(now - weights @ uncertainty(after, criterion, level, locations))
        actual = expected_reduction(
            model, at(X, 0), locations, criterion, level, num_fantasies=4096
        )
        want = torch.stack(expected)
        assert (want > 0).all()
        # Of entropies, the spread over outcomes over the root of the number of fantasies.
        tol = 1e-5 * float(want.max()) if criterion == "variance" else 5 * 0.05 / 4096**0.5
        assert_close(actual, want, tol)


@torch.no_grad()
@pytest.mark.parametrize("output", [0, 1])
def test_labels_that_tell_about_values_and_about_themselves(output: int) -> None:
    model, X, locations = values_and_labels(output), *map(points, (4, 9))
    level = 11.0 if output == 0 else 0.5
    chances = model.posterior(at(X, 3), observation_noise=True).mean.flatten()
    f = model(model.transform_inputs(at(X, 3)))
    task = torch.ones(4, dtype=torch.long)  # the second
    drawn = draw(model.likelihood, f.mean[None], f.variance[None], 4096, 0, {"task": task})
    assert_close(drawn.mean(0), chances, 2e-3)
    now, expected = uncertainty(model, "threshold-entropy", level, locations), []
    for x, p in zip(at(X, 3), drawn.mean(0), strict=True):
        after = model.condition_on_observations(
            x.expand(2, 1, 3), torch.tensor([0.0, 1.0]).reshape(2, 1, 1)
        )
        u = uncertainty(after, "threshold-entropy", level, locations)
        expected.append(now - (1 - p) * u[0] - p * u[1])
    actual = expected_reduction(model, at(X, 3), locations, threshold=level, num_fantasies=4096)
    acquisition = qExpectedUncertaintyReduction(
        model, locations, threshold=level, num_fantasies=4096
    )
    assert_close(acquisition(at(X, 3).unsqueeze(-2)), torch.stack(expected), 1e-6)
    assert_close(actual, torch.stack(expected), 4e-5)  # in single precision, from a table


def test_inputs_without_a_task_are_those_of_the_output() -> None:
    model, X, locations = values_and_labels(1), *map(points, (4, 9))
    options = {"threshold": 0.5}
    expected = expected_reduction(model, at(X, 3), at(locations, 3), **options)
    assert torch.equal(expected_reduction(model, X, locations, **options), expected)
    acquisition = qExpectedUncertaintyReduction(model, locations, **options)
    for q in (1, 2):
        batches = X.reshape(-1, q, 2)
        long = at(X, 3).reshape(-1, q, 3)
        assert_close(acquisition(batches), acquisition(long), 1e-12)
    local = qExpectedUncertaintyReduction(model, None, **options)
    assert_close(local(X.unsqueeze(-2)), local(at(X, 3).unsqueeze(-2)), 1e-12)
    candidates = X.unsqueeze(-2).requires_grad_(True)
    (gradient,) = torch.autograd.grad(acquisition(candidates).sum(), candidates)
    assert gradient.abs().sum() > 0


def test_a_pool_of_two_kinds_of_observations() -> None:
    """What is to be chosen depends on costs; points of the other task are no locations."""
    model, villages = values_and_labels(0), points(12)
    pool = torch.cat([at(villages, 0), at(villages, 3)])
    is_value = pool[:, 2] == 0
    options: dict[str, Any] = {"threshold": 11.0}
    found = select_from_pool(model, pool, q=3, **options)
    assert len(set(found.chosen.tolist())) == 3
    expected = expected_reduction(model, pool, villages, **options)
    assert_close(found.scores[0], expected, 1e-6)
    for dear in (is_value, ~is_value):
        costs = torch.where(dear, 1e6, 1.0)
        chosen = select_from_pool(model, pool, q=2, costs=costs, **options).chosen
        assert not dear[chosen].any()
    surveyed = select_from_pool(model, pool, surveyed=is_value & (pool[:, 0] > 0.2), **options)
    assert surveyed.scores[0].isfinite().sum() == 24 - (is_value & (pool[:, 0] > 0.2)).sum()


def test_mistakes() -> None:
    model, X = values_and_labels(0), points(4)
    both = SequentialMultiTaskGP(at(X, 0), X[:, :1], 2, all_tasks=[0, 3])
    with pytest.raises(ValueError, match=r"one output; select an output with model\.subset"):
        expected_reduction(both, X, X, "variance")
    with pytest.raises(ValueError, match="locations: expected inputs of the output task, 0"):
        expected_reduction(model, X, at(X, 3), "variance")
    with pytest.raises(ValueError, match="X: expected inputs of the output task, 0, since cand"):
        expected_reduction(model, at(X, 3), None, "variance")
    with pytest.raises(ValueError, match="X: expected one of the tasks"):
        expected_reduction(model, at(X, 1), X, "variance")
    with pytest.raises(ValueError, match="pool: expected shape n x d"):
        select_from_pool(model, at(X, 3), criterion="variance")
    pool = torch.cat([at(X, 0), at(X, 3)])
    with pytest.raises(ValueError, match="no point of the output task is left"):
        select_from_pool(model, pool, criterion="variance", surveyed=[0, 1, 2, 3])

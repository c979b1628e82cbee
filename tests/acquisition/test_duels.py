"""Acquisition functions of duels: those of BoTorch, and the information about the best item."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from botorch.acquisition import PosteriorMean, qKnowledgeGradient
from botorch.acquisition.logei import qLogNoisyExpectedImprovement
from botorch.acquisition.preference import (
    AnalyticExpectedUtilityOfBestOption,
    PairwiseBayesianActiveLearningByDisagreement,
    qExpectedUtilityOfBestOption,
)
from botorch.optim import optimize_acqf
from botorch.sampling import SobolQMCNormalSampler
from torch import Tensor

from seqgp import PreferenceGP
from seqgp.acquisition import InformationAboutBest
from tests.models.test_preference_gp import LOG_CDF, make, problem

pytestmark = pytest.mark.usefixtures("float64")
BOUNDS = torch.tensor([[0.0, 0.0], [1.0, 1.0]], dtype=torch.double)


def test_expected_utility_of_best_option() -> None:
    """Analytic, by samples of BoTorch, and by samples of our own."""
    X, Y = problem()
    model = make(X, Y)
    duels = torch.rand(4, 2, 2)
    with torch.no_grad():
        analytic = AnalyticExpectedUtilityOfBestOption(model)(duels)
        sampler = SobolQMCNormalSampler(torch.Size([4096]), seed=0)
        sampled = qExpectedUtilityOfBestOption(model, sampler=sampler)(duels)
        samples = model.posterior(duels).rsample(torch.Size([100_000]))
    torch.testing.assert_close(analytic, sampled, rtol=0, atol=2e-3)
    torch.testing.assert_close(analytic, samples.amax((-2, -1)).mean(0), rtol=0, atol=0.01)
    winner = AnalyticExpectedUtilityOfBestOption(model, previous_winner=X[:1])
    assert winner(duels[:, :1]).shape == (4,)


def test_botorch_runs() -> None:
    X, Y = problem()
    model = make(X, Y)
    functions: dict[str, tuple[Any, int]] = {
        "eubo": (AnalyticExpectedUtilityOfBestOption(model), 2),
        "nei": (qLogNoisyExpectedImprovement(model, X, prune_baseline=True), 2),
        "bald": (PairwiseBayesianActiveLearningByDisagreement(model), 2),
        "knowledge gradient": (qKnowledgeGradient(model, num_fantasies=4), 2),
        "information": (InformationAboutBest(model, X), 2),
        "mean": (PosteriorMean(model), 1),
    }
    for acquisition, q in functions.values():
        options = {"options": {"maxiter": 2}, "num_restarts": 1, "raw_samples": 4}
        candidate, value = optimize_acqf(acquisition, BOUNDS, q=q, **options)
        assert candidate.shape == (q, 2)
        assert bool(value.isfinite().all())


def information_by_counting(model: PreferenceGP, items: Tensor, duel: Tensor) -> float:
    """From a table of answers and best items, over samples of all utilities."""
    torch.manual_seed(0)
    with torch.no_grad():
        f = model.posterior(torch.cat([items, duel])).rsample(torch.Size([400_000])).squeeze(-1)
    best = f[:, : len(items)].argmax(-1)
    p = torch.special.ndtr((f[:, -2] - f[:, -1]) / math.sqrt(2))
    table = torch.zeros(len(items), 2).index_add(0, best, torch.stack([p, 1 - p], -1)) / len(f)
    independent = table.sum(0) * table.sum(1, keepdim=True)
    return float(torch.xlogy(table, table / independent).sum())


def test_information_about_best() -> None:
    X, Y = problem()
    model, items = make(X, Y[:8]), X[:4]
    information = InformationAboutBest(model, items, 2**15)
    duels = torch.stack([items[:2], items[2:], torch.rand(2, 2)])
    values = information(duels)
    for value, duel in zip(values, duels, strict=True):
        expected = information_by_counting(model, items, duel)
        assert abs(float(value.detach()) - expected) < 2e-3  # of samples
    # Neither the order of the two nor what is certain tells anything more.
    torch.testing.assert_close(information(duels.flip(-2)), values, rtol=1e-9, atol=1e-12)
    same = items[:1].expand(1, 2, 2)
    torch.testing.assert_close(information(same), torch.zeros(1), rtol=0, atol=1e-9)
    assert bool((values > 0).all())
    assert bool((values < math.log(2)).all())


@pytest.mark.parametrize("link", ["probit", "logit"])
def test_information_by_integration(link: str) -> None:
    """Of two items, the better one is the sign of a difference: integrals in two dimensions."""
    X, Y = problem()
    model = make(X, Y[:8], link)
    items, new = X[:2], torch.rand(1, 2)
    with torch.no_grad():
        value = InformationAboutBest(model, items, 2**15)(torch.cat([items[:1], new]).unsqueeze(0))
        f = model.posterior(torch.cat([items, new])).distribution
    D = torch.tensor([[1.0, -1.0, 0.0], [1.0, 0.0, -1.0]])
    joint = torch.distributions.MultivariateNormal(D @ f.mean, D @ f.covariance_matrix @ D.mT)
    # The grid has no point at zero, where the better item changes.
    axis = torch.linspace(-8, 8, 1600)
    h = torch.stack(torch.meshgrid(axis, axis, indexing="ij"), -1)
    p = joint.log_prob(h).flatten().softmax(0).reshape(1600, 1600)
    won = p * LOG_CDF[link](h[..., 1]).exp()
    table = torch.stack([won, p - won]).unflatten(1, (2, 800)).sum((2, 3))
    independent = table.sum(0) * table.sum(1, keepdim=True)
    expected = torch.xlogy(table, table / independent).sum()
    # 32,768 quasi-random samples, of which the answer is averaged.
    torch.testing.assert_close(value.squeeze(), expected, rtol=0, atol=5e-5)


def test_bad_input() -> None:
    X, Y = problem()
    model = make(X, Y)
    with pytest.raises(ValueError, match="items: expected shape n x d, at least two"):
        InformationAboutBest(model, X[:1])
    with pytest.raises(TypeError, match="model: expected a PreferenceGP"):
        InformationAboutBest(torch.nn.Linear(1, 1), X)  # type: ignore[arg-type]

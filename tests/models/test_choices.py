"""Choices of the best of several items, against brute-force integration and other optimisers."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from botorch.models.likelihoods.pairwise import PairwiseLogitLikelihood
from torch import Tensor

import seqgp
from seqgp import ChoiceLikelihood, PreferenceGP, TieLikelihood
from seqgp.likelihoods.quadrature import gauss_hermite
from seqgp.streaming import MemoryOptions
from seqgp.variational import strategy
from tests.best_gaussian import best_gaussian
from tests.helpers import make_kernel

pytestmark = pytest.mark.usefixtures("float64")
ITEMS = [[0.1], [0.5], [0.8]]
CHOICES = [[0, 1, 2], [0, 2, 1], [1, 0, 2], [0, 1, 2]]
EVERYTHING = MemoryOptions(capacity=None)


def make(choices: list[list[int]] | None = CHOICES) -> PreferenceGP:
    given = None if choices is None else torch.tensor(choices)
    X = torch.tensor(ITEMS)
    return PreferenceGP(X, None, ChoiceLikelihood(), make_kernel(), choices=given)


def grid(K: Tensor) -> tuple[Tensor, Tensor, float]:
    """Two differences of three utilities on a grid, their log prior density, and a cell's log area.

    The differences are f0 - f1 and f1 - f2.
    """
    D = torch.tensor([[1.0, -1.0, 0.0], [0.0, 1.0, -1.0]])
    prior = torch.distributions.MultivariateNormal(torch.zeros(2), D @ K @ D.mT)
    axis = torch.linspace(-9, 9, 361)
    h = torch.stack(torch.meshgrid(axis, axis, indexing="ij"), -1)
    return h, prior.log_prob(h), 2 * math.log(float(axis[1] - axis[0]))


# ------------------------------------------------------------------------------- the posterior


def test_brute_force() -> None:
    """Three items have two differences, which a grid integrates."""
    model, choices = make(), torch.tensor(CHOICES)
    h, log_prior, area = grid(model.covar_module(torch.tensor(ITEMS)).to_dense().detach())
    f = torch.stack([h.sum(-1), h[..., 1], torch.zeros_like(h[..., 0])], -1)
    log_joint = f.log_softmax(-1)[..., choices[:, 0]].sum(-1) + log_prior
    log_evidence = log_joint.flatten().logsumexp(0) + area
    # The bound is below the evidence; how far is the nature of the Gaussian, not of the arithmetic.
    assert log_evidence - 0.01 < float(model.refresh()) < log_evidence
    p = log_joint.flatten().softmax(0).reshape(log_joint.shape).unsqueeze(-1)
    exact = (p * h).sum((0, 1))
    variance = (p * (h - exact).square()).sum((0, 1))
    posterior = model.posterior(torch.tensor(ITEMS)).distribution
    D = torch.tensor([[1.0, -1.0, 0.0], [0.0, 1.0, -1.0]])
    # As comparisons with each of the others these would be .08 and .26 standard deviations off.
    error = (D @ posterior.mean - exact) / variance.sqrt()
    assert bool((error.abs() < 0.005).all())
    spread = (D @ posterior.covariance_matrix @ D.mT).diagonal()
    torch.testing.assert_close(spread, variance, rtol=0.015, atol=0)
    density = model.log_predictive_density(
        torch.tensor(ITEMS), torch.empty(0, 2), choices=torch.tensor([[2, 0, 1]])
    )
    chance = (p.squeeze(-1) * f.softmax(-1)[..., 2]).sum()
    torch.testing.assert_close(density.exp(), chance.reshape(1), rtol=0, atol=1e-3)


def test_best_gaussian() -> None:
    """The posterior is the Gaussian that maximises the bound, found by another optimiser."""
    model, choices = make(), torch.tensor(CHOICES)
    K = model.covar_module(torch.tensor(ITEMS)).to_dense().detach()
    points, weights = gauss_hermite(16, torch.float64, torch.device("cpu"))
    z = torch.cartesian_prod(points, points, points)
    w = torch.cartesian_prod(weights, weights, weights).prod(-1)

    def expected_log_prob(mean: Tensor, root: Tensor) -> Tensor:
        return (w @ (mean + z @ root.mT).log_softmax(-1))[choices[:, 0]].sum()

    mean, covariance, bound = best_gaussian(K, expected_log_prob)
    f = model.posterior(torch.tensor(ITEMS)).distribution
    # As close as the coarser one of both rules of quadrature.
    torch.testing.assert_close(f.mean, mean, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(f.covariance_matrix, covariance, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(model.refresh(), bound, rtol=1e-6, atol=1e-6)


# ------------------------------------------------------------------------------- streams


def survey() -> tuple[Tensor, dict[str, Tensor]]:
    """Items, and some of everything: comparisons, choices among three or four, ratings."""
    torch.manual_seed(0)
    X = torch.rand(9, 2)
    choices = torch.tensor([[4, 0, 1, -1], [2, 3, 7, 8], [5, 6, 0, -1], [2, 1, 4, -1]])
    ratings = torch.full((9,), torch.nan)
    ratings[:3] = torch.tensor([3.0, 4.5, 7.0])
    return X, {"choices": choices, "ratings": ratings}


def mixed(Y: list[list[int]], choices: Tensor | None, ratings: Tensor | None) -> PreferenceGP:
    X, _ = survey()
    likelihood = seqgp.RatingLikelihood(2.0, 2.5, 0.3)
    return PreferenceGP(
        X,
        torch.tensor(Y).reshape(-1, 2),
        ChoiceLikelihood(),
        make_kernel(),
        choices=choices,
        ratings=ratings,
        rating_likelihood=likelihood,
        inducing_points=X,
    )


def test_streams(tmp_path: Path) -> None:
    """In any order; forgotten, saved, conditioned; beside comparisons and ratings."""
    X, given = survey()
    choices, ratings = given["choices"], given["ratings"]
    whole = mixed([[0, 1], [8, 7]], choices, ratings)
    mean, variance = whole.posterior(X).mean, whole.posterior(X).variance

    def assert_same(model: PreferenceGP) -> None:
        torch.testing.assert_close(model.posterior(X).mean, mean, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(model.posterior(X).variance, variance, rtol=1e-5, atol=1e-6)

    model = mixed([[0, 1]], None, None)
    options: dict[str, Any] = {"learn": False, "memory": EVERYTHING, "inducing": "fixed"}
    swapped = choices[2:].clone()
    swapped[:, 1:3] = swapped[:, 1:3].flip(-1)  # the order of losers means nothing
    model.update(X, torch.tensor([[8, 7]]), choices=swapped, **options)
    model.update(X, torch.empty(0, 2), choices=choices[:2], ratings=ratings, **options)
    assert_same(model)
    held = model.datapoints
    assert len(model.comparisons) == 2
    assert model.choices.shape == (4, 4)
    assert int((model.choices < 0).sum()) == 3
    torch.testing.assert_close(held[model.choices[:, 0]], X[[5, 2, 4, 2]])
    seqgp.save(model, tmp_path / "model.pt")
    loaded = seqgp.load(tmp_path / "model.pt")
    assert isinstance(loaded, PreferenceGP)
    assert_same(loaded)
    # On top of what is known, sites that are there already stay; here nothing is.
    given.update(choices=choices.flip(0))
    pairs = torch.tensor([[0, 1], [8, 7]])
    assert_same(mixed([], None, None).condition_on_observations(X, pairs, **given))
    more = torch.tensor([[2, 3, 8], [4, 1, 0]])  # the latter is one of those that were learnt
    loaded.update(X, torch.empty(0, 2), choices=more, **options)
    loaded.forget(X, torch.empty(0, 2), choices=more.flip(0))
    assert_same(loaded)
    whole.forget(X, torch.tensor([[8, 7]]), choices=choices[1:])
    model = mixed([[0, 1]], choices[:1], ratings)
    torch.testing.assert_close(whole.posterior(X).mean, model.posterior(X).mean)


def test_leverage_is_that_of_answers() -> None:
    X, given = survey()
    model = mixed([[0, 1]], given["choices"], None)
    scores = model.leverage(X, torch.tensor([[0, 1]]), choices=given["choices"])
    assert scores.shape == (5,)
    for i, choice in enumerate(given["choices"]):
        alone = model.leverage(X, torch.empty(0, 2), choices=choice.unsqueeze(0))
        torch.testing.assert_close(alone, scores[i + 1 : i + 2])


@pytest.mark.parametrize("policy", ["leverage", "random", "recent"])
def test_memory_keeps_choices_whole(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory is one of answers; what leaves it is folded, and nothing is lost."""
    X, given = survey()
    monkeypatch.setattr(strategy, "CHUNK_ELEMENTS", 40)  # four observations at a time
    model = mixed([[0, 1]], given["choices"][:2], None)
    before = model.num_data
    options = MemoryOptions(capacity=3, policy=policy, replay=0.0)
    model.update(
        X,
        torch.tensor([[8, 7], [3, 6]]),
        choices=given["choices"][2:],
        memory=options,
        learn=False,
        inducing="fixed",
    )
    assert before == 1 + 3 + 6
    first = model.stream.observations.first_parts
    assert first is not None
    assert len(first.unique()) == 3
    assert len(model.choices) + len(model.comparisons) == 3
    monkeypatch.undo()
    whole = mixed([[0, 1], [8, 7], [3, 6]], given["choices"], None)
    torch.testing.assert_close(model.posterior(X).mean, whole.posterior(X).mean, atol=1e-5, rtol=0)
    represents = model.stream.represents
    torch.testing.assert_close(represents, represents[first])


def test_learning() -> None:
    """Hyperparameters are learnt along a stream of choices, by default."""
    torch.manual_seed(3)
    X = torch.rand(40, 2)
    utility = 3 * torch.sin(4 * X).sum(-1)
    among = torch.stack([torch.randperm(40)[:4] for _ in range(40)])
    seen = utility[among] - (-torch.rand(40, 4).log()).log()  # with Gumbel noise
    choices = among.gather(-1, seen.argsort(-1, descending=True))
    model = PreferenceGP(X, choices=choices[:10])
    assert isinstance(model.likelihood, ChoiceLikelihood)
    record = model.update(X, torch.empty(0, 2), choices=choices[10:])
    assert record.steps > 0
    mean = model.posterior(X).mean.detach().squeeze(-1)
    assert float(torch.stack([mean, utility]).corrcoef()[0, 1]) > 0.9
    logit = PreferenceGP(X, None, PairwiseLogitLikelihood(), choices=choices[:3])
    assert isinstance(logit.likelihood, ChoiceLikelihood)


# ------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        (torch.tensor([0, 1, 2]), "choices: expected shape n x k"),
        (torch.tensor([[0], [1]]), "choices: expected shape n x k"),
        (torch.tensor([[0, 1, 3]]), "from 0 to 2, or -1 for none, got 3"),
        (torch.tensor([[0, 1, -2]]), "got -2"),
        (torch.tensor([[0, -1, 1]]), "-1 only at the end of a row"),
        (torch.tensor([[0, -1, -1]]), "at least two items in each row"),
        (torch.tensor([[0, 1, 2], [0, 1, 1]]), "each item once in a choice, .* in row 1"),
        (torch.tensor([[0.5, 1.0]]), "choices: expected indices of items, which are whole"),
        (torch.tensor([[0.0, math.nan]]), "choices"),
    ],
)
def test_bad_choices(choices: Tensor, message: str) -> None:
    model, X = make(), torch.tensor(ITEMS)
    before = model.posterior(X).mean
    for method in (model.update, model.forget, model.condition_on_observations):
        with pytest.raises(ValueError, match=message):
            method(X, torch.empty(0, 2), choices=choices)
    assert torch.equal(model.posterior(X).mean, before)


def test_models_without_choices() -> None:
    X, choices = torch.tensor(ITEMS), torch.tensor(CHOICES)
    plain = PreferenceGP(X, torch.tensor([[0, 1]]), covar_module=make_kernel())
    with pytest.raises(ValueError, match="choices: not supported by a BernoulliLikelihood; build"):
        plain.update(X, torch.empty(0, 2), choices=choices)
    with pytest.raises(ValueError, match="choices: not supported by a TieLikelihood"):
        PreferenceGP(X, None, TieLikelihood(), choices=choices)
    with pytest.raises(ValueError, match="choices: not supported for a batch"):
        PreferenceGP(X.expand(2, 3, 1), choices=choices)
    assert plain.choices.shape == (0, 2)

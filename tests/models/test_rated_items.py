"""Ratings beside comparisons: against integration, an exact GP, and themselves."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from botorch.fit import fit_gpytorch_mll
from botorch.sampling import SobolQMCNormalSampler
from torch import Tensor

import seqgp
from seqgp import DualELBO, OrdinalLikelihood, PreferenceGP, RatingLikelihood
from seqgp.acquisition import InformationAboutBest
from seqgp.likelihoods import expectations, log_predictive
from tests.helpers import make_kernel

pytestmark = pytest.mark.usefixtures("float64")
NAN = math.nan
ITEMS = [[0.1], [0.5], [0.8]]
PAIRS = [[0, 1], [1, 2], [0, 2], [2, 1]]
RATINGS = [3.0, NAN, 7.0]


def rating_likelihood() -> RatingLikelihood:
    return RatingLikelihood(scale=2.0, level=2.5, noise=0.3)


def make(ratings: list[float] | None = None, pairs: list[list[int]] = PAIRS) -> PreferenceGP:
    return PreferenceGP(
        torch.tensor(ITEMS),
        torch.tensor(pairs).reshape(-1, 2),
        covar_module=make_kernel(),
        inducing_points=torch.tensor(ITEMS),
        ratings=None if ratings is None else torch.tensor(ratings),
        rating_likelihood=rating_likelihood(),
    )


def test_likelihood() -> None:
    """Against integration over the utility, and derivatives of that."""
    likelihood, y = rating_likelihood(), torch.tensor([3.0, 8.0])
    mean = torch.tensor([0.2, -0.4], requires_grad=True)
    variance = torch.tensor([0.5, 2.0], requires_grad=True)
    z = torch.linspace(-9, 9, 4001).unsqueeze(-1)
    weights = (-0.5 * z.square()).exp()
    weights = weights / weights.sum()
    log_prob = likelihood(mean + variance.sqrt() * z).log_prob(y)
    expected = (weights * log_prob).sum(0)
    slope, curvature = torch.autograd.grad(expected.sum(), (mean, variance), retain_graph=True)
    ours = expectations(likelihood, y, mean, variance)
    torch.testing.assert_close(ours.log_prob, expected, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(ours.alpha, slope, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(ours.beta, -2 * curvature, rtol=1e-6, atol=1e-6)
    density = (weights * log_prob.exp()).sum(0).log()
    torch.testing.assert_close(log_predictive(likelihood, y, mean, variance), density)


def test_ratings_alone_are_an_exact_gp() -> None:
    model, X = make([3.0, 4.5, 7.0], []), torch.tensor(ITEMS)
    test = torch.rand(5, 1)
    K = model.covar_module(torch.cat([X, test])).to_dense().detach()
    A = torch.linalg.solve(K[:3, :3] + 0.3 * torch.eye(3), K[:3, 3:])
    centred = torch.tensor([3.0, 4.5, 7.0]) / 2 - 2.5
    posterior = model.posterior(test)
    torch.testing.assert_close(posterior.mean.squeeze(-1), A.mT @ centred, rtol=1e-6, atol=1e-6)
    covariance = K[3:, 3:] - K[3:, :3] @ A
    torch.testing.assert_close(
        posterior.distribution.covariance_matrix, covariance, rtol=1e-6, atol=1e-6
    )
    predicted = model.predicted_ratings(test)
    variance = 4 * (covariance.diagonal() + 0.3)
    torch.testing.assert_close(predicted.mean, 2 * (posterior.mean + 2.5))
    torch.testing.assert_close(predicted.variance.squeeze(-1), variance, rtol=1e-6, atol=1e-6)


def grid(K: Tensor) -> tuple[Tensor, Tensor, float]:
    """Three utilities on a grid, their log prior density, and a cell's log volume."""
    axis = torch.linspace(-6, 6, 121)
    f = torch.stack(torch.meshgrid(axis, axis, axis, indexing="ij"), -1)
    prior = torch.distributions.MultivariateNormal(torch.zeros(3), K)
    return f, prior.log_prob(f), 3 * math.log(float(axis[1] - axis[0]))


@pytest.mark.parametrize("kind", ["numbers", "grades"])
def test_brute_force(kind: str) -> None:
    """Both kinds of answers in one model."""
    X = torch.tensor(ITEMS)
    rating: RatingLikelihood | OrdinalLikelihood = rating_likelihood()
    values = torch.tensor(RATINGS)
    if kind == "grades":
        rating = OrdinalLikelihood(3, cutpoints=torch.tensor([-0.5, 0.7]))
        values = torch.tensor([0.0, NAN, 2.0])
    model = PreferenceGP(
        X,
        torch.tensor(PAIRS),
        covar_module=make_kernel(),
        ratings=values,
        rating_likelihood=rating,
    )
    f, log_prior, volume = grid(model.covar_module(X).to_dense().detach())
    Y = torch.tensor(PAIRS)
    log_joint = log_prior + torch.special.log_ndtr(
        (f[..., Y[:, 0]] - f[..., Y[:, 1]]) * math.sqrt(0.5)
    ).sum(-1)
    for i in (0, 2):
        log_joint = log_joint + rating(f[..., i]).log_prob(values[i]).detach()
    log_evidence = log_joint.flatten().logsumexp(0) + volume
    # The bound is below the evidence; how far is the nature of the Gaussian, not of the arithmetic.
    assert log_evidence - 0.02 < float(model.refresh()) < log_evidence
    p = log_joint.flatten().softmax(0).reshape(log_joint.shape)
    exact = (p.unsqueeze(-1) * f).sum((0, 1, 2))
    spread = (p.unsqueeze(-1) * (f - exact).square()).sum((0, 1, 2))
    posterior = model.posterior(X)
    torch.testing.assert_close(posterior.mean.squeeze(-1), exact, rtol=0, atol=0.015)
    torch.testing.assert_close(posterior.variance.squeeze(-1), spread, rtol=0.05, atol=0)
    assert float(p[0].sum() + p[:, 0].sum() + p[..., 0].sum()) < 1e-6  # the grid is wide enough


def test_streams(tmp_path: Path) -> None:
    """In any order; forgotten, saved, conditioned, and of which fantasies are possible."""
    X, Y, values = torch.tensor(ITEMS), torch.tensor(PAIRS), torch.tensor(RATINGS)
    whole, model = make(RATINGS), make(None, PAIRS[:1])
    model.update(X, Y[:0], ratings=values, learn=False)
    model.update(X, Y[1:], learn=False)
    torch.testing.assert_close(
        model.posterior(X).mean, whole.posterior(X).mean, rtol=1e-6, atol=1e-7
    )
    rows, numbers = model.ratings
    assert torch.equal(model.datapoints[rows], X[[0, 2]])
    assert numbers.tolist() == [3.0, 7.0]
    assert torch.equal(model.datapoints[model.comparisons], X[Y])
    assert not bool(model.ties.any())
    seqgp.save(model, tmp_path / "model.pt")
    again = seqgp.load(tmp_path / "model.pt")
    assert torch.equal(again.posterior(X).mean, model.posterior(X).mean)
    assert torch.equal(again.predicted_ratings(X).mean, model.predicted_ratings(X).mean)
    model.forget(X, Y[:0], ratings=values)
    torch.testing.assert_close(
        model.posterior(X).mean, make().posterior(X).mean, rtol=1e-6, atol=1e-7
    )
    # Given the sites of the comparisons, ratings are Gaussian observations.
    before = model.posterior(X).distribution
    conditioned = model.condition_on_observations(X, Y[:0], ratings=values)
    S, rated = before.covariance_matrix, [0, 2]
    A = torch.linalg.solve(S[rated][:, rated] + 0.3 * torch.eye(2), S[rated])
    expected = before.mean + A.mT @ (values[rated] / 2 - 2.5 - before.mean[rated])
    torch.testing.assert_close(
        conditioned.posterior(X).mean.squeeze(-1), expected, rtol=1e-6, atol=1e-6
    )
    means = whole.fantasize(X[:2], SobolQMCNormalSampler(torch.Size([32]), seed=0))
    assert len(means.posterior(X).mean.squeeze(-1).mul(1e6).round().unique(dim=0)) == 2
    assert float(InformationAboutBest(whole, X)(X[:2].unsqueeze(0)).detach()) > 0
    assert len(whole.leverage(X, Y, ratings=values)) == 6
    torch.testing.assert_close(
        whole.answers(X[:2]).mean + whole.answers(X[[1, 0]]).mean, torch.ones(1, 1)
    )
    whole.set_train_data(X, Y[:1], ratings=values)
    assert len(whole.ratings[0]) == 2


def test_fantasies_of_several_duels() -> None:
    model = make(RATINGS)
    sampler = SobolQMCNormalSampler(torch.Size([4]))
    fantasies = model.fantasize(torch.rand(3, 2, 1), sampler)
    assert fantasies.posterior(torch.tensor(ITEMS)).mean.shape == (4, 3, 3, 1)


def test_the_scale_is_learnt() -> None:
    """From ratings of 0 to 100 and comparisons, of which ratings alone would know less."""
    torch.manual_seed(0)
    X = torch.rand(60, 1)
    f = 3 * torch.sin(5 * X).squeeze(-1)
    ratings = 50 + 12 * (f + 0.3 * torch.randn(60))
    ratings[10:] = NAN
    pairs = torch.arange(60).reshape(30, 2)
    noisy = f + torch.randn(60)
    better = noisy[pairs[:, :1]] > noisy[pairs[:, 1:]]
    model = PreferenceGP(
        X, torch.where(better, pairs, pairs.flip(-1)), ratings=ratings, inducing_points=20
    )
    fit_gpytorch_mll(DualELBO(model.likelihood, model))
    mean = model.predicted_ratings(X).mean.detach().squeeze(-1)
    assert float((mean - 50 - 12 * f).square().mean().sqrt()) < 8  # of a range of 72


def test_bad_ratings() -> None:
    X, Y, values = torch.tensor(ITEMS), torch.tensor(PAIRS), torch.tensor(RATINGS)
    plain = PreferenceGP(X, Y, covar_module=make_kernel())
    with pytest.raises(ValueError, match="ratings: this model has no likelihood"):
        plain.update(X, Y, ratings=values)
    with pytest.raises(RuntimeError, match="no likelihood of ratings; build it with"):
        plain.predicted_ratings(X)
    model = make(RATINGS)
    before = model.posterior(X).mean
    for bad, message in (
        (values[:2], "expected 3 numbers, one for each item"),
        (values / 0, "expected finite numbers, or NaN"),
    ):
        for method in (model.update, model.forget, model.condition_on_observations):
            with pytest.raises(ValueError, match=f"ratings: {message}"):
                method(X, Y, ratings=bad)
    assert torch.equal(model.posterior(X).mean, before)
    with pytest.raises(ValueError, match="ratings: not supported for a batch"):
        PreferenceGP(X.expand(2, 3, 1), Y.expand(2, 4, 2), ratings=values)
    with pytest.raises(ValueError, match="Y: "):
        PreferenceGP(X, Y, rating_likelihood=OrdinalLikelihood(3), ratings=values)
    for options in ({"scale": 0.0}, {"noise": -1.0}, {"scale": NAN}):
        with pytest.raises(ValueError, match="must be finite and positive"):
            RatingLikelihood(**options)
    with pytest.raises(ValueError, match="`level` must be finite"):
        RatingLikelihood(level=NAN)

"""Ties, against brute-force integration and symmetry."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from botorch.fit import fit_gpytorch_mll
from botorch.sampling import SobolQMCNormalSampler
from torch import Tensor

import seqgp
from seqgp import PreferenceGP, TieLikelihood
from seqgp.acquisition import InformationAboutBest
from tests.helpers import make_kernel

pytestmark = pytest.mark.usefixtures("float64")
links = pytest.mark.parametrize("link", ["probit", "logit"])
ITEMS = [[0.1], [0.5], [0.8]]
PAIRS = [[0, 1], [1, 2], [0, 2], [2, 1]]
TIES = [False, True, False, True]


def make(link: str = "probit", width: float = 0.4) -> PreferenceGP:
    return PreferenceGP(
        torch.tensor(ITEMS),
        torch.tensor(PAIRS),
        TieLikelihood(link, width),
        make_kernel(),
        ties=torch.tensor(TIES),
    )


def cdf(link: str, x: Tensor) -> Tensor:
    return torch.special.ndtr(x) if link == "probit" else x.sigmoid()


def grid(K: Tensor) -> tuple[Tensor, Tensor, float]:
    """Two differences of three utilities on a grid, their log prior density, and a cell's log area.

    The differences are f0 - f1 and f1 - f2.
    """
    D = torch.tensor([[1.0, -1.0, 0.0], [0.0, 1.0, -1.0]])
    prior = torch.distributions.MultivariateNormal(torch.zeros(2), D @ K @ D.mT)
    axis = torch.linspace(-9, 9, 721)
    h = torch.stack(torch.meshgrid(axis, axis, indexing="ij"), -1)
    return h, prior.log_prob(h), 2 * math.log(float(axis[1] - axis[0]))


@links
def test_brute_force(link: str) -> None:
    model, w = make(link), 0.4
    K = model.covar_module(torch.tensor(ITEMS)).to_dense().detach()
    h, log_prior, area = grid(K)
    scale = math.sqrt(0.5) if link == "probit" else 1.0
    a, b = scale * h[..., 0], scale * h[..., 1]
    tie = cdf(link, w - b) - cdf(link, -w - b)  # of items 1 and 2, in either order
    log_joint = (cdf(link, a - w) * cdf(link, a + b - w) * tie.square()).log() + log_prior
    log_evidence = log_joint.flatten().logsumexp(0) + area
    # The bound is below the evidence; how far is the nature of the Gaussian, not of the arithmetic.
    assert log_evidence - 0.01 < float(model.refresh()) < log_evidence
    p = log_joint.flatten().softmax(0).reshape(a.shape).unsqueeze(-1)
    exact = (p * h).sum((0, 1))
    f = model.posterior(torch.tensor(ITEMS)).mean.squeeze(-1)
    torch.testing.assert_close(f[:2] - f[1:], exact, rtol=0, atol=0.01)
    # Predictions of a tie, of a win and of a loss, by integration of the exact posterior.
    density = model.log_predictive_density(
        torch.tensor(ITEMS),
        torch.tensor([[0, 1], [0, 1], [1, 0]]),
        torch.tensor([True, False, False]),
    )
    outcomes = [cdf(link, w - a) - cdf(link, -w - a), cdf(link, a - w), cdf(link, -a - w)]
    expected = torch.stack([(p.squeeze(-1) * each).sum() for each in outcomes])
    torch.testing.assert_close(density.exp(), expected, rtol=0, atol=3e-3)
    torch.testing.assert_close(density.exp().sum(), torch.tensor(1.0), rtol=1e-8, atol=0)


@links
def test_antisymmetry(link: str) -> None:
    """Ties have no order, and utilities change their sign if all other answers do."""
    X, Y, ties = torch.tensor(ITEMS), torch.tensor(PAIRS), torch.tensor(TIES)
    mean = make(link).posterior(X).mean
    for pairs, expected in (
        (torch.where(ties.unsqueeze(-1), Y.flip(-1), Y), mean),
        (Y.flip(-1), -mean),
    ):
        model = PreferenceGP(X, pairs, TieLikelihood(link, 0.4), make_kernel(), ties=ties)
        torch.testing.assert_close(model.posterior(X).mean, expected, rtol=1e-6, atol=1e-8)


def test_narrow_ties_never_happen() -> None:
    """Without ties, and with a width of nearly zero, it is the probit."""
    X, Y = torch.tensor(ITEMS), torch.tensor(PAIRS)
    plain = PreferenceGP(X, Y, covar_module=make_kernel())
    model = PreferenceGP(X, Y, TieLikelihood(width=1e-9), make_kernel())
    torch.testing.assert_close(
        model.posterior(X).mean, plain.posterior(X).mean, rtol=1e-6, atol=1e-7
    )


def test_streams_of_ties(tmp_path: Path) -> None:
    X, Y, ties = torch.tensor(ITEMS), torch.tensor(PAIRS), torch.tensor(TIES)
    whole, model = make(), make()
    model.forget(X, Y[2:], ties=ties[2:])
    assert model.ties.tolist() == TIES[:2]
    model.update(X, Y[2:], ties=ties[2:], learn=False, inducing="fixed")
    torch.testing.assert_close(
        model.posterior(X).mean, whole.posterior(X).mean, rtol=1e-6, atol=1e-7
    )
    assert model.ties.tolist() == TIES
    seqgp.save(model, tmp_path / "model.pt")
    again = seqgp.load(tmp_path / "model.pt")
    assert torch.equal(again.likelihood.width, model.likelihood.width)
    assert torch.equal(again.posterior(X).mean, model.posterior(X).mean)
    tied = model.condition_on_observations(X, Y[:1], ties=torch.tensor([True])).posterior(X).mean
    won = model.condition_on_observations(X, Y[:1]).posterior(X).mean
    assert (tied[0] - tied[1]).abs() < (won[0] - won[1]).abs()
    sampler = SobolQMCNormalSampler(torch.Size([64]), seed=0)
    means = model.fantasize(X[:2], sampler).posterior(X).mean.squeeze(-1)
    assert len(means.mul(1e6).round().unique(dim=0)) == 3  # lost, tied and won


def test_information() -> None:
    """Of all answers, against a sum over utilities that are sampled."""
    model = make()
    X = torch.tensor(ITEMS)
    value = InformationAboutBest(model, X, 2048)(X[:2].unsqueeze(0)).detach()
    torch.manual_seed(0)
    f = model.posterior(X).rsample(torch.Size([200_000])).squeeze(-1).detach()
    p = model.likelihood((f[:, 0] - f[:, 1]) * math.sqrt(0.5)).probs.detach()
    best = torch.nn.functional.one_hot(f.argmax(-1), 3).to(p)

    def entropy(q: Tensor) -> Tensor:
        return -(q * q.log()).sum(-1)

    given = (best.mT @ p) / best.sum(0).unsqueeze(-1)
    expected = entropy(p.mean(0)) - (best.mean(0) * entropy(given)).sum()
    torch.testing.assert_close(value.squeeze(), expected, rtol=0, atol=2e-3)  # of samples


def test_the_width_is_learnt() -> None:
    """Where half of all answers of a noisy person are ties, it is larger than where few are."""
    torch.manual_seed(0)
    X = torch.rand(160, 1)
    pairs = torch.arange(160).reshape(80, 2)
    h = 3 * (X[pairs[:, 0]] - X[pairs[:, 1]]).squeeze(-1) + torch.randn(80)
    pairs = torch.where((h > 0).unsqueeze(-1), pairs, pairs.flip(-1))
    widths = []
    for limit in (0.2, 1.2):
        model = PreferenceGP(X, pairs, ties=h.abs() < limit, inducing_points=10)
        fit_gpytorch_mll(seqgp.DualELBO(model.likelihood, model))
        widths.append(float(model.likelihood.width.detach()))
    assert widths[1] > 3 * widths[0]


@links
def test_gradient_of_the_width(link: str) -> None:
    model = make(link)

    def bound() -> Tensor:
        return model.bound(tol=1e-12)[0]

    parameter, step = model.likelihood.raw_gaps, 1e-5
    (gradient,) = torch.autograd.grad(bound(), parameter)
    values = []
    for sign in (1, -1):
        with torch.no_grad():
            parameter += sign * step
            values.append(bound())
            parameter -= sign * step
    expected = (values[0] - values[1]) / (2 * step)
    torch.testing.assert_close(gradient.squeeze(), expected, rtol=1e-6, atol=1e-8)


# ------------------------------------------------------------------------------- errors


def test_bad_ties() -> None:
    X, Y, ties = torch.tensor(ITEMS), torch.tensor(PAIRS), torch.tensor(TIES)
    plain = PreferenceGP(X, Y, covar_module=make_kernel())
    before = plain.posterior(X).mean
    for method in (plain.update, plain.forget, plain.condition_on_observations):
        with pytest.raises(
            ValueError, match="ties: not supported by a BernoulliLikelihood; build the model with"
        ):
            method(X, Y, ties=ties)
    assert torch.equal(plain.posterior(X).mean, before)
    assert not bool(plain.ties.any())
    with pytest.raises(ValueError, match="ties: expected 4 booleans, one for each comparison"):
        make().update(X, Y, ties=ties[:2])
    with pytest.raises(ValueError, match="ties: expected 4 booleans"):
        make().update(X, Y, ties=ties.double())
    for width in (0.0, -1.0, math.nan):
        with pytest.raises(ValueError, match="`width` must be finite and positive"):
            TieLikelihood(width=width)

"""The rivals are what their papers say they are."""

from __future__ import annotations

import math

import pytest
import torch
from gpytorch.means import ZeroMean
from scipy import optimize
from torch import Tensor

from benchmarks.baselines import lookahead
from benchmarks.baselines.bui import JITTER, Bui
from benchmarks.streams import Stream, fold_of, score
from seqgp import BinomialLikelihood, SequentialGP
from seqgp.acquisition import expected_reduction, hotspots
from tests.helpers import assert_close, latent, make_inputs, make_kernel

pytestmark = pytest.mark.usefixtures("float64")


def stream(regression: bool = True, num_pieces: int = 3) -> Stream:
    x = make_inputs(30, 2)
    y = latent(x) + 0.2 * torch.sin(40 * x.sum(-1))
    y = (y if regression else (y > y.median()).double()).unsqueeze(-1)
    size = len(x) // num_pieces
    pieces = list(zip(x.split(size), y.split(size), strict=True))
    return Stream(pieces, (make_inputs(9, 2), torch.zeros(9, 1)), make_inputs(5, 2), regression)


def dense(model: Bui, x: Tensor) -> tuple[Tensor, Tensor]:
    """``Kzz`` with the baseline's jitter, and ``Kzx``."""
    K = model.kernel(model.Z).to_dense() + JITTER * torch.eye(len(model.Z))
    return K, model.kernel(model.Z, x).to_dense()


def test_bui_on_the_first_piece_is_titsias_bound() -> None:
    data = stream()
    model, (x, y) = Bui(data), data.pieces[0]
    K, k = dense(model, x)
    Q = k.mT @ torch.linalg.solve(K, k)
    noise = model.likelihood.noise
    normal = torch.distributions.MultivariateNormal(
        torch.zeros(len(x)), Q + noise * torch.eye(len(x))
    )
    trace = (model.kernel(x, diag=True) - Q.diagonal()).sum()
    expected = normal.log_prob(y.squeeze(-1)) - 0.5 * trace / noise
    assert_close(model.bound(x, y.squeeze(-1)), expected.squeeze(), 1e-8)


@torch.no_grad()
def test_bui_at_fixed_hyperparameters_is_batch_learning() -> None:
    """Three pieces, no step of L-BFGS: the posterior of all data at once."""
    data = stream()
    model = Bui(data)
    for x, y in data.pieces:
        model._keep(x, y.squeeze(-1))
    x, y = data.everything
    batch = SequentialGP(
        x,
        y,
        likelihood=data.likelihood(),
        covar_module=data.kernel(),
        mean_module=ZeroMean(),
        inducing_points=data.Z,
    )
    test = data.test[0]
    mean, variance, _ = model.predict(test)
    # Only as close as the baseline's jitter allows.
    assert_close(mean, batch(test).mean, 1e-4)
    assert_close(variance, batch(test).variance, 1e-4)


def test_bui_bound_of_a_later_piece() -> None:
    """By the paper's own formula, with ``D_a``, ``S_a`` and all constants (Bui et al., eq. 8).

    With as many new inducing points, elsewhere, and other hyperparameters; values of the bound are
    compared as differences, which rids them of the constant that we leave out.
    """
    data = stream()
    model = Bui(data)
    (x0, y0), (x, y) = data.pieces[:2]
    with torch.no_grad():
        model._keep(x0, y0.squeeze(-1))
        old_K = dense(model, x0)[0]
    # q(a) from what is kept: S_a^-1 = K^-1 + H, m_a = S_a e
    S = torch.linalg.inv(torch.linalg.inv(old_K) + model.H)
    m_a, D = S @ model.e, torch.linalg.inv(model.H)

    def by_the_book() -> Tensor:
        K, k = dense(model, x)
        cross = model.kernel(model.Z, model.old_Z).to_dense()
        noise = model.likelihood.noise
        features = torch.cat([k, cross], -1)
        Sigma = torch.block_diag(noise * torch.eye(len(x)), D)
        pseudo = torch.cat([y.squeeze(-1), D @ torch.linalg.solve(S, m_a)])
        covariance = features.mT @ torch.linalg.solve(K, features) + Sigma
        covariance = 0.5 * (covariance + covariance.mT)
        log_evidence = torch.distributions.MultivariateNormal(
            torch.zeros(len(pseudo)), covariance
        ).log_prob(pseudo)
        Q = (k * torch.linalg.solve(K, k)).sum(0)
        Q_a = model.kernel(model.old_Z).to_dense() - cross.mT @ torch.linalg.solve(K, cross)
        trace = (model.kernel(x, diag=True) - Q).sum() / noise
        return (log_evidence - 0.5 * trace - 0.5 * (model.H * Q_a).sum()).squeeze()

    with torch.no_grad():
        values = []
        for step in range(3):
            model.Z += 0.05 * step
            model.kernel.outputscale = 1.0 + 0.3 * step
            model.likelihood.noise = 0.1 + 0.1 * step
            values.append((model.bound(x, y.squeeze(-1)), by_the_book()))
    ours, book = map(torch.stack, zip(*values, strict=True))
    assert_close(ours.diff(), book.diff(), 1e-5)  # D_a is ill-conditioned


def test_bui_classification_bound_is_maximised() -> None:
    """On one piece at fixed hyperparameters, by L-BFGS over q: our converged bound."""
    data = stream(regression=False, num_pieces=1)
    model, (x, y) = Bui(data), data.pieces[0]
    optimizer = torch.optim.LBFGS(
        [model.mean, model.root], max_iter=300, tolerance_grad=1e-9, line_search_fn="strong_wolfe"
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = -model.bound(x, y.squeeze(-1))
        loss.backward()
        return loss

    optimizer.step(closure)
    batch = SequentialGP(
        x,
        y,
        likelihood=data.likelihood(),
        covar_module=data.kernel(),
        mean_module=ZeroMean(),
        inducing_points=data.Z,
    )
    assert_close(model.bound(x, y.squeeze(-1)), batch.bound()[0], 1e-4)
    model._keep(x, y.squeeze(-1))
    assert_close(model.predict(x).mean, batch(x).mean, 1e-3)
    assert_close(model.predict(x).variance, batch(x).variance, 1e-3)


@pytest.mark.parametrize("regression", [True, False])
def test_bui_learns(regression: bool) -> None:
    data = stream(regression)
    model = Bui(data, iterations=20)
    before = float(model.bound(data.pieces[0][0], data.pieces[0][1].squeeze(-1)))
    for x, y in data.pieces[:2]:
        model.learn(x, y.squeeze(-1))
    assert math.isfinite(before)
    result = score(data, model.predict)
    assert all(map(math.isfinite, result.values()))


def test_folds_are_a_partition() -> None:
    names = {"made_regression": True, "made_classes": False}
    for name, regression in names.items():
        seen = []
        for fold in range(10):
            data = fold_of(name, regression, fold, 4, "sorted", m=10)
            assert len(data.pieces) == 4
            inputs, _ = data.everything
            assert len(inputs) + len(data.test[0]) == 300
            assert (inputs[:, 0].diff() >= 0).all()
            seen.append(data.test[0])
        assert len(torch.cat(seen).unique(dim=0)) == 300
    shuffled = fold_of("made_classes", False, 0, 4, "shuffled", m=10)
    assert not (shuffled.everything[0][:, 0].diff() >= 0).all()
    assert set(shuffled.everything[1].unique().tolist()) == {0.0, 1.0}


# -------------------------------------------------------------------- the rivals' conditioning


def counts_model(inducing_points: int = 6) -> SequentialGP:
    x = make_inputs(12, 2)
    y = (10 * torch.sigmoid(latent(x))).round().unsqueeze(-1)
    return SequentialGP(
        x,
        y,
        likelihood=BinomialLikelihood(20),
        covar_module=make_kernel(),
        inducing_points=inducing_points,
    )


@torch.no_grad()
def test_paper_look_ahead_is_fixed_inducing_conditioning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hotspots, "TOLERANCE", 1e-9)
    model, X, sites = counts_model(), make_inputs(3, 2), make_inputs(7, 2)
    Y = torch.tensor([[0.0, 4.0, 20.0], [11.0, 1.0, 3.0]])
    at, explained = lookahead.fixed_inducing(model, hotspots._marginals(model, X, sites), X, sites)
    gain, fall = lookahead.fixed_inducing_gains(model.likelihood, Y, at, explained, 20)
    c = at.cross(slice(None))
    for i in range(3):
        for k in range(2):
            posterior = model.condition_on_observations(
                X[i : i + 1], Y[k, i].reshape(1, 1), fixed_inducing=True, tol=1e-10, max_steps=500
            ).posterior(sites)
            assert_close(at.site_mean + gain[k, i] * c[i], posterior.mean.squeeze(-1))
            variance = at.site_variance - fall[k, i] * c[i].square()
            assert_close(variance, posterior.variance.squeeze(-1))


@torch.no_grad()
def test_ovc_look_ahead_is_a_gp_given_the_pseudo_target() -> None:
    """Laplace's mode by bisection, and dense Gaussian conditioning on the pseudo-target."""
    model, X, sites = counts_model(), make_inputs(3, 2), make_inputs(7, 2)
    Y = torch.tensor([[0.0, 4.0, 20.0], [11.0, 1.0, 3.0]])
    at = hotspots._marginals(model, X, sites)
    gain, fall = lookahead.newton_pseudo_targets(Y, at.mean, at.variance, 20)
    joint = model(torch.cat([X, sites])).covariance_matrix
    for i in range(3):
        m, v, c = float(at.mean[i]), float(at.variance[i]), joint[i, 3:]
        for k in range(2):
            y = float(Y[k, i])
            f = optimize.brentq(
                lambda f, y=y, m=m, v=v: y - 20 / (1 + math.exp(-f)) - (f - m) / v, -30, 30
            )
            p = 1 / (1 + math.exp(-f))
            noise = 1 / (20 * p * (1 - p))
            target = f + (y - 20 * p) * noise
            assert_close(
                at.site_mean + gain[k, i] * c, at.site_mean + c * (target - m) / (v + noise)
            )
            assert_close(fall[k, i] * c.square(), c.square() / (v + noise))


@torch.no_grad()
def test_joint_samples_estimate_the_same_scores() -> None:
    model, X, sites = counts_model(12), make_inputs(3, 2), make_inputs(7, 2)
    left = lookahead.joint_sample_reduction(model, X, sites, 0.4, 20, 64, num_samples=2000)
    scores = expected_reduction(model, X, sites, threshold=0.4, num_fantasies=64)
    # Both up to the present entropy, and to the error of 64 outcomes.
    assert_close(scores - scores.mean(), left - left.mean(), 0.01)
    for way in ("paper", "ovc"):
        rival = lookahead.rival_reduction(way, model, X, sites, 0.4, 20, 64)
        # With an inducing point at every input the two hardly differ from ours.
        assert_close(rival, scores, 0.02)

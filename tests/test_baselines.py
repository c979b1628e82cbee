"""The rivals are what their papers say they are."""

from __future__ import annotations

import math

import pytest
import torch
from gpytorch.means import ZeroMean
from torch import Tensor

from benchmarks.baselines.bui import JITTER, Bui
from benchmarks.streams import Stream, fold_of, score
from seqgp import SequentialGP
from tests.helpers import assert_close, latent, make_inputs

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

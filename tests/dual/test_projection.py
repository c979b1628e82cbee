from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from seqgp.dual import Duals, project, recentre, transport_matrix
from seqgp.dual.projection import coincident
from tests.helpers import (
    GP,
    assert_close,
    assert_same_posterior,
    dense_prior,
    make_inputs,
    problem,
)

pytestmark = pytest.mark.usefixtures("float64")

some_likelihoods = pytest.mark.parametrize("name", ["gaussian", "bernoulli", "softmax"])


def change_hyperparameters(model: GP, factor: float = 1.7) -> None:
    model.covar_module.outputscale = factor * model.covar_module.outputscale.detach()
    kernel = model.covar_module.base_kernel
    kernel.lengthscale = kernel.lengthscale.detach() / factor
    model.mean_module.constant.data += 0.2


def moved_duals(model: GP, before: tuple[Tensor, ...], Z: Tensor) -> Duals:
    """Section 3 of the design: ``lam' = K' e``, ``B' = K' H K'``, dense and unwhitened.

    ``e`` is that of the function values minus the prior mean, which may have moved too.
    """
    K, mean, lam, B = before
    now = dense_prior(model, Z, model.variational_strategy.reference_points)
    H = torch.linalg.solve(K, torch.linalg.solve(K, B).mT)
    e = torch.linalg.solve(K, lam.unsqueeze(-1)) + H @ (mean - now.mean_x).unsqueeze(-1)
    return Duals((now.zx @ e).squeeze(-1), now.zx @ H @ now.zx.mT)


@torch.no_grad()
def kernel_basis(model: GP) -> tuple[Tensor, ...]:
    strategy = model.variational_strategy
    prior = model.forward(strategy.inducing_points)
    # A constant mean is a view of its parameter, and changes with it.
    return prior.covariance_matrix, prior.mean.clone(), strategy.lam, strategy.B


@pytest.mark.parametrize("m", [1, 4, 7, 12])
@pytest.mark.parametrize("other_hyperparameters", [False, True])
@some_likelihoods
def test_the_pseudo_likelihood_is_held_fixed(
    name: str, m: int, other_hyperparameters: bool
) -> None:
    """Hyperparameters and inducing points change together, for other points of any number."""
    model = problem(name).converged(jitter_val=1e-13)
    before, Z = kernel_basis(model), make_inputs(m, 2)
    expected = moved_duals(model, before, Z)
    if other_hyperparameters:
        change_hyperparameters(model)
        expected = moved_duals(model, before, Z)
    model.variational_strategy.set_inducing_points(Z)
    assert torch.equal(model.variational_strategy.inducing_points, Z)
    assert_close(model.variational_strategy.lam, expected.lam, 1e-8)
    assert_close(model.variational_strategy.B, expected.B, 1e-8)


@some_likelihoods
def test_other_hyperparameters_alone(name: str) -> None:
    model = problem(name).converged(jitter_val=1e-13)
    before = kernel_basis(model)
    change_hyperparameters(model)
    expected = moved_duals(model, before, model.variational_strategy.inducing_points)
    assert_close(model.variational_strategy.lam, expected.lam, 1e-8)
    assert_close(model.variational_strategy.B, expected.B, 1e-8)


@some_likelihoods
def test_same_hyperparameters_are_the_identity(name: str) -> None:
    strategy = problem(name).converged().variational_strategy
    assert_close(strategy.duals.lam, strategy.dual_lam, 1e-13)
    assert_close(strategy.duals.B, strategy.dual_B, 1e-13)


@some_likelihoods
def test_superset_loses_nothing_and_back(name: str) -> None:
    data = problem(name)
    model, same = data.converged(), data.converged()
    model.variational_strategy.set_inducing_points(torch.cat([make_inputs(5, 2), data.Z.flip(0)]))
    assert_same_posterior(model, same, data.test, 1e-8)
    assert_close(
        model.variational_strategy.kl_divergence(), same.variational_strategy.kl_divergence(), 1e-8
    )
    model.variational_strategy.set_inducing_points(data.Z)
    assert_same_posterior(model, same, data.test, 1e-8)
    assert_close(model.variational_strategy.dual_B, same.variational_strategy.dual_B, 1e-7)


@settings(deadline=None, max_examples=15)
@given(st.permutations(range(7)), st.integers(0, 6), st.integers(0, 3))
def test_order_copies_and_additions_do_not_matter(
    order: list[int], copies: int, additions: int
) -> None:
    """Also with points that occur more than once, for which ``Kzz`` is singular without jitter."""
    data = problem("gaussian")
    model, same = data.converged(), data.converged()
    Z = torch.cat([data.Z[order], data.Z[:copies], make_inputs(additions, 2)])
    model.variational_strategy.set_inducing_points(Z)
    # A copy shares the jitter of the original: relative errors are of the size of the jitter.
    assert_same_posterior(model, same, data.test, 1e-7)
    model.variational_strategy.set_inducing_points(torch.cat([Z, make_inputs(4, 2)]))
    assert_same_posterior(model, same, data.test, 1e-7)


@some_likelihoods
def test_rebase_changes_no_prediction_now_or_later(name: str) -> None:
    data = problem(name)
    model, never = data.converged(), data.converged()
    for _ in range(2):
        change_hyperparameters(model)
        change_hyperparameters(never)
        before = model(data.test)
        model.variational_strategy.rebase()
        assert_same_posterior(before, model, data.test, 1e-10)
    assert_same_posterior(model, never, data.test, 1e-7)


def test_batches_of_models_move_one_by_one() -> None:
    data = problem("gaussian")
    Z, new = make_inputs(3, 6, 2), make_inputs(3, 9, 2)
    together = data.converged(Z)
    together.variational_strategy.set_inducing_points(new)
    for i in range(3):
        alone = data.converged(Z[i])
        alone.variational_strategy.set_inducing_points(new[i])
        assert_close(together(data.test).mean[i], alone(data.test).mean, 1e-9)
        assert_close(together(data.test).variance[i], alone(data.test).variance, 1e-9)


@pytest.mark.parametrize("same_points", [True, False])
def test_transport_in_the_whitened_basis(same_points: bool) -> None:
    model = problem("gaussian").model()
    Z = make_inputs(5, 2)
    new = Z if same_points else make_inputs(4, 2)
    prior = dense_prior(model, new, Z)
    chol, reference_chol = torch.linalg.cholesky(2 * prior.zz), torch.linalg.cholesky(prior.xx)
    T = transport_matrix(chol, reference_chol, None if same_points else 2 * prior.zx)
    expected = torch.linalg.inv(chol) @ (2 * prior.zx) @ torch.linalg.inv(reference_chol).mT
    assert_close(T, expected, 1e-9)
    duals = Duals(torch.randn(5), torch.diag(torch.rand(5)))
    moved = project(duals, T)
    assert_close(moved.lam, T @ duals.lam, 1e-12)
    assert_close(moved.B, T @ duals.B @ T.mT, 1e-12)
    assert torch.equal(moved.B, moved.B.mT)


def test_recentre_keeps_the_pseudo_likelihood() -> None:
    """``log t(u)`` is the same function, up to a constant, around another mean."""
    chol = torch.linalg.cholesky(
        dense_prior(problem("gaussian").model(), *[make_inputs(5, 2)] * 2).zz
    )
    root, mean, other, u = torch.randn(5, 5), torch.randn(5), torch.randn(5), torch.randn(2, 5)
    duals = Duals(torch.randn(5), root @ root.mT)

    def log_t(duals: Duals, mean: Tensor) -> Tensor:
        v = torch.linalg.solve(chol, (u - mean).mT)
        log_t = duals.lam @ v - 0.5 * (v * (duals.B @ v)).sum(0)
        return log_t[1] - log_t[0]

    moved = recentre(duals, chol, mean - other)
    assert_close(log_t(moved, other), log_t(duals, mean), 1e-9)
    assert torch.equal(moved.B, duals.B)


def test_coincident() -> None:
    Z = make_inputs(2, 4, 2)
    same = coincident(Z, Z[:, [2, 0, 2]])
    expected = torch.zeros(4, 3)
    expected[2, [0, 2]] = expected[0, 1] = 1
    assert torch.equal(same, expected.expand(2, 4, 3))
    assert not coincident(Z, Z + 1e-12).any()

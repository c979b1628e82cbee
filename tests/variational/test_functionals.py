"""Observations of linear functionals: differences, averages and integrals, against dense formulas.

The oracle treats the functionals as what they are, Gaussian variables with a given covariance
matrix, and applies the functions of `seqgp.dual` to explicit matrices.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from botorch.fit import fit_gpytorch_mll
from gpytorch.kernels import MaternKernel, ScaleKernel
from gpytorch.likelihoods import BernoulliLikelihood, GaussianLikelihood
from torch import Tensor

import seqgp
from seqgp import SequentialGP
from seqgp.dual import Batch, converge, factorise, posterior_mean, posterior_variance, zero_duals
from seqgp.likelihoods.traits import is_conjugate, precision_floor
from seqgp.observations import Observations
from seqgp.streaming import MemoryOptions
from tests.helpers import CASES, GP, make_inputs, make_kernel, make_mean

pytestmark = pytest.mark.usefixtures("float64")
EVERYTHING, NOTHING = MemoryOptions(capacity=None), MemoryOptions(policy="none")


def functionals(kind: str, n: int = 12) -> tuple[Tensor, Tensor]:
    """Inputs ``n x J x 2`` and coefficients ``n x J``."""
    torch.manual_seed(3)
    if kind == "difference":
        return torch.rand(n, 2, 2), torch.tensor([1.0, -1.0]).expand(n, 2).clone()
    if kind == "average":  # of three points, of two in every other one
        c = torch.full((n, 3), 1 / 3)
        c[::2] = torch.tensor([0.5, 0.5, 0.0])
        return torch.rand(n, 3, 2), c
    nodes, weights = np.polynomial.legendre.leggauss(6)  # along lines of length one
    x = torch.rand(n, 1, 2).expand(n, 6, 2).clone()
    x[..., 0] = torch.from_numpy(nodes / 2 + 0.5)
    return x, torch.from_numpy(weights / 2).expand(n, 6).clone()


kinds = pytest.mark.parametrize("kind", ["difference", "average", "integral"])
likelihoods = pytest.mark.parametrize(
    "name", [name for name, case in CASES.items() if not case.num_latents]
)


class Dense:
    """Covariances of inducing values, functionals and test values as one matrix."""

    def __init__(self, model: GP, x: Tensor, c: Tensor, test: Tensor) -> None:
        Z = model.variational_strategy.inducing_points.detach()
        n, J = c.shape
        C = torch.zeros(n, n * J)
        for i in range(n):
            C[i, i * J : (i + 1) * J] = c[i]
        points = torch.cat([Z, x.reshape(-1, 2), test])
        K = model.covar_module(points).to_dense().detach()
        m = len(Z)
        T = torch.block_diag(torch.eye(m), C, torch.eye(len(test)))
        self.K, self.m, self.n = T @ K @ T.mT, m, n
        self.mean = T @ model.mean_module(points).detach()

    def posterior(self, targets: Tensor, likelihood, arguments) -> tuple[Tensor, Tensor]:  # type: ignore[no-untyped-def]
        m, n, K = self.m, self.n, self.K
        L = torch.linalg.cholesky(K[:m, :m] + 1e-8 * K[:m, :m].diagonal().diag())
        A = torch.linalg.solve_triangular(L, K[:m, m:], upper=False)
        unexplained = (K.diagonal()[m:] - A.square().sum(0)).clamp_min(0)
        data = Observations(torch.zeros(n, 2), targets, arguments)
        evaluate = data.evaluate(likelihood, False)
        batch = Batch(A[:, :n], unexplained[:n], self.mean[m : m + n], evaluate)
        duals, _ = converge(
            zero_duals(A, m),
            lambda: [batch],
            conjugate=is_conjugate(likelihood),
            min_precision=precision_floor(likelihood),
            tol=1e-12,
        )
        factors, A_test = factorise(duals), A[:, n:]
        mean = self.mean[m + n :] + posterior_mean(A_test, factors)
        return mean, posterior_variance(A_test, unexplained[n:], factors)


def problem(name: str, kind: str):  # type: ignore[no-untyped-def]
    case = CASES[name]
    x, c = functionals(kind)
    f = torch.sin(5 * x.sum(-1))
    y = case.sample((c * f).sum(-1))
    return case, x, c, y, case.arguments(len(y))


@kinds
@likelihoods
def test_posterior(name: str, kind: str) -> None:
    case, x, c, y, arguments = problem(name, kind)
    model = GP(make_inputs(6, 2), case.make()).eval()
    test = make_inputs(5, 2)
    model.variational_strategy.converge(x, y, coefficients=c, tol=1e-12, **arguments)
    mean, variance = Dense(model, x, c, test).posterior(y, model.likelihood, arguments)
    posterior = model(test)
    torch.testing.assert_close(posterior.mean, mean, rtol=1e-7, atol=1e-8)
    torch.testing.assert_close(posterior.variance, variance, rtol=1e-6, atol=3e-8)  # jitter


@kinds
@pytest.mark.parametrize("name", ["gaussian", "bernoulli", "poisson", "student_t"])
def test_bound_and_gradient(name: str, kind: str) -> None:
    """The value is that of the iteration; the gradient, by finite differences, its derivative."""
    case, x, c, y, arguments = problem(name, kind)
    model = GP(make_inputs(6, 2), case.make())
    strategy = model.variational_strategy
    info = strategy.converge(x, y, coefficients=c, tol=1e-12, **arguments)

    def bound() -> Tensor:
        return strategy.bound(x, y, coefficients=c, tol=1e-12, **arguments)[0]

    value = bound()
    torch.testing.assert_close(value.detach(), info.elbo, rtol=1e-8, atol=1e-8)
    value.backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        flat, gradient = parameter.data.view(-1), parameter.grad.view(-1)
        for i in range(0, len(flat), 3):
            step = 1e-5
            with torch.no_grad():
                flat[i] += step
                high = bound()
                flat[i] -= 2 * step
                low = bound()
                flat[i] += step
            torch.testing.assert_close(gradient[i], (high - low) / (2 * step), rtol=1e-5, atol=1e-6)


@kinds
@likelihoods
def test_conditioning_is_learning_with_augmented_inducing_points(name: str, kind: str) -> None:
    """Inducing points at all inputs explain the functionals, so both know the same."""
    case, x, c, y, arguments = problem(name, kind)
    x, c, y = x[:3], c[:3], y[:3]
    arguments = {key: value[..., :3] for key, value in arguments.items()}
    Z, test = make_inputs(4, 2), make_inputs(5, 2)
    options = {"coefficients": c, **arguments}
    few = GP(Z, case.make()).eval()
    conditioned = few.get_fantasy_model(x, y, tol=1e-12, **options)(test)
    many = GP(torch.cat([Z, x.reshape(-1, 2).unique(dim=0)]), case.make()).eval()
    many.variational_strategy.converge(x, y, tol=1e-12, **options)
    torch.testing.assert_close(conditioned.mean, many(test).mean, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(conditioned.variance, many(test).variance, rtol=1e-5, atol=1e-6)


def test_values_are_functionals_of_one_point() -> None:
    x, y = make_inputs(10, 2), torch.sin(make_inputs(10, 2).sum(-1))
    plain, functional = (GP(x[:5], GaussianLikelihood()).eval() for _ in range(2))
    plain.variational_strategy.converge(x, y)
    functional.variational_strategy.converge(x.unsqueeze(-2), y, coefficients=torch.ones(10, 1))
    test = make_inputs(4, 2)
    torch.testing.assert_close(plain(test).mean, functional(test).mean, rtol=1e-12, atol=1e-12)


# ------------------------------------------------------------------------------- streams


def make_model(likelihood, x: Tensor, y: Tensor, c: Tensor) -> SequentialGP:  # type: ignore[no-untyped-def]
    return SequentialGP(
        x,
        y.unsqueeze(-1),
        likelihood=likelihood,
        covar_module=make_kernel(),
        mean_module=make_mean(),
        inducing_points=make_inputs(6, 2),
        coefficients=c,
    )


@kinds
@pytest.mark.parametrize(
    ("name", "memory"),
    [
        ("gaussian", EVERYTHING),
        ("bernoulli", EVERYTHING),
        ("poisson", EVERYTHING),
        ("gaussian", NOTHING),  # other sites stay as they were when they were folded
    ],
)
def test_a_stream_is_batch_learning(name: str, kind: str, memory: MemoryOptions) -> None:
    case, x, c, y, _ = problem(name, kind)
    whole = make_model(case.make(), x, y, c)
    model = make_model(case.make(), x[:4], y[:4], c[:4])
    for part in (slice(4, 7), slice(7, 12)):
        record = model.update(
            x[part], y[part].unsqueeze(-1), coefficients=c[part], memory=memory, learn=False
        )
        assert np.isfinite(record.log_density)
    test = make_inputs(5, 2)
    torch.testing.assert_close(
        model.posterior(test).mean, whole.posterior(test).mean, rtol=1e-6, atol=1e-7
    )


def test_leverage_is_that_of_the_functional() -> None:
    case, x, c, y, _ = problem("gaussian", "difference")
    model = make_model(case.make(), x, y, c)
    test = x.reshape(-1, 2)
    covariance = model.posterior(test).distribution.covariance_matrix
    C = torch.block_diag(*c.unsqueeze(-2))
    expected = (C @ covariance @ C.mT).diagonal() / model.likelihood.noise
    torch.testing.assert_close(model.memory.leverage, expected, rtol=1e-5, atol=1e-6)
    model.update(x[:0], y[:0].unsqueeze(-1), coefficients=c[:0], memory=5, learn=True, steps=2)
    assert model.num_data == 5


def test_values_and_functionals_in_one_model() -> None:
    """Ratings beside comparisons: the former become functionals with a coefficient of zero."""
    case, x, c, y, _ = problem("gaussian", "difference")
    values = make_inputs(6, 2)
    both = Observations(values, torch.sin(values.sum(-1))).append(Observations(x, y, {}, None, c))
    model = GP(make_inputs(6, 2), case.make()).eval()
    model.variational_strategy.converge(both)
    one = GP(make_inputs(6, 2), case.make()).eval()
    one.variational_strategy.converge(values, torch.sin(values.sum(-1)))
    one.variational_strategy.converge(x, y, coefficients=c, add=True)
    test = make_inputs(4, 2)
    torch.testing.assert_close(model(test).mean, one(test).mean, rtol=1e-8, atol=1e-9)


def test_forgetting_and_checkpoints() -> None:
    case, x, c, y, _ = problem("gaussian", "difference")
    model, other = make_model(case.make(), x, y, c), make_model(case.make(), x[2:], y[2:], c[2:])
    model.forget(x[:2], y[:2].unsqueeze(-1), coefficients=c[:2])
    test = make_inputs(4, 2)
    torch.testing.assert_close(model.posterior(test).mean, other.posterior(test).mean)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "model.pt"
        seqgp.save(model, path)
        again = seqgp.load(path)
    assert torch.equal(again.posterior(test).mean, model.posterior(test).mean)
    options = {"coefficients": c[:2], "steps": 2}
    records = [each.update(x[:2], y[:2].unsqueeze(-1), **options) for each in (model, again)]
    assert records[0].elbo == records[1].elbo


def test_learning_from_differences_finds_the_order() -> None:
    torch.manual_seed(0)
    x = torch.rand(200, 2, 1)
    f = torch.sin(4 * x).squeeze(-1)
    y = (f[:, :1] - f[:, 1:] + 0.3 * torch.randn(200, 1) > 0).double()
    kernel = ScaleKernel(MaternKernel(nu=2.5))
    c = torch.tensor([1.0, -1.0]).expand(200, 2)
    model = SequentialGP(
        x,
        y,
        likelihood=BernoulliLikelihood(),
        covar_module=kernel,
        coefficients=c,
        inducing_points=10,
    )
    fit_gpytorch_mll(seqgp.DualELBO(model.likelihood, model))
    test = torch.linspace(0.05, 0.95, 20).unsqueeze(-1)
    utility = model.posterior(test).mean.squeeze(-1)
    truth = torch.sin(4 * test).squeeze(-1)
    assert torch.corrcoef(torch.stack([utility, truth]))[0, 1] > 0.98


@pytest.mark.parametrize(
    ("c", "message"),
    [
        (torch.ones(12, 3), "coefficients: expected shape"),
        (torch.full((12, 2), torch.nan), "coefficients: expected finite numbers"),
    ],
)
def test_bad_coefficients(c: Tensor, message: str) -> None:
    _, x, _, y, _ = problem("gaussian", "difference")
    with pytest.raises(ValueError, match=message):
        make_model(GaussianLikelihood(), x, y, c)

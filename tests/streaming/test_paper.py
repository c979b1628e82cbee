"""The paper's rule, against a direct transcription of its equations in dense matrices."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from gpytorch.kernels import MaternKernel, ScaleKernel
from gpytorch.means import ZeroMean
from torch import Tensor

from seqgp import SequentialGP
from seqgp.likelihoods.expectations import expectations, expected_log_prob
from seqgp.streaming import paper
from seqgp.streaming.memory import MemoryOptions
from tests.helpers import CASES, assert_close, latent, make_inputs, unscaled

pytestmark = pytest.mark.usefixtures("float64")

STEPS, RATE = 5, 0.05


def first_four(leverage: Tensor, size: int, generator: torch.Generator) -> Tensor:
    return torch.arange(4)


MEMORY = MemoryOptions(capacity=None, per_update=4, policy=first_four)


class Transcription:
    """Algorithm 1 with ``Kzz`` inverted, duals as they are, and nothing of seqgp but expectations.

    Natural parameters: ``lam = sum_i k_zi (alpha_i + beta_i m_i)``, as in the dual SVGP that the
    paper builds on; where the iteration has converged, ``K (K + B)^-1 lam`` is its ``alpha_u``.
    """

    def __init__(self, Z: Tensor, kernel: Any, likelihood: Any, rho: float, number: int) -> None:
        self.Z, self.kernel, self.likelihood = Z, kernel, likelihood
        self.rho, self.number = rho, number
        self.lam, self.B = torch.zeros(len(Z)), torch.zeros(len(Z), len(Z))
        self.memory: tuple[Tensor, Tensor] = (Z[:0], Z[:0, 0])
        self.num_seen = 0

    def K(self) -> Tensor:
        K = self.kernel(self.Z).to_dense()
        return K + 1e-8 * torch.diag(K.diagonal())

    def moments(self, x: Tensor, lam: Tensor, B: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        K, k = self.K(), self.kernel(self.Z, x).to_dense()
        a = torch.linalg.solve(K, k)
        V = torch.linalg.inv(torch.linalg.inv(K) + torch.linalg.solve(K, B) @ torch.linalg.inv(K))
        mean = V @ torch.linalg.solve(K, lam)
        variance = self.kernel(x, diag=True) - (k * a).sum(0) + (a * (V @ a)).sum(0)
        return k, a.mT @ mean, variance

    def sites(self, x: Tensor, y: Tensor, lam: Tensor, B: Tensor) -> tuple[Tensor, Tensor]:
        k, mean, variance = self.moments(x, lam, B)
        _, alpha, beta = expectations(self.likelihood, y, mean, variance)
        beta = beta.expand_as(alpha)
        return k @ (alpha + beta * mean), (k * beta) @ k.mT

    def update(self, x: Tensor, y: Tensor) -> None:
        memory_x, memory_y = self.memory
        lam_M, B_M = self.sites(memory_x, memory_y, self.lam, self.B)
        lam_rest, B_rest = (self.lam - lam_M).detach(), (self.B - B_M).detach()
        both_x, both_y = torch.cat([memory_x, x]), torch.cat([memory_y, y])
        lam, B = self.lam, self.B
        for _ in range(self.number):
            lam_i, B_i = self.sites(both_x, both_y, lam, B)
            lam = ((1 - self.rho) * lam + self.rho * (lam_rest + lam_i)).detach()
            B = ((1 - self.rho) * B + self.rho * (B_rest + B_i)).detach()
        self.lam, self.B = lam, B
        weights = torch.ones(len(both_x))
        weights[: len(memory_x)] = self.num_seen / max(len(memory_x), 1)
        adam = torch.optim.Adam([*self.kernel.parameters(), *self.likelihood.parameters()], lr=RATE)
        for _ in range(STEPS):
            adam.zero_grad()
            _, mean, variance = self.moments(both_x, lam, B)
            fit = expected_log_prob(self.likelihood, both_y, mean, variance)
            (self.kl() - (weights * fit).sum()).backward()
            adam.step()
        self.memory = torch.cat([memory_x, x[:4]]), torch.cat([memory_y, y[:4]])
        self.num_seen += len(x)

    def kl(self) -> Tensor:
        K = self.K()
        V = torch.linalg.inv(
            torch.linalg.inv(K) + torch.linalg.solve(K, self.B) @ torch.linalg.inv(K)
        )
        mean = V @ torch.linalg.solve(K, self.lam)
        q = torch.distributions.MultivariateNormal(mean, 0.5 * (V + V.mT))
        return torch.distributions.kl_divergence(
            q, torch.distributions.MultivariateNormal(torch.zeros(len(K)), K)
        )


def streams(name: str) -> tuple[SequentialGP, list[tuple[Tensor, Tensor]]]:
    """A model that has seen nothing, and three batches."""
    x = make_inputs(36, 2)
    y = CASES[name].sample(latent(x)).unsqueeze(-1)
    kernel = ScaleKernel(MaternKernel(nu=1.5))
    kernel.base_kernel.lengthscale, kernel.outputscale = 0.5, 1.2
    Z = make_inputs(6, 2)
    model = SequentialGP(
        x[:0],
        y[:0],
        likelihood=CASES[name].make(),
        covar_module=kernel,
        mean_module=ZeroMean(),
        inducing_points=Z,
        learn_inducing_points=True,
    )
    return model, list(zip(x.split(12), y.split(12), strict=True))


@pytest.mark.parametrize("name", ["gaussian", "bernoulli", "poisson", "laplace"])
def test_the_papers_rule_is_that_of_the_paper(name: str) -> None:
    model, batches = streams(name)
    rho, number = (0.8, 2) if name == "gaussian" else (0.5, 4)
    oracle = Transcription(
        make_inputs(6, 2),
        copy.deepcopy(model.covar_module),
        copy.deepcopy(model.likelihood),
        rho,
        number,
    )
    options = {"mode": "paper", "steps": STEPS, "learning_rate": RATE, "inducing": "fixed"}
    test = make_inputs(7, 2)
    for i, (x, y) in enumerate(batches, 1):
        record = model.update(x, y, memory=MEMORY, **options)
        oracle.update(x, y.squeeze(-1))
        assert record.steps == STEPS
        assert record.num_memory == 4 * i
        _, mean, variance = oracle.moments(test, oracle.lam, oracle.B)
        assert_close(model(test).mean, mean)
        assert_close(model(test).variance, variance)
        assert_close(
            model.covar_module.base_kernel.lengthscale, oracle.kernel.base_kernel.lengthscale
        )
        assert_close(model.covar_module.outputscale, oracle.kernel.outputscale)
    assert_close(model.stream.observations.inputs, oracle.memory[0])


WITHOUT_ARGUMENTS = [name for name in CASES if not CASES[name].arguments(1)]


def update_twice(name: str, **options: Any) -> tuple[SequentialGP, Tensor]:
    x = make_inputs(24, 2)
    y = CASES[name].sample(latent(x, CASES[name].num_latents)).unsqueeze(-1)
    model = SequentialGP(x[:8], y[:8], likelihood=CASES[name].make(), inducing_points=6)
    for batch in (slice(8, 16), slice(16, 24)):
        record = model.update(x[batch], y[batch], memory=MEMORY, mode="paper", **options)
        assert math.isfinite(record.elbo)
    return model, x


@unscaled
@pytest.mark.parametrize("name", WITHOUT_ARGUMENTS)
def test_any_likelihood(name: str) -> None:
    model, x = update_twice(name, steps=3)
    assert model.posterior(x).variance.min() > 0
    model.refresh()
    assert model.posterior(x).mean.isfinite().all()


@unscaled
@pytest.mark.parametrize("name", WITHOUT_ARGUMENTS)
def test_memory_and_the_rest_make_the_whole(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where natural-gradient steps have converged, finding the memory's sites anew is idle."""
    for conjugate in (True, False):
        monkeypatch.setitem(paper.NATURAL_GRADIENT_STEPS, conjugate, (0.5, 100))
    model, x = update_twice(name, learn=False)
    before = model.posterior(x)
    model.refresh()
    after = model.posterior(x)
    assert_close(after.mean, before.mean, 1e-10)
    assert_close(after.variance, before.variance, 1e-10)


def test_inducing_points_may_move() -> None:
    model, batches = streams("bernoulli")
    for x, y in batches:
        model.update(x, y, mode="paper", memory=MEMORY, steps=3)
    assert not torch.equal(model.variational_strategy.inducing_points, make_inputs(6, 2))
    model, batches = streams("bernoulli")
    for x, y in batches:
        model.update(x + 1, y, mode="paper", memory=MEMORY, steps=3, inducing="adapt")
    assert model(batches[-1][0] + 1).variance.mean() < 0.9 * model.covar_module.outputscale


def test_without_learning_hyperparameters_stay() -> None:
    model, batches = streams("bernoulli")
    before = [p.clone() for p in model.parameters()]
    record = model.update(*batches[0], mode="paper", learn=False)
    assert record.steps == 0
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_bad_arguments() -> None:
    model, batches = streams("bernoulli")
    with pytest.raises(ValueError, match="mode: expected pseudo-likelihood or paper"):
        model.update(*batches[0], mode="journal")
    with pytest.raises(ValueError, match="discount"):
        model.update(*batches[0], mode="paper", discount=0.9)

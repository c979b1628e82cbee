"""Noise that varies by means of GPyTorch: two latents under one variational strategy.

GPyTorch has no likelihood for it, so this is what its users write: a batch of two latent functions,
a likelihood of one's own, whose expectation is in closed form, and Adam.
"""

from __future__ import annotations

import math
from typing import Any

import gpytorch
import torch
from torch import Tensor

STEPS, RATE = 800, 0.03
INDUCING = 30


class _Latents(gpytorch.models.ApproximateGP):
    """The mean and the log variance."""

    def __init__(self, Z: Tensor) -> None:
        batch = torch.Size([2])
        q = gpytorch.variational.CholeskyVariationalDistribution(len(Z), batch_shape=batch)
        strategy = gpytorch.variational.VariationalStrategy(self, Z.expand(2, *Z.shape), q)
        super().__init__(
            gpytorch.variational.IndependentMultitaskVariationalStrategy(strategy, num_tasks=2)
        )
        self.mean_module = gpytorch.means.ConstantMean(batch_shape=batch)
        self.mean_module.initialize(constant=torch.tensor([0.0, -2.0]))
        kernel = gpytorch.kernels.RBFKernel(batch_shape=batch)
        kernel.lengthscale = 0.2
        self.covar_module = gpytorch.kernels.ScaleKernel(kernel, batch_shape=batch)

    def forward(self, x: Tensor) -> gpytorch.distributions.MultivariateNormal:
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


class TwoLatents:
    """The model, and the data it is fitted to.

    Args:
        X: ``n x 1`` inputs in [0, 1].
        Y: ``n x 1`` standardised observations.
    """

    def __init__(self, X: Tensor, Y: Tensor) -> None:
        self.X, self.y = X, Y.squeeze(-1)
        Z = torch.linspace(0, 1, INDUCING, dtype=X.dtype).unsqueeze(-1)
        self.model = _Latents(Z).to(X)

    def fit(self) -> TwoLatents:
        """Maximise the evidence lower bound."""
        self.model.train()
        optimizer = torch.optim.Adam(self.model.parameters(), lr=RATE)
        strategy: Any = self.model.variational_strategy
        for _ in range(STEPS):
            optimizer.zero_grad()
            q = self.model(self.X)
            (m_f, m_g), (v_f, v_g) = q.mean.mT, q.variance.mT
            square = (self.y - m_f).square() + v_f
            log_prob = -0.5 * (math.log(2 * math.pi) + m_g + square * (0.5 * v_g - m_g).exp())
            loss = strategy.kl_divergence() - log_prob.sum()
            loss.backward()
            optimizer.step()
        return self

    @torch.no_grad()
    def predict(self, T: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Mean and variance of the function and the expected noise, each ``t x 1``."""
        q = self.model.eval()(T)
        (m_f, m_g), (v_f, v_g) = q.mean.mT, q.variance.mT
        noise = (m_g + 0.5 * v_g).exp()
        return m_f.unsqueeze(-1), v_f.unsqueeze(-1), noise.unsqueeze(-1)

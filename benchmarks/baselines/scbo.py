"""SCBO, written from Eriksson and Poloczek (2021), "Scalable constrained Bayesian optimization".

A trust region around the best point, from which batches are Thompson samples: of the candidates
whose sampled constraints hold, the one with the best sampled objective. The parts (Gaussian
processes, joint samples, the choice among them) are BoTorch's.

A constraint is only seen as pass or fail here. As in `qlognei`, its model is a Gaussian one of 0
and 1 that has to exceed a half. (The paper's bilog transform does nothing to two values.)
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from botorch.fit import fit_gpytorch_mll
from botorch.generation.sampling import ConstrainedMaxPosteriorSampling
from botorch.models import ModelListGP, SingleTaskGP
from botorch.models.transforms import Standardize
from botorch.utils.sampling import draw_sobol_samples
from gpytorch.kernels import Kernel, ScaleKernel
from gpytorch.mlls import ExactMarginalLogLikelihood
from torch import Tensor

#: Lengths of the trust region: at first, at least, at most (sides of the unit cube).
FIRST, LEAST, MOST = 0.8, 2.0**-7, 1.6


class Region(NamedTuple):
    """A trust region.

    Attributes:
        length: Its length.
        successes: Batches in a row that improved on the best value.
        failures: Batches in a row that did not.
        start: The number of evaluations before the search (re)started, which it ignores.
    """

    length: float = FIRST
    successes: int = 0
    failures: int = 0
    start: int = 0

    def after(self, success: bool, d: int, q: int) -> Region:
        """The region after a batch of ``q`` points in ``d`` dimensions, unless it restarts.

        The length doubles after max(3, d / 10) successes and halves after d / q failures in a row.
        """
        successes = self.successes + 1 if success else 0
        failures = 0 if success else self.failures + 1
        if successes == max(3, math.ceil(d / 10)):
            return Region(min(2 * self.length, MOST), 0, 0, self.start)
        if failures == math.ceil(d / q):
            return Region(self.length / 2, 0, 0, self.start)
        return Region(self.length, successes, failures, self.start)


def copula(Y: Tensor) -> Tensor:
    """Normal quantiles of the ranks of ``n`` values, so that outliers have no weight."""
    ranks = Y.argsort().argsort().to(Y)
    return torch.special.ndtri((ranks + 0.5) / len(Y))


def region_bounds(centre: Tensor, length: float, lengthscales: Tensor) -> Tensor:
    """The region in the unit cube, ``2 x d``: a box of volume ``length^d``, cut off at the cube.

    Args:
        centre: ``d``.
        length: Its length.
        lengthscales: ``d``, to which its sides are proportional.
    """
    sides = length * (lengthscales.log() - lengthscales.log().mean()).exp()
    return torch.stack([centre - sides / 2, centre + sides / 2]).clamp(0, 1)


def candidates(centre: Tensor, box: Tensor, seed: int) -> Tensor:
    """Sobol points of a box, each of which differs from its centre in about 20 inputs at most.

    Args:
        centre: ``d``.
        box: ``2 x d``.
        seed: Seed.

    Returns:
        ``n x d``, with n = min(5000, max(2000, 200 d)).
    """
    d = len(centre)
    n = min(5000, max(2000, 200 * d))
    points = draw_sobol_samples(box, n, 1, seed=seed).squeeze(1)
    generator = torch.Generator().manual_seed(seed)
    moved = torch.rand(n, d, generator=generator) <= min(20 / d, 1)
    stuck = (~moved.any(-1)).nonzero().squeeze(-1)
    moved[stuck, torch.randint(d, stuck.shape, generator=generator)] = True
    return torch.where(moved, points, centre)


class SCBO:
    """The loop. Points are normalised to the unit cube, larger values are better.

    Args:
        bounds: ``2 x d``.
        q: The size of batches.
        initial: The number of points after a restart.
        fit: Options of L-BFGS for hyperparameters.
        seed: Seed.
        kernel: Makes the objective's kernel; by default BoTorch's, scaled.
    """

    def __init__(
        self,
        bounds: Tensor,
        q: int,
        initial: int,
        fit: dict[str, Any],
        seed: int,
        kernel: Any = None,
    ) -> None:
        self.bounds, self.q, self.initial, self.fit, self.seed = bounds, q, initial, fit, seed
        self.make_kernel = kernel
        self.X = bounds.new_empty(0, bounds.shape[-1])
        self.Y = bounds.new_empty(0)
        self.valid = torch.empty(0, dtype=torch.bool)
        self.region = Region()

    def tell(self, X: Tensor, Y: Tensor, valid: Tensor) -> None:
        """Learn from ``n`` evaluations; values may be NaN."""
        d, before = X.shape[-1], self._best()
        searching = before is not None and len(self.X) - self.region.start >= self.initial
        self.X, self.Y = torch.cat([self.X, X]), torch.cat([self.Y, Y])
        self.valid = torch.cat([self.valid, valid])
        if not searching:
            return
        best = self._best()
        assert before is not None
        assert best is not None
        was, now = float(self.Y[before]), float(self.Y[best])
        self.region = self.region.after(now > was + 1e-3 * abs(was), d, self.q)
        if self.region.length < LEAST:
            self.region = Region(start=len(self.X))

    def ask(self) -> Tensor:
        """Propose ``q x d`` points; quasi-random ones as long as nothing is valid."""
        seed, best = self.seed + len(self.X), self._best()
        if best is None or len(self.X) - self.region.start < self.initial:
            return draw_sobol_samples(self.bounds, self.q, 1, seed=seed).squeeze(1)
        low, high = self.bounds
        unit, Y = (self.X - low) / (high - low), self.Y
        kept = torch.arange(len(Y)) >= self.region.start
        known = kept & ~Y.isnan()
        objective = self._fitted(unit[known], copula(Y[known]), self.make_kernel)
        passes = self._fitted(unit[kept], self.valid[kept].to(Y) - 0.5, None, sign=-1)
        box = region_bounds(unit[best], self.region.length, lengthscales(objective))
        torch.manual_seed(seed)
        sampler = ConstrainedMaxPosteriorSampling(objective, ModelListGP(passes), replacement=False)
        with torch.no_grad():
            chosen = sampler(candidates(unit[best], box, seed), num_samples=self.q)
        return low + (high - low) * chosen.to(self.bounds)

    def _best(self) -> int | None:
        """The best valid point of this search."""
        kept = torch.arange(len(self.Y)) >= self.region.start
        values = torch.where(self.valid & kept, self.Y, -torch.inf)
        return int(values.argmax()) if bool((values > -torch.inf).any()) else None

    def _fitted(self, X: Tensor, Y: Tensor, kernel: Any, sign: int = 1) -> SingleTaskGP:
        """A model of ``n`` values, or of their negatives."""
        model = SingleTaskGP(
            X,
            sign * Y.unsqueeze(-1),
            covar_module=None if kernel is None else kernel(),
            outcome_transform=Standardize(1),
        )
        mll = ExactMarginalLogLikelihood(model.likelihood, model)
        fit_gpytorch_mll(mll, optimizer_kwargs={"options": self.fit})
        return model


def lengthscales(model: SingleTaskGP) -> Tensor:
    """The lengthscales of a model, ``d``."""
    kernel: Kernel = model.covar_module
    while isinstance(kernel, ScaleKernel):
        kernel = kernel.base_kernel
    return kernel.lengthscale.detach().squeeze(0)

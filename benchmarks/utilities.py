"""Utilities of items in the unit cube, of six kinds, drawn at random."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from botorch.test_functions import Hartmann
from gpytorch.kernels import MaternKernel
from torch import Generator, Tensor

#: Maps items ``... x d`` to utilities ``...``.
Utility = Callable[[Tensor], Tensor]
F64 = torch.float64
#: The number of points of a random function, and of those that determine the scale of a utility.
POINTS = 600, 4096


def sines(d: int, generator: Generator) -> Utility:
    """A sum of sine waves in random directions."""
    waves = torch.randn(d, 6, dtype=F64, generator=generator) * 4 / math.sqrt(d)
    phases = 2 * math.pi * torch.rand(6, dtype=F64, generator=generator)
    weights = torch.randn(6, dtype=F64, generator=generator)
    return lambda X: torch.sin(X @ waves + phases) @ weights


def quadratic(d: int, generator: Generator) -> Utility:
    """One maximum, in a random place; the last inputs matter less."""
    best = 0.2 + 0.6 * torch.rand(d, dtype=F64, generator=generator)
    weights = torch.logspace(0, -1, d, dtype=F64)
    return lambda X: -(X - best).square() @ weights


def matern(d: int, generator: Generator) -> Utility:
    """A draw from a Gaussian process that is less smooth than that of the models."""
    kernel = MaternKernel(nu=2.5, ard_num_dims=d).to(F64)
    lengthscales = 0.3 + 0.7 * torch.rand(d, dtype=F64, generator=generator)
    kernel.lengthscale = lengthscales * math.sqrt(d / 2)
    kernel.requires_grad_(False)
    Z = torch.rand(POINTS[0], d, dtype=F64, generator=generator)
    L = torch.linalg.cholesky(kernel(Z).to_dense() + 1e-6 * torch.eye(len(Z), dtype=F64))
    z = torch.randn(len(Z), 1, dtype=F64, generator=generator)
    weights = torch.linalg.solve_triangular(L.mT, z, upper=True).squeeze(-1)
    return lambda X: kernel(X, Z).to_dense() @ weights


def hartmann(d: int, generator: Generator) -> Utility:
    """Hartmann6: with fewer inputs on a random slice, with more of them without the others."""
    f = Hartmann(6, negate=True, dtype=F64)
    rest = torch.rand(max(6 - d, 0), dtype=F64, generator=generator)
    return lambda X: f(torch.cat([X[..., :6], rest.expand(*X.shape[:-1], -1)], -1))


def sigmoids(d: int, generator: Generator) -> Utility:
    """Slopes in random directions, and an interaction of the first and the last input."""
    slopes = 4 * torch.randn(3, d, dtype=F64, generator=generator)
    centres = torch.rand(3, d, dtype=F64, generator=generator)
    weights = torch.tensor([1.0, -0.7, 0.5], dtype=F64)

    def f(X: Tensor) -> Tensor:
        steps = torch.sigmoid(((X.unsqueeze(-2) - centres) * slopes).sum(-1))
        return steps @ weights + X[..., 0] * X[..., -1]

    return f


def rosenbrock(d: int, generator: Generator) -> Utility:
    """The logarithm of Rosenbrock's valley, in a random place."""
    shift = torch.rand(d, dtype=F64, generator=generator) - 0.5

    def f(X: Tensor) -> Tensor:
        x = 3 * X - 1.5 + shift
        bend = x[..., 1:] - x[..., :-1].square()
        return -(100 * bend.square() + (1 - x[..., :-1]).square()).sum(-1).log1p()

    return f


KINDS = {f.__name__: f for f in (sines, quadratic, matern, hartmann, sigmoids, rosenbrock)}


def random_utility(kind: str, d: int, seed: int, scale: float) -> Utility:
    """A utility of one of the `KINDS`, with mean zero in the cube.

    Args:
        kind: The name of the kind.
        d: The number of inputs.
        seed: The seed of whatever is random about it.
        scale: Its standard deviation in the cube.
    """
    generator = torch.Generator().manual_seed(seed)
    f = KINDS[kind](d, generator)
    values = f(torch.rand(POINTS[1], d, dtype=F64, generator=generator))
    return lambda X: (f(X) - values.mean()) * (scale / values.std())

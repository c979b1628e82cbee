r"""Sparse on-line Gaussian processes (Csato and Opper, Neural Computation, 2002).

One observation at a time. The posterior process has mean :math:`k_x^T \alpha` and covariance
:math:`k(x, x') + k_x^T C k_{x'}`, with :math:`k_x` the covariances with at most ``budget`` *basis
vectors*, inputs of the stream. With :math:`m, v` the mean and variance at the next input,

.. math::
    q = \partial_m \log \int p(y | f) N(f; m, v) df, \qquad
    r = \partial^2_m \log \int p(y | f) N(f; m, v) df

give the Gaussian with the moments of the tilted posterior (assumed density filtering):
:math:`\alpha \leftarrow \alpha + q s`, :math:`C \leftarrow C + r s s^T`, :math:`s = C k_x + e_x`.
The input becomes a basis vector, unless the others explain it, :math:`\gamma = k_{xx} - k_x^T Q
k_x` with :math:`Q = K^{-1}` being tiny. If there are too many, the one that changes the mean least
is projected onto the others, :math:`k_* \to \sum_i \hat e_i k_i` with :math:`\hat e = - Q_* / q_*`,
which leaves the distribution of their function values as it was.

Hyperparameters are fixed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from gpytorch.kernels import Kernel
from gpytorch.likelihoods import BernoulliLikelihood, GaussianLikelihood, Likelihood
from scipy.special import log_ndtr
from torch import Tensor

from benchmarks.baselines.ours import fitted_to
from benchmarks.streams import Latent, Stream

Array = np.ndarray[Any, Any]

#: Prior variance, as a fraction, that the basis vectors may leave unexplained at an input that
#: does not become one of them.
TOLERANCE = 1e-6


def slopes(y: float, mean: float, variance: float, noise: float | None) -> tuple[float, float]:
    """First and second derivative of the log predictive density with respect to the mean.

    Args:
        y: The target.
        mean: Predictive mean of the function.
        variance: Predictive variance of the function.
        noise: Variance of Gaussian noise, ``None`` for a class (0 or 1, probit).
    """
    if noise is not None:
        total = variance + noise
        return (y - mean) / total, -1 / total
    sign, scale = 2 * y - 1, math.sqrt(1 + variance)
    z = sign * mean / scale
    # Far in the tail it is -z, but for less than rounding.
    log_ratio = -0.5 * z * z - 0.5 * math.log(2 * math.pi) - log_ndtr(z) if z > -1e5 else 0.0
    ratio = math.exp(log_ratio) if z > -1e5 else -z
    return sign * ratio / scale, -ratio * (z + ratio) / scale**2


class Csato:
    """An on-line GP.

    Args:
        kernel: The kernel.
        likelihood: Gaussian or Bernoulli.
        budget: The largest number of basis vectors; ``None`` for no limit.
    """

    def __init__(self, kernel: Kernel, likelihood: Likelihood, budget: int | None = 100) -> None:
        if not isinstance(likelihood, GaussianLikelihood | BernoulliLikelihood):
            raise NotImplementedError(
                f"likelihood: expected Gaussian or Bernoulli, got {type(likelihood).__name__}."
            )
        self.kernel, self.likelihood, self.budget = kernel, likelihood, budget
        self.basis: Tensor | None = None
        self.alpha = np.zeros(0)
        self.C, self.Q = np.zeros((0, 0)), np.zeros((0, 0))

    @torch.no_grad()
    def learn(self, X: Tensor, y: Tensor) -> None:
        """One piece of data, ``n x d`` and ``n``, point by point."""
        inputs = X if self.basis is None else torch.cat([self.basis, X])
        old = len(inputs) - len(X)
        noise = None
        if isinstance(self.likelihood, GaussianLikelihood):
            noise = float(self.likelihood.noise)
        # All covariances that the piece can ask for, in one call; one row an observation.
        K = self.kernel(X, inputs).to_dense().numpy()
        chosen = np.arange(old)  # basis vectors, as columns of `K`
        for i, target in enumerate(y.tolist()):
            if self._observe(K[i, chosen], float(K[i, old + i]), target, noise):
                chosen = np.append(chosen, old + i)
            if self.budget is not None and len(chosen) > self.budget:
                chosen[self._remove()] = chosen[-1]
                chosen = chosen[:-1]
        self.basis = inputs[torch.from_numpy(chosen)]

    @torch.no_grad()
    def predict(self, X: Tensor) -> Latent:
        """Mean and variance of the function."""
        variance = self.kernel(X, diag=True)
        if self.basis is None:
            return Latent(torch.zeros_like(variance), variance, self.likelihood)
        k = self.kernel(self.basis, X).to_dense()
        C = torch.from_numpy(self.C)
        variance = variance + (k * (C @ k)).sum(0)
        return Latent(k.mT @ torch.from_numpy(self.alpha), variance.clamp_min(0), self.likelihood)

    def _observe(self, k: Array, prior: float, y: float, noise: float | None) -> bool:
        """Learn one observation; returns whether its input has become a basis vector.

        Args:
            k: Covariances with the basis vectors.
            prior: Prior variance.
            y: The target.
            noise: As for `slopes`.
        """
        Ck, e = self.C @ k, self.Q @ k
        q, r = slopes(y, float(k @ self.alpha), max(prior + float(k @ Ck), 0.0), noise)
        gamma = prior - float(k @ e)
        novel = gamma > TOLERANCE * prior
        if novel:
            s = np.append(Ck, 1.0)
            residual = np.append(-e, 1.0)
            self.alpha = np.append(self.alpha, 0.0) + q * s
            self.C = _bordered(self.C) + r * np.outer(s, s)
            self.Q = _bordered(self.Q) + np.outer(residual, residual) / gamma
            return True
        s = Ck + e
        eta = 1 / (1 + max(gamma, 0.0) * r)
        self.alpha = self.alpha + eta * q * s
        self.C = self.C + eta * r * np.outer(s, s)
        return False

    def _remove(self) -> int:
        """Project the basis vector that changes the mean least; the last one takes its place."""
        i = int(np.argmin(np.abs(self.alpha) / self.Q.diagonal()))
        q = self.Q[i, i]
        Q, C, c = self.Q[i].copy(), self.C[i].copy(), self.C[i, i]
        e = -Q / q  # -1 at i itself, which thereby vanishes
        cross = np.outer(e, C + 0.5 * c * e)
        alpha = self.alpha + self.alpha[i] * e
        arrays = [self.C + cross + cross.T, self.Q - np.outer(Q, Q / q)]
        for array in arrays:
            array[i], array[:, i] = array[-1], array[:, -1]
            array[i, i] = array[-1, -1]
        alpha[i] = alpha[-1]
        self.alpha = alpha[:-1]
        self.C, self.Q = (array[:-1, :-1].copy() for array in arrays)
        return i


def _bordered(matrix: Array) -> Array:
    """With one more row and column, of zeros."""
    n = len(matrix)
    result = np.zeros((n + 1, n + 1))
    result[:n, :n] = matrix
    return result


def steps(stream: Stream, learn: bool = True) -> Iterator[Csato]:
    """The model after each piece.

    Args:
        stream: The data.
        learn: Whether hyperparameters are those that offline learning of the first piece finds.
    """
    kernel, likelihood = stream.kernel(), stream.likelihood()
    if learn:
        first = fitted_to(stream, *stream.pieces[0], learn_inducing_points=False)
        kernel, likelihood = first.covar_module, first.likelihood
    model = Csato(kernel, likelihood, len(stream.Z))
    for X, Y in stream.pieces:
        model.learn(X, Y.squeeze(-1))
        yield model


def csato(stream: Stream, learn: bool = True) -> Callable[[Tensor], Latent]:
    """Trained on a stream."""
    *_, model = steps(stream, learn)
    return model.predict

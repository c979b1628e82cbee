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


def slopes(likelihood: Likelihood, y: float, mean: float, variance: float) -> tuple[float, float]:
    """First and second derivative of the log predictive density with respect to the mean."""
    if isinstance(likelihood, GaussianLikelihood):
        total = variance + float(likelihood.noise)
        return (y - mean) / total, -1 / total
    if isinstance(likelihood, BernoulliLikelihood):
        sign, scale = 2 * y - 1, math.sqrt(1 + variance)
        z = sign * mean / scale
        ratio = math.exp(-0.5 * z * z - 0.5 * math.log(2 * math.pi) - log_ndtr(z))
        return sign * ratio / scale, -ratio * (z + ratio) / scale**2
    raise NotImplementedError(
        f"likelihood: expected Gaussian or Bernoulli, got {type(likelihood).__name__}."
    )


class Csato:
    """An on-line GP.

    Args:
        kernel: The kernel.
        likelihood: Gaussian or Bernoulli.
        budget: The largest number of basis vectors; ``None`` for no limit.
    """

    def __init__(self, kernel: Kernel, likelihood: Likelihood, budget: int | None = 100) -> None:
        self.kernel, self.likelihood, self.budget = kernel, likelihood, budget
        self.basis: Tensor | None = None
        self.alpha = np.zeros(0)
        self.C, self.Q = np.zeros((0, 0)), np.zeros((0, 0))

    @torch.no_grad()
    def learn(self, X: Tensor, y: Tensor) -> None:
        """One piece of data, ``n x d`` and ``n``, point by point."""
        inputs = X if self.basis is None else torch.cat([self.basis, X])
        old = len(inputs) - len(X)
        # All covariances that the piece can ask for, in one call.
        K = self.kernel(inputs, X).to_dense().numpy()
        chosen = list(range(old))  # basis vectors, as rows of `inputs`
        for i, target in enumerate(y.tolist()):
            k = K[chosen, i]
            if self._observe(k, float(K[old + i, i]), target):
                chosen.append(old + i)
            if self.budget is not None and len(chosen) > self.budget:
                del chosen[self._remove()]
        self.basis = inputs[chosen]

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

    def _observe(self, k: Array, prior: float, y: float) -> bool:
        """Learn one observation; returns whether its input has become a basis vector.

        Args:
            k: Covariances with the basis vectors.
            prior: Prior variance.
            y: The target.
        """
        Ck, e = self.C @ k, self.Q @ k
        q, r = slopes(self.likelihood, y, float(k @ self.alpha), max(prior + float(k @ Ck), 0.0))
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
        """Project the basis vector that changes the mean least onto the others."""
        i = int(np.argmin(np.abs(self.alpha) / self.Q.diagonal()))
        rest = np.delete(np.arange(len(self.alpha)), i)
        Q = self.Q[rest, i]
        e = -Q / self.Q[i, i]
        C, c = self.C[rest, i], self.C[i, i]
        cross = np.outer(e, C)
        kept = np.ix_(rest, rest)
        self.alpha = self.alpha[rest] + self.alpha[i] * e
        self.C = self.C[kept] + cross + cross.T + c * np.outer(e, e)
        self.Q = self.Q[kept] - np.outer(Q, Q) / self.Q[i, i]
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

r"""Streaming sparse Gaussian process approximations (Bui, Nguyen and Turner, NeurIPS 2017).

All that is kept of the past is the posterior of the inducing values :math:`a`, relative to the
prior that it was found with: :math:`q(a) / p(a | \theta_{old}) \propto
\exp(e^T a - \tfrac12 a^T H a)`. With inducing values :math:`b` at new points, the bound on the
next piece of data is

.. math::
    E_q[\log p(y | f)] - \mathrm{KL}[q(b) \| p(b)] + E_q[e^T a - \tfrac12 a^T H a],

collapsed over :math:`q(b)` for a Gaussian likelihood. Everything is maximised together by L-BFGS.
Written in precisions rather than with the paper's :math:`D_a = H^{-1}`, which need not exist.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from gpytorch.likelihoods import GaussianLikelihood
from linear_operator.utils.cholesky import psd_safe_cholesky
from torch import Tensor

from benchmarks.streams import Latent, Stream
from seqgp.dual.sites import expected_log_prob

JITTER = 1e-6


class Bui:
    """A streaming sparse GP.

    Args:
        stream: Gives kernel, likelihood and initial inducing points.
        iterations: Of L-BFGS, for each piece.
    """

    def __init__(self, stream: Stream, iterations: int = 100) -> None:
        self.kernel, self.likelihood = stream.kernel(), stream.likelihood()
        self.iterations = iterations
        m = len(stream.Z)
        self.Z = stream.Z.clone().requires_grad_(True)
        self.old_Z, self.e, self.H = stream.Z, stream.Z.new_zeros(m), stream.Z.new_zeros(m, m)
        # q(b) in whitened form, mean and Cholesky factor; not used if it can be integrated out
        self.mean = stream.Z.new_zeros(m).requires_grad_(True)
        self.root = torch.eye(m, dtype=stream.Z.dtype).requires_grad_(True)

    @property
    def collapsed(self) -> bool:
        """Whether q(b) is known in closed form."""
        return isinstance(self.likelihood, GaussianLikelihood)

    def learn(self, X: Tensor, y: Tensor) -> None:
        """One piece of data, ``n x d`` and ``n``."""
        hyperparameters = [*self.kernel.parameters(), *self.likelihood.parameters()]
        parameters = [*hyperparameters, self.Z]
        if not self.collapsed:
            self._start()
            parameters += [self.mean, self.root]
        optimizer = torch.optim.LBFGS(
            parameters, max_iter=self.iterations, line_search_fn="strong_wolfe"
        )

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = -self.bound(X, y)
            loss.backward()
            return loss

        optimizer.step(closure)
        self._keep(X, y)

    def bound(self, X: Tensor, y: Tensor) -> Tensor:
        """The bound on one piece of data, up to a constant."""
        L, A, unexplained = self._whitened(X)
        A_old, left_over = self._old(L)
        if self.collapsed:
            noise = self.likelihood.noise
            R, h = self._information(A, A_old, y)
            half = torch.linalg.solve_triangular(R, h.unsqueeze(-1), upper=False)
            value = -0.5 * len(y) * (2 * math.pi * noise).log() - 0.5 * y.square().sum() / noise
            value = value - 0.5 * unexplained.sum() / noise
            value = value - R.diagonal().log().sum() + 0.5 * half.square().sum()
            return (value - 0.5 * (self.H * left_over).sum()).squeeze()
        root = self.root.tril()
        mean, spread = A.mT @ self.mean, root.mT @ A
        variance = unexplained + spread.square().sum(0)
        fit = expected_log_prob(self.likelihood, y, mean, variance).sum()
        log_det = root.diagonal().square().log().sum()
        kl = 0.5 * (root.square().sum() + self.mean.square().sum() - len(root) - log_det)
        a, S = A_old.mT @ self.mean, root.mT @ A_old
        square = a @ self.H @ a + (self.H * (left_over + S.mT @ S)).sum()
        return fit - kl + self.e @ a - 0.5 * square

    @torch.no_grad()
    def predict(self, X: Tensor) -> Latent:
        """Mean and variance of the function."""
        L, A, unexplained = self._whitened(X)
        W, h = self._posterior(L)
        R = psd_safe_cholesky(W)
        variance = torch.linalg.solve_triangular(R, A, upper=False).square().sum(0)
        mean = (A.mT @ torch.cholesky_solve(h.unsqueeze(-1), R)).squeeze(-1)
        return Latent(mean, unexplained + variance, self.likelihood)

    def _whitened(self, X: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """``chol(Kbb)``, ``L^-1 Kbx`` and the variance that ``b`` does not explain."""
        eye = torch.eye(len(self.Z), dtype=X.dtype)
        L = psd_safe_cholesky(self.kernel(self.Z).to_dense() + JITTER * eye)
        A = torch.linalg.solve_triangular(L, self.kernel(self.Z, X).to_dense(), upper=False)
        return L, A, (self.kernel(X, diag=True) - A.square().sum(0)).clamp_min(0)

    def _old(self, L: Tensor) -> tuple[Tensor, Tensor]:
        """``L^-1 Kba``, and the covariance of ``a`` that ``b`` does not explain."""
        cross = self.kernel(self.Z, self.old_Z).to_dense()
        A = torch.linalg.solve_triangular(L, cross, upper=False)
        return A, self.kernel(self.old_Z).to_dense() - A.mT @ A

    def _information(self, A: Tensor, A_old: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Of the whitened ``q(b)`` for Gaussian data: factor of its precision, and ``h``."""
        noise = self.likelihood.noise
        W = torch.eye(len(A), dtype=A.dtype) + A @ A.mT / noise + A_old @ self.H @ A_old.mT
        return psd_safe_cholesky(W), A @ y / noise + A_old @ self.e

    @torch.no_grad()
    def _start(self) -> None:
        """``q(b)`` as the past alone has it."""
        A_old, _ = self._old(self._whitened(self.old_Z)[0])
        W = torch.eye(len(A_old), dtype=A_old.dtype) + A_old @ self.H @ A_old.mT
        covariance = torch.linalg.inv(0.5 * (W + W.mT))
        self.root.copy_(psd_safe_cholesky(0.5 * (covariance + covariance.mT)))
        self.mean.copy_(covariance @ A_old @ self.e)

    @torch.no_grad()
    def _keep(self, X: Tensor, y: Tensor) -> None:
        """Turn ``q(b)`` into what is kept of the past."""
        L, A, _ = self._whitened(X)
        if self.collapsed:
            R, h = self._information(A, self._old(L)[0], y)
            W = R @ R.mT
        else:
            root = self.root.tril()
            eye = torch.eye(len(root), dtype=root.dtype)
            W = (
                torch.cholesky_inverse(root)
                if bool((root.diagonal() > 0).all())
                else (torch.linalg.inv(root @ root.mT + JITTER * eye))
            )
            h = W @ self.mean
        inverse = torch.linalg.inv(L)
        eye = torch.eye(len(W), dtype=W.dtype)
        self.H, self.e = inverse.mT @ (W - eye) @ inverse, inverse.mT @ h
        self.old_Z = self.Z.detach().clone()

    def _posterior(self, L: Tensor) -> tuple[Tensor, Tensor]:
        """Precision and ``h`` of the whitened posterior, from what is kept."""
        A_old, _ = self._old(L)
        eye = torch.eye(len(L), dtype=L.dtype)
        return eye + A_old @ self.H @ A_old.mT, A_old @ self.e


def bui(stream: Stream, iterations: int = 100) -> Callable[[Tensor], Latent]:
    """Trained on a stream."""
    model = Bui(stream, iterations)
    for X, Y in stream.pieces:
        model.learn(X, Y.squeeze(-1))
    return model.predict

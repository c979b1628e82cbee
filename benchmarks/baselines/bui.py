r"""Streaming sparse Gaussian process approximations (Bui, Nguyen and Turner, NeurIPS 2017).

All that is kept of the past is the posterior of the inducing values :math:`a`, relative to the
prior that it was found with: :math:`q(a) / p(a | \theta_{old}) \propto
\exp(e^T a - \tfrac12 a^T H a)`. With inducing values :math:`b` at new points, the bound on the
next piece of data is

.. math::
    E_q[\log p(y | f)] - \mathrm{KL}[q(b) \| p(b)] + E_q[e^T a - \tfrac12 a^T H a],

collapsed over :math:`q(b)` for a Gaussian likelihood. Everything is maximised together by L-BFGS.
Written in precisions rather than with the paper's :math:`D_a = H^{-1}`, which need not exist.

Two things keep it from diverging. The bound is unbounded above in the kernel's variance if
:math:`H` has a negative eigenvalue, which :math:`S^{-1} - K^{-1}` of a :math:`q(b)` that is not
quite optimal can have; so the last word on :math:`q(b)` is that of natural-gradient steps, after
which :math:`H` is a sum of positive terms. And an optimisation that ends nowhere, or lower than it
began, is taken back.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from botorch.optim.closures import ForwardBackwardClosure
from botorch.optim.core import scipy_minimize
from gpytorch.likelihoods import GaussianLikelihood
from linear_operator.utils.errors import NanError, NotPSDError
from torch import Tensor

from benchmarks.known_warnings import known_warnings
from benchmarks.streams import Latent, Stream
from seqgp.dual import Batch, Duals, converge, factorise
from seqgp.dual.linalg import scaled_cholesky
from seqgp.likelihoods.expectations import expectations, expected_log_prob

#: Relative to the kernel's variance.
JITTER = 1e-6

#: Of the inducing points, how many stay where they are when a piece arrives (``"mixed"``).
SHARE_OF_OLD = 0.7


class Bui:
    """A streaming sparse GP.

    Args:
        stream: Gives kernel, likelihood and initial inducing points.
        iterations: Of L-BFGS, for each piece. More make a piece's own hyperparameters and inducing
            points fit it better, and the stream often worse.
        placement: Where the inducing points start for each piece: ``"old"``, where they are;
            ``"mixed"``, 70 % of them there and the others at random new inputs, as in the authors'
            own experiments.
        learn: Whether hyperparameters and inducing points are learnt, or only ``q(b)``.
        natural: Whether ``q(b)``, if it is not known in closed form, begins and ends with
            natural-gradient steps; without, there is only L-BFGS, as published.
        seed: For mixed points.
    """

    def __init__(
        self,
        stream: Stream,
        iterations: int = 20,
        placement: str = "mixed",
        learn: bool = True,
        natural: bool = True,
        seed: int = 0,
    ) -> None:
        if placement not in ("old", "mixed"):
            raise ValueError(f"placement: expected old or mixed, got {placement!r}.")
        self.kernel, self.likelihood = stream.kernel(), stream.likelihood()
        self.iterations, self.placement = iterations, placement
        self.learns, self.natural = learn, natural
        self.generator = torch.Generator().manual_seed(seed)
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
        if self.learns and self.placement == "mixed":
            self._place(X)
        self._start(X, y)
        parameters = {}
        if self.learns:
            parameters["Z"] = self.Z
            parameters |= {f"kernel.{name}": p for name, p in self.kernel.named_parameters()}
            parameters |= {f"noise.{name}": p for name, p in self.likelihood.named_parameters()}
        if not self.collapsed:
            parameters |= {"mean": self.mean, "root": self.root}
        if parameters and self.iterations:
            self._maximise(X, y, parameters)
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
        square = a @ self.H @ a + (self.H * left_over).sum() + ((S @ self.H) * S).sum()
        return fit - kl + self.e @ a - 0.5 * square

    @torch.no_grad()
    def predict(self, X: Tensor) -> Latent:
        """Mean and variance of the function."""
        L, A, unexplained = self._whitened(X)
        factors = factorise(self._past(L))
        variance = torch.linalg.solve_triangular(factors.R, A, upper=False).square().sum(0)
        return Latent(A.mT @ factors.mean, unexplained + variance, self.likelihood)

    def _whitened(self, X: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """``chol(Kbb)``, ``L^-1 Kbx`` and the variance that ``b`` does not explain."""
        L = scaled_cholesky(self.kernel(self.Z).to_dense(), JITTER)
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
        return scaled_cholesky(W), A @ y / noise + A_old @ self.e

    def _past(self, L: Tensor) -> Duals:
        """What is kept of the past, for the inducing points of now."""
        A_old, _ = self._old(L)
        return Duals(A_old @ self.e, A_old @ self.H @ A_old.mT)

    @torch.no_grad()
    def _place(self, X: Tensor) -> None:
        """Some of the inducing points go to new inputs."""
        m = len(self.Z)
        new = X[torch.randperm(len(X), generator=self.generator)[: m - int(SHARE_OF_OLD * m)]]
        old = torch.randperm(m, generator=self.generator)[: m - len(new)]
        self.Z.copy_(torch.cat([self.Z[old], new]))

    @torch.no_grad()
    def _start(self, X: Tensor, y: Tensor) -> None:
        """``q(b)`` as the past alone has it, or as it is best at these hyperparameters."""
        if self.collapsed:
            return
        L, A, unexplained = self._whitened(X)
        past = self._past(L)
        duals = past
        if self.natural:
            duals = self._natural_gradient(past, past, A, unexplained, y)
        R, mean = factorise(duals)
        covariance = torch.cholesky_inverse(R)
        self.root.copy_(torch.linalg.cholesky(0.5 * (covariance + covariance.mT)))
        self.mean.copy_(mean)

    def _natural_gradient(
        self, start: Duals, past: Duals, A: Tensor, unexplained: Tensor, y: Tensor
    ) -> Duals:
        """The best ``q(b)`` at fixed hyperparameters."""
        batch = Batch(
            A,
            unexplained,
            torch.zeros_like(unexplained),
            lambda mean, variance: expectations(self.likelihood, y, mean, variance),
        )
        with known_warnings():
            return converge(start, lambda: [batch], past, tol=1e-4, max_steps=30)[0]

    def _maximise(self, X: Tensor, y: Tensor, parameters: dict[str, Tensor]) -> None:
        """The bound, by L-BFGS."""
        before = {name: p.detach().clone() for name, p in parameters.items()}
        with torch.no_grad():
            first = -self.bound(X, y)
        worst = (first.abs() + 1) * 2

        def loss() -> Tensor:
            nonlocal worst
            try:
                value = -self.bound(X, y)
            except (NanError, NotPSDError, ValueError, FloatingPointError):
                value = worst * float("nan")
            if not math.isfinite(value.detach()):  # the line search turns back
                return worst + torch.stack([0.0 * p.sum() for p in parameters.values()]).sum()
            worst = torch.maximum(worst, (value.detach().abs() + 1) * 2)
            return value

        closure = ForwardBackwardClosure(loss, parameters)
        scipy_minimize(closure, parameters, options={"maxiter": self.iterations})
        with torch.no_grad():
            last = loss()
            if not (math.isfinite(last) and last <= first):
                for name, value in before.items():
                    parameters[name].copy_(value)

    @torch.no_grad()
    def _keep(self, X: Tensor, y: Tensor) -> None:
        """Turn ``q(b)`` into what is kept of the past."""
        L, A, unexplained = self._whitened(X)
        past = self._past(L)
        if self.collapsed:
            noise = self.likelihood.noise
            duals = Duals(past.lam + A @ y / noise, past.B + A @ A.mT / noise)
        else:
            W = torch.cholesky_inverse(self.root.tril())
            eye = torch.eye(len(W), dtype=W.dtype)
            duals = Duals(W @ self.mean, W - eye)
            if self.natural:
                duals = self._natural_gradient(duals, past, A, unexplained, y)
        inverse = torch.linalg.inv(L)
        H = inverse.mT @ duals.B @ inverse
        self.H, self.e = 0.5 * (H + H.mT), inverse.mT @ duals.lam
        self.old_Z = self.Z.detach().clone()


def steps(stream: Stream, **options: Any) -> Iterator[Bui]:
    """The model after each piece; options as for `Bui`."""
    model = Bui(stream, **options)
    for X, Y in stream.pieces:
        model.learn(X, Y.squeeze(-1))
        yield model


def bui(stream: Stream, **options: Any) -> Callable[[Tensor], Latent]:
    """Trained on a stream; options as for `Bui`."""
    *_, model = steps(stream, **options)
    return model.predict

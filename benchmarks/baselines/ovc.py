r"""Online variational conditioning (Maddox, Stanton and Wilson, NeurIPS 2021).

A variational posterior :math:`q(u)` is exact inference with pseudo-observations of :math:`u`. Add
the new observations to these, and condition: GPyTorch's ``get_fantasy_model`` for a Gaussian
likelihood. Other likelihoods are replaced by Gaussian ones around the mode of the new function
values (Laplace): with :math:`g = \nabla \log p(y | \hat f)` and :math:`w = - \nabla^2 \log p(y |
\hat f)`, pseudo-targets :math:`\hat f + g / w` with noise :math:`1 / w`. Hyperparameters and
inducing points are fixed.

There the model grows with each observation. For a stream of constant cost the conditioned process
is read off at the inducing points, which gives the next :math:`q(u)`. In the whitened basis, with
:math:`q(v) = N(W^{-1} h, W^{-1})` and :math:`A = L^{-1} K_{zx}`,

.. math::
    W \leftarrow W + A P A^T, \qquad h \leftarrow h + A P \hat y, \qquad
    P = (K_{xx} - A^T A + \Sigma)^{-1}.

Unlike in a variational update, the variance that inducing points leave unexplained counts as noise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from gpytorch.kernels import Kernel
from gpytorch.likelihoods import GaussianLikelihood, Likelihood
from torch import Tensor

from benchmarks.baselines.ours import fitted_to
from benchmarks.streams import Latent, Stream
from seqgp.dual import Duals, add, factorise
from seqgp.dual.linalg import relative_jitter, scaled_cholesky, solve_lower
from seqgp.likelihoods.expectations import conditional_log_prob


class PseudoData(NamedTuple):
    """Gaussian observations, ``n`` targets and ``n`` noise variances."""

    targets: Tensor
    noise: Tensor


class OVC:
    """A variational GP that is conditioned on pieces of data.

    Args:
        Z: ``m x d`` inducing points.
        kernel: The kernel.
        likelihood: Any likelihood of one latent function that is log-concave.
        duals: Of the variational posterior to start from; by default the prior.
    """

    def __init__(
        self, Z: Tensor, kernel: Kernel, likelihood: Likelihood, duals: Duals | None = None
    ) -> None:
        self.Z, self.kernel, self.likelihood = Z.detach(), kernel, likelihood
        m = len(Z)
        self.duals = Duals(Z.new_zeros(m), Z.new_zeros(m, m)) if duals is None else duals
        with torch.no_grad():
            self.chol = scaled_cholesky(kernel(self.Z).to_dense(), relative_jitter(Z.dtype))

    @torch.no_grad()
    def condition(self, X: Tensor, y: Tensor) -> PseudoData:
        """One piece of data, ``n x d`` and ``n``; returns the Gaussian data it was replaced by."""
        A = self._whitened(X)
        unexplained = self.kernel(X).to_dense() - A.mT @ A
        if isinstance(self.likelihood, GaussianLikelihood):
            data = PseudoData(y, self.likelihood.noise.expand_as(y))
        else:
            R, v = factorise(self.duals)
            spread = solve_lower(R, A)
            data = laplace(self.likelihood, y, A.mT @ v, unexplained + spread.mT @ spread)
        root = scaled_cholesky(unexplained + data.noise.diag())
        half, z = solve_lower(root, A.mT), solve_lower(root, data.targets.unsqueeze(-1))
        self.duals = add(self.duals, Duals((half.mT @ z).squeeze(-1), half.mT @ half))
        return data

    @torch.no_grad()
    def predict(self, X: Tensor) -> Latent:
        """Mean and variance of the function."""
        A, (R, v) = self._whitened(X), factorise(self.duals)
        unexplained = (self.kernel(X, diag=True) - A.square().sum(0)).clamp_min(0)
        variance = unexplained + solve_lower(R, A).square().sum(0)
        return Latent(A.mT @ v, variance, self.likelihood)

    def _whitened(self, X: Tensor) -> Tensor:
        """``L^-1 Kzx``."""
        return solve_lower(self.chol, self.kernel(self.Z, X).to_dense())


def laplace(
    likelihood: Likelihood,
    y: Tensor,
    mean: Tensor,
    covariance: Tensor,
    tol: float = 1e-10,
    max_steps: int = 50,
) -> PseudoData:
    r"""The Gaussian data that stand for others, at the mode of :math:`p(y | f) N(f; m, C)`.

    Newton's method with steps that are halved until the density rises, in a form that inverts
    neither ``C`` nor the curvature.

    Args:
        likelihood: A log-concave likelihood of one latent function.
        y: ``n`` targets.
        mean: ``n`` prior means.
        covariance: ``n x n`` prior covariance.
        tol: Change of the log density at which to stop.
        max_steps: Newton steps at which to stop.
    """
    a = torch.zeros_like(mean)  # C^-1 (f - m)
    f = mean
    density = conditional_log_prob(likelihood, y, f).sum()
    for _ in range(max_steps):
        slope, curvature = _derivatives(likelihood, y, f)
        root = curvature.sqrt()
        B = torch.eye(len(y), dtype=y.dtype) + root.unsqueeze(-1) * covariance * root
        b = curvature * (f - mean) + slope
        chol = torch.linalg.cholesky(B)
        inner = torch.cholesky_solve((root * (covariance @ b)).unsqueeze(-1), chol).squeeze(-1)
        step = b - root * inner - a
        size = 1.0
        while size > 1e-6:
            trial = a + size * step
            trial_f = mean + covariance @ trial
            value = conditional_log_prob(likelihood, y, trial_f).sum() - 0.5 * trial @ (
                trial_f - mean
            )
            if value >= density:
                break
            size /= 2
        else:
            break
        gain, a, f, density = value - density, trial, trial_f, value
        if gain < tol * (1 + abs(float(density))):
            break
    slope, curvature = _derivatives(likelihood, y, f)
    return PseudoData(f + slope / curvature, 1 / curvature)


def _derivatives(likelihood: Likelihood, y: Tensor, f: Tensor) -> tuple[Tensor, Tensor]:
    """Gradient and negative curvature of the log likelihood, the latter positive."""
    with torch.enable_grad():
        f = f.detach().requires_grad_(True)
        value = conditional_log_prob(likelihood, y, f).sum()
        (slope,) = torch.autograd.grad(value, f, create_graph=True)
        (second,) = torch.autograd.grad(slope.sum(), f)
    return slope.detach(), (-second).clamp_min(1e-10)


def steps(stream: Stream, learn: bool = True) -> Iterator[OVC]:
    """The model after each piece: a variational GP of the first, conditioned on the others.

    Args:
        stream: The data.
        learn: Whether that variational GP learns hyperparameters. Inducing points stay where they
            are: those that are best for the first piece are not for the others.
    """
    first = fitted_to(stream, *stream.pieces[0], learn=learn, learn_inducing_points=False)
    strategy = first.variational_strategy
    model = OVC(
        strategy.inducing_points,
        first.covar_module,
        first.likelihood,
        Duals(*(part.detach() for part in strategy.duals)),
    )
    yield model
    for X, Y in stream.pieces[1:]:
        model.condition(X, Y.squeeze(-1))
        yield model


def ovc(stream: Stream, learn: bool = True) -> Callable[[Tensor], Latent]:
    """Trained on a stream."""
    *_, model = steps(stream, learn)
    return model.predict

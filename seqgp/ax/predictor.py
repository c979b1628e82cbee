r"""Fast predictions of a model that does not change.

An acquisition function is evaluated many times with the same model. Everything that depends on the
model alone is computed once:

.. math::
    A_x = L^{-1} k(Z, x), \qquad E[f_x] = \mu(x) + A_x^T \bar v, \qquad
    \operatorname{Cov}[f_x, f_y] = k(x, y) - A_x^T A_y + (R^{-1} A_x)^T R^{-1} A_y,

with :math:`L L^T = K_{zz}`, and :math:`q(v) = N(\bar v, (R R^T)^{-1})` the whitened posterior.

Noisy expected improvement needs the joint posterior of each candidate and all good points so far,
of which there may be hundreds in an experiment that has converged. Whatever depends on these points
alone is computed once, not once per candidate.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from gpytorch.distributions import MultivariateNormal
from linear_operator import to_dense
from torch import Tensor

from seqgp.dual import solve_lower
from seqgp.variational.linear_operators import BorderedCovariance

if TYPE_CHECKING:
    from seqgp.models.sequential_gp import SequentialGP


class Predictor:
    """Predictions of a model as it is now. Later changes of the model have no effect.

    Rows that are training inputs of the model and the same in the whole batch are treated as
    constants: a gradient with respect to them is that of the batch, not of its members.

    Args:
        model: A model of one output, one latent function and no batch shape, not conditioned.

    Example:
        >>> from seqgp import SequentialGP
        >>> X = torch.linspace(0, 1, 20, dtype=torch.double).unsqueeze(-1)
        >>> model = SequentialGP(X, 2**0.5 * torch.sin(12.6 * X)).eval()
        >>> predict, x = Predictor(model), torch.rand(5, 2, 1, dtype=torch.double)
        >>> torch.allclose(predict(x).covariance_matrix, model(x).covariance_matrix)
        True
    """

    def __init__(self, model: SequentialGP) -> None:
        strategy = model.variational_strategy
        with torch.no_grad():
            state = strategy.state()
        self.kernel, self.mean = model.covar_module, model.mean_module
        self.Z = strategy.inducing_points.detach()
        self.chol, self.R = state.chol.detach(), state.factors.R.detach()
        self.whitened_mean = state.factors.mean.detach()
        self.jitter = strategy.jitter_val
        self.known = model.training_data()[0].detach()

    def __call__(self, X: Tensor, num_common: int | None = None) -> MultivariateNormal:
        """``q(f)`` at inputs ``... x n x d``.

        Args:
            X: The inputs, transformed.
            num_common: The result of `num_common` for these inputs, if known.
        """
        k = self.num_common(X) if num_common is None else num_common
        mean, explained, left = self._features(X[..., k:, :])
        own = self._covariance(X[..., k:, :], explained, left)
        if not k:
            return MultivariateNormal(mean, own)
        *batch, q, m = explained.shape
        common = X.reshape(-1, *X.shape[-2:])[0, :k]
        common_mean, common_explained, common_left = self._features(common)
        prior = to_dense(self.kernel(X[..., k:, :].reshape(-1, X.shape[-1]), common))
        cross = prior - explained.reshape(-1, m) @ common_explained.mT
        cross = cross + left.reshape(-1, m) @ common_left.mT
        covariance = BorderedCovariance(
            self._covariance(common, common_explained, common_left),
            cross.reshape(*batch, q, k),
            own,
        )
        return MultivariateNormal(torch.cat([common_mean.expand(*batch, k), mean], -1), covariance)

    def num_common(self, X: Tensor) -> int:
        """The number of leading inputs that are training inputs and the same in the whole batch.

        Args:
            X: ``... x n x d`` inputs.
        """
        if X.dim() == 2 or X.numel() == 0 or X.shape[:-2].numel() == 1:
            return 0
        members = X.detach().reshape(-1, *X.shape[-2:])
        same = (members == members[0]).all(-1).all(0)
        number = min(int(same.cumprod(0).sum()), X.shape[-2] - 1)
        known = (members[0, :number].unsqueeze(-2) == self.known).all(-1).any(-1)
        return int(known.cumprod(0).sum())

    def _features(self, X: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Means ``... x n``, and ``A_x`` and ``R^-1 A_x`` as rows, ``... x n x m``."""
        *batch, n, d = X.shape
        A = solve_lower(self.chol, to_dense(self.kernel(self.Z, X.reshape(-1, d))))  # m x (... n)
        mean = self.mean(X) + (A.mT @ self.whitened_mean).reshape(*batch, n)
        m = len(self.Z)
        both = torch.cat([A, solve_lower(self.R, A)]).mT.reshape(*batch, n, 2 * m)
        return mean, both[..., :m], both[..., m:]

    def _covariance(self, X: Tensor, explained: Tensor, left: Tensor) -> Tensor:
        """``... x n x n``."""
        prior = to_dense(self.kernel(X))
        jitter = torch.diag_embed(self.jitter * prior.diagonal(dim1=-2, dim2=-1))
        return prior + jitter - explained @ explained.mT + left @ left.mT

r"""Predictions of a model that does not change any more, as fast as tensors allow.

An acquisition function is evaluated a hundred times with the same model. What depends on the model
alone is taken from it once:

.. math::
    A_x = L^{-1} k(Z, x), \qquad E[f_x] = \mu(x) + A_x^T \bar v, \qquad
    \operatorname{Cov}[f_x, f_y] = k(x, y) - A_x^T A_y + (R^{-1} A_x)^T R^{-1} A_y,

with :math:`L L^T = K_{zz}`, and :math:`q(v) = N(\bar v, (R R^T)^{-1})` the whitened posterior.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from gpytorch.distributions import MultivariateNormal
from linear_operator import to_dense
from torch import Tensor

from seqgp.dual import solve_lower

if TYPE_CHECKING:
    from seqgp.model import SequentialGP


class Predictor:
    """A model as it is now; later changes of it are not seen.

    Args:
        model: A model of one output, one latent function and no batch shape, not conditioned.

    Example:
        >>> from seqgp import SequentialGP
        >>> X = torch.linspace(0, 1, 20, dtype=torch.double).unsqueeze(-1)
        >>> model = SequentialGP(X, 2**0.5 * torch.sin(12.6 * X))
        >>> predict, x = Predictor(model), torch.rand(5, 2, 1, dtype=torch.double)
        >>> torch.allclose(predict(x).covariance_matrix, model(x).covariance_matrix)
        True
    """

    def __init__(self, model: SequentialGP) -> None:
        strategy = model.variational_strategy
        with torch.no_grad():
            state = strategy._state()
        self.kernel, self.mean = model.covar_module, model.mean_module
        self.Z = strategy.inducing_points.detach()
        self.chol, self.R = state.chol.detach(), state.factors.R.detach()
        self.whitened_mean = state.factors.mean.detach()
        self.jitter = strategy.jitter_val

    def __call__(self, X: Tensor) -> MultivariateNormal:
        """``q(f)`` at inputs ``... x n x d``.

        Args:
            X: The inputs, transformed.
        """
        *batch, n, d = X.shape
        cross = to_dense(self.kernel(self.Z, X.reshape(-1, d)))  # m x (... n)
        A = solve_lower(self.chol, cross)
        mean = self.mean(X) + (A.mT @ self.whitened_mean).reshape(*batch, n)
        m = len(self.Z)
        both = torch.cat([A, solve_lower(self.R, A)]).mT.reshape(*batch, n, 2 * m)
        explained, left = both[..., :m], both[..., m:]
        prior = to_dense(self.kernel(X))
        jitter = torch.diag_embed(self.jitter * prior.diagonal(dim1=-2, dim2=-1))
        return MultivariateNormal(mean, prior + jitter - explained @ explained.mT + left @ left.mT)

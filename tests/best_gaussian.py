"""The Gaussian that maximises the evidence lower bound, found from scratch: an oracle."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def best_gaussian(
    K: Tensor, expected_log_prob: Callable[[Tensor, Tensor], Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Maximise the bound over mean and covariance by L-BFGS, without sites.

    Whitened, ``f = R u`` with ``R R^T = K``: this is well conditioned, and the prior of ``u`` is
    standard.

    Args:
        K: ``n x n`` prior covariance. The prior mean is zero.
        expected_log_prob: Of the data, under ``N(mean, root root^T)``, given ``n`` means and the
            ``n x n`` root.

    Returns:
        ``n`` means, ``n x n`` covariances, and the bound.
    """
    n, R = len(K), torch.linalg.cholesky(K)
    mean, root = torch.zeros(n, requires_grad=True), torch.eye(n, requires_grad=True)
    optimizer = torch.optim.LBFGS(
        [mean, root],
        max_iter=500,
        tolerance_grad=1e-10,
        tolerance_change=1e-15,
        line_search_fn="strong_wolfe",
    )

    def loss() -> Tensor:
        optimizer.zero_grad()
        L = root.tril()
        kl = 0.5 * (L.square().sum() + mean.square().sum() - n) - L.diagonal().abs().log().sum()
        value = kl - expected_log_prob(R @ mean, R @ L)
        value.backward()
        return value

    optimizer.step(loss)
    bound = -loss().detach()
    L = (R @ root.tril()).detach()
    return R @ mean.detach(), L @ L.T, bound

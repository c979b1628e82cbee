"""Greedy choice of inducing points from many inputs, with memory linear in their number."""

from __future__ import annotations

import torch
from botorch.models.utils.inducing_point_allocators import GreedyVarianceReduction
from gpytorch.kernels import Kernel
from linear_operator import to_dense
from torch import Tensor

from seqgp.variational.stationary import covariance_function

#: The maximum number of inputs to choose among. If there are more, a random subset is used.
MAX_CANDIDATES = 100_000


class GreedyAllocator(GreedyVarianceReduction):
    r"""Choose the inputs with the largest variance given those chosen before.

    This is BoTorch's `GreedyVarianceReduction`, which evaluates the covariances of all :math:`n`
    inputs: 80 GB for :math:`n = 10^5`. A pivoted Cholesky factorisation only needs the rows
    :math:`k_i` of its pivots,

    .. math:: L_i = (k_i - L_{<i, i}^T L_{<i}) / \sqrt{v_i}, \qquad v \leftarrow v - L_i^2,

    where :math:`v` are the remaining variances. So :math:`m` points take :math:`O(n m)` memory and
    :math:`O(n m^2)` time.

    Example:
        >>> X = torch.rand(500, 2, dtype=torch.double)
        >>> from gpytorch.kernels import RBFKernel
        >>> kernel = RBFKernel().double()
        >>> GreedyAllocator().allocate_inducing_points(X, kernel, 10, torch.Size()).shape
        torch.Size([10, 2])
    """

    @torch.no_grad()
    def allocate_inducing_points(
        self,
        inputs: Tensor,
        covar_module: Kernel,
        num_inducing: int,
        input_batch_shape: torch.Size,
        epsilon: float = 1e-6,
    ) -> Tensor:
        """Choose inducing points among the inputs of one model.

        Args:
            inputs: ``n x d`` inputs. Batches are left to BoTorch.
            covar_module: The kernel.
            num_inducing: The maximum number of inducing points.
            input_batch_shape: The batch shape of the inputs.
            epsilon: Stop when the largest remaining variance is less than this.

        Returns:
            ``m x d`` inducing points, at most ``num_inducing``.
        """
        if inputs.dim() != 2 or covar_module.batch_shape:
            return super().allocate_inducing_points(
                inputs, covar_module, num_inducing, input_batch_shape
            )
        if len(inputs) > MAX_CANDIDATES:  # the subset does not depend on the global random state
            generator = torch.Generator().manual_seed(0)
            drawn = torch.randperm(len(inputs), generator=generator, device="cpu")
            inputs = inputs[drawn[:MAX_CANDIDATES].to(inputs.device)]
        left = to_dense(covar_module(inputs, diag=True)).clone()
        rows = left.new_empty(num_inducing, len(inputs))
        pivots: list[int] = []
        covariances = covariance_function(covar_module)
        for i in range(min(num_inducing, len(inputs))):
            pivot = int(left.argmax())
            if pivots and float(left[pivot]) < epsilon:
                break
            row = covariances(inputs[pivot : pivot + 1], inputs).squeeze(-2)
            rows[i] = (row - rows[:i, pivot] @ rows[:i]) / left[pivot].sqrt()
            left = left - rows[i].square()
            left[pivot] = -torch.inf
            pivots.append(pivot)
        return inputs[pivots]

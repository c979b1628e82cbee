"""Lazy covariances of posteriors, with shared parts."""

from __future__ import annotations

from typing import Any

import torch
from linear_operator import LinearOperator, to_dense, to_linear_operator
from linear_operator.operators import DiagLinearOperator
from linear_operator.utils.getitem import _noop_index
from torch import Tensor

from seqgp.dual.linalg import broadcast_shapes


class PosteriorCovariance(LinearOperator):
    r""":math:`K - A^T E + \operatorname{diag}(\epsilon) - C^T S C`, each with its own batch shape.

    GPyTorch's sums of operators expand all their terms to a common batch shape. Here the terms
    that fantasies share are evaluated once, and only results are expanded.

    Args:
        prior: ``... x n x n`` prior covariance ``K``.
        A: ``... x m x n`` whitened cross-covariance.
        explained: ``... x m x n``, ``E = (I - W^-1) A``.
        jitter: ``... x n``.
        reduction: ``... x r x n``, the effect of observations outside of Z; ``r`` may be zero.
        sign: ``r x 1``, the diagonal of ``S``: 1 where the covariance falls, -1 where it grows.
        batch_shape: The batch shape of the result, if it is larger than those of the terms.
    """

    def __init__(
        self,
        prior: LinearOperator,
        A: Tensor,
        explained: Tensor,
        jitter: Tensor,
        reduction: Tensor,
        sign: Tensor,
        batch_shape: torch.Size | None = None,
    ) -> None:
        batch_shape = broadcast_shapes(
            batch_shape or (),
            prior.shape[:-2],
            A.shape[:-2],
            explained.shape[:-2],
            jitter.shape[:-1],
            reduction.shape[:-2],
        )
        super().__init__(prior, A, explained, jitter, reduction, sign, batch_shape=batch_shape)
        self.prior, self.A, self.explained = prior, A, explained
        self.jitter, self.reduction, self.sign = jitter, reduction, sign
        self._full_batch_shape = batch_shape
        self._full_size = torch.Size([*batch_shape, *prior.shape[-2:]])

    def _size(self) -> torch.Size:
        return self._full_size

    def __add__(self, other: Any) -> LinearOperator:
        """Add a diagonal, such as independent noise, to the jitter."""
        if not isinstance(other, DiagLinearOperator):
            return super().__add__(other)
        jitter = self.jitter + other.diagonal(dim1=-1, dim2=-2)
        terms = (self.prior, self.A, self.explained, jitter, self.reduction, self.sign)
        return PosteriorCovariance(*terms, batch_shape=self._full_batch_shape)

    def _transpose_nonbatch(self) -> LinearOperator:
        # The value is symmetric, but the derivatives with respect to A and E are not.
        terms = (self.prior.mT, self.explained, self.A, self.jitter, self.reduction, self.sign)
        return PosteriorCovariance(*terms, batch_shape=self._full_batch_shape)

    def _diagonal(self) -> Tensor:
        prior = self.prior.diagonal(dim1=-1, dim2=-2)
        value = prior + self.jitter - (self.A * self.explained).sum(-2)
        return (value - (self.sign * self.reduction.square()).sum(-2)).expand(self.shape[:-1])

    def to_dense(self) -> Tensor:
        """Return the ``... x n x n`` matrix."""
        value = to_dense(self.prior) + torch.diag_embed(self.jitter) - self.A.mT @ self.explained
        return (value - self.reduction.mT @ (self.sign * self.reduction)).expand(self.shape)

    def _matmul(self, rhs: Tensor) -> Tensor:
        vector = rhs.dim() == 1
        rhs = rhs.unsqueeze(-1) if vector else rhs
        product = self.prior @ rhs + self.jitter.unsqueeze(-1) * rhs
        product = product - self.A.mT @ (self.explained @ rhs)
        product = product - self.reduction.mT @ (self.sign * (self.reduction @ rhs))
        product = product.expand(*broadcast_shapes(self.batch_shape, rhs.shape[:-2]), -1, -1)
        return product.squeeze(-1) if vector else product

    def _expand_batch(self, batch_shape: torch.Size | list[int]) -> LinearOperator:
        terms = (self.prior, self.A, self.explained, self.jitter, self.reduction, self.sign)
        return PosteriorCovariance(*terms, batch_shape=torch.Size(batch_shape))

    # Operations that rearrange batches or pick elements need terms of one common batch shape. A sum
    # of lazy terms would not save work: each would be indexed through a sparse interpolation.

    def _written_out(self) -> LinearOperator:
        return to_linear_operator(self.to_dense())

    def _getitem(self, row_index: Any, col_index: Any, *batch_indices: Any) -> LinearOperator:
        if row_index is _noop_index and col_index is _noop_index and not batch_indices:
            return self
        return self._written_out()._getitem(row_index, col_index, *batch_indices)

    def _get_indices(self, row_index: Any, col_index: Any, *batch_indices: Any) -> Tensor:
        return self._written_out()._get_indices(row_index, col_index, *batch_indices)

    def _unsqueeze_batch(self, dim: int) -> LinearOperator:
        return self._written_out()._unsqueeze_batch(dim)

    def _permute_batch(self, *dims: int) -> LinearOperator:
        if dims == tuple(range(len(dims))):
            return self
        return self._written_out()._permute_batch(*dims)

    def repeat(self, *sizes: Any) -> LinearOperator:
        """Repeat along batch dimensions, as in `torch.Tensor.repeat`."""
        return self._written_out().repeat(*sizes)


class BorderedCovariance(LinearOperator):
    r""":math:`\begin{pmatrix} K & B^T \\ B & C \end{pmatrix}`, with one ``K`` for a whole batch.

    Acquisition functions evaluate the joint posterior of a few candidates and of many points that
    are the same for all batches of candidates, and then select the rows of the candidates. These
    rows are available without the others.

    Args:
        common: ``k x k`` covariance of the points that all batches share.
        cross: ``... x q x k`` covariance of the candidates with these.
        own: ``... x q x q`` covariance of the candidates.
    """

    def __init__(self, common: Tensor, cross: Tensor, own: Tensor) -> None:
        super().__init__(common, cross, own)
        self.common, self.cross, self.own = common, cross, own

    def _size(self) -> torch.Size:
        n = self.common.shape[-1] + self.own.shape[-1]
        return torch.Size([*self.own.shape[:-2], n, n])

    def _transpose_nonbatch(self) -> LinearOperator:
        return BorderedCovariance(self.common.mT, self.cross, self.own.mT)

    def _rows(self) -> Tensor:
        """Return the last ``q`` rows, ``... x q x (k + q)``."""
        return torch.cat([self.cross, self.own], -1)

    def to_dense(self) -> Tensor:
        """Return the ``... x (k + q) x (k + q)`` matrix."""
        common = self.common.expand(*self.batch_shape, *self.common.shape[-2:])
        return torch.cat([torch.cat([common, self.cross.mT], -1), self._rows()], -2)

    def _diagonal(self) -> Tensor:
        common = self.common.diagonal().expand(*self.batch_shape, -1)
        return torch.cat([common, self.own.diagonal(dim1=-2, dim2=-1)], -1)

    def _matmul(self, rhs: Tensor) -> Tensor:
        return self.to_dense() @ rhs

    def _expand_batch(self, batch_shape: torch.Size | list[int]) -> LinearOperator:
        cross, own = (
            part.expand(*batch_shape, *part.shape[-2:]) for part in (self.cross, self.own)
        )
        return BorderedCovariance(self.common, cross, own)

    def _getitem(self, row_index: Any, col_index: Any, *batch_indices: Any) -> LinearOperator:
        k = self.common.shape[-1]
        rows = range(self.shape[-2])[row_index] if isinstance(row_index, slice) else range(0)
        if len(rows) and rows.start >= k and rows.step > 0:
            row_index = slice(rows.start - k, rows.stop - k, rows.step)
            return to_linear_operator(self._rows())._getitem(row_index, col_index, *batch_indices)
        whole = to_linear_operator(self.to_dense())
        return whole._getitem(row_index, col_index, *batch_indices)

    def _get_indices(self, row_index: Any, col_index: Any, *batch_indices: Any) -> Tensor:
        return to_linear_operator(self.to_dense())._get_indices(
            row_index, col_index, *batch_indices
        )

    def _unsqueeze_batch(self, dim: int) -> LinearOperator:
        return BorderedCovariance(self.common, self.cross.unsqueeze(dim), self.own.unsqueeze(dim))

    def _permute_batch(self, *dims: int) -> LinearOperator:
        order = (*dims, len(dims), len(dims) + 1)
        return BorderedCovariance(self.common, self.cross.permute(order), self.own.permute(order))

    def repeat(self, *sizes: Any) -> LinearOperator:
        """Repeat along batch dimensions, as in `torch.Tensor.repeat`."""
        return to_linear_operator(self.to_dense()).repeat(*sizes)

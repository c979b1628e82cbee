r"""Covariance matrices of the usual stationary kernels, with closed-form derivatives.

Learning evaluates a bound and its derivatives many times, and autograd through a kernel makes about
twenty passes over all covariances. Let inputs be divided by the lengthscales and multiplied by a
factor that depends on the kernel, and let :math:`s = |x - x'|^2`. Then RBF and Matérn kernels are
functions :math:`k(s)`, and

.. math::
    \partial_{x} k = 2 k'(s) (x - x').

So derivatives only need one more matrix, :math:`k'`. GPyTorch's own functions of this kind leave
the derivatives with respect to inputs to autograd. Temporary matrices cost more than arithmetic, so
most of it is done in place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from gpytorch.kernels import Kernel, MaternKernel, RBFKernel, ScaleKernel
from linear_operator import LinearOperator, to_dense
from torch import Tensor

from seqgp.dual.linalg import broadcast_shapes


class Profile(NamedTuple):
    """A kind of kernel, as a function of scaled squared distances.

    Attributes:
        unit: Inputs are multiplied by this, in addition to the division by the lengthscales.
        factor: The derivative is this times the second result of `evaluate`.
        evaluate: Maps squared distances, which it may overwrite, and the prior variance to
            covariances and to their derivatives up to ``factor``.
    """

    unit: float
    factor: float
    evaluate: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


class Stationary(NamedTuple):
    """A kernel whose covariances are a scale times a function of the scaled squared distance.

    Attributes:
        lengthscale: ``1 x d`` or ``1 x 1``.
        scale: The prior variance, a scalar; ``None`` for one.
        profile: The function.
    """

    lengthscale: Tensor
    scale: Tensor | None
    profile: Profile

    def matrix(self, left: Tensor, right: Tensor) -> Tensor:
        """Return ``... x p x n`` covariances at ``... x p x d`` and ``... x n x d`` inputs."""
        # Centre the inputs, since small numbers have small rounding errors. A shard may be empty.
        centre = (right if right.shape[-2] else left).detach().mean(-2, keepdim=True)
        unit = self.lengthscale / self.profile.unit
        scaled = ((x - centre) / unit for x in (left, right))
        scale = left.new_ones(()) if self.scale is None else self.scale
        if torch.is_grad_enabled():
            return _Covariances.apply(*scaled, scale, self.profile)
        return self.profile.evaluate(_squared_distances(*scaled), scale)[0]

    def pairwise(self, left: Tensor, right: Tensor) -> Tensor:
        """``...`` covariances of values at ``... x d`` inputs with those at as many others."""
        lengthscale = self.lengthscale.squeeze(-2) / self.profile.unit
        square = ((left - right) / lengthscale).square().sum(-1)
        scale = left.new_ones(()) if self.scale is None else self.scale
        return self.profile.evaluate(square, scale)[0]

    def variance(self, inputs: Tensor) -> Tensor:
        """Return the ``... x n`` prior variances at ``... x n x d`` inputs."""
        one = inputs.new_ones(()) if self.scale is None else self.scale
        return one.expand(inputs.shape[:-1])

    def covariance(self, inputs: Tensor) -> StationaryCovariance:
        """Return the lazy covariance at ``... x n x d`` inputs, at present hyperparameters."""
        lengthscale, scale, profile = self
        one = inputs.new_ones(()) if scale is None else scale
        return StationaryCovariance(inputs, inputs, lengthscale.detach(), one.detach(), profile)


class StationaryCovariance(LinearOperator):
    """Covariances of values at two sets of inputs, evaluated when they are needed.

    Args:
        left: ``... x p x d`` inputs.
        right: ``... x n x d`` inputs.
        lengthscale: As for `Stationary`.
        scale: The prior variance.
        profile: See `Stationary`.
    """

    def __init__(
        self, left: Tensor, right: Tensor, lengthscale: Tensor, scale: Tensor, profile: Profile
    ) -> None:
        super().__init__(left, right, lengthscale, scale, profile=profile)
        self.left, self.right = left, right
        self.kernel = Stationary(lengthscale, scale, profile)
        batch_shape = broadcast_shapes(left.shape[:-2], right.shape[:-2])
        self._full_size = torch.Size([*batch_shape, left.shape[-2], right.shape[-2]])

    def _between(self, left: Tensor, right: Tensor) -> StationaryCovariance:
        lengthscale, scale, profile = self.kernel
        assert scale is not None
        return StationaryCovariance(left, right, lengthscale, scale, profile)

    def _size(self) -> torch.Size:
        return self._full_size

    def _transpose_nonbatch(self) -> LinearOperator:
        return self._between(self.right, self.left)

    def _diagonal(self) -> Tensor:
        if self.left is self.right:
            return self.kernel.variance(self.left)
        return self.kernel.pairwise(self.left, self.right)

    def to_dense(self) -> Tensor:
        """The ``... x p x n`` matrix."""
        return self.kernel.matrix(self.left, self.right)

    def _matmul(self, rhs: Tensor) -> Tensor:
        return self.to_dense() @ rhs

    def _expand_batch(self, batch_shape: torch.Size | list[int]) -> LinearOperator:
        return self._between(*(x.expand(*batch_shape, *x.shape[-2:]) for x in self._inputs()))

    def _getitem(self, row_index: Any, col_index: Any, *batch_indices: Any) -> LinearOperator:
        if not (isinstance(row_index, slice) and isinstance(col_index, slice)):
            return super()._getitem(row_index, col_index, *batch_indices)
        left, right = self._inputs()
        return self._between(left[(*batch_indices, row_index)], right[(*batch_indices, col_index)])

    def _get_indices(self, row_index: Tensor, col_index: Tensor, *batch_indices: Tensor) -> Tensor:
        left, right = self._inputs()
        return self.kernel.pairwise(
            left[(*batch_indices, row_index)], right[(*batch_indices, col_index)]
        )

    def _inputs(self) -> tuple[Tensor, Tensor]:
        """Both sets of inputs, with the batch shape of the matrix."""
        left, right = (x.expand(*self.batch_shape, *x.shape[-2:]) for x in (self.left, self.right))
        return left, right


def stationary(kernel: Kernel) -> Stationary | None:
    """Return the closed form of a kernel, if it has one, else ``None``.

    Args:
        kernel: An `RBFKernel` or a differentiable `MaternKernel`, in a `ScaleKernel` or not, for
            all inputs and without a batch shape. Subclasses have none, since they may differ.
    """
    scale = None
    if type(kernel) is ScaleKernel and kernel.active_dims is None:
        scale, kernel = kernel.outputscale, kernel.base_kernel
    profile = None
    if type(kernel) is RBFKernel:
        profile = _RBF
    elif type(kernel) is MaternKernel:
        profile = {1.5: _MATERN_3_2, 2.5: _MATERN_5_2}.get(kernel.nu)
    if profile is None or kernel.active_dims is not None:
        return None
    lengthscale = kernel.lengthscale
    if lengthscale.dim() > 2 or (scale is not None and scale.dim()):  # a batch of kernels
        return None
    return Stationary(lengthscale, scale, profile)


def prior_variance(kernel: Kernel, inputs: Tensor) -> Tensor:
    """Return the ``... x n`` prior variances of any kernel at ``... x n x d`` inputs.

    Args:
        kernel: The kernel. If it has a closed form, there is no host synchronisation.
        inputs: The inputs.
    """
    known = stationary(kernel)
    variance: Tensor = kernel(inputs, diag=True) if known is None else known.variance(inputs)
    return variance


def covariance_function(kernel: Kernel) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the matrix of a kernel as a function of inputs, to evaluate several matrices.

    Args:
        kernel: Any kernel. Its closed form, if it has one, is determined once; the matrix is then
            differentiable once.

    Returns:
        A function from ``... x p x d`` and ``... x n x d`` inputs to ``... x p x n`` covariances.
    """
    known = stationary(kernel)
    if known is not None:
        return known.matrix
    return lambda left, right: to_dense(kernel(left, right))


def _rbf(square: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    value = square.neg_().exp_().mul_(scale)
    return value, value


def _matern_3_2(square: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    r""":math:`(1 + r) e^{-r}` with :math:`r^2 = s`; :math:`dr / ds = 1 / (2 r)`."""
    r = square.sqrt_()
    decay = torch.neg(r).exp_().mul_(scale)
    return torch.addcmul(decay, r, decay, out=r), decay


def _matern_5_2(square: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    r""":math:`(1 + r + r^2 / 3) e^{-r}` with :math:`r^2 = s`; :math:`dr / ds = 1 / (2 r)`."""
    r = square.sqrt()
    decay = torch.neg(r).exp_().mul_(scale)
    slope = torch.addcmul(decay, r, decay, out=r)
    return torch.addcmul(slope, square, decay, value=1 / 3, out=square), slope


_RBF = Profile(0.5**0.5, -1.0, _rbf)
_MATERN_3_2 = Profile(3**0.5, -1 / 2, _matern_3_2)
_MATERN_5_2 = Profile(5**0.5, -1 / 6, _matern_5_2)


def _squared_distances(left: Tensor, right: Tensor) -> Tensor:
    """Return ``... x p x n``, by one matrix product: ``|x|^2 - 2 x x' + |x'|^2``."""
    ones = [x.new_ones(*x.shape[:-1], 1) for x in (left, right)]
    norms = [x.square().sum(-1, keepdim=True) for x in (left, right)]
    left = torch.cat([left, norms[0], ones[0]], -1)
    right = torch.cat([-2 * right, ones[1], norms[1]], -1)
    return (left @ right.mT).clamp_min_(0)


class _Covariances(torch.autograd.Function):
    """The matrix of ``scale * k(|x - x'|^2)``; differentiable once."""

    @staticmethod
    def forward(ctx: Any, left: Tensor, right: Tensor, scale: Tensor, profile: Profile) -> Tensor:
        value, slope = profile.evaluate(_squared_distances(left, right), scale)
        ctx.save_for_backward(left, right, scale, value, slope)
        ctx.factor = 2 * profile.factor
        return value

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, outer: Tensor) -> Any:
        left, right, scale, value, slope = ctx.saved_tensors
        d_left = d_right = d_scale = None
        if ctx.needs_input_grad[0] or ctx.needs_input_grad[1]:
            weight = outer * slope
        if ctx.needs_input_grad[0]:
            d_left = _pulled(weight, left, right, ctx.factor)
        if ctx.needs_input_grad[1]:
            d_right = _pulled(weight.mT, right, left, ctx.factor)
        if ctx.needs_input_grad[2]:
            total = torch.dot(outer.reshape(-1), value.reshape(-1))
            d_scale = (total / scale).reshape(scale.shape)
        return d_left, d_right, d_scale, None


def _pulled(weight: Tensor, points: Tensor, others: Tensor, factor: float) -> Tensor:
    """Return ``factor`` times the sums ``sum_j w_ij (x_i - x'_j)``, of the shape of the points."""
    ones = others.new_ones(*others.shape[:-1], 1)
    sums = weight @ torch.cat([others, ones], -1)
    return ((sums[..., -1:] * points - sums[..., :-1]) * factor).sum_to_size(points.shape)

r"""Covariance matrices of the usual stationary kernels, with closed-form derivatives.

Learning evaluates a bound and its derivatives many times, and autograd through a kernel makes some
twenty passes over all covariances. With inputs divided by the lengthscales and
:math:`s = |x - x'|^2`, RBF and Matérn kernels are functions :math:`k(s)`, and

.. math::
    \partial_{x} k = 2 k'(s) (x - x').

So one more matrix, :math:`k'`, is all that a derivative needs. GPyTorch's own functions of this
kind leave the derivatives with respect to inputs to autograd.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from gpytorch.kernels import Kernel, MaternKernel, RBFKernel, ScaleKernel
from torch import Tensor


class Stationary(NamedTuple):
    """A kernel whose covariances are a scale times a function of the scaled squared distance.

    Attributes:
        lengthscale: ``1 x d`` or ``1 x 1``.
        scale: The prior variance, a scalar; ``None`` for one.
        profile: Maps squared distances, which it may overwrite, to :math:`k` and :math:`k'`.
    """

    lengthscale: Tensor
    scale: Tensor | None
    profile: Callable[[Tensor], tuple[Tensor, Tensor]]

    def matrix(self, left: Tensor, right: Tensor) -> Tensor:
        """The ``p x n`` covariances of values at ``p x d`` and ``n x d`` inputs."""
        centre = right.detach().mean(-2, keepdim=True)  # small numbers have small rounding errors
        scaled = ((x - centre) / self.lengthscale for x in (left, right))
        scale = left.new_ones(()) if self.scale is None else self.scale
        return _Covariances.apply(*scaled, scale, self.profile)

    def variance(self, inputs: Tensor) -> Tensor:
        """The ``... x n`` prior variances at ``... x n x d`` inputs."""
        one = inputs.new_ones(()) if self.scale is None else self.scale
        return one.expand(inputs.shape[:-1])


def stationary(kernel: Kernel) -> Stationary | None:
    """What there is to know of a kernel if it is one of those, else ``None``.

    Args:
        kernel: An `RBFKernel` or a differentiable `MaternKernel`, in a `ScaleKernel` or not, for
            all inputs and without a batch shape. Subclasses may do something else.
    """
    scale = None
    if type(kernel) is ScaleKernel:
        if kernel.batch_shape or kernel.active_dims is not None:
            return None
        scale, kernel = kernel.outputscale, kernel.base_kernel
    profile = None
    if type(kernel) is RBFKernel:
        profile = _rbf
    elif type(kernel) is MaternKernel:
        profile = {1.5: _matern_3_2, 2.5: _matern_5_2}.get(kernel.nu)
    if profile is None or kernel.batch_shape or kernel.active_dims is not None:
        return None
    return Stationary(kernel.lengthscale, scale, profile)


def _rbf(square: Tensor) -> tuple[Tensor, Tensor]:
    value = square.mul_(-0.5).exp_()
    return value, -0.5 * value


def _matern_3_2(square: Tensor) -> tuple[Tensor, Tensor]:
    r""":math:`(1 + r) e^{-r}` with :math:`r^2 = 3 s`; :math:`dr / ds = 3 / (2 r)`."""
    r = square.mul_(3).sqrt_()
    decay = torch.exp(-r)
    return r.add_(1).mul_(decay), decay.mul_(-1.5)


def _matern_5_2(square: Tensor) -> tuple[Tensor, Tensor]:
    r""":math:`(1 + r + r^2 / 3) e^{-r}` with :math:`r^2 = 5 s`; :math:`dr / ds = 5 / (2 r)`."""
    r = square.mul_(5).sqrt()
    decay = torch.exp(-r)
    quadratic = square.mul_(decay).div_(3)
    slope = r.add_(1).mul_(decay)
    return quadratic.add_(slope), slope.mul_(-5 / 6)


class _Covariances(torch.autograd.Function):
    """The matrix of ``scale * k(|x - x'|^2)``; differentiable once."""

    @staticmethod
    def forward(
        ctx: Any, left: Tensor, right: Tensor, scale: Tensor, profile: Callable[..., Any]
    ) -> Tensor:
        norms = [x.square().sum(-1) for x in (left, right)]
        square = norms[0].unsqueeze(-1) + norms[1]
        square = square.addmm_(left, right.mT, alpha=-2).clamp_min_(0)
        value, slope = profile(square)
        ctx.save_for_backward(left, right, scale, value, slope)
        return scale * value

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, outer: Tensor) -> Any:
        left, right, scale, value, slope = ctx.saved_tensors
        d_left = d_right = d_scale = None
        if ctx.needs_input_grad[0] or ctx.needs_input_grad[1]:
            weight = (outer * slope).mul_(2 * scale)
        if ctx.needs_input_grad[0]:
            d_left = weight.sum(-1, keepdim=True) * left - weight @ right
        if ctx.needs_input_grad[1]:
            d_right = weight.sum(-2).unsqueeze(-1) * right - weight.mT @ left
        if ctx.needs_input_grad[2]:
            d_scale = (outer * value).sum().reshape(scale.shape)
        return d_left, d_right, d_scale, None

r"""Blocks of a model's GP prior, at values and at linear functionals.

An observation may be about one value :math:`f(x)` or about a linear functional
:math:`h = \sum_j c_j f(x_j)`: a difference, a sum, an average, or an integral by quadrature. Sparse
inference only needs :math:`k(z, h) = \sum_j c_j k(z, x_j)`, the mean of :math:`h` and its variance
:math:`c^T K c`, so everything that follows is the same for both.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.kernels import Kernel
from gpytorch.lazy import LazyEvaluatedKernelTensor
from gpytorch.means import Mean
from linear_operator import LinearOperator, to_dense, to_linear_operator
from torch import Tensor

from seqgp.dual.linalg import broadcast_shapes
from seqgp.variational.frozen import frozen
from seqgp.variational.stationary import stationary

#: Up to this number of values, covariances are evaluated at once: a lazy kernel is slower.
SMALL = 64

#: A model's ``forward``: the prior at inputs ``... x n x d``.
Forward = Callable[[Tensor], MultivariateNormal]

F = TypeVar("F", bound=Callable[..., Any])


class Prior(NamedTuple):
    """The prior of some values or functionals, and its covariance with other values."""

    cross: Tensor  # ... x p x n
    mean: Tensor  # ... x n
    variance: Callable[[], Tensor]  # ... x n
    covariance: Callable[[], LinearOperator]  # ... x n x n
    left: tuple[Tensor, Tensor] | None = None  # mean ... x p, covariance ... x p x p at `left`


def joint_prior(
    forward: Forward,
    left: Tensor,
    right: Tensor,
    shared: bool,
    with_left: bool = False,
    coefficients: Tensor | None = None,
    once: bool = False,
) -> Prior:
    """Return the prior at inputs ``right``, and its covariance with the values at ``left``.

    If the kernel is lazy, only the blocks that are used are evaluated.

    Args:
        forward: The prior.
        left: ``... x p x d``.
        right: ``... x n x d``; with coefficients ``... x (n J) x d``, where the inputs of one
            functional are adjacent.
        shared: Whether one prior serves all batches. Then a batch of inputs against a single set
            is one flat kernel matrix.
        with_left: Whether to return the prior at ``left``, too; one evaluation of the kernel gives
            both blocks.
        coefficients: ``... x n x J`` coefficients of functionals; ``None`` for values.
        once: Whether the result is differentiated at most once, which is faster.
    """
    modules = _mean_and_kernel(forward)
    if modules is not None and coefficients is None:
        return _from_modules(*modules, left, right, shared, with_left, once)
    (p, d), n = left.shape[-2:], right.shape[-2]
    left_batch, right_batch = left.shape[:-2], right.shape[:-2]
    flat_right = shared and left_batch.numel() == 1
    flat_left = shared and right_batch.numel() == 1 and not flat_right and not with_left
    prior_left = None
    if flat_left or flat_right:
        joint = forward(torch.cat([left.reshape(-1, d), right.reshape(-1, d)]))
        p = left_batch.numel() * p
        covariance = joint.lazy_covariance_matrix
        cross = to_dense(covariance[..., :p, 0 if with_left else p :])
        if with_left:
            prior_left = joint.mean[..., :p], cross[..., :p]
            cross = cross[..., p:]
        if flat_right:
            cross = cross.reshape(p, *right_batch, n).movedim(0, -2)
        else:
            cross = cross.reshape(*left_batch, -1, n)
        mean = joint.mean[..., p:].reshape(*right_batch, n)
    else:
        batch = broadcast_shapes(left_batch, right_batch)
        joint = forward(torch.cat([left.expand(*batch, p, d), right.expand(*batch, n, d)], -2))
        covariance = joint.lazy_covariance_matrix
        cross = to_dense(covariance[..., :p, 0 if with_left else p :])
        if with_left:
            prior_left = joint.mean[..., :p], cross[..., :p]
            cross = cross[..., p:]
        mean = joint.mean[..., p:]
        right_batch = covariance.shape[:-2]

    def variance() -> Tensor:
        diagonal = covariance[..., p:, p:].diagonal(dim1=-1, dim2=-2)
        return diagonal.reshape(*right_batch, n)

    def full() -> LinearOperator:
        if (flat_left or flat_right) and right_batch:
            return forward(right).lazy_covariance_matrix
        return covariance[..., p:, p:]

    prior = Prior(cross, mean, variance, full, prior_left)
    return prior if coefficients is None else _contract(prior, forward, right, coefficients)


def values_prior(forward: Forward, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the prior mean ``... x n`` and covariance ``... x n x n`` at ``... x n x d`` inputs.

    Args:
        forward: The prior.
        x: The inputs.
    """
    modules = _mean_and_kernel(forward)
    known = None if modules is None or torch.is_grad_enabled() else stationary(modules[1])
    if modules is None or known is None:
        prior = forward(x)
        return prior.mean, to_dense(prior.lazy_covariance_matrix)
    return modules[0](x), known.matrix(x, x)


def prior_of(model: Any) -> Forward:
    """Return the prior of a model, as a function of inputs as its strategy sees them.

    This is the model's ``forward``, unless that is meant for other callers (BoTorch's transforms
    the inputs in train mode) and the model has a method ``prior_at``. A class that overrides
    ``forward`` takes precedence over an inherited ``prior_at``.

    Args:
        model: The model.
    """
    for kind in type(model).__mro__:
        for name in ("prior_at", "forward"):
            if name in vars(kind):
                return getattr(model, name)
    raise AttributeError(f"{type(model).__name__} has no method forward.")


def mean_and_kernel(forward: F) -> F:
    """Mark a ``forward`` that only combines a ``mean_module`` and a ``covar_module``.

    Blocks of such a prior are evaluated directly from the modules.
    """
    forward.is_mean_and_kernel = True  # type: ignore[attr-defined]
    return forward


def _mean_and_kernel(forward: Any) -> tuple[Mean, Kernel] | None:
    """Return the modules of a prior that is made of a mean and a kernel, or ``None``."""
    if not getattr(forward, "is_mean_and_kernel", False):
        return None
    model = forward.__self__
    return model.mean_module, model.covar_module


class _FrozenPrior(NamedTuple):
    """A prior made of a mean and a kernel that do not change."""

    mean_module: Mean
    covar_module: Kernel

    @mean_and_kernel
    def forward(self, x: Tensor) -> MultivariateNormal:
        return MultivariateNormal(self.mean_module(x), self.covar_module(x))


def frozen_prior(forward: Forward) -> Forward:
    """Return a prior that keeps the present hyperparameters, whenever it is evaluated.

    Args:
        forward: The prior; one that is not marked by `mean_and_kernel` is returned as it is.
    """
    modules = _mean_and_kernel(forward)
    return forward if modules is None else _FrozenPrior(*map(frozen, modules)).forward


def _from_modules(
    mean_module: Mean,
    kernel: Kernel,
    left: Tensor,
    right: Tensor,
    shared: bool,
    with_left: bool,
    once: bool,
) -> Prior:
    """Return the same as `joint_prior`, from a mean and a kernel."""
    known = stationary(kernel) if once or not torch.is_grad_enabled() else None

    def matrix(a: Tensor, b: Tensor) -> Tensor:
        """Return the covariances of values at ``p x d`` and at ``n x d`` inputs."""
        return to_dense(kernel(a, b)) if known is None else known.matrix(a, b)

    (p, d), n = left.shape[-2:], right.shape[-2]
    left_batch, right_batch = left.shape[:-2], right.shape[:-2]
    mean, prior_left = mean_module(right), None
    if shared and left_batch.numel() == 1:
        flat_left, flat_right = left.reshape(-1, d), right.reshape(-1, d)
        cross = matrix(flat_left, flat_right)
        if with_left:
            prior_left = mean_module(left).reshape(p), matrix(flat_left, flat_left).reshape(p, p)
        cross = cross.reshape(p, *right_batch, n).movedim(0, -2)
        mean = mean.reshape(*right_batch, n)
    elif shared and right_batch.numel() == 1 and not with_left:
        cross = matrix(left.reshape(-1, d), right.reshape(-1, d))
        cross = cross.reshape(*left_batch, -1, n)
        mean = mean.reshape(*right_batch, n)
    else:
        batch = broadcast_shapes(left_batch, right_batch)
        right = right.expand(*batch, n, d)
        cross = to_dense(kernel(left.expand(*batch, p, d), right))
        mean = mean.expand(*broadcast_shapes(mean.shape[:-1], cross.shape[:-2]), n)
        if with_left:
            prior_left = mean_module(left), to_dense(kernel(left))

    def variance() -> Tensor:
        diagonal = kernel(right, diag=True) if known is None else known.variance(right)
        return diagonal.reshape(*right_batch, n) if shared else diagonal

    def full() -> LinearOperator:
        if torch.is_grad_enabled():
            return _lazy(kernel, right)
        if known is None:  # the model may have changed before this is evaluated
            return _lazy(frozen(kernel), right)
        if n <= SMALL:
            return to_linear_operator(known.matrix(right, right))
        return known.covariance(right)

    return Prior(cross, mean, variance, full, prior_left)


def _lazy(kernel: Kernel, x: Tensor) -> LinearOperator:
    """Return the lazy ``kernel(x)``, which is GPyTorch's default.

    GPyTorch's eager evaluation is a global flag, which is on while any thread evaluates a kernel.
    Variances would then differ in the last digit.
    """
    if type(kernel).__call__ is not Kernel.__call__:
        return kernel(x)
    if kernel.active_dims is not None:
        x = x.index_select(-1, kernel.active_dims)
    return LazyEvaluatedKernelTensor(x, x, kernel=kernel)


def _contract(prior: Prior, forward: Forward, points: Tensor, coefficients: Tensor) -> Prior:
    """Return the prior of functionals, given that of the values they are made of."""

    def variance() -> Tensor:
        return functional_variance(forward, points, coefficients)

    def full() -> LinearOperator:
        half = contract(to_dense(prior.covariance()), coefficients)
        return to_linear_operator(contract(half.mT, coefficients))

    cross = contract(prior.cross, coefficients)
    mean = contract(prior.mean.unsqueeze(-2), coefficients).squeeze(-2)
    return Prior(cross, mean, variance, full, prior.left)


def contract(block: Tensor, coefficients: Tensor) -> Tensor:
    """Return ``... x p x n``: weighted sums of the columns of a ``... x p x (n J)`` block.

    Args:
        block: The block.
        coefficients: ``... x n x J``.
    """
    columns = block.reshape(*block.shape[:-1], *coefficients.shape[-2:])
    return (columns * coefficients.unsqueeze(-3)).sum(-1)


def functional_variance(forward: Forward, points: Tensor, coefficients: Tensor) -> Tensor:
    """Return ``... x n`` prior variances of functionals, without their other covariances.

    Args:
        forward: The prior.
        points: ``... x (n J) x d``.
        coefficients: ``... x n x J``.
    """
    (n, J), d = coefficients.shape[-2:], points.shape[-1]
    x = points.reshape(*points.shape[:-2], n, J, d)
    shape = (*x.shape[:-3], n, J, J, d)
    pairs = [x.unsqueeze(-2).expand(shape), x.unsqueeze(-3).expand(shape)]
    number = n * J * J
    joint = forward(torch.cat([each.reshape(*shape[:-4], number, d) for each in pairs], -2))
    block = joint.lazy_covariance_matrix[..., :number, number:]
    products = block.diagonal(dim1=-1, dim2=-2)
    products = products.reshape(*products.shape[:-1], n, J, J)
    c = coefficients
    return (products * c.unsqueeze(-1) * c.unsqueeze(-2)).sum((-2, -1)).clamp_min(0)

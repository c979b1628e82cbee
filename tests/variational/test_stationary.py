"""Closed-form derivatives of stationary kernels, against GPyTorch and autograd."""

from __future__ import annotations

import pytest
import torch
from gpytorch.kernels import Kernel, MaternKernel, RBFKernel, ScaleKernel
from linear_operator import to_dense

from seqgp.variational.stationary import StationaryCovariance, stationary

pytestmark = pytest.mark.usefixtures("float64")

KERNELS = {
    "rbf": lambda: RBFKernel(),
    "rbf, ard": lambda: RBFKernel(ard_num_dims=3),
    "matern 3/2, ard": lambda: MaternKernel(nu=1.5, ard_num_dims=3),
    "matern 5/2": lambda: MaternKernel(nu=2.5),
    "scaled rbf": lambda: ScaleKernel(RBFKernel(ard_num_dims=3)),
    "scaled matern 5/2": lambda: ScaleKernel(MaternKernel(nu=2.5)),
}


@pytest.fixture(params=KERNELS)
def kernel(request: pytest.FixtureRequest) -> Kernel:
    kernel = KERNELS[request.param]()
    for parameter in kernel.parameters():
        parameter.data.copy_(torch.randn_like(parameter) - 1)
    return kernel


@pytest.mark.parametrize("learns_inputs", [False, True])
def test_values_and_derivatives_are_gpytorchs(kernel: Kernel, learns_inputs: bool) -> None:
    left = torch.rand(5, 3) + 100  # far from the origin
    right = torch.cat([left[:2], torch.rand(30, 3) + 100])  # two distances are zero
    inputs = [left, right] if learns_inputs else []
    for each in inputs:
        each.requires_grad_(True)
    wanted = [*inputs, *kernel.parameters()]
    known = stationary(kernel)
    assert known is not None
    actual, expected = known.matrix(left, right), kernel(left, right).to_dense()
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)
    outer = torch.randn_like(actual)
    outer[[0, 1], [0, 1]] = 0  # GPyTorch's distances of zero have no derivative
    found = torch.autograd.grad((outer * actual).sum(), wanted)
    theirs = torch.autograd.grad((outer * expected).sum(), wanted)
    for a, b in zip(found, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(known.variance(left), kernel(left, diag=True))


@pytest.mark.parametrize("left_batch", [(), (1,), (2,), (4, 1)])
def test_batches_of_inputs(kernel: Kernel, left_batch: tuple[int, ...]) -> None:
    left, right = torch.rand(*left_batch, 5, 3, requires_grad=True), torch.rand(2, 7, 3)
    known = stationary(kernel)
    assert known is not None
    actual = known.matrix(left, right)
    expected = kernel(left.expand(*actual.shape[:-2], 5, 3), right).to_dense()
    torch.testing.assert_close(actual, expected.expand_as(actual), rtol=1e-10, atol=1e-10)
    outer = torch.randn_like(actual)
    found, wanted = (torch.autograd.grad((outer * k).sum(), left)[0] for k in (actual, expected))
    torch.testing.assert_close(found, wanted, rtol=1e-8, atol=1e-8)


def test_derivative_at_distance_zero_vanishes(kernel: Kernel) -> None:
    x = torch.rand(4, 3, requires_grad=True)
    known = stationary(kernel)
    assert known is not None
    covariances = known.matrix(x, x.detach()).diagonal()
    (gradient,) = torch.autograd.grad(covariances.sum(), x)
    torch.testing.assert_close(gradient, torch.zeros(4, 3), rtol=0, atol=1e-10)


def test_nothing_on_the_right(kernel: Kernel) -> None:
    """The derivative of a matrix without columns is zero, not NaN."""
    x, known = torch.rand(4, 3, requires_grad=True), stationary(kernel)
    assert known is not None
    covariances = known.matrix(x, torch.rand(0, 3))
    assert covariances.shape == (4, 0)
    gradients = torch.autograd.grad(covariances.sum(), [x, *kernel.parameters()])
    assert all(bool((gradient == 0).all()) for gradient in gradients)


def test_lazy_covariances(kernel: Kernel) -> None:
    """Evaluated later, they are those of the hyperparameters that the kernel had."""
    x, right = torch.rand(2, 5, 3), torch.randn(5, 2)
    known = stationary(kernel)
    assert known is not None
    operator, expected = known.covariance(x), kernel(x).to_dense().detach()
    for parameter in kernel.parameters():
        parameter.data = parameter.data + 1  # other memory, as an update gives them
    assert operator.shape == expected.shape
    assert operator.mT.shape == expected.shape
    torch.testing.assert_close(operator.to_dense(), expected, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(operator @ right, expected @ right, rtol=1e-10, atol=1e-10)
    diagonal = expected.diagonal(dim1=-2, dim2=-1)
    torch.testing.assert_close(operator.diagonal(dim1=-2, dim2=-1), diagonal)
    wider = operator.expand(4, *expected.shape).to_dense()
    torch.testing.assert_close(wider, expected.expand_as(wider), rtol=1e-10, atol=1e-10)


def test_parts_of_lazy_covariances(kernel: Kernel) -> None:
    """Blocks, rows and elements, also of batches."""
    x, known = torch.rand(2, 5, 3), stationary(kernel)
    assert known is not None
    operator, expected = known.covariance(x), kernel(x).to_dense().detach()
    for index in (
        (..., slice(1, 4), slice(2, None)),
        (1, slice(None), slice(0, 2)),
        (slice(0, 1), slice(3), slice(3)),
        (0, 2, slice(None)),
        (..., torch.tensor([0, 3]), slice(None)),
        (torch.tensor([0, 1]), torch.tensor([4, 2]), torch.tensor([1, 2])),
        (1, 3, 3),
    ):
        torch.testing.assert_close(to_dense(operator[index]), expected[index], rtol=1e-8, atol=1e-8)
    block = operator[..., 1:4, 2:]
    assert isinstance(block, StationaryCovariance)
    torch.testing.assert_close(block.mT.to_dense(), expected[..., 1:4, 2:].mT)


class Doubled(RBFKernel):
    def forward(self, *args: object, **kwargs: object) -> object:
        return 2 * super().forward(*args, **kwargs)


@pytest.mark.parametrize(
    "kernel",
    [
        Doubled(),
        MaternKernel(nu=0.5),
        RBFKernel(batch_shape=torch.Size([2])),
        RBFKernel(active_dims=[0]),
        ScaleKernel(RBFKernel(active_dims=[0])),
        ScaleKernel(RBFKernel(), batch_shape=torch.Size([2])),
        ScaleKernel(ScaleKernel(RBFKernel())),
        RBFKernel() + RBFKernel(),
    ],
)
def test_other_kernels_are_left_to_gpytorch(kernel: Kernel) -> None:
    assert stationary(kernel) is None

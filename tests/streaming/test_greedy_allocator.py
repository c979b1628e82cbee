import pytest
import torch
from botorch.models.utils.inducing_point_allocators import GreedyVarianceReduction
from gpytorch.kernels import MaternKernel, RBFKernel, ScaleKernel
from gpytorch.likelihoods import BernoulliLikelihood
from torch.utils._python_dispatch import TorchDispatchMode

from seqgp import SequentialGP
from seqgp.streaming import greedy_allocator
from seqgp.streaming.greedy_allocator import GreedyAllocator


class LargestTensor(TorchDispatchMode):
    """The number of elements of the largest tensor that any operation returns."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, torch.Tensor):
                self.largest = max(self.largest, tensor.numel())
        return result


@pytest.mark.parametrize("number", [1, 7, 60, 200])
@pytest.mark.parametrize("lengthscale", [0.1, 5.0])  # the second needs far fewer than 200
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_chooses_as_botorch_does(number, lengthscale, dtype):
    X = torch.rand(200, 3, dtype=torch.double).to(dtype)
    kernel = ScaleKernel(MaternKernel(2.5)).to(dtype)
    kernel.base_kernel.lengthscale = lengthscale
    ours = GreedyAllocator().allocate_inducing_points(X, kernel, number, torch.Size())
    theirs = GreedyVarianceReduction().allocate_inducing_points(X, kernel, number, torch.Size())
    if dtype == torch.float32:  # rounding decides between inputs that are as good
        ours, theirs = ours[:10], theirs[:10]
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def test_batches_are_left_to_botorch():
    X = torch.rand(2, 20, 2, dtype=torch.double)
    kernel = RBFKernel().double()
    Z = GreedyAllocator().allocate_inducing_points(X, kernel, 4, torch.Size([2]))
    assert Z.shape == (2, 4, 2)


def test_looks_at_a_random_part_of_very_many_inputs(monkeypatch):
    X, kernel = torch.rand(300, 1, dtype=torch.double), RBFKernel().double()
    kernel.lengthscale = 0.05
    monkeypatch.setattr(greedy_allocator, "MAX_CANDIDATES", 100)
    Z = GreedyAllocator().allocate_inducing_points(X, kernel, 20, torch.Size())
    again = GreedyAllocator().allocate_inducing_points(X, kernel, 20, torch.Size())
    assert torch.equal(Z, again)
    assert len(Z) == 20
    # the whole domain is covered: nowhere far from an inducing point
    assert (X - Z.T).abs().amin(-1).max() < 0.06


@pytest.mark.parametrize("likelihood", [None, BernoulliLikelihood])
def test_no_matrix_of_all_pairs_of_inputs(likelihood):
    """Memory grows linearly with the number of observations, at construction and in updates."""
    n = 6000  # for which a block of rows that does not grow with n is small
    X = torch.rand(2 * n, 2, dtype=torch.double)
    Y = (torch.sin(6 * X).sum(-1, keepdim=True) > 0.5).to(X)
    with LargestTensor() as counter:
        model = SequentialGP(
            X[:n], Y[:n], likelihood=likelihood() if likelihood else None, inducing_points=20
        )
        model.update(X[n:], Y[n:], learn=False)
    assert 0 < counter.largest < n**2 / 10

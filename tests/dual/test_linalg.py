from __future__ import annotations

import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from seqgp.dual import scaled_cholesky, solve_lower
from seqgp.dual.linalg import relative_jitter, solve_cholesky
from tests.helpers import assert_close, make_inputs, make_kernel

pytestmark = pytest.mark.usefixtures("float64")


def gram(*shape: int) -> Tensor:
    """Kernel matrices of inputs of some ``... x n x d`` shape."""
    return make_kernel()(make_inputs(*shape)).to_dense().detach()


@pytest.mark.parametrize("shape", [(1, 2), (6, 2), (3, 5, 2), (2, 1, 4, 2)])
@pytest.mark.parametrize("jitter", [0.0, 1e-3])
def test_scaled_cholesky_is_a_factor(shape: tuple[int, ...], jitter: float) -> None:
    scale = torch.linspace(0.1, 10, shape[-2])
    K = scale.unsqueeze(-1) * gram(*shape) * scale
    chol = scaled_cholesky(K, jitter)
    assert torch.equal(chol, chol.tril())
    expected = K + jitter * torch.diag_embed(K.diagonal(dim1=-2, dim2=-1))
    assert_close(chol @ chol.mT, expected, 1e-12)


@settings(deadline=None, max_examples=25)
@given(exponent=st.integers(-20, 20), dtype=st.sampled_from([torch.float64, torch.float32]))
def test_scaled_cholesky_knows_no_scale(exponent: int, dtype: torch.dtype) -> None:
    """A kernel matrix of duplicated points, of any variance, with the default jitter."""
    K = gram(6, 2).to(dtype).repeat(2, 2)  # singular
    scale = 4.0**exponent  # this and its root are powers of two, which change no digit
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        chol = scaled_cholesky(K, relative_jitter(dtype))
        scaled = scaled_cholesky(scale * K, relative_jitter(dtype))
    assert torch.equal(scaled, scale**0.5 * chol)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_scaled_cholesky_of_zeros_is_finite(dtype: torch.dtype) -> None:
    """A kernel of no variance at all, as a linear kernel at the origin."""
    assert scaled_cholesky(torch.zeros(3, 3, dtype=dtype), 1e-6).isfinite().all()


@pytest.mark.parametrize(
    ("factor_batch", "rhs_shape"),
    [
        *[((), (4, 3)), ((), (2, 4, 3)), ((), (5, 2, 4, 3)), ((2,), (4, 3)), ((2,), (5, 2, 4, 3))],
        *[((), (4, 0)), ((), (2, 4, 0)), ((), (0, 4, 3))],
    ],
)
def test_solves(factor_batch: tuple[int, ...], rhs_shape: tuple[int, ...]) -> None:
    K = gram(*factor_batch, 4, 2) + torch.eye(4)
    chol, rhs = torch.linalg.cholesky(K), torch.randn(rhs_shape)
    batch = torch.broadcast_shapes(factor_batch, rhs_shape[:-2])
    for solution, matrix in ((solve_lower(chol, rhs), chol), (solve_cholesky(chol, rhs), K)):
        assert solution.shape == (*batch, *rhs_shape[-2:])
        assert_close(matrix @ solution, rhs.expand_as(solution), 1e-12)


@pytest.mark.parametrize("rhs_shape", [(3, 2), (2, 3, 2)])
def test_solves_are_differentiable(rhs_shape: tuple[int, ...]) -> None:
    chol = torch.linalg.cholesky(gram(3, 2) + torch.eye(3)).requires_grad_(True)
    rhs = torch.randn(rhs_shape, requires_grad=True)
    assert torch.autograd.gradcheck(lambda L, r: solve_cholesky(L.tril(), r), (chol, rhs))


def test_relative_jitter_grows_as_precision_falls() -> None:
    jitters = [relative_jitter(t) for t in (torch.float64, torch.float32, torch.float16)]
    assert jitters == sorted(jitters)
    for jitter, dtype in zip(jitters, (torch.float64, torch.float32, torch.float16), strict=True):
        assert jitter > torch.finfo(dtype).eps

"""The lazy covariance of a posterior against its dense formula."""

from __future__ import annotations

import unittest

import pytest
import torch
from linear_operator import to_dense, to_linear_operator
from linear_operator.operators import DiagLinearOperator
from linear_operator.test import linear_operator_test_case as contract
from torch import Tensor

from seqgp.variational.linear_operators import BorderedCovariance, PosteriorCovariance

pytestmark = pytest.mark.usefixtures("float64")


def make(
    prior: tuple[int, ...], A: tuple[int, ...], reduction: tuple[int, ...], n: int = 5
) -> tuple[PosteriorCovariance, Tensor]:
    """An operator whose terms have batch shapes of their own, and the dense matrix."""
    root = torch.randn(*prior, n, n)
    K = root @ root.mT + 10 * torch.eye(n)
    a, c = 0.3 * torch.randn(*A, 4, n), 0.3 * torch.randn(*reduction, 2, n)
    jitter = torch.rand(n)
    sign = torch.tensor([[1.0], [-1.0]])
    operator = PosteriorCovariance(to_linear_operator(K), a, 0.5 * a, jitter, c, sign)
    return operator, K - 0.5 * a.mT @ a + jitter.diag() - c.mT @ (sign * c)


SHAPES = [
    ((), (), ()),
    ((), (), (3, 2)),
    ((2,), (), (3, 2)),
    ((), (2,), (3, 1)),
    ((3, 1), (2,), ()),
]


@pytest.mark.parametrize("shapes", SHAPES)
def test_dense_diagonal_and_products(shapes: tuple) -> None:
    operator, dense = make(*shapes)
    assert operator.shape == dense.shape
    torch.testing.assert_close(to_dense(operator), dense)
    torch.testing.assert_close(
        operator.diagonal(dim1=-1, dim2=-2), dense.diagonal(dim1=-1, dim2=-2)
    )
    right = torch.randn(5, 3)
    torch.testing.assert_close(operator @ right, dense @ right)
    torch.testing.assert_close(to_dense(operator.mT), dense.mT)


@pytest.mark.parametrize("shapes", SHAPES)
@pytest.mark.parametrize("batch", [(), (2,), (4, 1, 1)])
def test_noise_stays_on_the_diagonal(shapes: tuple, batch: tuple[int, ...]) -> None:
    operator, dense = make(*shapes)
    noise = torch.rand(*batch, 5)
    total = operator + DiagLinearOperator(noise)
    assert isinstance(total, PosteriorCovariance)
    torch.testing.assert_close(to_dense(total), dense + torch.diag_embed(noise))
    other = to_linear_operator(torch.eye(5))
    torch.testing.assert_close(to_dense(operator + other), dense + torch.eye(5))


@pytest.mark.parametrize("shapes", SHAPES)
def test_rearranging_batches(shapes: tuple) -> None:
    operator, dense = make(*shapes)
    torch.testing.assert_close(
        to_dense(operator.expand(7, *dense.shape)), dense.expand(7, *dense.shape)
    )
    torch.testing.assert_close(to_dense(operator.unsqueeze(0)), dense.unsqueeze(0))
    torch.testing.assert_close(to_dense(operator[..., 1:4, 1:4]), dense[..., 1:4, 1:4])
    torch.testing.assert_close(operator[..., 2, 3], dense[..., 2, 3])
    if dense.dim() == 4:
        torch.testing.assert_close(to_dense(operator[1]), dense[1])
        torch.testing.assert_close(to_dense(operator[:, 1]), dense[:, 1])
        torch.testing.assert_close(
            to_dense(operator.permute(1, 0, 2, 3)), dense.permute(1, 0, 2, 3)
        )
        torch.testing.assert_close(to_dense(operator.unsqueeze(1)), dense.unsqueeze(1))


def test_root_and_arithmetic() -> None:
    operator, dense = make((), (), (3, 2))
    root = operator.root_decomposition().root.to_dense()
    torch.testing.assert_close(root @ root.mT, dense)
    torch.testing.assert_close(to_dense(2.0 * operator), 2 * dense)
    torch.testing.assert_close(to_dense(operator + torch.eye(5)), dense + torch.eye(5))
    torch.testing.assert_close(to_dense(operator.add_jitter(0.5)), dense + 0.5 * torch.eye(5))


class TestContract(contract.LinearOperatorTestCase, unittest.TestCase):
    """The test case of linear_operator itself: products, solves, indexing, and their gradients."""

    seed = 0
    batch_shape: tuple[int, ...] = ()
    # BoTorch switches conjugate gradients and Lanczos' roots off when it is imported.
    should_call_cg = False
    should_call_lanczos = False
    should_call_lanczos_diagonalization = True

    def create_linear_op(self) -> PosteriorCovariance:
        return make((), (), self.batch_shape)[0].requires_grad_(True)

    def evaluate_linear_op(self, operator: PosteriorCovariance) -> Tensor:
        explained = operator.A.mT @ operator.explained + operator.reduction.mT @ (
            operator.sign * operator.reduction
        )
        return to_dense(operator.prior) + operator.jitter.diag() - explained


class TestContractOfBatches(TestContract):
    """Only one of the terms has a batch."""

    batch_shape = (3,)


def make_bordered(*batch: int, k: int = 3, q: int = 2) -> tuple[BorderedCovariance, Tensor]:
    """With its dense matrix."""
    torch.manual_seed(0)
    root = torch.rand(*batch, k + q, k + q)
    root[..., :k, :] = root.reshape(-1, k + q, k + q)[0, :k]  # what all batches have
    dense = root @ root.mT + torch.eye(k + q)
    common = dense.reshape(-1, k + q, k + q)[0, :k, :k]
    return BorderedCovariance(common, dense[..., k:, :k], dense[..., k:, k:]), dense


@pytest.mark.parametrize("batch", [(), (4,), (2, 3)])
def test_rows_of_a_bordered_covariance(
    batch: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    operator, dense = make_bordered(*batch)
    torch.testing.assert_close(to_dense(operator), dense)
    torch.testing.assert_close(operator.diagonal(dim1=-1, dim2=-2), dense.diagonal(0, -2, -1))
    with monkeypatch.context() as patch:  # the last rows come without the others
        patch.delattr(BorderedCovariance, "to_dense")
        for rows in (slice(-2, None), slice(-1, None), slice(3, 4)):
            torch.testing.assert_close(to_dense(operator[..., rows, :]), dense[..., rows, :])
            torch.testing.assert_close(to_dense(operator[..., rows, 1:]), dense[..., rows, 1:])
    for rows in (slice(0, 3), slice(2, 4), slice(None, None, 2)):
        torch.testing.assert_close(to_dense(operator[..., rows, rows]), dense[..., rows, rows])
    if len(batch) == 2:
        torch.testing.assert_close(to_dense(operator[1]), dense[1])
        torch.testing.assert_close(to_dense(operator[:, 1, -2:, :]), dense[:, 1, -2:, :])
        permuted = to_dense(operator.permute(1, 0, 2, 3))
        torch.testing.assert_close(permuted, dense.permute(1, 0, 2, 3))


class TestContractOfBordered(TestContract):
    """The common block is that of a whole batch."""

    def create_linear_op(self) -> BorderedCovariance:  # type: ignore[override]
        return make_bordered(*self.batch_shape)[0].requires_grad_(True)

    def evaluate_linear_op(self, operator: BorderedCovariance) -> Tensor:  # type: ignore[override]
        rows = torch.cat([operator.cross, operator.own], -1)
        common = operator.common.expand(*operator.batch_shape, *operator.common.shape)
        return torch.cat([torch.cat([common, operator.cross.mT], -1), rows], -2)


class TestContractOfBorderedBatches(TestContractOfBordered):
    """Several matrices."""

    batch_shape = (3,)

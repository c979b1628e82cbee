from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from seqgp.dual import Duals, Sites, accumulate, interpolate, tie, zero_duals
from seqgp.dual.duals import GRAM_BLOCK, add, weighted_gram
from tests.helpers import assert_close

pytestmark = pytest.mark.usefixtures("float64")


def random_sites(*shape: int) -> Sites:
    return Sites(torch.randn(shape), torch.rand(shape))


def assert_same(a: Duals, b: Duals) -> None:
    for x, y in zip(a, b, strict=True):
        assert_close(x, y, 1e-12)


@pytest.mark.parametrize(
    ("A_batch", "site_batch"), [((), ()), ((2,), ()), ((), (3,)), ((2,), (3, 2)), ((3, 1), (2,))]
)
def test_tie_is_a_sum_over_data(A_batch: tuple[int, ...], site_batch: tuple[int, ...]) -> None:
    A, sites = torch.randn(*A_batch, 4, 5), random_sites(*site_batch, 5)
    duals = tie(A, sites)
    lam = sum(A[..., i] * sites.lam[..., i, None] for i in range(5))
    B = sum(
        A[..., :, None, i] * sites.beta[..., i, None, None] * A[..., None, :, i] for i in range(5)
    )
    assert_same(duals, Duals(lam, B))


@pytest.mark.parametrize("batch", [(), (3,)])
@pytest.mark.parametrize("m", [1, GRAM_BLOCK, 2 * GRAM_BLOCK + 1, 3 * GRAM_BLOCK])
def test_products_by_blocks(m: int, batch: tuple[int, ...]) -> None:
    A, weights = torch.randn(*batch, m, 7), torch.randn(*batch, 7)
    with torch.no_grad():
        found = weighted_gram(A, weights)
    assert_close(found, A @ torch.diag_embed(weights) @ A.mT, 1e-12)
    A.requires_grad_(True)
    (gradient,) = torch.autograd.grad(weighted_gram(A, weights).sum(), A)
    assert_close(gradient, 2 * weights.unsqueeze(-2) * A.sum(-2, keepdim=True).expand_as(A), 1e-10)


def test_precisions_may_have_fewer_batches_than_means() -> None:
    """Fantasies of a Gaussian likelihood differ in their targets only: one B serves them all."""
    duals = tie(torch.randn(4, 5), Sites(torch.randn(7, 5), torch.rand(5)))
    assert duals.lam.shape == (7, 4)
    assert duals.B.shape == (4, 4)


@settings(deadline=None, max_examples=25)
@given(st.permutations(range(12)), st.sets(st.integers(1, 11)), st.integers(0, 99))
def test_order_and_split_do_not_matter(order: list[int], cuts: set[int], seed: int) -> None:
    torch.manual_seed(seed)
    A, sites = torch.randn(4, 12), random_sites(12)
    edges = [0, *sorted(cuts), 12]
    parts = [order[a:b] for a, b in pairwise(edges)]
    chunks = [(A[:, part], Sites(*(tensor[part] for tensor in sites))) for part in parts]
    together = accumulate(iter(chunks), zero_duals(A, 4))
    assert_same(together, tie(A, sites))
    assert torch.linalg.eigvalsh(together.B).min() > -1e-12


def test_accumulate_starts_from_what_is_known() -> None:
    start = tie(torch.randn(4, 2), random_sites(2))
    A, sites = torch.randn(4, 3), random_sites(3)
    assert_same(accumulate([(A, sites)], start), add(start, tie(A, sites)))
    assert accumulate([], start) is start


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("batch_shape", [(), (2, 3)])
def test_zero_duals(dtype: torch.dtype, batch_shape: tuple[int, ...]) -> None:
    duals = zero_duals(torch.ones(1, dtype=dtype), 4, torch.Size(batch_shape))
    assert duals.lam.shape == (*batch_shape, 4)
    assert duals.B.shape == (*batch_shape, 4, 4)
    assert all(tensor.dtype == dtype and not tensor.any() for tensor in duals)


@pytest.mark.parametrize("rho", [0.0, 0.3, 1.0, torch.tensor([0.0, 0.3, 1.0])])
@pytest.mark.parametrize("kind", [Duals, Sites])
def test_interpolate(rho: float | Tensor, kind: type) -> None:
    trailing = (4, 4) if kind is Duals else (4,)
    a, b = (kind(torch.randn(3, 4), torch.randn(3, *trailing)) for _ in range(2))
    step = interpolate(a, b, rho)
    assert type(step) is kind
    steps = torch.as_tensor(rho).expand(3)
    for x, y, z in zip(a, b, step, strict=True):
        for i in range(3):
            assert_close(z[i], (1 - steps[i]) * x[i] + steps[i] * y[i], 1e-12)

"""Fast predictions are those of the model."""

from __future__ import annotations

import pytest
import torch
from gpytorch.likelihoods import BernoulliLikelihood
from torch import Tensor

from seqgp import SequentialGP
from seqgp.ax.predictor import Predictor
from seqgp.variational.linear_operators import BorderedCovariance
from tests.helpers import unscaled

pytestmark = unscaled


def make(kind: str, n: int = 40) -> SequentialGP:
    X = torch.rand(n, 3, dtype=torch.double)
    f = torch.sin(5 * X).sum(-1, keepdim=True)
    if kind == "bernoulli":
        model = SequentialGP(X, (f > 1).to(X), likelihood=BernoulliLikelihood(), inducing_points=15)
    else:
        model = SequentialGP(X, f, inducing_points=n if kind == "all inputs" else 15)
    return model.eval()


@pytest.mark.parametrize("kind", ["all inputs", "fewer", "bernoulli"])
@pytest.mark.parametrize("shape", [(7, 3), (4, 2, 3), (2, 5, 1, 3), (0, 3)])
def test_moments_and_gradients(kind: str, shape: tuple[int, ...]) -> None:
    model = make(kind)
    predict = Predictor(model)
    X = torch.rand(shape, dtype=torch.double)

    def moments(f: object) -> tuple[Tensor, Tensor, Tensor]:
        x = X.clone().requires_grad_()
        q = f(x)  # type: ignore[operator]
        mean, covariance = q.mean, q.covariance_matrix
        (gradient,) = torch.autograd.grad(mean.square().sum() + covariance.square().sum(), x)
        return mean.detach(), covariance.detach(), gradient

    for ours, theirs in zip(moments(predict), moments(model), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize("kind", ["all inputs", "fewer", "bernoulli"])
@pytest.mark.parametrize("batch", [(4,), (2, 5)])
def test_what_a_batch_has_in_common(kind: str, batch: tuple[int, ...]) -> None:
    """Training inputs first, as noisy expected improvement has them; gradients of the others."""
    model = make(kind)
    predict, k = Predictor(model), 9
    common = model.train_inputs[0][:k]
    own = torch.rand(*batch, 2, 3, dtype=torch.double)

    def moments(f: object) -> tuple[Tensor, ...]:
        x = own.clone().requires_grad_()
        q = f(torch.cat([common.expand(*batch, k, 3), x], -2))  # type: ignore[operator]
        mean, covariance, rows = q.mean, q.covariance_matrix, q.lazy_covariance_matrix[..., -2:, :]
        rows = rows.to_dense()
        value = mean.square().sum() + covariance.square().sum() + rows.pow(3).sum()
        (gradient,) = torch.autograd.grad(value, x)
        return mean.detach(), covariance.detach(), rows.detach(), gradient

    X = torch.cat([common.expand(*batch, k, 3), own], -2)
    assert predict.num_common(X) == k
    assert isinstance(predict(X).lazy_covariance_matrix, BorderedCovariance)
    for ours, theirs in zip(moments(predict), moments(model), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-7, atol=1e-8)


def test_candidates_are_not_in_common() -> None:
    """Unless they are training inputs they have gradients of their own, and the last always has."""
    model = make("fewer")
    predict, known = Predictor(model), model.train_inputs[0]
    same = torch.rand(2, 3, dtype=torch.double).expand(5, 2, 3)
    assert predict.num_common(same) == 0
    assert predict.num_common(known[:2].expand(5, 2, 3)) == 1
    assert predict.num_common(torch.cat([known[:3].expand(5, 3, 3), same], -2)) == 3
    assert predict.num_common(known[:3]) == predict.num_common(known[:3].unsqueeze(0)) == 0


def test_float32() -> None:
    model = make("fewer").float()
    X = torch.rand(5, 2, 3)
    q = Predictor(model)(X)
    assert q.mean.dtype == torch.float32
    torch.testing.assert_close(q.mean, model(X).mean, rtol=1e-5, atol=1e-5)

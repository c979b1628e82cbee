"""GPyTorch's own contract for variational strategies."""

from __future__ import annotations

import unittest
from typing import Any

import pytest
import torch
from gpytorch.likelihoods import BernoulliLikelihood, Likelihood
from gpytorch.mlls import VariationalELBO
from gpytorch.models import ApproximateGP
from gpytorch.test.variational_test_case import VariationalTestCase
from torch import Tensor

from seqgp import DualELBO, DualNGD, DualVariationalStrategy

EMPTY = torch.Size([])

# GPyTorch's test cases return their mocks.
pytestmark = pytest.mark.filterwarnings("ignore:It is deprecated to return:DeprecationWarning")


class NoDistribution:
    """In place of a variational distribution, of which only the batch shape is needed."""

    def __init__(self, num_inducing: int, batch_shape: torch.Size = EMPTY) -> None:
        self.batch_shape = batch_shape


def make_strategy(
    model: ApproximateGP, Z: Tensor, distribution: NoDistribution, learn_inducing_locations: bool
) -> DualVariationalStrategy:
    return DualVariationalStrategy(
        model,
        Z,
        learn_inducing_locations=learn_inducing_locations,
        batch_shape=distribution.batch_shape,
    )


class Contract(VariationalTestCase):
    """What has to be said in other words for duals; all else is inherited."""

    @property
    def batch_shape(self) -> torch.Size:
        return EMPTY

    @property
    def distribution_cls(self) -> type:
        return NoDistribution

    @property
    def strategy_cls(self) -> Any:
        return make_strategy

    def _training_iter(
        self,
        model: ApproximateGP,
        likelihood: Likelihood,
        batch_shape: torch.Size = EMPTY,
        mll_cls: Any = None,
        cuda: bool = False,
    ) -> tuple[Any, Tensor]:
        # Before the first data q is the prior whatever Z is, and there is no gradient for Z.
        # Duals are moved by natural gradients, so this is how any training iteration begins.
        x = torch.randn(*batch_shape, 32, 2).clamp(-2.5, 2.5)
        y = torch.linspace(-1, 1, 32)
        y = (y > 0).to(y) if isinstance(likelihood, BernoulliLikelihood) else y
        model.variational_strategy.natural_gradient_step(x, y, likelihood, rho=0.5)
        if mll_cls is not DualELBO:
            self.ngd = DualNGD(model, num_data=32)
        return super()._training_iter(model, likelihood, batch_shape, mll_cls, cuda)

    def test_eval_iteration(self, *args: Any, **kwargs: Any) -> None:
        _, cholesky, ciq = super().test_eval_iteration(*args, **kwargs)
        # Kzz and W, for the first of two calls; after a training loop Kzz once more.
        assert cholesky.call_count == (2 if self.mll_cls is DualELBO else 3)
        assert ciq.call_count == 0

    def test_fantasy_call(
        self,
        data_batch_shape: torch.Size = EMPTY,
        inducing_batch_shape: torch.Size = EMPTY,
        model_batch_shape: torch.Size = EMPTY,
        expected_batch_shape: torch.Size = EMPTY,
        constant_mean: bool = True,
    ) -> None:
        # GPyTorch demands an `ExactGP` on top of the inducing points, modules of certain names
        # and a Gaussian likelihood. Ours is of the same type, for any likelihood and any names.
        model, likelihood = self._make_model_and_likelihood(
            batch_shape=model_batch_shape,
            inducing_batch_shape=inducing_batch_shape,
            distribution_cls=self.distribution_cls,
            strategy_cls=self.strategy_cls,
            constant_mean=constant_mean,
        )
        model.likelihood = likelihood
        x = torch.randn(*data_batch_shape, 10, 2).clamp(-2.5, 2.5)
        y = torch.linspace(-1, 1, 10).expand(*data_batch_shape, 10)
        y = (y > 0).to(y) if isinstance(likelihood, BernoulliLikelihood) else y
        fantasy = model.eval().get_fantasy_model(x, y)
        assert type(fantasy) is type(model)
        assert fantasy.covar_module is model.covar_module
        posterior = fantasy(torch.randn(32, 2))
        assert posterior.batch_shape == expected_batch_shape
        assert posterior.event_shape == self.event_shape
        assert fantasy.variational_strategy.has_fantasy_strategy


class TestVariationalELBO(Contract, unittest.TestCase):
    @property
    def mll_cls(self) -> type:
        return VariationalELBO


class TestDualELBO(Contract, unittest.TestCase):
    @property
    def mll_cls(self) -> type:
        return DualELBO


class TestBernoulli(Contract, unittest.TestCase):
    @property
    def mll_cls(self) -> type:
        return DualELBO

    @property
    def likelihood_cls(self) -> type:
        return BernoulliLikelihood

"""What a candidate promises, times the probability that it is valid."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from botorch.acquisition import (
    LogExpectedImprovement,
    UpperConfidenceBound,
    qExpectedImprovement,
    qLogExpectedImprovement,
)
from botorch.exceptions.errors import UnsupportedError
from torch import Tensor

from seqgp import SequentialGP
from seqgp.acquisition import LogValidExpectedImprovement
from seqgp.ax.acquisition import CLEARANCE, TimesValidity
from seqgp.ax.correlated import CorrelatedAcquisition, CorrelatedValidity
from seqgp.ax.model import AxSequentialGP
from seqgp.batch_optimizer import BatchOptimizer
from tests.ax_integration.helpers import make_client, run
from tests.helpers import plain_improvement, unscaled

pytestmark = unscaled

BOUNDS = torch.tensor([[0.0, -1.0], [1.0, 3.0]], dtype=torch.double)


@pytest.fixture
def parts() -> tuple[SequentialGP, AxSequentialGP, Tensor, Tensor]:
    unit = torch.rand(30, 2, dtype=torch.double)
    X = BOUNDS[0] + (BOUNDS[1] - BOUNDS[0]) * unit
    valid = unit.sum(-1, keepdim=True) < 1.2
    objective = SequentialGP(X[valid[:, 0]], torch.sin(3 * X[valid[:, 0]]).sum(-1, keepdim=True))
    validity = AxSequentialGP(X, valid.to(X), likelihood_name="bernoulli", jumps=True)
    return objective, validity, X[~valid[:, 0]], X


def test_value_is_improvement_times_probability(
    parts: tuple[SequentialGP, AxSequentialGP, Tensor, Tensor],
) -> None:
    """Far from failed trials, that of `LogValidExpectedImprovement` with a plain model."""
    objective, validity, failed, _ = parts
    acqf = TimesValidity(LogExpectedImprovement(objective, 0.5), validity, failed, BOUNDS)
    plain = SequentialGP(
        validity.observed.X,
        validity.observed.Y,
        likelihood=validity.likelihood,
        covar_module=validity.covar_module,
        mean_module=validity.mean_module,
    )
    x = torch.rand(20, 1, 2, dtype=torch.double)
    expected = LogValidExpectedImprovement(objective, plain, 0.5)(x)
    torch.testing.assert_close(acqf(x), expected, rtol=1e-6, atol=1e-6)
    probability = validity.posterior(x).mean.flatten().log()
    torch.testing.assert_close(acqf(x) - acqf.acqf(x), probability, rtol=1e-6, atol=1e-6)


@plain_improvement
def test_batches_are_valid_together(
    parts: tuple[SequentialGP, AxSequentialGP, Tensor, Tensor],
) -> None:
    objective, validity, failed, _ = parts
    log, plain = (
        TimesValidity(kind(objective, 0.5), validity, failed, BOUNDS)
        for kind in (qLogExpectedImprovement, qExpectedImprovement)
    )
    x = torch.rand(5, 3, 2, dtype=torch.double)
    factors = validity.posterior(x.unsqueeze(-2)).mean.reshape(5, 3).log().sum(-1)
    torch.testing.assert_close(log(x), log.acqf(x) + factors, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(plain(x), plain.acqf(x) * factors.exp(), rtol=1e-6, atol=1e-9)


def test_a_failed_trial_is_worth_less_than_anything_else(
    parts: tuple[SequentialGP, AxSequentialGP, Tensor, Tensor],
) -> None:
    objective, validity, failed, _ = parts
    acqf = TimesValidity(LogExpectedImprovement(objective, 0.5), validity, failed, BOUNDS)
    grid = torch.rand(500, 1, 2, dtype=torch.double)
    assert acqf(failed.unsqueeze(-2)).max() < acqf(grid).min()
    away = failed + 10 * CLEARANCE * (BOUNDS[1] - BOUNDS[0])
    hole = (
        acqf.log_factor(away.unsqueeze(-2))
        - validity.posterior(away.unsqueeze(-2)).mean.log()[..., 0]
    )
    assert hole.abs().max() < 1e-6
    x = failed[:3].unsqueeze(-2).clone().requires_grad_()
    acqf(x).sum().backward()
    assert x.grad is not None
    assert x.grad.isfinite().all()


def test_what_may_be_negative_cannot_be_multiplied(
    parts: tuple[SequentialGP, AxSequentialGP, Tensor, Tensor],
) -> None:
    objective, validity, failed, _ = parts
    with pytest.raises(UnsupportedError, match="UpperConfidenceBound"):
        TimesValidity(UpperConfidenceBound(objective, 2.0), validity, failed, BOUNDS)


def test_pending_points_are_passed_on(
    parts: tuple[SequentialGP, AxSequentialGP, Tensor, Tensor],
) -> None:
    objective, validity, failed, X = parts
    acqf = TimesValidity(qLogExpectedImprovement(objective, 0.5), validity, failed, BOUNDS)
    acqf.set_X_pending(X[:2])
    assert torch.equal(acqf.X_pending, X[:2])  # type: ignore[arg-type]
    assert torch.equal(acqf.acqf.X_pending, X[:2])  # type: ignore[arg-type]


@pytest.mark.slow
def test_abandoned_trials_are_failures_and_not_pending() -> None:
    client = make_client("z", num_initial=4)
    run(client, lambda p: "abandoned" if p["x"] > 0.5 else {"z": p["y"]}, 5)
    waiting = client.get_next_trials(max_trials=2)
    client.get_next_trials(max_trials=1)
    adapter: Any = client._generation_strategy.adapter
    acquisition = adapter.generator._acquisition
    assert len(acquisition.failed) >= 1
    pending = {tuple(x) for x in acquisition.X_pending.tolist()}
    assert pending == {tuple(parameters.values()) for parameters in waiting.values()}


def test_validity_is_that_of_the_loop() -> None:
    """The same classifier as `BatchOptimizer`'s, on the same data."""
    X = torch.rand(25, 2, dtype=torch.double)
    valid = X.sum(-1) < 1
    bounds = torch.tensor([[0.0, 0.0], [1.0, 1.0]], dtype=torch.double)
    loop = BatchOptimizer(bounds, num_initial=1, fit_options={"maxiter": 100})
    loop.tell(X, torch.where(valid, X[:, 0], torch.nan))
    model = AxSequentialGP(X, valid.to(X).unsqueeze(-1), likelihood_name="bernoulli", jumps=True)
    model.learn()
    x = torch.rand(50, 2, dtype=torch.double)
    ours, theirs = model.posterior(x).mean.squeeze(-1), loop.probability_of_validity(x)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-8)


def test_validity_learns_from_the_objective() -> None:
    """Trials fail where the objective is high: near the data of the objective there is no failure.

    With a weight of zero, the model is the one that knows of validity alone.
    """
    X = torch.rand(30, 2, dtype=torch.double)
    Y = torch.sin(4 * X[:, :1]) + X[:, 1:]
    valid = (Y < 1.0).to(X)
    mine = valid[:, 0] == 1
    objective = AxSequentialGP(X[mine], Y[mine])
    validity = AxSequentialGP(X[::2], valid[::2], likelihood_name="bernoulli", jumps=True)
    for model in (objective, validity):
        model.learn()
    both = CorrelatedValidity(objective, validity)
    x = torch.rand(40, 2, dtype=torch.double)
    loading = both.model.covar_module.kernels[0].kernels[1]
    assert loading.loadings[1] < 0  # of the objective in the latent function of validity
    with torch.no_grad():
        before = both.posterior(x).mean
        loading.raw_loadings.zero_()
        for own, alone in (
            (both.model.covar_module.kernels[1].kernels[0], validity.covar_module),
            (both.model.mean_module.means.base_means[1], validity.mean_module),
        ):
            own.load_state_dict(alone.state_dict(), strict=False)  # active dimensions
        alone = validity.posterior(x).latent
        # Sites of the two are iterated until they have converged, from different starts.
        torch.testing.assert_close(both.posterior(x).mean, alone.mean, atol=1e-4, rtol=1e-4)
    assert (before - alone.mean).abs().max() > 1e-2
    acqf = TimesValidity(LogExpectedImprovement(objective, 0.5), both, X[~mine], BOUNDS)
    assert acqf(x.unsqueeze(-2)).isfinite().all()


@pytest.mark.slow
def test_client_with_correlated_validity() -> None:
    client = make_client("z", num_initial=4, correlated=True)
    run(client, lambda p: "failed" if p["x"] > 0.5 else {"z": p["y"]}, 7)
    adapter: Any = client._generation_strategy.adapter
    acquisition = adapter.generator._acquisition
    assert isinstance(acquisition, CorrelatedAcquisition)
    assert isinstance(acquisition.validity_model, CorrelatedValidity)

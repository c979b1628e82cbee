from __future__ import annotations

from typing import Any

import pytest
import torch
from botorch.fit import fit_gpytorch_mll
from botorch.models import SingleTaskGP
from botorch.models.transforms import input as inputs
from botorch.models.transforms import outcome as outcomes
from botorch.sampling import SobolQMCNormalSampler
from gpytorch.mlls import ExactMarginalLogLikelihood

from seqgp import SequentialGP
from tests.contract.transform_cases import INPUTS, OUTCOMES, InputCase, observed, transforms
from tests.helpers import assert_close, make_kernel, make_mean
from tests.models.helpers import assert_same, gaussian_likelihood

pytestmark = pytest.mark.usefixtures("float64")
each_input = pytest.mark.parametrize("name", list(INPUTS))
each_outcome = pytest.mark.parametrize("name", list(OUTCOMES))


def test_every_transform_has_a_case() -> None:
    assert set(transforms(inputs, inputs.InputTransform)) == set(INPUTS)
    assert set(transforms(outcomes, outcomes.OutcomeTransform)) == set(OUTCOMES)


def models(X: torch.Tensor, batch_shape: torch.Size, **transform: Any) -> list[Any]:
    """Ours and BoTorch's, each with transforms of its own."""
    result = []
    for kind in (SequentialGP, SingleTaskGP):
        model = kind(
            X,
            observed(X),
            likelihood=gaussian_likelihood(batch_shape=batch_shape),
            covar_module=make_kernel(lengthscale=1.5, batch_shape=batch_shape),
            mean_module=make_mean(batch_shape=batch_shape),
            **{"outcome_transform": None, **{key: make() for key, make in transform.items()}},
        )
        result.append(model.eval())
    return result


def with_inputs(case: InputCase) -> list[Any]:
    torch.manual_seed(0)
    return models(case.train, case.batch_shape, input_transform=case.make)


@each_input
def test_input_transform(name: str) -> None:
    case = INPUTS[name]
    ours, exact = with_inputs(case)
    assert ours.variational_strategy.inducing_points.shape[-1] == case.dim
    for q in (slice(None), slice(0, 1)):
        test = case.test[..., q, :]
        assert_same(ours.posterior(test), exact.posterior(test))
    assert_same(*(model.posterior(case.test, observation_noise=True) for model in (ours, exact)))


@each_input
def test_conditioning_with_an_input_transform(name: str) -> None:
    case = INPUTS[name]
    ours, exact = with_inputs(case)
    new = case.train[..., :2, :]
    Y = observed(new) + 0.5
    known = ours.condition_on_observations(new, Y)
    if case.conditions:
        exact.posterior(case.test)
        expected = exact.condition_on_observations(new, Y)
    else:  # a model of all data, with hyperparameters that are the same
        expected = models(case.train, case.batch_shape, input_transform=case.make)[1]
        expected.train()
        X = torch.cat([case.train, new], -2)
        expected.set_train_data(X, torch.cat([exact.train_targets, Y[..., 0]], -1), strict=False)
        expected.eval()
    assert_same(known.posterior(case.test), expected.posterior(case.test))


@each_input
def test_fantasies_with_an_input_transform(name: str) -> None:
    case, posteriors = INPUTS[name], []
    for model in with_inputs(case):
        sampler = SobolQMCNormalSampler(torch.Size([3]), seed=0)
        fantasies = model.fantasize(case.train[..., :2, :] + 0.01, sampler)
        posteriors.append(fantasies.posterior(case.test))
    assert_same(*posteriors)


@each_input
def test_fit_with_an_input_transform(name: str) -> None:
    """Parameters of the transform are learnt along with all others."""
    bounds = []
    for model in with_inputs(INPUTS[name]):
        mll = ExactMarginalLogLikelihood(model.likelihood, model)
        fit_gpytorch_mll(mll, optimizer_kwargs={"options": {"maxiter": 20}})
        exact = models_like(name, model)
        exact.train()
        bounds.append(
            ExactMarginalLogLikelihood(exact.likelihood, exact)(
                exact(*exact.train_inputs), exact.train_targets
            )
            .sum()
            .item()
        )
    assert bounds[0] == pytest.approx(bounds[1], abs=0.02)  # two runs of L-BFGS, cut short


def models_like(name: str, model: Any) -> SingleTaskGP:
    """An exact GP with the hyperparameters of a model."""
    exact = with_inputs(INPUTS[name])[1]
    own = {k: v for k, v in model.state_dict().items() if not k.startswith("variational")}
    exact.load_state_dict(own, strict=False)
    return exact


@each_outcome
def test_outcome_transform(name: str) -> None:
    case = OUTCOMES[name]
    ours, exact = models(case.train, torch.Size([]), outcome_transform=case.make)
    for noise in (False, True):
        posteriors = [m.posterior(case.test, observation_noise=noise) for m in (ours, exact)]
        if name in ("Power", "Bilog"):  # no mean in closed form
            sampler = SobolQMCNormalSampler(torch.Size([8]), seed=0)
            assert_close(*(sampler(posterior) for posterior in posteriors))
        else:
            assert_same(*posteriors)


@each_outcome
def test_fantasies_with_an_outcome_transform(name: str) -> None:
    case, samples = OUTCOMES[name], []
    for model in models(case.train, torch.Size([]), outcome_transform=case.make):
        sampler = SobolQMCNormalSampler(torch.Size([3]), seed=0)
        fantasies = model.fantasize(case.train[:2] + 0.0, sampler)
        samples.append(
            SobolQMCNormalSampler(torch.Size([4]), seed=1)(fantasies.posterior(case.test))
        )
    assert_close(*samples)

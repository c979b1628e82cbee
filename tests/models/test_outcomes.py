"""The default `Standardize`, and how observations pass through outcome transforms."""

from __future__ import annotations

import copy
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from botorch.exceptions.warnings import InputDataWarning
from botorch.fit import fit_gpytorch_mll
from botorch.models import SingleTaskGP
from botorch.models.transforms import Log, Normalize, Standardize
from botorch.models.transforms.outcome import ChainedOutcomeTransform
from gpytorch.kernels import RBFKernel
from gpytorch.likelihoods import (
    DirichletClassificationLikelihood,
    GaussianLikelihood,
    GaussianLikelihoodWithMissingObs,
)
from gpytorch.mlls import ExactMarginalLogLikelihood

import seqgp
from seqgp import DualELBO, SequentialGP
from seqgp.acquisition import expected_reduction, qExpectedUncertaintyReduction
from seqgp.models.outcomes import affine, default_transform
from tests.helpers import CASES, assert_close, latent, make_inputs, make_kernel, make_mean
from tests.models.helpers import assert_same, data, gaussian_likelihood

pytestmark = pytest.mark.usefixtures("float64")

REAL = {"gaussian", "fixed_noise", "student_t", "laplace", "heteroscedastic"}
SHAPES: dict[str, tuple[tuple[int, ...], int]] = {
    "one": ((), 1),
    "outputs": ((), 2),
    "batch": ((3,), 1),
    "batch of outputs": ((2,), 3),
}


def raw(*batch_shape: int, n: int = 12, outputs: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs in the unit cube, and targets that are far from standardised."""
    X = make_inputs(*batch_shape, n, 2)
    Y = torch.stack([latent(X + 0.3 * k) for k in range(outputs)], -1)
    return X, 100 + 50 * Y * (1 + torch.arange(outputs))


@pytest.mark.parametrize("noise", ["learnt", "known"])
@pytest.mark.parametrize("shape", list(SHAPES))
def test_the_default_is_that_of_botorch(shape: str, noise: str) -> None:
    batch_shape, outputs = SHAPES[shape]
    X, Y = raw(*batch_shape, outputs=outputs)
    Yvar = 4 + torch.rand_like(Y) if noise == "known" else None
    ours, exact = SequentialGP(X, Y, Yvar), SingleTaskGP(X, Y, Yvar).eval()
    assert ours.standardizes_by_default
    assert type(ours.outcome_transform) is Standardize
    assert torch.equal(ours.outcome_transform.means, exact.outcome_transform.means)
    assert torch.equal(ours.outcome_transform.stdvs, exact.outcome_transform.stdvs)
    test = make_inputs(5, 2)
    scale = ours.outcome_transform.stdvs.amax()
    for observed in (False, True):
        ours_at, exact_at = (m.posterior(test, observation_noise=observed) for m in (ours, exact))
        assert_close(ours_at.mean / scale, exact_at.mean / scale, 1e-6)
        assert_close(
            ours_at.covariance_matrix / scale**2, exact_at.covariance_matrix / scale**2, 1e-6
        )


def test_the_first_arguments_are_those_of_single_task_gp() -> None:
    """In their order; and Ax looks them up among the positional ones."""
    ours, exact = map(inspect.getfullargspec, (SequentialGP, SingleTaskGP))
    assert ours.args == exact.args
    assert ours.defaults is not None
    assert exact.defaults is not None
    assert ours.defaults[-len(exact.defaults) :] == exact.defaults
    X, Y = raw()
    with pytest.raises(TypeError, match="positional"):
        SequentialGP(X, Y, None, None, None, None, None, None, 5)  # type: ignore[misc]


@pytest.mark.parametrize("name", list(CASES))
def test_only_real_numbers_are_standardised(name: str) -> None:
    given = data(name)
    model = given.model(outcome_transform=None)
    assert not hasattr(model, "outcome_transform")
    assert not model.standardizes_by_default
    default = SequentialGP(
        given.X,
        given.Y,
        likelihood=given.likelihood,
        covar_module=make_kernel(),
        likelihood_arguments=given.arguments,
    )
    assert hasattr(default, "outcome_transform") == (name in REAL)
    # With several latents, updates keep the first statistics: not all latents have their units.
    adapts = name in REAL and CASES[name].num_latents is None
    assert default.standardizes_by_default == adapts
    if name in REAL:
        targets = default.train_targets
        assert_close(targets.mean(), torch.zeros(()), 1e-9)
        assert_close(targets.std(), torch.ones(()), 1e-9)
    chosen = given.model(outcome_transform=Standardize(1)) if name in REAL else model
    assert not chosen.standardizes_by_default


def test_targets_that_only_look_real_are_left_alone() -> None:
    labels = DirichletClassificationLikelihood(torch.tensor([0, 1, 1]))
    assert default_transform(torch.rand(3, 1), labels) is None
    assert default_transform(torch.rand(3, 1), None, functionals=True) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_one_observation_and_constants(dtype: torch.dtype) -> None:
    """There is no standard deviation: that of the transform is 1, as in BoTorch."""
    X = torch.tensor([[0.3], [0.5], [0.8]], dtype=dtype)
    one = SequentialGP(X[:1], torch.full_like(X[:1], 7.0))
    with pytest.warns(InputDataWarning, match="not standardized"):
        constant = SequentialGP(X, torch.full_like(X, 7.0))
    for model in (one, constant):
        assert model.outcome_transform.means.dtype == dtype
        assert model.outcome_transform.stdvs.item() == 1
        posterior = model.posterior(torch.tensor([[0.0], [0.5]], dtype=dtype))
        assert posterior.mean.dtype == dtype
        assert_close(posterior.mean, torch.full((2, 1), 7.0, dtype=dtype), 1e-5)
        assert (posterior.variance > 0).all()


def test_single_precision() -> None:
    X, Y = raw()
    exact = SequentialGP(X, Y).posterior(X)
    single = SequentialGP(X.float(), Y.float()).posterior(X.float())
    assert single.mean.dtype == torch.float32
    assert_close(single.mean.double(), exact.mean, 1e-3)  # of numbers around 100


def test_no_observations_change_nothing() -> None:
    """Neither the scale, nor what the stream then learns: BoTorch's refuses."""
    X, Y = raw()
    options: dict[str, Any] = {"inducing_points": X, "covar_module": RBFKernel()}
    empty = SequentialGP(X[:0], Y[:0], **options)
    plain = SequentialGP(X[:0], Y[:0], outcome_transform=None, **options)
    assert empty.standardizes_by_default
    for model in (empty, plain):
        model.update(X, Y, learn=False)
    assert_same(empty.posterior(X), plain.posterior(X), tol=1e-9)
    with pytest.raises(ValueError, match="no observations"):
        SequentialGP(X[:0], Y[:0], outcome_transform=Standardize(1), **options)


def test_missing_observations_have_no_say() -> None:
    _, Y = raw(outputs=2)
    Y[:3, 0] = Y[:, 1] = torch.nan
    with pytest.warns(DeprecationWarning, match="observation_nan_policy"):
        likelihood = GaussianLikelihoodWithMissingObs()
    transform = default_transform(Y, likelihood)
    assert transform is not None
    assert_close(transform.means.squeeze(), torch.stack([Y[3:, 0].mean(), torch.zeros(())]))
    assert_close(transform.stdvs.squeeze(), torch.stack([Y[3:, 0].std(), torch.ones(())]))


@pytest.mark.slow
def test_fits_do_not_depend_on_the_scale() -> None:
    X = make_inputs(40, 2)
    Y = 100 + 50 * latent(X).unsqueeze(-1)
    test = make_inputs(60, 2)[40:]
    truth = 100 + 50 * latent(test).unsqueeze(-1)
    errors = []
    for kind, objective in ((SequentialGP, DualELBO), (SingleTaskGP, ExactMarginalLogLikelihood)):
        model = kind(X, Y)
        fit_gpytorch_mll(objective(model.likelihood, model))
        errors.append((model.posterior(test).mean - truth).square().mean().sqrt().item())
    assert errors[0] == pytest.approx(errors[1], rel=0.02)


def test_statistics_are_frozen_and_saved(tmp_path: Path) -> None:
    X, Y = raw(n=20)
    model = SequentialGP(X[:10], Y[:10])
    transform = copy.deepcopy(model.outcome_transform)
    model.update(X[10:], 1000 + Y[10:], learn=False)
    seqgp.save(model, tmp_path / "model.pt")
    again = seqgp.load(tmp_path / "model.pt")
    for each in (model, again):
        assert each.standardizes_by_default
        assert torch.equal(each.outcome_transform.means, transform.means)
        assert torch.equal(each.outcome_transform.stdvs, transform.stdvs)
    assert_same(model.posterior(X), again.posterior(X), tol=0)


def test_noise_is_on_the_scale_of_the_observations() -> None:
    """As ``train_Yvar``, as an argument of the likelihood, and along a stream."""
    X, Y = raw(n=14)
    noise = 4 + torch.rand_like(Y)
    likelihood = SequentialGP(X, Y, noise).likelihood
    given = SequentialGP(X, Y, noise)
    for value in (noise, noise.squeeze(-1)):
        other = SequentialGP(X, Y, likelihood=likelihood, likelihood_arguments={"noise": value})
        assert_same(given.posterior(X), other.posterior(X), tol=1e-9)
    with pytest.raises(ValueError, match=r"noise: expected shape .* x 14"):
        SequentialGP(X, Y, likelihood=likelihood, likelihood_arguments={"noise": torch.ones(3)})


def test_functionals_of_a_standardised_function() -> None:
    """A difference has no offset, a sum has it twice."""
    X, Y = raw(n=10)
    c = torch.tensor([[1.0, -1.0], [1.0, 1.0], [0.5, 0.5]])
    pairs = torch.stack([X[:3], X[3:6]], -2)
    observed = (c * torch.stack([Y[:3, 0], Y[3:6, 0]], -1)).sum(-1, keepdim=True)
    options: dict[str, Any] = {
        "covar_module": make_kernel(),
        "mean_module": make_mean(),
        "likelihood": gaussian_likelihood(),
        "inducing_points": X,
    }
    model = SequentialGP(X[6:], Y[6:], **copy.deepcopy(options))
    mean, scale = model.outcome_transform.means, model.outcome_transform.stdvs
    plain = SequentialGP(
        X[6:], (Y[6:] - mean) / scale, outcome_transform=None, **copy.deepcopy(options)
    )
    model.update(pairs, observed, coefficients=c, learn=False)
    scaled = (observed - mean * c.sum(-1, keepdim=True)) / scale
    plain.update(pairs, scaled, coefficients=c, learn=False)
    ours, expected = model.posterior(X), plain.posterior(X)
    assert_close(ours.mean, mean + scale * expected.mean, 1e-8)
    assert_close(ours.variance, scale**2 * expected.variance, 1e-8)
    # From the start: without a transform by default, and with one that was asked for.
    first = SequentialGP(pairs, observed, coefficients=c, **copy.deepcopy(options))
    assert not hasattr(first, "outcome_transform")
    asked = SequentialGP(
        pairs, observed, coefficients=c, outcome_transform=Standardize(1), **copy.deepcopy(options)
    )
    own = affine(asked.outcome_transform)
    assert own is not None
    assert_close(own.scale.squeeze(), observed.std())
    expected_targets = (observed - own.offset * c.sum(-1, keepdim=True)) / own.scale
    assert_close(asked.train_targets, expected_targets.squeeze(-1), 1e-12)
    with pytest.raises(ValueError, match="outcome_transform: observations of functionals need"):
        SequentialGP(
            pairs, observed.abs() + 1, coefficients=c, outcome_transform=Log(), inducing_points=X
        )


def test_linear_transforms() -> None:
    Y = 5 + 3 * torch.randn(20, 2)
    chained = ChainedOutcomeTransform(one=Standardize(2), two=Standardize(2))
    for transform in (Standardize(2), chained):
        targets, _ = transform(Y)
        inverse = affine(transform)
        assert inverse is not None
        assert_close(inverse.offset + inverse.scale * targets, Y, 1e-12)
    assert affine(Log()) is None


def test_look_ahead_is_on_the_scale_of_the_observations() -> None:
    """Thresholds and variances are those of the observations."""
    X, Y = raw()
    options: dict[str, Any] = {
        "covar_module": make_kernel(),
        "mean_module": make_mean(),
        "likelihood": GaussianLikelihood().initialize(noise=0.2),
    }
    model = SequentialGP(X, Y, **copy.deepcopy(options))
    mean, scale = model.outcome_transform.means.item(), model.outcome_transform.stdvs.item()
    plain = SequentialGP(X, (Y - mean) / scale, outcome_transform=None, **copy.deepcopy(options))
    test = make_inputs(20, 2)[12:]
    for criterion, threshold, unit in (
        ("variance", None, scale**2),
        ("threshold-entropy", 110.0, 1.0),
    ):
        level = None if threshold is None else (threshold - mean) / scale
        ours = expected_reduction(model, test, X, criterion, threshold)
        expected = unit * expected_reduction(plain, test, X, criterion, level)
        assert_close(ours, expected, 1e-4)  # in single precision
        for q in (1, 2):
            values = [
                qExpectedUncertaintyReduction(m, X, criterion, t)(test.reshape(-1, q, 2))
                for m, t in ((model, threshold), (plain, level))
            ]
            assert_close(values[0], unit * values[1], 1e-6)
    logs = SequentialGP(X, Y.abs() + 1, outcome_transform=Log(), covar_module=make_kernel())
    with pytest.raises(ValueError, match="non-linear outcome_transform"):
        expected_reduction(logs, test, X, "variance")


def test_the_transform_can_be_given_with_an_input_transform() -> None:
    X, Y = raw()
    ours = SequentialGP(10 * X, Y, input_transform=Normalize(2))
    exact = SingleTaskGP(10 * X, Y, input_transform=Normalize(2)).eval()
    assert_close(ours.posterior(10 * X).mean, exact.posterior(10 * X).mean, 1e-6)

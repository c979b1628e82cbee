"""float32, for whoever has a GPU: kernels of any scale, little noise, repeated inducing points."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from gpytorch.kernels import MaternKernel, RBFKernel, ScaleKernel
from gpytorch.likelihoods import BernoulliLikelihood, GaussianLikelihood, Likelihood
from gpytorch.means import ZeroMean
from linear_operator.utils.warnings import NumericalWarning
from torch import Tensor

from seqgp import DualELBO, SequentialGP
from tests.helpers import CASES, GP, latent, make_inputs

JITTER = 1e-5  # the default of float32, here for both: what is compared is rounding
VARIANCES = [1e-4, 1e-2, 1.0, 1e2, 1e4]
PRECISIONS = (torch.float32, torch.float64)


@pytest.fixture(autouse=True)
def _no_numerical_warnings() -> Iterator[None]:
    """No jitter beyond the one that was asked for, no negative variances."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", NumericalWarning)
        yield


def data(variance: float, n: int = 300) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs, function values of some variance, and test inputs, in float64."""
    x = make_inputs(n, 2).double()
    return x, variance**0.5 * latent(x), make_inputs(40, 2).double()


def make(Z: Tensor, variance: float, likelihood: Likelihood, dtype: torch.dtype) -> GP:
    kernel = ScaleKernel(MaternKernel(nu=2.5))
    model = GP(Z.to(dtype), likelihood, ZeroMean(), kernel, jitter_val=JITTER).to(dtype).eval()
    kernel.base_kernel.lengthscale = 0.3
    kernel.outputscale = variance
    return model


def assert_as_precise(single: Any, double: Any, variance: float, tol: float) -> None:
    """Errors in units of the prior's standard deviation and variance."""
    for q in (single, double):
        assert q.mean.isfinite().all()
        assert (q.variance > 0).all()
    assert (single.mean.double() - double.mean).abs().max() < tol * variance**0.5
    assert (single.variance.double() - double.variance).abs().max() < 2e-5 * variance


@pytest.mark.parametrize(("m", "repeat"), [(20, 1), (200, 1), (100, 2)])
@pytest.mark.parametrize("noise", [1e-3, 1e-1, 1.0])
@pytest.mark.parametrize("variance", VARIANCES)
def test_gaussian(variance: float, noise: float, m: int, repeat: int) -> None:
    x, f, test = data(variance)
    y = f + noise**0.5 * torch.randn(300, dtype=torch.float64)
    posteriors = []
    for dtype in PRECISIONS:
        likelihood = GaussianLikelihood().to(dtype)
        likelihood.noise = noise
        model = make(x[:m].repeat(repeat, 1), variance, likelihood, dtype)
        model.variational_strategy.converge(x.to(dtype), y.to(dtype))
        posteriors.append(model(test.to(dtype)))
        assert posteriors[-1].rsample().isfinite().all()
    # Errors grow with the condition number of W, about n * variance / noise.
    assert_as_precise(*posteriors, variance, 1e-3 if variance / noise < 1e6 else 1e-2)


@pytest.mark.parametrize(("m", "repeat"), [(20, 1), (100, 2)])
@pytest.mark.parametrize("variance", VARIANCES[:3])
def test_bernoulli(variance: float, m: int, repeat: int) -> None:
    x, f, test = data(variance)
    posteriors = []
    for dtype in PRECISIONS:
        model = make(x[:m].repeat(repeat, 1), variance, BernoulliLikelihood().to(dtype), dtype)
        info = model.variational_strategy.converge(x.to(dtype), (f > 0).to(dtype))
        assert info.converged
        posteriors.append(model(test.to(dtype)))
    assert_as_precise(*posteriors, variance, 1e-4)


@pytest.mark.parametrize("likelihood", [GaussianLikelihood, BernoulliLikelihood])
@pytest.mark.parametrize("variance", VARIANCES[:4])
def test_everything_else(variance: float, likelihood: type[Likelihood]) -> None:
    """Fantasies, other inducing points, hyperparameters, gradients: finite and as in float64."""
    x, f, test = data(variance, n=100)
    f = (f > 0).double() if likelihood is BernoulliLikelihood else f
    fantasies, moved, gradients = [], [], []
    for dtype in PRECISIONS:
        model = make(x[:40], variance, likelihood().to(dtype), dtype)
        inputs, targets, new = x.to(dtype), f.to(dtype), test.to(dtype)
        model.variational_strategy.converge(inputs, targets, max_steps=300, tol=1e-5)
        fantasies.append(model.get_fantasy_model(inputs[:5], targets[:5])(new))
        model.variational_strategy.set_inducing_points(inputs[20:60])
        model.covar_module.outputscale = 2 * variance
        moved.append(model(new))
        model.train()
        DualELBO(model.likelihood, model)(model(inputs), targets).backward()
        gradients.append(model.covar_module.base_kernel.raw_lengthscale.grad)
    assert_as_precise(*fantasies, variance, 1e-3)
    assert_as_precise(*moved, variance, 1e-3)
    assert all(gradient.isfinite().all() for gradient in gradients)
    torch.testing.assert_close(*gradients, rtol=1e-2, atol=1e-4, check_dtype=False)


def whole_cycle(name: str, variance: float, dtype: torch.dtype) -> list[Tensor]:
    """Learn, predict, condition, move, differentiate: everything that comes out, as float64."""
    case, n = CASES[name], 40
    x = make_inputs(n, 2)  # float32, as are the parameters of the likelihoods when they are made
    y = case.sample(latent(x, case.num_latents))
    y = y if case.num_latents else y.to(dtype)
    x, new = x.to(dtype), make_inputs(5, 2).to(dtype)
    arguments = {key: value.to(dtype) for key, value in case.arguments(n).items()}
    few = {key: value[:3] for key, value in arguments.items()}
    kernel = ScaleKernel(MaternKernel(nu=2.5))
    model = GP(
        x[:10], case.make(), ZeroMean(), kernel, num_latents=case.num_latents, jitter_val=JITTER
    )
    model.to(dtype).eval()
    kernel.base_kernel.lengthscale = 0.3
    kernel.outputscale = variance
    strategy, options = model.variational_strategy, {"tol": 1e-5, "max_steps": 300}
    info = strategy.converge(x, y, **options, **arguments)
    posterior = model(new)
    fantasy = model.get_fantasy_model(new[:3], y[:3], **few, **options)(new)
    results = [info.elbo, posterior.mean, posterior.variance, fantasy.mean, fantasy.variance]
    strategy.set_inducing_points(x[5:20])
    results.append(model(new).variance)
    model.train()
    elbo = DualELBO(model.likelihood, model)(model(x), y, **arguments)
    elbo.backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return [tensor.detach().double() for tensor in (*results, elbo, *gradients)]


@pytest.mark.parametrize("variance", VARIANCES)
@pytest.mark.parametrize("name", list(CASES))
def test_any_likelihood_at_any_scale(name: str, variance: float) -> None:
    """Finite in float32 and float64, and, where the sites are easily found, the same in both."""
    with warnings.catch_warnings():
        # A likelihood whose quadrature is too coarse at such a scale may not converge, and says so.
        warnings.filterwarnings("ignore", "The sites have not converged", NumericalWarning)
        if name in ("gamma", "heteroscedastic") and variance > 1e3:
            # Exponentials of such latents span thousands of orders of magnitude.
            warnings.filterwarnings("ignore", "A not p.d.")
        single, double = (whole_cycle(name, variance, dtype) for dtype in PRECISIONS)
    for a, b in zip(single, double, strict=True):
        assert a.isfinite().all()
        assert b.isfinite().all()
    if variance <= 1:
        for a, b in zip(single[:6], double[:6], strict=True):
            assert (a - b).abs().max() < 1e-3 * (1 + b.abs().max())


# -------------------------------------------------------------------- conversion


def stream(labels: bool, lengthscale: float, dtype: torch.dtype) -> SequentialGP:
    """A stream of which most is folded, with a kernel that is nearly singular at its inputs."""
    kernel = ScaleKernel(RBFKernel()).to(dtype)
    kernel.outputscale, kernel.base_kernel.lengthscale = 1.0, lengthscale
    likelihood = BernoulliLikelihood() if labels else GaussianLikelihood().initialize(noise=1e-2)
    x = make_inputs(160, 2).double()
    y = (6 * x).sin().sum(-1, keepdim=True)
    y = (y > 0.3).double() if labels else y / y.std() - (y / y.std()).mean()
    parts = list(zip(x.to(dtype).split(40), y.to(dtype).split(40), strict=True))
    model = SequentialGP(*parts[0], likelihood=likelihood.to(dtype), covar_module=kernel)
    for part in parts[1:]:  # float32 would choose more inducing points, and lose less
        model.update(*part, learn=False, memory=20, inducing="fixed")
    return model


@pytest.mark.filterwarnings("ignore::botorch.exceptions.warnings.InputDataWarning")
@pytest.mark.parametrize(("labels", "lengthscale"), [(True, 0.3), (False, 0.3), (False, 1.0)])
def test_conversion_is_as_good_as_a_stream_in_that_precision(
    labels: bool, lengthscale: float
) -> None:
    """What is lost is what the larger jitter of float32 loses anyway; and back, no more."""
    double, single = (stream(labels, lengthscale, dtype) for dtype in (torch.double, torch.float))
    x = make_inputs(40, 2).double()
    expected = double.posterior(x).mean
    native = (single.posterior(x.float()).mean.double() - expected).abs().max()
    converted = copy.deepcopy(double).float()
    error = (converted.posterior(x.float()).mean.double() - expected).abs().max()
    back = (converted.double().posterior(x).mean - expected).abs().max()
    assert native < 0.02
    assert error < 1.2 * native + 1e-3
    assert back < 3 * native + 1e-3
    converted.update(x[:5], expected[:5].sign().clamp_min(0) if labels else expected[:5])

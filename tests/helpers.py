"""A small GP, data for it, one case for each likelihood, and dense formulas to compare with."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from typing import Any, NamedTuple

import pytest
import torch
from gpytorch import likelihoods as gl
from gpytorch.distributions import MultivariateNormal
from gpytorch.kernels import Kernel, MaternKernel, ScaleKernel
from gpytorch.likelihoods import Likelihood
from gpytorch.means import ConstantMean, Mean
from gpytorch.models import ApproximateGP
from gpytorch.variational import VariationalStrategy
from torch import Tensor

from seqgp import (
    BinomialLikelihood,
    CensoredGaussianLikelihood,
    DualVariationalStrategy,
    GammaLikelihood,
    HeteroscedasticGaussianLikelihood,
    OrdinalLikelihood,
    OverdispersedBinomialLikelihood,
    PsychometricLikelihood,
    TieLikelihood,
)
from seqgp.dual import Convergence
from seqgp.likelihoods.expectations import expected_log_prob

EMPTY = torch.Size()

#: For tests with data that are raw on purpose: BoTorch would have them scaled.
unscaled = pytest.mark.filterwarnings(
    "ignore:Data .* is not (standardized|contained):botorch.exceptions.warnings.InputDataWarning"
)
#: For tests of plain expected improvement: BoTorch would have its logarithm.
plain_improvement = pytest.mark.filterwarnings(
    "ignore:.* has known numerical issues:botorch.exceptions.warnings.NumericsWarning"
)
#: Options of a `BatchOptimizer` whose proposals need not be good.
FEW_RESTARTS: dict[str, Any] = {
    "num_restarts": 2,
    "raw_samples": 16,
    "options": {"maxiter": 15},
    "fit_options": {"maxiter": 10},
}
#: For tests that are content with a candidate where a line search has ended early.
early_line_searches = pytest.mark.filterwarnings("ignore:Optimization failed:RuntimeWarning")


def make_mean(constant: float = 0.3, batch_shape: torch.Size = EMPTY) -> Mean:
    mean = ConstantMean(batch_shape=batch_shape)
    mean.initialize(constant=torch.full(batch_shape, constant))
    return mean


def make_kernel(
    lengthscale: float | Tensor = 0.4,
    outputscale: float | Tensor = 1.3,
    batch_shape: torch.Size = EMPTY,
) -> Kernel:
    """A Matern kernel: smooth enough to learn, rough enough for ``Kzz`` to be well conditioned."""
    kernel = ScaleKernel(MaternKernel(nu=1.5, batch_shape=batch_shape), batch_shape=batch_shape)
    kernel.base_kernel.lengthscale = lengthscale
    kernel.outputscale = outputscale
    return kernel


class Prior(ApproximateGP):
    """``forward``, without any strategy."""

    def __init__(
        self,
        strategy: Any,
        likelihood: Likelihood | None = None,
        mean: Mean | None = None,
        kernel: Kernel | None = None,
    ) -> None:
        super().__init__(strategy)
        self.mean_module = make_mean() if mean is None else mean
        self.covar_module = make_kernel() if kernel is None else kernel
        if likelihood is not None:
            self.likelihood = likelihood

    def forward(self, x: Tensor) -> MultivariateNormal:
        return MultivariateNormal(self.mean_module(x), self.covar_module(x))


class GP(Prior):
    """The model under test; keyword arguments are those of the strategy."""

    variational_strategy: DualVariationalStrategy

    def __init__(
        self,
        Z: Tensor,
        likelihood: Likelihood | None = None,
        mean: Mean | None = None,
        kernel: Kernel | None = None,
        **strategy: Any,
    ) -> None:
        super().__init__(DualVariationalStrategy(self, Z, **strategy), likelihood, mean, kernel)


class SVGP(Prior):
    """The same model on GPyTorch's own strategy, with as little jitter."""

    def __init__(
        self,
        Z: Tensor,
        distribution: Any,
        wrap: Callable[[Any], Any] = lambda strategy: strategy,
        jitter_val: float = 1e-8,
        **modules: Any,
    ) -> None:
        strategy = VariationalStrategy(self, Z, distribution, False, jitter_val)
        super().__init__(wrap(strategy), **modules)


class Case(NamedTuple):
    """A likelihood, its number of latent functions, and its per-point arguments for n points."""

    make: Callable[[], Likelihood]
    num_latents: int | None = None
    arguments: Callable[[int], dict[str, Any]] = lambda n: {}

    @property
    def num_outputs(self) -> int:
        """How many outputs a model has: all latents, or those that the likelihood names."""
        outputs = getattr(self.make(), "output_latents", None)
        return (self.num_latents or 1) if outputs is None else len(outputs)

    def sample(self, f: Tensor) -> Tensor:
        """Observations of latent values ``... x n [x c]``, the same each time."""
        with torch.no_grad(), torch.random.fork_rng():
            torch.manual_seed(1)
            if self.num_latents:  # one point at a time: GPyTorch's softmax may transpose others
                return self.make().forward(f.unsqueeze(-2)).sample().squeeze(-1)
            y = self.make().forward(f, **self.arguments(f.shape[-1])).sample()
        return y.clamp(0.01, 0.99) if "Beta" in repr(self.make()) else y


def student_t() -> Likelihood:
    likelihood = gl.StudentTLikelihood()
    likelihood.initialize(noise=0.5, deg_free=4.0)
    return likelihood


def softmax(mixing: bool = False) -> Likelihood:
    with torch.random.fork_rng():
        torch.manual_seed(2)
        return gl.SoftmaxLikelihood(num_features=3, num_classes=3, mixing_weights=mixing)


CASES = {
    "gaussian": Case(lambda: gl.GaussianLikelihood().initialize(noise=0.2)),
    "fixed_noise": Case(
        lambda: gl.FixedNoiseGaussianLikelihood(torch.ones(1)),
        arguments=lambda n: {"noise": torch.linspace(0.1, 0.6, n)},
    ),
    "bernoulli": Case(gl.BernoulliLikelihood),
    "poisson": Case(gl.PoissonLikelihood),
    "student_t": Case(student_t),
    "laplace": Case(lambda: gl.LaplaceLikelihood().initialize(noise=0.3)),
    "beta": Case(lambda: gl.BetaLikelihood().initialize(scale=4.0)),
    "negative_binomial": Case(gl.NegativeBinomialLikelihood),
    "binomial": Case(
        BinomialLikelihood, arguments=lambda n: {"total_count": 2.0 + torch.arange(n) % 4}
    ),
    "overdispersed_binomial": Case(
        OverdispersedBinomialLikelihood,
        arguments=lambda n: {"total_count": 2.0 + torch.arange(n) % 4},
    ),
    "psychometric": Case(lambda: PsychometricLikelihood(0.5, 0.02)),
    "gamma": Case(lambda: GammaLikelihood().initialize(shape=3.0)),
    "censored": Case(
        lambda: CensoredGaussianLikelihood().initialize(noise=0.3),
        arguments=lambda n: {
            "side": torch.arange(n) % 3 - 1.0,
            "width": 0.5 * (torch.arange(n) % 4 == 3),
        },
    ),
    "heteroscedastic": Case(HeteroscedasticGaussianLikelihood, num_latents=2),
    "ordinal": Case(lambda: OrdinalLikelihood(4)),
    "ties": Case(TieLikelihood),
    "softmax": Case(softmax, num_latents=3),
    "softmax_mixing": Case(lambda: softmax(mixing=True), num_latents=3),
}
NOT_LOG_CONCAVE = ["student_t", "beta", "negative_binomial", "psychometric", "heteroscedastic"]
CONJUGATE = ["gaussian", "fixed_noise"]
ONE_LATENT = [name for name, case in CASES.items() if case.num_latents is None]


class Problem(NamedTuple):
    """A data set for a case: ``n x d`` inputs, ``m x d`` inducing points, ``t x d`` test inputs."""

    x: Tensor
    y: Tensor
    Z: Tensor
    test: Tensor
    likelihood: Likelihood
    arguments: dict[str, Any]
    num_latents: int | None

    def model(self, Z: Tensor | None = None, **kwargs: Any) -> GP:
        Z = self.Z if Z is None else Z
        return GP(Z, self.likelihood, num_latents=self.num_latents, **kwargs)

    def learn(self, model: GP, **options: Any) -> Convergence:
        """Converge the sites of the data."""
        options = {"tol": 1e-10, "max_steps": 500} | options
        return model.variational_strategy.converge(self.x, self.y, **self.arguments, **options)

    def converged(self, Z: Tensor | None = None, **kwargs: Any) -> GP:
        """A model in eval mode that has learnt the data."""
        model = self.model(Z, **kwargs).eval()
        assert self.learn(model).converged
        return model


def latent(x: Tensor, num_latents: int | None = None) -> Tensor:
    """A function to learn, ``... x n [x c]``."""
    f = 1.5 * (4 * x[..., 0]).sin() + x[..., -1]
    if num_latents is None:
        return f
    return torch.stack([1.5 * (4 * x[..., 0] + 2.0 * k).sin() for k in range(num_latents)], -1)


def make_inputs(*shape: int) -> Tensor:
    """Uniform inputs, the same for the same shape and another for another."""
    generator = torch.Generator().manual_seed(sum(k * s for k, s in enumerate(shape, 1)))
    return torch.rand(*shape, generator=generator, dtype=torch.float64).to(
        torch.get_default_dtype()
    )


def problem(name: str, n: int = 30, m: int = 7, d: int = 2) -> Problem:
    case = CASES[name]
    x = make_inputs(n, d)
    y = case.sample(latent(x, case.num_latents))
    # Inducing points on a lattice: far from each other, so that Kzz is well conditioned.
    roots = torch.tensor([0.7548776662466927, 0.5698402909980532])[:d]
    Z = (0.5 + torch.arange(1, m + 1).unsqueeze(-1) * roots) % 1
    return Problem(
        *(x, y, Z, make_inputs(6, d)),
        *(case.make(), case.arguments(n), case.num_latents),
    )


class Dense(NamedTuple):
    """The prior's covariances, dense and without jitter."""

    zz: Tensor
    zx: Tensor
    xx: Tensor
    mean_z: Tensor
    mean_x: Tensor


@torch.no_grad()
def dense_prior(model: Prior, Z: Tensor, x: Tensor) -> Dense:
    joint, m = model.forward(torch.cat([Z, x])), Z.shape[-2]
    K, mean = joint.covariance_matrix, joint.mean
    return Dense(K[:m, :m], K[:m, m:], K[m:, m:], mean[:m], mean[m:])


class SameExpectations:
    """Mixed into a likelihood: GPyTorch with seqgp's deterministic expectations.

    GPyTorch draws new samples for softmax likelihoods at each call, and its approximation of log
    Phi for Bernoulli likelihoods is off by 2e-3 for arguments below -1.
    """

    def expected_log_prob(self, target: Tensor, dist: MultivariateNormal, **kwargs: Any) -> Tensor:
        return expected_log_prob(self, target, dist.mean, dist.variance, **kwargs)


def with_same_expectations(likelihood: Likelihood) -> Likelihood:
    likelihood, kind = copy.deepcopy(likelihood), type(likelihood)
    likelihood.__class__ = type(kind.__name__, (SameExpectations, kind), {})
    return likelihood


def assert_close(actual: Tensor, expected: Tensor, tol: float = 1e-6) -> None:
    torch.testing.assert_close(actual, expected, rtol=tol, atol=tol, check_dtype=False)


def assert_same_posterior(a: Any, b: Any, x: Tensor, tol: float = 1e-6) -> None:
    """Equal means and covariances at ``x`` of two models or distributions."""
    a, b = (m(x) if isinstance(m, torch.nn.Module) else m for m in (a, b))
    assert_close(a.mean, b.mean, tol)
    assert_close(a.covariance_matrix, b.covariance_matrix, tol)


def state_of(model: torch.nn.Module) -> dict[str, Tensor]:
    """A copy of the state, to see later that nothing has changed."""
    return {key: value.clone() for key, value in model.state_dict().items()}


def assert_untouched(model: torch.nn.Module, before: dict[str, Tensor]) -> None:
    """The state is the same, bit by bit."""
    after = model.state_dict()
    assert after.keys() == before.keys()
    for key, value in before.items():
        assert torch.equal(after[key], value), key


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@contextmanager
def terminal() -> Iterator[io.StringIO]:
    """A terminal, the only place where progress bars are drawn; what is written to it."""
    with redirect_stderr(_Terminal()) as stream:
        yield stream


def marginals(name: str, *shape: int) -> tuple[Tensor, Tensor]:
    """Means and variances ``shape [x c]``."""
    mean = latent(make_inputs(*shape, 1), CASES[name].num_latents)
    return mean, 0.05 + 0.4 * make_inputs(*mean.shape)


def observations(name: str, *shape: int) -> Tensor:
    """Targets that are possible under a likelihood, of a given shape."""
    return CASES[name].sample(latent(make_inputs(*shape, 2), CASES[name].num_latents))

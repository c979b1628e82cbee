"""`SequentialGP` on small data sets, and BoTorch's exact GP with the same modules."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import torch
from botorch.models import SingleTaskGP
from botorch.posteriors import Posterior
from gpytorch.likelihoods import GaussianLikelihood, Likelihood
from torch import Tensor

from seqgp import SequentialGP
from tests.helpers import (
    CASES,
    EMPTY,
    Case,
    assert_close,
    latent,
    make_inputs,
    make_kernel,
    make_mean,
)

#: One of each kind: conjugate, closed-form sites, quadrature, counts out of a total.
FOUR = ["gaussian", "bernoulli", "binomial", "poisson"]


class Data(NamedTuple):
    """Observations in BoTorch's shapes: ``n x d`` inputs and ``n x 1`` targets."""

    X: Tensor
    Y: Tensor
    likelihood: Likelihood
    arguments: dict[str, Any]

    def model(self, **kwargs: Any) -> SequentialGP:
        """A model of these data in eval mode, by default with an inducing point at each input."""
        model = SequentialGP(
            self.X,
            self.Y,
            **{
                "likelihood": copy.deepcopy(self.likelihood),
                "covar_module": make_kernel(),
                "mean_module": make_mean(),
                "likelihood_arguments": self.arguments,
                "outcome_transform": None,
                **kwargs,
            },
        )
        return model.eval()


def observe(name: str, X: Tensor) -> tuple[Tensor, dict[str, Any]]:
    """Observations ``... x n x 1`` at ``... x n x d``, and arguments to condition on them with."""
    case: Case = CASES[name]
    y = case.sample(latent(X, case.num_latents)).unsqueeze(-1)
    return y.to(X), conditioning(case.arguments(X.shape[-2]))


def conditioning(arguments: dict[str, Any]) -> dict[str, Any]:
    """Per-point arguments ``n`` as `condition_on_observations` takes them: noise is ``n x m``."""
    return {k: v.unsqueeze(-1) if k == "noise" else v for k, v in arguments.items()}


def data(name: str, n: int = 12, d: int = 2) -> Data:
    X = make_inputs(n, d)
    return Data(X, observe(name, X)[0], CASES[name].make(), CASES[name].arguments(n))


def totals(name: str, q: int) -> dict[str, Any]:
    """What a posterior over observations at ``q`` points needs to know."""
    return CASES[name].arguments(q) if name in ("binomial", "overdispersed_binomial") else {}


def gaussian_likelihood(noise: float = 0.2, batch_shape: torch.Size = EMPTY) -> GaussianLikelihood:
    return GaussianLikelihood(batch_shape=batch_shape).initialize(noise=noise)


def pair(
    n: int = 12,
    d: int = 2,
    outputs: int = 1,
    batch_shape: torch.Size = EMPTY,
    fixed_noise: bool = False,
    **kwargs: Any,
) -> tuple[SequentialGP, SingleTaskGP]:
    """The same Gaussian model twice, in eval mode: ours with Z = X, and BoTorch's exact one."""
    X = make_inputs(*batch_shape, n, d)
    Y = torch.stack([latent(X + 0.3 * k) for k in range(outputs)], -1)
    Y = Y + 0.3 * torch.randn(Y.shape, generator=torch.Generator().manual_seed(3))
    shape = torch.Size([*batch_shape, outputs]) if outputs > 1 else batch_shape
    kernel = make_kernel(
        lengthscale=0.3 + 0.2 * torch.rand(*shape, 1, 1), batch_shape=shape
    )  # a kernel of its own for each output
    modules = {"covar_module": kernel, "mean_module": make_mean(batch_shape=shape)}
    if fixed_noise:
        kwargs["train_Yvar"] = 0.1 + 0.4 * torch.rand(Y.shape)
    else:
        modules["likelihood"] = gaussian_likelihood(batch_shape=shape)
    kwargs = {"outcome_transform": None, **kwargs}
    ours = SequentialGP(X, Y, **copy.deepcopy(modules), **copy.deepcopy(kwargs))
    exact = SingleTaskGP(X, Y, **copy.deepcopy(modules), **copy.deepcopy(kwargs))
    return ours.eval(), exact.eval()


def assert_same(a: Posterior, b: Posterior, tol: float = 1e-6) -> None:
    """Equal means and covariances (variances, if they are not Gaussian)."""
    assert a.mean.shape == b.mean.shape
    assert_close(a.mean, b.mean, tol)
    assert_close(a.variance, b.variance, tol)
    if hasattr(a, "covariance_matrix") and hasattr(b, "covariance_matrix"):
        assert_close(a.covariance_matrix, b.covariance_matrix, tol)

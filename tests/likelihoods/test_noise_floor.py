from __future__ import annotations

import pytest
import torch
from gpytorch.constraints import GreaterThan
from gpytorch.likelihoods import (
    BernoulliLikelihood,
    GaussianLikelihood,
    LaplaceLikelihood,
    Likelihood,
    StudentTLikelihood,
)

from seqgp.likelihoods.noise_floor import noise_floor

pytestmark = pytest.mark.usefixtures("float64")


@pytest.mark.parametrize("likelihood", [StudentTLikelihood(), LaplaceLikelihood()], ids=repr)
@pytest.mark.parametrize("scale", [1e-3, 1.0, 50.0])
def test_is_relative_to_the_variance_of_the_targets(likelihood: Likelihood, scale: float) -> None:
    targets = scale * torch.tensor([[1.0, 3.0, 5.0], [0.0, 2.0, 1.0]])  # variances 4 and 1
    likelihood.initialize(noise=scale**2)
    bounds = noise_floor(likelihood, targets)
    assert list(bounds) == ["likelihood.raw_noise"]
    lower, upper = bounds["likelihood.raw_noise"]
    assert upper is None
    floor = likelihood.raw_noise_constraint.transform(torch.tensor(lower))
    assert float(floor) == pytest.approx(1e-4 * scale**2, rel=1e-6)


def test_noise_that_was_set_to_less_stays() -> None:
    likelihood = StudentTLikelihood().initialize(noise=1e-6)
    lower, _ = noise_floor(likelihood, torch.tensor([0.0, 1.0]))["likelihood.raw_noise"]
    assert float(lower) == pytest.approx(likelihood.raw_noise.item(), rel=1e-6)


@pytest.mark.parametrize(
    ("likelihood", "targets"),
    [
        (GaussianLikelihood(), torch.randn(5)),  # has BoTorch's minimum or the user's
        (StudentTLikelihood(noise_constraint=GreaterThan(1e-8)), torch.randn(5)),
        (BernoulliLikelihood(), torch.ones(5)),
        (StudentTLikelihood(), torch.ones(5)),  # without variance there is no scale
        (StudentTLikelihood(), torch.ones(1)),
    ],
    ids=["Gaussian", "own constraint", "labels", "constant", "one"],
)
def test_nothing_to_bound(likelihood: Likelihood, targets: torch.Tensor) -> None:
    assert noise_floor(likelihood, targets) == {}

"""Parts of a model as plain data, and back."""

from __future__ import annotations

from typing import Any

import gpytorch.likelihoods as gl
import pytest
import torch
from botorch.models.transforms import input as bi
from botorch.models.transforms import outcome as bo
from botorch.models.utils.gpytorch_modules import (
    get_covar_module_with_dim_scaled_prior,
    get_gaussian_likelihood_with_lognormal_prior,
)
from gpytorch import constraints as gc
from gpytorch import kernels as gk
from gpytorch import means as gm
from gpytorch import priors as gp

from seqgp import BinomialLikelihood, OrdinalLikelihood, OverdispersedBinomialLikelihood
from seqgp.checkpoint.registry import CannotDescribe, describe, difference, rebuild, register
from seqgp.streaming.memory import MemoryOptions
from tests.helpers import CASES

pytestmark = pytest.mark.usefixtures("float64")

TWO = torch.Size([2])
PARTS: dict[str, Any] = {
    **{name: case.make for name, case in CASES.items()},
    "ordinal, learnt scale": lambda: OrdinalLikelihood(
        3, link="logit", learn_scale=True, scale_prior=gp.GammaPrior(2.0, 3.0)
    ),
    "totals": lambda: BinomialLikelihood(torch.arange(5), link="probit"),
    "nugget": lambda: OverdispersedBinomialLikelihood(
        10, nugget_prior=gp.LogNormalPrior(0.0, 1.0), batch_shape=TWO
    ),
    "botorch's noise": lambda: get_gaussian_likelihood_with_lognormal_prior(TWO),
    "additional noise": lambda: gl.FixedNoiseGaussianLikelihood(
        torch.rand(2, 5), learn_additional_noise=True, batch_shape=TWO
    ),
    "failures": lambda: gl.NegativeBinomialLikelihood(num_failures_param=True),
    "botorch's kernel": lambda: get_covar_module_with_dim_scaled_prior(3, batch_shape=TWO),
    "scale": lambda: gk.ScaleKernel(
        gk.MaternKernel(nu=0.5, active_dims=(0, 2)),
        outputscale_prior=gp.LogNormalPrior(4.0, 1.0),
        outputscale_constraint=gc.Interval(0.1, 3.0),
    ),
    "sum and product": lambda: (
        gk.ScaleKernel(gk.RBFKernel() + gk.LinearKernel())
        * gk.PeriodicKernel(period_length_prior=gp.GammaPrior(1.0, 1.0))
    ),
    "rational": lambda: gk.RQKernel(ard_num_dims=3),
    "polynomial": lambda: gk.PolynomialKernel(2, offset_constraint=gc.Positive()),
    "cosine": gk.CosineKernel,
    "constant kernel": lambda: gk.ScaleKernel(gk.ConstantKernel()),
    "piecewise": lambda: gk.PiecewisePolynomialKernel(q=1),
    "linear mean": lambda: gm.LinearMean(3),
    "zero mean": gm.ZeroMean,
    "constant": lambda: gm.ConstantMean(
        constant_prior=gp.NormalPrior(0.0, 1.0), constant_constraint=gc.Interval(-1.0, 1.0)
    ),
    "batch of constants": lambda: gm.ConstantMean(batch_shape=TWO),
    "normalize": lambda: bi.Normalize(3),
    "normalize some": lambda: bi.Normalize(3, indices=[0, 1], bounds=2 * torch.eye(2)),
    "standardize inputs": lambda: bi.InputStandardize(3),
    "chain": lambda: bi.ChainedInputTransform(log=bi.Log10(indices=[1]), scale=bi.Normalize(3)),
    "standardize": lambda: bo.Standardize(2, batch_shape=torch.Size([3])),
    "power": lambda: bo.Power(0.5),
    "chain of outcomes": lambda: bo.ChainedOutcomeTransform(a=bo.Bilog(), b=bo.Standardize(1)),
    "half normal": lambda: gp.HalfNormalPrior(1.0),
    "half Cauchy": lambda: gp.HalfCauchyPrior(1.0),
    "uniform": lambda: gp.UniformPrior(0.0, 2.0),
    "less": lambda: gc.LessThan(3.0),
    "exponential": lambda: gc.Positive(transform=torch.exp, inv_transform=torch.log),
    "memory": lambda: MemoryOptions(capacity=3, policy="random"),
    "plain": lambda: {"a": [1, 2.5, None, "b"], 3: (True, TWO, torch.float32)},
}


@pytest.mark.parametrize("name", list(PARTS))
def test_there_and_back(name: str) -> None:
    part = PARTS[name]()
    again = rebuild(describe(part, name))
    assert difference(part, again, name) is None
    if isinstance(part, torch.nn.Module):
        assert repr(part) == repr(again)
        assert {k: v.shape for k, v in part.state_dict().items()} == {
            k: v.shape for k, v in again.state_dict().items()
        }


def test_differences_are_seen() -> None:
    for a, b in (
        (gk.MaternKernel(nu=0.5), gk.MaternKernel(nu=1.5)),
        (gk.RBFKernel(), gk.RBFKernel(ard_num_dims=2)),
        (gk.RBFKernel(), gk.RBFKernel(lengthscale_prior=gp.GammaPrior(1.0, 1.0))),
        (gp.GammaPrior(1.0, 2.0), gp.NormalPrior(1.0, 2.0)),
        (gp.LogNormalPrior(1.0, 2.0), gp.LogNormalPrior(1.5, 2.0)),
        (gc.Positive(), gc.Positive(transform=torch.exp, inv_transform=torch.log)),
        (lambda x: x, lambda x: 2 * x),
    ):
        assert difference(a, b, "it") is not None
        assert difference(a, a, "it") is None


class Own(gk.RBFKernel):
    def __init__(self, power: float = 1.0) -> None:
        super().__init__()
        self.power = power


def test_classes_of_the_users_own() -> None:
    with pytest.raises(CannotDescribe, match=r"kernel\.base_kernel is .*Own, which"):
        describe(gk.ScaleKernel(Own()), "kernel")
    with pytest.raises(CannotDescribe, match="function"):
        describe(MemoryOptions(policy=lambda a, b, c: a), "memory")
    register(Own)
    again = rebuild(describe(gk.ScaleKernel(Own(2.0)), "kernel"))
    assert type(again.base_kernel) is Own
    assert again.base_kernel.power == 2.0


def test_nothing_else_is_built() -> None:
    for data in (
        {"__": "part", "class": "os.system", "arguments": {}},
        {"__": "part", "class": "torch.Linear", "arguments": {}},
    ):
        with pytest.raises(ValueError, match="not registered"):
            rebuild(data)
    for data in ({"__": "function", "name": "eval"}, {"__": "dtype", "name": "save"}, {"a": 1}):
        with pytest.raises(ValueError, match="damaged"):
            rebuild(data)

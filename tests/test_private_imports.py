"""What seqgp imports from other libraries although it is private there, with the reason.

Such names may change without notice, so each has a test of what we rely on. A new one has to be
added here, with a reason and a test.
"""

from __future__ import annotations

import ast
import inspect
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from botorch.acquisition.analytic import _log_ei_helper
from botorch.fit import _fit_fallback, _fit_fallback_approximate
from botorch.utils.types import DEFAULT, _DefaultType
from gpytorch import likelihoods, mlls, variational
from gpytorch.likelihoods.gaussian_likelihood import _GaussianLikelihoodBase
from gpytorch.likelihoods.likelihood import _OneDimensionalLikelihood
from gpytorch.mlls._approximate_mll import _ApproximateMarginalLogLikelihood
from gpytorch.variational import _VariationalDistribution
from gpytorch.variational._variational_strategy import _VariationalStrategy
from linear_operator.utils.getitem import _noop_index
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

import seqgp

#: Names, and why there is no public one that does.
PRIVATE = {
    "botorch.acquisition.analytic._log_ei_helper": "log-EI without underflow; only whole "
    "acquisition functions are public",
    "botorch.fit._fit_fallback": "the retries of `fit_gpytorch_mll`, after our `custom_fit`",
    "botorch.fit._fit_fallback_approximate": "the same, for a closure of the caller",
    "botorch.utils.types._DefaultType": "the type of the public value `DEFAULT`",
    "gpytorch.likelihoods.gaussian_likelihood._GaussianLikelihoodBase": "the only class that all "
    "Gaussian likelihoods have in common",
    "gpytorch.likelihoods.likelihood._OneDimensionalLikelihood": "the base class that GPyTorch's "
    "own documentation tells users to extend",
    "gpytorch.mlls._approximate_mll._ApproximateMarginalLogLikelihood": "BoTorch asks for it to "
    "tell a bound from an exact likelihood",
    "gpytorch.variational._VariationalDistribution": "base class of what a strategy holds",
    "gpytorch.variational._variational_strategy._VariationalStrategy": "base class of strategies",
    "linear_operator.utils.getitem._noop_index": "what `_getitem` of an operator is called with",
    "torch.nn.modules.batchnorm._BatchNorm": "base class of all batch normalisations",
    "torch.nn.modules.dropout._DropoutNd": "base class of all dropouts",
}


def private_imports() -> Iterator[str]:
    """Names that modules of seqgp import, with an underscore in front of the last part."""
    for path in Path(seqgp.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
                if node.module.partition(".")[0] == "seqgp":
                    continue
                for alias in node.names:
                    parts = [*node.module.split("."), alias.name]
                    if any(p.startswith("_") and not p.startswith("__") for p in parts):
                        yield ".".join(parts)


def test_the_list_is_complete() -> None:
    assert set(private_imports()) == set(PRIVATE)


def test_each_has_a_test() -> None:
    source = Path(__file__).read_text()
    for name in PRIVATE:
        last = name.rpartition(".")[2]
        assert f"\ndef test{last.lower()}() ->" in source, last


def parameters(function: object) -> list[str]:
    return list(inspect.signature(function).parameters)  # type: ignore[arg-type]


def test_log_ei_helper() -> None:
    """log(phi(u) + u Phi(u)), by its definition and, far out, by its asymptote."""
    u = torch.tensor([-3.0, -1.0, 0.0, 2.0], dtype=torch.double)
    pdf = torch.exp(-u.square() / 2) / math.sqrt(2 * math.pi)
    expected = torch.log(pdf + u * torch.special.ndtr(u))
    torch.testing.assert_close(_log_ei_helper(u), expected, rtol=1e-9, atol=1e-9)
    far = torch.tensor([-1e4], dtype=torch.double)
    asymptote = -far.square() / 2 - math.log(2 * math.pi) / 2 - 2 * torch.log(-far)
    torch.testing.assert_close(_log_ei_helper(far), asymptote, rtol=1e-12, atol=0.0)


def test_fit_fallback() -> None:
    assert parameters(_fit_fallback)[0] == "mll"
    assert {"closure", "optimizer_kwargs"} <= set(parameters(_fit_fallback))


def test_fit_fallback_approximate() -> None:
    assert parameters(_fit_fallback_approximate)[0] == "mll"
    assert "closure" in parameters(_fit_fallback_approximate)
    kinds = {p.kind for p in inspect.signature(_fit_fallback_approximate).parameters.values()}
    assert inspect.Parameter.VAR_KEYWORD in kinds  # it passes the rest on to `_fit_fallback`
    assert {"closure_kwargs", "optimizer_kwargs"} <= set(parameters(_fit_fallback))


def test_defaulttype() -> None:
    assert isinstance(DEFAULT, _DefaultType)
    assert not isinstance(None, _DefaultType)


def test_gaussianlikelihoodbase() -> None:
    for cls in (likelihoods.GaussianLikelihood, likelihoods.FixedNoiseGaussianLikelihood):
        assert issubclass(cls, _GaussianLikelihoodBase)
    assert not issubclass(likelihoods.BernoulliLikelihood, _GaussianLikelihoodBase)


def test_onedimensionallikelihood() -> None:
    for cls in (likelihoods.BernoulliLikelihood, likelihoods.PoissonLikelihood):
        assert issubclass(cls, _OneDimensionalLikelihood)
    assert not issubclass(likelihoods.SoftmaxLikelihood, _OneDimensionalLikelihood)

    class Exponential(_OneDimensionalLikelihood):
        def forward(self, function_samples, *args, **kwargs):
            return torch.distributions.Exponential(function_samples.exp())

    assert Exponential().quadrature(lambda f: f.square(), standard_normal()).item() == (
        pytest.approx(1.0, abs=1e-5)
    )


def standard_normal() -> torch.distributions.Distribution:
    from gpytorch.distributions import MultivariateNormal

    return MultivariateNormal(torch.zeros(1), torch.eye(1))


def test_approximatemarginalloglikelihood() -> None:
    assert issubclass(mlls.VariationalELBO, _ApproximateMarginalLogLikelihood)
    assert not issubclass(mlls.ExactMarginalLogLikelihood, _ApproximateMarginalLogLikelihood)
    names = ["self", "likelihood", "model", "num_data", "beta", "combine_terms"]
    assert parameters(_ApproximateMarginalLogLikelihood.__init__) == names


def test_variationaldistribution() -> None:
    assert issubclass(variational.CholeskyVariationalDistribution, _VariationalDistribution)
    assert parameters(_VariationalDistribution.__init__)[1] == "num_inducing_points"


def test_variationalstrategy() -> None:
    assert issubclass(variational.VariationalStrategy, _VariationalStrategy)
    assert parameters(_VariationalStrategy.__init__)[1:6] == [
        "model",
        "inducing_points",
        "variational_distribution",
        "learn_inducing_locations",
        "jitter_val",
    ]


def test_noop_index() -> None:
    assert _noop_index == slice(None)


def test_batchnorm() -> None:
    for layer in (torch.nn.BatchNorm1d(2), torch.nn.BatchNorm2d(2), torch.nn.SyncBatchNorm(2)):
        assert isinstance(layer, _BatchNorm)


def test_dropoutnd() -> None:
    assert isinstance(torch.nn.Dropout(), _DropoutNd)
    assert isinstance(torch.nn.Dropout1d(), _DropoutNd)

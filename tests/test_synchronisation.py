"""How often the host would wait for a device, counted on the CPU."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from botorch.sampling import SobolQMCNormalSampler
from gpytorch.kernels import MaternKernel
from gpytorch.likelihoods import BernoulliLikelihood
from torch import Tensor

from seqgp import SequentialGP
from tests.helpers import latent, make_inputs
from tests.synchronisation import Source, Synchronisations, table

pytestmark = [
    pytest.mark.usefixtures("float64"),
    # What is counted does not depend on the scale of the data.
    pytest.mark.filterwarnings("ignore::botorch.exceptions.InputDataWarning"),
]

each = pytest.mark.parametrize("name", ["gaussian", "bernoulli"])

# -------------------------------------------------------------------- the counter itself


A = torch.arange(6.0).reshape(2, 3)

#: What is done, the number of synchronisations, and the operation.
OPERATIONS: dict[str, tuple[Callable[[Tensor], object], int, str]] = {
    "item": (lambda t: t.sum().item(), 1, "_local_scalar_dense"),
    "float": (lambda t: float(t.sum()), 1, "_local_scalar_dense"),
    "bool": (lambda t: bool((t > 1).any()), 1, "_local_scalar_dense"),
    "if": (lambda t: 1 if t.sum() > 1 else 2, 1, "_local_scalar_dense"),
    "allclose": (lambda t: torch.allclose(t, t + 1), 1, "allclose"),
    "equal": (lambda t: torch.equal(t, t + 1), 1, "equal"),
    "equal, known": (lambda t: torch.equal(t, t), 1, "equal (same memory)"),
    "equal, other sizes": (lambda t: torch.equal(t, t[:1]), 1, "equal (sizes differ)"),
    "nonzero": (lambda t: t.nonzero(), 1, "nonzero"),
    "unique": (lambda t: t.unique(), 1, "_unique2"),
    "unique rows": (lambda t: t.unique(dim=0), 1, "unique_dim"),
    "consecutive": (lambda t: t.unique_consecutive(), 1, "unique_consecutive"),
    "selection": (lambda t: t.masked_select(t > 1), 1, "masked_select"),
    "mask": (lambda t: t[t > 1], 1, "index"),
    "assignment by mask": (lambda t: t.__setitem__(t > 1, t.new_ones(4)), 1, "index_put_"),
    "draws": (lambda t: torch.multinomial(t, 1), 1, "multinomial"),
    "eigenvalues": (lambda t: torch.linalg.eigvalsh(torch.eye(3)), 1, "_linalg_eigh"),
    "cholesky": (lambda t: torch.linalg.cholesky(torch.eye(3)), 1, "_linalg_check_errors"),
    "fill by mask": (lambda t: t.clone().__setitem__(t > 1, 0.0), 0, ""),
    "cholesky_ex": (lambda t: torch.linalg.cholesky_ex(torch.eye(3)), 0, ""),
    "index": (lambda t: t[torch.tensor([0, 1])], 0, ""),
    "arithmetic": (lambda t: torch.where(t > 1, t.exp(), 0.0), 0, ""),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_counting(name: str) -> None:
    action, number, operation = OPERATIONS[name]
    with Synchronisations() as counter:
        action(A.clone())
    assert counter.count == number
    assert [source.operation for source in counter.sources] == [operation] * number


def test_operations_are_counted() -> None:
    with Synchronisations() as counter:
        (A * 2 + 1).sum()
    assert (counter.operations, counter.count) == (3, 0)


def test_backward_is_counted() -> None:
    class Waits(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 1

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            assert grad.sum().item() > 0
            return grad

    x = A.clone().requires_grad_()
    with Synchronisations() as counter:
        Waits.apply(x).sum().backward()
    assert counter.count == 1


def test_sources() -> None:
    """The innermost lines of this library and of the one through which it waits."""
    X = make_inputs(4, 2)
    with Synchronisations() as counter:
        model = SequentialGP(X, X[:, :1], covar_module=MaternKernel())
        model.posterior(X).rsample()
    assert any(s.ours.startswith("seqgp/") for s in counter.sources)
    assert any(s.library.startswith("linear_operator/") for s in counter.sources)
    lines = table(counter.sources).splitlines()
    assert len(lines) == len(counter.sources)
    assert lines[0].split()[0] == str(max(counter.sources.values()))
    with Synchronisations() as counter:
        model.covar_module(X).to_dense()
    (source,) = counter.sources
    assert source.ours == ""
    assert source.library.startswith("gpytorch/kernels/kernel.py:")


# -------------------------------------------------------------------- budgets


def observations(name: str, X: Tensor) -> Tensor:
    f = latent(X).unsqueeze(-1)
    return (f > 1).to(X) if name == "bernoulli" else f


@cache
def _model(name: str) -> SequentialGP:
    X = make_inputs(80, 2)
    likelihood = BernoulliLikelihood() if name == "bernoulli" else None
    model = SequentialGP(X, observations(name, X), likelihood=likelihood, inducing_points=50)
    assert model.variational_strategy.inducing_points.shape[-2] == 50
    return model


def model_of(name: str) -> SequentialGP:
    return copy.deepcopy(_model(name))


def use(posterior: Any) -> None:
    assert posterior.mean.shape == posterior.variance.shape


def assert_at_most(limit: float, sources: Counter[Source], number: float | None = None) -> None:
    found = sources.total() if number is None else number
    assert found <= limit, f"{found} synchronisations, at most {limit}:\n{table(sources)}"


@each
def test_posterior(name: str) -> None:
    """Of a model that has been used before, as by an acquisition function."""
    model, X = model_of(name), make_inputs(4, 3, 2)
    use(model.posterior(X))
    with Synchronisations() as counter:
        use(model.posterior(X))
    assert_at_most(5, counter.sources)


@each
def test_fantasies(name: str) -> None:
    model, X = model_of(name), make_inputs(4, 3, 2)
    use(model.posterior(X))
    sampler = SobolQMCNormalSampler(torch.Size([8]), seed=0)
    with Synchronisations() as counter:
        use(model.fantasize(X, sampler).posterior(X))
    assert_at_most(15, counter.sources)


@each
@pytest.mark.parametrize("memory", [None, 30])
def test_update_without_learning(name: str, memory: int | None) -> None:
    """With a memory that holds everything, and with one from which something is folded."""
    model, X = model_of(name), make_inputs(20, 2)
    Y = observations(name, X)
    with Synchronisations() as counter:
        record = model.update(X, Y, learn=False, memory=memory)
    assert record.num_memory == (100 if memory is None else memory)
    assert_at_most(20, counter.sources)


@each
def test_learning(name: str) -> None:
    """For each evaluation of the objective, by the difference between few steps and many."""
    X = make_inputs(20, 2)
    evaluations, counters = [], []
    for steps in (3, 13):
        model = model_of(name)
        with Synchronisations() as counter:
            # Other hyperparameters need other inducing points, and each costs a synchronisation.
            record = model.update(X, observations(name, X), inducing="fixed", steps=steps, tol=0.0)
        evaluations.append(record.steps)
        counters.append(counter)
    number = evaluations[1] - evaluations[0]
    assert number >= 8
    more = counters[1].count - counters[0].count
    assert_at_most(8, counters[1].sources - counters[0].sources, more / number)
    # Half of what it took before kernels and bound had derivatives in closed form.
    operations = (counters[1].operations - counters[0].operations) / number
    assert operations <= {"gaussian": 500, "bernoulli": 1_100}[name]

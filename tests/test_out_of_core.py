"""Models from batches against models that hold all data."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from botorch.fit import fit_gpytorch_mll
from botorch.models.transforms import Normalize
from gpytorch.kernels import MaternKernel
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import seqgp
from seqgp import DualELBO, SequentialGP
from seqgp.likelihoods.traits import precision_floor
from tests.helpers import (
    CASES,
    assert_close,
    latent,
    make_inputs,
    problem,
    state_of,
    terminal,
    unscaled,
)

pytestmark = [unscaled, pytest.mark.usefixtures("float64")]


def batches(X: Tensor, Y: Tensor, size: int, **arguments: Tensor) -> list[Any]:
    rows = torch.arange(len(X)).split(size)
    return [(X[i], Y[i], {k: v[i] for k, v in arguments.items()}) for i in rows]


def same(model: SequentialGP, other: SequentialGP, X: Tensor, tol: float = 1e-8) -> None:
    ours, theirs = model.posterior(X), other.posterior(X)
    assert_close(ours.mean, theirs.mean, tol)
    assert_close(ours.variance, theirs.variance, tol)


@pytest.mark.parametrize("name", CASES)
def test_every_likelihood(name: str) -> None:
    x, y, Z, test, likelihood, arguments, _ = problem(name)
    y = y.to(x).unsqueeze(-1)
    options = {"covar_module": MaternKernel(1.5), "inducing_points": Z, "likelihood": likelihood}
    held = SequentialGP(x, y, likelihood_arguments=arguments, **options)
    if "noise" in arguments:
        arguments["noise"] = arguments["noise"].unsqueeze(-1)
    model = seqgp.from_batches(batches(x, y, 7, **arguments), **options, tol=1e-11)
    held.refresh(1e-11)
    if precision_floor(likelihood) is None:  # what cannot be folded is cut off, as in a stream
        none = {k: v[:0] for k, v in arguments.items()}
        held.update(x[:0], y[:0], learn=False, memory=0, **none)
    same(model, held, test)
    assert (model.num_seen, model.num_data) == (len(x), 0)


def test_scale_inducing_points_and_bounds_of_all_data() -> None:
    X = 5 + 3 * make_inputs(60, 2)
    Y = 100 + 7 * torch.stack([latent(X), latent(1 - X)], -1)
    held = SequentialGP(X, Y, inducing_points=12, input_transform=Normalize(2))
    loader = DataLoader(TensorDataset(X, Y), batch_size=11)
    model = seqgp.from_batches(loader, inducing_points=12, input_transform=Normalize(2))
    assert_close(model.outcome_transform.stdvs, held.outcome_transform.stdvs, 1e-12)
    same(model, held, X)
    few = seqgp.from_batches(
        loader, inducing_points=12, input_transform=Normalize(2), num_candidates=15
    )
    assert_close(few.input_transform.bounds, held.input_transform.bounds, 1e-12)
    assert_close(few.outcome_transform.means, held.outcome_transform.means, 1e-12)
    assert few.num_seen == 60


def test_a_stream_goes_on() -> None:
    X, Y = make_inputs(60, 2), latent(make_inputs(60, 2)).unsqueeze(-1)
    Z = make_inputs(8, 2)
    model = seqgp.from_batches(batches(X[:40], Y[:40], 9), inducing_points=Z)
    held = SequentialGP(X[:40], Y[:40], inducing_points=Z)
    for each in (model, held):
        each.update(X[40:], Y[40:], learn=False)
    same(model, held, X)
    assert model.num_seen == 60


class Shuffled:
    """The minibatches that a fit of data in memory takes."""

    def __init__(self, X: Tensor, Y: Tensor, size: int) -> None:
        self.X, self.Y, self.size = X, Y, size
        self.generator, self.passes = torch.Generator().manual_seed(0), 0

    def __iter__(self) -> Iterator[Any]:
        order, self.passes = torch.arange(len(self.X)), self.passes + 1
        if self.passes > 2:  # the first are those of construction and of a look at the data
            order = torch.randperm(len(self.X), generator=self.generator)
        yield from ((self.X[i], self.Y[i]) for i in order.split(self.size))


def test_fits_as_in_memory() -> None:
    X = make_inputs(50, 2)
    Y = latent(X).unsqueeze(-1) + 0.1 * make_inputs(50, 1)
    options = {"inducing_points": 8, "covar_module": MaternKernel(1.5)}
    held = SequentialGP(X, Y, **options)
    fit_gpytorch_mll(DualELBO(held.likelihood, held), batch_size=10, epochs=4)
    options["covar_module"] = MaternKernel(1.5)
    data = Shuffled(X, Y, 10)
    model = seqgp.from_batches(batches(X, Y, 10), **options)
    data.passes = 1
    assert seqgp.fit_batches(model, data, epochs=4) is model
    for name, value in held.hyperparameter_values().items():
        assert_close(model.hyperparameter_values()[name], value, 1e-8)
    same(model, held, X)
    assert data.passes == 1 + 1 + 4 + 1


def test_fits_until_the_bound_no_longer_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("seqgp.models.fit._Halving.patience", 1)  # fewer passes, to be fast
    monkeypatch.setattr("seqgp.models.fit._Halving.most", 1)
    X = make_inputs(20, 1)
    Y = latent(X).unsqueeze(-1) + 0.1 * make_inputs(20, 1)

    def options() -> dict[str, Any]:
        return {"inducing_points": 4, "covar_module": MaternKernel(1.5)}

    held = SequentialGP(X, Y, **options())
    fit_gpytorch_mll(DualELBO(held.likelihood, held), batch_size=10)
    model = seqgp.from_batches(batches(X, Y, 10), **options())
    data = Shuffled(X, Y, 10)
    data.passes = 1
    seqgp.fit_batches(model, data)
    assert 5 < data.passes < 500
    for name, value in held.hyperparameter_values().items():
        assert_close(model.hyperparameter_values()[name], value, 1e-8)
    same(model, held, X)


def test_progress() -> None:
    X = make_inputs(30, 1)
    data = DataLoader(TensorDataset(X, latent(X).unsqueeze(-1)), batch_size=10)
    with terminal() as stream:
        model = seqgp.from_batches(data, inducing_points=5, progress=True)
        seqgp.fit_batches(model, data, epochs=2, progress=True)
    for part in ("look", "learn", "3/3", "6/6", "fit"):  # batches, and 2 epochs of 3 minibatches
        assert part in stream.getvalue()
    with terminal() as stream:
        seqgp.fit_batches(model, data, epochs=1)
    assert not stream.getvalue()


def test_mistakes_leave_the_model_as_it_was() -> None:
    X = make_inputs(30, 2)
    Y = latent(X).unsqueeze(-1)
    good = batches(X, Y, 10)
    with pytest.raises(TypeError, match=r"batches: expected something that can be iterated"):
        seqgp.from_batches(iter(good))
    with pytest.raises(ValueError, match=r"batches: expected at least one"):
        seqgp.from_batches([])
    with pytest.raises(TypeError, match=r"batches: expected pairs"):
        seqgp.from_batches([X])
    with pytest.raises(TypeError, match=r"train_X: not an option here"):
        seqgp.from_batches(good, train_X=X)
    model = seqgp.from_batches(good, inducing_points=6)
    before = state_of(model)
    with pytest.raises(ValueError, match=r"^Y: "):
        seqgp.fit_batches(model, [*good, (X, Y * torch.nan)])
    after = state_of(model)
    assert all(torch.equal(value, after[key]) for key, value in before.items())
    with pytest.raises(ValueError, match=r"stores 30"):
        seqgp.fit_batches(SequentialGP(X, Y), good)

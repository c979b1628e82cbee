"""Old data fade, by a given factor or by one that the stream asks for."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.kernels import RBFKernel
from gpytorch.likelihoods import BernoulliLikelihood
from torch import Tensor

from seqgp import SequentialGP
from seqgp.streaming.drift import (
    CANDIDATES,
    DOUBT,
    LEAST_WINDOW,
    Drift,
    choose_discount,
    evidence_of,
    most_usual,
    usual_ratios,
)
from tests.helpers import assert_close

pytestmark = pytest.mark.usefixtures("float64")


def batches(number: int, size: int = 20, change: int | None = None) -> list[tuple[Tensor, Tensor]]:
    """Noisy values of a function, which becomes its negative at some batch."""
    generator = torch.Generator().manual_seed(0)
    result = []
    for k in range(number):
        X = torch.rand(size, 1, generator=generator)
        sign = -1 if change is not None and k >= change else 1
        f = sign * torch.sin(6 * X)
        result.append((X, f + 0.2 * torch.randn(size, 1, generator=generator)))
    return result


@pytest.mark.parametrize("memory", [0, 13, 1000])
def test_all_that_is_old_fades_whether_remembered_or_folded(memory: int) -> None:
    """An observation that counts half is one with twice the noise variance."""
    first, second, third = batches(3)
    Z = torch.linspace(0, 1, 12).unsqueeze(-1)
    options = {"covar_module": RBFKernel(), "inducing_points": Z, "outcome_transform": None}
    model = SequentialGP(*first, **options)
    model.likelihood.noise = 0.04
    for (X, Y), discount in ((second, 0.5), (third, 0.8)):
        model.update(X, Y, memory=memory, learn=False, discount=discount)
    X, Y = (torch.cat(parts) for parts in zip(first, second, third, strict=True))
    counts = torch.tensor([0.5 * 0.8, 0.8, 1.0]).repeat_interleave(20).unsqueeze(-1)
    expected = SequentialGP(X, Y, 0.04 / counts, **options)
    grid = torch.linspace(-0.2, 1.2, 40).unsqueeze(-1)
    assert_close(model.posterior(grid).mean, expected.posterior(grid).mean, 1e-6)
    assert_close(model.posterior(grid).variance, expected.posterior(grid).variance, 1e-6)


@pytest.mark.parametrize("memory", [0, 1000])
def test_what_has_faded_can_be_forgotten(memory: int) -> None:
    """It is taken out with the weight that it has, whether remembered or folded."""
    first, second, third = batches(3)
    Z = torch.linspace(0, 1, 12).unsqueeze(-1)
    options = {"covar_module": RBFKernel(), "inducing_points": Z, "outcome_transform": None}
    models = []
    for gone in (0, 4):
        models.append(SequentialGP(first[0][gone:], first[1][gone:], **options))
        for (X, Y), discount in ((second, 0.5), (third, 0.8)):
            models[-1].update(X, Y, memory=memory, learn=False, discount=discount)
    X, Y = first[0][:4], first[1][:4]
    if not memory:
        with pytest.raises(ValueError, match="product of all discounts"):
            models[0].forget(X, Y)
        for fade in (torch.ones(3), torch.full((4,), 1.5)):
            with pytest.raises(ValueError, match="fade: expected 4 numbers"):
                models[0].forget(X, Y, fade=fade)
    models[0].forget(X, Y, fade=None if memory else torch.full((4,), 0.4))
    grid = torch.linspace(-0.2, 1.2, 40).unsqueeze(-1)
    found, expected = (model.posterior(grid) for model in models)
    assert_close(found.mean, expected.mean, 1e-6)
    assert_close(found.variance, expected.variance, 1e-6)


def gradual(number: int, size: int = 20) -> list[tuple[Tensor, Tensor]]:
    """Noisy values of a function whose phase moves by a sixteenth of a period a batch."""
    generator = torch.Generator().manual_seed(0)
    result = []
    for k in range(number):
        X = torch.rand(size, 1, generator=generator)
        f = torch.sin(6 * X + 2 * torch.pi * k / 16)
        result.append((X, f + 0.2 * torch.randn(size, 1, generator=generator)))
    return result


@pytest.mark.slow
def test_a_gradual_change_is_followed() -> None:
    """By a given discount, and by one that is chosen by itself. Predict, then learn."""
    stream = gradual(20)
    errors = []
    for discount in (1.0, "auto", 0.5):
        model, own = SequentialGP(*stream[0]), []
        for X, Y in stream[1:]:
            with torch.no_grad():
                own.append((model.posterior(X).mean - Y).square().mean())
            model.update(X, Y, discount=discount)
        errors.append(float(torch.stack(own[4:]).mean().sqrt()))
    assert errors[1] < 0.7 * errors[0]
    assert errors[2] < 0.7 * errors[0]


@pytest.mark.slow
def test_a_function_that_keeps_moving_fades_all_the_time() -> None:
    """From the second change on, at each batch; and less and less once it has come to rest."""
    stream = gradual(60)
    rest = [(X, torch.sin(6 * X) + 0.2 * torch.randn_like(X)) for X, _ in stream]
    model = SequentialGP(*stream[0])
    moving = [model.update(X, Y, discount="auto").discount for X, Y in stream[1:30]]
    assert moving[0] == 1.0
    assert all(discount < 0.8 for discount in moving[5:])
    still = [model.update(X, Y, discount="auto").discount for X, Y in rest]
    assert still[1:] == sorted(still[1:])
    assert still[-1] > 0.9


def test_a_second_change_begins_a_window_that_further_ones_shorten() -> None:
    drift = Drift(since=500.0, doubt=1.0).after_change()
    assert drift == Drift(changes=1.0)
    assert drift.window == math.inf
    second = drift._replace(since=400.0).after_change()
    assert second.window == 400
    assert second._replace(since=300.0).after_change().window == 200
    assert second._replace(since=150.0).after_change().window == 150
    assert second._replace(since=5.0).after_change().window == LEAST_WINDOW
    assert Drift.of(second.values) == second
    assert Drift.of(()) == Drift()


def test_everything_fades_within_a_window_whatever_the_size_of_the_batches() -> None:
    X, Y = (torch.cat(parts) for parts in zip(*batches(5), strict=True))
    model = SequentialGP(X, Y)
    held = model.transformed(model.stream.observations)
    factors = []
    for size in (10, 20, 30):
        new = held.select(slice(size))
        known = Drift(changes=2.0, window=100.0).values
        found = choose_discount(model, new, held, torch.ones(100), known)
        factors.append(found.factor)
        assert Drift.of(found.evidence).since == size
    assert factors == pytest.approx([math.exp(-0.1), math.exp(-0.2), math.exp(-0.3)], rel=1e-12)


def test_doubt_doubles_a_window() -> None:
    """Doubt is what the batch itself says: the difference of two evidences."""
    X, Y = (torch.cat(parts) for parts in zip(*batches(6), strict=True))
    Y[100:] = torch.sin(6 * X[100:])  # as is to be expected, without any noise
    model = SequentialGP(X[:100], Y[:100])
    model.update(X[:0], Y[:0])
    new = model.transformed(model.checked(X[100:], Y[100:], None, {}))
    held = model.transformed(model.stream.observations)
    duals = model.variational_strategy.state().duals
    without, fading = (evidence_of(model, new, duals, x) for x in (1.0, math.exp(-1 / 3)))
    assert without > fading
    known = Drift(changes=2.0, window=60.0)
    found = Drift.of(choose_discount(model, new, held, torch.ones(100), known.values).evidence)
    assert found.doubt == pytest.approx(without - fading, rel=1e-9)
    for window, expected in ((60.0, 120.0), (100.0, math.inf)):
        values = known._replace(window=window, doubt=DOUBT).values
        found = Drift.of(choose_discount(model, new, held, torch.ones(100), values).evidence)
        assert (found.window, found.doubt) == (expected, 0.0)


def test_evidence_is_the_density_of_the_batch_as_a_whole() -> None:
    """That of all new observations together, once all that is known has faded."""
    first, second = batches(2)
    Z = torch.linspace(0, 1, 12).unsqueeze(-1)
    options = {"covar_module": RBFKernel(), "inducing_points": Z, "outcome_transform": None}
    model = SequentialGP(*first, **options)
    model.likelihood.noise = 0.04
    model.refresh()
    data = model.transformed(model.checked(*second, None, {}))
    found = evidence_of(model, data, model.variational_strategy.state().duals, 0.3)
    model.variational_strategy.discount(0.3)
    f = model.eval()(second[0])
    covariance = f.covariance_matrix + 0.04 * torch.eye(20)
    expected = MultivariateNormal(f.mean, covariance).log_prob(second[1].squeeze(-1))
    assert_close(torch.tensor(found), expected.detach(), 1e-5)


def test_evidence_of_a_label_is_a_bound() -> None:
    X, Y = batches(1)[0]
    model = SequentialGP(X, (Y > 0).to(Y), likelihood=BernoulliLikelihood())
    duals = model.variational_strategy.state().duals
    total = 0.0
    for label in (0.0, 1.0):
        point = model.checked(X[:1] + 0.01, torch.tensor([[label]]), None, {})
        found = evidence_of(model, model.transformed(point), duals, 1.0)
        exact = model.log_predictive_density(X[:1] + 0.01, torch.tensor([label]))
        assert 0 <= float(exact) - found < 0.05
        total += math.exp(found)
    assert 0.95 < total < 1


def test_a_model_that_is_too_certain_is_no_change() -> None:
    """Of its noise all candidates think little, for old observations as for new ones."""
    X, Y = (torch.cat(parts) for parts in zip(*batches(8), strict=True))
    model = SequentialGP(X[:140], Y[:140])
    new = model.transformed(model.checked(X[140:], Y[140:], None, {}))
    chosen, usual = [], []
    for noise in (1e-3, 0.05):
        model.likelihood.noise = noise
        model.refresh()
        old = model.transformed(model.stream.observations)
        found = usual_ratios(model, old, model.stream.counts, 20)
        usual.append([most_usual(each, 20) for each in found])
        chosen.append(choose_discount(model, new, old, model.stream.counts, ()))
    assert max(usual[0]) > 6  # which would be enough for a change
    assert max(usual[1]) < 0.5
    assert [each.factor for each in chosen] == [1.0, 1.0]
    assert len(Drift.of(chosen[0].evidence).nats) == len(CANDIDATES)
    moved = replace(new, targets=-new.targets)
    old = model.transformed(model.stream.observations)
    assert choose_discount(model, moved, old, model.stream.counts, ()).factor < 0.5


def error(model: SequentialGP, change: bool) -> float:
    X = torch.linspace(0, 1, 50).unsqueeze(-1)
    f = torch.sin(6 * X) * (-1 if change else 1)
    with torch.no_grad():
        return float((model.posterior(X).mean - f).square().mean().sqrt())


@pytest.mark.slow
def test_an_abrupt_change_is_followed_within_two_batches() -> None:
    stream = batches(14, change=10)
    models = [SequentialGP(*stream[0]) for _ in range(2)]
    alarms = []
    for k, (X, Y) in enumerate(stream[1:], start=1):
        models[0].update(X, Y)
        record = models[1].update(X, Y, discount="auto")
        if record.discount < 1:
            alarms.append(k)
        if k == 11:
            assert error(models[1], change=True) < 0.25 < error(models[0], change=True)
    assert alarms[0] == 10
    assert error(models[1], change=True) < 0.5 * error(models[0], change=True)


@pytest.mark.slow
@pytest.mark.parametrize("likelihood", [None, BernoulliLikelihood])
def test_there_are_few_alarms_if_nothing_changes(likelihood: type | None) -> None:
    """At most one in forty batches."""
    stream = batches(40, size=10)
    if likelihood is not None:
        stream = [(X, (Y > 0).to(Y)) for X, Y in stream]
    options = {} if likelihood is None else {"likelihood": likelihood()}
    model = SequentialGP(*stream[0], **options)
    alarms = 0
    for X, Y in stream[1:]:
        alarms += model.update(X, Y, discount="auto").discount < 1
    assert alarms <= 1


def test_nothing_to_compare() -> None:
    model = SequentialGP(*batches(1)[0])
    X, Y = batches(1)[0]
    empty = model.transformed(model.checked(X[:0], Y[:0], None, {}))
    held = model.transformed(model.stream.observations)
    assert choose_discount(model, empty, held, torch.ones(20), ()).factor == 1.0
    assert choose_discount(model, held, empty, torch.ones(0), ()).factor == 1.0
    with pytest.raises(TypeError, match="discount: expected a number"):
        model.update(X, Y, discount="often")

"""When hyperparameters are learnt along a stream, and whether it was worth it."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from gpytorch.kernels import MaternKernel, PeriodicKernel, ScaleKernel
from gpytorch.likelihoods import BernoulliLikelihood, GaussianLikelihood, LaplaceLikelihood
from torch import Tensor

from benchmarks.small_batches import labels, measure
from seqgp import SequentialGP
from seqgp.streaming.learning import (
    LOG_CONCAVE_TOLERANCE,
    decide,
    expected_density,
    is_better,
    learnable,
    leave_one_out,
    patience_after,
    surprise_of,
)
from seqgp.streaming.memory import MemoryOptions
from seqgp.streaming.update import UpdateRecord
from tests.helpers import unscaled
from tests.streaming.test_update import make_data, make_model

pytestmark = pytest.mark.usefixtures("float64")


def test_learning_becomes_rare() -> None:
    X, Y, _ = make_data("gaussian")
    stream = make_model("gaussian", X, Y, X[:8]).stream
    learnt = []
    for _ in range(1000):
        decision = decide(stream, 10, None)
        stream = replace(stream, num_seen=stream.num_seen + 10)
        if decision.learn:
            stream = replace(stream, learned_at=stream.num_seen)
            learnt.append(stream.num_seen)
    assert learnt[0] == 40
    assert len(learnt) < 32  # 1.2 to that power is 10,000 / 40
    assert all(later >= 1.2 * earlier for earlier, later in itertools.pairwise(learnt))
    assert decide(stream, 0, True).learn
    assert not decide(stream, 10**9, False).learn


@pytest.mark.parametrize("name", ["bernoulli", "poisson"])
def test_the_tolerance_of_the_sites_leaves_bound_and_gradient_as_they_are(name: str) -> None:
    """From the sites of other hyperparameters, as along the way of an optimiser."""
    X, Y, _ = make_data(name)
    model = make_model(name, X, Y, X[:8]).train()
    with torch.no_grad():
        _, sites = model.bound(tol=1e-10)
        for parameter in model.hyperparameters():
            parameter += 0.3
    parameters = [p for p in model.hyperparameters() if p.requires_grad]
    values, gradients = [], []
    for tol in (1e-10, LOG_CONCAVE_TOLERANCE):
        bound, _ = model.bound(sites, tol)
        values.append(bound.item())
        slopes = torch.autograd.grad(bound, parameters)
        gradients.append(torch.cat([slope.flatten() for slope in slopes]))
    assert values[1] == pytest.approx(values[0], abs=1e-4)
    assert (gradients[1] - gradients[0]).norm() < 1e-3 * gradients[0].norm()


def test_surprise_is_summed_up_and_outliers_are_cut() -> None:
    X, Y, _ = make_data("gaussian")
    stream = make_model("gaussian", X, Y, X[:8]).stream
    density = torch.tensor([-1.0, -2.0, -100.0, 1.0])
    assert surprise_of(stream, density) == 0  # nothing is expected yet
    stream = replace(stream, expected=-0.5, surprise=2.0)
    assert surprise_of(stream, density) == pytest.approx(2 + 0.5 + 1.5 + 3 - 1.5)
    assert surprise_of(stream, torch.tensor([2.4])) == 0
    assert surprise_of(stream, torch.tensor([[-1.0], [torch.nan]])) == pytest.approx(2.5)
    assert surprise_of(stream, density[:0]) == 2


def test_surprise_is_a_reason_to_learn() -> None:
    X, Y, _ = make_data("gaussian")
    stream = make_model("gaussian", X, Y, X[:8]).stream
    stream = replace(stream, num_seen=1000, learned_at=1000, restarted_at=900)
    assert not decide(stream, 1, None, surprise=50.0).learn
    first = decide(stream, 1, None, surprise=51.0)
    assert first.learn
    assert not first.restart
    assert "51 nats" in first.reason
    assert decide(stream, 100, None, surprise=99.0).restart
    assert not decide(stream, 1, False, surprise=1e9).learn


def test_surprises_that_go_on_are_no_news() -> None:
    """At the end of a sorted stream, each batch is less probable than the ones before."""
    X, Y, _ = make_data("gaussian")
    stream = make_model("gaussian", X, Y, X[:8]).stream
    stream = replace(stream, num_seen=1000, learned_at=1000)
    found = []
    for helped in (True, True, False, False, False):
        surprised = decide(stream, 1, None, surprise=1e6)
        stream = replace(stream, patience=patience_after(stream, surprised, helped))
        found.append(stream.patience)
    assert found == [2, 2, 4, 8, 8]
    assert not decide(stream, 1, None, surprise=8 * 50.0).learn
    assert decide(stream, 1, None, surprise=8 * 51.0).learn
    grown = decide(stream, 200, None, surprise=0.0)
    assert grown.learn
    assert patience_after(stream, grown, False) == 1


def test_what_is_expected_does_not_depend_on_units() -> None:
    """But for the density of the units themselves."""
    X, Y, _ = make_data("gaussian")
    expected = []
    for scale in (1.0, 100.0):
        model = SequentialGP(X[:20], 3 + scale * Y[:20])
        model.update(X[20:], 3 + scale * Y[20:])
        assert model.stream.expected == expected_density(model)
        expected.append(model.stream.expected)
    assert expected[0] - expected[1] == pytest.approx(math.log(100.0), abs=1e-3)


@pytest.mark.slow
def test_what_comes_late_is_learnt_at_once() -> None:
    """A narrow peak at the end of a sorted stream does not pass for noise."""
    generator = torch.Generator().manual_seed(0)
    X = torch.rand(600, 1, generator=generator).sort(0).values
    f = 5 * torch.exp(-((X - 0.93) ** 2) / 0.001)
    Y = f + 0.1 * torch.randn(600, 1, generator=generator)
    model = SequentialGP(X[:50], Y[:50])
    reasons = [model.update(x, y).decision for x, y in batches(X[50:], Y[50:], 50)]
    assert any("less probable" in reason for reason in reasons[-3:])
    assert error(model, X, f) < 0.1


@pytest.mark.parametrize("name", ["gaussian", "bernoulli", "poisson", "binomial", "softmax"])
def test_leave_one_out(name: str) -> None:
    """Against models that never saw the observation, with the same inducing points.

    Exact for Gaussian observations. Other sites would change a little without it.
    """
    X, Y, arguments = make_data(name)
    Z = X[:8]
    options = {"likelihood_arguments": arguments} if arguments else {}
    model = make_model(name, X, Y, Z, **options)
    held = model.transformed(model.stream.observations)
    found = leave_one_out(model, held, torch.ones(len(held)))
    for i in (0, 7, 20):
        rest = torch.arange(len(X)) != i
        own = {k: v[rest] for k, v in arguments.items()}
        options = {"likelihood_arguments": own} if own else {}
        other = make_model(name, X[rest], Y[rest], Z, **options)
        at = {k: v[[i]] for k, v in arguments.items()}
        expected = other.log_predictive_density(X[[i]], Y[[i]].squeeze(-1), **at)
        tolerance = 1e-7 if name == "gaussian" else 0.05
        torch.testing.assert_close(found[i], expected[0], atol=tolerance, rtol=0)


@unscaled
def test_noise_has_a_floor_while_it_is_learnt() -> None:
    X = torch.linspace(0, 1, 9).unsqueeze(-1)
    model = SequentialGP(X, X, likelihood=LaplaceLikelihood(), outcome_transform=None)
    lower, _ = learnable(model, moves_Z=False)[2]["likelihood.raw_noise"]
    model.likelihood.raw_noise.data.fill_(lower)
    assert model.likelihood.noise.item() == pytest.approx(1e-4 * X.var().item(), rel=1e-5)


def test_chance_is_no_improvement() -> None:
    generator = torch.Generator().manual_seed(0)
    pairs = torch.randn(300, 2, 200, generator=generator)
    assert sum(is_better(*pair) for pair in pairs) < 20  # 2.3 % are expected
    noise = torch.randn(1000, generator=generator)
    assert is_better(noise + 0.3, noise + 0.2 * torch.randn(1000, generator=generator))
    assert not is_better(noise[:1] + 1, noise[:1])


def batches(X: torch.Tensor, Y: torch.Tensor, size: int):
    return zip(X.split(size), Y.split(size), strict=True)


def error(model: SequentialGP, X: torch.Tensor, f: torch.Tensor) -> float:
    with torch.no_grad():
        return float((model.posterior(X).mean - f).square().mean().sqrt())


def test_a_smooth_beginning_does_not_fix_the_noise() -> None:
    """A first batch without noise drives it to its floor, where its gradient vanishes."""
    generator = torch.Generator().manual_seed(0)
    X = torch.linspace(0, 1, 300).unsqueeze(-1)
    noise = torch.where(X > 0.1, 0.3, 0.0)
    f = torch.sin(12 * X)
    Y = f + noise * torch.randn(300, 1, generator=generator)
    model = SequentialGP(X[:30], Y[:30], likelihood=GaussianLikelihood())
    for x, y in batches(X[30:], Y[30:], 30):
        model.update(x, y)
    assert error(model, X, f) < 0.1
    scale = model.outcome_transform.stdvs.item()
    assert model.likelihood.noise.item() ** 0.5 * scale == pytest.approx(0.3, rel=0.15)


@pytest.mark.slow
def test_a_fast_function_is_not_passed_off_as_noise() -> None:
    """Few inducing points favour long lengthscales, which need few: learning has more of them."""
    X = torch.rand(300, 1, generator=torch.Generator().manual_seed(0))
    noise = torch.randn(300, 1, generator=torch.Generator().manual_seed(1))
    Y = torch.sin(40 * X) + 0.1 * noise
    model = SequentialGP(X[:100], Y[:100])
    for x, y in zip(X[100:].split(50), Y[100:].split(50), strict=True):
        model.update(x, y)
    assert (model.posterior(X).mean - torch.sin(40 * X)).square().mean().sqrt() < 0.06
    assert model.likelihood.noise.sqrt() * model.outcome_transform.stdvs < 0.15


@pytest.mark.slow
def test_a_periodic_series_in_order() -> None:
    generator = torch.Generator().manual_seed(0)
    X = torch.linspace(0, 1, 400).unsqueeze(-1)
    f = torch.sin(2 * torch.pi * 10 * X) + X
    Y = f + 0.3 * torch.randn(400, 1, generator=generator)
    kernel = ScaleKernel(PeriodicKernel()) + ScaleKernel(MaternKernel())
    kernel.kernels[0].base_kernel.period_length = 0.12
    model = SequentialGP(X[:40], Y[:40], covar_module=kernel)
    for x, y in batches(X[40:], Y[40:], 40):
        model.update(x, y)
    assert error(model, X, f) < 0.15


@pytest.mark.slow
def test_labels_of_one_kind_and_then_the_other() -> None:
    """A thousand alike say that they are likely; the others are learnt as soon as they come."""
    generator = torch.Generator().manual_seed(0)
    X = torch.rand(1200, 2, generator=generator).sort(0).values
    Y = (X[:, :1] > X[999, 0]).to(X)
    model = SequentialGP(X[:100], Y[:100], likelihood=BernoulliLikelihood())
    for x, y in batches(X[100:1000], Y[100:1000], 300):
        model.update(x, y, memory=1000)
    assert abs(model.mean_module.constant.item()) < 4
    for x, y in batches(X[1000:], Y[1000:], 100):
        model.update(x, y, memory=1000)
    probability = model.posterior(X, observation_noise=True).mean
    assert ((probability > 0.5) == (Y > 0.5)).double().mean() > 0.98


@pytest.mark.slow
def test_two_thousand_batches_of_three_labels_are_as_good_as_all_at_once() -> None:
    """And faster than ten fits along the stream, if their seconds grow with the data."""
    ours, offline = (measure(method, 2000, seed=0) for method in ("ours", "offline"))
    assert ours["nlpd"] < 1.05 * offline["nlpd"]
    assert ours["train_seconds"] < 5.5 * offline["train_seconds"]


def test_nothing_new_changes_nothing() -> None:
    """The same batch again and again, with the hyperparameters settled: the record says so."""
    X, Y, _ = make_data("gaussian")
    model = make_model("gaussian", X, Y, X[:8])
    model.update(X[:0], Y[:0])
    values = model.hyperparameter_values()
    record = model.update(X[:2], Y[:2])
    assert record.steps == 0
    assert record.decision.startswith("conditioned on the data: 32 observations, 30 when")
    assert all(torch.equal(v, values[k]) for k, v in model.hyperparameter_values().items())


def small_batches(model: SequentialGP, X: Tensor, Y: Tensor) -> list[UpdateRecord]:
    """Learn two observations at a time, without learning hyperparameters."""
    parts = torch.arange(len(X)).split(2)
    return [model.update(X[part], Y[part]) for part in parts]


@pytest.fixture
def refreshes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of observations at hand, each time that all sites are converged."""
    numbers: list[int] = []
    refresh = SequentialGP.refresh

    def counted(model: SequentialGP, *args: Any, **kwargs: Any) -> Tensor:
        numbers.append(len(model.stream.observations))
        return refresh(model, *args, **kwargs)

    monkeypatch.setattr(SequentialGP, "refresh", counted)
    return numbers


@pytest.mark.parametrize("memory", [300, 1000])
def test_small_batches_of_gaussian_observations_are_conditioned_on_exactly(
    memory: int, refreshes: list[int]
) -> None:
    """With and without observations that are folded."""
    X = torch.rand(340, 2, generator=torch.Generator().manual_seed(0))
    Y = torch.sin(5 * X).sum(-1, keepdim=True)
    model = SequentialGP(X[:300], Y[:300], inducing_points=30)
    model.memory_options = MemoryOptions(memory)
    model.update(X[300:302], Y[300:302])
    del refreshes[:]
    records = small_batches(model, X[302:314], Y[302:314])
    assert not refreshes
    assert {record.steps for record in records} == {0}
    before = model.posterior(X)
    bound = model.refresh()
    after = model.posterior(X)
    torch.testing.assert_close(before.mean, after.mean, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(before.variance, after.variance, rtol=1e-8, atol=1e-10)
    if memory == 1000:  # otherwise the unexplained variance of what has been folded is missing
        assert records[-1].elbo == pytest.approx(float(bound), rel=1e-9)


def test_small_batches_of_labels_end_close_to_where_all_sites_have_converged(
    refreshes: list[int],
) -> None:
    """Few labels are learnt with the sites of the others as they are; then all converge again."""
    X, Y = labels(500, seed=0)
    model = SequentialGP(X[:300], Y[:300], likelihood=BernoulliLikelihood())
    model.update(X[300:301], Y[300:301], memory=200)
    del refreshes[:]
    records = small_batches(model, X[301:341], Y[301:341])
    assert {record.steps for record in records} == {0}
    assert 0 < len(refreshes) < 20
    before = model.posterior(X[341:], observation_noise=True).mean
    bound = model.refresh(tol=1e-10)
    after = model.posterior(X[341:], observation_noise=True).mean
    torch.testing.assert_close(before, after, rtol=0, atol=0.01)
    assert records[-1].elbo == pytest.approx(float(bound), abs=0.5)


def test_a_small_batch_elsewhere_gets_inducing_points() -> None:
    """Conditioning would not tell the model anything about a place far from all of them."""
    X = torch.rand(300, 1, generator=torch.Generator().manual_seed(0))
    model = SequentialGP(X, torch.sin(6 * X))
    model.update(X[:1], torch.sin(6 * X[:1]))
    number = model.update(X[1:2], torch.sin(6 * X[1:2])).num_inducing
    far = torch.full((1, 1), 5.0)
    assert model.update(far, torch.ones(1, 1)).num_inducing == number + 1
    with torch.no_grad():
        assert model.posterior(far).variance < 0.01 * model.posterior(far + 3).variance


def test_small_batches_notice_hyperparameters_that_have_been_set() -> None:
    X = torch.rand(302, 1, generator=torch.Generator().manual_seed(0))
    Y = torch.sin(6 * X)
    model = SequentialGP(X[:300], Y[:300])
    model.update(X[:0], Y[:0])
    model.likelihood.noise = 0.5
    model.update(X[300:], Y[300:])
    mean = model.posterior(X).mean
    model.refresh()
    torch.testing.assert_close(mean, model.posterior(X).mean, rtol=0, atol=1e-9)

"""Scores from marginals against enumerated outcomes, joint samples and conditioned models."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from botorch.models.transforms import Normalize
from botorch.optim import optimize_acqf
from botorch.sampling import SobolQMCNormalSampler
from gpytorch.likelihoods import BernoulliLikelihood
from scipy import stats
from torch import Tensor

from benchmarks.memory import peak_memory
from seqgp import BinomialLikelihood, OverdispersedBinomialLikelihood, SequentialGP
from seqgp.acquisition import (
    expected_reduction,
    qExpectedUncertaintyReduction,
    select_from_pool,
    uncertainty_reduction,
)
from seqgp.acquisition import look_ahead as steps
from seqgp.acquisition.uncertainty import CRITERIA, Uncertainty, link_of, nugget_of
from seqgp.likelihoods import log_predictive
from tests.acquisition.helpers import (
    NAMES,
    THRESHOLD,
    TOTAL,
    arguments_of,
    model_of,
    points,
    threshold,
    uncertainty,
)
from tests.helpers import assert_close, make_inputs, make_kernel, terminal
from tests.models.helpers import data, pair

pytestmark = pytest.mark.usefixtures("float64")
names = pytest.mark.parametrize("name", NAMES)


def with_criteria(*names: str) -> pytest.MarkDecorator:
    """Likelihoods and their criteria: those with a threshold here have no entropy."""
    pairs = [
        (name, criterion)
        for name in names
        for criterion in CRITERIA
        if criterion != "entropy" or name not in THRESHOLD
    ]
    return pytest.mark.parametrize(("name", "criterion"), pairs)


# -------------------------------------------------------------------- the scores


def enumerated(
    model: SequentialGP, criterion: str, level: float, x: Tensor, locations: Tensor
) -> float:
    """The expectation over all counts out of `TOTAL`, each with its predictive probability."""
    h = np.linspace(-12, 12, 4001)
    latent = model.posterior(x.unsqueeze(0))
    sd = float(latent.variance + nugget_of(model.likelihood)) ** 0.5
    density = stats.norm(latent.mean.item(), sd).pdf(h) * (h[1] - h[0])
    now = float(uncertainty(model, criterion, level, locations).mean())
    chances, after = [], []
    for count in range(TOTAL + 1):
        chances.append(stats.binom.pmf(count, TOTAL, 1 / (1 + np.exp(-h))) @ density)
        conditioned = model.condition_on_observations(
            x.unsqueeze(0), torch.tensor([[float(count)]]), total_count=torch.tensor([TOTAL])
        )
        after.append(float(uncertainty(conditioned, criterion, level, locations).mean()))
    expected = float(np.dot(chances, after))
    if criterion == "volume":
        return float(np.dot(chances, np.abs(np.array(after) - expected)))
    return now - expected


@pytest.mark.parametrize("criterion", CRITERIA)
def test_scores_are_averages_over_all_outcomes(
    criterion: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A binomial of few trials, all of whose outcomes are looked at, or some are drawn."""
    model, X, locations = model_of("binomial"), *map(points, (4, 9))
    level = 0.3
    with torch.no_grad():
        expected = torch.tensor([enumerated(model, criterion, level, x, locations) for x in X])
    acquisition = qExpectedUncertaintyReduction(
        model, locations, criterion, level, total_count=TOTAL
    )
    assert_close(acquisition(X.unsqueeze(-2)), expected, 1e-6)
    actual = expected_reduction(model, X, locations, criterion, level, total_count=TOTAL)
    assert_close(actual, expected, 4e-5)  # the error of the table
    monkeypatch.setattr(steps, "_largest_outcome", lambda *_: None)
    drawn = expected_reduction(
        model, X, locations, criterion, level, num_fantasies=4096, total_count=TOTAL
    )
    # The spread over outcomes, at most .05, over the root of the number of fantasies.
    assert_close(drawn, expected, 5 * 0.05 / 4096**0.5)


@pytest.mark.parametrize("criterion", ["threshold-entropy", "variance"])
def test_scores_of_noise_that_varies(criterion: str) -> None:
    """Outcomes depend on two latents: integrated over a grid of outcomes, by conditioning."""
    model, X, locations = model_of("heteroscedastic"), *map(points, (3, 9))
    level = threshold("heteroscedastic")
    y = torch.linspace(-15, 15, 601)
    with torch.no_grad():
        now = uncertainty(model, criterion, level, locations).mean()
        expected = []
        for x in X:
            f = model(x.expand(len(y), 1, 2))
            moments = f.mean, f.variance
            density = log_predictive(model.likelihood, y.unsqueeze(-1), *moments).exp().squeeze(-1)
            after = model.condition_on_observations(x.expand(len(y), 1, 2), y.reshape(-1, 1, 1))
            u = uncertainty(after, criterion, level, locations).mean(-1)
            assert_close(density.sum() * 0.05, torch.ones(()), 1e-4)
            expected.append(now - (density @ u) * 0.05)
        expected = torch.stack(expected)
        acquisition = qExpectedUncertaintyReduction(
            model, locations, criterion, level, num_fantasies=4096
        )
        actual = acquisition(X.unsqueeze(-2))
    # The spread over outcomes, at most .05, over the root of the number of fantasies.
    assert_close(actual, expected, 5 * 0.05 / 4096**0.5)
    assert (expected > 0.005).all()
    fast = expected_reduction(model, X, locations, criterion, level, num_fantasies=4096)
    assert_close(fast, actual, 4e-5)  # the error of the table


def test_totals_that_differ() -> None:
    model, X, locations = model_of("binomial"), *map(points, (3, 9))
    totals = torch.tensor([1, 5, 3])
    actual = expected_reduction(model, X, locations, threshold=0.3, total_count=totals)
    for i, total in enumerate(totals.tolist()):
        alone = expected_reduction(model, X[[i]], locations, threshold=0.3, total_count=total)
        assert_close(actual[[i]], alone, 1e-6)


def by_joint_samples(
    model: SequentialGP, criterion: str, level: float, locations: Tensor
) -> Tensor:
    """Uncertainty at each location from joint samples of the posterior, and of the nugget."""
    f = model.posterior(locations).rsample(torch.Size([4000])).squeeze(-1)
    f = f + torch.as_tensor(nugget_of(model.likelihood)).sqrt() * torch.randn_like(f)
    theta = link_of(model.likelihood).forward(f)
    p = (theta > level).to(theta).mean(0)
    if criterion == "threshold-entropy":
        return torch.special.entr(p) + torch.special.entr(1 - p)
    if criterion == "misclassification":
        return torch.minimum(p, 1 - p)
    if criterion == "volume":
        return p
    if criterion == "variance":
        return theta.var(0)
    mean = theta.mean(0)
    return torch.special.entr(mean) + torch.special.entr(1 - mean)


@with_criteria(*NAMES)
def test_scores_are_those_of_joint_samples(name: str, criterion: str) -> None:
    """Everything by brute force: outcomes, joint samples of all fantasised posteriors."""
    model, X, locations = model_of(name), *map(points, (3, 6))
    sampler = SobolQMCNormalSampler(torch.Size([128]), seed=2)
    level = threshold(name)
    with torch.no_grad():
        fantasies = model.fantasize(X.unsqueeze(-2), sampler, **arguments_of(name))
        after = by_joint_samples(fantasies, criterion, level, locations).mean(2)
        expected = by_joint_samples(model, criterion, level, locations).mean() - after.mean(0)
        if criterion == "volume":
            expected = (after - after.mean(0)).abs().mean(0)
    actual = expected_reduction(
        model, X, locations, criterion, level, num_fantasies=128, **arguments_of(name)
    )
    # Errors of the sampled estimates: 4,000 samples at 6 locations, 128 outcomes of spread 0.1.
    assert_close(actual, expected, 5 * 0.1 / 128**0.5 / 4)


@pytest.mark.parametrize("criterion", ["volume", "threshold-entropy"])
@pytest.mark.parametrize("name", ["gaussian", "bernoulli", "ordinal"])
@pytest.mark.parametrize("local", [False, True])
def test_level_sets_by_weighted_samples(name: str, criterion: str, local: bool) -> None:
    """Without any approximation of a likelihood: joint samples, weighted by that of each outcome.

    What differs is the Gaussian approximation of the posterior given an outcome (none if the
    likelihood is Gaussian), and the error of 200,000 samples.
    """
    model, X, locations = model_of(name), *map(points, (3, 8))
    level, number = {"gaussian": 0.4, "ordinal": 1.4}.get(name, 0.6), 200_000
    latent = Uncertainty("volume", link_of(model.likelihood), level).latent_threshold
    scores = []
    torch.manual_seed(0)
    for x in X:
        where = torch.cat([x.unsqueeze(0), x.unsqueeze(0) if local else locations])
        with torch.no_grad():
            f = model.posterior(where).rsample(torch.Size([number])).squeeze(-1)
            inside = (f[:, 1:] > latent).to(f)
            if name == "gaussian":  # outcomes are grouped: 100 quantiles
                y = f[:, 0] + model.likelihood.noise.sqrt() * torch.randn(number)
                share = torch.nn.functional.one_hot(y.argsort().argsort() * 100 // number, 100)
                share = share.to(f)
            elif name == "bernoulli":
                p = torch.special.ndtr(f[:, 0])
                share = torch.stack([1 - p, p], -1)
            else:
                share = model.likelihood(f[:, 0]).probs
            chances = share.mean(0)
            after = share.mT @ inside / (chances * number).unsqueeze(-1)  # outcomes x locations
        if criterion == "volume":
            scores.append(chances @ (after.mean(-1) - inside.mean()).abs())
        else:
            now = inside.mean(0)
            H = [(torch.special.entr(p) + torch.special.entr(1 - p)).mean(-1) for p in (now, after)]
            scores.append(H[0] - chances @ H[1])
    expected = torch.stack(scores)
    actual = expected_reduction(
        model, X, None if local else locations, criterion, level, num_fantasies=512
    )
    relative = 0.02 if name == "gaussian" else 0.15
    assert_close(actual, expected, relative * float(expected.max()) + 0.002)


@names
@pytest.mark.parametrize("criterion", ["volume", "threshold-entropy"])
def test_a_candidate_is_its_own_location(name: str, criterion: str) -> None:
    """Local scores are those with the candidate as the only location."""
    model, X = model_of(name), points(4)
    options: dict[str, Any] = {"threshold": threshold(name), **arguments_of(name)}
    local = qExpectedUncertaintyReduction(model, None, criterion, **options)
    with torch.no_grad():
        expected = [
            qExpectedUncertaintyReduction(model, x.unsqueeze(0), criterion, **options)(
                x.reshape(1, 1, 2)
            )
            for x in X
        ]
        # Sites of several candidates converge together, to a relative tolerance of 1e-6.
        assert_close(local(X.unsqueeze(-2)), torch.cat(expected), 1e-5)
    fast = expected_reduction(model, X, None, criterion, **options)
    assert_close(fast, torch.cat(expected), 1e-3 * float(fast.max()))
    chosen = select_from_pool(model, X, criterion=criterion, local=True, **options)
    assert_close(chosen.scores[0], fast, 1e-6)


def test_gaussian_variance_is_that_of_botorch() -> None:
    """With a Gaussian likelihood, what is left is the integrated posterior variance."""
    from seqgp.acquisition import qNegIntegratedPosteriorVariance

    (model, _), X, locations = pair(), *map(points, (5, 20))
    left = qNegIntegratedPosteriorVariance(model, locations)(X.unsqueeze(-2))
    now = model.posterior(locations).variance.mean()
    assert_close(expected_reduction(model, X, locations, "variance"), now + left, 1e-5)


@names
def test_blocks_and_progress_do_not_matter(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, X, locations = model_of(name), *map(points, (7, 11))
    options: dict[str, Any] = {"threshold": threshold(name), **arguments_of(name)}
    expected = expected_reduction(model, X, locations, **options)
    monkeypatch.setattr(uncertainty_reduction, "BLOCK_ELEMENTS", 1)
    monkeypatch.setattr(uncertainty_reduction, "COVARIANCE_ELEMENTS", 22)
    with terminal() as stream:
        again = expected_reduction(model, X, locations, progress=True, **options)
    assert_close(again, expected, 1e-6)
    assert "score" in stream.getvalue()
    assert expected_reduction(model, X[:0], locations, **options).shape == (0,)


def score_a_large_pool(n: int) -> Iterator[int]:
    """To be measured: a pool whose block candidates x fantasies x locations would not be small."""
    torch.set_num_threads(1)
    X = torch.rand(n, 2)
    model = SequentialGP(X[:20], torch.ones(20, 1), likelihood=BinomialLikelihood(50))
    expected_reduction(model, X[:10], X[:10], threshold=0.3)  # libraries are loaded, tables made
    yield X.numel() * X.element_size()
    expected_reduction(model, X, X, threshold=0.3)


def test_memory_is_bounded() -> None:
    """All at once, 2,000 x 16 x 2,000 numbers in single precision would be 244 MB each."""
    measured = peak_memory(score_a_large_pool, n=2000)
    assert measured["extra"] < 120


def test_a_surveyed_location_is_known() -> None:
    """An observation tells more about its own location than about one a step aside."""
    model, X = model_of("overdispersed_binomial"), points(1)
    there, aside = (
        expected_reduction(model, X, X + shift, threshold=0.3, total_count=50)
        for shift in (0.0, 1e-7)
    )
    assert there > 1.5 * aside > 0


def test_weights() -> None:
    model, X, locations = model_of("bernoulli"), *map(points, (4, 6))
    weights = torch.tensor([2.0, 0.0, 0.0, 1.0, 0.0, 0.0])
    actual = expected_reduction(model, X, locations, threshold=0.5, weights=weights)
    single = [expected_reduction(model, X, locations[[i]], threshold=0.5) for i in (0, 3)]
    assert_close(actual, 2 * single[0] + single[1], 1e-6)


@pytest.mark.parametrize("q", [1, 2])
def test_several_criteria(q: int) -> None:
    """Relative reductions add up."""
    model, X, locations = model_of("bernoulli"), make_inputs(4, q, 2), points(6)
    criteria = ("misclassification", "variance")
    expected = torch.zeros(4)
    with torch.no_grad():
        for criterion in criteria:
            now = uncertainty(model, criterion, 0.5, locations).mean()
            acquisition = qExpectedUncertaintyReduction(model, locations, criterion, 0.5)
            expected += acquisition(X) / now
        acquisition = qExpectedUncertaintyReduction(model, locations, criteria, 0.5)
        assert_close(acquisition(X), expected)
    if q == 1:
        assert_close(expected_reduction(model, X[:, 0], locations, criteria, 0.5), expected, 1e-3)


def test_fantasy_models_are_averaged() -> None:
    model, X, locations, pending = model_of("bernoulli"), *map(points, (4, 6, 2))
    Y = torch.tensor([[[0.0], [1.0]], [[1.0], [1.0]], [[0.0], [0.0]]])
    batch = model.condition_on_observations(pending, Y)
    actual = expected_reduction(batch, X, locations, threshold=0.5)
    each = [
        expected_reduction(model.condition_on_observations(pending, y), X, locations, threshold=0.5)
        for y in Y
    ]
    assert_close(actual, torch.stack(each).mean(0), 1e-6)


# -------------------------------------------------------------------- the acquisition function


@names
def test_several_points_are_fantasised_jointly(name: str) -> None:
    model, X, locations = model_of(name), make_inputs(3, 2, 2), points(9)
    acquisition = qExpectedUncertaintyReduction(
        model, locations, threshold=threshold(name), num_fantasies=8, **arguments_of(name)
    )
    fantasies = model.fantasize(X, acquisition.sampler, **arguments_of(name))
    now, later = (
        uncertainty(m, "threshold-entropy", threshold(name), locations).mean(-1)
        for m in (model, fantasies)
    )
    assert_close(acquisition(X), now - later.mean(0))
    with_pending = qExpectedUncertaintyReduction(
        model,
        locations,
        threshold=threshold(name),
        num_fantasies=8,
        X_pending=X[0, 1:],
        **arguments_of(name),
    )
    assert_close(with_pending(X[:1, :1]), acquisition(X[:1]))


@pytest.mark.parametrize("name", [*NAMES, "gamma", "censored", "student_t"])
@pytest.mark.parametrize(
    ("criterion", "local"),
    [("threshold-entropy", False), ("threshold-entropy", True), ("volume", False)],
)
def test_gradient_is_that_of_the_expectation(name: str, criterion: str, local: bool) -> None:
    """By differences: exact if all outcomes are looked at or they are real numbers."""
    model, locations = model_of(name), None if local else points(9)
    exact = name != "poisson"
    acquisition = qExpectedUncertaintyReduction(
        model,
        locations,
        criterion,
        threshold=threshold(name),
        num_fantasies=16 if exact else 2**13,
        **arguments_of(name),
    )
    x = torch.tensor([[[0.4, 0.6]]], requires_grad=True)
    (gradient,) = torch.autograd.grad(acquisition(x).sum(), x)
    step = 1e-4 if exact else 0.02  # outcomes that are drawn jump
    with torch.no_grad():
        shifts = step * torch.eye(2).unsqueeze(-2)
    differences = (acquisition(x + shifts) - acquisition(x - shifts)).detach() / (2 * step)
    tol = 1e-4 if exact else 0.15 if local else 0.05  # a location alone averages no jumps
    assert_close(gradient.flatten(), differences, tol * float(differences.abs().max()))


def test_optimisation_over_a_box() -> None:
    model, locations = model_of("bernoulli"), points(60)
    acquisition = qExpectedUncertaintyReduction(model, locations, threshold=0.5)
    bounds = torch.tensor([[0.0, 0.0], [1.0, 1.0]])
    torch.manual_seed(0)
    best, value = optimize_acqf(acquisition, bounds, q=1, num_restarts=3, raw_samples=32)
    with torch.no_grad():
        assert value >= acquisition(make_inputs(200, 1, 2)).max() - 1e-4
    assert best.shape == (1, 2)


# -------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"q": 0}, "q: expected 1 to 30"),
        ({"q": 31}, "q: expected 1 to 30"),
        ({"surveyed": torch.tensor([30])}, "surveyed: expected indices from 0 to 29"),
        ({"surveyed": torch.ones(3)}, "surveyed: expected 30 booleans or"),
        ({"available": torch.ones(4, dtype=torch.bool)}, "available: expected 30 booleans"),
        ({"costs": torch.zeros(30)}, "costs: expected 30 positive"),
        ({"weights": torch.ones(3)}, "weights: expected 30"),
        ({"criterion": "guess"}, "criterion: expected one of"),
        ({"criterion": ()}, "criterion: expected at least one"),
        ({"criterion": ("volume", "variance")}, "criterion: .*a volume is not reduced"),
        ({"local": True, "weights": torch.ones(30)}, "weights: expected None"),
        ({"threshold": None}, "threshold:"),
        ({"pool": torch.rand(3, 5)}, "pool: expected shape ... x n x 2"),
        ({"pool": torch.rand(1, 3, 2)}, "pool: expected shape n x d"),
    ],
)
def test_errors(options: dict[str, Any], message: str) -> None:
    given = {"pool": points(30), "threshold": 0.5, **options}
    with pytest.raises(ValueError, match=message):
        select_from_pool(model_of("bernoulli"), **given)


def test_models_that_do_not_fit() -> None:
    with pytest.raises(TypeError, match="expected a SequentialGP"):
        expected_reduction(pair()[1], points(2), points(2), "variance")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="one output"):
        expected_reduction(pair(outputs=2)[0], points(2), points(2), "variance")
    with pytest.raises(ValueError, match="one output; a SoftmaxLikelihood has several"):
        expected_reduction(model_of("softmax"), points(2), points(2), "variance")


def test_inputs_are_transformed() -> None:
    """A model that scales its inputs gives the scores of one whose inputs are scaled."""
    bounds = torch.tensor([[-1.0, 0.0], [3.0, 10.0]])
    raw = bounds[0] + (bounds[1] - bounds[0]) * points(12)
    Y = data("bernoulli").Y
    options: dict[str, Any] = {"likelihood": BernoulliLikelihood(), "covar_module": make_kernel()}
    scaled = SequentialGP(points(12), Y, **options)
    model = SequentialGP(raw, Y, input_transform=Normalize(2, bounds=bounds), **options)
    for function in (expected_reduction, score_by_class):
        assert_close(
            function(model, raw, raw, threshold=0.5),
            function(scaled, points(12), points(12), threshold=0.5),
            1e-6,
        )


def score_by_class(model: SequentialGP, X: Tensor, locations: Tensor, **options: Any) -> Tensor:
    return qExpectedUncertaintyReduction(model, locations, **options)(X.unsqueeze(-2))


# -------------------------------------------------------------------- devices and precision


@pytest.fixture
def meta() -> Iterator[None]:
    yield
    torch.set_default_device(None)


@with_criteria("gaussian", "bernoulli", "overdispersed_binomial")
def test_nothing_is_made_on_the_default_device(name: str, criterion: str, meta: None) -> None:
    model, pool, X = model_of(name), points(12), make_inputs(3, 1, 2)
    options: dict[str, Any] = {
        "criterion": criterion,
        "threshold": threshold(name),
        **arguments_of(name),
    }

    def results() -> list[Tensor]:
        seen = torch.zeros(12, dtype=torch.bool, device="cpu")
        selection = select_from_pool(
            model, pool, q=2, surveyed=seen, num_batch_fantasies=2, **options
        )
        acquisition = qExpectedUncertaintyReduction(model, pool, **options)
        return [selection.scores, acquisition(X).detach()]

    expected = results()
    torch.set_default_device("meta")
    for actual, value in zip(results(), expected, strict=True):
        assert actual.device == torch.device("cpu")
        assert_close(actual, value)


def test_float32() -> None:
    X = points(12)
    Y = torch.tensor([[float(k % 4)] for k in range(12)])
    values = []
    for dtype in (torch.float32, torch.float64):
        model = SequentialGP(
            X.to(dtype),
            Y.to(dtype),
            likelihood=OverdispersedBinomialLikelihood(TOTAL),
            covar_module=make_kernel().to(dtype),
        )
        scores = expected_reduction(model, X.to(dtype), X.to(dtype), threshold=0.3)
        assert scores.dtype == dtype
        values.append(scores.double())
    assert_close(*values, 1e-4)

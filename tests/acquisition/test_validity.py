from __future__ import annotations

import itertools
import math
from functools import partial
from typing import Any

import pytest
import torch
from botorch.acquisition import (
    ExpectedImprovement,
    LogExpectedImprovement,
    qLogExpectedImprovement,
)
from botorch.acquisition.analytic import LogConstrainedExpectedImprovement
from botorch.acquisition.objective import ScalarizedPosteriorTransform
from botorch.exceptions.errors import UnsupportedError
from botorch.models import ModelListGP, SingleTaskGP, SingleTaskVariationalGP
from botorch.models.map_saas import EnsembleMapSaasSingleTaskGP
from botorch.models.model import ModelList
from botorch.models.transforms import Standardize
from botorch.sampling import SobolQMCNormalSampler
from gpytorch.likelihoods import BernoulliLikelihood, PoissonLikelihood
from torch import Tensor

from seqgp import SequentialGP
from seqgp.acquisition import (
    LogValidExpectedImprovement,
    NoValidObservationWarning,
    best_valid,
    log_validity,
    qLogValidExpectedImprovement,
)
from seqgp.acquisition.validity import LogChances, log_expected_best, takes_for_valid
from seqgp.likelihoods.discrete import BinomialLikelihood, OverdispersedBinomialLikelihood
from seqgp.likelihoods.quadrature import base_samples
from tests.helpers import (
    assert_close,
    make_inputs,
    make_kernel,
    make_mean,
    plain_improvement,
    unscaled,
)

pytestmark = [pytest.mark.usefixtures("float64"), unscaled, plain_improvement]


def values(X: Tensor) -> Tensor:
    return (5 * X).sin().sum(-1, keepdim=True)


def labels(X: Tensor) -> Tensor:
    return (X[..., :1] < 0.7).to(X)


def objective(n: int = 20, **options: Any) -> SequentialGP:
    X = make_inputs(n, 2)
    return SequentialGP(X, values(X), covar_module=make_kernel(0.5), **options)


def classifier(n: int = 25, flip: bool = False) -> SequentialGP:
    X = make_inputs(n, 2)
    Y = 1 - labels(X) if flip else labels(X)
    return SequentialGP(X, Y, likelihood=BernoulliLikelihood(), covar_module=make_kernel(0.6, 3.0))


def gaussian(n: int = 25) -> SingleTaskGP:
    X = make_inputs(n, 2)
    return SingleTaskGP(X, labels(X), covar_module=make_kernel(0.6), outcome_transform=None)


def counter(kind: str = "counts", **options: Any) -> SequentialGP:
    """Of five trials at each input, how many were valid."""
    kinds = {"counts": BinomialLikelihood, "overdispersed": OverdispersedBinomialLikelihood}
    X = make_inputs(25, 2)
    Y = (6 * (0.9 - X[..., :1])).round().clamp(0, 5)
    likelihood = kinds[kind](total_count=5, **options)
    return SequentialGP(X, Y, likelihood=likelihood, covar_module=make_kernel(0.6, 3.0))


def sampler(n: int, seed: int = 0) -> SobolQMCNormalSampler:
    return SobolQMCNormalSampler(torch.Size([n]), seed=seed)


def integrate(function: Any, mean: Tensor, variance: Tensor) -> Tensor:
    """The expectation of a function of a Gaussian, by the trapezoidal rule."""
    z = torch.linspace(-12, 12, 400_001)
    density = (-0.5 * z.square()).exp() / (2 * torch.pi) ** 0.5
    return torch.trapezoid(function(mean + variance.sqrt() * z) * density, z)


# -------------------------------------------------------------------- one point


@pytest.mark.parametrize("kind", ["bernoulli", "gaussian", "both"])
def test_is_what_integration_says(kind: str) -> None:
    """Of improvement over the objective's posterior, and of validity over its own."""
    models = {"bernoulli": [classifier()], "gaussian": [gaussian()]}
    models["both"] = [*models["bernoulli"], *models["gaussian"]]
    f, X, best = objective(), make_inputs(6, 1, 2), 0.8
    actual = LogValidExpectedImprovement(f, models[kind], best)(X)
    for x, value in zip(X, actual, strict=True):
        posterior = f.posterior(x)
        expected = integrate(
            lambda y: (y - best).clamp_min(0),
            posterior.mean.squeeze(),
            posterior.variance.squeeze(),
        )
        for model in models[kind]:
            g = model.posterior(x)
            probit = isinstance(model.likelihood, BernoulliLikelihood)
            expected = expected * integrate(
                torch.special.ndtr if probit else lambda y: (y > 0.5).to(y),
                g.mean.squeeze(),
                g.variance.squeeze(),
            )
        # The steps of the indicator: one in 400,000 over 24 standard deviations.
        assert_close(value.exp(), expected, 1e-8 if kind == "bernoulli" else 3e-5)


@pytest.mark.parametrize("maximize", [True, False])
def test_gaussian_validity_is_botorchs_constraint(maximize: bool) -> None:
    f, g, X = objective(), gaussian(), make_inputs(8, 1, 2)
    theirs = LogConstrainedExpectedImprovement(
        ModelListGP(f, g), 0.3, objective_index=0, constraints={1: (0.5, None)}, maximize=maximize
    )
    ours = LogValidExpectedImprovement(f, g, 0.3, maximize=maximize)
    assert_close(ours(X), theirs(X), 1e-10)


def test_threshold_of_a_constraint_that_is_measured() -> None:
    f, g, X = objective(), gaussian(), make_inputs(8, 1, 2)
    theirs = LogConstrainedExpectedImprovement(
        ModelListGP(f, g), 0.3, objective_index=0, constraints={1: (-0.2, None)}
    )
    assert_close(LogValidExpectedImprovement(f, g, 0.3, threshold=-0.2)(X), theirs(X), 1e-10)


@pytest.mark.parametrize("threshold", [0.5, 0.8])
@pytest.mark.parametrize(
    ("kind", "link"), [("counts", "logit"), ("counts", "probit"), ("overdispersed", "logit")]
)
def test_validity_of_counts_is_what_integration_says(
    kind: str, link: str, threshold: float
) -> None:
    """The chance that more than a share of many trials would be valid."""
    model = counter(kind) if kind == "overdispersed" else counter(kind, link=link)
    X = make_inputs(6, 1, 2)
    share = torch.sigmoid if link == "logit" else torch.special.ndtr
    noise = model.likelihood.nugget.detach() if kind == "overdispersed" else torch.zeros(())
    actual = log_validity(model, X, threshold).exp().squeeze(-1)
    for x, value in zip(X, actual, strict=True):
        g = model.posterior(x)
        expected = integrate(
            lambda y: (share(y) > threshold).to(y),
            g.mean.squeeze(),
            g.variance.squeeze() + noise,
        )
        assert_close(value, expected, 3e-5)  # the steps of the indicator, as above
    assert actual.max() - actual.min() > 0.2


def test_which_observations_are_valid() -> None:
    counts = torch.tensor([[0.0], [2.0], [3.0], [5.0]])
    assert takes_for_valid(counter(), counts).flatten().tolist() == [False, False, True, True]
    assert takes_for_valid(counter(), counts, 0.8).flatten().tolist() == [False, False, False, True]
    for model in (classifier(), gaussian()):
        labels = torch.tensor([[0.0], [1.0]])
        assert takes_for_valid(model, labels).flatten().tolist() == [False, True]
    X, total = make_inputs(25, 2), torch.full((25,), 5.0)
    model = SequentialGP(
        X,
        torch.ones(25, 1),
        likelihood=BinomialLikelihood(),
        likelihood_arguments={"total_count": total},
    )
    with pytest.raises(UnsupportedError, match="total"):
        takes_for_valid(model, counts)
    with pytest.raises(ValueError, match="below 1"):
        log_validity(counter(), X, 1.0)


def test_log_form_is_the_plain_form() -> None:
    f, g, X = objective(), classifier(), make_inputs(8, 1, 2)
    probability = g.posterior(X, observation_noise=True).mean.flatten()  # by quadrature
    plain = ExpectedImprovement(f, 0.3)(X) * probability
    assert_close(LogValidExpectedImprovement(f, g, 0.3)(X).exp(), plain, 1e-8)


def test_gradients() -> None:
    acquisition = LogValidExpectedImprovement(objective(), [classifier(), gaussian()], 0.3)
    X = make_inputs(4, 1, 2).requires_grad_()
    assert torch.autograd.gradcheck(acquisition, X, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_no_underflow_far_from_the_optimum(dtype: torch.dtype) -> None:
    """Where probabilities and improvements are below any number that there is."""
    X = make_inputs(25, 2)
    f = SequentialGP(X, values(X), covar_module=make_kernel(0.5)).to(dtype)
    sure = make_kernel(0.6, 1e2)
    g = SequentialGP(X, labels(X), likelihood=BernoulliLikelihood(), covar_module=sure).to(dtype)
    x = torch.tensor([[[0.95, 0.5]]], dtype=dtype, requires_grad=True)
    value = LogValidExpectedImprovement(f, [g] * 20, best_f=200.0)(x)
    assert value < -1000
    assert value.isfinite()
    (gradient,) = torch.autograd.grad(value.sum(), x)
    assert gradient.isfinite().all()
    assert gradient[..., 0] < 0  # to where points are valid


def test_model_lists_and_several_outputs() -> None:
    X = make_inputs(25, 2)
    both = SequentialGP(
        X,
        torch.cat([labels(X), 1 - labels(X.flip(-1))], -1),
        likelihood=BernoulliLikelihood(),
    )
    x = make_inputs(4, 1, 2)
    separate = [both.subset_output([k]) for k in range(2)]
    expected = sum(log_validity(model, x) for model in separate)
    for models in (both, separate, ModelList(*separate), [ModelList(*separate)]):
        assert_close(log_validity(models, x), expected, 1e-10)


def test_of_fantasies() -> None:
    """Batches of models, as fantasies are."""
    x, X = make_inputs(3, 2), make_inputs(5, 1, 2)
    f, g = objective(), classifier()
    acquisition = LogValidExpectedImprovement(
        f.condition_on_observations(x.unsqueeze(-2), values(x).unsqueeze(-2)),
        g.condition_on_observations(x.unsqueeze(-2), labels(x).unsqueeze(-2)),
        0.3,
    )
    actual = acquisition(X.unsqueeze(1))
    assert actual.shape == (5, 3)
    for k in range(3):
        one = LogValidExpectedImprovement(
            f.condition_on_observations(x[k : k + 1], values(x[k : k + 1])),
            g.condition_on_observations(x[k : k + 1], labels(x[k : k + 1])),
            0.3,
        )
        assert_close(actual[:, k], one(X), 1e-6)


def test_ensembles_are_averaged() -> None:
    X, x = make_inputs(10, 2), make_inputs(4, 1, 2)
    torch.manual_seed(0)
    f, g = (EnsembleMapSaasSingleTaskGP(X, Y, num_taus=3) for Y in (values(X), labels(X)))
    posterior = g.posterior(x)
    scaled = (posterior.mean - 0.5) / posterior.variance.sqrt()
    assert scaled.shape == (4, 3, 1, 1)
    log_probability = (torch.special.log_ndtr(scaled).logsumexp(1) - math.log(3)).flatten()
    expected = LogExpectedImprovement(f, 0.3)(x) + log_probability
    assert_close(LogValidExpectedImprovement(f, g, 0.3)(x), expected, 1e-8)
    joint = qLogValidExpectedImprovement(f, classifier(), 0.3, sampler(4096))(x)
    alone = LogValidExpectedImprovement(f, classifier(), 0.3)(x)
    assert joint.shape == (4,)
    assert_close(joint.exp(), alone.exp(), 0.01)
    with pytest.raises(UnsupportedError, match="ensemble"):
        qLogValidExpectedImprovement(f, g, 0.3)


def test_posterior_transform() -> None:
    X, x = make_inputs(20, 2), make_inputs(4, 1, 2)
    two = SequentialGP(X, torch.cat([values(X), -values(X)], -1))
    transform = ScalarizedPosteriorTransform(torch.tensor([1.0, 0.0]))
    ours = LogValidExpectedImprovement(two, classifier(), 0.3, posterior_transform=transform)
    theirs = LogExpectedImprovement(two, 0.3, posterior_transform=transform)
    assert_close(ours(x), theirs(x) + log_validity(classifier(), x).squeeze(-1), 1e-10)
    with pytest.raises(UnsupportedError, match="posterior_transform"):
        LogValidExpectedImprovement(two, classifier(), 0.3)


def test_a_classifier_of_botorch() -> None:
    X, x = make_inputs(20, 2), make_inputs(4, 1, 2)
    theirs = SingleTaskVariationalGP(X, labels(X), likelihood=BernoulliLikelihood())
    latent = theirs.posterior(x)
    expected = torch.special.log_ndtr(latent.mean / (1 + latent.variance).sqrt()).squeeze(-1)
    assert_close(log_validity(theirs, x), expected, 1e-10)


# -------------------------------------------------------------------- batches


def test_expected_best_by_enumeration() -> None:
    """Over all ways in which points can be valid."""
    log_values, logits = torch.randn(5, 4), torch.randn(5, 4)
    chances = LogChances(
        torch.nn.functional.logsigmoid(logits), torch.nn.functional.logsigmoid(-logits)
    )
    expected = torch.zeros(5)
    for valid in itertools.product([0.0, 1.0], repeat=4):
        v = torch.tensor(valid)
        probability = (v * chances.valid.exp() + (1 - v) * chances.invalid.exp()).prod(-1)
        expected = expected + probability * (v * log_values.exp()).amax(-1)
    assert_close(log_expected_best(log_values, chances).exp(), expected, 1e-12)


def test_expected_best_for_sure() -> None:
    """Points that are surely valid or surely not, and gradients there."""
    log_values = torch.tensor([0.3, 1.2, 2.0], requires_grad=True)
    g = torch.tensor([50.0, 50.0, -50.0], requires_grad=True)
    chances = LogChances(torch.special.log_ndtr(g), torch.special.log_ndtr(-g))
    value = log_expected_best(log_values, chances)
    assert_close(value, torch.tensor(1.2))
    for gradient in torch.autograd.grad(value, [log_values, g]):
        assert gradient.isfinite().all()


@pytest.mark.parametrize("kind", ["bernoulli", "several"])
def test_batch_by_simulation(kind: str) -> None:
    """Draw objective, validity and labels at all points, and look at the best valid one."""
    models = [classifier()] if kind == "bernoulli" else [classifier(), classifier(flip=True)]
    f, X, best, n = objective(), make_inputs(2, 3, 2), 0.8, 400_000
    actual = qLogValidExpectedImprovement(f, models, best, sampler(2**14))(X).exp()
    with torch.no_grad():
        improvement = (f.posterior(X).rsample(torch.Size([n])).squeeze(-1) - best).clamp_min(0)
        for model in models:
            p = torch.special.ndtr(model.posterior(X).rsample(torch.Size([n])).squeeze(-1))
            improvement = improvement * (torch.rand_like(p) < p)
        draws = improvement.amax(-1)
    error = draws.std(0) / n**0.5
    # Four standard errors of the simulation, and as much for the quasi-random samples.
    assert ((actual - draws.mean(0)).abs() < 8 * error).all()


@pytest.mark.parametrize("kind", ["bernoulli", "gaussian", "counts", "overdispersed"])
def test_batch_of_one_is_the_analytic_value(kind: str) -> None:
    g = {"bernoulli": classifier, "gaussian": gaussian}.get(kind, partial(counter, kind))()
    f, X = objective(), make_inputs(6, 1, 2)
    batch = qLogValidExpectedImprovement(f, g, 0.8, sampler(2**15))(X).exp()
    # The indicator is smoothed over 1e-3 of the constraint's scale.
    assert_close(batch, LogValidExpectedImprovement(f, g, 0.8)(X).exp(), 2e-3)


def test_all_surely_valid_is_botorchs_batch() -> None:
    X = make_inputs(20, 2)
    g = SequentialGP(
        X, torch.ones(20, 1), likelihood=BernoulliLikelihood(), mean_module=make_mean(12.0)
    )
    f, x = objective(), make_inputs(5, 3, 2)
    assert log_validity(g, x).min() > -1e-6
    ours = qLogValidExpectedImprovement(f, g, 0.8, sampler(512), fat=False)(x).exp()
    # Theirs smooths the maximum over the batch by a temperature, which we take to be small.
    theirs = qLogExpectedImprovement(f, 0.8, sampler(512), fat=False, tau_max=1e-4)(x).exp()
    assert_close(ours, theirs, 1e-3)


def test_gradients_of_batches() -> None:
    acquisition = qLogValidExpectedImprovement(
        objective(), [classifier(), gaussian()], 0.3, sampler(16)
    )
    X = make_inputs(2, 3, 2).requires_grad_()
    acquisition(X)  # draws base samples
    assert torch.autograd.gradcheck(acquisition, X, atol=1e-5, rtol=1e-4)


def test_pending_points_are_points_of_the_batch() -> None:
    f, g, X, pending = objective(), classifier(), make_inputs(4, 1, 2), make_inputs(2, 2)
    joint = qLogValidExpectedImprovement(f, g, 0.8, sampler(64))
    expected = joint(torch.cat([X, pending.expand(4, 2, 2)], -2))
    given = qLogValidExpectedImprovement(f, g, 0.8, sampler(64), X_pending=pending)
    assert_close(given(X), expected)
    joint.set_X_pending(pending)
    assert_close(joint(X), expected)


def test_joint_batches_and_greedy_ones() -> None:
    """On a grid, where the best batch of two can be found by trying all.

    Greedy choice is worth at least 1 - 1/e of the best, as the improvement is submodular.
    """
    f, g = objective(), classifier()
    grid = torch.cartesian_prod(torch.linspace(0, 1, 6), torch.linspace(0, 1, 6))
    acquisition = qLogValidExpectedImprovement(f, g, 0.8, sampler(256))
    with torch.no_grad():
        pairs = torch.combinations(torch.arange(len(grid)))
        best = acquisition(grid[pairs]).max().exp()
        first = grid[acquisition(grid.unsqueeze(-2)).argmax()].unsqueeze(0)
        acquisition.set_X_pending(first)
        greedy = acquisition(grid.unsqueeze(-2)).max().exp()
    assert 0.63 * best < greedy <= best * (1 + 1e-9)


def test_a_second_point_that_would_fail_with_the_first_is_worth_less() -> None:
    """Validity is joint: twice nearly the same point is little more than once."""
    f, g = objective(), classifier()
    x = torch.tensor([[0.75, 0.3]])
    acquisition = qLogValidExpectedImprovement(f, g, 0.0, sampler(4096))
    once, twice = acquisition(x), acquisition(torch.cat([x, x + 1e-3]))
    apart = acquisition(torch.cat([x, torch.tensor([[0.3, 0.3]])]))
    assert once < twice < apart


# -------------------------------------------------------------------- the incumbent


def test_best_valid() -> None:
    Y = torch.tensor([[1.0], [5.0], [2.0], [torch.nan]])
    valid = torch.tensor([1.0, 0.0, 1.0, 0.0])
    assert best_valid(Y, valid) == 2
    assert best_valid(Y, valid.bool(), maximize=False) == 1
    assert best_valid(Y, torch.zeros(4)) is None
    with pytest.raises(ValueError, match="for each of 4"):
        best_valid(Y, valid[:2])
    with pytest.raises(ValueError, match="NaN"):
        best_valid(Y, torch.ones(4))


def test_no_valid_observation_yet() -> None:
    X, x = make_inputs(10, 2), make_inputs(5, 3, 2)
    g = SequentialGP(X, torch.zeros(10, 1), likelihood=BernoulliLikelihood())
    with pytest.warns(NoValidObservationWarning, match="no valid observation"):
        alone = LogValidExpectedImprovement(None, g, None)
    assert_close(alone(x[:, :1]), log_validity(g, x[:, :1]).squeeze(-1), 1e-12)
    with pytest.warns(NoValidObservationWarning):
        batch = qLogValidExpectedImprovement(None, g, None, sampler(2**14))
    p = torch.special.ndtr(g.posterior(x).rsample(torch.Size([200_000])).squeeze(-1))
    at_least_one = 1 - (1 - p).prod(-1)
    error = at_least_one.std(0) / 200_000**0.5
    assert ((batch(x).exp() - at_least_one.mean(0)).abs() < 8 * error).all()
    with pytest.raises(ValueError, match="objective"):
        LogValidExpectedImprovement(None, g, 0.3)


@pytest.mark.parametrize("n", [1, 10])
@pytest.mark.parametrize("label", [0.0, 1.0])
def test_all_alike_or_one_observation(n: int, label: float) -> None:
    X, x = make_inputs(n, 2), make_inputs(5, 1, 2)
    g = SequentialGP(X, torch.full((n, 1), label), likelihood=BernoulliLikelihood())
    f = SequentialGP(X, values(X))
    for acquisition in (
        LogValidExpectedImprovement(f, g, values(X).max()),
        qLogValidExpectedImprovement(f, g, values(X).max()),
    ):
        assert acquisition(x).isfinite().all()
    probability = log_validity(g, X).exp()
    assert ((probability > 0.5) == bool(label)).all()


def test_what_is_no_validity_model() -> None:
    X = make_inputs(10, 2)
    counts = SequentialGP(X, torch.ones(10, 1), likelihood=PoissonLikelihood())
    with pytest.raises(UnsupportedError, match="PoissonLikelihood"):
        LogValidExpectedImprovement(objective(), counts, 0.3)
    with pytest.raises(ValueError, match="at least one"):
        LogValidExpectedImprovement(objective(), [], 0.3)


def test_outcome_transforms_are_undone() -> None:
    """The incumbent and the threshold are on the scale of the observations."""
    X, x = make_inputs(20, 2), make_inputs(4, 1, 2)
    f = SequentialGP(X, 100 + 10 * values(X), outcome_transform=Standardize(1))
    g = SingleTaskGP(X, labels(X), outcome_transform=Standardize(1))
    theirs = LogConstrainedExpectedImprovement(
        ModelListGP(f, g), 105.0, objective_index=0, constraints={1: (0.5, None)}
    )
    assert_close(LogValidExpectedImprovement(f, g, 105.0)(x), theirs(x), 1e-10)


def test_pending_points_are_not_for_one_point() -> None:
    acquisition = LogValidExpectedImprovement(objective(), classifier(), 0.3)
    acquisition.set_X_pending(None)
    with pytest.raises(UnsupportedError, match="fantasy_batch"):
        acquisition.set_X_pending(make_inputs(2, 2))


@pytest.mark.parametrize("kind", [LogValidExpectedImprovement, qLogValidExpectedImprovement])
def test_nothing_is_made_on_the_default_device(kind: Any) -> None:
    """Which is "meta" here, while models and data are on the CPU."""
    f, models, X = objective(), [classifier(), gaussian()], make_inputs(3, 1, 2)
    expected = kind(f, models, 0.3)(X)
    base_samples.cache_clear()
    torch.set_default_device("meta")
    try:
        actual = kind(f, models, 0.3)(X)
    finally:
        torch.set_default_device(None)
        base_samples.cache_clear()
    assert_close(actual, expected, 1e-12)


def test_single_precision_of_batches() -> None:
    f, g, X = objective().float(), classifier().float(), make_inputs(3, 2, 2)
    single = qLogValidExpectedImprovement(f, g, 0.3, sampler(256))(X.float())
    assert single.dtype == torch.float32
    double = qLogValidExpectedImprovement(objective(), classifier(), 0.3, sampler(256))(X)
    assert_close(single, double, 1e-2)  # other base samples: Sobol numbers have fewer digits


@pytest.mark.parametrize("total", [None, torch.tensor([5, 6, 7])], ids=["none", "of each"])
def test_imagined_counts_need_one_total(total: Tensor | None) -> None:
    model = torch.nn.Module()
    model.likelihood = BinomialLikelihood(total)
    with pytest.raises(UnsupportedError, match="one total for all"):
        takes_for_valid(model, torch.tensor([[3.0], [4.0]]))

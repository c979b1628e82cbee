from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from botorch.acquisition import (
    AcquisitionFunction,
    ExpectedImprovement,
    LogExpectedImprovement,
    LogNoisyExpectedImprovement,
    NoisyExpectedImprovement,
    UpperConfidenceBound,
    qKnowledgeGradient,
    qLogExpectedImprovement,
    qLogNoisyExpectedImprovement,
    qLowerBoundMaxValueEntropy,
    qMaxValueEntropy,
)
from botorch.acquisition import active_learning as botorch_active_learning
from botorch.acquisition.multi_step_lookahead import qMultiStepLookahead
from botorch.exceptions.errors import UnsupportedError
from botorch.generation import MaxPosteriorSampling
from botorch.models import SingleTaskGP
from botorch.models.model import Model
from botorch.optim import optimize_acqf
from botorch.sampling import SobolQMCNormalSampler
from botorch.sampling.pathwise import draw_matheron_paths
from scipy.special import ndtr
from torch import Tensor

from seqgp import BinomialLikelihood, SequentialGP
from seqgp.acquisition import qNegIntegratedPosteriorVariance
from tests.helpers import assert_close, make_inputs, plain_improvement
from tests.models.acquisition_table import (
    LIKELIHOODS,
    NOT_MEANINGFUL,
    RAISES,
    TABLE,
    WORKS,
    render,
)
from tests.models.helpers import Data, data, pair

pytestmark = pytest.mark.usefixtures("float64")


def sampler(n: int = 16) -> SobolQMCNormalSampler:
    return SobolQMCNormalSampler(torch.Size([n]), seed=0)


def baseline() -> Tensor:
    return make_inputs(12, 2)


def pending() -> Tensor:
    return make_inputs(1, 2)


def points() -> Tensor:
    return make_inputs(30, 2)


#: How to make them, and how many points they take: ``q``.
ACQUISITIONS: dict[str, tuple[Callable[[Model], AcquisitionFunction], int]] = {
    "ExpectedImprovement": (lambda model: ExpectedImprovement(model, best_f=1.0), 1),
    "LogExpectedImprovement": (lambda model: LogExpectedImprovement(model, best_f=1.0), 1),
    "UpperConfidenceBound": (lambda model: UpperConfidenceBound(model, beta=2.0), 1),
    "qLogExpectedImprovement": (
        lambda model: qLogExpectedImprovement(model, 1.0, sampler=sampler()),
        2,
    ),
    "qLogNoisyExpectedImprovement": (
        lambda model: qLogNoisyExpectedImprovement(model, baseline(), sampler=sampler()),
        2,
    ),
    "qKnowledgeGradient": (
        lambda model: qKnowledgeGradient(model, num_fantasies=3, sampler=sampler(3)),
        2,
    ),
    "qMultiStepLookahead": (
        lambda model: qMultiStepLookahead(model, [1, 1], samplers=[sampler(2), sampler(2)]),
        1,
    ),
    "qMaxValueEntropy": (lambda model: qMaxValueEntropy(model, points(), num_mv_samples=4), 1),
    "qLowerBoundMaxValueEntropy": (
        lambda model: qLowerBoundMaxValueEntropy(
            model, points(), num_mv_samples=4, X_pending=pending()
        ),
        1,
    ),
    "botorch's qNegIntegratedPosteriorVariance": (
        lambda model: botorch_active_learning.qNegIntegratedPosteriorVariance(model, points()),
        2,
    ),
    "seqgp's qNegIntegratedPosteriorVariance": (
        lambda model: qNegIntegratedPosteriorVariance(model, points(), sampler=sampler(8)),
        2,
    ),
    # Variants that are not in the table.
    "qLogExpectedImprovement, pending": (
        lambda model: qLogExpectedImprovement(model, 1.0, sampler=sampler(), X_pending=pending()),
        2,
    ),
    "qLogNoisyExpectedImprovement, pending": (
        lambda model: qLogNoisyExpectedImprovement(
            model, baseline(), sampler=sampler(), X_pending=pending()
        ),
        2,
    ),
    "qLogNoisyExpectedImprovement, no cache": (
        lambda model: qLogNoisyExpectedImprovement(
            model, baseline(), sampler=sampler(), cache_root=False
        ),
        2,
    ),
    "qKnowledgeGradient, pending": (
        lambda model: qKnowledgeGradient(
            model, num_fantasies=3, sampler=sampler(3), X_pending=pending()
        ),
        1,
    ),
    "seqgp's qNegIntegratedPosteriorVariance, pending": (
        lambda model: qNegIntegratedPosteriorVariance(
            model, points(), sampler=sampler(8), X_pending=pending()
        ),
        1,
    ),
}
SAMPLERS = ("MaxPosteriorSampling", "draw_matheron_paths")


def entries(*kinds: str) -> list[Any]:
    """Entries of the table, and their variants, that say one of these."""
    return [
        pytest.param(name, likelihood, marks=[pytest.mark.slow] if "," in name else [])
        for name in ACQUISITIONS
        for likelihood in LIKELIHOODS
        if TABLE[name.split(",")[0], likelihood] in kinds
    ]


def make_model(likelihood: str) -> SequentialGP:
    train: Data = data(likelihood.lower())
    if likelihood == "Binomial":  # one total for all, which acquisition functions cannot pass on
        train = train._replace(likelihood=BinomialLikelihood(total_count=5), arguments={})
    return train.model()


def candidates(acquisition: AcquisitionFunction, q: int, b: int = 3) -> Tensor:
    """``b x q' x d`` points, with those of the fantasies for a one-shot acquisition function."""
    if hasattr(acquisition, "get_augmented_q_batch_size"):
        q = acquisition.get_augmented_q_batch_size(q)
    return 0.05 + 0.9 * make_inputs(b, q, 2)


# -------------------------------------------------------------------- the table


def test_the_table_is_complete() -> None:
    names = {name for name, _ in TABLE}
    assert names == {name for name in ACQUISITIONS if "," not in name} | set(SAMPLERS)
    assert {likelihood for _, likelihood in TABLE} == set(LIKELIHOODS)
    lines = render().splitlines()
    assert len(lines) == len(names) + 2
    assert "| `qMaxValueEntropy` | works | raises | raises | raises |" in lines


@plain_improvement
@pytest.mark.parametrize(("name", "likelihood"), entries(WORKS))
def test_works(name: str, likelihood: str) -> None:
    """It can be evaluated and optimised: from the best of a few random points it goes uphill."""
    make, q = ACQUISITIONS[name]
    acquisition = make(make_model(likelihood))
    X = candidates(acquisition, q, b=8)
    with torch.no_grad():
        values = acquisition(X)
    assert values.shape == (8,)
    assert values.isfinite().all()
    found, value = optimize_acqf(
        acquisition,
        bounds=torch.tensor([[0.0, 0.0], [1.0, 1.0]]),
        # One step after the other, in qMultiStepLookahead, are one large batch of points.
        q=X.shape[-2] if isinstance(acquisition, qMultiStepLookahead) else q,
        num_restarts=1,
        batch_initial_conditions=X[values.argmax()].unsqueeze(0),
        options={"maxiter": 8, "maxfun": 25},
        retry_on_optimization_warning=False,  # fantasies of discrete observations are not smooth
    )
    assert found.shape == (q, 2)
    assert ((found >= 0) & (found <= 1)).all()
    assert value > values.max()


@plain_improvement
@pytest.mark.parametrize(("name", "likelihood"), entries(WORKS, NOT_MEANINGFUL))
def test_gradients(name: str, likelihood: str) -> None:
    """Against central differences; steps of 1e-4, as the sites of fantasies converge to 1e-6."""
    make, q = ACQUISITIONS[name]
    acquisition = make(make_model(likelihood))
    X = candidates(acquisition, q, b=1).requires_grad_()
    (gradient,) = torch.autograd.grad(acquisition(X).sum(), X)
    direction = torch.randn_like(X)
    direction = direction / direction.norm()
    with torch.no_grad():
        difference = acquisition(X + 1e-4 * direction) - acquisition(X - 1e-4 * direction)
    assert gradient.abs().max() > 0
    assert_close((gradient * direction).sum(), difference.sum() / 2e-4, 2e-3)


@pytest.mark.parametrize(("name", "likelihood"), entries(RAISES))
def test_raises(name: str, likelihood: str) -> None:
    make, q = ACQUISITIONS[name]
    message = f"Observations of a {likelihood}Likelihood are not jointly Gaussian"
    with pytest.raises(UnsupportedError, match=message):
        make(make_model(likelihood))(candidates_of(q))


def candidates_of(q: int) -> Tensor:
    return make_inputs(3, q, 2)


@pytest.mark.parametrize(("name", "likelihood"), entries(NOT_MEANINGFUL))
def test_not_meaningful(name: str, likelihood: str) -> None:
    """The value hangs on the one observation that happens to be drawn; a Gaussian's does not."""
    make, q = ACQUISITIONS[name]

    def spread(likelihood: str) -> Tensor:
        acquisition, values = make(make_model(likelihood)), []
        for seed in range(8):
            acquisition.sampler = SobolQMCNormalSampler(torch.Size([1]), seed=seed)
            values.append(acquisition(candidates_of(q)))
        return torch.stack(values).std(0)

    assert (spread(likelihood) > 1e-4).all()
    assert (spread("Gaussian") < 1e-12).all()


# -------------------------------------------------------------------- the values


@plain_improvement
@pytest.mark.parametrize("name", list(ACQUISITIONS))
def test_gaussian_values_are_those_of_the_exact_model(name: str) -> None:
    make, q = ACQUISITIONS[name]
    values = []
    for model in pair():
        torch.manual_seed(0)  # max-value entropy search draws maxima
        acquisition = make(model)
        values.append(acquisition(candidates(acquisition, q)))
    assert_close(*values)


@pytest.mark.parametrize("likelihood", LIKELIHOODS)
def test_cached_root_changes_nothing(likelihood: str) -> None:
    model, number = make_model(likelihood), 4096
    values = [
        qLogNoisyExpectedImprovement(
            model, baseline(), sampler=sampler(number), cache_root=cache_root
        )(candidates_of(2))
        for cache_root in (True, False)
    ]
    # But for the samples, which are others: the improvement is of order one, the standard error
    # of its mean less than 1 / 64.
    assert_close(values[0].exp(), values[1].exp(), 1 / 64)


@pytest.mark.parametrize("likelihood", ["Bernoulli", "Poisson"])
def test_knowledge_gradient_is_an_average_over_observations(likelihood: str) -> None:
    """With the fantasies' own maximisers fixed, by hand."""
    model, number = make_model(likelihood), 8
    acquisition = qKnowledgeGradient(model, num_fantasies=number, sampler=sampler(number))
    X = make_inputs(4, 1 + number, 2)
    actual, fantasy_points = acquisition(X), acquisition.extract_candidates(X)
    assert torch.equal(fantasy_points, X[:, :1])
    Y = sampler(number)(model.posterior(X[:, :1], observation_noise=True))
    for b in range(4):
        means = [
            model.condition_on_observations(X[b, :1], Y[k, b]).posterior(X[b, 1 + k, None]).mean
            for k in range(number)
        ]
        assert_close(actual[b], torch.cat(means).mean())


# -------------------------------------------------------------------- sampling


@pytest.mark.parametrize("likelihood", LIKELIHOODS)
def test_max_posterior_sampling(likelihood: str) -> None:
    assert TABLE["MaxPosteriorSampling", likelihood] == WORKS
    model, X, number = make_model(likelihood), make_inputs(2, 2), 4000
    chosen = MaxPosteriorSampling(model, replacement=True)(X, num_samples=number)
    first = (chosen == X[0]).all(-1)
    assert (first | (chosen == X[1]).all(-1)).all()
    posterior = model.posterior(X).distribution
    contrast = np.array([1.0, -1.0])
    mean = contrast @ posterior.mean.detach().numpy()
    variance = contrast @ posterior.covariance_matrix.detach().numpy() @ contrast
    probability = ndtr(mean / variance**0.5)
    error = (probability * (1 - probability) / number) ** 0.5
    assert abs(first.double().mean().item() - probability) < 5 * error


@pytest.mark.parametrize("likelihood", LIKELIHOODS)
def test_thompson_sampling_with_paths(likelihood: str) -> None:
    """A path is a function: it can be optimised, unlike samples at given points."""
    assert TABLE["draw_matheron_paths", likelihood] == WORKS
    paths: Any = draw_matheron_paths(make_model(likelihood), torch.Size([4]))
    X = torch.full((4, 1, 2), 0.5, requires_grad=True)
    before = paths(X).squeeze(-1)
    for _ in range(50):
        (gradient,) = torch.autograd.grad(paths(X).sum(), X)
        X = (X + 0.002 * gradient).clamp(0, 1).detach().requires_grad_()
    assert (paths(X).squeeze(-1) > before).all()


@pytest.mark.filterwarnings("ignore:.*NoisyExpectedImprovement has known numerical issues")
@pytest.mark.parametrize("kind", [NoisyExpectedImprovement, LogNoisyExpectedImprovement])
def test_noisy_improvement_is_that_of_botorch(kind: Any) -> None:
    """It asks for a `SingleTaskGP` by name."""
    models, X, values = pair(fixed_noise=True), make_inputs(5, 1, 2), []
    for model in models:
        assert isinstance(model, SingleTaskGP)
        with torch.random.fork_rng():
            torch.manual_seed(0)
            values.append(kind(model, model.train_inputs[0][:6], num_fantasies=4)(X))
    assert_close(*values)

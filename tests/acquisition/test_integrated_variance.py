from __future__ import annotations

import itertools

import pytest
import torch
from botorch.acquisition import active_learning as botorch_active_learning
from botorch.acquisition.objective import ScalarizedPosteriorTransform
from botorch.models import SingleTaskGP
from botorch.optim import optimize_acqf
from botorch.sampling import SobolQMCNormalSampler
from gpytorch.likelihoods import BernoulliLikelihood
from torch import Tensor

from seqgp import SequentialGP
from seqgp.acquisition import qNegIntegratedPosteriorVariance
from tests.helpers import assert_close, make_inputs, make_kernel
from tests.models.helpers import data, pair

pytestmark = pytest.mark.usefixtures("float64")


def points(n: int = 30) -> Tensor:
    return make_inputs(n, 2)


def sampler(n: int, seed: int = 0) -> SobolQMCNormalSampler:
    return SobolQMCNormalSampler(torch.Size([n]), seed=seed)


@pytest.mark.parametrize("q", [1, 3])
def test_gaussian_value_is_that_of_botorch(q: int) -> None:
    """For one or many fantasies: the variance does not depend on what is observed."""
    X = make_inputs(4, q, 2)
    models: tuple[SequentialGP | SingleTaskGP, ...] = pair()
    expected = botorch_active_learning.qNegIntegratedPosteriorVariance(models[1], points())(X)
    for model in models:
        for number in (1, 8):
            acquisition = qNegIntegratedPosteriorVariance(model, points(), num_fantasies=number)
            assert_close(acquisition(X), expected)


def enumerated(model: SequentialGP, X: Tensor, mc_points: Tensor) -> Tensor:
    """The expectation over all labels of ``q x d`` candidates, each with its probability."""
    total = torch.zeros(())
    for labels in itertools.product([0.0, 1.0], repeat=X.shape[-2]):
        Y = torch.tensor(labels).unsqueeze(-1)
        variance = model.condition_on_observations(X, Y).posterior(mc_points).variance.mean()
        total = total - probability(model, X, Y) * variance
    return total


def probability(model: SequentialGP, X: Tensor, Y: Tensor) -> Tensor:
    """Of labels, by simulation of the latent function: a product of probits, averaged."""
    f = model.posterior(X).rsample(torch.Size([200_000]))
    return torch.special.ndtr((2 * Y - 1) * f).prod(-2).mean()


@pytest.mark.parametrize("q", [1, 2])
def test_bernoulli_value_is_an_average_over_labels(q: int) -> None:
    model, X = data("bernoulli").model(), make_inputs(3, q, 2)
    with torch.no_grad():
        expected = torch.stack([enumerated(model, x, points()) for x in X])
        # The spread over labels, .02 at most, over the root of the number of fantasies.
        acquisition = qNegIntegratedPosteriorVariance(model, points(), sampler=sampler(2048))
        assert_close(acquisition(X), expected, 5 * 0.02 / 2048**0.5)


@pytest.mark.parametrize("name", ["bernoulli", "poisson"])
def test_pending_points_are_candidates(name: str) -> None:
    model, X, pending = data(name).model(), make_inputs(3, 1, 2), make_inputs(2, 2)
    with_pending = qNegIntegratedPosteriorVariance(
        model, points(), sampler=sampler(8), X_pending=pending
    )
    joint = qNegIntegratedPosteriorVariance(model, points(), sampler=sampler(8))
    assert_close(with_pending(X), joint(torch.cat([X, pending.expand(3, 2, 2)], -2)))
    assert (with_pending(X) > joint(X)).all()


def test_points_come_in_batches() -> None:
    """``batch_shape x N x d`` points: as in BoTorch, the average is over all of them."""
    model, X, number = data("bernoulli").model(), make_inputs(4, 1, 2), 3
    sets = make_inputs(number, 10, 2)
    values = [qNegIntegratedPosteriorVariance(model, points, number)(X) for points in sets]
    joint = qNegIntegratedPosteriorVariance(model, sets, number)(X)
    assert joint.shape == (4,)
    assert_close(joint, torch.stack(values).mean(0))


def test_several_outputs() -> None:
    model, X = pair(outputs=2)[0], make_inputs(4, 2, 2)
    transform = ScalarizedPosteriorTransform(torch.tensor([1.0, 0.5]))
    actual = qNegIntegratedPosteriorVariance(model, points(), posterior_transform=transform)(X)
    expected = botorch_active_learning.qNegIntegratedPosteriorVariance(
        model, points(), posterior_transform=transform
    )(X)
    assert_close(actual, expected)
    # Without one, the mean over outputs.
    separate = [
        qNegIntegratedPosteriorVariance(model.subset_output([k]), points())(X) for k in range(2)
    ]
    assert_close(qNegIntegratedPosteriorVariance(model, points())(X), torch.stack(separate).mean(0))


def test_a_batch_of_two_is_apart() -> None:
    """What one point teaches, the other need not: the fixed-Z update would repeat itself."""
    X = make_inputs(6, 1)
    model = SequentialGP(
        X,
        (X > 0.5).to(X),
        likelihood=BernoulliLikelihood(),
        covar_module=make_kernel(0.15),
        inducing_points=X[:3],
    )
    grid = torch.linspace(0, 1, 41).unsqueeze(-1)
    torch.manual_seed(0)
    best, _ = optimize_acqf(
        qNegIntegratedPosteriorVariance(model, grid),
        bounds=torch.tensor([[0.0], [1.0]]),
        q=2,
        num_restarts=4,
        raw_samples=32,
        options={"maxiter": 20},
        retry_on_optimization_warning=False,
    )
    assert (best[0] - best[1]).abs() > 0.15


def test_learning_actively_beats_chance() -> None:
    """The variance that is left, after points that were chosen against points that were drawn."""
    grid = make_inputs(200, 2)
    model = data("bernoulli").model(covar_module=make_kernel(0.25))
    with torch.no_grad():
        values = qNegIntegratedPosteriorVariance(model, grid)(grid.unsqueeze(-2))
    order = values.argsort(descending=True)

    def left(index: Tensor) -> Tensor:
        fantasies = model.fantasize(grid[index].unsqueeze(-2), sampler(16, seed=1))
        return fantasies.posterior(grid).variance.mean()

    with torch.no_grad():
        assert left(order[:5]) < left(order[100:105]) < left(order[-5:])

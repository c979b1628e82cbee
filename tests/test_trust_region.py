"""Trust regions: how they move, and the loop that searches in them."""

from __future__ import annotations

import io

import pytest
import torch
from botorch.models import SingleTaskGP
from botorch.models.transforms import Normalize
from torch import Tensor

from seqgp.batch_optimizer import BatchOptimizer
from seqgp.trust_region import (
    TrustRegion,
    TrustRegionOptions,
    is_success,
    region_bounds,
    side_weights,
)
from tests.helpers import FEW_RESTARTS, assert_close, early_line_searches, make_inputs, unscaled

pytestmark = [pytest.mark.usefixtures("float64"), unscaled, early_line_searches]


def unit(d: int) -> Tensor:
    return torch.tensor([[0.0] * d, [1.0] * d], dtype=torch.float64)


def test_grows_shrinks_and_starts_again() -> None:
    options = TrustRegionOptions(length=0.8, min_length=0.15, max_length=1.6)
    region = TrustRegion(0.8)
    for length in (0.8, 0.8, 1.6, 1.6, 1.6, 1.6):  # the third success in a row doubles
        region = region.after(True, 4, 0, 6, options)
        assert region.length == length
    region = TrustRegion(0.8).after(True, 4, 0, 6, options).after(True, 4, 0, 6, options)
    region = region.after(False, 3, 0, 6, options)  # a failure interrupts the row
    assert (region.successes, region.failures, region.length) == (0, 3, 0.8)
    region = region.after(False, 3, 0, 6, options)  # six evaluations: as many as inputs
    assert (region.failures, region.length) == (0, 0.4)
    region = region.after(False, 6, 0, 6, options)
    assert region.length == 0.2
    region = region.after(False, 6, 42, 6, options)
    assert region == TrustRegion(0.8, start=42)


def test_success() -> None:
    one = torch.tensor(1.0)
    assert is_success(one, one + 0.01, True)
    assert not is_success(one, one + 1e-4, True)
    assert not is_success(one, one + 0.01, False)
    assert is_success(one, one - 0.01, False)
    assert is_success(None, one, True)
    assert not is_success(None, None, True)


def test_sides_are_those_of_the_lengthscales() -> None:
    bounds = torch.tensor([[0.0, 0.0, 0.0], [1.0, 10.0, 1.0]])
    X, Y = make_inputs(5, 3) * bounds[1], torch.randn(5, 1)
    for transform, expected in ((None, [1.0, 0.1, 4.0]), (Normalize(3), [1.0, 1.0, 4.0])):
        model = SingleTaskGP(X, Y, input_transform=transform)
        model.covar_module.lengthscale = torch.tensor([1.0, 1.0, 4.0])
        weights = side_weights(model, bounds)
        target = torch.tensor(expected)
        assert_close(weights, target / target.prod() ** (1 / 3), 1e-10)
        assert_close(weights.prod(), torch.tensor(1.0), 1e-10)
    region = region_bounds(torch.tensor([0.5, 5.0, 0.9]), 0.4, torch.ones(3), bounds, whole=[0])
    assert_close(region, torch.tensor([[0.0, 3.0, 0.7], [1.0, 7.0, 1.0]]), 1e-12)
    assert torch.equal(side_weights(None, bounds), torch.ones(3))
    volume = region_bounds(torch.full((3,), 0.5), 0.2, weights, unit(3))
    assert_close((volume[1] - volume[0]).prod(), torch.tensor(0.2**3), 1e-10)


def evaluate(X: Tensor) -> tuple[Tensor, Tensor]:
    """A bowl in many dimensions, with failures beyond a plane through the optimum."""
    valid = X.sum(-1) < 0.3 * X.shape[-1] + 1e-3
    return torch.where(valid, -(X - 0.3).square().sum(-1), torch.nan), valid


def test_proposals_are_in_the_region() -> None:
    loop = BatchOptimizer(unit(12), trust_region=TrustRegionOptions(length=0.1), **FEW_RESTARTS)
    X = 0.4 * make_inputs(30, 12)
    loop.tell(X, *evaluate(X))
    assert loop.best is not None
    assert loop.objective_model is not None
    proposed = loop.ask(2)
    weights = side_weights(loop.objective_model, unit(12))
    low, high = region_bounds(loop.best[0], 0.1, weights, unit(12))
    assert ((proposed >= low) & (proposed <= high)).all()
    # With levels and with a context, inputs keep their range.
    mixed = FEW_RESTARTS | {"options": {"maxiter_alternating": 2, "maxiter_continuous": 5}}
    loop = BatchOptimizer(
        unit(12), trust_region=True, discrete_dims={0: [0.0, 0.5, 1.0]}, num_initial=2, **mixed
    )
    loop.tell(X, *evaluate(X))
    proposed = loop.ask(1, context={5: 0.95})
    assert proposed[0, 5] == 0.95
    assert proposed[0, 0] in (0.0, 0.5, 1.0)


@pytest.mark.slow
def test_many_inputs_with_failures() -> None:
    """Better than the initial points, although a large part of the space fails."""
    options = FEW_RESTARTS | {"options": {"maxiter": 30}, "num_initial": 16, "refit_every": 8}
    loop = BatchOptimizer(unit(12), trust_region=TrustRegionOptions(length=0.2), **options)
    X = 0.5 * make_inputs(16, 12)
    loop.tell(X, *evaluate(X))
    assert loop.best is not None
    before = loop.best[1]
    loop.run(evaluate, 52, q=4, progress=False)
    assert loop.best is not None
    assert loop.best[1] > 0.8 * before  # both are negative


def test_nothing_valid_and_restarts() -> None:
    options = TrustRegionOptions(min_length=0.3, length=0.5, failure_tolerance=2)
    loop = BatchOptimizer(unit(12), trust_region=options, num_initial=3, **FEW_RESTARTS)
    X = make_inputs(3, 12)
    loop.tell(X, torch.full((3,), torch.nan))
    with pytest.warns(UserWarning, match="valid"):
        X = loop.ask(2)
    loop.tell(X, torch.full((2,), torch.nan))  # shrinks below the minimum: starts again
    assert loop.trust_region == TrustRegion(0.5, start=5)
    X = loop.ask(3)
    assert torch.equal(X, BatchOptimizer(unit(12)).ask(3))  # quasi-random ones
    loop.tell(X, -X.sum(-1))
    assert loop.best is not None
    region = loop.ask(1)
    assert (region - loop.best[0]).abs().max() <= 0.5 * side_weights(
        loop.objective_model, unit(12)
    ).max()


def test_resumes_bit_by_bit() -> None:
    def make() -> BatchOptimizer:
        return BatchOptimizer(unit(12), trust_region=True, num_initial=4, **FEW_RESTARTS)

    loop, other = make(), make()
    X = 0.4 * make_inputs(10, 12)
    loop.tell(X[:6], *evaluate(X[:6]))
    loop.tell(X[6:], *evaluate(X[6:]))
    file = io.BytesIO()
    torch.save(loop.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file, weights_only=True))
    assert other.trust_region == loop.trust_region
    assert torch.equal(other.ask(2), loop.ask(2))
    plain = BatchOptimizer(unit(12), num_initial=4, **FEW_RESTARTS)
    with pytest.raises(ValueError, match="saved with a trust region"):
        plain.load_state_dict(loop.state_dict())
    with pytest.raises(ValueError, match="saved without a trust region"):
        make().load_state_dict(plain.state_dict())


def test_bad_options() -> None:
    with pytest.raises(ValueError, match="expected 0 < min_length < length"):
        TrustRegionOptions(length=2.0)
    with pytest.raises(ValueError, match="failure_tolerance: expected a whole number"):
        TrustRegionOptions(failure_tolerance=0)
    with pytest.raises(ValueError, match="trust_region: expected a box"):
        BatchOptimizer(unit(2), trust_region=True, choices=make_inputs(5, 2))

"""Inducing points that follow a stream."""

from __future__ import annotations

import warnings

import pytest
import torch
from botorch.fit import fit_gpytorch_mll
from botorch.models.utils.inducing_point_allocators import GreedyVarianceReduction
from gpytorch.kernels import ConstantKernel, Kernel, MaternKernel, ScaleKernel
from torch import Tensor

from seqgp import DualELBO, SequentialGP
from seqgp.streaming import point_criterion
from seqgp.streaming.inducing_points import cluster_inducing_points, fill_up
from seqgp.streaming.point_criterion import (
    choose_inducing_points,
    explain_residuals,
    inducing_cost,
)
from tests.helpers import unscaled

pytestmark = pytest.mark.usefixtures("float64")


def kernel(constant: float = 0.0) -> Kernel:
    result = ScaleKernel(MaternKernel(nu=2.5))
    result.base_kernel.lengthscale, result.outputscale = 1.0, 1.0
    if not constant:
        return result
    offset = ConstantKernel()
    offset.constant = torch.tensor([constant])
    return offset + result


def points(low: float, high: float, n: int) -> Tensor:
    return torch.linspace(low, high, n).unsqueeze(-1)


def unexplained(Z: Tensor, X: Tensor, k: Kernel) -> Tensor:
    """Densely, the variance at ``X`` given the values at ``Z``."""
    K = k(Z).to_dense() + 1e-10 * torch.eye(len(Z))
    cross = k(Z, X).to_dense()
    return (k(X, diag=True) - (cross * torch.linalg.solve(K, cross)).sum(0)).detach()


@pytest.mark.parametrize("constant", [0.0, 500.0])
def test_what_is_explained_already_changes_nothing(constant: float) -> None:
    Z = points(0, 5, 20)
    assert choose_inducing_points(Z, points(0.1, 4.9, 50), kernel(constant), 30) is Z
    assert choose_inducing_points(Z, Z[:0], kernel(constant), 30) is Z


@pytest.mark.parametrize("constant", [0.0, 500.0])
def test_points_are_added_until_all_is_explained(constant: float) -> None:
    """Whatever all values have in common."""
    Z, X, k = points(0, 5, 10), points(5, 15, 100), kernel(constant)
    chosen = choose_inducing_points(Z, X, k, 50)
    assert torch.equal(chosen[:10], Z)
    assert 10 < len(chosen) < 50
    # Half the unexplained variance is what each site of precision 1 costs.
    assert 0.5 * unexplained(chosen, X, k).mean() <= 0.005
    assert 0.5 * unexplained(chosen[:-1], X, k).mean() > 0.005


def test_costs_are_counted_in_nats() -> None:
    """A site of precision 50 that stands for 4 observations costs 200 times as much."""
    Z, X, k = points(0, 5, 10), points(5, 15, 100), kernel()
    beta, number = torch.rand(100) * 50, 1 + 4 * torch.rand(100)
    chosen = choose_inducing_points(Z, X, k, 80, beta, number)
    cost = lambda Z: (0.5 * number * beta * unexplained(Z, X, k)).sum() / number.sum()  # noqa: E731
    assert cost(chosen) <= 0.005 + 1e-6
    assert cost(chosen[:-1]) > 0.005
    assert len(choose_inducing_points(Z, X, k, 80)) < len(chosen) < 80


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_points_from_scratch(dtype: torch.dtype) -> None:
    """Those of a pivoted Cholesky factorisation; one of inputs that are all the same."""
    X, k = points(0, 3, 40).to(dtype), kernel().to(dtype)
    chosen = choose_inducing_points(X[:0], X, k, 30)
    expected = GreedyVarianceReduction().allocate_inducing_points(X, k, len(chosen), torch.Size())
    assert torch.equal(chosen.sort(0).values, expected.sort(0).values)
    assert len(choose_inducing_points(X[:0], X[:1].expand(9, 1), k, 30)) == 1
    assert len(choose_inducing_points(X[:0], X, k, 30, torch.zeros(40))) == 1
    assert len(choose_inducing_points(X[:0], X, k, 25, tol=0.0)) <= 25


@pytest.mark.parametrize("constant", [0.0, 500.0])
def test_without_room_redundant_points_are_exchanged(constant: float) -> None:
    Z, X, k = points(0, 5, 20), points(5, 10, 100), kernel(constant)
    chosen = choose_inducing_points(Z, X, k, 20)
    kept = (chosen.unsqueeze(1) == Z).all(-1).any(-1)
    assert len(chosen) == 20
    assert 0 < kept.sum() < 20
    assert torch.logdet(k(chosen).to_dense()) > torch.logdet(k(Z).to_dense())
    for old_and_new in (points(0, 5, 100), X):
        assert unexplained(chosen, old_and_new, k).max() < 0.1
    # What has been exchanged does not come back.
    assert choose_inducing_points(chosen, X, k, 20) is chosen


def test_an_allocator_chooses_anew() -> None:
    Z, X, k = points(0, 5, 20), points(5, 10, 100), kernel()
    chosen = choose_inducing_points(Z, X, k, 20, allocator=GreedyVarianceReduction())
    union = torch.cat([Z, X])
    expected = GreedyVarianceReduction().allocate_inducing_points(union, k, 20, torch.Size())
    assert torch.equal(chosen, expected)


@unscaled
def test_filling_up() -> None:
    X = points(0, 1, 50)
    Z = torch.cat([X[:3], torch.tensor([[2.0]])])
    filled = fill_up(Z, X, 20)
    assert torch.equal(filled[:4], Z)
    assert len(torch.unique(filled, dim=0)) == 20
    assert torch.isin(filled[4:], X).all()
    assert filled[4:].max() - filled[4:].min() > 0.7  # not all from one place
    assert torch.equal(fill_up(Z, X, 20), filled)
    assert len(fill_up(Z, X, 100)) == 51  # all there are
    assert fill_up(Z, X, 4) is Z


def test_points_travel_without_loss_until_they_are_rebased() -> None:
    """There and back again: predictions are the same; with a rebase in between they are not."""
    X = torch.rand(40, 2)
    Y = torch.sin(4 * X).sum(-1, keepdim=True)
    model = SequentialGP(X, Y, inducing_points=10)
    strategy, before = model.variational_strategy, model.posterior(X).mean
    Z = strategy.inducing_points.detach().clone()
    strategy.start_from(Z[:5])
    assert (model.posterior(X).mean - before).abs().max() > 1e-3
    strategy.start_from(Z)
    torch.testing.assert_close(model.posterior(X).mean, before, atol=1e-10, rtol=0)
    strategy.start_from(Z[:5])
    strategy.rebase()
    strategy.start_from(Z)
    assert (model.posterior(X).mean - before).abs().max() > 1e-3


def brings_more(
    Z: Tensor, old: int, x: Tensor, X: Tensor, weighted: list[tuple[float, Kernel]]
) -> bool:
    """Whether a point in the place of another explains more than is lost without that."""
    rest = torch.cat([Z[:old], Z[old + 1 :]])
    lost = gained = 0.0
    for beta, k in weighted:
        without = unexplained(rest, X, k)
        lost += beta * float((without - unexplained(Z, X, k)).sum())
        gained += beta * float((without - unexplained(torch.cat([rest, x]), X, k)).sum())
    return gained > lost


def exchanged_one_by_one(Z: Tensor, X: Tensor, k: Kernel, gain: float = 2.0) -> Tensor:
    """The same rule, with everything computed densely at each exchange."""
    points, prior = Z.clone(), k(X, diag=True)
    tried = torch.ones(len(X))
    tolerated = 2 * 0.005  # which costs the tolerance in nats
    for _ in range(len(Z)):
        K = k(points).to_dense()
        inverse = torch.linalg.inv(K + 1e-8 * K.diagonal().diag())
        own = 1 / inverse.diagonal()
        cross = k(points, X).to_dense()
        left = tried * (prior - (cross * (inverse @ cross)).sum(0))
        old, new = int(own.argmin()), int(left.argmax())
        if left.max() <= max(tolerated, gain * own.min()):
            break
        if brings_more(points, old, X[new : new + 1], X, [(1.0, k)]):
            points[old] = X[new]
        else:
            tried[new] = 0
    return points


@pytest.mark.parametrize(("d", "m"), [(1, 20), (2, 60), (5, 100)])
@pytest.mark.parametrize("constant", [0.0, 500.0])
def test_exchanges_are_those_of_the_dense_rule(d: int, m: int, constant: float) -> None:
    generator = torch.Generator().manual_seed(m)
    Z = 2 * torch.rand(m, d, generator=generator)
    X = 2 * torch.rand(300, d, generator=generator) + 1
    with torch.no_grad():
        expected = exchanged_one_by_one(Z, X, kernel(constant))
        assert (expected != Z).any()
        assert torch.equal(choose_inducing_points(Z, X, kernel(constant), m), expected)


def test_what_is_known_is_not_given_up_for_less() -> None:
    """The same exchange is made, or not, by what it costs and brings, densely computed."""
    k, Z, far = kernel(), points(0, 3, 8), torch.tensor([[9.0]])
    X = torch.cat([points(0, 3, 60), far])
    (old,) = (
        ~(exchanged_one_by_one(Z, X, k).unsqueeze(0) == Z.unsqueeze(1)).all(-1).any(1)
    ).nonzero()
    rest = torch.cat([Z[: int(old)], Z[int(old) + 1 :]])
    lost = unexplained(rest, X, k) - unexplained(Z, X, k)
    gained = unexplained(rest, X, k) - unexplained(torch.cat([rest, far]), X, k)
    for factor, exchanges in ((0.99, True), (1.01, False)):
        number = torch.ones(len(X))
        number[:-1] = factor * gained.sum() / lost[:-1].sum()
        chosen = choose_inducing_points(Z, X, k, len(Z), represents=number, tol=0.0)
        assert bool((chosen == far).any()) is exchanges


def test_exchanges_in_single_precision() -> None:
    Z, X = points(0, 5, 20).float(), points(5, 10, 100).float()
    chosen = choose_inducing_points(Z, X, kernel().float(), 20)
    assert chosen.dtype is torch.float32
    for old_and_new in (points(0, 5, 100), X.double()):
        assert unexplained(chosen.double(), old_and_new, kernel()).max() < 0.2


def clusters(n: int, at: tuple[float, ...], seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    centres = torch.tensor(at).repeat_interleave(n // len(at)).unsqueeze(-1)
    return centres + 0.05 * torch.randn(len(centres), 1, generator=generator)


def clustered(
    Z: Tensor, inputs: Tensor, weights: Tensor, num_new: int, num_seen: int, number: int
) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return cluster_inducing_points(Z, inputs, weights, num_new, num_seen, number, generator)


def test_centres_are_those_of_scipy() -> None:
    """From the same start, Lloyd's iterations of SciPy."""
    from scipy.cluster.vq import kmeans2

    X = clusters(60, (0.0, 2.0, 5.0))
    ones = torch.ones(60)
    start = cluster_inducing_points(
        X[:0], X, ones, 60, 0, 7, torch.Generator().manual_seed(0), iterations=0
    )
    expected, _ = kmeans2(X.numpy(), start.numpy(), iter=5, minit="matrix")
    torch.testing.assert_close(clustered(X[:0], X, ones, 60, 0, 7), torch.as_tensor(expected))


def test_weights_count_as_repetitions() -> None:
    X = clusters(40, (0.0, 3.0))
    count = torch.arange(40) % 3 + 1
    Z = X[::8]
    once = cluster_inducing_points(Z, X, count.to(X), 0, 40, 5, torch.Generator(), iterations=5)
    assert once is Z  # nothing is new
    alone = torch.cat([X, X[:4]])
    weighted = clustered(Z, alone, torch.cat([count.to(X), torch.ones(4)]), 4, 80, 5)
    repeated = torch.cat([X.repeat_interleave(count, 0), X[:4]])
    many = clustered(Z, repeated, torch.ones(len(repeated)), 4, 80, 5)
    torch.testing.assert_close(weighted, many)


def test_places_are_shared_in_proportion() -> None:
    """Of ten points, two move to a fifth of the data; the others stand for what is gone."""
    Z, new = clusters(10, (0.0, 1.0)), clusters(100, (9.0,))
    found = clustered(Z, new, torch.ones(100), 100, 400, 10)
    assert len(found) == 10
    assert int((found > 5).sum()) == 2
    assert float(found[found < 5].min()) > -0.3
    assert float(found[found < 5].max()) < 1.3


def test_clusters_along_a_stream() -> None:
    X = torch.cat([clusters(60, (0.0, 1.0)), clusters(60, (5.0, 6.0))])
    Y = X.sin()
    model = SequentialGP(X[:0], Y[:0], inducing_points=X[:1])
    for x, y in zip(X.split(30), Y.split(30), strict=True):
        model.update(x, y, inducing="cluster", max_inducing=8, memory=20, steps=2)
    Z = model.variational_strategy.inducing_points.detach()
    assert len(Z) == 8
    for centre in (0.0, 1.0, 5.0, 6.0):
        assert (Z - centre).abs().min() < 0.1  # two standard deviations of a cluster
    assert (model.posterior(X).mean - Y).abs().max() < 0.01


def two_kernels(first: float, second: float) -> tuple[Kernel, list[Kernel]]:
    """A batch of two, and the same one by one."""
    scales = torch.tensor([first, second]).reshape(2, 1, 1), torch.tensor([0.5, 2.0])
    batch = torch.Size([2])
    both = ScaleKernel(MaternKernel(nu=2.5, batch_shape=batch), batch_shape=batch)
    both.base_kernel.lengthscale, both.outputscale = scales
    single = []
    for i in range(2):
        single.append(ScaleKernel(MaternKernel(nu=2.5)))
        single[i].base_kernel.lengthscale, single[i].outputscale = scales[0][i], scales[1][i]
    return both, single


def test_costs_of_several_kernels_add_up() -> None:
    """Against the definition, densely, at each step."""
    both, single = two_kernels(1.0, 0.3)
    X, generator = points(0, 5, 60), torch.Generator().manual_seed(0)
    beta = 5 * torch.rand(2, 60, generator=generator)
    number = 1 + torch.randint(3, (60,), generator=generator)

    def each(Z: Tensor) -> Tensor:
        left = torch.stack([unexplained(Z, X, k) for k in single])
        return (beta * left).sum(0)

    Z = points(0, 1, 3)
    expected = Z
    while 0.5 * (number * each(expected)).sum() > 0.005 * number.sum():
        expected = torch.cat([expected, X[each(expected).argmax()].unsqueeze(0)])
    torch.testing.assert_close(choose_inducing_points(Z, X, both, 99, beta, number), expected)
    cost = 0.5 * (number * each(Z)).sum() / number.sum()
    assert inducing_cost(Z, X, both, beta, number) == pytest.approx(float(cost), rel=1e-6)


@pytest.mark.parametrize("m", [20, 40])
def test_exchanges_for_several_kernels_are_those_of_the_dense_rule(m: int) -> None:
    both, single = two_kernels(1.0, 0.3)
    generator = torch.Generator().manual_seed(m)
    Z = 2 * torch.rand(m, 1, generator=generator)
    X = 2 * torch.rand(100, 1, generator=generator) + 1
    beta = torch.tensor([[3.0], [1.0]]).expand(2, 100)
    with torch.no_grad():
        expected, tried = Z.clone(), torch.ones(100)
        for _ in range(m):
            own, left = torch.zeros(m), torch.zeros(100)
            for k, share in zip(single, (0.75, 0.25), strict=True):
                K = k(expected).to_dense()
                inverse = torch.linalg.inv(K + 1e-8 * K.diagonal().diag())
                cross = k(expected, X).to_dense()
                own += share / inverse.diagonal()
                left += share * (k(X, diag=True) - (cross * (inverse @ cross)).sum(0))
            left = tried * left
            old, new = int(own.argmin()), int(left.argmax())
            if left.max() <= max(2 * 0.005 / 4, 2 * own.min()):
                break
            weighted = list(zip((3.0, 1.0), single, strict=True))
            if brings_more(expected, old, X[new : new + 1], X, weighted):
                expected[old] = X[new]
            else:
                tried[new] = 0
        assert (expected != Z).any()
        assert torch.equal(choose_inducing_points(Z, X, both, m, beta), expected)


def test_an_output_that_needs_more_inducing_points_gets_them() -> None:
    """Whichever output comes first."""
    X = points(0, 1, 120)
    Y = torch.cat([X, torch.sin(60 * X)], -1)
    numbers = []
    for columns in ([0], [1], [0, 1], [1, 0]):
        model = SequentialGP(X[::12], Y[::12, columns])
        scale = torch.tensor([5.0, 0.03])[columns]
        shape = model.covar_module.lengthscale.shape
        model.covar_module.lengthscale = scale.reshape(shape)
        model.update(X, Y[:, columns], learn=False, inducing="adapt")
        numbers.append(model.variational_strategy.inducing_points.shape[-2])
    assert numbers[0] < 10 < numbers[1]
    assert numbers[2] == numbers[3] > 0.9 * numbers[1]  # noise and scale are others


def test_too_few_inducing_points_are_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("seqgp.streaming.update", "seqgp.models.sequential_gp"):
        monkeypatch.setattr(f"{module}.DEFAULT_LIMIT", 8)
    X = torch.rand(60, 2, generator=torch.Generator().manual_seed(0))
    Y = torch.sin(20 * X).sum(-1, keepdim=True)

    def run(**options: int) -> int:
        model, found = SequentialGP(X[:10], Y[:10], **options), 0
        model.covar_module.lengthscale = 0.05
        for part in (X[:10], X[10:40], X[40:]):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                model.update(part, torch.sin(20 * part).sum(-1, keepdim=True), steps=1)
            assert all(str(warning.message).startswith("8 inducing") for warning in caught)
            assert all(warning.filename == __file__ for warning in caught)
            found += len(caught)
        return found

    assert run() == 1
    assert run(inducing_points=7) == 0  # as many as the user wants


def misfit(outputs: int, noise: float = 0.01, n: int = 80) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Inputs, inducing points, slopes of a fit, and what the points leave unexplained, densely.

    The function varies faster than the kernel says.
    """
    generator = torch.Generator().manual_seed(0)
    X, Z, k = torch.rand(n, 1, generator=generator) * 5, points(0, 5, 6), kernel()
    y = torch.sin(4 * X.mT + torch.arange(outputs).unsqueeze(-1))
    K, cross = k(X).to_dense().detach(), k(Z, X).to_dense().detach()
    Q = cross.mT @ torch.linalg.solve(k(Z).to_dense().detach(), cross)
    slope = torch.linalg.solve(Q + noise * torch.eye(n), y.mT).mT
    return X, Z, slope, K - Q


@pytest.mark.parametrize("outputs", [1, 2])
def test_points_are_added_where_residuals_ask_for_them(outputs: int) -> None:
    """Each of them is the best one; they are added until little can be gained."""
    X, Z, slope, R = misfit(outputs)
    gained, expected = [0.5 * (slope @ R * slope).sum()], list[int]()
    while gained[-1] > 0.01 * len(X):
        gains = (slope @ R).square().sum(0) / R.diagonal()
        gains[expected] = 0  # 0 / 0
        expected.append(int(gains.argmax()))
        R = R - R[:, expected[-1:]] @ R[expected[-1:]] / R[expected[-1], expected[-1]]
        gained.append(0.5 * (slope @ R * slope).sum())
    assert len(expected) > 3
    found = explain_residuals(Z, X, kernel(), slope, 100)
    torch.testing.assert_close(found, torch.cat([Z, X[expected]]))
    assert len(explain_residuals(Z, X, kernel(), slope, 8)) == 8
    assert explain_residuals(Z, X, kernel(), slope, 100, tol=1e9) is Z
    assert explain_residuals(found, X, kernel(), 0 * slope, 100) is found


def test_a_sample_stands_for_many_observations(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is left is estimated without bias, and the points explain the others as well."""
    X, Z, slope, R = misfit(1, noise=1.0, n=1200)
    whole = 0.5 * (slope @ R * slope).sum()
    estimates = []
    for first in range(4):  # of each sample, with 4 observations for each of its own
        a, own = slope[0, first::4], R[first::4, first::4]
        diagonal = own.diagonal() * a.square()
        estimates.append(0.5 * (16 * (a @ own @ a - diagonal.sum()) + 4 * diagonal.sum()))
    assert torch.stack(estimates).mean() == pytest.approx(float(whole), rel=0.05)
    monkeypatch.setattr(point_criterion, "LARGEST_SAMPLE", 300)
    found = explain_residuals(Z, X, kernel(), slope, 100)
    own = torch.linspace(0, 1199, 300).long()
    assert all(bool((z == X[own]).all(-1).any()) for z in found[len(Z) :])
    cross = kernel()(found, X).to_dense().detach()
    K = kernel()(found).to_dense().detach() + 1e-10 * torch.eye(len(found))
    left = R + kernel()(Z, X).to_dense().detach().mT @ torch.linalg.solve(
        kernel()(Z).to_dense().detach(), kernel()(Z, X).to_dense().detach()
    )
    left = left - cross.mT @ torch.linalg.solve(K, cross)
    assert 0.5 * (slope @ left * slope).sum() < 0.02 * 1200 < whole


def test_residuals_bound_what_can_be_gained() -> None:
    """The quadratic form of the evidence is convex in the covariance."""
    X, _, slope, R = misfit(1)
    noise, k = 0.01 * torch.eye(80), kernel()
    K = k(X).to_dense().detach()
    y = slope @ (K - R + noise)
    before, after = ((y @ torch.linalg.solve(C + noise, y.mT)).item() for C in (K - R, K))
    exact = torch.linalg.solve(K + noise, y.mT).mT
    assert (exact @ R @ exact.mT).item() < before - after < (slope @ R @ slope.mT).item()


def test_there_is_one_warning_if_more_points_are_needed_for_a_second_time() -> None:
    """The first time may be due to hyperparameters that have been learnt from little."""
    X = torch.rand(600, 2, generator=torch.Generator().manual_seed(0))
    Y = torch.sin(40 * X).sum(-1, keepdim=True)
    model = SequentialGP(X[:450], Y[:450])
    model.covar_module.lengthscale = 0.05
    message = "300 inducing points, the default maximum, are too few"
    for warns in (False, True, False):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model.update(X[450:500], Y[450:500], inducing="adapt", learn=False)
        assert [str(each.message).startswith(message) for each in caught] == [True] * warns


@pytest.mark.slow
def test_a_rough_function_gets_the_points_that_it_needs() -> None:
    """A random walk, for which the smooth default kernel promises too much."""
    generator = torch.Generator().manual_seed(0)
    f = torch.randn(600, 1, generator=generator).cumsum(0) * 0.1
    X, Y = points(0, 1, 600), f + 0.05 * torch.randn(600, 1, generator=generator)
    order = torch.randperm(600, generator=generator)
    train, test = order[:500], order[500:]
    stream = SequentialGP(X[train[:100]], Y[train[:100]])
    for part in train[100:].split(100):
        stream.update(X[part], Y[part])
    offline = SequentialGP(X[train], Y[train])
    fit_gpytorch_mll(DualELBO(offline.likelihood, offline))

    def nlpd(model: SequentialGP) -> float:
        transform = model.outcome_transform
        targets = (Y[test] - transform.means) / transform.stdvs
        density = model.log_predictive_density(X[test], targets.squeeze(-1))
        return -float((density - transform.stdvs.log()).mean())

    assert nlpd(stream) < nlpd(offline) + 0.02

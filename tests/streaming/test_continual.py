"""Classes that come one after the other: softmax streams, and a memory that stands for the past."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from gpytorch.kernels import Kernel, MaternKernel, ScaleKernel
from gpytorch.likelihoods import BernoulliLikelihood, PoissonLikelihood, SoftmaxLikelihood
from gpytorch.means import ZeroMean
from torch import Tensor

from seqgp import SequentialGP
from seqgp.kernel_scales import median_distance
from seqgp.likelihoods.expectations import expectations
from seqgp.likelihoods.quadrature import base_samples
from seqgp.likelihoods.softmax import softmax_bound_sites
from seqgp.models.posteriors import ObservationPosterior
from seqgp.streaming import rules
from seqgp.streaming.memory import MemoryOptions
from tests.helpers import assert_close, unscaled

EVERYTHING = MemoryOptions(capacity=None)
CLASSES = 3


def blobs(n: int = 60, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Three overlapping clouds in the plane, one class each, in random order."""
    generator = torch.Generator().manual_seed(seed)
    y = torch.arange(n) % CLASSES
    centres = torch.tensor([[0.0, 0.0], [2.0, 0.5], [0.5, 2.0]], dtype=torch.float64)
    X = centres[y] + 0.7 * torch.randn(n, 2, generator=generator, dtype=torch.float64)
    return X, y.to(X).unsqueeze(-1)


def kernel(batch: int | None = None) -> Kernel:
    shape = torch.Size([] if batch is None else [batch])
    result = ScaleKernel(MaternKernel(nu=2.5, batch_shape=shape), batch_shape=shape).double()
    result.outputscale = torch.full(shape, 3.0)
    result.base_kernel.lengthscale = torch.full((*shape, 1, 1), 1.2)
    return result


def model_of(X: Tensor, Y: Tensor, covar_module: Kernel | None = None, m: int = 15) -> SequentialGP:
    grid = torch.linspace(-1, 3, 4, dtype=torch.float64)
    Z = torch.cartesian_prod(grid, grid)[:m]
    return SequentialGP(
        X,
        Y,
        likelihood=SoftmaxLikelihood(CLASSES, CLASSES, mixing_weights=False),
        covar_module=kernel() if covar_module is None else covar_module,
        mean_module=ZeroMean(),
        inducing_points=Z,
        learn_inducing_points=False,
    )


def probabilities(model: SequentialGP, X: Tensor) -> Tensor:
    posterior = model.posterior(X, observation_noise=True)
    assert isinstance(posterior, ObservationPosterior)
    return posterior.probabilities.detach()


def by_class(X: Tensor, Y: Tensor) -> list[tuple[Tensor, Tensor]]:
    return [(X[Y[:, 0] == k], Y[Y[:, 0] == k]) for k in range(CLASSES)]


def latents(model: SequentialGP, X: Tensor) -> tuple[Tensor, Tensor]:
    f = model.eval()(X)
    return f.mean.detach(), f.variance.detach()


def test_unlimited_memory_is_batch_learning() -> None:
    """Three classes, one after the other, hyperparameters fixed: as if all came at once."""
    X, Y = blobs()
    model = model_of(X[:0], Y[:0])
    for x, y in by_class(X, Y):
        model.update(x, y, memory=EVERYTHING, learn=False)
    for got, want in zip(latents(model, X), latents(model_of(X, Y), X), strict=True):
        assert_close(got, want, 1e-6)


def test_learning_with_unlimited_memory_has_the_gradient_of_batch_learning() -> None:
    X, Y = blobs()
    stream, batch = model_of(X[:0], Y[:0]), model_of(X, Y)
    order = torch.cat([torch.nonzero(Y[:, 0] == k).squeeze(-1) for k in range(CLASSES)])
    for x, y in by_class(X, Y):
        stream.update(x, y, memory=EVERYTHING, learn=False)
    assert torch.equal(stream.stream.observations.inputs, X[order])
    gradients = []
    for model in (stream, batch):
        bound, _ = model.bound()
        bound.backward()
        gradients.append([p.grad for p in model.covar_module.parameters()])
    for got, want in zip(*gradients, strict=True):
        assert_close(got, want, 1e-5)


def test_a_class_that_nobody_had_seen() -> None:
    """It is improbable everywhere before it comes, and found afterwards, without a restart."""
    X, Y = blobs(150)
    (*old, new) = by_class(X, Y)
    memory = MemoryOptions(capacity=None, per_update=20, replay=1.0)
    model = model_of(X[:0], Y[:0])
    for x, y in old:
        model.update(x, y, memory=memory, learn=False)
    before = probabilities(model, new[0])
    model.update(*new, memory=memory, learn=False)
    after = probabilities(model, X)
    assert float(before[:, 2].mean()) < 0.2
    assert float((after.argmax(-1) == Y[:, 0]).double().mean()) > 0.85
    assert float(probabilities(model, new[0])[:, 2].mean()) > 0.7


def log_density_of_a_stream(memory: MemoryOptions) -> float:
    """Mean log density of test data after three classes, one after the other."""
    X, Y = blobs(300)
    test_X, test_Y = blobs(300, seed=1)
    model = model_of(X[:0], Y[:0])
    for x, y in by_class(X, Y):
        model.update(x, y, memory=memory, learn=False)
    return float(probabilities(model, test_X).gather(-1, test_Y.long()).log().mean())


def test_classes_are_remembered_without_a_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sites of class 0 must resist a class 2 that nobody has seen; those of a bound do."""
    nothing = MemoryOptions(policy="none")
    X, Y = blobs(300)
    whole = probabilities(model_of(X, Y), blobs(300, seed=1)[0])
    offline = float(whole.gather(-1, blobs(300, seed=1)[1].long()).log().mean())
    bounded = log_density_of_a_stream(nothing)
    monkeypatch.setattr(rules, "unseen_classes", lambda model: None)
    tangent = log_density_of_a_stream(nothing)
    assert offline - bounded < 0.5 * (offline - tangent)
    assert bounded > offline - 0.15


def test_replay_is_nearer_to_batch_learning() -> None:
    found = [
        log_density_of_a_stream(MemoryOptions(capacity=None, per_update=30, replay=replay))
        for replay in (0.0, 1.0)
    ]
    assert found[1] > found[0]


def test_what_is_folded_of_classes_to_come_is_the_bound() -> None:
    """The summary, densely: own sites for the class that there is, the bound's for the others."""
    X, Y = blobs(30)
    x, y = by_class(X, Y)[0]
    model = model_of(X[:0], Y[:0])
    model.update(x, y, memory=EVERYTHING, learn=False)
    strategy = model.variational_strategy
    K = model.covar_module(strategy.inducing_points).to_dense()
    K_zx = model.covar_module(strategy.inducing_points, x).to_dense()
    A = torch.linalg.solve(torch.linalg.cholesky(K), K_zx)
    (mean, variance), y = latents(model, x), y.squeeze(-1)
    own = expectations(model.likelihood, y, mean, variance)
    bound = softmax_bound_sites(y, mean, variance, torch.zeros_like(mean))
    beta = torch.cat([own.beta[:, :1], bound.beta[:, 1:]], -1).mT
    lam = torch.cat([(own.alpha + own.beta * mean)[:, :1], bound.lam[:, 1:]], -1).mT
    model.update(X[:0], Y[:0], memory=MemoryOptions(policy="none"), learn=False)
    assert model.classes_seen == (0,)
    summary = strategy.summary.duals
    assert_close(summary.B, A @ (beta.unsqueeze(-1) * A.mT), 1e-5)
    assert_close(summary.lam, (A @ lam.unsqueeze(-1)).squeeze(-1), 1e-5)


def test_forgetting_while_classes_are_to_come() -> None:
    """Exact for the memory; a bound can be taken out nearly, or not at all, with an error."""
    X, Y = blobs(120)
    first, second, _ = by_class(X, Y)
    known, extra = tuple(t[:35] for t in first), tuple(t[35:] for t in first)

    def learnt(policy: str, more: tuple[Tensor, Tensor]) -> tuple[SequentialGP, Tensor]:
        memory = MemoryOptions(capacity=None, policy=policy)
        model = model_of(X[:0], Y[:0])
        model.update(*known, memory=memory, learn=False)
        before = probabilities(model, X)
        model.update(*more, memory=memory, learn=False)
        return model, before

    for policy, tol in (("leverage", 1e-6), ("none", 2e-3)):  # 5e-4, of a change of 4e-2
        model, before = learnt(policy, extra)
        model.forget(*extra)
        assert_close(probabilities(model, X), before, tol)
    model, _ = learnt("none", second)
    before, seen = probabilities(model, X), model.num_seen
    with pytest.raises(ValueError, match=r"Y: .*classes are still to come"):
        model.forget(*second)
    assert torch.equal(probabilities(model, X), before)
    assert model.num_seen == seen


def test_classes_that_have_been_seen() -> None:
    X, Y = blobs(90)
    (first, second, third), none = by_class(X, Y), MemoryOptions(policy="none")
    model = model_of(*first)
    assert model.classes_seen == (0,)
    model.update(*third, memory=none, learn=False)
    assert model.classes_seen == (0, 2)
    with pytest.raises(ValueError, match="NaN"):
        model.update(torch.full_like(second[0], torch.nan), second[1], memory=none)
    assert model.classes_seen == (0, 2)
    model.update(*second, memory=none, learn=False)
    assert model.classes_seen == (0, 1, 2)
    assert rules.unseen_classes(model) is None


@pytest.mark.parametrize("replay", [0.0, 0.5, 1.0])
def test_permuted_classes_are_permuted_predictions(replay: float) -> None:
    """Up to the base samples, which are not the same for all latents."""
    X, Y = blobs()
    permutation = torch.tensor([2, 0, 1])
    memory = MemoryOptions(capacity=None, per_update=10, policy="recent", replay=replay)
    models = []
    for labels in (Y, permutation[Y.long()].to(Y)):
        model = model_of(X[:0], Y[:0])
        for x, y in zip(X.split(20), labels.split(20), strict=True):
            model.update(x, y, memory=memory, learn=False)
        models.append(probabilities(model, X))
    torch.testing.assert_close(models[1][:, permutation], models[0], atol=0.02, rtol=0)


def test_shared_kernel_is_a_kernel_a_class_with_equal_parameters() -> None:
    X, Y = blobs()
    memory = MemoryOptions(capacity=20, replay=0.5)
    shared, separate = model_of(X[:0], Y[:0]), model_of(X[:0], Y[:0], kernel(CLASSES))
    for x, y in by_class(X, Y):
        for model in (shared, separate):
            model.update(x, y, memory=memory, learn=False)
    for got, want in zip(latents(separate, X), latents(shared, X), strict=True):
        assert_close(got, want, 1e-6)


def test_a_kernel_a_class_is_learnt_for_each() -> None:
    X, Y = blobs()
    model = model_of(X[:0], Y[:0], kernel(CLASSES))
    model.update(X, Y, steps=5)
    scales = model.covar_module.outputscale.detach()
    assert scales.shape == (CLASSES,)
    assert len(scales.unique()) == CLASSES


@torch.no_grad()
def test_full_replay_is_batch_learning_of_weighted_observations() -> None:
    """The summary then does not count at all, and each kept point counts for 1/p."""
    X, Y = blobs(90)
    memory = MemoryOptions(capacity=None, per_update=10, replay=1.0)
    model = model_of(X[:0], Y[:0])
    for x, y in zip(X.split(30), Y.split(30), strict=True):
        model.update(x, y, memory=memory, learn=False)
    alone = model_of(X[:0], Y[:0])
    kept, labels = model.stream.observations.inputs, model.stream.observations.targets
    weights = model.memory_weights
    assert len(kept) == 30
    assert bool((weights >= 1).all())
    alone.variational_strategy.converge(kept, labels, tol=1e-10, weights=weights)
    for got, want in zip(latents(model, X), latents(alone, X), strict=True):
        assert_close(got, want, 1e-5)


@torch.no_grad()
def test_a_whole_weight_is_a_repetition() -> None:
    X, Y = blobs(30)
    y, count = Y[:, 0], torch.arange(30) % 3 + 1
    weighted, repeated = model_of(X[:0], Y[:0]), model_of(X[:0], Y[:0])
    info = weighted.variational_strategy.converge(X, y, weights=count.to(X))
    again = repeated.variational_strategy.converge(
        X.repeat_interleave(count, 0), y.repeat_interleave(count)
    )
    assert_close(info.elbo, again.elbo, 1e-8)
    for got, want in zip(latents(weighted, X), latents(repeated, X), strict=True):
        assert_close(got, want, 1e-5)


def test_gradients_of_a_weighted_bound() -> None:
    """Against finite differences of the converged bound, with part of the summary."""
    X, Y = blobs()
    model = model_of(X[:0], Y[:0])
    memory = MemoryOptions(capacity=15, replay=0.4)
    model.update(X, Y, memory=memory, learn=False)
    raw = model.covar_module.raw_outputscale
    bound, _ = model.bound(tol=1e-12)
    (gradient,) = torch.autograd.grad(bound, raw)
    values = []
    for step in (1e-4, -1e-4):
        with torch.no_grad():
            raw.add_(step)
            values.append(float(model.bound(tol=1e-12)[0]))
            raw.sub_(step)
    assert_close(gradient, torch.tensor((values[0] - values[1]) / 2e-4), 1e-4)


def test_full_replay_leaves_little_out_when_nothing_new_comes() -> None:
    """Half of the observations, drawn at random and counted twice, say about what all say."""
    X, Y = blobs(600)
    model, all_of_them = model_of(X[:0], Y[:0]), model_of(X, Y)
    memory = MemoryOptions(capacity=300, policy="random", replay=1.0)
    model.update(X, Y, memory=memory, learn=False)
    assert_close(model.memory_weights, torch.full((300,), 2.0), 1e-8)
    difference = (probabilities(model, X) - probabilities(all_of_them, X)).abs()
    assert float(difference.mean()) < 0.05


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (
            {"memory": MemoryOptions(replay=0.5), "mode": "paper"},
            "replay: not supported with mode=",
        ),
        ({"memory": MemoryOptions(balance=True), "inducing": "nowhere"}, "inducing: expected"),
    ],
)
def test_what_cannot_be(options: dict[str, Any], error: str) -> None:
    X, Y = blobs()
    model = model_of(X[:30], Y[:30])
    before = probabilities(model, X)
    with pytest.raises(ValueError, match=error):
        model.update(X[30:], Y[30:], **options)
    assert torch.equal(probabilities(model, X), before)
    assert model.stream.summary_share == 1


@unscaled
def test_gaussian_observations_need_no_replay() -> None:
    X, _ = blobs()
    model = SequentialGP(X[:20], X[:20, :1])
    with pytest.raises(ValueError, match="replay: not supported for Gaussian observations"):
        model.update(X[20:], X[20:, :1], memory=MemoryOptions(replay=0.5))


@unscaled
def test_counts_have_no_classes_to_balance() -> None:
    X, Y = blobs()
    model = SequentialGP(X[:20], Y[:20], likelihood=PoissonLikelihood())
    with pytest.raises(ValueError, match="balance: expected observations of one output"):
        model.update(X[20:], Y[20:], memory=MemoryOptions(capacity=5, balance=True))


@pytest.mark.parametrize("make", [BernoulliLikelihood, PoissonLikelihood])
def test_other_likelihoods_replay_too(make: Callable[[], Any]) -> None:
    X, Y = blobs()
    Y = Y.clamp_max(1)
    model = SequentialGP(X[:0], Y[:0], likelihood=make(), inducing_points=X[:10])
    for x, y in zip(X.split(20), Y.split(20), strict=True):
        model.update(x, y, memory=MemoryOptions(capacity=10, replay=0.5), steps=2)
    assert model.num_data == 10
    assert bool(model.posterior(X).mean.isfinite().all())


def test_balance_keeps_as_many_of_each_class() -> None:
    X, Y = blobs(90)
    model = model_of(X[:0], Y[:0])
    memory = MemoryOptions(capacity=0.2, balance=True, replay=1.0)
    for x, y in by_class(X, Y):
        model.update(x, y, memory=memory, learn=False)
    _, counts = model.stream.observations.targets.unique(return_counts=True)
    assert counts.tolist() == [6, 6, 6]


def test_limited_passes_are_no_warning(recwarn: pytest.WarningsRecorder) -> None:
    X, Y = blobs()
    model = model_of(X[:0], Y[:0])
    model.update(X, Y, learn=False, site_steps=3)
    assert not [w for w in recwarn if "sites have not converged" in str(w.message)]


def test_single_precision_predicts_the_same_classes() -> None:
    X, Y = blobs(150)
    test_X, _ = blobs(150, seed=1)
    found = []
    for dtype in (torch.float64, torch.float32):
        model = model_of(X[:0], Y[:0]).to(dtype)
        for x, y in by_class(X.to(dtype), Y.to(dtype)):
            memory = MemoryOptions(capacity=None, per_update=20, replay=1.0, policy="recent")
            model.update(x, y, memory=memory, learn=False, site_steps=30)
        found.append(probabilities(model, test_X.to(dtype)).double())
    assert float((found[0].argmax(-1) == found[1].argmax(-1)).double().mean()) > 0.98
    assert float((found[0] - found[1]).abs().max()) < 0.02


@pytest.mark.usefixtures("float64")
def test_nothing_is_made_on_the_default_device() -> None:
    """As `tests.test_devices`: clusters, a balanced memory that is replayed, probabilities."""
    X, Y = blobs(90)
    memory = MemoryOptions(capacity=0.2, balance=True, replay=1.0)

    def stream(model: SequentialGP) -> Tensor:
        for x, y in by_class(X, Y):
            model.update(x, y, memory, inducing="cluster", learn=False, site_steps=20)
        assert 0 < median_distance(X) < 5
        return probabilities(model, X)

    expected, model = stream(model_of(X[:0], Y[:0])), model_of(X[:0], Y[:0])
    base_samples.cache_clear()
    try:
        torch.set_default_device("meta")
        actual = stream(model)
    finally:
        torch.set_default_device(None)
        base_samples.cache_clear()
    assert actual.device == torch.device("cpu")
    assert_close(actual, expected, 1e-10)


def test_sites_take_a_step_at_least() -> None:
    X, Y = blobs()
    model = model_of(X[:20], Y[:20])
    before = probabilities(model, X)
    with pytest.raises(ValueError, match="site_steps: expected at least one, got 0"):
        model.update(X[20:], Y[20:], site_steps=0)
    assert torch.equal(probabilities(model, X), before)

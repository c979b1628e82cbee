"""Updates: what has been streamed must be as if it had been there at once."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import gpytorch
import pytest
import torch
from botorch.fit import fit_gpytorch_mll
from botorch.models import SingleTaskGP
from botorch.models.transforms import Standardize
from gpytorch.likelihoods import (
    BernoulliLikelihood,
    GaussianLikelihood,
    Likelihood,
    PoissonLikelihood,
    SoftmaxLikelihood,
)
from torch import Tensor

from seqgp import (
    BinomialLikelihood,
    DualELBO,
    OverdispersedBinomialLikelihood,
    SequentialGP,
)
from seqgp.dual.projection import coincident
from seqgp.streaming.memory import MemoryOptions
from seqgp.streaming.rules import stands_for
from seqgp.streaming.update import UpdateRecord
from seqgp.variational.bound import Past
from seqgp.variational.strategy import Arranged
from tests.helpers import (
    assert_close,
    latent,
    make_inputs,
    make_kernel,
    make_mean,
    unscaled,
)

pytestmark = pytest.mark.usefixtures("float64")

EVERYTHING, NOTHING = MemoryOptions(capacity=None), MemoryOptions(policy="none")


def gaussian() -> Likelihood:
    likelihood = GaussianLikelihood()
    likelihood.noise = 0.1
    return likelihood


CASES: dict[str, Callable[[], Likelihood]] = {
    "gaussian": gaussian,
    "bernoulli": BernoulliLikelihood,
    "poisson": PoissonLikelihood,
    "binomial": BinomialLikelihood,
    "overdispersed_binomial": OverdispersedBinomialLikelihood,
    "softmax": lambda: SoftmaxLikelihood(num_classes=3, mixing_weights=False),
}


def make_data(name: str, n: int = 30) -> tuple[Tensor, Tensor, dict[str, Any]]:
    generator = torch.Generator().manual_seed(3)
    X = torch.rand(n, 2, generator=generator)
    f = torch.sin(5 * X).sum(-1, keepdim=True)
    noise = 0.3 * torch.randn(n, 1, generator=generator)
    arguments: dict[str, Any] = {}
    if name == "gaussian":
        return X, f + noise, arguments
    if name == "bernoulli":
        return X, (f + noise > 0.5).to(X), arguments
    if name == "softmax":
        return X, (f + noise).round().clamp(0, 2), arguments
    counts = torch.poisson((f + 1.5).clamp_min(0.1), generator=generator)
    if name.endswith("binomial"):
        arguments["total_count"] = (counts.squeeze(-1) + torch.arange(n) % 4).clamp_min(1)
    return X, counts, arguments


def make_model(name: str, X: Tensor, Y: Tensor, Z: Tensor, **kwargs: Any) -> SequentialGP:
    arguments = kwargs.pop("likelihood_arguments", None)
    return SequentialGP(
        X,
        Y,
        likelihood=CASES[name](),
        covar_module=make_kernel(),
        mean_module=make_mean(),
        inducing_points=Z,
        likelihood_arguments=arguments,
        **{"outcome_transform": None, **kwargs},
    )


def stream(
    name: str, memory: MemoryOptions, sizes: list[int], order: Tensor | None = None
) -> SequentialGP:
    X, Y, arguments = make_data(name)
    if order is not None:
        X, Y, arguments = X[order], Y[order], {k: v[order] for k, v in arguments.items()}
    Z = make_data(name)[0][:8]
    empty = {key: value[:0] for key, value in arguments.items()}
    model = make_model(name, X[:0], Y[:0], Z, likelihood_arguments=empty)
    start = 0
    for size in sizes:
        part = slice(start, start + size)
        batch = {key: value[part] for key, value in arguments.items()}
        model.update(X[part], Y[part], memory=memory, learn=False, **batch)
        start += size
    return model


def represented(model: SequentialGP) -> Tensor:
    weights = stands_for(model, model.transformed(model.stream.observations))
    assert weights is not None
    return weights


def at_once(name: str) -> SequentialGP:
    X, Y, arguments = make_data(name)
    return make_model(name, X, Y, X[:8], likelihood_arguments=arguments)


def moments(model: SequentialGP) -> tuple[Tensor, Tensor]:
    X = torch.rand(5, 2, generator=torch.Generator().manual_seed(9))
    posterior = model.posterior(X)
    return posterior.mean, posterior.variance


def assert_same_posterior(a: SequentialGP, b: SequentialGP, atol: float = 1e-6) -> None:
    for left, right in zip(moments(a), moments(b), strict=True):
        torch.testing.assert_close(left, right, atol=atol, rtol=0)


# -------------------------------------------------------------------------------- equivalence


@pytest.mark.parametrize("name", CASES)
def test_a_stream_that_remembers_everything_is_batch_learning(name: str) -> None:
    streamed, batch = stream(name, EVERYTHING, [10, 1, 19]), at_once(name)
    assert_same_posterior(streamed, batch)
    bounds = []
    for model in (streamed, batch):
        bound, _ = model.bound(tol=1e-10)
        bound.backward()
        bounds.append(bound.detach())
    torch.testing.assert_close(*bounds, atol=1e-6, rtol=0)
    for left, right in zip(streamed.parameters(), batch.parameters(), strict=True):
        torch.testing.assert_close(left.grad, right.grad, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "memory", [NOTHING, MemoryOptions(capacity=5), MemoryOptions(per_update=2)]
)
def test_gaussian_stream_is_batch_learning_whatever_is_remembered(memory: MemoryOptions) -> None:
    assert_same_posterior(stream("gaussian", memory, [10, 5, 15]), at_once("gaussian"), 1e-8)


def test_order_does_not_matter_for_gaussian_observations() -> None:
    order = torch.randperm(30)
    shuffled = stream("gaussian", MemoryOptions(capacity=4), [7, 23], order)
    assert_same_posterior(shuffled, stream("gaussian", NOTHING, [30]), 1e-8)


def test_folding_leaves_the_bound_but_for_unexplained_variances() -> None:
    """The summary leaves out the trace term of Titsias' bound, as it should."""
    streamed, batch = stream("gaussian", NOTHING, [30]), at_once("gaussian")
    X = batch.stream.observations.inputs
    batch.train()
    prior = batch.forward(X).variance
    strategy = batch.variational_strategy
    K = batch.covar_module(strategy.inducing_points, X).to_dense()
    explained = torch.linalg.solve_triangular(strategy.chol, K, upper=False).square().sum(0)
    trace = (prior - explained).sum() / (2 * 0.1)
    with torch.no_grad():
        torch.testing.assert_close(streamed.bound()[0], batch.bound()[0] + trace, atol=1e-6, rtol=0)


# -------------------------------------------------------------------------------- the summary


@pytest.mark.parametrize(
    "change", ["nothing", "lengthscale", "outputscale", "mean", "noise", "all"]
)
def test_bound_of_a_summary_is_its_integral_against_the_prior(change: str) -> None:
    r"""With nothing else, :math:`\log \int p_\theta(u) t(u) du`, computed densely."""
    model = stream("gaussian", NOTHING, [30])
    X, Y, _ = make_data("gaussian")
    Z, y, kernel = X[:8], Y.squeeze(-1), model.covar_module
    with torch.no_grad():
        K = kernel(Z).to_dense()
        K = K + 1e-8 * K.diagonal().diag()
        a = torch.linalg.solve(K, kernel(Z, X).to_dense())  # m x n, under the old kernel
        residual = y - 0.3 + a.T @ torch.full((8,), 0.3)  # y - mu(x) + a^T mu(Z)
    if change in ("lengthscale", "all"):
        kernel.base_kernel.lengthscale = 0.7
    if change in ("outputscale", "all"):
        kernel.outputscale = 0.6
    if change in ("mean", "all"):
        model.mean_module.initialize(constant=-0.4)
    if change in ("noise", "all"):
        model.likelihood.noise = 0.3
    with torch.no_grad():
        K = kernel(Z).to_dense()
        K = K + 1e-8 * K.diagonal().diag()
        mean = a.T @ model.mean_module(Z)
        covariance = a.T @ K @ a + model.likelihood.noise * torch.eye(30)
        expected = torch.distributions.MultivariateNormal(mean, covariance).log_prob(residual)
        torch.testing.assert_close(model.bound()[0], expected, atol=1e-6, rtol=0)


def test_bound_of_a_summary_at_other_inducing_points_is_a_bound() -> None:
    model = stream("gaussian", NOTHING, [30])
    exact = float(model.bound()[0].detach())
    strategy = model.variational_strategy
    Z = strategy.inducing_points.detach().clone()
    strategy.inducing_points.data = torch.cat([Z[:6], Z[6:] + 0.05])
    assert float(model.bound()[0].detach()) < exact
    strategy.inducing_points.data = Z
    assert float(model.bound()[0].detach()) == pytest.approx(exact, abs=1e-8)


def test_gradients_of_the_bound_with_a_summary() -> None:
    model = stream("gaussian", MemoryOptions(capacity=6), [30])
    bound, _ = model.bound()
    bound.backward()
    for parameter in model.parameters():
        if parameter.grad is None:
            continue
        flat, gradient = parameter.data.view(-1), parameter.grad.view(-1)
        for i in range(len(flat)):
            values = []
            for step in (1e-5, -2e-5):
                flat[i] += step
                values.append(float(model.bound()[0].detach()))
            flat[i] += 1e-5
            assert float(gradient[i]) == pytest.approx((values[0] - values[1]) / 2e-5, rel=1e-5)


# -------------------------------------------------------------------------------- updates


@pytest.mark.parametrize("name", ["gaussian", "bernoulli", "softmax"])
@pytest.mark.parametrize("moved", [False, True])
def test_the_memory_stands_for_the_unexplained_variance_of_others(name: str, moved: bool) -> None:
    r""":math:`-\tfrac12 \sum_i s_i (k_{ii} - k_{iS} K_{SS}^{-1} k_{Si})`, computed densely."""
    model = stream(name, MemoryOptions(capacity=6), [20, 10])
    S = model.variational_strategy.reference_points.clone()
    model.covar_module.base_kernel.lengthscale = 0.4
    if moved:
        model.variational_strategy.inducing_points.data += 0.03
    stands_for = represented(model)[..., :4]
    assert (stands_for > 0).all()
    with torch.no_grad():
        difference = model.bound(tol=1e-10, stands_for=stands_for)[0] - model.bound(tol=1e-10)[0]
        X, kernel = model.stream.observations.inputs[:4], model.covar_module
        K = kernel(S).to_dense()
        K = K + 1e-8 * K.diagonal().diag()
        cross = kernel(S, X).to_dense()
        unexplained = kernel(X, diag=True) - (cross * torch.linalg.solve(K, cross)).sum(0)
        expected = -0.5 * (stands_for * unexplained).sum()
        if name == "gaussian":
            expected = expected / model.likelihood.noise.squeeze()
    torch.testing.assert_close(difference, expected, atol=1e-6, rtol=1e-6)


def test_gradients_with_observations_that_stand_for_others() -> None:
    """With respect to inducing points and hyperparameters, by finite differences."""
    model = stream("gaussian", MemoryOptions(capacity=6), [30])
    model.variational_strategy.inducing_points.data += 0.02
    model.variational_strategy.inducing_points.requires_grad_(True)
    stands_for = represented(model)
    model.bound(stands_for=stands_for)[0].backward()
    for parameter in (*model.parameters(), model.variational_strategy.inducing_points):
        flat, gradient = parameter.data.view(-1), parameter.grad.view(-1)
        for i in range(0, len(flat), 5):
            values = []
            for step in (1e-5, -2e-5):
                flat[i] += step
                values.append(float(model.bound(stands_for=stands_for)[0].detach()))
            flat[i] += 1e-5
            difference = (values[0] - values[1]) / 2e-5
            assert gradient[i].item() == pytest.approx(difference, rel=1e-4, abs=1e-4)


@pytest.mark.parametrize("name", ["gaussian", "bernoulli", "softmax"])
def test_common_points_of_summary_and_inducing_points_are_evaluated_once(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bound is the same as if they were different points, and so is its gradient."""
    model = stream(name, MemoryOptions(capacity=6), [20, 10])
    strategy = model.variational_strategy
    strategy.inducing_points.requires_grad_(False)
    stands_for = represented(model)[..., :4]
    results = []

    def apart(Z: Tensor, past: Past) -> Arranged:
        return Arranged(Z, past, coincident(Z, past.points), None)

    for shift in (0.05, 0.03):
        Z = strategy.reference_points[..., torch.tensor([3, 1, 0, 6, 7, 5, 4]), :].clone()
        Z[..., 2:4, :] += shift
        strategy.set_tensors({"inducing_points": Z})
        with monkeypatch.context() as patch:
            for arranged in (True, False):
                if not arranged:
                    at = strategy.setting()
                    assert (at.alone, at.kept.sum()) == (3, 5)
                    patch.setattr(strategy, "arranged", apart)
                model.zero_grad()
                bound, sites = model.bound(tol=1e-10, stands_for=stands_for)
                bound.backward()
                gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
                results.append([bound.detach(), *sites, *gradients])
    for ours, expected in zip(results[::2], results[1::2], strict=True):
        torch.testing.assert_close(ours, expected, atol=1e-7, rtol=1e-7)
    assert not torch.equal(results[0][0], results[2][0])


@pytest.mark.slow
def test_lengthscales_of_classes_are_not_learnt_too_short() -> None:
    """A sorted stream, of which a tenth is remembered, ends near what batch learning finds."""
    X = torch.rand(600, 2, generator=torch.Generator().manual_seed(1)).sort(0).values
    X = torch.stack([X[:, 0], X[torch.randperm(600), 1]], -1)
    p = torch.sigmoid(3 * torch.sin(4 * X).sum(-1, keepdim=True) - 2)
    Y = torch.bernoulli(p, generator=torch.Generator().manual_seed(2))
    Z = X[::20]
    batch = make_model("bernoulli", X, Y, Z)
    fit_gpytorch_mll(DualELBO(batch.likelihood, batch))
    streamed = make_model("bernoulli", X[:0], Y[:0], Z)
    for x, y in zip(X.split(60), Y.split(60), strict=True):
        streamed.update(x, y, memory=MemoryOptions(capacity=60))
    probabilities = [
        model.posterior(X, observation_noise=True).mean.detach() for model in (streamed, batch)
    ]
    assert (probabilities[0] - probabilities[1]).square().mean().sqrt() < 0.05
    lengths = [model.covar_module.base_kernel.lengthscale.item() for model in (streamed, batch)]
    assert lengths[0] > 0.7 * lengths[1]


@pytest.mark.slow
def test_thousands_of_updates_do_not_drift() -> None:
    """One observation at a time, all folded: rounding is all that parts it from batch learning."""
    X, Y, _ = make_data("gaussian", 1000)
    Z = X[:8]
    streamed = make_model("gaussian", X[:0], Y[:0], Z)
    for x, y in zip(X.split(1), Y.split(1), strict=True):
        streamed.update(x, y, memory=NOTHING, learn=False)
    assert streamed.num_seen == 1000
    assert_same_posterior(streamed, make_model("gaussian", X, Y, Z), 1e-10)


def test_a_stream_is_learnt_in_one_mode() -> None:
    X, Y, _ = make_data("gaussian")
    model = make_model("gaussian", X[:10], Y[:10], X[:8])
    model.update(X[10:20], Y[10:20], learn=False)
    before = moments(model)
    with pytest.raises(ValueError, match="mode: expected 'pseudo-likelihood', as in earlier"):
        model.update(X[20:], Y[20:], learn=False, mode="paper")
    for a, b in zip(before, moments(model), strict=True):
        assert torch.equal(a, b)


def test_learning_along_a_stream_finds_what_batch_learning_finds() -> None:
    X = torch.rand(300, 1)
    Y = torch.sin(12 * X) + 0.2 * torch.randn_like(X)
    batch = make_model("gaussian", X, Y, X[:20], learn_inducing_points=False)
    fit_gpytorch_mll(DualELBO(batch.likelihood, batch))
    streamed = make_model("gaussian", X[:0], Y[:0], X[:20], learn_inducing_points=False)
    memory = MemoryOptions(capacity=30, policy="leverage")
    for x, y in zip(X.split(30), Y.split(30), strict=True):
        record = streamed.update(x, y, memory=memory, learn=True, tol=0.01)
    noise, expected = streamed.likelihood.noise.item(), batch.likelihood.noise.item()
    assert noise == pytest.approx(expected, rel=0.05)
    grid = torch.linspace(0, 1, 50).unsqueeze(-1)
    difference = streamed.posterior(grid).mean - batch.posterior(grid).mean
    assert difference.abs().max() < 0.05  # a quarter of the noise's standard deviation
    assert record.num_memory == 30
    assert record.steps > 0
    assert set(record.hyperparameters) >= {"likelihood.noise_covar.noise", "mean_module.constant"}


def test_record() -> None:
    X, Y, _ = make_data("gaussian")
    model = make_model("gaussian", X[:10], Y[:10], X[:8])
    before = model.log_predictive_density(X[10:], Y[10:].squeeze(-1)).mean()
    record = model.update(X[10:], Y[10:], memory=MemoryOptions(capacity=7), learn=False)
    assert record.log_density == pytest.approx(float(before))
    assert (record.num_new, record.num_memory, record.num_inducing) == (20, 7, 8)
    assert record.memory_gained - record.memory_lost == 7 - 10
    assert record.elbo == pytest.approx(float(at_once("gaussian").bound()[0].detach()), abs=1e-6)
    assert len(model.stream.observations.targets) == 7
    assert float(model.variational_strategy.summary_count) == 23


def test_discount_fades_the_summary() -> None:
    model = stream("gaussian", NOTHING, [30])
    X, Y, _ = make_data("gaussian")
    model.update(X[:5], Y[:5], memory=NOTHING, learn=False, discount=0.0)
    only = make_model("gaussian", X[:5], Y[:5], X[:8])
    assert_same_posterior(model, only, 1e-8)


@pytest.mark.parametrize("name", ["bernoulli", "poisson", "softmax"])
def test_odd_batches(name: str) -> None:
    """One observation, none, one class only, the same point many times."""
    X, Y, _ = make_data(name)
    model = make_model(name, X[:0], Y[:0], X[:8])
    model.update(X[:1], Y[:1], steps=2)
    model.update(X[:0], Y[:0], steps=2)
    model.update(X[:5], torch.zeros(5, 1), steps=2)
    model.update(
        X[:1].expand(20, 2), Y[:1].expand(20, 1), memory=MemoryOptions(capacity=3), steps=2
    )
    assert all(moment.isfinite().all() for moment in moments(model))


# -------------------------------------------------------------------------------- when it fails


def fails(leverage: Tensor, size: int, generator: torch.Generator) -> Tensor:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda X, Y: (X.clone().fill_(torch.nan), Y), ValueError, "X: expected finite"),
        (lambda X, Y: (X, Y.squeeze(-1)), ValueError, "Y: expected shape"),
        (lambda X, Y: (X[:, :1], Y), ValueError, "X: expected shape"),
        (lambda X, Y: (X, 2 * Y - 1), ValueError, "labels must be 0 or 1"),
        (lambda X, Y: (X, Y), KeyboardInterrupt, None),
    ],
)
def test_a_failed_update_leaves_no_trace(change: Any, error: Any, message: str | None) -> None:
    X, Y, _ = make_data("bernoulli")
    model = make_model("bernoulli", X[:10], Y[:10], X[:8])
    before = {key: value.clone() for key, value in model.state_dict().items()}
    predictions = moments(model)
    memory = MemoryOptions(capacity=3, policy=fails)
    with pytest.raises(error, match=message):
        model.update(*change(X[10:], Y[10:]), memory=memory, steps=3)
    after = model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
    assert all(torch.equal(a, b) for a, b in zip(predictions, moments(model), strict=True))
    assert len(model.stream.observations.targets) == 10
    assert not model.training


def test_conditioned_and_batched_models_are_not_updated() -> None:
    X, Y, _ = make_data("gaussian")
    model = make_model("gaussian", X, Y, X[:8])
    with pytest.raises(RuntimeError, match="conditioned"):
        model.condition_on_observations(X[:1], Y[:1]).update(X[:1], Y[:1])


def test_float32() -> None:
    X, Y, _ = make_data("gaussian")
    model = stream("gaussian", MemoryOptions(capacity=5), [10, 20])
    single = make_model("gaussian", X[:0].float(), Y[:0].float(), X[:8].float())
    for part in (slice(0, 10), slice(10, 30)):
        single.update(
            X[part].float(), Y[part].float(), memory=MemoryOptions(capacity=5), learn=False
        )
    grid = torch.rand(5, 2)
    error = single.posterior(grid.float()).mean.double() - model.posterior(grid).mean
    assert error.abs().max().item() < 1e-3  # float32: jitter of 1e-5 and rounding
    assert isinstance(single.covar_module, gpytorch.kernels.Kernel)


# -------------------------------------------------------------------------------- the rest


@pytest.mark.parametrize("name", ["gaussian", "bernoulli", "poisson", "softmax"])
@pytest.mark.parametrize("memory", [EVERYTHING, NOTHING])
def test_what_is_added_can_be_forgotten(name: str, memory: MemoryOptions) -> None:
    X, Y, _ = make_data(name)
    model = make_model(name, X[:20], Y[:20], X[:8])
    model.update(X[:0], Y[:0], memory=memory, learn=False)
    before = moments(model)
    model.update(X[20:], Y[20:], memory=memory, learn=False)
    assert (moments(model)[0] - before[0]).abs().max().item() > 1e-3
    model.forget(X[20:], Y[20:])
    for left, right in zip(moments(model), before, strict=True):
        torch.testing.assert_close(left, right, atol=1e-6, rtol=0)


def test_forgetting_the_unknown_is_an_error() -> None:
    X, Y, _ = make_data("gaussian")
    model = make_model("gaussian", X[:5], Y[:5], X[:8])
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match="not part of what has been learnt"):
        model.forget(X[10:], Y[10:])
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())


def test_forgetting_what_lies_far_from_everything_is_an_error() -> None:
    """It would leave the duals as they are, and less than nothing of the squares."""
    X, Y, _ = make_data("gaussian")
    model = make_model("gaussian", X, Y, X[:8])
    model.update(X[:0], Y[:0], memory=0, learn=False)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match="not part of what has been learnt"):
        model.forget(X[:3] + 50, torch.full_like(Y[:3], 100.0))
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    model.forget(X[:3], Y[:3])
    assert model.num_seen == len(X) - 3


@pytest.mark.parametrize("learn", [True, False])
@pytest.mark.parametrize("name", ["gaussian", "bernoulli", "softmax"])
def test_an_empty_batch_beside_an_empty_memory(name: str, learn: bool) -> None:
    X, Y, _ = make_data(name)
    model = make_model(name, X[:0], Y[:0], X[:8])
    model.update(X[:0], Y[:0], learn=learn, steps=2)
    model.update(X, Y, memory=0, learn=False)
    before = moments(model)
    model.update(X[:0], Y[:0], learn=learn, steps=2)
    assert model.num_data == 0
    assert model.num_seen == len(X)
    if not learn:
        for left, right in zip(moments(model), before, strict=True):
            torch.testing.assert_close(left, right, atol=1e-6, rtol=0)


def test_new_observations_do_not_fade() -> None:
    X, Y, _ = make_data("softmax")
    models = [make_model("softmax", X[:0], Y[:0], X[:8]) for _ in range(2)]
    models[0].update(X, Y, learn=False, discount=0.9)  # there is nothing old
    models[1].update(X, Y, learn=False)
    assert_same_posterior(*models)


def test_memory_and_leverage() -> None:
    r"""For Gaussian observations and Z = X, the diagonal of :math:`K (K + \sigma^2 I)^{-1}`."""
    X, Y, _ = make_data("gaussian")
    model = make_model("gaussian", X, Y, X)
    K = model.covar_module(X).to_dense().detach()
    expected = torch.linalg.solve(K + 0.1 * torch.eye(30), K).diagonal()
    torch.testing.assert_close(model.memory.leverage, expected, atol=1e-6, rtol=0)
    torch.testing.assert_close(model.leverage(X[:4], Y[:4]), expected[:4], atol=1e-6, rtol=0)
    assert torch.equal(model.memory.inputs, X)


def test_stream_of_a_data_loader(capfd: pytest.CaptureFixture[str]) -> None:
    X, Y, _ = make_data("poisson")
    model = make_model("poisson", X[:0], Y[:0], X[:8])
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(X, Y), batch_size=10)
    seen: list[UpdateRecord] = []
    records = model.update_stream(loader, callback=seen.append, learn=False)
    assert records == seen
    assert [record.num_memory for record in records] == [10, 20, 30]
    assert capfd.readouterr().err == ""  # not a terminal: no progress bar
    assert_same_posterior(model, at_once("poisson"))


def test_inducing_points_grow_with_the_domain_and_stay_when_nothing_is_new() -> None:
    X = torch.linspace(0, 10, 200).unsqueeze(-1)
    Y = torch.sin(X)
    model = make_model("gaussian", X[:20], Y[:20], X[:20:4], learn_inducing_points=False)
    model.covar_module.base_kernel.lengthscale = 1.0
    options = {"inducing": "adapt", "max_inducing": 60, "learn": False}
    sizes = [
        model.update(X[i : i + 20], Y[i : i + 20], **options).num_inducing
        for i in range(20, 200, 20)
    ]
    assert sizes == sorted(sizes)
    assert sizes[-1] > sizes[0]
    Z = model.variational_strategy.inducing_points.clone()
    model.update(X[50:70], Y[50:70], **options)
    assert torch.equal(Z, model.variational_strategy.inducing_points)
    error = (model.posterior(X).mean - Y).abs().max()
    assert error.item() < 0.2
    limited = model.update(X[:20] + 20, Y[:20], inducing="adapt", learn=False)
    assert limited.num_inducing == len(Z)
    assert not torch.equal(Z, model.variational_strategy.inducing_points)


def test_noise_is_on_the_scale_of_the_observations() -> None:
    """Transformed with them, as the constructor does; new observations have the mean noise."""
    X = torch.rand(12, 2)
    Y = 7 * torch.sin(5 * X).sum(-1, keepdim=True)
    noise = torch.full_like(Y, 0.04)
    model = SequentialGP(X, Y, train_Yvar=noise, outcome_transform=Standardize(1))
    model.update(X + 1, Y, noise=100 * noise, learn=False)
    held = model.likelihood_arguments["noise"] * model.outcome_transform.stdvs.square().squeeze(0)
    torch.testing.assert_close(held[[0, -1]], torch.tensor([0.04, 4.0]))
    test = torch.rand(3, 2)
    noisy = model.posterior(test, observation_noise=True).variance
    torch.testing.assert_close(
        noisy - model.posterior(test).variance, torch.full((3, 1), 2.02), rtol=1e-6, atol=1e-6
    )
    with pytest.raises(ValueError, match="noise: expected the shape of Y"):
        model.update(X, Y, noise=noise[:3])


def test_totals_held_by_the_likelihood() -> None:
    """Are per-point arguments like any other; a number stands for all points."""
    X, totals = torch.rand(10, 2), 1.0 + torch.arange(10) % 3
    model = SequentialGP(X, torch.ones(10, 1), likelihood=BinomialLikelihood(totals))
    model.update(X, torch.ones(10, 1), learn=False, total_count=totals + 1)
    assert torch.equal(model.likelihood_arguments["total_count"], torch.cat([totals, totals + 1]))
    same = SequentialGP(
        X,
        torch.ones(10, 1),
        likelihood=BinomialLikelihood(),
        likelihood_arguments={"total_count": 3},  # type: ignore[dict-item]
    )
    same.forget(X[:2], torch.ones(2, 1), total_count=torch.full((2,), 3.0))
    assert same.num_data == 8
    column = SequentialGP(
        X,
        torch.ones(10, 1),
        likelihood=BinomialLikelihood(),
        likelihood_arguments={"total_count": totals.unsqueeze(-1)},  # of the shape of Y
    )
    assert torch.equal(column.likelihood_arguments["total_count"], totals)
    column.update(X[:3], torch.ones(3, 1), learn=False, total_count=torch.full((3, 1), 4.0))
    assert torch.equal(
        column.likelihood_arguments["total_count"], torch.cat([totals, torch.full((3,), 4.0)])
    )
    with pytest.raises(ValueError, match="total_count: the likelihood holds the totals of the fir"):
        model.update(X, torch.ones(10, 1))
    assert model.num_data == 20


def test_a_total_for_all_and_some_that_differ() -> None:
    """Observations without totals have that of the likelihood, whatever the others came with."""
    X, Y, totals = torch.rand(12, 2), torch.ones(12, 1), torch.full((4,), 7.0)
    model = SequentialGP(X[:4], Y[:4], likelihood=BinomialLikelihood(5))
    model.update(X[4:8], Y[4:8], learn=False, total_count=totals)
    model.update(X[8:], Y[8:], learn=False)
    expected = torch.tensor([5.0, 7.0, 5.0]).repeat_interleave(4)
    assert torch.equal(model.likelihood_arguments["total_count"], expected)
    given = SequentialGP(
        X, Y, likelihood=BinomialLikelihood(), likelihood_arguments={"total_count": expected}
    )
    given.variational_strategy.set_inducing_points(model.variational_strategy.inducing_points)
    given.refresh()
    torch.testing.assert_close(model.posterior(X).mean, given.posterior(X).mean)
    empty = SequentialGP(X[:0], Y[:0], likelihood=BinomialLikelihood(), inducing_points=X)
    empty.update(X[:4], Y[:4], learn=False, total_count=totals)
    assert torch.equal(empty.likelihood_arguments["total_count"], totals)


def test_weights_stay_with_their_observations() -> None:
    """Also when some are forgotten."""
    X = torch.rand(40, 2)
    Y = (X[:, :1] > 0.5).double()
    model = SequentialGP(X[:20], Y[:20], likelihood=BernoulliLikelihood(), inducing_points=5)
    model.update(X[20:], Y[20:], learn=False, memory=MemoryOptions(capacity=15))
    weights = {
        tuple(x.tolist()): w for x, w in zip(model.memory.inputs, model.memory_weights, strict=True)
    }
    assert (model.memory_weights >= 1).all()
    gone = model.memory.inputs[3:6]
    model.forget(gone, model.stream.observations.targets[3:6].unsqueeze(-1))
    assert len(model.memory_weights) == model.num_data == 12
    for x, weight in zip(model.memory.inputs, model.memory_weights, strict=True):
        assert weights[tuple(x.tolist())] == weight


@unscaled
def test_inducing_points_grow_to_the_number_that_was_asked_for() -> None:
    """Though the first batch had no use for as many."""
    X = torch.linspace(0, 8, 400).unsqueeze(-1)
    Y = torch.sin(2 * X)
    model = SequentialGP(X[:50], Y[:50], inducing_points=40, outcome_transform=None)
    first = model.variational_strategy.inducing_points.shape[-2]
    assert first < 20
    for x, y in zip(X[50:].split(50), Y[50:].split(50), strict=True):
        record = model.update(x, y, steps=5, memory=20)
    assert first < record.num_inducing <= 40
    assert record.num_memory == 20
    assert (model.posterior(X).mean - Y).abs().max() < 0.08


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"discount": 1.5}, ValueError, "discount: expected a number in"),
        ({"tol": float("nan")}, ValueError, "tol: expected at least zero"),
        ({"steps": -1}, ValueError, "steps: expected at least zero"),
        ({"steps": 1.5}, TypeError, "steps: expected a whole number"),
        ({"learn": "no"}, TypeError, "learn: expected True, False or None"),
        ({"max_inducing": 0}, ValueError, "max_inducing: expected at least one"),
        ({"memory": True}, TypeError, "memory: expected MemoryOptions .* got True"),
        ({"memory": 0.1}, TypeError, r"MemoryOptions\(0.1\) keeps this share"),
        ({"memory": "all"}, TypeError, r"memory: .* MemoryOptions\(None\) keeps all"),
        ({"discount": "automatic"}, TypeError, 'discount: expected a number or "auto"'),
        ({"inducing": 50}, ValueError, "inducing: .* got 50; max_inducing= is"),
    ],
)
def test_impossible_options(options: dict[str, Any], error: Any, message: str) -> None:
    model, (X, Y, _) = at_once("gaussian"), make_data("gaussian")
    before = moments(model)
    with pytest.raises(error, match=message):
        model.update(X, Y, **options)
    assert model.num_data == 30
    for a, b in zip(before, moments(model), strict=True):
        assert torch.equal(a, b)


def test_no_observations_need_no_arguments() -> None:
    """``update(X[:0], Y[:0])`` learns more from what is there, for any likelihood."""
    X, Y, arguments = make_data("binomial")
    models = [make_model("binomial", X, Y, X[:8], likelihood_arguments=arguments) for _ in "ab"]
    none = {"total_count": arguments["total_count"][:0]}
    first, second = models[0].update(X[:0], Y[:0]), models[1].update(X[:0], Y[:0], **none)
    assert first.steps == second.steps > 0
    assert first.elbo == second.elbo
    assert models[0].num_seen == len(X)


def test_a_stream_with_arguments_of_its_own() -> None:
    """Triples; without gradients, in another precision."""
    X, Y, arguments = make_data("binomial")
    totals = arguments["total_count"]
    model = make_model(
        "binomial", X[:0], Y[:0], X[:8], likelihood_arguments={"total_count": totals[:0]}
    )
    batches = [
        (X[i : i + 10].float(), Y[i : i + 10].float(), {"total_count": totals[i : i + 10]})
        for i in (0, 10, 20)
    ]
    with torch.no_grad():
        records = model.update_stream(batches, steps=2, memory=EVERYTHING, progress=False)
    assert [record.steps > 0 for record in records] == [True] * 3
    assert torch.equal(model.likelihood_arguments["total_count"], totals)
    assert model.stream.observations.inputs.dtype == torch.float64
    model.forget(X[:4].float(), Y[:4], total_count=totals[:4])
    assert model.num_seen == 26


def test_outputs_that_share_a_kernel_but_not_a_mean() -> None:
    X = make_inputs(20, 2)
    Y = torch.stack([latent(X + 0.3 * k) for k in range(2)], -1)
    mean = gpytorch.means.ConstantMean(batch_shape=torch.Size([2]))
    mean.initialize(constant=torch.tensor([0.1, 0.4]))
    noise = GaussianLikelihood(batch_shape=torch.Size([2])).initialize(noise=0.1)
    joint = SequentialGP(
        X[:8], Y[:8], None, noise, make_kernel(), mean, outcome_transform=None, inducing_points=6
    )
    options = {"memory": MemoryOptions(capacity=4, policy="recent"), "learn": False}
    for i in (8, 12, 16):
        joint.update(X[i : i + 4], Y[i : i + 4], inducing="adapt", max_inducing=6, **options)
    joint.variational_strategy.start_from(X[10:16])  # the summary stays where it was made

    def bound(model: SequentialGP) -> Tensor:
        held = model.transformed(model.stream.observations)
        return model.bound(stands_for=stands_for(model, held))[0]

    assert_close(bound(joint), torch.cat([bound(joint.subset_output([k])) for k in range(2)]))


@pytest.mark.parametrize("outputs", [1, 2])
def test_column_major_data(outputs: int) -> None:
    """As a data frame's ``to_numpy()`` has them, or a stack of columns that is transposed."""
    X = make_inputs(20, 2)
    Y = torch.stack([latent(X + 0.3 * k) for k in range(outputs)], -1)
    models = []
    for columns in (False, True):
        x, y = (each.T.contiguous().T if columns else each for each in (X, Y))
        assert x.is_contiguous() != columns
        model = SequentialGP(x[:8], y[:8], covar_module=make_kernel(), outcome_transform=None)
        stream = [(x[8:14], y[8:14]), (x[14:], y[14:])]
        model.update_stream(stream, memory=4, max_inducing=6, steps=2, progress=False)
        model.forget(x[:1], y[:1])
        models.append(model)
    test = make_inputs(5, 2)
    assert_close(*(model.posterior(test).mean for model in models))
    assert_close(*(model.posterior(test).variance for model in models))


@pytest.mark.filterwarnings("ignore:Data .outcome observations. is not standardized")
def test_without_learning_new_regions_get_inducing_points() -> None:
    """``learn=False`` keeps hyperparameters; a stream that moves on is still learnt."""
    X, points = (torch.cat([torch.rand(60, 2) / 2, 0.5 + torch.rand(60, 2) / 2]) for _ in range(2))
    Y = torch.sin(8 * X).sum(-1, keepdim=True) + 0.01 * torch.randn(120, 1)
    model = SequentialGP(X[:60], Y[:60], outcome_transform=None)
    model.likelihood.noise = 1e-4
    values = {key: value.clone() for key, value in model.hyperparameter_values().items()}
    for k in (60, 90):
        model.update(X[k : k + 30], Y[k : k + 30], learn=False)
    assert all(torch.equal(model.hyperparameter_values()[key], values[key]) for key in values)
    exact = SingleTaskGP(X, Y, outcome_transform=None)
    exact.load_state_dict({**exact.state_dict(), **values})
    # Inducing points are added until their lack costs less than .005 nats per observation.
    assert_close(model.posterior(points).mean, exact.posterior(points).mean, 0.02)


def test_without_learning_chosen_inducing_points_stay() -> None:
    X = torch.rand(60, 2)
    Y = torch.sin(4 * X).sum(-1, keepdim=True)
    model = SequentialGP(X[:30], Y[:30], inducing_points=X[:10])
    model.update(X[30:] + 1, Y[30:], learn=False)
    assert torch.equal(model.variational_strategy.inducing_points, X[:10])

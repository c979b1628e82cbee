"""`PreferenceGP` against brute-force integration, `PairwiseGP`, and itself."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from botorch.fit import fit_gpytorch_mll
from botorch.models import PairwiseGP
from botorch.models.likelihoods.pairwise import PairwiseLogitLikelihood, PairwiseProbitLikelihood
from botorch.models.pairwise_gp import PairwiseLaplaceMarginalLogLikelihood
from botorch.models.transforms import Normalize
from botorch.sampling import SobolQMCNormalSampler
from botorch.utils.containers import SliceContainer
from botorch.utils.datasets import RankingDataset
from gpytorch.kernels import ScaleKernel
from gpytorch.likelihoods import PoissonLikelihood
from torch import Tensor

import seqgp
from benchmarks.baselines.elliptical_slice import elliptical_slice
from seqgp import DualELBO, PreferenceGP
from seqgp.streaming import MemoryOptions
from tests.best_gaussian import best_gaussian
from tests.helpers import make_kernel

pytestmark = pytest.mark.usefixtures("float64")
EVERYTHING = MemoryOptions(capacity=None)
links = pytest.mark.parametrize("link", ["probit", "logit"])
LIKELIHOODS: dict[str, Any] = {
    "probit": PairwiseProbitLikelihood,
    "logit": PairwiseLogitLikelihood,
}
LOG_CDF = {
    "probit": lambda d: torch.special.log_ndtr(d / math.sqrt(2)),
    "logit": torch.nn.functional.logsigmoid,
}


def problem(n: int = 12, k: int = 30, d: int = 2) -> tuple[Tensor, Tensor]:
    """Items ``n x d``, and ``k`` comparisons of them by a noisy person."""
    torch.manual_seed(1)
    X = torch.rand(n, d)
    pairs = torch.stack([torch.randperm(n)[:2] for _ in range(k)])
    noisy = 2 * torch.sin(3 * X).sum(-1)[pairs] + torch.randn(k, 2)
    return X, torch.where(noisy[:, :1] > noisy[:, 1:], pairs, pairs.flip(-1))


def make(X: Tensor, Y: Tensor | None, link: str = "probit", **options: Any) -> PreferenceGP:
    return PreferenceGP(X, Y, LIKELIHOODS[link](), make_kernel(), **options)


# ------------------------------------------------------------------------------- the posterior


@links
def test_brute_force(link: str) -> None:
    """Three items have two differences, which a grid integrates."""
    X, Y = torch.tensor([[0.1], [0.5], [0.8]]), torch.tensor([[0, 1], [1, 2], [0, 2], [2, 1]])
    model = make(X, Y, link)
    D = torch.tensor([[1.0, -1.0, 0.0], [0.0, 1.0, -1.0]])
    K = model.covar_module(X).to_dense().detach()
    prior = torch.distributions.MultivariateNormal(torch.zeros(2), D @ K @ D.mT)
    axis = torch.linspace(-9, 9, 721)
    first, second = torch.meshgrid(axis, axis, indexing="ij")
    h = torch.stack([first, second, first + second, -second], -1)  # the four differences
    log_joint = LOG_CDF[link](h).sum(-1) + prior.log_prob(h[..., :2])
    log_evidence = log_joint.flatten().logsumexp(0) + 2 * math.log(float(axis[1] - axis[0]))
    p = (log_joint - log_joint.flatten().logsumexp(0)).exp()
    exact = (p.unsqueeze(-1) * h[..., :2]).sum((0, 1))
    exact_variance = (p.unsqueeze(-1) * (h[..., :2] - exact).square()).sum((0, 1))
    # The bound is below the evidence; how far is the nature of the Gaussian, not of the arithmetic.
    bound = float(model.refresh())
    assert log_evidence - 0.01 < bound < log_evidence
    f = model.posterior(X).distribution
    torch.testing.assert_close(D @ f.mean, exact, rtol=0, atol=0.01)
    variance = (D @ f.covariance_matrix @ D.mT).diagonal()
    torch.testing.assert_close(variance, exact_variance, rtol=0.02, atol=0)
    # Predictions of answers, by integration of the exact posterior.
    probability = (p * LOG_CDF[link](first).exp()).sum()
    torch.testing.assert_close(model.answers(X[:2]).mean.squeeze(), probability, rtol=0, atol=2e-3)


@links
def test_best_gaussian(link: str) -> None:
    """The posterior is the Gaussian that maximises the bound, found by another optimiser."""
    X, Y = torch.tensor([[0.1], [0.5], [0.8]]), torch.tensor([[0, 1], [1, 2], [0, 2], [2, 1]])
    model = make(X, Y, link)
    K = model.covar_module(X).to_dense().detach()
    C = torch.zeros(4, 3).scatter(1, Y[:, :1], 1.0).scatter(1, Y[:, 1:], -1.0)
    nodes = torch.linspace(-8, 8, 801)
    weights = (-nodes.square() / 2).exp()
    weights = (weights / weights.sum()).unsqueeze(-1)

    def expected_log_prob(mean: Tensor, root: Tensor) -> Tensor:
        h, s = C @ mean, (C @ root).norm(dim=-1)
        return (weights * LOG_CDF[link](h + s * nodes.unsqueeze(-1))).sum()

    mean, covariance, bound = best_gaussian(K, expected_log_prob)
    f = model.posterior(X).distribution
    # Quadrature of 20 nodes in the model, of 801 here: as close as the former is.
    torch.testing.assert_close(f.mean, mean, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(f.covariance_matrix, covariance, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(model.refresh(), bound, rtol=1e-6, atol=1e-6)


@links
def test_mcmc(link: str) -> None:
    """More items than can be integrated: 24 comparisons of 8, by elliptical slice sampling."""
    X, Y = problem(n=8, k=24)
    model = make(X, Y, link)
    L = torch.linalg.cholesky(model.covar_module(X).to_dense().detach() + 1e-9 * torch.eye(8))

    def log_likelihood(z: Tensor) -> Tensor:
        f = z @ L.mT
        return LOG_CDF[link](f[..., Y[:, 0]] - f[..., Y[:, 1]]).sum(-1)

    chains, generator = 100, torch.Generator().manual_seed(0)
    z = elliptical_slice(log_likelihood, torch.zeros(chains, 8), 150, 50, generator)
    f = z @ L.mT
    f = f - f.mean(-1, keepdim=True)  # comparisons say little about the level
    of_chains, samples = f.mean(0), f.flatten(0, 1)
    error = of_chains.std(0) / math.sqrt(chains)
    posterior = model.posterior(X).distribution
    centre = torch.eye(8) - 1 / 8
    mean = centre @ posterior.mean
    variance = (centre @ posterior.covariance_matrix @ centre).diagonal()
    # Four standard errors, which are .005 to .01, and what the best Gaussian may be off.
    assert bool(((mean - of_chains.mean(0)).abs() < 4 * error + 0.02).all())
    torch.testing.assert_close(variance, samples.var(0), rtol=0.1, atol=0)
    duels = torch.tensor([[0, 1], [2, 3], [4, 5], [6, 7]])
    p = LOG_CDF[link](f[..., duels[:, 0]] - f[..., duels[:, 1]]).exp().mean(0)
    error = p.std(0) / math.sqrt(chains)
    answers = model.answers(X).mean.squeeze(-1)
    assert bool(((answers - p.mean(0)).abs() < 4 * error + 2e-3).all())


@links
def test_pairwise_gp_where_laplace_is_exact(link: str) -> None:
    """With a tight prior posteriors are Gaussian, and both approximations agree."""
    X, Y = problem()
    test = torch.rand(5, 2)
    differences = []
    for outputscale in (0.04, 0.01):
        kernel = make_kernel(outputscale=outputscale)
        theirs = PairwiseGP(X, Y, LIKELIHOODS[link](), kernel, jitter=1e-10)
        ours = PreferenceGP(X, Y, LIKELIHOODS[link](), kernel)
        with torch.no_grad():
            a, b = theirs.posterior(test), ours.posterior(test)
        scale = a.mean.abs().max()
        differences.append(float((a.mean - b.mean).abs().max() / scale))
        torch.testing.assert_close(a.variance, b.variance, rtol=3 * outputscale**2, atol=0)
    # They differ by third derivatives of the likelihood, which the prior's variance multiplies.
    assert differences[0] < 0.02
    assert differences[1] < differences[0] / 3


@links
def test_symmetries(link: str) -> None:
    X, Y = problem()
    test = torch.rand(6, 2)
    model = make(X, Y, link)
    mean = model.posterior(test).mean
    # The other way round, a question has the other answer.
    total = model.answers(test).mean + model.answers(test[[1, 0, 3, 2, 5, 4]]).mean
    torch.testing.assert_close(total, torch.ones(3, 1), rtol=1e-12, atol=1e-12)
    # Items may be numbered in any way, comparisons come in any order.
    order, rows = torch.randperm(12), torch.randperm(30)
    other = make(X[order], order.argsort()[Y][rows], link)
    torch.testing.assert_close(other.posterior(test).mean, mean, rtol=1e-6, atol=1e-7)
    # A person of opposite taste has the opposite utility.
    opposite = make(X, Y.flip(-1), link)
    torch.testing.assert_close(opposite.posterior(test).mean, -mean, rtol=1e-6, atol=1e-7)


def test_transitivity() -> None:
    X = torch.tensor([[0.0], [0.5], [1.0]])
    model = make(X, torch.tensor([[0, 1], [1, 2]]))
    mean = model.posterior(X).mean.squeeze(-1)
    assert mean[0] > mean[1] > mean[2]
    assert model.answers(X[[0, 2]]).mean > model.answers(X[[0, 1]]).mean > 0.5


def test_answers_are_those_of_samples() -> None:
    """Jointly: the mean of products, from the bivariate normal by samples of utilities."""
    X, Y = problem()
    model = make(X, Y)
    test = torch.rand(4, 2)
    f = model.posterior(test).rsample(torch.Size([200_000])).squeeze(-1)
    p = torch.special.ndtr((f[:, ::2] - f[:, 1::2]) / math.sqrt(2))
    answers = model.answers(test)
    torch.testing.assert_close(answers.mean.squeeze(-1), p.mean(0), rtol=0, atol=5e-3)
    y = answers.rsample(torch.Size([200_000])).squeeze(-1)
    torch.testing.assert_close(y.prod(-1).mean(), p.prod(-1).mean(), rtol=0, atol=5e-3)
    density = model.log_predictive_density(test, torch.tensor([[0, 1], [3, 2]]))
    mean = answers.mean.squeeze(-1)
    expected = torch.stack([mean[0], 1 - mean[1]]).log()
    torch.testing.assert_close(density, expected, rtol=1e-8, atol=1e-8)


# ------------------------------------------------------------------------------- streams


@links
def test_a_stream_is_batch_learning(link: str) -> None:
    X, Y = problem()
    options: dict[str, Any] = {"inducing_points": X}
    whole = make(X, Y, link, **options)
    model = make(X[:4], torch.tensor([[0, 1]]), link, **options)
    model.forget(X[:4], torch.tensor([[0, 1]]))
    for part in Y.split(8):
        model.update(X, part, memory=EVERYTHING, learn=False)
    test = torch.rand(5, 2)
    torch.testing.assert_close(
        model.posterior(test).mean, whole.posterior(test).mean, rtol=1e-6, atol=1e-7
    )
    assert model.num_seen == 30


def test_conditioning_is_updating() -> None:
    X, Y = problem()
    new = torch.rand(3, 2)
    answers = torch.tensor([[0, 1], [2, 1]])
    model = make(X, Y)
    conditioned = model.condition_on_observations(new, answers, tol=1e-10)
    both = make(torch.cat([X, new]), torch.cat([Y, answers + 12]))
    test = torch.rand(5, 2)
    a, b = conditioned.posterior(test), both.posterior(test)
    # The sites of the past stay as they are, when a model is conditioned.
    torch.testing.assert_close(a.mean, b.mean, rtol=0, atol=0.02)
    torch.testing.assert_close(a.variance, b.variance, rtol=0.01, atol=0)
    assert type(conditioned) is PreferenceGP


def test_fantasies_are_possible_answers() -> None:
    X, Y = problem()
    model = make(X, Y)
    duels, test = torch.rand(3, 2, 2), torch.rand(5, 2)
    fantasies = model.fantasize(duels, SobolQMCNormalSampler(torch.Size([256]), seed=0))
    assert fantasies.batch_shape == (256, 3)
    means = fantasies.posterior(test).mean
    for i, duel in enumerate(duels):
        won, lost = (
            model.condition_on_observations(duel, torch.tensor([pair])).posterior(test).mean
            for pair in ([0, 1], [1, 0])
        )
        is_won = (means[:, i] - won).abs().amax((-2, -1)) < 1e-6
        is_lost = (means[:, i] - lost).abs().amax((-2, -1)) < 1e-6
        assert bool((is_won ^ is_lost).all())
        probability = float(model.answers(duel).mean.detach())
        assert abs(float(is_won.double().mean()) - probability) < 0.02
    several = model.fantasize(torch.rand(6, 2), SobolQMCNormalSampler(torch.Size([4])))
    assert several.posterior(test).mean.shape == (4, 5, 1)


def test_forget_discount_and_leverage() -> None:
    X, Y = problem()
    test = torch.rand(5, 2)
    model = make(X, Y, inducing_points=X)
    model.forget(X, Y[:3])
    other = make(X, Y[3:], inducing_points=X)
    torch.testing.assert_close(
        model.posterior(test).mean, other.posterior(test).mean, rtol=1e-6, atol=1e-7
    )
    before = model.posterior(test).variance
    model.update(X[:0], Y[:0], discount=0.5, learn=False)
    assert bool((model.posterior(test).variance > before).all())
    torch.testing.assert_close(other.leverage(X, Y[3:]), other.memory.leverage)
    record = other.update(X, Y[:3], memory=5, learn=False)
    assert record.num_memory == 5
    assert other.num_seen == 30


@links
def test_checkpoints(link: str, tmp_path: Path) -> None:
    X, Y = problem()
    model = PreferenceGP(X, Y, LIKELIHOODS[link](), input_transform=Normalize(2))
    model.update(X, Y[:4], memory=10, steps=2)
    path = tmp_path / "model.pt"
    seqgp.save(model, path)
    again = seqgp.load(path)
    assert type(again) is PreferenceGP
    test = torch.rand(4, 2)
    assert torch.equal(again.posterior(test).mean, model.posterior(test).mean)
    records = [each.update(X, Y[:2], steps=2) for each in (model, again)]
    assert records[0].elbo == records[1].elbo


def test_merge() -> None:
    X, Y = problem()
    parts = [make(X, Y[:15], inducing_points=X), make(X, Y[15:], inducing_points=X)]
    merged = seqgp.merge(parts, memory=EVERYTHING)
    assert isinstance(merged, PreferenceGP)
    test = torch.rand(4, 2)
    expected = make(X, Y, inducing_points=X).posterior(test).mean
    torch.testing.assert_close(merged.posterior(test).mean, expected, rtol=1e-6, atol=1e-7)


# ------------------------------------------------------------------------------- as PairwiseGP


def test_swapping_the_class() -> None:
    X, Y = problem()
    theirs, ours, same = PairwiseGP(X, Y), PreferenceGP(X, Y), PreferenceGP(X, Y, xtol=1e-6)
    fit_gpytorch_mll(PairwiseLaplaceMarginalLogLikelihood(theirs.likelihood, theirs))
    fit_gpytorch_mll(DualELBO(ours.likelihood, ours))
    fit_gpytorch_mll(PairwiseLaplaceMarginalLogLikelihood(same.likelihood, same))
    test = torch.rand(20, 2)
    assert torch.equal(ours.posterior(test).mean, same.posterior(test).mean)
    utilities = torch.cat([theirs.posterior(test).mean, ours.posterior(test).mean], -1)
    assert torch.corrcoef(utilities.mT)[0, 1] > 0.99
    keys = same.load_state_dict(theirs.state_dict())
    assert not keys.missing_keys
    assert not keys.unexpected_keys
    a, b = (model.covar_module.base_kernel.lengthscale for model in (theirs, same))
    assert torch.equal(a, b)
    assert set(map(tuple, ours.datapoints.tolist())) == set(map(tuple, X.tolist()))
    assert torch.equal(ours.datapoints[ours.comparisons], X[Y])
    assert torch.equal(ours.train_targets, ours.comparisons)
    assert torch.equal(ours.train_inputs[0], ours.datapoints)
    noisy = ours.posterior(test, observation_noise=True)
    assert torch.equal(noisy.mean, ours.posterior(test).mean)


def test_a_training_loop() -> None:
    """Of one's own, as the documentation has it, ends where the fit does."""
    X, Y = problem()
    fitted, model = PreferenceGP(X, Y), PreferenceGP(X, Y)
    fit_gpytorch_mll(DualELBO(fitted.likelihood, fitted))
    mll = DualELBO(model.likelihood, model)
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.Adam(parameters, lr=0.05)
    for _ in range(200):
        optimizer.zero_grad()
        loss = -mll.with_priors(model.bound()[0], 1)
        loss.backward()
        optimizer.step()
    expected = -DualELBO(fitted.likelihood, fitted).with_priors(fitted.bound()[0], 1)
    assert abs(float(loss.detach() - expected.detach())) < 1e-3
    test = torch.rand(5, 2)
    # The maximum is flat: nearly equal losses have posteriors that differ by more.
    torch.testing.assert_close(
        model.posterior(test).mean, fitted.posterior(test).mean, rtol=0.02, atol=0.02
    )


@pytest.mark.parametrize("kind", [DualELBO, PairwiseLaplaceMarginalLogLikelihood])
def test_a_training_loop_that_passes_utilities(kind: Any) -> None:
    """Comparisons are not observations of them. With two items, shapes would even broadcast."""
    model = PreferenceGP(torch.rand(2, 2), torch.tensor([[0, 1], [1, 0], [0, 1]]))
    mll = kind(model.likelihood, model)
    with pytest.raises(RuntimeError, match=r"sums or differences.*fit_gpytorch_mll, .*bound\(\)"):
        mll(model.train()(*model.train_inputs), model.train_targets)


def test_fit_to_easy_comparisons() -> None:
    """Of which the likelihood of large outputscales is largest: they end within their prior."""
    torch.manual_seed(0)
    X = torch.rand(40, 1)
    pairs = torch.arange(40).reshape(20, 2)
    better = X[pairs[:, :1], 0] > X[pairs[:, 1:], 0]
    model = PreferenceGP(X, torch.where(better, pairs, pairs.flip(-1)))
    fit_gpytorch_mll(DualELBO(model.likelihood, model))
    assert 50 < float(model.covar_module.outputscale.detach()) <= 100


def test_construct_inputs() -> None:
    X, Y = problem()
    data = RankingDataset(
        X=SliceContainer(values=X, indices=Y, event_shape=torch.Size([4])),
        Y=torch.tensor([[0, 1]]).expand(30, 2),
        feature_names=["a", "b"],
        outcome_names=["utility"],
    )
    theirs, ours = PairwiseGP.construct_inputs(data), PreferenceGP.construct_inputs(data)
    assert all(torch.equal(theirs[key], ours[key]) for key in theirs)
    assert PreferenceGP(**ours).num_data == 30


def test_prior_and_new_data() -> None:
    X, Y = problem()
    model = make(X, None)
    assert not bool(model.posterior(X).mean.any())
    model.set_train_data(X, Y)
    test = torch.rand(4, 2)
    torch.testing.assert_close(
        model.posterior(test).mean, make(X, Y).posterior(test).mean, rtol=1e-6, atol=1e-6
    )


def test_input_transform_learns_from_items_once() -> None:
    X, Y = problem()
    scaled, raw = make(10 * X, Y, input_transform=Normalize(2)), make(X, Y)
    span = Normalize(2, bounds=torch.stack([X.amin(0), X.amax(0)]))
    expected = make(span(X), Y)
    torch.testing.assert_close(
        scaled.posterior(10 * X).mean, expected.posterior(span(X)).mean, rtol=1e-6, atol=1e-8
    )
    assert not torch.allclose(raw.posterior(X).mean, scaled.posterior(10 * X).mean)


def test_batches_and_single_precision() -> None:
    X, Y = problem()
    batch = PreferenceGP(
        torch.stack([X, X.flip(0)]), torch.stack([Y, 11 - Y]), covar_module=make_kernel()
    )
    single = make(X, Y)
    test = torch.rand(4, 2)
    means = batch.posterior(test).mean
    for mean in means:
        torch.testing.assert_close(mean, single.posterior(test).mean, rtol=1e-6, atol=1e-7)
    half = PreferenceGP(X.float(), Y, covar_module=make_kernel())
    mean = half.posterior(test.float()).mean
    assert mean.dtype == torch.float32
    torch.testing.assert_close(mean.double(), single.posterior(test).mean, rtol=0, atol=2e-3)


@pytest.mark.parametrize(
    ("Y", "message"),
    [
        (torch.tensor([[0, 12]]), "indices of 12 items, from 0 to 11, got 12"),
        (torch.tensor([[-1, 3]]), "from 0 to 11, got -1"),
        (torch.tensor([[3, 3]]), "an item cannot be compared with itself, got item 3"),
        (torch.tensor([[0, 1, 2]]), "expected shape ... x k x 2"),
        (torch.tensor([[0.0, torch.nan]]), "expected finite numbers"),
        (torch.tensor([[0.5, 1.0]]), "whole numbers"),
    ],
)
def test_bad_comparisons(Y: Tensor, message: str) -> None:
    X, good = problem()
    with pytest.raises(ValueError, match=f"comparisons: .*{message}"):
        PreferenceGP(X, Y)
    model = make(X, good)
    before = model.posterior(X).mean
    for method in (model.update, model.condition_on_observations, model.forget, model.leverage):
        with pytest.raises(ValueError, match=f"Y: .*{message}"):
            method(X, Y)
    assert torch.equal(model.posterior(X).mean, before)
    assert model.num_seen == 30


def test_items_that_nobody_compares_are_checked_too() -> None:
    X, Y = problem()
    model = make(X, Y)
    bad = torch.cat([X, torch.full_like(X[:1], torch.nan)])
    before = model.posterior(X).mean
    for method in (model.update, model.condition_on_observations, model.forget, model.leverage):
        with pytest.raises(ValueError, match="X: expected finite numbers"):
            method(bad, Y[:2])
    assert torch.equal(model.posterior(X).mean, before)


def test_bad_arguments() -> None:
    X, Y = problem()
    with pytest.raises(ValueError, match="datapoints: expected items, got None"):
        PreferenceGP(None, None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="datapoints: expected finite numbers"):
        PreferenceGP(torch.full_like(X, torch.nan), Y)
    with pytest.raises(TypeError, match="likelihood: expected BoTorch's Pairwise"):
        PreferenceGP(X, Y, PoissonLikelihood())
    model = make(X, Y)
    with pytest.raises(AttributeError, match="use set_train_data"):
        model.train_targets = Y
    with pytest.raises(AttributeError, match="use set_train_data"):
        model.train_inputs = (X,)
    with pytest.raises(TypeError, match="jiter: not an argument"):
        PreferenceGP(X, Y, jiter=1e-6)
    with pytest.raises(ValueError, match="X: expected pairs of items"):
        model.answers(X[:3])
    with pytest.raises(ValueError, match="noise: comparisons have no noise"):
        model.update(X, Y, noise=torch.ones(30, 1))
    assert isinstance(model.covar_module, ScaleKernel)

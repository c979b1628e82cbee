"""Correlated outputs against BoTorch's multi-task models, and against brute-force integration."""

import copy
import itertools
import pickle

import numpy as np
import pytest
import torch
from botorch.acquisition import qKnowledgeGradient
from botorch.acquisition.logei import qLogExpectedImprovement
from botorch.acquisition.objective import GenericMCObjective
from botorch.fit import fit_gpytorch_mll
from botorch.models import KroneckerMultiTaskGP, MultiTaskGP
from botorch.models.transforms import Normalize
from botorch.sampling import SobolQMCNormalSampler
from botorch.utils.datasets import SupervisedDataset
from gpytorch.distributions import MultivariateNormal
from gpytorch.kernels import MaternKernel, RBFKernel
from gpytorch.likelihoods import (
    BernoulliLikelihood,
    GaussianLikelihood,
    PoissonLikelihood,
    SoftmaxLikelihood,
)
from gpytorch.mlls import ExactMarginalLogLikelihood
from gpytorch.priors import NormalPrior
from hypothesis import example, given, settings
from hypothesis import strategies as st

import seqgp
from benchmarks import outputs
from seqgp import HeteroscedasticGaussianLikelihood, SequentialGP, SequentialMultiTaskGP
from seqgp.acquisition import fantasy_outcome
from seqgp.likelihoods import (
    GaussianTaskLikelihood,
    TaskLikelihood,
    expectations,
    log_predictive,
)
from seqgp.models.posteriors import ObservationPosterior
from seqgp.models.tasks import LoadingKernel, shared_and_own
from tests.reliability.interrupts import Interrupts, is_same, snapshot


def _data(n=24, tasks=(0, 1, 2), seed=0):
    generator = torch.Generator().manual_seed(seed)
    X = torch.rand(n, 3, dtype=torch.double, generator=generator)
    X[:, 1] = torch.tensor(tasks, dtype=torch.double).repeat(n)[:n]
    Y = torch.sin(5 * X[:, :1] + X[:, 2:]) * (1 + 0.2 * X[:, 1:2])
    return X, Y + 0.1 * torch.randn(Y.shape, generator=generator, dtype=torch.double)


def _same_hyperparameters(model, exact):
    (data, tasks), (own, own_tasks) = exact.covar_module.kernels, model.covar_module.kernels
    noise = torch.tensor([0.05, 0.1, 0.2], dtype=torch.double)
    with torch.no_grad():
        for kernel in (data, own):
            kernel.lengthscale = torch.tensor([0.4, 0.7], dtype=torch.double)
        own_tasks.raw_var.copy_(tasks.raw_var)
        own_tasks.raw_covar_factor.copy_(tasks.raw_covar_factor)
        exact.likelihood.noise = noise
        for i, likelihood in enumerate(model.likelihood.likelihoods):
            likelihood.noise = noise[i]
            exact.mean_module.base_means[i].constant.fill_(0.1 * i)
            model.mean_module.means.base_means[i].constant.fill_(0.1 * i)
    exact.eval()


def _assert_same(first, second, tol=1e-6):
    torch.testing.assert_close(first.mean, second.mean, atol=tol, rtol=tol)
    covariances = (p.distribution.covariance_matrix for p in (first, second))
    torch.testing.assert_close(*covariances, atol=tol, rtol=tol)


def test_posterior_is_that_of_multi_task_gp():
    X, Y = _data()
    torch.manual_seed(0)
    exact = MultiTaskGP(X, Y, 1, outcome_transform=None)
    model = SequentialMultiTaskGP(X, Y, 1, outcome_transform=None)
    _same_hyperparameters(model, exact)
    T = torch.rand(2, 4, 2, dtype=torch.double)
    _assert_same(model.posterior(T), exact.posterior(T))
    _assert_same(model.posterior(T, output_indices=[2, 0]), exact.posterior(T, [2, 0]))
    _assert_same(model.posterior(X[:5]), exact.posterior(X[:5]))
    noise = torch.tensor([0.05, 0.1, 0.2], dtype=torch.double)
    added = model.posterior(T, observation_noise=True).variance - model.posterior(T).variance
    torch.testing.assert_close(added, noise.expand_as(added))
    # Conditioning on another observation of one task.
    more = exact.condition_on_observations(X[:1], Y[:1] + 1)
    known = model.condition_on_observations(X[:1], Y[:1] + 1)
    _assert_same(known.posterior(T), more.posterior(T))


@pytest.mark.parametrize("exactly", [True, False])
def test_evidence_is_that_of_multi_task_gp(exactly):
    X, Y = _data()
    torch.manual_seed(0)
    exact = MultiTaskGP(X, Y, 1, outcome_transform=None)
    model = SequentialMultiTaskGP(X, Y, 1, outcome_transform=None)
    _same_hyperparameters(model, exact)
    f = exact.train()(*exact.train_inputs)
    expected = exact.likelihood(f, exact.train_inputs).log_prob(exact.train_targets)
    value, _ = model.bound(exact=exactly)
    torch.testing.assert_close(value, expected, atol=1e-6, rtol=1e-6)
    theirs = torch.autograd.grad(
        expected, [exact.covar_module.kernels[0].raw_lengthscale, exact.likelihood.raw_noise]
    )
    each = [likelihood.raw_noise for likelihood in model.likelihood.likelihoods]
    ours, *noise = torch.autograd.grad(
        value, [model.covar_module.kernels[0].raw_lengthscale, *each]
    )
    torch.testing.assert_close(ours, theirs[0], atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(torch.cat(noise), theirs[1], atol=1e-6, rtol=1e-6)


def test_posterior_is_that_of_kronecker_multi_task_gp():
    generator = torch.Generator().manual_seed(1)
    X = torch.rand(8, 2, dtype=torch.double, generator=generator)
    Y = torch.cat([X.sum(-1, keepdim=True).sin(), X[:, :1].cos()], -1)
    torch.manual_seed(0)
    exact = KroneckerMultiTaskGP(X, Y, outcome_transform=None)
    model = SequentialMultiTaskGP(X, Y, None, outcome_transform=None)
    with torch.no_grad():
        data, tasks = exact.covar_module.data_covar_module, exact.covar_module.task_covar_module
        exact.covar_module.task_covar_module.covar_factor.copy_(
            torch.tensor([[1.0], [0.6]])[:, :1].expand_as(tasks.covar_factor)
        )
        tasks.var = torch.tensor([0.2, 0.3], dtype=torch.double)
        exact.likelihood.noise = 0.01
        exact.likelihood.task_noises = torch.tensor([0.05, 0.1], dtype=torch.double)
        own_data, own_tasks = model.covar_module.kernels
        own_data.lengthscale = data.lengthscale.detach()
        own_tasks.unit_scale_for_target = False
        own_tasks.covar_factor = tasks.covar_factor.detach()
        own_tasks.var = tasks.var.detach()
        for i, likelihood in enumerate(model.likelihood.likelihoods):
            likelihood.noise = exact.likelihood.task_noises[i] + exact.likelihood.noise
    exact.eval()
    T = torch.rand(4, 2, dtype=torch.double, generator=generator)
    first, second = model.posterior(T), exact.posterior(T)
    torch.testing.assert_close(first.mean, second.mean, atol=1e-6, rtol=1e-6)
    # Its variances differ from those of its own kernel and noise, which are compared instead.
    with torch.no_grad():
        K = exact.covar_module(torch.cat([X, T])).to_dense()  # one point after the other
        noise = (exact.likelihood.task_noises + exact.likelihood.noise).repeat(8)
        known = torch.linalg.solve(K[:16, :16] + noise.diag(), K[:16, 16:])
        variance = (K[16:, 16:] - K[16:, :16] @ known).diagonal().reshape(4, 2)
    torch.testing.assert_close(first.variance, variance, atol=1e-6, rtol=1e-6)


def test_mixed_likelihoods_against_brute_force():
    """The bound is maximised: no other Gaussian q on a grid of 3 latent values has more."""
    X = torch.tensor([[0.3, 0.0], [0.5, 1.0], [0.6, 2.0]], dtype=torch.double)
    Y = torch.tensor([[0.7], [4.0], [1.0]], dtype=torch.double)
    each = [GaussianLikelihood(), PoissonLikelihood(), BernoulliLikelihood()]
    each[0].noise = 0.2
    model = SequentialMultiTaskGP(X, Y, 1, likelihood=each, outcome_transform=None).eval()
    with torch.no_grad():
        prior = model.forward(X)
        mean, K = prior.mean.numpy(), prior.covariance_matrix.numpy()
        q = model.variational_strategy(X)
        m, S = q.mean, q.covariance_matrix
    # Expectations of log p(y|f) and their derivatives, by a dense grid, independently.
    grid = np.linspace(-12, 12, 20001)

    def log_normal(x, centre, variance):
        return -0.5 * ((x - centre) ** 2 / variance + np.log(2 * np.pi * variance))

    rate = np.log1p(np.exp(grid))
    normal_cdf = torch.special.ndtr(torch.from_numpy(grid)).numpy()
    logs = [
        log_normal(0.7, grid, 0.2),
        4 * np.log(rate) - rate - np.log(24.0),
        np.log(np.maximum(normal_cdf, 1e-300)),
    ]
    alpha, beta = np.zeros(3), np.zeros(3)
    for i in range(3):
        c, v = float(m[i]), float(S[i, i])
        density = np.exp(log_normal(grid, c, v)) * (grid[1] - grid[0])
        alpha[i] = (density * logs[i] * (grid - c) / v).sum()
        beta[i] = -(density * logs[i] * ((grid - c) ** 2 / v**2 - 1 / v)).sum()
    # The fixed point: S^-1 = K^-1 + diag(beta), m = mean + K alpha.
    np.testing.assert_allclose(m.numpy(), mean + K @ alpha, atol=1e-6)
    expected = np.linalg.inv(np.linalg.inv(K) + np.diag(beta))
    np.testing.assert_allclose(S.numpy(), expected, atol=1e-6)


def test_stream_is_batch_with_unlimited_memory():
    X, Y = _data(30)
    Y[2::3] = (Y[2::3] > 0).to(Y)
    each = [GaussianLikelihood(), GaussianLikelihood(), BernoulliLikelihood()]
    options = {"likelihood": each, "outcome_transform": None, "all_tasks": [0, 1, 2]}
    batch = SequentialMultiTaskGP(X, Y, 1, inducing_points=X, **options)
    # One task at a time, the last of which has not been seen before.
    rows = [torch.arange(i, 30, 3) for i in range(3)]
    stream = SequentialMultiTaskGP(X[rows[0]], Y[rows[0]], 1, inducing_points=X, **options)
    for row in rows[1:]:
        record = stream.update(X[row], Y[row], learn=False, memory=10**6)
        assert record.num_new == 10
    T = torch.rand(5, 2, dtype=torch.double)
    _assert_same(stream.posterior(T), batch.posterior(T))


def test_a_task_that_appears_later_is_standardised():
    X, Y = _data(20, tasks=(0, 4))
    Y = torch.where(X[:, 1:2] == 4, 100 + 10 * Y, Y)
    first = X[:, 1] == 0
    model = SequentialMultiTaskGP(X[first], Y[first], 1, all_tasks=[0, 4])
    with pytest.raises(ValueError, match="Y"):
        model.update(X[~first], Y[~first] * torch.nan)
    assert model.outcome_transform.observed == (0,)
    model.update(X[~first], Y[~first], steps=5)
    assert model.outcome_transform.observed == (0, 1)
    torch.testing.assert_close(model.outcome_transform.means[1, 0], Y[~first].mean())
    mean = model.posterior(X[~first][:, [0, 2]]).mean[:, 1]
    assert (mean - Y[~first].squeeze(-1)).abs().mean() < 5
    Z = model.variational_strategy.inducing_points
    assert set(Z[:, 1].tolist()) <= {0.0, 4.0}


def test_predictions_leave_the_posterior_alone():
    X, Y = _data(20, tasks=(0, 4))  # there are no tasks 1 to 3
    model = SequentialMultiTaskGP(X, Y, 1)
    duals = model.variational_strategy.dual_lam
    model.posterior(X)
    assert model.variational_strategy.dual_lam is duals


def test_wide_and_long_format_are_the_same():
    x = torch.rand(6, 2, dtype=torch.double)
    Y = torch.randn(6, 2, dtype=torch.double)
    Y[1, 0] = Y[4, 1] = torch.nan
    wide = SequentialMultiTaskGP(x, Y, None)
    rows = [(i, t) for t, i in itertools.product(range(2), range(6)) if not Y[i, t].isnan()]
    X = torch.stack([torch.tensor([*x[i].tolist(), t], dtype=torch.double) for i, t in rows])
    long = SequentialMultiTaskGP(X, torch.stack([Y[i, t] for i, t in rows])[:, None], -1)
    _assert_same(wide.posterior(x), long.posterior(x), 1e-12)
    wide.update(x, Y, learn=False)
    assert wide.num_data == 20


def test_fantasies_and_acquisition():
    X, Y = _data(12)
    Y[2::3] = (Y[2::3] > 0).to(Y)
    each = {0: GaussianLikelihood(), 1: GaussianLikelihood(), 2: BernoulliLikelihood()}
    model = SequentialMultiTaskGP(X, Y, 1, likelihood=each)
    T = torch.rand(3, 2, 2, dtype=torch.double)
    fantasies = model.fantasize(T, SobolQMCNormalSampler(torch.Size([4]), seed=0))
    assert fantasies.posterior(T).mean.shape == (4, 3, 2, 3)
    observed = model.posterior(T, observation_noise=True)
    labels = observed.rsample(torch.Size([8]))[..., 2]
    assert set(labels.unique().tolist()) <= {0.0, 1.0}
    objective = GenericMCObjective(lambda samples, X=None: samples[..., 0])
    acquisition = qLogExpectedImprovement(model, best_f=0.5, objective=objective)
    assert acquisition(T).shape == (3,)
    one = model.subset_output([0])
    kg = qKnowledgeGradient(one, num_fantasies=2)
    value = kg(torch.rand(1, 3, 2, dtype=torch.double))
    assert value.isfinite().all()


@pytest.mark.slow
def test_fits_are_reliable():
    """Three data sets: errors are about those of `MultiTaskGP`, and never far off."""
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        X = torch.rand(40, 2, dtype=torch.double, generator=generator)
        X[:, 1] = (torch.arange(40) >= 32).to(X)  # the second task is scarce
        truth = torch.sin(6 * X[:, :1]) * (1 + 0.5 * X[:, 1:])
        Y = truth + 0.02 * torch.randn(40, 1, generator=generator, dtype=torch.double)
        T = torch.linspace(0, 1, 50, dtype=torch.double).unsqueeze(-1)
        model = SequentialMultiTaskGP(X, Y, 1)
        fit_gpytorch_mll(seqgp.DualELBO(model.likelihood, model))
        target = 1.5 * torch.sin(6 * T).squeeze(-1)
        torch.manual_seed(seed)
        exact = MultiTaskGP(X, Y, 1)
        fit_gpytorch_mll(ExactMarginalLogLikelihood(exact.likelihood, exact))
        error, other = (
            (each.posterior(T).mean[:, 1] - target).square().mean().sqrt()
            for each in (model, exact)
        )
        assert error < 0.1
        assert error < 1.2 * other + 0.02


def test_saved_and_loaded(tmp_path):
    X, Y = _data(12)
    model = SequentialMultiTaskGP(X, Y, 1, output_tasks=[2, 0])
    seqgp.save(model, tmp_path / "model.pt")
    again = seqgp.load(tmp_path / "model.pt")
    T = torch.rand(4, 2, dtype=torch.double)
    assert isinstance(again, SequentialMultiTaskGP)
    assert torch.equal(model.posterior(T).mean, again.posterior(T).mean)


def test_construct_inputs():
    X, Y = _data(9)
    names = {"feature_names": ["a", "task", "b"], "outcome_names": ["y"]}
    inputs = SequentialMultiTaskGP.construct_inputs(SupervisedDataset(X, Y, **names), 1, rank=2)
    model = SequentialMultiTaskGP(**inputs)
    assert model.covar_module.kernels[1].raw_covar_factor.shape == (3, 2)


@pytest.mark.parametrize("fixed", [False, True], ids=["learnt noise", "fixed noise"])
def test_given_noise_variances(fixed):
    """Against the joint covariance: those of each observation, task by task."""
    X, Y = _data(9)
    model = SequentialMultiTaskGP(X, Y, 1, torch.full_like(Y, 0.1) if fixed else None)
    generator = torch.Generator().manual_seed(0)
    T, noise = (torch.rand(2, 2, n, dtype=torch.double, generator=generator) for n in (2, 3))
    scale = model._units(torch.arange(3))[1]
    f = model.posterior(T)
    noisy = model.posterior(T, observation_noise=noise)
    torch.testing.assert_close(noisy.mean, f.mean)
    torch.testing.assert_close(noisy.variance - f.variance, noise * scale.square())
    with pytest.raises(ValueError, match="observation_noise: expected a shape"):
        model.posterior(T, observation_noise=noise[..., :2])
    # Conditioning on y with noise is conditioning the Gaussian of (f, y) on y.
    sampler = SobolQMCNormalSampler(torch.Size([3]), seed=0)
    fantasies = model.fantasize(T, sampler, observation_noise=noise)
    y = sampler(noisy)
    covariance = f.distribution.covariance_matrix  # one task after the other
    added = torch.diag_embed((noise * scale.square()).mT.reshape(2, 6))
    gain = torch.linalg.solve(covariance + added, covariance)
    residual = (y - f.mean).mT.reshape(3, 2, 1, 6)
    expected = f.mean + (residual @ gain).reshape(3, 2, 3, 2).mT
    torch.testing.assert_close(fantasies.posterior(T).mean, expected, atol=1e-6, rtol=1e-6)
    # Of what was not observed the noise does not count.
    gaps = torch.tensor([[1.0, torch.nan, 0.3]], dtype=torch.double)
    known = model.condition_on_observations(T[0, :1], gaps, noise=noise[0, :1])
    tasks = torch.tensor([[0.0], [2.0]], dtype=torch.double)
    at = torch.cat([T[0, :1, :1].expand(2, 1), tasks, T[0, :1, 1:].expand(2, 1)], -1)
    rows = gaps[:, [0, 2]].mT, noise[0, :1, [0, 2]].reshape(2, 1)
    again = model.condition_on_observations(at, rows[0], noise=rows[1])
    _assert_same(known.posterior(T), again.posterior(T))


def test_noise_variances_of_what_has_none():
    X, Y = _data(9)
    each = [GaussianLikelihood(), GaussianLikelihood(), BernoulliLikelihood()]
    Y[X[:, 1] == 2] = (Y[X[:, 1] == 2] > 0).to(Y)
    model = SequentialMultiTaskGP(X, Y, 1, likelihood=each)
    T, noise = X[:2, [0, 2]], torch.full((2, 3), 0.1, dtype=torch.double)
    with pytest.raises(ValueError, match="observation_noise: noise variances are for Gaussian"):
        model.posterior(T, observation_noise=noise)
    with pytest.raises(ValueError, match="noise: noise variances are for Gaussian"):
        model.condition_on_observations(T, torch.ones_like(noise), noise=noise)
    with pytest.raises(ValueError, match="noise: expected the shape of Y"):
        model.condition_on_observations(T, torch.ones_like(noise), noise=noise[:, :1])
    with pytest.raises(ValueError, match="always have the likelihood's noise"):
        model.fantasize(T, SobolQMCNormalSampler(torch.Size([2])), observation_noise=True)
    noisy = model.posterior(T, output_indices=[0, 1], observation_noise=noise[:, :2])
    assert noisy.variance.shape == (2, 2)  # of the tasks that are Gaussian


def test_bad_input():
    X, Y = _data(9)
    model = SequentialMultiTaskGP(X, Y, 1)
    wrong = X.clone()
    for value, message in ((7.0, "all_tasks"), (torch.nan, "whole"), (0.5, "whole numbers")):
        wrong[0, 1] = value
        for call in (
            lambda: model.update(wrong, Y),
            lambda: model.posterior(wrong),
            lambda: model.condition_on_observations(wrong, Y),
        ):
            with pytest.raises(ValueError, match=message):
                call()
    with pytest.raises(ValueError, match="whole numbers"):
        SequentialMultiTaskGP(wrong, Y, 1)
    with pytest.raises(ValueError, match="none for"):
        SequentialMultiTaskGP(X, Y, 1, likelihood={0: GaussianLikelihood()})
    with pytest.raises(ValueError, match="one for each"):
        SequentialMultiTaskGP(X, Y, 1, likelihood=[GaussianLikelihood()])
    with pytest.raises(TypeError, match="one latent"):
        SequentialMultiTaskGP(X, Y, 1, likelihood=[SoftmaxLikelihood(2, 3)] * 3)
    with pytest.raises(ValueError, match="task_feature"):
        SequentialMultiTaskGP(X, Y, 3)
    with pytest.raises(ValueError, match="output_tasks"):
        SequentialMultiTaskGP(X, Y, 1, output_tasks=[5])
    with pytest.raises(ValueError, match=r"possible observation.*the likelihood of their task"):
        SequentialMultiTaskGP(X, Y, 1, likelihood=[BernoulliLikelihood()] * 3)
    wide, before = X[:, [0, 2]], snapshot(model)
    with pytest.raises(TypeError, match=r"train_X: expected torch.* got torch\.int64"):
        SequentialMultiTaskGP(X.long(), Y, 1)
    with pytest.raises(ValueError, match="leaves the task column as it is"):
        SequentialMultiTaskGP(X, Y, 1, input_transform=Normalize(3))
    with pytest.raises(TypeError, match="of one latent function, of which each task has its own"):
        SequentialMultiTaskGP(X, Y, 1, likelihood=HeteroscedasticGaussianLikelihood())
    with pytest.raises(TypeError, match="likelihood: expected a likelihood, a list of them or"):
        SequentialMultiTaskGP(X, Y, 1, likelihood="gaussian")
    with pytest.raises(ValueError, match=r"train_Yvar: .* leave out likelihood"):
        SequentialMultiTaskGP(X, Y, 1, Y.square(), likelihood=[GaussianLikelihood()] * 3)
    for rank in (-1, 4, 1.5):
        with pytest.raises(ValueError, match="rank: expected a whole number up to 3"):
            SequentialMultiTaskGP(X, Y, 1, rank=rank)
    for tasks in ([0, 1, 2.5], [0, 1, 2, 2], torch.tensor([0.0, 1.0, 2.0])):
        with pytest.raises(ValueError, match="all_tasks: expected different whole numbers"):
            SequentialMultiTaskGP(X, Y, 1, all_tasks=tasks)
    assert SequentialMultiTaskGP(X, Y, 1, all_tasks=torch.arange(4)).all_tasks == (0, 1, 2, 3)
    for call in (model.update, model.condition_on_observations):
        with pytest.raises(TypeError, match=r"Y: expected a torch\.Tensor"):
            call(wide, [1.0, 2.0])
        with pytest.raises(ValueError, match="Y: expected"):
            call(wide, Y[:, 0])
    with pytest.raises(TypeError, match=r"X: expected a torch\.Tensor"):
        model.posterior([[1.0, 2.0]])
    assert is_same(snapshot(model), before)


def _late_task():
    """A model of two tasks, one of which is observed first by the batch."""
    X, Y = _data(12, (0,))
    model = SequentialMultiTaskGP(X, Y, 1, all_tasks=[0, 1], inducing_points=4)
    later, Y_later = _data(6, (1,), seed=1)
    return model, (later, 100 + 50 * Y_later)


def test_interrupts_while_a_task_is_standardised_leave_no_mixture():
    """Scales of new tasks are adopted with the rest of an update, also if interrupted twice."""
    model, batch = _late_task()
    before, done = snapshot(model), copy.deepcopy(model)
    counter = Interrupts(set())
    assert not counter.run(lambda: done.update(*batch, learn=False))
    after = snapshot(done)
    assert not torch.equal(model.outcome_transform.means, done.outcome_transform.means)
    n = counter.lines
    lines = [*range(2, 200, 25), *range(200, n, n // 5), *range(n - 60, n, 6)]
    for line in lines:
        each = copy.deepcopy(model)
        Interrupts({line, line + 5}).run(lambda each=each: each.update(*batch, learn=False))
        now = snapshot(each)
        assert is_same(now, before) or is_same(now, after), line


def test_a_refused_batch_leaves_the_scales_of_new_tasks_open():
    model, (X, Y) = _late_task()
    bad = Y.clone()
    bad[2] = torch.nan
    before = snapshot(model)
    with pytest.raises(ValueError, match="Y: "):
        model.update(X, bad)
    assert is_same(snapshot(model), before)
    model.update(X, Y, learn=False)
    assert model.outcome_transform.observed == (0, 1)
    torch.testing.assert_close(model.outcome_transform.means[1, 0], Y.mean())


def test_no_observations():
    """In a batch, and before the first."""
    X, Y = _data(6)
    model = SequentialMultiTaskGP(X, Y, 1)
    mean = model.posterior(X).mean
    assert model.update(X[:0], Y[:0], learn=False).num_new == 0
    torch.testing.assert_close(model.posterior(X).mean, mean)
    empty = SequentialMultiTaskGP(X[:0], Y[:0], 1, all_tasks=[0, 1, 2], inducing_points=X)
    assert empty.posterior(X).mean.isfinite().all()


def test_pickled():
    X, Y = _data(6)
    model = SequentialMultiTaskGP(X, Y, 1)
    other = pickle.loads(pickle.dumps(model))
    assert torch.equal(other.posterior(X).mean, model.posterior(X).mean)
    prior = {name: rest for name, *rest in other.named_priors()}
    (name,) = [name for name in prior if name.endswith("IndexKernelPrior")]
    module, _, closure, _ = prior[name]
    assert closure(module).shape == (3,)


def _several_kernels(X, Y, **options):
    return SequentialMultiTaskGP(
        X,
        Y,
        1,
        covar_module=[RBFKernel(ard_num_dims=2), MaternKernel(nu=1.5)],
        outcome_transform=None,
        **options,
    )


def test_several_kernels_are_a_linear_model_of_coregionalisation():
    X, Y = _data(12)
    model = _several_kernels(X, Y)
    T = torch.rand(5, 2, dtype=torch.double)
    with torch.no_grad():
        model.covar_module.kernels[1].kernels[0].lengthscale = 0.3
        noise = torch.tensor([0.05, 0.1, 0.2], dtype=torch.double)
        for each, value in zip(model.likelihood.likelihoods, noise, strict=True):
            each.noise = value
        B, tasks = model.task_covariance, X[:, 1].long()
        assert B.shape == (2, 3, 3)
        assert not torch.allclose(B[0], B[1])  # so that a fit can tell them apart
        torch.testing.assert_close(B.sum(0).diagonal().mean(), B.new_tensor(1.0))
        rows = torch.cat([X[:, [0, 2]], T])
        index = torch.cat([tasks, torch.full((5,), 2)])
        K = torch.zeros(17, 17, dtype=torch.double)
        for term, matrix in zip(model.covar_module.kernels, B, strict=True):
            kernel = copy.deepcopy(term.kernels[0])
            kernel.active_dims = None
            K += kernel(rows).to_dense() * matrix[index][:, index]
        means = torch.stack([each.constant for each in model.mean_module.means.base_means])
        known = torch.linalg.solve(K[:12, :12] + noise[tasks].diag(), K[:12, 12:])
        mean = means[2] + known.mT @ (Y.squeeze(-1) - means[tasks])
        covariance = K[12:, 12:] - K[12:, :12] @ known
    posterior = model.posterior(T, output_indices=[2])
    torch.testing.assert_close(posterior.mean.squeeze(-1), mean, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(
        posterior.distribution.covariance_matrix, covariance, atol=1e-6, rtol=1e-6
    )


def test_weights_of_tasks_may_be_negative():
    """Outputs that are opposites: one is predicted from the other."""
    x = torch.linspace(0, 1, 16, dtype=torch.double).unsqueeze(-1)
    Y = torch.cat([torch.sin(6 * x), -2 * torch.sin(6 * x)], -1)
    Y[4:, 1] = torch.nan
    own = LoadingKernel([0, 1], [1.0, 0.5], fixed=[0], loading_prior=NormalPrior(0.0, 3.0))
    model = SequentialMultiTaskGP(
        x, Y, None, covar_module=RBFKernel(), task_covar_module=own, outcome_transform=None
    )
    fit_gpytorch_mll(seqgp.DualELBO(model.likelihood, model))
    assert model.covar_module.kernels[1].loadings.tolist() == pytest.approx([1, -2], abs=0.1)
    error = model.posterior(x).mean[:, 1] + 2 * torch.sin(6 * x.squeeze(-1))
    assert error.abs().max() < 0.1
    assert model.task_covariance[0, 1] < 0


def test_tasks_that_share_a_function_and_have_their_own():
    """Unrelated tasks are nearly as good as alone, which they are not with the default kernel."""
    kernels = shared_and_own([5, 0, 2])  # the reference first, values in ascending order
    w, v = 0.5**0.5, 0.5
    expected = [[[v, v, w], [v, v, w], [w, w, 1.0]], [[v, 0, 0]] + 2 * [[0] * 3]]
    for kernel, matrix in zip(kernels, expected, strict=False):
        torch.testing.assert_close(kernel.covar_matrix, torch.tensor(matrix))
    last = kernels[2].covar_matrix.diagonal()
    torch.testing.assert_close(last, torch.tensor([0.0, 0.5, 0.0]))
    X, Y = outputs.observations("unrelated", (60, 8), seed=1)
    ways = ("ours", "parts", "ours alone")
    default, parts, alone = (outputs.score(outputs.fitted(way, X, Y), "unrelated") for way in ways)
    assert parts["error"] < 0.7 * default["error"]
    assert parts["density"] > default["density"]
    assert parts["error"] < 1.2 * alone["error"]


def test_kernels_that_do_not_fit():
    X, Y = _data(9)
    weights = LoadingKernel([0, 1, 2], [1.0, 0.0, 0.0])
    with pytest.raises(ValueError, match="one for each of 2 kernels, got 1"):
        _several_kernels(X, Y, task_covar_module=weights)
    with pytest.raises(ValueError, match="leave out rank"):
        SequentialMultiTaskGP(X, Y, 1, rank=1, task_covar_module=weights)
    with pytest.raises(TypeError, match="covar_module"):
        SequentialMultiTaskGP(X, Y, 1, covar_module=[1.0])
    with pytest.raises(ValueError, match="at least one kernel"):
        SequentialMultiTaskGP(X, Y, 1, covar_module=[])
    with pytest.raises(ValueError, match="loadings"):
        LoadingKernel([0, 1], [1.0])
    with pytest.raises(ValueError, match="loadings"):
        LoadingKernel([0, 1], [1.0, 0.0], fixed=[2])


def test_kernels_of_several_parts_are_saved(tmp_path):
    X, Y = _data(9)
    prior = NormalPrior(0.0, 2.0)
    weights = [
        LoadingKernel([0, 1, 2], [1.0, 0.5, -0.25], [0], loading_prior=prior),
        LoadingKernel([0, 1, 2], [0.0, 1.0, 1.0], [0, 1, 2]),
    ]
    for options in ({}, {"task_covar_module": weights}):
        model = _several_kernels(X, Y, **options)
        seqgp.save(model, tmp_path / "model.pt")
        again = seqgp.load(tmp_path / "model.pt")
        T = torch.rand(4, 2, dtype=torch.double)
        assert torch.equal(model.posterior(T).mean, again.posterior(T).mean)
        assert torch.equal(model.task_covariance, again.task_covariance)
        assert len([*model.named_priors()]) == len([*again.named_priors()])
        other = _several_kernels(X, Y, **copy.deepcopy(options))
        with torch.no_grad():
            model.covar_module.kernels[0].kernels[0].lengthscale = 0.3
        other.load_state_dict(model.state_dict())
        torch.testing.assert_close(other.posterior(T).mean, model.posterior(T).mean)


def _mixed(n=15):
    """Values, labels and counts at the same inputs, some of them missing."""
    generator = torch.Generator().manual_seed(2)
    x = torch.rand(n, 2, dtype=torch.double, generator=generator)
    f = torch.sin(5 * x[:, :1])
    Y = torch.cat([3 + f, (f > 0).to(x), (5 * f.exp()).round()], -1)
    Y[::3, 0] = Y[1::4, 2] = torch.nan
    each = [GaussianLikelihood(), BernoulliLikelihood(), PoissonLikelihood()]
    return SequentialMultiTaskGP(x, Y, None, likelihood=each), x, Y


def test_a_model_of_one_task_is_one_of_its_likelihood():
    model, x, _ = _mixed()
    joint = model.posterior(x)
    for i, likelihood in enumerate(model.likelihood.likelihoods):
        one = model.subset_output([i])
        assert type(one.output_likelihood) is type(likelihood)
        torch.testing.assert_close(one.posterior(x).mean, joint.mean[:, [i]])
        torch.testing.assert_close(one.posterior(x).variance, joint.variance[:, [i]])
    assert model.output_likelihood is model.likelihood
    value, label, count = (model.subset_output([i]) for i in range(3))
    noisy = value.posterior(x, observation_noise=True)  # Gaussian, on the scale of the values
    noise = value.output_likelihood.noise * model.outcome_transform.stdvs[0].square()
    torch.testing.assert_close(
        noisy.variance, joint.variance[:, :1] + noise.expand(len(x), 1), atol=1e-9, rtol=1e-9
    )
    assert noisy.distribution.covariance_matrix.shape == (15, 15)
    labels = label.posterior(x, observation_noise=True)
    assert isinstance(labels, ObservationPosterior)
    scaled = joint.mean[:, 1:2] / (1 + joint.variance[:, 1:2]).sqrt()
    torch.testing.assert_close(labels.mean, torch.special.ndtr(scaled))
    counts = count.posterior(x, observation_noise=True).rsample(torch.Size([4]))
    assert torch.equal(counts, counts.round())


def test_conditioning_on_wide_data_with_gaps():
    model, x, _ = _mixed()
    Y = torch.tensor([[2.5, 1.0, torch.nan], [torch.nan, 0.0, 3.0]], dtype=torch.double)
    wide = model.condition_on_observations(x[:2] + 0.1, Y)
    rows = [(0, 0), (0, 1), (1, 1), (1, 2)]
    X = torch.stack([torch.cat([x[i] + 0.1, x.new_tensor([t])]) for i, t in rows])
    long = model.condition_on_observations(X, torch.stack([Y[i, t] for i, t in rows])[:, None])
    _assert_same(wide.posterior(x), long.posterior(x), 1e-9)
    with pytest.raises(ValueError, match="Y: "):
        model.condition_on_observations(x[:2].expand(3, 2, 2), Y.expand(3, 2, 3))


def test_imagined_outcomes_are_possible_for_each_task():
    model, x, Y = _mixed()
    mean = fantasy_outcome(model, x)
    torch.testing.assert_close(mean[:, :1], model.posterior(x).mean[:, :1])
    probability = model.subset_output([1]).posterior(x, observation_noise=True).mean
    assert torch.equal(mean[:, 1:2], (probability > 0.5).to(x))
    assert torch.equal(mean[:, 2], mean[:, 2].round())
    believed = fantasy_outcome(model, x, "believer")
    assert torch.equal(believed[:, 0], mean[:, 0])
    assert believed[:, 1:].isnan().all()
    least = fantasy_outcome(model, x, "constant_min")
    torch.testing.assert_close(least[:, 0], Y[:, 0].nan_to_num(torch.inf).min().expand(15))
    sample = fantasy_outcome(model, x, "sample", seed=0)
    assert set(sample[:, 1].tolist()) <= {0.0, 1.0}
    for outcome in (mean, believed, least, sample):
        assert model.condition_on_observations(x, outcome).posterior(x).mean.isfinite().all()


@settings(max_examples=6, deadline=None)
@given(
    seed=st.integers(0, 1000),
    calls=st.lists(
        st.sampled_from(["learn", "both", "adapt", "cluster", "fit", "loop", "choose", "forget"]),
        min_size=1,
        max_size=3,
    ),
)
@example(seed=0, calls=["fit", "loop", "both"])
@example(seed=1, calls=["choose", "learn", "forget"])
def test_task_column_is_never_moved(seed, calls):
    """Whatever moves inducing points: rules of updates, fits and training loops with gradients."""
    X, Y = _data(36, tasks=(0, 2, 5), seed=seed)
    model = SequentialMultiTaskGP(
        X[:18], Y[:18], 1, inducing_points=6, learn_inducing_points=True, all_tasks=[0, 2, 5, 7]
    )
    parts, forgotten = iter((slice(18, 24), slice(24, 30), slice(30, 36))), iter((0, 2, 4))
    for call in calls:
        before = model.variational_strategy.inducing_points.clone()
        if call == "fit":
            mll = seqgp.DualELBO(model.likelihood, model)
            fit_gpytorch_mll(mll, optimizer_kwargs={"options": {"maxiter": 3}})
            after = model.variational_strategy.inducing_points
            assert before.shape != after.shape or not torch.equal(before, after)  # others moved
        elif call == "loop":
            _train(model)
        elif call == "choose":
            model.init_inducing_points(model.train_inputs[0])
        elif call == "forget":
            k = next(forgotten)
            model.forget(X[k : k + 2], Y[k : k + 2])
        else:
            part = next(parts)
            model.update(X[part], Y[part], inducing=call, learn=True, steps=2, memory=18)
        Z = model.variational_strategy.inducing_points
        assert set(Z[:, 1].tolist()) <= {0.0, 2.0, 5.0}


def _train(model):
    """A few steps of a training loop, with weight decay, which moves all of a parameter."""
    Z = model.variational_strategy.inducing_points
    kernel = [*model.covar_module.parameters()]
    groups = [{"params": kernel, "weight_decay": 0.0}, {"params": [Z], "weight_decay": 0.5}]
    optimizer = torch.optim.AdamW(groups, lr=0.05)
    mll = seqgp.DualELBO(model.likelihood, model)
    model.train()
    for _ in range(3):
        optimizer.zero_grad()
        (-mll(model(*model.train_inputs), model.train_targets)).backward()
        optimizer.step()
    model.eval()


def test_tasks_are_standardised_one_by_one():
    X, Y = _data(30)
    Y = torch.where(X[:, 1:2] == 1, 1000 + 50 * Y, Y)
    model = SequentialMultiTaskGP(X, Y, 1)
    for i in range(3):
        mine = X[:, 1] == i
        torch.testing.assert_close(model.outcome_transform.means[i, 0], Y[mine].mean())
        torch.testing.assert_close(model.outcome_transform.stdvs[i, 0], Y[mine].std())
        torch.testing.assert_close(model.observed_of(i), Y[mine])


def test_labels_of_one_kind_do_not_make_a_task_certain():
    """The constant mean of labels has a prior here, too."""
    x = torch.rand(20, 1, dtype=torch.double)
    each = [GaussianLikelihood(), BernoulliLikelihood()]
    Y = torch.cat([x.sin(), torch.ones_like(x)], -1)
    model = SequentialMultiTaskGP(x, Y, None, likelihood=each)
    means = model.mean_module.means.base_means
    assert [len([*mean.named_priors()]) for mean in means] == [0, 1]
    alone = SequentialGP(x, Y[:, 1:], likelihood=BernoulliLikelihood())
    assert len([*alone.mean_module.named_priors()]) == 1


def test_objectives_of_exact_models():
    """BoTorch's own, as for `MultiTaskGP`: the same value and fit as with a `DualELBO`."""
    X, Y = _data()
    torch.manual_seed(0)
    exact = MultiTaskGP(X, Y, 1, outcome_transform=None)
    model = SequentialMultiTaskGP(X, Y, 1, outcome_transform=None)
    _same_hyperparameters(model, exact)
    torch.testing.assert_close(model.likelihood.noise, exact.likelihood.noise.flatten())
    values = []
    for each in (exact.train(), model.train()):
        mll = ExactMarginalLogLikelihood(each.likelihood, each)
        params = [each.train_inputs] if each is exact else []
        value = mll(each(*each.train_inputs), each.train_targets, *params)
        kernel = each.covar_module.kernels[0]
        values.append((value, *torch.autograd.grad(value, [kernel.raw_lengthscale])))
    # Priors of the noise are one for each task here, and the same one for all of them there.
    torch.testing.assert_close(values[0][1], values[1][1], atol=1e-6, rtol=1e-6)
    bound, other = seqgp.DualELBO(model.likelihood, model), copy.deepcopy(model)
    evidence, _ = other.eval().bound(exact=True)
    expected = bound.with_priors(evidence, len(Y))
    torch.testing.assert_close(values[1][0], expected, atol=1e-6, rtol=1e-6)
    fit_gpytorch_mll(ExactMarginalLogLikelihood(model.likelihood, model))
    fit_gpytorch_mll(seqgp.DualELBO(other.likelihood, other))
    assert torch.equal(model.task_covariance, other.task_covariance)


def test_gaussian_tasks_have_a_gaussian_likelihood():
    likelihood = GaussianTaskLikelihood([GaussianLikelihood(), GaussianLikelihood()]).double()
    likelihood.noise = torch.tensor([0.25, 4.0], dtype=torch.double)
    covariance = torch.tensor([[1.0, 0.3], [0.3, 2.0]], dtype=torch.double)
    f, y = (
        MultivariateNormal(torch.zeros(2).double(), covariance),
        torch.tensor([0.5, 1.0]).double(),
    )
    task = torch.tensor([1, 0])
    noisy = likelihood(f, task=task)
    expected = covariance + torch.tensor([4.0, 0.25]).diag()
    torch.testing.assert_close(noisy.covariance_matrix, expected)
    normal = torch.distributions.Normal(torch.zeros(2).double(), expected.diagonal().sqrt())
    torch.testing.assert_close(likelihood.log_marginal(y, f, task=task), normal.log_prob(y))
    mixed = TaskLikelihood(likelihood.likelihoods)
    for function in (expectations, log_predictive):
        for one, other in zip(
            *(function(each, y, f.mean, f.variance, task=task) for each in (likelihood, mixed)),
            strict=True,
        ):
            torch.testing.assert_close(one, other)
    torch.testing.assert_close(
        likelihood.expected_log_prob(y, f, task=task),
        expectations(mixed, y, f.mean, f.variance, task=task).log_prob,
    )
    with pytest.raises(TypeError, match="task: expected the index"):
        likelihood(f)

"""What users of `PairwiseGP` do, with either class."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from botorch.acquisition import LearnedObjective, qLogNoisyExpectedImprovement
from botorch.acquisition.objective import ScalarizedPosteriorTransform
from botorch.acquisition.preference import AnalyticExpectedUtilityOfBestOption
from botorch.fit import fit_gpytorch_mll
from botorch.models import PairwiseGP, SingleTaskGP
from botorch.models.likelihoods.pairwise import PairwiseLogitLikelihood, PairwiseProbitLikelihood
from botorch.models.pairwise_gp import PairwiseLaplaceMarginalLogLikelihood
from botorch.models.transforms import Normalize
from botorch.optim import optimize_acqf
from botorch.posteriors import GPyTorchPosterior
from botorch.sampling import SobolQMCNormalSampler
from gpytorch.distributions import MultivariateNormal
from gpytorch.kernels import LinearKernel, RBFKernel, ScaleKernel
from gpytorch.means import ConstantMean
from gpytorch.priors import GammaPrior, SmoothedBoxPrior
from torch import Tensor

from seqgp import PreferenceGP

pytestmark = pytest.mark.usefixtures("float64")
both = pytest.mark.parametrize("make", [PairwiseGP, PreferenceGP])
batches = pytest.mark.parametrize("batch_shape", [torch.Size([]), torch.Size([2])])
Make = Callable[..., Any]
FIT: dict[str, Any] = {"optimizer_kwargs": {"options": {"maxiter": 2}}}


def problem(batch_shape: torch.Size, n: int = 6) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    X = torch.rand(*batch_shape, n, 2)
    pairs = torch.combinations(torch.arange(n))
    first, second = (X.sum(-1)[..., pairs[:, k]] for k in (0, 1))
    return X, torch.where((first > second).unsqueeze(-1), pairs, pairs.flip(-1))


@both
@batches
@pytest.mark.parametrize("likelihood", [PairwiseProbitLikelihood, PairwiseLogitLikelihood])
def test_a_model(make: Make, batch_shape: torch.Size, likelihood: Any) -> None:
    X, Y = problem(batch_shape)
    model = make(X, Y, likelihood())
    assert isinstance(model.mean_module, ConstantMean)
    assert isinstance(model.covar_module, ScaleKernel)
    assert isinstance(model.covar_module.outputscale_prior, SmoothedBoxPrior)
    assert isinstance(model.covar_module.base_kernel, RBFKernel)
    assert isinstance(model.covar_module.base_kernel.lengthscale_prior, GammaPrior)
    assert model.covar_module.base_kernel.ard_num_dims == 2
    assert model.num_outputs == 1
    assert model.batch_shape == batch_shape
    fit_gpytorch_mll(PairwiseLaplaceMarginalLogLikelihood(model.likelihood, model), **FIT)
    test = torch.rand(*batch_shape, 3, 2)
    posterior = model.posterior(test)
    assert isinstance(posterior, GPyTorchPosterior)
    assert posterior.mean.shape == posterior.variance.shape == (*batch_shape, 3, 1)
    noisy = model.posterior(test, observation_noise=True)
    torch.testing.assert_close(noisy.variance, posterior.variance)
    transform = ScalarizedPosteriorTransform(weights=torch.tensor([-2.0]))
    transformed = model.posterior(test, posterior_transform=transform)
    torch.testing.assert_close(transformed.mean, -2 * posterior.mean)
    assert isinstance(model.eval()(test), MultivariateNormal)


@both
def test_modules_of_the_user(make: Make) -> None:
    X, Y = problem(torch.Size([]))
    model = make(X, Y, covar_module=ScaleKernel(LinearKernel()))
    assert isinstance(model.covar_module.base_kernel, LinearKernel)
    model = make(10 * X, Y, input_transform=Normalize(2))
    plain = make(Normalize(2)(X), Y)
    torch.testing.assert_close(
        model.posterior(10 * X).mean, plain.posterior(Normalize(2)(X)).mean, rtol=1e-4, atol=1e-4
    )


@both
def test_new_data(make: Make) -> None:
    X, Y = problem(torch.Size([]))
    model = make(X, Y)
    before = model.posterior(X).mean
    model.set_train_data(X, Y.flip(-1), update_model=True)
    torch.testing.assert_close(model.posterior(X).mean, -before, rtol=1e-4, atol=1e-4)
    with pytest.raises((RuntimeError, ValueError)):
        model.set_train_data(X, Y[:3], strict=True)
    state = make(X, Y).state_dict()
    model = make(X, Y)
    model.covar_module.outputscale = 2.0
    model.load_state_dict(state)
    assert abs(model.covar_module.outputscale.item() - 1) < 1e-9
    torch.testing.assert_close(model.posterior(X).mean, before, rtol=1e-4, atol=1e-4)


@both
@batches
def test_conditioning(make: Make, batch_shape: torch.Size) -> None:
    """As in BoTorch, the first row of a batch is what a model without the batch says."""
    X, Y = problem(batch_shape)
    model, new = make(X, Y), torch.rand(*batch_shape, 2, 2)
    pairs = torch.tensor([[0, 1]])  # of the new items
    conditioned = model.condition_on_observations(new, pairs.expand(*batch_shape, 1, 2))
    assert type(conditioned) is make
    test = torch.rand(*batch_shape, 3, 2)
    mean = conditioned.posterior(test).mean
    assert mean.shape == (*batch_shape, 3, 1)
    won, lost = conditioned.posterior(new).mean.unbind(-2)
    was_won, was_lost = model.posterior(new).mean.unbind(-2)
    assert bool((won - lost > was_won - was_lost).all())
    if batch_shape:
        single = make(X[0], Y[0]).condition_on_observations(new[0], pairs)
        torch.testing.assert_close(mean[0], single.posterior(test[0]).mean, rtol=1e-3, atol=1e-3)


@both
def test_duplicates(make: Make) -> None:
    """Items that are compared several times are one item, however often they are listed."""
    X, Y = problem(torch.Size([]))
    repeated = make(torch.cat([X, X[:2]]), torch.cat([Y, torch.tensor([[6, 3], [4, 7]])]))
    same = make(X, torch.cat([Y, torch.tensor([[0, 3], [4, 1]])]))
    test = torch.rand(4, 2)
    assert len(repeated.datapoints) == 6
    torch.testing.assert_close(
        repeated.posterior(test).mean, same.posterior(test).mean, rtol=1e-4, atol=1e-4
    )


@both
def test_the_tutorial(make: Make) -> None:
    """Fit, ask for the pair of largest expected utility of the best option, append, again."""
    X, Y = problem(torch.Size([]), 8)
    bounds = torch.tensor([[0.0, 0.0], [1.0, 1.0]])
    for _ in range(2):
        model = make(X, Y, input_transform=Normalize(d=X.shape[-1]))
        mll = PairwiseLaplaceMarginalLogLikelihood(model.likelihood, model)
        fit_gpytorch_mll(mll, **FIT)
        acquisition = AnalyticExpectedUtilityOfBestOption(pref_model=model)
        pair, _ = optimize_acqf(
            acquisition, bounds, q=2, num_restarts=1, raw_samples=8, options={"maxiter": 3}
        )
        better = int(pair[1].sum() > pair[0].sum())
        answer = torch.tensor([[len(X) + better, len(X) + 1 - better]])
        X, Y = torch.cat([X, pair]), torch.cat([Y, answer])
    test = torch.rand(50, 2)
    mean = model.posterior(test).mean.detach().squeeze(-1)
    assert float(torch.stack([mean, test.sum(-1)]).corrcoef()[0, 1]) > 0.9


@both
def test_unknown_utility(make: Make) -> None:
    """Optimisation of outcomes whose utility is learnt from comparisons of them."""
    X, Y = problem(torch.Size([]))
    outcomes = (X - X.mean(0)) / X.std(0)
    utility = make(outcomes, Y)
    model = SingleTaskGP(X, outcomes)
    sampler = SobolQMCNormalSampler(torch.Size([16]), seed=0)
    objective = LearnedObjective(pref_model=utility)
    acquisition = qLogNoisyExpectedImprovement(
        model, X_baseline=X, sampler=sampler, objective=objective, prune_baseline=False
    )
    values = acquisition(torch.tensor([[[0.1, 0.1]], [[0.95, 0.95]]]))
    assert values.shape == (2,)
    assert float(values[1].detach()) > float(values[0].detach())

"""A `SparseOutlierGaussianLikelihood` and relevance pursuit, with ours and with `SingleTaskGP`."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from botorch.acquisition import qLogNoisyExpectedImprovement
from botorch.cross_validation import efficient_loo_cv
from botorch.exceptions.warnings import InputDataWarning
from botorch.fit import fit_gpytorch_mll
from botorch.models import SingleTaskGP
from botorch.models.likelihoods.sparse_outlier_noise import SparseOutlierGaussianLikelihood
from botorch.models.relevance_pursuit import backward_relevance_pursuit, forward_relevance_pursuit
from botorch.models.transforms import Normalize
from botorch.optim.closures.model_closures import get_loss_closure
from botorch.sampling import SobolQMCNormalSampler
from gpytorch.likelihoods.noise_models import FixedGaussianNoise, HomoskedasticNoise
from gpytorch.mlls import (
    ExactMarginalLogLikelihood,
    LeaveOneOutPseudoLikelihood,
    VariationalELBO,
)

from seqgp import DualELBO, SequentialGP, SequentialMultiTaskGP, load, save
from tests.helpers import assert_close, make_inputs, make_kernel
from tests.models.helpers import assert_same

pytestmark = [
    pytest.mark.usefixtures("float64"),
    pytest.mark.filterwarnings(
        "ignore:Converting a tensor with requires_grad:UserWarning"  # by BoTorch
    ),
    # BoTorch says so whenever it is asked for noise elsewhere than at the training inputs.
    pytest.mark.filterwarnings(
        f"ignore:SparseOutlierNoise:{InputDataWarning.__module__}.{InputDataWarning.__name__}"
    ),
]

N = 14
each_noise = pytest.mark.parametrize("convex", [True, False], ids=["convex", "plain"])


def likelihood(convex: bool = True, known: bool = False) -> SparseOutlierGaussianLikelihood:
    """With outliers 3 and 5."""
    base: Any = FixedGaussianNoise(torch.linspace(0.02, 0.2, N)) if known else HomoskedasticNoise()
    if not known:
        base.initialize(noise=0.1)
    result = SparseOutlierGaussianLikelihood(
        base, dim=N, outlier_indices=[3, 5], convex_parameterization=convex
    )
    result.noise_covar.raw_rho.data = torch.tensor([0.9, 0.4])
    return result


def data() -> tuple[torch.Tensor, torch.Tensor]:
    X = 3 * make_inputs(N, 2)
    Y = 7 + 2 * X.sin().sum(-1, keepdim=True)
    Y[3] += 9
    Y[5] -= 6
    return X, Y


def models(convex: bool = True, known: bool = False, **kwargs: Any) -> tuple[Any, Any]:
    """Ours and BoTorch's; the kernel has a variance of its own, by which outliers are scaled."""
    return tuple(
        kind(
            *data(),
            likelihood=likelihood(convex, known),
            covar_module=make_kernel(outputscale=1.7),
            input_transform=Normalize(2),
            **kwargs,
        )
        for kind in (SequentialGP, SingleTaskGP)
    )


@each_noise
@pytest.mark.parametrize("known", [False, True], ids=["learnt", "known"])
def test_posterior(convex: bool, known: bool) -> None:
    X, _ = data()
    ours, exact = models(convex, known)
    for at, noise in ((X, False), (X[:4] + 0.1, False), (X, True)):
        assert_same(*(model.posterior(at, observation_noise=noise) for model in (ours, exact)))
    given = torch.full((4, 1), 0.3)
    assert_same(*(m.posterior(X[:4] + 0.1, observation_noise=given) for m in (ours, exact)))


@each_noise
def test_new_observations_are_not_outliers(convex: bool) -> None:
    """Also as many as there are training data, if these are not what is predicted first."""
    X, _ = data()
    ours, exact = models(convex)
    exact.posterior(X[:2])
    for at in (X[:3] + 0.1, X + 0.1):
        assert_same(*(model.posterior(at, observation_noise=True) for model in (ours, exact)))
    known, _ = models(convex, known=True)  # BoTorch cannot predict such noise
    noisy, latent = (known.posterior(X[:3] + 0.1, observation_noise=n) for n in (True, False))
    noise = torch.linspace(0.02, 0.2, N).mean() * known.outcome_transform.stdvs.square()
    assert_close(noisy.variance - latent.variance, noise.expand(3, 1))


@each_noise
@pytest.mark.parametrize(
    ("objective", "loop"),
    [
        (ExactMarginalLogLikelihood, False),
        (ExactMarginalLogLikelihood, True),
        (LeaveOneOutPseudoLikelihood, False),
    ],
)
def test_objectives(convex: bool, objective: Any, loop: bool) -> None:
    """Values and gradients, in BoTorch's fits and in a training loop."""
    values = []
    for model in models(convex):
        mll = objective(model.likelihood, model).train()
        if loop:
            (X,) = model.train_inputs
            loss = -mll(model(X), model.train_targets, model.transform_inputs(X))
        else:
            loss = get_loss_closure(mll)()
        loss.backward()
        parts = [loss, *(p.grad.flatten() for _, p in sorted(model.named_parameters()))]
        values.append(torch.cat([part.detach().reshape(-1) for part in parts]))
    assert_close(*values)


def test_a_bound_with_fewer_inducing_points() -> None:
    """The same as with the noise of each observation given."""
    X, Y = data()
    Z = X[:6]
    options: dict[str, Any] = {"outcome_transform": None, "inducing_points": Z}
    sparse = SequentialGP(
        X, Y, likelihood=likelihood(), covar_module=make_kernel(outputscale=1.7), **options
    )
    rho = torch.zeros(N)
    rho[[3, 5]] = 1 / (1 - torch.tensor([0.9, 0.4])) - 1
    noise = (0.1 + rho * (1.7 + 0.1)).unsqueeze(-1)
    known = SequentialGP(X, Y, noise, covar_module=make_kernel(outputscale=1.7), **options)
    assert_close(sparse.refresh(), known.refresh())
    assert_same(*(model.posterior(X + 0.1) for model in (sparse, known)))


def test_leave_one_out() -> None:
    ours, exact = (efficient_loo_cv(model).posterior for model in models())
    assert_same(ours, exact)


def test_acquisition() -> None:
    X, _ = data()
    values = []
    for model in models():
        sampler = SobolQMCNormalSampler(torch.Size([16]), seed=0)
        values.append(qLogNoisyExpectedImprovement(model, X, sampler)(X[:4].unsqueeze(1) + 0.2))
    assert_close(*values, 1e-5)


@each_noise
@pytest.mark.parametrize("pursuit", [forward_relevance_pursuit, backward_relevance_pursuit])
def test_pursuit(convex: bool, pursuit: Any) -> None:
    """The same outliers are found, with the same fits."""
    traces = []
    for model in models(convex):
        mll = ExactMarginalLogLikelihood(model.likelihood, model)
        _, trace = pursuit(model.likelihood.noise_covar, mll, sparsity_levels=[0, 1, 2])
        traces.append(trace)
    assert len(traces[0]) == len(traces[1])
    for ours, exact in zip(*traces, strict=True):
        own, other = (model.likelihood.noise_covar for model in (ours, exact))
        assert set(own.support) == set(other.support)
        if len(own.support) > 2:
            continue  # noise of its own for each observation: the evidence has no unique maximum
        losses = []
        for model in (ours, exact):
            mll = ExactMarginalLogLikelihood(model.likelihood, model).train()
            losses.append(get_loss_closure(mll)().detach())
        assert_close(*losses, 1e-4)  # where two runs of L-BFGS have ended
    found = min(traces[0], key=lambda model: abs(len(model.likelihood.noise_covar.support) - 2))
    assert set(found.likelihood.noise_covar.support) == {3, 5}


def test_fit() -> None:
    """Whichever objective is passed; rho stays within its bounds."""
    values = []
    for objective in (ExactMarginalLogLikelihood, DualELBO):
        ours, _ = models()
        fit_gpytorch_mll(objective(ours.likelihood, ours))
        assert float(ours.likelihood.noise_covar.raw_rho.min()) >= 0
        values.append(ours.refresh())
    assert_close(*values)
    exact = models()[1]
    fit_gpytorch_mll(ExactMarginalLogLikelihood(exact.likelihood, exact))
    lengthscales = (model.covar_module.base_kernel.lengthscale for model in (ours, exact))
    assert_close(*lengthscales, 1e-2)  # where two runs of L-BFGS have ended


def test_a_change_of_outliers_is_seen() -> None:
    """By the next prediction, although it is no tensor that has changed."""
    X, _ = data()
    ours, exact = models()
    first = ours.posterior(X).mean
    for model in (ours, exact):
        model.train()
        model.likelihood.noise_covar.contract_support([5])
        model.likelihood.noise_covar.expand_support([2])
        model.likelihood.noise_covar.raw_rho.data[-1] = 0.4
    assert_same(*(model.posterior(X) for model in (ours, exact)))
    assert (ours.posterior(X).mean - first).abs().max() > 0.1


@each_noise
def test_conditioned_models_keep_the_noise_of_outliers(convex: bool) -> None:
    """As an exact GP with the noise of each observation given. (BoTorch's then has no outliers.)"""
    X, Y = data()
    kernel = make_kernel(outputscale=1.7)
    ours = SequentialGP(
        X, Y, likelihood=likelihood(convex), covar_module=kernel, outcome_transform=None
    )
    raw = torch.tensor([0.9, 0.4])
    noise = torch.full((N + 2, 1), 0.1)
    noise[[3, 5], 0] += (1 / (1 - raw) - 1) * (1.7 + 0.1) if convex else raw
    new, values = X[:2] + 0.3, Y[:2] + 1
    every = torch.cat([X, new]), torch.cat([Y, values])
    exact = SingleTaskGP(*every, noise, covar_module=kernel, outcome_transform=None)
    known = ours.condition_on_observations(new, values)
    assert_same(known.posterior(X + 0.1), exact.posterior(X + 0.1))
    again = ours.get_fantasy_model(new, values.squeeze(-1))
    assert_same(again.posterior(X + 0.1), exact.posterior(X + 0.1))
    fantasies = ours.fantasize(new.unsqueeze(1), SobolQMCNormalSampler(torch.Size([3]), seed=0))
    assert fantasies.posterior(X).mean.shape == (3, 2, N, 1)


def test_copies_and_files(tmp_path: Path) -> None:
    X, _ = data()
    ours, _ = models()
    ours.posterior(X, observation_noise=True)  # BoTorch's likelihood remembers the inputs
    save(ours, tmp_path / "model.seqgp")
    single = copy.deepcopy(ours).float()
    assert_close(single.posterior(X.float()).mean.double(), ours.posterior(X).mean, 1e-3)
    for other in (copy.deepcopy(ours), load(tmp_path / "model.seqgp")):
        assert_same(other.posterior(X + 0.1), ours.posterior(X + 0.1))
    other, _ = models()
    ours.likelihood.noise_covar.raw_rho.data /= 2
    other.load_state_dict(ours.state_dict())
    assert_same(other.posterior(X + 0.1), ours.posterior(X + 0.1))


def test_what_raises() -> None:
    X, Y = data()
    with pytest.raises(ValueError, match=r"made for dim=14 observations but was given 5"):
        SequentialGP(X[:5], Y[:5], likelihood=likelihood())
    with pytest.raises(ValueError, match=r"train_Yvar: a SparseOutlier.* has a base_noise"):
        SequentialGP(X, Y, torch.ones_like(Y), likelihood=likelihood())
    with pytest.raises(ValueError, match="works in a SequentialGP only"):
        SequentialMultiTaskGP(torch.cat([X, X[:, :1] > 1], -1), Y, -1, likelihood=likelihood())
    ours, _ = models()
    for change in (ours.update, ours.forget):
        with pytest.raises(ValueError, match="looks for outliers among the observations"):
            change(X[:2], Y[:2])
    ours.train()
    with pytest.raises(NotImplementedError, match="does not yet support variational inference"):
        VariationalELBO(ours.likelihood, ours, N)(ours(X), ours.train_targets)

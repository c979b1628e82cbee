"""The model that Ax makes: scales, updates, states."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from botorch.acquisition import LogExpectedImprovement
from gpytorch.likelihoods import PoissonLikelihood
from scipy import integrate, stats
from torch import Tensor

from seqgp.ax import model as ax_model
from seqgp.ax.acquisition import TimesValidity
from seqgp.ax.expected_outcome import LinkPosterior
from seqgp.ax.model import AxSequentialGP
from seqgp.ax.observed import Observed, what_is_new

OPTIONS: dict[str, dict[str, Any]] = {
    "gaussian": {},
    "poisson": {"likelihood_name": "poisson"},
    "binomial": {"likelihood_name": "binomial", "total_count": 20},
    "bernoulli": {"likelihood_name": "bernoulli"},
    "validity": {"likelihood_name": "bernoulli", "jumps": True},
}


def data(kind: str, n: int = 40) -> tuple[Tensor, Tensor]:
    X = torch.rand(n, 2, dtype=torch.double)
    f = torch.sin(5 * X).sum(-1, keepdim=True)
    if kind == "poisson":
        return X, torch.poisson(3 + 2 * f.clamp(-1, 1))
    if kind == "binomial":
        return X, torch.binomial(torch.full_like(f, 20.0), torch.sigmoid(f)) / 20
    if kind in ("bernoulli", "validity"):
        return X, (f > 0.5).to(X)
    return X, f + 0.1 * torch.randn_like(f)


def same_hyperparameters(source: AxSequentialGP, target: AxSequentialGP) -> None:
    parameters = dict(source.named_parameters())
    with torch.no_grad():
        for name, parameter in target.named_parameters():
            parameter.copy_(parameters[name])
    target.refresh()


# -------------------------------------------------------------------- what is new


def test_what_is_new_against_brute_force() -> None:
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        rows = torch.randint(0, 3, (8, 2), generator=generator).double()
        order = torch.randperm(8, generator=generator)
        known, given = rows[:5], rows[order]
        new = what_is_new(*(Observed(each[:, :1], each[:, 1:]) for each in (known, given)))
        assert new is not None
        rest = sorted(map(tuple, given[new].tolist()))
        left = list(map(tuple, rows.tolist()))
        for row in map(tuple, known.tolist()):
            left.remove(row)
        assert rest == sorted(left)


def test_a_changed_observation_is_no_addition() -> None:
    X = torch.rand(5, 1)
    assert what_is_new(Observed(X, X), Observed(X, X + 1e-6)) is None
    assert what_is_new(Observed(X, X), Observed(X[:4], X[:4])) is None
    assert what_is_new(Observed(X, X), Observed(X, X, X)) is None  # noise is known now


# -------------------------------------------------------------------- updates


@pytest.mark.parametrize("kind", list(OPTIONS))
def test_an_updated_model_is_one_with_all_data(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the same hyperparameters: the posterior given old and new data, in whatever order."""
    monkeypatch.setattr(ax_model, "LEARN_GROWTH", 2.0)
    X, Y = data(kind)
    old = AxSequentialGP(X[:35], Y[:35], **OPTIONS[kind])
    old.learn()
    order = torch.randperm(40)
    updated = AxSequentialGP(X[order], Y[order], previous=old, **OPTIONS[kind])
    assert (updated.num_updates, updated.num_data) == (1, 40)
    scratch = AxSequentialGP(X, Y, **OPTIONS[kind])
    same_hyperparameters(updated, scratch)
    x = torch.rand(6, 2, 2, dtype=torch.double)
    ours, theirs = updated.posterior(x), scratch.posterior(x)
    torch.testing.assert_close(ours.mean, theirs.mean, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(ours.variance, theirs.variance, rtol=1e-5, atol=1e-6)


def test_the_previous_model_stays_as_it_was() -> None:
    X, Y = data("poisson")
    old = AxSequentialGP(X[:36], Y[:36], likelihood_name="poisson")
    old.learn()
    x = torch.rand(5, 2, dtype=torch.double)
    before, state = old.posterior(x).mean, copy.deepcopy(old.state_dict())
    new = AxSequentialGP(X, Y, likelihood_name="poisson", previous=old)
    assert torch.equal(old.posterior(x).mean, before)
    assert all(torch.equal(value, state[name]) for name, value in old.state_dict().items())
    shared = {id(p) for p in old.parameters()} & {id(p) for p in new.parameters()}
    assert not shared
    assert new.variational_strategy.model is new
    assert new.outcome_transform.likelihood is new.likelihood


def test_an_update_learns_hyperparameters_now_and_then() -> None:
    X, Y = data("gaussian", 60)
    model = AxSequentialGP(X[:50], Y[:50])
    model.learn()
    learnt = [model.covar_module.lengthscale.detach().clone()]
    for n in (51, 52, 53):
        model = AxSequentialGP(X[:n], Y[:n], previous=model)
        learnt.append(model.covar_module.lengthscale.detach().clone())
    assert torch.equal(learnt[1], learnt[0])
    assert not torch.equal(learnt[2], learnt[1])  # 52 is 3 % more than 50
    assert torch.equal(learnt[3], learnt[2])
    assert model.num_updates == 3


def test_what_is_fitted_from_scratch() -> None:
    X, Y = data("gaussian", 60)
    old = AxSequentialGP(X[:50], Y[:50])
    assert AxSequentialGP(X, Y, previous=old).num_updates == 1  # up to 60
    assert AxSequentialGP(X, Y, previous=old, growth=1.1).num_updates == 0
    assert AxSequentialGP(X[:55], Y[:55] + 1, previous=old).num_updates == 0  # other values
    assert AxSequentialGP(X[:50], Y[:50], previous=old).num_data == 50  # nothing new


def test_an_update_that_goes_wrong_is_followed_by_a_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    X, Y = data("gaussian")
    old = AxSequentialGP(X[:36], Y[:36])

    def update(self: Any, *args: Any, **kwargs: Any) -> None:
        raise FloatingPointError

    monkeypatch.setattr(AxSequentialGP, "update", update)
    model = AxSequentialGP(X, Y, previous=old)
    model.learn()
    assert (model.num_updates, model.num_data) == (0, 40)
    fresh = AxSequentialGP(X, Y)
    fresh.learn()
    torch.testing.assert_close(model.posterior(X).mean, fresh.posterior(X).mean)


def test_more_data_than_inducing_points() -> None:
    X, Y = data("gaussian", 80)
    model = AxSequentialGP(X[:70], Y[:70], max_inducing=30)
    model.learn()
    model = AxSequentialGP(X, Y, max_inducing=30, previous=model)
    assert model.variational_strategy.inducing_points.shape[-2] <= 30
    error = model.posterior(X).mean - Y
    assert error.square().mean().sqrt() < 0.2


def test_known_noise() -> None:
    X, Y = data("gaussian")
    noise = torch.full_like(Y, 0.01)
    old = AxSequentialGP(X[:36], Y[:36], noise[:36])
    new = AxSequentialGP(X, Y, noise, previous=old)
    assert new.num_updates == 1
    assert torch.equal(new.likelihood_arguments["noise"], noise.squeeze(-1))


def test_one_class_is_not_fitted() -> None:
    X = torch.rand(10, 2, dtype=torch.double)
    model = AxSequentialGP(X, torch.ones(10, 1, dtype=torch.double), **OPTIONS["validity"])
    before = model.covar_module.outputscale.detach().clone()
    model.learn()
    assert torch.equal(model.covar_module.outputscale, before)
    assert (model.posterior(X).mean > 0.8).all()


# -------------------------------------------------------------------- scales


def test_expected_counts_against_integration() -> None:
    X, Y = data("poisson")
    model = AxSequentialGP(X, Y, likelihood_name="poisson")
    x = torch.rand(3, 2, dtype=torch.double)
    with torch.no_grad():
        posterior = model.posterior(x)
    assert isinstance(posterior, LinkPosterior)
    for i in range(3):
        latent = stats.norm(
            float(posterior.latent.mean[i]), float(posterior.latent.variance[i].sqrt())
        )

        def moment(power: int, latent: Any = latent) -> float:
            def integrand(f: float) -> float:
                rate = float(torch.nn.functional.softplus(torch.tensor(f, dtype=torch.double)))
                return rate**power * latent.pdf(f)

            lower, upper = latent.mean() - 12 * latent.std(), latent.mean() + 12 * latent.std()
            return integrate.quad(integrand, lower, upper, epsabs=1e-11, limit=200)[0]

        mean, second = moment(1), moment(2)
        assert float(posterior.mean[i]) == pytest.approx(mean, rel=1e-6)
        assert float(posterior.variance[i]) == pytest.approx(second - mean**2, rel=1e-5)


def test_expected_outcomes_against_the_closed_form() -> None:
    X, Y = data("bernoulli")
    posterior: Any = AxSequentialGP(X, Y, likelihood_name="bernoulli").posterior(X)
    latent = posterior.latent
    expected = torch.special.ndtr(latent.mean / (1 + latent.variance).sqrt())
    torch.testing.assert_close(posterior.mean, expected, rtol=1e-6, atol=1e-7)


def test_samples_are_on_the_scale_of_the_metric() -> None:
    X, Y = data("binomial")
    model = AxSequentialGP(X, Y, **OPTIONS["binomial"])
    posterior = model.posterior(X[:4])
    samples = posterior.rsample(torch.Size([4000]))
    assert ((samples >= 0) & (samples <= 1)).all()
    error = (posterior.variance / 4000).sqrt()
    assert ((samples.mean(0) - posterior.mean).abs() < 5 * error).all()


def test_observations_of_a_binomial_metric_are_rates() -> None:
    X, Y = data("binomial")
    model = AxSequentialGP(X, Y, **OPTIONS["binomial"])
    rate, observed = model.posterior(X), model.posterior(X, observation_noise=True)
    torch.testing.assert_close(observed.mean, rate.mean, rtol=1e-4, atol=1e-4)
    noise = rate.mean * (1 - rate.mean) / 20
    assert (observed.variance > 0.8 * noise).all()
    samples = observed.rsample(torch.Size([8])) * 20
    torch.testing.assert_close(samples, samples.round())


def test_a_latent_gaussian_is_not_taken_for_the_outcome() -> None:
    from botorch.acquisition.objective import ScalarizedPosteriorTransform

    X, Y = data("poisson")
    model = AxSequentialGP(X, Y, likelihood_name="poisson")
    transform = ScalarizedPosteriorTransform(torch.ones(1, dtype=torch.double))
    with pytest.raises(AttributeError):
        model.posterior(X[:2], posterior_transform=transform)


# -------------------------------------------------------------------- states and errors


@pytest.mark.parametrize("kind", ["gaussian", "bernoulli"])
def test_a_state_brings_hyperparameters_and_no_data(kind: str) -> None:
    """Cross validation: what is left out must not be known through the state."""
    X, Y = data(kind)
    full = AxSequentialGP(X, Y, **OPTIONS[kind])
    full.learn()
    fold, expected = (AxSequentialGP(X[5:], Y[5:], **OPTIONS[kind]) for _ in range(2))
    same_hyperparameters(full, expected)
    fold.load_state_dict(full.state_dict())
    ours, theirs = fold.posterior(X), expected.posterior(X)
    torch.testing.assert_close(ours.mean, theirs.mean, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(ours.variance, theirs.variance, rtol=1e-5, atol=1e-6)
    assert not torch.allclose(ours.mean, full.posterior(X).mean, atol=1e-4)


def test_categorical_inputs() -> None:
    X = torch.rand(40, 3, dtype=torch.double)
    X[:, 1] = torch.randint(0, 3, (40,)).double()
    offsets = torch.tensor([0.0, 2.0, -1.0], dtype=torch.double)
    Y = (torch.sin(5 * X[:, 0]) + offsets[X[:, 1].long()]).unsqueeze(-1)
    model = AxSequentialGP(X, Y, categorical_features=[1])
    model.learn()
    assert (model.posterior(X).mean - Y).square().mean().sqrt() < 0.2
    alone = AxSequentialGP(X[:, 1:2], Y, categorical_features=[0])
    assert alone.posterior(X[:3, 1:2]).mean.shape == (3, 1)


@pytest.mark.parametrize("kind", list(OPTIONS))
def test_every_tensor_follows_its_inputs(kind: str) -> None:
    """See tests/test_devices.py: on the default device "meta", a tensor holds no data."""
    X, Y = data(kind)
    x = torch.rand(5, 2, 2, dtype=torch.double)
    means = []
    for device in ("cpu", "meta"):
        torch.set_default_device(device)
        try:
            model = AxSequentialGP(X[:39], Y[:39], **OPTIONS[kind])
            model = AxSequentialGP(X, Y, previous=model, **OPTIONS[kind])
            failed, bounds = X[:3], torch.stack([X.amin(0), X.amax(0)])
            factor = None
            if kind == "validity":
                acqf = TimesValidity(LogExpectedImprovement(model, X[0, 0]), model, failed, bounds)
                factor = acqf.log_factor(x)
            means.append((model.posterior(x).mean, factor))
        finally:
            torch.set_default_device(None)
    for ours, theirs in zip(*means, strict=True):
        if ours is not None:
            torch.testing.assert_close(ours, theirs)


def test_float32() -> None:
    X, Y = data("poisson")
    model = AxSequentialGP(X, Y, likelihood_name="poisson")
    expected = model.posterior(X).mean
    model = model.float()
    assert model.observed.X.dtype == torch.float32
    mean = model.posterior(X.float()).mean
    assert mean.dtype == torch.float32
    torch.testing.assert_close(mean, expected.float(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"likelihood_name": "beta"}, "expected one of 'gaussian'"),
        ({"likelihood_name": "binomial"}, "total_count"),
        ({"total_count": 20}, "total_count"),
        (
            {"likelihood_name": "binomial", "total_count": 7},
            "train_Y: expected a rate of success",
        ),
        ({"likelihood_name": "poisson"}, "not a possible observation of PoissonLikelihood"),
        ({"likelihood_name": "bernoulli"}, "labels must be 0 or 1"),
    ],
)
def test_errors(options: dict[str, Any], message: str) -> None:
    X = torch.rand(5, 1, dtype=torch.double)
    with pytest.raises(ValueError, match=message):
        AxSequentialGP(X, torch.full_like(X, 0.25), **options)


def test_special_parameters_that_are_not_supported() -> None:
    from botorch.utils.datasets import SupervisedDataset

    X = torch.rand(5, 1, dtype=torch.double)
    dataset = SupervisedDataset(X, X, feature_names=["x"], outcome_names=["y"])
    with pytest.raises(NotImplementedError, match="fidelity_features"):
        AxSequentialGP.construct_inputs(dataset, fidelity_features=[0])


def test_the_likelihood_of_counts_is_gpytorch_s() -> None:
    X, Y = data("poisson")
    assert isinstance(AxSequentialGP(X, Y, likelihood_name="poisson").likelihood, PoissonLikelihood)

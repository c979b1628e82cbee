from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from botorch.acquisition import qLogNoisyExpectedImprovement
from botorch.acquisition.multi_objective import qNoisyExpectedHypervolumeImprovement
from botorch.acquisition.objective import GenericMCObjective, ScalarizedPosteriorTransform
from botorch.exceptions.errors import UnsupportedError
from botorch.fit import fit_gpytorch_mll
from botorch.models import ModelListGP, SingleTaskGP
from botorch.models.model import ModelList
from botorch.models.transforms import Normalize, Standardize
from botorch.posteriors import GPyTorchPosterior, PosteriorList
from botorch.sampling import ListSampler, SobolQMCNormalSampler
from gpytorch.means import ZeroMean
from gpytorch.mlls import ExactMarginalLogLikelihood, SumMarginalLogLikelihood
from torch import Tensor

from seqgp import DualELBO, SequentialGP
from seqgp.streaming.memory import MemoryOptions
from tests.helpers import (
    CASES,
    assert_close,
    assert_untouched,
    latent,
    make_inputs,
    make_kernel,
    make_mean,
    plain_improvement,
    state_of,
    unscaled,
)
from tests.models.helpers import assert_same, data, gaussian_likelihood, observe, pair

pytestmark = pytest.mark.usefixtures("float64")

LENGTHSCALES, CONSTANTS = [0.3, 0.5, 0.8], [-0.2, 0.1, 0.4]
NAMES = [
    "gaussian",
    "fixed_noise",
    "bernoulli",
    "poisson",
    "binomial",
    "overdispersed_binomial",
    "ordinal",
]
each = pytest.mark.parametrize("name", NAMES)


def sampler(*shape: int) -> SobolQMCNormalSampler:
    return SobolQMCNormalSampler(torch.Size(shape), seed=0)


def targets(name: str, X: Tensor) -> tuple[Tensor, dict[str, Any]]:
    """Three columns, each of another function."""
    columns = [observe(name, (X + 0.2 * k) % 1) for k in range(3)]
    arguments = {
        key: value.expand(-1, 3) if key == "noise" else value
        for key, value in columns[0][1].items()
    }
    return torch.cat([Y for Y, _ in columns], -1), arguments


def of_output(arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments for one of the columns."""
    return {key: value[:, :1] if key == "noise" else value for key, value in arguments.items()}


def three(name: str, **kwargs: Any) -> tuple[SequentialGP, list[SequentialGP]]:
    """A model of three outputs, and three models of one with the same hyperparameters."""
    X = make_inputs(12, 2)
    Y, arguments = targets(name, X)[0], CASES[name].arguments(12)
    shape = torch.Size([3])
    kernel = make_kernel(torch.tensor(LENGTHSCALES).reshape(3, 1, 1), batch_shape=shape)
    mean = make_mean(batch_shape=shape)
    mean.initialize(constant=torch.tensor(CONSTANTS))
    kwargs = {"likelihood": CASES[name].make(), "likelihood_arguments": arguments, **kwargs}
    joint = SequentialGP(X, Y, covar_module=kernel, mean_module=mean, **copy.deepcopy(kwargs))
    return joint, [
        SequentialGP(
            X,
            Y[:, k : k + 1],
            covar_module=make_kernel(LENGTHSCALES[k]),
            mean_module=make_mean(CONSTANTS[k]),
            **copy.deepcopy(kwargs),
        )
        for k in range(3)
    ]


def totals(name: str, q: int) -> dict[str, Any]:
    return CASES[name].arguments(q) if name.endswith("binomial") else {}


def assert_columns(joint: Any, singles: list[Any], tol: float = 1e-6) -> None:
    """The outputs of one posterior are the posteriors of several."""
    for k, single in enumerate(singles):
        assert_close(joint.mean[..., k : k + 1], single.mean, tol)
        assert_close(joint.variance[..., k : k + 1], single.variance, tol)


# -------------------------------------------------------------------- several outputs


@each
@pytest.mark.parametrize("inducing", [None, 5])
def test_outputs_are_separate_models(name: str, inducing: int | None) -> None:
    Z = None if inducing is None else make_inputs(inducing, 2)
    joint, singles = three(name, inducing_points=Z)
    for X in (make_inputs(5, 2), make_inputs(4, 5, 2)):
        assert_columns(joint.posterior(X), [model.posterior(X) for model in singles])
        observed = {"observation_noise": True, **totals(name, 5)}
        assert_columns(
            joint.posterior(X, **observed), [model.posterior(X, **observed) for model in singles]
        )


@each
def test_conditioning(name: str) -> None:
    joint, singles = three(name)
    X, test = make_inputs(4, 2, 2), make_inputs(5, 2)
    Y, arguments = targets(name, X)
    fantasies = joint.condition_on_observations(X, Y, tol=1e-10, **arguments)
    assert fantasies.batch_shape == (4,)
    assert_columns(
        fantasies.posterior(test),
        [
            model.condition_on_observations(
                X, Y[..., k : k + 1], tol=1e-10, **of_output(arguments)
            ).posterior(test)
            for k, model in enumerate(singles)
        ],
    )


@each
def test_fantasies(name: str) -> None:
    joint, _ = three(name)
    X, test = make_inputs(4, 2, 2), make_inputs(5, 2)
    fantasies = joint.fantasize(X, sampler(6), **totals(name, 2))
    posterior = fantasies.posterior(test)
    assert fantasies.batch_shape == (6, 4)
    assert posterior.mean.shape == posterior.variance.shape == (6, 4, 5, 3)
    assert (posterior.variance.mean((0, 1)) < joint.posterior(test).variance).all()
    Y = sampler(6)(joint.posterior(X, observation_noise=True, **totals(name, 2)))
    again = joint.condition_on_observations(X, Y, **totals(name, 2))
    assert_same(posterior, again.posterior(test))


@each
@pytest.mark.parametrize("idcs", [[0], [2, 0], [-1], [0, 1, 2]], ids=str)
def test_subset_output(name: str, idcs: list[int]) -> None:
    joint, singles = three(name)
    before = state_of(joint)
    subset, X = joint.subset_output(idcs), make_inputs(5, 2)
    assert subset.num_outputs == len(idcs)
    expected = [singles[k] for k in idcs]
    assert_columns(subset.posterior(X), [model.posterior(X) for model in expected])
    assert_columns(
        joint.posterior(X, output_indices=idcs), [model.posterior(X) for model in expected]
    )
    # It is a model like any other.
    new = make_inputs(2, 2)
    Y, arguments = targets(name, new)
    Y, some = Y[..., idcs], {k: v[:, idcs] if k == "noise" else v for k, v in arguments.items()}
    assert_columns(
        subset.condition_on_observations(new, Y, tol=1e-10, **some).posterior(X),
        [
            model.condition_on_observations(
                new, Y[..., k : k + 1], tol=1e-10, **of_output(arguments)
            ).posterior(X)
            for k, model in enumerate(expected)
        ],
    )
    assert subset.fantasize(X, sampler(2), **totals(name, 5)).batch_shape == (2,)
    subset = copy.deepcopy(subset)
    subset.refresh()
    assert_columns(subset.posterior(X), [model.posterior(X) for model in expected])
    assert_untouched(joint, before)


def test_subset_output_of_a_batch_with_transforms() -> None:
    shape = torch.Size([2])
    transform = Standardize(3, batch_shape=shape)
    model, _ = pair(outputs=3, batch_shape=shape, outcome_transform=transform)
    X, idcs = make_inputs(5, 2), [2, 1]
    full, subset = model.posterior(X), model.subset_output(idcs).posterior(X)
    assert_close(subset.mean, full.mean[..., idcs])
    assert_close(subset.variance, full.variance[..., idcs])


@pytest.mark.parametrize("name", ["gaussian", "bernoulli"])
def test_subset_output_in_a_stream(name: str) -> None:
    """With all that a model of several outputs has folded into its summary."""
    joint, singles = three(name, inducing_points=make_inputs(6, 2))
    X, test, single = make_inputs(7, 2), make_inputs(5, 2), singles[1]
    Y, _ = targets(name, X)
    options: dict[str, Any] = {"memory": MemoryOptions(4, policy="recent"), "learn": False}
    joint.update(X, Y, **options)
    subset = joint.subset_output([1])
    subset.update(X + 0.1, Y[:, 1:2], **options)
    for shift in (0.0, 0.1):
        single.update(X + shift, Y[:, 1:2], **options)
    assert_same(subset.posterior(test), single.posterior(test))


def test_what_cannot_be_selected() -> None:
    joint, _ = three("gaussian")
    with pytest.raises(ValueError, match=r"expected indices of the 3 outputs, got \[3\]"):
        joint.subset_output([3])
    with pytest.raises(ValueError, match="latent functions of a likelihood cannot be separated"):
        data("softmax").model().subset_output([0])
    fantasy = joint.condition_on_observations(make_inputs(1, 2), torch.zeros(1, 3))
    with pytest.raises(ValueError, match="select the outputs first"):
        fantasy.subset_output([0])


def test_posterior_transform() -> None:
    joint, singles = three("bernoulli")
    weights, X = torch.tensor([1.0, -2.0, 0.5]), make_inputs(5, 2)
    transformed = joint.posterior(X, posterior_transform=ScalarizedPosteriorTransform(weights))
    posteriors = [model.posterior(X) for model in singles]
    mean = sum(w * p.mean for w, p in zip(weights, posteriors, strict=True))
    covariance = sum(w**2 * p.covariance_matrix for w, p in zip(weights, posteriors, strict=True))
    assert_close(transformed.mean, mean)
    assert_close(transformed.covariance_matrix, covariance)


@plain_improvement
@pytest.mark.parametrize("cache_root", [True, False])
def test_hypervolume_improvement_is_that_of_botorch(cache_root: bool) -> None:
    """Not its logarithm, for which BoTorch compiles an extension when it is used first."""
    values = [
        qNoisyExpectedHypervolumeImprovement(
            model,
            ref_point=[-2.0, -2.0],
            X_baseline=make_inputs(12, 2),
            sampler=sampler(16),
            cache_root=cache_root,
        )(make_inputs(3, 2, 2))
        for model in pair(outputs=2)
    ]
    assert_close(*values)


def test_softmax_with_cached_root() -> None:
    """The latents of one likelihood are outputs as well: an objective of all of them."""

    model, objective = (
        data("softmax").model(),
        GenericMCObjective(lambda Y, X: Y.softmax(-1)[..., 0]),
    )
    values = [
        qLogNoisyExpectedImprovement(
            model, make_inputs(12, 2), objective=objective, sampler=sampler(4096), cache_root=cache
        )(make_inputs(3, 1, 2)).exp()
        for cache in (True, False)
    ]
    assert_close(*values, 1 / 64)  # other samples: the standard error is smaller than this


# -------------------------------------------------------------------- lists of models


def mixed() -> list[Any]:
    """Gaussian, Bernoulli, and BoTorch's exact model, each of the same inputs."""
    _, exact = pair()
    return [data("gaussian").model(), data("bernoulli").model(), exact]


@pytest.mark.parametrize("kind", [ModelListGP, ModelList])
def test_list_posterior(kind: Any) -> None:
    models, X = mixed(), make_inputs(4, 5, 2)
    joint = kind(*models)
    assert joint.num_outputs == 3
    posterior = joint.posterior(X)
    assert isinstance(posterior, GPyTorchPosterior if kind is ModelListGP else PosteriorList)
    assert_columns(posterior, [model.posterior(X) for model in models])
    assert posterior.rsample(torch.Size([2])).shape == (2, 4, 5, 3)
    subset = joint.posterior(X, output_indices=[2, 1] if kind is ModelListGP else [1, 2])
    assert subset.mean.shape == (4, 5, 2)


def test_list_of_observations() -> None:
    """A list of posteriors can be of any kind; `ModelListGP` wants them all Gaussian."""
    models, X = mixed(), make_inputs(5, 2)
    posterior = ModelList(*models).posterior(X, observation_noise=True)
    assert_columns(posterior, [m.posterior(X, observation_noise=True) for m in models])
    with pytest.raises(UnsupportedError, match="not jointly Gaussian"):
        ModelListGP(*models).posterior(X, observation_noise=True)


@pytest.mark.parametrize("kind", [ModelListGP, ModelList])
def test_list_fantasies(kind: Any) -> None:
    models, X, test = mixed(), make_inputs(4, 2, 2), make_inputs(5, 2)
    joint = kind(*models).fantasize(X, ListSampler(*(sampler(6) for _ in models)))
    expected = [model.fantasize(X, sampler(6)).posterior(test) for model in models]
    assert_columns(joint.posterior(test), expected)


def test_list_conditioning() -> None:
    models, X, test = mixed(), make_inputs(2, 2), make_inputs(5, 2)
    Y = torch.cat([observe(name, X)[0] for name in ("gaussian", "bernoulli", "gaussian")], -1)
    joint = ModelListGP(*models)
    joint.posterior(test)  # fills the caches of the exact model
    conditioned = joint.condition_on_observations([X, X, X], Y)
    assert isinstance(conditioned, ModelListGP)
    expected = [
        model.condition_on_observations(X, Y[:, k : k + 1]).posterior(test)
        for k, model in enumerate(models)
    ]
    assert_columns(conditioned.posterior(test), expected)


def test_list_of_several_outputs() -> None:
    joint, _ = three("poisson")
    models, X = [joint, data("bernoulli").model()], make_inputs(5, 2)
    posterior = ModelListGP(*models).posterior(X)
    assert posterior.mean.shape == (5, 4)
    assert_close(posterior.mean, torch.cat([m.posterior(X).mean for m in models], -1))
    assert_close(posterior.variance, torch.cat([m.posterior(X).variance for m in models], -1))


@unscaled
def test_list_is_fitted() -> None:
    X = make_inputs(15, 2)
    models = [
        SequentialGP(X, observe("gaussian", X)[0], likelihood=gaussian_likelihood()),
        SequentialGP(X, observe("bernoulli", X)[0], likelihood=CASES["bernoulli"].make()),
        SingleTaskGP(X, observe("gaussian", X)[0]),
    ]
    joint = ModelListGP(*models)

    def objective(likelihood: Any, model: Any) -> Any:
        exact = not isinstance(model, SequentialGP)
        return (ExactMarginalLogLikelihood if exact else DualELBO)(likelihood, model)

    mll = SumMarginalLogLikelihood(joint.likelihood, joint, mll_cls=objective)
    before = [model.covar_module.lengthscale.clone() for model in models]
    assert not fit_gpytorch_mll(mll).training
    for model, old in zip(models, before, strict=True):
        assert not torch.equal(model.covar_module.lengthscale, old)


@unscaled
@pytest.mark.parametrize("shape", [(3, 2), (2, 2), (5, 3, 2), (4, 1, 2, 2)])
def test_joint_covariance_of_outputs_with_their_own_lengthscales(shape: tuple[int, ...]) -> None:
    """Batches of inputs, also as many points as outputs, whose dimensions could be confused."""
    X = make_inputs(12, 2)
    Y = torch.stack([torch.sin(6 * X).sum(-1), torch.cos(3 * X).sum(-1)], -1)
    models: list[Any] = [SequentialGP(X, Y), SingleTaskGP(X, Y)]
    for model in models:
        model.covar_module.lengthscale = torch.tensor([[[0.2, 0.3]], [[1.5, 0.9]]])
        model.likelihood.noise = torch.tensor([[0.1], [0.2]])
        model.mean_module.constant.data.zero_()
    models[0].refresh()
    test = make_inputs(*shape)
    transform = ScalarizedPosteriorTransform(torch.tensor([1.0, 2.0]))
    ours, exact = (model.posterior(test) for model in models)
    assert_close(ours.distribution.covariance_matrix, exact.distribution.covariance_matrix, 1e-5)
    ours, exact = (model.posterior(test, posterior_transform=transform) for model in models)
    assert_close(ours.mean, exact.mean, 1e-5)
    assert_close(ours.distribution.covariance_matrix, exact.distribution.covariance_matrix, 1e-5)


@unscaled
def test_slices_of_a_batch_of_models() -> None:
    X = make_inputs(3, 10, 2)
    model = SequentialGP(X, torch.sin(6 * X).sum(-1, keepdim=True))
    model.covar_module.lengthscale = torch.tensor([[0.2, 0.3], [1.5, 0.9], [0.5, 0.5]]).unsqueeze(1)
    model.refresh()
    posterior = model.posterior(make_inputs(4, 1, 5, 2)).distribution
    lazy, dense = posterior.lazy_covariance_matrix, posterior.covariance_matrix
    assert_close(lazy[0].to_dense(), dense[0], 1e-12)
    assert_close(lazy[..., 1:3, :2].to_dense(), dense[..., 1:3, :2], 1e-12)


@unscaled
def test_each_output_has_its_own_fixed_noise() -> None:
    X, test = make_inputs(12, 2), make_inputs(4, 2)
    Y = torch.stack([torch.sin(6 * X).sum(-1), torch.cos(3 * X).sum(-1)], -1)
    noise = torch.tensor([0.01, 4.0]).expand_as(Y)
    ours, exact = (
        SequentialGP(X, Y, train_Yvar=noise, outcome_transform=None),
        SingleTaskGP(X, Y, train_Yvar=noise, outcome_transform=None),
    )
    for indices in ([0, 1], [1, 0]):
        options: dict[str, Any] = {"output_indices": indices, "observation_noise": True}
        a, b = ours.posterior(test, **options), exact.posterior(test, **options)
        assert_close(a.variance, b.variance, 1e-5)
    second = ours.subset_output([1])
    both = ours.posterior(test, observation_noise=True).variance
    assert_close(second.posterior(test, observation_noise=True).variance, both[:, 1:], 1e-10)
    conditioned = second.condition_on_observations(test, torch.zeros(4, 1))
    assert conditioned.posterior(X).mean.shape == (12, 1)
    sampler = SobolQMCNormalSampler(torch.Size([3]))
    assert second.fantasize(test.unsqueeze(1), sampler).posterior(X).mean.shape == (3, 4, 12, 1)


def test_list_with_given_noise() -> None:
    """BoTorch's lists count outputs together, and ask the second model for output 1 of its one."""
    ours, exact = zip(*(pair(n=8 + k) for k in range(2)), strict=True)
    X, noise = make_inputs(3, 2), 0.1 + torch.rand(3, 2)
    lists = ModelListGP(*ours), ModelListGP(*exact)
    assert_same(*(models.posterior(X, observation_noise=noise) for models in lists))


def test_list_with_given_noise_of_several_outputs() -> None:
    """Where BoTorch's own models raise an error."""
    first, second = pair()[0], pair(outputs=2)[0]
    X, noise = make_inputs(3, 2), 0.1 + torch.rand(3, 3)
    joint = ModelListGP(first, second).posterior(X, observation_noise=noise)
    assert_close(joint.variance[..., :1], first.posterior(X).variance + noise[:, :1])
    assert_close(joint.variance[..., 1:], second.posterior(X).variance + noise[:, 1:])


@pytest.mark.parametrize("idcs", [[0], [1], [2, 0]], ids=str)
def test_given_noise_of_some_outputs(idcs: list[int]) -> None:
    ours, exact = pair(outputs=3)
    X, noise = make_inputs(4, 2), 0.1 + torch.rand(4, 3)
    part = ours.posterior(X, output_indices=idcs, observation_noise=noise)
    full = exact.posterior(X, observation_noise=noise)  # BoTorch cannot select just one
    assert_close(part.mean, full.mean[:, idcs])
    assert_close(part.variance, full.variance[:, idcs])


def test_subset_of_all_outputs_is_a_copy() -> None:
    model, X = pair(outputs=2)[0], make_inputs(4, 2)
    before = model.posterior(X).mean
    part = model.subset_output([0, 1])
    assert_close(part.posterior(X).mean, before)
    part.update(X, torch.ones(4, 2), learn=False)
    assert_close(model.posterior(X).mean, before)


@pytest.mark.parametrize("batch_shape", [(3,), (2, 3)], ids=str)
@pytest.mark.parametrize("idcs", [[1], [2, 0]], ids=str)
def test_subset_with_a_batch_of_zero_means(batch_shape: tuple[int, ...], idcs: list[int]) -> None:
    X = make_inputs(*batch_shape[:-1], 6, 2)
    Y = torch.stack([latent(X + 0.2 * k) for k in range(3)], -1)
    mean = ZeroMean(batch_shape=torch.Size(batch_shape))
    model = SequentialGP(X, Y, mean_module=mean, covar_module=make_kernel(), outcome_transform=None)
    test = make_inputs(4, 2)
    part = model.subset_output(idcs).posterior(test)
    assert_close(part.mean, model.posterior(test).mean[..., idcs])
    assert_close(part.variance, model.posterior(test).variance[..., idcs])


def test_training_inputs_are_repeated_for_outputs() -> None:
    """As BoTorch has them, and it can be given them again."""
    ours, exact = pair(outputs=2)
    assert_close(ours.train_inputs[0], exact.train_inputs[0])
    X = ours.train_inputs[0][:, :4]
    assert_close(ours.train()(X).mean, ours.train()(X[0]).mean)
    ours.set_train_data(X, ours.train_targets[:, :4], strict=False)
    assert ours.num_data == 4
    with pytest.raises(ValueError, match="the same inputs for all outputs"):
        ours.set_train_data(torch.stack([X[0], X[1] + 1]), strict=False)


def test_modes_of_a_list_with_transforms() -> None:
    """A list puts the inputs of its models into the mode that it is in."""
    pairs = [pair(n=6 + k, input_transform=Normalize(2)) for k in range(2)]
    ours, exact = (ModelListGP(*models) for models in zip(*pairs, strict=True))
    for mode in (True, False, True):
        for a, b in zip(ours.train(mode).models, exact.train(mode).models, strict=True):
            assert_close(a.train_inputs[0], b.train_inputs[0])
    X = make_inputs(3, 2)
    assert_same(ours.posterior(X), exact.posterior(X))


def test_calls_take_a_dimension_for_the_outputs() -> None:
    """As BoTorch's do in eval mode; without batch dimensions, none is needed."""
    X = make_inputs(4, 3, 2)
    ours, exact = (model.eval() for model in pair(outputs=2))
    for inputs in (X[0], X[:1], X[:2], X.unsqueeze(1), X.unsqueeze(1).expand(4, 2, 3, 2)):
        f, expected = ours(inputs), exact(inputs)
        assert f.mean.shape == expected.mean.shape
        assert_close(f.mean, expected.mean, 1e-6)
        assert_close(f.variance, expected.variance, 1e-6)
    with pytest.raises(RuntimeError, match="batch dimensions of X must match"):
        pair(outputs=2, batch_shape=torch.Size([2]))[0].posterior(X)

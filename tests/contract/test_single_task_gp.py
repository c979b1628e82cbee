"""Every public method, property and mode of `SingleTaskGP`, in every shape."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from botorch.acquisition.objective import (
    ExpectationPosteriorTransform,
    ScalarizedPosteriorTransform,
)
from botorch.models import SingleTaskGP, SingleTaskVariationalGP
from botorch.models.transforms import Normalize, Standardize
from botorch.sampling import IIDNormalSampler, SobolQMCNormalSampler
from botorch.utils.datasets import SupervisedDataset

from seqgp import SequentialGP
from tests.helpers import assert_close, make_inputs, unscaled
from tests.models.helpers import assert_same, pair

pytestmark = pytest.mark.usefixtures("float64")

#: Batch shape, outputs, known noise.
SHAPES = [
    ((), 1, False),
    ((), 1, True),
    ((), 2, False),
    ((), 3, True),
    ((2,), 1, False),
    ((2,), 2, True),
    ((3, 2), 2, False),
]
each_shape = pytest.mark.parametrize(("batch_shape", "outputs", "known"), SHAPES, ids=str)


def models(batch_shape: tuple[int, ...], outputs: int, known: bool) -> tuple[Any, Any]:
    """With transforms, so that all steps of a prediction matter."""
    shape = torch.Size(batch_shape)
    return pair(
        n=7,
        outputs=outputs,
        batch_shape=shape,
        fixed_noise=known,
        input_transform=Normalize(2, bounds=torch.tensor([[-0.5, 0.0], [1.0, 2.0]])),
        outcome_transform=Standardize(outputs, batch_shape=shape),
    )


# -------------------------------------------------------------------- attributes

#: What a class has and ours has not, and why.
MISSING = {"prediction_strategy": "GPyTorch's cache of an exact GP"}


@unscaled
@pytest.mark.parametrize("kind", [SingleTaskGP, SingleTaskVariationalGP])
@pytest.mark.filterwarnings("ignore:Using an input transform with")
def test_public_attributes(kind: Any) -> None:
    X = make_inputs(8, 2)
    Y = X.sum(-1, keepdim=True)
    theirs, ours = (
        cls(X, Y, outcome_transform=None, input_transform=Normalize(2)).eval()
        for cls in (kind, SequentialGP)
    )
    theirs.posterior(X)
    public = {name for name in dir(theirs) if not name.startswith("_")}
    assert {name for name in public if not hasattr(ours, name)} <= set(MISSING)


@each_shape
def test_properties(batch_shape: tuple[int, ...], outputs: int, known: bool) -> None:
    ours, exact = models(batch_shape, outputs, known)
    assert ours.batch_shape == exact.batch_shape
    assert ours.num_outputs == exact.num_outputs
    assert ours._aug_batch_shape == exact._aug_batch_shape
    assert ours.get_batch_dimensions(make_inputs(4, 3, 2), torch.ones(4, 3, 2)) == ((4,), (4, 2))
    assert_close(ours.train_targets, exact.train_targets)
    assert ours.dtypes_of_buffers >= exact.dtypes_of_buffers
    assert isinstance(ours, SingleTaskGP)


# -------------------------------------------------------------------- posterior


@each_shape
@pytest.mark.parametrize("shape", [(1, 2), (3, 2), (4, 1, 1, 3, 2)], ids=str)
def test_posterior(
    batch_shape: tuple[int, ...], outputs: int, known: bool, shape: tuple[int, ...]
) -> None:
    ours, exact = models(batch_shape, outputs, known)
    X = make_inputs(*shape)
    for noise in (False, True):
        a, b = (model.posterior(X, observation_noise=noise) for model in (ours, exact))
        assert_same(a, b)
        samples = [SobolQMCNormalSampler(torch.Size([4]), seed=0)(each) for each in (a, b)]
        assert_close(*samples)
    given = 0.1 + torch.rand(*X.shape[:-1], outputs)
    assert_same(*(model.posterior(X, observation_noise=given) for model in (ours, exact)))


@each_shape
def test_posterior_transform(batch_shape: tuple[int, ...], outputs: int, known: bool) -> None:
    X, transform = make_inputs(4, 2), ScalarizedPosteriorTransform(torch.ones(outputs), 0.5)
    expectation = ExpectationPosteriorTransform(n_w=2, weights=torch.full((2, outputs), 0.5))
    for each in (transform, expectation):
        assert_same(
            *(
                model.posterior(X, posterior_transform=each)
                for model in models(batch_shape, outputs, known)
            )
        )


@each_shape
def test_output_indices(batch_shape: tuple[int, ...], outputs: int, known: bool) -> None:
    ours, exact = models(batch_shape, outputs, known)
    X = make_inputs(4, 2)
    full = exact.posterior(X)
    for idcs in ([0], [outputs - 1], list(range(outputs))):
        for part in (ours.posterior(X, output_indices=idcs), ours.subset_output(idcs).posterior(X)):
            assert_close(part.mean, full.mean[..., idcs])
            assert_close(part.variance, full.variance[..., idcs])


@each_shape
def test_gradients_of_the_posterior(
    batch_shape: tuple[int, ...], outputs: int, known: bool
) -> None:
    gradients = []
    for model in models(batch_shape, outputs, known):
        X = make_inputs(3, 2).requires_grad_()
        posterior = model.posterior(X)
        gradients.append(torch.autograd.grad((posterior.mean + posterior.variance).sum(), X)[0])
    assert_close(*gradients)


# -------------------------------------------------------------------- more data


@each_shape
def test_conditioning(batch_shape: tuple[int, ...], outputs: int, known: bool) -> None:
    pairs, test = models(batch_shape, outputs, known), make_inputs(3, 2)
    X = make_inputs(*batch_shape, 2, 2)
    Y = torch.randn(*batch_shape, 2, outputs, generator=torch.Generator().manual_seed(0))
    noise = {"noise": torch.full_like(Y, 0.2)} if known else {}
    posteriors = []
    for model in pairs:
        model.posterior(test)
        conditioned = model.condition_on_observations(X, Y, **noise)
        again = conditioned.posterior(test) and conditioned.condition_on_observations(
            X + 0.1, Y, **noise
        )
        assert again.batch_shape == batch_shape
        posteriors.append((conditioned.posterior(test), again.posterior(test)))
    for a, b in zip(*posteriors, strict=True):
        assert_same(a, b)


@each_shape
@pytest.mark.parametrize("sampler", [SobolQMCNormalSampler, IIDNormalSampler])
def test_fantasies(batch_shape: tuple[int, ...], outputs: int, known: bool, sampler: Any) -> None:
    X, test, posteriors = make_inputs(4, *batch_shape, 2, 2), make_inputs(3, 2), []
    for model in models(batch_shape, outputs, known):
        fantasies = model.fantasize(X, sampler(torch.Size([3]), seed=0))
        assert fantasies.batch_shape == (3, 4, *batch_shape)
        posteriors.append(fantasies.posterior(test))
    assert_same(*posteriors)


def test_fantasies_with_given_noise() -> None:
    X, test, posteriors = make_inputs(4, 2, 2), make_inputs(3, 2), []
    for model in models((), 2, True):
        sampler = SobolQMCNormalSampler(torch.Size([3]), seed=0)
        noise = torch.tensor([[0.3, 0.1]])
        posteriors.append(model.fantasize(X, sampler, observation_noise=noise).posterior(test))
    assert_same(*posteriors)


@pytest.mark.filterwarnings("ignore:Non-strict enforcement of botorch tensor conventions")
def test_fantasies_at_no_points() -> None:
    for model in models((), 2, False):
        model.posterior(make_inputs(3, 2))  # which BoTorch's has to have been asked for
        fantasies = model.fantasize(torch.zeros(4, 0, 2), SobolQMCNormalSampler(torch.Size([3])))
        assert fantasies.posterior(make_inputs(3, 2)).mean.shape == (3, 4, 3, 2)


@each_shape
def test_new_training_data(batch_shape: tuple[int, ...], outputs: int, known: bool) -> None:
    """Other targets for the same inputs; then predictions are those of a model of these."""
    posteriors = []
    for model in models(batch_shape, outputs, known):
        model.train()
        model.set_train_data(targets=model.train_targets.flip(-1), strict=True)
        if isinstance(model, SequentialGP):
            model.refresh()
        posteriors.append(model.eval().posterior(make_inputs(3, 2)))
    assert_same(*posteriors)


# -------------------------------------------------------------------- the object


@each_shape
def test_copies(batch_shape: tuple[int, ...], outputs: int, known: bool) -> None:
    ours, _ = models(batch_shape, outputs, known)
    X = make_inputs(3, 2)
    assert_same(copy.deepcopy(ours).posterior(X), ours.posterior(X))
    assert_same(pickle.loads(pickle.dumps(ours)).posterior(X), ours.posterior(X))


def test_built_from_a_data_set() -> None:
    X = make_inputs(8, 2)
    data = SupervisedDataset(
        X=X,
        Y=X.sum(-1, keepdim=True),
        Yvar=torch.full((8, 1), 0.1),
        feature_names=["a", "b"],
        outcome_names=["y"],
    )
    ours, exact = (kind(**kind.construct_inputs(data)) for kind in (SequentialGP, SingleTaskGP))
    assert_same(ours.posterior(make_inputs(3, 2)), exact.posterior(make_inputs(3, 2)))


def test_modes() -> None:
    """A new model is in train mode, after a prediction it is not; `train` and `eval` return it."""
    X = make_inputs(8, 2)
    assert all(kind(X, X[:, :1]).training for kind in (SequentialGP, SingleTaskGP))
    for model in models((), 1, False):
        assert model.train() is model
        assert model.training
        model.posterior(make_inputs(3, 2))
        assert not model.training
        assert model.eval() is model


@pytest.mark.parametrize("keep", [True, False])
def test_transforms_after_loading(keep: bool) -> None:
    """Those that have been kept do not learn other statistics, also in train mode."""
    X, learns = make_inputs(8, 2), []
    for kind in (SequentialGP, SingleTaskGP):
        model = kind(X, X[:, :1], input_transform=Normalize(2), outcome_transform=Standardize(1))
        model.load_state_dict(copy.deepcopy(model.state_dict()), keep_transforms=keep)
        learns.append((model.input_transform.training, model.outcome_transform.training))
    assert learns[0] == learns[1] == (not keep, not keep)


@each_shape
@pytest.mark.parametrize("training", [True, False])
def test_prior(batch_shape: tuple[int, ...], outputs: int, known: bool, training: bool) -> None:
    """Of training inputs, which are raw in train mode and transformed in eval mode."""
    ours, exact = (
        model.train(training).forward(*model.train_inputs)
        for model in models(batch_shape, outputs, known)
    )
    assert_close(ours.mean, exact.mean)
    assert_close(ours.covariance_matrix, exact.covariance_matrix)


def test_positional_arguments() -> None:
    """In the order of `SingleTaskGP`."""
    exact = pair(fixed_noise=True)[1]
    X, Y, Yvar = make_inputs(12, 2), exact.train_targets.unsqueeze(-1), exact.likelihood.noise
    arguments: tuple[Any, ...] = (X, Y, Yvar.unsqueeze(-1), None, exact.covar_module)
    arguments = (*arguments, exact.mean_module, None, None)
    built = [kind(*copy.deepcopy(arguments)) for kind in (SequentialGP, SingleTaskGP)]
    assert_same(*(model.eval().posterior(make_inputs(3, 2)) for model in built))


def test_single_precision() -> None:
    X = make_inputs(8, 2).float()
    model = SequentialGP(X, X.sum(-1, keepdim=True))
    assert model.posterior(X).mean.dtype == torch.float32
    assert model.double().posterior(X.double()).mean.dtype == torch.float64


@pytest.mark.filterwarnings("ignore:The model inputs are of type torch.float32")
def test_converted_models_stay_exact() -> None:
    """Inducing points are the inputs that a transform makes of converted ones, to the last bit."""
    X = (5 * make_inputs(8, 2)).float()
    models = [
        kind(X, X[:, :1].sin(), input_transform=Normalize(2)).double()
        for kind in (SequentialGP, SingleTaskGP)
    ]
    assert models[0].inducing_points_cover_data
    test = make_inputs(3, 2)
    assert_same(*(model.eval().posterior(test) for model in models))

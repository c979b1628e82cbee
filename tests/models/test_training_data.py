"""What BoTorch's functions that look at training data make of ours, and of `SingleTaskGP`."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from botorch.acquisition import LogExpectedImprovement, qLogNoisyExpectedImprovement
from botorch.acquisition.objective import ScalarizedPosteriorTransform
from botorch.acquisition.proximal import ProximalAcquisitionFunction
from botorch.cross_validation import efficient_loo_cv
from botorch.models import ModelListGP, SingleTaskGP
from botorch.models.transforms import Normalize, Standardize, Warp
from botorch.models.transforms.input import ChainedInputTransform, InputTransform
from botorch.optim.utils import get_X_baseline
from botorch.sampling import IIDNormalSampler, SobolQMCNormalSampler
from gpytorch.mlls import ExactMarginalLogLikelihood
from torch import Tensor

from seqgp import SequentialGP
from tests.helpers import EMPTY, assert_close, make_inputs, unscaled
from tests.models.helpers import assert_same, pair

pytestmark = pytest.mark.usefixtures("float64")

BOUNDS = torch.tensor([[-1.0, 0.0], [3.0, 10.0]])


def scaled(**kwargs: Any) -> tuple[SequentialGP, SingleTaskGP, Tensor]:
    """Both models with inputs and targets that are transformed, and the raw inputs."""
    kwargs = {"input_transform": Normalize(2), "outcome_transform": Standardize(1), **kwargs}
    X = BOUNDS[0] + (BOUNDS[1] - BOUNDS[0]).double() * make_inputs(12, 2)
    ours = pair(outcome_transform=None)[0]
    Y = 100 + 50 * ours.train_targets.unsqueeze(-1)
    modules = {"covar_module": ours.covar_module, "mean_module": ours.mean_module}
    modules["likelihood"] = ours.likelihood
    first, second = (
        kind(X, Y, **copy.deepcopy(modules), **copy.deepcopy(kwargs))
        for kind in (SequentialGP, SingleTaskGP)
    )
    return first.eval(), second.eval(), X


def test_training_inputs_are_those_of_botorch() -> None:
    ours, exact, X = scaled()
    assert_close(ours.train_inputs[0], exact.train_inputs[0], 1e-14)
    assert_close(ours.train_targets, exact.train_targets, 1e-14)
    for model in (ours, exact):
        assert torch.equal(model.train().train_inputs[0], X)
        assert not torch.allclose(model.eval().train_inputs[0], X)
        assert model._has_transformed_inputs
        assert torch.equal(model._original_train_inputs, X)


def test_training_data_are_copies() -> None:
    for transform in (None, Normalize(2)):
        ours, _, X = scaled(input_transform=transform)
        expected = ours.posterior(X)
        for mode in (True, False):
            ours.train(mode)
            ours.train_inputs[0].zero_()
            ours.train_targets.zero_()
            memory = ours.memory
            memory.inputs.zero_()
            memory.targets.zero_()
            memory.leverage.zero_()
        ours.refresh()
        assert_close(ours.posterior(X).mean, expected.mean, 1e-12)


@pytest.mark.parametrize("mode", [True, False], ids=["train", "eval"])
def test_training_data_can_be_set(mode: bool) -> None:
    """To what they are, in either mode: nothing changes."""
    ours, _, X = scaled()
    expected = ours.posterior(X)
    ours.train(mode)
    ours.train_inputs = ours.train_inputs
    ours.train_targets = ours.train_targets
    assert_close(ours.stream.observations.inputs, X, 1e-12)
    ours.refresh()
    assert_close(ours.posterior(X).mean, expected.mean, 1e-9)


def test_inputs_that_cannot_be_untransformed() -> None:
    class Once(InputTransform):  # without an inverse
        is_one_to_many = False
        transform_on_train = transform_on_eval = transform_on_fantasize = True

        def transform(self, X: Tensor) -> Tensor:
            return X.sin()

    ours, *_ = scaled(input_transform=Once())
    with pytest.raises(ValueError, match="train_inputs: in eval mode they are transformed"):
        ours.train_inputs = ours.train_inputs
    ours.train().train_inputs = ours.train_inputs


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("noisy", [True, False])
@pytest.mark.parametrize("name", ["normalize", "chained", "none"])
def test_leave_one_out(name: str, noisy: bool, training: bool) -> None:
    transforms = {
        "normalize": Normalize(2),
        "none": None,
        "chained": ChainedInputTransform(scale=Normalize(2), warp=Warp(d=2, indices=[0], eps=1e-4)),
    }
    ours, exact, _ = scaled(input_transform=transforms[name])
    results = [
        efficient_loo_cv(model.train(training), observation_noise=noisy) for model in (ours, exact)
    ]
    assert_close(results[0].posterior.mean, results[1].posterior.mean, 1e-8)
    assert_close(results[0].posterior.variance, results[1].posterior.variance, 1e-8)
    assert_close(results[0].observed_Y, results[1].observed_Y, 1e-10)


@pytest.mark.parametrize("outputs", [1, 2])
def test_leave_one_out_of_several_outputs_and_fixed_noise(outputs: int) -> None:
    for fixed_noise in (False, True):
        ours, exact = pair(outputs=outputs, fixed_noise=fixed_noise, outcome_transform=None)
        results = [efficient_loo_cv(model) for model in (ours, exact)]
        assert_close(results[0].posterior.mean, results[1].posterior.mean, 1e-8)
        assert_close(results[0].posterior.variance, results[1].posterior.variance, 1e-8)


def test_leave_one_out_is_what_is_left_out() -> None:
    """By brute force: the model without each of its observations."""
    ours, _, X = scaled(input_transform=Normalize(2, bounds=BOUNDS), outcome_transform=None)
    means = efficient_loo_cv(ours, observation_noise=False).posterior.mean.squeeze()
    Y = ours.train_targets.unsqueeze(-1)
    for i in (0, 5):
        rest = torch.arange(12) != i
        model = SequentialGP(
            X[rest],
            Y[rest],
            covar_module=ours.covar_module,
            mean_module=ours.mean_module,
            likelihood=ours.likelihood,
            input_transform=Normalize(2, bounds=BOUNDS),
            outcome_transform=None,
        )
        assert_close(model.posterior(X[i : i + 1]).mean.squeeze(), means[i], 1e-6)


def test_proximal() -> None:
    """The distance to the last observation is in the transformed space."""
    weights, values = torch.tensor([0.3, 0.2]), []
    ours, exact, X = scaled()
    for model in (ours, exact):
        improvement = LogExpectedImprovement(model, best_f=100.0)
        proximal = ProximalAcquisitionFunction(
            improvement, weights, transformed_weighting=True, beta=1.0
        )
        listed = ProximalAcquisitionFunction(
            qLogNoisyExpectedImprovement(
                ModelListGP(model), X, SobolQMCNormalSampler(torch.Size([8]), seed=0)
            ),
            weights,
            beta=1.0,
        )
        test = X[3:6].unsqueeze(1) + 0.1
        values.append(torch.stack([proximal(test), listed(test)]))
    assert_close(values[0], values[1], 1e-5)


def test_inputs_of_several_outputs() -> None:
    """They come once for each output, which BoTorch's functions rely on."""
    ours, exact = pair(outputs=2, input_transform=Normalize(2))
    assert_close(ours.train_inputs[0], exact.train_inputs[0], 1e-14)
    ours.train_inputs = ours.train_inputs
    assert ours.stream.observations.inputs.shape == (12, 2)
    assert_close(ours.train().train_inputs[0], exact.train().train_inputs[0])
    values, X = [], make_inputs(3, 1, 2)
    for model in (ours.eval(), exact.eval()):
        first = ScalarizedPosteriorTransform(torch.tensor([1.0, 0.5]))
        improvement = LogExpectedImprovement(model, 0.5, first)
        proximal = ProximalAcquisitionFunction(improvement, torch.tensor([0.3, 0.2]), beta=1.0)
        values.append(proximal(X))
    assert_close(values[0], values[1], 1e-5)


def test_baseline_inputs_are_as_they_were_given() -> None:
    ours, exact, X = scaled()
    for model in (ours, exact):
        improvement = LogExpectedImprovement(model, best_f=100.0)
        assert torch.equal(get_X_baseline(improvement), X)


@pytest.mark.parametrize("transform", [None, Normalize(2, bounds=BOUNDS)])
def test_conditioned_models_show_what_they_were_conditioned_on(transform: Any) -> None:
    ours, exact, X = scaled(input_transform=transform)
    test = X[:3] + 0.1
    exact.posterior(test)
    for _ in range(2):
        Y = test[:, :1] + 90
        ours, exact = (m.condition_on_observations(test, Y) for m in (ours, exact))
        assert_close(ours.train_inputs[0], exact.train_inputs[0], 1e-12)
        assert_close(ours.train_targets, exact.train_targets, 1e-12)
        test = test + 0.05
    expected = torch.cat([X, test - 0.1, test - 0.05])
    assert_close(ours._original_train_inputs, expected, 1e-14)
    assert_close(ours.train().train_inputs[0], expected, 1e-14)
    single = copy.deepcopy(ours).float()
    assert single.train_inputs[0].dtype == torch.float32
    assert len(single.train_inputs[0]) == 18


@pytest.mark.parametrize("outputs", [1, 2])
def test_fantasies_show_what_they_were_conditioned_on(outputs: int) -> None:
    ours, exact = pair(outputs=outputs)
    candidates = make_inputs(4, 2, 2).requires_grad_()
    model = ours.fantasize(candidates, SobolQMCNormalSampler(torch.Size([3]), seed=0))
    shape = torch.Size([outputs]) if outputs > 1 else EMPTY
    assert model.train_inputs[0].shape == (3, 4, *shape, 14, 2)
    known = candidates if outputs == 1 else candidates.unsqueeze(1)
    assert_close(model.train_inputs[0][..., 12:, :], known.expand(3, 4, *shape, 2, 2))
    assert not model.train_inputs[0].requires_grad
    assert model.train_targets.shape == (3, 4, *shape, 14)
    assert_close(model.train_targets[..., :12], exact.train_targets.expand(3, 4, *shape, 12))


def test_a_stream_says_that_only_the_memory_is_there() -> None:
    ours, _, X = scaled()
    ours.update(X, 100 + X[:, :1], learn=False, memory=100)
    assert len(ours.train_targets) == 24  # without a warning: they are all there
    ours.update(X, 100 + X[:, :1], learn=False, memory=7)
    with pytest.warns(UserWarning, match="the 7 observations in the memory, out of 36"):
        efficient_loo_cv(ours)
    with pytest.warns(UserWarning, match=r"model\.memory"):
        assert len(ours.train_targets) == 7


@pytest.mark.parametrize("outputs", [1, 2])
def test_data_in_botorchs_shapes(outputs: int) -> None:
    X, Y = make_inputs(5, 2), torch.randn(5, outputs)
    ours, exact = pair(outputs=outputs)
    for mine, theirs in zip(
        ours._transform_tensor_args(X, Y, Y.square()),
        exact._transform_tensor_args(X, Y, Y.square()),
        strict=True,
    ):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("given", [False, True], ids=["mean noise", "given noise"])
@pytest.mark.parametrize("outputs", [1, 2])
@pytest.mark.parametrize("batch_shape", [torch.Size(), torch.Size([2])], ids=str)
def test_fantasies_show_the_noise_that_they_have(
    batch_shape: torch.Size, outputs: int, given: bool
) -> None:
    """And so in what they predict of new observations; also twice in a row."""
    X, test = make_inputs(*batch_shape, 3, 2), make_inputs(*batch_shape, 4, 2)
    noise = torch.full((*batch_shape, 3, outputs), 0.7) if given else None
    fantasies = []
    for model in pair(outputs=outputs, fixed_noise=True, batch_shape=batch_shape):
        own = model.likelihood.noise.clone()
        model.posterior(test)  # an exact GP needs its caches
        sampler = IIDNormalSampler(torch.Size([2]), seed=0)
        fantasies.append(model.fantasize(X, sampler, observation_noise=noise))
        assert torch.equal(model.likelihood.noise, own)
    ours, exact = fantasies
    known = exact.likelihood.noise
    assert_close(ours.likelihood.noise.expand_as(known), known, 1e-12)
    variances = [model.posterior(test, observation_noise=True).variance for model in fantasies]
    assert_close(variances[0], variances[1], 1e-6)
    sampler = IIDNormalSampler(torch.Size([2]), seed=0)
    ours = ours.fantasize(X, sampler, observation_noise=None if noise is None else noise + 1)
    added = known.mean(-1, keepdim=True).expand_as(known)[..., :3] if noise is None else 1.7
    assert (ours.likelihood.noise[..., :-3] - known).abs().max() < 1e-12
    assert (ours.likelihood.noise[..., -3:] - added).abs().max() < 1e-12


#: Statistics of the observations have a gradient, too; those of inputs are frozen.
TRANSFORMS: dict[str, dict[str, Any]] = {
    "default": {},
    "none": {"outcome_transform": None},
    "normalize": {"input_transform": Normalize(2, bounds=torch.tensor([[0.0, 0.0], [2.0, 3.0]]))},
}


@unscaled
@pytest.mark.parametrize("set_later", [False, True])
@pytest.mark.parametrize("outputs", [1, 2])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_gradients_with_respect_to_training_data(name: str, outputs: int, set_later: bool) -> None:
    """The network that makes the inputs learns from the evidence, as with an exact GP."""
    network = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Sigmoid())
    X = make_inputs(12, 2)
    leaf = (5 + 3 * torch.sin(3 * X[:, :outputs])).requires_grad_()
    gradients = []
    for kind in (SequentialGP, SingleTaskGP):
        given = (network(X).detach(), leaf.detach()) if set_later else (network(X), leaf)
        model = kind(*given, **copy.deepcopy(TRANSFORMS[name]))
        if set_later:
            inputs = network(X)
            if outputs > 1:
                inputs = inputs.expand(outputs, *inputs.shape)
            moved = (leaf - leaf.detach()).mT
            model.set_train_data(inputs, model.train_targets + moved.squeeze(0))
        mll = ExactMarginalLogLikelihood(model.likelihood, model).train()
        loss = -mll(model(*model.train_inputs), model.train_targets).sum()
        wanted = (*network.parameters(), leaf)
        gradients.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss, wanted)]))
    assert_close(*gradients)
    assert gradients[0].abs().min() > 0


@unscaled
@pytest.mark.parametrize("with_transform", [False, True])
def test_training_data_that_an_optimiser_moves(with_transform: bool) -> None:
    """Predictions are those for the data as they are now, as with an exact GP."""
    start, test = make_inputs(8, 2), make_inputs(3, 2)
    posteriors = []
    for kind in (SequentialGP, SingleTaskGP):
        X = start.clone().requires_grad_()
        bounds = torch.tensor([[0.0, 0.0], [2.0, 3.0]])
        transform = Normalize(2, bounds=bounds) if with_transform else None
        noise = torch.full((8, 1), 0.1)
        model = kind(X, torch.sin(5 * start[:, :1]), noise, input_transform=transform)
        model.posterior(test)
        mll = ExactMarginalLogLikelihood(model.likelihood, model).train()
        optimizer = torch.optim.SGD([X], lr=0.05)
        for _ in range(3):
            optimizer.zero_grad()
            (-mll(model(*model.train_inputs), model.train_targets)).backward()
            optimizer.step()
        assert (X - start).abs().max() > 0.01
        posteriors.append(model.eval().posterior(test))
    assert_same(*posteriors)


@unscaled
def test_the_graph_of_training_data_ends_with_them() -> None:
    leaf = make_inputs(12, 2).requires_grad_()
    model = SequentialGP(2 * leaf, torch.sin(leaf[:, :1]))
    assert model.train_inputs[0].requires_grad
    assert model.train_targets.requires_grad
    assert model.float().train_inputs[0].dtype == torch.float32
    assert model.double().train_inputs[0].requires_grad
    assert not copy.deepcopy(model).train_inputs[0].requires_grad
    assert not pickle.loads(pickle.dumps(model)).train_inputs[0].requires_grad
    known = model.condition_on_observations(leaf[:1].detach(), torch.zeros(1, 1))
    assert len(known.train().train_inputs[0]) == len(known.train_targets) == 13
    model.update(leaf[:2].detach(), torch.zeros(2, 1), learn=False)
    assert len(model.train().train_inputs[0]) == 14
    assert not model.train_inputs[0].requires_grad

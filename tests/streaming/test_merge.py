"""Merged models against one model that has all the data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from botorch.models.transforms import Normalize, Standardize
from gpytorch.kernels import MaternKernel, RBFKernel
from gpytorch.likelihoods import BernoulliLikelihood, PoissonLikelihood
from torch import Tensor

import seqgp
from seqgp import SequentialGP, SequentialMultiTaskGP
from seqgp.streaming.memory import MemoryOptions
from tests.helpers import CASES, assert_close, latent, make_inputs, problem, state_of, unscaled

pytestmark = [unscaled, pytest.mark.usefixtures("float64")]

X, TEST = (make_inputs(n, 2).double() for n in (60, 7))
Y = latent(X).unsqueeze(-1)
SHARDS = (slice(0, 15), slice(15, 15), slice(15, 60))  # uneven, and an empty one


def build(X: Tensor, Y: Tensor, **options: Any) -> SequentialGP:
    options = {"outcome_transform": None, "covar_module": MaternKernel(nu=1.5)} | options
    return SequentialGP(X, Y, **options)


def fold(model: SequentialGP, memory: int) -> SequentialGP:
    """The model with all but a few observations folded."""
    held = model.stream.observations
    arguments = {k: v[:0] for k, v in held.arguments.items() if k != "noise"}
    noise = held.arguments.get("noise")
    if noise is not None:
        arguments["noise"] = model.to_columns(noise[..., :0])
    none = model.to_columns(held.targets[..., :0])
    model.update(held.inputs[:0], none, memory=memory, learn=False, **arguments)
    return model


def assert_same(merged: SequentialGP, whole: SequentialGP, tol: float = 1e-8) -> None:
    a, b = merged.posterior(TEST), whole.posterior(TEST)
    assert_close(a.mean, b.mean, tol)
    assert_close(a.variance, b.variance, tol)


@pytest.mark.parametrize("name", CASES)
def test_joined_memories_are_all_the_data(name: str) -> None:
    """Every likelihood: nothing has been folded, so sites converge to those of one model."""
    data = problem(name)

    def model(index: slice) -> SequentialGP:
        arguments = {k: v[index] for k, v in data.arguments.items()}
        likelihood = CASES[name].make()
        Yvar = {}
        if "noise" in arguments:
            Yvar = {"train_Yvar": arguments.pop("noise").unsqueeze(-1)}
            likelihood = None
        return build(
            data.x[index],
            data.y[index].unsqueeze(-1),
            likelihood=likelihood,
            inducing_points=data.Z,
            likelihood_arguments=arguments,
            **Yvar,
        )

    parts = [model(index) for index in (slice(0, 8), slice(8, 30))]
    before = [state_of(part) for part in parts]
    merged, whole = seqgp.merge(parts), model(slice(None))
    assert_same(merged, whole, 1e-6)
    assert merged.num_data == merged.num_seen == 30
    for part, state in zip(parts, before, strict=True):
        for key, value in part.state_dict().items():
            assert torch.equal(value, state[key]), key


def test_gaussian_summaries_add_exactly() -> None:
    """Folded data, uneven shards and an empty one, and a memory that has no room for both."""
    Z = X[::6]
    parts = [fold(build(X[s], Y[s], inducing_points=Z), memory=4) for s in SHARDS]
    merged = seqgp.merge(parts, memory=5)
    whole = fold(build(X, Y, inducing_points=Z), memory=5)
    assert_same(merged, whole)
    assert (merged.num_data, merged.num_seen) == (5, 60)
    assert_close(merged.memory_weights.sum(), torch.tensor(60.0), 1e-12)
    assert_close(merged.variational_strategy.summary_count, torch.tensor(55.0), 1e-12)
    # The variance that Z does not explain of folded observations is no part of the bound.
    none = [seqgp.merge(parts, memory=0).refresh(), fold(whole, memory=0).refresh()]
    assert_close(none[0], none[1], 1e-8)
    # Noise is learnt from all observations, also from those that each has folded.
    for model in (merged, whole):
        model.likelihood.noise = 0.3
    assert_same(merged, whole)


def test_different_inducing_points() -> None:
    """Each model's are its own inputs: their union loses nothing, and equals one exact model."""
    parts = [fold(build(X[s], Y[s]), memory=0) for s in (SHARDS[0], SHARDS[2])]
    merged, whole = seqgp.merge(parts), build(X, Y)
    assert merged.variational_strategy.inducing_points.shape == (60, 2)
    assert_same(merged, whole, 1e-6)  # the jitter of a union is not that of the parts
    fewer = seqgp.merge(parts, max_inducing=20)
    assert fewer.variational_strategy.inducing_points.shape == (20, 2)
    assert_close(fewer.posterior(TEST).mean, whole.posterior(TEST).mean, 0.1)


def test_pseudo_likelihoods_with_summaries() -> None:
    """Labels: close to one model with all data, where each part alone is not."""
    labels, Z = (Y > 1).to(Y), X[::5]
    options = {"likelihood": BernoulliLikelihood(), "inducing_points": Z}
    parts = [fold(build(X[s], labels[s], **options), memory=5) for s in (SHARDS[0], SHARDS[2])]
    merged, whole = seqgp.merge(parts), build(X, labels, **options)
    error = (merged.posterior(TEST).mean - whole.posterior(TEST).mean).abs().max()
    alone = (parts[0].posterior(TEST).mean - whole.posterior(TEST).mean).abs().max()
    assert error < 0.1
    assert error < 0.2 * alone


def test_hyperparameters_with_the_largest_bound() -> None:
    parts = [build(X[s], Y[s], inducing_points=X[::4]) for s in (SHARDS[0], SHARDS[2])]
    parts[0].covar_module.lengthscale, parts[1].covar_module.lengthscale = 0.02, 0.8
    merged = seqgp.merge([fold(part, memory=3) for part in parts])
    assert_close(merged.covar_module.lengthscale.squeeze(), torch.tensor(0.8))
    bounds = [seqgp.merge(parts, hyperparameters=k).refresh() for k in (0, 1)]
    assert bounds[1] > bounds[0]
    assert_close(merged.refresh(), bounds[1])
    whole = build(X, Y, inducing_points=X[::4])
    whole.covar_module.lengthscale = 0.8
    error = (merged.posterior(TEST).mean - whole.posterior(TEST).mean).abs().max()
    assert error < 0.3  # the first part was folded with a lengthscale that explains little


def test_default_standardisation_and_ranges_are_those_of_all() -> None:
    parts = [SequentialGP(X[s], 5 + 3 * Y[s]) for s in (SHARDS[0], SHARDS[2])]
    merged, whole = seqgp.merge(parts), SequentialGP(X, 5 + 3 * Y)
    assert_close(merged.outcome_transform.stdvs, whole.outcome_transform.stdvs, 1e-12)
    whole.load_state_dict(merged.state_dict())
    assert_same(merged, whole, 1e-6)
    own = [build(X[s], Y[s], outcome_transform=Standardize(1)) for s in (SHARDS[0], SHARDS[2])]
    with pytest.raises(ValueError, match="Standardize of its outcomes has other statistics"):
        seqgp.merge(own)

    def normalised(s: slice) -> SequentialGP:
        return build(X[s], Y[s], input_transform=Normalize(2))

    parts = [normalised(SHARDS[0]), normalised(SHARDS[2])]
    merged = seqgp.merge(parts, hyperparameters=1)
    whole = build(X, Y, input_transform=parts[1].input_transform)  # frozen
    assert_same(merged, whole, 1e-6)


def test_the_result_continues_and_checkpoints_merge(tmp_path: Path) -> None:
    parts = [fold(build(X[s], Y[s], inducing_points=X[::6]), 4) for s in (SHARDS[0], SHARDS[2])]
    for number, part in enumerate(parts):
        seqgp.save(part, tmp_path / f"{number}.seqgp")
    merged = seqgp.merge([tmp_path / "0.seqgp", str(tmp_path / "1.seqgp")], memory=4)
    assert_same(merged, seqgp.merge(parts, memory=4), 1e-14)
    new, observed = make_inputs(9, 2), latent(make_inputs(9, 2)).unsqueeze(-1)
    whole = build(X, Y, inducing_points=X[::6])
    for model in (merged, whole):
        model.update(new, observed, learn=False, memory=2)
    assert_same(merged, whole)
    assert merged.num_seen == 69
    merged.update(new[:3], observed[:3], steps=2)


def test_several_outputs_batches_latents_and_weights() -> None:
    several = torch.cat([Y, -Y], -1)
    options: dict[str, Any] = {"inducing_points": X[::6], "covar_module": None}
    parts = [fold(build(X[s], several[s], **options), 3) for s in (SHARDS[0], SHARDS[2])]
    assert_same(seqgp.merge(parts), build(X, several, **options))
    stacked = torch.stack([X, 1 - X])
    both = [build(stacked[:, s], Y.expand(2, 60, 1)[:, s], covar_module=None) for s in SHARDS[::2]]
    whole = build(stacked, Y.expand(2, 60, 1), covar_module=None)
    assert_same(seqgp.merge(both), whole, 1e-6)
    # A memory of which each counts for those that it was drawn from, in part.
    labels = (Y > 1).to(Y)
    options = {"likelihood": BernoulliLikelihood(), "inducing_points": X[::6]}
    replayed = [build(X[s], labels[s], **options) for s in (SHARDS[0], SHARDS[2])]
    merged = seqgp.merge(replayed, memory=MemoryOptions(10, replay=0.5, balance=True))
    assert (merged.num_data, merged.stream.replay) == (10, 0.5)


def test_tasks() -> None:
    """Models that have observed the same tasks, or one each, with targets in the same units."""
    inputs = torch.cat([X, torch.arange(60).remainder(2).unsqueeze(-1).to(X)], -1)
    options: dict[str, Any] = {"all_tasks": [0, 1], "inducing_points": inputs[::5]}

    def model(rows: Tensor, **more: Any) -> SequentialMultiTaskGP:
        return SequentialMultiTaskGP(inputs[rows], Y[rows], 2, **options, **more)

    mixed, task = torch.arange(60), inputs[:, 2]
    whole = model(mixed, outcome_transform=None)
    for first in (mixed < 15, task == 0):
        parts = [model(rows, outcome_transform=None) for rows in (first, ~first)]
        for part in parts:
            part.update(inputs[:0], Y[:0], memory=0, learn=False)
        merged = seqgp.merge(parts)
        assert isinstance(merged, SequentialMultiTaskGP)
        assert_same(merged, whole)
        assert (merged.num_seen, merged.num_data) == (60, 0)
    with pytest.raises(ValueError, match="TaskStandardize of its outcomes has other statistics"):
        seqgp.merge([model(mixed < 15), model(mixed >= 15)])


def test_what_cannot_be_merged() -> None:
    one, other = build(X[:9], Y[:9]), build(X[9:20], Y[9:20])
    before = state_of(one)
    mistakes: list[tuple[Any, str]] = [
        (build(X[:9], Y[:9], covar_module=RBFKernel()), "covar_module is a RBFKernel"),
        (build(X[:9], Y[:9], covar_module=MaternKernel(2.5)), "covar_module.nu is 2.5"),
        (build(X[:9], Y[:9].abs().round(), likelihood=PoissonLikelihood()), "likelihood is a Poi"),
        (build(X[:9, :1], Y[:9]), "a number of inputs of 1"),
        (build(X[:9], Y[:9], outcome_transform=Standardize(1)), "only it has a Standardize"),
        (build(X[:9].float(), Y[:9].float()), "dtype torch.float32"),
        (one.condition_on_observations(X[:1], Y[:1]), "number 1 has been conditioned"),
    ]
    for wrong, message in mistakes:
        with pytest.raises(ValueError, match=message):
            seqgp.merge([one, wrong])
    learnt = build(X[:9], Y[:9])
    learnt.update(X[:3], Y[:3], mode="paper", steps=1)
    with pytest.raises(ValueError, match="with mode='paper'"):
        seqgp.merge([learnt, other])
    with pytest.raises(TypeError, match="expected a list of models or paths"):
        seqgp.merge(one)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="got a int as number 1"):
        seqgp.merge([one, 3])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="at least one"):
        seqgp.merge([])
    with pytest.raises(ValueError, match="one of 2 models, got 2"):
        seqgp.merge([one, other], hyperparameters=2)
    for key, value in one.state_dict().items():
        assert torch.equal(value, before[key])

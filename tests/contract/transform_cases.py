"""Each of BoTorch's input and outcome transforms, for inputs of three columns."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import NamedTuple

import torch
from botorch.models.transforms import input as inputs
from botorch.models.transforms import outcome as outcomes
from botorch.models.transforms.input import InputTransform
from botorch.models.transforms.outcome import OutcomeTransform
from torch import Tensor

from tests.helpers import latent, make_inputs

EMPTY = torch.Size([])


class InputCase(NamedTuple):
    """An input transform.

    Attributes:
        make: Makes it.
        train: Training inputs.
        test: Inputs of predictions.
        dim: The number of columns after the transform.
        batch_shape: Of the model.
        conditions: Whether BoTorch can condition on observations. With a one-to-many transform it
            transforms these as well, and finds more inputs than observations.
        note: What to know about it; shown in the documentation.
    """

    make: Callable[[], InputTransform]
    train: Tensor
    test: Tensor
    dim: int = 3
    batch_shape: torch.Size = EMPTY
    conditions: bool = True
    note: str = ""


def points(*shape: int) -> Tensor:
    return 2 + 3 * make_inputs(*shape, 3).double()


def bounds(width: float) -> Tensor:
    return torch.tensor([[2.0] * 3, [2.0 + width] * 3], dtype=torch.double)


def whole(X: Tensor, column: int, number: int) -> Tensor:
    """Inputs with one column of whole numbers from 0."""
    X = X.clone()
    X[..., column] = (X[..., column] - 2).div(3).mul(number).floor().clamp(0, number - 1)
    return X


def one_hot(X: Tensor) -> Tensor:
    """Two columns and a category of two, one-hot."""
    labels = (X[..., 2:] > 3.5).to(X)
    return torch.cat([X[..., :2], labels, 1 - labels], -1)


TRAIN, TEST = points(10), points(4)

INPUTS: dict[str, InputCase] = {
    "AffineInputTransform": InputCase(
        lambda: inputs.AffineInputTransform(3, torch.full((3,), 3.0), torch.full((3,), 2.0)),
        TRAIN,
        TEST,
    ),
    "Normalize": InputCase(lambda: inputs.Normalize(3), TRAIN, TEST),
    "InputStandardize": InputCase(lambda: inputs.InputStandardize(3), TRAIN, TEST),
    "Round": InputCase(lambda: inputs.Round(integer_indices=[1]), TRAIN, TEST),
    "Log10": InputCase(lambda: inputs.Log10(indices=[0, 2]), TRAIN, TEST),
    "Warp": InputCase(
        lambda: inputs.Warp(3, [0, 1, 2]), make_inputs(10, 3).double(), make_inputs(4, 3).double()
    ),
    "ChainedInputTransform": InputCase(
        lambda: inputs.ChainedInputTransform(unit=inputs.Normalize(3), warp=inputs.Warp(3, [0, 1])),
        TRAIN,
        TEST,
    ),
    "BatchBroadcastedInputTransform": InputCase(
        lambda: inputs.BatchBroadcastedInputTransform(
            [inputs.Normalize(3, bounds=bounds(1.0)), inputs.Normalize(3, bounds=bounds(2.0))]
        ),
        points(2, 10),
        points(2, 4),
        batch_shape=torch.Size([2]),
        note="BoTorch never puts its parts into eval mode: give them bounds.",
    ),
    "AppendFeatures": InputCase(
        lambda: inputs.AppendFeatures(torch.tensor([[2.5], [3.0]])),
        TRAIN,
        TEST[:, :2],
        conditions=False,
        note="One-to-many: for predictions, observations stay where they were made.",
    ),
    "InteractionFeatures": InputCase(inputs.InteractionFeatures, TRAIN, TEST, dim=6),
    "FilterFeatures": InputCase(
        lambda: inputs.FilterFeatures(torch.tensor([0, 2])), TRAIN, TEST, dim=2
    ),
    "InputPerturbation": InputCase(
        lambda: inputs.InputPerturbation(torch.tensor([[0.0] * 3, [0.1, -0.1, 0.2]])),
        TRAIN,
        TEST,
        conditions=False,
        note="One-to-many: for predictions, observations stay where they were made.",
    ),
    "NumericToCategoricalEncoding": InputCase(
        lambda: inputs.NumericToCategoricalEncoding(
            3, {2: 3}, {2: lambda x: torch.nn.functional.one_hot(x.long(), 3)}
        ),
        whole(TRAIN, 2, 3),
        whole(TEST, 2, 3),
        dim=5,
    ),
    "OneHotToNumeric": InputCase(
        lambda: inputs.OneHotToNumeric(4, {2: 2}), one_hot(TRAIN), one_hot(TEST)
    ),
    "LearnedFeatureImputation": InputCase(
        lambda: inputs.LearnedFeatureImputation({0: [0, 1], 1: [0]}, 2),
        whole(TRAIN, 2, 2),
        whole(TEST, 2, 2),
    ),
}


class OutcomeCase(NamedTuple):
    """An outcome transform; attributes as those of `InputCase`."""

    make: Callable[[], OutcomeTransform]
    train: Tensor = TRAIN
    test: Tensor = TEST
    note: str = ""


OUTCOMES: dict[str, OutcomeCase] = {
    "Standardize": OutcomeCase(lambda: outcomes.Standardize(1)),
    "StratifiedStandardize": OutcomeCase(
        lambda: outcomes.StratifiedStandardize(2, torch.tensor([0, 1])),
        whole(TRAIN, 2, 2),
        whole(TEST, 2, 2),
    ),
    "Log": OutcomeCase(outcomes.Log),
    "Power": OutcomeCase(lambda: outcomes.Power(0.5)),
    "Bilog": OutcomeCase(outcomes.Bilog),
    "ChainedOutcomeTransform": OutcomeCase(
        lambda: outcomes.ChainedOutcomeTransform(log=outcomes.Log(), unit=outcomes.Standardize(1))
    ),
}


def observed(X: Tensor) -> Tensor:
    """Positive observations ``... x n x 1``."""
    return (0.5 * latent(X[..., :2] / 3)).exp().unsqueeze(-1)


def transforms(module: ModuleType, base: type) -> Iterator[str]:
    """Names of all transforms of a module, abstract ones left out."""
    for name, kind in vars(module).items():
        if (
            inspect.isclass(kind)
            and issubclass(kind, base)
            and kind.__module__ == module.__name__
            and not inspect.isabstract(kind)
        ):
            yield name

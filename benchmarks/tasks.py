"""Digits in tasks of two classes each, and predictions of models that have learnt some tasks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from gpytorch.kernels import Kernel, MaternKernel, ScaleKernel
from gpytorch.likelihoods import SoftmaxLikelihood
from torch import Tensor

from benchmarks.data import find
from seqgp.kernel_scales import median_distance

#: Class probabilities ``n x c`` at inputs ``n x d``.
Predict = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Tasks:
    """A stream of tasks, each of which brings two classes that no other has.

    Attributes:
        tasks: For each task its batches, inputs ``n_i x d`` and labels ``n_i``, in order.
        test: Inputs and labels that are never learnt.
        m: The number of inducing points.
        memory: How many observations of a batch are remembered.
        replay: For how much of what was folded the memory stands (`MemoryOptions.replay`).
        num_classes: The number of classes.
        variance: The kernel's, to begin with.
    """

    tasks: list[list[tuple[Tensor, Tensor]]]
    test: tuple[Tensor, Tensor]
    m: int
    memory: int
    replay: float
    num_classes: int = 10
    variance: float = 20.0

    @property
    def batches(self) -> list[tuple[Tensor, Tensor]]:
        """All batches, in order."""
        return [batch for task in self.tasks for batch in task]

    @property
    def everything(self) -> tuple[Tensor, Tensor]:
        """All training data at once."""
        X, y = zip(*self.batches, strict=True)
        return torch.cat(X), torch.cat(y)

    def classes_of(self, task: int) -> tuple[int, int]:
        """The two classes of a task."""
        return 2 * task, 2 * task + 1

    def kernel(self) -> Kernel:
        """Matern-5/2; the lengthscale is the median distance of what comes first."""
        X, _ = self.tasks[0][0]
        kernel = ScaleKernel(MaternKernel(nu=2.5)).to(X)
        kernel.base_kernel.lengthscale, kernel.outputscale = median_distance(X), self.variance
        return kernel

    def likelihood(self) -> SoftmaxLikelihood:
        """One latent function a class."""
        c = self.num_classes
        return SoftmaxLikelihood(num_features=c, num_classes=c, mixing_weights=False)


@dataclass(frozen=True)
class DataSet:
    """How a set of images becomes tasks.

    Attributes:
        source: ``"mnist"`` or ``"digits"``, those that come with scikit-learn.
        batch: How many images a batch has.
        m: The number of inducing points.
        memory: How many images of a batch are remembered.
        replay: For how much of what was folded the memory stands. Six thousand images can stand
            for all others, a hundred cannot (seed 100).
        dtype: The precision of everything.
        train: How many training images are used; ``None`` for all.
        test: How many test images are; ``None`` for all.
    """

    source: str
    batch: int
    m: int
    memory: int
    replay: float
    dtype: torch.dtype
    train: int | None = None
    test: int | None = None


DATA_SETS = {
    "mnist": DataSet("mnist", 4000, 300, 400, 1.0, torch.float32),
    "mnist, 10,000 images": DataSet("mnist", 700, 150, 70, 1.0, torch.float32, 10_000, 2500),
    "digits": DataSet("digits", 100, 100, 10, 0.0, torch.float64),
    "digits, 500 images": DataSet("digits", 50, 30, 10, 0.0, torch.float64, 500, 300),
}


@lru_cache(maxsize=1)
def images(source: str) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """All images ``n x d``, between 0 and 1, and their labels."""
    if source == "digits":
        from sklearn.datasets import load_digits

        X, y = load_digits(return_X_y=True)
        return X / 16, y
    with np.load(find("mnist.npz")) as data:
        X = np.concatenate([data["x_train"], data["x_test"]])
        y = np.concatenate([data["y_train"], data["y_test"]])
    return X.reshape(len(X), -1).astype(np.float32) / 255, y


def order_of(name: str, seed: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Indices of training and test images: 80:20, shuffled by the seed."""
    data_set = DATA_SETS[name]
    _, y = images(data_set.source)
    shuffled = np.random.RandomState(seed).permutation(len(y))
    split = int(0.8 * len(y))
    return shuffled[:split][: data_set.train], shuffled[split:][: data_set.test]


def tasks_of(
    name: str,
    seed: int,
    order: tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]] | None = None,
    dtype: torch.dtype | None = None,
) -> Tasks:
    """A data set in five tasks, 0/1, 2/3 and so on, each in batches.

    Args:
        name: One of `DATA_SETS`.
        seed: Of the split.
        order: Other indices of training and test images.
        dtype: Another precision.
    """
    data_set = DATA_SETS[name]
    X, y = images(data_set.source)
    train, test = order_of(name, seed) if order is None else order
    dtype = data_set.dtype if dtype is None else dtype

    def tensors(index: np.ndarray[Any, Any]) -> tuple[Tensor, Tensor]:
        return torch.from_numpy(X[index]).to(dtype), torch.from_numpy(y[index]).to(dtype)

    def batches(task: int) -> Iterator[tuple[Tensor, Tensor]]:
        index = train[y[train] // 2 == task]
        for start in range(0, len(index), data_set.batch):
            yield tensors(index[start : start + data_set.batch])

    return Tasks(
        [list(batches(task)) for task in range(5)],
        tensors(test),
        data_set.m,
        data_set.memory,
        data_set.replay,
    )


@torch.no_grad()
def score(tasks: Tasks, predict: Predict, num_tasks: int) -> dict[str, Any]:
    """Accuracy and negative log predictive density on the test images of the tasks so far.

    Of the class that is the most probable of all ten, also of those that have not been seen.

    Args:
        tasks: The data.
        predict: Class probabilities.
        num_tasks: How many tasks have been seen.
    """
    X, y = tasks.test
    seen = y < 2 * num_tasks
    X, y = X[seen], y[seen].long()
    probabilities = torch.cat([predict(x) for x in X.split(1000)])
    right = (probabilities.argmax(-1) == y).double()
    own = probabilities.gather(-1, y.unsqueeze(-1)).squeeze(-1)
    tiny = torch.finfo(own.dtype).tiny
    return {
        "accuracy": float(right.mean()),
        "nlpd": float(-own.clamp_min(tiny).double().log().mean()),
        "by_task": [round(float(right[y // 2 == t].mean()), 4) for t in range(num_tasks)],
    }

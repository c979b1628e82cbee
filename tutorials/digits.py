"""Digits, two at a time: learning new classes without forgetting old ones.

Run ``python -m tutorials.digits`` (``--short`` for less of it). The digits that come with
scikit-learn arrive in five tasks, 0 and 1, then 2 and 3, and so on; each image is seen once. Three
models learn them: one by the rule of the paper that this library comes from, without its memory;
one that folds every image into its summary, and one that also remembers a tenth of them. Then we
look into the memory.
Figures are saved as ``figures/digits-confusion.png`` and ``figures/digits-memory.png``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from gpytorch.kernels import MaternKernel, ScaleKernel
from gpytorch.likelihoods import SoftmaxLikelihood
from gpytorch.means import ZeroMean
from sklearn.datasets import load_digits
from torch import Tensor

from seqgp import SequentialGP
from seqgp.kernel_scales import median_distance
from seqgp.progress import progress_bar
from seqgp.streaming import MemoryOptions
from tutorials import common
from tutorials.digits_figures import save_confusion, save_memory

CLASSES, TASKS = 10, 5

#: Once an image is certain to be "0 rather than 1", its own site hardly says "0 rather than 8":
#: a certain choice has no curvature. When 8 comes, such sites let it have the zeros, too. So where
#: classes are still to come, what we fold is a lower bound of the likelihood instead, which
#: objects. The paper's rule leaves objecting to its memory.
WAYS: dict[str, dict[str, Any]] = {
    "paper, no memory": {"mode": "paper", "memory": MemoryOptions(policy="none")},
    "no memory": {"memory": MemoryOptions(policy="none")},
    "memory": {"memory": MemoryOptions(capacity=0.1, balance=True)},
}


class Digits(NamedTuple):
    """Images ``n x 64`` between 0 and 1, and their labels."""

    X: Tensor
    y: Tensor

    def of_task(self, task: int) -> Digits:
        """The two classes that a task brings."""
        own = self.y.div(2, rounding_mode="floor") == task
        return Digits(self.X[own], self.y[own])


def load(number: int) -> tuple[Digits, Digits]:
    """``number`` images to learn from, and a fifth of all to test with."""
    X, y = (torch.from_numpy(array).double() for array in load_digits(return_X_y=True))
    order = torch.randperm(len(X), generator=torch.Generator().manual_seed(0))
    X, y = X[order] / 16, y[order]
    split = len(X) // 5
    return Digits(X[split:][:number], y[split:][:number]), Digits(X[:split], y[:split])


def new_model(first: Tensor, m: int) -> SequentialGP:
    """A model of ten classes that has seen nothing: one latent function each, one kernel for all.

    Args:
        first: The inputs that come first; their distances tell the lengthscale to begin with.
        m: The number of inducing points.
    """
    kernel = ScaleKernel(MaternKernel(nu=2.5)).double()
    kernel.base_kernel.lengthscale, kernel.outputscale = median_distance(first), 20.0
    return SequentialGP(
        first[:0],
        first[:0, :1],
        likelihood=SoftmaxLikelihood(CLASSES, CLASSES, mixing_weights=False),
        covar_module=kernel,
        mean_module=ZeroMean(),
        inducing_points=first[:m],
        learn_inducing_points=False,
    )


@torch.no_grad()
def confusion(model: SequentialGP, test: Digits) -> Tensor:
    """``10 x 10``: of the images of one class (row), how many are taken for another (column)."""
    guess = model.posterior(test.X, observation_noise=True).probabilities.argmax(-1)
    counts = torch.zeros(CLASSES, CLASSES, dtype=test.X.dtype)
    counts.index_put_((test.y.long(), guess), torch.ones_like(test.y), accumulate=True)
    return counts


def learn(
    train: Digits, test: Digits, way: dict[str, Any], m: int
) -> tuple[SequentialGP, list[Tensor]]:
    """One task after the other, and what is confused with what after each."""
    model = new_model(train.of_task(0).X, m)
    matrices = []
    for task in progress_bar(range(TASKS), desc="tasks", leave=False):
        X, y = train.of_task(task)
        for x, label in zip(X.split(100), y.unsqueeze(-1).split(100), strict=True):
            # The kernel stays as it is, here; inducing points become centres of clusters.
            options = {"learn": False, "inducing": "cluster", "max_inducing": m, "site_steps": 14}
            model.update(x, label, **way, **options)
        seen = test.y < 2 * (task + 1)
        matrices.append(confusion(model, Digits(test.X[seen], test.y[seen])))
    return model, matrices


def main(arguments: list[str] | None = None) -> None:
    """A table, and two figures."""
    given = common.parser(__doc__).parse_args(arguments)
    common.begin(given)
    number, m = (500, 40) if given.short else (1400, 100)
    train, test = load(number)

    print("accuracy on all classes so far, after each task\n")
    print(f"{'':18}" + "".join(f"{2 * t},{2 * t + 1}".rjust(8) for t in range(TASKS)))
    found = {}
    for name, way in WAYS.items():
        model, matrices = learn(train, test, way, m)
        found[name] = matrices
        accuracy = [float(matrix.trace() / matrix.sum()) for matrix in matrices]
        print(f"{name:18}" + "".join(f"{value:8.3f}" for value in accuracy))
    print(f"\nWhat is taken for what is in {save_confusion(found)}.")

    # What the last model remembers: as many of each class, drawn by leverage. The leverage of an
    # image is how much its label moves the posterior at the image itself: little for the hundredth
    # zero like all others, much for one that is hard to tell, or unlike anything seen so far.
    remembered = model.memory
    _, counts = remembered.targets.unique(return_counts=True)
    print(f"\nremembered: {len(remembered.targets)} of {len(train.y)}, by class {counts.tolist()}")
    leverage = model.leverage(train.X, train.y.unsqueeze(-1))
    order = leverage.argsort()
    fifth = len(order) // 5
    with torch.no_grad():
        p = model.posterior(train.X, observation_noise=True).probabilities
    own = p.gather(-1, train.y.long().unsqueeze(-1)).squeeze(-1)
    print(
        f"mean probability of the right class: {float(own[order[:fifth]].mean()):.3f} in the fifth "
        f"of lowest leverage, {float(own[order[-fifth:]].mean()):.3f} in that of highest"
    )
    path = save_memory(remembered.inputs, remembered.targets, train.X, train.y, leverage)
    print(f"The memory, and the most and the least odd of each class, are in {path}.")


if __name__ == "__main__":
    main()

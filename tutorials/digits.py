"""New classes without forgetting old ones
=======================================

Digits arrive two at a time, and each image is used once.

Run ``python -m tutorials.digits`` (``--short`` for fewer images). The digits of scikit-learn arrive
in five tasks: 0 and 1, then 2 and 3, and so on. Each image is used once. Three models learn them.
The first one follows the rule of the paper, without a memory. The second one only keeps a summary
of all images. The third one also keeps a tenth of the images in its memory. Then we look at the
memory.

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

#: The *site* of an image, the Gaussian that replaces its likelihood, has the curvature of the
#: likelihood as precision. If the image is certain to be "0 rather than 1", there is hardly any
#: curvature, and the site says little about "0 rather than 8". A model that folds such sites takes
#: zeros for eights as soon as eights arrive. So as long as some classes have not been observed,
#: images are folded with the sites of a lower bound of the likelihood, which keep some precision.
#: The paper's rule relies on its memory for this.
WAYS: dict[str, dict[str, Any]] = {
    "paper, no memory": {"mode": "paper", "memory": MemoryOptions(policy="none")},
    "no memory": {"memory": MemoryOptions(policy="none")},
    "memory": {"memory": MemoryOptions(capacity=0.1, balance=True)},
}


# %%
# The data
# --------


class Digits(NamedTuple):
    """Images ``n x 64`` between 0 and 1, and their labels."""

    X: Tensor
    y: Tensor

    def of_task(self, task: int) -> Digits:
        """The images of the two classes of a task."""
        own = self.y.div(2, rounding_mode="floor") == task
        return Digits(self.X[own], self.y[own])


def load(number: int) -> tuple[Digits, Digits]:
    """Load ``number`` training images, and a fifth of all images as test images."""
    X, y = (torch.from_numpy(array).double() for array in load_digits(return_X_y=True))
    order = torch.randperm(len(X), generator=torch.Generator().manual_seed(0))
    X, y = X[order] / 16, y[order]
    split = len(X) // 5
    return Digits(X[split:][:number], y[split:][:number]), Digits(X[:split], y[:split])


# %%
# The models
# ----------
#
# One latent function per class, with a shared kernel.


def new_model(first: Tensor, m: int) -> SequentialGP:
    """A model of ten classes without data: a latent function for each, and one kernel for all.

    Args:
        first: The first inputs, whose median distance is the lengthscale.
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
    """The confusion matrix ``10 x 10``: true classes in rows, predicted ones in columns."""
    guess = model.posterior(test.X, observation_noise=True).probabilities.argmax(-1)
    counts = torch.zeros(CLASSES, CLASSES, dtype=test.X.dtype)
    counts.index_put_((test.y.long(), guess), torch.ones_like(test.y), accumulate=True)
    return counts


def learn(
    train: Digits, test: Digits, way: dict[str, Any], m: int
) -> tuple[SequentialGP, list[Tensor]]:
    """Learn all tasks, and compute the confusion matrix after each."""
    model = new_model(train.of_task(0).X, m)
    matrices = []
    for task in progress_bar(range(TASKS), desc="tasks", leave=False):
        X, y = train.of_task(task)
        for x, label in zip(X.split(100), y.unsqueeze(-1).split(100), strict=True):
            # The kernel is not learnt here; inducing points are centres of clusters.
            options = {"learn": False, "inducing": "cluster", "max_inducing": m, "site_steps": 14}
            model.update(x, label, **way, **options)
        seen = test.y < 2 * (task + 1)
        matrices.append(confusion(model, Digits(test.X[seen], test.y[seen])))
    return model, matrices


# %%
# Five tasks
# ----------


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
    print(f"\nThe confusion matrices are in {save_confusion(found)}.")

    # The memory of the last model: the same number of each class, sampled by leverage. The leverage
    # of an image is how much its label changes the posterior at the image itself: little for the
    # hundredth typical zero, much for an image that is ambiguous or unlike all others.
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
    print(f"The memory, and the images of lowest and highest leverage, are in {path}.")


if __name__ == "__main__":
    main()

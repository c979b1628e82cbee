"""Parts of models of several tasks: kernel, mean, standardisation, and the shape of data.

A column of the inputs says which task an observation belongs to ("long format"). Tasks have
*values*, whole numbers in that column, and *indices*, the ranks of these.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from botorch.models.kernels.positive_index import PositiveIndexKernel
from botorch.models.transforms.outcome import StratifiedStandardize
from gpytorch.kernels import Kernel
from gpytorch.means import Mean, MultitaskMean
from gpytorch.priors import NormalPrior, Prior
from torch import Tensor

__all__ = ["LoadingKernel", "TaskKernel", "TaskMean", "TaskStandardize", "shared_and_own"]


def task_index(values: Tensor, tasks: Tensor) -> Tensor:
    """Indices of tasks, ``...``, from their values.

    Args:
        values: ``...`` values that have been checked.
        tasks: The values of all tasks, in ascending order.
    """
    return torch.searchsorted(tasks.to(values), values.contiguous().detach() - 0.5)


def check_tasks(values: Tensor, tasks: Sequence[int], name: str) -> None:
    """Raise unless all are values of tasks.

    Args:
        values: ``...`` values of a task column.
        tasks: All tasks.
        name: What to call the inputs in the error.
    """
    known = values.new_tensor(list(tasks))
    wrong = ~(values.unsqueeze(-1) == known).any(-1)
    if bool(wrong.any()):
        example = values[wrong].flatten()[0].item()
        raise ValueError(
            f"{name}: expected one of the tasks {list(tasks)} in its task column, got {example:g}"
            + (
                "; tasks that appear later are declared by all_tasks=."
                if math.isfinite(example) and example == round(example)
                else "; tasks are whole numbers."
            )
        )


def with_task_column(X: Tensor, tasks: Sequence[int], feature: int) -> Tensor:
    """``... x (t q) x (d + 1)``, inputs ``... x q x d`` for one task after the other.

    Args:
        X: The inputs.
        tasks: ``t`` values of tasks.
        feature: Where the task column goes.
    """
    parts = []
    for task in tasks:
        column = torch.full_like(X[..., :1], float(task))
        parts.append(torch.cat([X[..., :feature], column, X[..., feature:]], -1))
    return torch.cat(parts, -2)


def long_format(X: Tensor, Y: Tensor, tasks: Sequence[int], feature: int) -> tuple[Tensor, Tensor]:
    """Long format from wide: ``k x (d + 1)`` inputs and ``k x 1`` observations.

    Args:
        X: ``n x d`` inputs without a task column.
        Y: ``n x t`` observations, NaN where a task was not observed.
        tasks: The values of the ``t`` tasks.
        feature: Where the task column goes.
    """
    X_long, Y_long = with_task_column(X, tasks, feature), Y.mT.reshape(-1, 1)
    seen = ~Y_long.squeeze(-1).isnan()
    return X_long[seen], Y_long[seen]


class TaskKernel(PositiveIndexKernel):
    """BoTorch's default kernel of tasks, on values of tasks instead of indices.

    Args:
        task_values: The values of all tasks, in ascending order.
        rank: The rank of the covariance.
        task_prior: The prior of the correlations of tasks.
        part: The index of this kernel among several, and their number. Each of several kernels has
            its own scale and different initial correlations. Initially, their variances sum to one.
        options: As for `PositiveIndexKernel`.
    """

    def __init__(
        self,
        task_values: Sequence[int],
        rank: int,
        task_prior: Prior | None = None,
        part: tuple[int, int] = (0, 1),
        **options: Any,
    ) -> None:
        q, number = self.part = part
        options.setdefault("unit_scale_for_target", number == 1)
        super().__init__(num_tasks=len(task_values), rank=rank, **options)
        if task_prior is not None:  # BoTorch registers it with lambdas, which cannot be pickled
            name = "IndexKernelPrior"
            self.register_prior(name, task_prior, _correlations, _set_correlations)
        self.register_buffer("task_values", torch.tensor([float(t) for t in task_values]))
        # BoTorch's initial values are random. These are fixed, so that fits are reproducible.
        with torch.no_grad():
            self.raw_var.fill_(float(q))
            spread = 0.1 * torch.eye(len(task_values), rank)
            self.raw_covar_factor.copy_(0.5 + spread.to(self.raw_covar_factor))
            if number > 1:
                share = self.covar_matrix.diagonal().mean() * number
                self.initialize(var=self.var / share)
                self.covar_factor = self.covar_factor / share.sqrt()

    @property
    def correlations(self) -> Tensor:
        """Correlations of different tasks: the lower triangle, row by row."""
        return self._lower_triangle_corr

    @correlations.setter
    def correlations(self, value: Tensor) -> None:
        self._set_lower_triangle_corr(value)

    def forward(self, i1: Tensor, i2: Tensor, diag: bool = False, **params: Any) -> Tensor:
        """The covariance of the tasks with values ``... x n x 1`` and ``... x n' x 1``.

        Looked up in the ``t x t`` matrix. GPyTorch's product of sparse matrices does the same, but
        fails if there are no points.
        """
        first, second = (task_index(i, self.task_values).squeeze(-1) for i in (i1, i2))
        if not diag:
            first, second = first.unsqueeze(-1), second.unsqueeze(-2)
        return self._eval_covar_matrix()[first, second]


def _correlations(kernel: TaskKernel) -> Tensor:
    return kernel.correlations


def _set_correlations(kernel: TaskKernel, value: Tensor) -> None:
    kernel.correlations = value


class LoadingKernel(Kernel):
    r"""A task kernel of rank one, :math:`k(t, t') = w_t w_{t'}`, with weights of either sign.

    All tasks share one latent function, and each has a weight (loading). Weights, and therefore
    correlations, can be negative. Some weights can be fixed. If a weight is fixed at zero, the
    task does not depend on the function.

    Args:
        task_values: The values of all tasks, in ascending order.
        loadings: The initial weights of the tasks.
        fixed: Values of tasks whose weights are not learnt.
        loading_prior: The prior of the other weights.
        options: As for `Kernel`.

    Example:
        >>> kernel = LoadingKernel([0, 1], [1.0, -0.5], fixed=[0])
        >>> kernel(torch.tensor([[0.0], [1.0]])).to_dense().detach()
        tensor([[ 1.0000, -0.5000],
                [-0.5000,  0.2500]])
    """

    task_values: Tensor
    initial: Tensor
    is_learnt: Tensor

    def __init__(
        self,
        task_values: Sequence[int],
        loadings: Sequence[float],
        fixed: Sequence[int] = (),
        loading_prior: Prior | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        if len(loadings) != len(task_values) or set(fixed) - set(task_values):
            raise ValueError(
                f"loadings: expected one for each of the tasks {list(task_values)}, some of them "
                f"fixed, got {list(loadings)} with {list(fixed)} fixed."
            )
        values = torch.tensor([float(t) for t in task_values])
        initial = torch.tensor([float(w) for w in loadings], dtype=torch.get_default_dtype())
        is_learnt = torch.tensor([t not in fixed for t in task_values])
        self.register_buffer("task_values", values)
        self.register_buffer("initial", initial)
        self.register_buffer("is_learnt", is_learnt)
        if is_learnt.any():
            self.raw_loadings = torch.nn.Parameter(initial[is_learnt].clone())
            if loading_prior is not None:
                self.register_prior("loading_prior", loading_prior, "raw_loadings")

    @property
    def loadings(self) -> Tensor:
        """The weights of all tasks, ``t``."""
        if not self.is_learnt.any():
            return self.initial
        return self.initial.masked_scatter(self.is_learnt, self.raw_loadings)

    @property
    def covar_matrix(self) -> Tensor:
        """``t x t``, the covariance of the tasks."""
        return self.loadings.unsqueeze(-1) * self.loadings

    def forward(self, x1: Tensor, x2: Tensor, diag: bool = False, **params: Any) -> Tensor:
        """The covariance of the tasks with values ``... x n x 1`` and ``... x n' x 1``."""
        first, second = (
            self.loadings[task_index(x, self.task_values).squeeze(-1)] for x in (x1, x2)
        )
        if diag:
            return first * second
        return first.unsqueeze(-1) * second.unsqueeze(-2)


def shared_and_own(task_values: Sequence[int]) -> list[LoadingKernel]:
    r"""Kernels of tasks that share a function, and have a part of their own.

    The first task is :math:`f_0`, task :math:`t` is :math:`w_t f_0 + v_t f_t`, each with a kernel
    of the inputs. With :math:`w_t = 0` a task has nothing to do with the first one. In contrast,
    the default kernel has one lengthscale for all tasks, and positive correlations: if outputs are
    not related, the scarce one suffers.

    Args:
        task_values: The values of all tasks, the one that others are compared with first.

    Example:
        >>> from seqgp import SequentialMultiTaskGP
        >>> x = torch.linspace(0, 1, 12, dtype=torch.double).unsqueeze(-1)
        >>> Y = torch.cat([torch.sin(6 * x), torch.cos(9 * x)], -1)
        >>> kernels = shared_and_own([0, 1])
        >>> model = SequentialMultiTaskGP(x, Y, None, task_covar_module=kernels)
        >>> model.task_covariance.shape
        torch.Size([2, 2, 2])
    """
    first, *others = task_values
    tasks = sorted(task_values)
    half = math.sqrt(0.5)  # both parts have the same variance at first

    def kernel(weights: dict[int, float], fixed: Sequence[int]) -> LoadingKernel:
        loadings = [weights.get(task, 0.0) for task in tasks]
        return LoadingKernel(tasks, loadings, fixed, loading_prior=NormalPrior(0.0, 1.0))

    shared = kernel({first: 1.0} | dict.fromkeys(others, half), [first])
    own = [kernel({task: half}, [other for other in tasks if other != task]) for task in others]
    return [shared, *own]


class TaskMean(Mean):
    """A mean of its own for each task.

    Args:
        means: The means of the tasks, as functions of the other inputs.
        task_values: The values of all tasks, in ascending order.
        task_feature: The index of the task column, from the first.
    """

    def __init__(self, means: MultitaskMean, task_values: Sequence[int], task_feature: int) -> None:
        super().__init__()
        self.means, self.task_feature = means, task_feature
        self.register_buffer("task_values", torch.tensor([float(t) for t in task_values]))

    def forward(self, x: Tensor) -> Tensor:
        """``... x n``, at inputs ``... x n x (d + 1)``."""
        i = self.task_feature
        index = task_index(x[..., i], self.task_values).unsqueeze(-1)
        others = self.means(torch.cat([x[..., :i], x[..., i + 1 :]], -1))
        return others.gather(-1, index.expand(*others.shape[:-1], 1)).squeeze(-1)


class TaskStandardize(StratifiedStandardize):
    """Standardises the observations of each task separately, for tasks with real-valued ones.

    Args:
        stratification_idx: The index of the task column.
        all_task_values: The values of all tasks.
        real: Indices of the tasks whose observations are real numbers, which are standardised.
        observed: Indices of tasks that have been observed, whose statistics are kept.
        options: As for `StratifiedStandardize`.
    """

    is_observed: Tensor

    def __init__(
        self,
        stratification_idx: int,
        all_task_values: Tensor,
        real: Sequence[int],
        observed: Sequence[int] = (),
        **options: Any,
    ) -> None:
        super().__init__(stratification_idx, all_task_values, **options)
        self.all_task_values = all_task_values.unique(sorted=True)
        self.real = tuple(real)
        is_observed = torch.zeros_like(self.all_task_values, dtype=torch.bool)
        is_observed[list(observed)] = True
        # A buffer, so that it changes together with the statistics. It is not part of a state: a
        # model that loads one still has its own data.
        self.register_buffer("is_observed", is_observed, persistent=False)

    @property
    def observed(self) -> tuple[int, ...]:
        """Indices of tasks that have been observed."""
        return tuple(self.is_observed.nonzero().flatten().tolist())

    def forward(
        self, Y: Tensor, Yvar: Tensor | None = None, X: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """As for `StratifiedStandardize`; in train mode statistics are learnt."""
        if self.training and not Y.shape[-2]:  # nothing to learn from
            self._is_trained = torch.ones_like(self._is_trained)
            return Y, Yvar
        if self.training:
            super().forward(Y, Yvar, X)
            others = [i for i in range(self.means.shape[-2]) if i not in self.real]
            for statistics, value in ((self.means, 0.0), (self.stdvs, 1.0), (self._stdvs_sq, 1.0)):
                statistics[..., others, :] = value
            self.training = False
            result = super().forward(Y, Yvar, X)
            self.training = True
            return result
        return super().forward(Y, Yvar, X)

    def learn_task(self, index: int, Y: Tensor) -> None:
        """Learn the statistics of a task of which nothing has been observed before.

        Args:
            index: Its index.
            Y: ``k`` observations of it.
        """
        is_observed = self.is_observed.clone()
        is_observed[index] = True
        self.is_observed = is_observed
        if index not in self.real:
            return
        scale = Y.std() if len(Y) > 1 else torch.ones_like(Y[0])
        scale = torch.where(scale > self._min_stdv, scale, 1.0)
        # Out of place: copies of a model may share the tensors.
        for name, value in (("means", Y.mean()), ("stdvs", scale), ("_stdvs_sq", scale.square())):
            statistics = getattr(self, name).clone()
            statistics[..., index, 0] = value
            setattr(self, name, statistics)

    def at(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """Offset and scale of observations, ``...``, by the indices of their tasks."""
        return self.means[..., 0][index], self.stdvs[..., 0][index]

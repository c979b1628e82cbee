"""`SequentialMultiTaskGP`: correlated outputs, each with a likelihood of its own."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch
from botorch.acquisition.objective import PosteriorTransform
from botorch.models import MultiTaskGP
from botorch.models.transforms.input import InputTransform
from botorch.models.transforms.outcome import OutcomeTransform
from botorch.models.utils.assorted import fantasize as fantasize_flag
from botorch.models.utils.gpytorch_modules import (
    get_covar_module_with_dim_scaled_prior,
    get_gaussian_likelihood_with_lognormal_prior,
)
from botorch.models.utils.priors import BetaPrior
from botorch.posteriors import GPyTorchPosterior, Posterior, TransformedPosterior
from botorch.sampling.base import MCSampler
from botorch.utils.datasets import SupervisedDataset
from botorch.utils.types import DEFAULT, _DefaultType
from gpytorch.distributions import MultitaskMultivariateNormal, MultivariateNormal
from gpytorch.kernels import AdditiveKernel, Kernel, ProductKernel
from gpytorch.likelihoods import FixedNoiseGaussianLikelihood, GaussianLikelihood, Likelihood
from gpytorch.means import Mean, MultitaskMean
from gpytorch.priors import Prior
from linear_operator import to_dense
from torch import Tensor

from seqgp.distributed import Ranks
from seqgp.likelihoods.by_task import GaussianTaskLikelihood, TaskLikelihood
from seqgp.likelihoods.outliers import has_outliers
from seqgp.likelihoods.traits import has_one_latent, is_conjugate, is_real_valued
from seqgp.models.construction import default_mean
from seqgp.models.outcomes import Affine
from seqgp.models.posteriors import ObservationPosterior
from seqgp.models.sequential_gp import NOISE_OF_FANTASIES, SequentialGP
from seqgp.models.tasks import (
    TaskKernel,
    TaskMean,
    TaskStandardize,
    check_tasks,
    long_format,
    task_index,
    with_task_column,
)
from seqgp.observations import Observations
from seqgp.streaming.draft import adopt, draft_of
from seqgp.streaming.guard import reads, writes
from seqgp.streaming.update import UpdateRecord
from seqgp.validation import (
    check_inputs,
    check_instance,
    check_noise,
    check_points,
    check_tensor,
    check_Y,
    is_whole,
)
from seqgp.variational.frozen import frozen

Kernels: TypeAlias = Kernel | Sequence[Kernel]
Likelihoods: TypeAlias = Likelihood | Sequence[Likelihood] | Mapping[int, Likelihood]


class SequentialMultiTaskGP(SequentialGP):
    r"""A Gaussian process with several correlated outputs, each with its own likelihood.

    It is a drop-in replacement for `botorch.models.MultiTaskGP`, with the same arguments first. One
    column of the inputs says which task an observation belongs to. The prior is
    :math:`k((x, t), (x', t')) = k(x, x') \, B_{tt'}` (an intrinsic coregionalisation model), with
    the same kernels and priors. With Gaussian observations and an inducing point at each input, the
    posterior is that of `MultiTaskGP` with the same hyperparameters. In addition,

    * you can pass several kernels. The prior is then :math:`\sum_q k_q(x, x') \, B^q_{tt'}` (a
      linear model of coregionalisation, LMC);
    * each task can have its own likelihood. For example, a Gaussian objective, a count and a label
      can be correlated;
    * `update` learns from a stream, with observations of any tasks. Tasks that appear later must be
      declared with ``all_tasks``;
    * conditioning and fantasies work across tasks.

    Inducing points only take existing values in the task column. Real-valued observations are
    standardised for each task separately. (`MultiTaskGP` standardises all of them together.)

    Args:
        train_X: ``n x (d + 1)`` inputs, one column of which is the task; or ``n x d`` inputs, if
            ``task_feature`` is ``None``.
        train_Y: ``n x 1`` observations. If ``task_feature`` is ``None``, ``n x m``, with a column
            for each of the tasks ``0, ..., m - 1`` and NaN where a task was not observed.
        task_feature: The index of the task column. ``None`` for data in wide format, to which a
            last column with the task is then added.
        train_Yvar: ``n x 1`` noise variances, if all tasks are Gaussian.
        mean_module: The mean. By default a constant for each task.
        covar_module: The kernel of the inputs without the task, or a list of kernels. By default
            BoTorch's.
        likelihood: A likelihood for each task, as a list in ascending order of the tasks or as a
            dictionary by task; or one for all of them. By default a Gaussian for each task.
        task_covar_prior: The prior of the correlations of tasks. By default that of `MultiTaskGP`.
        output_tasks: The tasks that `posterior` returns. By default all.
        rank: The rank of the covariance of the tasks. By default their number.
        all_tasks: All tasks that may appear. By default those in ``train_X``.
        outcome_transform: By default `TaskStandardize`. ``None`` means no transform.
        input_transform: Applied to all inputs. It must not change the task column.
        validate_task_values: Ignored: task values are always checked.
        task_covar_module: The kernel of the task column, or one for each kernel of the inputs. By
            default that of `MultiTaskGP`, whose correlations are positive. `LoadingKernel` allows
            correlations of either sign.
        options: Further options of `SequentialGP` (``inducing_points``, ``process_group``, ...).

    Example:
        >>> import torch
        >>> from gpytorch.likelihoods import BernoulliLikelihood, GaussianLikelihood
        >>> x = torch.linspace(0, 1, 20, dtype=torch.double).unsqueeze(-1)
        >>> Y = torch.cat([torch.sin(6 * x), (x < 0.5).to(x)], -1)
        >>> Y[10:, 0] = torch.nan  # the objective was not observed there
        >>> each = [GaussianLikelihood(), BernoulliLikelihood()]
        >>> model = SequentialMultiTaskGP(x, Y, None, likelihood=each)
        >>> model.posterior(x).mean.shape  # of both latent functions
        torch.Size([20, 2])
        >>> model.num_data
        30
    """

    all_tasks: tuple[int, ...]
    output_tasks: tuple[int, ...]
    task_feature: int

    def __init__(
        self,
        train_X: Tensor,
        train_Y: Tensor,
        task_feature: int | None,
        train_Yvar: Tensor | None = None,
        mean_module: Mean | None = None,
        covar_module: Kernels | None = None,
        likelihood: Likelihoods | None = None,
        task_covar_prior: Prior | _DefaultType | None = DEFAULT,
        output_tasks: Sequence[int] | None = None,
        rank: int | None = None,
        all_tasks: Sequence[int] | None = None,
        outcome_transform: OutcomeTransform | _DefaultType | None = DEFAULT,
        input_transform: InputTransform | None = None,
        validate_task_values: bool = True,
        task_covar_module: Kernels | None = None,
        **options: Any,
    ) -> None:
        ranks = Ranks(options.get("process_group"))
        with ranks.together():
            check_inputs(train_X, name="train_X")
            if train_X.dim() != 2:
                raise ValueError(
                    f"train_X: expected shape n x (d + 1), got {tuple(train_X.shape)}."
                )
            if task_feature is None:
                check_Y(train_X, train_Y, "train_X", "train_Y")
                if train_Yvar is not None:
                    raise ValueError(
                        "train_Yvar: noise variances need observations in long format."
                    )
                tasks = all_tasks = _distinct(
                    range(train_Y.shape[-1]) if all_tasks is None else all_tasks, "all_tasks"
                )
                if len(tasks) != train_Y.shape[-1]:
                    raise ValueError(
                        f"train_Y: expected a column for each of {len(tasks)} tasks, got "
                        f"{train_Y.shape[-1]}."
                    )
                feature = train_X.shape[-1]
                train_X, train_Y = long_format(train_X, train_Y, tasks, feature)
            else:
                d = train_X.shape[-1]
                if not is_whole(task_feature) or not -d <= task_feature < d:
                    raise ValueError(
                        f"task_feature: expected a column of {d}, got {task_feature!r}."
                    )
                feature = int(task_feature) % d
            seen = ranks.gather(train_X[:, feature]).unique().tolist()
            if any(value != round(value) for value in seen):
                check_tasks(train_X[:, feature], [round(v) for v in seen], "train_X")
            tasks = _distinct(
                [int(value) for value in seen] if all_tasks is None else all_tasks, "all_tasks"
            )
            check_tasks(train_X[:, feature], tasks, "train_X")
            outputs = tuple(tasks if output_tasks is None else output_tasks)
            if not outputs or set(outputs) - set(tasks):
                raise ValueError(f"output_tasks: expected some of {tasks}, got {list(outputs)}.")
            if rank is not None and not (is_whole(rank) and 0 <= rank <= len(tasks)):
                raise ValueError(
                    f"rank: expected a whole number up to {len(tasks)}, the number of tasks, got "
                    f"{rank!r}."
                )
            noisy = train_Yvar is not None
            if noisy and likelihood is not None and not isinstance(likelihood, Likelihood):
                raise ValueError(
                    "train_Yvar: the noise of all tasks is known then; leave out likelihood."
                )
            chosen = None if noisy and likelihood is None else _likelihood(likelihood, tasks)
            others = [i for i in range(train_X.shape[-1]) if i != feature]
            kernel = _kernel(
                covar_module, task_covar_module, others, feature, tasks, rank, task_covar_prior
            )
            if mean_module is None:
                mean_module = MultitaskMean(_default_means(chosen, tasks), num_tasks=len(tasks))
            if isinstance(mean_module, MultitaskMean):
                mean_module = TaskMean(mean_module, tasks, feature)
            if outcome_transform is DEFAULT:
                outcome_transform = _default_transform(chosen, tasks, feature, train_X, seen)
            arguments = {}
            if isinstance(chosen, TaskLikelihood):
                values = torch.tensor([float(t) for t in tasks], device=train_X.device)
                arguments["task"] = task_index(train_X[:, feature], values)
            check_instance(input_transform, InputTransform, "input_transform")
            super().__init__(
                train_X,
                train_Y,
                train_Yvar,
                chosen,
                kernel.to(train_X),
                mean_module,
                outcome_transform,
                input_transform,
                likelihood_arguments=arguments,
                discrete_dims=(feature,),
                **options,
            )
            moved = self.transform_inputs(train_X)[..., feature]
            if moved.shape == train_X.shape[:-1] and not torch.equal(moved, train_X[:, feature]):
                raise ValueError(
                    "input_transform: expected one that leaves the task column as it is, such as "
                    f"Normalize(d, indices=...) with all columns but {feature}."
                )
        self.all_tasks, self.output_tasks, self.task_feature = tuple(tasks), outputs, feature
        self._num_outputs = len(outputs)
        Z = self.variational_strategy.inducing_points
        check_tasks(Z[..., feature].detach(), tasks, "inducing_points")

    # ---------------------------------------------------------------- tasks

    @property
    def num_columns(self) -> int:
        """Observations have one column: they are in long format."""
        return 1

    @property
    def num_tasks(self) -> int:
        """The number of tasks."""
        return len(self.all_tasks)

    @property
    def task_covariance(self) -> Tensor:
        """``t x t``, the covariance of the tasks; ``k x t x t`` for ``k`` kernels of the inputs."""
        kernel: Any = self.covar_module
        terms = kernel.kernels if isinstance(kernel, AdditiveKernel) else [kernel]
        each = torch.stack([term.kernels[-1].covar_matrix for term in terms]).detach()
        return each if isinstance(kernel, AdditiveKernel) else each[0]

    @property
    def output_likelihood(self) -> Likelihood:
        """The likelihood of the only output task, or that of all tasks if there are several."""
        likelihood: Any = self.likelihood
        if isinstance(likelihood, TaskLikelihood) and len(self.output_tasks) == 1:
            return likelihood.likelihoods[self.all_tasks.index(self.output_tasks[0])]
        return likelihood

    def observed_of(self, task: int) -> Tensor:
        """``n x 1`` observations of a task at hand, as they were passed.

        Args:
            task: The value of the task.
        """
        held = self.stream.observations
        index = self._index(held.inputs)
        mine = index == self.all_tasks.index(task)
        offset, scale = self._units(index)
        return (offset + scale * held.targets)[mine].unsqueeze(-1)

    def _index(self, X: Tensor) -> Tensor:
        """``... x n`` indices of tasks, of inputs with a task column that has been checked."""
        tasks = X.new_tensor([float(t) for t in self.all_tasks])
        return task_index(X[..., self.task_feature], tasks)

    def _is_long(self, X: Tensor, name: str = "X") -> bool:
        """Whether inputs have a task column, whose values are checked."""
        check_points(X, None, name)
        if X.shape[-1] == self.num_inputs - 1:
            return False
        check_points(X, self.num_inputs, name)
        check_tasks(X[..., self.task_feature], self.all_tasks, name)
        return True

    def long_inputs(self, X: Tensor, name: str = "X") -> Tensor:
        """Inputs with a checked task column, by default for one output task after the other.

        Args:
            X: ``... x q x (d + 1)`` inputs, or ``... x q x d``.
            name: What to call them in errors.
        """
        if self._is_long(X, name):
            return X
        return with_task_column(X, self.output_tasks, self.task_feature)

    def __call__(self, inputs: Tensor, prior: bool = False, **kwargs: Any) -> MultivariateNormal:
        """As for `SequentialGP`. In train mode the result knows the tasks, for the likelihood.

        Args:
            inputs: ``... x n x (d + 1)`` inputs.
            prior: Return the prior instead.
            kwargs: Passed to the variational strategy.
        """
        f: Any = super().__call__(inputs, prior=prior, **kwargs)
        if self.training and not prior:
            f.arguments = self.task_arguments(inputs)
        return f

    def task_arguments(self, X: Tensor) -> dict[str, Tensor]:
        """What the likelihood needs to know of observations at inputs with a task column.

        Args:
            X: ``... x n x (d + 1)`` inputs.
        """
        return {"task": self._index(X)} if isinstance(self.likelihood, TaskLikelihood) else {}

    @property
    def output_scale(self) -> Affine:
        """Offset and scale of the observations of the first output task."""
        first = self.all_tasks.index(self.output_tasks[0])
        Z = self.variational_strategy.inducing_points
        return Affine(*self._units(torch.tensor([first], device=Z.device)))

    def _long(self, X: Tensor, Y: Tensor) -> tuple[Tensor, Tensor]:
        """New observations in long format; those in wide format may be of all or output tasks."""
        if self._is_long(X):
            return X, Y
        check_tensor(Y, "Y")
        m = Y.shape[-1] if Y.dim() == 2 else 0
        tasks = self.all_tasks if m == self.num_tasks else self.output_tasks
        if m != len(tasks) or Y.shape[0] != X.shape[0] or X.dim() != 2:
            raise ValueError(
                f"Y: expected a column for each of {self.num_tasks} tasks, since X has no task "
                f"column, got {tuple(Y.shape)} for X of shape {tuple(X.shape)}."
            )
        return long_format(X, Y.to(X), tasks, self.task_feature)

    def checked(
        self, X: Tensor, Y: Tensor, noise: Tensor | None, arguments: dict[str, Any]
    ) -> Observations:
        """New observations as the model stores them; raises if anything is wrong with them.

        Args:
            X: ``n x (d + 1)`` inputs, or ``n x d`` if ``Y`` is in wide format.
            Y: ``n x 1`` observations, or ``n x m``.
            noise: As for `SequentialGP`.
            arguments: Likewise.
        """
        X, Y = self._long(X, Y)
        return super().checked(X, Y, noise, {**self.task_arguments(X), **arguments})

    @writes
    def update(self, X: Tensor, Y: Tensor, *args: Any, **kwargs: Any) -> UpdateRecord:
        """Learn from the next batch of a stream; see `SequentialGP.update`.

        Args:
            X: ``n' x (d + 1)`` inputs, or ``n' x d`` if ``Y`` is in wide format.
            Y: ``n' x 1`` observations, or ``n' x m``, a column for each task, NaN where it was not
                observed.
            args: As for `SequentialGP.update`.
            kwargs: Likewise.
        """
        ranks = self.variational_strategy.ranks
        with ranks.together():
            X, Y = self._long(X, Y)
            transform = getattr(self, "outcome_transform", None)
            new = {}
            if isinstance(transform, TaskStandardize):
                new = self._new_tasks(transform, X, Y)
        if not new:
            return super().update(X, Y, *args, **kwargs)
        # Nothing is known of these tasks in other units. Their scales are learnt on the side, too,
        # and adopted together with the rest of the update.
        draft: Any = draft_of(self, learn=True)
        for i, values in new.items():
            draft.outcome_transform.learn_task(i, values)
        draft.note_hyperparameters()
        with ranks.together():
            record = SequentialGP.update(draft, X, Y, *args, **kwargs)
            ranks.commit(lambda: adopt(self, draft))
        return record

    def _new_tasks(self, transform: TaskStandardize, X: Tensor, Y: Tensor) -> dict[int, Tensor]:
        """Observations of tasks that appear for the first time, by the indices of the tasks."""
        check_Y(X, Y, "X", "Y", 1, self.likelihood)
        missing = [i for i in range(self.num_tasks) if i not in transform.observed]
        if not missing:
            return {}
        ranks = self.variational_strategy.ranks
        index = ranks.gather(self._index(X))
        targets = ranks.gather(self.in_precision(Y.detach()).flatten())
        values = {i: targets[index == i] for i in missing}
        return {i: each for i, each in values.items() if len(each)}

    # ---------------------------------------------------------------- predictions

    @reads
    def posterior(  # type: ignore[override]
        self,
        X: Tensor,
        output_indices: list[int] | None = None,
        observation_noise: bool | Tensor = False,
        posterior_transform: PosteriorTransform | None = None,
        **arguments: Any,
    ) -> Posterior:
        """The posterior of all output tasks, or of the tasks in the task column of ``X``.

        Args:
            X: ``... x q x d`` inputs without a task column, for all output tasks; or
                ``... x q x (d + 1)`` inputs with one.
            output_indices: Tasks to use instead of the output tasks, if ``X`` has no task column.
            observation_noise: Whether to include the noise of observations. If not all of these
                tasks are Gaussian, the result is a posterior over observations. For Gaussian
                observations, a tensor ``... x q x m`` of noise variances can be passed instead.
            posterior_transform: Applied to the posterior.
            arguments: There are none.

        Returns:
            A posterior over ``... x q x m`` values; ``m`` is one if ``X`` has a task column.
        """
        m, long = 1, self._is_long(X)
        q = X.shape[-2]
        if long:
            if output_indices is not None:
                raise ValueError("output_indices: expected None, since X has a task column.")
            X_full = X
        else:
            tasks = self.output_tasks if output_indices is None else tuple(output_indices)
            if set(tasks) - set(self.all_tasks):
                raise ValueError(
                    f"output_indices: expected some of {list(self.all_tasks)}, got {list(tasks)}."
                )
            m, X_full = len(tasks), with_task_column(X, tasks, self.task_feature)
        index = self._index(X_full)
        self._leave_train_mode()
        f = self(self._predicted_at(X_full))
        mean, covariance = f.mean, f.lazy_covariance_matrix
        gaussian = observation_noise is False or self._is_gaussian(index)
        if isinstance(observation_noise, Tensor):
            if not gaussian:
                raise ValueError(
                    "observation_noise: noise variances are for Gaussian likelihoods, not all of "
                    "these tasks have one; pass True."
                )
            columns = mean.unflatten(-1, (m, q)).mT.shape
            check_noise(observation_noise, columns, "observation_noise")
            each = self.in_precision(observation_noise).expand(columns)
            covariance = covariance.add_diagonal(each.mT.reshape(mean.shape))
        elif observation_noise and gaussian:
            covariance = covariance.add_diagonal(self._noise_of(index).expand(mean.shape))
        offset, scale = self._units(index)
        if gaussian:
            mean = offset + scale * mean
            dense = to_dense(covariance) * scale.unsqueeze(-1) * scale.unsqueeze(-2)
            posterior: Posterior = GPyTorchPosterior(_of_tasks(mean, dense, q, m))
        else:
            latent = GPyTorchPosterior(_of_tasks(mean, to_dense(covariance), q, m))
            posterior = self._observations(latent, index, offset, scale, m)
        if posterior_transform is not None:
            posterior = posterior_transform(posterior=posterior, X=X)
        return posterior

    def _observations(
        self, latent: GPyTorchPosterior, index: Tensor, offset: Tensor, scale: Tensor, m: int
    ) -> Posterior:
        """The posterior over observations that are not all Gaussian.

        Args:
            latent: The posterior of the latent functions, ``... x q x m``.
            index: ``... x (m q)`` indices of tasks.
            offset: ``... x (m q)``, of observations.
            scale: ``... x (m q)``, likewise.
            m: The number of outputs.
        """
        likelihood, present = self.likelihood, index.unique().tolist()
        rows = {}
        if isinstance(likelihood, TaskLikelihood):
            if len(present) == 1:
                likelihood = likelihood.likelihoods[present[0]]
            else:
                rows["task"] = index.unflatten(-1, (m, -1))
        observed = ObservationPosterior(latent, frozen(likelihood), rows)
        if bool((offset == 0).all() & (scale == 1).all()):
            return observed
        a, b = (each.unflatten(-1, (m, -1)).mT for each in (offset, scale))
        return TransformedPosterior(
            observed,
            sample_transform=lambda y: a + b * y,
            mean_transform=lambda mean, variance: a + b * mean,
            variance_transform=lambda mean, variance: b.square() * variance,
        )

    def _is_gaussian(self, index: Tensor) -> bool:
        """Whether observations of tasks with these indices are Gaussian."""
        each = _each(self.likelihood, self.all_tasks)
        return all(is_conjugate(each[i]) for i in index.unique().tolist())

    def _noise_of(self, index: Tensor) -> Tensor:
        """``... x n`` noise variances of Gaussian observations, by the indices of tasks."""
        likelihood: Any = self.likelihood
        if isinstance(likelihood, TaskLikelihood):
            parts: list[Any] = list(likelihood.likelihoods)
            none = index.new_zeros(1, dtype=self.variational_strategy.inducing_points.dtype)
            each = [part.noise.reshape(1) if is_conjugate(part) else none for part in parts]
            return torch.cat(each)[index]
        if isinstance(likelihood, FixedNoiseGaussianLikelihood):  # the mean of each task's
            held = self.stream.observations
            known, noise = self._index(held.inputs), held.arguments["noise"]
            means = [noise[known == i].mean() for i in range(self.num_tasks)]
            return torch.stack(means)[index]
        return likelihood.noise.expand(index.shape)

    def _units(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """Offset and scale of observations, ``... x n``, by the indices of tasks."""
        transform = getattr(self, "outcome_transform", None)
        like = self.variational_strategy.inducing_points
        if transform is None:
            return like.new_zeros(index.shape), like.new_ones(index.shape)
        if isinstance(transform, TaskStandardize):
            return transform.at(index)
        tasks = like.new_tensor([float(t) for t in self.all_tasks])
        X = like.new_zeros(*index.shape, self.num_inputs)
        X[..., self.task_feature] = tasks[index]
        zero = X[..., :1] * 0
        offset, variance = transform.untransform(zero, torch.ones_like(zero), X=X)
        return offset.squeeze(-1), variance.sqrt().squeeze(-1)

    def log_predictive_density(self, X: Tensor, targets: Tensor, **arguments: Any) -> Tensor:
        """Log predictive density of transformed targets; see `SequentialGP`.

        Args:
            X: ``... x n x (d + 1)`` inputs.
            targets: ``... x n`` transformed targets.
            arguments: There are none.
        """
        check_points(X, self.num_inputs, "X")
        self._is_long(X)
        return super().log_predictive_density(X, targets, **self.task_arguments(X), **arguments)

    # ---------------------------------------------------------------- conditioning

    def condition_on_observations(
        self, X: Tensor, Y: Tensor, noise: Tensor | None = None, **kwargs: Any
    ) -> SequentialMultiTaskGP:
        """Return a model that is conditioned on more observations of any tasks; see `SequentialGP`.

        Args:
            X: ``... x n' x (d + 1)`` inputs; or ``... x n' x d``, for observations of all output
                tasks at each.
            Y: ``... x n' x 1`` observations, or ``... x n' x m``. Without batches, they may be NaN
                where a task was not observed.
            noise: Noise variances, if all tasks are Gaussian, of the shape of ``Y``, in the space
                of transformed outcomes.
            kwargs: As for `SequentialGP`.
        """
        if noise is not None:
            check_tensor(noise, "noise")
            check_tensor(Y, "Y")
            if noise.shape[-2:] != Y.shape[-2:]:
                raise ValueError(
                    f"noise: expected the shape of Y, {tuple(Y.shape)}, got {tuple(noise.shape)}."
                )
        if not self._is_long(X):
            check_tensor(Y, "Y")
            m = len(self.output_tasks)
            if Y.dim() < 2 or Y.shape[-1] != m:
                raise ValueError(
                    f"Y: expected {m} columns, one for each output task, got {tuple(Y.shape)}."
                )
            if X.dim() == Y.dim() == 2 and bool(Y.isnan().any()):
                if noise is not None:
                    seen = ~Y.mT.reshape(-1).isnan()
                    noise = noise.mT.reshape(-1, 1)[seen]
                X, Y = long_format(X, Y.to(X), self.output_tasks, self.task_feature)
            else:
                X = with_task_column(X, self.output_tasks, self.task_feature)
                Y = Y.mT.reshape(*Y.shape[:-2], -1, 1)
                if noise is not None:
                    noise = noise.mT.reshape(*noise.shape[:-2], -1, 1)
        if noise is not None and not self._is_gaussian(self._index(X)):
            raise ValueError(
                "noise: noise variances are for Gaussian likelihoods, and not all of these tasks "
                "have one."
            )
        kwargs = {**self.task_arguments(X), **kwargs}
        return super().condition_on_observations(X, Y, noise, **kwargs)

    @reads
    def fantasize(
        self,
        X: Tensor,
        sampler: MCSampler,
        observation_noise: Tensor | None = None,
        propagate_grads: bool = False,
        **kwargs: Any,
    ) -> SequentialMultiTaskGP:
        """Return the model conditioned on observations at ``X``, sampled from its posterior.

        Args:
            X: ``... x n' x d`` inputs, for fantasies of all output tasks, or ``... x n' x (d + 1)``
                for those of the task in each row.
            sampler: Draws observations.
            observation_noise: Noise variances, if all tasks are Gaussian, ``... x n' x m`` or
                ``... x 1 x m``, in the space of transformed outcomes.
            propagate_grads: There is always a gradient.
            kwargs: As for `condition_on_observations`.
        """
        check_instance(sampler, MCSampler, "sampler", optional=False)
        if isinstance(observation_noise, bool):
            raise ValueError(NOISE_OF_FANTASIES)
        noisy = True if observation_noise is None else observation_noise
        with fantasize_flag():
            Y = sampler(self.posterior(X, observation_noise=noisy))
            if observation_noise is not None:
                kwargs["noise"] = observation_noise.expand(Y.shape[1:])
            return self.condition_on_observations(X, Y, **kwargs)

    # ---------------------------------------------------------------- housekeeping

    def subset_output(self, idcs: list[int]) -> SequentialMultiTaskGP:
        """Return a copy of the model with some of its output tasks.

        Args:
            idcs: Positions of these tasks among the output tasks.
        """
        m = len(self.output_tasks)
        if not idcs or any(not -m <= i < m for i in idcs):
            raise ValueError(f"idcs: expected indices of the {m} outputs, got {idcs}.")
        model = copy.deepcopy(self)
        model.output_tasks = tuple(self.output_tasks[i] for i in idcs)
        model._num_outputs = len(idcs)
        return model

    @classmethod
    def construct_inputs(  # type: ignore[override]
        cls, training_data: SupervisedDataset, task_feature: int, **kwargs: Any
    ) -> dict[str, Any]:
        """Constructor arguments from a BoTorch data set, as for `MultiTaskGP`.

        Args:
            training_data: The data set.
            task_feature: The index of the task column.
            kwargs: Arguments of `MultiTaskGP.construct_inputs`, and of the constructor.
        """
        names = ("output_tasks", "task_covar_prior", "prior_config", "rank")
        own = {key: kwargs.pop(key) for key in names if key in kwargs}
        return {**MultiTaskGP.construct_inputs(training_data, task_feature, **own), **kwargs}


def _distinct(tasks: Sequence[int] | Tensor, name: str) -> list[int]:
    """Tasks in ascending order, checked."""
    tasks = tasks.tolist() if isinstance(tasks, Tensor) else tasks
    if any(not is_whole(task) for task in tasks) or len(set(tasks)) != len(tasks):
        raise ValueError(f"{name}: expected different whole numbers, got {list(tasks)!r:.80}.")
    return sorted(int(task) for task in tasks)


def _check_no_outliers(likelihoods: Sequence[Likelihood]) -> None:
    """Raise if a likelihood looks for outliers among the observations that it was made for."""
    for each in likelihoods:
        if has_outliers(each):
            raise ValueError(
                f"likelihood: a {type(each).__name__} works in a SequentialGP only; a task with "
                "outliers can have a gpytorch.likelihoods.StudentTLikelihood."
            )


def _likelihood(given: Likelihoods | None, tasks: Sequence[int]) -> Likelihood:
    """The likelihood of a model, from what the user says about each task."""
    if isinstance(given, Likelihood):
        _check_no_outliers([given])
        if not has_one_latent(given):
            raise TypeError(
                "likelihood: expected one of one latent function, of which each task has its own, "
                f"got a {type(given).__name__}."
            )
        return given
    if given is None:
        no_batch = torch.Size()
        given = [get_gaussian_likelihood_with_lognormal_prior(no_batch) for _ in tasks]
    if isinstance(given, Mapping):
        missing = [task for task in tasks if task not in given]
        unknown = [task for task in given if task not in tasks]
        if missing or unknown:
            raise ValueError(
                f"likelihood: expected one for each of the tasks {list(tasks)}, got "
                + (f"none for {missing}." if missing else f"some for {unknown}.")
            )
        given = [given[task] for task in tasks]
    if isinstance(given, str) or not isinstance(given, Sequence):
        raise TypeError(
            "likelihood: expected a likelihood, a list of them or a dictionary by task, got "
            f"{given!r:.50}."
        )
    if len(given) != len(tasks):
        raise ValueError(
            f"likelihood: expected one for each of the tasks {list(tasks)}, got {len(given)}."
        )
    _check_no_outliers(given)
    gaussian = all(isinstance(each, GaussianLikelihood) for each in given)
    return (GaussianTaskLikelihood if gaussian else TaskLikelihood)(given)


def _each(
    likelihood: Likelihood | None, tasks: Sequence[int]
) -> list[Likelihood] | list[Likelihood | None]:
    """The likelihood of each task, ``None`` for Gaussian observations with known noise."""
    if isinstance(likelihood, TaskLikelihood):
        return list(likelihood.likelihoods)
    return [likelihood] * len(tasks)


def _default_means(likelihood: Likelihood | None, tasks: Sequence[int]) -> list[Mean]:
    """A constant for each task."""
    return [default_mean(each, torch.Size()) for each in _each(likelihood, tasks)]


def _kernel(
    given: Kernels | None,
    given_tasks: Kernels | None,
    others: list[int],
    feature: int,
    tasks: Sequence[int],
    rank: int | None,
    prior: Prior | _DefaultType | None,
) -> Kernel:
    """The kernel of all columns: a sum of products of a kernel of the inputs and one of the tasks.

    Args:
        given: What the user says about the inputs.
        given_tasks: What the user says about the tasks.
        others: The columns of the inputs.
        feature: The column of the task.
        tasks: The values of the tasks.
        rank: The rank of the covariance of the tasks.
        prior: The prior of the correlations of the tasks.
    """
    if given is None:
        d, several = len(others), isinstance(given_tasks, Sequence)
        given = [
            get_covar_module_with_dim_scaled_prior(ard_num_dims=d, active_dims=others)
            for _ in (given_tasks if several else [None])  # type: ignore[union-attr]
        ]
    kernels = _kernels(given, "covar_module")
    if given_tasks is None:
        if prior is DEFAULT:
            prior = BetaPrior(concentration1=2.5, concentration0=1.5)
        task_kernels: list[Kernel] = [
            TaskKernel(
                tasks,
                len(tasks) if rank is None else rank,
                task_prior=prior,
                part=(q, len(kernels)),
                active_dims=[feature],
            )
            for q in range(len(kernels))
        ]
    else:
        task_kernels = _kernels(given_tasks, "task_covar_module")
        if rank is not None or prior is not DEFAULT:
            raise ValueError(
                "task_covar_module: has a rank and a prior of its own; leave out rank and "
                "task_covar_prior."
            )
    if len(task_kernels) != len(kernels):
        raise ValueError(
            f"task_covar_module: expected one for each of {len(kernels)} kernels, got "
            f"{len(task_kernels)}."
        )
    products = []
    for kernel, task_kernel in zip(kernels, task_kernels, strict=True):
        for each, columns in ((kernel, others), (task_kernel, [feature])):
            if each.active_dims is None:
                each.active_dims = torch.tensor(columns)
        products.append(ProductKernel(kernel, task_kernel))
    return products[0] if len(products) == 1 else AdditiveKernel(*products)


def _kernels(given: Any, name: str) -> list[Kernel]:
    """Kernels as a list, checked."""
    kernels = [given] if isinstance(given, Kernel) or not isinstance(given, Sequence) else given
    if not kernels:
        raise ValueError(f"{name}: expected at least one kernel, got none.")
    for kernel in kernels:
        check_instance(kernel, Kernel, name, optional=False)
    return list(kernels)


def _default_transform(
    likelihood: Likelihood | None,
    tasks: Sequence[int],
    feature: int,
    X: Tensor,
    seen: Sequence[float],
) -> TaskStandardize | None:
    """Standardisation of the tasks whose observations are real numbers."""
    each = _each(likelihood, tasks)
    real = [i for i, part in enumerate(each) if part is None or is_real_valued(part)]
    if not real:
        return None
    values = torch.tensor(tasks, device=X.device)
    observed = [i for i, task in enumerate(tasks) if task in seen]
    return TaskStandardize(feature, values, real, observed, dtype=X.dtype)


def _of_tasks(mean: Tensor, covariance: Tensor, q: int, m: int) -> MultivariateNormal:
    """A distribution at ``m q`` points, one task after the other, as one of ``m`` outputs."""
    if m == 1:
        return MultivariateNormal(mean, covariance)
    return MultitaskMultivariateNormal(mean.unflatten(-1, (m, q)).mT, covariance, interleaved=False)

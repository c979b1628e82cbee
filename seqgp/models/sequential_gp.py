"""`SequentialGP`: a sparse GP for any likelihood, as a BoTorch model."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from botorch import settings
from botorch.acquisition.objective import PosteriorTransform
from botorch.exceptions.errors import UnsupportedError
from botorch.models import SingleTaskGP
from botorch.models.gpytorch import GPyTorchModel
from botorch.models.model import FantasizeMixin
from botorch.models.transforms.input import InputTransform
from botorch.models.transforms.outcome import OutcomeTransform
from botorch.models.utils import add_output_dim, gpt_posterior_settings
from botorch.models.utils.assorted import fantasize as fantasize_flag
from botorch.models.utils.inducing_point_allocators import InducingPointAllocator
from botorch.posteriors import GPyTorchPosterior, Posterior
from botorch.sampling.base import MCSampler
from botorch.utils.datasets import SupervisedDataset
from botorch.utils.types import DEFAULT, _DefaultType
from gpytorch.distributions import MultitaskMultivariateNormal, MultivariateNormal
from gpytorch.kernels import Kernel
from gpytorch.likelihoods import FixedNoiseGaussianLikelihood, Likelihood
from gpytorch.means import Mean
from gpytorch.mlls import MarginalLogLikelihood
from gpytorch.models import ApproximateGP
from linear_operator.operators import BlockDiagLinearOperator, DiagLinearOperator
from torch import Tensor

from seqgp.distributed import ALONE, Ranks
from seqgp.dual import Sites
from seqgp.dual.linalg import broadcast_shapes
from seqgp.dual.natural_gradient import step_limit
from seqgp.likelihoods import log_predictive
from seqgp.likelihoods.discrete import OverdispersedBinomialLikelihood
from seqgp.likelihoods.outliers import (
    has_outliers,
    noise_of_new_data,
    noise_of_training_data,
    show_training_inputs,
)
from seqgp.likelihoods.traits import (
    has_closed_form,
    has_one_latent,
    is_conjugate,
    output_latents,
)
from seqgp.models.construction import (
    assemble,
    choose_inducing_points,
    discrete_columns,
    distinct,
)
from seqgp.models.fit import fit, loss
from seqgp.models.loading import load_state
from seqgp.models.outcomes import affine, transform_observations
from seqgp.models.outputs import select_outputs
from seqgp.models.posteriors import ObservationPosterior
from seqgp.models.sharding import gathered, scattered, with_graph
from seqgp.models.staleness import catch_up, is_current, is_finite_and_current, values_of
from seqgp.models.train_mode import TrainingMarginals
from seqgp.models.training_data import (
    graph_of,
    known_noise,
    note_conditioned,
    train_inputs,
    train_targets,
    untransformed_inputs,
)
from seqgp.models.training_graph import TrainingGraph
from seqgp.observations import Observations, check_not_held
from seqgp.streaming.guard import Guard, reads, writes
from seqgp.streaming.inducing_points import DEFAULT_LIMIT, InducingPointRule, on_seen_values
from seqgp.streaming.memory import MemoryOptions, summed_over_parts
from seqgp.streaming.options import UpdateOptions
from seqgp.streaming.rules import UpdateRule, note_classes
from seqgp.streaming.state import Shard, StreamState
from seqgp.streaming.update import (
    Remembered,
    UpdateRecord,
    forget,
    leverage_of,
    update,
    update_stream,
)
from seqgp.validation import (
    check_arguments,
    check_bound,
    check_finite,
    check_flag,
    check_input_shape,
    check_inputs,
    check_instance,
    check_noise,
    check_points,
    check_steps,
    check_targets,
    check_tensor,
    check_Y,
    renamed,
)
from seqgp.variational.frozen import frozen
from seqgp.variational.prior_blocks import mean_and_kernel
from seqgp.variational.strategy import DualVariationalStrategy

#: Options of `DualVariationalStrategy.get_fantasy_model`; its other arguments are per point.
_CONDITION_OPTIONS = ("fixed_inducing", "tol", "max_steps", "noise")
#: The error message for `fantasize(observation_noise=True)` and the like.
NOISE_OF_FANTASIES = (
    "observation_noise: expected noise variances or None; fantasised observations always have the "
    "likelihood's noise."
)
_POSTERIOR_OPTIONS = ("output_indices", "observation_noise", "posterior_transform")
#: Options of `update`, for errors about unknown arguments.
_UPDATE_OPTIONS = (
    *("memory", "noise", "learn", "mode", "optimizer", "steps", "tol", "learning_rate"),
    *("inducing", "max_inducing", "discount", "site_steps"),
)


class SequentialGP(GPyTorchModel, ApproximateGP, FantasizeMixin):
    r"""A sparse Gaussian process for any likelihood, which can be updated with new data.

    It is a drop-in replacement for `SingleTaskGP`: the same arguments come first, and the defaults
    (kernel, priors, noise, `Standardize`) are the same. Up to a thousand inputs, each input is an
    inducing point. With Gaussian observations the posterior is then that of `SingleTaskGP` with the
    same hyperparameters, and so are conditioned models, leave-one-out predictions and the loss
    that is minimised by a fit. Differences:

    * A new model already has a posterior, for the initial hyperparameters. It is recomputed when
      you predict after changing hyperparameters, noise or the input transform.
    * Fit it with `fit_gpytorch_mll` and a `DualELBO`. An `ExactMarginalLogLikelihood` works, too,
      and is replaced by the `DualELBO`. In your own training loop, an `ExactMarginalLogLikelihood`
      only works for Gaussian observations, as long as none has been discarded. Other objectives for
      exact GPs only work in `fit_gpytorch_mll`, for Gaussian observations with an inducing point at
      each input; otherwise they raise an error.
    * The arguments of `SingleTaskVariationalGP` are passed by name, except for
      ``variational_distribution`` and ``variational_strategy``. In a training loop with
      `VariationalELBO`, whose targets are ``train_targets``, each backward pass takes a
      natural-gradient step of the posterior. `DualNGD` is an optimiser for these steps.
    * A new model is in train mode, as in BoTorch. Predicting, conditioning or updating switches to
      eval mode. In train mode, calling the model returns the posterior, where exact GPs return the
      prior.
    * The default `Standardize` is updated along a stream. All other transforms keep the statistics
      of the first data.
    * Once a stream has discarded observations, ``train_targets`` returns those in the memory, with
      a warning. A ``state_dict`` does not hold a stream; use `seqgp.save`.

    Several columns of ``train_Y`` are modelled as independent outputs with kernels of their own,
    as in `SingleTaskGP`. A likelihood with several latent functions (`SoftmaxLikelihood`) has one
    column of targets, and the posterior is over its latent functions.

    Args:
        train_X: ``batch_shape x n x d`` inputs.
        train_Y: ``batch_shape x n x m`` targets. If ``None``, nothing has been observed yet: the
            inducing points are chosen from ``train_X``, and the posterior is the prior until the
            first `update`.
        train_Yvar: ``batch_shape x n x m`` noise variances of Gaussian observations.
        likelihood: Any GPyTorch likelihood. By default Gaussian with BoTorch's prior, or with
            fixed noise if ``train_Yvar`` is given.
        covar_module: The kernel. By default BoTorch's, with dimension-scaled priors.
        mean_module: The mean. By default a constant.
        outcome_transform: Applied to the targets. By default, real-valued observations (Gaussian,
            Student-t, Laplace) are standardised as in `SingleTaskGP`. Labels, counts, ranks and
            linear combinations (``coefficients``) are not. ``None`` means no transform. Parameters
            of the likelihood are on the scale of transformed targets.
        input_transform: Applied to all inputs. Statistics that it learns from the data are frozen
            at construction.
        inducing_points: Either ``batch_shape x k x d`` inducing points in the *transformed* input
            space, or their maximum number. In the latter case they are chosen from the inputs.
            There are fewer if more would not help, and more may be added later in a stream. By
            default all inputs, up to a thousand of them, and beyond that a few hundred that are
            chosen greedily.
        inducing_point_allocator: Chooses inducing points from the inputs. By default greedily, by
            variance reduction. In a stream it chooses new ones when new inputs require it. By
            default redundant ones are exchanged instead.
        learn_inducing_points: ``True`` if fits and updates optimise inducing points by gradient,
            ``False`` if inducing points never move. By default they are chosen again from the
            inputs as hyperparameters change, which is faster than using gradients. If
            ``inducing_points`` is a number and all of them are needed, a fit then moves them by
            gradient.
        likelihood_arguments: Per-point arguments of the likelihood for the training data,
            ``batch_shape x n`` each (``{"total_count": ...}``). ``noise`` is on the scale of
            ``train_Y``.
        coefficients: ``batch_shape x n x J`` coefficients, if linear combinations
            ``sum_j c_ij f(x_ij)`` of function values (differences, sums, averages) were observed at
            inputs ``batch_shape x n x J x d``. By default, values ``f(x_i)`` were observed.
        num_outputs: The number of outputs, if there is no ``train_Y``. By default one.
        discrete_dims: Columns of the transformed inputs that are discrete or categorical. In these
            columns, inducing points that the model chooses only have values that have been
            observed.
        process_group: A group of `torch.distributed` processes that share the data. By default,
            this process has all data. Each process passes its own shard of the observations (which
            may be empty) to the constructor, `update` and `forget`, and all end up with the same
            model. Every process has to call all methods that learn. Predictions need no
            communication.

    Example:
        >>> import torch
        >>> from gpytorch.likelihoods import BernoulliLikelihood
        >>> from botorch.sampling import SobolQMCNormalSampler
        >>> from seqgp import SequentialGP
        >>> X = torch.linspace(0, 1, 20, dtype=torch.double).unsqueeze(-1)
        >>> model = SequentialGP(X, (X > 0.5).to(X), likelihood=BernoulliLikelihood())
        >>> candidates = torch.rand(8, 1, 1, dtype=torch.double)
        >>> fantasies = model.fantasize(candidates, SobolQMCNormalSampler(torch.Size([16])))
        >>> fantasies.posterior(X).mean.shape
        torch.Size([16, 8, 20, 1])
    """

    variational_strategy: DualVariationalStrategy
    #: The state of the stream besides the posterior: the memory, and counts.
    stream: StreamState
    #: Locks, so that one thread can read the model while another one updates it.
    guard: Guard
    #: The default of `update` for ``memory``.
    memory_options: MemoryOptions
    #: The largest number of inducing points along a stream.
    max_inducing: int
    inducing_point_allocator: InducingPointAllocator | None
    #: Columns in which inducing points only have values that have been observed.
    discrete_dims: tuple[int, ...]
    #: Whether the user has passed inducing points as a tensor, so that fits do not replace them.
    keeps_inducing_points: bool
    #: Whether fits move inducing points by gradient.
    fits_inducing_points: bool
    #: Whether fits and updates may replace inducing points.
    changes_inducing_points: bool
    #: Whether the ``outcome_transform`` is the default one, a `Standardize`.
    standardizes_by_default: bool
    #: Inputs that the model has been conditioned on, each ``... x q x d``, before transforms.
    conditioned_inputs: tuple[Tensor, ...] = ()
    #: The training data as they were passed to the model, if they have a graph.
    training_graph: TrainingGraph | None = None
    #: The hyperparameters and transforms for which the posterior was computed.
    settled_at: tuple[Tensor, ...] = ()
    has_output_dim: bool  # whether the last batch dimension is that of the outputs

    def __init__(
        self,
        train_X: Tensor,
        train_Y: Tensor | None = None,
        train_Yvar: Tensor | None = None,
        likelihood: Likelihood | None = None,
        covar_module: Kernel | None = None,
        mean_module: Mean | None = None,
        outcome_transform: OutcomeTransform | _DefaultType | None = DEFAULT,
        input_transform: InputTransform | None = None,
        *,
        inducing_points: Tensor | int | None = None,
        inducing_point_allocator: InducingPointAllocator | None = None,
        learn_inducing_points: bool | None = None,
        likelihood_arguments: dict[str, Tensor] | None = None,
        coefficients: Tensor | None = None,
        num_outputs: int | None = None,
        discrete_dims: Sequence[int] = (),
        process_group: torch.distributed.ProcessGroup | None = None,
    ) -> None:
        ranks = ALONE if process_group is None else Ranks(process_group)
        with ranks.together():
            if learn_inducing_points is not None:
                check_flag(learn_inducing_points, "learn_inducing_points")
            parts = assemble(
                train_X,
                train_Y,
                train_Yvar,
                likelihood,
                covar_module,
                mean_module,
                inducing_points,
                input_transform,
                outcome_transform,
                inducing_point_allocator,
                likelihood_arguments,
                coefficients,
                num_outputs,
                ranks,
            )
            columns = discrete_columns(discrete_dims, parts.inducing_points.shape[-1])
            ranks.agree()
        self.has_output_dim = parts.has_output_dim
        super().__init__(
            DualVariationalStrategy(
                self,
                parts.inducing_points,
                num_latents=parts.num_latents,
                # Otherwise a buffer, which optimisers leave alone, and which is not counted.
                learn_inducing_locations=learn_inducing_points is True,
                batch_shape=parts.batch_shape,
            )
        )
        self.variational_strategy.set_ranks(ranks)
        self.discrete_dims = self.variational_strategy.discrete_dims = columns
        self._num_outputs = parts.num_outputs
        self.likelihood, self.covar_module = parts.likelihood, parts.covar_module
        self.mean_module = parts.mean_module
        if parts.input_transform is not None:
            self.input_transform = parts.input_transform
        if parts.outcome_transform is not None:
            self.outcome_transform = parts.outcome_transform
        self.standardizes_by_default = parts.standardizes_by_default
        self.inducing_point_allocator = inducing_point_allocator
        self.keeps_inducing_points = isinstance(inducing_points, Tensor)
        if columns and inducing_point_allocator is not None and not self.keeps_inducing_points:
            with ranks.together():
                self._put_on_seen_values(ranks.gather(train_X.detach(), -2))
        self.fits_inducing_points = learn_inducing_points is True
        self.changes_inducing_points = learn_inducing_points is not False
        self.max_inducing = parts.inducing_points.shape[-2]
        if not isinstance(inducing_points, Tensor):
            self.max_inducing = DEFAULT_LIMIT if inducing_points is None else inducing_points
        self.memory_options = MemoryOptions()
        self.guard = Guard()
        with ranks.together():
            self.stream = StreamState.begin(parts.observations, ranks)
            note_classes(self)
            self.to(train_X)
            self.eval()
            check_bound(self.refresh(), "train_Y")
        if train_Y is not None and coefficients is None:
            self.training_graph = self._graph_of(train_X, train_Y, train_Yvar)
            self.note_hyperparameters()
        self.train()  # as BoTorch's models are, until something is predicted or learnt

    def _graph_of(self, X: Tensor, Y: Tensor, Yvar: Tensor | None) -> TrainingGraph | None:
        """The graph of training data, as the constructor takes them."""
        held = self.stream.observations
        targets = held.targets
        if Y.requires_grad:
            if hasattr(self, "outcome_transform"):  # its statistics depend on them, too
                learns = copy.deepcopy(self.outcome_transform).train()
                Y, _ = learns(Y, Yvar, X=self.transform_train_inputs(X))
            targets = self.to_targets(Y)
        return TrainingGraph.of(held, X, targets)

    def _put_on_seen_values(self, X: Tensor) -> None:
        """Move inducing points of a user's allocator to observed values of the discrete columns."""
        strategy, seen = self.variational_strategy, self.transform_train_inputs(X)
        Z = on_seen_values(strategy.inducing_points.detach(), seen, self.discrete_dims)
        strategy.start_from(Z)

    # ---------------------------------------------------------------- data

    @property
    @reads
    def train_inputs(self) -> tuple[Tensor]:
        """A copy of the inputs, ``batch_shape [x m] x n x d``, including those conditioned on.

        As in BoTorch, they are transformed in eval mode but not in train mode, and are repeated for
        each of several outputs.
        """
        return (self.repeated_for_outputs(train_inputs(self, raw=self.training)),)

    @train_inputs.setter
    def train_inputs(self, inputs: tuple[Tensor]) -> None:
        if len(inputs) != 1 or not isinstance(inputs[0], Tensor):
            raise TypeError(f"train_inputs: expected a tuple with one tensor, got {inputs!r:.50}.")
        X = self.shared_by_outputs(inputs[0])
        self.set_train_data(inputs=untransformed_inputs(self, X), strict=False)

    @property
    @reads
    def train_targets(self) -> Tensor:
        """A copy of the transformed targets, ``batch_shape [x m] x n``, for `train_inputs`.

        Warns if the model has discarded some of the observations that it has learnt; see `memory`.
        """
        return train_targets(self)

    @train_targets.setter
    def train_targets(self, targets: Tensor) -> None:
        self.set_train_data(targets=targets, strict=False)

    @property
    def _has_transformed_inputs(self) -> bool:  # type: ignore[override]
        # BoTorch asks for it where it needs inputs as they were given.
        return not self.training and hasattr(self, "input_transform")

    def _set_transformed_inputs(self) -> None:
        """Nothing to do: `train_inputs` follow the mode. BoTorch's lists call it."""

    def _revert_to_original_inputs(self) -> None:
        """Nothing to do, as for `_set_transformed_inputs`."""

    @property
    def _original_train_inputs(self) -> Tensor:  # type: ignore[override]
        return self.repeated_for_outputs(train_inputs(self, raw=True))

    @property
    def likelihood_arguments(self) -> dict[str, Tensor]:
        """Per-point arguments of the likelihood for the observations that the model holds."""
        return dict(self.stream.observations.arguments)

    @property
    def memory_weights(self) -> Tensor:
        """``n``, how many observations of the stream each one in the memory represents."""
        return self.stream.represents

    @property
    def num_seen(self) -> int:
        """The number of observations that the model has learnt, including discarded ones."""
        return self.stream.num_seen

    @property
    def num_updates(self) -> int:
        """The number of updates so far."""
        return self.stream.num_updates

    @property
    def stream_mode(self) -> str:
        """The name of the rule by which the stream is learnt."""
        return self.stream.rule

    @property
    def classes_seen(self) -> tuple[int, ...]:
        """The classes of a `SoftmaxLikelihood` that have been observed so far."""
        return self.stream.classes_seen

    def transformed(self, observations: Observations) -> Observations:
        """Stored observations as the variational strategy sees them.

        Args:
            observations: Raw inputs, transformed targets.
        """
        points = observations.points
        inputs = self.transform_train_inputs(points)
        # Without a transform, return the same tensors: caches recognise them by identity.
        data = observations if inputs is points else observations.with_inputs(inputs)
        data = data.with_batch_dimension() if self.has_output_dim else data
        arguments = dict(data.arguments)
        outlier = arguments.pop("outlier", None)
        if outlier is None:
            return data
        variance = self.covar_module(data.points, diag=True)
        noise = noise_of_training_data(self.likelihood, outlier, variance)
        return replace(data, arguments={**arguments, "noise": noise})

    def checked(
        self, X: Tensor, Y: Tensor, noise: Tensor | None, arguments: dict[str, Any]
    ) -> Observations:
        """Check new observations, and return them as the model stores them.

        Args:
            X: ``batch_shape x n x d`` inputs, or ``n x J x d`` if ``coefficients`` are among the
                arguments.
            Y: ``batch_shape x n x m`` observations.
            noise: Noise variances of Gaussian observations, of the shape and on the scale of ``Y``.
            arguments: Per-point arguments of the likelihood, and coefficients of functionals.
        """
        self.check_not_fantasy()
        arguments = dict(arguments)
        coefficients = arguments.pop("coefficients", None)
        check_tensor(X, "X")
        X = self.in_precision(X.detach())
        points = X if coefficients is None else X[..., 0, :]
        check_input_shape(points, self.num_inputs, "X")
        if points.shape[:-2] != self.batch_shape:
            shape = " x ".join(map(str, [*self.batch_shape, "n", self.num_inputs]))
            raise ValueError(f"X: expected shape {shape}, got {tuple(X.shape)}.")
        check_Y(points, Y, "X", "Y", self.num_columns, self.likelihood)
        if noise is not None:
            check_tensor(noise, "noise")
        if noise is not None and noise.shape != Y.shape:
            raise ValueError(
                f"noise: expected the shape of Y, {tuple(Y.shape)}, got {tuple(noise.shape)}."
            )
        check_arguments(self.likelihood, arguments, _UPDATE_OPTIONS, needed=Y.shape[-2] > 0)
        if Y.shape[-2]:
            check_not_held(self.likelihood, arguments)
        arguments = self._per_point(arguments, Y.shape)
        arguments = {k: v.detach() if isinstance(v, Tensor) else v for k, v in arguments.items()}
        held = self.stream.observations
        if not Y.shape[-2]:  # nobody needs to pass the arguments of no observations
            none = {k: v[..., :0] for k, v in held.arguments.items() if k != "noise"}
            arguments = {**none, **arguments}
        if noise is not None and len(held) and "noise" not in held.arguments:
            raise ValueError(
                "noise: expected None, since this model was built without train_Yvar and learns "
                "its noise."
            )
        Y = self.in_precision(Y.detach())
        noise = None if noise is None else noise.detach()
        with torch.no_grad():
            if hasattr(self, "outcome_transform"):
                at = self.transform_train_inputs(X) if coefficients is None else points
                Y, noise = transform_observations(
                    self.outcome_transform, Y, noise, at, coefficients
                )
            targets = self.to_targets(Y)
            if noise is not None:
                arguments = {**arguments, "noise": self.to_targets(noise)}
        return Observations.checked(
            X,
            targets,
            self.likelihood,
            arguments,
            None,
            coefficients,
            names=("X", "Y"),
            has_outputs=self.has_output_dim,
        )

    # ---------------------------------------------------------------- shapes

    @property
    @reads
    def batch_shape(self) -> torch.Size:
        """Batch shape, fantasies included: ``posterior(X)`` has that of ``X`` broadcast with it."""
        shape = self.variational_strategy.batch_shape
        return shape[:-1] if self.has_output_dim else shape

    @property
    def _input_batch_shape(self) -> torch.Size:
        # BoTorch's name for it.
        return self.batch_shape

    @property
    def _aug_batch_shape(self) -> torch.Size:
        # BoTorch's name for the batch shape with the outputs, if there are several.
        return self.variational_strategy.batch_shape

    get_batch_dimensions = staticmethod(SingleTaskGP.get_batch_dimensions)

    def _transform_tensor_args(
        self, X: Tensor, Y: Tensor, Yvar: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        # BoTorch's name for data ``... x n x m`` as `train_inputs` and `train_targets` show them.
        noise = None if Yvar is None else self.to_targets(Yvar)
        return self.repeated_for_outputs(X), self.to_targets(Y), noise

    @property
    def num_columns(self) -> int:
        """The number of columns of observations."""
        return self.num_outputs if self.variational_strategy.num_latents is None else 1

    @property
    def num_inputs(self) -> int:
        """The number of columns of raw inputs of observations."""
        return self.stream.observations.inputs.shape[-1]

    @property
    def num_data(self) -> int:
        """How many observations the model holds; ``num_seen`` counts all that it has learnt."""
        return self.stream.num_held

    @property
    def inducing_points_cover_data(self) -> bool:
        """Whether the inducing points are the inputs of the observations that the model holds."""
        if self.stream.observations.coefficients is not None:
            return False
        Z = self.variational_strategy.inducing_points
        if Z.shape[-2] != self.num_data:
            return False
        X = self.stream.gather(self.transformed(self.stream.observations).points, -2)
        return Z.shape[-2:] == X.shape[-2:] and bool((Z == X).all())

    def in_precision(self, values: Tensor) -> Tensor:
        """Numbers in the precision of the model: transforms take on that of what they see."""
        return values.to(self.variational_strategy.inducing_points.dtype)

    def transform_inputs(self, X: Tensor, input_transform: torch.nn.Module | None = None) -> Tensor:
        """Inputs as the model sees them.

        Args:
            X: ``... x n x d`` inputs.
            input_transform: Another transform than that of the model.
        """
        X = self.in_precision(X)
        if input_transform is not None:
            return super().transform_inputs(X, input_transform)
        transform = getattr(self, "input_transform", None)
        return X if transform is None else transform(X)

    def transform_train_inputs(self, X: Tensor) -> Tensor:
        """Training inputs as the model sees them, whatever mode it is in."""
        transform = getattr(self, "input_transform", None)
        return X if transform is None else transform.preprocess_transform(X)

    def _predicted_at(self, X: Tensor) -> Tensor:
        """Raw inputs of predictions, checked, as the strategy sees them in eval mode.

        A one-to-many transform makes several points of each, and may add inputs that are not the
        user's to choose (`AppendFeatures`).
        """
        one_to_many = getattr(getattr(self, "input_transform", None), "is_one_to_many", False)
        check_points(X, None if one_to_many else self.num_inputs, "X")
        finite, current = is_finite_and_current(self, X)
        if not finite:
            check_finite(X, "X")
        if not current:
            catch_up(self)
        X_tf = self.transform_inputs(X)
        dim = self.variational_strategy.inducing_points.shape[-1]
        if X_tf.dim() > 1 and X_tf.shape[-1] != dim:
            raise ValueError(
                f"X: expected {dim} inputs after the input transform, got shape "
                f"{tuple(X_tf.shape)} from {tuple(X.shape)}."
            )
        return X_tf

    def _observed_at(self, X: Tensor) -> Tensor:
        """Raw inputs of observations, ``... x n x d``, as the strategy sees them in eval mode.

        An observation has been made at one point: one-to-many transforms are for predictions.
        """
        X_tf = self.transform_inputs(X)
        expected = torch.Size([X.shape[-2], self.variational_strategy.inducing_points.shape[-1]])
        return X_tf if X_tf.shape[-2:] == expected else self.transform_train_inputs(X)

    def to_targets(self, Y: Tensor) -> Tensor:
        """``... x n x m`` in BoTorch's shape to ``... [x m] x n``."""
        return Y.mT if self.has_output_dim else Y.squeeze(-1)

    def to_columns(self, targets: Tensor) -> Tensor:
        """``... [x m] x n`` to ``... x n x m``, the inverse of `to_targets`."""
        return targets.mT if self.has_output_dim else targets.unsqueeze(-1)

    def _per_point(self, arguments: dict[str, Any], shape: torch.Size) -> dict[str, Any]:
        """Arguments of the likelihood, ``... [x m] x n``, of which some may be as ``Y`` is.

        Args:
            arguments: The arguments.
            shape: The shape of ``Y``, ``... x n x m``.
        """
        square = self.has_output_dim and shape[-1] == shape[-2]  # could be either of the two shapes
        return {
            key: self.to_targets(value)
            if isinstance(value, Tensor) and value.shape == shape and not square
            else value
            for key, value in arguments.items()
        }

    def repeated_for_outputs(self, X: Tensor) -> Tensor:
        """Training inputs ``... x n x d`` as BoTorch shows them, ``... [x m] x n x d``."""
        if not self.has_output_dim:
            return X
        dim = -3 if self.stream.observations.coefficients is None else -4
        X = X.unsqueeze(dim)
        return X.expand(*X.shape[:dim], self.num_outputs, *X.shape[dim + 1 :])

    def shared_by_outputs(self, X: Tensor) -> Tensor:
        """Training inputs, which may be `repeated_for_outputs`, as the model holds them."""
        held, dim = self.stream.observations, -3
        if held.coefficients is not None:
            dim = -4
        repeated = X.dim() == held.inputs.dim() + 1 and X.shape[dim] == self.num_outputs
        if not (self.has_output_dim and repeated):
            return X
        first = X.select(dim, 0)
        if not torch.equal(X, first.unsqueeze(dim).expand_as(X)):
            raise ValueError("inputs: expected the same inputs for all outputs.")
        return first

    def with_outputs(self, X: Tensor) -> Tensor:
        """Inputs ``... x n x d`` with a batch dimension for the outputs, if there are several."""
        return X.unsqueeze(-3) if self.has_output_dim else X

    def _with_output_blocks(self, f: MultivariateNormal) -> MultivariateNormal:
        """``q(f)`` with its outputs as blocks of the covariance, as BoTorch's caches ask."""
        if isinstance(f, MultitaskMultivariateNormal):
            mean, covariance = f.mean, f.lazy_covariance_matrix.base_linear_op
        elif self.has_output_dim:
            mean, covariance = f.mean.mT, f.lazy_covariance_matrix
        else:
            return f
        blocks = BlockDiagLinearOperator(covariance)
        return MultitaskMultivariateNormal(mean, blocks, interleaved=False)

    # ---------------------------------------------------------------- the model

    @mean_and_kernel
    def prior_at(self, X: Tensor) -> MultivariateNormal:
        """The prior at transformed inputs ``... x n x d``."""
        return MultivariateNormal(self.mean_module(X), self.covar_module(X))

    def forward(self, X: Tensor) -> MultivariateNormal:
        """The prior at raw inputs in train mode, at transformed ones in eval mode, as in BoTorch.

        Args:
            X: ``... [x m] x n x d`` inputs.
        """
        return self.prior_at(self.transform_inputs(X) if self.training else X)

    @reads
    def __call__(self, inputs: Tensor, prior: bool = False, **kwargs: Any) -> MultivariateNormal:
        """``q(f)``: at raw inputs in train mode, at transformed ones in eval mode, as in BoTorch.

        Args:
            inputs: ``... x n x d`` inputs; in train mode also as `train_inputs` has them. In eval
                mode, if there are several outputs, ``... x m x n x d`` or ``... x 1 x n x d``.
            prior: Return the prior instead.
            kwargs: Passed to the variational strategy.

        Returns:
            A distribution with event shape ``n``, its last batch dimension that of the outputs if
            there are several; with several latents, a multitask one with event shape ``n x c``.
        """
        if self.training:
            if not prior and self.stream.observations.coefficients is not None:
                raise RuntimeError(
                    "This model has observed sums or differences of values, which an objective "
                    "cannot compare with values at inputs. Fit it with "
                    "botorch.fit.fit_gpytorch_mll, or maximise, in your own training loop, "
                    "DualELBO(model.likelihood, model).with_priors(model.bound()[0], 1)."
                )
            self.variational_strategy.keep_placed()
            inputs = self.with_outputs(self.transform_inputs(self.shared_by_outputs(inputs)))
            # Only objectives for exact GPs know this likelihood, and they ask for the prior.
            prior = prior or (has_outliers(self.likelihood) and self._is_exact())
        f = super().__call__(inputs, prior=prior, **kwargs)
        if prior or not self.training:
            return f
        exact = partial(super().__call__, inputs, prior=True) if self._is_exact() else None
        return TrainingMarginals.of(f, exact)

    def _is_exact(self) -> bool:
        """Whether the model holds Gaussian observations, and has never learnt others."""
        stream, strategy = self.stream, self.variational_strategy
        plain = stream.observations.coefficients is None and stream.num_seen == self.num_data
        known = strategy.is_fantasy or strategy.has_summary
        return has_closed_form(self.likelihood) and plain and not known

    def train(self, mode: bool = True) -> SequentialGP:
        """Set train or eval mode; training inputs stay as they were given."""
        if self.training and not mode:
            self.variational_strategy.keep_placed()
        return torch.nn.Module.train(self, mode)

    def eval(self) -> SequentialGP:
        """Set eval mode."""
        return self.train(False)

    def _leave_train_mode(self) -> None:
        """Set eval mode for predictions, and for what is learnt without a training loop."""
        if self.training:
            self.eval()

    @reads
    def posterior(  # type: ignore[override]
        self,
        X: Tensor,
        output_indices: list[int] | None = None,
        observation_noise: bool | Tensor = False,
        posterior_transform: PosteriorTransform | None = None,
        **arguments: Any,
    ) -> Posterior:
        """The posterior at ``... x q x d`` inputs.

        Args:
            X: The inputs.
            output_indices: The outputs to compute it for; by default all.
            observation_noise: Whether to include the noise of observations. If the likelihood is
                not Gaussian, the result is an `ObservationPosterior` over *observations* (0/1,
                counts, ...). For Gaussian observations, a tensor ``... x q x m`` of noise variances
                can be passed instead.
            posterior_transform: Applied to the posterior.
            arguments: Per-point arguments of the likelihood (``total_count=``), for posteriors over
                observations.

        Returns:
            A posterior over ``... x q x m`` values: latent values, or observations.

        Example:
            >>> import torch
            >>> from gpytorch.likelihoods import BernoulliLikelihood
            >>> X = torch.linspace(0, 1, 20, dtype=torch.double).unsqueeze(-1)
            >>> model = SequentialGP(X, (X > 0.5).to(X), likelihood=BernoulliLikelihood())
            >>> latent = model.posterior(X)  # Gaussian
            >>> probability = model.posterior(X, observation_noise=True).mean  # of a 1
            >>> bool(((probability > 0.5) == (latent.mean > 0)).all())
            True
        """
        if not isinstance(observation_noise, bool | Tensor):
            raise TypeError(
                "observation_noise: expected True, False, or a tensor of noise variances, got "
                f"{observation_noise!r:.50}."
            )
        check_arguments(
            self.likelihood, arguments, _POSTERIOR_OPTIONS, needed=observation_noise is not False
        )
        if output_indices and not self._means_all_outputs(output_indices, observation_noise):
            with renamed(idcs="output_indices"):
                part = self.subset_output(output_indices)
            noise = observation_noise
            if isinstance(noise, Tensor) and noise.shape[-1] == self.num_outputs:
                noise = noise[..., output_indices]
            return part.posterior(
                X,
                observation_noise=noise,
                posterior_transform=posterior_transform,
                **arguments,
            )
        if not self.has_output_dim and isinstance(X, Tensor):
            arguments = self._per_point(arguments, torch.Size([*X.shape[:-1], 1]))
        self._leave_train_mode()
        X = self._predicted_at(X)
        with gpt_posterior_settings():
            # Which raises if batch shapes do not fit.
            f = self(add_output_dim(X, self.batch_shape)[0] if self.has_output_dim else X)
            noisy = observation_noise is not False
            likelihood = self.likelihood
            if noisy and is_conjugate(likelihood):
                f = likelihood(f, **self._noise_at(f, X, observation_noise))
            elif noisy and isinstance(likelihood, OverdispersedBinomialLikelihood):
                f = _with_nugget(f, likelihood.nugget)  # the log odds of each observation
            elif not noisy:
                f = _outputs_of(f, output_latents(likelihood))
        latent = GPyTorchPosterior(distribution=self._with_output_blocks(f))
        posterior: Posterior = latent
        if noisy and not is_conjugate(likelihood):
            if isinstance(observation_noise, Tensor):
                raise ValueError(
                    "observation_noise: noise variances are for Gaussian likelihoods, this is a "
                    f"{type(self.likelihood).__name__}; pass True."
                )
            posterior = ObservationPosterior(
                latent, frozen(likelihood), arguments, not has_one_latent(likelihood)
            )
        if hasattr(self, "outcome_transform"):
            posterior = frozen(self.outcome_transform).untransform_posterior(posterior, X=X)
        if posterior_transform is not None:
            posterior = posterior_transform(posterior=posterior, X=X)
        return posterior

    @torch.no_grad()
    def predict_proba(self, X: Tensor, **arguments: Any) -> Tensor:
        """The probability of each class, for likelihoods of labels, classes and ratings.

        These are the ``probabilities`` of the posterior of observations.

        Args:
            X: ``... x n x d`` inputs.
            arguments: Per-point arguments of the likelihood.

        Returns:
            ``... x n x c`` probabilities, which add up to one. For labels, the second column is
            the probability of a 1.

        Example:
            >>> import torch
            >>> from gpytorch.likelihoods import BernoulliLikelihood
            >>> X = torch.linspace(0, 1, 20, dtype=torch.double).unsqueeze(-1)
            >>> model = SequentialGP(X, (X > 0.5).to(X), likelihood=BernoulliLikelihood())
            >>> model.predict_proba(X[[0, -1]]).argmax(-1)
            tensor([0, 1])
        """
        posterior = self.posterior(X, observation_noise=True, **arguments)
        if not isinstance(posterior, ObservationPosterior):
            raise UnsupportedError(
                f"predict_proba: a {type(self.likelihood).__name__} has no classes."
            )
        return posterior.probabilities

    def _means_all_outputs(self, indices: list[int], noise: bool | Tensor) -> bool:
        """Whether indices select all outputs.

        With a tensor of noise variances, BoTorch's `ModelList` counts the outputs of all its models
        together: the second of two models with one output gets ``[1]``.
        """
        indices = list(indices)
        first = indices[0] if isinstance(noise, Tensor) and min(indices) > 0 else 0
        return indices == list(range(first, first + self.num_outputs))

    def _noise_at(
        self, f: MultivariateNormal, X: Tensor, noise: bool | Tensor
    ) -> dict[str, Tensor | list[Tensor]]:
        """The argument ``noise``, ``... [x m] x q``, unless the likelihood's own is meant.

        Args:
            f: The distribution of latent values.
            X: ``... x q x d`` transformed inputs, by which BoTorch recognises its outliers.
            noise: As for `posterior`.
        """
        shape = torch.Size([*f.batch_shape, *f.event_shape])
        if noise is True and has_outliers(self.likelihood):
            show_training_inputs(self.likelihood, train_inputs(self, raw=False))
            base = noise_of_new_data(self.likelihood)
            known = {} if X.shape[-2] == self.num_data else {"noise": base.expand(shape)}
            return {"X": [X], **known}
        if isinstance(noise, Tensor):
            columns = self.to_columns(f.mean).shape
            check_noise(noise, columns, "observation_noise")
            return {"noise": self.to_targets(self.in_precision(noise)).expand(shape)}
        if isinstance(self.likelihood, FixedNoiseGaussianLikelihood):
            return {"noise": self._mean_noise().expand(shape)}
        return {}

    def _mean_noise(self) -> Tensor:
        """``... [x m] x 1``, of the observations at hand: what BoTorch takes for new ones."""
        shard = self.stream.shard
        if shard is not None and shard.mean_noise is not None and shard.total:
            return shard.mean_noise
        noise = known_noise(self)
        if noise.shape[-1] == 0:
            raise ValueError(
                "noise: the model has no observations yet, so the noise of new ones is not known; "
                "pass noise= to condition_on_observations, or a tensor as observation_noise= to "
                "other methods."
            )
        return noise.mean(-1, keepdim=True)

    # ---------------------------------------------------------------- learning

    @property
    def model(self) -> SequentialGP:
        """The model itself: `SingleTaskVariationalGP` is a wrapper, and has a GP of this name."""
        return self

    def init_inducing_points(self, inputs: Tensor) -> Tensor:
        """Choose the inducing points anew, as many as there are, for the present kernel.

        The posterior is then that of the data that the model holds. `SingleTaskVariationalGP` has
        this method; fits and updates of this model choose inducing points by themselves.

        Args:
            inputs: ``batch_shape x n x d`` transformed inputs to choose them among.

        Returns:
            ``batch_shape x k x d`` inducing points.
        """
        self.check_not_fantasy()
        strategy = self.variational_strategy
        d = strategy.inducing_points.shape[-1]
        check_inputs(inputs, d, "inputs")
        with torch.no_grad():
            Z = choose_inducing_points(
                inputs.to(strategy.inducing_points),
                strategy.inducing_points.shape[-2],
                self.covar_module,
                self.inducing_point_allocator,
            )
            Z = on_seen_values(Z, inputs.to(Z), self.discrete_dims)
        own = strategy.inducing_points.shape[:-2]
        strategy.set_inducing_points(Z.reshape(*own, *Z.shape[-2:]) if own else Z)
        self.refresh()
        return Z

    @torch.no_grad()
    def choose_inducing_points(self, number: int, fills_up: bool = False) -> Tensor:
        """``batch_shape x k x d`` inducing points for the training data and the present kernel.

        Args:
            number: Their maximum number. There are fewer if there are fewer inputs, or if more
                would not help.
            fills_up: Whether to add further inputs if there are fewer for the latter reason.
        """
        held = self.stream.observations
        X = self.transform_train_inputs(held.points)
        X = self.variational_strategy.ranks.gather(X, -2)
        if held.coefficients is not None and X.dim() == 2:
            X = distinct(X)[0]
        Z = choose_inducing_points(
            X, number, self.covar_module, self.inducing_point_allocator, fills_up
        )
        return on_seen_values(Z, X, self.discrete_dims)

    def check_not_fantasy(self) -> None:
        """Raise if the model has been conditioned on more than the training data that it holds."""
        if self.variational_strategy.is_fantasy:
            raise RuntimeError(
                "This is a conditioned (fantasy) model: condition it further with "
                "condition_on_observations; update or fit the model that it came from."
            )

    @torch.no_grad()
    @reads
    def refresh(
        self, tol: float = 1e-8, max_steps: int | None = None, start: Sites | None = None
    ) -> Tensor:
        """Recompute the posterior of the training data for the present hyperparameters.

        Args:
            tol: Relative tolerance. For a Gaussian likelihood the result is exact in any case.
            max_steps: The maximum number of passes over the data. By default 100, with a warning
                if that is not enough. If you pass a number, there is no warning.
            start: Sites to start from. By default those of the present posterior.

        Returns:
            The evidence lower bound, with the batch shape of the model.
        """
        self.check_not_fantasy()
        check_steps(tol, max_steps)
        stream, strategy = self.stream, self.variational_strategy
        data = replace(self.transformed(stream.observations), weights=stream.weights)
        before = {} if strategy.ranks.alone else strategy.tensors()
        restore = partial(strategy.set_tensors, before)
        with strategy.ranks.all_or_none(restore), step_limit(max_steps) as limit:
            info = strategy.converge(
                data,
                likelihood=self.likelihood,
                tol=tol,
                max_steps=limit,
                summary_share=stream.summary_share,
                start=start,
            )
        self.note_hyperparameters()
        bound = info.elbo
        if strategy.has_summary:
            bound = bound + strategy.log_summary_constant(self.likelihood, stream.summary_share)
        self.stream = replace(self.stream, bound=bound)
        return bound

    def note_hyperparameters(self) -> None:
        """Note that the posterior belongs to the present hyperparameters and transforms."""
        self.settled_at = (values_of(self),)

    def is_settled(self) -> bool:
        """Whether the posterior is that of the present hyperparameters and transforms."""
        return all(bool(flag) for flag in is_current(self))

    def bound(
        self,
        start: Sites | None = None,
        tol: float = 1e-8,
        stands_for: Tensor | None = None,
        max_steps: int | None = None,
        exact: bool = False,
        with_past: bool = True,
    ) -> tuple[Tensor, Sites]:
        """The evidence lower bound, maximised over q; see `DualVariationalStrategy.bound`.

        Args:
            start: Sites to start from.
            tol: Relative tolerance for the sites.
            stands_for: How much of the summary each of the first observations represents.
            max_steps: As for `refresh`.
            exact: Whether to compute the bound for inducing points at all inputs.
            with_past: Whether to include the summary.
        """
        stream = self.stream
        data = replace(self.transformed(stream.observations), weights=stream.weights)
        if exact and stream.shard is not None:
            return self._exact_bound_of_all(data, start, tol, max_steps)
        with step_limit(max_steps) as limit:
            return self.variational_strategy.bound(
                data,
                likelihood=self.likelihood,
                start=start,
                tol=tol,
                stands_for=stands_for,
                max_steps=limit,
                summary_share=stream.summary_share if with_past else 0.0,
                exact=exact,
            )

    def _exact_bound_of_all(
        self, data: Observations, start: Sites | None, tol: float, max_steps: int | None
    ) -> tuple[Tensor, Sites]:
        """The exact bound of the observations of all ranks, which are as few as inducing points."""
        stream, strategy = self.stream, self.variational_strategy
        assert stream.shard is not None
        order = stream.shard.ranks.gather(stream.shard.position).argsort()
        whole = data.gathered(stream.shard.ranks).select(order)
        if torch.is_grad_enabled():  # a learnable input transform has its share of the gradient
            whole = replace(whole, inputs=with_graph(whole.inputs, data.inputs, stream.shard))
        start = None if start is None else Sites(*map(stream.gather, start))
        with step_limit(max_steps) as limit:
            bound, sites = strategy.bound(
                whole,
                likelihood=self.likelihood,
                start=start,
                tol=tol,
                max_steps=limit,
                exact=True,
            )
        sites = Sites(*(stream.own(each.expand_as(sites.lam)) for each in sites))
        return strategy.ranks.shared(bound), sites

    @torch.no_grad()
    def natural_gradient_step(
        self, observations: Observations, rho: float, num_data: int | None = None
    ) -> None:
        """One step on a minibatch of the training data.

        Args:
            observations: Some of the observations.
            rho: The step size.
            num_data: The number of all; by default of those that the model holds.
        """
        self.variational_strategy.natural_gradient_step(
            self.transformed(observations),
            likelihood=self.likelihood,
            rho=rho,
            num_data=self.num_data if num_data is None else num_data,
        )

    def training_data(self) -> tuple[Tensor, Tensor, dict[str, Any]]:
        """Transformed inputs, transformed targets and arguments of the training data."""
        data = self.transformed(self.stream.observations)
        return data.inputs, data.targets, dict(data.arguments)

    def compute_custom_loss(self, mll: MarginalLogLikelihood) -> Tensor:
        """BoTorch's hook for losses: what `fit_gpytorch_mll_scipy` and others minimise.

        Args:
            mll: The objective; as for `fit_gpytorch_mll`.
        """
        return loss(self, mll)

    @writes
    def custom_fit(self, mll: MarginalLogLikelihood, **kwargs: Any) -> MarginalLogLikelihood:
        """BoTorch's hook for `fit_gpytorch_mll`; see `seqgp.models.fit.fit` for the options."""
        return fit(self, mll, **kwargs)

    @writes
    def set_train_data(
        self, inputs: Tensor | None = None, targets: Tensor | None = None, strict: bool = True
    ) -> None:
        """Replace the training data. Call `refresh` to compute their posterior.

        Args:
            inputs: ``batch_shape x n x d`` raw inputs.
            targets: ``batch_shape [x m] x n`` transformed targets.
            strict: Whether shapes must be those of the present data.
        """
        ranks = self.variational_strategy.ranks
        with ranks.together():
            held = self.stream.observations
            inputs = None if inputs is None else self.shared_by_outputs(inputs)
            for name, new, old in (
                ("inputs", inputs, held.inputs),
                ("targets", targets, held.targets),
            ):
                if strict and new is not None and new.shape != old.shape:
                    raise ValueError(f"{name}: expected shape {tuple(old.shape)}, got {new.shape}.")
            changed = Observations.checked(
                held.inputs if inputs is None else inputs.detach(),
                held.targets if targets is None else targets.detach(),
                self.likelihood,
                held.arguments,
                held.weights,
                held.coefficients,
                has_outputs=self.has_output_dim,
            )
            stream = self.stream
            represents, importance, fade = stream.represents, stream.importance, stream.fade
            if len(changed) != len(represents):
                represents = importance = fade = represents.new_ones(len(changed))
            stream = replace(
                stream,
                observations=changed,
                represents=represents,
                importance=importance,
                fade=fade,
            )
            if stream.shard is not None and ranks.total(len(changed) != len(held)):
                shard = Shard.begin(len(changed), fade.device, ranks)
                stream = replace(stream, shard=shard).noting_noise()
            ranks.commit(lambda: setattr(self, "stream", stream))
            self.training_graph = TrainingGraph.of(
                changed,
                changed.inputs if inputs is None else inputs,
                changed.targets if targets is None else targets,
            )

    # ---------------------------------------------------------------- streaming

    @writes
    def update(
        self,
        X: Tensor,
        Y: Tensor,
        memory: MemoryOptions | int | None = None,
        noise: Tensor | None = None,
        learn: bool | None = None,
        mode: str | UpdateRule = "pseudo-likelihood",
        optimizer: str = "lbfgs",
        steps: int | None = None,
        tol: float | None = None,
        learning_rate: float = 0.01,
        inducing: str | InducingPointRule | None = None,
        max_inducing: int | None = None,
        discount: float | str = 1.0,
        site_steps: int | None = None,
        **arguments: Any,
    ) -> UpdateRecord:
        """Learn from the next batch of a stream, in place and at constant cost.

        The model learns the new observations together with those in its memory, on top of the
        summary of all others. (At first, the memory holds the data that the model was built with.)
        Then it keeps some of these observations in memory and folds the others into the summary.
        If anything goes wrong, the model is unchanged.

        Args:
            X: ``batch_shape x n' x d`` inputs, or ``n' x J x d`` with ``coefficients=``. There may
                be none, to go on learning hyperparameters from what is known.
            Y: ``batch_shape x n' x m`` observations.
            memory: How many observations to keep, or `MemoryOptions` that also say which. By
                default the model's ``memory_options``: a uniform sample of 2,000 observations of
                the whole stream.
            noise: Noise variances of Gaussian observations, of the shape and on the scale of ``Y``.
            learn: Whether to learn hyperparameters. By default (``None``), they are learnt when the
                data have grown by a fifth since the last time, or when new observations were much
                less probable than expected. New hyperparameters are kept only if they do not make
                leave-one-out predictions of the observations at hand worse. ``record.decision``
                says what was decided. With ``False``, the update only conditions on the data.
            mode: What is held fixed while hyperparameters are learnt. ``"pseudo-likelihood"`` holds
                the summary fixed as a function of the inducing values. ``"paper"`` is the rule of
                the paper, which holds the duals fixed (`seqgp.streaming.PaperRule`). All updates of
                a stream use the same mode.
            optimizer: ``"lbfgs"``, or ``"adam"`` as in the paper.
            steps: The maximum number of steps of the optimiser. By default 40 for L-BFGS and 100
                for Adam.
            tol: L-BFGS stops when a step raises the bound by less than this, in nats. By default
                5e-5 per observation.
            learning_rate: Adam's learning rate.
            inducing: How inducing points change. ``"adapt"`` adds points until their lack costs the
                bound less than .005 nats per observation, and exchanges redundant ones when there
                is no room for more. ``"learn"`` optimises them by gradient together with the
                hyperparameters, ``"both"`` does both. ``"cluster"`` uses the centres of clusters of
                all inputs so far, which is best in many dimensions. ``"fixed"`` does not change
                them. You can also pass your own `InducingPointRule`. The default depends on
                ``learn_inducing_points`` of the constructor: ``"fixed"`` if it is ``False``,
                ``"both"`` if it is ``True``, and otherwise ``"adapt"``. With ``learn=False``,
                inducing points that were passed to the constructor are ``"fixed"``.
            max_inducing: The maximum number of inducing points if they are adapted. By default the
                number that was passed to the constructor, or 300.
            discount: The factor by which everything learnt before is down-weighted, in memory and
                in the summary, for streams that drift. ``"auto"`` discounts if this makes the new
                batch clearly more probable; ``record.discount`` is the factor that was used.
            site_steps: The maximum number of passes over the data each time that the sites are
                converged. By default 100. With thousands of observations of many classes, 10 are
                often enough.
            arguments: Per-point arguments of the likelihood (``total_count=``), ``... x n'`` or of
                the shape of ``Y``; and ``coefficients=``, ``n' x J``, for observations of linear
                combinations ``sum_j c_ij f(x_ij)``.

        Returns:
            A record of the update.

        Example:
            >>> import torch
            >>> from gpytorch.likelihoods import PoissonLikelihood
            >>> from seqgp import SequentialGP
            >>> X = torch.rand(200, 1, dtype=torch.double)
            >>> Y = torch.poisson(3 + 2 * torch.sin(6 * X))
            >>> model = SequentialGP(X[:50], Y[:50], likelihood=PoissonLikelihood())
            >>> record = model.update(X[50:], Y[50:], steps=5)
            >>> record.num_new, record.num_memory
            (150, 200)
        """
        options = UpdateOptions(
            memory=memory,
            learn=learn,
            optimizer=optimizer,
            steps=steps,
            tol=tol,
            learning_rate=learning_rate,
            inducing=inducing,
            max_inducing=max_inducing,
            discount=discount,
            site_steps=site_steps,
        )
        self._leave_train_mode()
        return update(self, X, Y, noise, arguments, mode, options)

    def update_stream(
        self,
        stream: Iterable[Sequence[Any]],
        callback: Callable[[UpdateRecord], object] | None = None,
        progress: bool = True,
        **options: Any,
    ) -> list[UpdateRecord]:
        """Update with each batch of a stream.

        If a batch cannot be learnt, the error has a note with the number of the batch. All earlier
        batches have been learnt, and ``callback`` has been called with their records.

        Args:
            stream: An iterable of pairs ``(X, Y)``, such as a `DataLoader`, a generator or a list.
                It can also contain triples ``(X, Y, arguments)``, with a dictionary of per-point
                arguments (``total_count``, ``noise``).
            callback: Called with the record of each update.
            progress: Whether to show a progress bar (only on a terminal).
            options: Options of `update`.

        Returns:
            The records of all updates.

        Example:
            >>> import torch
            >>> from gpytorch.likelihoods import BernoulliLikelihood
            >>> from seqgp import SequentialGP
            >>> X = torch.rand(90, 2, dtype=torch.double)
            >>> Y = (X.sum(-1, keepdim=True) > 1).to(X)
            >>> model = SequentialGP(X[:30], Y[:30], likelihood=BernoulliLikelihood())
            >>> batches = zip(X[30:].split(30), Y[30:].split(30))
            >>> records = model.update_stream(batches, memory=20, steps=3)
            >>> [record.num_memory for record in records]
            [20, 20]
        """
        return update_stream(self.update, stream, callback, progress, options)

    @writes
    def forget(
        self,
        X: Tensor,
        Y: Tensor,
        noise: Tensor | None = None,
        fade: Tensor | None = None,
        **arguments: Any,
    ) -> None:
        """Remove observations that the model has learnt.

        Observations in the memory are removed exactly. For other observations, their contribution
        under the present posterior is subtracted from the summary. This is exact for Gaussian
        observations if hyperparameters and inducing points have not changed since they were folded,
        and an approximation otherwise. It is also an approximation for a `SoftmaxLikelihood` with
        classes that have not been observed yet, and may raise an error there.

        Only forget observations that the model has learnt. The summary is a sum and does not know
        its terms. Removing an observation that was never learnt raises an error only if the
        posterior is too uncertain there; otherwise, the contribution of others is removed instead.

        Args:
            X: ``n' x d`` inputs.
            Y: ``n' x m`` observations.
            noise: Noise variances of Gaussian observations.
            fade: ``n'``, how much each observation still counts: the product of all discounts since
                it was learnt. Required for observations that are no longer in the memory, if the
                stream has been discounted.
            arguments: Per-point arguments of the likelihood.

        Example:
            >>> import torch
            >>> from seqgp import SequentialGP
            >>> from gpytorch.kernels import RBFKernel
            >>> X = torch.linspace(0, 1, 20, dtype=torch.double).unsqueeze(-1)
            >>> Y = torch.sin(6 * X)
            >>> model = SequentialGP(X, Y, covar_module=RBFKernel())
            >>> options = {"covar_module": RBFKernel(), "inducing_points": X}
            >>> other = SequentialGP(X[1:], Y[1:], **options)  # which never learnt the first
            >>> model.forget(X[:1], Y[:1])
            >>> torch.allclose(model.posterior(X).mean, other.posterior(X).mean)
            True
        """
        with self.variational_strategy.ranks.together():
            known = self.checked(X, Y, noise, arguments)
            if fade is not None:
                check_tensor(fade, "fade")
                in_range = fade.shape == (len(known),) and bool(((fade > 0) & (fade <= 1)).all())
                if not in_range:
                    raise ValueError(
                        f"fade: expected {len(known)} numbers above 0, up to 1, got {fade!r:.80}."
                    )
            self._leave_train_mode()
            forget(self, known, fade)

    @property
    @reads
    def memory(self) -> Remembered:
        """Copies of the observations in the memory, and their leverage.

        Targets are transformed if there is an ``outcome_transform``. Inputs are not.
        """
        held = self.stream.observations
        leverage = leverage_of(self, self.transformed(held))
        return Remembered(held.inputs.clone(), held.targets.clone(), leverage)

    @reads
    def leverage(
        self, X: Tensor, Y: Tensor, noise: Tensor | None = None, **arguments: Any
    ) -> Tensor:
        r"""Bayesian leverage scores :math:`\beta_i v_i`, summed over latents and outputs.

        Args:
            X: ``n' x d`` inputs.
            Y: ``n' x m`` observations.
            noise: Noise variances of Gaussian observations.
            arguments: Per-point arguments of the likelihood.

        Returns:
            ``n'`` scores, which measure how much each observation determines the posterior.
        """
        data = self.transformed(self.checked(X, Y, noise, arguments))
        scores, first = leverage_of(self, data), data.first_parts
        return scores if first is None else summed_over_parts(scores, first)[first.unique()]

    @torch.no_grad()
    @reads
    def log_predictive_density(self, X: Tensor, targets: Tensor, **arguments: Any) -> Tensor:
        """Log predictive density of observations.

        Args:
            X: ``... x n x d`` raw inputs.
            targets: ``... [x m] x n`` transformed targets.
            arguments: Per-point arguments of the likelihood.

        Returns:
            A tensor of the shape of the targets.
        """
        check_tensor(X, "X")
        X = self.in_precision(X)
        check_inputs(X, self.num_inputs, "X")
        self._check_target_shape(X, targets)
        check_targets(targets, self.with_outputs(X), self.likelihood, **arguments)
        training = self.training
        f = self.eval()(self.with_outputs(self._observed_at(X)))
        self.train(training)
        return log_predictive(self.likelihood, targets, f.mean, f.variance, **arguments)

    def _check_target_shape(self, X: Tensor, targets: Tensor) -> None:
        """Raise unless transformed targets are ``... [x m] x n`` for inputs ``... x n x d``."""
        check_tensor(targets, "targets")
        outputs = [self.num_columns] if self.has_output_dim else []
        batch = broadcast_shapes(X.shape[:-2], self.batch_shape)
        shape = torch.Size([*batch, *outputs, X.shape[-2]])
        own, given = 1 + len(outputs), targets.dim()
        fits = own <= given <= len(shape) and targets.shape[-own:] == shape[-own:]
        leading = zip(targets.shape[:-own], shape[-given:], strict=False)
        if not fits or any(k not in (1, n) for k, n in leading):
            raise ValueError(
                f"targets: expected shape {' x '.join(map(str, shape))} (a row per output, if "
                f"there are several), got {tuple(targets.shape)}."
            )

    def log_target_scale(self) -> Tensor | None:
        """``[m x] 1``, the log of how much larger observations are than stored targets.

        ``None`` if that is the same, or depends on the observation.
        """
        if not hasattr(self, "outcome_transform"):
            return None
        inverse = affine(self.outcome_transform)
        return None if inverse is None else self.to_targets(inverse.scale.log())

    @reads
    def hyperparameter_values(self) -> dict[str, Tensor]:
        """Copies of all parameters that can be learnt, but for inducing points, by name."""
        return {
            name: parameter.detach().clone()
            for name, parameter in self.named_parameters()
            if parameter.requires_grad and not name.endswith("inducing_points")
        }

    def set_hyperparameters(self, values: dict[str, Tensor]) -> None:
        """Give parameters other values, in place.

        Args:
            values: As `hyperparameter_values` returns them; there may be fewer.
        """
        for name, parameter in self.named_parameters():
            if name in values:
                parameter.data.copy_(values[name])

    @reads
    def constrained_hyperparameters(self) -> dict[str, Tensor]:
        """All hyperparameters by name, with their constraints applied."""
        named: Any = super().named_parameters_and_constraints  # GPyTorch ships no types
        return {
            name.replace("raw_", ""): (
                parameter if constraint is None else constraint.transform(parameter)
            )
            .detach()
            .clone()
            for name, parameter, constraint in named()
            if not name.endswith("inducing_points")
        }

    # ---------------------------------------------------------------- conditioning

    @reads
    def condition_on_observations(
        self, X: Tensor, Y: Tensor, noise: Tensor | None = None, **kwargs: Any
    ) -> SequentialGP:
        """Return a model that is conditioned on more observations. This model is unchanged.

        The result is the same as if the new inputs were added to the inducing points (see
        `DualVariationalStrategy.get_fantasy_model`). Hyperparameters are shared, not copied.

        Args:
            X: ``batch_shape x n' x d`` inputs.
            Y: ``batch_shape' x n' x m`` observations. Batch shapes broadcast.
            noise: Noise variances of Gaussian observations, of the shape of ``Y``, on the scale of
                transformed outcomes.
            kwargs: Per-point arguments of the likelihood (``total_count=``), ``... x n'``, and the
                options ``tol``, ``max_steps`` and ``fixed_inducing=True`` (the update of the paper,
                at fixed inducing points).

        Example:
            >>> import torch
            >>> from gpytorch.likelihoods import PoissonLikelihood
            >>> X = torch.linspace(0, 1, 20, dtype=torch.double).unsqueeze(-1)
            >>> model = SequentialGP(X, torch.ones_like(X), likelihood=PoissonLikelihood())
            >>> known = model.condition_on_observations(X[:1], 9 * torch.ones_like(X[:1]))
            >>> bool(known.posterior(X[:1]).mean > model.posterior(X[:1]).mean)
            True
        """
        check_points(X, self.num_inputs, "X")
        check_Y(X, Y, "X", "Y", self.num_columns, self.likelihood, broadcasts=True)
        check_steps(kwargs.get("tol", 0.0), kwargs.get("max_steps"))
        check_flag(kwargs.get("fixed_inducing", False), "fixed_inducing")
        self._leave_train_mode()
        X = self.in_precision(X)
        X_tf = self._observed_at(X)
        if hasattr(self, "outcome_transform"):
            self.outcome_transform.eval()
            Y, _ = self.outcome_transform(self.in_precision(Y), X=X_tf)
        kwargs = self._per_point(kwargs, Y.shape)
        if noise is not None:
            if noise.shape[-2:] != Y.shape[-2:]:
                raise ValueError(
                    f"noise: expected the shape of Y, {tuple(Y.shape)}, got {tuple(noise.shape)}."
                )
            kwargs["noise"] = self.to_targets(noise)
        elif "noise" not in kwargs and isinstance(self.likelihood, FixedNoiseGaussianLikelihood):
            kwargs["noise"] = _repeated(self._mean_noise(), X.shape[-2])
        elif "noise" not in kwargs and has_outliers(self.likelihood):
            kwargs["noise"] = _repeated(noise_of_new_data(self.likelihood), X.shape[-2])
        with renamed(inputs="X", targets="Y"):
            model: SequentialGP = self.variational_strategy.get_fantasy_model(
                self.with_outputs(X_tf), self.to_targets(Y), **kwargs
            )
        note_conditioned(model, X, kwargs.get("noise"))
        self.guard.sharers.add(model)
        return model

    @reads
    def fantasize(
        self,
        X: Tensor,
        sampler: MCSampler,
        observation_noise: Tensor | None = None,
        propagate_grads: bool = False,
        **kwargs: Any,
    ) -> SequentialGP:
        """Return the model conditioned on observations at ``X``, sampled from its posterior.

        Samples are possible observations: labels are 0 or 1, and counts are integers.

        Args:
            X: ``batch_shape x n' x d`` inputs; ``n'`` may be zero.
            sampler: The sampler of the observations.
            observation_noise: Noise variances of Gaussian observations, ``... x n' x m`` or
                ``... x 1 x m``, on the scale of transformed outcomes.
            propagate_grads: As in BoTorch.
            kwargs: As for `condition_on_observations`.

        Returns:
            A model with batch shape ``sample_shape x batch_shape``.

        Example:
            >>> import torch
            >>> from botorch.sampling import SobolQMCNormalSampler
            >>> from seqgp import BinomialLikelihood
            >>> X = torch.linspace(0, 1, 20, dtype=torch.double).unsqueeze(-1)
            >>> model = SequentialGP(X, torch.ones_like(X), likelihood=BinomialLikelihood(5))
            >>> fantasies = model.fantasize(X[:3, None], SobolQMCNormalSampler(torch.Size([8])))
            >>> fantasies.posterior(X).mean.shape
            torch.Size([8, 3, 20, 1])
        """
        if isinstance(observation_noise, bool):
            raise ValueError(NOISE_OF_FANTASIES)
        check_points(X, self.num_inputs, "X")
        check_instance(sampler, MCSampler, "sampler", optional=False)
        X = self.in_precision(X)
        if not self.has_output_dim:
            kwargs = self._per_point(kwargs, torch.Size([*X.shape[:-1], 1]))
        arguments = {k: v for k, v in kwargs.items() if k not in _CONDITION_OPTIONS}
        self._leave_train_mode()
        with fantasize_flag(), self.variational_strategy.sharing_predictions():
            if X.shape[-2]:
                noisy = True if observation_noise is None else observation_noise
                with settings.propagate_grads(propagate_grads):
                    posterior = self.posterior(X, observation_noise=noisy, **arguments)
                Y = sampler(posterior)
            else:
                batch_shape = broadcast_shapes(X.shape[:-2], self.batch_shape)
                Y = X.new_empty(*sampler.sample_shape, *batch_shape, 0, self.num_columns)
            if observation_noise is not None:
                kwargs["noise"] = observation_noise.expand(Y.shape[1:])
            return self.condition_on_observations(X, Y, **kwargs)

    @reads
    def get_fantasy_model(self, inputs: Tensor, targets: Tensor, **kwargs: Any) -> SequentialGP:
        """`condition_on_observations` with GPyTorch's names; `ModelListGP` calls it.

        Args:
            inputs: ``... x n' x d`` raw inputs.
            targets: ``... [x m] x n'`` transformed targets.
            kwargs: As for `condition_on_observations`.
        """
        check_points(inputs, self.num_inputs, "inputs")
        self._leave_train_mode()
        inputs = self.in_precision(inputs)
        if "noise" not in kwargs and has_outliers(self.likelihood):
            kwargs["noise"] = _repeated(noise_of_new_data(self.likelihood), inputs.shape[-2])
        model: SequentialGP = self.variational_strategy.get_fantasy_model(
            self.with_outputs(self._observed_at(inputs)), targets, **kwargs
        )
        note_conditioned(model, inputs, kwargs.get("noise"))
        self.guard.sharers.add(model)
        return model

    # ---------------------------------------------------------------- several processes

    def gathered(self) -> SequentialGP:
        """A copy that holds the observations of all processes, and belongs to none of them.

        Every process of the ``process_group`` has to call it.
        """
        return gathered(self)

    def scattered(self, process_group: torch.distributed.ProcessGroup) -> SequentialGP:
        """A copy that shares its observations evenly with other processes.

        Every process of the group calls it, with the same model: the inverse of `gathered`.

        Args:
            process_group: The processes.
        """
        return scattered(self, process_group)

    # ---------------------------------------------------------------- housekeeping

    @classmethod
    def construct_inputs(cls, training_data: SupervisedDataset, **kwargs: Any) -> dict[str, Any]:
        """Constructor arguments from a BoTorch data set.

        Args:
            training_data: The data set.
            kwargs: Further arguments of the constructor.
        """
        return {**super().construct_inputs(training_data), **kwargs}

    @property
    def output_likelihood(self) -> Likelihood:
        """The likelihood of the observations that the posterior is about."""
        return self.likelihood

    @reads
    def subset_output(self, idcs: list[int]) -> SequentialGP:
        """Return a copy of the model with some of its outputs.

        Args:
            idcs: Indices of the outputs.
        """
        m = self.num_outputs
        idcs = [i % m if -m <= i < m else i for i in idcs]
        if any(not 0 <= i < m for i in idcs) or not idcs:
            raise ValueError(f"idcs: expected indices of the {m} outputs, got {idcs}.")
        if idcs == list(range(m)):
            return copy.deepcopy(self)
        if not self.has_output_dim:
            raise ValueError("idcs: the latent functions of a likelihood cannot be separated.")
        if self.variational_strategy.is_conditioned:
            raise ValueError("idcs: select the outputs first, then condition or fantasise.")
        model = copy.deepcopy(self)
        select_outputs(model, idcs)
        model._num_outputs = len(idcs)
        model.note_hyperparameters()
        return model

    @writes
    def load_state_dict(  # type: ignore[override]
        self,
        state_dict: Mapping[str, Any],
        strict: bool = True,
        keep_transforms: bool = True,
        assign: bool = False,
    ) -> None:
        """Load hyperparameters and transforms, and recompute the posterior of the model's own data.

        A ``state_dict`` holds no data. To stop a stream and resume it later, use `seqgp.save` and
        `seqgp.load`. Inducing points are loaded unless they are the inputs. You can load the state
        of a `SingleTaskGP` with the same modules. A state that does not fit raises an error, and
        the model is unchanged.

        Args:
            state_dict: The result of ``state_dict()``.
            strict: Whether its keys must be those of this model, except for the variational
                strategy.
            keep_transforms: Whether to use the statistics of the loaded transforms, and transform
                the training targets with them. Otherwise they remain those of the model's own data,
                which BoTorch's models learn at the next training step.
            assign: Whether to convert the model to the precision and device of the state.

        Example:
            >>> import torch
            >>> from seqgp import SequentialGP
            >>> X = torch.linspace(0, 1, 20, dtype=torch.double).unsqueeze(-1)
            >>> old, new = (SequentialGP(X[:n], torch.sin(6 * X[:n])) for n in (15, 20))
            >>> old.covar_module.lengthscale = 0.3
            >>> new.load_state_dict(old.state_dict())
            >>> round(new.covar_module.lengthscale.item(), 6), new.num_data
            (0.3, 20)
        """
        load_state(self, state_dict, strict, keep_transforms, assign)
        if keep_transforms:
            for transform in ("input_transform", "outcome_transform"):
                if hasattr(self, transform):
                    getattr(self, transform).eval()

    def unshare(self, memo: dict[int, Any] | None = None) -> None:
        """Make copies of what a fantasy shares with its parent, before either is changed.

        Args:
            memo: As for `copy.deepcopy`; models that are given the same one share the copies.
        """
        memo = {} if memo is None else memo
        strategy, likelihood = self.variational_strategy, self.likelihood
        with strategy.keeping_state():
            for name, module in list(self.named_children()):
                if module is not strategy:
                    setattr(self, name, copy.deepcopy(module, memo))
            for name, parameter in list(strategy.named_parameters(recurse=False)):
                setattr(strategy, name, copy.deepcopy(parameter, memo))
            strategy.replace_likelihood(likelihood, self.likelihood)

    @reads
    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Hyperparameters, transforms and posterior, as tensors by name.

        Args:
            args: As for any module.
            kwargs: As for any module.
        """
        return super().state_dict(*args, **kwargs)

    @reads
    def __deepcopy__(self, memo: dict[int, Any]) -> SequentialGP:
        copied = object.__new__(type(self))
        memo[id(self)] = copied
        copied.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        if copied.variational_strategy.is_fantasy:
            copied.guard.sharers.add(copied)  # if its parent is copied along with it
        return copied

    def _apply(self, fn: Callable[[Tensor], Tensor], *args: Any, **kwargs: Any) -> SequentialGP:
        probe = self.stream.observations.targets[..., :0]
        converted = fn(probe)
        converts = converted.dtype != probe.dtype or converted.device != probe.device
        strategy = self.variational_strategy
        if converts and strategy.is_fantasy:
            self.unshare()
        known = strategy.is_fantasy or strategy.has_summary
        covers = converts and not known and self.inducing_points_cover_data
        graph = graph_of(self)
        self.stream = self.stream.to(fn)
        if graph is not None:
            self.training_graph = graph.to(fn, self.stream.observations)
        self.conditioned_inputs = tuple(map(fn, self.conditioned_inputs))
        super()._apply(fn, *args, **kwargs)
        if covers and strategy.ranks.alone and not self.inducing_points_cover_data:
            # Inputs that have been transformed and then converted are not quite those that have
            # been converted and then transformed.
            X = self.transform_train_inputs(self.stream.observations.points).detach()
            strategy.start_from(X.reshape(strategy.inducing_points.shape))
            self.refresh()
        if self.settled_at:
            self.note_hyperparameters()
        return self


# What asks for BoTorch's exact GP by name (`NoisyExpectedImprovement`) takes this one as well.
SingleTaskGP.register(SequentialGP)


def _outputs_of(f: MultivariateNormal, indices: tuple[int, ...] | None) -> MultivariateNormal:
    """The latent functions that are outputs; by default all of them."""
    if indices is None:
        return f
    if len(indices) == 1:
        return _one_latent(f, indices[0])
    parts = [_one_latent(f, index) for index in indices]
    return MultitaskMultivariateNormal.from_independent_mvns(parts)


def _one_latent(f: MultivariateNormal, index: int) -> MultivariateNormal:
    """One of several independent latents."""
    blocks = f.lazy_covariance_matrix.base_linear_op  # ... x c x n x n
    return MultivariateNormal(f.mean[..., index], blocks[..., index, :, :])


def _repeated(variance: Tensor, n: int) -> Tensor:
    """A variance ``... x 1`` for each of ``n`` observations."""
    return variance.expand(*variance.shape[:-1], n)


def _with_nugget(f: MultivariateNormal, nugget: Tensor) -> MultivariateNormal:
    """The distribution of ``f`` plus independent noise of a variance that broadcasts to it."""
    mean, covariance = f.mean, f.lazy_covariance_matrix
    return MultivariateNormal(mean, covariance + DiagLinearOperator(nugget.expand(mean.shape)))

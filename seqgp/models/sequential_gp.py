"""`SequentialGP`: a sparse GP for any likelihood, as a BoTorch model."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from botorch import settings
from botorch.acquisition.objective import PosteriorTransform
from botorch.models.gpytorch import GPyTorchModel
from botorch.models.model import FantasizeMixin
from botorch.models.transforms.input import AffineInputTransform, InputTransform
from botorch.models.transforms.outcome import OutcomeTransform
from botorch.models.utils import gpt_posterior_settings, validate_input_scaling
from botorch.models.utils.assorted import fantasize as fantasize_flag
from botorch.models.utils.gpytorch_modules import (
    get_covar_module_with_dim_scaled_prior,
    get_gaussian_likelihood_with_lognormal_prior,
)
from botorch.models.utils.inducing_point_allocators import (
    GreedyVarianceReduction,
    InducingPointAllocator,
)
from botorch.posteriors import GPyTorchPosterior, Posterior
from botorch.sampling.base import MCSampler
from botorch.utils.datasets import SupervisedDataset
from gpytorch.distributions import MultitaskMultivariateNormal, MultivariateNormal
from gpytorch.kernels import Kernel
from gpytorch.likelihoods import FixedNoiseGaussianLikelihood, Likelihood
from gpytorch.means import ConstantMean, Mean
from gpytorch.mlls import MarginalLogLikelihood
from gpytorch.models import ApproximateGP
from gpytorch.settings import min_fixed_noise
from linear_operator.operators import BlockDiagLinearOperator, DiagLinearOperator
from torch import Tensor

from seqgp.dual import Sites
from seqgp.dual.natural_gradient import stopping_after
from seqgp.likelihoods.discrete import OverdispersedBinomialLikelihood
from seqgp.likelihoods.traits import has_closed_form, has_one_latent, is_conjugate
from seqgp.models.fit import fit
from seqgp.models.outputs import select_outputs
from seqgp.models.posteriors import ObservationPosterior
from seqgp.observations import arguments_held_by
from seqgp.streaming.memory import MemoryOptions
from seqgp.streaming.update import StreamMixin
from seqgp.validation import (
    check_arguments,
    check_inputs,
    check_instance,
    check_points,
    check_targets,
    check_Y,
    one_hot_hint,
    renamed,
)
from seqgp.variational.strategy import DualVariationalStrategy

#: Inducing points by default: all inputs, up to this many.
MAX_INDUCING = 100

#: Options of `DualVariationalStrategy.get_fantasy_model`; its other arguments are per point.
_CONDITION_OPTIONS = ("fixed_inducing", "tol", "max_steps", "noise")
_POSTERIOR_OPTIONS = ("output_indices", "observation_noise", "posterior_transform")


class SequentialGP(StreamMixin, GPyTorchModel, ApproximateGP, FantasizeMixin):
    r"""A sparse Gaussian process, for any likelihood, that can be conditioned and fantasised.

    A drop-in for `SingleTaskGP` and `SingleTaskVariationalGP`. The posterior is sensible from the
    start: the sites are converged at the initial hyperparameters; `fit_gpytorch_mll` with a
    `DualELBO` learns the hyperparameters.

    Several columns of ``train_Y`` are modelled as independent outputs with kernels of their own,
    as in `SingleTaskGP`. A likelihood of several latents (`SoftmaxLikelihood`) has one column of
    targets, and the posterior is over its latents.

    Args:
        train_X: ``batch_shape x n x d`` inputs.
        train_Y: ``batch_shape x n x m`` targets.
        train_Yvar: ``batch_shape x n x m`` noise variances of Gaussian observations.
        likelihood: Any GPyTorch likelihood; by default a Gaussian with BoTorch's prior, or with
            fixed noise if ``train_Yvar`` is given.
        covar_module: The kernel; by default BoTorch's, with dimension-scaled priors.
        mean_module: The mean; by default a constant.
        inducing_points: ``batch_shape x k x d`` inducing points in the *transformed* input space,
            or their largest number, if they are chosen among the inputs: fewer where others would
            add nothing, and more later if a stream asks for it. By default all inputs, at most
            `MAX_INDUCING`.
        input_transform: Applied to all inputs. Statistics that it learns from the data are frozen
            at construction.
        outcome_transform: Applied to the targets; for real-valued likelihoods only.
        inducing_point_allocator: Chooses inducing points among the inputs if there are fewer; by
            default greedily by variance reduction. Along a stream, it chooses them anew where new
            inputs ask for it; by default redundant ones are exchanged.
        learn_inducing_points: Whether fitting moves them, where they are fewer than the inputs.
        likelihood_arguments: Per-point arguments of the likelihood for the training data,
            ``batch_shape x n`` each (``{"total_count": ...}``).

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
    train_inputs: tuple[Tensor]
    train_targets: Tensor
    likelihood_arguments: dict[str, Any]
    #: How many observations the model has learnt, whether it holds them or has folded them.
    num_seen: int
    paper_removes_memory: bool = True  # see `seqgp.streaming.paper`
    has_output_dim: bool  # whether the last batch dimension is that of the outputs

    def __init__(
        self,
        train_X: Tensor,
        train_Y: Tensor,
        train_Yvar: Tensor | None = None,
        likelihood: Likelihood | None = None,
        covar_module: Kernel | None = None,
        mean_module: Mean | None = None,
        inducing_points: Tensor | int | None = None,
        input_transform: InputTransform | None = None,
        outcome_transform: OutcomeTransform | None = None,
        inducing_point_allocator: InducingPointAllocator | None = None,
        learn_inducing_points: bool = True,
        likelihood_arguments: dict[str, Tensor] | None = None,
    ) -> None:
        check_inputs(train_X, name="train_X")
        check_Y(train_X, train_Y, "train_X", "train_Y")
        for name, part, kind in (
            ("likelihood", likelihood, Likelihood),
            ("covar_module", covar_module, Kernel),
            ("mean_module", mean_module, Mean),
            ("input_transform", input_transform, InputTransform),
            ("outcome_transform", outcome_transform, OutcomeTransform),
        ):
            check_instance(part, kind, name)
        if train_Yvar is not None:
            check_instance(train_Yvar, Tensor, "train_Yvar")
            if train_Yvar.shape != train_Y.shape:
                raise ValueError(
                    f"train_Yvar: expected the shape of train_Y, {tuple(train_Y.shape)}, got "
                    f"{tuple(train_Yvar.shape)}."
                )
            if likelihood is not None and not is_conjugate(likelihood):
                raise ValueError(
                    "train_Yvar: noise variances are for Gaussian likelihoods, this is a "
                    f"{type(likelihood).__name__}."
                )
        if not train_Y.is_floating_point():
            train_Y = train_Y.to(train_X)
        given_Y = train_Y
        with torch.no_grad():
            if input_transform is not None:
                input_transform.train()
            X = self.transform_inputs(train_X, input_transform)
            if outcome_transform is not None:
                outcome_transform.train()
                train_Y, train_Yvar = outcome_transform(train_Y, train_Yvar, X=X)
        m, batch_shape = train_Y.shape[-1], train_X.shape[:-2]
        self.has_output_dim = m > 1
        aug_batch_shape = torch.Size([*batch_shape, m]) if m > 1 else batch_shape
        Y = self.to_targets(train_Y)
        noise = None if train_Yvar is None else self.to_targets(train_Yvar)
        if likelihood is None:
            if noise is None:
                likelihood = get_gaussian_likelihood_with_lognormal_prior(aug_batch_shape)
            else:
                likelihood = FixedNoiseGaussianLikelihood(noise, batch_shape=aug_batch_shape)
        arguments = dict(likelihood_arguments or {})
        if noise is None:
            arguments = {**arguments_held_by(likelihood, X.shape[-2], arguments), **arguments}
        for key, value in self._per_point(arguments, train_Y.shape).items():
            value = torch.as_tensor(value).to(X)
            arguments[key] = value if value.dim() else value.expand(X.shape[-2])
        if noise is not None:
            arguments["noise"] = noise.clamp_min(min_fixed_noise.value(noise.dtype))
        latents = None if has_one_latent(likelihood) else getattr(likelihood, "num_features", 0)
        if latents == 0:
            raise ValueError(
                f"likelihood: {type(likelihood).__name__} has neither one latent function nor "
                "num_features of them."
            )
        if latents is not None and m > 1:
            raise ValueError(
                f"train_Y: {type(likelihood).__name__} takes one column of targets, got {m}"
                f"{one_hot_hint(likelihood, train_Y, 'train_Y')}"
            )
        # Modules are shared by the latents: batches have a dimension of size 1 for these.
        module_shape = aug_batch_shape
        if latents is not None and batch_shape:
            module_shape = torch.Size([*batch_shape, 1])
        check_arguments(likelihood, arguments, needed=train_X.shape[-2] > 0)
        points = X.unsqueeze(-3) if m > 1 else X
        try:
            check_targets(Y, points, likelihood, name="train_Y", **arguments)
        except ValueError as error:
            if outcome_transform is None:
                raise
            # Unless what was given is wrong itself, the transform has made it so.
            check_targets(self.to_targets(given_Y), points, likelihood, name="train_Y", **arguments)
            raise ValueError(
                f"outcome_transform: {type(outcome_transform).__name__} turns what was observed "
                f"into what {type(likelihood).__name__} cannot observe; observations that are not "
                "real numbers are not transformed: leave it out."
            ) from error
        if covar_module is None:
            if has_closed_form(likelihood):  # which no missing target is
                validate_input_scaling(train_X=X, train_Y=train_Y, train_Yvar=train_Yvar)
            covar_module = get_covar_module_with_dim_scaled_prior(
                ard_num_dims=X.shape[-1], batch_shape=module_shape
            ).to(X)
        Z = _choose_inducing_points(X, inducing_points, covar_module, inducing_point_allocator)
        if (m > 1 or latents is not None) and Z.dim() > 2:
            Z = Z.unsqueeze(-3)
        super().__init__(
            DualVariationalStrategy(
                self,
                Z,
                num_latents=latents,
                learn_inducing_locations=learn_inducing_points,
                batch_shape=aug_batch_shape,
            )
        )
        self._num_outputs = m if latents is None else latents
        self.likelihood = likelihood
        self.covar_module = covar_module
        self.mean_module = (
            ConstantMean(batch_shape=module_shape) if mean_module is None else mean_module
        )
        # Copies: what the caller does to the data later is no business of the model.
        self.train_inputs = (train_X.clone(),)
        self.train_targets = Y.clone()
        self.likelihood_arguments = {key: value.clone() for key, value in arguments.items()}
        if input_transform is not None:
            # Frozen: Z and the past live in the transformed space.
            for transform in input_transform.modules():
                if isinstance(transform, AffineInputTransform):
                    transform.learn_coefficients = False
            self.input_transform = input_transform
        if outcome_transform is not None:
            self.outcome_transform = outcome_transform
        self._inducing_point_allocator = inducing_point_allocator
        self.max_inducing = Z.shape[-2]
        if not isinstance(inducing_points, Tensor):
            self.max_inducing = MAX_INDUCING if inducing_points is None else inducing_points
        self.memory_options = MemoryOptions()
        self.memory_weights = train_X.new_ones(train_X.shape[-2])
        self.num_updates = 0
        self.stream_mode = "pseudo-likelihood"
        self.num_seen = train_X.shape[-2]
        self.classes_seen: tuple[int, ...] = ()
        self._note_classes()
        self.to(train_X)
        self.refresh()
        self.eval()

    # ---------------------------------------------------------------- shapes

    @property
    def batch_shape(self) -> torch.Size:
        """Batch shape, fantasies included: ``posterior(X)`` has that of ``X`` broadcast with it."""
        shape = self.variational_strategy.batch_shape
        return shape[:-1] if self.has_output_dim else shape

    @property
    def num_columns(self) -> int:
        """The number of columns of observations."""
        return self.num_outputs if self.variational_strategy.num_latents is None else 1

    @property
    def num_data(self) -> int:
        """How many observations the model holds; ``num_seen`` counts all that it has learnt."""
        return self.train_inputs[0].shape[-2]

    @property
    def inducing_points_cover_data(self) -> bool:
        """Whether there is an inducing point for each training point."""
        return self.variational_strategy.inducing_points.shape[-2] >= self.num_data

    def transform_train_inputs(self, X: Tensor) -> Tensor:
        """Training inputs as the model sees them, whatever mode it is in."""
        transform = getattr(self, "input_transform", None)
        return X if transform is None else transform.preprocess_transform(X)

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
            shape: That of ``Y``, ``... x n x m``.
        """
        square = self.has_output_dim and shape[-1] == shape[-2]  # which way it is, nobody knows
        return {
            key: self.to_targets(value)
            if isinstance(value, Tensor) and value.shape == shape and not square
            else value
            for key, value in arguments.items()
        }

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

    def forward(self, X: Tensor) -> MultivariateNormal:
        """The prior at transformed inputs ``... x n x d``."""
        return MultivariateNormal(self.mean_module(X), self.covar_module(X))

    def __call__(self, inputs: Tensor, prior: bool = False, **kwargs: Any) -> MultivariateNormal:
        """``q(f)``: at raw inputs in train mode, at transformed ones in eval mode, as in BoTorch.

        Args:
            inputs: ``... x n x d`` inputs.
            prior: Return the prior instead.
            kwargs: Passed to the variational strategy.

        Returns:
            A distribution with event shape ``n``, its last batch dimension that of the outputs if
            there are several; with several latents, a multitask one with event shape ``n x c``.
        """
        if self.training:
            inputs = self.transform_inputs(inputs)
        return super().__call__(self.with_outputs(inputs), prior=prior, **kwargs)

    def train(self, mode: bool = True) -> SequentialGP:
        """Set train or eval mode; training inputs stay as they were given."""
        return torch.nn.Module.train(self, mode)

    def eval(self) -> SequentialGP:
        """Set eval mode."""
        return self.train(False)

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
            observation_noise: Whether to include the noise of observations. With a likelihood that
                is not Gaussian, the result is a posterior over *observations* (0/1, counts, ...),
                an `ObservationPosterior`. A tensor ``... x q x m`` gives the noise variances of
                Gaussian observations.
            posterior_transform: Applied to the posterior.
            arguments: Per-point arguments of the likelihood for observations (``total_count=``).

        Returns:
            A posterior over ``... x q x m`` values.

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
        check_arguments(
            self.likelihood, arguments, _POSTERIOR_OPTIONS, needed=observation_noise is not False
        )
        if output_indices is not None and list(output_indices) != list(range(self.num_outputs)):
            with renamed(idcs="output_indices"):
                part = self.subset_output(output_indices)
            return part.posterior(
                X,
                observation_noise=observation_noise,
                posterior_transform=posterior_transform,
                **arguments,
            )
        check_points(X, self.train_inputs[0].shape[-1], "X")
        if not self.has_output_dim:
            arguments = self._per_point(arguments, torch.Size([*X.shape[:-1], 1]))
        self.eval()
        X = self.transform_inputs(X)
        with gpt_posterior_settings():
            f = self(X)
            noisy = observation_noise is not False
            likelihood = self.likelihood
            if noisy and is_conjugate(likelihood):
                f = likelihood(f, **self._noise_at(f, observation_noise))
            elif noisy and isinstance(likelihood, OverdispersedBinomialLikelihood):
                f = _with_nugget(f, likelihood.nugget)  # the log odds of each observation
        latent = GPyTorchPosterior(distribution=self._with_output_blocks(f))
        posterior: Posterior = latent
        if noisy and not is_conjugate(self.likelihood):
            if isinstance(observation_noise, Tensor):
                raise ValueError(
                    "observation_noise: noise variances are for Gaussian likelihoods, this is a "
                    f"{type(self.likelihood).__name__}; pass True."
                )
            posterior = ObservationPosterior(
                latent, likelihood, arguments, not has_one_latent(likelihood)
            )
        if hasattr(self, "outcome_transform"):
            posterior = self.outcome_transform.untransform_posterior(posterior, X=X)
        if posterior_transform is not None:
            posterior = posterior_transform(posterior=posterior, X=X)
        return posterior

    def _noise_at(self, f: MultivariateNormal, noise: bool | Tensor) -> dict[str, Tensor]:
        """The argument ``noise``, ``... [x m] x q``, unless the likelihood's own is meant."""
        shape = torch.Size([*f.batch_shape, *f.event_shape])
        if isinstance(noise, Tensor):
            return {"noise": self.to_targets(noise).expand(shape)}
        if isinstance(self.likelihood, FixedNoiseGaussianLikelihood):
            return {"noise": self._mean_noise().expand(shape)}
        return {}

    def _mean_noise(self) -> Tensor:
        """``... [x m] x 1``, of the observations at hand: what BoTorch takes for new ones."""
        noise = self.likelihood_arguments.get("noise")
        if noise is None or noise.shape[-1] == 0:
            noise = self.likelihood.noise_covar.noise
        return noise.mean(-1, keepdim=True)

    # ---------------------------------------------------------------- learning

    @torch.no_grad()
    def choose_inducing_points(self, number: int) -> Tensor:
        """``batch_shape x k x d`` inducing points for the training data and the present kernel.

        Args:
            number: How many; fewer if there are fewer inputs.
        """
        X = self.transform_train_inputs(self.train_inputs[0])
        return _choose_inducing_points(X, number, self.covar_module, self._inducing_point_allocator)

    def check_not_fantasy(self) -> None:
        """Raise if the model has been conditioned on more than the training data that it holds."""
        if self.variational_strategy.is_fantasy:
            raise RuntimeError(
                "This is a conditioned (fantasy) model: condition it further with "
                "condition_on_observations; update or fit the model that it came from."
            )

    @torch.no_grad()
    def refresh(self, tol: float = 1e-8, max_steps: int | None = None) -> None:
        """Converge the sites of the training data at the present hyperparameters.

        Args:
            tol: Relative tolerance; for a Gaussian likelihood the sites are exact in any case.
            max_steps: The largest number of passes over the data, at which it may end without
                having converged; by default 100, with a warning.
        """
        self.check_not_fantasy()
        X = self.with_outputs(self.transform_train_inputs(self.train_inputs[0]))
        Y, strategy = self.train_targets, self.variational_strategy
        arguments = self.likelihood_arguments
        if is_conjugate(self.likelihood):
            strategy.natural_gradient_step(X, Y, self.likelihood, **arguments)
        else:
            options: dict[str, Any] = {"tol": tol, "weights": self._replay_weights()}
            with stopping_after(max_steps) as most:
                strategy.converge(X, Y, self.likelihood, max_steps=most, **options, **arguments)

    def bound(
        self,
        start: Sites | None = None,
        tol: float = 1e-8,
        stands_for: Tensor | None = None,
        max_steps: int | None = None,
    ) -> tuple[Tensor, Sites]:
        """The bound of the training data, maximised over q; see `DualVariationalStrategy.bound`.

        Args:
            start: Sites to start from.
            tol: Relative tolerance for the sites.
            stands_for: For how much of what was folded the first observations stand.
            max_steps: As for `refresh`.
        """
        X, Y, arguments = self.training_data()
        weights = self._replay_weights()
        with stopping_after(max_steps) as most:
            return self.variational_strategy.bound(
                X, Y, self.likelihood, start, tol, stands_for, weights, most, **arguments
            )

    @torch.no_grad()
    def natural_gradient_step(
        self, X: Tensor, targets: Tensor, rho: float, **arguments: Any
    ) -> None:
        """One step on a minibatch of the training data.

        Args:
            X: ``batch_shape x n' x d`` raw inputs.
            targets: ``batch_shape [x m] x n'`` transformed targets.
            rho: The step size.
            arguments: Per-point arguments of the likelihood.
        """
        self.variational_strategy.natural_gradient_step(
            self.with_outputs(self.transform_train_inputs(X)),
            targets,
            self.likelihood,
            rho,
            num_data=self.num_data,
            **arguments,
        )

    def training_data(self) -> tuple[Tensor, Tensor, dict[str, Any]]:
        """Transformed inputs, transformed targets and arguments of the training data."""
        X = self.with_outputs(self.transform_train_inputs(self.train_inputs[0]))
        return X, self.train_targets, self.likelihood_arguments

    def custom_fit(self, mll: MarginalLogLikelihood, **kwargs: Any) -> MarginalLogLikelihood:
        """BoTorch's hook for `fit_gpytorch_mll`; see `seqgp.models.fit.fit` for the options."""
        return fit(self, mll, **kwargs)

    def set_train_data(
        self, inputs: Tensor | None = None, targets: Tensor | None = None, strict: bool = True
    ) -> None:
        """Replace the training data, without learning from them; `refresh` does.

        Args:
            inputs: ``batch_shape x n x d`` raw inputs.
            targets: ``batch_shape [x m] x n`` transformed targets.
            strict: Whether shapes must be those of the present data.
        """
        for name, new, old in (
            ("inputs", inputs, self.train_inputs[0]),
            ("targets", targets, self.train_targets),
        ):
            if strict and new is not None and new.shape != old.shape:
                raise ValueError(f"{name}: expected shape {tuple(old.shape)}, got {new.shape}.")
        if inputs is not None:
            self.train_inputs = (inputs,)
        if targets is not None:
            self.train_targets = targets

    # ---------------------------------------------------------------- conditioning

    def condition_on_observations(
        self, X: Tensor, Y: Tensor, noise: Tensor | None = None, **kwargs: Any
    ) -> SequentialGP:
        """A model of the same type that has seen more observations; this one is unchanged.

        The posterior process is conditioned exactly, with converged sites, in site space (see
        `DualVariationalStrategy.get_fantasy_model`). Hyperparameters are shared, not copied.

        Args:
            X: ``batch_shape x n' x d`` inputs.
            Y: ``batch_shape' x n' x m`` observations; batch shapes broadcast, missing ones on the
                left are added.
            noise: Noise variances of Gaussian observations, of the shape of ``Y``, in the space of
                transformed outcomes.
            kwargs: ``fixed_inducing=True`` for the paper's update, ``tol``, ``max_steps``, and
                per-point arguments of the likelihood (``total_count=``), ``... x n'``.

        Example:
            >>> import torch
            >>> from gpytorch.likelihoods import PoissonLikelihood
            >>> X = torch.linspace(0, 1, 20, dtype=torch.double).unsqueeze(-1)
            >>> model = SequentialGP(X, torch.ones_like(X), likelihood=PoissonLikelihood())
            >>> known = model.condition_on_observations(X[:1], 9 * torch.ones_like(X[:1]))
            >>> bool(known.posterior(X[:1]).mean > model.posterior(X[:1]).mean)
            True
        """
        check_points(X, self.train_inputs[0].shape[-1], "X")
        check_Y(X, Y, "X", "Y", self.num_columns, self.likelihood, broadcasts=True)
        X_tf = self.transform_inputs(X)
        if hasattr(self, "outcome_transform"):
            self.outcome_transform.eval()
            Y, _ = self.outcome_transform(Y, X=X_tf)
        kwargs = self._per_point(kwargs, Y.shape)
        if noise is not None:
            if noise.shape[-2:] != Y.shape[-2:]:
                raise ValueError(
                    f"noise: expected the shape of Y, {tuple(Y.shape)}, got {tuple(noise.shape)}."
                )
            kwargs["noise"] = self.to_targets(noise)
        elif "noise" not in kwargs and isinstance(self.likelihood, FixedNoiseGaussianLikelihood):
            mean_noise = self._mean_noise()
            kwargs["noise"] = mean_noise.expand(*mean_noise.shape[:-1], X.shape[-2])
        with renamed(inputs="X", targets="Y"):
            return self.variational_strategy.get_fantasy_model(
                self.with_outputs(X_tf), self.to_targets(Y), **kwargs
            )

    def fantasize(
        self,
        X: Tensor,
        sampler: MCSampler,
        observation_noise: Tensor | None = None,
        propagate_grads: bool = False,
        **kwargs: Any,
    ) -> SequentialGP:
        """The model conditioned on observations at ``X`` that are drawn from its own posterior.

        Args:
            X: ``batch_shape x n' x d`` inputs; ``n'`` may be zero.
            sampler: Draws observations, each of them a possible one (0/1, counts, ...).
            observation_noise: Noise variances of Gaussian observations, ``... x n' x m`` or
                ``... x 1 x m``, in the space of transformed outcomes.
            propagate_grads: BoTorch's setting of that name, for the posterior at ``X``.
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
            raise ValueError(
                "observation_noise: expected noise variances or None; fantasised observations "
                "always have the likelihood's noise."
            )
        check_points(X, self.train_inputs[0].shape[-1], "X")
        check_instance(sampler, MCSampler, "sampler", optional=False)
        if not self.has_output_dim:
            kwargs = self._per_point(kwargs, torch.Size([*X.shape[:-1], 1]))
        arguments = {k: v for k, v in kwargs.items() if k not in _CONDITION_OPTIONS}
        with fantasize_flag():
            if X.shape[-2]:
                noisy = True if observation_noise is None else observation_noise
                with settings.propagate_grads(propagate_grads):
                    posterior = self.posterior(X, observation_noise=noisy, **arguments)
                Y = sampler(posterior)
            else:
                batch_shape = torch.broadcast_shapes(X.shape[:-2], self.batch_shape)
                Y = X.new_empty(*sampler.sample_shape, *batch_shape, 0, self.num_columns)
            if observation_noise is not None:
                kwargs["noise"] = observation_noise.expand(Y.shape[1:])
            return self.condition_on_observations(X, Y, **kwargs)

    def get_fantasy_model(self, inputs: Tensor, targets: Tensor, **kwargs: Any) -> SequentialGP:
        """`condition_on_observations` with GPyTorch's names; `ModelListGP` calls it.

        Args:
            inputs: ``... x n' x d`` raw inputs.
            targets: ``... [x m] x n'`` transformed targets.
            kwargs: As for `condition_on_observations`.
        """
        inputs = self.with_outputs(self.transform_inputs(inputs))
        return self.variational_strategy.get_fantasy_model(inputs, targets, **kwargs)

    # ---------------------------------------------------------------- housekeeping

    @classmethod
    def construct_inputs(cls, training_data: SupervisedDataset, **kwargs: Any) -> dict[str, Any]:
        """Constructor arguments from a BoTorch data set.

        Args:
            training_data: The data set.
            kwargs: Further arguments of the constructor.
        """
        return {**super().construct_inputs(training_data), **kwargs}

    def subset_output(self, idcs: list[int]) -> SequentialGP:
        """A model of some of the outputs.

        Args:
            idcs: Their indices.
        """
        m = self.num_outputs
        idcs = [i % m if -m <= i < m else i for i in idcs]
        if any(not 0 <= i < m for i in idcs) or not idcs:
            raise ValueError(f"idcs: expected indices of the {m} outputs, got {idcs}.")
        if idcs == list(range(m)):
            return self
        if not self.has_output_dim:
            raise ValueError("idcs: the latents of one likelihood cannot be separated.")
        if self.variational_strategy.is_conditioned:
            raise ValueError("idcs: select the outputs first, then condition or fantasise.")
        model = copy.deepcopy(self)
        select_outputs(model, idcs)
        return model

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, *args: Any, **kwargs: Any
    ) -> Any:
        """Load hyperparameters and posterior; a ``state_dict`` holds no data, and so no memory.

        To stop a stream and go on later, use `seqgp.save` and `seqgp.load`.

        Args:
            state_dict: What ``state_dict()`` returned.
            strict: Whether its keys have to be those of this model.
            args: As for BoTorch's models (``keep_transforms``).
            kwargs: The same.
        """
        strategy = self.variational_strategy
        folded = state_dict.get("variational_strategy.summary_count")
        if folded is not None and self.num_data:
            own = strategy.summary_count
            if folded.shape != own.shape or not torch.equal(folded.to(own), own):
                warnings.warn(
                    "The state is that of a stream, and this model holds other data than that "
                    "stream did: an update would learn these again. To go on with a stream, use "
                    "seqgp.save and seqgp.load.",
                    stacklevel=2,
                )
        return super().load_state_dict(state_dict, strict, *args, **kwargs)

    def _extract_targets_and_noise(self) -> tuple[Tensor, Tensor | None]:
        # For `load_state_dict`, which transforms them anew.
        noise = self.likelihood_arguments.get("noise")
        if noise is not None:
            noise = self.to_columns(noise.expand_as(self.train_targets))
        return self.to_columns(self.train_targets), noise

    def _restore_targets_and_noise(self, Y: Tensor, Yvar: Tensor | None, strict: bool) -> None:
        self.set_train_data(targets=self.to_targets(Y), strict=strict)
        if Yvar is not None:
            noise = self.to_targets(Yvar)
            self.likelihood_arguments["noise"] = self.likelihood.noise_covar.noise = noise

    def _unshare(self) -> None:
        """Copies of what a fantasy shares with its parent, before they are converted."""
        strategy, likelihood = self.variational_strategy, self.likelihood
        for name, module in self._modules.items():
            if module is not strategy:
                self._modules[name] = copy.deepcopy(module)
        for name, parameter in strategy._parameters.items():
            strategy._parameters[name] = copy.deepcopy(parameter)
        strategy.replace_likelihood(likelihood, self.likelihood)

    def _apply(self, fn: Callable[[Tensor], Tensor], *args: Any, **kwargs: Any) -> SequentialGP:
        probe = self.train_targets.detach()[..., :0]
        converted = fn(probe)
        converts = converted.dtype != probe.dtype or converted.device != probe.device
        if converts and self.variational_strategy.is_fantasy:
            self._unshare()
        self.train_inputs = (fn(self.train_inputs[0]),)
        self.train_targets = fn(self.train_targets)
        self.memory_weights = fn(self.memory_weights)
        self.likelihood_arguments = {k: fn(v) for k, v in self.likelihood_arguments.items()}
        return super()._apply(fn, *args, **kwargs)


def _with_nugget(f: MultivariateNormal, nugget: Tensor) -> MultivariateNormal:
    """The distribution of ``f`` plus independent noise of a variance that broadcasts to it."""
    mean, covariance = f.mean, f.lazy_covariance_matrix
    return MultivariateNormal(mean, covariance + DiagLinearOperator(nugget.expand(mean.shape)))


def _choose_inducing_points(
    X: Tensor,
    inducing_points: Tensor | int | None,
    covar_module: Kernel,
    allocator: InducingPointAllocator | None,
) -> Tensor:
    """``batch_shape x k x d`` inducing points for transformed inputs ``batch_shape x n x d``."""
    if isinstance(inducing_points, Tensor):
        if inducing_points.dim() < 2 or inducing_points.shape[-1] != X.shape[-1]:
            raise ValueError(
                f"inducing_points: expected shape k x {X.shape[-1]}, got "
                f"{tuple(inducing_points.shape)}."
            )
        return inducing_points
    if inducing_points is not None and not isinstance(inducing_points, int):
        raise TypeError(
            f"inducing_points: expected a tensor or a whole number, got {inducing_points!r:.50}."
        )
    n = X.shape[-2]
    if n == 0:
        raise ValueError("train_X: without data, pass inducing_points as a tensor.")
    number = min(n, MAX_INDUCING if inducing_points is None else inducing_points)
    if number < 1:
        raise ValueError(f"inducing_points: expected at least one, got {inducing_points}.")
    if number == n:
        return X
    if covar_module.batch_shape:  # choose for the first of the models: BoTorch knows few batches
        covar_module = covar_module[(0,) * len(covar_module.batch_shape)]
    allocator = GreedyVarianceReduction() if allocator is None else allocator
    chosen = [
        allocator.allocate_inducing_points(x, covar_module, number, torch.Size())
        for x in X.reshape(-1, *X.shape[-2:])
    ]
    number = min(len(points) for points in chosen)  # fewer, where the others would add nothing
    return torch.stack([Z[:number] for Z in chosen]).reshape(*X.shape[:-2], number, X.shape[-1])

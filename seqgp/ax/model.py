r"""`SequentialGP` as Ax uses models: one per metric, made anew from all data at each step.

**Scale.** Objectives and constraints of Ax are about expected values of metrics: rates of counts,
rates of success. The posterior of a metric that is not Gaussian is therefore that of
:math:`F(f(x))`, with :math:`F` the link of its likelihood, on the scale in which it is reported.

**Stream.** Ax hands over all data at each step. If they are those of the previous model and some
more, the new model is a copy of the previous one that is updated with what is new
(`SequentialGP.update`), instead of one that is fitted from scratch. From time to time, whenever the
data have grown by a certain factor, it is fitted from scratch nevertheless.
"""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from ax.core.search_space import SearchSpaceDigest
from ax.generators.torch.botorch_modular.surrogate import Surrogate, submodel_input_constructor
from ax.generators.torch.botorch_modular.utils import ModelConfig, fit_botorch_model
from ax.storage.botorch_modular_registry import register_model
from botorch.acquisition.objective import PosteriorTransform
from botorch.fit import fit_gpytorch_mll
from botorch.models.kernels.categorical import CategoricalKernel
from botorch.models.model import Model
from botorch.models.transforms.input import InputTransform
from botorch.models.transforms.outcome import OutcomeTransform
from botorch.models.utils.gpytorch_modules import get_covar_module_with_dim_scaled_prior
from botorch.models.utils.inducing_point_allocators import InducingPointAllocator
from botorch.posteriors import GPyTorchPosterior, Posterior, TransformedPosterior
from botorch.sampling.base import MCSampler
from botorch.sampling.get_sampler import GetSampler, get_sampler
from botorch.utils.datasets import SupervisedDataset
from gpytorch.constraints import GreaterThan
from gpytorch.distributions import MultivariateNormal
from gpytorch.kernels import Kernel, ScaleKernel
from gpytorch.likelihoods import BernoulliLikelihood, Likelihood, PoissonLikelihood
from gpytorch.means import ConstantMean
from gpytorch.priors import GammaPrior, LogNormalPrior
from linear_operator.utils.errors import NanError, NotPSDError
from torch import Tensor

from seqgp.acquisition.uncertainty import link_of, prevalence
from seqgp.ax.internals import previous_models_of
from seqgp.ax.predictor import Predictor
from seqgp.kernel_scales import sharp
from seqgp.likelihoods.discrete import BinomialLikelihood
from seqgp.models.posteriors import ObservationPosterior
from seqgp.models.sequential_gp import SequentialGP
from seqgp.streaming.memory import MemoryOptions
from seqgp.validation import renamed
from seqgp.variational.elbo import DualELBO

#: What a metric can be: its likelihood by name.
LIKELIHOODS: dict[str, type[Likelihood] | None] = {
    "gaussian": None,
    "poisson": PoissonLikelihood,
    "binomial": BinomialLikelihood,
    "bernoulli": BernoulliLikelihood,
}

#: Inducing points: all inputs, up to this many.
MAX_INDUCING = 300

#: A model is fitted from scratch when the data have grown by this factor since it last was, and its
#: hyperparameters are learnt on when they have grown by this factor since they last were.
GROWTH, LEARN_GROWTH = 1.2, 1.03

#: Steps of L-BFGS, of an update and from scratch.
UPDATE_STEPS, FIT_STEPS = 10, 100

#: Joint predictions at more inputs than that have lazy covariances.
MAX_DENSE = 300

#: Observations that are remembered as they are; older ones are folded into the summary.
MEMORY = 2000


class Observed(NamedTuple):
    """All data that a model was made with, in the order in which it learnt them.

    Attributes:
        X: ``n x d`` inputs.
        Y: ``n x 1`` observations, counts also of a binomial metric.
        Yvar: ``n x 1`` noise variances, if known.
        totals: ``n`` totals of a binomial metric.
    """

    X: Tensor
    Y: Tensor
    Yvar: Tensor | None = None
    totals: Tensor | None = None

    def rows(self) -> Tensor:
        """``n x k``, all about each observation."""
        totals = None if self.totals is None else self.totals.unsqueeze(-1)
        parts = [self.X, self.Y, self.Yvar, totals]
        return torch.cat([part for part in parts if part is not None], -1)

    def select(self, index: Tensor) -> Observed:
        """Some of them."""
        return Observed(*(None if part is None else part[index] for part in self))  # type: ignore[arg-type]


def what_is_new(known: Observed, given: Observed) -> Tensor | None:
    """Indices of the given observations that are not known, ``None`` if a known one is missing.

    Observations may come in any order; one that has been made twice counts twice.

    Args:
        known: What has been learnt.
        given: What there is now.

    Example:
        >>> X = torch.arange(4.0).unsqueeze(-1)
        >>> what_is_new(Observed(X[:2], X[:2]), Observed(X.flip(0), X.flip(0)))
        tensor([0, 1])
        >>> what_is_new(Observed(X[:2], X[:2]), Observed(X, X + 1)) is None
        True
    """
    old, new = known.rows(), given.rows()
    if old.shape[-1] != new.shape[-1]:
        return None
    places: defaultdict[tuple[float, ...], list[int]] = defaultdict(list)
    for i, row in enumerate(new.tolist()):
        places[tuple(row)].append(i)
    for row in old.tolist():
        if not places[tuple(row)]:
            return None
        places[tuple(row)].pop(0)
    left = sorted(i for indices in places.values() for i in indices)
    return torch.tensor(left, dtype=torch.long, device=new.device)


class NotGaussian:
    """Stands for a distribution that nobody should take for a Gaussian."""


class LinkPosterior(TransformedPosterior, GPyTorchPosterior):
    """The posterior of what a metric is expected to be: of the link of latent values.

    It is not Gaussian. Ax's sensitivity analyses insist on a `GPyTorchPosterior`, of which they
    want only the mean: here it is, by name. Its ``distribution`` is good for nothing.

    Args:
        latent: The posterior of the latent function.
        likelihood: The likelihood, whose link it is.
    """

    def __init__(self, latent: GPyTorchPosterior, likelihood: Likelihood) -> None:
        TransformedPosterior.__init__(
            self,
            latent,
            sample_transform=link_of(likelihood).forward,
            mean_transform=lambda mean, variance: _expected(likelihood, mean, variance),
            variance_transform=lambda mean, variance: prevalence(likelihood, mean, variance)[1],
        )
        self.latent = latent
        self.distribution = NotGaussian()

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}.")


def _expected(likelihood: Likelihood, mean: Tensor, variance: Tensor) -> Tensor:
    """The mean of the link of latent values: in closed form for probabilities, else quadrature."""
    if isinstance(likelihood, BernoulliLikelihood):
        return torch.special.ndtr(mean * (1 + variance).rsqrt())
    return prevalence(likelihood, mean, variance)[0]


@GetSampler.register(NotGaussian)
def _get_sampler(
    posterior: LinkPosterior, sample_shape: torch.Size, *, seed: int | None = None
) -> MCSampler:
    return get_sampler(posterior.latent, sample_shape, seed=seed)


class ExpectedOutcome(OutcomeTransform):
    """Leaves observations alone and turns the posterior into that of expected observations.

    Args:
        likelihood: The likelihood.
    """

    _is_linear = False

    def __init__(self, likelihood: Likelihood) -> None:
        super().__init__()
        object.__setattr__(self, "likelihood", likelihood)  # which is the model's, not ours

    def forward(
        self, Y: Tensor, Yvar: Tensor | None = None, X: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """The observations as they are."""
        return Y, Yvar

    def untransform(
        self, Y: Tensor, Yvar: Tensor | None = None, X: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """The observations as they are."""
        return Y, Yvar

    def untransform_posterior(self, posterior: Posterior, X: Tensor | None = None) -> Posterior:
        """That of expected observations; of observations, of binomial ones as rates."""
        if type(posterior) is GPyTorchPosterior:
            return LinkPosterior(posterior, self.likelihood)
        if isinstance(posterior, ObservationPosterior) and "total_count" in posterior.arguments:
            total = posterior.arguments["total_count"].unsqueeze(-1)
            return TransformedPosterior(
                posterior,
                sample_transform=lambda Y: Y / total,
                mean_transform=lambda mean, variance: mean / total,
                variance_transform=lambda mean, variance: variance / total.square(),
            )
        return posterior


class AxSequentialGP(SequentialGP):
    """A `SequentialGP` of one metric of an Ax experiment.

    Made by Ax, with the options that `seqgp.ax.generation_strategy` gives it.

    Args:
        train_X: ``n x d`` inputs.
        train_Y: ``n x 1`` values of the metric; of a binomial one, rates of success.
        train_Yvar: ``n x 1`` noise variances of a Gaussian metric.
        input_transform: Applied to the inputs.
        outcome_transform: Must be ``None``: Ax's own transforms have been applied.
        likelihood_name: One of `LIKELIHOODS`.
        total_count: ``n`` totals of a binomial metric, or one for all.
        jumps: Whether the metric is expected to jump, as validity does, rather than to be smooth.
        categorical_features: Indices of inputs of which only equality matters.
        max_inducing: The largest number of inducing points.
        growth: By which factor data grow until a model is fitted from scratch.
        previous: The previous model of the metric, if it may be updated.
        metric: The name of the metric, for errors.

    Example:
        >>> X = torch.linspace(0, 1, 30, dtype=torch.double).unsqueeze(-1)
        >>> Y = torch.poisson(5 + 4 * torch.sin(6 * X))
        >>> model = AxSequentialGP(X[:27], Y[:27], likelihood_name="poisson")
        >>> model.learn()
        >>> updated = AxSequentialGP(X, Y, likelihood_name="poisson", previous=model)
        >>> updated.num_updates, updated.num_data, model.num_data
        (1, 30, 27)
        >>> updated.posterior(X).mean.min() > 0
        tensor(True)
    """

    observed: Observed
    num_fitted: int  # observations when the model was fitted from scratch,
    num_learnt: int  # and when its hyperparameters were last learnt
    _predictor: tuple[Any, Predictor] | None = None

    def __init__(
        self,
        train_X: Tensor,
        train_Y: Tensor,
        train_Yvar: Tensor | None = None,
        input_transform: InputTransform | None = None,
        outcome_transform: OutcomeTransform | None = None,
        likelihood_name: str = "gaussian",
        total_count: Tensor | float | None = None,
        jumps: bool = False,
        categorical_features: Sequence[int] = (),
        max_inducing: int = MAX_INDUCING,
        growth: float = GROWTH,
        previous: AxSequentialGP | None = None,
        metric: str | None = None,
    ) -> None:
        name = "train_Y" if metric is None else f"metric {metric!r}"
        if likelihood_name not in LIKELIHOODS:
            names = ", ".join(map(repr, LIKELIHOODS))
            raise ValueError(f"likelihood_name: expected one of {names}, got {likelihood_name!r}.")
        if outcome_transform is not None:
            raise ValueError("outcome_transform: expected none, metrics have been transformed.")
        if (total_count is None) == (likelihood_name == "binomial"):
            raise ValueError("total_count: expected for binomial metrics, and only for them.")
        observed = _observed(train_X, train_Y, train_Yvar, likelihood_name, total_count, name)
        if previous is not None:
            new = what_is_new(previous.observed, observed)
            if new is not None and len(train_X) <= growth * previous.num_fitted:
                try:
                    with renamed(Y=name):
                        self._continue(previous, observed.select(new))
                    return
                except (FloatingPointError, NanError, NotPSDError):
                    self.__dict__.clear()  # start again, from scratch
        self.observed = observed
        likelihood_class = LIKELIHOODS[likelihood_name]
        # Where BoTorch and GPyTorch make what has no device of its own.
        with train_X.device, renamed(train_Y=name):
            likelihood = None if likelihood_class is None else likelihood_class()
            mean, kernel = _prior(observed, likelihood, jumps, categorical_features)
            super().__init__(
                observed.X,
                observed.Y,
                train_Yvar=observed.Yvar,
                likelihood=likelihood,
                covar_module=kernel,
                mean_module=mean,
                inducing_points=max_inducing,
                input_transform=input_transform,
                outcome_transform=None if likelihood is None else ExpectedOutcome(likelihood),
                learn_inducing_points=False,
                likelihood_arguments=(
                    {} if observed.totals is None else {"total_count": observed.totals}
                ),
            )
        self.memory_options = MemoryOptions(capacity=max(MEMORY, max_inducing))
        self.num_fitted = self.num_learnt = len(train_X)

    def _continue(self, previous: AxSequentialGP, new: Observed) -> None:
        """Become a copy of the previous model that has learnt what is new."""
        memo: dict[int, Any] = {id(previous): self}
        self.__dict__.update(copy.deepcopy({**previous.__dict__, "_predictor": None}, memo))
        if not len(new.X):
            return
        n = len(self.observed.X) + len(new.X)
        learn = n >= LEARN_GROWTH * self.num_learnt and self._can_learn(new.Y)
        arguments: dict[str, Any] = {} if new.totals is None else {"total_count": new.totals}
        self.update(
            new.X,
            new.Y,
            noise=new.Yvar,
            learn=learn,
            steps=UPDATE_STEPS,
            inducing="adapt",
            **arguments,
        )
        if learn:
            self.num_learnt = n
        parts = zip(self.observed, new, strict=True)
        self.observed = Observed(
            *(None if a is None or b is None else torch.cat([a, b]) for a, b in parts)  # type: ignore[arg-type]
        )

    def __call__(self, inputs: Tensor, prior: bool = False, **kwargs: Any) -> MultivariateNormal:
        """As of `SequentialGP`, faster in eval mode.

        Args:
            inputs: ``... x n x d`` inputs.
            prior: Return the prior instead.
            kwargs: Passed to the variational strategy.
        """
        if self.training or prior or self.variational_strategy.is_fantasy:
            return super().__call__(inputs, prior, **kwargs)
        tensors = (*self.parameters(), *self.variational_strategy.buffers())
        # PyTorch counts the changes of a tensor in `_version`; there is no public name for it.
        key = tuple((id(tensor), tensor._version) for tensor in tensors)  # noqa: SLF001
        if self._predictor is None or self._predictor[0] != key:
            self._predictor = key, Predictor(self)
        predict = self._predictor[1]
        num_common = predict.num_common(inputs)
        if inputs.shape[-2] - num_common > MAX_DENSE:
            return super().__call__(inputs, prior, **kwargs)
        return predict(inputs, num_common)

    def train(self, mode: bool = True) -> AxSequentialGP:
        """Set train or eval mode."""
        if mode:
            self._predictor = None
        super().train(mode)
        return self

    def learn(self) -> None:
        """Learn the hyperparameters from scratch, unless the model has just been updated."""
        if self.num_updates or not self._can_learn():
            return
        fit_gpytorch_mll(
            DualELBO(self.likelihood, self), optimizer_kwargs={"options": {"maxiter": FIT_STEPS}}
        )

    def _can_learn(self, *more: Tensor) -> bool:
        """Of one class alone nothing can be learnt about the scale of the other."""
        if not isinstance(self.likelihood, BernoulliLikelihood):
            return True
        return len(torch.cat([self.observed.Y, *more]).unique()) > 1

    def _adapt_inducing_points(
        self, max_points: int | None, allocator: InducingPointAllocator | None
    ) -> None:
        """All inputs, as long as there is room."""
        if self.num_data > self.max_inducing:
            super()._adapt_inducing_points(max_points, allocator)
        else:
            self.variational_strategy.start_from(self.training_data()[0].detach())

    def posterior(  # type: ignore[override]
        self,
        X: Tensor,
        output_indices: list[int] | None = None,
        observation_noise: bool | Tensor = False,
        posterior_transform: PosteriorTransform | None = None,
        **arguments: Any,
    ) -> Posterior:
        """As of `SequentialGP`; of binomial observations, rates out of the usual total.

        Args:
            X: The inputs.
            output_indices: As in `SequentialGP`.
            observation_noise: Whether to include the noise of observations.
            posterior_transform: Applied to the posterior.
            arguments: Per-point arguments of the likelihood.
        """
        totals = self.observed.totals
        if observation_noise is True and totals is not None:
            arguments.setdefault("total_count", totals.median().expand(X.shape[:-1]))
        return super().posterior(
            X, output_indices, observation_noise, posterior_transform, **arguments
        )

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> None:
        """Take over hyperparameters, and learn the model's own data with them.

        This is what Ax does it for: cross validation, with hyperparameters that were learnt from
        all data and observations that leave some of them out. The posterior, which is part of a
        state, must not come along.

        Args:
            state_dict: A state.
            args: Not used.
            kwargs: Not used.
        """
        own = self.state_dict()
        learnt = {
            name: value
            for name, value in state_dict.items()
            if name in own
            and not name.startswith("variational_strategy.")
            and value.shape == own[name].shape
        }
        torch.nn.Module.load_state_dict(self, learnt, strict=False)
        self.variational_strategy.clear_cache()
        self.refresh()

    def _apply(self, fn: Callable[[Tensor], Tensor], *args: Any, **kwargs: Any) -> AxSequentialGP:
        self._predictor = None
        self.observed = Observed(*(None if part is None else fn(part) for part in self.observed))  # type: ignore[arg-type]
        super()._apply(fn, *args, **kwargs)
        return self

    @classmethod
    def construct_inputs(cls, training_data: SupervisedDataset, **kwargs: Any) -> dict[str, Any]:
        """Constructor arguments from a data set.

        Args:
            training_data: The data set.
            kwargs: Options of the model, and what Ax says about special parameters.
        """
        for name in ("fidelity_features", "hierarchical_dependencies"):
            if kwargs.pop(name, None):
                raise NotImplementedError(f"{name}: not supported by SequentialGP in Ax.")
        return super().construct_inputs(training_data, **kwargs)


def _observed(
    X: Tensor, Y: Tensor, Yvar: Tensor | None, likelihood_name: str, total_count: Any, name: str
) -> Observed:
    """What was observed, in the likelihood's own terms; ``name`` is that of ``Y`` in errors."""
    if likelihood_name == "gaussian":
        return Observed(X, Y, Yvar)
    if likelihood_name != "binomial":
        return Observed(X, Y)
    totals = torch.as_tensor(total_count, dtype=X.dtype, device=X.device).expand(len(X))
    counts = Y * totals.unsqueeze(-1)
    wrong = ((counts - counts.round()).abs() > 1e-3) | ((Y - 0.5).abs() > 0.5 + 1e-6)
    if bool(wrong.any()):
        row = int(wrong.squeeze(-1).nonzero()[0])
        raise ValueError(
            f"{name}: expected a rate of success, k/n with n = {totals[row].item():g}, got "
            f"{Y[row].item():g}; report the rate k/n, not the count k."
        )
    return Observed(X, counts.round(), totals=totals)


def _prior(
    observed: Observed, likelihood: Likelihood | None, jumps: bool, categorical: Sequence[int]
) -> tuple[ConstantMean | None, Kernel]:
    """Mean and kernel of the latent function.

    Of a Gaussian metric, which Ax has standardised, BoTorch's own. Of others, the mean starts where
    the link is the average, and the scale is that of the counts for counts, and that of log odds
    for rates.
    """
    X, Y = observed.X, observed.Y
    n = len(Y)
    kernel = _kernel(X.shape[-1], categorical, jumps)
    if likelihood is None:
        # Made here, for BoTorch would warn that data are not quite standardised: see `_Held`.
        return None, kernel.to(X)
    total = float(n if observed.totals is None else observed.totals.sum())
    average = (float(Y.sum()) + 0.5) / (total + 1)
    scale = 2.0
    if isinstance(likelihood, PoissonLikelihood):  # its link is the identity but for small rates
        scale = max(float(Y.var()) if n > 1 else 0.0, 0.25 * average**2, 0.25)
    mean = ConstantMean()
    if jumps:
        scaled = sharp(kernel)
    else:
        scaled = ScaleKernel(kernel, outputscale_prior=LogNormalPrior(math.log(scale), 1.0))
        scaled.outputscale = scale
        start = link_of(likelihood).inverse(torch.tensor(average, dtype=X.dtype, device=X.device))
        mean.constant.data.fill_(float(start))
    return mean.to(X), scaled.to(X)


def _kernel(d: int, categorical: Sequence[int], jumps: bool) -> Kernel:
    """BoTorch's default, times a factor for each categorical input whose value differs."""
    ordinal = [i for i in range(d) if i not in categorical]
    factors: list[Kernel] = []
    if ordinal:
        factors.append(
            get_covar_module_with_dim_scaled_prior(
                len(ordinal),
                use_rbf_kernel=not jumps,
                active_dims=ordinal if categorical else None,
            )
        )
    if categorical:
        factors.append(
            CategoricalKernel(
                ard_num_dims=len(categorical),
                active_dims=list(categorical),
                lengthscale_prior=GammaPrior(3.0, 3.0),  # around one
                lengthscale_constraint=GreaterThan(1e-2),
            )
        )
    return factors[0] if len(factors) == 1 else factors[0] * factors[1]


# -------------------------------------------------------------------- registration with Ax

_default_inputs = submodel_input_constructor.dispatch(Model)


@submodel_input_constructor.register(AxSequentialGP)
def _construct_inputs(
    botorch_model_class: type[AxSequentialGP],
    model_config: ModelConfig,
    dataset: SupervisedDataset,
    search_space_digest: SearchSpaceDigest,
    surrogate: Surrogate,
) -> dict[str, Any]:
    """Ax's own inputs, and the previous model."""
    inputs = _default_inputs(
        botorch_model_class,
        model_config=model_config,
        dataset=dataset,
        search_space_digest=search_space_digest,
        surrogate=surrogate,
    )
    total = inputs.get("total_count")
    if isinstance(total, str):
        inputs["total_count"] = _totals(total, dataset, surrogate)
    inputs["metric"] = dataset.outcome_names[0]
    if inputs.pop("stream", False):
        previous = previous_models_of(surrogate).get(tuple(dataset.outcome_names))
        if isinstance(previous, AxSequentialGP):
            inputs["previous"] = previous
    return inputs


def _totals(name: str, dataset: SupervisedDataset, surrogate: Surrogate) -> Tensor:
    """``n`` values of another metric in the same trials."""
    for other in surrogate.training_data:
        if other.outcome_names == [name]:
            if torch.equal(other.X, dataset.X):
                return other.Y.squeeze(-1)
            break
    raise ValueError(
        f"total_count: the metric {name!r} is missing in some of the trials that have "
        f"{dataset.outcome_names[0]!r}; report both."
    )


@fit_botorch_model.register(AxSequentialGP)
def _fit(model: AxSequentialGP, mll_class: Any = None, mll_options: Any = None) -> None:
    model.learn()


register_model(AxSequentialGP)

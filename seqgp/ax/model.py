r"""`SequentialGP` as a model of Ax: one per metric, made from all data at each step.

**Scale.** Objectives and constraints of Ax refer to expected values of metrics: rates of counts,
rates of success. The posterior of a metric that is not Gaussian is therefore that of
:math:`F(f(x))`, with :math:`F` the link of its likelihood, on the scale in which it is reported.

**Stream.** Ax passes all data at each step. If they contain all data of the previous model, the new
model is a copy of the previous one that is updated with the new data (`SequentialGP.update`),
instead of being fitted from scratch. It is still fitted from scratch whenever the data have grown
by a certain factor.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from ax.core.search_space import SearchSpaceDigest
from ax.generators.torch.botorch_modular.surrogate import Surrogate, submodel_input_constructor
from ax.generators.torch.botorch_modular.utils import ModelConfig, fit_botorch_model
from ax.storage.botorch_modular_registry import register_model
from botorch.acquisition.objective import PosteriorTransform
from botorch.fit import fit_gpytorch_mll
from botorch.models.model import Model
from botorch.models.transforms.input import InputTransform
from botorch.models.transforms.outcome import OutcomeTransform
from botorch.posteriors import Posterior
from botorch.utils.datasets import SupervisedDataset
from gpytorch.distributions import MultivariateNormal
from gpytorch.likelihoods import BernoulliLikelihood, Likelihood, PoissonLikelihood
from linear_operator.utils.errors import NanError, NotPSDError
from torch import Tensor

from seqgp.ax.expected_outcome import ExpectedOutcome
from seqgp.ax.internals import previous_models_of
from seqgp.ax.observed import Observed, observed_as, what_is_new
from seqgp.ax.predictor import Predictor
from seqgp.ax.priors import prior_of
from seqgp.likelihoods.discrete import BinomialLikelihood
from seqgp.models.sequential_gp import SequentialGP
from seqgp.streaming import AllInputs, MemoryOptions
from seqgp.validation import renamed
from seqgp.variational.elbo import DualELBO

#: The likelihoods of metrics, by name.
LIKELIHOODS: dict[str, type[Likelihood] | None] = {
    "gaussian": None,
    "poisson": PoissonLikelihood,
    "binomial": BinomialLikelihood,
    "bernoulli": BernoulliLikelihood,
}

#: The maximum number of inducing points. Up to this number, all inputs are inducing points.
MAX_INDUCING = 300

#: A model is fitted from scratch when the data have grown by the first factor since the last fit.
#: Hyperparameters are learnt in an update when the data have grown by the second factor since they
#: were last learnt.
GROWTH, LEARN_GROWTH = 1.2, 1.03

#: Maximum number of steps of L-BFGS, in an update and from scratch.
UPDATE_STEPS, FIT_STEPS = 10, 100

#: Joint predictions at more inputs than this have lazy covariances.
MAX_DENSE = 300

#: Capacity of the memory: the number of observations that are kept as they are. Others are folded
#: into the summary.
MEMORY = 2000


class AxSequentialGP(SequentialGP):
    """A `SequentialGP` for one metric of an Ax experiment.

    Ax makes it, with options from `seqgp.ax.generation_strategy`.

    Args:
        train_X: ``n x d`` inputs.
        train_Y: ``n x 1`` values of the metric; rates of success if it is binomial.
        train_Yvar: ``n x 1`` noise variances of a Gaussian metric.
        input_transform: Applied to the inputs.
        outcome_transform: Must be ``None``, since Ax's own transforms have been applied.
        likelihood_name: One of `LIKELIHOODS`.
        total_count: ``n`` totals of a binomial metric, or one for all.
        jumps: Whether the metric is expected to jump, as validity does, rather than to be smooth.
        categorical_features: Indices of inputs of which only equality matters.
        max_inducing: The maximum number of inducing points.
        growth: The factor by which the data grow until the model is fitted from scratch.
        previous: The previous model of the metric, to be updated if possible.
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
    num_fitted: int  # the number of observations when the model was fitted from scratch
    num_learnt: int  # the number of observations when hyperparameters were last learnt
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
            raise ValueError("outcome_transform: expected None; Ax transforms metrics itself.")
        if (total_count is None) == (likelihood_name == "binomial"):
            raise ValueError("total_count: required for binomial metrics, and only for them.")
        observed = observed_as(train_X, train_Y, train_Yvar, likelihood_name, total_count, name)
        if previous is not None:
            new = what_is_new(previous.observed, observed)
            if new is not None and len(train_X) <= growth * previous.num_fitted:
                try:
                    with renamed(Y=name):
                        self._continue(previous, observed.select(new))
                    return
                except (FloatingPointError, NanError, NotPSDError):
                    self.__dict__.clear()  # fit from scratch instead
        self.observed = observed
        likelihood_class = LIKELIHOODS[likelihood_name]
        # BoTorch and GPyTorch make some tensors on the default device.
        with train_X.device, renamed(train_Y=name):
            likelihood = None if likelihood_class is None else likelihood_class()
            mean, kernel = prior_of(observed, likelihood, jumps, categorical_features)
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
        """Become a copy of the previous model, updated with new observations."""
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
            inducing=AllInputs(),
            **arguments,
        )
        if learn:
            self.num_learnt = n
        parts = zip(self.observed, new, strict=True)
        self.observed = Observed(
            *(None if a is None or b is None else torch.cat([a, b]) for a, b in parts)  # type: ignore[arg-type]
        )

    def __call__(self, inputs: Tensor, prior: bool = False, **kwargs: Any) -> MultivariateNormal:
        """The same as `SequentialGP.__call__`, but faster in eval mode.

        Args:
            inputs: ``... x n x d`` inputs.
            prior: Return the prior instead.
            kwargs: Passed to the variational strategy.
        """
        if self.training or prior or self.variational_strategy.is_fantasy:
            return super().__call__(inputs, prior, **kwargs)
        tensors = (*self.parameters(), *self.variational_strategy.buffers())
        # PyTorch counts the changes of a tensor in `_version`; there is no public name for it.
        key = tuple((id(tensor), tensor._version) for tensor in tensors)
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
        """Fit the hyperparameters from scratch, unless the model has been updated."""
        if self.num_updates or not self._can_learn():
            return
        fit_gpytorch_mll(
            DualELBO(self.likelihood, self), optimizer_kwargs={"options": {"maxiter": FIT_STEPS}}
        )

    def _can_learn(self, *more: Tensor) -> bool:
        """Whether hyperparameters can be learnt, which is not possible from a single class."""
        if not isinstance(self.likelihood, BernoulliLikelihood):
            return True
        return len(torch.cat([self.observed.Y, *more]).unique()) > 1

    def posterior(  # type: ignore[override]
        self,
        X: Tensor,
        output_indices: list[int] | None = None,
        observation_noise: bool | Tensor = False,
        posterior_transform: PosteriorTransform | None = None,
        **arguments: Any,
    ) -> Posterior:
        """The same as `SequentialGP.posterior`, with the median total for binomial observations.

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
        """Load hyperparameters only, as far as they fit, and condition on the model's own data.

        Ax loads states for cross validation: hyperparameters are learnt from all data, and the
        model has some of them left out. These may have been folded into the summary of a stream.

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
        super().load_state_dict(learnt, strict=False)

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
            kwargs: Options of the model, and Ax's options for special parameters.
        """
        for name in ("fidelity_features", "hierarchical_dependencies"):
            if kwargs.pop(name, None):
                raise NotImplementedError(f"{name}: not supported by SequentialGP in Ax.")
        return super().construct_inputs(training_data, **kwargs)


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
    """The arguments that Ax would pass, and the previous model."""
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
    """Values ``n`` of another metric in the same trials."""
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

"""Active learning of level sets, thresholds and rates, for any likelihood: ask and tell."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from botorch.acquisition.acquisition import AcquisitionFunction
from botorch.models.transforms import Normalize
from botorch.models.utils.gpytorch_modules import get_covar_module_with_dim_scaled_prior
from gpytorch.kernels import Kernel, ScaleKernel
from gpytorch.likelihoods import BernoulliLikelihood, Likelihood
from gpytorch.priors import LogNormalPrior
from torch import Tensor

from seqgp.acquisition.batch_options import check_options, find_optimizer, single_point_optimizer
from seqgp.acquisition.box_search import SEARCHABLE, search_box
from seqgp.acquisition.contexts import Context, matches_context
from seqgp.acquisition.look_ahead import latent_moments
from seqgp.acquisition.mixed_space import quasi_random_points
from seqgp.acquisition.pool_selection import imagine, select_from_pool
from seqgp.acquisition.uncertainty import Uncertainty, link_moments, link_of, nugget_of
from seqgp.acquisition.uncertainty_reduction import (
    checked_weights,
    expected_reduction,
    model_link,
    qExpectedUncertaintyReduction,
)
from seqgp.ask_tell import AskTell
from seqgp.likelihoods.traits import is_conjugate, output_latents
from seqgp.models.refitted import ModelFactory, RefittedModel
from seqgp.models.sequential_gp import SequentialGP
from seqgp.monotonic import check_monotonic, with_slopes
from seqgp.validation import check_inputs, is_whole, renamed

#: The number of locations in a box, by default.
NUM_LOCATIONS = 256


def outcomes_differ(Y: Tensor) -> bool:
    """Whether there are at least two different outcomes, such as "heard" and "not heard".

    Args:
        Y: ``n`` outcomes.
    """
    return len(Y) > 1 and bool(Y.ne(Y[0]).any())


class ActiveLearner(AskTell):
    r"""Learn about a function with as few trials as possible, in a box or from a pool.

    A trial at an input has an outcome with any likelihood. What is to be learnt is a property of
    the expected outcome :math:`\theta(x) = F(f(x))`, such as the set of inputs where a tone is
    heard in more than 75 % of trials (a level set, whose boundary is the threshold). `ask` proposes
    the trials that are expected to tell most about it.

    At first, trials are quasi-random, until there are ``num_initial`` of them whose outcomes
    differ. A classifier that has only seen one label would otherwise be certain of the trivial
    answer.

    Args:
        bounds: ``2 x d`` bounds of the inputs, lower bounds first. They determine the dtype and
            device of everything. With a pool, they are the range of its points by default.
        pool: ``n x d`` inputs to choose from, instead of a box.
        criterion: What is to be reduced, one of `seqgp.acquisition.uncertainty.CRITERIA`:

            * ``"threshold-entropy"``: mutual information with the level set;
            * ``"volume"``: the volume of the level set (EAVC, Letham et al., 2022). Changes of
              opposite signs cancel out, so trials that say how large the set is in all count for
              more than those that say where it ends. With many inputs that is often a mistake;
            * ``"misclassification"``: errors about which inputs belong to the level set;
            * ``"variance"``: the integrated variance of the expected outcome;
            * ``"entropy"``: the entropy of outcomes, for labels.
        threshold: The level, on the scale of the expected outcome: 0.75 for 75 % correct responses,
            whatever the guess rate of the likelihood. Required by the first three criteria.
        likelihood: The likelihood. By default a `BernoulliLikelihood`, for labels 0 and 1.
        locations: ``s x d`` inputs that the question is about. By default the pool, or
            quasi-random points in the box.
        weights: ``s`` weights of the locations. By default all are the same.
        local: Whether only the uncertainty at the proposed input itself counts.
        costs: A function of ``n x d`` inputs that returns ``n`` positive costs of trials. The
            expected gain per cost is maximised.
        repeat: Whether inputs of the pool can be proposed again. By default they can.
        num_initial: The minimum number of quasi-random trials. By default ``2 (d + 1)``.
        start_until: A function of all outcomes (``n``) that says whether they suffice to use the
            model. By default `outcomes_differ`.
        max_initial: The number of trials after which the model is used in any case. By default
            ten times ``num_initial``.
        refit_every: The number of new trials after which hyperparameters are fitted again, starting
            from the last ones. By default when there are a tenth more trials. In between, the model
            learns from all trials at the last hyperparameters.
        make_model: Makes an unfitted `SequentialGP` from data. By default with a Matern kernel, and
            for labels a prior on the constant mean.
        fit_options: Options of L-BFGS for fitting hyperparameters.
        num_fantasies: The number of outcomes imagined for a trial, unless fewer are possible.
        num_batch_fantasies: The number of outcomes imagined for pending trials.
        seed: Seed of all random numbers.
        monotonic: The direction of some inputs, for labels: ``{1: 1}`` if a larger input 1 never
            lowers the probability of a 1, ``{1: -1}`` if it never raises it. A soft constraint of
            the default model, see `seqgp.monotonic`.
        options: Options of BoTorch's `optimize_acqf` and its variants for a box, such as
            ``fixed_features``, ``discrete_dims={1: range(6)}`` or ``inequality_constraints``. With
            others than the first two (and ``cat_dims``), trials are chosen by BoTorch's optimiser
            instead of `search_box`, which is faster.

    Example:
        >>> import torch
        >>> from seqgp.active_learner import ActiveLearner
        >>> bounds = torch.tensor([[0.0, 0.0], [1.0, 1.0]], dtype=torch.double)
        >>> learner = ActiveLearner(bounds, threshold=0.5)
        >>> for _ in range(15):
        ...     X = learner.ask()
        ...     learner.tell(X, X.sum(-1) > 1)
        >>> X = torch.tensor([[0.2, 0.2], [0.8, 0.8]], dtype=torch.double)
        >>> learner.probability_above(X) > 0.5
        tensor([False,  True])
    """

    _version = 1
    _fixed = ("bounds", "criterion", "threshold")

    def __init__(
        self,
        bounds: Tensor | None = None,
        pool: Tensor | None = None,
        criterion: str = "threshold-entropy",
        threshold: float | None = None,
        likelihood: Likelihood | None = None,
        locations: Tensor | None = None,
        weights: Tensor | None = None,
        local: bool = False,
        costs: Callable[[Tensor], Tensor] | None = None,
        repeat: bool = True,
        num_initial: int | None = None,
        start_until: Callable[[Tensor], bool] = outcomes_differ,
        max_initial: int | None = None,
        refit_every: int | None = None,
        make_model: ModelFactory | None = None,
        fit_options: dict[str, Any] | None = None,
        num_fantasies: int = 16,
        num_batch_fantasies: int = 8,
        seed: int = 0,
        monotonic: Mapping[int, int] | None = None,
        **options: Any,
    ) -> None:
        if pool is not None:
            bounds = _bounds_of_pool(pool, bounds)
            if options:
                raise TypeError(f"{next(iter(options))}: not an option of a pool.")
        elif bounds is None:
            raise TypeError("bounds: required, unless there is a pool.")
        super().__init__(bounds, num_initial, refit_every, fit_options, seed, options)
        self.pool = None if pool is None else pool.detach().clone()
        own = inspect.signature(ActiveLearner).parameters
        check_options(bounds, 1, [], None, None, 0.0, None, options, own)
        self.likelihood = BernoulliLikelihood() if likelihood is None else likelihood
        if monotonic is not None:
            check_monotonic(monotonic, bounds.shape[-1], self.likelihood)
            if make_model is not None:
                raise ValueError("monotonic: an option of the default model, not of make_model.")
        self.monotonic = dict(monotonic or {})
        if make_model is None:  # one of the user's own may have another likelihood
            Uncertainty(criterion, link_of(self.likelihood), threshold)
        self.criterion, self.threshold = criterion, threshold
        self.local, self.repeat = local, repeat
        if locations is None:
            locations = self._default_locations()
        with renamed(X="locations"):
            self._check_X(locations, "locations")
        self.locations = locations.detach().clone()
        self.weights = checked_weights(weights, self.locations)
        if pool is not None and not torch.equal(self.locations, pool):
            raise ValueError("locations: those of a pool are its points; use weights instead.")
        self.costs = costs
        self.start_until = start_until
        self.max_initial = 10 * self.num_initial if max_initial is None else max_initial
        if not is_whole(self.max_initial) or self.max_initial < self.num_initial:
            raise ValueError(
                f"max_initial: expected at least num_initial, {self.num_initial}, got "
                f"{self.max_initial!r}."
            )
        self.make_model = make_model or self._default_model
        self.num_fantasies, self.num_batch_fantasies = num_fantasies, num_batch_fantasies
        self.Y = self.bounds.new_empty(0)
        self._learner = RefittedModel(self.make_model, reconverge=True)

    # ---------------------------------------------------------------- ask and tell

    def ask(
        self,
        q: int = 1,
        X_pending: Tensor | None = None,
        progress: bool = False,
        context: Context | None = None,
        remember_pending: bool = False,
    ) -> Tensor:
        """Propose ``q x d`` inputs for trials. Asking again returns the same inputs.

        Args:
            q: The number of inputs.
            X_pending: ``k x d`` inputs of trials without an outcome yet, besides those remembered.
                Their outcomes are imagined.
            progress: Whether to show a progress bar (only on a terminal).
            context: Values of some inputs that are given this time, by index: ``{2: 0.3}``. The
                question stays the same: it is about all locations.
            remember_pending: Whether to remember these inputs as pending until their outcomes are
                told (or until `forget_pending`). Asking again then returns other inputs.
        """
        options = self._check_request(q, context)
        pending = self._all_pending(X_pending)
        if self.pool is not None:
            X = self._from_pool(q, pending, context or {}, progress)
        elif self.is_initial:
            X = self._initial_points(torch.cat([self.X, pending]), q, options)
        else:
            X = self._from_box(q, pending, options)
        return self._remember(X, remember_pending)

    def tell(self, X: Tensor, Y: Tensor) -> None:
        """Learn from outcomes, at inputs that were asked for or at any others.

        Args:
            X: ``n x d`` inputs.
            Y: ``n`` or ``n x 1`` outcomes that the likelihood allows: labels 0 and 1, counts, ...
        """
        outcomes = self._outcomes(X, Y)
        data = torch.cat([self.X, X.detach()]), torch.cat([self.Y, outcomes])
        learner = self._learner
        if len(data[0]):
            # Hyperparameters cannot be learnt from a single label.
            fit = outcomes_differ(data[1])
            never = fit and not outcomes_differ(self.Y[: learner.num_fitted])
            every = 1 if never else self.refit_every
            with renamed(train_Y="Y", targets="Y"):
                learner = learner.learn(
                    data[0], data[1].unsqueeze(-1), every, self.fit_options, fit=fit
                )
        left = self._without(self.pending, X)
        self._become(X=data[0], Y=data[1], pending=left, _learner=learner)

    def run(
        self,
        respond: Callable[[Tensor], Tensor],
        num_trials: int,
        q: int = 1,
        progress: bool = True,
    ) -> None:
        """Ask and tell until a number of trials is reached.

        Args:
            respond: A function of ``q x d`` inputs that returns ``q`` outcomes.
            num_trials: The total number of trials, including those told before.
            q: The number of trials in a batch.
            progress: Whether to show a progress bar (only on a terminal).
        """

        def shown() -> dict[str, Any]:
            return {"uncertainty": f"{self.uncertainty:.4g}"}

        for X in self._rounds(self.ask, num_trials, q, progress, "trials", shown):
            self.tell(X, respond(X))

    @property
    def is_initial(self) -> bool:
        """Whether trials are still quasi-random."""
        n = len(self.X)
        if n < max(self.num_initial, 1):
            return True
        return n < self.max_initial and not self.start_until(self.Y)

    # ---------------------------------------------------------------- what was learnt

    @property
    def model(self) -> SequentialGP:
        """The model, conditioned on all trials."""
        model = self._learner.model
        if model is None:
            raise RuntimeError("Nothing has been told yet: there is no model.")
        if not isinstance(model, SequentialGP):
            raise TypeError(
                f"make_model: expected a SequentialGP, but it made a {type(model).__name__}."
            )
        return model

    def expected_outcome(self, X: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of the expected outcome (the probability of a label 1).

        Args:
            X: ``... x d`` inputs.

        Returns:
            Two tensors ``...``.
        """
        mean, variance = self._latent(X)
        first, second = link_moments(model_link(self.model), mean, variance)
        return first, second.sqrt()

    def probability_above(self, X: Tensor, threshold: float | None = None) -> Tensor:
        """The probability that the expected outcome is above the threshold.

        Args:
            X: ``... x d`` inputs.
            threshold: Another threshold than that of the learner.

        Returns:
            ``...`` probabilities.
        """
        level = self.threshold if threshold is None else threshold
        return Uncertainty("volume", model_link(self.model), level)(*self._latent(X))

    @property
    def uncertainty(self) -> float:
        """The weighted average of the criterion at the locations, now.

        For ``"volume"`` it is the expected share of locations that are misclassified.
        """
        name = "misclassification" if self.criterion == "volume" else self.criterion
        measure = Uncertainty(name, model_link(self.model), self.threshold)
        assert self.weights is not None
        values = measure(*self._latent(self.locations))
        return float(values @ self.weights / self.weights.sum())

    # ---------------------------------------------------------------- state

    def state_dict(self) -> dict[str, Any]:  # noqa: D102
        return super().state_dict() | {"Y": self.Y.clone(), "model": self._learner.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from the state of a learner with the same options.

        Args:
            state: The result of `state_dict`.
        """
        X, pending = self._check_state(state)
        Y = state["Y"].to(self.bounds)
        learner = RefittedModel(self.make_model, reconverge=True)
        learner.load_state_dict(state["model"], X, Y.unsqueeze(-1))
        self._become(X=X, Y=Y, pending=pending, _learner=learner)

    # ---------------------------------------------------------------- helpers

    def _from_pool(self, q: int, pending: Tensor, context: Context, progress: bool) -> Tensor:
        """The best points of the pool, or at first random ones."""
        assert self.pool is not None
        waiting = self._same(pending, self.pool)
        if not waiting.any(-1).all():
            raise ValueError("X_pending: expected points of the pool, got others.")
        waits = waiting.any(0)
        available = matches_context(self.pool, context) & ~waits
        if not self.repeat:
            available &= ~self._same(self.X, self.pool).any(0)
        if int(available.sum()) < q:
            raise ValueError(
                f"q: expected at most {int(available.sum())}, the number of points of the pool "
                f"that are available, got {q}."
            )
        if self.is_initial:
            left = self.pool[available]
            return self._initial_points(self.X, q, {"choices": left})
        costs = None if self.costs is None else _checked_costs(self.costs, self.pool)
        chosen = select_from_pool(
            self.model,
            self.pool,
            q,
            self.criterion,
            self.threshold,
            available=available,
            costs=costs,
            weights=None if self.local else self.weights,
            num_fantasies=self.num_fantasies,
            num_batch_fantasies=self.num_batch_fantasies,
            seed=self.seed * 1_000_003 + len(self.X),
            progress=progress,
            local=self.local,
            pending=waits,
        ).chosen
        return self.pool[chosen]

    def _from_box(self, q: int, pending: Tensor, options: dict[str, Any]) -> Tensor:
        """The best points of the box, each given imagined outcomes at the previous ones."""
        best = self._best_by_gradient if options.keys() - SEARCHABLE else self._best_by_search
        taken, start = pending, len(pending)
        with self._seeded() as seed:
            for _ in range(q):
                # A batch is the same as its points one after the other.
                torch.manual_seed(seed + 7919 * len(taken))
                model = self.model
                if len(taken):
                    model = imagine(model, taken, self.num_batch_fantasies, seed, {})
                taken = torch.cat([taken, best(model, taken, options, seed).unsqueeze(0)])
        return taken[start:]

    def _best_by_search(
        self, model: SequentialGP, taken: Tensor, options: dict[str, Any], seed: int
    ) -> Tensor:
        """The best point of the box, ``d``, without gradients."""

        def score(X: Tensor) -> Tensor:
            scores = expected_reduction(model, X, **self._question(seed))
            return scores if self.costs is None else scores / _checked_costs(self.costs, X)

        return search_box(score, self.bounds, options, seed + 7919 * len(taken))

    def _best_by_gradient(
        self, model: SequentialGP, taken: Tensor, options: dict[str, Any], seed: int
    ) -> Tensor:
        """The best point of the box, ``d``, by an optimiser of BoTorch."""
        options = {"num_restarts": 3, "raw_samples": 128} | options
        optimize = single_point_optimizer(find_optimizer(None, options), self.bounds, options)
        acquisition: AcquisitionFunction = qExpectedUncertaintyReduction(
            model, **self._question(seed)
        )
        if self.costs is not None:
            acquisition = PerCost(acquisition, self.costs)
        candidates, values = optimize(acquisition, taken)
        return candidates[values.argmax()]

    def _question(self, seed: int) -> dict[str, Any]:
        """What is to be learnt, as arguments of a criterion."""
        return {
            "locations": None if self.local else self.locations,
            "criterion": self.criterion,
            "threshold": self.threshold,
            "weights": None if self.local else self.weights,
            "num_fantasies": self.num_fantasies,
            "seed": seed,
        }

    @torch.no_grad()
    def _latent(self, X: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance of what the link is applied to, ``...``."""
        check_inputs(X, self.bounds.shape[-1], "X")
        mean, variance = latent_moments(self.model, X)
        return mean, variance + nugget_of(self.model.likelihood)

    def _default_locations(self) -> Tensor:
        if self.pool is not None:
            return self.pool
        return quasi_random_points(NUM_LOCATIONS, self.bounds, self.options, self.seed + 1)

    def _default_model(self, X: Tensor, Y: Tensor) -> SequentialGP:
        d, several = X.shape[-1], output_latents(self.likelihood) is not None
        latents = torch.Size([self.likelihood.num_features] if several else [])
        kernel: Kernel = get_covar_module_with_dim_scaled_prior(d, latents, use_rbf_kernel=False)
        if not is_conjugate(self.likelihood) and not several:
            # Latent values between about -4 and 4: probabilities near zero and one are usual.
            kernel = ScaleKernel(kernel, outputscale_prior=LogNormalPrior(math.log(4.0), 0.75))
            kernel.outputscale = 4.0
        coefficients = None
        if self.monotonic:
            X, Y, coefficients = with_slopes(X, Y, self.bounds, self.monotonic)
        return SequentialGP(
            X,
            Y,
            likelihood=copy.deepcopy(self.likelihood),
            covar_module=kernel.to(X),
            input_transform=Normalize(d, bounds=self.bounds),
            coefficients=coefficients,
        )


class PerCost(AcquisitionFunction):
    """An acquisition function per cost, for single points.

    Args:
        acquisition: The acquisition function, nonnegative.
        costs: A function of ``n x d`` inputs that returns ``n`` positive costs.
    """

    def __init__(self, acquisition: AcquisitionFunction, costs: Callable[[Tensor], Tensor]) -> None:
        super().__init__(acquisition.model)
        self.acquisition, self.costs = acquisition, costs

    def forward(self, X: Tensor) -> Tensor:
        """The value at ``b x 1 x d`` candidates, of shape ``b``."""
        flat = X.reshape(-1, X.shape[-1])
        return self.acquisition(X) / _checked_costs(self.costs, flat).reshape(X.shape[:-2])


def _checked_costs(costs: Callable[[Tensor], Tensor], X: Tensor) -> Tensor:
    """The costs of ``n x d`` inputs."""
    values = costs(X)
    if not isinstance(values, Tensor) or values.shape != X.shape[:-1]:
        got = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
        raise ValueError(f"costs: expected a function that returns {len(X)} numbers, got {got}.")
    if not bool((values > 0).all()):
        raise ValueError("costs: expected positive costs.")
    return values


def _bounds_of_pool(pool: Tensor, bounds: Tensor | None) -> Tensor:
    """The range of the points of a pool, unless it is given."""
    check_inputs(pool, name="pool")
    if pool.dim() != 2 or not len(pool):
        raise ValueError(f"pool: expected shape n x d, got {tuple(pool.shape)}.")
    if bounds is not None:
        return bounds
    low, high = pool.amin(0), pool.amax(0)
    return torch.stack([low, torch.where(high > low, high, low + 1)])

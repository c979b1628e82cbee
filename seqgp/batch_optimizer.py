"""Bayesian optimisation where evaluations can fail, in batches: ask for points, tell outcomes."""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from botorch.fit import fit_gpytorch_mll
from botorch.models.model import Model
from botorch.models.transforms import Normalize, Standardize
from botorch.models.utils.gpytorch_modules import get_covar_module_with_dim_scaled_prior
from botorch.utils.sampling import get_polytope_samples
from botorch.utils.transforms import unnormalize
from gpytorch.likelihoods import BernoulliLikelihood
from gpytorch.mlls import ExactMarginalLogLikelihood
from torch import Tensor
from torch.quasirandom import SobolEngine

from seqgp.acquisition.fantasy_batch import (
    SEPARATION,
    Fantasy,
    check_bounds,
    check_options,
    fantasy_batch,
    valid_improvement,
)
from seqgp.acquisition.mixed_space import nearest_allowed
from seqgp.acquisition.validity import (
    NO_VALID_OBSERVATION,
    THRESHOLD,
    NoValidObservationWarning,
    best_valid,
    log_validity,
)
from seqgp.kernel_scales import sharp
from seqgp.likelihoods.discrete import BinomialLikelihood
from seqgp.models.sequential_gp import SequentialGP
from seqgp.progress import progress_bar
from seqgp.validation import check_inputs, check_tensor, is_whole
from seqgp.variational.elbo import DualELBO

#: Makes an unfitted model from inputs ``n x d`` and targets ``n x 1``.
ModelFactory = Callable[[Tensor, Tensor], Model]

_VERSION = 3


class BatchOptimizer:
    r"""Maximise a function whose evaluations can fail, a batch at a time.

    A model of the objective learns from valid evaluations, a classifier from all which inputs are
    valid, and `ask` maximises expected improvement times probability of validity, with fantasies
    for batches and for what is being evaluated elsewhere.

    `ask` changes nothing: it depends on what has been told, on its arguments and on the seed, and
    on nothing else. All that is learnt is learnt by `tell`.

    Args:
        bounds: ``2 x d`` bounds of the inputs, lower ones first and below the upper ones; their
            dtype and device are those of everything.
        maximize: Whether larger values are better.
        num_initial: How many evaluations there are to be before models are used; until then `ask`
            proposes quasi-random points. By default ``2 (d + 1)``.
        fantasy: How outcomes are imagined, see `seqgp.acquisition.fantasy_outcome`.
        separation: How far the points of a batch keep from each other, and from evaluations that
            failed; see `fantasy_batch`.
        num_trials: How many trials an evaluation consists of, each of which can fail. If there are
            several, what is told as valid is the number of them that did not, and an evaluation is
            valid if that is more than half.
        learn_from_failures: Whether the values of failed evaluations that have one teach the
            objective's model something. By default they are ignored. As long as nothing is valid,
            the best of them is what is to be improved on, by expected improvement alone.
        incumbent: What is to be improved on: ``"observed"``, the best valid observation, or
            ``"mean"``, the best posterior mean at the input of one, for noisy observations.
        refit_every: After how many new evaluations hyperparameters are learnt again, starting from
            the last ones. In between, models are conditioned on what is new.
        make_objective: Makes an unfitted model of the objective; by default a `SequentialGP`.
        make_validity: Makes an unfitted model of validity, from labels 1 (valid) and 0, or from the
            numbers of trials that were valid; by default a `SequentialGP` with a
            `BernoulliLikelihood` or a `BinomialLikelihood`.
        fit_options: Options of L-BFGS for hyperparameters.
        seed: Of everything that is random.
        options: Options of `fantasy_batch`, and so of BoTorch's `optimize_acqf` and its relatives:
            ``num_restarts``, ``fixed_features={0: 0.5}``, ``inequality_constraints``,
            ``discrete_dims={1: range(6)}`` (the values that inputs may have), ... Initial points
            respect them, too, but for nonlinear constraints.

    Example:
        >>> import torch
        >>> from seqgp.batch_optimizer import BatchOptimizer
        >>> def evaluate(X):  # fails in the upper right corner
        ...     valid = X.sum(-1) < 1.2
        ...     return torch.where(valid, -(X - 0.7).square().sum(-1), torch.nan), valid
        >>> bounds = torch.tensor([[0.0, 0.0], [1.0, 1.0]], dtype=torch.double)
        >>> optimizer = BatchOptimizer(bounds, num_restarts=2, raw_samples=32)
        >>> for _ in range(4):
        ...     X = optimizer.ask(3)
        ...     optimizer.tell(X, *evaluate(X))
        >>> optimizer.best[1] > -0.1
        tensor(True)
    """

    def __init__(
        self,
        bounds: Tensor,
        maximize: bool = True,
        num_initial: int | None = None,
        fantasy: Fantasy = "mean",
        separation: float = SEPARATION,
        num_trials: int = 1,
        learn_from_failures: bool = False,
        incumbent: str = "observed",
        refit_every: int = 1,
        make_objective: ModelFactory | None = None,
        make_validity: ModelFactory | None = None,
        fit_options: dict[str, Any] | None = None,
        seed: int = 0,
        **options: Any,
    ) -> None:
        check_inputs(bounds, name="bounds")
        check_bounds(bounds, strict=True)
        if incumbent not in ("observed", "mean"):
            raise ValueError(f"incumbent: expected observed or mean, got {incumbent!r}.")
        if refit_every < 1:
            raise ValueError(f"refit_every: expected at least 1, got {refit_every}.")
        if num_initial is not None and num_initial < 0:
            raise ValueError(f"num_initial: expected at least 0, got {num_initial}.")
        if not is_whole(num_trials) or num_trials < 1:
            raise ValueError(f"num_trials: expected a number of at least 1, got {num_trials!r}.")
        optimizer = options.get("optimizer")
        others = {name: value for name, value in options.items() if name != "optimizer"}
        own = inspect.signature(BatchOptimizer).parameters
        check_options(bounds, 1, [fantasy], None, None, separation, optimizer, others, own)
        d = bounds.shape[-1]
        self.bounds = bounds.detach().clone()
        self.maximize, self.seed = maximize, seed
        self.num_initial = 2 * (d + 1) if num_initial is None else num_initial
        self.fantasy, self.separation = fantasy, separation
        self.num_trials = int(num_trials)
        self.learn_from_failures, self.incumbent = learn_from_failures, incumbent
        self.refit_every = refit_every
        self.make_objective = make_objective or self._default_objective
        self.make_validity = make_validity or self._default_validity
        self.fit_options = {"maxiter": 50} if fit_options is None else fit_options
        self.options = options
        self.X = self.bounds.new_empty(0, d)
        self.Y = self.bounds.new_empty(0)
        self.num_valid = torch.empty(0, dtype=torch.long, device=bounds.device)
        self._objective = _Learner(self.make_objective)
        self._validity = _Learner(self.make_validity)

    # ---------------------------------------------------------------- ask and tell

    def ask(self, q: int = 1, X_pending: Tensor | None = None, progress: bool = False) -> Tensor:
        """Propose ``q x d`` inputs to evaluate; asked again, the same ones.

        Until there are ``num_initial`` evaluations, these are the first points of a quasi-random
        sequence that have been neither told nor passed as ``X_pending``: without it, points that
        are still being evaluated are proposed again.

        As long as there is nothing to improve on, no valid evaluation nor a value to learn from,
        validity itself is maximised, and a `NoValidObservationWarning` says so.

        Args:
            q: How many.
            X_pending: ``k x d`` inputs that have been asked for and not been told yet.
            progress: Whether to show a progress bar (only on a terminal).
        """
        return self._propose(q, X_pending, progress)

    def _propose(self, q: int, X_pending: Tensor | None, progress: bool) -> Tensor:
        """What `ask` returns; a warning is about the caller of its caller."""
        if not is_whole(q) or q < 1:
            raise ValueError(f"q: expected a whole number of points, at least one, got {q!r}.")
        known = self.X
        if X_pending is not None:
            self._check_X(X_pending, "X_pending")
            known = torch.cat([known, X_pending.detach()])
        if len(self.X) < max(self.num_initial, 1):
            return self._initial_points(known, q)
        objective, validity = self.objective_model, self.validity_model
        if objective is not None and not self.num_valid.any():
            validity = None  # nothing is known of it but that it is not where all others are
        models = [model for model in (objective, validity) if model is not None]
        best_f = None if self.objective_model is None else self._best_f()
        if best_f is None:
            warnings.warn(NO_VALID_OBSERVATION, NoValidObservationWarning, stacklevel=3)
        devices = [self.bounds.device] if self.bounds.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices), warnings.catch_warnings():
            warnings.simplefilter("ignore", NoValidObservationWarning)  # once is enough
            seed = self.seed * 1_000_003 + len(self.X)
            torch.manual_seed(seed)
            return fantasy_batch(
                valid_improvement(best_f, self.maximize),
                models,
                self.bounds,
                q,
                fantasy=self.fantasy,
                X_pending=X_pending,
                X_avoid=self.X[~self.valid],
                separation=self.separation,
                seed=seed,
                progress=progress,
                **self.options,
            ).X

    def tell(self, X: Tensor, Y: Tensor, valid: Tensor | None = None) -> None:
        """Learn the outcomes of evaluations, of points that were asked for or of any others.

        Args:
            X: ``n x d`` inputs.
            Y: ``n`` or ``n x 1`` values. Those of failed evaluations may be NaN.
            valid: ``n`` or ``n x 1`` labels, 1 or true for valid; by default those are valid whose
                value is not NaN. With several trials in an evaluation, the numbers of valid ones.
        """
        self._check_X(X, "X")
        Y = self._as_tensor(Y, "Y", self.bounds.dtype)
        if Y.numel() != len(X):
            raise ValueError(f"Y: expected {len(X)} values, got shape {tuple(Y.shape)}.")
        Y = Y.reshape(-1)
        if valid is None:
            valid = (~Y.isnan()).long() * self.num_trials
        num_valid = self._check_valid(valid, len(X))
        valid = self._is_valid(num_valid)
        if not Y[valid].isfinite().all():
            raise ValueError("Y: the value of a valid evaluation is NaN or infinite.")
        if Y.isinf().any():
            raise ValueError("Y: infinite; a failed evaluation without a value has NaN.")
        data = (
            torch.cat([self.X, X.detach()]),
            torch.cat([self.Y, Y]),
            torch.cat([self.num_valid, num_valid]),
        )
        # Learn first: if that fails, nothing has been told.
        learners = self._learn(*data)
        self.X, self.Y, self.num_valid = data
        self._objective, self._validity = learners

    def run(
        self,
        evaluate: Callable[[Tensor], tuple[Tensor, Tensor]],
        num_evaluations: int,
        q: int = 1,
        progress: bool = True,
    ) -> None:
        """Ask and tell until there are so many evaluations.

        Args:
            evaluate: From ``q x d`` inputs to a pair: ``q`` values, and ``q`` labels (or numbers of
                valid trials) or ``None``.
            num_evaluations: How many there are to be, those that have been told included.
            q: How many at a time.
            progress: Whether to show a progress bar (only on a terminal).
        """
        bar = progress_bar(
            total=num_evaluations,
            initial=len(self.X),
            desc="evaluations",
            disable=None if progress else True,
        )
        with bar:
            while len(self.X) < num_evaluations:
                X = self._propose(min(q, num_evaluations - len(self.X)), None, False)
                outcome = evaluate(X)
                if not isinstance(outcome, tuple | list) or len(outcome) != 2:
                    raise TypeError(
                        "evaluate: expected a function that returns a pair (Y, valid), of which "
                        f"valid may be None, got a {type(outcome).__name__} from it."
                    )
                self.tell(X, *outcome)
                bar.update(len(X))
                best = self.best
                shown = "none" if best is None else f"{float(best[1]):.4g}"
                bar.set_postfix(best=shown, failed=int((~self.valid).sum()))

    @property
    def valid(self) -> Tensor:
        """``n`` booleans: which evaluations were valid."""
        return self._is_valid(self.num_valid)

    @property
    def best(self) -> tuple[Tensor, Tensor] | None:
        """Input ``d`` and value of the best valid observation, if there is one."""
        if not self.valid.any():
            return None
        sign = 1.0 if self.maximize else -1.0
        index = torch.where(self.valid, sign * self.Y, -torch.inf).argmax()
        return self.X[index], self.Y[index]

    @property
    def objective_model(self) -> Model | None:
        """The model of the objective, ``None`` without an evaluation that it learns from."""
        return self._objective.model

    @property
    def validity_model(self) -> Model | None:
        """The model of validity, ``None`` without any evaluation."""
        return self._validity.model

    def probability_of_validity(self, X: Tensor) -> Tensor:
        """``...`` probabilities at ``... x d`` inputs.

        Args:
            X: The inputs.
        """
        if self.validity_model is None:
            raise RuntimeError("Nothing has been told yet.")
        check_tensor(X, "X")
        if not X.dim() or X.shape[-1] != self.bounds.shape[-1]:
            raise ValueError(
                f"X: expected shape ... x {self.bounds.shape[-1]}, got {tuple(X.shape)}."
            )
        with torch.no_grad():
            return log_validity(self.validity_model, X.unsqueeze(-2)).exp().squeeze(-1)

    # ---------------------------------------------------------------- state

    def state_dict(self) -> dict[str, Any]:
        """Everything that has been told and learnt: tensors, numbers and strings.

        ``torch.save`` it, and ``torch.load`` it with ``weights_only=True``. Options are not part of
        it: build the optimiser as before, then `load_state_dict`.
        """
        return {
            "version": _VERSION,
            "bounds": self.bounds.clone(),
            "maximize": self.maximize,
            "X": self.X.clone(),
            "Y": self.Y.clone(),
            "num_trials": self.num_trials,
            "learn_from_failures": self.learn_from_failures,
            "num_valid": self.num_valid.clone(),
            "objective": self._objective.state_dict(),
            "validity": self._validity.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from where an optimiser with the same options was.

        Args:
            state: What `state_dict` returned.
        """
        is_state = isinstance(state, Mapping) and "version" in state
        if is_state and state["version"] == _VERSION:
            is_state = state.keys() >= self.state_dict().keys()
        if not is_state:
            raise ValueError(
                "state: not the state of a BatchOptimizer; expected what state_dict() returned."
            )
        if state["version"] != _VERSION:
            raise ValueError(
                f"state: expected version {_VERSION}, got {state['version']}: it was saved by "
                "another version of seqgp."
            )
        for name in ("bounds", "maximize", "num_trials", "learn_from_failures"):
            saved, own = state[name], getattr(self, name)
            before, now = (torch.as_tensor(value).to(self.bounds) for value in (saved, own))
            if not torch.equal(before, now):
                raise ValueError(
                    f"state: it was saved with {name} = {saved}, this optimiser has {own}; build "
                    "it with the same options."
                )
        self._check_X(state["X"].to(self.bounds), "state['X']")
        X, Y = state["X"].to(self.bounds), state["Y"].to(self.bounds)
        num_valid = state["num_valid"].to(self.bounds.device)
        objective, validity = _Learner(self.make_objective), _Learner(self.make_validity)
        teaches = self._teaches(Y, self._is_valid(num_valid))
        objective.load_state_dict(state["objective"], X[teaches], Y[teaches].unsqueeze(-1))
        validity.load_state_dict(state["validity"], X, num_valid.to(X).unsqueeze(-1))
        self.X, self.Y, self.num_valid = X, Y, num_valid
        self._objective, self._validity = objective, validity

    # ---------------------------------------------------------------- inside

    def _as_tensor(self, values: Any, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """Numbers, or labels, as a tensor that belongs to the bounds."""
        try:
            return torch.as_tensor(values, dtype=dtype, device=self.bounds.device).detach()
        except (TypeError, ValueError, RuntimeError) as error:
            raise TypeError(f"{name}: expected numbers, got {values!r:.50}.") from error

    def _check_X(self, X: Tensor, name: str) -> None:
        check_inputs(X, name=name)
        if X.dim() != 2 or X.shape[-1] != self.bounds.shape[-1]:
            raise ValueError(
                f"{name}: expected shape n x {self.bounds.shape[-1]}, got {tuple(X.shape)}."
            )
        if X.dtype != self.bounds.dtype or X.device != self.bounds.device:
            raise TypeError(
                f"{name}: expected {self.bounds.dtype} on {self.bounds.device} as the bounds are, "
                f"got {X.dtype} on {X.device}."
            )

    def _check_valid(self, valid: Any, n: int) -> Tensor:
        """``n`` numbers of valid trials, from labels or from numbers."""
        valid = self._as_tensor(valid, "valid")
        expected = "labels" if self.num_trials == 1 else "numbers of valid trials"
        if valid.numel() != n:
            raise ValueError(f"valid: expected {n} {expected}, got shape {tuple(valid.shape)}.")
        if valid.dtype == torch.bool and self.num_trials > 1:
            raise TypeError(
                f"valid: expected numbers of valid trials, 0 to {self.num_trials}, got booleans."
            )
        valid = valid.to(self.bounds).reshape(-1)
        if not ((valid >= 0) & (valid <= self.num_trials) & (valid == valid.round())).all():
            raise ValueError(
                "valid: expected labels, 1 or true for valid and 0 or false for not."
                if self.num_trials == 1
                else f"valid: expected numbers of valid trials, 0 to {self.num_trials}."
            )
        return valid.long()

    def _is_valid(self, num_valid: Tensor) -> Tensor:
        """Which evaluations are valid, by the number of their trials that are."""
        return num_valid > THRESHOLD * self.num_trials

    def _teaches(self, Y: Tensor, valid: Tensor) -> Tensor:
        """Which evaluations the objective's model learns from."""
        return ~Y.isnan() if self.learn_from_failures else valid

    def _learn(self, X: Tensor, Y: Tensor, num_valid: Tensor) -> tuple[_Learner, _Learner]:
        """Both models, having learnt the data."""
        objective, validity = self._objective, self._validity
        teaches = self._teaches(Y, self._is_valid(num_valid))
        if teaches.any():
            objective = objective.learn(
                X[teaches], Y[teaches].unsqueeze(-1), self.refit_every, self.fit_options
            )
        if len(X):
            # Of one class alone nothing can be learnt about the scale of the other.
            both = bool((num_valid > 0).any() and (num_valid < self.num_trials).any())
            validity = validity.learn(
                X, num_valid.to(X).unsqueeze(-1), self.refit_every, self.fit_options, fit=both
            )
        return objective, validity

    @torch.no_grad()
    def _best_f(self) -> Tensor | None:
        counts = self.valid if self.valid.any() else self._teaches(self.Y, self.valid)
        if self.incumbent == "observed" or self.objective_model is None:
            return best_valid(self.Y, counts, self.maximize)
        posterior: Any = self.objective_model.posterior(self.X[counts].unsqueeze(-2))
        return posterior.mean.max() if self.maximize else posterior.mean.min()

    def _default_objective(self, X: Tensor, Y: Tensor) -> Model:
        return SequentialGP(
            X,
            Y,
            # BoTorch's default, but given: values that are all the same cannot be standardised,
            # and that is nothing to warn of here.
            covar_module=get_covar_module_with_dim_scaled_prior(X.shape[-1]).to(X),
            input_transform=Normalize(X.shape[-1], bounds=self.bounds),
            outcome_transform=Standardize(1),
        )

    def _default_validity(self, X: Tensor, labels: Tensor) -> Model:
        kernel = get_covar_module_with_dim_scaled_prior(X.shape[-1], use_rbf_kernel=False)
        likelihood = (
            BernoulliLikelihood() if self.num_trials == 1 else BinomialLikelihood(self.num_trials)
        )
        return SequentialGP(
            X,
            labels,
            likelihood=likelihood,
            covar_module=sharp(kernel).to(X),
            input_transform=Normalize(X.shape[-1], bounds=self.bounds),
        )

    def _initial_points(self, known: Tensor, q: int) -> Tensor:
        """The first points of a quasi-random sequence that are not among those that are known."""
        X = self._sequence(len(known) + q)
        span = (self.bounds[1] - self.bounds[0]).clamp_min(torch.finfo(X.dtype).tiny)
        apart = ((X.unsqueeze(1) - known).abs() / span > 1e-6).any(-1).all(-1)
        new = X[apart][:q]
        # Of a discrete space all may be known: then some are repeated.
        return new if len(new) == q else X[-q:]

    @torch.no_grad()
    def _sequence(self, n: int) -> Tensor:
        """The first ``n`` points of a quasi-random sequence, as the options allow."""
        options, d = self.options, self.bounds.shape[-1]
        constraints = {
            name: options[name]
            for name in ("inequality_constraints", "equality_constraints")
            if options.get(name)
        }
        generator = torch.Generator().manual_seed(self.seed)
        if "choices" in options:
            choices = options["choices"]
            order = torch.randperm(len(choices), generator=generator, device="cpu")
            chosen = order[torch.arange(n, device="cpu") % len(choices)]
            return choices[chosen.to(choices.device)].to(self.bounds)
        fixed = dict(options.get("fixed_features") or {})
        if constraints:
            bounds = self.bounds.clone()
            for index, value in fixed.items():
                bounds[:, index] = value
            X = get_polytope_samples(n, bounds, seed=self.seed, n_burnin=1000, **constraints)
        else:
            with torch.device("cpu"):
                engine = SobolEngine(d, scramble=True, seed=self.seed)
                unit = engine.draw(n, dtype=self.bounds.dtype)
            X = unnormalize(unit.to(self.bounds), self.bounds)
        for index, value in fixed.items():
            X[:, index] = value
        alternatives = options.get("fixed_features_list")
        if alternatives:
            for k, row in enumerate(X):
                for index, value in alternatives[k % len(alternatives)].items():
                    row[index] = value
        levels_of = {**(options.get("discrete_dims") or {}), **(options.get("cat_dims") or {})}
        if levels_of and constraints:
            X = nearest_allowed(X, bounds, levels_of, **constraints)
        else:
            for index, levels in levels_of.items():
                levels = torch.as_tensor(levels, dtype=X.dtype, device=X.device)
                span = (self.bounds[1, index] - self.bounds[0, index]).clamp_min(1e-12)
                share = ((X[:, index] - self.bounds[0, index]) / span).clamp(0, 1)
                X[:, index] = levels[(share * len(levels)).long().clamp_max(len(levels) - 1)]
        if "discrete_choices" in options:
            for index, levels in enumerate(options["discrete_choices"]):
                draw = torch.rand(n, generator=generator, device="cpu").to(X)
                X[:, index] = levels.to(X)[(draw * len(levels)).long().clamp_max(len(levels) - 1)]
        if options.get("post_processing_func"):
            X = options["post_processing_func"](X)
        return X


class _Learner:
    """A model and how much of the data it has been fitted to; learning makes a new one.

    Args:
        make: Makes an unfitted model from data.
    """

    def __init__(self, make: ModelFactory) -> None:
        self.make = make
        self.model: Model | None = None
        self.base: Model | None = None
        self.num_fitted = 0

    def learn(
        self, X: Tensor, Y: Tensor, refit_every: int, options: dict[str, Any], fit: bool = True
    ) -> _Learner:
        """Fit a model, or condition the present one on what is new.

        Args:
            X: ``n x d`` inputs, those that are known first.
            Y: ``n x 1`` targets.
            refit_every: After how many new observations hyperparameters are learnt again.
            options: Of the optimiser of hyperparameters.
            fit: Whether they are learnt at all.
        """
        result = _Learner(self.make)
        if self.base is not None and len(X) - self.num_fitted < refit_every:
            result.base, result.num_fitted = self.base, self.num_fitted
            result.model = _condition_on_new(self.base, X, Y, self.num_fitted)
            return result
        model = _make(self.make, X, Y)
        if fit:
            if self.base is not None:
                _copy_hyperparameters(self.base, model)
            _fit(model, options)
        result.model = result.base = model.eval()
        result.num_fitted = len(X)
        return result

    def state_dict(self) -> dict[str, Any]:
        """The fitted model's state, and how much data it has."""
        state = {} if self.base is None else dict(self.base.state_dict())
        return {"num_fitted": self.num_fitted, "model": state}

    def load_state_dict(self, state: dict[str, Any], X: Tensor, Y: Tensor) -> None:
        """The model as it was, from its state and the data.

        Args:
            state: What `state_dict` returned.
            X: ``n x d`` inputs.
            Y: ``n x 1`` targets.
        """
        self.num_fitted = state["num_fitted"]
        if not self.num_fitted:
            return
        base = _make(self.make, X[: self.num_fitted], Y[: self.num_fitted])
        base.load_state_dict(state["model"])
        self.base = base.eval()
        self.model = _condition_on_new(self.base, X, Y, self.num_fitted)


def _make(make: ModelFactory, X: Tensor, Y: Tensor) -> Model:
    with X.device:  # where BoTorch and GPyTorch make what has no device of its own
        return make(X, Y)


@torch.no_grad()
def _condition_on_new(model: Model, X: Tensor, Y: Tensor, known: int) -> Model:
    if len(X) == known:
        return model
    model.posterior(X[:1])  # fills the caches of BoTorch's exact models
    return model.condition_on_observations(X[known:], Y[known:])


def _fit(model: Model, options: dict[str, Any]) -> None:
    kind = DualELBO if isinstance(model, SequentialGP) else ExactMarginalLogLikelihood
    fit_gpytorch_mll(kind(model.likelihood, model), optimizer_kwargs={"options": dict(options)})


@torch.no_grad()
def _copy_hyperparameters(old: Model, new: Model) -> None:
    """Start from what was learnt; inducing points are of the new data."""
    learnt = dict(old.named_parameters())
    for name, parameter in new.named_parameters():
        value = learnt.get(name)
        if value is not None and value.shape == parameter.shape and "inducing" not in name:
            parameter.copy_(copy.deepcopy(value))
    if isinstance(new, SequentialGP):
        new.refresh()

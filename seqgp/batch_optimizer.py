"""Bayesian optimisation in batches, with evaluations that can fail: ask and tell."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from numbers import Real
from typing import Any

import torch
from botorch.models.model import Model
from botorch.models.transforms import Normalize
from botorch.models.utils.gpytorch_modules import get_covar_module_with_dim_scaled_prior
from gpytorch.likelihoods import BernoulliLikelihood, Likelihood
from torch import Tensor

from seqgp.acquisition.batch_options import check_options
from seqgp.acquisition.contexts import Context, check_context, in_context, matches_context
from seqgp.acquisition.fantasies import Fantasy
from seqgp.acquisition.fantasy_batch import by_task, fantasy_batch, valid_improvement
from seqgp.acquisition.separation import SEPARATION
from seqgp.acquisition.validity import (
    NO_VALID_OBSERVATION,
    THRESHOLD,
    NoValidObservationWarning,
    best_valid,
    log_validity,
)
from seqgp.ask_tell import AskTell
from seqgp.kernel_scales import sharp
from seqgp.likelihoods.discrete import BinomialLikelihood
from seqgp.models.correlated_validity import objective_and_validity
from seqgp.models.refitted import ModelFactory, RefittedModel
from seqgp.models.sequential_gp import SequentialGP
from seqgp.streaming.drift import discount_for
from seqgp.trust_region import (
    TrustRegion,
    TrustRegionOptions,
    is_success,
    region_bounds,
    side_weights,
)
from seqgp.validation import check_tensor, is_whole


class BatchOptimizer(AskTell):
    r"""Optimise a function whose evaluations can fail, in batches.

    A model of the objective learns from valid evaluations. A classifier, the validity model, learns
    from all evaluations which inputs are valid. `ask` maximises expected improvement times
    probability of validity, and imagines outcomes at pending points and at previous points of the
    batch.

    `ask` has no side effects, unless it is to remember what is pending. Its result depends only on
    what has been told, what is pending, its arguments and the seed. All learning happens in `tell`.

    Args:
        bounds: ``2 x d`` bounds of the inputs, lower bounds first. They determine the dtype and
            device of everything.
        maximize: Whether larger values are better.
        num_initial: The number of evaluations before models are used. Until then `ask` proposes
            quasi-random points. By default ``2 (d + 1)``.
        fantasy: How outcomes are imagined, see `seqgp.acquisition.fantasy_outcome`.
        separation: The minimum distance between the points of a batch, and to failed evaluations;
            see `fantasy_batch`.
        num_trials: The number of trials of an evaluation, each of which can fail. If there are
            several, tell the number of valid trials. An evaluation is valid if more than half of
            its trials are.
        learn_from_failures: Whether the model of the objective also learns from the values of
            failed evaluations, if they have one. By default they are ignored. As long as no
            evaluation is valid, the best of them is the incumbent, and expected improvement alone
            is maximised.
        incumbent: The value to improve on: ``"observed"``, the best valid observation, or
            ``"mean"``, the best posterior mean at a valid observation, for noisy observations.
        refit_every: The number of new evaluations after which hyperparameters are fitted again,
            starting from the last ones. In between, models are conditioned on new evaluations.
        make_objective: Makes an unfitted model of the objective. By default a `SequentialGP`.
        make_validity: Makes an unfitted validity model, from labels 1 (valid) and 0 or from numbers
            of valid trials. By default a `SequentialGP` with a `BernoulliLikelihood` or a
            `BinomialLikelihood`.
        correlated: Whether objective and validity are correlated, once there are evaluations of
            both kinds: one `SequentialMultiTaskGP` learns both, in which the latent function of
            validity has a multiple of the objective as a part. By default they are independent,
            which is faster.
        fit_options: Options of L-BFGS for fitting hyperparameters.
        seed: Seed of all random numbers.
        trust_region: Whether to search in a trust region around the best point, for many inputs
            (more than ten, say). `TrustRegionOptions` say how it grows and shrinks. See
            `seqgp.trust_region`. Inputs with levels and those that are fixed keep their range.
        discount: For an objective that moves: the factor by which all that has been told before
            counts less, each time that something is told, or ``"auto"``, which chooses it as
            `SequentialGP.update` does. Values observed earlier may no longer hold. So the incumbent
            and `best` are by the posterior mean. Models have to be `SequentialGP`.
        options: Options of `fantasy_batch`, including those of BoTorch's `optimize_acqf` and its
            variants: ``num_restarts``, ``fixed_features={0: 0.5}``, ``inequality_constraints``,
            ``discrete_dims={1: range(6)}`` (the values of an input), ... Initial points respect
            them, too, except for nonlinear constraints.

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

    _version = 6
    _fixed = ("bounds", "maximize", "num_trials", "learn_from_failures", "correlated")

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
        correlated: bool = False,
        fit_options: dict[str, Any] | None = None,
        seed: int = 0,
        trust_region: bool | TrustRegionOptions = False,
        discount: float | str = 1.0,
        **options: Any,
    ) -> None:
        super().__init__(bounds, num_initial, refit_every, fit_options, seed, options)
        if incumbent not in ("observed", "mean"):
            raise ValueError(f"incumbent: expected 'observed' or 'mean', got {incumbent!r}.")
        if not is_whole(num_trials) or num_trials < 1:
            raise ValueError(
                f"num_trials: expected a whole number, at least 1, got {num_trials!r}."
            )
        optimizer = options.get("optimizer")
        others = {name: value for name, value in options.items() if name != "optimizer"}
        own = inspect.signature(BatchOptimizer).parameters
        check_options(bounds, 1, [fantasy], None, None, separation, optimizer, others, own)
        if trust_region and ("choices" in options or "discrete_choices" in options):
            raise ValueError("trust_region: expected a box, not a list of choices.")
        if correlated and (make_objective is not None or make_validity is not None):
            raise ValueError(
                "correlated: one model learns objective and validity; leave out make_objective and "
                "make_validity."
            )
        _check_discount(discount, bool(correlated), bool(trust_region))
        self.discount = discount
        self.maximize, self.correlated = maximize, bool(correlated)
        self.fantasy, self.separation = fantasy, separation
        self.num_trials = int(num_trials)
        self.learn_from_failures, self.incumbent = learn_from_failures, incumbent
        self.make_objective = make_objective or self._default_objective
        self.make_validity = make_validity or self._default_validity
        self.Y = self.bounds.new_empty(0)
        self.num_valid = torch.empty(0, dtype=torch.long, device=bounds.device)
        self._objective = RefittedModel(self.make_objective)
        self._validity = RefittedModel(self.make_validity)
        self._both = RefittedModel(self._make_both)
        self.fade = self.bounds.new_empty(0)
        self._evidence: tuple[tuple[float, ...], ...] = ((), ())
        region = TrustRegionOptions() if trust_region is True else trust_region or None
        self.trust_region_options = region
        self.trust_region = None if region is None else TrustRegion(region.length)

    # ---------------------------------------------------------------- ask and tell

    def ask(
        self,
        q: int = 1,
        X_pending: Tensor | None = None,
        progress: bool = False,
        context: Context | None = None,
        remember_pending: bool = False,
    ) -> Tensor:
        """Propose ``q x d`` inputs to evaluate. Asking again returns the same inputs.

        Until there are ``num_initial`` evaluations, these are the first points of a quasi-random
        sequence that have neither been told nor are pending. Points that are still being evaluated
        are proposed again, unless they are passed as ``X_pending`` or remembered.

        As long as there is no incumbent (neither a valid evaluation nor a value to learn from), the
        probability of validity is maximised, with a `NoValidObservationWarning`.

        Args:
            q: The number of inputs.
            X_pending: ``k x d`` inputs that are being evaluated, besides those remembered.
            progress: Whether to show a progress bar (only on a terminal).
            context: Values of some inputs that are given this time, by index: ``{2: 0.3}``. The
                incumbent is the best for that context, see `incumbent_in`.
            remember_pending: Whether to remember these inputs as pending until their outcomes are
                told (or until `forget_pending`). Asking again then returns other inputs.
        """
        X = self._propose(q, X_pending, progress, context, stacklevel=3)
        return self._remember(X, remember_pending)

    def _propose(
        self,
        q: int,
        X_pending: Tensor | None,
        progress: bool,
        context: Context | None,
        stacklevel: int,
    ) -> Tensor:
        """The result of `ask`. Warnings point at the caller at the given level."""
        options = self._check_request(q, context)
        pending = self._all_pending(X_pending)
        if len(self.X) - self._start < max(self.num_initial, 1):
            return self._initial_points(torch.cat([self.X, pending]), q, options)
        models, together = self._models()
        best_f = self.best_f
        if best_f is not None and context:
            best_f = self.incumbent_in(context)[1]
        if best_f is None:
            warnings.warn(NO_VALID_OBSERVATION, NoValidObservationWarning, stacklevel=stacklevel)
        with self._seeded() as seed, warnings.catch_warnings():
            warnings.simplefilter("ignore", NoValidObservationWarning)  # warned above
            acquisition = valid_improvement(best_f, self.maximize)
            return fantasy_batch(
                by_task(acquisition) if together else acquisition,
                models,
                self._search_bounds(context, options),
                q,
                fantasy=self.fantasy,
                X_pending=pending if len(pending) else None,
                X_avoid=self.X[~self.valid],
                separation=self.separation,
                seed=seed,
                progress=progress,
                **options,
            ).X

    def tell(self, X: Tensor, Y: Tensor, valid: Tensor | None = None) -> None:
        """Learn from evaluations, at points that were asked for or at any others.

        Args:
            X: ``n x d`` inputs.
            Y: ``n`` or ``n x 1`` values. Those of failed evaluations may be NaN.
            valid: ``n`` or ``n x 1`` labels, 1 or true for valid. With several trials per
                evaluation, the numbers of valid trials. By default, evaluations are valid if their
                value is not NaN.
        """
        Y = self._outcomes(X, Y)
        if valid is None:
            valid = (~Y.isnan()).long() * self.num_trials
        num_valid = self._check_valid(valid, len(X))
        valid = self._is_valid(num_valid)
        if not Y[valid].isfinite().all():
            raise ValueError("Y: the value of a valid evaluation is NaN or infinite.")
        if Y.isinf().any():
            raise ValueError("Y: infinite; use NaN for a failed evaluation without a value.")
        num_new = len(X)
        pending = self._without(self.pending, X)
        factor, evidence = self._discount(X, Y, num_valid)
        fade = torch.cat([self.fade * factor, torch.ones_like(Y)])
        X, Y = torch.cat([self.X, X.detach()]), torch.cat([self.Y, Y])
        num_valid = torch.cat([self.num_valid, num_valid])
        # Learn first: if this fails, the state does not change.
        models = self._learn(X, Y, num_valid, fade if self.moves else None)
        region = self._moved_trust_region(Y, self._is_valid(num_valid), num_new)
        self._become(
            X=X,
            Y=Y,
            num_valid=num_valid,
            pending=pending,
            trust_region=region,
            fade=fade,
            _evidence=evidence,
            **models,
        )

    def run(
        self,
        evaluate: Callable[[Tensor], tuple[Tensor, Tensor]],
        num_evaluations: int,
        q: int = 1,
        progress: bool = True,
    ) -> None:
        """Ask and tell until a number of evaluations is reached.

        Args:
            evaluate: A function of ``q x d`` inputs that returns a pair: ``q`` values, and ``q``
                labels (or numbers of valid trials) or ``None``.
            num_evaluations: The total number of evaluations, including those told before.
            q: The number of evaluations in a batch.
            progress: Whether to show a progress bar (only on a terminal).
        """

        def shown() -> dict[str, Any]:
            best = self.best
            value = "none" if best is None else f"{float(best[1]):.4g}"
            return {"best": value, "failed": int((~self.valid).sum())}

        def propose(number: int) -> Tensor:
            return self._propose(number, None, False, None, stacklevel=5)

        for X in self._rounds(propose, num_evaluations, q, progress, "evaluations", shown):
            outcome = evaluate(X)
            if not isinstance(outcome, tuple | list) or len(outcome) != 2:
                raise TypeError(
                    "evaluate: expected a function that returns a pair (Y, valid), where valid "
                    f"may be None, but it returned a {type(outcome).__name__}."
                )
            self.tell(X, *outcome)

    @property
    def valid(self) -> Tensor:
        """Which evaluations were valid, ``n`` booleans."""
        return self._is_valid(self.num_valid)

    @property
    def moves(self) -> bool:
        """Whether the objective may move, so that what has been observed need not hold any more."""
        return self.discount != 1

    @property
    @torch.no_grad()
    def best(self) -> tuple[Tensor, Tensor] | None:
        """Input ``d`` and value of the best valid observation, ``None`` if there is none.

        With a discount, the input of the best posterior mean among them, and that mean.
        """
        if not self.valid.any():
            return None
        sign, values = 1.0 if self.maximize else -1.0, self.Y
        if self.moves and self.objective_model is not None:
            posterior: Any = self.objective_model.posterior(self.X.unsqueeze(-2))
            values = posterior.mean.reshape(-1)
        index = torch.where(self.valid, sign * values, -torch.inf).argmax()
        return self.X[index], values[index]

    @property
    @torch.no_grad()
    def best_f(self) -> Tensor | None:
        """The value of the incumbent, ``None`` if there is none."""
        if self.objective_model is None:
            return None
        counts = self._candidates()
        if self.incumbent == "observed" and not self.moves:
            return best_valid(self.Y, counts, self.maximize)
        posterior: Any = self.objective_model.posterior(self.X[counts].unsqueeze(-2))
        return posterior.mean.max() if self.maximize else posterior.mean.min()

    @torch.no_grad()
    def incumbent_in(self, context: Context) -> tuple[Tensor, Tensor]:
        r"""The incumbent for a context: the best of the known inputs, moved to that context.

        Values observed elsewhere say little about a context. An input counts by the posterior mean
        that it has in the context, or by its value if it was observed there (and if ``incumbent``
        is ``"observed"``). Of inputs that are probably invalid there, none counts unless all are.

        Args:
            context: Values of some inputs, by index: ``{2: 0.3}``.

        Returns:
            The input ``d`` and its value.
        """
        check_context(context, self.bounds)
        if self.objective_model is None or self.validity_model is None:
            raise RuntimeError("There is no incumbent: no evaluation to learn from has been told.")
        counts = self._candidates()
        X = in_context(self.X[counts], context)
        posterior: Any = self.objective_model.posterior(X.unsqueeze(-2))
        values = posterior.mean.reshape(-1)
        if self.incumbent == "observed" and not self.moves:
            there = matches_context(self.X[counts], context)
            values = torch.where(there, self.Y[counts], values)
        score = values if self.maximize else -values
        valid = self.probability_of_validity(X) > THRESHOLD
        if valid.any():
            score = torch.where(valid, score, -torch.inf)
        best = score.argmax()
        return X[best], values[best]

    @property
    def objective_model(self) -> Model | None:
        """The model of the objective, ``None`` until there is an evaluation to learn from."""
        return self._objective.model if self._both.model is None else self._task(0)

    @property
    def validity_model(self) -> Model | None:
        """The validity model, ``None`` until there is an evaluation."""
        return self._validity.model if self._both.model is None else self._task(1)

    def _task(self, index: int) -> Model:
        """The model of both, as one of the objective (0) or of validity (1) alone."""
        assert self._both.model is not None
        return self._both.model.subset_output([index])

    def _models(self) -> tuple[list[Model], bool]:
        """The models to propose points with, and whether objective and validity are one of them."""
        if self._both.model is not None:
            return [self._both.model], True
        objective, validity = self.objective_model, self.validity_model
        if objective is not None and not self.num_valid.any():
            validity = None  # a single class: there is nothing to learn about validity
        return [model for model in (objective, validity) if model is not None], False

    def probability_of_validity(self, X: Tensor) -> Tensor:
        """The probability that evaluations are valid.

        Args:
            X: ``... x d`` inputs.

        Returns:
            ``...`` probabilities.
        """
        if self.validity_model is None:
            raise RuntimeError("Nothing has been told yet: there is no validity model.")
        check_tensor(X, "X")
        if not X.dim() or X.shape[-1] != self.bounds.shape[-1]:
            raise ValueError(
                f"X: expected shape ... x {self.bounds.shape[-1]}, got {tuple(X.shape)}."
            )
        with torch.no_grad():
            return log_validity(self.validity_model, X.unsqueeze(-2)).exp().squeeze(-1)

    # ---------------------------------------------------------------- state

    def state_dict(self) -> dict[str, Any]:  # noqa: D102
        return super().state_dict() | {
            "Y": self.Y.clone(),
            "num_valid": self.num_valid.clone(),
            "objective": self._objective.state_dict(),
            "validity": self._validity.state_dict(),
            "both": self._both.state_dict(),
            "fade": self.fade.clone(),
            "evidence": self._evidence,
            "trust_region": None if self.trust_region is None else self.trust_region.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from the state of an optimiser with the same options.

        Args:
            state: The result of `state_dict`.
        """
        X, pending = self._check_state(state)
        region = state["trust_region"]
        if (region is None) != (self.trust_region is None):
            raise ValueError(
                f"state: saved with{'out' if region is None else ''} a trust region; build it with "
                "the same options."
            )
        Y = state["Y"].to(self.bounds)
        num_valid = state["num_valid"].to(self.bounds.device)
        objective, validity = RefittedModel(self.make_objective), RefittedModel(self.make_validity)
        both = RefittedModel(self._make_both)
        teaches = self._teaches(Y, self._is_valid(num_valid))
        fade = state["fade"].to(self.bounds)
        own, all_of, of_both = self._fades(fade if self.moves else None, teaches)
        objective.load_state_dict(state["objective"], X[teaches], Y[teaches].unsqueeze(-1), own)
        validity.load_state_dict(state["validity"], X, num_valid.to(X).unsqueeze(-1), all_of)
        outcomes = self._outcomes_of_both(Y, num_valid, teaches)
        both.load_state_dict(state["both"], X, outcomes, of_both)
        self._become(
            X=X,
            Y=Y,
            num_valid=num_valid,
            pending=pending,
            fade=fade,
            _evidence=tuple(map(tuple, state["evidence"])),
            trust_region=None if region is None else TrustRegion(**region),
            _objective=objective,
            _validity=validity,
            _both=both,
        )

    # ---------------------------------------------------------------- helpers

    def _check_valid(self, valid: Any, n: int) -> Tensor:
        """Return ``n`` numbers of valid trials, from labels or numbers."""
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
                "valid: expected labels, 1 or true for valid and 0 or false for failed."
                if self.num_trials == 1
                else f"valid: expected numbers of valid trials, 0 to {self.num_trials}."
            )
        return valid.long()

    def _is_valid(self, num_valid: Tensor) -> Tensor:
        """Which evaluations are valid, given their numbers of valid trials."""
        return num_valid > THRESHOLD * self.num_trials

    def _teaches(self, Y: Tensor, valid: Tensor) -> Tensor:
        """Which evaluations the model of the objective learns from."""
        return ~Y.isnan() if self.learn_from_failures else valid

    def _candidates(self) -> Tensor:
        """Which evaluations can be the incumbent: of the present search, if there are any."""
        teaches = self._teaches(self.Y, self.valid)
        recent = torch.arange(len(self.X), device=self.X.device) >= self._start
        for counts in (self.valid & recent, teaches & recent, self.valid):
            if counts.any():
                return counts
        return teaches

    # ---------------------------------------------------------------- trust region

    @property
    def _start(self) -> int:
        """The number of evaluations before the present search."""
        return 0 if self.trust_region is None else self.trust_region.start

    def _best_of_search(self, Y: Tensor, valid: Tensor) -> Tensor | None:
        """The best valid value of the present search, ``None`` if there is none."""
        return best_valid(Y[self._start :], valid[self._start :], self.maximize)

    def _moved_trust_region(self, Y: Tensor, valid: Tensor, num_new: int) -> TrustRegion | None:
        """The trust region after evaluations; larger or smaller, unless they were initial ones.

        Args:
            Y: ``n`` values, the new ones last.
            valid: ``n``, which of them are valid.
            num_new: The number of new ones.
        """
        region, options = self.trust_region, self.trust_region_options
        if region is None or options is None or not num_new:
            return region
        if len(Y) - num_new - region.start < max(self.num_initial, 1):
            return region
        before = self._best_of_search(self.Y, self.valid)
        success = is_success(before, self._best_of_search(Y, valid), self.maximize)
        return region.after(success, num_new, len(Y), self.bounds.shape[-1], options)

    @torch.no_grad()
    def _search_bounds(self, context: Context | None, options: dict[str, Any]) -> Tensor:
        """Bounds of the search: the trust region around the incumbent, if there is one.

        As long as nothing is valid, it is around the point that is most probably valid.
        """
        if self.trust_region is None:
            return self.bounds
        if self.best_f is None:
            X = self.X[self._start :]
            centre = X[self.probability_of_validity(X).argmax()]
        else:
            centre = self.incumbent_in(context or {})[0]
        whole = {*(context or {}), *(options.get("fixed_features") or {})}
        for name in ("discrete_dims", "cat_dims"):
            whole |= set(options.get(name) or {})
        for each in options.get("fixed_features_list") or ():
            whole |= set(each)
        weights = side_weights(self.objective_model, self.bounds)
        return region_bounds(centre, self.trust_region.length, weights, self.bounds, whole)

    # ---------------------------------------------------------------- models

    def _discount(
        self, X: Tensor, Y: Tensor, num_valid: Tensor
    ) -> tuple[float, tuple[tuple[float, ...], ...]]:
        """The factor for all that was told before, given what is new, and evidence for others.

        Both models are asked, and the smaller factor counts for both.
        """
        if self.discount != "auto" or not len(X):
            return (1.0 if isinstance(self.discount, str) else self.discount), self._evidence
        teaches = self._teaches(Y, self._is_valid(num_valid))
        news = (X[teaches], Y[teaches].unsqueeze(-1)), (X, num_valid.to(X).unsqueeze(-1))
        pairs = zip((self._objective.model, self._validity.model), news, strict=True)
        factor, evidence = 1.0, list(self._evidence)
        for k, (model, new) in enumerate(pairs):
            if isinstance(model, SequentialGP):
                found = discount_for(model, *new, self._evidence[k])
                factor, evidence[k] = min(factor, found.factor), found.evidence
        return factor, tuple(evidence)

    @staticmethod
    def _fades(fade: Tensor | None, teaches: Tensor) -> tuple[Tensor | None, ...]:
        """How much the observations of objective, validity and of both in one model count."""
        if fade is None:
            return None, None, None
        return fade[teaches], fade, torch.cat([fade[teaches], fade])

    def _learn(
        self, X: Tensor, Y: Tensor, num_valid: Tensor, fade: Tensor | None
    ) -> dict[str, RefittedModel]:
        """Fit the models to the data, or condition them on what is new."""
        objective, validity, both = self._objective, self._validity, self._both
        teaches = self._teaches(Y, self._is_valid(num_valid))
        own, all_of, of_both = self._fades(fade, teaches)
        # Hyperparameters of validity cannot be learnt from a single class.
        has_both = bool((num_valid > 0).any() and (num_valid < self.num_trials).any())
        if self.correlated and has_both and teaches.any():
            outcomes = self._outcomes_of_both(Y, num_valid, teaches)
            learnt = both.learn(X, outcomes, self.refit_every, self.fit_options, fade=of_both)
            return {"_both": learnt}
        if teaches.any():
            objective = objective.learn(
                X[teaches], Y[teaches].unsqueeze(-1), self.refit_every, self.fit_options, fade=own
            )
        if len(X):
            validity = validity.learn(
                X,
                num_valid.to(X).unsqueeze(-1),
                self.refit_every,
                self.fit_options,
                fit=has_both,
                fade=all_of,
            )
        return {"_objective": objective, "_validity": validity}

    def _outcomes_of_both(self, Y: Tensor, num_valid: Tensor, teaches: Tensor) -> Tensor:
        """``n x 2``: values, NaN where the model does not learn from them, and validity."""
        return torch.stack([torch.where(teaches, Y, torch.nan), num_valid.to(Y)], -1)

    def _default_objective(self, X: Tensor, Y: Tensor) -> Model:
        return SequentialGP(
            X,
            Y,
            # The default kernel of BoTorch. Passing it suppresses the warning about values that
            # are not standardised, such as those that are all the same.
            covar_module=get_covar_module_with_dim_scaled_prior(X.shape[-1]).to(X),
            input_transform=Normalize(X.shape[-1], bounds=self.bounds),
        )

    def _default_validity(self, X: Tensor, labels: Tensor) -> Model:
        kernel = get_covar_module_with_dim_scaled_prior(X.shape[-1], use_rbf_kernel=False)
        return SequentialGP(
            X,
            labels,
            likelihood=self._validity_likelihood(),
            covar_module=sharp(kernel).to(X),
            input_transform=Normalize(X.shape[-1], bounds=self.bounds),
        )

    def _validity_likelihood(self) -> Likelihood:
        return (
            BernoulliLikelihood() if self.num_trials == 1 else BinomialLikelihood(self.num_trials)
        )

    def _make_both(self, X: Tensor, Y: Tensor) -> Model:
        """One model of both, with the kernels of the default models."""
        d = X.shape[-1]
        return objective_and_validity(
            X,
            Y,
            get_covar_module_with_dim_scaled_prior(d),
            sharp(get_covar_module_with_dim_scaled_prior(d, use_rbf_kernel=False)),
            self._validity_likelihood(),
            input_transform=Normalize(d + 1, indices=[*range(d)], bounds=self.bounds),
        )


def _check_discount(discount: object, correlated: bool, trust_region: bool) -> None:
    """Raise unless a discount is a number in (0, 1] or ``"auto"``, and goes with the rest."""
    if discount != "auto":
        if isinstance(discount, bool) or not isinstance(discount, Real):
            raise TypeError(f'discount: expected a number in (0, 1] or "auto", got {discount!r}.')
        if not 0 < float(discount) <= 1:
            raise ValueError(f"discount: expected a number in (0, 1], got {discount}.")
    if discount == "auto" and correlated:
        raise ValueError(
            'discount: "auto" is not supported with correlated=True; pass a number, for example '
            "discount=0.9, or leave out correlated."
        )
    if discount != 1 and trust_region:
        raise ValueError(
            "trust_region: not supported with a discount, since its size depends on earlier "
            "values, which may no longer hold; leave out discount or trust_region."
        )

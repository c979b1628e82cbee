"""Optimisation by duels: which pair should a person compare next? Ask and tell."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from botorch.acquisition import AcquisitionFunction, PosteriorMean
from botorch.acquisition.preference import (
    AnalyticExpectedUtilityOfBestOption,
    qExpectedUtilityOfBestOption,
)
from botorch.fit import fit_gpytorch_mll
from botorch.models.transforms import Normalize
from botorch.optim import optimize_acqf
from botorch.sampling import SobolQMCNormalSampler
from torch import Tensor

from seqgp.ask_tell import AskTell
from seqgp.models.preference_gp import PreferenceGP
from seqgp.validation import check_inputs
from seqgp.variational.elbo import DualELBO

#: Makes a model of items and comparisons.
MakeModel = Callable[[Tensor, Tensor], PreferenceGP]
#: Makes an acquisition function of duels from a model and pending items, ``2k x d`` or ``None``.
MakeAcquisition = Callable[[PreferenceGP, Tensor | None], AcquisitionFunction]


def expected_utility_of_best(model: PreferenceGP, X_pending: Tensor | None) -> AcquisitionFunction:
    """BoTorch's EUBO: the expected utility of the better one of two items.

    With pending items, that of the best of all: a new pair is worth what it adds to them.

    Args:
        model: The model.
        X_pending: ``k x d`` items of duels without an answer yet.
    """
    if X_pending is None:
        return AnalyticExpectedUtilityOfBestOption(model)
    sampler = SobolQMCNormalSampler(torch.Size([128]), seed=0)
    return qExpectedUtilityOfBestOption(model, sampler=sampler, X_pending=X_pending)


class DuelOptimizer(AskTell):
    """Find what a person likes best, by asking which of two items is better.

    A `PreferenceGP` is built and fitted once there are ``num_initial`` answers, and updated with
    each answer from then on. `ask` has no side effects, unless it is to remember what is pending.

    Args:
        bounds: ``2 x d`` bounds of the items, lower bounds first.
        num_initial: The number of duels before a model is used. Until then `ask` proposes
            quasi-random pairs. By default ``2 (d + 1)``.
        make_model: Makes an unfitted model from items and comparisons; by default a `PreferenceGP`
            with inputs normalised to the bounds.
        make_acquisition: Makes the acquisition function of duels; by default
            `expected_utility_of_best`.
        update_options: Options of `PreferenceGP.update`.
        fit_options: Options of L-BFGS for the first fit.
        seed: Seed of all random numbers.
        options: Options of BoTorch's `optimize_acqf`: ``num_restarts``, ``raw_samples``,
            ``inequality_constraints``, ...

    Attributes:
        answers: ``n`` answers, whether the first item was preferred.

    Example:
        >>> import torch
        >>> from seqgp.duel_optimizer import DuelOptimizer
        >>> def prefers_first(duels):  # the nearer, the better
        ...     distance = (duels - 0.7).norm(dim=-1)
        ...     return distance[..., 0] < distance[..., 1]
        >>> bounds = torch.tensor([[0.0, 0.0], [1.0, 1.0]], dtype=torch.double)
        >>> optimizer = DuelOptimizer(bounds, num_restarts=1, raw_samples=16)
        >>> for _ in range(6):
        ...     duels = optimizer.ask(2)  # 2 x 2 x d
        ...     optimizer.tell(duels, prefers_first(duels))
        >>> bool((optimizer.best - 0.7).norm() < 0.3)
        True
    """

    def __init__(
        self,
        bounds: Tensor,
        num_initial: int | None = None,
        make_model: MakeModel | None = None,
        make_acquisition: MakeAcquisition = expected_utility_of_best,
        update_options: dict[str, Any] | None = None,
        fit_options: dict[str, Any] | None = None,
        seed: int = 0,
        **options: Any,
    ) -> None:
        super().__init__(bounds, num_initial, 1, fit_options, seed, options)
        self.make_model = make_model or self._default_model
        self.make_acquisition = make_acquisition
        self.update_options = update_options or {}
        self.answers = torch.empty(0, dtype=torch.bool, device=bounds.device)
        self._model: PreferenceGP | None = None

    # ---------------------------------------------------------------- ask and tell

    def ask(
        self, q: int = 1, X_pending: Tensor | None = None, remember_pending: bool = False
    ) -> Tensor:
        """Propose ``q x 2 x d`` duels. Asking again returns the same ones.

        Args:
            q: The number of duels.
            X_pending: ``k x 2 x d`` duels without an answer yet, besides those remembered.
            remember_pending: Whether to remember these duels as pending until they are told.
        """
        options = self._check_request(q, None)
        given = None if X_pending is None else self._check_duels(X_pending, "X_pending")
        pending = self._all_pending(given)
        if self._model is None:
            items = self._initial_points(torch.cat([self.X, pending]), 2 * q, options)
            return self._remember(items, remember_pending).unflatten(0, (q, 2))
        chosen: list[Tensor] = []
        with self._seeded():
            for _ in range(q):
                waiting = torch.cat([pending, *chosen])
                acquisition = self.make_acquisition(self._model, waiting if len(waiting) else None)
                chosen.append(self._maximised(acquisition, 2))
        return self._remember(torch.cat(chosen), remember_pending).unflatten(0, (q, 2))

    def tell(self, duels: Tensor, answers: Any) -> None:
        """Learn answers to duels that were asked for, or to any others.

        Args:
            duels: ``n x 2 x d`` pairs of items.
            answers: ``n``, whether the first item of each was preferred.
        """
        X = self._check_duels(duels, "duels")
        won = self._as_tensor(answers, "answers")
        if won.shape not in ((len(duels),), (len(duels), 1)):
            raise ValueError(
                f"answers: expected {len(duels)}, one for each duel, got shape {tuple(won.shape)}."
            )
        if not bool(((won == 0) | (won == 1)).all()):
            raise ValueError("answers: expected True or False, whether the first was preferred.")
        won = won.reshape(-1).bool()
        data = torch.cat([self.X, X]), torch.cat([self.answers, won])
        model = copy.deepcopy(self._model)  # the present one stays what it is, whatever happens
        if model is not None:
            model.update(X, _comparisons(won), **self.update_options)
        elif len(data[1]) >= max(self.num_initial, 1):
            model = self.make_model(data[0], _comparisons(data[1]))
            fit_gpytorch_mll(
                DualELBO(model.likelihood, model), optimizer_kwargs={"options": self.fit_options}
            )
        left = self._without(self.pending, X)
        self._become(X=data[0], answers=data[1], pending=left, _model=model)

    # ---------------------------------------------------------------- what was learnt

    @property
    def model(self) -> PreferenceGP:
        """The model of the utility."""
        if self._model is None:
            raise RuntimeError(
                f"There is no model yet: it is built after {max(self.num_initial, 1)} answers, and "
                f"there are {len(self.answers)}."
            )
        return self._model

    @property
    def best(self) -> Tensor:
        """``d``, where the posterior mean of the utility is largest within the bounds."""
        with self._seeded():
            return self._maximised(PosteriorMean(self.model), 1).squeeze(0)

    # ---------------------------------------------------------------- state

    def state_dict(self) -> dict[str, Any]:
        """All answers and what was learnt: tensors, numbers and strings.

        The model is rebuilt from all answers with its hyperparameters when it is loaded.
        """
        learnt = None if self._model is None else self._model.hyperparameter_values()
        return super().state_dict() | {"answers": self.answers.clone(), "learnt": learnt}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from the state of a loop with the same options.

        Args:
            state: The result of `state_dict`.
        """
        X, pending = self._check_state(state)
        answers = state["answers"].to(self.answers)
        model = None
        if state["learnt"] is not None:
            model = self.make_model(X, _comparisons(answers))
            model.set_hyperparameters(state["learnt"])
            model.refresh()
        self._become(X=X, answers=answers, pending=pending, _model=model)

    # ---------------------------------------------------------------- helpers

    def _default_model(self, items: Tensor, comparisons: Tensor) -> PreferenceGP:
        transform = Normalize(items.shape[-1], bounds=self.bounds)
        return PreferenceGP(items, comparisons, input_transform=transform)

    def _maximised(self, acquisition: AcquisitionFunction, q: int) -> Tensor:
        """``q x d`` items that maximise an acquisition function."""
        options = {"num_restarts": 4, "raw_samples": 64, **self.options}
        X, _ = optimize_acqf(acquisition, self.bounds, q=q, **options)
        return X.detach()

    def _check_duels(self, duels: Tensor, name: str) -> Tensor:
        """``2n x d`` items of duels ``n x 2 x d``; raises if they are not."""
        check_inputs(duels, self.bounds.shape[-1], name)
        if duels.dim() != 3 or duels.shape[-2] != 2:
            raise ValueError(
                f"{name}: expected shape n x 2 x {self.bounds.shape[-1]}, got {tuple(duels.shape)}."
            )
        items = duels.detach().flatten(0, 1)
        self._check_X(items, name)
        same = (duels[:, 0] == duels[:, 1]).all(-1)
        if bool(same.any()):
            raise ValueError(
                f"{name}: an item cannot be compared with itself, as in row "
                f"{int(same.nonzero()[0, 0])}."
            )
        return items


def _comparisons(won: Tensor) -> Tensor:
    """``n x 2`` indices into the items of ``n`` duels, the preferred one first."""
    first = 2 * torch.arange(len(won), device=won.device)
    loser = won.logical_not().long()
    return torch.stack([first + loser, first + 1 - loser], -1)

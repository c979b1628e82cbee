"""Models that are refitted at intervals, and conditioned on new data in between."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from botorch.fit import fit_gpytorch_mll
from botorch.models.model import Model
from gpytorch.mlls import ExactMarginalLogLikelihood
from torch import Tensor

from seqgp.models.sequential_gp import SequentialGP
from seqgp.variational.elbo import DualELBO

#: Makes an unfitted model from inputs ``n x d`` and targets ``n x 1``.
ModelFactory = Callable[[Tensor, Tensor], Model]

#: Hyperparameters are fitted again when the data have grown by this share, unless told otherwise.
GROWTH = 0.1


class RefittedModel:
    """A model, and the number of observations that it was fitted to.

    Objects are not changed by learning: `learn` returns a new one.

    Args:
        make: Makes an unfitted model from data.
        reconverge: Whether in between all data are learnt again at the same hyperparameters. That
            is slower than conditioning, and more accurate unless observations are Gaussian: what a
            label tells about the latent function depends on all others.

    Attributes:
        model: The model, conditioned on all data; ``None`` before there are any.
        base: The model as it was last fitted.
        num_fitted: The number of observations that ``base`` was fitted to.
    """

    def __init__(self, make: ModelFactory, reconverge: bool = False) -> None:
        self.make, self.reconverge = make, reconverge
        self.model: Model | None = None
        self.base: Model | None = None
        self.num_fitted = 0

    def learn(
        self,
        X: Tensor,
        Y: Tensor,
        refit_every: int | None,
        options: dict[str, Any],
        fit: bool = True,
        fade: Tensor | None = None,
    ) -> RefittedModel:
        """Fit a new model, or let the present one learn new data at its hyperparameters.

        Args:
            X: ``n x d`` inputs, with known ones first.
            Y: ``n x 1`` targets.
            refit_every: The number of new observations after which hyperparameters are fitted. With
                ``None``, when there are a tenth more, see `GROWTH`.
            options: Options of L-BFGS for fitting hyperparameters.
            fit: Whether hyperparameters are fitted at all.
            fade: ``n``, how much each observation counts; by default once. Only a `SequentialGP`
                knows how to.
        """
        result = RefittedModel(self.make, self.reconverge)
        if refit_every is None:
            refit_every = max(round(GROWTH * self.num_fitted), 1)
        if self.base is not None and len(X) - self.num_fitted < refit_every:
            result.base, result.num_fitted = self.base, self.num_fitted
            result.model = self._with_new(X, Y, fade)
            return result
        model = _make(self.make, X, Y)
        _let_fade(model, fade)
        if fit:
            if self.base is not None:
                _copy_hyperparameters(self.base, model)
            _fit(model, options)
        result.model = result.base = model.eval()
        result.num_fitted = len(X)
        return result

    def state_dict(self) -> dict[str, Any]:
        """The state of the fitted model, and the number of observations it was fitted to."""
        state = {} if self.base is None else dict(self.base.state_dict())
        return {"num_fitted": self.num_fitted, "model": state}

    def _with_new(self, X: Tensor, Y: Tensor, fade: Tensor | None) -> Model:
        """The model as it was fitted, and all data."""
        assert self.base is not None
        again = self.reconverge and isinstance(self.base, SequentialGP)
        if fade is None and not again:
            return _condition_on_new(self.base, X, Y, self.num_fitted)
        model = _make(self.make, X, Y)  # what has been conditioned on is not to count less
        _let_fade(model, fade)
        _copy_hyperparameters(self.base, model)
        return model.eval()

    def load_state_dict(
        self, state: dict[str, Any], X: Tensor, Y: Tensor, fade: Tensor | None = None
    ) -> None:
        """Restore the model from its state and the data.

        Args:
            state: The result of `state_dict`.
            X: ``n x d`` inputs.
            Y: ``n x 1`` targets.
            fade: As for `learn`.
        """
        self.num_fitted = state["num_fitted"]
        if not self.num_fitted:
            return
        base = _make(self.make, X[: self.num_fitted], Y[: self.num_fitted])
        _let_fade(base, None if fade is None else fade[: self.num_fitted])
        base.load_state_dict(state["model"])
        self.base = self.model = base.eval()
        if len(X) > self.num_fitted:
            self.model = self._with_new(X, Y, fade)


def _make(make: ModelFactory, X: Tensor, Y: Tensor) -> Model:
    # BoTorch and GPyTorch make some tensors on the default device. To change it costs time at each
    # call of PyTorch, so it is only changed if needed.
    with nullcontext() if torch.get_default_device() == X.device else X.device:
        return make(X, Y)


def _let_fade(model: Model, fade: Tensor | None) -> None:
    """Let observations of a model count less."""
    if fade is None:
        return
    if not isinstance(model, SequentialGP):
        raise TypeError(
            f"discount: only supported for SequentialGP models, got a {type(model).__name__}."
        )
    model.stream = replace(model.stream, fade=fade.to(model.stream.fade), fades=True)
    model.refresh()


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
    """Copy hyperparameters; inducing points belong to the new data."""
    learnt = dict(old.named_parameters())
    for name, parameter in new.named_parameters():
        value = learnt.get(name)
        if value is not None and value.shape == parameter.shape and "inducing" not in name:
            parameter.copy_(copy.deepcopy(value))
    if isinstance(new, SequentialGP):
        new.refresh()

"""Options of an update, which are checked when they are created."""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Real

from seqgp.streaming.inducing_points import InducingPointRule, inducing_point_rule
from seqgp.streaming.memory import MemoryOptions
from seqgp.validation import is_whole

OPTIMIZERS = ("lbfgs", "adam")


@dataclass(frozen=True)
class UpdateOptions:
    """How a model learns from the next batch of a stream; see `SequentialGP.update`.

    Attributes:
        memory: Which observations to keep; ``None`` for the model's ``memory_options``.
        learn: Whether to learn hyperparameters.
        optimizer: ``"lbfgs"`` or ``"adam"``.
        steps: The maximum number of optimiser steps; ``None`` for the optimiser's default.
        tol: L-BFGS stops when a step raises the bound by less than this, in nats.
        learning_rate: Adam's learning rate.
        inducing: The rule for the inducing points, or its name; ``None`` for the default.
        max_inducing: Their maximum number; ``None`` for the model's.
        discount: The factor for everything learnt before, or ``"auto"``.
        site_steps: The maximum number of passes over the data each time the sites are converged.
    """

    memory: MemoryOptions | int | None = None
    learn: bool | None = None
    optimizer: str = "lbfgs"
    steps: int | None = None
    tol: float | None = None
    learning_rate: float = 0.01
    inducing: str | InducingPointRule | None = None
    max_inducing: int | None = None
    discount: float | str = 1.0
    site_steps: int | None = None

    def __post_init__(self) -> None:
        if self.memory is not None:
            object.__setattr__(self, "memory", MemoryOptions.of(self.memory))
        if self.learn is not None and not isinstance(self.learn, bool):
            raise TypeError(f"learn: expected True, False or None, got {self.learn!r}.")
        if self.optimizer not in OPTIMIZERS:
            raise ValueError(f"optimizer: expected adam or lbfgs, got {self.optimizer!r}.")
        for name, least in (("steps", 0), ("site_steps", 1), ("max_inducing", 1)):
            _check_whole(name, getattr(self, name), least)
        for name in ("tol", "learning_rate", "discount"):
            value = getattr(self, name)
            if (name == "tol" and value is None) or (name == "discount" and value == "auto"):
                continue
            if not isinstance(value, Real) or isinstance(value, bool):
                auto = ' or "auto"' if name == "discount" else ""
                raise TypeError(f"{name}: expected a number{auto}, got {value!r}.")
        if not isinstance(self.discount, str) and not 0 <= self.discount <= 1:
            raise ValueError(f"discount: expected a number in [0, 1], got {self.discount}.")
        if self.tol is not None and not (self.tol >= 0 and math.isfinite(self.tol)):
            raise ValueError(f"tol: expected at least zero, got {self.tol}.")
        if not (self.learning_rate > 0 and math.isfinite(self.learning_rate)):
            raise ValueError(f"learning_rate: expected more than zero, got {self.learning_rate}.")
        if self.inducing is not None:
            inducing_point_rule(self.inducing)  # raises if there is no such rule


def _check_whole(name: str, value: object, least: int) -> None:
    if value is None:
        return
    if not is_whole(value):
        raise TypeError(f"{name}: expected a whole number or None, got {value!r}.")
    if int(value) < least:  # type: ignore[call-overload]
        wants = {0: "at least zero", 1: "at least one"}[least]
        raise ValueError(f"{name}: expected {wants}, got {value}.")

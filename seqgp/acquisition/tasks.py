"""Candidates and locations of models of several tasks, one of which is the output.

An observation of any task may reduce the uncertainty about the output: candidates can have a task
column, and are observations of the output without one. Locations are always those of the output.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from seqgp.models.multi_task_gp import SequentialMultiTaskGP
from seqgp.models.sequential_gp import SequentialGP


def with_task(model: SequentialGP, X: Tensor, name: str = "X") -> Tensor:
    """Add a task column with the output task to inputs, if the model has tasks and it is missing.

    Args:
        model: A model of one output.
        X: ``... x n x d`` inputs.
        name: What to call them in errors.
    """
    return model.long_inputs(X, name) if isinstance(model, SequentialMultiTaskGP) else X


def of_output(model: SequentialGP, X: Tensor) -> Tensor | None:
    """Which inputs belong to the output task, ``... x n``; ``None`` without tasks.

    Args:
        model: A model of one output.
        X: ``... x n x (d + 1)`` inputs.
    """
    if not isinstance(model, SequentialMultiTaskGP):
        return None
    return X[..., model.task_feature] == model.output_tasks[0]


def arguments_of_tasks(model: SequentialGP, X: Tensor, locations: Tensor | None) -> dict[str, Any]:
    """Return the arguments of the likelihood for the tasks of candidates.

    Args:
        model: A model of one output.
        X: ``... x n x d`` candidates, with a task column if the model has tasks.
        locations: Locations of the output; ``None`` if each candidate is its own.
    """
    if not isinstance(model, SequentialMultiTaskGP):
        return {}
    if locations is None:
        check_of_output(model, X, "X", "candidates are their own locations (pass others)")
    return model.task_arguments(X)


def check_of_output(model: SequentialGP, X: Tensor, name: str, why: str) -> None:
    """Raise if some inputs belong to another task than the output.

    Args:
        model: A model of one output.
        X: ``... x n x d`` inputs, with a task column if the model has tasks.
        name: What to call them in the error.
        why: The reason.
    """
    mine = of_output(model, X)
    if mine is not None and not bool(mine.all()):
        assert isinstance(model, SequentialMultiTaskGP)
        raise ValueError(
            f"{name}: expected inputs of the output task, {model.output_tasks[0]}, since {why}; "
            f"got some of others."
        )

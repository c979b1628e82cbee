"""`merge`: models that learnt in different places become one."""

from __future__ import annotations

import os
from collections.abc import Iterable

from seqgp.checkpoint import load
from seqgp.models import SequentialGP
from seqgp.progress import progress_bar
from seqgp.streaming.memory import MemoryOptions
from seqgp.streaming.merge import check_mergeable, different, merge_models
from seqgp.validation import check_count, is_whole


def merge(
    models: Iterable[SequentialGP | str | os.PathLike[str]],
    hyperparameters: int | None = None,
    memory: MemoryOptions | int | None = None,
    max_inducing: int | None = None,
    progress: bool = False,
) -> SequentialGP:
    """Merge models that have learnt from different data into one model.

    The models must have the same kind of prior (kernel, mean), likelihood and transforms. They may
    have learnt different hyperparameters and have different inducing points. Their memories are
    joined and their summaries added. Observations that a model has folded into its summary are not
    needed. If no observation may leave its machine, fold all of them first:
    ``model.update(X[:0], Y[:0], memory=0, learn=False)``.

    With Gaussian observations, equal hyperparameters, and inducing points that include those of
    each model, the result is the same as if one model had learnt all data at these inducing points.
    Otherwise, two approximations are made, which updates of a stream make, too:

    * A summary depends on the hyperparameters at the time when observations were folded. If the
      likelihood is not Gaussian, it also does not take the data of the other models into account.
      Observations in memory are learnt again.
    * If there are more inducing points than ``max_inducing``, the most useful ones are kept, and
      summaries are projected onto these.

    If targets are standardised by default, they are converted to a common scale. So are inputs that
    each model has normalised by its own range.

    Args:
        models: Models, or paths of checkpoints, in any order. They are not changed.
        hyperparameters: The index of the model whose hyperparameters (and input transform) are
            used. By default, those of each model are tried, and those with the largest evidence
            lower bound are used.
        memory: How many observations to keep, and which. By default as in the first model. All
            others are folded.
        max_inducing: The maximum number of inducing points. By default the largest of the models.
        progress: Whether to show a progress bar (only on a terminal).

    Returns:
        A new model, with all that `update` needs to continue.

    Example:
        >>> import torch, seqgp
        >>> X = torch.linspace(0, 1, 60, dtype=torch.double).unsqueeze(-1)
        >>> Y = torch.sin(6 * X)
        >>> here = seqgp.SequentialGP(X[::2], Y[::2])
        >>> there = seqgp.SequentialGP(X[1::2], Y[1::2])
        >>> both = seqgp.merge([here, there])
        >>> both.num_seen, bool((both.posterior(X).variance < here.posterior(X).variance).all())
        (60, True)
    """
    if isinstance(models, str | os.PathLike | SequentialGP):
        raise TypeError(
            f"models: expected a list of models or paths, got one {type(models).__name__}."
        )
    loaded: list[SequentialGP] = []
    for index, model in enumerate(models):
        model = load(model) if isinstance(model, str | os.PathLike) else model
        if not isinstance(model, SequentialGP):
            raise TypeError(
                "models: expected SequentialGP models or paths of their checkpoints, got a "
                f"{type(model).__name__} as number {index}."
            )
        loaded.append(model)
    if not loaded:
        raise ValueError("models: expected at least one, got none.")
    check_count(max_inducing, "max_inducing")
    if hyperparameters is not None:
        if not is_whole(hyperparameters):
            raise TypeError(
                f"hyperparameters: expected the index of a model or None, got {hyperparameters!r}."
            )
        if not 0 <= hyperparameters < len(loaded):
            raise ValueError(
                f"hyperparameters: expected the index of one of {len(loaded)} models, got "
                f"{hyperparameters}."
            )
    check_mergeable(loaded)
    total = len(different(loaded)) if hyperparameters is None else 1
    with progress_bar(
        total=total, desc="merge", unit=" candidates", disable=None if progress else True
    ) as bar:
        model = merge_models(loaded, hyperparameters, memory, max_inducing, bar.update)
    model.note_hyperparameters()
    return model

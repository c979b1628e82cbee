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
    """One model that knows what several have learnt from different data.

    The models have the same prior (kernel, mean), likelihood and transforms; they may have learnt
    different hyperparameters, have other inducing points, and hold more or less of their data. All
    that is needed of them is what they are: memories are joined, summaries added, observations
    counted. Data that a model has folded into its summary never leave their place. To send none at
    all, let it fold everything first: ``model.update(X[:0], Y[:0], memory=0, learn=False)``.

    Equal hyperparameters: with Gaussian observations, and inducing points that contain those of
    each model, the result is the model that would have learnt all data at the same inducing
    points. Otherwise two approximations are made, both of which streams make, too:

    * A summary stands for its observations as they were tied to inducing points when they were
      folded: with the hyperparameters of that time, and with sites (the Gaussians that stand in for
      likelihoods that are not Gaussian) that did not know the other models' data. Observations in
      the memories are learnt anew.
    * If there are more inducing points than ``max_inducing``, summaries are projected on those that
      explain the others best.

    Statistics of the default standardisation are those of all observations. Inputs that each model
    has normalised by its own range are converted.

    Args:
        models: The models, which are not changed, or paths of checkpoints; in any order.
        hyperparameters: The index of the model whose hyperparameters (and input transform) are
            used. By default those of the models are tried, each once, and those are used under
            which the bound of everything that is known is largest.
        memory: How much to remember, and what; by default as the first model does. What does not
            fit is folded.
        max_inducing: The largest number of inducing points; by default the largest of the models.
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
        raise TypeError(f"models: expected several, got one {type(models).__name__}.")
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

r"""Data that need not fit in memory: models that are built and fitted from batches.

What a model knows of its observations is a sum over them, so that it can be added up one batch at a
time. Gaussian observations take one pass; for others the sites

.. math::
    (\lambda_w, B_w) = \sum_i A_i\, \text{site}_i(q)

depend on the posterior that they make, and natural-gradient steps, one pass each, are repeated
until they no longer change. In the end all observations are folded into the summary: the model
holds none of them, and goes on with `update` as after any other stream.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from seqgp.distributed import ALONE, Ranks
from seqgp.dual import converge
from seqgp.dual.natural_gradient import step_limit
from seqgp.likelihoods.traits import is_conjugate, precision_floor
from seqgp.models import SequentialGP
from seqgp.models.fit import Minibatches, fit_minibatches
from seqgp.observations import Observations
from seqgp.progress import progress_bar
from seqgp.streaming.draft import adopt, draft_of
from seqgp.streaming.rules import note_classes, unseen_classes
from seqgp.streaming.standardization import Moments, moments, pooled, set_statistics
from seqgp.streaming.state import Shard
from seqgp.validation import check_bound, check_count, check_flag, check_number, check_step_size
from seqgp.variational.elbo import DualELBO
from seqgp.variational.strategy import CHUNK_ELEMENTS

#: ``(X, Y)`` or ``(X, Y, arguments)``, as for `SequentialGP.update_stream`.
Item = Sequence[Any]


def from_batches(
    batches: Iterable[Item],
    *,
    num_candidates: int = 10_000,
    tol: float = 1e-8,
    max_steps: int | None = None,
    progress: bool = False,
    **options: Any,
) -> SequentialGP:
    """Build a model from batches of data that do not fit in memory.

    The batches are read more than once. The first pass counts the observations, finds the scale of
    ``Y`` and draws a random sample, from which inducing points are chosen. After that, Gaussian
    observations take one pass, and others as many as the posterior needs to converge. With at most
    ``num_candidates`` observations, the result is the same as that of `SequentialGP` with all data
    at once. (An exception are likelihoods that are not log-concave, such as Student-t: as in
    streams, sites of negative precision are set to zero.)

    Args:
        batches: Pairs ``(X, Y)``, or triples ``(X, Y, arguments)`` with a dictionary of per-point
            arguments of the likelihood (and ``noise``, variances of the shape of ``Y``). This is a
            `torch.utils.data.DataLoader`, a list, or any other object that can be iterated over
            repeatedly. Each time, it has to return the same observations, in any order.
        num_candidates: The size of the random sample. Inducing points are chosen from it, and input
            transforms are fitted to it. It always includes the smallest and largest value of each
            input, so that `Normalize` learns the bounds of all data.
        tol: Relative tolerance of the posterior for likelihoods that are not Gaussian.
        max_steps: The maximum number of passes. By default 100, with a warning.
        progress: Whether to show a progress bar (only on a terminal).
        options: Options of `SequentialGP`. With a ``process_group``, each process has its own
            batches.

    Returns:
        A model that has learnt all observations, and stores none of them.

    Example:
        >>> import torch, seqgp
        >>> from torch.utils.data import DataLoader, TensorDataset
        >>> X = torch.rand(500, 1, dtype=torch.double)
        >>> batches = DataLoader(TensorDataset(X, torch.sin(6 * X)), batch_size=100)
        >>> model = seqgp.from_batches(batches, inducing_points=20)
        >>> model.num_seen, model.num_data
        (500, 0)
        >>> bool((model.posterior(X).mean - torch.sin(6 * X)).abs().max() < 0.2)
        True
    """
    ranks = Ranks(options.get("process_group"))
    with ranks.together():
        check_count(num_candidates, "num_candidates", optional=False)
        check_flag(progress, "progress")
        for name in ("train_X", "train_Y", "train_Yvar", "likelihood_arguments", "coefficients"):
            if name in options:
                raise TypeError(f"{name}: not an option here; it is part of each batch.")
        seen = _look(_Bar(batches, "look", progress), num_candidates, ranks)
        drawn = dict(seen.arguments)
        model = SequentialGP(
            seen.X, seen.Y, drawn.pop("noise", None), likelihood_arguments=drawn, **options
        )
        _know_scale(model, seen)
        _learn(model, _Bar(batches, "learn", progress), tol, max_steps)
    return model


def fit_batches(
    model: SequentialGP,
    batches: Iterable[Item],
    *,
    epochs: int | None = None,
    learning_rate: float = 0.03,
    rho: float = 0.5,
    tol: float = 1e-8,
    max_steps: int | None = None,
    progress: bool = False,
) -> SequentialGP:
    """Fit the hyperparameters of a model to data that need not fit in memory.

    For each batch, this takes a natural-gradient step and a step of Adam, as
    `fit_gpytorch_mll(mll, batch_size=...)` does. Finally, the posterior of all observations is
    computed as by `from_batches`. An error or Ctrl-C leaves the model unchanged.

    Args:
        model: A model that was built by `from_batches`. Its posterior is replaced by that of the
            batches, which have to be all its data.
        batches: As for `from_batches`, best in random order (``DataLoader(..., shuffle=True)``). If
            the model has a ``process_group``, each process has its own batches, and one batch of
            each process makes a step.
        epochs: The number of passes over the data, during which the learning rate falls to zero. By
            default, there are passes until the bound of all data no longer increases.
        learning_rate: The learning rate of Adam.
        rho: The step size of the natural gradient.
        tol: As for `from_batches`.
        max_steps: As for `from_batches`.
        progress: Whether to show a progress bar (only on a terminal).

    Returns:
        The model.

    Example:
        >>> import torch, seqgp
        >>> X = torch.rand(200, 1, dtype=torch.double)
        >>> batches = [(x, torch.sin(6 * x)) for x in X.split(50)]
        >>> model = seqgp.from_batches(batches, inducing_points=10)
        >>> model = seqgp.fit_batches(model, batches, epochs=5)
        >>> model.num_seen
        200
    """
    if not isinstance(model, SequentialGP):
        raise TypeError(f"model: expected a SequentialGP, got {type(model).__name__}.")
    model.check_not_fantasy()
    ranks = model.variational_strategy.ranks
    with ranks.together(), model.guard.writing:
        check_count(epochs, "epochs")
        check_number(learning_rate, "learning_rate")
        check_step_size(rho)
        check_flag(progress, "progress")
        if model.num_data:
            raise ValueError(
                "model: expected a model built by from_batches, which stores no observations; "
                f"this one stores {model.num_data}. Use fit_gpytorch_mll instead."
            )
        seen = _look(_Bar(batches, "look", progress), 10_000, ranks)
        draft = draft_of(model, learn=True)
        source = _minibatches(draft, batches, seen)
        _forget_all(draft)
        draft.stream = replace(draft.stream, num_seen=source.num_data)
        mll = DualELBO(draft.likelihood, draft, num_data=source.num_data)
        mll.train()
        fit_minibatches(draft, mll, source, epochs, learning_rate, rho, progress)
        draft.eval()
        Z = draft.variational_strategy.inducing_points
        Z.requires_grad_(draft.fits_inducing_points)
        _learn(draft, _Bar(batches, "learn", progress), tol, max_steps)
        ranks.commit(lambda: adopt(model, draft))
    return model


def _minibatches(model: SequentialGP, batches: Iterable[Item], seen: _Seen) -> Minibatches:
    """The batches of all ranks: the first of each make a minibatch, then the second, and so on.

    A rank that has fewer of them than others goes on with empty ones.
    """
    ranks = model.variational_strategy.ranks
    sample = _checked(model, (seen.X, seen.Y, seen.arguments))
    most = max(ranks.counts(seen.num_batches))

    def epoch() -> Iterator[Observations]:
        yield from (_checked(model, item) for item in batches)
        yield from (sample.select(slice(0)) for _ in range(most - seen.num_batches))

    return Minibatches(ranks.total(seen.number), most, epoch, sample.targets)


# -------------------------------------------------------------------------------- batches


class _Bar:
    """Batches that show how many of them have been read, each time that they are."""

    def __init__(self, batches: Iterable[Item], name: str, progress: bool) -> None:
        if isinstance(batches, Iterator):
            raise TypeError(
                "batches: expected something that can be iterated over again, such as a list or a "
                f"DataLoader, got a {type(batches).__name__}, which can be read only once."
            )
        self.batches, self.name, self.progress = batches, name, progress

    def __iter__(self) -> Iterator[Item]:
        return iter(
            progress_bar(
                self.batches,
                desc=self.name,
                unit=" batches",
                disable=None if self.progress else True,
            )
        )


def _parts(item: Item) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Inputs, observations and arguments of a batch."""
    pair = isinstance(item, Sequence) and len(item) in (2, 3)
    if not pair or (len(item) == 3 and not isinstance(item[2], Mapping)):
        raise TypeError(
            "batches: expected pairs (X, Y), or triples (X, Y, arguments), the last a dictionary; "
            f"got a {type(item).__name__}."
        )
    X, Y = item[0], item[1]
    if not (isinstance(X, Tensor) and isinstance(Y, Tensor) and X.dim() == 2 and Y.dim() == 2):
        raise ValueError("batches: expected tensors X, n x d, and Y, n x m, in each batch.")
    return X, Y, dict(item[2]) if len(item) == 3 else {}


def _checked(model: SequentialGP, item: Item) -> Observations:
    """A batch as the model stores it."""
    X, Y, arguments = _parts(item)
    return model.checked(X, Y, arguments.pop("noise", None), arguments)


class _Seen(NamedTuple):
    """What a first look at the batches finds.

    Attributes:
        X: ``k x d`` inputs of a sample.
        Y: ``k x m`` observations of it.
        arguments: Their per-point arguments.
        number: Of all observations.
        num_batches: Of batches.
        values: ``m`` moments of all observations.
        classes: The different values that there are, if they are few whole numbers.
    """

    X: Tensor
    Y: Tensor
    arguments: dict[str, Tensor]
    number: int
    num_batches: int
    values: Moments
    classes: set[int]


#: More different values than these are not classes.
_MOST_CLASSES = 10_000


def _look(batches: Iterable[Item], size: int, ranks: Ranks) -> _Seen:
    """One pass: the number of observations, their scale, and this rank's part of a sample."""
    generator = torch.Generator().manual_seed(0)
    rows: dict[str, Tensor] = {}
    number, num_batches = 0, 0
    known: list[Moments] = []
    classes: set[int] = set()
    for item in batches:
        X, Y, arguments = _parts(item)
        n = len(X)
        if len(Y) != n:
            raise ValueError(f"batches: {n} inputs, but {len(Y)} observations.")
        values = Y.detach().to(X)
        zero, one = values.new_zeros(values.shape[-1]), values.new_ones(values.shape[-1])
        known = [pooled([*known, moments(values.mT, zero, one)])]
        if len(classes) <= _MOST_CLASSES and Y.shape[-1] == 1 and n:
            whole = values[values.isfinite() & (values.round() == values)]
            classes |= {int(value) for value in whole.unique().tolist()}
        key = torch.rand(n, generator=generator, dtype=torch.double).to(X.device)
        place = torch.arange(number, number + n, device=X.device)
        new = {"X": X, "Y": Y, "key": key, "place": place}
        new |= {f"arguments {name}": value for name, value in arguments.items()}
        both = {k: torch.cat([rows[k], new[k]]) if rows else v for k, v in new.items()}
        rows = {k: v[_drawn(both, size)] for k, v in both.items()}
        number, num_batches = number + n, num_batches + 1
    if not num_batches:
        raise ValueError(
            "batches: expected at least one batch, got none; a process without data has one of "
            "shapes 0 x d and 0 x m."
        )
    total = ranks.total(number)
    if total > size:  # each rank draws in proportion to what it has
        chosen = _drawn(rows, -(-size * number // total))
        rows = {k: v[chosen] for k, v in rows.items()}
    drawn = {k.split()[1]: v for k, v in rows.items() if " " in k}
    return _Seen(rows["X"], rows["Y"], drawn, number, num_batches, known[0], classes)


def _drawn(rows: dict[str, Tensor], size: int) -> Tensor:
    """Indices of those with the largest keys, and of those with extreme inputs, in order."""
    X, key = rows["X"], rows["key"]
    if len(X) <= size:
        return torch.arange(len(X), device=X.device)
    chosen = torch.cat([key.topk(size).indices, X.argmin(0), X.argmax(0)]).unique()
    return chosen[rows["place"][chosen].argsort()]


# -------------------------------------------------------------------------------- learning


def _know_scale(model: SequentialGP, seen: _Seen) -> None:
    """Let a model that was built with a sample know the number, scale and classes of all data."""
    strategy, ranks = model.variational_strategy, model.variational_strategy.ranks
    number = ranks.total(seen.number)
    stream = model.stream.select(torch.zeros(0, dtype=torch.long, device=seen.X.device))
    if stream.shard is not None:
        stream = replace(stream, shard=Shard.begin(0, seen.X.device, ranks))
    if model.standardizes_by_default:
        values = pooled(
            [Moments(*each) for each in ranks.gather(torch.stack(list(seen.values))[None], 0)]
        )
        one = not model.has_output_dim
        values = Moments(*(each.squeeze(0) if one else each for each in values))
        set_statistics(model, values)
        stream = replace(stream, moments=torch.stack(list(values)))
    model.stream = replace(stream, num_seen=number)
    classes = torch.tensor(sorted(seen.classes), dtype=torch.long, device=seen.X.device)
    known = ranks.gather(classes)
    note_classes(model, known)
    assert not strategy.has_summary


def _forget_all(model: SequentialGP) -> None:
    """Take everything out of the summary; the posterior stays where it is, to start from."""
    names = ("summary_lam", "summary_B", "summary_square", "summary_count")
    tensors = model.variational_strategy.tensors()
    model.variational_strategy.set_tensors({k: torch.zeros_like(tensors[k]) for k in names})


@torch.no_grad()
def _learn(model: SequentialGP, batches: Iterable[Item], tol: float, max_steps: int | None) -> None:
    """The posterior of all observations, which are folded."""
    strategy, likelihood = model.variational_strategy, model.likelihood
    ranks = strategy.ranks
    size = max(CHUNK_ELEMENTS // strategy.inducing_points.shape[-2], 1)

    def observations() -> Iterator[Observations]:
        for item in batches:
            part = model.transformed(_checked(model, item))
            for first in range(0, len(part), size):
                yield part.select(slice(first, first + size))

    if not is_conjugate(likelihood):
        state = strategy.state()
        with step_limit(max_steps) as limit:
            duals, info = converge(
                state.duals,
                lambda: (strategy.batch(state, part, likelihood) for part in observations()),
                latent_dims=strategy.latent_dims,
                min_precision=precision_floor(likelihood),
                tol=tol,
                max_steps=limit,
                ranks=ranks,
            )
        check_bound(info.elbo, "Y")
        strategy.store(duals, state)
    unseen = unseen_classes(model)
    strategy.set_ranks(ALONE)  # each adds up its own, and then all of them once
    try:
        for part in observations():
            sites, _ = strategy.sites(part, likelihood=likelihood, unseen=unseen)
            strategy.fold(part, sites=sites, likelihood=likelihood)
    finally:
        strategy.set_ranks(ranks)
    names = ("summary_lam", "summary_B", "summary_square", "summary_count")
    own = strategy.tensors()
    strategy.set_tensors(dict(zip(names, ranks.sum(*(own[k] for k in names)), strict=True)))
    check_bound(model.refresh(), "Y")

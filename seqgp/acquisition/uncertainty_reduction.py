r"""Where to look next: the observation that is expected to reduce uncertainty the most.

With an uncertainty :math:`u(m_a, v_a)` at each of a set of sites (`seqgp.acquisition.uncertainty`),
the score of observing at :math:`x` is the expected reduction of its average,

.. math::
    \sum_a w_a \left( u(m_a, v_a) - E_{y | x} \, u(m'_a, v'_a) \right).

What an outcome does is elementwise arithmetic (`seqgp.acquisition.look_ahead`), so no joint sample
over the sites is ever drawn: candidates x fantasies x sites numbers are computed in chunks. A
nugget of the likelihood (`OverdispersedBinomialLikelihood`) belongs to the site: it is part of what
is uncertain there, and of what an observation there reveals.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from botorch.acquisition.acquisition import AcquisitionFunction
from botorch.sampling.normal import SobolQMCNormalSampler
from botorch.utils.transforms import concatenate_pending_points, t_batch_mode_transform
from torch import Tensor

from seqgp.acquisition.look_ahead import PRECISION, LookAhead, Marginals, look_ahead, marginals
from seqgp.acquisition.uncertainty import Uncertainty, link_of, nugget_of
from seqgp.likelihoods.traits import has_one_latent
from seqgp.models.sequential_gp import SequentialGP
from seqgp.progress import progress_bar
from seqgp.validation import check_arguments, check_inputs, is_whole

#: Elements of a block candidates x fantasies x sites.
BLOCK_ELEMENTS = 2**17

#: Elements of a block of covariances candidates x sites.
COVARIANCE_ELEMENTS = 2**20


class Selection(NamedTuple):
    """What `select_from_pool` chose.

    Attributes:
        chosen: ``q`` indices into the pool, in the order in which they were chosen.
        scores: ``q x n`` expected reductions (per cost) for all of the pool when each was chosen;
            ``-inf`` where it could not be.
    """

    chosen: Tensor
    scores: Tensor


def expected_reduction(
    model: SequentialGP,
    X: Tensor,
    sites: Tensor,
    criterion: str | Sequence[str] = "threshold-entropy",
    threshold: float | None = None,
    weights: Tensor | None = None,
    num_fantasies: int = 16,
    seed: int = 0,
    progress: bool = False,
    **arguments: Any,
) -> Tensor:
    """The expected reduction of uncertainty at sites by one observation, for many candidates.

    Without gradients and in single precision, from tables (`Uncertainty.fast`); for gradients, see
    `qExpectedUncertaintyReduction`.

    Args:
        model: A model of one output and one latent function. If it is a fantasy model, the result
            is the average over its batch.
        X: ``n x d`` candidates.
        sites: ``s x d`` sites whose uncertainty counts. If a candidate is one of them, it counts
            what an observation there says about that very site.
        criterion: One of `seqgp.acquisition.uncertainty.CRITERIA`, or several: then what is added
            up are relative reductions, each divided by the present uncertainty of its kind.
        threshold: What the prevalence (rate, level) is compared with, if the criterion does that.
        weights: ``s`` weights of the sites (population, say); by default ``1/s`` each.
        num_fantasies: Outcomes that are drawn for each candidate; if no more are possible, all
            of them count with their probabilities.
        seed: Seed of the draws, which are the same for all candidates.
        progress: Whether to show a progress bar (only on a terminal).
        arguments: Per-point arguments of the likelihood at the candidates (``total_count=``),
            numbers or of shape ``n``.

    Returns:
        ``n`` scores.

    Example:
        >>> import torch
        >>> from seqgp import OverdispersedBinomialLikelihood, SequentialGP
        >>> X = torch.rand(30, 2, dtype=torch.double)
        >>> Y = torch.binomial(torch.full((30, 1), 50.0).to(X), X.prod(-1, keepdim=True))
        >>> model = SequentialGP(X, Y, likelihood=OverdispersedBinomialLikelihood(50))
        >>> pool = torch.rand(100, 2, dtype=torch.double)
        >>> expected_reduction(model, pool, pool, threshold=0.3).shape
        torch.Size([100])
    """
    _check_arguments(model, arguments, expected_reduction)
    uncertainties, sites = _check(model, sites, criterion, threshold)
    check_inputs(X, sites.shape[-1], "X")
    weights = _weights(weights, sites)
    if len(X) == 0:
        return X.new_empty(0)
    model.eval()
    with torch.no_grad():
        at = marginals(model, X, sites)
        ahead = look_ahead(model.likelihood, at, num_fantasies, seed, arguments)
        nugget = nugget_of(model.likelihood)
        return score_candidates(uncertainties, at, ahead, X, sites, weights, nugget, progress)


def score_candidates(
    uncertainties: Sequence[Uncertainty],
    at: Marginals,
    ahead: LookAhead,
    X: Tensor,
    sites: Tensor,
    weights: Tensor,
    nugget: Tensor | float = 0.0,
    progress: bool = False,
) -> Tensor:
    """Expected reductions, ``n``, given what `look_ahead` says; in blocks of bounded size."""
    single = PRECISION
    w, m, v = (t.to(single) for t in (weights, at.site_mean, at.site_variance + nugget))
    now = torch.stack([(u.fast(m, v) @ w).mean() for u in uncertainties])
    unit = now.reciprocal() if len(now) > 1 else torch.ones_like(now)
    size = max(BLOCK_ELEMENTS // (ahead.gain.shape[-2] * len(sites)), 1)
    wide = size * max(COVARIANCE_ELEMENTS // (size * len(sites)), 1)
    scores = X.new_empty(len(X))
    disable = None if progress else True
    with progress_bar(total=len(X), desc="score", unit=" sites", disable=disable) as bar:
        for first in range(0, len(X), wide):
            chunk = slice(first, min(first + wide, len(X)))
            c = _with_own(at.cross(chunk), X[chunk], sites, nugget).to(single)
            for start in range(chunk.start, chunk.stop, size):
                part = slice(start, min(start + size, chunk.stop))
                c_part = c[..., part.start - first : part.stop - first, :]
                here = ahead.at(part, single)
                after = _average(uncertainties, m, v, c_part, here, w)
                scores[part] = ((now.unsqueeze(-1) - after) * unit.unsqueeze(-1)).sum(0).to(scores)
                bar.update(part.stop - part.start)
    return scores


def _average(
    uncertainties: Sequence[Uncertainty],
    m: Tensor,
    v: Tensor,
    c: Tensor,
    ahead: LookAhead,
    weights: Tensor,
) -> Tensor:
    """Expected uncertainties of all kinds after observations at ``k`` candidates, ``kinds x k``.

    One member of the batch at a time: blocks are ``k x fantasies x sites``.
    """
    batch = m.shape[:-1]
    gain, fall, probability = ahead
    if probability is None:
        probability = torch.ones_like(gain)
    tensors = ((m, 1), (v, 1), (c, 2), (gain, 2), (fall, 2), (probability, 2))
    parts = [
        tensor.expand(*batch, *tensor.shape[-kept:]).reshape(-1, *tensor.shape[-kept:])
        for tensor, kept in tensors
    ]
    total = c.new_zeros(len(uncertainties), c.shape[-2])
    tiny = torch.finfo(c.dtype).eps
    for mean, variance, cross, g, r, p in zip(*parts, strict=True):
        cross = cross.unsqueeze(-2)  # k x 1 x s
        after = torch.addcmul(mean, g.mT.unsqueeze(-1), cross)
        left = torch.addcmul(variance, r.mT.unsqueeze(-1), cross.square(), value=-1)
        torch.maximum(left, tiny * variance, out=left)
        for row, uncertainty in zip(total, uncertainties, strict=True):
            row += (p.mT * (uncertainty.fast(after, left) @ weights)).sum(-1) / p.sum(0)
    return total / max(len(parts[0]), 1)


def _with_own(c: Tensor, X: Tensor, sites: Tensor, nugget: Tensor | float) -> Tensor:
    """Covariances ``... x k x s`` of observations with sites, which may be the very same."""
    if not isinstance(nugget, Tensor) or not bool(nugget.any()):
        return c
    row, column = (X[..., :1] == sites[..., 0]).nonzero(as_tuple=True)
    same = (X[row] == sites[column]).all(-1)
    own = torch.zeros(c.shape[-2:], dtype=c.dtype, device=c.device)
    own[row[same], column[same]] = 1.0
    return c + own * nugget


class qExpectedUncertaintyReduction(AcquisitionFunction):
    r"""The expected reduction of uncertainty at sites, by observations anywhere in a box.

    For a single point the outcomes are conditioned on in closed form, as in `expected_reduction`;
    several points (and pending ones) are fantasised jointly. Differentiable: `optimize_acqf` runs
    on it. The gradient of a single point is that of the expectation; that of several leaves out
    that discrete outcomes become more or less probable when the points move.

    Args:
        model: A model of one output and one latent function.
        sites: ``s x d`` sites whose uncertainty counts.
        criterion: One of `seqgp.acquisition.uncertainty.CRITERIA`, or several: then what is added
            up are relative reductions, each divided by the present uncertainty of its kind.
        threshold: What the prevalence (rate, level) is compared with, if the criterion does that.
        weights: ``s`` weights of the sites; by default ``1/s`` each.
        num_fantasies: Outcomes that are drawn for each candidate; if no more are possible, all
            of them count with their probabilities.
        seed: Seed of the draws.
        X_pending: ``p x d`` points that will have been observed as well.
        arguments: Per-point arguments of the likelihood at a candidate (``total_count=``), numbers.

    Example:
        >>> import torch
        >>> from botorch.optim import optimize_acqf
        >>> from gpytorch.likelihoods import BernoulliLikelihood
        >>> from seqgp import SequentialGP
        >>> X = torch.rand(20, 2, dtype=torch.double)
        >>> Y = (X.sum(-1, keepdim=True) > 1).to(X)
        >>> model = SequentialGP(X, Y, likelihood=BernoulliLikelihood())
        >>> grid = torch.rand(200, 2, dtype=torch.double)
        >>> acqf = qExpectedUncertaintyReduction(model, grid, threshold=0.5)
        >>> bounds = torch.tensor([[0.0, 0.0], [1.0, 1.0]], dtype=torch.double)
        >>> best, _ = optimize_acqf(acqf, bounds, q=1, num_restarts=2, raw_samples=16)
        >>> best.shape
        torch.Size([1, 2])
    """

    model: SequentialGP
    sites: Tensor
    weights: Tensor

    def __init__(
        self,
        model: SequentialGP,
        sites: Tensor,
        criterion: str | Sequence[str] = "threshold-entropy",
        threshold: float | None = None,
        weights: Tensor | None = None,
        num_fantasies: int = 16,
        seed: int = 0,
        X_pending: Tensor | None = None,
        **arguments: Any,
    ) -> None:
        _check_arguments(model, arguments, type(self).__init__)
        uncertainties, sites = _check(model, sites, criterion, threshold)
        super().__init__(model)
        self.uncertainties = uncertainties
        self.register_buffer("sites", sites)
        self.register_buffer("weights", _weights(weights, sites))
        self.num_fantasies, self.seed, self.arguments = num_fantasies, seed, arguments
        self.sampler = SobolQMCNormalSampler(torch.Size([num_fantasies]), seed=seed)
        self.set_X_pending(X_pending)

    @concatenate_pending_points
    @t_batch_mode_transform()  # type: ignore[arg-type]
    def forward(self, X: Tensor) -> Tensor:
        """The value at ``b x q x d`` candidates, of shape ``b``."""
        look = self._one if X.shape[-2] == 1 else self._several
        total = X.new_zeros(X.shape[:-2])
        for now, after in look(X):
            unit = now if len(self.uncertainties) > 1 else 1.0
            total = total + (now - after) / unit
        return total

    def _one(self, X: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Uncertainties of all kinds now, and after an observation at ``b x 1 x d`` points."""
        nugget = nugget_of(self.model.likelihood)
        flat = X.reshape(-1, X.shape[-1])
        at = marginals(self.model, flat, self.sites)
        gain, fall, probability = look_ahead(
            self.model.likelihood, at, self.num_fantasies, self.seed, self.arguments
        )
        if probability is None:
            probability = torch.ones_like(gain)
        c = _with_own(at.cross(slice(None)), flat, self.sites, nugget).unsqueeze(-3)
        start = (at.site_variance + nugget).unsqueeze(-2).unsqueeze(-2)
        mean = at.site_mean.unsqueeze(-2).unsqueeze(-2) + gain.unsqueeze(-1) * c
        variance = start - fall.unsqueeze(-1) * c.square()
        variance = torch.maximum(variance, torch.finfo(c.dtype).eps * start)
        for uncertainty in self.uncertainties:
            now = uncertainty(at.site_mean, at.site_variance + nugget) @ self.weights
            values = uncertainty(mean, variance) @ self.weights  # ... x f x n
            after = (probability * values).sum(-2) / probability.sum(-2)
            yield now.mean(), after.reshape(-1, len(flat)).mean(0).reshape(X.shape[:-2])

    def _several(self, X: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """The same after observations at ``b x q x d`` points."""
        nugget = nugget_of(self.model.likelihood)
        fantasies = self.model.fantasize(X, self.sampler, **self.arguments)
        sites = self.sites.reshape(*[1] * (X.dim() - 2), *self.sites.shape)
        posteriors: tuple[Any, Any] = self.model.posterior(self.sites), fantasies.posterior(sites)
        moments = [(p.mean.squeeze(-1), p.variance.squeeze(-1) + nugget) for p in posteriors]
        for uncertainty in self.uncertainties:
            now, after = (uncertainty(*each) @ self.weights for each in moments)
            yield now.mean(), after.reshape(-1, *X.shape[:-2]).mean(0)


def select_from_pool(
    model: SequentialGP,
    pool: Tensor,
    q: int = 1,
    criterion: str | Sequence[str] = "threshold-entropy",
    threshold: float | None = None,
    surveyed: Tensor | None = None,
    available: Tensor | None = None,
    costs: Tensor | None = None,
    weights: Tensor | None = None,
    num_fantasies: int = 16,
    num_batch_fantasies: int = 8,
    seed: int = 0,
    progress: bool = False,
    **arguments: Any,
) -> Selection:
    """The sites of a pool to observe next, those whose outcomes reduce uncertainty the most.

    One after the other: each site is chosen given fantasised outcomes at those before it, so that
    a batch does not ask the same question twice.

    Args:
        model: A model of one output and one latent function.
        pool: ``n x d`` sites.
        q: How many to choose.
        criterion: One of `seqgp.acquisition.uncertainty.CRITERIA`, or several: then what is added
            up are relative reductions, each divided by the present uncertainty of its kind.
        threshold: What the prevalence (rate, level) is compared with, if the criterion does that.
        surveyed: ``n`` booleans, or indices: sites that have been observed. They are not chosen,
            and their uncertainty no longer counts.
        available: ``n`` booleans, or indices: sites that may be chosen. The uncertainty of the
            others counts.
        costs: ``n`` positive costs; what is maximised is the reduction per cost.
        weights: ``n`` weights of the sites; by default all alike.
        num_fantasies: Outcomes that are drawn for each candidate; if no more are possible, all
            of them count with their probabilities.
        num_batch_fantasies: Joint outcomes that are drawn for those already in the batch.
        seed: Seed of the draws.
        progress: Whether to show a progress bar (only on a terminal).
        arguments: Per-point arguments of the likelihood (``total_count=``), numbers or ``n``.

    Example:
        >>> import torch
        >>> from seqgp import BinomialLikelihood, SequentialGP
        >>> pool = torch.rand(60, 2, dtype=torch.double)
        >>> Y = torch.full((10, 1), 3.0, dtype=torch.double)
        >>> model = SequentialGP(pool[:10], Y, likelihood=BinomialLikelihood(20))
        >>> seen = torch.arange(10)
        >>> chosen = select_from_pool(model, pool, q=2, threshold=0.2, surveyed=seen).chosen
        >>> bool((chosen >= 10).all()), len(chosen)
        (True, 2)
    """
    _check_arguments(model, arguments, select_from_pool)
    _, pool = _check(model, pool, criterion, threshold, "pool")
    n = len(pool)
    for name, value in arguments.items():
        if isinstance(value, Tensor) and value.dim() and value.shape != (n,):
            raise ValueError(
                f"{name}: expected a number, or {n} of them, one for each site of the pool; got "
                f"shape {tuple(value.shape)}."
            )
    counts = ~_mask(surveyed, n, pool.device, "surveyed", False)
    open_ = counts & _mask(available, n, pool.device, "available", True)
    if not open_.any():
        raise ValueError("surveyed, available: no site of the pool is left to choose.")
    if not is_whole(q) or q < 1 or int(open_.sum()) < q:
        raise ValueError(f"q: expected 1 to {int(open_.sum())} of the sites left, got {q}.")
    if costs is not None:
        costs = torch.as_tensor(costs, device=pool.device)
        if costs.shape != (n,) or not bool((costs > 0).all()):
            raise ValueError(f"costs: expected {n} positive numbers, got {tuple(costs.shape)}.")
    weights = _weights(weights, pool)
    chosen: list[int] = []
    rows = []
    while True:
        conditioned = model
        if chosen:
            sampler = SobolQMCNormalSampler(torch.Size([num_batch_fantasies]), seed=seed + 1)
            index = torch.tensor(chosen, device=pool.device)
            with torch.no_grad():
                conditioned = model.fantasize(pool[index], sampler, **_at(arguments, index, n))
        candidates, kept = open_.nonzero().squeeze(-1), counts.nonzero().squeeze(-1)
        scores = torch.full((n,), -torch.inf, dtype=pool.dtype, device=pool.device)
        scores[candidates] = expected_reduction(
            conditioned,
            pool[candidates],
            pool[kept],
            criterion,
            threshold,
            weights[kept],
            num_fantasies,
            seed,
            progress,
            **_at(arguments, candidates, n),
        )
        if costs is not None:
            scores[candidates] /= costs.to(scores)[candidates]
        rows.append(scores)
        chosen.append(int(scores.argmax()))
        if len(chosen) == q:
            return Selection(torch.tensor(chosen, device=pool.device), torch.stack(rows))
        open_[chosen[-1]] = counts[chosen[-1]] = False


# -------------------------------------------------------------------- checks


def _check_arguments(model: SequentialGP, arguments: dict[str, Any], function: Any) -> None:
    """First of all: an option that is misspelt would be missed elsewhere."""
    if not isinstance(model, SequentialGP):
        raise TypeError(f"model: expected a SequentialGP, got {type(model).__name__}.")
    check_arguments(model.likelihood, arguments, inspect.signature(function).parameters)


def _check(
    model: SequentialGP,
    sites: Tensor,
    criterion: str | Sequence[str],
    threshold: float | None,
    name: str = "sites",
) -> tuple[list[Uncertainty], Tensor]:
    if model.num_outputs != 1 or not has_one_latent(model.likelihood):
        raise ValueError(
            "model: expected one output and one latent function; choose an output of several with "
            "model.subset_output."
        )
    if hasattr(model, "outcome_transform"):
        raise ValueError(
            "model: with an outcome_transform the latent function is on another scale than the "
            "threshold; transform the targets beforehand instead."
        )
    check_inputs(sites, model.train_inputs[0].shape[-1], name)
    if sites.dim() != 2 or len(sites) == 0:
        raise ValueError(f"{name}: expected shape n x d, got {tuple(sites.shape)}.")
    criteria = [criterion] if isinstance(criterion, str) else list(criterion)
    if not criteria:
        raise ValueError("criterion: expected at least one, got none.")
    link = link_of(model.likelihood)
    return [Uncertainty(each, link, threshold) for each in criteria], sites


def _weights(weights: Tensor | None, sites: Tensor) -> Tensor:
    n = len(sites)
    if weights is None:
        return sites.new_full((n,), 1 / n)
    weights = torch.as_tensor(weights, device=sites.device)
    if weights.shape != (n,) or not bool((weights >= 0).all() & (weights.sum() > 0)):
        raise ValueError(
            f"weights: expected {n} of at least zero, and not all zero, got a tensor of shape "
            f"{tuple(weights.shape)}."
        )
    return weights.to(sites)


def _mask(given: Tensor | None, n: int, device: torch.device, name: str, default: bool) -> Tensor:
    """A mask of ``n`` booleans from one, or from indices."""
    if given is None:
        return torch.full((n,), default, device=device)
    if not isinstance(given, Tensor):  # a list, an array
        given = torch.as_tensor(given)
        given = given.long() if given.numel() == 0 else given
    if given.dtype == torch.bool and given.shape == (n,):
        return given.to(device).clone()
    if given.dtype in (torch.int64, torch.int32) and given.dim() == 1:
        if n > 2 and given.shape == (n,) and bool(((given == 0) | (given == 1)).all()):
            raise ValueError(f"{name}: {n} zeros and ones, a mask? Expected booleans or indices.")
        if given.numel() and not (int(given.min()) >= 0 and int(given.max()) < n):
            raise ValueError(f"{name}: expected indices from 0 to {n - 1}.")
        mask = torch.zeros(n, dtype=torch.bool, device=device)
        mask[given.to(device).long()] = True
        return mask
    raise ValueError(
        f"{name}: expected {n} booleans or a list of indices, got {given.dtype} of shape "
        f"{tuple(given.shape)}."
    )


def _at(arguments: dict[str, Any], index: Tensor, n: int) -> dict[str, Any]:
    """Per-point arguments of some of ``n`` points."""
    return {
        key: value[index] if isinstance(value, Tensor) and value.shape == (n,) else value
        for key, value in arguments.items()
    }

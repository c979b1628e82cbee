r"""The expected reduction of uncertainty by an observation.

With an uncertainty :math:`u(m_a, v_a)` at each of a set of locations
(`seqgp.acquisition.uncertainty`), the score of observing at :math:`x` is the expected reduction of
the weighted average,

.. math::
    \sum_a w_a \left( u(m_a, v_a) - E_{y | x} \, u(m'_a, v'_a) \right).

The criterion ``"volume"`` scores the expected absolute change of the volume of a level set instead
(EAVC, Letham et al., 2022), :math:`E_{y | x} |V_y - V|`, where
:math:`V = \sum_a w_a P(\theta_a > t)`.
The reduction of ``"threshold-entropy"`` is the mutual information between the outcome and the level
set, summed over locations ("global"). Without locations it is the mutual information with the level
set at the candidate itself ("local").

The effect of an outcome is elementwise arithmetic (`seqgp.acquisition.look_ahead`), so there is no
need to sample jointly at the locations: candidates x fantasies x locations numbers are computed in
chunks. The nugget of an `OverdispersedBinomialLikelihood` belongs to a location: it is part of the
uncertainty there, and an observation there reduces it.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from botorch.acquisition.acquisition import AcquisitionFunction
from botorch.sampling.normal import SobolQMCNormalSampler
from botorch.utils.transforms import concatenate_pending_points, t_batch_mode_transform
from torch import Tensor

from seqgp.acquisition.look_ahead import (
    PRECISION,
    LookAhead,
    Marginals,
    latent_moments,
    look_ahead,
    marginals,
)
from seqgp.acquisition.tasks import arguments_of_tasks, check_of_output, with_task
from seqgp.acquisition.uncertainty import Link, Uncertainty, linear_link, link_of, nugget_of
from seqgp.likelihoods.traits import has_one_latent
from seqgp.models.multi_task_gp import SequentialMultiTaskGP
from seqgp.models.outcomes import Affine, affine
from seqgp.models.sequential_gp import SequentialGP
from seqgp.progress import progress_bar
from seqgp.validation import check_arguments, check_inputs

#: Maximum number of elements of a block candidates x fantasies x locations.
BLOCK_ELEMENTS = 2**17

#: Maximum number of elements of a block of covariances candidates x locations.
COVARIANCE_ELEMENTS = 2**20


def expected_reduction(
    model: SequentialGP,
    X: Tensor,
    locations: Tensor | None,
    criterion: str | Sequence[str] = "threshold-entropy",
    threshold: float | None = None,
    weights: Tensor | None = None,
    num_fantasies: int = 16,
    seed: int = 0,
    progress: bool = False,
    **arguments: Any,
) -> Tensor:
    """The expected reduction of uncertainty at locations by one observation, for many candidates.

    This is fast: in single precision, from tables (`Uncertainty.fast`) and without gradients. Use
    `qExpectedUncertaintyReduction` for gradients.

    Args:
        model: A model of one output. The result for a fantasy model is the average over its batch.
        X: ``n x d`` candidates.
        locations: ``s x d`` locations whose uncertainty is to be reduced. They may include the
            candidates. With ``None``, each candidate is its own only location.
        criterion: One of `seqgp.acquisition.uncertainty.CRITERIA`, or several of them. The score of
            several is the sum of relative reductions, each divided by the present uncertainty.
            The score of ``"volume"`` is the expected absolute change of the volume.
        threshold: The threshold of the prevalence (rate, level), for criteria that have one.
        weights: ``s`` weights of the locations (populations, for example). By default ``1/s``.
        num_fantasies: The number of outcomes sampled for each candidate. If no more outcomes are
            possible, all of them are used, weighted by their probabilities.
        seed: Seed of the samples. All candidates share the same base samples.
        progress: Whether to show a progress bar (only on a terminal).
        arguments: Arguments of the likelihood at the candidates (``total_count=``), each a number
            or of shape ``n``.

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
    check_likelihood_arguments(model, arguments, expected_reduction)
    uncertainties, locations = checked_criteria(model, locations, criterion, threshold)
    X = with_task(model, X)
    check_inputs(X, model.num_inputs, "X")
    weights = checked_weights(weights, locations)
    if len(X) == 0:
        return X.new_empty(0)
    model.eval()
    arguments |= arguments_of_tasks(model, X, locations)
    with torch.no_grad():
        at = marginals(model, X, X[:0] if locations is None else locations)
        ahead = look_ahead(model.likelihood, at, num_fantasies, seed, arguments)
        nugget = nugget_of(model.likelihood)
        if locations is None:
            return _gain_at_candidates(uncertainties[0], at, ahead, nugget).to(X)
        assert weights is not None
        return score_candidates(uncertainties, at, ahead, X, locations, weights, nugget, progress)


def score_candidates(
    uncertainties: Sequence[Uncertainty],
    at: Marginals,
    ahead: LookAhead,
    X: Tensor,
    locations: Tensor,
    weights: Tensor,
    nugget: Tensor | float = 0.0,
    progress: bool = False,
) -> Tensor:
    """Expected reductions for all candidates, computed in blocks of bounded size.

    Args:
        uncertainties: The criteria.
        at: The posterior at candidates and locations.
        ahead: The effects of outcomes at the candidates.
        X: ``n x d`` candidates.
        locations: ``s x d`` locations.
        weights: ``s`` weights of the locations.
        nugget: The nugget of the likelihood.
        progress: Whether to show a progress bar (only on a terminal).

    Returns:
        ``n`` scores.
    """
    single = PRECISION
    w, m, v = (t.to(single) for t in (weights, at.location_mean, at.location_variance + nugget))
    now = torch.stack([(u.fast(m, v) @ w).mean() for u in uncertainties])
    unit = now.reciprocal() if len(now) > 1 else torch.ones_like(now)
    size = max(BLOCK_ELEMENTS // (ahead.gain.shape[-2] * len(locations)), 1)
    wide = size * max(COVARIANCE_ELEMENTS // (size * len(locations)), 1)
    scores = X.new_empty(len(X))
    disable = None if progress else True
    with progress_bar(total=len(X), desc="score", unit=" candidates", disable=disable) as bar:
        for first in range(0, len(X), wide):
            chunk = slice(first, min(first + wide, len(X)))
            c = _with_own(at.cross(chunk), X[chunk], locations, nugget).to(single)
            for start in range(chunk.start, chunk.stop, size):
                part = slice(start, min(start + size, chunk.stop))
                c_part = c[..., part.start - first : part.stop - first, :]
                here = ahead.at(part, single)
                gains = _expected_gains(uncertainties, now, m, v, c_part, here, w)
                scores[part] = (gains * unit.unsqueeze(-1)).sum(0).to(scores)
                bar.update(part.stop - part.start)
    return scores


def _expected_gains(
    uncertainties: Sequence[Uncertainty],
    now: Tensor,
    m: Tensor,
    v: Tensor,
    c: Tensor,
    ahead: LookAhead,
    weights: Tensor,
) -> Tensor:
    """Return the expected reductions ``criteria x k`` by observations at ``k`` candidates.

    It is computed for one member of the batch at a time, in blocks ``k x fantasies x s``.
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
        for row, uncertainty, present in zip(total, uncertainties, now, strict=True):
            values = uncertainty.fast(after, left) @ weights  # k x fantasies
            row += uncertainty.expected_gain(present, values, p.mT, dim=-1)
    return total / max(len(parts[0]), 1)


def _gain_at_candidates(
    uncertainty: Uncertainty, at: Marginals, ahead: LookAhead, nugget: Tensor | float
) -> Tensor:
    """Return ``n``: the expected reduction by an observation at its own location.

    The covariance of a candidate with itself is its variance, with the nugget.
    """
    variance = (at.variance + nugget).unsqueeze(-2)
    after = at.mean.unsqueeze(-2) + variance * ahead.gain
    left = variance - variance.square() * ahead.fall
    left = torch.maximum(left, torch.finfo(left.dtype).eps * variance)
    now = uncertainty(at.mean, at.variance + nugget)
    gains = uncertainty.expected_gain(now, uncertainty(after, left), ahead.probability, dim=-2)
    return gains.reshape(-1, gains.shape[-1]).mean(0)


def _with_own(c: Tensor, X: Tensor, locations: Tensor, nugget: Tensor | float) -> Tensor:
    """Add the nugget to covariances ``... x k x s`` where candidate and location are the same."""
    if not isinstance(nugget, Tensor) or not bool(nugget.any()):
        return c
    row, column = (X[..., :1] == locations[..., 0]).nonzero(as_tuple=True)
    same = (X[row] == locations[column]).all(-1)
    own = torch.zeros(c.shape[-2:], dtype=c.dtype, device=c.device)
    own[row[same], column[same]] = 1.0
    return c + own * nugget


class qExpectedUncertaintyReduction(AcquisitionFunction):
    r"""The expected reduction of uncertainty at locations, by observations anywhere in a box.

    This is a differentiable acquisition function for `optimize_acqf`. A single point is conditioned
    on in closed form, as in `expected_reduction`. Several points (and pending points) are
    fantasised jointly. The gradient of a single point is that of the expectation. The gradient of
    several points ignores that the probabilities of discrete outcomes change with the points.

    Args:
        model: A model of one output.
        locations: ``s x d`` locations whose uncertainty is to be reduced. With ``None``, each
            candidate is its own only location.
        criterion: One of `seqgp.acquisition.uncertainty.CRITERIA`, or several of them. The score of
            several is the sum of relative reductions, each divided by the present uncertainty.
            The score of ``"volume"`` is the expected absolute change of the volume.
        threshold: The threshold of the prevalence (rate, level), for criteria that have one.
        weights: ``s`` weights of the locations. By default ``1/s``.
        num_fantasies: The number of outcomes sampled for each candidate. If no more outcomes are
            possible, all of them are used, weighted by their probabilities.
        seed: Seed of the samples.
        X_pending: ``p x d`` points that will be observed as well.
        arguments: Arguments of the likelihood at a candidate (``total_count=``), as numbers.

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
    locations: Tensor | None
    weights: Tensor | None

    def __init__(
        self,
        model: SequentialGP,
        locations: Tensor | None,
        criterion: str | Sequence[str] = "threshold-entropy",
        threshold: float | None = None,
        weights: Tensor | None = None,
        num_fantasies: int = 16,
        seed: int = 0,
        X_pending: Tensor | None = None,
        **arguments: Any,
    ) -> None:
        check_likelihood_arguments(model, arguments, type(self).__init__)
        uncertainties, locations = checked_criteria(model, locations, criterion, threshold)
        super().__init__(model)
        self.uncertainties = uncertainties
        self.register_buffer("locations", locations)
        self.register_buffer("weights", checked_weights(weights, locations))
        self.num_fantasies, self.seed, self.arguments = num_fantasies, seed, arguments
        self.sampler = SobolQMCNormalSampler(torch.Size([num_fantasies]), seed=seed)
        self.set_X_pending(X_pending)

    @concatenate_pending_points
    @t_batch_mode_transform()  # type: ignore[arg-type]
    def forward(self, X: Tensor) -> Tensor:
        """Return the value at ``b x q x d`` candidates, of shape ``b``."""
        look = self._one if X.shape[-2] == 1 else self._several
        total = X.new_zeros(X.shape[:-2])
        for now, gain in look(X):
            total = total + (gain if len(self.uncertainties) == 1 else gain / now)
        return total

    def _one(self, X: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield each present uncertainty, and its expected reduction by ``b x 1 x d`` points."""
        nugget = nugget_of(self.model.likelihood)
        flat = with_task(self.model, X.reshape(-1, X.shape[-1]))
        at = marginals(self.model, flat, flat[:0] if self.locations is None else self.locations)
        arguments = self.arguments | arguments_of_tasks(self.model, flat, self.locations)
        ahead = look_ahead(self.model.likelihood, at, self.num_fantasies, self.seed, arguments)
        if self.locations is None:
            gain = _gain_at_candidates(self.uncertainties[0], at, ahead, nugget)
            yield gain.new_ones(()), gain.reshape(X.shape[:-2])
            return
        assert self.weights is not None
        c = _with_own(at.cross(slice(None)), flat, self.locations, nugget).unsqueeze(-3)
        start = (at.location_variance + nugget).unsqueeze(-2).unsqueeze(-2)
        mean = at.location_mean.unsqueeze(-2).unsqueeze(-2) + ahead.gain.unsqueeze(-1) * c
        variance = start - ahead.fall.unsqueeze(-1) * c.square()
        variance = torch.maximum(variance, torch.finfo(c.dtype).eps * start)
        for uncertainty in self.uncertainties:
            now = uncertainty(at.location_mean, at.location_variance + nugget) @ self.weights
            values = uncertainty(mean, variance) @ self.weights  # ... x f x n
            gain = uncertainty.expected_gain(now.unsqueeze(-1), values, ahead.probability, dim=-2)
            yield now.mean(), gain.reshape(-1, len(flat)).mean(0).reshape(X.shape[:-2])

    def _several(self, X: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield each present uncertainty, and its expected reduction by ``b x q x d`` points."""
        nugget = nugget_of(self.model.likelihood)
        X = with_task(self.model, X)
        arguments_of_tasks(self.model, X, self.locations)  # checks the tasks
        fantasies = self.model.fantasize(X, self.sampler, **self.arguments)
        if self.locations is None:
            here, later, weights = X, X, X.new_full(X.shape[-2:-1], 1 / X.shape[-2])
        else:
            assert self.weights is not None
            here, weights = self.locations, self.weights
            later = here.reshape(*[1] * (X.dim() - 2), *here.shape)
        moments = []
        for model, where in ((self.model, here), (fantasies, later)):
            mean, variance = latent_moments(model, where)
            moments.append((mean, variance + nugget))
        for uncertainty in self.uncertainties:
            now, after = (uncertainty(*each) @ weights for each in moments)
            after = after.reshape(self.num_fantasies, -1, *X.shape[:-2])
            if self.locations is not None:
                now = now.mean()
            yield now.mean(), uncertainty.expected_gain(now, after, None, dim=0).mean(0)


# -------------------------------------------------------------------- checks


def check_likelihood_arguments(
    model: SequentialGP, arguments: dict[str, Any], function: Any
) -> None:
    """Raise for arguments that neither the likelihood nor the caller accepts.

    Args:
        model: The model.
        arguments: The arguments of the likelihood.
        function: The caller, whose parameters are suggested for a misspelt name.
    """
    if not isinstance(model, SequentialGP):
        raise TypeError(f"model: expected a SequentialGP, got {type(model).__name__}.")
    options = [
        parameter.name
        for parameter in inspect.signature(function).parameters.values()
        if parameter.kind is not parameter.VAR_KEYWORD
    ]
    check_arguments(model.likelihood, arguments, options)


def checked_criteria(
    model: SequentialGP,
    locations: Tensor | None,
    criterion: str | Sequence[str],
    threshold: float | None,
    name: str = "locations",
) -> tuple[list[Uncertainty], Tensor | None]:
    """Check the model and the locations, and make the criteria; return both.

    Args:
        model: The model.
        locations: ``s x d`` locations, or ``None`` for the candidates themselves.
        criterion: One or several of `seqgp.acquisition.uncertainty.CRITERIA`.
        threshold: The threshold, for criteria that have one.
        name: The name of the locations, for errors.
    """
    if model.num_outputs != 1:
        classes = not has_one_latent(model.likelihood)
        raise ValueError(
            "model: expected one output; "
            + (
                f"a {type(model.likelihood).__name__} has several, for which there is "
                "qNegIntegratedPosteriorVariance."
                if classes
                else "select an output with model.subset_output."
            )
        )
    link = model_link(model)
    if locations is not None:
        locations = with_task(model, locations, name)
        check_inputs(locations, model.num_inputs, name)
        if locations.dim() != 2 or len(locations) == 0:
            raise ValueError(f"{name}: expected shape n x d, got {tuple(locations.shape)}.")
        check_of_output(model, locations, name, "its uncertainty is to be reduced")
    criteria = [criterion] if isinstance(criterion, str) else list(criterion)
    if not criteria:
        raise ValueError("criterion: expected at least one, got none.")
    if len(criteria) > 1 and (locations is None or "volume" in criteria):
        raise ValueError(
            "criterion: several are combined by their relative reductions at locations, but "
            f"{'there are none' if locations is None else 'a volume is not reduced'}; got "
            f"{', '.join(map(repr, criteria))}."
        )
    return [Uncertainty(each, link, threshold) for each in criteria], locations


def model_link(model: SequentialGP) -> Link:
    """The link from the latent function of a model to the scale of its observations.

    Args:
        model: A model of one output.
    """
    link, transform = link_of(model.output_likelihood), getattr(model, "outcome_transform", None)
    if transform is None:
        return link
    inverse: Affine | None
    if isinstance(model, SequentialMultiTaskGP):
        inverse = model.output_scale
        if bool((inverse.offset == 0) & (inverse.scale == 1)):  # labels, for example
            return link
    else:
        inverse = affine(transform)
    if inverse is None or link.scale is None:
        raise ValueError(
            "model: with a non-linear outcome_transform the latent function and the threshold are "
            "on different scales; transform the targets beforehand instead."
        )
    return linear_link(float(inverse.offset), float(inverse.scale))


def checked_weights(weights: Tensor | None, locations: Tensor | None) -> Tensor | None:
    """Return ``s`` weights, by default all the same; raise if they are not valid.

    Args:
        weights: What was passed.
        locations: ``s x d`` locations. Without them there are no weights.
    """
    if locations is None:
        if weights is not None:
            raise ValueError("weights: expected None, since there are no locations to weight.")
        return None
    n = len(locations)
    if weights is None:
        return locations.new_full((n,), 1 / n)
    weights = torch.as_tensor(weights, device=locations.device)
    if weights.shape != (n,) or not bool((weights >= 0).all() & (weights.sum() > 0)):
        raise ValueError(
            f"weights: expected {n} nonnegative weights, not all zero, got a tensor of shape "
            f"{tuple(weights.shape)}."
        )
    return weights.to(locations)

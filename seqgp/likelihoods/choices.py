r"""Choices of the best one of several items, as observations of their differences.

A person who chooses item 1 of :math:`k` with softmax probabilities,

.. math:: p(1 \mid f) = \frac{e^{f_1}}{\sum_j e^{f_j}},

says something about :math:`k` utilities at once. Under a Gaussian, with the probabilities
:math:`p = \operatorname{softmax}(f)`, the gradient and the negative Hessian of the expected log
probability are

.. math::
    e_1 - E[p] = \sum_j E[p_j] (e_1 - e_j), \qquad
    E[\operatorname{diag}(p) - p p^T] = \sum_{i < j} E[p_i p_j] (e_i - e_j) (e_i - e_j)^T,

since :math:`\sum_j p_j = 1`. So the best Gaussian approximation of a choice, whose precision
couples all of its items, is a product of one-dimensional sites on the differences :math:`f_i - f_j`
of all :math:`k (k - 1) / 2` pairs, with :math:`\alpha_{1j} = E[p_j]`, :math:`\alpha_{ij} = 0` for
pairs of losers, and :math:`\beta_{ij} = E[p_i p_j] \ge 0`. Only the integrals are approximated.

The marginals of these differences determine their joint distribution: with :math:`v_{ij}` for the
variance of :math:`f_i - f_j`, the covariance of :math:`f_i - f_1` and :math:`f_j - f_1` is
:math:`(v_{1i} + v_{1j} - v_{ij}) / 2`. So a choice is stored as its pairs, which are observations
like those of comparisons, and only the likelihood looks at all of them together.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import torch
from gpytorch.distributions import MultivariateNormal
from torch import Tensor
from torch.distributions import Bernoulli

from seqgp.dual.linalg import broadcast_shapes, relative_jitter, scaled_cholesky
from seqgp.dual.sites import Expectations, Sites
from seqgp.likelihoods.discrete import BinomialLikelihood
from seqgp.likelihoods.expectations import expectations
from seqgp.likelihoods.predictive import log_predictive
from seqgp.likelihoods.quadrature import OneDimensionalLikelihood, base_samples, gauss_hermite

__all__ = ["ChoiceLikelihood"]

#: Nodes for each dimension of Gauss-Hermite quadrature, by the number of items of a choice.
_NODES = {3: 24, 4: 12, 5: 7}
#: The number of quasi-Monte-Carlo samples for choices among more items.
_SAMPLES = 4096
#: Maximum number of elements of samples in a chunk.
_AT_A_TIME = 2**20


class ChoiceLikelihood(OneDimensionalLikelihood):
    r"""The choice of the best one of several items, with softmax probabilities.

    Observations are of the differences of all pairs of the items of a choice, in the order of
    `pairs_of`, the chosen item first. ``choice_size`` says how many items that choice had. For two,
    it is a comparison with the logit link, which may also have been lost: its target is 1 or 0.
    Targets of other choices are 1. Log probabilities are those of the first pair of each choice;
    those of its other pairs are zero (and NaN for predictive ones).

    Attributes:
        link: ``"logit"``, of which the softmax of two items is a case.
        is_log_concave: ``True``.

    Example:
        >>> import torch
        >>> from seqgp import ChoiceLikelihood, PreferenceGP
        >>> items = torch.linspace(0, 1, 5, dtype=torch.double).unsqueeze(-1)
        >>> choices = torch.tensor([[4, 0, 1], [3, 2, 0]])  # 4 rather than 0 and 1; 3 of 2, 3 and 0
        >>> model = PreferenceGP(items, likelihood=ChoiceLikelihood(), choices=choices)
        >>> int(model.posterior(items).mean.argmin())
        0
    """

    link = "logit"
    is_log_concave = True

    def forward(
        self,
        function_samples: Tensor,
        *args: Any,
        choice_size: Tensor | None = None,
        **kwargs: Any,
    ) -> Bernoulli:
        """Whether the first item of each pair is preferred to the second, ``... x n``."""
        return Bernoulli(logits=function_samples)

    def expected_log_prob(
        self,
        observations: Tensor,
        function_dist: MultivariateNormal,
        *args: Any,
        choice_size: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """The expected log probability of each choice, ``... x n``, at its first pair."""
        moments = function_dist.mean, function_dist.variance
        return expectations(self, observations, *moments, choice_size=choice_size).log_prob

    def log_marginal(
        self,
        observations: Tensor,
        function_dist: MultivariateNormal,
        *args: Any,
        choice_size: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """The log predictive probability of each choice, ``... x n``, at its first pair."""
        moments = function_dist.mean, function_dist.variance
        return log_predictive(self, observations, *moments, choice_size=choice_size)


#: The likelihood of a choice between two items.
_COMPARISON = BinomialLikelihood(total_count=1, link="logit")


def pairs_of(k: int) -> tuple[list[int], list[int]]:
    """Return the pairs of items of a choice; those with the chosen item, item 0, come first.

    Args:
        k: The number of items.

    Returns:
        The first items, and the second ones, of ``k (k - 1) / 2`` pairs.
    """
    pairs = [(i, j) for i in range(k) for j in range(i + 1, k)]
    return [i for i, _ in pairs], [j for _, j in pairs]


def choices_among(choice_size: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Yield the choices that ``n`` observations belong to.

    Args:
        choice_size: ``... x n``, the same for all members of a batch. The pairs of a choice are
            next to each other.

    Yields:
        A number ``k`` of items, and ``c x k (k - 1) / 2`` indices of the pairs of each choice
        among so many.
    """
    size = choice_size if choice_size.dim() == 1 else choice_size.flatten(0, -2)[0]
    for k in size.unique().long().tolist():
        index, number = (size == k).nonzero().squeeze(-1), k * (k - 1) // 2
        if len(index) % number:
            raise ValueError(
                f"choice_size: expected all {number} pairs of each choice among {k} items, got "
                f"{len(index)} pairs."
            )
        yield k, index.reshape(-1, number)


def first_parts(choice_size: Tensor) -> Tensor:
    """Return ``n``: for each observation, the index of the first pair of its choice.

    Args:
        choice_size: ``... x n``, as for `choices_among`.
    """
    n = choice_size.shape[-1]
    first = torch.arange(n, device=choice_size.device)
    for k, index in choices_among(choice_size):
        if k > 2:
            first[index] = index[:, :1].expand_as(index)
    return first


@expectations.register(ChoiceLikelihood)
def _expectations(
    likelihood: ChoiceLikelihood,
    targets: Tensor,
    mean: Tensor,
    variance: Tensor,
    choice_size: Tensor | None = None,
    **kwargs: Any,
) -> Expectations:
    if choice_size is None:
        return expectations(_COMPARISON, targets, mean, variance)
    shape = broadcast_shapes(targets.shape, mean.shape, variance.shape)
    targets, mean, variance = (t.expand(shape) for t in (targets, mean, variance))
    result = [torch.zeros_like(mean) for _ in range(3)]
    for k, index in choices_among(choice_size):
        if k == 2:
            index = index.squeeze(-1)
            parts = [t[..., index] for t in (targets, mean, variance)]
            values = expectations(_COMPARISON, *parts)
        else:
            values = _of_choices(mean[..., index], variance[..., index], k)
            values = Expectations(*(t.flatten(-2) for t in values))
            index = index.flatten()
        result = [r.index_copy(-1, index, v) for r, v in zip(result, values, strict=True)]
    return Expectations(*result)


def _of_choices(mean: Tensor, variance: Tensor, k: int) -> Expectations:
    r"""Expectations of choices among ``k > 2`` items, from marginals ``... x c x P`` of pairs.

    By Stein's lemma :math:`\beta` is an expectation of products of probabilities, not a derivative
    of the quadrature's value: it is never negative.
    """
    first, second = pairs_of(k)
    shape = mean.shape
    mean, variance = mean.reshape(-1, len(first)), variance.reshape(-1, len(first))
    nodes, log_weights = _nodes(k - 1, mean)
    weights, parts = log_weights.exp(), []
    size = max(_AT_A_TIME // (k * len(nodes)), 1)
    for m, v in zip(mean.split(size), variance.split(size), strict=True):
        log_p = _log_probabilities(m, v, k, nodes)  # c x s x k
        p = log_p.exp()
        products = (p * weights.unsqueeze(-1)).mT @ p
        beta = products[:, first, second]
        alpha = weights @ p[..., 1:]
        zeros = torch.zeros_like(beta)
        log_prob = torch.cat([(log_p[..., 0] @ weights).unsqueeze(-1), zeros[:, 1:]], -1)
        parts.append((log_prob, torch.cat([alpha, zeros[:, k - 1 :]], -1), beta))
    if not parts:
        return Expectations(*(torch.zeros(shape).to(mean) for _ in range(3)))
    return Expectations(*(torch.cat([part[i] for part in parts]).reshape(shape) for i in range(3)))


@log_predictive.register(ChoiceLikelihood)
def _log_predictive(
    likelihood: ChoiceLikelihood,
    targets: Tensor,
    mean: Tensor,
    variance: Tensor,
    choice_size: Tensor | None = None,
    **kwargs: Any,
) -> Tensor:
    if choice_size is None:
        return log_predictive(_COMPARISON, targets, mean, variance)
    shape = broadcast_shapes(targets.shape, mean.shape, variance.shape)
    targets, mean, variance = (t.expand(shape) for t in (targets, mean, variance))
    result = torch.full_like(mean, torch.nan)
    for k, index in choices_among(choice_size):
        first = index[:, 0]
        if k == 2:
            parts = [t[..., first] for t in (targets, mean, variance)]
            value = log_predictive(_COMPARISON, *parts)
        else:
            m, v = mean[..., index], variance[..., index]
            nodes, log_weights = _nodes(k - 1, m)
            log_p = _log_probabilities(m, v, k, nodes)[..., 0]
            value = (log_weights + log_p).logsumexp(-1)
        result = result.index_copy(-1, first, value)
    return result


def left_out(
    site: Sites, mean: Tensor, variance: Tensor, choice_size: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    r"""Marginals of observations ``... x n``, each without what it says itself.

    A site :math:`(\lambda_i, \beta_i)` taken out of a posterior of mean :math:`g_i` and variance
    :math:`s_i` leaves the precision :math:`1 / s_i - \beta_i` and the natural mean
    :math:`g_i / s_i - \lambda_i`. The sites of a choice are taken out together: with :math:`M` for
    the map from the differences with the chosen item, of covariance :math:`L L^T`, to those of all
    pairs, they are :math:`B = M^T \operatorname{diag}(\beta) M` and :math:`M^T \lambda`, and leave
    the covariance :math:`L (I - L^T B L)^{-1} L^T`.

    Args:
        site: Their sites.
        mean: Posterior means, centred like the sites.
        variance: Posterior variances.
        choice_size: The sizes of choices, if some of the observations are parts of such.
    """
    eps = torch.finfo(variance.dtype).eps
    share = (1 - site.beta * variance).clamp_min(eps)
    result = (mean - variance * site.lam) / share, variance / share
    for k, index in [] if choice_size is None else choices_among(choice_size):
        if k == 2:
            continue
        first, second = pairs_of(k)
        M = mean.new_zeros(len(first), k)
        M[range(len(first)), first], M[range(len(first)), second] = -1.0, 1.0
        M = M[:, 1:]  # the difference of the chosen item with itself is zero
        m, lam, beta = (t.expand_as(mean)[..., index] for t in (mean, *site))
        L = scaled_cholesky(covariance_of(variance[..., index], k), relative_jitter(mean.dtype))
        root = M @ L
        e, U = torch.linalg.eigh(root.mT @ (beta.unsqueeze(-1) * root))
        root = (root @ U) * (1 - e).clamp_min(eps).rsqrt().unsqueeze(-2)
        pull = root.mT @ (beta * m - lam).unsqueeze(-1)
        values = m + (root @ pull).squeeze(-1), root.square().sum(-1)
        pairs = zip(result, values, strict=True)
        new_mean, new_variance = (
            r.index_copy(-1, index.flatten(), v.flatten(-2)) for r, v in pairs
        )
        result = new_mean, new_variance
    return result


def _log_probabilities(mean: Tensor, variance: Tensor, k: int, nodes: Tensor) -> Tensor:
    """``... x s x k`` log probabilities of all items of choices, the chosen one first.

    Args:
        mean: ``... x P``, of the differences of pairs.
        variance: ``... x P``.
        k: The number of items.
        nodes: ``s x (k - 1)``, standard normal.
    """
    root = scaled_cholesky(covariance_of(variance, k), relative_jitter(mean.dtype))
    f = nodes @ root.mT - mean[..., None, : k - 1]
    return torch.nn.functional.pad(f, (1, 0)).log_softmax(-1)


def covariance_of(variance: Tensor, k: int) -> Tensor:
    """``... x (k - 1) x (k - 1)``, the covariance of the losers' differences with the chosen item.

    Args:
        variance: ``... x P``, variances of the differences of all pairs.
        k: The number of items.
    """
    own = variance[..., : k - 1]
    first, second = pairs_of(k - 1)
    between = variance.new_zeros(*variance.shape[:-1], k - 1, k - 1)
    between[..., first, second] = variance[..., k - 1 :]
    return 0.5 * (own.unsqueeze(-1) + own.unsqueeze(-2) - between - between.mT)


def _nodes(dim: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``s x dim`` standard normal nodes, and ``s`` logarithms of their weights."""
    return _rule(dim, like.dtype, like.device)


@lru_cache(maxsize=32)
def _rule(dim: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    if dim + 1 not in _NODES:
        nodes = base_samples(dim, _SAMPLES, dtype, device)
        return nodes, torch.full_like(nodes[:, 0], 1 / len(nodes)).log()
    points, weights = gauss_hermite(_NODES[dim + 1], dtype, device)
    nodes = torch.cartesian_prod(*[points] * dim)
    total = torch.cartesian_prod(*[weights] * dim).prod(-1)
    some = total > 1e-3 * torch.finfo(dtype).eps * total.max()  # the others add nothing
    total = total[some] / total[some].sum()
    return nodes[some], total.log()

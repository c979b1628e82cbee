r"""The information that a duel contains about which item is the best."""

from __future__ import annotations

from typing import Any

import torch
from botorch.acquisition.acquisition import AcquisitionFunction
from botorch.utils.sampling import draw_sobol_normal_samples
from botorch.utils.transforms import t_batch_mode_transform
from torch import Tensor

from seqgp.dual.linalg import relative_jitter, scaled_cholesky, solve_lower
from seqgp.likelihoods import TieLikelihood, log_predictive
from seqgp.models.comparisons import difference_coefficients
from seqgp.models.preference_gp import PreferenceGP
from seqgp.validation import check_count, check_inputs, check_instance


class InformationAboutBest(AcquisitionFunction):
    r"""The mutual information of the answer to a duel and the best of some items, in nats.

    With the answer :math:`y`, the index :math:`b` of the best item and the entropy :math:`H` of
    answers,

    .. math:: I(y; b) = H(p(y)) - \sum_i p(b = i) \, H(p(y \mid b = i)).

    The utilities :math:`u` of the items are sampled, which gives :math:`p(b)`. Given a sample, the
    difference that is compared is Gaussian, and :math:`p(y | u)` an integral in one dimension: in
    closed form with the probit link, by quadrature with the logit link. Averages of it over the
    samples with :math:`b = i` are :math:`p(y | b = i)`. The average of a finite number of samples
    overestimates the information, by about the number of items that could be the best over twice
    the number of samples.

    Args:
        model: The model.
        items: ``n x d`` items, of which the best is sought.
        num_samples: The number of samples of their utilities.

    Example:
        >>> import torch
        >>> from seqgp import PreferenceGP
        >>> from seqgp.acquisition import InformationAboutBest
        >>> items = torch.linspace(0, 1, 5, dtype=torch.double).unsqueeze(-1)
        >>> model = PreferenceGP(items, torch.tensor([[4, 0], [4, 1], [3, 0], [3, 1]] * 3))
        >>> information = InformationAboutBest(model, items)
        >>> with torch.no_grad():  # between the first two, between the last two
        ...     values = information(torch.stack([items[:2], items[-2:]]))
        >>> int(values.argmax())
        1
    """

    _root: Tensor
    _normal: Tensor
    _is_best: Tensor

    def __init__(self, model: PreferenceGP, items: Tensor, num_samples: int = 512) -> None:
        super().__init__(model)
        check_instance(model, PreferenceGP, "model", optional=False)
        check_inputs(items, model.num_inputs, "items")
        check_count(num_samples, "num_samples", optional=False)
        if items.dim() != 2 or len(items) < 2:
            raise ValueError(
                f"items: expected shape n x d, at least two of them, got {tuple(items.shape)}."
            )
        self.items = items.detach()
        with torch.no_grad():
            posterior: Any = model.posterior(items)
            f = posterior.distribution
            root = scaled_cholesky(f.covariance_matrix, relative_jitter(items.dtype))
            z = draw_sobol_normal_samples(
                len(items), num_samples, items.device, items.dtype, seed=0
            )
            best = (f.mean + z @ root.mT).argmax(-1)
        self._root, self._normal = root, z
        is_best = torch.nn.functional.one_hot(best, len(items)).to(items)
        self._is_best = is_best[:, is_best.any(0)]  # items that could be the best

    @t_batch_mode_transform(expected_q=2)  # type: ignore[arg-type]
    def forward(self, X: Tensor) -> Tensor:
        """Return the information of duels.

        Args:
            X: ``b x 2 x d`` pairs of items.

        Returns:
            ``b`` values.
        """
        n = len(self.items)
        points = torch.cat([self.items.expand(*X.shape[:-2], *self.items.shape), X], -2)
        posterior: Any = self.model.posterior(points)
        f = posterior.distribution
        S, mean = f.covariance_matrix, f.mean[..., n:]
        likelihood = self.model.comparison_likelihood
        c = difference_coefficients(likelihood, X.new_empty(1, 2, 1)).squeeze(0)
        # Covariance of the difference h = c^T f(X) with the items, in the basis of the samples.
        cross = solve_lower(self._root, (S[..., :n, n:] @ c).unsqueeze(-1)).squeeze(-1)
        variance = (S[..., n:, n:] @ c @ c - cross.square().sum(-1)).clamp_min(0)
        h = (mean @ c).unsqueeze(-1) + cross @ self._normal.mT  # ... x samples
        num_answers = 3 if isinstance(likelihood, TieLikelihood) else 2
        h = h.expand(num_answers, *h.shape)
        y = torch.arange(num_answers, dtype=h.dtype, device=h.device)
        y = y.reshape(-1, *[1] * (h.dim() - 1)).expand_as(h)
        p = log_predictive(likelihood, y, h, variance.unsqueeze(-1)).exp()  # one row an answer
        share = self._is_best.mean(0)
        given = p @ self._is_best / self._is_best.sum(0)
        return _entropy(p.mean(-1)) - (share * _entropy(given)).sum(-1)


def _entropy(p: Tensor) -> Tensor:
    """Return the entropy over answers (first dimension) in nats; gradients are always finite."""
    p = p.clamp_min(torch.finfo(p.dtype).eps)
    return -torch.xlogy(p, p).sum(0)

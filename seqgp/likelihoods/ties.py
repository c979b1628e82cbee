"""Comparisons that can end in a tie."""

from __future__ import annotations

import torch
from torch import Tensor

from seqgp.likelihoods.discrete import OrdinalLikelihood

__all__ = ["TieLikelihood"]


class TieLikelihood(OrdinalLikelihood):
    r"""The outcome of a comparison: lost (0), tied (1) or won (2), given a difference :math:`h`.

    .. math::
        p(2 \mid h) = F(h - w), \qquad p(0 \mid h) = F(-h - w), \qquad
        p(1 \mid h) = F(w - h) - F(-w - h),

    where :math:`F` is the standard normal CDF (``"probit"``) or the logistic function
    (``"logit"``), and the width :math:`w > 0` is learnt. It is an `OrdinalLikelihood` of three
    classes whose cutpoints :math:`\pm w` are symmetric, so that swapping the items of a comparison
    and its outcome changes nothing.

    Args:
        link: ``"probit"`` or ``"logit"``.
        width: The initial width :math:`w`, a number or ``(b) x 1``.
        batch_shape: The batch shape ``b`` of the width.

    Example:
        >>> likelihood = TieLikelihood(width=0.5)
        >>> likelihood(torch.zeros(1)).probs.detach()
        tensor([[0.3085, 0.3829, 0.3085]])
    """

    def __init__(
        self,
        link: str = "probit",
        width: float | Tensor = 0.5,
        batch_shape: torch.Size = torch.Size([]),  # noqa: B008
    ) -> None:
        half = torch.as_tensor(width, dtype=torch.get_default_dtype()).expand(*batch_shape, 1)
        if not bool((half.isfinite() & (half > 0)).all()):
            raise ValueError("`width` must be finite and positive.")
        super().__init__(3, link, batch_shape, cutpoints=torch.cat([-half, half], -1))
        del self.first_cutpoint  # it equals minus the width

    @property
    def width(self) -> Tensor:
        """The width :math:`w`, ``(b) x 1``: half of the range of likely ties."""
        return 0.5 * self.raw_gaps_constraint.transform(self.raw_gaps)

    @width.setter
    def width(self, value: float | Tensor) -> None:
        half = torch.as_tensor(value, dtype=self.raw_gaps.dtype, device=self.raw_gaps.device)
        if not bool((half.isfinite() & (half > 0)).all()):
            raise ValueError("`width` must be finite and positive.")
        self.initialize(raw_gaps=self.raw_gaps_constraint.inverse_transform(2 * half))

    @property
    def cutpoints(self) -> Tensor:
        r"""The cutpoints :math:`(-w, w)`, ``(b) x 2``."""
        return torch.cat([-self.width, self.width], -1)

    @cutpoints.setter
    def cutpoints(self, value: Tensor) -> None:
        if value.shape[-1:] != (2,) or not torch.equal(value, -value.flip(-1)):
            raise ValueError("`cutpoints` must be two, symmetric around zero.")
        self.width = value[..., 1:]

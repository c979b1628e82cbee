"""A kernel that is a sum over subsets of the inputs, each orthogonal to the others."""

from __future__ import annotations

import pytest
import torch
from botorch.models import SingleTaskGP
from botorch.models.kernels.orthogonal_additive_kernel import OrthogonalAdditiveKernel
from torch import Tensor

from seqgp import SequentialGP
from tests.helpers import assert_close, latent, make_inputs
from tests.models.helpers import assert_same

pytestmark = pytest.mark.usefixtures("float64")


@pytest.mark.parametrize("second_order", [False, True], ids=["first order", "second order"])
def test_posterior_gradients_and_conditioning(second_order: bool) -> None:
    def fitted(cls: type, X: Tensor) -> SequentialGP | SingleTaskGP:
        kernel = OrthogonalAdditiveKernel(dim=2, second_order=second_order, dtype=X.dtype)
        kernel.initialize(raw_coeffs_1=torch.tensor([0.4, 1.1]))
        Y = latent(X).unsqueeze(-1)
        return cls(X, Y, covar_module=kernel, outcome_transform=None)

    X, test = make_inputs(9, 2), make_inputs(4, 2).requires_grad_()
    ours, exact = (fitted(cls, X) for cls in (SequentialGP, SingleTaskGP))
    posteriors = [model.posterior(test) for model in (ours, exact)]
    assert_same(*posteriors)
    gradients = [torch.autograd.grad(p.mean.sum() + p.variance.sum(), test) for p in posteriors]
    assert_close(gradients[0][0], gradients[1][0], 1e-5)
    new = make_inputs(2, 2) + 0.1
    conditioned = ours.condition_on_observations(new, latent(new).unsqueeze(-1))
    assert_same(
        conditioned.posterior(test), fitted(SingleTaskGP, torch.cat([X, new])).posterior(test)
    )

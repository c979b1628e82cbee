r"""The whitened posterior as a function of its duals, with natural gradients.

Duals are natural parameters, :math:`\eta_1 = \lambda_w` and :math:`\eta_2 = -\tfrac12 (I + B_w)`.
The natural gradient of a loss with respect to them is its gradient with respect to the expectation
parameters :math:`\mu` and :math:`S + \mu \mu^T`. With :math:`S = W^{-1}`, :math:`W = R R^T`,

.. math::
    \partial_S \ell = -R \operatorname{sym}(\Phi(R^T \partial_R \ell)) R^T, \qquad
    \tilde\nabla_{\lambda_w} = \partial_\mu \ell - 2 (\partial_S \ell) \mu, \qquad
    \tilde\nabla_{B_w} = -2 \, \partial_S \ell,

where :math:`\Phi` takes the lower triangle and half of the diagonal. The loss can be any function
of the posterior: autograd differentiates it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from seqgp.dual.duals import Duals
from seqgp.dual.posterior import Factors, factorise, has_posterior


def natural_factors(duals: Duals) -> Factors:
    """Return the posterior of some duals, which receive natural gradients in a backward pass.

    Args:
        duals: The duals.
    """
    return Factors(*_NaturalFactors.apply(*duals))


class _NaturalFactors(torch.autograd.Function):
    """`factorise`, with natural gradients instead of ordinary ones."""

    @staticmethod
    def forward(ctx: Any, lam: Tensor, B: Tensor) -> Any:
        R, mean = factorise(Duals(lam, B))
        ctx.save_for_backward(R, mean)
        return R, mean

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return tuple(natural_gradients(Factors(*ctx.saved_tensors), Factors(*gradients)))


def natural_gradients(factors: Factors, gradients: Factors) -> Duals:
    """Return natural gradients with respect to the duals.

    Args:
        factors: The posterior.
        gradients: Gradients with respect to them.
    """
    (R, mean), (grad_R, grad_mean) = factors, gradients
    inner = (R.mT @ grad_R).tril()
    inner = inner - 0.5 * torch.diag_embed(inner.diagonal(dim1=-2, dim2=-1))
    grad_S = -0.5 * R @ (inner + inner.mT) @ R.mT
    return Duals(grad_mean - 2 * (grad_S @ mean.unsqueeze(-1)).squeeze(-1), -2 * grad_S)


def shortened_step(duals: Duals, gradients: Duals, size: float) -> Duals:
    """Take a step down the gradients, halved until there is a posterior.

    Args:
        duals: The duals.
        gradients: Natural gradients of a loss.
        size: The step size.
    """
    if not all(bool(gradient.isfinite().all()) for gradient in gradients):
        raise FloatingPointError(
            "The natural gradient is not finite; nothing has been changed. Check the scale of "
            "inputs, targets and hyperparameters."
        )
    for _ in range(16):
        new = Duals(*(x - size * g for x, g in zip(duals, gradients, strict=True)))
        if has_posterior(new):
            return new
        size /= 2
    raise FloatingPointError(
        "No natural-gradient step leads to a posterior; nothing has been changed. Use a "
        "smaller lr=, and check the scale of inputs, targets and hyperparameters."
    )

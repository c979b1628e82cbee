r"""Natural-gradient steps that a strategy takes by itself, in GPyTorch's usual training loops.

The posterior of a `DualVariationalStrategy` is not a parameter, so optimisers of parameters do not
learn it. Without a `DualNGD`, each backward pass of an objective with a KL term takes a step

.. math::
    \eta \leftarrow \eta - \rho \, \tilde\nabla_\eta \ell \, / \, w, \qquad
    w = \partial \ell / \partial \mathrm{KL}, \qquad \rho = 0.1,

on the natural parameters of :math:`q(u)`, with the natural gradient from the backward pass.
Dividing by the weight of the KL term makes it the step of `DualNGD` with ``lr=0.1``, for any
scaling of the loss (``num_data``, ``beta``, sums over a batch, accumulated gradients): the new
posterior is 0.9 of the old one and 0.1 of the sites that this minibatch implies for all data.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from seqgp.dual import Duals, Factors
from seqgp.dual.natural_parameters import natural_gradients, shortened_step

#: The step size, as in GPyTorch's own examples of natural gradients.
STEP_SIZE = 0.1


class OwnSteps:
    """Collect the natural gradient of a backward pass and, when it is complete, take a step.

    Two leaves of the graph, both zero, collect the gradients: one the natural gradient with respect
    to the duals, the other the weights of the KL terms. If a posterior is used several times,
    autograd adds up its gradients before they get there.

    Args:
        learn: Called with the duals after a step.
    """

    def __init__(self, learn: Callable[[Duals], None]) -> None:
        self.learn = learn
        self.duals: Duals | None = None
        self.gradient: Tensor | None = None  # ... x m x (m + 1), of B and of lambda
        self.weight: Tensor | None = None  # ...
        #: Whether an objective has used the KL term since the last step.
        self.asked = False

    def watch(self, duals: Duals, factors: Factors) -> Factors:
        """Return the same posterior, whose gradients are recorded.

        Args:
            duals: The duals, ``... x m`` and ``... x m x m``.
            factors: Their posterior.
        """
        self.duals = Duals(*(tensor.detach() for tensor in duals))
        lam, B = self.duals
        if self.gradient is None or not _alike(self.gradient[..., 0], lam):
            self.gradient = torch.zeros_like(torch.cat([B, lam.unsqueeze(-1)], -1))
            self.gradient.requires_grad_(True)
            self.weight = torch.zeros_like(lam[..., 0]).requires_grad_(True)
            own = weakref.ref(self)

            def complete(_: Tensor) -> None:
                steps = own()
                if steps is not None:
                    steps.step()

            self.gradient.register_post_accumulate_grad_hook(complete)
        return Factors(*_Noted.apply(*factors, self.gradient, self))

    def weighed(self, kl: Tensor) -> Tensor:
        """Return the KL term ``...``, whose weight in the objective is recorded.

        Args:
            kl: The term, of the batch shape of the posterior.
        """
        assert self.weight is not None
        self.asked = True
        return kl + self.weight

    @torch.no_grad()
    def step(self) -> None:
        """Take the step at the end of a backward pass; without a KL term there is none."""
        assert self.gradient is not None
        assert self.weight is not None
        assert self.duals is not None
        gradient, weight = self.gradient.grad, self.weight.grad
        self.gradient.grad = self.weight.grad = None
        if gradient is None or weight is None:
            return
        self.asked = False
        if not bool(((weight != 0) & weight.isfinite()).all()):
            raise RuntimeError(
                "The KL term of the objective has no weight, by which the step of the posterior "
                "is measured. Use beta > 0, or seqgp.DualNGD(model, num_data, lr=0.1)."
            )
        gradient = gradient / weight[..., None, None]
        natural = Duals(gradient[..., -1], gradient[..., :-1])
        self.duals = shortened_step(self.duals, natural, STEP_SIZE)
        self.learn(self.duals)


def _alike(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and a.device == b.device


class _Noted(torch.autograd.Function):
    """The identity for ``R`` and the mean; natural gradients go to a leaf."""

    @staticmethod
    def forward(ctx: Any, R: Tensor, mean: Tensor, leaf: Tensor, steps: OwnSteps) -> Any:
        ctx.save_for_backward(R, mean)
        ctx.steps = weakref.ref(steps)
        return R.view_as(R), mean.view_as(mean)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        steps, natural = ctx.steps(), None
        if steps is not None and steps.asked:
            lam, B = natural_gradients(Factors(*ctx.saved_tensors), Factors(*gradients))
            natural = torch.cat([B, lam.unsqueeze(-1)], -1).detach()
        return (*gradients, natural, None)

"""`DualNGD`: natural gradients in GPyTorch's training loops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from gpytorch.optim import NGD
from torch.nn import Module

from seqgp.dual import Duals
from seqgp.dual.natural_parameters import shortened_step
from seqgp.variational.state import DualState, Leaves


class DualNGD(NGD):
    r"""Natural-gradient descent for the posterior of a model, in GPyTorch's usual training loop.

    Use it as you would use `gpytorch.optim.NGD` for a `NaturalVariationalDistribution`. It takes
    the same steps. With a Gaussian likelihood, all data in one batch and ``lr=1``, one step is
    exact. All objectives of GPyTorch work (`VariationalELBO`, `PredictiveLogLikelihood`,
    `DeepApproximateMLL`, ...), with any ``beta``, minibatches and accumulated gradients, and also
    `IndependentMultitaskVariationalStrategy`, `LMCVariationalStrategy` and `DeepGPLayer`. Without
    this optimiser, each backward pass takes a step of size 0.1.

    While this optimiser exists and the model is in train mode, a change of hyperparameters leaves
    the whitened posterior unchanged, as in GPyTorch. Otherwise (in eval mode, or with `DualELBO`
    and no such optimiser), the posterior follows the prior.

    Args:
        model: A model with one or several `DualVariationalStrategy`.
        num_data: The total number of observations, as passed to the objective.
        lr: The step size. Steps are shortened if they would make the posterior improper, which can
            happen with likelihoods that are not log-concave.

    Example:
        >>> import torch, gpytorch
        >>> from seqgp import DualNGD, DualVariationalStrategy
        >>> class GP(gpytorch.models.ApproximateGP):
        ...     def __init__(self, Z):
        ...         super().__init__(DualVariationalStrategy(self, Z))
        ...         self.mean_module = gpytorch.means.ConstantMean()
        ...         self.covar_module = gpytorch.kernels.RBFKernel()
        ...     def forward(self, x):
        ...         return gpytorch.distributions.MultivariateNormal(
        ...             self.mean_module(x), self.covar_module(x))
        >>> x = torch.linspace(0, 1, 20).unsqueeze(-1)
        >>> y = (x.squeeze(-1) > 0.5).to(x)
        >>> model, likelihood = GP(x[::4]), gpytorch.likelihoods.BernoulliLikelihood()
        >>> mll = gpytorch.mlls.VariationalELBO(likelihood, model, num_data=20)
        >>> ngd = DualNGD(model, num_data=20, lr=0.5)
        >>> adam = torch.optim.Adam([*model.parameters(), *likelihood.parameters()], lr=0.01)
        >>> for _ in range(10):
        ...     ngd.zero_grad()
        ...     adam.zero_grad()
        ...     loss = -mll(model(x), y)
        ...     loss.backward()
        ...     ngd.step()
        ...     adam.step()
        >>> probability = likelihood(model.eval()(x)).mean
        >>> bool((probability.round() == y).all())
        True
    """

    def __init__(self, model: Module, num_data: int, lr: float = 0.1) -> None:
        strategies = {
            name: module for name, module in model.named_modules() if isinstance(module, DualState)
        }
        if not strategies:
            raise TypeError(
                f"model: expected one with a DualVariationalStrategy, got a {type(model).__name__} "
                "without any; gpytorch.optim.NGD is for a NaturalVariationalDistribution."
            )
        if isinstance(num_data, bool) or not num_data > 0:
            raise ValueError(f"num_data: expected the number of all observations, got {num_data}.")
        if not 0 < lr < float("inf"):
            raise ValueError(f"lr: expected a step size larger than 0, got {lr}.")
        for name, strategy in strategies.items():
            if strategy.has_summary or getattr(strategy, "is_conditioned", False):
                raise ValueError(
                    f"model: {name} knows of observations that no objective of a training loop "
                    "contains: a summary of a stream, or what it was conditioned on. Learn with "
                    "`update`, or make a new model."
                )
        self._strategies = list(strategies.values())
        self._leaves = [Leaves() for _ in strategies]
        for strategy, leaves in zip(self._strategies, self._leaves, strict=True):
            strategy.attach(leaves)
        super().__init__([{"params": leaves.tensors} for leaves in self._leaves], num_data, lr)
        for group, leaves in zip(self.param_groups, self._leaves, strict=True):
            leaves.tensors = group["params"]  # the same list, so that both see replaced tensors

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a natural-gradient step with the gradients accumulated since `zero_grad`.

        If there is an error, no posterior is changed.

        Args:
            closure: Evaluates the objective again and returns it.

        Returns:
            The result of the closure.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        steps = []
        groups = zip(self._strategies, self._leaves, self.param_groups, strict=True)
        for strategy, leaves, group in groups:
            if not strategy.is_attached(leaves):
                raise RuntimeError("Another DualNGD has been made for this model: use that one.")
            if any(tensor.grad is not None for tensor in group["params"]):
                steps.append((strategy, self._stepped(group)))
        if not steps:
            raise RuntimeError(
                "DualNGD has no gradients. Call `loss.backward()` before `step`, with a loss that "
                "was computed from the model's output in train mode, and nothing that changes the "
                "posterior in between."
            )
        for strategy, duals in steps:
            strategy.learn(duals)
        return loss

    def _stepped(self, group: dict[str, Any]) -> Duals:
        """Return the duals after a step, shortened until there is a posterior."""
        duals = Duals(*(tensor.detach() for tensor in group["params"]))
        gradients = [
            torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
            for tensor in group["params"]
        ]
        return shortened_step(duals, Duals(*gradients), float(group["lr"]) * self.num_data)

"""What random sequences of calls are about: models of any kind, and data that fit them.

`SUBJECTS` has one for each likelihood, and those with a shape of their own: several outputs,
discrete columns, comparisons, tasks.
"""

from __future__ import annotations

from typing import Any

import torch
from botorch.models.likelihoods.pairwise import PairwiseLogitLikelihood
from gpytorch.likelihoods import (
    BernoulliLikelihood,
    GaussianLikelihood,
    Likelihood,
    PoissonLikelihood,
)
from torch import Tensor

from seqgp import PreferenceGP, SequentialGP, SequentialMultiTaskGP, TieLikelihood
from tests.helpers import CASES, latent

#: Likelihoods of real numbers, for which no finite target is impossible.
REAL = ("gaussian", "fixed_noise", "student_t", "laplace", "heteroscedastic", "censored")
#: Observations: inputs, targets and per-point arguments.
Data = tuple[Tensor, Tensor, dict[str, Tensor]]


class Subject:
    """Models with one of the likelihoods of `tests.helpers.CASES`.

    Args:
        kind: Its name.
        d: The number of inputs.
        dtype: The precision; models and data follow it when it is changed.
    """

    def __init__(self, kind: str, d: int, dtype: torch.dtype) -> None:
        self.kind, self.d, self.dtype = kind, d, dtype

    # ---------------------------------------------------------------- data

    def inputs(self, n: int, seed: int) -> Tensor:
        """``n x d`` inputs."""
        generator = torch.Generator().manual_seed(seed)
        return torch.rand(n, self.d, generator=generator, dtype=torch.float64).to(self.dtype)

    def observed_inputs(self, n: int, seed: int) -> Tensor:
        """Those of observations, some of which are the same."""
        X = self.inputs(n, seed)
        if n > 2 and seed % 3 == 0:
            X[1] = X[0]
        return X

    def observe(self, n: int, seed: int) -> Data:
        """Possible observations, ``n`` of them."""
        X, case = self.observed_inputs(n, seed), CASES[self.kind]
        f = X.double()
        y = case.sample(latent(f, case.num_latents)).unsqueeze(-1) if n else f[:, :1]
        arguments = self.arguments(n)
        if "noise" in arguments:
            arguments["noise"] = arguments["noise"].unsqueeze(-1)
        return X, y.to(X), arguments

    def arguments(self, n: int) -> dict[str, Tensor]:
        """Per-point arguments of ``n`` observations."""
        return {key: value.to(self.dtype) for key, value in CASES[self.kind].arguments(n).items()}

    def impossible(self, Y: Tensor) -> Tensor | None:
        """Targets that the likelihood excludes, if there are any."""
        return None if self.kind in REAL else Y - 17.5

    def too_few(self, Y: Tensor) -> Tensor:
        """Targets that do not fit the inputs."""
        return Y[:2]

    # ---------------------------------------------------------------- models

    def build(self, n: int, m: int | None, seed: int, **more: Any) -> SequentialGP:
        """A model of ``n`` observations with ``m`` inducing points, or with those by default."""
        X, Y, arguments = self.observe(n, seed)
        return SequentialGP(X, Y, **self.options(n, m, seed), **self.modules(arguments), **more)

    def options(self, n: int, m: int | None, seed: int) -> dict[str, Any]:
        """Inducing points that are somewhere else than the data, if they are given."""
        return {} if n and m is None else {"inducing_points": self.points(m or 3, seed + 1)}

    def modules(self, arguments: dict[str, Tensor]) -> dict[str, Any]:
        """Options that say what observations are."""
        if self.kind == "fixed_noise":
            return {"train_Yvar": arguments["noise"]}
        likelihood = CASES[self.kind].make().to(self.dtype)
        return {"likelihood": likelihood, "likelihood_arguments": arguments}

    def points(self, n: int, seed: int) -> Tensor:
        """Inputs in all columns that a model has, for inducing points and latent functions."""
        return self.inputs(n, seed)

    # ---------------------------------------------------------------- fantasies

    @property
    def can_fantasise(self) -> bool:
        """Whether the noise of new observations is known."""
        return self.kind != "fixed_noise"

    def candidates(self, number: int, q: int, seed: int) -> Tensor:
        """``number x q x d`` inputs of ``q`` new observations each."""
        return self.inputs(number * q, seed).reshape(number, q, self.d)


class TwoOutputs(Subject):
    """Two independent outputs, both real numbers."""

    def observe(self, n: int, seed: int) -> Data:
        X = self.observed_inputs(n, seed)
        f = X.double()
        return X, torch.stack([latent(f), latent(1 - f)], -1).to(X), {}

    def arguments(self, n: int) -> dict[str, Tensor]:
        return {}

    def impossible(self, Y: Tensor) -> Tensor | None:
        return None

    def modules(self, arguments: dict[str, Tensor]) -> dict[str, Any]:
        return {}


class Discrete(Subject):
    """Counts, with a last column that has three levels; inducing points stay on them."""

    def inputs(self, n: int, seed: int) -> Tensor:
        X = super().inputs(n, seed)
        X[:, -1] = (3 * X[:, -1]).floor() / 2
        return X

    def observe(self, n: int, seed: int) -> Data:
        X = self.observed_inputs(n, seed)
        return X, (latent(X.double()).abs().round().unsqueeze(-1)).to(X), {}

    def arguments(self, n: int) -> dict[str, Tensor]:
        return {}

    def modules(self, arguments: dict[str, Tensor]) -> dict[str, Any]:
        return {"likelihood": PoissonLikelihood().to(self.dtype), "discrete_dims": [-1]}


class Comparisons(Subject):
    """A utility, of which comparisons are observed."""

    def observe(self, n: int, seed: int) -> Data:
        X = self.inputs(n + 2, seed)
        generator = torch.Generator().manual_seed(seed)
        first = torch.randint(n + 2, (n,), generator=generator)
        second = (first + 1 + torch.randint(n + 1, (n,), generator=generator)) % (n + 2)
        f = latent(X.double())
        pairs = torch.stack([first, second], -1)
        better = (f[first] > f[second]).unsqueeze(-1)
        return X, torch.where(better, pairs, pairs.flip(-1)), self.arguments(n)

    def arguments(self, n: int) -> dict[str, Tensor]:
        return {"ties": torch.arange(n) % 3 == 1} if self.kind == "preference_ties" else {}

    def too_few(self, Y: Tensor) -> Tensor:
        return Y[:, :1]

    def build(self, n: int, m: int | None, seed: int, **more: Any) -> SequentialGP:
        X, Y, arguments = self.observe(n, seed)
        likelihood: Likelihood | None = None
        if self.kind == "preference_ties":
            likelihood = TieLikelihood().to(self.dtype)
        elif seed % 2:
            likelihood = PairwiseLogitLikelihood()
        given = {} if m is None else {"inducing_points": self.points(m, seed + 1)}
        return PreferenceGP(X, Y, likelihood, **given, **arguments, **more)

    def candidates(self, number: int, q: int, seed: int) -> Tensor:
        return self.inputs(2 * number * q, seed).reshape(number, 2 * q, self.d)


class Tasks(Subject):
    """A real number, a label and a count, correlated; the last column of inputs says which.

    Batches may lack any of them, so that tasks appear late.
    """

    VALUES = (0, 1, 3)

    def points(self, n: int, seed: int) -> Tensor:
        tasks = torch.tensor(self.VALUES)[(torch.arange(n) + seed) % 3].to(self.dtype)
        return torch.cat([self.inputs(n, seed), tasks.unsqueeze(-1)], -1)

    def observe(self, n: int, seed: int) -> Data:
        X = self.points(n, seed)
        if n > 3 and seed % 3 == 0:
            X[3] = X[0]
        f, task = latent(X[:, :-1].double()), X[:, -1]
        y = torch.where(task == 0, 100 + 30 * f, (f > 1).double())
        y = torch.where(task == 3, f.abs().round(), y)
        return X, y.unsqueeze(-1).to(X), {}

    def arguments(self, n: int) -> dict[str, Tensor]:
        return {}

    def build(self, n: int, m: int | None, seed: int, **more: Any) -> SequentialGP:
        X, Y, _ = self.observe(n, seed)
        return self.of(X, Y, **self.options(n, m, seed), **more)

    def of(self, X: Tensor, Y: Tensor, **more: Any) -> SequentialGP:
        """A model of given observations."""
        likelihoods = [GaussianLikelihood(), BernoulliLikelihood(), PoissonLikelihood()]
        return SequentialMultiTaskGP(
            X,
            Y,
            -1,
            all_tasks=self.VALUES,
            likelihood=[each.to(self.dtype) for each in likelihoods],
            **more,
        )


SUBJECTS: dict[str, type[Subject]] = {
    **dict.fromkeys(CASES, Subject),
    "two_outputs": TwoOutputs,
    "discrete": Discrete,
    "preferences": Comparisons,
    "preference_ties": Comparisons,
    "tasks": Tasks,
}

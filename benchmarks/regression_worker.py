"""The work that `benchmarks.regression` times, in a process that sees one tree's ``seqgp``.

Started by its path, with that tree alone on ``PYTHONPATH``. Each line of the input is a job in
JSON, and each is answered by a line:

    {"work": "Fit", "way": "seqgp", "arguments": {...}, "calls": 1, "facts": true}
    {"seconds": 0.21, "facts": {"rmse": 0.05}}

or ``{"error": traceback}``. ``seconds`` are processor seconds of one call. Trees differ in their
layout: this file uses only public names and arguments that all of them understand. Only the way
``bare``, which is asked of the present tree alone, imports from `benchmarks`.
"""

from __future__ import annotations

import copy
import gc
import json
import math
import os
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import gpytorch
import torch
from botorch.exceptions.warnings import InputDataWarning, OptimizationWarning
from botorch.fit import fit_gpytorch_mll
from botorch.models import SingleTaskGP, SingleTaskVariationalGP
from botorch.sampling import SobolQMCNormalSampler
from botorch.test_functions import Hartmann
from botorch.utils.sampling import draw_sobol_normal_samples
from gpytorch.kernels import MaternKernel, ScaleKernel
from gpytorch.likelihoods import BernoulliLikelihood, GaussianLikelihood, Likelihood
from gpytorch.mlls import ExactMarginalLogLikelihood, VariationalELBO
from linear_operator.utils.warnings import NumericalWarning
from torch import Tensor

import seqgp
from seqgp import DualELBO, SequentialGP

Moments = tuple[Tensor, Tensor]


def hartmann6(n: int, seed: int, noise: float = 0.0) -> tuple[Tensor, Tensor]:
    """``n x 6`` inputs in the unit cube and ``n x 1`` standardized values."""
    generator = torch.Generator().manual_seed(seed)
    X = torch.rand(n, 6, generator=generator)
    f = Hartmann(dim=6).evaluate_true(X).unsqueeze(-1)
    f = (f - f.mean()) / f.std()
    Y = f + noise * torch.randn(n, 1, generator=generator)
    return X, (Y - Y.mean()) / Y.std()


class Fit:
    """All hyperparameters of a model of Hartmann's function without noise, by BoTorch's defaults.

    Against `SingleTaskGP`, by root mean square errors at points that were held out.

    Args:
        way: ``"seqgp"`` or ``"botorch"``.
        n: The number of observations.
        seed: Seed of the data.
        test: How many points are held out.
        max_steps: The largest number of L-BFGS iterations, for smoke runs.
    """

    def __init__(
        self, way: str, n: int, seed: int, test: int, max_steps: int | None = None
    ) -> None:
        X, Y = hartmann6(n + test, seed)
        self.X, self.X_test = X[:n], X[n:]
        mean, sd = Y[:n].mean(), Y[:n].std()
        self.Y, self.Y_test = (Y[:n] - mean) / sd, (Y[n:] - mean) / sd
        self.make = self._seqgp if way == "seqgp" else self._botorch
        options = {} if max_steps is None else {"options": {"maxiter": max_steps}}
        self.options = {"optimizer_kwargs": options}

    def _seqgp(self) -> Any:
        model = SequentialGP(self.X, self.Y, outcome_transform=None)
        fit_gpytorch_mll(DualELBO(model.likelihood, model), **self.options)
        return model

    def _botorch(self) -> Any:
        model = SingleTaskGP(self.X, self.Y, outcome_transform=None)
        fit_gpytorch_mll(ExactMarginalLogLikelihood(model.likelihood, model), **self.options)
        return model

    def fresh(self) -> Callable[[], Any]:
        """What is timed."""
        torch.manual_seed(0)
        return self.make

    def facts(self, model: Any) -> dict[str, Any]:
        """The root mean square error."""
        with torch.no_grad():
            error = model.posterior(self.X_test).mean - self.Y_test
        return {"rmse": float(error.square().mean().sqrt())}


class FitLarge:
    """All hyperparameters of a sparse model of many observations, by BoTorch's defaults.

    Against `SingleTaskVariationalGP`, by the bound that is reached.

    Args:
        way: ``"seqgp"`` or ``"botorch"``.
        likelihood: ``"gaussian"`` or ``"bernoulli"``.
        n: The number of observations.
        m: The number of inducing points.
        seed: Seed of the data.
        max_steps: The largest number of the optimiser's steps, for smoke runs.
    """

    def __init__(
        self, way: str, likelihood: str, n: int, m: int, seed: int, max_steps: int | None = None
    ) -> None:
        self.X, self.Y = hartmann6(n, seed, noise=0.3)
        self.bernoulli = likelihood == "bernoulli"
        if self.bernoulli:
            self.Y = self.Y.gt(self.Y.median()).to(self.X)
        self.m = m
        self.make = self._seqgp if way == "seqgp" else self._botorch
        options: dict[str, Any] = {}
        if max_steps is not None:
            # BoTorch fits so many observations by Adam.
            lbfgs = {"options": {"maxiter": max_steps}}
            options = lbfgs if way == "seqgp" else {"step_limit": max_steps}
        self.options = {"optimizer_kwargs": options}

    def _likelihood(self) -> Likelihood | None:
        return BernoulliLikelihood() if self.bernoulli else None

    def _seqgp(self) -> Any:
        model = SequentialGP(
            self.X,
            self.Y,
            likelihood=self._likelihood(),
            inducing_points=self.m,
            outcome_transform=None,
        )
        fit_gpytorch_mll(DualELBO(model.likelihood, model), **self.options)
        return model

    def _botorch(self) -> Any:
        model = SingleTaskVariationalGP(
            self.X, self.Y, likelihood=self._likelihood(), inducing_points=self.m
        )
        mll = VariationalELBO(model.likelihood, model.model, num_data=len(self.X))
        fit_gpytorch_mll(mll, **self.options)
        return model

    def fresh(self) -> Callable[[], Any]:
        """What is timed."""
        torch.manual_seed(0)
        return self.make

    def facts(self, model: Any) -> dict[str, Any]:
        """The bound of all data, log prior included, and the number of inducing points."""
        n = len(self.X)
        process = model.model if isinstance(model, SingleTaskVariationalGP) else model
        mll = VariationalELBO(model.likelihood, process, num_data=n).train()
        with torch.no_grad():
            bound = n * mll(process(self.X), self.Y.squeeze(-1))
        return {"bound": float(bound), "m": process.variational_strategy.inducing_points.shape[-2]}


class Update:
    """One update of a stream whose memory is full.

    Args:
        way: ``"seqgp"`` or ``"bare"``.
        likelihood: ``"gaussian"`` or ``"bernoulli"``.
        m: The number of inducing points.
        learn: Whether hyperparameters are learnt, too.
        new: The number of new observations.
        memory: The number of observations in the memory.
        past: The number of observations seen before the memory was first chosen.
        dim: The number of inputs.
        steps: The number of steps, if hyperparameters are learnt.
    """

    def __init__(
        self,
        way: str,
        likelihood: str,
        m: int,
        learn: bool,
        new: int,
        memory: int,
        past: int,
        dim: int,
        steps: int = 0,
    ) -> None:
        generator = torch.Generator().manual_seed(0)

        def batch(n: int) -> tuple[Tensor, Tensor]:
            X = torch.rand(n, dim, generator=generator)
            f = torch.sin(3 * X).sum(-1, keepdim=True) - 0.66 * dim
            f = f + 0.3 * torch.randn(n, 1, generator=generator)
            return X, f if likelihood == "gaussian" else (f > 0).to(f)

        past_X, past_Y = batch(past)
        first = batch(new)
        self.batch, (self.X_test, _) = batch(new), batch(100)
        kernel = ScaleKernel(MaternKernel(nu=2.5))
        kernel.base_kernel.lengthscale = 1.0
        noise_model = GaussianLikelihood() if likelihood == "gaussian" else BernoulliLikelihood()
        self.learn, self.memory, self.steps, self.way = learn, memory, steps, way
        if way == "seqgp":
            self.model = SequentialGP(
                past_X,
                past_Y,
                likelihood=noise_model,
                covar_module=kernel,
                inducing_points=past_X[:m].clone(),
                outcome_transform=None,
            )
            self.model.update(*first, memory=memory, learn=False)
        else:
            self.stream = BareStream.empty(past_X[:m].clone(), kernel, noise_model.noise.detach())
            for X, Y in ((past_X, past_Y), first):
                self.stream, _ = bare_update(self.stream, X, Y.squeeze(-1), memory)

    def fresh(self) -> Callable[[], Any]:
        """What is timed: an update of a stream that is the same each time."""
        if self.way == "bare":
            X, Y = self.batch
            return lambda: bare_update(self.stream, X, Y.squeeze(-1), self.memory)
        model, options = copy.deepcopy(self.model), {}
        if self.learn:
            options = {"steps": self.steps, "tol": 0.0}

        def update() -> Any:
            record = model.update(*self.batch, memory=self.memory, learn=self.learn, **options)
            return model, record

        return update

    def facts(self, result: Any) -> dict[str, Any]:
        """Moments at test points before and after, and what the update did."""
        if self.way == "bare":
            stream, density = result
            before, after = (bare_moments(each, self.X_test) for each in (self.stream, stream))
            return {**_moments(before=before, after=after), "log_density": float(density)}
        model, record = result
        # A copy, since predictions may leave something in a cache that updates would then use.
        before = _posterior(copy.deepcopy(self.model), self.X_test)
        after = _posterior(model, self.X_test)
        Z, moved = (each.variational_strategy.inducing_points for each in (self.model, model))
        return {
            **_moments(before=before, after=after),
            "log_density": record.log_density,
            "evaluations": record.steps,
            "memory": record.num_memory,
            "m": record.num_inducing,
            "moves_inducing_points": Z.shape != moved.shape or not torch.equal(Z, moved),
        }


class Fantasies:
    """Fantasies of candidates, and the posterior of each at test points.

    The arguments beside ``way`` are those of `benchmarks.fantasies`.
    """

    def __init__(
        self,
        way: str,
        m: int,
        q: int,
        candidates: int,
        fantasies: int,
        test: int,
        data: int,
        dim: int,
        lengthscale: float,
        noise: float,
    ) -> None:
        generator = torch.Generator().manual_seed(0)
        X = torch.rand(data, dim, generator=generator)
        f = torch.sin(6 * X).sum(-1, keepdim=True) / 2
        Y = f + math.sqrt(noise) * torch.randn(f.shape, generator=generator)
        self.candidates = torch.rand(candidates, q, dim, generator=generator)
        self.X_test = torch.rand(test, dim, generator=generator)
        self.sampler = SobolQMCNormalSampler(torch.Size([fantasies]), seed=0)
        Z = X[:m].clone()
        self.make = self._seqgp
        if way == "bare":
            self.make = self._bare(X, Y, Z, noise)
            return
        kernel = ScaleKernel(MaternKernel(nu=2.5))
        kernel.base_kernel.lengthscale, kernel.outputscale = lengthscale, 1.0
        likelihood = GaussianLikelihood()
        likelihood.noise = noise
        self.model = SequentialGP(
            X,
            Y,
            likelihood=likelihood.requires_grad_(False),
            covar_module=kernel.requires_grad_(False),
            mean_module=gpytorch.means.ZeroMean(),
            inducing_points=Z,
            learn_inducing_points=False,
            outcome_transform=None,
        )

    @torch.no_grad()
    def _seqgp(self) -> Moments:
        return _posterior(self.model.fantasize(self.candidates, self.sampler), self.X_test)

    def _bare(self, X: Tensor, Y: Tensor, Z: Tensor, noise: float) -> Callable[[], Moments]:
        from benchmarks.core import Duals
        from benchmarks.fantasies import JITTER, bare_fantasies, matern

        L = torch.linalg.cholesky(matern(Z, Z) + JITTER * torch.eye(len(Z)))
        A = torch.linalg.solve_triangular(L, matern(Z, X), upper=False)
        duals = Duals((A @ Y).squeeze(-1) / noise, A @ A.mT / noise)
        q = self.candidates.shape[-2]
        number = self.sampler.sample_shape.numel()
        # What the sampler draws, too: one set of base samples for all candidates.
        base = draw_sobol_normal_samples(q, number, seed=self.sampler.seed)
        base = base.reshape(number, 1, q, 1)

        @torch.no_grad()
        def fantasise() -> Moments:
            return bare_fantasies(Z, duals, self.candidates, self.X_test, base)

        return fantasise

    def fresh(self) -> Callable[[], Any]:
        """What is timed."""
        return self.make

    def facts(self, result: Moments) -> dict[str, Any]:
        """Moments at the test points, of every eighth candidate: there are many."""
        mean, variance = (moment[..., ::8, :] for moment in result)
        return _moments(after=(mean, variance))


# ------------------------------------------------------------- an update in bare tensors


class BareStream(NamedTuple):
    """What an update needs of the past, for a Gaussian likelihood and a mean of zero.

    Attributes:
        Z: ``m x d`` inducing points.
        kernel: The kernel.
        noise: ``1``, the noise variance.
        lam: ``m``, whitened duals of everything.
        B: ``m x m``, likewise.
        folded_lam: ``m``, whitened duals of the folded observations, times the noise variance.
        folded_B: ``m x m``, likewise.
        square: Sum of the squares of their targets.
        X: ``k x d``, the memory.
        y: ``k``, its targets.
        generator: Draws the memory.
    """

    Z: Tensor
    kernel: gpytorch.kernels.Kernel
    noise: Tensor
    lam: Tensor
    B: Tensor
    folded_lam: Tensor
    folded_B: Tensor
    square: Tensor
    X: Tensor
    y: Tensor
    generator: torch.Generator

    @classmethod
    def empty(cls, Z: Tensor, kernel: gpytorch.kernels.Kernel, noise: Tensor) -> BareStream:
        """Before the first observation."""
        lam, B = Z.new_zeros(len(Z)), Z.new_zeros(len(Z), len(Z))
        generator = torch.Generator().manual_seed(0)
        X, y = Z[:0], lam[:0]
        return cls(Z, kernel, noise, lam, B, lam, B, Z.new_zeros(()), X, y, generator)


def factorise(lam: Tensor, B: Tensor) -> tuple[Tensor, Tensor]:
    """Cholesky factor of ``I + B``, and the whitened posterior mean ``m x 1``."""
    R = torch.linalg.cholesky(B + torch.eye(len(lam)))
    return R, torch.cholesky_solve(lam.unsqueeze(-1), R)


def whitened(stream: BareStream, X: Tensor) -> tuple[Tensor, Tensor]:
    """``L^-1 K_zx``, and the variance that the inducing points do not explain."""
    Z, kernel = stream.Z, stream.kernel
    K = kernel(Z).to_dense()
    L = torch.linalg.cholesky(K + torch.diag(1e-8 * K.diagonal()))
    A = torch.linalg.solve_triangular(L, kernel(Z, X).to_dense(), upper=False)
    return A, (kernel(X, diag=True) - A.square().sum(0)).clamp_min(0)


@torch.no_grad()
def bare_update(
    stream: BareStream, X: Tensor, y: Tensor, capacity: int
) -> tuple[BareStream, Tensor]:
    """What `SequentialGP.update` does without learning, with nothing around it.

    Args:
        stream: The past.
        X: ``n x d`` new inputs.
        y: ``n`` new targets.
        capacity: How many observations to remember.

    Returns:
        The stream after the update, and the mean log predictive density of the new observations.
    """
    noise, known = stream.noise, len(stream.y)
    inputs, targets = torch.cat([stream.X, X]), torch.cat([stream.y, y])
    A, unexplained = whitened(stream, inputs)
    # What was expected of the new observations.
    R, v = factorise(stream.lam, stream.B)
    new = A[:, known:]
    total = torch.linalg.solve_triangular(R, new, upper=False).square().sum(0)
    total = total + unexplained[known:] + noise
    residual = y - (new.mT @ v).squeeze(-1)
    density = -0.5 * (residual.square() / total + (2 * math.pi * total).log()).mean()
    # Memory and new observations on top of what was folded.
    lam = (stream.folded_lam + A @ targets) / noise
    B = (stream.folded_B + A @ A.mT) / noise
    R, v = factorise(lam, B)
    variance = torch.linalg.solve_triangular(R, A, upper=False).square().sum(0) + unexplained
    leverage = variance / noise
    kept = torch.multinomial(leverage, min(capacity, len(leverage)), generator=stream.generator)
    gone = torch.ones(len(leverage), dtype=torch.bool)
    gone[kept] = False
    A, rest = A[:, gone], targets[gone]
    updated = stream._replace(
        lam=lam,
        B=B,
        folded_lam=stream.folded_lam + A @ rest,
        folded_B=stream.folded_B + A @ A.mT,
        square=stream.square + rest.square().sum(),
        X=inputs[kept],
        y=targets[kept],
    )
    return updated, density


@torch.no_grad()
def bare_moments(stream: BareStream, X: Tensor) -> Moments:
    """Mean and variance at ``n x d`` inputs."""
    A, unexplained = whitened(stream, X)
    R, v = factorise(stream.lam, stream.B)
    reduced = torch.linalg.solve_triangular(R, A, upper=False).square().sum(0)
    return (A.mT @ v).squeeze(-1), unexplained + reduced


# ------------------------------------------------------------- jobs


@torch.no_grad()
def _posterior(model: Any, X: Tensor) -> Moments:
    posterior = model.posterior(X)
    return posterior.mean.squeeze(-1), posterior.variance.squeeze(-1)


def _moments(**moments: Moments) -> dict[str, Any]:
    """Means and variances as JSON can hold them."""
    return {
        f"{name}_{moment}": value.flatten().tolist()
        for name, pair in moments.items()
        for moment, value in zip(("mean", "variance"), pair, strict=True)
    }


WORK = {kind.__name__: kind for kind in (Fit, FitLarge, Update, Fantasies)}


class Worker:
    """Does jobs, and keeps the preparations of the latest of each way."""

    def __init__(self) -> None:
        self.prepared: dict[str, tuple[str, Any]] = {}

    def do(
        self, work: str, way: str, arguments: dict[str, Any], calls: int, facts: bool
    ) -> dict[str, Any]:
        """Time some calls of a piece of work.

        Args:
            work: Its name in `WORK`.
            way: How it is done.
            arguments: Its other arguments.
            calls: How many calls are timed together.
            facts: Whether to say what was computed.
        """
        key = json.dumps([work, arguments], sort_keys=True)
        if self.prepared.get(way, ("", None))[0] != key:
            self.prepared[way] = (key, WORK[work](way, **arguments))
        task = self.prepared[way][1]
        functions = [task.fresh() for _ in range(calls)]
        gc.collect()
        start = time.process_time()
        for function in functions:
            result = function()
        seconds = (time.process_time() - start) / calls
        return {"seconds": seconds, "facts": task.facts(result) if facts else {}}


def main() -> None:
    """Answer the jobs on the standard input, one after the other."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever prints does not get among the answers
    tree = Path(os.environ["PYTHONPATH"]).resolve()
    if not Path(seqgp.__file__).resolve().is_relative_to(tree):
        raise ImportError(f"seqgp: expected that of {tree}, got {seqgp.__file__}.")
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    for category in (InputDataWarning, NumericalWarning, OptimizationWarning):
        warnings.simplefilter("ignore", category)  # data, jitter, optimisers that stop early
    worker = Worker()
    for line in sys.stdin:
        try:
            answer = worker.do(**json.loads(line))
        except Exception:
            answer = {"error": traceback.format_exc()}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()

"""Learning from a stream, one batch after the other.

Every observation lives in exactly one place: in the memory, as it is, or in the summary, folded
for good. An update takes memory and new observations together, converges their sites on top of the
summary, learns hyperparameters, chooses what to remember and folds the rest.
"""

from __future__ import annotations

import inspect
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from botorch.models.utils.inducing_point_allocators import (
    GreedyVarianceReduction,
    InducingPointAllocator,
)
from botorch.optim.closures import ForwardBackwardClosure
from botorch.optim.core import scipy_minimize
from botorch.optim.utils import get_parameters_and_bounds
from gpytorch.likelihoods import BernoulliLikelihood, SoftmaxLikelihood
from linear_operator.utils.warnings import NumericalWarning
from torch import Tensor

from seqgp.dual import Sites
from seqgp.likelihoods.discrete import OrdinalLikelihood
from seqgp.likelihoods.predictive import log_predictive
from seqgp.likelihoods.traits import is_conjugate, is_softmax, precision_floor, summary_noise
from seqgp.models.fit import clamp_to_bounds, turning_back
from seqgp.observations import Observations, check_not_held
from seqgp.progress import progress_bar
from seqgp.streaming.inducing_points import choose_inducing_points, cluster_inducing_points
from seqgp.streaming.memory import MemoryOptions
from seqgp.streaming.paper import paper_step, remember
from seqgp.validation import (
    check_arguments,
    check_inputs,
    check_targets,
    check_tensor,
    check_Y,
    renamed,
)
from seqgp.variational.elbo import DualELBO


class Remembered(NamedTuple):
    """The observations that a model holds as they are.

    Attributes:
        inputs: ``n x d``, as they were given.
        targets: ``[m x] n``, transformed.
        leverage: ``n`` Bayesian leverage scores under the present posterior.
    """

    inputs: Tensor
    targets: Tensor
    leverage: Tensor


@dataclass(frozen=True)
class UpdateRecord:
    """What an update did.

    Attributes:
        elbo: The evidence lower bound of all that is known, after the update. Observations that
            are not Gaussian count up to a constant once they have been folded.
        log_density: Mean log predictive density of the new observations before they were learnt;
            NaN if there were none.
        steps: Evaluations of the objective for hyperparameters.
        num_new: How many observations were new.
        num_memory: How many are in the memory now.
        memory_gained: How many of the new ones are.
        memory_lost: How many old ones were folded.
        num_inducing: The number of inducing points.
        hyperparameters: All hyperparameters, constrained, by name.
        seconds: The time that the update took.
    """

    elbo: float
    log_density: float
    steps: int
    num_new: int
    num_memory: int
    memory_gained: int
    memory_lost: int
    num_inducing: int
    hyperparameters: dict[str, Tensor]
    seconds: float


class StreamMixin:
    """The streaming half of `SequentialGP`."""

    def update(
        self: Any,
        X: Tensor,
        Y: Tensor,
        memory: MemoryOptions | int | None = None,
        noise: Tensor | None = None,
        learn: bool = True,
        mode: str = "pseudo-likelihood",
        optimizer: str = "lbfgs",
        steps: int | None = None,
        tol: float = 0.01,
        learning_rate: float = 0.01,
        inducing: str | None = None,
        max_inducing: int | None = None,
        discount: float = 1.0,
        site_steps: int | None = None,
        **arguments: Any,
    ) -> UpdateRecord:
        """Learn from the next batch of a stream, in place and at constant cost.

        The observations that the model holds (`memory`: at first the data that it was built with)
        and the new ones are learnt together on top of the summary of all others; then some of them
        are remembered and the rest is folded into the summary. If anything goes wrong, the model
        is left as it was.

        Args:
            X: ``n' x d`` inputs; there may be none, to learn more from what is known.
            Y: ``n' x m`` observations.
            memory: How much to remember, and what, or just how many observations; by default the
                model's ``memory_options``, 500 by leverage.
            noise: Noise variances of Gaussian observations, of the shape and on the scale of ``Y``.
            learn: Whether to learn hyperparameters; without, the update only conditions.
            mode: What is held fixed while hyperparameters are learnt: ``"pseudo-likelihood"``, the
                function of the inducing values that all folded data have become, or ``"paper"``,
                their tied duals, with the rest of the paper's rule (`seqgp.streaming.paper`), of
                which ``optimizer`` is part. A stream is learnt in one mode.
            optimizer: ``"lbfgs"``, or ``"adam"`` for the paper's protocol (100 steps).
            steps: The largest number of its steps; by default 40 of L-BFGS and 100 of Adam.
            tol: L-BFGS stops when a step raises the bound by less than this, in nats.
            learning_rate: Adam's learning rate.
            inducing: ``"adapt"`` adds or exchanges inducing points where new inputs are far from
                them, ``"learn"`` moves them by gradient along with the hyperparameters,
                ``"both"`` does both, ``"cluster"`` makes them the centres of
                clusters of all inputs so far (for inputs of many dimensions, where each is far
                from all others), ``"fixed"`` leaves them alone. By default
                ``"both"`` (``"learn"`` in paper mode), or ``"fixed"`` if nothing is learnt or the
                model was told not to learn them.
            max_inducing: Their largest number if they are adapted; by default what the model was
                built with, or would have been had there been enough inputs.
            discount: Factor for what the summary held before, for streams that drift.
            site_steps: The largest number of passes over the data that each convergence of the
                sites may take. By default as many as it takes, up to 100; thousands of observations
                of many classes can do with 10.
            arguments: Per-point arguments of the likelihood (``total_count=``), ``... x n'`` or of
                the shape of ``Y``.

        Returns:
            What the update did.

        Example:
            >>> import torch
            >>> from gpytorch.likelihoods import PoissonLikelihood
            >>> from seqgp import SequentialGP
            >>> X = torch.rand(200, 1, dtype=torch.double)
            >>> Y = torch.poisson(3 + 2 * torch.sin(6 * X))
            >>> model = SequentialGP(X[:50], Y[:50], likelihood=PoissonLikelihood())
            >>> record = model.update(X[50:], Y[50:], steps=5)
            >>> record.num_new, record.num_memory
            (150, 200)
        """
        start_time = time.perf_counter()
        if mode not in ("pseudo-likelihood", "paper"):
            raise ValueError(f"mode: expected pseudo-likelihood or paper, got {mode!r}.")
        if inducing is None:
            Z = self.variational_strategy.inducing_points
            learns = learn and isinstance(Z, torch.nn.Parameter)
            inducing = ("learn" if mode == "paper" else "both") if learns else "fixed"
        if inducing not in ("learn", "adapt", "both", "cluster", "fixed"):
            raise ValueError(
                f"inducing: expected learn, adapt, both, cluster or fixed, got {inducing!r}."
            )
        if optimizer not in ("adam", "lbfgs"):
            raise ValueError(f"optimizer: expected adam or lbfgs, got {optimizer!r}.")
        if self.num_updates and mode != self.stream_mode:
            raise ValueError(
                f"mode: this stream has been learnt with {self.stream_mode!r}, in which its "
                f"summary means something else; got {mode!r}."
            )
        if not 0 <= discount <= 1:
            raise ValueError(f"discount: expected a number in [0, 1], got {discount}.")
        if not tol >= 0 or (steps is not None and steps < 0):
            raise ValueError(f"tol, steps: expected at least zero, got {tol} and {steps}.")
        if site_steps is not None and site_steps < 1:
            raise ValueError(f"site_steps: expected at least one, got {site_steps}.")
        present = self.variational_strategy.inducing_points.shape[-2]
        if max_inducing is not None and max_inducing < present:
            raise ValueError(
                f"max_inducing: expected at least the present number of points, {present}, "
                f"got {max_inducing}; variational_strategy.set_inducing_points sets fewer."
            )
        if mode == "paper" and discount != 1:
            raise ValueError("discount: the paper's rule knows none.")
        if steps is None:
            steps = 40 if optimizer == "lbfgs" and mode != "paper" else 100
        X, targets, arguments = self._check_observations(X, Y, noise, arguments)
        memory = MemoryOptions.of(self.memory_options if memory is None else memory)
        if memory.replay and (mode == "paper" or is_conjugate(self.likelihood)):
            raise ValueError(
                "replay: the paper's rule knows none, and Gaussian observations need none: their "
                "sites stay exact; pass MemoryOptions(replay=0)."
            )
        num_old, num_new = self.num_data, X.shape[-2]
        with _restored_on_error(self):
            self.variational_strategy.summary_share = 1 - memory.replay
            density = self.log_predictive_density(X, targets, **arguments)
            stands_for = self._stands_for() if learn else None
            self._extend(X, targets, arguments)
            self._note_classes()
            if inducing in ("adapt", "both"):
                allocator = self._inducing_point_allocator
                if mode == "paper" and allocator is None:
                    allocator = GreedyVarianceReduction()
                self._adapt_inducing_points(max_inducing, allocator)
            if inducing == "cluster":
                self._cluster_inducing_points(num_new, max_inducing)
            learns_Z = inducing in ("learn", "both")
            if mode == "paper":
                taken, bound = paper_step(self, num_old, learn, steps, learning_rate, learns_Z)
            else:
                taken = 0
                if learn:
                    taken = self._learn(
                        optimizer, steps, tol, learning_rate, learns_Z, stands_for, site_steps
                    )
                self.refresh(max_steps=site_steps)
            sites, leverage = self._sites_and_leverage()
            if mode != "paper":
                weights = self._replay_weights()
                start = sites if weights is None else Sites(*(weights * each for each in sites))
                with torch.no_grad():
                    # Sites that were not to converge are not to do so for the sake of the record.
                    bound, _ = self.bound(start, max_steps=None if site_steps is None else 1)
            limits = memory.at(self.num_seen + num_new)
            classes = self._classes() if memory.balance else None
            kept = limits.choose(leverage, num_new, self.num_updates, classes)
            inclusion = limits.inclusion_of(leverage, num_new, classes)
            self.memory_weights = self.memory_weights / inclusion
            if mode == "paper":
                remember(self, kept)
            else:
                changed = self._fold_all_but(kept, sites, discount)
                # What is folded keeps its sites, so the posterior stays, unless old data fade or
                # the memory counts for what has been folded.
                if changed or discount != 1 or memory.replay:
                    # Not far from where it was.
                    self.refresh(max_steps=None if site_steps is None else -(-site_steps // 2))
            self.stream_mode = mode
            self.num_updates += 1
            self.num_seen += num_new
        gained = int((kept >= num_old).sum())
        return UpdateRecord(
            elbo=float(bound.sum()),
            log_density=float(density.mean()),
            steps=taken,
            num_new=num_new,
            num_memory=len(kept),
            memory_gained=gained,
            memory_lost=num_old - (len(kept) - gained),
            num_inducing=self.variational_strategy.inducing_points.shape[-2],
            hyperparameters=self.constrained_hyperparameters(),
            seconds=time.perf_counter() - start_time,
        )

    def update_stream(
        self,
        stream: Iterable[Sequence[Any]],
        callback: Callable[[UpdateRecord], object] | None = None,
        progress: bool = True,
        **options: Any,
    ) -> list[UpdateRecord]:
        """Update with each batch of a stream.

        If a batch cannot be learnt, a note of the error says which; those before it have been
        learnt and stay so, and a callback has had their records.

        Args:
            stream: Any iterable of pairs ``(X, Y)``: a `DataLoader`, a generator, a list. Or of
                triples, of which the last is a dictionary of per-point arguments (``total_count``,
                ``noise``) of that batch.
            callback: Called with the record of each update.
            progress: Whether to show a progress bar (only on a terminal).
            options: Options of `update`.

        Returns:
            The records of all updates.

        Example:
            >>> import torch
            >>> from gpytorch.likelihoods import BernoulliLikelihood
            >>> from seqgp import SequentialGP
            >>> X = torch.rand(90, 2, dtype=torch.double)
            >>> Y = (X.sum(-1, keepdim=True) > 1).to(X)
            >>> model = SequentialGP(X[:30], Y[:30], likelihood=BernoulliLikelihood())
            >>> batches = zip(X[30:].split(30), Y[30:].split(30))
            >>> records = model.update_stream(batches, memory=20, steps=3)
            >>> [record.num_memory for record in records]
            [20, 20]
        """
        records = []
        bar = progress_bar(
            stream, desc="stream", unit=" updates", disable=None if progress else True
        )
        for number, item in enumerate(bar):
            if not isinstance(item, Sequence) or len(item) not in (2, 3):
                raise TypeError(
                    "stream: expected pairs (X, Y), or triples (X, Y, arguments), the last a "
                    f"dictionary; got a {type(item).__name__} as batch {number}."
                )
            X, Y, *more = item
            try:
                record = self.update(X, Y, **options, **(more[0] if more else {}))
            except Exception as error:
                error.add_note(
                    f"This was batch {number} of the stream, counted from 0; those before it have "
                    "been learnt."
                )
                raise
            records.append(record)
            bar.set_postfix(log_density=f"{record.log_density:.3f}", memory=record.num_memory)
            if callback is not None:
                callback(record)
        return records

    def forget(
        self: Any, X: Tensor, Y: Tensor, noise: Tensor | None = None, **arguments: Any
    ) -> None:
        """Remove observations that the model has learnt.

        Observations in the memory are removed exactly. Others are taken out of the summary with
        the sites that they have under the present posterior: exact for Gaussian observations if
        hyperparameters and inducing points are those that they were folded with, an approximation
        for all others, since what was folded with or after them keeps the sites that it had.
        Of a softmax with classes still to come a bound was folded, which moves on with the
        posterior: it is taken out nearly or, where that would leave less than nothing, refused.

        A summary is a sum, and cannot tell what it is a sum of. An observation that was never
        learnt is only noticed, and refused, where the posterior knows too little to have learnt it;
        amid many others it would be taken out of these. Forget only what you know to have been
        learnt.

        Args:
            X: ``n' x d`` inputs.
            Y: ``n' x m`` observations.
            noise: Noise variances of Gaussian observations.
            arguments: Per-point arguments of the likelihood.

        Example:
            >>> import torch
            >>> from seqgp import SequentialGP
            >>> from gpytorch.kernels import RBFKernel
            >>> X = torch.linspace(0, 1, 20, dtype=torch.double).unsqueeze(-1)
            >>> Y = torch.sin(6 * X)
            >>> model = SequentialGP(X, Y, covar_module=RBFKernel())
            >>> options = {"covar_module": RBFKernel(), "inducing_points": X}
            >>> other = SequentialGP(X[1:], Y[1:], **options)  # which never learnt the first
            >>> model.forget(X[:1], Y[:1])
            >>> torch.allclose(model.posterior(X).mean, other.posterior(X).mean)
            True
        """
        X, targets, arguments = self._check_observations(X, Y, noise, arguments)
        with _restored_on_error(self):
            known = _matches(self.train_inputs[0], self.train_targets, X, targets)
            keep = torch.ones(self.num_data, dtype=torch.bool, device=X.device)
            keep[[i for i in known if i is not None]] = False
            rest = torch.tensor([i is None for i in known], device=X.device).nonzero().squeeze(-1)
            if len(rest):
                folded = Observations(X, targets, self.likelihood, arguments).select(rest)
                with renamed(inputs="X", targets="Y"):
                    self.variational_strategy.unfold(
                        self.with_outputs(self.transform_train_inputs(folded.inputs)),
                        folded.targets,
                        self.likelihood,
                        self._unseen_classes(),
                        **folded.arguments,
                    )
            self._select(keep.nonzero().squeeze(-1))
            self.refresh()
            self.num_seen -= len(X)

    @property
    def memory(self: Any) -> Remembered:
        """The observations that the model holds as they are, and their leverage.

        Targets are transformed, if there is an ``outcome_transform``; inputs are not.
        """
        _, leverage = self._sites_and_leverage()
        return Remembered(self.train_inputs[0], self.train_targets, leverage)

    def leverage(
        self: Any, X: Tensor, Y: Tensor, noise: Tensor | None = None, **arguments: Any
    ) -> Tensor:
        r"""Bayesian leverage scores :math:`\beta_i v_i`, summed over latents and outputs.

        Args:
            X: ``n' x d`` inputs.
            Y: ``n' x m`` observations.
            noise: Noise variances of Gaussian observations.
            arguments: Per-point arguments of the likelihood.

        Returns:
            ``n'`` scores: how much each observation determines the posterior at its own input.
        """
        X, targets, arguments = self._check_observations(X, Y, noise, arguments)
        inputs = self.with_outputs(self.transform_train_inputs(X))
        sites, variance = self.variational_strategy.sites(
            inputs, targets, self.likelihood, **arguments
        )
        return _sum_over_batch(sites.beta * variance)

    @torch.no_grad()
    def log_predictive_density(self: Any, X: Tensor, targets: Tensor, **arguments: Any) -> Tensor:
        """Log predictive density of observations.

        Args:
            X: ``... x n x d`` raw inputs.
            targets: ``... [x m] x n`` transformed targets.
            arguments: Per-point arguments of the likelihood.

        Returns:
            A tensor of the shape of the targets.
        """
        check_inputs(X, self.train_inputs[0].shape[-1], "X")
        self._check_target_shape(X, targets)
        check_targets(targets, self.with_outputs(X), self.likelihood, **arguments)
        training = self.training
        f = self.eval()(self.transform_inputs(X))
        self.train(training)
        return log_predictive(self.likelihood, targets, f.mean, f.variance, **arguments)

    # ---------------------------------------------------------------- the steps of an update

    def _check_target_shape(self: Any, X: Tensor, targets: Tensor) -> None:
        """Raise unless transformed targets are ``... [x m] x n`` for inputs ``... x n x d``."""
        check_tensor(targets, "targets")
        outputs = [self.num_columns] if self.has_output_dim else []
        batch = torch.broadcast_shapes(X.shape[:-2], self.batch_shape)
        shape = torch.Size([*batch, *outputs, X.shape[-2]])
        own, given = 1 + len(outputs), targets.dim()
        fits = own <= given <= len(shape) and targets.shape[-own:] == shape[-own:]
        leading = zip(targets.shape[:-own], shape[-given:], strict=False)
        if not fits or any(k not in (1, n) for k, n in leading):
            raise ValueError(
                f"targets: expected shape {' x '.join(map(str, shape))} (a row per output, if "
                f"there are several), got {tuple(targets.shape)}."
            )

    def _check_observations(
        self: Any, X: Tensor, Y: Tensor, noise: Tensor | None, arguments: dict[str, Any]
    ) -> tuple[Tensor, Tensor, dict[str, Any]]:
        """Inputs, transformed targets and arguments; raises if anything is wrong with them."""
        self.check_not_fantasy()
        if self.batch_shape:
            raise RuntimeError("A batch of models cannot be updated, only a single one.")
        check_inputs(X, self.train_inputs[0].shape[-1], "X")
        if X.dim() != 2:
            raise ValueError(f"X: expected shape n x d, got {tuple(X.shape)}.")
        check_Y(X, Y, "X", "Y", self.num_columns, self.likelihood)
        if noise is not None:
            check_tensor(noise, "noise")
        if noise is not None and noise.shape != Y.shape:
            raise ValueError(
                f"noise: expected the shape of Y, {tuple(Y.shape)}, got {tuple(noise.shape)}."
            )
        options = inspect.signature(StreamMixin.update).parameters
        check_arguments(self.likelihood, arguments, options, needed=len(X) > 0)
        if len(X):
            check_not_held(self.likelihood, arguments)
        arguments = self._per_point(arguments, Y.shape)
        if noise is not None and self.num_data and "noise" not in self.likelihood_arguments:
            raise ValueError(
                "noise: only a model that has been built with train_Yvar takes the noise "
                "variances of Gaussian observations."
            )
        dtype = self.train_inputs[0].dtype
        X, Y = X.to(dtype), Y.to(dtype)
        with torch.no_grad():
            if hasattr(self, "outcome_transform"):
                self.outcome_transform.eval()
                Y, noise = self.outcome_transform(Y, noise, X=self.transform_train_inputs(X))
            targets = self.to_targets(Y)
            if noise is not None:
                arguments = {**arguments, "noise": self.to_targets(noise)}
        check_targets(targets, self.with_outputs(X), self.likelihood, name="Y", **arguments)
        return X, targets, arguments

    def _extend(self: Any, X: Tensor, targets: Tensor, arguments: dict[str, Any]) -> None:
        """Append to the training data, without learning from them."""
        (old_X,), old_targets, old_arguments = (
            self.train_inputs,
            self.train_targets,
            self.likelihood_arguments,
        )
        old = Observations(old_X, old_targets, self.likelihood, old_arguments)
        both = old.append(Observations(X.detach(), targets, self.likelihood, arguments))
        self.train_inputs, self.train_targets = (both.inputs,), both.targets
        self.likelihood_arguments = both.arguments
        self.memory_weights = torch.cat([self.memory_weights, X.new_ones(X.shape[-2])])

    def _select(self: Any, index: Tensor) -> None:
        """Reduce the training data to those with given indices."""
        self.train_inputs = (self.train_inputs[0][..., index, :],)
        self.train_targets = self.train_targets[..., index]
        self.memory_weights = self.memory_weights[index]
        self.likelihood_arguments = {
            key: value[..., index] for key, value in self.likelihood_arguments.items()
        }

    def _adapt_inducing_points(
        self: Any, max_points: int | None, allocator: InducingPointAllocator | None
    ) -> None:
        """Inducing points where memory and new observations ask for them.

        The duals stay in the basis that they were made in, so that nothing is lost before the new
        points have found their places.
        """
        strategy, Z = self.variational_strategy, self.variational_strategy.inducing_points.detach()
        X, _, _ = self.training_data()
        chosen = choose_inducing_points(
            _first_of_batch(Z),
            _first_of_batch(X),
            self.covar_module,
            max(Z.shape[-2], self.max_inducing) if max_points is None else max_points,
            allocator,
        )
        if chosen.shape != Z.shape[-2:] or not torch.equal(chosen, Z):
            strategy.start_from(chosen)

    def _cluster_inducing_points(self: Any, num_new: int, max_points: int | None) -> None:
        """Inducing points as the centres of clusters of what has been seen."""
        strategy, Z = self.variational_strategy, self.variational_strategy.inducing_points.detach()
        if Z.dim() > 2:
            raise ValueError("inducing: points of several models or outputs cannot be clustered.")
        chosen = cluster_inducing_points(
            Z,
            self.transform_train_inputs(self.train_inputs[0]),
            self.memory_weights,
            num_new,
            self.num_seen,
            max(Z.shape[-2], self.max_inducing) if max_points is None else max_points,
            torch.Generator().manual_seed(self.num_updates),
        )
        if num_new:
            strategy.start_from(chosen)

    @torch.enable_grad()
    def _learn(
        self: Any,
        optimizer: str,
        steps: int,
        tol: float,
        learning_rate: float,
        learn_inducing: bool,
        stands_for: Tensor | None,
        site_steps: int | None,
    ) -> int:
        """Maximise the bound of memory, new observations and summary."""
        mll = DualELBO(self.likelihood, self)
        parameters, bounds = get_parameters_and_bounds(
            mll,
            name_filter=None if learn_inducing else lambda name: "inducing_points" not in name,
            requires_grad=True,
        )
        if not parameters or not steps:
            return 0
        sites, taken = None, 0

        def objective() -> Tensor:
            nonlocal sites, taken
            taken += 1
            # The sites follow the hyperparameters closely from step to step: a loose tolerance.
            site_tol = 1e-3 if optimizer == "adam" else 1e-5
            bound, sites = self.bound(sites, site_tol, stands_for, site_steps)
            return -mll.with_priors(bound, 1).sum()

        def forget_sites() -> None:
            nonlocal sites
            sites = None

        loss = turning_back(objective, parameters, forget_sites)
        training = self.training
        self.train()
        if optimizer == "adam":
            adam = torch.optim.Adam(list(parameters.values()), lr=learning_rate)
            for _ in range(steps):
                adam.zero_grad()
                loss().backward()
                adam.step()
                clamp_to_bounds(parameters, bounds)
        else:
            with torch.no_grad():
                size = abs(float(loss()))
            closure = ForwardBackwardClosure(loss, parameters)
            options = {"maxiter": steps, "ftol": tol / max(size, 1.0)}  # relative to the objective
            with warnings.catch_warnings():
                # Of sites at hyperparameters that are only tried out; those that stay are checked.
                warnings.simplefilter("ignore", NumericalWarning)
                scipy_minimize(closure, parameters, bounds, options=options)
        self.train(training)
        return taken

    def _classes(self: Any) -> Tensor:
        """The classes of the observations at hand."""
        kinds = BernoulliLikelihood | OrdinalLikelihood | SoftmaxLikelihood
        if isinstance(self.likelihood, kinds) and self.train_targets.dim() == 1:
            return self.train_targets
        raise ValueError(
            "balance: expected observations of one output that are classes, got those of "
            f"{self.num_columns} with a {type(self.likelihood).__name__}."
        )

    def _replay_weights(self: Any) -> Tensor | None:
        """How often each observation at hand counts (`MemoryOptions.replay`); ``None`` for once."""
        share = self.variational_strategy.summary_share
        return None if share == 1 else 1 + (1 - share) * (self.memory_weights - 1)

    def _stands_for(self: Any) -> Tensor | None:
        """For how much of the summary each remembered observation stands.

        One that was kept with probability ``p`` stands for ``1/p - 1`` others like it, which have
        been folded with about the precision that its own site has now.
        """
        if not self.num_data or not bool((self.memory_weights > 1).any()):
            return None
        others = (self.memory_weights - 1) * self.variational_strategy.summary_share
        if summary_noise(self.likelihood) is not None:
            return others
        sites, _ = self._sites_and_leverage()
        return others * sites.beta

    def _sites_and_leverage(self: Any) -> tuple[Sites, Tensor]:
        """Sites and leverage scores of the training data under the present posterior."""
        X, Y, arguments = self.training_data()
        sites, variance = self.variational_strategy.sites(X, Y, self.likelihood, **arguments)
        sites = Sites(sites.lam, sites.beta.expand_as(sites.lam))
        return sites, _sum_over_batch(sites.beta * variance)

    def _note_classes(self: Any) -> None:
        """Which classes of a softmax there have been so far."""
        if is_softmax(self.likelihood):
            now = self.train_targets.unique().long().tolist()
            self.classes_seen = tuple(sorted({*self.classes_seen, *now}))

    def _unseen_classes(self: Any) -> Tensor | None:
        """``c``, which classes of a softmax nobody has seen yet; ``None`` if there are none."""
        if not is_softmax(self.likelihood) or len(self.classes_seen) >= self.likelihood.num_classes:
            return None
        unseen = self.train_targets.new_ones(self.likelihood.num_classes, dtype=torch.bool)
        unseen[list(self.classes_seen)] = False
        return unseen

    def _fold_all_but(self: Any, kept: Tensor, sites: Sites, discount: float) -> bool:
        """Fold what is not kept into the summary, with its sites, but for those of new classes.

        The latent of a class that nobody has seen yet will rise somewhere once it comes. Where
        others are certain, their own sites would not object: a certain choice has no curvature.
        Those of a lower bound do.

        Returns:
            Whether the posterior is another now: because of such sites, or of those of negative
            precision, which cannot be folded and have been cut off.
        """
        gone = torch.ones(self.num_data, dtype=torch.bool, device=kept.device)
        gone[kept] = False
        index, unseen = gone.nonzero().squeeze(-1), self._unseen_classes()
        if len(index) or discount != 1.0:
            X, Y, arguments = self.training_data()
            data = Observations(X, Y, self.likelihood, arguments).select(index)
            sites = Sites(sites.lam[..., index], sites.beta[..., index])
            if unseen is not None:
                sites, _ = self.variational_strategy.sites(
                    data.inputs, data.targets, self.likelihood, unseen, **data.arguments
                )
            self.variational_strategy.fold(
                data.inputs, data.targets, sites, self.likelihood, discount, **data.arguments
            )
        self._select(kept)
        bounded = unseen is not None and len(index) > 0
        return bounded or precision_floor(self.likelihood) is None

    def constrained_hyperparameters(self: Any) -> dict[str, Tensor]:
        """All hyperparameters by name, with their constraints applied."""
        return {
            name.replace("raw_", ""): (
                parameter if constraint is None else constraint.transform(parameter)
            )
            .detach()
            .clone()
            for name, parameter, constraint in self.named_parameters_and_constraints()
            if not name.endswith("inducing_points")
        }


def _first_of_batch(X: Tensor) -> Tensor:
    """``n x d``, the first of ``... x n x d``; there may be none of ``n``."""
    return X if X.dim() == 2 else X.flatten(0, -3)[0]


def _sum_over_batch(scores: Tensor) -> Tensor:
    """``n`` sums of ``... x n`` scores."""
    return scores.sum(tuple(range(scores.dim() - 1))) if scores.dim() > 1 else scores


def _matches(inputs: Tensor, targets: Tensor, X: Tensor, new_targets: Tensor) -> list[int | None]:
    """For each new observation, the index of one among the old ones that is the same."""
    # One new input at a time: inputs may be images, and new x old x d too much.
    rows = [(inputs == x).all(-1) for x in X]
    same = torch.stack(rows) if rows else inputs.new_zeros(0, len(inputs), dtype=torch.bool)
    equal = targets.unsqueeze(-2) == new_targets.unsqueeze(-1).to(targets)
    same = same & (equal if equal.dim() == 2 else equal.all(0))
    taken: set[int] = set()
    result: list[int | None] = []
    for row in same:
        free = [i for i in row.nonzero().flatten().tolist() if i not in taken]
        result.append(free[0] if free else None)
        taken.update(free[:1])
    return result


@contextmanager
def _restored_on_error(model: Any) -> Iterator[None]:
    """Whatever goes wrong inside, the model is as it was before."""
    parameters = [(p, p.detach().clone()) for p in model.parameters()]
    modules = [(m, dict(m._buffers), dict(m._parameters)) for m in model.modules()]
    data = (model.train_inputs, model.train_targets, model.likelihood_arguments)
    training, weights = model.training, model.memory_weights
    counts = model.num_updates, model.num_seen, model.stream_mode, model.classes_seen
    share = model.variational_strategy.summary_share
    try:
        yield
    except BaseException:
        for module, buffers, own in modules:
            module._buffers.update(buffers)
            module._parameters.update(own)
        with torch.no_grad():
            for parameter, value in parameters:
                parameter.copy_(value)
        model.train_inputs, model.train_targets, model.likelihood_arguments = data
        model.memory_weights = weights
        model.num_updates, model.num_seen, model.stream_mode, model.classes_seen = counts
        model.variational_strategy.summary_share = share
        model.variational_strategy.clear_cache()
        model.train(training)
        raise

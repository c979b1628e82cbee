"""What all ask-and-tell loops share: the space, pending points, contexts and the saved state."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from seqgp.acquisition.contexts import Context, check_context, options_in_context
from seqgp.acquisition.mixed_space import check_bounds, quasi_random_points
from seqgp.progress import progress_bar
from seqgp.validation import check_inputs, is_whole

#: Points are the same if all inputs differ by no more than this share of their range.
SAME = 1e-6


class AskTell:
    """A loop that proposes inputs and is told outcomes. This is the base class of all loops.

    Proposals depend only on what has been told, the pending points, the arguments and the seed. All
    learning happens when outcomes are told.

    Args:
        bounds: ``2 x d`` bounds of the inputs, lower bounds first.
        num_initial: The number of outcomes before models are used. By default ``2 (d + 1)``.
        refit_every: The number of new outcomes after which hyperparameters are fitted again. With
            ``None``, when there are a tenth more.
        fit_options: Options of L-BFGS for fitting hyperparameters.
        seed: Seed of all random numbers.
        options: Options of BoTorch's optimisers of acquisition functions.

    Attributes:
        X: ``n x d`` inputs that have been told.
        pending: ``k x d`` inputs that are being evaluated, of those to be remembered.
    """

    #: The version of the saved state.
    _version = 1
    #: The attributes that must be the same when a state is loaded.
    _fixed: tuple[str, ...] = ("bounds",)

    def __init__(
        self,
        bounds: Tensor,
        num_initial: int | None,
        refit_every: int | None,
        fit_options: dict[str, Any] | None,
        seed: int,
        options: dict[str, Any],
    ) -> None:
        check_inputs(bounds, name="bounds")
        check_bounds(bounds, strict=True)
        if refit_every is not None and refit_every < 1:
            raise ValueError(f"refit_every: expected at least 1, got {refit_every}.")
        if num_initial is not None and num_initial < 0:
            raise ValueError(f"num_initial: expected at least 0, got {num_initial}.")
        d = bounds.shape[-1]
        self.bounds = bounds.detach().clone()
        self.num_initial = 2 * (d + 1) if num_initial is None else num_initial
        self.refit_every = refit_every
        self.fit_options = {"maxiter": 50} if fit_options is None else fit_options
        self.seed, self.options = seed, options
        self.X = self.bounds.new_empty(0, d)
        self.pending = self.bounds.new_empty(0, d)

    # ---------------------------------------------------------------- pending points

    def forget_pending(self, X: Tensor | None = None) -> None:
        """Forget remembered points, for example of evaluations that were cancelled.

        Args:
            X: ``k x d`` points. By default all.
        """
        if X is None:
            X = self.pending
        self._check_X(X, "X")
        self.pending = self._without(self.pending, X)

    def _all_pending(self, X_pending: Tensor | None) -> Tensor:
        """Remembered points, and those passed as an argument."""
        if X_pending is None:
            return self.pending
        self._check_X(X_pending, "X_pending")
        return torch.cat([self.pending, X_pending.detach()])

    def _remember(self, X: Tensor, wanted: bool) -> Tensor:
        """Return proposals, which are pending from now on if it is wanted."""
        if wanted:
            self.pending = torch.cat([self.pending, X])
        return X

    def _without(self, points: Tensor, X: Tensor) -> Tensor:
        """Remove one of the points for each row of ``X`` that is the same."""
        left = torch.ones(len(points), dtype=torch.bool, device=points.device)
        for same in self._same(X, points):
            left[(same & left).nonzero()[:1]] = False
        return points[left]

    def _same(self, X: Tensor, others: Tensor) -> Tensor:
        """Which of ``n`` points are the same as which of ``k`` others, ``n x k``."""
        span = self.bounds[1] - self.bounds[0]
        return ((X.unsqueeze(1) - others).abs() <= SAME * span).all(-1)

    def _become(self, **attributes: Any) -> None:
        """Change attributes together: an interrupt finds all of them changed, or none.

        Args:
            attributes: The new values, by name.
        """
        vars(self).update(attributes)

    # ---------------------------------------------------------------- proposals

    def _check_request(self, q: int, context: Context | None) -> dict[str, Any]:
        """Check arguments of `ask`. Return the options of the optimiser in the context."""
        if not is_whole(q) or q < 1:
            raise ValueError(f"q: expected a whole number of points, at least one, got {q!r}.")
        if context is None:
            return self.options
        check_context(context, self.bounds)
        return options_in_context(self.options, context)

    @contextmanager
    def _seeded(self) -> Iterator[int]:
        """Seed the global generator for a while, by the number of outcomes told."""
        devices = [self.bounds.device] if self.bounds.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):
            seed = self.seed * 1_000_003 + len(self.X)
            torch.manual_seed(seed)
            yield seed

    def _initial_points(self, known: Tensor, q: int, options: dict[str, Any]) -> Tensor:
        """The first points of a quasi-random sequence that are not known."""
        X = quasi_random_points(len(known) + q, self.bounds, options, self.seed)
        new = X[~self._same(X, known).any(-1)][:q]
        # In a discrete space all points may be known: repeat some of them.
        return new if len(new) == q else X[-q:]

    def _rounds(
        self,
        propose: Callable[[int], Tensor],
        number: int,
        q: int,
        progress: bool,
        desc: str,
        shown: Callable[[], dict[str, Any]],
    ) -> Iterator[Tensor]:
        """Yield proposals, each of which must be told, until a number of outcomes is reached."""
        bar = progress_bar(
            total=number, initial=len(self.X), desc=desc, disable=None if progress else True
        )
        with bar:
            while (before := len(self.X)) < number:
                yield propose(min(q, number - before))
                bar.update(len(self.X) - before)
                bar.set_postfix(**shown())

    # ---------------------------------------------------------------- state

    def state_dict(self) -> dict[str, Any]:
        """Return all outcomes and everything that was learnt: tensors, numbers and strings.

        Save it with ``torch.save``, and load it with ``torch.load(..., weights_only=True)``. It
        does not include options: build a loop with the same options, then call `load_state_dict`.
        """
        fixed = {name: _copied(getattr(self, name)) for name in self._fixed}
        own = {"version": self._version, "X": self.X.clone(), "pending": self.pending.clone()}
        return own | fixed

    def _check_state(self, state: Any) -> tuple[Tensor, Tensor]:
        """Raise unless a state is of a loop with the same options.

        Returns:
            The inputs told and the pending ones.
        """
        kind = type(self).__name__
        is_state = isinstance(state, Mapping) and "version" in state
        if is_state and state["version"] == self._version:
            is_state = state.keys() >= self.state_dict().keys()
        if not is_state:
            raise ValueError(
                f"state: not the state of a {kind}; expected the result of state_dict()."
            )
        if state["version"] != self._version:
            raise ValueError(
                f"state: expected version {self._version}, got {state['version']}: it was saved by "
                "another version of seqgp."
            )
        for name in self._fixed:
            saved, own = state[name], getattr(self, name)
            if not _equal(saved, own, self.bounds):
                raise ValueError(
                    f"state: saved with {name} = {saved}, but this {kind} has {own}; build it "
                    "with the same options."
                )
        found = []
        for name in ("X", "pending"):
            found.append(state[name].to(self.bounds))
            self._check_X(found[-1], f"state['{name}']")
        return found[0], found[1]

    # ---------------------------------------------------------------- checks

    def _as_tensor(self, values: Any, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """Convert numbers or labels to a tensor on the device of the bounds."""
        try:
            return torch.as_tensor(values, dtype=dtype, device=self.bounds.device).detach()
        except (TypeError, ValueError, RuntimeError) as error:
            missing = isinstance(values, list | tuple) and None in values
            hint = "; use NaN where there is no value" if missing else ""
            raise TypeError(f"{name}: expected numbers, got {values!r:.50}{hint}.") from error

    def _outcomes(self, X: Tensor, Y: Any) -> Tensor:
        """Check inputs ``n x d``, and convert outcomes to ``n`` numbers."""
        self._check_X(X, "X")
        Y = self._as_tensor(Y, "Y", self.bounds.dtype)
        if Y.numel() != len(X):
            raise ValueError(f"Y: expected {len(X)} values, got shape {tuple(Y.shape)}.")
        return Y.reshape(-1)

    def _check_X(self, X: Tensor, name: str) -> None:
        check_inputs(X, name=name)
        if X.dim() != 2 or X.shape[-1] != self.bounds.shape[-1]:
            raise ValueError(
                f"{name}: expected shape n x {self.bounds.shape[-1]}, got {tuple(X.shape)}."
            )
        if X.dtype != self.bounds.dtype or X.device != self.bounds.device:
            raise TypeError(
                f"{name}: expected {self.bounds.dtype} on {self.bounds.device}, like the bounds, "
                f"got {X.dtype} on {X.device}."
            )


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _equal(saved: Any, own: Any, like: Tensor) -> bool:
    """Whether two tensors, numbers or strings are equal, after rounding to a dtype."""
    if any(value is None or isinstance(value, str) for value in (saved, own)):
        return saved is own or (isinstance(own, str) and saved == own)
    before, now = (torch.as_tensor(value).to(like) for value in (saved, own))
    return torch.equal(before, now)

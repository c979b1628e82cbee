"""The state of a strategy: its duals, their basis, and cached factorisations."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from gpytorch import settings
from gpytorch.distributions import MultivariateNormal
from gpytorch.likelihoods import Likelihood
from gpytorch.models import ApproximateGP
from gpytorch.variational import _VariationalDistribution
from gpytorch.variational._variational_strategy import _VariationalStrategy
from linear_operator import to_dense
from linear_operator.operators import (
    CholLinearOperator,
    DiagLinearOperator,
    TriangularLinearOperator,
)
from linear_operator.utils.errors import NotPSDError
from torch import Tensor
from torch.distributions import register_kl
from torch.nn import Module, Parameter
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from seqgp.dual import (
    Basis,
    Duals,
    Factors,
    Summary,
    discounted,
    duals_now,
    empty_summary,
    factorise,
    kl_divergence,
    rebase_summary,
    scaled_cholesky,
    solve_lower,
    transport_matrix,
    zero_duals,
)
from seqgp.dual.linalg import broadcast_shapes, relative_jitter
from seqgp.dual.natural_parameters import natural_factors
from seqgp.dual.projection import coincident
from seqgp.dual.summary import moved
from seqgp.likelihoods.traits import summary_noise
from seqgp.validation import check_inducing_points
from seqgp.variational.own_steps import OwnSteps
from seqgp.variational.prior_blocks import Forward, joint_prior, prior_of, values_prior

#: The tensors of a strategy and their event dimensions; all leading dimensions are batch
#: dimensions. This is the one list that state_dict, checkpoints, copies, conversion and output
#: selection use.
TENSORS: Mapping[str, int] = {
    "inducing_points": 2,
    "dual_lam": 1,
    "dual_B": 2,
    "reference_points": 2,
    "reference_mean": 1,
    "reference_chol": 2,
    "summary_lam": 1,
    "summary_B": 2,
    "summary_square": 0,
    "summary_count": 0,
}

_PLAIN = frozenset({bool, int, float, str, type(None), torch.Size})
_COLLECTIONS = frozenset({dict, OrderedDict, set, list, tuple})
#: Attributes of every module. A prior depends on none of them but ``training``.
_HOUSEKEEPING = frozenset(vars(Module()))

#: Whether the objective being evaluated holds the sites fixed on purpose.
_SITES_ARE_FIXED = ContextVar("sites_are_fixed", default=False)


@contextmanager
def fixed_sites() -> Iterator[None]:
    """Mark objectives of hyperparameters alone, whose caller takes care of the sites."""
    token = _SITES_ARE_FIXED.set(True)
    try:
        yield
    finally:
        _SITES_ARE_FIXED.reset(token)


class BatchShape(NamedTuple):
    """The only attribute of a variational distribution that GPyTorch's wrappers need."""

    batch_shape: torch.Size


class Leaves:
    """Duals whose gradients, after a backward pass, are natural gradients; an optimiser moves them.

    Attributes:
        tensors: The two duals. They are replaced whenever those of the strategy are.
    """

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self._source: tuple[Tensor, ...] = ()
        self._versions: tuple[int, ...] = ()

    def of(self, duals: Duals) -> Duals:
        """Return the leaves of a strategy's duals.

        Args:
            duals: The present duals of the strategy.
        """
        versions = tuple(tensor._version for tensor in duals)
        same = len(self._source) == 2 and all(
            a is b for a, b in zip(self._source, duals, strict=True)
        )
        if not same or versions != self._versions:
            self._source, self._versions = tuple(duals), versions
            self.tensors[:] = [tensor.detach().clone().requires_grad_(True) for tensor in duals]
        return Duals(*self.tensors)


class WhitenedPrior(MultivariateNormal):
    """``p(v) = N(0, I)``."""


class WhitenedPosterior(MultivariateNormal):
    """``q(v)``.

    Attributes:
        divergence: Its Kullback-Leibler divergence from the prior.
    """

    divergence: Callable[[], Tensor]


@register_kl(WhitenedPosterior, WhitenedPrior)
def _divergence_from_prior(q: WhitenedPosterior, p: WhitenedPrior) -> Tensor:
    return q.divergence()


class State(NamedTuple):
    """The quantities at the inducing points that predictions need."""

    chol: Tensor  # ... x m x m, L
    prior_mean: Tensor  # ... x m
    shared: bool  # one prior and one set of inducing points serve all batches
    basis: Basis  # the change of basis, from that of the stored duals to this one
    duals: Duals
    factors: Factors


class _Fingerprint(NamedTuple):
    """Everything that a `State` depends on, to tell whether a cached state is still valid."""

    owners: tuple[Any, ...]  # modules, and tensors that change only by replacement or in place
    plain: tuple[Any, ...]  # plain attributes, flags, shapes and versions
    values: Tensor  # hyperparameters and inducing points, value by value

    def has_same_owners(self, other: _Fingerprint) -> bool:
        return (
            len(self.owners) == len(other.owners)
            and all(a is b for a, b in zip(self.owners, other.owners, strict=True))
            and self.plain == other.plain
        )

    def matches(self, other: _Fingerprint) -> bool:
        return (
            self.has_same_owners(other)
            and self.values.shape == other.values.shape
            and self.values.dtype == other.values.dtype
            and self.values.device == other.values.device
            and torch.equal(self.values, other.values)
        )


class _Cached(NamedTuple):
    graph: bool
    fingerprint: _Fingerprint
    state: State


class DualState(_VariationalStrategy):
    """The duals of a strategy and of its summary, and the basis that they are in.

    This is the base class of `DualVariationalStrategy`, which documents the arguments.
    """

    #: Columns of the inducing points that have no gradient; see `placed_points`.
    discrete_dims: tuple[int, ...] = ()
    dual_lam: Tensor
    dual_B: Tensor
    reference_points: Tensor
    reference_mean: Tensor
    reference_chol: Tensor
    summary_lam: Tensor
    summary_B: Tensor
    summary_square: Tensor
    summary_count: Tensor
    variational_params_initialized: Tensor

    def __init__(
        self,
        model: ApproximateGP,
        inducing_points: Tensor,
        num_latents: int | None = None,
        learn_inducing_locations: bool = True,
        batch_shape: torch.Size | None = None,
        jitter_val: float | None = None,
    ) -> None:
        check_inducing_points(inducing_points)
        if isinstance(num_latents, _VariationalDistribution):
            raise TypeError(
                "num_latents: expected a number, got a variational distribution. The duals are the "
                "distribution: write DualVariationalStrategy(self, inducing_points), with "
                "learn_inducing_locations= by name, and batch_shape= that of the distribution."
            )
        if num_latents is not None and (type(num_latents) is not int or num_latents < 1):
            raise ValueError(f"num_latents: expected an integer of at least 1, got {num_latents}.")
        super().__init__(
            model,
            inducing_points,
            variational_distribution=None,
            learn_inducing_locations=learn_inducing_locations,
            jitter_val=jitter_val,
        )
        self.num_latents = num_latents
        # Neither is copied with the strategy.
        self._leaves: weakref.ref[Leaves] | None = None
        # In a training loop, or after a conversion to another precision, the whitened duals stay
        # fixed while the prior changes: they float. Their basis is then only determined when it is
        # needed (`settle`), except for its jitter, which is this number.
        self._floating: float | None = None
        Z = inducing_points.detach()
        if batch_shape is None:
            batch_shape = Z.shape[:-2] if num_latents is None else Z.shape[:-3]
        if num_latents is not None:
            batch_shape = torch.Size([*batch_shape, num_latents])
        self._variational_distribution = BatchShape(batch_shape)
        duals = zero_duals(Z, Z.shape[-2], batch_shape)
        summary = empty_summary(duals)
        tensors = {
            "dual_lam": duals.lam,
            "dual_B": duals.B,
            "reference_points": Z.clone(),
            "reference_mean": torch.zeros_like(duals.lam),
            "reference_chol": torch.diag_embed(torch.ones_like(duals.lam)),
            "summary_lam": summary.duals.lam,
            "summary_B": summary.duals.B,
            "summary_square": summary.square,
            "summary_count": summary.number,
        }
        for name in TENSORS:
            if name in tensors:  # the inducing points have already been registered
                self.register_buffer(name, tensors[name])
        self._cache: _Cached | None = None
        self._is_steady = False
        self._own_steps: OwnSteps | None = None  # not copied either
        #: Whether the posterior was learnt in a training loop, and not by `converge`.
        self.learnt_in_loop = False
        self._summary_known: tuple[Tensor, int, bool] | None = None
        # The original values of discrete columns of the inducing points: see `keep_placed`.
        self._placed: Tensor | None = None

    # ---------------------------------------------------------------- duals and posterior

    @property
    def placed_points(self) -> Tensor:
        """The ``... x m x d`` inducing points, whose discrete columns have no gradient."""
        Z: Tensor = self.inducing_points
        if not self.discrete_dims or not Z.requires_grad:
            return Z
        fixed = Z.detach()
        columns = [(fixed if i in self.discrete_dims else Z)[..., i] for i in range(Z.shape[-1])]
        return torch.stack(columns, -1)

    @torch.no_grad()
    def keep_placed(self) -> None:
        """Restore discrete columns of the inducing points if an optimiser has moved them.

        They have no gradient, but weight decay moves them nevertheless. Training loops call this
        with each forward pass.
        """
        Z = self.inducing_points
        if not self.discrete_dims or not Z.requires_grad:
            return
        columns = list(self.discrete_dims)
        if self._placed is None:
            self._placed = Z[..., columns].clone()
        elif not torch.equal(Z[..., columns], self._placed):
            Z[..., columns] = self._placed

    @property
    def jitter_val(self) -> float:
        """Jitter relative to the diagonal of ``Kzz``."""
        if self._jitter_val is None:
            return relative_jitter(self.inducing_points.dtype)
        return self._jitter_val

    @jitter_val.setter
    def jitter_val(self, jitter_val: float | None) -> None:
        self._jitter_val = jitter_val
        self.clear_cache()

    @property
    def latent_dims(self) -> int:
        """Number of trailing batch dimensions of the duals that are latent functions: 0 or 1."""
        return 0 if self.num_latents is None else 1

    @property
    def duals(self) -> Duals:
        """Whitened tied duals in the basis of the present inducing points and hyperparameters."""
        return self.state().duals

    @property
    def chol(self) -> Tensor:
        """``... x m x m``, ``L = chol(Kzz)``."""
        return self.state().chol

    @property
    def lam(self) -> Tensor:
        r"""``... x m``, :math:`\lambda = \sum_i k_{zi} \lambda_i`."""
        state = self.state()
        return (state.chol @ state.duals.lam.unsqueeze(-1)).squeeze(-1)

    @property
    def B(self) -> Tensor:
        r"""``... x m x m``, :math:`B = \sum_i k_{zi} \beta_i k_{iz}`."""
        state = self.state()
        return state.chol @ state.duals.B @ state.chol.mT

    @property
    def alpha(self) -> Tensor:
        r"""``... x m``, the paper's dual :math:`\alpha_u = E[u] - \mu(Z)`."""
        state = self.state()
        return (state.chol @ state.factors.mean.unsqueeze(-1)).squeeze(-1)

    @property
    def prior_distribution(self) -> MultivariateNormal:
        """``p(v) = N(0, I)``, for the whitened inducing values ``u = mu(Z) + L v``."""
        zeros = torch.zeros_like(self.dual_lam)
        return WhitenedPrior(zeros, DiagLinearOperator(torch.ones_like(zeros)))

    @property
    def variational_distribution(self) -> MultivariateNormal:
        """``q(v)`` for the whitened inducing values."""
        R, mean = factors = self._factors_to_learn(same_pass=False)
        eye = torch.eye(R.shape[-1], dtype=R.dtype, device=R.device)
        if self._takes_a_step(mean):
            # Wrappers use its divergence from the prior. No other use of it can learn q.
            R, mean = R.view_as(R), mean.view_as(mean)
            for tensor in (R, mean):
                tensor.register_hook(_refuse)
        root = solve_lower(R, eye.expand_as(R)).mT
        covariance = CholLinearOperator(TriangularLinearOperator(root, upper=True))
        q = WhitenedPosterior(mean, covariance)
        q.divergence = partial(self._divergence, factors)
        return q

    def kl_divergence(self) -> Tensor:
        """Return ``KL[q(u) || p(u)]``, summed over latents, of the batch shape of the model."""
        kl = self._divergence(self._factors_to_learn(same_pass=True))
        return kl.sum(-1) if self.latent_dims else kl

    def _divergence(self, factors: Factors) -> Tensor:
        """Return the divergence from the prior for each latent, and record its weight in a loss."""
        kl = kl_divergence(factors)
        if self._takes_a_step(kl):
            assert self._own_steps is not None
            kl = self._own_steps.weighed(kl)
            if not self._knows_only_data():
                kl.register_hook(_refuse)
        return kl

    def _takes_a_step(self, tensor: Tensor) -> bool:
        """Whether the backward pass through a tensor is one of `OwnSteps`."""
        learns = tensor.requires_grad and self.training and self.leaves() is None
        return learns and not _SITES_ARE_FIXED.get()

    def _knows_only_data(self) -> bool:
        """Whether everything that the strategy has learnt can be in a training loop's objective."""
        return not self.has_summary

    def _factors_to_learn(self, same_pass: bool) -> Factors:
        """Return the whitened posterior, for objectives."""
        leaves = self.leaves()
        return self.state(same_pass).factors if leaves is None else natural_factors(leaves)

    @property
    def summary(self) -> Summary:
        """The summary of folded observations, in the basis of the duals."""
        duals = Duals(self.summary_lam, self.summary_B)
        return Summary(duals, self.summary_square, self.summary_count)

    @property
    def has_summary(self) -> bool:
        """Whether anything has been folded; needs one host synchronisation for each summary."""
        count, known = self.summary_count, self._summary_known
        if known is None or known[0] is not count or known[1] != count._version:
            known = self._summary_known = (count, count._version, bool(count.any()))
        return known[2]

    def base(self, basis: Basis, likelihood: Likelihood, share: float = 1.0) -> Duals | None:
        """Return the share of the summary's duals that counts, in a basis; ``None`` if it is empty.

        Args:
            basis: The change of basis, from that of the stored duals.
            likelihood: The likelihood.
            share: How much of the summary counts, from 0 to 1.
        """
        if not share or not self.has_summary:
            return None
        summary = self.summary if share == 1 else discounted(self.summary, share)
        return duals_now(summary, basis, summary_noise(likelihood))

    def tensors(self) -> dict[str, Tensor]:
        """Return all tensors of the strategy that an update changes, by name and without graphs."""
        self.settle()
        tensors = {name: getattr(self, name) for name in TENSORS}
        return {k: t.detach() if t.requires_grad else t for k, t in tensors.items()}

    def set_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Replace some of the strategy's tensors by others of any size.

        Args:
            tensors: Tensors by name. Inducing points of the same shape are copied into the same
                parameter, so that optimisers keep it.
        """
        # Setting an attribute of a module is slow.
        self._buffers.update({k: v for k, v in tensors.items() if k in self._buffers})
        Z, old = tensors.get("inducing_points"), self._parameters.get("inducing_points")
        if Z is not None and old is not None and old.shape == Z.shape:
            old.data = Z.detach().clone()  # the old memory may still be in use
        elif Z is not None and old is not None:
            self.inducing_points = Parameter(Z.clone(), requires_grad=old.requires_grad)
        if "reference_chol" in tensors:
            self._floating = None
        if "inducing_points" in tensors:
            self._placed = None
        self.clear_cache()

    @property
    def prior_at(self) -> Forward:
        """The model's prior, as a function of inputs as this strategy sees them."""
        return prior_of(self.model)

    # ---------------------------------------------------------------- training loops

    def attach(self, leaves: Leaves) -> None:
        """Let an optimiser learn the duals, as long as it is alive.

        In train mode, the whitened posterior then stays fixed while the prior changes, as in
        GPyTorch.

        Args:
            leaves: The tensors that the optimiser moves; they are set to the present duals.
        """
        with _eval_mode(self.model):
            self.rebase()
        self._leaves = weakref.ref(leaves)
        leaves.of(Duals(self.dual_lam, self.dual_B))

    def leaves(self) -> Duals | None:
        """Return the duals that an optimiser learns in train mode; ``None`` if there are none."""
        leaves = None if self._leaves is None or not self.training else self._leaves()
        return None if leaves is None else leaves.of(Duals(self.dual_lam, self.dual_B))

    def is_attached(self, leaves: Leaves) -> bool:
        """Whether these are the leaves that an optimiser learns."""
        return self._leaves is not None and self._leaves() is leaves

    def learn(self, duals: Duals) -> None:
        """Take duals from an optimiser, in the basis of the present prior, whatever it is.

        Args:
            duals: The duals, which must not be used elsewhere.
        """
        self.dual_lam, self.dual_B = duals
        self._floating, self.learnt_in_loop = self.jitter_val, True
        self.variational_params_initialized = self.variational_params_initialized.clone().fill_(1)
        self.clear_cache()

    @torch.no_grad()
    def settle(self) -> None:
        """Make the present prior in eval mode the basis of floating duals.

        The whitened posterior does not change. Later changes of hyperparameters start from here.
        """
        if self._floating is None:
            return
        with _eval_mode(self.model):
            mean, K = values_prior(self.prior_at, self.inducing_points)
        self.reference_points = self.inducing_points.detach().clone()
        self.reference_mean = mean.clone()
        self.reference_chol = scaled_cholesky(K, self._floating)
        self._floating = None

    @torch.no_grad()
    def rebase(self) -> None:
        """Move the duals to the basis of the present inducing points and hyperparameters.

        Predictions do not change. Later changes of hyperparameters start from here.
        """
        state = self.state()
        self.store(state.duals, state)

    def rescale(self, scale: Tensor, offset: Tensor, noise_free: bool) -> None:
        r"""Change the units of the function, from ``f`` to ``a f + b``.

        With whitened values :math:`v = L^{-1} (u - \mu)`, :math:`v' = a v`. A pseudo-likelihood
        :math:`\lambda^T v - \tfrac12 v^T B v` then has :math:`\lambda / a` and :math:`B / a^2`. If
        the summary is free of Gaussian noise, the variance of that noise has changed by
        :math:`a^2`.

        Args:
            scale: ``[m]``, ``a``, one number for each output if there are several.
            offset: ``[m]``, ``b``.
            noise_free: Whether the summary is free of the noise of Gaussian observations.
        """
        a, b = (t.unsqueeze(-1) for t in (scale, offset))
        divisor = a.square() if noise_free else torch.ones_like(a)
        tensors = {
            "dual_lam": self.dual_lam / a,
            "dual_B": self.dual_B / a.square().unsqueeze(-1),
            "reference_mean": self.reference_mean * a + b,
            "summary_lam": self.summary_lam * divisor / a,
            "summary_B": self.summary_B * (divisor / a.square()).unsqueeze(-1),
            "summary_square": self.summary_square * scale.square(),
        }
        self.set_tensors(tensors)

    # ---------------------------------------------------------------- state and its cache

    def state(self, same_pass: bool = False) -> State:
        """Return the factorisations at the present inducing points, duals and hyperparameters.

        They are cached, and used again only if everything that they depend on is the same:
        hyperparameters and inducing points are compared by value (in one comparison), modules,
        plain attributes and duals by identity. In eval mode they are detached from the graph. In
        train mode a graph can be used for one backward pass only, so the cache is only valid within
        the same forward pass.

        Args:
            same_pass: Whether this belongs to the same forward pass as the previous call.
        """
        leaves = self.leaves()
        if leaves is not None:
            return self.state_in_loop(leaves, *values_prior(self.prior_at, self.placed_points))
        if self.training:
            _check_prior_is_a_function(self.model)
        self.settle()
        detached = not self.training and settings.detach_test_caches.on()
        with torch.set_grad_enabled(torch.is_grad_enabled() and not detached):
            graph, cached = torch.is_grad_enabled(), self._cache
            usable = (detached or same_pass) and cached is not None and cached.graph == graph
            if cached is not None and usable and self._is_steady and not graph:
                return cached.state
            fingerprint = self._fingerprint()
            if cached is not None and usable and cached.fingerprint.matches(fingerprint):
                if graph:  # which is valid for one pass only
                    self._cache = None
                return cached.state
            self._cache = None
            state = self._built()
            if graph and self.training and not _SITES_ARE_FIXED.get():
                state = self._watched(state)
            self._cache = _Cached(graph, fingerprint, state)
            if state.chol.requires_grad:  # a backward pass frees the graph
                state.chol.register_hook(lambda _: self.clear_cache())
            return state

    def _built(self) -> State:
        """Return the state at the present prior.

        With a likelihood that is not log-concave, some sites have negative precision. After an
        optimiser has changed the prior, there may be no posterior with these sites. In a training
        loop, the whitened posterior then stays as it is.
        """
        try:
            return self.build(self.placed_points)
        except NotPSDError:
            if not self.learnt_in_loop or self.has_summary:
                raise
            self._floating = self.jitter_val
            self.settle()
            return self.build(self.placed_points)

    def _watched(self, state: State) -> State:
        """Return a state whose posterior may learn from a backward pass; see `OwnSteps`."""
        made_from, own = self.dual_B, weakref.ref(self)
        detached = State(
            state.chol.detach(),
            state.prior_mean.detach(),
            state.shared,
            Basis(None, state.chol.detach(), torch.zeros_like(state.prior_mean), None),
            Duals(*(tensor.detach() for tensor in state.duals)),
            Factors(*(tensor.detach() for tensor in state.factors)),
        )

        def learn(duals: Duals) -> None:
            nonlocal made_from
            strategy = own()
            # Ignore the gradient of a posterior that has been replaced.
            if strategy is not None and strategy.dual_B is made_from:
                strategy.store(duals, detached)
                strategy.learnt_in_loop = True
                made_from = strategy.dual_B

        if self._own_steps is None:
            self._own_steps = OwnSteps(learn)
        self._own_steps.learn = learn
        return state._replace(factors=self._own_steps.watch(state.duals, state.factors))

    def state_in_loop(self, leaves: Duals, mean: Tensor, K: Tensor) -> State:
        """Return the state for one pass of a training loop; the present prior whitens the duals.

        Args:
            leaves: The duals.
            mean: ``... x m``, the prior mean at the inducing points.
            K: ``... x m x m``, their prior covariance.
        """
        self._floating = self.jitter_val
        self.clear_cache()
        chol = scaled_cholesky(K, self.jitter_val)
        basis = Basis(None, chol, torch.zeros_like(mean), None)
        return State(chol, mean, K.shape[:-2].numel() == 1, basis, leaves, natural_factors(leaves))

    def _fingerprint(self, values: Tensor | None = None) -> _Fingerprint:
        """Return everything that the state depends on, without reading values on the host.

        Args:
            values: The values of hyperparameters and inducing points, if they are known.
        """
        owners: list[Any] = []
        plain: list[Any] = [self.jitter_val, self.training]
        tensors: list[Tensor] = [self.inducing_points]
        for module in _prior_modules(self.model):
            if module is not self.model:  # copies of the model share its modules
                owners.append(module)
                plain.append(module.training)
            for name, value in vars(module).items():
                if name in _HOUSEKEEPING:
                    continue
                kind = type(value)
                if kind in _PLAIN:
                    plain.append(value)
                elif kind not in _COLLECTIONS and isinstance(value, Tensor):
                    tensors.append(value)
            tensors += [p for p in module._parameters.values() if p is not None]
            tensors += [b for b in module._buffers.values() if b is not None]
        own = [self._buffers[name] for name in TENSORS if name != "inducing_points"]
        owners += own
        plain += [tensor._version for tensor in own]
        plain += [tensor.shape for tensor in tensors]
        if values is None:
            device = tensors[0].device
            with torch.no_grad():
                flat = [(t if t.device == device else t.to(device)).reshape(-1) for t in tensors]
                values = torch.cat(flat)
        return _Fingerprint(tuple(owners), tuple(plain), values)

    def stays(self, Z: Tensor) -> bool:
        """Whether ``Z`` are the points of the stored duals, and have no gradient."""
        moves = Z.requires_grad and torch.is_grad_enabled()
        points = self.reference_points
        return not moves and Z.shape == points.shape and torch.equal(Z, points)

    def _change_of_basis(self, Z: Tensor, mean: Tensor, K: Tensor) -> tuple[Tensor, Basis]:
        """Return ``chol(Kzz)`` and the change of basis from that of the stored duals to ``Z``."""
        if self.stays(Z):
            return self.basis(Z, K, mean)
        joint = joint_prior(self.prior_at, Z, self.reference_points, shared=False)
        covariance = to_dense(joint.covariance()) if self.has_summary else None
        return self.basis(Z, K, joint.mean, joint.cross, covariance)

    def basis(
        self,
        Z: Tensor,
        K: Tensor,
        mean: Tensor,
        cross: Tensor | None = None,
        covariance: Tensor | None = None,
    ) -> tuple[Tensor, Basis]:
        """Return the same as `_change_of_basis`, from blocks of the prior.

        Args:
            Z: ``... x m x d`` inducing points.
            K: ``... x m x m``, their prior covariance.
            mean: ``... x s``, the prior mean at the points of the stored duals.
            cross: ``... x m x s``, the covariance of the two; ``None`` if they are the same points.
            covariance: ``... x s x s``, that of the latter, if there is a summary.
        """
        chol, reference = scaled_cholesky(K, self.jitter_val), self.reference_chol
        shift = self.reference_mean - mean
        if cross is None:
            # Nothing has moved: return the stored duals, bit by bit.
            moves = chol.requires_grad or shift.requires_grad or chol.shape != reference.shape
            if not moves and bool(((chol == reference).all() & (shift == 0).all()).item()):
                return chol, Basis(None, reference, shift, None)
            return chol, Basis(transport_matrix(chol, reference), reference, shift, None)
        if not (Z.requires_grad and torch.is_grad_enabled()):
            nugget = self.jitter_val * K.diagonal(dim1=-2, dim2=-1).unsqueeze(-1)
            cross = cross + coincident(Z, self.reference_points) * nugget
        transport, unexplained = transport_matrix(chol, reference, cross), None
        if covariance is not None:
            explained_by_Z = solve_lower(chol, cross)
            unexplained = covariance - explained_by_Z.mT @ explained_by_Z
        return chol, Basis(transport, reference, shift, unexplained)

    def build(self, Z: Tensor) -> State:
        """Return the state at ``Z``: two Cholesky factorisations and a change of basis."""
        mean, K = values_prior(self.prior_at, Z)
        chol, basis = self._change_of_basis(Z, mean, K)
        duals = moved(Duals(self.dual_lam, self.dual_B), basis)
        shared = broadcast_shapes(mean.shape[:-1], K.shape[:-2]).numel() == 1
        return State(chol, mean, shared, basis, duals, factorise(duals))

    def store(
        self,
        duals: Duals,
        state: State,
        Z: Tensor | None = None,
        summary: Summary | None = None,
        factors: Factors | None = None,
    ) -> None:
        """Store duals as the strategy's own.

        Args:
            duals: The duals, in the basis of ``state``.
            state: A state at the present hyperparameters.
            Z: The inducing points of that state, if they are not the present ones.
            summary: The summary in the same basis; by default the present one is moved there.
            factors: The whitened posterior of the duals, if it is known.
        """
        known = self.has_summary if summary is None else None
        if summary is None and known:
            summary = rebase_summary(self.summary, state.basis)
        elif summary is None:
            summary = empty_summary(duals)
        _check_finite(*duals, *summary.duals)
        if Z is not None:
            self.set_tensors({"inducing_points": Z})
        # Copies, as if loaded from a file: rounding depends on strides and alignment. All at once,
        # since setting an attribute of a module is slow.
        self._buffers.update(
            summary_lam=_own(summary.duals.lam),
            summary_B=_own(summary.duals.B),
            summary_square=summary.square,
            summary_count=summary.number,
            dual_lam=_own(duals.lam),
            dual_B=_own(duals.B),
            reference_points=self.inducing_points.detach().clone(),
            # A copy: a constant mean is a view of the parameter, which optimisers change in place.
            reference_mean=state.prior_mean.detach().clone(),
            reference_chol=_own(state.chol),
            variational_params_initialized=torch.ones_like(self.variational_params_initialized),
        )
        if known is not None:
            self._note_summary(known)
        self._floating = None
        self.clear_cache()
        if not torch.is_grad_enabled():
            # Only the duals are new: cache the state for the next prediction.
            own = Duals(self.dual_lam, self.dual_B)
            basis = Basis(None, self.reference_chol, torch.zeros_like(self.reference_mean), None)
            fresh = state._replace(
                chol=state.chol.detach(),
                prior_mean=self.reference_mean,
                basis=basis,
                duals=own,
                factors=factorise(own) if factors is None else factors,
            )
            self._cache = _Cached(False, self._fingerprint(), fresh)

    def store_summary(self, summary: Summary, state: State, has_summary: bool) -> None:
        """Store a summary as the strategy's own, and move the duals to its basis.

        Args:
            summary: The summary, in the basis of the duals of ``state``.
            state: The present state.
            has_summary: Whether anything has been folded.
        """
        if state.basis.transport is not None or self._floating is not None:
            self.store(state.duals, state, summary=summary, factors=state.factors)
        else:  # the duals are in this basis already
            _check_finite(*summary.duals)
            cached = self.kept()
            self._buffers.update(
                summary_lam=_own(summary.duals.lam),
                summary_B=_own(summary.duals.B),
                summary_square=summary.square,
                summary_count=summary.number,
            )
            self.keep(cached)
        self._note_summary(has_summary)

    def _note_summary(self, has_summary: bool) -> None:
        """Note whether anything has been folded, without a host synchronisation."""
        self._summary_known = self.summary_count, self.summary_count._version, has_summary

    @torch.no_grad()
    def kept(self) -> _Cached | None:
        """Return the cached factorisations, if they belong to the present modules and duals.

        Hyperparameters are only compared when the factorisations are used.
        """
        cached = self._cache
        if cached is None or cached.graph:
            return None
        known = cached.fingerprint
        return cached if known.has_same_owners(self._fingerprint(known.values)) else None

    @torch.no_grad()
    def keep(self, cached: _Cached | None) -> None:
        """Use factorisations that were made from copies of the present modules and duals.

        Args:
            cached: The result of `kept`.
        """
        if cached is not None:
            cached = cached._replace(fingerprint=self._fingerprint(cached.fingerprint.values))
        self._cache = cached

    @contextmanager
    def keeping_state(self) -> Iterator[None]:
        """Keep the cached factorisations while modules and parameters are replaced by copies."""
        cached = self.kept()
        yield
        self.keep(cached)

    @contextmanager
    def steady(self) -> Iterator[None]:
        """Use cached factorisations without comparing what they depend on, in this context.

        Nobody else may change hyperparameters or inducing points, or write to any tensor,
        meanwhile.
        """
        before = self._is_steady
        self.state()
        self._is_steady = True
        try:
            yield
        finally:
            self._is_steady = before

    def clear_cache(self) -> None:
        """Clear the cached factorisations; the next prediction computes them again."""
        self._cache = None

    def __getstate__(self) -> dict[str, Any]:
        # For copies and pickles. Neither can hold the graph of a forward pass, and the fingerprint
        # of the original modules does not fit a copy.
        gone = dict.fromkeys(("_cache", "_summary_known", "_leaves", "_own_steps"))
        return {**self.__dict__, **gone, "_is_steady": False}

    def _save_to_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self.settle()
        super()._save_to_state_dict(*args, **kwargs)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        self._placed = None
        if prefix + "reference_chol" in state_dict:
            self._floating = None
        # The number of inducing points and the batch shape of the duals may have changed.
        for name in TENSORS:
            value, own = state_dict.get(prefix + name), getattr(self, name)
            if value is not None and value.shape != own.shape:
                self.set_tensors({name: own.detach().new_zeros(value.shape)})
            elif not isinstance(own, Parameter):  # shared with fantasy models, so not in place
                setattr(self, name, own.clone())
        self.clear_cache()
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def _apply(self, fn: Callable[[Tensor], Tensor], *args: Any, **kwargs: Any) -> Any:
        Z = self.inducing_points.detach()
        dtype = fn(Z[..., :0, :]).dtype
        jitter = None
        if dtype.is_floating_point and dtype != Z.dtype:
            jitter = self._prepare_for(dtype)
        self._placed = None
        self.clear_cache()
        result = super()._apply(fn, *args, **kwargs)
        # Whitened duals survive a change of precision, but the factor of their basis does not: its
        # inverse would magnify the rounding errors of both.
        self._floating = self._floating if jitter is None else jitter
        return result

    @torch.no_grad()
    def _prepare_for(self, dtype: torch.dtype) -> float | None:
        """Move the duals to a basis that another precision can represent.

        Less precision needs more jitter. In the new basis, the inducing values are the present ones
        plus independent noise.

        Returns:
            The jitter of that basis; ``None`` if it could not be computed.
        """
        jitter = relative_jitter(dtype) if self._jitter_val is None else self._jitter_val
        jitter = max(jitter, self.jitter_val)
        try:
            with _eval_mode(self.model):
                state = self.state()
                _, K = values_prior(self.prior_at, self.inducing_points)
        except RuntimeError:  # some modules have already been converted
            return None
        if K.dtype != self.dual_B.dtype:
            return None
        chol = scaled_cholesky(K, jitter)
        basis = Basis(
            solve_lower(chol, state.chol), state.chol, torch.zeros_like(state.prior_mean), None
        )
        summary = rebase_summary(rebase_summary(self.summary, state.basis), basis)
        self.store(moved(state.duals, basis), state._replace(chol=chol), summary=summary)
        return jitter


def _check_prior_is_a_function(model: Module) -> None:
    """Raise if the prior depends on the batch or on random numbers, so that blocks do not match."""
    for module in _prior_modules(model):
        if module.training and isinstance(module, _BatchNorm | _DropoutNd):
            raise RuntimeError(
                f"In train mode {type(module).__name__} makes the prior depend on the batch or on "
                "chance, and a DualVariationalStrategy cannot follow it. In a training loop, make "
                "an optimiser `ngd = seqgp.DualNGD(model, num_data, lr=0.1)` beside that of the "
                "hyperparameters; otherwise use eval mode."
            )


def _refuse(_: Tensor) -> None:
    """Raise in a backward pass whose gradient with respect to q would be lost."""
    raise RuntimeError(
        "This objective cannot teach a DualVariationalStrategy its posterior, which is not a "
        "parameter: it does not ask for kl_divergence(), or the strategy knows of observations "
        "that are not in it (a summary of a stream, what it was conditioned on, the data of other "
        "processes). In a training loop, make an optimiser beside that of the hyperparameters, "
        "`ngd = seqgp.DualNGD(model, num_data, lr=0.1)`, and call `ngd.zero_grad()` before and "
        "`ngd.step()` after `loss.backward()`. Learn streams with `update`; or use "
        "seqgp.DualELBO, in turns with `model.variational_strategy.converge(x, y, likelihood)`."
    )


def _check_finite(*tensors: Tensor) -> None:
    """Raise if duals are not finite; the sum of such a tensor is not finite either."""
    if not bool(torch.stack([tensor.sum() for tensor in tensors]).isfinite().all()):
        raise FloatingPointError(
            "The update led to duals that are not finite; nothing has been changed. "
            "Check the scale of inputs, targets and hyperparameters."
        )


def _own(tensor: Tensor) -> Tensor:
    """Return a contiguous copy in memory of its own, without a graph."""
    return tensor.detach().clone(memory_format=torch.contiguous_format)


def _prior_modules(module: Module) -> list[Module]:
    """Return the modules that a model's prior may depend on: all but strategies and likelihoods."""
    found = [module]
    for each in found:  # which grows in the loop
        for child in each._modules.values():
            kind: Any = type(child)  # hashable, as all classes are
            if child is not None and _is_of_prior(kind):
                found.append(child)
    return found


@lru_cache(maxsize=256)
def _is_of_prior(kind: type[Module]) -> bool:
    """Whether a prior may depend on modules of a class; cached, since checks of ABCs are slow."""
    return not issubclass(kind, _VariationalStrategy | Likelihood)


@contextmanager
def _eval_mode(model: Module) -> Iterator[None]:
    """Evaluate a model's prior as in eval mode, whatever its mode is."""
    training = [module for module in _prior_modules(model) if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True

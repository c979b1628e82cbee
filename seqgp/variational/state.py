"""Where a strategy keeps its duals, in which basis, and what it may use again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from gpytorch import settings
from gpytorch.distributions import MultivariateNormal
from gpytorch.likelihoods import Likelihood
from gpytorch.models import ApproximateGP
from gpytorch.variational._variational_strategy import _VariationalStrategy
from linear_operator import to_dense
from linear_operator.operators import (
    CholLinearOperator,
    DiagLinearOperator,
    TriangularLinearOperator,
)
from torch import Tensor

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
    project,
    rebase_summary,
    recentre,
    scaled_cholesky,
    solve_lower,
    transport_matrix,
    zero_duals,
)
from seqgp.dual.linalg import relative_jitter
from seqgp.dual.projection import coincident
from seqgp.likelihoods.traits import summary_noise
from seqgp.validation import check_inducing_points
from seqgp.variational.prior_blocks import joint_prior


class State(NamedTuple):
    """Everything about the inducing points that predictions need."""

    chol: Tensor  # ... x m x m, L
    prior_mean: Tensor  # ... x m
    shared: bool  # one prior and one set of inducing points serve all batches
    basis: Basis  # the way here from where the duals were made
    duals: Duals
    factors: Factors


class DualState(_VariationalStrategy):
    """The duals of a strategy and of its summary, and the basis that they were made in.

    The base of `DualVariationalStrategy`, whose documentation has the arguments.
    """

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
        if num_latents is not None and num_latents < 1:
            raise ValueError(f"num_latents: expected at least 1, got {num_latents}.")
        super().__init__(
            model,
            inducing_points,
            variational_distribution=None,
            learn_inducing_locations=learn_inducing_locations,
            jitter_val=jitter_val,
        )
        self.num_latents = num_latents
        Z = inducing_points.detach()
        if batch_shape is None:
            batch_shape = Z.shape[:-2] if num_latents is None else Z.shape[:-3]
        if num_latents is not None:
            batch_shape = torch.Size([*batch_shape, num_latents])
        duals = zero_duals(Z, Z.shape[-2], batch_shape)
        self.register_buffer("dual_lam", duals.lam)
        self.register_buffer("dual_B", duals.B)
        self.register_buffer("reference_points", Z.clone())
        self.register_buffer("reference_mean", torch.zeros_like(duals.lam))
        self.register_buffer("reference_chol", torch.diag_embed(torch.ones_like(duals.lam)))
        summary = empty_summary(duals)
        self.register_buffer("summary_lam", summary.duals.lam)
        self.register_buffer("summary_B", summary.duals.B)
        self.register_buffer("summary_square", summary.square)
        self.register_buffer("summary_count", summary.number)
        self._cache: tuple[bool, tuple[Tensor, ...], State] | None = None

    # ---------------------------------------------------------------- what it knows

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
        """How many trailing batch dimensions of the duals are latent functions: 0 or 1."""
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
        return MultivariateNormal(zeros, DiagLinearOperator(torch.ones_like(zeros)))

    @property
    def variational_distribution(self) -> MultivariateNormal:
        """``q(v)`` for the whitened inducing values."""
        R, mean = self.state().factors
        eye = torch.eye(R.shape[-1], dtype=R.dtype, device=R.device)
        root = solve_lower(R, eye.expand_as(R)).mT
        covariance = CholLinearOperator(TriangularLinearOperator(root, upper=True))
        return MultivariateNormal(mean, covariance)

    def kl_divergence(self) -> Tensor:
        """``KL[q(u) || p(u)]``, summed over latents; of the batch shape of the model."""
        kl = kl_divergence(self.state(same_pass=True).factors)
        return kl.sum(-1) if self.latent_dims else kl

    @property
    def summary(self) -> Summary:
        """What is known of observations that are no longer at hand, in the basis of the duals."""
        duals = Duals(self.summary_lam, self.summary_B)
        return Summary(duals, self.summary_square, self.summary_count)

    #: How much of the summary counts.
    summary_share: float = 1.0

    @property
    def counted_summary(self) -> Summary:
        """The summary as far as it counts; the rest is what weighted observations stand for."""
        return (
            self.summary
            if self.summary_share == 1
            else discounted(self.summary, self.summary_share)
        )

    def _base(self, basis: Basis, likelihood: Likelihood) -> Duals | None:
        """The summary's duals in the present basis; ``None`` if it is empty."""
        if not bool(self.summary_count.any()) or self.summary_share == 0:
            return None
        return duals_now(self.counted_summary, basis, summary_noise(likelihood))

    # ---------------------------------------------------------------- state and its cache

    def state(self, same_pass: bool = False) -> State:
        """Factorisations at the present inducing points, duals and hyperparameters.

        They are kept, and used again only if the kernel matrix, the inducing points and the duals
        are still the same, value by value: a change of any of them, however it was made, is seen.
        In eval mode they are detached from the graph. In train mode a graph is good for one
        backward pass, so only what belongs to the same pass uses it again.
        """
        detached = not self.training and settings.detach_test_caches.on()
        with torch.set_grad_enabled(torch.is_grad_enabled() and not detached):
            return self._cached(self.model.forward(self.inducing_points), detached or same_pass)

    def _cached(self, prior: MultivariateNormal, use: bool) -> State:
        """The state of a prior at Z, from the cache if ``use`` and if it is there."""
        graph = torch.is_grad_enabled()
        key = (
            to_dense(prior.lazy_covariance_matrix),
            prior.mean,
            self.inducing_points,
            *(getattr(self, name) for name in _BUFFERS),
        )
        cache, self._cache = self._cache, None
        if use and cache is not None and cache[0] == graph and _equal(cache[1], key):
            if not graph:
                self._cache = cache
            return cache[2]
        state = self._build(self.inducing_points, prior)
        self._cache = (graph, tuple(tensor.detach().clone() for tensor in key), state)
        if state.chol.requires_grad:  # a backward pass uses the graph up
            state.chol.register_hook(lambda _: self.clear_cache())
        return state

    def _stays(self, Z: Tensor) -> bool:
        """Whether ``Z`` are the points of the stored duals, and not about to move."""
        moves = Z.requires_grad and torch.is_grad_enabled()
        points = self.reference_points
        return not moves and Z.shape == points.shape and torch.equal(Z, points)

    def _change_of_basis(self, Z: Tensor, prior: MultivariateNormal) -> tuple[Tensor, Basis]:
        """``chol(Kzz)``, and the way from the basis of the stored duals to that of ``Z``."""
        K = to_dense(prior.lazy_covariance_matrix)
        if self._stays(Z):
            return self._basis(Z, K, prior.mean)
        joint = joint_prior(self.model.forward, Z, self.reference_points, shared=False)
        covariance = to_dense(joint.covariance()) if bool(self.summary_count.any()) else None
        return self._basis(Z, K, joint.mean, joint.cross, covariance)

    def _basis(
        self,
        Z: Tensor,
        K: Tensor,
        mean: Tensor,
        cross: Tensor | None = None,
        covariance: Tensor | None = None,
    ) -> tuple[Tensor, Basis]:
        """As `_change_of_basis`, from blocks of the prior.

        Args:
            Z: ``... x m x d`` inducing points.
            K: ``... x m x m``, their prior covariance.
            mean: ``... x s``, the prior mean at the points of the stored duals.
            cross: ``... x m x s`` covariance of the two; ``None`` if they are the same points.
            covariance: ``... x s x s``, that of the latter, if there is a summary.
        """
        chol, reference = scaled_cholesky(K, self.jitter_val), self.reference_chol
        shift = self.reference_mean - mean
        if cross is None:
            return chol, Basis(transport_matrix(chol, reference), reference, shift, None)
        if not (Z.requires_grad and torch.is_grad_enabled()):
            nugget = self.jitter_val * K.diagonal(dim1=-2, dim2=-1).unsqueeze(-1)
            cross = cross + coincident(Z, self.reference_points) * nugget
        transport, unexplained = transport_matrix(chol, reference, cross), None
        if covariance is not None:
            explained_by_Z = solve_lower(chol, cross)
            unexplained = covariance - explained_by_Z.mT @ explained_by_Z
        return chol, Basis(transport, reference, shift, unexplained)

    def _build(self, Z: Tensor, prior: MultivariateNormal | None = None) -> State:
        """Two Cholesky factorisations, and the duals' way from their own basis to this one."""
        prior = self.model.forward(Z) if prior is None else prior
        chol, basis = self._change_of_basis(Z, prior)
        duals = Duals(self.dual_lam, self.dual_B)
        duals = project(recentre(duals, basis.reference_chol, basis.shift), basis.transport)
        shared = prior.batch_shape.numel() == 1
        return State(chol, prior.mean, shared, basis, duals, factorise(duals))

    def _store(
        self,
        duals: Duals,
        state: State,
        Z: Tensor | None = None,
        summary: Summary | None = None,
    ) -> None:
        """Make ``duals`` the strategy's own, in the basis of ``state`` (at new points ``Z``)."""
        if summary is None and bool(self.summary_count.any()):
            summary = rebase_summary(self.summary, state.basis)
        elif summary is None:
            summary = empty_summary(duals)
        for tensor in (*duals, *summary.duals):
            if not tensor.isfinite().all():
                raise FloatingPointError(
                    "The update led to duals that are not finite; nothing has been changed. "
                    "Check the scale of inputs, targets and hyperparameters."
                )
        (self.summary_lam, self.summary_B), self.summary_square, self.summary_count = summary
        if Z is not None:
            self._assign("inducing_points", Z)
        self.dual_lam, self.dual_B = (tensor.detach() for tensor in duals)
        self.reference_points = self.inducing_points.detach().clone()
        # A copy: a constant mean is an expanded view of the very parameter that optimisers move.
        self.reference_mean = state.prior_mean.detach().clone()
        self.reference_chol = state.chol.detach()
        self.variational_params_initialized = self.variational_params_initialized.clone().fill_(1)
        self.clear_cache()

    def clear_cache(self) -> None:
        self._cache = None

    def __getstate__(self) -> dict[str, Any]:
        # For copies and pickles, neither of which can hold the graph of a forward pass.
        graph = self._cache is not None and self._cache[0]
        return {**self.__dict__, "_cache": None} if graph else self.__dict__

    def _assign(self, name: str, value: Tensor) -> None:
        """Replace a buffer or parameter by one that may have another shape."""
        if isinstance(getattr(self, name), torch.nn.Parameter):
            setattr(self, name, torch.nn.Parameter(value))
        else:
            setattr(self, name, value)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        # The number of inducing points and the batch shape of the duals may have changed.
        for name in ("inducing_points", *_BUFFERS):
            value = state_dict.get(prefix + name)
            own = getattr(self, name)
            if value is not None and value.shape != own.shape:
                self._assign(name, own.new_zeros(value.shape))
            elif name != "inducing_points":  # shared with fantasy models: never copied into
                self._assign(name, own.clone())
        self.clear_cache()
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def _apply(self, fn: Callable[[Tensor], Tensor], *args: Any, **kwargs: Any) -> Any:
        self.clear_cache()
        return super()._apply(fn, *args, **kwargs)


_BUFFERS = (
    "dual_lam",
    "dual_B",
    "reference_points",
    "reference_mean",
    "reference_chol",
    "summary_lam",
    "summary_B",
    "summary_square",
    "summary_count",
    "variational_params_initialized",
)


def _equal(left: tuple[Tensor, ...], right: tuple[Tensor, ...]) -> bool:
    """Whether two tuples of tensors are the same, value by value, dtype and device included."""
    return all(
        a.shape == b.shape and a.dtype == b.dtype and a.device == b.device and torch.equal(a, b)
        for a, b in zip(left, right, strict=True)
    )

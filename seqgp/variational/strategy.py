"""`DualVariationalStrategy`: the GPyTorch interface of `seqgp.dual`."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from gpytorch.distributions import MultitaskMultivariateNormal, MultivariateNormal
from gpytorch.likelihoods import Likelihood
from gpytorch.models import ApproximateGP
from linear_operator import LinearOperator, to_dense
from linear_operator.operators import DiagLinearOperator
from linear_operator.utils.errors import NotPSDError
from torch import Tensor

from seqgp.distributed import ALONE, Ranks
from seqgp.dual import (
    Batch,
    Conditioned,
    Convergence,
    Duals,
    Sites,
    Summary,
    condition,
    conjugate_duals,
    converge,
    discounted,
    fold,
    natural_gradient_step,
    posterior_mean,
    posterior_variance,
    rebase_summary,
    solve_lower,
    tie,
)
from seqgp.dual.conditioning import conditioned_from_sites
from seqgp.dual.duals import add as add_duals
from seqgp.dual.linalg import broadcast_shapes, inverse_lower
from seqgp.dual.posterior import explained, has_posterior, unexplained_variance
from seqgp.dual.projection import coincident
from seqgp.dual.sites import sites as make_sites
from seqgp.dual.summary import empty_summary, least_square, log_constant
from seqgp.likelihoods.softmax import softmax_bound_sites
from seqgp.likelihoods.traits import (
    has_one_latent,
    is_conjugate,
    precision_floor,
    summary_noise,
)
from seqgp.observations import Observations
from seqgp.validation import check_inducing_points, check_inputs, check_step_size
from seqgp.variational.bound import Past, Setting, exact_bound, maximised_bound
from seqgp.variational.linear_operators import PosteriorCovariance
from seqgp.variational.prior_blocks import Forward, Prior, contract, frozen_prior, joint_prior
from seqgp.variational.state import DualState, State

#: Number of elements of a cross-covariance block ``m x n`` that are held in memory: per chunk, and
#: for all chunks together. Beyond the latter, chunks are computed again at each pass over the data.
CHUNK_ELEMENTS = 2**19
KEEP_ELEMENTS = 2**25

#: Options of methods whose other keyword arguments are per point; used in error messages.
_OPTIONS = (
    *("likelihood", "rho", "num_data", "add", "tol", "max_steps", "fixed_inducing"),
    *("weights", "coefficients", "summary_share"),
)


class Observed(NamedTuple):
    """Observations outside of Z that the posterior process has been conditioned on."""

    data: Observations
    likelihood: Likelihood
    sites: Sites  # ... [x c] x q
    prior_mean: Tensor  # ... [x c] x q, on which the sites are centred

    def to(self, convert: Callable[[Tensor], Tensor]) -> Observed:
        """Convert each tensor."""
        site = Sites(*map(convert, self.sites))
        return self._replace(
            data=self.data.to(convert), sites=site, prior_mean=convert(self.prior_mean)
        )


class Whitened(NamedTuple):
    """The whitened cross-covariance ``A = L^-1 K_zh``, and the variance it leaves unexplained."""

    A: Tensor  # ... x m x n
    unexplained: Tensor  # ... x n
    prior_mean: Tensor  # ... [x c] x n


class _Correction(NamedTuple):
    """The effect of `Observed` on predictions made with one particular `State`."""

    state: State
    conditioned: Conditioned
    explained: Tensor  # ... x m x q, (I - W^-1) A at the observed inputs


class _Moments(NamedTuple):
    """The posterior of the observed values or functionals."""

    prior_mean: Tensor  # ... [x c] x q
    centred: Tensor  # ... [x c] x q, posterior mean minus prior mean
    covariance: Tensor  # ... x q x q
    explained: Tensor  # ... x m x q, (I - W^-1) A


class Arranged(NamedTuple):
    """Inducing points and summary in an order in which their common points are adjacent.

    Attributes:
        inducing_points: ``... x m x d``, common points first.
        past: The summary, common points last.
        kept: ``... x m x s``, which inducing points coincide with which points of the summary.
        alone: How many points of the summary are not inducing points; ``None`` if the order is that
            of the arguments, since points differ between members of a batch or are repeated.
    """

    inducing_points: Tensor
    past: Past
    kept: Tensor
    alone: int | None


class _Prediction(NamedTuple):
    """The intermediate results of one prediction."""

    x: Tensor  # the inputs, as they were passed
    state: State
    prior_mean: Tensor  # ... x n
    prior_covariance: LinearOperator  # ... x n x n
    A: Tensor  # ... x m x n
    explained: Tensor  # ... x m x n, (I - W^-1) A

    def moments(self) -> _Moments:
        """Return the moments that conditioning needs."""
        covariance = to_dense(self.prior_covariance) - self.A.mT @ self.explained
        centred = posterior_mean(self.A, self.state.factors)
        return _Moments(self.prior_mean, centred, covariance, self.explained)


class DualVariationalStrategy(DualState):
    r"""A variational strategy that stores the posterior as sums over observations (duals).

    The posterior over the inducing values is the prior times a Gaussian pseudo-likelihood,
    :math:`q(u) \propto p_\theta(u)\, t(u)`. The strategy stores :math:`t` as *duals*, which are
    sums over observations (see `seqgp.dual`), instead of a variational mean and covariance. So new
    data are learnt by adding their duals, and the posterior follows the prior when hyperparameters
    or inducing points change.

    Duals are buffers, not parameters. They are changed by natural-gradient steps
    (`natural_gradient_step`, `converge`), not by optimisers of parameters. In a training loop with
    `VariationalELBO` or another objective with ``kl_divergence()``, each backward pass takes such a
    step, of size 0.1. `DualNGD` is an optimiser that takes them. Before the first step, the
    posterior is the prior.

    Args:
        model: The model, whose ``forward`` returns the prior.
        inducing_points: ``... x m x d`` inducing points.
        num_latents: The number ``c`` of independent latent functions, for likelihoods with several
            (`gpytorch.likelihoods.SoftmaxLikelihood`). The model then returns a
            `MultitaskMultivariateNormal` with event shape ``n x c``. The latent functions share
            kernel, mean and inducing points, unless the last batch dimension of these is ``c``.
            Shared kernel matrices are evaluated and factorised once.
        learn_inducing_locations: Whether the inducing points are a parameter.
        batch_shape: Batch shape of the duals. By default that of the inducing points. It is
            broadcast with that of the data.
        jitter_val: Jitter on the diagonal of ``Kzz``, *relative* to that diagonal. By default
            1e-8 in float64 and 1e-5 in float32.

    Example:
        >>> import torch, gpytorch
        >>> from seqgp import DualVariationalStrategy
        >>> class GP(gpytorch.models.ApproximateGP):
        ...     def __init__(self, Z):
        ...         super().__init__(DualVariationalStrategy(self, Z))
        ...         self.mean_module = gpytorch.means.ConstantMean()
        ...         self.covar_module = gpytorch.kernels.RBFKernel()
        ...     def forward(self, x):
        ...         return gpytorch.distributions.MultivariateNormal(
        ...             self.mean_module(x), self.covar_module(x))
        >>> x = torch.linspace(0, 1, 50).unsqueeze(-1)
        >>> model = GP(x[::10]).eval()
        >>> likelihood = gpytorch.likelihoods.PoissonLikelihood()
        >>> info = model.variational_strategy.converge(x, torch.arange(50.0) // 10, likelihood)
        >>> info.converged, model(x).mean.shape
        (True, torch.Size([50]))
    """

    has_fantasy_strategy = True
    #: The processes that share the observations. Each learns from its own shard, and all end with
    #: the same duals.
    ranks: Ranks = ALONE

    def __init__(
        self,
        model: ApproximateGP,
        inducing_points: Tensor,
        num_latents: int | None = None,
        learn_inducing_locations: bool = True,
        batch_shape: torch.Size | None = None,
        jitter_val: float | None = None,
    ) -> None:
        super().__init__(
            model, inducing_points, num_latents, learn_inducing_locations, batch_shape, jitter_val
        )
        self._observed: Observed | None = None
        self._correction: _Correction | None = None
        self._past: tuple[Tensor, float, Past] | None = None
        self._arrangement: tuple[Tensor, Past, Arranged] | None = None
        self._whitened: tuple[Tensor, Tensor | None, Tensor, Whitened] | None = None
        # The latest prediction, within `sharing_predictions`.
        self._predictions: list[_Prediction] | None = None
        self.is_fantasy = False

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self._observed = self._correction = None
        super()._load_from_state_dict(*args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        state = {**super().__getstate__(), "_correction": None, "_past": None}
        state["_whitened"] = state["_arrangement"] = state["_predictions"] = None
        if self._observed is not None:  # a copy cannot hold the graph of the observations
            state["_observed"] = self._observed.to(Tensor.detach)
        return state

    def _apply(self, fn: Callable[[Tensor], Tensor], *args: Any, **kwargs: Any) -> Any:
        self._correction = self._past = self._whitened = self._arrangement = None
        if self._observed is not None:
            self._observed = self._observed.to(fn)
        return super()._apply(fn, *args, **kwargs)

    # ---------------------------------------------------------------- state

    @property
    def base_variational_strategy(self) -> DualVariationalStrategy:
        """The strategy itself, under the name that GPyTorch's wrappers for several outputs use."""
        return self

    @property
    def is_conditioned(self) -> bool:
        """Whether this strategy belongs to a conditioned (fantasy) model."""
        return self._observed is not None

    @property
    def observed(self) -> Observed | None:
        """The observations outside of Z that the posterior process has been conditioned on."""
        return self._observed

    @observed.setter
    def observed(self, observed: Observed | None) -> None:
        self._observed, self._correction = observed, None

    @property
    def batch_shape(self) -> torch.Size:
        """Batch shape of the posterior, from prior, duals and conditioned observations."""
        state = self.state()
        shapes = [state.chol.shape[:-2], state.factors.mean.shape[:-1]]
        if self._observed is not None:
            shapes.append(self._observed.sites.lam.shape[:-1])
        shape = broadcast_shapes(*shapes)
        return shape[:-1] if self.latent_dims else shape

    def _knows_only_data(self) -> bool:
        return super()._knows_only_data() and self.ranks.alone and not self.is_fantasy

    def set_ranks(self, ranks: Ranks) -> None:
        """Set the processes that share the observations.

        Args:
            ranks: The processes; `ALONE` for none.
        """
        self.__dict__.pop("ranks", None)
        if not ranks.alone:  # the ranks are not part of a checkpoint
            self.ranks = ranks

    # ---------------------------------------------------------------- learning

    @torch.no_grad()
    def natural_gradient_step(
        self,
        inputs: Tensor | Observations,
        targets: Tensor | None = None,
        likelihood: Likelihood | None = None,
        rho: float = 1.0,
        num_data: int | None = None,
        **arguments: Any,
    ) -> Tensor:
        """Take one natural-gradient step on the evidence lower bound of a data set.

        Args:
            inputs: ``... x n x d`` inputs, all of them or a minibatch; or checked `Observations`.
            targets: ``... x n`` targets.
            likelihood: The likelihood; by default the model's attribute of that name.
            rho: Step size, in (0, 1]. With a Gaussian likelihood and all data, one step with
                ``rho=1`` is exact. If the likelihood is not log-concave, a step is shortened if
                there would be no posterior after it.
            num_data: Size of the whole data set, if this is a minibatch.
            arguments: Per-point arguments of the likelihood (``noise=``, ``total_count=``, ...),
                with trailing dimension ``n``.

        Returns:
            The (estimated) bound before the step, of the batch shape of model and data.

        Example:
            >>> import torch, gpytorch
            >>> from seqgp import SequentialGP
            >>> X = torch.linspace(0, 1, 20, dtype=torch.double).unsqueeze(-1)
            >>> Y = torch.sin(6 * X)
            >>> model = SequentialGP(X, (Y - Y.mean()) / Y.std(), inducing_points=8)
            >>> strategy = model.variational_strategy
            >>> half = X[::2], model.train_targets[::2]
            >>> bound = strategy.natural_gradient_step(*half, num_data=20)
            >>> bound.shape
            torch.Size([])
        """
        check_step_size(rho)
        data, likelihood = self.checked(inputs, targets, likelihood, arguments)
        number = len(data) if num_data is None else self.ranks.total(len(data))
        weight = 1.0 if num_data is None or number == 0 else num_data / number
        state = self.state()
        duals, bound = natural_gradient_step(
            state.duals,
            self.batches(state, data, likelihood, passes=1)(),
            rho,
            base=self.base(state.basis, likelihood),
            weight=weight,
            latent_dims=self.latent_dims,
            min_precision=precision_floor(likelihood),
            ranks=self.ranks,
        )
        self.store(duals, state)
        return bound

    @torch.no_grad()
    def converge(
        self,
        inputs: Tensor | Observations,
        targets: Tensor | None = None,
        likelihood: Likelihood | None = None,
        add: bool = False,
        rho: float = 1.0,
        tol: float = 1e-6,
        max_steps: int = 100,
        weights: Tensor | None = None,
        coefficients: Tensor | None = None,
        summary_share: float = 1.0,
        start: Sites | None = None,
        **arguments: Any,
    ) -> Convergence:
        """Take natural-gradient steps until the posterior has converged.

        Args:
            inputs: ``... x n x d`` inputs; or checked `Observations`.
            targets: ``... x n`` targets.
            likelihood: The likelihood. By default the model's attribute of that name.
            add: Whether to add the data to the present posterior, as the next batch of a stream. By
                default, these data replace all others except for the summary.
            rho: The maximum step size. Steps that would lower the bound are shortened.
            tol: Relative change of the duals at which to stop.
            max_steps: The maximum number of passes over the data. If it is reached, there is a
                warning.
            weights: ``n``, how often each observation counts; by default once.
            coefficients: ``... x n x J``, for observations of ``sum_j c_ij f(x_ij)`` at inputs
                ``... x n x J x d``.
            summary_share: How much of the summary to use, from 0 to 1.
            start: Sites of the data to start from, as returned by `bound`. By default the present
                posterior.
            arguments: Per-point arguments of the likelihood.

        Returns:
            A report of the iteration.
        """
        check_step_size(rho)
        data, likelihood = self.checked(
            inputs, targets, likelihood, arguments, weights, coefficients
        )
        state = self.state()
        self.learnt_in_loop = False
        base = state.duals if add else self.base(state.basis, likelihood, summary_share)
        options: dict[str, Any] = {
            "latent_dims": self.latent_dims,
            "min_precision": precision_floor(likelihood),
        }
        conjugate = is_conjugate(likelihood)
        batches = self.batches(state, data, likelihood, passes=1 if conjugate else None)
        if conjugate:
            duals, factors, bound = conjugate_duals(
                batches(), base, like=state.duals, ranks=self.ranks
            )
            self.store(duals, state, factors=factors)
            return Convergence(1, torch.zeros_like(bound), bound, True)
        first = state.duals
        if start is not None:
            tied = tie(self.whitened(state.chol, state.shared, data).A, start)
            tied = Duals(*self.ranks.sum(*tied))
            tied = tied if base is None else add_duals(tied, base)
            first = tied if has_posterior(tied) else first
        duals, info = converge(
            first,
            batches,
            base=base,
            rho=rho,
            tol=tol,
            max_steps=max_steps,
            ranks=self.ranks,
            **options,
        )
        self.store(duals, state)
        return info

    def bound(
        self,
        inputs: Tensor | Observations,
        targets: Tensor | None = None,
        likelihood: Likelihood | None = None,
        start: Sites | None = None,
        tol: float = 1e-8,
        stands_for: Tensor | None = None,
        weights: Tensor | None = None,
        max_steps: int = 100,
        coefficients: Tensor | None = None,
        summary_share: float = 1.0,
        exact: bool = False,
        **arguments: Any,
    ) -> tuple[Tensor, Sites]:
        r"""Return the evidence lower bound, maximised over q, with its exact gradient.

        The sites are converged at the present hyperparameters and then held fixed, which does not
        change the gradient at the maximum over q (`seqgp.variational.bound`). The duals of the
        strategy are not changed.

        The summary only depends on folded observations through the inducing values. The variance
        that these do not explain is a term :math:`-\tfrac12 \sum_i \beta_i (k_{ii} - k_{iS}
        K_{SS}^{-1} k_{Si})`, which depends on hyperparameters. Without it, short lengthscales would
        look better than they are. It is estimated from observations at hand that represent the
        folded ones.

        Args:
            inputs: ``... x n x d`` inputs; or checked `Observations`.
            targets: ``... x n`` targets.
            likelihood: The likelihood; by default the model's attribute of that name.
            start: Sites to start from, for example those of the previous hyperparameters.
            tol: Relative tolerance for the sites.
            stands_for: ``... [x c] x k``, the summed precision of the folded observations that each
                of the first ``k`` observations stands for; for Gaussian noise, their number.
            weights: ``n``, how often each observation counts; by default once.
            max_steps: The maximum number of passes over the data to converge the sites. If it is
                reached, there is a warning.
            coefficients: See `converge`.
            summary_share: See `converge`.
            exact: Whether to compute the bound for inducing points at all inputs, instead of the
                present ones. It is the evidence of the exact GP if the likelihood is Gaussian.
            arguments: Per-point arguments of the likelihood.

        Returns:
            The bound, of the batch shape of model and data, and the sites.
        """
        data, likelihood = self.checked(
            inputs, targets, likelihood, arguments, weights, coefficients
        )
        setting = self.setting(summary_share)
        if exact:
            simple = setting.past is None and data.coefficients is None
            if not simple or precision_floor(likelihood) is None:
                raise ValueError(
                    "exact: expected observations of values with a log-concave likelihood, and "
                    "nothing folded."
                )
            return exact_bound(setting, data, likelihood, start, tol, max_steps)
        return maximised_bound(setting, data, likelihood, start, tol, max_steps, stands_for)

    def setting(self, summary_share: float = 1.0) -> Setting:
        """Return what the bound needs of this strategy.

        Args:
            summary_share: How much of the summary counts, from 0 to 1.
        """
        past = self._past_sites(summary_share) if summary_share and self.has_summary else None
        Z, kept, alone = self.placed_points, None, None
        stays = past is None or self.stays(Z)
        if past is not None and not stays and not (Z.requires_grad and torch.is_grad_enabled()):
            Z, past, kept, alone = self.arranged(Z, past)
        return Setting(
            self.prior_at,
            Z,
            self.jitter_val,
            self.num_latents,
            past,
            stays,
            kept,
            alone,
            self.ranks,
        )

    def arranged(self, Z: Tensor, past: Past) -> Arranged:
        """Return inducing points and summary with their common points adjacent, cached.

        Args:
            Z: The inducing points. They are compared by value, since they may be set in place.
            past: The summary.
        """
        known = self._arrangement
        if (
            known is None
            or known[1] is not past
            or known[0].shape != Z.shape
            or not torch.equal(known[0], Z)
        ):
            known = self._arrangement = (Z.detach().clone(), past, _arrange(Z, past))
        return known[2]

    @torch.no_grad()
    def _past_sites(self, share: float) -> Past:
        """Return the summary as sites on functionals, cached for each summary."""
        known = self._past
        if known is None or known[0] is not self.summary_B or known[1] != share:
            (lam, B), square, number = discounted(self.summary, share)
            h, Q = torch.linalg.eigh(B)
            site = Sites((Q.mT @ lam.unsqueeze(-1)).squeeze(-1), h.clamp_min(0))
            C = Q.mT @ inverse_lower(self.reference_chol)
            precision = C.mT @ (site.beta.unsqueeze(-1) * C)
            past = Past(
                self.reference_points, self.reference_mean, C, precision, site, square, number
            )
            known = self._past = (self.summary_B, share, past)
        return known[2]

    @torch.no_grad()
    def log_summary_constant(self, likelihood: Likelihood, share: float = 1.0) -> Tensor:
        """Return the summary's part of the bound that does not depend on q; `converge` omits it.

        Args:
            likelihood: The likelihood.
            share: How much of the summary counts, from 0 to 1.
        """
        basis = self.state().basis
        constant = log_constant(discounted(self.summary, share), basis, summary_noise(likelihood))
        return constant.sum(-1) if self.latent_dims else constant

    @torch.no_grad()
    def sites(
        self,
        inputs: Tensor | Observations,
        targets: Tensor | None = None,
        likelihood: Likelihood | None = None,
        unseen: Tensor | None = None,
        **arguments: Any,
    ) -> tuple[Sites, Tensor]:
        """Return the sites of observations under the present posterior, and its variances there.

        Args:
            inputs: ``... x n x d`` inputs; or checked `Observations`.
            targets: ``... x n`` targets.
            likelihood: The likelihood; by default the model's attribute of that name.
            unseen: ``c`` flags for the classes of a softmax that have not been observed. The sites
                of their latents are those of a bound,
                `seqgp.likelihoods.softmax.softmax_bound_sites`.
            arguments: Per-point arguments of the likelihood.

        Returns:
            Sites ``... [x c] x n`` with precisions of at least zero, so that they can be folded
            for good, and variances of the same shape. Their product ``beta * variance`` is the
            Bayesian leverage score of each observation.
        """
        data, likelihood = self.checked(inputs, targets, likelihood, arguments)
        state = self.state()
        batch = self.batch(state, replace(data, weights=None), likelihood)
        mean = posterior_mean(batch.A, state.factors)
        variance = posterior_variance(batch.A, batch.unexplained, state.factors)
        expected = batch.evaluate(batch.prior_mean + mean, variance)
        site = make_sites(expected, mean)
        if unseen is not None:
            prior_mean = batch.prior_mean.expand_as(mean)
            latents = (prior_mean + mean).mT, variance.mT, prior_mean.mT
            bound = softmax_bound_sites(data.targets, *latents)
            pairs = zip(bound, site, strict=True)
            site = Sites(*(torch.where(unseen.unsqueeze(-1), b.mT, s) for b, s in pairs))
        return site, variance

    @torch.no_grad()
    def fold(
        self,
        inputs: Tensor | Observations,
        targets: Tensor | None = None,
        sites: Sites | None = None,
        likelihood: Likelihood | None = None,
        **arguments: Any,
    ) -> None:
        """Add observations to the summary for good, with given sites.

        Args:
            inputs: ``... x n x d`` inputs; or checked `Observations`.
            targets: ``... x n`` targets.
            sites: Their sites, as returned by `bound`; by default those under the present
                posterior.
            likelihood: The likelihood; by default the model's attribute of that name.
            arguments: Per-point arguments of the likelihood.
        """
        data, likelihood = self.checked(inputs, targets, likelihood, arguments)
        if sites is None:
            sites, _ = self.sites(data, likelihood=likelihood)
        state = self.state()
        summary = self._folded(state, data, likelihood, sites, 1)
        self.store_summary(summary, state, self.ranks.total(len(data)) > 0 or self.has_summary)

    @torch.no_grad()
    def discount(self, factor: float) -> None:
        """Multiply the weight of everything learnt so far, in posterior and summary, by a factor.

        Args:
            factor: The factor, from 0 to 1.
        """
        duals, square, number = discounted(self.summary, factor)
        self.set_tensors(
            {
                "dual_lam": factor * self.dual_lam,
                "dual_B": factor * self.dual_B,
                "summary_lam": duals.lam,
                "summary_B": duals.B,
                "summary_square": square,
                "summary_count": number,
            }
        )

    @torch.no_grad()
    def unfold(
        self,
        inputs: Tensor | Observations,
        targets: Tensor | None = None,
        likelihood: Likelihood | None = None,
        unseen: Tensor | None = None,
        **arguments: Any,
    ) -> None:
        """Remove observations from the summary, with their sites under the present posterior.

        Args:
            inputs: ``... x n x d`` inputs; or checked `Observations`.
            targets: ``... x n`` targets.
            likelihood: The likelihood; by default the model's attribute of that name.
            unseen: See `sites`.
            arguments: Per-point arguments of the likelihood.
        """
        data, likelihood = self.checked(inputs, targets, likelihood, arguments)
        sites, _ = self.sites(data, likelihood=likelihood, unseen=unseen)
        state = self.state()
        summary = self._folded(state, data, likelihood, sites, -1)
        eigenvalues = torch.linalg.eigvalsh(summary.duals.B)
        tolerance = 1e-6 * (1 + torch.linalg.eigvalsh(self.summary_B).amax(-1, keepdim=True))
        impossible = bool((eigenvalues < -tolerance).any()) or bool((summary.number < 0).any())
        exact = summary_noise(likelihood) is not None
        if exact:
            # Negative by more than a change of hyperparameters in the meantime can explain.
            least = least_square(summary)
            impossible |= bool((least < -0.01 * (1 + self.summary.square)).any())
        if impossible:
            moved = ", or their sites have changed too much since they were folded"
            if unseen is not None:
                moved += " as a bound, as classes are still to come"
            raise ValueError(
                "targets: these observations are not part of what has been learnt"
                f"{'' if is_conjugate(likelihood) else moved}: without them the summary would "
                "no longer be positive semi-definite."
            )
        self.store(state.duals, state, summary=summary)

    def _folded(
        self,
        state: State,
        data: Observations,
        likelihood: Likelihood,
        sites: Sites,
        sign: int,
    ) -> Summary:
        """Return the summary in the present basis with observations added or removed."""
        summary = rebase_summary(self.summary, state.basis)
        A, _, prior_mean = self.whitened(state.chol, state.shared, data)
        residual, weights = data.targets - prior_mean, data.weights
        noise = summary_noise(likelihood)
        if self.ranks.alone:
            return fold(summary, A, sites, residual, noise, sign, weights)
        own = fold(empty_summary(summary.duals), A, sites, residual, noise, sign, weights)
        lam, B, square, number = self.ranks.sum(*own.duals, own.square, own.number)
        duals = add_duals(summary.duals, Duals(lam, B))
        return Summary(duals, summary.square + square, summary.number + number)

    @torch.no_grad()
    def set_inducing_points(self, inducing_points: Tensor) -> None:
        """Change the inducing points, and project the duals onto the new ones.

        Args:
            inducing_points: ``... x m' x d``. If they include the present ones, the posterior does
                not change.

        Example:
            >>> import torch, gpytorch
            >>> from seqgp import SequentialGP
            >>> X = torch.linspace(0, 1, 20, dtype=torch.double).unsqueeze(-1)
            >>> Y = torch.sin(6 * X)
            >>> model = SequentialGP(X, (Y - Y.mean()) / Y.std(), inducing_points=8)
            >>> strategy = model.variational_strategy
            >>> before = model.posterior(X).mean
            >>> more = torch.tensor([[-0.5], [1.5]], dtype=torch.double)
            >>> strategy.set_inducing_points(torch.cat([strategy.inducing_points, more]))
            >>> torch.allclose(model.posterior(X).mean, before)
            True
        """
        check_inducing_points(inducing_points)
        check_inputs(inducing_points, self.inducing_points.shape[-1], "inducing_points")
        if self._observed is not None:
            raise RuntimeError("A conditioned (fantasy) model cannot move its inducing points.")
        Z = inducing_points.detach().to(self.inducing_points).clone()
        state = self.build(Z)
        self.store(state.duals, state, Z)

    def start_from(self, inducing_points: Tensor) -> None:
        """Change the inducing points for predictions, but keep the duals in their present basis.

        Predictions are the same as after `set_inducing_points`. But until the duals are moved to
        the new basis (by `rebase`, or by learning), inducing points can be moved again, or back,
        without loss.

        Args:
            inducing_points: ``... x m' x d``.
        """
        check_inducing_points(inducing_points)
        Z = inducing_points.detach().to(self.inducing_points).clone()
        self.set_tensors({"inducing_points": Z})

    def get_fantasy_model(
        self,
        inputs: Tensor | Observations,
        targets: Tensor | None = None,
        likelihood: Likelihood | None = None,
        fixed_inducing: bool = False,
        tol: float = 1e-6,
        max_steps: int = 100,
        coefficients: Tensor | None = None,
        **arguments: Any,
    ) -> ApproximateGP:
        r"""Return the model conditioned on more observations, for any likelihood.

        The result is the same as if the new inputs were added to the inducing points, but no matrix
        of size ``m x m`` is formed (see `seqgp.dual.conditioning`). The returned model is of the
        same type, shares all hyperparameters with this one, and can be conditioned again.

        Args:
            inputs: ``b x q x d`` or ``f x b x q x d`` inputs; or checked `Observations`.
            targets: ``b x q`` or ``f x b x q`` targets. Batch shapes broadcast: ``f`` sets of
                targets for the same inputs share their covariances.
            likelihood: The likelihood; by default the model's attribute of that name.
            fixed_inducing: Whether to update the duals at the present inducing points instead, as
                in the paper. The variance that these do not explain then remains.
            tol: Relative tolerance for the sites.
            max_steps: The largest number of iterations for the sites.
            coefficients: ``... x q x J``; see `converge`.
            arguments: Per-point arguments of the likelihood.
        """
        fantasy = self.shallow_copy()
        strategy: DualVariationalStrategy = fantasy.variational_strategy
        strategy.is_fantasy = True
        strategy.set_ranks(ALONE)  # the new observations are not shared with other processes
        if fixed_inducing:
            strategy.converge(
                inputs,
                targets,
                likelihood,
                add=True,
                tol=tol,
                max_steps=max_steps,
                coefficients=coefficients,
                **arguments,
            )
            return fantasy
        data, likelihood = self.checked(
            inputs, targets, likelihood, arguments, None, coefficients, conditioned=True
        )
        if self._observed is not None:
            if self._observed.likelihood is not likelihood:
                kinds = type(self._observed.likelihood).__name__, type(likelihood).__name__
                raise ValueError(
                    f"likelihood: earlier observations came with a {kinds[0]}, these with another "
                    f"{kinds[1]}; pass the same object each time."
                )
            data = self._observed.data.append(data)
        strategy.observe(*self._moments_of(data), data, likelihood, tol, max_steps)
        return fantasy

    # ---------------------------------------------------------------- predictions

    def __call__(self, x: Tensor, prior: bool = False, diag: bool = True) -> MultivariateNormal:
        """Return ``q(f)`` at inputs ``... x n x d``.

        Args:
            x: The inputs.
            prior: Whether to return the prior instead.
            diag: In train mode, return only the variances (the off-diagonal elements are zero).
                In eval mode the covariance is always full, and lazy.
        """
        if x.dim() == 1:
            x = x.unsqueeze(-1)
        if x.shape[-1] != self.inducing_points.shape[-1]:
            check_inputs(x, self.inducing_points.shape[-1], "x")
        if prior:
            prior_f = self.prior_at(self._with_latents(x))
            return self._distribution(prior_f.mean, prior_f.lazy_covariance_matrix)
        self.variational_params_initialized.fill_(1)
        return self.forward(x, diag_only=self.training and diag)

    def forward(self, x: Tensor, diag_only: bool = False) -> MultivariateNormal:
        """Return the predictive distribution; see `__call__`."""
        given = x
        x, forward = self._with_latents(x), self.prior_at
        if not self.training and torch.is_grad_enabled():
            # Gradients may be evaluated after the hyperparameters have changed.
            forward = frozen_prior(forward)
        state, prior = self._pass(x, forward)
        A = solve_lower(state.chol, prior.cross)
        mean = prior.mean + posterior_mean(A, state.factors)
        correction = self._make_correction(state)
        reduction, sign = A[..., :0, :], A.new_ones(0, 1)
        if correction is not None:
            c = self._observed_cross(x, state.shared, forward) - correction.explained.mT @ A
            mean = mean + _along(c, correction.conditioned.gain)
            reduction, sign = correction.conditioned.root @ c, correction.conditioned.sign
        covariance: LinearOperator
        if diag_only:
            unexplained = unexplained_variance(A, prior.variance())
            variance = posterior_variance(A, unexplained, state.factors)
            if correction is not None:
                variance = (variance - (sign * reduction.square()).sum(-2)).clamp_min(0)
            covariance = DiagLinearOperator(variance)
        else:
            # As in GPyTorch, jitter keeps the covariance of close or repeated inputs positive
            # definite. It is relative to the variance at the inducing points, which is already
            # known.
            scale = state.chol.square().sum(-1).mean(-1, keepdim=True)
            E, prior_covariance = explained(A, state.factors), prior.covariance()
            if self._predictions is not None:
                known = _Prediction(given, state, prior.mean, prior_covariance, A, E)
                self._predictions[:] = [known]
            covariance = PosteriorCovariance(
                prior_covariance,
                A,
                E,
                (self.jitter_val * scale).expand(*scale.shape[:-1], x.shape[-2]),
                reduction,
                sign,
                batch_shape=mean.shape[:-1],
            )
        return self._distribution(mean, covariance)

    def _pass(self, x: Tensor, forward: Forward) -> tuple[State, Prior]:
        """Return the state and the prior at inputs, for one prediction."""
        leaves, Z = self.leaves(), self.placed_points
        if leaves is None:
            state = self.state()
            Z = Z if self.training else Z.view_as(Z)  # as for the prior
            return state, joint_prior(forward, Z, x, state.shared)
        # One evaluation for all blocks: in train mode a prior may depend on all of its inputs
        # together (batch normalisation) or on random numbers (dropout).
        prior = joint_prior(forward, Z, x, False, with_left=True)
        assert prior.left is not None
        return self.state_in_loop(leaves, *prior.left), prior

    # ---------------------------------------------------------------- the prior

    def _with_latents(self, x: Tensor) -> Tensor:
        """Add a batch dimension for several latents to inputs ``... x n x d``."""
        return x if self.num_latents is None else x.unsqueeze(-3)

    def _distribution(self, mean: Tensor, covariance: LinearOperator) -> MultivariateNormal:
        """Return ``... [x c] x n`` moments as a distribution with event shape ``n [x c]``."""
        if self.num_latents is None:
            return MultivariateNormal(mean, covariance)
        n, batch = mean.shape[-1], broadcast_shapes(mean.shape[:-2], covariance.shape[:-3])
        if mean.shape[-2] not in (1, self.num_latents):
            raise ValueError(
                f"num_latents: with {self.num_latents} latents, the last batch dimension of "
                f"kernel, mean and inducing points must be {self.num_latents} or 1 (or they have "
                f"none), got {mean.shape[-2]}."
            )
        batch = torch.Size([*batch, self.num_latents])
        latents = MultivariateNormal(mean.expand(*batch, n), covariance.expand(*batch, n, n))
        return MultitaskMultivariateNormal.from_batch_mvn(latents, task_dim=-1)

    # ---------------------------------------------------------------- data

    def checked(
        self,
        inputs: Tensor | Observations,
        targets: Tensor | None,
        likelihood: Likelihood | None,
        arguments: dict[str, Any],
        weights: Tensor | None = None,
        coefficients: Tensor | None = None,
        conditioned: bool = False,
    ) -> tuple[Observations, Likelihood]:
        """Check observations, and return them with their likelihood.

        Args:
            inputs: Raw inputs, or observations that have already been checked.
            targets: Raw targets.
            likelihood: The likelihood; by default the model's.
            arguments: Raw per-point arguments.
            weights: Raw weights.
            coefficients: Raw coefficients of functionals.
            conditioned: Whether this strategy may belong to a conditioned model.
        """
        if self._observed is not None and not conditioned:
            raise RuntimeError(
                "This is a conditioned (fantasy) model: condition it further with "
                "get_fantasy_model, or update the model that it came from."
            )
        likelihood = getattr(self.model, "likelihood", None) if likelihood is None else likelihood
        if likelihood is None:
            raise ValueError(
                "likelihood: pass one, or give the model an attribute of that name; got None."
            )
        if has_one_latent(likelihood) != (self.num_latents is None):
            wants = "one latent function" if self.num_latents else "several latent functions"
            raise ValueError(
                f"likelihood: {type(likelihood).__name__} is a likelihood of {wants}, but the "
                f"strategy has num_latents={self.num_latents}."
            )
        if isinstance(inputs, Observations):
            return inputs, likelihood
        if targets is None:
            raise TypeError("targets: expected a torch.Tensor, got NoneType.")
        data = Observations.checked(
            inputs,
            targets,
            likelihood,
            arguments,
            weights,
            coefficients,
            self.inducing_points.shape[-1],
            self.inducing_points.dtype,
            _OPTIONS,
        )
        # A new tensor object: the caller may change the values in place before passing the same
        # tensor again, and the cache of `whitened` compares inputs by identity.
        if not conditioned:
            data = replace(data, inputs=data.inputs.view_as(data.inputs))
        return data, likelihood

    def prior(self, data: Observations, shared: bool) -> Prior:
        """Return the prior of observed functionals, and its covariance with the inducing values.

        Args:
            data: The observations.
            shared: Whether one prior and one set of inducing points serve all batches.
        """
        x, c = self._with_latents(data.points), data.coefficients
        if c is not None and self.num_latents is not None:
            c = c.unsqueeze(-3)
        return joint_prior(self.prior_at, self.placed_points, x, shared, coefficients=c)

    def whitened(self, chol: Tensor, shared: bool, data: Observations) -> Whitened:
        """Return the whitened cross-covariance of the observed functionals; see `Whitened`.

        Args:
            chol: ``... x m x m``, the Cholesky factor of the inducing points' covariance.
            shared: Whether one prior and one set of inducing points serve all batches.
            data: The observations.
        """
        graph, known = torch.is_grad_enabled(), self._whitened
        if (
            not graph
            and known is not None
            and known[0] is data.inputs
            and known[1] is data.coefficients
            and known[2].data_ptr() == chol.data_ptr()
        ):
            return known[3]
        prior = self.prior(data, shared)
        A, mean = solve_lower(chol, prior.cross), prior.mean
        unexplained = unexplained_variance(A, prior.variance())
        if self.num_latents is not None and mean.shape[-2] == 1:  # one prior for all latents
            mean = mean.expand(*mean.shape[:-2], self.num_latents, mean.shape[-1])
        result = Whitened(A, unexplained, mean)
        # The next call often has the same observations.
        self._whitened = None if graph else (data.inputs, data.coefficients, chol, result)
        return result

    def batch(self, state: State, data: Observations, likelihood: Likelihood) -> Batch:
        """Return observations in the form that the natural gradient needs.

        Args:
            state: The present state.
            data: The observations.
            likelihood: Their likelihood.
        """
        whitened = self.whitened(state.chol, state.shared, data)
        return Batch(*whitened, data.evaluate(likelihood, self.num_latents is not None))

    @torch.no_grad()
    def marginals(self, data: Observations, index: slice = slice(None)) -> tuple[Tensor, Tensor]:
        """Return ``... [x c] x n`` posterior means and variances of the observed functionals.

        Args:
            data: The observations.
            index: Which of them; by default all.
        """
        state = self.state()
        A, unexplained, prior_mean = (
            each[..., index] for each in self.whitened(state.chol, state.shared, data)
        )
        mean = prior_mean + posterior_mean(A, state.factors)
        return mean, posterior_variance(A, unexplained, state.factors)

    def batches(
        self, state: State, data: Observations, likelihood: Likelihood, passes: int | None = None
    ) -> Callable[[], Iterable[Batch]]:
        """Return observations in chunks, so that memory is bounded for any number of them.

        Args:
            state: The present state.
            data: The observations.
            likelihood: Their likelihood.
            passes: The number of passes over the chunks, if it is known.
        """
        n = len(data)
        width = self.inducing_points.shape[-2] * data.points.shape[:-2].numel()
        size = max(CHUNK_ELEMENTS // width, 1)
        starts, first = list(range(0, n, size)), data.first_parts
        if first is not None and len(starts) > 1:  # the parts of an answer stay together
            starts = sorted(set(first[starts].tolist()))
        chunks = [slice(*each) for each in itertools.pairwise([*starts, n])]

        def batch(chunk: slice) -> Batch:
            part = data if len(chunks) == 1 else data.select(chunk)
            return self.batch(state, part, likelihood)

        if passes != 1 and n * width <= KEEP_ELEMENTS:
            batches = [batch(chunk) for chunk in chunks]
            return lambda: batches
        return lambda: map(batch, chunks)

    # ---------------------------------------------------------------- conditioning

    def shallow_copy(self) -> ApproximateGP:
        """Return a model of the same type that shares everything with this one but its state."""
        model, strategy = copy.copy(self.model), copy.copy(self)
        for module in (model, strategy):
            for name in ("_modules", "_parameters", "_buffers"):
                module.__dict__[name] = dict(module.__dict__[name])
        # Unlike in a deep copy, these caches are still valid.
        for name in ("_cache", "_summary_known", "_past", "_whitened"):
            strategy.__dict__[name] = self.__dict__[name]
        object.__setattr__(strategy, "model", model)
        model.variational_strategy = strategy
        return model

    @torch.no_grad()
    def adopt(self, other: DualVariationalStrategy) -> None:
        """Take over the state of another strategy of the same kind, for example of a copy.

        Args:
            other: The other strategy. The hyperparameters of its model equal those of this one's.
        """
        cached = other.kept()
        self.set_tensors(other.tensors())
        self.variational_params_initialized = other.variational_params_initialized
        for name in ("_summary_known", "_past", "_whitened"):
            self.__dict__[name] = other.__dict__[name]
        self.keep(cached)

    @contextmanager
    def sharing_predictions(self) -> Iterator[None]:
        """Make conditioning at the very inputs of the latest prediction cheaper, in this context.

        Nothing that predictions depend on may change in the meantime; see `steady`.
        """
        self._predictions = []
        try:
            with self.steady():
                yield
        finally:
            self._predictions = None

    def _moments_of(self, data: Observations) -> tuple[State, _Moments]:
        """Return the present state, and the posterior of observed functionals under it."""
        for known in self._predictions or ():
            if known.x is data.inputs and data.coefficients is None:
                return known.state, known.moments()
        state = self.state()
        return state, self._moments(state, data)

    def _moments(self, state: State, data: Observations) -> _Moments:
        """Return the posterior of observed functionals under a state."""
        prior = self.prior(data, state.shared)
        A = solve_lower(state.chol, prior.cross)
        E, covariance = explained(A, state.factors), prior.covariance()
        return _Prediction(data.inputs, state, prior.mean, covariance, A, E).moments()

    def _observed_cross(self, x: Tensor, shared: bool, forward: Forward) -> Tensor:
        """Return ``... x q x n`` prior covariances of observed functionals with values at ``x``."""
        assert self._observed is not None
        data = self._observed.data
        points, c = self._with_latents(data.points), data.coefficients
        cross = joint_prior(forward, points, x, shared).cross
        if c is None:
            return cross
        c = c if self.num_latents is None else c.unsqueeze(-3)
        return contract(cross.mT, c).mT

    def observe(
        self,
        state: State,
        moments: _Moments,
        data: Observations,
        likelihood: Likelihood,
        tol: float,
        steps: int,
    ) -> None:
        """Condition this strategy, that of a copied model, on observations outside of Z.

        Args:
            state: The present state.
            moments: The posterior of the observed functionals under it.
            data: All observations outside of Z.
            likelihood: Their likelihood.
            tol: Relative tolerance for the sites.
            steps: The maximum number of iterations.
        """
        prior_mean, centred, covariance, explained_A = moments
        conditioned, _ = condition(
            centred + prior_mean,
            covariance,
            prior_mean,
            data.evaluate(likelihood, self.num_latents is not None),
            conjugate=is_conjugate(likelihood),
            latent_dims=self.latent_dims,
            min_precision=precision_floor(likelihood),
            tol=tol,
            max_steps=steps,
        )
        self._observed = Observed(data, likelihood, conditioned.sites, prior_mean.clone())
        self._correction = _Correction(state, conditioned, explained_A)

    def replace_likelihood(self, old: Likelihood, new: Likelihood) -> None:
        """Replace the likelihood of conditioned observations by another one, a copy of it."""
        if self._observed is not None and self._observed.likelihood is old:
            self._observed = self._observed._replace(likelihood=new)

    def _make_correction(self, state: State) -> _Correction | None:
        """Return the effect of the observed points on predictions with ``state``, cached."""
        if self._observed is None or (
            self._correction is not None and self._correction.state is state
        ):
            return self._correction
        data, likelihood, (lam, beta), prior_mean = self._observed
        now, centred, covariance, explained_A = self._moments(state, data)
        # Sites are centred on the prior mean, which may have changed; the observations have not.
        site = Sites(lam + beta * (prior_mean - now), beta)
        signed = precision_floor(likelihood) is None
        conditioned = conditioned_from_sites(centred, covariance, site, signed)
        if signed and bool(conditioned.gain.isnan().any()):
            raise NotPSDError(
                "After a change of hyperparameters there is no posterior given the observations "
                "that this model was conditioned on: condition the model that it came from anew."
            )
        self._correction = _Correction(state, conditioned, explained_A)
        return self._correction


@torch.no_grad()
def _arrange(Z: Tensor, past: Past) -> Arranged:
    """Arrange inducing points and summary, see `Arranged`."""
    kept = coincident(Z, past.points)
    if kept.dim() > 2 or max(kept.sum(-1).max(), kept.sum(-2).max()) > 1:
        return Arranged(Z, past, kept, None)
    rows, columns = kept.nonzero().unbind(-1)
    other_rows, other_columns = ((kept.sum(dim) == 0).nonzero().squeeze(-1) for dim in (-1, -2))
    rows, columns = torch.cat([rows, other_rows]), torch.cat([other_columns, columns])
    kept = kept[rows][:, columns]
    return Arranged(Z[rows], past.select(columns), kept, len(other_columns))


def _along(c: Tensor, gain: Tensor) -> Tensor:
    """Return ``... x n``: the sums of the rows of ``... x q x n``, weighted by ``... x q`` vectors.

    Fantasies have one batch dimension more than the covariances that they share. One product for
    each covariance is several times as fast as one for each fantasy.
    """
    if gain.dim() == c.dim() > 2 and gain.shape[1:-1] == c.shape[:-2]:
        return (gain.movedim(0, -2) @ c).movedim(-2, 0)
    return (c.mT @ gain.unsqueeze(-1)).squeeze(-1)

"""`DualVariationalStrategy`: the GPyTorch face of `seqgp.dual`."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from gpytorch.distributions import MultitaskMultivariateNormal, MultivariateNormal
from gpytorch.likelihoods import Likelihood
from gpytorch.models import ApproximateGP
from gpytorch.settings import min_fixed_noise
from linear_operator import LinearOperator, to_dense
from linear_operator.operators import DiagLinearOperator
from linear_operator.utils.errors import NotPSDError
from torch import Tensor

from seqgp.dual import (
    Basis,
    Batch,
    Conditioned,
    Convergence,
    Duals,
    Sites,
    Summary,
    add,
    condition,
    converge,
    converge_sites,
    discounted,
    expected_log_summary,
    factorise,
    fold,
    kl_divergence,
    log_constant,
    log_evidence,
    natural_gradient_step,
    posterior_mean,
    posterior_variance,
    rebase_summary,
    scaled_cholesky,
    solve_lower,
    tie,
)
from seqgp.dual.conditioning import conditioned_from_sites
from seqgp.dual.posterior import explained, unexplained_variance
from seqgp.dual.sites import sites as make_sites
from seqgp.dual.summary import least_square
from seqgp.likelihoods.expectations import expected_log_prob
from seqgp.likelihoods.softmax import softmax_bound_sites
from seqgp.likelihoods.traits import (
    has_closed_form,
    has_one_latent,
    is_conjugate,
    observation_noise,
    precision_floor,
    summary_noise,
)
from seqgp.observations import Observations, arguments_held_by
from seqgp.validation import (
    check_arguments,
    check_inducing_points,
    check_inputs,
    check_step_size,
    check_targets,
)
from seqgp.variational.linear_operators import PosteriorCovariance
from seqgp.variational.prior_blocks import joint_prior
from seqgp.variational.state import DualState, State

#: Elements of a cross-covariance block ``m x n`` that are held in memory: per chunk, and for all
#: chunks together before they are computed anew at each pass over the data.
CHUNK_ELEMENTS = 2**19
KEEP_ELEMENTS = 2**25

#: Options of methods whose other arguments are per point, for errors.
_OPTIONS = ("likelihood", "rho", "num_data", "add", "tol", "max_steps", "fixed_inducing")


class _Observed(NamedTuple):
    """Observations that the posterior process has been conditioned on, outside of Z."""

    data: Observations
    sites: Sites  # ... [x c] x q
    prior_mean: Tensor  # ... [x c] x q, on which the sites are centred

    def to(self, convert: Callable[[Tensor], Tensor]) -> _Observed:
        """The same, each tensor converted."""
        site = Sites(*map(convert, self.sites))
        return _Observed(self.data.to(convert), site, convert(self.prior_mean))


class _Correction(NamedTuple):
    """What `_Observed` does to predictions made with one particular `State`."""

    state: State
    conditioned: Conditioned
    explained: Tensor  # ... x m x q, (I - W^-1) A at the observed inputs


class DualVariationalStrategy(DualState):
    r"""A variational strategy whose parameters are duals instead of a mean and a covariance.

    The posterior over the inducing values is the prior times a Gaussian pseudo-likelihood,
    :math:`q(u) \propto p_\theta(u)\, t(u)`. What is stored is :math:`t`, as whitened tied duals
    (see `seqgp.dual`) together with the inducing points and the Cholesky factor that they were
    made with. Hence the posterior follows the prior when hyperparameters or inducing points
    change, and adding data is adding duals.

    Duals are buffers, not parameters: they are moved by natural-gradient steps
    (`natural_gradient_step`, `converge`), never by an optimiser. Before the first step the
    posterior is the prior.

    Args:
        model: The model that the strategy belongs to; its ``forward`` gives the prior.
        inducing_points: ``... x m x d`` inducing points.
        num_latents: Number ``c`` of independent latent functions, for likelihoods of several
            (`gpytorch.likelihoods.SoftmaxLikelihood`). The model then returns a
            `MultitaskMultivariateNormal` with event shape ``n x c``. Kernel, mean and inducing
            points are shared by the latents unless the last of their batch dimensions is ``c``;
            if shared, they are evaluated and factorised once.
        learn_inducing_locations: Whether the inducing points are a parameter.
        batch_shape: Batch shape of the duals, by default that of the inducing points. It grows by
            broadcasting when batched data are learnt.
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
        self._observed: _Observed | None = None
        self._correction: _Correction | None = None
        self.is_fantasy = False

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self._observed = self._correction = None
        super()._load_from_state_dict(*args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        state = {**super().__getstate__(), "_correction": None}
        if self._observed is not None:  # a copy cannot hold the graph of the observations either
            state["_observed"] = self._observed.to(Tensor.detach)
        return state

    def _apply(self, fn: Callable[[Tensor], Tensor], *args: Any, **kwargs: Any) -> Any:
        self._correction = None
        if self._observed is not None:
            self._observed = self._observed.to(fn)
        return super()._apply(fn, *args, **kwargs)

    # ---------------------------------------------------------------- what it knows

    @property
    def is_conditioned(self) -> bool:
        """Whether this strategy belongs to a conditioned (fantasy) model."""
        return self._observed is not None

    @property
    def batch_shape(self) -> torch.Size:
        """Batch shape of the posterior: of the prior, the duals and the observations on top."""
        state = self.state()
        shapes = [state.chol.shape[:-2], state.factors.mean.shape[:-1]]
        if self._observed is not None:
            shapes.append(self._observed.sites.lam.shape[:-1])
        shape = torch.broadcast_shapes(*shapes)
        return shape[:-1] if self.latent_dims else shape

    # ---------------------------------------------------------------- learning

    @torch.no_grad()
    def natural_gradient_step(
        self,
        inputs: Tensor,
        targets: Tensor,
        likelihood: Likelihood | None = None,
        rho: float = 1.0,
        num_data: int | None = None,
        **arguments: Any,
    ) -> Tensor:
        """One natural-gradient step on the evidence lower bound of a data set.

        Args:
            inputs: ``... x n x d`` inputs, all of them or a minibatch.
            targets: ``... x n`` targets.
            likelihood: The likelihood; by default the model's attribute of that name.
            rho: Step size, in (0, 1]. With a Gaussian likelihood, all data and ``rho=1`` one step
                is exact. With a likelihood that is not log-concave, a step after which there would
                be no posterior is shortened.
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
        data = self._check_data(inputs, targets, likelihood, arguments)
        weight = 1.0 if num_data is None or len(data) == 0 else num_data / len(data)
        state = self.state()
        duals, bound = natural_gradient_step(
            state.duals,
            self._batches(state, data, passes=1)(),
            rho,
            base=self._base(state.basis, data.likelihood),
            weight=weight,
            latent_dims=self.latent_dims,
            min_precision=precision_floor(data.likelihood),
        )
        self._store(duals, state)
        return bound

    @torch.no_grad()
    def converge(
        self,
        inputs: Tensor,
        targets: Tensor,
        likelihood: Likelihood | None = None,
        add: bool = False,
        rho: float = 1.0,
        tol: float = 1e-6,
        max_steps: int = 100,
        weights: Tensor | None = None,
        **arguments: Any,
    ) -> Convergence:
        """Natural-gradient steps until the sites of all the given data have converged.

        Args:
            inputs: ``... x n x d`` inputs.
            targets: ``... x n`` targets.
            likelihood: The likelihood; by default the model's attribute of that name.
            add: Whether the data come on top of the present posterior (the next batch of a stream,
                if nothing of the past is kept), or of the summary alone (the default; with an
                empty summary, they are all that is known).
            rho: The largest step size; steps that would lower the bound are shortened.
            tol: Relative change of the duals at which to stop.
            max_steps: Passes over the data at which to stop, with a warning.
            weights: ``n``, how often each observation counts; by default once.
            arguments: Per-point arguments of the likelihood.

        Returns:
            How the iteration ended.
        """
        check_step_size(rho)
        data = self._check_data(inputs, targets, likelihood, arguments)
        data = replace(data, weights=weights)
        state = self.state()
        duals, info = converge(
            state.duals,
            self._batches(state, data),
            base=state.duals if add else self._base(state.basis, data.likelihood),
            conjugate=is_conjugate(data.likelihood),
            latent_dims=self.latent_dims,
            min_precision=precision_floor(data.likelihood),
            rho=rho,
            tol=tol,
            max_steps=max_steps,
        )
        self._store(duals, state)
        return info

    def bound(
        self,
        inputs: Tensor,
        targets: Tensor,
        likelihood: Likelihood | None = None,
        start: Sites | None = None,
        tol: float = 1e-8,
        stands_for: Tensor | None = None,
        weights: Tensor | None = None,
        max_steps: int = 100,
        **arguments: Any,
    ) -> tuple[Tensor, Sites]:
        r"""The evidence lower bound of a data set, maximised over q, with its exact gradient.

        The sites are converged at the present hyperparameters and then held fixed, which at the
        maximum over q leaves the gradient as it is. Does not change the strategy's own duals.

        The summary knows folded observations through the inducing values that it was made with;
        what these do not explain of them is a term :math:`-\tfrac12 \sum_i \beta_i (k_{ii} -
        k_{iS} K_{SS}^{-1} k_{Si})` that depends on hyperparameters. Without it, short lengthscales
        would look better than they are. It is estimated by observations at hand that stand for
        those that are not.

        Args:
            inputs: ``... x n x d`` inputs.
            targets: ``... x n`` targets.
            likelihood: The likelihood; by default the model's attribute of that name.
            start: Sites to start from, say those at the hyperparameters of the previous step.
            tol: Relative tolerance for the sites.
            stands_for: ``... [x c] x k``, the summed precision of the folded observations for which
                each of the first ``k`` observations stands; for Gaussian noise, their number.
            weights: ``n``, how often each observation counts; by default once.
            max_steps: Passes over the data at which to stop with the sites, with a warning.
            arguments: Per-point arguments of the likelihood.

        Returns:
            The bound, of the batch shape of model and data, and the sites.
        """
        data = self._check_data(inputs, targets, likelihood, arguments)
        data = replace(data, weights=weights)
        likelihood, arguments = data.likelihood, data.arguments
        batch, basis, residual = self._joint(data, stands_for)
        base = self._base(basis, likelihood)
        past = batch.A.new_zeros(())
        if base is not None:
            noise = summary_noise(likelihood)
            past = log_constant(self.counted_summary, basis, noise, residual)
        if has_closed_form(likelihood) and weights is None:
            # Collapsed: the best q is known as a function of the hyperparameters.
            centred = data.targets - batch.prior_mean
            noise = observation_noise(likelihood, len(data), **arguments)
            site = Sites(centred / noise, noise.reciprocal())
            duals = tie(batch.A, site) if base is None else add(tie(batch.A, site), base)
            square = centred.square() + batch.unexplained
            bound = -0.5 * (square / noise + (2 * math.pi * noise).log()).sum(-1)
            bound = bound + log_evidence(duals, factorise(duals)) + past
            return bound, Sites(site.lam.detach(), site.beta.detach())
        with torch.no_grad():
            site = converge_sites(
                batch.detach(),
                start,
                None if base is None else Duals(base.lam.detach(), base.B.detach()),
                is_conjugate(likelihood),
                self.latent_dims,
                precision_floor(likelihood),
                tol=tol,
                max_steps=max_steps,
            )
        duals = tie(batch.A, site)
        factors = factorise(duals if base is None else add(duals, base))
        mean = batch.prior_mean + posterior_mean(batch.A, factors)
        variance = posterior_variance(batch.A, batch.unexplained, factors)
        bound = past - kl_divergence(factors)
        if base is not None:
            bound = bound + expected_log_summary(base, factors)
        if self.latent_dims:
            mean, variance, bound = mean.mT, variance.mT, bound.sum(-1)
        fit = expected_log_prob(likelihood, targets, mean, variance, **arguments)
        fit = fit if weights is None else weights * fit
        return fit.sum(-1) + bound, site

    def _joint(
        self, data: Observations, stands_for: Tensor | None
    ) -> tuple[Batch, Basis, Tensor | None]:
        """Everything that the bound needs of the prior, from two evaluations of the kernel.

        Returns:
            The observations as the natural gradient sees them, the way from the basis of the
            stored duals, and the unexplained variance of the folded observations
            times their precision, estimated from ``stands_for``.
        """
        Z, points = self.inducing_points, self.reference_points
        x, stays = self._with_latents(data.inputs), self._stays(Z)
        shared = self.model.forward(Z).batch_shape.numel() == 1
        s = 0 if stays else points.shape[-2]
        if s:
            batch_shape = torch.broadcast_shapes(points.shape[:-2], x.shape[:-2])
            right = [t.expand(*batch_shape, *t.shape[-2:]) for t in (points, x)]
            prior = joint_prior(self.model.forward, Z, torch.cat(right, -2), shared, with_left=True)
        else:
            prior = joint_prior(self.model.forward, Z, x, shared, with_left=True)
        assert prior.left is not None
        mean, K = prior.left
        own, covariance = None, None  # the summary's own points
        count = 0 if stands_for is None else stands_for.shape[-1]
        if s and bool(self.summary_count.any()):
            own = joint_prior(self.model.forward, points, x[..., :count, :], shared, with_left=True)
            assert own.left is not None
            covariance = own.left[1]
        if stays:
            chol, basis = self._basis(Z, K, mean)
        else:
            chol, basis = self._basis(Z, K, prior.mean[..., :s], prior.cross[..., :s], covariance)
        variance = prior.variance()[..., s:]
        batch = self._as_batch(chol, prior.cross[..., s:], prior.mean[..., s:], variance, data)
        if stands_for is None:
            return batch, basis, None
        unexplained = batch.unexplained[..., :count]
        if own is not None and covariance is not None:
            A = solve_lower(scaled_cholesky(covariance, self.jitter_val), own.cross)
            unexplained = unexplained_variance(A, variance[..., :count])
        return batch, basis, (stands_for * unexplained).sum(-1)

    @torch.no_grad()
    def sites(
        self,
        inputs: Tensor,
        targets: Tensor,
        likelihood: Likelihood | None = None,
        unseen: Tensor | None = None,
        **arguments: Any,
    ) -> tuple[Sites, Tensor]:
        """Sites of observations under the present posterior, and its variances there.

        Args:
            inputs: ``... x n x d`` inputs.
            targets: ``... x n`` targets.
            likelihood: The likelihood; by default the model's attribute of that name.
            unseen: ``c``, which classes of a softmax nobody has seen yet. The sites of their
                latents are those of a bound, `seqgp.dual.softmax_bound_sites`.
            arguments: Per-point arguments of the likelihood.

        Returns:
            Sites ``... [x c] x n`` with precisions of at least zero, so that they can be folded
            for good, and variances of the same shape. Their product ``beta * variance`` is the
            Bayesian leverage score of each observation.
        """
        data = self._check_data(inputs, targets, likelihood, arguments)
        state = self.state()
        batch = self._batch(state.chol, state.shared, data)
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
        inputs: Tensor,
        targets: Tensor,
        sites: Sites,
        likelihood: Likelihood | None = None,
        discount: float = 1.0,
        **arguments: Any,
    ) -> None:
        """Add observations to the summary for good, with given sites.

        Args:
            inputs: ``... x n x d`` inputs.
            targets: ``... x n`` targets.
            sites: Their sites, as `bound` returns them.
            likelihood: The likelihood; by default the model's attribute of that name.
            discount: Factor for what the summary held before.
            arguments: Per-point arguments of the likelihood.
        """
        data = self._check_data(inputs, targets, likelihood, arguments)
        state = self.state()
        self._store(state.duals, state, summary=self._folded(state, data, sites, 1, discount))

    @torch.no_grad()
    def unfold(
        self,
        inputs: Tensor,
        targets: Tensor,
        likelihood: Likelihood | None = None,
        unseen: Tensor | None = None,
        **arguments: Any,
    ) -> None:
        """Take observations out of the summary, with their sites under the present posterior.

        Args:
            inputs: ``... x n x d`` inputs.
            targets: ``... x n`` targets.
            likelihood: The likelihood; by default the model's attribute of that name.
            unseen: As for `sites`.
            arguments: Per-point arguments of the likelihood.
        """
        data = self._check_data(inputs, targets, likelihood, arguments)
        sites, _ = self.sites(inputs, targets, data.likelihood, unseen, **arguments)
        state = self.state()
        summary = self._folded(state, data, sites, -1)
        eigenvalues = torch.linalg.eigvalsh(summary.duals.B)
        tolerance = 1e-6 * (1 + torch.linalg.eigvalsh(self.summary_B).amax(-1, keepdim=True))
        impossible = bool((eigenvalues < -tolerance).any()) or bool((summary.number < 0).any())
        exact = summary_noise(data.likelihood) is not None
        if exact:
            # By more than what hyperparameters that have changed since can make of it.
            least = least_square(summary)
            impossible |= bool((least < -0.01 * (1 + self.summary.square)).any())
        if impossible:
            moved = ", or their sites have changed too much since they were folded"
            if unseen is not None:
                moved += " as a bound, as classes are still to come"
            raise ValueError(
                "targets: these observations are not part of what has been learnt"
                f"{'' if is_conjugate(data.likelihood) else moved}: without them the summary would "
                "no longer be positive semi-definite."
            )
        self._store(state.duals, state, summary=summary)

    def _folded(
        self, state: State, data: Observations, sites: Sites, sign: int, discount: float = 1.0
    ) -> Summary:
        """The summary in the present basis with observations added or taken out."""
        summary = discounted(rebase_summary(self.summary, state.basis), discount)
        batch = self._batch(state.chol, state.shared, data)
        residual = data.targets - batch.prior_mean
        return fold(summary, batch.A, sites, residual, summary_noise(data.likelihood), sign)

    @torch.no_grad()
    def set_inducing_points(self, inducing_points: Tensor) -> None:
        """Move to other inducing points, of any number, and take the duals along.

        Args:
            inducing_points: ``... x m' x d``. If they include the present ones, nothing is lost.

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
        state = self._build(Z)
        self._store(state.duals, state, Z)

    def start_from(self, inducing_points: Tensor) -> None:
        """Put inducing points elsewhere, while the duals stay in the basis that they were made in.

        Predictions are those after `set_inducing_points`, but as long as the new points have not
        been made the duals' own basis (by `rebase`, or by learning), they can be moved on or back
        without loss.

        Args:
            inducing_points: ``... x m' x d``.
        """
        check_inducing_points(inducing_points)
        self._assign("inducing_points", inducing_points.detach().to(self.inducing_points).clone())
        self.clear_cache()

    @torch.no_grad()
    def rebase(self) -> None:
        """Make the present inducing points and hyperparameters the duals' own basis.

        Predictions do not change; later changes of hyperparameters start from here.
        """
        state = self.state()
        self._store(state.duals, state)

    def get_fantasy_model(
        self,
        inputs: Tensor,
        targets: Tensor,
        likelihood: Likelihood | None = None,
        fixed_inducing: bool = False,
        tol: float = 1e-6,
        max_steps: int = 100,
        **arguments: Any,
    ) -> ApproximateGP:
        r"""The model conditioned on more observations, for any likelihood.

        The posterior *process* is conditioned (see `seqgp.dual.conditioning`): the result equals
        an update with the new inputs added to the inducing points, and nothing of size ``m x m``
        is formed. The model that is returned is of the same type, shares all hyperparameters with
        this one, and can be conditioned again.

        Args:
            inputs: ``b x q x d`` or ``f x b x q x d`` inputs.
            targets: ``b x q`` or ``f x b x q`` targets. Batch shapes broadcast: ``f`` sets of
                targets for the same inputs share their covariances.
            likelihood: The likelihood; by default the model's attribute of that name.
            fixed_inducing: Update the duals at the present inducing points instead, as the paper
                does. The variance that those cannot explain then stays.
            tol: Relative tolerance for the sites.
            max_steps: The largest number of iterations for the sites.
            arguments: Per-point arguments of the likelihood.
        """
        fantasy = self._shallow_copy()
        strategy: DualVariationalStrategy = fantasy.variational_strategy
        strategy.is_fantasy = True
        if fixed_inducing:
            strategy.converge(
                inputs,
                targets,
                likelihood,
                add=True,
                tol=tol,
                max_steps=max_steps,
                **arguments,
            )
            return fantasy
        data = self._check_data(inputs, targets, likelihood, arguments, conditioned=True)
        if self._observed is not None:
            data = self._observed.data.append(data)
        strategy._observe(data, tol, max_steps)
        return fantasy

    # ---------------------------------------------------------------- predictions

    def __call__(self, x: Tensor, prior: bool = False, diag: bool = True) -> MultivariateNormal:
        """``q(f)`` at inputs ``... x n x d``.

        Args:
            x: The inputs.
            prior: Return the prior instead.
            diag: In train mode, return only the variances (the off-diagonal elements are zero).
                In eval mode the covariance is always full, and lazy.
        """
        if x.dim() == 1:
            x = x.unsqueeze(-1)
        if x.shape[-1] != self.inducing_points.shape[-1]:
            check_inputs(x, self.inducing_points.shape[-1], "x")
        if prior:
            prior_f = self.model.forward(self._with_latents(x))
            return self._distribution(prior_f.mean, prior_f.lazy_covariance_matrix)
        self.variational_params_initialized.fill_(1)
        return self.forward(x, diag_only=self.training and diag)

    def forward(self, x: Tensor, diag_only: bool = False) -> MultivariateNormal:
        """The predictive distribution; see `__call__`."""
        state, x = self.state(), self._with_latents(x)
        prior = joint_prior(self.model.forward, self.inducing_points, x, state.shared)
        A = solve_lower(state.chol, prior.cross)
        mean = prior.mean + posterior_mean(A, state.factors)
        correction = self._make_correction(state)
        reduction, sign = A[..., :0, :], A.new_ones(0, 1)
        if correction is not None:
            assert self._observed is not None
            observed = self._with_latents(self._observed.data.inputs)
            c = (
                joint_prior(self.model.forward, observed, x, state.shared).cross
                - correction.explained.mT @ A
            )
            mean = mean + (c.mT @ correction.conditioned.gain.unsqueeze(-1)).squeeze(-1)
            reduction, sign = correction.conditioned.root @ c, correction.conditioned.sign
        covariance: LinearOperator
        if diag_only:
            unexplained = unexplained_variance(A, prior.variance())
            variance = posterior_variance(A, unexplained, state.factors)
            if correction is not None:
                variance = (variance - (sign * reduction.square()).sum(-2)).clamp_min(0)
            covariance = DiagLinearOperator(variance)
        else:
            # As in GPyTorch, jitter keeps the covariance of close or repeated inputs definite.
            covariance = PosteriorCovariance(
                prior.covariance(),
                A,
                explained(A, state.factors),
                self.jitter_val * prior.variance(),
                reduction,
                sign,
                batch_shape=mean.shape[:-1],
            )
        return self._distribution(mean, covariance)

    # ---------------------------------------------------------------- the prior

    def _with_latents(self, x: Tensor) -> Tensor:
        """Inputs ``... x n x d`` with a batch dimension for the latents, if there are several."""
        return x if self.num_latents is None else x.unsqueeze(-3)

    def _distribution(self, mean: Tensor, covariance: LinearOperator) -> MultivariateNormal:
        """``... [x c] x n`` moments as a distribution with event shape ``n [x c]``."""
        if self.num_latents is None:
            return MultivariateNormal(mean, covariance)
        n, batch = mean.shape[-1], torch.broadcast_shapes(mean.shape[:-2], covariance.shape[:-3])
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

    def _check_data(
        self,
        inputs: Tensor,
        targets: Tensor,
        likelihood: Likelihood | None,
        arguments: dict[str, Any],
        conditioned: bool = False,
    ) -> Observations:
        """Validated observations; raises before anything has changed."""
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
        check_inputs(inputs, self.inducing_points.shape[-1])
        dtype = self.inducing_points.dtype
        if torch.promote_types(inputs.dtype, dtype) != dtype:
            raise TypeError(
                f"inputs: expected {dtype} as the inducing points are, got {inputs.dtype}; convert "
                f"them with .to({dtype}), or the model."
            )
        arguments = {k: v for k, v in arguments.items() if v is not None}
        check_arguments(likelihood, arguments, _OPTIONS, needed=inputs.shape[-2] > 0)
        arguments = arguments_held_by(likelihood, inputs.shape[-2], arguments) | arguments
        check_targets(targets, inputs, likelihood, **arguments)
        if isinstance(arguments.get("noise"), Tensor):  # as GPyTorch does: not quite zero
            least = min_fixed_noise.value(inputs.dtype)
            arguments["noise"] = arguments["noise"].clamp_min(least)
        return Observations(inputs, targets, likelihood, arguments).to(
            lambda tensor: tensor.to(inputs.dtype) if tensor.is_floating_point() else tensor
        )

    def _batch(self, chol: Tensor, shared: bool, data: Observations) -> Batch:
        """Observations as the natural gradient sees them."""
        x = self._with_latents(data.inputs)
        prior = joint_prior(self.model.forward, self.inducing_points, x, shared)
        return self._as_batch(chol, prior.cross, prior.mean, prior.variance(), data)

    def _as_batch(
        self, chol: Tensor, cross: Tensor, mean: Tensor, variance: Tensor, data: Observations
    ) -> Batch:
        """As `_batch`, from the prior's moments at the inputs."""
        A = solve_lower(chol, cross)
        unexplained = unexplained_variance(A, variance)
        if self.num_latents is not None and mean.shape[-2] == 1:  # one prior for all of them
            mean = mean.expand(*mean.shape[:-2], self.num_latents, mean.shape[-1])
        return Batch(A, unexplained, mean, data.evaluate(self.num_latents is not None))

    def _batches(
        self, state: State, data: Observations, passes: int | None = None
    ) -> Callable[[], Iterable[Batch]]:
        """Observations in chunks whose size bounds the memory, however many there are."""
        n, width = len(data), self.inducing_points.shape[-2] * data.inputs.shape[:-2].numel()
        size = max(CHUNK_ELEMENTS // width, 1)
        chunks = [slice(start, min(start + size, n)) for start in range(0, n, size)]

        def batch(chunk: slice) -> Batch:
            return self._batch(state.chol, state.shared, data.select(chunk))

        if passes != 1 and n * width <= KEEP_ELEMENTS:
            batches = [batch(chunk) for chunk in chunks]
            return lambda: batches
        return lambda: map(batch, chunks)

    # ---------------------------------------------------------------- conditioning

    def _shallow_copy(self) -> ApproximateGP:
        """A model of the same type that shares everything with this one but its own state."""
        model, strategy = copy.copy(self.model), copy.copy(self)
        for module in (model, strategy):
            for name in ("_modules", "_parameters", "_buffers"):
                module.__dict__[name] = dict(module.__dict__[name])
        object.__setattr__(strategy, "model", model)
        model.variational_strategy = strategy
        return model

    def _moments(self, state: State, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Prior mean, centred mean, dense covariance and ``(I - W^-1) A`` at ``... x q x d``."""
        prior = joint_prior(
            self.model.forward, self.inducing_points, self._with_latents(x), state.shared
        )
        A = solve_lower(state.chol, prior.cross)
        explained_A = explained(A, state.factors)
        covariance = to_dense(prior.covariance()) - A.mT @ explained_A
        return prior.mean, posterior_mean(A, state.factors), covariance, explained_A

    def _observe(self, data: Observations, tol: float, max_steps: int) -> None:
        """Condition this (copied) strategy on observations outside of Z."""
        state = self.state()
        prior_mean, centred, covariance, explained_A = self._moments(state, data.inputs)
        conditioned, _ = condition(
            centred + prior_mean,
            covariance,
            prior_mean,
            data.evaluate(self.num_latents is not None),
            conjugate=is_conjugate(data.likelihood),
            latent_dims=self.latent_dims,
            min_precision=precision_floor(data.likelihood),
            tol=tol,
            max_steps=max_steps,
        )
        self._observed = _Observed(data, conditioned.sites, prior_mean.clone())
        self._correction = _Correction(state, conditioned, explained_A)

    def replace_likelihood(self, old: Likelihood, new: Likelihood) -> None:
        """Let observations that came with one likelihood have another, a copy of it."""
        if self._observed is not None and self._observed.data.likelihood is old:
            data = replace(self._observed.data, likelihood=new)
            self._observed = self._observed._replace(data=data)

    def _make_correction(self, state: State) -> _Correction | None:
        """The effect of the observed points on predictions with ``state``, made anew if needed."""
        if self._observed is None or (
            self._correction is not None and self._correction.state is state
        ):
            return self._correction
        data, (lam, beta), prior_mean = self._observed
        now, centred, covariance, explained_A = self._moments(state, data.inputs)
        # Sites are centred on the prior mean; what was observed stays where it is.
        site = Sites(lam + beta * (prior_mean - now), beta)
        signed = precision_floor(data.likelihood) is None
        conditioned = conditioned_from_sites(centred, covariance, site, signed)
        if signed and bool(conditioned.gain.isnan().any()):
            raise NotPSDError(
                "After a change of hyperparameters there is no posterior given the observations "
                "that this model was conditioned on: condition the model that it came from anew."
            )
        self._correction = _Correction(state, conditioned, explained_A)
        return self._correction

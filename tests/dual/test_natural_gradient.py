from __future__ import annotations

import warnings
from itertools import pairwise

import gpytorch
import pytest
import torch
from gpytorch.likelihoods import BernoulliLikelihood
from gpytorch.mlls import VariationalELBO
from gpytorch.variational import (
    IndependentMultitaskVariationalStrategy,
    NaturalVariationalDistribution,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from linear_operator.utils.warnings import NumericalWarning
from torch import Tensor

from seqgp.dual import Sites, fixed_point
from seqgp.likelihoods.expectations import expected_log_prob
from tests.helpers import (
    CASES,
    CONJUGATE,
    GP,
    NOT_LOG_CONCAVE,
    SVGP,
    Problem,
    assert_close,
    assert_same_posterior,
    assert_untouched,
    dense_prior,
    make_kernel,
    make_mean,
    problem,
    state_of,
    with_same_expectations,
)

pytestmark = pytest.mark.usefixtures("float64")

all_likelihoods = pytest.mark.parametrize("name", list(CASES))
others = [name for name in CASES if name not in CONJUGATE]


def svgp_by_natural_gradients(data: Problem, likelihood: torch.nn.Module) -> tuple[SVGP, Tensor]:
    """GPyTorch's own model and optimiser, run to convergence; and its bound."""
    m, c, n = len(data.Z), data.num_latents, len(data.x)
    batch_shape = torch.Size([] if c is None else [c])
    distribution = NaturalVariationalDistribution(m, batch_shape=batch_shape)

    def wrap(strategy: gpytorch.variational.VariationalStrategy) -> torch.nn.Module:
        return strategy if c is None else IndependentMultitaskVariationalStrategy(strategy, c)

    model = SVGP(data.Z.expand(*batch_shape, m, 2), distribution, wrap).train()
    elbo = VariationalELBO(likelihood, model, n)
    optimiser = gpytorch.optim.NGD(model.variational_parameters(), num_data=n, lr=0.5)
    for _ in range(80 if c is None else 200):
        optimiser.zero_grad()
        loss = -elbo(model(data.x), data.y, **data.arguments)
        loss.backward()
        optimiser.step()
    return model.eval(), -n * loss.detach()


@all_likelihoods
def test_fixed_point_is_that_of_gpytorch(name: str) -> None:
    data = problem(name)
    model = data.model().eval()
    info = data.learn(model)
    ours = name in ("bernoulli", "heteroscedastic", "laplace", "softmax", "softmax_mixing")
    likelihood = with_same_expectations(data.likelihood) if ours else data.likelihood
    svgp, bound = svgp_by_natural_gradients(data, likelihood)
    assert_same_posterior(model, svgp, data.test)
    assert_close(info.elbo, bound)


def svgp_by_lbfgs(data: Problem) -> tuple[Tensor, Tensor, Tensor]:
    """The bound in plain tensors, maximised over a whitened mean and Cholesky factor.

    Returns means and variances at the test inputs, and the bound.
    """
    c, m = data.num_latents or 1, len(data.Z)
    prior = dense_prior(data.model(), data.Z, torch.cat([data.x, data.test]))
    A = torch.linalg.solve(torch.linalg.cholesky(prior.zz + 1e-8 * torch.eye(m)), prior.zx)
    mean = torch.zeros(c, m, requires_grad=True)
    root = torch.eye(m).repeat(c, 1, 1).requires_grad_(True)

    def marginals() -> tuple[Tensor, Tensor]:
        """``n + t [x c]``."""
        spread = root.tril().mT @ A
        variance = prior.xx.diagonal() - A.square().sum(0) + spread.square().sum(-2)
        means = prior.mean_x + mean @ A
        return (means.mT, variance.mT) if data.num_latents else (means[0], variance[0])

    def bound() -> Tensor:
        q = (tensor[: len(data.x)] for tensor in marginals())
        fit = expected_log_prob(data.likelihood, data.y, *q, **data.arguments).sum()
        log_det = root.diagonal(dim1=-2, dim2=-1).square().log().sum()
        return fit - 0.5 * (root.tril().square().sum() + mean.square().sum() - c * m - log_det)

    optimiser = torch.optim.LBFGS(
        [mean, root],
        max_iter=500,
        history_size=50,
        tolerance_grad=1e-9,
        tolerance_change=0,
        line_search_fn="strong_wolfe",
    )

    def closure() -> Tensor:
        optimiser.zero_grad()
        loss = -bound()
        loss.backward()
        return loss

    optimiser.step(closure)
    with torch.no_grad():
        moments = (tensor[len(data.x) :] for tensor in marginals())
        return *moments, bound()


@all_likelihoods
def test_fixed_point_maximises_the_bound(name: str) -> None:
    data = problem(name, n=15, m=4)
    model = data.model().eval()
    info = data.learn(model)
    mean, variance, bound = svgp_by_lbfgs(data)
    actual = model(data.test)
    assert_close(info.elbo, bound)
    assert_close(actual.mean, mean)
    assert_close(actual.variance, variance)


def test_ten_classes() -> None:
    data = problem("softmax", n=20, m=3)
    x = data.x
    y = torch.arange(20) % 10
    likelihood = gpytorch.likelihoods.SoftmaxLikelihood(
        num_features=10, num_classes=10, mixing_weights=False
    )
    data = data._replace(y=y, likelihood=likelihood, num_latents=10)
    model = data.model().eval()
    info = data.learn(model)
    assert info.converged
    mean, variance, bound = svgp_by_lbfgs(data)
    assert_close(info.elbo, bound)
    assert_close(model(data.test).mean, mean)
    assert_close(model(data.test).variance, variance)
    fantasy = model.get_fantasy_model(x[:2], y[:2])
    probabilities = likelihood(fantasy(x[:1])).probs.mean(0).squeeze(0)
    assert probabilities.argmax() == y[0]


@all_likelihoods
def test_the_bound_never_falls(name: str) -> None:
    data, bounds = problem(name), []
    for max_steps in range(1, 14):
        strategy = data.model().variational_strategy
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", NumericalWarning)
            info = data.learn(strategy.model, max_steps=max_steps)
        bounds.append(info.elbo.item())
        assert strategy.kl_divergence() >= 0
        if name not in NOT_LOG_CONCAVE:
            assert (torch.linalg.eigvalsh(strategy.dual_B) > -1e-10).all()
    assert all(b >= a - 1e-8 for a, b in pairwise(bounds))
    assert bounds[-1] > bounds[0] or name in CONJUGATE


@all_likelihoods
def test_damped_steps_lead_to_the_same_fixed_point(name: str) -> None:
    data = problem(name)
    full, damped = data.converged(), data.model().eval()
    assert data.learn(damped, rho=0.3, tol=1e-9).converged
    assert_same_posterior(full, damped, data.test)


@pytest.mark.parametrize("name", ["bernoulli", "poisson", "student_t", "laplace"])
def test_single_steps_lead_to_the_same_fixed_point(name: str) -> None:
    data = problem(name)
    full, stepwise = data.converged(), data.model().eval()
    for _ in range(60):
        stepwise.variational_strategy.natural_gradient_step(
            data.x, data.y, rho=0.5, **data.arguments
        )
    assert_same_posterior(full, stepwise, data.test)


@pytest.mark.parametrize("name", CONJUGATE)
def test_one_step_is_exact_for_a_conjugate_likelihood(name: str) -> None:
    data = problem(name)
    full, one = data.converged(), data.model().eval()
    one.variational_strategy.natural_gradient_step(data.x, data.y, **data.arguments)
    assert_same_posterior(full, one, data.test, 1e-12)


@all_likelihoods
def test_a_step_is_a_convex_combination(name: str) -> None:
    data = problem(name)

    def after(rho: float) -> tuple[Tensor, Tensor]:
        strategy = data.model().variational_strategy
        strategy.natural_gradient_step(data.x, data.y, rho=0.5, **data.arguments)
        if rho:
            strategy.natural_gradient_step(data.x, data.y, rho=rho, **data.arguments)
        return strategy.dual_lam, strategy.dual_B

    for start, end, between in zip(after(0), after(1), after(0.3), strict=True):
        assert_close(between, 0.7 * start + 0.3 * end, 1e-12)


@all_likelihoods
def test_minibatches_estimate_the_full_step(name: str) -> None:
    """Without bias: over all minibatches the steps and the bounds average to those of all data."""
    data = problem(name)

    def step(part: slice) -> tuple[Tensor, Tensor, Tensor]:
        strategy = data.model().variational_strategy
        arguments = {key: value[part] for key, value in data.arguments.items()}
        bound = strategy.natural_gradient_step(
            data.x[part], data.y[part], num_data=30, rho=0.6, **arguments
        )
        return strategy.dual_lam, strategy.dual_B, bound

    parts = zip(*(step(slice(start, start + 10)) for start in (0, 10, 20)), strict=True)
    for full, minibatches in zip(step(slice(None)), parts, strict=True):
        assert_close(torch.stack(minibatches).mean(0), full, 1e-10)


def stream(data: Problem, order: list[int], edges: list[int]) -> GP:
    """The model after the data have come in pieces."""
    model = data.model().eval()
    for start, end in pairwise(edges):
        part = order[start:end]
        arguments = {key: value[part] for key, value in data.arguments.items()}
        model.variational_strategy.converge(data.x[part], data.y[part], add=True, **arguments)
    return model


@settings(deadline=None, max_examples=10)
@given(st.permutations(range(30)), st.sets(st.integers(0, 30)), st.sampled_from(CONJUGATE))
def test_streams_of_any_order_and_split(order: list[int], cuts: set[int], name: str) -> None:
    """Conjugate: batches of any sizes (also none) in any order are the same as all at once."""
    data = problem(name)
    assert_same_posterior(stream(data, order, [0, *sorted(cuts), 30]), data.converged(), data.test)


@pytest.mark.parametrize("name", others)
def test_what_is_known_stays_known(name: str) -> None:
    """``add``: the sites of old data are kept; no data leave the posterior as it is."""
    data = problem(name)
    model, same = data.converged(), data.converged()
    none = {key: value[:0] for key, value in data.arguments.items()}
    model.variational_strategy.converge(data.x[:0], data.y[:0], add=True, **none)
    assert_same_posterior(model, same, data.test, 1e-12)
    data.learn(model, add=True)
    assert (model(data.test).variance < same(data.test).variance).all()


@settings(deadline=None, max_examples=12)
@given(
    name=st.sampled_from(list(CASES)), chunk=st.integers(1, 60), keep=st.sampled_from([0, 10**6])
)
def test_chunks_do_not_matter(name: str, chunk: int, keep: int) -> None:
    """Blocks of any size, kept in memory or computed anew at each pass."""
    data = problem(name, n=10, m=5)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("seqgp.variational.strategy.CHUNK_ELEMENTS", chunk)
        patch.setattr("seqgp.variational.strategy.KEEP_ELEMENTS", keep)
        chunked = data.converged()
    assert_same_posterior(chunked, data.converged(), data.test, 1e-9)


def test_members_of_a_batch_converge_on_their_own() -> None:
    """A member that needs more or smaller steps does not disturb the others."""
    data = problem("poisson")
    targets = torch.stack([data.y, torch.zeros(30), 40 * data.y])
    together = data.model(data.Z).eval()
    info = together.variational_strategy.converge(data.x, targets, tol=1e-10)
    assert info.converged
    for i, y in enumerate(targets):
        alone = data.model(data.Z).eval()
        alone_info = alone.variational_strategy.converge(data.x, y, tol=1e-10)
        assert alone_info.steps <= info.steps
        assert_close(info.elbo[i], alone_info.elbo, 1e-9)
        assert_close(together(data.test).mean[i], alone(data.test).mean)


def test_fixed_point_shortens_steps_that_lower_the_bound() -> None:
    """Plain iteration of ``s -> 1 - 1.5 (s - 1)`` diverges."""

    def step(state: Sites, strict: bool) -> tuple[Sites, Tensor]:
        target = Sites(*(1 - 1.5 * (tensor - 1) for tensor in state))
        bound = -sum((tensor - 1).square() for tensor in state).squeeze(-1)
        return target, torch.where(bound < -100, torch.nan, bound)  # far out there is only NaN

    start = Sites(torch.tensor([[3.0], [-6.0]]), torch.tensor([[2.0], [1.0]]))
    solution, info = fixed_point(step, start, tol=1e-9)
    assert info.converged
    assert info.residual.shape == info.elbo.shape == (2,)
    for tensor in solution:
        assert_close(tensor, torch.ones(2, 1), 1e-8)


def test_not_converged_is_said() -> None:
    data = problem("bernoulli")
    with pytest.warns(NumericalWarning, match="not converged after 3 natural-gradient steps"):
        info = data.model().variational_strategy.converge(data.x, data.y, max_steps=3)
    assert not info.converged
    assert info.steps == 3
    assert info.residual > 1e-6
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        info = data.model().variational_strategy.converge(data.x, data.y, tol=1e-3)
    assert info.converged
    assert info.residual <= 1e-3


def test_separable_classes() -> None:
    """Labels that a line separates: the bound still has a maximum, far from where it starts."""
    x = torch.linspace(-1, 1, 40).unsqueeze(-1)
    model = GP(x[::4], BernoulliLikelihood()).eval()
    model.covar_module.outputscale = 1e3
    info = model.variational_strategy.converge(x, (x.squeeze(-1) > 0).double(), max_steps=300)
    assert info.converged
    assert (model(x).mean.sign() == x.squeeze(-1).sign()).all()


def test_a_step_towards_nothing_ends() -> None:
    """Sites of NaN: no step however short leads to a posterior, and the state stays as it was."""

    class Broken(gpytorch.likelihoods.StudentTLikelihood):
        def expected_log_prob(self, target: Tensor, dist: object, **kwargs: object) -> Tensor:
            return torch.nan * (dist.mean + dist.variance)  # type: ignore[attr-defined]

    data = problem("student_t")
    model = data.model()
    before = state_of(model)
    with pytest.raises(FloatingPointError, match="nothing has been changed"):
        model.variational_strategy.natural_gradient_step(data.x, data.y, Broken())
    assert_untouched(model, before)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("outputscale", [1e-2, 1.0, 1e4])
def test_labels_that_cancel_converge(outputscale: float, dtype: torch.dtype) -> None:
    """As many ones as zeros at one input: their natural means add up to rounding, of any size."""
    x = torch.full((60, 2), 0.3, dtype=dtype)
    y = (torch.arange(60) % 2).to(x)
    kernel = make_kernel(outputscale=outputscale)
    model = GP(x[:1], BernoulliLikelihood(), make_mean(0.0), kernel).to(dtype).eval()
    info = model.variational_strategy.converge(x, y)  # a warning would be an error
    assert info.converged
    assert model(x[:1]).mean.abs() < 1e-3 * outputscale**0.5

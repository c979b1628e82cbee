from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from botorch.exceptions.warnings import BotorchTensorDimensionWarning
from botorch.fit import fit_gpytorch_mll
from botorch.models import SingleTaskGP
from botorch.sampling import SobolQMCNormalSampler
from gpytorch.likelihoods import StudentTLikelihood
from linear_operator.utils.warnings import NumericalWarning
from scipy import integrate, optimize, stats
from scipy.special import log_ndtr, ndtr
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from seqgp import DualELBO, SequentialGP
from tests.helpers import CASES, assert_close, assert_untouched, make_inputs, state_of, unscaled
from tests.models.helpers import assert_same, data, observe, pair, totals

pytestmark = pytest.mark.usefixtures("float64")
all_likelihoods = pytest.mark.parametrize("name", list(CASES))
TIGHT = {"tol": 1e-10, "max_steps": 500}


def sparse(name: str) -> SequentialGP:
    train = data(name)
    return train.model(inducing_points=train.X[:6])


def new_data(name: str, *shape: int) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Inputs ``... x q x 2`` that are not among the training data, targets, arguments."""
    X = (0.37 + make_inputs(*shape, 2)) % 1
    return X, *observe(name, X)


# -------------------------------------------------------------------- what it equals


@all_likelihoods
def test_equals_the_update_with_augmented_inducing_points(name: str) -> None:
    model, test = sparse(name), make_inputs(5, 2)
    X, Y, arguments = new_data(name, 3)
    conditioned = model.condition_on_observations(X, Y, **arguments, **TIGHT)
    updated = copy.deepcopy(model)
    strategy = updated.variational_strategy
    strategy.set_inducing_points(torch.cat([strategy.inducing_points, X]))
    arguments = CASES[name].arguments(3)
    info = strategy.converge(X, Y.squeeze(-1), add=True, **arguments, **TIGHT)
    assert info.converged
    assert_same(conditioned.posterior(test), updated.posterior(test))


@pytest.mark.parametrize("outputs", [1, 2])
@pytest.mark.parametrize("fixed_noise", [False, True], ids=["inferred", "fixed"])
@pytest.mark.parametrize("batch_shape", [(), (3,)], ids=["", "batch"])
def test_equals_botorch(outputs: int, fixed_noise: bool, batch_shape: tuple[int, ...]) -> None:
    ours, exact = pair(
        outputs=outputs, fixed_noise=fixed_noise, batch_shape=torch.Size(batch_shape)
    )
    X, test = make_inputs(*batch_shape, 2, 2), make_inputs(5, 2)
    Y = torch.randn(*batch_shape, 2, outputs)
    noise = {"noise": 0.1 + torch.rand(Y.shape)} if fixed_noise else {}
    exact.posterior(test)  # fills the caches that it is conditioned with
    expected = exact.condition_on_observations(X, Y, **noise)
    actual = ours.condition_on_observations(X, Y, **noise)
    assert_same(actual.posterior(test), expected.posterior(test))
    # and once more
    expected = expected.condition_on_observations(X - 0.2, Y + 1, **noise)
    actual = actual.condition_on_observations(X - 0.2, Y + 1, **noise)
    assert_same(actual.posterior(test), expected.posterior(test))


def test_noise_is_by_default_the_mean_of_that_seen() -> None:
    model, _ = pair(fixed_noise=True)
    X, Y = make_inputs(2, 2), torch.randn(2, 1)
    noise = model.likelihood.noise.mean().expand(2, 1)
    assert_same(
        model.condition_on_observations(X, Y).posterior(X),
        model.condition_on_observations(X, Y, noise=noise).posterior(X),
    )
    assert (
        model.condition_on_observations(X, Y, noise=noise / 4).posterior(X).variance
        < model.condition_on_observations(X, Y).posterior(X).variance
    ).all()


@all_likelihoods
def test_one_by_one_is_all_at_once(name: str) -> None:
    model, test = sparse(name), make_inputs(5, 2)
    X, Y, arguments = new_data(name, 3)
    together = model.condition_on_observations(X, Y, **arguments, **TIGHT)
    one_by_one = model
    for k in (2, 0, 1):
        one = {key: value[k : k + 1] for key, value in arguments.items()}
        one_by_one = one_by_one.condition_on_observations(
            X[k : k + 1], Y[k : k + 1], **one, **TIGHT
        )
    assert_same(one_by_one.posterior(test), together.posterior(test))


@all_likelihoods
def test_no_observations_change_nothing(name: str) -> None:
    model, test = sparse(name), make_inputs(5, 2)
    X, Y, arguments = new_data(name, 3)
    none = {key: value[:0] for key, value in arguments.items()}
    conditioned = model.condition_on_observations(X[:0], Y[:0], **none)
    assert_same(conditioned.posterior(test), model.posterior(test))


# -------------------------------------------------------------------- batch shapes


@pytest.mark.parametrize("name", ["gaussian", "bernoulli", "binomial", "softmax"])
@pytest.mark.parametrize(
    ("x_batch", "y_batch"),
    [((), (4,)), ((3,), ()), ((3,), (3,)), ((3,), (4, 3)), ((1,), (4, 3)), ((2, 3), (3,))],
    ids=str,
)
def test_batch_shapes_broadcast(
    name: str, x_batch: tuple[int, ...], y_batch: tuple[int, ...]
) -> None:
    model, test = sparse(name), make_inputs(5, 2)
    shape = torch.broadcast_shapes(x_batch, y_batch)
    X, _, arguments = new_data(name, *x_batch, 2)
    Y, _ = observe(name, make_inputs(*y_batch, 2, 2))
    conditioned = model.condition_on_observations(X, Y, **arguments, **TIGHT)
    assert conditioned.batch_shape == shape
    posterior = conditioned.posterior(test)
    assert posterior.mean.shape == (*shape, 5, model.num_outputs)
    X, Y = X.expand(*shape, 2, 2), Y.expand(*shape, 2, 1)
    for index in np.ndindex(*shape):
        single = model.condition_on_observations(X[index], Y[index], **arguments, **TIGHT)
        expected = single.posterior(test)
        assert_close(posterior.mean[index], expected.mean)
        assert_close(posterior.variance[index], expected.variance)


def test_batch_of_models_and_of_fantasies() -> None:
    ours, exact = pair(batch_shape=torch.Size([3]))
    test, X, Y = make_inputs(5, 2), make_inputs(3, 2, 2), torch.randn(4, 3, 2, 1)
    exact.posterior(test)
    with pytest.warns(BotorchTensorDimensionWarning):  # of more batches
        expected = exact.condition_on_observations(X, Y).posterior(test)
    assert_same(ours.condition_on_observations(X, Y).posterior(test), expected)


def test_predictions_at_a_batch_of_inputs() -> None:
    model, test = sparse("poisson"), make_inputs(7, 1, 5, 2)
    X, Y, _ = new_data("poisson", 4, 2)
    conditioned = model.condition_on_observations(X, Y)
    posterior = conditioned.posterior(test)
    assert posterior.mean.shape == (7, 4, 5, 1)
    for k in range(7):
        assert_close(posterior.mean[k], conditioned.posterior(test[k]).mean)
        assert_close(posterior.variance[k], conditioned.posterior(test[k]).variance)


# -------------------------------------------------------------------- the model that it returns


@all_likelihoods
def test_the_base_model_is_unchanged(name: str) -> None:
    model, test = sparse(name), make_inputs(5, 2)
    X, Y, arguments = new_data(name, 3)
    before, posterior = state_of(model), model.posterior(test)
    for fixed in (False, True):
        conditioned = model.condition_on_observations(X, Y, fixed_inducing=fixed, **arguments)
        assert type(conditioned) is SequentialGP
        # But for given noise, to which that of the new observations has been added.
        shared = conditioned.likelihood is model.likelihood
        assert shared == (name != "fixed_noise")
        assert conditioned.covar_module is model.covar_module
        conditioned.posterior(test)
        conditioned.condition_on_observations(X, Y, **arguments).posterior(test)
    assert_untouched(model, before)
    assert_same(model.posterior(test), posterior, tol=1e-14)


@all_likelihoods
def test_fixed_inducing_points_leave_variance(name: str) -> None:
    model = sparse(name)
    X, Y, arguments = new_data(name, 1)
    before = model.posterior(X).variance
    full = model.condition_on_observations(X, Y, **arguments).posterior(X).variance
    fixed = model.condition_on_observations(X, Y, fixed_inducing=True, **arguments)
    variance = fixed.posterior(X).variance
    assert (full < variance).all()
    assert (variance < before).all()
    assert not fixed.variational_strategy.is_conditioned


@all_likelihoods
def test_observations_of_a_conditioned_model(name: str) -> None:
    model = sparse(name)
    X, Y, arguments = new_data(name, 4, 3)
    observed = model.condition_on_observations(X, Y, **arguments).posterior(
        make_inputs(5, 2), observation_noise=True, **totals(name, 5)
    )
    assert observed.rsample(torch.Size([2])).shape == (2, 4, 5, 1)
    assert (observed.variance > 0).all()


@pytest.mark.parametrize(
    ("Y", "message"),
    [
        (torch.ones(3), r"Y: expected shape \.\.\. x 3 x 1 .* got \(3,\); .* Y\.unsqueeze\(-1\)"),
        (torch.ones(3, 2), r"Y: expected shape \.\.\. x 3 x 1 .* got \(3, 2\); .* Y\.argmax"),
        (torch.ones(2, 1), r"Y: expected shape \.\.\. x 3 x 1 .* got \(2, 1\)"),
        (torch.full((3, 1), 2.0), "Y: 2 is not a possible observation of BernoulliLikelihood"),
        (torch.full((3, 1), torch.nan), "Y: expected finite numbers, got 3 NaN .* in row 0"),
    ],
    ids=["vector", "columns", "rows", "label", "nan"],
)
def test_bad_observations(Y: Tensor, message: str) -> None:
    model = sparse("bernoulli")
    before = state_of(model)
    with pytest.raises(ValueError, match=message):
        model.condition_on_observations(make_inputs(3, 2), Y)
    assert_untouched(model, before)


def test_bad_noise() -> None:
    model, _ = pair(fixed_noise=True)
    with pytest.raises(ValueError, match=r"noise: expected the shape of Y, \(3, 1\), got \(3,\)"):
        model.condition_on_observations(make_inputs(3, 2), torch.ones(3, 1), noise=torch.ones(3))


def test_a_conditioned_model_cannot_be_updated() -> None:
    X, Y, _ = new_data("bernoulli", 3)
    conditioned = sparse("bernoulli").condition_on_observations(X, Y)
    with pytest.raises(RuntimeError, match="conditioned"):
        conditioned.refresh()


# -------------------------------------------------------------------- what it costs


class LargestSquare(TorchDispatchMode):
    """Records the largest number of elements in any tensor ``... x m x m``."""

    def __init__(self, m: int) -> None:
        super().__init__()
        self.m, self.largest = m, 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.shape[-2:] == (self.m, self.m):
                self.largest = max(self.largest, tensor.numel())
        return result


@pytest.mark.parametrize("name", ["gaussian", "bernoulli", "poisson", "softmax"])
@pytest.mark.parametrize("requires_grad", [False, True], ids=["", "with gradients"])
def test_no_matrix_of_inducing_points_per_fantasy(name: str, requires_grad: bool) -> None:
    m, c = 13, CASES[name].num_latents or 1
    model = data(name, n=20).model(inducing_points=m)
    X, test = make_inputs(6, 2, 2).requires_grad_(requires_grad), make_inputs(5, 2)
    with LargestSquare(m) as squares:
        posterior = model.fantasize(X, SobolQMCNormalSampler(torch.Size([4]))).posterior(test)
        total = posterior.mean.sum() + posterior.variance.sum()
        if requires_grad:
            total.backward()
    assert posterior.mean.shape == (4, 6, 5, c)
    assert 0 < squares.largest <= c * m * m


@unscaled
def test_the_largest_square_is_seen() -> None:
    """That the check above can fail: BoTorch's exact model does hold a matrix per fantasy."""
    model = SingleTaskGP(make_inputs(13, 2), torch.randn(13, 1), outcome_transform=None)
    with LargestSquare(13 + 2) as squares:
        fantasies = model.fantasize(make_inputs(6, 2, 2), SobolQMCNormalSampler(torch.Size([4])))
        assert fantasies.posterior(make_inputs(5, 2)).mean.shape == (4, 6, 5, 1)
    assert squares.largest > (13 + 2) ** 2


# -------------------------------------------------------------------- Bernoulli look-ahead


def variational_update(mean: float, variance: float, y: int) -> tuple[float, float]:
    """``q(f)`` after one label, by maximising the one-dimensional bound."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(20)  # as many as in GPyTorch
    weights = weights / weights.sum()

    def negative_bound(parameters: np.ndarray) -> float:
        m, s = parameters[0], np.exp(parameters[1])
        kl = 0.5 * (s**2 / variance + (m - mean) ** 2 / variance - 1) - np.log(s / variance**0.5)
        return float(kl - weights @ log_ndtr((2 * y - 1) * (m + s * nodes)))

    start = np.array([mean, 0.5 * np.log(variance)])
    result = optimize.minimize(negative_bound, start, method="Nelder-Mead", tol=1e-14)
    return result.x[0], float(np.exp(2 * result.x[1]))


def joint_moments(model: SequentialGP, X: Tensor) -> tuple[np.ndarray, np.ndarray]:
    posterior = model.posterior(X).distribution
    return posterior.mean.detach().numpy(), posterior.covariance_matrix.detach().numpy()


@pytest.mark.parametrize("y", [0, 1])
@pytest.mark.parametrize("x", [0.1, 0.5, 0.9])
def test_one_label_is_the_maximum_of_the_bound(x: float, y: int) -> None:
    model = data("bernoulli", d=1).model()
    X = torch.tensor([[x], [x + 0.07]])
    mean, cov = joint_moments(model, X)
    conditioned = model.condition_on_observations(X[:1], torch.full((1, 1), float(y)), tol=1e-12)
    new_mean, new_variance = variational_update(mean[0], cov[0, 0], y)
    gain = cov[1, 0] / cov[0, 0]
    actual_mean, actual_cov = joint_moments(conditioned, X)
    expected_mean = [new_mean, mean[1] + gain * (new_mean - mean[0])]
    expected_var = [new_variance, cov[1, 1] + gain**2 * (new_variance - cov[0, 0])]
    np.testing.assert_allclose(actual_mean, expected_mean, atol=1e-6)
    np.testing.assert_allclose(np.diag(actual_cov), expected_var, atol=1e-6)


@pytest.mark.parametrize("x", [0.1, 0.5, 0.9])
def test_look_ahead_probabilities(x: float) -> None:
    """``P(y2 = 1 | y1)`` against the exact update, which is a ratio of orthant probabilities."""
    model = data("bernoulli", d=1).model()
    X = torch.tensor([[x], [x + 0.07]])
    mean, cov = joint_moments(model, X)
    marginal = ndtr(mean / np.sqrt(1 + np.diag(cov)))
    both = stats.multivariate_normal(mean=np.zeros(2), cov=cov + np.eye(2)).cdf(mean)
    exact = [(marginal[1] - both) / (1 - marginal[0]), both / marginal[0]]
    np.testing.assert_allclose(both, exact_by_integration(mean, cov), atol=1e-6)
    actual = []
    for y in (0, 1):
        conditioned = model.condition_on_observations(X[:1], torch.full((1, 1), float(y)))
        actual.append(conditioned.posterior(X[1:], observation_noise=True).mean.item())
    # The variational posterior is not the exact one: it is off by up to .01 here.
    np.testing.assert_allclose(actual, exact, atol=0.01)
    # Law of total expectation: what is lost by the approximation is smaller still.
    total = (1 - marginal[0]) * actual[0] + marginal[0] * actual[1]
    np.testing.assert_allclose(total, marginal[1], atol=0.005)
    assert actual[0] < marginal[1] < actual[1]


def exact_by_integration(mean: np.ndarray, cov: np.ndarray) -> float:
    """``P(y1 = 1, y2 = 1)`` by integration over the first latent."""
    gain = cov[1, 0] / cov[0, 0]
    rest = cov[1, 1] - gain * cov[1, 0]

    def integrand(f: float) -> float:
        second = ndtr((mean[1] + gain * (f - mean[0])) / np.sqrt(1 + rest))
        return stats.norm.pdf(f, mean[0], cov[0, 0] ** 0.5) * ndtr(f) * second

    spread = 10 * cov[0, 0] ** 0.5
    return integrate.quad(integrand, mean[0] - spread, mean[0] + spread, epsabs=1e-10)[0]


@pytest.mark.parametrize("fixed_inducing", [False, True])
def test_a_fantasy_learns_nothing_but_by_conditioning(fixed_inducing: bool) -> None:
    """It does not hold the data that it was conditioned on as training data."""
    model, x = data("gaussian").model(), make_inputs(3, 2)
    fantasy = model.condition_on_observations(x, 5 + x[:, :1], fixed_inducing=fixed_inducing)
    for action in (
        fantasy.refresh,
        lambda: fantasy.update(x, x[:, :1]),
        lambda: fit_gpytorch_mll(DualELBO(fantasy.likelihood, fantasy)),
    ):
        with pytest.raises(RuntimeError, match="conditioned"):
            action()
    again = fantasy.condition_on_observations(x, x[:, :1], fixed_inducing=fixed_inducing)
    assert (again.posterior(x).mean < fantasy.posterior(x).mean).all()


@pytest.mark.parametrize("fixed_inducing", [False, True])
def test_converting_a_fantasy_leaves_its_parent_alone(fixed_inducing: bool) -> None:
    model, x = data("bernoulli").model(), make_inputs(3, 2)
    before = model.posterior(x).mean
    fantasy = model.condition_on_observations(x, torch.ones(3, 1), fixed_inducing=fixed_inducing)
    expected = fantasy.posterior(x).mean
    assert fantasy.double().likelihood is model.likelihood  # nothing to convert
    single = fantasy.float().posterior(x.float()).mean
    assert single.dtype == torch.float32
    again = fantasy.condition_on_observations(
        x.float(), torch.zeros(3, 1), fixed_inducing=fixed_inducing
    )
    assert (again.posterior(x.float()).mean < single).all()
    assert_close(single, expected, 1e-4)
    assert torch.equal(model.posterior(x).mean, before)


@unscaled
def test_noise_variances_are_not_negative_and_may_be_zero() -> None:
    model, x = SequentialGP(data("gaussian").X, data("gaussian").Y), make_inputs(3, 2)
    with pytest.raises(ValueError, match="noise: expected variances, got -1"):
        model.condition_on_observations(x, x[:, :1], noise=-torch.ones(3, 1))
    exactly = model.condition_on_observations(x, x[:, :1], noise=torch.zeros(3, 1))
    assert_close(exactly.posterior(x).mean, x[:, :1], 1e-3)
    with pytest.warns(NumericalWarning, match="Very small noise values"):  # GPyTorch's
        interpolated = SequentialGP(x, x[:, :1], train_Yvar=torch.zeros(3, 1))
    assert_close(interpolated.posterior(x).mean, x[:, :1], 1e-3)


@pytest.mark.filterwarnings("ignore::linear_operator.utils.warnings.NumericalWarning")
@pytest.mark.parametrize("q", [1, 8])
def test_no_nan_however_far_an_outlier_is(q: int) -> None:
    """A hundred standard deviations: sites may stop short, and say so, but are a posterior's."""
    X = make_inputs(30, 2)
    likelihood = StudentTLikelihood()
    likelihood.noise = 1e-4
    with torch.no_grad():
        model = SequentialGP(X, torch.sin(5 * X).sum(-1, keepdim=True), likelihood=likelihood)
    x = make_inputs(100, q, 2)
    noise = torch.randn(100, q, 1, generator=torch.Generator().manual_seed(0))
    y = torch.sin(5 * x).sum(-1, keepdim=True) + noise
    posterior = model.condition_on_observations(x, y).posterior(X[:4])
    assert posterior.mean.isfinite().all()
    assert (posterior.variance > 0).all()

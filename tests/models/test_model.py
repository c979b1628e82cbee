from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from botorch.models import SingleTaskGP
from botorch.posteriors import GPyTorchPosterior
from gpytorch.kernels import RBFKernel
from gpytorch.likelihoods import (
    BernoulliLikelihood,
    BetaLikelihood,
    GaussianLikelihood,
    GaussianLikelihoodWithMissingObs,
    PoissonLikelihood,
    SoftmaxLikelihood,
)
from linear_operator.utils.warnings import NumericalWarning
from torch import Tensor

from seqgp import BinomialLikelihood, OrdinalLikelihood, SequentialGP
from seqgp.models.construction import ALL_INPUTS
from seqgp.models.posteriors import ObservationPosterior
from seqgp.streaming.inducing_points import DEFAULT_LIMIT
from tests.helpers import (
    CASES,
    CONJUGATE,
    EMPTY,
    GP,
    assert_close,
    assert_same_posterior,
    make_inputs,
    make_kernel,
    make_mean,
    unscaled,
)
from tests.models.helpers import assert_same, conditioning, data, observe, pair, totals

pytestmark = pytest.mark.usefixtures("float64")
all_likelihoods = pytest.mark.parametrize("name", list(CASES))

# -------------------------------------------------------------------- the posterior


@pytest.mark.parametrize("observation_noise", [False, True], ids=["latent", "observed"])
@pytest.mark.parametrize("fixed_noise", [False, True], ids=["inferred", "fixed"])
@pytest.mark.parametrize("outputs", [1, 2])
@pytest.mark.parametrize("batch_shape", [EMPTY, torch.Size([3])], ids=["", "batch"])
def test_gaussian_model_is_the_exact_one(
    outputs: int, batch_shape: torch.Size, fixed_noise: bool, observation_noise: bool
) -> None:
    ours, exact = pair(outputs=outputs, batch_shape=batch_shape, fixed_noise=fixed_noise)
    assert ours.batch_shape == exact.batch_shape == batch_shape
    assert ours.num_outputs == outputs
    for X in (make_inputs(5, 2), make_inputs(4, *batch_shape, 5, 2)):
        actual = ours.posterior(X, observation_noise=observation_noise)
        assert isinstance(actual, GPyTorchPosterior)
        assert_same(actual, exact.posterior(X, observation_noise=observation_noise))


@pytest.mark.parametrize("n", [1, 12])
def test_noise_given_as_a_tensor(n: int) -> None:
    ours, exact = pair(n, outputs=2)
    X, noise = make_inputs(3, 5, 2), 0.1 + torch.rand(3, 5, 2)
    assert_same(
        ours.posterior(X, observation_noise=noise), exact.posterior(X, observation_noise=noise)
    )


@all_likelihoods
def test_posterior_is_converged_from_the_start(name: str) -> None:
    case, train = CASES[name], data(name)
    model = train.model(inducing_points=train.X[:5])
    oracle = GP(train.X[:5], train.likelihood, num_latents=case.num_latents).eval()
    info = oracle.variational_strategy.converge(
        train.X, train.Y.squeeze(-1), tol=1e-10, max_steps=500, **train.arguments
    )
    assert info.converged
    assert_same_posterior(model, oracle, make_inputs(6, 2))


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("outputs", [1, 2])
def test_posterior_follows_the_prior(outputs: int, in_place: bool) -> None:
    """Hyperparameters change, in whatever way; the sites of a Gaussian are still the right ones."""
    models, X = pair(outputs=outputs), make_inputs(5, 2)
    for model in models:
        model.posterior(X)  # fills caches
        mean, lengthscale = model.mean_module.raw_constant, model.covar_module.base_kernel
        if in_place:
            mean.data.add_(1.0)
            lengthscale.raw_lengthscale.data.sub_(0.2)
        else:
            model.mean_module.constant = mean.detach() + 1.0
            lengthscale.raw_lengthscale = torch.nn.Parameter(lengthscale.raw_lengthscale - 0.2)
        model.eval().train().eval()  # which clears BoTorch's caches
    assert_same(*(model.posterior(X) for model in models))


@all_likelihoods
@pytest.mark.parametrize("shape", [(5, 2), (1, 2), (4, 3, 2), (2, 4, 3, 2)], ids=str)
def test_shapes(name: str, shape: tuple[int, ...]) -> None:
    model, X, c = data(name).model(), make_inputs(*shape), CASES[name].num_outputs
    latent = model.posterior(X)
    assert latent.mean.shape == latent.variance.shape == (*shape[:-1], c)
    assert latent.rsample(torch.Size([7])).shape == (7, *shape[:-1], c)
    observed = model.posterior(X, observation_noise=True, **totals(name, shape[-2]))
    assert isinstance(observed, ObservationPosterior) == (name not in CONJUGATE)
    assert observed.mean.shape == observed.variance.shape == (*shape[:-1], 1)
    assert observed.rsample(torch.Size([7])).shape == (7, *shape[:-1], 1)
    assert model.num_outputs == c
    assert model.batch_shape == EMPTY


@all_likelihoods
def test_batches_are_independent_models(name: str) -> None:
    X = make_inputs(3, 10, 2)
    Y, arguments = observe(name, X)[0], CASES[name].arguments(10)
    modules = {"covar_module": make_kernel(), "mean_module": make_mean()}
    modules |= {"likelihood": CASES[name].make(), "likelihood_arguments": arguments}
    batched, test = SequentialGP(X, Y, **modules), make_inputs(5, 2)
    assert batched.batch_shape == (3,)
    posterior = batched.posterior(test)
    for k in range(3):
        single = SequentialGP(X[k], Y[k], **modules).posterior(test)
        assert_close(posterior.mean[k], single.mean)
        assert_close(posterior.distribution.covariance_matrix[k], single.covariance_matrix)


@all_likelihoods
def test_one_point_moves_the_posterior(name: str) -> None:
    train = data(name, n=1)
    model = train.model()
    before, after = make_kernel()(train.X).diagonal(), model.posterior(train.X)
    assert after.mean.isfinite().all()
    assert (after.variance < before).all()


@all_likelihoods
def test_repeated_inputs(name: str) -> None:
    train = data(name, n=6)
    X, Y = train.X.repeat(3, 1), train.Y.repeat(3, 1)
    arguments = {key: value.repeat(3) for key, value in train.arguments.items()}
    model = train._replace(X=X, Y=Y, arguments=arguments).model()
    fewer = train._replace(X=X, Y=Y, arguments=arguments).model(inducing_points=train.X)
    test = make_inputs(5, 2)
    # The copies of a point share its jitter: its posterior is that of one inducing point.
    assert_same(model.posterior(test), fewer.posterior(test))
    assert model.posterior(X).rsample().isfinite().all()


def test_counts_out_of_a_total_are_repeated_trials() -> None:
    X, likelihood = make_inputs(4, 2), BinomialLikelihood()
    totals, counts = torch.tensor([3.0, 1.0, 2.0, 4.0]), torch.tensor([2.0, 0.0, 1.0, 4.0])
    trials = torch.cat([torch.arange(t) < c for t, c in zip(totals, counts, strict=True)])
    modules = {"covar_module": make_kernel(), "mean_module": make_mean(), "inducing_points": X}
    model = SequentialGP(
        X,
        counts.unsqueeze(-1),
        likelihood=likelihood,
        likelihood_arguments={"total_count": totals},
        **modules,
    )
    single = SequentialGP(
        X.repeat_interleave(totals.long(), 0),
        trials.to(X).unsqueeze(-1),
        likelihood=BinomialLikelihood(total_count=1),
        **modules,
    )
    test = make_inputs(5, 2)
    assert_same(model.posterior(test), single.posterior(test))


@all_likelihoods
def test_float32(name: str) -> None:
    train, test = data(name), make_inputs(5, 2)
    arguments = {key: value.float() for key, value in train.arguments.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("error", NumericalWarning)  # that the sites have not converged
        single = train._replace(X=train.X.float(), Y=train.Y.float(), arguments=arguments).model()
    posterior = single.posterior(test.float())
    assert posterior.mean.dtype == posterior.variance.dtype == torch.float32
    # The relative jitter of float32 is 1e-5, and quadrature amplifies its rounding.
    assert_same(posterior, train.model().posterior(test), tol=2e-3)
    fantasy = single.condition_on_observations(
        train.X[:1].float(),
        train.Y[:1].float(),
        **conditioning({k: v[:1] for k, v in arguments.items()}),
    )
    assert fantasy.posterior(test.float()).mean.dtype == torch.float32


# -------------------------------------------------------------------- defaults


@pytest.mark.parametrize("outputs", [1, 2])
@pytest.mark.parametrize("fixed_noise", [False, True], ids=["inferred", "fixed"])
def test_default_modules_are_those_of_botorch(outputs: int, fixed_noise: bool) -> None:
    X, Y = make_inputs(8, 3), torch.randn(8, outputs)
    Y = (Y - Y.mean(0)) / Y.std(0)
    arguments = {"train_Yvar": torch.full_like(Y, 0.1)} if fixed_noise else {}
    ours = SequentialGP(X, Y, **arguments)
    exact = SingleTaskGP(X, Y, outcome_transform=None, **arguments)
    expected = {name: (p.shape, p.dtype) for name, p in exact.named_parameters()}
    actual = {name: (p.shape, p.dtype) for name, p in ours.named_parameters()}
    assert actual == expected
    priors = [[(n, repr(p)) for n, _, p, *_ in m.named_priors()] for m in (ours, exact)]
    assert priors[0] == priors[1]
    assert_same(ours.posterior(X), exact.eval().posterior(X), tol=1e-5)  # smoother: more jitter


def test_default_inducing_points() -> None:
    few, many = make_inputs(7, 2), make_inputs(ALL_INPUTS + 20, 2)
    assert torch.equal(inducing_points(few), few)
    assert torch.equal(inducing_points(many[:200]), many[:200])
    chosen = inducing_points(many)
    assert chosen.shape == (DEFAULT_LIMIT, 2)
    assert is_subset(chosen, many)


@unscaled
@pytest.mark.parametrize("name", ["one output", "two outputs", "softmax"])
@pytest.mark.parametrize("batch_shape", [EMPTY, torch.Size([2])], ids=["", "batch"])
def test_number_of_inducing_points(batch_shape: torch.Size, name: str) -> None:
    X = make_inputs(*batch_shape, 20, 2)
    Y = X[..., :1].round() if name == "softmax" else X.sin()
    Y = Y[..., :1] if name == "one output" else Y
    likelihood = CASES["softmax"].make() if name == "softmax" else None
    model = SequentialGP(X, Y, likelihood=likelihood, inducing_points=5)
    chosen = model.variational_strategy.inducing_points.reshape(*batch_shape, 5, 2)
    assert is_subset(chosen, X)
    assert (torch.cdist(chosen, chosen) + torch.eye(5) > 0).all()
    assert model.posterior(make_inputs(3, 2)).mean.shape == (*batch_shape, 3, model.num_outputs)
    assert torch.equal(inducing_points(X, 50), X)


@pytest.mark.parametrize("batch_shape", [EMPTY, torch.Size([2])], ids=["", "batch"])
def test_inducing_points_that_would_add_nothing(batch_shape: torch.Size) -> None:
    """With a smooth kernel on a line, a few points explain all: no more of them are chosen."""
    X = make_inputs(*batch_shape, 120, 1)
    model = SequentialGP(
        X, (6 * X).sin(), covar_module=RBFKernel(), inducing_points=100, outcome_transform=None
    )
    number = model.variational_strategy.inducing_points.shape[-2]
    assert 3 < number < 20
    K = model.covar_module(X).to_dense()
    noise = model.likelihood.noise.unsqueeze(-1) * torch.eye(X.shape[-2])
    exact = K @ torch.linalg.solve(K + noise, (6 * X).sin())
    assert_close(model.posterior(X).mean, exact, 1e-4)


def test_given_inducing_points() -> None:
    X, Z = make_inputs(20, 2), make_inputs(4, 2)
    assert torch.equal(inducing_points(X, Z), Z)


@pytest.mark.parametrize("learn", [True, False, None])
def test_whether_inducing_points_are_a_parameter(learn: bool | None) -> None:
    names = dict(data("bernoulli").model(learn_inducing_points=learn).named_parameters())
    assert ("variational_strategy.inducing_points" in names) == (learn is True)


def test_no_data_is_the_prior() -> None:
    X, Z = torch.empty(0, 2), make_inputs(4, 2)
    kernel, mean = make_kernel(), make_mean()
    model = SequentialGP(
        X,
        torch.empty(0, 1),
        likelihood=BernoulliLikelihood(),
        inducing_points=Z,
        covar_module=kernel,
        mean_module=mean,
    )
    test = make_inputs(5, 2)
    assert_close(model.posterior(test).mean.squeeze(-1), mean(test))
    assert_close(model.posterior(test).covariance_matrix, kernel(test).to_dense())
    seen = model.condition_on_observations(test[:1], torch.ones(1, 1))
    assert seen.posterior(test[:1]).mean > model.posterior(test[:1]).mean


def inducing_points(X: Tensor, number: Tensor | int | None = None) -> Tensor:
    model = SequentialGP(X, X[..., :1].sin(), covar_module=make_kernel(0.2), inducing_points=number)
    return model.variational_strategy.inducing_points


def is_subset(few: Tensor, many: Tensor) -> bool:
    """Whether all points of the one set are in the other, batch by batch."""
    return bool((few.unsqueeze(-2) == many.unsqueeze(-3)).all(-1).any(-1).all())


# -------------------------------------------------------------------- what is refused

X, Y = torch.linspace(0, 1, 8, dtype=torch.float64).reshape(4, 2), torch.ones(4, 1)
NAN = torch.full((4, 1), torch.nan)


#: What is given instead of the good arguments, and what is said about it.
BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "X vector": ({"train_X": X[:, 0]}, ValueError, r"train_X: expected shape \.\.\. x n x d"),
    "X integer": ({"train_X": X.long()}, TypeError, "train_X: expected torch.float64"),
    "X list": ({"train_X": X.tolist()}, TypeError, r"train_X: expected a torch\.Tensor, got list"),
    "X infinite": ({"train_X": X / 0}, ValueError, "train_X: expected finite numbers, got 8"),
    "Y list": ({"train_Y": Y.tolist()}, TypeError, r"train_Y: expected a torch\.Tensor, got list"),
    "Y vector": ({"train_Y": Y[:, 0]}, ValueError, r"train_Y: expected shape 4 x m .*got \(4,\)"),
    "Y rows": ({"train_Y": Y[:3]}, ValueError, r"train_Y: expected shape 4 x m .*got \(3, 1\)"),
    "Y columns": ({"train_Y": Y[:, :0]}, ValueError, r"expected shape 4 x m .*got \(4, 0\)"),
    "Y nan": ({"train_Y": NAN}, ValueError, "train_Y: expected finite numbers, got 4 NaN"),
    "no data": (
        {"train_X": X[:0], "train_Y": Y[:0]},
        ValueError,
        "train_X: without data, pass inducing_points as a tensor",
    ),
    "no Z": ({"inducing_points": 0}, ValueError, "inducing_points: expected at least one, got 0"),
    "empty Z": (
        {"inducing_points": X[:0]},
        ValueError,
        "inducing_points: expected at least one point",
    ),
    "bernoulli": (
        {"train_Y": 2 * Y, "likelihood": BernoulliLikelihood()},
        ValueError,
        "train_Y: 2 is not a possible observation of BernoulliLikelihood: labels must be 0 or 1",
    ),
    "bernoulli signs": (
        {"train_Y": -Y, "likelihood": BernoulliLikelihood()},
        ValueError,
        r"turn -1/\+1 labels into 0/1 with \(y \+ 1\) / 2",
    ),
    "poisson": (
        {"train_Y": Y + 0.5, "likelihood": PoissonLikelihood()},
        ValueError,
        r"train_Y: 1\.5 is not a possible observation of PoissonLikelihood",
    ),
    "beta": (
        {"likelihood": BetaLikelihood()},
        ValueError,
        "train_Y: 1 is not a possible .* strictly between 0 and 1",
    ),
    "binomial": (
        {"train_Y": 3 * Y, "likelihood": BinomialLikelihood(total_count=2)},
        ValueError,
        "train_Y: 3 is not a possible observation of BinomialLikelihood",
    ),
    "ordinal": (
        {"train_Y": 3 * Y, "likelihood": OrdinalLikelihood(3)},
        ValueError,
        "train_Y: 3 is not a possible observation of OrdinalLikelihood",
    ),
    "softmax": (
        {"train_Y": 3 * Y, "likelihood": SoftmaxLikelihood(3, 3, mixing_weights=False)},
        ValueError,
        "train_Y: 3 is not a possible observation of SoftmaxLikelihood",
    ),
    "softmax columns": (
        {"train_Y": Y.expand(4, 3), "likelihood": SoftmaxLikelihood(3, 3)},
        ValueError,
        "train_Y: SoftmaxLikelihood takes one column of targets, got 3",
    ),
}


@pytest.mark.parametrize("case", list(BAD))
def test_bad_arguments(case: str) -> None:
    arguments, error, message = BAD[case]
    with pytest.raises(error, match=message):
        SequentialGP(**{"train_X": X, "train_Y": Y, "covar_module": RBFKernel(), **arguments})


def test_bad_noise_of_observations() -> None:
    with pytest.raises(ValueError, match="noise variances are for Gaussian likelihoods"):
        data("poisson").model().posterior(make_inputs(3, 2), observation_noise=torch.ones(3, 1))


@pytest.mark.filterwarnings("ignore:GaussianLikelihoodWithMissingObs:DeprecationWarning")
def test_missing_targets() -> None:
    """Without weight: the model of all the others."""
    X = make_inputs(12, 2)
    Y = torch.sin(5 * X).sum(-1, keepdim=True)
    seen = torch.arange(12) % 3 > 0
    some = SequentialGP(
        X,
        Y.masked_fill(~seen.unsqueeze(-1), torch.nan),
        likelihood=GaussianLikelihoodWithMissingObs(),
        inducing_points=X,
    )
    rest = SequentialGP(
        X[seen], Y[seen], likelihood=GaussianLikelihoodWithMissingObs(), inducing_points=X
    )
    assert_same(*(model.posterior(make_inputs(5, 2)) for model in (some, rest)))


def test_data_that_require_grad() -> None:
    """They are learnt from without their graph, which is theirs and can still be used."""
    X, Y = make_inputs(12, 2), torch.sin(5 * make_inputs(12, 2)).sum(-1, keepdim=True)
    leaf = X.clone().requires_grad_()
    inputs, targets = 1.0 * leaf, Y + 0 * leaf[:, :1]
    noise = (0.1 + 0 * leaf[:, :1]).detach().requires_grad_()
    model = SequentialGP(inputs[:8], targets[:8], noise[:8], covar_module=RBFKernel())
    plain = SequentialGP(X[:8], Y[:8], noise[:8].detach(), covar_module=RBFKernel())
    test = make_inputs(3, 2)
    assert_same(*(each.posterior(test) for each in (model, plain)))
    model.update(inputs[8:10], targets[8:10], noise=noise[8:10], steps=2)
    plain.update(X[8:10], Y[8:10], noise=noise[8:10].detach(), steps=2)
    assert_same(*(each.posterior(test) for each in (model, plain)))
    assert not any(t.requires_grad for t in (*model.train_inputs, model.train_targets))
    copy.deepcopy(model)
    known = model.condition_on_observations(inputs[10:], targets[10:], noise=noise[10:])
    gradient = torch.autograd.grad(known.posterior(test).mean.sum(), leaf)[0]
    assert gradient[10:].abs().min() > 0  # observations on top keep their graph
    assert gradient[:10].abs().max() == 0


def test_gaussian_likelihoods_with_noise_of_their_own() -> None:
    """They would be learnt with another noise than they have."""

    class Louder(GaussianLikelihood):
        def _shaped_noise_covar(self, *args: Any, **kwargs: Any) -> Any:
            return 5 * super()._shaped_noise_covar(*args, **kwargs)

    X = make_inputs(6, 2)
    with pytest.raises(ValueError, match="Louder overrides _shaped_noise_covar of a Gaussian"):
        SequentialGP(X, X[:, :1], likelihood=Louder())

"""Where `SequentialGP` and BoTorch's classes differ: what only one of them can do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from botorch.acquisition import qKnowledgeGradient, qMaxValueEntropy
from botorch.exceptions.errors import UnsupportedError
from botorch.models import ModelListGP, SingleTaskGP, SingleTaskVariationalGP
from botorch.models.likelihoods.sparse_outlier_noise import SparseOutlierGaussianLikelihood
from botorch.models.transforms import Standardize
from botorch.models.transforms.input import InputPerturbation
from botorch.sampling import SobolQMCNormalSampler
from botorch.sampling.pathwise import draw_matheron_paths
from gpytorch.likelihoods import (
    BernoulliLikelihood,
    GaussianLikelihood,
    PoissonLikelihood,
    SoftmaxLikelihood,
)
from gpytorch.likelihoods.noise_models import HomoskedasticNoise
from gpytorch.mlls import VariationalELBO
from torch import Tensor

from seqgp import SequentialGP
from tests.helpers import latent, make_inputs


def inputs(n: int = 8) -> Tensor:
    return make_inputs(n, 2)


def targets(n: int = 8, outputs: int = 1) -> Tensor:
    return torch.stack([latent(inputs(n) + 0.3 * k) for k in range(outputs)], -1)


def labels(n: int = 8) -> Tensor:
    return (targets(n) > 0).to(targets(n))


def sampler() -> SobolQMCNormalSampler:
    return SobolQMCNormalSampler(torch.Size([2]), seed=0)


def noisy_list(kind: Any) -> Any:
    models = ModelListGP(kind(inputs(), targets()), kind(inputs(), targets(outputs=2)))
    return models.posterior(inputs(3), observation_noise=torch.full((3, 3), 0.1))


def classifier(kind: Any) -> Any:
    return kind(inputs(), labels(), likelihood=BernoulliLikelihood())


class Beyond(NamedTuple):
    """What `SequentialGP` can do and one of BoTorch's classes cannot.

    Attributes:
        theirs: That class.
        error: What it raises.
        do: Does it with either of them.
    """

    theirs: Any
    error: type[Exception]
    do: Callable[[Any], Any]


#: In the words of the documentation.
BEYOND: dict[str, Beyond] = {
    "posterior of one of several outputs, `output_indices=[1]`": Beyond(
        SingleTaskGP,
        ValueError,
        lambda kind: kind(inputs(), targets(outputs=2)).posterior(inputs(3), output_indices=[1]),
    ),
    "`ModelListGP` of models with several outputs and given noise": Beyond(
        SingleTaskGP, IndexError, noisy_list
    ),
    "condition on observations before the first prediction": Beyond(
        SingleTaskGP,
        RuntimeError,
        lambda kind: kind(inputs(), targets()).condition_on_observations(
            inputs(2) + 0.1, targets(2)
        ),
    ),
    "condition on observations with a one-to-many transform": Beyond(
        SingleTaskGP,
        RuntimeError,
        lambda kind: _predicted(
            kind(
                inputs(),
                targets(),
                input_transform=InputPerturbation(torch.tensor([[0.0, 0.0], [0.1, 0.1]])),
            )
        ).condition_on_observations(inputs(2) + 0.1, targets(2)),
    ),
    "condition a sparse GP on observations": Beyond(
        SingleTaskVariationalGP,
        AttributeError,
        lambda kind: kind(inputs(), targets()).condition_on_observations(
            inputs(2) + 0.1, targets(2)
        ),
    ),
    "fantasise labels": Beyond(
        SingleTaskVariationalGP,
        AttributeError,
        lambda kind: classifier(kind).fantasize(inputs(2), sampler()),
    ),
    "`qKnowledgeGradient` of a classifier": Beyond(
        SingleTaskVariationalGP,
        AttributeError,
        lambda kind: qKnowledgeGradient(classifier(kind), num_fantasies=2)(inputs(3)),
    ),
    "samples of observations of a likelihood that is not Gaussian": Beyond(
        SingleTaskVariationalGP,
        NotImplementedError,
        lambda kind: classifier(kind).posterior(inputs(3), observation_noise=True).rsample(),
    ),
    "select outputs of a sparse GP": Beyond(
        SingleTaskVariationalGP,
        NotImplementedError,
        lambda kind: kind(inputs(), targets(outputs=2)).subset_output([1]),
    ),
    "pathwise samples of a sparse GP with several outputs": Beyond(
        SingleTaskVariationalGP,
        AttributeError,
        lambda kind: draw_matheron_paths(kind(inputs(), targets(outputs=2)), torch.Size([2]))(
            inputs(3)
        ),
    ),
    "`VariationalELBO(model.likelihood, model, ...)` without `.model`": Beyond(
        SingleTaskVariationalGP,
        RuntimeError,
        lambda kind: _elbo(kind(inputs(), targets())),
    ),
    "learn from more data, `update`": Beyond(
        SingleTaskGP,
        AttributeError,
        lambda kind: kind(inputs(), targets()).update(inputs(2) + 0.1, targets(2), steps=1),
    ),
}


def _predicted(model: Any) -> Any:
    """The model, after a prediction."""
    model.posterior(inputs(2))
    return model


def _elbo(model: Any) -> Any:
    mll = VariationalELBO(model.likelihood, model, num_data=8)
    return mll.model.variational_strategy.kl_divergence()


class Refusal(NamedTuple):
    """What raises an error.

    Attributes:
        do: Does it.
        error: The type of the error.
        message: What its message says, a pattern.
        instead: What to do instead; shown in the documentation.
    """

    do: Callable[[], Any]
    error: type[Exception]
    message: str
    instead: str


def _softmax(batch: bool = False) -> SequentialGP:
    shape = (2,) if batch else ()
    Y = (torch.arange(8.0) % 3).reshape(8, 1).expand(*shape, 8, 1)
    likelihood = SoftmaxLikelihood(num_classes=3, mixing_weights=False)
    return SequentialGP(inputs().expand(*shape, 8, 2), Y, likelihood=likelihood)


def _model_of_sums() -> SequentialGP:
    pairs = inputs().reshape(4, 2, 2)
    return SequentialGP(pairs, targets(4), coefficients=torch.ones(4, 2))


def _taught_observations() -> SequentialGP:
    """A model with standardised targets, after a training loop with others."""
    model = SequentialGP(inputs(), 100 + 50 * targets(), likelihood=GaussianLikelihood())
    optimizer = torch.optim.Adam(model.likelihood.parameters(), lr=0.01)
    mll = VariationalELBO(model.likelihood, model, num_data=8)
    for _ in range(30):
        (-mll(model(inputs()), 100 + 50 * targets().squeeze(-1))).backward()
        optimizer.step()
    return model


#: In the words of the documentation.
REFUSED: dict[str, Refusal] = {
    "a joint distribution of labels or counts, and what asks for it (`qMaxValueEntropy`, "
    "`ModelListGP`)": Refusal(
        lambda: qMaxValueEntropy(classifier(SequentialGP), make_inputs(5, 2))(make_inputs(3, 1, 2)),
        UnsupportedError,
        "not jointly Gaussian",
        "an acquisition function of the latent function or of samples; a `ModelList`",
    ),
    "noise variances for likelihoods that are not Gaussian": Refusal(
        lambda: SequentialGP(inputs(), torch.ones(8, 1), likelihood=PoissonLikelihood()).posterior(
            inputs(2), observation_noise=torch.ones(2, 1)
        ),
        ValueError,
        "noise variances are for Gaussian",
        "`observation_noise=True`",
    ),
    "latents of one likelihood, one by one": Refusal(
        lambda: _softmax().subset_output([1]),
        ValueError,
        "latent functions of a likelihood cannot be separated",
        "all of them, `posterior(X).mean[..., 1]`",
    ),
    "some outputs of a conditioned model": Refusal(
        lambda: (
            SequentialGP(inputs(), targets(outputs=2))
            .condition_on_observations(inputs(1), targets(1, 2))
            .subset_output([1])
        ),
        ValueError,
        "select the outputs first",
        "`subset_output`, then condition",
    ),
    "updates and fits of a conditioned model": Refusal(
        lambda: (
            SequentialGP(inputs(), targets())
            .condition_on_observations(inputs(1), targets(1))
            .update(inputs(1), targets(1))
        ),
        RuntimeError,
        "conditioned",
        "those of the model that it came from, or condition further",
    ),
    "pathwise samples of a batch of models with several latents each": Refusal(
        lambda: draw_matheron_paths(_softmax(batch=True), torch.Size([2])),
        NotImplementedError,
        "batch of models with several latents",
        "`posterior(X).rsample()`",
    ),
    "a stream with a `SparseOutlierGaussianLikelihood`": Refusal(
        lambda: SequentialGP(
            inputs(),
            targets(),
            likelihood=SparseOutlierGaussianLikelihood(HomoskedasticNoise(), dim=8),
        ).update(inputs(1), targets(1)),
        ValueError,
        "looks for outliers among the observations that the model was built with",
        "`StudentTLikelihood`, or a new model",
    ),
    "a training loop that was given observations instead of `train_targets`": Refusal(
        lambda: _taught_observations().posterior(inputs()),
        RuntimeError,
        r"Pass model\.train_targets",
        "`model.train_targets`, or `outcome_transform=None`",
    ),
    "calling a model of comparisons or sums in a training loop": Refusal(
        lambda: _model_of_sums().train()(inputs()),
        RuntimeError,
        r"fit_gpytorch_mll, .*model\.bound\(\)",
        "`fit_gpytorch_mll`, or `model.bound()`",
    ),
    "an outcome transform of labels and counts": Refusal(
        lambda: SequentialGP(
            inputs(),
            labels(),
            likelihood=BernoulliLikelihood(),
            outcome_transform=Standardize(1),
        ),
        ValueError,
        "outcome_transform",
        "none",
    ),
}

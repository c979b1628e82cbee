"""Every tensor follows its inputs: as `tests/test_devices.py`, for the BoTorch model."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from botorch.acquisition import qKnowledgeGradient
from botorch.acquisition.objective import ScalarizedPosteriorTransform
from botorch.fit import fit_gpytorch_mll
from botorch.models.transforms import Normalize
from botorch.sampling import MCSampler, SobolQMCNormalSampler
from torch import Tensor

from seqgp import DualELBO, SequentialGP
from seqgp.acquisition import qNegIntegratedPosteriorVariance
from tests.helpers import assert_close, make_inputs
from tests.models.helpers import data, observe

pytestmark = pytest.mark.usefixtures("float64")


class Setting:
    """A model and all that is done with it, made before the default device changes."""

    def __init__(self, name: str) -> None:
        transform = Normalize(2, bounds=torch.tensor([[0.0, 0.0], [1.0, 1.0]]))
        self.model: SequentialGP = data(name).model(inducing_points=6, input_transform=transform)
        self.X, self.test = make_inputs(3, 2, 2), make_inputs(4, 2)
        self.Y = observe(name, self.X)[0]
        self.sampler: MCSampler = SobolQMCNormalSampler(torch.Size([4]), seed=0)
        self.sampler(self.model.posterior(self.X, observation_noise=True))  # draws base samples
        weights = torch.ones(self.model.num_outputs)
        self.scalarize = ScalarizedPosteriorTransform(weights)

    def moments(self, model: SequentialGP | None = None, observed: bool = False) -> Tensor:
        model = self.model if model is None else model
        posterior = model.posterior(self.test, observation_noise=observed)
        return torch.cat([posterior.mean, posterior.variance], -1)

    def elbo(self) -> Tensor:
        model = self.model.train()
        mll = DualELBO(model.likelihood, model)
        mll(model(*model.train_inputs), model.train_targets).backward()
        gradients = [p.grad.flatten() for p in model.parameters() if p.requires_grad]
        return torch.cat(gradients)

    def fit(self, **kwargs: int) -> Tensor:
        options = {"options": {"maxiter": 1}}
        mll = DualELBO(self.model.likelihood, self.model)
        fit_gpytorch_mll(mll, optimizer_kwargs=options, **kwargs)
        return self.moments()

    def fantasies(self) -> Tensor:
        X = self.X.clone().requires_grad_()
        self.moments(self.model.fantasize(X, self.sampler)).sum().backward()
        return X.grad

    def knowledge_gradient(self) -> Tensor:
        acquisition = qKnowledgeGradient(
            self.model, 4, self.sampler, posterior_transform=self.scalarize
        )
        return acquisition(self.X.repeat(1, 3, 1))

    def active_learning(self) -> Tensor:
        return qNegIntegratedPosteriorVariance(
            self.model, self.test, sampler=self.sampler, posterior_transform=self.scalarize
        )(self.X)


ACTIONS: dict[str, Callable[[Setting], Tensor]] = {
    "posterior": Setting.moments,
    "observations": lambda setting: setting.moments(observed=True),
    "condition": lambda setting: setting.moments(
        setting.model.condition_on_observations(setting.X, setting.Y)
    ),
    "fantasies": Setting.fantasies,
    "elbo": Setting.elbo,
    "fit": Setting.fit,
    "fit, minibatches": lambda setting: setting.fit(batch_size=4, epochs=1),
    "knowledge gradient": Setting.knowledge_gradient,
    "active learning": Setting.active_learning,
}


@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("name", ["gaussian", "bernoulli", "poisson", "softmax"])
def test_nothing_is_made_on_the_default_device(
    name: str, action: str, meta: Callable[[], None]
) -> None:
    expected = ACTIONS[action](Setting(name)).detach()
    setting = Setting(name)
    meta()
    actual = ACTIONS[action](setting).detach()
    assert actual.device == torch.device("cpu")
    assert_close(actual, expected, 1e-12)

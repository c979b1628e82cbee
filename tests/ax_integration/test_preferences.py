"""Ax learns a utility from comparisons with our model, in one line."""

from __future__ import annotations

import pytest
import torch
from ax.adapter.torch import TorchAdapter
from ax.core.auxiliary import AuxiliaryExperiment, AuxiliaryExperimentPurpose
from ax.core.experiment import Experiment
from ax.core.objective import Objective
from ax.core.optimization_config import PreferenceOptimizationConfig
from ax.core.search_space import SearchSpaceDigest
from ax.generators.torch.botorch_modular.generator import BoTorchGenerator
from ax.generators.torch.botorch_modular.surrogate import Surrogate, SurrogateSpec
from ax.generators.torch.botorch_modular.utils import ModelConfig
from ax.utils.testing.preference_stubs import get_pbo_experiment
from botorch.models import ModelListGP, PairwiseGP
from botorch.utils.containers import SliceContainer
from botorch.utils.datasets import RankingDataset

from seqgp import DualELBO, PreferenceGP
from seqgp.ax import preference_spec
from tests.helpers import unscaled

pytestmark = pytest.mark.usefixtures("float64")


def test_surrogate_of_comparisons() -> None:
    """It has to be given by metric: for comparisons Ax ignores ``model_configs``."""
    torch.manual_seed(0)
    X = torch.rand(24, 2)
    pairs, utility = torch.arange(24).reshape(12, 2), X.sum(-1)
    won = utility[pairs[:, :1]] > utility[pairs[:, 1:]]
    data = RankingDataset(
        X=SliceContainer(
            values=X, indices=torch.where(won, pairs, pairs.flip(-1)), event_shape=torch.Size([4])
        ),
        Y=torch.tensor([[0, 1]]).expand(12, 2),
        feature_names=["a", "b"],
        outcome_names=["utility"],
    )
    space = SearchSpaceDigest(feature_names=["a", "b"], bounds=[(0.0, 1.0)] * 2)
    ours = [ModelConfig(botorch_model_class=PreferenceGP, mll_class=DualELBO)]
    surrogate = Surrogate(surrogate_spec=SurrogateSpec(metric_to_model_configs={"utility": ours}))
    surrogate.fit(datasets=[data], search_space_digest=space)
    model = surrogate.model
    if isinstance(model, ModelListGP):
        (model,) = model.models
    assert type(model) is PreferenceGP
    mean, _ = surrogate.predict(X)
    assert torch.stack([mean.flatten(), utility]).corrcoef()[0, 1] > 0.9
    ignored = Surrogate(surrogate_spec=SurrogateSpec(model_configs=ours))
    ignored.fit(datasets=[data], search_space_digest=space)
    assert type(ignored.model) is PairwiseGP


def adapter_of(experiment: Experiment) -> TorchAdapter:
    """The one line that a user changes is the last argument."""
    return TorchAdapter(
        experiment=experiment,
        data=experiment.lookup_data(),
        fit_tracking_metrics=False,
        generator=BoTorchGenerator(surrogate_spec=preference_spec()),
    )


def test_preferential_optimization() -> None:
    """Arms are compared, and nothing else is measured: Ax asks for the next pair."""
    experiment = get_pbo_experiment(num_experimental_metrics=0, num_experimental_trials=0)
    adapter = adapter_of(experiment)
    (model,) = adapter.generator.surrogate.model.models
    assert type(model) is PreferenceGP
    assert len(model.comparisons) == 8
    (arm, other) = adapter.gen(n=2).arms
    assert arm.parameters != other.parameters
    assert all(10 <= float(value) <= 30 for value in arm.parameters.values())  # type: ignore


@unscaled
def test_preference_exploration() -> None:
    """Outcomes of an experiment are compared in an auxiliary one, and the utility is optimised."""
    outcomes = ["metric1", "metric2"]
    compared = get_pbo_experiment(
        num_parameters=2,
        num_experimental_metrics=0,
        parameter_names=outcomes,
        num_experimental_trials=0,
        unbounded_search_space=True,
        experiment_name="compared",
    )
    objective = Objective(
        expression=", ".join(outcomes), metric_name_to_signature={name: name for name in outcomes}
    )
    experiment = get_pbo_experiment(
        num_experimental_metrics=2,
        tracking_metric_names=outcomes,
        num_experimental_trials=4,
        num_preference_trials=0,
        num_preference_trials_w_repeated_arm=0,
        optimization_config=PreferenceOptimizationConfig(
            objective=objective,
            preference_profile_name="compared",
        ),
    )
    experiment.add_auxiliary_experiment(
        purpose=AuxiliaryExperimentPurpose.PE_EXPERIMENT,
        auxiliary_experiment=AuxiliaryExperiment(experiment=compared),
    )
    adapter = adapter_of(experiment)
    assert len(adapter.generator.surrogate.model.models) == 2
    acquisition_input = adapter.generator.surrogate._submodels
    assert type(acquisition_input[("pairwise_pref_query",)]) is PreferenceGP
    assert len(adapter.gen(n=1).arms) == 1

"""Ax learns a utility from comparisons with our model, in one line."""

from __future__ import annotations

import pytest
import torch
from ax.core.search_space import SearchSpaceDigest
from ax.generators.torch.botorch_modular.surrogate import Surrogate, SurrogateSpec
from ax.generators.torch.botorch_modular.utils import ModelConfig
from botorch.models import ModelListGP, PairwiseGP
from botorch.utils.containers import SliceContainer
from botorch.utils.datasets import RankingDataset

from seqgp import DualELBO, PreferenceGP

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

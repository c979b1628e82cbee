"""Comparisons in Ax experiments: `PreferenceGP` in the place of `PairwiseGP`."""

from __future__ import annotations

from typing import Any

from ax.generators.torch.botorch_modular.surrogate import SurrogateSpec
from ax.generators.torch.botorch_modular.utils import ModelConfig
from ax.storage.botorch_modular_registry import register_mll, register_model
from ax.utils.common.constants import Keys
from botorch.models.transforms.input import Normalize

from seqgp.models.preference_gp import PreferenceGP
from seqgp.variational.elbo import DualELBO

register_model(PreferenceGP)
register_mll(DualELBO)


def preference_spec(*metrics: str, **options: Any) -> SurrogateSpec:
    """What Ax needs to learn comparisons with `PreferenceGP`.

    It goes where Ax takes a ``surrogate_spec``, for an experiment of which the only metric are
    comparisons, and for one with a `PreferenceOptimizationConfig`, whose other metrics are modelled
    as usual. Ax looks for models of comparisons by metric. With ``model_configs`` alone, it takes
    `PairwiseGP` for an auxiliary experiment.

    Args:
        metrics: The metrics that are comparisons; by default that of Ax, ``pairwise_pref_query``.
        options: Further options of Ax's `SurrogateSpec`.

    Example:
        >>> from seqgp.ax import preference_spec
        >>> spec = preference_spec()  # BoTorchGenerator(surrogate_spec=preference_spec())
        >>> list(spec.metric_to_model_configs)
        ['pairwise_pref_query']
    """
    names = metrics or (Keys.PAIRWISE_PREFERENCE_QUERY.value,)
    config = ModelConfig(
        botorch_model_class=PreferenceGP,
        mll_class=DualELBO,
        input_transform_classes=[Normalize],
    )
    return SurrogateSpec(metric_to_model_configs={name: [config] for name in names}, **options)

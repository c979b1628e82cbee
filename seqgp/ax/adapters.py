"""Ax's adapters, changed such that failed trials are not repeated."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

from ax.adapter.base import Adapter, GenResults
from ax.adapter.data_utils import ExperimentData
from ax.adapter.random import RandomAdapter
from ax.adapter.registry import (
    Cont_X_trans,
    GeneratorRegistryBase,
    GeneratorSetup,
    Mixed_transforms,
    Y_trans,
)
from ax.adapter.torch import TorchAdapter
from ax.core.arm import Arm
from ax.core.generator_run import GeneratorRun
from ax.core.observation import ObservationData, ObservationFeatures
from ax.core.optimization_config import OptimizationConfig
from ax.core.search_space import SearchSpace
from ax.core.trial_status import TrialStatus
from ax.exceptions.generation_strategy import GenerationStrategyRepeatedPoints
from ax.generators.random.sobol import SobolGenerator
from ax.generators.torch.botorch_modular.generator import BoTorchGenerator
from ax.generators.torch.botorch_modular.surrogate import Surrogate
from ax.storage.json_store.registry import CORE_DECODER_REGISTRY
from torch import Tensor

from seqgp.ax.internals import experiment_of
from seqgp.ax.transforms import VALIDITY

#: Attempts to find a candidate that has not failed before.
ATTEMPTS = 5


class InitialAdapter(RandomAdapter):
    """Quasi-random trials that do not repeat failed ones."""

    def _gen(  # type: ignore[override]
        self, n: int, search_space: Any, pending_observations: dict[str, Any], **kwargs: Any
    ) -> GenResults:
        # Ax avoids pending trials, but not failed ones.
        failed = [
            ObservationFeatures.from_arm(arm)
            for arm in _failed_arms(self).values()
            if self._search_space.check_membership(arm.parameters)
        ]
        for transform in self.transforms.values():
            failed = transform.transform_observation_features(failed)
        pending = {**pending_observations, VALIDITY: failed} if failed else pending_observations
        return super()._gen(n=n, search_space=search_space, pending_observations=pending, **kwargs)


class SequentialAdapter(TorchAdapter):
    """Models of metrics and validity, of which only the metrics are visible to Ax."""

    def gen(
        self,
        n: int,
        search_space: SearchSpace | None = None,
        optimization_config: OptimizationConfig | None = None,
        pending_observations: dict[str, list[ObservationFeatures]] | None = None,
        fixed_features: ObservationFeatures | None = None,
        model_gen_options: Any = None,
    ) -> GeneratorRun:
        """As in Ax, but without candidates that have failed before.

        Args:
            n: The number of candidates.
            search_space: As in Ax.
            optimization_config: As in Ax.
            pending_observations: As in Ax.
            fixed_features: As in Ax.
            model_gen_options: As in Ax.
        """
        failed = _failed_arms(self)
        for _ in range(ATTEMPTS):
            run = super().gen(
                n,
                search_space,
                optimization_config,
                pending_observations,
                fixed_features,
                model_gen_options,
            )
            if not any(arm.signature in failed for arm in run.arms):
                return run
        raise GenerationStrategyRepeatedPoints(f"All of {ATTEMPTS} candidates have failed before.")

    def _fit(
        self, search_space: SearchSpace, experiment_data: ExperimentData, **kwargs: Any
    ) -> None:
        known = {*self._experiment.metrics, *experiment_data.metric_signatures} - {VALIDITY}
        _check_metrics(self.generator, known)
        super()._fit(search_space, experiment_data, **kwargs)

    @property
    def botorch_surrogate(self) -> Surrogate:
        """All models, including the validity model."""
        assert isinstance(self.generator, BoTorchGenerator)
        return self.generator.surrogate

    def model_inputs(self, points: Sequence[Mapping[str, Any]]) -> Tensor:
        """Transform parameters to inputs of the models, ``n x d``.

        Args:
            points: Parameters by name, one mapping per trial.
        """
        features = [ObservationFeatures(parameters=dict(point)) for point in points]
        for transform in self.transforms.values():
            features = transform.transform_observation_features(features)
        return self._transform_observation_features(features)

    def _predict(self, *args: Any, **kwargs: Any) -> list[ObservationData]:
        return [_without_validity(data) for data in super()._predict(*args, **kwargs)]

    def _cross_validate(self, *args: Any, **kwargs: Any) -> list[ObservationData]:
        return [_without_validity(data) for data in super()._cross_validate(*args, **kwargs)]


def _check_metrics(generator: Any, known: set[str]) -> None:
    """Raise if likelihoods are given for metrics that are not part of the experiment.

    Args:
        generator: The generator, which has the options of the models.
        known: The metrics of the experiment.
    """
    spec = getattr(generator, "surrogate_spec", None)
    configs = {} if spec is None else spec.metric_to_model_configs
    totals = {c.model_options.get("total_count") for each in configs.values() for c in each}
    for name in configs:
        if name in known or name in totals or name == VALIDITY:
            continue
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
        hint = f"; did you mean {near[0]!r}?" if near else "."
        raise ValueError(
            f"likelihoods: expected metrics of the experiment, {', '.join(sorted(known))}; got "
            f"{name!r}{hint}"
        )


def _failed_arms(adapter: Adapter) -> dict[str, Arm]:
    """The arms of failed trials, by signature."""
    trials = experiment_of(adapter).trials_by_status[TrialStatus.FAILED]
    return {arm.signature: arm for trial in trials for arm in trial.arms}


def _without_validity(data: ObservationData) -> ObservationData:
    """Remove the predictions of validity."""
    keep = [i for i, name in enumerate(data.metric_signatures) if name != VALIDITY]
    return ObservationData(
        metric_signatures=[data.metric_signatures[i] for i in keep],
        means=data.means[keep],
        covariance=data.covariance[keep][:, keep],
    )


class SequentialGenerators(GeneratorRegistryBase):
    """The generators of `seqgp.ax.generation_strategy`, like Ax's own `Generators`."""

    INITIAL = "seqgp_Sobol"
    BOTORCH = "seqgp_BoTorch"

    @property
    def GENERATOR_KEY_TO_GENERATOR_SETUP(self) -> dict[str, GeneratorSetup]:
        """The adapters, generators and transforms."""
        return _SETUPS


_SETUPS = {
    "seqgp_Sobol": GeneratorSetup(
        adapter_class=InitialAdapter, generator_class=SobolGenerator, transforms=Cont_X_trans
    ),
    "seqgp_BoTorch": GeneratorSetup(
        adapter_class=SequentialAdapter,
        generator_class=BoTorchGenerator,
        transforms=[*Mixed_transforms, *Y_trans],
    ),
}

CORE_DECODER_REGISTRY["SequentialGenerators"] = SequentialGenerators
